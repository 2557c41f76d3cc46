//! How a structure's code reaches pages, whatever lies between it and them: all that an author of a structure must know.
//!
//! A structure is a [`Plugin`]: what the framework must know of its pages. Its [`Operation`]s are values that can be sent.
//! They are written once, generic over [`Access`]; the implementation decides whether pages are read one-sided, come from a
//! cache, or are local memory of a memory server. The duties of a structure's code:
//!
//! - It uses what it read from a page only after [`PageRef::read`] has returned it: then it was true of one moment.
//! - It follows a link and then checks that the page is what the link promised (level, fences, bounding box) before it
//!   goes on; if not, it moves right or returns [`Interrupt::stale`]. Where an old page above does not show, because what
//!   it leads to fits all the same (bounding boxes, filters), it calls [`Access::validate`] before it answers.
//! - It never panics on what a page holds: counts are clamped, sums wrap, links are checked by [`Access::follow`].
//! - All of one change goes through one [`Access::change`]: the pages it alters, those it adds, those it frees.
//! - It returns [`Interrupt::Restart`] only before its first visible effect.

mod plugin;
mod under_way;

use std::{any::Any, future::Future, pin::Pin, rc::Rc, sync::Arc};

use futures_util::stream::StreamExt;

pub use self::{
    plugin::{InPieces, InPlace, Merge, Operation, Operations, Plugin, RegionOf, Shards, free, route_to_all},
    under_way::{Each, UnderWay},
};
pub use crate::{
    change::{Pages, PagesMut, Slot},
    interrupt::{Cause, Interrupt},
    pages::{NewPage, Unlinked},
    ptr::{Link, RemotePtr},
    structure::{Overlap, Placement, Region, Structure},
    words::Words,
};
use crate::{error::Error, page::SizeClass, worker::Handle};
pub use farlink_messaging::Pieces;

/// Where an operation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the structure's root.
    Root,
    /// At the root, and no cached copy is trusted: pages on the way are read anew, if others can have changed them. For the
    /// attempt after one that met a stale page.
    Anew,
    /// At this page, below which the compute side had to stop. It may have come to be another page of the structure meanwhile:
    /// the operation checks that it is what it was.
    Page(Link),
    /// Where [`Operation::try_sync`] had to stop, as the same access has said ([`FastPath::resume_at`]).
    Resume([u64; 3]),
}

/// How a link is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hint {
    /// Where it leads.
    pub direction: Direction,
    /// The words of the page that are read first, as pairs of first and end. An access whose pages are in local memory may
    /// have the processor fetch just them. Nothing: the first half.
    pub first: [(u16, u16); 3],
}

/// Where a link leads, seen from its page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// One level down.
    Down,
    /// To a page of the same level, as a matter of course.
    Beside,
    /// To a page of the same level, because the page above did not know better: a cached copy of it is old.
    Moved,
}

impl Hint {
    /// One level down.
    pub const DOWN: Self = Self { direction: Direction::Down, first: [(0, 0); 3] };
    /// To a page of the same level.
    pub const BESIDE: Self = Self { direction: Direction::Beside, ..Self::DOWN };
    /// To a page of the same level of which the page above does not know yet.
    pub const MOVED: Self = Self { direction: Direction::Moved, ..Self::DOWN };

    /// The same way; these words are read first.
    #[inline]
    pub const fn reading(self, first: [(u16, u16); 3]) -> Self {
        Self { first, ..self }
    }
}

/// A page that an operation may read.
pub trait PageRef {
    /// Its words: private, or shared with those who change them.
    type Words: Words + ?Sized;

    /// Its address and size in remote memory, as an unswizzled link.
    fn link(&self) -> Link;

    /// Its level, as its identity states it.
    fn level(&self) -> u8;

    /// The structure's own mark of its layout, as its identity states it.
    fn kind(&self) -> u8;

