//! The adaptive client: what it does under loads that follow a script, and what its choices and an engine's cost by the counters.

use std::{
    cell::{Cell, RefCell},
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use farlink_offload::{
    Adaptive, CacheOptions, ComputeCache, Engine, EngineOptions, Policies,
    policy::{Always, BackOff, Cold, CostAware, Never},
    ship::{HoldReply, ManualShipServer, Registry, ShipOptions},
};
use farlink_runtime::{
    clock::Clock,
    compute::{ComputeOptions, ComputeServer},
    fabric::{Fabric, listener::ListenOptions, mem::MemOptions},
    messaging::{Load, ServeMessages},
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server,
    structure::{PlacementPolicy, StructurePlacement},
    worker::{Handle, Worker},
};
use farlink_structures::{
    BTree,
    btree::{KeyRange, Tree},
};
use rand::{SeedableRng, rngs::StdRng};

use crate::popularity::Popularity;

const LATENCY_NS: u64 = 1000;
const SEED: u64 = 22;
/// Of Catfish: the interval between two reports of a server's load.
const HEARTBEAT_NS: u64 = 10_000_000;
const KEYS: u64 = 2000;
/// The least that a cache can have, and a tree whose leaves take ten times as much.
const CACHE_BYTES: usize = 64 << 10;
const KEYS_BEYOND_CACHE: u64 = 20_000;
const SERVER: ServerId = ServerId::new(0).unwrap();

/// One memory server and one compute server, in virtual time.
struct Machines {
    now: Rc<Cell<u64>>,
    step_ns: u64,
    server: RefCell<ManualShipServer>,
    compute: ComputeServer,
    clock: Clock,
}

impl Machines {
    /// The memory server holds each reply for so long.
    fn start(step_ns: u64, held_ns: u64) -> Self {
        let now = Rc::new(Cell::new(0));
        let clock = Clock::Virtual(Rc::clone(&now));
        let fabric: Arc<_> =
            server::in_process(1, 8 << 20, MemOptions { latency_ns: LATENCY_NS, ..MemOptions::default() })
                .unwrap()
                .into();
        let join = || {
            let fabric: Arc<dyn Fabric> = fabric.clone();
            let mut joining = pin!(ComputeServer::join_async(fabric, ComputeOptions::default(), clock.clone()));
            loop {
                if let Poll::Ready(joined) = joining.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    return joined.unwrap();
                }
                now.set(now.get() + step_ns);
            }
        };
        let server = ManualShipServer::new(
            fabric.listen(SERVER, &ListenOptions::default()).unwrap(),
            fabric.memory(SERVER).unwrap(),
            Registry::new().with::<Tree>(),
            &ShipOptions { messages: ServeMessages::default(), hold: Some(hold(held_ns)) },
            Arc::new(join()),
            &clock,
        )
        .unwrap();
        let compute = join();
        Self { server: RefCell::new(server), compute, clock, now, step_ns }
    }

    fn worker(&self) -> Worker {
        self.compute.worker_with(self.clock.clone()).unwrap()
    }

    /// Runs a future of a worker to its end. The time goes on by itself.
    fn run<T>(&self, worker: &Worker, future: impl Future<Output = T>) -> T {
        let mut future = pin!(worker.drive(future));
        NOW_NS.set(self.now.get());
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return output;
            }
            self.server.borrow_mut().turn();
            self.now.set(self.now.get() + self.step_ns);
            NOW_NS.set(self.now.get());
        }
    }

    /// A tree on the memory server, with entries.
    async fn tree(worker: &Handle, keys: u64) -> BTree<OneSided<Tree>> {
        let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: Some(SERVER) };
        let tree = BTree::make_at(worker, "tree", 256, Proof::Checksum, placement).await.unwrap();
        tree.bulk_load((0..keys).map(|key| (key, key)), 0.7).await.unwrap();
        tree
    }
}

thread_local! {
    /// The time, for replies that are held.
    static NOW_NS: Cell<u64> = const { Cell::new(0) };
}

