//! Who owns a structure stands in its partition map: whoever else would own or use it is refused, by name, and nothing that
//! it does reaches remote memory.

use std::{
    cell::{Cell, RefCell},
    collections::HashSet,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_offload::{Admission, ComputeCache, Durability, Hybrid, Remote};
use farlink_runtime::{
    access::{Access, Interrupt, Pages, Start},
    catalog,
    clock::Clock,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{
        Endpoint, Error as FabricError, Fabric, Liveness, OwnerClaim,
        mortal::{MortalFabric, Order},
    },
    lock::{LockWord, OwnerId},
    one_sided::{Proof, ownership},
    page::{self, CHECKSUM, LOCK},
    ptr::ServerId,
};
use farlink_structures::btree::{BTree, KeyRange, Tree};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded,
    direct::Direct,
};

use crate::scene::{CACHE_BYTES_MIN, Map, Member, TREE, assert_left_clean, cache, difference, fabric, settle, sparse};

const KEYS: u64 = 1000;

pub(crate) fn new_cache() -> ComputeCache<Tree> {
    cache(CACHE_BYTES_MIN, Admission::Always)
}

/// A tree, and two compute servers.
pub(crate) fn scene(profile: FabricProfile) -> (Cluster, [Member; 2], Map) {
    let model = sparse(KEYS);
    let fabric = fabric(profile, 256, &model, 0.8);
    let members = [1, 2].map(|seed| Member::join(&fabric, seed));
    (fabric, members, model)
}

pub(crate) fn is_owned_by<T: std::fmt::Debug>(outcome: Result<T, Error>, by: &Member) {
    let named =
        |error: &Error| matches!(error, Error::Owned { name, owner } if name == TREE && *owner == by.compute.owner());
    assert!(outcome.as_ref().is_err_and(named), "{outcome:?}, not refused for {}", by.compute.owner());
}

fn is_given_up<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    assert!(matches!(outcome, Err(Error::GivenUp { .. })), "{outcome:?}");
}

impl Member {
    pub(crate) fn try_own(&self, cache: &ComputeCache<Tree>, range: KeyRange) -> Result<crate::scene::Owned, Error> {
        let owned = cache.own(&self.worker, self.tree.structure().clone(), range);
        self.worker.block_on(owned).map(BTree::over)
    }

    fn epoch(&self) -> u64 {
        self.worker.block_on(ownership::read(&self.worker, self.tree.structure())).unwrap().epoch
    }
}

#[test]
fn a_second_owner_is_refused_by_name_until_the_first_gives_up() {
    let (fabric, members, mut model) = scene(FabricProfile::Fast);
    let [first, second] = &members;
    let caches = [new_cache(), new_cache(), new_cache()];
    let tree = first.try_own(&caches[0], KeyRange { low: 0, high: Some(5000) }).unwrap();
    let epoch = first.epoch();
    for range in [KeyRange::ALL, KeyRange { low: 4999, high: None }, KeyRange { low: 3, high: Some(4) }] {
        is_owned_by(second.try_own(&caches[1], range), first);
        // The same compute server, by another cache, would not see what the first one has.
        is_owned_by(first.try_own(&caches[1], range), first);
    }
    assert!(matches!(first.try_own(&caches[0], KeyRange::ALL), Err(Error::BadOption { option: "region", .. })));
    assert_eq!(second.epoch(), epoch, "who was refused has changed the map");
    // What is left is to be had.
    let rest = second.try_own(&caches[1], KeyRange { low: 5000, high: None }).unwrap();
    assert_eq!(first.epoch(), epoch + 1);
    first.worker.block_on(async {
        tree.update(10, 7).await.unwrap();
        tree.access().close().await.unwrap();
        model.insert(10, 7);
        // All that it has cached is somebody else's to change.
        is_given_up(tree.get(10).await);
        is_given_up(tree.update(10, 8).await);
        is_given_up(tree.insert(11, 8).await);
        is_given_up(tree.remove(10).await);
        is_given_up(tree.range(..).take(3).await);
    });
    assert!(matches!(first.try_own(&caches[0], KeyRange { low: 0, high: Some(5000) }), Err(Error::GivenUp { .. })));
    let taken = second.try_own(&caches[2], KeyRange { low: 0, high: Some(5000) }).unwrap();
    second.worker.block_on(async {
        assert_eq!(taken.get(10).await.unwrap(), Some(7), "what was written back on giving up");
        taken.update(20, 9).await.unwrap();
        model.insert(20, 9);
        taken.access().close().await.unwrap();
        rest.access().close().await.unwrap();
    });
    settle(&members);
    drop((tree, rest, taken, members));
    assert_left_clean(&fabric, &model, "given up");
}

