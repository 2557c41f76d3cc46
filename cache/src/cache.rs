//! What the threads of a cache share.

use std::{fmt, ops::Range, task::Waker};

use crate::{
    arena::{Arena, Sure},
    cooling::CoolingMap,
    counters::{CounterCells, Counters},
    error::OptionsError,
    exclusion_list::Exclusions,
    frame::{Frame, NONE},
    frame_lock::Waiters,
    frequency::Frequencies,
    id::{Salt, SizeClass, UNIT_BYTES, UNITS_MAX},
    options::{Admission, CacheOptions},
    sync::{Arc, AtomicU32, AtomicU64, Mutex, Ordering, Step, fence, is_left_out, lock},
    table::Table,
    traits::Layout,
};

/// Bodies of up to so many units are handed out in blocks of so many, larger ones in blocks of the largest class. (A model can
/// afford two pages of 64 bytes.)
const SMALL_UNITS: usize = if cfg!(loom) { 2 } else { 4096 / UNIT_BYTES };
const LARGE_UNITS: usize = SizeClass::MAX.units();
/// The least cache that takes large bodies.
const LARGE_BYTES_MIN: usize = 1 << 20;
pub(crate) const FRAME_BYTES: usize = size_of::<Frame>();
/// The least that a cache can work with: some frames for each of a few operations.
const BYTES_MIN: usize = if cfg!(loom) { 0 } else { 64 << 10 };
/// The cache itself, and allocations of which there are few.
const FIXED_BYTES: usize = if cfg!(loom) { 0 } else { 4096 };

/// Where bodies come from: small ones, and large ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Region {
    Small = 0,
    Large = 1,
}

impl Region {
    pub(crate) const fn of(class: SizeClass) -> Self {
        if class.units() <= SMALL_UNITS { Self::Small } else { Self::Large }
    }

    /// Units of a block.
    pub(crate) const fn block_units(self) -> usize {
        match self {
            Self::Small => SMALL_UNITS,
            Self::Large => LARGE_UNITS,
        }
    }
}

/// Frames that have their bodies in one block.
pub(crate) const fn frames_of_block(class: SizeClass) -> usize {
    Region::of(class).block_units() / class.units()
}

/// What a cache uses its memory for, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Memory {
    /// What was asked for.
    pub limit: usize,
    /// Bodies of pages, handed out so far.
    pub pages: usize,
    /// Frames, handed out so far.
    pub frames: usize,
    /// Mapping table, cooling map, sketch and the rest.
    pub bookkeeping: usize,
}

impl Memory {
    /// All of it.
    pub const fn used(&self) -> usize {
        self.pages + self.frames + self.bookkeeping
    }
}

/// Bodies and frames that were not handed out yet, or were given back.
#[derive(Debug, Default)]
struct Room {
    /// Units that were never used, of each region.
    unused: [Range<usize>; 2],
    next_frame: u32,
    used_bytes: usize,
    /// First frames of blocks that lost their body, by class: frames never change their class.
    spare_groups: [Vec<u32>; SizeClass::COUNT],
    /// Bodies without frames, of each region: first units.
    spare_blocks: [Vec<u32>; 2],
    /// Free frames that no handle keeps.
    pool: [Vec<u32>; SizeClass::COUNT],
}

/// The handles of a cache.
#[derive(Debug)]
struct Handles {
    free_numbers: Vec<u32>,
    live: Vec<(u32, Arc<CounterCells>)>,
    ended: Counters,
}

impl Handles {
    fn new(max: usize) -> Self {
        Self { free_numbers: (1..=max as u32).rev().collect(), live: Vec::new(), ended: Counters::default() }
    }
}

