//! Four compute servers, on four threads, own a quarter each of the keys of one tree: inserts and removes on all sides of the cuts, several
//! in flight, which split and merge the same shared pages at once. Nothing is refused, and no change is lost.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    rc::Rc,
    sync::Barrier,
};

use farlink_offload::Admission;
use farlink_structures::btree::KeyRange;
use farlink_tests::{backend::FabricProfile, settings};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::scene::{CACHE_BYTES_MIN, Map, Member, assert_left_clean, cache, fabric, sparse};

const OWNERS: u64 = 4;
/// Keys of one owner: about as many.
const SHARE: u64 = 1000;
const ROUNDS: u64 = 60;
const IN_FLIGHT: u64 = 8;

/// What one owner does to its keys: pairwise different keys in each round.
fn steps(range: KeyRange, seed: u64) -> Vec<Vec<(u64, bool)>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (low, high) = (range.low, range.high.unwrap_or(OWNERS * SHARE));
    let width = high - low;
    (0..ROUNDS)
        .map(|round| {
            // From the ends of the range to its middle, and back: what is shared lies at the ends.
            let grows = round < ROUNDS / 2;
            let mut keys: Vec<u64> = (0..IN_FLIGHT * 4)
                .map(|_| {
                    let (near, depth) = (rng.random::<bool>(), rng.random_range(0..width / 2));
                    if near { low + depth } else { high - 1 - depth }
                })
                .collect();
            keys.sort_unstable();
            keys.dedup();
            keys.into_iter().map(|key| (key, grows != (rng.random_range(0..8) == 0))).collect()
        })
        .collect()
}

#[test]
fn four_owners_change_shared_pages_at_once() {
    let seed = settings::seed("four owners");
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        let mut model = sparse(OWNERS * SHARE / 10);
        let fabric = fabric(profile, 256, &model, 0.7);
        let cuts: Vec<u64> = {
            let member = Member::join(&fabric, seed);
            let cut = |owner| member.worker.block_on(member.tree.leaf_low(owner * SHARE)).unwrap();
            (0..OWNERS).map(cut).chain([u64::MAX]).collect()
        };
        let barrier = Barrier::new(OWNERS as usize);
        let shares: Vec<Map> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..OWNERS)
                .map(|number| {
                    let (fabric, barrier, cuts, before) = (&fabric, &barrier, &cuts, &model);
                    scope.spawn(move || {
                        let index = number as usize;
                        let high = (number + 1 < OWNERS).then(|| cuts[index + 1]);
                        let range = KeyRange { low: cuts[index], high };
                        let member = Member::join(fabric, seed ^ number);
                        let cache = cache(CACHE_BYTES_MIN, Admission::Frequency);
                        let tree = Rc::new(member.own(&cache, range));
                        barrier.wait();
                        // The others are not left waiting.
                        let outcome = catch_unwind(AssertUnwindSafe(|| {
                            let mut mine: Map = before.range(range.low..).map(|(&k, &v)| (k, v)).collect();
                            mine.retain(|&key, _| range.contains(key));
                            for (round, steps) in steps(range, seed.wrapping_add(number)).into_iter().enumerate() {
                                for steps in steps.chunks(IN_FLIGHT as usize) {
                                    let all: Vec<_> = steps
                                        .iter()
                                        .map(|&(key, inserts)| {
                                            let tree = Rc::clone(&tree);
                                            member.worker.spawn(async move {
                                                match inserts {
                                                    true => tree.insert(key, !key).await.unwrap(),
                                                    false => tree.remove(key).await.unwrap().is_some(),
                                                }
                                            })
                                        })
                                        .collect();
                                    for (&(key, inserts), done) in steps.iter().zip(all) {
                                        let done = member.worker.block_on(done);
                                        let was_there = match inserts {
                                            true => {
                                                let was_there = mine.contains_key(&key);
                                                mine.entry(key).or_insert(!key);
                                                was_there
                                            }
                                            false => mine.remove(&key).is_some(),
                                        };
                                        assert_eq!(done, inserts != was_there, "key {key}, inserts: {inserts}");
                                    }
                                }
                                if round % 8 == 0 {
                                    member.maintain();
                                }
                            }
                            let did = member.worker.counters();
                            assert!(did.splits > 0 && did.merges > 0, "{did:?}");
                            member.worker.block_on(tree.access().close()).unwrap();
                            mine
                        }));
                        drop(tree);
                        for _ in 0..8 {
                            barrier.wait();
                            member.maintain();
                        }
                        barrier.wait();
                        outcome.unwrap_or_else(|panic| resume_unwind(panic))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        model = shares.into_iter().flatten().collect();
        assert_left_clean(&fabric, &model, "four owners");
    }
}
