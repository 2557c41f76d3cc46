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
//! This module is the part inside one compute server, between its workers and its maintenance: [`Epochs`] holds the last
//! epoch seen, and for each worker the epoch in which its oldest running operation began. The remote part is in
//! `compute`. Inside one process this is the scheme of crossbeam-epoch, whose pinning has the same store-then-fence shape;
//! that crate cannot be used here, because what is protected lies in remote memory and the readers in other machines.

use std::{cell::RefCell, collections::VecDeque, rc::Rc};

use crossbeam_utils::CachePadded;

use crate::sync::{Arc, AtomicU64, Mutex, Ordering, fence, lock};

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

    /// Makes `epoch` (never less than before) the one in which operations begin from now on, and returns what may be
    /// announced: the oldest epoch in which a running operation began, at most `epoch`.
    pub fn advance(&self, epoch: u64) -> u64 {
        // Release: whatever was unlinked before is seen so by operations that begin in this epoch.
        self.seen.store(epoch, Ordering::Release);
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
    /// Epochs in which running operations began, with their number; the oldest first.
    began: RefCell<VecDeque<(u64, usize)>>,
}

impl LocalEpoch {
    /// Registers a worker.
    pub fn new(epochs: &Epochs) -> Self {
        let slot = Arc::new(CachePadded::new(AtomicU64::new(IDLE)));
        lock(&epochs.workers).push(Arc::clone(&slot));
        Self(Rc::new(Pins { slot, began: RefCell::default() }))
    }

    /// An operation begins; it ends when the pin is dropped.
    pub fn pin(&self, epochs: &Epochs) -> Pin {
        let mut began = self.0.began.borrow_mut();
        // Acquire, for an operation that begins beside an older one: it has no fence of its own.
        let mut epoch = epochs.seen.load(Ordering::Acquire);
        match began.back_mut() {
            // The worker announces an older epoch as it is: no need to publish anything.
            Some((latest, count)) if *latest == epoch => *count += 1,
            Some(_) => began.push_back((epoch, 1)),
            None => {
                loop {
                    // Release: who sees this pin and not the end of an operation before it must see what that one read.
                    self.0.slot.store(epoch, Ordering::Release);
                    fence(Ordering::SeqCst);
                    let now = epochs.seen.load(Ordering::Relaxed);
                    if now == epoch {
                        break;
                    }
                    epoch = now;
                }
                began.push_back((epoch, 1));
            }
        }
        drop(began);
        Pin { pins: Rc::clone(&self.0), epoch }
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
    fn drop(&mut self) {
        let mut began = self.pins.began.borrow_mut();
        if let Some((_, count)) = began.iter_mut().find(|(epoch, _)| *epoch == self.epoch) {
            *count -= 1;
        }
        let oldest_before = began.front().map(|&(epoch, _)| epoch);
        while began.front().is_some_and(|&(_, count)| count == 0) {
            began.pop_front();
        }
        let oldest = began.front().map(|&(epoch, _)| epoch);
        if oldest != oldest_before {
            // Release: what the operation read happened before its end is seen.
            self.pins.slot.store(oldest.unwrap_or(IDLE), Ordering::Release);
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
        assert_eq!(epochs.advance(8), 8);
        let last = worker.pin(&epochs);
        worker.retire(&epochs);
        assert_eq!(epochs.advance(9), 9);
        drop(last);
    }
}
