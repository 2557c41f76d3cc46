//! What keeps a page where it is.

use std::fmt;

use super::CacheHandle;
use crate::{
    cache::PageCache,
    error::{Conflict, Misuse, PageError},
    id::PageId,
    sync::Arc,
    traits::{Layout, Store},
};

/// Keeps a page cached: see [`CacheHandle::anchor`].
pub struct Anchor<L: Layout> {
    pub(super) cache: Arc<PageCache<L>>,
    pub(super) index: u32,
    pub(super) page: PageId,
}

impl<L: Layout> Anchor<L> {
    /// Why its page cannot be entered.
    #[cold]
    #[inline(never)]
    pub(super) fn why_not(&self, cache: &PageCache<L>) -> PageError {
        if !std::ptr::eq(cache, &raw const *self.cache) {
            return Misuse::OtherCache.into();
        }
        match cache.frame(self.index).page() == Some(self.page) {
            true => Conflict::Changed.into(),
            // Another page is there, or none: a pinned page goes only if a change frees it.
            false => Misuse::Freed { page: self.page }.into(),
        }
    }
}

impl<L: Layout> fmt::Debug for Anchor<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Anchor").field("frame", &self.index).finish_non_exhaustive()
    }
}

impl<L: Layout> Drop for Anchor<L> {
    fn drop(&mut self) {
        self.cache.frame(self.index).unpin();
    }
}

/// A page whose frame stays in place meanwhile.
pub(crate) struct Pinned<'a, S: Store, L: Layout> {
    pub(super) handle: &'a CacheHandle<S, L>,
    pub(crate) index: u32,
}

impl<S: Store, L: Layout> Drop for Pinned<'_, S, L> {
    fn drop(&mut self) {
        self.handle.cache().frame(self.index).unpin();
    }
}
