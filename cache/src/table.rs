//! The mapping table: which page is in which frame. Consulted where no swizzled link leads: on a miss, and to get at a
//! cooling page.
//!
//! A page's entry is there from before its fetch is posted until after its write-back has completed, so two tasks never
//! fetch one page at once, and nobody fetches what is not written yet. An entry is a frame's number; the page's id is in the
//! frame. Each shard has a lock of its own, under which nothing but the table and a few words of frames is touched, and
//! the wakers of those who wait for a fetch.

use std::task::Waker;

use hashbrown::HashTable;

use crate::{
    arena::Arena,
    frame::{Frame, NONE, State},
    frame_lock::Version,
    id::PageId,
    mix::mix,
    sync::{AtomicU64, Mutex, MutexGuard, Ordering, Step, is_left_out, lock},
};

/// Entries of a shard on average, and the buckets it is made with. hashbrown cleans up after removed entries without growing
/// as long as fewer than 7 in 16 buckets are used: a shard would have to be five standard deviations above the average.
const SHARD_ENTRIES: usize = 3300;
const SHARD_BUCKETS: usize = 8192;
/// A bucket's control byte and entry.
const BUCKET_BYTES: usize = 1 + size_of::<u32>();

#[derive(Debug, Default)]
struct Shard {
    frames: HashTable<u32>,
    waiters: Vec<(PageId, Waker)>,
}

#[derive(Debug)]
pub(crate) struct Table {
    shards: Box<[Mutex<Shard>]>,
    /// Bytes that shards have grown by.
    grown: AtomicU64,
}

/// What the table knows of a page.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Found {
    Absent,
    /// Being fetched: wait for it.
    Loading,
    /// Here, and nobody changes it.
    Here {
        frame: u32,
        version: Version,
        state: State,
    },
    /// Here, but locked for a moment.
    Busy,
}

const fn hash_of(page: PageId) -> u64 {
    mix(page.get())
}

impl Table {
    /// For about `entries` pages.
    pub(crate) fn new(entries: usize) -> Self {
        let (shards, buckets) = Self::shape(entries);
        let shard = || Mutex::new(Shard { frames: HashTable::with_capacity(buckets * 7 / 8), waiters: Vec::new() });
        Self { shards: (0..shards).map(|_| shard()).collect(), grown: AtomicU64::new(0) }
    }

    fn shape(entries: usize) -> (usize, usize) {
        match entries.div_ceil(SHARD_ENTRIES) {
            // A few spare entries, for a table so small that its count varies much.
            0 | 1 => (1, ((entries + 8) * 16 / 7).next_power_of_two().clamp(16, SHARD_BUCKETS)),
            shards => (shards, SHARD_BUCKETS),
        }
    }

    pub(crate) fn bytes_for(entries: usize) -> usize {
        let (shards, buckets) = Self::shape(entries);
        shards * (buckets * BUCKET_BYTES + 16 + size_of::<Mutex<Shard>>())
    }

    /// Bytes that a table for about `usual` pages grows by, as good as surely at most, until it holds `entries`: they are more if
    /// pages are smaller than the usual ones.
    pub(crate) fn growth_for(usual: usize, entries: usize) -> usize {
        let (shards, buckets) = Self::shape(usual);
        if entries <= usual {
            return 0;
        }
        let average = entries.div_ceil(shards);
        // Five standard deviations, as `SHARD_BUCKETS` leaves room for; a single shard has all.
        let most = if shards == 1 { average + 8 } else { average + 5 * average.isqrt() };
        shards * BUCKET_BYTES * (most * 16 / 7).next_power_of_two().saturating_sub(buckets)
    }

    /// Bytes beyond what [`Table::bytes_for`] said.
    pub(crate) fn grown_bytes(&self) -> usize {
        self.grown.load(Ordering::Relaxed) as usize
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // hashbrown uses the top bits and the low ones.
        lock(&self.shards[((((hash >> 16) & 0xffff_ffff) * self.shards.len() as u64) >> 32) as usize])
    }

