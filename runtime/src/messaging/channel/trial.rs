//! Both ways of sending, tried on what a channel carries anyhow: so it costs only what the worse way does.
//!
//! For four stretches of one look messages of about one size go by the ring, are fetched, are fetched again, and go by the ring
//! (or the other way around): what changes steadily meanwhile meets both ways alike. What is counted are words of such messages
//! that have been answered, and the time that took, from when all that had been sent the other way is answered.

use std::ops::Range;

use super::super::gains::{SIZES, stands_for};

/// Words of such messages in a stretch at least, and how many messages.
const STRETCH_WORDS: u64 = 32 << 10;
const STRETCH_MESSAGES: u64 = 8;
const STRETCHES: usize = 4;
/// A trial is given up after so long: nobody sends such messages any more.
const TIME_MAX_NS: u64 = 20_000_000;
/// Words that a channel carries between two trials, as a multiple of what one counts. Half of those go the worse way.
const SPACING: usize = 16;

#[derive(Debug)]
pub(super) struct Trial {
    size: usize,
    first_way: usize,
    /// Messages of more words were fetched before it.
    switch_words: usize,
    stretch: usize,
    /// Requests from this one on were sent the present way.
    from: u64,
    /// When all before had been answered.
    begun_ns: Option<u64>,
    carried: u64,
    took: [Took; 2],
    deadline_ns: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Took {
    ns: u64,
    words: u64,
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
            begun_ns: None,
            carried: 0,
            took: Default::default(),
            deadline_ns: now_ns.saturating_add(TIME_MAX_NS),
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Words to carry from the end of this trial to the next one.
    pub(super) fn spacing(&self) -> usize {
        SPACING * STRETCHES * self.stretch_words() as usize
    }

    /// 0 is the ring.
    fn way(&self) -> usize {
        let second = self.stretch == 1 || self.stretch == 2;
        self.first_way ^ usize::from(second)
    }

    /// Messages of more words are fetched at present. Those of quite other sizes go as before.
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
        if self.begun_ns.is_some() && stands_for(self.size, words) {
            self.carried += words as u64;
        }
    }

    /// What to do now; requests in `unanswered` are.
    pub(super) fn next(&mut self, now_ns: u64, unanswered: Range<u64>) -> Next {
        if now_ns > self.deadline_ns {
            return Next::Over(None);
        }
        let Some(begun_ns) = self.begun_ns else {
            if unanswered.start >= self.from {
                self.begun_ns = Some(now_ns);
            }
            return Next::Stay;
        };
        if self.carried < self.stretch_words() {
            return Next::Stay;
        }
        let took = &mut self.took[self.way()];
        took.ns += now_ns.saturating_sub(begun_ns);
        took.words += self.carried;
        self.stretch += 1;
        if self.stretch == STRETCHES {
            let [ring, fetched] = self.took.map(|took| took.ns.max(1) as f64 / took.words as f64);
            return Next::Over(Some((fetched / ring).ln()));
        }
        (self.carried, self.begun_ns, self.from) = (0, None, unanswered.end);
        // The second and the third stretch go the same way.
        match self.stretch {
            2 => Next::Stay,
            _ => Next::SendAbove(self.send_above()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A stream of messages that takes so long for each word, by way; what was found out, and how many words were carried.
    fn tried(size: usize, first_way: usize, ns_per_word: impl Fn(usize, u64) -> f64) -> (Option<f64>, u64) {
        let mut trial = Trial::new((size, first_way), 300, 1, 0);
        let (words, in_flight) = (SIZES[size], 16);
        let way_of = |above: usize| usize::from(words > above);
        // The way that each request was sent.
        let mut above = trial.send_above();
        let mut ways = vec![way_of(above); in_flight];
        let (mut lowest, mut now) = (1, 0.0);
        for answered in 0.. {
            now += ns_per_word(ways[answered], answered as u64) * words as f64;
            trial.carry(words);
            trial.carry(3);
            lowest += 1;
            ways.push(way_of(above));
            match trial.next(now as u64, lowest..ways.len() as u64 + 1) {
                Next::Stay => {}
                Next::SendAbove(words) => above = words,
                Next::Over(gain) => return (gain, answered as u64 * words as u64),
            }
        }
        unreachable!()
    }

    #[test]
    fn the_gain_is_that_of_the_two_ways() {
        for (size, size_words) in SIZES.into_iter().enumerate() {
            for first_way in [0, 1] {
                for ring in [0.5, 1.0, 2.0, 1.05] {
                    // It gets slower steadily, as a machine might that others begin to use.
                    let (gain, words) = tried(size, first_way, |way, at| [ring, 1.0][way] * (1.0 + at as f64 * 1e-5));
                    let (gain, expected) = (gain.unwrap(), -f64::ln(ring));
                    assert!((gain - expected).abs() < 0.02, "{size} {first_way} {ring}: {gain}, not {expected}");
                    let whole = 4 * (STRETCH_WORDS.max(8 * size_words as u64) + 40 * size_words as u64);
                    assert!(words < whole, "{size}: {words} words for a trial");
                }
            }
        }
    }

    #[test]
    fn a_trial_of_what_nobody_sends_ends() {
        let mut trial = Trial::new((2, 0), 300, 5, 1000);
        assert_eq!(trial.next(2000, 5..5), Next::Stay);
        trial.carry(10);
        trial.carry(100_000);
        assert_eq!(trial.next(1000 + TIME_MAX_NS, 5..5), Next::Stay);
        assert_eq!(trial.next(1001 + TIME_MAX_NS, 5..5), Next::Over(None));
        // And the slowest of all streams.
        assert_eq!(tried(3, 1, |_, _| 1000.0).0, None);
    }
}
