//! What a worker counts. Plain cells: a worker is one thread.

use std::{
    cell::{Cell, RefCell},
    fmt,
};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts since a worker's start, or the difference of two such.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
            /// What structures count under names of their own.
            pub named: Named,
        }

        impl std::ops::Sub for Counters {
            type Output = Self;

            fn sub(self, earlier: Self) -> Self {
                Self { $($name: self.$name - earlier.$name,)* named: self.named - earlier.named }
            }
        }

        impl std::ops::AddAssign for Counters {
            fn add_assign(&mut self, other: Self) {
                $(self.$name += other.$name;)*
                self.named += other.named;
            }
        }

        /// The names of what every worker counts.
        const OWN: &[&str] = &[$(stringify!($name)),*];

        impl Counters {
            /// Names and values, in a fixed order; what structures have named themselves comes last.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter().chain(self.named.iter())
            }
        }

        #[derive(Debug, Default)]
        pub(crate) struct CounterCells {
            $(pub(crate) $name: Cell<u64>,)*
            pub(crate) named: RefCell<Named>,
        }

        impl CounterCells {
            pub(crate) fn snapshot(&self) -> Counters {
                Counters { $($name: self.$name.get(),)* named: *self.named.borrow() }
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
}

/// So many names can be told apart.
const NAMES: usize = 16;
/// What is counted under the names beyond those.
const OTHERS: &str = "others";

/// Counts under names that structures give them ([`Handle::count`](crate::worker::Handle::count)): of 16 names by each worker. What comes
/// later, or has a name that the runtime uses itself, is counted together, as `others`.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Named {
    counts: [(&'static str, u64); NAMES],
    others: u64,
}

impl Named {
    /// What was counted under a name; 0 if nothing was.
    pub fn get(&self, name: &str) -> u64 {
        self.iter().find(|(known, _)| *known == name).map_or(0, |(_, count)| count)
    }

    /// Names and what was counted under them, in the order in which they were met.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let others = (self.others > 0).then_some((OTHERS, self.others));
        self.counts.into_iter().take_while(|(name, _)| !name.is_empty()).chain(others)
    }

    pub(crate) fn add(&mut self, name: &'static str, amount: u64) {
        let place = self.counts.iter_mut().find(|(known, _)| *known == name || known.is_empty());
        match place.filter(|_| !name.is_empty() && !is_taken(name)) {
            Some(place) => *place = (name, place.1 + amount),
            None => self.others += amount,
        }
    }
}

/// Whether that is what the runtime itself counts.
fn is_taken(name: &str) -> bool {
    name == OTHERS || OWN.contains(&name)
}

impl std::ops::Sub for Named {
    type Output = Self;

    fn sub(mut self, earlier: Self) -> Self {
        self.counts.iter_mut().for_each(|(name, count)| *count -= earlier.get(name));
        self.others -= earlier.others;
        self
    }
}

impl std::ops::AddAssign for Named {
    fn add_assign(&mut self, other: Self) {
        other.iter().for_each(|(name, count)| self.add(name, count));
    }
}

impl fmt::Debug for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

pub(crate) fn bump(cell: &Cell<u64>) {
    add(cell, 1);
}

pub(crate) fn add(cell: &Cell<u64>, amount: u64) {
    cell.set(cell.get() + amount);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart_up_to_a_limit_and_differences_are_by_name() {
        let names: Vec<&'static str> =
            (0..NAMES + 2).map(|number| &*Box::leak(format!("name {number}").into_boxed_str())).collect();
        let (mut one, mut other) = (Named::default(), Named::default());
        names.iter().rev().for_each(|name| other.add(name, 1));
        for (number, name) in (1..).zip(&names[..3]) {
            one.add(name, number);
        }
        let before = one;
        one.add(names[1], 5);
        assert_eq!((one - before).iter().collect::<Vec<_>>(), [(names[0], 0), (names[1], 5), (names[2], 0)]);
        assert_eq!(one.get("name 1"), 7);
        assert_eq!((other.get(names[0]), other.get(OTHERS), other.get(names[9])), (0, 2, 1));
        other.add("reads", 1);
        other += one;
        let sum = |named: &Named| named.iter().map(|(_, count)| count).sum::<u64>();
        assert_eq!((sum(&other), other.get(OTHERS)), (18 + 1 + 11, 2 + 1 + 1 + 7));
    }
}