/// What was not flushed is lost, and the part goes back with the next round of maintenance, or when its compute server leaves.
#[test]
fn an_owner_that_is_dropped_gives_up() {
    let (fabric, members, model) = scene(FabricProfile::Fast);
    let [first, second] = &members;
    drop(first.try_own(&new_cache(), KeyRange::ALL).unwrap());
    is_owned_by(second.try_own(&new_cache(), KeyRange::ALL), first);
    // Its own compute server need not wait.
    drop(first.try_own(&new_cache(), KeyRange::ALL).unwrap());
    first.maintain();
    let (tree, cache) = (second.try_own(&new_cache(), KeyRange::ALL).unwrap(), new_cache());
    is_owned_by(first.try_own(&cache, KeyRange::ALL), second);
    drop(tree);
    let [first, second] = members;
    drop(second);
    // The same cache that was refused.
    let tree = first.try_own(&cache, KeyRange::ALL).unwrap();
    settle([&first]);
    drop((tree, first));
    assert_left_clean(&fabric, &model, "dropped");
}

/// Whatever way it comes by: one-sided, with inner pages cached, by a memory server. Who says that old data will do may read.
#[test]
fn who_uses_a_structure_beside_its_owner_is_refused_and_changes_nothing() {
    let (fabric, members, mut model) = scene(FabricProfile::Fast);
    let [owner, other] = &members;
    let tree = owner.try_own(&new_cache(), KeyRange { low: 0, high: Some(5000) }).unwrap();
    owner.worker.block_on(async {
        tree.update(10, 11).await.unwrap();
        tree.access().flush().await.unwrap();
        tree.update(10, 12).await.unwrap();
    });
    model.insert(10, 12);
    let inner = other.share(&new_cache(), Proof::Checksum);
    let sent = BTree::over(Remote::new(&other.worker, other.tree.structure().clone()));
    let hybrid = BTree::over(Hybrid::new(&other.worker, other.tree.structure().clone(), Proof::Checksum));
    let plain = other.plain();
    let before = other.worker.counters();
    other.worker.block_on(async {
        // Anywhere in it: pages above are in the owner's cache, too.
        for key in [10, 9000] {
            is_owned_by(other.tree.update(key, 1).await, owner);
            is_owned_by(other.tree.insert(key + 1, 1).await, owner);
            is_owned_by(other.tree.remove(key).await, owner);
            is_owned_by(inner.update(key, 1).await, owner);
            is_owned_by(inner.insert(key + 1, 1).await, owner);
            is_owned_by(sent.update(key, 1).await, owner);
        }
        // What there is nothing to change for in remote memory: here the owner may have what is newer.
        is_owned_by(other.tree.upsert(10, 11).await, owner);
        is_owned_by(inner.upsert(10, 11).await, owner);
        is_owned_by(sent.upsert(10, 11).await, owner);
        is_owned_by(hybrid.upsert(10, 11).await, owner);
        is_owned_by(other.tree.insert(10, 1).await, owner);
        is_owned_by(inner.update(11, 1).await, owner);
        is_owned_by(inner.remove(11).await, owner);
        is_owned_by(hybrid.remove(11).await, owner);
        for key in [10, 9000] {
            is_owned_by(plain.get(key).await, owner);
            is_owned_by(plain.range(key..).take(3).await, owner);
            is_owned_by(inner.get(key).await, owner);
            is_owned_by(sent.get(key).await, owner);
            is_owned_by(hybrid.get(key).await, owner);
        }
        // What the owner has written back.
        assert_eq!(other.tree.get(10).await.unwrap(), Some(11));
        assert_eq!(plain.clone().beside_owners().get(10).await.unwrap(), Some(11));
        is_owned_by(catalog::destroy(&other.worker, TREE).await, owner);
    });
    let did = other.worker.counters() - before;
    assert_eq!((did.writes, did.atomics, did.two_sided), (0, 0, 0), "something was written: {did:?}");
    owner.worker.block_on(async {
        is_owned_by(owner.tree.update(10, 77).await, owner);
        is_owned_by(owner.plain().get(10).await, owner);
        assert_eq!(tree.get(10).await.unwrap(), Some(12));
        tree.access().close().await.unwrap();
    });
    other.worker.block_on(async {
        assert!(other.tree.update(20, 5).await.unwrap().is_some());
        assert!(inner.update(30, 6).await.unwrap().is_some());
        assert_eq!(plain.get(10).await.unwrap(), Some(12));
    });
    model.extend([(20, 5), (30, 6)]);
    settle(&members);
    drop((tree, inner, sent, hybrid, plain, members));
    assert_left_clean(&fabric, &model, "beside an owner");
}

