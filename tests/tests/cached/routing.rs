//! Operations find the owners of their keys: what that takes, in messages and READs, and that nothing is lost or done twice.

use std::{
    pin::{Pin, pin},
    rc::Rc,
    sync::{Arc, Mutex, mpsc},
    task::Poll,
    time::Duration,
};

use farlink_offload::{
    Admission, ComputeCache, Holdings, OwnerServer, Router, Routes, Served,
    route::{OwnerCounts, move_region},
};
use farlink_runtime::{
    clock::Clock,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{Error as FabricError, Fabric, listener::ListenOptions},
    messaging::{MessageServer, Refusal, Request, Responder, ServeMessages, Service, Wait},
    worker::{Counters, Worker},
};
use farlink_structures::{
    btree::{BTree, KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::Watchdog,
    settings,
    subject::Subject,
};
use proptest::prelude::*;

use crate::{
    scene::{
        CACHE_BYTES_ALL, CACHE_BYTES_MIN, Map, Member, MemberOf, assert_left_clean, cache_of, fabric, settle, sparse,
    },
    steps::{NEVER, step, take},
};

pub(crate) type Routed = BTree<Router<Tree>>;

/// A compute server that owns a range and does what others send.
pub(crate) struct Owner<S: Subject = Tree> {
    // Before its worker.
    server: Option<OwnerServer>,
    pub(crate) holdings: Holdings<S>,
    pub(crate) member: MemberOf<S>,
}

impl<S: Subject> Owner<S> {
    pub(crate) fn new(fabric: &Arc<dyn Fabric>, seed: u64, ranges: &[KeyRange], cache_bytes: usize) -> Self {
        Self::with(fabric, seed, ranges, cache_of(cache_bytes, Admission::Always))
    }

    pub(crate) fn with(fabric: &Arc<dyn Fabric>, seed: u64, ranges: &[KeyRange], cache: ComputeCache<S>) -> Self {
        let member = MemberOf::join(fabric, seed);
        let holdings = Holdings::new(member.tree.structure(), cache);
        for &range in ranges {
            member.worker.block_on(holdings.take(&member.worker, range)).unwrap();
        }
        let mut owner = Self { server: None, holdings, member };
        owner.listen().unwrap();
        owner
    }

    /// Carries out nothing for others any more.
    pub(crate) fn stop(&mut self) {
        self.server = None;
    }

    pub(crate) fn listen(&mut self) -> Result<(), Error> {
        let compute = &self.member.compute;
        let served = vec![Served::new(&self.holdings)];
        let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
        let listener = compute.listen(&ListenOptions::default())?;
        self.server = Some(OwnerServer::start(listener, compute, served, &messages)?);
        Ok(())
    }

    /// What it has done for others.
    pub(crate) fn counts(&self) -> OwnerCounts {
        self.server.as_ref().unwrap().counts()
    }

    /// Its way to all keys.
    pub(crate) fn router(&self) -> Ordered<S, Router<S>> {
        let routes = routes(&self.member);
        Ordered::over(Router::new(&self.member.worker, &routes, self.holdings.here(&self.member.worker)))
    }

    pub(crate) fn close(&self) {
        self.member.worker.block_on(self.holdings.give_up_all(&self.member.worker)).unwrap();
    }
}

pub(crate) fn routes<S: Subject>(member: &MemberOf<S>) -> Routes<S> {
    member.worker.block_on(Routes::read(&member.worker, member.tree.structure().clone())).unwrap()
}

pub(crate) fn to_owners<S: Subject>(member: &MemberOf<S>, routes: &Routes<S>) -> Ordered<S, Router<S>> {
    Ordered::over(Router::to_owners(&member.worker, routes))
}

/// Two owners of 4000 keys, and somebody who owns nothing.
struct Scene {
    owners: [Owner; 2],
    guest: Member,
    fabric: Cluster,
    cut: u64,
    model: Map,
}

impl Scene {
    fn new(profile: FabricProfile, cache_bytes: usize) -> Self {
        let model = sparse(4000);
        let fabric = fabric(profile, 256, &model, 0.8);
        let guest = Member::join(&fabric, 3);
        let cut = guest.worker.block_on(guest.tree.leaf_low(20_000)).unwrap();
        let ranges = [KeyRange { low: 0, high: Some(cut) }, KeyRange { low: cut, high: None }];
        let owners = [0, 1].map(|owner| Owner::new(&fabric, owner as u64 + 1, &ranges[owner..=owner], cache_bytes));
        Self { owners, guest, fabric, cut, model }
    }

    /// Writes all, leaves, and judges what is there.
    fn close(self, context: &str) {
        let Self { owners, guest, fabric, model, .. } = self;
        owners.iter().for_each(Owner::close);
        settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
        drop((owners, guest));
        assert_left_clean(&fabric, &model, context);
    }
}

/// What a worker counted meanwhile.
fn counted(worker: &Worker, act: impl AsyncFnOnce() -> Result<(), Error>) -> Counters {
    let before = worker.counters();
    worker.block_on(act()).unwrap();
    worker.counters() - before
}

#[test]
fn one_message_to_the_owner_and_none_to_oneself() {
    let scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let guest = &scene.guest;
    let routes = routes(guest);
    let routed = to_owners(guest, &routes);
    for (key, value) in [(10, 1), (scene.cut, scene.cut / 10)] {
        let did = counted(&guest.worker, async || {
            assert_eq!(routed.get(key).await?, Some(value));
            assert_eq!(routed.update(key, value).await?, Some(value));
            assert_eq!(routed.get(key + 1).await?, None);
            Ok(())
        });
        assert_eq!((did.two_sided, did.reads, did.writes, did.atomics, did.round_trips), (3, 0, 0, 0, 3), "{did:?}");
    }
    let [low, high] = &scene.owners;
    let router = low.router();
    low.member.worker.block_on(router.get(10)).unwrap();
    let did = counted(&low.member.worker, async || {
        assert_eq!(router.get(10).await?, Some(1));
        assert_eq!(router.upsert(10, 1).await?, Some(1));
        Ok(())
    });
    assert_eq!((did.two_sided, did.reads), (0, 0), "{did:?}");
    let did = counted(&low.member.worker, async || router.get(scene.cut).await.map(drop));
    assert_eq!((did.two_sided, did.reads), (1, 0), "{did:?}");
    // A scan asks each owner for its own.
    let did = counted(&guest.worker, async || {
        let found = routed.range(scene.cut - 50..scene.cut + 50).take(usize::MAX).await?;
        assert_eq!(found.len(), 10);
        Ok(())
    });
    assert_eq!((did.two_sided, did.reads), (2, 0), "{did:?}");
    assert_eq!(guest.worker.block_on(routed.len()).unwrap(), 4000);
    assert_eq!(routes.reads(), 1);
    let counts = [low, high].map(Owner::counts);
    assert!(counts.iter().all(|counts| counts.done > 3 && counts.not_owned == 0 && counts.failed == 0), "{counts:?}");
    drop((routed, router));
    scene.close("routed");
}

/// A scan over many regions asks one, then two at once, then four; one that has enough asks no further.
#[test]
fn owners_are_scanned_at_once() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 3);
    let low = |part: u64| guest.worker.block_on(guest.tree.leaf_low(part * 5000)).unwrap();
    let cuts: Vec<u64> = (1..8).map(low).collect();
    let ranges = KeyRange::cut_at(&cuts);
    let of = |owner: usize| -> Vec<KeyRange> { ranges.iter().copied().skip(owner).step_by(2).collect() };
    let owners = [0, 1].map(|owner| Owner::new(&fabric, owner as u64 + 1, &of(owner), CACHE_BYTES_ALL));
    let routes = routes(&guest);
    let routed = to_owners(&guest, &routes);
    guest.worker.block_on(routed.range(..).take(usize::MAX)).unwrap();
    let entries: Vec<(u64, u64)> = model.iter().map(|(&key, &value)| (key, value)).collect();
    let scanned = async |from: usize, count: usize, down: bool| {
        let mut expected: Vec<_> = entries[from..].to_vec();
        let found = match down {
            false => routed.range(entries[from].0..).take(count).await?,
            true => {
                expected = entries[..=from].iter().rev().copied().collect();
                routed.range(..=entries[from].0).descending().take(count).await?
            }
        };
        expected.truncate(count);
        assert!(found == expected, "{count} from {from}");
        Ok(())
    };
    let cases = [(0, 4000, false, 8, 4), (3999, 4000, true, 8, 4), (0, 10, false, 1, 1), (3999, 10, true, 1, 1)];
    for (from, count, down, messages, trips) in cases {
        let did = counted(&guest.worker, async || scanned(from, count, down).await);
        assert_eq!((did.two_sided, did.round_trips), (messages, trips), "{count} from {from}: {did:?}");
    }
    // Beside a cut: what the first part has does not do, and one of the two after that is asked in vain.
    let beside = entries.iter().position(|&(key, _)| key >= cuts[2]).unwrap();
    let did = counted(&guest.worker, async || scanned(beside - 3, 10, false).await);
    assert_eq!((did.two_sided, did.round_trips), (3, 2), "{did:?}");
    // Of any length, from anywhere.
    guest.worker.block_on(async {
        for from in (0..4000).step_by(397) {
            for count in [0, 1, 2, 499, 500, 501, 1700] {
                for down in [false, true] {
                    scanned(from, count, down).await.unwrap();
                }
            }
        }
    });
    drop(routed);
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "scanned");
}

