//! Who goes last: one of a compute server's workers, or whoever holds it. That one leaves the cluster.
//!
//! The holder says that it is gone, and then looks whether there are workers. A worker counts itself out, and then looks whether the holder
//! is gone. Both *swap* the word that says so. Who comes second there sees all that the first one did before: the worker sees that the
//! holder is gone, or the holder sees that no worker is left. With a plain store or load each could miss the other, and nobody would leave.

use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Those that a compute server lasts for: its workers, and its holder.
#[derive(Debug)]
pub struct LastOut {
    workers: AtomicU64,
    /// The holder is gone, and nobody has been told yet to leave the cluster.
    is_abandoned: AtomicBool,
}

impl Default for LastOut {
    /// A holder, and no worker.
    fn default() -> Self {
        Self { workers: AtomicU64::new(0), is_abandoned: AtomicBool::new(false) }
    }
}

impl LastOut {
    /// A worker more, made by the holder.
    pub fn worker_began(&self) {
        self.workers.fetch_add(1, Ordering::Relaxed);
    }

    /// A worker is gone. True if it is to leave the cluster: for nobody else is there.
    pub fn worker_ended(&self) -> bool {
        self.workers.fetch_sub(1, Ordering::AcqRel) == 1 && self.is_abandoned.swap(false, Ordering::AcqRel)
    }

    /// The holder is gone. True if it is to leave the cluster: for no worker is there. Else the last worker is told to.
    pub fn abandon(&self) -> bool {
        self.is_abandoned.swap(true, Ordering::AcqRel);
        !self.has_workers() && self.is_abandoned.swap(false, Ordering::AcqRel)
    }

    /// Whether there are workers.
    pub fn has_workers(&self) -> bool {
        self.workers.load(Ordering::Acquire) != 0
    }
}
