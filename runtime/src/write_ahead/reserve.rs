//! What a log keeps empty, and who may change anything where memory is full.

use super::{Failure, Log, State};
use crate::{
    error::Error,
    ptr::RemotePtr,
    recovery::{RingUse, another_ring},
    redo::{RING_CLASS, SHARE_WORDS_MAX},
    sync::{Arc, AtomicU64, Ordering, lock},
    worker::Handle,
};
/// Segments that are kept empty, for the time when there is no memory for more.
pub const RESERVE: usize = 16;
/// So much of it is for what is written back; and at most so much is pending when somebody adds to it.
pub const RESERVED_WORDS: usize = RESERVE / 2 * SHARE_WORDS_MAX;

/// Batches take whole segments: the one on its way, and what is pending.
const ROUNDING: usize = 2;
/// While there is memory, so many words are admitted without a look at what is empty.
pub const ADMITTED_WORDS: u64 = RESERVED_WORDS as u64 / 2;

/// Words that there has to be room for in a log, beside those that are pending: how many these are is behind a lock, and how many segments
/// are empty is behind another one.
#[derive(Debug)]
pub struct Admission {
    /// Whether there may be no memory for more segments.
    is_tight: AtomicU64,
    /// Words of changes that are [admitted](Log::admit), and not recorded.
    admitted: AtomicU64,
    /// Words of the batch on its way, until it has a place. Changed with one of the locks held.
    unplaced: AtomicU64,
}

/// Room for what an admitted change records: until that is recorded, and this dropped.
#[derive(Debug)]
#[must_use = "others have the room once it is dropped"]
pub struct Admitted<'a> {
    admission: &'a Admission,
    words: u64,
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        // Release: who adds next and does not count these words sees that room is tight by what they made pending.
        self.admission.admitted.fetch_sub(self.words, Ordering::Release);
    }
}

/// Why a change is not admitted yet.
#[derive(Debug, Clone, Copy)]
pub enum Blocked {
    /// Much is pending.
    Pending,
    /// So many segments are to be empty.
    Full {
        /// So many.
        needed: usize,
    },
}

impl Default for Admission {
    /// Of a log of which it is not known whether there is memory for it.
    fn default() -> Self {
        let [is_tight, admitted, unplaced] = [1, 0, 0].map(AtomicU64::new);
        Self { is_tight, admitted, unplaced }
    }
}

