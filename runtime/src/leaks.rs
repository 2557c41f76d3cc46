//! Pages of a structure that are nobody's: what a compute server leaves that dies between two [installs](crate::access::Access::install),
//! which are not recorded.
//!
//! Nothing in remote memory names such a page: it looks like one in use. So all live pages of the structure are *suspects*; then a grace
//! passes, until every operation has ended that ran when the suspects were listed, and what it takes back is free. A suspect that is still the same page was made by an
//! operation that has ended. If the structure does not lead to it by now, nobody will link it, and nobody is about to free it.
//!
//! Of a page whose WRITE was cut off as its compute server died only the lock word may have arrived, and not what says whose it is: whoever
//! looks first takes it for its structure's.
//!
//! A bulk load is no one operation: its pages outlast any grace before something leads to them. What it leaves is freed only while the
//! structure is empty, and nobody who lives may change it ([`free_of_empty`]).
//!
//! What a plug-in says of one page, it says while others change the structure ([`Plugin::is_leaked`]).

use std::future::ready;

use futures_util::stream::{self, StreamExt, TryStreamExt};

use crate::{
    access::{Access, Context, Plugin},
    audit, catalog,
    compute::round,
    error::Error,
    free_pages::Unlinked,
    lock::{LockState, LockWord},
    one_sided::ownership::{self, Waits},
    operation::Restarts,
    page::{HEADER_WORDS, LOCK},
    pages::{self, ChunkState, directory},
    ptr::Link,
    recovery::sweep,
    remote::read_lock,
    structure::Region,
    sync::Ordering,
    worker::Handle,
};

/// Suspects that wait for one grace.
const SUSPECTS: usize = 1 << 16;
/// How long it waits for a grace: more than any operation takes that is not held up itself.
const GRACE_NS_MAX: u64 = 10_000_000_000;
/// Suspects looked at at a time.
const IN_FLIGHT: usize = 32;

/// Frees the pages of a structure that are nobody's. Where changes are recorded there are none, for
/// [maintenance](crate::compute::ComputeServer::settle) finishes those of the dead; a structure without locks, such as a Bw-tree, needs
/// this now and then after deaths. Others may use the structure meanwhile. How many it has freed; `None` if another compute server holds
/// up the epoch for ten seconds, then some may be left. Looks at every page of the structure, and at what leads to it.
///
/// # Errors
/// If the fabric fails, or a damaged page is in the way.
pub async fn free<A: Access>(access: &A) -> Result<Option<u64>, Error> {
    let Context { worker, structure, .. } = access.context();
    let held = &worker.compute().pages;
    let kept = [Some(structure.root_link()), structure.descriptor];
    let (mut leaked, mut suspects) = (Vec::new(), Vec::new());
    for geometry in &worker.compute().geometry {
        let entries = directory(worker, geometry).await?;
        let leased = (0..).zip(entries).filter_map(|(chunk, [state, ..])| Some((chunk, ChunkState::from_word(state)?)));
        for (chunk, ChunkState { class, .. }) in leased {
            for (at, header) in audit::headers(worker, geometry, chunk, class).await? {
                let lock = LockWord::from_word(header[LOCK]);
                let is_ours = audit::is_live(at, &header, structure.id) || audit::is_half_written(at, &header);
                let is_suspect = lock.state() == LockState::Unlocked && is_ours;
                if is_suspect && !kept.contains(&Some(Link::to(at, class))) {
                    suspects.push(Unlinked { at, class, lock });
                }
            }
            if suspects.len() >= SUSPECTS {
                let Some(found) = doubt(access, suspects.drain(..)).await? else { return Ok(None) };
                leaked.extend(found);
            }
        }
    }
    let Some(found) = doubt(access, suspects.drain(..)).await? else { return Ok(None) };
    leaked.extend(found);
    if !pass(worker, || held.in_doubt() == 0).await? {
        return Ok(None);
    }
    // The others were about to be freed by who had unlinked them.
    let mut count = 0;
    for page in leaked {
        count += u64::from(read_lock(worker, page.at).await? == page.free_after_doubt(worker.owner()));
    }
    Ok(Some(count))
}

