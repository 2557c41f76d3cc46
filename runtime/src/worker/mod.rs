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
    pin::{Pin, pin},
    rc::Rc,
    sync::{
        Arc as StdArc,
        atomic::{AtomicBool as StdAtomicBool, Ordering as StdOrdering},
    },
    task::{Context, Poll, Wake, Waker},
};

use rand::{RngExt, SeedableRng, rngs::SmallRng};

use self::{
    executor::Executor,
    ops::{InFlight, ReadAgain},
    timers::Timers,
    turns::Turns,
};
pub use self::{
    executor::{ReadyBits, Task},
    ops::Posted,
    turns::Turn,
};
pub(crate) use crate::counters;
use crate::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    counters::{CounterCells, add, bump},
    epoch::{LocalEpoch, Pin as EpochPin},
    error::Error,
    fabric::{Capabilities, Completion, Endpoint, Error as FabricError, Liveness, Request, Verb},
    free_pages::{FreePage, LocalPages},
    local_locks::{LocalLocks, SlotGuard},
    messaging::{CONNECTION_TICKET, Channels, Tasks},
    ptr::{RemotePtr, ServerId},
    redo::WorkerRings,
    remote::{CorruptPages, write_words},
    shared::Shared,
    sync::{Arc, lock, yield_thread},
};
pub use crate::{counters::Counters, remote};

/// Tasks polled between two doorbells. All ready tasks before one doorbell would march in step, and wait in step; a
/// doorbell for each would cost more than it brings.
const TASKS_PER_EXCHANGE: usize = 6;

/// The longest first back-off; each next one may be twice as long.
const BACK_OFF_NS: u64 = 50;

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

