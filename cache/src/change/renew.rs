//! Copies that the store has newer ones of.

use super::Locked;
use crate::{
    error::{CacheError, Misuse, PageError},
    frame::{Frame, NONE},
    handle::{CacheHandle, Page},
    id::{Link, PageId, SizeClass, is_swizzled},
    sync::{AtomicU64, Ordering, Step, is_left_out},
    table::Found,
    traits::{Layout, Store},
};

const INVALIDATE_TRIES_MAX: u32 = 10_000;

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// Drops a page from the cache, unwritten: what the store has counts from now on. True if it was cached. Suspends while
    /// the page is on its way to or from the store.
    ///
    /// # Errors
    /// [`CacheError::NoRoom`] if it is pinned by operations in flight, or anchored, for so long that it cannot go.
    pub async fn invalidate(&self, page: PageId, class: SizeClass) -> Result<bool, CacheError<S::Error>> {
        self.invalidate_as(page, class, |_, _| true).await
    }

    /// [`CacheHandle::invalidate`] of a page that is not dirty, if a function says so of its words, which do not change meanwhile.
    /// True if it was dropped. The function must not call the cache: it would wait for the page's lock.
    ///
    /// # Errors
    /// As [`CacheHandle::invalidate`].
    pub async fn invalidate_if(
        &self,
        page: PageId,
        class: SizeClass,
        mut is_meant: impl FnMut(&[AtomicU64]) -> bool,
    ) -> Result<bool, CacheError<S::Error>> {
        self.invalidate_as(page, class, |frame, words| !frame.is_dirty() && is_meant(words)).await
    }

    async fn invalidate_as(
        &self,
        page: PageId,
        class: SizeClass,
        mut is_meant: impl FnMut(&Frame, &[AtomicU64]) -> bool,
    ) -> Result<bool, CacheError<S::Error>> {
        let mut tries = 0;
        while tries < INVALIDATE_TRIES_MAX {
            let (table, arena) = (&self.cache().table, &self.cache().arena);
            let is_overlooked =
                is_left_out(Step::FetchAwaited) && matches!(table.find(arena, page, None), Found::Loading);
            if is_overlooked || !table.contains(arena, page) {
                return Ok(false);
            }
            let found = self.load(page, class).await?;
            if let Some(is_dropped) = self.try_invalidate(&found, &mut is_meant) {
                return Ok(is_dropped);
            }
            // A write ends, however long it takes.
            tries += u32::from(!found.frame.is_writing());
            drop(found);
            crate::fetch::yield_once().await;
        }
        Err(self.no_room(class, "the page to drop is in use"))
    }

    /// `None` if the page is in use.
    fn try_invalidate(
        &self,
        page: &Page<'_, S, L>,
        is_meant: &mut impl FnMut(&Frame, &[AtomicU64]) -> bool,
    ) -> Option<bool> {
        let frame = page.frame;
        if !frame.lock.try_upgrade(page.version()) {
            return None;
        }
        crate::sync::fence(Ordering::SeqCst);
        if frame.is_writing() || frame.pins() != 0 {
            frame.lock.unlock_unchanged();
            return None;
        }
        let pages = [page];
        // If the function panics, the lock is given back.
        let mut locked = Locked { pages: &pages, count: 1 };
        let is_meant = is_meant(frame, self.cache().arena.body(frame));
        locked.count = 0;
        if !is_meant {
            frame.lock.unlock_unchanged();
            return Some(false);
        }
        // A bypass page's parent has no link to it.
        if !page.is_bypass() && !self.unswizzle(frame, page.index()) {
            frame.lock.unlock_unchanged();
            return None;
        }
        let children: Vec<u32> = self.children_of(&pages).iter().map(|child| child.frame).collect();
        let detach = || children.iter().for_each(|&child| self.cache().frame(child).set_parent(NONE, 0));
        self.cache().detach(&children, detach);
        self.free_locked(page);
        Some(true)
    }

    /// Replaces a cached page by a newer image of it, which the store has too. Links to pages that are cached stay swizzled.
    /// Waits for other writers of the page; does not suspend.
    ///
    /// # Errors
    /// [`Conflict`](crate::Conflict) if the page is no longer here; [`Misuse::OtherCache`](crate::Misuse::OtherCache);
    /// [`Misuse::BufferSize`](crate::Misuse::BufferSize).
    pub fn refresh<'a>(&'a self, page: &Page<'a, S, L>, image: &[u64]) -> Result<(), PageError> {
        self.refresh_if(page, image, |_| true)
    }

    /// [`CacheHandle::refresh`], if the page as it is then is older than the image, by what its words say. `is_older` must not call
    /// the cache: it would wait for the page's lock.
    ///
    /// # Errors
    /// As [`CacheHandle::refresh`].
    pub fn refresh_if<'a>(
        &'a self,
        page: &Page<'a, S, L>,
        image: &[u64],
        is_older: impl FnOnce(&[AtomicU64]) -> bool,
    ) -> Result<(), PageError> {
        let swizzled = |words: &[AtomicU64]| {
            let mut links = Vec::new();
            for slot in self.cache().layout.links(words) {
                if let Link::Frame { frame, .. } = self.link_at(words, slot)
                    && let Some(child) = self.cache().arena.get(frame).and_then(|child| child.page())
                {
                    links.push((child.get(), words[slot].load(Ordering::Relaxed)));
                }
            }
            links
        };
        if self.is_ours(page) && image.len() != page.words.len() {
            return Err(Misuse::BufferSize { got: image.len(), words: page.words.len() }.into());
        }
        self.alter_as(page, false, |change| {
            if !is_older(change.words(0)) {
                return;
            }
            let mut links = swizzled(change.words(0));
            for (index, &word) in image.iter().enumerate().take(change.count(0)) {
                change.set(0, index, word);
            }
            let mut again = Vec::new();
            for slot in self.cache().layout.links(change.words(0)) {
                let word = image.get(slot).copied().unwrap_or(0);
                if is_swizzled(word) {
                    // The store is corrupt: as a null link it leads nobody into a frame.
                    again.push((slot, 0));
                }
                // A page that is named twice keeps one swizzled link.
                let at = links.iter().position(|&(child, _)| child == word);
                again.extend(at.map(|at| (slot, links.swap_remove(at).1)));
            }
            again.into_iter().for_each(|(slot, link)| change.set(0, slot, link));
        })
    }
}
