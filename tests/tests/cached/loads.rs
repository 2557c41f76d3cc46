//! Bulk loads of owners whose changes are all recorded, and cannot be for a while.

use std::{collections::BTreeSet, sync::Arc};

use farlink_offload::{CacheOptions, Cached, ComputeCache, Durability};
use farlink_runtime::{
    access::{Access, Plugin, Region as _},
    error::Error,
    fabric::{
        self, Fabric,
        faulty::{FaultOptions, FaultyFabric},
    },
    one_sided::{OneSided, Proof},
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
/// Of one load.
const LEAVES: u64 = 40;
const SEEDS: u64 = 200;

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

/// The fabric refuses memory for what is sent, now and then, also for the log. What is left once a load has failed is sound, and it leaks no
/// page: an empty tree, or the loaded one, of which its owner has to say so later.
fn leaves_a_sound_tree<P: Loaded>() {
    let mut outcomes = BTreeSet::new();
    for seed in 0..SEEDS {
        let cluster = Cluster::of_this_run(1, 4 << 20, FabricProfile::Fast).unwrap();
        let others = cluster::join_manual(&cluster, 1).unwrap();
        let other = others.worker().unwrap();
        let structure = other.block_on(P::make(&other));
        let options = FaultOptions { registrations_one_in: 2, ..FaultOptions::one_in(0, seed) };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(Arc::clone(&cluster) as _, options));
        let Ok(compute) = cluster::join_manual(&faulty, 2) else { continue };
        let Ok(worker) = compute.worker() else { continue };
        let mut options = CacheOptions::new(1 << 20);
        options.page_bytes = PAGE_BYTES;
        let cache = ComputeCache::<P>::new(options).unwrap().with_durability(Durability::Logged);
        let owned = worker.block_on(cache.own(&worker, structure.clone(), P::Region::everything()));
        let Ok(owned) = owned else { continue };
        let outcome = worker.block_on(P::load(&owned, LEAVES * P::LEAF));
        // A task may be taking pages back.
        while worker.is_unfinished() {
            worker.turn();
        }
        while let Err(error) = worker.block_on(owned.close()) {
            assert!(has_no_memory(&error), "{seed}: {error}");
        }
        drop((owned, worker, compute));
        (0..8).for_each(|_| other.block_on(others.maintain(&other)).unwrap());
        let access = OneSided::<P>::new(&other, structure, Proof::Checksum);
        let report = other.block_on(P::check(&access)).unwrap();
        let has_failed = match outcome {
            Ok(_) => false,
            Err(error) if has_no_memory(&error) => true,
            Err(error) => panic!("{seed}: {error}"),
        };
        assert!(report.is_clean(), "{seed}, failed {has_failed}: {report:?}");
        let is_loaded = report.entries == LEAVES * P::LEAF;
        assert!(is_loaded || report.entries == 0 && report.pages() == 1, "{seed}: {report:?}");
        outcomes.insert((has_failed, is_loaded));
    }
    let all = [(false, true), (true, false), (true, true)];
    assert_eq!(outcomes, BTreeSet::from(all), "whether it has failed, and whether it is loaded");
}

fn has_no_memory(error: &Error) -> bool {
    matches!(error, Error::NotRecorded { .. } | Error::Fabric(fabric::Error::RegistrationRefused { .. }))
}

#[test]
fn of_a_btree_leaves_a_sound_tree_if_it_is_not_recorded() {
    leaves_a_sound_tree::<btree::Tree>();
}

#[test]
fn of_an_rtree_leaves_a_sound_tree_if_it_is_not_recorded() {
    leaves_a_sound_tree::<rtree::Tree>();
}
