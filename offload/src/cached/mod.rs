//! Access through the cache, for a compute server that owns a part of the structure (DEX, VLDB 2024, sections 4 and 5).
//!
//! Nobody else reads or writes what it owns, so pages need no remote lock: they are cached down to the leaves, changed in the
//! cache under local locks, and written when they leave it or are flushed. Pages that reach beyond the owned region (the
//! root, and a few below it) are cached too, and changed under their remote locks (see `shared`). An operation whose key lies
//! elsewhere is refused with [`Error::OutsidePartition`], before it has any effect.
//!
//! An operation on cached pages never suspends, except to let other tasks of the worker run while a page comes from
//! memory: with several in flight that hides the latency of DRAM, with one it is not done.

mod change;
mod holding;
mod pages;
mod parting;
mod shared;

use std::{
    cell::OnceCell,
    future::Future,
    ops::Range,
    pin::Pin,
    task::{self, Poll},
};

use farlink_cache::{
    Anchor, Bookmark, CacheError, CacheHandle, Conflict, Counters, ExclusionGuard, Misuse, Page, PageError,
};
use farlink_runtime::{
    access::{
        Access, Context, FastPath, Hint, Interrupt, NewPage, Operation, PageRef, Pages, Placement, Plugin, Start, Swap,
        Unlinked, WordPtr,
    },
    change::Role,
    error::Error,
    gate::Passage,
    lock::LockWord,
    one_sided::{OneSided, ownership},
    page::{IDENTITY, Identity, LOCK, SizeClass},
    pages as allocation,
    ptr::{Link, RemotePtr, ServerId},
    structure::{Overlap, Region},
    sync::{AtomicU64, Ordering},
    worker::{Handle, YieldNow},
};
use smallvec::SmallVec;

use self::holding::Holding;
pub use self::pages::CachedPages;
use self::pages::Fate;
pub(crate) use self::parting::Moving;
use crate::store::{CacheLayout, RemoteStore, link_of, page_id, refused, to_cache};

/// Pages at this level and below are fetched ahead: those above are in the processor's caches.
const PREFETCHED_LEVEL_MAX: u8 = 1;
/// For pages at this level and below it pays to let other operations run meanwhile.
const YIELDED_LEVEL_MAX: u8 = 1;
/// A cache of up to so many bytes lies in the processor's own: waiting for a page takes no longer than letting others run.
const SMALL_BYTES: usize = 4 << 20;

/// Access through the cache to what this compute server owns, and nobody else reads or writes. Made by
/// [`ComputeCache::own`](crate::ComputeCache::own).
///
/// An operation whose key lies elsewhere fails with [`Error::OutsidePartition`], before any effect. Changes are in remote memory
/// once their pages leave the cache, or after a flush.
///
/// An operation that has begun is polled to its end, or dropped: kept and not polled, it has those wait who miss on the page that it
/// fetches. Where some are awaited while others are kept, have each run as a [task](Handle::spawn).
#[derive(Debug)]
pub struct Cached<P: Plugin> {
    cache: CacheHandle<RemoteStore<P>, CacheLayout<P>>,
    /// The size of most pages.
    class: farlink_cache::SizeClass,
    root: std::rc::Rc<OnceCell<Anchor<CacheLayout<P>>>>,
    /// Whether the processor may have to wait for a page.
    is_large: bool,
}

impl<P: Plugin> Clone for Cached<P> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone(), class: self.class, root: self.root.clone(), is_large: self.is_large }
    }
}

/// Pages that are kept out of a cache.
pub(crate) type Excluded<P> = ExclusionGuard<RemoteStore<P>, CacheLayout<P>>;

/// A page in the cache.
#[derive(Debug)]
pub struct CachedPage<'a, P: Plugin>(Page<'a, RemoteStore<P>, CacheLayout<P>>);

impl<P: Plugin> PageRef for CachedPage<'_, P> {
    type Words = [AtomicU64];

    fn link(&self) -> Link {
        link_of(self.0.id())
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
        self.0.read(f).map_err(conflict)
    }
}

#[cold]
fn conflict(conflict: Conflict) -> Interrupt {
    refused(conflict.into())
}

impl<P: Plugin> Cached<P> {
    pub(crate) fn new(cache: CacheHandle<RemoteStore<P>, CacheLayout<P>>) -> Self {
        let class = to_cache(cache.store().context().structure.class);
        let is_large = cache.cache().memory().limit > SMALL_BYTES;
        Self { cache, class, root: std::rc::Rc::default(), is_large }
    }

    fn one_sided(&self) -> &OneSided<P> {
        self.cache.store().one_sided()
    }

    #[inline(always)]
    pub(crate) fn worker(&self) -> &Handle {
        &self.cache.store().context().worker
    }

