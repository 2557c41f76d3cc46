//! Operations as values: they run here, or are sent and run there.
//!
//! An [`Operation`] knows how to run over any [`Access`]. [`Run`] is whoever runs whole operations: an access from the root, as
//! [`execute`] does, or a way to have it done elsewhere.

use std::{future::Future, pin::Pin};

use crate::{
    access::{Access, Cause, InPieces, Interrupt, Operation, Plugin, Start},
    error::Error,
    fabric::Error as FabricError,
    page::avalanche,
    ptr::RemotePtr,
    worker::{Handle, counters::bump},
};

/// Attempts in a row that found a page other than promised, or were not ready, before the structure counts as inconsistent. Each is
/// possible in a sound structure only if others changed the path meanwhile, or if it has made room.
const FRUITLESS_MAX: u32 = 1000;
/// After so many attempts in a row that have lost to others, or were not ready, no cached copy is trusted: one that nobody
/// renews would do that for ever.
const REPEATS_BEFORE_ANEW: u32 = 8;
/// After so many attempts in a row that have lost a page the next one holds copies.
const LOSSES_BEFORE_HOLDING: u32 = 8;
/// What must not be left undone is tried again so often, if memory for it is refused.
const REFUSALS_MAX: u32 = 20;

/// Names an operation in messages: made of the names of its plug-in and its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Code(pub u64);

impl Code {
    /// That of an operation.
    pub const fn of<O: Operation>() -> Self {
        Self(hash_name(O::NAME, hash_name(O::Plugin::NAME, 0)))
    }

    /// That of an operation whose answer is wanted in pieces.
    pub const fn in_pieces<O: InPieces>() -> Self {
        Self(avalanche(!Self::of::<O>().0))
    }
}

/// The number that stands for a plug-in's name in the catalog.
pub const fn kind_of<P: Plugin>() -> u64 {
    hash_name(P::NAME, 0)
}

pub(crate) const fn hash_name(name: &str, seed: u64) -> u64 {
    let (bytes, mut hash, mut index) = (name.as_bytes(), avalanche(seed), 0);
    while index < bytes.len() {
        hash = avalanche(hash ^ bytes[index] as u64);
        index += 1;
    }
    hash
}

/// Whoever runs operations of one structure: every [`Access`] does.
pub trait Run {
    /// Its plug-in.
    type Plugin: Plugin;

    /// Runs an operation to its end.
    ///
    /// # Errors
    /// What it failed with.
    fn execute<O: Operation<Plugin = Self::Plugin>>(
        &self,
        operation: &O,
    ) -> impl Future<Output = Result<O::Output, Error>>;
}

/// Whoever has answers sent in pieces.
pub trait RunInPieces: Run {
    /// Runs an operation to its end, whose answer a memory server sends in pieces.
    ///
    /// # Errors
    /// What it failed with.
    fn execute_in_pieces<O: InPieces<Plugin = Self::Plugin>>(
        &self,
        operation: &O,
    ) -> impl Future<Output = Result<O::Output, Error>>;
}

impl<A: Access> Run for A {
    type Plugin = A::Plugin;

    // Not async itself: that would be one more layer around what a cache hit takes.
    #[inline]
    fn execute<O: Operation<Plugin = A::Plugin>>(
        &self,
        operation: &O,
    ) -> impl Future<Output = Result<O::Output, Error>> {
        execute(self, operation)
    }
}

/// Runs an operation here, from the root, until an attempt succeeds or fails for good.
///
/// # Errors
/// What the operation failed with.
pub async fn execute<A: Access, O: Operation<Plugin = A::Plugin>>(
    access: &A,
    operation: &O,
) -> Result<O::Output, Error> {
    let mut pin = access.context().worker.pin();
    let mut from = match operation.try_sync(access) {
        Ok(output) => return Ok(output),
        Err(from) => from,
    };
    let mut restarts = Restarts::from_root(access.context().structure.root);
    loop {
        let Some(right) = access.right(O::READS_ONLY) else {
            // It may take a while.
            drop(pin);
            access.enter().await?;
            pin = access.context().worker.pin();
            continue;
        };
        let interrupt = match operation.run(access, from).await {
            _ if !access.stands(right, O::READS_ONLY) => Interrupt::conflict(),
            Ok(output) => return settled(access, operation, output).await,
            Err(interrupt) => interrupt,
        };
        from = restarts.start_after(&interrupt);
        restarts.back_off(&access.context().worker, interrupt).await?;
        // Apart from the attempt above, whose outcome would be moved once more.
        while restarts.loses_pages(O::READS_ONLY)
            && let Some(outcome) = hold(access, operation, from, &restarts).await
        {
            let interrupt = match outcome {
                Ok(output) => return settled(access, operation, output).await,
                Err(interrupt) => interrupt,
            };
            from = restarts.start_after(&interrupt);
            restarts.back_off(&access.context().worker, interrupt).await?;
        }
    }
}

