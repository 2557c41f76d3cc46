//! A change that was sent to a memory server from the root is over before anybody owns the structure, whatever becomes of its sender.
//!
//! The memory server is turned by hand, and stops in the middle of the change, or has not yet seen it.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_offload::{
    Admission, CacheOptions, Cached, ComputeCache, Remote,
    ship::{ManualShipServer, Registry, ShipOptions},
};
use farlink_runtime::{
    access::{
        Access, Interrupt, Operation, Operations, PageRef, Pages, PagesMut, Plugin, Slot, Start, Structure, Words,
    },
    catalog::{self, CreateOptions},
    clock::Clock,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{
        Fabric,
        listener::ListenOptions,
        mem::MemOptions,
        mortal::{MortalFabric, Order},
    },
    messaging::Error as MessagingError,
    one_sided::{OneSided, Proof},
    operation::Run,
    page::{HEADER_WORDS, SizeClass},
    ptr::ServerId,
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    wire::wire,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{
    backend::{
        fleet,
        here::{self, Here},
    },
    cluster::{self, FAST},
};

use crate::scene::{CACHE_BYTES_MIN, Map, TREE, cache};

const KEYS: u64 = 400;
/// What is sent: the update of a key. The owner changes one in the same page.
const KEY: u64 = 100;
const BESIDE: u64 = 101;
const SENT: u64 = 1_000_000;
/// Requests that are more than an operation makes.
const ALL: u64 = u64::MAX - 1;
/// Turns after which somebody who waits has done all that he can.
const TURNS: usize = 200;

/// Somebody's future, and what came of it.
struct Task<'f, T> {
    future: Option<Pin<Box<dyn Future<Output = T> + 'f>>>,
    outcome: Option<T>,
}

impl<'f, T> Task<'f, T> {
    fn new(worker: &'f Worker, future: impl Future<Output = T> + 'f) -> Self {
        Self { future: Some(Box::pin(worker.drive(future))), outcome: None }
    }

    /// Whether it is over.
    fn turn(&mut self) -> bool {
        if let Some(future) = &mut self.future
            && let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            (self.outcome, self.future) = (Some(outcome), None);
        }
        self.outcome.is_some()
    }
}

/// What the memory server has done of the change when its sender goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Begun {
    /// It has not yet seen it.
    Not,
    /// So many requests.
    Requests(u64),
}

struct Scene {
    fabric: Arc<dyn Fabric>,
    serving: ManualShipServer,
    /// The memory server's.
    member: Arc<ComputeServer>,
    servers_fabric: MortalFabric,
    senders_fabric: MortalFabric,
    // Before the worker that it belongs to.
    map: BTree<Remote<Tree>>,
    worker: Worker,
    compute: ComputeServer,
}

fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<ComputeServer, Error> {
    let lock_wait = Some(Duration::from_millis(20));
    let options = ComputeOptions { seed, maintenance: Maintenance::Manual, lock_wait, ..ComputeOptions::default() };
    ComputeServer::join(Arc::clone(fabric), options)
}

/// The only memory server, as a member of the cluster.
fn serve(
    here: &Arc<dyn Here>,
    registry: Registry,
) -> Result<(ManualShipServer, Arc<ComputeServer>, MortalFabric), Error> {
    let fabric = MortalFabric::new(here.fabric(), Order::Posted, false);
    let member = Arc::new(cluster::join_manual(&(Arc::new(fabric.clone()) as Arc<dyn Fabric>), 9)?);
    let server = ServerId::new(0).expect("0 is a server id");
    let listener = here.listen(server, &ListenOptions { endpoints: 1, ..ListenOptions::default() })?;
    let (memory, clock, options) = (here.memory(server)?, Clock::monotonic(), ShipOptions::default());
    let serving = ManualShipServer::new(listener, memory, registry, &options, Arc::clone(&member), &clock)?;
    Ok((serving, member, fabric))
}

