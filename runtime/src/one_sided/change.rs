//! One change, from its first lock to its last unlock.
//!
//! 1. Take all buffers that it needs: nothing is refused later. Locally, take the slots of all pages, so that only one change
//!    of this compute server goes remote for a page.
//! 2. WRITE the [record](crate::redo) of the change, unless it is of one word, and behind it compare-and-swap every page's lock word from the one its
//!    copy was read under, all with one doorbell. If any fails, put the others back as they were (nothing was written, so the
//!    version stays) and begin anew.
//!    READ the lock words of pages that are only relied on, or were not touched: if one is not as it was, put all back.
//! 3. WRITE new pages: the body, then the lock word. Wait: nothing may link to them before they are complete.
//! 4. WRITE the changed words of the locked pages, their checksums among them, and behind them the unlocks, with one
//!    doorbell where the fabric keeps the order; else wait in between. A page that is freed gets only a lock word that
//!    says so. Where the fabric's atomics are not atomic against WRITEs, the unlock is a compare-and-swap.
//! 5. Hand freed pages to the deferred list.
//!
//! A reader meets every page of the change either locked or as it is before or after. From step 2 on the protocol runs to
//! its end: it is a task of the worker, which dropping the caller's future does not touch. [`protocol`](super::protocol) says
//! what becomes of requests that fail.

use futures_util::future::join_all;
use smallvec::SmallVec;

use super::{
    PageCopy,
    pages::{Added, Changed, OneSidedPages},
    protocol::{self, ChangeBuffers, Installed, lock_all, publish, unlock_unchanged, write_and_unlock},
};
use crate::{
    access::Interrupt,
    chunk_classes,
    epoch::Pin,
    error::Error,
    fabric::memory::LocalMemory,
    local_locks::SlotGuard,
    pages::{FreePage, Unlinked, free_owned},
    ptr::{RemotePtr, ServerId},
    recovery::{ensure_rings, take_places},
    redo::{Recording, Recover},
    remote::{Count, Remote},
    sync::{Ordering, fence},
    worker::{Handle, counters::bump},
};

/// A change that is computed and not yet carried out.
#[derive(Debug)]
pub(super) struct PreparedChange {
    /// In the order of their slots: those that were touched.
    pub(super) changed: Vec<Changed>,
    /// With the place among all that each had.
    pub(super) relied_on: Vec<(usize, Changed)>,
    pub(super) added: Vec<Added>,
}

impl PreparedChange {
    /// Whether all its pages are in this memory.
    pub(super) fn is_in(&self, memory: &LocalMemory) -> bool {
        let is_in = |at, words| memory.words(at, words).is_some();
        self.changed.iter().all(|page| is_in(page.at, page.image.len()))
            && self.relied_on.iter().all(|(_, page)| is_in(page.at, 1))
            && self.added.iter().all(|added| is_in(added.page.at(), added.image.len()))
    }

    /// Whether the pages were left as they were: then there is nothing to write.
    pub(super) fn is_idle(&self) -> bool {
        self.added.is_empty() && self.changed.is_empty()
    }

    /// A page that was not touched is only relied on, whatever it was added as: what others have read of it stays good.
    pub(super) fn of(pages: OneSidedPages) -> Self {
        let OneSidedPages { old, added, .. } = pages;
        let (mut changed, mut relied_on) = (Vec::with_capacity(old.len()), Vec::new());
        for (index, (page, _)) in old.into_iter().enumerate() {
            match page.is_touched() {
                true => changed.push(page),
                false => relied_on.push((index, page)),
            }
        }
        Self { changed, relied_on, added }
    }

    /// All pages that were there before.
    pub(super) fn all(&self) -> impl Iterator<Item = &Changed> {
        self.changed.iter().chain(self.relied_on.iter().map(|(_, page)| page))
    }

