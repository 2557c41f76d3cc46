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

use std::{any::Any, collections::VecDeque, fmt, future::Future, pin::Pin, rc::Rc, sync::Arc};

use futures_util::stream::{FuturesUnordered, StreamExt};

pub use crate::{
    change::{Pages, PagesMut, Slot},
    interrupt::{Cause, Interrupt},
    pages::{NewPage, Unlinked},
    ptr::{Link, RemotePtr},
    structure::{Overlap, Placement, Region, Structure},
    words::Words,
};
use crate::{
    error::Error,
    page::SizeClass,
    report::Report,
    sync::AtomicU64,
    wire::{DecodeError, Wire},
    worker::Handle,
};
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

/// On the way to the right to change a structure: see [`FastPath::enter`].
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

    /// Asked before the first attempt of an operation that may change something: what has to be waited for, so that its answer holds
    /// also where nothing is changed. Nothing, once this access has the right to change the structure.
    fn enter(&self) -> Option<Entering<'_>> {
        None
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
    /// their places. `None`: pages of this access stay as they are anyway.
    async fn run_holding<O: Operation<Plugin = Self::Plugin>>(
        &self,
        _operation: &O,
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
    /// same word leads there again, it is the old word by chance, once in 2^15 times.
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
        let mut each = Each { access: self, waiting: VecDeque::new(), running: FuturesUnordered::new(), count: 0 };
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

type Following<'a, P> = Pin<Box<dyn Future<Output = (usize, Result<P, Interrupt>)> + 'a>>;

/// Pages on their way: see [`Access::follow_each`].
pub struct Each<'a, A: Access> {
    access: &'a A,
    waiting: VecDeque<(usize, Rc<A::Page<'a>>, Link)>,
    running: FuturesUnordered<Following<'a, A::Page<'a>>>,
    count: usize,
}

impl<A: Access> fmt::Debug for Each<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { waiting, running, .. } = self;
        write!(f, "Each({} on their way, {} waiting)", running.len(), waiting.len())
    }
}

impl<'a, A: Access> Each<'a, A> {
    /// Adds a link to be followed; returns its number, counted from 0.
    pub fn push(&mut self, from: Rc<A::Page<'a>>, link: Link) -> usize {
        self.waiting.push_back((self.count, from, link));
        self.count += 1;
        self.count - 1
    }

    /// The next page to arrive, with the number of its link; `None` once all have.
    pub async fn next(&mut self) -> Option<(usize, Result<A::Page<'a>, Interrupt>)> {
        while self.running.len() < self.access.context().worker.window() {
            let Some((number, from, link)) = self.waiting.pop_front() else { break };
            let access = self.access;
            self.running.push(Box::pin(async move { (number, access.follow(&from, link, Hint::DOWN).await) }));
        }
        self.running.next().await
    }

    /// All pages, in the order of their links.
    pub async fn all(mut self) -> Vec<Result<A::Page<'a>, Interrupt>> {
        let mut pages: Vec<_> = (0..self.count).map(|_| None).collect();
        while let Some((number, page)) = self.next().await {
            pages[number] = Some(page);
        }
        pages.into_iter().flatten().collect()
    }
}

/// Makes one answer of those of several parts of a structure.
pub trait Merge: Sized {
    /// Adds what another part has answered.
    fn merge(&mut self, other: Self);
}

impl Merge for () {
    fn merge(&mut self, (): Self) {}
}

/// A sum.
impl Merge for u64 {
    fn merge(&mut self, other: Self) {
        *self = self.wrapping_add(other);
    }
}

/// Whether any part says so.
impl Merge for bool {
    fn merge(&mut self, other: Self) {
        *self |= other;
    }
}

/// What the first part has that has something.
impl<T> Merge for Option<T> {
    fn merge(&mut self, other: Self) {
        if self.is_none() {
            *self = other;
        }
    }
}

/// One after the other.
impl<T> Merge for Vec<T> {
    fn merge(&mut self, other: Self) {
        self.extend(other);
    }
}

impl<A: Merge, B: Merge> Merge for (A, B) {
    fn merge(&mut self, other: Self) {
        self.0.merge(other.0);
        self.1.merge(other.1);
    }
}

/// The part of a structure that an operation is about.
pub type RegionOf<O> = <<O as Operation>::Plugin as Plugin>::Region;

