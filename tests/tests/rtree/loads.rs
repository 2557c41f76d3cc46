//! A bulk load beside others.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    one_sided::Proof,
};
use farlink_structures::rtree::{Query, RTree, Rect, Tree};
use farlink_tests::backend::{Cluster, FabricProfile};

use crate::scene::create;

fn turn(future: std::pin::Pin<&mut impl Future>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// An old copy of the root leads to pages that have been freed, and that a load has taken, as it rests. Nothing leads to them yet: what were
/// inserted there could not be found, or would be freed with them.
#[test]
fn nothing_is_inserted_into_what_is_being_loaded() {
    const ENTRIES: u64 = 100;
    // They fill the memory: pages of before are among theirs.
    const LATER: u64 = 14_500;
    let rect = Rect::point([0.5; 2]).unwrap();
    for rest in 0..8 {
        let cluster = Cluster::of_this_run(1, 1 << 20, FabricProfile::Fast).unwrap();
        let compute = ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap();
        let [worker, other] = [(); 2].map(|()| compute.worker().unwrap());
        let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
        // All pages cover it.
        let entries = |count| (0..count).map(|number| (rect, number));
        let tree = other.block_on(create::<2>(&other)).unwrap();
        let structure = tree.access().context().structure.clone();
        let inner = RTree::<_, 2>::over(cache.share(&worker, structure, Proof::Checksum).unwrap());
        other.block_on(tree.bulk_load(entries(ENTRIES), 0.8)).unwrap();
        assert_eq!(worker.block_on(inner.len()).unwrap(), ENTRIES);
        other.block_on(async {
            for (rect, number) in entries(ENTRIES) {
                assert!(tree.delete(rect, number).await.unwrap());
            }
            for _ in 0..200 {
                compute.maintain(&other).await.unwrap();
            }
        });
        let mut loading = pin!(other.drive(tree.bulk_load(entries(LATER), 0.8)));
        assert!(!(0..rest).any(|_| turn(loading.as_mut())), "there is more to it");
        let mut inserting = Box::pin(worker.drive(inner.insert(rect, LATER)));
        let mut is_inserted = (0..300).any(|_| turn(inserting.as_mut()));
        // The load may fail: the tree is not empty any more.
        while !turn(loading.as_mut()) {
            is_inserted = is_inserted || turn(inserting.as_mut());
        }
        while !is_inserted {
            is_inserted = turn(inserting.as_mut());
        }
        let found = other.block_on(tree.search(Query::Contains(rect)).all()).unwrap();
        assert!(found.contains(&(rect, LATER)), "rest {rest}: {} found, and not that one", found.len());
        let report = other.block_on(tree.check()).unwrap();
        assert!(report.is_clean(), "rest {rest}: {report:?}");
    }
}
