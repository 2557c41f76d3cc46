//! A tree on a memory server that carries out operations, and a compute server's workers that use it, in this process.
//!
//! All workers run on one thread, by turns, and the memory server's messages are taken by one other: the time that remote
//! operations take and the time that its modelled processors take are waited for, not worked. So two cores suffice.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use farlink_offload::policy::{Always, CostAware, CostOptions, Never};
use farlink_offload::ship::{Registry, ServiceModel, ShipOptions, ShipServer};
use farlink_offload::{CacheOptions, ComputeCache, Engine, EngineCounts, EngineOptions, Policies};
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use farlink_runtime::fabric::link::ListenOptions;
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::messaging::{ChannelOptions, ServeMessages, Wait};
use farlink_runtime::one_sided::Proof;
use farlink_runtime::ptr::ServerId;
use farlink_runtime::worker::{Counters, Worker};
use farlink_structures::btree::{BTree, BTreeLayout, BTreeOptions, KeyRange, Tree};
use farlink_structures::map;

use super::super::population::{Action, Population};
use crate::cores::stay_on_core;
use crate::inspect;
use crate::keys::value_for;
use crate::report::CheckRow;

const NAME: &str = "figure";
const SERVER: ServerId = ServerId::new(0).unwrap();
/// Room on the memory server beyond the tree.
const SPARE_BYTES: u64 = 32 << 20;
/// Operations of each worker that a row takes, and how much longer than its time it goes on for them: fewer tell nothing.
const OPS_MIN: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(10);
/// More than any message here has.
const EAGER_WORDS: usize = 1024;
/// Operations that each worker draws; it begins again at the first.
const DRAWN: u64 = 100_000;

/// Which policy decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    Never,
    Always,
    CostAware,
}

impl Choice {
    pub(super) const ALL: [Self; 3] = [Self::Never, Self::Always, Self::CostAware];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Always => "always",
            Self::CostAware => "cost-aware",
        }
    }

    fn policies(self, search_ns: u64) -> Policies {
        match self {
            Self::Never => Policies::new(Never),
            Self::Always => Policies::new(Always),
            Self::CostAware => Policies::new(CostAware::new(CostOptions { search_ns, ..CostOptions::default() })),
        }
    }
}

/// A run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) choice: Choice,
    pub(super) server_threads: usize,
    pub(super) page_ns: u64,
    pub(super) cache_bytes: usize,
    pub(super) workers: usize,
    pub(super) update_percent: u32,
    pub(super) warm_up: Duration,
    pub(super) measured: Duration,
    pub(super) seed: u64,
}

/// What a run did.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    pub(super) ops: u64,
    pub(super) seconds: f64,
    pub(super) counters: Counters,
    pub(super) engine: EngineCounts,
    pub(super) latencies_ns: Vec<u64>,
}

impl Done {
    pub(super) fn per_second(&self) -> f64 {
        self.ops as f64 / self.seconds
    }
}

/// The tree.
#[derive(Debug)]
pub(super) struct Bed {
    fabric: Arc<MemFabric>,
    pub(super) tree_bytes: u64,
    page_bytes: usize,
    keys: u64,
}

impl Bed {
    pub(super) fn load(population: &Population, page_bytes: usize, fill: f64, latency_ns: u64) -> anyhow::Result<Self> {
        let entries = ((page_bytes / 8 - 8) / 2) as f64 * fill;
        let bytes =
            (population.keys() as f64 / entries.floor().max(2.0) * 1.5) as u64 * page_bytes as u64 + SPARE_BYTES;
        let options = MemOptions { latency_ns, ..MemOptions::default() };
        let fabric = Arc::new(MemFabric::in_process(1, bytes.next_multiple_of(1 << 20), options)?);
        let compute = ComputeServer::join(fabric.clone(), ComputeOptions::default())?;
        let worker = compute.worker()?;
        let report = worker.block_on(async {
            let options = BTreeOptions { page_bytes, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, NAME, options).await?;
            let entries = (0..population.keys()).map(|number| {
                let key = Population::key(number);
                (key, value_for(key, 0))
            });
            tree.bulk_load(entries, fill).await?;
            tree.check().await
        })?;
        let pages: u64 = report.pages_by_level.iter().sum();
        Ok(Self { fabric, tree_bytes: pages * page_bytes as u64, page_bytes, keys: population.keys() })
    }

