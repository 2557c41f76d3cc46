//! The records of a Bw-tree: what they say, and how words lead to them.
//!
//! A *logical page* has a number ([`Pid`]). The word of that number in the mapping table leads to the newest of its records
//! ([`MapWord`]); each *delta* leads to the next older one; the last is a *base page*. No record is ever changed.
//!
//! ```text
//!          delta, 64 or 128 B                base page, 256 B to 16 KiB
//! word 0   common header: lock, checksum, self-address, identity with level and kind
//! word 4   number:56 | deltas below:8        the same; 0 deltas below
//! word 5   the record below                  low fence: the least key that belongs here
//! word 6   key                               high fence: the least key that belongs to the right, if there is a right page
//! word 7   value                             number of the page to the right; 0: there is none, and no high fence
//! word 8   more keys and values              count of entries
//! word 9..                                   entries in ascending order: key, value
//! ```
//!
//! A delta of entries says again what up to two deltas before it have said, and leads to the record below those. So whoever reads
//! a chain reads a third of it. (As the read-optimized Bw-tree of BG3, SIGMOD 2024, where one delta holds all.) Behind its keys and
//! values, the oldest first, it names those that it says again, for who frees the chain: link and lock word of each, the newest
//! first.
//!
//! In a page of level 0 values are the user's, in one above they are numbers of pages one level below, and a key is the low
//! fence of its page. So an index term is put and deleted as a user's entry is. The first key of an inner page is its low fence.
//!
//! A mapping word and the links of deltas have one form: it names a page, its size, and which use of that memory it was meant for,
//! by bits of the version that a page keeps for ever. So a word that comes back means that nothing has changed, and a link to
//! memory that has been used again shows: for how long, says [`FastPath::remember`](farlink_runtime::access::FastPath::remember).
//!
//! ```text
//! [not mapped:1 | use of the page:15 | memory server:10 | offset / 64:34 | size class:4]    a record
//! [not mapped:1 | random:39 | next generation of the number:24]                              a number that is not in use
//! ```

use farlink_runtime::{
    access::{Link, NewPage, PagesMut, RemotePtr, Slot, Unlinked, Words},
    lock::LockWord,
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass},
    ptr::ServerId,
};
use smallvec::{SmallVec, smallvec};

const ABOUT: usize = HEADER_WORDS;
const NEXT: usize = HEADER_WORDS + 1;
const KEY: usize = HEADER_WORDS + 2;
const VALUE: usize = HEADER_WORDS + 3;
const LOW: usize = HEADER_WORDS + 1;
const HIGH: usize = HEADER_WORDS + 2;
const RIGHT: usize = HEADER_WORDS + 3;
const COUNT: usize = HEADER_WORDS + 4;
const ENTRIES: usize = HEADER_WORDS + 5;

/// The most changes that a delta has.
pub const CHANGES_MAX: usize = 3;
/// The kind of a base page, in its header.
pub const BASE_KIND: u8 = 1;
const REMOVE: u8 = 4;
const MERGE: u8 = 5;
const MERGING: u8 = 6;
/// Of a delta of entries, with a bit for each change that deletes, the oldest one's first, and one more in front.
const ENTRIES_KIND: u8 = 0x40;

/// How many entries a base page of this size holds.
pub const fn capacity(class: SizeClass) -> usize {
    (class.words() - ENTRIES) / 2
}

/// The number of a logical page: its place in the mapping table, and a generation, so that a number that is used again is
/// another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pid(u64);

impl Pid {
    /// The root's.
    pub const ROOT: Self = Self(0);

    /// Of a place in the table.
    pub const fn new(place: u32, generation: u32) -> Self {
        Self((place as u64) << 24 | generation as u64 & 0xff_ffff)
    }

    /// As it stands in an entry of an inner page. `None` if a word is no number of a page below the root.
    pub const fn from_word(word: u64) -> Option<Self> {
        if word != 0 && word >> 56 == 0 { Some(Self(word)) } else { None }
    }

    /// The word that stands for it.
    pub const fn word(self) -> u64 {
        self.0
    }

    /// The place in the table.
    pub const fn place(self) -> u32 {
        (self.0 >> 24) as u32
    }

    /// How often the place was used before.
    pub const fn generation(self) -> u32 {
        self.0 as u32 & 0xff_ffff
    }
}

/// A word of the mapping table, and a link from record to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MapWord(pub u64);