impl Admission {
    /// Whether there was memory for as many segments as are kept empty.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.is_tight.load(Ordering::Relaxed) == 0
    }

    /// Changes are admitted one by one from now on.
    pub fn set_tight(&self) {
        self.is_tight.store(1, Ordering::Relaxed);
    }

    /// Adds to what is admitted: this and all that is. Who admits says first whether room [is tight](Self::has_room), and adds then; who does
    /// not want to wait adds first, and looks then. So of two who add at once the second one sees what the first one did before: it
    /// counts the other's words, or finds that room is tight.
    pub fn hold(&self, words: usize) -> (Admitted<'_>, u64) {
        let words = words as u64;
        let before = self.admitted.fetch_add(words, Ordering::AcqRel);
        (Admitted { admission: self, words }, before + words)
    }

    /// Words that there has to be room for: what is admitted, pending, or on its way without a place.
    fn expected_words(&self, pending: usize) -> usize {
        self.admitted.load(Ordering::Relaxed) as usize + self.unwritten_words(pending)
    }

    /// Segments that there have to be, for so many words more that are pending: for the batch on its way, for what is pending, and for what is
    /// admitted or may be without a look at what is empty.
    fn expected_segments(&self, pending: usize, words: usize) -> usize {
        // As whoever adds does, and in the same order with them: who is not counted here sees that room is tight, if it is here.
        let admitted = self.admitted.fetch_add(0, Ordering::AcqRel);
        let admitted = if self.has_room() { admitted.max(ADMITTED_WORDS) } else { admitted };
        let unplaced = self.unplaced.load(Ordering::Relaxed);
        let batches = [unplaced as usize, pending + words, admitted as usize];
        batches.into_iter().map(|words| words.div_ceil(SHARE_WORDS_MAX)).sum()
    }

    /// Whether an image of so many words may be pending, too, where so many segments are empty. Under both locks: a batch may get its
    /// place just now.
    pub fn has_room_for_image(&self, pending: usize, empty: usize, words: usize) -> bool {
        empty >= self.expected_segments(pending, words) && (pending == 0 || pending + words <= RESERVED_WORDS)
    }

    /// Changes are admitted one by one where much is not written yet. With what is pending locked.
    pub fn note_pending(&self, pending: usize) {
        if self.unwritten_words(pending) > RESERVED_WORDS {
            self.set_tight();
        }
    }

    /// Words that are pending, or on their way without a place.
    fn unwritten_words(&self, pending: usize) -> usize {
        pending + self.unplaced.load(Ordering::Relaxed) as usize
    }

    /// So much is on its way from now on, and no longer pending. With what is pending locked.
    pub fn take(&self, words: usize) {
        self.unplaced.store(words as u64, Ordering::Relaxed);
    }

    /// What is on its way has its place, or is pending again. With what it is counted by instead locked.
    pub fn is_placed(&self) {
        self.unplaced.store(0, Ordering::Relaxed);
    }

    /// [`Self::admit`] for those who do not want to wait; `None` says nothing. Under no lock.
    #[inline]
    pub fn try_admit(&self, words: usize) -> Option<Admitted<'_>> {
        let (admitted, all) = self.hold(words);
        (self.has_room() && all <= ADMITTED_WORDS).then_some(admitted)
    }

    /// Admits a change that records up to so many words, if there is room for that, for what is pending and admitted, and for images. Under
    /// both locks.
    ///
    /// # Errors
    /// What there has to be first.
    pub fn admit(&self, pending: usize, empty: usize, words: usize) -> Result<Admitted<'_>, Blocked> {
        let is_tight = self.unwritten_words(pending) > RESERVED_WORDS || empty < RESERVE;
        self.is_tight.store(is_tight.into(), Ordering::Relaxed);
        if pending > RESERVED_WORDS {
            return Err(Blocked::Pending);
        }
        let (admitted, all) = self.hold(words);
        // Who is alone may take some of what is for images: its own pages need none.
        let for_images = match all == words as u64 {
            true => RESERVED_WORDS.saturating_sub(words),
            false => RESERVED_WORDS,
        };
        let needed = (self.expected_words(pending) + for_images).div_ceil(SHARE_WORDS_MAX) + ROUNDING;
        if needed <= empty { Ok(admitted) } else { Err(Blocked::Full { needed }) }
    }
}

impl Log {
    /// Whether there was memory for as many segments as are kept empty.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.0.admission.has_room()
    }

    /// Whether changes are admitted that are not recorded.
    pub fn has_admitted(&self) -> bool {
        self.0.admission.admitted.load(Ordering::Relaxed) > 0
    }

    /// How many segments are kept empty, for images, what is pending and what is admitted.
    pub(super) fn reserve_count(&self, state: &State) -> usize {
        RESERVE + self.0.admission.expected_words(state.pending.words).div_ceil(SHARE_WORDS_MAX)
    }

    /// [`Self::admit`] for those who do not want to wait; `None` says nothing.
    #[inline]
    pub fn try_admit(&self, words: usize) -> Option<Admitted<'_>> {
        self.0.admission.try_admit(words)
    }

    /// Admits a change that records up to so many words: there is room for that, for what others have pending or are admitted for, and for
    /// images. Makes segments for it; waits for what is pending if that is much. `None` if there is no memory for more: then somebody should
    /// [shorten](Self::shorten) the log.
    ///
    /// # Errors
    /// As [`Self::arrival`].
    pub async fn admit(&self, worker: &Handle, words: usize) -> Result<Option<Admitted<'_>>, Error> {
        loop {
            let (blocked, next) = {
                let (state, room) = (self.state(), self.room());
                match self.0.admission.admit(state.pending.words, room.space.empty_count(), words) {
                    Ok(admitted) => return Ok(Some(admitted)),
                    Err(blocked) => (blocked, state.next),
                }
            };
            match blocked {
                Blocked::Full { needed } => match self.make_empty(worker, needed).await {
                    Err(Error::OutOfMemory { .. } | Error::NotRecorded { .. }) => return Ok(None),
                    made => made?,
                },
                Blocked::Pending => match self.arrival(worker, next).await {
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
        let needed = self.0.admission.expected_segments(self.state().pending.words, words);
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
