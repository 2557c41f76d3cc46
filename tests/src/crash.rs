//! The crash suite: a compute server dies after each of its requests in turn, and the others must find everything whole.
//!
//! A [`Scene`] says what is there before, what the victim does, and what others must find after. [`enumerate`] plays it once for
//! each request of the victim, each time in a cluster of its own, with a [mortal fabric](farlink_runtime::fabric::mortal).

use std::{
    fmt::{self, Debug},
    future::{Future as _, poll_fn},
    pin::pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use anyhow::Context as _;
use farlink_offload::{
    OwnerServer,
    ship::{Registry, ShipServer},
};
use farlink_runtime::{
    audit,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Error as FabricError, Fabric,
        listener::ListenOptions,
        mem::MemOptions,
        mortal::{MortalFabric, Order},
    },
    layout::CHUNK_BYTES,
    page::SizeClass,
    pages::allocate,
    ptr::{RemotePtr, ServerId},
    report::Report,
    server,
    structure::Placement,
    worker::Worker,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    backend::here::{self, Here},
    bounded::Watchdog,
    cluster,
    direct::Direct,
    fleet, settings,
};

const SERVERS: usize = 2;
/// Bytes of each memory server.
const SERVER_BYTES: u64 = 2 << 20;
/// Which no scene takes to be played once.
const LIMIT: Duration = Duration::from_secs(20);

/// A member of the cluster that does its own maintenance.
#[derive(Debug)]
pub struct Member {
    // Before the compute server, which it belongs to.
    worker: Worker,
    compute: Arc<ComputeServer>,
}

impl Member {
    /// Joins.
    ///
    /// # Errors
    /// As [`ComputeServer::join`].
    pub fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<Self, Error> {
        Self::of(cluster::join_manual(fabric, seed)?)
    }

    /// One that has joined.
    ///
    /// # Errors
    /// As [`ComputeServer::worker`].
    pub fn of(compute: ComputeServer) -> Result<Self, Error> {
        Ok(Self { worker: compute.worker()?, compute: Arc::new(compute) })
    }

    /// Its worker.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The compute server.
    pub fn compute(&self) -> &Arc<ComputeServer> {
        &self.compute
    }

    /// One round of maintenance.
    ///
    /// # Errors
    /// As [`ComputeServer::maintain`].
    pub fn maintain_once(&self) -> Result<(), Error> {
        self.worker.block_on(self.compute.maintain(&self.worker))
    }

    /// One round of maintenance, for who polls it.
    ///
    /// # Errors
    /// As [`ComputeServer::maintain`].
    pub async fn sweep(&self) -> Result<(), Error> {
        self.compute.maintain(&self.worker).await
    }

    /// Maintenance until nothing is left to be done.
    ///
    /// # Errors
    /// If the fabric fails.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn maintain(&self) -> Result<(), Error> {
        assert!(self.worker.block_on(self.compute.settle(&self.worker))?, "something holds up the epoch");
        Ok(())
    }
}

/// What memory servers do in a scene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryServers {
    /// They carry out nothing.
    Passive,
    /// They carry out what the victim sends, and outlive it.
    Serve,
    /// They are what dies, all at once, and leaves its memory: the victim, which sends its operation there, lives.
    Die,
}

/// What the victim does, and what others must find.
#[allow(async_fn_in_trait, reason = "tests run on one thread")]
pub trait Scene {
    /// What the victim has opened.
    type Open: 'static;

    /// What memory servers do.
    fn memory_servers(&self) -> MemoryServers {
        MemoryServers::Passive
    }

    /// What they know, where they carry something out.
    fn registry(&self) -> Registry {
        fleet::registry()
    }

    /// Makes what is there before.
    ///
    /// # Errors
    /// None that is expected.
    async fn prepare(&self, worker: &Worker) -> Result<(), Error>;

    /// Others who come before the victim: they have died or left, or stay beside it, unless it is one that [stops](enumerate_resumed).
    ///
    /// # Errors
    /// None that is expected.
    fn others(&self, _fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
        Ok(())
    }