    /// A copy of a page, with unswizzled links.
    fn snapshot(&self, page: &CachedPage<'_, P>) -> Result<Box<[u64]>, Interrupt> {
        let class = page.link().remote().map_or(SizeClass::SMALLEST, |(_, class)| class);
        let mut words = vec![0; class.words()].into_boxed_slice();
        self.cache.snapshot(&page.0, &mut words).map_err(refused)?;
        Ok(words)
    }

    /// Whether the page that an unswizzled link leads to is cached, or on its way.
    pub(crate) fn contains(&self, link: Link) -> bool {
        self.cache.contains(page_id(link))
    }

    /// Whether the cache would keep the page that an unswizzled link leads to.
    pub(crate) fn is_hot(&self, link: Link, level: u8) -> bool {
        self.cache.is_hot(page_id(link), level)
    }

    /// Counts a use of the page that an unswizzled link leads to, and that is not fetched.
    pub(crate) fn count_absent(&self, link: Link) {
        self.cache.count_absent(page_id(link));
    }

    /// Takes a use of such a page back.
    pub(crate) fn discount_absent(&self, link: Link) {
        self.cache.discount_absent(page_id(link));
    }

    /// Where a page lies in what this compute server owns.
    pub(crate) fn overlap(&self, words: &[AtomicU64]) -> Overlap {
        self.cache.store().overlap(words)
    }

    /// Keeps the page that an unswizzled link leads to, and all pages of which `is_below` says so, out of the cache; `None` if
    /// one of them is in it.
    pub(crate) async fn exclude(
        &self,
        from: &CachedPage<'_, P>,
        link: Link,
        class: SizeClass,
        is_below: impl Fn(&[AtomicU64]) -> bool + Send + Sync + 'static,
    ) -> Result<Option<Excluded<P>>, CacheError<Interrupt>> {
        self.cache.exclude(&from.0, link.word(), to_cache(class), is_below).await
    }

    /// [`Access::follow`], as what it is.
    #[inline(always)]
    pub(crate) fn following<'f, 'a>(
        &'a self,
        from: &'f CachedPage<'a, P>,
        link: Link,
        hint: Hint,
    ) -> Follow<'f, 'a, P> {
        Follow { access: self, from, word: link.word(), words: self.first_words(hint), step: Step::Prefetch }
    }

    /// The size of the page that a link leads to.
    fn class_of(&self, word: u64) -> farlink_cache::SizeClass {
        let of_link = || Link::from_word(word).remote().map(|(_, class)| to_cache(class));
        self.cache.class_of(word).or_else(of_link).unwrap_or(self.class)
    }

    /// A region that this compute server owns: the one that has all of another one, or some of it.
    pub(crate) fn region_of(&self, scope: &P::Region) -> Option<P::Region> {
        self.cache.store().regions()?.with(|regions| {
            let has_some = |owned: &&P::Region| scope.overlap(owned) != Overlap::Outside;
            regions.with(scope).or_else(|| regions.owned.iter().find(has_some)).cloned()
        })
    }

    /// Leave for somebody else to change what is owned.
    ///
    /// # Errors
    /// [`Error::GivenUp`] if it is given up, or about to be.
    pub(crate) fn begin_change(&self) -> Result<Passage, Error> {
        self.cache.store().begin_change().map_err(|interrupt| match interrupt {
            Interrupt::Failed(error) => *error,
            _ => Error::GivenUp { name: self.context().structure.name.clone() },
        })
    }

    /// Whether somebody is giving up what this compute server owns.
    pub(crate) fn is_being_given_up(&self) -> bool {
        self.cache.store().known().gate.is_shut()
    }

    /// Whether this compute server still has what it owned when the access was made.
    pub(crate) fn is_held(&self) -> bool {
        self.cache.store().require_tenure().is_ok()
    }

    /// Whether pages can be kept out of the cache.
    pub(crate) fn excludes_subtrees(&self) -> bool {
        self.cache.cache().excludes_subtrees()
    }