/// A cache of pages, shared by the threads of a process: see the [crate](crate).
pub struct PageCache<L> {
    pub(crate) layout: L,
    pub(crate) options: CacheOptions,
    pub(crate) salt: Salt,
    pub(crate) arena: Arena,
    pub(crate) table: Table,
    pub(crate) cooling: CoolingMap,
    pub(crate) frequency: Frequencies,
    pub(crate) waiters: Waiters,
    pub(crate) exclusions: Exclusions,
    room: Mutex<Room>,
    frame_bytes_max: usize,
    frames_usual: usize,
    bookkeeping_bytes: usize,
    /// Frames handed out are 1 to this, inclusive.
    frames_used: AtomicU32,
    is_full: AtomicU32,
    /// Fetches and write-backs under way, all of which will make somebody's frame available.
    transfers: AtomicU32,
    room_waiters: AtomicU32,
    /// Flushes that have begun, and those of them that have not ended.
    flushes: AtomicU32,
    flushing: AtomicU32,
    /// Frames held by bypass pages, which nobody can evict.
    pub(crate) bypass_frames: AtomicU32,
    for_room: Mutex<Vec<Waker>>,
    last_write_error: Mutex<Option<String>>,
    has_write_error: AtomicU32,
    handles: Mutex<Handles>,
    seed: AtomicU64,
}

impl<L> fmt::Debug for PageCache<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageCache").field("options", &self.options).finish_non_exhaustive()
    }
}

impl<L: Layout> PageCache<L> {
    /// A cache with these options for pages of this layout. Reserves address space; memory is used as pages come.
    ///
    /// # Errors
    /// If an option cannot work, or the system refuses the address space.
    pub fn new(layout: L, options: CacheOptions) -> Result<Arc<Self>, OptionsError> {
        options.check()?;
        let shape = Shape::of(&options)?;
        // Frames keep their class, so all the memory may come to be frames but for a few bodies.
        let frames =
            if cfg!(loom) { shape.frames.next_multiple_of(SMALL_UNITS) } else { shape.frame_bytes / FRAME_BYTES } + 1;
        let units = shape.frame_bytes / UNIT_BYTES;
        let small_units = units / SMALL_UNITS * SMALL_UNITS;
        // At a huge page.
        let large_at = small_units.next_multiple_of(if cfg!(loom) { 1 } else { (2 << 20) / UNIT_BYTES });
        let large_units = if takes_large(&options) { units / LARGE_UNITS * LARGE_UNITS } else { 0 };
        let unused = [0..small_units, large_at..large_at + large_units];
        let usual = &unused[options.page_class().map_or(Region::Small, Region::of) as usize];
        let sure_units = (shape.frames * options.page_bytes / UNIT_BYTES).min(usual.len());
        let sure = Sure { frames: shape.frames, units: usual.start..usual.start + sure_units };
        let memory = |source| OptionsError::Memory { bytes: options.bytes, source };
        let arena = Arena::new(frames, unused[1].end.max(small_units), &sure).map_err(memory)?;
        Ok(Arc::new(Self {
            layout,
            salt: Salt::new(),
            arena,
            table: Table::new(shape.frames),
            cooling: CoolingMap::new(shape.cooling),
            frequency: Frequencies::new(shape.frames, options.halving_period.saturating_mul(shape.frames as u64)),
            waiters: Waiters::new(options.handles_max),
            exclusions: Exclusions::new(options.excludes_subtrees),
            room: Mutex::new(Room { next_frame: 1, unused, ..Room::default() }),
            frame_bytes_max: shape.frame_bytes,
            frames_usual: shape.frames,
            bookkeeping_bytes: shape.bookkeeping,
            frames_used: AtomicU32::new(0),
            is_full: AtomicU32::new(0),
            transfers: AtomicU32::new(0),
            room_waiters: AtomicU32::new(0),
            flushes: AtomicU32::new(0),
            flushing: AtomicU32::new(0),
            bypass_frames: AtomicU32::new(0),
            for_room: Mutex::default(),
            last_write_error: Mutex::default(),
            has_write_error: AtomicU32::new(0),
            handles: Mutex::new(Handles::new(options.handles_max)),
            seed: AtomicU64::new(1),
            options,
        }))
    }

    /// What the memory is used for.
    pub fn memory(&self) -> Memory {
        let room = lock(&self.room);
        let frames = room.next_frame as usize * FRAME_BYTES;
        Memory {
            limit: self.options.bytes,
            pages: room.used_bytes.saturating_sub(frames),
            frames,
            bookkeeping: self.bookkeeping_bytes + self.table.grown_bytes(),
        }
    }

