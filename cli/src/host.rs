//! The workers of one compute process: a thread for each, which lives as long as the process has orders.
//!
//! A worker's thread draws its stream when a phase is prepared and waits; at *go* it keeps `in_flight` tasks running
//! until its feed ends. Its list of free pages and its count of inserts last from phase to phase, and so does the cache that
//! the workers share, if they have one. A phase ends with a flush of it, so that others see what the phase has done.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use farlink_offload::CacheOptions;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_structures::BTree;
use farlink_structures::btree::KeyRange;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::driver::{self, Client};
use crate::feed::{End, Feed, Issue};
use crate::keys::{KeySpace, value_for};
use crate::place::Place;
use crate::plan::{Limit, Phase, Plan};
use crate::reach::Reach;
use crate::stream::WorkerId;
use crate::tally::{Outcomes, Tally};
use crate::work::{self, Work};

/// How long a process that was told to stop may take to finish its operations.
const STOP_LIMIT: Duration = Duration::from_secs(8);

/// How often it is looked whether all memory servers are there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The workers of a process, and its membership in the cluster.
#[derive(Debug)]
pub(crate) struct Workers {
    /// Before the compute server, which leaves the cluster only when its workers are gone.
    threads: Vec<WorkerThread>,
    compute: Arc<ComputeServer>,
    stop: Arc<AtomicBool>,
}

#[derive(Debug)]
struct WorkerThread {
    /// `None` once there are no more.
    orders: Option<Sender<Order>>,
    answers: Receiver<anyhow::Result<Answer>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Order {
    Prepare(Phase),
    Go,
    Flush,
}

#[derive(Debug)]
enum Answer {
    Ready,
    Done(Box<Ran>),
    /// So many pages were written.
    Flushed(u64),
}

/// What one worker did in a phase, and when.
#[derive(Debug)]
struct Ran {
    start: Instant,
    end: Instant,
    tally: Tally,
}

/// Set by SIGINT and SIGTERM: the operations under way finish, and no more begin. A compute process that is cut off
/// instead may hold locks, and leaves pages that nobody can use.
pub(crate) fn watch_for_stop() -> anyhow::Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(Arc::default);
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot watch for signals")?;
    let seen = Arc::clone(flag);
    thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            if signals.forever().next().is_some() {
                seen.store(true, Ordering::Relaxed);
                thread::sleep(STOP_LIMIT);
                std::process::exit(1);
            }
        })
        .context("cannot start the signal thread")?;
    Ok(Arc::clone(flag))
}

impl Workers {
    /// Joins the cluster and starts the workers of process number `process`. They stop soon after `stop` is set.
    pub(crate) fn start(plan: Plan, process: u32, place: &Place, stop: &Arc<AtomicBool>) -> anyhow::Result<Self> {
        let keys = work::key_space(&plan.keys)?.0.for_run(plan.run);
        let fabric = plan.fabric(place)?;
        let options = ComputeOptions { seed: plan.seed.wrapping_add(u64::from(process)), ..ComputeOptions::default() };
        let compute = Arc::new(ComputeServer::join(fabric, options)?);
        let reach = reach(&plan, &compute)?;
        let plan = Arc::new(plan);
        let start = |worker| {
            let lane = Lane {
                id: plan.worker_id(process, worker),
                plan: Arc::clone(&plan),
                keys: keys.clone(),
                compute: Arc::clone(&compute),
                reach: reach.clone(),
                stop: Arc::clone(stop),
            };
            WorkerThread::start(worker, lane)
        };
        let threads = (0..plan.workers).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        let mut workers = Self { threads, compute, stop: Arc::clone(stop) };
        workers.await_ready()?;
        Ok(workers)
    }
}

