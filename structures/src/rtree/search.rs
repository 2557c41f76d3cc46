//! Searches: from the root down all children that can have what is asked for, with a window of reads in flight over all pending
//! pages of all levels. Where not all of the answer is wanted the first in the query's order go first, else any.
//!
//! Each page says its stamp, and the entry that leads to it which stamp it should have. So a search that comes to a page
//! which was split since knows it, and goes on to the right until it meets that stamp: these pages together hold what the one
//! held. Where the chain does not lead there, entries have moved to pages beside. Then all that was found below the page above
//! is dropped, and that page is read once more.

use std::{cmp::Reverse, collections::BinaryHeap, rc::Rc};

use farlink_runtime::access::{Access, Cause, Forked, Hint, Interrupt, Operation, PageRef, Start, UnderWay};
use futures_util::FutureExt;
use smallvec::SmallVec;

use super::{
    Tree,
    node::{self, Node, require_page},
    ops::{Find, Found},
    rect::{Entry, Query},
    visits::{Pending, Visits},
};

/// Steps to the right before a page counts as not to be found.
const STEPS_MAX: u8 = 16;
/// How often a page is read again below which entries have moved, before the search begins anew.
const REREADS_MAX: u8 = 4;

/// A search, as it is for all of them.
pub(super) trait Search<const D: usize>: Operation<Plugin = Tree<D>> {
    /// Whether entries are wanted, and not just their number.
    const WANTS_ENTRIES: bool;
    /// What is asked for.
    fn find(&self) -> Find<D>;
    /// The same below the page with this stamp.
    fn below(&self, stamp: u64) -> Self;
    /// How many entries a part has found, and which, if they are wanted.
    fn split(part: Self::Output) -> (u64, Option<Found<D>>);
    /// The answer.
    fn answer(count: u64, found: Found<D>) -> Self::Output;
}

struct Attempt<'a, A: Access<Plugin = Tree<D>>, const D: usize> {
    access: &'a A,
    find: Find<D>,
    rereads_max: u8,
    /// Entries that are wanted; if not all, the first in the query's order.
    limit: usize,
    /// In the query's order, if one is asked for.
    ordered: BinaryHeap<Pending>,
    /// Those that came to be known behind all that is wanted. If some of that is dropped, they are wanted after all.
    beyond: Vec<Pending>,
    unordered: SmallVec<[Pending; 24]>,
    visits: Visits<A::Page<'a>>,
    entries: Vec<Entry<D>>,
    /// How many entries were found at a time below which page, in the order of `entries`.
    parts: SmallVec<[(u32, u64); 8]>,
    /// The last entries of parts found elsewhere that have a rest.
    ends: Vec<(u32, Entry<D>)>,
    /// The places in the order of the first entries found, as many as are wanted.
    first: BinaryHeap<i64>,
}

async fn read<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    access: &'a A,
    search: &'a S,
    from: Rc<A::Page<'a>>,
    next: Pending,
) -> (Pending, Result<Forked<A::Page<'a>, S::Output>, Interrupt>) {
    let read = match next.steps {
        0 => access.fork_one(&from, next.link(), &search.below(next.stamp)).await,
        _ => access.follow(&from, next.link(), Hint::MOVED).await.map(Forked::Page),
    };
    (next, read)
}

pub(super) async fn run<A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    access: &A,
    from: Start,
    search: &S,
) -> Result<S::Output, Interrupt> {
    let page = access.open(from).await?;
    // Where a page may be an old copy, the same one would come again: the next attempt gets another.
    let rereads_max = if A::VALIDATES && from != Start::Anew { 0 } else { REREADS_MAX };
    match begin(access, search, page, rereads_max)? {
        Begun::Done(output) => Ok(output),
        Begun::Waits(attempt, next) => go_on(search, attempt, next).await,
    }
}

/// How far a search has come with pages at hand alone.
enum Begun<'a, A: Access<Plugin = Tree<D>>, T, const D: usize> {
    Done(T),
    /// For this page.
    Waits(Box<Attempt<'a, A, D>>, Option<Pending>),
}

