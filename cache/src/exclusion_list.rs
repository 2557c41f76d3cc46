//! Which subtrees are excluded, and which pages could be in them unseen: see [`crate::exclusion`].

use crate::{
    cooling::Cooled,
    id::PageId,
    sync::{AtomicU64, Mutex, MutexGuard, lock},
};

/// Says of a page's words whether it is below a page that is excluded.
pub(crate) type IsBelow = Box<dyn Fn(&[AtomicU64]) -> bool + Send>;

/// The list of unlinked pages is pruned when it gets longer than this, and than twice what was left the last time.
pub(crate) const UNLINKED_MIN: usize = 64;

/// A page that is excluded.
pub(crate) struct Excluded {
    /// The frame of its entry.
    pub(crate) index: u32,
    pub(crate) page: PageId,
    /// The frame that is pinned: where the link to the page is.
    pub(crate) parent: u32,
    pub(crate) is_below: IsBelow,
    /// Cooling pages below that were about to be evicted and could be neither evicted nor rescued.
    pub(crate) left_cooling: Vec<(PageId, Cooled)>,
}

#[derive(Default)]
pub(crate) struct Lists {
    pub(crate) unlinked: Vec<(u32, PageId)>,
    pub(crate) prune_at: usize,
    pub(crate) excluded: Vec<Excluded>,
}

/// What the threads of a cache know of pages that are excluded.
pub(crate) struct Exclusions {
    pub(crate) is_on: bool,
    lists: Mutex<Lists>,
}

impl Exclusions {
    pub(crate) fn new(is_on: bool) -> Self {
        Self { is_on, lists: Mutex::default() }
    }

    pub(crate) fn lists(&self) -> MutexGuard<'_, Lists> {
        lock(&self.lists)
    }
}
