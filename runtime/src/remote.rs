//! What protocols on remote memory need of whoever posts their requests.
//!
//! They are written over [`Remote`], so that the same code runs on a worker and in loom models, where each thread has an
//! endpoint and no executor.

use std::{collections::VecDeque, future::Future, time::Duration};

#[cfg(doc)]
use crate::worker::Handle;
use crate::{
    buffer::Buffer,
    error::Error,
    fabric::{Capabilities, Liveness},
    layout::Records,
    lock::{LockWord, OwnerId},
    page::{self, CHECKSUM, LOCK},
    ptr::RemotePtr,
};

/// Looks at a lock before its wait is over, at least.
const LOOKS_MIN: u64 = 8;

/// Who writes a page without its lock may be held up in the middle: by its processor, or by a network that loses packets, which are
/// sent again after tens of milliseconds.
pub(crate) const TORN_WAIT: Duration = Duration::from_millis(250);

/// What a WRITE carries.
#[derive(Debug)]
pub enum Payload {
    /// One word, which travels in the request.
    Word(u64),
    /// A buffer.
    Words(Buffer),
}

/// What protocols count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// See [`Counters::round_trips`](crate::counters::Counters::round_trips).
    RoundTrip,
    /// See [`Counters::locked_reads`](crate::counters::Counters::locked_reads).
    LockedRead,
    /// See [`Counters::torn_reads`](crate::counters::Counters::torn_reads).
    TornRead,
    /// See [`Counters::stale_pages`](crate::counters::Counters::stale_pages).
    StalePage,
}

/// A wait for somebody who holds a lock, or writes without one: who lives, and may have been stopped.
#[derive(Debug, Clone, Copy)]
pub struct LockWait {
    clock_ns: u64,
    limit: Duration,
}

impl LockWait {
    /// A wait of so long at most, at this time.
    pub fn new(clock_ns: u64, limit: Duration) -> Self {
        Self { clock_ns, limit }
    }
}

/// The lock word of a page that somebody waits for, and how long it has been the same.
#[derive(Debug, Default)]
pub(crate) struct Waited {
    lock: Option<LockWord>,
    seen_ns: u64,
    waited_ns: u64,
}

impl Waited {
    /// The page has this lock word; whether it has had it for as long as is waited.
    pub(crate) fn is_over(&mut self, lock: LockWord, LockWait { clock_ns, limit }: LockWait) -> bool {
        if self.lock.replace(lock) != Some(lock) {
            (self.seen_ns, self.waited_ns) = (clock_ns, 0);
        }
        // Whoever was stopped itself has not waited meanwhile.
        let step_max = limit.as_nanos() as u64 / LOOKS_MIN;
        self.waited_ns += (clock_ns.saturating_sub(self.seen_ns)).min(step_max);
        self.seen_ns = clock_ns;
        self.waited_ns >= step_max * LOOKS_MIN
    }

    /// The page is locked by `owner`, who lives; time is counted while its lock word stays the same.
    ///
    /// # Errors
    /// [`Error::OwnerStalled`] if that has been for too long.
    pub(crate) fn bear<R: Remote>(
        &mut self,
        remote: &R,
        page: RemotePtr,
        lock: LockWord,
        owner: OwnerId,
    ) -> Result<(), Box<Error>> {
        match remote.lock_wait() {
            Some(wait) if self.is_over(lock, wait) => {
                Err(Box::new(Error::OwnerStalled { page, owner, waited: wait.limit }))
            }
            _ => Ok(()),
        }
    }
}

/// A copy of a page that is not whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Misfit {
    at: RemotePtr,
    lock: LockWord,
    checksum: u64,
    fitting: u64,
}

impl Misfit {
    pub(crate) fn of(at: RemotePtr, copy: &[u64]) -> Self {
        let lock = LockWord::from_word(copy[LOCK]);
        Self { at, lock, checksum: copy[CHECKSUM], fitting: page::checksum(copy, lock.version()) }
    }
}

/// The corrupt pages that were met last.
#[derive(Debug, Default)]
pub(crate) struct CorruptPages {
    met: VecDeque<Misfit>,
}

impl CorruptPages {
    const MAX: usize = 64;

    pub(crate) fn has(&self, at: RemotePtr, copy: &[u64]) -> bool {
        !self.met.is_empty() && self.met.contains(&Misfit::of(at, copy))
    }

    pub(crate) fn add(&mut self, misfit: Misfit) {
        self.met.truncate(Self::MAX - 1);
        self.met.push_front(misfit);
    }
}

/// Posts requests; [`Handle`] is the one that runs. A request is posted when the function is called, not when its future is
/// polled.
pub trait Remote {
    /// The incarnation that locks are taken for.
    fn owner(&self) -> OwnerId;

    /// What the fabric guarantees.
    fn capabilities(&self) -> Capabilities;

    /// As [`Handle::buffer`].
    ///
    /// # Errors
    /// If the fabric refuses to register more memory.
    fn buffer(&self, words: usize) -> Result<Buffer, Error>;

    /// As [`Handle::read`].
    fn read(&self, at: RemotePtr, words: usize) -> impl Future<Output = Result<Buffer, Box<Error>>>;

    /// Posts a WRITE.
    fn write(&self, at: RemotePtr, payload: Payload) -> impl Future<Output = Result<(), Box<Error>>>;

