//! A fabric that dies, or stops: it carries out so many requests, and none after them.
//!
//! For tests that kill a compute server after each of its requests in turn, inside one process. To the memory servers it looks as
//! if the compute server had been killed: nothing of it arrives any more, and it takes no messages. The compute server itself is told that
//! all memory servers are lost, so that its operations end.
//!
//! The doorbell in which it dies has its requests carried out in the order of posting for each memory server, and one memory server's
//! before another's: whose first is up to the [`Order`]. Over a fabric that declares [no order](Capabilities::ordered_writes), which of them are
//! carried out, and in which order, is up to the seed. The request at which it dies can be torn: of a WRITE of several words the first
//! ones arrive, or the last ones, or some of its cache lines.
//!
//! One that stops keeps its requests back, as those of a process that was stopped; others may then [take it for
//! dead](MortalFabric::is_taken_for_dead), and it may go on. So it does over connections that are made anew: what was kept back fails, and
//! so does what is posted before that is known; *all later requests are carried out*. Nothing but the compute server's own looks at its
//! [claim](OwnerClaim::holds) keeps it from changing what is others' by then.

use std::{
    ptr::NonNull,
    sync::{PoisonError, RwLock},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

use crate::{
    buffer::LocalKey,
    clock::Clock,
    connection::{ConnectionState, ListenerId, OpenMemory, PeerId, far_offset},
    cut,
    endpoint::{Capabilities, Completion, Endpoint, Request, Ticket},
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
    listener::{Change, EndpointWaker, ListenOptions, Listener, ServerEndpoint},
    lock::OwnerId,
    memory::LocalMemory,
    ptr::ServerId,
    sync::{Arc, AtomicBool, Mutex, Ordering, lock},
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
    counts: Mutex<Counts>,
    is_cut_off: AtomicBool,
    /// What others know its compute server by.
    claims: Mutex<Vec<Box<dyn OwnerClaim>>>,
    /// Where it takes messages.
    listeners: Mutex<Vec<std::sync::Weak<dyn Listener>>>,
    /// Held for reading from the moment that a doorbell's fate is known until what of it is carried out has been.
    ringing: RwLock<()>,
}

/// Of all endpoints together, under one lock: memory servers have several threads.
#[derive(Debug)]
struct Counts {
    /// Requests still to be carried out; [`u64::MAX`] as long as nobody has said how many.
    left: u64,
    /// Requests that came so far, and those that had come when it was said.
    came: u64,
    came_before: u64,
    is_dead: bool,
    /// Instead of dying it stops.
    stops: bool,
    has_stopped: bool,
}

/// What becomes of a doorbell.
enum Fate {
    /// So many of its requests are carried out; `dies` at the next one, if that is the first that is not.
    Carried {
        left: u64,
        dies: bool,
    },
    Stopped,
}

impl Life {
    /// A doorbell with so many requests.
    fn take(&self, count: u64) -> Fate {
        let mut counts = lock(&self.counts);
        counts.came += count;
        if counts.left == u64::MAX {
            return Fate::Carried { left: count, dies: false };
        }
        if counts.stops {
            return Fate::Stopped;
        }
        let left = counts.left;
        counts.left = left.saturating_sub(count);
        let dies = count > left && !counts.is_dead;
        counts.is_dead |= dies;
        Fate::Carried { left, dies }
    }

    /// Nobody is let in by the dead.
    fn shut_if_dead(&self) {
        if lock(&self.counts).is_dead {
            let listeners = std::mem::take(&mut *lock(&self.listeners));
            listeners.iter().filter_map(std::sync::Weak::upgrade).for_each(|listener| listener.shut());
        }
    }
}

/// A fabric that dies; see the [module](self).
#[derive(Debug, Clone)]
pub struct MortalFabric {
    inner: Arc<dyn Fabric>,
    life: Arc<Life>,
    order: Order,
    tears: bool,
    seed: u64,
}

impl MortalFabric {
    /// Wraps `inner`; it lives until [`MortalFabric::dies_after`] says otherwise. If it `tears`, a part of the request at which it dies is
    /// carried out.
    pub fn new(inner: Arc<dyn Fabric>, order: Order, tears: bool) -> Self {
        let life = Life {
            counts: Mutex::new(Counts {
                left: u64::MAX,
                came: 0,
                came_before: 0,
                is_dead: false,
                stops: false,
                has_stopped: false,
            }),
            is_cut_off: AtomicBool::new(false),
            claims: Mutex::default(),
            listeners: Mutex::default(),
            ringing: RwLock::default(),
        };
        Self { inner, life: Arc::new(life), order, tears, seed: 0 }
    }

    /// The seed decides which part, and which requests where they have no order.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// It carries out so many more requests, of all its endpoints.
    pub fn dies_after(&self, requests: u64) {
        let mut counts = lock(&self.life.counts);
        (counts.left, counts.came_before) = (requests, counts.came);
    }

    /// How many requests came since it was last said after how many it dies or stops, carried out or not; and whether it is dead.
    pub fn since_told(&self) -> (u64, bool) {
        let counts = lock(&self.life.counts);
        (counts.came - counts.came_before, counts.is_dead)
    }

    /// It carries out so many more requests, those that were kept back first, and keeps back those that come after.
    pub fn stops_after(&self, requests: u64) {
        let mut counts = lock(&self.life.counts);
        (counts.stops, counts.has_stopped) = (true, false);
        (counts.left, counts.came_before) = (requests, counts.came);
    }

    /// Whether a request was kept back.
    pub fn has_stopped(&self) -> bool {
        lock(&self.life.counts).has_stopped
    }

    /// Others take it for dead: it has stopped, and its connections are cut.
    pub fn is_taken_for_dead(&self) {
        // What its threads were allowed to do arrives before.
        drop(self.life.ringing.write().unwrap_or_else(PoisonError::into_inner));
        self.life.is_cut_off.store(true, Ordering::Release);
        lock(&self.life.claims).clear();
    }

    /// How many requests came so far, carried out or not.
    pub fn requests(&self) -> u64 {
        lock(&self.life.counts).came
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
        Ok(Box::new(MortalEndpoint::new(self.inner.endpoint(seed, clock)?, self)))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        lock(&self.life.claims).push(self.inner.claim(owner)?);
        Ok(Box::new(MortalClaim(Arc::clone(&self.life))))
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        self.inner.liveness(owner)
    }

    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        let inner: std::sync::Arc<dyn Listener> = self.inner.peer_listener(owner, options)?.into();
        lock(&self.life.listeners).push(std::sync::Arc::downgrade(&inner));
        self.life.shut_if_dead();
        Ok(Box::new(MortalListener { inner, fabric: self.clone() }))
    }

    fn check_servers(&self) -> Result<(), Error> {
        self.inner.check_servers()
    }
}

