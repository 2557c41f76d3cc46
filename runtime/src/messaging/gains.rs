//! What is known of how much longer it takes to fetch messages than to write them into the ring, by their size, and from which
//! size on that is less.
//!
//! Fetching gains on the ring as messages grow: so the logarithms of the quotients of both are fitted by a falling sequence,
//! which evens out what noise there is, and the switch-over is where it passes zero, on a logarithmic scale of sizes. Near that
//! point both ways cost the same, so a small error costs little.

use std::collections::VecDeque;

/// Words of the messages that are tried, with what surrounds them a little more. The last ones are so long that it is clear
/// which way is better for them.
pub(super) const SIZES: [usize; 7] = [128, 256, 512, 1024, 2048, 4096, 16384];
/// Quotients of each size that are remembered, and for how many that of the start counts.
const MEMORY: usize = 5;
const FIRST_COUNTS: usize = 2;
/// Differences below one in a hundred are none.
const INDIFFERENT: f64 = 0.01;
/// What seems to be further from zero is tried only now and then, unless it is next to the switch-over: that costs much.
const DOUBT: f64 = 0.3;
/// It is passed over so often; more often by this much for each unit that it is away from zero.
const PASSED_OVER: f64 = 16.0;
const PASSED_OVER_BY_GAIN: f64 = 64.0;

/// By what factor fetching takes longer than the ring, as logarithms: the last ones of each size.
#[derive(Debug)]
pub(super) struct Gains {
    last: [VecDeque<f64>; SIZES.len()],
    tries: [usize; SIZES.len()],
    passed_over: [u32; SIZES.len()],
}

impl Gains {
    pub(super) fn new(first: [f64; SIZES.len()]) -> Self {
        let last = first.map(|gain| VecDeque::from([gain; FIRST_COUNTS]));
        Self { last, tries: Default::default(), passed_over: Default::default() }
    }

    pub(super) fn switch_words(&self) -> usize {
        switch_of(std::array::from_fn(|size| self.gain(size)))
    }

    fn gain(&self, size: usize) -> f64 {
        let mut sorted = Vec::from_iter(self.last[size].iter().copied());
        sorted.sort_by(f64::total_cmp);
        middle(&sorted)
    }

    /// For which size a message of so many words can stand, if it is one that should be tried, and which way first.
    pub(super) fn choose_trial(&mut self, words: usize) -> Option<(usize, usize)> {
        let size = size_of(words)?;
        let (switch_words, gain) = (self.switch_words(), self.gain(size));
        let above = SIZES.iter().position(|&size| size > switch_words).unwrap_or(SIZES.len());
        let is_near = size == above || size + 1 == above;
        if !is_near && gain.abs() > DOUBT {
            self.passed_over[size] += 1;
            if f64::from(self.passed_over[size]) < PASSED_OVER + PASSED_OVER_BY_GAIN * gain.abs() {
                return None;
            }
        }
        self.passed_over[size] = 0;
        self.tries[size] += 1;
        Some((size, self.tries[size] % 2))
    }

    /// What was found out last counts for more than what was found out about other sizes before, where these contradict it.
    pub(super) fn learn(&mut self, size: usize, gain: f64) {
        self.last[size].push_back(gain);
        if self.last[size].len() > MEMORY {
            self.last[size].pop_front();
        }
        let gain = self.gain(size);
        for other in 0..SIZES.len() {
            let before = self.gain(other);
            if other < size && before < gain || other > size && before > gain {
                self.last[other] = VecDeque::from([gain; FIRST_COUNTS]);
            }
        }
    }
}

/// The size that is closest to a message of so many words, if it tells something about one.
pub(super) fn size_of(words: usize) -> Option<usize> {
    if words <= SIZES[0] / 2 {
        return None;
    }
    let distance = |size: &usize| (SIZES[*size] as f64 / words as f64).ln().abs();
    let size = (0..SIZES.len()).min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    stands_for(size, words).then_some(size)
}

/// Whether a message of so many words tells something about messages of this size.
pub(super) fn stands_for(size: usize, words: usize) -> bool {
    SIZES[size] / 2 < words && words <= 2 * SIZES[size]
}

/// The switch-over, given by what factor fetching takes longer than the ring at each size, as logarithms.
fn switch_of(gains: [f64; SIZES.len()]) -> usize {
    let fitted = falling(&gains);
    // Within this much of zero nothing tells the ways apart; the ring, which needs no answer, has it.
    let Some(first) = fitted.iter().position(|&gain| gain < -INDIFFERENT) else { return usize::MAX };
    let Some(before) = first.checked_sub(1) else { return SIZES[0] - 1 };
    let (left, right) = (fitted[before].max(0.0), fitted[first]);
    let share = left / (left - right);
    let (small, large) = (SIZES[before] as f64, SIZES[first] as f64);
    (small * (large / small).powf(share)) as usize
}

/// A falling sequence close to these values: neighbours that rise are replaced by their median, so that one that is far off
/// does not count for more than any other.
fn falling(values: &[f64]) -> Vec<f64> {
    let mut runs: Vec<Vec<f64>> = Vec::new();
    for &value in values {
        let mut run = vec![value];
        while let Some(before) = runs.pop_if(|before| middle(before) < middle(&run)) {
            run.extend(before);
            run.sort_by(f64::total_cmp);
        }
        runs.push(run);
    }
    runs.iter().flat_map(|run| std::iter::repeat_n(middle(run), run.len())).collect()
}

