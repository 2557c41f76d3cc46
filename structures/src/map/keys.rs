//! Ranges of keys.

use farlink_runtime::{
    structure::{Overlap, Region},
    wire::{DecodeError, Wire},
};

/// The keys from `low` up to, not including, `high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyRange {
    /// The least key.
    pub low: u64,
    /// The least key above; `None` if there is none.
    pub high: Option<u64>,
}

impl Wire for KeyRange {
    fn encode(&self, to: &mut Vec<u64>) {
        (self.low, self.high).encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        let (low, high) = Wire::decode(from)?;
        match high {
            Some(high) if high <= low => Err(DecodeError("a range of keys ends before it begins")),
            _ => Ok(Self { low, high }),
        }
    }
}

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

    fn piece(parts: &[(Self, u64)], uses: u64) -> Option<(Self, u64)> {
        let mut parts: Vec<&(Self, u64)> = parts.iter().collect();
        parts.sort_unstable_by_key(|(range, _)| range.low);
        // The upper end: new keys are often the largest. But not of what would be far too much by itself.
        let too_much = parts.iter().rev().take_while(|(_, of)| *of > uses.saturating_mul(2)).count();
        let too_much = if too_much == parts.len() { 0 } else { too_much };
        // Something is left.
        let kept = usize::from(too_much == 0).min(parts.len());
        let (mut piece, mut sum): (Option<Self>, u64) = (None, 0);
        for (range, of) in parts[kept..parts.len() - too_much].iter().rev() {
            if piece.is_some() && sum + of / 2 > uses {
                break;
            }
            sum += of;
            piece = Some(Self { low: range.low, high: piece.map_or(range.high, |piece| piece.high) });
        }
        piece.map(|piece| (piece, sum))
    }

    fn point(&self) -> Option<u64> {
        (*self == Self::only(self.low)).then_some(self.low)
    }
}

#[cfg(test)]
mod tests {
    use farlink_runtime::wire::decode_all;
    use proptest::prelude::*;

    use super::*;

    fn range() -> impl Strategy<Value = KeyRange> {
        (0u64..12, prop::option::of(1u64..12))
            .prop_map(|(low, length)| KeyRange { low, high: length.map(|length| low + length) })
    }

    #[test]
    fn a_range_without_keys_is_not_taken_for_one() {
        for (low, high, is_one) in
            [(3, Some(4), true), (u64::MAX, None, true), (3, Some(3), false), (4, Some(3), false)]
        {
            let (range, mut words) = (KeyRange { low, high }, Vec::new());
            range.encode(&mut words);
            assert_eq!(decode_all(&words).ok(), is_one.then_some(range));
        }
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

        #[test]
        fn a_piece_has_about_what_was_asked_for(uses in prop::collection::vec(1u64..50, 2..20), share in 0.0..1.0f64) {
            let range = |index: usize| KeyRange { low: index as u64 * 10, high: Some(index as u64 * 10 + 10) };
            let parts: Vec<_> = uses.iter().enumerate().map(|(index, &uses)| (range(index), uses)).collect();
            let sum: u64 = uses.iter().sum();
            let wanted = (sum as f64 * share) as u64;
            let (piece, has) = KeyRange::piece(&parts, wanted).unwrap();
            let inside = parts.iter().filter(|(range, _)| range.overlap(&piece) == Overlap::Inside);
            prop_assert_eq!(inside.map(|(_, uses)| uses).sum::<u64>(), has);
            prop_assert!(has < sum, "all of it");
            // What is far too much stays, with all above it; if nothing else is there, the last one goes.
            let stay = uses.iter().rev().take_while(|&&uses| uses > 2 * wanted).count();
            match uses.len() - stay {
                0 => prop_assert_eq!(piece, range(uses.len() - 1)),
                below => {
                    prop_assert_eq!(piece.high, range(below - 1).high);
                    let most: u64 = uses[usize::from(stay == 0)..below].iter().sum();
                    // As near as the next page is.
                    prop_assert!(has.abs_diff(wanted) <= 25 || has == most, "{} of {} wanted", has, wanted);
                }
            }
        }
    }
}
