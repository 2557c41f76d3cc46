//! A tree in each of the designs on the same memory servers, and clients that query it, in this process.
//!
//! All clients are tasks of one worker on one thread; the memory servers' threads share another core. What remote operations take,
//! what the memory servers' cards let through and what their processors take are waited for, not worked: so two cores suffice.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use farlink_offload::ship::{Registry, ServiceModel, ShipOptions, ShipServer};
use farlink_offload::{Hybrid, Parted, PartedRemote, Remote};
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use farlink_runtime::fabric::link::ListenOptions;
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::messaging::{ServeMessages, Wait};
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::operation::{Cut, Parts as _, Run};
use farlink_runtime::ptr::ServerId;
use farlink_runtime::worker::{Counters, Worker};
use farlink_structures::btree::{BTree, BTreeOptions, Spread, Tree};
use farlink_structures::map::{self, Map};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::super::args::DesignsArgs;
use super::super::population::STRIDE;
use crate::cores::stay_on_core;
use crate::inspect;
use crate::keys::value_for;
use crate::report::CheckRow;

/// Room on each memory server beyond the trees.
const SPARE_BYTES: u64 = 16 << 20;
/// Operations of each client that a row takes, and how much longer than its time it goes on for them: fewer tell nothing.
const OPS_MIN: u64 = 8;
const PATIENCE: Duration = Duration::from_secs(10);

/// A design, and how the keys are divided where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Design {
    Fine,
    CoarseRange,
    CoarseHash,
    Hybrid,
}

impl Design {
    pub(super) const ALL: [Self; 4] = [Self::Fine, Self::CoarseRange, Self::CoarseHash, Self::Hybrid];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine-grained",
            Self::CoarseRange => "coarse, range",
            Self::CoarseHash => "coarse, hash",
            Self::Hybrid => "hybrid",
        }
    }

    fn parts(self, servers: usize) -> usize {
        if self == Self::Fine { 1 } else { servers }
    }

    fn spread(self) -> Spread {
        match self {
            Self::Fine => Spread::RoundRobin,
            Self::CoarseRange | Self::CoarseHash => Spread::OneServer,
            Self::Hybrid => Spread::Leaves,
        }
    }
}

/// How much of the data each memory server has, where it is divided by ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Data {
    Uniform,
    Skewed,
}

impl Data {
    pub(super) const ALL: [Self; 2] = [Self::Uniform, Self::Skewed];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Skewed => "skewed",
        }
    }

    /// The number of the first key of each part, and the number of keys.
    pub(super) fn bounds(self, servers: usize, keys: u64) -> Vec<u64> {
        /// Ziegler et al., section 6.1: of four memory servers the first has 80%, and so on.
        const SKEWED_PERCENT: [u64; 4] = [80, 12, 5, 3];
        let mut bounds = vec![0];
        for part in 1..servers as u64 {
            let percent: u64 = SKEWED_PERCENT.iter().take(part as usize).sum();
            bounds.push(match self {
                Self::Skewed if servers == SKEWED_PERCENT.len() => keys * percent / 100,
                _ => keys * part / servers as u64,
            });
        }
        bounds.push(keys);
        bounds
    }
}

/// What clients ask for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Query {
    Point,
    /// So many neighbouring keys.
    Range(u64),
}

/// What a run did.
#[derive(Debug, Clone, Default)]
pub(super) struct Done {
    pub(super) ops: u64,
    pub(super) seconds: f64,
    pub(super) counters: Counters,
    pub(super) latencies_ns: Vec<u64>,
}

/// The cluster.
pub(super) struct Bed<'a> {
    args: &'a DesignsArgs,
    // Dropped in this order: who asks, who answers.
    worker: Worker,
    compute: ComputeServer,
    _servers: Vec<ShipServer>,
}

/// A tree in one design.
pub(super) enum Loaded {
    Fine(Map<Tree, OneSided>),
    Coarse(Map<Tree, PartedRemote>),
    Hybrid(Map<Tree, Parted<Hybrid>>),
}

