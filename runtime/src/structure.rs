//! What the framework knows of a structure.

use std::fmt;

use crate::{
    page::{SizeClass, StructureId},
    ptr::{Link, RemotePtr, ServerId},
    wire::Wire,
};

/// Where a new page should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The next memory server in turn: the fine-grained design of Ziegler et al. (SIGMOD 2019, section 4).
    RoundRobin,
    /// On this memory server; elsewhere if it is full.
    Server(ServerId),
    /// On the memory server of this page, to keep a subtree together (DEX, VLDB 2024, section 6).
    With(RemotePtr),
}

/// A structure in the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// Its number in the cluster, on each of its pages.
    pub id: StructureId,
    /// Its name: 1 to 64 bytes.
    pub name: String,
    /// What its plug-in is called.
    pub kind: String,
    /// The size of its root, and of new pages unless the structure's code asks for another.
    pub class: SizeClass,
    /// Its root page. A root grows and shrinks in place, so this never changes.
    pub root: RemotePtr,
    /// Where its pages are.
    pub policy: PlacementPolicy,
    /// Its descriptor page; none for the catalog itself.
    pub descriptor: Option<Link>,
    /// What it was made with, as its plug-in understands it: dimensions, a hash seed.
    pub options: [u64; OPTIONS],
}

/// Words of options that a structure can have.
pub const OPTIONS: usize = 8;

impl Structure {
    /// The link to the root.
    pub fn root_link(&self) -> Link {
        Link::to(self.root, self.class)
    }

    /// Where a new page of this level is to be that comes from the page `beside`, as half of it, say.
    pub fn placement(&self, level: u8, beside: RemotePtr) -> Placement {
        match self.policy {
            PlacementPolicy::RoundRobin => Placement::RoundRobin,
            PlacementPolicy::Leaves if level == 0 => Placement::RoundRobin,
            PlacementPolicy::Leaves | PlacementPolicy::OneServer => Placement::With(self.root),
            PlacementPolicy::Subtrees { level: top } if level > top => Placement::RoundRobin,
            PlacementPolicy::Subtrees { .. } => Placement::With(beside),
        }
    }

    /// The highest level of which each page is on one memory server with all that is below it, in a cluster of so many.
    pub fn colocated_level_max(&self, servers: usize) -> u8 {
        match self.policy {
            _ if servers == 1 => u8::MAX,
            PlacementPolicy::RoundRobin | PlacementPolicy::Leaves => 0,
            PlacementPolicy::OneServer => u8::MAX,
            PlacementPolicy::Subtrees { level } => level,
        }
    }
}

/// On which memory servers the pages of a structure are: the designs of Ziegler et al. (SIGMOD 2019, sections 3 to 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlacementPolicy {
    /// Each new page on the next server in turn: the fine-grained design.
    #[default]
    RoundRobin,
    /// Those of level 0 in turn, all others where the root is: the hybrid design.
    Leaves,
    /// All where the root is: the coarse-grained design.
    OneServer,
    /// Each page of this level with all that is below it on one server; a load puts one after the other on the servers in turn,
    /// and what is split stays where it is. The levels above in turn. (DEX, VLDB 2024, section 3: so an operation can be
    /// shipped from there.)
    Subtrees {
        /// At most [`PlacementPolicy::LEVEL_MAX`].
        level: u8,
    },
}

impl PlacementPolicy {
    /// The highest level that [`PlacementPolicy::Subtrees`] can have; a higher one means this one.
    pub const LEVEL_MAX: u8 = 63;
    const SIMPLE: [Self; 3] = [Self::RoundRobin, Self::Leaves, Self::OneServer];
    const SUBTREES: u8 = 16;

    pub(crate) fn index(self) -> u8 {
        match self {
            Self::RoundRobin => 0,
            Self::Leaves => 1,
            Self::OneServer => 2,
            Self::Subtrees { level } => Self::SUBTREES + level.min(Self::LEVEL_MAX),
        }
    }

    pub(crate) fn from_index(index: u8) -> Option<Self> {
        match index.checked_sub(Self::SUBTREES) {
            Some(level) => (level <= Self::LEVEL_MAX).then_some(Self::Subtrees { level }),
            None => Self::SIMPLE.get(usize::from(index)).copied(),
        }
    }
}

/// How a structure is placed when it is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StructurePlacement {
    /// Where its pages will be.
    pub policy: PlacementPolicy,
    /// Where its root is; on the next server in turn if not said.
    pub root: Option<ServerId>,
}

/// Where a page lies, seen from a region of the structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    /// All that belongs to the page lies in the region.
    Inside,
    /// Some of it does.
    Partly,
    /// None of it does.
    Outside,
}

/// A part of a structure that one compute server can own, and that an operation can be about: a range of keys, a box, a set
/// of hashes.
pub trait Region: Wire + Clone + fmt::Debug + Send + Sync + 'static {
    /// All of a structure.
    fn everything() -> Self;

    /// Where this region lies, seen from another one.
    fn overlap(&self, other: &Self) -> Overlap;

    /// Whether these regions, of which no two overlap, are all of a structure together. Provided for what is owned as a whole or not
    /// at all.
    fn are_everything(regions: &[Self]) -> bool {
        regions.iter().any(|region| Self::everything().overlap(region) == Overlap::Inside)
    }

    /// What is left of this region without what of it lies in `piece`; `None` if that is no regions, because such ones are
    /// owned as a whole or not at all.
    fn without(&self, _piece: &Self) -> Option<Vec<Self>> {
        None
    }

    /// A region that some of these are together, with about `uses` of what is counted for them, and how much that is. Not all of
    /// them. `None` if that is no region.
    fn piece(_parts: &[(Self, u64)], _uses: u64) -> Option<(Self, u64)> {
        None
    }

    /// A number that stands for the region if it is a single point, such as a key: what is cut by hash is cut by it.
    fn point(&self) -> Option<u64> {
        None
    }
}

/// For structures that one compute server owns as a whole, or nobody.
impl Region for () {
    fn everything() -> Self {}

    fn overlap(&self, (): &Self) -> Overlap {
        Overlap::Inside
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_what_its_index_says() {
        let all = (0..=u8::MAX).filter_map(|index| Some((index, PlacementPolicy::from_index(index)?)));
        let all: Vec<_> = all.inspect(|(index, policy)| assert_eq!(policy.index(), *index)).collect();
        assert_eq!(all.len(), 3 + 64);
        assert_eq!(PlacementPolicy::Subtrees { level: 200 }.index(), PlacementPolicy::Subtrees { level: 63 }.index());
    }
}
