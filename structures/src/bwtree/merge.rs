//! Merging a page into the one to its left.
//!
//! A merge is five swaps. Whoever meets one begun carries it on, from what is there: nobody waits for who has begun it.
//!
//! 1. The page above: an entry's page *is being merged*. From now on nothing else is done there, so the entry stays, and is not
//!    the first one. (The OpenBw-Tree blocks the page above too, with a delta that others have to wait for.)
//! 2. The page: *removed*. Nothing is changed there any more. (A long chain gets a new base before, so that chains do not add up.)
//! 3. The page to its left, which is the one whose right link leads to it: what the page held *belongs here*.
//! 4. The number of the page is given up.
//! 5. The page above: the entry is *gone*, and with it the mark of step 1.
//!
//! What is next follows from the pages as they are, read anew for each step. That the entry is not there says nothing if it was
//! looked for in an older copy of the page above: in that the index term may not have been put in yet. Steps succeed only if the
//! page has not changed since it was read, so of two who help each other one does a step.
//!
//! The only child of the root is merged into the root, which is then one level lower: step 3 is a new base of the root, and the
//! number is given up last. If a process dies in between, it is lost.
//!
//! A search that changes nothing goes through: as long as the page to the left leads to the removed page, that page holds what
//! is true; as soon as it does not, the page to the left does.

use farlink_runtime::{
    access::*,
    one_sided::{OneSided, Proof},
    operation::persist,
};

use super::{
    Bw,
    chain::State,
    page::{Found, Removed, Search, View, descend, find, right_of},
    record::{About, Change, Pid, Side, capacity},
    split::{Boxed, boxed, give_up, post, unmap},
};

/// A page with fewer than one in so many of the entries that it can hold is merged.
const UNDERFULL: usize = 4;
/// Swaps of one helper, far more than a merge has; beyond, others have work done in between.
const STEPS_MAX: u32 = 64;

/// Whether a page should be merged that a removal leaves with so many entries: it is asked when the page has become so small, when
/// it has got a new base, and when it is empty.
pub(super) fn is_due(structure: &Structure, entries: usize, is_new: bool) -> bool {
    let limit = capacity(structure.class).div_ceil(UNDERFULL);
    entries == 0 || entries + 1 == limit || is_new && entries < limit
}

/// Whether two neighbours make one page.
fn fit(structure: &Structure, a: usize, b: usize) -> bool {
    let (room, least) = (capacity(structure.class), a.min(b));
    a + b <= if least == 0 { room } else { room * 3 / 4 } && least < room.div_ceil(UNDERFULL)
}

/// Merges the page of a level to which a key belongs with a neighbour, if there is little in them; then those above, if there is
/// little left in them.
pub(super) fn begin<A: Access<Plugin = Bw>>(access: &A, mut level: u8, key: u64) -> Boxed<'_, ()> {
    boxed(access, async move {
        let structure = &access.context().structure;
        // Each time around something is merged, unless others split it again.
        for _ in 0..STEPS_MAX {
            let above = descend(access, key, level.saturating_add(1), Search::TO_CHANGE).await?;
            if above.level() <= level {
                return Ok(());
            }
            if above.state.merging.is_some() {
                return finish(access, above.level(), key).await;
            }
            let entries = &above.state.entries;
            let is_only = entries.len() == 1 && above.pid() == Pid::ROOT;
            if is_only
                && let Found::Page(child) = find(access, above.child(0)?).await?
                && let Some(high) = child.state.fences.high()
            {
                // Not the only one: whoever split it has died before the root knew.
                return post(access, above.level(), high).await;
            }
            let at = if is_only { Some(entries[0].0) } else { pair(access, &above, key).await? };
            let Some(at) = at else { return Ok(()) };
            let (index, child) = above.child_for(at)?;
            let merging = Change::Merging { at: entries[index].0, child };
            if above.add(access, merging, 1).await?.is_err() {
                return Err(Interrupt::conflict());
            }
            finish(access, above.level(), at).await?;
            let left = entries.len() - 1;
            level = match above.pid() == Pid::ROOT {
                true if is_only => level.saturating_sub(1),
                true if left == 1 => level,
                false if is_due(structure, left, true) => above.level(),
                _ => return Ok(()),
            };
        }
        Ok(())
    })
}