impl<'a> Bed<'a> {
    pub(super) fn start(args: &'a DesignsArgs) -> anyhow::Result<Self> {
        let entries = ((args.page_bytes / 8 - 8) / 2) as f64 * args.fill;
        let tree_bytes = (args.keys as f64 / entries.floor().max(2.0) * 1.5) as u64 * args.page_bytes as u64;
        let options =
            MemOptions { latency_ns: args.latency, bandwidth_bytes_per_s: args.bandwidth, ..MemOptions::default() };
        // Each design has its trees for both kinds of data; in the worst case they are all on one server.
        let bytes = (8 * tree_bytes + SPARE_BYTES).next_multiple_of(1 << 20);
        let fabric = Arc::new(MemFabric::in_process(args.memory_servers, bytes, options)?);
        let mut registry = Registry::new();
        map::register::<Tree>(&mut registry);
        let messages = ServeMessages { wait: Wait::Poll, seed: args.seed, ..ServeMessages::default() };
        let model = Some(ServiceModel { processors: args.server_threads, page_ns: args.page_time });
        stay_on_core(1);
        let ship = ShipOptions { messages, model };
        let servers = ShipServer::start_all(&fabric, &ListenOptions::default(), &registry, &ship)?;
        stay_on_core(0);
        let compute = ComputeServer::join(fabric, ComputeOptions { seed: args.seed, ..ComputeOptions::default() })?;
        let worker = compute.worker()?;
        Ok(Self { args, worker, compute, _servers: servers })
    }

    /// Loads a tree, or its parts.
    pub(super) fn load(&self, design: Design, data: Data) -> anyhow::Result<Loaded> {
        let servers = self.args.memory_servers;
        let bounds = data.bounds(servers, self.args.keys);
        let range = || Cut::Range(bounds[1..servers].iter().map(|number| number * STRIDE).collect());
        let loaded = self.worker.block_on(async {
            let parts = self.make(design, data).await?;
            let entries = |part: usize| (bounds[part]..bounds[part + 1]).map(entry);
            match design {
                Design::Fine => {
                    parts[0].bulk_load((0..self.args.keys).map(entry), self.args.fill).await?;
                    Ok::<_, Error>(Loaded::Fine(parts[0].clone()))
                }
                Design::CoarseRange | Design::CoarseHash => {
                    let cut = if design == Design::CoarseHash { Cut::Hash } else { range() };
                    let remotes = parts.iter().map(|part| Remote::new(&self.worker, part.structure().clone()));
                    let parted = PartedRemote::new(remotes.collect(), cut)?;
                    for (number, part) in parts.iter().enumerate() {
                        let belongs = |&(key, _): &(u64, u64)| parted.part_of(key) == number;
                        part.bulk_load((0..self.args.keys).map(entry).filter(belongs), self.args.fill).await?;
                    }
                    for remote in parted.parts() {
                        remote.shipper().connect(remote.structure().root.server()).await?;
                    }
                    Ok(Loaded::Coarse(Map::over(parted)))
                }
                Design::Hybrid => {
                    let mut hybrids = Vec::with_capacity(parts.len());
                    for (number, part) in parts.iter().enumerate() {
                        part.bulk_load(entries(number), self.args.fill).await?;
                        let hybrid = Hybrid::new(&self.worker, part.structure().clone(), Proof::Checksum);
                        hybrid.shipper().connect(part.structure().root.server()).await?;
                        hybrids.push(hybrid);
                    }
                    Ok(Loaded::Hybrid(Map::over(Parted::new(hybrids, range())?)))
                }
            }
        });
        Ok(loaded?)
    }

    /// An empty tree for each part.
    async fn make(&self, design: Design, data: Data) -> Result<Vec<Map<Tree, OneSided>>, Error> {
        let mut parts = Vec::new();
        for part in 0..design.parts(self.args.memory_servers) {
            let options = BTreeOptions {
                page_bytes: self.args.page_bytes,
                spread: design.spread(),
                root: ServerId::new(part as u16),
                ..BTreeOptions::default()
            };
            parts.push(BTree::create(&self.worker, &part_name(design, data, part), options).await?);
        }
        Ok(parts)
    }

    /// Clients query a tree for a while, each with one query at a time.
    pub(super) fn run(&self, tree: &Loaded, query: Query, clients: usize) -> anyhow::Result<Done> {
        match tree {
            Loaded::Fine(tree) => self.drive(tree, query, clients),
            Loaded::Coarse(tree) => self.drive(tree, query, clients),
            Loaded::Hybrid(tree) => self.drive(tree, query, clients),
        }
    }

