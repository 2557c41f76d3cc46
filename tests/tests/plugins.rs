//! Structures that are no ordered maps, over every access: pages of four sizes in one, and one without locks.

use std::{collections::BTreeMap, time::Duration};

use farlink_offload::{
    CacheOptions, ComputeCache, Engine, EngineOptions, Hybrid, Policies, Remote,
    policy::{Always, Never},
};
use farlink_runtime::{
    access::{Plugin, Structure},
    catalog,
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    operation::Run,
    ptr::ServerId,
    structure::{Placed, Spread},
    worker::Worker,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::Fleet,
    plugins::{
        chains::{self, Chains, Push, SETS, Take, Values},
        mixed::{self, Add, Mixed, Sum},
    },
};

const COUNTERS: u64 = 4 * 30;
const ROUNDS: u64 = 3;

/// A cluster with a structure, and a worker beside it.
fn with(options: MemOptions, placed: Placed, f: impl AsyncFnOnce(&Worker, Placed) -> Result<(), Error>) {
    let _watch = Watchdog::start("plug-ins", Duration::from_secs(100));
    let fleet = Fleet::start(3, 16 << 20, 1, options).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(f(&worker, placed)).unwrap();
}

fn everywhere(spread: Spread) -> Placed {
    Placed { spread, root: ServerId::new(1) }
}

fn cache<P: Plugin>(ships: bool) -> ComputeCache<P> {
    let mut options = CacheOptions::new(1 << 20);
    options.excludes_subtrees = ships;
    ComputeCache::new(options).unwrap()
}

async fn count(run: &impl Run<Plugin = Mixed>) -> Result<(), Error> {
    let mut model = BTreeMap::new();
    for round in 1..=ROUNDS {
        for counter in 0..COUNTERS {
            let amount = counter * 7 + round;
            let before = run.perform(&Add { counter, amount }).await?;
            let sum: &mut u64 = model.entry(mixed::place(counter)).or_default();
            assert_eq!(before, *sum, "counter {counter} of round {round}");
            *sum += amount;
        }
        for forks in [false, true] {
            assert_eq!(run.perform(&Sum { forks }).await?, model.values().sum::<u64>(), "forks: {forks}");
        }
    }
    Ok(())
}

/// Runs `test` with every access to a structure that `create` makes.
macro_rules! over_every_access {
    ($test:ident, $create:path, $plugin:ty, $owned:expr) => {
        for options in [FAST, NASTY, WEAK] {
            for spread in [Spread::RoundRobin, Spread::Leaves, Spread::OneServer] {
                for proof in [Proof::Checksum, Proof::LockBodyLock] {
                    with(options, everywhere(spread), async |worker, placed| {
                        let made = $create(worker, "s", placed).await?;
                        let structure: Structure = farlink_runtime::access::Access::context(&made).structure.clone();
                        $test(&OneSided::<$plugin>::new(worker, structure, proof)).await?;
                        assert_clean::<$plugin>(worker).await
                    });
                    with(options, everywhere(spread), async |worker, placed| {
                        let made = $create(worker, "s", placed).await?;
                        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
                        $test(&cache::<$plugin>(false).share(worker, structure, proof)?).await?;
                        assert_clean::<$plugin>(worker).await
                    });
                }
                with(options, everywhere(spread), async |worker, placed| {
                    let made = $create(worker, "s", placed).await?;
                    let structure = farlink_runtime::access::Access::context(&made).structure.clone();
                    $test(&Hybrid::<$plugin>::new(worker, structure, Proof::Checksum)).await?;
                    assert_clean::<$plugin>(worker).await
                });
            }
            with(options, everywhere(Spread::OneServer), async |worker, placed| {
                let made = $create(worker, "s", placed).await?;
                let structure = farlink_runtime::access::Access::context(&made).structure.clone();
                $test(&Remote::<$plugin>::new(worker, structure)).await?;
                assert_clean::<$plugin>(worker).await
            });
        }
    };
}

