//! An access for tests that does everything to an operation that [`Access`] allows, and refuses what it forbids.
//!
//! [`Strict`] runs operations over another access. From a seed, and in every method, it
//!
//! - lets other tasks run;
//! - ends the attempt with a conflict, most of all after a change: code that lets an attempt end behind its effect shows;
//! - gives the function of a read words that belong together in no way, and then refuses the result;
//! - hands out old copies of pages above level 0, as a cache of inner pages may ([`Rules::old_copies`]);
//! - runs the rest of an operation, from an [`Access::descend`] on, as the memory server of the page would
//!   ([`Rules::ships`]): parameters and answer as words, no page that is not of a lower level than the one that leads
//!   there, changes of one page only.
//!
//! It panics, with the operation's name, if an operation that says that it only reads changes a page, if one holds more pages
//! than [`Rules::pages_max`], if one that was shipped comes back behind a change, and, if it can look at the structure ([`Strict::looking`]), if an attempt ends behind an effect
//! that others can see.

mod attempt;

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    rc::Rc,
};

use farlink_runtime::{
    access::{Access, Cause, Interrupt, Operation, Start},
    error::Error,
    operation::{Restarts, Run, settled},
    wire::{Wire, decode_all},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use self::attempt::{Attempt, Missing};

/// Attempts at a shipped operation, as a memory server makes them.
const SHIPPED_ATTEMPTS_MAX: u32 = 8;

/// What [`Strict`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Decides all that is random.
    pub seed: u64,
    /// Pages above level 0 may be older than the attempt. For an access whose pages are private copies.
    pub old_copies: bool,
    /// The rest of an operation may be shipped. As in an owner's cache, nobody else changes the structure meanwhile.
    pub ships: bool,
    /// Attempts end with conflicts though there is none.
    pub conflicts: bool,
    /// Pages that an operation holds at a time, at most.
    pub pages_max: usize,
}

impl Rules {
    /// All that is possible where nobody else changes the structure.
    pub const fn alone(seed: u64) -> Self {
        Self { seed, old_copies: true, ships: true, conflicts: true, pages_max: usize::MAX }
    }
}

/// What a [`Strict`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Old copies handed out.
    pub old_copies: u64,
    /// Operations, and parts of operations, that were shipped and answered.
    pub shipped: u64,
    /// Those that came back undone.
    pub came_back: u64,
    /// Conflicts that were none.
    pub conflicts: u64,
    /// The most pages that an operation has held at a time.
    pub pages_held: usize,
}

type Digest = Pin<Box<dyn Future<Output = Result<u64, Error>>>>;
type Look = Box<dyn Fn() -> Digest>;

struct Shared<A> {
    inner: A,
    rules: Rules,
    rng: RefCell<SmallRng>,
    /// A copy of each page above level 0 that was read and may be handed out again, by its link.
    kept: RefCell<HashMap<u64, Vec<u64>>>,
    look: Option<Look>,
    counts: Cell<Counts>,
}

/// Runs operations over another access, as badly as they may be treated; see the [module](self).
pub struct Strict<A>(Rc<Shared<A>>);

impl<A> Clone for Strict<A> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<A> fmt::Debug for Strict<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Strict({:?}, {:?})", self.0.rules, self.0.counts.get())
    }
}

impl<A: Access + 'static> Strict<A> {
    /// Over this access.
    pub fn new(inner: A, rules: Rules) -> Self {
        let rng = RefCell::new(SmallRng::seed_from_u64(rules.seed));
        let (kept, counts) = (RefCell::default(), Cell::default());
        Self(Rc::new(Shared { inner, rules, rng, kept, look: None, counts }))
    }

    /// The same, for as long as nobody else changes the structure: it looks at all that can be seen of the structure, which
    /// `look` makes one number, before each operation that changes it, and when an attempt ends early.
    ///
    /// # Panics
    /// If operations run over it already.
    #[must_use]
    pub fn looking(mut self, look: impl Fn() -> Digest + 'static) -> Self {
        Rc::get_mut(&mut self.0).expect("nobody else uses it yet").look = Some(Box::new(look));
        self
    }

    /// The access below.
    pub fn inner(&self) -> &A {
        &self.0.inner
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.0.counts.get()
    }
}

