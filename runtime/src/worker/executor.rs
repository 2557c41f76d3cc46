//! A worker's executor: tasks of one thread, polled in the order of their numbers.
//!
//! Which tasks are ready is a bitmap of atomic words, one word for 64 tasks: waking a task sets its bit, and a turn takes
//! a word's bits and polls those tasks. Wakers may be used from any thread, there is no queue and no lock, and the order
//! depends on nothing but the bits, which the simulator needs.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Wake, Waker},
};

use super::trips::{Current, Trips};
use crate::{
    messaging::Tasks,
    sync::{AtomicU64, Ordering},
};

/// The ready bits of 64 tasks.
#[derive(Debug)]
pub struct ReadyBits(AtomicU64);

impl Default for ReadyBits {
    fn default() -> Self {
        Self::new()
    }
}

impl ReadyBits {
    /// No task is ready.
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Marks task `bit` as ready. What the waker did before is visible to the poll that follows.
    pub fn set(&self, bit: u32) {
        self.0.fetch_or(1 << bit, Ordering::Release);
    }

    /// Takes all ready tasks. A task that is woken after this is ready again.
    pub fn take(&self) -> u64 {
        // Most words are empty on most turns: look before the expensive swap.
        if self.0.load(Ordering::Relaxed) == 0 { 0 } else { self.0.swap(0, Ordering::Acquire) }
    }
}

struct TaskWaker {
    ready: std::sync::Arc<ReadyBits>,
    bit: u32,
}

impl Wake for TaskWaker {
    fn wake(self: std::sync::Arc<Self>) {
        self.ready.set(self.bit);
    }

    fn wake_by_ref(self: &std::sync::Arc<Self>) {
        self.ready.set(self.bit);
    }
}

type BoxedTask = Pin<Box<dyn Future<Output = ()>>>;

struct Slot {
    task: Option<BoxedTask>,
    /// Out of its slot while the task runs, like the task.
    waker: Option<Waker>,
    /// Must finish even if the worker goes: it holds a lock in remote memory.
    critical: bool,
    trips: Trips,
}

/// 64 tasks: who is ready by a waker, and who by a completion, which the worker's own thread collects.
#[derive(Default)]
struct Group {
    woken: std::sync::Arc<ReadyBits>,
    completed: Cell<u64>,
}

#[derive(Default)]
pub(crate) struct Executor {
    slots: RefCell<Vec<Slot>>,
    free: RefCell<Vec<usize>>,
    groups: RefCell<Vec<Group>>,
    critical: Cell<usize>,
    live: Cell<usize>,
    running: Cell<Option<Running>>,
    pub(super) trips: Current,
}

/// The task that is being polled, and what its waker points to.
#[derive(Clone, Copy)]
struct Running {
    index: usize,
    waker_data: *const (),
}

/// Tasks of a group that are to be polled. If one of them panics, the others stay ready.
struct Ready<'a> {
    executor: &'a Executor,
    group: usize,
    bits: u64,
}

impl Drop for Ready<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.bits != 0
            && let Some(group) = self.executor.groups.borrow().get(self.group)
        {
            group.completed.set(group.completed.get() | self.bits);
        }
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor").field("slots", &self.slots.borrow().len()).finish_non_exhaustive()
    }
}

impl Executor {
    pub(crate) fn spawn_boxed(&self, task: BoxedTask, critical: bool) {
        let index = self.free.borrow_mut().pop().unwrap_or_else(|| self.grow());
        self.critical.set(self.critical.get() + usize::from(critical));
        self.live.set(self.live.get() + 1);
        let mut slots = self.slots.borrow_mut();
        let slot = &mut slots[index];
        slot.task = Some(task);
        slot.critical = critical;
        slot.trips = self.trips.get();
        drop(slots);
        self.set_ready(index);
    }

    fn grow(&self) -> usize {
        let mut slots = self.slots.borrow_mut();
        let mut groups = self.groups.borrow_mut();
        let index = slots.len();
        if index.is_multiple_of(64) {
            groups.push(Group::default());
        }
        let ready = std::sync::Arc::clone(&groups[index / 64].woken);
        let waker = Waker::from(std::sync::Arc::new(TaskWaker { ready, bit: (index % 64) as u32 }));
        slots.push(Slot { task: None, waker: Some(waker), critical: false, trips: Trips::default() });
        index
    }

    /// Polls every ready task once, and calls `exchange` after every `tasks_per_exchange` of them; false if none was ready.
    pub(crate) fn turn(&self, tasks_per_exchange: usize, mut exchange: impl FnMut()) -> bool {
        let mut polled = 0;
        let mut group = 0;
        loop {
            let bits = match self.groups.borrow().get(group) {
                Some(group) => group.woken.take() | group.completed.take(),
                None => return polled != 0,
            };
            let mut ready = Ready { executor: self, group, bits };
            while ready.bits != 0 {
                let index = group * 64 + ready.bits.trailing_zeros() as usize;
                ready.bits &= ready.bits - 1;
                self.poll(index);
                polled += 1;
                if polled % tasks_per_exchange == 0 {
                    exchange();
                }
            }
            group += 1;
        }
    }