#[test]
fn who_asks_the_wrong_owner_asks_twice_once_an_epoch() {
    let mut scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let routes = routes(&scene.guest);
    let colleague = scene.guest.colleague();
    let trees = [to_owners(&scene.guest, &routes), to_owners(&colleague, &routes)];
    let cut = scene.cut;
    let get = async |tree: &Routed, key: u64| tree.get(key).await.map(|value| assert_eq!(value, Some(key / 10)));
    for (tree, worker) in trees.iter().zip([&scene.guest.worker, &colleague.worker]) {
        for key in [0, cut] {
            worker.block_on(get(tree, key)).unwrap();
        }
    }
    for round in 0..3 {
        // The upper range goes to a compute server that has just come, and that the workers do not know.
        scene.owners[1].close();
        let new = Owner::new(&scene.fabric, 10 + round, &[KeyRange { low: cut, high: None }], CACHE_BYTES_ALL);
        let (epoch, reads) = (routes.epoch(), routes.reads());
        let did = counted(&scene.guest.worker, async || get(&trees[0], cut).await);
        // The READ is of the map; a page proves itself, so one is enough.
        assert_eq!((did.two_sided, did.reads, routes.reads() - reads), (2, 1, 1), "{did:?}");
        assert_eq!(routes.epoch(), epoch + 2);
        for (tree, worker) in trees.iter().zip([&scene.guest.worker, &colleague.worker]) {
            let did = counted(worker, async || {
                for key in 0..20 {
                    get(tree, (cut / 10 + key) * 10).await?;
                }
                get(tree, 0).await
            });
            assert_eq!((did.two_sided, did.reads), (21, 0), "round {round}: {did:?}");
        }
        assert_eq!(routes.reads() - reads, 1);
        let before = std::mem::replace(&mut scene.owners[1], new);
        assert_eq!(before.counts().not_owned, 1);
        settle([&before.member, &scene.owners[0].member, &scene.owners[1].member, &scene.guest]);
        drop(before);
    }
    drop((trees, colleague));
    scene.close("another owner");
}

