//! One task of the closed loop: take an operation, run it, time it, check what it answered, record it.
//!
//! As many tasks as are in flight share a worker's queue and tally. A task reads the clock once an operation: the end of one is
//! the start of the next, so what lies between (settling a key, recording) is inside the measured time, and a latency includes
//! the time that the worker spent on other tasks.

use std::cell::RefCell;
use std::time::Instant;

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;

use crate::queue::OperationQueue;
use crate::subject::Subject;
use crate::tally::Tally;

/// Runs operations from `queue` until it ends. The first error stops the queue for every task of the worker; operations
/// that are under way in other tasks still finish and are recorded.
pub(crate) async fn run_task<S: Subject, R: Run<Plugin = S>, I: Iterator<Item = S::Request>>(
    run: &R,
    queue: &OperationQueue<I>,
    tally: &RefCell<Tally>,
) -> Result<(), Error> {
    let mut start = Instant::now();
    while let Some(request) = queue.next(start) {
        // The outcome is settled first: the cell is never borrowed across an await.
        let outcomes = S::run(run, request).await.inspect_err(|_| queue.stop())?;
        let end = Instant::now();
        let mut tally = tally.borrow_mut();
        tally.outcomes += outcomes;
        tally.latency.record(u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX));
        start = end;
    }
    Ok(())
}
