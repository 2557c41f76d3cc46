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

use farlink_runtime::access::*;
use farlink_runtime::page::{HEADER_WORDS, IDENTITY, Identity, SizeClass};

use super::List;

/// The size of every node.
pub(super) const CLASS: SizeClass = SizeClass::SMALLEST;
/// So many steps to the right on one level are bad luck once in ten thousand searches; more probably a copy of a node above
/// is from before the towers that lie between.
const STEPS_MAX: u32 = 32;
/// Levels above level 0: enough for 4^16 keys.
pub(super) const LEVEL_MAX: u32 = 16;
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
    pub(super) fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        let Identity { level, kind, .. } = Identity::from_word(words.word(IDENTITY))?;
        let (low, right) = (words.word(LOW), Link::from_word(words.word(RIGHT)));
        let high = (!right.is_null()).then(|| words.word(HIGH));
        let is_node = kind & !(PRESENT | OWNS_RIGHT) == KIND && high.is_none_or(|high| low < high);
        let (present, owns_right) = (kind & PRESENT != 0, kind & OWNS_RIGHT != 0);
        is_node.then(|| Self { level, present, owns_right, low, high, right, below: words.word(BELOW) })
    }

    pub(super) fn write(&self, pages: &mut impl PagesMut, slot: Slot) {
        let flags = (u8::from(self.present) * PRESENT) | (u8::from(self.owns_right) * OWNS_RIGHT);
        pages.describe(slot, self.level, KIND | flags);
        pages.fill(slot, LOW, &[self.low, self.high.unwrap_or(0), self.right.word(), self.below]);
    }

    /// The positions of the links that a cache swizzles.
    pub(super) fn links(self) -> impl Iterator<Item = usize> {
        [(self.level > 0).then_some(BELOW), self.owns_right.then_some(RIGHT)].into_iter().flatten()
    }

    pub(super) fn value(&self) -> Option<u64> {
        self.present.then_some(self.below)
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
        match page.read(Node::of)?.filter(fits) {
            Some(node) => Ok(Self { page, node }),
            None => Err(Interrupt::stale(page.at(), "it is not the node that its link promised")),
        }
    }

    /// The node to the right, if there is one.
    pub(super) async fn right(&self, access: &'a A) -> Result<Self, Interrupt> {
        let page = access.follow(&self.page, self.node.right, Hint::BESIDE).await?;
        Self::read(page, |node| node.level == self.node.level && Some(node.low) == self.node.high)
    }

    /// The node below. `is_all`: all that is left of the operation lies there.
    pub(super) async fn below(&self, access: &'a A, is_all: bool) -> Result<Self, Interrupt> {
        let link = Link::from_word(self.node.below);
        let page = match is_all {
            true => access.descend(&self.page, link, Hint::DOWN).await?,
            false => access.follow(&self.page, link, Hint::DOWN).await?,
        };
        Self::read(page, |node| Some(node.level) == self.node.level.checked_sub(1) && node.low == self.node.low)
    }
}

/// Where a search ended, and nodes that it passed.
pub(super) struct Found<'a, A: Access<Plugin = List> + 'a> {
    pub(super) last: Place<'a, A>,
    /// From the top down.
    pub(super) kept: Vec<Place<'a, A>>,
    /// Where it began.
    pub(super) first: Node,
}

/// Finds the node to which `key` belongs: at `level`, or at the top if that is lower. Nodes from which it goes down are kept
/// if `keep` says so.
pub(super) async fn search<'a, A: Access<Plugin = List>>(
    access: &'a A,
    start: Start,
    key: u64,
    level: u8,
    keep: impl Fn(&Node) -> bool,
) -> Result<Found<'a, A>, Interrupt> {
    let mut last = Place::open(access, start).await?;
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
            let is_kept = keep(&last.node);
            let below = last.below(access, kept.is_empty() && !is_kept).await?;
            let above = std::mem::replace(&mut last, below);
            kept.extend(is_kept.then_some(above));
            steps = 0;
        }
    }
}
