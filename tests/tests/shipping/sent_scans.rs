//! Scans of a Bw-tree that are copied, gathered, and merged by the client: the same answers.

use std::{
    collections::BTreeMap,
    marker::PhantomData,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use farlink_offload::{Remote, ship::Shipper};
use farlink_runtime::{
    error::Error,
    messaging::GatherRule,
    operation::Run,
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{
    bwtree::{Bw, BwTree, BwTreeOptions, SentScan},
    map::{ScanPart, ops::Scan},
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY},
    settings,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::pieces::fleet;

const CHAINS: [Option<bool>; 3] = [Some(false), Some(true), None];

async fn tree(worker: &Worker, page_bytes: usize) -> Result<(BwTree<Remote<Bw>>, Shipper<Bw>), Error> {
    let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(0) };
    let made = BwTree::create(worker, "s", BwTreeOptions { page_bytes, placement, ..BwTreeOptions::default() }).await?;
    let remote = Remote::new(worker, made.structure().clone());
    let shipper = remote.shipper().clone();
    Ok((BwTree::over(remote), shipper))
}

/// All of a range, in as many answers as it takes.
async fn sent(
    shipper: &Shipper<Bw>,
    (low, high): (u64, u64),
    limit: u64,
    chains: Option<bool>,
) -> Result<Vec<(u64, u64)>, Error> {
    let (mut all, mut next) = (Vec::new(), Some(low));
    while let Some(low) = next {
        let ScanPart { entries, rest, .. } = shipper.ship_in_pieces(&SentScan { low, high, limit, chains }).await?;
        assert!(entries.len() as u64 <= limit && rest.is_none_or(|rest| rest > low));
        all.extend(entries);
        next = rest;
    }
    Ok(all)
}

#[test]
fn three_ways_of_sending_give_one_answer() {
    let _watch = Watchdog::start("sent scans", Duration::from_secs(100));
    let seed = settings::seed("sent scans");
    let steps = settings::from_env("FARLINK_SENT_STEPS", 250);
    for (number, (options, gather, page_bytes)) in [
        (FAST, GatherRule::ALWAYS, 1024),
        (FAST, GatherRule::NEVER, 512),
        (NASTY, GatherRule::ALWAYS, 512),
        (FAST, GatherRule::default(), 4096),
    ]
    .into_iter()
    .enumerate()
    {
        let fleet = fleet(options, gather);
        let compute = cluster::join(&fleet.fabric(), 1).unwrap();
        let worker = compute.worker().unwrap();
        let mut rng = StdRng::seed_from_u64(seed ^ number as u64);
        worker
            .block_on(async {
                let (map, shipper) = tree(&worker, page_bytes).await?;
                let mut model = BTreeMap::new();
                for step in 0..steps {
                    // At both ends of what a key can be, too.
                    let key = match rng.random_range(0..40) {
                        0 => u64::MAX - rng.random_range(0..3),
                        _ => rng.random_range(0..600),
                    };
                    if rng.random_ratio(1, 4) {
                        assert_eq!(map.remove(key).await?, model.remove(&key));
                    } else {
                        map.upsert(key, step).await?;
                        model.insert(key, step);
                    }
                    if step % 13 == 0 || step + 1 == steps {
                        let low = rng.random_range(0..600);
                        let few = (low, low + rng.random_range(0..100));
                        for (range, limit) in [((0, u64::MAX), u64::MAX), (few, u64::MAX), (few, 7)] {
                            let expected: Vec<_> = model.range(range.0..=range.1).map(|(&k, &v)| (k, v)).collect();
                            for chains in CHAINS {
                                let found = sent(&shipper, range, limit, chains).await?;
                                assert_eq!(found, expected, "{range:?}, at most {limit}, {chains:?}");
                            }
                        }
                        // And that of an answer in words.
                        let scan = Scan { low, high: u64::MAX, limit: 9, descending: false, of: PhantomData };
                        let words = Remote::<Bw>::new(&worker, shipper.structure().clone()).execute(&scan).await?;
                        for chains in CHAINS {
                            let pieces = SentScan { low, high: u64::MAX, limit: 9, chains };
                            assert_eq!(shipper.ship_in_pieces(&pieces).await?.entries, words.entries);
                        }
                    }
                }
                for (high, limit) in [(4, 9), (9, 0)] {
                    let nothing = SentScan { low: 5, high, limit, chains: None };
                    let part = shipper.ship_in_pieces(&nothing).await?;
                    assert_eq!((part.entries, part.rest), (vec![], None));
                }
                Ok::<_, Error>(())
            })
            .unwrap();
        let counts = fleet.servers[0].messages().counts();
        println!("{gather:?}: {counts:?}");
        assert!(gather != GatherRule::ALWAYS || counts.gathered > 100, "{counts:?}");
    }
}

/// Where nobody has said which, a page goes as its chain if much is asked of it, and as its entries if little is.
#[test]
fn what_is_sent_by_default_is_the_shorter() {
    let _watch = Watchdog::start("sent scans", Duration::from_secs(100));
    const KEYS: u64 = 150;
    let fleet = fleet(FAST, GatherRule::NEVER);
    let compute = cluster::join(&fleet.fabric(), 3).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let (map, shipper) = tree(&worker, 4096).await.unwrap();
        for key in 0..KEYS {
            map.upsert(key, !key).await.unwrap();
        }
        let copied = || fleet.servers[0].messages().counts().copied_words;
        let cost = async |high, chains| {
            let before = copied();
            assert_eq!(sent(&shipper, (0, high), u64::MAX, chains).await.unwrap().len() as u64, high + 1);
            copied() - before
        };
        for (high, is_chain) in [(KEYS - 1, true), (KEYS / 10, false)] {
            let [entries, chain] = [cost(high, Some(false)).await, cost(high, Some(true)).await];
            let by_default = cost(high, None).await;
            println!("{entries} words as entries, {chain} as a chain, {by_default} by default");
            assert!(entries != chain && by_default == if is_chain { chain } else { entries });
        }
    });
}

