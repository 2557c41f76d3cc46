//! The coarse-grained design against a model, and what it costs.

use std::{collections::BTreeMap, marker::PhantomData, time::Duration};

use farlink_offload::{ShardKey, ShardedRemote};
use farlink_runtime::{error::Error, fabric::mem::MemOptions, operation::Run, worker::Worker};
use farlink_structures::{
    btree::Tree,
    map::{
        KeyRange, Map,
        ops::{Count, Scan},
    },
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::{self, Fleet},
    settings,
    subject::Subject,
    test_every_structure,
};

use crate::models;

const NAME: &str = "coarse";

/// Runs `f` over an empty map in three parts, then checks each part.
fn over<S: Subject, F>(options: MemOptions, cut: ShardKey<KeyRange>, f: F)
where
    F: AsyncFnOnce(&Worker, &Map<S, ShardedRemote<S>>) -> Result<BTreeMap<u64, u64>, Error>,
{
    let _watch = Watchdog::start("coarse", Duration::from_secs(120));
    let fleet = Fleet::start(3, 8 << 20, 1, options).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker
        .block_on(async {
            fleet::make_parts::<S>(&worker, NAME, 256, 3).await?;
            let map = fleet::open_coarse::<S>(&worker, NAME, 3, cut.clone()).await?;
            let model = f(&worker, &map).await?;
            models::assert_holds(&map, &model).await;
            let mut entries = 0;
            for (index, part) in fleet::open_parts::<S>(&worker, NAME, 3).await?.iter().enumerate() {
                let report = part.check().await?;
                assert!(report.is_clean(), "part {index} over {cut:?}: {report:?}");
                entries += report.entries;
            }
            assert_eq!(entries, model.len() as u64);
            Ok::<_, Error>(())
        })
        .unwrap();
}

fn cuts() -> [ShardKey<KeyRange>; 2] {
    [ShardKey::Regions(KeyRange::cut_at(&[150, 300])), ShardKey::Hash(3)]
}

#[test]
fn nothing_is_in_a_cut_without_parts() {
    assert!(
        [KeyRange { low: 7, high: Some(8) }, KeyRange::ALL]
            .iter()
            .all(|range| ShardKey::Hash(0).about(range).is_empty())
    );
}

fn agrees_with_a_model<S: Subject>() {
    for options in [FAST, NASTY, WEAK] {
        for cut in cuts() {
            over::<S, _>(options, cut, async |_, map: &Map<S, ShardedRemote<S>>| models::random_operations(map).await);
        }
    }
}

/// Scans run on from part to part, and answers are no longer than a message should be.
fn long_scans_come_in_parts<S: Subject>() {
    for cut in [ShardKey::Regions(KeyRange::cut_at(&[5000, 5001])), ShardKey::Hash(3)] {
        over::<S, _>(FAST, cut, async |_, map: &Map<S, ShardedRemote<S>>| {
            let keys = settings::from_env("FARLINK_COARSE_KEYS", 3_000);
            let model: BTreeMap<u64, u64> = (0..keys).map(|key| (key, !key)).collect();
            for (&key, &value) in &model {
                map.insert(key, value).await?;
            }
            Ok(model)
        });
    }
}

test_every_structure!(
    agrees_with_a_model, long_scans_come_in_parts;
    bwtree: agrees_with_a_model, long_scans_come_in_parts,
);

/// Each part answers up to the limit; the operation does not.
#[test]
fn a_scan_over_parts_keeps_its_limit() {
    for cut in cuts() {
        over::<Tree, _>(FAST, cut.clone(), async |_, map| {
            let model: BTreeMap<u64, u64> = (0..450).map(|key| (key, !key)).collect();
            for (&key, &value) in &model {
                map.insert(key, value).await?;
            }
            for limit in [0, 1, 10, 200, 450, 999] {
                for descending in [false, true] {
                    let scan = Scan::<Tree> { low: 20, high: 439, limit, descending, of: PhantomData };
                    let part = map.access().execute(&scan).await?;
                    let mut all: Vec<_> = model.range(20..=439).map(|(&key, &value)| (key, value)).collect();
                    if descending {
                        all.reverse();
                    }
                    let count = (limit as usize).min(all.len());
                    assert_eq!(part.entries, all[..count], "{cut:?}, {limit}, {descending}");
                    let rest = all.get(count).filter(|_| limit > 0).map(|&(key, _)| key);
                    assert_eq!(part.rest, rest, "{cut:?}, {limit}, {descending}");
                }
            }
            for (low, high) in [(2, 1), (u64::MAX, 0)] {
                let count = Count::<Tree> { low, high, limit: 9, of: PhantomData };
                assert_eq!(map.access().execute(&count).await?, (0, None), "{cut:?}");
            }
            Ok(model)
        });
    }
}

/// A get is one exchange of messages, and nothing else.
#[test]
fn a_get_is_one_exchange_and_no_one_sided_read() {
    over::<Tree, _>(FAST, ShardKey::Regions(KeyRange::cut_at(&[150, 300])), async |worker, map| {
        let model: BTreeMap<u64, u64> = (0..450).map(|key| (key, key)).collect();
        for (&key, &value) in &model {
            map.insert(key, value).await?;
        }
        let before = worker.counters();
        for key in 0..450 {
            assert_eq!(map.get(key).await?, Some(key));
        }
        let cost = worker.counters() - before;
        assert_eq!((cost.two_sided, cost.reads, cost.writes, cost.atomics), (450, 0, 0, 0), "{cost:?}");
        assert_eq!(cost.round_trips, 450);
        Ok(model)
    });
}
