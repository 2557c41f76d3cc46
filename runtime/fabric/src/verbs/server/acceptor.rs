//! Where workers ask for message connections: what the control connections of a memory server share with its endpoints.
//!
//! Each endpoint has an [`EndpointDomain`]: a protection domain of its own, so that a connection reaches neither the region nor another endpoint's
//! connections (the region is registered there once more, for the endpoint's own requests to read, and for nobody else); completion queues; and a queue of receives, of which each notification of its connections uses up one. A control
//! connection makes a connection's queue pair and memory and, once its worker says that it is ready, leaves them with its domain.
//! What becomes of a connection is kept in its [`Record`], which both sides have.

use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
};

use crate::{
    buffer::LocalKey,
    connection::{ConnectionState, PeerId},
    error::Error,
    listener::{EndpointWaker, ListenOptions},
    memory::LocalMemory,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock},
    verbs::{
        GATHER_MAX, INLINE_BYTES, Reliability,
        connecting::Connection,
        control::Opened,
        ib::{
            Access, Channel, CompletionQueue, Device, Domain, Local, Peer, QueuePair, QueuePairOptions, ReceiveQueue,
            Registered,
        },
        opened::Opening,
        queue::Source,
    },
};

/// Requests of an endpoint to one worker in the card; more wait their turn.
pub(super) const ENDPOINT_DEPTH: u32 = 32;
/// Connections of one endpoint at a time.
const CONNECTIONS_MAX: u32 = 256;
/// Notifications that an endpoint has not seen yet. When there are more, senders wait.
const NOTIFICATIONS_MAX: u32 = 1024;

/// A memory server's side of all its message connections.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) connection_bytes: usize,
    /// Whether WRITEs are placed in the order of their posting.
    pub(super) ordered: bool,
    pub(super) domains: Vec<EndpointDomain>,
    open: AtomicBool,
}

/// Where connections come to one endpoint.
#[derive(Debug)]
pub(super) struct EndpointDomain {
    pub(super) sent: Arc<CompletionQueue>,
    pub(super) received: Arc<CompletionQueue>,
    pub(super) receives: Arc<ReceiveQueue>,
    pub(super) channel: Arc<Channel>,
    pub(super) domain: Arc<Domain>,
    pub(super) wake: Arc<Wake>,
    /// Counts what has come and gone, so that the endpoint need not look for it.
    news: AtomicU64,
    arrived: Mutex<Vec<Arrival>>,
    connections: Arc<AtomicU64>,
    connections_max: u64,
    pub(super) taken: AtomicBool,
    // In this order, and behind the queue pairs in `arrived`: the region goes after its registration.
    _region: Option<Registered>,
    /// The region, as this side's requests read it.
    pub(super) source: Source,
}

/// A connection that is ready for its endpoint.
#[derive(Debug)]
pub(super) struct Arrival {
    // Before the memory that the worker may write to.
    pub(super) connection: Connection,
    pub(super) opening: Opening,
    pub(super) who: PeerId,
    /// What the worker has opened.
    pub(super) opened: Opened,
    /// Whether the worker relies on WRITEs being placed in the order of their posting.
    pub(super) ordered: bool,
    pub(super) record: Arc<Record>,
}

/// One of the connections that an endpoint can have.
#[derive(Debug)]
struct Place(Arc<AtomicU64>);

impl Drop for Place {
    fn drop(&mut self) {
        // Release: who has the place next comes after the end of who had it.
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// What has become of a connection.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) acceptor: Arc<Acceptor>,
    endpoint: usize,
    fate: AtomicU64,
    /// Until it ends: its endpoint may take notice much later, and its worker come again before that.
    place: Mutex<Option<Place>>,
}

const OPEN: u64 = 0;
const CLOSED: u64 = 1;
const LOST: u64 = 2;
const DISMISSED: u64 = 3;

/// The worker's end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It has no use for it any more.
    Closed,
    /// It makes a new one instead, or may do so.
    Lost,
}

impl Record {
    /// The worker is gone.
    pub(super) fn end(&self, how: End) {
        let fate = if how == End::Closed { CLOSED } else { LOST };
        // Only the first end counts.
        if self.fate.compare_exchange(OPEN, fate, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            let domain = self.domain();
            // Its endpoint may not look for long.
            let is_this = |arrival: &mut Arrival| std::ptr::eq(&*arrival.record, self);
            let not_taken_in: Vec<_> = lock(&domain.arrived).extract_if(.., is_this).collect();
            drop(not_taken_in);
            lock(&self.place).take();
            domain.tell();
        }
    }

    /// How the worker has ended it, if it has.
    pub(super) fn ended(&self) -> Option<End> {
        match self.fate.load(Ordering::Acquire) {
            CLOSED => Some(End::Closed),
            LOST => Some(End::Lost),
            _ => None,
        }
    }

