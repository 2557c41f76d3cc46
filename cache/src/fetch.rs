//! What happens when no swizzled link leads to a page.
//!
//! 1. The page that the link was read from is pinned: it neither cools nor goes until the page below it is there.
//! 2. The table is asked. A page that is there is used, and gets its swizzled link back if it has none; a page that somebody
//!    else is fetching is waited for. Else the page is entered, in a free frame that is marked as loading.
//! 3. It is read from the store into a private buffer, looked through, copied into its frame, and either admitted (its
//!    parent's link is swizzled) or kept as a bypass page: for as long as it has users, and until it is written if they change
//!    it.
//! 4. Those who waited are woken.
//!
//! Dropping the future at any point undoes what it has done: the entry goes, and the waiters start over.

use std::{
    future::poll_fn,
    task::{Context, Poll},
};

use futures_util::future::join_all;

use crate::{
    arena,
    error::{CacheError, Conflict, Misuse},
    frame::{Frame, NONE, State},
    frame_lock::Version,
    handle::{CacheHandle, Page, Pinned},
    id::{PageId, SizeClass, is_swizzled},
    options::Admission,
    sync::{Ordering, Spin, Step, is_left_out},
    table::Found,
    traits::{Layout, Store},
};

/// Pages that are asked for at once.
const BATCH_MAX: usize = 64;
/// Looks at cooling pages to find one that a new page has to outdo.
const RIVALS_MAX: usize = 4;