impl Scene {
    fn new() -> Result<Self, Error> {
        let here = here::start(1, 2 << 20, MemOptions { atomic_against_cpu: false, ..FAST })?;
        let fabric = here.fabric();
        cluster::create::<Tree>(&fabric, TREE, 256, Proof::Checksum)?;
        cluster::load::<Tree>(&fabric, TREE, (0..KEYS).map(|key| (key, key)), 0.7)?;
        let (mut serving, member, servers_fabric) = serve(&here, fleet::registry())?;
        let senders_fabric = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let compute = join(&(Arc::new(senders_fabric.clone()) as Arc<dyn Fabric>), 1)?;
        let worker = compute.worker()?;
        let found: Ordered<Tree, OneSided<Tree>> = worker.block_on(Ordered::open(&worker, TREE, Proof::Checksum))?;
        let map = BTree::over(Remote::new(&worker, found.structure().clone()));
        // From now on the memory server knows the structure, and the sender is entered as a user.
        let mut first = Task::new(&worker, map.update(KEYS - 1, 1));
        while !first.turn() {
            serving.turn();
        }
        first.outcome.take().expect("it is over")?;
        drop(first);
        Ok(Self { fabric, serving, member, servers_fabric, senders_fabric, map, worker, compute })
    }

    /// Sends the change, and has the memory server begin it. Whether the sender was told that it is done; then it made no more requests.
    fn send(&mut self, begun: Begun) -> bool {
        let mut sending = Task::new(&self.worker, self.map.update(KEY, SENT));
        match begun {
            Begun::Not => assert!(!(0..TURNS).any(|_| sending.turn()), "nobody has answered"),
            Begun::Requests(requests) => {
                self.servers_fabric.stops_after(requests);
                while !sending.turn() && !self.servers_fabric.has_stopped() {
                    self.serving.turn();
                }
            }
        }
        sending.outcome.is_some()
    }
}

async fn own(worker: &Worker) -> Result<Cached<Tree>, Error> {
    let found: Ordered<Tree, OneSided<Tree>> = Ordered::open(worker, TREE, Proof::Checksum).await?;
    cache(CACHE_BYTES_MIN, Admission::Always).own(worker, found.structure().clone(), KeyRange::ALL).await
}

/// Claims while the memory server does nothing, and again once it goes on, and changes what is owned. False if it was owned at once.
fn claim(worker: &Worker, serving: &mut ManualShipServer, servers_fabric: &MortalFabric) -> Result<bool, Error> {
    let mut owning = Task::new(worker, own(worker));
    let _ = (0..TURNS).find(|_| owning.turn());
    let has_waited = !matches!(owning.outcome, Some(Ok(_)));
    let early = match &owning.outcome {
        // What it has cached is as it was before.
        Some(Ok(owned)) => Some(worker.block_on(BTree::over(owned.clone()).get(KEY))?),
        _ => None,
    };
    servers_fabric.stops_after(ALL);
    let owned = loop {
        serving.turn();
        match owning.turn().then(|| owning.outcome.take()).flatten() {
            Some(Ok(owned)) => break owned,
            Some(Err(Error::HasUser { .. } | Error::ServerStalled { .. })) => owning = Task::new(worker, own(worker)),
            Some(Err(error)) => return Err(error),
            None => {}
        }
    };
    drop(owning);
    let _ = (0..TURNS).map(|_| serving.turn()).count();
    let tree = BTree::over(owned);
    worker.block_on(async {
        println!("KEY is {:?}, and was {early:?}", tree.get(KEY).await?);
        tree.update(BESIDE, 9).await?;
        for key in KEYS..2 * KEYS {
            tree.insert(key, key).await?;
        }
        tree.access().close().await
    })?;
    Ok(has_waited)
}

