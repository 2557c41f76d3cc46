//! Runs a contender: one worker for each compute server, on a thread of its own, over the operations on the server's own
//! keys. Every answer is checked. Operations are drawn in parts with the clock stopped, so that a run of any length needs
//! no memory for them and drawing is not timed.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use farlink_runtime::access::Access;
use farlink_runtime::compute::ComputeServer;
use farlink_runtime::worker::{Counters, Worker};
use farlink_structures::BTree;

use super::bed::Bed;
use super::contender::{Contender, Lookups, Owned};
use super::population::{Action, Population};
use crate::keys::{value_belongs, value_for};

/// Operations drawn at a time.
const PART: usize = 4096;

/// A mix of the paper, as far as figures need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FigureMix {
    pub(crate) name: &'static str,
    pub(crate) update_percent: u32,
}

/// How much to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Amount {
    /// Before anything is counted, over all compute servers.
    pub(crate) warm_up_ops: u64,
    /// Counted, over all compute servers.
    pub(crate) ops: u64,
    pub(crate) seed: u64,
    /// Operations that each compute server keeps in flight.
    pub(crate) in_flight: u32,
    /// The number of the run on its tree: no two write the same values, for that would change nothing.
    pub(crate) run: u32,
}

/// What all compute servers did together.
#[derive(Debug, Clone, Default)]
pub(crate) struct Measured {
    pub(crate) ops: u64,
    /// Of the compute server that took longest.
    pub(crate) time: Duration,
    pub(crate) counters: Counters,
    /// `None` without a cache.
    pub(crate) lookups: Option<Lookups>,
}

/// Where and on what a contender runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Runner<'a> {
    pub(crate) bed: &'a Bed,
    pub(crate) population: &'a Population,
}

/// One compute server's part of a run.
struct Lane<'a, C: Contender> {
    runner: Runner<'a>,
    contender: &'a C,
    compute: &'a ComputeServer,
    shared: &'a C::Shared,
    server: usize,
    mix: FigureMix,
    amount: Amount,
}

impl Runner<'_> {
    /// Warms up and measures one mix.
    pub(crate) fn run<C: Contender>(&self, contender: &C, mix: FigureMix, amount: Amount) -> anyhow::Result<Measured> {
        let servers = 0..self.population.servers();
        let shared =
            servers.clone().map(|server| contender.share(self.owned(server))).collect::<anyhow::Result<Vec<_>>>()?;
        let compute: Vec<ComputeServer> = servers
            .clone()
            .map(|server| self.bed.join(amount.seed.wrapping_add(server as u64)))
            .collect::<anyhow::Result<_>>()?;
        let lane = |server: usize| {
            let (compute, shared) = (&compute[server], &shared[server]);
            Lane { runner: *self, contender, compute, shared, server, mix, amount }
        };
        thread::scope(|scope| {
            let mut gates = Vec::new();
            let mut threads = Vec::new();
            for server in servers {
                let (warmed, is_warm) = mpsc::sync_channel(1);
                let (go, may_go) = mpsc::sync_channel(1);
                let lane = lane(server);
                gates.push((is_warm, go));
                threads.push(scope.spawn(move || lane.run(&warmed, &may_go)));
            }
            // A lane that fails ends its channel; letting go of the others then ends them too.
            if gates.iter().all(|(is_warm, _)| is_warm.recv().is_ok()) {
                for (_, go) in &gates {
                    let _ = go.send(());
                }
            }
            drop(gates);
            let mut all = Measured::default();
            let mut failure = None;
            for thread in threads {
                match thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
                    Ok(Some(measured)) => all.add(&measured),
                    Ok(None) => {}
                    Err(error) => failure = failure.or(Some(error)),
                }
            }
            failure.map_or(Ok(all), Err)
        })
    }

    fn owned(&self, server: usize) -> Owned {
        let owned = self.population.owned(server);
        let is_last = owned.end == self.population.keys();
        Owned {
            low: if server == 0 { 0 } else { Population::key(owned.start) },
            high: (!is_last).then(|| Population::key(owned.end)),
        }
    }
}

impl Measured {
    fn add(&mut self, other: &Self) {
        self.ops += other.ops;
        self.time = self.time.max(other.time);
        self.counters += other.counters;
        if let Some(lookups) = &other.lookups {
            self.lookups.get_or_insert_default().add(lookups);
        }
    }
}

