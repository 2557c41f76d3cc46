//! Changes to cached pages.
//!
//! A change takes effect on all its pages at once, under their locks, without suspending in between. Links in a page may be
//! swizzled, and may be moved from page to page as they are: after the change, the pages below are told who their parent is
//! now; one that no link leads to any more is found through the table alone until somebody follows a link to it.
//!
//! Nobody waits for a lock while holding one, but for a change that frees a page to which another page still has a swizzled link:
//! it waits for that page's lock. By then it holds only the locks of pages that it frees, and none of those is anybody's parent,
//! so no such change waits for another one.
//!
//! What moves from page to page may move past a flush, which looks at one after the other. So a change of several pages has
//! those written first that a flush under way is about to write.

use crate::{
    error::{CacheError, Conflict},
    fetch::Taken,
    frame::{NONE, State},
    handle::{CacheHandle, Page},
    id::{Link, PageId, SizeClass, is_swizzled},
    sync::{AtomicU64, Ordering, Spin, Step, fence, is_left_out},
    traits::{Layout, Store},
};

/// Room in the cache for a page that is to come into being with a change; see [`CacheHandle::reserve`].
pub struct NewPage<'a, S: Store, L: Layout> {
    pub(crate) taken: Taken<'a, S, L>,
    id: PageId,
}

impl<S: Store, L: Layout> std::fmt::Debug for NewPage<'_, S, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewPage").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The pages of one change, locked: first those given to [`CacheHandle::change`], then the new ones, numbered in that order.
#[derive(Debug, Default)]
pub struct Change<'a> {
    bodies: Vec<&'a [AtomicU64]>,
    fates: Vec<Fate>,
}

/// What a change makes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Kept,
    Changed,
    Freed,
}

impl Change<'_> {
    /// How many words `page` has.
    pub fn count(&self, page: usize) -> usize {
        self.bodies[page].len()
    }

    /// All words of `page`.
    pub fn words(&self, page: usize) -> &[AtomicU64] {
        self.bodies[page]
    }

    /// A word of `page`, as changed so far. Words of a new page are zero at first. A link may be swizzled.
    pub fn word(&self, page: usize, index: usize) -> u64 {
        self.bodies[page][index].load(Ordering::Relaxed)
    }

    /// Sets a word of `page`. A link is set to the id of a page, or to a link word that stood in a page of this change.
    pub fn set(&mut self, page: usize, index: usize, word: u64) {
        self.bodies[page][index].store(word, Ordering::Relaxed);
        if self.fates[page] == Fate::Kept {
            self.fates[page] = Fate::Changed;
        }
    }

    /// Drops `page` from the cache with this change, unwritten: nothing links to it any more.
    pub fn free(&mut self, page: usize) {
        self.fates[page] = Fate::Freed;
    }
}

/// Locks that were taken for a change; given back with nothing changed unless the change is made.
struct Locked<'a, 'p, S: Store, L: Layout> {
    pages: &'a [&'a Page<'p, S, L>],
    count: usize,
}

impl<S: Store, L: Layout> Drop for Locked<'_, '_, S, L> {
    fn drop(&mut self) {
        // A panic in the middle may have changed words: a new version for each, and to be written.
        for page in &self.pages[..self.count] {
            page.frame.set_dirty(page.handle.cache().flushes());
            page.frame.lock.unlock();
        }
    }
}

/// New pages that the table knows; it forgets them if their change panics.
struct Entered<'a, S: Store, L: Layout> {
    handle: &'a CacheHandle<S, L>,
    pages: Vec<(PageId, u32)>,
}

