//! Subtrees that are excluded from the cache while somebody else works on them: a memory server that
//! carries out an operation there (DEX, VLDB 2024, section 6.2).
//!
//! *What is promised.* While a page is excluded ([`CacheHandle::exclude`]), nothing at or below it is changed in the
//! cache, and the store has the newest version of all of it. Whoever follows a link to the page waits, as for a fetch.
//!
//! *How.* The page is not cached, and gets a table entry that looks like a fetch under way; the page above is pinned. If
//! every page were reached through swizzled links, nothing below could be cached: a page stays while it has such a link in
//! it, and goes only when the store has it. Two kinds of pages are reached otherwise.
//!
//! - *Unlinked resident pages*: bypass pages, and pages to which no swizzled link leads though they do not cool (they came
//!   through a link between siblings, or their parent was locked when they came). Each is on a list from before it can be used
//!   until it cools, goes or gets its link. A page is not excluded while an unlinked page is below it, and none that is below
//!   is published or rescued while it is excluded: whoever wants it begins anew. Both look under one lock.
//! - *Cooling* pages. They are clean, and reading one is as if it had been read before whatever happens below the page that
//!   is excluded. They must be rescued to be changed, which makes them unlinked pages. Those that were changed in the store are
//!   dropped before the exclusion ends ([`ExclusionGuard::drop_changed`]), and a fetch of one that is under way, which may
//!   bring the version from before, is waited for: it ends as an unlinked page, and fails.
//!
//! What is below a page, only its owner knows: a function says it of a page's words. All this costs nothing where a
//! swizzled link is followed, and is done only in a cache that is made for it
//! ([`CacheOptions::excludes_subtrees`](crate::CacheOptions::excludes_subtrees)).

use std::{fmt, future::poll_fn, task::Poll};

use crate::{
    cache::PageCache,
    cooling::Cooled,
    error::{CacheError, Conflict, Misuse},
    exclusion_list::{Excluded, Lists, UNLINKED_MIN},
    fetch::yield_once,
    frame::{Frame, NONE, State},
    handle::{CacheHandle, Page},
    id::{PageId, SizeClass},
    sync::{AtomicU64, Step, is_left_out},
    table::Found,
    traits::{Layout, Store},
};

/// Whether a page is one to which nothing leads but the table.
fn is_unlinked_page(frame: &Frame, page: PageId) -> bool {
    let is_unlinked = match frame.state() {
        State::Bypass => true,
        State::Resident => frame.parent() == NONE,
        _ => false,
    };
    is_unlinked && frame.page() == Some(page)
}

impl<L: Layout> PageCache<L> {
    /// Has a page that no link leads to be in a state in which it can be used; the caller holds its lock. False if it is
    /// below a page that is excluded: its state is then as it was.
    pub(crate) fn publish(&self, index: u32, state: State) -> bool {
        let frame = self.frame(index);
        if self.exclusions.is_on {
            let mut lists = self.exclusions.lists();
            let body = self.arena.body(frame);
            if !is_left_out(Step::UnlinkedCheck) && lists.excluded.iter().any(|excluded| (excluded.is_below)(body)) {
                return false;
            }
            self.note_unlinked(&mut lists, index);
            frame.set_state(state);
        } else {
            frame.set_state(state);
        }
        true
    }

    /// [`PageCache::publish`] for a cooling page that was taken out of the map to be evicted, and cannot go. If it cannot be
    /// published, it goes on cooling, and back into the map later.
    pub(crate) fn cancel_eviction(&self, cooled: Cooled) {
        if self.publish(cooled.frame, State::Resident) {
            return;
        }
        let frame = self.frame(cooled.frame);
        let (mut lists, body) = (self.exclusions.lists(), self.arena.body(frame));
        let Some(page) = frame.page() else { return };
        match lists.excluded.iter_mut().find(|excluded| (excluded.is_below)(body)) {
            Some(excluded) => excluded.left_cooling.push((page, cooled)),
            None => {
                self.note_unlinked(&mut lists, cooled.frame);
                frame.set_state(State::Resident);
            }
        }
    }

    /// Notes cached pages that no link leads to once `detach` is done. They are below no page that is excluded.
    pub(crate) fn detach(&self, frames: &[u32], detach: impl FnOnce()) {
        if !self.exclusions.is_on || frames.is_empty() {
            return detach();
        }
        let mut lists = self.exclusions.lists();
        detach();
        frames.iter().for_each(|&index| self.note_unlinked(&mut lists, index));
    }

    /// Whether it has to be noted that no link leads to a page.
    pub(crate) fn is_unlinked(&self, index: u32) -> bool {
        let frame = self.frame(index);
        self.exclusions.is_on && frame.state() == State::Resident && frame.parent() == NONE
    }

    fn note_unlinked(&self, lists: &mut Lists, index: u32) {
        let Some(page) = self.frame(index).page() else { return };
        if lists.unlinked.len() >= lists.prune_at.max(UNLINKED_MIN) {
            self.prune(lists);
        }
        // After the pruning: it is not in its new state yet.
        lists.unlinked.push((index, page));
    }

