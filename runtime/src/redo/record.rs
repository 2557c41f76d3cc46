//! Records as words, in parts.

use crate::{
    lock::{LockState, LockWord, OwnerId},
    page::{LOCK, SizeClass, avalanche, body_sum, mix},
    ptr::{Link, RemotePtr},
};

use super::{RING_CLASS, RING_FIRST, RING_FROM};

/// What a part is of: the high half of its first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum PartOf {
    /// The record of a change under remote locks.
    Change = 0x5ed0_7ec0 << 32,
    /// A batch of an owner's [log](crate::write_ahead).
    Batch = 0x5ed0_ba7c << 32,
}

/// Words in front of the share of a part.
const HEADER: usize = 4;
const SUM: usize = 3;
/// Words of a part that are not its share: the header and the mark.
pub(crate) const OVERHEAD: usize = HEADER + 1;
/// Words of the longest share.
pub(crate) const SHARE_WORDS_MAX: usize = RING_CLASS.words() - RING_FIRST - OVERHEAD;

/// What says that a change had all its locks; see the [module](super).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Evidence {
    /// Its only lock.
    Lock,
    /// Its new pages are published.
    NewPages,
    /// The mark behind the record.
    Mark,
    /// A batch of the owner's [log](crate::write_ahead), which says what becomes of its pages.
    Log,
}

impl Evidence {
    /// That of a change of so many pages.
    pub(crate) fn of(changed: usize, relied_on: usize, new: usize) -> Self {
        match (changed, relied_on, new) {
            (_, _, 1..) => Self::NewPages,
            (1, 0, 0) => Self::Lock,
            _ => Self::Mark,
        }
    }

    fn from_word(word: u64) -> Option<Self> {
        [Self::Lock, Self::NewPages, Self::Mark, Self::Log].into_iter().find(|&evidence| evidence as u64 == word & 3)
    }
}

/// A page that a change locks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordedPage {
    pub(crate) at: RemotePtr,
    pub(crate) class: SizeClass,
    /// Its lock word before the change.
    pub(crate) lock: LockWord,
    /// The change frees it.
    pub(crate) frees: bool,
    /// Words that it gets, by the index of the first of them.
    pub(crate) runs: Vec<(usize, Vec<u64>)>,
}

impl RecordedPage {
    /// The lock word that ends the change, if `holder` carries it out: a page that it frees is theirs.
    pub(crate) fn after(&self, holder: OwnerId) -> LockWord {
        let version = self.lock.next_version();
        if self.frees { LockWord::free(version, Some(holder)) } else { LockWord::unlocked(version) }
    }

    /// Where which words are to be written.
    pub(crate) fn words_to_write(&self) -> impl Iterator<Item = (RemotePtr, u64)> {
        let words = |(first, words): &(usize, Vec<u64>)| {
            let first = *first;
            words.clone().into_iter().enumerate().map(move |(index, word)| (first + index, word))
        };
        self.runs.iter().flat_map(words).map(|(index, word)| (self.at.word(index), word))
    }

    pub(crate) fn body(&self) -> Body {
        let mut body = Body::new(1, 0, Evidence::Lock);
        body.page(self.at, self.class, self.lock, self.frees);
        self.runs.iter().for_each(|(first, words)| body.run(*first, words));
        body
    }
}

/// The words of a record, being put together.
#[derive(Debug)]
pub(crate) struct Body {
    words: Vec<u64>,
    /// The word that counts the runs of the last page.
    runs_at: usize,
}

impl Body {
    pub(crate) fn new(pages: usize, new: usize, evidence: Evidence) -> Self {
        Self::with_room(pages, new, evidence, 0)
    }

    /// With room for so many words of runs.
    pub(crate) fn with_room(pages: usize, new: usize, evidence: Evidence, runs: usize) -> Self {
        let mut words = Vec::with_capacity(1 + 3 * pages + runs + 2 * new);
        words.push((pages as u64) << 48 | (new as u64) << 32 | evidence as u64);
        Self { words, runs_at: 0 }
    }

    /// Adds a page; its runs follow.
    pub(crate) fn page(&mut self, at: RemotePtr, class: SizeClass, lock: LockWord, frees: bool) {
        self.runs_at = self.words.len() + 2;
        self.words.extend([Link::to(at, class).word(), lock.word(), u64::from(frees) << 63]);
    }

