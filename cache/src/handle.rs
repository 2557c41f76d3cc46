//! One thread's way to a cache, and the pages that it looks at.

use std::{
    cell::{Cell, RefCell},
    fmt,
    ops::Range,
    rc::Rc,
};

use crate::{
    cache::PageCache,
    counters::{CounterCells, Counters},
    error::{CacheError, Conflict},
    frame::{Frame, State},
    frame_lock::Version,
    heat::{USES_PER_TICK, mix},
    id::{Link, PageId, SizeClass},
    sync::{Arc, AtomicU64, Ordering, Spin, Step, fence, is_left_out},
    traits::{Layout, Store},
};

/// Free frames that a handle keeps of a class before it shares them.
const FREE_MAX: usize = 64;

pub(crate) struct Inner<S: Store, L: Layout> {
    pub(crate) cache: Arc<PageCache<L>>,
    pub(crate) store: S,
    pub(crate) number: u32,
    pub(crate) counters: CounterCells,
    counts_uses: bool,
    free: [RefCell<Vec<u32>>; SizeClass::COUNT],
    random: Cell<u64>,
}

impl<S: Store, L: Layout> Drop for Inner<S, L> {
    fn drop(&mut self) {
        for (index, list) in self.free.iter().enumerate() {
            let frames = std::mem::take(&mut *list.borrow_mut());
            if !frames.is_empty() {
                self.cache.pool_frames(SizeClass::from_index(index), frames);
            }
        }
        self.cache.handle_ended(self.number, self.counters.snapshot());
    }
}

/// A thread's way to a cache: with the thread's store, free frames, random source and counters. Cheap to clone; not to be
/// sent to another thread.
pub struct CacheHandle<S: Store, L: Layout>(pub(crate) Rc<Inner<S, L>>);