    /// What carries out for others what they send to the victim, if anything does.
    ///
    /// # Errors
    /// None that is expected.
    fn serve(&self, _victim: &Arc<ComputeServer>) -> Result<Option<OwnerServer>, Error> {
        Ok(None)
    }

    /// Opens it, before the victim's requests count.
    ///
    /// # Errors
    /// None that is expected.
    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error>;

    /// The victim's operation.
    ///
    /// # Errors
    /// Because the fabric is dead.
    async fn act(&self, open: &Self::Open) -> Result<(), Error>;

    /// Those who were beside the victim go on without it, and leave.
    ///
    /// # Errors
    /// None that is expected.
    fn outlive(&self, _acknowledged: bool) -> Result<(), Error> {
        Ok(())
    }

    /// Which of two ways others take, where a scene has two: it is drawn before each play.
    fn take_way(&self, _is_other: bool) {}

    /// Whether somebody looks for dead compute servers before others read anything: what an owner has left is only then whole.
    fn is_swept_first(&self) -> bool {
        false
    }

    /// Frees pages that are nobody's, where the victim may leave some: it writes them before it links them, under no lock and with no
    /// record. How many those were.
    ///
    /// # Errors
    /// None that is expected.
    async fn free_leaked(&self, _worker: &Worker) -> Result<u64, Error> {
        Ok(0)
    }

    /// Another compute server reads and changes everything. `acknowledged`: the victim's operation had succeeded.
    ///
    /// # Errors
    /// None that is expected.
    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error>;

    /// The structure's own check.
    ///
    /// # Errors
    /// None that is expected.
    async fn check(&self, worker: &Worker) -> Result<Report, Error>;
}

/// A way to die. As text: order; `whole`, or the seed of what arrives of a WRITE that is torn; after how many requests; and of whoever
/// sweeps first, if that one dies, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Death {
    order: Order,
    /// Decides what arrives of the request at which it dies.
    tears: Option<u16>,
    after: u64,
    /// Who sweeps first, dies after so many requests of that.
    sweeper_after: Option<u64>,
}

const ORDERS: [(Order, &str); 3] = [(Order::Posted, "posted"), (Order::Lower, "lower"), (Order::Higher, "higher")];

const WHOLE: &str = "whole";

impl Death {
    fn mortal(self, inner: &Arc<dyn Fabric>) -> MortalFabric {
        let seed = self.tears.unwrap_or_default();
        MortalFabric::new(Arc::clone(inner), self.order, self.tears.is_some()).with_seed(seed.into())
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = ORDERS.into_iter().find_map(|(order, name)| (order == self.order).then_some(name));
        let tears = self.tears.map_or(WHOLE.to_owned(), |seed| seed.to_string());
        write!(f, "{},{tears},{}", order.expect("all are named"), self.after)?;
        self.sweeper_after.map_or(Ok(()), |after| write!(f, ",{after}"))
    }
}

impl FromStr for Death {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let mut words = text.split(',');
        let mut next = |what| words.next().with_context(|| format!("{text:?} says nothing of {what}"));
        let order = next("the order")?;
        let order = ORDERS.into_iter().find_map(|(of, name)| (order == name).then_some(of)).context("no such order")?;
        let tears = next("tears")?;
        let tears = if tears == WHOLE { None } else { Some(tears.parse()?) };
        let after = next("how many requests")?.parse()?;
        let sweeper_after = words.next().map(str::parse).transpose()?;
        anyhow::ensure!(words.next().is_none(), "{text:?} says too much");
        Ok(Self { order, tears, after, sweeper_after })
    }
}

/// Those who were to die.
#[derive(Debug, Clone, Copy)]
struct Played {
    victim: Lived,
    sweeper: Option<Lived>,
}

/// What came of somebody who was to die after so many requests.
#[derive(Debug, Clone, Copy)]
struct Lived {
    requests: u64,
    has_died: bool,
}

impl Lived {
    fn of(mortal: &MortalFabric, after: u64) -> Self {
        let (requests, has_died) = mortal.since_told();
        assert_eq!(has_died, after < requests, "of {requests} requests, after {after} it was to die");
        Self { requests, has_died }
    }
}

