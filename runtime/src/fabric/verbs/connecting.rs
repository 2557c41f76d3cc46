//! How a reliable connection to a memory server comes about.
//!
//! *Managed*: by the system's connection manager, with an invitation that the control connection has handed out. *By hand*:
//! both sides tell each other over the control connection what their queue pairs need. The outcome is the same, and so is
//! the end: the memory server is asked over the control connection to destroy its queue pair.

use std::{
    net::SocketAddr,
    sync::mpsc::{self, RecvTimeoutError, TryRecvError},
    time::{Duration, Instant},
};

use super::{
    DeviceChoice, Reliability,
    control::{Answer, Question, Secret},
    endpoint::Setup,
    ib::{Access, Call, CompletionQueue, Domain, Failure, Id, Peer, QueuePair, QueuePairOptions},
    session::{Awaited, Session},
};
use crate::{error::Error, sync::Arc};

/// How long the connection manager may take.
const MANAGED_LIMIT: Duration = Duration::from_secs(10);

/// How connections are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ConnectBy {
    /// By the connection manager if both sides have one, else by hand.
    #[default]
    Auto,
    /// By the connection manager (rdma_cm).
    Manager,
    /// By hand, over the control connection.
    Hand,
}

/// A reliable connection.
#[derive(Debug)]
pub(super) struct Connection {
    // Before its handle: without it nothing is under way any more.
    pub(super) queue_pair: Arc<QueuePair>,
    /// The memory server's end.
    theirs: u32,
    _id: Option<Id>,
}

impl Connection {
    /// One that was set up over the control connection; `theirs` is the number of the other end.
    pub(super) fn by_hand(queue_pair: QueuePair, theirs: u32) -> Self {
        Self { queue_pair: Arc::new(queue_pair), theirs, _id: None }
    }

    /// Destroys this end, and says which is the other. Nobody else has the queue pair.
    pub(super) fn destroy(self) -> u32 {
        debug_assert_eq!(Arc::strong_count(&self.queue_pair), 1);
        self.theirs
    }
}

/// A connection that is being made.
#[derive(Debug)]
pub(super) enum Connecting {
    ByHand { ours: QueuePair, theirs: Awaited },
    Managed(mpsc::Receiver<Result<Connection, Error>>),
}

impl Connecting {
    /// Begins to connect. The memory server first destroys its end of an earlier connection.
    pub(super) fn begin(setup: &Setup, session: &Arc<Session>, instead_of: Option<u32>) -> Result<Self, Error> {
        let instead_of = instead_of.map(u64::from);
        let by_hand = setup.connect_by == ConnectBy::Hand
            || (setup.connect_by == ConnectBy::Auto && session.is_without_manager());
        match session.welcome().manager.filter(|_| !by_hand) {
            Some(manager) => Self::managed(setup, session, manager, instead_of),
            None => Self::by_hand(setup, session, instead_of),
        }
    }

    fn by_hand(setup: &Setup, session: &Session, instead_of: Option<u64>) -> Result<Self, Error> {
        let ours = setup.queue_pair()?;
        let theirs = session.ask(&Question::Connect { ours: ours.describe(&setup.local), instead_of })?;
        Ok(Self::ByHand { ours, theirs })
    }

    /// On a thread of its own, because a worker must not wait, and connections are few.
    fn managed(
        setup: &Setup,
        session: &Arc<Session>,
        manager: SocketAddr,
        instead_of: Option<u64>,
    ) -> Result<Self, Error> {
        let (done, outcome) = mpsc::channel();
        let (setup, session) = (setup.clone(), Arc::clone(session));
        let connect = move || {
            let mut connected = connect_managed(&setup, &session, manager, instead_of);
            // Whoever is refused is not to come in by another door.
            if let Err(failure @ (Failure::Unreachable(_) | Failure::Here(_))) = &connected
                && setup.connect_by == ConnectBy::Auto
                && session.lost().is_none()
            {
                tracing::warn!(server = %session.server(), ?failure, "connected by hand from now on, not by the manager");
                session.give_up_manager();
                let by_hand = Self::by_hand(&setup, &session, None).and_then(|by_hand| by_hand.wait(&setup, &session));
                connected = by_hand.map_err(Failure::Here);
            }
            // If the server has gone, its control connection tells it better.
            let why = |failure| session.lost().unwrap_or_else(|| explain(failure, session.address().into(), manager));
            // Whoever has asked may be gone.
            let _ = done.send(connected.map_err(why));
        };
        std::thread::Builder::new()
            .name("farlink-connect".into())
            .spawn(connect)
            .map_err(Error::io("starting a thread that connects"))?;
        Ok(Self::Managed(outcome))
    }