/// The tree is sound, and the change that was sent has happened or has not, as it must have.
fn is_left_right(fabric: &Arc<dyn Fabric>, has_happened: Option<bool>) -> Result<(), Error> {
    let report = cluster::check_tree(fabric, TREE)?;
    assert!(report.is_clean(), "{report:?}");
    let found: Map = cluster::entries(fabric, TREE)?.into_iter().collect();
    let mut model: Map = (0..2 * KEYS).map(|key| (key, key)).collect();
    model.extend([(KEYS - 1, 1), (BESIDE, 9)]);
    assert!([KEY, SENT].contains(&found[&KEY]), "{}", found[&KEY]);
    if let Some(has_happened) = has_happened {
        assert_eq!(found[&KEY] == SENT, has_happened, "what was sent");
    }
    model.insert(KEY, found[&KEY]);
    assert!(found == model, "{found:?}");
    Ok(())
}

/// Plays a scene for each number of requests of the memory server, until they are all that the change makes.
fn at_each_request(play: impl Fn(Begun) -> Result<bool, Error>) -> Result<(), Error> {
    play(Begun::Not)?;
    let requests = (0..).find(|&requests| play(Begun::Requests(requests)).unwrap()).expect("it ends");
    assert!(requests > 2, "a change that is sent makes {requests} requests");
    Ok(())
}

/// Its future is dropped, and the same compute server becomes the owner.
#[test]
fn a_change_that_nobody_waits_for_is_over_before_its_sender_owns() -> Result<(), Error> {
    at_each_request(|begun| {
        let mut scene = Scene::new()?;
        let was_told = scene.send(begun);
        let Scene { fabric, mut serving, servers_fabric, map, worker, compute, .. } = scene;
        let has_waited = claim(&worker, &mut serving, &servers_fabric)?;
        drop((map, worker, compute));
        is_left_right(&fabric, Some(true))?;
        assert!(was_told || has_waited, "{begun:?}: owned while a memory server changes the structure");
        Ok(was_told)
    })
}

