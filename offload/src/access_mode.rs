//! The ways to reach a structure's pages, by name.

use std::{fmt, str::FromStr};

/// How a compute server reaches a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessMode {
    /// Every page is read from remote memory: [`OneSided`](farlink_runtime::one_sided::OneSided).
    OneSided,
    /// It owns a part, and caches all levels: [`Cached`](crate::Cached).
    Cached,
    /// Anybody changes the structure; inner pages are cached: [`CachedInner`](crate::CachedInner).
    CachedInner,
    /// Anybody changes the structure, which is latch-free; mapping words and consolidated pages are cached:
    /// [`CachedMapping`](crate::CachedMapping).
    CachedMapping,
    /// Memory servers carry out all operations: [`Remote`](crate::Remote).
    Coarse,
    /// Memory servers search the inner levels; leaves are reached one-sided: [`Hybrid`](crate::Hybrid).
    Hybrid,
    /// As cached; on a miss a policy says whether the operation is shipped: [`Engine`](crate::Engine).
    Engine,
    /// One-sided, or carried out by a memory server: for each operation a policy says which: [`Adaptive`](crate::Adaptive).
    Adaptive,
}

impl AccessMode {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::OneSided,
        Self::Cached,
        Self::CachedInner,
        Self::CachedMapping,
        Self::Coarse,
        Self::Hybrid,
        Self::Engine,
        Self::Adaptive,
    ];

    /// The name by which programs take it and rows give it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneSided => "one-sided",
            Self::Cached => "cached",
            Self::CachedInner => "cached-inner",
            Self::CachedMapping => "cached-mapping",
            Self::Coarse => "coarse",
            Self::Hybrid => "hybrid",
            Self::Engine => "engine",
            Self::Adaptive => "adaptive",
        }
    }

    /// What it is, in a line.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::OneSided => "Every page is read from remote memory",
            Self::Cached => "Each process owns a share of the structure and caches all its levels",
            Self::CachedInner => "Any number of processes change it; each caches inner pages",
            Self::CachedMapping => {
                "Of a latch-free structure each process caches pages with their mapping words; a lookup reads one word"
            }
            Self::Coarse => "Memory servers carry out all operations",
            Self::Hybrid => "Memory servers search the inner levels; leaves are reached one-sided",
            Self::Engine => "As cached; on a miss a policy says whether the operation is shipped to the memory server",
            Self::Adaptive => "For each operation a policy says whether it is shipped or done one-sided",
        }
    }

    /// Whether there is a cache.
    pub const fn caches(self) -> bool {
        matches!(self, Self::Cached | Self::CachedInner | Self::CachedMapping | Self::Engine)
    }

    /// Whether one process owns what it works on.
    pub const fn owns(self) -> bool {
        matches!(self, Self::Cached | Self::Engine)
    }

    /// Whether it is for latch-free structures, whose pages stand behind words that are swapped.
    pub const fn is_of_words(self) -> bool {
        matches!(self, Self::CachedMapping)
    }

    /// Whether the structure is in parts, each of which one memory server searches.
    pub const fn is_divided(self) -> bool {
        matches!(self, Self::Coarse | Self::Hybrid)
    }

    /// Whether a policy says which operations are shipped.
    pub const fn asks_a_policy(self) -> bool {
        matches!(self, Self::Engine | Self::Adaptive)
    }
}

impl fmt::Display for AccessMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no [`AccessMode`]'s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownAccessMode;

impl fmt::Display for UnknownAccessMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it is one of {}", AccessMode::ALL.map(AccessMode::name).join(", "))
    }
}

impl std::error::Error for UnknownAccessMode {}

impl FromStr for AccessMode {
    type Err = UnknownAccessMode;

    fn from_str(text: &str) -> Result<Self, UnknownAccessMode> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or(UnknownAccessMode)
    }
}
