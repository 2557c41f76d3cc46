//! Bulk loads of owners whose changes are all recorded, and cannot be for a while.

use std::collections::BTreeSet;

use farlink_offload::{CacheOptions, Cached, ComputeCache, Durability};
use farlink_runtime::{
    access::{Access, NewPage, Placement, Plugin, Region as _},
    error::Error,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    structure::{Structure, StructurePlacement},
    worker::Handle,
};
use farlink_structures::{
    btree::{self, BTree, BTreeOptions},
    rtree::{self, RTree, RTreeOptions, Rect},
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    cluster,
};

const NAME: &str = "loaded";
/// All pages have this size.
const PAGE_BYTES: usize = 1024;
/// A segment of a log.
const SEGMENT_BYTES: usize = 16 << 10;
/// More than a load takes.
const PAGES: usize = 64;

/// A structure that can be loaded.
trait Loaded: Plugin {
    /// Entries of a full leaf.
    const LEAF: u64;
    async fn make(worker: &Handle) -> Structure;
    /// Loads so many entries, pages filled to the full.
    async fn load(access: &Cached<Self>, count: u64) -> Result<u64, Error>;
}

impl Loaded for btree::Tree {
    const LEAF: u64 = 60;

    async fn make(worker: &Handle) -> Structure {
        let options = BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() };
        BTree::create(worker, NAME, options).await.unwrap().structure().clone()
    }

    async fn load(access: &Cached<Self>, count: u64) -> Result<u64, Error> {
        BTree::over(access.clone()).bulk_load((0..count).map(|key| (key, key)), 1.0).await
    }
}

impl Loaded for rtree::Tree {
    const LEAF: u64 = 23;

    async fn make(worker: &Handle) -> Structure {
        let placement = StructurePlacement::default();
        let options = RTreeOptions { page_bytes: PAGE_BYTES, placement, ..RTreeOptions::default() };
        RTree::<_, 2>::create(worker, NAME, options).await.unwrap().access().context().structure.clone()
    }

    async fn load(access: &Cached<Self>, count: u64) -> Result<u64, Error> {
        let entries = (0..count).map(|number| (Rect::point([number as f64, 0.0]).unwrap(), number));
        RTree::over(access.clone()).bulk_load(entries, 1.0).await
    }
}

async fn all_pages<P: Plugin>(access: &OneSided<P>, class: SizeClass, most: usize) -> Vec<NewPage> {
    let mut pages = Vec::new();
    while pages.len() < most
        && let Ok(page) = access.allocate(class, Placement::RoundRobin).await
    {
        pages.push(page);
    }
    pages
}

/// There is memory for the pages of a load, and one segment of the log. What is left once it has failed is sound, and it leaks no
/// page: an empty tree, or the loaded one, of which its owner has to say so later.
fn leaves_a_sound_tree<P: Loaded>() {
    let mut outcomes = BTreeSet::new();
    for leaves in 1..24 {
        let cluster = Cluster::of_this_run(1, 1 << 20, FabricProfile::Fast).unwrap();
        let compute = cluster::join_manual(&cluster, 1).unwrap();
        let worker = compute.worker().unwrap();
        let (structure, owned, outcome) = worker.block_on(async {
            let structure = P::make(&worker).await;
            let mut options = CacheOptions::new(1 << 20);
            options.page_bytes = PAGE_BYTES;
            let cache = ComputeCache::<P>::new(options).unwrap().with_durability(Durability::Logged);
            let owned = cache.own(&worker, structure.clone(), P::Region::everything()).await.unwrap();
            let one_sided = OneSided::<P>::new(&worker, structure.clone(), Proof::Checksum);
            let of_bytes = |bytes| SizeClass::of_bytes(bytes).unwrap();
            let small = all_pages(&one_sided, of_bytes(PAGE_BYTES), PAGES).await;
            let mut others = all_pages(&one_sided, of_bytes(SEGMENT_BYTES), usize::MAX).await;
            drop((small, others.pop()));
            let outcome = P::load(&owned, leaves * P::LEAF).await;
            drop(others);
            (structure, owned, outcome)
        });
        // A task may be taking pages back.
        while worker.is_unfinished() {
            worker.turn();
        }
        worker.block_on(owned.close()).unwrap();
        drop(owned);
        (0..8).for_each(|_| worker.block_on(compute.maintain(&worker)).unwrap());
        let access = OneSided::<P>::new(&worker, structure, Proof::Checksum);
        let report = worker.block_on(P::check(&access)).unwrap();
        let has_failed = match outcome {
            Ok(_) => false,
            Err(Error::NotRecorded { .. }) => true,
            Err(error) => panic!("{leaves} leaves: {error}"),
        };
        assert!(report.is_clean(), "{leaves} leaves, failed {has_failed}: {report:?}");
        let is_loaded = report.entries == leaves * P::LEAF;
        assert!(is_loaded || report.entries == 0 && report.pages() == 1, "{report:?}");
        outcomes.insert((has_failed, is_loaded));
    }
    let all = [(false, true), (true, false), (true, true)];
    assert_eq!(outcomes, BTreeSet::from(all), "whether it has failed, and whether it is loaded");
}

#[test]
fn of_a_btree_leaves_a_sound_tree_if_it_is_not_recorded() {
    leaves_a_sound_tree::<btree::Tree>();
}

#[test]
fn of_an_rtree_leaves_a_sound_tree_if_it_is_not_recorded() {
    leaves_a_sound_tree::<rtree::Tree>();
}
