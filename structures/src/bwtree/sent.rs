//! Scans whose answers a memory server sends in pieces ("To Copy or Not to Copy", sections 4.1 and 5.3): entries from where they lie,
//! in key order, or whole chains as they are, which the client merges.
//!
//! ```text
//! pages, in the scan's direction, then   1 if there is a rest, else 0; the key from which the rest continues
//!
//! a page's entries   [0:8 | count:56]  entries: key, value
//! a page's chain     [1:8 | count:56]  the first key asked of it  its number  its mapping word  so many records, in the order of `Chain`
//! ```
//!
//! A page's entries are in ascending order, also where the scan is not.
//!
//! The client checks each record of a chain by its checksum. Entries are sent unchecked: to sum up their records the processor would have
//! to read every word, which to gather them spares. So damage in a value is sent as it is, and damage in a fence can leave keys out. Who
//! wants damage found asks for chains.
//!
//! What a scan promises is what [`Scan`](crate::map::ops::Scan) does: each page is of one moment. A chain with anything but entries'
//! deltas in it, which there is while pages merge, is read and sent as its entries.

use std::ops::RangeInclusive;

use farlink_runtime::{
    access::*,
    error::Error,
    lock::{LockState, LockWord},
    operation::RunInPieces,
    page::{LOCK, is_whole},
    sync::AtomicU64,
    wire::{DecodeError, Wire, wire},
};

use super::{
    Bw,
    chain::Chain,
    page::{Search, View, descend},
    record::{Base, Delta, Fences, MapWord, Mapped, Pid, Side},
    scan, table,
};
use crate::map::{Fetch, KeyRange, Range, ScanPart, ops::Scan};

const ENTRIES: u64 = 0;
const CHAIN: u64 = 1;
/// Deltas of a chain that is looked at in place.
const DELTAS_MAX: usize = 64;
/// Words of an answer, more or less.
const ANSWER_WORDS: usize = 32 << 10;

/// A scan whose answer is sent in pieces: [`Range::in_pieces`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentScan {
    /// The least key of the range.
    pub low: u64,
    /// The greatest.
    pub high: u64,
    /// How many entries to return, at most.
    pub limit: u64,
    /// From high keys to low ones.
    pub descending: bool,
    /// Chains as they are, for the client to check and to merge; or entries, which nobody checks. Not said: chains where what is asked of a page is at least half of it.
    pub chains: Option<bool>,
}

wire!(struct SentScan { low, high, limit, descending, chains });

/// Fetched in pieces: [`Range::in_pieces`].
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    chains: Option<bool>,
}

impl<A: RunInPieces<Plugin = Bw>> Fetch<Bw, A> for Sent {
    async fn fetch(&self, access: &A, scan: &Scan<Bw>) -> Result<ScanPart, Error> {
        let (&Scan { low, high, limit, descending, .. }, Self { chains }) = (scan, *self);
        access.execute_in_pieces(&SentScan { low, high, limit, descending, chains }).await
    }
}

impl<'a, A: RunInPieces<Plugin = Bw>> Range<'a, Bw, A> {
    /// The same entries, in parts that the memory server does not have to copy, in either direction. It sends chains (`Some(true)`), entries, which
    /// nobody checks (`Some(false)`), or what it takes for cheaper (`None`): see [`SentScan::chains`].
    pub fn in_pieces(self, chains: Option<bool>) -> Range<'a, Bw, A, Sent> {
        self.fetched_by(Sent { chains })
    }
}

impl Operation for SentScan {
    type Output = ScanPart;
    type Plugin = Bw;
    const NAME: &'static str = "sent-scan";
    const READS_ONLY: bool = true;

    fn scope(&self) -> KeyRange {
        KeyRange { low: self.low, high: self.high.checked_add(1) }
    }

    fn limit(&mut self) {
        self.limit = self.limit.min(ANSWER_WORDS as u64);
    }

    async fn run<A: Access<Plugin = Bw>>(&self, access: &A, _from: Start) -> Result<ScanPart, Interrupt> {
        let Self { low, high, limit, descending, .. } = *self;
        if low > high || limit == 0 {
            return Ok(ScanPart { entries: Vec::new(), rest: None, descending });
        }
        scan::scan(access, &Scan { low, high, limit, descending, of: std::marker::PhantomData }).await
    }
}

