//! How often pages are used: a counter in each frame, a sketch for the pages that are not cached, and what follows for
//! admission.
//!
//! A counter has 8 bits and counts on a logarithmic scale (Morris, 1978): at value `c` it counts one use in
//! `(1 + 1/30)^c`, so it reaches over a hundred thousand, errs by about an eighth, and, what matters more, a page that many
//! threads use is hardly ever written. A use is counted where an operation's way through the cache ends: at a leaf that was
//! hit, or at the page below which something was missing. So every counter says what its page is worth: the reads per use
//! that keeping it saves. Counting starts when memory grows short: a cache that holds everything need not know, and is
//! spared a store to a cache line for each use.
//!
//! The sketch holds the counts of pages that are not cached: two hashes, the lesser of two counters (a count-min sketch;
//! TinyLFU, Einziger et al. 2017, keeps one for all pages). Everything ages: after so many uses all counts are halved, which
//! on this scale is a subtraction; frames do it when they are next looked at.

use crate::{
    id::PageId,
    mix::mix,
    sync::{AtomicU8, AtomicU32, AtomicU64, Ordering},
};

const SCALE: f64 = 30.0;
/// log(2) / log(1 + 1/30): what halving subtracts.
const HALVING: u32 = 21;
/// Sketch counters for each frame.
const SKETCH_PER_FRAME: usize = 8;
const SKETCH_MIN: usize = if cfg!(loom) { 4 } else { 64 };
/// Uses, on average, between two that are told to all.
pub(crate) const USES_PER_TICK: u32 = 1024;

/// Counters of the sketch for so many frames; one byte each.
pub(crate) const fn sketch_counters(frames: usize) -> usize {
    if frames * SKETCH_PER_FRAME < SKETCH_MIN { SKETCH_MIN } else { frames * SKETCH_PER_FRAME }
}

#[derive(Debug)]
pub(crate) struct Frequencies {
    sketch: Box<[AtomicU8]>,
    /// At each count, of 2^32 uses so many are counted.
    odds: [u32; 256],
    uses: AtomicU64,
    halving_period: u64,
    age: AtomicU32,
    is_counting: AtomicU32,
}

/// A counter: the count, and the age in which it was last looked at.
#[derive(Clone, Copy)]
struct Count(u32);

impl Count {
    fn new(count: u8, age: u32) -> Self {
        Self(age << 8 | u32::from(count))
    }

    fn at(self, age: u32) -> u8 {
        let halvings = (age.wrapping_sub(self.0 >> 8)) & 0xff_ffff;
        (self.0 & 0xff).saturating_sub(halvings.saturating_mul(HALVING)) as u8
    }
}

impl Frequencies {
    /// For `frames` frames; counts are halved after `halving_period` uses.
    pub(crate) fn new(frames: usize, halving_period: u64) -> Self {
        let odds =
            std::array::from_fn(|count| ((1.0 + 1.0 / SCALE).powi(-(count as i32)) * f64::from(u32::MAX)) as u32);
        let sketch = (0..sketch_counters(frames)).map(|_| AtomicU8::new(0)).collect();
        Self {
            sketch,
            odds,
            uses: AtomicU64::new(0),
            halving_period,
            age: AtomicU32::new(0),
            is_counting: AtomicU32::new(0),
        }
    }

    /// About how many uses a counter has seen, halved as they age.
    pub(crate) fn uses(&self, counter: &AtomicU32) -> u64 {
        let count = Count(counter.load(Ordering::Relaxed)).at(self.age());
        (SCALE * ((1.0 + 1.0 / SCALE).powi(i32::from(count)) - 1.0)) as u64
    }

    fn age(&self) -> u32 {
        self.age.load(Ordering::Relaxed)
    }

    /// Uses of cached pages count from now on: memory grows short.
    pub(crate) fn start(&self) {
        self.is_counting.store(1, Ordering::Relaxed);
    }

    /// Whether they count yet.
    #[inline]
    pub(crate) fn is_counting(&self) -> bool {
        self.is_counting.load(Ordering::Relaxed) != 0
    }

    /// The count of a frame or an entry.
    pub(crate) fn of(&self, counter: &AtomicU32) -> u8 {
        Count(counter.load(Ordering::Relaxed)).at(self.age())
    }

