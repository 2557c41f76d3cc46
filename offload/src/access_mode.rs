//! The ways to reach a structure's pages, by name.

use std::{fmt, str::FromStr};

/// How a compute server reaches a structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AccessMode {
    /// Every page is read from remote memory: [`OneSided`](farlink_runtime::one_sided::OneSided).
    OneSided,
    /// It owns a part, and caches all levels: [`Cached`](crate::Cached), or an [`Engine`](crate::Engine) over it.
    Cached,
    /// Anybody changes the structure; inner pages are cached: [`CachedInner`](crate::CachedInner).
    CachedInner,
    /// Memory servers carry out all operations: [`Remote`](crate::Remote).
    Coarse,
    /// Memory servers search the inner levels; leaves are reached one-sided: [`Hybrid`](crate::Hybrid).
    Hybrid,
}

impl AccessMode {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::OneSided, Self::Cached, Self::CachedInner, Self::Coarse, Self::Hybrid];

    /// The name by which programs take it and rows give it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneSided => "one-sided",
            Self::Cached => "cached",
            Self::CachedInner => "cached-inner",
            Self::Coarse => "coarse",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether there is a cache.
    pub const fn caches(self) -> bool {
        matches!(self, Self::Cached | Self::CachedInner)
    }

    /// Whether memory servers must carry out operations.
    pub const fn ships(self) -> bool {
        matches!(self, Self::Coarse | Self::Hybrid)
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
