//! The optimistic lock of the cache's frames, with its queue of writers.
//!
//! Two words stand for a page: every writer changes both, so that they differ in its middle. Asserted: a reader whose
//! version is still valid has seen two equal words, also between two writers of the queue; of two that upgrade from the same
//! version one fails; of queued writers none is lost, and no two hold the lock at once. None is left waiting either if
//! the page has gone by the time that they have the lock.
//!
//! Broken variants: a lock taken without its release fence, and a validation without its acquire fence, let torn words
//! pass; an upgrade without a look at the version loses an update; a queued writer that tells nobody leaves the next waiting.

use std::sync::Arc;

use farlink_cache::{
    internals::{FrameLock, Waiters},
    model::Step,
};
use farlink_loom_tests::{Plain, Running, Seen, explore, refuse_without, run};
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A page of two words under a lock, and what only the lock's holder may touch.
struct Locked {
    lock: FrameLock,
    waiters: Waiters,
    words: [AtomicU64; 2],
    held: Plain,
    is_gone: AtomicU64,
}

impl Locked {
    fn new() -> Arc<Self> {
        let words = [AtomicU64::new(0), AtomicU64::new(0)];
        let (held, is_gone) = (Plain::new(0), AtomicU64::new(0));
        Arc::new(Self { lock: FrameLock::new(), waiters: Waiters::new(3), words, held, is_gone })
    }

    /// Adds one to both words, by the holder of the lock.
    fn add(&self) {
        self.held.write(self.held.read() + 1);
        for word in &self.words {
            word.store(word.load(Relaxed) + 1, Relaxed);
        }
    }

    /// The words' value, if they were read at one moment.
    fn read(&self) -> Option<u64> {
        let version = self.lock.read()?;
        let [left, right] = [0, 1].map(|word| self.words[word].load(Relaxed));
        let is_valid = self.lock.validate(version);
        assert!(!is_valid || left == right, "torn: {left} and {right}");
        is_valid.then_some(left)
    }

    fn write_queued(&self, number: u32) {
        self.lock.lock(&self.waiters, number);
        self.add();
        self.lock.unlock();
    }
}

/// Two who queue for the lock of a page, and one who has the page go. Returns how many came before that.
fn queue_and_retire() -> u64 {
    let locked = Locked::new();
    let retirer = start(&locked, |locked| {
        locked.lock.lock(&locked.waiters, 3);
        locked.is_gone.store(1, Relaxed);
        locked.lock.retire();
    });
    let writers = [1, 2].map(|number| {
        start(&locked, move |locked| {
            let is_gone = || locked.is_gone.load(Relaxed) != 0;
            let is_ours = locked.lock.lock_if(&locked.waiters, number, || !is_gone());
            let is_here = is_ours && !is_gone();
            if is_here {
                locked.add();
            }
            if is_ours {
                locked.lock.unlock();
            }
            u64::from(is_here)
        })
    });
    retirer.join();
    let made = writers.map(Running::join).into_iter().sum();
    assert!(locked.lock.is_locked(), "a retired page is locked");
    locked.lock.unlock();
    assert_eq!(locked.read(), Some(made), "a writer was lost");
    made
}

/// Runs `step` on a thread of its own.
fn start<T: 'static>(locked: &Arc<Locked>, step: impl FnOnce(&Locked) -> T + 'static) -> Running<T> {
    let locked = Arc::clone(locked);
    run(move || step(&locked))
}

/// One writer that changes the words twice, and a reader.
fn write_and_read() -> Option<u64> {
    let locked = Locked::new();
    let writer = start(&locked, |locked| {
        for _ in 0..2 {
            if locked.lock.try_lock().is_some() {
                locked.add();
                locked.lock.unlock();
            }
        }
    });
    let reader = start(&locked, Locked::read);
    writer.join();
    reader.join()
}

/// Two threads that read, and then change what they have read. Returns how many did.
fn upgrade_twice() -> u64 {
    let locked = Locked::new();
    let upgrade = |locked: &Locked| {
        let Some(version) = locked.lock.read() else { return false };
        let value = locked.words[0].load(Relaxed);
        let is_ours = locked.lock.try_upgrade(version);
        if is_ours {
            locked.held.write(1);
            locked.words[0].store(value + 1, Relaxed);
            locked.lock.unlock();
        }
        is_ours
    };
    let threads = [start(&locked, upgrade), start(&locked, upgrade)];
    let made = threads.map(Running::join).into_iter().filter(|&made| made).count() as u64;
    assert_eq!(locked.words[0].load(Relaxed), made, "an update was lost");
    made
}

/// Queued writers, each on a thread of its own, and a reader in their midst.
fn queue<const WRITERS: u32>(reads: bool) -> Option<u64> {
    let locked = Locked::new();
    let writers: Vec<_> =
        (1..=WRITERS).map(|number| start(&locked, move |locked| locked.write_queued(number))).collect();
    let reader = reads.then(|| start(&locked, Locked::read));
    writers.into_iter().for_each(Running::join);
    let seen = reader.and_then(Running::join);
    assert_eq!(locked.read(), Some(u64::from(WRITERS)), "a writer was lost");
    seen
}

#[test]
fn readers_see_one_moment() {
    let (early, between) = (Seen::new(), Seen::new());
    let seen = (early.clone(), between.clone());
    explore("frame lock, a writer and a reader", move || match write_and_read() {
        Some(0) => seen.0.mark(),
        Some(1) => seen.1.mark(),
        _ => {}
    });
    early.require("the reader comes first");
    between.require("the reader comes between two changes");
}

#[test]
fn one_of_two_upgrades_fails() {
    let (one, both) = (Seen::new(), Seen::new());
    let seen = (one.clone(), both.clone());
    explore("frame lock, two upgrades", move || match upgrade_twice() {
        1 => seen.0.mark(),
        2 => seen.1.mark(),
        made => panic!("{made} upgrades succeeded"),
    });
    one.require("one upgrade fails");
    both.require("both succeed, one after the other");
}

#[test]
fn queued_writers_all_get_through() {
    explore("frame lock, three queued writers", || {
        queue::<3>(false);
    });
}

#[test]
fn queued_writers_get_through_when_the_page_goes() {
    let (none, both) = (Seen::new(), Seen::new());
    let seen = (none.clone(), both.clone());
    explore("frame lock, two queued writers and a retirement", move || match queue_and_retire() {
        0 => seen.0.mark(),
        2 => seen.1.mark(),
        _ => {}
    });
    none.require("both come too late");
    both.require("both come before");
}

#[test]
fn readers_get_in_between_queued_writers() {
    let between = Seen::new();
    let seen = between.clone();
    explore("frame lock, two queued writers and a reader", move || {
        if queue::<2>(true) == Some(1) {
            seen.mark();
        }
    });
    between.require("the reader comes between two writers");
}

#[test]
fn broken_locks_let_torn_words_pass() {
    refuse_without(Step::LockFence, "frame lock, no release fence", "torn", || {
        write_and_read();
    });
    refuse_without(Step::ValidateFence, "frame lock, no acquire fence", "torn", || {
        write_and_read();
    });
}

#[test]
fn broken_upgrades_lose_an_update() {
    refuse_without(Step::UpgradeCheck, "frame lock, any version upgrades", "an update was lost", || {
        upgrade_twice();
    });
}

#[test]
fn broken_queues_leave_a_writer_waiting() {
    refuse_without(Step::PassOn, "frame lock, not passed on", "exceeded maximum number of branches", || {
        queue::<3>(false);
    });
    refuse_without(Step::PassOn, "frame lock, retired, not passed on", "maximum number of branches", || {
        queue_and_retire();
    });
}