    fn poll(&self, index: usize) {
        // The task leaves its slot while it runs, so that it can spawn others.
        let (mut task, waker, trips) = {
            let slot = &mut self.slots.borrow_mut()[index];
            let Some(task) = slot.task.take() else { return };
            (task, slot.waker.take().expect("a task that does not run has its waker in its slot"), slot.trips)
        };
        let mut polling = Polling {
            executor: self,
            index,
            before: self.running.replace(Some(Running { index, waker_data: waker.data() })),
            trips_before: self.trips.replace(trips),
            pending: None,
        };
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            polling.pending = Some(task);
        }
        self.slots.borrow_mut()[index].waker = Some(waker);
    }

    /// Whether there is a task besides whatever is being polled.
    #[inline]
    pub(crate) fn has_others(&self) -> bool {
        match self.live.get() {
            0 => false,
            1 => self.running.get().is_none(),
            _ => true,
        }
    }

    /// Whether the task that is being polled must finish.
    pub(crate) fn runs_critical(&self) -> bool {
        self.running.get().is_some_and(|Running { index, .. }| self.slots.borrow()[index].critical)
    }

    /// How many tasks must still finish.
    pub(crate) fn critical(&self) -> usize {
        self.critical.get()
    }

    /// Drops all tasks that need not finish. They may leave new critical ones behind.
    pub(crate) fn drop_tasks(&self) {
        for index in 0.. {
            let task = match self.slots.borrow_mut().get_mut(index) {
                Some(slot) if !slot.critical => slot.task.take(),
                Some(_) => None,
                None => return,
            };
            if task.is_some() {
                self.live.set(self.live.get() - 1);
                drop(task);
                self.free.borrow_mut().push(index);
            }
        }
    }
}

impl Tasks for Executor {
    /// From the worker's own thread.
    #[inline]
    fn set_ready(&self, index: usize) {
        let groups = self.groups.borrow();
        let completed = &groups[index / 64].completed;
        completed.set(completed.get() | 1 << (index % 64));
    }

    #[inline]
    fn task_of(&self, waker: &Waker) -> Option<usize> {
        self.running.get().filter(|running| running.waker_data == waker.data()).map(|running| running.index)
    }
}

/// The end of a poll, also by a panic: puts a task that is pending back, and frees the slot of any other.
struct Polling<'a> {
    executor: &'a Executor,
    index: usize,
    before: Option<Running>,
    trips_before: Trips,
    pending: Option<BoxedTask>,
}

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.executor.running.set(self.before);
        let trips = self.executor.trips.replace(self.trips_before);
        let mut slots = self.executor.slots.borrow_mut();
        let slot = &mut slots[self.index];
        slot.task = self.pending.take();
        slot.trips = trips;
        if slot.task.is_some() {
            return;
        }
        let was_critical = std::mem::take(&mut slot.critical);
        // A slot that lost its waker to a panic is not used again.
        let is_usable = !std::thread::panicking();
        drop(slots);
        self.executor.critical.set(self.executor.critical.get() - usize::from(was_critical));
        self.executor.live.set(self.executor.live.get() - 1);
        if is_usable {
            self.executor.free.borrow_mut().push(self.index);
        }
    }
}

/// A spawned task's result. Dropping it lets the task run on and forgets the result. If the task panics, so does who waits for it.
#[derive(Debug)]
pub struct Task<T> {
    shared: Rc<RefCell<TaskState<T>>>,
    trips: Current,
}

#[derive(Debug)]
struct TaskState<T> {
    output: Option<T>,
    trips: Trips,
    joiner: Option<Waker>,
    has_panicked: bool,
}

/// Whoever waits for a task that panics is told: a result will not come.
struct TellsOfPanic<T>(Rc<RefCell<TaskState<T>>>);

impl<T> Drop for TellsOfPanic<T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.borrow_mut();
            state.has_panicked = state.output.is_none();
            let joiner = state.joiner.take();
            drop(state);
            joiner.into_iter().for_each(Waker::wake);
        }
    }
}

impl<T: 'static> Task<T> {
    /// The task, to be spawned, and the handle to its result.
    pub(super) fn new(future: impl Future<Output = T> + 'static, trips: &Current) -> (BoxedTask, Self) {
        let state = TaskState { output: None, trips: Trips::default(), joiner: None, has_panicked: false };
        let shared = Rc::new(RefCell::new(state));
        let (state, current) = (TellsOfPanic(Rc::clone(&shared)), trips.clone());
        let task = async move {
            let output = future.await;
            let joiner = {
                let mut state = state.0.borrow_mut();
                state.output = Some(output);
                state.trips = current.get();
                state.joiner.take()
            };
            joiner.into_iter().for_each(Waker::wake);
        };
        (Box::pin(task), Self { shared, trips: trips.clone() })
    }
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut shared = self.shared.borrow_mut();
        match shared.output.take() {
            Some(output) => {
                self.trips.join(shared.trips);
                Poll::Ready(output)
            }
            None => {
                assert!(!shared.has_panicked, "a task that this one waits for has panicked");
                shared.joiner = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}
