//! An access for tests that does everything to an operation that [`Access`] allows, and refuses what it forbids.
//!
//! [`Strict`] runs operations over another access. From a seed, and in every method, it
//!
//! - lets other tasks run;
//! - ends the attempt with a conflict, most of all after a change: code that lets an attempt end behind its effect shows;
//! - gives the function of a read words that belong together in no way, and then refuses the result;
//! - hands out old copies of pages above level 0, as a cache of inner pages may ([`Rules::old_copies`]);
//! - runs the rest of an operation, from an [`Access::descend`] on, as the memory server of the page would
//!   ([`Rules::ships`]): parameters and answer as words, nothing beside the page, changes of one page only.
//!
//! It panics, with the operation's name, if an operation that says that it only reads changes a page, if one holds more pages
//! than [`Rules::pages_max`], and, if it can look at the structure ([`Strict::looking`]), if an attempt ends behind an effect
//! that others can see.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    rc::Rc,
};

use farlink_runtime::{
    access::{
        Access, Cause, Context, FastPath, Forked, Hint, Interrupt, Link, NewPage, Operation, Overlap, PageRef, Pages,
        Placement, Plugin, Start, Swap, Way, WordPtr, Words,
    },
    change::Role,
    error::Error,
    operation::{Restarts, Run},
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass, has_words},
    wire::{Wire, decode_all},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// Attempts at a shipped operation, as a memory server makes them.
const SHIPPED_ATTEMPTS_MAX: u32 = 8;
/// Interrupts of one operation that are nobody's fault, at most.
const MISCHIEF_MAX: u32 = 3;

/// What [`Strict`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Decides all that is random.
    pub seed: u64,
    /// Pages above level 0 may be older than the attempt. For an access whose pages are private copies.
    pub old_copies: bool,
    /// The rest of an operation may be shipped. As in an owner's cache, nobody else changes the structure meanwhile.
    pub ships: bool,
    /// Attempts end with conflicts though there is none.
    pub conflicts: bool,
    /// Pages that an operation holds at a time, at most.
    pub pages_max: usize,
}

impl Rules {
    /// All that is possible where nobody else changes the structure.
    pub const fn alone(seed: u64) -> Self {
        Self { seed, old_copies: true, ships: true, conflicts: true, pages_max: usize::MAX }
    }
}

/// What a [`Strict`] has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Old copies handed out.
    pub old_copies: u64,
    /// Operations, and parts of operations, that were shipped and answered.
    pub shipped: u64,
    /// Those that came back undone.
    pub came_back: u64,
    /// Conflicts that were none.
    pub conflicts: u64,
    /// The most pages that an operation has held at a time.
    pub pages_held: usize,
}

type Digest = Pin<Box<dyn Future<Output = Result<u64, Error>>>>;
type Look = Box<dyn Fn() -> Digest>;

struct Shared<A> {
    inner: A,
    rules: Rules,
    rng: RefCell<SmallRng>,
    /// A copy of each page above level 0 that was read and may be handed out again, by its link.
    kept: RefCell<HashMap<u64, Vec<u64>>>,
    look: Option<Look>,
    counts: Cell<Counts>,
}

/// Runs operations over another access, as badly as they may be treated; see the [module](self).
pub struct Strict<A>(Rc<Shared<A>>);

impl<A> Clone for Strict<A> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<A> fmt::Debug for Strict<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Strict({:?}, {:?})", self.0.rules, self.0.counts.get())
    }
}

impl<A: Access + 'static> Strict<A> {
    /// Over this access.
    pub fn new(inner: A, rules: Rules) -> Self {
        let rng = RefCell::new(SmallRng::seed_from_u64(rules.seed));
        let (kept, counts) = (RefCell::default(), Cell::default());
        Self(Rc::new(Shared { inner, rules, rng, kept, look: None, counts }))
    }

    /// The same, for as long as nobody else changes the structure: it looks at all that can be seen of the structure, which
    /// `look` makes one number, before each operation that changes it, and when an attempt ends early.
    ///
    /// # Panics
    /// If operations run over it already.
    #[must_use]
    pub fn looking(mut self, look: impl Fn() -> Digest + 'static) -> Self {
        Rc::get_mut(&mut self.0).expect("nobody else uses it yet").look = Some(Box::new(look));
        self
    }

    /// The access below.
    pub fn inner(&self) -> &A {
        &self.0.inner
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        self.0.counts.get()
    }
}