    /// Reads from the page. `f` may see words of different moments and must cope with any; its result is handed out only
    /// if they were all of one moment. Which one depends on the access: a page that is a private copy goes on showing the
    /// moment when it was fetched, one that is cached is refused once it has changed. So what has to be true still is one of
    /// the pages of a change, or validated.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page changed meanwhile.
    fn read<R>(&self, f: impl FnOnce(&Self::Words) -> R) -> Result<R, Interrupt>;

    /// Its address in remote memory.
    fn at(&self) -> RemotePtr {
        self.link().remote().expect("a page has an address").0
    }
}

/// A word that [`Access::install`] changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WordPtr {
    /// The page that holds it, made with [`PagesMut::describe_words`].
    pub page: Link,
    /// Its position there.
    pub index: usize,
}

/// A compare-and-swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Swap {
    /// Of this word,
    pub word: WordPtr,
    /// if it is this,
    pub old: u64,
    /// to this. So that a lost answer can be told from a lost request, nobody else swaps the same word to it.
    pub to: u64,
    /// What [`Plugin::reachable`] is asked if the answer is lost and the word is neither any more. None where nobody but the
    /// caller replaces `to`: then the swap was lost.
    pub found_by: Option<[u64; 2]>,
}

/// What an access has of its worker and its structure.
#[derive(Debug)]
pub struct Context<P: Plugin> {
    /// The worker that it runs on.
    pub worker: Handle,
    /// The structure whose pages these are.
    pub structure: Structure,
    /// What the structure's code keeps between operations.
    pub local: P::Local,
}

impl<P: Plugin> Context<P> {
    /// Of a worker and a structure, with nothing kept yet.
    pub fn new(worker: &Handle, structure: Structure) -> Self {
        Self { worker: worker.clone(), structure, local: P::Local::default() }
    }
}

/// For each handle what it keeps begins anew.
impl<P: Plugin> Clone for Context<P> {
    fn clone(&self) -> Self {
        Self::new(&self.worker, self.structure.clone())
    }
}

/// By what right an attempt is made: see [`FastPath::right`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Right {
    /// One that was lost and had again is another.
    pub(crate) number: u32,
    /// How much this handle had changed.
    pub(crate) changes: u32,
}

impl Right {
    /// That of an access which needs none, or cannot lose it.
    pub const LASTING: Self = Self { number: 0, changes: 0 };
}

/// On the way to the right to use a structure: see [`FastPath::enter`].
pub type Entering<'a> = Pin<Box<dyn Future<Output = Result<(), Error>> + 'a>>;

