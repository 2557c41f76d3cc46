//! The thread that rings a worker's doorbells: requests go out once each, in their order, and no wake-up is lost.
//!
//! A worker hands lists of requests over ([`Ringer::hand_over`]) or rings itself, as [`Ringer::takes`] says; it may post in the
//! thread's place when it has waited ([`Ringer::looked`], [`Ringer::settle`]). Asserted: the queue has all requests in their
//! order, and only one thread uses it at a time; after a failure nothing that was handed over behind it goes out; once all is
//! settled nobody has the queue any more; a thread that has fallen asleep is woken by the next request.
//!
//! Broken variants: a worker that rings by itself while requests are on their way overtakes them; one that does not look
//! whether there was trouble has requests carried out behind one that failed; a queue that is destroyed before all is settled
//! is still used.
#![cfg(loom)]

use farlink_loom_tests::{Plain, Seen, explore, refuse, run};
use farlink_runtime::{
    error::Error,
    fabric::ringer::{Doorbell, RequestList, Ringer, Trouble},
    sync::{Arc, AtomicU64, Ordering, yield_thread},
};

/// A queue of requests 1 to 9.
struct Queue {
    /// Those that went out, as digits. Plain memory: a queue is used by one thread at a time.
    out: Plain,
    /// How many of these, for who only waits.
    count: AtomicU64,
    /// The list that it refuses begins with this.
    refused: u8,
    /// Marked if a list has more than one request.
    several: Seen,
    /// Marked if the ringer's thread rings.
    by_thread: Seen,
    /// Marked if the worker does.
    by_worker: Seen,
    worker: loom::thread::ThreadId,
}

/// Up to three requests.
#[derive(Default)]
struct Few(Vec<u8>);

impl RequestList for Few {
    fn with_capacity(_: usize) -> Self {
        Self::default()
    }

    fn capacity(&self) -> usize {
        3
    }

