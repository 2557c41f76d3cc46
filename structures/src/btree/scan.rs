//! Scans: leaves in key order, fetched ahead of need.
//!
//! A scan goes along the pages above the leaves and reads several of their children at once, as many as it expects to
//! need: the links of the parent serve as the head pages of Ziegler et al. (SIGMOD 2019, section 4.3), but need no upkeep
//! of their own. The scan keeps a *cursor*, the next key it has not covered. A leaf is used if its fences include the
//! cursor, which then moves to the leaf's end. If a leaf split after its parent was read, the gap shows, and the scan fills
//! it through right links; a leaf that was merged away shows as free, and the one that took its entries covers them.
//!
//! What a scan promises under concurrent changes: entries of each leaf are of one moment; every key that was there all the
//! time is returned, no key twice, in order.

use std::rc::Rc;

use farlink_runtime::{
    access::{Access, Interrupt, Link, PageRef, Start, Words},
    error::Error,
};

use super::{
    Tree,
    descend::{Down, RIGHTS_MAX, Ships, Stays, beside, descend, require_level},
    node::{Node, Side},
};
use crate::map::ops::{Count, Scan, ScanPart};

/// Leaves fetched at once, at most.
const AHEAD_MAX: usize = 16;

pub(super) async fn scan<A: Access<Plugin = Tree>>(
    access: &A,
    from: Start,
    scan: &Scan<Tree>,
) -> Result<ScanPart, Interrupt> {
    let Scan { low, high, descending, .. } = *scan;
    let begin = Some(if descending { high } else { low });
    let mut walk = Walk { low, high, cursor: begin };
    let limit = usize::try_from(scan.limit).unwrap_or(usize::MAX);
    let mut entries = Vec::new();
    let mut collect = |words: &[(u64, u64)]| {
        entries.extend_from_slice(&words[..words.len().min(limit - entries.len())]);
        entries.len() < limit
    };
    let outcome = if descending {
        walk.descend(access, from, limit, &mut collect).await
    } else {
        walk.ascend(access, from, limit, &mut collect).await
    };
    match outcome {
        // What was covered stands, even if nothing was found there: only the rest has to begin anew. Otherwise a scan that
        // meets one old cached page after another would never get past the second.
        Err(Interrupt::Restart(_)) if walk.cursor != begin => {}
        other => other?,
    }
    let rest = match entries.last() {
        Some(&(last, _)) if entries.len() == limit && descending => last.checked_sub(1),
        Some(&(last, _)) if entries.len() == limit => last.checked_add(1),
        _ => walk.cursor,
    };
    Ok(ScanPart { entries, rest: rest.filter(|&rest| rest >= low && rest <= high), descending })
}

pub(super) async fn count<A: Access<Plugin = Tree>>(
    access: &A,
    from: Start,
    count: &Count<Tree>,
) -> Result<(u64, Option<u64>), Interrupt> {
    let Count { low, high, limit, .. } = *count;
    let mut walk = Walk { low, high, cursor: Some(low) };
    let mut counted = 0;
    let mut count = |entries: &[(u64, u64)]| {
        counted += entries.len() as u64;
        counted < limit
    };
    match walk.ascend(access, from, usize::try_from(limit).unwrap_or(usize::MAX), &mut count).await {
        Err(Interrupt::Restart(_)) if walk.cursor != Some(low) => {}
        other => other?,
    }
    Ok((counted, walk.cursor.filter(|&rest| rest <= high)))
}

/// A way along the leaves from one end of a range of keys to the other. `visit` is given each leaf's entries in the range,
/// in the walk's direction, and says whether to go on.
struct Walk {
    low: u64,
    high: u64,
    /// The next key not covered; `None` when all are.
    cursor: Option<u64>,
}

