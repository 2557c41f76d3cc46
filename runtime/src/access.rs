//! How an operation reaches pages, whatever lies between it and them.
//!
//! A structure is written once, generic over [`Access`]; the implementation decides whether pages are read one-sided, come
//! from a cache, or are local memory of a memory server. The duties of a structure's code:
//!
//! - It uses what it read from a page only after [`PageRef::read`] has returned it: then it was true of one moment.
//! - It follows a link and then checks that the page is what the link promised (level, fences, bounding box) before it
//!   goes on; if not, it moves right or returns [`Cause::Stale`].
//! - It never panics on what a page holds: counts are clamped, sums wrap, links are checked by `follow`.
//! - All of one change goes through one [`Access::change`]: the pages it alters, those it adds, those it frees.
//! - It returns [`Interrupt::Restart`] only before its first visible effect.

use std::{cell::Cell, ops::Range};

use crate::{
    error::Error,
    operation::Operation,
    page::SizeClass,
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr},
    structure::Structure,
    words::Words,
    worker::Handle,
};

/// Why an attempt begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Somebody else changed a page first.
    #[error("somebody else changed a page first")]
    Conflict,
    /// A page is not what the link to it promised.
    #[error("page {page} is not what its link promised: {why}")]
    Stale {
        /// The page.
        page: RemotePtr,
        /// What does not fit.
        why: &'static str,
    },
}

/// Why an attempt ends early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Interrupt {
    /// Begin anew from the root. Possible only before the attempt's first visible effect.
    #[error("{0}")]
    Restart(Cause),
    /// Run the rest on the memory server that holds this page. Possible only before the attempt's first visible effect.
    #[error("to be run on the memory server of page {0}")]
    Ship(RemotePtr),
    /// Give up.
    #[error("{0}")]
    Failed(Box<Error>),
}

impl From<Error> for Interrupt {
    fn from(error: Error) -> Self {
        Self::Failed(Box::new(error))
    }
}

impl From<Box<Error>> for Interrupt {
    fn from(error: Box<Error>) -> Self {
        Self::Failed(error)
    }
}

impl Interrupt {
    /// The page is not what the link to it promised.
    pub const fn stale(page: RemotePtr, why: &'static str) -> Self {
        Self::Restart(Cause::Stale { page, why })
    }

    /// Somebody else was first.
    pub const fn conflict() -> Self {
        Self::Restart(Cause::Conflict)
    }
}

/// Where an operation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the structure's root.
    Root,
    /// At the root, and no cached copy is trusted: pages on the way are read anew, if others can have changed them. For the
    /// attempt after one that met a stale page.
    Anew,
    /// At this page, below which the compute side had to stop. No link is followed, so nothing says that the page is still in
    /// use if it may have been freed: an owner's cache frees a page at once and marks it free in remote memory later. Within
    /// an operation go on from a page that is held, not from its address.
    Page(RemotePtr),
    /// Where [`Operation::at_once`] had to stop, as the same access has said ([`Access::stop_at`]).
    Stopped([u64; 3]),
}

/// A page that an operation may read.
pub trait PageRef {
    /// Its words: private, or shared with those who change them.
    type Words: Words + ?Sized;

    /// Its address in remote memory.
    fn at(&self) -> RemotePtr;

    /// Its level, as its identity states it.
    fn level(&self) -> u8;

    /// The structure's own mark of its layout, as its identity states it.
    fn kind(&self) -> u8;

    /// Reads from the page. `f` may see words of different moments and must cope with any; its result is handed out only
    /// if they were all of one moment.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page changed meanwhile.
    fn read<R>(&self, f: impl FnOnce(&Self::Words) -> R) -> Result<R, Interrupt>;
}

/// The pages of one change, open for writing: first those given to [`Access::change`], then the new ones, numbered in
/// that order. Words below [`HEADER_WORDS`](crate::page::HEADER_WORDS) belong to the framework.
pub trait Views {
    /// How many words `page` has.
    fn count(&self, page: usize) -> usize;

    /// A word of `page`, as changed so far. Words of a new page are zero at first.
    fn word(&self, page: usize, index: usize) -> u64;

    /// Sets a word of `page`.
    fn set(&mut self, page: usize, index: usize, word: u64);

    /// Says what `page` is from now on: needed for each new page, and when a page changes its level in place.
    fn describe(&mut self, page: usize, level: u8, kind: u8);

    /// Frees `page`, which this change unlinks: it becomes unreadable with the change, and is reused after a grace period.
    fn free(&mut self, page: usize);
}

