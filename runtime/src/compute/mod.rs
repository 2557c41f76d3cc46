//! A compute server: a process's (or a simulated machine's) membership in a cluster, shared by its workers.
//!
//! Joining validates every superblock, takes an incarnation that is never given out again, proves it alive with a
//! [claim](crate::fabric::OwnerClaim), and publishes a slot in which it announces epochs. *Maintenance* keeps the cluster's
//! epoch moving and brings retired pages back; a thread of its own does that, or whoever drives the compute server calls
//! [`ComputeServer::maintain`]. Leaving waits for the grace of what is still deferred, returns all pages, frees the slot
//! and drops the claim, in that order.

mod leaving;
mod maintenance;

use std::{sync::mpsc, thread::JoinHandle, time::Duration};

pub(crate) use self::maintenance::round;
use self::{
    leaving::{leave, leave_by_hand},
    maintenance::{spawn_maintenance, sweep},
};
use crate::{
    clock::Clock,
    counters::Counters,
    epoch::round::{Board, Member, read_slots},
    error::Error,
    fabric::{
        Error as FabricError, Fabric, Liveness, OwnerClaim,
        listener::{ListenOptions, Listener},
    },
    fencing,
    layout::{self, Dynamic, Geometry, SLOTS, SUPERBLOCK_WORDS},
    lock::OwnerId,
    ptr::ServerId,
    recovery,
    remote::{claim_word, release_word, write_words},
    shared::Shared,
    sync::{Arc, Ordering, lock},
    worker::{
        Handle, Worker,
        ops::{FromDone, Posted, ReadOnce},
    },
};

/// How long [`ComputeServer::settle`] waits for a grace: much more than it takes a neighbour that is idle, and announces epochs seldom.
const SETTLE_NS_MAX: u64 = 2_000_000_000;

/// Who joins is told that requests fail once so many have, one after another, in so long: one of which every few fail gets through before
/// that, and where RDMA does not work a card takes a second or more for each.
const JOIN_TRIES: u32 = 3;
const JOIN_NS_MAX: u64 = 1_000_000_000;

/// Who does a compute server's maintenance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Maintenance {
    /// A thread of its own.
    #[default]
    Thread,
    /// Whoever drives the compute server, with [`ComputeServer::maintain`]; a simulator, for example. Until it is called,
    /// no compute server of the cluster reuses a page.
    Manual,
}

/// How a compute server joins.
#[derive(Debug, Clone, Copy)]
pub struct ComputeOptions {
    /// Decides every random choice of its workers.
    pub seed: u64,
    /// Who does its maintenance.
    pub maintenance: Maintenance,
    /// Pages that one operation has on their way at a time, at most, where it needs several and knows which
    /// ([`follow_each`](crate::access::Access::follow_each)): 16. 1, or 0: one page after the other.
    pub window: usize,
    /// How long an operation waits for a page that a compute server which lives has locked and does not unlock, because its process is
    /// stopped, say; then it fails with [`Error::OwnerStalled`]. So long, too, it waits for a sign of life of the owner that it was sent to, and
    /// fails with [`Error::OwnerSilent`]. `None`: until the other one goes on. Much more than a busy machine takes from
    /// a process at a time, or what is only slow counts as stopped.
    pub lock_wait: Option<Duration>,
    /// How long a memory server that is asked to carry something out may give no sign of life, because its process is stopped, say; then all
    /// that it was asked fails with [`NoAnswer`](crate::messaging::Error::NoAnswer). How long an operation takes there does not matter: a memory
    /// server that runs gives one every few milliseconds. Time counts only while this compute server runs itself, so that it takes longer where
    /// all have to wait for a core. Over verbs a process that lives says so over its control connection, too, and is given ten times as long:
    /// what it writes may be behind large messages. A second; [`Duration::MAX`]: until the memory server goes on.
    pub answer_wait: Duration,
}

impl Default for ComputeOptions {
    fn default() -> Self {
        let answer_wait = Duration::from_secs(1);
        Self { seed: 0, maintenance: Maintenance::default(), window: 16, lock_wait: None, answer_wait }
    }
}

/// What joining a cluster yields.
struct Joined {
    owner: OwnerId,
    claim: Option<Box<dyn OwnerClaim>>,
    slot: usize,
    epoch: u64,
    /// The slot was that of a dead one.
    displaces: bool,
}

