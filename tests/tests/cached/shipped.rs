//! Owned maps whose operations are shipped on misses, by every policy, beside a `BTreeMap`.

use std::{cell::Cell, fmt, future::Future, pin::Pin, rc::Rc, sync::Arc, time::Duration};

use farlink_offload::{
    Admission, CacheOptions, ComputeCache, Engine, EngineOptions, OffloadCounts, Policies,
    policy::{Always, BackOff, Choice, CostAware, CostOptions, Miss, Never, Policy},
    ship::{Registry, ShipOptions, ShipServer},
};
use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{Fabric, listener::ListenOptions},
    messaging::Error as MessagingError,
    operation::Code,
    ptr::ServerId,
    server::in_process,
    structure::{PlacementPolicy, StructurePlacement},
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::{KeyRange, ops::Scan},
};
use farlink_tests::{backend::FabricProfile, bounded::Watchdog, cluster, settings};
use proptest::{prelude::*, test_runner::RngSeed};
use rand::{SeedableRng as _, rngs::StdRng};

use crate::{
    scene::{CACHE_BYTES_MIN, Map, Member, TREE, assert_left_clean, difference, sparse},
    steps::{NEVER, Step, step, take},
};

type Shipped = BTree<Engine<Tree>>;

/// An operation that is under way.
type Attempted = Pin<Box<dyn Future<Output = Result<Option<u64>, Error>>>>;

/// A cluster in this process with one tree, and memory servers that carry out operations.
struct Served {
    servers: Vec<ShipServer>,
    fabric: Arc<dyn Fabric>,
}

impl Served {
    fn start(servers: usize, threads: usize, profile: FabricProfile, entries: &Map, fill: f64) -> Self {
        Self::start_with(servers, threads, profile, entries, fill, PlacementPolicy::default(), &ShipOptions::default())
    }

    fn start_with(
        servers: usize,
        threads: usize,
        profile: FabricProfile,
        entries: &Map,
        fill: f64,
        placement: PlacementPolicy,
        options: &ShipOptions,
    ) -> Self {
        let mem = Arc::new(in_process(servers, 16 << 20, profile.options()).unwrap());
        let fabric: Arc<dyn Fabric> = mem.clone();
        let placement = StructurePlacement { policy: placement, root: None };
        cluster::create_at::<Tree>(&fabric, TREE, 256, farlink_runtime::one_sided::Proof::Checksum, placement).unwrap();
        if !entries.is_empty() {
            cluster::load::<Tree>(&fabric, TREE, entries.iter().map(|(&key, &value)| (key, value)), fill).unwrap();
        }
        let registry = Registry::new().with::<Tree>();
        let start = |number: usize| {
            let server = ServerId::new(number as u16).unwrap();
            let listener = mem.listen(server, &ListenOptions { endpoints: threads, ..ListenOptions::default() })?;
            let joining = Arc::clone(&mem);
            let join = move || Ok(Arc::new(ComputeServer::join(joining.clone(), ComputeOptions::default())?));
            ShipServer::start(listener, mem.memory(server)?, registry.clone(), options, join)
        };
        let servers = (0..servers).map(start).collect::<Result<Vec<_>, Error>>().unwrap();
        Self { servers, fabric }
    }

    fn done(&self) -> u64 {
        self.servers.iter().map(|server| server.counts().done).sum()
    }

    fn declined(&self) -> u64 {
        self.servers.iter().map(|server| server.counts().declined).sum()
    }

    fn pages_read(&self) -> u64 {
        self.servers.iter().map(|server| server.counts().pages_read).sum()
    }

    /// Has the memory servers leave the cluster.
    fn leave(self) -> Arc<dyn Fabric> {
        drop(self.servers);
        self.fabric
    }
}

fn cache(bytes: usize, admission: Admission) -> ComputeCache<Tree> {
    let mut options = CacheOptions::new(bytes);
    (options.page_bytes, options.admission, options.excludes_subtrees) = (256, admission, true);
    ComputeCache::<Tree>::new(options).unwrap()
}

