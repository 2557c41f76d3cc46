//! Which child an entry goes to, how a full page is divided, and what leaves it first: R* (Beckmann et al., SIGMOD 1990,
//! section 4). Boxes in, numbers out: nothing here knows of pages that are elsewhere.

use std::cmp::Ordering;

use smallvec::SmallVec;

use super::{
    node::{Item, count_min},
    rect::{Rect, growth, order_of},
};

/// Children of which the overlap is compared: those that grow least (section 4.1: 32 hardly differ from all).
const CANDIDATES: usize = 16;

/// The child that takes a box: the one whose overlap with others grows least if the children are leaves, else the one that grows
/// least. None if there are no children.
pub(super) fn choose<const D: usize>(children: &[Rect<D>], rect: &Rect<D>, are_leaves: bool) -> Option<usize> {
    // One that need not grow grows no overlap either.
    let holding = children.iter().enumerate().filter(|(_, child)| child.contains(rect));
    let least = holding.min_by(|a, b| a.1.compare_sizes(b.1));
    least.map(|(index, _)| index).or_else(|| grow(children, rect, are_leaves))
}

/// [`choose`] where no child holds the box. Margins decide where areas do not differ.
pub(super) fn grow<const D: usize>(children: &[Rect<D>], rect: &Rect<D>, are_leaves: bool) -> Option<usize> {
    let in_area = |(index, child): (usize, &Rect<D>)| (growth(child.area(), child.union(rect).area()), index);
    let in_margin = |child: &Rect<D>| growth(child.margin(), child.union(rect).margin());
    let mut grown: SmallVec<[_; 32]> = children.iter().enumerate().map(in_area).collect();
    let mut best: Option<(f64, usize)> = None;
    for first in 0..grown.len().min(CANDIDATES) {
        let by_growth = |a: &usize, b: &usize| {
            let [(a, first), (b, second)] = [grown[*a], grown[*b]];
            let [first, second] = [&children[first], &children[second]];
            let by_margin = || in_margin(first).total_cmp(&in_margin(second));
            a.total_cmp(&b).then_with(by_margin).then_with(|| first.compare_sizes(second))
        };
        let next = (first..grown.len()).min_by(by_growth)?;
        grown.swap(first, next);
        let index = grown[first].1;
        if !are_leaves {
            return Some(index);
        }
        let most = best.map_or(f64::INFINITY, |(least, _)| least);
        let overlap = overlap_growth(children, index, rect, most);
        if best.is_none() || overlap < most {
            best = Some((overlap, index));
        }
        // No other grows less, nor does its overlap.
        if overlap == 0.0 {
            break;
        }
    }
    best.map(|(_, index)| index)
}

/// How much more a child overlaps others if it takes a box; or some of it, if it is `most` or more.
fn overlap_growth<const D: usize>(children: &[Rect<D>], index: usize, rect: &Rect<D>, most: f64) -> f64 {
    let (child, larger) = (children[index], children[index].union(rect));
    let mut grown = 0.0;
    for (other, at) in children.iter().zip(0..) {
        if at != index && larger.intersects(other) {
            grown += growth(child.common_area(other), larger.common_area(other));
        }
        if grown >= most {
            break;
        }
    }
    grown
}

/// A way to divide sorted entries: the area that the halves have in common, their areas, and how many are in the first.
type Cut = (f64, f64, usize);

fn compare_cuts(a: &Cut, b: &Cut) -> Ordering {
    a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
}

/// The best way to divide entries in this order, and the margins of all ways.
fn cut<const D: usize>(items: &[Item<D>], order: &[usize], after: &mut Vec<Rect<D>>) -> (f64, Cut) {
    let least = count_min(order.len()).max(1);
    after.clear();
    after.resize(order.len() + 1, Rect::NOTHING);
    for at in (least..order.len()).rev() {
        after[at] = after[at + 1].union(&items[order[at]].rect);
    }
    let mut before = Rect::around(order[..least].iter().map(|&index| &items[index].rect));
    let (mut margins, mut best) = (0.0, (f64::INFINITY, f64::INFINITY, least));
    for (at, after) in (least..).zip(&after[least..=order.len() - least]) {
        margins += before.margin() + after.margin();
        let cut = (before.common_area(after), before.area() + after.area(), at);
        if compare_cuts(&cut, &best).is_lt() {
            best = cut;
        }
        before = order.get(at).map_or(before, |&index| before.union(&items[index].rect));
    }
    (margins, best)
}

/// Divides entries: along the axis where all ways to do so have the least margin together, where the halves have
/// the least area in common.
pub(super) fn divide<const D: usize>(items: &[Item<D>]) -> (Vec<Item<D>>, Vec<Item<D>>) {
    if items.len() < 2 {
        return (items.to_vec(), Vec::new());
    }
    let (mut keys, mut after) = (SmallVec::<[(i64, i64, usize); 32]>::new(), Vec::new());
    let mut along = |dimension: usize| {
        let [by_low, by_high] = [false, true].map(|by_high| {
            keys.clear();
            keys.extend(items.iter().enumerate().map(|(index, Item { rect, .. })| {
                let (low, high) = (order_of(rect.low[dimension]), order_of(rect.high[dimension]));
                if by_high { (high, low, index) } else { (low, high, index) }
            }));
            keys.sort_unstable();
            let order: SmallVec<[usize; 32]> = keys.iter().map(|&(.., index)| index).collect();
            let (margins, cut) = cut(items, &order, &mut after);
            (margins, cut, order)
        });
        let margins = by_low.0 + by_high.0;
        let (_, cut, order) = if compare_cuts(&by_high.1, &by_low.1).is_lt() { by_high } else { by_low };
        (margins, cut.2, order)
    };
    let best = (0..D).map(&mut along).min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, at, order) = best.unwrap_or_default();
    let (left, right) = order.split_at(at.min(order.len()));
    let half = |half: &[usize]| half.iter().map(|&index| items[index]).collect();
    (half(left), half(right))
}

/// What leaves a full page for its siblings: of the 30% of its entries whose centres are farthest from its own, nearest first
/// ("close reinsert"), those that go to another child than this one, when they are inserted anew among `children`. Each with
/// the number of its new page; `most` other pages at most. What stays comes first.
pub(super) fn leaving<const D: usize>(
    items: &[Item<D>],
    children: &[Rect<D>],
    own: usize,
    most: usize,
) -> (Vec<Item<D>>, Vec<(usize, Item<D>)>) {
    let all = Rect::around(items.iter().map(|item| &item.rect));
    let mut by_distance: SmallVec<[_; 32]> =
        items.iter().map(|item| (order_of(item.rect.center_distance(&all)), item)).collect();
    let near = items.len() - items.len() * 3 / 10;
    by_distance.sort_unstable_by_key(|&(distance, _)| distance);
    let mut staying: Vec<Item<D>> = by_distance[..near].iter().map(|&(_, item)| *item).collect();
    let (mut boxes, mut to, mut moved) = (children.to_vec(), Vec::new(), Vec::new());
    boxes[own] = Rect::around(staying.iter().map(|item| &item.rect));
    for &(_, &item) in &by_distance[near..] {
        let chosen = choose(&boxes, &item.rect, true).unwrap_or(own);
        let is_known = to.contains(&chosen);
        let child = if is_known || (chosen != own && to.len() < most) { chosen } else { own };
        boxes[child] = boxes[child].union(&item.rect);
        match child == own {
            true => staying.push(item),
            false => {
                if !is_known {
                    to.push(child);
                }
                moved.push((child, item));
            }
        }
    }
    (staying, moved)
}