/// An operation that rests while it reads the map, or has a dead owner's region taken, as one that nobody polls any more: polled until its
/// worker has posted so many READs.
pub(crate) fn poll_until_it_reads<T>(worker: &Worker, reads: u64, operation: &mut Pin<&mut impl Future<Output = T>>) {
    let before = worker.counters().reads;
    worker.block_on(std::future::poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if worker.counters().reads - before >= reads {
            return Poll::Ready(());
        }
        assert!(operation.as_mut().poll(cx).is_pending(), "it does not rest");
        Poll::Pending
    }));
}

#[test]
fn who_rests_as_he_reads_the_map_keeps_nobody_from_it() {
    let mut scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let routes = routes(&scene.guest);
    let colleague = scene.guest.colleague();
    let (tree, other) = (to_owners(&scene.guest, &routes), to_owners(&colleague, &routes));
    let cut = scene.cut;
    scene.owners[1].close();
    let new = Owner::new(&scene.fabric, 10, &[KeyRange { low: cut, high: None }], CACHE_BYTES_ALL);
    let before = std::mem::replace(&mut scene.owners[1], new);
    {
        let mut rests = pin!(tree.get(cut));
        poll_until_it_reads(&scene.guest.worker, 1, &mut rests);
        assert_eq!(colleague.worker.block_on(other.get(cut)).unwrap(), Some(cut / 10));
        assert_eq!(scene.guest.worker.block_on(rests).unwrap(), Some(cut / 10));
    }
    drop((tree, other, colleague));
    settle([&before.member, &scene.owners[0].member, &scene.owners[1].member, &scene.guest]);
    drop(before);
    scene.close("rests");
}

