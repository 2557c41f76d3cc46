//! The optimistic lock of a frame, with a queue for its writers.
//!
//! ```text
//!  63         27 26       16 15          1     0
//! [ changes:37  |  moves:11 | last waiter | locked ]
//! ```
//!
//! Readers write nothing: they note the version, read, and look whether it is still the same and unlocked. Every change of
//! what a reader may see ends with a new version. Writers that know which version they want take the lock in one step or not
//! at all; a writer that wants the page as it is queues ([`FrameLock::lock`]). The queue is that of Mellor-Crummey and Scott
//! with its tail in the lock word, which is OptiQL's idea (Shi et al., SIGMOD 2024); its first waiter watches the lock word
//! and each other one a node of its own, so that a contended lock is handed on at the cost of one cache line, and readers get
//! in between two writers. Nodes belong to threads; a thread waits in one queue at a time and holds no lock when it joins one.
//!
//! A version counts apart what happened to the page's contents (*changes*) and what the cache did with it (*moves*: a link
//! swizzled, the page cooled, evicted, read in), so that a reader who comes too late can tell which it was. One comparison
//! checks both. Moves carry into changes: after 2048 of them a change is reported that there was not, never the other way
//! round. Changes wrap around after 2^37: a look at a page would have to be held for 38 hours of a million changes a second.

use crate::sync::{AtomicU32, AtomicU64, Ordering, Spin, Step, fence, is_left_out};

const LOCKED: u64 = 1;
const TAIL_SHIFT: u32 = 1;
const TAIL: u64 = 0x7fff << TAIL_SHIFT;
/// At the top, where what overflows is gone.
const VERSION: u64 = !(TAIL | LOCKED);
const MOVE: u64 = 1 << 16;
const CHANGE: u64 = 1 << 27;

/// The most threads that can wait.
pub const WAITERS_MAX: usize = 0x7fff;

/// A state of a frame that nobody was changing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version(u64);

impl Version {
    /// The bits of a word that are not its version's.
    pub(crate) const OTHER_BITS: u64 = !VERSION;

    /// The version in its own bits, the others are zero.
    #[inline]
    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    /// The version in a word whose other bits mean something else.
    #[inline]
    pub(crate) const fn from_word(word: u64) -> Self {
        Self(word & VERSION)
    }

    /// The low half: enough to tell apart two times that a frame cooled.
    pub(crate) const fn tag(self) -> u32 {
        (self.0 >> 16) as u32
    }

    /// Whether contents that were seen at one of these versions are there at the other.
    const fn has_same_contents(self, other: Self) -> bool {
        self.0 / CHANGE == other.0 / CHANGE
    }
}

/// Where a thread waits.
#[derive(Debug, Default)]
#[repr(align(64))]
struct WaiterNode {
    next: AtomicU32,
    is_first: AtomicU32,
}

/// The waiting places of all threads, numbered from 1.
#[derive(Debug)]
pub struct Waiters(Box<[WaiterNode]>);

impl Waiters {
    /// Places for `count` threads, at most [`WAITERS_MAX`].
    pub fn new(count: usize) -> Self {
        assert!(count <= WAITERS_MAX);
        Self((0..count).map(|_| WaiterNode::default()).collect())
    }

    fn node(&self, number: u32) -> &WaiterNode {
        &self.0[number as usize - 1]
    }
}

/// An optimistic lock whose writers queue.
#[derive(Debug)]
#[repr(transparent)]
pub struct FrameLock(AtomicU64);

impl Default for FrameLock {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameLock {
    /// Unlocked.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// The version to read under; `None` while somebody changes the frame.
    #[inline]
    pub fn read(&self) -> Option<Version> {
        let word = self.0.load(Ordering::Acquire);
        if word & LOCKED == 0 { Some(Version(word & VERSION)) } else { None }
    }

    /// Whether all that was read since [`FrameLock::read`] is of one moment.
    #[inline]
    pub fn validate(&self, version: Version) -> bool {
        if !is_left_out(Step::ValidateFence) {
            fence(Ordering::Acquire);
        }
        self.0.load(Ordering::Relaxed) & !TAIL == version.0
    }

    /// Locks, if the version is still this one.
    pub fn try_upgrade(&self, version: Version) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        let is_it = word & !TAIL == version.0 || (is_left_out(Step::UpgradeCheck) && word & LOCKED == 0);
        is_it && self.take(word, word | LOCKED)
    }

