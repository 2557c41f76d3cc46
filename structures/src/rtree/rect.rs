//! Rectangles, and what can be asked about them.

use std::cmp::Ordering;

use farlink_runtime::{
    error::Error,
    structure::{Overlap, Region},
    wire::{DecodeError, Wire},
};

/// Why corners make no rectangle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadRect {
    /// A coordinate is infinite or no number.
    #[error("its coordinate {dimension} is infinite or no number")]
    NotFinite {
        /// Counted from 0.
        dimension: usize,
    },
    /// It ends before it begins.
    #[error("it ends before it begins in dimension {dimension}")]
    Inverted {
        /// Counted from 0.
        dimension: usize,
    },
}

impl From<BadRect> for Error {
    fn from(bad: BadRect) -> Self {
        Self::BadOption { option: "rectangle", why: bad.to_string() }
    }
}

/// A rectangle with sides along the axes, its boundary included. One that [`Rect::new`] has made is finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rect<const D: usize = 2> {
    pub(super) low: [f64; D],
    pub(super) high: [f64; D],
}

/// An entry: equal ones can be in a tree several times.
pub type Entry<const D: usize = 2> = (Rect<D>, u64);

impl<const D: usize> Rect<D> {
    /// All of space. To be asked about, not to be inserted.
    pub const EVERYTHING: Self = Self { low: [f64::NEG_INFINITY; D], high: [f64::INFINITY; D] };
    /// What is no part of anything: the bounding box of nothing.
    pub(super) const NOTHING: Self = Self { low: [f64::INFINITY; D], high: [f64::NEG_INFINITY; D] };

    /// From one corner to the opposite one.
    ///
    /// # Errors
    /// If a coordinate is infinite or no number, or a low one is above a high one.
    pub fn new(low: [f64; D], high: [f64; D]) -> Result<Self, BadRect> {
        // Of the two zeros one is taken.
        let rect = Self { low: low.map(|at| at + 0.0), high: high.map(|at| at + 0.0) };
        rect.require_finite().map(|()| rect)
    }

    /// A point.
    ///
    /// # Errors
    /// As [`Rect::new`].
    pub fn point(at: [f64; D]) -> Result<Self, BadRect> {
        Self::new(at, at)
    }

    /// The corner where all coordinates are least.
    pub const fn low(&self) -> [f64; D] {
        self.low
    }

    /// The opposite corner.
    pub const fn high(&self) -> [f64; D] {
        self.high
    }

    pub(super) fn require_finite(&self) -> Result<(), BadRect> {
        for (dimension, (low, high)) in self.low.iter().zip(&self.high).enumerate() {
            if !(low.is_finite() && high.is_finite()) {
                return Err(BadRect::NotFinite { dimension });
            }
            if low > high {
                return Err(BadRect::Inverted { dimension });
            }
        }
        Ok(())
    }

    /// Whether they have a point in common.
    #[inline]
    pub fn intersects(&self, other: &Self) -> bool {
        (0..D).all(|d| self.low[d] <= other.high[d] && other.low[d] <= self.high[d])
    }

    /// Whether all of the other one lies in it.
    #[inline]
    pub fn contains(&self, other: &Self) -> bool {
        (0..D).fold(true, |all, d| all & (self.low[d] <= other.low[d]) & (other.high[d] <= self.high[d]))
    }

    /// The least rectangle around both.
    #[inline]
    pub fn union(&self, other: &Self) -> Self {
        let low = std::array::from_fn(|d| lesser(self.low[d], other.low[d]));
        Self { low, high: std::array::from_fn(|d| greater(self.high[d], other.high[d])) }
    }

