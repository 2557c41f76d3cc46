//! A worker's way to one memory server: a queue pair, the requests in it, and those that wait for room.
//!
//! - A request is *waiting*, then *posted* (it is in the queue pair, and its buffer belongs to the card), then completed.
//!   Requests of a queue pair complete in the order of their posting, so the posted ones form a queue, and a completion
//!   names the last of those that are done: one signalled request completes the WRITEs before it.
//! - A failed request breaks its connection; so do the loss of the control connection and a refused post. Then the queue
//!   pair is destroyed, after which the card touches no buffer, and *all* that was rung before fails, the waiting ones
//!   too: an unlock must never overtake the WRITE that it was rung behind. What is rung after that goes to a new
//!   connection, which the memory server makes only after it has destroyed its end of the old one, so that nothing late
//!   arrives.
//! - A lost control connection is for good: the memory server has destroyed the queue pairs and counts the compute server
//!   as dead.

use std::collections::VecDeque;

use super::{
    connecting::{Connecting, Connection},
    control::Question,
    endpoint::Setup,
    ib::{Access, Finished, Memory, Piece, PostList, Posting, Remote, Status},
    session::{Awaited, Session},
};
use crate::{
    error::Error,
    fabric::{Completion, Done, LocalKey, Request, Verb},
    ptr::{RemotePtr, ServerId},
    sync::Arc,
};

#[derive(Debug)]
pub(super) struct Link {
    number: u16,
    session: Arc<Session>,
    /// The region, as the session's welcome describes it.
    region: Remote,
    region_bytes: u64,
    state: State,
    /// Counts connections, so that late completions of an earlier one are known.
    generation: u16,
    /// The sequence number of the next request to post; those in `posted` precede it.
    next: u32,
    posted: VecDeque<Request>,
    waiting: VecDeque<Request>,
    batch: PostList,
    /// How many of `posted` are in `batch`.
    batched: usize,
    depth: usize,
    /// Of a sequence number, what says which slot of `words` it has.
    slot_mask: u32,
    /// A word for each posted request: what an atomic brings back, or what a WRITE of one word sends.
    words: Memory,
}

#[derive(Debug)]
enum State {
    Up(Connection),
    Connecting(Connecting),
    /// For good.
    Down(Cause),
}

/// Why requests failed that did nothing wrong.
#[derive(Debug, Clone)]
enum Cause {
    Lost { address: String, why: String },
    Broken(String),
}

impl Cause {
    fn of(error: Error) -> Self {
        match error {
            Error::ServerLost { address, why, .. } => Self::Lost { address, why },
            error => Self::Broken(error.to_string()),
        }
    }

    fn error(&self, server: ServerId, request: &Request) -> Error {
        match self {
            Self::Lost { address, why } => Error::ServerLost { server, address: address.clone(), why: why.clone() },
            Self::Broken(why) => Error::Fabric { what: request.verb.name(), at: request.at, why: why.clone() },
        }
    }
}

/// Tells completions apart: the link, its connection, and the request's sequence number.
fn id(link: u16, generation: u16, sequence: u32) -> u64 {
    u64::from(link) << 48 | u64::from(generation) << 32 | u64::from(sequence)
}

/// The link that a completion belongs to.
#[inline]
pub(super) fn link_of(id: u64) -> usize {
    (id >> 48) as usize
}

impl Link {
    /// Asks the memory server for a connection; [`Link::finish`] waits for it.
    pub(super) fn begin(number: u16, session: Arc<Session>, setup: &Setup) -> Result<Self, Error> {
        let depth = setup.depth as usize;
        let slots = depth.next_power_of_two();
        let words = Memory::new(&setup.domain, slots, Access::Local)?;
        let welcome = session.welcome();
        let mut link = Self {
            number,
            region: Remote { address: welcome.address, key: welcome.key },
            region_bytes: welcome.bytes,
            session,
            state: State::Down(Cause::Broken("it was never connected".into())),
            generation: 0,
            next: 0,
            posted: VecDeque::with_capacity(depth),
            waiting: VecDeque::new(),
            batch: PostList::with_capacity(depth),
            batched: 0,
            depth,
            slot_mask: slots as u32 - 1,
            words,
        };
        link.ask_to_connect(setup, None)?;
        Ok(link)
    }