#[test]
fn where_nobody_answers_it_is_said_who_does_not() {
    let mut scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let cut = scene.cut;
    // Time passes as fast as it is asked for: nobody waits.
    let worker = scene.guest.compute.worker_with(Clock::Virtual(Rc::default())).unwrap();
    let routes = routes(&scene.guest);
    let tree: Routed = Ordered::over(Router::to_owners(&worker, &routes));
    impatient(&worker, tree.get(cut)).unwrap();
    scene.owners[1].server = None;
    let silent = scene.owners[1].member.compute.owner();
    let found = impatient(&worker, tree.get(cut));
    assert!(matches!(&found, Err(Error::OwnerMissing { owner, .. }) if *owner == silent), "{found:?}");
    scene.owners[1].close();
    let found = impatient(&worker, tree.insert(cut + 1, 5));
    assert!(matches!(found, Err(Error::NoOwner { .. })), "{found:?}");
    let found = impatient(&worker, tree.len());
    assert!(matches!(found, Err(Error::NoOwner { .. })), "{found:?}");
    // What has an owner is done all the same.
    assert_eq!(impatient(&worker, tree.get(10)).unwrap(), Some(1));
    drop((tree, worker));
    scene.close("nobody answers");
}

/// What has no owner holds up nothing that is not about it, and who takes it takes no other part that has none.
#[test]
fn what_has_no_owner_concerns_only_what_is_about_it() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let cuts = [10_000, 20_000, 30_000].map(|key| guest.worker.block_on(guest.tree.leaf_low(key)).unwrap());
    let [first, second, gap, _] = KeyRange::cut_at(&cuts).try_into().unwrap();
    let owners = [(1, first), (2, second)].map(|(seed, range)| Owner::new(&fabric, seed, &[range], CACHE_BYTES_ALL));
    // Time passes as fast as it is asked for: nobody waits.
    let worker = guest.compute.worker_with(Clock::Virtual(Rc::default())).unwrap();
    let routes = routes(&guest);
    let tree: Routed = Ordered::over(Router::to_owners(&worker, &routes));
    let (reads, epoch) = (routes.reads(), routes.epoch());
    let across = impatient(&worker, tree.range(cuts[0] - 50..cuts[0] + 50).take(usize::MAX)).unwrap();
    assert_eq!(across.len(), 10);
    assert_eq!((routes.reads(), routes.epoch()), (reads, epoch), "it looked for an owner");
    let beyond = impatient(&worker, tree.range(cuts[1] - 50..cuts[1] + 50).take(usize::MAX));
    assert!(matches!(beyond, Err(Error::NoOwner { .. })), "{beyond:?}");
    // Now a part in the middle has none, and the last one.
    let third: Owner = Owner::new(&fabric, 3, &[gap], CACHE_BYTES_ALL);
    owners[1].close();
    let own = owners[0].router();
    assert!(owners[0].member.worker.block_on(own.get(cuts[1] - 10)).unwrap().is_some());
    assert_eq!(owners[0].holdings.regions(), [first, second]);
    assert_eq!(third.holdings.regions(), [gap]);
    drop((own, tree, worker));
    owners.iter().chain([&third]).for_each(Owner::close);
    settle(owners.iter().chain([&third]).map(|owner| &owner.member).chain([&guest]));
    drop((owners, third, guest));
    assert_left_clean(&fabric, &model, "no owner");
}