/// Its handle is dropped with it, and another compute server becomes the owner.
#[test]
fn a_change_whose_handle_is_gone_is_over_before_others_own() -> Result<(), Error> {
    at_each_request(|begun| {
        let mut scene = Scene::new()?;
        let was_told = scene.send(begun);
        let Scene { fabric, mut serving, servers_fabric, map, worker, compute, .. } = scene;
        drop(map);
        let other = join(&fabric, 2)?;
        let others = other.worker()?;
        // The sender's entry goes if nothing is under way. By turns: who blocks waits for what is sent.
        let mut resting = Task::new(&worker, compute.maintain(&worker));
        let _ = (0..TURNS).find(|_| resting.turn());
        drop(resting);
        let mut owning = Task::new(&others, own(&others));
        let _ = (0..TURNS).find(|_| owning.turn());
        let has_waited = !matches!(owning.outcome, Some(Ok(_)));
        drop(owning);
        assert!(was_told || has_waited, "{begun:?}: owned while a memory server changes the structure");
        servers_fabric.stops_after(ALL);
        let mut resting = Task::new(&worker, async {
            loop {
                compute.maintain(&worker).await?;
                worker.yield_now().await;
            }
            #[expect(unreachable_code, reason = "the type of what is never returned")]
            Ok::<(), Error>(())
        });
        let mut owning = Task::new(&others, own(&others));
        loop {
            serving.turn();
            assert!(!resting.turn(), "{:?}", resting.outcome);
            match owning.turn().then(|| owning.outcome.take()).flatten() {
                Some(Ok(owned)) => {
                    drop(resting);
                    drop(owning);
                    let tree = BTree::over(owned);
                    others.block_on(async {
                        tree.update(BESIDE, 9).await?;
                        for key in KEYS..2 * KEYS {
                            tree.insert(key, key).await?;
                        }
                        tree.access().close().await
                    })?;
                    break;
                }
                Some(Err(Error::HasUser { .. })) => owning = Task::new(&others, own(&others)),
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        drop((others, other, worker, compute));
        is_left_right(&fabric, Some(true))?;
        Ok(was_told)
    })
}

/// Its sender is dead, and another compute server becomes the owner: what has begun ends before, and nothing begins later.
#[test]
fn a_change_of_the_dead_is_over_before_others_own() -> Result<(), Error> {
    at_each_request(|begun| {
        let mut scene = Scene::new()?;
        let was_told = scene.send(begun);
        let Scene { fabric, mut serving, servers_fabric, senders_fabric, map, worker, compute, .. } = scene;
        senders_fabric.stops_after(0);
        senders_fabric.is_taken_for_dead();
        let other = join(&fabric, 2)?;
        let others = other.worker()?;
        let has_waited = claim(&others, &mut serving, &servers_fabric)?;
        // Of what it has not seen by now, it sees that the sender is fenced off.
        let has_happened = begun != Begun::Not;
        assert_eq!(serving.counts().declined, u64::from(!has_happened), "{begun:?}");
        drop((map, worker, compute, others, other));
        is_left_right(&fabric, Some(has_happened))?;
        assert!(
            was_told || !has_happened || has_waited,
            "{begun:?}: owned while a memory server changes the structure"
        );
        Ok(was_told)
    })
}

/// The connection is lost in the middle of it: its sender is told that nobody knows, and the memory server may go on with it. Nobody owns the structure
/// until that is over; the sender goes on to send.
#[test]
fn a_change_that_may_go_on_is_over_before_anybody_owns() -> Result<(), Error> {
    let Scene { fabric, mut serving, member, servers_fabric, map, worker, compute, .. } = Scene::new()?;
    servers_fabric.stops_after(1);
    let mut sending = Task::new(&worker, map.update(KEY, SENT));
    while !servers_fabric.has_stopped() {
        assert!(!sending.turn());
        serving.turn();
    }
    servers_fabric.stops_after(ALL);
    drop(serving);
    while !sending.turn() {}
    let unknown = sending.outcome.take();
    drop(sending);
    assert!(matches!(unknown, Some(Err(Error::Messaging(MessagingError::OutcomeUnknown { .. })))), "{unknown:?}");
    drop(map);
    worker.block_on(compute.maintain(&worker))?;
    let other = join(&fabric, 2)?;
    let others = other.worker()?;
    let refused = others.block_on(own(&others)).map(drop);
    assert!(matches!(refused, Err(Error::HasUser { .. })), "{refused:?}");
    // Nothing is ended for the sake of a claim that others do not admit.
    let reader: Ordered<Tree, OneSided<Tree>> = others.block_on(Ordered::open(&others, TREE, Proof::Checksum))?;
    others.block_on(reader.get(BESIDE))?;
    let refused = worker.block_on(own(&worker)).map(drop);
    let named = |error: &Error| matches!(error, Error::HasUser { user, .. } if *user == other.owner());
    assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    drop(reader);
    others.block_on(other.maintain(&others))?;
    let refused = worker.block_on(own(&worker)).map(drop);
    assert!(matches!(refused, Err(Error::ServerStalled { .. })), "{refused:?}");
    // What was cut off is over with the memory server's membership.
    drop(member);
    let owned = BTree::over(worker.block_on(own(&worker))?);
    worker.block_on(async {
        owned.update(BESIDE, 9).await?;
        for key in KEYS..2 * KEYS {
            owned.insert(key, key).await?;
        }
        owned.access().close().await
    })?;
    drop((owned, worker, compute, others, other));
    is_left_right(&fabric, None)
}

/// A page with two words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Hasty;

/// Begins a change, and does not wait for it.
#[derive(Debug, Clone)]
struct Abandon {}

wire! {
    struct Abandon {}
}

const WORDS: usize = HEADER_WORDS;

impl Operation for Abandon {
    type Output = ();
    type Plugin = Hasty;
    const NAME: &'static str = "abandon";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Hasty>>(&self, access: &A, from: Start) -> Result<(), Interrupt> {
        let page = access.open(from).await?;
        let next = page.read(|words| words.word(WORDS))? + 1;
        let mut pages = Pages::new();
        let slot = pages.add(page);
        // Of two words: such a change has a record.
        let mut change = pin!(access.change(pages, |pages| pages.fill(slot, WORDS, &[next; 2])));
        poll_fn(|cx| Poll::Ready(change.as_mut().poll(cx).is_ready())).await;
        Ok(())
    }
}

impl Plugin for Hasty {
    const NAME: &'static str = "hasty";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 64..=64;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 1);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Abandon>();
    }

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

/// A change goes on that its operation has dropped: it is over before the sender is answered, and before anybody owns the structure.
#[test]
fn a_change_that_its_operation_has_dropped_is_over_before_others_own() -> Result<(), Error> {
    let requests = (0..).find(|&requests| a_dropped_change_stops_after(requests).unwrap()).expect("it ends");
    assert!(requests > 2, "the change makes {requests} requests");
    Ok(())
}

/// Whether it was over by then.
fn a_dropped_change_stops_after(requests: u64) -> Result<bool, Error> {
    let here = here::start(1, 2 << 20, MemOptions { atomic_against_cpu: false, ..FAST })?;
    let fabric = here.fabric();
    let (mut serving, _member, servers_fabric) = serve(&here, Registry::new().with::<Hasty>())?;
    let senders_fabric = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let compute = join(&(Arc::new(senders_fabric.clone()) as Arc<dyn Fabric>), 1)?;
    let worker = compute.worker()?;
    let options =
        CreateOptions { class: SizeClass::SMALLEST, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let made: OneSided<Hasty> = worker.block_on(catalog::create(&worker, "hasty", &options, Proof::Checksum))?;
    let structure = made.context().structure.clone();
    drop(made);
    let remote = Remote::<Hasty>::new(&worker, structure.clone());
    // From now on the memory server knows the structure, and has room for records.
    let mut first = Task::new(&worker, remote.execute(&Abandon {}));
    while !first.turn() {
        serving.turn();
    }
    first.outcome.take().expect("it is over")?;
    drop(first);
    let _ = (0..TURNS).map(|_| serving.turn()).count();

    servers_fabric.stops_after(requests);
    let mut sending = Task::new(&worker, remote.execute(&Abandon {}));
    while !sending.turn() && !servers_fabric.has_stopped() {
        serving.turn();
    }
    let _ = (0..TURNS).map(|_| (serving.turn(), sending.turn())).count();
    let (has_stopped, is_answered) = (servers_fabric.has_stopped(), sending.outcome.is_some());
    drop(sending);
    if !has_stopped || is_answered {
        // The memory server leaves its cluster.
        servers_fabric.stops_after(ALL);
        assert!(!has_stopped, "after {requests} requests: answered while its change is under way");
        return Ok(true);
    }
    senders_fabric.stops_after(0);
    senders_fabric.is_taken_for_dead();
    let other = join(&fabric, 2)?;
    let others = other.worker()?;
    let own = async || {
        let cache = ComputeCache::<Hasty>::new(CacheOptions::new(CACHE_BYTES_MIN))?;
        cache.own(&others, structure.clone(), ()).await
    };
    let mut owning = Task::new(&others, own());
    let _ = (0..TURNS).find(|_| owning.turn());
    servers_fabric.stops_after(ALL);
    assert!(!matches!(owning.outcome, Some(Ok(_))), "after {requests} requests: owned while it is changed");
    let owned = loop {
        serving.turn();
        match owning.turn().then(|| owning.outcome.take()).flatten() {
            Some(Ok(owned)) => break owned,
            Some(Err(Error::HasUser { .. } | Error::ServerStalled { .. })) => owning = Task::new(&others, own()),
            Some(Err(error)) => return Err(error),
            None => {}
        }
    };
    let words = others.block_on(async {
        let _pin = others.pin();
        let page = owned.open(Start::Root).await?;
        page.read(|words| [words.word(WORDS), words.word(WORDS + 1)])
    });
    assert_eq!(words.unwrap(), [2; 2], "after {requests} requests");
    Ok(false)
}
