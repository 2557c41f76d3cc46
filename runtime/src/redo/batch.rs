//! Batches of an owner's [log](crate::write_ahead) as words.
//!
//! ```text
//! structure:32 | records:32
//! number of the log
//! for each record    link to the page, 0:21 | shared:1 | kind:2 | version:40
//!    an image        the page's words from word 1 on
//!    words           number of runs, and for each: first word:32 | words:32, the words
//! ```

use std::ops::DerefMut;

use smallvec::SmallVec;

use super::record::{PartOf, seal_part, share_of};
use crate::{
    lock::{LockWord, OwnerId},
    page::{LOCK, SizeClass, StructureId},
    ptr::{Link, RemotePtr},
};

const IMAGE: u64 = 1;
const WORDS: u64 = 2;
const FREED: u64 = 3;
const KIND: u32 = 40;
const SHARED: u64 = 1 << 42;

/// Words that follow each other: where the first one stands, and all. Most changes of one page set one.
pub type WordRun = (u32, SmallVec<[u64; 2]>);

/// What is recorded of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recorded {
    /// All its words; the first one is not looked at.
    Image(Box<[u64]>),
    /// What a change of this page alone has set.
    Words(SmallVec<[WordRun; 1]>),
    /// It is free.
    Freed,
}

impl Recorded {
    /// Whether no other record is needed to have the page.
    pub(crate) fn is_whole(&self) -> bool {
        !matches!(self, Self::Words(_))
    }
}

/// What a log says of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRecord {
    /// The page.
    pub page: Link,
    /// The version that it has then.
    pub version: u64,
    /// Others change it, too, under its remote lock, which the log's owner holds until the page is there.
    pub is_shared: bool,
    /// What it is then.
    pub what: Recorded,
}

impl PageRecord {
    /// How many words it takes in a batch.
    pub(crate) fn words(&self) -> usize {
        2 + match &self.what {
            Recorded::Image(image) => image.len() - LOCK - 1,
            Recorded::Words(runs) => 1 + runs.iter().map(|(_, words)| 1 + words.len()).sum::<usize>(),
            Recorded::Freed => 0,
        }
    }
}

/// How many words a batch has.
pub(crate) fn words_of(records: &[PageRecord]) -> usize {
    2 + records.iter().map(PageRecord::words).sum::<usize>()
}

/// Writes a batch into the buffers of its parts, for these places.
pub(crate) fn seal_batch<B: DerefMut<Target = [u64]>>(
    (structure, log): (StructureId, u64),
    records: &[PageRecord],
    owner: OwnerId,
    sequence: u64,
    parts: &mut [(RemotePtr, B)],
) {
    let mut shares = parts.iter_mut().map(|(_, part)| share_of(part));
    let mut room: &mut [u64] = &mut [];
    encode(structure, log, records, |mut words| {
        while !words.is_empty() {
            if room.is_empty() {
                room = shares.next().expect("the parts have room for the batch");
            }
            let fitting = words.len().min(room.len());
            let (filled, left) = std::mem::take(&mut room).split_at_mut(fitting);
            filled.copy_from_slice(&words[..fitting]);
            (room, words) = (left, &words[fitting..]);
        }
    });
    drop(shares);
    let count = parts.len();
    for (number, (at, words)) in parts.iter_mut().enumerate() {
        seal_part(PartOf::Batch, owner, sequence, (number, count), *at, words);
    }
}

/// Puts the words of a batch, in order.
fn encode(structure: StructureId, log: u64, records: &[PageRecord], mut put: impl FnMut(&[u64])) {
    put(&[u64::from(structure.0) << 32 | records.len() as u64, log]);
    for PageRecord { page, version, is_shared, what } in records {
        let shared = if *is_shared { SHARED } else { 0 };
        let head = |kind: u64| [page.word(), shared | kind << KIND | LockWord::unlocked(*version).version()];
        match what {
            Recorded::Image(image) => {
                put(&head(IMAGE));
                put(&image[LOCK + 1..]);
            }
            Recorded::Words(runs) => {
                put(&head(WORDS));
                put(&[runs.len() as u64]);
                for (first, run) in runs {
                    put(&[u64::from(*first) << 32 | run.len() as u64]);
                    put(run);
                }
            }
            Recorded::Freed => put(&head(FREED)),
        }
    }
}