fn hold(held_ns: u64) -> HoldReply {
    Arc::new(move |_| -> Pin<Box<dyn Future<Output = ()>>> {
        let until_ns = NOW_NS.get() + held_ns;
        Box::pin(std::future::poll_fn(move |cx| {
            cx.waker().wake_by_ref();
            if NOW_NS.get() >= until_ns { Poll::Ready(()) } else { Poll::Pending }
        }))
    })
}

fn adaptive(worker: &Handle, tree: &BTree<OneSided<Tree>>, policies: Policies) -> Adaptive<OneSided<Tree>> {
    let structure = tree.structure().clone();
    Adaptive::new(OneSided::new(worker, structure.clone(), Proof::Checksum), worker, structure, policies)
}

/// Catfish's client beside a server whose load follows a script: idle for some heartbeats, then busy, then idle. It ships until
/// the first report of a busy server; then it keeps away for as long as reports say so, also between them; then for what is left
/// of the round that was drawn last, at most.
#[test]
fn back_off_keeps_away_while_reports_say_busy() {
    const HEARTBEATS: u64 = 6;
    const ROUNDS: u64 = 8;
    let machines = Machines::start(5000, 0);
    let (worker, others) = (machines.worker(), machines.worker());
    let busy = Rc::new(Cell::new(false));
    // For each operation: what the last report said, and whether it was shipped.
    let story: Vec<(Option<Load>, bool)> = machines.run(&worker, async {
        let tree = Machines::tree(&worker, KEYS).await;
        let client = adaptive(&worker, &tree, Policies::new(BackOff::default()));
        let mine = BTree::over(client.clone());
        // Many in flight, not in step, so that each turn of the server has something to do.
        let theirs = Rc::new(BTree::over(adaptive(&others, &tree, Policies::new(Always))));
        for key in 0..32 {
            let (busy, theirs, others) = (Rc::clone(&busy), Rc::clone(&theirs), others.clone());
            others.clone().spawn(async move {
                loop {
                    match busy.get() {
                        true => assert_eq!(theirs.get(key).await.unwrap(), Some(key)),
                        false => others.yield_now().await,
                    }
                    for _ in 0..others.random(|rng| rand::RngExt::random_range(rng, 0..4)) {
                        others.yield_now().await;
                    }
                }
            });
        }
        let mut story = Vec::new();
        let start_ns = machines.now.get();
        loop {
            let now_ns = machines.now.get();
            match (now_ns - start_ns) / HEARTBEAT_NS {
                0..HEARTBEATS => {}
                HEARTBEATS..12 => busy.set(true),
                12..18 => busy.set(false),
                _ => break story,
            }
            let (before, load) = (client.counts().shipped, client.shipper().load(SERVER));
            let mut get = pin!(mine.get(now_ns % KEYS));
            let found = std::future::poll_fn(|cx| {
                others.turn();
                get.as_mut().poll(cx)
            });
            assert_eq!(found.await.unwrap(), Some(now_ns % KEYS));
            story.push((load, client.counts().shipped > before));
        }
    });
    let says_busy = |load: &Option<Load>| load.is_some_and(|load| load.utilisation() > 0.95);
    let first = story.iter().position(|(load, _)| says_busy(load)).expect("a report of a busy server");
    let last = story.iter().rposition(|(load, _)| says_busy(load)).unwrap();
    let shown: String = story.iter().map(|&(_, ships)| if ships { 'S' } else { '.' }).collect();
    assert!(shown[..first].bytes().all(|did| did == b'S'), "it ships to an idle server");
    let reports: std::collections::BTreeSet<u16> =
        story[first..=last].iter().filter_map(|(load, _)| Some(load.as_ref()?.report)).collect();
    assert!(reports.len() as u64 >= HEARTBEATS - 2, "{reports:?}");
    // The first round may be of no operation at all.
    let kept_away = &shown[first + 1..=last];
    assert!(kept_away.len() > 100 && kept_away.bytes().all(|did| did == b'.'), "it keeps away, also between reports");
    // Round k is of 8 (k - 1) operations at least, so there were no more rounds than this.
    let rounds = (1..).find(|&k: &u64| ROUNDS * k * (k - 1) / 2 > kept_away.len() as u64).unwrap();
    let after = &shown[last + 1..];
    let left = after.find('S').expect("it comes back") as u64;
    assert!(left < ROUNDS * rounds, "{left} operations after the server was idle, in round {rounds} at most");
    assert!(after[left as usize..].bytes().all(|did| did == b'S'), "it ships again");
}

