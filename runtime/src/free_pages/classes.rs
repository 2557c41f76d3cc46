//! What is known of the classes of chunks: see [`chunk_classes`](crate::chunk_classes).

use std::sync::{OnceLock, atomic::AtomicU8};

use crate::layout::Geometry;

/// For each memory server and chunk its class and one, or 0 where it is not known. Whoever reads one may look it up anew: no order is needed.
#[derive(Debug)]
pub(crate) struct ChunkClasses(Vec<OnceLock<Box<[AtomicU8]>>>);

impl ChunkClasses {
    /// None of them known, of so many memory servers.
    pub(crate) fn new(servers: usize) -> Self {
        Self((0..servers).map(|_| OnceLock::new()).collect())
    }

    pub(crate) fn of(&self, geometry: &Geometry, chunk: u64) -> &AtomicU8 {
        let all = || (0..geometry.chunks).map(|_| AtomicU8::new(0)).collect();
        &self.0[geometry.server.index()].get_or_init(all)[chunk as usize]
    }
}