    /// Locks, if nobody holds the lock; tells the version until then.
    pub fn try_lock(&self) -> Option<Version> {
        let word = self.0.load(Ordering::Relaxed);
        (word & LOCKED == 0 && self.take(word, word | LOCKED)).then_some(Version(word & VERSION))
    }

    fn take(&self, from: u64, to: u64) -> bool {
        let is_taken = self.0.compare_exchange(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if is_taken && !is_left_out(Step::LockFence) {
            // A reader that sees a change sees the lock too.
            fence(Ordering::Release);
        }
        is_taken
    }

    /// Locks, behind those who came before. Waits; `number` is the caller's place in `waiters`.
    pub fn lock(&self, waiters: &Waiters, number: u32) {
        self.lock_if(waiters, number, || true);
    }

    /// [`FrameLock::lock`] for one who wants the lock only as long as `is_wanted`; false if it found the frame locked and
    /// not wanted, for that may last. Who makes it so, under the lock, then calls [`FrameLock::retire`].
    pub fn lock_if(&self, waiters: &Waiters, number: u32, is_wanted: impl Fn() -> bool) -> bool {
        let node = waiters.node(number);
        let before = loop {
            // Who sees the version after a retirement also sees what made the frame unwanted.
            let word = self.0.load(Ordering::Acquire);
            if word & LOCKED == 0 {
                if self.take(word, word | LOCKED) {
                    return true;
                }
                continue;
            }
            if !is_wanted() {
                return false;
            }
            node.next.store(0, Ordering::Relaxed);
            node.is_first.store(0, Ordering::Relaxed);
            let queued = word & !TAIL | u64::from(number) << TAIL_SHIFT;
            if self.0.compare_exchange(word, queued, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                break ((word & TAIL) >> TAIL_SHIFT) as u32;
            }
        };
        let mut spin = Spin::default();
        if before != 0 {
            waiters.node(before).next.store(number, Ordering::Release);
            while node.is_first.load(Ordering::Acquire) == 0 {
                spin.turn();
            }
        }
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word & LOCKED == 0 {
                let is_last = (word & TAIL) >> TAIL_SHIFT == u64::from(number);
                let tail = if is_last { 0 } else { word & TAIL };
                if self.take(word, LOCKED | tail | word & VERSION) {
                    if !is_last {
                        Self::pass_on(waiters, node);
                    }
                    return true;
                }
            }
            spin.turn();
        }
    }

    /// Makes the next waiter the first.
    fn pass_on(waiters: &Waiters, node: &WaiterNode) {
        if is_left_out(Step::PassOn) {
            return;
        }
        let mut spin = Spin::default();
        let next = loop {
            match node.next.load(Ordering::Acquire) {
                0 => spin.turn(),
                next => break next,
            }
        };
        waiters.node(next).is_first.store(1, Ordering::Release);
    }

    /// A new version, still locked: for the holder of the lock who keeps it for long. Those who queue are let through first;
    /// none queues after this who looks at what the holder has changed ([`FrameLock::lock_if`]).
    pub fn retire(&self) {
        if self.0.fetch_add(MOVE, Ordering::AcqRel) & TAIL == 0 || is_left_out(Step::Retirement) {
            return;
        }
        self.unlock_moved();
        let mut spin = Spin::default();
        loop {
            let word = self.0.load(Ordering::Relaxed);
            if word & (LOCKED | TAIL) == 0 && self.take(word, word | LOCKED) {
                return;
            }
            spin.turn();
        }
    }

    /// Says, still locked, that contents which others may have seen count no more.
    pub(crate) fn note_change(&self) {
        self.0.fetch_add(CHANGE, Ordering::Release);
    }

    /// Whether the contents that were seen at `version` were there until now, or until the page went; false also while
    /// somebody holds the lock for whom that is not decided yet.
    pub(crate) fn is_unchanged_since(&self, version: Version) -> bool {
        let mut spin = Spin::default();
        // The cache moves a page in a few instructions.
        for _ in 0..if cfg!(loom) { 1 } else { 8 } {
            let word = self.0.load(Ordering::Acquire);
            if !Version::from_word(word).has_same_contents(version) {
                return false;
            }
            // Freed frames stay locked, with a new version.
            if word & LOCKED == 0 || word & VERSION != version.0 {
                return true;
            }
            spin.turn();
        }
        false
    }

