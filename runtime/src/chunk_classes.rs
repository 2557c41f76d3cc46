//! Which chunk has pages of which size, as far as this compute server has had to know: a chunk's class never changes.
//!
//! A page that is freed goes to whoever needs one of its size next. So before it is freed it is looked up whether it is a page of its
//! chunk at all: a link or a record that is damaged may name one that seems to lie in the catalog, or inside another page.

use std::sync::atomic::Ordering;

use crate::{
    error::Error,
    page::SizeClass,
    pages::{ChunkState, NewPage},
    ptr::{Link, RemotePtr},
    worker::Handle,
};

/// A page that was allocated is one of its chunk: who frees it later need not ask.
#[inline]
pub fn note(worker: &Handle, page: &NewPage) {
    let compute = worker.compute();
    let geometry = &compute.geometry[page.at().server().index()];
    if let Some((chunk, _)) = geometry.locate(page.at(), page.class()) {
        let known = compute.chunk_classes.of(geometry, chunk);
        if known.load(Ordering::Relaxed) == 0 {
            known.store(page.class().index() as u8 + 1, Ordering::Relaxed);
        }
    }
}

/// Whether [`require`] need not ask.
#[inline]
pub fn is_known(worker: &Handle, at: RemotePtr, class: SizeClass) -> bool {
    let compute = worker.compute();
    let geometry = compute.geometry.get(at.server().index());
    let chunk = geometry.and_then(|geometry| Some((geometry, geometry.locate(at, class)?.0)));
    chunk.is_some_and(|(geometry, chunk)| {
        let known = compute.chunk_classes.of(geometry, chunk).load(Ordering::Relaxed);
        known == class.index() as u8 + 1 && !geometry.is_for_rings(at)
    })
}

/// Whether a page of this class can stand there and be freed: in a chunk of such pages. One request for each chunk of which that is not
/// known yet.
///
/// # Errors
/// If the memory server is lost.
pub(crate) async fn is_of_chunk(worker: &Handle, at: RemotePtr, class: SizeClass) -> Result<bool, Box<Error>> {
    let compute = worker.compute();
    let Some(geometry) = compute.geometry.get(at.server().index()) else { return Ok(false) };
    let Some((chunk, _)) = geometry.locate(at, class).filter(|_| !geometry.is_for_rings(at)) else { return Ok(false) };
    let known = compute.chunk_classes.of(geometry, chunk);
    if known.load(Ordering::Relaxed) == 0
        && let Some(state) = ChunkState::from_word(worker.load(geometry.directory_at(chunk)).await?)
    {
        known.store(state.class.index() as u8 + 1, Ordering::Relaxed);
    }
    Ok(known.load(Ordering::Relaxed) == class.index() as u8 + 1)
}

/// Says of a page that somebody is about to free that it is one: in a chunk of pages of this class. One request for each chunk of which that
/// is not known yet.
///
/// # Errors
/// [`Error::BadPointer`] if it is none; if the memory server is lost.
pub async fn require(worker: &Handle, at: RemotePtr, class: SizeClass) -> Result<(), Box<Error>> {
    if is_of_chunk(worker, at, class).await? {
        return Ok(());
    }
    let why = format!("no page of {class:?} that can be freed stands there");
    Err(Box::new(Error::BadPointer { word: Link::to(at, class).word(), why }))
}
