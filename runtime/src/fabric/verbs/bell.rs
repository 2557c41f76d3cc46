//! A thread that rings a worker's doorbells.
//!
//! A software device does its work in the call that rings: a READ over SoftRoCE takes tens of microseconds there, and the
//! worker stands still. Where processors are to spare, two for each endpoint that rings as often, a second thread rings in its
//! place, as soon as it has several requests under way: then the worker goes on with its other operations meanwhile. A single
//! request is rung for by the worker itself, which has nothing else to do but to wait.
//!
//! The order of a queue pair's requests is that in which they were handed over: while some are on their way, what follows
//! takes the same way. What has come for a queue pair until the thread is back goes out at once: SoftRoCE answers READs on a
//! thread of the kernel's, and the processor changes to it and back once for all of them. If posting fails, what was handed
//! over behind it is not posted. A worker that has waited for a while does not wait for the thread to be given a processor: it
//! posts what is still there.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Condvar, OnceLock, atomic::AtomicU32},
    thread::JoinHandle,
};

use super::ib::{PostList, QueuePair};
use crate::{
    error::Error,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock, yield_thread},
};

/// After so many rings an endpoint tells the others of this process so, and looks how often they did.
const TOLD_RINGS: u32 = 64;
/// How often endpoints of this process have told that they rang [`TOLD_RINGS`] times.
static TOLD: AtomicU64 = AtomicU64::new(0);
/// Looks for work before the thread sleeps: some hundred microseconds.
const LOOKS_MAX: u32 = 500;
/// Looks for completions, all in vain, for which a worker waits for the thread to begin.
const PATIENCE: u32 = 64;

/// What went wrong when requests of one connection were posted.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    is_there: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl Trouble {
    /// What went wrong, once.
    pub(super) fn take(&self) -> Option<Error> {
        if self.is_there.load(Ordering::Acquire) { lock(&self.error).take() } else { None }
    }
}

#[derive(Debug)]
struct Job {
    list: PostList,
    queue_pair: Arc<QueuePair>,
    trouble: Arc<Trouble>,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    /// Lists to use again.
    spare: Vec<PostList>,
}