/// A way to reach the pages of one structure; see the [module](self).
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Access: Sized {
    /// A page, held for reading.
    type Page<'a>: PageRef
    where
        Self: 'a;
    /// Pages open for writing.
    type Views<'a>: Views
    where
        Self: 'a;

    /// Whether this access is to level 0 alone, and the levels above are changed elsewhere: a structure then changes level 0
    /// without the pages above, and sends after it what is to be done there ([`Access::change_below`]).
    const IS_BELOW: bool = false;

    /// The worker that this access runs on.
    fn worker(&self) -> &Handle;

    /// The structure whose pages these are.
    fn structure(&self) -> &Structure;

    /// The page where an operation begins. Suspends for a remote access.
    ///
    /// # Errors
    /// As [`Access::follow`].
    async fn enter(&self, start: Start) -> Result<Self::Page<'_>, Interrupt>;

    /// The page where an operation begins, if it is at hand and nothing is gained by letting other operations run before one
    /// goes on. Never suspends.
    fn root_at_hand(&self) -> Option<Self::Page<'_>> {
        None
    }

    /// The page that `link`, read from `from`, leads to. Suspends for a remote access, if the page is not at hand.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if the page was freed or belongs to another structure by now; [`Interrupt::Failed`] if the
    /// link leads nowhere, the page is damaged or corrupt, or the fabric fails.
    async fn follow<'a>(&'a self, from: &Self::Page<'a>, link: Link) -> Result<Self::Page<'a>, Interrupt>;

    /// [`Access::follow`] for a link to a page of the same level. An access that treats levels differently has to know.
    ///
    /// # Errors
    /// As [`Access::follow`].
    async fn sibling<'a>(&'a self, from: &Self::Page<'a>, link: Link) -> Result<Self::Page<'a>, Interrupt> {
        self.follow(from, link).await
    }

    /// [`Access::follow`], with a hint: these words of the page are read first. An access whose pages are in local memory may
    /// have the processor fetch just them.
    ///
    /// # Errors
    /// As [`Access::follow`].
    async fn follow_for<'a>(
        &'a self,
        from: &Self::Page<'a>,
        link: Link,
        _words: [Range<usize>; 3],
    ) -> Result<Self::Page<'a>, Interrupt> {
        self.follow(from, link).await
    }

    /// [`Access::follow_for`] for those who do not want to wait: the page, if it is at hand and nothing is gained by letting
    /// other operations run before it is read. `None` says nothing about the link. Never suspends.
    fn at_hand<'a>(&'a self, _from: &Self::Page<'a>, _link: Link, _words: [Range<usize>; 3]) -> Option<Self::Page<'a>> {
        None
    }

    /// Where an operation goes on that has come to this page without waiting, and now has to wait. At the root, unless the
    /// access can tell a better place.
    fn stop_at(&self, _page: &Self::Page<'_>) -> Start {
        Start::Root
    }

    /// A hint: the next read of `page` needs these words. An access whose pages are in local memory may have the processor
    /// fetch them and let other operations run meanwhile.
    async fn expect<'a>(&'a self, _page: &Self::Page<'a>, _words: [Range<usize>; 2]) {}

    /// Where the structure's code keeps what it learns of its pages for [`Access::follow_for`]; zero at first, and never
    /// looked at by others. `None` if this access has no use for such hints.
    fn notes(&self) -> Option<&Cell<[u64; 2]>> {
        None
    }

    /// Said before the first visible effect of an operation that tidies up behind it, changing more than one page. An access
    /// that only changes single pages has the operation run elsewhere.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if it cannot be done here.
    fn restructures(&self) -> Result<(), Interrupt> {
        Ok(())
    }

    /// [`Access::follow`] for several links of one page at once; remote accesses overlap. A result for each link.
    async fn follow_many<'a>(&'a self, from: &Self::Page<'a>, links: &[Link])
    -> Vec<Result<Self::Page<'a>, Interrupt>>;

    /// Changes all these pages and writes the new ones, or does nothing: `f` sets words of their views, the change takes
    /// effect if none of `pages` has changed since it was read, and readers see all of each page or nothing. New pages
    /// are complete before a page that links to them is.
    ///
    /// Suspends for remote accesses. If the returned future is dropped, the change is carried out or not, but never left
    /// half-done.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if somebody else was first: nothing was changed, and `f`'s result and the new pages are
    /// dropped. `f` may then have been called or not.
    async fn change<'a, R>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt>;

    /// [`Access::change`] for one page, as it is when the change is made: it may have changed since it was read, and `f`
    /// looks again at what it relies on, the page's level included. Spares writers of one page the retries where the access
    /// can queue them. `f` frees no page.
    ///
    /// # Errors
    /// As [`Access::change`].
    async fn alter<'a, R>(
        &'a self,
        page: Self::Page<'a>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.change(vec![page], vec![], f).await
    }

    /// [`Access::change`] of pages of level 0, and after it an operation on the levels above, which is run even if the returned
    /// future is dropped. Whether that succeeds has no influence on the result: pages of level 0 are found without it.
    ///
    /// # Errors
    /// As [`Access::change`].
    async fn change_below<'a, R, O: Operation + 'static>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
        above: O,
    ) -> Result<R, Interrupt> {
        let result = self.change(pages, new, f).await?;
        self.send_above(above);
        Ok(result)
    }

    /// Has an operation run on the levels above, some time. For what a page of level 0 shows to be missing there.
    fn send_above<O: Operation + 'static>(&self, _operation: O) {}

    /// Whether `link`, read from a page, leads to `page`. Links are not to be compared: one that leads to a cached page has
    /// another form.
    fn leads_to(&self, link: Link, page: &Self::Page<'_>) -> bool {
        link == page.at().into()
    }

    /// Reads one word of a page, unvalidated: for latch-free structures.
    ///
    /// # Errors
    /// If the pointer is not one to a word of a page, or the fabric fails.
    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt>;

    /// Replaces one word of a page if it is `old`; returns the word before. No lock and no checksum: for latch-free
    /// structures, on pages of their own.
    ///
    /// # Errors
    /// As [`Access::load`].
    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt>;

    /// A new page. Suspends only when this compute server has none left.
    ///
    /// # Errors
    /// If no memory server has room, or the fabric fails.
    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error>;
}

/// Frees a page that is unlinked already: of a structure whose pages are unlinked one by one, or one that never was linked.
///
/// # Errors
/// [`Interrupt::Restart`] if the page is changed or freed meanwhile.
pub async fn free<A: Access>(access: &A, page: RemotePtr) -> Result<(), Interrupt> {
    let page = access.enter(Start::Page(page)).await?;
    access.change(vec![page], vec![], |views| views.free(0)).await
}