/// Odd keys stay, even ones come and go, and with them records and pages: every odd key is in every answer.
#[test]
fn what_stays_is_in_every_answer() {
    let _watch = Watchdog::start("sent scans", Duration::from_secs(100));
    const KEYS: u64 = 200;
    let fleet = fleet(NASTY, GatherRule::ALWAYS);
    let compute = cluster::join(&fleet.fabric(), 2).unwrap();
    let worker = compute.worker().unwrap();
    let (map, shipper) = worker.block_on(tree(&worker, 512)).unwrap();
    worker.block_on(async {
        for key in (1..KEYS).step_by(2) {
            map.upsert(key, !key).await.unwrap();
        }
    });
    let (stop, structure) = (AtomicBool::new(false), shipper.structure().clone());
    let rounds = settings::from_env("FARLINK_SENT_ROUNDS", 25);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let worker = compute.worker().unwrap();
            let map = BwTree::over(Remote::<Bw>::new(&worker, structure));
            worker.block_on(async {
                for round in 0u64.. {
                    for key in (0..KEYS).step_by(2) {
                        match round % 2 {
                            0 => drop(map.upsert(key, round).await.unwrap()),
                            _ => drop(map.remove(key).await.unwrap()),
                        }
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                }
            });
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            worker.block_on(async {
                for round in 0..rounds {
                    for chains in CHAINS {
                        let found = sent(&shipper, (0, KEYS), u64::MAX, chains).await.unwrap();
                        let odd = found.iter().copied().filter(|entry| entry.0 % 2 == 1);
                        assert!(odd.eq((1..KEYS).step_by(2).map(|key| (key, !key))), "round {round}: {found:?}");
                        assert!(found.is_sorted_by(|a, b| a.0 < b.0), "round {round}: {found:?}");
                    }
                }
            });
        }));
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        outcome.unwrap();
    });
}