    /// The endpoint has closed it.
    pub(super) fn dismiss(&self) {
        self.fate.store(DISMISSED, Ordering::Release);
        lock(&self.place).take();
    }

    /// As its worker is to see it.
    pub(super) fn state(&self) -> ConnectionState {
        if !self.acceptor.is_open() {
            ConnectionState::Dead
        } else if self.fate.load(Ordering::Acquire) == OPEN {
            ConnectionState::Up
        } else {
            ConnectionState::Dismissed
        }
    }

    fn domain(&self) -> &EndpointDomain {
        &self.acceptor.domains[self.endpoint]
    }
}

/// A connection that a control connection has made. What its endpoint does not know goes with this; what it has, it lets go itself.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) record: Arc<Record>,
    /// Until the worker is ready.
    arrival: Option<Arrival>,
}

impl Made {
    /// The worker is ready: its endpoint hears of it.
    pub(super) fn ready(&mut self) {
        if let Some(arrival) = self.arrival.take() {
            let record = Arc::clone(&arrival.record);
            let domain = record.domain();
            lock(&domain.arrived).push(arrival);
            domain.tell();
            if !record.acceptor.is_open() {
                lock(&domain.arrived).clear();
            }
        }
    }
}

impl Acceptor {
    /// An acceptor of so many endpoints, on the memory server's device.
    pub(super) fn new(
        device: &Arc<Device>,
        memory: &LocalMemory,
        ordered: bool,
        options: &ListenOptions,
    ) -> Result<Arc<Self>, Error> {
        let new = |_| EndpointDomain::new(device, memory);
        let domains = (0..options.endpoints).map(new).collect::<Result<_, Error>>()?;
        let (connection_bytes, open) = (options.connection_bytes, AtomicBool::new(true));
        Ok(Arc::new(Self { connection_bytes, ordered, domains, open }))
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    /// No more connections.
    pub(super) fn shut(&self) {
        self.open.store(false, Ordering::Release);
        self.domains.iter().for_each(|domain| lock(&domain.arrived).clear());
    }

    /// Makes this side of a connection to a worker's queue pair; what to tell the worker.
    pub(super) fn attach(
        self: &Arc<Self>,
        (local, reliability): (&Local, Reliability),
        theirs: &Peer,
        who: PeerId,
        opened: Opened,
        ordered: bool,
    ) -> Result<(Made, Peer, Opened), String> {
        let endpoint = (u64::from(who.owner.incarnation()) + u64::from(who.worker)) as usize % self.domains.len();
        let domain = &self.domains[endpoint];
        let place = domain.place()?;
        let make = || {
            let opening = Opening::new(&domain.domain, self.connection_bytes)?;
            let queue_pair = domain.queue_pair()?;
            // What may be done is up to the memory: all that this domain has open are connections, which take READs and WRITEs.
            queue_pair.connect(local, theirs, Access::Peers, reliability)?;
            Ok::<_, Error>((opening, queue_pair))
        };
        let (opening, queue_pair) = make().map_err(|error| error.to_string())?;
        let (ours, ours_opened) = (queue_pair.describe(local), opening.describe());
        let (fate, place) = (AtomicU64::new(OPEN), Mutex::new(Some(place)));
        let record = Arc::new(Record { acceptor: Arc::clone(self), endpoint, fate, place });
        let connection = Connection::new(queue_pair, theirs.queue_pair);
        let arrival = Arrival { connection, opening, who, opened, ordered, record: Arc::clone(&record) };
        Ok((Made { record, arrival: Some(arrival) }, ours, ours_opened))
    }
}

impl EndpointDomain {
    fn new(device: &Arc<Device>, memory: &LocalMemory) -> Result<Self, Error> {
        let domain = Domain::new(device)?;
        let (region, source) = source(&domain, memory);
        let channel = Channel::new(device)?;
        // Twice, because completions of a connection that is gone may still be there when the next one has made its own.
        let per_connection = 2 * ENDPOINT_DEPTH;
        let completions = (CONNECTIONS_MAX * per_connection).min(device.info().completions_max.max(per_connection));
        let connections_max = (completions / per_connection) as usize;
        let mut made = Self {
            sent: CompletionQueue::new(device, completions, None)?,
            received: CompletionQueue::new(device, NOTIFICATIONS_MAX, Some(&channel))?,
            receives: ReceiveQueue::new(&domain, NOTIFICATIONS_MAX)?,
            channel,
            domain,
            source,
            _region: region,
            wake: Arc::new(Wake::new()?),
            news: AtomicU64::new(0),
            arrived: Mutex::default(),
            connections: Arc::default(),
            connections_max: connections_max as u64,
            taken: AtomicBool::new(false),
        };
        made.probe_gather()?;
        Ok(made)
    }

