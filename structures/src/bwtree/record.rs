//! The records of a Bw-tree, and what a chain of them says.
//!
//! A *logical page* has a number ([`Pid`]). The word of that number in the mapping table leads to the newest of its records
//! ([`MapWord`]); each *delta* leads to the next older one; the last is a *base page*. No record is ever changed.
//!
//! ```text
//!          delta, 64 B                       base page, 256 B to 16 KiB
//! word 0   common header: lock, checksum, self-address, identity with level and kind
//! word 4   number:56 | records below:8       the same; 0 records below
//! word 5   the record below                  low fence: the least key that belongs here
//! word 6   key                               high fence: the least key that belongs to the right, if there is a right page
//! word 7   value                             number of the page to the right; 0: there is none, and no high fence
//! word 8                                     count of entries
//! word 9..                                   entries in ascending order: key, value
//! ```
//!
//! In a page of level 0 values are the user's, in one above they are numbers of pages one level below, and a key is the low
//! fence of its page. So an index term is put and deleted as a user's entry is. The first key of an inner page is its low fence.
//!
//! A mapping word and the links of deltas have one form: it names a page, its size, and which use of that memory it was meant for,
//! by bits of the version that a page keeps for ever. So a word that comes back means that nothing has changed, and a link to
//! memory that has been used again shows.
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

const ABOUT: usize = HEADER_WORDS;
const NEXT: usize = HEADER_WORDS + 1;
const KEY: usize = HEADER_WORDS + 2;
const VALUE: usize = HEADER_WORDS + 3;
const LOW: usize = HEADER_WORDS + 1;
const HIGH: usize = HEADER_WORDS + 2;
const RIGHT: usize = HEADER_WORDS + 3;
const COUNT: usize = HEADER_WORDS + 4;
const ENTRIES: usize = HEADER_WORDS + 5;

/// Where the key of a delta that puts an entry stands, and its value behind it, as in a base page.
pub(super) const DELTA_ENTRY: usize = KEY;
/// The size of a delta.
pub const DELTA: SizeClass = SizeClass::SMALLEST;
/// The kind of a base page, in its header.
pub const BASE_KIND: u8 = 1;
const PUT: u8 = 2;
const DELETE: u8 = 3;
const REMOVE: u8 = 4;
const MERGE: u8 = 5;
const MERGING: u8 = 6;

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

/// A page's version counts two for each time that it is used.
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
    fn parts(self) -> (u8, u64, u64) {
        match self {
            Self::Put { key, value } => (PUT, key, value),
            Self::Delete { key } => (DELETE, key, 0),
            Self::Remove => (REMOVE, 0, 0),
            Self::Merge { at, absorbed } => (MERGE, at, absorbed.0),
            Self::Merging { at, child } => (MERGING, at, child.word()),
        }
    }

    fn of(kind: u8, key: u64, value: u64) -> Option<Self> {
        Some(match kind {
            PUT => Self::Put { key, value },
            DELETE => Self::Delete { key },
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
    /// How many records there are below this one.
    pub below: u8,
}

/// A delta.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta {
    /// Of which page, and how long the chain is below it.
    pub about: About,
    /// The record below it.
    pub next: MapWord,
    /// What it does.
    pub change: Change,
}

impl Delta {
    /// Writes it into a new page.
    pub fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        let (kind, key, value) = self.change.parts();
        pages.describe(slot, self.about.level, kind);
        pages.fill(slot, ABOUT, &[self.about.word(), self.next.0, key, value]);
    }
}

impl About {
    fn word(self) -> u64 {
        self.pid.word() << 8 | u64::from(self.below)
    }

    fn of(words: &(impl Words + ?Sized)) -> Option<(Self, u8)> {
        let identity = Identity::from_word(words.word(IDENTITY))?;
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

/// A record, apart from the page it was read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A delta.
    Delta(Delta),
    /// A base page.
    Base(State),
}

impl Record {
    /// `None` if these are not the words of a record.
    pub fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        if let Some(base) = Base::of(words) {
            let entries = (0..base.count()).map(|index| base.entry(index)).collect();
            return Some(Self::Base(State { entries, ..State::new(base.about, base.fences()) }));
        }
        let fits = words.count() == DELTA.words();
        let (about, kind) = if fits { About::of(words)? } else { return None };
        let change = Change::of(kind, words.word(KEY), words.word(VALUE))?;
        Some(Self::Delta(Delta { about, next: MapWord(words.word(NEXT)), change }))
    }

    /// Of which page, and how long the chain is below it.
    pub fn about(&self) -> About {
        match self {
            Self::Delta(delta) => delta.about,
            Self::Base(base) => base.about,
        }
    }
}

