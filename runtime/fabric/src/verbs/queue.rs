//! A connection with its requests: those that are in the queue pair, and those that wait for room.
//!
//! A request is *waiting*, then *posted* (it is in the queue pair, and its buffer belongs to the card), then completed.
//! Requests of a queue pair complete in the order of their posting, so the posted ones form a queue, and a completion names
//! the last of those that are done: one signalled request completes the WRITEs before it.
//!
//! A failed request breaks its connection. Then the queue pair is destroyed, after which the card touches no buffer (if it refuses,
//! its buffers are leaked, and the queue is of no use any more), and
//! *all* that was rung before fails, the waiting ones too: an unlock must never overtake the WRITE that it was rung behind.

use std::collections::VecDeque;

use super::{
    connecting::Connection,
    ib::{Domain, Finished, Memory, PostList, Posting, Remote, Segment, Status},
};
use crate::{
    buffer::LocalKey,
    endpoint::{Completion, Done, Request, Verb},
    error::Error,
    gather::{Gather, Piece},
    hash::avalanche,
    memory::LocalMemory,
    sync::Arc,
};

/// A memory server's region, as its queues gather from it.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) memory: LocalMemory,
    /// The address of its first byte.
    pub(super) address: u64,
    pub(super) key: LocalKey,
    /// Pieces of one WRITE at most.
    pub(super) gather_max: u32,
}

/// Memory of the other side that requests of a queue reach.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    /// The offset, in remote pointers, of its first byte.
    pub(super) first: u64,
    pub(super) bytes: u64,
    pub(super) remote: Remote,
}

#[derive(Debug)]
pub(super) struct RequestQueue {
    // Before what its requests use: without it the card touches nothing any more.
    connection: Option<Connection>,
    /// Which of its completion queue's queues it is.
    number: u16,
    target: Target,
    source: Option<Source>,
    /// Whether the other side sleeps, and is to be woken by [`Verb::Notify`].
    wakes: bool,
    /// Counts connections, so that late completions of an earlier one are known.
    generation: u16,
    /// The card would not let go of a connection: it may still reach what that one's requests name, and `words`.
    is_stuck: bool,
    /// The sequence number of the next request to post; those in `posted` precede it.
    next: u32,
    posted: VecDeque<Request>,
    waiting: VecDeque<Request>,
    /// The last of `posted`, which have not been rung for.
    batch: PostList,
    depth: usize,
    /// Of a sequence number, what says which slot of `words` it has.
    slot_mask: u32,
    /// A word for each posted request: what a WRITE of one word sends; or a hash of its id, then what an atomic brings back.
    words: Memory,
}

/// How a request ended that broke its connection.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) status: Status,
    /// The request that failed, unless it was only flushed with others.
    pub(super) first: Option<Error>,
}

/// Tells completions apart: the queue, its connection, and the request's sequence number.
fn id(queue: u16, generation: u16, sequence: u32) -> u64 {
    u64::from(queue) << 48 | u64::from(generation) << 32 | u64::from(sequence)
}

/// The queue that a completion belongs to.
#[inline]
pub(super) fn queue_of(id: u64) -> usize {
    (id >> 48) as usize
}

impl RequestQueue {
    /// A queue without a connection, for at most `depth` requests at a time in the queue pair.
    pub(super) fn new(domain: &Arc<Domain>, number: u16, depth: u32, target: Target) -> Result<Self, Error> {
        let depth = depth as usize;
        let slots = depth.next_power_of_two();
        Ok(Self {
            connection: None,
            number,
            target,
            source: None,
            wakes: false,
            generation: 0,
            is_stuck: false,
            next: 0,
            posted: VecDeque::with_capacity(depth),
            waiting: VecDeque::new(),
            batch: PostList::with_capacity(depth, 1),
            depth,
            slot_mask: slots as u32 - 1,
            words: Memory::new(domain, slots)?,
        })
    }

    /// The other side has a thread that sleeps until it is notified.
    pub(super) fn waking(mut self) -> Self {
        self.wakes = true;
        self
    }

    /// Its requests gather from this region.
    pub(super) fn gathering_from(mut self, source: Source) -> Self {
        self.batch = PostList::with_capacity(self.depth, source.gather_max as usize);
        self.source = Some(source);
        self
    }

    /// What completions of earlier queues of this number do not have.
    pub(super) fn of_generation(mut self, generation: u16) -> Self {
        self.generation = generation;
        self
    }

    /// Whether it must not be connected any more.
    pub(super) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    pub(super) fn connect(&mut self, connection: Connection) {
        debug_assert!(self.posted.is_empty() && !self.is_stuck);
        self.connection = Some(connection);
    }

    #[inline]
    pub(super) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Whether the other side's memory has the bytes of a request, and this side's what it gathers.
    #[inline]
    pub(super) fn takes(&self, request: &Request) -> bool {
        let Some(first) = request.at.offset().checked_sub(self.target.first) else { return false };
        let end = first.checked_add(request.verb.bytes() as u64);
        first.is_multiple_of(8) && end.is_some_and(|end| end <= self.target.bytes) && self.has_pieces(&request.verb)
    }

