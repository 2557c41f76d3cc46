//! Logs that are dropped and were not wiped: their segments are used again once what they say is in remote memory.

use super::{Inner, Life, Space};
use crate::{dropped_log::DroppedLog, ptr::RemotePtr, sync::lock};

impl Drop for Inner {
    fn drop(&mut self) {
        let Life { number, compute } = &self.life;
        // Before anybody finds its segments: what is in use is not replayed.
        lock(&compute.logs).remove(number);
        let (state, room) = (&*lock(&self.state), &mut *lock(&self.room));
        if state.stuck.is_some() {
            // A WRITE may be under way there. They stay until the compute server leaves.
            return;
        }
        let is_done = state.pending.records.is_empty() && room.spaces().iter().all(|space| space.is_done());
        let segments: Vec<RemotePtr> =
            room.spaces().map(std::mem::take).into_iter().flat_map(Space::into_rings).collect();
        if !segments.is_empty() {
            let dropped = DroppedLog { structure: self.structure, number: *number, segments, is_done };
            lock(&compute.dropped_logs).push(dropped);
        }
    }
}
