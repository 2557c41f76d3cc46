//! Cached pages open for writing.

use std::sync::atomic::AtomicU64;

use farlink_cache::Change;
use farlink_runtime::{
    access::{NewPage, PagesMut, Slot, Words},
    change::Role,
    lock::LockWord,
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SELF, SizeClass, StructureId},
};
use smallvec::SmallVec;

/// The pages of one change over [`Cached`](super::Cached) access.
#[derive(Debug)]
pub struct CachedPages<'a> {
    change: Change<'a>,
    structure: StructureId,
    fates: Fates,
    old: usize,
}

type Fates = SmallVec<[Fate; 4]>;

/// What a change makes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Kept,
    /// Kept, and not to be altered.
    ReliedOn,
    Changed,
    Freed,
    New,
}

/// What a change has made of its pages.
#[derive(Debug)]
pub(super) struct Closed(SmallVec<[(Fate, LockWord); 4]>);

impl Closed {
    pub(super) fn fate(&self, page: usize) -> Fate {
        self.0[page].0
    }

    /// The lock word that it had before.
    pub(super) fn lock(&self, page: usize) -> LockWord {
        self.0[page].1
    }

    /// The pages that were freed, with their lock words.
    pub(super) fn freed(&self) -> impl Iterator<Item = (usize, LockWord)> {
        let freed = self.0.iter().enumerate().filter(|(_, (fate, _))| *fate == Fate::Freed);
        freed.map(|(page, &(_, lock))| (page, lock))
    }
}

impl<'a> CachedPages<'a> {
    /// Takes the change over until [`CachedPages::close`]; its first `old` pages exist, the others are `new`.
    pub(super) fn open(
        change: &mut Change<'a>,
        structure: StructureId,
        roles: impl Iterator<Item = Role>,
        new: &[NewPage],
    ) -> Self {
        let fate = |role| if role == Role::ReliedOn { Fate::ReliedOn } else { Fate::Kept };
        let mut fates: Fates = roles.map(fate).collect();
        let old = fates.len();
        let mut change = std::mem::take(change);
        for (page, new) in (old..).zip(new) {
            change.set(page, LOCK, new.first_lock().word());
            change.set(page, SELF, new.at().raw());
            let identity = Identity { structure, level: 0, class: new.class(), kind: 0, is_words: false };
            change.set(page, IDENTITY, identity.word());
        }
        fates.resize(old + new.len(), Fate::New);
        Self { change, structure, fates, old }
    }

    /// Gives changed pages their new version, and the change back. All that it leaves must be what `may_be` admits, or the change is
    /// taken back.
    pub(super) fn close(
        mut self,
        change: &mut Change<'a>,
        mut may_be: impl FnMut(usize, &[AtomicU64]) -> bool,
    ) -> Closed {
        let mut closed = SmallVec::new();
        for (page, &fate) in self.fates.iter().enumerate() {
            let lock = LockWord::from_word(self.change.word(page, LOCK));
            if fate == Fate::Changed {
                self.change.set(page, LOCK, LockWord::unlocked(lock.next_version()).word());
            }
            closed.push((fate, lock));
        }
        let is_left = |fate: Fate| matches!(fate, Fate::Changed | Fate::New);
        let mut left = self.fates.iter().enumerate().filter(|&(_, &fate)| is_left(fate));
        if !left.all(|(page, _)| may_be(page, self.change.words(page))) {
            self.change.refuse();
        }
        *change = self.change;
        Closed(closed)
    }

    #[inline]
    fn put(&mut self, page: usize, index: usize, words: &[u64]) {
        if self.change.fill(page, index, words) && !matches!(self.fates[page], Fate::Changed | Fate::New) {
            self.note_change(page);
        }
    }

    #[cold]
    fn note_change(&mut self, page: usize) {
        assert!(self.fates[page] != Fate::ReliedOn, "a page that a change relies on is not altered");
        if self.fates[page] == Fate::Kept {
            self.fates[page] = Fate::Changed;
        }
    }
}

/// One page of a change, as words.
struct ChangedWords<'a, 'c>(&'a Change<'c>, usize);

impl Words for ChangedWords<'_, '_> {
    fn count(&self) -> usize {
        self.0.count(self.1)
    }

    fn word(&self, index: usize) -> u64 {
        self.0.word(self.1, index)
    }
}

impl PagesMut for CachedPages<'_> {
    fn page(&self, slot: Slot) -> impl Words + '_ {
        ChangedWords(&self.change, slot.index(self.old))
    }

    fn set(&mut self, slot: Slot, index: usize, word: u64) {
        assert!(index >= HEADER_WORDS, "word {index} of a page belongs to the framework");
        self.put(slot.index(self.old), index, &[word]);
    }

    #[inline]
    fn fill(&mut self, slot: Slot, index: usize, words: &[u64]) {
        assert!(index >= HEADER_WORDS, "word {index} of a page belongs to the framework");
        self.put(slot.index(self.old), index, words);
    }

    fn describe(&mut self, slot: Slot, level: u8, kind: u8) {
        let page = slot.index(self.old);
        let class = SizeClass::of_bytes(self.change.count(page) * 8).expect("a page has the size of its class");
        let identity = Identity { structure: self.structure, level, class, kind, is_words: false };
        self.put(page, IDENTITY, &[identity.word()]);
    }

    fn describe_words(&mut self, _slot: Slot, _level: u8, _kind: u8) {
        panic!("pages whose words change one by one are made over one-sided access");
    }

    fn free(&mut self, slot: Slot) {
        let page = slot.index(self.old);
        assert!(page < self.old, "a new page is not freed: it is dropped before the change");
        assert!(self.fates[page] != Fate::ReliedOn, "a page is freed only as it was read");
        self.change.free(page);
        self.fates[page] = Fate::Freed;
    }
}