/// Requests of a sweep in which what the dead have left is finished.
const FINISHING: u64 = 100;
/// More than anybody makes.
const NEVER: u64 = u64::MAX - 1;
/// One death in so many is played by default.
const EVERY: u64 = 100;

/// A cluster, and the memory servers that are there to be asked.
struct Stage {
    fabric: Arc<dyn Fabric>,
    here: Option<Arc<dyn Here>>,
}

impl Stage {
    fn new(options: MemOptions, servers: MemoryServers) -> Result<Self, Error> {
        // What a memory server does by hand its fabric does not see.
        let atomic_against_cpu = options.atomic_against_cpu && servers != MemoryServers::Die;
        let options = MemOptions { atomic_against_cpu, ..options };
        if servers == MemoryServers::Passive {
            return Ok(Self { fabric: Arc::new(server::in_process(SERVERS, SERVER_BYTES, options)?), here: None });
        }
        let here = here::start(SERVERS, SERVER_BYTES, options)?;
        Ok(Self { fabric: here.fabric(), here: Some(here) })
    }

    /// Has the memory servers carry out operations, as one member of the cluster that `fabric` leads to.
    fn serve(&self, fabric: &Arc<dyn Fabric>, registry: &Registry) -> Result<Vec<ShipServer>, Error> {
        let Some(here) = &self.here else { return Ok(Vec::new()) };
        let member = Arc::new(cluster::join_manual(fabric, 9)?);
        let serve = |server: usize| {
            let server = ServerId::new(server as u16).expect("a small number");
            let listen = ListenOptions { endpoints: 1, ..ListenOptions::default() };
            let member = Arc::clone(&member);
            let listener = here.listen(server, &listen)?;
            fleet::ship_at(listener, here.memory(server)?, registry.clone(), move || Ok(Arc::clone(&member)))
        };
        (0..SERVERS).map(serve).collect()
    }
}

/// The victim acts, and is gone, or the memory servers are; whether its operation was acknowledged, and what came of whoever was to die.
fn play_victim<S: Scene>(stage: &Stage, scene: &S, death: Death) -> Result<(bool, Lived), Error> {
    let mortal = death.mortal(&stage.fabric);
    let (as_fabric, sound): (Arc<dyn Fabric>, _) = (Arc::new(mortal.clone()), Arc::clone(&stage.fabric));
    let servers_die = scene.memory_servers() == MemoryServers::Die;
    let (of_victim, of_servers) = if servers_die { (sound, as_fabric) } else { (as_fabric, sound) };
    let servers = stage.serve(&of_servers, &scene.registry())?;
    let victim = Member::join(&of_victim, 1)?;
    let served = scene.serve(&victim.compute)?;
    let open = victim.worker.block_on(scene.open(&victim.worker))?;
    mortal.dies_after(death.after);
    let mut acting = Box::pin(scene.act(&open));
    let outcome = victim.worker.block_on(poll_fn(|cx| {
        // Others may wait for its locks while it waits for them.
        if served.is_some() && mortal.since_told().1 {
            mortal.is_taken_for_dead();
        }
        cx.waker().wake_by_ref();
        acting.as_mut().poll(cx)
    }));
    drop(acting);
    let lived = Lived::of(&mortal, death.after);
    // It has not left: not even this arrives.
    mortal.dies_after(0);
    drop((open, served));
    // Who is dead first, so that the others need not wait for it.
    if servers_die {
        drop(servers);
        drop(victim);
    } else {
        drop(victim);
        drop(servers);
    }
    Ok((outcome.is_ok(), lived))
}

/// A member looks for dead ones and finishes what they have left, until it dies after so many requests.
fn play_sweeper(fabric: &Arc<dyn Fabric>, death: Death, after: u64) -> Result<Lived, Error> {
    let mortal = death.mortal(fabric);
    let as_fabric: Arc<dyn Fabric> = Arc::new(mortal.clone());
    let sweeper = Member::join(&as_fabric, 4)?;
    mortal.dies_after(after);
    let swept = sweeper.maintain_once();
    assert!(swept.is_ok() || after != NEVER, "{swept:?}");
    let lived = Lived::of(&mortal, after);
    mortal.dies_after(0);
    drop(sweeper);
    Ok(lived)
}

