//! A page of the tree.
//!
//! ```text
//! word 4    how many entries
//! word 5    stamp (node sequence number)
//! word 6    right link
//! word 7..  the page's own box: its low corner, its high corner
//! then      columns, as long as the page has room for entries: the low coordinates of each dimension, the high ones of each,
//!           payloads (above level 0: links), and above level 0 stamps
//! ```
//!
//! Nothing read from a page is trusted: counts are clamped, links checked by those who follow them, numbers may be any.

use farlink_runtime::{
    access::{Access, Interrupt, Link, PageRef, PagesMut, Slot, Structure, Words},
    page::{HEADER_WORDS, IDENTITY, Identity},
};

use smallvec::SmallVec;

use super::{
    Tree,
    rect::{Query, Rect},
};

/// The mark of a page of the tree.
pub(super) const KIND: u8 = 1;
const COUNT: usize = HEADER_WORDS;
const STAMP: usize = HEADER_WORDS + 1;
const RIGHT: usize = HEADER_WORDS + 2;
const BOX: usize = HEADER_WORDS + 3;
/// Entries tested at a time, a bit for each.
const BATCH: usize = 64;

/// An entry of a page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Item<const D: usize> {
    pub(super) rect: Rect<D>,
    /// The payload; above level 0 the link to a page.
    pub(super) word: u64,
    /// The stamp of that page.
    pub(super) stamp: u64,
}

impl<const D: usize> Item<D> {
    pub(super) fn link(&self) -> Link {
        Link::from_word(self.word)
    }

    /// Its word in a column.
    #[inline]
    fn column(&self, number: usize) -> u64 {
        match number {
            low if low < D => self.rect.low[low].to_bits(),
            high if high < 2 * D => self.rect.high[high - D].to_bits(),
            word if word == 2 * D => self.word,
            _ => self.stamp,
        }
    }
}

/// What a page says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Head<const D: usize> {
    pub(super) level: u8,
    pub(super) stamp: u64,
    pub(super) right: Link,
    pub(super) bounds: Rect<D>,
}

/// A page, to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node<'a, W: ?Sized, const D: usize> {
    words: &'a W,
    pub(super) level: u8,
    pub(super) count: usize,
    pub(super) capacity: usize,
}

/// Words up to where the columns begin: a page of the tree has more.
pub(super) const fn words_min<const D: usize>() -> usize {
    BOX + 2 * D
}

/// Columns of a page.
const fn columns<const D: usize>(level: u8) -> usize {
    2 * D + 1 + (level > 0) as usize
}

/// Entries that a page of so many words has room for.
pub(super) const fn capacity<const D: usize>(words: usize, level: u8) -> usize {
    let words = words.saturating_sub(words_min::<D>());
    // Divided by constants.
    if level > 0 { words / columns::<D>(1) } else { words / columns::<D>(0) }
}

/// Entries that a page should have at least.
pub(super) const fn count_min(capacity: usize) -> usize {
    capacity * 2 / 5
}

/// Words of a page below one of a level that a search looks at: the head and the coordinates, of a large page the first.
pub(super) fn coordinates<const D: usize>(structure: &Structure, level: u8) -> [(u16, u16); 3] {
    const WORDS_MAX: usize = 256;
    let capacity = capacity::<D>(structure.class.words(), level.saturating_sub(1));
    [(0, column::<D>(capacity, 2 * D).min(WORDS_MAX) as u16), (0, 0), (0, 0)]
}

const fn column<const D: usize>(capacity: usize, number: usize) -> usize {
    words_min::<D>() + number * capacity
}

/// That a page can be one of the tree: all have one size.
pub(super) fn require_page<A: Access<Plugin = Tree<D>>, const D: usize>(
    access: &A,
    page: &A::Page<'_>,
) -> Result<(), Interrupt> {
    let is_one =
        page.kind() == KIND && page.link().remote().is_some_and(|(_, class)| class == access.context().structure.class);
    is_one.then_some(()).ok_or(Interrupt::stale(page.at(), "it is no page of an R-tree of its size"))
}

impl<'a, W: Words + ?Sized, const D: usize> Node<'a, W, D> {
    pub(super) fn of(words: &'a W) -> Self {
        let level = Identity::from_word(words.word(IDENTITY)).map_or(0, |identity| identity.level);
        let capacity = capacity::<D>(words.count(), level);
        let count = usize::try_from(words.word(COUNT)).map_or(capacity, |count| count.min(capacity));
        Self { words, level, count, capacity }
    }

    fn number(&self, at: usize) -> f64 {
        f64::from_bits(self.words.word(at))
    }

    pub(super) fn stated_count(&self) -> u64 {
        self.words.word(COUNT)
    }

    pub(super) fn is_full(&self) -> bool {
        self.count == self.capacity
    }

    pub(super) fn head(&self) -> Head<D> {
        Head { level: self.level, stamp: self.stamp(), right: self.right(), bounds: self.bounds() }
    }

    pub(super) fn stamp(&self) -> u64 {
        self.words.word(STAMP)
    }

    pub(super) fn right(&self) -> Link {
        Link::from_word(self.words.word(RIGHT))
    }

    #[inline]
    pub(super) fn bounds(&self) -> Rect<D> {
        let corner = |from| std::array::from_fn(|d| self.number(from + d));
        Rect { low: corner(BOX), high: corner(BOX + D) }
    }

    pub(super) fn rect(&self, index: usize) -> Rect<D> {
        let corner = |first| std::array::from_fn(|d| self.number(column::<D>(self.capacity, first + d) + index));
        Rect { low: corner(0), high: corner(D) }
    }

    pub(super) fn word(&self, index: usize) -> u64 {
        self.words.word(self.word_position(index))
    }

