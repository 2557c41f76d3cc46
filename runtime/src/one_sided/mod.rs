//! Access without a cache: READ, validate, compare-and-swap to lock.
//!
//! With round-robin placement this is the fine-grained design of Ziegler et al. (SIGMOD 2019, section 4), made correct:
//! their reader trusts a READ of a whole node, which is not atomic; ours proves every copy whole ([`Proof`]).
//!
//! A page that was read is a private copy, true of the moment it was read. A change locks its pages by compare-and-swap
//! from the lock words of those copies, so a lock that is had proves the copies current, and the changed words follow from
//! them without another READ; see [`change`](self) for the order of the writes.
//!
//! A reader that finds a page locked, or a copy that is not whole, reads again until it has one that is, or a reason to
//! stop: see [`proof`](self).

mod change;
#[cfg(all(test, not(loom)))]
mod deaths;
mod here;
mod locked;
#[cfg(loom)]
pub mod model;
pub mod ownership;
mod pages;
mod proof;
mod protocol;

use std::{future::Future, pin::Pin};

use self::{
    change::{PreparedChange, are_unchanged},
    ownership::{Acting, SharedUser},
    pages::Changed,
    proof::{RawRead, Reader},
};
pub use self::{
    locked::{After, LockedPages},
    pages::OneSidedPages,
};
use crate::{
    access::{
        Access, Context, Entering, FastPath, Hint, Interrupt, PageRef, Pages, Plugin, Right, Start, Swap, Unlinked,
        WordPtr,
    },
    buffer::Buffer,
    chunk_classes,
    error::Error,
    fabric::memory::LocalMemory,
    lock::{LockState, LockWord},
    operation::persist,
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, SELF, SizeClass},
    pages::{NewPage, allocate},
    ptr::{Link, RemotePtr, Target},
    structure::Placement,
    structure::Structure,
    worker::Handle,
};

/// How a reader proves that its copy of a page is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Proof {
    /// One READ; the checksum in the header binds the body to the version in the lock word. One round trip.
    #[default]
    Checksum,
    /// READ the lock word, then the body, then the lock word again, and compare. Three round trips; the reference
    /// (Ziegler et al., SIGMOD 2023). Against an owner, who writes its pages back without a lock, it proves nothing: so the checksum
    /// has to fit as well.
    LockBodyLock,
}

/// One-sided access to a structure.
#[derive(Debug, Clone)]
pub struct OneSided<P: Plugin> {
    context: Context<P>,
    proof: Proof,
    /// What is read and changed without the fabric.
    memory: Option<LocalMemory>,
    /// None for whoever has the right to use it in another way.
    user: Option<SharedUser>,
    /// Whether reading asks for no right.
    beside_owners: bool,
}

/// A private copy of a page, proven whole.
#[derive(Debug)]
pub struct PageCopy(Buffer);

impl PageCopy {
    fn words(&self) -> &[u64] {
        &self.0
    }

    /// The page's words, header included.
    pub fn into_words(self) -> Buffer {
        self.0
    }

    fn lock(&self) -> LockWord {
        LockWord::from_word(self.0[LOCK])
    }

    fn identity(&self) -> Identity {
        Identity::from_word(self.0[IDENTITY]).expect("a copy is accepted with its identity checked")
    }
}

impl PageRef for PageCopy {
    type Words = [u64];

    fn link(&self) -> Link {
        let at = RemotePtr::from_raw(self.0[SELF]).expect("a copy is accepted with its self-address checked");
        Link::to(at, self.identity().class)
    }

    fn level(&self) -> u8 {
        self.identity().level
    }

    fn kind(&self) -> u8 {
        self.identity().kind
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        Ok(f(&self.0))
    }
}

impl<P: Plugin> OneSided<P> {
    /// Access to `structure` through `worker`. With the first operation the compute server is entered into the structure's partition map
    /// ([`ownership`]), before anything is read: beside an owner that is refused, and nobody can own the structure while it stands there.
    /// [`beside_owners`](Self::beside_owners) is for those who would rather have old data.
    ///
    /// # Panics
    /// If the structure is one of another plug-in.
    pub fn new(worker: &Handle, structure: Structure, proof: Proof) -> Self {
        let Structure { name, kind, .. } = &structure;
        assert!(kind == P::NAME, "{name:?} is a structure of {kind}, and was taken for one of {}", P::NAME);
        Self::to_any(worker, structure, proof)
    }

