//! An access that takes one step at a time, and breaks a rule of the tree's protocol if it is told to.
//!
//! A *step* is what others can tell from the outside: of a search each page that it reads, of a change the change itself. Whoever
//! drives the operation lets it take a step and gets it back before the next one.

use std::{
    cell::{Cell, RefCell},
    future::{Future, poll_fn},
    pin::Pin,
    rc::Rc,
    task::{Poll, Waker},
};

use farlink_runtime::{
    access::{
        Access, Context, Direction, FastPath, Forked, Hint, Interrupt, Link, NewPage, Operation, PageRef, Pages,
        PagesMut, Placement, Start, Swap, Unlinked, WordPtr, Words,
    },
    error::Error,
    page::SizeClass,
};
use farlink_structures::rtree::Tree;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::faults::{Children, Fault, RIGHT, Recorded, STAMP, Steps};

/// Where an operation waits between its steps.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    may_pass: Cell<u32>,
    waiting: RefCell<Vec<Waker>>,
    /// Steps that are being taken.
    under_way: Cell<u32>,
    /// Of what kind the steps were.
    pub(crate) steps: Cell<Steps>,
}

impl Gate {
    async fn pass(&self) {
        poll_fn(|cx| match self.may_pass.get().checked_sub(1) {
            Some(left) => {
                self.may_pass.set(left);
                Poll::Ready(())
            }
            None => {
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            }
        })
        .await;
        self.under_way.set(self.under_way.get() + 1);
    }

    async fn step<T>(&self, step: impl Future<Output = T>) -> T {
        self.pass().await;
        let result = step.await;
        self.under_way.set(self.under_way.get() - 1);
        result
    }

    /// Lets one step be taken: the one that has waited longest.
    fn open(&self) {
        self.may_pass.set(1);
        self.waiting.borrow_mut().drain(..).for_each(Waker::wake);
    }

    /// Whether nothing goes on before another step is taken.
    fn is_at_rest(&self) -> bool {
        self.may_pass.get() == 0 && self.under_way.get() == 0 && !self.waiting.borrow().is_empty()
    }
}

/// An operation that is driven step by step.
pub(crate) struct Driven<'a, T> {
    gate: Rc<Gate>,
    operation: Pin<Box<dyn Future<Output = T> + 'a>>,
}

impl<'a, T> Driven<'a, T> {
    pub(crate) fn new(gate: &Rc<Gate>, operation: impl Future<Output = T> + 'a) -> Self {
        Self { gate: Rc::clone(gate), operation: Box::pin(operation) }
    }

    /// To where it waits for its next step; what it answers, if it has come to its end.
    pub(crate) async fn next_step(&mut self) -> Option<T> {
        poll_fn(|cx| match self.operation.as_mut().poll(cx) {
            Poll::Ready(answer) => Poll::Ready(Some(answer)),
            Poll::Pending if self.gate.is_at_rest() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Takes the step that it waits for.
    pub(crate) async fn step(&mut self) -> Option<T> {
        self.gate.open();
        self.next_step().await
    }

    pub(crate) async fn finish(mut self) -> T {
        loop {
            if let Some(answer) = self.step().await {
                return answer;
            }
        }
    }
}

/// What an operation's steps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepsAt {
    Nothing,
    Reads,
    Changes,
}

/// Step by step over another access; see the [module](self).
#[derive(Debug)]
pub(crate) struct Stepped<A> {
    inner: A,
    fault: Fault,
    steps_at: StepsAt,
    gate: Rc<Gate>,
    /// Says which parts are done elsewhere.
    ships: Option<RefCell<SmallRng>>,
}

impl<A> Stepped<A> {
    pub(crate) fn new(inner: A, fault: Fault, steps_at: StepsAt) -> (Self, Rc<Gate>) {
        let gate = Rc::new(Gate::default());
        (Self { inner, fault, steps_at, gate: Rc::clone(&gate), ships: None }, gate)
    }

    /// Half of what can be done elsewhere is done there: over the access below, from the page on where it is to begin, and as one step.
    pub(crate) fn shipping(self, seed: u64) -> Self {
        Self { ships: Some(RefCell::new(SmallRng::seed_from_u64(seed))), ..self }
    }
}

/// A copy of a page.
#[derive(Debug)]
pub(crate) struct Copied<P> {
    inner: P,
    words: Vec<u64>,
}

impl<P: PageRef> PageRef for Copied<P> {
    type Words = [u64];

    fn link(&self) -> Link {
        self.inner.link()
    }

    fn level(&self) -> u8 {
        self.inner.level()
    }

    fn kind(&self) -> u8 {
        self.inner.kind()
    }

    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        // Where it is no copy, it may be another one by now.
        self.inner.read(|_| ())?;
        Ok(f(&self.words))
    }
}

fn words_of(page: &(impl Words + ?Sized)) -> Vec<u64> {
    (0..page.count()).map(|index| page.word(index)).collect()
}

impl<A: Access<Plugin = Tree<D>> + 'static, const D: usize> Stepped<A> {
    async fn reads<T>(&self, read: impl Future<Output = T>) -> T {
        if self.steps_at == StepsAt::Reads { self.gate.step(read).await } else { read.await }
    }

