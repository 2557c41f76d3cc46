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

use std::{cell::Cell, sync::atomic::Ordering};

use farlink_cache::{CacheHandle, Counters};
use farlink_runtime::{
    access::{Access, Cause, Interrupt, PageRef, Start},
    error::Error,
    one_sided::{OneSided, OneSidedViews, PageCopy},
    page::SizeClass,
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr, Target},
    structure::{Layout, Structure},
    worker::Handle,
};

use crate::store::{CacheLayout, RemoteStore, page_id, to_cache};

/// One-sided access that caches inner pages; see [`ComputeCache::share`](crate::ComputeCache::share).
#[derive(Debug)]
pub struct CachedInner<T: Layout> {
    cache: CacheHandle<RemoteStore<T>, CacheLayout<T>>,
}

impl<T: Layout> Clone for CachedInner<T> {
    fn clone(&self) -> Self {
        Self { cache: self.cache.clone() }
    }
}

/// A private copy of a page.
#[derive(Debug)]
pub struct SharedPage {
    copy: PageCopy,
    /// Whether it may be older than the operation.
    is_cached: bool,
    /// The cached page above that led here.
    above: Cell<Option<RemotePtr>>,
}

impl PageRef for SharedPage {
    type Words = [u64];

    fn at(&self) -> RemotePtr {
        self.copy.at()
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

impl<T: Layout> CachedInner<T> {
    pub(crate) fn new(cache: CacheHandle<RemoteStore<T>, CacheLayout<T>>) -> Self {
        Self { cache }
    }

    fn one_sided(&self) -> &OneSided {
        self.cache.store().one_sided()
    }

    fn class(&self) -> SizeClass {
        self.structure().class
    }

    /// What this access's cache did so far.
    pub fn counters(&self) -> Counters {
        self.cache.counters()
    }

    /// A page as it is now.
    async fn current(&self, at: RemotePtr, above: Option<RemotePtr>) -> Result<SharedPage, Interrupt> {
        let copy = self.one_sided().read_page(at, self.class()).await?;
        Ok(SharedPage { copy, is_cached: false, above: Cell::new(above) })
    }

    /// A page as it is now; the cached one, if there is one, becomes the same.
    async fn renewed(&self, at: RemotePtr) -> Result<SharedPage, Interrupt> {
        match self.current(at, None).await {
            Ok(page) => {
                self.renew(at, Some(&page)).await?;
                Ok(page)
            }
            Err(gone @ Interrupt::Restart(Cause::Stale { .. })) => {
                self.renew(at, None).await?;
                Err(gone)
            }
            Err(error) => Err(error),
        }
    }

    /// Brings a cached page up to date, or drops it.
    async fn renew(&self, at: RemotePtr, current: Option<&SharedPage>) -> Result<(), Interrupt> {
        let (id, class) = (page_id(at), to_cache(self.class()));
        if !self.cache.contains(id) {
            return Ok(());
        }
        let Some(current) = current.filter(|page| page.level() > 0) else {
            self.cache.invalidate(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
            return Ok(());
        };
        let cached = self.cache.load(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
        // If it has left the cache meanwhile, it is read anew when it is next needed.
        let _ = current.read(|words| self.cache.refresh(&cached, words))?;
        Ok(())
    }

    /// An inner page as the cache has it.
    async fn cached(&self, at: RemotePtr) -> Result<SharedPage, Interrupt> {
        let (id, class) = (page_id(at), to_cache(self.class()));
        let page = self.cache.load(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
        let mut words = self.worker().buffer(self.class().words())?;
        let copied = page.read(|shared| {
            for (copy, word) in words.iter_mut().zip(shared) {
                *copy = word.load(Ordering::Relaxed);
            }
        });
        copied.map_err(|_| Interrupt::conflict())?;
        let level = page.level();
        drop(page);
        if level == 0 {
            // A root that is a leaf: leaves are not cached.
            self.cache.invalidate(id, class).await.map_err(|error| self.cache.store().interrupt(error))?;
            return self.current(at, None).await;
        }
        let copy = self.one_sided().copy_of(at, self.class(), words)?;
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

fn target(link: Link) -> Result<RemotePtr, Interrupt> {
    match link.target() {
        Target::Remote(page) => Ok(page),
        _ => Err(Error::BadPointer { word: link.word(), why: "it leads to no page".into() }.into()),
    }
}

impl<T: Layout> Access for CachedInner<T> {
    type Page<'a> = SharedPage;
    type Views<'a> = OneSidedViews;

    fn worker(&self) -> &Handle {
        self.one_sided().worker()
    }

    fn structure(&self) -> &Structure {
        self.one_sided().structure()
    }

    async fn enter(&self, start: Start) -> Result<SharedPage, Interrupt> {
        match start {
            Start::Root | Start::Stopped(_) => self.cached(self.structure().root).await,
            Start::Anew => self.renewed(self.structure().root).await,
            Start::Page(page) => self.current(page, None).await,
        }
    }

    async fn follow(&self, from: &SharedPage, link: Link) -> Result<SharedPage, Interrupt> {
        let at = target(link)?;
        let page = match from.level() {
            0 | 1 => self.current(at, None).await?,
            _ if from.is_cached => self.cached(at).await?,
            _ => self.renewed(at).await?,
        };
        page.above.set(from.is_cached.then(|| from.at()));
        Ok(page)
    }

    async fn sibling(&self, from: &SharedPage, link: Link) -> Result<SharedPage, Interrupt> {
        let at = target(link)?;
        let page = match from.level() {
            0 => self.current(at, None).await?,
            _ if from.is_cached => self.cached(at).await?,
            _ => self.renewed(at).await?,
        };
        if !T::WALKS_SIBLINGS {
            self.renew_above(from).await?;
        }
        Ok(page)
    }

    async fn follow_many(&self, from: &SharedPage, links: &[Link]) -> Vec<Result<SharedPage, Interrupt>> {
        if from.level() > 1 {
            let mut pages = Vec::with_capacity(links.len());
            for &link in links {
                pages.push(self.follow(from, link).await);
            }
            return pages;
        }
        let above = from.is_cached.then(|| from.at());
        let copies = self.one_sided().read_links(links).await;
        let page = |copy| SharedPage { copy, is_cached: false, above: Cell::new(above) };
        copies.into_iter().map(|copy| copy.map(page)).collect()
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        let inner: Vec<RemotePtr> = pages.iter().filter(|page| page.level() > 0).map(PageRef::at).collect();
        let root = self.structure().root;
        let grows = pages.iter().any(|page| page.at() == root);
        let copies = pages.into_iter().map(|page| page.copy).collect();
        let result = self.one_sided().change(copies, new, f).await;
        if matches!(result, Err(Interrupt::Failed(_))) {
            return result;
        }
        // Changed by us, or changed by others so that our copies were old: either way the cache is behind.
        for at in inner.into_iter().chain(grows.then_some(root)) {
            match self.renewed(at).await {
                // The change is done, whatever became of the page.
                Err(Interrupt::Failed(error)) if result.is_ok() => {
                    tracing::debug!(page = %at, %error, "a cached page was not brought up to date");
                }
                // The next attempt would find the same copy in the cache, and not get its lock either.
                Err(Interrupt::Failed(error)) => return Err(Interrupt::Failed(error)),
                _ => {}
            }
        }
        result
    }

    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.one_sided().load(word).await
    }

    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.one_sided().compare_swap(word, old, new).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided().allocate(class, placement).await
    }
}
