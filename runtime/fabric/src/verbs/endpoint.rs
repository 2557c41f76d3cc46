//! A worker's endpoint: one completion queue, a path to every memory server, and a message connection to those it asks for one, memory
//! servers and compute servers.

use std::{ptr::NonNull, time::Duration};

use hashbrown::HashSet;

use super::{
    data_path::DataPath,
    device_fails,
    ib::{Access, Atomics, CompletionQueue, Domain, Local, QueuePair, QueuePairOptions, Registered, Reliability},
    message_connection::MessageConnection,
    peers::Peers,
    queue::queue_of,
    session::{Awaited, Losses, Session},
};
use crate::{
    buffer::LocalKey,
    connection::{ConnectionState, OpenMemory, PeerId, far_offset},
    endpoint::{Capabilities, Completion, Endpoint, Request, Verb},
    error::Error,
    lock::OwnerId,
    ptr::{RemotePtr, ServerId},
    sync::{Arc, Ordering},
};

/// The eager limit, 8 KiB. Measured on SoftRoCE: one message at a time is faster by the ring up to 32 KiB, because rendezvous
/// adds a round trip; of 16 at a time, those of more than 4 KiB are faster by rendezvous. At 8 KiB either way loses about as much
/// where the other one is better. Not measured on a card.
const EAGER_WORDS: usize = 1024;

/// Compute servers to which a worker has connections at a time.
pub(super) const PEERS_MAX: u32 = 32;

/// What all paths of an endpoint share.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) domain: Arc<Domain>,
    pub(super) local: Local,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) reliability: Reliability,
    /// Requests in a queue pair.
    pub(super) depth: u32,
    /// Nothing but failures for so long, and a memory server is given up.
    pub(super) give_up_after: Duration,
    /// Whether WRITEs are placed in the order of their posting.
    pub(super) ordered: bool,
    pub(super) inline_bytes: u32,
}

impl Setup {
    /// A queue pair for so many requests.
    pub(super) fn queue_pair(&self, depth: u32) -> Result<QueuePair, Error> {
        let options = options(depth, self.inline_bytes);
        QueuePair::new(&self.domain, &self.completions, &self.completions, options)
    }
}

/// Those of a worker's queue pairs.
pub(super) fn options(depth: u32, inline_bytes: u32) -> QueuePairOptions {
    QueuePairOptions { send_depth: depth, inline_bytes, gather_max: 1, receive: None }
}

/// What an endpoint guarantees that reaches memory behind devices with these atomics: what all of them do. Its own device only
/// sends what those carry out.
pub(super) fn capabilities(
    atomics: impl IntoIterator<Item = Atomics>,
    ordered: bool,
    inline_bytes: u32,
    gather_max: u32,
) -> Capabilities {
    let global = atomics.into_iter().min() == Some(Atomics::Global);
    Capabilities {
        // The cards' part: a reliable connection, and memory registered without relaxed ordering. The network's part has to be told.
        ordered_writes: ordered,
        atomic_against_writes: global,
        atomic_against_cpu: global,
        inline_bytes: inline_bytes as usize,
        gather_max: gather_max as usize,
        eager_words: EAGER_WORDS,
    }
}

#[derive(Debug)]
pub(super) struct VerbsEndpoint {
    // Before the registrations: no queue pair uses memory that is not registered any more.
    paths: Vec<DataPath>,
    /// By memory server, and then by number of `called`; their queues are numbered after those of `paths`.
    connections: Vec<Option<MessageConnection>>,
    sessions: Vec<Arc<Session>>,
    peers: Arc<Peers>,
    /// Compute servers, by number.
    called: Vec<OwnerId>,
    /// Counts message connections.
    generation: u16,
    setup: Setup,
    registered: Vec<Registered>,
    losses: Losses,
    losses_seen: u64,
    /// Completions that did not come from the card.
    early: Vec<Completion>,
    /// Connections that have something to drive to.
    has_pending: bool,
}

