//! Where the pages of a cluster are: live in a structure, free, or lost.
//!
//! An audit is given the pages that can be reached from a structure's root, and reads the header of every page of every
//! leased chunk. What is live and belongs to the structure but cannot be reached is *leaked*. The picture is of one moment
//! only if nobody changes the structure meanwhile.

use std::{collections::HashSet, hash::BuildHasher};

use crate::{
    epoch::round::{Board, read_slots},
    error::Error,
    fabric::Liveness,
    layout::{CHUNK_BYTES, Geometry},
    lock::{LockState, LockWord, OwnerId},
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SELF, SizeClass, StructureId},
    pages::{self, ChunkState},
    ptr::{Link, RemotePtr},
    worker::Handle,
};

/// READs that an audit keeps in flight.
const BATCH: usize = 256;

/// The remote memory of a cluster, by use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Bytes of the chunks that were ever leased: what the cluster has taken from its memory servers.
    pub leased_bytes: u64,
    /// Bytes of pages whose bits are set in bitmaps: free, held by nobody.
    pub free_bytes: u64,
}

impl Memory {
    /// Bytes of pages that are live, or held by compute servers.
    pub fn used_bytes(&self) -> u64 {
        self.leased_bytes.saturating_sub(self.free_bytes)
    }
}

/// Counts the cluster's remote memory.
///
/// # Errors
/// If the fabric fails.
pub async fn memory(worker: &Handle) -> Result<Memory, Error> {
    let mut memory = Memory::default();
    for geometry in &worker.compute().geometry {
        for entry in pages::directory(worker, geometry).await? {
            if let Some(state) = ChunkState::from_word(entry[0]) {
                memory.leased_bytes += CHUNK_BYTES;
                memory.free_bytes += entry[1].saturating_mul(state.class.bytes() as u64).min(CHUNK_BYTES);
            }
        }
    }
    Ok(memory)
}

/// What an audit of one structure found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Audit {
    /// Live pages of the structure that were not reached.
    pub leaked: Vec<Link>,
    /// Reached pages whose bits say that they are free.
    pub reached_but_free: Vec<Link>,
    /// Pages, of any structure, that are neither live nor in a bitmap: held by compute servers, or lost with one.
    pub held: u64,
    /// Whether there is a compute server that may hold them: another one that lives, or this one.
    pub has_holders: bool,
}

impl Audit {
    /// Pages that nobody has any more; those that compute servers may hold do not count.
    pub fn lost(&self) -> u64 {
        if self.has_holders { 0 } else { self.held }
    }
}

/// Audits a structure, whose pages are its descriptor and those that are `reachable`, and which must not be changed meanwhile.
///
/// # Errors
/// If the fabric fails.
pub(crate) async fn audit(
    worker: &Handle,
    structure: StructureId,
    descriptor: Option<Link>,
    reachable: &HashSet<RemotePtr, impl BuildHasher>,
) -> Result<Audit, Error> {
    let mut audit = Audit { has_holders: may_be_held(worker).await?, ..Audit::default() };
    let descriptor = descriptor.and_then(Link::remote).map(|(at, _)| at);
    for geometry in &worker.compute().geometry {
        for (chunk, entry) in (0..).zip(pages::directory(worker, geometry).await?) {
            let Some(ChunkState { class, .. }) = ChunkState::from_word(entry[0]) else { continue };
            let bitmap = worker.read(geometry.bitmap_at(chunk), pages::bitmap_words(class)).await?;
            for (index, (at, header)) in headers(worker, geometry, chunk, class).await?.into_iter().enumerate() {
                let is_free = bitmap[index / 64] >> (index % 64) & 1 == 1;
                let is_reached = reachable.contains(&at) || descriptor == Some(at);
                classify(&mut audit, structure, Link::to(at, class), &header, is_free, is_reached);
            }
        }
    }
    // Somebody may have joined meanwhile.
    audit.has_holders = audit.has_holders || may_be_held(worker).await?;
    Ok(audit)
}

/// Whether there is a compute server that may hold pages.
async fn may_be_held(worker: &Handle) -> Result<bool, Error> {
    let compute = worker.compute();
    let slots = read_slots(worker, &Board::of(&compute.geometry[0])).await?;
    let mut others = slots.iter().filter_map(|[incarnation, _]| OwnerId::new(*incarnation));
    let is_alive = |owner| owner != compute.owner && compute.fabric.liveness(owner) == Liveness::Alive;
    Ok(compute.pages.is_used() || others.any(is_alive))
}

/// The headers of all pages of a chunk.
///
/// # Errors
/// If the fabric fails.
pub(crate) async fn headers(
    worker: &Handle,
    geometry: &Geometry,
    chunk: u64,
    class: SizeClass,
) -> Result<Vec<(RemotePtr, [u64; HEADER_WORDS])>, Error> {
    let count = CHUNK_BYTES as usize / class.bytes();
    let at = |index: usize| geometry.chunk_at(chunk).add((index * class.bytes()) as u64);
    let mut headers = Vec::with_capacity(count);
    for first in (0..count).step_by(BATCH) {
        let batch = first..count.min(first + BATCH);
        let reads: Vec<_> =
            batch.map(|index| Ok((at(index)?, worker.read(at(index)?, HEADER_WORDS)))).collect::<Result<_, Error>>()?;
        for (at, read) in reads {
            let header = read.await?;
            headers.push((at, std::array::from_fn(|word| header[word])));
        }
    }
    Ok(headers)
}

/// Whether these are the first words of a page at this place that is in use in a structure.
pub(crate) fn is_live(at: RemotePtr, header: &[u64], structure: StructureId) -> bool {
    is_in_use(at, header) && Identity::from_word(header[IDENTITY]).is_some_and(|id| id.structure == structure)
}

/// Whether these are the first words of a page that was not written to its end: unlocked, and of no address or no identity. Nothing leads
/// to it, for that is written later.
pub(crate) fn is_half_written(at: RemotePtr, header: &[u64]) -> bool {
    let is_unlocked = header[LOCK] != 0 && LockWord::from_word(header[LOCK]).state() == LockState::Unlocked;
    let is_named = header[IDENTITY] != 0 && Identity::from_word(header[IDENTITY]).is_some();
    is_unlocked && (header[SELF] != at.raw() || !is_named)
}

fn is_in_use(at: RemotePtr, header: &[u64]) -> bool {
    // With a lock word of zero it was never published, whatever its body says.
    header[SELF] == at.raw() && header[LOCK] != 0 && LockWord::from_word(header[LOCK]).state() != LockState::Free
}

fn classify(audit: &mut Audit, structure: StructureId, link: Link, header: &[u64], is_free: bool, reached: bool) {
    let Some((at, _)) = link.remote() else { return };
    match (reached, is_free) {
        (true, true) => audit.reached_but_free.push(link),
        (true, false) => {}
        (false, _) if is_live(at, header, structure) => audit.leaked.push(link),
        (false, true) => {}
        (false, false) => audit.held += u64::from(!is_in_use(at, header)),
    }
}
