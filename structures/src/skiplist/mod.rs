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

use farlink_runtime::{access::*, error::Error, page::avalanche, report::Report};

use self::node::*;
use crate::map::{KeyRange, Map, OrderedMap, PutMode, ScanPart, ops};

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
///     let list = SkipList::make(&worker, "ages", 64, Proof::Checksum).await?;
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

impl Plugin for List {
    const NAME: &'static str = "skiplist";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = CLASS.bytes()..=CLASS.bytes();
    type Region = KeyRange;
    type Local = ();

    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        Node::of(page).into_iter().flat_map(Node::links)
    }

    fn overlap(_page: &(impl Words + ?Sized), region: &KeyRange) -> Overlap {
        if Self::can_own(region) { Overlap::Inside } else { Overlap::Partly }
    }

    /// All of it or nothing: the way to a key leads over nodes far to its left.
    fn can_own(region: &KeyRange) -> bool {
        *region == KeyRange::ALL
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        Node::EMPTY.write(pages, root);
    }

    fn operations(to: &mut impl Operations<Self>) {
        ops::operations(to);
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        check::check(access).await
    }
}

impl OrderedMap for List {
    async fn get<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        let node = search(access, from, key, 0, |_| false).await?.last.node;
        Ok(node.value().filter(|_| node.low == key))
    }

    async fn put<A: Access<Plugin = Self>>(
        access: &A,
        from: Start,
        put: &ops::Put<Self>,
    ) -> Result<Option<u64>, Interrupt> {
        let ops::Put { key, value, mode, .. } = *put;
        // One tower in four rises above level 0, one in four of those above level 1, and so on: as the key says, so that an
        // attempt elsewhere builds the same one.
        let height = (avalanche(key).trailing_ones() / 2).min(LEVEL_MAX) as u8;
        let found = search(access, from, key, 0, |node| node.level <= height).await?;
        if found.last.node.low == key {
            return change::set_value(access, found.last.page, key, |before| mode.apply(before, value)).await;
        }
        if mode == PutMode::Update {
            return Ok(None);
        }
        if height <= found.first.level {
            return change::add_tower(access, found, (key, value)).await.map(|()| None);
        }
        if matches!(from, Start::Page(_)) {
            return Err(Interrupt::above());
        }
        change::raise_root(access).await?;
        Err(Interrupt::again())
    }

    async fn remove<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
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
    async fn scan<A: Access<Plugin = Self>>(
        access: &A,
        from: Start,
        scan: &ops::Scan<Self>,
    ) -> Result<ScanPart, Interrupt> {
        let ops::Scan { low, high, limit, .. } = *scan;
        if !scan.descending {
            let first = search(access, from, low, 0, |_| false).await?.last;
            return ascend(access, first, scan, true).await;
        }
        let mut first = search(access, from, high, RUN_LEVEL, |_| false).await?.last;
        let low_of_run = first.node.low.max(low);
        while first.node.level > 0 {
            first = first.below(access, false).await?;
        }
        let all = ops::Scan { low: low_of_run, limit: u64::MAX, ..*scan };
        let ScanPart { mut entries, .. } = ascend(access, first, &all, false).await?;
        entries.reverse();
        entries.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        let end = if entries.len() as u64 == limit { entries[entries.len() - 1].0 } else { low_of_run };
        Ok(ScanPart { entries, rest: end.checked_sub(1).filter(|&rest| rest >= low), descending: true })
    }
}

/// Entries of a range, the first of which belongs to the node at `place`, and the key from which the rest continues. What
/// comes before a page that others have changed is a `part` that stands by itself, if that is asked for.
async fn ascend<'a, A: Access<Plugin = List>>(
    access: &'a A,
    mut place: Place<'a, A>,
    scan: &ops::Scan<List>,
    part: bool,
) -> Result<ScanPart, Interrupt> {
    let ops::Scan { low, high, limit, .. } = *scan;
    let mut entries = Vec::new();
    loop {
        entries.extend(place.node.value().map(|value| (place.node.low, value)).filter(|&(key, _)| key >= low));
        let rest = place.node.high.filter(|&next| next <= high);
        if rest.is_none() || entries.len() as u64 >= limit {
            return Ok(ScanPart { entries, rest, descending: false });
        }
        place = match place.right(access).await {
            Err(Interrupt::Restart(_)) if part && !entries.is_empty() => {
                return Ok(ScanPart { entries, rest, descending: false });
            }
            right => right?,
        };
    }
}