/// An owner dies with changes that are in its log alone. Whoever comes later is told by none of its answers that they were not made,
/// also if it finds nothing to change in remote memory.
#[test]
fn what_changes_nothing_or_reads_is_answered_behind_the_log_of_a_dead_owner() {
    type Step = fn(&Member) -> bool;
    let steps: [(&str, Step, Map); 6] = [
        ("get", |it| it.worker.block_on(it.plain().get(10)).unwrap() == Some(12), [(10, 12), (25, 5)].into()),
        ("upsert", |it| it.worker.block_on(it.tree.upsert(10, 1)).unwrap() == Some(12), [(10, 1), (25, 5)].into()),
        ("insert", |it| it.worker.block_on(it.tree.insert(20, 7)).unwrap(), [(10, 12), (20, 7), (25, 5)].into()),
        ("update", |it| it.worker.block_on(it.tree.update(25, 6)).unwrap() == Some(5), [(10, 12), (25, 6)].into()),
        ("remove", |it| it.worker.block_on(it.tree.remove(25)).unwrap() == Some(5), [(10, 12)].into()),
        ("a change of a page as it was read", changes_nothing, [(10, 12), (25, 5)].into()),
    ];
    for (what, step, changed) in steps {
        let mut model = sparse(4);
        let cluster = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let life = MortalFabric::new(Arc::clone(&cluster), Order::Posted, false);
        let deadly: Arc<dyn Fabric> = Arc::new(life.clone());
        let (owner, other) = (Member::join(&deadly, 1), Member::join(&cluster, 2));
        let tree = owner.try_own(&new_cache().with_durability(Durability::Logged), KeyRange::ALL).unwrap();
        owner.worker.block_on(async {
            assert_eq!(tree.upsert(10, 12).await.unwrap(), Some(1));
            assert_eq!(tree.remove(20).await.unwrap(), Some(2));
            assert!(tree.insert(25, 5).await.unwrap());
        });
        life.dies_after(0);
        life.is_taken_for_dead();
        assert_eq!(other.entries(), model, "the owner has written its pages back");
        assert!(step(&other), "{what}: the answer is older than the dead owner's");
        // The next one that changes something.
        assert!(other.worker.block_on(other.tree.insert(1, 1)).unwrap());
        for key in [10, 20, 25] {
            model.remove(&key);
        }
        model.extend(changed);
        model.insert(1, 1);
        settle([&other]);
        drop((tree, owner, other));
        assert_left_clean(&cluster, &model, what);
    }
}