/// How the workers of a process reach the tree, with a cache that is empty.
fn reach(plan: &Plan, compute: &ComputeServer) -> anyhow::Result<Reach> {
    let worker = compute.worker()?;
    let tree = worker.block_on(BTree::open(&worker, &plan.tree, plan.validation.proof()))?;
    let reach = Reach::new(plan.access, tree.structure().clone(), plan.validation.proof());
    if !plan.access.caches() {
        return Ok(reach);
    }
    let mut options = CacheOptions::new(usize::try_from(plan.cache_bytes.unwrap_or_default())?);
    (options.page_bytes, options.handles_max) = (plan.page_bytes as usize, plan.workers as usize);
    Ok(reach.through(options, KeyRange::ALL)?)
}

impl Workers {
    /// Gets everything ready that should not be timed.
    pub(crate) fn prepare(&mut self, phase: &Phase) -> anyhow::Result<()> {
        self.threads.iter_mut().try_for_each(|thread| thread.order(Order::Prepare(phase.clone())))?;
        self.await_ready()
    }

    /// Runs the prepared phase; answers how many nanoseconds it took and what the workers counted.
    pub(crate) fn go(&mut self) -> anyhow::Result<(u64, Tally)> {
        self.threads.iter_mut().try_for_each(|thread| thread.order(Order::Go))?;
        let answers = self.answers();
        // Also after an error: what was changed in the cache alone would leave the tree in pieces.
        let flushed = self.flush();
        self.compute.check_servers()?;
        let mut tally = Tally::default();
        let mut times: Option<(Instant, Instant)> = None;
        for answer in answers {
            let Answer::Done(ran) = answer? else { anyhow::bail!("a worker is out of step") };
            tally += &ran.tally;
            times = Some(match times {
                None => (ran.start, ran.end),
                Some((start, end)) => (start.min(ran.start), end.max(ran.end)),
            });
        }
        tally.cache.flushed = flushed?;
        let nanoseconds = times.map_or(0, |(start, end)| (end - start).as_nanos());
        Ok((u64::try_from(nanoseconds).unwrap_or(u64::MAX), tally))
    }