    /// The same for pages that structures of all kinds have.
    pub(crate) fn to_any(worker: &Handle, structure: Structure, proof: Proof) -> Self {
        Self {
            context: Context::new(worker, structure),
            proof,
            memory: None,
            user: Some(SharedUser::default()),
            beside_owners: false,
        }
    }

    /// The same for whoever has the right to change the structure from elsewhere: the pages that it will change are its own, or
    /// nobody else knows them yet.
    pub fn unguarded(self) -> Self {
        Self { user: None, ..self }
    }

    /// The same; operations that only read ask nobody, nor keep anybody from owning the structure. Beside an owner they answer what that one
    /// has written back, which may be old, and not of one moment.
    pub fn beside_owners(self) -> Self {
        Self { beside_owners: true, ..self }
    }

    /// The same, where changes need a place in the partition map again.
    pub(crate) fn guarded(self) -> Self {
        Self { user: Some(SharedUser::default()), ..self }
    }

    /// Access for a thread of a memory server: pages that stand in `memory` are read there, and changed there if the fabric's
    /// atomics are atomic against the processor's; all others as ever.
    pub fn within(worker: &Handle, structure: Structure, memory: LocalMemory) -> Self {
        Self { memory: Some(memory), ..Self::new(worker, structure, Proof::Checksum).unguarded() }
    }

    fn worker(&self) -> &Handle {
        &self.context.worker
    }

    /// Who has to have the right to do this, if anybody.
    #[inline]
    fn user_for(&self, reads_only: bool) -> Option<&SharedUser> {
        self.user.as_ref().filter(|_| !(reads_only && self.beside_owners))
    }

    /// Whether the structure may be changed, as far as is known here.
    fn may_change(&self) -> bool {
        self.right(false).is_some()
    }

    /// Sees to it that the structure may be changed, until what is returned is dropped.
    #[inline]
    async fn require_right(&self) -> Result<Option<Acting>, Interrupt> {
        let Some(user) = &self.user else { return Ok(None) };
        match user.try_act() {
            None => {
                let Context { worker, structure, .. } = &self.context;
                Ok(Box::pin(user.act(worker, structure)).await?)
            }
            acting => Ok(acting),
        }
    }

    /// What a change is once its pages are computed. Apart from that, so that it is compiled once and not for each closure.
    async fn carry_out(
        &self,
        staged: PreparedChange,
        ended: impl FnOnce(bool) + 'static,
    ) -> Result<Vec<Option<PageCopy>>, Interrupt> {
        let may_change = self.may_change();
        let acting = self.require_right().await?;
        if staged.is_idle() {
            // A single copy was true of one moment anyway, if no owner had what is newer.
            let all: Vec<&Changed> = staged.all().collect();
            if (all.len() > 1 || !may_change) && !are_unchanged(self.worker(), all.into_iter()).await? {
                return Err(Interrupt::conflict());
            }
            return Ok(staged.into_pages());
        }
        let by_hand = self.worker().capabilities().atomic_against_cpu;
        if let Some(memory) = self.memory.as_ref().filter(|memory| by_hand && staged.is_in(memory)) {
            // Dropped, it has had no effect: it suspends only in front of that.
            let after = here::carry_out(self.worker(), memory, staged).await;
            ended(may_have_effect(&after));
            return after;
        }
        // Pages whose lock words it may still write are not reused, whatever becomes of the caller.
        let pin = self.worker().pin();
        let change = change::carry_out(self.worker().clone(), staged);
        let whole = async move {
            let after = change.await;
            drop((pin, acting));
            ended(may_have_effect(&after));
            after
        };
        let after = self.worker().spawn_to_end(whole).await;
        self.note(may_have_effect(&after));
        after
    }

    fn note(&self, has_changed: bool) {
        if let Some(user) = self.user.as_ref().filter(|_| has_changed) {
            user.has_changed();
        }
    }

    /// [`Access::change`] of which somebody is told when nothing is under way any more, even if what is returned was dropped before:
    /// whether it may have changed something. It is dropped without being told if nothing was.
    ///
    /// # Errors
    /// As there.
    pub async fn change_and_tell<R>(
        &self,
        pages: Pages<PageCopy>,
        f: impl FnOnce(&mut OneSidedPages) -> R,
        ended: impl FnOnce(bool) + 'static,
    ) -> Result<(R, Pages<PageCopy>), Interrupt> {
        let (old, new) = pages.into_parts();
        new.iter().for_each(|page| chunk_classes::note(self.worker(), page));
        let mut pages = OneSidedPages::open(self.worker(), self.context.structure.id, old, new)?;
        let result = f(&mut pages);
        Ok((result, Pages::after(self.carry_out(PreparedChange::of(pages), ended).await?)))
    }

