//! Rings of which nothing is to be replayed any more are used again.

use crate::{
    dropped_log::DroppedLog, error::Error, page::StructureId, ptr::RemotePtr, redo::RING_FROM, remote::write_words,
    shared::Shared, sync::lock, worker::Handle,
};

/// Rings that are wiped at once.
const WIPED_AT_ONCE: usize = 16;

/// Has rings of logs say nothing, and gives them back. Fails only if a memory server is lost: nobody would wipe the rest later.
pub(crate) async fn wipe(worker: &Handle, segments: Vec<RemotePtr>) -> Result<(), Error> {
    let wiper = worker.clone();
    // Every batch in them has a lower number.
    let from = worker.compute().next_sequence();
    let wiping = async move {
        for segments in segments.chunks(WIPED_AT_ONCE) {
            let words = segments.iter().map(|segment| (segment.word(RING_FROM), from));
            write_words(&wiper, words.collect()).await?;
            lock(&wiper.compute().idle_rings).extend(segments);
        }
        Ok::<_, Box<Error>>(())
    };
    Ok(worker.spawn_to_end(wiping).await?)
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
