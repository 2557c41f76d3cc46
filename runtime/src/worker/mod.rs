//! A worker: one thread with an endpoint, an executor, a clock, a random source and counters of its own.
//!
//! Remote access takes microseconds, so a worker keeps many operations in flight: each is a task, and a *turn* polls the
//! ready tasks, sends all that they posted with one doorbell, and collects completions, which make tasks ready again.
//! Posting is eager ([`Handle::read`] and the like return a [`Posted`] future), so a task overlaps requests by posting
//! several before it awaits the first. Nothing here takes a lock or reads the clock.
//!
//! [`Worker`] owns all that; the cheap [`Handle`] is what tasks and structures keep. When the worker is dropped, tasks
//! are dropped too, except changes that hold remote locks: those run to their end first.

pub(crate) mod executor;
mod handle;
mod messages;
pub(crate) mod ops;
mod protocols;
mod timers;
mod trips;
mod turns;

use std::{
    cell::{Cell, RefCell},
    future::Future,
    ops::Deref,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::pin,
    rc::Rc,
    sync::{
        Arc as StdArc,
        atomic::{AtomicBool as StdAtomicBool, Ordering as StdOrdering},
    },
    task::{Context, Poll, Wake, Waker},
};

use rand::{SeedableRng, rngs::SmallRng};

use self::{executor::Executor, ops::InFlight, timers::Timers, turns::Turns};
pub use self::{
    executor::{ReadyBits, Task},
    handle::YieldNow,
    ops::Posted,
    turns::Turn,
};
pub(crate) use crate::counters;
use crate::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    counters::CounterCells,
    epoch::LocalEpoch,
    error::Error,
    fabric::{Capabilities, Completion, Endpoint, Error as FabricError, Request},
    free_pages::LocalPages,
    messaging::{CONNECTION_TICKET, Channels},
    redo::WorkerRings,
    remote::CorruptPages,
    shared::Shared,
    sync::{Arc, lock, yield_thread},
};
pub use crate::{
    counters::{Counters, Named},
    remote,
};

/// Tasks polled between two doorbells. All ready tasks before one doorbell would march in step, and wait in step; a
/// doorbell for each would cost more than it brings.
const TASKS_PER_EXCHANGE: usize = 6;

/// Idle turns before a worker offers its core to other threads at each further one.
const IDLE_TURNS_MAX: u32 = 200;

#[derive(Debug)]
pub(crate) struct Inner {
    // Before the buffers: an endpoint goes before the memory that is registered with it.
    pub(crate) endpoint: RefCell<Box<dyn Endpoint>>,
    pub(crate) outbox: RefCell<Vec<Request>>,
    arrived: RefCell<Vec<Completion>>,
    in_flight: InFlight,
    pub(crate) executor: Executor,
    buffers: Buffers,
    pub(crate) channels: Channels,
    pub(crate) capabilities: Capabilities,
    pub(crate) counters: CounterCells,
    rng: RefCell<SmallRng>,
    pub(crate) clock: Clock,
    timers: Timers,
    /// A task has waited in vain for a while: other threads get the core when this turn is over.
    yields: Cell<bool>,
    epoch: LocalEpoch,
    pages: LocalPages,
    rings: WorkerRings,
    pub(crate) corrupt: RefCell<CorruptPages>,
    turns: Turns,
    pub(crate) compute: Arc<Shared>,
    /// Which worker of its compute server it is.
    pub(crate) number: u32,
    running: Cell<bool>,
    /// Nobody turns it any more; handles may still be about.
    pub(crate) ended: Cell<bool>,
    counted: bool,
}

impl Inner {
    /// Rings the doorbell for what was posted and collects completions; false if there was neither. The `last` one of a turn
    /// sends the messages that waited for company.
    fn exchange(&self, last: bool) -> bool {
        let mut news = false;
        if !self.channels.is_empty() {
            news = self.channels.turn(self, last);
        }
        let mut progress = news | self.ring();
        let mut arrived = self.arrived.borrow_mut();
        self.endpoint.borrow_mut().poll(&mut arrived);
        for completion in arrived.drain(..) {
            progress = true;
            if completion.ticket.0 & CONNECTION_TICKET != 0 {
                self.channels.complete(completion);
            } else {
                self.in_flight.complete(completion, &self.executor);
            }
        }
        progress
    }

