//! Rules of the tree's protocol, broken from outside: a change is recorded, and a part of it made too early.

use std::cell::Cell;

use farlink_runtime::{
    access::{PagesMut, Slot, Structure, Words},
    page::{HEADER_WORDS, IDENTITY, Identity},
};
use farlink_structures::rtree::Rect;

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    Nothing,
    /// A search takes a page that was split for the one that its link promised, and does not go on to the right.
    DropsRightLinks,
    /// A page that is condensed loses its entries in one change, and its siblings get them in the next one.
    CondensesInTwo,
    /// The same when a full page gives some of its entries to siblings.
    ReinsertsInTwo,
    /// Boxes above get smaller in one change, and entries that are outside of them move in the next one.
    ShrinksFirst,
    /// Pages whose entries have moved keep their links to the right.
    KeepsRightLinks,
    /// None of the tree's, but a memory server's: operations begin below the root and change one page.
    IsBelow,
}

/// Changes of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Steps {
    pub(crate) all: u32,
    /// Changes that split a page.
    pub(crate) splits: u32,
    /// Changes that move entries among siblings.
    pub(crate) reinsertions: u32,
    /// Changes that free a page.
    pub(crate) condensed: u32,
    /// Attempts from a fresh root, where operations begin below it.
    pub(crate) anew: u32,
}

/// Where things are in a page of the tree.
pub(crate) const COUNT: usize = HEADER_WORDS;
pub(crate) const STAMP: usize = HEADER_WORDS + 1;
pub(crate) const RIGHT: usize = HEADER_WORDS + 2;
pub(crate) const BOX: usize = HEADER_WORDS + 3;

/// The words of a page above level 0, as a test reads them.
pub(crate) struct Children<'a, const D: usize> {
    words: &'a [u64],
    capacity: usize,
}

impl<'a, const D: usize> Children<'a, D> {
    pub(crate) fn of(words: &'a [u64]) -> Self {
        Self { words, capacity: (words.len() - BOX - 2 * D) / (2 * D + 2) }
    }

    fn column(&self, number: usize) -> usize {
        BOX + 2 * D + number * self.capacity
    }

    pub(crate) fn position(&self, link: u64) -> Option<usize> {
        let from = self.column(2 * D);
        (0..self.words[COUNT] as usize).find(|&index| self.words[from + index] == link)
    }

    pub(crate) fn link(&self, index: usize) -> u64 {
        self.words[self.column(2 * D) + index]
    }

    pub(crate) fn stamp(&self, index: usize) -> u64 {
        self.words[self.column(2 * D + 1) + index]
    }

    fn rect(&self, index: usize) -> Rect<D> {
        let corner = |first| std::array::from_fn(|d| f64::from_bits(self.words[self.column(first + d) + index]));
        Rect::new(corner(0), corner(D)).unwrap_or(Rect::EVERYTHING)
    }
}

fn level(words: &[u64]) -> u8 {
    Identity::from_word(words[IDENTITY]).map_or(0, |identity| identity.level)
}

/// The words that make the boxes of children smaller as the change does; that of a child that goes is empty.
fn shrunk<const D: usize>(before: &[u64], after: &[u64]) -> impl Iterator<Item = (usize, u64)> {
    let (old, new) = (Children::<D>::of(before), Children::<D>::of(after));
    (0..before[COUNT] as usize).flat_map(move |index| {
        let then = new.position(old.link(index)).map(|then| new.rect(then));
        let (larger, nothing) = (old.rect(index), old.rect(index).low());
        let smaller = then.unwrap_or(Rect::new(nothing, nothing).unwrap_or(larger));
        let is_smaller = larger.contains(&smaller) && larger != smaller;
        let column =
            |first: usize, corner: [f64; D]| (0..D).map(move |d| (first + d, corner[d].to_bits())).collect::<Vec<_>>();
        let words = column(0, smaller.low()).into_iter().chain(column(D, smaller.high()));
        let words = words.map(|(number, word)| (old.column(number) + index, word)).collect::<Vec<_>>();
        words.into_iter().filter(move |_| is_smaller)
    })
}

/// Whether a leaf gives entries to siblings: all that take part get new stamps, and those that take have more than before.
fn gives(before: &[u64], after: &[u64]) -> bool {
    level(before) == 0 && before[STAMP] != after[STAMP] && after[COUNT] <= before[COUNT]
}

