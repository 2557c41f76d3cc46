//! The `verbs` fabric: RDMA through libibverbs, on cards and on SoftRoCE.
//!
//! A memory server ([`VerbsServer`]) registers its region once and then only answers control connections; all else is done
//! by its card. A compute server ([`VerbsFabric`]) has one control connection to each memory server. Each of its workers
//! has, to each memory server, a reliable connection of its own: a queue pair that no other thread touches. So nothing
//! on the way of a request is shared, locked or allocated.
//!
//! From the bottom up: `ib` wraps the C library; `control` is the protocol in which both sides prove that they know the
//! cluster's [`Secret`]; `session` is a control connection as the compute server has it; `connecting` makes a reliable
//! connection; `queue` is such a connection with its requests; `data_path` is a
//! worker's way to a region, `failures` what becomes of it when requests fail, `message_connection` its [message
//! connection](crate::connection); `endpoint` is all connections of a worker; `peers` finds compute servers that listen;
//! `server` is the memory server, and what of it a compute server needs that listens.
//!
//! What the fabric promises ([`Capabilities`](crate::Capabilities)): WRITEs and atomics are placed in order, unless its options, or a memory
//! server's, say that the network does not keep it. Atomics
//! are atomic against WRITEs and CPUs only if all memory servers' devices say so (`IBV_ATOMIC_GLOB`); SoftRoCE and most cards do not.
//!
//! # Who is dead
//! A compute server claims its incarnation at every memory server, on its control connections. When one of those ends,
//! however it ends, that memory server first destroys all queue pairs that came with it, and then counts the incarnation as
//! dead for ever: it cannot be claimed again there. *Dead* is what all memory servers say at once. So nothing of a dead
//! compute server can still land (rule 11 of one-sided access), and no reconnection can raise it from the dead. One that finds
//! itself cut off by some memory servers ends its connections to the others, too (`claim`).
//!
//! # Compute servers that listen
//! One that [listens](crate::Fabric::peer_listener) accepts control connections as a memory server does, at a port that the system
//! chooses, and tells the memory servers which. Those say it to who asks, with the host from which that compute server is connected to
//! them, and forget it with its incarnation. So others need know no address, and a firewall must let compute servers at each other.

mod claim;
mod connecting;
mod control;
mod data_path;
mod endpoint;
mod failures;
#[cfg(test)]
mod fake;
mod ib;
mod message_connection;
mod opened;
mod peers;
mod queue;
mod server;
mod session;

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

use hashbrown::HashMap;

use self::{
    claim::VerbsClaim,
    control::{Answer, Question},
    endpoint::{PEERS_MAX, Setup, VerbsEndpoint},
    ib::{CompletionQueue, Device, Domain, Local, QueuePair},
    peers::Peers,
    server::PeerListener,
    session::{Awaited, HANDSHAKE_LIMIT, Losses, Session},
};
pub use self::{
    control::Secret,
    ib::{Atomics, DeviceInfo, GidInfo, PortInfo, PortState, Reliability, devices},
    server::{DEFAULT_PORT, VerbsServeOptions, VerbsServer},
};
use crate::{
    clock::Clock,
    endpoint::Endpoint,
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
    listener::{ListenOptions, Listener},
    lock::OwnerId,
    ptr::ServerId,
    sync::{Arc, AtomicU64, Mutex, Ordering, lock},
    wire::DecodeError,
};

/// Bytes that requests carry themselves, where the device can.
const INLINE_BYTES: u32 = 64;
/// Requests in a queue pair, at most.
const DEPTH_MAX: u32 = 1 << 14;
/// Fewer are not tried where a device does not take as many as are wanted.
const DEPTH_MIN: u32 = 16;
/// Pieces that a request gathers, where the device can.
const GATHER_MAX: u32 = 32;
/// For so long, *alive* is not asked again. *Dead* is for ever.
const ALIVE_FOR: Duration = Duration::from_millis(20);

