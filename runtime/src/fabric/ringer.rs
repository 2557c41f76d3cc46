//! A thread that rings a worker's doorbells.
//!
//! A software device does its work in the call that rings: a READ over SoftRoCE takes tens of microseconds there, and the
//! worker stands still. Where processors are to spare, two for each endpoint that rings as often, a second thread rings in its
//! place, as soon as it has several requests under way: then the worker goes on with its other operations meanwhile. A single
//! request is rung for by the worker itself, which has nothing else to do but to wait.
//!
//! The order of a queue's requests is that in which they were handed over: while some are on their way, what follows
//! takes the same way. What has come for a queue until the thread is back goes out at once: SoftRoCE answers READs on a
//! thread of the kernel's, and the processor changes to it and back once for all of them. If posting fails, what was handed
//! over behind it is not posted. A worker that has waited for a while does not wait for the thread to be given a processor: it
//! posts what is still there.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        OnceLock,
        // What counts rings is a guess, and orders nothing.
        atomic::{AtomicU32, AtomicU64 as Count},
    },
};

use crate::{
    error::Error,
    sync::{Arc, AtomicBool, AtomicU64, Condvar, JoinHandle, Mutex, Ordering, lock, spawn, spin, yield_thread},
};

/// After so many rings an endpoint tells the others of this process so, and looks how often they did.
const TOLD_RINGS: u32 = 64;
/// How often endpoints of this process have told that they rang [`TOLD_RINGS`] times.
static TOLD: Count = Count::new(0);
/// Looks for work before the thread sleeps: some hundred microseconds.
const LOOKS_MAX: u32 = if cfg!(loom) { 1 } else { 500 };
/// Looks for completions, all in vain, for which a worker waits for the thread to begin.
const PATIENCE: u32 = if cfg!(loom) { 0 } else { 64 };

/// A queue of requests with a doorbell.
pub trait Doorbell: Send + Sync + 'static {
    /// Requests on their way to it.
    type List: RequestList;

    /// Hands all requests to the queue, and empties the list. After an error some may be on their way.
    ///
    /// # Errors
    /// If they are not taken.
    ///
    /// # Safety
    /// The memory of a request stays what the queue needs until it has completed, or the queue is destroyed.
    unsafe fn ring(&self, list: &mut Self::List) -> Result<(), Error>;
}

/// Up to a fixed number of requests, in the order of their posting.
pub trait RequestList: Send + 'static {
    /// An empty list for so many.
    fn with_capacity(capacity: usize) -> Self;
    /// How many it can hold.
    fn capacity(&self) -> usize;
    /// Takes the requests of another list behind its own, or answers false if they do not fit.
    fn append(&mut self, other: &mut Self) -> bool;
    /// Empties it.
    fn clear(&mut self);
}

/// What went wrong when requests of one connection were posted.
#[derive(Debug, Default)]
pub struct Trouble {
    is_there: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Trouble {
    /// What went wrong, once.
    pub fn take(&self) -> Option<Error> {
        if self.is_there.load(Ordering::Acquire) { lock(&self.error).take() } else { None }
    }
}

struct Job<Q: Doorbell> {
    list: Q::List,
    queue: Arc<Q>,
    trouble: Arc<Trouble>,
}

struct Jobs<Q: Doorbell> {
    waiting: VecDeque<Job<Q>>,
    /// Lists to use again.
    spare: Vec<Q::List>,
}

impl<Q: Doorbell> Jobs<Q> {
    /// The first job, with as many later ones of its queue as fit in behind it; and how many these are in all.
    fn take(&mut self) -> Option<(Job<Q>, u64)> {
        let mut first = self.waiting.pop_front()?;
        let (mut merged, mut at) = (1, 0);
        while let Some(job) = self.waiting.get_mut(at) {
            if !Arc::ptr_eq(&job.queue, &first.queue) {
                at += 1;
            } else if first.list.append(&mut job.list) {
                self.spare.extend(self.waiting.remove(at).map(|job| job.list));
                merged += 1;
            } else {
                break;
            }
        }
        Some((first, merged))
    }
}

struct Shared<Q: Doorbell> {
    jobs: Mutex<Jobs<Q>>,
    /// How many jobs are not posted yet.
    pending: AtomicU64,
    /// Somebody posts. Changes under the lock of `jobs`, so that one does at a time.
    is_posting: AtomicBool,
    /// The thread waits for `work`. Changes under the lock of `jobs`.
    is_asleep: AtomicBool,
    /// No more jobs come. Is set under the lock of `jobs`.
    is_closed: AtomicBool,
    /// Some connection is in trouble.
    is_troubled: AtomicBool,
    work: Condvar,
}

/// See the [module](self). One for each worker.
pub struct Ringer<Q: Doorbell> {
    shared: Arc<Shared<Q>>,
    processors: usize,
    /// Started when it is first needed; `None` inside if it could not be.
    thread: OnceLock<Option<JoinHandle<()>>>,
    // Of the worker alone, which may move to another thread.
    /// How often it rang.
    rings: AtomicU32,
    /// [`TOLD`] when it last looked.
    told: Count,
    /// Each endpoint that rings about as often as this one has two processors.
    has_room: AtomicBool,
    /// How often it has looked in vain since it handed over.
    looks: AtomicU32,
}

impl<Q: Doorbell> fmt::Debug for Ringer<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ringer").field("pending", &self.shared.pending).finish_non_exhaustive()
    }
}

