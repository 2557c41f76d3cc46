//! A fabric that dies: it carries out so many requests, and none after them.
//!
//! For tests that kill a compute server after each of its requests in turn, inside one process. To the memory servers it looks as
//! if the compute server had been killed: nothing of it arrives any more. The compute server itself is told that all memory servers
//! are lost, so that its operations end.
//!
//! The doorbell in which it dies has its requests carried out in the order of posting for each memory server, and one memory server's
//! before another's: whose first is up to the [`Order`]. The request at which it dies can be torn: of a WRITE of several words the first
//! half arrives.

use std::ptr::NonNull;

use crate::{
    buffer::LocalKey,
    clock::Clock,
    connection::{ConnectionState, OpenMemory, PeerId},
    endpoint::{Capabilities, Completion, Endpoint, Request, Ticket, Verb},
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
    listener::{ListenOptions, Listener},
    lock::OwnerId,
    ptr::ServerId,
    sync::{Arc, AtomicBool, AtomicU64, Ordering},
};

/// Which memory server's requests of a doorbell are carried out first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As they were posted.
    Posted,
    /// Those of lower memory servers.
    Lower,
    /// Those of higher memory servers.
    Higher,
}

/// Names requests that nobody waits for.
const FORGOTTEN: Ticket = Ticket(u64::MAX);

#[derive(Debug)]
struct Life {
    /// Requests still to be carried out.
    left: AtomicU64,
    /// Requests that came so far.
    came: AtomicU64,
    is_dead: AtomicBool,
}

/// A fabric that dies; see the [module](self).
#[derive(Debug, Clone)]
pub struct MortalFabric {
    inner: Arc<dyn Fabric>,
    life: Arc<Life>,
    order: Order,
    tears: bool,
}

impl MortalFabric {
    /// Wraps `inner`; it lives until [`MortalFabric::dies_after`] says otherwise. If it `tears`, the request at which it dies is half
    /// carried out.
    pub fn new(inner: Arc<dyn Fabric>, order: Order, tears: bool) -> Self {
        let life = Life { left: AtomicU64::new(u64::MAX), came: AtomicU64::new(0), is_dead: AtomicBool::new(false) };
        Self { inner, life: Arc::new(life), order, tears }
    }

    /// It carries out so many more requests, of all its endpoints.
    pub fn dies_after(&self, requests: u64) {
        self.life.left.store(requests, Ordering::Relaxed);
    }

    /// How many requests came so far, carried out or not.
    pub fn requests(&self) -> u64 {
        self.life.came.load(Ordering::Relaxed)
    }
}

impl Fabric for MortalFabric {
    fn servers(&self) -> usize {
        self.inner.servers()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.inner.region_bytes(server)
    }

    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, Error> {
        let inner = self.inner.endpoint(seed, clock)?;
        Ok(Box::new(MortalEndpoint { inner, fabric: self.clone(), failed: Vec::new() }))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        self.inner.claim(owner)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        self.inner.liveness(owner)
    }

    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        self.inner.peer_listener(owner, options)
    }

    fn check_servers(&self) -> Result<(), Error> {
        self.inner.check_servers()
    }
}

#[derive(Debug)]
struct MortalEndpoint {
    inner: Box<dyn Endpoint>,
    fabric: MortalFabric,
    failed: Vec<Completion>,
}

impl MortalEndpoint {
    fn fail(&mut self, request: &Request) {
        let lost = Error::ServerLost {
            server: request.at.server(),
            address: "a dead fabric".into(),
            why: "the compute server has died".into(),
        };
        self.failed.push(Completion { ticket: request.ticket, outcome: Err(Box::new(lost)) });
    }
}

/// The first half of a WRITE of several words.
fn half(request: &Request) -> Vec<Request> {
    let Verb::Write(buffer) = &request.verb else { return Vec::new() };
    let words = buffer.iter().take(buffer.len() / 2).enumerate();
    words
        .map(|(index, &word)| Request { ticket: FORGOTTEN, at: request.at.word(index), verb: Verb::WriteWord(word) })
        .collect()
}

impl Endpoint for MortalEndpoint {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until this endpoint is dropped, and the wrapped one with it.
        unsafe { self.inner.register(base, words) }
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        let count = requests.len() as u64;
        let life = Arc::clone(&self.fabric.life);
        life.came.fetch_add(count, Ordering::Relaxed);
        let left = life.left.load(Ordering::Relaxed);
        if left == u64::MAX {
            return self.inner.ring(requests);
        }
        match self.fabric.order {
            Order::Posted => {}
            Order::Lower => requests.sort_by_key(|request| request.at.server()),
            Order::Higher => requests.sort_by_key(|request| std::cmp::Reverse(request.at.server())),
        }
        life.left.store(left.saturating_sub(count), Ordering::Relaxed);
        let mut carried = Vec::new();
        for (number, request) in (0..).zip(requests.drain(..)) {
            if number < left {
                carried.push(request);
                continue;
            }
            if !life.is_dead.swap(true, Ordering::Relaxed) && self.fabric.tears {
                carried.extend(half(&request));
            }
            self.fail(&request);
        }
        if !carried.is_empty() {
            self.inner.ring(&mut carried);
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        self.inner.poll(completions);
        completions.retain(|completion| completion.ticket != FORGOTTEN);
        completions.append(&mut self.failed);
    }

    fn next_due_ns(&self) -> Option<u64> {
        if self.failed.is_empty() { self.inner.next_due_ns() } else { Some(0) }
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        self.inner.connect(server, who)
    }

    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        self.inner.peer(peer)
    }

    fn disconnect(&mut self, server: ServerId) {
        self.inner.disconnect(server);
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        self.inner.connection_state(server)
    }
}
