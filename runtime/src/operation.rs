//! Operations as values: they run here, or are sent and run there.
//!
//! An [`Operation`] knows how to run over any [`Access`]. [`Run`] is whoever runs whole operations: an access from the root, as
//! [`execute`] does, or a way to have it done elsewhere. For a structure in several parts, and for one whose upper levels are
//! elsewhere, an operation is also [`Routed`].

use std::{future::Future, pin::Pin};

use crate::{
    access::{Access, Cause, Interrupt, Start},
    error::Error,
    page::avalanche,
    ptr::RemotePtr,
    structure::Layout,
    wire::Wire,
    worker::{Handle, counters::bump},
};

/// Attempts in a row that found a page other than promised, before the structure counts as inconsistent. Each is possible
/// in a sound structure only if others changed the path meanwhile.
const STALE_MAX: u32 = 1000;

/// Names an operation in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code {
    /// The catalog's number of the kind of structure.
    pub structure: u32,
    /// Which of that structure's operations.
    pub operation: u16,
}

/// A request to a structure, which can run on a compute server or on a memory server.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Operation: Wire + Clone + 'static {
    /// What it answers.
    type Output: Wire + 'static;
    /// The structure's pages.
    type Layout: Layout + Default;
    /// Its name in messages: no two operations of a cluster have the same.
    const CODE: Code;
    /// Whether it changes nothing. Then it can be done again if a memory server is lost with it, and nobody need know.
    const READS_ONLY: bool = false;

    /// The part of the structure where it begins, if that can be told: a page where it may start has some of it.
    fn begins(&self) -> Option<<Self::Layout as Layout>::Region>;

    /// Takes back what it asks for beyond the size of one message. Called where it comes from afar.
    fn limit(&mut self) {}

    /// The answer, if all pages that it takes are at hand and nothing is to be changed. Tried before [`Operation::run`], for it
    /// spares what suspending takes: a future's variables are places in memory.
    ///
    /// # Errors
    /// If something has to be waited for: where [`Operation::run`] begins, which may be where this has stopped.
    fn at_once<A: Access>(&self, _access: &A) -> Result<Self::Output, Start> {
        Err(Start::Root)
    }

    /// One attempt. The first visible effect is also the last thing that can be interrupted.
    ///
    /// # Errors
    /// [`Interrupt`] says whether to begin anew, to ship, or to give up.
    async fn run<A: Access>(&self, access: &A, from: Start) -> Result<Self::Output, Interrupt>;
}

/// An operation that begins at a key, so that a structure can be cut into parts, and into upper and lower levels.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Routed: Operation {
    /// What finds the page where it begins.
    type Locate: Operation<Output = RemotePtr>;

    /// The key where it begins.
    fn key(&self) -> u64;

    /// Finds the page of the least level that the operation can begin at.
    fn locate(&self) -> Self::Locate;

    /// Runs it over a structure in parts. If not said otherwise, what it is about is in one of them.
    ///
    /// # Errors
    /// What it failed with.
    async fn over<P: Parts>(&self, parts: &P) -> Result<Self::Output, Error> {
        parts.on(parts.part_of(self.key()), self).await
    }
}

/// How keys are divided among the parts of a structure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Each part has a range of keys. The least keys of the parts but for the first, in ascending order.
    Range(Vec<u64>),
    /// Each part has the keys of some hash values.
    Hash,
}

impl Cut {
    /// To which of so many parts a key belongs.
    pub fn part_of(&self, key: u64, parts: usize) -> usize {
        match self {
            Self::Range(lows) => lows.partition_point(|&low| low <= key).min(parts - 1),
            Self::Hash => (avalanche(key) % parts as u64) as usize,
        }
    }
}

/// A structure in several parts.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Parts {
    /// How keys are divided among them.
    fn cut(&self) -> &Cut;

    /// How many there are.
    fn count(&self) -> usize;

    /// Runs an operation on one of them.
    ///
    /// # Errors
    /// What it failed with.
    async fn on<O: Routed>(&self, part: usize, operation: &O) -> Result<O::Output, Error>;

    /// Runs an operation on all of them, at the same time. The answers in the order of the parts.
    ///
    /// # Errors
    /// What the first of those that failed failed with.
    async fn on_all<O: Routed>(&self, operation: &O) -> Result<Vec<O::Output>, Error>;

    /// Where a key belongs.
    fn part_of(&self, key: u64) -> usize {
        self.cut().part_of(key, self.count())
    }
}

/// Whoever runs operations of one structure: every [`Access`] does.
pub trait Run {
    /// Runs an operation to its end.
    ///
    /// # Errors
    /// What it failed with.
    fn perform<O: Routed>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>>;
}

impl<A: Access> Run for A {
    // Not async itself: that would be one more layer around what a cache hit takes.
    #[inline]
    fn perform<O: Routed>(&self, operation: &O) -> impl Future<Output = Result<O::Output, Error>> {
        execute(self, operation)
    }
}

/// Runs an operation here, from the root, until an attempt succeeds or fails for good.
///
/// # Errors
/// What the operation failed with.
pub async fn execute<A: Access, O: Operation>(access: &A, operation: &O) -> Result<O::Output, Error> {
    let _pin = access.worker().pin();
    let mut from = match operation.at_once(access) {
        Ok(output) => return Ok(output),
        Err(from) => from,
    };
    let mut restarts = Restarts::default();
    loop {
        match operation.run(access, from).await {
            Ok(output) => return Ok(output),
            Err(interrupt) => {
                let met_stale = matches!(interrupt, Interrupt::Restart(Cause::Stale { .. }));
                from = if met_stale { Start::Anew } else { Start::Root };
                restarts.before_next(access.worker(), interrupt).await?;
            }
        }
    }
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
    let mut restarts = Restarts::default();
    loop {
        match attempt().await {
            Ok(output) => return Ok(output),
            Err(interrupt) => restarts.before_next(worker, interrupt).await?,
        }
    }
}

/// The attempts so far.
#[derive(Debug, Default)]
struct Restarts {
    count: u32,
    stale_in_a_row: u32,
}

impl Restarts {
    /// Waits until it is time for another attempt, if `interrupt` asks for one. Boxed: it is rare, and as part of the caller's
    /// future it would slow down what is not.
    #[cold]
    #[inline(never)]
    fn before_next<'a>(
        &'a mut self,
        worker: &'a Handle,
        interrupt: Interrupt,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>> {
        Box::pin(async move {
            match interrupt {
                Interrupt::Failed(error) => return Err(*error),
                Interrupt::Restart(Cause::Conflict) => self.stale_in_a_row = 0,
                Interrupt::Restart(Cause::Stale { page, why }) => {
                    self.stale_in_a_row += 1;
                    if self.stale_in_a_row > STALE_MAX {
                        return Err(Error::Inconsistent { page, why });
                    }
                }
                Interrupt::Ship(page) => {
                    return Err(Error::Inconsistent { page, why: "an access without an engine asked to ship" });
                }
            }
            bump(&worker.count().restarts);
            worker.back_off(self.count).await;
            self.count = self.count.saturating_add(1);
            Ok(())
        })
    }
}
