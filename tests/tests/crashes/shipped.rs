//! An owner dies while a memory server carries out what it has shipped, and others take over: at any time they are alone with its pages.
//!
//! The memory server is turned by hand, and stops after some of its requests. Who takes over changes the page and writes it back; in between
//! the memory server goes on by some requests, and in the end with all.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_offload::{
    Admission, CacheOptions, Cached, ComputeCache, Engine, EngineOptions, Policies,
    policy::Always,
    ship::{ManualShipServer, ShipOptions},
};
use farlink_runtime::{
    clock::Clock,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{
        Error as FabricError, Fabric,
        listener::ListenOptions,
        mem::MemOptions,
        mortal::{MortalFabric, Order},
    },
    fencing::{Sender, UnderWay},
    lock::OwnerId,
    messaging::Error as MessagingError,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server::LocalMemory,
    worker::Worker,
};
use farlink_structures::{
    btree::Tree,
    map::{KeyRange, Map},
};
use farlink_tests::{
    backend::{fleet, here},
    cluster::{self, FAST},
    crash::Member,
    deadlines::PATIENCE,
};

const NAME: &str = "map";
const KEYS: u64 = 400;
/// That of the dead one's operation, and one in the same page.
const KEY: u64 = 100;
const BESIDE: u64 = 101;
const DEADS: u64 = 1_000_000;
const HEIRS: u64 = 2_000_000;
/// Requests that are more than an operation makes.
const ALL: u64 = u64::MAX - 1;
/// Turns after which somebody who waits has done all that he can.
const TURNS: usize = 200;

fn cache() -> Result<ComputeCache<Tree>, Error> {
    let mut options = CacheOptions::new(256 << 10);
    (options.page_bytes, options.admission, options.excludes_subtrees) = (256, Admission::Always, true);
    ComputeCache::new(options)
}

async fn own(worker: &Worker) -> Result<Cached<Tree>, Error> {
    let map: Map<Tree, OneSided<Tree>> = Map::open(worker, NAME, Proof::Checksum).await?;
    cache()?.own(worker, map.structure().clone(), KeyRange::ALL).await
}

fn server() -> ServerId {
    ServerId::new(0).expect("0 is a server id")
}

/// Somebody's future, and what came of it.
struct Task<'f, T> {
    future: Pin<Box<dyn Future<Output = T> + 'f>>,
    outcome: Option<T>,
}

impl<'f, T> Task<'f, T> {
    fn new(worker: &'f Worker, future: impl Future<Output = T> + 'f) -> Self {
        Self { future: Box::pin(worker.drive(future)), outcome: None }
    }

    /// Whether it is over.
    fn turn(&mut self) -> bool {
        if self.outcome.is_none()
            && let Poll::Ready(outcome) = self.future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            self.outcome = Some(outcome);
        }
        self.outcome.is_some()
    }
}

/// How the memory server goes on.
#[derive(Debug, Clone, Copy)]
struct Schedule {
    /// Requests of it before it stops and the owner dies; none: it has not yet seen what the owner has sent.
    before: Option<u64>,
    /// Those that it makes when others have changed the page, and have not written it back.
    between: u64,
}

/// A cluster with an owner that ships, and a memory server that is turned by hand.
struct Cluster {
    here: Arc<dyn here::Here>,
    fabric: Arc<dyn Fabric>,
    serving: ManualShipServer,
    member: Arc<ComputeServer>,
    servers_fabric: MortalFabric,
    victims_fabric: MortalFabric,
    // Before the worker that it belongs to.
    map: Map<Tree, Engine<Tree>>,
    victim: Member,
}

/// A cluster in which an owner has shipped an update, and was stopped and taken for dead.
struct Scene {
    fabric: Arc<dyn Fabric>,
    serving: ManualShipServer,
    servers_fabric: MortalFabric,
    // Before the worker that it belongs to.
    map: Map<Tree, Engine<Tree>>,
    victim: Member,
    /// Before that it was told that its operation is done: then nothing was under way.
    was_told: bool,
}