    pub(super) fn word_position(&self, index: usize) -> usize {
        column::<D>(self.capacity, 2 * D) + index
    }

    /// The stamp of the page that an entry above level 0 leads to.
    #[inline]
    pub(super) fn stamp_of(&self, index: usize) -> u64 {
        self.words.word(column::<D>(self.capacity, 2 * D + 1) + index)
    }

    pub(super) fn item(&self, index: usize) -> Item<D> {
        let stamp = if self.level == 0 { 0 } else { self.stamp_of(index) };
        Item { rect: self.rect(index), word: self.word(index), stamp }
    }

    pub(super) fn items(&self) -> Vec<Item<D>> {
        (0..self.count).map(|index| self.item(index)).collect()
    }

    /// Where an entry is.
    pub(super) fn position(&self, rect: &Rect<D>, payload: u64) -> Option<usize> {
        (0..self.count).find(|&index| self.word(index) == payload && self.rect(index) == *rect)
    }

    /// Hands `each` the index and the box of every entry that is asked for, or of every child that can have such.
    ///
    /// One dimension is tested for all entries, with no branch that depends on one; the others for those that are left, since
    /// they are few unless they are hits.
    #[inline]
    pub(super) fn find(&self, query: &Query<D>, mut each: impl FnMut(usize, Rect<D>)) {
        let (low_max, high_min) = query.bounds();
        for from in (0..self.count).step_by(BATCH) {
            let mut left = self.first_hits(from, low_max[0], high_min[0]);
            while left != 0 {
                let index = from + left.trailing_zeros() as usize;
                left &= left - 1;
                let rect = self.rect(index);
                let is_hit =
                    (1..D).fold(true, |all, d| all & (rect.low[d] <= low_max[d]) & (rect.high[d] >= high_min[d]));
                if is_hit && (self.level > 0 || query.takes(&rect)) {
                    each(index, rect);
                }
            }
        }
    }

    /// A bit for each of the entries from `from` on that begins at `low_max` at most and ends at `high_min` at least in the first
    /// dimension.
    #[inline]
    fn first_hits(&self, from: usize, low_max: f64, high_min: f64) -> u64 {
        let count = (self.count - from).min(BATCH);
        let [lows, highs] = [0, D].map(|number| column::<D>(self.capacity, number) + from);
        if low_max == f64::INFINITY && high_min == f64::NEG_INFINITY {
            return u64::MAX >> (BATCH - count);
        }
        self.words.mask(lows, count, |low| f64::from_bits(low) <= low_max)
            & self.words.mask(highs, count, |high| f64::from_bits(high) >= high_min)
    }
}

/// Sets all of a page.
pub(super) fn write<const D: usize>(pages: &mut impl PagesMut, slot: Slot, head: &Head<D>, items: &[Item<D>]) {
    forget_links::<D>(pages, slot, 0);
    pages.describe(slot, head.level, KIND);
    pages.set(slot, STAMP, head.stamp);
    // A damaged page's link is not handed on.
    pages.set(slot, RIGHT, head.right.remote().map_or(0, |_| head.right.word()));
    set_bounds(pages, slot, &head.bounds);
    let capacity = capacity::<D>(pages.page(slot).count(), head.level);
    let mut words: SmallVec<[u64; 64]> = SmallVec::new();
    for number in 0..columns::<D>(head.level) {
        words.clear();
        words.extend(items.iter().map(|item| item.column(number)));
        pages.fill(slot, column::<D>(capacity, number), &words);
    }
    pages.set(slot, COUNT, items.len() as u64);
}

/// Clears what looks like a swizzled link from this entry on: what is no link any more nobody would unswizzle.
fn forget_links<const D: usize>(pages: &mut impl PagesMut, slot: Slot, from: usize) {
    let words = pages.page(slot);
    let node = Node::<_, D>::of(&words);
    let links = if node.level > 0 { from..node.count } else { 0..0 };
    let swizzled: Vec<usize> =
        links.filter(|&index| node.word(index) >> 63 != 0).map(|index| node.word_position(index)).collect();
    drop(words);
    swizzled.into_iter().for_each(|position| pages.set(slot, position, 0));
}

pub(super) fn set_bounds<const D: usize>(pages: &mut impl PagesMut, slot: Slot, bounds: &Rect<D>) {
    pages.fill(slot, BOX, &bounds.low.map(f64::to_bits));
    pages.fill(slot, BOX + D, &bounds.high.map(f64::to_bits));
}

/// Sets an entry of a page, whatever the page's count.
pub(super) fn set_item<const D: usize>(pages: &mut impl PagesMut, slot: Slot, index: usize, item: &Item<D>) {
    let Node { level, capacity, .. } = Node::<_, D>::of(&pages.page(slot));
    for number in 0..columns::<D>(level) {
        pages.set(slot, column::<D>(capacity, number) + index, item.column(number));
    }
}

/// Adds an entry to a page that has room.
pub(super) fn push<const D: usize>(pages: &mut impl PagesMut, slot: Slot, item: &Item<D>) {
    let count = Node::<_, D>::of(&pages.page(slot)).count;
    set_item(pages, slot, count, item);
    pages.set(slot, COUNT, count as u64 + 1);
}

/// Removes an entry: the last one takes its place.
pub(super) fn remove_at<const D: usize>(pages: &mut impl PagesMut, slot: Slot, index: usize) {
    let (last, item) = {
        let words = pages.page(slot);
        let node = Node::<_, D>::of(&words);
        let last = node.count.saturating_sub(1);
        (last, node.item(last))
    };
    set_item(pages, slot, index, &item);
    forget_links::<D>(pages, slot, last);
    pages.set(slot, COUNT, last as u64);
}
