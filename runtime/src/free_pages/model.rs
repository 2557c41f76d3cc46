//! What loom models reach beyond the public interface: a chunk's free pages, by whatever posts requests.

use super::chunk::{Chunk, ChunkState};
use crate::{error::Error, lock::OwnerId, page::SizeClass, ptr::RemotePtr, remote::Remote};

/// The size of the chunk's pages: there are several to a chunk.
const CLASS: SizeClass = SizeClass::of_bytes(4096).expect("a power of two");

/// A chunk with one word of bitmap.
#[derive(Debug, Clone, Copy)]
pub struct OneWord(Chunk);

impl OneWord {
    /// Its entry takes two words, its bitmap one, and each page's lock word is at a multiple of 512 words.
    pub fn new(entry: RemotePtr, bitmap: RemotePtr, pages: RemotePtr) -> Self {
        Self(Chunk { entry, bitmap, pages, class: CLASS, words: 1 })
    }

    /// Word 0 of the entry of a chunk that nobody holds.
    pub fn entry(lessee: OwnerId) -> u64 {
        ChunkState::leased_by(lessee, CLASS).word()
    }

    /// The pages taken, by their numbers in the chunk; `None` if somebody else is the holder.
    ///
    /// # Errors
    /// As the fabric's.
    pub async fn take_all<R: Remote>(&self, remote: &R) -> Result<Option<Vec<u64>>, Box<Error>> {
        let number = |at: RemotePtr| (at.offset() - self.0.pages.offset()) / CLASS.bytes() as u64;
        let taken = self.0.take(remote, usize::MAX).await?;
        Ok(taken.map(|taken| taken.iter().map(|page| number(page.at)).collect()))
    }

    /// Whether the pages were given back; not, if somebody else is the holder.
    ///
    /// # Errors
    /// As the fabric's.
    pub async fn give_back<R: Remote>(&self, remote: &R, pages: &[usize]) -> Result<bool, Box<Error>> {
        self.0.give_back(remote, pages).await
    }
}