/// The median of sorted values, the lower one of two.
fn middle(sorted: &[f64]) -> f64 {
    sorted[(sorted.len() - 1) / 2]
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn gains(fetched: impl Fn(f64) -> f64) -> [f64; SIZES.len()] {
        SIZES.map(|words| (fetched(words as f64) / words as f64).ln())
    }

    #[test]
    fn the_switch_over_lies_where_the_better_way_changes() {
        // A message of w words takes w by the ring, 700 + w / 4 if it is fetched: the same at 933.
        let clean = gains(|words| 700.0 + words / 4.0);
        assert!((880..990).contains(&switch_of(clean)), "{}", switch_of(clean));
        // One disturbed measurement does not move it far.
        for place in 0..SIZES.len() {
            for error in [-0.3, 0.3, 2.0] {
                let mut disturbed = clean;
                disturbed[place] += error;
                assert!((600..1500).contains(&switch_of(disturbed)), "{place} {error} {}", switch_of(disturbed));
            }
        }
        assert_eq!(switch_of(gains(|_| 1e6)), usize::MAX);
        assert_eq!(switch_of(gains(|_| 1.0)), SIZES[0] - 1);
        // Ways that nothing tells apart.
        assert_eq!(switch_of(gains(|words| words * 0.995)), usize::MAX);
    }

    #[test]
    fn what_is_tried_follows_when_the_machine_changes() {
        let mut gains = Gains::new(gains(|words| 700.0 + words / 4.0));
        assert!((880..990).contains(&gains.switch_words()), "{}", gains.switch_words());
        // The same at 4000, then at 200; every fifth try is disturbed.
        for (cost, expected) in [(3000.0, 3000..5300), (150.0, 150..265)] {
            for round in 0..300 {
                let words = [100, 200, 300, 700, 1100, 1500, 3000, 5000, 20_000][round % 9];
                let Some((size, _)) = gains.choose_trial(words) else { continue };
                let disturbance = if round % 5 == 0 { 1.0 } else { 0.0 };
                gains.learn(size, ((cost + SIZES[size] as f64 / 4.0) / SIZES[size] as f64).ln() + disturbance);
            }
            assert!(expected.contains(&gains.switch_words()), "{cost}: {}", gains.switch_words());
        }
    }

    #[test]
    fn one_size_alone_moves_the_switch_over_past_itself() {
        let flat = [1.0, 0.5, -0.05, -0.1, -0.2, -0.5, -1.0];
        let of = |start: f64| gains(|words| start + words / 4.0);
        for (start, size) in [(flat, 3), (of(600.0), 3), (of(1000.0), 3), (of(5000.0), 5), (of(50.0), 0)] {
            let mut gains = Gains::new(start);
            for better in [0.1, -0.1, 0.05] {
                for _ in 0..3 {
                    // It is next to the switch-over, or not far from it.
                    assert_eq!(gains.choose_trial(SIZES[size]).map(|(size, _)| size), Some(size), "{start:?} {better}");
                    gains.learn(size, better);
                }
                assert_eq!(gains.switch_words() > SIZES[size], better > 0.0, "{start:?} {better}");
            }
        }
    }

    #[test]
    fn what_is_far_from_the_switch_over_is_tried_seldom() {
        let mut gains = Gains::new(gains(|words| 700.0 + words / 4.0));
        for words in [0, 1, 8, 60, 40_000, 1 << 20] {
            assert_eq!(gains.choose_trial(words), None, "{words}");
        }
        let ways: Vec<usize> = (0..4).map(|_| gains.choose_trial(1000).unwrap().1).collect();
        assert!(ways.iter().sum::<usize>() == 2, "one way is always first: {ways:?}");
        for words in [130, 20_000] {
            let tried = (0..1000).filter(|_| gains.choose_trial(words).is_some()).count();
            assert!((2..60).contains(&tried), "{words}: {tried} of 1000 times");
        }
    }

    #[test]
    fn what_was_wrong_from_the_start_is_found_out_by_whoever_sends_it() {
        for (start, better, words) in [(-2.0, 0.4, 256), (2.0, -0.4, 4096)] {
            let mut gains = Gains::new([start; SIZES.len()]);
            let mut chances = 0;
            while (gains.switch_words() > words) != (better > 0.0) {
                chances += 1;
                assert!(chances < 1000, "it believes what is wrong for ever");
                if let Some((size, _)) = gains.choose_trial(words) {
                    gains.learn(size, better);
                }
            }
        }
    }

    #[test]
    fn the_fit_falls_and_keeps_what_falls_already() {
        assert_eq!(falling(&[3.0, 2.0, 0.0]), [3.0, 2.0, 0.0]);
        assert_eq!(falling(&[3.0, 0.0, 2.0, -1.0]), [3.0, 0.0, 0.0, -1.0]);
        assert_eq!(falling(&[1.0, 2.0, 6.0]), [2.0, 2.0, 2.0]);
        assert_eq!(falling(&[3.0, -1.0, -2.0, 90.0]), [3.0, -1.0, -2.0, -2.0]);
    }
}
