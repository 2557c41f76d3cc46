//! Where batches are written, and which of them are done with.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::{
    ptr::{Link, RemotePtr},
    redo::{OVERHEAD, RING_CLASS, RING_FIRST, SHARE_WORDS_MAX},
};

/// Batches that are done with are kept in their place, so that others are found by their numbers: about so many.
const DONE_MAX: usize = 64;

/// A record, as far as room is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) page: Link,
    pub(super) version: u64,
    /// No other record is needed to have the page.
    pub(super) is_whole: bool,
}

#[derive(Debug)]
struct Segment {
    ring: RemotePtr,
    /// The first word that is not taken.
    end: usize,
    /// Parts in it that are not done with.
    parts: usize,
}

impl Segment {
    fn room(&self) -> usize {
        RING_CLASS.words() - self.end
    }
}

#[derive(Debug)]
struct Batch {
    number: u64,
    /// Records that are not done with, and one until it has arrived or failed.
    records: usize,
    segments: SmallVec<[u32; 2]>,
}

/// A record that is not done with.
#[derive(Debug, Clone, Copy)]
struct Live {
    batch: u64,
    version: u64,
    is_whole: bool,
}

/// Segments, and what is in them.
#[derive(Debug, Default)]
pub(super) struct Space {
    segments: Vec<Segment>,
    /// How many of them have records that are not done with.
    in_use: usize,
    /// Where the next part goes, if it fits.
    current: Option<usize>,
    /// In the order of their numbers; of those that are done with, none is in front, and no more are there than others.
    batches: VecDeque<Batch>,
    /// Batches that are not done with.
    live: usize,
    pages: HashMap<Link, SmallVec<[Live; 1]>>,
}

impl Space {
    /// Shares of a batch that does not fit into the rest of a segment.
    fn shares(words: usize) -> impl Iterator<Item = usize> {
        (0..words.div_ceil(SHARE_WORDS_MAX)).map(move |part| (words - part * SHARE_WORDS_MAX).min(SHARE_WORDS_MAX))
    }

    fn fits_in_current(&self, words: usize) -> bool {
        self.current.is_some_and(|current| self.segments[current].room() >= words + OVERHEAD)
    }

    fn empty(&self) -> impl Iterator<Item = usize> {
        let is_empty = |&(_, segment): &(usize, &Segment)| segment.end == RING_FIRST;
        self.segments.iter().enumerate().filter(is_empty).map(|(index, _)| index)
    }

    /// How many segments a batch of so many words takes that are empty.
    pub(super) fn needed_for(&self, words: usize) -> usize {
        if self.fits_in_current(words) { 0 } else { Self::shares(words).count() }
    }

    /// How many segments are empty.
    pub(super) fn empty_count(&self) -> usize {
        self.segments.len() - self.in_use
    }

    pub(super) fn add(&mut self, ring: RemotePtr) {
        self.segments.push(Segment { ring, end: RING_FIRST, parts: 0 });
    }

    /// Takes room for the parts of a batch: where each goes, and how many words it has. There are segments enough.
    pub(super) fn take(
        &mut self,
        batch: u64,
        words: usize,
        held: impl ExactSizeIterator<Item = Held>,
    ) -> SmallVec<[(RemotePtr, usize); 2]> {
        let mut taken = SmallVec::new();
        let mut segments = SmallVec::new();
        let mut place = |this: &mut Self, index: usize, words: usize| {
            let segment = &mut this.segments[index];
            taken.push((segment.ring.word(segment.end), words));
            segment.end += words;
            this.in_use += usize::from(segment.parts == 0);
            segment.parts += 1;
            this.current = Some(index);
            segments.push(index as u32);
        };
        match self.current.filter(|_| self.fits_in_current(words)) {
            Some(current) => place(self, current, words + OVERHEAD),
            None => {
                let empty: Vec<usize> = self.empty().collect();
                Self::shares(words).zip(empty).for_each(|(share, index)| place(self, index, share + OVERHEAD));
            }
        }
        self.batches.push_back(Batch { number: batch, records: held.len() + 1, segments });
        self.live += 1;
        for Held { page, version, is_whole } in held {
            self.pages.entry(page).or_default().push(Live { batch, version, is_whole });
        }
        taken
    }

