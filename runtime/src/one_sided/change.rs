//! One change, from its first lock to its last unlock.
//!
//! 1. Locally, take the slots of all pages, so that only one change of this compute server goes remote for a page.
//! 2. Compare-and-swap every page's lock word from the one its copy was read under, all with one doorbell. If any fails,
//!    put the others back as they were (nothing was written, so the version stays) and begin anew.
//! 3. WRITE new pages: the body, then the lock word. Wait: nothing may link to them before they are complete.
//! 4. WRITE the changed words of the locked pages, their checksums among them, and behind them the unlocks, with one
//!    doorbell where the fabric keeps the order; else wait in between. A page that is freed gets only a lock word that
//!    says so. Where the fabric's atomics are not atomic against WRITEs, the unlock is a compare-and-swap.
//! 5. Hand freed pages to the limbo.
//!
//! A reader meets every page of the change either locked or as it is before or after. From step 2 on the protocol runs to
//! its end: it is a task of the worker, which dropping the caller's future does not touch.

use super::views::{Added, Changed, OneSidedViews};
use crate::{
    access::Interrupt,
    error::Error,
    lock::LockWord,
    page,
    page::{Identity, SizeClass},
    pages::FreePage,
    server::LocalMemory,
    worker::{Handle, counters::bump, ops::Posted},
};

/// A change that is computed and not yet carried out.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) changed: Vec<Changed>,
    pub(super) added: Vec<Added>,
}

impl Staged {
    /// Whether all its pages are in this memory.
    pub(super) fn is_in(&self, memory: &LocalMemory) -> bool {
        let is_in = |at, words| memory.words(at, words).is_some();
        self.changed.iter().all(|page| is_in(page.at, page.image.len()))
            && self.added.iter().all(|added| is_in(added.page.at(), added.image.len()))
    }

    /// `None` if the views were left as they were: nothing to do, and what was read stands by itself.
    pub(super) fn of(views: OneSidedViews) -> Option<Self> {
        let OneSidedViews { mut changed, added, .. } = views;
        if added.is_empty() && changed.iter().all(|page| page.dirty.is_empty() && !page.free) {
            return None;
        }
        changed.iter_mut().for_each(Changed::seal);
        Some(Self { changed, added })
    }
}

/// Carries a change out, to its end even if the caller is dropped: run it with [`Handle::spawn_to_end`].
pub(super) async fn carry_out(worker: Handle, staged: Staged) -> Result<(), Interrupt> {
    let Staged { changed, added } = staged;
    let locals = &worker.compute().locks;
    let mut attempt = 0;
    let _taken = loop {
        match locals.try_take(changed.iter().map(|page| page.at)) {
            Some(taken) => break taken,
            None if attempt == 0 => bump(&worker.count().local_waits),
            None => {}
        }
        worker.back_off(attempt).await;
        attempt += 1;
    };
    // After a wait the pages have probably changed. The compare-and-swaps decide: others' pages can share a slot.
    lock_all(&worker, &changed).await?;
    publish(&worker, added).await?;
    write_and_unlock(&worker, &changed).await?;
    let freed = changed.iter().filter(|page| page.free).map(|page| FreePage {
        at: page.at,
        class: SizeClass::of_bytes(page.image.len() * 8).expect("a page has the size of its class"),
        version: page.lock.next_version(),
    });
    worker.compute().pages.retire(freed);
    Ok(())
}

async fn lock_all(worker: &Handle, changed: &[Changed]) -> Result<(), Interrupt> {
    if changed.is_empty() {
        return Ok(());
    }
    worker.count_round_trip();
    let ours = |page: &Changed| page.lock.locked_by(worker.owner()).word();
    let requests: Vec<_> =
        changed.iter().map(|page| worker.compare_swap(page.at, page.lock.word(), ours(page))).collect();
    let mut had = Vec::with_capacity(changed.len());
    for (page, request) in changed.iter().zip(requests) {
        had.push(request.await? == page.lock.word());
    }
    if had.iter().all(|&had| had) {
        return Ok(());
    }
    bump(&worker.count().lock_conflicts);
    let to_unlock = changed.iter().zip(had).filter(|&(_, had)| had);
    let unlocks: Vec<_> = to_unlock.map(|(page, _)| Unlock::post(worker, page, page.lock)).collect();
    if !unlocks.is_empty() {
        worker.count_round_trip();
    }
    for unlock in unlocks {
        unlock.complete().await?;
    }
    Err(Interrupt::conflict())
}

/// Writes new pages. Their lock words say *free* until the bodies are there.
async fn publish(worker: &Handle, mut added: Vec<Added>) -> Result<(), Interrupt> {
    if added.is_empty() {
        return Ok(());
    }
    worker.count_round_trip();
    let ordered = worker.capabilities().ordered_writes;
    let mut bodies = Vec::with_capacity(added.len());
    let mut unlocks = Vec::with_capacity(added.len());
    for Added { page, image } in &mut added {
        let version = LockWord::free(page.version()).next_version();
        let identity = Identity::from_word(image[page::IDENTITY]).expect("views describe pages as identities");
        page::seal(image, page.at(), identity, version);
        bodies.push(worker.write_words(page.at().word(1), &image[1..]));
        if ordered {
            unlocks.push(worker.write_word(page.at(), image[page::LOCK]));
        }
    }
    for body in bodies {
        body.await?;
    }
    if !ordered {
        worker.count_round_trip();
        unlocks.extend(added.iter().map(|Added { page, image }| worker.write_word(page.at(), image[page::LOCK])));
    }
    for unlock in unlocks {
        unlock.await?;
    }
    added.into_iter().for_each(|Added { page, .. }| page.publish());
    Ok(())
}

async fn write_and_unlock(worker: &Handle, changed: &[Changed]) -> Result<(), Error> {
    if changed.is_empty() {
        return Ok(());
    }
    worker.count_round_trip();
    let ordered = worker.capabilities().ordered_writes;
    let mut writes = Vec::new();
    let mut unlocks = Vec::with_capacity(changed.len());
    for page in changed {
        if !page.free {
            let runs = page.dirty.runs().into_iter();
            writes.extend(runs.map(|run| worker.write_words(page.at.word(run.start), &page.image[run])));
        }
        if ordered {
            unlocks.push(Unlock::post(worker, page, page.after()));
        }
    }
    for write in writes {
        write.await?;
    }
    if !ordered {
        worker.count_round_trip();
        unlocks.extend(changed.iter().map(|page| Unlock::post(worker, page, page.after())));
    }
    for unlock in unlocks {
        unlock.complete().await?;
    }
    Ok(())
}

/// The request that replaces our lock of a page by another lock word.
enum Unlock {
    Write(Posted<()>),
    Swap(Posted<u64>),
}

impl Unlock {
    fn post(worker: &Handle, page: &Changed, word: LockWord) -> Self {
        if worker.capabilities().atomic_against_writes {
            Self::Write(worker.write_word(page.at, word.word()))
        } else {
            let ours = page.lock.locked_by(worker.owner());
            Self::Swap(worker.compare_swap(page.at, ours.word(), word.word()))
        }
    }

    async fn complete(self) -> Result<(), Error> {
        match self {
            Self::Write(write) => write.await?,
            Self::Swap(swap) => drop(swap.await?),
        }
        Ok(())
    }
}