impl<S: Store, L: Layout> Drop for Entered<'_, S, L> {
    fn drop(&mut self) {
        self.pages.iter().for_each(|&(page, index)| self.handle.cache().table.remove(page, index));
    }
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// Makes room for a new page, to be given to [`CacheHandle::change`]. Suspends while there is no room.
    ///
    /// # Errors
    /// [`CacheError::NotNew`] if a page of that id is cached; [`CacheError::NoRoom`].
    pub async fn reserve(&self, id: PageId, class: SizeClass) -> Result<NewPage<'_, S, L>, CacheError<S::Error>> {
        if self.contains(id) {
            return Err(CacheError::NotNew { page: id });
        }
        Ok(NewPage { taken: Box::pin(self.take_frame(class)).await?, id })
    }

    /// Changes pages, and adds new ones: all of it, if none of `pages` has changed since it was looked up, or nothing. They
    /// are dirty from then on. Does not suspend, and waits for nobody. `pages` stay current for whoever made the change; all
    /// other looks at them are over.
    ///
    /// # Errors
    /// If one of them has changed, is being changed, is on its way to the store or now sent there for a flush, or if a new page
    /// has come to be cached: begin anew. `f` was not called, and the new pages are free again.
    ///
    /// # Panics
    /// If `f` does, or names a page or a word that is not there. What it had set until then stays, half a change: discard the
    /// cache.
    pub fn change<'a, R>(
        &'a self,
        pages: &[&Page<'a, S, L>],
        new: Vec<NewPage<'a, S, L>>,
        f: impl FnOnce(&mut Change<'a>) -> R,
    ) -> Result<R, Conflict> {
        let mut locked = Locked { pages, count: 0 };
        for page in pages {
            if !page.frame.lock.try_upgrade(page.version()) {
                self.count_failed(page);
                self.unlock_unchanged(locked);
                return Err(Conflict);
            }
            locked.count += 1;
            // Its end must not come before that of the write.
            if page.frame.is_writing() || !self.open(page) {
                self.unlock_unchanged(locked);
                return Err(Conflict);
            }
        }
        let Some(flushes) = self.flushes_for(pages, pages.len() + new.len() > 1) else {
            self.write_due(locked);
            return Err(Conflict);
        };
        let Some(mut entered) = self.enter_new(&new) else {
            self.unlock_unchanged(locked);
            return Err(Conflict);
        };
        let bodies = pages.iter().map(|page| page.words).chain(new.iter().map(|new| self.clear(new.taken.index)));
        let mut change = Change { bodies: bodies.collect(), fates: vec![Fate::Kept; pages.len()] };
        change.fates.resize(pages.len() + new.len(), Fate::Changed);
        let kids_before = self.kids_of(pages);
        let result = f(&mut change);
        entered.pages.clear();
        let fates = change.fates;
        self.settle(pages, &new, &fates, kids_before, flushes);
        for (NewPage { taken, id }, &fate) in new.into_iter().zip(&fates[pages.len()..]) {
            if fate == Fate::Freed {
                self.cache().table.remove(id, taken.index);
            } else {
                self.cache().frame(taken.index).lock.unlock();
                std::mem::forget(taken);
            }
        }
        locked.count = 0;
        let is_last = |fate| fate == Fate::Freed && !is_left_out(Step::FreedLast);
        for last in [false, true] {
            for (page, &fate) in pages.iter().zip(&fates).filter(|&(_, &fate)| is_last(fate) == last) {
                self.close(page, fate, Some(flushes));
            }
        }
        Ok(result)
    }

    /// How many flushes have begun, for a change of pages whose locks the caller holds; `None` if one is about to write a page
    /// from which something may move.
    fn flushes_for(&self, pages: &[&Page<'_, S, L>], may_move: bool) -> Option<u32> {
        if !may_move {
            return Some(self.cache().flushes());
        }
        fence(Ordering::SeqCst);
        let flushes = self.cache().flushes();
        let is_due = self.cache().is_flushing() && pages.iter().any(|page| page.frame.is_due(flushes));
        (!is_due || is_left_out(Step::FlushedFirst)).then_some(flushes)
    }

    /// Sends pages that a flush is about to write to the store, in place of changing them.
    fn write_due(&self, locked: Locked<'_, '_, S, L>) {
        let flushes = self.cache().flushes();
        let due = locked.pages.iter().filter(|page| page.frame.is_due(flushes));
        let snapshots: Vec<_> = due.filter_map(|page| self.snapshot(page.index(), page.id).ok()).collect();
        self.unlock_unchanged(locked);
        if !snapshots.is_empty() {
            drop(self.begin_writes(snapshots, false));
        }
    }

    /// Changes one page as it is now, whether or not it has changed since it was looked up: `f` looks again at what it
    /// relies on. Waits in a queue behind other writers of the page; does not suspend. `f` must not free the page.
    ///
    /// # Errors
    /// If the page is no longer here: begin anew. `f` was not called.
    pub fn alter<'a, R>(&'a self, page: &Page<'a, S, L>, f: impl FnOnce(&mut Change<'a>) -> R) -> Result<R, Conflict> {
        self.alter_as(page, true, f)
    }

    fn alter_as<'a, R>(
        &'a self,
        page: &Page<'a, S, L>,
        is_news: bool,
        f: impl FnOnce(&mut Change<'a>) -> R,
    ) -> Result<R, Conflict> {
        if !page.frame.lock.try_upgrade(page.version()) {
            self.count_failed(page);
            // A frame that is free, or whose next page is on its way, stays locked for long.
            let is_wanted = || {
                let state = page.frame.state();
                page.frame.page() == Some(page.id) && matches!(state, State::Resident | State::Cooling | State::Guest)
            };
            if !page.frame.lock.lock_if(&self.cache().waiters, self.0.number, is_wanted) {
                return Err(Conflict);
            }
        }
        let pages = [page];
        let mut locked = Locked { pages: &pages, count: 1 };
        // A guest is for its users: the last of them may be leaving, with what we would change.
        let is_ours = page.is_guest() || page.frame.state() != State::Guest;
        let is_here = page.frame.page() == Some(page.id) && page.frame.state() != State::Ghost && is_ours;
        if !is_here || !self.open(page) {
            self.unlock_unchanged(locked);
            return Err(Conflict);
        }
        let mut change = Change { bodies: vec![page.words], fates: vec![Fate::Kept] };
        let kids_before = self.kids_of(&pages);
        let result = f(&mut change);
        let fate = change.fates[0];
        assert!(fate != Fate::Freed, "a page is freed by a change, not altered away");
        let flushes = self.cache().flushes();
        if fate == Fate::Changed {
            self.settle(&pages, &[], &[fate], kids_before, flushes);
        }
        locked.count = 0;
        self.close(page, fate, is_news.then_some(flushes));
        Ok(result)
    }

    /// Ends a change for one of its pages. The store does not have it yet if it is news since so many flushes.
    fn close(&self, page: &Page<'_, S, L>, fate: Fate, news: Option<u32>) {
        match fate {
            Fate::Kept => page.set_version(page.frame.lock.unlock_unchanged()),
            Fate::Changed => {
                if let Some(flushes) = news {
                    page.frame.set_dirty(flushes);
                }
                page.set_version(page.frame.lock.unlock());
            }
            Fate::Freed => self.free_locked(page),
        }
    }

    fn unlock_unchanged(&self, mut locked: Locked<'_, '_, S, L>) {
        let count = std::mem::take(&mut locked.count);
        for page in &locked.pages[..count] {
            page.frame.lock.unlock_unchanged();
        }
    }

    fn count_failed(&self, page: &Page<'_, S, L>) {
        self.0.counters.count(page.level(), |level| level.failed_upgrades += 1);
    }

    /// Prepares a locked page for a change; false if it is none that can be changed.
    fn open(&self, page: &Page<'_, S, L>) -> bool {
        match page.frame.state() {
            State::Resident | State::Guest => {}
            // A cooling page is clean: it must not stay one.
            State::Cooling => return self.cache().let_in(page.index(), State::Resident),
            _ => return false,
        }
        true
    }

    /// Enters new pages into the table, all or none. Whoever looks one up waits for its lock.
    fn enter_new(&self, new: &[NewPage<'_, S, L>]) -> Option<Entered<'_, S, L>> {
        let cache = self.cache();
        let mut entered = Entered { handle: self, pages: Vec::with_capacity(new.len()) };
        for NewPage { taken, id } in new {
            cache.frame(taken.index).set_page(Some(*id));
            if !cache.table.insert(&cache.arena, *id, taken.index) {
                return None;
            }
            entered.pages.push((*id, taken.index));
        }
        Some(entered)
    }

    fn clear(&self, index: u32) -> &[AtomicU64] {
        let body = self.cache().arena.body(self.cache().frame(index));
        body.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        body
    }

    /// The frames that these pages have swizzled links to.
    fn kids_of(&self, pages: &[&Page<'_, S, L>]) -> Vec<u32> {
        let mut kids = Vec::new();
        for page in pages.iter().filter(|page| page.frame.kids() != 0) {
            for slot in self.cache().layout.links(page.words) {
                if let Link::Frame { frame, .. } = link_at(page.words, slot) {
                    kids.push(frame);
                }
            }
        }
        kids
    }

    /// After a change, before the unlocks: new pages become pages, and the pages below learn who their parent is.
    fn settle(
        &self,
        pages: &[&Page<'_, S, L>],
        new: &[NewPage<'_, S, L>],
        fates: &[Fate],
        mut kids_before: Vec<u32>,
        flushes: u32,
    ) {
        let cache = self.cache();
        let indices = pages.iter().map(|page| page.index()).chain(new.iter().map(|new| new.taken.index));
        let (live, freed): (Vec<_>, Vec<_>) = indices.zip(fates).partition(|&(_, &fate)| fate != Fate::Freed);
        let [live, freed] = [live, freed].map(|some| some.into_iter().map(|(index, _)| index).collect::<Vec<u32>>());
        for (new, _) in new.iter().zip(&fates[pages.len()..]).filter(|&(_, &fate)| fate != Fate::Freed) {
            let frame = cache.frame(new.taken.index);
            frame.set_users(0);
            frame.set_kids(0);
            frame.set_parent(NONE, 0);
            frame.set_dirty(flushes);
            cache.heat.set(frame, 1);
            frame.set_state(State::Resident);
        }
        for &index in &live {
            let frame = cache.frame(index);
            let body = cache.arena.body(frame);
            let level = cache.layout.level(body);
            frame.set_level(level);
            if level == 0 && frame.kids() == 0 {
                continue;
            }
            let mut kids = 0;
            for slot in cache.layout.links(body) {
                match link_at(body, slot) {
                    // A guest may go at any time: it keeps no swizzled link. Nor does a link stay swizzled to a page that goes now.
                    Link::Frame { frame: kid, .. } if frame.state() == State::Guest || freed.contains(&kid) => {
                        if let Some(page) = cache.arena.get(kid).and_then(|kid| kid.page()) {
                            body[slot].store(page.get(), Ordering::Relaxed);
                        }
                    }
                    Link::Frame { frame: kid, .. } if cache.arena.get(kid).is_some() => {
                        cache.frame(kid).set_parent(index, slot);
                        kids_before.retain(|&before| before != kid);
                        kids += 1;
                    }
                    Link::Page(page) if frame.state() == State::Resident => {
                        // A page of this very change: it is here, and ours.
                        let is_its = |&&kid: &&u32| kid != index && cache.frame(kid).page() == Some(page);
                        if let Some(&kid) = live.iter().find(is_its)
                            && cache.frame(kid).parent() == NONE
                            && cache.frame(kid).state() == State::Resident
                        {
                            cache.frame(kid).set_parent(index, slot);
                            body[slot].store(Link::swizzled(kid, cache.frame(kid).unit()), Ordering::Relaxed);
                            kids += 1;
                        }
                    }
                    _ => {}
                }
            }
            frame.set_kids(kids);
        }
        cache.detach(&kids_before, || kids_before.iter().for_each(|&kid| cache.frame(kid).set_parent(NONE, 0)));
        let unlinked: Vec<u32> =
            new.iter().map(|new| new.taken.index).filter(|&index| cache.is_unlinked(index)).collect();
        cache.detach(&unlinked, || ());
        cache.move_kept(&live, &freed);
    }

    /// Drops a locked page.
    fn free_locked(&self, page: &Page<'_, S, L>) {
        let frame = page.frame;
        frame.set_clean();
        self.cache().table.remove(page.id, page.index());
        if frame.state() == State::Guest {
            // Its users, this one among them, let go of it one by one.
            frame.set_state(State::Ghost);
            frame.lock.unlock();
            return;
        }
        // A link that the change left behind.
        let mut spin = Spin::default();
        while !self.unswizzle(frame, page.index()) {
            spin.turn();
        }
        frame.set_state(State::Taken);
        self.give_back(page.index());
    }

    /// Drops a page from the cache, unwritten: what the store has counts from now on. True if it was cached. Suspends while
    /// the page is on its way to or from the store.
    ///
    /// # Errors
    /// [`CacheError::NoRoom`] if it is pinned by operations in flight, or anchored, for so long that it cannot go.
    pub async fn invalidate(&self, page: PageId, class: SizeClass) -> Result<bool, CacheError<S::Error>> {
        for _ in 0..INVALIDATE_TRIES_MAX {
            if !self.cache().table.contains(&self.cache().arena, page) {
                return Ok(false);
            }
            let found = self.load(page, class).await?;
            if self.try_invalidate(&found) {
                return Ok(true);
            }
            drop(found);
            crate::fetch::yield_once().await;
        }
        Err(self.no_room("the page to drop is in use"))
    }

    fn try_invalidate(&self, page: &Page<'_, S, L>) -> bool {
        let frame = page.frame;
        if !frame.lock.try_upgrade(page.version()) {
            return false;
        }
        crate::sync::fence(Ordering::SeqCst);
        let is_needed = frame.is_writing() || frame.pins() != 0;
        // A guest's parent has no link to it.
        if is_needed || (!page.is_guest() && !self.unswizzle(frame, page.index())) {
            frame.lock.unlock_unchanged();
            return false;
        }
        let pages = [page];
        let kids = self.kids_of(&pages);
        self.cache().detach(&kids, || kids.iter().for_each(|&kid| self.cache().frame(kid).set_parent(NONE, 0)));
        self.free_locked(page);
        true
    }

    /// Replaces a cached page by a newer image of it, which the store has too. Links to pages that are cached stay swizzled.
    /// Waits for other writers of the page; does not suspend.
    ///
    /// # Errors
    /// If the page is no longer here.
    pub fn refresh<'a>(&'a self, page: &Page<'a, S, L>, image: &[u64]) -> Result<(), Conflict> {
        let swizzled = |words: &[AtomicU64]| {
            let mut links = Vec::new();
            for slot in self.cache().layout.links(words) {
                if let Link::Frame { frame, .. } = link_at(words, slot)
                    && let Some(kid) = self.cache().arena.get(frame).and_then(|kid| kid.page())
                {
                    links.push((kid.get(), words[slot].load(Ordering::Relaxed)));
                }
            }
            links
        };
        self.alter_as(page, false, |change| {
            let links = swizzled(change.words(0));
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
                again.extend(links.iter().find(|&&(kid, _)| kid == word).map(|&(_, link)| (slot, link)));
            }
            again.into_iter().for_each(|(slot, link)| change.set(0, slot, link));
        })
    }
}

const INVALIDATE_TRIES_MAX: u32 = 10_000;

fn link_at(words: &[AtomicU64], slot: usize) -> Link {
    words.get(slot).map_or(Link::Null, |word| Link::of(word.load(Ordering::Relaxed)))
}