/// What a chain says: a logical page as it was when the first of its records was the newest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Of which page; how many records there are below the newest.
    pub about: About,
    /// Its fences.
    pub fences: Fences,
    /// Its entries, in ascending order of keys.
    pub entries: Vec<(u64, u64)>,
    /// Whether it is being merged into the page to its left.
    pub is_removed: bool,
    /// An entry whose page is being merged into the one to its left.
    pub merging: Option<(u64, Pid)>,
}

impl State {
    /// A page without entries.
    pub const fn new(about: About, fences: Fences) -> Self {
        Self { about, fences, entries: Vec::new(), is_removed: false, merging: None }
    }

    /// The value of a key.
    pub fn value(&self, key: u64) -> Option<u64> {
        let index = self.entries.binary_search_by_key(&key, |entry| entry.0).ok()?;
        Some(self.entries[index].1)
    }

    /// Of an inner page: the index of the entry behind which a key is.
    pub fn child_for(&self, key: u64) -> Option<usize> {
        self.entries.partition_point(|entry| entry.0 <= key).checked_sub(1)
    }

    /// Writes it into a new page, as the base of a new chain.
    pub fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        let (high, right) = self.fences.right.map_or((0, 0), |(high, right)| (high, right.word()));
        let about = About { below: 0, ..self.about };
        pages.describe(slot, self.about.level, BASE_KIND);
        pages.fill(slot, ABOUT, &[about.word(), self.fences.low, high, right, self.entries.len() as u64]);
        for (index, &(key, value)) in self.entries.iter().enumerate() {
            pages.fill(slot, ENTRIES + 2 * index, &[key, value]);
        }
    }

    /// Puts or deletes an entry.
    pub fn change(&mut self, change: Change) {
        self.apply(&[Delta { about: self.about, next: MapWord::NEVER, change }]);
    }

    /// That the entries are in order and between the fences.
    fn require_order(&self) -> Result<(), Flaw> {
        let within = |&(key, _): &(u64, u64)| self.fences.side(key) == Side::Here;
        let in_order = self.entries.is_sorted_by(|a, b| a.0 < b.0) && self.entries.iter().all(within);
        let first = self.entries.first().map(|entry| entry.0);
        match in_order && (self.about.level == 0 || first == Some(self.fences.low)) {
            true => Ok(()),
            false => Err(Flaw("its keys are out of order or outside its fences")),
        }
    }

    /// Applies deltas, the newest first.
    fn apply(&mut self, deltas: &[Delta]) {
        // Of each key the newest change alone counts.
        let mut changes: Vec<(u64, Option<u64>)> = Vec::with_capacity(deltas.len());
        let mut change = |key, to| match changes.binary_search_by_key(&key, |change| change.0) {
            Ok(_) => false,
            Err(index) => {
                changes.insert(index, (key, to));
                true
            }
        };
        let mut merging = None;
        for delta in deltas {
            match delta.change {
                Change::Put { key, value } => drop(change(key, Some(value))),
                Change::Delete { key } => drop(change(key, None)),
                Change::Remove => self.is_removed = true,
                Change::Merging { at, child } if change(at, Some(child.word())) => merging = Some((at, child)),
                Change::Merging { .. } | Change::Merge { .. } => {}
            }
        }
        // The entry's deletion ends what was under way.
        let is_under_way = |&(at, _): &(u64, Pid)| changes.binary_search(&(at, None)).is_err();
        self.merging = merging.or(self.merging.filter(is_under_way));
        let mut old = std::mem::take(&mut self.entries).into_iter().peekable();
        for (key, to) in changes {
            while let Some(entry) = old.next_if(|entry| entry.0 < key) {
                self.entries.push(entry);
            }
            let _replaced = old.next_if(|entry| entry.0 == key);
            self.entries.extend(to.map(|value| (key, value)));
        }
        self.entries.extend(old);
    }
}

/// A logical page, and the records that say so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logical {
    /// What they say.
    pub state: State,
    /// All of them.
    pub records: Vec<Unlinked>,
}

impl Logical {
    /// The memory that it takes.
    pub fn bytes(&self) -> usize {
        let Self { state, records } = self;
        size_of::<Self>() + size_of_val(&*state.entries) + size_of_val(&**records)
    }

    /// As it is with one more delta.
    pub fn with(&self, change: Change, about: About, delta: Unlinked) -> Self {
        let mut all = Self { state: State { about, ..self.state.clone() }, records: self.records.clone() };
        all.state.change(change);
        all.records.push(delta);
        all
    }
}

