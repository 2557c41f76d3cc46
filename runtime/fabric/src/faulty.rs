//! The `faulty` fabric: wraps any other and fails its requests, from a seed.
//!
//! What it does is what the [fabric's contract](super) permits and real connections do. A request that is chosen *breaks the
//! path* to its memory server: it fails, and with it all requests of the endpoint to that server that were rung behind it
//! before the failure is polled. [`FaultKinds`] say what became of them in truth:
//!
//! - *refused*: none has taken effect;
//! - *done*: the first has, and some of those behind it;
//! - *lost*: so have requests before it, whose completions are lost, too.
//!
//! Where WRITEs are ordered, those that take effect come before those that do not; of the last one that does, if it is a WRITE of
//! several words, it may be some cache lines. Where they are not, of any. What is rung after the failure was polled
//! goes through again, as over a connection that was made anew. A [message connection](crate::connection) that breaks stays broken until
//! it is connected anew.
//!
//! Registrations of memory and connections of message connections fail, too: with an error, and without any effect.
//!
//! ```
//! use std::sync::Arc;
//! use farlink_fabric::{
//!     Fabric, clock::Clock, faulty::{FaultOptions, FaultyFabric}, mem::{MemFabric, MemOptions}, region::Region,
//! };
//!
//! let memory = MemFabric::in_process(vec![Region::anonymous(1 << 20)?], MemOptions::default());
//! let faulty = FaultyFabric::new(Arc::new(memory), FaultOptions::one_in(200, 7));
//! let endpoint = faulty.endpoint(1, Clock::monotonic())?;
//! # let _ = endpoint;
//! # Ok::<(), farlink_fabric::Error>(())
//! ```

use std::{collections::BTreeMap, ptr::NonNull, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    buffer::LocalKey,
    clock::Clock,
    connection::{ConnectionState, ListenerId, OpenMemory, PeerId, far, far_offset},
    cut,
    endpoint::{Capabilities, Completion, Endpoint, Request, Ticket},
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
    listener::{Change, EndpointWaker, ListenOptions, Listener, ServerEndpoint},
    lock::OwnerId,
    memory::LocalMemory,
    ptr::{RemotePtr, ServerId},
    sync::{Arc, AtomicU64, Ordering},
};

/// Of all faulty fabrics of this process, some of which nobody has at hand any more: they are wrapped again.
static BREAKS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// How many paths were broken so far in this process: a test that asks for failures has to meet some.
pub fn breaks() -> u64 {
    BREAKS.load(std::sync::atomic::Ordering::Relaxed)
}

/// What becomes of requests that fail. At least one is true, or nothing fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultKinds {
    /// They have no effect.
    pub refused: bool,
    /// The first has its effect, and some of those behind it.
    pub done: bool,
    /// Earlier ones fail with them, after they have had their effect.
    pub lost: bool,
}

impl FaultKinds {
    /// All of them.
    pub const ALL: Self = Self { refused: true, done: true, lost: true };
}

/// How often a fabric fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultOptions {
    /// Decides, with the seed of each endpoint, what fails.
    pub seed: u64,
    /// One request in so many breaks its path; 0 for none.
    pub requests_one_in: u32,
    /// What becomes of requests that fail.
    pub kinds: FaultKinds,
    /// One registration of memory in so many is refused; 0 for none.
    pub registrations_one_in: u32,
    /// One connection of a message connection in so many is refused; 0 for none.
    pub connections_one_in: u32,
}

impl FaultOptions {
    /// Each thing that can fail fails once in so many times.
    pub const fn one_in(count: u32, seed: u64) -> Self {
        Self {
            seed,
            requests_one_in: count,
            kinds: FaultKinds::ALL,
            registrations_one_in: count,
            connections_one_in: count,
        }
    }
}

/// What became of the requests of a path that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Refused,
    Done,
    Lost,
}

impl FaultKinds {
    fn draw(self, rng: &mut StdRng) -> Option<Fault> {
        let kinds = [(self.refused, Fault::Refused), (self.done, Fault::Done), (self.lost, Fault::Lost)];
        let possible: Vec<Fault> = kinds.into_iter().filter_map(|(is_on, kind)| is_on.then_some(kind)).collect();
        (!possible.is_empty()).then(|| possible[rng.random_range(0..possible.len())])
    }
}