impl Cluster {
    /// The victim waits so long for the memory server.
    fn new(answer_wait: Duration) -> Result<Self, Error> {
        let options = MemOptions { atomic_against_cpu: false, ..FAST };
        let here = here::start(1, 2 << 20, options)?;
        let fabric = here.fabric();
        cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
        cluster::load::<Tree>(&fabric, NAME, (0..KEYS).map(|key| (key, key)), 0.7)?;

        let servers_fabric = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let as_fabric: Arc<dyn Fabric> = Arc::new(servers_fabric.clone());
        let member = Arc::new(cluster::join_manual(&as_fabric, 9)?);
        let (server, clock) = (server(), Clock::monotonic());
        let listener = here.listen(server, &ListenOptions { endpoints: 1, ..ListenOptions::default() })?;
        let (memory, registry) = (here.memory(server)?, fleet::registry());
        let mut serving =
            ManualShipServer::new(listener, memory, registry, &ShipOptions::default(), Arc::clone(&member), &clock)?;

        let victims_fabric = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let as_fabric: Arc<dyn Fabric> = Arc::new(victims_fabric.clone());
        let options = ComputeOptions { answer_wait, maintenance: Maintenance::Manual, ..cluster::patient(1) };
        let victim = Member::of(ComputeServer::join(as_fabric, options)?)?;
        let engine = async |worker: &Worker| {
            let policies = Policies::new(Always);
            Ok::<_, Error>(Map::over(Engine::new(own(worker).await?, policies, EngineOptions { level_max: None })?))
        };
        let map = victim.worker().block_on(engine(victim.worker()))?;
        // From now on the memory server knows the structure, and the victim has the pages above.
        let mut first = Task::new(victim.worker(), map.update(KEYS - 1, 1));
        while !first.turn() {
            serving.turn();
        }
        first.outcome.take().expect("it is over")?;
        assert_eq!(serving.counts().done, 1, "the first one was not shipped");
        drop(first);
        Ok(Self { here, fabric, serving, member, servers_fabric, victims_fabric, map, victim })
    }
}

impl Scene {
    /// The memory server stops after so many requests; `None`: it has not yet seen what the owner has sent.
    fn new(before: Option<u64>) -> Result<Self, Error> {
        let Cluster { fabric, mut serving, servers_fabric, victims_fabric, map, victim, .. } = Cluster::new(PATIENCE)?;
        servers_fabric.stops_after(before.unwrap_or(0));
        let mut last = Task::new(victim.worker(), map.update(KEY, DEADS));
        match before {
            None => drop((0..TURNS).find(|_| last.turn())),
            Some(_) => {
                while !last.turn() && !servers_fabric.has_stopped() {
                    serving.turn();
                }
            }
        }
        let was_told = last.outcome.is_some();
        // What it has begun is not dropped with its worker.
        victims_fabric.stops_after(0);
        victims_fabric.is_taken_for_dead();
        drop(last);
        Ok(Self { fabric, serving, servers_fabric, map, victim, was_told })
    }
}

/// Whether the owner was told that its operation is done.
fn play(Schedule { before, between }: Schedule) -> Result<bool, Error> {
    let Scene { fabric, mut serving, servers_fabric, map: dead, victim, was_told } = Scene::new(before)?;
    let heir = Member::join(&fabric, 2)?;
    let mut taking_over = Task::new(heir.worker(), async {
        let map = Map::over(own(heir.worker()).await?);
        map.update(KEY, HEIRS).await?;
        map.update(BESIDE, HEIRS).await?;
        Ok::<_, Error>(map)
    });
    let _ = (0..TURNS).find(|_| taking_over.turn());
    servers_fabric.stops_after(between);
    let was_early = taking_over.outcome.is_some();
    for _ in 0..TURNS {
        serving.turn();
        taking_over.turn();
    }
    // As far as it comes while the memory server does nothing.
    if let Some(Ok(map)) = &taking_over.outcome {
        let mut writing_back = Task::new(heir.worker(), map.access().flush());
        let _ = (0..TURNS).find(|_| writing_back.turn());
    }
    servers_fabric.stops_after(ALL);
    while !taking_over.turn() {
        serving.turn();
    }
    let _ = (0..TURNS).map(|_| serving.turn()).count();
    let map = taking_over.outcome.take().expect("it is over")?;
    drop((taking_over, dead, victim));
    heir.worker().block_on(async {
        map.access().flush().await?;
        let found: Map<Tree, OneSided<Tree>> = Map::open(heir.worker(), NAME, Proof::Checksum).await?;
        let found = found.beside_owners();
        let report = found.check().await?;
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(
            [found.get(KEY).await?, found.get(BESIDE).await?],
            [Some(HEIRS); 2],
            "what was written later is lost"
        );
        map.access().close().await
    })?;
    assert!(was_told || before.is_none() || !was_early, "taken over while the dead one's operation was under way");
    if before.is_none() {
        assert_eq!(serving.counts().declined, 1, "what the dead one had sent was carried out");
    }
    Ok(was_told)
}

