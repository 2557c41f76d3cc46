//! Scans of a Bw-tree that are copied, gathered, and merged by the client: the same answers.

use std::{
    collections::BTreeMap,
    marker::PhantomData,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use farlink_offload::{Remote, ship::Shipper};
use farlink_runtime::{
    access::InPieces as _,
    error::Error,
    messaging::GatherRule,
    one_sided::{OneSided, Proof},
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

/// All of a scan, in as many answers as it takes.
async fn sent(shipper: &Shipper<Bw>, mut scan: SentScan) -> Result<Vec<(u64, u64)>, Error> {
    let mut all = Vec::new();
    loop {
        let ScanPart { entries, rest, descending } = shipper.ship_in_pieces(&scan).await?;
        assert!(entries.len() as u64 <= scan.limit && descending == scan.descending);
        all.extend(entries);
        let Some(rest) = rest else { return Ok(all) };
        let begin = if descending { &mut scan.high } else { &mut scan.low };
        assert!(if descending { rest < *begin } else { rest > *begin });
        *begin = rest;
    }
}

/// A range, in pieces, from its end.
async fn from_its_end(map: &BwTree<Remote<Bw>>, high: u64, chains: Option<bool>) -> Result<Vec<(u64, u64)>, Error> {
    map.range(..=high).in_pieces(chains).descending().take(usize::MAX).await
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
                        let descending = step % 2 == 1;
                        for ((low, high), limit) in [((0, u64::MAX), u64::MAX), (few, u64::MAX), (few, 7)] {
                            let mut expected: Vec<_> = model.range(low..=high).map(|(&k, &v)| (k, v)).collect();
                            if descending {
                                expected.reverse();
                            }
                            for chains in CHAINS {
                                let scan = SentScan { low, high, limit, descending, chains };
                                assert_eq!(sent(&shipper, scan).await?, expected, "{scan:?}");
                            }
                        }
                        // And that of an answer in words.
                        let (low, high) = if descending { (0, low) } else { (low, u64::MAX) };
                        let scan = Scan { low, high, limit: 9, descending, of: PhantomData };
                        let words = Remote::<Bw>::new(&worker, shipper.structure().clone()).execute(&scan).await?;
                        for chains in CHAINS {
                            let pieces = SentScan { low, high, limit: 9, descending, chains };
                            assert_eq!(shipper.ship_in_pieces(&pieces).await?.entries, words.entries);
                        }
                    }
                }
                for (high, limit) in [(4, 9), (9, 0)] {
                    let nothing = SentScan { low: 5, high, limit, descending: limit == 9, chains: None };
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
            let scan = SentScan { low: 0, high, limit: u64::MAX, descending: false, chains };
            assert_eq!(sent(&shipper, scan).await.unwrap().len() as u64, high + 1);
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

/// What a user has of it: entries one by one or all at once, from either end; they are gathered, and those of a range as such are not.
#[test]
fn a_range_in_pieces_goes_on_to_its_end() {
    let _watch = Watchdog::start("sent scans", Duration::from_secs(100));
    // More than a part has.
    const KEYS: u64 = 2500;
    let fleet = fleet(FAST, GatherRule::ALWAYS);
    let compute = cluster::join(&fleet.fabric(), 4).unwrap();
    let worker = compute.worker().unwrap();
    let gathered = || fleet.servers[0].messages().counts().gathered;
    worker
        .block_on(async {
            let (map, _) = tree(&worker, 1024).await?;
            let all: Vec<(u64, u64)> = (0..KEYS).map(|key| (key * 2, key)).collect();
            let made = BwTree::over(OneSided::<Bw>::new(&worker, map.access().structure().clone(), Proof::Checksum));
            made.bulk_load(all.iter().copied(), 0.9).await?;
            assert_eq!(map.range(..).take(usize::MAX).await?, all);
            assert_eq!(gathered(), 0, "it is copied");
            for chains in CHAINS {
                let before = gathered();
                assert_eq!(map.range(..).in_pieces(chains).take(usize::MAX).await?, all);
                assert!(gathered() > before, "{chains:?}");
                let (mut up, mut found) = (map.range(7..=4501).in_pieces(chains), Vec::new());
                while let Some(entry) = up.next().await? {
                    found.push(entry);
                }
                assert_eq!(found, all[4..2251], "{chains:?}");
                let mut down = from_its_end(&map, 4501, chains).await?;
                down.reverse();
                assert_eq!(down, all[..2251], "{chains:?}");
                // Turned round on its way.
                let mut range = map.range(..).in_pieces(chains);
                assert_eq!(range.next().await?, Some((0, 0)));
                assert_eq!(range.descending().take(3).await?, [(4998, 2499), (4996, 2498), (4994, 2497)]);
            }
            Ok::<_, Error>(())
        })
        .unwrap();
}

/// Whoever goes on from the rest would not come to an end.
#[test]
fn a_rest_that_is_not_behind_what_was_sent_is_an_error() {
    let scan = |descending| SentScan { low: 5, high: 9, limit: 9, descending, chains: None };
    let rest = |descending, words: &[u64]| Some(scan(descending).assemble(words).ok()?.rest);
    for (descending, [far, near, begin, beyond]) in [(false, [8, 6, 5, 4]), (true, [6, 8, 9, 10])] {
        assert_eq!(rest(descending, &[1, near]), Some(Some(near)));
        assert_eq!(rest(descending, &[0, begin]), Some(None));
        // A page of one entry, and from where it goes on.
        assert_eq!(rest(descending, &[1, near, 0, 1, far]), Some(Some(far)));
        for bad in [&[1, begin][..], &[1, beyond], &[1, far, 0, 1, far], &[1, far, 0, 1, near]] {
            assert_eq!(rest(descending, bad), None, "{bad:?}");
        }
    }
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
    let (stop, changed, structure) = (AtomicBool::new(false), AtomicU64::new(0), shipper.structure().clone());
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
                    changed.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            worker.block_on(async {
                // Until all has come at least, however slow who changes it is.
                for round in (0..).take_while(|&round| round < rounds || changed.load(Ordering::Relaxed) == 0) {
                    for chains in CHAINS {
                        let found = match round % 2 {
                            0 => map.range(..=KEYS).in_pieces(chains).take(usize::MAX).await.unwrap(),
                            _ => {
                                let mut found = from_its_end(&map, KEYS, chains).await.unwrap();
                                found.reverse();
                                found
                            }
                        };
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