/// All that the memory servers hold.
fn memory_of(fabric: &Arc<dyn Fabric>) -> Result<Vec<u64>, Error> {
    const READ_BYTES: u64 = 64 << 10;
    let (direct, mut words) = (Direct::new(fabric, 8)?, Vec::new());
    for server in 0..SERVERS {
        let server = ServerId::new(server as u16).expect("a small number");
        for first in (0..SERVER_BYTES).step_by(READ_BYTES as usize) {
            // The first word of a region is no address.
            let from = first.max(8);
            let at = RemotePtr::new(server, from).expect("inside the region");
            words.extend(direct.read(at, ((first + READ_BYTES - from) / 8) as usize)?);
        }
    }
    Ok(words)
}

fn is_told(outcome: &Result<(), Error>) -> bool {
    matches!(outcome, Err(Error::Fabric(FabricError::TakenForDead { .. })))
}

/// What came of a victim that went on.
#[derive(Debug, Clone, Copy)]
struct Resumed {
    /// Those that it made until it stopped.
    requests: u64,
    has_stopped: bool,
    /// It answered afterwards: all that it had yet to do was what an operation does not depend on.
    answered_late: bool,
}

/// The victim stops after so many requests, is taken for dead, and goes on once others have taken over. `is_late`: it is known to answer
/// then, so others must find its operation done.
fn play_resumed<S: Scene>(options: MemOptions, scene: &S, after: u64, is_late: bool) -> Result<Resumed, Error> {
    let stage = Stage::new(options, scene.memory_servers())?;
    cluster::with_worker(&stage.fabric, |worker| worker.block_on(scene.prepare(worker)))?;
    scene.others(&stage.fabric)?;
    let mortal = MortalFabric::new(Arc::clone(&stage.fabric), Order::Posted, false);
    let as_fabric: Arc<dyn Fabric> = Arc::new(mortal.clone());
    let victim = Member::join(&as_fabric, 1)?;
    let open = victim.worker.block_on(scene.open(&victim.worker))?;
    let before = mortal.requests();
    mortal.stops_after(after);
    let survivor = Member::join(&stage.fabric, 2)?;
    let (resumed, memory) = {
        let mut acting = pin!(victim.worker.drive(scene.act(&open)));
        let mut turn = || acting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut outcome = Poll::Pending;
        while outcome.is_pending() && !mortal.has_stopped() {
            outcome = turn();
        }
        let requests = mortal.requests() - before;
        mortal.is_taken_for_dead();
        if scene.is_swept_first() {
            survivor.maintain()?;
        }
        let acknowledged = is_late || matches!(outcome, Poll::Ready(Ok(())));
        survivor.worker.block_on(scene.verify(&survivor.worker, acknowledged))?;
        survivor.maintain()?;
        let memory = memory_of(&stage.fabric)?;
        // It goes on.
        let had_stopped = outcome.is_pending();
        let outcome = loop {
            match outcome {
                Poll::Ready(outcome) => break outcome,
                Poll::Pending => outcome = turn(),
            }
        };
        assert!(outcome.is_ok() || had_stopped && is_told(&outcome), "{outcome:?}");
        (Resumed { requests, has_stopped: had_stopped, answered_late: had_stopped && outcome.is_ok() }, memory)
    };
    // What asks no memory server learns of it from maintenance.
    assert!(is_told(&victim.maintain_once()));
    for _ in 0..2 {
        let again = victim.worker.block_on(scene.act(&open));
        assert!(is_told(&again), "{again:?}");
    }
    drop(open);
    drop(victim);
    assert!(memory_of(&stage.fabric)? == memory, "something of the resumed one has landed");
    drop(survivor);
    let auditor = Member::join(&stage.fabric, 3)?;
    auditor.maintain()?;
    let report = auditor.worker.block_on(scene.check(&auditor.worker))?;
    assert!(report.is_clean() && !report.is_partial && report.audit.held == 0, "{report:?}");
    Ok(resumed)
}