/// A way to one memory server: to its region, or over the message connection to it.
type PathId = (ServerId, bool);

fn path_of(at: RemotePtr) -> PathId {
    (at.server(), far_offset(at).is_some())
}

/// A request that the wrapped endpoint carries out.
#[derive(Debug)]
struct Flight {
    path: PathId,
    at: RemotePtr,
    what: &'static str,
    /// It fails, whatever the wrapped endpoint says.
    is_doomed: bool,
    /// A part of a doomed WRITE, of which nobody else knows.
    is_piece: bool,
}

/// A path from the break to the poll that tells of it; a message connection's until it is connected anew.
#[derive(Debug)]
struct Break {
    /// Doomed requests that the wrapped endpoint has not completed.
    doomed: usize,
    /// Requests that are still to be carried out; then none is.
    carried: u32,
    failed: Vec<Completion>,
}

/// Chooses what fails, and keeps count of what is under way.
#[derive(Debug)]
struct Injector {
    rng: StdRng,
    options: FaultOptions,
    is_ordered: bool,
    flights: BTreeMap<Ticket, Flight>,
    breaks: BTreeMap<PathId, Break>,
    /// Names the next piece. Nobody else counts from there on downwards.
    next_piece: u64,
}

/// What becomes of a request.
enum Chosen {
    Carried,
    /// Of a doomed WRITE these words are.
    InPieces(Vec<Request>),
    Left,
}

impl Injector {
    fn new(options: FaultOptions, seed: u64, is_ordered: bool) -> Self {
        let rng = StdRng::seed_from_u64(options.seed ^ seed.rotate_left(17));
        Self { rng, options, is_ordered, flights: BTreeMap::new(), breaks: BTreeMap::new(), next_piece: u64::MAX - 1 }
    }

    fn happens(&mut self, one_in: u32) -> bool {
        one_in != 0 && self.rng.random_ratio(1, one_in)
    }

    /// Leaves in `requests` what is to be carried out; `own` is the memory that they gather from.
    fn choose(&mut self, requests: &mut Vec<Request>, own: &LocalMemory) {
        let mut carried = Vec::with_capacity(requests.len());
        for request in requests.drain(..) {
            match self.chosen(&request, own) {
                Chosen::Carried => carried.push(request),
                Chosen::InPieces(mut pieces) => carried.append(&mut pieces),
                Chosen::Left => {}
            }
        }
        *requests = carried;
    }

    fn chosen(&mut self, request: &Request, own: &LocalMemory) -> Chosen {
        let (path, at, what) = (path_of(request.at), request.at, request.verb.name());
        if !self.breaks.contains_key(&path) && self.happens(self.options.requests_one_in) {
            self.begin_break(path);
        }
        let flight = |is_doomed, is_piece| Flight { path, at, what, is_doomed, is_piece };
        let Some(broken) = self.breaks.get_mut(&path) else {
            self.flights.insert(request.ticket, flight(false, false));
            return Chosen::Carried;
        };
        let is_carried = match self.is_ordered {
            true => broken.carried > 0,
            false => broken.carried > 0 && self.rng.random(),
        };
        let is_last = broken.carried == 1;
        broken.carried = broken.carried.saturating_sub(1);
        let failed = Completion { ticket: request.ticket, outcome: Err(failure(at, what)) };
        if !is_carried {
            broken.failed.push(failed);
            return Chosen::Left;
        }
        let may_be_cut = is_last || !self.is_ordered;
        if may_be_cut && cut::has_parts(&request.verb) && self.rng.random() {
            let lines = |words| cut::some_lines(at, words, &mut self.rng);
            let pieces = cut::pieces(request, own, lines, || {
                self.next_piece -= 1;
                Ticket(self.next_piece)
            });
            broken.doomed += pieces.len();
            broken.failed.push(failed);
            self.flights.extend(pieces.iter().map(|piece| (piece.ticket, flight(true, true))));
            return Chosen::InPieces(pieces);
        }
        broken.doomed += 1;
        self.flights.insert(request.ticket, flight(true, false));
        Chosen::Carried
    }

