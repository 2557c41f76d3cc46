//! Tasks that wait for a moment of the worker's clock.
//!
//! For back-off only, which is rare: a turn looks at the clock while somebody waits, and not otherwise.

use std::{
    cell::RefCell,
    cmp::Reverse,
    collections::BinaryHeap,
    future::Future,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use crate::clock::Clock;

/// Whom to wake when.
#[derive(Default)]
pub(super) struct Timers(RefCell<BinaryHeap<Reverse<Timer>>>);

struct Timer {
    due_ns: u64,
    waker: Waker,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        self.due_ns == other.due_ns
    }
}

impl Eq for Timer {}

impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.due_ns.cmp(&other.due_ns)
    }
}

impl std::fmt::Debug for Timers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Timers").field(&self.0.borrow().len()).finish()
    }
}

impl Timers {
    /// Wakes those whose time has come; false if there was none.
    pub(super) fn wake(&self, clock: &Clock) -> bool {
        let mut timers = self.0.borrow_mut();
        if timers.is_empty() {
            return false;
        }
        let (now_ns, before) = (clock.now_ns(), timers.len());
        while timers.peek().is_some_and(|Reverse(timer)| timer.due_ns <= now_ns) {
            timers.pop().into_iter().for_each(|Reverse(timer)| timer.waker.wake());
        }
        timers.len() < before
    }

    pub(super) fn next_due_ns(&self) -> Option<u64> {
        self.0.borrow().peek().map(|Reverse(timer)| timer.due_ns)
    }

    /// Waits until the clock shows `due_ns`.
    pub(super) fn until<'a>(&'a self, clock: &'a Clock, due_ns: u64) -> Until<'a> {
        Until { timers: self, clock, due_ns, registered: None }
    }
}

pub(super) struct Until<'a> {
    timers: &'a Timers,
    clock: &'a Clock,
    due_ns: u64,
    registered: Option<Waker>,
}

impl Future for Until<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.clock.now_ns() >= self.due_ns {
            return Poll::Ready(());
        }
        if !self.registered.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            self.registered = Some(cx.waker().clone());
            let timer = Timer { due_ns: self.due_ns, waker: cx.waker().clone() };
            self.timers.0.borrow_mut().push(Reverse(timer));
        }
        Poll::Pending
    }
}
