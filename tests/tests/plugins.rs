//! Structures that are no ordered maps: what the conformance kit does not ask of them.

use std::time::Duration;

use farlink_offload::{
    CacheOptions, ComputeCache, Engine, EngineOptions, Policies,
    policy::{Always, Never},
};
use farlink_runtime::{
    access::Plugin,
    catalog,
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    operation::Run,
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST},
    fleet::Fleet,
    plugins::{
        chains::{self, Chains, Push, Take, Values},
        mixed::{self, Mixed, Sum},
    },
};

/// A cluster with a structure, and a worker beside it.
fn with(
    options: MemOptions,
    placed: StructurePlacement,
    f: impl AsyncFnOnce(&Worker, StructurePlacement) -> Result<(), Error>,
) {
    let _watch = Watchdog::start("plug-ins", Duration::from_secs(100));
    let fleet = Fleet::start(3, 16 << 20, 1, options).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(f(&worker, placed)).unwrap();
}

fn everywhere(spread: PlacementPolicy) -> StructurePlacement {
    StructurePlacement { spread, root: ServerId::new(1) }
}

fn cache<P: Plugin>(ships: bool) -> ComputeCache<P> {
    let mut options = CacheOptions::new(1 << 20);
    options.excludes_subtrees = ships;
    ComputeCache::new(options).unwrap()
}

async fn assert_clean<P: Plugin>(worker: &Worker) -> Result<(), Error> {
    let access = OneSided::<P>::new(worker, catalog::open::<P>(worker, "s").await?, Proof::Checksum);
    let report = P::check(&access).await?;
    assert!(report.is_clean(), "{report:?}");
    Ok(())
}

/// The root, and then four pages at a time: five READs, two round trips.
#[test]
fn what_overlaps_is_one_round_trip() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placed| {
        let made = mixed::create(worker, "s", placed).await?;
        for forks in [false, true] {
            let before = worker.counters();
            made.execute(&Sum { forks }).await?;
            let cost = worker.counters() - before;
            assert_eq!((cost.reads, cost.round_trips), (5, 2), "forks: {forks}");
        }
        Ok(())
    });
}

/// Nothing is cached: each of four parts is summed up where it is.
#[test]
fn each_part_of_a_fork_is_shipped() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placed| {
        let made = mixed::create(worker, "s", placed).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        for (policies, shipped) in [(Policies::new(Always), 4), (Policies::new(Never), 0)] {
            let owned = cache::<Mixed>(true).own(worker, structure.clone(), ()).await?;
            let engine = Engine::new(owned, policies, EngineOptions { level_max: Some(0) })?;
            assert_eq!(engine.execute(&Sum { forks: true }).await?, 0);
            assert_eq!(engine.counts().shipped, shipped);
        }
        Ok(())
    });
}

/// What an owner has in its cache nobody else sees: words that others swap would lead to what is not there.
#[test]
fn an_owner_refuses_what_others_would_have_to_see_at_once() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placed| {
        let made = chains::create(worker, "s", placed).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let owned = cache::<Chains>(true).own(worker, structure, ()).await?;
        for refused in
            [owned.execute(&Push { set: 0, value: 1 }).await, owned.execute(&Take { set: 0 }).await.map(drop)]
        {
            assert!(matches!(refused, Err(Error::NotCoherent { .. })), "{refused:?}");
        }
        let engine = Engine::new(owned, Policies::new(Always), EngineOptions::default())?;
        let refused = engine.execute(&Push { set: 0, value: 1 }).await;
        assert!(matches!(refused, Err(Error::NotCoherent { .. })), "{refused:?}");
        assert_clean::<Chains>(worker).await
    });
}

#[test]
fn a_structure_that_is_destroyed_leaves_nothing() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placed| {
        let before = farlink_runtime::audit::memory(worker).await?.used_bytes();
        let made = chains::create(worker, "s", placed).await?;
        for value in 0..100 {
            made.execute(&Push { set: value, value }).await?;
        }
        let used = farlink_runtime::audit::memory(worker).await?.used_bytes();
        assert!(used > before);
        let pages = catalog::destroy(worker, "s").await?;
        // The root, the descriptor, and a page for each value.
        assert_eq!(pages, 102);
        assert!(matches!(catalog::open::<Chains>(worker, "s").await, Err(Error::NoSuchName { .. })));
        assert!(matches!(catalog::destroy(worker, "s").await, Err(Error::NoSuchName { .. })));
        let again = chains::create(worker, "s", placed).await?;
        assert!(again.execute(&Values { set: 0 }).await?.is_empty());
        Ok(())
    });
}

/// Opened as what it is not, by name.
#[test]
fn a_structure_is_opened_as_what_it_is() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placed| {
        chains::create(worker, "s", placed).await?;
        let error = catalog::open::<Mixed>(worker, "s").await.unwrap_err();
        assert_eq!(error.to_string(), r#""s" is a structure of chains, not of mixed; open it as what it is"#);
        Ok(())
    });
}