    /// Looks a page up. A bypass page gets one more user. With `waker`, waits if it is being fetched: the waker is used when
    /// the fetch ends, well or not.
    pub(crate) fn find(&self, arena: &Arena, page: PageId, waker: Option<&Waker>) -> Found {
        let hash = hash_of(page);
        let mut shard = self.shard(hash);
        let Some(&index) = shard.frames.find(hash, |&index| arena.frame(index).page() == Some(page)) else {
            return Found::Absent;
        };
        let frame = arena.frame(index);
        if frame.state() == State::Loading {
            if let Some(waker) = waker {
                if is_left_out(Step::WakerUnderLock) {
                    drop(shard);
                    shard = self.shard(hash);
                }
                // A waiter may be polled often before it is woken.
                let is_noted = |(other, noted): &(PageId, Waker)| *other == page && noted.will_wake(waker);
                if !shard.waiters.iter().any(is_noted) {
                    shard.waiters.push((page, waker.clone()));
                }
            }
            return Found::Loading;
        }
        let Some(version) = frame.lock.read() else { return Found::Busy };
        let state = frame.state();
        if !frame.lock.validate(version) {
            return Found::Busy;
        }
        if state == State::Bypass {
            frame.set_users(frame.users() + 1);
        }
        Found::Here { frame: index, version, state }
    }

    /// Whether a page has an entry.
    pub(crate) fn contains(&self, arena: &Arena, page: PageId) -> bool {
        let hash = hash_of(page);
        self.shard(hash).frames.find(hash, |&index| arena.frame(index).page() == Some(page)).is_some()
    }

    /// Enters a page that is going to be in `index`, whose frame says so already; false if it is there.
    pub(crate) fn insert(&self, arena: &Arena, page: PageId, index: u32) -> bool {
        let hash = hash_of(page);
        let mut shard = self.shard(hash);
        if shard.frames.find(hash, |&other| other != index && arena.frame(other).page() == Some(page)).is_some() {
            return false;
        }
        let before = shard.frames.allocation_size();
        shard.frames.insert_unique(hash, index, |&index| arena.frame(index).page().map_or(0, hash_of));
        let grown = shard.frames.allocation_size().saturating_sub(before);
        if grown != 0 {
            self.grown.fetch_add(grown as u64, Ordering::Relaxed);
        }
        true
    }

    /// Removes the entry of a page that is in `index`, if it is there.
    pub(crate) fn remove(&self, page: PageId, index: u32) {
        let hash = hash_of(page);
        let mut shard = self.shard(hash);
        if let Ok(entry) = shard.frames.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
    }

    /// Wakes all who wait for the fetch of a page.
    pub(crate) fn wake(&self, page: PageId) {
        let woken: Vec<Waker> = {
            let mut shard = self.shard(hash_of(page));
            if shard.waiters.is_empty() {
                return;
            }
            shard.waiters.extract_if(.., |(other, _)| *other == page).map(|(_, waker)| waker).collect()
        };
        woken.into_iter().for_each(Waker::wake);
    }

    /// One user of a bypass page less; if it was the last one and `leave` agrees, the entry goes. True if it went.
    pub(crate) fn leave(&self, frame: &Frame, page: PageId, index: u32, leave: impl FnOnce() -> bool) -> bool {
        let hash = hash_of(page);
        let mut shard = self.shard(hash);
        frame.set_users(frame.users() - 1);
        if frame.users() != 0 || !leave() {
            return false;
        }
        if let Ok(entry) = shard.frames.find_entry(hash, |&other| other == index) {
            entry.remove();
        }
        true
    }

    /// Every frame that the table knows, shard by shard.
    pub(crate) fn frames(&self) -> Vec<u32> {
        let mut all = Vec::new();
        for shard in &self.shards {
            all.extend(lock(shard).frames.iter().copied().filter(|&index| index != NONE));
        }
        all
    }
}