    /// [`Access::install`], of which somebody is told like of a [change](Self::change_and_tell).
    ///
    /// # Errors
    /// As there.
    pub async fn install_and_tell(
        &self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut OneSidedPages),
        swap: Swap,
        unlinked: Vec<Unlinked>,
        ended: impl FnOnce(bool) + 'static,
    ) -> Result<Result<(), u64>, Interrupt> {
        let at = self.require_word(swap.word)?;
        // A damaged record of the structure may have named them.
        for page in &unlinked {
            chunk_classes::require(self.worker(), page.at, page.class).await?;
        }
        let acting = self.require_right().await?;
        new.iter().for_each(|page| chunk_classes::note(self.worker(), page));
        let mut pages = OneSidedPages::open(self.worker(), self.context.structure.id, [], new)?;
        f(&mut pages);
        let mut staged = PreparedChange::of(pages);
        staged.seal();
        let pin = self.worker().pin();
        let (again, found_by) = (self.clone(), swap.found_by.unwrap_or_default());
        // Boxed: it is rare, and it installs, too.
        let reachable = move || -> Pin<Box<dyn Future<Output = Result<_, Box<Error>>>>> {
            // Nothing is under way any more, and what this installs asks for the right anew.
            drop(acting);
            Box::pin(async move { persist(again.worker(), async || P::reachable(&again, found_by).await).await })
        };
        let (worker, is_kept, swap) = (self.worker().clone(), swap.found_by.is_none(), (at, swap.old, swap.to));
        let install = change::install((worker, pin), staged, swap, is_kept, unlinked, reachable);
        let whole = async move {
            let installed = install.await;
            ended(is_installed(&installed));
            installed
        };
        let installed = self.worker().spawn_to_end(whole).await;
        self.note(is_installed(&installed));
        installed
    }

    /// Reads the page that a link leads to.
    ///
    /// # Errors
    /// As [`Access::follow`].
    pub async fn read_page(&self, link: Link) -> Result<PageCopy, Interrupt> {
        let (at, class) = self.require_page(link)?;
        let reader = self.reader();
        if self.proof == Proof::LockBodyLock || self.memory.is_some() {
            let seen = reader.fetch(at, class).await?;
            return reader.prove(at, class, seen).await.map(PageCopy);
        }
        self.worker().count_round_trip();
        let seen = RawRead::in_one_read(self.worker().read(at, class.words()).await?);
        match seen.is_whole() {
            true => reader.accept(at, class, seen).map(PageCopy),
            // Rare: boxed, so that the future of the common case stays small.
            false => Box::pin(reader.prove(at, class, seen)).await.map(PageCopy),
        }
    }

    /// Takes `words` for a copy of the page that a link leads to: a whole one, read at some earlier time.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if it is not a page of this structure.
    pub fn copy_of(&self, link: Link, words: Buffer) -> Result<PageCopy, Interrupt> {
        let (at, class) = self.require_page(link)?;
        let reader = self.reader();
        match LockWord::from_word(words[LOCK]).state() {
            LockState::Unlocked if words.len() == class.words() => {
                reader.accept(at, class, RawRead::known(words)).map(PageCopy)
            }
            _ => Err(reader.stale(at, "it is no copy of a page in use")),
        }
    }

    /// Locks pages as they were read, all or none: for an owner whose change of pages that others share is computed under their
    /// locks. `None` if one of them has changed. If the returned future is dropped, none stays locked; nor for long, if it is not polled
    /// while the worker takes turns: then it is `None`, too.
    ///
    /// Directly before the first lock goes out, `enter` is told the words of the pages. It refuses, or gives a guard that is kept until no
    /// lock of these can land any more.
    ///
    /// # Errors
    /// If the fabric fails, or `enter` refuses.
    pub async fn lock<G: 'static>(
        &self,
        pages: Vec<PageCopy>,
        enter: impl FnOnce(&mut dyn Iterator<Item = &[u64]>) -> Result<G, Interrupt> + 'static,
    ) -> Result<Option<LockedPages<G>>, Interrupt> {
        let worker = self.worker();
        let offered = worker.spawn_to_end(locked::lock(worker.clone(), pages, enter)).await?;
        Ok(offered.and_then(locked::Offer::fetch))
    }

    /// That pages are as they were read: one READ of each lock word, in one round trip. Which of them are.
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn are_current(&self, pages: impl IntoIterator<Item = &PageCopy>) -> Result<Vec<bool>, Error> {
        let worker = self.worker();
        let posted: Vec<_> = pages.into_iter().map(|page| (page.lock(), worker.read(page.at(), 1))).collect();
        if !posted.is_empty() {
            worker.count_round_trip();
        }
        let mut current = Vec::with_capacity(posted.len());
        for (lock, posted) in posted {
            current.push(posted.await.map_err(|error| *error)?[0] == lock.word());
        }
        Ok(current)
    }

    fn reader(&self) -> Reader<'_, Handle> {
        let Self { context: Context { worker, structure, .. }, proof, memory, .. } = self;
        Reader { remote: worker, structure: structure.id, proof: *proof, memory: memory.as_ref() }
    }

    fn require_page(&self, link: Link) -> Result<(RemotePtr, SizeClass), Interrupt> {
        let bad = |why: String| Err(Error::BadPointer { word: link.word(), why }.into());
        let (at, class) = match link.target() {
            Target::Remote(at, class) => (at, class),
            Target::Null => return bad("the link is null".into()),
            Target::Local(_) => return bad("a swizzled link reached remote memory".into()),
            Target::Malformed => return bad("no page has such a link".into()),
        };
        match self.worker().compute().geometry.get(at.server().index()) {
            Some(geometry) if geometry.holds_page(at, class) => Ok((at, class)),
            Some(_) => bad(format!("no page of {class:?} can stand there")),
            None => bad(format!("there is no memory server {}", at.server())),
        }
    }

    /// The address of a word, if a page can be there.
    fn require_word(&self, word: WordPtr) -> Result<RemotePtr, Interrupt> {
        let (at, class) = self.require_page(word.page)?;
        match word.index < class.words() && word.index >= HEADER_WORDS {
            true => Ok(at.word(word.index)),
            false => {
                let why = format!("a page of {class:?} has no word {} for a structure", word.index);
                Err(Error::BadPointer { word: word.page.word(), why }.into())
            }
        }
    }
}

