//! A cached page, to be read.

use std::{cell::Cell, fmt, ops::Range};

use super::CacheHandle;
use crate::{
    error::Conflict,
    frame::Frame,
    frame_lock::Version,
    id::{Link, PageId},
    sync::AtomicU64,
    traits::{Layout, Store},
};

/// A cached page, as it was when it was looked up. Holding one does not keep others from changing the page, nor the cache
/// from evicting it: [`Page::read`] tells.
// In this order: what is known from the link alone does not share 16 bytes, in which pages are moved, with what comes from
// the frame, so that a search need not wait for the frame's line.
#[repr(C)]
pub struct Page<'a, S: Store, L: Layout> {
    pub(crate) handle: &'a CacheHandle<S, L>,
    pub(crate) frame: &'a Frame,
    pub(crate) words: &'a [AtomicU64],
    pub(super) stamp: Stamp,
    pub(crate) id: PageId,
}

/// A page's version, and in the bits that versions leave its level:8 and whether it is a bypass page:1. In one word, because a
/// page is moved often.
pub(super) struct Stamp(Cell<u64>);

const _: () = assert!(Version::OTHER_BITS & 0x1ff == 0x1ff);

impl Stamp {
    #[inline]
    pub(super) fn new(version: Version, level: u8, is_bypass: bool) -> Self {
        Self(Cell::new(version.word() | u64::from(level) << 1 | u64::from(is_bypass)))
    }

    #[inline]
    fn version(&self) -> Version {
        Version::from_word(self.0.get())
    }

    #[inline]
    fn set_version(&self, version: Version) {
        self.0.set(self.0.get() & Version::OTHER_BITS | version.word());
    }

    #[inline]
    fn level(&self) -> u8 {
        (self.0.get() >> 1) as u8
    }

    #[inline]
    fn is_bypass(&self) -> bool {
        self.0.get() & 1 != 0
    }
}

/// Where to come back to: see [`CacheHandle::back_to`]. Words that mean something to one cache only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bookmark(pub [u64; 3]);

impl<S: Store, L: Layout> Page<'_, S, L> {
    /// A way back to it, unless it may go as soon as this is dropped.
    pub fn bookmark(&self) -> Option<Bookmark> {
        let place = || u64::from(self.handle.cache().salt.mark()) << 32 | u64::from(self.index());
        let bookmark = || Bookmark([place(), self.version().word(), self.id.get()]);
        (!self.is_bypass()).then(bookmark)
    }

    /// Its id.
    pub fn id(&self) -> PageId {
        self.id
    }

    /// Its level, as its layout states it.
    #[inline]
    pub fn level(&self) -> u8 {
        self.stamp.level()
    }

    /// The frame's number.
    pub(crate) fn index(&self) -> u32 {
        self.handle.cache().arena.index_of(self.frame)
    }

    /// Whether this is a user of a bypass page.
    #[inline]
    pub(crate) fn is_bypass(&self) -> bool {
        self.stamp.is_bypass()
    }

    /// The version at which it was looked up, or to which its user has changed it since.
    #[inline]
    pub(crate) fn version(&self) -> Version {
        self.stamp.version()
    }

    #[inline]
    pub(crate) fn set_version(&self, version: Version) {
        self.stamp.set_version(version);
    }

    /// Reads from the page. `f` may see words of different moments and must cope with any; its result is handed out only
    /// if they were all of one moment. Link words may be swizzled: they are for [`CacheHandle::follow`] only.
    ///
    /// # Errors
    /// If the page is not as it was when it was looked up: [`Conflict::Moved`] if the cache has moved it, [`Conflict::Changed`]
    /// if its contents were changed.
    #[inline(always)]
    pub fn read<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> Result<R, Conflict> {
        let result = f(self.words);
        if self.is_current() { Ok(result) } else { Err(self.conflict()) }
    }

    /// The same page once more; `None` if it is a bypass page, which counts its users. For calls on the way of a miss: what is
    /// handed to one lives in memory, on the way of a hit, too.
    #[inline(always)]
    pub(super) fn copy(&self) -> Option<Self> {
        let Self { handle, frame, words, ref stamp, id } = *self;
        (!self.is_bypass()).then(|| Self { handle, frame, words, stamp: Stamp(Cell::new(stamp.0.get())), id })
    }

    /// Why it is not current.
    // By what it has, not by itself: see `copy`.
    #[inline(always)]
    pub(crate) fn conflict(&self) -> Conflict {
        conflict(self.frame, self.version())
    }

    /// Has the processor fetch these words, as far as the page has them.
    #[inline]
    pub fn prefetch(&self, words: Range<usize>) {
        crate::arena::prefetch_lines(self.words, words);
    }

    /// Looks at the page as it is now, whatever it is now: for what is used only after [`Page::read`] has proved it.
    #[inline]
    pub fn peek<R>(&self, f: impl FnOnce(&[AtomicU64]) -> R) -> R {
        f(self.words)
    }

    /// Whether it is as it was when it was looked up.
    #[inline]
    pub fn is_current(&self) -> bool {
        self.frame.lock.validate(self.version())
    }

    /// Whether a link word, read from the page above, leads to this page.
    pub fn is_target_of(&self, word: u64) -> bool {
        match self.handle.cache().salt.link(word) {
            Link::Frame { frame, .. } => frame == self.index(),
            Link::Page(page) => page == self.id,
            Link::Null => false,
        }
    }
}

impl<S: Store, L: Layout> fmt::Debug for Page<'_, S, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("id", &self.id).field("level", &self.level()).finish_non_exhaustive()
    }
}

impl<S: Store, L: Layout> Drop for Page<'_, S, L> {
    // As short as can be: where it is not inlined, also on the way of a panic, the page has to be in memory.
    #[inline(always)]
    fn drop(&mut self) {
        if self.is_bypass() {
            leave(self.handle, self.frame);
        }
    }
}

#[cold]
#[inline(never)]
fn conflict(frame: &Frame, version: Version) -> Conflict {
    if frame.lock.is_unchanged_since(version) { Conflict::Moved } else { Conflict::Changed }
}

#[cold]
#[inline(never)]
fn leave<S: Store, L: Layout>(handle: &CacheHandle<S, L>, frame: &Frame) {
    // A bypass page's frame keeps its page's id until the last user has left.
    if let Some(id) = frame.page() {
        handle.leave(handle.cache().arena.index_of(frame), id);
    }
}
