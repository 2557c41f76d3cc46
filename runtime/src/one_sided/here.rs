//! A change that a thread of the memory server carries out in its own memory, with the processor's instructions.
//!
//! Only where the fabric's atomics are atomic against those of the processor
//! ([`atomic_against_cpu`](crate::fabric::Capabilities::atomic_against_cpu)), and only if all pages are of this server;
//! otherwise the change goes through the fabric like everybody's. The order is that of [`change`](super::change), whose
//! readers and writers it shares the pages with: the record, locks, new pages, changed words, unlocks. Nothing is waited for in between, so
//! a lock is held for as long as some words take to write.

use super::{
    PageCopy,
    change::{self, PreparedChange, begin},
    pages::{Added, Changed},
    protocol::record,
};
use crate::{
    access::Interrupt,
    counters::bump,
    error::Error,
    fabric::memory::LocalMemory,
    layout::Records,
    lock::OwnerId,
    page::LOCK,
    pages::FreePage,
    ptr::RemotePtr,
    remote::Remote as _,
    sync::{AtomicU64, Ordering, fence},
    worker::Handle,
};

/// Carries a change out. Suspends only while another task of this compute server changes one of its pages.
pub(super) async fn carry_out(
    worker: &Handle,
    memory: &LocalMemory,
    mut staged: PreparedChange,
) -> Result<Vec<Option<PageCopy>>, Interrupt> {
    staged.seal();
    let mut recording = record(worker, &staged.changed, staged.relied_on.len(), &staged.added)?;
    let slots = begin(worker, recording.as_mut(), &staged.changed).await?;
    let parts = recording.as_ref().map(|record| (record.words(worker), record.marks())).unwrap_or_default();
    let outcome = carry_out_now(memory, worker.owner(), staged, &parts);
    // What was found and written there means nothing then.
    if let Some(lost) = memory.lost() {
        return Err(Error::from(lost).into());
    }
    if outcome.is_err() {
        bump(&worker.counts().lock_conflicts);
        if worker.records() == Records::SeveralPages
            && let Some(&(first, _)) = parts.0.first()
            && let Some(words) = memory.words(first, 1)
        {
            // As in `change`: what is recorded of an attempt that has failed is void, before the slots are free.
            words[0].store(0, Ordering::Release);
        }
    }
    drop((recording, slots));
    let (pages, freed) = outcome?;
    worker.compute().pages.retire(freed.into_iter());
    Ok(pages)
}

type After = (Vec<Option<PageCopy>>, Vec<FreePage>);

/// The parts of the record, and its marks.
type Record = (Vec<(RemotePtr, Vec<u64>)>, Vec<(RemotePtr, u64)>);

/// The pages after the change, and those that it has freed. Whoever calls this asks afterwards whether the memory is lost: the outcome
/// means nothing then.
///
/// # Errors
/// If a page has changed since it was read.
pub(super) fn carry_out_now(
    memory: &LocalMemory,
    owner: OwnerId,
    mut staged: PreparedChange,
    (parts, marks): &Record,
) -> Result<After, Interrupt> {
    let added = std::mem::take(&mut staged.added);
    let PreparedChange { changed, relied_on, .. } = &staged;
    // All pages of the change are here, unless the memory is lost by now.
    let words = |at: RemotePtr, count: usize| memory.words(at, count).ok_or_else(Interrupt::conflict);
    let unlock = |pages: &[Changed]| {
        pages.iter().try_for_each(|page| {
            set(&words(page.at, 1)?[0], page.lock.word(), Ordering::Release);
            Ok::<_, Interrupt>(())
        })
    };
    for (at, part) in parts {
        store(words(*at, part.len())?, part);
    }
    for (index, page) in changed.iter().enumerate() {
        let (before, ours) = (page.lock.word(), page.ours(owner).word());
        let lock = &words(page.at, 1)?[0];
        if lives() && lock.compare_exchange(before, ours, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            unlock(&changed[..index])?;
            return Err(Interrupt::conflict());
        }
    }
    if !relied_on.is_empty() {
        // Of two changes that rely on each other's pages one sees the other's lock.
        fence(Ordering::SeqCst);
        for (_, page) in relied_on {
            if words(page.at, 1)?[0].load(Ordering::Acquire) != page.lock.word() {
                unlock(changed)?;
                return Err(Interrupt::conflict());
            }
        }
    }
    // Who sees one of the words below sees the locks too.
    fence(Ordering::Release);
    for &(at, mark) in marks {
        set(&words(at, 1)?[0], mark, Ordering::Release);
    }
    for Added { page, image } in added {
        let words = words(page.at(), image.len())?;
        store(&words[LOCK + 1..], &image[LOCK + 1..]);
        set(&words[LOCK], image[LOCK], Ordering::Release);
        page.publish();
    }
    // Links to the new pages come after them.
    fence(Ordering::Release);
    let mut freed = Vec::new();
    for page in changed {
        let here = words(page.at, page.image.len())?;
        if page.free {
            freed.push(change::freed(page));
            continue;
        }
        for run in page.dirty.runs() {
            store(&here[run.clone()], &page.image[run]);
        }
    }
    for page in changed {
        set(&words(page.at, 1)?[0], page.after(owner).word(), Ordering::Release);
    }
    Ok((staged.into_pages(), freed))
}

fn store(to: &[AtomicU64], from: &[u64]) {
    for (to, &from) in to.iter().zip(from) {
        set(to, from, Ordering::Relaxed);
    }
}

fn set(to: &AtomicU64, word: u64, order: Ordering) {
    if lives() {
        to.store(word, order);
    }
}

/// Whether what the processor does has an effect. In tests it may be [dead](dying).
#[cfg(not(test))]
const fn lives() -> bool {
    true
}
#[cfg(test)]
use dying::lives;

#[cfg(test)]
pub(super) mod dying {
    use std::cell::Cell;

    thread_local! {
        /// Stores and swaps that came, and how many have an effect.
        static CAME: Cell<u64> = const { Cell::new(0) };
        static EFFECTIVE: Cell<u64> = const { Cell::new(u64::MAX) };
    }

    pub(in super::super) fn lives() -> bool {
        let number = CAME.replace(CAME.get() + 1);
        number < EFFECTIVE.get()
    }

    /// Has only so many stores and swaps of `act` an effect. How many there were.
    pub(in super::super) fn dies_after(effective: u64, act: impl FnOnce()) -> u64 {
        CAME.set(0);
        EFFECTIVE.set(effective);
        act();
        EFFECTIVE.set(u64::MAX);
        CAME.get()
    }
}