    fn drive<A: Run + Clone + 'static>(
        &self,
        tree: &Map<Tree, A>,
        query: Query,
        clients: usize,
    ) -> anyhow::Result<Done> {
        let shared = Rc::new(Shared::default());
        let tasks: Vec<_> = (0..clients)
            .map(|client| {
                let (tree, shared) = (tree.clone(), Rc::clone(&shared));
                let random = SmallRng::seed_from_u64(self.args.seed ^ (client as u64 + 1) << 32);
                let keys = self.args.keys;
                self.worker.spawn(async move { ask(&tree, query, keys, random, &shared).await })
            })
            .collect();
        self.turn_for(self.args.warm_up_seconds, || true);
        let before = self.worker.counters();
        shared.is_measured.set(true);
        let begun = Instant::now();
        let enough = clients as u64 * OPS_MIN;
        self.turn_for(self.args.seconds, || shared.ops.get() >= enough);
        let seconds = begun.elapsed().as_secs_f64();
        let counters = self.worker.counters() - before;
        let (ops, latencies_ns) = (shared.ops.get(), shared.latencies_ns.take());
        shared.stop.set(true);
        self.worker.block_on(async {
            for task in tasks {
                task.await?;
            }
            anyhow::Ok(())
        })?;
        Ok(Done { ops, seconds, counters, latencies_ns })
    }

    /// Lets operations go on for so long, and somewhat longer if that is not enough.
    fn turn_for(&self, seconds: f64, is_enough: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        while Instant::now() < end || !is_enough() && Instant::now() < end + PATIENCE {
            if !self.worker.turn() {
                std::hint::spin_loop();
            }
        }
    }

    /// The trees' checks of themselves.
    pub(super) fn check(&self, designs: &[(Design, Data)]) -> anyhow::Result<Vec<CheckRow>> {
        let worker = self.compute.worker()?;
        let mut rows = Vec::new();
        for &(design, data) in designs {
            let mut entries = 0;
            let mut row: Option<CheckRow> = None;
            for part in 0..design.parts(self.args.memory_servers) {
                let name = part_name(design, data, part);
                let report =
                    worker.block_on(async { BTree::open(&worker, &name, Proof::Checksum).await?.check().await })?;
                entries += report.entries;
                let of_part = inspect::check_row(&name, &report);
                // The first that is not sound, else the last.
                row = row.filter(|row| !row.ok).or(Some(of_part));
            }
            let mut row = row.context("a tree has parts")?;
            if row.ok && entries != self.args.keys {
                let problem = format!("{entries} keys were found, {} were loaded", self.args.keys);
                (row.ok, row.problem) = (false, Some(problem));
            }
            rows.push(row);
        }
        Ok(rows)
    }
}

#[derive(Default)]
struct Shared {
    ops: Cell<u64>,
    latencies_ns: RefCell<Vec<u64>>,
    is_measured: Cell<bool>,
    stop: Cell<bool>,
}

/// One client: queries at places drawn uniformly from all keys.
async fn ask<A: Run>(
    tree: &Map<Tree, A>,
    query: Query,
    keys: u64,
    mut random: SmallRng,
    shared: &Shared,
) -> anyhow::Result<()> {
    while !shared.stop.get() {
        let begun = Instant::now();
        match query {
            Query::Point => {
                let (key, value) = entry(random.random_range(0..keys));
                let found = tree.get(key).await?;
                anyhow::ensure!(found == Some(value), "key {key} has {found:?}, not {value}");
            }
            Query::Range(count) => {
                let first = random.random_range(0..=keys - count);
                let (low, high) = (entry(first), entry(first + count - 1));
                let found = tree.range(low.0..=high.0).take(count as usize).await?;
                let is_whole =
                    found.len() as u64 == count && found.first() == Some(&low) && found.last() == Some(&high);
                anyhow::ensure!(is_whole, "of {count} keys from {} on {} were found", low.0, found.len());
            }
        }
        if shared.is_measured.get() {
            shared.ops.set(shared.ops.get() + 1);
            shared.latencies_ns.borrow_mut().push(begun.elapsed().as_nanos() as u64);
        }
    }
    Ok(())
}

fn entry(number: u64) -> (u64, u64) {
    let key = number * STRIDE;
    (key, value_for(key, 0))
}

fn part_name(design: Design, data: Data, part: usize) -> String {
    format!("{} {} {part}", design.name(), data.name())
}
