//! Shrinking: a page that has become too empty merges with a neighbour or takes entries from it; a root with one child
//! takes the child's place.
//!
//! Each step is one change of the parent and both neighbours (or of the root and its child): all or nothing. The page that
//! is emptied is freed with the change; readers that still hold a link to it find it free and begin anew.

use std::cell::Cell;

use farlink_runtime::{
    access::{Access, Hint, Interrupt, Link, PageRef, Pages, PagesMut, Start},
    error::Error,
    operation,
};

use super::{
    Tree,
    descend::{Descent, Stays, descend, require_level, require_size},
    node::{Fences, Node, NodeMut, Side, capacity},
};

/// Attempts to clean up behind one removal. If all meet conflicts, others are at work on the same pages; the next removal
/// there tries again. A page that is left empty goes when its left neighbour becomes too empty.
const ATTEMPTS_MAX: u32 = 16;

/// A page other than the root with fewer entries than this looks for a neighbour to merge with.
pub(super) const fn least_count(capacity: usize) -> usize {
    capacity / 4
}

/// Two neighbours become one page only if that leaves some room, so that the next insert does not split it again.
const fn merged_count_max(capacity: usize) -> usize {
    capacity - capacity / 4
}

/// Merges or evens out what a removal of `key` has left too empty, from the leaf upwards. What cannot be done because of
/// others, or of a damaged page, is left for later: the removal itself is done.
pub(super) async fn clean_up<A: Access<Plugin = Tree>>(access: &A, key: u64) {
    let next = Cell::new((0, Neighbour::Right));
    operation::clean_up(&access.context().worker, ATTEMPTS_MAX, async || {
        for _ in 0..ATTEMPTS_MAX {
            let (level, neighbour) = next.get();
            match clean_up_level(access, key, level, neighbour).await {
                Ok(Next::Done) => break,
                Ok(Next::Level(above)) => next.set((above, Neighbour::Right)),
                Err(Interrupt::Failed(error)) if neighbour == Neighbour::Right && is_others(&error) => {
                    next.set((level, Neighbour::Left));
                }
                Err(interrupt) => return Err(interrupt),
            }
        }
        Ok(())
    })
    .await;
}

enum Next {
    Done,
    Level(u8),
}

/// With which one a page merges.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Neighbour {
    /// The right one; under the last link of a page the left one.
    Right,
    /// The left one: the right one is another owner's, or shared with it.
    Left,
}

/// Whether something was refused because pages are other owners', too.
fn is_others(error: &Error) -> bool {
    matches!(error, Error::OutsidePartition { .. } | Error::SharedPage { .. })
}

async fn clean_up_level<A: Access<Plugin = Tree>>(
    access: &A,
    key: u64,
    level: u8,
    neighbour: Neighbour,
) -> Result<Next, Interrupt> {
    let Descent { parent, page, .. } = descend::<_, Stays>(access, Start::Anew, key, level).await?;
    if page.at() == access.context().structure.root {
        return collapse_root(access, page).await;
    }
    let Some(parent) = parent else { return Err(Interrupt::stale(page.at(), "its parent is not known")) };
    if page.read(|words| Node(words).count() >= least_count(Node(words).capacity()))? {
        return Ok(Next::Done);
    }
    // Which children of the parent: this page, and its neighbour.
    let plan = parent.read(|words| {
        let node = Node(words);
        let index = node.child_for(key).filter(|&index| access.leads_to(node.child(index), &page))?;
        let is_last = index + 1 == node.count();
        let left = match neighbour {
            Neighbour::Right if !is_last => Some(index),
            // Under the last link the left one was the right one's stand-in, and has been refused.
            Neighbour::Left if is_last => None,
            _ => index.checked_sub(1),
        };
        let pair = left.map(|left| (left, left == index, node.child(left + usize::from(left == index))));
        (node.side(key) == Side::Here).then(|| (pair, node.count()))
    })?;
    let Some((pair, siblings)) = plan else {
        return Err(Interrupt::stale(parent.at(), "it does not lead to the page that is too empty"));
    };
    let Some((left_index, page_is_left, other)) = pair else {
        // An only child has no neighbour under this parent: the parent must merge first.
        return Ok(if siblings == 1 { Next::Level(parent.level()) } else { Next::Done });
    };
    let other = access.follow(&parent, other, Hint::DOWN).await?;
    require_level(&other, level)?;
    let (left, right) = if page_is_left { (page, other) } else { (other, page) };
    let parent_is_root = parent.at() == access.context().structure.root;
    let parent_level = parent.level();
    let merged = join(access, parent, left_index, left, right).await?;
    let least = least_count(capacity(access.context().structure.class.words()));
    let parent_too_empty = if parent_is_root { siblings == 2 } else { siblings - 1 < least };
    Ok(if merged && parent_too_empty { Next::Level(parent_level) } else { Next::Done })
}