/// Says that it has a message, and goes no further, as a process that was stopped, until the other end is dropped.
pub(crate) struct Stopped(pub(crate) mpsc::Sender<()>, pub(crate) mpsc::Receiver<()>);

impl Service for Stopped {
    fn handle(&mut self, _request: Request<'_>, reply: Responder) {
        let _ = self.0.send(());
        let _ = self.1.recv();
        reply.refuse(Refusal::Unanswered);
    }
}

#[test]
fn an_owner_that_gives_no_sign_of_life_is_named() {
    const WAIT: Duration = Duration::from_secs(1);
    let _watchdog = Watchdog::start("a silent owner", Duration::from_secs(60));
    let mut scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let (cut, compute) = (scene.cut, &scene.owners[1].member.compute);
    let silent = compute.owner();
    scene.owners[1].server = None;
    let listener = compute.listen(&ListenOptions::default()).unwrap();
    let ((has_it, message), (go_on, stopped)) = (mpsc::channel(), mpsc::channel());
    let stopped = Mutex::new(Some(Stopped(has_it, stopped)));
    let stopped = move |_| Ok(Box::new(stopped.lock().unwrap().take().unwrap()) as _);
    let stopped = MessageServer::start(listener, &ServeMessages::default(), stopped).unwrap();
    // Dropped before that, which waits for its thread.
    let go_on = go_on;
    let options =
        ComputeOptions { lock_wait: Some(WAIT), maintenance: Maintenance::Manual, ..ComputeOptions::default() };
    let impatient_one = ComputeServer::join(scene.fabric.clone(), options).unwrap();
    // Time passes as fast as it is asked for: nobody waits.
    let worker = impatient_one.worker_with(Clock::Virtual(Rc::default())).unwrap();
    let routes_known = routes(&scene.guest);
    let tree: Routed = Ordered::over(Router::to_owners(&worker, &routes_known));
    let asking = tree.clone();
    let asked = worker.spawn(async move { asking.insert(cut + 1, 5).await });
    while message.try_recv().is_err() {
        worker.turn();
    }
    let found = impatient(&worker, asked);
    assert!(matches!(&found, Err(Error::OwnerSilent { owner, waited: WAIT, .. }) if *owner == silent), "{found:?}");
    // From then on nothing is sent to it before it answers.
    let reads = routes_known.reads();
    let found = impatient(&worker, tree.insert(cut + 1, 5));
    assert!(matches!(&found, Err(Error::OwnerMissing { owner, .. }) if *owner == silent), "{found:?}");
    assert!(found.unwrap_err().to_string().contains("no sign of life for 1000 ms"));
    assert!(routes_known.reads() - reads <= 2, "it was asked {} times", routes_known.reads() - reads);
    // It is given nothing, either.
    let (other, region) = (&scene.owners[0], KeyRange { low: 0, high: Some(cut) });
    let from = other.member.compute.owner();
    let found = impatient(&worker, move_region(&worker, scene.guest.tree.structure(), &region, from, silent));
    assert!(matches!(&found, Err(Error::OwnerMissing { owner, .. }) if *owner == silent), "{found:?}");
    assert_eq!(other.holdings.regions(), [region]);
    drop((tree, go_on, stopped));
    // It was never carried out, and others may wait for longer.
    scene.owners[1].listen().unwrap();
    let patient = to_owners(&scene.guest, &routes(&scene.guest));
    assert!(scene.guest.worker.block_on(patient.insert(cut + 1, 6)).unwrap());
    scene.model.insert(cut + 1, 6);
    drop((patient, worker, impatient_one));
    scene.close("no sign of life");
}

