//! Cached pages open for writing.

use farlink_cache::Change;
use farlink_runtime::{
    access::Views,
    lock::LockWord,
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SELF, SizeClass, StructureId},
    pages::NewPage,
};

/// The pages of one change over [`Cached`](super::Cached) access.
#[derive(Debug)]
pub struct CachedViews<'a> {
    change: Change<'a>,
    structure: StructureId,
    fates: Vec<Fate>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    Changed,
    Freed,
    New,
}

impl<'a> CachedViews<'a> {
    /// Takes the change over until [`CachedViews::close`]; its first `old` pages exist, the others are `new`.
    pub(super) fn open(change: &mut Change<'a>, structure: StructureId, old: usize, new: &[NewPage]) -> Self {
        let mut change = std::mem::take(change);
        for (page, new) in (old..).zip(new) {
            change.set(page, LOCK, new.first_lock().word());
            change.set(page, SELF, new.at().raw());
            let identity = Identity { structure, level: 0, class: new.class(), kind: 0 };
            change.set(page, IDENTITY, identity.word());
        }
        let mut fates = vec![Fate::Kept; old];
        fates.resize(old + new.len(), Fate::New);
        Self { change, structure, fates }
    }

    /// Gives changed pages their new version, and the change back; returns the pages that were freed with their lock words.
    pub(super) fn close(mut self, change: &mut Change<'a>) -> Vec<(usize, LockWord)> {
        let mut freed = Vec::new();
        for (page, &fate) in self.fates.iter().enumerate() {
            let lock = LockWord::from_word(self.change.word(page, LOCK));
            match fate {
                Fate::Changed => self.change.set(page, LOCK, LockWord::unlocked(lock.next_version()).word()),
                Fate::Freed => freed.push((page, lock)),
                Fate::Kept | Fate::New => {}
            }
        }
        *change = self.change;
        freed
    }

    fn put(&mut self, page: usize, index: usize, word: u64) {
        if self.change.word(page, index) != word {
            self.change.set(page, index, word);
            if self.fates[page] == Fate::Kept {
                self.fates[page] = Fate::Changed;
            }
        }
    }
}

impl Views for CachedViews<'_> {
    fn count(&self, page: usize) -> usize {
        self.change.count(page)
    }

    fn word(&self, page: usize, index: usize) -> u64 {
        self.change.word(page, index)
    }

    fn set(&mut self, page: usize, index: usize, word: u64) {
        assert!(index >= HEADER_WORDS, "word {index} of a page belongs to the framework");
        self.put(page, index, word);
    }

    fn describe(&mut self, page: usize, level: u8, kind: u8) {
        let class = SizeClass::of_bytes(self.count(page) * 8).expect("a page has the size of its class");
        let identity = Identity { structure: self.structure, level, class, kind };
        self.put(page, IDENTITY, identity.word());
    }

    fn free(&mut self, page: usize) {
        self.change.free(page);
        self.fates[page] = Fate::Freed;
    }
}
