//! A node: one page of 64 bytes; and the ways from node to node.
//!
//! ```text
//! word 0..4   common header; its identity holds the level and, beside the mark of this layout, two flags
//! word 4      low: the node's key, the least key that belongs here
//! word 5      high: the key of the node to the right, the least key that belongs there; not used if there is none
//! word 6      link to the right
//! word 7      level 0: the value; above: link to the node below, of the same key
//! ```
//!
//! The flags: *present*, at level 0, that there is a value; *owns right*, that the node to the right is the top of its tower,
//! so that no link from above leads there and this one is the one to swizzle.

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start, Views},
    page::{HEADER_WORDS, IDENTITY, Identity, SizeClass},
    ptr::Link,
    structure::{Layout, Overlap},
    words::Words,
};

/// The size of every node.
pub(super) const CLASS: SizeClass = SizeClass::SMALLEST;
/// So many steps to the right on one level are bad luck once in ten thousand searches; more probably a copy of a node above
/// is from before the towers that lie between.
const STEPS_MAX: u32 = 32;
/// Levels above level 0: enough for 4^16 keys.
pub(super) const LEVEL_MAX: u8 = 16;
const KIND: u8 = 0x50;
const PRESENT: u8 = 1;
const OWNS_RIGHT: u8 = 2;

const LOW: usize = HEADER_WORDS;
const HIGH: usize = HEADER_WORDS + 1;
const RIGHT: usize = HEADER_WORDS + 2;
const BELOW: usize = HEADER_WORDS + 3;

/// What stands in a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) level: u8,
    pub(super) present: bool,
    pub(super) owns_right: bool,
    pub(super) low: u64,
    /// `None`: there is no node to the right.
    pub(super) high: Option<u64>,
    pub(super) right: Link,
    /// The value, or the link to the node below.
    pub(super) below: u64,
}

impl Node {
    /// The head of an empty list.
    pub(super) const EMPTY: Self =
        Self { level: 0, present: false, owns_right: false, low: 0, high: None, right: Link::NULL, below: 0 };

    /// Makes sense of the words of a page, if they are a node's.
    fn of(word: impl Fn(usize) -> u64) -> Option<Self> {
        let Identity { level, kind, .. } = Identity::from_word(word(IDENTITY))?;
        let (low, right) = (word(LOW), Link::from_word(word(RIGHT)));
        let high = (right != Link::NULL).then(|| word(HIGH));
        let is_node = kind & !(PRESENT | OWNS_RIGHT) == KIND && high.is_none_or(|high| low < high);
        let (present, owns_right) = (kind & PRESENT != 0, kind & OWNS_RIGHT != 0);
        is_node.then(|| Self { level, present, owns_right, low, high, right, below: word(BELOW) })
    }

    /// Reads a page that a link promised to be the node of this level and key, and what else `fits` asks for.
    pub(super) fn read(page: &impl PageRef, fits: impl FnOnce(&Self) -> bool) -> Result<Self, Interrupt> {
        let node = page.read(|words| Self::of(|index| words.word(index)))?;
        node.filter(fits).ok_or(Interrupt::stale(page.at(), "it is not the node that its link promised"))
    }

    /// A page of a change.
    pub(super) fn in_change(views: &impl Views, page: usize) -> Option<Self> {
        Self::of(|index| views.word(page, index))
    }

    pub(super) fn write(&self, views: &mut impl Views, page: usize) {
        let flags = (u8::from(self.present) * PRESENT) | (u8::from(self.owns_right) * OWNS_RIGHT);
        views.describe(page, self.level, KIND | flags);
        views.set(page, LOW, self.low);
        views.set(page, HIGH, self.high.unwrap_or(0));
        views.set(page, RIGHT, self.right.word());
        views.set(page, BELOW, self.below);
    }

    pub(super) fn value(&self) -> Option<u64> {
        self.present.then_some(self.below)
    }
}

/// The pages of a [`SkipList`](super::SkipList). One compute server can own all of it, or nothing: the way to a key leads
/// over nodes far to its left, which belong to whoever owns those keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SkipListLayout;

impl Layout for SkipListLayout {
    type Region = ();
    const WALKS_SIBLINGS: bool = true;

    fn links(&self, page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        let node = Node::of(|index| page.word(index));
        let [below, right] = node.map_or([false; 2], |node| [node.level > 0, node.owns_right]);
        [below.then_some(BELOW), right.then_some(RIGHT)].into_iter().flatten()
    }

    fn overlap(&self, _page: &(impl Words + ?Sized), (): &()) -> Overlap {
        Overlap::Inside
    }
}

/// A node, as a page and as what was read from it.
pub(super) struct Place<'a, A: Access + 'a> {
    pub(super) page: A::Page<'a>,
    pub(super) node: Node,
}

impl<'a, A: Access> Place<'a, A> {
    pub(super) async fn enter(access: &'a A, start: Start) -> Result<Self, Interrupt> {
        let page = access.enter(start).await?;
        Ok(Self { node: Node::read(&page, |_| true)?, page })
    }

    /// The node to the right, if there is one.
    pub(super) async fn right(&self, access: &'a A) -> Result<Self, Interrupt> {
        let page = access.sibling(&self.page, self.node.right).await?;
        let node = Node::read(&page, |node| node.level == self.node.level && Some(node.low) == self.node.high)?;
        Ok(Self { page, node })
    }

    pub(super) async fn below(&self, access: &'a A) -> Result<Self, Interrupt> {
        let page = access.follow(&self.page, Link::from_word(self.node.below)).await?;
        let node =
            Node::read(&page, |node| Some(node.level) == self.node.level.checked_sub(1) && node.low == self.node.low)?;
        Ok(Self { page, node })
    }
}

/// Where a search ended, and nodes that it passed.
pub(super) struct Found<'a, A: Access + 'a> {
    pub(super) last: Place<'a, A>,
    /// From the top down.
    pub(super) kept: Vec<Place<'a, A>>,
    /// Where it began.
    pub(super) first: Node,
}

/// Finds the node to which `key` belongs: at `level`, or at the top if that is lower. Nodes from which it goes down are kept
/// if `keep` says so.
pub(super) async fn search<'a, A: Access>(
    access: &'a A,
    start: Start,
    key: u64,
    level: u8,
    keep: impl Fn(&Node) -> bool,
) -> Result<Found<'a, A>, Interrupt> {
    let mut last = Place::enter(access, start).await?;
    let (first, mut kept, mut steps) = (last.node, Vec::new(), 0);
    if key < first.low {
        return Err(Interrupt::stale(last.page.at(), "it lies to the right of the key it was to hold"));
    }
    loop {
        if last.node.high.is_some_and(|high| high <= key) {
            steps += 1;
            if steps > STEPS_MAX && start == Start::Root {
                return Err(Interrupt::stale(last.page.at(), "the way to it is too long"));
            }
            last = last.right(access).await?;
        } else if last.node.level <= level {
            return Ok(Found { last, kept, first });
        } else {
            let below = last.below(access).await?;
            let above = std::mem::replace(&mut last, below);
            kept.extend(keep(&above.node).then_some(above));
            steps = 0;
        }
    }
}
