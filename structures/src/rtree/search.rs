//! Searches: from the root down all children that can have what is asked for, with a window of reads in flight over all pending
//! pages of all levels, the first in the query's order first.
//!
//! Each page says its stamp, and the entry that leads to it which stamp it should have. So a search that comes to a page
//! which was split since knows it, and goes on to the right until it meets that stamp: these pages together hold what the one
//! held. Where the chain does not lead there, entries have moved to pages beside. Then all that was found below the page above
//! is dropped, and that page is read once more.

use std::{cmp::Ordering, collections::BinaryHeap, future::Future, pin::Pin, rc::Rc};

use farlink_runtime::access::{Access, Cause, Forked, Hint, Interrupt, Link, Operation, PageRef, Start};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::{
    Tree,
    node::{Head, Item, Node, require_page},
    rect::Query,
};

/// Pages on their way at a time, at most.
pub(super) const WINDOW: usize = 16;
/// Steps to the right before a page counts as not to be found.
const STEPS_MAX: u8 = 16;
/// How often a page is read again below which entries have moved, before the search begins anew.
const REREADS_MAX: u8 = 4;

/// A search, as it is for all of them.
pub(super) trait Search<const D: usize>: Operation<Plugin = Tree<D>> {
    fn query(&self) -> &Query<D>;
    /// The stamp of the page where it begins, if it is not the root.
    fn stamp(&self) -> u64;
    /// The same below the page with this stamp.
    fn below(&self, stamp: u64) -> Self;
    /// Whether an entry that matches, or one below a child, is asked for.
    fn is_left(&self, _item: &Item<D>, _level: u8) -> bool {
        true
    }
    /// What the entries of a leaf come to.
    fn answer(&self, items: Vec<Item<D>>) -> Self::Output;
    /// Children that come later in the query's order are not needed.
    fn bound(&self, _found: &[(usize, Self::Output)]) -> f64 {
        f64::INFINITY
    }
    /// How many pages are on their way at a time.
    fn window(&self) -> usize {
        WINDOW
    }
    /// The answer; whether all children were looked at.
    fn finish(&self, found: Vec<Self::Output>, is_all: bool) -> Self::Output;
}

/// A page to be read.
struct Pending<P> {
    order: f64,
    from: Rc<P>,
    link: Link,
    /// What was promised.
    stamp: u64,
    /// Steps to the right on the way.
    steps: u8,
    rereads: u8,
    /// The page above that promised it.
    visit: usize,
}

impl<P> PartialEq for Pending<P> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<P> Eq for Pending<P> {}

impl<P> PartialOrd for Pending<P> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The first is the greatest: a heap hands it out.
impl<P> Ord for Pending<P> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.order.total_cmp(&self.order)
    }
}

/// A page above level 0 whose children are looked at, or the page where the search begins.
struct Visit<P> {
    page: Rc<P>,
    /// How it was come by; none where the search begins.
    by: Option<Pending<P>>,
    /// It was split since, and the page to its right is looked at, too.
    leads_on: bool,
    is_dropped: bool,
}

struct Attempt<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize> {
    access: &'a A,
    search: &'a S,
    pending: BinaryHeap<Pending<A::Page<'a>>>,
    visits: Vec<Visit<A::Page<'a>>>,
    found: Vec<(usize, S::Output)>,
}

type Reading<'a, P, T> = Pin<Box<dyn Future<Output = (Pending<P>, Result<Forked<P, T>, Interrupt>)> + 'a>>;

async fn read<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    access: &'a A,
    search: &'a S,
    next: Pending<A::Page<'a>>,
) -> (Pending<A::Page<'a>>, Result<Forked<A::Page<'a>, S::Output>, Interrupt>) {
    let read = match next.steps {
        0 => access.fork_one(&next.from, next.link, &search.below(next.stamp)).await,
        _ => access.follow(&next.from, next.link, Hint::MOVED).await.map(Forked::Page),
    };
    (next, read)
}

pub(super) async fn run<A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize>(
    access: &A,
    from: Start,
    search: &S,
) -> Result<S::Output, Interrupt> {
    let page = access.open(from).await?;
    let (at, stamp) = (page.at(), search.stamp());
    let mut attempt =
        Attempt::<A, S, D> { access, search, pending: BinaryHeap::new(), visits: Vec::new(), found: Vec::new() };
    let found = attempt.enter(page, None)?;
    if stamp != 0 && stamp != found.stamp {
        return Err(Interrupt::stale(at, "it is not the page where a search was to begin"));
    }
    let mut reading: FuturesUnordered<Reading<'_, A::Page<'_>, S::Output>> = FuturesUnordered::new();
    let mut bound = search.bound(&attempt.found);
    loop {
        while reading.len() < search.window() {
            let Some(next) = attempt.next(bound) else { break };
            if next.steps == 0
                && let Some(page) = access.try_follow(&next.from, next.link, Hint::DOWN)
            {
                attempt.arrive(next, Ok(Forked::Page(page)))?;
                bound = search.bound(&attempt.found);
            } else {
                reading.push(Box::pin(read(access, search, next)));
            }
        }
        let Some((next, read)) = reading.next().await else { break };
        attempt.arrive(next, read)?;
        bound = search.bound(&attempt.found);
    }
    let Attempt { pending, visits, found, .. } = attempt;
    let relied_on: Vec<&A::Page<'_>> = visits.iter().filter(|it| !it.is_dropped).map(|it| &*it.page).collect();
    access.validate(&relied_on).await?;
    Ok(search.finish(found.into_iter().map(|(_, part)| part).collect(), pending.is_empty()))
}

