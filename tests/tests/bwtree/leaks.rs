//! Pages that are nobody's are freed beside operations, which lose none.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_offload::MappingCache;
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{
        Fabric,
        faulty::{FaultKinds, FaultOptions, FaultyFabric},
    },
    one_sided::Proof,
    page::{SELF, SizeClass},
    pages::allocate,
    structure::{Placement, StructurePlacement},
    worker::Worker,
};
use farlink_structures::bwtree::{Bw, BwTree, BwTreeOptions};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::{self, Watchdog},
    cluster, settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{Scene, interesting, model, open, operate};

const NAME: &str = "leaks";
const THREADS: u64 = 3;
const KEYS: u64 = 400;
const IN_FLIGHT: u64 = 6;
const ROUNDS: usize = 250;

/// Puts and removals of keys of one's own, of which there are many for a while, and then few.
fn churn<A: Access<Plugin = Bw> + Clone + 'static>(worker: &Worker, tree: &BwTree<A>, number: u64, mut rng: SmallRng) {
    for round in 0..ROUNDS {
        let grows = round / 40 % 2 == 0;
        let operations: Vec<_> = (0..IN_FLIGHT)
            .map(|_| {
                let (tree, key) = (tree.clone(), rng.random_range(0..KEYS) * THREADS + number);
                let puts = rng.random_ratio(if grows { 9 } else { 1 }, 10);
                worker.spawn(async move { if puts { tree.upsert(key, key).await } else { tree.remove(key).await } })
            })
            .collect();
        for operation in operations {
            worker.block_on(operation).unwrap();
        }
    }
}

/// Splits, merges and new bases, of which each makes and unlinks pages, by who lives: none of those is anybody's to free.
#[test]
fn what_others_make_and_unlink_is_not_taken_for_leaked() {
    let _watch = Watchdog::start("leaks", Duration::from_secs(60));
    let seed = settings::seed("leaks");
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        let fabric = Cluster::of_this_run(2, 16 << 20, profile).unwrap();
        let join = |number: u64| {
            let options = ComputeOptions { seed: seed + number, ..ComputeOptions::default() };
            ComputeServer::join(fabric.clone(), options).unwrap()
        };
        cluster::with_worker(&fabric, |worker| {
            let options = BwTreeOptions { page_bytes: 256, chain: 4, placement: StructurePlacement::default() };
            worker.block_on(BwTree::create(worker, NAME, options)).map(drop)
        })
        .unwrap();
        let running = AtomicUsize::new(THREADS as usize);
        std::thread::scope(|scope| {
            for number in 0..THREADS {
                let (join, running) = (&join, &running);
                scope.spawn(move || {
                    let compute = join(number);
                    let worker = compute.worker().unwrap();
                    let tree = worker.block_on(BwTree::open(&worker, NAME, Proof::Checksum)).unwrap();
                    let rng = SmallRng::seed_from_u64(seed + number);
                    if number == 0 {
                        let cache = MappingCache::new(32 << 10);
                        churn(&worker, &BwTree::over(cache.share(&worker, tree.structure().clone())), number, rng);
                    } else {
                        churn(&worker, &tree, number, rng);
                    }
                    running.fetch_sub(1, Ordering::Release);
                });
            }
            let compute = join(THREADS);
            let worker = compute.worker().unwrap();
            let tree = worker.block_on(BwTree::open(&worker, NAME, Proof::Checksum)).unwrap();
            let mut rounds = 0;
            while running.load(Ordering::Acquire) > 0 || rounds == 0 {
                assert_eq!(worker.block_on(tree.free_leaked()).unwrap(), Some(0), "{profile:?}: somebody's pages");
                rounds += 1;
            }
            println!("{profile:?}: {rounds} looks");
        });
        let report = cluster::with_worker(&fabric, |worker| {
            worker.block_on(async { BwTree::open(worker, NAME, Proof::Checksum).await?.check().await })
        });
        let report = report.unwrap();
        assert!(report.is_clean() && report.audit.held == 0, "{profile:?}: {report:?}");
    }
}

/// A compute server dies as it writes a page, and no more of it arrives than its lock word: nothing says whose page that was.
#[test]
fn a_page_of_which_only_the_lock_word_has_arrived_is_found() {
    let _watch = Watchdog::start("half a page", Duration::from_secs(60));
    let fabric = Cluster::of_this_run(2, 2 << 20, FabricProfile::Fast).unwrap();
    let with_worker = |test: &dyn Fn(&Worker)| {
        cluster::with_worker(&fabric, |worker| {
            test(worker);
            Ok::<_, Error>(())
        })
    };
    with_worker(&|worker| {
        let options = BwTreeOptions { page_bytes: 256, chain: 4, placement: StructurePlacement::default() };
        worker.block_on(BwTree::create(worker, NAME, options)).unwrap();
        for class in [SizeClass::SMALLEST, SizeClass::of_bytes(256).unwrap()] {
            let page = worker.block_on(allocate(worker, class, Placement::RoundRobin)).unwrap();
            worker.block_on(worker.write_word(page.at(), page.first_lock().word())).unwrap();
            // Of one its address, too.
            if class == SizeClass::SMALLEST {
                worker.block_on(worker.write_word(page.at().word(SELF), page.at().raw())).unwrap();
            }
            page.publish();
        }
    })
    .unwrap();
    with_worker(&|worker| {
        let tree = worker.block_on(BwTree::open(worker, NAME, Proof::Checksum)).unwrap();
        assert_eq!(worker.block_on(tree.free_leaked()).unwrap(), Some(2));
        assert_eq!(worker.block_on(tree.free_leaked()).unwrap(), Some(0));
    })
    .unwrap();
    with_worker(&|worker| {
        let tree = worker.block_on(BwTree::open(worker, NAME, Proof::Checksum)).unwrap();
        let report = worker.block_on(tree.check()).unwrap();
        assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
    })
    .unwrap();
}