impl<S: Store, L: Layout> CacheHandle<S, L> {
    pub(crate) async fn fetch<'a>(
        &'a self,
        from: Option<&Page<'a, S, L>>,
        page: PageId,
        class: SizeClass,
    ) -> Result<Page<'a, S, L>, CacheError<S::Error>> {
        let pinned = match from {
            Some(from) if !self.is_ours(from) => return Err(Misuse::OtherCache.into()),
            Some(from) if !from.is_bypass() => Some(self.pin(from)?),
            Some(bypass) if !bypass.is_current() => return Err(bypass.conflict().into()),
            _ => None,
        };
        let mut spare: Option<FrameGuard<'a, S, L>> = None;
        let mut spin = Spin::default();
        loop {
            match self.find(page).await {
                Found::Here { frame, version, state: state @ (State::Bypass | State::Resident | State::Cooling) } => {
                    return self.use_found(from, (frame, version, state), page, class, pinned.is_some());
                }
                Found::Here { .. } | Found::Busy | Found::Loading => {
                    spin.turn();
                    if !spin.is_short() {
                        yield_once().await;
                    }
                }
                Found::Absent => {
                    let taken = match spare.take() {
                        Some(taken) => taken,
                        None => self.take_frame(class).await?,
                    };
                    match self.begin_loading(taken, page) {
                        Ok(loading) => {
                            // From here on nobody frees the page without us; it may have been freed before.
                            if !is_left_out(Step::LinkCheck) && from.is_some_and(|from| !self.still_links(from, page)) {
                                return Err(Conflict::Changed.into());
                            }
                            let answer = self.store().read(page, class).await;
                            return self.read_in(from, Missing { page, class, pinned, loading }, answer);
                        }
                        Err(taken) => spare = Some(taken),
                    }
                }
            }
        }
    }

    /// The page that an unswizzled link leads to, if it is cached and nobody changes it: the link gets swizzled.
    #[cold]
    #[inline(never)]
    pub(crate) fn follow_found<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
    ) -> Option<Page<'a, S, L>> {
        let page = PageId::new(word)?;
        if !self.is_ours(from) {
            return None;
        }
        let _pinned = self.pin(from).ok()?;
        match self.cache().table.find(&self.cache().arena, page, None) {
            Found::Here { frame, version, state: state @ (State::Bypass | State::Resident | State::Cooling) } => {
                self.use_found(Some(from), (frame, version, state), page, class, true).ok()
            }
            _ => None,
        }
    }

    /// A page that the table has, in a state in which it can be used.
    fn use_found<'a>(
        &'a self,
        from: Option<&Page<'a, S, L>>,
        (frame, version, state): (u32, Version, State),
        page: PageId,
        class: SizeClass,
        is_pinned: bool,
    ) -> Result<Page<'a, S, L>, CacheError<S::Error>> {
        let is_bypass = state == State::Bypass;
        let found = self.found(frame, version, page, is_bypass);
        if !found.frame.has_class(class) {
            return Err(CacheError::BadLink);
        }
        self.0.counters.hit(found.level());
        if !is_bypass {
            self.touch(found.frame);
            if state == State::Cooling || (found.frame.parent() == NONE && is_pinned) {
                self.adopt(from.filter(|_| is_pinned), &found);
            }
        }
        Ok(found)
    }

    /// Enters a page as loading into a frame, or gives the frame back if somebody was faster.
    fn begin_loading<'a>(
        &self,
        taken: FrameGuard<'a, S, L>,
        page: PageId,
    ) -> Result<Loading<'a, S, L>, FrameGuard<'a, S, L>> {
        let cache = self.cache();
        let frame = cache.frame(taken.index);
        frame.set_page(Some(page));
        frame.set_state(State::Loading);
        if cache.table.insert(&cache.arena, page, taken.index) {
            return Ok(Loading::begin(taken, page));
        }
        frame.set_state(State::Held);
        frame.set_page(None);
        Err(taken)
    }

    /// [`CacheHandle::follow`] for several links of one page, each with the size of its page. A result for each. What has to be
    /// read from the store is asked for together ([`Store::read_many`]).
    pub async fn follow_many<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        links: &[(u64, SizeClass)],
    ) -> Vec<Result<Page<'a, S, L>, CacheError<S::Error>>> {
        let mut pages = Vec::with_capacity(links.len());
        for links in links.chunks(BATCH_MAX) {
            pages.extend(self.follow_batch(from, links).await);
        }
        pages
    }

    async fn follow_batch<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        links: &[(u64, SizeClass)],
    ) -> impl Iterator<Item = Result<Page<'a, S, L>, CacheError<S::Error>>> {
        let mut pages: Vec<_> =
            links.iter().map(|&(word, class)| self.try_follow::<0>(from, word, class, None).map(Ok)).collect();
        let absent = links
            .iter()
            .enumerate()
            .filter_map(|(at, &(word, class))| Some((at, self.begin_absent(from, PageId::new(word)?, class)?)));
        let (places, missing): (Vec<usize>, Vec<_>) = absent.unzip();
        if !missing.is_empty() {
            let asked: Vec<_> = missing.iter().map(|missing| (missing.page, missing.class)).collect();
            let answers = self.store().read_many(&asked).await;
            for ((at, missing), answer) in places.into_iter().zip(missing).zip(answers) {
                pages[at] = Some(self.read_in(Some(from), missing, answer));
            }
        }
        // What others are reading, what found no room at once, and what is wrong.
        let left = links.iter().zip(&mut pages).filter(|(_, page)| page.is_none());
        join_all(left.map(async |(&(word, class), page)| *page = Some(self.follow(from, word, class).await))).await;
        pages.into_iter().flatten()
    }

    /// Begins to fetch a page that nobody has, without suspending: who holds fetches must not wait for those of others.
    fn begin_absent<'a>(&'a self, from: &Page<'a, S, L>, page: PageId, class: SizeClass) -> Option<Missing<'a, S, L>> {
        if !self.is_ours(from) || self.contains(page) {
            return None;
        }
        let pinned = if from.is_bypass() { None } else { Some(self.pin(from).ok()?) };
        let loading = self.begin_loading(self.try_take_frame(class)?, page).ok()?;
        let is_there = is_left_out(Step::LinkCheck) || self.still_links(from, page);
        is_there.then_some(Missing { page, class, pinned, loading })
    }

    /// Whether a page still has the link that was read from it; other links of it may have changed.
    pub(crate) fn still_links(&self, from: &Page<'_, S, L>, page: PageId) -> bool {
        if from.is_current() {
            return true;
        }
        let Some(version) = from.frame.lock.read() else { return false };
        // A bypass page that was freed keeps its words until its last user has gone.
        let is_freed = from.frame.state() == State::BypassFreed && !is_left_out(Step::FreedLinks);
        let is_there = from.frame.page() == Some(from.id)
            && !is_freed
            && self.find_link(from.words, |word| word == page.get()).is_some();
        is_there && from.frame.lock.validate(version)
    }

    /// Looks a page up, waiting while it is fetched by somebody else.
    async fn find(&self, page: PageId) -> Found {
        let cache = self.cache();
        let mut has_waited = false;
        poll_fn(|cx: &mut Context<'_>| match cache.table.find(&cache.arena, page, Some(cx.waker())) {
            Found::Loading => {
                has_waited = true;
                Poll::Pending
            }
            found => {
                if let Found::Here { frame, .. } = found
                    && has_waited
                {
                    self.0.counters.count(cache.frame(frame).level(), |level| level.shared_fetches += 1);
                }
                Poll::Ready(found)
            }
        })
        .await
    }

    /// Puts a page where it belongs, once the store has answered.
    fn read_in<'a>(
        &'a self,
        from: Option<&Page<'a, S, L>>,
        missing: Missing<'a, S, L>,
        answer: Result<S::Buffer, S::Error>,
    ) -> Result<Page<'a, S, L>, CacheError<S::Error>> {
        let cache = self.cache();
        let Missing { page, class, pinned, loading } = missing;
        let buffer = answer.map_err(|source| CacheError::Store { page, source })?;
        if buffer.len() != class.words() {
            return Err(CacheError::Size { page, got: buffer.len(), asked: class.words() });
        }
        let index = loading.index();
        let frame = cache.frame(index);
        let body = cache.arena.body(frame);
        arena::fill(body, &buffer);
        drop(buffer);
        let level = cache.layout.level(body);
        if let Some(word) = self.find_link(body, is_swizzled) {
            return Err(CacheError::Swizzled { page, word });
        }
        self.0.counters.count(level, |level| level.misses += 1);
        if let Some(pinned) = &pinned {
            self.touch(cache.frame(pinned.index));
        }
        let uses = if cache.counts_uses() { cache.frequency.miss(page, self.random_u32()) } else { 0 };
        frame.set_level(level);
        frame.set_children(0);
        frame.set_users(0);
        frame.set_parent(NONE, 0);
        cache.frequency.set(&frame.frequency, uses);
        // Below a bypass page, nothing is kept.
        let admitted = match from {
            Some(_) if pinned.is_none() => false,
            _ => self.admits(level, uses),
        };
        let is_bypass = !admitted && from.is_some();
        if is_left_out(Step::StateBeforeWake) {
            cache.table.wake(page);
        }
        if is_bypass {
            if !cache.publish(index, State::Bypass) {
                return Err(Conflict::Changed.into());
            }
            self.0.counters.count(level, |level| level.refusals += 1);
            if let Some(pinned) = pinned {
                frame.set_parent(pinned.index, 0);
                std::mem::forget(pinned);
            }
            cache.bypass_frames.fetch_add(1, Ordering::Relaxed);
            frame.set_users(1);
        } else {
            let parent = from.filter(|_| pinned.is_some());
            let is_linked = parent.is_some_and(|from| self.swizzle(from, frame, index, page));
            if is_linked {
                frame.set_state(State::Resident);
            } else if !cache.publish(index, State::Resident) {
                return Err(Conflict::Changed.into());
            }
            if parent.is_some() && !is_linked {
                self.0.counters.count(level, |level| level.failed_upgrades += 1);
            }
        }
        let version = frame.lock.unlock_moved();
        loading.end();
        Ok(self.found(index, version, page, is_bypass))
    }

    /// The position of the first link word that is so.
    pub(crate) fn find_link(&self, body: &[crate::sync::AtomicU64], is_so: impl Fn(u64) -> bool) -> Option<usize> {
        let is_there = |&index: &usize| body.get(index).is_some_and(|word| is_so(word.load(Ordering::Relaxed)));
        self.cache().layout.links(body).find(is_there)
    }

    /// Whether a page at this level that is not cached would be admitted if it were read now: it is used at least as often as
    /// one that would go for it. Each answer is drawn anew.
    pub fn is_hot(&self, page: PageId, level: u8) -> bool {
        let uses = if self.cache().counts_uses() { self.cache().frequency.of_absent(page) } else { 0 };
        self.admits(level, uses)
    }

    /// Counts a use of a page that is not cached and is not read, because somebody else does what it was wanted for.
    pub fn count_absent(&self, page: PageId) {
        if self.cache().counts_uses() {
            self.cache().frequency.miss(page, self.random_u32());
        }
    }

    /// Takes a use of a page that is not cached back: it would only have been in the way.
    pub fn discount_absent(&self, page: PageId) {
        if self.cache().counts_uses() {
            self.cache().frequency.take_back(page, self.random_u32());
        }
    }

    fn admits(&self, level: u8, uses: u8) -> bool {
        let cache = self.cache();
        let (is_full, is_crowded) = (cache.is_full(), cache.has_many_bypass_frames());
        match cache.options.admission {
            Admission::Probability { leaf, inner } => {
                let probability = if level == 0 { leaf } else { inner };
                // Of what never gets in, too, there must be something to evict.
                let rest = if probability == 0.0 { is_full && is_crowded } else { !is_full || is_crowded };
                rest || f64::from(self.random_u32()) < probability * f64::from(u32::MAX)
            }
            _ if !is_full || is_crowded => true,
            Admission::Always => true,
            Admission::Frequency => {
                let rival = (0..RIVALS_MAX).find_map(|_| cache.cooling.peek(self.random()));
                rival.is_none_or(|rival| uses >= cache.frequency.of(&cache.frame(rival.frame).frequency))
            }
        }
    }

    /// Points the link in `from`'s page at `child`, whose lock the caller holds; false if somebody else holds the
    /// parent's, or the link is not there any more.
    fn swizzle(&self, from: &Page<'_, S, L>, child: &Frame, index: u32, page: PageId) -> bool {
        let parent = from.frame;
        let mut spin = Spin::default();
        let before = loop {
            match parent.lock.try_lock() {
                Some(version) => break version,
                None if spin.is_short() => spin.turn(),
                None => return false,
            }
        };
        let words = self.cache().arena.body(parent);
        let slot = match parent.state() == State::Resident && parent.page() == Some(from.id) {
            true => self.find_link(words, |word| word == page.get()),
            false => None,
        };
        let Some(slot) = slot else {
            parent.lock.unlock_unchanged();
            return false;
        };
        words[slot].store(self.cache().salt.swizzled(index, child.unit()), Ordering::Relaxed);
        child.set_parent(from.index(), slot);
        parent.set_children(parent.children() + 1);
        let after = parent.lock.unlock_moved();
        // Nothing but this link has changed since the caller looked: what it has read still holds.
        if before == from.version() || is_left_out(Step::SameVersion) {
            from.set_version(after);
        }
        true
    }

    /// Rescues a cooling page, and gives a page without one a swizzled link.
    fn adopt(&self, from: Option<&Page<'_, S, L>>, found: &Page<'_, S, L>) {
        let frame = found.frame;
        if !frame.lock.try_upgrade(found.version()) {
            return;
        }
        let state = frame.state();
        if let Some(from) = from
            && frame.parent() == NONE
            && !self.swizzle(from, frame, found.index(), found.id)
        {
            self.0.counters.count(found.level(), |level| level.failed_upgrades += 1);
        }
        if state == State::Cooling {
            if frame.parent() != NONE {
                frame.set_state(State::Resident);
            } else if !self.cache().publish(found.index(), State::Resident) {
                // It goes on cooling: it may be read, and nothing else.
                frame.lock.unlock_unchanged();
                return;
            }
        }
        // Nothing that a reader saw has changed.
        frame.lock.unlock_unchanged();
        if state == State::Cooling {
            let cooled = crate::cooling::Cooled { frame: found.index(), tag: found.version().tag() };
            self.cache().cooling.remove(found.id, cooled);
            self.0.counters.count(found.level(), |level| level.rescues += 1);
        }
    }

    /// A user of a bypass page leaves. The last one takes it off, or has it written first.
    pub(crate) fn leave(&self, index: u32, page: PageId) {
        let cache = self.cache();
        let frame = cache.frame(index);
        if cache.table.leave(frame, page, index, || frame.is_stored()) {
            self.take_off(frame, index);
        } else if frame.users() == 0 && frame.is_dirty() && !frame.is_writing() {
            self.write_bypass(index);
        }
    }

    /// Empties the frame of a bypass page that nobody uses and that is no longer in the table.
    pub(crate) fn take_off(&self, frame: &Frame, index: u32) {
        let mut spin = Spin::default();
        while frame.lock.try_lock().is_none() {
            spin.turn();
        }
        let parent = frame.parent();
        self.cache().bypass_frames.fetch_sub(1, Ordering::Relaxed);
        frame.set_parent(NONE, 0);
        frame.set_state(State::Held);
        if parent != NONE {
            self.cache().frame(parent).unpin();
        }
        self.give_back(index);
    }
}