/// What a client's operations cost by its counters, in nanoseconds: a round trip to memory takes the latency once; a message
/// takes it for each way, and what the memory server holds the reply for.
fn cost_ns(policies: Policies, held_ns: u64) -> u64 {
    const OPERATIONS: u64 = 6000;
    let machines = Machines::start(100, held_ns);
    let worker = machines.worker();
    machines.run(&worker, async {
        let tree = Machines::tree(&worker, KEYS).await;
        let mine = BTree::over(adaptive(&worker, &tree, policies));
        // What is opened once is no cost of an operation.
        mine.access().shipper().connect(SERVER).await.unwrap();
        let before = worker.counters();
        for number in 0..OPERATIONS {
            let key = number * 7919 % (KEYS - 100);
            match number % 10 {
                0 => assert_eq!(mine.range(key..).take(100).await.unwrap().len(), 100),
                1..4 => assert_eq!(mine.upsert(key, key).await.unwrap(), Some(key)),
                _ => assert_eq!(mine.get(key).await.unwrap(), Some(key)),
            }
        }
        let after = worker.counters();
        let messages = after.two_sided - before.two_sided;
        let round_trips = after.round_trips - before.round_trips - messages;
        round_trips * LATENCY_NS + messages * (2 * LATENCY_NS + held_ns)
    })
}

/// Whatever the memory server takes for an operation: it never costs more than the better of the two constant policies, but for
/// a twentieth.
#[test]
fn the_cost_aware_client_costs_no_more_than_the_better_way() {
    for held_ns in [0, 3000, 6000, 100_000] {
        let never = cost_ns(Policies::new(Never), held_ns);
        let always = cost_ns(Policies::new(Always), held_ns);
        let chosen = cost_ns(Policies::for_each_kind(CostAware::default()), held_ns);
        let ratio = chosen as f64 / never.min(always) as f64;
        println!(
            "replies held {held_ns} ns: never {never}, always {always}, cost-aware {chosen}: {ratio:.3} of the better"
        );
        assert!(ratio <= 1.05, "{ratio}");
    }
}

const OPERATIONS: u64 = 1200;

struct EngineCost {
    messages: u64,
    round_trips: u64,
    ns: u64,
}

/// What is done in a tree ten times as large as the cache.
#[derive(Debug, Clone, Copy)]
enum Mixture {
    /// One in so many is a lookup, the others are scans, of keys that come equally often.
    LookupsOneIn(u64),
    /// Half are lookups, half updates, of keys of which few come often.
    Skewed,
}

/// What operations over a cache cost by the counters, once it is warm. It holds a part of the inner pages.
fn engine_cost(policies: Policies, held_ns: u64, load: Mixture) -> EngineCost {
    engine_cost_of(SEED, policies, held_ns, load)
}