/// Of a compute server that is the only one over its fabric. Lasts for as long as its holder, unless others take that one for dead.
#[derive(Debug)]
struct MortalClaim(Arc<Life>);

impl OwnerClaim for MortalClaim {
    fn holds(&self) -> bool {
        lock(&self.0.claims).iter().any(|claim| claim.holds())
    }
}

impl Drop for MortalClaim {
    fn drop(&mut self) {
        lock(&self.0.claims).clear();
    }
}

/// Of a compute server to which others send messages: it dies with it.
#[derive(Debug)]
struct MortalListener {
    inner: std::sync::Arc<dyn Listener>,
    fabric: MortalFabric,
}

impl Listener for MortalListener {
    fn listens_as(&self) -> ListenerId {
        self.inner.listens_as()
    }

    fn endpoints(&self) -> usize {
        self.inner.endpoints()
    }

    fn endpoint(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error> {
        Ok(Box::new(MortalEndpoint::new(self.inner.endpoint(number, seed, clock)?, &self.fabric)))
    }

    fn shut(&self) {
        self.inner.shut();
    }
}

/// A worker's endpoint, or a listener's.
#[derive(Debug)]
struct MortalEndpoint<E: ?Sized> {
    inner: Box<E>,
    fabric: MortalFabric,
    failed: Vec<Completion>,
    /// Those of one that has stopped.
    kept: Vec<Request>,
    /// Its connections are cut, and are made anew once it was told.
    is_broken: bool,
    knows: bool,
}

impl<E: Endpoint + ?Sized> MortalEndpoint<E> {
    fn new(inner: Box<E>, fabric: &MortalFabric) -> Self {
        let (failed, kept) = (Vec::new(), Vec::new());
        Self { inner, fabric: fabric.clone(), failed, kept, is_broken: false, knows: false }
    }

