//! Structures that are no ordered maps: what the conformance kit does not ask of them.

use std::time::Duration;

use farlink_offload::{
    CacheOptions, ComputeCache, Engine, EngineOptions, Policies, Remote,
    policy::{Always, Never},
    ship::Registry,
};
use farlink_runtime::{
    access::{FastPath as _, Plugin},
    catalog::{self, CreateOptions},
    error::Error,
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    operation::Run,
    page::SizeClass,
    ptr::ServerId,
    structure::{OPTIONS, PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::rtree::{self, RTree, RTreeOptions, Rect};
use farlink_tests::{
    backend::FabricProfile,
    bounded::Watchdog,
    cluster::{self, FAST},
    fleet::Fleet,
    plugins::{
        chains::{self, Chains, Push, Take, Values},
        doubled::{self, BUCKETS, Double, Doubled, Find, Get, Set},
        mixed::{self, Add, Mixed, Sum},
    },
    strict::{Rules, Strict},
};

/// A cluster with a structure, and a worker beside it.
fn with(
    options: MemOptions,
    placement: StructurePlacement,
    f: impl AsyncFnOnce(&Worker, StructurePlacement) -> Result<(), Error>,
) {
    with_fleet(Fleet::start(3, 16 << 20, 1, options).unwrap(), placement, f);
}

fn with_fleet(
    fleet: Fleet,
    placement: StructurePlacement,
    f: impl AsyncFnOnce(&Worker, StructurePlacement) -> Result<(), Error>,
) {
    let _watch = Watchdog::start("plug-ins", Duration::from_secs(100));
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(f(&worker, placement)).unwrap();
}

fn everywhere(policy: PlacementPolicy) -> StructurePlacement {
    StructurePlacement { policy, root: ServerId::new(1) }
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
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = mixed::create(worker, "s", placement).await?;
        made.enter().await?;
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
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = mixed::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        for (policies, shipped) in [(Policies::new(Always), 4), (Policies::new(Never), 0)] {
            let owned = cache::<Mixed>(true).own(worker, structure.clone(), ()).await?;
            let engine = Engine::new(owned, policies, EngineOptions { level_max: Some(0) })?;
            assert_eq!(engine.execute(&Sum { forks: true }).await?, 0);
            assert_eq!(engine.counts().shipped, shipped);
        }
        // What is followed is never sent: the attempt goes on here, whatever the policy says.
        let owned = cache::<Mixed>(true).own(worker, structure.clone(), ()).await?;
        let engine = Engine::new(owned, Policies::new(Always), EngineOptions { level_max: Some(0) })?;
        assert_eq!(engine.execute(&Sum { forks: false }).await?, 0);
        assert_eq!(engine.counts().shipped, 0);
        Ok(())
    });
}

/// A cache with one block of memory has room for pages of one size at a time, while those of others come and go: an operation that finds none
/// ends, and says why.
#[test]
fn where_pages_of_one_size_find_no_room_an_operation_ends() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = mixed::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let mut options = CacheOptions::new(1 << 20);
        (options.page_bytes, options.pages_max) = (256, 16);
        let owned = ComputeCache::<Mixed>::new(options)?.own(worker, structure, ()).await?;
        // The counters of 256 B stand beside the root.
        for (counter, has_room) in [(1, true), (0, false), (1, true)] {
            let added = owned.execute(&Add { counter, amount: 0 }).await;
            let why =
                format!("no page can make room for one of {} B: pages of other sizes", mixed::BYTES[counter as usize]);
            let ends_well = added.as_ref().map_or_else(|error| error.to_string().contains(&why), |_| has_room);
            assert!(ends_well && added.is_ok() == has_room, "counter {counter}: {added:?}");
        }
        Ok(())
    });
}

/// Round trips of a sum.
async fn trips(worker: &Worker, of: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
    let before = worker.counters();
    of.execute(&Sum { forks: false }).await?;
    Ok((worker.counters() - before).round_trips)
}

/// Whatever proves a page, and whatever caches it: the root, and four pages at the same time.
#[test]
fn what_is_followed_together_overlaps_over_every_access() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = mixed::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let slow = OneSided::<Mixed>::new(worker, structure.clone(), Proof::LockBodyLock);
        let shared = cache::<Mixed>(false).share(worker, structure.clone(), Proof::Checksum)?;
        slow.enter().await?;
        shared.enter().await?;
        // Lock word, body, lock word.
        assert_eq!(trips(worker, &slow).await?, 6);
        assert_eq!(trips(worker, &shared).await?, 2);
        let owned = cache::<Mixed>(false).own(worker, structure, ()).await?;
        assert_eq!(trips(worker, &owned).await?, 2);
        Ok(())
    });
}

