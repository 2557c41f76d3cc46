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
//! Every word that is set is remembered until the change is made: a panic in the caller's function, and a change that would
//! have a swizzled link written, put the words back.
//!
//! What moves from page to page may move past a flush, which looks at one after the other. So a change of several pages has
//! those written first that a flush under way is about to write.

mod edit;
mod renew;

use smallvec::SmallVec;

pub use self::edit::Change;
use self::edit::Fate;
use crate::{
    error::{CacheError, Conflict, Misuse, PageError},
    fetch::FrameGuard,
    frame::{Frame, NONE, State},
    handle::{CacheHandle, Page},
    id::{Link, PageId, SizeClass, is_swizzled},
    overwritten::Overwritten,
    sync::{AtomicU64, Ordering, Spin, Step, fence, is_left_out},
    traits::{Layout, Store},
};

/// One thing for each page of a change: most have few.
type Few<T> = SmallVec<[T; 4]>;

/// Room in the cache for a page that is to come into being with a change; see [`CacheHandle::reserve`].
pub struct NewPage<'a, S: Store, L: Layout> {
    pub(crate) taken: FrameGuard<'a, S, L>,
    id: PageId,
}

impl<S: Store, L: Layout> std::fmt::Debug for NewPage<'_, S, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewPage").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Locks that were taken for a change. Dropped, they are given back with the words put back before: those who have seen
/// others notice.
struct Locked<'a, 'p, S: Store, L: Layout> {
    pages: &'a [&'a Page<'p, S, L>],
    count: usize,
}

impl<S: Store, L: Layout> Drop for Locked<'_, '_, S, L> {
    fn drop(&mut self) {
        for page in &self.pages[..self.count] {
            page.set_version(page.frame.lock.unlock_moved());
        }
    }
}

/// A page with a swizzled link in a page of a change, and where that was before.
struct Child {
    frame: u32,
    page: usize,
    slot: usize,
    link: u64,
}