#[test]
fn an_operation_of_the_dead_is_over_before_others_take_over() -> Result<(), Error> {
    let mut requests = 0;
    for before in 0.. {
        let mut was_told = false;
        for between in [0, 1, 2, 3, ALL] {
            let schedule = Schedule { before: Some(before), between };
            was_told = play(schedule).inspect_err(|_| println!("{schedule:?}"))?;
        }
        if was_told {
            break;
        }
        requests = before + 1;
    }
    assert!(requests > 2, "a shipped update makes {requests} requests");
    Ok(())
}

#[test]
fn an_operation_of_the_dead_does_not_begin_later() -> Result<(), Error> {
    for between in [0, ALL] {
        play(Schedule { before: None, between })?;
    }
    Ok(())
}

/// Who takes over is told where the dead one's operation is under way, and comes again.
#[test]
fn a_memory_server_that_stands_still_is_named() -> Result<(), Error> {
    let mut scene = Scene::new(Some(1))?;
    assert!(!scene.was_told);
    let lock_wait = Some(Duration::from_millis(20));
    let options = ComputeOptions { seed: 2, maintenance: Maintenance::Manual, lock_wait, ..ComputeOptions::default() };
    let heir = ComputeServer::join(Arc::clone(&scene.fabric), options)?;
    let worker = heir.worker()?;
    match worker.block_on(own(&worker)) {
        Err(Error::ServerStalled { server, owner, .. })
            if server.number() == 0 && owner == scene.victim.worker().owner() => {}
        other => panic!("{other:?}"),
    }
    scene.servers_fabric.stops_after(ALL);
    let _ = (0..TURNS).map(|_| scene.serving.turn()).count();
    let owned = worker.block_on(own(&worker))?;
    worker.block_on(owned.close())
}

/// Whether nothing of this owner begins at the memory server any more.
fn is_fenced(memory: &LocalMemory, member: OwnerId, sender: Sender) -> bool {
    UnderWay::begin(memory, member, sender).map(UnderWay::end).is_none()
}

/// The owner has closed: others find what it wrote last.
fn is_left_right(fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
    let heir = Member::join(fabric, 2)?;
    heir.worker().block_on(async {
        let found: Map<Tree, OneSided<Tree>> = Map::open(heir.worker(), NAME, Proof::Checksum).await?;
        assert_eq!([found.get(KEY).await?, found.get(BESIDE).await?], [Some(9), Some(8)]);
        assert!(found.check().await?.is_clean());
        Ok(())
    })
}

/// An owner lives, and is not told what became of a change that it has shipped: while that may be under way at the memory server the page
/// is not cached, and from then on nothing of the kind begins there.
#[test]
fn the_living_wait_for_what_they_have_shipped() -> Result<(), Error> {
    let Cluster { here, fabric, serving, member, map, victim, .. } = Cluster::new(PATIENCE)?;
    let (worker, memory) = (victim.worker(), here.memory(server())?);
    let sender = Sender::of(worker);
    // Another thread of the memory server carries something out.
    let under_way = UnderWay::begin(&memory, member.owner(), sender).expect("nobody is fenced off");
    let mut changing = Task::new(worker, map.update(KEY, 7));
    let _ = (0..TURNS).find(|_| changing.turn());
    drop(serving);
    let mut beside = Task::new(worker, map.update(BESIDE, 8));
    let is_fenced = || is_fenced(&memory, member.owner(), sender);
    while !is_fenced() {
        changing.turn();
        assert!(!beside.turn(), "the page was cached while an operation on it may be under way");
    }
    for _ in 0..TURNS {
        assert!(!changing.turn() & !beside.turn(), "nobody waited for what is under way");
    }
    under_way.end();
    while !(changing.turn() & beside.turn()) {}
    let (changed, put_beside) = (changing.outcome.take(), beside.outcome.take());
    drop((changing, beside));
    assert!(matches!(changed, Some(Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })))), "{changed:?}");
    assert_eq!(put_beside.expect("it is over")?, Some(BESIDE));
    worker.block_on(async {
        assert_eq!(map.update(KEY, 9).await?, Some(KEY), "it did not arrive");
        map.access().cached().close().await
    })?;
    drop((map, victim));
    is_left_right(&fabric)
}

