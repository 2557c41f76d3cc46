//! Pages open for writing, as private images: a change is computed on them before anything is locked.

use super::PageCopy;
use crate::{
    access::{Interrupt, PageRef, Views},
    buffer::Buffer,
    lock::{LockWord, OwnerId},
    page::{self, CHECKSUM, HEADER_WORDS, IDENTITY, Identity, PAGE_WORDS_MAX, StructureId, mix},
    pages::NewPage,
    ptr::RemotePtr,
    worker::remote::Remote,
};

/// Words of a page that a change has set.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Dirty([u64; PAGE_WORDS_MAX / 64]);

/// Unchanged words between two changed ones that are cheaper to write than a WRITE of its own is to post.
const GAP_WORDS_MAX: usize = 2;

impl Dirty {
    fn mark(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|&bits| bits == 0)
    }

    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        self.0.iter().enumerate().flat_map(|(group, &bits)| {
            std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)))
                .take_while(|&bits| bits != 0)
                .map(move |bits| group * 64 + bits.trailing_zeros() as usize)
        })
    }

    /// The ranges of words to write, in order.
    pub(super) fn runs(&self) -> Vec<std::ops::Range<usize>> {
        let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
        for index in self.indices() {
            match runs.last_mut() {
                Some(run) if index <= run.end + GAP_WORDS_MAX => run.end = index + 1,
                _ => runs.push(index..index + 1),
            }
        }
        runs
    }
}

/// An existing page of a change.
#[derive(Debug)]
pub(super) struct Changed {
    pub(super) at: RemotePtr,
    pub(super) lock: LockWord,
    pub(super) image: Buffer,
    pub(super) dirty: Dirty,
    pub(super) free: bool,
    sum: u64,
}

impl Changed {
    fn open(copy: PageCopy) -> Self {
        let (at, lock) = (copy.at(), copy.lock());
        let image = copy.0;
        let sum = image[CHECKSUM].wrapping_sub(page::binding(lock.version()));
        Self { at, lock, image, dirty: Dirty::default(), free: false, sum }
    }

    fn set(&mut self, index: usize, word: u64) {
        let old = std::mem::replace(&mut self.image[index], word);
        if old != word {
            self.sum = self.sum.wrapping_sub(mix(index, old)).wrapping_add(mix(index, word));
            self.dirty.mark(index);
        }
    }

    /// The lock word while `owner` changes the page.
    pub(super) fn ours(&self, owner: OwnerId) -> LockWord {
        self.lock.locked_by(owner)
    }

    /// Where which words are to be written; none of a page that is freed.
    pub(super) fn words_to_write(&self) -> Vec<(RemotePtr, u64)> {
        let indices = self.dirty.indices().filter(|_| !self.free);
        indices.map(|index| (self.at.word(index), self.image[index])).collect()
    }

    /// The lock word that ends the change.
    pub(super) fn after(&self) -> LockWord {
        let version = self.lock.next_version();
        if self.free { LockWord::free(version) } else { LockWord::unlocked(version) }
    }

    /// Sets the checksum that goes with the version after this change.
    pub(super) fn seal(&mut self) {
        self.image[CHECKSUM] = self.sum.wrapping_add(page::binding(self.lock.next_version()));
        self.dirty.mark(CHECKSUM);
    }
}

/// A new page of a change.
#[derive(Debug)]
pub(super) struct Added {
    pub(super) page: NewPage,
    pub(super) image: Buffer,
}

impl Added {
    /// Sets header and checksum.
    pub(super) fn seal(&mut self) {
        let identity = Identity::from_word(self.image[IDENTITY]).expect("views describe pages as identities");
        page::seal(&mut self.image, self.page.at(), identity, self.page.first_lock().version());
    }
}

/// The pages of one change over one-sided access.
#[derive(Debug)]
pub struct OneSidedViews {
    structure: StructureId,
    pub(super) changed: Vec<Changed>,
    pub(super) added: Vec<Added>,
}

impl OneSidedViews {
    pub(super) fn open(
        remote: &impl Remote,
        structure: StructureId,
        pages: Vec<PageCopy>,
        new: Vec<NewPage>,
    ) -> Result<Self, Interrupt> {
        let add = |page: NewPage| {
            let mut image = remote.buffer(page.class().words())?;
            image.fill(0);
            let identity = Identity { structure, level: 0, class: page.class(), kind: 0 };
            image[IDENTITY] = identity.word();
            Ok(Added { page, image })
        };
        let added = new.into_iter().map(add).collect::<Result<_, crate::error::Error>>()?;
        Ok(Self { structure, changed: pages.into_iter().map(Changed::open).collect(), added })
    }

    fn image(&self, page: usize) -> &[u64] {
        match page.checked_sub(self.changed.len()) {
            None => &self.changed[page].image,
            Some(added) => &self.added[added].image,
        }
    }

    fn put(&mut self, page: usize, index: usize, word: u64) {
        match page.checked_sub(self.changed.len()) {
            None => self.changed[page].set(index, word),
            Some(added) => self.added[added].image[index] = word,
        }
    }
}

impl Views for OneSidedViews {
    fn count(&self, page: usize) -> usize {
        self.image(page).len()
    }

    fn word(&self, page: usize, index: usize) -> u64 {
        self.image(page)[index]
    }

    fn set(&mut self, page: usize, index: usize, word: u64) {
        assert!(index >= HEADER_WORDS, "word {index} of a page belongs to the framework");
        self.put(page, index, word);
    }

    fn describe(&mut self, page: usize, level: u8, kind: u8) {
        let class = crate::page::SizeClass::of_bytes(self.count(page) * 8).expect("a page has the size of its class");
        let identity = Identity { structure: self.structure, level, class, kind };
        self.put(page, IDENTITY, identity.word());
    }

    fn free(&mut self, page: usize) {
        self.changed[page].free = true;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_what_is_marked_and_bridge_small_gaps_only() {
        let mut dirty = Dirty::default();
        assert!(dirty.is_empty() && dirty.runs().is_empty());
        for index in [1, 7, 8, 11, 63, 64, 65, 127, 511] {
            dirty.mark(index);
        }
        assert_eq!(dirty.runs(), [1..2, 7..12, 63..66, 127..128, 511..512]);
    }
}
