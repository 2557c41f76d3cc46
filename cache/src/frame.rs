//! A frame: what the cache knows of one place for a page.
//!
//! Frames are type-stable: this memory is a frame for as long as the cache lives, so a reader with an old link finds a
//! lock word whose version tells it that the page has gone. Who may change what:
//!
//! - `state`, `page`, `level` and the body: the holder of the frame's lock. Free frames and those being loaded stay locked.
//! - `parent` and `slot`: the holder of the *parent's* lock, for it is the parent's link that they describe; while a frame
//!   is locked and not yet reachable, its own holder.
//! - `children`: the holder of this frame's lock.
//! - `pins`, `users`, `flags`: anyone, in single atomic steps, as said there.

use crate::{
    frame_lock::FrameLock,
    id::{PageId, SizeClass},
    sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, Step, fence, is_left_out},
};

/// No frame: index 0 is never used.
pub(crate) const NONE: u32 = 0;

/// What a frame is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// In no use yet, or waiting in somebody's free list; locked, but held by nobody.
    Free = 0,
    /// Held by one thread that will use it or give it back; locked.
    Held = 1,
    /// Its page is being read from the store; locked. It has a table entry, on which others wait.
    Loading = 2,
    /// Holds a page.
    Resident = 3,
    /// Holds a clean page that nothing but the table leads to, next to be evicted unless somebody touches it.
    Cooling = 4,
    /// Holds a page that was refused admission, for as long as it has users or is dirty.
    Bypass = 5,
    /// Held a bypass page that was freed; its users will notice, and the last one frees the frame.
    BypassFreed = 6,
}

impl State {
    const fn of(byte: u8) -> Self {
        match byte {
            0 => Self::Free,
            1 => Self::Held,
            2 => Self::Loading,
            3 => Self::Resident,
            4 => Self::Cooling,
            5 => Self::Bypass,
            _ => Self::BypassFreed,
        }
    }
}

/// The page differs from the store's copy.
const DIRTY: u32 = 1;
/// A snapshot of the page is on its way to the store.
const WRITING: u32 = 2;
/// Above the flags: how many flushes had begun when the oldest change was made that is not written, modulo 2^30; older if a
/// write has failed.
const SINCE_SHIFT: u32 = 2;
const OLD: u32 = 1 << 30;

#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Frame {
    pub(crate) lock: FrameLock,
    page: AtomicU64,
    /// The frame whose page holds the one swizzled link to this one's; [`NONE`] if there is no such link. Of a bypass page: the
    /// frame that is kept in place for it.
    parent: AtomicU32,
    /// Where in the parent's page that link was last seen: a hint.
    slot: AtomicU32,
    unit: AtomicU32,
    /// Swizzled links in this page.
    children: AtomicU32,
    /// Loads and bypass pages below this page: while there are any, it neither cools nor goes.
    pins: AtomicU32,
    /// Holders of a bypass page; changed under the lock of the table's shard.
    users: AtomicU32,
    flags: AtomicU32,
    /// How often the page is used; see [`crate::frequency`].
    pub(crate) frequency: AtomicU32,
    state: AtomicU8,
    level: AtomicU8,
    class: AtomicU8,
}

const _: () = assert!(cfg!(loom) || size_of::<Frame>() == 64);

impl Frame {
    /// Gives the frame a body. For the one who holds it, before anybody else can find it.
    pub(crate) fn found(&self, class: SizeClass, unit: u32) {
        // One that lost its body is locked already.
        let _ = self.lock.try_lock();
        self.class.store(class.index() as u8, Ordering::Relaxed);
        self.unit.store(unit, Ordering::Relaxed);
        self.state.store(State::Free as u8, Ordering::Release);
    }

    #[inline]
    pub(crate) fn page(&self) -> Option<PageId> {
        PageId::new(self.page.load(Ordering::Relaxed))
    }

    pub(crate) fn set_page(&self, page: Option<PageId>) {
        self.page.store(page.map_or(0, PageId::get), Ordering::Relaxed);
    }

