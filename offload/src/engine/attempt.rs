//! Access for an operation that may be shipped: [`Cached`], but for misses.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    pin::Pin,
    rc::Rc,
    task::{self, Poll, ready},
};

use farlink_cache::{CacheError, is_swizzled};
use farlink_runtime::{
    access::{
        Access, Context, Direction, FastPath, Forked, Hint, Interrupt, Link, NewPage, Operation, PageRef, Pages,
        Placement, Plugin, Start, Swap, Unlinked, WordPtr,
    },
    error::Error,
    operation::Code,
    page::SizeClass,
    structure::Overlap,
};
use futures_util::future::join_all;

use super::Shared;
use crate::{
    cached::{Cached, CachedPage, CachedPages, Excluded, Follow},
    policies::Unshipped,
    store::identity,
};

/// A page that is not cached, and where an operation is to go on.
pub(crate) struct Missing<P: Plugin> {
    pub(crate) excluded: Excluded<P>,
    pub(crate) page: Link,
    pub(crate) level: u8,
}

/// One operation's way to the cache.
pub(crate) struct Attempt<P: Plugin> {
    engine: Rc<Shared<P>>,
    operation: Code,
    may_ship: Cell<bool>,
    /// The first miss at which its policy had the page fetched.
    unshipped: Cell<Option<Unshipped>>,
    missing: RefCell<Option<Missing<P>>>,
    /// Pages from which parts were shipped that came back.
    came_back: RefCell<Vec<Link>>,
}

impl<P: Plugin> Attempt<P> {
    pub(crate) fn new(engine: &Rc<Shared<P>>, operation: Code) -> Self {
        Self {
            engine: Rc::clone(engine),
            operation,
            may_ship: Cell::new(true),
            unshipped: Cell::default(),
            missing: RefCell::default(),
            came_back: RefCell::default(),
        }
    }

    /// The first miss at which the operation could have been shipped, and was not, as its policy chose.
    pub(crate) fn unshipped(&self) -> Option<Unshipped> {
        self.unshipped.get()
    }

    /// Where the operation is to be shipped to, if its attempt has ended with [`Interrupt::Ship`].
    pub(crate) fn take_missing(&self) -> Option<Missing<P>> {
        self.missing.take()
    }

    /// All pages are fetched from now on.
    pub(crate) fn ship_no_more(&self) {
        self.may_ship.set(false);
    }

    /// Notes whether the operation goes beyond what is below its first miss, where a shipped one would have come back.
    #[cold]
    fn note_way(&self, miss: Unshipped, from: u8, hint: Hint) {
        let is_beside = from == 0 || from == miss.level && hint.direction != Direction::Down;
        let is_beyond = from > miss.level || is_beside;
        if is_beyond && miss.left_ns.is_none() {
            let left_ns = Some(self.cached().worker().clock().now_ns());
            self.unshipped.set(Some(Unshipped { left_ns, ..miss }));
        }
    }

    fn cached(&self) -> &Cached<P> {
        &self.engine.cached
    }

    /// Decides about a link that is not swizzled: the page, if what is to be done below it is to be shipped.
    async fn decide(
        &self,
        operation: Code,
        from: &CachedPage<'_, P>,
        link: Link,
    ) -> Result<Option<Missing<P>>, Interrupt> {
        let (engine, cached) = (&self.engine, self.cached());
        let Some(level) = from.level().checked_sub(1).filter(|&level| level <= engine.level_max) else {
            return Ok(None);
        };
        let Some((at, class)) = link.remote() else { return Ok(None) };
        // It may cool, or be on its way.
        let has_come_back = || self.came_back.borrow().contains(&link);
        if cached.contains(link) || !engine.chooser.may_serve(at.server()) || has_come_back() {
            return Ok(None);
        }
        let Some(region) = from.read(|words| {
            let position = P::links(words).find(|&index| {
                let word = words.get(index).map(|word| word.load(farlink_runtime::sync::Ordering::Relaxed));
                word == Some(link.word())
            });
            let is_inside = cached.overlap(words) == Overlap::Inside;
            position.filter(|_| is_inside).and_then(|position| P::below(words, position))
        })?
        else {
            return Ok(None);
        };
        if !engine.chooser.choose(operation, at.server(), level, &|| cached.is_hot(link, level)) {
            if operation == self.operation && self.unshipped.get().is_none() {
                let began_ns = cached.worker().clock().now_ns();
                self.unshipped.set(Some(Unshipped { server: at.server(), level, began_ns, left_ns: None }));
            }
            return Ok(None);
        }
        let is_below = move |words: &[farlink_runtime::sync::AtomicU64]| {
            identity(words).is_none_or(|page| page.level < level) && P::overlap(words, &region) != Overlap::Outside
        };
        match cached.exclude(from, link, class, is_below).await {
            Ok(Some(excluded)) => Ok(Some(Missing { excluded, page: link, level })),
            Ok(None) => {
                engine.chooser.count(|counts| counts.cached_below += 1);
                Ok(None)
            }
            Err(CacheError::Conflict(_)) => Err(Interrupt::conflict()),
            // Following the link says what is wrong.
            Err(_) => Ok(None),
        }
    }

