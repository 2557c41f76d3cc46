//! What loom models reach beyond the public interface: the maintenance of a compute server, by whatever posts requests.

use super::round::{Board, Member};
use crate::{
    error::Error,
    free_pages::{FreePage, SharedPages},
    lock::LockWord,
    page::SizeClass,
    ptr::RemotePtr,
    remote::Remote,
};

/// The maintenance of one compute server.
#[derive(Debug)]
pub struct Maintenance {
    member: Member,
    board: Board,
    pages: SharedPages,
}

impl Maintenance {
    /// That of a compute server which has announced epoch 1 in its `slot` of so many.
    pub fn new(epoch: RemotePtr, slots: RemotePtr, count: usize, slot: usize) -> Self {
        Self { member: Member::new(slot, 1), board: Board { epoch, slots, count }, pages: SharedPages::default() }
    }

    /// The page was unlinked.
    pub fn retire(&self, page: RemotePtr) {
        let version = LockWord::free(1, None).version();
        self.pages.retire(std::iter::once(FreePage { at: page, class: SizeClass::SMALLEST, version }));
    }

    /// One round.
    ///
    /// # Errors
    /// If a buffer cannot be had, or the memory server is lost.
    pub async fn round<R: Remote>(&self, remote: &R, advance: impl FnOnce(u64) -> u64) -> Result<bool, Error> {
        self.member.round(remote, &self.board, advance, &self.pages).await
    }

    /// Whether a page may be used again.
    pub fn has_free_page(&self) -> bool {
        !self.pages.take_all().is_empty()
    }
}
