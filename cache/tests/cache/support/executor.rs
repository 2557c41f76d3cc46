//! A single-thread executor for tests: tasks run in an order drawn from a seed. A hang is found, not waited for: tasks that all
//! wait, tasks that go round in circles, and a task that does not come back from a poll.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError, Sender},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

/// Polls of one executor that no test needs: twenty times what the longest one does. Beyond, something goes round in circles.
const POLLS_MAX: u64 = 2_000_000;
/// A poll takes microseconds. Without one for so long, something spins.
const POLL_TIME_MAX: Duration = Duration::from_secs(30);

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A small random source (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// The executors of a test, one a thread. When all of them wait and nobody was woken, the test has hung.
#[derive(Debug)]
pub struct Fleet {
    state: Mutex<FleetState>,
    bell: Condvar,
    progress: Arc<Progress>,
    /// Ends the watch when it goes.
    _watched: Sender<()>,
}

/// What is known of a test that has stopped: how far it came, and how to repeat it.
#[derive(Debug, Default)]
struct Progress {
    polls: AtomicU64,
    seed: AtomicU64,
}

/// Ends the process if there is no progress. (The thread that spins cannot be made to panic.)
fn watch(progress: Arc<Progress>) -> Sender<()> {
    let (watched, watch) = mpsc::channel();
    let look = move || {
        let mut before = None;
        while watch.recv_timeout(POLL_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
            let polls = progress.polls.load(Ordering::Relaxed);
            if before.replace(polls) == Some(polls) {
                let seed = progress.seed.load(Ordering::Relaxed);
                eprintln!("seed {seed}: poll {polls} of this test does not end; some task spins for ever");
                std::process::abort();
            }
        }
    };
    if !cfg!(miri) {
        std::thread::spawn(look);
    }
    watched
}

#[derive(Debug)]
struct FleetState {
    live: usize,
    waiting: usize,
    rung: Vec<bool>,
    is_stuck: bool,
}

impl Fleet {
    pub fn new(threads: usize) -> Arc<Self> {
        let state = FleetState { live: threads, waiting: 0, rung: vec![false; threads], is_stuck: false };
        let progress = Arc::<Progress>::default();
        let watched = watch(Arc::clone(&progress));
        Arc::new(Self { state: Mutex::new(state), bell: Condvar::new(), progress, _watched: watched })
    }

    fn ring(&self, thread: usize) {
        lock(&self.state).rung[thread] = true;
        self.bell.notify_all();
    }

    fn wait(&self, thread: usize) {
        let mut state = lock(&self.state);
        state.waiting += 1;
        while !state.rung[thread] {
            state.is_stuck |= state.waiting == state.live && !state.rung.contains(&true);
            if state.is_stuck {
                self.bell.notify_all();
                drop(state);
                let seed = self.progress.seed.load(Ordering::Relaxed);
                panic!("seed {seed}: every task waits, and nobody will wake one");
            }
            state = self.bell.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        state.rung[thread] = false;
    }

    /// To be held by a thread for as long as it takes part.
    pub fn member(self: &Arc<Self>) -> Member {
        Member(Arc::clone(self))
    }
}

/// A thread that others may wait for.
#[derive(Debug)]
pub struct Member(Arc<Fleet>);

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.live -= 1;
        let is_still = state.live != 0 && state.waiting == state.live && !state.rung.contains(&true);
        state.is_stuck |= std::thread::panicking() || is_still;
        self.0.bell.notify_all();
    }
}

struct Alarm {
    is_ready: AtomicBool,
    fleet: Arc<Fleet>,
    thread: usize,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        if !self.is_ready.swap(true, Ordering::AcqRel) {
            self.fleet.ring(self.thread);
        }
    }
}

struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    alarm: Arc<Alarm>,
}

struct Inner {
    tasks: RefCell<Vec<Task>>,
    random: RefCell<Random>,
    fleet: Arc<Fleet>,
    thread: usize,
    polls: Cell<u64>,
}

#[derive(Clone)]
pub struct Executor(Rc<Inner>);

impl Executor {
    /// The executor of a test with one thread.
    pub fn alone(seed: u64) -> Self {
        Self::new(Fleet::new(1), 0, seed)
    }

    pub fn new(fleet: Arc<Fleet>, thread: usize, seed: u64) -> Self {
        fleet.progress.seed.store(seed, Ordering::Relaxed);
        let random = RefCell::new(Random(seed ^ (thread as u64) << 32));
        Self(Rc::new(Inner { tasks: RefCell::default(), random, fleet, thread, polls: Cell::new(0) }))
    }

    pub fn polls(&self) -> u64 {
        self.0.polls.get()
    }

    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let alarm = Alarm { is_ready: AtomicBool::new(true), fleet: Arc::clone(&self.0.fleet), thread: self.0.thread };
        self.0.tasks.borrow_mut().push(Task { future: Box::pin(future), alarm: Arc::new(alarm) });
    }

    /// Polls one task that is ready; false if none is.
    pub fn turn(&self) -> bool {
        let task = {
            let mut tasks = self.0.tasks.borrow_mut();
            let start = self.0.random.borrow_mut().below(tasks.len().max(1) as u64) as usize;
            let order = (start..tasks.len()).chain(0..start);
            let ready = order.into_iter().find(|&at| tasks[at].alarm.is_ready.swap(false, Ordering::AcqRel));
            ready.map(|at| tasks.swap_remove(at))
        };
        let Some(mut task) = task else { return false };
        self.0.polls.set(self.0.polls.get() + 1);
        let progress = &self.0.fleet.progress;
        progress.polls.fetch_add(1, Ordering::Relaxed);
        let (polls, seed) = (self.0.polls.get(), &progress.seed);
        assert!(polls < POLLS_MAX, "seed {seed:?}: the tasks go round in circles");
        let waker = Waker::from(Arc::clone(&task.alarm));
        if task.future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.0.tasks.borrow_mut().push(task);
        }
        true
    }

    /// Runs all tasks to their end.
    pub fn run(&self) {
        while !self.0.tasks.borrow().is_empty() {
            if !self.turn() {
                self.0.fleet.wait(self.0.thread);
            }
        }
    }

    /// Runs tasks for as long as some are ready.
    pub fn run_ready(&self) {
        while self.turn() {}
    }

    /// Runs a future, and all tasks, to their end.
    pub fn block_on<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> T {
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        self.spawn(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        });
        self.run();
        result.borrow_mut().take().expect("a task that has ended has a result")
    }
}

/// Lets the other tasks run `turns` times.
pub async fn pause(turns: u64) {
    let mut left = turns;
    std::future::poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(());
        }
        left -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