/// What the layout says of the pages as a change leaves them.
#[derive(Default)]
struct Links {
    /// Each page that was changed, its level, and how many of its swizzled links are where they were.
    pages: Few<(usize, u8, u32)>,
    /// Page and position of each other link.
    slots: Vec<(usize, usize)>,
    /// The numbers of children whose links may no longer be where they were.
    moved: Vec<usize>,
    /// Page and position of each word that was left behind where a swizzled link was and is named no more.
    left: Vec<(usize, usize)>,
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
    /// other looks at them are over. `f` must not call the cache: it would wait for its own locks.
    ///
    /// # Errors
    /// [`Conflict`] if one of them has changed or moved, is being changed, is on its way to the store or now sent there for a
    /// flush, or if a new page has come to be cached: begin anew. `f` was not called. [`Misuse::GivenTwice`] and
    /// [`Misuse::OtherCache`]: `f` was not called. [`Misuse::UnnamedLink`]: what `f` has set is put back. The new pages are free
    /// again.
    ///
    /// # Panics
    /// If `f` does, or names a page or a word that is not there, or keeps the [`Change`]. What it had set is put back.
    pub fn change<'a, R>(
        &'a self,
        pages: &[&Page<'a, S, L>],
        new: Vec<NewPage<'a, S, L>>,
        f: impl FnOnce(&mut Change<'a>) -> R,
    ) -> Result<R, PageError> {
        for (at, NewPage { taken, id }) in new.iter().enumerate() {
            if !std::sync::Arc::ptr_eq(&taken.handle.0.cache, &self.0.cache) {
                return Err(Misuse::OtherCache.into());
            }
            if new[..at].iter().any(|other| other.id == *id) {
                return Err(Misuse::GivenTwice { page: *id }.into());
            }
        }
        let mut locked = Locked { pages, count: 0 };
        for (at, page) in pages.iter().enumerate() {
            if let Err(error) = self.lock_for_change(page, &pages[..at]) {
                self.unlock_unchanged(locked);
                return Err(error);
            }
            locked.count += 1;
            // Its end must not come before that of the write.
            if page.frame.is_writing() || !self.open(page) {
                self.unlock_unchanged(locked);
                return Err(Conflict::Changed.into());
            }
        }
        let Some(flushes) = self.flushes_for(pages, pages.len() + new.len() > 1) else {
            self.write_due(locked);
            return Err(Conflict::Changed.into());
        };
        let Some(mut entered) = self.enter_new(&new) else {
            self.unlock_unchanged(locked);
            return Err(Conflict::Changed.into());
        };
        let new_bodies = new.iter().map(|new| self.clear(new.taken.index));
        let mut change = Change::new(pages.iter().map(|page| page.words), new_bodies, self.0.overwritten.take());
        let children = self.children_of(pages);
        let result = f(&mut change);
        let links = self.examine(pages, &new, &change, &children, true)?;
        if self.store().records(pages.len(), new.len()) {
            self.record(pages, &new, &change)?;
        }
        self.forget_overwritten(&mut change);
        entered.pages.clear();
        let fates = std::mem::take(&mut change.fates);
        let written_through = std::mem::take(&mut change.written_through);
        self.settle(pages, &new, &fates, &links, &children, flushes);
        for (at, (NewPage { taken, id }, &fate)) in new.into_iter().zip(&fates[pages.len()..]).enumerate() {
            if written_through.contains(&(pages.len() + at)) {
                self.cache().frame(taken.index).set_clean();
            }
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
            for (at, (page, &fate)) in
                pages.iter().zip(&fates).enumerate().filter(|&(_, (_, &fate))| is_last(fate) == last)
            {
                self.close(page, fate, (!written_through.contains(&at)).then_some(flushes));
            }
        }
        Ok(result)
    }

    /// Tells the store what a change has made of its pages. Pages that it leaves as they are, and the store has as they are, are not
    /// among them.
    fn record(&self, pages: &[&Page<'_, S, L>], new: &[NewPage<'_, S, L>], change: &Change<'_>) -> Result<(), Misuse> {
        let ids = pages.iter().map(|page| page.id).chain(new.iter().map(|new| new.id));
        let (mut changed, mut freed) = (Vec::with_capacity(change.bodies.len()), Vec::new());
        for (at, (id, body)) in ids.zip(&change.bodies).enumerate() {
            let fate = change.fates[at];
            if fate == Fate::Kept && !pages[at].frame.is_dirty() {
                continue;
            }
            let mut image = vec![0; body.len()].into_boxed_slice();
            if !self.copy_unswizzled(body, &mut image) && fate != Fate::Freed {
                return Err(Misuse::UnnamedLink { page: id, word: 0 });
            }
            if fate == Fate::Freed { &mut freed } else { &mut changed }.push((id, image));
        }
        self.store().record(changed, freed);
        Ok(())
    }

    /// Tells the store what a change has made of its only page.
    fn record_one(&self, page: &Page<'_, S, L>, change: &Change<'_>) -> Result<(), Misuse> {
        if self.cache().layout.links(page.words).next().is_some() {
            return self.record(&[page], &[], change);
        }
        let mut set: SmallVec<[u32; 64]> = change.overwritten.iter().map(|before| before.index).collect();
        set.sort_unstable();
        set.dedup();
        self.store().record_words(page.id, page.words, &set);
        Ok(())
    }

    /// Locks a page of a change at the version at which it was read; `others` are locked already.
    fn lock_for_change(&self, page: &Page<'_, S, L>, others: &[&Page<'_, S, L>]) -> Result<(), PageError> {
        if !self.is_ours(page) {
            return Err(Misuse::OtherCache.into());
        }
        if page.frame.lock.try_upgrade(page.version()) {
            return Ok(());
        }
        if others.iter().any(|other| std::ptr::eq(other.frame, page.frame) && other.id == page.id) {
            return Err(Misuse::GivenTwice { page: page.id }.into());
        }
        self.count_failed(page);
        Err(page.conflict().into())
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
        let snapshots: Vec<_> = due.filter_map(|page| self.image(page.index(), page.id).ok()).collect();
        self.unlock_unchanged(locked);
        if !snapshots.is_empty() {
            drop(self.begin_writes(snapshots, false));
        }
    }

    /// Changes one page as it is now, whether or not it has changed since it was looked up: `f` looks again at what it
    /// relies on. Waits in a queue behind other writers of the page; does not suspend. `f` must not free the page,
    /// nor call the cache.
    ///
    /// # Errors
    /// [`Conflict`] if the page is no longer here: begin anew. `f` was not called. [`Misuse`] as in [`CacheHandle::change`].
    ///
    /// # Panics
    /// As [`CacheHandle::change`], and if `f` frees the page.
    pub fn update<'a, R>(
        &'a self,
        page: &Page<'a, S, L>,
        f: impl FnOnce(&mut Change<'a>) -> R,
    ) -> Result<R, PageError> {
        self.alter_as(page, true, f)
    }

