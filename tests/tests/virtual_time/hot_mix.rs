//! Many who change the same few keys: how much of that a Bw-tree over the mapping cache does in a time, and how much a B+-tree whose
//! inner pages are cached. Time goes by where requests are waited for, and nowhere else.

use std::{
    cell::{Cell, RefCell},
    pin::{Pin, pin},
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use farlink_offload::{CacheOptions, CachedInner, CachedMapping, ComputeCache, MappingCache};
use farlink_runtime::{
    access::Access,
    clock::Clock,
    compute::{ComputeOptions, ComputeServer},
    fabric::{Fabric, mem::MemOptions},
    one_sided::Proof,
    server,
    structure::StructurePlacement,
    worker::{Counters, Handle, Worker},
};
use farlink_structures::{
    BTree,
    btree::Tree,
    bwtree::{Bw, BwTree, BwTreeOptions},
    map::{Map, OrderedMap},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::popularity::Popularity;

const STEP_NS: u64 = 100;
/// What a request takes.
const LATENCY_NS: u64 = 2000;
/// Compute servers, and workers of each.
const MACHINES: u64 = 4;
const WORKERS: usize = 2;
const UPDATES_PERCENT: u32 = 90;
const PAGE_BYTES: usize = 1024;
const CACHE_BYTES: usize = 8 << 20;
/// Until caches have what they are to have, and from then on.
const WARM_NS: u64 = 2_000_000;
const MEASURED_NS: u64 = 3_000_000;
const SEED: u64 = 20;

/// What all workers together have done in the measured time.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Done {
    operations: u64,
    counters: Counters,
}

struct Scene {
    now: Rc<Cell<u64>>,
    clock: Clock,
    fabric: Arc<dyn Fabric>,
}

impl Scene {
    fn new() -> Self {
        let now = Rc::new(Cell::new(0));
        let options = MemOptions { latency_ns: LATENCY_NS, ..MemOptions::default() };
        let fabric = Arc::new(server::in_process(2, 32 << 20, options).unwrap());
        Self { clock: Clock::Virtual(Rc::clone(&now)), now, fabric }
    }

    /// Lets the time go on until a future is ready.
    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return output;
            }
            self.now.set(self.now.get() + STEP_NS);
        }
    }

    fn join(&self, seed: u64) -> ComputeServer {
        let options = ComputeOptions { seed, ..ComputeOptions::default() };
        self.run(ComputeServer::join_async(Arc::clone(&self.fabric), options, self.clock.clone())).unwrap()
    }

    /// The mix, by workers that have a map each.
    fn mix<S: OrderedMap, A: Access<Plugin = S>>(&self, keys: u64, workers: &[(Worker, Map<S, A>)]) -> Done {
        let popularity = Popularity::new(keys);
        let start_ns = self.now.get() + WARM_NS;
        let end_ns = start_ns + MEASURED_NS;
        let operations = Cell::new(0);
        let before = RefCell::new(vec![Counters::default(); workers.len()]);
        let lane = async |number: usize| {
            let (worker, map) = &workers[number];
            let mut rng = StdRng::seed_from_u64(SEED + number as u64);
            let work = async {
                while self.now.get() < end_ns {
                    let key = popularity.draw(&mut rng);
                    let is_update = rng.random_range(0..100) < UPDATES_PERCENT;
                    let found = match is_update {
                        true => map.upsert(key, self.now.get()).await.unwrap(),
                        false => map.get(key).await.unwrap(),
                    };
                    assert!(found.is_some(), "all keys are there");
                    match self.now.get() {
                        now if now >= end_ns => {}
                        now if now >= start_ns => operations.set(operations.get() + 1),
                        _ => before.borrow_mut()[number] = worker.counters(),
                    }
                }
            };
            worker.drive(work).await;
        };
        let mut lanes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        for number in 0..workers.len() {
            lanes.push(Box::pin(lane(number)));
        }
        self.run(std::future::poll_fn(|cx| {
            lanes.retain_mut(|lane| lane.as_mut().poll(cx).is_pending());
            if lanes.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        }));
        let mut counters = Counters::default();
        for ((worker, _), before) in workers.iter().zip(before.take()) {
            counters += worker.counters() - before;
        }
        Done { operations: operations.get(), counters }
    }

    /// Workers of all machines; `cache` makes what those of one share, `open` the map of one.
    fn workers<C, M>(
        &self,
        cache: impl Fn() -> C,
        open: impl Fn(&C, &Handle) -> M,
    ) -> (Vec<ComputeServer>, Vec<(Worker, M)>) {
        let mut workers = Vec::new();
        let machines: Vec<_> = (0..MACHINES).map(|number| self.join(SEED + number)).collect();
        for machine in &machines {
            let cache = cache();
            for _ in 0..WORKERS {
                let worker = machine.worker_with(self.clock.clone()).unwrap();
                let map = open(&cache, &worker);
                workers.push((worker, map));
            }
        }
        (machines, workers)
    }
}

