//! When a freed page may be reused: an epoch that the whole cluster shares.
//!
//! The cluster has one epoch number, on server 0. Every compute server *announces* an epoch `a` in its slot: "no operation
//! of mine that still runs began before I saw the epoch reach `a`". The epoch moves from `g` to `g + 1` only when every
//! live compute server has announced `g`.
//!
//! A page is retired after it was unlinked and marked free. It is *stamped* with an epoch `s` read after that. An
//! operation that may hold the page's address began before the unlinking, hence before anybody could see `s + 1`. So once
//! every live compute server has announced more than `s`, no such operation is left, and the page may be reused. Dead
//! compute servers do not count: dead means that none of their requests can take effect any more.
//!
//! A compute server that joins publishes its slot before it begins its first operation. A scan of the slots that missed
//! it ran before that, and what the scan allows to be reused was unlinked earlier still.
//!
//! [`Epochs`] is the part inside one compute server, between its workers and its maintenance: the last epoch seen, and for
//! each worker the epoch in which its oldest running operation began. A round of maintenance is in `round.rs`. Inside one
//! process this is the scheme of crossbeam-epoch, whose pinning has the same store-then-fence shape; that crate cannot be
//! used here, because what is protected lies in remote memory and the readers in other machines.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
};

use crossbeam_utils::CachePadded;

use crate::sync::{Arc, AtomicU64, Mutex, Ordering, fence, lock};

#[cfg(loom)]
pub mod model;
pub(crate) mod round;

/// No operation runs.
const IDLE: u64 = u64::MAX;

type Slot = Arc<CachePadded<AtomicU64>>;

/// The epochs of one compute server.
#[derive(Debug)]
pub struct Epochs {
    seen: CachePadded<AtomicU64>,
    workers: Mutex<Vec<Slot>>,
}

impl Default for Epochs {
    fn default() -> Self {
        Self::new()
    }
}

impl Epochs {
    /// No epoch seen, no workers.
    pub fn new() -> Self {
        Self { seen: CachePadded::new(AtomicU64::new(0)), workers: Mutex::new(Vec::new()) }
    }

    /// The last epoch seen.
    pub fn seen(&self) -> u64 {
        self.seen.load(Ordering::Relaxed)
    }

    /// Makes `epoch` the one in which operations begin from now on, unless that is a later one already, and returns what may
    /// be announced: the oldest epoch in which a running operation began, at most `epoch`.
    pub fn advance(&self, epoch: u64) -> u64 {
        // Release: whatever was unlinked before is seen so by operations that begin in this epoch.
        self.seen.fetch_max(epoch, Ordering::Release);
        // Pairs with the fence in `pin`: either that worker sees this epoch, or its pin is seen here.
        fence(Ordering::SeqCst);
        lock(&self.workers).iter().map(|slot| slot.load(Ordering::Acquire)).fold(epoch, u64::min)
    }
}

/// One worker's part of [`Epochs`].
#[derive(Debug)]
pub struct LocalEpoch(Rc<Pins>);

#[derive(Debug)]
struct Pins {
    slot: Slot,
    /// The epoch in which the youngest running operations began, with their number. With no running operation, an epoch
    /// that is still announced: the next one that begins in it needs no fence.
    latest: Cell<(u64, usize)>,
    /// Epochs before that in which running operations began, with their number; the oldest first.
    older: RefCell<VecDeque<(u64, usize)>>,
}

impl Pins {
    /// The oldest epoch in which a running operation began.
    fn announce(&self, epoch: u64) {
        // Release: what operations read happened before their end is seen.
        self.slot.store(epoch, Ordering::Release);
    }

    fn is_idle(&self) -> bool {
        self.latest.get().1 == 0 && self.older.borrow().is_empty()
    }
}

impl LocalEpoch {
    /// Registers a worker.
    pub fn new(epochs: &Epochs) -> Self {
        let slot = Arc::new(CachePadded::new(AtomicU64::new(IDLE)));
        lock(&epochs.workers).push(Arc::clone(&slot));
        Self(Rc::new(Pins { slot, latest: Cell::new((IDLE, 0)), older: RefCell::default() }))
    }

    /// An operation begins; it ends when the pin is dropped.
    #[inline]
    pub fn pin(&self, epochs: &Epochs) -> Pin {
        let pins = &*self.0;
        // Acquire, for an operation that begins in an epoch announced already: it has no fence of its own.
        let epoch = epochs.seen.load(Ordering::Acquire);
        let epoch = match pins.latest.get() {
            (latest, count) if latest == epoch => {
                pins.latest.set((epoch, count + 1));
                epoch
            }
            _ => self.begin(epochs, epoch),
        };
        Pin { pins: Rc::clone(&self.0), epoch }
    }