fn engine(member: &Member, cache: &ComputeCache<Tree>, policies: Policies, level_max: Option<u8>) -> Shipped {
    member.worker.block_on(engine_of(member, cache, policies, level_max))
}

async fn engine_of(member: &Member, cache: &ComputeCache<Tree>, policies: Policies, level_max: Option<u8>) -> Shipped {
    let owned = cache.own(&member.worker, member.tree.structure().clone(), KeyRange::ALL).await.unwrap();
    BTree::over(Engine::new(owned, policies, EngineOptions { level_max }).unwrap())
}

/// Ships one time in two.
#[derive(Debug)]
struct Coin;

impl Policy for Coin {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        if miss.one_in(2) { Choice::SHIP } else { Choice::FETCH }
    }
}

#[derive(Clone, Copy)]
struct Chosen(&'static str, fn() -> Policies);

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

fn chosen() -> impl Strategy<Value = Chosen> {
    prop_oneof![
        Just(Chosen("always", || Policies::new(Always))),
        Just(Chosen("coin", || Policies::new(Coin))),
        Just(Chosen("always but scans", || Policies::new(Always).with(Code::of::<Scan<Tree>>(), Never))),
        Just(Chosen("cost", || Policies::new(CostAware::new(CostOptions {
            contrary_one_in: 4,
            ..Default::default()
        })))),
        Just(Chosen("back-off", || Policies::new(BackOff::default()))),
    ]
}

fn admission() -> impl Strategy<Value = Admission> {
    prop_oneof![
        Just(Admission::Always),
        Just(Admission::Frequency),
        Just(Admission::Probability { leaf: 0.1, inner: 1.0 }),
        // Bypass pages below bypass pages.
        Just(Admission::Probability { leaf: 0.0, inner: 0.5 }),
    ]
}

#[derive(Debug, Clone)]
enum Walk {
    Step(Step),
    Flush,
    /// Another worker of the same compute server goes on.
    Switch,
}

fn walk() -> impl Strategy<Value = Walk> {
    prop_oneof![
        30 => step().prop_map(Walk::Step),
        1 => Just(Walk::Flush),
        2 => Just(Walk::Switch),
    ]
}

fn cases(default: u32) -> ProptestConfig {
    ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", default),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(settings::seed("shipped")),
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(12))]

    #[test]
    fn a_map_whose_operations_are_shipped_is_a_map(
        steps in prop::collection::vec(walk(), 1..250),
        chosen in chosen(),
        admission in admission(),
        loaded in prop_oneof![1 => Just(0u64), 4 => 1500u64..3000],
        fill in 0.3f64..1.0,
        nasty: bool,
        servers in 1usize..3,
        placement in prop_oneof![Just(PlacementPolicy::RoundRobin), Just(PlacementPolicy::Subtrees { level: 1 }), Just(PlacementPolicy::OneServer)],
        level_max in prop_oneof![Just(None), Just(Some(0)), Just(Some(1)), Just(Some(9))],
    ) {
        let mut model = sparse(loaded);
        let profile = if nasty { FabricProfile::Nasty } else { FabricProfile::Fast };
        let served = Served::start_with(servers, 1, profile, &model, fill, placement, &ShipOptions::default());
        let first = Member::join(&served.fabric, 1);
        let second = first.colleague();
        let cache = cache(CACHE_BYTES_MIN, admission);
        let trees = [&first, &second].map(|member| engine(member, &cache, chosen.1(), level_max));
        let mut at = 0;
        for step in &steps {
            let (tree, worker) = (&trees[at], [&first.worker, &second.worker][at]);
            match step {
                Walk::Step(step) => {
                    worker.block_on(take(tree, &mut model, step, NEVER)).map_err(TestCaseError::fail)?;
                }
                Walk::Flush => {
                    worker.block_on(tree.access().cached().flush()).unwrap();
                    let there = first.entries();
                    prop_assert!(there == model, "flushed: {}", difference(&there, &model));
                }
                Walk::Switch => at = 1 - at,
            }
        }
        first.worker.block_on(trees[0].access().cached().flush()).unwrap();
        drop((trees, second, first));
        assert_left_clean(&served.leave(), &model, "shipped");
    }
}