/// No future: what is here is kept in registers, and on the stack.
fn begin<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    access: &'a A,
    search: &S,
    page: A::Page<'a>,
    rereads_max: u8,
) -> Result<Begun<'a, A, S::Output, D>, Interrupt> {
    let mut attempt = Attempt::new(access, search.find(), rereads_max);
    attempt.enter::<S>(page, None)?;
    let mut ahead = None;
    loop {
        let (by, page) = match ahead.take() {
            Some(next) => next,
            None => match attempt.next().map(|next| (next, attempt.try_follow(&next))) {
                None => break,
                Some((next, Some(page))) => (next, page),
                Some((next, None)) => return Ok(Begun::Waits(Box::new(attempt), Some(next))),
            },
        };
        // While one page is looked at, the processor fetches the next one.
        let next = if attempt.is_ordered() { None } else { attempt.next() };
        ahead = next.and_then(|next| Some((next, attempt.try_follow(&next)?)));
        attempt.go_to::<S>(page, by)?;
        if ahead.is_none() && next.is_some() {
            return Ok(Begun::Waits(Box::new(attempt), next));
        }
    }
    match attempt.validate().now_or_never() {
        Some(validated) => validated.map(|()| Begun::Done(attempt.finish::<S>())),
        None => Ok(Begun::Waits(Box::new(attempt), None)),
    }
}

async fn go_on<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    search: &'a S,
    mut attempt: Box<Attempt<'a, A, D>>,
    mut next: Option<Pending>,
) -> Result<S::Output, Interrupt> {
    let (access, window) = (attempt.access, attempt.window());
    let mut reading = UnderWay::new(&access.context().worker);
    loop {
        while reading.len() < window {
            let Some(next) = next.take().or_else(|| attempt.next()) else { break };
            match attempt.try_follow(&next) {
                Some(page) => attempt.arrive::<S>(next, Ok(Forked::Page(page)))?,
                None => reading.push(read(access, search, attempt.visits.share(next.from), next)),
            }
        }
        let Some((next, read)) = reading.next().await else { break };
        attempt.arrive::<S>(next, read)?;
    }
    attempt.validate().await?;
    Ok(attempt.finish::<S>())
}

impl<'a, A: Access<Plugin = Tree<D>>, const D: usize> Attempt<'a, A, D> {
    // As large as it is, it is made where it stays.
    #[inline(always)]
    fn new(access: &'a A, find: Find<D>, rereads_max: u8) -> Self {
        Self {
            access,
            find,
            rereads_max,
            limit: usize::try_from(find.limit).unwrap_or(usize::MAX).max(1),
            ordered: BinaryHeap::new(),
            beyond: Vec::new(),
            unordered: SmallVec::new(),
            visits: Visits::new(),
            entries: Vec::new(),
            parts: SmallVec::new(),
            ends: Vec::new(),
            first: BinaryHeap::new(),
        }
    }