/// What is wrong with a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Flaw(pub &'static str);

/// Which records a chain has, in the order in which they are read: each before what is below it; below a merge first the
/// page's own records, then those that it absorbs. It ends, whatever the records say.
#[derive(Debug, Clone)]
pub struct Chain {
    records: Vec<Record>,
    pages: Vec<Unlinked>,
    /// What is still to be read, the next one last: the record, its page if it is known, how many there are below it at most.
    to_read: Vec<(MapWord, Option<Pid>, u8)>,
}

impl Chain {
    /// The chain of a page, of which its mapping word is known.
    pub fn new(pid: Pid, head: MapWord) -> Self {
        Self { records: Vec::new(), pages: Vec::new(), to_read: vec![(head, Some(pid), u8::MAX)] }
    }

    /// The record to read next; `None` if all have been.
    pub fn next(&self) -> Option<MapWord> {
        self.to_read.last().map(|&(word, ..)| word)
    }

    /// Adds the record that was to be read, as found there.
    ///
    /// # Errors
    /// If it is none of this chain.
    pub fn add(&mut self, words: &(impl Words + ?Sized)) -> Result<(), Flaw> {
        let (word, pid, most) = self.to_read.pop().ok_or(Flaw("the chain has ended"))?;
        let record = Record::of(words).filter(|_| word.is_to(words)).ok_or(Flaw("it is not the record of the link"))?;
        let (about, first) = (record.about(), self.records.first().map(Record::about));
        if pid.is_some_and(|pid| pid != about.pid) || first.is_some_and(|first| first.level != about.level) {
            return Err(Flaw("it is of another page"));
        }
        if about.below > most {
            return Err(Flaw("the chain is longer than its head says"));
        }
        if let Record::Delta(Delta { next, change, .. }) = record {
            let rest = about.below.checked_sub(1).ok_or(Flaw("the chain has no end"))?;
            if let Change::Merge { absorbed, .. } = change {
                self.to_read.push((absorbed, None, rest.saturating_sub(1)));
            }
            self.to_read.push((next, Some(about.pid), rest));
        }
        if self.records.len() > usize::from(u8::MAX) {
            return Err(Flaw("the chain has no end"));
        }
        self.records.push(record);
        self.pages.extend(Unlinked::of(words));
        Ok(())
    }

    /// Adds the record that was to be read and all below it, of which is known what they come to.
    pub fn add_known(&mut self, page: &Logical) {
        self.to_read.pop();
        self.records.push(Record::Base(page.state.clone()));
        self.pages.extend_from_slice(&page.records);
    }

    /// How many records were read.
    pub fn count(&self) -> usize {
        self.records.len()
    }

    /// What all its records come to: the page's entries in the order of their keys, and its fences.
    ///
    /// # Errors
    /// If they are no whole chain.
    pub fn merge(self) -> Result<Logical, Flaw> {
        let mut rest = self.records.into_iter();
        let state = merge_one(&mut rest)?;
        state.require_order()?;
        match rest.next() {
            None => Ok(Logical { state, records: self.pages }),
            Some(_) => Err(Flaw("there are records behind the chain")),
        }
    }
}

