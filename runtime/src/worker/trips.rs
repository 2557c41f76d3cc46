//! Round trips as the clock sees them: how often a task waits for the fabric, however many requests are on their way at a time.
//!
//! Each task has a *depth*: the length of the longest chain of requests of which each was posted after the one before had
//! completed. A request that is posted at depth d, once it is complete, makes the depth d + 1 at least. A trip is counted where
//! the depth is about to grow, so requests that overlap count once. A task that another one waits for has begun at the other's
//! depth, and hands its own on.

use std::{cell::Cell, rc::Rc};

/// How far a task is.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Trips {
    depth: u64,
    /// The depth that the trips counted so far lead to.
    counted: u64,
}

/// The trips of the task that is being polled.
#[derive(Debug, Clone, Default)]
pub(super) struct Current(Rc<Cell<Trips>>);

impl Current {
    pub(super) fn get(&self) -> Trips {
        self.0.get()
    }

    pub(super) fn replace(&self, trips: Trips) -> Trips {
        self.0.replace(trips)
    }

    /// Where a request that is posted now stands.
    #[inline]
    pub(super) fn depth(&self) -> u64 {
        self.0.get().depth
    }

    /// Whether what is posted now is a trip that is not counted yet.
    #[inline]
    pub(super) fn begins(&self) -> bool {
        let Trips { depth, counted } = self.0.get();
        let counted_then = counted.max(depth + 1);
        self.0.set(Trips { depth, counted: counted_then });
        counted_then != counted
    }

    /// A request that was posted at this depth is complete.
    #[inline]
    pub(super) fn ends(&self, posted_at: u64) {
        let trips = self.0.get();
        self.0.set(Trips { depth: trips.depth.max(posted_at + 1), ..trips });
    }

    /// Another task that was waited for has ended.
    pub(super) fn join(&self, other: Trips) {
        let Trips { depth, counted } = self.0.get();
        self.0.set(Trips { depth: depth.max(other.depth), counted: counted.max(other.counted) });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn count(chains: usize, completions: &[usize]) -> usize {
        count_from(0, chains, completions)
    }

    /// Chains of requests that overlap, given the order of their completions by chain; how many trips are counted behind so many.
    fn count_from(depth: u64, chains: usize, completions: &[usize]) -> usize {
        let current = Current::default();
        current.replace(Trips { depth, counted: depth });
        let mut posted = vec![0; chains];
        let mut counted = 0;
        for posted in &mut posted {
            counted += usize::from(current.begins());
            *posted = current.depth();
        }
        for &chain in completions {
            current.ends(posted[chain]);
            counted += usize::from(current.begins());
            posted[chain] = current.depth();
        }
        counted
    }

    #[test]
    fn what_overlaps_is_one_trip_and_what_follows_is_another() {
        assert_eq!(count(1, &[]), 1);
        assert_eq!(count(8, &[]), 1);
        assert_eq!(count(1, &[0, 0, 0]), 4);
        assert_eq!(count(3, &[0, 1, 2]), 2);
        assert_eq!(count(3, &[2, 1, 0, 0, 1, 2]), 3);
    }

    /// A worker makes millions a second, and lives for hours.
    #[test]
    fn trips_are_counted_behind_billions() {
        assert_eq!(count_from(u32::MAX.into(), 1, &[0, 0, 0, 0, 0]), 6);
    }
}