    /// Waits for the memory server's end. Blocks.
    pub(super) fn finish(&mut self, setup: &Setup) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, State::Down(Cause::Broken("it was not connected".into()))) {
            State::Connecting(connecting) => self.state = State::Up(connecting.wait(setup, &self.session)?),
            other => self.state = other,
        }
        Ok(())
    }

    fn ask_to_connect(&mut self, setup: &Setup, instead_of: Option<u32>) -> Result<(), Error> {
        self.state = State::Connecting(Connecting::begin(setup, &self.session, instead_of)?);
        Ok(())
    }

    /// Whether the region of this memory server has these bytes.
    #[inline]
    pub(super) fn holds(&self, at: RemotePtr, bytes: usize) -> bool {
        let end = at.offset().checked_add(bytes as u64);
        at.offset().is_multiple_of(8) && end.is_some_and(|end| end <= self.region_bytes)
    }

    /// Whether there is nothing to do but to wait for completions.
    #[inline]
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.state, State::Up(_)) && self.waiting.is_empty()
    }

    /// Takes a request; [`Link::ring`] sends it.
    #[inline]
    pub(super) fn push(&mut self, request: Request) {
        // Behind those that wait: requests to one server keep their order.
        if self.is_settled() && self.posted.len() < self.depth {
            self.batch(request);
        } else {
            self.waiting.push_back(request);
        }
    }

    /// Builds the request in place.
    #[inline]
    fn batch(&mut self, mut request: Request) {
        let State::Up(connection) = &self.state else { unreachable!("requests are batched for a connection") };
        let remote = Remote { address: self.region.address.wrapping_add(request.at.offset()), ..self.region };
        let sequence = self.next;
        let slot = (sequence & self.slot_mask) as usize;
        let own = Piece { address: self.words.address(slot), bytes: 8, key: self.words.key() };
        let inline_max = connection.queue_pair.inline_bytes();
        let (posting, piece, may_inline) = match &mut request.verb {
            Verb::Read(buffer) => (Posting::Read(remote), piece(buffer.key(), buffer), false),
            Verb::Write(buffer) => (Posting::Write(remote), piece(buffer.key(), buffer), true),
            &mut (Verb::WriteWord(word) | Verb::Notify(word)) => {
                self.words.store(slot, word);
                (Posting::Write(remote), own, true)
            }
            &mut Verb::CompareSwap { expected, new } => (Posting::CompareSwap(remote, expected, new), own, false),
            &mut Verb::FetchAdd(amount) => (Posting::FetchAdd(remote, amount), own, false),
        };
        // A WRITE with others behind it in the batch completes with them.
        if self.batched > 0
            && let Some(last) = self.posted.back()
            && matches!(last.verb, Verb::Write(_) | Verb::WriteWord(_) | Verb::Notify(_))
        {
            self.batch.unsignal_last();
        }
        let inline = may_inline && piece.bytes <= inline_max;
        self.batch.push(id(self.number, self.generation, sequence), posting, piece, inline);
        self.posted.push_back(request);
        self.batched += 1;
        self.next = sequence.wrapping_add(1);
    }

    /// Sends what was pushed, with one doorbell.
    #[inline]
    pub(super) fn ring(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        if self.batch.is_empty() {
            return;
        }
        let State::Up(connection) = &self.state else { return };
        self.batched = 0;
        // SAFETY: every piece is a buffer of a request in `posted`, registered by this worker's endpoint, or a slot of
        // `words` that no other posted request has, because at most `depth` are posted. Requests leave `posted` only when
        // they have completed, or after the queue pair was destroyed; till then nobody else has their buffers.
        let rung = unsafe { self.batch.post(&connection.queue_pair) };
        if let Err(error) = rung {
            self.break_off(setup, Cause::Broken(error.to_string()), completions);
        }
    }

    /// Posts waiting requests, as many as there is room for.
    fn post_waiting(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        if !matches!(self.state, State::Up(_)) {
            return;
        }
        while self.posted.len() < self.depth
            && let Some(request) = self.waiting.pop_front()
        {
            self.batch(request);
        }
        self.ring(setup, completions);
    }

    /// Takes a completion of this link's.
    #[inline]
    pub(super) fn finished(&mut self, setup: &Setup, finished: Finished, completions: &mut Vec<Completion>) {
        let (generation, sequence) = ((finished.id >> 32) as u16, finished.id as u32);
        let first = self.next.wrapping_sub(self.posted.len() as u32);
        let before = sequence.wrapping_sub(first) as usize;
        if generation != self.generation || before >= self.posted.len() {
            return;
        }
        if !finished.status.is_success() {
            self.failed(setup, before, finished.status, completions);
            return;
        }
        for offset in 0..=before {
            let slot = (first.wrapping_add(offset as u32) & self.slot_mask) as usize;
            let Some(request) = self.posted.pop_front() else { return };
            let done = match request.verb {
                Verb::Read(buffer) => Done::Read(buffer),
                Verb::Write(_) | Verb::WriteWord(_) | Verb::Notify(_) => Done::Written,
                Verb::CompareSwap { .. } | Verb::FetchAdd(_) => Done::Previous(self.words.load(slot)),
            };
            completions.push(Completion { ticket: request.ticket, outcome: Ok(done) });
        }
    }

    /// The request with `before` others in front of it has failed. Those are done, but were not signalled.
    #[cold]
    fn failed(&mut self, setup: &Setup, before: usize, status: Status, completions: &mut Vec<Completion>) {
        for request in self.posted.drain(..before) {
            // Only WRITEs are not signalled.
            completions.push(Completion { ticket: request.ticket, outcome: Ok(Done::Written) });
        }
        // If the server has gone, its control connection tells it better than the card does.
        if let Some(lost) = self.session.lost() {
            return self.break_off(setup, Cause::of(lost), completions);
        }
        let why = status.why();
        if let Some(request) = self.posted.front()
            && !status.is_flushed()
        {
            let error = Error::Fabric { what: request.verb.name(), at: request.at, why: why.clone() };
            tracing::debug!(server = %self.session.server(), %error, "a connection breaks");
            self.break_off_with(
                setup,
                Some(error),
                Cause::Broken(format!("an earlier request failed: {why}")),
                completions,
            );
        } else {
            self.break_off(setup, Cause::Broken(why), completions);
        }
    }

    /// Looks after what does not come as a completion: a connection that is being made, room for waiting requests.
    pub(super) fn tend(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        let down = State::Down(Cause::Broken("it could not be connected".into()));
        match std::mem::replace(&mut self.state, down) {
            State::Connecting(connecting) => match connecting.try_finish(setup, &self.session) {
                Ok(Ok(connection)) => self.state = State::Up(connection),
                Ok(Err(error)) => return self.give_up(Cause::of(error), completions),
                Err(connecting) => self.state = State::Connecting(connecting),
            },
            other => self.state = other,
        }
        if let State::Down(cause) = &self.state {
            let cause = cause.clone();
            return self.give_up(cause, completions);
        }
        if !self.waiting.is_empty() {
            self.post_waiting(setup, completions);
        }
    }

    /// Ends the connection if the control connection is lost.
    pub(super) fn check_control(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        if !matches!(self.state, State::Down(_))
            && let Some(lost) = self.session.lost()
        {
            self.break_off(setup, Cause::of(lost), completions);
        }
    }

    fn break_off(&mut self, setup: &Setup, cause: Cause, completions: &mut Vec<Completion>) {
        self.break_off_with(setup, None, cause, completions);
    }

    /// Destroys the queue pair and fails all requests, the first one with an error of its own; then connects anew, if
    /// there is somebody to connect to.
    fn break_off_with(&mut self, setup: &Setup, first: Option<Error>, cause: Cause, completions: &mut Vec<Completion>) {
        let down = State::Down(cause.clone());
        let theirs = match std::mem::replace(&mut self.state, down) {
            State::Up(connection) => Some(connection.destroy()),
            State::Connecting(_) | State::Down(_) => None,
        };
        self.batch.clear();
        self.batched = 0;
        self.generation = self.generation.wrapping_add(1);
        if let Some(error) = first
            && let Some(request) = self.posted.pop_front()
        {
            completions.push(Completion { ticket: request.ticket, outcome: Err(Box::new(error)) });
        }
        self.fail_all(&cause, completions);
        if matches!(cause, Cause::Lost { .. }) {
            return;
        }
        if let Err(error) = self.ask_to_connect(setup, theirs) {
            self.state = State::Down(Cause::of(error));
        }
    }

    fn give_up(&mut self, cause: Cause, completions: &mut Vec<Completion>) {
        self.state = State::Down(cause.clone());
        self.fail_all(&cause, completions);
    }

    fn fail_all(&mut self, cause: &Cause, completions: &mut Vec<Completion>) {
        let server = self.session.server();
        for request in self.posted.drain(..).chain(self.waiting.drain(..)) {
            let outcome = Err(Box::new(cause.error(server, &request)));
            completions.push(Completion { ticket: request.ticket, outcome });
        }
    }

    /// Destroys both ends of the connection. The memory server's answer is yet to come: after it, nothing of this link can
    /// take effect any more.
    pub(super) fn close(&mut self, setup: &Setup) -> Option<Awaited> {
        let closed = State::Down(Cause::Broken("the endpoint is gone".into()));
        let connection = match std::mem::replace(&mut self.state, closed) {
            State::Up(connection) => connection,
            State::Connecting(connecting) => connecting.wait(setup, &self.session).ok()?,
            State::Down(_) => return None,
        };
        self.session.ask(&Question::Disconnect(u64::from(connection.destroy()))).ok()
    }
}

/// A buffer as the card sees it.
fn piece(key: LocalKey, words: &mut [u64]) -> Piece {
    Piece { address: words.as_mut_ptr().expose_provenance() as u64, bytes: size_of_val(words) as u32, key }
}