    /// The counts of all handles, also of those that have ended. The counts of handles that are in use are a little late.
    pub fn counters(&self) -> Counters {
        let handles = lock(&self.handles);
        let mut total = handles.ended;
        handles.live.iter().for_each(|(_, counters)| total += counters.snapshot());
        total
    }

    /// Whether pages can be excluded: [`CacheOptions::excludes_subtrees`].
    pub fn excludes_subtrees(&self) -> bool {
        self.options.excludes_subtrees
    }

    /// How many pages are cached, on their way from the store, or excluded.
    pub fn len(&self) -> usize {
        self.table.frames().len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a page that comes needs the place of another.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full.load(Ordering::Relaxed) != 0
    }

    /// Whether bypass pages hold so many frames that a page is rather admitted, for then it can be evicted.
    pub(crate) fn has_many_bypass_frames(&self) -> bool {
        self.bypass_frames.load(Ordering::Relaxed) > self.frames_used.load(Ordering::Relaxed) / 8
    }

    pub(crate) fn counts_uses(&self) -> bool {
        self.options.admission == Admission::Frequency
    }

    pub(crate) fn frame(&self, index: u32) -> &Frame {
        self.arena.frame(index)
    }

    /// A frame that was handed out, chosen at random; `None` while there are none.
    pub(crate) fn any_frame(&self, random: u32) -> Option<u32> {
        let used = self.frames_used.load(Ordering::Acquire);
        (used != 0).then(|| 1 + ((u64::from(random) * u64::from(used)) >> 32) as u32)
    }

    pub(crate) fn frame_numbers(&self) -> std::ops::RangeInclusive<u32> {
        1..=self.frames_used.load(Ordering::Acquire)
    }

    /// Moves free frames of a class to `list`: some that others gave back, or those of a new block, if there is memory.
    pub(crate) fn more_frames(&self, class: SizeClass, list: &mut Vec<u32>) -> bool {
        let mut room = lock(&self.room);
        let pool = &mut room.pool[class.index()];
        if !pool.is_empty() {
            let from = pool.len() - pool.len().min(8);
            list.extend(pool.drain(from..));
            return true;
        }
        let region = Region::of(class);
        let block_bytes = region.block_units() * UNIT_BYTES;
        let count = frames_of_block(class);
        let (group, group_bytes) = match room.spare_groups[class.index()].pop() {
            Some(group) => (group, 0),
            None => (NONE, count * FRAME_BYTES),
        };
        // The table grows when all frames have long been handed out: what it will grow by is kept for it. Frames that have lost
        // their body are not in it.
        let spare: usize = (0..SizeClass::COUNT)
            .map(|index| room.spare_groups[index].len() * frames_of_block(SizeClass::from_index(index)))
            .sum();
        let frames = room.next_frame as usize - 1 - spare + if group == NONE { count } else { 0 };
        let growth = Table::growth_for(self.frames_usual, frames).max(self.table.grown_bytes());
        let limit = self.frame_bytes_max.saturating_sub(growth);
        let has_frames = group != NONE || room.next_frame as usize + count <= self.arena.frame_count();
        let has_units = !room.spare_blocks[region as usize].is_empty() || !room.unused[region as usize].is_empty();
        if room.used_bytes + block_bytes + group_bytes > limit || !has_frames || !has_units {
            if group != NONE {
                room.spare_groups[class.index()].push(group);
            }
            self.is_full.store(1, Ordering::Relaxed);
            // The last block may have left more unused than what is short below.
            if self.counts_uses() {
                self.frequency.start();
            }
            return false;
        }
        room.used_bytes += block_bytes + group_bytes;
        if room.used_bytes > limit - limit / 16 && self.counts_uses() {
            self.frequency.start();
        }
        let unit = match room.spare_blocks[region as usize].pop() {
            Some(unit) => unit,
            None => {
                let unused = &mut room.unused[region as usize];
                unused.start += region.block_units();
                (unused.start - region.block_units()) as u32
            }
        };
        let is_new = group == NONE;
        let first = if is_new { room.next_frame } else { group };
        if is_new {
            room.next_frame += count as u32;
        }
        for number in 0..count as u32 {
            let frame = self.frame(first + number);
            frame.found(class, unit + number * class.units() as u32);
            list.push(first + number);
        }
        if is_new {
            self.frames_used.store(room.next_frame - 1, Ordering::Release);
        }
        true
    }