fn entries(keys: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..keys).map(|key| (key, key))
}

fn bw_tree(keys: u64) -> Done {
    let scene = Scene::new();
    let maker = scene.join(SEED - 1);
    let worker = maker.worker_with(scene.clock.clone()).unwrap();
    let structure = scene.run(worker.drive(async {
        let options = BwTreeOptions { page_bytes: PAGE_BYTES, ..BwTreeOptions::default() };
        let tree = BwTree::create(&worker, "mix", options).await.unwrap();
        tree.bulk_load(entries(keys), 0.7).await.unwrap();
        tree.structure().clone()
    }));
    let cache = || MappingCache::<Bw>::new(CACHE_BYTES);
    let open = |cache: &MappingCache<Bw>, worker: &Handle| -> BwTree<CachedMapping<Bw>> {
        BwTree::over(cache.share(worker, structure.clone()))
    };
    let (_machines, workers) = scene.workers(cache, open);
    scene.mix(keys, &workers)
}

fn b_tree(keys: u64) -> Done {
    let scene = Scene::new();
    let maker = scene.join(SEED - 1);
    let worker = maker.worker_with(scene.clock.clone()).unwrap();
    let structure = scene.run(worker.drive(async {
        let placement = StructurePlacement::default();
        let tree = BTree::make_at(&worker, "mix", PAGE_BYTES, Proof::Checksum, placement).await.unwrap();
        tree.bulk_load(entries(keys), 0.7).await.unwrap();
        tree.structure().clone()
    }));
    let cache = || ComputeCache::<Tree>::new(CacheOptions::new(CACHE_BYTES)).unwrap();
    let open = |cache: &ComputeCache<Tree>, worker: &Handle| -> BTree<CachedInner<Tree>> {
        BTree::over(cache.share(worker, structure.clone(), Proof::Checksum).unwrap())
    };
    let (_machines, workers) = scene.workers(cache, open);
    scene.mix(keys, &workers)
}

/// How much more the Bw-tree does.
fn ratio(keys: u64) -> f64 {
    let (bw, b) = (bw_tree(keys), b_tree(keys));
    for (name, done) in [("bwtree, cached-mapping", bw), ("btree, cached-inner", b)] {
        println!("{keys} keys, {name}: {} operations, {:?}", done.operations, done.counters);
    }
    let ratio = bw.operations as f64 / b.operations as f64;
    println!("{keys} keys: {ratio:.2}");
    ratio
}

/// Where all meet at two leaves, those of the B+-tree wait for each other's locks and read again what they lose.
#[test]
fn a_bw_tree_does_more_of_what_all_want_at_once() {
    let ratio = ratio(50);
    assert!(ratio >= 1.3, "{ratio}");
}

/// Where they rarely do, a change costs both about three round trips: of the Bw-tree one, if nobody else has changed the page since,
/// and three or more, if somebody has.
#[test]
fn a_bw_tree_does_no_less_of_what_many_want() {
    let ratio = ratio(10_000);
    assert!(ratio >= 0.95, "{ratio}");
}
