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
    /// Where a new page of this level is to be.
    pub fn placement(&self, level: u8) -> Placement {
        match self.spread {
            Spread::RoundRobin => Placement::RoundRobin,
            Spread::Leaves if level == 0 => Placement::RoundRobin,
            Spread::Leaves | Spread::OneServer => Placement::With(self.root),
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
}

impl Spread {
    const ALL: [Self; 3] = [Self::RoundRobin, Self::Leaves, Self::OneServer];

    pub(crate) fn from_index(index: u8) -> Option<Self> {
        Self::ALL.get(usize::from(index)).copied()
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

    /// Calls `visit` with the position of each link of a page above level 0 to a page one level below. Links to siblings are
    /// not among them.
    fn links(&self, page: &(impl Words + ?Sized), visit: &mut dyn FnMut(usize));

    /// The part of the structure that is below one of those links. `None` if the page does not tell: operations are never
    /// shipped from there.
    fn below(&self, _page: &(impl Words + ?Sized), _link: usize) -> Option<Self::Region> {
        None
    }

    /// Whether what belongs to the page (its fences, its bounding box) lies in a region.
    fn overlap(&self, page: &(impl Words + ?Sized), region: &Self::Region) -> Overlap;
}
