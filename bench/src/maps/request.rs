//! One operation of an ordered map: run, and its answer checked.

use std::marker::PhantomData;

use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::map::{
    OrderedMap, PutMode,
    ops::{Get, Put, Remove, Scan},
};
use serde_json::Value;

use super::keys::value_belongs;
use crate::subject::{Answer, Outcomes};

/// An operation of an ordered map, ready to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapRequest {
    /// Look up.
    Get {
        /// The key.
        key: u64,
        /// It may not be there yet.
        latest: bool,
    },
    /// Overwrite.
    Update {
        /// The key.
        key: u64,
        /// Its new value.
        value: u64,
    },
    /// Look up and overwrite.
    ReadModifyWrite {
        /// The key.
        key: u64,
        /// Its new value.
        value: u64,
    },
    /// Insert a new key.
    Insert {
        /// The key.
        key: u64,
        /// Its value.
        value: u64,
    },
    /// Insert or overwrite.
    Put {
        /// The key.
        key: u64,
        /// Its value.
        value: u64,
    },
    /// Remove.
    Remove {
        /// The key.
        key: u64,
    },
    /// Read entries in key order.
    Scan {
        /// The key to begin at.
        from: u64,
        /// How many, at most.
        limit: u32,
    },
    /// Read the entries of a range whose ends are both there.
    Range {
        /// The first key.
        low: u64,
        /// The last key.
        high: u64,
        /// How many entries there are from one to the other.
        count: u64,
    },
}

async fn get<S: OrderedMap>(run: &impl Run<Plugin = S>, key: u64) -> Result<Option<u64>, Error> {
    run.execute(&Get::<S> { key, of: PhantomData }).await
}

async fn put<S: OrderedMap>(
    run: &impl Run<Plugin = S>,
    key: u64,
    value: u64,
    mode: PutMode,
) -> Result<Option<u64>, Error> {
    run.execute(&Put::<S> { key, value, mode, of: PhantomData }).await
}

async fn remove<S: OrderedMap>(run: &impl Run<Plugin = S>, key: u64) -> Result<Option<u64>, Error> {
    run.execute(&Remove::<S> { key, of: PhantomData }).await
}

/// The first entries from `low` to `high`, in ascending order.
async fn scan<S: OrderedMap>(
    run: &impl Run<Plugin = S>,
    low: u64,
    high: u64,
    count: u64,
) -> Result<Vec<(u64, u64)>, Error> {
    let (mut entries, mut next) = (Vec::new(), Some(low));
    while let Some(low) = next.filter(|&low| low <= high && (entries.len() as u64) < count) {
        let limit = count - entries.len() as u64;
        let part = run.execute(&Scan::<S> { low, high, limit, descending: false, of: PhantomData }).await?;
        entries.extend(part.entries);
        next = part.rest;
    }
    entries.truncate(usize::try_from(count).unwrap_or(usize::MAX));
    Ok(entries)
}

/// Whether a map holds a key.
pub(crate) async fn holds<S: OrderedMap>(run: &impl Run<Plugin = S>, key: u64) -> Result<bool, Error> {
    Ok(get(run, key).await?.is_some())
}

/// The least key from `low` to `high`.
pub(crate) async fn first<S: OrderedMap>(
    run: &impl Run<Plugin = S>,
    low: u64,
    high: u64,
) -> Result<Option<u64>, Error> {
    Ok(scan(run, low, high, 1).await?.first().map(|&(key, _)| key))
}

/// Runs one operation and says what it came to.
pub(crate) async fn execute<S: OrderedMap>(run: &impl Run<Plugin = S>, request: MapRequest) -> Result<Outcomes, Error> {
    let mut outcomes = Outcomes { ops: 1, ..Outcomes::default() };
    match request {
        MapRequest::Get { key, latest } => {
            let value = get(run, key).await?;
            if latest && value.is_none() {
                outcomes.latest_missing = 1;
            } else {
                note_value(&mut outcomes, key, value);
            }
        }
        MapRequest::Update { key, value } => {
            note_value(&mut outcomes, key, put(run, key, value, PutMode::Update).await?);
        }
        MapRequest::ReadModifyWrite { key, value } => {
            let read = get(run, key).await?;
            note_value(&mut outcomes, key, read);
            if read.is_some() {
                // A key that another worker removed in between is no error: the mix removes keys, then.
                let before = put(run, key, value, PutMode::Update).await?;
                outcomes.wrong_values += u64::from(before.is_some_and(|before| !value_belongs(key, before)));
            }
        }
        MapRequest::Insert { key, value } => match put(run, key, value, PutMode::Insert).await? {
            None => outcomes.inserted = 1,
            Some(_) => outcomes.duplicates = 1,
        },
        MapRequest::Put { key, value } => match put(run, key, value, PutMode::Upsert).await? {
            None => outcomes.inserted = 1,
            Some(_) => outcomes.found = 1,
        },
        MapRequest::Remove { key } => match remove(run, key).await? {
            Some(value) => {
                outcomes.removed = 1;
                outcomes.wrong_values = u64::from(!value_belongs(key, value));
            }
            None => outcomes.remove_missing = 1,
        },
        MapRequest::Scan { from, limit } => {
            let entries = scan(run, from, u64::MAX, limit.into()).await?;
            note_entries(&mut outcomes, &entries, scan_is_sound(&entries, from, limit));
            // It begins with a loaded key.
            outcomes.missing = u64::from(entries.first().is_none_or(|entry| entry.0 != from));
        }
        MapRequest::Range { low, high, count } => {
            let entries = scan(run, low, high, count).await?;
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

/// Runs one operation of a trace.
pub(crate) async fn answer<S: OrderedMap>(run: &impl Run<Plugin = S>, request: MapRequest) -> Result<Answer, Error> {
    let shown = |value: Option<u64>| value.map_or_else(|| "none".to_owned(), |value| value.to_string());
    let of = |operation: &str, key: u64| vec![("operation", Value::from(operation)), ("key", key.into())];
    Ok(match request {
        MapRequest::Put { key, value } => {
            let before = put(run, key, value, PutMode::Upsert).await?;
            let said = before.map_or_else(|| "new".to_owned(), |before| format!("replaced {before}"));
            let mut fields = of("put", key);
            fields.extend([("value", value.into()), ("before", before.into())]);
            Answer { line: format!("put {key} {value} -> {said}"), fields }
        }
        MapRequest::Remove { key } => {
            let before = remove(run, key).await?;
            let said = before.map_or_else(|| "none".to_owned(), |before| format!("removed {before}"));
            let mut fields = of("del", key);
            fields.push(("before", before.into()));
            Answer { line: format!("del {key} -> {said}"), fields }
        }
        MapRequest::Scan { from, limit } => {
            let entries = scan(run, from, u64::MAX, limit.into()).await?;
            let shown: Vec<String> = entries.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let shown = if shown.is_empty() { "none".to_owned() } else { shown.join(" ") };
            let mut fields = of("scan", from);
            fields.push(("limit", limit.into()));
            fields.push(("entries", entries.iter().map(|&(key, value)| Value::from(vec![key, value])).collect()));
            Answer { line: format!("scan {from} {limit} -> {shown}"), fields }
        }
        MapRequest::Get { key, .. } => {
            let value = get(run, key).await?;
            let mut fields = of("get", key);
            fields.push(("value", value.into()));
            Answer { line: format!("get {key} -> {}", shown(value)), fields }
        }
        other => return Err(Error::BadOption { option: "trace", why: format!("{other:?} has no line") }),
    })
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