    pub(super) fn around<'a>(rects: impl IntoIterator<Item = &'a Self>) -> Self {
        rects.into_iter().fold(Self::NOTHING, |all, rect| all.union(rect))
    }

    #[inline]
    pub(super) fn area(&self) -> f64 {
        (0..D).map(|d| self.high[d] - self.low[d]).product()
    }

    #[inline]
    pub(super) fn margin(&self) -> f64 {
        (0..D).map(|d| self.high[d] - self.low[d]).sum()
    }

    /// By area; by margin where areas do not differ, as those of flat rectangles.
    #[inline]
    pub(super) fn compare_sizes(&self, other: &Self) -> Ordering {
        self.area().total_cmp(&other.area()).then_with(|| self.margin().total_cmp(&other.margin()))
    }

    /// The area that they have in common.
    #[inline]
    pub(super) fn common_area(&self, other: &Self) -> f64 {
        let common = |d| lesser(self.high[d], other.high[d]) - greater(self.low[d], other.low[d]);
        (0..D).map(|d| greater(common(d), 0.0)).product()
    }

    #[inline]
    pub(super) fn center(&self, dimension: usize) -> f64 {
        self.low[dimension] / 2.0 + self.high[dimension] / 2.0
    }

    pub(super) fn center_distance(&self, other: &Self) -> f64 {
        (0..D).map(|d| (self.center(d) - other.center(d)).powi(2)).sum()
    }

    /// The square of the distance to a point: 0 inside. Infinite if it is too large for a number.
    #[inline]
    pub fn distance_squared(&self, to: &[f64; D]) -> f64 {
        let distance = |d| greater(greater(self.low[d] - to[d], to[d] - self.high[d]), 0.0);
        (0..D).map(|d| distance(d) * distance(d)).sum()
    }

    /// The square of the greatest distance of one of its points.
    fn reach_squared(&self, to: &[f64; D]) -> f64 {
        (0..D).map(|d| (to[d] - self.low[d]).abs().max((self.high[d] - to[d]).abs()).powi(2)).sum()
    }
}

/// As from afar: whoever takes it in checks that it is finite.
impl<const D: usize> Wire for Rect<D> {
    fn encode(&self, to: &mut Vec<u64>) {
        (self.low, self.high).encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        <([f64; D], [f64; D])>::decode(from).map(|(low, high)| Self { low, high })
    }
}

/// What an operation is about: entries within a box, of one payload or of all. A tree is cut into parts by payload, which an entry
/// keeps when it moves; so a change is about one part, and a search about all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scope<const D: usize = 2> {
    /// Where the entries can be.
    pub rect: Rect<D>,
    /// Their payload; `None`: any.
    pub payload: Option<u64>,
}

impl<const D: usize> From<Rect<D>> for Scope<D> {
    fn from(rect: Rect<D>) -> Self {
        Self { rect, payload: None }
    }
}

impl<const D: usize> Wire for Scope<D> {
    fn encode(&self, to: &mut Vec<u64>) {
        (self.rect, self.payload).encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        Wire::decode(from).map(|(rect, payload)| Self { rect, payload })
    }
}

impl<const D: usize> Region for Scope<D> {
    fn everything() -> Self {
        Rect::EVERYTHING.into()
    }

    fn overlap(&self, other: &Self) -> Overlap {
        let is_payload_inside = other.payload.is_none() || self.payload == other.payload;
        let is_payload_outside = !is_payload_inside && self.payload.is_some();
        match (is_payload_inside && other.rect.contains(&self.rect), other.rect.intersects(&self.rect)) {
            (true, _) => Overlap::Inside,
            (_, true) if !is_payload_outside => Overlap::Partly,
            _ => Overlap::Outside,
        }
    }

    fn point(&self) -> Option<u64> {
        self.payload
    }
}

/// The lesser of two numbers; as one instruction, unlike [`f64::min`], which minds what is no number.
#[inline]
fn lesser(a: f64, b: f64) -> f64 {
    if a < b { a } else { b }
}

/// How much more the one is than the other; infinite where both are too large for a number.
#[inline]
pub(super) fn growth(from: f64, to: f64) -> f64 {
    lesser(to - from, f64::INFINITY)
}

#[inline]
fn greater(a: f64, b: f64) -> f64 {
    if a > b { a } else { b }
}