    pub(crate) fn run(&mut self, first: usize, words: &[u64]) {
        self.words[self.runs_at] += 1;
        self.words.push((first as u64) << 32 | words.len() as u64);
        self.words.extend_from_slice(words);
    }

    /// Adds a new page, after all others.
    pub(crate) fn new_page(&mut self, link: Link, version: u64) {
        self.words.extend([link.word(), version]);
    }

    /// How many words each part of the record has.
    pub(crate) fn parts(&self) -> impl Iterator<Item = usize> {
        self.shares().map(|share| share.len() + OVERHEAD)
    }

    fn shares(&self) -> std::slice::Chunks<'_, u64> {
        self.words.chunks(SHARE_WORDS_MAX)
    }

    /// Writes the parts into buffers of their lengths, for these places.
    pub(crate) fn seal<'b>(
        &self,
        owner: OwnerId,
        sequence: u64,
        parts: impl Iterator<Item = (RemotePtr, &'b mut [u64])>,
    ) {
        let count = self.shares().len();
        for (number, (share, (at, words))) in self.shares().zip(parts).enumerate() {
            share_of(words).copy_from_slice(share);
            seal_part(PartOf::Change, owner, sequence, (number, count), at, words);
        }
    }
}

/// Where the share of a part goes, in its buffer.
pub(crate) fn share_of(part: &mut [u64]) -> &mut [u64] {
    let end = part.len() - 1;
    &mut part[HEADER..end]
}

/// Writes what a part has besides its share, which is there: its number among so many, and what follows from where it is to be.
pub(crate) fn seal_part(
    of: PartOf,
    owner: OwnerId,
    sequence: u64,
    (number, count): (usize, usize),
    at: RemotePtr,
    words: &mut [u64],
) {
    let who = u64::from(owner.incarnation()) << 32 | (number as u64) << 16 | count as u64;
    let length = words.len();
    words[..HEADER].copy_from_slice(&[of as u64 | length as u64, sequence, who, 0]);
    words[length - 1] = 0;
    words[SUM] = sum(at, words);
}

/// The sum of a part at its place: over all words but itself and the mark.
fn sum(at: RemotePtr, part: &[u64]) -> u64 {
    let words = &part[..part.len() - 1];
    // As the checksum of a page, which leaves out two words in front.
    let in_front = mix(0, words[0]).wrapping_add(mix(1, words[1]));
    let sum = body_sum(words).wrapping_add(in_front).wrapping_sub(mix(SUM, words[SUM]));
    sum.wrapping_add(avalanche(at.raw()))
}

/// Where the mark of a part stands.
pub(crate) fn mark_at(part: RemotePtr, words: usize) -> RemotePtr {
    part.word(words - 1)
}

/// A whole part of a record, as found in a ring.
#[derive(Debug)]
pub(crate) struct Part {
    sequence: u64,
    number: u64,
    count: u64,
    share: Vec<u64>,
    is_marked: bool,
}

/// The whole parts of `owner`'s records in the words of a ring at `ring` that are not void.
pub(crate) fn scan(of: PartOf, ring: RemotePtr, words: &[u64], owner: OwnerId, found: &mut Vec<Part>) {
    for first in RING_FIRST..words.len() {
        if words[first] & !u64::from(u32::MAX) != of as u64 {
            continue;
        }
        let length = words[first] as u32 as usize;
        let Some(part) = words.get(first..first.saturating_add(length)).filter(|part| part.len() > OVERHEAD) else {
            continue;
        };
        let [_, sequence, who, stated] = part[..HEADER] else { continue };
        let is_void = sequence < words[RING_FROM];
        if is_void || who >> 32 != u64::from(owner.incarnation()) || stated != sum(ring.word(first), part) {
            continue;
        }
        found.push(Part {
            sequence,
            number: who >> 16 & 0xffff,
            count: who & 0xffff,
            share: part[HEADER..length - 1].to_vec(),
            is_marked: part[length - 1] == sequence,
        });
    }
}

