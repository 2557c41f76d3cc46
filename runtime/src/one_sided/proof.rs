//! Reading a page until the copy is proven whole, or there is a reason to stop.
//!
//! A page that is locked is read again; its owner's liveness is asked for first after a few tries, a living one is waited for, for as
//! long as the compute server [waits](crate::compute::ComputeOptions::lock_wait), and what a dead owner has left is finished first ([`redo`](crate::redo)). A copy that is not whole is read again too: somebody is writing, or was. What does
//! not change under an unlocked lock word for many tries and [a while](crate::remote::TORN_WAIT), and does not fit its checksum, is corrupt. A few tries would prove
//! nothing: the owner of a cached page writes it back without a lock, and may be interrupted in the middle. What was proven corrupt is not
//! waited for again while it stays the same.

use super::Proof;
use crate::{
    access::Interrupt,
    buffer::Buffer,
    error::Error,
    fabric::Liveness,
    fabric::memory::LocalMemory,
    lock::{LockState, LockWord, OwnerId},
    page::{self, IDENTITY, Identity, LOCK, SELF, SizeClass, StructureId},
    ptr::RemotePtr,
    redo::Recover,
    remote::{Misfit, Waited, read_lock},
    sync::{Ordering, fence},
    worker::remote::Count,
};

/// READs of a locked page before its owner's liveness is asked for, and between two such questions.
const LOCKED_READS_MAX: u32 = 16;
/// Equal copies in a row that do not fit their checksum, under one unlocked lock word, that prove corruption.
const MISFITS_MAX: u32 = if cfg!(loom) { 2 } else { 256 };
/// So many of these before the time between two READs grows, by so much each.
const TRIES_AT_FIRST: u32 = 16;
const REST_NS: u64 = 1000;

/// A copy of a page, and whether it is proven whole.
#[derive(Debug)]
pub(super) struct RawRead {
    lock: LockWord,
    whole: bool,
    copy: Buffer,
}

impl RawRead {
    /// What one READ has brought.
    pub(super) fn in_one_read(copy: Buffer) -> Self {
        let lock = LockWord::from_word(copy[LOCK]);
        Self { lock, whole: lock.state() == LockState::Unlocked && page::is_whole(&copy), copy }
    }

    /// A copy of whose body it is known that it is whole.
    pub(super) fn known(copy: Buffer) -> Self {
        Self { lock: LockWord::from_word(copy[LOCK]), whole: true, copy }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether a reader that sees this after `earlier` has no sign that anybody writes.
    fn shows_no_change_since(&self, earlier: &Self) -> bool {
        self.lock == earlier.lock && *self.copy == *earlier.copy
    }
}

/// Reads pages of one structure.
#[derive(Debug)]
pub(super) struct Reader<'a, R> {
    pub(super) remote: &'a R,
    pub(super) structure: StructureId,
    pub(super) proof: Proof,
    /// What is read without the fabric.
    pub(super) memory: Option<&'a LocalMemory>,
}

impl<R: Recover> Reader<'_, R> {
    /// Reads the page once.
    pub(super) async fn fetch(&self, at: RemotePtr, class: SizeClass) -> Result<RawRead, Error> {
        if let Some(words) = self.memory.and_then(|memory| memory.words(at, class.words())) {
            let mut copy = self.remote.buffer(words.len())?;
            for (to, from) in copy.iter_mut().zip(words) {
                *to = from.load(Ordering::Relaxed);
            }
            // What is read next is no older.
            fence(Ordering::Acquire);
            return Ok(RawRead::in_one_read(copy));
        }
        self.remote.count(Count::RoundTrip);
        if self.proof == Proof::Checksum {
            return Ok(RawRead::in_one_read(self.remote.read(at, class.words()).await?));
        }
        let before = self.remote.read(at, 1).await?;
        let lock = LockWord::from_word(before[LOCK]);
        if lock.state() != LockState::Unlocked {
            return Ok(RawRead { lock, whole: false, copy: before });
        }
        self.remote.count(Count::RoundTrip);
        let mut copy = self.remote.read(at, class.words()).await?;
        self.remote.count(Count::RoundTrip);
        let after = self.remote.read(at, 1).await?[0];
        // It was read apart from the body.
        copy[LOCK] = lock.word();
        // Who owns a page writes it back without a lock: that shows in the checksum alone.
        Ok(RawRead { lock, whole: after == lock.word() && page::is_whole(&copy), copy })
    }

    /// Accepts what was seen, or reads again until there is something to accept or a reason to stop.
    pub(super) async fn prove(&self, at: RemotePtr, class: SizeClass, mut seen: RawRead) -> Result<Buffer, Interrupt> {
        let (mut locked_reads, mut misfits) = (0, 0);
        let (mut waited, mut torn) = (Waited::default(), Waited::default());
        loop {
            match seen.lock.state() {
                LockState::Free => return Err(self.stale(at, "the page is free")),
                LockState::LockedBy(owner) => {
                    self.remote.count(Count::LockedRead);
                    locked_reads += 1;
                    if locked_reads % LOCKED_READS_MAX == 0 {
                        match self.remote.liveness(owner) {
                            Liveness::Alive => waited.bear(self.remote, at, seen.lock, owner)?,
                            _ => self.recover(at, class, seen.lock, owner).await?,
                        }
                    }
                    self.remote.back_off(locked_reads).await;
                    seen = self.fetch(at, class).await?;
                }
                LockState::Unlocked if seen.whole => return self.accept(at, class, seen),
                LockState::Unlocked => {
                    if self.remote.is_known_corrupt(at, &seen.copy) {
                        return Err(Error::PageCorrupt { page: at }.into());
                    }
                    self.remote.count(Count::TornRead);
                    self.remote.back_off(misfits).await;
                    if misfits > TRIES_AT_FIRST {
                        self.remote.rest(REST_NS * u64::from(misfits.min(MISFITS_MAX))).await;
                    }
                    let again = self.fetch(at, class).await?;
                    if again.shows_no_change_since(&seen) {
                        misfits += 1;
                    } else {
                        (misfits, torn) = (0, Waited::default());
                    }
                    let is_over = self.remote.torn_wait().is_none_or(|wait| torn.is_over(again.lock, wait));
                    // One that fits was locked or changed behind the first look at its lock word.
                    if is_over && misfits + 1 >= MISFITS_MAX && !page::is_whole(&again.copy) {
                        self.remote.note_corrupt(Misfit::of(at, &again.copy));
                        return Err(Error::PageCorrupt { page: at }.into());
                    }
                    seen = again;
                }
            }
        }
    }

    async fn recover(&self, at: RemotePtr, class: SizeClass, lock: LockWord, owner: OwnerId) -> Result<(), Interrupt> {
        // It may have unlocked between our READ and its end.
        if read_lock(self.remote, at).await? == lock {
            self.remote.repair(at, class, lock, owner).await?;
        }
        Ok(())
    }

    /// The copy, if it is a page of the structure.
    pub(super) fn accept(&self, at: RemotePtr, class: SizeClass, seen: RawRead) -> Result<Buffer, Interrupt> {
        let words = seen.copy;
        if words[SELF] != at.raw() {
            return Err(self.stale(at, "the page has another address"));
        }
        match Identity::from_word(words[IDENTITY]) {
            Some(identity) if identity.structure == self.structure && identity.class == class => Ok(words),
            _ => Err(self.stale(at, "the page belongs to another structure, or has another size")),
        }
    }

    pub(super) fn stale(&self, at: RemotePtr, why: &'static str) -> Interrupt {
        self.remote.count(Count::StalePage);
        Interrupt::stale(at, why)
    }
}
