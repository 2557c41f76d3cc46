//! Logs that are dropped and were not wiped: their segments are used again once what they say is in remote memory.

use super::{Inner, Life, Space, wipe};
use crate::{error::Error, page::StructureId, ptr::RemotePtr, shared::Shared, sync::lock, worker::Handle};

/// A log that nobody writes any more.
#[derive(Debug)]
pub(crate) struct DroppedLog {
    structure: StructureId,
    pub(crate) number: u64,
    segments: Vec<RemotePtr>,
    /// It says nothing that is not in remote memory; else it is to be replayed.
    pub(crate) is_done: bool,
}

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

/// The numbers of the dropped logs of a structure.
pub(crate) fn dropped(compute: &Shared, structure: StructureId) -> Vec<u64> {
    lock(&compute.dropped_logs).iter().filter(|log| log.structure == structure).map(|log| log.number).collect()
}

/// Has dropped logs say nothing, and gives their segments back: once they are done or were replayed.
///
/// # Errors
/// If a memory server is lost.
pub(crate) async fn wipe_dropped(worker: &Handle, is_meant: impl Fn(&DroppedLog) -> bool) -> Result<(), Error> {
    let logs: Vec<DroppedLog> = lock(&worker.compute().dropped_logs).extract_if(.., |log| is_meant(log)).collect();
    match logs.is_empty() {
        true => Ok(()),
        false => wipe(worker, logs.into_iter().flat_map(|log| log.segments).collect()).await,
    }
}
