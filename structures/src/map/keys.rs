//! Ranges of keys.

use farlink_runtime::{
    structure::{Overlap, Region},
    wire::wire,
};

/// The keys from `low` up to, not including, `high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyRange {
    /// The least key.
    pub low: u64,
    /// The least key above; `None` if there is none.
    pub high: Option<u64>,
}

wire!(struct KeyRange { low, high });

impl KeyRange {
    /// Every key.
    pub const ALL: Self = Self { low: 0, high: None };

    /// One key.
    pub const fn only(key: u64) -> Self {
        Self { low: key, high: key.checked_add(1) }
    }

    /// Whether a key is one of them.
    pub fn contains(&self, key: u64) -> bool {
        self.low <= key && self.high.is_none_or(|high| key < high)
    }

    /// What cuts all keys into ranges at these least keys, in ascending order.
    pub fn cut_at(lows: &[u64]) -> Vec<Self> {
        let low = std::iter::once(0).chain(lows.iter().copied());
        let high = lows.iter().copied().map(Some).chain([None]);
        low.zip(high).map(|(low, high)| Self { low, high }).collect()
    }
}

impl Region for KeyRange {
    fn everything() -> Self {
        Self::ALL
    }

    fn overlap(&self, other: &Self) -> Overlap {
        let ends_before = |end: Option<u64>, of: u64| end.is_some_and(|end| end <= of);
        if ends_before(self.high, other.low) || ends_before(other.high, self.low) {
            return Overlap::Outside;
        }
        let is_inside = other.low <= self.low
            && match (self.high, other.high) {
                (_, None) => true,
                (None, Some(_)) => false,
                (Some(high), Some(limit)) => high <= limit,
            };
        if is_inside { Overlap::Inside } else { Overlap::Partly }
    }

    fn are_everything(ranges: &[Self]) -> bool {
        let mut ranges: Vec<Self> = ranges.to_vec();
        ranges.sort_unstable_by_key(|range| range.low);
        let mut next = Some(0);
        for range in &ranges {
            if next != Some(range.low) {
                return false;
            }
            next = range.high;
        }
        next.is_none()
    }

    fn without(&self, piece: &Self) -> Option<Vec<Self>> {
        if piece.overlap(self) == Overlap::Outside {
            return Some(vec![*self]);
        }
        let below = Self { low: self.low, high: Some(piece.low) };
        let above = piece.high.map(|low| Self { low, high: self.high });
        let rest = std::iter::once(below).chain(above);
        Some(rest.filter(|range| range.high.is_none_or(|high| range.low < high)).collect())
    }

    fn point(&self) -> Option<u64> {
        (*self == Self::only(self.low)).then_some(self.low)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = KeyRange> {
        (0u64..12, prop::option::of(1u64..12))
            .prop_map(|(low, length)| KeyRange { low, high: length.map(|length| low + length) })
    }

    proptest! {
        #[test]
        fn what_is_left_is_what_is_not_in_the_piece(all in range(), piece in range()) {
            let left = all.without(&piece).unwrap();
            for key in 0..30 {
                let is_left = left.iter().filter(|left| left.contains(key)).count();
                prop_assert_eq!(is_left, usize::from(all.contains(key) && !piece.contains(key)), "{}", key);
            }
            prop_assert!(left.iter().all(|left| left.high.is_none_or(|high| left.low < high)));
        }
    }
}
