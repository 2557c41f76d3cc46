//! Access inside a memory server, for operations that were sent there.
//!
//! Pages of this server are local memory: a thread copies a page word by word and proves the copy by its checksum, as every
//! reader does, because others may write at the same time. Changes are made with the processor's instructions if the fabric's
//! atomics are atomic against those; otherwise they go through the fabric, to this very server, like everybody's
//! ([`OneSided::within`]).
//!
//! How far an operation may go is its [`Scope`].

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use farlink_runtime::{
    access::{
        Access, Context, Direction, FastPath, Hint, InPlace, Interrupt, Link, NewPage, PageRef, Pages, Placement,
        Plugin, Start, Swap, Unlinked, WordPtr,
    },
    error::Error,
    fencing::Sender,
    lock::{LockState, LockWord},
    one_sided::{OneSided, OneSidedPages, PageCopy},
    page::{IDENTITY, Identity, LOCK, SELF, SizeClass},
    ptr::ServerId,
    server::LocalMemory,
    structure::Overlap,
    sync::{AtomicU64, Ordering},
};

/// How far an operation on a memory server may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope<R> {
    /// From the root on, and wherever it has to: the compute servers leave the structure to the memory server. New pages are where
    /// the structure has them; one that is not on this server is reached through the fabric. The compute server has sent it, if it may change something.
    Whole(Option<Sender>),
    /// From the root down to the pages above level 0, as far as they are here, and without a change: it is to be found from
    /// which page on the operation is for the compute server.
    Above,
    /// From one page downwards, and no farther: the compute server that owns the page caches what is around it. Only single
    /// pages are changed.
    Below(Below<R>),
}

/// The page where a compute server had to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Below<R> {
    pub(crate) page: Link,
    pub(crate) level: u8,
    /// The compute server.
    pub(crate) sender: Sender,
    /// What it owns.
    pub(crate) owned: R,
}

/// Why an operation is the compute server's after all. It has had no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decline {
    /// It changes the structure: more than one page, or which pages there are.
    Restructures,
    /// The page where it was to begin is not, or not any more, what it was sent as: live, of that level, one where the operation
    /// can begin, and inside what the sender owns.
    NotThere,
    /// It goes beyond the pages below the one where it began, or onto another server.
    Leaves,
    /// Others changed the same pages again and again.
    Busy,
    /// The sender was [fenced off](farlink_runtime::fencing) here: nothing that would change something is carried out for it.
    FencedOff,
}

impl Decline {
    pub(crate) const ALL: [Self; 5] = [Self::Restructures, Self::NotThere, Self::Leaves, Self::Busy, Self::FencedOff];
}

/// What an operation's changes do, whether or not it waits for them.
#[derive(Debug, Default)]
struct Effects {
    under_way: Cell<u32>,
    changed: RefCell<Vec<Link>>,
    /// Whether anything may be changed: these, or by what has no list.
    any: Cell<bool>,
}

/// A change that counts as under way until it is dropped.
struct Effect {
    effects: Rc<Effects>,
    pages: Vec<Link>,
}

impl Effect {
    fn begin(effects: &Rc<Effects>, pages: Vec<Link>) -> Self {
        effects.under_way.update(|count| count + 1);
        Self { effects: Rc::clone(effects), pages }
    }

    /// Whoever carries it out says when it is over, and whether it may have changed something.
    fn end(mut self, may_have_changed: bool) {
        if may_have_changed {
            self.effects.any.set(true);
            self.effects.changed.borrow_mut().append(&mut self.pages);
        }
    }
}

impl Drop for Effect {
    fn drop(&mut self) {
        self.effects.under_way.update(|count| count - 1);
    }
}

/// Access to a structure inside a memory server, for one operation.
#[derive(Debug)]
pub(crate) struct OnServer<P: Plugin> {
    one_sided: Rc<OneSided<P>>,
    here: ServerId,
    memory: LocalMemory,
    scope: Scope<P::Region>,
    /// What the operation is about.
    about: P::Region,
    declined: Cell<Option<Decline>>,
    /// The page below which all that is left of a search lies.
    reached: Cell<Link>,
    has_stopped: Cell<bool>,
    effects: Rc<Effects>,
    /// Below the page where it began, the first page of each level.
    path: RefCell<Vec<Link>>,
    /// Below it, how many others.
    beside: Cell<u16>,
    reads: Cell<u32>,
}

