//! What loom models reach beyond the public interface: reading and changing pages by whatever posts requests.

use super::{
    OneSidedPages, PageCopy, Proof,
    change::{PreparedChange, make},
    here,
    proof::Reader,
    protocol::{self, ChangeBuffers, Installed},
};
use crate::{
    access::Interrupt,
    change::Role,
    fabric::memory::LocalMemory,
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
    read_by(Reader { remote, structure, proof, memory: None }, at, class).await
}

/// [`read`] by a thread of the memory server, in its own memory. Its buffers are those of `remote`.
///
/// # Errors
/// As [`read`].
pub async fn read_here<R: Recover>(
    remote: &R,
    structure: StructureId,
    memory: &LocalMemory,
    at: RemotePtr,
    class: SizeClass,
) -> Result<PageCopy, Interrupt> {
    read_by(Reader { remote, structure, proof: Proof::Checksum, memory: Some(memory) }, at, class).await
}

async fn read_by<R: Recover>(reader: Reader<'_, R>, at: RemotePtr, class: SizeClass) -> Result<PageCopy, Interrupt> {
    let seen = reader.fetch(at, class).await?;
    reader.prove(at, class, seen).await.map(PageCopy)
}

/// A page that is free at this version.
pub type Free = (RemotePtr, SizeClass, u64);

fn prepare(
    remote: &impl Recover,
    structure: StructureId,
    pages: Vec<(PageCopy, Role)>,
    new: Option<Free>,
    f: impl FnOnce(&mut OneSidedPages),
) -> Result<PreparedChange, Interrupt> {
    let new = new.map(|(at, class, version)| NewPage::of_nobody(FreePage { at, class, version }));
    let mut pages = OneSidedPages::open(remote, structure, pages, new.into_iter().collect())?;
    f(&mut pages);
    let mut staged = PreparedChange::of(pages);
    staged.seal();
    Ok(staged)
}

/// Changes pages, and writes a new one, if there is any; false if one has changed since it was read.
///
/// # Errors
/// If a buffer cannot be had, or a memory server is lost.
pub async fn change<R: Recover>(
    remote: &R,
    structure: StructureId,
    pages: Vec<(PageCopy, Role)>,
    new: Option<Free>,
    f: impl FnOnce(&mut OneSidedPages),
) -> Result<bool, Interrupt> {
    let staged = prepare(remote, structure, pages, new, f)?;
    let mut prepared = ChangeBuffers::new(remote, &staged)?;
    // The record is for who comes after a death; nobody dies in these models.
    prepared.recording = None;
    Ok(make(remote, &staged, prepared, &mut false).await?)
}

/// [`change`] by a thread of the memory server, in its own memory. Its buffers are those of `remote`.
///
/// # Errors
/// If a buffer cannot be had.
pub fn change_here<R: Recover>(
    remote: &R,
    structure: StructureId,
    memory: &LocalMemory,
    pages: Vec<(PageCopy, Role)>,
    new: Option<Free>,
    f: impl FnOnce(&mut OneSidedPages),
) -> Result<bool, Interrupt> {
    let staged = prepare(remote, structure, pages, new, f)?;
    Ok(here::carry_out_now(memory, remote.owner(), staged, &Default::default()).is_ok())
}

/// Writes a new page and swaps a word; whether it did. `f` sets the words of the page.
///
/// # Errors
/// If a buffer cannot be had, or a memory server is lost.
pub async fn install<R: Recover>(
    remote: &R,
    structure: StructureId,
    new: Free,
    f: impl FnOnce(&mut OneSidedPages),
    swap: (RemotePtr, u64, u64),
) -> Result<bool, Interrupt> {
    let staged = prepare(remote, structure, Vec::new(), Some(new), f)?;
    let images = protocol::images(remote, &staged.added)?;
    let installed = protocol::install(remote, &staged.added, images, swap).await?;
    staged.added.into_iter().for_each(|added| added.page.publish());
    Ok(installed == Installed::Yes)
}
