//! What a search promises holds while entries come, move and go on other threads.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    one_sided::{OneSided, Proof},
};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Tree};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::entries::{Key, a_query, a_rect, key};
use crate::scene::create;

/// How a search reaches the tree in `keeps_its_promise`.
#[derive(Debug, Clone, Copy)]
enum Reach {
    OneSided,
    CachedInner,
}

/// Some entries are there all the time, others come, move and go in waves, so that pages are split, share entries, are condensed and
/// freed: every search has each of the former once, and no other one twice.
fn keeps_its_promise<const D: usize>(profile: FabricProfile, reach: Reach) {
    let seed = settings::from_env("FARLINK_TEST_SEED", rand::random::<u64>());
    println!("FARLINK_TEST_SEED={seed}");
    let lasting: Vec<Entry<D>> = {
        let mut rng = SmallRng::seed_from_u64(seed);
        (0..300).map(|number| (a_rect(&mut rng, 2), number)).collect()
    };
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
    let limit = Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 0.5));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (compute, structure) = (&computes[number as usize], &structure);
            scope.spawn(move || {
                let worker = compute.worker().unwrap();
                let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
                let mut rng = SmallRng::seed_from_u64(seed ^ (number + 1));
                let (mut there, mut payload) = (Vec::<Entry<D>>::new(), (number + 1) << 32);
                worker.block_on(async {
                    let mut grows = true;
                    while begun.elapsed() < limit {
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
                });
            });
        }
        let (compute, structure, cache, lasting) = (&computes[0], &structure, &cache, &lasting);
        scope.spawn(move || {
            let worker = compute.worker().unwrap();
            let mut rng = SmallRng::seed_from_u64(!seed);
            let mut searches = 0;
            worker.block_on(async {
                let one_sided = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
                let inner = RTree::<_, D>::over(cache.share(&worker, structure.clone(), Proof::Checksum).unwrap());
                while begun.elapsed() < limit {
                    let query = if rng.random() { a_query(&mut rng) } else { Query::Intersects(Rect::EVERYTHING) };
                    let found = match reach {
                        Reach::OneSided => one_sided.search(query).all().await.unwrap(),
                        Reach::CachedInner => inner.search(query).all().await.unwrap(),
                    };
                    let mut counts = BTreeMap::<Key, u64>::new();
                    found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
                    for entry in lasting.iter().filter(|(rect, _)| query.matches(rect)) {
                        assert!(counts.contains_key(&key(entry)), "{entry:?} is missing from {query:?} over {reach:?}");
                    }
                    for (key, count) in counts {
                        // What is moved to and fro may be two entries.
                        let most = if key.1 < 300 { 1 } else { u64::MAX };
                        assert!(count <= most, "{count} of payload {} in {query:?} over {reach:?}", key.1);
                    }
                    searches += 1;
                }
            });
            println!("{searches} searches over {reach:?} of {D} dimensions, {profile:?}");
        });
    });
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
