//! Time as a worker sees it: real, or whatever a simulator says.

use std::{rc::Rc, time::Instant};

/// A clock that a worker and its endpoint share.
#[derive(Debug, Clone)]
pub enum Clock {
    /// The machine's monotonic clock.
    Monotonic(Instant),
    /// Nanoseconds that somebody else sets: virtual time.
    Virtual(Rc<std::cell::Cell<u64>>),
}

impl Clock {
    /// The machine's clock, counted from now.
    pub fn monotonic() -> Self {
        Self::Monotonic(Instant::now())
    }

    /// Moves virtual time on to `ns`, if it is not there yet. The machine's clock goes by itself.
    pub fn skip_to(&self, ns: u64) {
        if let Self::Virtual(now) = self {
            now.set(now.get().max(ns));
        }
    }

    /// Nanoseconds since the clock's start. Reading the machine's clock takes tens of nanoseconds: not for hot paths.
    pub fn now_ns(&self) -> u64 {
        match self {
            Self::Monotonic(start) => start.elapsed().as_nanos() as u64,
            Self::Virtual(now) => now.get(),
        }
    }
}
