//! Making room: which page cools, and how a cooling page goes.
//!
//! *Sampling.* A few frames are drawn at random. One whose page has swizzled links hands the task down to a child at the
//! end of a random one of them, and so on (DEX, VLDB 2024, section 5.3), so a page stays while a page below it is cached.
//! Of those found, the least used is taken.
//!
//! *Cooling.* Under the page's lock and its parent's, both only tried: no pins, no swizzled links, and clean. A dirty page
//! is written first and cools when that is done. Then the parent's link is unswizzled and the page goes into the cooling
//! map, with a new version: from now on it is clean and nothing but the table leads to it.
//!
//! *Eviction.* The oldest page of a random bucket, if it is still cooling since that version: its entry goes, and its
//! frame is free.
//!
//! *Size classes.* When no page of the wanted size can go, blocks of another class are emptied and change hands, as many as
//! make up a block of this one.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use crate::{
    cache::{Region, frames_of_block},
    cooling::Cooled,
    counters::LEVELS,
    error::CacheError,
    fetch::{FrameGuard, yield_once},
    frame::{Frame, NONE, State},
    frame_lock::Version,
    handle::CacheHandle,
    id::{Link, SizeClass},
    sync::{Ordering, Spin, Step, fence, is_left_out},
    traits::{Layout, Store},
    write_back::Snapshot,
};

/// Random buckets looked at before more pages are cooled.
const PROBES: usize = 8;
/// Rounds of evicting and cooling before another class has to give memory.
const ROUNDS_MAX: u32 = 4;
/// Failed attempts, with other tasks run in between, before a caller is told that there is no room.
const TRIES_MAX: usize = 200;
/// And so many more, each with a look at every frame.
const SWEEPS_MAX: usize = 8;
/// Blocks of other classes looked at in one try, for each that is needed.
const BLOCKS_TRIED: usize = 32;

/// What became of an attempt to cool a page.
#[must_use]
pub(crate) enum Cooling<B> {
    /// It cools.
    Done,
    /// It is dirty: here is what to write first.
    Dirty(Snapshot<B>),
    /// Somebody needs it, or was faster.
    Refused,
}

/// What came of evicting and cooling.
struct Swap {
    /// Of [`PROBES`].
    empty_buckets: usize,
    has_cooled: bool,
    /// Whether something is on its way to the store.
    has_begun: bool,
}

/// What a look at all frames has come to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Swept {
    /// A frame of the size is free.
    Room,
    /// Pages are on their way to the store, after which there may be one.
    Writes,
    Nothing,
}