impl<S: Store, L: Layout> Clone for CacheHandle<S, L> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<S: Store, L: Layout> fmt::Debug for CacheHandle<S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheHandle").field("number", &self.0.number).finish_non_exhaustive()
    }
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    pub(crate) fn new(cache: Arc<PageCache<L>>, store: S, number: u32, seed: u64) -> Self {
        Self(Rc::new(Inner {
            counts_uses: cache.counts_uses(),
            cache,
            store,
            number,
            counters: CounterCells::default(),
            free: Default::default(),
            random: Cell::new(mix(seed) | 1),
        }))
    }

    /// The cache.
    pub fn cache(&self) -> &PageCache<L> {
        &self.0.cache
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.0.store
    }

    /// What this handle did so far.
    pub fn counters(&self) -> Counters {
        self.0.counters.snapshot()
    }

    /// A random number (xorshift; Marsaglia, 2003).
    #[inline]
    pub(crate) fn random(&self) -> u64 {
        let mut x = self.0.random.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.random.set(x);
        x.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    #[inline]
    pub(crate) fn random_u32(&self) -> u32 {
        (self.random() >> 32) as u32
    }

    /// Counts a use of the page in `frame`.
    #[inline]
    pub(crate) fn touch(&self, frame: &Frame) {
        if self.0.counts_uses && self.cache().heat.is_counting() {
            let random = self.random();
            self.cache().heat.touch(frame, (random >> 32) as u32);
            // One use in so many tells that there were so many.
            if (random as u32).is_multiple_of(USES_PER_TICK) {
                self.cache().heat.tick(USES_PER_TICK);
            }
        }
    }

    /// Has the processor fetch these words of the page that a link word leads to; false if the link is not swizzled.
    #[inline]
    pub fn prefetch<const N: usize>(&self, word: u64, class: SizeClass, words: [Range<usize>; N]) -> bool {
        match Link::of(word) {
            Link::Frame { frame, unit } => {
                self.cache().arena.prefetch(frame, unit, class, words);
                true
            }
            _ => false,
        }
    }

    /// The page that a link leads to, whose word was read from `from`. `class` is the size of the page. A cached page that
    /// `from` has a swizzled link to is had at once; else suspends while it is read from the store.
    ///
    /// # Errors
    /// [`CacheError::Conflict`] if `from` has changed since it was read; the others if the page cannot be had.
    #[inline]
    pub async fn follow<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
    ) -> Result<Page<'a, S, L>, CacheError<S::Error>> {
        match Link::of(word) {
            Link::Frame { frame, unit } => match self.follow_local::<0>(from, frame, unit, class, None) {
                Ok(page) => Ok(page),
                Err(_) if self.is_forged(from, frame) => Err(CacheError::BadLink),
                Err(conflict) => Err(conflict.into()),
            },
            // Boxed, so that the future of a hit stays small.
            Link::Page(page) => Box::pin(self.fetch(Some(from), page, class)).await,
            Link::Null => Err(CacheError::BadLink),
        }
    }

    /// Whether a word that looks like a swizzled link is none: the store had it, where the layout says there is no link. Else
    /// whoever follows it would begin anew for ever.
    #[cold]
    fn is_forged(&self, from: &Page<'_, S, L>, index: u32) -> bool {
        let leads_there = self.cache().arena.get(index).is_some_and(|frame| frame.parent() == from.index());
        !leads_there && from.is_current()
    }

    /// [`CacheHandle::follow`] for a swizzled link: never suspends. `None` if the link is not swizzled, or if `from` or the page
    /// is being changed. Has the processor fetch `words` of the page first, if they are said.
    #[inline(always)]
    pub fn follow_cached<'a, const N: usize>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
        words: Option<[Range<usize>; N]>,
    ) -> Option<Page<'a, S, L>> {
        let Link::Frame { frame, unit } = Link::of(word) else { return None };
        self.follow_local(from, frame, unit, class, words).ok()
    }

    #[inline(always)]
    fn follow_local<'a, const N: usize>(
        &'a self,
        from: &Page<'a, S, L>,
        index: u32,
        unit: u32,
        class: SizeClass,
        expected: Option<[Range<usize>; N]>,
    ) -> Result<Page<'a, S, L>, Conflict> {
        let arena = &self.cache().arena;
        let frame = arena.get(index).ok_or(Conflict)?;
        // What a search needs is had from the link alone, so that it need not wait for the frame's line.
        let mut words = arena.words(unit, class.words());
        if let Some(expected) = expected {
            crate::arena::prefetch(std::ptr::from_ref(frame).cast());
            expected.into_iter().for_each(|expected| crate::arena::prefetch_lines(words, expected));
        }
        let version = read_version(frame)?;
        let (level, id) = (frame.level(), frame.page());
        if !frame.has_class(class) {
            words = arena.body_cold(frame);
        }
        // The frame was the child's at that version if the parent still says so.
        if !is_left_out(Step::ParentCheck) && !from.is_current() {
            return Err(Conflict);
        }
        self.0.counters.hit(level);
        if level == 0 {
            self.touch(frame);
        }
        let id = id.ok_or(Conflict)?;
        Ok(Page { handle: self, frame, words, stamp: Stamp::new(version, level, false), id })
    }

    /// [`CacheHandle::follow`] for several links of one page; reads from the store overlap. A result for each.
    pub async fn follow_many<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        words: &[u64],
        class: SizeClass,
    ) -> Vec<Result<Page<'a, S, L>, CacheError<S::Error>>> {
        futures_util::future::join_all(words.iter().map(|&word| self.follow(from, word, class))).await
    }

    /// Whether a page is cached, or being read from the store.
    pub fn contains(&self, page: PageId) -> bool {
        self.cache().table.contains(&self.cache().arena, page)
    }

    /// A page by its id. Suspends while it is read from the store, if it is not cached.
    ///
    /// # Errors
    /// If the page cannot be had.
    pub async fn load(&self, page: PageId, class: SizeClass) -> Result<Page<'_, S, L>, CacheError<S::Error>> {
        Box::pin(self.fetch(None, page, class)).await
    }

    /// Loads a page and keeps it cached for as long as the anchor lives: for roots, to which no link leads.
    ///
    /// # Errors
    /// If the page cannot be had.
    pub async fn anchor(&self, page: PageId, class: SizeClass) -> Result<Anchor<L>, CacheError<S::Error>> {
        loop {
            let page = self.load(page, class).await?;
            if page.is_guest() {
                return Err(self.no_room("the page to keep was not admitted"));
            }
            if let Ok(pinned) = self.pin(&page) {
                // The anchor's to undo.
                std::mem::forget(pinned);
                return Ok(Anchor { cache: Arc::clone(&self.0.cache), index: page.index(), page: page.id });
            }
        }
    }

    /// The page of an anchor.
    ///
    /// # Errors
    /// If somebody holds its lock for longer than a change takes.
    #[inline]
    pub fn enter<'a>(&'a self, anchor: &Anchor<L>) -> Result<Page<'a, S, L>, Conflict> {
        let frame = self.cache().frame(anchor.index);
        let version = read_version(frame)?;
        // Another page is there if a change has freed the anchored one.
        if frame.page() != Some(anchor.page) {
            return Err(Conflict);
        }
        let (level, id, words) = (frame.level(), anchor.page, self.cache().arena.body(frame));
        self.0.counters.hit(level);
        Ok(Page { handle: self, frame, words, stamp: Stamp::new(version, level, false), id })
    }

    /// The page that a bookmark was left in, without looking it up; [`Page::read`] tells if it is not there any more. It does
    /// not count as a hit once more. `None` if this cache never had such a page.
    pub fn back_to(&self, bookmark: Bookmark) -> Option<Page<'_, S, L>> {
        let (index, version, id) = (bookmark.0[0], Version::from_word(bookmark.0[1]), PageId::new(bookmark.0[2])?);
        let index = u32::try_from(index).ok()?;
        self.cache().arena.get(index)?;
        Some(self.found(index, version, id, false))
    }

    pub(crate) fn found<'a>(&'a self, index: u32, version: Version, id: PageId, is_guest: bool) -> Page<'a, S, L> {
        let frame = self.cache().frame(index);
        let words = self.cache().arena.body(frame);
        Page { handle: self, frame, words, stamp: Stamp::new(version, frame.level(), is_guest), id }
    }

    /// Keeps the page that `page` shows from cooling, leaving and being freed by others, if it is still that page.
    pub(crate) fn pin(&self, page: &Page<'_, S, L>) -> Result<Pinned<'_, S, L>, Conflict> {
        page.frame.pin();
        // Whoever cools or evicts locks first and then looks at the pins; we pin first and then look at the lock.
        if !is_left_out(Step::PinFence) {
            fence(Ordering::SeqCst);
        }
        if page.is_current() {
            return Ok(Pinned { handle: self, index: page.index() });
        }
        page.frame.unpin();
        Err(Conflict)
    }

    pub(crate) fn pop_free(&self, class: SizeClass) -> Option<u32> {
        let mut list = self.0.free[class.index()].borrow_mut();
        std::iter::from_fn(|| list.pop()).find(|&index| self.cache().frame(index).claim())
    }

    pub(crate) fn more_free(&self, class: SizeClass) -> bool {
        self.cache().more_frames(class, &mut self.0.free[class.index()].borrow_mut())
    }

    /// Gives a taken frame back. It stays locked.
    pub(crate) fn give_back(&self, index: u32) {
        let frame = self.cache().frame(index);
        let class = frame.class();
        frame.set_page(None);
        frame.set_clean();
        frame.set_kids(0);
        // Who waits to alter the page that was here must not wait for the next one.
        frame.lock.retire();
        frame.set_state(State::Free);
        let mut list = self.0.free[class.index()].borrow_mut();
        list.push(index);
        if list.len() > FREE_MAX || self.cache().is_awaited() {
            let half = list.len() / 2;
            let shared: Vec<u32> = list.drain(half..).collect();
            drop(list);
            self.cache().pool_frames(class, shared);
        }
    }

    pub(crate) fn no_room(&self, held: &'static str) -> CacheError<S::Error> {
        CacheError::NoRoom { held, last_write_error: self.cache().last_write_error() }
    }
}

