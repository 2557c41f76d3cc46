//! The memory of a cache: frames, and the words of their pages.
//!
//! One private anonymous mapping, reserved for the worst case and touched from the front of each of its parts, so that
//! the process uses what has been handed out and no more:
//!
//! ```text
//! [ frames, 64 bytes each ... | bodies up to 4 KiB, in 64-byte units ... | larger bodies ... ]
//! ```
//!
//! Bodies lie apart from frames, so that any size class packs without waste and a frame stays a frame whatever becomes of
//! the body's memory. A swizzled link names both, so a follower fetches them at once. What is surely going to be used is
//! advised to be of huge pages: a cache of a gigabyte in 4 KiB pages spends its time in the page table. Small and large bodies
//! have address space of their own, each for a whole cache of them: memory goes from one to the other by way of the system, so
//! that a large body never waits for small ones that happen to be neighbours.

use std::ops::Range;

use crate::{
    frame::Frame,
    id::{SizeClass, UNIT_BYTES},
    sync::{AtomicU64, Ordering},
};

const WORDS_PER_UNIT: usize = UNIT_BYTES / 8;

#[cfg(not(any(loom, miri)))]
mod memory {
    use std::io;

    use memmap2::{Advice, MmapOptions, MmapRaw, UncheckedAdvice};

    use super::*;

    const HUGE_BYTES: usize = 2 << 20;

    #[derive(Debug)]
    pub(super) struct Memory {
        map: MmapRaw,
        /// Where in it the bodies begin.
        bodies_at: usize,
        frames: *const Frame,
        words: *const AtomicU64,
    }

    // SAFETY: the pointers lead into the mapping, which lives as long as this value; what they lead to is atomics only.
    unsafe impl Send for Memory {}
    // SAFETY: as above: everything reachable from here is meant to be shared.
    unsafe impl Sync for Memory {}

    impl Memory {
        pub(super) fn new(frames: usize, units: usize, sure: &Sure) -> io::Result<Self> {
            let frame_bytes = (frames * size_of::<Frame>()).next_multiple_of(HUGE_BYTES);
            let body_bytes = units * UNIT_BYTES;
            // Room to begin at a huge page.
            let bytes = frame_bytes + body_bytes + HUGE_BYTES;
            let map = MmapOptions::new().len(bytes).no_reserve_swap().map_anon()?;
            let map = MmapRaw::from(map);
            let skipped = map.as_ptr().align_offset(HUGE_BYTES);
            let advise = |offset: usize, sure: usize| {
                let sure = sure / HUGE_BYTES * HUGE_BYTES;
                if sure != 0 && map.advise_range(Advice::HugePage, skipped + offset, sure).is_err() {
                    tracing::debug!("this system has no huge pages to give");
                }
            };
            advise(0, sure.frames * size_of::<Frame>());
            advise(frame_bytes + sure.units.start * UNIT_BYTES, sure.units.len() * UNIT_BYTES);
            // SAFETY: `skipped` is below HUGE_BYTES, for which the mapping has room.
            let base = unsafe { map.as_ptr().add(skipped) };
            // SAFETY: `frame_bytes` lie between the base and the bodies, inside the mapping.
            let words = unsafe { base.add(frame_bytes) };
            Ok(Self { frames: base.cast(), words: words.cast(), bodies_at: skipped + frame_bytes, map })
        }

        /// Gives the memory of bodies back to the system; they are zero when they are next used.
        pub(super) fn release(&self, units: Range<usize>) {
            let (offset, length) = (self.bodies_at + units.start * UNIT_BYTES, units.len() * UNIT_BYTES);
            // SAFETY: the range is inside the mapping, which is private and anonymous: its words become zero, which an atomic
            // may become at any time as far as its readers know, and nothing but atomics is there.
            let released = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, length) };
            if released.is_err() {
                tracing::debug!("this system takes back no block of {length} bytes");
            }
        }

        #[inline]
        pub(super) fn frames(&self, count: usize) -> &[Frame] {
            // SAFETY: `Arena` asks for as many frames as the mapping was made for; zeroed bytes are valid atomics, which is
            // all that a frame is; the base is aligned to a huge page; only shared references are ever made.
            unsafe { std::slice::from_raw_parts(self.frames, count) }
        }

        #[inline]
        pub(super) fn words(&self, count: usize) -> &[AtomicU64] {
            // SAFETY: as for `frames`, for the second part of the mapping.
            unsafe { std::slice::from_raw_parts(self.words, count) }
        }
    }
}

#[cfg(any(loom, miri))]
mod memory {
    use super::*;

    #[derive(Debug)]
    pub(super) struct Memory {
        frames: Box<[Frame]>,
        words: Box<[AtomicU64]>,
    }

    impl Memory {
        pub(super) fn new(frames: usize, units: usize, _sure: &Sure) -> std::io::Result<Self> {
            let frames = (0..frames).map(|_| Frame::default()).collect();
            let words = (0..units * WORDS_PER_UNIT).map(|_| AtomicU64::new(0)).collect();
            Ok(Self { frames, words })
        }