/// Ten seconds are nothing where whoever moves a region gets no core.
#[test]
fn a_region_that_has_no_owner_for_a_while_is_waited_for() {
    let scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let worker = scene.guest.compute.worker_with(Clock::Virtual(Rc::default())).unwrap();
    let routes = routes(&scene.guest);
    let tree: Routed = Ordered::over(Router::to_owners(&worker, &routes));
    let (owner, epoch) = (&scene.owners[1], routes.epoch());
    owner.close();
    let mut turns = 0;
    let found = with_a_clock_that_jumps(&worker, tree.get(scene.cut), || {
        turns += u32::from(routes.epoch() > epoch);
        // Half a minute after it was seen that nobody owns it.
        if turns == 300 {
            let region = KeyRange { low: scene.cut, high: None };
            owner.member.worker.block_on(owner.holdings.take(&owner.member.worker, region)).unwrap();
        }
    });
    assert_eq!(found.unwrap(), Some(scene.cut / 10));
    drop((tree, worker));
    scene.close("waited for");
}

fn impatient<T>(worker: &Worker, future: impl Future<Output = T>) -> T {
    with_a_clock_that_jumps(worker, future, || {})
}

/// Runs a future on a worker whose clock jumps, and something else before each look at it.
fn with_a_clock_that_jumps<T>(worker: &Worker, future: impl Future<Output = T>, mut before: impl FnMut()) -> T {
    let mut now_ns = worker.clock().now_ns();
    worker.block_on(async {
        let mut future = std::pin::pin!(future);
        std::future::poll_fn(|cx| {
            now_ns += 100_000_000;
            worker.clock().skip_to(now_ns);
            cx.waker().wake_by_ref();
            before();
            future.as_mut().poll(cx)
        })
        .await
    })
}

#[test]
fn a_compute_server_listens_once() {
    let mut scene = Scene::new(FabricProfile::Fast, CACHE_BYTES_ALL);
    let again = scene.owners[0].listen();
    assert!(matches!(again, Err(Error::Fabric(FabricError::BadOption { option: "owner", .. }))), "{again:?}");
    scene.owners[0].server = None;
    scene.owners[0].listen().unwrap();
    let routes = routes(&scene.guest);
    assert_eq!(scene.guest.worker.block_on(to_owners(&scene.guest, &routes).get(10)).unwrap(), Some(1));
    scene.close("listens once");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: settings::from_env("FARLINK_MODEL_CASES", 6), failure_persistence: None, ..ProptestConfig::default() })]

    /// Whoever sends an operation, it is done once, by whoever owns its keys.
    #[test]
    fn owners_a_guest_and_a_model(steps in prop::collection::vec((step(), 0usize..3), 1..200), nasty: bool) {
        let profile = if nasty { FabricProfile::Nasty } else { FabricProfile::Fast };
        let mut scene = Scene::new(profile, CACHE_BYTES_MIN);
        let routes = routes(&scene.guest);
        let trees = [scene.owners[0].router(), scene.owners[1].router(), to_owners(&scene.guest, &routes)];
        for (step, who) in &steps {
            let worker = [&scene.owners[0].member.worker, &scene.owners[1].member.worker, &scene.guest.worker][*who];
            worker.block_on(take(&trees[*who], &mut scene.model, step, NEVER)).map_err(TestCaseError::fail)?;
        }
        drop(trees);
        scene.close("a guest");
    }
}