    /// The page, if it is at hand.
    #[inline(always)]
    fn try_follow(&self, next: &Pending) -> Option<A::Page<'a>> {
        let from = self.visits.page(next.from);
        let first = node::coordinates::<D>(&self.access.context().structure, from.level());
        if next.steps == 0 { self.access.try_follow(from, next.link(), Hint::DOWN.reading(first)) } else { None }
    }

    async fn validate(&self) -> Result<(), Interrupt> {
        if A::VALIDATES { self.access.validate(&self.visits.relied_on()).await } else { Ok(()) }
    }

    /// How many pages are on their way at a time. The nearest are found one page after another; many at a time, if many are
    /// asked for.
    fn window(&self) -> usize {
        let max = self.access.context().worker.window();
        match self.find.query {
            Query::Nearest(_) => (1 + self.limit / 64).min(max),
            _ => max,
        }
    }

    fn is_ordered(&self) -> bool {
        self.limit < usize::MAX
    }

    /// Where the last entry can be in the order that is among the answer.
    fn bound(&self) -> i64 {
        self.first.peek().filter(|_| self.first.len() >= self.limit).map_or(i64::MAX, |&last| last)
    }

    /// The next page to read, if one is needed.
    #[inline]
    fn next(&mut self) -> Option<Pending> {
        loop {
            let next = match self.unordered.pop() {
                Some(next) => next,
                None if self.ordered.peek()?.order.0 > self.bound() => return None,
                None => self.ordered.pop()?,
            };
            if !self.visits.is_dropped(next.above) {
                return Some(next);
            }
            self.close(&next);
        }
    }

    /// A page that was pending leads to nothing more. What is validated in the end is held until then.
    #[inline]
    fn close(&mut self, done: &Pending) {
        if !A::VALIDATES {
            self.visits.close_one(done.from);
        }
    }

    /// Takes in what has come of a read.
    fn arrive<S: Search<D>>(
        &mut self,
        next: Pending,
        read: Result<Forked<A::Page<'a>, S::Output>, Interrupt>,
    ) -> Result<(), Interrupt> {
        let from = self.entries.len();
        match read {
            Ok(Forked::Page(page)) => return self.go_to::<S>(page, next),
            _ if self.visits.is_dropped(next.above) => {}
            Ok(Forked::Done(part)) => {
                let (count, found) = S::split(part);
                if let Some(Found { entries, has_rest, .. }) = found {
                    self.ends.extend(entries.last().filter(|_| has_rest).map(|&last| (next.above, last)));
                    self.entries.extend(entries);
                }
                self.add(next.above, from, count);
            }
            Err(interrupt) => self.reread::<S>(next.above, interrupt)?,
        }
        self.close(&next);
        Ok(())
    }

    /// Looks at a page that was pending.
    #[inline]
    fn go_to<S: Search<D>>(&mut self, page: A::Page<'a>, next: Pending) -> Result<(), Interrupt> {
        if !self.visits.is_dropped(next.above) {
            let (from, pending) = (self.entries.len(), self.unordered.len());
            match self.enter::<S>(page, Some(next)) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(interrupt) => {
                    self.entries.truncate(from);
                    self.unordered.truncate(pending);
                    self.reread::<S>(next.above, interrupt)?;
                }
            }
        }
        self.close(&next);
        Ok(())
    }

    /// Counts what was found below a page: the entries from a place on.
    fn add(&mut self, above: u32, from: usize, count: u64) {
        self.parts.push((above, count));
        for (rect, _) in self.entries[from..].iter().filter(|_| self.limit < usize::MAX) {
            let order = self.find.query.order(rect);
            if self.first.len() < self.limit {
                self.first.push(order);
            } else if let Some(mut last) = self.first.peek_mut().filter(|last| order < **last) {
                *last = order;
            }
        }
    }

    /// Looks at a page: the one where the search begins if nothing led to it. Whether something is pending that it leads to.
    fn enter<S: Search<D>>(&mut self, page: A::Page<'a>, by: Option<Pending>) -> Result<bool, Interrupt> {
        require_page(self.access, &page)?;
        let (is_ordered, visit, rereads) =
            (self.is_ordered(), self.visits.next_number(), by.map_or(0, |by| by.rereads));
        let (from, pending) = (self.entries.len(), self.unordered.len());
        let Self { find: Find { query, after, .. }, entries, unordered, .. } = self;
        let mut count = 0;
        let (level, stamp, right) = page.read(|words| {
            let node = Node::<_, D>::of(words);
            match node.level {
                0 => node.find(query, |index, rect| {
                    let entry = (rect, node.word(index));
                    if after.as_ref().is_none_or(|after| query.compare(&entry, after).is_gt()) {
                        count += 1;
                        if S::WANTS_ENTRIES {
                            entries.push(entry);
                        }
                    }
                }),
                _ => node.find(query, |index, rect| {
                    if after.as_ref().is_none_or(|after| query.goes_beyond(&rect, after)) {
                        let order = if is_ordered { query.order(&rect) } else { 0 };
                        let (word, stamp) = (node.word(index), node.stamp_of(index));
                        unordered.push(Pending {
                            order: Reverse(order),
                            word,
                            stamp,
                            from: visit,
                            above: visit,
                            steps: 0,
                            rereads,
                        });
                    }
                }),
            }
            (node.level, node.stamp(), node.right())
        })?;
        let wanted = match &by {
            None => Some(page.level()),
            Some(by) => self.visits.page(by.from).level().checked_sub(u8::from(by.steps == 0)),
        };
        if level != page.level() || Some(level) != wanted {
            return Err(Interrupt::stale(page.at(), "it is of another level"));
        }
        let is_as_promised = stamp == by.map_or(self.find.stamp, |by| by.stamp);
        let leads_on = by.filter(|_| !is_as_promised);
        if by.is_none() && !is_as_promised && self.find.stamp != 0 {
            return Err(Interrupt::stale(page.at(), "it is not the page where a search was to begin"));
        }
        if let Some(by) = leads_on {
            if right.is_null() || by.steps == STEPS_MAX {
                return Err(Interrupt::stale(page.at(), "its entries have moved to pages beside it"));
            }
            self.unordered.push(Pending { from: visit, word: right.word(), steps: by.steps + 1, ..by });
        }
        let open = self.unordered.len() - pending;
        if is_ordered {
            let bound = self.bound();
            for next in self.unordered.drain(pending..) {
                if next.order.0 > bound { self.beyond.push(next) } else { self.ordered.push(next) }
            }
        }
        if level > 0 && (open > 0 || A::VALIDATES) || leads_on.is_some() || by.is_none() {
            self.visits.add(page, by, leads_on.is_some(), open)?;
        }
        if level == 0 {
            self.add(by.map_or(visit, |by| by.above), from, count);
        }
        Ok(open > 0)
    }

    /// If the page above has changed, has it read again, and drops what was found below it.
    #[cold]
    #[inline(never)]
    fn reread<S: Search<D>>(&mut self, visit: u32, why: Interrupt) -> Result<(), Interrupt> {
        let Interrupt::Restart(Cause::Stale { .. } | Cause::Conflict) = why else { return Err(why) };
        let Some(again) = self.visits.read_again(visit, self.rereads_max) else { return Err(why) };
        match self.is_ordered() {
            true => self.ordered.push(again),
            false => self.unordered.push(again),
        }
        let mut entries = std::mem::take(&mut self.entries).into_iter();
        let (parts, ends) = (std::mem::take(&mut self.parts), std::mem::take(&mut self.ends));
        self.first.clear();
        self.ordered.extend(self.beyond.drain(..));
        for (above, count) in parts {
            let from = self.entries.len();
            let part = entries.by_ref().take(if S::WANTS_ENTRIES { count as usize } else { 0 });
            if self.visits.is_dropped(above) {
                part.for_each(drop);
            } else {
                self.entries.extend(part);
                self.add(above, from, count);
            }
        }
        self.ends = ends.into_iter().filter(|&(above, _)| !self.visits.is_dropped(above)).collect();
        Ok(())
    }

    fn finish<S: Search<D>>(&mut self) -> S::Output {
        let (bound, Find { query, .. }) = (self.bound(), self.find);
        let compare = |a: &Entry<D>, b: &Entry<D>| query.compare(a, b);
        let count = self.parts.iter().fold(0, |sum: u64, &(_, count)| sum.wrapping_add(count));
        let (mut entries, limit) = (std::mem::take(&mut self.entries), self.limit);
        let mut has_rest = !(self.ends.is_empty() && self.ordered.is_empty() && self.beyond.is_empty());
        if has_rest || entries.len() > limit {
            let found = entries.len();
            let end = self.ends.iter().map(|(_, end)| *end).min_by(compare);
            entries
                .retain(|entry| query.order(&entry.0) <= bound && end.is_none_or(|end| compare(entry, &end).is_le()));
            entries.sort_unstable_by(compare);
            // Equal ones stay together: the next part begins behind all of them.
            let last = entries.get(limit - 1).copied();
            let kept = last.map_or(entries.len(), |last| entries.partition_point(|it| compare(it, &last).is_le()));
            entries.truncate(kept);
            has_rest |= kept < found;
        }
        S::answer(count, Found { query, entries, has_rest })
    }
}
