//! Both ways of sending, tried on what a channel carries anyhow: so it costs only what the worse way does.
//!
//! For four stretches of one trial messages of about one size go by the ring, are fetched, are fetched again, and go by the
//! ring (or the other way around): what changes steadily meanwhile meets both ways alike. What is counted are words of such
//! messages that have been answered, from when all that had been sent the other way is answered, and the time in which
//! anything was unanswered. A trial moves the switch-over past that size and back: messages of all sizes between it and where
//! the switch-over was go the way that is tried, too.
//!
//! What a trial finds out goes to the compute server's `Gains`, which say where the switch-over is and what to try next; the
//! channel's `Core` begins trials and applies what they say.

use std::ops::Range;

use super::super::gains::{SIZES, stands_for};

/// Words of such messages in a stretch at least, and how many messages.
const STRETCH_WORDS: u64 = 32 << 10;
const STRETCH_MESSAGES: u64 = 8;
const STRETCHES: usize = 4;
/// A trial is given up when no such message has been answered for so long: nobody sends them any more.
const PAUSE_NS_MAX: u64 = 20_000_000;
/// And when it has taken so many words: somebody's answer does not come, for which it waits.
const WORDS_MAX: u64 = 1 << 25;
/// Words that a channel carries between two trials, as a multiple of what it carries in one, if both ways take the same time;
/// more if they do not, since half of what a trial carries goes the worse way. So at most a sixtieth of the time is lost.
const SPACING: f64 = 8.0;
const SPACING_BY_LOSS: f64 = 30.0;
/// A larger quotient, as a logarithm, makes it no longer.
const GAIN_MAX: f64 = 3.0;
/// After a trial without a result twice as many, and so on, up to so many times.
const DOUBLINGS_MAX: u32 = 6;

#[derive(Debug)]
pub(super) struct Trial {
    size: usize,
    first_way: usize,
    /// Messages of more words were fetched before it.
    switch_words: usize,
    stretch: usize,
    /// Requests from this one on were sent the present way.
    from: u64,
    /// All before has been answered.
    counts: bool,
    now: Took,
    took: [Took; 2],
    clock: Watch,
    /// When such a message was last seen to be answered, and whether one was answered since.
    seen_ns: u64,
    is_seen: bool,
    /// All that was carried since the trial began, and as much of it as tells something.
    words: u64,
    words_counted: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Took {
    ns: u64,
    words: u64,
}

/// Measures the time in which something is unanswered.
#[derive(Debug)]
struct Watch {
    last_ns: u64,
    is_idle: bool,
}

impl Watch {
    /// How much of that has passed since it was last asked.
    fn pass(&mut self, now_ns: u64, is_idle: bool) -> u64 {
        let passed = if self.is_idle { 0 } else { now_ns.saturating_sub(self.last_ns) };
        (self.last_ns, self.is_idle) = (now_ns, is_idle);
        passed
    }
}

/// What is to be done now.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    Stay,
    /// Messages of more words are to be fetched from now on.
    SendAbove(usize),
    /// It is over: by what factor fetching takes longer, as a logarithm, if that was found out.
    Over(Option<f64>),
}