/// A change that leaves the root as it was read is refused if the dead owner's log says otherwise.
fn changes_nothing(member: &Member) -> bool {
    let access = member.tree.access();
    member.worker.block_on(async {
        let mut pages = Pages::new();
        pages.add(access.open(Start::Root).await.unwrap());
        matches!(access.change(pages, |_| ()).await, Err(Interrupt::Restart(_)))
    })
}

#[test]
fn nobody_owns_what_another_changes_one_sided() {
    let (fabric, members, mut model) = scene(FabricProfile::Fast);
    let [writer, other] = &members;
    writer.worker.block_on(writer.tree.update(10, 77)).unwrap();
    let epoch = writer.epoch();
    let refused = other.try_own(&new_cache(), KeyRange { low: 5000, high: None });
    let named = |error: &Error| matches!(error, Error::HasUser { user: by, .. } if *by == writer.compute.owner());
    assert!(refused.as_ref().is_err_and(named), "{refused:?}");
    // Two of them do each other no harm.
    other.worker.block_on(other.tree.update(20, 2)).unwrap();
    writer.worker.block_on(writer.tree.update(20, 3)).unwrap();
    assert_eq!(writer.epoch(), epoch, "nobody has become an owner");
    let [writer, other] = members;
    drop(writer);
    // The last one that writes may become the owner, and writes through its cache from then on.
    let tree = other.try_own(&new_cache(), KeyRange::ALL).unwrap();
    other.worker.block_on(async {
        is_owned_by(other.tree.update(20, 4).await, &other);
        tree.update(20, 5).await.unwrap();
        tree.access().close().await.unwrap();
        assert!(other.tree.update(30, 6).await.unwrap().is_some());
    });
    model.extend([(10, 77), (20, 5), (30, 6)]);
    settle([&other]);
    drop((tree, other));
    assert_left_clean(&fabric, &model, "a writer");
}

