//! What is known of a log that was dropped and not wiped.

use crate::{page::StructureId, ptr::RemotePtr};

/// A log that nobody writes any more.
#[derive(Debug)]
pub(crate) struct DroppedLog {
    pub(crate) structure: StructureId,
    pub(crate) number: u64,
    pub(crate) segments: Vec<RemotePtr>,
    /// It says nothing that is not in remote memory; else it is to be replayed.
    pub(crate) is_done: bool,
}