impl Joined {
    fn share(self, fabric: &Arc<dyn Fabric>, options: ComputeOptions, geometry: Vec<Geometry>) -> Shared {
        let member = Member::new(self.slot, self.epoch);
        let tuning = (options.seed, options.window, options.lock_wait, options.answer_wait);
        let shared = Shared::new(fabric, self.owner, geometry, tuning, member, leave_by_hand);
        shared.epoch.advance(self.epoch);
        *lock(&shared.claim) = self.claim;
        shared.displaces.store(self.displaces, Ordering::Release);
        shared
    }
}

/// Membership in a cluster; makes workers. Drop the workers first: the membership ends when the last of all is gone.
#[derive(Debug)]
pub struct ComputeServer {
    shared: Arc<Shared>,
    thread: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
    has_left: bool,
}

impl ComputeServer {
    /// Joins the cluster that `fabric` leads to. Blocks for a few round trips.
    ///
    /// # Errors
    /// If a superblock is not ours, of another version, damaged, of the wrong size or of another cluster; if the cluster
    /// has no slot or no incarnation left; if the fabric fails, or all that it is asked for does: over verbs, because the network carries
    /// TCP and not RDMA, say.
    pub fn join(fabric: Arc<dyn Fabric>, options: ComputeOptions) -> Result<Self, Error> {
        let worker = visitor(&fabric, options, Clock::monotonic())?;
        let joined = worker.block_on(take_place(&worker, &*fabric))?;
        Self::new(&fabric, options, joined)
    }

    /// Joins without blocking, at the time that `clock` tells, for executors that drive several machines on one thread. To be
    /// polled again and again until it is ready. Nobody else does its maintenance, whatever `options` say.
    ///
    /// # Errors
    /// As [`ComputeServer::join`].
    pub async fn join_async(fabric: Arc<dyn Fabric>, options: ComputeOptions, clock: Clock) -> Result<Self, Error> {
        let options = ComputeOptions { maintenance: Maintenance::Manual, ..options };
        let worker = visitor(&fabric, options, clock)?;
        let joined = worker.drive(take_place(&worker, &*fabric)).await?;
        Self::new(&fabric, options, joined)
    }

    fn new(
        fabric: &Arc<dyn Fabric>,
        options: ComputeOptions,
        (geometry, joined): (Vec<Geometry>, Joined),
    ) -> Result<Self, Error> {
        let shared = Arc::new(joined.share(fabric, options, geometry));
        tracing::debug!(owner = %shared.owner, "joined");
        let thread = match options.maintenance {
            Maintenance::Manual => None,
            Maintenance::Thread => Some(spawn_maintenance(&shared)?),
        };
        Ok(Self { shared, thread, has_left: false })
    }

    /// Leaves the cluster without blocking, at the time that `clock` tells; to be polled again and again until it is ready. The
    /// workers are to be gone: while there is one, or with a thread for maintenance, this is as good as dropping it.
    pub async fn leave(mut self, clock: Clock) {
        if self.thread.is_some() || self.shared.has_workers() {
            return;
        }
        let shared = Arc::clone(&self.shared);
        self.has_left = true;
        match Worker::housekeeping(&shared, clock) {
            Ok(worker) => worker.drive(leave(&worker, &shared, async |attempt| worker.back_off(attempt).await)).await,
            Err(error) => tracing::warn!(%error, "left the cluster without deregistering"),
        }
    }

    /// A new worker, for the calling thread.
    ///
    /// # Errors
    /// If the fabric gives no endpoint.
    pub fn worker(&self) -> Result<Worker, Error> {
        self.worker_with(Clock::monotonic())
    }