/// Whether it has done something, or has failed in the middle.
fn may_have_effect<T>(outcome: &Result<T, Interrupt>) -> bool {
    !matches!(outcome, Err(Interrupt::Restart(_)))
}

fn is_installed(outcome: &Result<Result<(), u64>, Interrupt>) -> bool {
    !matches!(outcome, Ok(Err(_))) && may_have_effect(outcome)
}

fn nobody(_may_have_effect: bool) {}

impl<P: Plugin> FastPath for OneSided<P> {
    type Plugin = P;
    type Page<'a> = PageCopy;
    const VALIDATES: bool = false;

    #[inline]
    fn right(&self, reads_only: bool) -> Option<Right> {
        match self.user_for(reads_only) {
            Some(user) => user.right(&self.context.structure),
            None => Some(Right::LASTING),
        }
    }

    #[inline]
    fn stands(&self, right: Right, reads_only: bool) -> bool {
        self.user_for(reads_only).is_none_or(|user| user.stands(&self.context.structure, right, reads_only))
    }

    fn enter(&self) -> Entering<'_> {
        let Context { worker, structure, .. } = &self.context;
        Box::pin(async move {
            match &self.user {
                Some(user) => user.enter(worker, structure).await,
                None => Ok(()),
            }
        })
    }
}

impl<P: Plugin> Access for OneSided<P> {
    type PagesMut<'a> = OneSidedPages;

    fn context(&self) -> &Context<P> {
        &self.context
    }

    async fn open(&self, start: Start) -> Result<PageCopy, Interrupt> {
        let link = match start {
            Start::Root | Start::Anew | Start::Resume(_) => self.context.structure.root_link(),
            Start::Page(page) => page,
        };
        self.read_page(link).await
    }

    async fn follow(&self, _from: &PageCopy, link: Link, _hint: Hint) -> Result<PageCopy, Interrupt> {
        self.read_page(link).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        self.change_and_tell(pages, f, nobody).await
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.install_and_tell(new, f, swap, unlinked, nobody).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        let at: Vec<RemotePtr> = words.iter().map(|&word| self.require_word(word)).collect::<Result<_, _>>()?;
        let posted: Vec<_> = at.into_iter().map(|at| self.worker().read(at, 1)).collect();
        if !posted.is_empty() {
            self.worker().count_round_trip();
        }
        let mut loaded = Vec::with_capacity(posted.len());
        for posted in posted {
            loaded.push(posted.await?[0]);
        }
        Ok(loaded)
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        allocate(self.worker(), class, placement).await
    }
}
