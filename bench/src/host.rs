//! The workers of one compute process: a thread for each, which lives as long as the process has orders.
//!
//! A worker's thread draws its stream when a phase is prepared and waits; at *go* it keeps `in_flight` tasks running
//! until its queue ends. Its list of free pages and its count of inserts last from phase to phase, and so does the cache that
//! the workers share, if they have one. A phase ends with a flush of it, so that others see what the phase has done.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use farlink_runtime::access::Region as _;
use farlink_runtime::catalog;
use farlink_runtime::compute::ComputeServer;
use signal_hook::iterator::Signals;

use crate::driver::{self, Client};
use crate::others::Loader;
use crate::owner::{Owner, Share};
use crate::parts;
use crate::place::Place;
use crate::plan::{Limit, Load, Phase, Plan, PolicyChoice};
use crate::queue::{End, OperationQueue};
use crate::route::Route;
use crate::signals;
use crate::subject::{AccessMode, Job, Outcomes, Subject, WorkerId};
use crate::tally::Tally;

/// How long a process that was told to stop may take to finish its operations and to write what its cache holds.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How often it is looked whether all memory servers are there.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Ways to the cache that an owner among others needs beside its workers'.
const OWNER_HANDLES: usize = 8;

/// How often it is said how far a phase is.
const TELL_EVERY: Duration = Duration::from_millis(200);

/// Is told now and then how many operations a phase has begun.
pub(crate) type OnProgress<'a> = &'a mut dyn FnMut(u64) -> anyhow::Result<()>;

/// The workers of a process, whatever structure they work on.
pub(crate) trait Work {
    /// The incarnation of the process's compute server.
    fn incarnation(&self) -> u32;

    /// Gets everything ready that should not be timed.
    fn prepare(&mut self, phase: &Phase) -> anyhow::Result<()>;

    /// Runs the prepared phase; answers how many nanoseconds it took and what the workers counted.
    fn go(&mut self, on_progress: OnProgress<'_>) -> anyhow::Result<(u64, Tally)>;

    /// Flushes what this process owns beside others; what was done for those.
    fn flush(&mut self) -> anyhow::Result<Tally>;
}

/// The workers of a process, and its membership in the cluster.
pub(crate) struct Workers {
    /// Before the compute server, which leaves the cluster only when its workers are gone.
    threads: Vec<WorkerThread>,
    /// Of several owners.
    owner: Option<Box<dyn Owner>>,
    /// Of the process that loads, if nobody owns the structure.
    _loader: Option<Loader>,
    compute: Arc<ComputeServer>,
    stop: Arc<AtomicBool>,
}

#[derive(Debug)]
struct WorkerThread {
    /// Operations of the phase that it has begun.
    begun: Arc<AtomicU64>,
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

/// Set by the signals that [end the program](signals::ending): the operations under way finish, and no more begin. A compute process that is cut off
/// instead may hold locks, and leaves pages that nobody can use.
pub(crate) fn watch_for_stop() -> anyhow::Result<Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    let flag = FLAG.get_or_init(Arc::default);
    let mut signals = Signals::new(signals::ending()).context("cannot watch for signals")?;
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
    pub(crate) fn start<S: Subject>(
        plan: Plan,
        process: u32,
        place: &Place,
        stop: &Arc<AtomicBool>,
    ) -> anyhow::Result<Self> {
        let data = Arc::new(S::data(&plan.setting)?);
        let fabric = plan.fabric(place)?;
        let seed = plan.setting.seed.wrapping_add(u64::from(process));
        let compute = Arc::new(ComputeServer::join(fabric, plan.compute_options(seed))?);
        let mut route = route::<S>(&plan, &data, &compute)?;
        let mut owner: Option<Box<dyn Owner>> = None;
        let loads_one_sided = process == 0 && plan.load != Load::Found && !plan.access.owns();
        let loader = loads_one_sided.then(|| Loader::enter(&compute.worker()?, route.parts())).transpose()?;
        if plan.has_owners() {
            route = route.among_owners()?;
            let share = Share::start(&plan, process, &route, &data, &compute)?;
            if process == 0 && !plan.joins_owners {
                share.take_all()?;
            }
            owner = Some(Box::new(share));
        }
        let plan = Arc::new(plan);
        let start = |worker| {
            let begun = Arc::default();
            let worker_loop = WorkerLoop {
                id: plan.worker_id(process, worker),
                plan: Arc::clone(&plan),
                data: Arc::clone(&data),
                compute: Arc::clone(&compute),
                route: route.clone(),
                stop: Arc::clone(stop),
                begun: Arc::clone(&begun),
            };
            WorkerThread::start(worker, worker_loop, begun)
        };
        let threads = (0..plan.workers).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        let mut workers = Self { threads, owner, _loader: loader, compute, stop: Arc::clone(stop) };
        workers.await_ready()?;
        Ok(workers)
    }
}

/// How the workers of a process reach the structure, with a cache that is empty.
pub(crate) fn route<S: Subject>(plan: &Plan, data: &S::Data, compute: &ComputeServer) -> anyhow::Result<Route<S>> {
    let worker = compute.worker()?;
    let open = |name: &String| worker.block_on(catalog::open::<S>(&worker, name));
    let parts = plan.parts.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let cut = parts::cut::<S>(data, plan, &parts)?;
    let proof = plan.validation.proof();
    let route = Route::of_parts(plan.access, parts, cut)?.proven_by(proof);
    let ships = plan.access.asks_a_policy() && plan.policy != PolicyChoice::Never;
    let route = if ships { route.shipping(plan.policy.policies()) } else { route };
    if !plan.access.caches() {
        return Ok(route);
    }
    let mut options = plan.admission.options(usize::try_from(plan.cache_bytes.unwrap_or_default())?);
    options.page_bytes = plan.page_bytes as usize;
    options.handles_max = plan.workers as usize + if plan.has_owners() { OWNER_HANDLES } else { 0 };
    options.excludes_subtrees = plan.access == AccessMode::Engine;
    options.pages_max = plan.cache_pages_max.map_or(options.pages_max, |pages| pages as usize);
    Ok(route.through(options, S::Region::everything())?.durable(plan.durability))
}

impl Work for Workers {
    fn incarnation(&self) -> u32 {
        self.compute.owner().incarnation()
    }

