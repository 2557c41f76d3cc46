//! The write-ahead log of a cached owner: what it has changed in its cache survives its death, or is lost, in whole changes.
//!
//! An owner changes pages in its cache and writes them later, each by one WRITE of the whole page. If it dies, of a split some pages
//! may be written and others not, and one may be half-written. So it writes to a log first: *batches* of records, each about one
//! page at one version:
//!
//! - an *image*: all its words;
//! - *words*: those that a change of this page alone has set, where each change is recorded;
//! - *freed*: the page is free from this version on.
//!
//! # What is recorded
//! A change of several pages is recorded with images of all of them, before its local locks are given back. A change of one page is
//! not, unless the owner is asked for that: what it did is lost with the cache. Before a page is written back its image is recorded, too,
//! so that a half-written page can be written again. Then:
//!
//! 1. **A batch counts as a whole or not at all**: a sum over each of its parts says whether it arrived.
//! 2. **One batch at a time is on its way.** So whoever finds one knows that all before it had arrived; some of those are done with.
//!    What is recorded meanwhile makes the next batch: one WRITE for all changes in flight.
//!    `write_ahead/arrivals.rs` and `lead.rs` say who writes it, and who is woken then.
//! 3. **A page is written, or freed in remote memory, once its newest record has arrived**, and with it every record made before.
//!    What a page's image shows of other pages' changes was recorded before that image was taken, under the locks of those changes.
//!
//! 4. **A page that others share is not written, nor unlocked, before the batch of its change has arrived.** Its record is marked as shared:
//!    it counts only while the owner still holds the page at the version before, or the page is new and still free. Later, others may
//!    have changed it. Who meets a lock of a dead owner replays its logs ([`redo`](crate::redo)).
//!
//! Whatever arrived last, the images in the log and the pages that are not in it make a state in which every recorded change is whole:
//! the newest image of a page shows all changes of it in this and earlier batches.
//!
//! # Room
//! Batches are written to *segments*, which are [rings](crate::redo) of the compute server, wherever there is room, and so are found
//! through its slot. A record is *done with* when the page is in remote memory at that version or a later one, or a later image of it
//! has arrived. A segment is used again when all its batches are done with. When many are in use, the owner writes the pages back
//! that the oldest are about ([`Log::oldest_pages`]), which records them anew; it does not wait for room while there is memory.
//!
//! To write pages back takes room in the log, too, so some segments are kept empty. A change is made once it is *admitted*
//! ([`Log::admit`], in `write_ahead/reserve.rs`): there are segments for it, for all that is admitted, pending, or on its way without a place,
//! and some for images. So what is pending can always be written. Where memory is full, soon no more changes are admitted: what is left is for
//! images, which make older records done with, and so all but themselves.
//!
//! # Replay
//! Whoever finds the owner dead, or is about to own what it owned, takes for each page that the log names its newest record (and the
//! words recorded after an image), and makes the page so, if the page's version is not newer. It is done like a repair: with
//! a record of its own, under the page's remote lock, at a version *beyond* the record's. So:
//!
//! - what is replayed once is not replayed again, however late another one comes who has read the log before: the page's
//!   version is beyond the record, or its compare-and-swap fails;
//! - who dies of it leaves a lock that others finish.
//!
//! Records of done batches that are still there do no harm: their pages are at that version or a later one, and to write a page's
//! image again changes nothing while nobody else owns it. An owner that gives up in order writes everything back and wipes its
//! segments first ([`Log::wipe`]); one that gives up a part of it writes that back, and [turns its log over](Log::turn_over): the
//! segments that there are get no more records, the pages that they are about are written, and they are wiped. Of one that drops its cache without, its compute server replays the log, before the
//! partition map says that it owns nothing, and wipes it then.
//!
//! A dead owner's pages are those that its log and its pages say; free pages that it held are taken back after replay, for a new
//! page of a recorded change is marked free in remote memory until it is written.

mod arrivals;
mod dropped;
mod lead;
mod pending;
mod reserve;
mod space;

use std::sync::Arc as StdArc;

use smallvec::SmallVec;

