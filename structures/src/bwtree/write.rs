//! Puts and removals: one delta.

use farlink_runtime::{access::*, operation::clean_up};

use super::{
    Bw, merge,
    page::{Search, descend},
    record::{Change, MapWord},
};
use crate::map::ops::{Put, PutMode};

/// Attempts at merging behind one removal. A later one tries again.
const MERGE_MAX: u32 = 4;
/// Swaps that an attempt tries. Then others have time to finish.
const SWAPS_MAX: u32 = 8;

pub(super) async fn get<A: Access<Plugin = Bw>>(access: &A, from: Start, key: u64) -> Result<Option<u64>, Interrupt> {
    Ok(descend(access, key, 0, Search::to_answer(from)).await?.state.value(key))
}

pub(super) async fn put<A: Access<Plugin = Bw>>(
    access: &A,
    from: Start,
    put: &Put<Bw>,
) -> Result<Option<u64>, Interrupt> {
    let Put { key, value, mode, .. } = *put;
    let change = |before: Option<u64>| match (before, mode) {
        (Some(_), PutMode::Insert) | (None, PutMode::Update) => None,
        _ => Some(Change::Put { key, value }),
    };
    Ok(alter(access, from, key, change).await?.0)
}

pub(super) async fn remove<A: Access<Plugin = Bw>>(
    access: &A,
    from: Start,
    key: u64,
) -> Result<Option<u64>, Interrupt> {
    let change = |before: Option<u64>| before.map(|_| Change::Delete { key });
    let (before, altered) = alter(access, from, key, change).await?;
    let Context { worker, structure, .. } = access.context();
    if let Some((entries, is_new)) = altered
        && merge::is_due(structure, entries.saturating_sub(1), is_new)
    {
        clean_up(worker, MERGE_MAX, async || merge::begin(access, 0, key).await).await;
    }
    Ok(before)
}

/// Makes the change that follows from a key's value, if any; the value, and if there was a change, how many entries the page had before,
/// and whether it has a new base. A page that is remembered is not read before: the swap succeeds only if it is so. Where others
/// were first, what they have added is read, and the change made to that. Operations of one worker on one page take turns.
async fn alter<A: Access<Plugin = Bw>>(
    access: &A,
    from: Start,
    key: u64,
    change: impl Fn(Option<u64>) -> Option<Change>,
) -> Result<(Option<u64>, Option<(usize, bool)>), Interrupt> {
    let search = Search::to_swap(from);
    let mut page = descend(access, key, 0, search).await?;
    let _turn = if let (true, Some((at, _))) = (A::REMEMBERS, page.at.page.remote()) {
        let turn = access.context().worker.turn(at.word(page.at.index)).await;
        if turn.has_waited() {
            page = descend(access, key, 0, search).await?;
        }
        Some(turn)
    } else {
        None
    };
    for _ in 0..SWAPS_MAX {
        let before = page.state.value(key);
        let word = match change(before) {
            None if page.is_fresh() => return Ok((before, None)),
            None => MapWord(access.load(&[page.at]).await?[0]),
            Some(change) => match page.alter(access, change).await? {
                Ok(is_new) => return Ok((before, Some((page.state.entries.len(), is_new)))),
                Err(word) => word,
            },
        };
        page = page.at_word(access, word, key).await?;
    }
    Err(Interrupt::conflict())
}