    fn copied<'a>(&self, inner: A::Page<'a>) -> Result<Copied<A::Page<'a>>, Interrupt> {
        let words = inner.read(words_of)?;
        Ok(Copied { inner, words })
    }

    /// A change of pages as they were read, as a step.
    async fn change_once<'a, R>(
        &'a self,
        pages: Pages<A::Page<'a>>,
        f: impl FnOnce(&mut A::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<A::Page<'a>>), Interrupt> {
        let change = self.inner.change(pages, f);
        if self.steps_at == StepsAt::Changes { self.gate.step(change).await } else { change.await }
    }
}

impl<A: Access<Plugin = Tree<D>> + 'static, const D: usize> FastPath for Stepped<A> {
    type Plugin = Tree<D>;
    type Page<'a>
        = Copied<A::Page<'a>>
    where
        Self: 'a;
    const VALIDATES: bool = A::VALIDATES;
}

impl<A: Access<Plugin = Tree<D>> + 'static, const D: usize> Access for Stepped<A> {
    type PagesMut<'a>
        = Recorded
    where
        Self: 'a;

    fn context(&self) -> &Context<Tree<D>> {
        self.inner.context()
    }

    async fn open(&self, start: Start) -> Result<Copied<A::Page<'_>>, Interrupt> {
        if self.fault == Fault::IsBelow && matches!(start, Start::Anew) {
            let steps = self.gate.steps.get();
            self.gate.steps.set(Steps { anew: steps.anew + 1, ..steps });
            return Err(Interrupt::above());
        }
        let page = self.reads(self.inner.open(start)).await?;
        self.copied(page)
    }

    async fn follow<'a>(
        &'a self,
        from: &Copied<A::Page<'a>>,
        link: Link,
        hint: Hint,
    ) -> Result<Copied<A::Page<'a>>, Interrupt> {
        let page = self.reads(self.inner.follow(&from.inner, link, hint)).await?;
        let mut page = self.copied(page)?;
        if self.fault == Fault::DropsRightLinks && hint.direction == Direction::Down && page.words[RIGHT] != 0 {
            let above = Children::<D>::of(&from.words);
            page.words[STAMP] = above.position(link.word()).map_or(page.words[STAMP], |index| above.stamp(index));
        }
        Ok(page)
    }

    async fn fork_one<'a, O: Operation<Plugin = Tree<D>>>(
        &'a self,
        from: &Copied<A::Page<'a>>,
        link: Link,
        part: &O,
    ) -> Result<Forked<Copied<A::Page<'a>>, O::Output>, Interrupt> {
        if self.ships.as_ref().is_some_and(|rng| rng.borrow_mut().random()) {
            let at = match link.remote() {
                Some(_) => link,
                None => self.inner.follow(&from.inner, link, Hint::DOWN).await?.link(),
            };
            match self.reads(part.run(&self.inner, Start::Page(at))).await {
                Ok(output) => return Ok(Forked::Done(output)),
                Err(Interrupt::Restart(_)) => {}
                Err(interrupt) => return Err(interrupt),
            }
        }
        self.follow(from, link, Hint::DOWN).await.map(Forked::Page)
    }

    async fn validate<'a>(&'a self, pages: &[&Self::Page<'a>]) -> Result<(), Interrupt> {
        let pages: Vec<_> = pages.iter().map(|page| &page.inner).collect();
        self.inner.validate(&pages).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        let (old, new) = pages.into_parts();
        if self.fault == Fault::IsBelow && old.len() + new.len() > 1 {
            return Err(Interrupt::above());
        }
        let (mut below, mut slots, mut before) = (Pages::new(), Vec::new(), Vec::new());
        for (page, _) in old {
            before.push(page.words);
            slots.push(below.add(page.inner));
        }
        let mut recorded = Recorded::new(slots, before, new.len(), &self.context().structure);
        let result = f(&mut recorded);
        recorded.count(&self.gate.steps);
        recorded.keep_right_links(self.fault);
        let early = recorded.early::<D>(self.fault);
        if !early.is_empty() {
            let set = |pages: &mut A::PagesMut<'a>| {
                early.iter().for_each(|&(slot, index, word)| pages.set(slot, index, word));
            };
            let (_, after) = self.change_once(below, set).await?;
            below = Pages::new();
            for page in after.into_each() {
                below.add(page.ok_or(Interrupt::conflict())?);
            }
        }
        new.into_iter().for_each(|page| {
            below.add_new(page);
        });
        let (_, after) = self.change_once(below, |pages| recorded.carry_out(pages)).await?;
        let mut copies = Vec::new();
        for page in after.into_each() {
            copies.push(page.map(|page| self.copied(page)).transpose()?);
        }
        Ok((result, Pages::after(copies)))
    }

    async fn install<'a>(
        &'a self,
        _new: Vec<NewPage>,
        _f: impl FnOnce(&mut Self::PagesMut<'a>),
        _swap: Swap,
        _unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        Err(Error::Malformed("an R-tree installs nothing").into())
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.inner.load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.inner.allocate(class, placement).await
    }

    fn leads_to(&self, link: Link, page: &Self::Page<'_>) -> bool {
        self.inner.leads_to(link, &page.inner)
    }
}