async fn assert_clean<P: Plugin>(worker: &Worker) -> Result<(), Error> {
    let access = OneSided::<P>::new(worker, catalog::open::<P>(worker, "s").await?, Proof::Checksum);
    let report = P::check(&access).await?;
    assert!(report.is_clean(), "{report:?}");
    Ok(())
}

#[test]
fn pages_of_four_sizes_work_over_every_access() {
    over_every_access!(count, mixed::create, Mixed, true);
    for options in [FAST, NASTY, WEAK] {
        for spread in [Spread::RoundRobin, Spread::OneServer] {
            with(options, everywhere(spread), async |worker, placed| {
                let made = mixed::create(worker, "s", placed).await?;
                let structure = farlink_runtime::access::Access::context(&made).structure.clone();
                let owned = cache::<Mixed>(false).own(worker, structure, ())?;
                count(&owned).await?;
                owned.flush().await?;
                assert_clean::<Mixed>(worker).await
            });
            for ships in [false, true] {
                with(options, everywhere(spread), async |worker, placed| {
                    let made = mixed::create(worker, "s", placed).await?;
                    let structure = farlink_runtime::access::Access::context(&made).structure.clone();
                    let owned = cache::<Mixed>(true).own(worker, structure, ())?;
                    let policies = if ships { Policies::new(Always) } else { Policies::new(Never) };
                    let options = EngineOptions { level_max: Some(0) };
                    let engine = Engine::new(owned, policies, options)?;
                    // Nothing is cached: each part is summed up where it is.
                    assert_eq!(engine.perform(&Sum { forks: true }).await?, 0);
                    assert_eq!(engine.counts().shipped, if ships { 4 } else { 0 });
                    count(&engine).await?;
                    assert_eq!(engine.counts().shipped > 4, ships, "{:?}", engine.counts());
                    engine.cached().flush().await?;
                    assert_clean::<Mixed>(worker).await
                });
            }
        }
    }
}

/// The root, and then four pages at a time: five READs, two round trips.
#[test]
fn what_overlaps_is_one_round_trip() {
    with(FAST, everywhere(Spread::RoundRobin), async |worker, placed| {
        let made = mixed::create(worker, "s", placed).await?;
        for forks in [false, true] {
            let before = worker.counters();
            made.perform(&Sum { forks }).await?;
            let cost = worker.counters() - before;
            assert_eq!((cost.reads, cost.round_trips), (5, 2), "forks: {forks}");
        }
        Ok(())
    });
}

async fn chain(run: &impl Run<Plugin = Chains>) -> Result<(), Error> {
    let mut model = BTreeMap::<u64, Vec<u64>>::new();
    for round in 0..3 {
        for value in 0..5 * SETS {
            let set = value % SETS;
            run.perform(&Push { set, value: value + 100 * round }).await?;
            model.entry(set).or_default().insert(0, value + 100 * round);
        }
        for set in 0..SETS {
            assert_eq!(run.perform(&Values { set }).await?, model[&set]);
        }
        for set in (round..SETS).step_by(3) {
            assert_eq!(run.perform(&Take { set }).await?, model.remove(&set).unwrap());
            assert!(run.perform(&Values { set }).await?.is_empty());
            assert!(run.perform(&Take { set }).await?.is_empty());
            model.insert(set, Vec::new());
        }
    }
    Ok(())
}

#[test]
fn a_structure_without_locks_works_over_every_access_that_says_it_can() {
    over_every_access!(chain, chains::create, Chains, false);
}

/// What an owner has in its cache nobody else sees: words that others swap would lead to what is not there.
#[test]
fn an_owner_refuses_what_others_would_have_to_see_at_once() {
    with(FAST, everywhere(Spread::RoundRobin), async |worker, placed| {
        let made = chains::create(worker, "s", placed).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let owned = cache::<Chains>(true).own(worker, structure, ())?;
        for refused in
            [owned.perform(&Push { set: 0, value: 1 }).await, owned.perform(&Take { set: 0 }).await.map(drop)]
        {
            assert!(matches!(refused, Err(Error::NotCoherent { .. })), "{refused:?}");
        }
        let engine = Engine::new(owned, Policies::new(Always), EngineOptions::default())?;
        let refused = engine.perform(&Push { set: 0, value: 1 }).await;
        assert!(matches!(refused, Err(Error::NotCoherent { .. })), "{refused:?}");
        assert_clean::<Chains>(worker).await
    });
}

