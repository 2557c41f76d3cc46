//! A node: one page of 64 bytes; and the ways from node to node.
//!
//! ```text
//! word 0..4   common header; its identity holds the level and, beside the mark of this layout, whether this is the head
//! word 4      low: the node's key, the least key that belongs here
//! word 5      high: the key of the node to the right, the least key that belongs there; not used if there is none
//! word 6      link to the right
//! word 7      level 0: the value; above: link to the node below, of the same key
//! ```

use farlink_runtime::access::*;
use farlink_runtime::page::{HEADER_WORDS, IDENTITY, Identity, SizeClass, avalanche};

use super::List;

/// The size of every node.
pub(super) const CLASS: SizeClass = SizeClass::SMALLEST;
/// So many steps to the right on one level are bad luck once in ten thousand searches; more probably a copy of a node above
/// is from before the towers that lie between.
pub(super) const STEPS_MAX: u32 = 32;
/// Levels above level 0: enough for 4^16 keys.
pub(super) const LEVEL_MAX: u32 = 16;
const KIND: u8 = 0x50;
const HEAD: u8 = 1;

const LOW: usize = HEADER_WORDS;
const HIGH: usize = HEADER_WORDS + 1;
const RIGHT: usize = HEADER_WORDS + 2;
const BELOW: usize = HEADER_WORDS + 3;

/// The level that the tower of a key reaches: one in four rises above level 0, one in four of those above level 1, and so on.
pub(super) fn height(key: u64) -> u8 {
    (avalanche(key).trailing_ones() / 2).min(LEVEL_MAX) as u8
}

/// What stands in a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) level: u8,
    /// `None`: it is the head of its level, before the node of the least key there, and has no value.
    pub(super) low: Option<u64>,
    /// `None`: there is no node to the right.
    pub(super) high: Option<u64>,
    pub(super) right: Link,
    /// The value, or the link to the node below.
    pub(super) below: u64,
}

impl Node {
    /// The head of an empty list.
    pub(super) const EMPTY: Self = Self { level: 0, low: None, high: None, right: Link::NULL, below: 0 };

    /// Makes sense of the words of a page, if they are a node's.
    pub(super) fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        let Identity { level, kind, .. } = Identity::from_word(words.word(IDENTITY))?;
        let right = Link::from_word(words.word(RIGHT));
        let low = (kind & HEAD == 0).then(|| words.word(LOW));
        let high = (!right.is_null()).then(|| words.word(HIGH));
        let is_node = kind | HEAD == KIND | HEAD && (high.is_none() || low < high);
        is_node.then(|| Self { level, low, high, right, below: words.word(BELOW) })
    }

    pub(super) fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        pages.describe(slot, self.level, if self.low.is_none() { KIND | HEAD } else { KIND });
        pages.fill(slot, LOW, &[self.low.unwrap_or(0), self.high.unwrap_or(0), self.right.word(), self.below]);
    }

    /// The positions of the links that a cache swizzles: to the node below, and to the right if no link from above leads there.
    pub(super) fn links(self) -> impl Iterator<Item = usize> {
        let top_beside = self.high.filter(|&high| height(high) == self.level);
        (self.level > 0).then_some(BELOW).into_iter().chain(top_beside.map(|_| RIGHT))
    }

    pub(super) fn value(&self) -> Option<u64> {
        (self.level == 0 && self.low.is_some()).then_some(self.below)
    }
}

/// A node, as a page and as what was read from it.
pub(super) struct Place<'a, A: Access<Plugin = List> + 'a> {
    pub(super) page: A::Page<'a>,
    pub(super) node: Node,
}

impl<'a, A: Access<Plugin = List>> Place<'a, A> {
    pub(super) async fn open(access: &'a A, start: Start) -> Result<Self, Interrupt> {
        Self::read(access.open(start).await?, |_| true)
    }

    /// A page that a link promised to be a node, and what `fits` asks for.
    fn read(page: A::Page<'a>, fits: impl FnOnce(&Node) -> bool) -> Result<Self, Interrupt> {
        let stale = Interrupt::stale(page.at(), "it is not the node that its link promised");
        Ok(Self { node: page.read(Node::of)?.filter(fits).ok_or(stale)?, page })
    }

    /// The node to the right, if there is one.
    pub(super) async fn right(&self, access: &'a A) -> Result<Self, Interrupt> {
        let page = access.follow(&self.page, self.node.right, Hint::BESIDE).await?;
        Self::read(page, |node| node.level == self.node.level && node.low == self.node.high)
    }

    /// The node below. `is_all`: all that is left of the operation lies there.
    pub(super) async fn below(&self, access: &'a A, is_all: bool) -> Result<Self, Interrupt> {
        let link = Link::from_word(self.node.below);
        let page = match is_all {
            true => access.descend(&self.page, link, Hint::DOWN).await?,
            false => access.follow(&self.page, link, Hint::DOWN).await?,
        };
        Self::read(page, |node| node.level.checked_add(1) == Some(self.node.level) && node.low == self.node.low)
    }
}