/// Adds one to a number that one thread at a time changes.
fn bump(number: &AtomicU32) -> u32 {
    let next = number.load(Ordering::Relaxed).wrapping_add(1);
    number.store(next, Ordering::Relaxed);
    next
}

impl<Q: Doorbell> Default for Ringer<Q> {
    fn default() -> Self {
        Self::new()
    }
}

impl<Q: Doorbell> Ringer<Q> {
    /// For an endpoint on a software device.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared::new()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            thread: OnceLock::new(),
            rings: AtomicU32::new(0),
            told: Count::new(TOLD.load(Ordering::Relaxed)),
            has_room: AtomicBool::new(false),
            looks: AtomicU32::new(0),
        }
    }

    /// Starts the thread if there is none yet; false if it cannot be had.
    pub fn start(&self) -> bool {
        let start = || {
            let shared = Arc::clone(&self.shared);
            let thread = spawn("farlink-ringer", move || shared.ring());
            thread.inspect_err(|error| tracing::warn!(%error, "no thread rings doorbells")).ok()
        };
        self.thread.get_or_init(start).is_some()
    }

    /// Whether a worker that has so many requests under way on a connection, of which it is about to ring for `new`, hands
    /// them over. After trouble it does, too: they must not be carried out when those before them were not.
    #[inline]
    pub fn takes(&self, trouble: &Trouble, posted: usize, new: usize) -> bool {
        // Those that are handed over count, too.
        if bump(&self.rings).is_multiple_of(TOLD_RINGS) {
            self.look_for_room();
        }
        // Two are one change, or one look under a lock: their worker waits for both.
        let gains = || self.has_room.load(Ordering::Relaxed) && (posted > new || new > 2);
        // The trouble after what is pending: it is there before what has failed does not count as pending any more.
        self.shared.pending.load(Ordering::Acquire) != 0
            || trouble.is_there.load(Ordering::Relaxed)
            || gains() && self.start()
    }

    /// Those that ring now and then do not count: meanwhile they have not told anything.
    #[cold]
    fn look_for_room(&self) {
        let told = TOLD.fetch_add(1, Ordering::Relaxed);
        let others = told.wrapping_sub(self.told.load(Ordering::Relaxed));
        self.told.store(told.wrapping_add(1), Ordering::Relaxed);
        let needed = others.saturating_add(1).saturating_mul(2);
        self.has_room.store(needed <= self.processors as u64, Ordering::Relaxed);
    }

    /// Has the thread post these requests, and empties the list.
    ///
    /// # Safety
    /// As [`Doorbell::ring`], from now on.
    pub unsafe fn hand_over(&self, list: &mut Q::List, queue: &Arc<Q>, trouble: &Arc<Trouble>) {
        let (queue, trouble) = (Arc::clone(queue), Arc::clone(trouble));
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        let mut jobs = lock(&self.shared.jobs);
        let spare = jobs.spare.pop().unwrap_or_else(|| RequestList::with_capacity(list.capacity()));
        jobs.waiting.push_back(Job { list: std::mem::replace(list, spare), queue, trouble });
        if self.shared.is_asleep.load(Ordering::Relaxed) {
            self.shared.work.notify_one();
        }
        drop(jobs);
        self.looks.store(0, Ordering::Relaxed);
    }

    /// The worker has looked for completions in vain. If it has done so for a while, and what it handed over is still there,
    /// it posts that.
    #[inline]
    pub fn looked(&self) {
        if self.shared.pending.load(Ordering::Relaxed) != 0 && bump(&self.looks) > PATIENCE {
            self.looks.store(0, Ordering::Relaxed);
            if !self.shared.is_posting.load(Ordering::Relaxed) {
                self.shared.post_next();
            }
        }
    }

    /// Waits until all that was handed over is posted.
    pub fn settle(&self) {
        while self.shared.pending.load(Ordering::Acquire) != 0 {
            if !self.shared.post_next() {
                yield_thread();
            }
        }
    }

    /// Whether a connection has come into trouble since the last time.
    #[inline]
    pub fn is_troubled(&self) -> bool {
        self.shared.is_troubled.load(Ordering::Relaxed) && self.shared.is_troubled.swap(false, Ordering::Acquire)
    }
}