impl VerbsEndpoint {
    /// Connects to all memory servers. Blocks.
    pub(super) fn connect(
        setup: Setup,
        sessions: &[Arc<Session>],
        peers: &Arc<Peers>,
        losses: &Losses,
    ) -> Result<Self, Error> {
        // All are asked before any is waited for.
        let begin = |(number, session): (usize, &Arc<Session>)| {
            DataPath::begin(u16::try_from(number).unwrap_or(u16::MAX), Arc::clone(session), &setup)
        };
        let paths = sessions.iter().enumerate().map(begin).collect::<Result<Vec<_>, Error>>()?;
        // Whole from here on: if one cannot be connected, the others are closed again.
        let mut endpoint = Self {
            paths,
            connections: Vec::new(),
            sessions: sessions.to_vec(),
            peers: Arc::clone(peers),
            called: Vec::new(),
            generation: 0,
            setup,
            registered: Vec::new(),
            losses: Arc::clone(losses),
            // What was lost before is noticed at the first poll.
            losses_seen: 0,
            early: Vec::new(),
            has_pending: false,
        };
        let Self { paths, setup, .. } = &mut endpoint;
        paths.iter_mut().try_for_each(|path| path.finish(setup))?;
        Ok(endpoint)
    }

    #[cold]
    fn drive(&mut self, completions: &mut Vec<Completion>) {
        let losses = self.losses.load(Ordering::Acquire);
        if losses != self.losses_seen {
            self.losses_seen = losses;
            self.paths.iter_mut().for_each(|path| path.check_control(&self.setup, completions));
        }
        self.paths.iter_mut().for_each(|path| path.drive(&self.setup, completions));
        self.connections.iter_mut().flatten().for_each(|connection| connection.drive(completions));
        self.has_pending = !self.paths.iter().all(DataPath::is_idle)
            || !self.connections.iter().flatten().all(MessageConnection::is_idle);
    }

    /// This machine's device has failed: nothing that is under way completes, and nothing else would.
    #[cold]
    fn give_up(&mut self, error: &Error, completions: &mut Vec<Completion>) {
        let why = device_fails(error);
        self.paths.iter_mut().for_each(|path| path.give_up(&why, completions));
        self.connections.iter_mut().flatten().for_each(|connection| connection.give_up(&why, completions));
    }

    /// Takes a request that is for no region: for what a message connection has opened, or for nothing.
    #[cold]
    fn push_elsewhere(&mut self, request: Request) {
        let at = request.at;
        match self.connections.get_mut(at.server().index()) {
            Some(Some(connection)) if connection.takes(&request) => connection.push(request),
            // The card would break the connection over it.
            _ => {
                let outcome = Err(outside(at, &request.verb));
                self.early.push(Completion { ticket: request.ticket, outcome });
            }
        }
    }

    /// Fails what is rung behind a failure that nobody was told of yet: a connection that was made anew would carry it out.
    #[cold]
    fn fail_behind(&mut self, requests: &mut Vec<Request>) {
        let (broken, paths) = (broken(&self.early), &self.paths);
        let behind = requests.extract_if(.., |request| {
            let server = request.at.server();
            broken.contains(&server) && paths.get(server.index()).is_some_and(|path| path.takes(request))
        });
        self.early.extend(behind.map(|Request { ticket, at, verb }| {
            let error = Error::RequestFailed { what: verb.name(), at, why: "an earlier request failed".into() };
            Completion { ticket, outcome: Err(Box::new(error)) }
        }));
    }

    /// Closes the message connection to a memory server, if there is one.
    fn unlink(&mut self, server: ServerId, in_order: bool) {
        if !matches!(self.connections.get(server.index()), Some(Some(_))) {
            return;
        }
        // Completions that have come are of requests that were carried out.
        let mut completions = Vec::new();
        self.poll(&mut completions);
        self.early.append(&mut completions);
        if let Some(connection) = self.connections[server.index()].take() {
            // The memory server hears of it in its own time.
            drop(connection.close(in_order, &mut self.early));
        }
    }

