//! The hybrid design against a model, what it costs, and what a split leaves when its second message never comes.

use std::{cell::Cell, collections::BTreeMap, time::Duration};

use farlink_offload::Hybrid;
use farlink_runtime::{
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    operation::Cut,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::Map,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::{self, Fleet},
    subject::Subject,
    test_every_structure,
};

use crate::models;

const NAME: &str = "hybrid";

/// Runs `f` over an empty map, then checks it.
fn over<S: Subject, F>(options: MemOptions, f: F)
where
    F: AsyncFnOnce(&Worker, &Map<S, Hybrid>, &Fleet) -> Result<BTreeMap<u64, u64>, Error>,
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
            let report = Map::<S, OneSided>::open(&worker, NAME, Proof::Checksum).await?.check().await?;
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

test_every_structure!(agrees_with_a_model, parts_agree_with_a_model);

/// A get is one exchange of messages and one READ, whatever the height; a put has a lock and a write besides.
#[test]
fn a_get_is_one_exchange_and_one_read() {
    over::<Tree, _>(FAST, async |worker, map, _| {
        let model: BTreeMap<u64, u64> = (0..2000).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        let report = BTree::<OneSided>::open(worker, NAME, Proof::Checksum).await?.check().await?;
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

/// Inner pages are on the server of the root, leaves on all; a split is two messages, the second of which changes an inner page.
#[test]
fn leaves_are_everywhere_and_the_inner_levels_in_one_place() {
    over::<Tree, _>(FAST, async |worker, map, fleet| {
        let before = worker.counters();
        let model: BTreeMap<u64, u64> = (0..3000).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        let cost = worker.counters() - before;
        let report = BTree::<OneSided>::open(worker, NAME, Proof::Checksum).await?.check().await?;
        // The first split of all is that of a root that is a leaf: it needs nobody to be told.
        let told = report.pages_by_level[0] - 2;
        assert_eq!((cost.two_sided, cost.splits), (3000 + told, told + 1));
        assert_eq!(fleet.counts().done, 3000 + told);
        let mut leaves = [0; 3];
        for low in (0..3000).step_by(5) {
            let at = leaf(worker, low).await?;
            leaves[at.server().index()] += 1;
        }
        assert!(leaves.iter().all(|&count| count > 100), "{leaves:?}");
        Ok(model)
    });
}

async fn leaf(worker: &Worker, key: u64) -> Result<farlink_runtime::ptr::RemotePtr, Error> {
    use farlink_structures::map::ops::Locate;
    let tree = BTree::<OneSided>::open(worker, NAME, Proof::Checksum).await?;
    let locate = Locate::<Tree> { key, level: 0, of: std::marker::PhantomData };
    farlink_runtime::operation::execute(tree.access(), &locate).await
}

/// The memory server is lost before the second message; the next one has the inner levels as they were. Everything is found;
/// and the inner levels learn of the leaf from whoever finds it through its neighbour.
#[test]
fn a_leaf_that_the_inner_levels_do_not_know_is_found_and_made_known() {
    let _watch = Watchdog::start("unknown leaf", Duration::from_secs(60));
    let mut fleet = Fleet::start(3, 8 << 20, 1, FAST).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    let entries = 300u64;
    let check = |worker: &Worker| {
        worker.block_on(async { BTree::<OneSided>::open(worker, NAME, Proof::Checksum).await?.check().await }).unwrap()
    };
    worker.block_on(async {
        fleet::make_hybrid::<Tree>(&worker, NAME, 256).await.unwrap();
        let map = fleet::open_hybrid::<Tree>(&worker, NAME, Proof::Checksum).await.unwrap();
        for key in 0..entries {
            map.insert(key * 10, key).await.unwrap();
        }
    });
    assert!(check(&worker).is_clean());
    // Leaves split while nobody can be told: their pages are known, so no first message is needed.
    let known = Cell::new(0);
    worker.block_on(async {
        let map = fleet::open_hybrid::<Tree>(&worker, NAME, Proof::Checksum).await.unwrap();
        let page = leaf(&worker, 1000).await.unwrap();
        fleet.servers.clear();
        for key in 1001..1010 {
            let put = farlink_structures::map::ops::Put::<Tree> {
                key,
                value: 7,
                mode: farlink_structures::map::PutMode::Insert,
                of: std::marker::PhantomData,
            };
            known.set(known.get() + u64::from(map.access().perform_from(&put, page).await.is_ok()));
        }
    });
    assert_eq!(known.get(), 9);
    assert!(!check(&worker).is_clean(), "no leaf has split, or somebody has made it known");
    let _fleet = fleet.restart().unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let map = fleet::open_hybrid::<Tree>(&worker, NAME, Proof::Checksum).await.unwrap();
        for key in 1001..1010 {
            assert_eq!(map.get(key).await.unwrap(), Some(7));
        }
        assert_eq!(map.len().await.unwrap(), entries + 9);
    });
    assert!(check(&worker).is_clean());
}

fn parts_agree_with_a_model<S: Subject>() {
    let _watch = Watchdog::start("hybrid in parts", Duration::from_secs(120));
    for cut in [Cut::Range(vec![150, 300]), Cut::Hash] {
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