/// What these parts make, where none is missing: number, whether the first part is marked, and words.
pub(crate) fn whole(mut parts: Vec<Part>) -> Vec<(u64, bool, Vec<u64>)> {
    parts.sort_unstable_by_key(|part| (part.sequence, part.number));
    let whole = |parts: &[Part]| {
        let [first, ..] = parts else { return None };
        let in_order = (0..).zip(parts).all(|(number, part)| (part.number, part.count) == (number, first.count));
        let words = || parts.iter().flat_map(|part| &part.share).copied().collect();
        (in_order && parts.len() as u64 == first.count).then(|| (first.sequence, first.is_marked, words()))
    };
    parts.chunk_by(|a, b| a.sequence == b.sequence).filter_map(whole).collect()
}

/// A page that a change publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NewPage {
    pub(crate) at: RemotePtr,
    pub(crate) class: SizeClass,
    /// At which it was free.
    pub(crate) version: u64,
}

/// What a change wrote down.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sequence: u64,
    pub(crate) evidence: Evidence,
    /// Whether the mark on this memory server is set.
    pub(crate) is_marked: bool,
    pub(crate) pages: Vec<RecordedPage>,
    pub(crate) new: Vec<NewPage>,
}

impl Record {
    /// The pages that whoever finishes the change may free.
    pub(crate) fn may_be_freed(&self) -> impl Iterator<Item = (RemotePtr, SizeClass)> {
        let old = self.pages.iter().filter(|page| page.frees).map(|page| (page.at, page.class));
        old.chain(self.new.iter().map(|page| (page.at, page.class)))
    }

    /// The whole records that these parts make, all from one memory server. `is_page` says whether a page of a class can stand at
    /// an address.
    pub(crate) fn all_of(parts: Vec<Part>, is_page: impl Fn(RemotePtr, SizeClass) -> bool) -> Vec<Self> {
        let decode =
            |(sequence, is_marked, words): (u64, bool, Vec<u64>)| Self::decode(&words, sequence, is_marked, &is_page);
        whole(parts).into_iter().filter_map(decode).collect()
    }