    /// Sends what was posted, with one doorbell; false if nothing was.
    fn ring(&self) -> bool {
        let mut outbox = self.outbox.borrow_mut();
        if outbox.is_empty() {
            return false;
        }
        if self.compute.is_fallen() {
            // A connection that is made anew must not let in what was cut off.
            let fail = |Request { ticket, .. }| Completion { ticket, outcome: Err(Box::new(self.compute.fallen())) };
            self.arrived.borrow_mut().extend(outbox.drain(..).map(fail));
        } else {
            self.endpoint.borrow_mut().ring(&mut outbox);
        }
        true
    }

    pub(crate) fn registered_buffer(&self, words: usize) -> Result<Buffer, FabricError> {
        // SAFETY: the memory lives as long as `buffers`, which are dropped after the endpoint; only buffers refer to it.
        self.buffers.take(words, |base, words| unsafe { self.endpoint.borrow_mut().register(base, words) })
    }
}

/// The owner of a worker; see the [module](self). Not `Send`: make it on the thread that runs it.
#[derive(Debug)]
pub struct Worker {
    handle: Handle,
}

/// A way to a worker, for its tasks and structures.
#[derive(Debug, Clone)]
pub struct Handle(Rc<Inner>);

impl Deref for Worker {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Worker {
    /// A worker that counts as one of the compute server's.
    pub(crate) fn new(compute: &Arc<Shared>, number: u32, seed: u64, clock: Clock) -> Result<Self, Error> {
        Self::make(compute, number, seed, clock, true)
    }

    /// A worker for the compute server's own upkeep: its requests are in nobody's statistics.
    pub(crate) fn housekeeping(compute: &Arc<Shared>, clock: Clock) -> Result<Self, Error> {
        Self::make(compute, u32::MAX, 0, clock, false)
    }

    fn make(compute: &Arc<Shared>, number: u32, seed: u64, clock: Clock, counted: bool) -> Result<Self, Error> {
        let endpoint = compute.fabric.endpoint(seed ^ 0x656e_6470, clock.clone())?;
        let capabilities = endpoint.capabilities();
        let epoch = LocalEpoch::new(&compute.epoch);
        let inner = Inner {
            endpoint: RefCell::new(endpoint),
            outbox: RefCell::default(),
            arrived: RefCell::default(),
            in_flight: InFlight::default(),
            executor: Executor::default(),
            buffers: Buffers::default(),
            channels: Channels::default(),
            capabilities,
            counters: CounterCells::default(),
            rng: RefCell::new(SmallRng::seed_from_u64(seed)),
            clock,
            timers: Timers::default(),
            yields: Cell::new(false),
            epoch,
            pages: LocalPages::default(),
            rings: WorkerRings::default(),
            corrupt: RefCell::default(),
            turns: Turns::default(),
            compute: Arc::clone(compute),
            number,
            running: Cell::new(false),
            ended: Cell::new(false),
            counted,
        };
        Ok(Self { handle: Handle(Rc::new(inner)) })
    }