    /// Closes the connections to compute servers that are gone: their channels may never ask for them again.
    fn unlink_lost(&mut self) {
        for connection in self.connections.iter_mut().skip(self.sessions.len()) {
            if let Some(lost) = connection.take_if(|connection| connection.is_lost()) {
                drop(lost.close(false, &mut self.early));
            }
        }
    }
}

/// The memory servers to whose regions one of these has failed, and with it the connection.
fn broken(completions: &[Completion]) -> HashSet<ServerId> {
    let server = |completion: &Completion| match completion.outcome.as_ref().err()?.as_ref() {
        Error::RequestFailed { at, .. } if far_offset(*at).is_none() => Some(at.server()),
        _ => None,
    };
    completions.iter().filter_map(server).collect()
}

pub(super) fn outside(at: RemotePtr, verb: &Verb) -> Box<Error> {
    let why = "the address is not inside the memory server's region or an open path, or not aligned to 8 bytes; \
               or it gathers what is not there"
        .into();
    Box::new(Error::BadAddress { what: verb.name(), at, why })
}

impl Endpoint for VerbsEndpoint {
    fn capabilities(&self) -> Capabilities {
        let atomics = self.sessions.iter().map(|session| session.hello_ack().atomics);
        capabilities(atomics, self.setup.ordered, self.setup.inline_bytes, 1)
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until the endpoint is dropped, as the trait demands.
        let registered = unsafe { self.setup.domain.register(base, words, Access::Local) }?;
        let key = registered.local_key();
        self.registered.push(registered);
        Ok(key)
    }

    #[inline]
    fn ring(&mut self, requests: &mut Vec<Request>) {
        if !self.early.is_empty() {
            self.fail_behind(requests);
        }
        let mut push = |request: Request| {
            let at = request.at;
            match self.paths.get_mut(at.server().index()) {
                Some(path) if path.takes(&request) => path.push(request),
                _ => self.push_elsewhere(request),
            }
        };
        match requests.len() {
            // Often; and a tenth fewer instructions than with the other way.
            1 => requests.pop().into_iter().for_each(&mut push),
            _ => requests.drain(..).for_each(push),
        }
        for path in &mut self.paths {
            path.ring(&self.setup, &mut self.early);
            self.has_pending |= !path.is_idle();
        }
        for connection in self.connections.iter_mut().flatten() {
            connection.ring(&mut self.early);
            self.has_pending |= !connection.is_idle();
        }
    }

