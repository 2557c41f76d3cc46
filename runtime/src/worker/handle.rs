//! What tasks and structures ask of their worker: requests, buffers, tasks, and waiting.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use rand::{RngExt, rngs::SmallRng};

use super::{
    Handle,
    executor::{Executor, Task},
    ops::{self, InFlight, Posted, ReadAgain, ReadOnce},
};
use crate::{
    buffer::Buffer,
    clock::Clock,
    counters::{CounterCells, Counters, add, bump},
    epoch::Pin as EpochPin,
    error::Error,
    fabric::{Capabilities, Liveness, Request, Verb},
    free_pages::{FreePage, LocalPages},
    local_locks::{LocalLocks, SlotGuard},
    messaging::Tasks,
    ptr::{RemotePtr, ServerId},
    redo::WorkerRings,
    remote::write_words,
    shared::Shared,
    sync::Arc,
};

/// The longest first back-off; each next one may be twice as long.
const BACK_OFF_NS: u64 = 50;

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
    pub(super) fn post_request(&self, at: RemotePtr, verb: Verb) -> usize {
        add(&self.0.counters.bytes, verb.bytes() as u64);
        let slot = self.0.in_flight.open();
        self.0.outbox.borrow_mut().push(Request { ticket: ops::ticket(slot), at, verb });
        slot
    }

    /// Posts a READ of `words` (1 to [`BUFFER_WORDS_MAX`](crate::buffer::BUFFER_WORDS_MAX)) 8-byte words. If its connection
    /// breaks it is posted again: it fails only if the memory server is lost, or no buffer can be had.
    pub fn read(&self, at: RemotePtr, words: usize) -> Posted<Buffer> {
        self.post_read(at, words, ReadAgain { at, words })
    }

    /// As [`Handle::read`], and fails with its connection.
    pub(crate) fn read_once(&self, at: RemotePtr, words: usize) -> Posted<ReadOnce> {
        self.post_read(at, words, ())
    }

    #[inline(always)]
    fn post_read<T: ops::FromDone>(&self, at: RemotePtr, words: usize, again: T::Again) -> Posted<T> {
        bump(&self.0.counters.reads);
        match self.buffer(words) {
            Ok(buffer) => self.post(at, Verb::Read(buffer), again),
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
    /// [`TakenForDead`](crate::fabric::Error::TakenForDead) if they do not: from then on nothing of this compute server goes out, and all that it owned is ended.
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

    pub(crate) fn counts(&self) -> &CounterCells {
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

    pub(super) fn executor(&self) -> &Executor {
        &self.0.executor
    }

    pub(super) fn in_flight(&self) -> &InFlight {
        &self.0.in_flight
    }

    /// Counts a page split by a structure.
    pub fn count_split(&self) {
        bump(&self.0.counters.splits);
    }

    /// Counts something of a structure's own, under a name such as `moved right`: [`Counters::named`] tells it, and each row of a bench by
    /// operation. What a shipped operation counts stays with the memory server.
    pub fn count(&self, name: &'static str) {
        self.0.counters.named.borrow_mut().add(name, 1);
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
