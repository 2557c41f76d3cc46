//! The coarse-grained design against a model, and what it costs.

use std::{collections::BTreeMap, time::Duration};

use farlink_offload::PartedRemote;
use farlink_runtime::{error::Error, fabric::mem::MemOptions, operation::Cut, worker::Worker};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::{self, Fleet},
    settings,
    subject::Subject,
    test_every_structure,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

const NAME: &str = "coarse";

/// Runs `f` over an empty map in three parts, then checks each part.
fn over<S: Subject, F>(options: MemOptions, cut: Cut, f: F)
where
    F: AsyncFnOnce(&Worker, &Map<S, PartedRemote>) -> Result<BTreeMap<u64, u64>, Error>,
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
            let all: Vec<_> = model.iter().map(|(&key, &value)| (key, value)).collect();
            assert_eq!(map.range(..).take(usize::MAX).await?, all);
            let mut descending = map.range(..).descending().take(usize::MAX).await?;
            descending.reverse();
            assert_eq!(descending, all);
            assert_eq!(map.len().await?, all.len() as u64);
            let mut entries = 0;
            for (index, part) in fleet::open_parts::<S>(&worker, NAME, 3).await?.iter().enumerate() {
                let report = part.check().await?;
                assert!(report.is_clean(), "part {index} over {cut:?}: {report:?}");
                entries += report.entries;
            }
            assert_eq!(entries, all.len() as u64);
            Ok::<_, Error>(())
        })
        .unwrap();
}

fn cuts() -> [Cut; 2] {
    [Cut::Range(vec![150, 300]), Cut::Hash]
}

fn agrees_with_a_model<S: Subject>() {
    for options in [FAST, NASTY, WEAK] {
        for cut in cuts() {
            over::<S, _>(options, cut, random_operations);
        }
    }
}

async fn random_operations<S: Subject>(
    _worker: &Worker,
    map: &Map<S, PartedRemote>,
) -> Result<BTreeMap<u64, u64>, Error> {
    let mut rng = SmallRng::seed_from_u64(settings::seed("coarse"));
    let mut model = BTreeMap::new();
    for step in 0..settings::from_env("FARLINK_COARSE_STEPS", 3000u64) {
        // Grows first and shrinks at the end, so that it splits and merges.
        let removes = if step < 2000 { 2 } else { 7 };
        let key =
            if rng.random_range(0..50) == 0 { u64::MAX - rng.random_range(0..3) } else { rng.random_range(0..450) };
        match rng.random_range(0..10) {
            kind if kind < removes => assert_eq!(map.remove(key).await?, model.remove(&key)),
            8 => {
                let (n, expected) = (rng.random_range(0..100), model.range(key..));
                let expected: Vec<_> = expected.take(n).map(|(&key, &value)| (key, value)).collect();
                assert_eq!(map.scan(key, n).await?, expected);
            }
            9 => {
                let high = key.saturating_add(rng.random_range(0..300));
                let mut expected: Vec<_> = model.range(key..=high).map(|(&key, &value)| (key, value)).collect();
                expected.reverse();
                assert_eq!(map.range(key..=high).descending().take(usize::MAX).await?, expected);
            }
            kind if kind % 3 == 0 => assert_eq!(map.upsert(key, step).await?, model.insert(key, step)),
            kind if kind % 3 == 1 => {
                assert_eq!(map.insert(key, step).await?, !model.contains_key(&key));
                model.entry(key).or_insert(step);
            }
            _ => assert_eq!(map.get(key).await?, model.get(&key).copied()),
        }
    }
    Ok(model)
}

/// Scans run on from part to part, and answers are no longer than a message should be.
fn long_scans_come_in_parts<S: Subject>() {
    for cut in [Cut::Range(vec![5000, 5001]), Cut::Hash] {
        over::<S, _>(FAST, cut, async |_, map: &Map<S, PartedRemote>| {
            let model: BTreeMap<u64, u64> = (0..10_000).map(|key| (key, !key)).collect();
            for (&key, &value) in &model {
                map.insert(key, value).await?;
            }
            Ok(model)
        });
    }
}

test_every_structure!(agrees_with_a_model, long_scans_come_in_parts);

/// A get is one exchange of messages, and nothing else.
#[test]
fn a_get_is_one_exchange_and_no_one_sided_read() {
    over::<Tree, _>(FAST, Cut::Range(vec![150, 300]), async |worker, map| {
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
