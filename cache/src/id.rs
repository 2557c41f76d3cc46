//! Page ids, link words and size classes.

use std::{
    fmt,
    hash::{BuildHasher, Hasher, RandomState},
    num::NonZeroU64,
};

const SWIZZLED: u64 = 1 << 63;
const UNIT_BITS: u32 = 31;
const FRAME_BITS: u32 = 32;

const _: () = assert!(1 + UNIT_BITS + FRAME_BITS == 64);

/// Bytes that a body's position is counted in.
pub(crate) const UNIT_BYTES: usize = 64;
/// The units that links can name: 128 GiB.
pub(crate) const UNITS_MAX: usize = 1 << UNIT_BITS;

/// The name of a page in its store: any number from 1 to 2^63 - 1. An unswizzled link word is the id of the page that it
/// leads to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PageId(NonZeroU64);

impl PageId {
    /// `None` for zero, and for numbers that use the top bit: it marks swizzled links.
    pub const fn new(number: u64) -> Option<Self> {
        if number & SWIZZLED != 0 {
            return None;
        }
        match NonZeroU64::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// The number.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Debug for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page {:#x}", self.0)
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// What a link word of a cached page says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    Null,
    /// The page is to be looked up.
    Page(PageId),
    /// The page is in this frame, its body at this unit: both are had without touching the frame.
    Frame {
        frame: u32,
        unit: u32,
    },
}

impl Link {
    pub(crate) fn is_to(self, index: u32) -> bool {
        matches!(self, Self::Frame { frame, .. } if frame == index)
    }
}

/// What swizzled links of one cache are mixed with, so that those of another cache, and data that look like links, lead
/// nowhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Salt(u64);

impl Salt {
    /// Another one for each cache. Nobody can foresee it: whoever could would choose data that are what a link is at the moment.
    pub(crate) fn new() -> Self {
        Self(RandomState::new().build_hasher().finish() | SWIZZLED)
    }

    #[inline]
    pub(crate) const fn link(self, word: u64) -> Link {
        if word & SWIZZLED != 0 {
            let (frame, unit) = self.place(word);
            return Link::Frame { frame, unit };
        }
        match PageId::new(word) {
            Some(page) => Link::Page(page),
            None => Link::Null,
        }
    }

    /// Frame and unit of a swizzled link.
    #[inline]
    pub(crate) const fn place(self, word: u64) -> (u32, u32) {
        let plain = word ^ self.0;
        (plain as u32, (plain >> FRAME_BITS) as u32)
    }

    pub(crate) const fn swizzled(self, frame: u32, unit: u32) -> u64 {
        ((unit as u64) << FRAME_BITS | frame as u64) ^ self.0
    }

    /// Marks what belongs to the cache.
    pub(crate) const fn mark(self) -> u32 {
        self.0 as u32
    }
}

/// Whether a link word of a cached page leads straight to a frame. Stores never see such a word.
pub const fn is_swizzled(word: u64) -> bool {
    word & SWIZZLED != 0
}

/// The size of a page: 64 bytes to 64 KiB, in powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SizeClass(u8);

impl SizeClass {
    /// How many classes there are.
    pub const COUNT: usize = 11;
    /// The smallest: 64 bytes.
    pub const MIN: Self = Self(0);
    /// The largest: 64 KiB.
    pub const MAX: Self = Self(Self::COUNT as u8 - 1);

    /// `None` unless `bytes` is a power of two from 64 to 65536.
    pub const fn of_bytes(bytes: usize) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= 64 && bytes <= Self::MAX.bytes() {
            Some(Self(bytes.trailing_zeros() as u8 - 6))
        } else {
            None
        }
    }

    pub(crate) const fn from_index(index: usize) -> Self {
        assert!(index < Self::COUNT);
        Self(index as u8)
    }

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Bytes of a page.
    pub const fn bytes(self) -> usize {
        64 << self.0
    }

    /// 8-byte words of a page.
    pub const fn words(self) -> usize {
        8 << self.0
    }

    /// 64-byte units of a page.
    pub(crate) const fn units(self) -> usize {
        1 << self.0
    }
}

impl fmt::Debug for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.bytes())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn link_words_are_told_apart() {
        let [salt, other] = [Salt::new(), Salt::new()];
        assert_eq!(salt.link(0), Link::Null);
        assert_eq!(salt.link(7), Link::Page(PageId::new(7).unwrap()));
        for (frame, unit) in [(u32::MAX, (1 << 31) - 1), (1, 0)] {
            let word = salt.swizzled(frame, unit);
            assert!(is_swizzled(word) && PageId::new(word).is_none());
            assert_eq!(salt.link(word), Link::Frame { frame, unit });
            assert_ne!(other.link(word), Link::Frame { frame, unit });
        }
        assert!(PageId::new(0).is_none() && PageId::new(1 << 63).is_none());
    }

    /// Data that a guest chooses must not be what a link is.
    #[test]
    fn salts_cannot_be_foreseen() {
        let salts: [Salt; 2] = std::array::from_fn(|_| Salt::new());
        assert_ne!(salts[0].0, salts[1].0);
        assert!((0..1000).all(|number| salts.iter().all(|salt| salt.0 != crate::mix::mix(number) | SWIZZLED)));
    }

    #[test]
    fn size_classes_are_powers_of_two_from_64_to_65536() {
        assert_eq!(SizeClass::of_bytes(64).unwrap().index(), 0);
        assert_eq!(SizeClass::of_bytes(65536), Some(SizeClass::MAX));
        assert!([0, 32, 96, 1 << 17].into_iter().all(|bytes| SizeClass::of_bytes(bytes).is_none()));
    }
}