fn merge_one(records: &mut std::vec::IntoIter<Record>) -> Result<State, Flaw> {
    let (mut deltas, mut about) = (Vec::new(), None);
    let mut state = loop {
        let record = records.next().ok_or(Flaw("the chain is not whole"))?;
        about = about.or(Some(record.about()));
        match record {
            Record::Base(base) => break base,
            Record::Delta(Delta { change: Change::Merge { at, .. }, .. }) => {
                let (mut state, absorbed) = (merge_one(records)?, merge_one(records)?);
                if state.fences.high() != Some(at) || absorbed.fences.low != at {
                    return Err(Flaw("it absorbs a page that does not lie to its right"));
                }
                state.fences.right = absorbed.fences.right;
                state.merging = state.merging.or(absorbed.merging);
                state.entries.extend(absorbed.entries);
                break state;
            }
            Record::Delta(delta) => deltas.push(delta),
        }
    };
    state.apply(&deltas);
    state.about = about.unwrap_or(state.about);
    Ok(state)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use farlink_runtime::page::{self, StructureId};
    use proptest::prelude::*;

    use super::*;

    /// A page that is written in memory of its own.
    pub(crate) struct Page(pub(crate) Vec<u64>);

    impl PagesMut for Page {
        fn page(&self, _slot: Slot) -> impl Words + '_ {
            &*self.0
        }
        fn set(&mut self, _slot: Slot, index: usize, word: u64) {
            self.0[index] = word;
        }
        fn describe(&mut self, _slot: Slot, level: u8, kind: u8) {
            let class = SizeClass::of_bytes(self.0.len() * 8).unwrap();
            self.0[IDENTITY] = Identity { structure: StructureId(1), level, class, kind, is_words: false }.word();
        }
        fn describe_words(&mut self, _slot: Slot, _level: u8, _kind: u8) {
            unreachable!("records have no such words");
        }
        fn free(&mut self, _slot: Slot) {}
    }

    /// Memory with records in it.
    #[derive(Default)]
    struct Memory(Vec<Vec<u64>>);

    impl Memory {
        fn add(&mut self, class: SizeClass, write: impl FnOnce(&mut Page)) -> MapWord {
            let at = RemotePtr::new(ServerId::new(3).unwrap(), (self.0.len() as u64 + 1) << 16).unwrap();
            let mut page = Page(vec![0; class.words()]);
            write(&mut page);
            let identity = Identity::from_word(page.0[IDENTITY]).unwrap();
            page::seal(&mut page.0, at, identity, 2 * self.0.len() as u64 + 1);
            let word = MapWord::to_record(&*page.0).unwrap();
            self.0.push(page.0);
            word
        }

        fn find(&self, word: MapWord) -> &[u64] {
            let Some(Mapped::To(link)) = word.target() else { panic!("{word:?} leads nowhere") };
            &self.0[(link.remote().unwrap().0.offset() >> 16) as usize - 1]
        }

        fn chain(&self, pid: Pid, head: MapWord) -> Result<Chain, Flaw> {
            let mut chain = Chain::new(pid, head);
            while let Some(word) = chain.next() {
                chain.add(self.find(word))?;
            }
            Ok(chain)
        }
    }

    const SLOT: Slot = Slot::ONLY;
    const CLASS: SizeClass = SizeClass::of_bytes(1024).unwrap();
    const LEFT: Pid = Pid::new(5, 1);
    const RIGHT_PAGE: Pid = Pid::new(6, 0);

    fn about(pid: Pid, below: u8) -> About {
        About { pid, level: 0, below }
    }

    fn base(memory: &mut Memory, pid: Pid, fences: Fences, entries: impl IntoIterator<Item = (u64, u64)>) -> MapWord {
        let state = State { entries: entries.into_iter().collect(), ..State::new(about(pid, 0), fences) };
        memory.add(CLASS, |page| state.write(page, SLOT))
    }

    fn on(memory: &mut Memory, pid: Pid, below: u8, next: MapWord, change: Change) -> MapWord {
        let delta = Delta { about: about(pid, below), next, change };
        memory.add(DELTA, |page| delta.write(page, SLOT))
    }

    proptest! {
        /// Puts and deletes on a base page, then what is split off, and merged back.
        #[test]
        fn a_chain_says_what_was_done(
            first in prop::collection::btree_map(0u64..60, any::<u64>(), 0..40),
            changes in prop::collection::vec((0u64..60, any::<Option<u64>>()), 0..20),
            at in 1u64..60,
            merges: bool,
        ) {
            let (mut memory, mut model) = (Memory::default(), first.clone());
            let mut head = base(&mut memory, LEFT, Fences::ALL, first);
            let mut below = 0;
            for &(key, to) in &changes[..changes.len() / 2] {
                below += 1;
                head = on(&mut memory, LEFT, below, head, to.map_or(Change::Delete { key }, |value| Change::Put { key, value }));
                match to {
                    Some(value) => drop(model.insert(key, value)),
                    None => drop(model.remove(&key)),
                }
            }
            let half = model.split_off(&at);
            let fences = Fences { low: at, right: None };
            let right = base(&mut memory, RIGHT_PAGE, fences, half.clone());
            let fences = Fences { low: 0, right: Some((at, RIGHT_PAGE)) };
            head = base(&mut memory, LEFT, fences, model.clone());
            let mut records = 1;
            below = 0;
            if merges {
                model.extend(half);
                below += 2;
                head = on(&mut memory, LEFT, below, head, Change::Merge { at, absorbed: right });
                records = 3;
            }
            let known = memory.chain(LEFT, head).unwrap().merge().unwrap();
            let (known_word, known_below) = (head, below);
            for &(key, to) in changes[changes.len() / 2..].iter().filter(|change| merges || change.0 < at) {
                records += 1;
                below += 1;
                head = on(&mut memory, LEFT, below, head, to.map_or(Change::Delete { key }, |value| Change::Put { key, value }));
                match to {
                    Some(value) => drop(model.insert(key, value)),
                    None => drop(model.remove(&key)),
                }
            }
            let chain = memory.chain(LEFT, head).unwrap();
            prop_assert_eq!(chain.count(), records);
            let page = chain.merge().unwrap();
            prop_assert_eq!(page.records.len(), records);
            // Read from above, down to what is known.
            let mut above = Chain::new(LEFT, head);
            while let Some(word) = above.next() {
                if word == known_word { above.add_known(&known) } else { above.add(memory.find(word)).unwrap() }
            }
            prop_assert_eq!(above.count(), usize::from(below - known_below) + 1);
            let again = above.merge().unwrap();
            prop_assert_eq!(&again.state, &page.state);
            prop_assert_eq!(again.records.len(), records);
            let state = page.state;
            prop_assert_eq!(state.entries.iter().copied().collect::<BTreeMap<_, _>>(), model);
            prop_assert_eq!(state.fences.right, (!merges).then_some((at, RIGHT_PAGE)));
            prop_assert_eq!(state.about, about(LEFT, below));
        }

        #[test]
        fn any_words_make_no_panic(words in prop::collection::vec(any::<u64>(), 8..=8), kind in 0u8..9, big: bool, at in 4usize..9, to: u64) {
            let mut memory = Memory::default();
            let class = if big { CLASS } else { DELTA };
            let head = memory.add(class, |page| {
                page.describe(SLOT, 0, kind);
                page.fill(SLOT, ABOUT, &words[..4]);
                if big {
                    page.set(SLOT, at, to);
                }
            });
            let mut chain = Chain::new(LEFT, head);
            if chain.add(memory.find(head)).is_ok() && chain.next().is_none() {
                let _ = chain.merge();
            }
        }

        #[test]
        fn map_words_round_trip(server in 0u16..1024, offset in 1u64..OFFSETS, class in 0u8..11, version: u64) {
            let class = SizeClass::from_index(class).unwrap();
            let at = RemotePtr::new(ServerId::new(server).unwrap(), offset * 64).unwrap();
            let word = MapWord::to(at, class, LockWord::unlocked(version)).unwrap();
            prop_assert_eq!(word.target(), Some(Mapped::To(Link::to(at, class))));
        }
    }

    #[test]
    fn a_chain_that_is_a_ring_or_of_another_page_is_refused() {
        let mut memory = Memory::default();
        let bottom = base(&mut memory, LEFT, Fences::ALL, [(1, 10)]);
        let head = on(&mut memory, LEFT, 1, bottom, Change::Put { key: 2, value: 20 });
        assert!(memory.chain(RIGHT_PAGE, head).is_err(), "it is of another page");
        assert_eq!(memory.chain(LEFT, head).unwrap().merge().unwrap().state.entries, [(1, 10), (2, 20)]);
        memory.0[1][NEXT] = head.0;
        assert!(memory.chain(LEFT, head).is_err(), "it leads to itself");
        // The same memory, used again.
        memory.0[1][NEXT] = bottom.0;
        memory.0[0][LOCK] += 2;
        assert!(memory.chain(LEFT, head).is_err(), "its base is gone");
    }

    #[test]
    fn an_index_term_that_is_deleted_ends_what_was_going_on_behind_it() {
        let mut memory = Memory::default();
        let inner = |below| About { level: 1, ..about(LEFT, below) };
        let entries = vec![(0, RIGHT_PAGE.word()), (9, Pid::new(7, 0).word())];
        let state = State { entries, ..State::new(inner(0), Fences::ALL) };
        let bottom = memory.add(CLASS, |page| state.write(page, SLOT));
        let merging = Change::Merging { at: 9, child: Pid::new(7, 0) };
        let begun = Delta { about: inner(1), next: bottom, change: merging };
        let begun = memory.add(DELTA, |page| begun.write(page, SLOT));
        let page = memory.chain(LEFT, begun).unwrap().merge().unwrap();
        let state = &page.state;
        assert_eq!((state.merging, state.entries.len()), (Some((9, Pid::new(7, 0))), 2));
        let ended = Delta { about: inner(2), next: begun, change: Change::Delete { key: 9 } };
        let ended = memory.add(DELTA, |page| ended.write(page, SLOT));
        let mut above = Chain::new(LEFT, ended);
        above.add(memory.find(ended)).unwrap();
        above.add_known(&page);
        for state in [memory.chain(LEFT, ended).unwrap().merge().unwrap().state, above.merge().unwrap().state] {
            assert_eq!((state.merging, state.entries), (None, vec![(0, RIGHT_PAGE.word())]));
        }
    }
}