/// Merges two neighbours, children `left_index` and the next of `parent`, or evens them out. True if they were merged.
async fn join<'a, A: Access<Plugin = Tree>>(
    access: &'a A,
    parent: A::Page<'a>,
    left_index: usize,
    left: A::Page<'a>,
    right: A::Page<'a>,
) -> Result<bool, Interrupt> {
    require_size(access, &left)?;
    require_size(access, &right)?;
    let level = left.level();
    let (left_fences, left_right, mut entries) = left.read(|words| {
        let node = Node(words);
        (Fences { low: node.low(), high: node.high() }, node.right(), node.entries())
    })?;
    let (right_fences, right_right, right_entries, capacity) = right.read(|words| {
        let node = Node(words);
        (Fences { low: node.low(), high: node.high() }, node.right(), node.entries(), node.capacity())
    })?;
    if !access.leads_to(left_right, &right) || left_fences.high != Some(right_fences.low) {
        return Err(Interrupt::stale(right.at(), "it is not the right neighbour of the page to its left"));
    }
    let right_link = right.link();
    entries.extend(right_entries);
    let merge = entries.len() <= merged_count_max(capacity);
    let mut pages = Pages::new();
    let (parent, left, right) = (pages.add(parent), pages.add(left), pages.add(right));
    let change = |pages: &mut A::PagesMut<'_>| {
        if merge {
            let fences = Fences { low: left_fences.low, high: right_fences.high };
            NodeMut::new(pages, left).rewrite(level, fences, right_right, &entries);
            NodeMut::new(pages, parent).remove_at(left_index + 1);
            pages.free(right);
        } else {
            let (keep, give) = entries.split_at(entries.len() / 2);
            let separator = give[0].0;
            let fences = Fences { low: left_fences.low, high: Some(separator) };
            NodeMut::new(pages, left).rewrite(level, fences, right_link, keep);
            let fences = Fences { low: separator, high: right_fences.high };
            NodeMut::new(pages, right).rewrite(level, fences, right_right, give);
            NodeMut::new(pages, parent).replace_key(left_index + 1, separator);
        }
    };
    access.change(pages, change).await?;
    access.context().worker.count_merge();
    Ok(merge)
}

/// A root with one child takes the child's entries and level.
async fn collapse_root<'a, A: Access<Plugin = Tree>>(access: &'a A, root: A::Page<'a>) -> Result<Next, Interrupt> {
    if root.level() == 0 {
        return Ok(Next::Done);
    }
    let Some(link) = root.read(|words| (Node(words).count() == 1).then(|| Node(words).child(0)))? else {
        return Ok(Next::Done);
    };
    let child = access.follow(&root, link, Hint::DOWN).await?;
    let level = root.level() - 1;
    require_level(&child, level)?;
    require_size(access, &child)?;
    let (fences, entries) = child.read(|words| {
        let node = Node(words);
        (Fences { low: node.low(), high: node.high() }, node.entries())
    })?;
    if fences != Fences::ALL {
        return Err(Interrupt::stale(child.at(), "it is an only child, yet does not hold all keys"));
    }
    let mut pages = Pages::new();
    let (root, child) = (pages.add(root), pages.add(child));
    let change = |pages: &mut A::PagesMut<'_>| {
        NodeMut::new(pages, root).rewrite(level, Fences::ALL, Link::NULL, &entries);
        pages.free(child);
    };
    access.change(pages, change).await?;
    access.context().worker.count_merge();
    Ok(Next::Level(level))
}