#[inline]
pub(crate) fn read_version(frame: &Frame) -> Result<Version, Conflict> {
    if let Some(version) = frame.lock.read() {
        return Ok(version);
    }
    let mut spin = Spin::default();
    while spin.is_short() {
        spin.turn();
        if let Some(version) = frame.lock.read() {
            return Ok(version);
        }
    }
    Err(Conflict)
}

/// Keeps a page cached: see [`CacheHandle::anchor`].
pub struct Anchor<L: Layout> {
    cache: Arc<PageCache<L>>,
    index: u32,
    page: PageId,
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
    handle: &'a CacheHandle<S, L>,
    pub(crate) index: u32,
}

impl<S: Store, L: Layout> Drop for Pinned<'_, S, L> {
    fn drop(&mut self) {
        self.handle.cache().frame(self.index).unpin();
    }
}

/// A cached page, as it was when it was looked up. Holding one does not keep others from changing the page, nor the cache
/// from evicting it: [`Page::read`] tells.
// In this order: what is known from the link alone does not share 16 bytes, in which pages are moved, with what comes from
// the frame, so that a search need not wait for the frame's line.
#[repr(C)]
pub struct Page<'a, S: Store, L: Layout> {
    pub(crate) handle: &'a CacheHandle<S, L>,
    pub(crate) frame: &'a Frame,
    pub(crate) words: &'a [AtomicU64],
    stamp: Stamp,
    pub(crate) id: PageId,
}

