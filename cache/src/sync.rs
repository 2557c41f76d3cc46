//! The concurrency primitives of this crate: the standard library's, or loom's under `cfg(loom)`.

// Reference counts are the standard library's, so that models spend no executions on them.
pub(crate) use std::sync::Arc;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
};

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence},
};

/// Locks a mutex whose data stay consistent at every step, so that a panic of another holder does not matter.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Waits for another thread that is about to finish a few instructions: spins, then offers it the core.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    turns: u32,
}

/// Turns before a waiter offers its core: the holder may not be running.
const SPINS_MAX: u32 = 100;

#[cfg(loom)]
const TURNS_EXPLORED: u32 = 3;

impl Spin {
    pub(crate) fn turn(&mut self) {
        #[cfg(loom)]
        {
            // Loom would try every order of waiting threads that wait on, for ever: they change nothing.
            if self.turns == TURNS_EXPLORED {
                loom::skip_branch();
            }
            loom::thread::yield_now();
        }
        #[cfg(not(loom))]
        if self.turns < SPINS_MAX {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
        self.turns = (self.turns + 1).min(SPINS_MAX);
    }

    /// False once the holder must have lost its core.
    pub(crate) fn is_short(&self) -> bool {
        self.turns < if cfg!(loom) { 2 } else { SPINS_MAX }
    }
}

/// A step that a model leaves out, to show that it would notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(loom), allow(dead_code, unreachable_pub, reason = "models name them, under loom"))]
pub enum Step {
    /// Of taking a frame's lock.
    LockFence,
    /// Of validating what was read.
    ValidateFence,
    /// Of upgrading: that the version is still the same.
    UpgradeCheck,
    /// Of queued writers: telling the next one that it is the first.
    PassOn,
    /// Of following a swizzled link: that the page there is a child of the parent, and the parent is as it was.
    ParentCheck,
    /// Of following a swizzled link to a child of the parent: that the parent is as it was.
    SameParent,
    /// Of a miss: registering for the wake-up in the same critical section that found the page loading.
    WakerUnderLock,
    /// Of a fetch: the page is there before those who wait for it are woken.
    StateBeforeWake,
    /// Of waiting for what is being fetched: what the caller has done before comes first.
    FetchedFence,
    /// Of a store that looks whether a page may be let in: that the page is on its way comes first.
    LookFence,
    /// Of evicting: that the page still cools since the version in hand.
    EvictionCheck,
    /// Of a snapshot: the page is clean from then on, not from the end of the write.
    CleanAtSnapshot,
    /// Of pinning.
    PinFence,
    /// Of cooling: that nobody has pinned the page.
    PinCheck,
    /// Of claiming a free frame: looking and taking in one step.
    ClaimAtOnce,
    /// Of claiming a free frame.
    ClaimFence,
    /// Of waiting for room.
    RoomFence,
    /// Of freeing a frame: those who wait for its lock are let through.
    Retirement,
    /// Of a bypass page's last user who writes it: that it is still there.
    BypassCheck,
    /// Of a bypass page's last user: looking at both flags at once.
    FlagsAtOnce,
    /// Of excluding a page: its entry.
    ExcludedEntry,
    /// Of excluding a page: looking for unlinked pages below it.
    UnlinkedFirst,
    /// Of publishing an unlinked page: that it is not below a page that is excluded.
    UnlinkedCheck,
    /// Of dropping a page that was changed in the store: waiting for a fetch of it.
    LoadingDropped,
    /// Of dropping all pages that may have changed in the store: waiting for one that is about to cool.
    CoolingDropped,
    /// Of dropping a page of which the store has a newer version: waiting for a fetch of it.
    FetchAwaited,
    /// Of a change that frees pages: unlocking the others first.
    FreedLast,
    /// Of swizzling a link: that nothing else has changed since the page was read.
    SameVersion,
    /// Of a fetch: that the link is still there once the page has its entry.
    LinkCheck,
    /// Of that: a bypass page that was freed has no links, though its words are there.
    FreedLinks,
    /// Of a change of several pages: having those written first that a flush is about to write.
    FlushedFirst,
    /// Of a flush: waiting for changes that do not know of it.
    ChangesEnd,
    /// Of looking whether a write has ended: acquiring what it did.
    WriteSeen,
    /// Of looking up a value: the version and the value of one entry.
    OneEntry,
    /// Of dropping a value: its bytes are given back by who has taken it out.
    TakenOut,
    /// Of putting a value: what others have put under its key meanwhile goes.
    OnePlace,
}

#[cfg(loom)]
std::thread_local! {
    // Loom runs all threads of a model on one real thread.
    static LEFT_OUT: std::cell::Cell<Option<Step>> = const { std::cell::Cell::new(None) };
}

/// Has the calling test's models leave a step out.
#[cfg(loom)]
pub(crate) fn leave_out(step: Option<Step>) {
    LEFT_OUT.set(step);
}

/// False but in models of what is broken.
#[inline(always)]
pub(crate) fn is_left_out(step: Step) -> bool {
    #[cfg(loom)]
    return LEFT_OUT.get() == Some(step);
    #[cfg(not(loom))]
    {
        let _ = step;
        false
    }
}
