//! What a log keeps empty, and who may change anything where memory is full.

use super::Log;
use crate::{
    error::Error,
    ptr::RemotePtr,
    recovery::{RingUse, another_ring},
    redo::{RING_CLASS, SHARE_WORDS_MAX},
    sync::{Arc, Ordering, lock},
    worker::Handle,
};
/// Segments that are kept empty, for the time when there is no memory for more.
pub(super) const RESERVE: usize = 16;
/// So much of it is for what is written back; and at most so much is pending when somebody adds to it.
pub(super) const RESERVED_WORDS: usize = RESERVE / 2 * SHARE_WORDS_MAX;

impl Log {
    /// Whether a change may be made without being [admitted](Self::admit).
    #[inline]
    pub fn has_room(&self) -> bool {
        self.0.is_tight.load(Ordering::Relaxed) == 0
    }

    /// Whether there is room for what a change records, up to so many words, so that it may be made. Waits for what is pending if that is much. If there is no
    /// room, somebody should [shorten](Self::shorten) the log.
    ///
    /// What is admitted and not recorded yet is not counted; half of the segments is left for that and for images. Where more splits than that wait
    /// for room in the cache at once, batches are not written before there is memory.
    ///
    /// # Errors
    /// As [`Self::arrival`].
    pub async fn admit(&self, worker: &Handle, words: usize) -> Result<bool, Error> {
        loop {
            let pending = {
                let (state, room) = (self.state(), self.room());
                let (more, empty) = (words.max(RESERVED_WORDS), room.space.empty_count());
                let pending = (state.pending.words > RESERVED_WORDS).then_some(state.next);
                self.0.is_tight.store(u64::from(pending.is_some() || empty < RESERVE), Ordering::Relaxed);
                match pending {
                    Some(batch) => batch,
                    None => return Ok(empty * SHARE_WORDS_MAX >= state.pending.words + more),
                }
            };
            match self.arrival(worker, pending).await {
                // Pages may be written back that are recorded as they are.
                Err(Error::NotRecorded { .. }) => return Ok(false),
                arrived => arrived?,
            }
        }
    }

    /// Makes those of the segments that are kept empty of which there are none. Those that are made stay, even if others cannot be.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; if a memory server is lost.
    pub async fn make_reserve(&self, worker: &Handle) -> Result<(), Error> {
        let (log, maker) = (self.clone(), worker.clone());
        worker.spawn_to_end(async move { log.have_empty(&maker, RESERVE).await }).await
    }

    /// Makes segments until so many are empty.
    pub(super) async fn have_empty(&self, worker: &Handle, count: usize) -> Result<(), Error> {
        loop {
            let made = {
                let space = &self.room().space;
                if space.empty_count() >= count {
                    return Ok(());
                }
                space.segments()
            };
            let segment = segment(worker, made.wrapping_add(self.0.life.number as usize)).await?;
            let room = &mut *self.room();
            if room.is_wiped {
                lock(&worker.compute().idle_rings).push(segment);
                return Err(Error::NotRecorded { why: "it is given up".into() });
            }
            room.space.add(segment);
        }
    }

    /// The right to write pages back that [old records](Self::oldest_pages) are about, if nobody has it.
    pub fn shorten(&self) -> Option<Shortening> {
        (!std::mem::replace(&mut self.room().is_shortened, true)).then(|| Shortening(self.clone()))
    }
}

/// The right to [shorten](Log::shorten) a log, until it is dropped.
#[derive(Debug)]
#[must_use = "others shorten the log once it is dropped"]
pub struct Shortening(Log);

impl Drop for Shortening {
    fn drop(&mut self) {
        self.0.room().is_shortened = false;
    }
}

/// The segments that a log keeps empty, before it has them. Dropped, the compute server has them.
#[derive(Debug)]
pub struct Reserve {
    compute: Arc<crate::shared::Shared>,
    pub(super) segments: Vec<RemotePtr>,
}

impl Reserve {
    /// Makes them.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; if a memory server is lost.
    pub async fn make(worker: &Handle) -> Result<Self, Error> {
        let maker = worker.clone();
        let making = async move {
            let mut made = Self { compute: Arc::clone(maker.compute()), segments: Vec::with_capacity(RESERVE) };
            let first = maker.compute().next_sequence() as usize;
            while made.segments.len() < RESERVE {
                made.segments.push(segment(&maker, first.wrapping_add(made.segments.len())).await?);
            }
            Ok(made)
        };
        worker.spawn_to_end(making).await
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        lock(&self.compute.idle_rings).append(&mut self.segments);
    }
}

/// A segment; by their numbers, they are on each memory server in turn.
async fn segment(worker: &Handle, number: usize) -> Result<RemotePtr, Error> {
    // In a box, like all that is rare here: a task is moved, as large as it can get.
    Box::pin(any_ring(worker, number)).await
}

/// A ring on any memory server that has room for one.
async fn any_ring(worker: &Handle, first: usize) -> Result<RemotePtr, Error> {
    let geometry = &worker.compute().geometry;
    let mut servers = geometry.iter().cycle().skip(first % geometry.len()).take(geometry.len()).peekable();
    while let Some(geometry) = servers.next() {
        match another_ring(worker, geometry.server, RingUse::Log).await {
            Err(Error::OutOfMemory { .. }) if servers.peek().is_some() => {}
            ring => return ring,
        }
    }
    Err(Error::OutOfMemory { class: RING_CLASS })
}
