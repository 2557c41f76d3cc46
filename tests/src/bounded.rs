//! Running what must come to an end: with a bound on READs and turns, or, across processes, on time.

use std::{
    future::Future,
    io::Write,
    pin::pin,
    rc::Rc,
    sync::mpsc::{self, RecvTimeoutError},
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use farlink_runtime::{compute::ComputeServer, error::Error, fabric::clock::Clock, worker::Worker};

/// What an operation may use until it ends.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// Remote READs.
    pub reads_max: u64,
    /// Turns of the worker. They are what grows where an operation waits for something that never comes.
    pub turns_max: u64,
}

/// An operation that did not end within its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no end after {reads} READs and {turns} turns")]
pub struct Endless {
    /// READs until it was given up.
    pub reads: u64,
    /// Turns until it was given up.
    pub turns: u64,
}

/// A turn; false if it did nothing, and there is a time to wait for: how many such turns there are depends on the machine.
pub fn turn(worker: &Worker) -> bool {
    worker.turn() || worker.next_due_ns().is_none()
}

/// A worker for which time passes as fast as it waits for it, where it is run by the functions of this module. Nobody else is to be
/// waited for: their time is another one.
///
/// # Errors
/// As [`ComputeServer::worker`].
pub fn worker(compute: &ComputeServer) -> Result<Worker, Error> {
    compute.worker_with(Clock::Virtual(Rc::default()))
}

fn skip(worker: &Worker) {
    worker.next_due_ns().into_iter().for_each(|due_ns| worker.clock().skip_to(due_ns));
}

/// Runs `future` on `worker` to its end.
pub fn block_on<T>(worker: &Worker, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
        worker.turn();
        skip(worker);
    }
}

/// Runs `future` as a task of `worker`, turn by turn, until it ends or `bound` is used up. What does not end stays a task
/// of the worker.
///
/// # Errors
/// [`Endless`] if it does not end.
pub fn run<T: 'static>(worker: &Worker, bound: Bound, future: impl Future<Output = T> + 'static) -> Result<T, Endless> {
    let reads_before = worker.counters().reads;
    let mut task = pin!(worker.spawn(future));
    let mut turns = 0;
    loop {
        turns += u64::from(turn(worker));
        skip(worker);
        if let Poll::Ready(output) = task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return Ok(output);
        }
        let reads = worker.counters().reads - reads_before;
        if reads > bound.reads_max || turns > bound.turns_max {
            return Err(Endless { reads, turns });
        }
    }
}

/// How many times longer than on an idle machine something may take before it is taken to hang, if it has used the core for long enough
/// to be done.
const SLOWER_MAX: u32 = 5;
/// And if it has not: it gets no core, or it sleeps.
const SLOWEST_MAX: u32 = 10;

/// How often a watchdog looks.
const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// Whether what takes `limit` on an idle machine hangs that has taken, and used the core, for so long.
pub fn hangs(limit: Duration, taken: Duration, used: impl FnOnce() -> Duration) -> bool {
    taken >= limit * SLOWEST_MAX || taken >= limit * SLOWER_MAX && used() >= limit
}

/// What this process has used of all cores; very much if the system does not say.
pub fn processor_time() -> Duration {
    const TICKS_PER_S: u64 = 100;
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name before may hold anything.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    let used = ticks().zip(ticks()).map(|(user, system)| user + system);
    used.map_or(Duration::MAX, |ticks| Duration::from_millis(ticks * 1000 / TICKS_PER_S))
}

/// Ends the process if it still runs after some time: a test that hangs shall fail, and say where.
#[derive(Debug)]
#[must_use = "the watch ends when this is dropped"]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Aborts the process several times `limit` later, as the machine may be slow or busy, unless this is dropped before.
    ///
    /// # Panics
    /// If the system gives no thread.
    pub fn start(what: impl Into<String>, limit: Duration) -> Self {
        let (alive, gone) = mpsc::channel::<()>();
        let (what, begun, used_before) = (what.into(), Instant::now(), processor_time());
        let watch = move || {
            while gone.recv_timeout(LOOKS_EVERY) == Err(RecvTimeoutError::Timeout) {
                let taken = begun.elapsed();
                if hangs(limit, taken, || processor_time().saturating_sub(used_before)) {
                    // Past the test harness, which would keep it to itself.
                    let _ = writeln!(
                        std::io::stderr(),
                        "{what}: not finished after {taken:?}; aborting process {}",
                        std::process::id()
                    );
                    std::process::abort();
                }
            }
        };
        std::thread::Builder::new().name("watchdog".into()).spawn(watch).expect("a thread for the watchdog");
        Self { _alive: alive }
    }
}
