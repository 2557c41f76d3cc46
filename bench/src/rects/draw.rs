//! Random rectangles, windows and places, as Catfish draws them, in a space of any size.

use farlink_structures::rtree::Rect;
use rand::{RngExt, rngs::SmallRng};

/// Edges of what is loaded.
const EDGE_MAX: f64 = 1e-4;
/// Catfish draws scales, and places of inserts, with a density of t to the power of this, negated.
const POWER: f64 = 0.99;
/// The least scale, which is not drawn itself, and the greatest.
const SCALES: (f64, f64) = (1e-5, 1e-2);
/// Between these is the greater coordinate, of a place and its mirror image.
const PLACES: (f64, f64) = (0.5, 1.0);

/// How far something moves at most, as a share of the space in each dimension.
const NEAR: f64 = 1e-3;

/// How long edges are at most, as shares of the space in each dimension.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Scale {
    /// 1e-5.
    Small,
    /// 1e-2.
    Large,
    /// Between them, by a power law.
    Power,
}

impl Scale {
    fn draw(self, rng: &mut SmallRng) -> f64 {
        match self {
            Self::Small => SCALES.0,
            Self::Large => SCALES.1,
            Self::Power => power(rng, SCALES),
        }
    }
}

/// Above the least, and up to the greatest, by the power law.
fn power(rng: &mut SmallRng, (least, greatest): (f64, f64)) -> f64 {
    let of = |at: f64| at.powf(1.0 - POWER);
    let at = above_zero(rng);
    (of(least) + at * (of(greatest) - of(least))).powf(1.0 / (1.0 - POWER)).clamp(least, greatest)
}

/// Above 0, up to 1.
fn above_zero(rng: &mut SmallRng) -> f64 {
    1.0 - rng.random_range(0.0..1.0)
}

/// Where rectangles lie.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Space(pub(super) Rect);

impl Space {
    /// The unit square.
    pub(crate) fn unit() -> Self {
        Self(Rect::new([0.0; 2], [1.0; 2]).expect("it is finite and in order"))
    }

