//! A worker's way to one memory server's region: a queue, made again when it breaks.
//!
//! - A failed request breaks the connection; so do the loss of the control connection and a refused post. What is rung after
//!   that goes to a new connection, which the memory server makes only after it has destroyed its end of the old one, so
//!   that nothing late arrives.
//! - A lost control connection is for good: the memory server has destroyed the queue pairs and counts the compute server
//!   as dead. So it is cut where a queue pair cannot be made anew, or where nothing but failures came for long: a request that is tried
//!   again comes to an end.

use std::time::{Duration, Instant};

use super::{
    connecting::Connecting,
    control::Question,
    endpoint::Setup,
    failures::{Failures, Next},
    ib::{Finished, Remote},
    queue::{Failed, RequestQueue, Target},
    session::{Awaited, Session},
};
use crate::{
    endpoint::{Completion, Request},
    error::Error,
    ptr::ServerId,
    sync::Arc,
};

#[derive(Debug)]
pub(super) struct DataPath {
    queue: RequestQueue,
    session: Arc<Session>,
    state: State,
    failures: Failures,
}

#[derive(Debug)]
enum State {
    /// The queue is connected.
    Up,
    /// To be connected then, in the place of this queue pair of the memory server's.
    Resting {
        until: Instant,
        instead_of: Option<u32>,
    },
    Connecting(Connecting),
    /// For good.
    Down(Cause),
}

/// Why requests failed that did nothing wrong.
#[derive(Debug, Clone)]
pub(super) enum Cause {
    Lost { address: String, why: String },
    Broken(String),
}

impl Cause {
    pub(super) fn of(error: Error) -> Self {
        match error {
            Error::ServerLost { address, why, .. } => Self::Lost { address, why },
            error => Self::Broken(error.to_string()),
        }
    }

    pub(super) fn error(&self, server: ServerId, request: &Request) -> Error {
        match self {
            Self::Lost { address, why } => Error::ServerLost { server, address: address.clone(), why: why.clone() },
            Self::Broken(why) => Error::RequestFailed { what: request.verb.name(), at: request.at, why: why.clone() },
        }
    }
}

impl DataPath {
    /// Asks the memory server for a connection; [`DataPath::finish`] waits for it.
    pub(super) fn begin(number: u16, session: Arc<Session>, setup: &Setup) -> Result<Self, Error> {
        let hello_ack = session.hello_ack();
        let remote = Remote { address: hello_ack.address, key: hello_ack.key };
        let target = Target { first: 0, bytes: hello_ack.bytes, remote };
        let mut path = Self {
            queue: RequestQueue::new(&setup.domain, number, setup.depth, target)?,
            session,
            state: State::Down(Cause::Broken("it was never connected".into())),
            failures: Failures::default(),
        };
        path.ask_to_connect(setup, None)?;
        Ok(path)
    }

    /// Waits for the memory server's end. Blocks.
    pub(super) fn finish(&mut self, setup: &Setup) -> Result<(), Error> {
        match std::mem::replace(&mut self.state, State::Down(Cause::Broken("it was not connected".into()))) {
            State::Connecting(connecting) => {
                self.queue.connect(connecting.wait(setup, &self.session)?);
                self.state = State::Up;
            }
            other => self.state = other,
        }
        Ok(())
    }

    fn ask_to_connect(&mut self, setup: &Setup, instead_of: Option<u32>) -> Result<(), Error> {
        self.state = State::Connecting(Connecting::begin(setup, &self.session, instead_of)?);
        Ok(())
    }

    /// Whether the region of this memory server has the bytes of a request.
    #[inline]
    pub(super) fn takes(&self, request: &Request) -> bool {
        self.queue.takes(request)
    }

