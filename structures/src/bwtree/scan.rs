//! Scans: pages of level 0 in key order, those below one page above read at once.
//!
//! What a scan promises under concurrent changes is what those of the B+-tree do: entries of each page are of one moment; every key
//! that was there all the time is returned, no key twice, in order. It keeps a *cursor*, the next key that it has not covered. A
//! page is used if its fences include the cursor, which then moves beyond the page. Upwards, what was split off shows as a gap,
//! and the right links lead over it; downwards the search begins anew there.

use farlink_runtime::access::*;
use futures_util::future::join_all;

use super::{
    Bw,
    page::{Found, Search, View, descend, find, right_of},
    record::Side,
};
use crate::map::ops::{Scan, ScanPart};

/// Pages read at once, at most.
const AHEAD_MAX: usize = 16;

pub(super) async fn scan<A: Access<Plugin = Bw>>(access: &A, scan: &Scan<Bw>) -> Result<ScanPart, Interrupt> {
    let Scan { low, high, limit, descending, .. } = *scan;
    let begin = if descending { high } else { low };
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut walk = Walk { low, high, descending, limit, cursor: Some(begin), entries: Vec::new() };
    match walk.run(access).await {
        // What was covered stands: only the rest has to begin anew.
        Err(Interrupt::Restart(_)) if walk.cursor != Some(begin) => {}
        other => other?,
    }
    let Walk { cursor, entries, .. } = walk;
    let rest = match entries.last() {
        Some(&(last, _)) if entries.len() == limit && descending => last.checked_sub(1),
        Some(&(last, _)) if entries.len() == limit => last.checked_add(1),
        _ => cursor,
    };
    Ok(ScanPart { entries, rest: rest.filter(|&rest| rest >= low && rest <= high), descending })
}

struct Walk {
    low: u64,
    high: u64,
    descending: bool,
    limit: usize,
    /// The next key not covered; `None` when all are.
    cursor: Option<u64>,
    entries: Vec<(u64, u64)>,
}

impl Walk {
    /// The next key to cover, if there is need of more.
    fn next(&self) -> Option<u64> {
        self.cursor.filter(|_| self.entries.len() < self.limit)
    }

    async fn run<A: Access<Plugin = Bw>>(&mut self, access: &A) -> Result<(), Interrupt> {
        while let Some(cursor) = self.next() {
            let above = descend(access, cursor, 1, Search::TO_READ).await?;
            if above.level() == 0 {
                self.visit(&above);
            } else {
                self.below(access, &above, cursor).await?;
            }
            if self.cursor == Some(cursor) {
                return Err(above.stale("the pages below it do not hold its keys"));
            }
        }
        Ok(())
    }

    /// Visits pages below one of level 1.
    async fn below<A: Access<Plugin = Bw>>(&mut self, access: &A, above: &View, cursor: u64) -> Result<(), Interrupt> {
        let (mut next, count) = (above.child_for(cursor)?.0, above.state.entries.len());
        let ahead = AHEAD_MAX.min(access.context().worker.window()).max(1);
        // The last page that was visited, upwards.
        let mut last: Option<View> = None;
        while self.next().is_some() {
            let most = (self.limit - self.entries.len()) / 16 + 1;
            let batch = match self.descending {
                true => (next + 1).saturating_sub(ahead.min(most))..next + 1,
                false => next..count.min(next + ahead.min(most)),
            };
            let mut children = batch.clone().map(|index| above.child(index)).collect::<Result<Vec<_>, _>>()?;
            if self.descending {
                children.reverse();
            }
            for found in join_all(children.into_iter().map(|child| find(access, child))).await {
                let page = match found? {
                    Found::Page(page) if page.level() == 0 => page,
                    Found::Page(page) => return Err(page.stale("it is not of the level that the page above promised")),
                    // Merged, or about to be: what it held is found from above.
                    Found::Removed(_) | Found::Gone => {
                        self.alone(access).await?;
                        last = None;
                        continue;
                    }
                };
                // What was split off from it may have no entry above yet.
                if self.next().is_some_and(|key| page.state.fences.side(key) == Side::Right) {
                    self.alone(access).await?;
                }
                while !self.descending && self.next().is_some_and(|key| key < page.state.fences.low) {
                    match last.take() {
                        Some(before) => self.visit(last.insert(right_of(access, &before, false).await?)),
                        None => self.alone(access).await?,
                    }
                }
                self.visit(&page);
                last = Some(page).filter(|_| !self.descending);
            }
            let is_last = if self.descending { batch.start == 0 } else { batch.end == count };
            if is_last {
                break;
            }
            next = if self.descending { batch.start - 1 } else { batch.end };
        }
        Ok(())
    }

    /// Visits the page of the cursor, from the root on.
    async fn alone<A: Access<Plugin = Bw>>(&mut self, access: &A) -> Result<(), Interrupt> {
        let Some(cursor) = self.next() else { return Ok(()) };
        self.visit(&descend(access, cursor, 0, Search::TO_READ).await?);
        Ok(())
    }

    /// Takes a page's entries if it holds the cursor, and moves the cursor beyond it.
    fn visit(&mut self, page: &View) {
        let (state, Some(cursor)) = (&page.state, self.next()) else { return };
        if state.fences.side(cursor) != Side::Here {
            return;
        }
        let room = self.limit - self.entries.len();
        let upto = |key: u64| state.entries.partition_point(|entry| entry.0 <= key);
        if self.descending {
            let least = self.low.max(state.fences.low);
            let entries = state.entries[..upto(cursor)].iter().rev().take_while(|entry| entry.0 >= least);
            self.entries.extend(entries.take(room));
            self.cursor = state.fences.low.checked_sub(1).filter(|&next| next >= self.low);
        } else {
            let from = state.entries.partition_point(|entry| entry.0 < cursor);
            let upto = upto(self.high).max(from);
            self.entries.extend(state.entries[from..upto].iter().take(room));
            self.cursor = state.fences.high().filter(|&high| high <= self.high && high > cursor);
        }
    }
}