        pub(super) fn release(&self, _units: Range<usize>) {}

        pub(super) fn frames(&self, _count: usize) -> &[Frame] {
            &self.frames
        }

        pub(super) fn words(&self, _count: usize) -> &[AtomicU64] {
            &self.words
        }
    }
}

/// What will certainly be used: so many of the first frames, and these units.
#[derive(Debug)]
#[cfg_attr(any(loom, miri), allow(dead_code, reason = "only the system can use it"))]
pub(crate) struct Sure {
    pub(crate) frames: usize,
    pub(crate) units: Range<usize>,
}

/// Frames and bodies by their numbers.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: memory::Memory,
    frame_count: usize,
    word_count: usize,
}

impl Arena {
    /// Room for `frames` frames (number 0 is not used) and `units` units of bodies.
    ///
    /// # Errors
    /// If the system refuses the mapping.
    pub(crate) fn new(frames: usize, units: usize, sure: &Sure) -> std::io::Result<Self> {
        let memory = memory::Memory::new(frames, units, sure)?;
        Ok(Self { memory, frame_count: frames, word_count: units * WORDS_PER_UNIT })
    }

    pub(crate) fn frame_count(&self) -> usize {
        self.frame_count
    }

    /// Gives the memory of bodies back to the system.
    pub(crate) fn release(&self, units: Range<usize>) {
        self.memory.release(units);
    }

    /// `None` for a number that no frame has.
    #[inline]
    pub(crate) fn get(&self, frame: u32) -> Option<&Frame> {
        self.memory.frames(self.frame_count).get(frame as usize)
    }

    #[inline]
    pub(crate) fn frame(&self, frame: u32) -> &Frame {
        &self.memory.frames(self.frame_count)[frame as usize]
    }

    /// The number of one of its frames.
    #[inline]
    pub(crate) fn index_of(&self, frame: &Frame) -> u32 {
        let base = self.memory.frames(self.frame_count).as_ptr().addr();
        (std::ptr::from_ref(frame).addr().wrapping_sub(base) / size_of::<Frame>()) as u32
    }

    /// The `words` words from `unit` on; none if they are not all inside the memory, so that a link read at a bad moment does
    /// no harm.
    #[inline]
    pub(crate) fn words(&self, unit: u32, words: usize) -> &[AtomicU64] {
        let all = self.memory.words(self.word_count);
        let from = unit as usize * WORDS_PER_UNIT;
        all.get(from..from + words).unwrap_or(&[])
    }

    /// The body of a frame.
    #[inline]
    pub(crate) fn body(&self, frame: &Frame) -> &[AtomicU64] {
        self.words(frame.unit(), frame.class().words())
    }

    /// Asks the processor to have a frame and these words of its body at hand soon.
    #[inline(always)]
    pub(crate) fn prefetch<const N: usize>(&self, frame: u32, unit: u32, class: SizeClass, words: [Range<usize>; N]) {
        if let Some(frame) = self.get(frame) {
            prefetch(std::ptr::from_ref(frame).cast());
        }
        let body = self.words(unit, class.words());
        words.into_iter().for_each(|words| prefetch_lines(body, words));
    }

    /// Asks the processor to have so many words of a frame's body at hand soon, at most.
    #[inline]
    pub(crate) fn prefetch_body(&self, frame: u32, words: usize) {
        if let Some(frame) = self.get(frame) {
            prefetch_lines(self.body(frame), 0..words.min(frame.class().words()));
        }
    }
}

/// Asks the processor to have some words of a body at hand soon.
#[inline(always)]
pub(crate) fn prefetch_lines(body: &[AtomicU64], words: Range<usize>) {
    let words = body.get(words.start..words.end.min(body.len())).unwrap_or(&[]);
    let (Some(first), Some(last)) = (words.first(), words.last()) else { return };
    // Few words are in one line or two, which cannot be foretold: a prefetch too many is cheaper than a wrong branch.
    prefetch(std::ptr::from_ref(first).cast());
    prefetch(std::ptr::from_ref(last).cast());
    if words.len() > WORDS_PER_UNIT + 1 {
        let between = words[WORDS_PER_UNIT..].iter().step_by(WORDS_PER_UNIT);
        between.for_each(|word| prefetch(std::ptr::from_ref(word).cast()));
    }
}

#[inline]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(any(miri, loom))))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch is a hint and reads nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(miri, loom)))))]
    let _ = at;
}

/// Copies a private page into a body. Only under the frame's lock.
pub(crate) fn fill(body: &[AtomicU64], page: &[u64]) {
    // By lines: the compiler does not unroll over atomics by itself.
    let (units, few) = body.as_chunks::<WORDS_PER_UNIT>();
    let (values, few_values) = page.as_chunks::<WORDS_PER_UNIT>();
    let store = |(word, &value): (&AtomicU64, &u64)| word.store(value, Ordering::Relaxed);
    units.iter().zip(values).for_each(|(unit, values)| unit.iter().zip(values).for_each(store));
    few.iter().zip(few_values).for_each(store);
}