    /// Whether there is nothing to do but to wait for completions.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_connected() && !self.queue.is_waiting()
    }

    /// Takes a request; [`DataPath::ring`] sends it.
    #[inline(always)]
    pub(super) fn push(&mut self, request: Request) {
        self.queue.push(request);
    }

    /// Sends what was pushed, with one doorbell.
    #[inline]
    pub(super) fn ring(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        if let Err(error) = self.queue.ring() {
            self.breaks(setup, None, &error.to_string(), completions);
        }
    }

    /// Takes a completion of this path's.
    #[inline]
    pub(super) fn finished(&mut self, setup: &Setup, finished: Finished, completions: &mut Vec<Completion>) {
        let before = completions.len();
        let outcome = self.queue.finished(finished, completions);
        // Not by what finished: it may be of a connection that was before.
        if completions.len() != before {
            self.failures.end();
        }
        if let Err(failed) = outcome {
            self.failed(setup, failed, completions);
        }
    }

    #[cold]
    fn failed(&mut self, setup: &Setup, failed: Failed, completions: &mut Vec<Completion>) {
        // If the server has gone, its control connection tells it better than the card does.
        match self.session.lost() {
            Some(lost) => self.reset(setup, None, Cause::of(lost), Duration::ZERO, completions),
            None => self.breaks(setup, failed.first, &failed.status.why(), completions),
        }
    }

    /// A connection breaks, though the memory server is there.
    #[cold]
    fn breaks(&mut self, setup: &Setup, first: Option<Error>, why: &str, completions: &mut Vec<Completion>) {
        let now = Instant::now();
        self.session.tell_failure(now, why);
        match self.failures.add(now, setup.give_up_after, setup.reliability.longest()) {
            Next::GiveUp(lasted) => {
                let why = format!("for {lasted:.0?} nothing but failures came over RDMA, while TCP works: {why}");
                self.give_up(&why, completions);
            }
            Next::ConnectAfter(rest) => {
                let why = if first.is_some() { format!("an earlier request failed: {why}") } else { why.into() };
                self.reset(setup, first, Cause::Broken(why), rest, completions);
            }
        }
    }

    /// Looks after what does not come as a completion: a connection that is being made, room for waiting requests.
    pub(super) fn drive(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        let down = State::Down(Cause::Broken("it could not be connected".into()));
        match std::mem::replace(&mut self.state, down) {
            State::Connecting(connecting) => match connecting.try_finish(setup, &self.session) {
                Ok(Ok(connection)) => {
                    self.queue.connect(connection);
                    self.state = State::Up;
                }
                Ok(Err(error)) => {
                    let cause = self.cut_off(error);
                    return self.fail(cause, completions);
                }
                Err(connecting) => self.state = State::Connecting(connecting),
            },
            State::Resting { until, instead_of } if Instant::now() >= until => self.connect_anew(setup, instead_of),
            other => self.state = other,
        }
        if let State::Down(cause) = &self.state {
            let cause = cause.clone();
            return self.fail(cause, completions);
        }
        if self.queue.is_waiting()
            && let Err(error) = self.queue.post_waiting()
        {
            self.breaks(setup, None, &error.to_string(), completions);
        }
    }

    /// Ends the connection if the control connection is lost.
    pub(super) fn check_control(&mut self, setup: &Setup, completions: &mut Vec<Completion>) {
        if !matches!(self.state, State::Down(_))
            && let Some(lost) = self.session.lost()
        {
            self.reset(setup, None, Cause::of(lost), Duration::ZERO, completions);
        }
    }

    /// Ends for good, and has the memory server count this compute server as dead: it cannot unlock what it has locked.
    pub(super) fn give_up(&mut self, why: &str, completions: &mut Vec<Completion>) {
        if matches!(self.state, State::Down(Cause::Lost { .. })) {
            return;
        }
        self.session.give_up(why);
        self.fail(Cause::Lost { address: self.session.address().into(), why: why.into() }, completions);
    }

    /// Destroys the queue pair and fails all requests, the first one with an error of its own; then connects anew after a rest, if
    /// there is somebody to connect to.
    fn reset(
        &mut self,
        setup: &Setup,
        first: Option<Error>,
        cause: Cause,
        rest: Duration,
        completions: &mut Vec<Completion>,
    ) {
        self.state = State::Down(cause.clone());
        let server = self.session.server();
        let theirs = self.queue.abort(first, |request| cause.error(server, request), completions);
        if matches!(cause, Cause::Lost { .. }) {
            return;
        }
        if self.queue.is_stuck() {
            return self.give_up("this machine's card does not end a connection; end this process", completions);
        }
        match rest.is_zero() {
            true => self.connect_anew(setup, theirs),
            false => self.state = State::Resting { until: Instant::now() + rest, instead_of: theirs },
        }
    }

    fn connect_anew(&mut self, setup: &Setup, instead_of: Option<u32>) {
        if let Err(error) = self.ask_to_connect(setup, instead_of) {
            self.state = State::Down(self.cut_off(error));
        }
    }

    /// There is no way to the memory server any more, for this reason.
    fn cut_off(&self, error: Error) -> Cause {
        match Cause::of(error) {
            Cause::Broken(why) => {
                self.session.give_up(&why);
                Cause::Lost { address: self.session.address().into(), why }
            }
            lost => lost,
        }
    }

    fn fail(&mut self, cause: Cause, completions: &mut Vec<Completion>) {
        let server = self.session.server();
        self.queue.abort(None, |request| cause.error(server, request), completions);
        self.state = State::Down(cause);
    }

    /// Destroys both ends of the connection. The memory server's answer is yet to come: after it, nothing of this path can
    /// take effect any more.
    pub(super) fn close(&mut self, setup: &Setup) -> Option<Awaited> {
        let closed = State::Down(Cause::Broken("the endpoint is gone".into()));
        let mut left = None;
        match std::mem::replace(&mut self.state, closed) {
            State::Connecting(connecting) => self.queue.connect(connecting.wait(setup, &self.session).ok()?),
            State::Resting { instead_of, .. } => left = instead_of,
            _ => {}
        }
        let broken = Cause::Broken("the endpoint is gone".into());
        let theirs = self.queue.abort(None, |request| broken.error(self.session.server(), request), &mut Vec::new());
        self.session.ask(&Question::Disconnect(u64::from(theirs.or(left)?))).ok()
    }
}
