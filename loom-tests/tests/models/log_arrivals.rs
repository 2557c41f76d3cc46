//! Operations that wait for an owner's log: none is left asleep.
//!
//! An operation looks whether its batch has arrived, and [joins](Group::join) the group of its worker. The first to join has the group
//! noted in the log's [`Line`]. If nobody leads the line, it does: writes batches, says that they have arrived, and [wakes](Line::wake)
//! who waited for them, until nobody is left, or it [hands over](Line::hand_over) to one of them. Others join meanwhile.
//!
//! Broken variants: that somebody leads, and who waits, not under one lock, either of them set first; a leader that leaves without a word.

use std::{
    sync::Arc,
    task::{Wake, Waker},
};

use farlink_loom_tests::{Seen, explore, refuse, run};
use farlink_runtime::{
    sync::{Arc as LoomArc, AtomicU64, Mutex, Ordering, lock},
    write_ahead::{Group, Line},
};

#[derive(Default)]
struct Woken(AtomicU64);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(1, Ordering::Release);
    }
}

/// Who waits for a log, and the right to write it.
trait Waiting: Default + Send + Sync + 'static {
    /// An operation of a worker waits from now on; whether it leads.
    fn wait(&self, worker: usize, batch: u64, waker: &Waker) -> bool;

    /// Wakes who waited for what has arrived; false if nobody is left, and nobody leads.
    fn wake(&self, arrived: u64) -> bool;

    /// Leads no more, though somebody may be left.
    fn hand_over(&self);
}

/// As in the log, but for who leaves without a word.
#[derive(Default)]
struct Real<const HANDS_OVER: bool> {
    groups: [LoomArc<Group>; 2],
    line: Line,
    left: Mutex<Vec<LoomArc<Group>>>,
}

impl<const HANDS_OVER: bool> Waiting for Real<HANDS_OVER> {
    fn wait(&self, worker: usize, batch: u64, waker: &Waker) -> bool {
        let group = &self.groups[worker];
        group.join(batch, waker) && self.line.note(group)
    }

    fn wake(&self, arrived: u64) -> bool {
        self.line.wake(&mut lock(&self.left), arrived)
    }

    fn hand_over(&self) {
        if HANDS_OVER {
            self.line.hand_over(std::mem::take(&mut lock(&self.left)));
        }
    }
}

/// Who waits, and a flag that somebody leads, apart.
#[derive(Default)]
struct Apart<const FLAG_FIRST: bool> {
    is_led: AtomicU64,
    operations: Mutex<Vec<(u64, Waker)>>,
}

impl<const FLAG_FIRST: bool> Waiting for Apart<FLAG_FIRST> {
    fn wait(&self, _: usize, batch: u64, waker: &Waker) -> bool {
        let joins = || lock(&self.operations).push((batch, waker.clone()));
        let leads = || self.is_led.swap(1, Ordering::AcqRel) == 0;
        if FLAG_FIRST {
            let leads = leads();
            joins();
            return leads;
        }
        joins();
        leads()
    }

    fn wake(&self, arrived: u64) -> bool {
        let (due, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *lock(&self.operations)).into_iter().partition(|&(batch, _)| batch <= arrived);
        due.into_iter().for_each(|(_, waker)| waker.wake());
        let is_over = left.is_empty();
        lock(&self.operations).extend(left);
        if is_over {
            self.is_led.store(0, Ordering::Release);
        }
        !is_over
    }

    fn hand_over(&self) {
        self.is_led.store(0, Ordering::Release);
        let left = std::mem::take(&mut *lock(&self.operations));
        left.into_iter().for_each(|(_, waker)| waker.wake());
    }
}

/// Batches that one leader writes. With the second it wakes those who were left by the first.
const LED_MAX: usize = 2;

#[derive(Default)]
struct Log<W> {
    arrived: AtomicU64,
    waiting: W,
}

impl<W: Waiting> Log<W> {
    fn has_arrived(&self, batch: u64) -> bool {
        self.arrived.load(Ordering::Acquire) >= batch
    }

    /// Writes two batches at most, as long as anybody waits.
    fn lead(&self) {
        let mut arrived = self.arrived.load(Ordering::Acquire);
        for _ in 0..LED_MAX {
            if !self.waiting.wake(arrived) {
                return;
            }
            arrived = 1 + self.arrived.fetch_add(1, Ordering::AcqRel);
        }
        self.waiting.hand_over();
    }

    /// An operation is polled; what it is woken by, unless it has come to its end.
    fn poll(&self, worker: usize, batch: u64) -> Option<Arc<Woken>> {
        if self.has_arrived(batch) {
            return None;
        }
        let woken = Arc::<Woken>::default();
        if self.waiting.wait(worker, batch, &Waker::from(Arc::clone(&woken))) {
            self.lead();
        }
        Some(woken)
    }
}

fn model<W: Waiting>(slept: &Seen, missed: &Seen) {
    let log = Arc::<Log<W>>::default();
    let [of_one, of_other] = [Arc::clone(&log), Arc::clone(&log)];
    let one = run(move || [of_one.poll(0, 1), of_one.poll(0, 2)]);
    let other = run(move || of_other.poll(1, 3));
    let ([first, second], third) = (one.join(), other.join());
    let waiting = [(0, 1, first), (0, 2, second), (1, 3, third)];
    for (worker, batch, mut woken) in waiting {
        match woken {
            Some(_) => slept.mark(),
            None => missed.mark(),
        }
        while let Some(waker) = woken.take() {
            assert!(waker.0.load(Ordering::Acquire) != 0, "an operation is left asleep");
            woken = log.poll(worker, batch);
        }
    }
}

#[test]
fn nobody_is_left_asleep() {
    let (slept, missed) = (Seen::new(), Seen::new());
    let seen = (slept.clone(), missed.clone());
    explore("log, arrivals", move || model::<Real<true>>(&seen.0, &seen.1));
    slept.require("an operation waits and is woken");
    missed.require("the batch arrives before somebody looks");
}

#[test]
fn a_flag_apart_from_who_waits_leaves_somebody_asleep() {
    let asleep = "an operation is left asleep";
    refuse("log, flag set first", asleep, || model::<Apart<true>>(&Seen::new(), &Seen::new()));
    refuse("log, flag set last", asleep, || model::<Apart<false>>(&Seen::new(), &Seen::new()));
}

#[test]
fn a_leader_that_leaves_without_a_word_leaves_somebody_asleep() {
    let asleep = "an operation is left asleep";
    refuse("log, left without a word", asleep, || model::<Real<false>>(&Seen::new(), &Seen::new()));
}