/// What an access can do without suspending, because pages are in local memory. All of it can be left out.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait FastPath: Sized {
    /// The structure's plug-in.
    type Plugin: Plugin;
    /// A page, held for reading.
    type Page<'a>: PageRef
    where
        Self: 'a;

    /// Whether it makes use of what structures learn of their pages, to have the processor fetch the right words.
    const PREFETCHES: bool = false;
    /// Whether [`Access::validate`] looks at the pages that it is given. Where it does not, nobody need hold them for it.
    const VALIDATES: bool = true;

    /// The root, if it is cached and no other task is ready. Never suspends.
    fn try_open(&self) -> Option<Self::Page<'_>> {
        None
    }

    /// [`Access::follow`], if the page is cached and no other task is ready. `None` says nothing about the link. Never
    /// suspends.
    fn try_follow<'a>(&'a self, _from: &Self::Page<'a>, _link: Link, _hint: Hint) -> Option<Self::Page<'a>> {
        None
    }

    /// Where an operation goes on that has come to this page without suspending, and now has to wait.
    fn resume_at(&self, _page: &Self::Page<'_>) -> Start {
        Start::Root
    }

    /// By what right an operation may be tried now that only reads, or one that may change something. None: it [enters](Self::enter)
    /// before.
    #[inline]
    fn right(&self, _reads_only: bool) -> Option<Right> {
        Some(Right::LASTING)
    }

    /// Whether what an attempt came to counts that was made by this right. Not if the right was lost meanwhile, and this handle has changed
    /// nothing since: it may be older than what an owner has answered.
    #[inline]
    fn stands(&self, _right: Right, _reads_only: bool) -> bool {
        true
    }

    /// Waits for the right to use the structure.
    fn enter(&self) -> Entering<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Waits until what was changed so far lasts, by others, too. Whoever runs an operation that may change something does so once that has its
    /// answer, which may rest on what others have just changed; who changes pages outside of operations, once it is done. Nothing to wait for
    /// where a change lasts at once.
    ///
    /// # Errors
    /// If it does not last. It may be there all the same.
    fn settle(&self) -> impl Future<Output = Result<(), Error>> {
        std::future::ready(Ok(()))
    }

    /// One attempt that keeps copies of all pages it reads, for an operation that goes back to more pages than the cache keeps in
    /// their places, or one that only reads, and loses pages to others who change them. `None`: pages of this access stay as they are anyway.
    async fn run_holding<O: Operation<Plugin = Self::Plugin>>(
        &self,
        _operation: &O,
        _from: Start,
    ) -> Option<Result<O::Output, Interrupt>> {
        None
    }

    /// Whether it remembers logical pages.
    const REMEMBERS: bool = false;

    /// What was last [remembered](FastPath::remember) of the logical page behind a word: the word, and what the pages behind it
    /// came to. It is what was true when that was the word: an operation that answers from it [loads](Access::load) the word
    /// first, and compares. Never suspends.
    fn recall<T: Any + Send + Sync>(&self, _at: WordPtr) -> Option<(u64, Arc<T>)> {
        None
    }

    /// Offers what the pages behind a word come to, for all workers of the compute server: `state`, which takes so many bytes. It is
    /// forgotten after at most 2^14 epochs. In that time no page is reused more than 2^14 times, so a word that tells 2^15
    /// uses of a page apart does not come to mean something else, as long as the page is used by [installs](Access::install). But
    /// structures share their pages, and one with locks counts each change of one. If such a structure has had the page meanwhile, and the
    /// same word leads there again, it is the old word by chance, once in 2^15 times; an operation that relies on it then answers what was so,
    /// or undoes what others have done since.
    fn remember<T: Any + Send + Sync>(&self, _at: WordPtr, _word: u64, _state: &Arc<T>, _bytes: usize) {}

    /// The next read of `page` needs these words. May have the processor fetch them, and let other operations run meanwhile.
    async fn prefetch<'a>(&'a self, _page: &Self::Page<'a>, _words: [(u16, u16); 2]) {}
}

