//! Ordered maps that are loaded, grow, and shrink to nothing; `conformance.rs` has random operations.

use std::{collections::BTreeMap, sync::Arc};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    one_sided::{OneSided, Proof},
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    settings,
    subject::Subject,
    test_every_structure,
};
use proptest::prelude::*;

/// A worker, its compute server and its cluster, which go in this order.
struct Scene {
    worker: Worker,
    _compute: ComputeServer,
    _cluster: Cluster,
}

fn cluster() -> Scene {
    cluster_of(8 << 20)
}

fn cluster_of(server_bytes: u64) -> Scene {
    let cluster = Cluster::of_this_run(3, server_bytes, FabricProfile::Fast).unwrap();
    let compute = ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap();
    Scene { worker: compute.worker().unwrap(), _compute: compute, _cluster: cluster }
}

async fn create<S: Subject>(worker: &Worker, proof: Proof) -> Result<Map<S, OneSided<S>>, Error> {
    Map::make(worker, "model", S::page_bytes(256), proof).await
}

async fn same<S: Subject>(tree: &Map<S, OneSided<S>>, model: &BTreeMap<u64, u64>) -> Result<(), Error> {
    let all: Vec<_> = model.iter().map(|(&k, &v)| (k, v)).collect();
    assert_eq!(tree.range(..).take(usize::MAX).await?, all);
    assert_eq!(tree.len().await?, model.len() as u64);
    assert_eq!(tree.is_empty().await?, model.is_empty());
    let report = tree.check().await?;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.entries, model.len() as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", 10),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn bulk_load_agrees(keys in prop::collection::btree_set(any::<u64>(), 0..2000), fill in 0.1f64..=1.0) {
        let scene = cluster();
        let worker = &scene.worker;
        let model: BTreeMap<u64, u64> = keys.into_iter().map(|k| (k, !k)).collect();
        let outcome = worker.block_on(async {
            let tree = create::<Tree>(worker, Proof::Checksum).await?;
            let loaded = tree.bulk_load(model.iter().map(|(&k, &v)| (k, v)), fill).await?;
            assert_eq!(loaded, model.len() as u64);
            same(&tree, &model).await
        });
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }
}

fn grows_and_shrinks_to_nothing_and_gives_its_pages_back<S: Subject>() {
    let scene = cluster();
    let worker = &scene.worker;
    let count: u64 = settings::from_env("FARLINK_MODEL_KEYS", 6_000);
    let keys: Vec<u64> = (0..count).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    worker
        .block_on(async {
            let tree = create::<S>(worker, Proof::Checksum).await?;
            for round in 0..3 {
                for &key in &keys {
                    assert!(tree.insert(key, round).await?);
                }
                let full = tree.check().await?;
                let height_min = if count < 20_000 { 2 } else { 4 };
                assert!(full.is_clean() && full.height() >= height_min, "{full:?}");
                for &key in keys.iter().rev() {
                    assert_eq!(tree.remove(key).await?, Some(round));
                }
                let empty = tree.check().await?;
                assert!(empty.is_clean(), "{empty:?}");
                assert_eq!((empty.entries, empty.pages()), (0, 1));
            }
            Ok::<_, Error>(())
        })
        .unwrap();
}

test_every_structure!(
    grows_and_shrinks_to_nothing_and_gives_its_pages_back;
    bwtree: grows_and_shrinks_to_nothing_and_gives_its_pages_back,
);

#[test]
fn failed_bulk_loads_leave_nothing_behind() {
    // Little memory, for it is filled.
    let scene = cluster_of(1 << 20);
    let worker = &scene.worker;
    worker
        .block_on(async {
            let tree = create::<Tree>(worker, Proof::Checksum).await?;
            let unsorted = (0..5000u64).map(|k| (if k == 4999 { 7 } else { k }, k));
            assert!(matches!(tree.bulk_load(unsorted, 0.9).await, Err(Error::NotSorted { position: 4999, key: 7 })));
            // Drop one in the middle, from inside its input.
            let endless = tree.bulk_load((0..).map(|k| (k, k)), 0.9);
            assert!(matches!(endless.await, Err(Error::OutOfMemory { .. })));
            assert!(matches!(tree.bulk_load([(1, 1)], 0.0).await, Err(Error::BadOption { .. })));
            while !tree.check().await?.is_clean() {
                // Looking takes longer than giving a page back.
                for _ in 0..20 {
                    worker.yield_now().await;
                }
            }
            assert!(tree.is_empty().await?);
            assert!(tree.insert(1, 1).await?);
            assert!(matches!(tree.bulk_load([(1, 1)], 0.9).await, Err(Error::NotEmpty)));
            Ok::<_, Error>(())
        })
        .unwrap();
}