/// A tree, one worker that ships whatever it can, and what it and the memory server have counted.
fn always<T>(entries: u64, profile: FabricProfile, f: impl AsyncFnOnce(&Shipped) -> T) -> (T, OffloadCounts, u64) {
    let model = sparse(entries);
    let served = Served::start(1, 1, profile, &model, 0.8);
    let member = Member::join(&served.fabric, 1);
    let tree = engine(&member, &cache(CACHE_BYTES_MIN, Admission::Always), Policies::new(Always), None);
    let result = member.worker.block_on(f(&tree));
    member.worker.block_on(tree.access().cached().flush()).unwrap();
    (result, tree.access().counts(), served.done())
}

#[test]
fn an_operation_that_misses_is_shipped_and_is_one_message() {
    let (misses, counts, done) = always(20_000, FabricProfile::Fast, async |tree| {
        for key in (0..200_000).step_by(1000) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key / 10));
            assert_eq!(tree.upsert(key, 1).await.unwrap(), Some(key / 10));
            assert_eq!(tree.update(key, 2).await.unwrap(), Some(1));
            assert_eq!(tree.get(key).await.unwrap(), Some(2));
        }
        tree.access().cached().counters().total().misses
    });
    assert_eq!((counts.shipped, counts.came_back, done), (800, 0, 800), "{counts:?}");
    assert!(misses <= 2, "below the root something was read: {misses} misses");
}

#[test]
fn what_would_split_or_merge_comes_back_and_is_done_here() {
    let (_, counts, _) = always(3000, FabricProfile::Fast, async |tree| {
        for key in 0..5000 {
            tree.insert(key, key).await.unwrap();
        }
        for key in 0..5000 {
            assert!(tree.remove(key).await.unwrap().is_some());
        }
        assert_eq!(tree.len().await.unwrap(), 3000 - 500);
    });
    assert!(counts.shipped > 100 && counts.came_back > 20, "{counts:?}");
}

#[test]
fn a_memory_server_that_carries_out_nothing_is_left_alone() {
    let model = sparse(20_000);
    let Served { servers, fabric } = Served::start(1, 1, FabricProfile::Fast, &model, 0.8);
    drop(servers);
    let member = Member::join(&fabric, 1);
    let tree = engine(&member, &cache(CACHE_BYTES_MIN, Admission::Always), Policies::new(Always), None);
    member.worker.block_on(async {
        for key in (0..200_000).step_by(1000) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key / 10));
        }
    });
    let counts = tree.access().counts();
    assert_eq!((counts.shipped, counts.asked), (0, 1), "{counts:?}");
}

#[test]
fn a_cache_that_keeps_nothing_out_takes_no_engine() {
    let served = Served::start(1, 1, FabricProfile::Fast, &sparse(10), 0.8);
    let member = Member::join(&served.fabric, 1);
    let cache = crate::scene::cache(CACHE_BYTES_MIN, Admission::Always);
    let owned = cache.own(&member.worker, member.tree.structure().clone(), KeyRange::ALL);
    let owned = member.worker.block_on(owned).unwrap();
    let refused = Engine::new(owned, Policies::default(), EngineOptions::default());
    assert!(matches!(refused, Err(Error::BadOption { option: "excludes_subtrees", .. })), "{refused:?}");
}

/// Gets over a tree on three memory servers whose operations are always shipped: what the engine counted, and how many pages
/// an operation read on its memory server.
fn gets_over(placement: PlacementPolicy, level_max: Option<u8>) -> (OffloadCounts, f64) {
    let model = sparse(20_000);
    let served = Served::start_with(3, 1, FabricProfile::Fast, &model, 0.8, placement, &ShipOptions::default());
    let member = Member::join(&served.fabric, 1);
    let tree = engine(&member, &cache(CACHE_BYTES_MIN, Admission::Always), Policies::new(Always), level_max);
    member.worker.block_on(async {
        for key in (0..200_000).step_by(1000) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key / 10));
        }
    });
    (tree.access().counts(), served.pages_read() as f64 / served.done() as f64)
}

