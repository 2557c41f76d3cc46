//! Who of one compute server goes remote for a page's lock.
//!
//! When several tasks want to change one page, only one of them sends lock requests; the others wait here, without
//! network traffic; then, as the page has probably changed, their lock requests fail and they begin anew. A slot stands for all pages that hash to it: taking it
//! is advice, never protection (the remote lock is), so two pages that share a slot merely wait for each other.
//!
//! Slots are tried, never waited for while others are held: nothing can deadlock. A holder is a task with a remote change
//! under way, which ends at the fabric's pace.

use crate::{
    page::binding,
    ptr::RemotePtr,
    sync::{Arc, AtomicBool, Ordering},
};

const SLOTS: usize = if cfg!(loom) { 2 } else { 1024 };

/// The slots of one compute server.
#[derive(Debug, Clone)]
pub struct LocalLocks(Arc<[AtomicBool; SLOTS]>);

impl Default for LocalLocks {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalLocks {
    /// All slots are free.
    pub fn new() -> Self {
        Self(Arc::new(std::array::from_fn(|_| AtomicBool::new(false))))
    }

    /// Takes the slots of all these pages, or none of them.
    pub fn try_take(&self, pages: impl Iterator<Item = RemotePtr>) -> Option<SlotGuard> {
        let mut slots: Vec<u16> = pages.map(|page| (binding(page.raw()) % SLOTS as u64) as u16).collect();
        slots.sort_unstable();
        slots.dedup();
        let mut taken = SlotGuard { locks: self.clone(), slots: Vec::with_capacity(slots.len()) };
        for slot in slots {
            if self.0[usize::from(slot)].compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
                return None;
            }
            taken.slots.push(slot);
        }
        Some(taken)
    }
}

/// Slots taken; dropping this frees them.
#[derive(Debug)]
pub struct SlotGuard {
    locks: LocalLocks,
    slots: Vec<u16>,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        for &slot in &self.slots {
            self.locks.0[usize::from(slot)].store(false, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ptr::ServerId;

    #[test]
    fn all_or_none_and_free_again_when_dropped() {
        let locks = LocalLocks::new();
        let page = |index: u64| RemotePtr::new(ServerId::new(0).unwrap(), index * 1024).unwrap();
        let held = locks.try_take([page(1), page(2), page(1)].into_iter()).unwrap();
        assert!(locks.try_take([page(3), page(2)].into_iter()).is_none());
        let other = locks.try_take([page(3)].into_iter()).unwrap();
        drop((held, other));
        assert!(locks.try_take([page(1), page(2), page(3)].into_iter()).is_some());
    }
}