impl<A: Access + 'static> Shared<A> {
    fn one_in(&self, many: u32) -> bool {
        self.rng.borrow_mut().random_ratio(1, many)
    }

    fn count(&self, count: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        count(&mut counts);
        self.counts.set(counts);
    }

    async fn looked_at(&self) -> Result<Option<u64>, Error> {
        match &self.look {
            Some(look) => Ok(Some(look().await?)),
            None => Ok(None),
        }
    }

    /// Panics if an attempt that has ended early has had an effect.
    async fn require_unseen(&self, before: Option<u64>, attempt: &Attempt<A>, why: &Interrupt) -> Result<(), Error> {
        if before.is_none() || attempt.changes.replace(0) == 0 || matches!(why, Interrupt::Failed(_)) {
            return Ok(());
        }
        let Attempt { operation, .. } = attempt;
        let after = self.looked_at().await?;
        assert!(
            before == after,
            "{operation}: an attempt has ended ({why}) behind an effect that others can see: what it did it does again"
        );
        Ok(())
    }

    /// Runs an operation as the memory server of a page would; `None` if it is to be done here.
    async fn ship<O: Operation<Plugin = A::Plugin>>(
        self: &Rc<Self>,
        operation: &O,
        missing: Missing,
        before: Option<u64>,
    ) -> Result<Option<O::Output>, Error> {
        let mut sent: O = sent(operation, O::NAME);
        sent.limit();
        let about = sent.scope();
        let server = Attempt { below: Some((missing, about)), ..Attempt::new(self, O::NAME, O::READS_ONLY) };
        for _ in 0..SHIPPED_ATTEMPTS_MAX {
            let interrupt = match sent.run(&server, Start::Page(missing.page)).await {
                Ok(output) => {
                    self.count(|counts| counts.shipped += 1);
                    return Ok(Some(self::sent(&output, O::NAME)));
                }
                Err(interrupt) => interrupt,
            };
            self.require_unseen(before, &server, &interrupt).await?;
            match interrupt {
                Interrupt::Failed(error) if !server.declined.get() => return Err(*error),
                Interrupt::Restart(Cause::Conflict) if !server.declined.get() => {}
                _ => break,
            }
        }
        self.count(|counts| counts.came_back += 1);
        Ok(None)
    }

    async fn run<O: Operation<Plugin = A::Plugin>>(self: &Rc<Self>, operation: &O) -> Result<O::Output, Error> {
        let worker = self.inner.context().worker.clone();
        let _pin = worker.pin();
        let before = if O::READS_ONLY { None } else { self.looked_at().await? };
        let attempt = Attempt::new(self, O::NAME, O::READS_ONLY);
        let mut from = match operation.try_sync(&attempt) {
            Ok(output) => return Ok(output),
            Err(from) => from,
        };
        let mut restarts = Restarts::from_root(self.inner.context().structure.root);
        loop {
            let interrupt = match operation.run(&attempt, from).await {
                Ok(output) => return Ok(output),
                Err(interrupt) => interrupt,
            };
            from = restarts.start_after(&interrupt);
            self.require_unseen(before, &attempt, &interrupt).await?;
            match (interrupt, attempt.missing.take()) {
                (Interrupt::Ship(_), Some(missing)) => {
                    if let Some(output) = self.ship(operation, missing, before).await? {
                        return Ok(output);
                    }
                    attempt.may_ship.set(false);
                }
                (interrupt, _) => restarts.back_off(&worker, interrupt).await?,
            }
        }
    }
}

/// What comes of a value that is sent.
fn sent<T: Wire>(value: &T, operation: &str) -> T {
    let mut words = Vec::new();
    value.encode(&mut words);
    decode_all(&words).unwrap_or_else(|error| panic!("{operation} does not survive being sent: {error}"))
}

impl<A: Access + 'static> Run for Strict<A> {
    type Plugin = A::Plugin;

    async fn execute<O: Operation<Plugin = A::Plugin>>(&self, operation: &O) -> Result<O::Output, Error> {
        self.0.run(operation).await
    }
}

/// A page where an operation is to go on elsewhere.
#[derive(Debug, Clone, Copy)]
struct Missing {
    page: Link,
    level: u8,
}

/// One operation's access.
struct Attempt<A: Access> {
    strict: Rc<Shared<A>>,
    operation: &'static str,
    reads_only: bool,
    /// Changes of this attempt.
    changes: Cell<u32>,
    mischief_left: Cell<u32>,
    held: Rc<Cell<usize>>,
    may_ship: Cell<bool>,
    missing: Cell<Option<Missing>>,
    /// As a memory server: where the operation begins, and what it is about.
    below: Option<(Missing, <A::Plugin as Plugin>::Region)>,
    declined: Cell<bool>,
}

/// A page of an [`Attempt`].
struct StrictPage<'a, A: Access + 'static> {
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

impl<A: Access + 'static> Attempt<A> {
    fn new(strict: &Rc<Shared<A>>, operation: &'static str, reads_only: bool) -> Self {
        let mischief = if strict.rules.conflicts { strict.rng.borrow_mut().random_range(0..=MISCHIEF_MAX) } else { 0 };
        Self {
            strict: Rc::clone(strict),
            operation,
            reads_only,
            changes: Cell::new(0),
            mischief_left: Cell::new(mischief),
            held: Rc::default(),
            may_ship: Cell::new(strict.rules.ships),
            missing: Cell::new(None),
            below: None,
            declined: Cell::new(false),
        }
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
        if self.below.is_some() && hint.way != Way::Down {
            return Err(self.decline());
        }
        let is_leaf = from.level() == 0 || from.level() == 1 && hint.way == Way::Down;
        let is_cached = from.is_cached && !is_leaf;
        if let Some(old) = is_cached.then(|| self.old(link)).flatten() {
            return Ok(old);
        }
        let page = match &from.inner {
            Some(inner) => self.inner().follow(inner, link, hint).await?,
            None => self.inner().open(Start::Page(link)).await?,
        };
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
            // Boxed: a part may fork again.
            let shipped: Pin<Box<dyn Future<Output = _>>> = Box::pin(self.strict.ship(part, missing, None));
            if let Some(output) = shipped.await? {
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
        let (result, after) = self.inner().change(below, f).await?;
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
        unlinked: Vec<Self::Page<'a>>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.require_changing("swaps a word");
        if self.below.is_some() {
            return Err(self.decline());
        }
        self.be_nasty().await?;
        let mut below = Vec::with_capacity(unlinked.len());
        for mut page in unlinked {
            below.push(match page.inner.take() {
                Some(inner) => inner,
                None => self.renewed(&page).await?,
            });
        }
        let installed = self.inner().install(new, f, swap, below).await?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "add does not survive being sent")]
    fn what_is_not_the_same_at_the_other_end_is_refused() {
        struct Lost;
        impl Wire for Lost {
            fn encode(&self, _to: &mut Vec<u64>) {}
            fn decode(from: &mut &[u64]) -> Result<Self, farlink_runtime::wire::DecodeError> {
                u64::decode(from).map(|_| Self)
            }
        }
        sent(&Lost, "add");
    }
}