/// What a [`MapWord`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapped {
    /// No page has this place; the next one to have it has this generation.
    Not(u32),
    /// It leads to this record.
    To(Link),
}

const NOT_MAPPED: u64 = 1 << 63;
const SERVERS: u64 = 1 << 10;
const OFFSETS: u64 = 1 << 34;
const USES: u64 = 1 << 15;

impl MapWord {
    /// A number that was never used.
    pub const NEVER: Self = Self(0);

    /// The word that leads to a new page. `None` if the page lies where no such word can lead: beyond 1 TiB, or 1024 servers.
    pub fn to_new(page: &NewPage) -> Option<Self> {
        Self::to(page.at(), page.class(), page.first_lock())
    }

    /// The word that leads to a record.
    pub fn to_record(words: &(impl Words + ?Sized)) -> Option<Self> {
        let class = SizeClass::of_bytes(words.count() * 8)?;
        let at = RemotePtr::from_raw(words.word(farlink_runtime::page::SELF)).ok()?;
        Self::to(at, class, LockWord::from_word(words.word(LOCK)))
    }

    fn to(at: RemotePtr, class: SizeClass, lock: LockWord) -> Option<Self> {
        let (server, offset) = (at.server().number() as u64, at.offset() / 64);
        let fits = server < SERVERS && offset < OFFSETS && at.offset().is_multiple_of(64);
        fits.then(|| Self(use_of(lock) << 48 | server << 38 | offset << 4 | class.index() as u64))
    }

    /// The word of a number that is not in use any more. `random` makes it unlike all others.
    pub const fn not_mapped(generation: u32, random: u64) -> Self {
        Self(NOT_MAPPED | (random & ((1 << 39) - 1)) << 24 | generation as u64 & 0xff_ffff)
    }

    /// What it says; `None` if it is damaged.
    pub fn target(self) -> Option<Mapped> {
        if self.0 & NOT_MAPPED != 0 || self == Self::NEVER {
            return Some(Mapped::Not(self.0 as u32 & 0xff_ffff));
        }
        let class = SizeClass::from_index((self.0 & 0xf) as u8)?;
        let server = ServerId::new((self.0 >> 38 & (SERVERS - 1)) as u16)?;
        let at = RemotePtr::new(server, (self.0 >> 4 & (OFFSETS - 1)) * 64).ok()?;
        Some(Mapped::To(Link::to(at, class)))
    }

    /// Whether these are the words that it was made to lead to, and not a later use of the same memory.
    pub fn is_to(self, words: &(impl Words + ?Sized)) -> bool {
        words.count() > LOCK && self.0 >> 48 == use_of(LockWord::from_word(words.word(LOCK)))
    }
}

/// A page's version counts two for each time that it is a record. What a structure with locks has had in between counts one for each
/// change, so its bits can be any.
const fn use_of(lock: LockWord) -> u64 {
    lock.version() >> 1 & (USES - 1)
}

/// What a delta does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// An entry, in place of one of the same key: of a user, or an index term.
    Put {
        /// Its key.
        key: u64,
        /// Its value.
        value: u64,
    },
    /// An entry is gone. Of an inner page: the page that it led to has been merged into the one to its left.
    Delete {
        /// Its key.
        key: u64,
    },
    /// Nothing is changed here any more: the page is being merged into the one to its left.
    Remove,
    /// What the page to the right held belongs here.
    Merge {
        /// The first of its keys.
        at: u64,
        /// Its records, below that of its removal.
        absorbed: MapWord,
    },
    /// Of an inner page: the page behind an entry is about to be merged into the one to its left. Until the entry is deleted,
    /// that is all that is done here.
    Merging {
        /// The key of the entry.
        at: u64,
        /// The page.
        child: Pid,
    },
}

impl Change {
    /// Of an entry: its key, and its value from then on.
    pub fn entry(self) -> Option<(u64, Option<u64>)> {
        match self {
            Self::Put { key, value } => Some((key, Some(value))),
            Self::Delete { key } => Some((key, None)),
            _ => None,
        }
    }

    fn parts(self) -> (u8, [u64; 2]) {
        match self {
            Self::Put { key, value } => (ENTRIES_KIND, [key, value]),
            Self::Delete { key } => (ENTRIES_KIND, [key, 0]),
            Self::Remove => (REMOVE, [0, 0]),
            Self::Merge { at, absorbed } => (MERGE, [at, absorbed.0]),
            Self::Merging { at, child } => (MERGING, [at, child.word()]),
        }
    }

