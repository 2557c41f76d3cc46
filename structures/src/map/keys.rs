//! Ranges of keys.

use farlink_runtime::{
    structure::Overlap,
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

impl KeyRange {
    /// Every key.
    pub const ALL: Self = Self { low: 0, high: None };

    /// One key.
    pub fn only(key: u64) -> Self {
        Self { low: key, high: key.checked_add(1) }
    }

    /// Whether a key is one of them.
    pub fn contains(&self, key: u64) -> bool {
        self.low <= key && self.high.is_none_or(|high| key < high)
    }

    /// Where a page lies to which the keys from `low` up to `high` belong.
    pub(crate) fn overlap(&self, low: u64, high: Option<u64>) -> Overlap {
        let ends_before = |end: Option<u64>, of: u64| end.is_some_and(|end| end <= of);
        if ends_before(high, self.low) || ends_before(self.high, low) {
            return Overlap::Outside;
        }
        let is_inside = self.low <= low
            && match (high, self.high) {
                (_, None) => true,
                (None, Some(_)) => false,
                (Some(high), Some(limit)) => high <= limit,
            };
        if is_inside { Overlap::Inside } else { Overlap::Partly }
    }
}

impl Wire for KeyRange {
    fn encode(&self, to: &mut Vec<u64>) {
        self.low.encode(to);
        self.high.encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Ok(Self { low: u64::decode(from)?, high: Option::decode(from)? })
    }
}