    /// The bounding box of rectangles; the unit square if there are none.
    pub(super) fn around<'a>(rects: impl IntoIterator<Item = &'a Rect>) -> Self {
        let all = rects.into_iter().copied().reduce(|all, rect| all.union(&rect));
        all.map_or_else(Self::unit, Self)
    }

    /// From corners in the unit square.
    fn scaled(&self, low: [f64; 2], high: [f64; 2]) -> Rect {
        let (least, greatest) = (self.0.low(), self.0.high());
        // No difference: of two corners that are far apart it would be infinite.
        let at = |d: usize, share: f64| least[d] * (1.0 - share) + greatest[d] * share;
        let low: [f64; 2] = std::array::from_fn(|d| at(d, low[d]));
        let high = std::array::from_fn(|d| at(d, high[d]).max(low[d]));
        Rect::new(low, high).expect("between finite corners, in order")
    }

    fn of_edges(&self, rng: &mut SmallRng, edge_max: f64) -> Rect {
        let low: [f64; 2] = std::array::from_fn(|_| rng.random_range(0.0..1.0 - edge_max));
        self.scaled(low, low.map(|low| low + edge_max * above_zero(rng)))
    }

    /// One to load: anywhere.
    pub(crate) fn loaded(&self, rng: &mut SmallRng) -> Rect {
        self.of_edges(rng, EDGE_MAX)
    }

    /// One to search: anywhere.
    pub(crate) fn window(&self, rng: &mut SmallRng, scale: Scale) -> Rect {
        let edge_max = scale.draw(rng);
        self.of_edges(rng, edge_max)
    }

    /// One to insert. Both coordinates of its place are drawn above 0.5 by the power law, which has twice as many in
    /// the middle as at the border; then it is mirrored into any of the four quarters. What would lie outside is cut
    /// off.
    pub(super) fn inserted(&self, rng: &mut SmallRng, scale: Scale) -> Rect {
        let edge_max = scale.draw(rng);
        let low: [f64; 2] = std::array::from_fn(|_| {
            let at = power(rng, PLACES);
            if rng.random() { at } else { 1.0 - at }
        });
        self.scaled(low, low.map(|low| (low + edge_max * above_zero(rng)).min(1.0)))
    }

    /// Anywhere.
    pub(super) fn point(&self, rng: &mut SmallRng) -> [f64; 2] {
        let at = std::array::from_fn(|_| rng.random_range(0.0..1.0));
        self.scaled(at, at).low()
    }

    /// Where a rectangle of the space moves to: near by, and not out of the space.
    pub(super) fn near(&self, rng: &mut SmallRng, rect: &Rect) -> Rect {
        let (least, greatest) = (self.0.low(), self.0.high());
        let by: [f64; 2] = std::array::from_fn(|d| {
            let half = greatest[d] / 2.0 - least[d] / 2.0;
            // All of it may be too large for a number.
            let by = half * (2.0 * NEAR * rng.random_range(-1.0..1.0));
            by.max(least[d] - rect.low()[d]).min(greatest[d] - rect.high()[d])
        });
        let to = |corner: [f64; 2]| std::array::from_fn(|d| corner[d] + by[d]);
        Rect::new(to(rect.low()), to(rect.high())).unwrap_or(*rect)
    }

    /// A window for a comparison, with edges of this share of the space: around the middle of a rectangle, or anywhere.
    pub(super) fn around_or_anywhere(&self, rng: &mut SmallRng, share: f64, around: Option<&Rect>) -> Rect {
        let low: [f64; 2] = std::array::from_fn(|_| rng.random_range(0.0..=1.0 - share));
        let window = self.scaled(low, low.map(|low| low + share));
        let Some(around) = around else { return window };
        let half: [f64; 2] = std::array::from_fn(|d| window.high()[d] / 2.0 - window.low()[d] / 2.0);
        let middle: [f64; 2] = std::array::from_fn(|d| around.low()[d] / 2.0 + around.high()[d] / 2.0);
        let low = std::array::from_fn(|d| (middle[d] - half[d]).max(f64::MIN));
        let high = std::array::from_fn(|d| (middle[d] + half[d]).min(f64::MAX));
        Rect::new(low, high).unwrap_or(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    const DRAWN: usize = 20_000;

    fn rng() -> SmallRng {
        SmallRng::seed_from_u64(7)
    }

    /// The share of draws that lie at this value or below, and what the power law says it is.
    fn shares(range: (f64, f64), below: f64) -> (f64, f64) {
        let mut rng = rng();
        let drawn: Vec<f64> = (0..DRAWN).map(|_| power(&mut rng, range)).collect();
        assert!(drawn.iter().all(|&at| at > range.0 && at <= range.1));
        let of = |at: f64| at.powf(0.01);
        let expected = (of(below) - of(range.0)) / (of(range.1) - of(range.0));
        (drawn.iter().filter(|&&at| at <= below).count() as f64 / DRAWN as f64, expected)
    }

    #[test]
    fn scales_and_places_follow_the_power_law() {
        for (range, below) in [(SCALES, 1e-4), (SCALES, 3e-4), (SCALES, 1e-3), (PLACES, 0.6), (PLACES, 0.75)] {
            let (share, expected) = shares(range, below);
            assert!((share - expected).abs() < 0.015, "{range:?} {below}: {share}, not {expected}");
        }
    }

    #[test]
    fn edges_are_as_long_as_the_scale_says_and_within_the_space() {
        let spaces = [
            Space::unit(),
            Space(Rect::new([-180.0, -90.0], [180.0, 90.0]).unwrap()),
            Space(Rect::new([5.0, -1e308], [5.0, 1e308]).unwrap()),
            Space(Rect::new([f64::MIN; 2], [f64::MAX; 2]).unwrap()),
        ];
        let mut rng = rng();
        for space in spaces {
            let (least, greatest) = (space.0.low(), space.0.high());
            for (scale, edge_max) in [(Scale::Small, 1e-5), (Scale::Large, 1e-2), (Scale::Power, 1e-2)] {
                for _ in 0..1000 {
                    for rect in [space.window(&mut rng, scale), space.inserted(&mut rng, scale)] {
                        for d in 0..2 {
                            let (low, high) = (rect.low()[d], rect.high()[d]);
                            let edge = high / 2.0 - low / 2.0;
                            let room = greatest[d] / 2.0 - least[d] / 2.0;
                            // What rounding makes of it.
                            let slack = (room * 1e-9).max(low.abs() * 1e-15);
                            assert!(edge <= room * edge_max + slack, "{rect:?} in {space:?}");
                            assert!(low >= least[d] - slack && high <= greatest[d] + slack, "{rect:?} in {space:?}");
                        }
                    }
                }
            }
            for share in [1e-3, 0.5] {
                space.around_or_anywhere(&mut rng, share, Some(&space.0));
            }
            assert_eq!(space.near(&mut rng, &space.0), space.0);
            for _ in 0..1000 {
                let from = space.loaded(&mut rng);
                let to = space.near(&mut rng, &from);
                for d in 0..2 {
                    let room = greatest[d] / 2.0 - least[d] / 2.0;
                    let slack = (room * 1e-9).max(from.low()[d].abs().max(from.high()[d].abs()) * 4e-16);
                    assert!(
                        to.low()[d] >= least[d] - slack && to.high()[d] <= greatest[d] + slack,
                        "{to:?} in {space:?}"
                    );
                    for (from, to) in [(from.low()[d], to.low()[d]), (from.high()[d], to.high()[d])] {
                        assert!((to / 2.0 - from / 2.0).abs() <= room * NEAR + slack, "{from} to {to} in {space:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn inserts_go_to_all_quarters_and_more_of_them_to_the_middle() {
        let mut rng = rng();
        let (mut quarters, mut in_the_middle) = ([0; 4], 0);
        for _ in 0..DRAWN {
            let [x, y] = Space::unit().inserted(&mut rng, Scale::Small).low();
            quarters[usize::from(x > 0.5) * 2 + usize::from(y > 0.5)] += 1;
            in_the_middle += usize::from((x - 0.5).abs() < 0.25);
        }
        assert!(quarters.iter().all(|&count| (count as f64 / DRAWN as f64 - 0.25).abs() < 0.02), "{quarters:?}");
        // ln 1.5 / ln 2, but for the hundredth that the power lacks.
        assert!((in_the_middle as f64 / DRAWN as f64 - 0.585).abs() < 0.02, "{in_the_middle}");
    }
}
