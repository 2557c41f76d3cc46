//! A skip list in disaggregated memory (Pugh, CACM 1990), in the form that DEX names as fit for its techniques (VLDB 2024,
//! appendix A): for each level that a key reaches a node of its own, a page of 64 bytes; values in level 0 alone.
//!
//! ```text
//! level 2   0 ──────────────────────► 23 ─────────►      root: the head of the top level
//!           │                         │
//! level 1   0 ────────► 14 ─────────► 23 ─────────►
//!           │           │             │
//! level 0   0 ──► 7 ──► 14 ──► 16 ──► 23 ──► 42 ──►      values
//! ```
//!
//! A node holds the keys from its own up to that of the node to its right. Both are in it, so that a link promises one node:
//! that of its level and key. There is never more than one such, and whoever follows an old link sees that it is old. A
//! search is right whatever it passes, if each node on its way was what its link promised.
//!
//! A tower comes and goes in *one* change of all its nodes and their left neighbours. So there are no half-built towers, no
//! marks on nodes that are going, and no helpers as in lock-free lists (Fomitchev and Ruppert, PODC 2004); and a crash leaves
//! locks, never orphans. The head of the list is the node of key 0 at each level, whether or not key 0 has a value. The root
//! keeps its address: the list grows and shrinks at the top by moving what the root holds one page down or up.
//!
//! A cache swizzles one link to a node: that from above, and to the top of a tower the one from its left. So the nodes form a
//! tree, in which a path from the root leads to each.

mod change;
mod check;
mod node;

use farlink_runtime::{
    access::{Access, Interrupt, Start, Views},
    error::Error,
    one_sided::{OneSided, Proof},
    worker::Handle,
};
use rand::RngExt;

pub use self::node::SkipListLayout;
use self::node::{CLASS, LEVEL_MAX, Node, Place, search};
use crate::map::{
    KeyRange, Map, OrderedMap, PutMode, Report,
    ops::{Put, Scan, ScanPart},
};

/// Below a node of this level are sixteen entries on average.
const RUN_LEVEL: u8 = 2;

/// A skip list of u64 keys and values. A handle belongs to one worker; any number of handles can be open on one list.
///
/// ```
/// use std::sync::Arc;
/// use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, one_sided::Proof, server};
/// use farlink_structures::SkipList;
///
/// let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
/// let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let list = SkipList::create(&worker, "ages", Proof::Checksum).await?;
///     assert!(list.insert(7, 70).await?);
///     assert_eq!(list.get(7).await?, Some(70));
///     assert_eq!(list.scan(0, 10).await?, [(7, 70)]);
///     assert!(list.check().await?.is_clean());
///     Ok::<_, farlink_runtime::error::Error>(())
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
pub type SkipList<A> = Map<List, A>;

/// What makes a [`Map`] a skip list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct List;

impl OrderedMap for List {
    const NAME: &str = "skip list";
    const KIND: u32 = 2;
    const PAGE_BYTES: (usize, usize) = (CLASS.bytes(), CLASS.bytes());
    type Layout = SkipListLayout;

    fn empty(views: &mut impl Views) {
        Node::EMPTY.write(views, 0);
    }

    /// The way to a key leads over nodes far to its left, which belong to whoever owns those keys.
    fn region(keys: KeyRange) -> Option<()> {
        (keys == KeyRange::ALL).then_some(())
    }

    async fn get<A: Access>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        let node = search(access, from, key, 0, |_| false).await?.last.node;
        Ok(node.value().filter(|_| node.low == key))
    }

    async fn put<A: Access>(access: &A, from: Start, put: &Put<Self>) -> Result<Option<u64>, Interrupt> {
        let Put { key, value, mode, .. } = *put;
        // One tower in four rises above level 0, one in four of those above level 1, and so on.
        let mut height =
            access.worker().random(|rng| rng.random::<u64>().trailing_ones() / 2).min(LEVEL_MAX.into()) as u8;
        let mut start = from;
        loop {
            let found = search(access, start, key, 0, |node| node.level <= height).await?;
            if found.last.node.low == key {
                return change::set_value(access, found.last.page, key, |before| mode.apply(before, value)).await;
            }
            if mode == PutMode::Update {
                return Ok(None);
            }
            // From a page in the middle the levels above it are out of reach.
            if height <= found.first.level || matches!(from, Start::Page(_)) {
                return change::add_tower(access, found, (key, value)).await.map(|()| None);
            }
            height = found.first.level + 1;
            change::raise_root(access, height).await?;
            start = Start::Anew;
        }
    }

    async fn remove<A: Access>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        // Of key 0 the value goes, and the node stays: it is the head of the list.
        let Some(key_before) = key.checked_sub(1) else {
            let head = search(access, from, 0, 0, |_| false).await?.last.page;
            return change::set_value(access, head, 0, |_| None).await;
        };
        let found = search(access, from, key_before, 0, |node| node.high == Some(key)).await?;
        match found.last.node.high == Some(key) {
            true => change::remove_tower(access, found).await,
            false => Ok(None),
        }
    }

    /// Along level 0, a READ for each entry. Downwards, where no links lead, the part of it below one node of `RUN_LEVEL`
    /// at a time. Every key that was there all the time is returned, no key twice, in order.
    async fn scan<A: Access>(access: &A, from: Start, scan: &Scan<Self>) -> Result<ScanPart, Interrupt> {
        let Scan { low, high, limit, .. } = *scan;
        if !scan.descending {
            let first = search(access, from, low, 0, |_| false).await?.last;
            return ascend(access, first, scan, true).await;
        }
        let mut first = search(access, from, high, RUN_LEVEL, |_| false).await?.last;
        let low_of_run = first.node.low.max(low);
        while first.node.level > 0 {
            first = first.below(access).await?;
        }
        let all = Scan { low: low_of_run, limit: u64::MAX, ..*scan };
        let (mut entries, _) = ascend(access, first, &all, false).await?;
        entries.reverse();
        entries.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        let end = if entries.len() as u64 == limit { entries[entries.len() - 1].0 } else { low_of_run };
        Ok((entries, end.checked_sub(1).filter(|&rest| rest >= low)))
    }

    async fn check(access: &OneSided) -> Result<Report, Error> {
        check::check(access).await
    }
}

impl SkipList<OneSided> {
    /// Makes an empty list and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// As [`Map::make`].
    pub async fn create(worker: &Handle, name: &str, proof: Proof) -> Result<Self, Error> {
        Self::make(worker, name, CLASS.bytes(), proof).await
    }
}

/// Entries of a range, the first of which belongs to the node at `place`, and the key from which the rest continues. What
/// comes before a page that others have changed is a `part` that stands by itself, if that is asked for.
async fn ascend<'a, A: Access>(
    access: &'a A,
    mut place: Place<'a, A>,
    scan: &Scan<List>,
    part: bool,
) -> Result<ScanPart, Interrupt> {
    let Scan { low, high, limit, .. } = *scan;
    let mut entries = Vec::new();
    loop {
        entries.extend(place.node.value().map(|value| (place.node.low, value)).filter(|&(key, _)| key >= low));
        let Some(next) = place.node.high.filter(|&next| next <= high) else { return Ok((entries, None)) };
        if entries.len() as u64 >= limit {
            return Ok((entries, Some(next)));
        }
        place = match place.right(access).await {
            Ok(right) => right,
            Err(Interrupt::Restart(_)) if part && !entries.is_empty() => return Ok((entries, Some(next))),
            Err(interrupt) => return Err(interrupt),
        };
    }
}
