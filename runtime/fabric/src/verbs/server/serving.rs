//! Control connections, as the memory server has them, or the compute server that listens.

use std::{
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::MutexGuard,
    time::{Duration, Instant},
};

use hashbrown::HashMap;
use rand::RngExt as _;

use super::{
    Memory, Place,
    acceptor::{Acceptor, End, Made},
    owners::{Owners, SessionId},
};
use crate::{
    connection::{ConnectionState, ListenerId, PeerId},
    error::Error,
    listener::NO_THREADS,
    lock::OwnerId,
    memory::LocalMemory,
    region::Region,
    sync::{Arc, AtomicU64, Mutex, lock},
    verbs::{
        DeviceInfo, Reliability, Secret,
        control::{self, Answer, HelloAck, Opened, Question, Receiver, Sender, keep_alive},
        ib::{Access, CompletionQueue, Device, Domain, Local, Peer, QueuePair, QueuePairOptions},
    },
};

/// How long a connection has to prove that it knows the secret.
const PROOF_LIMIT: Duration = Duration::from_secs(3);
/// Connections at a time that have not proven it.
const UNPROVEN_MAX: usize = 64;
/// Compute servers, or what else connects, at a time: as many as a cluster has slots for, and visitors.
const SESSIONS_MAX: usize = 512;
/// Queue pairs of one control connection: one for each worker.
const QUEUE_PAIRS_MAX: usize = 4096;

/// What the threads of a memory server share, or those of a compute server that listens.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) place: Place,
    secret: Secret,
    reliability: Reliability,
    /// Whether WRITEs are placed in the order of their posting.
    pub(super) ordered: bool,
    local: Local,
    state: Mutex<State>,
    /// Where workers ask for message connections, if it takes messages.
    pub(super) acceptor: Mutex<Option<Arc<Acceptor>>>,
    // From here on in the order in which they may go: queue pairs (in `state`) before what they use.
    completions: Arc<CompletionQueue>,
    domain: Arc<Domain>,
    memory: Memory,
}

#[derive(Debug, Default)]
struct State {
    stopped: bool,
    next: SessionId,
    /// Connections that have not proven anything yet, and those that have.
    unproven: HashMap<SessionId, TcpStream>,
    sessions: HashMap<SessionId, Held>,
    owners: Owners,
}

/// What a control connection holds.
#[derive(Debug)]
struct Held {
    stream: TcpStream,
    queue_pairs: HashMap<u32, QueuePair>,
    /// The device would not destroy one: what its compute server has sent may still arrive, so that one is never to be counted as dead.
    is_stuck: bool,
    /// Message connections, by name. Not by queue pair: that of one that an endpoint has closed is given out again, and who still
    /// speaks of the old one would close the new one.
    connections: HashMap<u64, Made>,
    next_name: u64,
}

impl Held {
    fn new(stream: TcpStream) -> Self {
        let (queue_pairs, connections) = (HashMap::new(), HashMap::new());
        Self { stream, queue_pairs, is_stuck: false, connections, next_name: 0 }
    }
}