    /// Runs a plan.
    pub(super) fn run(&self, plan: Plan, population: &Population) -> anyhow::Result<Done> {
        stay_on_core(0);
        let _server = self.serve(plan)?;
        let compute =
            ComputeServer::join(self.fabric.clone(), ComputeOptions { seed: plan.seed, ..ComputeOptions::default() })?;
        let mut options = CacheOptions::new(plan.cache_bytes);
        (options.page_bytes, options.keeps_out) = (self.page_bytes, true);
        options.handles_max = plan.workers.max(1);
        let cache = ComputeCache::new(BTreeLayout, options)?;
        let station: Vec<Station> = (0..plan.workers)
            .map(|number| Station::open(&compute, &cache, plan, population, number))
            .collect::<Result<_, _>>()?;
        turn_for(&station, plan.warm_up)?;
        let before: Vec<_> =
            station.iter().map(|station| (station.worker.counters(), station.engine.counts())).collect();
        station.iter().for_each(|station| station.shared.begin());
        let begun = Instant::now();
        turn_for_enough(&station, plan.measured)?;
        let mut done = Done { seconds: begun.elapsed().as_secs_f64(), ..Done::default() };
        for (station, (counters, counts)) in station.iter().zip(before) {
            done.ops += station.shared.ops.get();
            done.counters += station.worker.counters() - counters;
            done.engine += since(station.engine.counts(), counts);
            done.latencies_ns.append(&mut station.shared.latencies_ns.borrow_mut());
        }
        station.iter().for_each(|station| station.shared.stop.set(true));
        turn_until(&station, |station| station.shared.has_ended.get())?;
        if let Some(first) = station.first() {
            // The others go on meanwhile: they may be writing some of it.
            let (cached, shared) = (first.engine.cached().clone(), Rc::clone(&first.shared));
            shared.has_ended.set(false);
            drop(first.worker.spawn(async move {
                shared.failed.replace(cached.flush().await.err());
                shared.has_ended.set(true);
            }));
            turn_until(&station, |station| station.shared.has_ended.get())?;
        }
        Ok(done)
    }

    fn serve(&self, plan: Plan) -> anyhow::Result<ShipServer> {
        let mut registry = Registry::new();
        map::register::<Tree>(&mut registry);
        let listener = self.fabric.listen(SERVER, &ListenOptions::default())?;
        let messages = ServeMessages { wait: Wait::Poll, seed: plan.seed, ..ServeMessages::default() };
        let model = Some(ServiceModel { processors: plan.server_threads, page_ns: plan.page_ns });
        let fabric = Arc::clone(&self.fabric);
        let join = move || {
            stay_on_core(1);
            Ok(Arc::new(ComputeServer::join(fabric.clone(), ComputeOptions::default())?))
        };
        let memory = self.fabric.memory(SERVER)?;
        Ok(ShipServer::start(listener, memory, registry, &ShipOptions { messages, model }, join)?)
    }

    /// The tree's check of itself, once all has been written.
    pub(super) fn check(&self) -> anyhow::Result<CheckRow> {
        let compute = ComputeServer::join(self.fabric.clone(), ComputeOptions::default())?;
        let worker = compute.worker()?;
        let report = worker.block_on(async { BTree::open(&worker, NAME, Proof::Checksum).await?.check().await })?;
        let mut row = inspect::check_row(NAME, &report);
        if row.ok && report.entries != self.keys {
            (row.ok, row.problem) = (false, Some(format!("{} keys were loaded", self.keys)));
        }
        Ok(row)
    }
}