/// Frees the pages of an empty structure to which nothing leads: what a bulk load leaves whose process dies before the root leads to what it
/// has written. Of a structure that holds entries, or that is damaged, it frees none. How many it has freed. Owns the structure meanwhile,
/// so that nobody else changes it, and looks at every page.
///
/// # Errors
/// [`Error::Owned`] or [`Error::HasUser`] if somebody who lives, this compute server included, owns some of it or uses it: a load may be
/// under way. If the fabric fails, or the root cannot be read.
pub async fn free_of_empty<A: Access>(access: &A) -> Result<u64, Error> {
    let Context { worker, structure, .. } = access.context();
    // To claim it ends the users of this compute server, which may be in the middle of a load.
    let map = ownership::read(worker, structure).await?;
    if let Some(entry) = map.entries.iter().find(|entry| entry.owner == worker.owner()) {
        return Err(Error::HasUser { name: structure.name.clone(), user: entry.owner });
    }
    let all = <A::Plugin as Plugin>::Region::everything();
    let tenure = ownership::claim::<A::Plugin>(worker, structure, &all, Waits::AWhile).await?;
    let freeing = async {
        let report = A::Plugin::check(access).await?;
        let mut count = 0;
        if report.entries == 0 && report.problem_count == 0 && !report.is_partial {
            for page in report.audit.leaked {
                count += u64::from(pages::free_unlinked(worker, structure.id, page).await?);
            }
        }
        Ok(count)
    };
    let freed = freeing.await;
    ownership::give_up(worker, structure, &tenure).await?;
    freed
}

/// Maintenance until that is so; false if another compute server holds it up for long.
async fn pass(worker: &Handle, is_over: impl Fn() -> bool) -> Result<bool, Error> {
    let begun_ns = worker.clock().now_ns();
    for attempt in 0.. {
        if is_over() {
            return Ok(true);
        }
        if worker.clock().now_ns() - begun_ns > GRACE_NS_MAX {
            break;
        }
        worker.compute().check_standing()?;
        round(worker, worker.compute()).await?;
        worker.back_off(attempt).await;
    }
    Ok(false)
}

/// Once a grace is over, has maintenance free those of some suspects to which nothing leads, unless others do. `None` if it did not end.
async fn doubt<A: Access>(
    access: &A,
    suspects: impl Iterator<Item = Unlinked>,
) -> Result<Option<Vec<Unlinked>>, Error> {
    let worker = &access.context().worker;
    let over = worker.compute().pages.begin_grace();
    // Acquire: what was done by the operations that have ended is seen from here on.
    if !pass(worker, || over.load(Ordering::Acquire)).await? {
        return Ok(None);
    }
    // What a log of a dead owner would still write to its end is written then.
    let is_swept = matches!(sweep(worker, catalog::free_unfinished).await, Ok(0));
    let judged = stream::iter(suspects).map(|suspect| is_leaked(access, suspect, is_swept)).buffer_unordered(IN_FLIGHT);
    let leaked: Vec<Unlinked> = judged.try_filter_map(|leaked| ready(Ok(leaked))).try_collect().await?;
    worker.compute().pages.doubt(leaked.iter().copied());
    Ok(Some(leaked))
}

/// The page, if it is still that one and nothing leads to it.
async fn is_leaked<A: Access>(access: &A, page: Unlinked, is_swept: bool) -> Result<Option<Unlinked>, Error> {
    let Context { worker, structure, .. } = access.context();
    let _pin = worker.pin();
    let mut restarts = Restarts::from_root(structure.root);
    let attempt = async || {
        // Whoever has unlinked it meanwhile frees it.
        let header = worker.read(page.at, HEADER_WORDS).await?;
        if header[LOCK] != page.lock.word() {
            return Ok(false);
        }
        // Whoever had begun to write it would have ended by now.
        if audit::is_half_written(page.at, &header) {
            return Ok(is_swept);
        }
        let is_ours = audit::is_live(page.at, &header, structure.id);
        Ok(is_ours && A::Plugin::is_leaked(access, Link::to(page.at, page.class)).await?)
    };
    loop {
        match attempt().await {
            Ok(is_leaked) => return Ok(is_leaked.then_some(page)),
            Err(interrupt) => restarts.back_off(worker, interrupt).await?,
        }
    }
}