    fn begin_break(&mut self, path: PathId) {
        let Some(fault) = self.options.kinds.draw(&mut self.rng) else { return };
        BREAKS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut doomed = 0;
        if fault == Fault::Lost {
            for flight in self.flights.values_mut().filter(|flight| flight.path == path && !flight.is_doomed) {
                flight.is_doomed = true;
                doomed += 1;
            }
        }
        let carried = if fault == Fault::Refused { 0 } else { self.rng.random_range(1..=4) };
        self.breaks.insert(path, Break { doomed, carried, failed: Vec::new() });
    }

    /// Takes what the wrapped endpoint has completed since `completions` had `before` entries, and adds what has failed.
    fn take(&mut self, before: usize, completions: &mut Vec<Completion>) {
        let arrived: Vec<Completion> = completions.drain(before..).collect();
        for completion in arrived {
            match self.flights.remove(&completion.ticket) {
                Some(Flight { path, is_doomed, is_piece: true, .. }) => {
                    if let Some(broken) = self.breaks.get_mut(&path).filter(|_| is_doomed) {
                        broken.doomed -= 1;
                    }
                }
                Some(Flight { path, at, what, is_doomed: true, .. }) => {
                    let Completion { ticket, outcome } = completion;
                    // Its buffer goes back before the failure is known, as it would from a card.
                    drop(outcome);
                    if let Some(broken) = self.breaks.get_mut(&path) {
                        broken.doomed -= 1;
                        broken.failed.push(Completion { ticket, outcome: Err(failure(at, what)) });
                    }
                }
                _ => completions.push(completion),
            }
        }
        self.breaks.retain(|path, broken| {
            if broken.doomed > 0 {
                return true;
            }
            completions.append(&mut broken.failed);
            broken.carried = 0;
            // A region is reached over a connection that is made anew; a message connection is for its user to connect.
            path.1
        });
    }

    /// The message connection to `other` is a new one.
    fn forget_connection(&mut self, other: ServerId, completions: &mut Vec<Completion>) {
        self.flights.values_mut().filter(|flight| flight.path == (other, true)).for_each(|flight| {
            // Completes as the wrapped endpoint says: the connection is gone either way.
            flight.is_doomed = false;
        });
        if let Some(mut broken) = self.breaks.remove(&(other, true)) {
            completions.append(&mut broken.failed);
        }
    }

    fn has_broken_connection(&self, other: ServerId) -> bool {
        self.breaks.contains_key(&(other, true))
    }
}

#[cold]
fn failure(at: RemotePtr, what: &'static str) -> Box<Error> {
    Box::new(Error::RequestFailed { what, at, why: "the faulty fabric broke the connection".into() })
}

fn refused_memory(words: usize) -> Error {
    Error::RegistrationRefused {
        bytes: words as u64 * 8,
        device: "the faulty fabric".into(),
        cause: std::io::ErrorKind::OutOfMemory.into(),
        remedy: "try again".into(),
    }
}

/// A fabric whose requests fail now and then; see the [module](self).
#[derive(Debug)]
pub struct FaultyFabric {
    inner: Arc<dyn Fabric>,
    options: FaultOptions,
    /// How many endpoints were made. One that is made again, with the same seed, fails otherwise.
    endpoints: AtomicU64,
}

impl FaultyFabric {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Fabric>, options: FaultOptions) -> Self {
        Self { inner, options, endpoints: AtomicU64::new(0) }
    }
}

impl Fabric for FaultyFabric {
    fn servers(&self) -> usize {
        self.inner.servers()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.inner.region_bytes(server)
    }

    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, Error> {
        let inner = self.inner.endpoint(seed, clock)?;
        let number = self.endpoints.fetch_add(1, Ordering::Relaxed);
        let injector = Injector::new(self.options, seed ^ number << 48, inner.capabilities().ordered_writes);
        Ok(Box::new(FaultyEndpoint { inner, injector, early: Vec::new(), own: LocalMemory::none() }))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        self.inner.claim(owner)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        self.inner.liveness(owner)
    }

    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        Ok(Box::new(FaultyListener::new(self.inner.peer_listener(owner, options)?, self.options)))
    }

    fn check_servers(&self) -> Result<(), Error> {
        self.inner.check_servers()
    }
}