    fn of(kind: u8, [key, value]: [u64; 2]) -> Option<Self> {
        Some(match kind {
            REMOVE => Self::Remove,
            MERGE => Self::Merge { at: key, absorbed: MapWord(value) },
            MERGING => Self::Merging { at: key, child: Pid::from_word(value)? },
            _ => return None,
        })
    }
}

/// What every record says of its chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct About {
    /// The logical page.
    pub pid: Pid,
    /// Its level: 0 at the leaves.
    pub level: u8,
    /// How many deltas there are below the newest one.
    pub below: u8,
}

/// A delta.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delta {
    /// Of which page, and how long the chain is below it.
    pub about: About,
    /// The record below those that it says again.
    pub next: MapWord,
    /// What it does, the oldest change first: one to the page, or up to [`CHANGES_MAX`] to entries.
    pub changes: SmallVec<[Change; 1]>,
    /// The deltas that it says again, the newest first.
    pub again: SmallVec<[Unlinked; 2]>,
}

impl Delta {
    /// One of one change.
    pub fn new(about: About, next: MapWord, change: Change) -> Self {
        Self { about, next, changes: smallvec![change], again: SmallVec::new() }
    }

    /// One that also says again what this one, which is at `at`, says; `None` if there is no room.
    pub fn and(&self, at: Unlinked, about: About, change: Change) -> Option<Self> {
        let is_of_entries = self.changes[0].entry().and(change.entry()).is_some();
        if !is_of_entries || self.changes.len() >= CHANGES_MAX {
            return None;
        }
        let changes = self.changes.iter().copied().chain([change]).collect();
        Some(Self {
            about,
            next: self.next,
            changes,
            again: [at].into_iter().chain(self.again.iter().copied()).collect(),
        })
    }

    /// Its size.
    pub fn class(&self) -> SizeClass {
        Self::class_of(self.changes.len())
    }

    const fn class_of(changes: usize) -> SizeClass {
        match SizeClass::of_bytes(if changes > 1 { 128 } else { 64 }) {
            Some(class) => class,
            None => unreachable!(),
        }
    }

    /// The position of a change's key; its value is behind it.
    pub(super) const fn place_of(change: usize) -> usize {
        KEY + 2 * change
    }

    /// The records that it absorbs from the page to its right, and the first of the keys.
    pub fn absorbed(&self) -> Option<(u64, MapWord)> {
        match self.changes[0] {
            Change::Merge { at, absorbed } => Some((at, absorbed)),
            _ => None,
        }
    }

    /// Writes it into a new page.
    pub fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        let (mut kind, mut front) = (self.changes[0].parts().0, 1 << self.changes.len());
        pages.fill(slot, ABOUT, &[self.about.word(), self.next.0]);
        for (index, change) in self.changes.iter().enumerate() {
            pages.fill(slot, Self::place_of(index), &change.parts().1);
            front |= u8::from(matches!(change, Change::Delete { .. })) << index;
        }
        for (index, page) in self.again.iter().enumerate() {
            pages.fill(slot, Self::place_of(self.changes.len() + index), &page.words());
        }
        if kind == ENTRIES_KIND {
            kind |= front;
        }
        pages.describe(slot, self.about.level, kind);
    }

    /// `None` if these are not the words of a delta.
    pub fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        let fits = words.count() > VALUE;
        let (about, kind) = if fits { About::of(words)? } else { return None };
        let pair = |index: usize| [words.word(Self::place_of(index)), words.word(Self::place_of(index) + 1)];
        let next = MapWord(words.word(NEXT));
        let front = if kind & ENTRIES_KIND != 0 { kind ^ ENTRIES_KIND } else { 1 << 1 };
        let count = front.checked_ilog2()? as usize;
        if !(1..=CHANGES_MAX).contains(&count) || words.count() != Self::class_of(count).words() {
            return None;
        }
        if kind & ENTRIES_KIND == 0 {
            return Some(Self::new(about, next, Change::of(kind, pair(0))?));
        }
        let change = |index: usize| match pair(index) {
            [key, _] if front >> index & 1 == 1 => Change::Delete { key },
            [key, value] => Change::Put { key, value },
        };
        let again = (count..2 * count - 1).map(|index| Unlinked::from_words(pair(index)));
        Some(Self { about, next, changes: (0..count).map(change).collect(), again: again.collect::<Option<_>>()? })
    }
}

