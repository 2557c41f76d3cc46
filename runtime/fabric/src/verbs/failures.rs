//! Failures that follow one another on a worker's way to a memory server: how long it rests after them, and when it is given up.
//!
//! A request that fails is posted again, by whoever posted it, for as long as the memory server is not lost. Where RDMA does not work while
//! TCP does, that would be for ever and without a word; where it fails at once, as fast as queue pairs can be made.

use std::time::{Duration, Instant};

/// The rest after the second failure in a row; after each one more it is twice as long.
const REST: Duration = Duration::from_millis(1);
/// The longest rest.
const REST_MAX: Duration = Duration::from_millis(100);
/// Fewer than these prove nothing, however much time is between them.
const GIVEN_UP_MIN: u32 = 3;
/// A failure so long after another belongs to no run with it, unless it takes as long to notice one: nothing was asked for meanwhile.
const PAUSE: Duration = Duration::from_secs(10);

/// The failures of one way.
#[derive(Debug, Default)]
pub(super) struct Failures {
    run: Option<Run>,
}

/// Those since anything was carried out, without a long pause.
#[derive(Debug, Clone, Copy)]
struct Run {
    since: Instant,
    last: Instant,
    count: u32,
}

/// How it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// With a new connection, after this time.
    ConnectAfter(Duration),
    /// Not at all: for so long there was nothing but failures.
    GiveUp(Duration),
}

impl Failures {
    /// Something was carried out.
    #[inline]
    pub(super) fn end(&mut self) {
        if self.run.is_some() {
            self.run = None;
        }
    }

    /// One more, which took `noticed` to be noticed at the most. Nothing but failures for `limit` is the end; after a long pause they begin
    /// anew.
    pub(super) fn add(&mut self, now: Instant, limit: Duration, noticed: Duration) -> Next {
        let pause = PAUSE.max(limit / 2).max(noticed.saturating_mul(2));
        let new = Run { since: now, last: now, count: 0 };
        let run = self.run.take_if(|run| now.saturating_duration_since(run.last) <= pause).unwrap_or(new);
        let run = self.run.insert(Run { last: now, count: run.count.saturating_add(1), ..run });
        let (lasted, others) = (now.saturating_duration_since(run.since), run.count - 1);
        if run.count >= GIVEN_UP_MIN && lasted >= limit {
            Next::GiveUp(lasted)
        } else {
            // The first may be anybody's: a connection that a restart or a lost packet has broken is made anew at once.
            let rest =
                others.checked_sub(1).map_or(Duration::ZERO, |doubled| REST.saturating_mul(1 << doubled.min(16)));
            Next::ConnectAfter(rest.min(REST_MAX))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);
    const NOTICED: Duration = Duration::from_secs(4);

    #[test]
    fn rests_grow_until_something_is_carried_out() {
        let (mut failures, mut now) = (Failures::default(), Instant::now());
        let mut next = || {
            let Next::ConnectAfter(rest) = failures.add(now, LIMIT, NOTICED) else { panic!("given up") };
            now += rest;
            rest.as_millis()
        };
        let rests: Vec<_> = (0..100).map(|_| next()).collect();
        assert_eq!(rests[..9], [0, 1, 2, 4, 8, 16, 32, 64, 100]);
        assert!(rests[9..].iter().all(|&rest| rest == 100));
        failures.end();
        assert_eq!(failures.add(now, LIMIT, NOTICED), Next::ConnectAfter(Duration::ZERO));
    }

    #[test]
    fn nothing_but_failures_for_long_is_the_end() {
        let start = Instant::now();
        let goes_on = |next| matches!(next, Next::ConnectAfter(_));
        let mut failures = Failures::default();
        assert!(goes_on(failures.add(start, LIMIT, NOTICED)));
        assert!(goes_on(failures.add(start + LIMIT / 2, LIMIT, NOTICED)));
        assert_eq!(failures.add(start + LIMIT, LIMIT, NOTICED), Next::GiveUp(LIMIT));
        let (mut failures, short) = (Failures::default(), LIMIT / 200);
        assert!(goes_on(failures.add(start, short, NOTICED)));
        assert!(goes_on(failures.add(start + short * 3, short, NOTICED)), "two are few");
        assert_eq!(failures.add(start + short * 3, short, NOTICED), Next::GiveUp(short * 3));
        let mut failures = Failures::default();
        for seconds in [0, 20, 40, 59] {
            assert!(goes_on(failures.add(start + Duration::from_secs(seconds), LIMIT, NOTICED)), "{seconds} s");
        }
        assert_eq!(failures.add(start + LIMIT, LIMIT, NOTICED), Next::GiveUp(LIMIT));
        failures.end();
        assert!((0..10).all(|_| goes_on(failures.add(start + LIMIT * 3, LIMIT, NOTICED))));
        assert!(goes_on(failures.add(start + LIMIT * 1000, Duration::MAX, NOTICED)), "never is never");
    }

    #[test]
    fn what_takes_long_to_notice_is_no_pause() {
        let (start, slow) = (Instant::now(), Duration::from_secs(56));
        let mut failures = Failures::default();
        let next = [0, 56, 112].map(|after| failures.add(start + Duration::from_secs(after), LIMIT, slow));
        assert_eq!(next[2], Next::GiveUp(slow * 2), "{next:?}");
    }

    /// Some were of requests that nobody posted again, and nothing was asked for since.
    #[test]
    fn failures_before_a_pause_do_not_count() {
        let start = Instant::now();
        let mut failures = Failures::default();
        for after in [0, 1, 2, 600, 603, 606, 620] {
            let next = failures.add(start + Duration::from_secs(after), LIMIT, NOTICED);
            assert!(matches!(next, Next::ConnectAfter(_)), "after {after} s: {next:?}");
        }
        assert_eq!(
            failures.add(start + LIMIT * 20, LIMIT, NOTICED),
            Next::ConnectAfter(Duration::ZERO),
            "the first again"
        );
    }
}