    /// Gives a block's body to a page of another class. Its frames, all taken by the caller, keep waiting for another one.
    pub(crate) fn give_up_block(&self, first: u32, class: SizeClass, other: SizeClass) {
        let (region, unit) = (Region::of(class), self.frame(first).unit());
        if region != Region::of(other) {
            self.arena.release(unit as usize..unit as usize + region.block_units());
        }
        let mut room = lock(&self.room);
        room.spare_groups[class.index()].push(first);
        room.spare_blocks[region as usize].push(unit);
        room.used_bytes -= region.block_units() * UNIT_BYTES;
    }

    /// The largest pages that the cache takes, in bytes.
    pub fn page_bytes_max(&self) -> usize {
        if takes_large(&self.options) { LARGE_UNITS * UNIT_BYTES } else { SMALL_UNITS * UNIT_BYTES }
    }

    /// Puts free frames where every handle finds them.
    pub(crate) fn pool_frames(&self, class: SizeClass, frames: impl IntoIterator<Item = u32>) {
        let mut room = lock(&self.room);
        let frames_made = room.next_frame as usize;
        let pool = &mut room.pool[class.index()];
        pool.extend(frames);
        // Whoever empties a block in vain lists its free frames once more, for they may be in no list.
        if pool.len() > 2 * frames_made {
            pool.sort_unstable();
            pool.dedup();
        }
        drop(room);
        self.wake_for_room();
    }

    /// Whether somebody waits for a frame.
    pub(crate) fn is_awaited(&self) -> bool {
        self.room_waiters.load(Ordering::Acquire) != 0
    }

    pub(crate) fn await_room(&self, waker: &Waker) {
        lock(&self.for_room).push(waker.clone());
        self.room_waiters.store(1, Ordering::Release);
        // The caller goes on to look at the transfers: it sees that the last one has ended, or that one sees it wait.
        if !is_left_out(Step::RoomFence) {
            fence(Ordering::SeqCst);
        }
    }

