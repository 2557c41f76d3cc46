//! The ready bits of a worker's tasks: no wake-up is lost, and what the waker did before is visible to the poll.
//!
//! A waker, on any thread, writes something down and sets its task's bit ([`ReadyBits::set`]); the worker takes all bits
//! of a word ([`ReadyBits::take`]) and polls those tasks. `take` peeks before it swaps: it may miss a bit that is being
//! set, never clear one that it does not return.
//!
//! Broken variants: bits taken by load and store clear one that was set in between; a bit set without *release* lets the
//! poll miss what the waker wrote.

use std::sync::Arc;

use farlink_loom_tests::{Plain, Running, Seen, explore, refuse, run};
use farlink_runtime::{
    sync::{AtomicU64, Ordering},
    worker::ReadyBits,
};

/// What the worker and the wakers need of a word of ready bits.
trait Bits: Send + Sync + 'static {
    fn new() -> Self;
    fn set(&self, bit: u32);
    fn take(&self) -> u64;
}

impl Bits for ReadyBits {
    fn new() -> Self {
        Self::new()
    }

    fn set(&self, bit: u32) {
        self.set(bit);
    }

    fn take(&self) -> u64 {
        self.take()
    }
}

/// The worker's side of two tasks with a message each.
struct Tasks<B> {
    bits: B,
    messages: [Plain; 2],
}

impl<B: Bits> Tasks<B> {
    /// Writes a task's message, once, and wakes the task.
    fn wake(&self, task: u32) {
        self.messages[task as usize].write(7);
        self.bits.set(task);
    }

    /// Polls what is ready: each task must find its message.
    fn turn(&self) -> u64 {
        let taken = self.bits.take();
        for task in (0..2).filter(|task| taken >> task & 1 == 1) {
            assert_eq!(self.messages[task].read(), 7, "what the waker wrote");
        }
        taken
    }
}

/// Two wakers of different tasks that share the word. Each writes its message once, then wakes.
fn two_wakers<B: Bits>(in_flight: &Seen) {
    let messages = [Plain::new(0), Plain::new(0)];
    let tasks = Arc::new(Tasks { bits: B::new(), messages });
    let wakers = [0, 1].map(|task| {
        let tasks = Arc::clone(&tasks);
        run(move || tasks.wake(task))
    });
    let of_worker = Arc::clone(&tasks);
    let worker = run(move || [of_worker.turn(), of_worker.turn()]);
    wakers.into_iter().for_each(Running::join);
    let [first, second] = worker.join();
    if (first, second) == (1, 2) {
        in_flight.mark();
    }
    let last = tasks.turn();
    assert_eq!(first | second | last, 0b11, "a wake-up was lost");
    assert_eq!(first + second + last, 0b11, "a wake-up counted twice");
}

/// One waker that wakes the same task twice, with a newer message each time. The last poll sees the last message.
fn woken_again<B: Bits>(between: &Seen) {
    let shared = Arc::new((B::new(), AtomicU64::new(0)));
    let (of_waker, of_worker) = (Arc::clone(&shared), Arc::clone(&shared));
    let waker = run(move || {
        let (bits, message) = &*of_waker;
        for news in 1..=2 {
            message.store(news, Ordering::Relaxed);
            bits.set(5);
        }
    });
    let turn = |(bits, message): &(B, AtomicU64)| {
        let heard = (bits.take() != 0).then(|| message.load(Ordering::Relaxed));
        assert_ne!(heard, Some(0), "polled before the message");
        heard
    };
    let worker = run(move || [turn(&of_worker), turn(&of_worker)]);
    waker.join();
    let [first, second] = worker.join();
    let last = turn(&shared);
    if (first, second) == (Some(1), Some(2)) {
        between.mark();
    }
    assert_eq!(last.or(second).or(first), Some(2), "a wake-up was lost");
}

#[test]
fn no_wake_up_is_lost_between_two_wakers() {
    let in_flight = Seen::new();
    let seen = in_flight.clone();
    explore("ready bits, two wakers", move || two_wakers::<ReadyBits>(&seen));
    in_flight.require("a poll runs between the two wake-ups");
}

#[test]
fn a_task_that_is_woken_again_is_polled_again() {
    let between = Seen::new();
    let seen = between.clone();
    explore("ready bits, woken again", move || woken_again::<ReadyBits>(&seen));
    between.require("a poll runs between the two wake-ups");
}

/// Takes the bits by load and store.
struct TakenInTwoSteps(AtomicU64);

impl Bits for TakenInTwoSteps {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn set(&self, bit: u32) {
        self.0.fetch_or(1 << bit, Ordering::Release);
    }

    fn take(&self) -> u64 {
        let bits = self.0.load(Ordering::Acquire);
        self.0.store(0, Ordering::Relaxed);
        bits
    }
}

/// Sets a bit without release.
struct SetRelaxed(AtomicU64);

impl Bits for SetRelaxed {
    fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    fn set(&self, bit: u32) {
        self.0.fetch_or(1 << bit, Ordering::Relaxed);
    }

    fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Acquire)
    }
}

#[test]
fn broken_bits_taken_in_two_steps_lose_a_wake_up() {
    refuse("ready bits, taken in two steps", "a wake-up", || two_wakers::<TakenInTwoSteps>(&Seen::new()));
    refuse("ready bits, taken in two steps", "a wake-up", || woken_again::<TakenInTwoSteps>(&Seen::new()));
}

#[test]
fn broken_bits_set_without_release_hide_the_message() {
    refuse("ready bits, set relaxed", "Causality violation", || two_wakers::<SetRelaxed>(&Seen::new()));
    refuse("ready bits, set relaxed", "polled before the message", || woken_again::<SetRelaxed>(&Seen::new()));
}
