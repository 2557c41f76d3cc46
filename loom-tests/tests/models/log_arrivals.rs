//! The operations of a worker that wait for its owner's log, as one waker: none is left asleep.
//!
//! An operation looks whether its batch has arrived, and [joins](Group::join) the group. The first to join has the group noted at the
//! log, which looks again, under its lock. Whoever has written the batch says so under that lock, and wakes all who are noted, among
//! them the group, while others join.
//!
//! Broken variants: a log that does not look again; a group whose flag and wakers are not under one lock, either of them set first.

use std::{
    sync::Arc,
    task::{Wake, Waker},
};

use farlink_loom_tests::{Seen, explore, refuse, run};
use farlink_runtime::{
    sync::{AtomicU64, Mutex, Ordering, lock},
    write_ahead::Group,
};

/// A log of one batch.
#[derive(Default)]
struct Log {
    has_arrived: AtomicU64,
    noted: Mutex<Vec<Waker>>,
}

impl Log {
    /// Notes who is to be woken; false if the batch has arrived.
    fn wait(&self, waker: &Waker, looks_again: bool) -> bool {
        let mut noted = lock(&self.noted);
        if looks_again && self.has_arrived.load(Ordering::Acquire) != 0 {
            return false;
        }
        noted.push(waker.clone());
        true
    }

    fn arrives(&self) {
        let noted = {
            let mut noted = lock(&self.noted);
            self.has_arrived.store(1, Ordering::Release);
            std::mem::take(&mut *noted)
        };
        noted.into_iter().for_each(Waker::wake);
    }
}

#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(1, Ordering::Release);
    }
}

trait Joining: Wake + Default + Send + Sync + 'static {
    fn join(&self, waker: &Waker) -> bool;
}

impl Joining for Group {
    fn join(&self, waker: &Waker) -> bool {
        Self::join(self, waker)
    }
}

/// A flag and wakers apart.
#[derive(Default)]
struct Apart<const FLAG_FIRST: bool> {
    is_noted: AtomicU64,
    wakers: Mutex<Vec<Waker>>,
}

impl<const FLAG_FIRST: bool> Joining for Apart<FLAG_FIRST> {
    fn join(&self, waker: &Waker) -> bool {
        if FLAG_FIRST {
            let is_first = self.is_noted.swap(1, Ordering::AcqRel) == 0;
            lock(&self.wakers).push(waker.clone());
            return is_first;
        }
        lock(&self.wakers).push(waker.clone());
        self.is_noted.swap(1, Ordering::AcqRel) == 0
    }
}

impl<const FLAG_FIRST: bool> Wake for Apart<FLAG_FIRST> {
    fn wake(self: Arc<Self>) {
        let wakers = std::mem::take(&mut *lock(&self.wakers));
        self.is_noted.store(0, Ordering::Release);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// An operation is polled; what it is woken by, unless it has come to its end.
fn poll<G: Joining>(log: &Log, group: &Arc<G>, looks_again: bool) -> Option<Arc<Woken>> {
    if log.has_arrived.load(Ordering::Acquire) != 0 {
        return None;
    }
    let woken = Arc::<Woken>::default();
    let of_group = Waker::from(Arc::clone(group));
    if group.join(&Waker::from(Arc::clone(&woken))) && !log.wait(&of_group, looks_again) {
        of_group.wake_by_ref();
    }
    Some(woken)
}

fn model<G: Joining>(looks_again: bool, slept: &Seen, missed: &Seen) {
    let (log, group) = (Arc::<Log>::default(), Arc::<G>::default());
    let of_writer = Arc::clone(&log);
    let writer = run(move || of_writer.arrives());
    // Of one worker, one after the other.
    let waiting = [(); 2].map(|()| poll(&log, &group, looks_again));
    writer.join();
    for woken in waiting {
        match woken {
            Some(woken) => {
                assert!(woken.0.load(Ordering::Acquire) != 0, "an operation is left asleep");
                slept.mark();
            }
            None => missed.mark(),
        }
    }
}

#[test]
fn nobody_is_left_asleep() {
    let (slept, missed) = (Seen::new(), Seen::new());
    let seen = (slept.clone(), missed.clone());
    explore("log, arrivals", move || model::<Group>(true, &seen.0, &seen.1));
    slept.require("an operation waits and is woken");
    missed.require("the batch arrives before somebody looks");
}

#[test]
fn broken_groups_leave_somebody_asleep() {
    let asleep = "an operation is left asleep";
    refuse("log that does not look again", asleep, || model::<Group>(false, &Seen::new(), &Seen::new()));
    refuse("group, flag set first", asleep, || model::<Apart<true>>(true, &Seen::new(), &Seen::new()));
    refuse("group, flag set last", asleep, || model::<Apart<false>>(true, &Seen::new(), &Seen::new()));
}