    #[inline]
    fn has_pieces(&self, verb: &Verb) -> bool {
        let Verb::Gather(gather) = verb else { return true };
        self.source.as_ref().is_some_and(|source| gather.fits(&source.memory, source.gather_max as usize))
    }

    /// Whether requests wait for room, or for a connection.
    #[inline]
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes a request; [`RequestQueue::ring`] sends it.
    #[inline(always)]
    pub(super) fn push(&mut self, request: Request) {
        // Behind those that wait: requests to one server keep their order.
        if self.connection.is_some() && self.waiting.is_empty() && self.posted.len() < self.depth {
            self.batch(request);
        } else {
            self.waiting.push_back(request);
        }
    }

    /// Builds the request in place.
    #[inline(always)]
    fn batch(&mut self, mut request: Request) {
        let Some(connection) = &self.connection else { unreachable!("requests are batched for a connection") };
        let Target { first, remote, .. } = self.target;
        let remote = Remote { address: remote.address.wrapping_add(request.at.offset() - first), ..remote };
        let sequence = self.next;
        let slot = (sequence & self.slot_mask) as usize;
        let own = Segment { address: self.words.address(slot), bytes: 8, key: self.words.key() };
        let inline_max = connection.queue_pair.inline_bytes();
        let id = id(self.number, self.generation, sequence);
        if let Verb::CompareSwap { .. } | Verb::FetchAdd(_) = request.verb {
            self.words.store(slot, avalanche(id));
        }
        // A WRITE with others behind it in the batch completes with them.
        if !self.batch.is_empty()
            && let Some(last) = self.posted.back()
            && matches!(last.verb, Verb::Write(_) | Verb::Gather(_) | Verb::WriteWord(_) | Verb::Notify(_))
        {
            self.batch.unsignal_last();
        }
        if let (Verb::Gather(gather), Some(source)) = (&mut request.verb, &self.source) {
            self.batch.push(id, Posting::Write(remote), segments(gather, source), false);
            self.posted.push_back(request);
            self.next = sequence.wrapping_add(1);
            return;
        }
        let (posting, segment, may_inline) = match &mut request.verb {
            Verb::Gather(_) => unreachable!("whoever pushes it knows that this side has its pieces"),
            Verb::Read(buffer) => (Posting::Read(remote), segment(buffer.key(), buffer), false),
            Verb::Write(buffer) => (Posting::Write(remote), segment(buffer.key(), buffer), true),
            &mut Verb::WriteWord(word) => {
                self.words.store(slot, word);
                (Posting::Write(remote), own, true)
            }
            &mut Verb::Notify(word) => {
                self.words.store(slot, word);
                (if self.wakes { Posting::WriteNotify(remote) } else { Posting::Write(remote) }, own, true)
            }
            &mut Verb::CompareSwap { expected, new } => (Posting::CompareSwap(remote, expected, new), own, false),
            &mut Verb::FetchAdd(amount) => (Posting::FetchAdd(remote, amount), own, false),
        };
        let inline = may_inline && segment.bytes <= inline_max;
        self.batch.push(id, posting, [segment], inline);
        self.posted.push_back(request);
        self.next = sequence.wrapping_add(1);
    }

