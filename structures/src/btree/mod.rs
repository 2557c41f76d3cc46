//! A B+-tree in disaggregated memory.
//!
//! Written once over [`Access`]: over [`OneSided`] with round-robin placement it is the fine-grained tree of Ziegler et al.
//! (SIGMOD 2019, section 4), with what theirs leaves out: merging deletes, page reuse, reads that are proven whole.
//!
//! How it works, by module:
//!
//! - `node`: a page. Low and high fences, a link to the right sibling (the B-link tree of Lehman and Yao), sorted keys.
//! - `descend`: root to leaf, one READ a level. A reader whose copy of the parent is old lands too far left at worst, and
//!   moves right; so no parent needs to be validated again.
//! - `ops`: get, put and remove. A put locks one page, and
//!   only while it writes the changed words.
//! - `split`, `shrink`: structure modification operations. Each locks the pages it changes together (parent and children),
//!   all or none, so a tree is never seen half-split, and a crash leaves no orphan.
//! - `scan`: leaves fetched ahead of need through their parents' links.
//! - `bulk`: load from sorted input. `check`: every invariant, and leaked pages.
//!
//! Keys and values are u64; every key is legal. Operations from any number of workers on any number of compute servers are
//! linearizable for each key; what scans promise is said in `scan`.

mod bulk;
mod check;
mod descend;
mod guess;
mod node;
mod ops;
mod scan;
mod shrink;
mod split;

use farlink_runtime::{
    access::{
        Access, Interrupt, Link, Operations, Overlap, PageRef, PagesMut, Plugin, Region, Slot, Start, Structure, Words,
    },
    error::Error,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    structure::StructurePlacement,
    worker::Handle,
};

pub use farlink_runtime::structure::PlacementPolicy;

use self::node::{Fences, Node, NodeMut, PAGE_BYTES_MIN};
pub use crate::map::{KeyRange, Problem, PutMode, Range, Report, ScanPart};
use crate::map::{
    Map, OrderedMap,
    ops::{self as map_ops, Count, Put, Scan},
};

/// How a tree is made and read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BTreeOptions {
    /// Bytes of a page: a power of two from 256 to 4096. Fixed when the tree is created.
    pub page_bytes: usize,
    /// How readers prove their copies whole. Each reader's own choice.
    pub proof: Proof,
    /// On which memory servers its pages are. Fixed when the tree is created.
    pub placement: PlacementPolicy,
    /// The memory server of its root; the next in turn if none is named. Fixed when the tree is created.
    pub root: Option<ServerId>,
}

impl Default for BTreeOptions {
    fn default() -> Self {
        Self { page_bytes: 1024, proof: Proof::Checksum, placement: PlacementPolicy::RoundRobin, root: None }
    }
}

/// A B+-tree of u64 keys and values. A handle belongs to one worker; any number of handles can be open on one tree.
///
/// ```
/// use std::sync::Arc;
/// use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, server};
/// use farlink_structures::btree::{BTree, BTreeOptions};
///
/// let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
/// let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
/// let worker = compute.worker()?;
/// worker.block_on(async {
///     let tree = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
///     assert!(tree.insert(7, 70).await?);
///     assert!(!tree.insert(7, 71).await?);
///     assert_eq!(tree.get(7).await?, Some(70));
///     assert_eq!(tree.scan(0, 10).await?, [(7, 70)]);
///     assert!(tree.check().await?.is_clean());
///     Ok::<_, farlink_runtime::error::Error>(())
/// })?;
/// # Ok::<_, farlink_runtime::error::Error>(())
/// ```
pub type BTree<A> = Map<Tree, A>;

/// What makes a [`Map`] a B+-tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tree;

impl Plugin for Tree {
    const NAME: &'static str = "btree";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = PAGE_BYTES_MIN..=4096;
    type Region = KeyRange;
    type Local = guess::Learned;

    #[inline]
    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        let node = Node(page);
        (0..node.count()).map(move |index| node.value_position(index))
    }

    fn below(page: &(impl Words + ?Sized), link: usize) -> Option<KeyRange> {
        let node = Node(page);
        let index = (0..node.count()).find(|&index| node.value_position(index) == link)?;
        let low = if index == 0 { node.low() } else { node.key(index) };
        let high = if index + 1 < node.count() { Some(node.key(index + 1)) } else { node.high() };
        Some(KeyRange { low, high })
    }

    fn overlap(page: &(impl Words + ?Sized), region: &KeyRange) -> Overlap {
        KeyRange { low: Node(page).low(), high: Node(page).high() }.overlap(region)
    }

    fn can_own(_region: &KeyRange) -> bool {
        true
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        NodeMut::new(pages, root).rewrite(0, Fences::ALL, Link::NULL, &[]);
    }

    fn operations(to: &mut impl Operations<Self>) {
        map_ops::operations(to);
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        check::check(access).await
    }
}

