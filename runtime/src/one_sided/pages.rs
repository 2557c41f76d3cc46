//! Pages open for writing, as private images: a change is computed on them before anything is locked.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::PageCopy;
use crate::{
    access::{Interrupt, PageRef},
    buffer::Buffer,
    change::{PagesMut, Role, Slot},
    error::Error,
    lock::{LockWord, OwnerId},
    page::{self, CHECKSUM, HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass, StructureId, mix},
    pages::NewPage,
    ptr::RemotePtr,
    worker::remote::Remote,
};

/// Words of a page that a change has set.
#[derive(Debug, Clone)]
pub(super) struct Dirty(SmallVec<[u64; 4]>);

/// Ranges of words.
pub(super) type Runs = SmallVec<[Range<usize>; 4]>;

/// Unchanged words between two changed ones that are cheaper to write than a WRITE of its own is to post.
const GAP_WORDS_MAX: usize = 2;

impl Dirty {
    /// None of a page of so many words.
    fn none(words: usize) -> Self {
        Self(smallvec![0; words.div_ceil(64)])
    }

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
    pub(super) fn runs(&self) -> Runs {
        let mut runs = Runs::new();
        let mut add = |found: Range<usize>| match runs.last_mut() {
            Some(run) if found.start <= run.end + GAP_WORDS_MAX => run.end = found.end,
            _ => runs.push(found),
        };
        for (group, &bits) in self.0.iter().enumerate() {
            let mut left = bits;
            while left != 0 {
                let first = left.trailing_zeros();
                let end = first + (left >> first).trailing_ones();
                add(group * 64 + first as usize..group * 64 + end as usize);
                left &= u64::MAX.checked_shl(end).unwrap_or(0);
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
    /// Whether all of its change is one word of it.
    pub(super) is_one_word: bool,
    sum: u64,
}

impl Changed {
    pub(super) fn open(copy: PageCopy) -> Self {
        let (at, lock) = (copy.at(), copy.lock());
        let image = copy.0;
        let dirty = Dirty::none(image.len());
        let sum = image[CHECKSUM].wrapping_sub(page::binding(lock.version()));
        Self { at, lock, image, dirty, free: false, is_one_word: false, sum }
    }

    pub(super) fn set(&mut self, index: usize, word: u64) {
        let old = std::mem::replace(&mut self.image[index], word);
        if old != word {
            self.sum = self.sum.wrapping_sub(mix(index, old)).wrapping_add(mix(index, word));
            self.dirty.mark(index);
        }
    }

    /// Whether it is to be written or freed. To be asked before it is sealed.
    pub(super) fn is_touched(&self) -> bool {
        self.free || !self.dirty.is_empty()
    }

    /// Its size.
    pub(super) fn class(&self) -> SizeClass {
        SizeClass::of_bytes(self.image.len() * 8).expect("a page has the size of its class")
    }

    /// The lock word while `owner` changes the page.
    pub(super) fn ours(&self, owner: OwnerId) -> LockWord {
        if self.is_one_word { self.lock.locked_for_one_word_by(owner) } else { self.lock.locked_by(owner) }
    }

    /// Says so, if the change is of this page alone. To be called before it is sealed.
    pub(super) fn note_if_one_word(&mut self) {
        self.is_one_word = !self.free && self.dirty.indices().nth(1).is_none();
    }

    /// Where which words are to be written; none of a page that is freed.
    pub(super) fn words_to_write(&self) -> Vec<(RemotePtr, u64)> {
        let indices = self.dirty.indices().filter(|_| !self.free);
        indices.map(|index| (self.at.word(index), self.image[index])).collect()
    }

    /// The page as the change leaves it; none if it frees it. To be called once it is sealed, or if it changes nothing.
    pub(super) fn into_copy(mut self) -> Option<PageCopy> {
        if !self.dirty.is_empty() {
            self.image[LOCK] = LockWord::unlocked(self.lock.next_version()).word();
        }
        (!self.free).then_some(PageCopy(self.image))
    }

    /// The lock word that ends the change of `owner`.
    pub(super) fn after(&self, owner: OwnerId) -> LockWord {
        let version = self.lock.next_version();
        if self.free { LockWord::free(version, Some(owner)) } else { LockWord::unlocked(version) }
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
pub struct OneSidedPages {
    structure: StructureId,
    /// In the order of their slots.
    pub(super) old: Vec<(Changed, Role)>,
    pub(super) added: Vec<Added>,
}

impl OneSidedPages {
    pub(super) fn open(
        remote: &impl Remote,
        structure: StructureId,
        pages: impl IntoIterator<Item = (PageCopy, Role)>,
        new: Vec<NewPage>,
    ) -> Result<Self, Interrupt> {
        let add = |page: NewPage| {
            let mut image = remote.buffer(page.class().words())?;
            image.fill(0);
            let identity = Identity { structure, level: 0, class: page.class(), kind: 0, is_words: false };
            image[IDENTITY] = identity.word();
            Ok(Added { page, image })
        };
        let added = new.into_iter().map(add).collect::<Result<_, Error>>()?;
        let old: Vec<_> = pages.into_iter().map(|(page, role)| (Changed::open(page), role)).collect();
        for (index, (page, _)) in old.iter().enumerate() {
            if old[..index].iter().any(|(other, _)| other.at == page.at) {
                return Err(Error::PageTwice { page: page.at }.into());
            }
            if page::has_words(&page.image) {
                return Err(Error::NotCoherent { what: "a page whose words change one by one is not changed" }.into());
            }
        }
        Ok(Self { structure, old, added })
    }

    fn image(&self, slot: Slot) -> &[u64] {
        let index = slot.index(self.old.len());
        match index.checked_sub(self.old.len()) {
            None => &self.old[index].0.image,
            Some(added) => &self.added[added].image,
        }
    }

    fn put(&mut self, slot: Slot, index: usize, word: u64) {
        let page = slot.index(self.old.len());
        match page.checked_sub(self.old.len()) {
            None => {
                let (page, role) = &mut self.old[page];
                assert!(*role != Role::ReliedOn, "a page that a change relies on is not altered");
                page.set(index, word);
            }
            Some(added) => self.added[added].image[index] = word,
        }
    }

    fn describe_as(&mut self, slot: Slot, level: u8, kind: u8, is_words: bool) {
        let class = SizeClass::of_bytes(self.image(slot).len() * 8).expect("a page has the size of its class");
        let identity = Identity { structure: self.structure, level, class, kind, is_words };
        self.put(slot, IDENTITY, identity.word());
    }
}

impl PagesMut for OneSidedPages {
    fn page(&self, slot: Slot) -> impl crate::words::Words + '_ {
        self.image(slot)
    }

    fn set(&mut self, slot: Slot, index: usize, word: u64) {
        assert!(index >= HEADER_WORDS, "word {index} of a page belongs to the framework");
        self.put(slot, index, word);
    }

    fn describe(&mut self, slot: Slot, level: u8, kind: u8) {
        self.describe_as(slot, level, kind, false);
    }

    fn describe_words(&mut self, slot: Slot, level: u8, kind: u8) {
        assert!(slot.index(self.old.len()) >= self.old.len(), "only a new page becomes one of words");
        self.describe_as(slot, level, kind, true);
    }

    fn free(&mut self, slot: Slot) {
        let index = slot.index(self.old.len());
        assert!(index < self.old.len(), "a new page is not freed: it is dropped before the change");
        let (page, role) = &mut self.old[index];
        assert!(*role == Role::AsRead, "a page is freed only as it was read");
        page.free = true;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use rand::{RngExt, SeedableRng};

    use super::*;

    #[test]
    fn runs_cover_what_is_marked_and_bridge_small_gaps_only() {
        let mut dirty = Dirty::none(512);
        assert!(dirty.is_empty() && dirty.runs().is_empty());
        for index in [1, 7, 8, 11, 63, 64, 65, 127, 511] {
            dirty.mark(index);
        }
        assert_eq!(dirty.runs()[..], [1..2, 7..12, 63..66, 127..128, 511..512]);
        (0..512).for_each(|index| dirty.mark(index));
        assert!(dirty.runs().iter().eq(&[Range { start: 0, end: 512 }]));
    }

    #[test]
    fn runs_have_all_that_is_marked() {
        let mut random = rand::rngs::StdRng::seed_from_u64(7);
        for _ in 0..1000 {
            let mut dirty = Dirty::none(192);
            let dense = random.random_range(0.0..1.0);
            (0..192).filter(|_| random.random_bool(dense)).for_each(|index| dirty.mark(index));
            let runs = dirty.runs();
            assert!(runs.windows(2).all(|pair| pair[0].end + GAP_WORDS_MAX < pair[1].start), "{runs:?}");
            let mut marked = dirty.indices().peekable();
            for run in runs {
                assert_eq!((marked.peek(), run.is_empty()), (Some(&run.start), false));
                let last = std::iter::from_fn(|| marked.next_if(|index| run.contains(index))).last();
                assert_eq!(last, Some(run.end - 1));
            }
            assert_eq!(marked.next(), None);
        }
    }
}
