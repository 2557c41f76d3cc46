//! A compute server: a process's (or a simulated machine's) membership in a cluster, shared by its workers.
//!
//! Joining validates every superblock, takes an incarnation that is never given out again, proves it alive with a
//! [claim](crate::fabric::OwnerClaim), and publishes a slot in which it announces epochs. *Maintenance* keeps the cluster's
//! epoch moving and brings retired pages back; a thread of its own does that, or whoever drives the compute server calls
//! [`ComputeServer::maintain`]. Leaving waits for the grace of what is still deferred, returns all pages, frees the slot
//! and drops the claim, in that order.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::Duration,
};

use futures_util::future::{Either, select};

use crate::{
    catalog,
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
    one_sided::ownership,
    pages,
    ptr::ServerId,
    recovery,
    remote::{claim_word, release_word, write_words},
    shared::Shared,
    sync::{Arc, Ordering, lock},
    worker::{Handle, Worker},
};

/// How long maintenance rests between two rounds while pages wait for reuse or the epoch moves, and at most otherwise.
const BUSY_REST: Duration = Duration::from_millis(4);
const IDLE_REST: Duration = Duration::from_millis(32);
/// How long who leaves rests between two rounds.
const LEAVE_REST: Duration = Duration::from_millis(1);
/// How long maintenance rests between two looks for compute servers that have died.
const SWEEP_REST: Duration = Duration::from_millis(100);
/// The same where something could not be finished again and again.
const FAILED_SWEEP_REST_MAX: Duration = Duration::from_millis(1600);
/// Rounds of maintenance that a leaving compute server spends on the grace of its last retired pages; then it hands them over.
const LEAVE_ROUNDS_MAX: u32 = 100;
/// The same while there are pages in doubt, which are lost with who leaves: some seconds, more than an operation of others takes.
const DOUBT_ROUNDS_MAX: u32 = 5000;
/// How long [`ComputeServer::settle`] waits for a grace: much more than it takes a neighbour that is idle, and announces epochs seldom.
const SETTLE_NS_MAX: u64 = 2_000_000_000;
/// Tries of a step of leaving for which there is no memory.
const LEAVE_ATTEMPTS_MAX: u32 = 20;

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
    /// has no slot or no incarnation left; if the fabric fails.
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

/// Leaves the cluster from the calling thread.
fn leave_by_hand(shared: &Arc<Shared>) {
    match Worker::housekeeping(shared, Clock::monotonic()) {
        Ok(worker) => leave_blocking(&worker, shared),
        Err(error) => tracing::warn!(%error, "left the cluster without deregistering"),
    }
}

fn leave_blocking(worker: &Worker, shared: &Shared) {
    worker.block_on(leave(worker, shared, async |attempt| {
        if attempt > 8 {
            std::thread::sleep(LEAVE_REST);
        }
    }));
}

/// A worker of somebody who is no member yet.
fn visitor(fabric: &Arc<dyn Fabric>, options: ComputeOptions, clock: Clock) -> Result<Worker, Error> {
    let owner = OwnerId::new(1).expect("1 is an incarnation");
    let nobody = Joined { owner, claim: None, slot: 0, epoch: 0, displaces: false };
    Worker::housekeeping(&Arc::new(nobody.share(fabric, options, Vec::new())), clock)
}

fn spawn_maintenance(shared: &Arc<Shared>) -> Result<(mpsc::Sender<()>, JoinHandle<()>), Error> {
    let (stop, stopped) = mpsc::channel();
    let (tell, begun) = mpsc::channel();
    let shared = Arc::clone(shared);
    let thread = std::thread::Builder::new()
        .name(format!("farlink-{}", shared.owner.incarnation()))
        .spawn(move || {
            if catch_unwind(AssertUnwindSafe(|| maintain_until(&shared, &stopped, tell))).is_err() {
                // Others take it for dead only when it has no worker left that could have sent something.
                while shared.has_workers() {
                    std::thread::sleep(IDLE_REST);
                }
                lock(&shared.claim).take();
            }
        })
        .map_err(Error::io("starting the maintenance thread"))?;
    // A compute server without it would hold up the epoch of the whole cluster.
    let panicked = |_| Err(Error::io("starting the maintenance thread")(io::Error::other("it has panicked")));
    match begun.recv().unwrap_or_else(panicked) {
        Ok(()) => Ok((stop, thread)),
        Err(error) => {
            let _ = thread.join();
            Err(error)
        }
    }
}

/// Ends all that a compute server has if its maintenance panics: without it the epoch of the whole cluster stands still.
struct EndsOnPanic<'a>(&'a Shared);