    /// Sends what was pushed, with one doorbell. After an error the queue is to be aborted.
    #[inline]
    pub(super) fn ring(&mut self) -> Result<(), Error> {
        if self.batch.is_empty() {
            return Ok(());
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        // SAFETY: every segment is a buffer of a request in `posted`, registered by the endpoint that owns this queue, a piece of
        // the region of `source`, which is registered and mapped for as long as the queue, or a slot
        // of `words` that no other posted request has, because at most `depth` are posted. Requests leave `posted` only
        // when they have completed, or in `abort`, after the queue pair was destroyed; till then nobody else has their buffers.
        unsafe { connection.queue_pair.ring(&mut self.batch) }
    }

    /// Posts waiting requests, as many as there is room for. After an error the queue is to be aborted.
    pub(super) fn post_waiting(&mut self) -> Result<(), Error> {
        if self.connection.is_none() {
            return Ok(());
        }
        while self.posted.len() < self.depth
            && let Some(request) = self.waiting.pop_front()
        {
            self.batch(request);
        }
        self.ring()
    }

    /// Takes a completion. If it is a failure, the queue is to be aborted.
    #[inline]
    pub(super) fn finished(&mut self, finished: Finished, completions: &mut Vec<Completion>) -> Result<(), Failed> {
        let (generation, sequence) = ((finished.id >> 32) as u16, finished.id as u32);
        let first = self.next.wrapping_sub(self.posted.len() as u32);
        let before = sequence.wrapping_sub(first) as usize;
        if generation != self.generation || before >= self.posted.len() {
            return Ok(());
        }
        let is_atomic = matches!(self.posted[before].verb, Verb::CompareSwap { .. } | Verb::FetchAdd(_));
        let slot = (sequence & self.slot_mask) as usize;
        let status = judged(finished, || is_atomic.then(|| self.words.load(slot)));
        if !status.is_success() {
            return Err(self.failed(before, status, completions));
        }
        for offset in 0..=before {
            let slot = (first.wrapping_add(offset as u32) & self.slot_mask) as usize;
            let Some(request) = self.posted.pop_front() else { break };
            let done = match request.verb {
                Verb::Read(buffer) => Done::Read(buffer),
                Verb::Write(_) | Verb::Gather(_) | Verb::WriteWord(_) | Verb::Notify(_) => Done::Written,
                Verb::CompareSwap { .. } | Verb::FetchAdd(_) => Done::Previous(self.words.load(slot)),
            };
            completions.push(Completion { ticket: request.ticket, outcome: Ok(done) });
        }
        Ok(())
    }

    /// The request with `before` others in front of it has failed. Those are done, but were not signalled.
    #[cold]
    fn failed(&mut self, before: usize, status: Status, completions: &mut Vec<Completion>) -> Failed {
        for request in self.posted.drain(..before) {
            // Only WRITEs are not signalled.
            completions.push(Completion { ticket: request.ticket, outcome: Ok(Done::Written) });
        }
        let of =
            |request: &Request| Error::RequestFailed { what: request.verb.name(), at: request.at, why: status.why() };
        Failed { status, first: self.posted.front().filter(|_| !status.is_flushed()).map(of) }
    }

    /// Destroys the queue pair and fails all requests, the first one with an error of its own if there is one. The number of
    /// the other side's queue pair, if there was a connection.
    #[cold]
    pub(super) fn abort(
        &mut self,
        first: Option<Error>,
        error: impl Fn(&Request) -> Error,
        completions: &mut Vec<Completion>,
    ) -> Option<u32> {
        let theirs = self.connection.as_ref().map(Connection::theirs);
        if let Some(connection) = self.connection.take()
            && let Err(error) = connection.queue_pair.destroy()
        {
            tracing::error!(%error, "the card does not let go of buffers; nobody uses them any more");
            self.is_stuck = true;
        }
        // From here on the card touches no buffer that anybody gets.
        let is_stuck = self.is_stuck;
        let leaves = |request: Request| {
            if is_stuck {
                std::mem::forget(request);
            }
        };
        self.batch.clear();
        self.generation = self.generation.wrapping_add(1);
        if let Some(error) = first
            && let Some(request) = self.posted.pop_front()
        {
            completions.push(Completion { ticket: request.ticket, outcome: Err(Box::new(error)) });
            leaves(request);
        }
        for request in self.posted.drain(..).chain(self.waiting.drain(..)) {
            let outcome = Err(Box::new(error(&request)));
            completions.push(Completion { ticket: request.ticket, outcome });
            leaves(request);
        }
        theirs
    }
}

/// How a request ended, if it is an atomic whose word is now this. One that failed has brought nothing, and says itself why.
#[inline]
fn judged(finished: Finished, word: impl FnOnce() -> Option<u64>) -> Status {
    // SoftRoCE takes the acknowledgement of a WRITE that was sent again for that of the atomic behind it.
    if finished.status.is_success() && word() == Some(avalanche(finished.id)) {
        return Status::BAD_RESPONSE;
    }
    finished.status
}

/// A buffer as the card sees it.
fn segment(key: LocalKey, words: &mut [u64]) -> Segment {
    Segment { address: words.as_mut_ptr().expose_provenance() as u64, bytes: size_of_val(words) as u32, key }
}

/// What a gather sends, as the card sees it. All of it is there: see [`RequestQueue::takes`].
fn segments(gather: &mut Gather, source: &Source) -> impl Iterator<Item = Segment> {
    let Segment { address: own, key, .. } = segment(gather.buffer.key(), &mut gather.buffer);
    gather.pieces().iter().map(move |piece| {
        let bytes = piece.words() as u32 * 8;
        match piece {
            Piece::Own(range) => Segment { address: own + range.start as u64 * 8, bytes, key },
            Piece::Region(at, _) => Segment { address: source.address + at.offset(), bytes, key: source.key },
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_atomic_that_failed_says_why_and_one_that_brought_nothing_is_not_done() {
        let id = id(1, 2, 3);
        let ended = |status, word| judged(Finished { id, status }, || word);
        let unchanged = Some(avalanche(id));
        assert_eq!(ended(Status::SUCCESS, unchanged), Status::BAD_RESPONSE);
        assert_eq!(ended(Status::SUCCESS, Some(7)), Status::SUCCESS);
        assert_eq!(ended(Status::SUCCESS, None), Status::SUCCESS);
        assert_eq!(ended(Status::REMOTE_ACCESS, unchanged), Status::REMOTE_ACCESS);
    }
}