impl<P: Plugin> OnServer<P> {
    pub(crate) fn new(
        one_sided: Rc<OneSided<P>>,
        memory: LocalMemory,
        scope: Scope<P::Region>,
        about: P::Region,
    ) -> Self {
        let reached = Cell::new(one_sided.context().structure.root_link());
        Self {
            one_sided,
            here: memory.server(),
            memory,
            scope,
            about,
            declined: Cell::new(None),
            reached,
            has_stopped: Cell::new(false),
            effects: Rc::default(),
            path: RefCell::default(),
            beside: Cell::new(0),
            reads: Cell::new(0),
        }
    }

    /// The memory server's own.
    pub(crate) fn memory(&self) -> &LocalMemory {
        &self.memory
    }

    pub(crate) fn scope(&self) -> &Scope<P::Region> {
        &self.scope
    }

    /// Why it cannot be done here, if that has shown.
    pub(crate) fn declined(&self) -> Option<Decline> {
        self.declined.get()
    }

    /// From which page on a search is for the compute server, if that has shown.
    pub(crate) fn stopped(&self) -> Option<Link> {
        self.has_stopped.get().then(|| self.reached.get())
    }

    /// Pages that it has read.
    pub(crate) fn reads(&self) -> u32 {
        self.reads.get()
    }

    /// Whether it may have changed what others see.
    pub(crate) fn may_have_changed(&self) -> bool {
        self.effects.any.get()
    }

    /// Waits until no change is under way that the operation has begun, and not waited for.
    pub(crate) async fn end_changes(&self) {
        while self.effects.under_way.get() > 0 {
            self.context().worker.yield_now().await;
        }
    }

    /// Pages that it has changed; and below the page where it began, the first that it has read of each level, and how many others.
    pub(crate) fn into_changed_and_read(self) -> (Vec<Link>, Vec<Link>, u16) {
        (self.effects.changed.take(), self.path.into_inner(), self.beside.get())
    }

    /// The compute server is to do it; what is returned ends the attempt, and nobody takes it for a page that was changed.
    fn decline(&self, why: Decline) -> Interrupt {
        match self.scope {
            Scope::Above => self.has_stopped.set(true),
            Scope::Whole(_) | Scope::Below(_) => self.declined.set(Some(why)),
        }
        Interrupt::above()
    }

    fn is_whole(&self) -> bool {
        matches!(self.scope, Scope::Whole(_))
    }

    /// Whether the operation may look at what is there.
    fn require_in_scope(&self, page: Link) -> Result<(), Interrupt> {
        let is_here = || page.remote().is_none_or(|(at, _)| at.server() == self.here);
        match self.is_whole() || is_here() {
            true => Ok(()),
            false => Err(self.decline(Decline::Leaves)),
        }
    }

    async fn read(&self, page: Link) -> Result<PageCopy, Interrupt> {
        self.require_in_scope(page)?;
        self.reads.set(self.reads.get().saturating_add(1));
        let page = self.one_sided.read_page(page).await?;
        // Those are the compute server's.
        if matches!(self.scope, Scope::Above) && page.level() == 0 {
            return Err(self.decline(Decline::Leaves));
        }
        Ok(page)
    }

    /// The page where an operation was to begin, if it is one where it may.
    async fn begin(&self, below: &Below<P::Region>) -> Result<PageCopy, Interrupt> {
        let page = match self.read(below.page).await {
            Err(Interrupt::Restart(_)) => return Err(self.decline(Decline::NotThere)),
            read => read?,
        };
        let fits = page.level() == below.level
            && page.read(|words| {
                P::overlap(words, &below.owned) == Overlap::Inside && P::overlap(words, &self.about) != Overlap::Outside
            })?;
        if fits { Ok(page) } else { Err(self.decline(Decline::NotThere)) }
    }
}

