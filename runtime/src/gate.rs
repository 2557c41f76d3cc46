//! A gate that those who change something pass, and that is shut before it is handed over: once all who are inside have come out,
//! nobody changes it any more. Whoever passes after it was opened again sees what was done meanwhile.
//!
//! Who passes counts himself in, at a place of his own thread's, and then looks whether the gate is shut; who shuts it marks it shut,
//! and then looks at the counts. Both have a fence in between: so either the one sees that it is shut, or the other that somebody is
//! inside. To pass takes a fence and no word that other threads write; to be told that all are out one asks again and again.

use std::{cell::Cell, rc::Rc, sync::Arc};

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering, fence, lock};

type Count = Arc<CachePadded<AtomicU64>>;

/// A gate, as all threads share it.
#[derive(Debug)]
pub struct Gate {
    is_shut: AtomicBool,
    /// How many are inside, by thread.
    counts: Mutex<Vec<Count>>,
}

impl Default for Gate {
    /// Open.
    fn default() -> Self {
        Self { is_shut: AtomicBool::new(false), counts: Mutex::new(Vec::new()) }
    }
}

impl Gate {
    /// A way through it, for one thread.
    pub fn way(self: &Arc<Self>) -> Way {
        let count = Count::new(CachePadded::new(AtomicU64::new(0)));
        let mut counts = lock(&self.counts);
        if counts.len() == counts.capacity() {
            forget_ended(&mut counts);
            // Not again before there are twice as many.
            let more = counts.len() + 1;
            counts.reserve(more);
        }
        counts.push(Arc::clone(&count));
        drop(counts);
        Way { gate: Arc::clone(self), inside: Rc::new(Inside { number: Cell::new(0), count }) }
    }

    /// Lets nobody pass any more; false if it was shut before.
    pub fn shut(&self) -> bool {
        let was_open = !self.is_shut.swap(true, Ordering::Relaxed);
        // Pairs with the fence in `pass`.
        fence(Ordering::SeqCst);
        was_open
    }

    /// Whether it is shut.
    pub fn is_shut(&self) -> bool {
        // Acquire: whoever passes sees what was done while it was shut.
        self.is_shut.load(Ordering::Acquire)
    }

    /// Lets others pass again.
    pub fn open(&self) {
        self.is_shut.store(false, Ordering::Release);
    }

    /// Whether nobody is inside. Of a gate that is shut it stays so, and all that was done inside has happened before.
    pub fn is_empty(&self) -> bool {
        let mut counts = lock(&self.counts);
        forget_ended(&mut counts);
        counts.iter().all(|count| count.load(Ordering::Acquire) == 0)
    }
}

/// Drops the places of ways that are gone.
fn forget_ended(counts: &mut Vec<Count>) {
    counts.retain(|count| {
        Arc::strong_count(count) > 1 || {
            // The number of those who have it is read relaxed. With the fence, what its way has done before it was dropped is seen: its
            // last count, and all that was done inside.
            fence(Ordering::Acquire);
            count.load(Ordering::Acquire) != 0
        }
    });
}

#[derive(Debug)]
struct Inside {
    number: Cell<u64>,
    count: Count,
}

impl Inside {
    fn set(&self, number: u64) {
        self.number.set(number);
        // Release: whoever sees that somebody has come out sees what he has done.
        self.count.store(number, Ordering::Release);
    }
}

/// One thread's way through a gate.
#[derive(Debug, Clone)]
pub struct Way {
    gate: Arc<Gate>,
    inside: Rc<Inside>,
}

impl Way {
    /// Passes, if the gate is open.
    #[inline]
    pub fn pass(&self) -> Option<Passage> {
        self.inside.set(self.inside.number.get() + 1);
        let passage = Passage(Rc::clone(&self.inside));
        // Pairs with the fence in `shut`: it is seen here, or the count is seen there.
        fence(Ordering::SeqCst);
        (!self.gate.is_shut()).then_some(passage)
    }

    /// The gate.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }
}

/// Somebody is inside until it is dropped.
#[derive(Debug)]
#[must_use = "who drops it has come out"]
pub struct Passage(Rc<Inside>);

impl Clone for Passage {
    fn clone(&self) -> Self {
        self.0.set(self.0.number.get() + 1);
        Self(Rc::clone(&self.0))
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        self.0.set(self.0.number.get() - 1);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ways_that_are_gone_take_no_room() {
        let gate = Arc::<Gate>::default();
        let stay: Vec<Way> = (0..100).map(|_| gate.way()).collect();
        let inside = stay[7].pass().unwrap();
        for _ in 0..10_000 {
            drop(gate.way());
        }
        assert!(lock(&gate.counts).len() < 1000, "{}", lock(&gate.counts).len());
        assert!(gate.shut() && !gate.is_empty() && stay[8].pass().is_none());
        drop(inside);
        assert!(gate.is_empty());
    }
}