    pub(crate) fn set(&self, counter: &AtomicU32, count: u8) {
        counter.store(Count::new(count, self.age()).0, Ordering::Relaxed);
    }

    /// Counts a use. `random` decides; two threads at once may count one use.
    #[inline]
    pub(crate) fn touch(&self, counter: &AtomicU32, random: u32) {
        let count = self.of(counter);
        if random < self.odds[usize::from(count)] && count < u8::MAX {
            self.set(counter, count + 1);
        }
    }

    /// There were about so many uses. Ages everything when it is time.
    pub(crate) fn tick(&self, uses: u32) {
        let before = self.uses.fetch_add(u64::from(uses), Ordering::Relaxed);
        if before / self.halving_period == (before + u64::from(uses)) / self.halving_period {
            return;
        }
        self.age.fetch_add(1, Ordering::Relaxed);
        for counter in &self.sketch {
            let count = counter.load(Ordering::Relaxed);
            counter.store(count.saturating_sub(HALVING as u8), Ordering::Relaxed);
        }
    }

    fn counters(&self, page: PageId) -> [&AtomicU8; 2] {
        let at = |seed: u64| {
            let hash = mix(page.get().wrapping_mul(seed));
            &self.sketch[((u128::from(hash) * self.sketch.len() as u128) >> 64) as usize]
        };
        [at(0x9e37_79b9_7f4a_7c15), at(0xc2b2_ae3d_27d4_eb4f)]
    }

    /// The count of a page that is not cached.
    pub(crate) fn of_absent(&self, page: PageId) -> u8 {
        self.counters(page).map(|counter| counter.load(Ordering::Relaxed)).into_iter().min().unwrap_or(0)
    }

    /// A page that is not cached was used: its count with this use.
    pub(crate) fn miss(&self, page: PageId, random: u32) -> u8 {
        let count = self.of_absent(page);
        if random < self.odds[usize::from(count)] && count < u8::MAX {
            self.remember(page, count + 1);
            return count + 1;
        }
        count
    }

    /// A use of a page that is not cached was of no use: takes one back.
    pub(crate) fn take_back(&self, page: PageId, random: u32) {
        let count = self.of_absent(page);
        if count == 0 || random >= self.odds[usize::from(count - 1)] {
            return;
        }
        for counter in self.counters(page) {
            if counter.load(Ordering::Relaxed) == count {
                counter.store(count - 1, Ordering::Relaxed);
            }
        }
    }

    /// A page goes; its count stays.
    pub(crate) fn remember(&self, page: PageId, count: u8) {
        for counter in self.counters(page) {
            if counter.load(Ordering::Relaxed) < count {
                counter.store(count, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn counts_are_logarithmic_and_age() {
        let frequency = Frequencies::new(100, 1 << 20);
        let frame = AtomicU32::default();
        let mut random = 1u64;
        let mut touch = |times: u32| {
            for _ in 0..times {
                random = mix(random.wrapping_add(0x9e37_79b9_7f4a_7c15));
                frequency.touch(&frame, random as u32);
            }
            frequency.of(&frame)
        };
        // 30 * ((31/30)^c - 1) = 1000 at c = 108.
        let count = touch(1000);
        assert!((95..=121).contains(&count), "{count}");
        frequency.tick(1 << 20);
        assert_eq!(frequency.of(&frame), count - 21);
        frequency.tick(1 << 20);
        frequency.tick(1 << 20);
        assert_eq!(frequency.of(&frame), count - 63);
    }

    #[test]
    fn the_sketch_remembers_and_forgets() {
        let frequency = Frequencies::new(100, 1000);
        let page = PageId::new(77).unwrap();
        frequency.remember(page, 50);
        assert_eq!(frequency.miss(page, u32::MAX), 50);
        assert_eq!(frequency.miss(page, 0), 51);
        frequency.take_back(page, u32::MAX);
        assert_eq!(frequency.of_absent(page), 51);
        frequency.take_back(page, 0);
        assert_eq!(frequency.of_absent(page), 50);
        (0..3).for_each(|_| frequency.tick(1000));
        assert_eq!(frequency.miss(page, u32::MAX), 0);
    }
}