impl Serving {
    pub(super) fn new(
        (secret, reliability, ordered): (&Secret, Reliability, bool),
        place: Place,
        domain: Arc<Domain>,
        local: Local,
        memory: Memory,
    ) -> Result<Self, Error> {
        // Its queue pairs only answer, so nothing ever completes here.
        let completions = CompletionQueue::new(domain.device(), 1, None)?;
        Ok(Self {
            place,
            secret: secret.clone(),
            reliability,
            ordered,
            local,
            state: Mutex::default(),
            acceptor: Mutex::default(),
            completions,
            domain,
            memory,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn device(&self) -> &DeviceInfo {
        self.domain.device().info()
    }

    pub(super) fn open_device(&self) -> &Arc<Device> {
        self.domain.device()
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        self.memory.regions.first().map_or(&[], Region::words)
    }

    /// Its memory, for threads of this process.
    pub(super) fn memory(&self) -> LocalMemory {
        match self.place.whose {
            ListenerId::Memory(server) => LocalMemory::new(&self.memory.regions, 0, server),
            ListenerId::Compute(_) => LocalMemory::none(),
        }
    }

    pub(super) fn connected(&self) -> usize {
        self.state().sessions.len()
    }

    pub(super) fn queue_pairs(&self) -> usize {
        self.state().sessions.values().map(|held| held.queue_pairs.len()).sum()
    }

    pub(super) fn withdraw_memory(&self) {
        lock(&self.memory.registered).take();
    }

    pub(super) fn break_connections(&self) {
        let broken: Vec<_> =
            self.state().sessions.values_mut().map(|held| std::mem::take(&mut held.queue_pairs)).collect();
        drop(broken);
    }

    /// Ends all connections; none is accepted any more.
    pub(super) fn stop(&self) {
        let mut state = self.state();
        state.stopped = true;
        let streams = state.unproven.values().chain(state.sessions.values().map(|held| &held.stream));
        streams.for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    }

    fn hello_ack(&self) -> HelloAck {
        let server = match self.place.whose {
            ListenerId::Memory(server) => server.number(),
            ListenerId::Compute(_) => 0,
        };
        HelloAck {
            server: u64::from(server),
            servers: self.place.servers as u64,
            cluster: self.place.cluster,
            address: self.memory.address,
            bytes: self.place.bytes,
            key: self.memory.key,
            atomics: self.device().atomics,
            ordered: self.ordered,
        }
    }

    /// Takes a new connection in. If too many have proven nothing yet, any one of them goes: those that say nothing cannot keep
    /// out who has only to answer.
    fn enter(&self, stream: &TcpStream) -> Option<SessionId> {
        let mut state = self.state();
        if state.stopped {
            return None;
        }
        if state.unproven.len() >= UNPROVEN_MAX {
            let victim = rand::rng().random_range(0..state.unproven.len());
            let id = *state.unproven.keys().nth(victim)?;
            if let Some(stream) = state.unproven.remove(&id) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        let id = state.next;
        state.next += 1;
        state.unproven.insert(id, stream.try_clone().ok()?);
        Some(id)
    }

    /// A connection has proven that it knows the secret.
    fn admit(&self, id: SessionId) -> bool {
        let mut state = self.state();
        let Some(stream) = state.unproven.remove(&id) else { return false };
        if state.stopped || state.sessions.len() >= SESSIONS_MAX {
            return false;
        }
        state.sessions.insert(id, Held::new(stream));
        true
    }

    /// A connection is over, wherever it has got to. First its queue pairs go, then what it claimed is dead.
    fn end(&self, id: SessionId) {
        let mut state = self.state();
        state.unproven.remove(&id);
        let Some(held) = state.sessions.remove(&id) else { return };
        drop(state);
        let queue_pairs = held.queue_pairs.len();
        // Their queue pairs are the endpoints'; they do not reach the region. A memory server is lost for good to whoever loses it, and a
        // compute server may be called again.
        let how = if matches!(self.place.whose, ListenerId::Memory(_)) { End::Closed } else { End::Lost };
        held.connections.values().for_each(|connection| connection.record.end(how));
        drop(held.connections);
        let ended: Vec<_> = held.queue_pairs.into_values().map(QueuePair::destroy).collect();
        if held.is_stuck || ended.iter().any(Result::is_err) {
            return tracing::error!(
                "the device does not let go of a compute server's queue pairs: it is never counted as dead, and what it has locked stays \
                 so. End this memory server, and start all of them anew"
            );
        }
        let dead = self.state().owners.end(id);
        if dead.is_empty() {
            tracing::debug!(queue_pairs, "a control connection ended");
        } else {
            tracing::warn!(queue_pairs, ?dead, "a compute server is gone; its queue pairs are destroyed");
        }
    }

    fn answer(&self, id: SessionId, question: &Question) -> Answer {
        let done = |outcome: Result<(), String>| outcome.map_or_else(Answer::Refused, |()| Answer::Done);
        if let ListenerId::Compute(owner) = self.place.whose
            && let Question::Connect { .. }
            | Question::Claim(_)
            | Question::Release(_)
            | Question::Listen { .. }
            | Question::WhereListens(_) = question
        {
            return Answer::Refused(format!("{owner} is a compute server; name memory servers"));
        }
        match *question {
            Question::Connect { ours, instead_of } => instead_of
                .map_or(Ok(()), |old| self.disconnect(id, old))
                .and_then(|()| self.connect(id, &ours))
                .map_or_else(Answer::Refused, Answer::Connected),
            Question::Disconnect(queue_pair) => done(self.disconnect(id, queue_pair)),
            Question::Claim(owner) => done(self.state().owners.claim(owner, id)),
            Question::Release(owner) => done(self.release(id, owner)),
            // Of a compute server it is asked whether it is that one.
            Question::Lives(owner) if let ListenerId::Compute(this) = self.place.whose => Answer::Lives(owner == this),
            Question::Lives(owner) => Answer::Lives(self.state().owners.lives(owner)),
            Question::Listen { owner, port } => done(self.listen(id, owner, port)),
            Question::WhereListens(owner) => match self.state().owners.listens_at(owner) {
                Some(address) => Answer::ListensAt(address),
                None => Answer::Refused("it does not listen".into()),
            },
            Question::Listens => match &*lock(&self.acceptor) {
                Some(acceptor) => Answer::Listens { bytes: acceptor.connection_bytes as u64 },
                None => Answer::Refused(NO_THREADS.into()),
            },
            Question::Attach { ours, who, opened, ordered } => {
                self.attach(id, &ours, who, opened, ordered).unwrap_or_else(Answer::Refused)
            }
            Question::AttachReady(name) => {
                self.connections_of(id, |connections| connections.get_mut(&name).map(Made::ready));
                Answer::Done
            }
            Question::Detach(name, in_order) => {
                if let Some(connection) = self.connections_of(id, |connections| connections.remove(&name)) {
                    connection.record.end(if in_order { End::Closed } else { End::Lost });
                }
                Answer::Done
            }
            Question::ConnectionState(name) => {
                let state = self.connections_of(id, |connections| {
                    connections.get(&name).map(|connection| connection.record.state())
                });
                Answer::State(state.unwrap_or(ConnectionState::Dismissed))
            }
        }
    }

    /// Notes where a compute server listens: at the host from which its control connection comes.
    fn listen(&self, id: SessionId, owner: OwnerId, port: u16) -> Result<(), String> {
        let mut state = self.state();
        let held = state.sessions.get(&id).ok_or("the memory server stops")?;
        let host = held.stream.peer_addr().map_err(|error| error.to_string())?.ip().to_canonical();
        state.owners.listen(owner, id, (port != 0).then_some(SocketAddr::new(host, port)))
    }

    /// Makes this side of a message connection.
    fn attach(
        &self,
        id: SessionId,
        theirs: &Peer,
        who: PeerId,
        opened: Opened,
        ordered: bool,
    ) -> Result<Answer, String> {
        let acceptor = lock(&self.acceptor).clone().ok_or(NO_THREADS)?;
        let held = self.state().sessions.get(&id).map_or(0, |held| held.queue_pairs.len() + held.connections.len());
        if held >= QUEUE_PAIRS_MAX {
            return Err(too_many());
        }
        let (made, ours, ours_opened) =
            acceptor.attach((&self.local, self.reliability), theirs, who, opened, ordered)?;
        let mut state = self.state();
        let held = state.sessions.get_mut(&id).ok_or("the memory server stops")?;
        // Those that the endpoints have closed are of no use to anybody.
        held.connections.retain(|_, connection| connection.record.state() == ConnectionState::Up);
        let name = held.next_name;
        held.next_name += 1;
        held.connections.insert(name, made);
        Ok(Answer::Attached { name, theirs: ours, opened: ours_opened })
    }

    fn connections_of<T>(&self, id: SessionId, f: impl FnOnce(&mut HashMap<u64, Made>) -> Option<T>) -> Option<T> {
        self.state().sessions.get_mut(&id).and_then(|held| f(&mut held.connections))
    }

    fn connect(&self, id: SessionId, theirs: &Peer) -> Result<Peer, String> {
        let held = self.state().sessions.get(&id).map_or(0, |held| held.queue_pairs.len());
        if held >= QUEUE_PAIRS_MAX {
            return Err(too_many());
        }
        let make = || {
            // It only answers.
            let options = QueuePairOptions { send_depth: 1, inline_bytes: 0, gather_max: 1, receive: None };
            let ours = QueuePair::new(&self.domain, &self.completions, &self.completions, options)?;
            ours.connect(&self.local, theirs, Access::Peers, self.reliability)?;
            Ok::<_, Error>(ours)
        };
        let ours = make().map_err(|error| error.to_string())?;
        let described = ours.describe(&self.local);
        match self.state().sessions.get_mut(&id) {
            Some(held) => held.queue_pairs.insert(ours.number(), ours),
            None => return Err("the memory server stops".into()),
        };
        Ok(described)
    }

    /// Nothing comes over this queue pair any more.
    fn disconnect(&self, id: SessionId, queue_pair: u64) -> Result<(), String> {
        let Ok(number) = u32::try_from(queue_pair) else { return Ok(()) };
        let ended = self.state().sessions.get_mut(&id).and_then(|held| held.queue_pairs.remove(&number));
        // Destroyed outside the lock.
        ended.map_or(Ok(()), QueuePair::destroy).map_err(|error| {
            if let Some(held) = self.state().sessions.get_mut(&id) {
                held.is_stuck = true;
            }
            error.to_string()
        })
    }

    /// This session's compute server has ended in good order.
    fn release(&self, id: SessionId, owner: OwnerId) -> Result<(), String> {
        let mut state = self.state();
        if state.sessions.get(&id).is_some_and(|held| held.is_stuck) {
            return Err("the device has not let go of one of its queue pairs".into());
        }
        state.owners.release(owner, id);
        Ok(())
    }

    /// Answers one connection until it ends.
    fn converse(&self, id: SessionId, stream: TcpStream) -> Result<(), Error> {
        let failed = || Error::io("the handshake of a control connection");
        keep_alive(&stream).map_err(failed())?;
        let (mut sender, mut receiver): (Sender, Receiver) =
            control::accept(stream, &self.secret, Instant::now() + PROOF_LIMIT).map_err(failed())?;
        if !self.admit(id) {
            tracing::warn!(limit = SESSIONS_MAX, "a compute server was turned away: there are too many");
            return Ok(());
        }
        sender.send(&self.hello_ack()).map_err(Error::io("welcoming a compute server"))?;
        while let Some(question) = receiver.receive::<Question>()? {
            sender.send(&self.answer(id, &question)).map_err(Error::io("answering a compute server"))?;
        }
        Ok(())
    }
}

fn too_many() -> String {
    format!("one compute server has at most {QUEUE_PAIRS_MAX} connections; use fewer workers")
}

/// Ends a connection however its thread ends.
struct Ending<'a> {
    serving: &'a Serving,
    id: SessionId,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.serving.end(self.id);
    }
}

/// Accepts connections until the listener is shut down, and waits for their threads.
pub(super) fn accept_all(serving: &Serving, listener: &TcpListener) {
    std::thread::scope(|scope| {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(_) if serving.state().stopped => return,
                Err(error) => {
                    // Out of descriptors, or a connection that was gone at once. Neither is the next one's fault.
                    tracing::warn!(%error, "a control connection was not accepted");
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let Some(id) = serving.enter(&stream) else { continue };
            let connection = move || {
                let _ending = Ending { serving, id };
                let peer = stream.peer_addr().map_or_else(|_| "unknown".into(), |peer| peer.to_string());
                if let Err(error) = serving.converse(id, stream) {
                    tracing::info!(peer, %error, "a control connection ended");
                }
            };
            let spawned = std::thread::Builder::new().name("farlink-control".into()).spawn_scoped(scope, connection);
            if let Err(error) = spawned {
                tracing::warn!(%error, "no thread for a control connection");
                serving.end(id);
            }
        }
    });
}