    #[cold]
    fn begin(&self, epochs: &Epochs, mut epoch: u64) -> u64 {
        let pins = &*self.0;
        if pins.is_idle() {
            loop {
                // Release: who sees this pin and not the end of an operation before it must see what that one read.
                pins.announce(epoch);
                fence(Ordering::SeqCst);
                let now = epochs.seen.load(Ordering::Relaxed);
                if now == epoch {
                    break;
                }
                epoch = now;
            }
        } else if pins.latest.get().1 != 0 {
            // The worker announces an older epoch as it is: no need to publish anything.
            pins.older.borrow_mut().push_back(pins.latest.get());
        }
        pins.latest.set((epoch, 1));
        epoch
    }

    /// Withdraws what is announced for the sake of the next operation, if none is running. A worker does so at the end of
    /// every turn; until then, the last operation counts as running.
    #[inline]
    pub fn rest(&self) {
        if self.0.latest.get() != (IDLE, 0) && self.0.is_idle() {
            self.0.latest.set((IDLE, 0));
            self.0.announce(IDLE);
        }
    }

    /// Takes the worker out again.
    pub(crate) fn retire(&self, epochs: &Epochs) {
        lock(&epochs.workers).retain(|slot| !Arc::ptr_eq(slot, &self.0.slot));
    }
}

/// While this exists, no page that could be reached when it was made is reused.
#[derive(Debug)]
#[must_use = "the protection ends when this is dropped"]
pub struct Pin {
    pins: Rc<Pins>,
    epoch: u64,
}

impl Drop for Pin {
    #[inline]
    fn drop(&mut self) {
        let (latest, count) = self.pins.latest.get();
        if latest == self.epoch {
            self.pins.latest.set((latest, count - 1));
        } else {
            self.end_older();
        }
    }
}

impl Pin {
    #[cold]
    fn end_older(&self) {
        let mut older = self.pins.older.borrow_mut();
        if let Some((_, count)) = older.iter_mut().find(|(epoch, _)| *epoch == self.epoch) {
            *count -= 1;
        }
        let oldest_before = older.front().map(|&(epoch, _)| epoch);
        while older.front().is_some_and(|&(_, count)| count == 0) {
            older.pop_front();
        }
        let oldest = older.front().map_or(self.pins.latest.get().0, |&(epoch, _)| epoch);
        if Some(oldest) != oldest_before {
            self.pins.announce(oldest);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_running_operation_holds_the_announcement() {
        let epochs = Epochs::new();
        let worker = LocalEpoch::new(&epochs);
        assert_eq!(epochs.advance(5), 5);
        let first = worker.pin(&epochs);
        assert_eq!(epochs.advance(6), 5);
        let second = worker.pin(&epochs);
        let third = worker.pin(&epochs);
        drop(third);
        drop(first);
        assert_eq!(epochs.advance(7), 6);
        drop(second);
        worker.rest();
        assert_eq!(epochs.advance(8), 8);
        let last = worker.pin(&epochs);
        worker.retire(&epochs);
        assert_eq!(epochs.advance(9), 9);
        drop(last);
    }

    /// Operations of three epochs end in every order: the oldest that runs is what is announced.
    #[test]
    fn operations_of_three_epochs_end_in_any_order() {
        for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
            let epochs = Epochs::new();
            let worker = LocalEpoch::new(&epochs);
            let mut pins: Vec<Option<Pin>> = Vec::new();
            for epoch in 5..8 {
                epochs.advance(epoch);
                pins.push(Some(worker.pin(&epochs)));
            }
            for ended in order {
                let oldest = 5 + pins.iter().position(Option::is_some).unwrap() as u64;
                assert_eq!(epochs.advance(9), oldest, "{order:?}, before {ended}");
                pins[ended] = None;
            }
            worker.rest();
            assert_eq!(epochs.advance(9), 9, "{order:?}");
        }
    }

    #[test]
    fn an_epoch_that_comes_late_changes_nothing() {
        let epochs = Epochs::new();
        let worker = LocalEpoch::new(&epochs);
        assert_eq!(epochs.advance(6), 6);
        assert_eq!(epochs.advance(5), 5);
        let pin = worker.pin(&epochs);
        assert_eq!(epochs.advance(7), 6, "epoch 6 was announced, and an operation has begun before it since");
        drop(pin);
    }
}