/// Which device, and which of its addresses; the default is the first that is usable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceChoice {
    /// The device's name, such as `rxe0`; `None` for the first with an active port.
    pub name: Option<String>,
    /// The port, from 1; `None` for the first active one.
    pub port: Option<u8>,
    /// The address by its index in the port's table (see [`DeviceInfo`]); `None` for the best: an IPv4 address that RoCE v2
    /// routes, if there is one.
    pub gid_index: Option<u8>,
}

impl DeviceChoice {
    fn open(&self) -> Result<(Arc<Device>, Local), Error> {
        let device = Device::open(self.name.as_deref())?;
        let local = device.local(self.port, self.gid_index)?;
        device.info().require_atomics()?;
        Ok((device, local))
    }
}

/// How a compute server reaches the memory servers.
#[derive(Debug, Clone)]
pub struct VerbsOptions {
    /// `HOST:PORT` of every memory server, in any order.
    pub servers: Vec<String>,
    /// The cluster's secret.
    pub secret: Secret,
    /// This machine's device.
    pub device: DeviceChoice,
    /// When a connection that does not answer is taken for dead.
    pub reliability: Reliability,
    /// Requests that a worker has in the card for each memory server; more wait their turn. Fewer where the device takes fewer.
    pub queue_depth: u32,
    /// When a memory server is given up to which TCP works and RDMA does not: once all that a worker asks of it has failed for so long. It is
    /// [lost](Error::ServerLost) then. A minute; [`Duration::MAX`]: never. Failures with half of that time between them, and ten seconds at
    /// least, are not taken together.
    pub give_up_after: Duration,
    /// Whether WRITEs of one queue pair are placed in the order of their posting; see [`VerbsServeOptions::ordered`]. Where a memory server says
    /// that they are not, they are not.
    pub ordered: bool,
}

impl VerbsOptions {
    /// The memory servers at these addresses, with the defaults for all else.
    pub fn new(servers: impl IntoIterator<Item = impl Into<String>>, secret: Secret) -> Self {
        Self {
            servers: servers.into_iter().map(Into::into).collect(),
            secret,
            device: DeviceChoice::default(),
            reliability: Reliability::default(),
            queue_depth: 128,
            give_up_after: Duration::from_secs(60),
            ordered: true,
        }
    }
}

/// The memory servers of a cluster, over RDMA.
#[derive(Debug)]
pub struct VerbsFabric {
    sessions: Vec<Arc<Session>>,
    peers: Arc<Peers>,
    secret: Secret,
    losses: Losses,
    domain: Arc<Domain>,
    local: Local,
    reliability: Reliability,
    queue_depth: u32,
    give_up_after: Duration,
    ordered: bool,
    known: Mutex<HashMap<OwnerId, Known>>,
}

/// The last known state of a compute server.
#[derive(Debug, Clone, Copy)]
enum Known {
    AliveAt(Instant),
    Dead,
}

impl VerbsFabric {
    /// Opens the device and connects to all memory servers. Blocks.
    ///
    /// # Errors
    /// If there is no such device, it has no atomics, or it makes no queue pairs; if a memory server is not there, does not know the secret
    /// or is of another cluster.
    pub fn connect(options: &VerbsOptions) -> Result<Self, Error> {
        options.reliability.validate()?;
        if options.servers.is_empty() {
            return Err(Error::BadOption { option: "servers", why: "name the memory servers, HOST:PORT each".into() });
        }
        let (device, local) = options.device.open()?;
        if !(1..=DEPTH_MAX).contains(&options.queue_depth) {
            let why = format!("{}; it must be 1 to {DEPTH_MAX}", options.queue_depth);
            return Err(Error::BadOption { option: "queue_depth", why });
        }
        let domain = Domain::new(&device)?;
        let queue_depth = probe_depth(&domain, options.queue_depth)?;
        let losses = Losses::new(AtomicU64::new(0));
        let connect =
            |address: &String| Session::connect(address, &options.secret, &losses, HANDSHAKE_LIMIT).map(Arc::new);
        let mut sessions = options.servers.iter().map(connect).collect::<Result<Vec<_>, Error>>()?;
        sessions.sort_by_key(|session| session.server());
        require_whole(&sessions)?;
        let ordered = options.ordered && sessions.iter().all(|session| session.hello_ack().ordered);
        Ok(Self {
            peers: Arc::new(Peers::new(&sessions, &options.secret, &losses)),
            sessions,
            secret: options.secret.clone(),
            losses,
            domain,
            local,
            reliability: options.reliability,
            queue_depth,
            give_up_after: options.give_up_after,
            ordered,
            known: Mutex::default(),
        })
    }

