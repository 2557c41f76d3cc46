//! How a reliable connection to a memory server comes about: both sides tell each other over the control connection what
//! their queue pairs need. Over it the memory server is asked, too, to destroy its queue pair in the end.

use super::{
    control::{Answer, Question},
    endpoint::Setup,
    ib::{Access, QueuePair},
    session::{Awaited, Session},
};
use crate::{error::Error, wire::DecodeError};

/// A reliable connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) queue_pair: QueuePair,
    /// The number of the other end.
    theirs: u32,
}

impl Connection {
    /// A queue pair that was connected to the one with the number `theirs`.
    pub(super) fn new(queue_pair: QueuePair, theirs: u32) -> Self {
        Self { queue_pair, theirs }
    }

    /// The number of the other end.
    pub(super) fn theirs(&self) -> u32 {
        self.theirs
    }
}

/// A connection that is being made.
#[derive(Debug)]
pub(super) struct Connecting {
    ours: QueuePair,
    theirs: Awaited,
}

impl Connecting {
    /// Begins to connect. The memory server first destroys its end of an earlier connection.
    pub(super) fn begin(setup: &Setup, session: &Session, instead_of: Option<u32>) -> Result<Self, Error> {
        let ours = setup.queue_pair(setup.depth)?;
        let question = Question::Connect { ours: ours.describe(&setup.local), instead_of: instead_of.map(u64::from) };
        Ok(Self { ours, theirs: session.ask(&question)? })
    }

    /// Waits for the connection. Blocks, for some seconds at most where the memory server's process is stopped.
    pub(super) fn wait(self, setup: &Setup, session: &Session) -> Result<Connection, Error> {
        finish(setup, session, self.ours, self.theirs.wait()?)
    }

    /// The connection, or what makes it still; an error if the memory server does not answer at all.
    pub(super) fn try_finish(self, setup: &Setup, session: &Session) -> Result<Result<Connection, Error>, Self> {
        match self.theirs.try_wait() {
            Some(answer) => Ok(answer.and_then(|answer| finish(setup, session, self.ours, answer))),
            None => Err(self),
        }
    }
}

fn finish(setup: &Setup, session: &Session, ours: QueuePair, answer: Answer) -> Result<Connection, Error> {
    let theirs = match answer {
        Answer::Connected(theirs) => theirs,
        Answer::Refused(why) => return Err(Error::NotAdmitted { address: session.address().into(), why }),
        _ => return Err(DecodeError("a memory server answered something else than was asked").into()),
    };
    ours.connect(&setup.local, &theirs, Access::Local, setup.reliability).inspect_err(|_| {
        // It would keep its end for as long as this process runs.
        let _ = session.ask(&Question::Disconnect(u64::from(theirs.queue_pair)));
    })?;
    Ok(Connection::new(ours, theirs.queue_pair))
}
