//! Access through the cache, for a compute server that owns a part of the structure (DEX, VLDB 2024, sections 4 and 5).
//!
//! Nobody else reads or writes what it owns, so pages need no remote lock: they are cached down to the leaves, changed in the
//! cache under local locks, and written when they leave it or are flushed. Pages that reach beyond the owned region (the
//! root, and a few below it) are cached too, and never changed: an operation that would have to is refused with
//! [`Error::SharedPage`], before it has any effect, and one whose key lies elsewhere with [`Error::OutsidePartition`].
//!
//! An operation on cached pages never suspends, except to let other tasks of the worker run while a page comes from
//! memory: with several in flight that hides the latency of DRAM, with one it is not done.

pub(crate) mod ship;
mod views;

use std::{
    cell::{Cell, OnceCell},
    future::Future,
    ops::Range,
    pin::Pin,
    task::{Context, Poll},
};

use farlink_cache::{Anchor, Bookmark, CacheHandle, Counters, Page};
use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    error::Error,
    one_sided::OneSided,
    page::{IDENTITY, Identity, SizeClass},
    pages::{self, NewPage, Placement},
    ptr::{Link, RemotePtr, ServerId},
    structure::{Layout, Overlap, Structure},
    sync::{AtomicU64, Ordering},
    worker::{Handle, YieldNow},
};

pub use self::views::CachedViews;
use crate::store::{CacheLayout, RemoteStore, page_id, refused, to_cache};

/// Pages at this level and below are fetched ahead: those above are in the processor's caches.
const PREFETCHED_LEVEL_MAX: u8 = 1;
/// For pages at this level and below it pays to let other operations run meanwhile.
const YIELDED_LEVEL_MAX: u8 = 1;
/// A cache of up to so many bytes is at hand in the processor's own: waiting for a page takes no longer than letting others run.
const AT_HAND_BYTES: usize = 4 << 20;

/// Access through the cache to what this compute server owns, and nobody else reads or writes. Made by
/// [`ComputeCache::own`](crate::ComputeCache::own).
///
/// An operation whose key lies elsewhere fails with [`Error::OutsidePartition`], one that would change a page which reaches
/// beyond with [`Error::SharedPage`], both before any effect. Changes are in remote memory once their pages leave the cache,
/// or after a flush.
#[derive(Debug)]
pub struct Cached<T: Layout> {
    cache: CacheHandle<RemoteStore<T>, CacheLayout<T>>,
    layout: T,
    class: farlink_cache::SizeClass,
    root: std::rc::Rc<OnceCell<Anchor<CacheLayout<T>>>>,
    notes: Cell<[u64; 2]>,
    /// Whether the processor may have to wait for a page.
    is_large: bool,
}

impl<T: Layout> Clone for Cached<T> {
    fn clone(&self) -> Self {
        Self {
            cache: self.cache.clone(),
            layout: self.layout.clone(),
            class: self.class,
            root: self.root.clone(),
            notes: self.notes.clone(),
            is_large: self.is_large,
        }
    }
}

/// A page in the cache.
#[derive(Debug)]
pub struct CachedPage<'a, T: Layout>(Page<'a, RemoteStore<T>, CacheLayout<T>>);

impl<T: Layout> PageRef for CachedPage<'_, T> {
    type Words = [AtomicU64];

    fn at(&self) -> RemotePtr {
        RemotePtr::from_raw(self.0.id().get()).expect("a page is cached under its address")
    }

    #[inline]
    fn level(&self) -> u8 {
        self.0.level()
    }

    #[inline]
    fn kind(&self) -> u8 {
        // Of whatever moment: it is used only after a read that proves the page current.
        self.0.peek(|words| words.get(IDENTITY).map_or(0, |word| Identity::kind_in(word.load(Ordering::Relaxed))))
    }

    #[inline(always)]
    fn read<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> Result<R, Interrupt> {
        self.0.read(f).map_err(|_| Interrupt::conflict())
    }
}