/// Both see a free structure and enter themselves: the page's lock decides.
#[test]
fn of_many_that_claim_at_once_one_wins() {
    for profile in [FabricProfile::Nasty, FabricProfile::Weak] {
        let model = sparse(KEYS);
        let fabric = fabric(profile, 256, &model, 0.8);
        let start = std::sync::Barrier::new(4);
        let won: usize = std::thread::scope(|scope| {
            let claim = |seed: u64| {
                let (fabric, start) = (&fabric, &start);
                scope.spawn(move || {
                    let member = Member::join(fabric, seed);
                    start.wait();
                    let claimed = member.try_own(&new_cache(), KeyRange::ALL);
                    assert!(matches!(claimed, Ok(_) | Err(Error::Owned { .. })), "{claimed:?}");
                    start.wait();
                    usize::from(claimed.is_ok())
                })
            };
            let threads: Vec<_> = (0..4).map(claim).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(won, 1);
        assert_left_clean(&fabric, &model, "claimed by many");
    }
}

/// A fabric on which compute servers are taken for dead that are not.
#[derive(Debug)]
pub(crate) struct Deadly {
    pub(crate) inner: Arc<dyn Fabric>,
    pub(crate) dead: Arc<Mutex<HashSet<OwnerId>>>,
}

impl Fabric for Deadly {
    fn servers(&self) -> usize {
        self.inner.servers()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.inner.region_bytes(server)
    }

    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, FabricError> {
        self.inner.endpoint(seed, clock)
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, FabricError> {
        self.inner.claim(owner)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        match self.dead.lock().unwrap().contains(&owner) {
            true => Liveness::Dead,
            false => self.inner.liveness(owner),
        }
    }
}

#[test]
fn what_the_dead_owned_and_wrote_is_taken_over() {
    let (cluster, members, model) = scene(FabricProfile::Fast);
    let dead = Arc::new(Mutex::new(HashSet::new()));
    let deadly: Arc<dyn Fabric> = Arc::new(Deadly { inner: Arc::clone(&cluster), dead: Arc::clone(&dead) });
    let heir = Member::join(&deadly, 3);
    let [owner, writer] = &members;
    let bury = |member: &Member| dead.lock().unwrap().insert(member.compute.owner());
    let (low, high) = (KeyRange { low: 0, high: Some(5000) }, KeyRange { low: 5000, high: None });
    let lost = owner.try_own(&new_cache(), low).unwrap();
    is_owned_by(heir.try_own(&new_cache(), low), owner);
    bury(owner);
    // A part that the dead one did not own: what it did is still known to be its, until somebody takes it.
    let tree = heir.try_own(&new_cache(), high).unwrap();
    let map = || heir.worker.block_on(ownership::read(&heir.worker, heir.tree.structure())).unwrap();
    let of = |member: &Member| map().entries.iter().filter(|entry| entry.owner == member.compute.owner()).count();
    assert_eq!((of(owner), of(&heir)), (1, 1), "{:?}", map());
    drop(tree);
    heir.maintain();
    assert_eq!((of(owner), of(&heir)), (1, 0), "{:?}", map());
    // A piece of it.
    let piece = KeyRange { low: 1000, high: Some(2000) };
    let tree = heir.try_own(&new_cache(), piece).unwrap();
    assert_eq!((of(owner), of(&heir)), (2, 1), "{:?}", map());
    drop(tree);
    let tree = heir.try_own(&new_cache(), low).unwrap();
    drop(tree);
    heir.maintain();
    writer.worker.block_on(writer.tree.update(10, 77)).unwrap();
    assert_eq!((of(owner), of(writer)), (0, 1), "{:?}", map());
    assert!(matches!(heir.try_own(&new_cache(), low), Err(Error::HasUser { .. })));
    bury(writer);
    let tree = heir.try_own(&new_cache(), low).unwrap();
    heir.worker.block_on(tree.access().close()).unwrap();
    drop((lost, tree));
    // They are not dead after all: what they take out of the map when they leave is not theirs.
    let tree = heir.try_own(&new_cache(), KeyRange::ALL).unwrap();
    drop(members);
    assert_eq!(map().owners().count(), 1);
    settle([&heir]);
    drop((tree, heir));
    let mut model = model;
    model.insert(10, 77);
    assert_left_clean(&cluster, &model, "taken over");
}

/// An owner that records all its changes, and is dropped before it has given up, in a tree whose other half is another one's.
struct Dropped {
    cluster: Cluster,
    other: Member,
    low: KeyRange,
    high: KeyRange,
    model: Map,
}

impl Dropped {
    fn cache() -> ComputeCache<Tree> {
        new_cache().with_durability(Durability::Logged)
    }

    fn new(owner: impl FnOnce(&Cluster) -> Member, before_it_leaves: impl FnOnce(&Self, &Member)) -> Self {
        let model = sparse(KEYS);
        let cluster = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let other = Member::join(&cluster, 2);
        let cut = other.worker.block_on(other.tree.leaf_low(5000)).unwrap();
        let [low, high] = KeyRange::cut_at(&[cut]).try_into().unwrap();
        let mut scene = Self { cluster, other, low, high, model };
        let owner = owner(&scene.cluster);
        let tree = owner.try_own(&Self::cache(), low).unwrap();
        for key in (0..300).map(|number| number * 7) {
            owner.worker.block_on(tree.upsert(key, 1_000_000 + key)).unwrap();
            scene.model.insert(key, 1_000_000 + key);
        }
        drop(tree);
        before_it_leaves(&scene, &owner);
        scene
    }

    /// What was acknowledged is there for the next owner.
    fn assert_nothing_lost(self) {
        let Self { cluster, other, low, model, .. } = self;
        let tree = other.try_own(&Self::cache(), low).unwrap();
        let found: Map =
            other.worker.block_on(tree.range(..low.high.unwrap()).take(usize::MAX)).unwrap().into_iter().collect();
        let expected: Map = model.range(..low.high.unwrap()).map(|(&key, &value)| (key, value)).collect();
        assert!(found == expected, "{}", difference(&found, &expected));
        other.worker.block_on(tree.access().close()).unwrap();
        drop(tree);
        settle([&other]);
        drop(other);
        assert_left_clean(&cluster, &model, "dropped");
    }
}

/// It is refused something between its cache's end and the replay of the log.
#[test]
fn who_is_refused_does_not_forget_its_log() {
    let scene = Dropped::new(
        |cluster| Member::join(cluster, 1),
        |scene, owner| {
            let others = scene.other.try_own(&new_cache(), scene.high).unwrap();
            is_owned_by(owner.try_own(&new_cache(), scene.high), &scene.other);
            scene.other.worker.block_on(others.access().close()).unwrap();
        },
    );
    scene.assert_nothing_lost();
}

/// It leaves while a compute server that stands still has the map locked.
#[test]
fn who_cannot_replay_its_log_leaves_it_to_others() {
    let mut restore: Option<Box<dyn FnOnce()>> = None;
    let scene = Dropped::new(
        |cluster| {
            let lock_wait = Some(Duration::from_millis(20));
            let options = ComputeOptions { lock_wait, maintenance: Maintenance::Manual, ..ComputeOptions::default() };
            Member::of(Arc::new(ComputeServer::join(Arc::clone(cluster) as _, options).unwrap()))
        },
        |scene, owner| {
            let (at, _) = owner.tree.structure().descriptor.unwrap().remote().unwrap();
            let direct = Direct::new(&scene.cluster, 7).unwrap();
            let before = direct.read(at, 1).unwrap()[0];
            let locked = LockWord::from_word(before).locked_by(scene.other.compute.owner());
            direct.write(at, &[locked.word()]).unwrap();
            restore = Some(Box::new(move || direct.write(at, &[before]).map(drop).unwrap()));
        },
    );
    restore.unwrap()();
    scene.assert_nothing_lost();
}

/// The map is damaged: nobody owns or changes the structure, and nobody panics.
#[test]
fn a_damaged_map_is_an_error() {
    let (fabric, members, _) = scene(FabricProfile::Fast);
    let structure = members[0].tree.structure().clone();
    let (at, class) = structure.descriptor.unwrap().remote().unwrap();
    let direct = Direct::new(&fabric, 7).unwrap();
    let sound = direct.read(at, class.words()).unwrap();
    let mut words = sound.clone();
    // More entries than there is room for.
    words[33] = 4000;
    words[CHECKSUM] = page::checksum(&words, LockWord::from_word(words[LOCK]).version());
    direct.write(at, &words).unwrap();
    for member in &members {
        assert!(matches!(member.try_own(&new_cache(), KeyRange::ALL), Err(Error::Inconsistent { .. })));
        let written = member.worker.block_on(member.tree.update(10, 77));
        assert!(matches!(written, Err(Error::Inconsistent { .. })), "{written:?}");
        assert_eq!(member.worker.block_on(member.tree.get(10)).unwrap(), Some(1));
        let read = member.worker.block_on(member.plain().get(10));
        assert!(matches!(read, Err(Error::Inconsistent { .. })), "{read:?}");
    }
}

/// Somebody becomes the owner of a structure that another worker of the compute server changes one-sided, wherever that one rests: what was
/// acknowledged, the owner has.
#[test]
fn who_becomes_the_owner_waits_for_changes_under_way() {
    const RESTS: u64 = 40;
    let mut model = sparse(KEYS);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    // For whom time passes by looks: it waits for a quarter of a second, and then for nobody any more.
    let owns = bounded::worker(&owner.compute).unwrap();
    let mut now_ns = 0;
    let (mut done, mut refused, mut waited) = (0, 0, 0);
    for rest in 0..RESTS {
        // Many of one leaf, so that it splits.
        let (busy, key) = (owner.colleague(), 5000 + 10 * (rest / 9) + 1 + rest % 9);
        let outcome = RefCell::new(None);
        let mut inserting: Pin<Box<dyn Future<Output = Result<bool, Error>>>> = Box::pin(busy.tree.insert(key, 1));
        let mut go_on = || {
            if outcome.borrow().is_none()
                && let Poll::Ready(ended) = inserting.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                outcome.replace(Some(ended));
            }
            busy.worker.turn();
        };
        (0..rest).for_each(|_| go_on());
        let (cache, turns) = (new_cache(), Cell::new(0));
        let tree = {
            let mut owning = pin!(cache.own(&owns, owner.tree.structure().clone(), KeyRange::ALL));
            BTree::over(
                owns.block_on(poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    now_ns += 100;
                    owns.clock().skip_to(now_ns);
                    turns.set(turns.get() + 1);
                    if turns.get() > 300 {
                        go_on();
                    }
                    owning.as_mut().poll(cx)
                }))
                .unwrap(),
            )
        };
        waited += u32::from(turns.get() > 300);
        // Its leaf is cached.
        let seen = bounded::block_on(&owns, tree.get(key)).unwrap();
        while outcome.borrow().is_none() {
            go_on();
        }
        match (seen, outcome.take().unwrap()) {
            (Some(1), Ok(true)) => {
                done += 1;
                model.insert(key, 1);
            }
            (None, Err(Error::Owned { .. })) => refused += 1,
            other => panic!("after {rest} turns: {other:?}"),
        }
        bounded::block_on(&owns, tree.access().close()).unwrap();
        now_ns = owns.clock().now_ns();
    }
    assert!(done > 0 && refused > 0 && waited > 0, "{done} done, {refused} refused, {waited} waited for");
    drop(owns);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "changed meanwhile");
}