    /// Waits for the connection. Blocks.
    pub(super) fn wait(self, setup: &Setup, session: &Session) -> Result<Connection, Error> {
        match self {
            Self::ByHand { ours, theirs } => connected_by_hand(setup, session, ours, theirs.wait()?),
            // Each of its steps has a limit.
            Self::Managed(outcome) => match outcome.recv_timeout(MANAGED_LIMIT * 8) {
                Ok(outcome) => outcome,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Err(given_up()),
            },
        }
    }

    /// The connection, or what makes it still.
    pub(super) fn try_finish(self, setup: &Setup, session: &Session) -> Result<Result<Connection, Error>, Self> {
        match self {
            Self::ByHand { ours, theirs } => match theirs.try_take() {
                Some(answer) => Ok(answer.and_then(|answer| connected_by_hand(setup, session, ours, answer))),
                None => Err(Self::ByHand { ours, theirs }),
            },
            Self::Managed(outcome) => match outcome.try_recv() {
                Ok(outcome) => Ok(outcome),
                Err(TryRecvError::Empty) => Err(Self::Managed(outcome)),
                Err(TryRecvError::Disconnected) => Ok(Err(given_up())),
            },
        }
    }
}

fn given_up() -> Error {
    Error::Malformed("the thread that was to connect is gone")
}

fn connected_by_hand(setup: &Setup, session: &Session, ours: QueuePair, answer: Answer) -> Result<Connection, Error> {
    let theirs: Peer = match answer {
        Answer::Connected(theirs) => theirs,
        answer => return Err(refusal(session, answer)),
    };
    ours.connect(&setup.local, &theirs, Access::Local, setup.reliability)?;
    Ok(Connection::by_hand(ours, theirs.queue_pair))
}

fn connect_managed(
    setup: &Setup,
    session: &Session,
    manager: SocketAddr,
    instead_of: Option<u64>,
) -> Result<Connection, Failure> {
    let invitation = match session.ask(&Question::Invite { instead_of })?.wait()? {
        Answer::Invited(invitation) => invitation,
        answer => return Err(refusal(session, answer).into()),
    };
    let queue_pair = setup.queue_pair()?;
    let call = Call {
        device: setup.domain.device(),
        local: &setup.local,
        to: manager,
        greeting: &invitation.greeting(&setup.secret, queue_pair.number()),
        reliability: setup.reliability,
        deadline: Instant::now() + MANAGED_LIMIT,
    };
    let (id, theirs) = call.connect(&queue_pair)?;
    Ok(Connection { queue_pair: Arc::new(queue_pair), theirs, _id: Some(id) })
}

/// An invitation of this session's with the proof for a queue pair that nobody has: what somebody knows who has listened in.
pub(super) fn overhear(session: &Session, secret: &Secret) -> Result<Vec<u8>, Error> {
    match session.ask(&Question::Invite { instead_of: None })?.wait()? {
        Answer::Invited(invitation) => Ok(invitation.greeting(secret, NO_QUEUE_PAIR).to_vec()),
        answer => Err(refusal(session, answer)),
    }
}

/// Queue pairs have 24 bits.
const NO_QUEUE_PAIR: u32 = u32::MAX;

/// Asks a memory server's connection manager for a connection, as somebody would who was not invited. For tests.
///
/// # Errors
/// As it should be: [`Error::NotAdmitted`].
#[doc(hidden)]
pub fn knock(device: &DeviceChoice, manager: SocketAddr, greeting: &[u8]) -> Result<(), Error> {
    let (device, local) = device.open()?;
    let (domain, completions) = (Domain::new(&device)?, CompletionQueue::new(&device, 1, None)?);
    let options = QueuePairOptions { send_depth: 1, inline_bytes: 0, gather_max: 1, receive: None };
    let queue_pair = QueuePair::new(&domain, &completions, &completions, options)?;
    let call = Call {
        device: &device,
        local: &local,
        to: manager,
        greeting,
        reliability: Reliability::default(),
        deadline: Instant::now() + MANAGED_LIMIT,
    };
    call.connect(&queue_pair).map(drop).map_err(|failure| explain(failure, manager.to_string(), manager))
}

fn refusal(session: &Session, answer: Answer) -> Error {
    match answer {
        Answer::Refused(why) => Error::NotAdmitted { address: session.address().into(), why },
        _ => Error::Malformed("a memory server answered something else than was asked"),
    }
}

fn explain(failure: Failure, address: String, manager: SocketAddr) -> Error {
    match failure {
        Failure::Here(error) => error,
        Failure::Refused => {
            Error::NotAdmitted { address, why: format!("its connection manager at {manager} has refused us") }
        }
        Failure::Unreachable(why) => Error::NotAdmitted {
            address,
            why: format!("no RDMA connection to {manager}: {why}; try --setup tcp, or `rping` between the machines"),
        },
    }
}