    /// Relaxed: whoever acts on it holds the lock, validates a version that was read before, or looks again.
    #[inline]
    pub(crate) fn state(&self) -> State {
        State::of(self.state.load(Ordering::Relaxed))
    }

    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    /// Takes a free frame, for which several may compete: two lists can name it once a block has changed hands.
    pub(crate) fn claim(&self) -> bool {
        let (free, taken) = (State::Free as u8, State::Held as u8);
        let is_ours = if is_left_out(Step::ClaimAtOnce) {
            let is_free = self.state.load(Ordering::Acquire) == free;
            if is_free {
                self.state.store(taken, Ordering::Release);
            }
            is_free
        } else {
            self.state.compare_exchange(free, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        if is_ours && !is_left_out(Step::ClaimFence) {
            // Somebody else has locked it: a reader that sees what we write to the body sees that lock too.
            fence(Ordering::Release);
        }
        is_ours
    }

    #[inline]
    pub(crate) fn level(&self) -> u8 {
        self.level.load(Ordering::Relaxed)
    }

    pub(crate) fn set_level(&self, level: u8) {
        self.level.store(level, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn class(&self) -> SizeClass {
        SizeClass::from_index(usize::from(self.class.load(Ordering::Relaxed)).min(SizeClass::COUNT - 1))
    }

    #[inline]
    pub(crate) fn has_class(&self, class: SizeClass) -> bool {
        usize::from(self.class.load(Ordering::Relaxed)) == class.index()
    }

    #[inline]
    pub(crate) fn unit(&self) -> u32 {
        self.unit.load(Ordering::Relaxed)
    }

    pub(crate) fn parent(&self) -> u32 {
        self.parent.load(Ordering::Relaxed)
    }

    pub(crate) fn slot(&self) -> usize {
        self.slot.load(Ordering::Relaxed) as usize
    }

    pub(crate) fn set_parent(&self, parent: u32, slot: usize) {
        self.parent.store(parent, Ordering::Relaxed);
        self.slot.store(slot as u32, Ordering::Relaxed);
    }

    pub(crate) fn children(&self) -> u32 {
        self.children.load(Ordering::Relaxed)
    }

    pub(crate) fn set_children(&self, children: u32) {
        self.children.store(children, Ordering::Relaxed);
    }

    pub(crate) fn pins(&self) -> u32 {
        self.pins.load(Ordering::Relaxed)
    }

    pub(crate) fn pin(&self) {
        self.pins.fetch_add(1, Ordering::Relaxed);
    }

    /// Relaxed: what was done under the pin was done under locks, which whoever finds no pins takes after that.
    pub(crate) fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn users(&self) -> u32 {
        self.users.load(Ordering::Relaxed)
    }

    pub(crate) fn set_users(&self, users: u32) {
        self.users.store(users, Ordering::Relaxed);
    }

    /// Relaxed: set and cleared under the lock, or, when a write ends, before `WRITING` is, and whoever would act on a page that
    /// is not dirty looks at that first.
    pub(crate) fn is_dirty(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & DIRTY != 0
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.flags.load(Self::after_write()) & WRITING != 0
    }

    /// Who finds a write ended reads from the store what it wrote.
    fn after_write() -> Ordering {
        if is_left_out(Step::WriteSeen) { Ordering::Relaxed } else { Ordering::Acquire }
    }

    /// Whether the store has the page as it is: neither dirty nor being written. (A write that fails goes from one to the
    /// other, so they are looked at at once.)
    pub(crate) fn is_stored(&self) -> bool {
        if is_left_out(Step::FlagsAtOnce) {
            return !self.is_dirty() && !self.is_writing();
        }
        self.flags.load(Self::after_write()) & (DIRTY | WRITING) == 0
    }

    /// Whether a flush, the latest of so many, has to wait for the page: it is being written, or dirty since before.
    pub(crate) fn is_due(&self, flushes: u32) -> bool {
        let flags = self.flags.load(Self::after_write());
        let age = (flushes << SINCE_SHIFT).wrapping_sub(flags & !(DIRTY | WRITING)).cast_signed();
        flags & WRITING != 0 || (flags & DIRTY != 0 && age > 0)
    }

    /// Only under the frame's lock; so many flushes have begun.
    pub(crate) fn set_dirty(&self, flushes: u32) {
        if self.is_stored() {
            // Nobody else sets flags then.
            self.flags.store(flushes << SINCE_SHIFT | DIRTY, Ordering::Release);
        } else {
            self.flags.fetch_or(DIRTY, Ordering::AcqRel);
        }
    }

    pub(crate) fn set_clean(&self) {
        self.flags.fetch_and(!DIRTY, Ordering::AcqRel);
    }

    /// Dirty to writing, when a snapshot is taken; only under the frame's lock.
    pub(crate) fn begin_write(&self, flushes: u32) {
        let flags = if is_left_out(Step::CleanAtSnapshot) { DIRTY | WRITING } else { WRITING };
        self.flags.store(flushes << SINCE_SHIFT | flags, Ordering::Release);
    }

    /// A write that failed leaves the page dirty, and due for any flush.
    pub(crate) fn end_write(&self, is_written: bool) {
        if is_written && is_left_out(Step::CleanAtSnapshot) {
            self.set_clean();
        }
        let ended = |flags: u32| match is_written {
            true => flags & !WRITING,
            false => flags.wrapping_sub(OLD) & !WRITING | DIRTY,
        };
        let mut flags = self.flags.load(Ordering::Relaxed);
        while let Err(now) = self.flags.compare_exchange(flags, ended(flags), Ordering::AcqRel, Ordering::Relaxed) {
            flags = now;
        }
    }
}
