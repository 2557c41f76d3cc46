//! What loom models reach beyond the public interface: reading and changing pages by whatever posts requests.

use super::{
    OneSidedPages, PageCopy, Proof,
    change::{PreparedChange, make},
    proof::Reader,
    protocol::ChangeBuffers,
};
use crate::{
    access::Interrupt,
    change::Role,
    page::{SizeClass, StructureId},
    ptr::RemotePtr,
    redo::Recover,
};

/// Reads a page.
///
/// # Errors
/// As [`Access::follow`](crate::access::Access::follow).
pub async fn read<R: Recover>(
    remote: &R,
    structure: StructureId,
    proof: Proof,
    at: RemotePtr,
    class: SizeClass,
) -> Result<PageCopy, Interrupt> {
    let reader = Reader { remote, structure, proof, memory: None };
    let seen = reader.fetch(at, class).await?;
    reader.prove(at, class, seen).await.map(PageCopy)
}

/// Changes pages; false if one has changed since it was read.
///
/// # Errors
/// If a buffer cannot be had, or a memory server is lost.
pub async fn change<R: Recover>(
    remote: &R,
    structure: StructureId,
    pages: Vec<(PageCopy, Role)>,
    f: impl FnOnce(&mut OneSidedPages),
) -> Result<bool, Interrupt> {
    let mut pages = OneSidedPages::open(remote, structure, pages, Vec::new())?;
    f(&mut pages);
    let mut staged = PreparedChange::of(pages);
    staged.seal();
    let mut prepared = ChangeBuffers::new(remote, &staged)?;
    // The record is for who comes after a death; nobody dies in these models.
    prepared.recording = None;
    Ok(make(remote, &staged, prepared, &mut false).await?)
}
