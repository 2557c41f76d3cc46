//! A worker that keeps many recorded operations in flight.
//!
//! Each of `in_flight` tasks draws operations from the worker's stream and runs them one after the other on the tree. An
//! operation may be dropped in mid-flight, after a random number of polls; its outcome is then unknown.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    io::Write,
    pin::pin,
    rc::Rc,
    task::Poll,
};

use anyhow::bail;
use farlink_runtime::{
    error::Error,
    fabric::Error as FabricError,
    messaging::Error as MessagingError,
    operation::Run,
    worker::{Handle, Worker},
};
use farlink_structures::map::{Map, OrderedMap};
use rand::RngExt;
use serde::{Deserialize, Serialize};

use crate::{
    history::{Op, Outcome, Recorder, now_ns},
    workload::{Part, Workload},
};

/// How many operations, and what becomes of them.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Operations in flight at a time.
    pub in_flight: usize,
    /// One operation in so many is dropped in mid-flight; 0 for none.
    pub drop_one_in: u32,
    /// Whether [`Error::PageDamaged`] is to be expected: somebody may be killed.
    pub damage_expected: bool,
    /// Whether the fabric fails now and then: what an operation cannot do about, it says.
    pub failures_expected: bool,
    /// When keys come and when they go.
    pub tides: Tides,
    /// The keys that the worker's compute server owns. Operations on others are for their owners: one in
    /// [`STRAY_ONE_IN`] is tried all the same, and has to be refused.
    pub part: Part,
}

/// How many operations that are for others come to one that is tried here.
pub const STRAY_ONE_IN: u32 = 64;

/// Operations after the last one, where failures are expected, of which one has to succeed; of other owners' keys most of them may be.
const RECOVERS_MAX: u32 = 1000;

/// A tide that empties and fills a tree of a thousand keys.
pub const TIDE_NS: u64 = 200_000_000;

/// How long keys come before they go again. At ebb inserts and upserts become removals, at flood removals become gets, for all
/// workers of the machine at once: so the tree grows and shrinks as a whole, and its pages split and merge all the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tides {
    /// Each of the first; 0 for a steady mix.
    pub first_ns: u64,
    /// Each of the last: on a slow machine the first may be too short to empty the tree.
    pub last_ns: u64,
}

impl Tides {
    /// A steady mix.
    pub const NONE: Self = Self { first_ns: 0, last_ns: 0 };

    /// The tide of who is this old. It turns at times when those of others, younger or older, turn too.
    fn at(self, age_ns: u64) -> u64 {
        const OF_A_LENGTH: u64 = 4;
        let grown = self.first_ns << (age_ns.checked_div(OF_A_LENGTH * self.first_ns).unwrap_or(0) + 1).ilog2();
        grown.min(self.last_ns).max(self.first_ns)
    }
}

/// What becomes of an operation at this time.
fn with_the_tide(op: Op, tide_ns: u64, time_ns: u64) -> Op {
    match (time_ns.checked_div(tide_ns).map(|tide| tide % 2), op) {
        (Some(0), Op::Remove { key }) => Op::Get { key },
        (Some(1), Op::Insert { key, .. } | Op::Upsert { key, .. }) => Op::Remove { key },
        _ => op,
    }
}

/// Whether an operation cannot help but fail with this on a fabric that fails: for want of memory or of a connection, or
/// because nobody can say what became of it.
pub(crate) fn is_the_fabrics(error: &Error) -> bool {
    match error {
        Error::Fabric(FabricError::RegistrationRefused { .. } | FabricError::RequestFailed { what: "CONNECT", .. })
        | Error::Messaging(MessagingError::OutcomeUnknown { .. })
        | Error::InstallUnknown { .. } => true,
        Error::OwnerLost { .. } => true,
        Error::OnServer { why, .. }
        | Error::NotBegun { why, .. }
        | Error::AtOwner { why, .. }
        | Error::NotRecorded { why } => why.contains("refuses to register"),
        _ => false,
    }
}

/// Polls after which an operation that is to be dropped is dropped, at most. A point operation takes about a dozen.
const POLLS_MAX: u32 = 24;

/// What a drive did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Operations begun.
    pub operations: u64,
    /// Those dropped in mid-flight.
    pub dropped: u64,
    /// Those that met a damaged page.
    pub damaged: u64,
    /// Those that failed with the fabric.
    pub failed: u64,
    /// Those refused because their keys are others'.
    pub strays: u64,
}

impl Tally {
    /// Those of which is known what they came to.
    fn known(&self) -> u64 {
        self.operations - self.dropped - self.damaged - self.failed
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.operations += other.operations;
        self.dropped += other.dropped;
        self.damaged += other.damaged;
        self.failed += other.failed;
        self.strays += other.strays;
    }
}

/// Runs one operation of a history on a tree. A scan stays within `part`.
///
/// # Errors
/// As the operation.
pub async fn apply<S: OrderedMap, A: Run<Plugin = S>>(tree: &Map<S, A>, op: Op, part: Part) -> Result<Outcome, Error> {
    Ok(match op {
        Op::Get { key } => Outcome::Value(tree.get(key).await?),
        Op::Insert { key, value } => Outcome::Inserted(tree.insert(key, value).await?),
        Op::Upsert { key, value } => Outcome::Value(tree.upsert(key, value).await?),
        Op::Update { key, value } => Outcome::Value(tree.update(key, value).await?),
        Op::Remove { key } => Outcome::Value(tree.remove(key).await?),
        Op::Scan { from, limit, descending: false } => {
            Outcome::Entries(tree.range(from..=part.high).take(limit as usize).await?.into())
        }
        Op::Scan { from, limit, descending: true } => {
            Outcome::Entries(tree.range(part.low..=from).descending().take(limit as usize).await?.into())
        }
    })
}

