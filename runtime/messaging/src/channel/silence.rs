//! How long a memory server has given no sign of life while a worker waits for it.
//!
//! A memory server that serves messages reports its load every few milliseconds, whatever its operations wait for. So who gives no sign for long
//! is stopped, or gets no core. To tell the two apart, time counts in steps of limited length, one for each look, with sixteen exchanges or more
//! in between: where the machine is busy the worker looks less often, too, and waits for longer. And what it writes may arrive late, behind
//! seconds of other traffic: if its process can be asked in another way and answers, it is given [`LIVING`] times as long.

use std::time::Duration;

/// Looks at least, before a limit is reached.
const LOOKS_MIN: u64 = 12;

/// How much longer a memory server may seem to do nothing whose process answers.
const LIVING: u64 = 10;

#[derive(Debug, Default)]
pub(super) struct Silence {
    sign: (u64, u64),
    answers: u64,
    seen_ns: u64,
    /// Without a sign, and without a sign or an answer.
    idle_ns: u64,
    silent_ns: u64,
}

impl Silence {
    /// Whether it has lasted for `limit`. `sign` changes whenever the memory server does anything, `answers` whenever its process says that
    /// it lives.
    pub(super) fn lasts(&mut self, sign: (u64, u64), answers: u64, now_ns: u64, limit: Duration) -> bool {
        let step_max_ns = (limit.as_nanos() as u64 / LOOKS_MIN).max(1);
        let passed_ns = now_ns.saturating_sub(std::mem::replace(&mut self.seen_ns, now_ns));
        if std::mem::replace(&mut self.sign, sign) != sign {
            self.ends();
            return false;
        }
        let counted_ns = passed_ns.min(step_max_ns);
        let has_answered = std::mem::replace(&mut self.answers, answers) != answers;
        self.silent_ns = if has_answered { 0 } else { self.silent_ns + counted_ns };
        self.idle_ns += counted_ns;
        let limit_ns = step_max_ns * LOOKS_MIN;
        self.silent_ns >= limit_ns || self.idle_ns >= limit_ns.saturating_mul(LIVING)
    }

    /// Nobody waits.
    pub(super) fn ends(&mut self) {
        (self.idle_ns, self.silent_ns) = (0, 0);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(120);
    const STEP_NS: u64 = 10_000_000;

    #[test]
    fn time_counts_by_looks_and_a_sign_begins_it_anew() {
        let mut silence = Silence::default();
        assert!(!silence.lasts((1, 1), 0, 5, LIMIT));
        // The worker itself was stopped for long.
        let mut now_ns = 3_600_000_000_000;
        for _ in 1..LOOKS_MIN {
            assert!(!silence.lasts((1, 1), 0, now_ns, LIMIT));
            now_ns += STEP_NS;
        }
        assert!(!silence.lasts((2, 1), 0, now_ns, LIMIT));
        for look in 1..=LOOKS_MIN {
            now_ns += STEP_NS;
            assert_eq!(silence.lasts((2, 1), 0, now_ns, LIMIT), look == LOOKS_MIN);
        }
        silence.ends();
        assert!(!silence.lasts((2, 1), 0, now_ns + STEP_NS, LIMIT));
    }

    #[test]
    fn one_whose_process_answers_is_given_longer_but_not_for_ever() {
        let mut silence = Silence::default();
        let mut now_ns = 0;
        let mut look = |answers| {
            now_ns += STEP_NS;
            silence.lasts((1, 1), answers, now_ns, LIMIT)
        };
        assert!(!look(0));
        // An answer each time, then none.
        assert!((1..=50).all(|answers| !look(answers)));
        assert_eq!((1..).find(|_| look(50)), Some(LOOKS_MIN));
        // One that answers each time, and does nothing.
        let mut silence = Silence::default();
        let looks = (0..).find(|&look| silence.lasts((1, 1), look, look * STEP_NS, LIMIT));
        assert_eq!(looks, Some(LIVING * LOOKS_MIN));
    }
}
