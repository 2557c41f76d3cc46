//! One task of the closed loop: take an operation, run it, time it, check what it answered, record it.
//!
//! As many tasks as are in flight share a worker's feed and tally. A task reads the clock once an operation: the end of one is
//! the start of the next, so what lies between (settling a key, recording) is inside the measured time, and a latency includes
//! the time that the worker spent on other tasks.

use std::cell::RefCell;
use std::time::Instant;

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::{BTree, btree::Tree};

use crate::feed::{Feed, Request};
use crate::keys::value_belongs;
use crate::tally::{Outcomes, Tally};

/// Runs operations from `feed` until it ends. The first error stops the feed for every task of the worker; operations
/// that are under way in other tasks still finish and are recorded.
pub(crate) async fn run_task<A: Run<Plugin = Tree>, I: Iterator<Item = Request>>(
    tree: &BTree<A>,
    feed: &Feed<I>,
    tally: &RefCell<Tally>,
) -> Result<(), Error> {
    let mut start = Instant::now();
    while let Some(request) = feed.next(start) {
        // The outcome is settled first: the cell is never borrowed across an await.
        let outcomes = execute(tree, request).await.inspect_err(|_| feed.stop())?;
        let end = Instant::now();
        let mut tally = tally.borrow_mut();
        tally.outcomes += outcomes;
        tally.latency.record(u64::try_from((end - start).as_nanos()).unwrap_or(u64::MAX));
        start = end;
    }
    Ok(())
}

/// Runs one operation and says what it came to.
async fn execute<A: Run<Plugin = Tree>>(tree: &BTree<A>, request: Request) -> Result<Outcomes, Error> {
    let mut outcomes = Outcomes { ops: 1, ..Outcomes::default() };
    match request {
        Request::Get { key, latest } => {
            let value = tree.get(key).await?;
            if latest && value.is_none() {
                outcomes.latest_missing = 1;
            } else {
                note_value(&mut outcomes, key, value);
            }
        }
        Request::Update { key, value } => note_value(&mut outcomes, key, tree.update(key, value).await?),
        Request::ReadModifyWrite { key, value } => {
            let read = tree.get(key).await?;
            note_value(&mut outcomes, key, read);
            // A key that another worker removed in between is no error: the mix removes keys, then.
            if read.is_some() && !tree.update(key, value).await?.is_none_or(|before| value_belongs(key, before)) {
                outcomes.wrong_values += 1;
            }
        }
        Request::Insert { key, value } => match tree.insert(key, value).await? {
            true => outcomes.inserted = 1,
            false => outcomes.duplicates = 1,
        },
        Request::Remove { key } => match tree.remove(key).await? {
            Some(value) => {
                outcomes.removed = 1;
                outcomes.wrong_values = u64::from(!value_belongs(key, value));
            }
            None => outcomes.remove_missing = 1,
        },
        Request::Scan { from, limit } => {
            let entries = tree.scan(from, limit as usize).await?;
            note_entries(&mut outcomes, &entries, scan_is_sound(&entries, from, limit));
        }
        Request::Range { low, high, count } => {
            let entries = tree.range(low..=high).take(count as usize).await?;
            let ends = [entries.first(), entries.last()].map(|entry| entry.map(|entry| entry.0));
            let is_whole = entries.len() as u64 == count && ends == [Some(low), Some(high)];
            note_entries(&mut outcomes, &entries, is_whole);
        }
    }
    Ok(outcomes)
}

fn note_value(outcomes: &mut Outcomes, key: u64, value: Option<u64>) {
    match value {
        None => outcomes.missing = 1,
        Some(value) => {
            outcomes.found = 1;
            outcomes.wrong_values = u64::from(!value_belongs(key, value));
        }
    }
}

fn note_entries(outcomes: &mut Outcomes, entries: &[(u64, u64)], is_sound: bool) {
    outcomes.scanned = entries.len() as u64;
    outcomes.wrong_values = entries.iter().filter(|(key, value)| !value_belongs(*key, *value)).count() as u64;
    outcomes.wrong_scans = u64::from(!is_sound);
}

/// What a scan promises whatever runs beside it: in range, in order, each key once, no more than asked.
fn scan_is_sound(entries: &[(u64, u64)], from: u64, limit: u32) -> bool {
    entries.len() <= limit as usize
        && entries.first().is_none_or(|(key, _)| *key >= from)
        && entries.windows(2).all(|pair| pair[0].0 < pair[1].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_are_held_to_their_promise() {
        assert!(scan_is_sound(&[], 5, 1));
        assert!(scan_is_sound(&[(5, 0), (6, 0)], 5, 2));
        assert!(!scan_is_sound(&[(5, 0), (6, 0)], 5, 1));
        assert!(!scan_is_sound(&[(4, 0)], 5, 1));
        assert!(!scan_is_sound(&[(5, 0), (5, 0)], 5, 9));
    }
}