#[test]
fn operations_are_shipped_from_the_levels_whose_subtrees_are_on_one_server() {
    for (placement, pages) in [
        (PlacementPolicy::RoundRobin, 1.0..=1.0),
        (PlacementPolicy::Leaves, 1.0..=1.0),
        (PlacementPolicy::Subtrees { level: 1 }, 2.0..=2.0),
        (PlacementPolicy::Subtrees { level: 2 }, 3.0..=3.0),
        // From the root's children on.
        (PlacementPolicy::OneServer, 4.0..=4.0),
    ] {
        let (counts, read) = gets_over(placement, None);
        assert_eq!((counts.shipped, counts.came_back), (200, 0), "{placement:?}: {counts:?}");
        assert!(pages.contains(&read), "{placement:?}: an operation read {read} pages");
    }
    // Against better knowledge: the pages below are elsewhere, and the operation comes back.
    let (counts, _) = gets_over(PlacementPolicy::RoundRobin, Some(1));
    assert!(counts.came_back > 50, "{counts:?}");
}

/// Ships when it is told to.
#[derive(Debug)]
struct Told(Rc<Cell<bool>>);

impl Policy for Told {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        if self.0.get() { Choice::SHIP } else { Choice::FETCH }
    }
}

/// Somebody merges leaves that are another's, who has the pages above them in its cache and ships to leaves that are not there
/// any more. The memory server says so, and the operation takes the normal path, which finds what is wrong; none is answered
/// from a page that is gone. Who begins at the root without those old pages finds everything.
#[test]
fn an_operation_is_not_answered_from_a_start_page_that_is_gone() {
    let _watch = Watchdog::start("a page that is gone", Duration::from_secs(120));
    let served = Served::start(1, 1, FabricProfile::Fast, &sparse(20_000), 0.8);
    let member = Member::join(&served.fabric, 1);
    let ships = Rc::new(Cell::new(false));
    let told = || Policies::new(Told(Rc::clone(&ships)));
    let tree = engine(&member, &cache(64 << 10, Admission::Always), told(), Some(0));
    // The pages above, and one leaf in five.
    member.worker.block_on(async {
        for key in (100_000..102_000).step_by(500) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key / 10));
        }
    });
    let stranger = Member::join(&served.fabric, 2);
    let unguarded = BTree::over(stranger.tree.access().clone().unguarded());
    stranger.worker.block_on(async {
        for key in (100_000..102_000).step_by(10).filter(|key| key % 100 != 0) {
            unguarded.remove(key).await.unwrap();
        }
    });
    ships.set(true);
    let left = (100_000..102_000).step_by(100);
    member.worker.block_on(async {
        for key in left.clone() {
            match tree.get(key).await {
                Ok(value) => assert_eq!(value, Some(key / 10), "key {key}"),
                Err(Error::Inconsistent { .. }) => {}
                Err(error) => panic!("key {key}: {error}"),
            }
        }
        let counts = tree.access().counts();
        assert!(counts.came_back > 5 && counts.shipped > 0, "{counts:?}");
        drop(tree);
        let tree = engine_of(&member, &cache(64 << 10, Admission::Always), told(), Some(0)).await;
        for key in left {
            assert_eq!(tree.get(key).await.unwrap(), Some(key / 10), "key {key}");
        }
        let counts = tree.access().counts();
        assert!(counts.came_back == 0 && counts.shipped > 5, "{counts:?}");
    });
}