    fn decode(
        words: &[u64],
        sequence: u64,
        is_marked: bool,
        is_page: &impl Fn(RemotePtr, SizeClass) -> bool,
    ) -> Option<Self> {
        let mut words = words.iter().copied();
        let head = words.next()?;
        let (pages, new) = (head >> 48, head >> 32 & 0xffff);
        let evidence = Evidence::from_word(head)?;
        let place = |word| Link::from_word(word).remote().filter(|&(at, class)| is_page(at, class));
        let mut page = || {
            let (at, class) = place(words.next()?)?;
            let lock = LockWord::from_word(words.next()?);
            let flags = words.next()?;
            let runs = (0..flags << 1 >> 1).map(|_| {
                let run = words.next()?;
                let (first, count) = ((run >> 32) as usize, run as u32 as usize);
                let fits = first > LOCK && first + count <= class.words();
                let run: Vec<u64> = words.by_ref().take(if fits { count } else { 0 }).collect();
                (fits && run.len() == count).then_some((first, run))
            });
            let runs = runs.collect::<Option<Vec<_>>>()?;
            let page = RecordedPage { at, class, lock, frees: flags >> 63 == 1, runs };
            (lock.state() == LockState::Unlocked).then_some(page)
        };
        let pages = (0..pages).map(|_| page()).collect::<Option<Vec<_>>>()?;
        let mut new_page = || {
            let (at, class) = place(words.next()?)?;
            Some(NewPage { at, class, version: words.next()? })
        };
        let new = (0..new).map(|_| new_page()).collect::<Option<Vec<_>>>()?;
        words.next().is_none().then_some(Self { sequence, evidence, is_marked, pages, new })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ptr::ServerId;

    fn at(offset: u64) -> RemotePtr {
        RemotePtr::new(ServerId::new(3).unwrap(), offset).unwrap()
    }

    fn owner() -> OwnerId {
        OwnerId::new(77).unwrap()
    }

    fn record(sequence: u64, pages: &[(u64, usize)], new: &[u64]) -> (Record, Body) {
        let evidence = Evidence::of(pages.len(), 0, new.len());
        let mut body = Body::new(pages.len(), new.len(), evidence);
        let class = SizeClass::LARGEST;
        let mut expected = Record { sequence, evidence, is_marked: false, pages: Vec::new(), new: Vec::new() };
        for &(number, words) in pages {
            let (at, lock) = (at(number << 16), LockWord::unlocked(number));
            body.page(at, class, lock, words == 0);
            let words: Vec<u64> = (0..words as u64).map(|word| word * number).collect();
            let runs: Vec<_> = words.chunks(100).enumerate().map(|(i, run)| (1 + i * 101, run.to_vec())).collect();
            runs.iter().for_each(|(first, words)| body.run(*first, words));
            expected.pages.push(RecordedPage { at, class, lock, frees: runs.is_empty(), runs });
        }
        for &number in new {
            body.new_page(Link::to(at(number << 16), class), number);
            expected.new.push(NewPage { at: at(number << 16), class, version: number });
        }
        (expected, body)
    }

    /// Writes the parts of a record into rings, each at `first`.
    fn write(rings: &mut Vec<(RemotePtr, Vec<u64>)>, body: &Body, sequence: u64, first: usize) {
        let lengths: Vec<usize> = body.parts().collect();
        while rings.len() < lengths.len() {
            let at = at((100 + rings.len() as u64) << 14);
            rings.push((at, vec![0; RING_CLASS.words()]));
        }
        let parts = rings.iter_mut().zip(lengths);
        let parts = parts.map(|((at, words), length)| (at.word(first), &mut words[first..first + length]));
        body.seal(owner(), sequence, parts);
    }

    fn found(rings: &[(RemotePtr, Vec<u64>)], owner: OwnerId) -> Vec<Record> {
        let mut parts = Vec::new();
        rings.iter().for_each(|(at, words)| scan(PartOf::Change, *at, words, owner, &mut parts));
        Record::all_of(parts, |_, _| true)
    }

    #[test]
    fn records_are_found_as_they_were_written_and_only_by_their_owner() {
        for pages in [&[(5, 3)][..], &[(5, 3), (6, 0)], &[(5, 7000), (6, 7000), (9, 1)]] {
            for new in [&[][..], &[20, 21]] {
                let (expected, body) = record(9, pages, new);
                let mut rings = Vec::new();
                write(&mut rings, &body, 9, RING_FIRST);
                assert_eq!(found(&rings, owner()), [expected]);
                assert_eq!(found(&rings, OwnerId::new(78).unwrap()), []);
                assert_eq!(rings.len(), pages.iter().map(|(_, words)| words).sum::<usize>() / 2035 + 1);
                // A part that is missing.
                rings.last_mut().unwrap().1.fill(0);
                assert_eq!(found(&rings, owner()), []);
            }
        }
    }

    #[test]
    fn records_before_a_number_are_void() {
        let (expected, body) = record(9, &[(5, 3), (6, 0)], &[]);
        for (from, found_then) in [(0, &[expected.clone()][..]), (9, &[expected][..]), (10, &[])] {
            let mut rings = Vec::new();
            write(&mut rings, &body, 9, RING_FIRST);
            rings[0].1[RING_FROM] = from;
            assert_eq!(found(&rings, owner()), found_then, "from {from}");
        }
    }

    #[test]
    fn a_record_out_of_place_or_torn_is_none() {
        let (_, body) = record(9, &[(5, 3), (6, 2)], &[]);
        let mut rings = Vec::new();
        write(&mut rings, &body, 9, 40);
        let (ring, words) = rings[0].clone();
        let length = body.parts().next().unwrap();
        for index in 40..40 + length - 1 {
            let mut torn = words.clone();
            torn[index] ^= 1 << 17;
            assert_eq!(found(&[(ring, torn)], owner()), [], "word {index}");
        }
        let mut moved = words.clone();
        moved.copy_within(40..40 + length, 200);
        assert_eq!(found(&[(ring, moved)], owner()).len(), 1, "a copy elsewhere is none");
        let mut marked = words;
        marked[40 + length - 1] = 9;
        assert!(found(&[(ring, marked)], owner())[0].is_marked);
    }

    proptest! {
        #[test]
        fn damaged_shares_are_refused_or_make_sense(index in 0usize..30, word: u64) {
            let (_, body) = record(9, &[(5, 3), (6, 2)], &[20]);
            let mut words = body.words;
            let last = words.len() - 1;
            words[index.min(last)] = word;
            if let Some(record) = Record::decode(&words, 1, false, &|_, _| true) {
                for page in &record.pages {
                    prop_assert!(page.words_to_write().all(|(at, _)| at.offset() > page.at.offset()));
                }
            }
        }
    }
}
