//! What one operation under test goes through.

use std::{cell::Cell, future::Future, pin::Pin, rc::Rc};

use farlink_runtime::{
    access::{
        Access, Context, Direction, FastPath, Forked, Hint, Interrupt, Link, NewPage, Operation, Overlap, PageRef,
        Pages, PagesMut, Placement, Plugin, Slot, Start, Swap, Unlinked, WordPtr, Words,
    },
    change::Role,
    error::Error,
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass, has_words},
};
use rand::RngExt;

use super::Shared;

/// Interrupts of one operation that are nobody's fault, at most.
const MISCHIEF_MAX: u32 = 3;

/// A page where an operation is to go on elsewhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct Missing {
    pub(super) page: Link,
    level: u8,
}

/// One operation's access.
pub(super) struct Attempt<A: Access> {
    strict: Rc<Shared<A>>,
    pub(super) operation: &'static str,
    reads_only: bool,
    /// Changes of this attempt.
    pub(super) changes: Cell<u32>,
    /// As a memory server: whether a change has written something.
    pub(super) has_written: Cell<bool>,
    mischief_left: Cell<u32>,
    held: Rc<Cell<usize>>,
    pub(super) may_ship: Cell<bool>,
    pub(super) missing: Cell<Option<Missing>>,
    /// As a memory server: where the operation begins, and what it is about.
    below: Option<(Missing, <A::Plugin as Plugin>::Region)>,
    pub(super) declined: Cell<bool>,
    /// Parts that were shipped, and those of them that have come back.
    parts: Cell<[u64; 2]>,
}

/// A page of an [`Attempt`].
pub(super) struct StrictPage<'a, A: Access + 'static> {
    strict: &'a Shared<A>,
    link: Link,
    /// None of an old copy.
    inner: Option<A::Page<'a>>,
    /// What it held when it was read.
    image: Vec<u64>,
    /// It may be old, and pages that it leads to, too.
    is_cached: bool,
    conflicts: bool,
    held: Rc<Cell<usize>>,
}

impl<A: Access> Drop for StrictPage<'_, A> {
    fn drop(&mut self) {
        self.held.set(self.held.get() - 1);
    }
}

impl<A: Access> PageRef for StrictPage<'_, A> {
    type Words = [u64];

    fn link(&self) -> Link {
        self.link
    }

    fn level(&self) -> u8 {
        self.inner.as_ref().map_or_else(|| identity(&self.image).map_or(0, |it| it.level), PageRef::level)
    }

    fn kind(&self) -> u8 {
        self.inner.as_ref().map_or_else(|| identity(&self.image).map_or(0, |it| it.kind), PageRef::kind)
    }

    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        if self.conflicts && self.strict.one_in(50) {
            let mut torn = self.image.clone();
            let mut rng = self.strict.rng.borrow_mut();
            for _ in 0..4 {
                let from = rng.random_range(0..torn.len());
                let word = [rng.random(), u64::MAX, rng.random_range(0..100), torn[from]][rng.random_range(0..4)];
                let to = rng.random_range(HEADER_WORDS..torn.len());
                torn[to] = word;
            }
            drop(rng);
            f(&torn);
            self.strict.count(|counts| counts.conflicts += 1);
            return Err(Interrupt::conflict());
        }
        match &self.inner {
            Some(inner) => Ok(f(&copy(inner)?)),
            None => Ok(f(&self.image)),
        }
    }
}

fn identity(image: &[u64]) -> Option<Identity> {
    Identity::from_word(*image.get(IDENTITY)?)
}

fn copy(page: &impl PageRef) -> Result<Vec<u64>, Interrupt> {
    page.read(|words| (0..words.count()).map(|index| words.word(index)).collect())
}

/// What the only page of a change holds now.
fn image(pages: &impl PagesMut) -> Vec<u64> {
    let page = pages.page(Slot::ONLY);
    (0..page.count()).map(|index| page.word(index)).collect()
}

