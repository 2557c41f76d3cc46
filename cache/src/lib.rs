//! A cache of pages for link-based structures: trees, graphs, lists of blocks. It sits between a structure and a *store* of
//! pages that is slower than memory (remote memory, a file, a disk). A link to a cached page is followed without a look-up.
//!
//! The cache knows two things of the world: a [`Store`] that reads and writes pages, and a [`Layout`] that says where the
//! links of a page are. What the pages mean, which keys they cover and when they split, is the embedder's.
//!
//! # Words
//!
//! - A *page* has an id ([`PageId`]), a size ([`SizeClass`], 64 bytes to 64 KiB) and words. A *link* is a word: the id of another page.
//! - A *frame* is the cache's place for a page. Frames never move and never become anything else, so whoever holds an old
//!   link finds a frame, and its version says that the page has gone.
//! - A link is *swizzled* while it names a frame in place of a page: following it needs no look-up. A page has at most one
//!   swizzled link to it, its *parent's*. Stores never see one ([`is_swizzled`]).
//! - A *cooling* page has lost its swizzled link and goes next, unless somebody touches it: that *rescues* it.
//! - A *bypass page* is a page that was refused admission. It has a frame for as long as it has users, and until it is written
//!   if they changed it.
//! - An *anchor* keeps a page cached to which no link leads: a root.
//!
//! # The life of a page
//!
//! *It comes.* [`CacheHandle::follow`] meets a link that is not swizzled. The page that the link is in is pinned, so it
//! neither cools nor goes. The mapping table is asked; a page that somebody is reading already is waited for. Else a frame
//! is taken, the page is entered as loading, and the store reads it into a private buffer, which is checked and copied.
//! Then it is admitted, and the link to it is swizzled under its parent's lock; or it becomes a bypass page. Dropping the future
//! anywhere undoes all of this, and one of those who waited starts over.
//!
//! *It is read.* A lookup writes nothing. [`Page`] remembers the frame's version; [`Page::read`] runs a closure over words
//! that may be changing, and hands its result out only if the version is still the same; else it says whether the page was
//! changed or only moved ([`Conflict`]). Following a swizzled link notes
//! the child's version first and then checks the parent's: as long as the parent says so, the frame is the child's.
//!
//! *It is changed.* [`CacheHandle::change`] locks all its pages at the versions that were read, or none; runs a closure;
//! and gives each a new version; if the closure panics, the words are put back. It never suspends, and no two changes wait for
//! each other. Swizzled links may move from page
//! to page in a change: the pages below learn who their parent is. [`CacheHandle::update`] takes one page as it is, behind
//! other writers.
//!
//! *It is written.* A snapshot is taken under the page's lock, with ids in place of swizzled links, and goes to the store
//! as a task of its own. The page keeps its frame and its table entry until the store has answered, and no second write of
//! it begins. A write that failed leaves it dirty. [`CacheHandle::flush`] writes all that is dirty when it begins, from the
//! leaves up; nothing moves out of a page that it has yet to write.
//!
//! *It cools.* When room is needed, frames are drawn at random. One whose page has swizzled links hands the draw down one
//! of them, so a page stays while a page below it is cached; of those found, the least used cools, or any, where uses are not
//! counted ([`Admission`]). It must be clean: a dirty one is written first. Its parent's link is unswizzled, and it goes into the cooling map, a hash table of short
//! queues.
//!
//! *It goes.* The oldest page of a random queue, if it still cools since the version that the queue knows. Its table entry
//! goes, and its frame is free. Where another size is wanted, a whole block of frames changes hands.
//!
//! *It is excluded* ([`CacheHandle::exclude`]) while somebody else works on the store's copy of it and of what is below:
//! until then the store has the newest version of all that, and nothing of it is changed in the cache.
//!
//! # Duties of the embedder
//!
//! - Begin anew on [`Conflict`], from the root: it is how races end. Let other tasks run in between.
//! - Cope with any words in [`Layout`] and in the closure of [`Page::read`]: clamp counts, index with care.
//! - Have each page say what it covers, or check [`Page::is_current`] of the page above after a `follow` that suspended:
//!   meanwhile that page may have changed.
//! - Name in [`Layout::links`] only links to the level below, and never two to the same page. Put no swizzled link anywhere
//!   else: a change that does is refused ([`Misuse::UnnamedLink`]). One that is left behind past a smaller count is unswizzled.
//! - Give the id of a freed page to a new one only when no operation can still have the old link.
//! - Let [`Store::buffer`] and the functions of a [`Layout`] neither panic nor call the cache: a page is locked meanwhile.
//! - Poll what was begun to its end, or drop it. While a fetch is kept and not polled, whoever misses on the same page waits for it.
//! - Hold few pages and [`NewPage`]s at a time. Bypass pages and reserved pages take frames; a cache in which everything is held
//!   answers [`CacheError::NoRoom`].
//! - Flush before the last handle goes: dropping the cache writes nothing.
//!
//! # No read-ahead
//!
//! The cache reads a page when somebody follows a link to it, never before. Which link comes next only the structure knows: a
//! scan asks for its next pages together ([`CacheHandle::follow_many`]), which is one batch for the store. Reads by guess would take
//! frames and bandwidth from those, and their pages would be admitted on no evidence of use.
//!
//! # Example
//!
//! A root with links to three leaves, in a store in memory that is never pending:
//!
//! ```
//! use std::{cell::RefCell, collections::HashMap, convert::Infallible, rc::Rc};
//! use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
//! use std::task::{Context, Poll, Waker};
//! use farlink_cache::{CacheOptions, Layout, PageCache, PageId, SizeClass, Store};
//!
//! #[derive(Clone, Default)]
//! struct Memory(Rc<RefCell<HashMap<PageId, Vec<u64>>>>);
//!
//! impl Store for Memory {
//!     type Buffer = Vec<u64>;
//!     type Error = Infallible;
//!
//!     fn buffer(&self, words: usize) -> Result<Vec<u64>, Infallible> {
//!         Ok(vec![0; words])
//!     }
//!     async fn read(&self, page: PageId, _class: SizeClass) -> Result<Vec<u64>, Infallible> {
//!         Ok(self.0.borrow()[&page].clone())
//!     }
//!     async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<Result<(), Infallible>> {
//!         pages.into_iter().map(|(page, words)| drop(self.0.borrow_mut().insert(page, words))).map(Ok).collect()
//!     }
//!     fn spawn(&self, task: impl Future<Output = ()> + 'static) {
//!         block_on(task);
//!     }
//! }
//!
//! /// Word 0 is the level; words 1 to 3 are links in the root, values in leaves.
//! struct TwoLevels;
//!
//! impl Layout for TwoLevels {
//!     fn level(&self, page: &[AtomicU64]) -> u8 {
//!         page[0].load(Relaxed) as u8
//!     }
//!     fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
//!         1..if self.level(page) == 0 { 1 } else { 4 }
//!     }
//! }
//!
//! fn block_on<T>(future: impl Future<Output = T>) -> T {
//!     let mut future = std::pin::pin!(future);
//!     loop {
//!         if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
//!             return value;
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (id, class) = (|number| PageId::new(number).unwrap(), SizeClass::of_bytes(64).unwrap());
//! let store = Memory::default();
//! store.0.borrow_mut().insert(id(1), vec![1, 2, 3, 4, 0, 0, 0, 0]);
//! for leaf in 2..=4 {
//!     store.0.borrow_mut().insert(id(leaf), vec![0, leaf * 10, 0, 0, 0, 0, 0, 0]);
//! }
//!
//! let cache = PageCache::new(TwoLevels, CacheOptions::new(1 << 20))?;
//! let handle = cache.handle(store.clone(), cache.any_seed())?; // One a thread.
//! block_on(async {
//!     let anchor = handle.anchor(id(1), class).await?;
//!     let root = handle.enter(&anchor)?;
//!     let link = root.read(|words| words[2].load(Relaxed))?;
//!     let leaf = handle.follow(&root, link, class).await?; // A miss: reads page 3, and swizzles the link.
//!     assert_eq!(leaf.read(|words| words[1].load(Relaxed))?, 30);
//!     handle.change(&[&leaf], Vec::new(), |change| change.set(0, 1, 31))?;
//!     handle.flush().await
//! })?;
//! assert_eq!(store.0.borrow()[&id(3)][1], 31);
//! assert_eq!(handle.counters().levels[0].misses, 1);
//! # Ok(())
//! # }
//! ```
//!
//! The repository's guide has a chapter on embedding, and `examples/file_store.rs` is a whole tree over a file.