    fn fail(&mut self, request: &Request) {
        let lost = Error::ServerLost {
            server: request.at.server(),
            address: "a dead fabric".into(),
            why: "the compute server has died".into(),
        };
        self.failed.push(Completion { ticket: request.ticket, outcome: Err(Box::new(lost)) });
    }

    /// It stops, or goes on and finds its connections cut.
    fn ring_stopped(&mut self, requests: &mut Vec<Request>) {
        if self.fabric.life.is_cut_off.load(Ordering::Acquire) {
            if self.knows {
                return self.inner.ring(requests);
            }
            self.is_broken = true;
            return self.kept.append(requests);
        }
        self.kept.append(requests);
        self.carry_out_kept();
    }

    /// As many as it may.
    fn carry_out_kept(&mut self) {
        let mut counts = lock(&self.fabric.life.counts);
        let count = (self.kept.len() as u64).min(counts.left);
        counts.left -= count;
        let mut carried: Vec<Request> = self.kept.drain(..count as usize).collect();
        counts.has_stopped |= !self.kept.is_empty();
        drop(counts);
        if !carried.is_empty() {
            self.inner.ring(&mut carried);
        }
    }

    /// What was kept back for a message connection that is closed does not go over the next one.
    fn fail_kept_of(&mut self, other: ServerId) {
        let is_there = |request: &mut Request| request.at.server() == other && far_offset(request.at).is_some();
        self.failed.extend(self.kept.extract_if(.., is_there).map(cut_off));
    }

    /// It is told that its connections broke.
    fn break_kept(&mut self, completions: &mut Vec<Completion>) {
        if self.fabric.life.is_cut_off.load(Ordering::Acquire) && (self.is_broken || !self.kept.is_empty()) {
            (self.is_broken, self.knows) = (false, true);
            completions.extend(self.kept.drain(..).map(cut_off));
        }
    }
}

fn cut_off(request: Request) -> Completion {
    let why = "the connection was cut".into();
    let failed = Error::RequestFailed { what: request.verb.name(), at: request.at, why };
    Completion { ticket: request.ticket, outcome: Err(Box::new(failed)) }
}

/// What arrives of a WRITE of several words that is torn: some of the first ones, or of the last ones, or of its lines any.
fn torn(request: &Request, seed: u64) -> Vec<Request> {
    let mut rng = StdRng::seed_from_u64(seed);
    let arrives = |words| {
        let cut = rng.random_range(1..words);
        match rng.random_range(0..3) {
            0 => (0..words).map(|index| index < cut).collect(),
            1 => (0..words).map(|index| index >= cut).collect(),
            _ => cut::some_lines(request.at, words, &mut rng),
        }
    };
    // Compute servers gather nothing.
    cut::pieces(request, &LocalMemory::none(), arrives, || FORGOTTEN)
}

impl<E: Endpoint + ?Sized> Endpoint for MortalEndpoint<E> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error> {
        // SAFETY: the caller keeps the memory until this endpoint is dropped, and the wrapped one with it.
        unsafe { self.inner.register(base, words) }
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        let life = Arc::clone(&self.fabric.life);
        let _ringing = life.ringing.read().unwrap_or_else(PoisonError::into_inner);
        let (left, mut dies) = match self.fabric.life.take(requests.len() as u64) {
            Fate::Carried { left, dies } => (left, dies),
            Fate::Stopped => return self.ring_stopped(requests),
        };
        if left >= requests.len() as u64 {
            return self.inner.ring(requests);
        }
        if dies {
            self.fabric.life.shut_if_dead();
        }
        match self.fabric.order {
            Order::Posted => {}
            Order::Lower => requests.sort_by_key(|request| request.at.server()),
            Order::Higher => requests.sort_by_key(|request| std::cmp::Reverse(request.at.server())),
        }
        if !self.capabilities().ordered_writes {
            requests.shuffle(&mut StdRng::seed_from_u64(self.fabric.seed.rotate_left(32) ^ left));
        }
        let mut carried = Vec::new();
        for (number, request) in (0..).zip(requests.drain(..)) {
            if number < left {
                carried.push(request);
                continue;
            }
            if std::mem::take(&mut dies) && self.fabric.tears {
                carried.extend(torn(&request, self.fabric.seed));
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
        if !self.fabric.life.is_cut_off.load(Ordering::Acquire) && !self.kept.is_empty() {
            self.carry_out_kept();
        }
        self.break_kept(completions);
    }

    fn next_due_ns(&self) -> Option<u64> {
        if self.failed.is_empty() { self.inner.next_due_ns() } else { Some(0) }
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        self.fail_kept_of(server);
        self.inner.connect(server, who)
    }

    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        self.inner.peer(peer)
    }