impl Drop for EndsOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(owner = %self.0.owner, "maintenance has panicked, and nothing is done any more; end this process, and join anew");
            self.0.fall();
        }
    }
}

/// Maintenance, until the compute server has left; `tell`s whether it has begun.
fn maintain_until(shared: &Arc<Shared>, stopped: &mpsc::Receiver<()>, tell: mpsc::Sender<Result<(), Error>>) {
    let worker = match Worker::housekeeping(shared, Clock::monotonic()) {
        Ok(worker) => worker,
        Err(error) => return drop(tell.send(Err(error))),
    };
    // Before the worker goes: its last requests fail, too.
    let _ends_on_panic = EndsOnPanic(shared);
    let _ = tell.send(Ok(()));
    let mut rest = BUSY_REST;
    let (mut is_told, mut sweep_ns, mut sweep_rest) = (false, 0, SWEEP_REST);
    loop {
        if shared.check_standing().is_err() {
            // All that is left is to end.
            let _ = stopped.recv();
            while shared.has_workers() {
                std::thread::sleep(IDLE_REST);
            }
            break;
        }
        if worker.clock().now_ns() >= sweep_ns {
            sweep_rest = match worker.block_on(sweep_between_rounds(&worker, shared)) {
                Ok(_) => SWEEP_REST,
                Err(error) => {
                    tracing::warn!(%error, "what dead compute servers have left, or this one, was not finished");
                    // It looks at all pages each time, and what is in the way may stay.
                    (sweep_rest * 2).min(FAILED_SWEEP_REST_MAX)
                }
            };
            sweep_ns = worker.clock().now_ns() + sweep_rest.as_nanos() as u64;
        }
        if matches!(stopped.recv_timeout(rest), Err(RecvTimeoutError::Disconnected)) {
            if !shared.has_workers() {
                break;
            }
            std::thread::sleep(rest);
        }
        match worker.block_on(round(&worker, shared)) {
            Ok(true) => rest = BUSY_REST,
            Ok(false) => rest = (rest * 2).min(IDLE_REST),
            Err(error) => {
                // Of a memory server that is lost there is no more to say the second time.
                if !std::mem::replace(&mut is_told, matches!(error, Error::Fabric(FabricError::ServerLost { .. }))) {
                    tracing::warn!(%error, "a round of maintenance failed");
                }
                rest = IDLE_REST;
            }
        }
    }
    leave_blocking(&worker, shared);
}

