//! Operations as values: they run here, or are sent and run there.

use std::cell::Cell;

use crate::{
    access::{Access, Cause, Interrupt, Start},
    error::Error,
    wire::Wire,
    worker::{Handle, counters::bump},
};

/// Attempts in a row that found a page other than promised, before the structure counts as inconsistent. Each is possible
/// in a sound structure only if others changed the path meanwhile.
const STALE_MAX: u32 = 1000;

/// A request to a structure, which can run on a compute server or on a memory server.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Operation: Wire {
    /// What it answers.
    type Output: Wire;

    /// One attempt. The first visible effect is also the last thing that can be interrupted.
    ///
    /// # Errors
    /// [`Interrupt`] says whether to begin anew, to ship, or to give up.
    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Self::Output, Interrupt>;
}

/// Runs an operation here, from the root, until an attempt succeeds or fails for good.
///
/// # Errors
/// What the operation failed with.
pub async fn execute<A: Access, O: Operation>(access: &A, operation: &O) -> Result<O::Output, Error> {
    let _pin = access.worker().pin();
    let from = Cell::new(Start::Root);
    let attempt = async || {
        let outcome = operation.run(access, from.get()).await;
        let met_stale = matches!(outcome, Err(Interrupt::Restart(Cause::Stale { .. })));
        from.set(if met_stale { Start::Anew } else { Start::Root });
        outcome
    };
    retry(access.worker(), attempt).await
}

/// Repeats an attempt at tidying up behind an operation that has had its effect: so many times at most, and whatever comes of
/// it. What cannot be done now, because of others or of a damaged page, is left to a later operation.
pub async fn tidy(worker: &Handle, attempts_max: u32, mut attempt: impl AsyncFnMut() -> Result<(), Interrupt>) {
    for number in 0..attempts_max {
        match attempt().await {
            Ok(()) => return,
            Err(Interrupt::Restart(_)) => worker.back_off(number).await,
            Err(interrupt) => return tracing::debug!(?interrupt, "left something untidy"),
        }
    }
}

/// Repeats an attempt for as long as it asks for a restart, backing off more and more.
///
/// # Errors
/// What the attempt failed with; [`Error::Inconsistent`] if it met stale pages many times in a row.
pub async fn retry<T>(worker: &Handle, mut attempt: impl AsyncFnMut() -> Result<T, Interrupt>) -> Result<T, Error> {
    let (mut restarts, mut stale) = (0u32, 0);
    loop {
        match attempt().await {
            Ok(output) => return Ok(output),
            Err(Interrupt::Failed(error)) => return Err(*error),
            Err(Interrupt::Restart(Cause::Conflict)) => stale = 0,
            Err(Interrupt::Restart(Cause::Stale { page, why })) => {
                stale += 1;
                if stale > STALE_MAX {
                    return Err(Error::Inconsistent { page, why });
                }
            }
            Err(Interrupt::Ship(page)) => {
                return Err(Error::Inconsistent { page, why: "an access without an engine asked to ship" });
            }
        }
        bump(&worker.count().restarts);
        worker.back_off(restarts).await;
        restarts = restarts.saturating_add(1);
    }
}
