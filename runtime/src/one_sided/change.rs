//! One change, from its first lock to its last unlock.
//!
//! 1. Take all buffers that it needs: nothing is refused later. Locally, take the slots of all pages, so that only one change
//!    of this compute server goes remote for a page.
//! 2. Compare-and-swap every page's lock word from the one its copy was read under, all with one doorbell. If any fails,
//!    put the others back as they were (nothing was written, so the version stays) and begin anew.
//! 3. WRITE new pages: the body, then the lock word. Wait: nothing may link to them before they are complete.
//! 4. WRITE the changed words of the locked pages, their checksums among them, and behind them the unlocks, with one
//!    doorbell where the fabric keeps the order; else wait in between. A page that is freed gets only a lock word that
//!    says so. Where the fabric's atomics are not atomic against WRITEs, the unlock is a compare-and-swap.
//! 5. Hand freed pages to the deferred list.
//!
//! A reader meets every page of the change either locked or as it is before or after. From step 2 on the protocol runs to
//! its end: it is a task of the worker, which dropping the caller's future does not touch. [`protocol`](super::protocol) says
//! what becomes of requests that fail.

use super::{
    protocol::{Prepared, lock_all, publish, unlock_unchanged, write_and_unlock},
    views::{Added, Changed, OneSidedViews},
};
use crate::{
    access::Interrupt,
    error::Error,
    fabric::memory::LocalMemory,
    page::SizeClass,
    pages::FreePage,
    worker::{Handle, counters::bump, remote::Remote},
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

    /// Whether the views were left as they were: then there is nothing to write.
    pub(super) fn is_idle(&self) -> bool {
        self.added.is_empty() && self.changed.iter().all(|page| page.dirty.is_empty() && !page.free)
    }

    pub(super) fn of(views: OneSidedViews) -> Self {
        let OneSidedViews { changed, added, .. } = views;
        Self { changed, added }
    }

    /// Sets what goes with the versions after the change.
    pub(super) fn seal(&mut self) {
        self.changed.iter_mut().for_each(Changed::seal);
        self.added.iter_mut().for_each(Added::seal);
    }
}

/// Carries a change out, to its end even if the caller is dropped: run it with [`Handle::spawn_to_end`].
pub(super) async fn carry_out(worker: Handle, mut staged: Staged) -> Result<(), Interrupt> {
    staged.seal();
    let prepared = Prepared::new(&worker, &staged.changed, &staged.added)?;
    let _taken = worker.take_slots(staged.changed.iter().map(|page| page.at)).await;
    // After a wait the pages have probably changed. The compare-and-swaps decide: others' pages can share a slot.
    let mut are_published = false;
    let made = make(&worker, &staged, prepared, &mut are_published).await;
    let Staged { changed, added } = staged;
    match made {
        Ok(false) => {
            bump(&worker.count().lock_conflicts);
            return Err(Interrupt::conflict());
        }
        Err(error) if !are_published => {
            for Added { page, .. } in added {
                page.take_back().await;
            }
            return Err(error.into());
        }
        _ => added.into_iter().for_each(|Added { page, .. }| page.publish()),
    }
    made?;
    worker.compute().pages.retire(changed.iter().filter(|page| page.free).map(freed));
    Ok(())
}

/// Steps 2 to 4; false if a page has changed since it was read.
pub(super) async fn make<R: Remote>(
    remote: &R,
    Staged { changed, added }: &Staged,
    mut prepared: Prepared,
    are_published: &mut bool,
) -> Result<bool, Box<Error>> {
    if !lock_all(remote, changed).await? {
        return Ok(false);
    }
    if let Err(error) = publish(remote, added, &mut prepared).await {
        unlock_unchanged(remote, &changed.iter().collect::<Vec<_>>()).await?;
        return Err(error);
    }
    *are_published = true;
    write_and_unlock(remote, changed, prepared).await.map(|()| true)
}

/// A page that a change has freed.
pub(super) fn freed(page: &Changed) -> FreePage {
    let class = SizeClass::of_bytes(page.image.len() * 8).expect("a page has the size of its class");
    FreePage { at: page.at, class, version: page.lock.next_version() }
}

/// That nobody has changed pages since they were read: one READ of each lock word, in one round trip.
pub(super) async fn require_unchanged(worker: &Handle, pages: &[Changed]) -> Result<(), Interrupt> {
    worker.count_round_trip();
    let posted: Vec<_> = pages.iter().map(|page| worker.read(page.at, 1)).collect();
    let mut is_unchanged = true;
    let mut failure: Option<Box<Error>> = None;
    for (page, posted) in pages.iter().zip(posted) {
        match posted.await {
            Ok(word) => is_unchanged &= word[0] == page.lock.word(),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error.into()),
        None if is_unchanged => Ok(()),
        None => Err(Interrupt::conflict()),
    }
}