/// Reads and checks all superblocks.
async fn read_geometry(worker: &Handle, fabric: &dyn Fabric) -> Result<Vec<Geometry>, Error> {
    let mut all: Vec<Geometry> = Vec::with_capacity(fabric.servers());
    for index in 0..fabric.servers() {
        let Some(server) = u16::try_from(index).ok().and_then(ServerId::new) else {
            let why = format!("the fabric has {}, more than 2^15", fabric.servers());
            return Err(Error::BadOption { option: "servers", why });
        };
        let words = worker.read(Geometry::superblock_at(server), SUPERBLOCK_WORDS).await?;
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

/// Takes a new incarnation, claims it, and publishes it in a slot. The slot announces nothing until the epoch has been
/// read, which holds the cluster's epoch still.
async fn take_place(worker: &Handle, fabric: &dyn Fabric) -> Result<(Vec<Geometry>, Joined), Error> {
    let geometry = read_geometry(worker, fabric).await?;
    let first = &geometry[0];
    let mut attempt = 0;
    // An incarnation that is not given to anybody does no harm.
    let incarnation = loop {
        match worker.fetch_add(first.dynamic_at(Dynamic::NextIncarnation), 1).await {
            Ok(incarnation) => break incarnation,
            Err(error) => worker.before_trying_again(error, &mut attempt).await?,
        }
    };
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

/// Finishes what dead compute servers have left, and this one: of how many dead ones something is left.
async fn sweep(worker: &Handle) -> Result<usize, Error> {
    let swept = recovery::sweep(worker, catalog::free_unfinished).await;
    catalog::free_left(worker).await?;
    swept
}

/// [`sweep`], with rounds of maintenance as long as it takes. After a death it reads the lock words of all pages, and the cluster's epoch
/// would stand still for that time.
async fn sweep_between_rounds(worker: &Handle, shared: &Shared) -> Result<usize, Error> {
    let mut sweeping = pin!(sweep(worker));
    loop {
        let resting = pin!(worker.sleep_until(worker.clock().now_ns() + BUSY_REST.as_nanos() as u64));
        if let Either::Left((swept, _)) = select(sweeping.as_mut(), resting).await {
            return swept;
        }
        if let Err(error) = round(worker, shared).await {
            tracing::debug!(%error, "a round of maintenance failed");
        }
    }
}

/// One round of maintenance; true if there is reason to come again soon.
pub(crate) async fn round(worker: &Handle, shared: &Shared) -> Result<bool, Error> {
    // Operations learn of what it finds: their requests fail.
    let _ = shared.fabric.check_servers();
    let worker_of_task = worker.clone();
    // To its end: what it announces, were it sent later, would take back what others have announced since.
    let announcing = async move {
        let shared = worker_of_task.compute();
        let board = Board::of(&shared.geometry[0]);
        shared.member.round(&worker_of_task, &board, |epoch| shared.epoch.advance(epoch), &shared.pages).await
    };
    let is_busy = worker.spawn_to_end(announcing).await?;
    ownership::maintain(worker).await;
    let worker_of_task = worker.clone();
    worker.spawn_to_end(async move { pages::free_unclaimed(&worker_of_task).await }).await?;
    let (returning, idle) = (shared.pages.take_returning(), shared.pages.take_surplus());
    if !returning.is_empty() || !idle.is_empty() {
        let worker_of_task = worker.clone();
        match worker.spawn_to_end(async move { pages::give_back_surplus(&worker_of_task, returning, idle).await }).await
        {
            // They go with another round.
            Err(error @ Error::OwnerStalled { .. }) => tracing::debug!(%error, "pages were not returned"),
            returned => returned?,
        }
    }
    Ok(is_busy)
}

/// Leaves the cluster: no worker is left. What cannot be returned, because others hold up the epoch or a request fails, is handed
/// over: the slot keeps the incarnation, and whoever finds that it is dead takes the pages over, for another grace. `pause`s
/// after each round of waiting for the grace of pages, by their number.
async fn leave(worker: &Handle, shared: &Shared, pause: impl AsyncFn(u32)) {
    let deregistered = async {
        // What it had is others' already.
        shared.check_standing()?;
        repeat(worker, async || ownership::leave(worker).await).await?;
        if shared.displaces.load(Ordering::Acquire)
            && let Err(error) = recovery::sweep(worker, catalog::free_unfinished).await
        {
            tracing::debug!(%error, "what others have left whose slots were taken is left to the next one");
        }
        if let Err(error) = catalog::free_left(worker).await {
            tracing::debug!(%error, "structures that were not made or dropped to the end are handed over");
        }
        for attempt in 0..DOUBT_ROUNDS_MAX {
            let may_hand_over = attempt >= LEAVE_ROUNDS_MAX && shared.pages.in_doubt() == 0;
            if may_hand_over || shared.pages.deferred() == 0 {
                break;
            }
            repeat(worker, async || round(worker, shared).await).await?;
            pause(attempt).await;
        }
        let is_unfinished = !lock(&shared.unfinished).is_empty();
        // By its rings others find who has left a structure unfinished, once somebody else has its slot.
        if !is_unfinished {
            repeat(worker, async || recovery::free_rings(worker, shared.owner).await).await?;
        }
        // Maintenance is a worker, too, and may have taken pages for a ring.
        worker.pages().give_back(&shared.pages);
        repeat(worker, async || pages::give_back(worker, shared.pages.take_all()).await).await?;
        if is_unfinished || shared.pages.deferred() != 0 || shared.displaces.load(Ordering::Acquire) {
            return Ok(());
        }
        let incarnation = u64::from(shared.owner.incarnation());
        release_word(worker, layout::slot_at(shared.member.slot()), incarnation, 0).await?;
        Ok::<_, Error>(())
    };
    if let Err(error) = deregistered.await {
        tracing::warn!(%error, "left the cluster without deregistering");
    }
    if shared.is_fallen() {
        lock(&shared.claim).take();
        return;
    }
    let in_doubt = shared.pages.in_doubt();
    if in_doubt != 0 {
        tracing::warn!(pages = in_doubt, "pages are lost: another compute server holds the epoch back for too long");
    }
    let pages = shared.pages.deferred() - in_doubt;
    if pages != 0 {
        tracing::info!(pages, "retired pages are handed over: another compute server holds the epoch back");
    }
    lock(&shared.claim).take();
}

/// Gives what fails for want of memory a few more tries.
async fn repeat<T>(worker: &Handle, step: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut attempt = 0;
    loop {
        match step().await {
            Err(Error::Fabric(error @ FabricError::RegistrationRefused { .. })) if attempt < LEAVE_ATTEMPTS_MAX => {
                tracing::debug!(%error, "tried again");
                worker.back_off(attempt).await;
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize},
    };

    use super::*;
    use crate::{
        fabric::{Endpoint, mem::MemOptions},
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