impl Trial {
    /// Tries a size, one way first; the next request is `next`.
    pub(super) fn new((size, first_way): (usize, usize), switch_words: usize, next: u64, now_ns: u64) -> Self {
        Self {
            size,
            first_way,
            switch_words,
            stretch: 0,
            from: next,
            counts: false,
            now: Took::default(),
            took: Default::default(),
            clock: Watch { last_ns: now_ns, is_idle: false },
            seen_ns: now_ns,
            is_seen: false,
            words: 0,
            words_counted: 0,
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Words to carry from the end of this trial to the next one, after so many in a row that found out nothing.
    pub(super) fn spacing(&self, gain: Option<f64>, in_vain: u32) -> usize {
        let loss = gain.unwrap_or_default().abs().min(GAIN_MAX).exp_m1();
        let times = SPACING + SPACING_BY_LOSS * loss;
        let carried = self.words.max(STRETCHES as u64 * self.stretch_words());
        (carried as f64 * times) as usize * (1 << in_vain.min(DOUBLINGS_MAX))
    }

    /// 0 is the ring.
    fn way(&self) -> usize {
        let second = self.stretch == 1 || self.stretch == 2;
        self.first_way ^ usize::from(second)
    }

    /// Messages of more words are fetched at present.
    pub(super) fn send_above(&self) -> usize {
        let words = SIZES[self.size];
        match self.way() {
            0 => self.switch_words.max(2 * words),
            _ => self.switch_words.min(words / 2),
        }
    }

    fn stretch_words(&self) -> u64 {
        STRETCH_WORDS.max(STRETCH_MESSAGES * SIZES[self.size] as u64)
    }

    /// A message of so many words was answered, or is an answer.
    pub(super) fn carry(&mut self, words: usize) {
        self.words += words as u64;
        if stands_for(self.size, words) {
            self.words_counted += words as u64;
            self.is_seen = true;
            if self.counts {
                self.now.words += words as u64;
            }
        }
    }

    /// What to do now; requests in `unanswered` are.
    pub(super) fn next(&mut self, now_ns: u64, unanswered: Range<u64>) -> Next {
        if std::mem::take(&mut self.is_seen) {
            self.seen_ns = now_ns;
        }
        if now_ns.saturating_sub(self.seen_ns) > PAUSE_NS_MAX || self.words > WORDS_MAX {
            return Next::Over(None);
        }
        let passed_ns = self.clock.pass(now_ns, unanswered.is_empty());
        if !self.counts {
            self.counts = unanswered.start >= self.from;
            return Next::Stay;
        }
        self.now.ns += passed_ns;
        if self.now.words < self.stretch_words() {
            return Next::Stay;
        }
        let now = std::mem::take(&mut self.now);
        let took = &mut self.took[self.way()];
        *took = Took { ns: took.ns + now.ns, words: took.words + now.words };
        self.stretch += 1;
        if self.stretch == STRETCHES {
            return Next::Over(self.gain());
        }
        if self.stretch == 2 {
            // The third stretch goes the same way as the second.
            return Next::Stay;
        }
        (self.counts, self.from) = (false, unanswered.end);
        Next::SendAbove(self.send_above())
    }

    /// None where time stands still, and where most of what took the time was something else.
    fn gain(&self) -> Option<f64> {
        if self.took.iter().any(|took| took.ns == 0) || self.words_counted < self.words / 2 {
            return None;
        }
        let [ring, fetched] = self.took.map(|took| took.ns as f64 / took.words as f64);
        Some((fetched / ring).ln())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// So many messages in flight, each of which takes so long for each word, by way and by how many came before; with a
    /// pause after so many of them.
    struct Stream<F> {
        in_flight: usize,
        ns_per_word: F,
        pause: (usize, f64),
        /// Words of another message with each.
        beside: usize,
    }

    impl<F: Fn(usize, u64) -> f64> Stream<F> {
        /// What was found out, and words to the next trial and in this one.
        fn try_size(&self, size: usize, first_way: usize) -> (Option<f64>, [u64; 2]) {
            let mut trial = Trial::new((size, first_way), 300, 1, 0);
            let words = SIZES[size];
            let way_of = |above: usize| usize::from(words > above);
            let mut above = trial.send_above();
            // The way that each request was sent.
            let mut ways = vec![way_of(above); self.in_flight];
            let (mut now, mut carried) = (0.0, 0);
            for answered in 0.. {
                now += (self.ns_per_word)(ways[answered], answered as u64) * words as f64;
                [words, 3, self.beside].into_iter().for_each(|words| trial.carry(words));
                carried += (words + 3 + self.beside) as u64;
                let lowest = answered as u64 + 2;
                let pauses = (answered + 1).is_multiple_of(self.pause.0);
                if !pauses {
                    ways.push(way_of(above));
                }
                let next = trial.next(now as u64, lowest..ways.len() as u64 + 1);
                match next {
                    Next::Stay => {}
                    Next::SendAbove(words) => above = words,
                    Next::Over(gain) => return (gain, [trial.spacing(gain, 0) as u64, carried]),
                }
                if pauses {
                    // All is answered, nothing is sent for a while, and then as many are again.
                    while ways.len() > answered + 1 {
                        ways.pop();
                    }
                    trial.next(now as u64, lowest..lowest);
                    now += self.pause.1;
                    ways.resize(answered + 1 + self.in_flight, way_of(above));
                    trial.next(now as u64, lowest..ways.len() as u64 + 1);
                }
            }
            unreachable!()
        }
    }

    const NEVER: (usize, f64) = (usize::MAX, 0.0);

    #[test]
    fn the_gain_is_that_of_the_two_ways() {
        for (size, size_words) in SIZES.into_iter().enumerate() {
            for (first_way, in_flight) in [(0, 1), (1, 16), (0, 200)] {
                for ring in [0.5, 1.0, 2.0, 1.05, 8.0] {
                    // It gets slower steadily, as a machine might that others begin to use.
                    let ns_per_word = |way, at| [ring, 1.0][way] * (1.0 + at as f64 * 1e-5);
                    let stream = Stream { in_flight, ns_per_word, pause: NEVER, beside: 0 };
                    let (gain, [spacing, words]) = stream.try_size(size, first_way);
                    let (gain, expected) = (gain.unwrap(), -f64::ln(ring));
                    assert!((gain - expected).abs() < 0.02, "{size} {in_flight} {ring}: {gain}, not {expected}");
                    let whole =
                        4 * STRETCH_WORDS.max(8 * size_words as u64) + (3 * in_flight + 8) as u64 * size_words as u64;
                    assert!(words < whole * 11 / 10, "{size} {in_flight}: {words} words for a trial");
                    // Half of it went the worse way.
                    let lost = 0.5 * gain.abs().exp_m1() * words as f64 / spacing as f64;
                    assert!(lost < 1.0 / 55.0, "{size} {in_flight} {ring}: {lost} is lost");
                }
            }
        }
    }

    #[test]
    fn time_in_which_nothing_is_under_way_does_not_count() {
        for pause in [(20, 50_000.0), (333, 1e6), (1, 3000.0)] {
            let stream = Stream { in_flight: 1, ns_per_word: |way, _| [1.0, 0.8][way], pause, beside: 0 };
            let gain = stream.try_size(3, 0).0.unwrap();
            assert!((gain - f64::ln(0.8)).abs() < 0.02, "{pause:?}: {gain}");
        }
    }

    #[test]
    fn one_answer_that_does_not_come_does_not_hold_it_up_for_ever() {
        let mut trial = Trial::new((2, 0), 300, 5, 0);
        let ended = (0..1_000_000).find(|&now_ns| {
            trial.carry(SIZES[2]);
            trial.next(now_ns, 4..50) != Next::Stay
        });
        assert!(ended.is_some_and(|after| after > 1000), "{ended:?}");
    }

    #[test]
    fn what_is_mostly_something_else_tells_nothing() {
        let stream = |beside| Stream { in_flight: 4, ns_per_word: |way, _| [1.0, 0.8][way], pause: NEVER, beside };
        assert!(stream(500).try_size(3, 0).0.is_some());
        assert_eq!(stream(5000).try_size(3, 0).0, None);
        // Nor does time that stands still.
        assert_eq!(Stream { in_flight: 4, ns_per_word: |_, _| 0.0, pause: NEVER, beside: 0 }.try_size(3, 0).0, None);
    }

    #[test]
    fn a_trial_of_what_nobody_sends_ends_and_the_next_one_waits() {
        let mut trial = Trial::new((2, 0), 300, 5, 1000);
        assert_eq!(trial.next(2000, 5..6), Next::Stay);
        trial.carry(10);
        trial.carry(100_000);
        assert_eq!(trial.next(1000 + PAUSE_NS_MAX, 6..6), Next::Stay);
        assert_eq!(trial.next(1001 + PAUSE_NS_MAX, 6..6), Next::Over(None));
        assert_eq!(4 * trial.spacing(None, 0), trial.spacing(None, 2));
        assert_eq!(trial.spacing(None, DOUBLINGS_MAX), trial.spacing(None, u32::MAX));
        // A stream that is slow does not end it.
        let slow = Stream { in_flight: 16, ns_per_word: |way, _| [1000.0, 800.0][way], pause: NEVER, beside: 0 };
        assert!(slow.try_size(5, 1).0.is_some());
    }
}