    /// The batch with the image of a page at a version.
    pub(super) fn batch_of(&self, page: Link, version: u64) -> Option<u64> {
        let live = self.pages.get(&page)?.iter();
        live.filter(|live| live.version == version && live.is_whole).map(|live| live.batch).min()
    }

    /// A batch has arrived: earlier records of its pages are of no use where it has images.
    pub(super) fn arrived(&mut self, batch: u64, held: impl Iterator<Item = Held>) {
        for Held { page, version, is_whole } in held {
            if is_whole {
                self.done(page, |live| live.version < version || live.version == version && live.batch < batch);
            }
        }
        self.settle(batch);
    }

    /// A batch was not written.
    pub(super) fn failed(&mut self, batch: u64, held: impl Iterator<Item = Held>) {
        held.for_each(|held| self.done(held.page, |live| live.batch == batch));
        self.settle(batch);
    }

    /// A page is in remote memory at a version.
    pub(super) fn written(&mut self, page: Link, version: u64) {
        self.done(page, |live| live.version <= version);
    }

    fn done(&mut self, page: Link, is_done: impl Fn(&Live) -> bool) {
        let Some(all) = self.pages.get_mut(&page) else { return };
        let done: SmallVec<[u64; 4]> = all.iter().filter(|live| is_done(live)).map(|live| live.batch).collect();
        all.retain(|live| !is_done(live));
        if all.is_empty() {
            self.pages.remove(&page);
        }
        done.into_iter().for_each(|batch| self.settle(batch));
    }

    /// Where a batch is, that is not done with. Most are in a row with the first, or with the last.
    fn index_of(&self, number: u64) -> Option<usize> {
        let is_it = |&index: &usize| self.batches.get(index).is_some_and(|batch| batch.number == number);
        let (first, last) = (self.batches.front()?.number, self.batches.back()?.number);
        let from_last = last.checked_sub(number).and_then(|back| (self.batches.len() as u64 - 1).checked_sub(back));
        let from_first = number.checked_sub(first);
        let mut guesses = [from_last, from_first].into_iter().flatten().map(|index| index as usize);
        guesses.find(is_it).or_else(|| self.batches.binary_search_by_key(&number, |batch| batch.number).ok())
    }

    /// One record of a batch is done with, or it has arrived or failed.
    fn settle(&mut self, number: u64) {
        let Some(index) = self.index_of(number) else { return };
        let batch = &mut self.batches[index];
        batch.records -= 1;
        if batch.records != 0 {
            return;
        }
        for index in std::mem::take(&mut batch.segments) {
            let segment = &mut self.segments[index as usize];
            segment.parts -= 1;
            if segment.parts == 0 {
                segment.end = RING_FIRST;
                self.in_use -= 1;
            }
        }
        self.live -= 1;
        while self.batches.front().is_some_and(|batch| batch.records == 0) {
            self.batches.pop_front();
        }
        if self.batches.len() > 2 * self.live + DONE_MAX {
            self.batches.retain(|batch| batch.records != 0);
        }
    }

    /// Segments that there are.
    pub(super) fn segments(&self) -> usize {
        self.segments.len()
    }

    /// Segments with records that are not done with.
    pub(super) fn in_use(&self) -> usize {
        self.in_use
    }

    /// The pages of the older half of the batches.
    pub(super) fn oldest(&self) -> Vec<Link> {
        let mut all = self.batches.iter().filter(|batch| batch.records != 0);
        let Some(middle) = all.nth(self.live / 2).map(|batch| batch.number) else { return Vec::new() };
        let is_old = |live: &[Live]| live.iter().any(|live| live.batch <= middle);
        self.pages.iter().filter(|(_, live)| is_old(live)).map(|(&page, _)| page).collect()
    }