impl Walk {
    async fn ascend<A: Access<Plugin = Tree>>(
        &mut self,
        access: &A,
        from: Start,
        expected: usize,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<(), Interrupt> {
        let Some(cursor) = self.cursor else { return Ok(()) };
        let mut pace = Pace::new(access, expected);
        let mut above = match above_leaves::<_, Ships>(access, from, cursor).await? {
            Above::Leaf(leaf) => {
                self.visit_up(&leaf, &mut pace, visit)?;
                return self.require_progress(cursor, &leaf);
            }
            Above::Page(page) => Rc::new(page),
        };
        loop {
            let Some(cursor) = self.cursor else { return Ok(()) };
            let (mut next, children) =
                above.read(|words| (Node(words).child_for(cursor), Children::of(&Node(words))))?;
            let mut last: Option<A::Page<'_>> = None;
            while let Some(first) = next.filter(|&first| first < children.links.len()) {
                let end = (first + pace.leaves()).min(children.end_within(self.high));
                let batch = first..end.clamp(first + 1, children.links.len());
                let links = children.links[batch.clone()].iter().map(|&link| (Rc::clone(&above), link));
                for read in access.follow_each(links).all().await {
                    let leaf = match read {
                        Ok(leaf) => leaf,
                        // Merged away; whatever took its entries is to the right of the leaf before.
                        Err(Interrupt::Restart(_)) => continue,
                        Err(interrupt) => return Err(interrupt),
                    };
                    require_level(&leaf, 0)?;
                    let low = leaf.read(|words| Node(words).low())?;
                    if !self.fill_gap(access, &mut last, low, &mut pace, visit).await? {
                        return Ok(());
                    }
                    let before = self.cursor;
                    if self.visit_up(&leaf, &mut pace, visit)? {
                        return Ok(());
                    }
                    // Not one that was freed and came back far to the left: from there the way is long.
                    if last.is_none() || self.cursor != before {
                        last = Some(leaf);
                    }
                }
                let end = children.keys.get(batch.end).copied().or(children.high);
                if !self.fill_gap(access, &mut last, end.unwrap_or(u64::MAX), &mut pace, visit).await? {
                    return Ok(());
                }
                next = Some(batch.end);
            }
            let Some(reached) = self.cursor else { return Ok(()) };
            if children.high.is_none() || reached == cursor {
                return Err(Interrupt::stale(above.at(), "its children do not hold its keys"));
            }
            above = Rc::new(self.next_above(access, from, &above, reached).await?);
        }
    }

    /// That the only leaf of the walk has moved the cursor; if not, whoever asks for the rest would ask for ever.
    fn require_progress(&self, before: u64, leaf: &impl PageRef) -> Result<(), Interrupt> {
        match self.cursor == Some(before) {
            true => Err(Interrupt::stale(leaf.at(), "it is the only leaf, and does not hold the key")),
            false => Ok(()),
        }
    }

    /// Visits leaves through right links until the cursor reaches `until`; false if the walk is over.
    async fn fill_gap<'a, A: Access<Plugin = Tree>>(
        &mut self,
        access: &'a A,
        last: &mut Option<A::Page<'a>>,
        until: u64,
        pace: &mut Pace,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<bool, Interrupt> {
        while let Some(cursor) = self.cursor.filter(|&cursor| cursor < until) {
            let Some(before) = last.take() else {
                return Err(Interrupt::stale(
                    access.context().structure.root,
                    "the leaf where a scan begins was merged away",
                ));
            };
            let right = before.read(|words| Node(words).right())?;
            let leaf = beside(access, &before, right).await?;
            if leaf.read(|words| Node(words).low())? > cursor {
                return Err(Interrupt::stale(leaf.at(), "there is a gap between it and the leaf to its left"));
            }
            if self.visit_up(&leaf, pace, visit)? {
                return Ok(false);
            }
            *last = Some(leaf);
        }
        Ok(self.cursor.is_some())
    }

    /// The page above the leaves that holds the cursor, to the right of `above`.
    async fn next_above<'a, A: Access<Plugin = Tree>>(
        &self,
        access: &'a A,
        from: Start,
        above: &A::Page<'a>,
        cursor: u64,
    ) -> Result<A::Page<'a>, Interrupt> {
        let right = above.read(|words| Node(words).right())?;
        match beside(access, above, right).await {
            Ok(next) if next.read(|words| Node(words).side(cursor) == Side::Here)? => Ok(next),
            Ok(_) | Err(Interrupt::Restart(_)) => {
                match above_leaves::<_, Stays>(access, begin_again(from), cursor).await? {
                    Above::Page(page) => Ok(page),
                    Above::Leaf(root) => Err(Interrupt::stale(root.at(), "the tree has shrunk to a leaf")),
                }
            }
            Err(interrupt) => Err(interrupt),
        }
    }

    /// Visits a leaf if it holds the cursor, and moves the cursor past it. True if the walk is over.
    fn visit_up(
        &mut self,
        leaf: &impl PageRef,
        pace: &mut Pace,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<bool, Interrupt> {
        let Some(cursor) = self.cursor else { return Ok(true) };
        let found = leaf.read(|words| {
            let node = Node(words);
            let last = self.high;
            let from = node.lower_bound(cursor);
            let entries = (from..node.count()).map(|i| (node.key(i), node.value(i)));
            let entries: Vec<_> = entries.take_while(|&(key, _)| key <= last).collect();
            (node.side(cursor) == Side::Here).then(|| (entries, node.high(), node.count()))
        })?;
        let Some((entries, high, count)) = found else { return Ok(false) };
        let within = |key: u64| key >= cursor && high.is_none_or(|high| key < high);
        require_order(leaf, entries.is_sorted_by(|a, b| a.0 < b.0) && entries.iter().all(|&(key, _)| within(key)))?;
        pace.saw(count, entries.len());
        self.cursor = high.filter(|&high| high <= self.high && high > cursor);
        Ok(!visit(&entries) || self.cursor.is_none())
    }

    async fn descend<A: Access<Plugin = Tree>>(
        &mut self,
        access: &A,
        from: Start,
        expected: usize,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<(), Interrupt> {
        let mut pace = Pace::new(access, expected);
        let mut is_first = true;
        while let Some(cursor) = self.cursor {
            let above = match is_first {
                true => above_leaves::<_, Ships>(access, from, cursor).await?,
                false => above_leaves::<_, Stays>(access, begin_again(from), cursor).await?,
            };
            is_first = false;
            let above = match above {
                Above::Leaf(leaf) => {
                    self.visit_down(&leaf, &mut pace, visit)?;
                    return self.require_progress(cursor, &leaf);
                }
                Above::Page(page) => Rc::new(page),
            };
            let (next, children) = above.read(|words| (Node(words).child_for(cursor), Children::of(&Node(words))))?;
            let mut next = next.map(|index| index + 1);
            while let Some(end) = next.filter(|&end| end > 0) {
                let first = children.start_within(self.low).max(end.saturating_sub(pace.leaves())).min(end - 1);
                let links = children.links[first..end].iter().rev().map(|&link| (Rc::clone(&above), link));
                for read in access.follow_each(links).all().await {
                    if self.visit_down_from(access, read?, &mut pace, visit).await? {
                        return Ok(());
                    }
                }
                next = Some(first);
            }
            if self.cursor == Some(cursor) {
                return Err(Interrupt::stale(above.at(), "its children do not hold its keys"));
            }
        }
        Ok(())
    }

    /// Visits, right to left, what the leaf and those split off from it hold up to the cursor. True if the walk is over.
    async fn visit_down_from<'a, A: Access<Plugin = Tree>>(
        &mut self,
        access: &'a A,
        leaf: A::Page<'a>,
        pace: &mut Pace,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<bool, Interrupt> {
        require_level(&leaf, 0)?;
        let mut rights = 0;
        while let Some(cursor) = self.cursor {
            match leaf.read(|words| Node(words).side(cursor))? {
                Side::Left => return Ok(false),
                Side::Here => return self.visit_down(&leaf, pace, visit),
                Side::Right => {}
            }
            let right = leaf.read(|words| Node(words).right())?;
            let mut beyond = beside(access, &leaf, right).await?;
            while beyond.read(|words| Node(words).side(cursor) == Side::Right)? {
                // The page above is old. What was visited so far stands.
                if rights == RIGHTS_MAX {
                    return Err(Interrupt::stale(beyond.at(), "it is far from where the key belongs"));
                }
                rights += 1;
                let right = beyond.read(|words| Node(words).right())?;
                beyond = beside(access, &beyond, right).await?;
            }
            if beyond.read(|words| Node(words).side(cursor) == Side::Left)? {
                return Err(Interrupt::stale(beyond.at(), "there is a gap between it and the leaf to its left"));
            }
            if self.visit_down(&beyond, pace, visit)? {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Visits a leaf that holds the cursor, and moves the cursor below it. True if the walk is over.
    fn visit_down(
        &mut self,
        leaf: &impl PageRef,
        pace: &mut Pace,
        visit: &mut impl FnMut(&[(u64, u64)]) -> bool,
    ) -> Result<bool, Interrupt> {
        let Some(cursor) = self.cursor else { return Ok(true) };
        let (entries, low, count) = leaf.read(|words| {
            let node = Node(words);
            let entries = (0..node.count()).rev().map(|i| (node.key(i), node.value(i)));
            let entries = entries.skip_while(|&(key, _)| key > cursor).take_while(|&(key, _)| key >= self.low);
            (entries.collect::<Vec<_>>(), node.low(), node.count())
        })?;
        let within = |key: u64| key <= cursor && key >= low;
        require_order(leaf, entries.is_sorted_by(|a, b| a.0 > b.0) && entries.iter().all(|&(key, _)| within(key)))?;
        pace.saw(count, entries.len());
        self.cursor = low.checked_sub(1).filter(|&next| next >= self.low && next < cursor);
        Ok(!visit(&entries) || self.cursor.is_none())
    }
}

/// That a leaf's keys are in order and between its fences. A leaf is read as it was at one moment, so others' changes are no
/// excuse; and a scan that went on from a key out of order could go on for ever.
fn require_order(leaf: &impl PageRef, is_in_order: bool) -> Result<(), Interrupt> {
    match is_in_order {
        true => Ok(()),
        false => {
            Err(Error::Inconsistent { page: leaf.at(), why: "its keys are out of order or outside its fences" }.into())
        }
    }
}

/// Where a walk that has begun there goes down once more: a shipped one stays below its page.
fn begin_again(from: Start) -> Start {
    match from {
        Start::Page(_) => from,
        _ => Start::Root,
    }
}

enum Above<P> {
    /// A page of level 1.
    Page(P),
    /// The tree is a single leaf.
    Leaf(P),
}

async fn above_leaves<'a, A: Access<Plugin = Tree>, D: Down>(
    access: &'a A,
    start: Start,
    key: u64,
) -> Result<Above<A::Page<'a>>, Interrupt> {
    let page = descend::<_, D>(access, start, key, 1).await?.page;
    Ok(if page.level() == 0 { Above::Leaf(page) } else { Above::Page(page) })
}

/// The children of a page above the leaves.
struct Children {
    keys: Vec<u64>,
    links: Vec<Link>,
    high: Option<u64>,
}

impl Children {
    fn of(node: &Node<'_, impl Words + ?Sized>) -> Self {
        let indices = 0..node.count();
        Self {
            keys: indices.clone().map(|index| node.key(index)).collect(),
            links: indices.map(|index| node.child(index)).collect(),
            high: node.high(),
        }
    }

    /// One past the last child that can hold keys up to `high`.
    fn end_within(&self, high: u64) -> usize {
        self.keys.partition_point(|&key| key <= high)
    }

    /// The first child that can hold keys from `low` on.
    fn start_within(&self, low: u64) -> usize {
        self.keys.partition_point(|&key| key <= low).saturating_sub(1)
    }
}

/// How many leaves to fetch at once: what the entries still wanted will probably fill.
struct Pace {
    wanted: usize,
    leaves_seen: usize,
    entries_seen: usize,
}

impl Pace {
    fn new<A: Access<Plugin = Tree>>(access: &A, wanted: usize) -> Self {
        let capacity = super::node::capacity(access.context().structure.class.words());
        Self { wanted, leaves_seen: 1, entries_seen: capacity * 4 / 5 }
    }

    fn saw(&mut self, entries_in_leaf: usize, taken: usize) {
        self.leaves_seen += 1;
        self.entries_seen += entries_in_leaf;
        self.wanted = self.wanted.saturating_sub(taken);
    }

    fn leaves(&self) -> usize {
        let per_leaf = (self.entries_seen / self.leaves_seen).max(1);
        // The first leaf is entered in its middle, on average.
        (self.wanted.saturating_add(per_leaf / 2) / per_leaf).clamp(1, AHEAD_MAX)
    }
}