impl OrderedMap for Tree {
    async fn get<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        ops::get(access, from, key).await
    }

    #[inline(always)]
    fn try_get<A: Access<Plugin = Self>>(access: &A, key: u64) -> Result<Option<u64>, Start> {
        ops::try_get(access, key)
    }

    async fn put<A: Access<Plugin = Self>>(access: &A, from: Start, put: &Put<Self>) -> Result<Option<u64>, Interrupt> {
        ops::put(access, from, put).await
    }

    async fn remove<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
        ops::remove(access, from, key).await
    }

    async fn scan<A: Access<Plugin = Self>>(access: &A, from: Start, scan: &Scan<Self>) -> Result<ScanPart, Interrupt> {
        scan::scan(access, from, scan).await
    }

    async fn cut<A: Access<Plugin = Self>>(access: &A, from: Start, key: u64) -> Result<u64, Interrupt> {
        let leaf = descend::descend::<_, descend::Ships>(access, from, key, 0).await?.page;
        leaf.read(|words| Node(words).low())
    }

    async fn count<A: Access<Plugin = Self>>(
        access: &A,
        from: Start,
        count: &Count<Self>,
    ) -> Result<(u64, Option<u64>), Interrupt> {
        scan::count(access, from, count).await
    }
}

impl BTree<OneSided<Tree>> {
    /// Makes an empty tree and enters it into the cluster's catalog.
    ///
    /// # Errors
    /// As [`Map::make`].
    pub async fn create(worker: &Handle, name: &str, options: BTreeOptions) -> Result<Self, Error> {
        let BTreeOptions { page_bytes, proof, placement, root } = options;
        Self::make_at(worker, name, page_bytes, proof, StructurePlacement { policy: placement, root }).await
    }
}

impl<A: Access<Plugin = Tree> + Clone + 'static> BTree<A> {
    /// Loads entries in strictly ascending key order into an empty tree, using the share `fill` (0.1 to 1.0) of each page;
    /// returns their number. Others see the tree empty until it is done; if it fails, the tree stays empty and its pages are taken
    /// back, by a task of the worker: a future that outlives the worker leaves them behind. If it is dropped, that is so, or, in its
    /// last step, all is loaded.
    ///
    /// Of a tree that others have emptied, nobody else may change anything meanwhile through inner pages that were cached before that: they
    /// may lead to pages of the load, to which nothing leads yet.
    ///
    /// # Errors
    /// If the tree is not empty, the input is not in order, `fill` is out of range, or remote memory is full.
    /// [`Error::NotRecorded`] if the log of an owner is not written: all may be loaded then, and be recorded later.
    pub async fn bulk_load(&self, entries: impl IntoIterator<Item = (u64, u64)>, fill: f64) -> Result<u64, Error> {
        bulk::load(self.access(), entries, fill).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_tells_inside_from_shared_and_foreign() {
        let page = |low: u64, high: Option<u64>| {
            let mut words = vec![0u64; 32];
            (words[4], words[5]) = (low, high.unwrap_or(0));
            words[7] = if high.is_none() { 1 << 16 } else { 0 };
            words
        };
        let range = |low, high| KeyRange { low, high };
        let of = |page: &[u64], range: KeyRange| Tree::overlap(page, &range);
        assert_eq!(of(&page(10, Some(20)), range(10, Some(20))), Overlap::Inside);
        assert_eq!(of(&page(10, Some(20)), range(0, None)), Overlap::Inside);
        assert_eq!(of(&page(10, Some(20)), range(15, None)), Overlap::Partly);
        assert_eq!(of(&page(10, None), range(0, Some(50))), Overlap::Partly);
        assert_eq!(of(&page(10, Some(20)), range(20, None)), Overlap::Outside);
        assert_eq!(of(&page(20, None), range(0, Some(20))), Overlap::Outside);
        assert!(KeyRange::ALL.contains(u64::MAX) && !range(3, Some(5)).contains(5));
    }
}
