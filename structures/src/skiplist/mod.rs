//! A skip list in disaggregated memory (Pugh, CACM 1990), in the form that DEX names as fit for its techniques (VLDB 2024,
//! appendix A): for each level that a key reaches a node of its own, a page of 64 bytes; values in level 0 alone.
//!
//! ```text
//! level 2   head ───────────────────► 23 ─────────►      root: the head of the top level
//!           │                         │
//! level 1   head ─────► 14 ─────────► 23 ─────────►
//!           │           │             │
//! level 0   head ► 7 ─► 14 ──► 16 ──► 23 ──► 42 ──►      values
//! ```
//!
//! A node holds the keys from its own up to that of the node to its right. Both are in it, so that a link promises one node:
//! that of its level and key. There is never more than one such, and whoever follows an old link sees that it is old. A
//! search is right whatever it passes, if each node on its way was what its link promised.
//!
//! A tower comes and goes in *one* change of all its nodes and their left neighbours. So there are no half-built towers, no
//! marks on nodes that are going, and no helpers as in lock-free lists (Fomitchev and Ruppert, PODC 2004); and a crash leaves
//! locks, never orphans. How high a tower is follows from its key. Each level begins with a head, which has no key. The root
//! keeps its address: the list grows and shrinks at the top by moving what the root holds one page down or up.
//!
//! A cache swizzles one link to a node: that from above, and to the top of a tower the one from its left. So the nodes form a
//! tree, in which a path from the root leads to each.

mod change;
mod check;
mod node;

use farlink_runtime::{access::*, error::Error, report::Report};

use self::{change::Found, node::*};
use crate::map::ops::{self, Put, Scan};
use crate::map::{KeyRange, Map, OrderedMap, PutMode, ScanPart};

/// Below a node of this level are sixteen entries on average.
const RUN_LEVEL: u8 = 2;
/// More entries than a run has, sixteen on average, but for one in some 10^14.
const RUN_MAX: u64 = 512;

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
    // Owned as a whole: the way to a key leads over nodes far to its left.
    type Region = KeyRange;
    type Local = ();

    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        Node::of(page).into_iter().flat_map(Node::links)
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
        let node = Found::search(access, from, key.checked_add(1), 0..=0).await?.last.node;
        Ok(node.value().filter(|_| node.low == Some(key)))
    }

    async fn put<A: Access<Plugin = Self>>(access: &A, from: Start, put: &Put<Self>) -> Result<Option<u64>, Interrupt> {
        let Put { key, value, mode, .. } = *put;
        let found = Found::search(access, from, key.checked_add(1), 0..=height(key)).await?;
        match (found.last.node.low == Some(key), mode) {
            (true, PutMode::Insert) => Ok(found.last.node.value()),
            (true, _) => found.set_value(value).await,
            (false, PutMode::Update) => Ok(None),
            (false, _) if height(key) <= found.first.level => found.add_tower(key, value).await.map(|()| None),
            (false, _) => change::raise_root(access, height(key)).await.and(Err(Interrupt::again())),
        }
    }

    async fn remove<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        let found = Found::search(access, from, Some(key), 0..=height(key)).await?;
        if found.last.node.high == Some(key) { found.remove_tower(key).await } else { Ok(None) }
    }

    /// Along level 0, a READ for each entry. Downwards, where no links lead, the part of it below one node of `RUN_LEVEL`
    /// at a time. Every key that was there all the time is returned, no key twice, in order.
    async fn scan<A: Access<Plugin = Self>>(access: &A, from: Start, scan: &Scan<Self>) -> Result<ScanPart, Interrupt> {
        let Scan { low, high, limit, .. } = *scan;
        if !scan.descending {
            let first = Found::search(access, from, low.checked_add(1), 0..=0).await?.last;
            return first.ascend(access, scan, true).await;
        }
        let mut first = Found::search(access, from, high.checked_add(1), RUN_LEVEL..=RUN_LEVEL).await?.last;
        let low_of_run = first.node.low.unwrap_or(0).max(low);
        while first.node.level > 0 {
            first = first.below(access, false).await?;
        }
        // Where the nodes above may be old, a run may have no end.
        let limit_of_run = if matches!(from, Start::Root) { RUN_MAX } else { u64::MAX };
        let at = first.page.at();
        let all = Scan { low: low_of_run, limit: limit_of_run, ..*scan };
        let ScanPart { mut entries, rest, .. } = first.ascend(access, &all, false).await?;
        if rest.is_some() {
            return Err(Interrupt::stale(at, "the nodes above it are far apart"));
        }
        entries.reverse();
        entries.truncate(usize::try_from(limit).unwrap_or(usize::MAX));
        let end = if entries.len() as u64 == limit { entries[entries.len() - 1].0 } else { low_of_run };
        Ok(ScanPart { entries, rest: end.checked_sub(1).filter(|&rest| rest >= low), descending: true })
    }
}

impl<'a, A: Access<Plugin = List>> Place<'a, A> {
    /// Entries of a range, the first of which belongs here, and the key from which the rest continues. What comes before a page
    /// that others have changed is a `part` that stands by itself, if that is asked for.
    async fn ascend(mut self, access: &'a A, scan: &Scan<List>, part: bool) -> Result<ScanPart, Interrupt> {
        let mut entries = Vec::new();
        loop {
            let key = self.node.low.filter(|&key| key >= scan.low);
            entries.extend(key.zip(self.node.value()));
            let rest = self.node.high.filter(|&next| next <= scan.high);
            if rest.is_none() || entries.len() as u64 >= scan.limit {
                return Ok(ScanPart { entries, rest, descending: false });
            }
            self = match self.right(access).await {
                Err(Interrupt::Restart(_)) if part && !entries.is_empty() => {
                    return Ok(ScanPart { entries, rest, descending: false });
                }
                right => right?,
            };
        }
    }
}
