//! How a cache is made.

use crate::{error::OptionsError, frame_lock::WAITERS_MAX, id::SizeClass};

/// Which pages get in. Until a cache has been full once, it admits all, but for those that [`Admission::Probability`] gives none. What is
/// read because it is loaded by its id ([`CacheHandle::load`](crate::CacheHandle::load)) always gets in: only of pages that a link was
/// followed to is any refused.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Admission {
    /// All.
    Always,
    /// With this probability, by level (DEX, VLDB 2024, section 5.4). DEX uses 0.1 and 1. 0 means never, also while the cache
    /// is not full: such pages are read again each time. (In a full cache with a frame of eight held by pages that are in use,
    /// some get in all the same, for then they can be evicted.)
    Probability {
        /// Of a page at level 0.
        leaf: f64,
        /// Of a page above.
        inner: f64,
    },
    /// A page that is used more often than one that would go for it.
    Frequency,
}

/// The options of a cache: [`CacheOptions::new`], then change what you like.
///
/// ```
/// use farlink_cache::{Admission, CacheOptions};
///
/// let mut options = CacheOptions::new(64 << 20);
/// options.page_bytes = 4096;
/// options.admission = Admission::Always;
/// ```
///
/// A value beyond its limits is refused by [`PageCache::new`](crate::PageCache::new) with its name and what is possible.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct CacheOptions {
    /// All the memory that the cache may use, in bytes: pages, frames, table, cooling map and sketch. 64 KiB (more with many
    /// handles) to 64 GiB less 2 MiB. Pages beyond 4 KiB take a cache of at least 1 MiB.
    pub bytes: usize,
    /// The usual size of a page, in bytes: decides how large the bookkeeping is made. Pages of other sizes share the memory.
    /// Default 1024; a power of two from 64 to 65536.
    pub page_bytes: usize,
    /// Which pages get in. Default [`Admission::Frequency`].
    pub admission: Admission,
    /// The share of the frames that the cooling map has slots for. Default 0.1, which is DEX's; 0 to 0.5.
    pub cooling_share: f64,
    /// How many frames are looked at to find the one to cool: with [`Admission::Frequency`] the least used of them goes. With the others,
    /// which count no uses, the first that is clean goes. Default 5; 1 to 64. DEX, which does not count uses either, looks at one.
    pub sample_size: usize,
    /// Uses per frame after which all counts of uses are halved. Default 200; at least 1.
    pub halving_period: u64,
    /// How many handles there can be at a time. Default 64; 1 to 32767.
    pub handles_max: usize,
    /// Whether subtrees can be excluded ([`CacheHandle::exclude`](crate::CacheHandle::exclude)): pages that no swizzled link
    /// leads to are then noted. Default no.
    pub excludes_subtrees: bool,
    /// How many pages of the usual size there is room for at most, rounded up to a block of them (4 KiB), however much memory there is: for
    /// tests, whose structures are smaller than the smallest cache.
    #[doc(hidden)]
    pub pages_max: usize,
}

impl CacheOptions {
    /// A cache of `bytes` with the defaults: pages of 1 KiB, admission by frequency, the least used of five cools.
    ///
    /// Measured with 10M keys, zipf 0.99, pages of 54 keys and a cache of 32 / 8 / 1% of the data, reads per lookup over
    /// those of the best choice of pages: 1.09 / 1.08 / 1.07, against 1.34 / 1.28 / 1.19 with DEX's random choice.
    pub const fn new(bytes: usize) -> Self {
        Self {
            bytes,
            page_bytes: 1024,
            admission: Admission::Frequency,
            cooling_share: 0.1,
            sample_size: 5,
            halving_period: 200,
            handles_max: 64,
            excludes_subtrees: false,
            pages_max: usize::MAX,
        }
    }

    /// DEX's own settings: a random victim, leaves admitted with probability 0.1 and inner pages always.
    #[must_use]
    pub const fn dex(bytes: usize) -> Self {
        let mut options = Self::new(bytes);
        options.admission = Admission::Probability { leaf: 0.1, inner: 1.0 };
        options.sample_size = 1;
        options
    }

    /// The usual class.
    pub(crate) fn page_class(&self) -> Option<SizeClass> {
        SizeClass::of_bytes(self.page_bytes)
    }

    pub(crate) fn check(&self) -> Result<(), OptionsError> {
        let refuse = |option, why: String| Err(OptionsError::Unusable { option, why });
        if self.page_class().is_none() {
            return refuse(
                "page_bytes",
                format!("{}; a page has a power of two from 64 to 65536 bytes", self.page_bytes),
            );
        }
        if !(0.0..=0.5).contains(&self.cooling_share) {
            return refuse("cooling_share", format!("{}; it is a share of at most 0.5", self.cooling_share));
        }
        if !(1..=64).contains(&self.sample_size) {
            return refuse("sample_size", format!("{}; 1 to 64 frames can be looked at", self.sample_size));
        }
        if self.halving_period == 0 {
            return refuse("halving_period", "0; counts need some uses before they are halved".into());
        }
        if !(1..=WAITERS_MAX).contains(&self.handles_max) {
            return refuse("handles_max", format!("{}; 1 to {WAITERS_MAX} handles are possible", self.handles_max));
        }
        match self.admission {
            Admission::Probability { leaf, inner } if !(0.0..=1.0).contains(&leaf) || !(0.0..=1.0).contains(&inner) => {
                refuse("admission", format!("probabilities {leaf} and {inner}; each is from 0 to 1"))
            }
            _ => Ok(()),
        }
    }
}