pub use self::{
    arrivals::Arrivals,
    reserve::{Admitted, Reserve, Shortening},
};
#[doc(hidden)]
pub use self::{
    arrivals::{Group, Line},
    reserve::{ADMITTED_WORDS, Admission, Blocked, RESERVE, RESERVED_WORDS},
};
use self::{
    lead::{Lead, Taken},
    pending::Pending,
    space::{Held, Space},
};
pub use crate::redo::{PageRecord, Recorded, WordRun};
use crate::{
    error::Error,
    fabric,
    layout::CHUNK_BYTES,
    lock::OwnerId,
    page::StructureId,
    ptr::{Link, RemotePtr, ServerId},
    recovery::wipe,
    redo::{RING_CLASS, seal_batch, words_of},
    remote::write_words,
    sync::{Arc, AtomicU64, Mutex, MutexGuard, Ordering, lock},
    tenure::Tenure,
    worker::Handle,
};

/// Segments that a log uses before pages are written back to have fewer, at least: 1 MiB of them.
const SEGMENTS: usize = 64;
/// One part in so many of all memory is for a log, at most.
const MEMORY_SHARE: u64 = 16;
/// Batches that one worker writes before another one does, if both wait.
const LED_MAX: usize = 8;
/// About as many words are written though nobody waits for them.
const PENDING_WORDS_MAX: usize = 4 * RING_CLASS.words();

/// The log of what one cache owns; shared by all workers that use the cache.
#[derive(Debug, Clone)]
pub struct Log(StdArc<Inner>);

#[derive(Debug)]
struct Inner {
    // In this order: while it has the tenure, the log lives.
    life: Life,
    tenure: StdArc<Tenure>,
    structure: StructureId,
    segments_max: usize,
    /// All batches up to this one have arrived.
    arrived: AtomicU64,
    /// Batches that were not written.
    failures: AtomicU64,
    /// Whether there may be [chores](Log::chores).
    has_chores: AtomicU64,
    /// What there has to be room for. What is pending is in the state, and what is empty in the room.
    admission: Admission,
    /// Who waits. Who leads it writes.
    line: Line,
    state: Mutex<State>,
    /// After the state, where both are held.
    room: Mutex<Room>,
}

/// The log's entry among those of the compute server that are in use.
#[derive(Debug)]
struct Life {
    number: u64,
    compute: Arc<crate::shared::Shared>,
}

#[derive(Debug)]
struct State {
    pending: Pending,
    /// Memory for the next ones.
    spare: Pending,
    /// The number of the batch that they make.
    next: u64,
    failure: Option<Failure>,
    /// Why a page of which it says something never gets to remote memory.
    stuck: Option<Failure>,
}

/// Where batches are. Apart from what is recorded, which each change has to do with.
#[derive(Debug, Default)]
struct Room {
    space: Space,
    /// What is [turned over](Log::turn_over) just now.
    past: Space,
    /// Somebody writes pages back for it.
    is_shortened: bool,
    is_wiped: bool,
}

impl Room {
    fn spaces(&mut self) -> [&mut Space; 2] {
        [&mut self.past, &mut self.space]
    }
}

/// What a log is in need of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chores {
    /// So much is pending that it should be written, whether or not somebody waits for it.
    pub is_due: bool,
    /// Pages should be written back that [old records](Log::oldest_pages) are about: somebody should [shorten](Log::shorten) it.
    pub shorten: bool,
}

/// Why a batch was not written, for all who wait for it.
#[derive(Debug)]
enum Failure {
    ServerLost { server: ServerId, address: String, why: String },
    TakenForDead(OwnerId),
    Other(String),
}

impl Failure {
    fn error(&self) -> Error {
        match self {
            Self::ServerLost { server, address, why } => {
                fabric::Error::ServerLost { server: *server, address: address.clone(), why: why.clone() }.into()
            }
            &Self::TakenForDead(owner) => fabric::Error::TakenForDead { owner }.into(),
            Self::Other(why) => Error::NotRecorded { why: why.clone() },
        }
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        match error {
            Error::Fabric(fabric::Error::ServerLost { server, address, why }) => {
                Self::ServerLost { server: *server, address: address.clone(), why: why.clone() }
            }
            Error::Fabric(fabric::Error::TakenForDead { owner }) => Self::TakenForDead(*owner),
            Error::NotRecorded { why } => Self::Other(why.clone()),
            error => Self::Other(error.to_string()),
        }
    }
}