    /// [`Attempt::decide`] for all that is left of the operation: ends the attempt if that is to be shipped.
    async fn decide_rest(&self, from: &CachedPage<'_, P>, link: Link) -> Result<(), Interrupt> {
        match self.decide(self.operation, from, link).await? {
            Some(missing) => {
                self.missing.replace(Some(missing));
                Err(Interrupt::Ship(link))
            }
            None => Ok(()),
        }
    }
}

type Decision<'f> = Pin<Box<dyn Future<Output = Result<(), Interrupt>> + 'f>>;

/// Following a link, once it is decided that the page is to be had here. By hand, like [`Follow`].
struct Decide<'f, 'a, P: Plugin> {
    attempt: &'a Attempt<P>,
    decision: Option<Decision<'f>>,
    is_decided: bool,
    follow: Follow<'f, 'a, P>,
}

impl<'a, P: Plugin> Future for Decide<'_, 'a, P> {
    type Output = Result<CachedPage<'a, P>, Interrupt>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut task::Context<'_>) -> Poll<Self::Output> {
        if !self.is_decided {
            let (attempt, from, word) = (self.attempt, self.follow.from, self.follow.word);
            if !is_swizzled(word) && attempt.may_ship.get() {
                let decision =
                    self.decision.get_or_insert_with(|| Box::pin(attempt.decide_rest(from, Link::from_word(word))));
                ready!(decision.as_mut().poll(cx))?;
            }
            self.is_decided = true;
        }
        Pin::new(&mut self.follow).poll(cx)
    }
}

impl<P: Plugin> FastPath for Attempt<P> {
    type Plugin = P;
    type Page<'a> = CachedPage<'a, P>;
    const PREFETCHES: bool = true;
    const VALIDATES: bool = false;

    async fn run_holding<O: Operation<Plugin = P>>(
        &self,
        operation: &O,
        from: Start,
    ) -> Option<Result<O::Output, Interrupt>> {
        self.cached().run_holding(operation, from).await
    }

    #[inline(always)]
    fn try_follow<'a>(&'a self, from: &CachedPage<'a, P>, link: Link, hint: Hint) -> Option<CachedPage<'a, P>> {
        self.cached().try_follow(from, link, hint)
    }

    #[inline]
    async fn prefetch<'a>(&'a self, page: &CachedPage<'a, P>, words: [(u16, u16); 2]) {
        self.cached().prefetch(page, words).await;
    }
}

impl<P: Plugin> Access for Attempt<P> {
    type PagesMut<'a> = CachedPages<'a>;

    #[inline(always)]
    fn context(&self) -> &Context<P> {
        self.cached().context()
    }

    #[inline]
    async fn open(&self, start: Start) -> Result<CachedPage<'_, P>, Interrupt> {
        self.cached().open(start).await
    }

    #[inline(always)]
    fn follow<'a>(
        &'a self,
        from: &CachedPage<'a, P>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<CachedPage<'a, P>, Interrupt>> {
        if let Some(miss) = self.unshipped.get() {
            self.note_way(miss, from.level(), hint);
        }
        self.cached().follow(from, link, hint)
    }

    #[inline(always)]
    fn descend<'a>(
        &'a self,
        from: &CachedPage<'a, P>,
        link: Link,
        hint: Hint,
    ) -> impl Future<Output = Result<CachedPage<'a, P>, Interrupt>> {
        let follow = self.cached().following(from, link, hint);
        Decide { attempt: self, decision: None, is_decided: false, follow }
    }

    async fn fork_one<'a, O: Operation<Plugin = P>>(
        &'a self,
        from: &CachedPage<'a, P>,
        link: Link,
        part: &O,
    ) -> Result<Forked<CachedPage<'a, P>, O::Output>, Interrupt> {
        if !is_swizzled(link.word())
            && self.may_ship.get()
            && let Some(missing) = self.decide(Code::of::<O>(), from, link).await?
        {
            if let Some(output) = Shared::ship(&self.engine, part, missing).await? {
                return Ok(Forked::Done(output));
            }
            // The next attempt of the operation would ship it in vain again.
            self.came_back.borrow_mut().push(link);
        }
        self.cached().follow(from, link, Hint::DOWN).await.map(Forked::Page)
    }

    // All at once: a shipped part takes no window of reads.
    async fn fork<'a, O: Operation<Plugin = P>>(
        &'a self,
        from: &Rc<CachedPage<'a, P>>,
        links: &[Link],
        part: &O,
    ) -> Vec<Result<Forked<CachedPage<'a, P>, O::Output>, Interrupt>> {
        join_all(links.iter().map(|&link| self.fork_one(from, link, part))).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        self.cached().change(pages, f).await
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.cached().install(new, f, swap, unlinked).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.cached().load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.cached().allocate(class, placement).await
    }

    fn leads_to(&self, link: Link, page: &CachedPage<'_, P>) -> bool {
        self.cached().leads_to(link, page)
    }
}
