//! What a worker counts. Plain cells: a worker is one thread.

use std::cell::Cell;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since a worker's start, or the difference of two such.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl std::ops::Sub for Counters {
            type Output = Self;

            fn sub(self, earlier: Self) -> Self {
                Self { $($name: self.$name - earlier.$name,)* }
            }
        }

        impl std::ops::AddAssign for Counters {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
            }
        }

        impl Counters {
            /// Names and values, in a fixed order.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
        }

        #[derive(Debug, Default)]
        pub(crate) struct CounterCells {
            $(pub(crate) $name: Cell<u64>,)*
        }

        impl CounterCells {
            pub(crate) fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* }
            }
        }
    };
}

counters! {
    /// Remote READs posted.
    reads,
    /// Remote WRITEs posted.
    writes,
    /// Remote compare-and-swaps and fetch-and-adds posted.
    atomics,
    /// Two-sided messages sent, whatever verbs carried them.
    two_sided,
    /// Payload bytes of all of these, both ways; an atomic counts 8.
    bytes,
    /// Times that an operation waited for the fabric: requests awaited together count once.
    round_trips,
    /// Attempts of operations that lost a race and began anew. One that has made room first is none.
    restarts,
    /// Lock requests and swaps of words that lost: the page had changed, or was locked; the word was another one.
    lock_conflicts,
    /// Changes that waited because another change of the same compute server held the page.
    local_waits,
    /// Reads that found a page locked and came again.
    locked_reads,
    /// Reads whose proof of wholeness failed: copies refused as torn.
    torn_reads,
    /// Reads of a page that a link promised and that is something else by now.
    stale_pages,
    /// Pages split.
    splits,
    /// Pages merged with a neighbour, or evened out with it.
    merges,
    /// Chains of records in place of which a base page was made.
    consolidations,
}

pub(crate) fn bump(cell: &Cell<u64>) {
    add(cell, 1);
}

pub(crate) fn add(cell: &Cell<u64>, amount: u64) {
    cell.set(cell.get() + amount);
}
