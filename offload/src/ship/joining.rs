//! How a memory server becomes a member of its cluster.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread::JoinHandle,
};

use farlink_runtime::{compute::ComputeServer, error::Error};

use super::layout::Failure;

pub(super) type Join = Box<dyn Fn() -> Result<Arc<ComputeServer>, Error> + Send + Sync>;

/// Joins when it is first asked. That connects to all memory servers, and may wait for them. So it has a thread of its own: those that serve
/// messages go on saying that they live.
pub(super) struct Joining {
    join: Join,
    compute: OnceLock<Arc<ComputeServer>>,
    attempts: Mutex<Attempts>,
}

#[derive(Debug, Default)]
struct Attempts {
    begun: u64,
    ended: u64,
    /// What the last one failed with.
    failure: Option<Failure>,
    thread: Option<JoinHandle<()>>,
}

impl Joining {
    pub(super) fn new(join: Join) -> Self {
        Self { join, compute: OnceLock::new(), attempts: Mutex::default() }
    }

    /// The membership, if it is had.
    pub(super) fn compute(&self) -> Option<&ComputeServer> {
        self.compute.get().map(|compute| &**compute)
    }

    /// Joins here and now, unless that is done.
    pub(super) fn join(&self) -> Result<&ComputeServer, Failure> {
        if self.compute.get().is_none() {
            let joined = (self.join)();
            let joined = joined.inspect_err(|error| tracing::error!(%error, "cannot join the cluster"));
            let _ = self.compute.set(joined.map_err(|error| Failure::of(&error))?);
        }
        Ok(self.compute().expect("it was set just now"))
    }

    /// Begins to join, unless somebody does that already: the number of the attempt.
    pub(super) fn begin(self: &Arc<Self>) -> u64 {
        let mut attempts = self.attempts();
        if attempts.begun == attempts.ended {
            attempts.begun += 1;
            let shared = Arc::clone(self);
            let joining = std::thread::Builder::new().name("farlink-join".into()).spawn(move || {
                // Whatever becomes of it, nobody waits for ever.
                let joined = catch_unwind(AssertUnwindSafe(|| shared.join().err()));
                shared.end(joined.unwrap_or_else(|_| Some(Failure::Other("joining the cluster panicked".into()))));
            });
            match joining {
                Ok(thread) => attempts.thread = Some(thread),
                Err(error) => {
                    attempts.ended = attempts.begun;
                    attempts.failure = Some(Failure::Other(format!("no thread to join the cluster: {error}")));
                }
            }
        }
        attempts.begun
    }

    /// Waits for the thread that joins, if there is one: nobody joins any more behind that.
    pub(super) fn finish(&self) {
        let thread = self.attempts().thread.take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    fn end(&self, failure: Option<Failure>) {
        let mut attempts = self.attempts();
        attempts.ended = attempts.begun;
        attempts.failure = failure;
    }

    /// What has come of an attempt; `None` while it goes on.
    pub(super) fn outcome(&self, attempt: u64) -> Option<Result<&ComputeServer, Failure>> {
        let attempts = self.attempts();
        if attempts.ended < attempt {
            return None;
        }
        let failed = || attempts.failure.clone().unwrap_or(Failure::Other("the cluster was not joined".into()));
        Some(self.compute().ok_or_else(failed))
    }

    fn attempts(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