impl<Q: Doorbell> Drop for Ringer<Q> {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let jobs = lock(&self.shared.jobs);
        self.shared.is_closed.store(true, Ordering::Relaxed);
        drop(jobs);
        self.shared.work.notify_one();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl<Q: Doorbell> Shared<Q> {
    fn new() -> Self {
        Self {
            jobs: Mutex::new(Jobs { waiting: VecDeque::new(), spare: Vec::new() }),
            pending: AtomicU64::new(0),
            is_posting: AtomicBool::new(false),
            is_asleep: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_troubled: AtomicBool::new(false),
            work: Condvar::new(),
        }
    }

    fn ring(&self) {
        let mut looks = 0;
        loop {
            if self.pending.load(Ordering::Relaxed) != 0 {
                looks = 0;
                // Otherwise the worker posts, and what it leaves is next.
                if self.post_next() {
                    continue;
                }
            } else if looks < LOOKS_MAX {
                looks += 1;
            } else {
                looks = 0;
                let jobs = lock(&self.jobs);
                if self.is_closed.load(Ordering::Relaxed) {
                    return;
                }
                // What came meanwhile has seen that nobody sleeps.
                if jobs.waiting.is_empty() {
                    self.is_asleep.store(true, Ordering::Relaxed);
                    let jobs = self.work.wait(jobs).unwrap_or_else(std::sync::PoisonError::into_inner);
                    self.is_asleep.store(false, Ordering::Relaxed);
                    drop(jobs);
                }
            }
            spin();
        }
    }

    /// Posts what waits for one queue; false if nothing waits or somebody else posts.
    fn post_next(&self) -> bool {
        let mut jobs = lock(&self.jobs);
        if self.is_posting.load(Ordering::Relaxed) {
            return false;
        }
        let Some((mut job, merged)) = jobs.take() else { return false };
        self.is_posting.store(true, Ordering::Relaxed);
        drop(jobs);
        self.post(&mut job);
        // Before it counts as posted: whoever waits for that destroys the queue.
        drop(job.queue);
        let mut jobs = lock(&self.jobs);
        jobs.spare.push(job.list);
        self.is_posting.store(false, Ordering::Relaxed);
        drop(jobs);
        self.pending.fetch_sub(merged, Ordering::Release);
        true
    }

    fn post(&self, job: &mut Job<Q>) {
        if job.trouble.is_there.load(Ordering::Relaxed) {
            job.list.clear();
            return;
        }
        // SAFETY: whoever handed the list over keeps its memory as `ring` demands, and the job keeps the queue.
        if let Err(error) = unsafe { job.queue.ring(&mut job.list) } {
            *lock(&job.trouble.error) = Some(error);
            job.trouble.is_there.store(true, Ordering::Release);
            self.is_troubled.store(true, Ordering::Release);
        }
    }
}