impl<A: Access + 'static> Attempt<A> {
    pub(super) fn new(strict: &Rc<Shared<A>>, operation: &'static str, reads_only: bool) -> Self {
        let mischief = if strict.rules.conflicts { strict.rng.borrow_mut().random_range(0..=MISCHIEF_MAX) } else { 0 };
        Self {
            strict: Rc::clone(strict),
            operation,
            reads_only,
            changes: Cell::new(0),
            has_written: Cell::new(false),
            mischief_left: Cell::new(mischief),
            held: Rc::default(),
            may_ship: Cell::new(strict.rules.ships),
            missing: Cell::new(None),
            below: None,
            declined: Cell::new(false),
            parts: Cell::default(),
        }
    }

    /// As a memory server: from this page on, for this region.
    pub(super) fn below(self, page: Missing, about: <A::Plugin as Plugin>::Region) -> Self {
        Self { below: Some((page, about)), ..self }
    }

    fn inner(&self) -> &A {
        &self.strict.inner
    }

    /// Lets others run; and interrupts the attempt, as if others had been first.
    async fn be_nasty(&self) -> Result<(), Interrupt> {
        if self.strict.one_in(4) {
            self.context().worker.yield_now().await;
        }
        let left = self.mischief_left.get();
        if left > 0 && self.strict.one_in(if self.changes.get() > 0 { 2 } else { 16 }) {
            self.mischief_left.set(left - 1);
            self.strict.count(|counts| counts.conflicts += 1);
            return Err(Interrupt::conflict());
        }
        Ok(())
    }

    fn require_changing(&self, what: &str) {
        assert!(!self.reads_only, "{}: says that it only reads, and {what}", self.operation);
    }

    /// As a memory server: the operation is to be done elsewhere.
    fn decline(&self) -> Interrupt {
        self.declined.set(true);
        Interrupt::conflict()
    }

    fn hold<'a>(
        &'a self,
        link: Link,
        inner: Option<A::Page<'a>>,
        image: Vec<u64>,
        is_cached: bool,
    ) -> StrictPage<'a, A> {
        let held = self.held.get() + 1;
        self.held.set(held);
        self.strict.count(|counts| counts.pages_held = counts.pages_held.max(held));
        let max = self.strict.rules.pages_max;
        assert!(held <= max, "{}: holds {held} pages at a time, of {max} at most", self.operation);
        let conflicts = self.mischief_left.get() > 0;
        StrictPage { strict: &self.strict, link, inner, image, is_cached, conflicts, held: Rc::clone(&self.held) }
    }

    /// A page as it is. If it `is_cached`, later ones may be handed out that are as old.
    fn current<'a>(&'a self, page: A::Page<'a>, is_cached: bool) -> Result<StrictPage<'a, A>, Interrupt> {
        let (link, image) = (page.link(), copy(&page)?);
        if self.strict.rules.old_copies && page.level() > 0 && !has_words(&image) {
            self.strict.kept.borrow_mut().insert(link.word(), image.clone());
        }
        Ok(self.hold(link, Some(page), image, is_cached))
    }

    /// An old copy of the page that a link leads to, if there is one and luck has it.
    fn old(&self, link: Link) -> Option<StrictPage<'_, A>> {
        if !self.strict.rules.old_copies || self.below.is_some() || self.strict.one_in(4) {
            return None;
        }
        let image = self.strict.kept.borrow().get(&link.word()).cloned()?;
        self.strict.count(|counts| counts.old_copies += 1);
        Some(self.hold(link, None, image, true))
    }

    fn forget(&self, link: Link) {
        self.strict.kept.borrow_mut().remove(&link.word());
    }

    /// The page below, of an old copy.
    async fn renewed<'a>(&'a self, page: &StrictPage<'_, A>) -> Result<A::Page<'a>, Interrupt> {
        self.forget(page.link);
        self.inner().open(Start::Page(page.link)).await
    }

    /// Whether the rest of an operation can be shipped to where a link of a page leads.
    fn missing(&self, from: &StrictPage<'_, A>, link: Link) -> Result<Option<Missing>, Interrupt> {
        let may = self.may_ship.get() && self.below.is_none() && from.inner.is_some() && link.remote().is_some();
        let Some(level) = from.level().checked_sub(1).filter(|_| may) else { return Ok(None) };
        let is_told = from.inner.as_ref().map(copy).transpose()?.is_some_and(|words| {
            let position = <A::Plugin as Plugin>::links(&*words).find(|&at| words.get(at) == Some(&link.word()));
            position.is_some_and(|position| <A::Plugin as Plugin>::below(&*words, position).is_some())
        });
        Ok(is_told.then_some(Missing { page: link, level }).filter(|_| self.strict.one_in(2)))
    }

    async fn go<'a>(
        &'a self,
        from: &StrictPage<'a, A>,
        link: Link,
        hint: Hint,
    ) -> Result<StrictPage<'a, A>, Interrupt> {
        if self.below.is_some() && (hint.direction != Direction::Down || from.level() == 0) {
            return Err(self.decline());
        }
        let is_leaf = from.level() == 0 || from.level() == 1 && hint.direction == Direction::Down;
        let is_cached = from.is_cached && !is_leaf;
        if let Some(old) = is_cached.then(|| self.old(link)).flatten() {
            return Ok(old);
        }
        let page = match &from.inner {
            Some(inner) => self.inner().follow(inner, link, hint).await?,
            None => self.inner().open(Start::Page(link)).await?,
        };
        if self.below.is_some() && page.level() >= from.level() {
            return Err(self.decline());
        }
        self.current(page, is_cached)
    }
}

