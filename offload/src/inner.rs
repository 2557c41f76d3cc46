//! Shared-everything: many compute servers change a structure, and each caches its inner pages.
//!
//! A cached inner page may be old. That does no harm: every page proves by its fences whether it is the one that was looked
//! for. Where it is not, and to its right is not either, the attempt ends as *stale*, and the next one reads every page on
//! its way anew ([`Start::Anew`]), which also refreshes the cached ones. So an old page costs one retry, once; and a retry
//! owes nothing to the cache, so it gets through whenever an access without a cache would (Sherman, SIGMOD 2022, section 4.2,
//! made to hold for splits, merges, and freed and reused pages).
//!
//! A page is handed out as a private copy under the lock word that it was read with. A change locks by compare-and-swap from
//! that word, so an old copy can mislead a search, never a change.

use std::{
    array,
    cell::Cell,
    pin::pin,
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use farlink_cache::{CacheHandle, Counters, LEVELS};
use farlink_runtime::{
    access::{
        Access, Cause, Context, Direction, Entering, FastPath, Hint, Interrupt, Link, NewPage, PageRef, Pages,
        Placement, Plugin, Right, Start, Swap, Unlinked, WordPtr,
    },
    error::Error,
    lock::LockWord,
    one_sided::{OneSided, OneSidedPages, PageCopy},
    page::{LOCK, SizeClass, has_words},
};
use futures_util::{StreamExt as _, stream};
use smallvec::SmallVec;

use crate::store::{CacheLayout, RemoteStore, page_id, to_cache};

/// One-sided access that caches inner pages; see [`ComputeCache::share`](crate::ComputeCache::share). Operations that have begun are
/// polled to their end, or dropped, as over [`Cached`](crate::Cached).
#[derive(Debug)]
pub struct CachedInner<P: Plugin> {
    cache: CacheHandle<RemoteStore<P>, CacheLayout<P>>,
    /// Pages that were read past the cache, by level.
    past_cache: Rc<[Cell<u64>; LEVELS]>,
    beside_owners: bool,
}

impl<P: Plugin> Clone for CachedInner<P> {
    fn clone(&self) -> Self {
        let Self { cache, past_cache, beside_owners } = self;
        Self { cache: cache.clone(), past_cache: Rc::clone(past_cache), beside_owners: *beside_owners }
    }
}

/// A private copy of a page.
#[derive(Debug)]
pub struct SharedPage {
    copy: PageCopy,
    /// Whether it may be older than the operation.
    is_cached: bool,
    /// The cached page above that led here.
    above: Cell<Option<Link>>,
}

impl PageRef for SharedPage {
    type Words = [u64];

    fn link(&self) -> Link {
        self.copy.link()
    }

    fn level(&self) -> u8 {
        self.copy.level()
    }

    fn kind(&self) -> u8 {
        self.copy.kind()
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        self.copy.read(f)
    }
}

impl<P: Plugin> CachedInner<P> {
    pub(crate) fn new(cache: CacheHandle<RemoteStore<P>, CacheLayout<P>>) -> Self {
        Self { cache, past_cache: Rc::default(), beside_owners: false }
    }

    /// The same; reading asks for no right, as [there](OneSided::beside_owners).
    pub fn beside_owners(self) -> Self {
        Self { beside_owners: true, ..self }
    }

    fn one_sided(&self) -> &OneSided<P> {
        self.cache.store().one_sided()
    }

    /// What this access's cache did so far.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }

    /// How many pages of each level this access has read from remote memory without asking its cache: leaves, and inner pages
    /// of which the cached copy may be old. A validation reads one word, and no page.
    pub fn reads_past_cache(&self) -> [u64; LEVELS] {
        array::from_fn(|level| self.past_cache[level].get())
    }

    /// A page as it is now.
    async fn current(&self, page: Link, above: Option<Link>) -> Result<SharedPage, Interrupt> {
        let copy = self.one_sided().read_page(page).await?;
        let count = &self.past_cache[usize::from(copy.level()).min(LEVELS - 1)];
        count.set(count.get() + 1);
        Ok(SharedPage { copy, is_cached: false, above: Cell::new(above) })
    }

    /// A page as it is now; the cached one, if there is one, becomes the same.
    async fn renewed(&self, page: Link) -> Result<SharedPage, Interrupt> {
        match self.current(page, None).await {
            Ok(current) => {
                self.renew(page, Some(&current)).await?;
                Ok(current)
            }
            Err(gone @ Interrupt::Restart(Cause::Stale { .. })) => {
                self.renew(page, None).await?;
                Err(gone)
            }
            Err(error) => Err(error),
        }
    }

    /// Brings a cached page up to date, or drops it.
    async fn renew(&self, page: Link, current: Option<&SharedPage>) -> Result<(), Interrupt> {
        let Some((_, class)) = page.remote() else { return Ok(()) };
        let (id, class) = (page_id(page), to_cache(class));
        if !self.cache.contains(id) {
            return Ok(());
        }
        let Some(current) = current.filter(|page| page.level() > 0) else {
            self.cache.invalidate(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
            return Ok(());
        };
        let cached = self.cache.load(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
        // Another task may have put there what is newer. If the page has left the cache meanwhile, it is read anew when it is next needed.
        let version = |word: u64| LockWord::from_word(word).version();
        let _ = current.read(|words| {
            let is_older = |is: &[AtomicU64]| version(is[LOCK].load(Ordering::Relaxed)) < version(words[LOCK]);
            self.cache.refresh_if(&cached, words, is_older)
        })?;
        Ok(())
    }

    /// An inner page as the cache has it.
    async fn cached(&self, link: Link) -> Result<SharedPage, Interrupt> {
        let Some((_, of_link)) = link.remote() else {
            return Err(Error::BadPointer { word: link.word(), why: "it leads to no page".into() }.into());
        };
        let (id, class) = (page_id(link), to_cache(of_link));
        let page = self.cache.load(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
        let mut words = self.context().worker.buffer(of_link.words())?;
        let copied = page.read(|shared| {
            for (copy, word) in words.iter_mut().zip(shared) {
                *copy = word.load(Ordering::Relaxed);
            }
        });
        copied.map_err(|_| Interrupt::conflict())?;
        let level = page.level();
        drop(page);
        if level == 0 || has_words(&words) {
            // A root that is a leaf: leaves are not cached.
            self.cache.invalidate(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
            return self.current(link, None).await;
        }
        let copy = self.one_sided().copy_of(link, words)?;
        Ok(SharedPage { copy, is_cached: true, above: Cell::new(None) })
    }

    /// A search moved on from `page` to the right: the cached page that led there is old.
    async fn renew_above(&self, page: &SharedPage) -> Result<(), Interrupt> {
        if let Some(above) = page.above.take() {
            match self.renewed(above).await {
                Ok(_) | Err(Interrupt::Restart(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl<P: Plugin> FastPath for CachedInner<P> {
    type Plugin = P;
    type Page<'a> = SharedPage;

    #[inline]
    fn right(&self, reads_only: bool) -> Option<Right> {
        if reads_only && self.beside_owners { Some(Right::LASTING) } else { self.one_sided().right(reads_only) }
    }

    #[inline]
    fn stands(&self, right: Right, reads_only: bool) -> bool {
        reads_only && self.beside_owners || self.one_sided().stands(right, reads_only)
    }

    fn enter(&self) -> Entering<'_> {
        self.one_sided().enter()
    }
}

impl<P: Plugin> Access for CachedInner<P> {
    type PagesMut<'a> = OneSidedPages;

    fn context(&self) -> &Context<P> {
        self.cache.store().context()
    }

    async fn open(&self, start: Start) -> Result<SharedPage, Interrupt> {
        match start {
            Start::Root | Start::Resume(_) => self.cached(self.context().structure.root_link()).await,
            Start::Anew => self.renewed(self.context().structure.root_link()).await,
            Start::Page(page) => self.current(page, None).await,
        }
    }

    async fn follow(&self, from: &SharedPage, link: Link, hint: Hint) -> Result<SharedPage, Interrupt> {
        // Level 0 is not cached.
        let is_leaf = from.level() == 0 || from.level() == 1 && hint.direction == Direction::Down;
        let page = match (is_leaf, from.is_cached) {
            (true, _) => self.current(link, None).await?,
            (false, true) => self.cached(link).await?,
            (false, false) => self.renewed(link).await?,
        };
        match hint.direction {
            Direction::Down => page.above.set(from.is_cached.then(|| from.link())),
            Direction::Beside => {}
            Direction::Moved => self.renew_above(from).await?,
        }
        Ok(page)
    }

    async fn validate(&self, pages: &[&SharedPage]) -> Result<(), Interrupt> {
        let cached: Vec<&SharedPage> = pages.iter().filter(|page| page.is_cached).copied().collect();
        let current = self.one_sided().are_current(cached.iter().map(|page| &page.copy)).await?;
        let stale: Vec<_> = cached.into_iter().zip(current).filter(|(_, is_current)| !is_current).collect();
        let renewing = stream::iter(stale.iter().map(|(page, _)| self.renewed(page.link())));
        let mut renewing = pin!(renewing.buffered(self.context().worker.window()));
        while let Some(renewed) = renewing.next().await {
            if let Err(Interrupt::Failed(error)) = renewed {
                return Err(error.into());
            }
        }
        match stale.last() {
            Some((page, _)) => Err(Interrupt::stale(page.at(), "the cached copy of it was old")),
            None => Ok(()),
        }
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        let (old, new) = pages.into_parts();
        let old: SmallVec<[_; 4]> = old.collect();
        // A page of which the copy is old may be anybody's by now. Where an atomic may undo a WRITE, no lock of it is tried in vain. What
        // is current now is not reused before this operation has ended.
        if !self.context().worker.capabilities().atomic_against_writes {
            self.validate(&old.iter().map(|(page, _)| page).collect::<Vec<_>>()).await?;
        }
        let (mut copies, mut inner) = (Pages::new(), Vec::new());
        for (page, role) in old {
            if page.level() > 0 || page.link() == self.context().structure.root_link() {
                inner.push(page.link());
            }
            copies.add_as(page.copy, role);
        }
        for page in new {
            copies.add_new(page);
        }
        let result = self.one_sided().change(copies, f).await;
        if !matches!(result, Err(Interrupt::Failed(_))) {
            // Changed by us, or changed by others so that our copies were old: either way the cache is behind.
            for page in inner {
                match self.renewed(page).await {
                    // The change is done, whatever became of the page.
                    Err(Interrupt::Failed(error)) if result.is_ok() => {
                        tracing::debug!(?page, %error, "a cached page was not brought up to date");
                    }
                    // The next attempt would find the same copy in the cache, and not get its lock either.
                    Err(Interrupt::Failed(error)) => return Err(Interrupt::Failed(error)),
                    _ => {}
                }
            }
        }
        let (result, after) = result?;
        let page = |copy| SharedPage { copy, is_cached: false, above: Cell::new(None) };
        Ok((result, Pages::after(after.into_each().map(|copy| copy.map(page)))))
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.one_sided().install(new, f, swap, unlinked).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.one_sided().load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided().allocate(class, placement).await
    }
}
