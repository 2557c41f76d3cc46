//! What a search found, and changes there: of a value, of a tower, of the root's level. Each is one change of all the pages that
//! it is about.

use std::ops::RangeInclusive;

use farlink_runtime::{access::*, operation::clean_up};

use super::{List, node::*};

/// Attempts to lower the root behind one removal. The next removal tries again.
const LOWER_MAX: u32 = 16;

/// Where a search ended, and nodes that it passed.
pub(super) struct Found<'a, A: Access<Plugin = List> + 'a> {
    access: &'a A,
    pub(super) last: Place<'a, A>,
    /// From the top down.
    kept: Vec<Place<'a, A>>,
    /// Where it began.
    pub(super) first: Node,
}

impl<'a, A: Access<Plugin = List>> Found<'a, A> {
    /// Finds the last node that begins before `end`: at the first of `levels`, or at the top if that is lower. Keeps the nodes
    /// from which it goes down on `levels`.
    pub(super) async fn search(
        access: &'a A,
        start: Start,
        end: Option<u64>,
        levels: RangeInclusive<u8>,
    ) -> Result<Self, Interrupt> {
        let mut last = Place::open(access, start).await?;
        let is_before_end = |key| end.is_none_or(|end| key < end);
        let (first, mut kept, mut steps) = (last.node, Vec::new(), 0);
        if first.low.is_some_and(|low| !is_before_end(low)) {
            return Err(Interrupt::stale(last.page.at(), "it lies to the right of the key it was to hold"));
        }
        loop {
            if last.node.high.is_some_and(is_before_end) {
                steps += 1;
                if steps > STEPS_MAX && start == Start::Root {
                    return Err(Interrupt::stale(last.page.at(), "the way to it is too long"));
                }
                last = last.right(access).await?;
            } else if last.node.level <= *levels.start() {
                return Ok(Self { access, last, kept, first });
            } else {
                let is_kept = last.node.level <= *levels.end();
                let below = last.below(access, !is_kept).await?;
                kept.extend(is_kept.then_some(std::mem::replace(&mut last, below)));
                steps = 0;
            }
        }
    }

    /// Changes the value of the key at which the search ended; returns what stood there.
    pub(super) async fn set_value(self, below: u64) -> Result<Option<u64>, Interrupt> {
        let Place { page, node: Node { low, .. } } = self.last;
        let set = |pages: &mut A::PagesMut<'a>| {
            let node = Node::of(&pages.page(Slot::ONLY)).filter(|node| node.low == low && node.value().is_some())?;
            Node { below, ..node }.write(pages, Slot::ONLY);
            node.value()
        };
        self.access.change(Pages::current(page), set).await?.0.ok_or(Interrupt::conflict()).map(Some)
    }

    /// Adds the tower of a key to the right of all nodes found.
    pub(super) async fn add_tower(self, key: u64, value: u64) -> Result<(), Interrupt> {
        let Context { worker, structure, .. } = self.access.context();
        let (mut pages, mut tower, mut below) = (Pages::new(), Vec::new(), value);
        for Place { page, node } in self.kept.into_iter().chain([self.last]).rev() {
            let new = self.access.allocate(CLASS, structure.placement(node.level, page.at())).await?;
            let link = new.link();
            tower.push((pages.add(page), pages.add_new(new), node, link, below));
            below = link.word();
        }
        let add = |pages: &mut A::PagesMut<'a>| {
            for &(left, new, before, right, below) in &tower {
                Node { low: Some(key), below, ..before }.write(pages, new);
                Node { high: Some(key), right, ..before }.write(pages, left);
            }
        };
        self.access.change(pages, add).await.map(|_| worker.count_split())
    }

    /// Removes the tower of a key, to the left of which are all nodes found; returns the value.
    pub(super) async fn remove_tower(self, key: u64) -> Result<Option<u64>, Interrupt> {
        let (mut pages, mut pairs, mut value, mut is_alone) =
            (Pages::new(), Vec::new(), None, self.first.high.is_none());
        for place in self.kept.into_iter().chain([self.last]) {
            // The tower may have come into being meanwhile, behind the search on its upper levels.
            if place.node.high != Some(key) || self.first.level < height(key) {
                return Err(Interrupt::stale(place.page.at(), "it does not lead to the tower to its right"));
            }
            let gone = place.right(self.access).await?;
            value = gone.node.value();
            let after = Node { high: gone.node.high, right: gone.node.right, ..place.node };
            is_alone |= after.low.is_none() && after.high.is_none() && after.level == self.first.level;
            pairs.push((pages.add(place.page), pages.add(gone.page), after));
        }
        let remove = |pages: &mut A::PagesMut<'a>| {
            for (left, gone, after) in pairs {
                after.write(pages, left);
                pages.free(gone);
            }
        };
        self.access.change(pages, remove).await?;
        let worker = &self.access.context().worker;
        worker.count_merge();
        // The key is gone: from here on nothing may restart the operation.
        if is_alone {
            clean_up(worker, LOWER_MAX, async || lower_root(self.access).await).await;
        }
        Ok(value)
    }
}

/// Has the root reach a level, if it is lower: what it holds goes into a new page, with a head on it for each level between.
pub(super) async fn raise_root<A: Access<Plugin = List>>(access: &A, level: u8) -> Result<(), Interrupt> {
    let Place { page, node } = Place::open(access, Start::Anew).await?;
    let (at, lowest) = (page.at(), node.level);
    let (mut pages, mut heads, mut head) = (Pages::new(), Vec::new(), node);
    let root = pages.add(page);
    for level in lowest..level {
        let new = access.allocate(CLASS, access.context().structure.placement(level, at)).await?;
        let below = new.link().word();
        heads.push((pages.add_new(new), head));
        head = Node { level: level + 1, below, ..Node::EMPTY };
    }
    if heads.is_empty() {
        // Others were first.
        return Ok(());
    }
    let raise = |pages: &mut A::PagesMut<'_>| {
        heads.into_iter().for_each(|(new, head)| head.write(pages, new));
        head.write(pages, root);
    };
    access.change(pages, raise).await.map(drop)
}

/// Takes levels off the top on which the root is alone.
async fn lower_root<A: Access<Plugin = List>>(access: &A) -> Result<(), Interrupt> {
    let mut root = Place::open(access, Start::Anew).await?;
    while root.node.level > 0 && root.node.high.is_none() {
        let Place { page, node } = root.below(access, false).await?;
        let mut pages = Pages::new();
        let (above, below) = (pages.add(root.page), pages.add(page));
        let lower = |pages: &mut A::PagesMut<'_>| {
            node.write(pages, above);
            pages.free(below);
        };
        access.change(pages, lower).await?;
        root = Place::open(access, Start::Anew).await?;
    }
    Ok(())
}
