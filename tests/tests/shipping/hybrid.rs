//! The hybrid design against a model, and what it costs.

use std::{collections::BTreeMap, marker::PhantomData, time::Duration};

use farlink_offload::{Hybrid, ShardKey};
use farlink_runtime::{
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::{KeyRange, Map, PutMode, ops::Put},
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::{self, Fleet},
    raw,
    subject::Subject,
    test_every_structure,
};

use crate::models;

const NAME: &str = "hybrid";

/// Runs `f` over an empty map, then checks it.
fn over<S: Subject, F>(options: MemOptions, f: F)
where
    F: AsyncFnOnce(&Worker, &Map<S, Hybrid<S>>, &Fleet) -> Result<BTreeMap<u64, u64>, Error>,
{
    let _watch = Watchdog::start("hybrid", Duration::from_secs(120));
    let fleet = Fleet::start(3, 8 << 20, 1, options).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker
        .block_on(async {
            fleet::make_hybrid::<S>(&worker, NAME, 256).await?;
            let map = fleet::open_hybrid::<S>(&worker, NAME, Proof::Checksum).await?;
            let model = f(&worker, &map, &fleet).await?;
            models::assert_holds(&map, &model).await;
            let report = Map::<S, OneSided<S>>::open(&worker, NAME, Proof::Checksum).await?.check().await?;
            assert!(report.is_clean(), "{report:?}");
            assert_eq!(report.entries, model.len() as u64);
            Ok::<_, Error>(())
        })
        .unwrap();
}

fn agrees_with_a_model<S: Subject>() {
    for options in [FAST, NASTY, WEAK] {
        over::<S, _>(options, async |_, map, _| models::random_operations(map).await);
    }
}

test_every_structure!(
    agrees_with_a_model, parts_agree_with_a_model;
    bwtree: agrees_with_a_model, parts_agree_with_a_model,
);

/// A get is one exchange of messages and one READ, whatever the height; a put has a lock and a write besides.
#[test]
fn a_get_is_one_exchange_and_one_read() {
    over::<Tree, _>(FAST, async |worker, map, _| {
        let model: BTreeMap<u64, u64> = (0..2000).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        let report = BTree::<OneSided<Tree>>::open(worker, NAME, Proof::Checksum).await?.check().await?;
        assert!(report.height() >= 3, "{report:?}");
        let before = worker.counters();
        for key in 0..2000 {
            assert_eq!(map.get(key).await?, Some(key));
        }
        let cost = worker.counters() - before;
        assert_eq!((cost.two_sided, cost.reads, cost.writes, cost.atomics), (2000, 2000, 0, 0), "{cost:?}");
        assert_eq!(cost.round_trips, 4000);
        let before = worker.counters();
        for key in 0..2000 {
            assert_eq!(map.upsert(key, key).await?, Some(key));
        }
        let cost = worker.counters() - before;
        assert_eq!((cost.two_sided, cost.reads), (2000, 2000), "{cost:?}");
        Ok(model)
    });
}

/// Inner pages are on the server of the root, leaves on all. What splits a leaf begins anew, one-sided, without another message.
/// How many are under way at a time says nothing of whether asking pays.
#[test]
fn many_gets_at_a_time_all_ask() {
    const AT_A_TIME: u64 = 64;
    const ROUNDS: u64 = 4;
    over::<Tree, _>(FAST, async |worker, map, _| {
        let model: BTreeMap<u64, u64> = (0..2000).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        map.get(0).await?;
        let before = worker.counters();
        for round in 0..ROUNDS {
            let get = |task| {
                let (map, key) = (map.clone(), (round * AT_A_TIME + task) * 7 % 2000);
                worker.spawn(async move { map.get(key).await.unwrap() })
            };
            let gets: Vec<_> = (0..AT_A_TIME).map(get).collect();
            for get in gets {
                assert!(get.await.is_some());
            }
        }
        assert_eq!(worker.counters().two_sided - before.two_sided, ROUNDS * AT_A_TIME);
        Ok(model)
    });
}

#[test]
fn leaves_are_everywhere_and_the_inner_levels_in_one_place() {
    over::<Tree, _>(FAST, async |worker, map, fleet| {
        let before = worker.counters();
        let model: BTreeMap<u64, u64> = (0..3000).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        let cost = worker.counters() - before;
        let tree = BTree::<OneSided<Tree>>::open(worker, NAME, Proof::Checksum).await?;
        let report = tree.check().await?;
        let inner: u64 = report.pages_by_level[1..].iter().sum();
        assert_eq!((cost.two_sided, fleet.counts().done), (3000, 3000));
        assert_eq!(cost.splits, report.pages_by_level[0] + inner - report.height() as u64);
        let mut leaves = [0; 3];
        for low in (0..3000).step_by(5) {
            let leaf = raw::page_of(tree.access(), low, 0).await.unwrap();
            leaves[leaf.remote().unwrap().0.server().index()] += 1;
        }
        assert!(leaves.iter().all(|&count| count > 100), "{leaves:?}");
        Ok(model)
    });
}

/// From a page that is known no message asks for it, and what has moved to the right is found there.
#[test]
fn an_operation_begins_at_a_page_that_is_known() {
    over::<Tree, _>(FAST, async |worker, map, fleet| {
        let tree = BTree::<OneSided<Tree>>::open(worker, NAME, Proof::Checksum).await?;
        map.insert(1000, 7).await?;
        let mut model = BTreeMap::from([(1000, 7)]);
        for key in 0..50 {
            map.insert(key, 7).await?;
            model.insert(key, 7);
        }
        let (page, done) = (raw::page_of(tree.access(), 0, 0).await.unwrap(), fleet.counts().done);
        for key in 100..200 {
            let put = Put::<Tree> { key, value: 7, mode: PutMode::Insert, of: PhantomData };
            assert_eq!(map.access().execute_from(&put, page).await?, None);
            model.insert(key, 7);
        }
        assert_eq!(fleet.counts().done, done);
        Ok(model)
    });
}

fn parts_agree_with_a_model<S: Subject>() {
    let _watch = Watchdog::start("hybrid in parts", Duration::from_secs(120));
    for cut in [ShardKey::Regions(KeyRange::cut_at(&[150, 300])), ShardKey::Hash(3)] {
        let fleet = Fleet::start(3, 8 << 20, 1, NASTY).unwrap();
        let compute = cluster::join(&fleet.fabric(), 1).unwrap();
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let map = fleet::make_parted_hybrid::<S>(&worker, NAME, 256, 3, cut).await.unwrap();
            let model = models::random_operations(&map).await.unwrap();
            models::assert_holds(&map, &model).await;
            for part in fleet::open_parts::<S>(&worker, NAME, 3).await.unwrap() {
                let report = part.check().await.unwrap();
                assert!(report.is_clean(), "{report:?}");
            }
        });
        let counts: Vec<u64> = fleet.servers.iter().map(|server| server.counts().done).collect();
        let least = models::steps() / 30;
        assert!(counts.iter().all(|&done| done > least), "{counts:?}");
    }
}