    /// Cuts the control connections, as if this machine had gone. For tests.
    #[doc(hidden)]
    pub fn abort(&self) {
        self.sessions.iter().for_each(|session| session.abort());
    }

    /// Cuts the control connection to one memory server. For tests.
    #[doc(hidden)]
    pub fn abort_one(&self, server: ServerId) {
        self.sessions[server.index()].abort();
    }

    fn is_dead(&self, owner: OwnerId) -> bool {
        let asked: Vec<_> = self.sessions.iter().map(|session| session.ask(&Question::Lives(owner))).collect();
        // A memory server that does not answer proves nothing.
        let is_dead = |asked: Awaited| matches!(asked.wait(), Ok(Answer::Lives(false)));
        asked.into_iter().all(|asked| asked.is_ok_and(is_dead))
    }
}

/// For how many requests the device makes queue pairs, of so many or fewer. Its limit does not tell: a request that carries bytes may
/// take the room of several.
fn probe_depth(domain: &Arc<Domain>, queue_depth: u32) -> Result<u32, Error> {
    let info = domain.device().info();
    let completions = CompletionQueue::new(domain.device(), 1, None)?;
    let mut refused = None;
    let taken = most_taken(queue_depth, |depth| {
        let options = endpoint::options(depth, info.inline_bytes.min(INLINE_BYTES));
        let made = QueuePair::new(domain, &completions, &completions, options).map(drop);
        made.inspect_err(|error| _ = refused.get_or_insert_with(|| error.to_string()))
    })?;
    if let Some(why) = refused {
        tracing::warn!(device = info.name, taken, why, "no queue pairs for {queue_depth} requests; they have fewer");
    }
    Ok(taken)
}

/// So many, or half of it, and so on. If even few are refused it is not for their number: the error is that of the first.
fn most_taken(wanted: u32, mut take: impl FnMut(u32) -> Result<(), Error>) -> Result<u32, Error> {
    let Err(refusal) = take(wanted) else { return Ok(wanted) };
    let mut fewer =
        std::iter::successors(Some(wanted / 2), |depth| Some(depth / 2)).take_while(|&depth| depth >= DEPTH_MIN);
    fewer.find(|&depth| take(depth).is_ok()).ok_or(refusal)
}

/// Why memory servers are lost to this machine.
fn device_fails(why: impl Display) -> String {
    format!("this machine's RDMA device fails: {why}; see the system's log")
}

/// Whether these, sorted, are all memory servers of one cluster.
fn require_whole(sessions: &[Arc<Session>]) -> Result<(), Error> {
    let first = sessions.first().map(|session| *session.hello_ack());
    for (index, session) in sessions.iter().enumerate() {
        let (hello_ack, server) = (session.hello_ack(), session.server());
        if let Some(first) = first.filter(|first| first.cluster != hello_ack.cluster) {
            return Err(Error::WrongCluster { server, found: hello_ack.cluster, expected: first.cluster });
        }
        if hello_ack.servers != sessions.len() as u64 || server.index() != index {
            let addresses: Vec<String> =
                sessions.iter().map(|session| format!("{} ({})", session.server(), session.address())).collect();
            let why = format!(
                "the cluster has {} memory servers; the addresses lead to {}. Name each of them once",
                hello_ack.servers,
                addresses.join(", ")
            );
            return Err(Error::BadOption { option: "servers", why });
        }
    }
    Ok(())
}

impl Fabric for VerbsFabric {
    fn servers(&self) -> usize {
        self.sessions.len()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.sessions[server.index()].hello_ack().bytes
    }