/// Lets other tasks run once: for whoever begins anew.
pub async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A frame that is ours to use.
pub(crate) struct FrameGuard<'a, S: Store, L: Layout> {
    pub(crate) handle: &'a CacheHandle<S, L>,
    pub(crate) index: u32,
}

impl<S: Store, L: Layout> Drop for FrameGuard<'_, S, L> {
    fn drop(&mut self) {
        self.handle.give_back(self.index);
    }
}

/// A page that is to be read, and what holds its place meanwhile.
struct Missing<'a, S: Store, L: Layout> {
    page: PageId,
    class: SizeClass,
    pinned: Option<Pinned<'a, S, L>>,
    loading: Loading<'a, S, L>,
}

/// A fetch under way. Dropped, it undoes itself.
struct Loading<'a, S: Store, L: Layout> {
    taken: Option<FrameGuard<'a, S, L>>,
    page: PageId,
}

impl<'a, S: Store, L: Layout> Loading<'a, S, L> {
    fn begin(taken: FrameGuard<'a, S, L>, page: PageId) -> Self {
        taken.handle.cache().begin_transfer();
        Self { taken: Some(taken), page }
    }

    fn index(&self) -> u32 {
        self.taken.as_ref().map_or(NONE, |taken| taken.index)
    }

    /// The page is there.
    fn end(mut self) {
        if let Some(taken) = self.taken.take() {
            let cache = taken.handle.cache();
            if !is_left_out(Step::StateBeforeWake) {
                cache.table.wake(self.page);
            }
            cache.end_transfer();
            std::mem::forget(taken);
        }
    }
}

impl<S: Store, L: Layout> Drop for Loading<'_, S, L> {
    fn drop(&mut self) {
        if let Some(taken) = self.taken.take() {
            let handle: &CacheHandle<S, L> = taken.handle;
            let cache = handle.cache();
            cache.table.remove(self.page, taken.index);
            cache.frame(taken.index).set_state(State::Held);
            cache.frame(taken.index).set_page(None);
            cache.table.wake(self.page);
            // Before the transfer ends: who waits for room is woken when there is some.
            drop(taken);
            cache.end_transfer();
        }
    }
}
