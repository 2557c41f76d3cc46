//! The remote optimistic lock: one word, the first of every page.
//!
//! ```text
//!  63      62                40 39        38            0
//! [locked | owner incarnation  | one word | version     ]
//! ```
//!
//! - *Unlocked*: the owner bits are zero. A reader that sees the same unlocked word before and after (or a checksum that
//!   binds the body to its version) has a consistent page.
//! - *Locked by an owner*: an owner incarnation is given to one compute server in the cluster's life and never again, so
//!   the lock of a dead owner can be recognised as such. *For one word*: the owner writes one word of the page and its checksum,
//!   and nothing else anywhere, so the page can be used whatever of that has arrived.
//! - *Free*: owner bits without the lock bit, which name the compute server that holds the page and may use it again; or
//!   the lock bit without owner. The page belongs to no structure. Nobody can lock it, and the version outlives the reuse of the
//!   page, so a lock request that was prepared before the page was freed fails for ever.
//!
//! A lock request is a compare-and-swap from the unlocked word that the reader validated. It succeeds only if the page
//! has not changed since, so the holder's copy *is* the page. The unlock sets version + 1 (39 bits: a page changed a
//! million times a second wraps after six days; rule 8 of one-sided access asks for at least 32).

use std::{fmt, num::NonZeroU32};

const VERSION_BITS: u32 = 39;
const OWNER_BITS: u32 = 23;
const VERSION_MASK: u64 = (1 << VERSION_BITS) - 1;
const ONE_WORD: u64 = 1 << VERSION_BITS;
const OWNER_AT: u32 = VERSION_BITS + 1;
const LOCKED: u64 = 1 << 63;

const _: () = assert!(1 + OWNER_BITS + OWNER_AT == 64);

/// The incarnation of a compute server: 1 to 2^23 - 1, never reused in a cluster's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(NonZeroU32);

impl OwnerId {
    /// The highest incarnation.
    pub const MAX: u32 = (1 << OWNER_BITS) - 1;

    /// `None` if zero or above [`OwnerId::MAX`].
    pub const fn new(incarnation: u64) -> Option<Self> {
        if incarnation > Self::MAX as u64 {
            return None;
        }
        match NonZeroU32::new(incarnation as u32) {
            Some(incarnation) => Some(Self(incarnation)),
            None => None,
        }
    }

    /// The incarnation as a number.
    pub const fn incarnation(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Debug for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "compute server {}", self.0)
    }
}

/// What a lock word says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// Nobody changes the page.
    Unlocked,
    /// This compute server changes the page, or died while it did.
    LockedBy(OwnerId),
    /// The page belongs to no structure.
    Free,
}

/// The first word of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct LockWord(u64);

impl LockWord {
    /// The lock word that a word of memory stands for. Every word is one.
    pub const fn from_word(word: u64) -> Self {
        Self(word)
    }

    /// Unlocked at `version` (its low 39 bits).
    pub const fn unlocked(version: u64) -> Self {
        Self(version & VERSION_MASK)
    }

    /// Free at `version` (its low 39 bits), and this compute server's to use again, or nobody's.
    pub const fn free(version: u64, holder: Option<OwnerId>) -> Self {
        match holder {
            Some(holder) => Self((holder.incarnation() as u64) << OWNER_AT | version & VERSION_MASK),
            None => Self(LOCKED | version & VERSION_MASK),
        }
    }

    /// The word that a holder of the lock sees: this version, locked by `owner`.
    #[must_use]
    pub const fn locked_by(self, owner: OwnerId) -> Self {
        Self(LOCKED | (owner.incarnation() as u64) << OWNER_AT | self.0 & VERSION_MASK)
    }

    /// [`LockWord::locked_by`], for one word.
    #[must_use]
    pub const fn locked_for_one_word_by(self, owner: OwnerId) -> Self {
        Self(self.locked_by(owner).0 | ONE_WORD)
    }

    /// Whether it is locked for one word.
    pub const fn is_for_one_word(self) -> bool {
        self.0 & (LOCKED | ONE_WORD) == LOCKED | ONE_WORD
    }

    /// The word as it stands in memory.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The version: 39 bits.
    pub const fn version(self) -> u64 {
        self.0 & VERSION_MASK
    }

    /// The version that the next unlock sets; wraps after 2^39 changes.
    pub const fn next_version(self) -> u64 {
        self.0.wrapping_add(1) & VERSION_MASK
    }

    /// What the word says.
    pub const fn state(self) -> LockState {
        match (self.0 & LOCKED != 0, self.incarnation()) {
            (false, None) => LockState::Unlocked,
            (true, Some(owner)) => LockState::LockedBy(owner),
            (false, Some(_)) | (true, None) => LockState::Free,
        }
    }

    /// Who holds the page, if it is free and somebody does. A compute server that gives a page back does not say so here, but
    /// in the bitmap of the page's chunk.
    pub const fn holder(self) -> Option<OwnerId> {
        if self.0 & LOCKED == 0 { self.incarnation() } else { None }
    }

    const fn incarnation(self) -> Option<OwnerId> {
        OwnerId::new((self.0 & !LOCKED) >> OWNER_AT)
    }
}

impl fmt::Debug for LockWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at version {}", self.state(), self.version())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_three_states_are_told_apart_and_keep_the_version() {
        let owner = OwnerId::new(u64::from(OwnerId::MAX)).unwrap();
        let unlocked = LockWord::unlocked(VERSION_MASK);
        assert_eq!((unlocked.state(), unlocked.version()), (LockState::Unlocked, VERSION_MASK));
        let locked = unlocked.locked_by(owner);
        assert_eq!((locked.state(), locked.version()), (LockState::LockedBy(owner), VERSION_MASK));
        assert_eq!(locked.next_version(), 0);
        let for_one = unlocked.locked_for_one_word_by(owner);
        assert_eq!(
            (for_one.state(), for_one.version(), for_one.next_version()),
            (LockState::LockedBy(owner), VERSION_MASK, 0)
        );
        assert!(for_one.is_for_one_word() && !locked.is_for_one_word() && !unlocked.is_for_one_word());
        for holder in [None, Some(owner)] {
            let free = LockWord::free(7, holder);
            assert_eq!((free.state(), free.version(), free.holder()), (LockState::Free, 7, holder));
            assert_eq!(LockWord::from_word(free.word()), free);
        }
        assert_eq!((locked.holder(), unlocked.holder()), (None, None));
        let free = LockWord::free(7, None);
        assert_eq!(LockWord::from_word(free.word()), free);
        assert!(OwnerId::new(0).is_none() && OwnerId::new(1 << 23).is_none());
    }
}