/// A request to a structure, as a value: it runs here, or is sent and runs there.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Operation: Wire + Clone + 'static {
    /// What it answers.
    type Output: Wire + Merge + 'static;
    /// The structure's plug-in: over the access of another one it does not compile.
    type Plugin: Plugin;
    /// Its name among the plug-in's operations. It is sent as a number made of both names.
    const NAME: &'static str;
    /// Whether it changes nothing. Then it can be done again if a memory server is lost with it, and nobody need know.
    const READS_ONLY: bool = false;

    /// What of the structure it is about, where it begins: whoever routes it asks this, and nothing else.
    fn scope(&self) -> RegionOf<Self>;

    /// What of it is about a region of which its scope has something; itself, if it need not say so: whoever has that region must not
    /// be asked for what is beyond.
    #[must_use]
    fn within(&self, _region: &RegionOf<Self>) -> Self {
        self.clone()
    }

    /// Takes back what it asks for beyond the size of one message. Called where it comes from afar.
    fn limit(&mut self) {}

    /// The answer, if all pages that it takes are cached and nothing is to be changed. Tried before [`Operation::run`], for it
    /// spares what suspending takes: a future's variables are places in memory.
    ///
    /// # Errors
    /// If something has to be waited for: where [`Operation::run`] begins, which may be where this has stopped.
    fn try_sync<A: Access<Plugin = Self::Plugin>>(&self, _access: &A) -> Result<Self::Output, Start> {
        Err(Start::Root)
    }

    /// One attempt. The first visible effect is also the last thing that can be interrupted.
    ///
    /// # Errors
    /// [`Interrupt`] says whether to begin anew, to ship, or to give up.
    async fn run<A: Access<Plugin = Self::Plugin>>(&self, access: &A, from: Start) -> Result<Self::Output, Interrupt>;

    /// Runs it over a structure in parts. If not said otherwise, all parts that it is about are asked at the same time, and
    /// their answers merged.
    ///
    /// # Errors
    /// What it failed with.
    async fn route<D: Shards<Plugin = Self::Plugin>>(&self, parts: &D) -> Result<Self::Output, Error> {
        route_to_all(self, parts).await
    }
}

/// Asks all parts that an operation is about, at the same time, and merges their answers: what [`Operation::route`] does if not
/// said otherwise.
///
/// # Errors
/// What the first of those that failed failed with.
pub async fn route_to_all<O: Operation, D: Shards<Plugin = O::Plugin>>(
    operation: &O,
    parts: &D,
) -> Result<O::Output, Error> {
    let about = parts.about(&operation.scope());
    if let &[part] = &*about {
        return parts.on(part, operation).await;
    }
    let answers = futures_util::future::join_all(about.iter().map(|&part| parts.on(part, operation))).await;
    let mut answers = answers.into_iter();
    let mut first = answers.next().ok_or(Error::Malformed("an operation is about no part of its structure"))??;
    for answer in answers {
        first.merge(answer?);
    }
    Ok(first)
}

/// Pages of an access that lie in this process's memory: that of a memory server's threads.
pub trait InPlace {
    /// The words of a page, where they lie; none if it is on another memory server. Others may read them, and change those of a
    /// page that is changed at all: so this is for pages of which no word is changed once something leads to them. The caller has
    /// a link to it, read since the operation began, or keeps off what it finds: it checks that the words are those that the link
    /// promised. Nobody has compared them with the page's checksum, so damage shows only if the caller does.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page was freed or belongs to another structure by now; [`Interrupt::Failed`] if the link
    /// leads nowhere.
    fn in_place(&self, link: Link) -> Result<Option<&[AtomicU64]>, Interrupt>;
}

/// An operation that only reads, and whose answer a memory server can send in pieces of its pages, which are not copied.
///
/// Such an answer is put together again by the client. What the pieces are is up to the operation: the entries that the answer
/// consists of; or whole pages, for the client to make the answer of. Until they are sent, no page that they are of is reused. It
/// may be *freed*, though, and then its lock word says so.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait InPieces: Operation {
    /// One attempt, inside a memory server: appends what the answer is made of. A piece is of a page that is never changed, and
    /// was read with [`InPlace::in_place`].
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn collect<A: Access<Plugin = Self::Plugin> + InPlace>(
        &self,
        access: &A,
        to: &mut Pieces,
    ) -> Result<(), Interrupt>;

    /// The answer that those words hold, on the client: all that [`InPieces::collect`] has appended.
    ///
    /// # Errors
    /// If it is none.
    fn assemble(&self, words: &[u64]) -> Result<Self::Output, DecodeError>;
}

