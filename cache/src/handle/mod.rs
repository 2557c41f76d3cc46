//! One thread's way to a cache, and the pages that it looks at.

mod anchor;
mod page;

use std::{
    cell::{Cell, RefCell},
    fmt,
    ops::Range,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use crate::{
    cache::PageCache,
    counters::{CounterCells, Counters},
    error::{CacheError, Conflict, Misuse, PageError, TooManyHandles},
    frame::{Frame, State},
    frame_lock::Version,
    frequency::USES_PER_TICK,
    id::{Link, PageId, SizeClass, is_swizzled},
    mix::mix,
    overwritten::Overwritten,
    sync::{Arc, AtomicU64, Ordering, Spin, Step, fence, is_left_out},
    traits::{Layout, Store},
};

pub(crate) use self::anchor::Pinned;
use self::page::Stamp;
pub use self::{
    anchor::Anchor,
    page::{Bookmark, Page},
};

/// Free frames that a handle keeps of a class before it shares them: so many, and those of large pages for so many bytes.
const FREE_MAX: usize = 64;
const FREE_BYTES_MAX: usize = 256 << 10;

pub(crate) struct Inner<S: Store, L: Layout> {
    pub(crate) cache: Arc<PageCache<L>>,
    pub(crate) store: S,
    pub(crate) number: u32,
    pub(crate) counters: Arc<CounterCells>,
    /// Room for what a change overwrites, between changes.
    pub(crate) overwritten: Cell<Vec<Overwritten>>,
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
        self.cache.end_handle(self.number);
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

impl<L: Layout> PageCache<L> {
    /// A handle for the thread that calls this. `seed` decides its random choices.
    ///
    /// # Errors
    /// If there are [`CacheOptions::handles_max`](crate::CacheOptions::handles_max) handles already.
    pub fn handle<S: Store>(self: &Arc<Self>, store: S, seed: u64) -> Result<CacheHandle<S, L>, TooManyHandles> {
        let Some((number, counters)) = self.begin_handle() else {
            return Err(TooManyHandles { max: self.options.handles_max });
        };
        let (overwritten, free, random) = (Cell::default(), Default::default(), Cell::new(mix(seed) | 1));
        let cache = Arc::clone(self);
        Ok(CacheHandle(Rc::new(Inner { cache, store, number, counters, overwritten, free, random })))
    }
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
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

    /// Counts a use of the page in `frame`, once memory is short.
    #[inline(always)]
    pub(crate) fn touch(&self, frame: &Frame) {
        if self.cache().frequency.is_counting() {
            self.count_use(frame);
        }
    }

    #[inline(never)]
    fn count_use(&self, frame: &Frame) {
        let random = self.random();
        self.cache().frequency.touch(&frame.frequency, (random >> 32) as u32);
        // One use in so many tells that there were so many.
        if (random as u32).is_multiple_of(USES_PER_TICK) {
            self.cache().frequency.tick(USES_PER_TICK);
        }
    }

    /// Has the processor fetch these words of the page that a link word leads to; false if the link is not swizzled.
    #[inline(always)]
    pub fn prefetch<const N: usize>(&self, word: u64, class: SizeClass, words: [Range<usize>; N]) -> bool {
        match self.cache().salt.link(word) {
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
    /// [`CacheError::Conflict`] if `from` has changed since it was read; [`CacheError::BadLink`] if the link is null, does not
    /// stand in `from`, or its page has another size; [`CacheError::Misuse`] if `from` is of another cache; the others if the
    /// page cannot be had.
    #[inline(always)]
    pub fn follow<'a>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
    ) -> impl Future<Output = Result<Page<'a, S, L>, CacheError<S::Error>>> {
        // By hand: an async function has the page of a hit go through memory, which costs more than all else.
        Follow { handle: self, from, word, class, fetch: None }
    }

    #[cold]
    #[inline(never)]
    fn follow_absent<'f, 'a>(&'a self, from: &'f Page<'a, S, L>, word: u64, class: SizeClass) -> Fetch<'f, 'a, S, L> {
        Box::pin(async move {
            match PageId::new(word) {
                Some(page) => self.fetch(Some(from), page, class).await,
                None if is_swizzled(word) => Err(self.why_not(from, word, class)),
                None => Err(CacheError::BadLink),
            }
        })
    }

    /// [`CacheHandle::follow`] for a page that is cached: never suspends. `None` if it is not, if `from` or the page is being
    /// changed, or if following the link would be an error: [`CacheHandle::follow`] says which. If the link is swizzled, has the
    /// processor fetch `words` of the page first, if they are said.
    #[inline(always)]
    pub fn try_follow<'a, const N: usize>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
        words: Option<[Range<usize>; N]>,
    ) -> Option<Page<'a, S, L>> {
        if is_swizzled(word) {
            self.follow_swizzled(from, word, class, words)
        } else {
            let copy = from.copy()?;
            let page = self.follow_found(&copy, word, class)?;
            // Where the link was swizzled, the page above has moved on to a version in which all else is the same.
            from.set_version(copy.version());
            Some(page)
        }
    }

    #[inline(always)]
    fn follow_swizzled<'a, const N: usize>(
        &'a self,
        from: &Page<'a, S, L>,
        word: u64,
        class: SizeClass,
        expected: Option<[Range<usize>; N]>,
    ) -> Option<Page<'a, S, L>> {
        if !self.is_ours(from) {
            return None;
        }
        let cache = self.cache();
        let (index, unit) = cache.salt.place(word);
        let frame = cache.arena.get(index)?;
        // What a search needs is had from the link alone, so that it need not wait for the frame's line.
        let words = cache.arena.words(unit, class.words());
        if let Some(expected) = expected {
            crate::arena::prefetch(std::ptr::from_ref(frame).cast());
            expected.into_iter().for_each(|expected| crate::arena::prefetch_lines(words, expected));
        }
        let version = read_version(frame)?;
        let (level, id) = (frame.level(), frame.page()?);
        // The frame was the child's at that version if it says so now, and the parent then still is as it was.
        let is_child = frame.has_class(class) && frame.parent() == from.index();
        let is_same = || is_left_out(Step::SameParent) || from.is_current();
        if !(is_left_out(Step::ParentCheck) || is_child && is_same()) {
            return None;
        }
        self.0.counters.hit(level);
        if level == 0 {
            self.touch(frame);
        }
        Some(Page { handle: self, frame, words, stamp: Stamp::new(version, level, false), id })
    }

    /// The size of the page that a swizzled link leads to, for those whose pages are of several sizes; `None` if the link is
    /// not swizzled. If it does not stand in a current page, this is some size.
    #[inline]
    pub fn class_of(&self, word: u64) -> Option<SizeClass> {
        let (index, _) = self.cache().salt.place(word);
        is_swizzled(word).then(|| self.cache().arena.get(index).map(Frame::class)).flatten()
    }

    /// About how often the page was used lately that a swizzled link leads to; `None` if the link is not swizzled. If it does not
    /// stand in a current page, this is some number; 0 as long as the cache has room for everything, or does not admit by
    /// [frequency](crate::Admission::Frequency), and so counts nothing.
    pub fn uses(&self, word: u64) -> Option<u64> {
        let (index, _) = self.cache().salt.place(word);
        let frame = is_swizzled(word).then(|| self.cache().arena.get(index)).flatten()?;
        Some(self.cache().frequency.uses(&frame.frequency))
    }

    /// Why a swizzled link cannot be followed.
    #[cold]
    #[inline(never)]
    fn why_not(&self, from: &Page<'_, S, L>, word: u64, class: SizeClass) -> CacheError<S::Error> {
        if !self.is_ours(from) {
            return Misuse::OtherCache.into();
        }
        let (index, _) = self.cache().salt.place(word);
        let is_child = |frame: &Frame| frame.has_class(class) && frame.parent() == from.index();
        let is_link = self.cache().arena.get(index).is_some_and(is_child);
        if !from.is_current() {
            return from.conflict().into();
        }
        // The page below is locked, or `from` never had such a link.
        if is_link { Conflict::Changed.into() } else { CacheError::BadLink }
    }

    /// Whether a page is of this handle's cache.
    #[inline(always)]
    pub(crate) fn is_ours(&self, page: &Page<'_, S, L>) -> bool {
        std::ptr::eq(self, page.handle) || self.shares_cache(page.handle)
    }

    #[cold]
    #[inline(never)]
    fn shares_cache(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0.cache, &other.0.cache)
    }

    /// Whether a page is cached, or being read from the store.
    pub fn contains(&self, page: PageId) -> bool {
        self.cache().table.contains(&self.cache().arena, page)
    }

    /// A page by its id. Suspends while it is read from the store, if it is not cached; it is admitted then, whatever
    /// [`CacheOptions::admission`](crate::CacheOptions::admission) says.
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
            if page.is_bypass() {
                return Err(self.no_room(class, "the page to keep was not admitted"));
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
    /// [`Conflict`] if somebody holds its lock for longer than a change takes; [`Misuse::Freed`] once a change has freed the
    /// page; [`Misuse::OtherCache`].
    #[inline(always)]
    pub fn enter<'a>(&'a self, anchor: &Anchor<L>) -> Result<Page<'a, S, L>, PageError> {
        let frame = self.cache().arena.get(anchor.index);
        if let Some(frame) = frame.filter(|_| Arc::ptr_eq(&self.0.cache, &anchor.cache))
            && let Some(version) = read_version(frame)
            && frame.page() == Some(anchor.page)
        {
            let (level, id, words) = (frame.level(), anchor.page, self.cache().arena.body(frame));
            self.0.counters.hit(level);
            return Ok(Page { handle: self, frame, words, stamp: Stamp::new(version, level, false), id });
        }
        Err(anchor.why_not(self.cache()))
    }

    /// The page that a bookmark was left in, without looking it up; [`Page::read`] tells if it is not there any more. It does
    /// not count as a hit once more. `None` if this cache never had such a page, or another one is in its place.
    pub fn back_to(&self, bookmark: Bookmark) -> Option<Page<'_, S, L>> {
        let [place, version, id] = bookmark.0;
        let (index, id) = (place as u32, PageId::new(id)?);
        if (place >> 32) as u32 != self.cache().salt.mark() || self.cache().arena.get(index)?.page() != Some(id) {
            return None;
        }
        Some(self.found(index, Version::from_word(version), id, false))
    }

    /// Copies the words of a page as the store would have them: with the ids of pages in place of swizzled links. Whoever has
    /// to hold more pages than the cache does holds copies.
    ///
    /// # Errors
    /// [`Conflict`] as [`Page::read`]; [`Misuse::BufferSize`] unless `into` has the page's length; [`Misuse::OtherCache`].
    /// `into` then holds nothing of use.
    pub fn snapshot(&self, page: &Page<'_, S, L>, into: &mut [u64]) -> Result<(), PageError> {
        if !self.is_ours(page) {
            return Err(Misuse::OtherCache.into());
        }
        if into.len() != page.words.len() {
            return Err(Misuse::BufferSize { got: into.len(), words: page.words.len() }.into());
        }
        self.copy_unswizzled(page.words, into);
        if page.is_current() { Ok(()) } else { Err(page.conflict().into()) }
    }

    /// Copies the words of a page of a [`Change`](crate::Change), from inside it, with the ids of pages in place of swizzled links.
    pub fn unswizzled(&self, words: &[AtomicU64], into: &mut [u64]) {
        self.copy_unswizzled(words, into);
    }

    /// Copies a page's words with ids in place of swizzled links; false if a link leads to no page. Of use only if the page
    /// did not change meanwhile: a child with a swizzled link stays in its frame until its parent has a new version.
    pub(crate) fn copy_unswizzled(&self, body: &[AtomicU64], into: &mut [u64]) -> bool {
        let cache = self.cache();
        into.iter_mut().zip(body).for_each(|(copy, word)| *copy = word.load(Ordering::Relaxed));
        let mut is_whole = true;
        for slot in cache.layout.links(body) {
            if let Some(word) = into.get_mut(slot).filter(|word| is_swizzled(**word)) {
                let (frame, _) = cache.salt.place(*word);
                match cache.arena.get(frame).and_then(Frame::page) {
                    Some(child) => *word = child.get(),
                    None => is_whole = false,
                }
            }
        }
        is_whole
    }

    pub(crate) fn found<'a>(&'a self, index: u32, version: Version, id: PageId, is_bypass: bool) -> Page<'a, S, L> {
        let frame = self.cache().frame(index);
        let words = self.cache().arena.body(frame);
        Page { handle: self, frame, words, stamp: Stamp::new(version, frame.level(), is_bypass), id }
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
        Err(page.conflict())
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
        frame.set_children(0);
        // Who waits to alter the page that was here must not wait for the next one.
        frame.lock.retire();
        frame.set_state(State::Free);
        let mut list = self.0.free[class.index()].borrow_mut();
        list.push(index);
        if list.len() > FREE_MAX.min(FREE_BYTES_MAX / class.bytes()) || self.cache().is_awaited() {
            let half = list.len() / 2;
            let shared: Vec<u32> = list.drain(half..).collect();
            drop(list);
            self.cache().pool_frames(class, shared);
        }
    }

    pub(crate) fn no_room(&self, class: SizeClass, held: &'static str) -> CacheError<S::Error> {
        CacheError::NoRoom { class, held, last_write_error: self.cache().last_write_error() }
    }
}