    /// Has `told` be told what each page read from a memory server took.
    pub(crate) fn observe_reads(&self, told: impl Fn(ServerId, u64) -> bool + 'static) {
        self.cache.store().observe_reads(told);
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
    pub async fn flush_region(&self, region: &P::Region) -> Result<(), Error> {
        let is_meant = |_, words: &[AtomicU64]| P::overlap(words, region) != Overlap::Outside;
        self.cache.flush_matching(is_meant).await.map_err(failed)
    }

    /// Flushes, and gives up what this compute server owns: others can claim it from then on. Operations may be under way, over all
    /// handles of the cache. They go on while what is cached is written; then those that would change something are refused with
    /// [`Error::GivenUp`], while what was changed meanwhile is written, and in the end all are. What an operation is refused it has not
    /// done: a [`Router`](crate::Router) has it done by the next owner.
    ///
    /// # Errors
    /// As [`Cached::flush`]: nothing is given up then. If the fabric fails later, maintenance goes on with it.
    pub async fn close(&self) -> Result<(), Error> {
        // The second one has what the first one has left, and leaves less.
        self.flush().await?;
        self.flush().await?;
        let Context { worker, structure, .. } = self.context();
        let Some(log) = self.cache.store().log() else { return Ok(()) };
        let Some(shut) = self.shut().await else { return Ok(()) };
        self.flush().await?;
        let (handle, of, log) = (worker.clone(), structure.clone(), log.clone());
        // To its end: nothing is recorded any more in a log that is wiped.
        let giving_up = async move {
            log.wipe(&handle).await?;
            let given_up = ownership::give_up(&handle, &of, log.tenure()).await;
            drop(shut);
            given_up
        };
        worker.spawn_to_end(giving_up).await
    }

    /// The page where an operation begins, if it is cached.
    #[inline(always)]
    fn try_start(&self, start: Start) -> Option<Result<CachedPage<'_, P>, Interrupt>> {
        match start {
            Start::Page(_) => return None,
            Start::Resume(words) => {
                if let Some(page) = self.cache.back_to(Bookmark(words)) {
                    return Some(Ok(CachedPage(page)));
                }
            }
            // What is cached is current: nobody else changes it, but for pages that are shared.
            Start::Root => {}
            Start::Anew if self.cache.store().known().shared.is_empty() => {}
            Start::Anew => return None,
        }
        self.cache.store().require_tenure().ok()?;
        Some(self.cache.enter(self.root.get()?).map(CachedPage).map_err(refused))
    }

    #[cold]
    #[inline(never)]
    fn start_absent(&self, start: Start) -> Fetch<'_, '_, P> {
        Box::pin(async move {
            let failed = |error| self.cache.store().interrupt(error);
            let Start::Page(page) = start else {
                if start == Start::Anew {
                    self.renew_shared().await?;
                }
                self.cache.store().require_tenure()?;
                let anchor = match self.root.get() {
                    Some(anchor) => anchor,
                    None => {
                        let root = self.context().structure.root_link();
                        let anchor = self.cache.anchor(page_id(root), self.class).await.map_err(failed)?;
                        self.root.get_or_init(|| anchor)
                    }
                };
                return Ok(CachedPage(self.cache.enter(anchor).map_err(refused)?));
            };
            let Some((at, class)) = page.remote() else {
                return Err(Error::BadPointer { word: page.word(), why: "it is no page".into() }.into());
            };
            if self.cache.store().known().freeing.contains(page) {
                return Err(Interrupt::stale(at, "it was freed just now"));
            }
            Ok(CachedPage(self.cache.load(page_id(page), to_cache(class)).await.map_err(failed)?))
        })
    }

    /// What is read first of a page of which nothing else is known: a search begins in the first half.
    #[inline(always)]
    fn first_words(&self, hint: Hint) -> [Range<usize>; 3] {
        match hint.first {
            [(0, 0), ..] => [0..self.class.words() / 2, 0..0, 0..0],
            first => first.map(|(start, end)| usize::from(start)..usize::from(end)),
        }
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

    /// What it means that the cache has refused a change.
    #[cold]
    fn refused(&self, error: PageError, page: RemotePtr) -> Interrupt {
        match error {
            // What it had set would have reached beyond what is owned.
            PageError::Misuse(Misuse::Refused) => Error::SharedPage { page }.into(),
            error => refused(error),
        }
    }
}

/// Following a link. By hand, so that what a hit takes is part of the caller's code: an async function of its own costs a
/// hit half again as much.
pub(crate) struct Follow<'f, 'a, P: Plugin> {
    access: &'a Cached<P>,
    pub(crate) from: &'f CachedPage<'a, P>,
    pub(crate) word: u64,
    /// These words of the page are wanted first.
    words: [Range<usize>; 3],
    step: Step<'f, 'a, P>,
}

type Fetch<'f, 'a, P> = Pin<Box<dyn Future<Output = Result<CachedPage<'a, P>, Interrupt>> + 'f>>;

/// Going to where an operation begins; by hand, as [`Follow`] is.
struct Open<'a, P: Plugin> {
    access: &'a Cached<P>,
    start: Start,
    /// If it takes a while.
    fetch: Option<Fetch<'a, 'a, P>>,
}

impl<'a, P: Plugin> Future for Open<'a, P> {
    type Output = Result<CachedPage<'a, P>, Interrupt>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Self::Output> {
        let Self { access, start, .. } = *self;
        if self.fetch.is_none()
            && let Some(opened) = access.try_start(start)
        {
            return Poll::Ready(opened);
        }
        let fetch = self.fetch.get_or_insert_with(|| access.start_absent(start));
        in_parts(fetch.as_mut().poll(cx))
    }
}