    /// Whether somebody holds it.
    pub fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed) & LOCKED != 0
    }

    /// Ends a change of the contents. Only for the holder of the lock.
    pub fn unlock(&self) -> Version {
        self.unlock_after(CHANGE)
    }

    /// Ends a step of the cache that leaves the contents as they are. Only for the holder of the lock.
    pub fn unlock_moved(&self) -> Version {
        self.unlock_after(MOVE)
    }

    fn unlock_after(&self, step: u64) -> Version {
        let word = self.0.fetch_add(step - LOCKED, Ordering::Release);
        Version((word & VERSION).wrapping_add(step))
    }

    /// Gives the lock back with nothing changed: readers need not notice. Only for the holder of the lock.
    pub fn unlock_unchanged(&self) -> Version {
        Version(self.0.fetch_sub(LOCKED, Ordering::Release) & VERSION)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicU64 as Plain;

    use super::*;

    #[test]
    fn upgrades_fail_once_the_version_is_old() {
        let lock = FrameLock::new();
        let version = lock.read().unwrap();
        assert!(lock.try_upgrade(version));
        assert!(lock.read().is_none() && !lock.validate(version) && lock.try_lock().is_none());
        assert_eq!(lock.unlock_unchanged(), version);
        assert!(lock.validate(version) && lock.try_upgrade(version));
        let next = lock.unlock();
        assert!(!lock.validate(version) && lock.validate(next) && !lock.try_upgrade(version));
    }

    #[test]
    fn versions_tell_moves_from_changes_and_wrap_around() {
        let lock = FrameLock(AtomicU64::new(!(CHANGE - 1) - CHANGE));
        let seen = lock.read().unwrap();
        lock.try_lock().unwrap();
        let moved = lock.unlock_moved();
        assert!(!lock.validate(seen) && lock.is_unchanged_since(seen) && lock.is_unchanged_since(moved));
        lock.try_lock().unwrap();
        assert!(!lock.is_unchanged_since(moved), "it may be changed");
        lock.retire();
        assert!(lock.is_unchanged_since(moved), "it has gone");
        lock.note_change();
        assert!(!lock.is_unchanged_since(moved));
        for _ in 0..4 {
            let version = lock.unlock();
            assert!(lock.read() == Some(version) && !lock.is_unchanged_since(moved));
            lock.try_lock().unwrap();
        }
        assert_eq!(lock.0.load(Ordering::Relaxed) & (TAIL | LOCKED), LOCKED, "nothing spills over");
    }

    #[test]
    fn nobody_waits_for_a_lock_that_is_not_wanted_any_more() {
        let (lock, waiters) = (FrameLock::new(), Waiters::new(1));
        let version = lock.try_lock().unwrap();
        lock.retire();
        assert!(lock.is_locked() && !lock.lock_if(&waiters, 1, || false));
        assert_ne!(lock.unlock(), version);
        assert!(lock.lock_if(&waiters, 1, || false));
    }

    #[test]
    fn queued_writers_exclude_each_other_and_none_is_forgotten() {
        const THREADS: u32 = 6;
        const ROUNDS: u64 = if cfg!(miri) { 20 } else { 2000 };
        let (lock, waiters) = (FrameLock::new(), Waiters::new(THREADS as usize));
        let (left, right) = (Plain::new(0), Plain::new(0));
        std::thread::scope(|scope| {
            for number in 1..=THREADS {
                let (lock, waiters, left, right) = (&lock, &waiters, &left, &right);
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        lock.lock(waiters, number);
                        let value = left.load(Ordering::Relaxed);
                        left.store(value + 1, Ordering::Relaxed);
                        right.store(value + 1, Ordering::Relaxed);
                        lock.unlock();
                        let Some(version) = lock.read() else { continue };
                        let seen = (left.load(Ordering::Relaxed), right.load(Ordering::Relaxed));
                        assert!(!lock.validate(version) || seen.0 == seen.1);
                    }
                });
            }
        });
        assert_eq!(left.load(Ordering::Relaxed), u64::from(THREADS) * ROUNDS);
        assert_eq!(lock.read(), Some(Version(u64::from(THREADS) * ROUNDS * CHANGE)));
    }
}
