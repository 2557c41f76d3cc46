//! What the framework knows of a structure.

use std::fmt;

use crate::{
    page::{SizeClass, StructureId},
    pages::Placement,
    ptr::{RemotePtr, ServerId},
    wire::Wire,
    words::Words,
};

/// A structure in the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Structure {
    /// Its number in the cluster, on each of its pages.
    pub id: StructureId,
    /// Its name: 1 to 64 bytes.
    pub name: String,
    /// Which plug-in it belongs to.
    pub kind: u32,
    /// The size of its pages; of its root, if it uses several.
    pub class: SizeClass,
    /// Its root page. A root grows and shrinks in place, so this never changes.
    pub root: RemotePtr,
    /// Where its pages are.
    pub spread: Spread,
}

impl Structure {
    /// Where a new page of this level is to be that comes from the page `beside`, as half of it, say.
    pub fn placement(&self, level: u8, beside: RemotePtr) -> Placement {
        match self.spread {
            Spread::RoundRobin => Placement::RoundRobin,
            Spread::Leaves if level == 0 => Placement::RoundRobin,
            Spread::Leaves | Spread::OneServer => Placement::With(self.root),
            Spread::Subtrees { level: top } if level > top => Placement::RoundRobin,
            Spread::Subtrees { .. } => Placement::With(beside),
        }
    }

    /// The highest level of which each page is on one memory server with all that is below it, in a cluster of so many.
    pub fn whole_up_to(&self, servers: usize) -> u8 {
        match self.spread {
            _ if servers == 1 => u8::MAX,
            Spread::RoundRobin | Spread::Leaves => 0,
            Spread::OneServer => u8::MAX,
            Spread::Subtrees { level } => level,
        }
    }
}

/// On which memory servers the pages of a structure are: the designs of Ziegler et al. (SIGMOD 2019, sections 3 to 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Spread {
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
        /// At most [`Spread::LEVEL_MAX`].
        level: u8,
    },
}

impl Spread {
    /// The highest level that [`Spread::Subtrees`] can have; a higher one means this one.
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
pub struct Placed {
    /// Where its pages will be.
    pub spread: Spread,
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

/// What the framework must know of a structure's pages. Implementations cope with any words: a page may be looked at while
/// it changes.
pub trait Layout: Clone + fmt::Debug + Send + 'static {
    /// A part of the structure that one compute server can own: a range of keys, a box.
    type Region: Wire + Clone + fmt::Debug + Send + 'static;

    /// Whether operations go from sibling to sibling as a matter of course. If not, they do so only where the page above is
    /// older than a split, and a copy kept of it is renewed.
    const WALKS_SIBLINGS: bool = false;

    /// The position of each link of a page above level 0 to a page one level below. Links to siblings are
    /// not among them.
    fn links(&self, page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize>;

    /// The part of the structure that is below one of those links. `None` if the page does not tell: operations are never
    /// shipped from there.
    fn below(&self, _page: &(impl Words + ?Sized), _link: usize) -> Option<Self::Region> {
        None
    }

    /// Whether what belongs to the page (its fences, its bounding box) lies in a region.
    fn overlap(&self, page: &(impl Words + ?Sized), region: &Self::Region) -> Overlap;
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_spread_is_what_its_index_says() {
        let all = (0..=u8::MAX).filter_map(|index| Some((index, Spread::from_index(index)?)));
        let all: Vec<_> = all.inspect(|(index, spread)| assert_eq!(spread.index(), *index)).collect();
        assert_eq!(all.len(), 3 + 64);
        assert_eq!(Spread::Subtrees { level: 200 }.index(), Spread::Subtrees { level: 63 }.index());
    }
}