    /// Has requests gather as many pieces as the device makes queue pairs for: its limit is one for all kinds of them.
    fn probe_gather(&mut self) -> Result<(), Error> {
        let mut refusal = None;
        for gather_max in gather_probes(self.source.gather_max) {
            self.source.gather_max = gather_max;
            match self.queue_pair() {
                Ok(_) => return Ok(()),
                Err(error) => refusal = Some(error),
            }
        }
        refusal.map_or(Ok(()), Err)
    }

    fn place(&self) -> Result<Place, String> {
        let before = self.connections.fetch_add(1, Ordering::Acquire);
        let place = Place(Arc::clone(&self.connections));
        if before < self.connections_max {
            return Ok(place);
        }
        Err(format!(
            "each of its threads serves at most {} workers; start it with more --threads",
            self.connections_max
        ))
    }

    fn queue_pair(&self) -> Result<QueuePair, Error> {
        let options = QueuePairOptions {
            send_depth: ENDPOINT_DEPTH,
            inline_bytes: self.inline_bytes(),
            gather_max: self.source.gather_max,
            receive: Some(Arc::clone(&self.receives)),
        };
        QueuePair::new(&self.domain, &self.sent, &self.received, options)
    }

    pub(super) fn inline_bytes(&self) -> u32 {
        self.domain.device().info().inline_bytes.min(INLINE_BYTES)
    }

    pub(super) fn news(&self) -> u64 {
        self.news.load(Ordering::Acquire)
    }

    pub(super) fn take_arrived(&self) -> Vec<Arrival> {
        std::mem::take(&mut *lock(&self.arrived))
    }

    fn tell(&self) {
        self.news.fetch_add(1, Ordering::Release);
        self.wake.wake();
    }
}

/// So many pieces, or less.
fn gather_probes(gather_max: u32) -> impl Iterator<Item = u32> {
    std::iter::once(gather_max).chain([16, 8, 4, 1].into_iter().filter(move |&pieces| pieces < gather_max))
}

/// Registers the region for an endpoint's own requests. Where the system does not lock the same memory once more, replies are
/// copied instead.
fn source(domain: &Arc<Domain>, memory: &LocalMemory) -> (Option<Registered>, Source) {
    let (base, words) = memory.base();
    if words == 0 {
        return (None, Source { memory: memory.clone(), address: 0, key: LocalKey::default(), gather_max: 1 });
    }
    // SAFETY: the memory lives as long as `memory`, of which the source keeps a clone, dropped behind the registration by
    // whoever has both; the device only reads it, for requests of this process.
    let registered = unsafe { domain.register(base, words, Access::LocalRead) };
    let gather_max = domain.device().info().gather_max.min(GATHER_MAX);
    let none = Source { memory: memory.clone(), address: 0, key: LocalKey::default(), gather_max: 1 };
    match registered {
        Ok(region) if gather_max > 1 => {
            let source = Source { address: region.address(), key: region.local_key(), gather_max, ..none };
            (Some(region), source)
        }
        Ok(_) => (None, none),
        Err(error) => {
            tracing::warn!(%error, "replies are not gathered from the region");
            (None, none)
        }
    }
}

/// Ends the sleep of an endpoint's thread: a byte in a pipe.
#[derive(Debug)]
pub(super) struct Wake {
    here: UnixStream,
    there: UnixStream,
}

impl Wake {
    fn new() -> Result<Self, Error> {
        let failed = || Error::io("making what wakes an endpoint");
        let (here, there) = UnixStream::pair().map_err(failed())?;
        here.set_nonblocking(true).map_err(failed())?;
        there.set_nonblocking(true).map_err(failed())?;
        Ok(Self { here, there })
    }

    /// What has something to read once somebody wakes.
    pub(super) fn end(&self) -> &UnixStream {
        &self.here
    }

    /// Forgets who has woken it before.
    pub(super) fn drain(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.here).read(&mut bytes), Ok(1..)) {}
    }
}

impl EndpointWaker for Wake {
    fn wake(&self) {
        match (&self.there).write(&[1]) {
            // Full: then there is something to read.
            Err(error) if error.kind() != ErrorKind::WouldBlock => tracing::warn!(%error, "an endpoint was not woken"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_and_fewer_pieces_are_tried_down_to_one() {
        let probes = |gather_max| gather_probes(gather_max).collect::<Vec<_>>();
        assert_eq!(probes(32), [32, 16, 8, 4, 1]);
        assert_eq!(probes(30), [30, 16, 8, 4, 1]);
        assert_eq!(probes(4), [4, 1]);
        assert_eq!(probes(1), [1]);
    }
}