/// Integers in the order of numbers, whatever these are.
#[inline]
pub(super) fn order_of(number: f64) -> i64 {
    let bits = number.to_bits().cast_signed();
    bits ^ ((bits >> 63).cast_unsigned() >> 1).cast_signed()
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Query<const D: usize = 2> {
    /// Entries that have a point in common with this.
    Intersects(Rect<D>),
    /// Entries that lie within this.
    Within(Rect<D>),
    /// Entries that contain all of this.
    Contains(Rect<D>),
    /// All entries, the nearest to this point first. Squares of distances are compared: distances whose squares are too large or too
    /// small for a number (above about 1e154, below about 1e-162) count as equal.
    Nearest([f64; D]),
}

impl<const D: usize> Query<D> {
    /// Where entries that are asked for can be.
    pub(super) fn region(&self) -> Rect<D> {
        match *self {
            Self::Intersects(window) | Self::Within(window) | Self::Contains(window) => window,
            Self::Nearest(_) => Rect::EVERYTHING,
        }
    }

    /// Whatever is asked for begins at the first corner at most, and ends at the second at least: so does all above it.
    pub(super) fn bounds(&self) -> ([f64; D], [f64; D]) {
        match *self {
            Self::Intersects(window) | Self::Within(window) => (window.high, window.low),
            Self::Contains(window) => (window.low, window.high),
            Self::Nearest(_) => ([f64::INFINITY; D], [f64::NEG_INFINITY; D]),
        }
    }

    /// Whether an entry within the bounds is asked for.
    pub(super) fn takes(&self, rect: &Rect<D>) -> bool {
        if let Self::Within(window) = self { window.contains(rect) } else { true }
    }

    /// Whether an entry is asked for.
    pub fn matches(&self, rect: &Rect<D>) -> bool {
        match self {
            Self::Intersects(window) => window.intersects(rect),
            Self::Within(window) => window.contains(rect),
            Self::Contains(window) => rect.contains(window),
            Self::Nearest(_) => true,
        }
    }

    /// What entries are ordered by in the first place. No entry in a box comes before the box.
    #[inline]
    pub(super) fn order(&self, rect: &Rect<D>) -> i64 {
        match self {
            Self::Nearest(to) => order_of(rect.distance_squared(to)),
            _ => order_of(rect.low[0]),
        }
    }

    /// No entry in a box comes after this.
    fn order_last(&self, rect: &Rect<D>) -> i64 {
        match self {
            Self::Nearest(to) => order_of(rect.reach_squared(to)),
            _ => order_of(rect.high[0]),
        }
    }

    /// The order of entries.
    pub(super) fn compare(&self, a: &Entry<D>, b: &Entry<D>) -> Ordering {
        let corners = |rect: &Rect<D>| rect.low.into_iter().chain(rect.high);
        let by_corners = || corners(&a.0).map(order_of).cmp(corners(&b.0).map(order_of));
        self.order(&a.0).cmp(&self.order(&b.0)).then_with(by_corners).then(a.1.cmp(&b.1))
    }

    /// Whether entries of a box can come after this one.
    pub(super) fn goes_beyond(&self, rect: &Rect<D>, entry: &Entry<D>) -> bool {
        // Numbers of a damaged page compare as they like.
        self.order_last(rect) >= self.order(&entry.0)
    }
}

/// A number for its kind and a rectangle, which may be a point.
impl<const D: usize> Wire for Query<D> {
    fn encode(&self, to: &mut Vec<u64>) {
        let (kind, rect) = match *self {
            Self::Intersects(window) => (0u64, window),
            Self::Within(window) => (1, window),
            Self::Contains(window) => (2, window),
            Self::Nearest(point) => (3, Rect { low: point, high: point }),
        };
        (kind, rect).encode(to);
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        match <(u64, Rect<D>)>::decode(from)? {
            (0, window) => Ok(Self::Intersects(window)),
            (1, window) => Ok(Self::Within(window)),
            (2, window) => Ok(Self::Contains(window)),
            (3, point) if point.low.map(f64::to_bits) == point.high.map(f64::to_bits) => Ok(Self::Nearest(point.low)),
            _ => Err(DecodeError("nothing of that kind can be asked of an R-tree")),
        }
    }
}