/// As above, and the memory server was stopped while it carried the change out: what of that goes on ends with its membership.
#[test]
fn what_was_cut_off_counts_until_the_memory_server_has_left() -> Result<(), Error> {
    let Cluster { here, fabric, mut serving, member, servers_fabric, map, victim, .. } = Cluster::new(PATIENCE)?;
    let (worker, memory) = (victim.worker(), here.memory(server())?);
    servers_fabric.stops_after(1);
    let mut changing = Task::new(worker, map.update(KEY, 7));
    while !servers_fabric.has_stopped() {
        changing.turn();
        serving.turn();
    }
    servers_fabric.stops_after(ALL);
    drop(serving);
    let mut beside = Task::new(worker, map.update(BESIDE, 8));
    let is_fenced = || is_fenced(&memory, member.owner(), Sender::of(worker));
    while !is_fenced() {
        changing.turn();
        assert!(!beside.turn(), "the page was cached while what was cut off may go on");
    }
    for _ in 0..TURNS {
        assert!(!changing.turn() & !beside.turn(), "the page was cached while what was cut off may go on");
    }
    drop(member);
    while !(changing.turn() & beside.turn()) {}
    let put_beside = beside.outcome.take();
    drop((changing, beside));
    assert_eq!(put_beside.expect("it is over")?, Some(BESIDE));
    worker.block_on(async {
        map.update(KEY, 9).await?;
        map.access().cached().close().await
    })?;
    drop((map, victim));
    is_left_right(&fabric)
}

/// An owner lives, and the memory server stands still in the middle of what it has shipped: it is told so, and owns nothing any more. Who takes
/// over waits for the memory server, and what that had not begun it does not begin.
#[test]
fn the_living_give_up_what_a_memory_server_does_not_end() -> Result<(), Error> {
    let Cluster { here, fabric, mut serving, member, victims_fabric, map, victim, .. } =
        Cluster::new(Duration::from_secs(1))?;
    let (worker, memory) = (victim.worker(), here.memory(server())?);
    let under_way = UnderWay::begin(&memory, member.owner(), Sender::of(worker)).expect("nobody is fenced off");
    let mut changing = Task::new(worker, map.update(KEY, 7));
    let _ = (0..TURNS).find(|_| changing.turn());
    let mut beside = Task::new(worker, map.update(BESIDE, 8));
    while !(changing.turn() & beside.turn()) {}
    let (changed, put_beside) = (changing.outcome.take(), beside.outcome.take());
    drop((changing, beside));
    assert!(matches!(changed, Some(Err(Error::Messaging(MessagingError::NoAnswer { .. })))), "{changed:?}");
    let is_over = |put: &Option<Result<_, Error>>| matches!(put, Some(Err(Error::Fabric(FabricError::TakenForDead { owner }))) if *owner == worker.owner());
    assert!(is_over(&put_beside), "{put_beside:?}");
    assert!(is_over(&Some(worker.block_on(map.update(BESIDE, 9)))), "it still owns the map");
    drop((map, victim));
    victims_fabric.is_taken_for_dead();
    let lock_wait = Some(Duration::from_millis(20));
    let options = ComputeOptions { seed: 2, maintenance: Maintenance::Manual, lock_wait, ..ComputeOptions::default() };
    let heir = ComputeServer::join(Arc::clone(&fabric), options)?;
    let heirs = heir.worker()?;
    let refused = heirs.block_on(own(&heirs)).map(drop);
    assert!(matches!(refused, Err(Error::ServerStalled { .. })), "{refused:?}");
    under_way.end();
    let owned = heirs.block_on(own(&heirs))?;
    let _ = (0..TURNS).map(|_| serving.turn()).count();
    assert_eq!(serving.counts().done, 1, "what was given up was carried out");
    let found = Map::over(owned);
    heirs.block_on(async {
        assert_eq!([found.get(KEY).await?, found.get(BESIDE).await?], [Some(KEY), Some(BESIDE)]);
        found.access().close().await
    })
}