/// One death in so many is played: `FARLINK_CRASH_EVERY`, or a hundred.
pub fn every() -> u64 {
    settings::from_env("FARLINK_CRASH_EVERY", EVERY).max(1)
}

/// Plays the scene with a victim that stops after some of its requests, one in `share` by default, and more or fewer as
/// `FARLINK_CRASH_EVERY` says; others take it for dead, and take over, and then it goes on: it is told so, and nothing that it does
/// lands. How often it had stopped. With `FARLINK_CRASH_STOP` it stops after so many requests, in both ways that others may take, and no
/// other stops are played.
///
/// # Panics
/// If it is not told, something lands, or others do not find what they must; and if it never stopped.
pub fn enumerate_resumed<S: Scene + Debug>(share: u64, options: MemOptions, scene: &S) -> u64 {
    let mut chance = Chance::new(scene);
    let every = (share * every() / EVERY).max(1);
    let (requests, stopped) = match settings::asked_for("FARLINK_CRASH_STOP") {
        Some(after) => (after, stop_again(options, scene, after)),
        None => {
            let requests = resumed(options, scene, NEVER, chance.way()).requests;
            let stops = chance.one_in(every, requests);
            (requests, stops.filter(|&after| resumed(options, scene, after, chance.way()).has_stopped).count())
        }
    };
    println!("{scene:?}: {requests} requests, {stopped} stops");
    assert!(stopped > 0, "{scene:?}: nobody has stopped");
    stopped as u64
}

/// Plays a stop in both ways that others may take; in how many the victim had stopped.
///
/// # Panics
/// As [`enumerate_resumed`], but for a victim that never stopped.
pub fn stop_again<S: Scene + Debug>(options: MemOptions, scene: &S, after: u64) -> usize {
    WAYS.into_iter().filter(|&is_other| resumed(options, scene, after, is_other).has_stopped).count()
}

fn resumed<S: Scene + Debug>(options: MemOptions, scene: &S, after: u64, is_other: bool) -> Resumed {
    scene.take_way(is_other);
    let play = |is_late| {
        let _watch = Watchdog::start(format!("{scene:?}, FARLINK_CRASH_STOP={after}, answers late: {is_late}"), LIMIT);
        let played =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play_resumed(options, scene, after, is_late)));
        match played {
            Ok(Ok(resumed)) => resumed,
            Ok(Err(error)) => panic!("{scene:?}, FARLINK_CRASH_STOP={after}, answers late: {is_late}: {error}"),
            Err(panic) => {
                println!("{scene:?}, FARLINK_CRASH_STOP={after}, answers late: {is_late}");
                std::panic::resume_unwind(panic);
            }
        }
    };
    let resumed = play(false);
    if resumed.answered_late {
        play(true);
    }
    resumed
}

/// Every chunk can be leased: none was counted as leased by somebody who died before it was.
async fn lease_all(Member { worker, compute }: &Member) -> Result<(), Error> {
    let mut pages = Vec::new();
    let outcome = loop {
        match allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await {
            Ok(page) => pages.push(page),
            Err(error) => break error,
        }
    };
    assert!(matches!(outcome, Error::OutOfMemory { .. }), "{outcome}");
    let chunks: u64 = compute.geometry().iter().map(|geometry| geometry.chunks).sum();
    assert_eq!(audit::memory(worker).await?.leased_bytes, chunks * CHUNK_BYTES, "a chunk is lost");
    Ok(())
}