/// The answer of an operation that was done here, once it lasts.
///
/// # Errors
/// As [`settle`](crate::access::FastPath::settle).
#[inline]
pub async fn settled<A: Access, O: Operation<Plugin = A::Plugin>>(
    access: &A,
    _operation: &O,
    output: O::Output,
) -> Result<O::Output, Error> {
    if !O::READS_ONLY {
        access.settle().await?;
    }
    Ok(output)
}

/// What [`hold`] answers: nothing where holding copies makes no difference.
pub type Held<'a, T> = Pin<Box<dyn Future<Output = Option<Result<T, Interrupt>>> + 'a>>;

/// An attempt that holds copies of its pages, where that makes a difference. Boxed: it is rare.
#[cold]
#[inline(never)]
pub fn hold<'a, A: Access, O: Operation<Plugin = A::Plugin>>(
    access: &'a A,
    operation: &'a O,
    from: Start,
    restarts: &Restarts,
) -> Held<'a, O::Output> {
    let has_lost_to_others = !restarts.loses_pages(false);
    Box::pin(async move {
        match access.run_holding(operation, from).await? {
            // The cache may have room for all of them.
            Err(Interrupt::Failed(error)) if has_lost_to_others && matches!(*error, Error::TooManyPages { .. }) => {
                Some(Err(Interrupt::conflict()))
            }
            outcome => Some(outcome),
        }
    })
}

/// Best-effort cleanup behind an operation that has had its effect: repeats an attempt so many times at most, whatever comes of
/// it. What cannot be done now, because of others or of a damaged page, is left to a later operation.
pub async fn clean_up(worker: &Handle, attempts_max: u32, mut attempt: impl AsyncFnMut() -> Result<(), Interrupt>) {
    for number in 0..attempts_max {
        match attempt().await {
            Ok(()) => return,
            Err(Interrupt::Restart(_)) => worker.back_off(number).await,
            Err(interrupt) => return tracing::debug!(?interrupt, "left something to be cleaned up"),
        }
    }
}

/// Repeats an attempt for as long as it asks for a restart, backing off more and more. No page that an attempt meets is reused before
/// the attempt has ended.
///
/// # Errors
/// What the attempt failed with; [`Error::Inconsistent`] if it met stale pages many times in a row.
pub async fn retry<T>(worker: &Handle, mut attempt: impl AsyncFnMut() -> Result<T, Interrupt>) -> Result<T, Error> {
    let mut restarts = Restarts::default();
    loop {
        let pin = worker.pin();
        let outcome = attempt().await;
        drop(pin);
        match outcome {
            Ok(output) => return Ok(output),
            Err(interrupt) => restarts.back_off(worker, interrupt).await?,
        }
    }
}

/// [`retry`], and again where requests fail: for what must not be left undone.
///
/// # Errors
/// What the attempt failed with, if it is of no use to try again: a memory server is lost, say, or registering memory was refused
/// 20 times.
pub async fn persist<T>(
    worker: &Handle,
    mut attempt: impl AsyncFnMut() -> Result<T, Interrupt>,
) -> Result<T, Box<Error>> {
    let (mut failures, mut refusals) = (0, 0);
    loop {
        match retry(worker, &mut attempt).await {
            Ok(output) => return Ok(output),
            // Of a step on the way. What it was about is settled.
            Err(Error::InstallUnknown { .. }) => worker.back_off(0).await,
            // Others give theirs back.
            Err(Error::Fabric(FabricError::RegistrationRefused { .. })) if refusals < REFUSALS_MAX => {
                worker.back_off(refusals).await;
                refusals += 1;
            }
            Err(error) => worker.before_trying_again(Box::new(error), &mut failures).await?,
        }
    }
}