    /// The first batch that is not done with.
    pub(super) fn oldest_batch(&self) -> Option<u64> {
        self.batches.front().map(|batch| batch.number)
    }

    /// The pages with records that are not done with.
    pub(super) fn pages(&self) -> Vec<Link> {
        self.pages.keys().copied().collect()
    }

    /// Whether all that was taken is done with.
    pub(super) fn is_done(&self) -> bool {
        self.batches.is_empty()
    }

    /// All its segments.
    pub(super) fn into_rings(self) -> Vec<RemotePtr> {
        self.segments.into_iter().map(|segment| segment.ring).collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{page::SizeClass, ptr::ServerId};

    fn at(number: u64) -> RemotePtr {
        RemotePtr::new(ServerId::new(0).unwrap(), number << 14).unwrap()
    }

    fn page(number: u64) -> Link {
        Link::to(at(1000 + number), SizeClass::SMALLEST)
    }

    #[derive(Debug, Clone)]
    enum Step {
        /// A batch of so many words with images of these pages; whether it arrives.
        Batch(usize, Vec<u64>, bool),
        Written(u64),
        TurnOver,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1usize..5000, prop::collection::vec(0u64..6, 1..4), prop::bool::weighted(0.9))
                .prop_map(|(words, pages, arrives)| Step::Batch(words, pages, arrives)),
            (0u64..6).prop_map(Step::Written),
            Just(Step::TurnOver),
        ]
    }

    proptest! {
        /// The newest image of a page is in nobody's way until the page is written, and with it all of its batch.
        #[test]
        fn what_is_needed_is_not_overwritten(steps in prop::collection::vec(step(), 1..60)) {
            let (mut past, mut space, mut next_ring, mut version) = (Space::default(), Space::default(), 0, 0);
            // Of each page, the places of its newest batch.
            let mut needed: HashMap<u64, Vec<(RemotePtr, usize)>> = HashMap::new();
            for (batch, step) in (1..).zip(steps) {
                match step {
                    Step::TurnOver => {
                        if past.is_done() {
                            past = std::mem::take(&mut space);
                        }
                    }
                    Step::Written(number) => {
                        past.written(page(number), version);
                        space.written(page(number), version);
                        needed.remove(&number);
                    }
                    Step::Batch(words, mut numbers, arrives) => {
                        numbers.sort_unstable();
                        numbers.dedup();
                        version += 1;
                        let held: Vec<Held> =
                            numbers.iter().map(|&number| Held { page: page(number), version, is_whole: true }).collect();
                        for _ in space.empty_count()..space.needed_for(words) {
                            next_ring += 1;
                            space.add(at(next_ring));
                        }
                        let places = space.take(batch, words, held.iter().copied());
                        let taken: usize = places.iter().map(|(_, words)| words - OVERHEAD).sum();
                        prop_assert_eq!(taken, words);
                        for &(place, words) in needed.values().flatten() {
                            for &(other, count) in &places {
                                let (a, b) = (place.offset(), other.offset());
                                prop_assert!(a + words as u64 * 8 <= b || b + count as u64 * 8 <= a, "overwritten");
                            }
                        }
                        if arrives {
                            past.arrived(batch, held.iter().copied());
                            space.arrived(batch, held.into_iter());
                            numbers.iter().for_each(|&number| drop(needed.insert(number, places.to_vec())));
                        } else {
                            space.failed(batch, held.into_iter());
                        }
                    }
                }
            }
            let in_use = space.segments.iter().filter(|segment| segment.parts != 0).count();
            prop_assert_eq!(space.in_use(), in_use);
            for mut space in [past, space] {
                (0..6).for_each(|number| space.written(page(number), version));
                prop_assert_eq!((space.in_use(), space.empty_count()), (0, space.segments()));
                prop_assert!(space.pages.is_empty() && space.batches.is_empty());
            }
        }
    }
}