    /// A new worker with this clock.
    ///
    /// # Errors
    /// If the fabric gives no endpoint.
    pub fn worker_with(&self, clock: Clock) -> Result<Worker, Error> {
        let number = self.shared.workers_made.fetch_add(1, Ordering::Relaxed);
        let seed = self.shared.seed.wrapping_add((number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let worker = Worker::new(&self.shared, number as u32, seed, clock)?;
        self.shared.last_out.worker_began();
        Ok(worker)
    }

    /// Opens it to messages of other compute servers, as memory servers are, until the listener is dropped. The number of endpoints
    /// is that of the threads that will serve them.
    ///
    /// # Errors
    /// [`FabricError::NoPeers`] if the fabric carries no messages between compute servers; if it listens already, or an option
    /// cannot work.
    pub fn listen(&self, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        Ok(self.shared.fabric.peer_listener(self.shared.owner, options)?)
    }

    /// Its incarnation.
    pub fn owner(&self) -> OwnerId {
        self.shared.owner
    }

    /// The memory servers.
    pub fn geometry(&self) -> &[Geometry] {
        &self.shared.geometry
    }

    /// Whether all memory servers are there: for a program that goes without requests for a while, and would not hear of a
    /// loss. Asks none of them; a few system calls on `mem`, a load on verbs.
    ///
    /// # Errors
    /// [`FabricError::ServerLost`] for one whose process has ended, whose region's file is not what it was, or which cannot be
    /// reached any more.
    pub fn check_servers(&self) -> Result<(), Error> {
        Ok(self.shared.fabric.check_servers()?)
    }

    /// The counts of its workers that have been dropped.
    pub fn counters(&self) -> Counters {
        *lock(&self.shared.past)
    }

    /// One round of maintenance: announces an epoch, moves the cluster's on if all have announced it, frees what no
    /// operation can hold any more, finishes what dead compute servers have left, and takes back what they held. Only for
    /// [`Maintenance::Manual`]; harmless otherwise. If it is dropped before its end, other rounds of this compute server do nothing, and the
    /// cluster's epoch stands still, until its worker was turned to the end of that round.
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn maintain(&self, worker: &Handle) -> Result<(), Error> {
        self.shared.check_standing()?;
        // One that cannot be finished does not hold up the rest.
        let swept = sweep(worker).await;
        round(worker, &self.shared).await?;
        swept.map(drop)
    }

    /// Does at once what maintenance does by and by after compute servers have died: finishes what they have left, takes back what
    /// they held, waits for the grace of it, and returns it to its chunks. False if another compute server holds that up for two
    /// seconds after the first look at what is left: the epoch, or a chunk. A round that was given up on a worker counts as well
    /// ([`maintain`](Self::maintain)).
    ///
    /// # Errors
    /// If the fabric fails.
    pub async fn settle(&self, worker: &Handle) -> Result<bool, Error> {
        self.shared.check_standing()?;
        let mut begun_ns = None;
        for attempt in 0.. {
            let left = sweep(worker).await;
            round(worker, &self.shared).await?;
            // The first sweep may look at all pages for long, and nobody holds anything up then.
            let begun_ns = *begun_ns.get_or_insert_with(|| worker.clock().now_ns());
            let is_waiting = self.shared.pages.deferred() != 0 || self.shared.pages.is_returning();
            match left {
                Ok(0) if !is_waiting => return Ok(true),
                // What is on its way back is memory, too.
                Err(Error::OutOfMemory { .. }) if is_waiting => {}
                left => drop(left?),
            }
            if worker.clock().now_ns() - begun_ns > SETTLE_NS_MAX {
                break;
            }
            worker.back_off(attempt).await;
        }
        Ok(false)
    }
}

impl Drop for ComputeServer {
    fn drop(&mut self) {
        match self.thread.take() {
            // The thread leaves the cluster once the last worker is gone.
            Some((stop, thread)) => {
                drop(stop);
                if !self.shared.has_workers() {
                    let _ = thread.join();
                }
            }
            None if self.has_left => {}
            None => Shared::abandon(&self.shared),
        }
    }
}

/// A worker of somebody who is no member yet.
fn visitor(fabric: &Arc<dyn Fabric>, options: ComputeOptions, clock: Clock) -> Result<Worker, Error> {
    let owner = OwnerId::new(1).expect("1 is an incarnation");
    let nobody = Joined { owner, claim: None, slot: 0, epoch: 0, displaces: false };
    Worker::housekeeping(&Arc::new(nobody.share(fabric, options, Vec::new())), clock)
}

/// Reads and checks all superblocks.
async fn read_geometry(worker: &Handle, fabric: &dyn Fabric) -> Result<Vec<Geometry>, Error> {
    let mut all: Vec<Geometry> = Vec::with_capacity(fabric.servers());
    for index in 0..fabric.servers() {
        let Some(server) = u16::try_from(index).ok().and_then(ServerId::new) else {
            let why = format!("the fabric has {}, more than 2^15", fabric.servers());
            return Err(Error::BadOption { option: "servers", why });
        };
        let ReadOnce(words) =
            bounded(worker, || worker.read_once(Geometry::superblock_at(server), SUPERBLOCK_WORDS)).await?;
        let words: &[u64; SUPERBLOCK_WORDS] = (&*words).try_into().expect("the length that was asked for");
        let geometry = Geometry::read(words, server, fabric.region_bytes(server))?;
        if let Some(first) = all.first().filter(|first| first.cluster != geometry.cluster) {
            return Err(FabricError::WrongCluster { server, found: geometry.cluster, expected: first.cluster }.into());
        }
        if let Some(first) = all.first().filter(|first| first.records != geometry.records) {
            let why = format!("it says that {:?} is recorded, memory server 0 {:?}", geometry.records, first.records);
            return Err(Error::BadSuperblock { server, why });
        }
        if geometry.servers != fabric.servers() {
            let why = format!("it says there are {} memory servers, not {}", geometry.servers, fabric.servers());
            return Err(Error::BadSuperblock { server, why });
        }
        all.push(geometry);
    }
    if all.is_empty() {
        return Err(Error::BadOption { option: "servers", why: "a cluster needs a memory server".into() });
    }
    Ok(all)
}

/// Posts a request again that fails. Nobody holds anything yet who does this, and so it need not go on until the memory server is lost:
/// where requests only fail, it does not help to try for ever.
async fn bounded<T: FromDone>(worker: &Handle, post: impl Fn() -> Posted<T>) -> Result<T, Error> {
    let (begun_ns, mut attempt) = (worker.clock().now_ns(), 0);
    loop {
        let error = match post().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        if attempt + 1 >= JOIN_TRIES && worker.clock().now_ns() - begun_ns >= JOIN_NS_MAX {
            return Err(error.into());
        }
        worker.before_trying_again(error, &mut attempt).await?;
    }
}

/// Takes a new incarnation, claims it, and publishes it in a slot. The slot announces nothing until the epoch has been
/// read, which holds the cluster's epoch still.
async fn take_place(worker: &Handle, fabric: &dyn Fabric) -> Result<(Vec<Geometry>, Joined), Error> {
    let geometry = read_geometry(worker, fabric).await?;
    let first = &geometry[0];
    // An incarnation that is not given to anybody does no harm.
    let incarnation = bounded(worker, || worker.fetch_add(first.dynamic_at(Dynamic::NextIncarnation), 1)).await?;
    let owner = OwnerId::new(incarnation).ok_or(Error::IncarnationsExhausted)?;
    let claim = fabric.claim(owner)?;
    let slots = read_slots(worker, &Board::of(first)).await?;
    // That of a dead one is given free once others have finished what it has left. Where there is no other it is taken before, for
    // there may be nobody to do that: then who takes it does (see `recovery`).
    let (free, taken): (Vec<_>, Vec<_>) = slots.into_iter().enumerate().partition(|(_, [found, _])| *found == 0);
    for (slot, [found, _]) in free.into_iter().chain(taken) {
        let previous = OwnerId::new(found);
        let vacant = match previous {
            Some(previous) => {
                fabric.liveness(previous) == Liveness::Dead
                    && recovery::fence_off(worker, &geometry, slot, previous).await?.is_none()
            }
            None => true,
        };
        if vacant && claim_word(worker, layout::slot_at(slot), found, incarnation).await? {
            // Only now: a later one may have had a free slot, and have left it, while this one came.
            if fencing::is_fenced_off(worker, &geometry, slot, owner).await? {
                release_word(worker, layout::slot_at(slot), incarnation, found).await?;
                continue;
            }
            let epoch = worker.load(first.dynamic_at(Dynamic::Epoch)).await?;
            write_words(worker, vec![(layout::slot_at(slot).word(1), epoch)]).await?;
            let displaces = previous.is_some();
            return Ok((geometry, Joined { owner, claim: Some(claim), slot, epoch, displaces }));
        }
    }
    Err(Error::TooManyComputeServers { limit: SLOTS })
}

/// The compute servers of the cluster that live, this one among them. Takes a few READs, and blocks for each as [`Handle::is_dead`] does.
///
/// # Errors
/// If the fabric fails.
pub async fn living(worker: &Handle) -> Result<Vec<OwnerId>, Error> {
    let slots = read_slots(worker, &Board::of(&worker.compute().geometry[0])).await?;
    let all = slots.into_iter().filter_map(|[incarnation, _]| OwnerId::new(incarnation));
    Ok(all.filter(|&owner| !worker.is_dead(owner)).collect())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        future::Future,
        pin::pin,
        ptr::NonNull,
        rc::Rc,
        sync::{
            Arc,
            atomic::{AtomicBool, AtomicUsize},
        },
        task::{Context, Poll, Waker},
    };

    use super::*;
    use crate::{
        buffer::LocalKey,
        fabric::{Capabilities, Completion, Endpoint, Request, Verb, mem::MemOptions},
        page::SizeClass,
        pages::{allocate, free_owned},
        structure::Placement,
    };

    /// Panics when its memory servers are looked at, once it is told to, and gives so many endpoints.
    #[derive(Debug)]
    struct Panicking {
        inner: Arc<dyn Fabric>,
        panics: AtomicBool,
        endpoints: AtomicUsize,
    }

    impl Panicking {
        fn new(inner: &Arc<dyn Fabric>, endpoints: usize) -> Arc<Self> {
            let (panics, endpoints) = (AtomicBool::new(false), AtomicUsize::new(endpoints));
            Arc::new(Self { inner: Arc::clone(inner), panics, endpoints })
        }
    }

    impl Fabric for Panicking {
        fn servers(&self) -> usize {
            self.inner.servers()
        }

        fn region_bytes(&self, server: ServerId) -> u64 {
            self.inner.region_bytes(server)
        }

        fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, FabricError> {
            let is_left = |left: usize| left.checked_sub(1);
            match self.endpoints.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_left) {
                Ok(_) => self.inner.endpoint(seed, clock),
                Err(_) => Err(FabricError::ServerMissing {
                    server: ServerId::new(0).unwrap(),
                    why: "it takes no more".into(),
                }),
            }
        }

        fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, FabricError> {
            self.inner.claim(owner)
        }

        fn liveness(&self, owner: OwnerId) -> Liveness {
            self.inner.liveness(owner)
        }

        fn check_servers(&self) -> Result<(), FabricError> {
            assert!(!self.panics.load(Ordering::Relaxed), "maintenance panics here, as the test has told it to");
            self.inner.check_servers()
        }
    }