/// And of keys that this seed draws.
fn engine_cost_of(seed: u64, policies: Policies, held_ns: u64, load: Mixture) -> EngineCost {
    const WARM_UP: u64 = 1800;
    let machines = Machines::start(100, held_ns);
    let worker = machines.worker();
    machines.run(&worker, async {
        let tree = Machines::tree(&worker, KEYS_BEYOND_CACHE).await;
        let mut options = CacheOptions::new(CACHE_BYTES);
        (options.excludes_subtrees, options.handles_max) = (true, 2);
        let cache = ComputeCache::<Tree>::new(options).unwrap();
        let owned = cache.own(&worker, tree.structure().clone(), KeyRange::ALL).await.unwrap();
        let engine = Engine::new(owned, policies, EngineOptions::default()).unwrap();
        let mine = BTree::over(engine.clone());
        let (popularity, mut rng) = (Popularity::new(KEYS_BEYOND_CACHE), StdRng::seed_from_u64(seed));
        let mut before = worker.counters();
        for number in 0..WARM_UP + OPERATIONS {
            if number == WARM_UP {
                before = worker.counters();
            }
            let key = number * 7919 % (KEYS_BEYOND_CACHE - 100);
            match load {
                Mixture::LookupsOneIn(count) if number % count == 0 => {
                    assert_eq!(mine.get(key).await.unwrap(), Some(key))
                }
                Mixture::LookupsOneIn(_) => assert_eq!(mine.range(key..).take(60).await.unwrap().len(), 60),
                Mixture::Skewed => {
                    let key = popularity.draw(&mut rng);
                    let found = if number % 2 == 0 { mine.get(key).await } else { mine.upsert(key, key).await };
                    assert_eq!(found.unwrap(), Some(key));
                }
            }
        }
        let after = worker.counters();
        let messages = after.two_sided - before.two_sided;
        let round_trips = after.round_trips - before.round_trips - messages;
        engine.cached().close().await.unwrap();
        EngineCost { messages, round_trips, ns: round_trips * LATENCY_NS + messages * (2 * LATENCY_NS + held_ns) }
    })
}

/// Lookups that are shipped from pages which the cache would keep cost up to 1.4 of what fetching does; and scans are thought
/// cheaper here than they are if only the path to one leaf counts.
#[test]
fn the_cost_aware_engine_costs_no_more_than_the_better_way() {
    let loads = [Mixture::LookupsOneIn(1), Mixture::Skewed]
        .map(|load| [0, 500, 1000, 1500, 3000].map(|held_ns| (load, held_ns)));
    let scans = [1500, 3000].map(|held_ns| (Mixture::LookupsOneIn(20), held_ns));
    for (load, held_ns) in loads.into_iter().flatten().chain(scans) {
        let cost = |policies| engine_cost(policies, held_ns, load).ns;
        let (never, always) = (cost(Policies::new(Never)), cost(Policies::new(Always)));
        let chosen = cost(Policies::for_each_kind(CostAware::default()));
        let ratio = chosen as f64 / never.min(always) as f64;
        println!(
            "{load:?}, replies held {held_ns} ns: never {never}, always {always}, cost-aware {chosen}: {ratio:.3} of the better"
        );
        assert!(ratio <= 1.05, "{ratio}");
    }
}

/// Most operations are shipped, from wherever a page is missing: pages above are worth a place only for those that are not. A cache
/// that counts each use of them reads a page for three messages.
#[test]
fn pages_are_not_fetched_from_which_operations_are_shipped_all_the_same() {
    // Which pages come to share a place of the sketch is chance: one draw has half or twice the round trips of another.
    const DRAWS: u64 = 6;
    let draws = (0..DRAWS).map(|draw| engine_cost_of(SEED + draw, Policies::new(Cold), 0, Mixture::Skewed));
    let (messages, round_trips) = draws.fold((0, 0), |sum, cost| (sum.0 + cost.messages, sum.1 + cost.round_trips));
    let operations = DRAWS * OPERATIONS;
    println!("{operations} operations: {messages} messages, {round_trips} round trips");
    assert!(
        messages < operations * 2 / 3 && round_trips * 5 < messages,
        "{messages} messages, {round_trips} round trips"
    );
}

/// It goes on to the next page above the leaves, as long as that is below the page that it was shipped from.
#[test]
fn a_scan_of_many_leaves_is_one_message() {
    let messages = engine_cost(Policies::new(Always), 0, Mixture::LookupsOneIn(OPERATIONS * 10)).messages;
    assert!(messages >= OPERATIONS, "{messages} messages for {OPERATIONS} scans");
    assert!(messages <= OPERATIONS + OPERATIONS / 50, "{messages} messages for {OPERATIONS} scans");
}
