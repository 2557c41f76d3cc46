//! A thread that rings a worker's doorbells.
//!
//! A software device does its work in the call that rings: a READ over SoftRoCE takes tens of microseconds there, and the
//! worker stands still. Where processors are to spare, a second thread rings in its place, as soon as it has several requests
//! under way: then the worker goes on with its other operations meanwhile. A single request is rung for by the worker itself,
//! which has nothing else to do but to wait.
//!
//! The order of a queue pair's requests is that in which they were handed over: while some are on their way, what follows
//! takes the same way. What has come for a queue pair until the thread is back goes out at once: SoftRoCE answers READs on a
//! thread of the kernel's, and the processor changes to it and back once for all of them. If posting fails, what was handed
//! over behind it is not posted.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Condvar, OnceLock, atomic::AtomicUsize},
    thread::JoinHandle,
};

use super::ib::{PostList, QueuePair};
use crate::{
    error::Error,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock, yield_thread},
};

/// Endpoints of this process that gain by it.
static GAINING: AtomicUsize = AtomicUsize::new(0);
/// Looks for work before the thread sleeps: some hundred microseconds.
const LOOKS_MAX: u32 = 500;

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
    is_closed: bool,
    is_asleep: bool,
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
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bell").field("pending", &self.shared.pending).finish_non_exhaustive()
    }
}

impl Bell {
    /// For an endpoint on a software device.
    pub(super) fn new() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Self { shared: Arc::default(), processors, thread: OnceLock::new() }
    }

    fn is_started(&self) -> bool {
        let start = || {
            GAINING.fetch_add(1, Ordering::Relaxed);
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
        // Two are one change, or one look under a lock: their worker waits for both.
        let gains = posted > new || new > 2;
        let has_room = || 2 * GAINING.load(Ordering::Relaxed) <= self.processors;
        // The trouble after what is pending: it is there before what has failed does not count as pending any more.
        self.shared.pending.load(Ordering::Acquire) != 0
            || trouble.is_there.load(Ordering::Relaxed)
            || gains && self.is_started() && has_room()
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
        if jobs.is_asleep {
            self.shared.work.notify_one();
        }
    }

    /// Waits until all that was handed over is posted.
    pub(super) fn settle(&self) {
        while self.shared.pending.load(Ordering::Acquire) != 0 {
            yield_thread();
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
        GAINING.fetch_sub(1, Ordering::Relaxed);
        lock(&self.shared.jobs).is_closed = true;
        self.shared.work.notify_one();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn ring(&self) {
        let mut looks = 0;
        let mut used = None;
        loop {
            let mut jobs = lock(&self.jobs);
            jobs.spare.extend(used.take());
            if let Some((mut job, merged)) = jobs.take() {
                drop(jobs);
                looks = 0;
                self.post(&mut job);
                used = Some(job.list);
                // Before it counts as posted: whoever waits for that destroys the queue pair.
                drop(job.queue_pair);
                self.pending.fetch_sub(merged, Ordering::Release);
            } else if jobs.is_closed {
                return;
            } else if looks < LOOKS_MAX {
                drop(jobs);
                looks += 1;
                std::hint::spin_loop();
            } else {
                jobs.is_asleep = true;
                jobs = self.work.wait(jobs).unwrap_or_else(std::sync::PoisonError::into_inner);
                jobs.is_asleep = false;
                looks = 0;
            }
        }
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