mod arena;
mod cache;
mod change;
mod cool;
mod cooling;
mod counters;
mod error;
mod exclusion;
mod exclusion_list;
mod fetch;
mod frame;
mod frame_lock;
mod frequency;
mod handle;
mod id;
mod mix;
#[cfg(loom)]
#[doc(hidden)]
pub mod model;
mod options;
mod overwritten;
mod sync;
mod table;
mod traits;
mod values;
mod write_back;

pub use crate::{
    cache::{Memory, PageCache},
    change::{Change, NewPage},
    counters::{Counters, LEVELS, LevelCounters},
    error::{CacheError, Conflict, Misuse, OptionsError, PageError, TooManyHandles},
    exclusion::ExclusionGuard,
    fetch::yield_once,
    handle::{Anchor, Bookmark, CacheHandle, Page},
    id::{PageId, SizeClass, is_swizzled},
    options::{Admission, CacheOptions},
    traits::{Layout, Store},
    values::{ValueCache, ValueCounters, ValueHandle},
    write_back::look_again,
};

/// The snippets of the guide's chapter compile and run.
#[cfg(doctest)]
#[doc = include_str!("../../docs/src/embedding.md")]
struct Guide;

/// Parts that have models and benches of their own; no part of the interface.
#[doc(hidden)]
pub mod internals {
    pub use crate::{
        cooling::{Cooled, CoolingMap},
        frame_lock::{FrameLock, Version, WAITERS_MAX, Waiters},
    };
}
