//! A cluster in this process, and compute servers that nobody maintains but the test.

use std::{collections::BTreeMap, sync::Arc};

use farlink_offload::{Admission, CacheOptions, Cached, CachedInner, ComputeCache};
use farlink_runtime::{
    compute::ComputeServer,
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::{KeyRange, Map as Ordered, Report},
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    cluster,
    subject::Subject,
};

pub(crate) const TREE: &str = "cached";
/// The least memory that a cache can work with.
pub(crate) const CACHE_BYTES_MIN: usize = 64 << 10;
/// More than any tree here has.
pub(crate) const CACHE_BYTES_ALL: usize = 16 << 20;

pub(crate) type Map = BTreeMap<u64, u64>;
pub(crate) type Owned = BTree<Cached<Tree>>;

/// [`fabric_of`] a B+-tree.
pub(crate) fn fabric(profile: FabricProfile, page_bytes: usize, entries: &Map, fill: f64) -> Cluster {
    fabric_of::<Tree>(profile, page_bytes, entries, fill)
}

/// A cluster with one structure in it.
pub(crate) fn fabric_of<S: Subject>(profile: FabricProfile, page_bytes: usize, entries: &Map, fill: f64) -> Cluster {
    let fabric = Cluster::of_this_run(2, 16 << 20, profile).unwrap();
    cluster::create::<S>(&fabric, TREE, page_bytes, Proof::Checksum).unwrap();
    if !entries.is_empty() {
        cluster::load::<S>(&fabric, TREE, entries.iter().map(|(&key, &value)| (key, value)), fill).unwrap();
    }
    fabric
}

/// Every tenth key.
pub(crate) fn sparse(count: u64) -> Map {
    (0..count).map(|index| (index * 10, index)).collect()
}

/// A cache for pages of 256 bytes.
pub(crate) fn cache(bytes: usize, admission: Admission) -> ComputeCache<Tree> {
    cache_of::<Tree>(bytes, admission)
}

/// A cache for pages of 256 bytes, or what the structure has.
pub(crate) fn cache_of<S: Subject>(bytes: usize, admission: Admission) -> ComputeCache<S> {
    let mut options = CacheOptions::new(bytes);
    (options.page_bytes, options.admission) = (S::page_bytes(256), admission);
    ComputeCache::<S>::new(options).unwrap()
}

/// Of a compute server that uses the B+-tree.
pub(crate) type Member = MemberOf<Tree>;

/// A worker of a compute server, and the structure without a cache.
pub(crate) struct MemberOf<S: Subject> {
    // Before the compute server, which it belongs to.
    pub(crate) tree: Ordered<S, OneSided<S>>,
    pub(crate) worker: Worker,
    pub(crate) compute: Arc<ComputeServer>,
}

impl<S: Subject> MemberOf<S> {
    pub(crate) fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Self {
        Self::of(Arc::new(cluster::join_manual(fabric, seed).unwrap()))
    }

    /// A second worker of the same compute server.
    pub(crate) fn colleague(&self) -> Self {
        Self::of(Arc::clone(&self.compute))
    }

    pub(crate) fn of(compute: Arc<ComputeServer>) -> Self {
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(Ordered::open(&worker, TREE, Proof::Checksum)).unwrap();
        Self { tree: tree.beside_owners(), worker, compute }
    }

    /// The tree for one who would not have old data.
    pub(crate) fn plain(&self) -> Ordered<S, OneSided<S>> {
        Ordered::over(OneSided::new(&self.worker, self.tree.structure().clone(), Proof::Checksum))
    }

    pub(crate) fn own(&self, cache: &ComputeCache<S>, range: KeyRange) -> Ordered<S, Cached<S>> {
        let owned = cache.own(&self.worker, self.tree.structure().clone(), range);
        Ordered::over(self.worker.block_on(owned).unwrap())
    }

    pub(crate) fn share(&self, cache: &ComputeCache<S>, proof: Proof) -> Ordered<S, CachedInner<S>> {
        Ordered::over(cache.share(&self.worker, self.tree.structure().clone(), proof).unwrap())
    }

    pub(crate) fn maintain(&self) {
        self.worker.block_on(self.compute.maintain(&self.worker)).unwrap();
    }

    /// What is in the tree, read one-sided.
    pub(crate) fn entries(&self) -> Map {
        self.worker.block_on(self.tree.range(..).take(usize::MAX)).unwrap().into_iter().collect()
    }
}

/// Maintenance of all, until no retired page can be waiting for anybody: who leaves alone could not free his.
pub(crate) fn settle<'a, S: Subject>(members: impl IntoIterator<Item = &'a MemberOf<S>> + Clone) {
    for _ in 0..8 {
        members.clone().into_iter().for_each(MemberOf::maintain);
    }
}

/// That a tree that all have left is sound, holds these entries, and all other memory is free.
pub(crate) fn assert_left_clean(fabric: &Arc<dyn Fabric>, entries: &Map, context: &str) -> Report {
    let report = cluster::check_tree(fabric, TREE).unwrap();
    assert!(report.is_clean() && report.audit.held == 0, "{context}: {report:?}");
    assert_eq!(cluster::unaccounted_bytes(fabric, &report).unwrap(), 0, "{context}: {report:?}");
    let found: Map = cluster::entries(fabric, TREE).unwrap().into_iter().collect();
    assert!(found == *entries, "{context}: {}", difference(&found, entries));
    report
}

/// The first entries in which two maps differ.
pub(crate) fn difference(found: &Map, expected: &Map) -> String {
    let keys: std::collections::BTreeSet<u64> = found.keys().chain(expected.keys()).copied().collect();
    let differing = keys.into_iter().filter(|key| found.get(key) != expected.get(key));
    let shown: Vec<_> = differing.take(5).map(|key| (key, found.get(&key), expected.get(&key))).collect();
    format!("{} entries, not {}; (key, found, expected): {shown:?}", found.len(), expected.len())
}