impl About {
    fn word(self) -> u64 {
        self.pid.word() << 8 | u64::from(self.below)
    }

    fn of(words: &(impl Words + ?Sized)) -> Option<(Self, u8)> {
        // One more is the level of the page above.
        let identity = Identity::from_word(words.word(IDENTITY)).filter(|identity| identity.level < u8::MAX)?;
        let word = words.word(ABOUT);
        Some((Self { pid: Pid(word >> 8), level: identity.level, below: word as u8 }, identity.kind))
    }
}

/// Where a key is, seen from a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It belongs to the page.
    Here,
    /// It belongs to a page to the left.
    Left,
    /// It belongs to a page to the right.
    Right,
}

/// The range of keys of a page, and which one is to its right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fences {
    /// The least key that belongs here.
    pub low: u64,
    /// The least key that belongs to the right, and the page to the right; `None` if this is the last one.
    pub right: Option<(u64, Pid)>,
}

impl Fences {
    /// Every key.
    pub const ALL: Self = Self { low: 0, right: None };

    /// The least key that belongs to the right.
    pub fn high(&self) -> Option<u64> {
        self.right.map(|(high, _)| high)
    }

    /// Where a key is.
    pub fn side(&self, key: u64) -> Side {
        match self.high() {
            _ if key < self.low => Side::Left,
            Some(high) if key >= high => Side::Right,
            _ => Side::Here,
        }
    }
}

/// A base page, read where it stands. Copes with any words: the count is clamped.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a, W: Words + ?Sized> {
    words: &'a W,
    /// Of which page.
    pub about: About,
}

/// Writes a base page into a new page.
pub(super) fn write_base(about: About, fences: Fences, entries: &[(u64, u64)], pages: &mut impl PagesMut, slot: Slot) {
    let (high, right) = fences.right.map_or((0, 0), |(high, right)| (high, right.word()));
    let about = About { below: 0, ..about };
    pages.describe(slot, about.level, BASE_KIND);
    pages.fill(slot, ABOUT, &[about.word(), fences.low, high, right, entries.len() as u64]);
    for (index, &(key, value)) in entries.iter().enumerate() {
        pages.fill(slot, ENTRIES + 2 * index, &[key, value]);
    }
}

impl<'a, W: Words + ?Sized> Base<'a, W> {
    /// `None` if these are not the words of a base page.
    pub fn of(words: &'a W) -> Option<Self> {
        let fits = words.count() > ENTRIES;
        let (about, kind) = if fits { About::of(words)? } else { return None };
        (kind == BASE_KIND && about.below == 0).then_some(Self { words, about })
    }

    /// Its fences.
    pub fn fences(&self) -> Fences {
        let right = Pid::from_word(self.words.word(RIGHT));
        Fences { low: self.words.word(LOW), right: right.map(|right| (self.words.word(HIGH), right)) }
    }

    /// How many entries it has.
    pub fn count(&self) -> usize {
        let room = (self.words.count() - ENTRIES) / 2;
        usize::try_from(self.words.word(COUNT)).map_or(room, |count| count.min(room))
    }

    /// An entry.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn entry(&self, index: usize) -> (u64, u64) {
        (self.words.word(ENTRIES + 2 * index), self.words.word(ENTRIES + 2 * index + 1))
    }

    /// The position of an entry's key; its value is behind it.
    pub(super) const fn place_of(index: usize) -> usize {
        ENTRIES + 2 * index
    }

    /// The number of entries whose keys are at most `key`.
    pub fn up_to(&self, key: u64) -> usize {
        let (mut low, mut high) = (0, self.count());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.entry(middle).0 <= key { low = middle + 1 } else { high = middle }
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn map_words_round_trip(server in 0u16..1024, offset in 1u64..OFFSETS, class in 0u8..11, version: u64) {
            let class = SizeClass::from_index(class).unwrap();
            let at = RemotePtr::new(ServerId::new(server).unwrap(), offset * 64).unwrap();
            let word = MapWord::to(at, class, LockWord::unlocked(version)).unwrap();
            prop_assert_eq!(word.target(), Some(Mapped::To(Link::to(at, class))));
        }
    }
}