/// A worker's endpoint, or a memory server's endpoint, with its faults.
#[derive(Debug)]
struct FaultyEndpoint<E: ?Sized> {
    injector: Injector,
    /// Failures that did not wait for a poll.
    early: Vec<Completion>,
    /// The memory that it gathers from.
    own: LocalMemory,
    inner: Box<E>,
}

impl<E: Endpoint + ?Sized> FaultyEndpoint<E> {
    /// Whether the next poll has failures to tell of.
    fn has_failures(&self) -> bool {
        let is_told = |broken: &Break| broken.doomed == 0 && !broken.failed.is_empty();
        !self.early.is_empty() || self.injector.breaks.values().any(is_told)
    }
}

impl<E: Endpoint + ?Sized> Endpoint for FaultyEndpoint<E> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        if self.injector.happens(self.injector.options.registrations_one_in) {
            return Err(refused_memory(words));
        }
        // SAFETY: the caller keeps the memory until this endpoint is dropped, and the wrapped one with it.
        unsafe { self.inner.register(base, words) }
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        self.injector.choose(requests, &self.own);
        if !requests.is_empty() {
            self.inner.ring(requests);
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        completions.append(&mut self.early);
        let before = completions.len();
        self.inner.poll(completions);
        self.injector.take(before, completions);
    }

    fn next_due_ns(&self) -> Option<u64> {
        if self.has_failures() { Some(0) } else { self.inner.next_due_ns() }
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        if self.injector.happens(self.injector.options.connections_one_in) {
            return Err(*failure(far(server, 0), "CONNECT"));
        }
        let opened = self.inner.connect(server, who)?;
        self.injector.forget_connection(server, &mut self.early);
        Ok(opened)
    }

    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        self.inner.peer(peer)
    }

    fn disconnect(&mut self, server: ServerId) {
        self.inner.disconnect(server);
        self.injector.forget_connection(server, &mut self.early);
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        match self.inner.connection_state(server) {
            ConnectionState::Up if self.injector.has_broken_connection(server) => ConnectionState::Dismissed,
            state => state,
        }
    }

    fn states_told(&self, server: ServerId) -> u64 {
        self.inner.states_told(server)
    }
}

impl ServerEndpoint for FaultyEndpoint<dyn ServerEndpoint> {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let before = changes.len();
        self.inner.changes(thorough, changes);
        for change in &changes[before..] {
            let (Change::Left { peer, .. } | Change::Joined { peer, .. }) = change;
            self.injector.forget_connection(*peer, &mut self.early);
        }
    }

    fn memory(&self) -> &LocalMemory {
        self.inner.memory()
    }

    fn dismiss(&mut self, peer: ServerId) {
        self.inner.dismiss(peer);
        self.injector.forget_connection(peer, &mut self.early);
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let has_failures = self.has_failures();
        self.inner.sleep(limit, &mut || has_failures || has_news());
    }

    fn waker(&self) -> std::sync::Arc<dyn EndpointWaker> {
        self.inner.waker()
    }
}

/// A memory server's listener whose endpoints' requests fail now and then.
#[derive(Debug)]
pub struct FaultyListener {
    inner: Box<dyn Listener>,
    options: FaultOptions,
}

impl FaultyListener {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Listener>, options: FaultOptions) -> Self {
        Self { inner, options }
    }
}

impl Listener for FaultyListener {
    fn listens_as(&self) -> ListenerId {
        self.inner.listens_as()
    }

    fn endpoints(&self) -> usize {
        self.inner.endpoints()
    }

    fn endpoint(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error> {
        let inner = self.inner.endpoint(number, seed, clock)?;
        let injector = Injector::new(self.options, seed, inner.capabilities().ordered_writes);
        let own = inner.memory().clone();
        Ok(Box::new(FaultyEndpoint { inner, injector, early: Vec::new(), own }))
    }

    fn shut(&self) {
        self.inner.shut();
    }
}