impl Log {
    /// An empty log for what `tenure` is for. Once it takes more than `bytes`, pages are written back for its sake: 1 MiB or more, and
    /// no more than a sixteenth of the cluster's memory.
    pub fn new(
        worker: &Handle,
        structure: StructureId,
        tenure: StdArc<Tenure>,
        bytes: usize,
        mut reserve: Reserve,
    ) -> Self {
        let compute = Arc::clone(worker.compute());
        let number = compute.next_sequence();
        lock(&compute.logs).insert(number);
        let state =
            State { pending: Pending::default(), spare: Pending::default(), next: 1, failure: None, stuck: None };
        let memory: u64 = compute.geometry.iter().map(|geometry| geometry.chunks * CHUNK_BYTES).sum();
        let bytes = (bytes as u64).min(memory / MEMORY_SHARE) as usize;
        let segments_max = SEGMENTS.max(bytes / RING_CLASS.bytes());
        let life = Life { number, compute };
        let [arrived, failures, has_chores] = [0; 3].map(AtomicU64::new);
        let mut room = Room::default();
        std::mem::take(&mut reserve.segments).into_iter().for_each(|segment| room.space.add(segment));
        let (line, state, room) = (Line::default(), Mutex::new(state), Mutex::new(room));
        Self(StdArc::new(Inner {
            life,
            tenure,
            structure,
            segments_max,
            arrived,
            failures,
            has_chores,
            admission: Admission::default(),
            line,
            state,
            room,
        }))
    }

    /// The right to what the log is about.
    pub fn tenure(&self) -> &StdArc<Tenure> {
        &self.0.tenure
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }

    fn room(&self) -> MutexGuard<'_, Room> {
        lock(&self.0.room)
    }

    /// Adds the records of one change, while its pages are locked locally; the number of the batch in which they will be. Nothing is
    /// written yet.
    pub fn record(&self, records: impl IntoIterator<Item = PageRecord>) -> u64 {
        let mut state = self.state();
        records.into_iter().for_each(|record| state.pending.add(record));
        if state.pending.words > PENDING_WORDS_MAX {
            self.0.has_chores.store(1, Ordering::Relaxed);
        }
        self.0.admission.note_pending(state.pending.words);
        state.next
    }

    /// The batch with the latest of all records.
    pub fn latest(&self) -> u64 {
        let state = self.state();
        if state.pending.records.is_empty() { state.next - 1 } else { state.next }
    }

    /// Adds the image of a page that is about to be written back, unless it is recorded as it is; the number of the batch in which it
    /// will be. Nothing is added if there is much to write already, or no room beside what is admitted.
    ///
    /// # Errors
    /// The batch that has to [arrive](Self::arrival) first; `None` if nothing is pending: then there has to be [room](Self::make_image_room).
    pub fn record_image(&self, page: Link, version: u64, image: &[u64]) -> Result<u64, Option<u64>> {
        let mut state = self.state();
        if state.pending.last(page).is_some_and(|last| last.version == version && last.what.is_whole()) {
            return Ok(state.next);
        }
        let fits = {
            let mut room = self.room();
            if let Some(batch) = room.spaces().into_iter().find_map(|space| space.batch_of(page, version)) {
                return Ok(batch);
            }
            self.0.admission.has_room_for_image(state.pending.words, room.space.empty_count(), image.len())
        };
        if !fits {
            return Err((state.pending.words > 0).then_some(state.next));
        }
        state.pending.add(PageRecord { page, version, is_shared: false, what: Recorded::Image(image.into()) });
        self.0.admission.note_pending(state.pending.words);
        Ok(state.next)
    }

    /// Waits until a batch has arrived, and all before it; has it written if nobody does.
    ///
    /// # Errors
    /// [`Error::NotRecorded`] if it was tried in vain meanwhile, for want of memory; if a memory server is lost. It is tried again
    /// when somebody waits for it again.
    pub async fn arrival(&self, worker: &Handle, batch: u64) -> Result<(), Error> {
        Arrivals::default().arrival(self, worker, batch).await
    }

    /// How many batches were not written.
    fn failures(&self) -> u64 {
        self.0.failures.load(Ordering::Acquire)
    }

    /// Whether a batch has arrived, or one was not written since there were so many failures.
    fn outcome(&self, batch: u64, failures: u64) -> Option<Result<(), Error>> {
        if self.has_arrived(batch) {
            return Some(Ok(()));
        }
        if self.failures() == failures {
            return None;
        }
        self.state().failure.as_ref().map(|failure| Err(failure.error()))
    }

    /// A group waits; batches are written from now on if none was.
    fn note(&self, worker: &Handle, group: &Arc<Group>) {
        if self.0.line.note(group) {
            let lead = Lead::new(self);
            let (writer, group) = (worker.clone(), Arc::clone(group));
            // To its end, whoever waits for it.
            drop(worker.spawn_to_end(async move { lead.write(&writer, &group).await }));
        }
    }

    fn has_arrived(&self, batch: u64) -> bool {
        self.0.arrived.load(Ordering::Acquire) >= batch
    }

    /// Writes what is pending now: the batch of that number, or `None` if it failed.
    async fn write_pending(&self, worker: &Handle) -> Option<u64> {
        let mut taken = Taken::new(self);
        let batch = taken.batch;
        let written = self.write_batch(worker, batch, &taken.pending.records).await;
        let mut pending = std::mem::take(&mut taken.pending);
        for space in self.room().spaces() {
            match written {
                Ok(()) => space.arrived(batch, held(&pending.records)),
                Err(_) => space.failed(batch, held(&pending.records)),
            }
        }
        match written {
            Ok(()) => {
                self.0.arrived.store(batch, Ordering::Release);
                pending.clear();
                self.state().spare = pending;
                Some(batch)
            }
            Err(error) => {
                tracing::warn!(%error, "an owner's log was not written");
                self.put_back(pending, (&error).into());
                None
            }
        }
    }

    /// What was not written goes with the next batch.
    fn put_back(&self, pending: Pending, why: Failure) {
        let state = &mut *self.state();
        state.failure = Some(why);
        self.0.admission.is_placed();
        self.0.failures.fetch_add(1, Ordering::Release);
        let later = std::mem::replace(&mut state.pending, pending);
        later.records.into_iter().for_each(|record| state.pending.add(record));
    }

    async fn write_batch(&self, worker: &Handle, batch: u64, records: &[PageRecord]) -> Result<(), Error> {
        let words = words_of(records);
        let places = loop {
            let needed = self.room().space.needed_for(words);
            let made = self.have_empty(worker, needed + RESERVE).await;
            let space = &mut self.room().space;
            // Only who writes takes any; but the log may have been turned over.
            if space.empty_count() >= space.needed_for(words) {
                let places = space.take(batch, words, held(records));
                self.0.admission.is_placed();
                if space.in_use() > self.0.segments_max {
                    self.0.has_chores.store(1, Ordering::Relaxed);
                }
                if made.is_err() {
                    self.0.admission.set_tight();
                }
                break places;
            }
            made?;
        };
        let sequence = worker.compute().next_sequence();
        let log = (self.0.structure, self.0.life.number);
        let part = |&(at, words)| Ok((at, worker.buffer(words)?));
        let mut parts = places.iter().map(part).collect::<Result<SmallVec<[_; 2]>, Error>>()?;
        seal_batch(log, records, worker.owner(), sequence, &mut parts);
        worker.count_round_trip();
        let posted: SmallVec<[_; 2]> = parts.into_iter().map(|(at, part)| worker.write(at, part)).collect();
        let mut outcome = Ok(());
        // Each to its end: what goes on may not meet what is written next in its place.
        for (number, posted) in posted.into_iter().enumerate() {
            if let Err(error) = posted.await {
                let mut parts: Vec<_> = places.iter().map(|&(at, words)| (at, vec![0; words])).collect();
                seal_batch(log, records, worker.owner(), sequence, &mut parts);
                let (at, words) = parts.swap_remove(number);
                outcome = outcome.and(Box::pin(write_again(worker, error, at, words)).await);
            }
        }
        Ok(outcome?)
    }

    /// A page is in remote memory at this version, free or not.
    pub fn is_written(&self, page: Link, version: u64) {
        self.room().spaces().into_iter().for_each(|space| space.written(page, version));
    }

    /// A page of which the log says something could not be written or freed, and nobody tries again: the log has to be replayed, and
    /// cannot be [turned over](Log::turn_over) or [wiped](Log::wipe) any more.
    pub fn is_stuck(&self, why: &Error) {
        self.state().stuck.get_or_insert_with(|| why.into());
    }

    /// What the caller is to have done for the log's sake.
    pub fn chores(&self) -> Chores {
        if self.0.has_chores.load(Ordering::Relaxed) == 0 {
            return Chores { is_due: false, shorten: false };
        }
        let (state, room) = (self.state(), &mut *self.room());
        let is_long = room.space.in_use() > self.0.segments_max;
        let is_full = state.pending.words > PENDING_WORDS_MAX;
        if !is_long && !is_full {
            self.0.has_chores.store(0, Ordering::Relaxed);
        }
        Chores { is_due: is_full && !self.0.line.is_led(), shorten: is_long && !room.is_shortened }
    }

    /// The pages that the older half of the log is about.
    pub fn oldest_pages(&self) -> Vec<Link> {
        self.room().space.oldest()
    }

    /// The oldest batch that is not done with.
    pub fn oldest_batch(&self) -> Option<u64> {
        self.room().space.oldest_batch()
    }

    /// Makes the log say nothing: once all pages are written back, and nobody changes anything any more. Pages that are being freed
    /// are freed by those who do it.
    ///
    /// # Errors
    /// Why the log [is stuck](Log::is_stuck); if a memory server is lost: then it is stuck.
    pub async fn wipe(&self, worker: &Handle) -> Result<(), Error> {
        let mut attempt = 0;
        let segments = loop {
            let pending = {
                let state = self.state();
                if let Some(failure) = &state.stuck {
                    return Err(failure.error());
                }
                let pending = (!state.pending.records.is_empty()).then_some(state.next);
                if pending.is_none() && !self.0.line.is_led() {
                    let room = &mut *self.room();
                    room.is_wiped = true;
                    let spaces = room.spaces().map(std::mem::take);
                    break spaces.into_iter().flat_map(Space::into_rings).collect();
                }
                pending
            };
            match pending {
                Some(batch) => self.arrival(worker, batch).await?,
                None => worker.back_off(attempt).await,
            }
            attempt += 1;
        };
        // From now on nothing can be recorded: who waits for that is told why.
        wipe(worker, segments).await.inspect_err(|error| self.is_stuck(error))
    }

    /// Makes the log say nothing of what has been recorded so far, while changes go on: has the pages written back that it is about, by
    /// `write_back`, and wipes it. Before a region goes to another owner, of which nothing is recorded any more. One at a time.
    ///
    /// # Errors
    /// What `write_back` failed with; why the log [is stuck](Log::is_stuck); if a memory server is lost, or there is no buffer;
    /// [`Error::OutOfMemory`] if there is no memory for the segments that are kept empty.
    pub async fn turn_over(
        &self,
        worker: &Handle,
        write_back: impl AsyncFn(Vec<Link>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            // What was left by one that has failed.
            self.wipe_past(worker, &write_back).await?;
            self.arrival(worker, self.latest()).await?;
            // None of those that there are: what they said before is still in them.
            let count = self.reserve_count(&self.state());
            let mut reserve = Reserve::of(worker, count).await?;
            let (state, room) = (self.state(), &mut *self.room());
            if room.past.segments() == 0 && self.reserve_count(&state) <= reserve.segments.len() {
                room.past = std::mem::take(&mut room.space);
                std::mem::take(&mut reserve.segments).into_iter().for_each(|segment| room.space.add(segment));
                break;
            }
        }
        self.wipe_past(worker, &write_back).await
    }

    async fn wipe_past(
        &self,
        worker: &Handle,
        write_back: &impl AsyncFn(Vec<Link>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut attempt = 0;
        loop {
            let pages = {
                let (state, room) = (self.state(), self.room());
                if room.past.is_done() {
                    break;
                }
                if let Some(failure) = &state.stuck {
                    return Err(failure.error());
                }
                room.past.pages()
            };
            write_back(pages).await?;
            worker.back_off(attempt).await;
            attempt += 1;
        }
        let segments = std::mem::take(&mut self.room().past).into_rings();
        wipe(worker, segments).await
    }
}

/// Writes a part whose WRITE has failed.
async fn write_again(worker: &Handle, error: Box<Error>, at: RemotePtr, words: Vec<u64>) -> Result<(), Box<Error>> {
    worker.before_trying_again(error, &mut 0).await?;
    if let Ok(mut part) = worker.buffer(words.len()) {
        part.copy_from_slice(&words);
        if worker.write_private(at, part).await.is_ok() {
            return Ok(());
        }
    }
    // It can do without buffers.
    let words = words.into_iter().enumerate().map(|(index, word)| (at.word(index), word));
    write_words(worker, words.collect()).await
}

fn held(records: &[PageRecord]) -> impl ExactSizeIterator<Item = Held> {
    records.iter().map(|&PageRecord { page, version, ref what, .. }| Held { page, version, is_whole: what.is_whole() })
}