impl<T: Layout> Cached<T> {
    pub(crate) fn new(cache: CacheHandle<RemoteStore<T>, CacheLayout<T>>, layout: T) -> Self {
        let class = to_cache(cache.store().one_sided().structure().class);
        let is_large = cache.cache().memory().limit > AT_HAND_BYTES;
        Self { cache, layout, class, root: std::rc::Rc::default(), notes: Cell::default(), is_large }
    }

    fn one_sided(&self) -> &OneSided {
        self.cache.store().one_sided()
    }

    /// What this compute server owns.
    pub(crate) fn region(&self) -> &T::Region {
        self.cache.store().region().expect("cached access is made with a region")
    }

    /// Whether pages can be kept out of the cache.
    pub(crate) fn excludes_subtrees(&self) -> bool {
        self.cache.cache().excludes_subtrees()
    }

    /// Has `told` be told what each page read from a memory server took.
    pub(crate) fn tell_reads(&self, told: impl Fn(ServerId, u64) + 'static) {
        self.cache.store().tell_reads(told);
    }

    /// What this access's cache did so far.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }

    /// Writes every changed page to its memory server, lower levels first. Others see this compute server's changes once it
    /// is done.
    ///
    /// # Errors
    /// If the fabric fails: pages that could not be written stay cached, and are written by a later flush.
    pub async fn flush(&self) -> Result<(), Error> {
        self.cache.flush().await.map_err(failed)
    }

    /// [`Cached::flush`] for the pages of which some part lies in `region`.
    ///
    /// # Errors
    /// As [`Cached::flush`].
    pub async fn flush_region(&self, region: &T::Region) -> Result<(), Error> {
        let is_meant = |_, words: &[AtomicU64]| self.layout.overlap(words, region) != Overlap::Outside;
        self.cache.flush_matching(is_meant).await.map_err(failed)
    }

    async fn root(&self) -> Result<CachedPage<'_, T>, Interrupt> {
        let anchor = match self.root.get() {
            Some(anchor) => anchor,
            None => {
                let root = self.structure().root;
                let anchor = self
                    .cache
                    .anchor(page_id(root), self.class)
                    .await
                    .map_err(|error| self.cache.store().interrupt(error))?;
                self.root.get_or_init(|| anchor)
            }
        };
        Ok(CachedPage(self.cache.enter(anchor).map_err(refused)?))
    }

    /// What is read first of a page of which nothing else is known: a search begins in the first half.
    #[inline]
    fn first_words(&self) -> [Range<usize>; 3] {
        [0..self.class.words() / 2, 0..0, 0..0]
    }

    /// Whether something is gained if other operations run while the processor fetches what one is about to look at.
    #[inline]
    fn gains_by_yielding(&self) -> bool {
        self.is_large && self.worker().has_other_tasks()
    }

    #[inline]
    async fn let_others_run(&self) {
        if self.gains_by_yielding() {
            self.worker().yield_now().await;
        }
    }

    /// Whether this compute server may change a page.
    fn require_owned(&self, page: &CachedPage<'_, T>) -> Result<(), Interrupt> {
        // A leaf got into the cache because it is.
        if page.level() == 0 {
            return Ok(());
        }
        match page.read(|words| self.cache.store().overlap(words))? {
            Overlap::Inside => Ok(()),
            _ => Err(Error::SharedPage { page: page.at() }.into()),
        }
    }
}

/// Following a link. By hand, so that what a hit takes is part of the caller's code: an async function of its own costs a
/// hit half again as much.
struct Follow<'f, 'a, T: Layout> {
    access: &'a Cached<T>,
    from: &'f CachedPage<'a, T>,
    word: u64,
    /// These words of the page are wanted first.
    words: [Range<usize>; 3],
    step: Step<'f, 'a, T>,
}

type Fetch<'f, 'a, T> = Pin<Box<dyn Future<Output = Result<CachedPage<'a, T>, Interrupt>> + 'f>>;

