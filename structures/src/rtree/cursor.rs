//! What a search returns, in parts; and the join of two searches.

use std::{collections::VecDeque, fmt};

use farlink_runtime::{error::Error, operation::Run};

use super::{
    RTree, Tree,
    ops::{ANSWER_ENTRIES_MAX, Find},
    rect::{Entry, Query, Rect},
};

/// Entries of the first part; each further part has twice as many.
const FIRST_PART: u64 = 64;
/// The same if the nearest are asked for.
const FIRST_NEAREST: u64 = 8;

/// Entries in the order of a query: windows by their first coordinate, the nearest by their distance. Each part goes on behind
/// the last entry of the one before, in a search of its own that goes by what lies behind it; changes between two parts may
/// show or not.
#[must_use = "a cursor fetches nothing until it is asked for entries"]
pub struct Cursor<'a, A, const D: usize = 2> {
    access: &'a A,
    next: Option<Find<D>>,
    fetched: VecDeque<Entry<D>>,
}

impl<A, const D: usize> fmt::Debug for Cursor<'_, A, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cursor({} entries fetched, next {:?})", self.fetched.len(), self.next)
    }
}

impl<'a, A: Run<Plugin = Tree<D>>, const D: usize> Cursor<'a, A, D> {
    pub(super) fn new(access: &'a A, query: Query<D>) -> Self {
        let limit = if matches!(query, Query::Nearest(_)) { FIRST_NEAREST } else { FIRST_PART };
        let next = Some(Find { query, limit, after: None, stamp: 0 });
        Self { access, next, fetched: VecDeque::new() }
    }

    /// The next entry, or `None` at the end. Suspends when the entries fetched so far are used up.
    ///
    /// # Errors
    /// If a page on the way is damaged or corrupt, or the fabric fails. The cursor can be asked again: nothing is lost.
    pub async fn next(&mut self) -> Result<Option<Entry<D>>, Error> {
        while self.fetched.is_empty()
            && let Some(find) = self.next
        {
            self.fetch(find, true).await?;
            let more = |find: Find<D>| Find { limit: (find.limit * 2).min(ANSWER_ENTRIES_MAX), ..find };
            self.next = self.next.map(more);
        }
        Ok(self.fetched.pop_front())
    }

    /// The next `limit` entries, or all there are if they are fewer.
    ///
    /// # Errors
    /// As [`Cursor::next`].
    pub async fn take(mut self, limit: usize) -> Result<Vec<Entry<D>>, Error> {
        while self.fetched.len() < limit
            && let Some(find) = self.next
        {
            self.fetch(Find { limit: (limit - self.fetched.len()) as u64, ..find }, true).await?;
        }
        self.fetched.truncate(limit);
        Ok(self.fetched.into())
    }

    /// All that are left, by one search if its answer fits into a message. In no order, if nothing was fetched before.
    ///
    /// # Errors
    /// As [`Cursor::next`].
    pub async fn all(mut self) -> Result<Vec<Entry<D>>, Error> {
        while let Some(find) = self.next {
            self.fetch(Find { limit: u64::MAX, ..find }, find.after.is_some()).await?;
        }
        Ok(self.fetched.into())
    }

    async fn fetch(&mut self, find: Find<D>, in_order: bool) -> Result<(), Error> {
        let found = self.access.execute(&find).await?;
        let mut entries = found.entries;
        // With a rest they are in order already.
        if in_order && !found.has_rest {
            entries.sort_unstable_by(|a, b| find.query.compare(a, b));
        }
        let last = entries.last().copied().filter(|_| found.has_rest);
        self.next = last.map(|last| Find { after: Some(last), ..find });
        match self.fetched.is_empty() {
            true => self.fetched = entries.into(),
            false => self.fetched.extend(entries),
        }
        Ok(())
    }
}

/// One side of a join.
struct Side<'a, A, const D: usize> {
    cursor: Cursor<'a, A, D>,
    /// The entry that comes next.
    next: Option<Entry<D>>,
    /// Entries that begin before those that come, and end behind the next one of the other side.
    open: Vec<Entry<D>>,
}

impl<'a, A: Run<Plugin = Tree<D>>, const D: usize> Side<'a, A, D> {
    fn new(tree: &'a RTree<A, D>) -> Self {
        let cursor = tree.search(Query::Intersects(Rect::EVERYTHING));
        Self { cursor, next: None, open: Vec::new() }
    }

    /// The open entries that intersect one that begins where no earlier one does.
    fn meet(&mut self, rect: &Rect<D>) -> impl Iterator<Item = Entry<D>> {
        self.open.retain(|(open, _)| open.high[0] >= rect.low[0]);
        self.open.iter().filter(move |(open, _)| open.intersects(rect)).copied()
    }

    /// Keeps an entry if it can meet what comes from the other side.
    fn keep(&mut self, entry: Entry<D>, other: Option<&Entry<D>>) {
        if other.is_some_and(|other| other.0.low[0] <= entry.0.high[0]) {
            self.open.push(entry);
        }
    }
}

/// Pairs of intersecting entries of two trees: a sweep over both, by the first coordinate. It returns every pair of entries that
/// were there all the time and none of which one never was, each once.
#[must_use = "a join reads nothing until it is asked for pairs"]
pub struct Join<'a, A, B, const D: usize = 2> {
    left: Side<'a, A, D>,
    right: Side<'a, B, D>,
    has_begun: bool,
    pairs: VecDeque<(Entry<D>, Entry<D>)>,
}

impl<A, B, const D: usize> fmt::Debug for Join<'_, A, B, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Join({:?}, {:?})", self.left.cursor, self.right.cursor)
    }
}

impl<'a, A: Run<Plugin = Tree<D>>, B: Run<Plugin = Tree<D>>, const D: usize> Join<'a, A, B, D> {
    pub(super) fn new(left: &'a RTree<A, D>, right: &'a RTree<B, D>) -> Self {
        Self { left: Side::new(left), right: Side::new(right), has_begun: false, pairs: VecDeque::new() }
    }

    /// The next pair, or `None` at the end.
    ///
    /// # Errors
    /// As [`Cursor::next`].
    pub async fn next(&mut self) -> Result<Option<(Entry<D>, Entry<D>)>, Error> {
        let Self { left, right, has_begun, pairs } = self;
        if !*has_begun {
            // What the one has given is kept, whatever comes of the other.
            if left.next.is_none() {
                left.next = left.cursor.next().await?;
            }
            right.next = right.cursor.next().await?;
            *has_begun = true;
        }
        while pairs.is_empty() {
            let is_left = match (&left.next, &right.next) {
                (None, None) => return Ok(None),
                // What one side has left meets nothing of the other.
                (Some(_), None) if right.open.is_empty() => return Ok(None),
                (None, Some(_)) if left.open.is_empty() => return Ok(None),
                (Some(_), None) => true,
                (None, Some(_)) => false,
                (Some(left), Some(right)) => left.0.low[0] <= right.0.low[0],
            };
            if is_left && let Some(next) = left.next {
                left.next = left.cursor.next().await?;
                pairs.extend(right.meet(&next.0).map(|other| (next, other)));
                left.keep(next, right.next.as_ref());
            } else if let Some(next) = right.next {
                right.next = right.cursor.next().await?;
                pairs.extend(left.meet(&next.0).map(|other| (other, next)));
                right.keep(next, left.next.as_ref());
            }
        }
        Ok(pairs.pop_front())
    }
}