/// A leaf cools, the page above it cools, too, and goes first: then an operation on the leaf is shipped. What it has changed
/// is not read from the leaf that still cools here.
#[test]
fn what_a_shipped_operation_has_changed_is_not_found_as_it_was() {
    const ENTRIES: u64 = 20_000;
    let mut model = sparse(ENTRIES);
    let served = Served::start(1, 1, FabricProfile::Fast, &model, 0.8);
    let member = Member::join(&served.fabric, 1);
    let mut options = CacheOptions::new(CACHE_BYTES_MIN);
    // Pages cool for long.
    (options.page_bytes, options.excludes_subtrees, options.cooling_share) = (256, true, 0.5);
    options.admission = Admission::Always;
    let ships = Rc::new(Cell::new(false));
    let policies = Policies::new(Told(Rc::clone(&ships)));
    let tree = engine(&member, &ComputeCache::<Tree>::new(options).unwrap(), policies, None);
    let mut rng = StdRng::seed_from_u64(settings::seed("changed below"));
    member.worker.block_on(async {
        let mut met = Vec::new();
        for round in 0..10_000 {
            let key = rng.random_range(0..ENTRIES) * 10;
            assert_eq!(tree.get(key).await.unwrap(), Some(model[&key]));
            met.push(key);
            // Met lately, and by now on its way out of the cache.
            let ago = rng.random_range(0..200);
            let Some(&key) = met.iter().rev().nth(ago) else { continue };
            ships.set(true);
            assert_eq!(tree.upsert(key, round).await.unwrap(), model.insert(key, round), "round {round}");
            ships.set(false);
            assert_eq!(tree.get(key).await.unwrap(), Some(round), "key {key}");
        }
        tree.access().cached().flush().await.unwrap();
    });
    println!("{:?}", tree.access().counts());
    assert!(tree.access().counts().shipped > 1000, "{:?}", tree.access().counts());
    drop((tree, member));
    assert_left_clean(&served.leave(), &model, "changed below");
}

/// As above, but the memory server is lost before it answers: nobody says what it has changed.
#[test]
fn what_a_lost_server_has_changed_is_not_found_as_it_was() {
    const ENTRIES: u64 = 20_000;
    let _watch = Watchdog::start("changed and lost", Duration::from_secs(120));
    let seed = settings::seed("changed and lost");
    let mut lost_ever = 0;
    for round in 0..30 {
        let model = sparse(ENTRIES);
        let options = farlink_tests::fleet::silent();
        let served = Served::start_with(1, 1, FabricProfile::Fast, &model, 0.8, PlacementPolicy::default(), &options);
        let member = Member::join(&served.fabric, 1);
        let mut options = CacheOptions::new(CACHE_BYTES_MIN);
        // Pages cool for long.
        (options.page_bytes, options.excludes_subtrees, options.cooling_share) = (256, true, 0.5);
        options.admission = Admission::Always;
        let ships = Rc::new(Cell::new(false));
        let policies = Policies::new(Told(Rc::clone(&ships)));
        let tree = engine(&member, &ComputeCache::<Tree>::new(options).unwrap(), policies, Some(1));
        let mut rng = StdRng::seed_from_u64(seed + round);
        let mut met = Vec::new();
        member.worker.block_on(async {
            for _ in 0..2000 {
                let key = rng.random_range(0..ENTRIES) * 10;
                assert_eq!(tree.get(key).await.unwrap(), Some(model[&key]));
                met.push(key);
            }
        });
        // None waits for another one: each is below another page of the level above the leaves.
        let mut keys: Vec<u64> = Vec::new();
        for _ in 0..8 {
            let key = met[met.len() - 1 - rng.random_range(0..150)];
            if keys.iter().all(|other| other.abs_diff(key) > 2500) {
                keys.push(key);
            }
        }
        ships.set(true);
        let ended = Rc::new(Cell::new(0));
        let upsert = |&key: &u64| {
            let (tree, ended) = (tree.clone(), Rc::clone(&ended));
            member.worker.spawn(async move {
                let outcome = tree.upsert(key, ENTRIES).await;
                ended.set(ended.get() + 1);
                outcome
            })
        };
        let upserts: Vec<_> = keys.iter().map(upsert).collect();
        while ended.get() + served.done() + served.declined() < keys.len() as u64 {
            member.worker.turn();
        }
        let lost = served.done();
        assert_eq!(served.declined(), 0);
        lost_ever += lost;
        let fabric = served.leave();
        member.worker.block_on(async {
            let mut unknown = 0;
            for upsert in upserts {
                match upsert.await {
                    Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })) => unknown += 1,
                    outcome => assert!(outcome.unwrap().is_some()),
                }
            }
            assert_eq!(unknown, lost);
            for &key in &keys {
                assert_eq!(tree.get(key).await.unwrap(), Some(ENTRIES), "key {key}, round {round}");
            }
            tree.access().cached().flush().await.unwrap();
        });
        let changed = model.into_iter().map(|(key, value)| (key, if keys.contains(&key) { ENTRIES } else { value }));
        drop((tree, member));
        assert_left_clean(&fabric, &changed.collect(), "changed and lost");
    }
    assert!(lost_ever > 100, "{lost_ever} operations were lost");
}

