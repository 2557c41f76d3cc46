//! What a long run says while it works, always on standard error: a bar on a terminal, plain lines otherwise, nothing
//! with `--json`.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

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
            Self::Lines { done, steps } => eprintln!("farlink: step {} of {steps}: {step}", *done + 1),
            Self::Silent => {}
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

impl Drop for Progress {
    /// A bar leaves the screen, so that what is printed next, an error perhaps, has the line to itself.
    fn drop(&mut self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