fn since(now: EngineCounts, before: EngineCounts) -> EngineCounts {
    let mut counts = now;
    counts.asked -= before.asked;
    counts.shipped -= before.shipped;
    counts.came_back -= before.came_back;
    counts.contrary -= before.contrary;
    counts.cached_below -= before.cached_below;
    counts
}

/// A worker with one operation in flight.
struct Station {
    // Before the worker, which its tasks belong to.
    engine: Engine<BTreeLayout>,
    shared: Rc<Shared>,
    worker: Worker,
}

#[derive(Default)]
struct Shared {
    ops: Cell<u64>,
    latencies_ns: RefCell<Vec<u64>>,
    is_measured: Cell<bool>,
    stop: Cell<bool>,
    has_ended: Cell<bool>,
    failed: RefCell<Option<Error>>,
}

impl Shared {
    fn begin(&self) {
        self.ops.set(0);
        self.is_measured.set(true);
    }
}

impl Station {
    fn open(
        compute: &ComputeServer,
        cache: &ComputeCache<BTreeLayout>,
        plan: Plan,
        population: &Population,
        number: usize,
    ) -> anyhow::Result<Self> {
        let worker = compute.worker()?;
        let structure = worker.block_on(BTree::open(&worker, NAME, Proof::Checksum))?.structure().clone();
        // All messages are short: which are better fetched need not be measured.
        let options = ChannelOptions { eager_words: Some(EAGER_WORDS), ..ChannelOptions::default() };
        drop(worker.block_on(worker.channel_with(SERVER, options))?);
        // What a search takes, measured by `farlink bench`: little, beside what is remote.
        let policies = plan.choice.policies(100);
        let engine = Engine::new(cache.own(&worker, structure, KeyRange::ALL)?, policies, EngineOptions::default())?;
        let shared = Rc::new(Shared::default());
        let seed = plan.seed ^ (number as u64 + 1) << 32;
        let drawn: Vec<_> = population.operations(0, DRAWN, plan.update_percent, seed).collect();
        let (tree, of_task) = (BTree::over(engine.clone()), Rc::clone(&shared));
        drop(worker.spawn(async move {
            if let Err(error) = work(&tree, &drawn, &of_task).await {
                of_task.failed.replace(Some(error));
            }
            of_task.has_ended.set(true);
        }));
        Ok(Self { engine, shared, worker })
    }
}

async fn work(tree: &BTree<Engine<BTreeLayout>>, drawn: &[(u64, Action)], shared: &Shared) -> Result<(), Error> {
    for &(number, action) in drawn.iter().cycle() {
        if shared.stop.get() {
            break;
        }
        let key = Population::key(number);
        let begun = Instant::now();
        match action {
            Action::Get => drop(tree.get(key).await?),
            Action::Update => drop(tree.update(key, value_for(key, 1)).await?),
        }
        if shared.is_measured.get() {
            shared.ops.set(shared.ops.get() + 1);
            shared.latencies_ns.borrow_mut().push(begun.elapsed().as_nanos() as u64);
        }
    }
    Ok(())
}

fn turn_for(stations: &[Station], time: Duration) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    turn_until(stations, |_| Instant::now() >= end)
}

/// Somewhat longer, if few operations have ended by then.
fn turn_for_enough(stations: &[Station], time: Duration) -> anyhow::Result<()> {
    let end = Instant::now() + time;
    turn_until(stations, |station| {
        let now = Instant::now();
        now >= end && (station.shared.ops.get() >= OPS_MIN || now >= end + PATIENCE)
    })
}

/// Turns all workers until all of them are done.
fn turn_until(stations: &[Station], is_done: impl Fn(&Station) -> bool) -> anyhow::Result<()> {
    loop {
        if !stations.iter().fold(false, |any, station| station.worker.turn() | any) {
            std::thread::yield_now();
        }
        if let Some(error) = stations.iter().find_map(|station| station.shared.failed.take()) {
            return Err(error).context("an operation failed");
        }
        if stations.iter().all(&is_done) {
            return Ok(());
        }
    }
}
