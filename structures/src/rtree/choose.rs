//! Which child an entry goes to, how a full page is divided, and what leaves it first: R* (Beckmann et al., SIGMOD 1990,
//! section 4). Boxes in, numbers out: nothing here knows of pages that are elsewhere.

use std::cmp::Ordering;

use super::{
    node::{Item, count_min},
    rect::Rect,
};

/// Children of which the overlap is compared: those that grow least (section 4.1: 32 hardly differ from all).
const CANDIDATES: usize = 16;

/// The child that takes a box: the one whose overlap with others grows least if the children are leaves, else the one that grows
/// least. None if there are no children.
pub(super) fn choose<const D: usize>(
    children: impl ExactSizeIterator<Item = Rect<D>> + Clone,
    rect: &Rect<D>,
    are_leaves: bool,
) -> Option<usize> {
    // One that need not grow grows no overlap either.
    let (mut best, mut best_area) = (None, f64::INFINITY);
    for (index, child) in children.clone().enumerate() {
        let area = child.area();
        if child.contains(rect) && (best.is_none() || area < best_area) {
            (best, best_area) = (Some(index), area);
        }
    }
    if best.is_some() {
        return best;
    }
    let growth = |child: Rect<D>| (child.union(rect).area() - child.area(), child.area());
    let by_growth = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1));
    if !are_leaves {
        let grown = children.map(growth).enumerate();
        return grown.min_by(|a, b| by_growth(&a.1, &b.1)).map(|(index, _)| index);
    }
    let all: Vec<Rect<D>> = children.collect();
    let mut grown: Vec<_> = all.iter().map(|&child| growth(child)).enumerate().collect();
    if grown.len() > CANDIDATES {
        grown.select_nth_unstable_by(CANDIDATES - 1, |a, b| by_growth(&a.1, &b.1));
        grown.truncate(CANDIDATES);
    }
    let overlap_growth = |index: usize| {
        let (child, larger) = (all[index], all[index].union(rect));
        let others = all.iter().enumerate().filter(|&(other, _)| other != index);
        others.map(|(_, other)| larger.common_area(other) - child.common_area(other)).sum::<f64>()
    };
    let compared = grown.into_iter().map(|(index, growth)| (index, overlap_growth(index), growth));
    compared.min_by(|a, b| a.1.total_cmp(&b.1).then_with(|| by_growth(&a.2, &b.2))).map(|(index, ..)| index)
}

/// A way to divide sorted entries: the area that the halves have in common, their areas, and how many are in the first.
type Cut = (f64, f64, usize);

fn compare_cuts(a: &Cut, b: &Cut) -> Ordering {
    a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
}

/// The best way to divide sorted entries, and the margins of all ways.
fn cut<const D: usize>(sorted: &[Item<D>]) -> (f64, Cut) {
    let least = count_min(sorted.len()).max(1);
    let mut after = vec![Rect::NOTHING; sorted.len() + 1];
    for index in (0..sorted.len()).rev() {
        after[index] = after[index + 1].union(&sorted[index].rect);
    }
    let mut before = Rect::around(sorted[..least].iter().map(|item| &item.rect));
    let (mut margins, mut best) = (0.0, (f64::INFINITY, f64::INFINITY, least));
    for at in least..=sorted.len() - least {
        margins += before.margin() + after[at].margin();
        let cut = (before.common_area(&after[at]), before.area() + after[at].area(), at);
        if compare_cuts(&cut, &best).is_lt() {
            best = cut;
        }
        before = before.union(&sorted[at].rect);
    }
    (margins, best)
}

/// Divides entries: along the axis where all ways to do so have the least margin together, where the halves have
/// the least area in common.
pub(super) fn divide<const D: usize>(items: &[Item<D>]) -> (Vec<Item<D>>, Vec<Item<D>>) {
    if items.len() < 2 {
        return (items.to_vec(), Vec::new());
    }
    let along = |dimension: usize| {
        let sorted = [false, true].map(|by_high| {
            let mut sorted = items.to_vec();
            sorted.sort_by(|a, b| {
                let low = a.rect.low[dimension].total_cmp(&b.rect.low[dimension]);
                let high = a.rect.high[dimension].total_cmp(&b.rect.high[dimension]);
                if by_high { high.then(low) } else { low.then(high) }
            });
            let (margins, cut) = cut(&sorted);
            (margins, cut, sorted)
        });
        let margins = sorted[0].0 + sorted[1].0;
        let [by_low, by_high] = sorted;
        let (_, cut, sorted) = if compare_cuts(&by_high.1, &by_low.1).is_lt() { by_high } else { by_low };
        (margins, cut.2, sorted)
    };
    let best = (0..D).map(along).min_by(|a, b| a.0.total_cmp(&b.0));
    let (_, at, mut left) = best.unwrap_or_default();
    let right = left.split_off(at.min(left.len()));
    (left, right)
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
    let mut staying = items.to_vec();
    staying.sort_by(|a, b| a.rect.center_distance(&all).total_cmp(&b.rect.center_distance(&all)));
    let far = staying.split_off(items.len() - items.len() * 3 / 10);
    let (mut boxes, mut to, mut moved) = (children.to_vec(), Vec::new(), Vec::new());
    boxes[own] = Rect::around(staying.iter().map(|item| &item.rect));
    for item in far {
        let chosen = choose(boxes.iter().copied(), &item.rect, true).unwrap_or(own);
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