/// A memory server is lost after it has carried out what was sent to it, and before it answers.
#[test]
fn a_server_lost_in_mid_request_leaves_the_outcome_unknown_and_what_reads_is_done_here() {
    let _watch = Watchdog::start("lost in mid-request", Duration::from_secs(120));
    let mut model = sparse(20_000);
    // Its answers never go.
    let options = farlink_tests::fleet::silent();
    let served = Served::start_with(1, 1, FabricProfile::Fast, &model, 0.8, PlacementPolicy::default(), &options);
    let member = Member::join(&served.fabric, 1);
    // From the level above the leaves: scans read leaves by the parent's links and are never shipped from the leaves.
    let tree = engine(&member, &cache(CACHE_BYTES_MIN, Admission::Always), Policies::new(Always), Some(1));
    let spawn = |f: Box<dyn Fn(Shipped) -> Attempted>| member.worker.spawn(f(tree.clone()));
    let get = spawn(Box::new(|tree| Box::pin(async move { tree.get(5000).await })));
    let put = spawn(Box::new(|tree| Box::pin(async move { tree.upsert(70_000, 1).await })));
    let updated = spawn(Box::new(|tree| Box::pin(async move { tree.update(120_000, 3).await })));
    let removed = spawn(Box::new(|tree| Box::pin(async move { tree.remove(150_000).await })));
    let last = |scan: Vec<(u64, u64)>| scan.last().map(|&(_, value)| value);
    let scan = spawn(Box::new(move |tree| Box::pin(async move { Ok(last(tree.scan(30_000, 40).await?)) })));
    let back = spawn(Box::new(move |tree| {
        Box::pin(async move { Ok(last(tree.range(..=180_000).descending().take(40).await?)) })
    }));
    // It waits for a page that is kept out.
    let behind = spawn(Box::new(|tree| Box::pin(async move { tree.get(70_010).await })));
    while served.done() + served.declined() < 6 {
        member.worker.turn();
    }
    assert_eq!(served.declined(), 0);
    let fabric = served.leave();
    member.worker.block_on(async {
        assert_eq!(get.await.unwrap(), Some(500));
        assert_eq!((scan.await.unwrap(), back.await.unwrap()), (Some(3039), Some(17_961)));
        for lost in [put.await, updated.await, removed.await] {
            assert!(matches!(lost, Err(Error::Messaging(MessagingError::OutcomeUnknown { .. }))), "{lost:?}");
        }
        assert_eq!(behind.await.unwrap(), Some(7001));
        // It had carried them out.
        assert_eq!((tree.get(70_000).await.unwrap(), tree.get(120_000).await.unwrap()), (Some(1), Some(3)));
        assert_eq!(tree.get(150_000).await.unwrap(), None);
        assert_eq!(tree.upsert(70_000, 2).await.unwrap(), Some(1));
        tree.access().cached().flush().await.unwrap();
    });
    assert_eq!(tree.access().counts().shipped, 0);
    model.insert(70_000, 2);
    model.insert(120_000, 3);
    model.remove(&150_000);
    drop((tree, member));
    assert_left_clean(&fabric, &model, "lost in mid-request");
}
