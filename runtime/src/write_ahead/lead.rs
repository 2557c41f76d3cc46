//! Who writes a log's batches, and what becomes of that if its task ends.

use super::{Failure, Group, LED_MAX, Log, pending::Pending};
use crate::{
    sync::{Arc, Ordering},
    worker::Handle,
};

/// What is pending, on its way.
pub(super) struct Taken<'a> {
    log: &'a Log,
    pub(super) batch: u64,
    pub(super) pending: Pending,
}

impl<'a> Taken<'a> {
    pub(super) fn new(log: &'a Log) -> Self {
        let state = &mut *log.state();
        let batch = state.next;
        state.next += 1;
        let spare = std::mem::take(&mut state.spare);
        let pending = std::mem::replace(&mut state.pending, spare);
        log.0.admission.take(pending.words);
        Self { log, batch, pending }
    }
}

impl Drop for Taken<'_> {
    /// Its writer panics: nothing is lost, but the room that it took may still be written to, and stays taken.
    fn drop(&mut self) {
        if !self.pending.records.is_empty() {
            let why = || Failure::Other("who wrote it has panicked".into());
            self.log.state().stuck.get_or_insert_with(why);
            self.log.put_back(std::mem::take(&mut self.pending), why());
        }
    }
}

/// Whoever has it writes: one at a time. However its task ends, those who wait look again, and another one has it.
pub(super) struct Lead {
    log: Log,
    left: Vec<Arc<Group>>,
    is_over: bool,
}

impl Lead {
    pub(super) fn new(log: &Log) -> Self {
        Self { log: log.clone(), left: Vec::new(), is_over: false }
    }

    /// Writes while some of the worker's own operations wait, a few batches at most: the worker may come to its end, or have no more turns.
    pub(super) async fn write(mut self, worker: &Handle, own: &Arc<Group>) {
        let mut arrived = self.log.0.arrived.load(Ordering::Acquire);
        for _ in 0..LED_MAX {
            if !self.log.0.line.wake(&mut self.left, arrived) {
                self.is_over = true;
                break;
            }
            if !self.left.iter().any(|group| Arc::ptr_eq(group, own)) {
                break;
            }
            match self.log.write_pending(worker).await {
                Some(batch) => arrived = batch,
                None => break,
            }
        }
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if !self.is_over {
            // All of them look; of a failure each is told that waits.
            self.log.0.line.hand_over(std::mem::take(&mut self.left));
        }
    }
}
