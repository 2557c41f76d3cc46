//! The operations, as values that can be sent.

use farlink_runtime::{
    access::{Access, Interrupt, Merge, Operation, Operations, Start},
    wire::{DecodeError, Wire},
};

use super::{
    Tree, change,
    node::Item,
    rect::{Entry, Query, Rect},
    search::{self, Search, WINDOW},
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
    fn query(&self) -> &Query<D> {
        &self.query
    }

    fn stamp(&self) -> u64 {
        self.stamp
    }

    fn below(&self, stamp: u64) -> Self {
        Self { stamp, ..*self }
    }

    fn is_left(&self, item: &Item<D>, level: u8) -> bool {
        self.after.as_ref().is_none_or(|after| match level {
            0 => self.query.compare(&(item.rect, item.word), after).is_gt(),
            _ => self.query.goes_beyond(&item.rect, after),
        })
    }

    fn answer(&self, items: Vec<Item<D>>) -> Found<D> {
        let entries = items.into_iter().map(|item| (item.rect, item.word)).collect();
        Found { query: self.query, entries, has_rest: false }
    }

    /// The order of the last entry that can be among the answer, once there are enough.
    fn bound(&self, found: &[(usize, Found<D>)]) -> f64 {
        let Some(limit) = usize::try_from(self.limit).ok().filter(|&limit| limit > 0 && limit < usize::MAX) else {
            return f64::INFINITY;
        };
        if found.iter().map(|(_, part)| part.entries.len()).sum::<usize>() < limit {
            return f64::INFINITY;
        }
        let entries = found.iter().flat_map(|(_, part)| &part.entries);
        let mut orders: Vec<f64> = entries.map(|entry| self.query.order(&entry.0)).collect();
        *orders.select_nth_unstable_by(limit - 1, f64::total_cmp).1
    }

    /// The nearest are found one page after another; many at a time, if many are asked for.
    fn window(&self) -> usize {
        match self.query {
            Query::Nearest(_) => usize::try_from(self.limit / 64).map_or(WINDOW, |more| (1 + more).min(WINDOW)),
            _ => WINDOW,
        }
    }

    fn finish(&self, found: Vec<Found<D>>, is_all: bool) -> Found<D> {
        let compare = |a: &Entry<D>, b: &Entry<D>| self.query.compare(a, b);
        let ends = found.iter().filter(|part| part.has_rest).filter_map(|part| part.entries.last().copied());
        let end = ends.min_by(compare);
        let mut entries: Vec<Entry<D>> = found.into_iter().flat_map(|part| part.entries).collect();
        entries.retain(|entry| end.as_ref().is_none_or(|end| compare(entry, end).is_le()));
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX).max(1);
        let mut has_rest = end.is_some() || !is_all;
        if has_rest || entries.len() > limit {
            entries.sort_unstable_by(compare);
            // Equal ones stay together: the next part begins behind all of them.
            let last = entries.get(limit - 1).copied();
            let kept = last.map_or(entries.len(), |last| entries.partition_point(|it| compare(it, &last).is_le()));
            has_rest |= kept < entries.len();
            entries.truncate(kept);
        }
        Found { query: self.query, entries, has_rest }
    }
}

impl<const D: usize> Search<D> for Count<D> {
    fn query(&self) -> &Query<D> {
        &self.query
    }

    fn stamp(&self) -> u64 {
        self.stamp
    }

    fn below(&self, stamp: u64) -> Self {
        Self { stamp, ..*self }
    }

    fn answer(&self, items: Vec<Item<D>>) -> u64 {
        items.len() as u64
    }

    fn finish(&self, found: Vec<u64>, _is_all: bool) -> u64 {
        found.into_iter().fold(0, u64::wrapping_add)
    }
}

macro_rules! operations {
    ($($name:ident, $label:literal, reads only: $reads_only:literal, $scope:expr, $run:path, $output:ty $(, $limited:ident)?;)+) => {$(
        impl<const D: usize> Operation for $name<D> {
            type Output = $output;
            type Plugin = Tree<D>;
            const NAME: &'static str = $label;
            const READS_ONLY: bool = $reads_only;

            fn scope(&self) -> Rect<D> {
                let scope: fn(&Self) -> Rect<D> = $scope;
                scope(self)
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
    Insert, "insert", reads only: false, |insert| insert.rect, change::insert, ();
    Delete, "delete", reads only: false, |delete| delete.rect, change::delete, bool;
    Update, "update", reads only: false, |update| update.rect.union(&update.to), change::update, bool;
    Find, "find", reads only: true, |find| find.query.region(), search::run, Found<D>, limit;
    Count, "count", reads only: true, |count| count.query.region(), search::run, u64;
}