impl<'a, A: Access<Plugin = Tree<D>>, S: Search<D>, const D: usize> Attempt<'a, A, S, D> {
    /// The next page to read, if one is needed.
    fn next(&mut self, bound: f64) -> Option<Pending<A::Page<'a>>> {
        while let Some(next) = self.pending.pop() {
            if self.is_dropped(next.visit) {
                continue;
            }
            if next.order > bound {
                self.pending.push(next);
                return None;
            }
            return Some(next);
        }
        None
    }

    /// Whether it is below a page that is read again.
    fn is_dropped(&self, visit: usize) -> bool {
        let above = |&visit: &usize| self.visits[visit].by.as_ref().map(|by| by.visit);
        std::iter::successors(Some(visit), above).any(|visit| self.visits[visit].is_dropped)
    }

    /// Takes in what has come of a read.
    fn arrive(
        &mut self,
        next: Pending<A::Page<'a>>,
        read: Result<Forked<A::Page<'a>, S::Output>, Interrupt>,
    ) -> Result<(), Interrupt> {
        if self.is_dropped(next.visit) {
            return Ok(());
        }
        let visit = next.visit;
        let arrived = match read {
            Ok(Forked::Page(page)) => self.enter(page, Some(next)).map(drop),
            Ok(Forked::Done(part)) => {
                self.found.push((visit, part));
                Ok(())
            }
            Err(interrupt) => Err(interrupt),
        };
        match arrived {
            // The page above has changed: it, and what was found below, is looked at anew.
            Err(interrupt @ Interrupt::Restart(Cause::Stale { .. } | Cause::Conflict)) => self.reread(visit, interrupt),
            arrived => arrived,
        }
    }

    /// Looks at a page: the root if nothing led to it.
    fn enter(&mut self, page: A::Page<'a>, by: Option<Pending<A::Page<'a>>>) -> Result<Head<D>, Interrupt> {
        require_page(self.access, &page)?;
        let (search, level) = (self.search, page.level());
        let (head, hits) = page.read(|words| {
            let (node, mut hits) = (Node::<_, D>::of(words), Vec::new());
            node.find(search.query(), |index| hits.push(node.item(index)));
            hits.retain(|item| search.is_left(item, node.level));
            (node.head(), hits)
        })?;
        let page = Rc::new(page);
        let visit = by.as_ref().map_or(0, |by| by.visit);
        let rereads = by.as_ref().map_or(0, |by| by.rereads);
        let mut leads_on = false;
        if let Some(by) = &by {
            let wanted = if by.steps == 0 { by.from.level().checked_sub(1) } else { Some(by.from.level()) };
            if head.level != level || Some(level) != wanted {
                return Err(Interrupt::stale(page.at(), "it is of another level"));
            }
            if head.stamp != by.stamp {
                if head.right.is_null() || by.steps == STEPS_MAX {
                    return Err(Interrupt::stale(page.at(), "its entries have moved to pages beside it"));
                }
                leads_on = true;
                let (from, link) = (Rc::clone(&page), head.right);
                self.pending.push(Pending { from, link, steps: by.steps + 1, ..*by });
            }
        }
        let is_first = by.is_none();
        if level > 0 || is_first {
            self.visits.push(Visit { page: Rc::clone(&page), by, leads_on, is_dropped: false });
        }
        if level == 0 {
            self.found.push((visit, search.answer(hits)));
            return Ok(head);
        }
        let visit = self.visits.len() - 1;
        for item in hits {
            let (from, order) = (Rc::clone(&page), search.query().order(&item.rect));
            let (link, stamp) = (item.link(), item.stamp);
            self.pending.push(Pending { order, from, link, stamp, steps: 0, rereads, visit });
        }
        Ok(head)
    }

    /// Has a page read again, and drops what was found below it. Of a page that was split since, it is the page above: else its
    /// right neighbours would be looked at twice.
    fn reread(&mut self, mut visit: usize, why: Interrupt) -> Result<(), Interrupt> {
        while let Visit { by: Some(by), leads_on: true, .. } = &self.visits[visit] {
            visit = by.visit;
        }
        let Visit { by, is_dropped, .. } = &mut self.visits[visit];
        let Some(again) = by.as_ref().filter(|by| by.rereads < REREADS_MAX) else { return Err(why) };
        *is_dropped = true;
        let Pending { order, link, stamp, steps, rereads, visit, .. } = *again;
        let from = Rc::clone(&again.from);
        self.pending.push(Pending { order, from, link, stamp, steps, rereads: rereads + 1, visit });
        let found = std::mem::take(&mut self.found);
        self.found = found.into_iter().filter(|(of, _)| !self.is_dropped(*of)).collect();
        Ok(())
    }
}