/// A page of the same level as the one where a shipped operation began is the owner's, whatever the hint says: the owner may have it
/// newer.
#[test]
fn what_is_beside_the_start_of_a_shipped_operation_is_left_to_the_owner() {
    let registry = Registry::new().with::<Doubled>();
    let fleet = Fleet::start_of(3, 16 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    with_fleet(fleet, everywhere(PlacementPolicy::OneServer), async |worker, placement| {
        let made = doubled::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let mut kept = Vec::new();
        for bucket in 0..BUCKETS {
            kept.push(Some(made.execute(&Find { bucket }).await?));
        }
        let owned = cache::<Doubled>(true).own(worker, structure, ()).await?;
        let engine = Engine::new(owned, Policies::new(Always), EngineOptions { level_max: Some(0) })?;
        // The page beside is changed in the cache, and the bucket is not cached.
        for (bucket, &kept) in (0..BUCKETS).zip(&kept) {
            assert_eq!(engine.execute(&Set { bucket, value: 10 + bucket, kept }).await?, 0);
        }
        assert_eq!(engine.execute(&Get { bucket: 1, second: false }).await?, 11);
        assert_eq!(engine.execute(&Set { bucket: 2, value: 22, kept: None }).await?, 12);
        assert_eq!(engine.execute(&Get { bucket: 2, second: false }).await?, 22);
        // What stays below is done there.
        assert_eq!(Some(engine.execute(&Find { bucket: 3 }).await?), kept[3]);
        let counts = engine.counts();
        assert_eq!((counts.shipped, counts.came_back), (1, 2), "{counts:?}");
        engine.cached().flush().await?;
        for (bucket, value) in (0..BUCKETS).zip([10, 11, 22, 13]) {
            assert_eq!(made.clone().beside_owners().execute(&Get { bucket, second: false }).await?, value);
        }
        Ok(())
    });
}

#[test]
fn the_kit_ships_nothing_to_what_is_beside() {
    with(FAST, everywhere(PlacementPolicy::OneServer), async |worker, placement| {
        let made = doubled::create(worker, "s", placement).await?;
        let strict = Strict::new(made, Rules { old_copies: false, conflicts: false, ..Rules::alone(1) });
        for bucket in (0..BUCKETS).cycle().take(32) {
            strict.execute(&Get { bucket, second: false }).await?;
        }
        let counts = strict.counts();
        assert!(counts.shipped == 0 && counts.came_back > 4, "{counts:?}");
        strict.execute(&Find { bucket: 1 }).await.map(drop)
    });
}

/// A second link to a page is the page's address, whatever is cached; the word of the first one is not copied.
#[test]
fn a_page_may_have_a_second_link_that_is_its_address() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = doubled::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let owned = cache::<Doubled>(false).own(worker, structure, ()).await?;
        for bucket in 0..BUCKETS {
            owned.execute(&Set { bucket, value: 10 + bucket, kept: None }).await?;
        }
        let refused = owned.execute(&Double { copies: true }).await;
        assert!(matches!(&refused, Err(Error::Cache(why)) if why.contains("a swizzled link into")), "{refused:?}");
        owned.execute(&Double { copies: false }).await?;
        for bucket in 0..BUCKETS {
            assert_eq!(owned.execute(&Get { bucket, second: true }).await?, 10 + bucket);
        }
        owned.flush().await?;
        for bucket in 0..BUCKETS {
            assert_eq!(made.clone().beside_owners().execute(&Get { bucket, second: true }).await?, 10 + bucket);
        }
        // Nothing is cached by a first link.
        owned.close().await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        let owned = cache::<Doubled>(false).own(worker, structure, ()).await?;
        for second in [true, false] {
            for bucket in 0..BUCKETS {
                assert_eq!(owned.execute(&Get { bucket, second }).await?, 10 + bucket);
            }
        }
        Ok(())
    });
}

/// A memory server whose program lacks the structure says which operation it does not know.
#[test]
fn an_operation_that_a_memory_server_does_not_have_is_named() {
    let registry = Registry::new().with::<Mixed>();
    let fleet = Fleet::start_of(3, 16 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    with_fleet(fleet, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made: RTree<OneSided<rtree::Tree>> =
            RTree::create(worker, "s", RTreeOptions { placement, ..RTreeOptions::default() }).await?;
        let structure = farlink_runtime::access::Access::context(made.access()).structure.clone();
        let sent = RTree::over(Remote::<rtree::Tree>::new(worker, structure));
        let error = sent.insert(Rect::point([1.0, 2.0])?, 7).await.unwrap_err();
        assert!(matches!(error, Error::UnknownOperation { .. }), "{error}");
        assert!(error.to_string().contains(r#"does not know the operation "insert" of rtree"#), "{error}");
        Ok(())
    });
}

/// What a structure was made with is there for whoever opens it.
#[test]
fn options_are_kept_in_the_catalog() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let all: [u64; OPTIONS] = std::array::from_fn(|index| u64::MAX - index as u64);
        let class = SizeClass::of_bytes(1024).expect("a size class");
        let options = CreateOptions { class, placement, options: all };
        catalog::create::<rtree::Tree>(worker, "s", &options, Proof::Checksum).await?;
        assert_eq!(catalog::open::<rtree::Tree>(worker, "s").await?.options, all);
        Ok(())
    });
}

/// What an owner has in its cache nobody else sees: words that others swap would lead to what is not there.
#[test]
fn an_owner_refuses_what_others_would_have_to_see_at_once() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = chains::create(worker, "s", placement).await?;
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
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let before = farlink_runtime::audit::memory(worker).await?.used_bytes();
        let made = chains::create(worker, "s", placement).await?;
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
        let again = chains::create(worker, "s", placement).await?;
        assert!(again.execute(&Values { set: 0 }).await?.is_empty());
        Ok(())
    });
}

/// By hand, past the catalog.
#[test]
#[should_panic(expected = r#""s" is a structure of chains, and was taken for one of mixed"#)]
fn a_structure_is_not_taken_for_another() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        let made = chains::create(worker, "s", placement).await?;
        let structure = farlink_runtime::access::Access::context(&made).structure.clone();
        drop(OneSided::<Mixed>::new(worker, structure, Proof::Checksum));
        Ok(())
    });
}

/// Opened as what it is not, by name.
#[test]
fn a_structure_is_opened_as_what_it_is() {
    with(FAST, everywhere(PlacementPolicy::RoundRobin), async |worker, placement| {
        chains::create(worker, "s", placement).await?;
        let error = catalog::open::<Mixed>(worker, "s").await.unwrap_err();
        assert_eq!(error.to_string(), r#""s" is a structure of chains, not of mixed; open it as what it is"#);
        Ok(())
    });
}