/// What a change does to its pages.
#[derive(Debug)]
pub(crate) struct Recorded {
    /// Of the pages that were there before.
    slots: Vec<Slot>,
    before: Vec<Vec<u64>>,
    /// As the change leaves them; behind them the new ones.
    pages: Vec<Vec<u64>>,
    freed: Vec<Slot>,
    /// What a new page is.
    identity: Identity,
}

impl Recorded {
    pub(crate) fn new(slots: Vec<Slot>, before: Vec<Vec<u64>>, new: usize, structure: &Structure) -> Self {
        let identity = Identity { structure: structure.id, level: 0, class: structure.class, kind: 0, is_words: false };
        let mut pages = before.clone();
        let mut empty = vec![0; structure.class.words()];
        empty[IDENTITY] = identity.word();
        pages.resize(before.len() + new, empty);
        Self { slots, before, pages, freed: Vec::new(), identity }
    }

    pub(crate) fn count(&self, steps: &Cell<Steps>) {
        let count = steps.get();
        let (splits, frees) = (self.splits(), !self.freed.is_empty());
        let mut pairs = self.before.iter().zip(&self.pages);
        let gives = !splits && !frees && pairs.any(|(before, after)| gives(before, after));
        steps.set(Steps {
            all: count.all + 1,
            splits: count.splits + u32::from(splits),
            reinsertions: count.reinsertions + u32::from(gives),
            condensed: count.condensed + u32::from(frees),
            ..count
        });
    }

    /// Breaks the rule that pages whose entries have moved forget their right links.
    pub(crate) fn keep_right_links(&mut self, fault: Fault) {
        if fault == Fault::KeepsRightLinks && !self.splits() {
            let moved = self.before.iter().zip(&mut self.pages).filter(|(before, after)| before[STAMP] != after[STAMP]);
            moved.for_each(|(before, after)| after[RIGHT] = before[RIGHT]);
        }
    }

    fn splits(&self) -> bool {
        self.pages.len() > self.before.len()
    }

    /// Makes the change.
    pub(crate) fn carry_out(&self, to: &mut impl PagesMut) {
        let new = (0..self.pages.len() - self.before.len()).map(Slot::new_page);
        for (slot, words) in self.slots.iter().copied().chain(new).zip(&self.pages) {
            if self.freed.contains(&slot) {
                to.free(slot);
                continue;
            }
            let identity = Identity::from_word(words[IDENTITY]).unwrap_or(self.identity);
            let is_same =
                self.before.get(slot.index(self.before.len())).is_some_and(|it| it[IDENTITY] == words[IDENTITY]);
            if !is_same {
                to.describe(slot, identity.level, identity.kind);
            }
            to.fill(slot, HEADER_WORDS, &words[HEADER_WORDS..]);
        }
    }

    /// The words that are set too early.
    pub(crate) fn early<const D: usize>(&self, fault: Fault) -> Vec<(Slot, usize, u64)> {
        let mut early = Vec::new();
        if self.splits() {
            return early;
        }
        for ((&slot, before), after) in self.slots.iter().zip(&self.before).zip(&self.pages) {
            let (is_leaf, is_freed) = (level(before) == 0, self.freed.contains(&slot));
            match fault {
                Fault::CondensesInTwo if is_leaf && is_freed => early.push((slot, COUNT, 0)),
                Fault::ReinsertsInTwo if !is_freed && gives(before, after) => {
                    let is_entry = |index: &usize| *index == COUNT || *index >= BOX + 2 * D;
                    let changed = (0..before.len()).filter(|&index| before[index] != after[index]);
                    early.extend(changed.filter(is_entry).map(|index| (slot, index, after[index])));
                }
                Fault::ShrinksFirst if !is_leaf => {
                    early.extend(shrunk::<D>(before, after).map(|(at, word)| (slot, at, word)))
                }
                _ => {}
            }
        }
        early
    }
}

impl PagesMut for Recorded {
    fn page(&self, slot: Slot) -> impl Words + '_ {
        &*self.pages[slot.index(self.before.len())]
    }

    fn set(&mut self, slot: Slot, index: usize, word: u64) {
        self.pages[slot.index(self.before.len())][index] = word;
    }

    fn describe(&mut self, slot: Slot, level: u8, kind: u8) {
        self.set(slot, IDENTITY, Identity { level, kind, ..self.identity }.word());
    }

    fn describe_words(&mut self, slot: Slot, level: u8, kind: u8) {
        self.set(slot, IDENTITY, Identity { level, kind, is_words: true, ..self.identity }.word());
    }

    fn free(&mut self, slot: Slot) {
        self.freed.push(slot);
    }
}
