//! What can go wrong.

use crate::id::{PageId, SizeClass};

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

/// The look at a page is over: begin anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Conflict {
    /// The cache has moved the page out of its frame, or swizzled or unswizzled a link of it. Until then its contents were as
    /// they were read. Whoever holds a copy ([`CacheHandle::snapshot`](crate::CacheHandle::snapshot)) holds what was true.
    #[error("the cache has moved the page or a page below it; look it up again")]
    Moved,
    /// The page was changed, is being changed, or nobody knows any more whether it was.
    #[error("the page has changed meanwhile; begin anew")]
    Changed,
}

/// A mistake in the caller's code: to begin anew does not help. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Misuse {
    /// A page, an anchor or reserved room of another cache.
    #[error("a page, an anchor or reserved room of another cache was given")]
    OtherCache,
    /// One page, or one new id, is given twice to one change.
    #[error("{page} is given twice to one change")]
    GivenTwice {
        /// The page.
        page: PageId,
    },
    /// A change has put a swizzled link where the layout names none, so that it would be written as it is, or one that stood
    /// in none of the pages of the change, or that stays where it was as well. (A link that was left where it stood, past a smaller count, is unswizzled.)
    /// One of a page that has left the cache is found for as long as its frame has the same memory.
    #[error(
        "the change puts a swizzled link into word {word} of {page}, where the layout names none, or from elsewhere, or a second time"
    )]
    UnnamedLink {
        /// The page.
        page: PageId,
        /// The position of the word.
        word: usize,
    },
    /// The function of a change has taken it back.
    #[error("the function of the change has taken it back")]
    Refused,
    /// The page of the anchor was freed by a change.
    #[error("{page}, which the anchor keeps, was freed by a change")]
    Freed {
        /// The page.
        page: PageId,
    },
    /// A buffer has another length than the page.
    #[error("a buffer of {got} words was given for a page of {words}")]
    BufferSize {
        /// Words of the buffer.
        got: usize,
        /// Words of the page.
        words: usize,
    },
}

/// Why a call that never suspends was refused. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Somebody was faster: begin anew.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// A mistake in the caller's code.
    #[error(transparent)]
    Misuse(#[from] Misuse),
}

impl<E: std::error::Error + 'static> From<PageError> for CacheError<E> {
    fn from(error: PageError) -> Self {
        match error {
            PageError::Conflict(conflict) => Self::Conflict(conflict),
            PageError::Misuse(misuse) => Self::Misuse(misuse),
        }
    }
}

/// Why a page cannot be had, or not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError<E: std::error::Error + 'static> {
    /// Somebody was faster: begin anew.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// A mistake in the caller's code.
    #[error(transparent)]
    Misuse(#[from] Misuse),
    /// The store failed. After a failed write the page is still cached and still differs from the store's copy.
    #[error("{page}: {source}")]
    Store {
        /// The page.
        page: PageId,
        /// What the store said.
        source: E,
    },
    /// The store has not said whether it has written pages: it gave too few answers, or dropped the task that writes
    /// ([`Store::spawn`](crate::Store::spawn)). They are still cached and still dirty.
    #[error("the store has not said whether it has written {pages} pages; it gave too few answers, or dropped a task")]
    Unanswered {
        /// How many pages.
        pages: usize,
    },
    /// A page from the store has a link that no store may hold.
    #[error(
        "{page} came from the store with a swizzled link in word {word}; the store is corrupt, or `Layout::links` names a word that is no link"
    )]
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
    /// A page is larger than the cache takes.
    #[error("a page of {bytes} bytes; this cache takes pages of up to {max}")]
    TooLarge {
        /// Bytes of the page.
        bytes: usize,
        /// [`PageCache::page_bytes_max`](crate::PageCache::page_bytes_max).
        max: usize,
    },
    /// A page that was to be a new one is cached already.
    #[error("{page} is cached, so it is not a new page; free it first, or choose another id")]
    NotNew {
        /// The page.
        page: PageId,
    },
    /// Every frame is held by operations in flight, or by pages that the store did not take.
    #[error(
        "no page can make room for one of {class:?}: {held}; use a larger cache or fewer operations at a time{}",
        last_write_error.as_ref().map(|error| format!(" (the store refused a page: {error})")).unwrap_or_default()
    )]
    NoRoom {
        /// The size of the page that finds none.
        class: SizeClass,
        /// What holds the frames.
        held: &'static str,
        /// What the store said to the last write that failed.
        last_write_error: Option<String>,
    },
}
