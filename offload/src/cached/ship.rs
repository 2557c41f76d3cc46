//! Access for an operation that may be shipped: [`Cached`], but for misses.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    ops::Range,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
};

use farlink_cache::{CacheError, ExclusionGuard, is_swizzled};
use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    error::Error,
    operation::Code,
    page::SizeClass,
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr, Target},
    structure::{Layout, Overlap, Structure},
    worker::Handle,
};

use super::{Cached, CachedPage, CachedViews, Follow, Step};
use crate::{
    engine::Shared,
    store::{CacheLayout, RemoteStore, identity, page_id},
};

/// A page that is not cached, and where an operation is to go on.
pub(crate) struct Missing<T: Layout> {
    pub(crate) kept_out: ExclusionGuard<RemoteStore<T>, CacheLayout<T>>,
    pub(crate) at: RemotePtr,
    pub(crate) level: u8,
}

/// One operation's way to the cache.
pub(crate) struct Attempt<T: Layout> {
    engine: Rc<Shared<T>>,
    operation: Code,
    may_ship: Cell<bool>,
    missing: RefCell<Option<Missing<T>>>,
}

impl<T: Layout> Attempt<T> {
    pub(crate) fn new(engine: &Rc<Shared<T>>, operation: Code) -> Self {
        Self { engine: Rc::clone(engine), operation, may_ship: Cell::new(true), missing: RefCell::default() }
    }

    /// Where the operation is to be shipped to, if its attempt has ended with [`Interrupt::Ship`].
    pub(crate) fn take_missing(&self) -> Option<Missing<T>> {
        self.missing.take()
    }

    /// All pages are fetched from now on.
    pub(crate) fn ship_no_more(&self) {
        self.may_ship.set(false);
    }

    fn cached(&self) -> &Cached<T> {
        &self.engine.cached
    }

    /// Decides about a link that is not swizzled: ends the attempt if the operation is to be shipped.
    async fn decide(&self, from: &CachedPage<'_, T>, link: Link) -> Result<(), Interrupt> {
        let (engine, cached) = (&self.engine, self.cached());
        let Some(level) = from.level().checked_sub(1).filter(|&level| level <= engine.level_max) else {
            return Ok(());
        };
        let Target::Remote(at) = link.target() else { return Ok(()) };
        // It may cool, or be on its way.
        if T::WALKS_SIBLINGS || cached.cache.contains(page_id(at)) || !engine.may_serve(at.server()) {
            return Ok(());
        }
        let Some(region) = from.read(|words| {
            let position = cached.layout.links(words).find(|&index| {
                let word = words.get(index).map(|word| word.load(farlink_runtime::sync::Ordering::Relaxed));
                word == Some(link.word())
            });
            let is_inside = cached.cache.store().overlap(words) == Overlap::Inside;
            position.filter(|_| is_inside).and_then(|position| cached.layout.below(words, position))
        })?
        else {
            return Ok(());
        };
        if !engine.choose(self.operation, at.server(), level) {
            return Ok(());
        }
        let layout = cached.layout.clone();
        let is_below = move |words: &[farlink_runtime::sync::AtomicU64]| {
            identity(words).is_none_or(|page| page.level < level) && layout.overlap(words, &region) != Overlap::Outside
        };
        match cached.cache.exclude(&from.0, link.word(), cached.class, is_below).await {
            Ok(Some(kept_out)) => {
                self.missing.replace(Some(Missing { kept_out, at, level }));
                Err(Interrupt::Ship(at))
            }
            Ok(None) => {
                engine.count(|counts| counts.cached_below += 1);
                Ok(())
            }
            Err(CacheError::Conflict(_)) => Err(Interrupt::conflict()),
            // Following the link says what is wrong.
            Err(_) => Ok(()),
        }
    }
}

type Decision<'f> = Pin<Box<dyn Future<Output = Result<(), Interrupt>> + 'f>>;

/// Following a link, once it is decided that the page is to be had here. By hand, like [`Follow`].
struct Decide<'f, 'a, T: Layout> {
    attempt: &'a Attempt<T>,
    decision: Option<Decision<'f>>,
    is_decided: bool,
    follow: Follow<'f, 'a, T>,
}

impl<'a, T: Layout> Future for Decide<'_, 'a, T> {
    type Output = Result<CachedPage<'a, T>, Interrupt>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.is_decided {
            let (attempt, from, word) = (self.attempt, self.follow.from, self.follow.word);
            if !is_swizzled(word) && attempt.may_ship.get() {
                let decision =
                    self.decision.get_or_insert_with(|| Box::pin(attempt.decide(from, Link::from_word(word))));
                ready!(decision.as_mut().poll(cx))?;
            }
            self.is_decided = true;
        }
        Pin::new(&mut self.follow).poll(cx)
    }
}

impl<T: Layout> Access for Attempt<T> {
    type Page<'a> = CachedPage<'a, T>;
    type Views<'a> = CachedViews<'a>;

    fn worker(&self) -> &Handle {
        self.cached().worker()
    }

    fn structure(&self) -> &Structure {
        self.cached().structure()
    }

    #[inline]
    async fn enter(&self, start: Start) -> Result<CachedPage<'_, T>, Interrupt> {
        self.cached().enter(start).await
    }

    #[inline]
    fn follow<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
    ) -> impl Future<Output = Result<CachedPage<'a, T>, Interrupt>> {
        self.follow_for(from, link, self.cached().first_words())
    }

    #[inline]
    fn follow_for<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
        words: [Range<usize>; 3],
    ) -> impl Future<Output = Result<CachedPage<'a, T>, Interrupt>> {
        let follow = Follow { access: self.cached(), from, word: link.word(), words, step: Step::Prefetch };
        Decide { attempt: self, decision: None, is_decided: false, follow }
    }

    #[inline(always)]
    fn at_hand<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        link: Link,
        words: [Range<usize>; 3],
    ) -> Option<CachedPage<'a, T>> {
        self.cached().at_hand(from, link, words)
    }

    #[inline]
    fn notes(&self) -> Option<&Cell<[u64; 2]>> {
        self.cached().notes()
    }

    async fn sibling<'a>(&'a self, from: &CachedPage<'a, T>, link: Link) -> Result<CachedPage<'a, T>, Interrupt> {
        self.cached().sibling(from, link).await
    }

    /// From here on the operation has an effect here: what it tidies up behind it is fetched.
    fn restructures(&self) -> Result<(), Interrupt> {
        self.ship_no_more();
        self.cached().restructures()
    }

    #[inline]
    async fn expect<'a>(&'a self, page: &CachedPage<'a, T>, words: [Range<usize>; 2]) {
        self.cached().expect(page, words).await;
    }

    /// Fetches them all: an operation goes on at one page.
    async fn follow_many<'a>(
        &'a self,
        from: &CachedPage<'a, T>,
        links: &[Link],
    ) -> Vec<Result<CachedPage<'a, T>, Interrupt>> {
        self.cached().follow_many(from, links).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<CachedPage<'a, T>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut CachedViews<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.cached().change(pages, new, f).await
    }

    async fn alter<'a, R>(
        &'a self,
        page: CachedPage<'a, T>,
        f: impl FnOnce(&mut CachedViews<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.cached().alter(page, f).await
    }

    fn leads_to(&self, link: Link, page: &CachedPage<'_, T>) -> bool {
        self.cached().leads_to(link, page)
    }

    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.cached().load(word).await
    }

    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.cached().compare_swap(word, old, new).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.cached().allocate(class, placement).await
    }
}