/// A link that is being followed.
struct Follow<'f, 'a, S: Store, L: Layout> {
    handle: &'a CacheHandle<S, L>,
    from: &'f Page<'a, S, L>,
    word: u64,
    class: SizeClass,
    /// If it takes a while.
    fetch: Option<Fetch<'f, 'a, S, L>>,
}

type Fetch<'f, 'a, S, L> = Pin<Box<dyn Future<Output = Result<Page<'a, S, L>, CacheError<<S as Store>::Error>>> + 'f>>;

impl<'a, S: Store, L: Layout> Future for Follow<'_, 'a, S, L> {
    type Output = Result<Page<'a, S, L>, CacheError<S::Error>>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { handle, from, word, class, .. } = *self;
        if self.fetch.is_none()
            && let Some(page) = handle.try_follow::<0>(from, word, class, None)
        {
            return Poll::Ready(Ok(page));
        }
        let fetch = self.fetch.get_or_insert_with(|| handle.follow_absent(from, word, class));
        in_parts(fetch.as_mut().poll(cx))
    }
}

/// A page that a call has left in memory, taken apart: otherwise the one from a hit has to go through the same memory.
#[expect(clippy::needless_match, reason = "it is the taking apart that is wanted")]
#[inline(always)]
fn in_parts<T, E>(polled: Poll<Result<T, E>>) -> Poll<Result<T, E>> {
    match polled {
        Poll::Ready(Ok(page)) => Poll::Ready(Ok(page)),
        Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
        Poll::Pending => Poll::Pending,
    }
}

/// The version to read under; `None` if somebody holds the lock for longer than a change takes.
#[inline]
fn read_version(frame: &Frame) -> Option<Version> {
    match frame.lock.read() {
        Some(version) => Some(version),
        None => wait_for_version(frame),
    }
}

#[cold]
#[inline(never)]
fn wait_for_version(frame: &Frame) -> Option<Version> {
    let mut spin = Spin::default();
    while spin.is_short() {
        spin.turn();
        if let Some(version) = frame.lock.read() {
            return Some(version);
        }
    }
    None
}