impl InPieces for SentScan {
    async fn collect<A: Access<Plugin = Bw> + InPlace>(&self, access: &A, to: &mut Pieces) -> Result<(), Interrupt> {
        let mut cursor = Some(self.begin()).filter(|_| self.low <= self.high && self.limit > 0);
        let (mut left, mut above) = (self.limit, None);
        while let Some(key) = cursor.filter(|_| left > 0 && to.words() < ANSWER_WORDS) {
            let page = match above.take().filter(|above| side(above, key) == Side::Here) {
                Some(page) => page,
                None => descend(access, key, 1, Search::TO_READ).await?,
            };
            let pid = if page.level() == 0 { page.pid() } else { page.child_for(key)?.1 };
            above = Some(page);
            let fences = match InChain::read(access, pid).await? {
                Some(chain) if chain.fences.side(key) == Side::Here => {
                    left = left.saturating_sub(self.push(&chain, key, to));
                    chain.fences
                }
                _ => {
                    let page = descend(access, key, 0, Search::TO_READ).await?;
                    let entries = page.state.entries.iter().filter(|entry| self.asked(key).contains(&entry.0));
                    let entries: Vec<(u64, u64)> = entries.copied().collect();
                    to.own(|to| {
                        to.push(head(ENTRIES, entries.len()));
                        entries.iter().for_each(|entry| entry.encode(to));
                    });
                    left = left.saturating_sub(entries.len() as u64);
                    page.state.fences
                }
            };
            let next = if self.descending { fences.low.checked_sub(1) } else { fences.high() };
            cursor = next.filter(|&next| self.is_behind(key, next));
        }
        to.own(|to| to.extend([u64::from(cursor.is_some()), cursor.unwrap_or(0)]));
        Ok(())
    }

    fn assemble(&self, words: &[u64]) -> Result<ScanPart, DecodeError> {
        let (mut pages, [more, next]) = match words.split_last_chunk() {
            Some((pages, &rest)) => (pages, rest),
            None => return Err(DecodeError("a scan's answer has no end")),
        };
        let mut rest = (more == 1).then_some(next);
        let mut entries: Vec<(u64, u64)> = Vec::new();
        while let Some(&first) = pages.split_off_first() {
            let count = usize::try_from(first << 8 >> 8).unwrap_or(usize::MAX);
            let page = entries.len();
            match first >> 56 {
                ENTRIES => {
                    let found = count.checked_mul(2).and_then(|words| pages.split_off(..words));
                    let found = found.ok_or(DecodeError("a page has fewer entries than it says"))?;
                    entries.extend(found.as_chunks().0.iter().map(|&[key, value]| (key, value)));
                }
                CHAIN => self.merge(&mut pages, count, &mut entries)?,
                _ => return Err(DecodeError("a page of a scan's answer has no known form")),
            }
            if self.descending {
                entries[page..].reverse();
            }
        }
        let in_order = entries.is_sorted_by(|a, b| if self.descending { a.0 > b.0 } else { a.0 < b.0 });
        let in_range = entries.iter().all(|entry| (self.low..=self.high).contains(&entry.0));
        // Or who goes on from there would not come to an end.
        let goes_on = rest.is_none_or(|rest| self.is_behind(entries.last().map_or(self.begin(), |last| last.0), rest));
        if !in_order || !in_range || !goes_on {
            return Err(DecodeError("a scan's answer is out of order, or not what was asked for"));
        }
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        if entries.len() > limit {
            entries.truncate(limit);
            let step = |key: u64| if self.descending { key.checked_sub(1) } else { key.checked_add(1) };
            rest = entries.last().and_then(|last| step(last.0)).filter(|rest| (self.low..=self.high).contains(rest));
        }
        Ok(ScanPart { entries, rest, descending: self.descending })
    }
}

impl SentScan {
    /// The first key that it is about.
    fn begin(&self) -> u64 {
        if self.descending { self.high } else { self.low }
    }

    /// The keys from one on.
    fn asked(&self, from: u64) -> RangeInclusive<u64> {
        if self.descending { self.low..=from } else { from..=self.high }
    }

    /// Whether it comes to a key behind another one.
    fn is_behind(&self, key: u64, next: u64) -> bool {
        next != key && self.asked(key).contains(&next)
    }

    /// Appends what is asked of a page; how many entries that is, at least.
    fn push(&self, chain: &InChain<'_>, from: u64, to: &mut Pieces) -> u64 {
        let (first, last) = self.asked(from).into_inner();
        let last = chain.fences.high().map_or(last, |high| last.min(high.saturating_sub(1)));
        let (runs, count) = chain.runs(first.max(chain.fences.low), last);
        let chain_bytes: usize = chain.records.iter().map(|(_, words)| words.len() * 8).sum();
        if self.chains.unwrap_or(count * 16 * 2 >= chain_bytes) {
            to.own(|to| to.extend([head(CHAIN, chain.records.len()), from, chain.pid.word(), chain.head.0]));
            chain.records.iter().for_each(|&(at, words)| to.push(at, words.len()));
        } else {
            to.own(|to| to.push(head(ENTRIES, count)));
            runs.into_iter().for_each(|(at, words)| to.push(at, words));
        }
        count as u64
    }

