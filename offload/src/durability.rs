//! What of an owner's changes survives its death.

use std::{fmt, str::FromStr};

/// When a change in an owner's cache is safe from its death.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Durability {
    /// Once its pages are written back: by a flush, or as they leave the cache.
    #[default]
    WriteBack,
    /// Before its operation answers, which waits for one WRITE to the owner's log. Operations that wait at the same time share
    /// it.
    Logged,
}

impl Durability {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::WriteBack, Self::Logged];

    /// The name by which programs take it and rows give it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteBack => "write-back",
            Self::Logged => "logged",
        }
    }

    /// What it is, in a line.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::WriteBack => "What is not written back is lost with its owner",
            Self::Logged => "An operation answers once it is in the owner's log: nothing answered is lost",
        }
    }
}

impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No durability has such a name.
#[derive(Debug)]
pub struct UnknownDurability(String);

impl fmt::Display for UnknownDurability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no durability: write-back or logged", self.0)
    }
}

impl std::error::Error for UnknownDurability {}

impl FromStr for Durability {
    type Err = UnknownDurability;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|all| all.name() == name).ok_or_else(|| UnknownDurability(name.to_owned()))
    }
}