    /// Takes those off the list that are none any more.
    fn prune(&self, lists: &mut Lists) {
        lists.unlinked.sort_unstable();
        lists.unlinked.dedup();
        lists.unlinked.retain(|&(index, page)| is_unlinked_page(self.frame(index), page));
        lists.prune_at = 2 * lists.unlinked.len();
    }

    /// Links have moved between these pages, whose locks the caller holds: where one to a page that is excluded has come to
    /// another page, that one is pinned from now on.
    pub(crate) fn move_excluded(&self, live: &[u32], freed: &[u32]) {
        if !self.exclusions.is_on || live.len() + freed.len() < 2 {
            return;
        }
        let mut lists = self.exclusions.lists();
        for excluded in lists
            .excluded
            .iter_mut()
            .filter(|excluded| live.contains(&excluded.parent) || freed.contains(&excluded.parent))
        {
            let leads_there = |&&index: &&u32| {
                let body = self.arena.body(self.frame(index));
                self.layout.links(body).any(|slot| {
                    let word = body.get(slot).map_or(0, |word| word.load(crate::sync::Ordering::Relaxed));
                    word == excluded.page.get()
                })
            };
            if let Some(&parent) = live.iter().find(leads_there)
                && parent != excluded.parent
            {
                self.frame(parent).pin();
                self.frame(std::mem::replace(&mut excluded.parent, parent)).unpin();
            }
        }
    }

    /// Excludes a page that has its entry already, unless an unlinked page is below it.
    fn begin_exclusion(&self, excluded: Excluded) -> bool {
        let mut lists = self.exclusions.lists();
        self.prune(&mut lists);
        let may_be_below = |&(index, _): &(u32, PageId)| {
            let frame = self.frame(index);
            // Who changes it may be about to move its fences.
            let Some(version) = frame.lock.read() else { return true };
            (excluded.is_below)(self.arena.body(frame)) || !frame.lock.validate(version)
        };
        if !is_left_out(Step::UnlinkedFirst) && lists.unlinked.iter().any(may_be_below) {
            return false;
        }
        lists.excluded.push(excluded);
        true
    }
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// Excludes the page that a link of `from` leads to, which is not cached, and all that is below it, for as long as the
    /// result lives: see the module's documentation in the source. `is_below` says of a page's words, which may be of
    /// different moments, whether the page is below that page: on a lower level, and with something in common.
    ///
    /// `None` if the page cannot be excluded now: it is cached or on its way, or something below it is; or `from` may go.
    /// Follow the link instead. Suspends for room.
    ///
    /// Whoever holds the result asks for no room, and does not wait in [`CacheHandle::until_fetched`]: it has a frame, and counts as a
    /// page that is on its way, for which both wait.
    ///
    /// # Errors
    /// [`CacheError::Conflict`] if `from` has changed and the link is not there any more; [`CacheError::NoRoom`].
    ///
    /// # Panics
    /// If the cache was not made with [`CacheOptions::excludes_subtrees`](crate::CacheOptions::excludes_subtrees).
    pub async fn exclude(
        &self,
        from: &Page<'_, S, L>,
        word: u64,
        class: SizeClass,
        is_below: impl Fn(&[AtomicU64]) -> bool + Send + 'static,
    ) -> Result<Option<ExclusionGuard<S, L>>, CacheError<S::Error>> {
        let cache = self.cache();
        assert!(cache.exclusions.is_on, "the cache was not made to exclude subtrees");
        if !self.is_ours(from) {
            return Err(Misuse::OtherCache.into());
        }
        let Some(page) = PageId::new(word) else { return Ok(None) };
        if from.is_bypass() || from.frame.state() != State::Resident || self.contains(page) {
            return Ok(None);
        }
        let taken = Box::pin(self.take_frame(class)).await?;
        let pinned = self.pin(from)?;
        let (index, parent) = (taken.index, pinned.index);
        let frame = cache.frame(index);
        frame.set_page(Some(page));
        frame.set_state(State::Loading);
        if !is_left_out(Step::ExcludedEntry) && !cache.table.insert(&cache.arena, page, index) {
            frame.set_state(State::Held);
            frame.set_page(None);
            return Ok(None);
        }
        cache.begin_transfer();
        std::mem::forget((taken, pinned));
        let mut guard = ExclusionGuard { handle: self.clone(), index, page, parent };
        // From here on nobody frees the page without us; it may have been freed before.
        if !self.still_links(from, page) {
            return Err(Conflict::Changed.into());
        }
        let excluded = Excluded { index, page, parent, is_below: Box::new(is_below), left_cooling: Vec::new() };
        if !cache.begin_exclusion(excluded) {
            return Ok(None);
        }
        guard.parent = NONE;
        Ok(Some(guard))
    }