/// A claim that waits for another compute server's writer keeps no writer of its own compute server waiting.
#[test]
fn who_waits_to_become_the_owner_lets_its_own_writers_go_on() {
    let (_fabric, [owner, other], _) = scene(FabricProfile::Fast);
    let busy = owner.colleague();
    for (member, key) in [(&owner, 1), (&other, 2), (&busy, 3)] {
        assert!(member.worker.block_on(member.tree.insert(key, key)).unwrap());
    }
    let cache = new_cache();
    let own = || cache.own(&owner.worker, owner.tree.structure().clone(), KeyRange::ALL);
    let mut owning = pin!(own());
    for turn in 0..100 {
        while let Poll::Ready(owned) = owning.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            assert!(
                matches!(owned, Err(Error::HasUser { .. })),
                "the other one's writer was to be waited for: {owned:?}"
            );
            // It has waited for long enough: this thread had no core for a quarter of a second.
            owning.set(own());
        }
        owner.worker.turn();
        let mut inserting = pin!(busy.tree.insert(1000 * turn + 5, turn));
        for turns in 0.. {
            if let Poll::Ready(inserted) = inserting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                assert!(inserted.unwrap());
                break;
            }
            busy.worker.turn();
            owner.worker.turn();
            assert!(turns < 1_000_000, "{turn}: it waits for as long as the claim does");
        }
    }
}

/// A change that nobody drives to its end holds a claim up for a while, and not for ever.
#[test]
fn who_becomes_the_owner_does_not_wait_for_ever() {
    let (_fabric, [owner, _], _) = scene(FabricProfile::Fast);
    let mut refused = 0;
    for turns in 0..9 {
        let busy = owner.colleague();
        busy.worker.block_on(busy.tree.update(10, turns)).unwrap();
        let mut inserting = Box::pin(busy.tree.insert(10 * turns + 1, 1));
        for _ in 0..turns {
            if inserting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            busy.worker.turn();
        }
        match owner.try_own(&new_cache(), KeyRange::ALL) {
            Ok(tree) => owner.worker.block_on(tree.access().close()).unwrap(),
            Err(Error::HasUser { user, .. }) if user == owner.compute.owner() => refused += 1,
            Err(error) => panic!("{error}"),
        }
        // It comes to its end with its worker.
        drop(inserting);
        drop(busy);
        let tree = owner.try_own(&new_cache(), KeyRange::ALL).unwrap();
        owner.worker.block_on(tree.access().close()).unwrap();
    }
    assert!(refused > 0);
}