/// Whoever looks in the middle of a split or a merge waits for its end: what is not linked yet is not taken for leaked.
#[test]
fn who_looks_waits_for_operations_that_run() {
    let _watch = Watchdog::start("leaks and a split", Duration::from_secs(60));
    let mut looks = 0;
    for number in interesting().into_iter().step_by(2) {
        for turns in (1..).step_by(5) {
            let scene = Scene::new();
            let [(worker, compute), (looker, looking)] = [2, 3].map(|seed| scene.join(seed));
            let tree = worker.block_on(open(&worker)).unwrap();
            for before in 0..number {
                worker.block_on(operate(&tree, before)).unwrap();
            }
            let mut operation = Box::pin(worker.spawn(async move { operate(&tree, number).await.unwrap() }));
            for _ in 0..turns {
                bounded::turn(&worker);
            }
            let mut poll = || operation.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            let has_ended = poll();
            let seen = looker.block_on(open(&looker)).unwrap();
            let mut look = Box::pin(looker.spawn(async move { seen.free_leaked().await.unwrap() }));
            let mut freed = || match look.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(freed) => Some(freed),
                Poll::Pending => None,
            };
            for _ in 0..300 {
                bounded::turn(&looker);
            }
            assert!(has_ended || freed().is_none(), "operation {number}, turn {turns}: nobody has waited for it");
            while !has_ended && !poll() {
                bounded::turn(&worker);
            }
            let freed = loop {
                worker.block_on(compute.maintain(&worker)).unwrap();
                bounded::turn(&looker);
                if let Some(freed) = freed() {
                    break freed;
                }
            };
            assert_eq!(freed, Some(0), "operation {number}, turn {turns}");
            let report = looker.block_on(async { open(&looker).await?.check().await }).unwrap();
            assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{number}, {turns}: {report:?}");
            assert_eq!(report.entries, model(0..=number).len() as u64, "operation {number}, turn {turns}");
            drop((looker, looking));
            looks += 1;
            if has_ended {
                break;
            }
        }
    }
    assert!(looks > 20, "{looks} looks");
}

/// What a lost swap takes back is nobody's until it is free: whoever looks waits for that, and does not free it a second time. Here the
/// WRITE that frees it has failed, and who makes it again is not there for a while.
#[test]
fn who_looks_waits_for_what_a_lost_swap_takes_back() {
    let _watch = Watchdog::start("leaks and a lost swap", Duration::from_secs(60));
    let mut lost = 0;
    for seed in 0..40 {
        let scene = Scene::new();
        let kinds = FaultKinds { refused: true, done: false, lost: false };
        let options =
            FaultOptions { kinds, registrations_one_in: 0, connections_one_in: 0, ..FaultOptions::one_in(3, seed) };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(scene.fabric.clone(), options));
        let compute = cluster::again(|| cluster::join_manual(&faulty, 2)).unwrap();
        let (worker, keeper) = (bounded::worker(&compute).unwrap(), compute.worker().unwrap());
        let (looker, looking) = scene.join(3);
        let theirs = looker.block_on(open(&looker)).unwrap();
        let cache = MappingCache::<Bw>::new(1 << 20);
        let ours = BwTree::over(cache.share(&worker, theirs.structure().clone()));
        while (0..3).any(|value| bounded::block_on(&worker, ours.upsert(1, value)).is_err()) {}
        looker.block_on(theirs.upsert(1, 7)).unwrap();
        // Given up as soon as its swap is lost.
        let before = worker.counters().lock_conflicts;
        let mut put = Box::pin(ours.upsert(1, 8));
        while worker.counters().lock_conflicts == before
            && put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
        {
            bounded::block_on(&worker, worker.yield_now());
        }
        drop(put);
        lost += worker.counters().lock_conflicts - before;
        for _ in 0..3 {
            bounded::turn(&worker);
        }
        let mut look = Box::pin(looker.spawn(async move { theirs.free_leaked().await.unwrap() }));
        let freed = (0..).find_map(|round| {
            // A round that failed is made again.
            let _ = keeper.block_on(compute.maintain(&keeper));
            for _ in 0..20 {
                bounded::turn(&looker);
            }
            if round > 100 {
                bounded::block_on(&worker, worker.yield_now());
            }
            match look.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(freed) => Some(freed),
                Poll::Pending => None,
            }
        });
        assert_eq!(freed, Some(Some(0)), "seed {seed}: what is taken back was freed by who looked");
        drop((looker, looking));
    }
    assert!(lost > 10, "{lost} swaps were lost");
}