impl<C: Contender> Lane<'_, C> {
    /// `None` if another lane failed before all were warm.
    fn run(&self, warmed: &SyncSender<()>, may_go: &Receiver<()>) -> anyhow::Result<Option<Measured>> {
        let worker = self.compute.worker()?;
        let tree = self.contender.open(self.shared, &worker, self.runner.bed.structure())?;
        self.work(&worker, &tree, self.amount.warm_up_ops, self.amount.seed.wrapping_add(1 << 32))?;
        let _ = warmed.send(());
        if may_go.recv().is_err() {
            return Ok(None);
        }
        let before = worker.counters();
        let lookups_before = self.contender.lookups(&tree, before.reads);
        let (ops, time) = self.work(&worker, &tree, self.amount.ops, self.amount.seed)?;
        let after = worker.counters();
        let counters = after - before;
        let lookups = self.contender.lookups(&tree, after.reads).zip(lookups_before);
        let lookups = lookups.map(|(after, before)| after.since(&before));
        worker.block_on(self.contender.close(&tree))?;
        Ok(Some(Measured { ops, time, counters, lookups }))
    }

    /// Runs this server's share of `draws` operations; answers how many, and the time without drawing them.
    fn work(&self, worker: &Worker, tree: &BTree<C::Access>, draws: u64, seed: u64) -> anyhow::Result<(u64, Duration)> {
        let population = self.runner.population;
        let mut operations = population.operations(self.server, draws, self.mix.update_percent, seed);
        let mut part = Vec::with_capacity(PART);
        let first = u64::from(self.amount.run) << 27 | u64::from(seed != self.amount.seed) << 26;
        let (mut ops, mut time) = (0, Duration::ZERO);
        loop {
            part.clear();
            part.extend(operations.by_ref().take(PART));
            if part.is_empty() {
                return Ok((ops, time));
            }
            let numbered = (first + ops..).zip(part.iter().copied());
            ops += part.len() as u64;
            let start = Instant::now();
            if self.amount.in_flight <= 1 {
                worker.block_on(run_all(tree, numbered))?;
            } else {
                let left = Rc::new(RefCell::new(numbered.collect::<Vec<_>>().into_iter()));
                let spawn = |_| {
                    let (tree, left) = (tree.clone(), Rc::clone(&left));
                    worker.spawn(async move { run_all(&tree, std::iter::from_fn(|| left.borrow_mut().next())).await })
                };
                let tasks: Vec<_> = (0..self.amount.in_flight).map(spawn).collect();
                worker.block_on(async {
                    for task in tasks {
                        task.await?;
                    }
                    anyhow::Ok(())
                })?;
            }
            time += start.elapsed();
        }
    }
}

/// Runs operations one after the other, each with its version.
async fn run_all<A: Access>(
    tree: &BTree<A>,
    operations: impl Iterator<Item = (u64, (u64, Action))>,
) -> anyhow::Result<()> {
    for (version, (number, action)) in operations {
        let key = Population::key(number);
        operate(tree, key, action, version as u32).await.with_context(|| format!("key {key}"))?;
    }
    Ok(())
}

/// One operation. Only the key's owner updates it, and every key is there, so every answer is known in part.
async fn operate<A: Access>(tree: &BTree<A>, key: u64, action: Action, version: u32) -> anyhow::Result<()> {
    let found = match action {
        Action::Get => tree.get(key).await?,
        Action::Update => tree.update(key, value_for(key, version)).await?,
    };
    let value = found.context("a loaded key is missing")?;
    ensure!(value_belongs(key, value), "found {value}, which was never stored there");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::contender::FineGrained;

    const WRITES: FigureMix = FigureMix { name: "write-intensive", update_percent: 50 };

    #[test]
    fn counts_of_the_fine_grained_tree() {
        let population = Population::new(10_000, 0.99, 3, 1).unwrap();
        let bed = Bed::load(&population, 2).unwrap();
        let runner = Runner { bed: &bed, population: &population };
        let amount = Amount { warm_up_ops: 100, ops: 30_000, seed: 5, in_flight: 1, run: 0 };
        let reads = runner.run(&FineGrained, FigureMix { name: "read-only", update_percent: 0 }, amount).unwrap();
        assert_eq!((reads.ops, reads.lookups), (30_000, None));
        // 186 leaves, four pages, a root: three levels, and one read of 1 KiB for each.
        assert_eq!((reads.counters.reads, reads.counters.writes, reads.counters.atomics), (90_000, 0, 0));
        assert_eq!(reads.counters.bytes, 90_000 * 1024);
        let amount = Amount { in_flight: 4, run: 1, ..amount };
        let interleaved = runner.run(&FineGrained, FigureMix { name: "read-only", update_percent: 0 }, amount).unwrap();
        assert_eq!((interleaved.ops, interleaved.counters.reads), (30_000, 90_000));
        let writes = runner.run(&FineGrained, WRITES, amount).unwrap();
        let locks_per_op = writes.counters.atomics as f64 / writes.ops as f64;
        assert!((0.4..0.6).contains(&locks_per_op), "{writes:?}");
    }

    /// A contender whose second compute server cannot be opened.
    struct Broken;

    impl Contender for Broken {
        type Access = <FineGrained as Contender>::Access;
        type Shared = Owned;

        fn name(&self) -> String {
            "broken".to_owned()
        }
        fn access(&self) -> &'static str {
            "broken"
        }
        fn share(&self, owned: Owned) -> anyhow::Result<Owned> {
            Ok(owned)
        }
        fn open(
            &self,
            owned: &Owned,
            worker: &Worker,
            tree: &farlink_runtime::structure::Structure,
        ) -> anyhow::Result<BTree<Self::Access>> {
            ensure!(owned.low == 0, "cannot open {owned:?}");
            FineGrained.open(&(), worker, tree)
        }
    }

    #[test]
    fn a_lane_that_fails_ends_the_run() {
        let population = Population::new(1000, 0.99, 2, 1).unwrap();
        let bed = Bed::load(&population, 1).unwrap();
        let runner = Runner { bed: &bed, population: &population };
        let error =
            runner.run(&Broken, WRITES, Amount { warm_up_ops: 0, ops: 10, seed: 1, in_flight: 1, run: 0 }).unwrap_err();
        assert_eq!(error.to_string(), "cannot open Owned { low: 497664, high: None }");
    }
}
