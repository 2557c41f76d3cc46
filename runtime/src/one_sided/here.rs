//! A change that a thread of the memory server carries out in its own memory, with the processor's instructions.
//!
//! Only where the fabric's atomics are atomic against those of the processor
//! ([`atomic_against_cpu`](crate::fabric::Capabilities::atomic_against_cpu)), and only if all pages are of this server;
//! otherwise the change goes through the fabric like everybody's. The order is that of [`change`](super::change), whose
//! readers and writers it shares the pages with: locks, new pages, changed words, unlocks. Nothing is waited for in between, so
//! a lock is held for as long as some words take to write.

use super::change::Staged;
use crate::{
    access::Interrupt,
    lock::OwnerId,
    page::{self, Identity, LOCK, SizeClass},
    pages::FreePage,
    ptr::RemotePtr,
    server::LocalMemory,
    sync::{AtomicU64, Ordering, fence},
};

/// Carries a change out; the pages that it has freed.
pub(super) fn carry_out(memory: &LocalMemory, owner: OwnerId, staged: Staged) -> Result<Vec<FreePage>, Interrupt> {
    let Staged { changed, added } = staged;
    let words = |at: RemotePtr, count: usize| memory.words(at, count).expect("all pages of the change are here");
    for (index, page) in changed.iter().enumerate() {
        let (before, ours) = (page.lock.word(), page.lock.locked_by(owner).word());
        let lock = &words(page.at, 1)[0];
        if lock.compare_exchange(before, ours, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            for page in &changed[..index] {
                words(page.at, 1)[0].store(page.lock.word(), Ordering::Release);
            }
            return Err(Interrupt::conflict());
        }
    }
    // Who sees one of the words below sees the locks too.
    fence(Ordering::Release);
    for mut added in added {
        let (at, image) = (added.page.at(), &mut added.image);
        let identity = Identity::from_word(image[page::IDENTITY]).expect("views describe pages as identities");
        page::seal(image, at, identity, added.page.first_lock().version());
        let page = words(at, image.len());
        store(&page[1..], &image[1..]);
        page[LOCK].store(image[LOCK], Ordering::Release);
        added.page.publish();
    }
    // Links to the new pages come after them.
    fence(Ordering::Release);
    let mut freed = Vec::new();
    for page in &changed {
        let here = words(page.at, page.image.len());
        if page.free {
            let class = SizeClass::of_bytes(page.image.len() * 8).expect("a page has the size of its class");
            freed.push(FreePage { at: page.at, class, version: page.lock.next_version() });
            continue;
        }
        for run in page.dirty.runs() {
            store(&here[run.clone()], &page.image[run]);
        }
    }
    for page in &changed {
        words(page.at, 1)[0].store(page.after().word(), Ordering::Release);
    }
    Ok(freed)
}

fn store(to: &[AtomicU64], from: &[u64]) {
    for (to, &from) in to.iter().zip(from) {
        to.store(from, Ordering::Relaxed);
    }
}