    fn endpoint(&self, _seed: u64, _clock: Clock) -> Result<Box<dyn Endpoint>, Error> {
        let device = self.domain.device();
        let info = device.info();
        // Twice, because completions of a connection that broke may still be there when the next one has made its own.
        let to_servers =
            (self.queue_depth + message_connection::MESSAGE_DEPTH).saturating_mul(2 * self.sessions.len() as u32);
        let completions = to_servers.saturating_add(2 * PEERS_MAX * message_connection::MESSAGE_DEPTH);
        if completions > info.completions_max {
            let why = format!(
                "{} requests and some messages for each of {} memory servers and {PEERS_MAX} compute servers need a completion queue of {completions}; {} takes {}",
                self.queue_depth,
                self.sessions.len(),
                info.name,
                info.completions_max
            );
            return Err(Error::BadOption { option: "queue_depth", why });
        }
        let setup = Setup {
            domain: Arc::clone(&self.domain),
            local: self.local.clone(),
            completions: CompletionQueue::new(device, completions, None)?,
            reliability: self.reliability,
            depth: self.queue_depth,
            give_up_after: self.give_up_after,
            ordered: self.ordered,
            inline_bytes: info.inline_bytes.min(INLINE_BYTES),
        };
        Ok(Box::new(VerbsEndpoint::connect(setup, &self.sessions, &self.peers, &self.losses)?))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        let asked: Vec<_> = self.sessions.iter().map(|session| session.ask(&Question::Claim(owner))).collect();
        // What was claimed is released again if another memory server refuses; and only that: where it was refused, this
        // very compute server may hold it.
        let mut claim = VerbsClaim::new(owner, &self.secret);
        let mut failed = None;
        for (asked, session) in asked.into_iter().zip(&self.sessions) {
            match asked.and_then(Awaited::wait) {
                Ok(Answer::Done) => claim.taken_by(session),
                Ok(Answer::Refused(why)) => {
                    failed = Some(Error::NotAdmitted { address: session.address().into(), why });
                }
                Ok(_) => failed = Some(DecodeError("a memory server answered something else than was asked").into()),
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            None => Ok(Box::new(claim)),
            Some(error) => Err(error),
        }
    }

    /// Asks the memory servers, unless it has just done so; blocks for a round trip over TCP.
    fn liveness(&self, owner: OwnerId) -> Liveness {
        let now = Instant::now();
        match lock(&self.known).get(&owner) {
            Some(Known::Dead) => return Liveness::Dead,
            Some(Known::AliveAt(then)) if now.duration_since(*then) < ALIVE_FOR => return Liveness::Alive,
            _ => {}
        }
        let (known, liveness) = match self.is_dead(owner) {
            true => (Known::Dead, Liveness::Dead),
            false => (Known::AliveAt(now), Liveness::Alive),
        };
        lock(&self.known).insert(owner, known);
        liveness
    }

    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        options.validate()?;
        let common = (&self.secret, self.reliability, self.ordered);
        let device = (&self.domain, &self.local);
        Ok(Box::new(PeerListener::start(owner, &self.sessions, common, device, options)?))
    }

    fn check_servers(&self) -> Result<(), Error> {
        if let Some(failure) = self.domain.device().failure() {
            let why = device_fails(failure);
            self.sessions.iter().for_each(|session| session.give_up(&why));
        }
        if self.losses.load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        self.sessions.iter().find_map(|session| session.lost()).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_requests_are_tried_until_a_device_takes_them() {
        let tried = |wanted: u32, takes: u32| {
            let mut tried = Vec::new();
            let taken = most_taken(wanted, |depth| {
                tried.push(depth);
                let refusal = || Error::BadOption { option: "refused", why: depth.to_string() };
                (depth <= takes).then_some(()).ok_or_else(refusal)
            });
            (tried, taken.map_err(|error| error.to_string()))
        };
        assert_eq!(tried(128, 1000), (vec![128], Ok(128)));
        assert_eq!(tried(128, 50), (vec![128, 64, 32], Ok(32)));
        let (depths, refused) = tried(128, 0);
        assert_eq!(depths, [128, 64, 32, 16]);
        assert!(refused.unwrap_err().contains("128"), "not what is wrong with most");
        assert_eq!(tried(4, 0).0, [4]);
    }
}