    #[inline]
    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if !self.early.is_empty() {
            completions.append(&mut self.early);
        }
        let (paths, connections, setup, has_pending) =
            (&mut self.paths, &mut self.connections, &self.setup, &mut self.has_pending);
        let polled = setup.completions.poll(|finished| {
            let queue = queue_of(finished.id);
            if let Some(path) = paths.get_mut(queue) {
                path.finished(setup, finished, completions);
                *has_pending |= !path.is_idle();
            } else if let Some(Some(connection)) = connections.get_mut(queue - paths.len()) {
                connection.finished(finished, completions);
            }
        });
        if let Err(error) = polled {
            self.give_up(&error, completions);
        }
        if self.has_pending || self.losses.load(Ordering::Relaxed) != self.losses_seen {
            self.drive(completions);
        }
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        self.unlink(server, false);
        let called = server.index().checked_sub(self.sessions.len()).map(|number| self.called.get(number).copied());
        let session = match called {
            None => Arc::clone(&self.sessions[server.index()]),
            Some(Some(peer)) => {
                self.unlink_lost();
                let to_peers = self.connections.iter().skip(self.sessions.len()).flatten().count();
                if to_peers >= PEERS_MAX as usize {
                    let why = format!("this worker talks to {to_peers} others already");
                    return Err(Error::PeerMissing { peer, why });
                }
                self.peers.session(peer)?
            }
            Some(None) => return Err(Error::ServerMissing { server, why: "there is no such memory server".into() }),
        };
        self.generation = self.generation.wrapping_add(1);
        // A number has 15 bits, so those of all queues fit into 16.
        let number = self.paths.len() as u16 + server.number();
        let (connection, memory) =
            MessageConnection::open(&self.setup, (&session, server), (number, self.generation), who)?;
        if self.connections.len() <= server.index() {
            self.connections.resize_with(server.index() + 1, || None);
        }
        self.connections[server.index()] = Some(connection);
        Ok(memory)
    }

    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        let known = self.called.iter().position(|&known| known == peer);
        let number = self.sessions.len() + known.unwrap_or(self.called.len());
        let none_left = || Error::PeerMissing { peer, why: "this worker has called too many others".into() };
        // The queue of a connection is numbered after all paths, in 16 bits.
        let number = u16::try_from(number).ok().and_then(ServerId::new).ok_or_else(none_left)?;
        if known.is_none() {
            self.called.push(peer);
        }
        Ok(number)
    }

    fn disconnect(&mut self, server: ServerId) {
        self.unlink(server, true);
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        self.connections
            .get_mut(server.index())
            .and_then(Option::as_mut)
            .map_or(ConnectionState::Dead, MessageConnection::state)
    }

    fn states_told(&self, server: ServerId) -> u64 {
        self.connections.get(server.index()).and_then(Option::as_ref).map_or(0, MessageConnection::states_told)
    }
}

impl Drop for VerbsEndpoint {
    fn drop(&mut self) {
        let setup = &self.setup;
        let paths = self.paths.iter_mut().filter_map(|path| path.close(setup));
        let connections =
            self.connections.drain(..).flatten().filter_map(|connection| connection.close(true, &mut Vec::new()));
        let closing: Vec<_> = paths.chain(connections).collect();
        // A memory server that is lost has destroyed its queue pairs.
        closing.into_iter().for_each(Awaited::wait_to_leave);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::far,
        endpoint::{Done, Ticket},
    };

    #[test]
    fn only_a_request_to_a_region_breaks_the_way_there() {
        let server = |number| ServerId::new(number).unwrap();
        let in_region = |number| RemotePtr::new(server(number), 8).unwrap();
        let failed = |at| Err(Box::new(Error::RequestFailed { what: "WRITE", at, why: String::new() }));
        let outcomes = [
            Ok(Done::Written),
            failed(in_region(1)),
            failed(far(server(2), 8)),
            Err(outside(in_region(3), &Verb::WriteWord(0))),
        ];
        let early = outcomes.map(|outcome| Completion { ticket: Ticket(0), outcome });
        assert_eq!(broken(&early), HashSet::from_iter([server(1)]));
    }

    #[test]
    fn an_endpoint_promises_what_all_that_carry_out_its_atomics_do() {
        use Atomics::{Device, Global, None};
        let global = |atomics: &[Atomics]| {
            let Capabilities { atomic_against_writes, atomic_against_cpu, .. } =
                capabilities(atomics.iter().copied(), true, 64, 1);
            assert_eq!(atomic_against_writes, atomic_against_cpu);
            atomic_against_cpu
        };
        assert!(global(&[Global]) && global(&[Global, Global]));
        for mixed in [&[Device][..], &[Global, Device], &[Device, Global, Global], &[Global, None], &[]] {
            assert!(!global(mixed), "{mixed:?}");
        }
        for ordered in [true, false] {
            let Capabilities { ordered_writes, inline_bytes, gather_max, .. } = capabilities([Device], ordered, 64, 7);
            assert_eq!((ordered_writes, inline_bytes, gather_max), (ordered, 64, 7));
        }
    }
}