/// Runs operations until `stop` says so of what was done, and waits for those in flight.
///
/// # Errors
/// If an operation fails, but for damage that is expected, or the recorder does; if failures are expected, and nothing succeeds any more.
pub fn drive<S: OrderedMap, A: Run<Plugin = S> + Clone + 'static, W: Write + 'static>(
    worker: &Worker,
    tree: &Map<S, A>,
    workload: Workload,
    recorder: &Rc<Recorder<W>>,
    plan: Plan,
    stop: impl Fn(Tally) -> bool + 'static,
) -> anyhow::Result<Tally> {
    let lane = Rc::new(Lane {
        worker: Handle::clone(worker),
        tree: tree.clone(),
        workload: RefCell::new(workload),
        recorder: Rc::clone(recorder),
        plan,
        stop: Box::new(stop),
        tally: Cell::default(),
        failed: Cell::new(false),
    });
    let tasks: Vec<_> = (0..plan.in_flight).map(|_| worker.spawn(Rc::clone(&lane).run())).collect();
    worker.block_on(async {
        for task in tasks {
            task.await?;
        }
        if plan.failures_expected {
            lane.recover().await?;
        }
        Ok(lane.tally.get())
    })
}

struct Lane<S, A, W: Write> {
    worker: Handle,
    tree: Map<S, A>,
    workload: RefCell<Workload>,
    recorder: Rc<Recorder<W>>,
    plan: Plan,
    stop: Box<dyn Fn(Tally) -> bool>,
    tally: Cell<Tally>,
    failed: Cell<bool>,
}

impl<S: OrderedMap, A: Run<Plugin = S>, W: Write> Lane<S, A, W> {
    async fn run(self: Rc<Self>) -> anyhow::Result<()> {
        let begun_ns = now_ns();
        while !(self.stop)(self.tally.get()) && !self.failed.get() {
            let drawn = self.workload.borrow_mut().next_op();
            let now_ns = now_ns();
            let op = with_the_tide(drawn, self.plan.tides.at(now_ns - begun_ns), now_ns);
            let outcome = match op {
                Op::Scan { from, .. } if !self.plan.part.contains(from) => continue,
                _ if op.key().is_some_and(|key| !self.plan.part.contains(key)) => self.stray(op).await,
                _ => self.run_one(op).await,
            };
            self.failed.set(self.failed.get() || outcome.is_err());
            outcome?;
        }
        Ok(())
    }

    /// Goes on until an operation succeeds: each failure is to be recovered from.
    async fn recover(&self) -> anyhow::Result<()> {
        let before = self.tally.get().known();
        for _ in 0..RECOVERS_MAX {
            let op = self.workload.borrow_mut().next_op();
            if op.key().is_some_and(|key| self.plan.part.contains(key)) {
                self.run_one(op).await?;
            }
            if self.tally.get().known() > before {
                return Ok(());
            }
        }
        bail!("of the last {RECOVERS_MAX} operations none has succeeded: {:?}", self.tally.get())
    }

    /// An operation that is for another compute server.
    async fn stray(&self, op: Op) -> anyhow::Result<()> {
        if self.worker.random(|rng| !rng.random_ratio(1, STRAY_ONE_IN)) {
            return Ok(());
        }
        self.count(|tally| tally.strays += 1);
        match apply(&self.tree, op, self.plan.part).await {
            Err(Error::OutsidePartition { .. }) => Ok(()),
            // It came not even so far.
            Err(error) if self.plan.failures_expected && is_the_fabrics(&error) => Ok(()),
            outcome => bail!("{op:?} was not refused: {outcome:?}"),
        }
    }

    async fn run_one(&self, op: Op) -> anyhow::Result<()> {
        let ticket = self.recorder.begin(op)?;
        self.count(|tally| tally.operations += 1);
        let drop_after = self.worker.random(|rng| {
            let drops = self.plan.drop_one_in != 0 && rng.random_ratio(1, self.plan.drop_one_in);
            drops.then(|| rng.random_range(1..=POLLS_MAX))
        });
        let applied = apply(&self.tree, op, self.plan.part);
        let outcome = match drop_after {
            Some(polls) => polled(polls, applied).await,
            None => Some(applied.await),
        };
        let known = match outcome {
            Some(Ok(outcome)) => outcome,
            Some(Err(Error::PageDamaged { .. })) if self.plan.damage_expected => {
                self.count(|tally| tally.damaged += 1);
                Outcome::Unknown
            }
            Some(Err(error)) if self.plan.failures_expected && is_the_fabrics(&error) => {
                self.count(|tally| tally.failed += 1);
                Outcome::Unknown
            }
            Some(Err(error)) => return Err(anyhow::Error::new(error).context(format!("{op:?} failed"))),
            None => {
                self.count(|tally| tally.dropped += 1);
                Outcome::Unknown
            }
        };
        self.recorder.end(ticket, known)?;
        Ok(())
    }

    fn count(&self, add: impl FnOnce(&mut Tally)) {
        let mut tally = self.tally.get();
        add(&mut tally);
        self.tally.set(tally);
    }
}

/// The output of `future` if it is ready within so many polls; else the future is dropped.
pub async fn polled<F: Future>(mut polls: u32, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => {
            polls -= 1;
            if polls == 0 { Poll::Ready(None) } else { Poll::Pending }
        }
    })
    .await
}