/// What the words of a batch say: structure, number of the log, records. `None` if they are none. `is_page` says whether a page of a
/// class can stand at an address.
pub(crate) fn decode(
    words: &[u64],
    is_page: impl Fn(RemotePtr, SizeClass) -> bool,
) -> Option<(StructureId, u64, Vec<PageRecord>)> {
    let mut words = words.iter().copied();
    let (head, log) = (words.next()?, words.next()?);
    let mut record = || {
        let page = Link::from_word(words.next()?);
        let (_, class) = page.remote().filter(|&(at, class)| is_page(at, class))?;
        let head = words.next()?;
        let exactly = |words: &mut dyn Iterator<Item = u64>, count: usize| {
            let taken: SmallVec<[u64; 2]> = words.take(count).collect();
            (taken.len() == count).then_some(taken)
        };
        let what = match (head & !SHARED) >> KIND {
            IMAGE => {
                let mut image = vec![0; LOCK + 1];
                image.extend(exactly(&mut words, class.words() - image.len())?);
                Recorded::Image(image.into())
            }
            WORDS => {
                let runs = (0..words.next()?).map(|_| {
                    let run = words.next()?;
                    let (first, count) = ((run >> 32) as usize, run as u32 as usize);
                    let fits = first > LOCK && first + count <= class.words();
                    Some((first as u32, exactly(&mut words, if fits { count } else { return None })?))
                });
                Recorded::Words(runs.collect::<Option<_>>()?)
            }
            FREED => Recorded::Freed,
            _ => return None,
        };
        Some(PageRecord { page, version: LockWord::from_word(head).version(), is_shared: head & SHARED != 0, what })
    };
    let records = (0..head as u32).map(|_| record()).collect::<Option<_>>()?;
    words.next().is_none().then_some((StructureId((head >> 32) as u32), log, records))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;
    use crate::ptr::ServerId;

    fn link(number: u64) -> Link {
        Link::to(RemotePtr::new(ServerId::new(1).unwrap(), number << 16).unwrap(), SizeClass::SMALLEST)
    }

    fn records() -> Vec<PageRecord> {
        let image = [0, 11, 12, 13, 14, 15, 16, 17];
        let runs = smallvec![(1, smallvec![5]), (4, smallvec![6, 7])];
        vec![
            PageRecord { page: link(1), version: 9, is_shared: true, what: Recorded::Image(image.into()) },
            PageRecord { page: link(2), version: 1 << 38, is_shared: false, what: Recorded::Freed },
            PageRecord { page: link(1), version: 10, is_shared: false, what: Recorded::Words(runs) },
        ]
    }

    fn encoded() -> Vec<u64> {
        let mut words = Vec::new();
        encode(StructureId(7), 3, &records(), |more| words.extend_from_slice(more));
        words
    }

    #[test]
    fn a_batch_is_what_its_words_say() {
        let words = encoded();
        assert_eq!(words.len(), words_of(&records()));
        assert_eq!(decode(&words, |_, _| true), Some((StructureId(7), 3, records())));
        assert_eq!(decode(&words[..words.len() - 1], |_, _| true), None);
        assert_eq!(decode(&words, |at, _| at.offset() != 2 << 16), None, "no page can be there");
    }

    proptest! {
        #[test]
        fn damaged_batches_are_refused_or_make_sense(index in 0usize..40, word: u64) {
            let mut words = encoded();
            let last = words.len() - 1;
            words[index.min(last)] = word;
            for record in decode(&words, |_, _| true).into_iter().flat_map(|(_, _, records)| records) {
                if let (Recorded::Words(runs), Some((_, class))) = (record.what, record.page.remote()) {
                    prop_assert!(runs.iter().all(|(first, run)| *first as usize + run.len() <= class.words()));
                }
            }
        }
    }
}