/// The attempts so far.
#[derive(Debug, Default)]
pub struct Restarts {
    root: Option<RemotePtr>,
    count: u32,
    fruitless_in_a_row: u32,
    repeats_in_a_row: u32,
    moves_in_a_row: u32,
    conflicts_in_a_row: u32,
}

impl Restarts {
    /// Those of an operation that begins at this root. One that asks for what lies above, or to come again, time after time,
    /// fails with [`Error::Inconsistent`].
    pub fn from_root(root: RemotePtr) -> Self {
        Self { root: Some(root), ..Self::default() }
    }

    /// Whether several attempts in a row have lost pages to the cache: then one should [`hold`] copies. So should now and then one that
    /// only reads, and loses them to others who change them. Not each: it may be for want of room, and copies take more of that.
    #[inline]
    pub fn loses_pages(&self, reads_only: bool) -> bool {
        let conflicts = if reads_only { self.conflicts_in_a_row } else { 0 };
        self.moves_in_a_row >= LOSSES_BEFORE_HOLDING || conflicts > 0 && conflicts.is_multiple_of(LOSSES_BEFORE_HOLDING)
    }

    /// Where the attempt after an interrupted one begins.
    pub fn start_after(&mut self, interrupt: &Interrupt) -> Start {
        let is_move = matches!(interrupt, Interrupt::Restart(Cause::Moved));
        let is_conflict = matches!(interrupt, Interrupt::Restart(Cause::Conflict));
        let repeats = is_move || is_conflict || matches!(interrupt, Interrupt::Restart(Cause::Again | Cause::Above));
        self.moves_in_a_row = if repeats { self.moves_in_a_row + u32::from(is_move) } else { 0 };
        self.conflicts_in_a_row = if repeats { self.conflicts_in_a_row + u32::from(is_conflict) } else { 0 };
        self.repeats_in_a_row = if repeats { self.repeats_in_a_row + 1 } else { 0 };
        let meets_old = repeats && self.repeats_in_a_row.is_multiple_of(REPEATS_BEFORE_ANEW);
        let is_stale = matches!(interrupt, Interrupt::Restart(Cause::Stale { .. }));
        if is_stale || meets_old { Start::Anew } else { Start::Root }
    }

    /// Waits until it is time for another attempt, if `interrupt` asks for one. Boxed: it is rare, and as part of the caller's
    /// future it would slow down what is not.
    #[cold]
    #[inline(never)]
    ///
    /// # Errors
    /// What the attempt failed with; [`Error::Inconsistent`] if many in a row met stale pages, or were to come again.
    pub fn back_off<'a>(
        &'a mut self,
        worker: &'a Handle,
        interrupt: Interrupt,
    ) -> Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>> {
        Box::pin(async move {
            let is_unready = matches!(interrupt, Interrupt::Restart(Cause::Again | Cause::Above));
            // Together: on a damaged page either can follow the other for ever.
            self.fruitless_in_a_row = self.fruitless_in_a_row.saturating_add(1);
            let gives_up = self.fruitless_in_a_row > FRUITLESS_MAX;
            match interrupt {
                Interrupt::Failed(error) => return Err(*error),
                Interrupt::Restart(cause @ (Cause::Again | Cause::Above)) => {
                    if let Some(page) = self.root.filter(|_| gives_up) {
                        let why = match cause {
                            Cause::Above => "operations that begin at it need pages above it",
                            _ => "operations make room below it, and do not find it",
                        };
                        return Err(Error::Inconsistent { page, why });
                    }
                }
                Interrupt::Restart(Cause::Conflict | Cause::Moved) => self.fruitless_in_a_row = 0,
                Interrupt::Restart(Cause::Stale { page, why }) if gives_up => {
                    return Err(Error::Inconsistent { page, why });
                }
                Interrupt::Restart(Cause::Stale { .. }) => {}
                Interrupt::Ship(_) => return Err(Error::Malformed("an access without an engine asked to ship")),
            }
            if !is_unready {
                bump(&worker.counts().restarts);
            }
            worker.back_off(self.count).await;
            self.count = self.count.saturating_add(1);
            Ok(())
        })
    }
}