enum Step<'f, 'a, P: Plugin> {
    Prefetch,
    Yield(YieldNow<'a>),
    Fetch(Fetch<'f, 'a, P>),
}

impl<'f, 'a, P: Plugin> Follow<'f, 'a, P> {
    #[cold]
    #[inline(never)]
    fn fetch(&self) -> Fetch<'f, 'a, P> {
        let Self { access, from, word, .. } = *self;
        let class = access.class_of(word);
        Box::pin(async move {
            let page = access.cache.follow(&from.0, word, class).await;
            match page {
                Ok(page) => Ok(CachedPage(page)),
                Err(error) => Err(access.strayed(from, access.cache.store().interrupt(error)).await),
            }
        })
    }
}

impl<'a, P: Plugin> Future for Follow<'_, 'a, P> {
    type Output = Result<CachedPage<'a, P>, Interrupt>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Self::Output> {
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
        // Most pages have the size of the root. Of others only fetching knows the size.
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

impl<P: Plugin> FastPath for Cached<P> {
    type Plugin = P;
    type Page<'a> = CachedPage<'a, P>;
    const PREFETCHES: bool = true;
    const VALIDATES: bool = false;

    #[inline(always)]
    fn try_open(&self) -> Option<CachedPage<'_, P>> {
        if self.gains_by_yielding() || self.cache.store().require_tenure().is_err() {
            return None;
        }
        self.cache.enter(self.root.get()?).ok().map(CachedPage)
    }

    #[inline(always)]
    fn try_follow<'a>(&'a self, from: &CachedPage<'a, P>, link: Link, hint: Hint) -> Option<CachedPage<'a, P>> {
        let level = from.level();
        if level <= YIELDED_LEVEL_MAX + 1 && self.gains_by_yielding() {
            return None;
        }
        let words = (level <= PREFETCHED_LEVEL_MAX + 1).then(|| self.first_words(hint));
        self.cache.try_follow(&from.0, link.word(), self.class, words).map(CachedPage)
    }

    fn resume_at(&self, page: &CachedPage<'_, P>) -> Start {
        page.0.bookmark().map_or(Start::Root, |bookmark| Start::Resume(bookmark.0))
    }

    async fn settle(&self) -> Result<(), Error> {
        let store = self.cache.store();
        match store.log() {
            Some(log) if store.records_all() => store.arrival(log.latest()).await,
            _ => Ok(()),
        }
    }

    async fn run_holding<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        from: Start,
    ) -> Option<Result<O::Output, Interrupt>> {
        Some(operation.run(&Holding::new(self), from).await)
    }

    #[inline]
    async fn prefetch<'a>(&'a self, page: &CachedPage<'a, P>, words: [(u16, u16); 2]) {
        if page.level() == 0 {
            words.into_iter().for_each(|(start, end)| page.0.prefetch(start.into()..end.into()));
            self.let_others_run().await;
        }
    }
}

const NOT_COHERENT: Error = Error::NotCoherent {
    what: "an owner's cache hides what it changes, so words that others swap may lead to nothing",
};

impl<P: Plugin> Access for Cached<P> {
    type PagesMut<'a> = CachedPages<'a>;

    #[inline(always)]
    fn context(&self) -> &Context<P> {
        self.cache.store().context()
    }

    #[inline(always)]
    fn open(&self, start: Start) -> impl Future<Output = Result<CachedPage<'_, P>, Interrupt>> {
        Open { access: self, start, fetch: None }
    }

    #[inline(always)]
    fn follow<'a>(
        &'a self,
        from: &CachedPage<'a, P>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<CachedPage<'a, P>, Interrupt>> {
        self.following(from, link, hint)
    }

    #[inline(always)]
    fn descend<'a>(
        &'a self,
        from: &CachedPage<'a, P>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<CachedPage<'a, P>, Interrupt>> {
        self.follow(from, link, hint)
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        let (mut f, mut result) = (Some(f), None);
        let mut call = |pages: &mut Self::PagesMut<'a>| result = f.take().map(|f| f(pages));
        let after = self.change_by(pages, &mut call).await?;
        result.map(|result| (result, after)).ok_or(Interrupt::conflict())
    }

    async fn install<'a>(
        &'a self,
        _new: Vec<NewPage>,
        _f: impl FnOnce(&mut Self::PagesMut<'a>),
        _swap: Swap,
        _unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        Err(NOT_COHERENT.into())
    }

    async fn load(&self, _words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        Err(NOT_COHERENT.into())
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided().allocate(class, placement).await
    }

    fn leads_to(&self, link: Link, page: &CachedPage<'_, P>) -> bool {
        page.0.is_target_of(link.word())
    }
}