    /// All workers' answers. Once a memory server is lost, all are told to stop: one that draws, or finds all that it needs
    /// in its cache, would not notice.
    fn answers(&self) -> Vec<anyhow::Result<Answer>> {
        let answer = |thread: &WorkerThread| loop {
            match thread.answers.recv_timeout(LOOK_EVERY) {
                Ok(answer) => break answer,
                Err(RecvTimeoutError::Disconnected) => break Err(anyhow::anyhow!("a worker has ended early")),
                Err(RecvTimeoutError::Timeout) if self.compute.check_servers().is_err() => {
                    self.stop.store(true, Ordering::Relaxed);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        self.threads.iter().map(answer).collect()
    }

    fn await_ready(&mut self) -> anyhow::Result<()> {
        let answers = self.answers();
        // Why the others have stopped, if it is lost.
        self.compute.check_servers()?;
        for answer in answers {
            ensure!(matches!(answer?, Answer::Ready), "a worker is out of step");
        }
        Ok(())
    }

    /// Writes what only the cache holds, by any one worker; answers how many pages.
    fn flush(&mut self) -> anyhow::Result<u64> {
        let Some(thread) = self.threads.first_mut() else { return Ok(0) };
        thread.order(Order::Flush)?;
        let Answer::Flushed(pages) = thread.answer()? else { anyhow::bail!("a worker is out of step") };
        Ok(pages)
    }
}

impl WorkerThread {
    fn start(number: u32, lane: Lane) -> anyhow::Result<Self> {
        let (orders, to_obey) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("worker {number}"))
            .spawn(move || lane.obey(&to_obey, &answer))
            .with_context(|| format!("cannot start worker {number}"))?;
        Ok(Self { orders: Some(orders), answers, thread: Some(thread) })
    }

    fn order(&mut self, order: Order) -> anyhow::Result<()> {
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok());
        ensure!(sent, "a worker has ended early");
        Ok(())
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        self.answers.recv().context("a worker has ended early")?
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

/// What a worker's thread is started with.
#[derive(Debug)]
struct Lane {
    id: WorkerId,
    plan: Arc<Plan>,
    keys: KeySpace,
    compute: Arc<ComputeServer>,
    reach: Reach,
    stop: Arc<AtomicBool>,
}

impl Lane {
    /// The life of a worker's thread.
    fn obey(self, orders: &Receiver<Order>, answers: &Sender<anyhow::Result<Answer>>) {
        // Nobody listens to an answer only when the process is on its way out.
        if let Err(error) = self.serve(orders, answers) {
            let _ = answers.send(Err(error));
        }
    }

    fn serve(&self, orders: &Receiver<Order>, answers: &Sender<anyhow::Result<Answer>>) -> anyhow::Result<()> {
        let worker = self.compute.worker()?;
        let tree = self.reach.open(&worker)?;
        let mut busy = Busy { client: [Client { tree, worker }], insert_turns: 0, prepared: None };
        let _ = answers.send(Ok(Answer::Ready));
        for order in orders {
            let _ = answers.send(match order {
                Order::Prepare(phase) => busy.prepare(self, &phase).map(|()| Answer::Ready),
                Order::Go => busy.go(self).map(|ran| Answer::Done(Box::new(ran))),
                Order::Flush => busy.flush().map(Answer::Flushed),
            });
        }
        Ok(())
    }
}

/// A worker with its tree.
#[derive(Debug)]
struct Busy {
    client: [Client; 1],
    insert_turns: u64,
    prepared: Option<Work>,
}

impl Busy {
    fn flush(&self) -> anyhow::Result<u64> {
        let [client] = &self.client;
        let flushed = driver::counted(&self.client, || {
            client.worker.block_on(client.tree.flush())?;
            Ok(Tally::default())
        })?;
        Ok(flushed.cache.write_backs)
    }

    fn prepare(&mut self, lane: &Lane, phase: &Phase) -> anyhow::Result<()> {
        let go_on = || {
            ensure!(!lane.stop.load(Ordering::Relaxed), "stopped by a signal");
            Ok(())
        };
        self.prepared = Some(work::work(&lane.plan, &lane.keys, phase, lane.id, &go_on)?);
        Ok(())
    }

    fn go(&mut self, lane: &Lane) -> anyhow::Result<Ran> {
        let prepared = self.prepared.take().context("nothing was prepared")?;
        let start = Instant::now();
        let tally = match prepared {
            Work::Idle => Tally::default(),
            Work::BulkLoad { sorted, fill } => self.bulk_load(&sorted, fill)?,
            Work::Run { stream, limit, in_flight } => {
                let end = match limit {
                    Limit::Operations(operations) => End::Operations(operations),
                    Limit::For(duration) => End::At(start + duration),
                };
                let issue = Issue::new(stream, lane.keys.clone(), lane.id, self.insert_turns);
                let feed = Feed::new(issue, end).interrupted_by(&lane.stop);
                let (tally, issued) = driver::run(&self.client, vec![feed], in_flight)?;
                self.insert_turns = issued.first().map_or(self.insert_turns, Issue::insert_turns);
                tally
            }
        };
        let end = Instant::now();
        ensure!(!lane.stop.load(Ordering::Relaxed), "stopped by a signal");
        Ok(Ran { start, end, tally })
    }

    fn bulk_load(&self, sorted: &[u64], fill: f64) -> anyhow::Result<Tally> {
        let [client] = &self.client;
        driver::counted(&self.client, || {
            let entries = sorted.iter().map(|key| (*key, value_for(*key, 0)));
            let loaded = client.worker.block_on(client.tree.bulk_load(entries, fill))?;
            let outcomes = Outcomes { ops: loaded, inserted: loaded, ..Outcomes::default() };
            Ok(Tally { outcomes, ..Tally::default() })
        })
    }
}
