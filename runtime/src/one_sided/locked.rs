//! Pages that stay locked while their change is computed: an owner's, who changes pages that others share together with its own
//! ones, which it has in a cache (DEX, VLDB 2024, section 4).
//!
//! 1. [`OneSided::lock`](super::OneSided::lock): local slots, then the caller is asked whether the locks may go out; then a record that
//!    names them, and behind it a compare-and-swap for each page, all or none.
//! 2. The owner changes its own pages, and computes what becomes of these, without suspending. All of that is one batch of its
//!    [log](crate::write_ahead), which arrives before step 3.
//! 3. [`LockedPages::finish`]: new pages, then the changed words of the old ones, and behind them the unlocks, as in every
//!    [change](super::change). What is not wanted any more is unlocked as it was.
//!
//! If the owner dies before the batch has arrived, nothing was written, and who meets a lock unlocks the page as it was; later, its log
//! is replayed.
//!
//! Locks that are dropped are given back by a task of the worker; and so are those that nobody fetches, because whoever asked for
//! them is not polled: others wait for them.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
};

use super::{
    PageCopy,
    change::{begin, freed},
    pages::{Added, Changed},
    protocol::{ChangeBuffers, finish, lock_all, publish, record_locks, unlock_unchanged, write_and_unlock},
};
use crate::{
    access::Interrupt,
    buffer::Buffer,
    epoch::Pin,
    error::Error,
    local_locks::SlotGuard,
    page::{CHECKSUM, LOCK, SELF},
    pages::NewPage,
    redo::Recording,
    remote::write_words,
    worker::{Handle, counters::bump},
};

/// What becomes of a locked page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum After {
    /// It stays as it is.
    Kept,
    /// It has these words. The framework's among them (lock, self-address, checksum) count for nothing.
    Changed(Box<[u64]>),
    /// It is free.
    Freed,
}

/// So many turns of the worker locks wait to be fetched. Whoever is polled at all fetches them in one or two.
const TURNS_TO_FETCH: u32 = 1000;

/// Pages that this compute server holds the remote locks of, and a guard until all are unlocked.
#[derive(Debug)]
pub struct LockedPages<G: 'static> {
    worker: Handle,
    pages: Vec<Changed>,
    /// Until all are unlocked.
    held: Option<(SlotGuard, Pin, Recording)>,
    guard: Rc<G>,
}

/// Locks that were asked for, until they are fetched.
#[derive(Debug)]
pub(super) struct Offer<G: 'static>(Rc<RefCell<Option<LockedPages<G>>>>);

impl<G> Offer<G> {
    fn new(locked: LockedPages<G>) -> Self {
        let worker = locked.worker.clone();
        let offer = Rc::new(RefCell::new(Some(locked)));
        let offered = Rc::downgrade(&offer);
        let give_back = {
            let worker = worker.clone();
            async move {
                for _ in 0..TURNS_TO_FETCH {
                    if Weak::strong_count(&offered) == 0 {
                        return;
                    }
                    worker.yield_now().await;
                }
                if let Some(locked) = offered.upgrade().and_then(|offer| offer.take()) {
                    bump(&worker.counts().lock_conflicts);
                    tracing::debug!("locks are given back that nobody has fetched");
                    drop(locked);
                }
            }
        };
        drop(worker.spawn_to_end(give_back));
        Self(offer)
    }

    /// `None` if that has taken too long.
    pub(super) fn fetch(self) -> Option<LockedPages<G>> {
        self.0.take()
    }
}