impl<S: Store, L: Layout> CacheHandle<S, L> {
    /// A frame for a page of this size. Suspends while all room is held by pages on their way.
    pub(crate) async fn take_frame(&self, class: SizeClass) -> Result<FrameGuard<'_, S, L>, CacheError<S::Error>> {
        let max = self.cache().page_bytes_max();
        if class.bytes() > max {
            return Err(CacheError::TooLarge { bytes: class.bytes(), max });
        }
        let (mut tries, mut rounds) = (0, 0);
        loop {
            if let Some(index) = self.pop_free(class) {
                return Ok(FrameGuard { handle: self, index });
            }
            if self.more_free(class) {
                continue;
            }
            let Swap { empty_buckets, has_cooled, has_begun } = self.swap(class);
            rounds += 1;
            if rounds < ROUNDS_MAX && (empty_buckets < PROBES || has_cooled) {
                continue;
            }
            rounds = 0;
            if self.reclaim(class) {
                continue;
            }
            if has_begun || self.cache().transfers() != 0 {
                self.wait_for_room().await;
            }
            tries += 1;
            if tries > TRIES_MAX {
                let swept = if tries > TRIES_MAX + SWEEPS_MAX { Swept::Nothing } else { self.sweep(class) };
                match swept {
                    // Before others take it.
                    Swept::Room => continue,
                    Swept::Writes => {}
                    Swept::Nothing => return Err(self.no_room(class, self.who_holds_room(class))),
                }
            }
            yield_once().await;
        }
    }

    /// A frame, if one is to be had at once.
    pub(crate) fn try_take_frame(&self, class: SizeClass) -> Option<FrameGuard<'_, S, L>> {
        let fits = class.bytes() <= self.cache().page_bytes_max();
        let mut index = self.pop_free(class);
        if index.is_none() && fits {
            if !self.more_free(class) {
                self.swap(class);
            }
            index = self.pop_free(class);
        }
        index.map(|index| FrameGuard { handle: self, index })
    }

    /// One out, one in; more if the cooling map runs low.
    fn swap(&self, class: SizeClass) -> Swap {
        let empty_buckets = self.evict(class);
        let mut dirty = Vec::new();
        let has_cooled = (0..=empty_buckets).fold(false, |any, _| self.cool_one(&mut dirty) | any);
        let has_begun = !dirty.is_empty();
        self.write_behind(dirty);
        Swap { empty_buckets, has_cooled, has_begun }
    }

    /// Waits until some transfer has ended, which may have made room.
    pub(crate) async fn wait_for_room(&self) {
        WaitForRoom { handle: self, has_waited: false }.await;
    }

    /// Evicts from random buckets until a frame of this class is free; returns how many of [`PROBES`] buckets had nothing.
    fn evict(&self, class: SizeClass) -> usize {
        let mut empty = 0;
        while empty < PROBES {
            match self.cache().cooling.pop(self.random()) {
                None => empty += 1,
                Some(cooled) => {
                    let frame = self.cache().frame(cooled.frame);
                    if let (true, Some(page)) = (frame.class() != class, frame.page()) {
                        // It cools on, for its own kind.
                        self.cache().cooling.push(page, cooled).map(|oldest| self.evict_one(oldest));
                        empty += 1;
                    } else if self.evict_one(cooled).is_some() {
                        return empty.min(PROBES - 1);
                    }
                }
            }
        }
        empty
    }

    /// Evicts a page that was taken out of the cooling map; `None` if it is in use again.
    pub(crate) fn evict_one(&self, cooled: Cooled) -> Option<SizeClass> {
        let frame = self.cache().frame(cooled.frame);
        let mut spin = Spin::default();
        // Who holds the lock of a page that cools soon gives it back, and may leave the page as it is: it must not be lost.
        while frame.state() == State::Cooling {
            match frame.lock.read() {
                Some(version) if version.tag() != cooled.tag => return None,
                Some(version) if frame.lock.try_upgrade(version) => return self.evict_locked(cooled),
                _ => spin.turn(),
            }
        }
        None
    }

    /// Evicts a cooling page whose lock the caller holds.
    fn evict_locked(&self, cooled: Cooled) -> Option<SizeClass> {
        let (cache, index) = (self.cache(), cooled.frame);
        let frame = cache.frame(index);
        fence(Ordering::SeqCst);
        let state = if is_left_out(Step::EvictionCheck) { State::Cooling } else { frame.state() };
        let (Some(page), State::Cooling, false, 0) = (frame.page(), state, frame.is_dirty(), frame.pins()) else {
            // Out of the map, and not going: it is an ordinary page again.
            if frame.state() == State::Cooling {
                cache.cancel_eviction(cooled);
            }
            frame.lock.unlock_unchanged();
            return None;
        };
        cache.table.remove(page, index);
        if cache.counts_uses() {
            cache.frequency.remember(page, cache.frequency.of(&frame.frequency));
        }
        self.0.counters.count(frame.level(), |level| level.evictions += 1);
        frame.set_state(State::Held);
        self.give_back(index);
        Some(frame.class())
    }

    /// Cools the least used page of a sample; false if none would cool now. A dirty page is added to `dirty` instead.
    pub(crate) fn cool_one(&self, dirty: &mut Vec<Snapshot<S::Buffer>>) -> bool {
        let cache = self.cache();
        let mut coldest: Option<((u8, bool), u32, Version)> = None;
        for _ in 0..cache.options.sample_size {
            let Some(drawn) = cache.any_frame(self.random_u32()) else { continue };
            // A bypass page without users whose write failed: nobody else would try again.
            dirty.extend(self.bypass_left_dirty(drawn));
            let Some((index, version)) = self.delegate(drawn) else { continue };
            let frame = cache.frame(index);
            let rank = (cache.frequency.of(&frame.frequency), frame.is_dirty());
            if coldest.is_none_or(|(coldest, ..)| rank < coldest) {
                coldest = Some((rank, index, version));
            }
        }
        let Some((_, index, version)) = coldest else { return false };
        match self.cool(index, version) {
            Cooling::Done => true,
            Cooling::Dirty(snapshot) => {
                dirty.push(snapshot);
                false
            }
            Cooling::Refused => false,
        }
    }

    /// From a frame, down random swizzled links to a page that has none.
    pub(crate) fn delegate(&self, drawn: u32) -> Option<(u32, Version)> {
        let cache = self.cache();
        let mut index = drawn;
        for _ in 0..LEVELS {
            let frame = cache.arena.get(index)?;
            let version = frame.lock.read()?;
            if frame.state() != State::Resident {
                return None;
            }
            let children = frame.children();
            if children == 0 {
                return Some((index, version));
            }
            let to_skip = (u64::from(self.random_u32()) * u64::from(children)) >> 32;
            let body = cache.arena.body(frame);
            let links = cache.layout.links(body).filter_map(|slot| body.get(slot));
            let mut children = links.filter_map(|word| match cache.salt.link(word.load(Ordering::Relaxed)) {
                Link::Frame { frame, .. } => Some(frame),
                _ => None,
            });
            let chosen = children.nth(to_skip as usize);
            match chosen {
                Some(chosen) if frame.lock.validate(version) => index = chosen,
                _ => return None,
            }
        }
        None
    }

    /// Cools a page that was clean a moment ago, or writes it: another write of it may have failed since.
    pub(crate) fn cool_or_write(&self, index: u32, version: Version) {
        if let Cooling::Dirty(snapshot) = self.cool(index, version) {
            self.write_behind(vec![snapshot]);
        }
    }

    /// Cools a page that is as it was at `version`.
    pub(crate) fn cool(&self, index: u32, version: Version) -> Cooling<S::Buffer> {
        let cache = self.cache();
        let frame = cache.frame(index);
        if !frame.lock.try_upgrade(version) {
            return Cooling::Refused;
        }
        // Whoever pins does so first and then looks at the lock.
        fence(Ordering::SeqCst);
        let is_pinned = frame.pins() != 0 && !is_left_out(Step::PinCheck);
        let is_needed = is_pinned || frame.children() != 0 || frame.is_writing();
        let (Some(page), State::Resident, false) = (frame.page(), frame.state(), is_needed) else {
            frame.lock.unlock_unchanged();
            return Cooling::Refused;
        };
        if frame.is_dirty() {
            let snapshot = self.image(index, page);
            frame.lock.unlock_unchanged();
            return snapshot.map_or(Cooling::Refused, Cooling::Dirty);
        }
        if !self.unswizzle(frame, index) {
            frame.lock.unlock_unchanged();
            return Cooling::Refused;
        }
        frame.set_state(State::Cooling);
        // A new version: who pins the page from now on under the old one fails.
        let tag = frame.lock.unlock_moved().tag();
        if let Some(oldest) = cache.cooling.push(page, Cooled { frame: index, tag }) {
            self.evict_one(oldest);
        }
        Cooling::Done
    }

    /// Takes the swizzled link to a page back, whose lock the caller holds; false if somebody holds the parent's lock.
    pub(crate) fn unswizzle(&self, frame: &Frame, index: u32) -> bool {
        let cache = self.cache();
        let parent_index = frame.parent();
        if parent_index == NONE {
            return true;
        }
        let parent = cache.frame(parent_index);
        if parent.lock.try_lock().is_none() {
            return false;
        }
        // The link may have moved before we had the lock.
        if frame.parent() != parent_index {
            parent.lock.unlock_unchanged();
            return false;
        }
        let words = cache.arena.body(parent);
        let link = cache.salt.swizzled(index, frame.unit());
        let is_there = |slot: usize| words.get(slot).is_some_and(|word| word.load(Ordering::Relaxed) == link);
        let slot = match is_there(frame.slot()) {
            true => Some(frame.slot()),
            false => self.find_link(words, |word| word == link),
        };
        if let (Some(slot), Some(page)) = (slot, frame.page()) {
            words[slot].store(page.get(), Ordering::Relaxed);
            parent.set_children(parent.children() - 1);
        }
        frame.set_parent(NONE, 0);
        parent.lock.unlock_moved();
        true
    }

    /// Empties blocks of other classes for this one; false if not enough could be.
    fn reclaim(&self, class: SizeClass) -> bool {
        let cache = self.cache();
        let needed = Region::of(class).block_units() / Region::Small.block_units();
        for _ in 0..BLOCKS_TRIED * needed {
            let Some(drawn) = cache.any_frame(self.random_u32()) else { return false };
            let frame = cache.frame(drawn);
            let other = frame.class();
            // Free frames of the class itself may lie in the lists of others.
            if other == class && frame.claim() {
                self.give_back(drawn);
                return true;
            }
            if other != class && self.empty_block(drawn, other, class) && self.more_free(class) {
                return true;
            }
        }
        false
    }

    /// Looks at every frame, from a random one on, for one of this class whose page may go, or blocks of others: where most frames have
    /// lost their body, the rest is hardly ever drawn.
    fn sweep(&self, class: SizeClass) -> Swept {
        let cache = self.cache();
        let Some(start) = cache.any_frame(self.random_u32()) else { return Swept::Nothing };
        let mut swept = Swept::Nothing;
        for index in (start..=*cache.frame_numbers().end()).chain(1..start) {
            let other = cache.frame(index).class();
            let frames = if other == class { index..index + 1 } else { self.block_of(index, other) };
            if frames.start != index || !frames.clone().all(|index| can_go(cache.frame(index))) {
                continue;
            }
            // One write is enough to go on: a store that takes nothing is not to be asked for all of it.
            if swept == Swept::Writes && frames.clone().any(|index| cache.frame(index).is_dirty()) {
                continue;
            }
            if other == class && self.empty_frame(index) {
                self.give_back(index);
                return Swept::Room;
            }
            if other != class && self.empty_block(index, other, class) && self.more_free(class) {
                return Swept::Room;
            }
            if frames.clone().any(|index| cache.frame(index).is_writing()) {
                swept = Swept::Writes;
            }
        }
        swept
    }

    /// What keeps a page of this size from getting room.
    fn who_holds_room(&self, class: SizeClass) -> &'static str {
        let cache = self.cache();
        let holds_page = |index| {
            let frame = cache.frame(index);
            // A frame that has lost its body is held, too, but for no page.
            frame.class() == class && frame.state() != State::Free && frame.page().is_some()
        };
        if cache.frame_numbers().any(holds_page) {
            "operations in flight, anchors, or pages that cannot be written, hold every frame"
        } else {
            "pages of other sizes have all the memory, and each block of it holds one that cannot go: in use by operations in flight, \
             anchored, or not written"
        }
    }

    /// The frames of the block that a frame of this class is in.
    fn block_of(&self, index: u32, class: SizeClass) -> std::ops::Range<u32> {
        let unit = self.cache().frame(index).unit() as usize % Region::of(class).block_units();
        let first = index - (unit / class.units()) as u32;
        first..first + frames_of_block(class) as u32
    }

    /// Empties the block of a frame, if all pages there can go at once, for pages of another class.
    fn empty_block(&self, drawn: u32, class: SizeClass, other: SizeClass) -> bool {
        let cache = self.cache();
        let frames = self.block_of(drawn, class);
        // Looked at first, so that no page goes in vain.
        if !frames.clone().all(|index| can_go(cache.frame(index))) {
            return false;
        }
        let taken: Vec<u32> = frames.clone().take_while(|&index| self.empty_frame(index)).collect();
        if taken.len() == frames.len() {
            cache.give_up_block(frames.start, class, other);
            return true;
        }
        taken.into_iter().for_each(|index| self.give_back(index));
        false
    }

    /// Takes a frame, whatever page is in it, if that can go at once.
    fn empty_frame(&self, index: u32) -> bool {
        let cache = self.cache();
        let frame = cache.frame(index);
        if frame.claim() {
            return true;
        }
        if let (State::Resident, Some(version)) = (frame.state(), frame.lock.read()) {
            // Not through the map: it would only be searched for there.
            if let Cooling::Dirty(snapshot) = self.cool(index, version) {
                self.write_behind(vec![snapshot]);
                return false;
            }
        }
        let Some(version) = frame.lock.read() else { return false };
        let cooled = Cooled { frame: index, tag: version.tag() };
        if let Some(page) = frame.page() {
            cache.cooling.remove(page, cooled);
        }
        self.evict_one(cooled).is_some() && frame.claim()
    }
}

/// Whether a frame is free, or its page may go, as far as can be seen. A dirty one is worth a try: it is written.
fn can_go(frame: &Frame) -> bool {
    match frame.state() {
        State::Free | State::Cooling => true,
        State::Resident => frame.children() == 0 && frame.pins() == 0 && !frame.is_writing(),
        _ => false,
    }
}

struct WaitForRoom<'a, S: Store, L: Layout> {
    handle: &'a CacheHandle<S, L>,
    has_waited: bool,
}

impl<S: Store, L: Layout> Future for WaitForRoom<'_, S, L> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if std::mem::replace(&mut self.has_waited, true) {
            return Poll::Ready(());
        }
        let cache = self.handle.cache();
        cache.await_room(cx.waker());
        // The last transfer may have ended before we were on the list.
        if cache.transfers() == 0 { Poll::Ready(()) } else { Poll::Pending }
    }
}