/// A page's version:48, its level:8, and whether it is a guest:1. In one word, because a page is moved often.
struct Stamp(Cell<u64>);

impl Stamp {
    #[inline]
    fn new(version: Version, level: u8, is_guest: bool) -> Self {
        Self(Cell::new(version.word() | u64::from(level) << Version::BITS | u64::from(is_guest) << 56))
    }

    #[inline]
    fn version(&self) -> Version {
        Version::from_word(self.0.get())
    }

    fn set_version(&self, version: Version) {
        self.0.set(self.0.get() >> Version::BITS << Version::BITS | version.word());
    }

    #[inline]
    fn level(&self) -> u8 {
        (self.0.get() >> Version::BITS) as u8
    }

    #[inline]
    fn is_guest(&self) -> bool {
        self.0.get() >> 56 != 0
    }
}

/// Where to come back to: see [`CacheHandle::back_to`]. Words that mean something to one cache only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bookmark(pub [u64; 3]);

impl<S: Store, L: Layout> Page<'_, S, L> {
    /// A way back to it, unless it may go as soon as this is dropped.
    pub fn bookmark(&self) -> Option<Bookmark> {
        let bookmark = || Bookmark([u64::from(self.index()), self.version().word(), self.id.get()]);
        (!self.is_guest()).then(bookmark)
    }

    /// Its id.
    pub fn id(&self) -> PageId {
        self.id
    }

    /// Its level, as its layout states it.
    #[inline]
    pub fn level(&self) -> u8 {
        self.stamp.level()
    }

    /// The frame's number.
    pub(crate) fn index(&self) -> u32 {
        self.handle.cache().arena.index_of(self.frame)
    }

    /// Whether this is a user of a guest.
    #[inline]
    pub(crate) fn is_guest(&self) -> bool {
        self.stamp.is_guest()
    }

    /// The version at which it was looked up, or to which its user has changed it since.
    #[inline]
    pub(crate) fn version(&self) -> Version {
        self.stamp.version()
    }

    pub(crate) fn set_version(&self, version: Version) {
        self.stamp.set_version(version);
    }

    /// Reads from the page. `f` may see words of different moments and must cope with any; its result is handed out only
    /// if they were all of one moment. Link words may be swizzled: they are for [`CacheHandle::follow`] only.
    ///
    /// # Errors
    /// If the page changed since it was looked up, or is no longer here.
    #[inline(always)]
    pub fn read<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> Result<R, Conflict> {
        let result = f(self.words);
        if self.is_current() { Ok(result) } else { Err(Conflict) }
    }

    /// Has the processor fetch these words, as far as the page has them.
    #[inline]
    pub fn prefetch(&self, words: Range<usize>) {
        crate::arena::prefetch_lines(self.words, words);
    }

    /// Looks at the page as it is now, whatever it is now: for what is used only after [`Page::read`] has proved it.
    #[inline]
    pub fn peek<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> R {
        f(self.words)
    }

    /// Whether it is as it was when it was looked up.
    #[inline]
    pub fn is_current(&self) -> bool {
        self.frame.lock.validate(self.version())
    }

    /// Whether a link word, read from the page above, leads to this page.
    pub fn is_target_of(&self, word: u64) -> bool {
        match Link::of(word) {
            Link::Frame { frame, .. } => frame == self.index(),
            Link::Page(page) => page == self.id,
            Link::Null => false,
        }
    }
}

impl<S: Store, L: Layout> fmt::Debug for Page<'_, S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("id", &self.id).field("level", &self.level()).finish_non_exhaustive()
    }
}

impl<S: Store, L: Layout> Drop for Page<'_, S, L> {
    // As short as can be: where it is not inlined, also on the way of a panic, the page has to be in memory.
    #[inline(always)]
    fn drop(&mut self) {
        if self.is_guest() {
            leave(self.handle, self.frame, self.id);
        }
    }
}

#[cold]
#[inline(never)]
fn leave<S: Store, L: Layout>(handle: &CacheHandle<S, L>, frame: &Frame, id: PageId) {
    handle.leave(handle.cache().arena.index_of(frame), id);
}