    fn disconnect(&mut self, server: ServerId) {
        self.fail_kept_of(server);
        self.inner.disconnect(server);
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        self.inner.connection_state(server)
    }

    fn states_told(&self, server: ServerId) -> u64 {
        self.inner.states_told(server)
    }
}

impl ServerEndpoint for MortalEndpoint<dyn ServerEndpoint> {
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>) {
        let before = changes.len();
        self.inner.changes(thorough, changes);
        for change in &changes[before..] {
            if let Change::Left { peer, .. } = change {
                self.fail_kept_of(*peer);
            }
        }
    }

    fn memory(&self) -> &LocalMemory {
        self.inner.memory()
    }

    fn dismiss(&mut self, peer: ServerId) {
        self.fail_kept_of(peer);
        self.inner.dismiss(peer);
    }

    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool) {
        let has_failures = !self.failed.is_empty();
        self.inner.sleep(limit, &mut || has_failures || has_news());
    }

    fn waker(&self) -> std::sync::Arc<dyn EndpointWaker> {
        self.inner.waker()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{
        endpoint::Verb,
        mem::{MemFabric, MemOptions},
        ptr::RemotePtr,
        region::Region,
    };

    const SERVER: u16 = 0;
    const WORDS: u64 = 3;

    /// Which words of a doorbell with one WRITE of each have arrived when it dies after so many.
    fn arrived(options: MemOptions, seed: u64, after: u64) -> Vec<bool> {
        let server = ServerId::new(SERVER).unwrap();
        let memory = Arc::new(MemFabric::in_process(vec![Region::anonymous(1 << 12).unwrap()], options));
        let mortal = MortalFabric::new(memory.clone(), Order::Posted, false).with_seed(seed);
        let mut endpoint = mortal.endpoint(1, Clock::monotonic()).unwrap();
        mortal.dies_after(after);
        let write = |word: u64| {
            let at = RemotePtr::new(server, 64 + 8 * word).unwrap();
            Request { ticket: Ticket(word), at, verb: Verb::WriteWord(1) }
        };
        endpoint.ring(&mut (0..WORDS).map(write).collect());
        let mut completions = Vec::new();
        while completions.len() < WORDS as usize {
            endpoint.poll(&mut completions);
        }
        assert_eq!(completions.iter().filter(|completion| completion.outcome.is_ok()).count() as u64, after);
        memory.raw_words(server)[8..][..WORDS as usize].iter().map(|word| word.load(Ordering::Relaxed) == 1).collect()
    }

    #[test]
    fn of_the_doorbell_in_which_it_dies_any_requests_arrive_where_they_have_no_order() {
        for (ordered_writes, kinds) in [(true, 1), (false, 3)] {
            let options = MemOptions { ordered_writes, ..MemOptions::default() };
            for after in 1..WORDS {
                let seen: BTreeSet<_> = (0..50).map(|seed| arrived(options, seed, after)).collect();
                assert_eq!(seen.len(), kinds, "{seen:?}");
                assert!(seen.contains(&(0..WORDS).map(|word| word < after).collect::<Vec<_>>()), "{seen:?}");
            }
        }
        // As it was, with the same seed.
        let options = MemOptions { ordered_writes: false, ..MemOptions::default() };
        assert!((0..20).all(|seed| arrived(options, seed, 2) == arrived(options, seed, 2)));
    }
}