    fn append(&mut self, other: &mut Self) -> bool {
        let fits = self.0.len() + other.0.len() <= self.capacity();
        if fits {
            self.0.append(&mut other.0);
        }
        fits
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

impl Doorbell for Queue {
    type List = Few;

    unsafe fn ring(&self, list: &mut Few) -> Result<(), Error> {
        let requests = std::mem::take(&mut list.0);
        if loom::thread::current().id() == self.worker {
            self.by_worker.mark()
        } else {
            self.by_thread.mark()
        }
        if requests.len() > 1 {
            self.several.mark();
        }
        let out = self.out.read();
        assert_ne!(out, DESTROYED, "a queue was used after its end");
        if requests.first() == Some(&self.refused) {
            return Err(Error::BadOption { option: "request", why: "refused".into() });
        }
        self.out.write(requests.iter().fold(out, |out, &request| out * 10 + u64::from(request)));
        self.count.fetch_add(requests.len() as u64, Ordering::Release);
        Ok(())
    }
}

const DESTROYED: u64 = u64::MAX;

/// What executions did.
#[derive(Clone, Default)]
struct Seens {
    several: Seen,
    by_thread: Seen,
    by_worker: Seen,
}

/// A worker, its queue, and who rings for it.
struct Worker {
    ringer: Ringer<Queue>,
    queue: Arc<Queue>,
    trouble: Arc<Trouble>,
    list: Few,
}

impl Worker {
    /// Without a thread that rings for it.
    fn alone(refused: u8, seens: &Seens) -> Self {
        let Seens { several, by_thread, by_worker } = seens.clone();
        let worker = loom::thread::current().id();
        let (out, count) = (Plain::new(0), AtomicU64::new(0));
        Self {
            ringer: Ringer::new(),
            queue: Arc::new(Queue { out, count, refused, several, by_thread, by_worker, worker }),
            trouble: Arc::new(Trouble::default()),
            list: Few::default(),
        }
    }

    fn new(refused: u8, seens: &Seens) -> Self {
        let worker = Self::alone(refused, seens);
        assert!(worker.ringer.start());
        worker
    }

    fn hand_over(&mut self, request: u8) {
        self.list.0.push(request);
        // SAFETY: these requests have no memory.
        unsafe { self.ringer.hand_over(&mut self.list, &self.queue, &self.trouble) };
    }

    fn ring(&mut self, request: u8) -> Result<(), Error> {
        self.list.0.push(request);
        // SAFETY: these requests have no memory.
        unsafe { self.queue.ring(&mut self.list) }
    }

    /// As a lane does.
    fn post(&mut self, request: u8) {
        if self.ringer.takes(&self.trouble, 1, 1) {
            self.hand_over(request);
        } else {
            self.ring(request).expect("only the first request is refused");
        }
    }
}

/// How a worker posts a request behind those that it has handed over.
type Post = fn(&mut Worker, u8);

fn in_order(post: Post, handed_over: u8, seens: &Seens) {
    let mut worker = Worker::new(0, seens);
    (1..=handed_over).for_each(|request| worker.hand_over(request));
    worker.ringer.looked();
    post(&mut worker, handed_over + 1);
    worker.ringer.settle();
    let expected = (1..=u64::from(handed_over) + 1).fold(0, |out, request| out * 10 + request);
    assert_eq!(worker.queue.out.read(), expected, "requests went out in another order");
    assert!(worker.trouble.take().is_none() && !worker.ringer.is_troubled());
    assert!(Arc::get_mut(&mut worker.queue).is_some(), "somebody has the queue although all is settled");
}

#[test]
fn requests_go_out_in_their_order() {
    let seens = Seens::default();
    for handed_over in [1, 2] {
        let seens = seens.clone();
        explore("ringer, order", move || {
            let seens = seens.clone();
            run(move || in_order(Worker::post, handed_over, &seens)).join();
        });
    }
    seens.several.require("several go out at once");
    seens.by_thread.require("the thread rings");
    seens.by_worker.require("the worker rings");
}

fn nothing_behind_a_failure(post: Post) {
    let mut worker = Worker::new(1, &Seens::default());
    worker.hand_over(1);
    post(&mut worker, 2);
    post(&mut worker, 3);
    worker.ringer.settle();
    assert_eq!(worker.queue.out.read(), 0, "a request went out behind one that failed");
    assert!(worker.ringer.is_troubled(), "nobody is told of the trouble");
    assert!(matches!(worker.trouble.take(), Some(Error::BadOption { .. })), "the error is lost");
    assert!(worker.trouble.take().is_none());
}

#[test]
fn nothing_goes_out_behind_a_failure() {
    explore("ringer, trouble", || run(|| nothing_behind_a_failure(Worker::post)).join());
}

/// Nobody posts in the thread's place: if it is not woken, this never ends.
fn waits_for_the_thread(seens: &Seens) {
    let mut worker = Worker::new(0, seens);
    for request in [1, 2] {
        worker.hand_over(request);
        while worker.queue.count.load(Ordering::Acquire) < u64::from(request) {
            yield_thread();
        }
    }
    worker.ringer.settle();
    assert_eq!(worker.queue.out.read(), 12);
}

#[test]
fn a_thread_that_sleeps_is_woken() {
    let seens = Seens::default();
    let seen = seens.clone();
    explore("ringer, sleep", move || {
        let seens = seen.clone();
        run(move || waits_for_the_thread(&seens)).join();
    });
    seens.by_thread.require("the thread rings");
}

#[test]
fn a_worker_that_has_waited_posts_in_the_threads_place() {
    let seens = Seens::default();
    let seen = seens.clone();
    explore("ringer, no thread", move || {
        let mut worker = Worker::alone(0, &seen);
        worker.hand_over(1);
        let queue = Arc::clone(&worker.queue);
        let other = run(move || {
            while queue.count.load(Ordering::Acquire) == 0 {
                yield_thread();
            }
        });
        worker.ringer.looked();
        other.join();
        assert_eq!(worker.queue.out.read(), 1);
    });
    seens.by_worker.require("the worker rings");
}

fn ring_by_itself(worker: &mut Worker, request: u8) {
    worker.ring(request).expect("this request is not refused");
}

#[test]
fn broken_workers_that_ring_by_themselves_overtake() {
    refuse("ringer, rung beside it", "Causality violation", || {
        run(|| in_order(ring_by_itself, 1, &Seens::default())).join()
    });
}

fn ring_in_spite_of_trouble(worker: &mut Worker, request: u8) {
    worker.ringer.settle();
    ring_by_itself(worker, request);
}

#[test]
fn broken_workers_that_ignore_trouble_go_on_behind_a_failure() {
    refuse("ringer, trouble ignored", "behind one that failed", || {
        run(|| nothing_behind_a_failure(ring_in_spite_of_trouble)).join();
    });
}

#[test]
fn broken_ends_before_all_is_settled_leave_a_queue_in_use() {
    refuse("ringer, not settled", "used after its end", || {
        run(|| {
            let mut worker = Worker::new(0, &Seens::default());
            worker.hand_over(1);
            worker.queue.out.write(DESTROYED);
        })
        .join();
    });
}
