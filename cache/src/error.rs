//! What can go wrong.

use crate::id::PageId;

/// Why a cache cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// An option has a value that cannot work.
    #[error("{option}: {why}")]
    Unusable {
        /// The option.
        option: &'static str,
        /// The value, and what is possible.
        why: String,
    },
    /// The system refused the memory.
    #[error("no memory for a cache of {bytes} bytes ({source}); ask for less, or raise the limit on address space")]
    Memory {
        /// The size asked for.
        bytes: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

/// All handles are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the cache has {max} handles, all taken; drop some, or raise `handles_max`")]
pub struct TooManyHandles {
    /// How many there can be.
    pub max: usize,
}

/// Somebody changed the page, or it has left the cache, since it was looked up: begin anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the page changed or went meanwhile; begin anew")]
pub struct Conflict;

/// Why a page cannot be had, or not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError<E: std::error::Error + 'static> {
    /// Somebody was faster: begin anew.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The store failed. After a failed write the page is still cached and still differs from the store's copy.
    #[error("{page}: {source}")]
    Store {
        /// The page.
        page: PageId,
        /// What the store said.
        source: E,
    },
    /// A page from the store has a link that no store may hold.
    #[error("{page} came from the store with a swizzled link in word {word}; the store is corrupt")]
    Swizzled {
        /// The page.
        page: PageId,
        /// The position of the link.
        word: usize,
    },
    /// The store's page has another size than the link said.
    #[error("{page} came from the store with {got} words in place of {asked}")]
    Size {
        /// The page.
        page: PageId,
        /// Words that the store gave.
        got: usize,
        /// Words of the size class asked for.
        asked: usize,
    },
    /// A link leads nowhere.
    #[error("the link is null, leads nowhere, or its page has another size than was asked for")]
    BadLink,
    /// A page that was to be a new one is cached already.
    #[error("{page} is cached, so it is not a new page; free it first, or choose another id")]
    NotNew {
        /// The page.
        page: PageId,
    },
    /// Every frame is held by operations in flight, or by pages that the store did not take.
    #[error(
        "no page can make room: {held}; use a larger cache or fewer operations at a time{}",
        last_write_error.as_ref().map(|error| format!(" (the store refused a page: {error})")).unwrap_or_default()
    )]
    NoRoom {
        /// What holds the frames.
        held: &'static str,
        /// What the store said to the last write that failed.
        last_write_error: Option<String>,
    },
}