impl<A: Access + 'static> Shared<A> {
    fn one_in(&self, many: u32) -> bool {
        self.rng.borrow_mut().random_ratio(1, many)
    }

    fn count(&self, count: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        count(&mut counts);
        self.counts.set(counts);
    }

    async fn looked_at(&self) -> Result<Option<u64>, Error> {
        match &self.look {
            Some(look) => Ok(Some(look().await?)),
            None => Ok(None),
        }
    }

    /// Panics if an attempt that has ended early has had an effect.
    async fn require_unseen(&self, before: Option<u64>, attempt: &Attempt<A>, why: &Interrupt) -> Result<(), Error> {
        if before.is_none() || attempt.changes.replace(0) == 0 || matches!(why, Interrupt::Failed(_)) {
            return Ok(());
        }
        let Attempt { operation, .. } = attempt;
        let after = self.looked_at().await?;
        assert!(
            before == after,
            "{operation}: an attempt has ended ({why}) behind an effect that others can see: what it did it does again"
        );
        Ok(())
    }

    /// Runs an operation as the memory server of a page would; `None` if it is to be done here. `before`: what could be seen then, if only
    /// the operation has changed anything since.
    async fn ship<O: Operation<Plugin = A::Plugin>>(
        self: &Rc<Self>,
        operation: &O,
        missing: Missing,
        before: &dyn Fn() -> Option<u64>,
    ) -> Result<Option<O::Output>, Error> {
        let mut sent: O = sent(operation, O::NAME);
        sent.limit();
        let about = sent.scope();
        let server = Attempt::new(self, O::NAME, O::READS_ONLY).below(missing, about);
        for _ in 0..SHIPPED_ATTEMPTS_MAX {
            let interrupt = match sent.run(&server, Start::Page(missing.page)).await {
                Ok(output) => {
                    self.count(|counts| counts.shipped += 1);
                    return Ok(Some(self::sent(&output, O::NAME)));
                }
                Err(interrupt) => interrupt,
            };
            self.require_unseen(before(), &server, &interrupt).await?;
            match interrupt {
                Interrupt::Failed(error) if !server.declined.get() => return Err(*error),
                Interrupt::Restart(Cause::Conflict) if !server.declined.get() => {}
                _ => break,
            }
        }
        assert!(
            !server.has_written.get(),
            "{}: has changed a page where it was shipped to, and came back: whoever has sent it keeps an old copy; as a memory server it \
             makes one change, the last thing it does",
            O::NAME
        );
        self.count(|counts| counts.came_back += 1);
        Ok(None)
    }

    async fn run<O: Operation<Plugin = A::Plugin>>(self: &Rc<Self>, operation: &O) -> Result<O::Output, Error> {
        let worker = self.inner.context().worker.clone();
        let _pin = worker.pin();
        let before = if O::READS_ONLY { None } else { self.looked_at().await? };
        let attempt = Attempt::new(self, O::NAME, O::READS_ONLY);
        let mut from = match operation.try_sync(&attempt) {
            Ok(output) => return Ok(output),
            Err(from) => from,
        };
        let mut restarts = Restarts::from_root(self.inner.context().structure.root);
        loop {
            let interrupt = match operation.run(&attempt, from).await {
                Ok(output) => return settled(&self.inner, operation, output).await,
                Err(interrupt) => interrupt,
            };
            from = restarts.start_after(&interrupt);
            self.require_unseen(before, &attempt, &interrupt).await?;
            match (interrupt, attempt.missing.take()) {
                (Interrupt::Ship(_), Some(missing)) => {
                    if let Some(output) = self.ship(operation, missing, &|| before).await? {
                        return Ok(output);
                    }
                    attempt.may_ship.set(false);
                }
                (interrupt, _) => restarts.back_off(&worker, interrupt).await?,
            }
        }
    }
}

/// What comes of a value that is sent.
///
/// # Panics
/// If it is not the same at the other end.
pub fn sent<T: Wire>(value: &T, operation: &str) -> T {
    let mut words = Vec::new();
    value.encode(&mut words);
    decode_all(&words).unwrap_or_else(|error| panic!("{operation} does not survive being sent: {error}"))
}

impl<A: Access + 'static> Run for Strict<A> {
    type Plugin = A::Plugin;

    async fn execute<O: Operation<Plugin = A::Plugin>>(&self, operation: &O) -> Result<O::Output, Error> {
        self.0.run(operation).await
    }
}