impl<P: Plugin> InPlace for OnServer<P> {
    fn in_place(&self, link: Link) -> Result<Option<&[AtomicU64]>, Interrupt> {
        let Some((at, class)) = link.remote() else {
            return Err(Error::BadPointer { word: link.word(), why: "it is no page".into() }.into());
        };
        if at.server() != self.here {
            return Ok(None);
        }
        let Some(words) = self.memory.words(at, class.words()) else {
            return Err(Error::BadPointer { word: link.word(), why: "it lies outside the region".into() }.into());
        };
        self.reads.set(self.reads.get().saturating_add(1));
        // Acquire: what the page held when it was published, and since.
        let lock = LockWord::from_word(words[LOCK].load(Ordering::Acquire));
        let identity = Identity::from_word(words[IDENTITY].load(Ordering::Relaxed));
        let is_ours = |it: &Identity| it.structure == self.context().structure.id && it.class == class;
        let is_here = words[SELF].load(Ordering::Relaxed) == at.raw();
        match lock.state() {
            LockState::Unlocked if is_here && identity.as_ref().is_some_and(is_ours) => Ok(Some(words)),
            _ => Err(Interrupt::stale(at, "it is no page of the structure, or not any more")),
        }
    }
}

impl<P: Plugin> FastPath for OnServer<P> {
    type Plugin = P;
    type Page<'a> = PageCopy;
    const VALIDATES: bool = false;
}

impl<P: Plugin> Access for OnServer<P> {
    type PagesMut<'a> = OneSidedPages;

    fn context(&self) -> &Context<P> {
        self.one_sided.context()
    }

    async fn open(&self, start: Start) -> Result<PageCopy, Interrupt> {
        match (start, &self.scope) {
            (Start::Page(page), Scope::Below(below)) if page == below.page => {
                self.path.borrow_mut().clear();
                self.beside.set(0);
                self.begin(below).await
            }
            (_, Scope::Below(_)) => Err(self.decline(Decline::Leaves)),
            (Start::Page(page), Scope::Whole(_)) => self.read(page).await,
            (Start::Page(_), Scope::Above) => Err(self.decline(Decline::Leaves)),
            (Start::Root | Start::Anew | Start::Resume(_), Scope::Whole(_) | Scope::Above) => {
                self.reached.set(self.context().structure.root_link());
                self.read(self.context().structure.root_link()).await
            }
        }
    }

    async fn follow(&self, from: &PageCopy, link: Link, hint: Hint) -> Result<PageCopy, Interrupt> {
        match (&self.scope, hint.direction) {
            // What is beside the page where it began may be newer in the sender's cache. Below level 0 nothing is.
            (Scope::Below(_), direction) if direction != Direction::Down || from.level() == 0 => {
                Err(self.decline(Decline::Leaves))
            }
            (Scope::Above, Direction::Down) if from.level() <= 1 => Err(self.decline(Decline::Leaves)),
            (Scope::Below(below), _) => {
                let page = self.read(link).await?;
                // It is beside, whatever the hint says.
                if page.level() >= from.level() {
                    return Err(self.decline(Decline::Leaves));
                }
                let mut path = self.path.borrow_mut();
                if usize::from(page.level()) + path.len() + 1 == usize::from(below.level) {
                    path.push(link);
                } else {
                    self.beside.set(self.beside.get().saturating_add(1));
                }
                Ok(page)
            }
            _ => self.read(link).await,
        }
    }

    async fn descend(&self, from: &PageCopy, link: Link, hint: Hint) -> Result<PageCopy, Interrupt> {
        if link.remote().is_some() {
            self.reached.set(link);
        }
        self.follow(from, link, hint).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        let links: Vec<Link> = pages.iter().map(PageRef::link).collect();
        match self.scope {
            Scope::Whole(_) => {}
            Scope::Below(_) if links.len() <= 1 && pages.new_count() == 0 => {}
            Scope::Above | Scope::Below(_) => return Err(self.decline(Decline::Restructures)),
        }
        let effect = Effect::begin(&self.effects, links);
        self.one_sided.change_and_tell(pages, f, |may_have_changed| effect.end(may_have_changed)).await
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        if !self.is_whole() {
            return Err(self.decline(Decline::Restructures));
        }
        let effect = Effect::begin(&self.effects, Vec::new());
        let ended = |may_have_changed| effect.end(may_have_changed);
        self.one_sided.install_and_tell(new, f, swap, unlinked, ended).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        words.iter().try_for_each(|word| self.require_in_scope(word.page))?;
        self.one_sided.load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        if !self.is_whole() {
            self.decline(Decline::Restructures);
            return Err(Error::Malformed("an operation below a page allocates"));
        }
        self.one_sided.allocate(class, placement).await
    }
}
