//! What loom models reach beyond the public interface: reading and changing pages by whatever posts requests.

use super::{
    OneSidedPages, PageCopy, Proof,
    change::{PreparedChange, make},
    proof::Reader,
    protocol::{self, ChangeBuffers, Installed},
};
use crate::{
    access::Interrupt,
    change::Role,
    page::{SizeClass, StructureId},
    pages::{FreePage, NewPage},
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

/// Writes a new page, free at this version, and swaps a word; whether it did. `f` sets the words of the page.
///
/// # Errors
/// If a buffer cannot be had, or a memory server is lost.
pub async fn install<R: Recover>(
    remote: &R,
    structure: StructureId,
    (at, class, version): (RemotePtr, SizeClass, u64),
    f: impl FnOnce(&mut OneSidedPages),
    swap: (RemotePtr, u64, u64),
) -> Result<bool, Interrupt> {
    let mut pages =
        OneSidedPages::open(remote, structure, [], vec![NewPage::of_nobody(FreePage { at, class, version })])?;
    f(&mut pages);
    let mut staged = PreparedChange::of(pages);
    staged.seal();
    let images = protocol::images(remote, &staged.added)?;
    let installed = protocol::install(remote, &staged.added, images, swap).await?;
    staged.added.into_iter().for_each(|added| added.page.publish());
    Ok(installed == Installed::Yes)
}