/// Workers of several compute servers, each value pushed once: every one is there, or was taken once.
#[test]
fn nothing_is_lost_or_taken_twice_by_many_at_once() {
    const EACH: u64 = 300;
    let _watch = Watchdog::start("chains", Duration::from_secs(100));
    for options in [FAST, NASTY, WEAK] {
        let fleet = Fleet::start(2, 16 << 20, 1, options).unwrap();
        let fabric = fleet.fabric();
        let compute = cluster::join(&fabric, 1).unwrap();
        let structure = {
            let worker = compute.worker().unwrap();
            let made = worker.block_on(chains::create(&worker, "s", everywhere(Spread::RoundRobin))).unwrap();
            farlink_runtime::access::Access::context(&made).structure.clone()
        };
        let taken: Vec<u64> = std::thread::scope(|scope| {
            let run = |number: u64| {
                let (fabric, structure) = (fabric.clone(), structure.clone());
                scope.spawn(move || {
                    let compute = cluster::join(&fabric, 10 + number).unwrap();
                    let worker = compute.worker().unwrap();
                    let access = OneSided::<Chains>::new(&worker, structure, Proof::Checksum);
                    worker.block_on(async {
                        let mut taken = Vec::new();
                        for value in 0..EACH {
                            access.perform(&Push { set: value % 2, value: number * EACH + value }).await.unwrap();
                            if value % 7 == number {
                                taken.extend(access.perform(&Take { set: value % 2 }).await.unwrap());
                            }
                        }
                        taken
                    })
                })
            };
            let threads: Vec<_> = (0..3).map(run).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let worker = compute.worker().unwrap();
        worker
            .block_on(async {
                let access = OneSided::<Chains>::new(&worker, structure, Proof::Checksum);
                let mut all = taken;
                for set in 0..SETS {
                    all.extend(access.perform(&Values { set }).await?);
                }
                all.sort_unstable();
                assert_eq!(all, (0..3 * EACH).collect::<Vec<_>>());
                assert_clean::<Chains>(&worker).await
            })
            .unwrap();
    }
}

#[test]
fn a_structure_that_is_destroyed_leaves_nothing() {
    with(FAST, everywhere(Spread::RoundRobin), async |worker, placed| {
        let before = farlink_runtime::audit::memory(worker).await?.used_bytes();
        let made = chains::create(worker, "s", placed).await?;
        for value in 0..100 {
            made.perform(&Push { set: value, value }).await?;
        }
        let used = farlink_runtime::audit::memory(worker).await?.used_bytes();
        assert!(used > before);
        let pages = catalog::destroy(worker, "s").await?;
        // The root, the descriptor, and a page for each value.
        assert_eq!(pages, 102);
        assert!(matches!(catalog::open::<Chains>(worker, "s").await, Err(Error::NoSuchName { .. })));
        assert!(matches!(catalog::destroy(worker, "s").await, Err(Error::NoSuchName { .. })));
        let again = chains::create(worker, "s", placed).await?;
        assert!(again.perform(&Values { set: 0 }).await?.is_empty());
        Ok(())
    });
}

/// Opened as what it is not, by name.
#[test]
fn a_structure_is_opened_as_what_it_is() {
    with(FAST, everywhere(Spread::RoundRobin), async |worker, placed| {
        chains::create(worker, "s", placed).await?;
        let error = catalog::open::<Mixed>(worker, "s").await.unwrap_err();
        assert_eq!(error.to_string(), r#""s" is a structure of chains, not of mixed; open it as what it is"#);
        Ok(())
    });
}