    fn alter_as<'a, R>(
        &'a self,
        page: &Page<'a, S, L>,
        is_news: bool,
        f: impl FnOnce(&mut Change<'a>) -> R,
    ) -> Result<R, PageError> {
        if !self.is_ours(page) {
            return Err(Misuse::OtherCache.into());
        }
        if !page.frame.lock.try_upgrade(page.version()) {
            self.count_failed(page);
            // A frame that is free, or whose next page is on its way, stays locked for long.
            let is_wanted = || {
                let state = page.frame.state();
                page.frame.page() == Some(page.id) && matches!(state, State::Resident | State::Cooling | State::Bypass)
            };
            if !page.frame.lock.lock_if(&self.cache().waiters, self.0.number, is_wanted) {
                return Err(page.conflict().into());
            }
        }
        let pages = [page];
        let mut locked = Locked { pages: &pages, count: 1 };
        // A bypass page is for its users: the last of them may be leaving, with what we would change.
        let is_ours = page.is_bypass() || page.frame.state() != State::Bypass;
        // It may have gone and come back, with other memory.
        let is_same_body = std::ptr::eq(page.words, self.cache().arena.body(page.frame));
        let is_same_page = page.frame.page() == Some(page.id) && is_same_body;
        let is_here = is_same_page && page.frame.state() != State::BypassFreed && is_ours;
        if !is_here || !self.open(page) {
            self.unlock_unchanged(locked);
            return Err(if is_here { Conflict::Changed } else { page.conflict() }.into());
        }
        let mut change = Change::new(std::iter::once(page.words), std::iter::empty(), self.0.overwritten.take());
        let children = self.children_of(&pages);
        let result = f(&mut change);
        assert!(!change.fates.contains(&Fate::Freed), "a page is freed by a change, not altered away");
        let links = self.examine(&pages, &[], &change, &children, is_news)?;
        if is_news && change.fates[0] == Fate::Changed && self.store().records(1, 0) {
            self.record_one(page, &change)?;
        }
        self.forget_overwritten(&mut change);
        // An older version that is on its way to the store may arrive there last: then this one is written behind it.
        let is_news = is_news && (change.written_through.is_empty() || page.frame.is_writing());
        let (fates, flushes) = (std::mem::take(&mut change.fates), self.cache().flushes());
        self.settle(&pages, &[], &fates, &links, &children, flushes);
        locked.count = 0;
        self.close(page, fates[0], is_news.then_some(flushes));
        Ok(result)
    }