    /// The pages as the change has left them, in the order of their slots; none for those that were freed.
    pub(super) fn into_pages(self) -> Vec<Option<PageCopy>> {
        let mut pages: Vec<_> = self.changed.into_iter().map(Changed::into_copy).collect();
        for (index, page) in self.relied_on {
            pages.insert(index, page.into_copy());
        }
        pages
    }

    /// Sets what goes with the versions after the change.
    pub(super) fn seal(&mut self) {
        if let ([page], [], []) = (&mut self.changed[..], &self.relied_on[..], &self.added[..]) {
            page.note_if_one_word();
        }
        self.changed.iter_mut().for_each(Changed::seal);
        self.added.iter_mut().for_each(Added::seal);
    }
}

/// Carries a change out, to its end even if the caller is dropped: run it with [`Handle::spawn_to_end`].
pub(super) async fn carry_out(worker: Handle, mut staged: PreparedChange) -> Result<Vec<Option<PageCopy>>, Interrupt> {
    staged.seal();
    let mut prepared = ChangeBuffers::new(&worker, &staged)?;
    let _taken = begin(&worker, prepared.recording.as_mut(), &staged.changed).await?;
    // After a wait the pages have probably changed. The compare-and-swaps decide: others' pages can share a slot.
    let mut are_published = false;
    let made = make(&worker, &staged, prepared, &mut are_published).await;
    let added = std::mem::take(&mut staged.added);
    match made {
        Ok(false) => {
            bump(&worker.counts().lock_conflicts);
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
    worker.compute().pages.retire(staged.changed.iter().filter(|page| page.free).map(freed));
    Ok(staged.into_pages())
}

/// Takes the local slots of pages, and places for the record of their change, if it has one.
///
/// # Errors
/// If it frees what is no page of a chunk, as all pages of structures are; if there is no memory for a ring, or a memory server is lost.
pub(super) async fn begin(
    worker: &Handle,
    recording: Option<&mut Recording>,
    changed: &[Changed],
) -> Result<SlotGuard, Interrupt> {
    for page in changed.iter().filter(|page| page.free) {
        chunk_classes::require(worker, page.at, page.class()).await?;
    }
    let pages = changed.iter().map(|page| page.at);
    let Some(recording) = recording else { return Ok(worker.take_slots(pages).await) };
    let parts = recording.parts();
    let servers: SmallVec<[ServerId; 4]> = recording.servers().collect();
    for &server in &servers {
        ensure_rings(worker, server, parts.len()).await?;
    }
    let taken = worker.take_slots(pages).await;
    let places = take_places(worker, servers.iter().copied(), &parts).await;
    recording.seal(worker, worker.next_sequence(), places);
    Ok(taken)
}

/// Steps 2 to 4; false if a page has changed since it was read.
pub(super) async fn make<R: Remote>(
    remote: &R,
    PreparedChange { changed, relied_on, added }: &PreparedChange,
    mut prepared: ChangeBuffers,
    are_published: &mut bool,
) -> Result<bool, Box<Error>> {
    if !lock_all(remote, changed, prepared.recording.as_mut()).await? {
        prepared.void_record(remote).await?;
        return Ok(false);
    }
    // Under the locks, so that of two changes which rely on each other's pages one sees the other's lock. Over RDMA that follows
    // from the order of completions; where the fabric is this machine's memory, a READ may pass a compare-and-swap.
    if !relied_on.is_empty() {
        fence(Ordering::SeqCst);
    }
    match are_unchanged(remote, relied_on.iter().map(|(_, page)| page)).await {
        Ok(true) => {}
        outcome => {
            unlock_unchanged(remote, &changed.iter().collect::<Vec<_>>()).await?;
            prepared.void_record(remote).await?;
            return outcome;
        }
    }
    if let Err(error) = publish(remote, added, &mut prepared).await {
        unlock_unchanged(remote, &changed.iter().collect::<Vec<_>>()).await?;
        prepared.void_record(remote).await?;
        return Err(error);
    }
    *are_published = true;
    write_and_unlock(remote, changed, prepared).await.map(|()| true)
}

/// Writes new pages and replaces a word that leads to them, to its end even if the caller is dropped. The word, if it was
/// another one than `old`: then the pages are free again. Otherwise those that it has unlinked are free. Nobody waits for either, but the
/// `pin` of the operation lasts until they are, so that [`leaks::free`](crate::leaks::free) does not take them for nobody's.
///
/// If the answer is lost and the word is neither, `reachable` says what readers can come to: either a new page is among that, or
/// one that was to be unlinked. If none of them is, those of them that are not freed in the end by who has unlinked them are nobody's:
/// see [`SharedPages::doubt`](crate::free_pages::SharedPages::doubt). `is_kept` says that nobody replaces `to`.
pub(super) async fn install(
    (worker, pin): (Handle, Pin),
    staged: PreparedChange,
    (word, old, to): (RemotePtr, u64, u64),
    is_kept: bool,
    unlinked: Vec<Unlinked>,
    reachable: impl AsyncFnOnce() -> Result<Option<Vec<RemotePtr>>, Box<Error>>,
) -> Result<Result<(), u64>, Interrupt> {
    let added = staged.added;
    let images = protocol::images(&worker, &added)?;
    let installed = match protocol::install(&worker, &added, images, (word, old, to)).await {
        Ok(Installed::Unknown(found)) if is_kept => Ok(Installed::No(found)),
        Ok(Installed::Unknown(found)) => match reachable().await {
            Ok(Some(pages)) if added.iter().any(|added| pages.contains(&added.page.at())) => Ok(Installed::Yes),
            Ok(Some(pages)) if unlinked.iter().any(|it| pages.contains(&it.at)) => Ok(Installed::No(found)),
            Ok(Some(_)) => {
                let in_doubt = added.iter().map(|added| Unlinked::from(&added.page)).chain(unlinked.iter().copied());
                worker.compute().pages.doubt(in_doubt);
                Err(Error::InstallUnknown { word }.into())
            }
            Ok(None) => Err(Error::InstallUnknown { word }.into()),
            Err(error) => Err(error),
        },
        installed => installed,
    };
    if let Ok(Installed::No(found)) = installed {
        bump(&worker.counts().lock_conflicts);
        if !added.is_empty() {
            // Who looks for leaked pages meets them until they are free, and waits for those that are pinned.
            drop(worker.spawn_to_end(async move {
                for Added { page, .. } in added {
                    page.take_back().await;
                }
                drop(pin);
            }));
        }
        return Ok(Err(found));
    }
    // If it failed, something may lead to them.
    added.into_iter().for_each(|Added { page, .. }| page.publish());
    installed?;
    if !unlinked.is_empty() {
        let free = |Unlinked { at, class, lock }| free_owned(worker.clone(), at, class, lock);
        let freed = join_all(unlinked.into_iter().map(free).collect::<Vec<_>>());
        drop(worker.spawn_to_end(async move {
            for error in freed.await.into_iter().filter_map(Result::err) {
                tracing::debug!(%error, "an unlinked page was not freed");
            }
            drop(pin);
        }));
    }
    Ok(Ok(()))
}

/// A page that a change has freed.
pub(super) fn freed(page: &Changed) -> FreePage {
    FreePage { at: page.at, class: page.class(), version: page.lock.next_version() }
}

/// Whether nobody has changed these pages since they were read: one READ of each lock word, in one round trip.
pub(super) async fn are_unchanged<'a, R: Remote>(
    remote: &R,
    pages: impl Iterator<Item = &'a Changed>,
) -> Result<bool, Box<Error>> {
    let posted: Vec<_> = pages.map(|page| (page, remote.read(page.at, 1))).collect();
    if !posted.is_empty() {
        remote.count(Count::RoundTrip);
    }
    let mut outcome = Ok(true);
    for (page, posted) in posted {
        match posted.await {
            Ok(word) => outcome = outcome.map(|so_far| so_far && word[0] == page.lock.word()),
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}