    /// Of its endpoints those fail at some requests that are made after it was told so.
    #[derive(Debug)]
    struct Failing {
        inner: Arc<dyn Fabric>,
        at: fn(&Verb) -> bool,
        fails: AtomicBool,
    }

    impl Failing {
        fn new(at: fn(&Verb) -> bool) -> Arc<Self> {
            let inner = crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap();
            Arc::new(Self { inner: Arc::new(inner), at, fails: AtomicBool::new(false) })
        }
    }

    #[derive(Debug)]
    struct FailingEndpoint {
        inner: Box<dyn Endpoint>,
        at: fn(&Verb) -> bool,
        failed: Vec<Completion>,
    }

    impl Endpoint for FailingEndpoint {
        fn capabilities(&self) -> Capabilities {
            self.inner.capabilities()
        }

        unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, FabricError> {
            // SAFETY: the caller keeps the memory until this endpoint is dropped, and the wrapped one with it.
            unsafe { self.inner.register(base, words) }
        }

        fn ring(&mut self, requests: &mut Vec<Request>) {
            let failed = requests.extract_if(.., |request| (self.at)(&request.verb));
            self.failed.extend(failed.map(|Request { ticket, at, verb }| {
                let error = FabricError::RequestFailed { what: verb.name(), at, why: "as the test wants it".into() };
                Completion { ticket, outcome: Err(Box::new(error)) }
            }));
            self.inner.ring(requests);
        }