    /// Runs `future`, and whatever tasks there are, until it is ready. Keeps the thread busy meanwhile.
    ///
    /// # Panics
    /// If called from inside a task of this worker.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        struct Flag(StdAtomicBool);
        impl Wake for Flag {
            fn wake(self: StdArc<Self>) {
                self.0.store(true, StdOrdering::Release);
            }
        }
        let _running = Running::enter(&self.handle.0.running);
        let flag = StdArc::new(Flag(StdAtomicBool::new(true)));
        let waker = Waker::from(StdArc::clone(&flag));
        // Made before the future is pinned, so that it goes after that has dropped its pins.
        let _rests = RestsAtEnd(&self.handle.0.epoch);
        let mut future = pin!(future);
        let mut idle_turns = 0;
        loop {
            let mut progress = false;
            if flag.0.swap(false, StdOrdering::Acquire) {
                progress = true;
                if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                    // Others on this thread may wait for locks that a change under way holds.
                    self.finish_critical();
                    return output;
                }
            }
            progress |= self.turn();
            idle_turns = if progress { 0 } else { idle_turns + 1 };
            if idle_turns > IDLE_TURNS_MAX {
                yield_thread();
            } else if idle_turns > 0 {
                std::hint::spin_loop();
            }
        }
    }

    /// Runs `future` as [`Worker::block_on`] does, without keeping the thread: the worker has a turn each time that this is
    /// polled, which asks to be polled again until it is ready.
    ///
    /// While this is not polled the worker stands still, and so does what it has begun: who keeps it, or drops it, turns the worker until
    /// it is no more [unfinished](Worker::is_unfinished), or others wait for its locks and for its turn at a partition map.
    pub async fn drive<F: Future>(&self, future: F) -> F::Output {
        // As in `block_on`: there is no turn behind the last poll, nor behind one that is the last because this is dropped.
        let _rests = RestsAtEnd(&self.handle.0.epoch);
        let mut future = pin!(future);
        std::future::poll_fn(|cx| {
            let polled = future.as_mut().poll(cx);
            if polled.is_pending() {
                let _running = Running::enter(&self.handle.0.running);
                self.turn();
                cx.waker().wake_by_ref();
            }
            polled
        })
        .await
    }

    /// One turn: polls the ready tasks, rings the doorbell and collects completions, several times if many are ready. False
    /// if there was nothing to do. For executors that drive several workers, such as a simulator's.
    pub fn turn(&self) -> bool {
        let inner = &*self.handle.0;
        inner.timers.wake(&inner.clock);
        let mut progress = inner.executor.turn(TASKS_PER_EXCHANGE, || {
            inner.exchange(false);
        });
        progress |= inner.exchange(true);
        inner.epoch.rest();
        // Once for all tasks, and when what they post is on its way: on a busy machine each time is long, and some of them may hold
        // what other workers wait for.
        if inner.yields.take() {
            yield_thread();
        }
        progress
    }

    /// Whether the worker has tasks that must not be cut off, whose end [`block_on`](Worker::block_on) and dropping it wait for. One
    /// may wait for another worker's, as for the log of what they both own: who [turns](Worker::turn) several workers on one thread goes
    /// on until none of them has any.
    pub fn is_unfinished(&self) -> bool {
        self.handle.0.executor.critical() > 0
    }

    /// Runs the tasks that must not be cut off to their end. What they do under locks completes or fails at the fabric's
    /// pace. Virtual time goes on by itself here: whoever drives it is not asked.
    fn finish_critical(&self) {
        while self.is_unfinished() {
            if !self.turn() {
                self.next_due_ns().into_iter().for_each(|due_ns| self.handle.0.clock.skip_to(due_ns));
                yield_thread();
            }
        }
    }

    /// When the next completion or the end of a back-off is due on the worker's clock, if that is known.
    pub fn next_due_ns(&self) -> Option<u64> {
        let inner = &*self.handle.0;
        let completion = inner.endpoint.borrow().next_due_ns();
        completion.into_iter().chain(inner.timers.next_due_ns()).min()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let inner = &self.handle.0;
        inner.executor.drop_tasks();
        // Who waits for a task that has panicked panics, too. All others come to their end, and the worker leaves.
        let mut panicked = None;
        for _ in 0..=inner.executor.critical() {
            match catch_unwind(AssertUnwindSafe(|| self.finish_critical())) {
                Ok(()) => break,
                Err(payload) => panicked = panicked.or(Some(payload)),
            }
        }
        inner.executor.drop_tasks();
        inner.ended.set(true);
        inner.channels.close(&**inner);
        inner.pages.give_back(&inner.compute.pages);
        lock(&inner.compute.idle_rings).extend(inner.rings.take_all());
        inner.epoch.retire(&inner.compute.epoch);
        if inner.counted {
            Shared::worker_ended(&inner.compute, inner.counters.snapshot());
        }
        // While this unwinds already, a panic would end the process.
        if let Some(payload) = panicked
            && !std::thread::panicking()
        {
            resume_unwind(payload);
        }
    }
}

/// Has the epoch that a worker announces withdrawn: a worker that nobody turns any more would hold up the cluster's.
struct RestsAtEnd<'a>(&'a LocalEpoch);

impl Drop for RestsAtEnd<'_> {
    fn drop(&mut self) {
        self.0.rest();
    }
}

struct Running<'a>(&'a Cell<bool>);

impl<'a> Running<'a> {
    fn enter(running: &'a Cell<bool>) -> Self {
        assert!(!running.replace(true), "a worker was driven from inside one of its own tasks; await instead");
        Self(running)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}
