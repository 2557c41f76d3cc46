//! What a log keeps empty, and who may change anything where memory is full.

use super::{Failure, Log, State};
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

/// Batches take whole segments: the one on its way, and what is pending.
const ROUNDING: usize = 2;
/// While there is memory, so many words are admitted without a look at what is empty.
const ADMITTED_WORDS: u64 = RESERVED_WORDS as u64 / 2;

/// Room for what an admitted change records: until that is recorded, and this dropped.
#[derive(Debug)]
#[must_use = "others have the room once it is dropped"]
pub struct Admitted<'a> {
    log: &'a Log,
    words: u64,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.log.0.admitted.fetch_sub(self.words, Ordering::Relaxed);
    }
}

impl Log {
    /// Whether there was memory for as many segments as are kept empty.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.0.is_tight.load(Ordering::Relaxed) == 0
    }

    /// Adds to what is admitted: this and all that is. Who admits says first whether room [is tight](Self::has_room), and adds then; who does
    /// not want to wait adds first, and looks then. So of two who add at once the second one sees what the first one did before: it
    /// counts the other's words, or finds that room is tight.
    fn hold(&self, words: usize) -> (Admitted<'_>, u64) {
        let words = words as u64;
        let before = self.0.admitted.fetch_add(words, Ordering::AcqRel);
        (Admitted { log: self, words }, before + words)
    }

    /// Whether changes are admitted that are not recorded.
    pub fn has_admitted(&self) -> bool {
        self.0.admitted.load(Ordering::Relaxed) > 0
    }

    /// Words that there has to be room for: what is admitted, pending, or on its way without a place.
    pub(super) fn expected_words(&self, state: &State) -> usize {
        self.0.admitted.load(Ordering::Relaxed) as usize + self.unwritten_words(state)
    }

    /// Segments that there have to be, for so many words more that are pending: for the batch on its way, for what is pending, and for what is
    /// admitted or may be without a look at what is empty.
    pub(super) fn expected_segments(&self, state: &State, words: usize) -> usize {
        let [admitted, unplaced] = [&self.0.admitted, &self.0.unplaced].map(|words| words.load(Ordering::Relaxed));
        let admitted = if self.has_room() { admitted.max(ADMITTED_WORDS) } else { admitted };
        let batches = [unplaced as usize, state.pending.words + words, admitted as usize];
        batches.into_iter().map(|words| words.div_ceil(SHARE_WORDS_MAX)).sum()
    }

    /// Changes are admitted one by one where much is not written yet.
    pub(super) fn note_tight(&self, state: &State) {
        if self.unwritten_words(state) > RESERVED_WORDS {
            self.0.is_tight.store(1, Ordering::Relaxed);
        }
    }

    /// Words that are pending, or on their way without a place.
    pub(super) fn unwritten_words(&self, state: &State) -> usize {
        state.pending.words + self.0.unplaced.load(Ordering::Relaxed) as usize
    }

    /// [`Self::admit`] for those who do not want to wait; `None` says nothing.
    #[inline]
    pub fn try_admit(&self, words: usize) -> Option<Admitted<'_>> {
        let (admitted, all) = self.hold(words);
        (self.has_room() && all <= ADMITTED_WORDS).then_some(admitted)
    }

    /// Admits a change that records up to so many words: there is room for that, for what others have pending or are admitted for, and for
    /// images. Makes segments for it; waits for what is pending if that is much. `None` if there is no memory for more: then somebody should
    /// [shorten](Self::shorten) the log.
    ///
    /// # Errors
    /// As [`Self::arrival`].
    pub async fn admit(&self, worker: &Handle, words: usize) -> Result<Option<Admitted<'_>>, Error> {
        loop {
            let blocked = {
                let (state, room) = (self.state(), self.room());
                let empty = room.space.empty_count();
                let pending = (state.pending.words > RESERVED_WORDS).then_some(state.next);
                let is_tight = self.unwritten_words(&state) > RESERVED_WORDS || empty < RESERVE;
                self.0.is_tight.store(is_tight.into(), Ordering::Relaxed);
                match pending {
                    Some(batch) => Blocked::Pending(batch),
                    None => {
                        let (admitted, all) = self.hold(words);
                        // Who is alone may take some of what is for images: its own pages need none.
                        let for_images = match all == words as u64 {
                            true => RESERVED_WORDS.saturating_sub(words),
                            false => RESERVED_WORDS,
                        };
                        let needed = (self.expected_words(&state) + for_images).div_ceil(SHARE_WORDS_MAX) + ROUNDING;
                        if needed <= empty {
                            return Ok(Some(admitted));
                        }
                        Blocked::Full { needed }
                    }
                }
            };
            match blocked {
                Blocked::Full { needed } => match self.make_empty(worker, needed).await {
                    Err(Error::OutOfMemory { .. } | Error::NotRecorded { .. }) => return Ok(None),
                    made => made?,
                },
                Blocked::Pending(batch) => match self.arrival(worker, batch).await {
                    // Pages may be written back that are recorded as they are.
                    Err(Error::NotRecorded { .. }) => return Ok(None),
                    arrived => arrived?,
                },
            }
        }
    }

    /// Makes segments for an image of so many words, beside what is pending and admitted.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; if a memory server is lost.
    pub async fn make_image_room(&self, worker: &Handle, words: usize) -> Result<(), Error> {
        let needed = self.expected_segments(&self.state(), words);
        self.make_empty(worker, RESERVE.max(needed)).await
    }

    /// Makes segments until so many are empty.
    async fn make_empty(&self, worker: &Handle, count: usize) -> Result<(), Error> {
        let (log, maker) = (self.clone(), worker.clone());
        worker.spawn_to_end(async move { log.have_empty(&maker, count).await }).await
    }

    /// Makes segments until so many are empty, in a task that nobody cuts off.
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
            let is_wiped = {
                let room = &mut *self.room();
                if !room.is_wiped {
                    room.space.add(segment);
                }
                room.is_wiped
            };
            if is_wiped {
                lock(&worker.compute().idle_rings).push(segment);
                let failure = self.state().stuck.as_ref().map(Failure::error);
                return Err(failure.unwrap_or_else(|| Error::NotRecorded { why: "it is given up".into() }));
            }
        }
    }

    /// The right to write pages back that [old records](Self::oldest_pages) are about, if nobody has it.
    pub fn shorten(&self) -> Option<Shortening> {
        (!std::mem::replace(&mut self.room().is_shortened, true)).then(|| Shortening(self.clone()))
    }
}

/// Why a change is not admitted yet.
enum Blocked {
    /// This batch is large.
    Pending(u64),
    /// So many segments are to be empty.
    Full { needed: usize },
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
        Self::of(worker, RESERVE).await
    }

    /// So many segments.
    pub(super) async fn of(worker: &Handle, count: usize) -> Result<Self, Error> {
        let maker = worker.clone();
        let making = async move {
            let mut made = Self { compute: Arc::clone(maker.compute()), segments: Vec::with_capacity(count) };
            let first = maker.compute().next_sequence() as usize;
            while made.segments.len() < count {
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