    /// Forgets what a change has overwritten: it stands. The memory is the next change's.
    fn forget_overwritten(&self, change: &mut Change<'_>) {
        const WORDS_MAX: usize = 1024;
        let mut overwritten = std::mem::take(&mut change.overwritten);
        overwritten.clear();
        if overwritten.capacity() <= WORDS_MAX {
            self.0.overwritten.set(overwritten);
        }
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
            State::Resident | State::Bypass => {}
            // A cooling page is clean: it must not stay one.
            State::Cooling => return self.cache().publish(page.index(), State::Resident),
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
    fn children_of(&self, pages: &[&Page<'_, S, L>]) -> Vec<Child> {
        let count: u32 = pages.iter().map(|page| page.frame.children()).sum();
        let mut children = Vec::with_capacity(count as usize);
        for (at, page) in pages.iter().enumerate().filter(|(_, page)| page.frame.children() != 0) {
            for slot in self.cache().layout.links(page.words) {
                let link = page.words.get(slot).map_or(0, |word| word.load(Ordering::Relaxed));
                if let Link::Frame { frame, .. } = self.cache().salt.link(link) {
                    children.push(Child { frame, page: at, slot, link });
                }
            }
        }
        children
    }

    fn link_at(&self, words: &[AtomicU64], slot: usize) -> Link {
        words.get(slot).map_or(Link::Null, |word| self.cache().salt.link(word.load(Ordering::Relaxed)))
    }

    /// Looks at what a change has made of its pages, before anything else follows from it: where their links are now, and that
    /// no swizzled link is where it does not belong. One that was left where it stood, and is named no more, is to be unswizzled.
    ///
    /// # Panics
    /// If the change was taken away.
    fn examine(
        &self,
        pages: &[&Page<'_, S, L>],
        new: &[NewPage<'_, S, L>],
        change: &Change<'_>,
        children: &[Child],
        is_news: bool,
    ) -> Result<Links, Misuse> {
        let cache = self.cache();
        assert_eq!(
            change.bodies.len(),
            pages.len() + new.len(),
            "a change stays with the function that it is given to"
        );
        if change.is_refused {
            return Err(Misuse::Refused);
        }
        let place = |at: usize| match pages.get(at) {
            Some(page) => (page.index(), page.id),
            None => (new[at - pages.len()].taken.index, new[at - pages.len()].id),
        };
        let mut links = Links::default();
        // A link to a page that goes is looked at, wherever it is.
        let may_stay = !change.fates.contains(&Fate::Freed);
        let mut its = children.iter().enumerate().peekable();
        for (at, body) in change.bodies.iter().enumerate() {
            if change.fates[at] != Fate::Changed {
                let moved = std::iter::from_fn(|| its.next_if(|(_, child)| child.page == at));
                links.moved.extend(moved.filter(|_| change.fates[at] == Fate::Freed).map(|(number, _)| number));
                continue;
            }
            let (level, mut stayed) = (cache.layout.level(body), 0);
            if level > 0 || pages.get(at).is_some_and(|page| page.frame.children() != 0) {
                for slot in cache.layout.links(body).filter(|&slot| slot < body.len()) {
                    let link = body[slot].load(Ordering::Relaxed);
                    while let Some((number, _)) = its.next_if(|(_, child)| child.page == at && child.slot < slot) {
                        links.moved.push(number);
                    }
                    let is_same = |child: &Child| (child.page, child.slot, child.link) == (at, slot, link);
                    if may_stay && its.next_if(|(_, child)| is_same(child)).is_some() {
                        stayed += 1;
                        continue;
                    }
                    // Only the parent's lock makes it certain whose a child is: it is one of ours, or we do not know.
                    if let Link::Frame { frame, unit } = cache.salt.link(link)
                        && !cache.arena.get(frame).is_some_and(|child| {
                            child.unit() == unit && pages.iter().any(|page| page.index() == child.parent())
                        })
                    {
                        return Err(Misuse::UnnamedLink { page: place(at).1, word: slot });
                    }
                    links.slots.push((at, slot));
                }
                while let Some((number, _)) = its.next_if(|(_, child)| child.page == at) {
                    links.moved.push(number);
                }
            }
            links.pages.push((at, level, stayed));
        }
        let Links { slots, left, moved, .. } = &mut links;
        slots.sort_unstable();
        for &Child { page, slot, frame, .. } in moved.iter().map(|&number| &children[number]) {
            if change.fates[page] == Fate::Changed
                && self.link_at(change.bodies[page], slot).is_to(frame)
                && slots.binary_search(&(page, slot)).is_err()
            {
                left.push((page, slot));
            }
        }
        left.sort_unstable();
        // One swizzled link leads to a page: it is moved, not copied.
        let swizzled = slots.iter().filter_map(|&(at, slot)| {
            let word = change.bodies[at][slot].load(Ordering::Relaxed);
            matches!(cache.salt.link(word), Link::Frame { .. }).then_some((word, at, slot))
        });
        let mut swizzled: Vec<_> = swizzled.collect();
        swizzled.sort_unstable();
        let mut free: Vec<u64> = moved.iter().map(|&number| children[number].link).collect();
        free.sort_unstable();
        let mut free = free.into_iter().peekable();
        for (word, at, slot) in swizzled {
            while free.next_if(|&link| link < word).is_some() {}
            if free.next_if_eq(&word).is_none() {
                return Err(Misuse::UnnamedLink { page: place(at).1, word: slot });
            }
        }
        for &Overwritten { page, index, .. } in change.overwritten.iter().filter(|_| is_news) {
            let (at, index) = (page as usize, index as usize);
            // Data may be anything, but not what a link is at this moment, or was: that shows for as long as the frame has the same memory.
            if is_swizzled(change.bodies[at][index].load(Ordering::Relaxed))
                && change.fates[at] == Fate::Changed
                && let Link::Frame { frame, unit } = self.link_at(change.bodies[at], index)
                && frame != NONE
                && cache.arena.get(frame).is_some_and(|child| child.unit() == unit)
                && slots.binary_search(&(at, index)).is_err()
                && left.binary_search(&(at, index)).is_err()
                && !children.iter().any(|child| (child.page, child.slot, child.frame) == (at, index, frame))
            {
                return Err(Misuse::UnnamedLink { page: place(at).1, word: index });
            }
        }
        Ok(links)
    }

    /// After a change, before the unlocks: new pages become pages, and the pages below learn who their parent is.
    fn settle(
        &self,
        pages: &[&Page<'_, S, L>],
        new: &[NewPage<'_, S, L>],
        fates: &[Fate],
        links: &Links,
        children: &[Child],
        flushes: u32,
    ) {
        let cache = self.cache();
        let indices: Few<u32> =
            pages.iter().map(|page| page.index()).chain(new.iter().map(|new| new.taken.index)).collect();
        let with = |is_freed: bool| {
            let its = indices.iter().zip(fates).filter(move |&(_, &fate)| (fate == Fate::Freed) == is_freed);
            its.map(|(&index, _)| index).collect::<Few<u32>>()
        };
        let (live, freed) = (with(false), with(true));
        for (new, _) in new.iter().zip(&fates[pages.len()..]).filter(|&(_, &fate)| fate != Fate::Freed) {
            let frame = cache.frame(new.taken.index);
            frame.set_users(0);
            frame.set_children(0);
            frame.set_parent(NONE, 0);
            frame.set_dirty(flushes);
            cache.frequency.set(&frame.frequency, u8::from(cache.counts_uses()));
            frame.set_state(State::Resident);
        }
        for &(at, level, stayed) in &links.pages {
            cache.frame(indices[at]).set_level(level);
            cache.frame(indices[at]).set_children(stayed);
        }
        for &(at, slot) in &links.slots {
            let (index, frame) = (indices[at], cache.frame(indices[at]));
            let body = cache.arena.body(frame);
            match self.link_at(body, slot) {
                // A bypass page may go at any time: it keeps no swizzled link. Nor does a link stay swizzled to a page that goes now.
                Link::Frame { frame: child, .. } if frame.state() == State::Bypass || freed.contains(&child) => {
                    if let Some(page) = cache.arena.get(child).and_then(Frame::page) {
                        body[slot].store(page.get(), Ordering::Relaxed);
                    }
                }
                Link::Frame { frame: child, .. } if cache.arena.get(child).is_some() => {
                    cache.frame(child).set_parent(index, slot);
                    frame.set_children(frame.children() + 1);
                }
                Link::Page(page) if frame.state() == State::Resident => {
                    // A page of this very change: it is here, and ours.
                    let is_its = |&&child: &&u32| child != index && cache.frame(child).page() == Some(page);
                    if let Some(&child) = live.iter().find(is_its)
                        && cache.frame(child).parent() == NONE
                        && cache.frame(child).state() == State::Resident
                    {
                        cache.frame(child).set_parent(index, slot);
                        body[slot].store(cache.salt.swizzled(child, cache.frame(child).unit()), Ordering::Relaxed);
                        frame.set_children(frame.children() + 1);
                    }
                }
                _ => {}
            }
        }
        for &(at, slot) in &links.left {
            let body = cache.arena.body(cache.frame(indices[at]));
            if let Link::Frame { frame, .. } = self.link_at(body, slot) {
                body[slot].store(cache.frame(frame).page().map_or(0, PageId::get), Ordering::Relaxed);
            }
        }
        let is_linked = |child: &Frame, index: u32| {
            let body = cache.arena.body(cache.frame(child.parent()));
            let link = body.get(child.slot()).map(|word| word.load(Ordering::Relaxed));
            live.contains(&child.parent()) && link == Some(cache.salt.swizzled(index, child.unit()))
        };
        let moved = links.moved.iter().map(|&number| children[number].frame);
        let lost = moved.filter(|&child| !is_linked(cache.frame(child), child));
        let lost: Vec<u32> = lost.collect();
        cache.detach(&lost, || lost.iter().for_each(|&child| cache.frame(child).set_parent(NONE, 0)));
        let unlinked: Vec<u32> =
            new.iter().map(|new| new.taken.index).filter(|&index| cache.is_unlinked(index)).collect();
        cache.detach(&unlinked, || ());
        cache.move_excluded(&live, &freed);
    }

    /// Drops a locked page.
    fn free_locked(&self, page: &Page<'_, S, L>) {
        let frame = page.frame;
        frame.set_clean();
        frame.lock.note_change();
        self.cache().table.remove(page.id, page.index());
        if frame.state() == State::Bypass {
            // Its users, this one among them, let go of it one by one.
            frame.set_state(State::BypassFreed);
            frame.lock.unlock();
            return;
        }
        // A link that the change left behind.
        let mut spin = Spin::default();
        while !self.unswizzle(frame, page.index()) {
            spin.turn();
        }
        frame.set_state(State::Held);
        self.give_back(page.index());
    }
}
