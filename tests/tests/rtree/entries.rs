//! Entries and queries, and their order.

use farlink_structures::rtree::{Entry, Query, Rect};
use rand::{RngExt, rngs::SmallRng};

/// A rectangle on a grid, so that many are equal, touch, and lie on boundaries.
pub(crate) fn a_rect<const D: usize>(rng: &mut SmallRng, side: i32) -> Rect<D> {
    let low: [f64; D] = std::array::from_fn(|_| f64::from(rng.random_range(-20..20)));
    let high = low.map(|low| low + f64::from(rng.random_range(0..=side)));
    Rect::new(low, high).unwrap()
}

pub(crate) fn a_query<const D: usize>(rng: &mut SmallRng) -> Query<D> {
    match rng.random_range(0..4) {
        0 => Query::Within(a_rect(rng, 25)),
        1 => Query::Contains(a_rect(rng, 2)),
        _ => Query::Intersects(a_rect(rng, 12)),
    }
}

/// An entry as words, which have a total order.
pub(crate) type Key = (Vec<u64>, u64);

pub(crate) fn key<const D: usize>(entry: &Entry<D>) -> Key {
    let corners = entry.0.low().into_iter().chain(entry.0.high());
    (
        corners
            .map(|at| (at.to_bits() as i64 ^ ((at.to_bits() as i64 >> 63) as u64 >> 1) as i64) as u64 ^ 1 << 63)
            .collect(),
        entry.1,
    )
}

pub(crate) fn sorted<const D: usize>(mut entries: Vec<Entry<D>>) -> Vec<Entry<D>> {
    entries.sort_by_key(key);
    entries
}