impl Jobs {
    /// The first job, with as many later ones of its queue pair as fit in behind it; and how many these are in all.
    fn take(&mut self) -> Option<(Job, u64)> {
        let mut first = self.waiting.pop_front()?;
        let (mut merged, mut at) = (1, 0);
        while let Some(job) = self.waiting.get_mut(at) {
            if !Arc::ptr_eq(&job.queue_pair, &first.queue_pair) {
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

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
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
pub(super) struct Bell {
    shared: Arc<Shared>,
    processors: usize,
    /// Started when it is first needed; `None` inside if it could not be.
    thread: OnceLock<Option<JoinHandle<()>>>,
    // Of the worker alone, which may move to another thread.
    /// How often it rang.
    rings: AtomicU32,
    /// [`TOLD`] when it last looked.
    told: AtomicU64,
    /// Each endpoint that rings about as often as this one has two processors.
    has_room: AtomicBool,
    /// How often it has looked in vain since it handed over.
    looks: AtomicU32,
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").field("pending", &self.shared.pending).finish_non_exhaustive()
    }
}

/// Adds one to a number that one thread at a time changes.
fn bump(number: &AtomicU32) -> u32 {
    let next = number.load(Ordering::Relaxed).wrapping_add(1);
    number.store(next, Ordering::Relaxed);
    next
}

impl Bell {
    /// For an endpoint on a software device.
    pub(super) fn new() -> Self {
        Self {
            shared: Arc::default(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            thread: OnceLock::new(),
            rings: AtomicU32::new(0),
            told: AtomicU64::new(TOLD.load(Ordering::Relaxed)),
            has_room: AtomicBool::new(false),
            looks: AtomicU32::new(0),
        }
    }

    fn is_started(&self) -> bool {
        let start = || {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("farlink-bell".into()).spawn(move || shared.ring());
            thread.inspect_err(|error| tracing::warn!(%error, "no thread rings doorbells")).ok()
        };
        self.thread.get_or_init(start).is_some()
    }

    /// Whether a worker that has so many requests under way on a connection, of which it is about to ring for `new`, hands
    /// them over. After trouble it does, too: they must not be carried out when those before them were not.
    #[inline]
    pub(super) fn takes(&self, trouble: &Trouble, posted: usize, new: usize) -> bool {
        // Those that are handed over count, too.
        if bump(&self.rings).is_multiple_of(TOLD_RINGS) {
            self.look_for_room();
        }
        // Two are one change, or one look under a lock: their worker waits for both.
        let gains = || self.has_room.load(Ordering::Relaxed) && (posted > new || new > 2);
        // The trouble after what is pending: it is there before what has failed does not count as pending any more.
        self.shared.pending.load(Ordering::Acquire) != 0
            || trouble.is_there.load(Ordering::Relaxed)
            || gains() && self.is_started()
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
    /// As [`PostList::post`], from now on.
    pub(super) unsafe fn hand_over(&self, list: &mut PostList, queue_pair: &Arc<QueuePair>, trouble: &Arc<Trouble>) {
        let (queue_pair, trouble) = (Arc::clone(queue_pair), Arc::clone(trouble));
        self.shared.pending.fetch_add(1, Ordering::Relaxed);
        let mut jobs = lock(&self.shared.jobs);
        let spare = jobs.spare.pop().unwrap_or_else(|| PostList::with_capacity(list.capacity()));
        jobs.waiting.push_back(Job { list: std::mem::replace(list, spare), queue_pair, trouble });
        if self.shared.is_asleep.load(Ordering::Relaxed) {
            self.shared.work.notify_one();
        }
        drop(jobs);
        self.looks.store(0, Ordering::Relaxed);
    }

    /// The worker has looked for completions in vain. If it has done so for a while, and what it handed over is still there,
    /// it posts that.
    #[inline]
    pub(super) fn looked(&self) {
        if self.shared.pending.load(Ordering::Relaxed) != 0 && bump(&self.looks) > PATIENCE {
            self.looks.store(0, Ordering::Relaxed);
            if !self.shared.is_posting.load(Ordering::Relaxed) {
                self.shared.post_next();
            }
        }
    }

    /// Waits until all that was handed over is posted.
    pub(super) fn settle(&self) {
        while self.shared.pending.load(Ordering::Acquire) != 0 {
            if !self.shared.post_next() {
                yield_thread();
            }
        }
    }

    /// Whether a connection has come into trouble since the last time.
    #[inline]
    pub(super) fn is_troubled(&self) -> bool {
        self.shared.is_troubled.load(Ordering::Relaxed) && self.shared.is_troubled.swap(false, Ordering::Acquire)
    }
}

impl Drop for Bell {
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

impl Shared {
    fn ring(&self) {
        let mut looks = 0;
        loop {
            if self.pending.load(Ordering::Relaxed) != 0 {
                looks = 0;
                // Otherwise the worker posts, and what it leaves is next.
                if self.post_next() {
                    continue;
                }
            } else if looks == LOOKS_MAX {
                looks = 0;
                let mut jobs = lock(&self.jobs);
                // What came meanwhile has seen that nobody sleeps.
                if jobs.waiting.is_empty() && !self.is_closed.load(Ordering::Relaxed) {
                    self.is_asleep.store(true, Ordering::Relaxed);
                    jobs = self.work.wait(jobs).unwrap_or_else(std::sync::PoisonError::into_inner);
                    self.is_asleep.store(false, Ordering::Relaxed);
                }
                drop(jobs);
            } else if self.is_closed.load(Ordering::Relaxed) {
                return;
            }
            looks += 1;
            std::hint::spin_loop();
        }
    }

    /// Posts what waits for one queue pair; false if nothing waits or somebody else posts.
    fn post_next(&self) -> bool {
        let mut jobs = lock(&self.jobs);
        if self.is_posting.load(Ordering::Relaxed) {
            return false;
        }
        let Some((mut job, merged)) = jobs.take() else { return false };
        self.is_posting.store(true, Ordering::Relaxed);
        drop(jobs);
        self.post(&mut job);
        // Before it counts as posted: whoever waits for that destroys the queue pair.
        drop(job.queue_pair);
        let mut jobs = lock(&self.jobs);
        jobs.spare.push(job.list);
        self.is_posting.store(false, Ordering::Relaxed);
        drop(jobs);
        self.pending.fetch_sub(merged, Ordering::Release);
        true
    }

    fn post(&self, job: &mut Job) {
        if job.trouble.is_there.load(Ordering::Relaxed) {
            job.list.clear();
            return;
        }
        // SAFETY: whoever handed the list over keeps its pieces as `post` demands, and the job keeps the queue pair.
        if let Err(error) = unsafe { job.list.post(&job.queue_pair) } {
            *lock(&job.trouble.error) = Some(error);
            job.trouble.is_there.store(true, Ordering::Release);
            self.is_troubled.store(true, Ordering::Release);
        }
    }
}
