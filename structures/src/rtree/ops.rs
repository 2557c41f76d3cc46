//! The operations, as values that can be sent.

use farlink_runtime::{
    access::{Access, Interrupt, Merge, Operation, Operations, Start},
    wire::{DecodeError, Wire},
};

use super::{
    Tree, change,
    rect::{Entry, Query, Rect, Scope},
    search::{self, Search},
};

/// Entries that one answer from afar holds at most.
pub const ANSWER_ENTRIES_MAX: u64 = 16 << 10;

/// Names all operations of an R-tree.
pub(super) fn operations<const D: usize>(to: &mut impl Operations<Tree<D>>) {
    to.add::<Insert<D>>().add::<Delete<D>>().add::<Update<D>>().add::<Find<D>>().add::<Count<D>>();
}

macro_rules! wire {
    ($($name:ident { $($field:ident),* })+) => {$(
        impl<const D: usize> Wire for $name<D> {
            fn encode(&self, to: &mut Vec<u64>) {
                $(self.$field.encode(to);)*
            }

            fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
                Ok(Self { $($field: Wire::decode(from)?),* })
            }
        }
    )+};
}

wire! {
    Insert { rect, payload }
    Delete { rect, payload }
    Update { rect, payload, to }
    Find { query, limit, after, stamp }
    Found { query, entries, has_rest }
    Count { query, stamp }
}

/// Adds an entry.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Insert<const D: usize> {
    /// Its rectangle.
    pub rect: Rect<D>,
    /// Its payload.
    pub payload: u64,
}

/// Removes an entry; whether it was there. Of several equal ones it removes one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Delete<const D: usize> {
    /// Its rectangle.
    pub rect: Rect<D>,
    /// Its payload.
    pub payload: u64,
}

/// Moves an entry to another rectangle; whether it was there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update<const D: usize> {
    /// Its rectangle.
    pub rect: Rect<D>,
    /// Its payload.
    pub payload: u64,
    /// Its rectangle from now on.
    pub to: Rect<D>,
}

/// Entries that are asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Find<const D: usize> {
    /// What is asked for.
    pub query: Query<D>,
    /// How many entries to return at most, the first in the query's order; more only if they equal the last one.
    pub limit: u64,
    /// Only entries behind this one, in the query's order.
    pub after: Option<Entry<D>>,
    /// The stamp of the page where it begins, if that is not the root; else 0.
    pub stamp: u64,
}

/// What was found.
#[derive(Debug, Clone, PartialEq)]
pub struct Found<const D: usize> {
    /// What was asked for.
    pub query: Query<D>,
    /// The entries: if there is a rest, in the query's order, else in none.
    pub entries: Vec<Entry<D>>,
    /// Whether there may be more behind the last one.
    pub has_rest: bool,
}

/// How many entries are asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Count<const D: usize> {
    /// What is asked for.
    pub query: Query<D>,
    /// As `Find::stamp`.
    pub stamp: u64,
}

/// What is known of both: the entries up to where the first of them ends.
impl<const D: usize> Merge for Found<D> {
    fn merge(&mut self, other: Self) {
        let query = self.query;
        let ends = [&*self, &other].map(|part| part.entries.last().copied().filter(|_| part.has_rest));
        let end = ends.into_iter().flatten().min_by(|a, b| query.compare(a, b));
        self.entries.extend(other.entries);
        self.has_rest |= other.has_rest;
        if let Some(end) = end {
            self.entries.retain(|entry| query.compare(entry, &end).is_le());
            self.entries.sort_unstable_by(|a, b| query.compare(a, b));
        }
    }
}

impl<const D: usize> Search<D> for Find<D> {
    const WANTS_ENTRIES: bool = true;

    fn find(&self) -> Find<D> {
        *self
    }

    fn below(&self, stamp: u64) -> Self {
        Self { stamp, ..*self }
    }

    fn split(part: Found<D>) -> (u64, Option<Found<D>>) {
        (part.entries.len() as u64, Some(part))
    }

    fn answer(_count: u64, found: Found<D>) -> Found<D> {
        found
    }
}

impl<const D: usize> Search<D> for Count<D> {
    const WANTS_ENTRIES: bool = false;

    fn find(&self) -> Find<D> {
        Find { query: self.query, limit: u64::MAX, after: None, stamp: self.stamp }
    }

    fn below(&self, stamp: u64) -> Self {
        Self { stamp, ..*self }
    }

    fn split(part: u64) -> (u64, Option<Found<D>>) {
        (part, None)
    }

    fn answer(count: u64, _found: Found<D>) -> u64 {
        count
    }
}

macro_rules! operations {
    ($($name:ident, $label:literal, reads only: $reads_only:literal, $scope:expr, $run:path, $output:ty $(, $limited:ident)?;)+) => {$(
        impl<const D: usize> Operation for $name<D> {
            type Output = $output;
            type Plugin = Tree<D>;
            const NAME: &'static str = $label;
            const READS_ONLY: bool = $reads_only;

            fn scope(&self) -> Scope<D> {
                let scope: fn(&Self) -> (Rect<D>, Option<u64>) = $scope;
                let (rect, payload) = scope(self);
                Scope { rect, payload }
            }

            $(fn limit(&mut self) {
                self.$limited = self.$limited.min(ANSWER_ENTRIES_MAX);
            })?

            async fn run<A: Access<Plugin = Tree<D>>>(&self, access: &A, from: Start) -> Result<$output, Interrupt> {
                $run(access, from, self).await
            }
        }
    )+};
}

operations! {
    Insert, "insert", reads only: false, |insert| (insert.rect, Some(insert.payload)), change::insert, ();
    Delete, "delete", reads only: false, |delete| (delete.rect, Some(delete.payload)), change::delete, bool;
    Update, "update", reads only: false, |update| (update.rect.union(&update.to), Some(update.payload)), change::update, bool;
    Find, "find", reads only: true, |find| (find.query.region(), None), search::run, Found<D>, limit;
    Count, "count", reads only: true, |count| (count.query.region(), None), search::run, u64;
}