    /// Takes a cooling page out of the cache; true if that is done, or the page is in another state by now.
    fn evict_cooling(&self, index: u32, page: PageId, version: crate::frame_lock::Version) -> bool {
        let (cache, frame) = (self.cache(), self.cache().frame(index));
        if !frame.lock.try_upgrade(version) {
            return false;
        }
        crate::sync::fence(crate::sync::Ordering::SeqCst);
        if frame.state() != State::Cooling || frame.page() != Some(page) || frame.pins() != 0 {
            // Pinned: a page below it is being fetched, and will not be published.
            frame.lock.unlock_unchanged();
            return false;
        }
        cache.table.remove(page, index);
        cache.cooling.remove(page, Cooled { frame: index, tag: version.tag() });
        // Whoever looks at it may have seen what the store has no more.
        frame.lock.note_change();
        frame.set_state(State::Held);
        self.give_back(index);
        true
    }
}

/// Keeps a page, and all below it, out of the cache: see [`CacheHandle::exclude`].
pub struct ExclusionGuard<S: Store, L: Layout> {
    handle: CacheHandle<S, L>,
    /// The frame of its entry.
    index: u32,
    page: PageId,
    /// The frame that is pinned, until the page is on the list of those that are excluded, which says so then.
    parent: u32,
}

impl<S: Store, L: Layout> fmt::Debug for ExclusionGuard<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExclusionGuard").field("page", &self.page).finish_non_exhaustive()
    }
}

impl<S: Store, L: Layout> ExclusionGuard<S, L> {
    /// The page.
    pub fn page(&self) -> PageId {
        self.page
    }

    /// Drops what is cached of a page below, which was changed in the store: a version from before. To be called before
    /// this is dropped. Suspends while such a version is on its way. A page that is excluded itself is not cached: nobody waits for
    /// another exclusion, which may wait for this one.
    pub async fn drop_changed(&self, page: PageId) {
        if page == self.page {
            return;
        }
        loop {
            match self.settled(page).await {
                Found::Here { frame, version, state: State::Cooling } => {
                    if self.handle.evict_cooling(frame, page, version) {
                        return;
                    }
                }
                // Whatever else is here is not below.
                Found::Absent | Found::Here { .. } => return,
                Found::Busy | Found::Loading => {}
            }
            yield_once().await;
        }
    }

    /// [`ExclusionGuard::drop_changed`] for every page below: nobody knows which were changed.
    pub async fn drop_all(&self) {
        let cache = self.handle.cache();
        for index in cache.frame_numbers() {
            let frame = cache.frame(index);
            let Some(page) = frame.page() else { continue };
            let is_locked = frame.lock.read().is_none() && !is_left_out(Step::CoolingDropped);
            let is_meant = match frame.state() {
                // Its link is gone, perhaps, and it is about to cool.
                State::Resident => is_locked,
                State::Loading => !cache.exclusions.lists().excluded.iter().any(|excluded| excluded.index == index),
                State::Cooling => {
                    let (body, lists) = (cache.arena.body(frame), cache.exclusions.lists());
                    lists.excluded.iter().any(|excluded| excluded.index == self.index && (excluded.is_below)(body))
                }
                _ => false,
            };
            if is_meant {
                self.drop_changed(page).await;
            }
        }
    }

    /// Where a page is, once it is not being fetched.
    async fn settled(&self, page: PageId) -> Found {
        let (handle, cache) = (&self.handle, self.handle.cache());
        let found = poll_fn(|cx| match cache.table.find(&cache.arena, page, Some(cx.waker())) {
            Found::Loading if is_left_out(Step::LoadingDropped) => Poll::Ready(Found::Absent),
            Found::Loading if cache.exclusions.lists().excluded.iter().any(|excluded| excluded.page == page) => {
                Poll::Ready(Found::Absent)
            }
            Found::Loading => Poll::Pending,
            found => Poll::Ready(found),
        })
        .await;
        if let Found::Here { frame, state: State::Bypass, .. } = found {
            // Looking it up has made us a user.
            handle.leave(frame, page);
        }
        found
    }
}

impl<S: Store, L: Layout> Drop for ExclusionGuard<S, L> {
    fn drop(&mut self) {
        let cache = self.handle.cache();
        let mut left_cooling = Vec::new();
        let mut parent = self.parent;
        if parent == NONE {
            let mut lists = cache.exclusions.lists();
            if let Some(at) = lists.excluded.iter().position(|excluded| excluded.index == self.index) {
                let excluded = lists.excluded.swap_remove(at);
                (parent, left_cooling) = (excluded.parent, excluded.left_cooling);
            }
        }
        cache.table.remove(self.page, self.index);
        let frame = cache.frame(self.index);
        frame.set_state(State::Held);
        frame.set_page(None);
        cache.table.wake(self.page);
        if parent != NONE {
            cache.frame(parent).unpin();
        }
        self.handle.give_back(self.index);
        cache.end_transfer();
        for (page, cooled) in left_cooling {
            cache.cooling.push(page, cooled).map(|oldest| self.handle.evict_one(oldest));
        }
    }
}
