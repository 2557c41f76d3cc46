//! What loom models reach beyond the public interface: parts of the cache, steps that it takes when it needs room, and
//! steps left out.

pub use crate::sync::Step;
use crate::{
    arena,
    cache::{FRAME_BYTES, PageCache},
    change::NewPage,
    cool::Cooling,
    cooling::CoolingMap,
    error::Conflict,
    frame::{Frame, State},
    frequency::sketch_counters,
    handle::{CacheHandle, Page, Pinned},
    id::{PageId, SizeClass},
    options::{Admission, CacheOptions},
    sync::{self, Arc, AtomicU64, Ordering},
    table::Table,
    traits::{Layout, Store},
};

/// Has the calling test's models leave a step out, or none.
pub fn leave_out(step: Option<Step>) {
    sync::leave_out(step);
}

/// A cache for so many pages of 64 bytes (an even number) and up to three handles, that admits every page.
pub fn options(frames: usize) -> CacheOptions {
    let mut options = CacheOptions::new(0);
    options.page_bytes = 64;
    options.admission = Admission::Always;
    options.sample_size = 1;
    options.handles_max = 3;
    let cooling = (frames as f64 * options.cooling_share) as usize;
    let bookkeeping = Table::bytes_for(frames) + CoolingMap::bytes_for(cooling) + sketch_counters(frames);
    options.bytes = options.handles_max * 64 + bookkeeping + frames * (options.page_bytes + FRAME_BYTES);
    options
}

/// Where a cached page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The frame's number.
    pub frame: u32,
    /// Whether it cools.
    pub is_cooling: bool,
    /// Whether the store has another version of it.
    pub is_dirty: bool,
    /// Swizzled links in it.
    pub children: u32,
    /// What is in the frame of the page that has the swizzled link to it.
    pub parent: Option<PageId>,
}

impl<L: Layout> PageCache<L> {
    /// Every frame that says it holds this page, for looking at the end.
    pub fn places(&self, page: PageId) -> Vec<Place> {
        let place = |index: u32| {
            let frame = self.frame(index);
            let (state, children) = (frame.state(), frame.children());
            let is_its =
                frame.page() == Some(page) && matches!(state, State::Resident | State::Cooling | State::Bypass);
            is_its.then(|| Place {
                frame: index,
                is_cooling: state == State::Cooling,
                is_dirty: frame.is_dirty(),
                children,
                parent: self.frame(frame.parent()).page(),
            })
        };
        self.frame_numbers().filter_map(place).collect()
    }

    /// A transfer that ends when the model says so.
    pub fn begin(&self) {
        self.begin_transfer();
    }

    /// Ends a transfer.
    pub fn end(&self) {
        self.end_transfer();
    }
}

impl<S: Store, L: Layout> Page<'_, S, L> {
    /// Where it was found.
    pub fn frame(&self) -> u32 {
        self.index()
    }

    /// [`Page::into_use`] of one that may be no bypass page.
    pub fn try_into_use(self) -> Option<(u32, PageId)> {
        self.is_bypass().then(|| self.into_use())
    }

    /// A bypass page's use, to be ended by [`CacheHandle::end_use`], on whatever thread.
    pub fn into_use(self) -> (u32, PageId) {
        assert!(self.is_bypass(), "only bypass pages have users");
        let used = (self.index(), self.id);
        std::mem::forget(self);
        used
    }
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// Cools the page in a frame, if it can cool. What has to be written first is written.
    pub fn cool_frame(&self, index: u32) -> bool {
        let frame = self.cache().frame(index);
        let Some(version) = frame.lock.read() else { return false };
        match self.cool(index, version) {
            Cooling::Done => true,
            Cooling::Dirty(snapshot) => {
                self.write_behind(vec![snapshot]);
                false
            }
            Cooling::Refused => false,
        }
    }

    /// Cools a page as a sample of the cache would that drew this frame.
    pub fn cool_below(&self, index: u32) -> bool {
        self.delegate(index).is_some_and(|(index, version)| matches!(self.cool(index, version), Cooling::Done))
    }

    /// Evicts a page out of the cooling map.
    pub fn evict_any(&self) -> bool {
        self.cache().cooling.pop(0).is_some_and(|cooled| self.evict_one(cooled).is_some())
    }

    /// Takes something out of the map, and evicts it if it can be; false if the map is empty.
    pub fn pop_any(&self) -> bool {
        self.cache().cooling.pop(0).map(|cooled| self.evict_one(cooled)).is_some()
    }

    /// A user of a bypass page leaves.
    pub fn end_use(&self, (index, page): (u32, PageId)) {
        self.leave(index, page);
    }

    /// The cache, for looking at the end.
    pub fn shared(&self) -> Arc<PageCache<L>> {
        Arc::clone(&self.0.cache)
    }

    /// Waits until a transfer has ended.
    pub async fn room(&self) {
        self.wait_for_room().await;
    }

    /// Pins a page for as long as the guard lives.
    ///
    /// # Errors
    /// If it has changed or gone.
    pub fn keep(&self, page: &Page<'_, S, L>) -> Result<PinGuard<'_, S, L>, Conflict> {
        self.pin(page).map(PinGuard)
    }
}

impl<S: Store, L: Layout> NewPage<'_, S, L> {
    /// The frame that was reserved, which is then never given back.
    pub fn frame_for_good(self) -> u32 {
        let index = self.taken.index;
        std::mem::forget(self.taken);
        index
    }
}

/// A pinned page.
#[allow(missing_debug_implementations)]
pub struct PinGuard<'a, S: Store, L: Layout>(#[allow(dead_code, reason = "kept for its drop")] Pinned<'a, S, L>);

/// A frame by itself, with its page's words.
#[derive(Debug)]
pub struct Spot {
    frame: Frame,
    body: Box<[AtomicU64]>,
}

impl Spot {
    /// A free one, with `words` words.
    pub fn new(words: usize) -> Self {
        let spot = Self { frame: Frame::default(), body: (0..words).map(|_| AtomicU64::new(0)).collect() };
        spot.frame.found(SizeClass::from_index(0), 0);
        spot
    }

    /// Takes it, if it is free.
    pub fn claim(&self) -> bool {
        self.frame.claim()
    }

    /// Gives it back, taken.
    pub fn give_back(&self) {
        self.frame.lock.retire();
        self.frame.set_state(State::Free);
    }

    /// Puts a page in, by the one who has taken it.
    pub fn fill(&self, page: &[u64]) {
        arena::fill(&self.body, page);
        self.frame.set_state(State::Resident);
        self.frame.lock.unlock();
    }

    /// Takes the page out, if nobody uses it; the caller has the frame then.
    pub fn empty(&self) -> bool {
        let is_empty = self.frame.lock.try_lock().is_some();
        if is_empty {
            self.frame.set_state(State::Held);
        }
        is_empty
    }

    /// The page's words, if they are all of one moment.
    pub fn read(&self) -> Option<Vec<u64>> {
        let version = self.frame.lock.read()?;
        let words = self.body.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        self.frame.lock.validate(version).then_some(words)
    }
}