    /// As [`Handle::compare_swap`].
    fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> impl Future<Output = Result<u64, Box<Error>>>;

    /// As [`Handle::load`].
    fn load(&self, at: RemotePtr) -> impl Future<Output = Result<u64, Box<Error>>>;

    /// As [`Handle::before_trying_again`].
    fn before_trying_again(&self, error: Box<Error>, attempt: &mut u32)
    -> impl Future<Output = Result<(), Box<Error>>>;

    /// As [`Handle::back_off`].
    fn back_off(&self, attempt: u32) -> impl Future<Output = ()>;

    /// Waits for so long; where there is no clock, for others to go on.
    fn rest(&self, _ns: u64) -> impl Future<Output = ()> {
        self.back_off(0)
    }

    /// Whether the compute server with this incarnation still runs.
    fn liveness(&self, owner: OwnerId) -> Liveness;

    /// Which changes are recorded.
    fn records(&self) -> Records {
        Records::All
    }

    /// How long a lock of a living owner is waited for; for ever, if there is no limit.
    fn lock_wait(&self) -> Option<LockWait> {
        None
    }

    /// How long a page is waited for that is not whole and that nobody has locked; not at all, if there is no limit.
    fn torn_wait(&self) -> Option<LockWait> {
        None
    }

    /// Whether this copy, which is not whole, is as one that was [proven](Remote::note_corrupt) corrupt: it has stayed so since.
    fn is_known_corrupt(&self, _at: RemotePtr, _copy: &[u64]) -> bool {
        false
    }

    /// Nobody needs to wait for this copy to change once more.
    fn note_corrupt(&self, _misfit: Misfit) {}

    /// Counts one.
    fn count(&self, _what: Count) {}
}

/// Words that are posted again at a time. A connection that breaks fails all that is under way: where that happens now and then,
/// thousands of requests at once would never all get through.
const AGAIN_MAX: usize = 64;

/// Writes words that nobody else writes, until all are there. Takes no buffers.
///
/// # Errors
/// If a memory server is lost.
pub(crate) async fn write_words<R: Remote>(remote: &R, mut words: Vec<(RemotePtr, u64)>) -> Result<(), Box<Error>> {
    let (mut attempt, mut window) = (0, words.len());
    while !words.is_empty() {
        let later = words.split_off(window.min(words.len()));
        let posted: Vec<_> = words.iter().map(|&(at, word)| remote.write(at, Payload::Word(word))).collect();
        let (mut left, mut failure) = (Vec::new(), None);
        for (&word, posted) in words.iter().zip(posted) {
            if let Err(error) = posted.await {
                left.push(word);
                failure = Some(error);
            }
        }
        words = left;
        words.extend(later);
        if let Some(error) = failure {
            window = AGAIN_MAX;
            remote.before_trying_again(error, &mut attempt).await?;
        }
    }
    Ok(())
}

/// The lock word of a page that may be somebody else's by now, who writes all of it without a lock: looked at by a READ. An atomic may
/// write back what it has found, and so undo the WRITE.
///
/// # Errors
/// If the memory server is lost, or no buffer can be had.
pub(crate) async fn read_lock<R: Remote>(remote: &R, page: RemotePtr) -> Result<LockWord, Box<Error>> {
    Ok(LockWord::from_word(remote.read(page, LOCK + 1).await?[LOCK]))
}

/// As [`claim_word`], and again while the word is `expected`: false says that it is not any more.
///
/// # Errors
/// If the memory server is lost.
pub(crate) async fn take_word<R: Remote>(
    remote: &R,
    at: RemotePtr,
    expected: u64,
    ours: u64,
) -> Result<bool, Box<Error>> {
    while !claim_word(remote, at, expected, ours).await? {
        if remote.load(at).await? != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Replaces a word by one that nobody but the caller writes; false if it is not `expected`, or the request had no effect.
///
/// # Errors
/// If the memory server is lost.
pub(crate) async fn claim_word<R: Remote>(
    remote: &R,
    at: RemotePtr,
    expected: u64,
    ours: u64,
) -> Result<bool, Box<Error>> {
    let swapped = remote.compare_swap(at, expected, ours).await;
    settle_claim(remote, at, swapped, expected, ours).await
}

/// What came of a compare-and-swap from `expected` to a word that nobody but the caller writes.
///
/// # Errors
/// If the memory server is lost.
pub(crate) async fn settle_claim<R: Remote>(
    remote: &R,
    at: RemotePtr,
    swapped: Result<u64, Box<Error>>,
    expected: u64,
    ours: u64,
) -> Result<bool, Box<Error>> {
    match swapped {
        Ok(previous) => Ok(previous == expected),
        Err(error) if error.may_be_tried_again() => Ok(remote.load(at).await? == ours),
        Err(error) => Err(error),
    }
}

/// Replaces a word that nobody but the caller has written, and that others leave alone, by one that is for everybody.
///
/// # Errors
/// If the memory server is lost.
pub(crate) async fn release_word<R: Remote>(
    remote: &R,
    at: RemotePtr,
    ours: u64,
    after: u64,
) -> Result<(), Box<Error>> {
    let mut attempt = 0;
    // Done twice it does nothing: the word is not ours any more.
    while let Err(error) = remote.compare_swap(at, ours, after).await {
        remote.before_trying_again(error, &mut attempt).await?;
    }
    Ok(())
}
