//! Batches of an owner's [log](crate::write_ahead) as words.
//!
//! ```text
//! structure:32 | records:32
//! number of the log
//! for each record    link to the page, 0:21 | shared:1 | kind:2 | version:40
//!    an image        the page's words from word 1 on
//!    words           number of runs, and for each: first word:32 | words:32, the words
//! ```

use smallvec::SmallVec;

use crate::{
    lock::LockWord,
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

    /// About how many words it takes.
    pub(crate) fn words(&self) -> usize {
        match self {
            Self::Image(image) => image.len(),
            Self::Words(runs) => runs.iter().map(|(_, words)| words.len() + 1).sum(),
            Self::Freed => 2,
        }
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

/// The words of a batch.
pub(crate) fn encode(structure: StructureId, log: u64, records: &[PageRecord]) -> Vec<u64> {
    let room = records.iter().map(|record| 2 + record.what.words()).sum::<usize>();
    let mut words = Vec::with_capacity(2 + room);
    words.extend([u64::from(structure.0) << 32 | records.len() as u64, log]);
    for PageRecord { page, version, is_shared, what } in records {
        let shared = if *is_shared { SHARED } else { 0 };
        let mut head =
            |kind: u64| words.extend([page.word(), shared | kind << KIND | LockWord::unlocked(*version).version()]);
        match what {
            Recorded::Image(image) => {
                head(IMAGE);
                words.extend_from_slice(&image[LOCK + 1..]);
            }
            Recorded::Words(runs) => {
                head(WORDS);
                words.push(runs.len() as u64);
                for (first, run) in runs {
                    words.push(u64::from(*first) << 32 | run.len() as u64);
                    words.extend_from_slice(run);
                }
            }
            Recorded::Freed => head(FREED),
        }
    }
    words
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

    #[test]
    fn a_batch_is_what_its_words_say() {
        let words = encode(StructureId(7), 3, &records());
        assert_eq!(decode(&words, |_, _| true), Some((StructureId(7), 3, records())));
        assert_eq!(decode(&words[..words.len() - 1], |_, _| true), None);
        assert_eq!(decode(&words, |at, _| at.offset() != 2 << 16), None, "no page can be there");
    }

    proptest! {
        #[test]
        fn damaged_batches_are_refused_or_make_sense(index in 0usize..40, word: u64) {
            let mut words = encode(StructureId(7), 3, &records());
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