/// A structure in several parts, each a structure of its own.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Shards {
    /// Their plug-in.
    type Plugin: Plugin;

    /// The numbers of the parts that have something of a region.
    fn about(&self, region: &<Self::Plugin as Plugin>::Region) -> Vec<usize>;

    /// The region of a part; `None` if parts are cut by hash.
    fn region(&self, part: usize) -> Option<&<Self::Plugin as Plugin>::Region>;

    /// Runs an operation on one of them.
    ///
    /// # Errors
    /// What it failed with.
    async fn on<O: Operation<Plugin = Self::Plugin>>(&self, part: usize, operation: &O) -> Result<O::Output, Error>;
}

/// What a [`Plugin`] names its operations to: memory servers can carry out those.
pub trait Operations<P: Plugin> {
    /// Adds one.
    ///
    /// # Panics
    /// If the plug-in has another one of the same name.
    fn add<O: Operation<Plugin = P>>(&mut self) -> &mut Self;

    /// Adds one whose answer can be sent in pieces, too. Provided for who does not send any.
    ///
    /// # Panics
    /// As [`Operations::add`].
    fn add_in_pieces<O: InPieces<Plugin = P>>(&mut self) -> &mut Self {
        self.add::<O>()
    }
}

/// A structure: all that the rest of farlink wants of it. Its functions cope with any words: a page may be looked at while it
/// changes.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Plugin: Copy + Default + fmt::Debug + Send + Sync + 'static {
    /// What it is called, in the catalog too: no two plug-ins of a cluster have the same name. 1 to 64 bytes.
    const NAME: &'static str;
    /// The sizes that its root can have, in bytes: powers of two.
    const ROOT_BYTES: std::ops::RangeInclusive<usize>;
    /// A part of it that somebody can own: a key range, a box, a set of hashes, all.
    type Region: Region;
    /// What a handle keeps between operations: hints, a cached directory.
    type Local: Default + fmt::Debug;

    /// The position of each link of a page above level 0 to a page one level below, the only link to it that is named. Links
    /// to siblings are not among them, nor words that are no links. A cache may swizzle these words, and no others: what
    /// may be set to one is said at [`PagesMut::set`].
    fn links(page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize>;

    /// The part of the structure that is below one of those links. `None` if the page does not tell: operations are never
    /// shipped from there.
    fn below(_page: &(impl Words + ?Sized), _link: usize) -> Option<Self::Region> {
        None
    }

    /// Whether what belongs to the page (its fences, its bounding box) lies in a region. Provided for what is owned as a whole or
    /// not at all.
    fn overlap(_page: &(impl Words + ?Sized), region: &Self::Region) -> Overlap {
        if Self::can_own(region) { Overlap::Inside } else { Overlap::Partly }
    }

    /// Whether one compute server can own such a region by itself. Provided for what is owned as a whole or not at all.
    fn can_own(region: &Self::Region) -> bool {
        Self::Region::everything().overlap(region) == Overlap::Inside
    }

    /// Sets the words of an empty structure's root.
    fn create(pages: &mut impl PagesMut, root: Slot, structure: &Structure);

    /// Names its operations.
    fn operations(to: &mut impl Operations<Self>);

    /// The pages of a chain that [installs](Access::install) make, of all that readers can come to now: what is
    /// [sought](Swap::found_by) is the chain in which a page is that such a swap has made or unlinked, if it is in any. Asked when
    /// the answer to a swap is lost. None: there is no telling, and pages may be lost with the answer.
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn reachable<A: Access<Plugin = Self>>(
        _access: &A,
        _found_by: [u64; 2],
    ) -> Result<Option<Vec<RemotePtr>>, Interrupt> {
        Ok(None)
    }

    /// Whether nothing leads to a page of the structure, which no operation that still runs has made. Others may change the structure meanwhile.
    /// What leads there and is itself nobody's, such as an entry of a table, is given up first. Asked for each page by
    /// `leaks::free`; needed only where [installs](Access::install) make pages. Provided: no page is.
    ///
    /// # Errors
    /// As [`Operation::run`].
    async fn is_leaked<A: Access<Plugin = Self>>(_access: &A, _page: Link) -> Result<bool, Interrupt> {
        Ok(false)
    }

    /// Looks at every page. Nobody may change the structure meanwhile.
    ///
    /// # Errors
    /// If the root cannot be read, or the fabric fails. What is wrong with the structure is in the report.
    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error>;
}

/// Frees a page that is unlinked already: of a structure whose pages are unlinked one by one, or one that never was linked.
///
/// # Errors
/// [`Interrupt::Restart`] if the page is changed or freed meanwhile.
pub async fn free<A: Access>(access: &A, page: Link) -> Result<(), Interrupt> {
    let mut pages = Pages::new();
    let page = pages.add(access.open(Start::Page(page)).await?);
    access.change(pages, |pages| pages.free(page)).await.map(drop)
}