    fn prepare(&mut self, phase: &Phase) -> anyhow::Result<()> {
        self.threads.iter_mut().try_for_each(|thread| thread.order(Order::Prepare(phase.clone())))?;
        self.await_ready()?;
        self.owner.as_mut().map_or(Ok(()), |owner| owner.prepare(*phase == Phase::Load))
    }

    fn flush(&mut self) -> anyhow::Result<Tally> {
        self.owner.as_mut().map_or_else(|| Ok(Tally::default()), |owner| owner.flush())
    }

    fn go(&mut self, on_progress: OnProgress<'_>) -> anyhow::Result<(u64, Tally)> {
        self.threads.iter_mut().try_for_each(|thread| thread.order(Order::Go))?;
        let answers = self.answers(on_progress);
        // Also after an error: what was changed in the cache alone would leave the structure in pieces.
        let flushed = self.flush_cache();
        self.compute.check_servers()?;
        let mut tally = Tally::default();
        let mut times: Option<(Instant, Instant)> = None;
        for answer in answers? {
            let Answer::Done(ran) = answer else { anyhow::bail!("a worker is out of step") };
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
}

impl Workers {
    /// All workers' answers, or why the first of them failed. Then, or when a memory server is lost, all are told to stop: who draws, or finds
    /// all that it needs in its cache, would not notice.
    fn answers(&self, on_progress: OnProgress<'_>) -> anyhow::Result<Vec<Answer>> {
        let (mut told, mut failed, mut answers) = (Instant::now(), None, Vec::new());
        let mut waiting: Vec<&WorkerThread> = self.threads.iter().collect();
        while let Some(first) = waiting.first() {
            // Wakes up for one of them, and looks at all.
            let mut woken = first.answers.recv_timeout(LOOK_EVERY).ok();
            waiting.retain(|thread| {
                match woken.take().map_or_else(|| thread.answers.try_recv(), Ok) {
                    Ok(Ok(answer)) => answers.push(answer),
                    Ok(Err(error)) => failed = failed.take().or(Some(error)),
                    Err(TryRecvError::Disconnected) => failed = failed.take().or_else(|| Some(ended_early())),
                    Err(TryRecvError::Empty) => return true,
                }
                false
            });
            let is_late = told.elapsed() >= TELL_EVERY;
            let begun = || self.threads.iter().map(|thread| thread.begun.load(Ordering::Relaxed)).sum();
            let nobody_listens = is_late && on_progress(begun()).is_err();
            if is_late {
                told = Instant::now();
            }
            if nobody_listens || failed.is_some() || self.compute.check_servers().is_err() {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
        failed.map_or(Ok(answers), Err)
    }

    fn await_ready(&mut self) -> anyhow::Result<()> {
        let answers = self.answers(&mut |_| Ok(()));
        // Why the others have stopped, if it is lost.
        self.compute.check_servers()?;
        for answer in answers? {
            ensure!(matches!(answer, Answer::Ready), "a worker is out of step");
        }
        Ok(())
    }

    /// Writes what only the cache holds, by any one worker; answers how many pages.
    fn flush_cache(&mut self) -> anyhow::Result<u64> {
        let Some(thread) = self.threads.first_mut() else { return Ok(0) };
        thread.order(Order::Flush)?;
        let Answer::Flushed(pages) = thread.answer()? else { anyhow::bail!("a worker is out of step") };
        Ok(pages)
    }
}

fn ended_early() -> anyhow::Error {
    anyhow::anyhow!("a worker has ended early")
}

impl WorkerThread {
    fn start<S: Subject>(number: u32, worker_loop: WorkerLoop<S>, begun: Arc<AtomicU64>) -> anyhow::Result<Self> {
        let (orders, to_obey) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let thread = thread::Builder::new()
            .name(format!("worker {number}"))
            .spawn(move || worker_loop.obey(&to_obey, &answer))
            .with_context(|| format!("cannot start worker {number}"))?;
        Ok(Self { begun, orders: Some(orders), answers, thread: Some(thread) })
    }

    fn order(&mut self, order: Order) -> anyhow::Result<()> {
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok());
        ensure!(sent, ended_early());
        Ok(())
    }

    fn answer(&mut self) -> anyhow::Result<Answer> {
        self.answers.recv().map_err(|_| ended_early())?
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
struct WorkerLoop<S: Subject> {
    id: WorkerId,
    plan: Arc<Plan>,
    data: Arc<S::Data>,
    compute: Arc<ComputeServer>,
    route: Route<S>,
    stop: Arc<AtomicBool>,
    begun: Arc<AtomicU64>,
}

impl<S: Subject> WorkerLoop<S> {
    /// The life of a worker's thread.
    fn obey(self, orders: &Receiver<Order>, answers: &Sender<anyhow::Result<Answer>>) {
        // Nobody listens to an answer only when the process is on its way out.
        if let Err(error) = self.serve(orders, answers) {
            let _ = answers.send(Err(error));
        }
    }

    fn serve(&self, orders: &Receiver<Order>, answers: &Sender<anyhow::Result<Answer>>) -> anyhow::Result<()> {
        let worker = self.compute.worker()?;
        let access = self.route.open(&worker)?;
        let source = Some(S::source(&self.data, self.id));
        let mut busy = Busy { client: [Client { access, worker }], source, prepared: None };
        let _ = answers.send(Ok(Answer::Ready));
        for order in orders {
            let _ = answers.send(match order {
                Order::Prepare(phase) => busy.prepare(self, phase).map(|()| Answer::Ready),
                Order::Go => busy.go(self).map(|ran| Answer::Done(Box::new(ran))),
                Order::Flush => busy.flush().map(Answer::Flushed),
            });
        }
        Ok(())
    }
}

/// A worker with its structure.
struct Busy<S: Subject> {
    client: [Client<S>; 1],
    /// `None` once it was lost with a failed phase.
    source: Option<S::Source>,
    prepared: Option<Phase>,
}

impl<S: Subject> Busy<S> {
    fn flush(&self) -> anyhow::Result<u64> {
        let [client] = &self.client;
        let flushed = driver::counted(&self.client, || {
            client.worker.block_on(client.access.flush())?;
            Ok(Tally::default())
        })?;
        Ok(flushed.cache.write_backs)
    }

    fn prepare(&mut self, worker: &WorkerLoop<S>, phase: Phase) -> anyhow::Result<()> {
        let go_on = || {
            ensure!(!worker.stop.load(Ordering::Relaxed), "stopped by a signal");
            Ok(())
        };
        let plan = &worker.plan;
        let job = match &phase {
            Phase::Load => Job::Load,
            Phase::RemoveAll { round } => Job::RemoveAll { round: *round },
            Phase::InsertAll { round } => Job::InsertAll { round: *round },
            Phase::Workload { workload, .. } => {
                let name = plan.workloads.get(*workload).context("the plan has no such workload")?;
                let operations = match plan.limit_of(&phase).map(|limit| limit.share(worker.id)) {
                    Some(Limit::Operations(share)) => Some(share),
                    _ => None,
                };
                Job::Workload { name, operations }
            }
        };
        if phase != Phase::Load {
            // Who loads is entered before all others.
            let [Client { access, worker }] = &self.client;
            worker.block_on(access.enter())?;
        }
        if !is_bulk_load(plan, &phase) {
            S::prepare(self.source.as_mut().context("an earlier phase has failed")?, job, &go_on)?;
        }
        self.prepared = Some(phase);
        Ok(())
    }

    fn go(&mut self, worker: &WorkerLoop<S>) -> anyhow::Result<Ran> {
        let (phase, plan) = (self.prepared.take().context("nothing was prepared")?, &worker.plan);
        let start = Instant::now();
        let tally = match plan.load {
            Load::Bulk { fill } if is_bulk_load(plan, &phase) => match worker.id.index {
                0 => self.bulk_load(worker, fill)?,
                // While another worker loads.
                _ => Tally::default(),
            },
            _ => {
                let end = match plan.limit_of(&phase).map(|limit| limit.share(worker.id)) {
                    None => End::Source,
                    Some(Limit::Operations(operations)) => End::Operations(operations),
                    Some(Limit::For(duration)) => End::At(start + duration),
                };
                let source = self.source.take().context("an earlier phase has failed")?;
                let queue = OperationQueue::new(source, end).interrupted_by(&worker.stop).counted_in(&worker.begun);
                let (tally, mut sources) = driver::run(&self.client, vec![queue], plan.label(&phase).1)?;
                self.source = sources.pop();
                tally
            }
        };
        let end = Instant::now();
        ensure!(!worker.stop.load(Ordering::Relaxed), "stopped by a signal");
        Ok(Ran { start, end, tally })
    }

    fn bulk_load(&self, worker: &WorkerLoop<S>, fill: f64) -> anyhow::Result<Tally> {
        let [client] = &self.client;
        driver::counted(&self.client, || {
            let load = worker.route.bulk_load(&client.access, &client.worker, &worker.data, fill);
            let loaded = client.worker.block_on(load)?;
            let outcomes = Outcomes { ops: loaded, inserted: loaded, ..Outcomes::default() };
            Ok(Tally { outcomes, ..Tally::default() })
        })
    }
}

/// Whether one worker does it while the others wait.
fn is_bulk_load(plan: &Plan, phase: &Phase) -> bool {
    matches!((phase, plan.load), (Phase::Load, Load::Bulk { .. }))
}

#[cfg(test)]
mod tests {
    use farlink_runtime::compute::ComputeOptions;
    use farlink_runtime::fabric::mem::MemOptions;
    use farlink_runtime::server;

    use super::*;

    /// The others would go on for as long as the phase lasts.
    #[test]
    fn once_one_has_failed_all_are_told_to_stop() {
        let cluster = server::in_process(1, 8 << 20, MemOptions::default()).unwrap();
        let compute = Arc::new(ComputeServer::join(Arc::new(cluster), ComputeOptions::default()).unwrap());
        let stop = Arc::new(AtomicBool::new(false));
        let worker = |act: fn(&AtomicBool) -> anyhow::Result<Answer>| {
            let (answer, answers) = mpsc::channel();
            let stop = Arc::clone(&stop);
            let thread = Some(thread::spawn(move || answer.send(act(&stop)).unwrap()));
            WorkerThread { begun: Arc::default(), orders: None, answers, thread }
        };
        let goes_on = |stop: &AtomicBool| {
            while !stop.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            Err(anyhow::anyhow!("stopped"))
        };
        let threads =
            vec![worker(goes_on), worker(|_| Err(anyhow::anyhow!("the cause"))), worker(|_| Ok(Answer::Ready))];
        let mut workers = Workers { threads, owner: None, _loader: None, compute, stop: Arc::clone(&stop) };
        assert_eq!(workers.await_ready().unwrap_err().to_string(), "the cause");
    }
}