/// Locks pages from the words that their copies were read under. Before the first lock goes out, `enter` is told the words of the pages; it
/// refuses, or gives a guard that is kept until all are unlocked.
pub(super) async fn lock<G: 'static>(
    worker: Handle,
    pages: Vec<PageCopy>,
    enter: impl FnOnce(&mut dyn Iterator<Item = &[u64]>) -> Result<G, Interrupt>,
) -> Result<Option<Offer<G>>, Interrupt> {
    let pin = worker.pin();
    let pages: Vec<Changed> = pages.into_iter().map(Changed::open).collect();
    let mut recording = record_locks(&worker, &pages)?;
    let slots = begin(&worker, Some(&mut recording), &pages).await?;
    let guard = Rc::new(enter(&mut pages.iter().map(|page| &page.image[..]))?);
    if lock_all(&worker, &pages, Some(&mut recording)).await? {
        return Ok(Some(Offer::new(LockedPages { worker, pages, held: Some((slots, pin, recording)), guard })));
    }
    bump(&worker.counts().lock_conflicts);
    Ok(None)
}

impl<G> LockedPages<G> {
    /// What was given on entering.
    pub fn guard(&self) -> &G {
        &self.guard
    }

    /// Ends the change: `after` for each page, in their order, of which those without one are kept; and new pages with their words, which are complete before anything
    /// leads to them. To be run as a task that nobody cuts off.
    ///
    /// # Errors
    /// If a memory server is lost. What is on the others is changed and unlocked then.
    pub async fn finish(mut self, after: Vec<After>, new: Vec<(NewPage, Buffer)>) -> Result<(), Error> {
        let (worker, _held) = (self.worker.clone(), self.held.take());
        let (mut changed, mut kept) = (Vec::new(), Vec::new());
        let after = after.into_iter().chain(std::iter::repeat(After::Kept));
        for (mut page, after) in std::mem::take(&mut self.pages).into_iter().zip(after) {
            match after {
                After::Kept => {
                    kept.push(page);
                    continue;
                }
                After::Freed => page.free = true,
                After::Changed(words) => {
                    let words = words.iter().enumerate().filter(|(index, _)| ![LOCK, SELF, CHECKSUM].contains(index));
                    words.for_each(|(index, &word)| page.set(index, word));
                }
            }
            page.seal();
            changed.push(page);
        }
        let added = |(page, image)| {
            let mut added = Added { page, image };
            added.seal();
            added
        };
        let added: Vec<Added> = new.into_iter().map(added).collect();
        let written = write(&worker, &changed, &added).await;
        let unlocked = unlock_unchanged(&worker, &kept.iter().collect::<Vec<_>>()).await;
        // Whatever came of it: something may lead to them.
        added.into_iter().for_each(|Added { page, .. }| page.publish());
        worker.compute().pages.retire(changed.iter().filter(|page| page.free).map(freed));
        written.and(unlocked).map_err(|error| *error)
    }
}

async fn write(worker: &Handle, changed: &[Changed], added: &[Added]) -> Result<(), Box<Error>> {
    if let Ok(mut prepared) = ChangeBuffers::unrecorded(worker, changed, added) {
        let published = publish(worker, added, &mut prepared).await;
        return published.and(write_and_unlock(worker, changed, prepared).await);
    }
    // No memory for requests: word by word, which takes none.
    let body = |added: &Added| {
        let (at, image) = (added.page.at(), &added.image);
        (LOCK + 1..image.len()).map(|index| (at.word(index), image[index])).collect::<Vec<_>>()
    };
    let mut outcome = write_words(worker, added.iter().flat_map(body).collect()).await;
    let locks = added.iter().map(|added| (added.page.at(), added.image[LOCK])).collect();
    outcome = outcome.and(write_words(worker, locks).await);
    for page in changed {
        outcome = outcome.and(finish(worker, page).await);
    }
    outcome
}

impl<G> Drop for LockedPages<G> {
    fn drop(&mut self) {
        let pages = std::mem::take(&mut self.pages);
        if pages.is_empty() {
            return;
        }
        let (worker, held) = (self.worker.clone(), (self.held.take(), Rc::clone(&self.guard)));
        let unlock = async move {
            if let Err(error) = unlock_unchanged(&worker, &pages.iter().collect::<Vec<_>>()).await {
                tracing::debug!(%error, "a page was not unlocked");
            }
            drop(held);
        };
        drop(self.worker.spawn_to_end(unlock));
    }
}
