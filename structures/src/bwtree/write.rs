//! Puts and removals: one delta.

use farlink_runtime::{access::*, operation::clean_up};

use super::{Bw, merge, page::descend, record::Change};
use crate::map::ops::{Put, PutMode};

/// Attempts at merging behind one removal. A later one tries again.
const MERGE_MAX: u32 = 4;

pub(super) async fn get<A: Access<Plugin = Bw>>(access: &A, key: u64) -> Result<Option<u64>, Interrupt> {
    Ok(descend(access, key, 0, false).await?.state.value(key))
}

pub(super) async fn put<A: Access<Plugin = Bw>>(access: &A, put: &Put<Bw>) -> Result<Option<u64>, Interrupt> {
    let Put { key, value, mode, .. } = *put;
    let page = descend(access, key, 0, true).await?;
    let before = page.state.value(key);
    match (before, mode) {
        (Some(_), PutMode::Insert) | (None, PutMode::Update) => {}
        _ => drop(page.alter(access, Change::Put { key, value }).await?),
    }
    Ok(before)
}

pub(super) async fn remove<A: Access<Plugin = Bw>>(access: &A, key: u64) -> Result<Option<u64>, Interrupt> {
    let page = descend(access, key, 0, true).await?;
    let Some(before) = page.state.value(key) else { return Ok(None) };
    let Context { worker, structure, .. } = access.context();
    let entries = page.state.entries.len().saturating_sub(1);
    let is_new = page.alter(access, Change::Delete { key }).await?;
    if merge::is_due(structure, entries, is_new) {
        clean_up(worker, MERGE_MAX, async || merge::begin(access, 0, key).await).await;
    }
    Ok(Some(before))
}