enum Step<'f, 'a, T: Layout> {
    Prefetch,
    Yield(YieldNow<'a>),
    Fetch(Fetch<'f, 'a, T>),
}

impl<'f, 'a, T: Layout> Follow<'f, 'a, T> {
    #[cold]
    #[inline(never)]
    fn fetch(&self) -> Fetch<'f, 'a, T> {
        let Self { access, from, word, .. } = *self;
        let class = access.class;
        Box::pin(async move {
            let page = access.cache.follow(&from.0, word, class).await;
            page.map(CachedPage).map_err(|error| access.cache.store().interrupt(error))
        })
    }
}

impl<'a, T: Layout> Future for Follow<'_, 'a, T> {
    type Output = Result<CachedPage<'a, T>, Interrupt>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let access = self.access;
        if let Step::Prefetch = self.step
            && self.from.level() <= PREFETCHED_LEVEL_MAX + 1
            && access.cache.prefetch(self.word, access.class, self.words.clone())
            && self.from.level() <= YIELDED_LEVEL_MAX + 1
            && access.gains_by_yielding()
        {
            self.step = Step::Yield(access.worker().yield_now());
        }
        match &mut self.step {
            Step::Prefetch => {}
            Step::Yield(others) => {
                if Pin::new(others).poll(cx).is_pending() {
                    return Poll::Pending;
                }
            }
            Step::Fetch(fetch) => return in_parts(fetch.as_mut().poll(cx)),
        }
        if let Some(page) = access.cache.try_follow::<0>(&self.from.0, self.word, access.class, None) {
            return Poll::Ready(Ok(CachedPage(page)));
        }
        let mut fetch = self.fetch();
        let polled = fetch.as_mut().poll(cx);
        self.step = Step::Fetch(fetch);
        in_parts(polled)
    }
}

/// A page that a call has left in memory, taken apart: otherwise the one from a hit has to go through the same memory.
#[expect(clippy::needless_match, reason = "it is the taking apart that is wanted")]
#[inline(always)]
fn in_parts<T>(polled: Poll<Result<T, Interrupt>>) -> Poll<Result<T, Interrupt>> {
    match polled {
        Poll::Ready(Ok(page)) => Poll::Ready(Ok(page)),
        Poll::Ready(Err(interrupt)) => Poll::Ready(Err(interrupt)),
        Poll::Pending => Poll::Pending,
    }
}

fn failed(error: farlink_cache::CacheError<Interrupt>) -> Error {
    match error {
        farlink_cache::CacheError::Store { source: Interrupt::Failed(error), .. } => *error,
        other => Error::Cache(other.to_string()),
    }
}

impl<T: Layout> Access for Cached<T> {
    type Page<'a> = CachedPage<'a, T>;
    type Views<'a> = CachedViews<'a>;

    fn worker(&self) -> &Handle {
        self.one_sided().worker()
    }

    fn structure(&self) -> &Structure {
        self.one_sided().structure()
    }

