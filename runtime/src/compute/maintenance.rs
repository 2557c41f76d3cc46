//! What keeps a cluster's epoch moving, brings pages back, and finishes what dead compute servers have left: in rounds, by a thread of its
//! own or by whoever drives the compute server.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::Duration,
};

use futures_util::future::{Either, select};

use super::leaving::leave_blocking;
use crate::{
    catalog,
    clock::Clock,
    epoch::round::Board,
    error::Error,
    fabric::Error as FabricError,
    one_sided::ownership,
    pages, recovery,
    shared::Shared,
    sync::{Arc, lock},
    worker::{Handle, Worker},
};

/// How long maintenance rests between two rounds while pages wait for reuse or the epoch moves, and at most otherwise.
const BUSY_REST: Duration = Duration::from_millis(4);
const IDLE_REST: Duration = Duration::from_millis(32);
/// How long maintenance rests between two looks for compute servers that have died.
const SWEEP_REST: Duration = Duration::from_millis(100);
/// The same where something could not be finished again and again.
const FAILED_SWEEP_REST_MAX: Duration = Duration::from_millis(1600);

pub(super) fn spawn_maintenance(shared: &Arc<Shared>) -> Result<(mpsc::Sender<()>, JoinHandle<()>), Error> {
    let (stop, stopped) = mpsc::channel();
    let (tell, begun) = mpsc::channel();
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new()
        .name(format!("farlink-{}", shared.owner.incarnation()))
        .spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| maintain_until(&shared, &stopped, tell))).is_err() {
                // Others take it for dead only when it has no worker left that could have sent something.
                while shared.has_workers() {
                    std::thread::sleep(IDLE_REST);
                }
                lock(&shared.claim).take();
            }
        })
        .map_err(Error::io("starting the maintenance thread"))?;
    // A compute server without it would hold up the epoch of the whole cluster.
    let panicked = |_| Err(Error::io("starting the maintenance thread")(io::Error::other("it has panicked")));
    match begun.recv().unwrap_or_else(panicked) {
        Ok(()) => Ok((stop, thread)),
        Err(error) => {
            let _ = thread.join();
            Err(error)
        }
    }
}

/// Ends all that a compute server has if its maintenance panics: without it the epoch of the whole cluster stands still.
struct EndsOnPanic<'a>(&'a Shared);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(owner = %self.0.owner, "maintenance has panicked, and nothing is done any more; end this process, and join anew");
            self.0.fall();
        }
    }
}

/// Maintenance, until the compute server has left; `tell`s whether it has begun.
fn maintain_until(shared: &Arc<Shared>, stopped: &mpsc::Receiver<()>, tell: mpsc::Sender<Result<(), Error>>) {
    let worker = match Worker::housekeeping(shared, Clock::monotonic()) {
        Ok(worker) => worker,
        Err(error) => return drop(tell.send(Err(error))),
    };
    // Before the worker goes: its last requests fail, too.
    let _ends_on_panic = EndsOnPanic(shared);
    let _ = tell.send(Ok(()));
    let mut rest = BUSY_REST;
    let (mut is_told, mut sweep_ns, mut sweep_rest) = (false, 0, SWEEP_REST);
    loop {
        if shared.check_standing().is_err() {
            // All that is left is to end.
            let _ = stopped.recv();
            while shared.has_workers() {
                std::thread::sleep(IDLE_REST);
            }
            break;
        }
        if worker.clock().now_ns() >= sweep_ns {
            sweep_rest = match worker.block_on(sweep_between_rounds(&worker, shared)) {
                Ok(_) => SWEEP_REST,
                Err(error) => {
                    tracing::warn!(%error, "what dead compute servers have left, or this one, was not finished");
                    // It looks at all pages each time, and what is in the way may stay.
                    (sweep_rest * 2).min(FAILED_SWEEP_REST_MAX)
                }
            };
            sweep_ns = worker.clock().now_ns() + sweep_rest.as_nanos() as u64;
        }
        if matches!(stopped.recv_timeout(rest), Err(RecvTimeoutError::Disconnected)) {
            if !shared.has_workers() {
                break;
            }
            std::thread::sleep(rest);
        }
        match worker.block_on(round(&worker, shared)) {
            Ok(true) => rest = BUSY_REST,
            Ok(false) => rest = (rest * 2).min(IDLE_REST),
            Err(error) => {
                // Of a memory server that is lost there is no more to say the second time.
                if !std::mem::replace(&mut is_told, matches!(error, Error::Fabric(FabricError::ServerLost { .. }))) {
                    tracing::warn!(%error, "a round of maintenance failed");
                }
                rest = IDLE_REST;
            }
        }
    }
    leave_blocking(&worker, shared);
}

/// Finishes what dead compute servers have left, and this one: of how many dead ones something is left.
pub(super) async fn sweep(worker: &Handle) -> Result<usize, Error> {
    let swept = recovery::sweep(worker, catalog::free_unfinished).await;
    catalog::free_left(worker).await?;
    swept
}

/// [`sweep`], with rounds of maintenance as long as it takes. After a death it reads the lock words of all pages, and the cluster's epoch
/// would stand still for that time.
async fn sweep_between_rounds(worker: &Handle, shared: &Shared) -> Result<usize, Error> {
    let mut sweeping = pin!(sweep(worker));
    loop {
        let resting = pin!(worker.sleep_until(worker.clock().now_ns() + BUSY_REST.as_nanos() as u64));
        if let Either::Left((swept, _)) = select(sweeping.as_mut(), resting).await {
            return swept;
        }
        if let Err(error) = round(worker, shared).await {
            tracing::debug!(%error, "a round of maintenance failed");
        }
    }
}

/// One round of maintenance; true if there is reason to come again soon.
pub(crate) async fn round(worker: &Handle, shared: &Shared) -> Result<bool, Error> {
    // Operations learn of what it finds: their requests fail.
    let _ = shared.fabric.check_servers();
    let worker_of_task = worker.clone();
    // To its end: what it announces, were it sent later, would take back what others have announced since.
    let announcing = async move {
        let shared = worker_of_task.compute();
        let board = Board::of(&shared.geometry[0]);
        shared.member.round(&worker_of_task, &board, |epoch| shared.epoch.advance(epoch), &shared.pages).await
    };
    let is_busy = worker.spawn_to_end(announcing).await?;
    ownership::maintain(worker).await;
    let worker_of_task = worker.clone();
    worker.spawn_to_end(async move { pages::free_unclaimed(&worker_of_task).await }).await?;
    let (returning, idle) = (shared.pages.take_returning(), shared.pages.take_surplus());
    if !returning.is_empty() || !idle.is_empty() {
        let worker_of_task = worker.clone();
        match worker.spawn_to_end(async move { pages::give_back_surplus(&worker_of_task, returning, idle).await }).await
        {
            // They go with another round.
            Err(error @ Error::OwnerStalled { .. }) => tracing::debug!(%error, "pages were not returned"),
            returned => returned?,
        }
    }
    Ok(is_busy)
}
