//! What a long run says while it works, always on standard error: a bar on a terminal, plain lines otherwise, nothing
//! with `--json`.

use std::io::IsTerminal as _;
use std::time::Duration;

use farlink_children::say;
use indicatif::{ProgressBar, ProgressStyle};

use crate::units::show_count;

/// Progress through the steps of a run.
#[derive(Debug)]
pub(crate) enum Progress {
    /// A bar with the step's name.
    Bar(ProgressBar),
    /// A line for whatever begins.
    Lines { done: u64, steps: u64 },
    /// Nothing.
    Silent,
}

impl Progress {
    /// Progress over so many steps, in the form that suits standard error.
    pub(crate) fn new(steps: u64, json: bool) -> Self {
        if json {
            return Self::Silent;
        }
        if !std::io::stderr().is_terminal() {
            return Self::Lines { done: 0, steps };
        }
        let bar = ProgressBar::new(steps);
        if let Ok(style) = ProgressStyle::with_template("{spinner} [{elapsed_precise}] {bar:30} {pos}/{len} {msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(100));
        Self::Bar(bar)
    }

    /// A step begins, or goes on with this.
    pub(crate) fn begin(&mut self, step: &str) {
        match self {
            Self::Bar(bar) => bar.set_message(step.to_owned()),
            Self::Lines { done, steps } => say(format_args!("farlink: step {} of {steps}: {step}", *done + 1)),
            Self::Silent => {}
        }
    }

    /// The step that began last has come so far: shown on a bar, with its rate and the time that is left of it.
    pub(crate) fn advance(&mut self, step: &str, pace: Pace) {
        if let Self::Bar(bar) = self {
            bar.set_message(format!("{step}{}", pace.shown()));
        }
    }

    /// A step from its beginning to its end.
    pub(crate) fn step<R>(&mut self, step: &str, run: impl FnOnce() -> R) -> R {
        self.begin(step);
        let result = run();
        self.finish_step();
        result
    }

    /// The step that began last is done.
    pub(crate) fn finish_step(&mut self) {
        match self {
            Self::Bar(bar) => bar.inc(1),
            Self::Lines { done, .. } => *done += 1,
            Self::Silent => {}
        }
    }

    /// Prints with the bar out of the way.
    pub(crate) fn suspend<R>(&self, print: impl FnOnce() -> R) -> R {
        match self {
            Self::Bar(bar) => bar.suspend(print),
            _ => print(),
        }
    }
}

/// How far a step is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Operations begun.
    pub(crate) ops: u64,
    /// Operations in all, if that is known.
    pub(crate) of: Option<u64>,
    pub(crate) elapsed: Duration,
    /// How long the step takes in all, if that is known.
    pub(crate) lasts: Option<Duration>,
}

impl Pace {
    fn shown(self) -> String {
        let seconds = self.elapsed.as_secs_f64();
        if self.ops == 0 || seconds < 0.1 {
            return String::new();
        }
        let rate = self.ops as f64 / seconds;
        let left = match (self.lasts, self.of) {
            (Some(lasts), _) => Some(lasts.saturating_sub(self.elapsed).as_secs_f64()),
            (None, Some(of)) => Some(of.saturating_sub(self.ops) as f64 / rate),
            (None, None) => None,
        };
        let left = left.map_or_else(String::new, |left| format!(", {left:.0} s left"));
        format!(": {} ops/s{left}", show_count(rate))
    }
}

impl Drop for Progress {
    /// A bar leaves the screen, so that what is printed next, an error perhaps, has the line to itself.
    fn drop(&mut self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_has_a_rate_and_what_is_left() {
        let pace = Pace { ops: 3_000_000, of: None, elapsed: Duration::from_secs(2), lasts: None };
        assert_eq!(pace.shown(), ": 1.50M ops/s");
        assert_eq!(Pace { of: Some(6_000_000), ..pace }.shown(), ": 1.50M ops/s, 2 s left");
        assert_eq!(Pace { lasts: Some(Duration::from_secs(3)), ..pace }.shown(), ": 1.50M ops/s, 1 s left");
        assert_eq!(Pace { ops: 0, ..pace }.shown(), "");
    }
}