/// A way to reach the pages of one structure; see the [module](self).
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Access: FastPath {
    /// Pages open for writing.
    type PagesMut<'a>: PagesMut
    where
        Self: 'a;

    /// The worker, the structure, and what the handle keeps.
    fn context(&self) -> &Context<Self::Plugin>;

    /// The page where an operation begins. Suspends for a remote access.
    ///
    /// # Errors
    /// As [`Access::follow`].
    async fn open(&self, start: Start) -> Result<Self::Page<'_>, Interrupt>;

    /// The page that `link`, read from `from`, leads to. Never ends the attempt in favour of another machine. Suspends for a
    /// remote access, if the page is not cached.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page was freed or belongs to another structure by now; [`Interrupt::Failed`] if the
    /// link leads nowhere, the page is damaged or corrupt, or the fabric fails.
    async fn follow<'a>(&'a self, from: &Self::Page<'a>, link: Link, hint: Hint) -> Result<Self::Page<'a>, Interrupt>;

    /// [`Access::follow`] where *all that is left of the operation* lies below `link`: it may be run by the memory server of that
    /// page, from that page on, in place of the rest of this attempt.
    ///
    /// # Errors
    /// As [`Access::follow`]; what else it returns is handed on by `?`.
    async fn descend<'a>(&'a self, from: &Self::Page<'a>, link: Link, hint: Hint) -> Result<Self::Page<'a>, Interrupt> {
        self.follow(from, link, hint).await
    }

    /// Follows any number of links of any pages, several at a time ([`Handle::window`]); results come as pages arrive, one for
    /// each link. More links can be added meanwhile. All are taken to lead down ([`Hint::DOWN`]): a page of the same level is found, too,
    /// but a memory server that does the rest of an operation for an owner gives the operation back there.
    fn follow_each<'a>(&'a self, links: impl IntoIterator<Item = (Rc<Self::Page<'a>>, Link)>) -> Each<'a, Self> {
        let mut each = Each::new(self);
        for (from, link) in links {
            each.push(from, link);
        }
        each
    }

    /// Runs an operation below a link of a page: on the memory server of the page below, if that is not here and it pays; else
    /// returns the page, for the caller to go on from.
    ///
    /// # Errors
    /// As [`Access::follow`], and what the operation failed with.
    async fn fork_one<'a, O: Operation<Plugin = Self::Plugin>>(
        &'a self,
        from: &Self::Page<'a>,
        link: Link,
        _part: &O,
    ) -> Result<Forked<Self::Page<'a>, O::Output>, Interrupt> {
        self.follow(from, link, Hint::DOWN).await.map(Forked::Page)
    }

    /// [`Access::fork_one`] for several links, all at the same time. A result for each link.
    async fn fork<'a, O: Operation<Plugin = Self::Plugin>>(
        &'a self,
        from: &Rc<Self::Page<'a>>,
        links: &[Link],
        part: &O,
    ) -> Vec<Result<Forked<Self::Page<'a>, O::Output>, Interrupt>> {
        let all = links.iter().map(|&link| self.fork_one(from, link, part));
        futures_util::stream::iter(all).buffered(self.context().worker.window()).collect().await
    }

    /// That each of these pages was, at some moment since the attempt began, as it was read. Takes one round trip where pages
    /// may be older than the attempt, none elsewhere.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if one was not: cached copies are renewed, the next attempt meets newer ones.
    async fn validate<'a>(&'a self, _pages: &[&Self::Page<'a>]) -> Result<(), Interrupt> {
        Ok(())
    }

    /// Changes all these pages, writes the new ones and frees some, or does nothing. `f` sets words; the change takes effect if
    /// no page has changed since it was read (but for those [as they are](Pages::add_current)); readers see all of each page or
    /// nothing. New pages are complete before a page that links to them is. Returns the pages as they are after it.
    ///
    /// Suspends for remote accesses. If the returned future is dropped, the change is carried out or not, but never left
    /// half-done. If `f` panics, nothing is changed.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if somebody else was first: nothing was changed, and `f`'s result and the new pages are
    /// dropped. `f` may then have been called or not. [`Error::PageTwice`] if a page is named twice.
    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt>;

    /// Writes new pages, whose words `f` sets, and then replaces one word if it is as expected, without a lock: for latch-free
    /// structures. Frees the pages that this has `unlinked`. None of all these is ever changed by [`Access::change`].
    ///
    /// One round trip if the fabric keeps order and the new pages are on the word's memory server, else two, as for a new page whose
    /// words installs change; and one to free pages. If the returned future is dropped, all of it is done or nothing. If the word is
    /// not as expected, the new pages are free again, and the word comes back.
    ///
    /// # Errors
    /// [`Error::NotCoherent`] over an access that could not tell others; [`Error::InstallUnknown`] if the answer was lost, and what
    /// is reachable does not show whether the swap took place: pages that then belong to nobody are freed behind a grace
    /// period; [`Error::BadPointer`] if what is unlinked is no page that can be freed; or if the fabric fails.
    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt>;

    /// Reads words that [`Access::install`] changes, in one round trip.
    ///
    /// # Errors
    /// As [`Access::install`]; and if a pointer is not one to a word of a page.
    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt>;

    /// A new page. Dropped unlinked, it is free again. Suspends only when this compute server has none left.
    ///
    /// # Errors
    /// If no memory server has room, or the fabric fails.
    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error>;

    /// Whether `link`, read from a page, leads to `page`. Links are not to be compared: one that leads to a cached page has
    /// another form.
    fn leads_to(&self, link: Link, page: &Self::Page<'_>) -> bool {
        link == page.link()
    }
}

/// What became of an operation that was to be run below a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forked<P, T> {
    /// It is for the caller to do, from this page on.
    Page(P),
    /// It was done elsewhere.
    Done(T),
}
