//! Sizes of pages.

use std::fmt;

/// The size of a page: 64 bytes to 64 KiB, in powers of two. A page is aligned to its size.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SizeClass(u32);

impl SizeClass {
    /// How many classes there are.
    pub const COUNT: usize = 11;
    /// 64 bytes.
    pub const SMALLEST: Self = Self(0);
    /// 64 KiB.
    pub const LARGEST: Self = Self(Self::COUNT as u32 - 1);

    /// The class of pages of exactly `bytes`; `None` unless that is a power of two from 64 to 65536.
    pub const fn of_bytes(bytes: usize) -> Option<Self> {
        if bytes.is_power_of_two() && bytes >= Self::SMALLEST.bytes() && bytes <= Self::LARGEST.bytes() {
            Some(Self(bytes.trailing_zeros() - 6))
        } else {
            None
        }
    }

    /// The class with this index, if there is one.
    pub const fn from_index(index: u8) -> Option<Self> {
        if (index as usize) < Self::COUNT { Some(Self(index as u32)) } else { None }
    }

    /// 0 for 64 bytes to 10 for 64 KiB.
    pub const fn index(self) -> usize {
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

    /// Every class, the smallest first.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u32).map(Self)
    }
}

impl fmt::Debug for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} B", self.bytes())
    }
}