fn play<S: Scene>(options: MemOptions, scene: &S, death: Death) -> Result<Played, Error> {
    let stage = Stage::new(options, scene.memory_servers())?;
    let fabric = &stage.fabric;
    cluster::with_worker(fabric, |worker| worker.block_on(scene.prepare(worker)))?;
    scene.others(fabric)?;
    let (acknowledged, victim) = play_victim(&stage, scene, death)?;
    assert!(acknowledged || death.after != NEVER, "nobody has died, and the operation failed");
    scene.outlive(acknowledged)?;
    let sweeper = death.sweeper_after.map(|after| play_sweeper(fabric, death, after)).transpose()?;
    let survivor = Member::join(fabric, 2)?;
    if scene.is_swept_first() {
        survivor.maintain()?;
    }
    survivor.worker.block_on(scene.verify(&survivor.worker, acknowledged))?;
    survivor.maintain()?;
    let freed = survivor.worker.block_on(scene.free_leaked(&survivor.worker))?;
    assert!(freed == 0 || death.after != NEVER, "{freed} pages were nobody's, and nobody died");
    // With it go the pages that it had in hand.
    drop(survivor);
    let auditor = Member::join(fabric, 3)?;
    auditor.maintain()?;
    let report = auditor.worker.block_on(scene.check(&auditor.worker))?;
    assert!(report.is_clean() && !report.is_partial && report.audit.held == 0, "{report:?}");
    // Whatever is in use beside the structure belongs to nobody, or to a structure that nobody can find.
    let used = auditor.worker.block_on(audit::memory(&auditor.worker))?.used_bytes();
    assert_eq!(used, report.bytes, "bytes are in use that are not the structure's");
    auditor.worker.block_on(lease_all(&auditor))?;
    Ok(Played { victim, sweeper })
}

/// Draws what is played, from `FARLINK_TEST_SEED`.
struct Chance(StdRng);

impl Chance {
    fn new(scene: &impl Debug) -> Self {
        Self(StdRng::seed_from_u64(settings::seed(&format!("{scene:?}"))))
    }

    /// One in so many requests, and one at least.
    fn one_in(&mut self, every: u64, requests: u64) -> impl Iterator<Item = u64> + Clone + use<> {
        assert!(requests > 0, "nothing is done");
        let first = self.0.random_range(0..every.min(requests));
        (first..requests).step_by(every as usize)
    }

    /// A way that others take.
    fn way(&mut self) -> bool {
        self.0.random()
    }

    /// Two in three are torn: few of the requests are WRITEs that can be.
    fn tears(&mut self) -> Option<u16> {
        self.0.random_ratio(2, 3).then(|| self.0.random())
    }
}

/// The two ways that others may take.
const WAYS: [bool; 2] = [false, true];

/// Plays the death that `FARLINK_CRASH_DEATH` asks for, in both ways that others may take. Whether it asks for one.
fn plays_again<S: Scene + Debug>(options: MemOptions, scene: &S) -> bool {
    let Some(death) = settings::asked_for("FARLINK_CRASH_DEATH") else { return false };
    let both = WAYS.map(|is_other| played(options, scene, death, is_other));
    println!("{scene:?}, FARLINK_CRASH_DEATH={death}: {both:?}");
    true
}

/// Plays the scene for each request of the victim, or one in `FARLINK_CRASH_EVERY`, one at least for each order; how many deaths that
/// were. With `FARLINK_CRASH_DEATH`, as a failed run says it, that one alone.
///
/// # Panics
/// If others do not find what they must: it says after how many requests the victim died, and how. And if it never died.
pub fn enumerate<S: Scene + Debug>(options: MemOptions, scene: &S) -> u64 {
    enumerate_one_in(1, options, scene)
}

/// [`enumerate`] for one in so many of those requests: of a scene with many that are alike. For each of them all the same, where all deaths
/// are played.
///
/// # Panics
/// As [`enumerate`].
pub fn enumerate_one_in<S: Scene + Debug>(share: u64, options: MemOptions, scene: &S) -> u64 {
    let every = every();
    enumerate_every(if every == 1 { 1 } else { share * every }, options, scene)
}

/// [`enumerate`] for one in so many, whatever `FARLINK_CRASH_EVERY` says: of a scene with few.
///
/// # Panics
/// As [`enumerate`].
pub fn enumerate_every<S: Scene + Debug>(every: u64, options: MemOptions, scene: &S) -> u64 {
    enumerate_from(settings::seed(&format!("{scene:?}")), every, options, scene)
}

