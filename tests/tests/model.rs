//! Every ordered map against a `BTreeMap`: random operations on one worker, over the backend of this run (every kind of
//! fabric, if it is `mem`) and every proof.

use std::{collections::BTreeMap, sync::Arc};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{Fabric, mem::MemOptions},
    one_sided::{OneSided, Proof},
    server::in_process,
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map, skiplist::List};
use farlink_tests::{
    backend::{Backend, Cluster, Manners},
    cluster::FAST,
    settings,
    subject::Subject,
    test_every_structure,
};
use proptest::prelude::*;

/// How a configuration's cluster is made.
#[derive(Debug, Clone, Copy)]
enum On {
    ThisRun(Manners),
    LimitedBandwidth,
}

/// Every kind of fabric and proof, by name.
fn configurations() -> Vec<(&'static str, On, Proof)> {
    let mut all = vec![
        ("fast", On::ThisRun(Manners::Fast), Proof::Checksum),
        ("fast, three waits", On::ThisRun(Manners::Fast), Proof::LockBodyLock),
    ];
    if Backend::chosen() == Backend::Mem {
        all.extend([
            ("nasty", On::ThisRun(Manners::Nasty), Proof::Checksum),
            ("nasty, three waits", On::ThisRun(Manners::Nasty), Proof::LockBodyLock),
            ("weak", On::ThisRun(Manners::Weak), Proof::Checksum),
            ("limited bandwidth", On::LimitedBandwidth, Proof::Checksum),
        ]);
    }
    all
}

/// A worker, its compute server and its cluster, which go in this order.
struct Scene {
    worker: Worker,
    _compute: ComputeServer,
    _cluster: Option<Cluster>,
}

fn cluster(on: On) -> Scene {
    let (cluster, fabric): (_, Arc<dyn Fabric>) = match on {
        On::ThisRun(manners) => {
            let cluster = Cluster::of_this_run(3, 8 << 20, manners).unwrap();
            let fabric = Arc::clone(&cluster);
            (Some(cluster), fabric)
        }
        On::LimitedBandwidth => {
            let options = MemOptions { bandwidth_bytes_per_s: 1 << 30, ..FAST };
            (None, Arc::new(in_process(3, 8 << 20, options).unwrap()))
        }
    };
    let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
    Scene { worker: compute.worker().unwrap(), _compute: compute, _cluster: cluster }
}

const FAST_RUN: On = On::ThisRun(Manners::Fast);

async fn create<S: Subject>(worker: &Worker, proof: Proof) -> Result<Map<S, OneSided<S>>, Error> {
    Map::make(worker, "model", S::page_bytes(256), proof).await
}

#[derive(Debug, Clone)]
enum Op {
    Insert(u64, u64),
    Upsert(u64, u64),
    Update(u64, u64),
    Remove(u64),
    Get(u64),
    Scan(u64, usize),
    Range(u64, u64, bool),
    InsertRun(u64, u64),
    RemoveRun(u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let key = || prop_oneof![0u64..400, Just(u64::MAX), Just(u64::MAX - 1)];
    prop_oneof![
        (key(), any::<u64>()).prop_map(|(k, v)| Op::Insert(k, v)),
        (key(), any::<u64>()).prop_map(|(k, v)| Op::Upsert(k, v)),
        (key(), any::<u64>()).prop_map(|(k, v)| Op::Update(k, v)),
        key().prop_map(Op::Remove),
        key().prop_map(Op::Get),
        (key(), 0usize..80).prop_map(|(k, n)| Op::Scan(k, n)),
        (key(), key(), any::<bool>()).prop_map(|(a, b, d)| Op::Range(a.min(b), a.max(b), d)),
        (key(), 1u64..120).prop_map(|(k, n)| Op::InsertRun(k, n)),
        (key(), 1u64..120).prop_map(|(k, n)| Op::RemoveRun(k, n)),
    ]
}

async fn apply<S: Subject>(tree: &Map<S, OneSided<S>>, model: &mut BTreeMap<u64, u64>, op: Op) -> Result<(), Error> {
    match op {
        Op::Insert(k, v) => {
            let absent = !model.contains_key(&k);
            model.entry(k).or_insert(v);
            assert_eq!(tree.insert(k, v).await?, absent);
        }
        Op::Upsert(k, v) => assert_eq!(tree.upsert(k, v).await?, model.insert(k, v)),
        Op::Update(k, v) => {
            let before = model.get(&k).copied();
            model.entry(k).and_modify(|value| *value = v);
            assert_eq!(tree.update(k, v).await?, before);
        }
        Op::Remove(k) => assert_eq!(tree.remove(k).await?, model.remove(&k)),
        Op::Get(k) => assert_eq!(tree.get(k).await?, model.get(&k).copied()),
        Op::Scan(k, n) => {
            let expected: Vec<_> = model.range(k..).take(n).map(|(&k, &v)| (k, v)).collect();
            assert_eq!(tree.scan(k, n).await?, expected);
        }
        Op::Range(low, high, descending) => {
            let mut expected: Vec<_> = model.range(low..=high).map(|(&k, &v)| (k, v)).collect();
            let mut range = tree.range(low..=high);
            if descending {
                range = range.descending();
                expected.reverse();
            }
            let mut found = Vec::new();
            while let Some(entry) = range.next().await? {
                found.push(entry);
            }
            assert_eq!(found, expected);
        }
        Op::InsertRun(first, count) => {
            for k in (first..=u64::MAX).take(count as usize) {
                assert_eq!(tree.upsert(k, k).await?, model.insert(k, k));
            }
        }
        Op::RemoveRun(first, count) => {
            for k in (first..=u64::MAX).take(count as usize) {
                assert_eq!(tree.remove(k).await?, model.remove(&k));
            }
        }
    }
    Ok(())
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

fn agrees<S: Subject>(ops: &[Op]) {
    for (name, fabric, proof) in configurations() {
        let scene = cluster(fabric);
        let worker = &scene.worker;
        let outcome = worker.block_on(async {
            let tree = create::<S>(worker, proof).await?;
            let mut model = BTreeMap::new();
            for op in ops.iter().cloned() {
                apply(&tree, &mut model, op).await?;
            }
            same(&tree, &model).await
        });
        assert!(outcome.is_ok(), "{} over {name}: {outcome:?}", S::NAME);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", 24),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn random_operations_on_a_btree_agree(ops in prop::collection::vec(op(), 1..120)) {
        agrees::<Tree>(&ops);
    }

    #[test]
    fn random_operations_on_a_skip_list_agree(ops in prop::collection::vec(op(), 1..120)) {
        agrees::<List>(&ops);
    }

    #[test]
    fn bulk_load_agrees(keys in prop::collection::btree_set(any::<u64>(), 0..2000), fill in 0.1f64..=1.0) {
        let scene = cluster(FAST_RUN);
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
    let scene = cluster(FAST_RUN);
    let worker = &scene.worker;
    let count: u64 = settings::from_env("FARLINK_MODEL_KEYS", 20_000);
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

test_every_structure!(grows_and_shrinks_to_nothing_and_gives_its_pages_back);

#[test]
fn failed_bulk_loads_leave_nothing_behind() {
    let scene = cluster(FAST_RUN);
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
                worker.yield_now().await;
            }
            assert!(tree.is_empty().await?);
            assert!(tree.insert(1, 1).await?);
            assert!(matches!(tree.bulk_load([(1, 1)], 0.9).await, Err(Error::NotEmpty)));
            Ok::<_, Error>(())
        })
        .unwrap();
}
