//! What a search promises holds while entries come, move and go on other threads.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    one_sided::{OneSided, Proof},
    operation::Run,
    worker::Counters,
};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Tree};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    cluster,
    deadlines::{Awaited, Deadlines, PATIENCE},
    settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::entries::{Key, a_query, a_rect, key};
use crate::scene::create;

/// Entries that are there all the time; their payloads are the numbers below.
const LASTING: u64 = 300;

/// How a search reaches the tree in `keeps_its_promise`.
#[derive(Debug, Clone, Copy)]
enum Reach {
    OneSided,
    CachedInner,
}

/// The entries that are there all the time.
pub(crate) fn lasting<const D: usize>(seed: u64) -> Vec<Entry<D>> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..LASTING).map(|number| (a_rect(&mut rng, 2), number)).collect()
}

/// Entries of one writer come, move and go in waves, so that pages are split, share entries, are condensed and freed.
pub(crate) async fn come_move_and_go<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    (seed, number): (u64, u64),
    goes_on: impl Fn() -> bool,
) {
    let mut rng = SmallRng::seed_from_u64(seed ^ (number + 1));
    let (mut there, mut payload) = (Vec::<Entry<D>>::new(), (number + 1) << 32);
    let mut grows = true;
    while goes_on() {
        grows = if grows { there.len() < 400 } else { there.is_empty() };
        let rect = a_rect(&mut rng, 2);
        match rng.random_range(0..8) {
            0 if !there.is_empty() => {
                let index = rng.random_range(0..there.len());
                let (from, payload) = there[index];
                assert!(tree.update(from, payload, rect).await.unwrap());
                there[index].0 = rect;
            }
            1.. if grows => {
                payload += 1;
                tree.insert(rect, payload).await.unwrap();
                there.push((rect, payload));
            }
            _ if !there.is_empty() => {
                let entry = there.swap_remove(rng.random_range(0..there.len()));
                assert!(tree.delete(entry.0, entry.1).await.unwrap(), "{entry:?} is not there");
            }
            _ => {}
        }
    }
}

/// Every search meanwhile has each of the lasting entries once; how many there were.
pub(crate) async fn searches_meanwhile<A: Run<Plugin = Tree<D>> + Debug, const D: usize>(
    tree: &RTree<A, D>,
    (seed, lasting): (u64, &[Entry<D>]),
    goes_on: impl Fn() -> bool,
) -> u64 {
    let mut rng = SmallRng::seed_from_u64(!seed);
    let mut searches = 0;
    while goes_on() {
        let query = if rng.random() { a_query(&mut rng) } else { Query::Intersects(Rect::EVERYTHING) };
        let found = tree.search(query).all().await.unwrap();
        let mut counts = BTreeMap::<Key, u64>::new();
        found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
        for entry in lasting.iter().filter(|(rect, _)| query.matches(rect)) {
            assert!(counts.contains_key(&key(entry)), "{entry:?} is missing from {query:?} over {tree:?}");
        }
        for (key, count) in counts {
            // What is moved to and fro may be two entries.
            let most = if key.1 < LASTING { 1 } else { u64::MAX };
            assert!(count <= most, "{count} of payload {} in {query:?} over {tree:?}", key.1);
        }
        searches += 1;
    }
    searches
}

fn keeps_its_promise<const D: usize>(profile: FabricProfile, reach: Reach) {
    let seed = settings::seed("promise");
    let lasting = lasting::<D>(seed);
    let cluster = Cluster::of_this_run(2, 32 << 20, profile).unwrap();
    let computes: Vec<_> =
        (0..2).map(|_| ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap()).collect();
    let structure = {
        let worker = computes[0].worker().unwrap();
        worker.block_on(async {
            let tree = create::<D>(&worker).await.unwrap();
            for &(rect, payload) in &lasting {
                tree.insert(rect, payload).await.unwrap();
            }
            tree.access().context().structure.clone()
        })
    };
    let cache = ComputeCache::<Tree<D>>::new(CacheOptions::new(256 << 10)).unwrap();
    // A tree at rest shows nothing: all go on until pages have split and merged, and a search is over.
    let directory = cluster::scratch().unwrap();
    let deadlines = Deadlines::new(Awaited { splits: true, merges: true, ..Awaited::default() }, directory.path());
    let over_at = Instant::now() + Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 0.3));
    let searches_begun = AtomicU64::new(0);
    let is_over = |counters: &dyn Fn() -> Counters| {
        let has_searched = searches_begun.load(Ordering::Relaxed) > 1;
        deadlines.is_over(over_at, 0, counters) && (has_searched || Instant::now() > over_at + PATIENCE)
    };
    let (searches, changes) = std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for number in 0..2u64 {
            let (compute, structure, is_over) = (&computes[number as usize], &structure, &is_over);
            writers.push(scope.spawn(move || {
                let worker = compute.worker().unwrap();
                let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
                let goes_on = || !is_over(&|| worker.counters());
                worker.block_on(come_move_and_go(&tree, (seed, number), goes_on));
                worker.counters()
            }));
        }
        let (compute, structure, cache, of, is_over) = (&computes[0], &structure, &cache, (seed, &*lasting), &is_over);
        let (searches_begun, mut changes) = (&searches_begun, Counters::default());
        let searcher = scope.spawn(move || {
            let worker = compute.worker().unwrap();
            let goes_on = || {
                searches_begun.fetch_add(1, Ordering::Relaxed);
                !is_over(&Counters::default)
            };
            worker.block_on(async {
                match reach {
                    Reach::OneSided => {
                        let one_sided = OneSided::new(&worker, structure.clone(), Proof::Checksum);
                        searches_meanwhile(&RTree::<_, D>::over(one_sided), of, goes_on).await
                    }
                    Reach::CachedInner => {
                        let inner = cache.share(&worker, structure.clone(), Proof::Checksum).unwrap();
                        searches_meanwhile(&RTree::<_, D>::over(inner), of, goes_on).await
                    }
                }
            })
        });
        writers.into_iter().for_each(|writer| changes += writer.join().unwrap());
        (searcher.join().unwrap(), changes)
    });
    let Counters { splits, merges, .. } = changes;
    println!("{searches} searches beside {splits} splits and {merges} merges: {reach:?}, {D} dimensions, {profile:?}");
    assert!(searches > 0 && splits > 0 && merges > 0, "the test has not tested them");
    let worker = computes[0].worker().unwrap();
    worker.block_on(async {
        let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
        let report = tree.check().await.unwrap();
        assert!(report.is_clean(), "{report:?}");
    });
}

pub(crate) fn keeps_its_promise_in<const D: usize>() {
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        for reach in [Reach::OneSided, Reach::CachedInner] {
            keeps_its_promise::<D>(profile, reach);
        }
    }
}
