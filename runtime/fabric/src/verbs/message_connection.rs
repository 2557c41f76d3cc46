//! A worker's message connection to a memory server: a queue pair of its own, whose other end is at one of the server's endpoints.
//!
//! It is set up over the control connection. Both sides register memory for each other, with no right but to read and write,
//! and tell address and key. The memory server says nothing on the connection before it knows that this side is ready: what
//! comes before would be lost and sent again. A connection that breaks is not made anew here, but by whoever uses it.

use super::{
    connecting::Connection,
    control::{Answer, Question},
    data_path::Cause,
    endpoint::Setup,
    ib::{Access, Finished},
    opened::Opening,
    queue::{Failed, RequestQueue},
    session::{Awaited, Session},
};
use crate::{
    connection::{ConnectionState, OpenMemory, PeerId},
    endpoint::{Completion, Request},
    error::Error,
    listener::{CONNECTION_BYTES_MAX, CONNECTION_BYTES_MIN},
    ptr::ServerId,
    sync::Arc,
    wire::DecodeError,
};

/// Requests of a message connection in its queue pair; more wait their turn.
pub(super) const MESSAGE_DEPTH: u32 = 64;

#[derive(Debug)]
pub(super) struct MessageConnection {
    // Before the memory that the other side may write to.
    queue: RequestQueue,
    _opening: Opening,
    session: Arc<Session>,
    /// As its endpoint calls the other side.
    server: ServerId,
    /// As the other side calls it.
    name: u64,
    /// Whether the memory server was asked what has become of the connection, and what it said last.
    asked: Option<Awaited>,
    state: ConnectionState,
    states_told: u64,
}

impl MessageConnection {
    /// Opens a connection to whom the endpoint calls `server`, and returns this side's memory of it, too. Blocks.
    pub(super) fn open(
        setup: &Setup,
        (session, server): (&Arc<Session>, ServerId),
        (number, generation): (u16, u16),
        who: PeerId,
    ) -> Result<(Self, OpenMemory), Error> {
        let missing = |why: String| session.missing(why);
        // What memory servers say, all know. A compute server that was told by itself could be sent to in the wrong order.
        if setup.ordered && !session.hello_ack().ordered {
            let why = "it was told that the network may place WRITEs in another order, and this one was not: tell the memory servers";
            return Err(missing(why.into()));
        }
        let possible = CONNECTION_BYTES_MIN as u64..=CONNECTION_BYTES_MAX as u64;
        let bytes = match session.ask(&Question::Listens)?.wait()? {
            Answer::Listens { bytes } if possible.contains(&bytes) => bytes,
            Answer::Refused(why) => return Err(missing(why)),
            _ => return Err(DecodeError("a memory server answered something else than was asked").into()),
        };
        let opening = Opening::new(&setup.domain, bytes as usize)?;
        let queue_pair = setup.queue_pair(MESSAGE_DEPTH)?;
        let (ours, ordered) = (queue_pair.describe(&setup.local), setup.ordered);
        let question = Question::Attach { ours, who, opened: opening.describe(), ordered };
        let (name, theirs, opened) = match session.ask(&question)?.wait()? {
            Answer::Attached { name, theirs, opened } => (name, theirs, opened),
            Answer::Refused(why) => return Err(missing(why)),
            _ => return Err(DecodeError("a memory server answered something else than was asked").into()),
        };
        let connect = || {
            let queue = RequestQueue::new(&setup.domain, number, MESSAGE_DEPTH, opened.target(bytes))?.waking();
            queue_pair.connect(&setup.local, &theirs, Access::Peers, setup.reliability)?;
            let mut queue = queue.of_generation(generation);
            queue.connect(Connection::new(queue_pair, theirs.queue_pair));
            // Nobody waits for the answer.
            session.ask(&Question::AttachReady(name))?;
            Ok::<_, Error>(queue)
        };
        let queue = connect().inspect_err(|_| {
            // It would keep its end, and that one's place, for as long as this process runs.
            let _ = session.ask(&Question::Detach(name, false));
        })?;
        let memory = opening.memory();
        let connection = Self {
            queue,
            _opening: opening,
            session: Arc::clone(session),
            server,
            name,
            asked: None,
            state: ConnectionState::Up,
            states_told: 0,
        };
        Ok((connection, memory))
    }

    /// Whether the other side is lost for good.
    pub(super) fn is_lost(&self) -> bool {
        self.session.is_lost()
    }

    /// Whether a request can be taken: the other side has opened these bytes, and the connection is not broken.
    pub(super) fn takes(&self, request: &Request) -> bool {
        self.queue.is_connected() && self.queue.takes(request)
    }

    pub(super) fn push(&mut self, request: Request) {
        self.queue.push(request);
    }

    pub(super) fn is_idle(&self) -> bool {
        !self.queue.is_waiting()
    }

    pub(super) fn ring(&mut self, completions: &mut Vec<Completion>) {
        if let Err(error) = self.queue.ring() {
            self.abort(None, &Cause::Broken(error.to_string()), completions);
        }
    }

    pub(super) fn finished(&mut self, finished: Finished, completions: &mut Vec<Completion>) {
        if let Err(Failed { status, first }) = self.queue.finished(finished, completions) {
            let why = status.why();
            // Often the other side has closed it on its own account: whoever uses it knows what to make of that.
            tracing::debug!(address = self.session.address(), why, "a message connection breaks");
            let cause = self.session.lost().map_or(Cause::Broken(why), Cause::of);
            self.abort(first, &cause, completions);
        }
    }

    /// Posts what waits for room, and ends with the control connection.
    pub(super) fn drive(&mut self, completions: &mut Vec<Completion>) {
        if let Some(lost) = self.session.lost() {
            self.abort(None, &Cause::of(lost), completions);
        } else if let Err(error) = self.queue.post_waiting() {
            self.abort(None, &Cause::Broken(error.to_string()), completions);
        }
    }

    /// This side's device has failed.
    pub(super) fn give_up(&mut self, why: &str, completions: &mut Vec<Completion>) {
        self.abort(None, &Cause::Broken(why.into()), completions);
    }

    fn abort(&mut self, first: Option<Error>, cause: &Cause, completions: &mut Vec<Completion>) {
        let server = self.server;
        self.queue.abort(first, |request| cause.error(server, request), completions);
    }

    /// What is known of it. Asks the memory server, and does not wait: its answer is what the next call returns.
    pub(super) fn state(&mut self) -> ConnectionState {
        if self.session.lost().is_some() {
            return ConnectionState::Dead;
        }
        if !self.queue.is_connected() {
            return ConnectionState::Dismissed;
        }
        match self.asked.as_ref().map(Awaited::try_take) {
            Some(None) => return self.state,
            Some(Some(Ok(Answer::State(state)))) => {
                self.state = state;
                self.states_told += 1;
            }
            Some(Some(Err(_))) => self.state = ConnectionState::Dead,
            _ => {}
        }
        self.asked = self.session.ask(&Question::ConnectionState(self.name)).ok();
        self.state
    }

    /// How often the memory server has said what has become of it.
    pub(super) fn states_told(&self) -> u64 {
        self.states_told
    }

    /// Closes it: nothing of this side's is under way any more. The memory server forgets its user if that is `in_order`. Its
    /// answer is yet to come.
    pub(super) fn close(mut self, in_order: bool, completions: &mut Vec<Completion>) -> Option<Awaited> {
        self.abort(None, &Cause::Broken("the connection was closed".into()), completions);
        self.session.ask(&Question::Detach(self.name, in_order)).ok()
    }
}