/// [`enumerate_every`], where deaths are drawn from a seed that has been said already.
///
/// # Panics
/// As [`enumerate`].
pub fn enumerate_from<S: Scene + Debug>(seed: u64, every: u64, options: MemOptions, scene: &S) -> u64 {
    let mut chance = Chance(StdRng::seed_from_u64(seed));
    if plays_again(options, scene) {
        return 1;
    }
    let requests = played(options, scene, IN_FULL, chance.way()).victim.requests;
    assert!(requests > 0, "{scene:?}: the victim did nothing");
    let mut deaths = 0;
    for (order, _) in ORDERS {
        for after in chance.one_in(every, requests) {
            let tears = chance.tears();
            let mut death = Death { order, tears, after, sweeper_after: None };
            loop {
                let Lived { requests, has_died } = played(options, scene, death, chance.way()).victim;
                if has_died || requests == 0 {
                    deaths += u64::from(has_died);
                    break;
                }
                // It made fewer than before: threads serve beside it, or it waited for others less long.
                death.after = chance.0.random_range(0..requests);
            }
        }
    }
    println!("{scene:?}: {requests} requests, {deaths} deaths");
    assert!(deaths > 0, "{scene:?}: nobody has died");
    deaths
}

/// Plays the scene for some deaths of the victim, `victims` of them, and for the first 100 requests of who sweeps then, one in four
/// times `FARLINK_CRASH_EVERY`: that one dies, too, and others finish what both have left. Of the thousands of requests behind
/// those, which look at all pages of the cluster, for a few.
///
/// # Panics
/// As [`enumerate`].
pub fn enumerate_sweepers<S: Scene + Debug>(options: MemOptions, scene: &S, victims: u64) {
    let mut chance = Chance::new(scene);
    if plays_again(options, scene) {
        return;
    }
    let requests = played(options, scene, IN_FULL, chance.way()).victim.requests;
    let every = 4 * every();
    let mut deaths = 0;
    for after in chance.one_in(requests.div_ceil(victims).max(1), requests) {
        let of_victim = Death { after, sweeper_after: Some(NEVER), ..IN_FULL };
        let sweeper = played(options, scene, of_victim, chance.way()).sweeper;
        let requests = sweeper.map_or(0, |sweeper| sweeper.requests);
        assert!(requests > 0, "{scene:?}, {of_victim}: there was nothing to be swept");
        for is_torn in [false, true] {
            let finishing = chance.one_in(every, requests.min(FINISHING));
            let looking = (finishing.clone().count() / 4).max(1);
            let looking: Vec<u64> = (0..looking).map(|_| chance.0.random_range(0..requests)).collect();
            for after in finishing.chain(looking) {
                let tears = is_torn.then(|| chance.0.random());
                let death = Death { tears, sweeper_after: Some(after), ..of_victim };
                let played = played(options, scene, death, chance.way());
                let is_both = played.victim.has_died && played.sweeper.is_some_and(|sweeper| sweeper.has_died);
                deaths += u64::from(is_both);
            }
        }
    }
    println!("{scene:?}: {requests} requests, {deaths} deaths of who sweeps");
    assert!(deaths > 0, "{scene:?}: nobody who sweeps has died");
}

/// Nobody dies before the end.
const IN_FULL: Death = Death { order: Order::Posted, tears: None, after: NEVER, sweeper_after: None };

fn played<S: Scene + Debug>(options: MemOptions, scene: &S, death: Death, is_other: bool) -> Played {
    let _watch = Watchdog::start(format!("{scene:?}, FARLINK_CRASH_DEATH={death}"), LIMIT);
    scene.take_way(is_other);
    let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| play(options, scene, death)));
    match played {
        Ok(Ok(played)) => played,
        Ok(Err(error)) => panic!("{scene:?}, FARLINK_CRASH_DEATH={death}: {error}"),
        Err(panic) => {
            println!("{scene:?}, FARLINK_CRASH_DEATH={death}");
            std::panic::resume_unwind(panic);
        }
    }
}