impl Handle {
    /// Starts a task on the worker's thread. If the task that starts it must not be cut off, it is not cut off either: the first may
    /// wait for it.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let (task, handle) = Task::new(future, &self.0.executor.trips);
        self.0.executor.spawn_boxed(task, self.0.executor.runs_critical());
        handle
    }

    /// Starts a task that must not be cut off: dropping the worker waits for it. For changes that hold remote locks, for
    /// pages on their way from one holder to another, and for taking back what a failed operation has left.
    pub fn spawn_to_end<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let (task, handle) = Task::new(future, &self.0.executor.trips);
        if self.0.ended.get() {
            tracing::warn!("a task came after its worker's end and is dropped; drop futures before their worker");
        } else {
            self.0.executor.spawn_boxed(task, true);
        }
        handle
    }

    #[inline(always)]
    fn post<T: ops::FromDone>(&self, at: RemotePtr, verb: Verb, again: T::Again) -> Posted<T> {
        Posted::pending(self.clone(), self.post_request(at, verb), self.executor().trips.depth(), again)
    }

    #[inline(always)]
    fn post_request(&self, at: RemotePtr, verb: Verb) -> usize {
        add(&self.0.counters.bytes, verb.bytes() as u64);
        let slot = self.0.in_flight.open();
        self.0.outbox.borrow_mut().push(Request { ticket: ops::ticket(slot), at, verb });
        slot
    }

    /// Posts a READ of `words` (1 to [`BUFFER_WORDS_MAX`](crate::buffer::BUFFER_WORDS_MAX)) 8-byte words. If its connection
    /// breaks it is posted again: it fails only if the memory server is lost, or no buffer can be had.
    pub fn read(&self, at: RemotePtr, words: usize) -> Posted<Buffer> {
        bump(&self.0.counters.reads);
        match self.buffer(words) {
            Ok(buffer) => self.post(at, Verb::Read(buffer), ReadAgain { at, words }),
            Err(error) => Posted::refused(error),
        }
    }

    /// Posts a WRITE of a whole buffer.
    pub fn write(&self, at: RemotePtr, buffer: Buffer) -> Posted<()> {
        bump(&self.0.counters.writes);
        self.post(at, Verb::Write(buffer), ())
    }

    /// Posts a WRITE of a whole buffer to where nobody else writes. If its connection breaks, it is written again: it
    /// fails only if the memory server is lost, or no buffer can be had.
    pub fn write_private(&self, at: RemotePtr, words: Buffer) -> impl Future<Output = Result<(), Box<Error>>> + use<> {
        let kept = self.buffer(words.len()).map(|mut kept| {
            kept.copy_from_slice(&words);
            kept
        });
        let posted = kept.map(|kept| (kept, self.write(at, words)));
        let handle = self.clone();
        async move {
            let (kept, mut posted) = posted?;
            let mut attempt = 0;
            while let Err(error) = posted.await {
                handle.before_trying_again(error, &mut attempt).await?;
                posted = match handle.buffer(kept.len()) {
                    Ok(mut again) => {
                        again.copy_from_slice(&kept);
                        handle.write(at, again)
                    }
                    // It can do without.
                    Err(_) => {
                        let words = kept.iter().enumerate().map(|(index, &word)| (at.word(index), word));
                        return write_words(&handle, words.collect()).await;
                    }
                };
            }
            Ok(())
        }
    }

    /// Posts a WRITE of these words (1 to [`BUFFER_WORDS_MAX`](crate::buffer::BUFFER_WORDS_MAX)).
    pub fn write_words(&self, at: RemotePtr, words: &[u64]) -> Posted<()> {
        if let &[word] = words {
            return self.write_word(at, word);
        }
        match self.buffer(words.len()) {
            Ok(mut buffer) => {
                buffer.copy_from_slice(words);
                self.write(at, buffer)
            }
            Err(error) => Posted::refused(error),
        }
    }

    /// Posts a WRITE of one word, sent inline.
    pub fn write_word(&self, at: RemotePtr, word: u64) -> Posted<()> {
        bump(&self.0.counters.writes);
        self.post(at, Verb::WriteWord(word), ())
    }

    /// Posts a compare-and-swap; resolves to the previous value.
    pub fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> Posted<u64> {
        bump(&self.0.counters.atomics);
        self.post(at, Verb::CompareSwap { expected, new }, ())
    }

    /// Posts a wrapping fetch-and-add; resolves to the previous value.
    pub fn fetch_add(&self, at: RemotePtr, amount: u64) -> Posted<u64> {
        bump(&self.0.counters.atomics);
        self.post(at, Verb::FetchAdd(amount), ())
    }

    /// Reads one word by an atomic: it needs no buffer, so it is not refused for want of memory, and what it returns is no
    /// older than this call. If its connection breaks it is posted again. Not for a word that others may WRITE meanwhile,
    /// unless [`Capabilities::atomic_against_writes`].
    ///
    /// # Errors
    /// If the memory server is lost.
    pub async fn load(&self, at: RemotePtr) -> Result<u64, Box<Error>> {
        let mut attempt = 0;
        loop {
            match self.fetch_add(at, 0).await {
                Err(error) => self.before_trying_again(error, &mut attempt).await?,
                loaded => return loaded,
            }
        }
    }

    /// Waits before a request is posted again that has failed; `attempt` counts such waits.
    ///
    /// # Errors
    /// The error, if it is of no use to try again.
    pub async fn before_trying_again(&self, error: Box<Error>, attempt: &mut u32) -> Result<(), Box<Error>> {
        if !error.may_be_tried_again() {
            return Err(error);
        }
        tracing::debug!(%error, attempt, "a request is posted again");
        self.back_off(*attempt).await;
        *attempt = attempt.saturating_add(1);
        Ok(())
    }

    /// A registered buffer of `words` (1 to [`BUFFER_WORDS_MAX`](crate::buffer::BUFFER_WORDS_MAX)), with arbitrary contents.
    ///
    /// # Errors
    /// If the fabric refuses to register more memory.
    pub fn buffer(&self, words: usize) -> Result<Buffer, Error> {
        Ok(self.0.registered_buffer(words)?)
    }

    /// Sends what was posted now, and not with the turn's doorbell: for who has something to do before it waits.
    pub(crate) fn ring(&self) {
        self.0.ring();
    }

    /// Notes that a task is about to wait for the fabric. What overlaps with what was noted before is the same round trip.
    pub fn count_round_trip(&self) {
        if self.executor().trips.begins() {
            bump(&self.0.counters.round_trips);
        }
    }

    /// Whether others still count this compute server as alive, as far as can be told here: to be asked when a request to a memory
    /// server has failed. See [`OwnerClaim::holds`](crate::fabric::OwnerClaim::holds) for what it takes.
    ///
    /// # Errors
    /// [`FabricError::TakenForDead`] if they do not: from then on nothing of this compute server goes out, and all that it owned is ended.
    pub fn check_standing(&self) -> Result<(), Error> {
        self.compute().check_standing()
    }

    /// The counts since the worker's start.
    pub fn counters(&self) -> Counters {
        self.0.counters.snapshot()
    }

    /// The compute server that the worker belongs to.
    pub fn owner(&self) -> crate::lock::OwnerId {
        self.0.compute.owner
    }

    /// Whether another compute server is dead: nothing that it does arrives any more. One that is being found out may not be yet.
    /// Blocks for an exchange with each memory server over verbs, for a second at most where one does not answer.
    pub fn is_dead(&self, owner: crate::lock::OwnerId) -> bool {
        owner != self.owner() && self.compute().fabric.liveness(owner) == Liveness::Dead
    }

    /// How long it waits for an owner that lives and does not go on; see [`ComputeOptions`](crate::compute::ComputeOptions::lock_wait).
    pub fn lock_wait_limit(&self) -> Option<std::time::Duration> {
        self.0.compute.lock_wait
    }

    /// How many memory servers the cluster has.
    pub fn servers(&self) -> usize {
        self.0.compute.fabric.servers()
    }

    /// What the fabric guarantees.
    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities
    }

    /// The worker's clock.
    pub fn clock(&self) -> &Clock {
        &self.0.clock
    }

    /// Uses the worker's random source, which its seed decides.
    pub fn random<T>(&self, draw: impl FnOnce(&mut SmallRng) -> T) -> T {
        draw(&mut self.0.rng.borrow_mut())
    }

    /// The memory server whose turn it is: what can be anywhere goes to one after another.
    pub fn next_server(&self) -> ServerId {
        ServerId::new(self.pages().next_turn(self.servers()) as u16).expect("a memory server has a number")
    }

    /// The last epoch of the cluster that this compute server has seen. A page that is retired now is not reused before this
    /// has moved on.
    pub fn epoch_seen(&self) -> u64 {
        self.0.compute.epoch.seen()
    }

    /// Keeps every page that can be reached now from being reused until the pin is dropped, and until this turn of the worker
    /// ends. Cheap; an operation holds one for its whole run.
    #[inline]
    pub fn pin(&self) -> EpochPin {
        self.0.epoch.pin(&self.0.compute.epoch)
    }

    /// Whether the worker has come to its end: nothing that is waited for with it will come.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.ended.get()
    }

    /// Whether the worker has a task besides the one that asks: then waiting can be put to use.
    #[inline]
    pub fn has_other_tasks(&self) -> bool {
        self.0.executor.has_others()
    }

    /// Suspends once, so that other tasks of the worker run.
    pub fn yield_now(&self) -> YieldNow<'_> {
        YieldNow { executor: self.executor(), yielded: false }
    }

    /// Waits until the worker's clock shows this time. Other tasks run meanwhile; without any, other threads get the core.
    pub async fn sleep_until(&self, ns: u64) {
        self.0.timers.until(&self.0.clock, ns).await;
        self.0.yields.set(true);
    }

    /// Waits before the `attempt`th try (from 0): for a time of up to 3.2 us, longer and longer at random. From the fourth try
    /// on other threads get the core, once a turn.
    pub async fn back_off(&self, attempt: u32) {
        let wait_ns = self.random(|rng| rng.random_range(0..=BACK_OFF_NS << attempt.min(6)));
        self.0.timers.until(&self.0.clock, self.0.clock.now_ns() + wait_ns).await;
        if attempt > 3 {
            self.0.yields.set(true);
        }
    }

    /// Waits until no other task of this compute server changes the pages at these addresses; none does until what is
    /// returned is dropped.
    pub(crate) async fn take_slots(&self, at: impl Iterator<Item = RemotePtr> + Clone) -> SlotGuard {
        self.take(&self.0.compute.locks, at).await
    }

    /// The same for a word of the layout, in a table of its own: whoever has slots of pages may wait for somebody who needs memory.
    pub(crate) async fn take_turn_at(&self, word: RemotePtr) -> SlotGuard {
        self.take(&self.0.compute.layout_locks, [word].into_iter()).await
    }

    async fn take(&self, table: &LocalLocks, at: impl Iterator<Item = RemotePtr> + Clone) -> SlotGuard {
        let mut attempt = 0;
        loop {
            match table.try_take(at.clone()) {
                Some(taken) => return taken,
                None if attempt == 0 => bump(&self.0.counters.local_waits),
                None => {}
            }
            self.back_off(attempt).await;
            attempt += 1;
        }
    }

    pub(crate) fn count(&self) -> &CounterCells {
        &self.0.counters
    }

    /// Pages that one operation has on their way at a time, at most: as its compute server was
    /// [told](crate::compute::ComputeOptions::window).
    pub fn window(&self) -> usize {
        self.0.compute.window
    }

    pub(crate) fn compute(&self) -> &Arc<Shared> {
        &self.0.compute
    }

    /// Takes back a page that was allocated and not used.
    pub(crate) fn free_page(&self, page: FreePage) {
        if self.compute().geometry[page.at.server().index()].is_for_rings(page.at) {
            return self.compute().pages.bring_back(page);
        }
        self.0.pages.free(&self.0.compute.pages, page);
        if self.0.ended.get() {
            self.0.pages.give_back(&self.0.compute.pages);
        }
    }

    pub(crate) fn rings(&self) -> &WorkerRings {
        &self.0.rings
    }

    pub(crate) fn pages(&self) -> &LocalPages {
        &self.0.pages
    }

    fn executor(&self) -> &Executor {
        &self.0.executor
    }

    fn in_flight(&self) -> &InFlight {
        &self.0.in_flight
    }

    /// Counts a page split by a structure.
    pub fn count_split(&self) {
        bump(&self.0.counters.splits);
    }

    /// Counts a chain in place of which a base page was made.
    pub fn count_consolidation(&self) {
        bump(&self.0.counters.consolidations);
    }

    /// Counts a merge or an evening-out by a structure.
    pub fn count_merge(&self) {
        bump(&self.0.counters.merges);
    }
}

/// See [`Handle::yield_now`].
#[derive(Debug)]
pub struct YieldNow<'a> {
    executor: &'a Executor,
    yielded: bool,
}

impl Future for YieldNow<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.yielded, true) {
            return Poll::Ready(());
        }
        match self.executor.task_of(cx.waker()) {
            // Cheaper than its waker, which is for other threads.
            Some(task) => self.executor.set_ready(task),
            None => cx.waker().wake_by_ref(),
        }
        Poll::Pending
    }
}