impl<A: Access + 'static> FastPath for Attempt<A> {
    type Plugin = A::Plugin;
    type Page<'a> = StrictPage<'a, A>;

    fn try_open(&self) -> Option<StrictPage<'_, A>> {
        if self.strict.one_in(2) {
            return None;
        }
        self.current(self.inner().try_open()?, true).ok()
    }

    fn try_follow<'a>(&'a self, from: &StrictPage<'a, A>, link: Link, hint: Hint) -> Option<StrictPage<'a, A>> {
        if self.strict.one_in(4) {
            return None;
        }
        self.current(self.inner().try_follow(from.inner.as_ref()?, link, hint)?, from.is_cached).ok()
    }

    fn resume_at(&self, page: &StrictPage<'_, A>) -> Start {
        page.inner.as_ref().map_or(Start::Root, |inner| self.inner().resume_at(inner))
    }
}

impl<A: Access + 'static> Access for Attempt<A> {
    type PagesMut<'a> = A::PagesMut<'a>;

    fn context(&self) -> &Context<A::Plugin> {
        self.inner().context()
    }

    async fn open(&self, start: Start) -> Result<StrictPage<'_, A>, Interrupt> {
        self.be_nasty().await?;
        if let Some((missing, about)) = &self.below {
            if start != Start::Page(missing.page) {
                return Err(self.decline());
            }
            let page = self.current(self.inner().open(start).await?, false)?;
            let is_about = page.inner.as_ref().map(copy).transpose()?;
            let is_about =
                is_about.is_some_and(|words| <A::Plugin as Plugin>::overlap(&*words, about) != Overlap::Outside);
            return if page.level() == missing.level && is_about { Ok(page) } else { Err(self.decline()) };
        }
        let is_root = matches!(start, Start::Root);
        if let Some(old) = is_root.then(|| self.old(self.context().structure.root_link())).flatten() {
            return Ok(old);
        }
        let is_cached = matches!(start, Start::Root | Start::Resume(_));
        self.current(self.inner().open(start).await?, is_cached)
    }

    async fn follow<'a>(
        &'a self,
        from: &StrictPage<'a, A>,
        link: Link,
        hint: Hint,
    ) -> Result<StrictPage<'a, A>, Interrupt> {
        self.be_nasty().await?;
        self.go(from, link, hint).await
    }

    async fn descend<'a>(
        &'a self,
        from: &StrictPage<'a, A>,
        link: Link,
        hint: Hint,
    ) -> Result<StrictPage<'a, A>, Interrupt> {
        self.be_nasty().await?;
        if let Some(missing) = self.missing(from, link)? {
            self.missing.set(Some(missing));
            return Err(Interrupt::Ship(link));
        }
        self.go(from, link, hint).await
    }

    async fn fork_one<'a, O: Operation<Plugin = A::Plugin>>(
        &'a self,
        from: &StrictPage<'a, A>,
        link: Link,
        part: &O,
    ) -> Result<Forked<StrictPage<'a, A>, O::Output>, Interrupt> {
        self.be_nasty().await?;
        if let Some(missing) = self.missing(from, link)? {
            let [begun, over] = self.parts.get();
            self.parts.set([begun + 1, over]);
            let before = if O::READS_ONLY { None } else { self.strict.looked_at().await? };
            // What others can see may be of another part that runs beside it.
            let before = || before.filter(|_| begun == over && self.parts.get() == [begun + 1, over]);
            // Boxed: a part may fork again.
            let shipped: Pin<Box<dyn Future<Output = _>>> = Box::pin(self.strict.ship(part, missing, &before));
            let shipped = shipped.await;
            let [begun, over] = self.parts.get();
            self.parts.set([begun, over + 1]);
            if let Some(output) = shipped? {
                return Ok(Forked::Done(output));
            }
        }
        self.go(from, link, Hint::DOWN).await.map(Forked::Page)
    }

    async fn validate<'a>(&'a self, pages: &[&StrictPage<'a, A>]) -> Result<(), Interrupt> {
        self.be_nasty().await?;
        let inner: Vec<_> = pages.iter().filter_map(|page| page.inner.as_ref()).collect();
        self.inner().validate(&inner).await?;
        let mut outcome = Ok(());
        for page in pages.iter().filter(|page| page.inner.is_none()) {
            let is_same = match self.renewed(page).await {
                Ok(now) => copy(&now)?.get(LOCK) == page.image.get(LOCK),
                Err(Interrupt::Restart(_)) => false,
                Err(error) => return Err(error),
            };
            if !is_same {
                outcome = Err(Interrupt::stale(page.at(), "the copy of it that was handed out was old"));
            }
        }
        outcome
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<StrictPage<'a, A>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<StrictPage<'a, A>>), Interrupt> {
        self.require_changing("changes pages");
        if self.below.is_some() && (pages.iter().count() > 1 || pages.new_count() > 0) {
            return Err(self.decline());
        }
        self.be_nasty().await?;
        let (old, new) = pages.into_parts();
        let mut below = Pages::new();
        for (mut page, role) in old {
            let inner = match page.inner.take() {
                Some(inner) => inner,
                None => match self.renewed(&page).await {
                    Ok(now) if role == Role::Current || copy(&now)?.get(LOCK) == page.image.get(LOCK) => now,
                    Ok(_) | Err(Interrupt::Restart(_)) => return Err(Interrupt::conflict()),
                    Err(error) => return Err(error),
                },
            };
            below.add_as(inner, role);
        }
        new.into_iter().for_each(|page| {
            below.add_new(page);
        });
        let is_below = self.below.is_some();
        let watched = |pages: &mut Self::PagesMut<'a>| {
            let before = is_below.then(|| image(pages));
            let result = f(pages);
            (result, before.is_some_and(|before| before != image(pages)))
        };
        let ((result, writes), after) = self.inner().change(below, watched).await?;
        self.has_written.set(self.has_written.get() || writes);
        self.changes.set(self.changes.get() + 1);
        let mut held = Vec::new();
        for page in after.into_each() {
            // What can be read no more was taken by others since.
            held.push(page.and_then(|page| self.seen(page)));
        }
        Ok((result, Pages::after(held)))
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.require_changing("swaps a word");
        if self.below.is_some() {
            return Err(self.decline());
        }
        self.be_nasty().await?;
        let installed = self.inner().install(new, f, swap, unlinked).await?;
        self.changes.set(self.changes.get() + u32::from(installed.is_ok()));
        Ok(installed)
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.be_nasty().await?;
        self.inner().load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.require_changing("allocates a page");
        if self.below.is_some() {
            self.decline();
            return Err(Error::Malformed("an operation below a page allocates"));
        }
        self.inner().allocate(class, placement).await
    }

    fn leads_to(&self, link: Link, page: &StrictPage<'_, A>) -> bool {
        page.inner.as_ref().map_or(link == page.link, |inner| self.inner().leads_to(link, inner))
    }
}

impl<A: Access + 'static> Attempt<A> {
    /// A page behind a change. Copies that were kept stay as they were.
    fn seen<'a>(&'a self, page: A::Page<'a>) -> Option<StrictPage<'a, A>> {
        let (link, image) = (page.link(), copy(&page).ok()?);
        Some(self.hold(link, Some(page), image, false))
    }
}
