//! The order in which rectangles are inserted one by one.

use farlink_structures::rtree::{Entry, Rect};
use rand::{SeedableRng, rngs::SmallRng, seq::SliceRandom};

use crate::subject::InsertOrder;

/// Rectangles of a sub-region, about: those of rea02, the streets of California, have so many.
const SUB_REGION: usize = 20_000;

/// Puts entries into an order.
pub(super) fn arrange(entries: &mut Vec<Entry>, order: InsertOrder, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed ^ 0x6f72_6465_7200);
    match order {
        InsertOrder::Given => {}
        InsertOrder::Random => entries.shuffle(&mut rng),
        InsertOrder::Rows => *entries = rows(entries, &mut rng),
    }
}

fn middle(rect: &Rect, dimension: usize) -> f64 {
    rect.low()[dimension] / 2.0 + rect.high()[dimension] / 2.0
}

fn sort_by(entries: &mut [Entry], dimension: usize) {
    entries.sort_by(|(a, _), (b, _)| middle(a, dimension).total_cmp(&middle(b, dimension)));
}

/// As many strips as make squares of about so many entries each, if they are spread evenly.
fn strips(entries: usize, of: usize) -> usize {
    (entries as f64 / of as f64).sqrt().round().max(1.0) as usize
}

/// Cuts entries into so many pieces, one behind the other, that differ by one entry in length at most.
fn pieces(entries: &mut [Entry], count: usize) -> impl Iterator<Item = &mut [Entry]> {
    let (mut rest, mut left) = (entries, count.max(1));
    std::iter::from_fn(move || {
        let piece = rest.split_off_mut(..rest.len().div_ceil(left.max(1))).filter(|piece| !piece.is_empty());
        left = left.saturating_sub(1);
        piece
    })
}

/// Sub-regions are cut from strips with about as many entries each, so they are small where entries are dense. In each,
/// rows go from north to south, and each row from west to east.
fn rows(entries: &mut [Entry], rng: &mut SmallRng) -> Vec<Entry> {
    let count = strips(entries.len(), SUB_REGION);
    sort_by(entries, 0);
    let mut sub_regions: Vec<&mut [Entry]> = Vec::new();
    for strip in pieces(entries, count) {
        sort_by(strip, 1);
        let count = ((strip.len() + SUB_REGION / 2) / SUB_REGION).max(1);
        sub_regions.extend(pieces(strip, count));
    }
    sub_regions.shuffle(rng);
    let mut all = Vec::with_capacity(sub_regions.iter().map(|entries| entries.len()).sum());
    for sub_region in sub_regions {
        sub_region.reverse();
        let count = strips(sub_region.len(), 1);
        for row in pieces(sub_region, count) {
            sort_by(row, 0);
            all.extend_from_slice(row);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rects::draw::Space;

    fn entries(count: u64) -> Vec<Entry> {
        let mut rng = SmallRng::seed_from_u64(1);
        (0..count).map(|number| (Space::unit().loaded(&mut rng), number)).collect()
    }

    fn arranged(count: u64, order: InsertOrder, seed: u64) -> Vec<Entry> {
        let mut entries = entries(count);
        arrange(&mut entries, order, seed);
        entries
    }

    #[test]
    fn every_order_has_all_entries_and_depends_on_the_seed() {
        for count in [0, 1, 2, 3, 50, 999, 45_000] {
            for order in [InsertOrder::Random, InsertOrder::Given, InsertOrder::Rows] {
                let mut found = arranged(count, order, 1);
                found.sort_by_key(|entry| entry.1);
                assert_eq!(found, entries(count), "{count} {order:?}");
            }
        }
        assert_ne!(arranged(100, InsertOrder::Random, 1), arranged(100, InsertOrder::Random, 2));
        assert_ne!(arranged(90_000, InsertOrder::Rows, 1), arranged(90_000, InsertOrder::Rows, 2));
        assert_eq!(arranged(100, InsertOrder::Given, 1), entries(100));
    }

    #[test]
    fn rows_go_east_and_follow_one_another_south() {
        let found = arranged(10_000, InsertOrder::Rows, 1);
        for (number, row) in found.chunks(100).enumerate() {
            assert!(row.is_sorted_by(|a, b| middle(&a.0, 0) <= middle(&b.0, 0)), "row {number}");
        }
        let heights = |row: &[Entry]| {
            let heights = row.iter().map(|(rect, _)| middle(rect, 1));
            (heights.clone().fold(f64::INFINITY, f64::min), heights.fold(0.0, f64::max))
        };
        let rows: Vec<_> = found.chunks(100).map(heights).collect();
        assert!(rows.windows(2).all(|pair| pair[0].0 >= pair[1].1), "{rows:?}");
    }

    #[test]
    fn sub_regions_are_apart_and_come_in_any_order() {
        // Three strips, with three sub-regions each.
        let found = arranged(180_000, InsertOrder::Rows, 3);
        let boxes: Vec<Rect> =
            found.chunks(20_000).map(|region| Space::around(region.iter().map(|it| &it.0)).0).collect();
        assert_eq!(boxes.len(), 9);
        for (number, one) in boxes.iter().enumerate() {
            let area = |rect: &Rect| (rect.high()[0] - rect.low()[0]) * (rect.high()[1] - rect.low()[1]);
            assert!((0.1..0.12).contains(&area(one)), "{one:?}");
            for other in &boxes[number + 1..] {
                let common: f64 = (0..2)
                    .map(|d| (one.high()[d].min(other.high()[d]) - one.low()[d].max(other.low()[d])).max(0.0))
                    .product();
                assert!(common < 1e-3, "{one:?} {other:?}");
            }
        }
        let is_in_order = |boxes: &[Rect]| boxes.is_sorted_by(|a, b| a.low()[0] <= b.low()[0] + 0.1);
        assert!(!is_in_order(&boxes), "{boxes:?}");
    }
}
