//! All that the cache knows of the world: a store of pages, and where links stand in a page.

use std::{
    error::Error,
    future::Future,
    ops::{Deref, DerefMut},
};

use futures_util::future::join_all;

use crate::{
    id::{PageId, SizeClass},
    sync::AtomicU64,
};

/// Where pages live when they are not cached, as one thread reaches it. Cheap to clone; clones are the same store.
///
/// The store's duties:
/// - [`read`](Store::read) answers with the page as it was at one moment, and has checked what it must not trust.
/// - [`write`](Store::write) has taken effect when it answers without an error: a later read sees it, by whatever thread.
///   The cache has one write of a page under way at a time. An error says that the page may be old or new: the cache keeps
///   the page, and writes it again later.
/// - A `read` (or `read_many`) may be dropped before it answers: it is forgotten. The cache never drops a `write`.
/// - [`spawn`](Store::spawn) runs what it is given to its end, on the same thread, also if nobody waits for it.
/// - [`buffer`](Store::buffer) does not panic, nor call the cache: a page is locked meanwhile, and would stay so. The same goes for a
///   [`Layout`].
///
/// The cache's duties: it asks for a page by the size it was linked with, writes only pages that it has read or was given
/// as new ones, and never a page with a swizzled link in it. It evicts a page after the pages below it; a page that was
/// refused admission, and pages that split during a flush, may be written before new pages that they lead to.
#[allow(async_fn_in_trait, reason = "a store belongs to one thread; its futures need not be Send")]
pub trait Store: Clone + 'static {
    /// Private memory that holds a page on its way.
    type Buffer: Deref<Target = [u64]> + DerefMut;
    /// Why a page cannot be read or written.
    type Error: Error + 'static;

    /// A buffer of so many words (8 to 8192, a power of two), with any contents.
    ///
    /// # Errors
    /// If the store has no memory for it.
    fn buffer(&self, words: usize) -> Result<Self::Buffer, Self::Error>;

    /// Reads a page. Suspends until it is there.
    ///
    /// # Errors
    /// If there is no such page, it is damaged, or it cannot be reached.
    async fn read(&self, page: PageId, class: SizeClass) -> Result<Self::Buffer, Self::Error>;

    /// Reads several pages at once, for [`CacheHandle::follow_many`](crate::CacheHandle::follow_many); an answer for each, in
    /// order. The default overlaps single reads; a store that can asks for all of them in one go.
    async fn read_many(&self, pages: &[(PageId, SizeClass)]) -> Vec<Result<Self::Buffer, Self::Error>> {
        join_all(pages.iter().map(|&(page, class)| self.read(page, class))).await
    }

    /// Writes pages; an answer for each, in order. Suspends until all are written, or failed. Whether one after another
    /// or all together is the store's choice.
    async fn write(&self, pages: Vec<(PageId, Self::Buffer)>) -> Vec<Result<(), Self::Error>>;

    /// Whether changes of so many pages, and so many new ones, are to be [recorded](Store::record). By default none is.
    #[inline]
    fn records(&self, _pages: usize, _new: usize) -> bool {
        false
    }

    /// A change is being made: these are its pages as it leaves them, new ones among them, with ids in place of swizzled links, and
    /// the pages that it frees, as they were. Their locks are held: nobody has seen the change, and none of its pages is on its way to the
    /// store. Must not suspend, and cannot refuse it. For a store that writes a log: from now on it is to write none of these pages before
    /// that has them. A word that the change has left behind, where the layout names a link no more, may be swizzled here still.
    fn record(&self, _changed: Vec<(PageId, Box<[u64]>)>, _freed: Vec<(PageId, Box<[u64]>)>) {}

    /// As [`record`](Store::record), for a change of one page without links: its words, and the positions of those that were set, in
    /// ascending order.
    fn record_words(&self, _page: PageId, _words: &[AtomicU64], _set: &[u32]) {}

    /// Runs a task to its end on this thread: a write-back that nobody waits for. A store whose futures are never pending
    /// may run it on the spot.
    fn spawn(&self, task: impl Future<Output = ()> + 'static);
}

/// What the cache must know of pages. Words of a page may be of different moments here, as for any optimistic reader:
/// an implementation copes with all of them, and its answers are used only after validation.
pub trait Layout: 'static {
    /// The page's distance from the leaves: 0 if it has no links that the cache is to swizzle. At most 15 is counted apart.
    fn level(&self, page: &[AtomicU64]) -> u8;

    /// The position of each word that links to a page one level below. No two pages, and no two words of
    /// one page, may link to the same page through such words: it is the one link that is swizzled. Links to siblings and
    /// the like are followed unswizzled, and are not named here. A word that is 0 is no link, and may be named.
    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize>;
}