    #[inline]
    async fn enter(&self, start: Start) -> Result<CachedPage<'_, T>, Interrupt> {
        match start {
            // What is cached is current: nobody else changes it.
            Start::Root | Start::Anew => self.root().await,
            Start::Stopped(words) => match self.cache.back_to(Bookmark(words)) {
                Some(page) => Ok(CachedPage(page)),
                None => self.root().await,
            },
            Start::Page(page) => Ok(CachedPage(
                self.cache
                    .load(page_id(page), self.class)
                    .await
                    .map_err(|error| self.cache.store().interrupt(error))?,
            )),
        }
    }

    #[inline(always)]
    fn root_at_hand(&self) -> Option<CachedPage<'_, T>> {
        if self.gains_by_yielding() {
            return None;
        }
        self.cache.enter(self.root.get()?).ok().map(CachedPage)
    }

    #[inline]
    fn follow<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
    ) -> impl Future<Output = Result<CachedPage<'a, T>, Interrupt>> {
        self.follow_for(from, link, self.first_words())
    }

    #[inline]
    fn follow_for<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
        words: [Range<usize>; 3],
    ) -> impl Future<Output = Result<CachedPage<'a, T>, Interrupt>> {
        Follow { access: self, from, word: link.word(), words, step: Step::Prefetch }
    }

    #[inline(always)]
    fn at_hand<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
        words: [Range<usize>; 3],
    ) -> Option<CachedPage<'a, T>> {
        let level = from.level();
        if level <= YIELDED_LEVEL_MAX + 1 && self.gains_by_yielding() {
            return None;
        }
        let words = (level <= PREFETCHED_LEVEL_MAX + 1).then_some(words);
        self.cache.try_follow(&from.0, link.word(), self.class, words).map(CachedPage)
    }

    fn stop_at(&self, page: &CachedPage<'_, T>) -> Start {
        page.0.bookmark().map_or(Start::Root, |bookmark| Start::Stopped(bookmark.0))
    }

    #[inline]
    fn notes(&self) -> Option<&Cell<[u64; 2]>> {
        Some(&self.notes)
    }

    #[inline]
    async fn expect<'a>(&'a self, page: &CachedPage<'a, T>, words: [Range<usize>; 2]) {
        if page.level() == 0 {
            words.into_iter().for_each(|words| page.0.prefetch(words));
            self.let_others_run().await;
        }
    }

    async fn follow_many<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        links: &[Link],
    ) -> Vec<Result<CachedPage<'a, T>, Interrupt>> {
        let words: Vec<_> = links.iter().map(|link| (link.word(), self.class)).collect();
        let pages = self.cache.follow_many(&from.0, &words).await;
        pages
            .into_iter()
            .map(|page| page.map(CachedPage).map_err(|error| self.cache.store().interrupt(error)))
            .collect()
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<CachedPage<'a, T>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut CachedViews<'a>) -> R,
    ) -> Result<R, Interrupt> {
        for page in &pages {
            self.require_owned(page)?;
        }
        let mut reserved = Vec::with_capacity(new.len());
        for page in &new {
            reserved.push(
                self.cache
                    .reserve(page_id(page.at()), to_cache(page.class()))
                    .await
                    .map_err(|error| self.cache.store().interrupt(error))?,
            );
        }
        let held: Vec<_> = pages.iter().map(|page| &page.0).collect();
        let structure = self.structure().id;
        let changed = self.cache.change(&held, reserved, |change| {
            let mut views = CachedViews::open(change, structure, pages.len(), &new);
            let result = f(&mut views);
            (result, views.close(change))
        });
        let (result, freed) = changed.map_err(refused)?;
        new.into_iter().for_each(NewPage::publish);
        for (page, lock) in freed {
            let (at, class) = (pages[page].at(), self.structure().class);
            let free = pages::free_owned(self.worker().clone(), at, class, lock);
            // Nobody waits for it: the page is out of use already.
            let task = async move {
                if let Err(error) = free.await {
                    tracing::warn!(page = %at, %error, "a page was not freed");
                }
            };
            drop(self.worker().spawn_to_end(task));
        }
        Ok(result)
    }

    async fn alter<'a, R>(
        &'a self,
        page: CachedPage<'a, T>,
        f: impl FnOnce(&mut CachedViews<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.require_owned(&page)?;
        let structure = self.structure().id;
        let altered = self.cache.alter(&page.0, |change| {
            let mut views = CachedViews::open(change, structure, 1, &[]);
            let result = f(&mut views);
            views.close(change);
            result
        });
        altered.map_err(refused)
    }

    fn leads_to(&self, link: Link, page: &CachedPage<'_, T>) -> bool {
        page.0.is_target_of(link.word())
    }

    /// Past the cache: for words of pages that are never cached.
    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.one_sided().load(word).await
    }

    /// Past the cache: for words of pages that are never cached.
    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.one_sided().compare_swap(word, old, new).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided().allocate(class, placement).await
    }
}
