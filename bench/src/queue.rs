//! One worker's queue: the tasks of a worker share one source of operations and take them one at a time.
//!
//! A queue ends after a number of operations, at a deadline, with its source, or when it is told to stop because an operation
//! failed. A worker is one thread, so the queue needs cells and no locks.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// When a queue ends, if its source does not before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// After this many operations of this worker.
    Operations(u64),
    /// At this time.
    At(Instant),
    /// With its source.
    Source,
}

/// A source of operations, and when to take no more from it.
#[derive(Debug)]
pub(crate) struct OperationQueue<I> {
    source: RefCell<I>,
    end: End,
    /// Written by this worker alone; others may look.
    issued: Arc<AtomicU64>,
    stopped: Cell<bool>,
    /// Set when the whole process is to stop.
    interrupted: Arc<AtomicBool>,
}

impl<I: Iterator> OperationQueue<I> {
    pub(crate) fn new(source: I, end: End) -> Self {
        let source = RefCell::new(source);
        Self { source, end, issued: Arc::default(), stopped: Cell::new(false), interrupted: Arc::default() }
    }

    /// The same queue, which also ends once `flag` is set.
    pub(crate) fn interrupted_by(self, flag: &Arc<AtomicBool>) -> Self {
        Self { interrupted: Arc::clone(flag), ..self }
    }

    /// The same queue, which counts there what it has handed out.
    pub(crate) fn counted_in(self, issued: &Arc<AtomicU64>) -> Self {
        issued.store(0, Ordering::Relaxed);
        Self { issued: Arc::clone(issued), ..self }
    }

    /// The next operation, or `None` at the end. `now` is a time that the caller has at hand anyway.
    pub(crate) fn next(&self, now: Instant) -> Option<I::Item> {
        let issued = self.issued.load(Ordering::Relaxed);
        let ended = match self.end {
            End::Operations(operations) => issued >= operations,
            End::At(deadline) => now >= deadline,
            End::Source => false,
        };
        if ended || self.stopped.get() || self.interrupted.load(Ordering::Relaxed) {
            return None;
        }
        let next = self.source.borrow_mut().next()?;
        self.issued.store(issued + 1, Ordering::Relaxed);
        Some(next)
    }

    /// Ends the queue for all tasks of the worker.
    pub(crate) fn stop(&self) {
        self.stopped.set(true);
    }

    /// The source, as far as it was used.
    pub(crate) fn into_source(self) -> I {
        self.source.into_inner()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn drain(queue: &OperationQueue<impl Iterator>) -> usize {
        let now = Instant::now();
        std::iter::from_fn(|| queue.next(now)).count()
    }

    #[test]
    fn feeds_end() {
        let queue = |end| OperationQueue::new(std::iter::repeat(1), end);
        assert_eq!(drain(&queue(End::Operations(7))), 7);
        assert_eq!(drain(&OperationQueue::new(std::iter::repeat_n(1, 3), End::Source)), 3);
        let now = Instant::now();
        let timed = queue(End::At(now + Duration::from_secs(1)));
        assert!(timed.next(now).is_some());
        assert!(timed.next(now + Duration::from_secs(1)).is_none());
        let stopped = queue(End::Operations(7));
        stopped.stop();
        assert_eq!(drain(&stopped), 0);
        let (flag, count) = (Arc::default(), Arc::new(AtomicU64::new(9)));
        let interrupted = queue(End::Operations(7)).interrupted_by(&flag).counted_in(&count);
        assert!(interrupted.next(now).is_some());
        assert_eq!(count.load(Ordering::Relaxed), 1);
        flag.store(true, Ordering::Relaxed);
        assert!(interrupted.next(now).is_none());
    }
}
