//! Merging a page into the one to its left.
//!
//! A merge is five swaps. Whoever meets one begun carries it on, from what is there: nobody waits for who has begun it.
//!
//! 1. The page above: an entry's page *is being merged*. From now on nothing else is done there, so the entry stays, and is not
//!    the first one. (The OpenBw-Tree blocks the page above too, with a delta that others have to wait for.)
//! 2. The page: *removed*. Nothing is changed there any more.
//! 3. The page to its left, which is the one whose right link leads to it: what the page held *belongs here*.
//! 4. The number of the page is given up.
//! 5. The page above: the entry is *gone*, and with it the mark of step 1.
//!
//! What is next follows from the pages as they are, read anew for each step. That the entry is not there says nothing if it was
//! looked for in an older copy of the page above: in that the index term may not have been put in yet. Steps succeed only if the
//! page has not changed since it was read, so of two who help each other one does a step.
//!
//! A search that changes nothing goes through: as long as the page to the left leads to the removed page, that page holds what
//! is true; as soon as it does not, the page to the left does.

use farlink_runtime::access::*;

use super::{
    Bw,
    page::{Found, Removed, View, descend, find, right_of},
    record::{About, Change, Side, capacity},
    split::{Boxed, add, unmap},
};

/// A page with fewer than one in so many of the entries that it can hold is merged.
const UNDERFULL: usize = 4;
/// Swaps of one helper, far more than a merge has; beyond, others have work done in between.
const STEPS_MAX: u32 = 64;

/// Whether a page should be merged.
pub(super) fn is_underfull(structure: &Structure, entries: usize) -> bool {
    entries < capacity(structure.class) / UNDERFULL
}

/// Merges the page of a level to which a key belongs, or its neighbour into it, if there is little in them; then the page above, if
/// there is little left in that.
pub(super) fn begin<A: Access<Plugin = Bw>>(access: &A, level: u8, key: u64) -> Boxed<'_, ()> {
    Box::pin(async move {
        let above = descend(access, key, level.saturating_add(1), true).await?;
        if above.level() <= level {
            return Ok(());
        }
        if above.state.merging.is_some() {
            return finish(access, above.level(), key).await;
        }
        let index = above.child_for(key)?.0.max(1);
        let Some(&(at, _)) = above.state.entries.get(index) else { return Ok(()) };
        let (left, right) = (above.child(index - 1)?, above.child(index)?);
        let (Found::Page(left), Found::Page(page)) = (find(access, left).await?, find(access, right).await?) else {
            return Ok(());
        };
        let (a, b) = (left.state.entries.len(), page.state.entries.len());
        let structure = &access.context().structure;
        let is_worth_it = is_underfull(structure, a.min(b)) && a + b <= capacity(structure.class) * 3 / 4;
        if !is_worth_it || left.state.fences.right != Some((at, right)) {
            return Ok(());
        }
        if !add(access, (above.at, above.word), above.above()?, Change::Merging { at, child: right }).await? {
            return Err(Interrupt::conflict());
        }
        finish(access, above.level(), at).await?;
        access.context().worker.count_merge();
        match is_underfull(structure, above.state.entries.len() - 1) {
            true => begin(access, above.level(), at).await,
            false => Ok(()),
        }
    })
}

/// Carries on the merge that is under way below the page of this level to which a key belongs, until there is none.
pub(super) fn finish<A: Access<Plugin = Bw>>(access: &A, level: u8, key: u64) -> Boxed<'_, ()> {
    Box::pin(async move {
        for _ in 0..STEPS_MAX {
            let above = descend(access, key, level, true).await?;
            let Some((at, child)) = above.state.merging else { return Ok(()) };
            match find(access, child).await? {
                Found::Page(page) if page.state.merging.is_some() => {
                    finish(access, page.level(), page.state.fences.low).await?;
                }
                Found::Page(page) => {
                    add(access, (page.at, page.word), page.above()?, Change::Remove).await?;
                }
                Found::Removed(removed) => absorb(access, &above, at, removed).await?,
                Found::Gone => {
                    add(access, (above.at, above.word), above.above()?, Change::Delete { key: at }).await?;
                }
            }
        }
        Err(Interrupt::conflict())
    })
}

/// Steps 3 and 4.
async fn absorb<'a, A: Access<Plugin = Bw>>(
    access: &'a A,
    above: &View<'a, A>,
    at: u64,
    removed: Removed<'a, A>,
) -> Result<(), Interrupt> {
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
        let below = removed.below_count.saturating_sub(1);
        let below = left.state.about.below.checked_add(below).and_then(|sum| sum.checked_add(2));
        let below = below.ok_or(left.stale("its chain is too long"))?;
        let merge = Change::Merge { at, absorbed: removed.below };
        add(access, (left.at, left.word), About { below, ..left.state.about }, merge).await?;
        return Ok(());
    }
    unmap(access, removed.pid, (removed.at, removed.word), vec![removed.head]).await.map(drop)
}