/// The low fence of a page below `above` that is to be merged into the one to its left: that of the key, or the next one.
async fn pair<A: Access<Plugin = Bw>>(access: &A, above: &View, key: u64) -> Result<Option<u64>, Interrupt> {
    let index = above.child_for(key)?.0;
    for index in [index, index + 1] {
        let Some(&(at, _)) = above.state.entries.get(index).filter(|_| index > 0) else { continue };
        let (left, right) = (above.child(index - 1)?, above.child(index)?);
        let (Found::Page(left), Found::Page(page)) = (find(access, left).await?, find(access, right).await?) else {
            return Ok(None);
        };
        let fits = fit(&access.context().structure, left.state.entries.len(), page.state.entries.len());
        if fits && left.state.fences.right == Some((at, right)) {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// Carries on the merge that is under way below the page of this level to which a key belongs, until there is none.
pub(super) fn finish<A: Access<Plugin = Bw>>(access: &A, level: u8, key: u64) -> Boxed<'_, ()> {
    boxed(access, async move {
        for _ in 0..STEPS_MAX {
            let above = descend(access, key, level, Search::TO_CHANGE).await?;
            let Some((at, child)) = above.state.merging else { return Ok(()) };
            let is_only = above.pid() == Pid::ROOT && above.state.entries.len() == 1;
            match find(access, child).await? {
                Found::Page(page) if page.level() + 1 != above.level() => {
                    return Err(page.stale("it is being merged below a page that is not one level above it"));
                }
                Found::Page(page) if page.state.merging.is_some() => {
                    finish(access, page.level(), page.state.fences.low).await?;
                }
                // It was split first: so it is not the only one.
                Found::Page(page) if is_only && page.state.fences.right.is_some() => {
                    let state = State { merging: None, ..above.state.clone() };
                    above.replace(access, state, &[]).await?.ok();
                }
                // Cancelled since the root was read. If it is cancelled only now, the child has changed, and the swap below fails.
                Found::Page(_) if is_only && access.load(&[above.at]).await?[0] != above.word.0 => {}
                // Else the page to the left gets what this one has absorbed, and so on, until the chain is too long.
                Found::Page(page) if page.is_long(access) => {
                    page.replace(access, page.state.clone(), &[]).await?.ok();
                }
                Found::Page(page) => drop(page.add(access, Change::Remove, 1).await?),
                Found::Removed(removed) if is_only => lower(access, above, removed).await?,
                Found::Removed(removed) => absorb(access, &above, at, removed).await?,
                Found::Gone => {
                    let change = Change::Delete { key: at };
                    let ended = if above.is_long(access) {
                        let mut state = above.state.clone();
                        state.change(change);
                        above.replace(access, state, &[]).await?
                    } else {
                        above.add(access, change, 1).await?
                    };
                    if ended.is_ok() {
                        access.context().worker.count_merge();
                    }
                }
            }
        }
        Err(Interrupt::stale(access.context().structure.root, "a merge below it does not end"))
    })
}

/// The root takes what its only child held, and is one level lower. A task of the worker: nobody else gives the child's number up.
async fn lower<A: Access<Plugin = Bw>>(access: &A, root: View, removed: Removed) -> Result<(), Interrupt> {
    let Context { worker, structure, .. } = access.context();
    let (access, pin) = (OneSided::<Bw>::new(worker, structure.clone(), Proof::Checksum), worker.pin());
    let whole = async move {
        let (Removed { pid, at, word, head, .. }, worker) = (removed.clone(), &access.context().worker);
        let content = removed.content(&access).await?;
        let state = State { about: About { pid: Pid::ROOT, ..content.state.about }, ..content.state.clone() };
        let outcome = root.replace(&access, state, &content.records).await;
        let is_led_to = async || match &outcome {
            Ok(replaced) => Ok(replaced.is_err()),
            Err(Interrupt::Restart(_)) => Ok(true),
            // Nobody knows whether it took place.
            Err(_) => {
                let find = async || descend(&access, 0, content.level(), Search::TO_CHANGE).await;
                Ok::<_, Interrupt>(persist(worker, find).await?.pid() == pid)
            }
        };
        if !is_led_to().await? {
            give_up(&access, pid, (at, word), head, [u64::from(content.level()), 0]).await?;
        }
        drop(pin);
        outcome?.map_err(|_| Interrupt::conflict())?;
        worker.count_merge();
        Ok(())
    };
    worker.spawn_to_end(whole).await
}

/// Steps 3 and 4.
async fn absorb<A: Access<Plugin = Bw>>(access: &A, above: &View, at: u64, removed: Removed) -> Result<(), Interrupt> {
    let index = above.child_for(at)?.0.checked_sub(1).ok_or(above.stale("its first child is being merged"))?;
    let Found::Page(mut left) = find(access, above.child(index)?).await? else {
        return Err(above.stale("the page to the left of one that is being merged is gone"));
    };
    while left.state.fences.side(at) == Side::Right {
        if left.state.fences.right != Some((at, removed.pid)) {
            left = right_of(access, &left, true).await?;
            continue;
        }
        if left.state.merging.is_some() {
            return finish(access, left.level(), left.state.fences.low).await;
        }
        if left.is_long(access) {
            return left.replace(access, left.state.clone(), &[]).await.map(drop);
        }
        // Those of the page without its removal, and the two that lead to them.
        let more = removed.below_count.checked_add(1).ok_or(left.stale("the chain to its right is too long"))?;
        return left.add(access, Change::Merge { at, absorbed: removed.below }, more).await.map(drop);
    }
    let found_by = [u64::from(left.level()), at];
    unmap(access, removed.pid, (removed.at, removed.word), vec![removed.head], found_by).await.map(drop)
}
