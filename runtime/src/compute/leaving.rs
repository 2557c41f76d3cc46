//! How a compute server leaves its cluster, once no worker of it is left.

use std::time::Duration;

use super::maintenance::round;
use crate::{
    catalog,
    clock::Clock,
    error::Error,
    fabric::Error as FabricError,
    layout,
    one_sided::ownership,
    pages, recovery,
    remote::release_word,
    shared::Shared,
    sync::{Arc, Ordering, lock},
    worker::{Handle, Worker},
};

/// How long who leaves rests between two rounds.
const LEAVE_REST: Duration = Duration::from_millis(1);
/// Rounds of maintenance that a leaving compute server spends on the grace of its last retired pages; then it hands them over.
const LEAVE_ROUNDS_MAX: u32 = 100;
/// The same while there are pages in doubt, which are lost with who leaves: some seconds, more than an operation of others takes.
const DOUBT_ROUNDS_MAX: u32 = 5000;
/// Tries of a step of leaving for which there is no memory.
const LEAVE_ATTEMPTS_MAX: u32 = 20;

/// Leaves the cluster from the calling thread.
pub(super) fn leave_by_hand(shared: &Arc<Shared>) {
    match Worker::housekeeping(shared, Clock::monotonic()) {
        Ok(worker) => leave_blocking(&worker, shared),
        Err(error) => tracing::warn!(%error, "left the cluster without deregistering"),
    }
}

pub(super) fn leave_blocking(worker: &Worker, shared: &Shared) {
    worker.block_on(leave(worker, shared, async |attempt| {
        if attempt > 8 {
            std::thread::sleep(LEAVE_REST);
        }
    }));
}

/// Leaves the cluster: no worker is left. What cannot be returned, because others hold up the epoch or a request fails, is handed
/// over: the slot keeps the incarnation, and whoever finds that it is dead takes the pages over, for another grace. `pause`s
/// after each round of waiting for the grace of pages, by their number.
pub(super) async fn leave(worker: &Handle, shared: &Shared, pause: impl AsyncFn(u32)) {
    let deregistered = async {
        // What it had is others' already.
        shared.check_standing()?;
        repeat(worker, async || ownership::leave(worker).await).await?;
        if shared.displaces.load(Ordering::Acquire)
            && let Err(error) = recovery::sweep(worker, catalog::free_unfinished).await
        {
            tracing::debug!(%error, "what others have left whose slots were taken is left to the next one");
        }
        if let Err(error) = catalog::free_left(worker).await {
            tracing::debug!(%error, "structures that were not made or dropped to the end are handed over");
        }
        for attempt in 0..DOUBT_ROUNDS_MAX {
            let may_hand_over = attempt >= LEAVE_ROUNDS_MAX && shared.pages.in_doubt() == 0;
            if may_hand_over || shared.pages.deferred() == 0 {
                break;
            }
            repeat(worker, async || round(worker, shared).await).await?;
            pause(attempt).await;
        }
        let is_unfinished = !lock(&shared.unfinished).is_empty();
        // By its rings others find who has left a structure unfinished, once somebody else has its slot.
        if !is_unfinished {
            repeat(worker, async || recovery::free_rings(worker, shared.owner).await).await?;
        }
        // Maintenance is a worker, too, and may have taken pages for a ring.
        worker.pages().give_back(&shared.pages);
        repeat(worker, async || pages::give_back(worker, shared.pages.take_all()).await).await?;
        if is_unfinished || shared.pages.deferred() != 0 || shared.displaces.load(Ordering::Acquire) {
            return Ok(());
        }
        let incarnation = u64::from(shared.owner.incarnation());
        release_word(worker, layout::slot_at(shared.member.slot()), incarnation, 0).await?;
        Ok::<_, Error>(())
    };
    if let Err(error) = deregistered.await {
        tracing::warn!(%error, "left the cluster without deregistering");
    }
    if shared.is_fallen() {
        lock(&shared.claim).take();
        return;
    }
    let in_doubt = shared.pages.in_doubt();
    if in_doubt != 0 {
        tracing::warn!(pages = in_doubt, "pages are lost: another compute server holds the epoch back for too long");
    }
    let pages = shared.pages.deferred() - in_doubt;
    if pages != 0 {
        tracing::info!(pages, "retired pages are handed over: another compute server holds the epoch back");
    }
    lock(&shared.claim).take();
}

/// Gives what fails for want of memory a few more tries.
async fn repeat<T>(worker: &Handle, step: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut attempt = 0;
    loop {
        match step().await {
            Err(Error::Fabric(error @ FabricError::RegistrationRefused { .. })) if attempt < LEAVE_ATTEMPTS_MAX => {
                tracing::debug!(%error, "tried again");
                worker.back_off(attempt).await;
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}