    /// Takes a chain off an answer; what is asked of its page.
    fn merge(&self, from: &mut &[u64], count: usize, entries: &mut Vec<(u64, u64)>) -> Result<(), DecodeError> {
        let bad = || DecodeError("a chain of a scan's answer is none");
        let (first, pid, head) = <(u64, u64, u64)>::decode(from)?;
        let pid = if pid == Pid::ROOT.word() { Pid::ROOT } else { Pid::from_word(pid).ok_or_else(bad)? };
        let mut chain = Chain::new(pid, MapWord(head));
        while let Some(word) = chain.next() {
            let Some(Mapped::To(link)) = word.target() else { return Err(bad()) };
            let class = link.remote().ok_or_else(bad)?.1;
            let mut record = from.split_off(..class.words()).ok_or_else(bad)?.to_vec();
            as_published(&mut record);
            if !is_whole(&record) {
                return Err(bad());
            }
            chain.add(&record[..]).map_err(|_| bad())?;
        }
        if chain.count() != count {
            return Err(bad());
        }
        let state = chain.merge().map_err(|_| bad())?.state;
        entries.extend(state.entries.iter().filter(|entry| self.asked(first).contains(&entry.0)));
        Ok(())
    }
}

fn head(form: u64, count: usize) -> u64 {
    form << 56 | count as u64
}

fn side(page: &View, key: u64) -> Side {
    page.state.fences.side(key)
}

/// A record that was sent may have been freed before it was read: that changes its lock word and nothing else, until it is
/// reused.
fn as_published(record: &mut [u64]) {
    let lock = LockWord::from_word(record[LOCK]);
    if lock.state() == LockState::Free {
        record[LOCK] = LockWord::unlocked(lock.version().wrapping_sub(1)).word();
    }
}

/// A chain where it lies: deltas of entries on a base page.
struct InChain<'a> {
    pid: Pid,
    head: MapWord,
    /// The newest first; the base page last.
    records: Vec<(RemotePtr, &'a [AtomicU64])>,
    /// Of each record but the last.
    deltas: Vec<Delta>,
    base: Base<'a, [AtomicU64]>,
    fences: Fences,
}

impl<'a> InChain<'a> {
    /// The chain of a page of level 0, if it is all here and of that kind.
    async fn read<A: Access<Plugin = Bw> + InPlace>(access: &'a A, pid: Pid) -> Result<Option<Self>, Interrupt> {
        let at = table::word_of(access, pid).await?;
        let head = MapWord(access.load(&[at]).await?[0]);
        let (mut word, mut records, mut deltas) = (head, Vec::new(), Vec::new());
        loop {
            let Some(Mapped::To(link)) = word.target() else { return Ok(None) };
            let words = match access.in_place(link) {
                // It was freed: this page alone is read anew.
                Err(Interrupt::Restart(_)) => None,
                words => words?,
            };
            let (Some(words), Some((at, _))) = (words, link.remote()) else { return Ok(None) };
            if !word.is_to(words) || deltas.len() > DELTAS_MAX {
                return Ok(None);
            }
            records.push((at, words));
            if let Some(base) = Base::of(words) {
                let fences = base.fences();
                let is_it = base.about.pid == pid && base.about.level == 0;
                return Ok(is_it.then_some(Self { pid, head, records, deltas, base, fences }));
            }
            let Some(delta) = Delta::of(words) else { return Ok(None) };
            if delta.about.pid != pid || delta.about.level != 0 {
                return Ok(None);
            }
            if delta.changes[0].entry().is_none() {
                return Ok(None);
            }
            word = delta.next;
            deltas.push(delta);
        }
    }

    /// Where the entries of the keys `from..=last` are, in their order, as runs of words; and how many entries there are.
    fn runs(&self, from: u64, last: u64) -> (Vec<(RemotePtr, usize)>, usize) {
        // Of each key the newest change alone counts.
        let mut changes: Vec<(u64, Option<RemotePtr>)> = Vec::new();
        let all = self.deltas.iter().zip(&self.records).flat_map(|(delta, &(at, _))| {
            let newest_first = delta.changes.iter().enumerate().rev();
            newest_first.filter_map(move |(index, change)| Some((change.entry()?, at.word(Delta::place_of(index)))))
        });
        for ((key, value), at) in all {
            let to = value.map(|_| at);
            if (from..=last).contains(&key)
                && let Err(index) = changes.binary_search_by_key(&key, |change| change.0)
            {
                changes.insert(index, (key, to));
            }
        }
        let below = |key: u64| key.checked_sub(1).map_or(0, |key| self.base.up_to(key));
        let (mut runs, mut count) = (Vec::new(), 0);
        let (mut next, end) = (below(from), self.base.up_to(last));
        let Some(&(page, _)) = self.records.last() else { return (runs, count) };
        let run = |first: usize, end: usize, count: &mut usize| {
            *count += end.saturating_sub(first);
            (first < end).then(|| (page.word(Base::<[u64]>::place_of(first)), (end - first) * 2))
        };
        for (key, to) in changes {
            let place = below(key).clamp(next, end.max(next));
            runs.extend(run(next, place, &mut count));
            next = if place < end && self.base.entry(place).0 == key { place + 1 } else { place };
            runs.extend(to.map(|at| (at, 2)));
            count += usize::from(to.is_some());
        }
        runs.extend(run(next, end, &mut count));
        (runs, count)
    }
}