    pub(crate) fn wake_for_room(&self) {
        if !self.is_awaited() {
            return;
        }
        let woken = {
            let mut waiting = lock(&self.for_room);
            self.room_waiters.store(0, Ordering::Release);
            std::mem::take(&mut *waiting)
        };
        woken.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn begin_transfer(&self) {
        self.transfers.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_transfer(&self) {
        self.transfers.fetch_sub(1, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        self.wake_for_room();
    }

    pub(crate) fn transfers(&self) -> u32 {
        self.transfers.load(Ordering::Acquire)
    }

    /// How many flushes have begun. Who asks under locks, after a fence, and is not told of a flush, is waited for by it.
    pub(crate) fn flushes(&self) -> u32 {
        self.flushes.load(Ordering::Acquire)
    }

    pub(crate) fn is_flushing(&self) -> bool {
        self.flushing.load(Ordering::Relaxed) != 0
    }

    /// And how many have begun with this one.
    pub(crate) fn begin_flush(&self) -> (Flushing<'_>, u32) {
        self.flushing.fetch_add(1, Ordering::Relaxed);
        let before = self.flushes.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        (Flushing(&self.flushing), before.wrapping_add(1))
    }

    pub(crate) fn note_write_error(&self, error: &dyn std::error::Error) {
        let error = error.to_string();
        let last = &mut *lock(&self.last_write_error);
        // Told once: a store that has no room refuses page after page.
        if last.as_ref() != Some(&error) {
            tracing::warn!(error, "the store refused a page; it stays cached and dirty");
            *last = Some(error);
            self.has_write_error.store(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn forget_write_error(&self) {
        if self.has_write_error.load(Ordering::Relaxed) != 0 {
            self.has_write_error.store(0, Ordering::Relaxed);
            *lock(&self.last_write_error) = None;
        }
    }

    pub(crate) fn last_write_error(&self) -> Option<String> {
        lock(&self.last_write_error).clone()
    }

    /// A number for one more handle, and its counters; `None` if there are enough.
    pub(crate) fn begin_handle(&self) -> Option<(u32, Arc<CounterCells>)> {
        let mut handles = lock(&self.handles);
        let number = handles.free_numbers.pop()?;
        let counters = Arc::<CounterCells>::default();
        handles.live.push((number, Arc::clone(&counters)));
        Some((number, counters))
    }

    pub(crate) fn end_handle(&self, number: u32) {
        let mut handles = lock(&self.handles);
        if let Some(at) = handles.live.iter().position(|live| live.0 == number) {
            let (_, counters) = handles.live.swap_remove(at);
            handles.ended += counters.snapshot();
            handles.free_numbers.push(number);
        }
    }

    /// A number that no handle has had, for those who do not care about seeds.
    pub fn any_seed(&self) -> u64 {
        self.seed.fetch_add(1, Ordering::Relaxed)
    }
}

/// Whether there is enough for bodies of the largest class.
fn takes_large(options: &CacheOptions) -> bool {
    options.bytes >= LARGE_BYTES_MIN
}

/// A flush under way.
pub(crate) struct Flushing<'a>(&'a AtomicU32);

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How the memory is divided.
struct Shape {
    /// Frames of usual pages that fit.
    frames: usize,
    /// Bytes for frames and bodies of any size.
    frame_bytes: usize,
    cooling: usize,
    bookkeeping: usize,
}

impl Shape {
    fn of(options: &CacheOptions) -> Result<Self, OptionsError> {
        let fixed = options.handles_max * 64 + FIXED_BYTES;
        let least = BYTES_MIN.max(4 * fixed);
        if options.bytes < least {
            let why = format!("{}; with {} handles it takes {least} at least", options.bytes, options.handles_max);
            return Err(OptionsError::Unusable { option: "bytes", why });
        }
        // Small and large bodies have units of their own.
        let most = UNITS_MAX / 2 * UNIT_BYTES - (2 << 20);
        if options.bytes > most {
            let why = format!("{}; at most {most} are possible", options.bytes);
            return Err(OptionsError::Unusable { option: "bytes", why });
        }
        if options.page_class().map(Region::of) == Some(Region::Large) && !takes_large(options) {
            let why = format!("{}; such pages take a cache of {LARGE_BYTES_MIN} bytes", options.page_bytes);
            return Err(OptionsError::Unusable { option: "page_bytes", why });
        }
        let with = |frames: usize| {
            let cooling = (frames as f64 * options.cooling_share) as usize;
            let sketch = crate::frequency::sketch_counters(frames);
            let bookkeeping = fixed + Table::bytes_for(frames) + CoolingMap::bytes_for(cooling) + sketch;
            (cooling, bookkeeping)
        };
        let mut frames = options.bytes / (options.page_bytes + FRAME_BYTES);
        loop {
            let (cooling, bookkeeping) = with(frames);
            if let Some(frame_bytes) = options.bytes.checked_sub(bookkeeping)
                && frames * (options.page_bytes + FRAME_BYTES) <= frame_bytes
            {
                if options.pages_max < frames {
                    let block = options.page_class().map_or(1, frames_of_block);
                    let frames = options.pages_max.next_multiple_of(block).min(frames);
                    let (cooling, bookkeeping) = with(frames);
                    let frame_bytes = frames * (options.page_bytes + FRAME_BYTES);
                    return Ok(Self { frames, frame_bytes, cooling, bookkeeping });
                }
                return Ok(Self { frames, frame_bytes, cooling, bookkeeping });
            }
            frames -= (frames / 1024).max(1);
        }
    }
}