        fn poll(&mut self, completions: &mut Vec<Completion>) {
            completions.append(&mut self.failed);
            self.inner.poll(completions);
        }
    }

    impl Fabric for Failing {
        fn servers(&self) -> usize {
            self.inner.servers()
        }

        fn region_bytes(&self, server: ServerId) -> u64 {
            self.inner.region_bytes(server)
        }

        fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, FabricError> {
            let inner = self.inner.endpoint(seed, clock)?;
            match self.fails.load(Ordering::Relaxed) {
                true => Ok(Box::new(FailingEndpoint { inner, at: self.at, failed: Vec::new() })),
                false => Ok(inner),
            }
        }

        fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, FabricError> {
            self.inner.claim(owner)
        }

        fn liveness(&self, owner: OwnerId) -> Liveness {
            self.inner.liveness(owner)
        }

        fn check_servers(&self) -> Result<(), FabricError> {
            self.inner.check_servers()
        }
    }

    /// In virtual time.
    #[test]
    fn who_joins_where_requests_only_fail_is_told_after_a_while() {
        let every: fn(&Verb) -> bool = |_| true;
        for (at, name) in [(every, "READ"), (|verb| matches!(verb, Verb::FetchAdd(_)), "FETCH_ADD")] {
            let (fabric, clock) = (Failing::new(at), Clock::Virtual(Rc::default()));
            fabric.fails.store(true, Ordering::Relaxed);
            let mut joining = pin!(ComputeServer::join_async(fabric, ComputeOptions::default(), clock.clone()));
            let told_ms = (0..2 * JOIN_NS_MAX / 1_000_000).find(|ms| {
                clock.skip_to(ms * 1_000_000);
                let Poll::Ready(joined) = joining.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
                    return false;
                };
                let is_told =
                    matches!(joined, Err(Error::Fabric(FabricError::RequestFailed { what, .. })) if what == name);
                assert!(is_told && clock.now_ns() >= JOIN_NS_MAX, "after {ms} ms: {joined:?}");
                true
            });
            assert!(told_ms.is_some(), "{name}: it goes on joining");
        }
    }

    /// Time stands still: however often its worker has a turn, it rests.
    #[test]
    fn a_read_that_fails_rests_before_it_is_posted_again() {
        let (fabric, clock) = (Failing::new(|_| true), Clock::Virtual(Rc::default()));
        let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
        let compute = ComputeServer::join(fabric.clone(), options).unwrap();
        fabric.fails.store(true, Ordering::Relaxed);
        let worker = compute.worker_with(clock).unwrap();
        fabric.fails.store(false, Ordering::Relaxed);
        {
            let mut reading = pin!(worker.drive(worker.read(layout::slot_at(0), 1)));
            for _ in 0..1000 {
                let polled = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending(), "{polled:?}");
            }
        }
        let reads = worker.counters().reads;
        assert!((1..20).contains(&reads), "{reads} READs");
    }

    /// Who cannot maintain what it has does not join, and counts as dead.
    #[test]
    fn without_an_endpoint_for_maintenance_nobody_joins() {
        let memory: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap());
        let joined = ComputeServer::join(Panicking::new(&memory, 1), ComputeOptions::default());
        assert!(matches!(joined, Err(Error::Fabric(FabricError::ServerMissing { .. }))), "{joined:?}");
        let first = OwnerId::new(1).unwrap();
        assert_eq!(memory.liveness(first), Liveness::Dead);
    }

    /// Whose maintenance has panicked is told so, and counts as dead once its workers are gone: nobody waits for its epoch.
    #[test]
    fn a_panic_of_maintenance_holds_up_nobody() {
        let memory: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap());
        let fabric = Panicking::new(&memory, usize::MAX);
        let compute = ComputeServer::join(fabric.clone(), ComputeOptions::default()).unwrap();
        let (worker, owner) = (compute.worker().unwrap(), compute.owner());
        fabric.panics.store(true, Ordering::Relaxed);
        let has_ended = || compute.thread.as_ref().is_some_and(|(_, thread)| thread.is_finished());
        loop {
            let had_ended = has_ended();
            match worker.block_on(worker.read(layout::slot_at(0), 1)) {
                Ok(_) => assert!(!had_ended, "maintenance has ended, and operations go on"),
                Err(error) => {
                    assert!(matches!(*error, Error::Fabric(FabricError::TakenForDead { .. })), "{error}");
                    break;
                }
            }
            std::thread::yield_now();
        }
        assert_eq!(memory.liveness(owner), Liveness::Alive, "its workers are there yet");
        drop(worker);
        drop(compute);
        assert_eq!(memory.liveness(owner), Liveness::Dead);
        let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
        let other = ComputeServer::join(memory, options).unwrap();
        let worker = other.worker().unwrap();
        worker.block_on(async {
            let page = allocate(&worker, SizeClass::SMALLEST, Placement::RoundRobin).await.unwrap();
            let (at, class, lock) = (page.at(), page.class(), page.first_lock());
            page.publish();
            free_owned((*worker).clone(), at, class, lock).await.unwrap();
            assert!(other.settle(&worker).await.unwrap(), "the epoch is held up");
        });
    }
}
