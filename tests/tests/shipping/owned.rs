//! Operations from a page that a compute server owns: what is checked, what comes back, what a lost server leaves.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use farlink_offload::ship::{Answer, Decline, From, SHIP, ShipOptions, ShipServer, Shipped, Shipper};
use farlink_runtime::{
    access::{Link, Operation, PageRef, RemotePtr},
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    fabric::{Error as FabricError, listener::ListenOptions, mem::MemOptions},
    lock::LockWord,
    messaging::{Error as MessagingError, Kind, Priority, Refusal},
    one_sided::{OneSided, Proof},
    operation::Code,
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    map::{
        KeyRange, Map, PutMode, ScanPart,
        ops::{Get, Put, Remove, Scan},
    },
    skiplist::List,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY, WEAK},
    fleet::{self, Fleet},
    here::{self, Here},
    raw,
};

const KEYS: u64 = 500;
const PAGE_BYTES: usize = 256;

/// A tree of the keys below [`KEYS`], each its own value, all on server 0, and a way to ship operations on it.
struct Scene {
    tree: BTree<OneSided<Tree>>,
    shipper: Shipper<Tree>,
}

impl Scene {
    async fn new(worker: &Worker, fill: f64, placement: PlacementPolicy) -> Self {
        let root = ServerId::new(0);
        let options = BTreeOptions { page_bytes: PAGE_BYTES, placement, root, ..BTreeOptions::default() };
        let tree = BTree::create(worker, "owned", options).await.unwrap();
        tree.bulk_load((0..KEYS).map(|key| (key, key)), fill).await.unwrap();
        let shipper = Shipper::new(worker, tree.structure().clone());
        Self { tree, shipper }
    }

    async fn page(&self, key: u64, level: u8) -> Link {
        raw::page_of(self.tree.access(), key, level).await.unwrap()
    }

    async fn try_ship<O: Operation<Plugin = Tree>>(
        &self,
        operation: &O,
        page: Link,
        level: u8,
        owned: KeyRange,
    ) -> Result<Answer<O::Output>, Error> {
        self.shipper.ship(operation, From::Page { page, level, owned: &owned }).await
    }

    /// From the page of `level` where `key` belongs.
    async fn ship<O: Operation<Plugin = Tree>>(&self, operation: &O, key: u64, level: u8) -> Answer<O::Output> {
        self.try_ship(operation, self.page(key, level).await, level, KeyRange::ALL).await.unwrap()
    }

    async fn is_unchanged(&self) {
        let all: Vec<_> = (0..KEYS).map(|key| (key, key)).collect();
        assert_eq!(self.tree.range(..).take(usize::MAX).await.unwrap(), all);
        assert!(self.tree.check().await.unwrap().is_clean());
    }
}

fn get(key: u64) -> Get<Tree> {
    Get { key, of: PhantomData }
}

fn put(key: u64, value: u64, mode: PutMode) -> Put<Tree> {
    Put { key, value, mode, of: PhantomData }
}

fn remove(key: u64) -> Remove<Tree> {
    Remove { key, of: PhantomData }
}

fn done<T>(answer: Answer<T>) -> Shipped<T> {
    match answer {
        Answer::Done(shipped) => shipped,
        Answer::Declined(why) => panic!("declined: {why:?}"),
        Answer::GoOn(page) => panic!("to go on at {page:?}"),
    }
}

fn declined<T: std::fmt::Debug>(answer: Answer<T>) -> Decline {
    match answer {
        Answer::Done(shipped) => panic!("done: {shipped:?}"),
        Answer::Declined(why) => why,
        Answer::GoOn(page) => panic!("to go on at {page:?}"),
    }
}

fn with<F: AsyncFnOnce(&Worker, &Fleet)>(options: MemOptions, f: F) {
    let _watch = Watchdog::start("owned", Duration::from_secs(100));
    let fleet = Fleet::start(2, 8 << 20, 1, options).unwrap();
    let compute = cluster::join(&fleet.fabric(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(f(&worker, &fleet));
}

#[test]
fn operations_run_from_a_page_and_name_what_they_change() {
    for options in [FAST, NASTY, WEAK] {
        with(options, async |worker, _| {
            let scene = Scene::new(worker, 0.7, PlacementPolicy::OneServer).await;
            let leaf = scene.page(77, 0).await;
            let mut value = 77;
            for level in [0, 1, 2] {
                let found = done(scene.ship(&get(77), 77, level).await);
                assert_eq!((found.output, found.pages_read), (Some(value), u32::from(level) + 1));
                value = level.into();
                assert!(found.changed.is_empty());
                let before = done(scene.ship(&put(77, value, PutMode::Upsert), 77, level).await);
                assert_eq!(before.changed, [leaf]);
                assert_eq!(scene.tree.get(77).await.unwrap(), Some(value));
            }
            assert_eq!(done(scene.ship(&remove(77), 77, 1).await).output, Some(2));
            assert_eq!(scene.tree.get(77).await.unwrap(), None);
            assert_eq!(done(scene.ship(&put(77, 77, PutMode::Insert), 77, 1).await).output, None);
            scene.is_unchanged().await;
        });
    }
}

/// Beyond the page where it began a scan does not look: the owner may have newer pages there.
#[test]
fn a_scan_ends_with_the_page_where_it_began() {
    with(FAST, async |worker, _| {
        let scene = Scene::new(worker, 0.7, PlacementPolicy::OneServer).await;
        for descending in [false, true] {
            let scan = Scan::<Tree> { low: 40, high: 400, limit: 1000, descending, of: PhantomData };
            let key = if descending { 400 } else { 40 };
            let ScanPart { entries, rest, .. } = done(scene.ship(&scan, key, 1).await).output;
            let rest = rest.expect("one page above the leaves does not hold all that");
            let count = rest.abs_diff(key);
            let expected = |index: u64| if descending { key - index } else { key + index };
            assert!(count > 8 && entries == (0..count).map(|i| (expected(i), expected(i))).collect::<Vec<_>>());
        }
    });
}

#[test]
fn what_changes_the_structure_comes_back_without_effect() {
    for options in [FAST, WEAK] {
        with(options, async |worker, _| {
            let scene = Scene::new(worker, 1.0, PlacementPolicy::OneServer).await;
            scene.tree.remove(KEYS - 1).await.unwrap();
            scene.tree.insert(KEYS - 1, KEYS - 1).await.unwrap();
            // Full pages, and a key between two of theirs: there is none below KEYS, so at the end of the last leaf.
            let mut key = KEYS;
            let full = loop {
                match scene.ship(&put(key, key, PutMode::Insert), key, 1).await {
                    Answer::Done(_) => key += 1,
                    answer => break declined(answer),
                }
                assert!(key < KEYS + 20, "a page of 12 entries takes all");
            };
            assert_eq!(full, Decline::Restructures);
            assert_eq!(scene.tree.get(key).await.unwrap(), None);
            for key in KEYS..key {
                scene.tree.remove(key).await.unwrap();
            }
            // A leaf that becomes too empty looks for a neighbour.
            let low = scene.tree.leaf_low(200).await.unwrap();
            let mut removed = low;
            let too_empty = loop {
                match scene.ship(&remove(removed), removed, 1).await {
                    Answer::Done(shipped) => assert_eq!(shipped.output, Some(removed)),
                    answer => break declined(answer),
                }
                removed += 1;
            };
            assert_eq!((too_empty, removed - low), (Decline::Restructures, 9));
            for key in low..removed {
                assert_eq!(done(scene.ship(&put(key, key, PutMode::Insert), key, 0).await).output, None);
            }
            scene.is_unchanged().await;
        });
    }
}

/// A memory server's operation waits for a lock for no longer than it is told to, and names whose it is.
#[test]
fn an_operation_names_whom_it_has_waited_for() {
    let _watch = Watchdog::start("a lock is waited for", Duration::from_secs(100));
    let cluster = here::start(1, 8 << 20, FAST).unwrap();
    let (fabric, joining) = (cluster.fabric(), cluster.fabric());
    let server = ServerId::new(0).unwrap();
    let listener = cluster.listen(server, &ListenOptions { endpoints: 1, ..ListenOptions::default() }).unwrap();
    let options = ComputeOptions { lock_wait: Some(Duration::from_millis(20)), ..ComputeOptions::default() };
    let join = move || Ok(Arc::new(ComputeServer::join(Arc::clone(&joining), options)?));
    let _serving = fleet::ship_at(listener, cluster.memory(server).unwrap(), fleet::registry(), join).unwrap();
    let holder = cluster::join(&fabric, 1).unwrap();
    let compute = cluster::join(&fabric, 2).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let scene = Scene::new(&worker, 0.7, PlacementPolicy::OneServer).await;
        let (page, _) = scene.page(200, 0).await.remote().unwrap();
        // As one that was stopped in a change.
        let found = worker.load(page).await.unwrap();
        let locked = LockWord::from_word(found).locked_by(holder.owner()).word();
        assert_eq!(worker.compare_swap(page, found, locked).await.unwrap(), found);
        match scene.shipper.ship_whole(&put(200, 7, PutMode::Update)).await {
            Err(Error::OnServer { why, .. }) => {
                assert!(why.contains(&holder.owner().to_string()) && why.contains("20 ms"), "{why}");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(worker.compare_swap(page, locked, found).await.unwrap(), locked);
        assert_eq!(scene.shipper.ship_whole(&put(200, 7, PutMode::Update)).await.unwrap(), Some(200));
    });
}

#[test]
fn the_start_page_is_checked() {
    with(FAST, async |worker, fleet| {
        let scene = Scene::new(worker, 0.7, PlacementPolicy::OneServer).await;
        let other = BTree::create(worker, "other", BTreeOptions { page_bytes: PAGE_BYTES, ..BTreeOptions::default() });
        let other = other.await.unwrap().structure().root_link();
        let (leaf, far) = (scene.page(100, 0).await, scene.page(400, 0).await);
        let (at, class) = leaf.remote().unwrap();
        let low = scene.tree.leaf_low(100).await.unwrap();
        let up_to = |high| KeyRange { low: 0, high: Some(high) };
        let not_there = [
            (leaf, 1, KeyRange::ALL, "another level"),
            (far, 0, KeyRange::ALL, "another key"),
            (leaf, 0, up_to(low), "outside what is owned"),
            (leaf, 0, up_to(low + 1), "partly outside what is owned"),
            (scene.tree.structure().root_link(), 0, KeyRange::ALL, "the root, sent as a leaf"),
            (Link::to(at.add(64).unwrap(), class), 0, KeyRange::ALL, "the middle of a page"),
            (Link::to(RemotePtr::new(at.server(), 1 << 40).unwrap(), class), 0, KeyRange::ALL, "outside the region"),
            (other, 0, KeyRange::ALL, "another structure"),
        ];
        for (page, level, owned, what) in not_there {
            for key in [100, u64::MAX] {
                let answer = scene.try_ship(&put(key, 1, PutMode::Upsert), page, level, owned).await;
                match answer {
                    Ok(Answer::Declined(why)) => assert_eq!(why, Decline::NotThere, "{what}"),
                    Err(Error::OnServer { .. }) => {}
                    answer => panic!("{what}: {answer:?}"),
                }
            }
        }
        scene.is_unchanged().await;
        // A page that was freed.
        for key in 0..KEYS {
            scene.tree.remove(key).await.unwrap();
        }
        let freed = scene.try_ship(&get(100), leaf, 0, KeyRange::ALL).await.unwrap();
        assert_eq!(declined(freed), Decline::NotThere);
        assert!(fleet.counts().declined > 8);
    });
}

/// Leaves in turn on two servers: what is not where the operation runs is left to the sender.
#[test]
fn a_page_of_another_server_is_not_followed() {
    with(FAST, async |worker, _| {
        let scene = Scene::new(worker, 0.7, PlacementPolicy::Leaves).await;
        let (mut here, mut elsewhere) = (0, 0);
        for key in (0..KEYS).step_by(8) {
            match scene.ship(&get(key), key, 1).await {
                Answer::Done(shipped) => {
                    assert_eq!(shipped.output, Some(key));
                    here += 1;
                }
                answer => {
                    assert_eq!(declined(answer), Decline::Leaves);
                    elsewhere += 1;
                }
            }
            // The leaf itself can be on any server.
            assert_eq!(done(scene.ship(&get(key), key, 0).await).output, Some(key));
        }
        assert!(here > 10 && elsewhere > 10, "{here} here, {elsewhere} elsewhere");
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_others_are_served() {
    with(FAST, async |worker, _| {
        let scene = Scene::new(worker, 0.7, PlacementPolicy::OneServer).await;
        let channel = worker.channel(ServerId::new(0).unwrap()).await.unwrap();
        let id = u64::from(scene.tree.structure().id.0);
        let (tree_get, list_get) = (Code::of::<Get<Tree>>().0, Code::of::<Get<List>>().0);
        let id = id << 32;
        let requests: [(Kind, &[u64], Refusal); 9] = [
            (SHIP, &[], Refusal::Malformed),
            (SHIP, &[tree_get, id], Refusal::Malformed),
            (SHIP, &[tree_get, id, 0], Refusal::Malformed),
            (SHIP, &[tree_get, id, 0, 7, 7], Refusal::Malformed),
            (SHIP, &[tree_get, id, u64::MAX, 7], Refusal::Malformed),
            (SHIP, &[tree_get ^ 1, id, 0, 7], Refusal::UnknownKind),
            (SHIP, &[tree_get, 99 << 32, 0, 7], Refusal::UnknownKind),
            (SHIP, &[list_get, id, 0, 7], Refusal::UnknownKind),
            (Kind(9), &[tree_get, id, 0, 7], Refusal::UnknownKind),
        ];
        for (kind, words, expected) in requests {
            let refused = channel.request_words(kind, words, Priority::Latency).await.map(drop);
            assert!(
                matches!(refused, Err(MessagingError::Refused { why, .. }) if why == expected),
                "{words:x?}: {refused:?}"
            );
        }
        let reply = channel.request_words(SHIP, &[tree_get, id, 0, 7], Priority::Latency).await.unwrap();
        assert_eq!(reply.words()[1..], [0, 1, 7]);
        scene.is_unchanged().await;
    });
}

/// What is beside the page where an operation begins may be newer in the sender's cache.
#[test]
fn a_structure_that_goes_sideways_is_left_to_the_sender() {
    with(NASTY, async |worker, _| {
        let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: None };
        let list = Map::<List, OneSided<List>>::make_at(worker, "list", 64, Proof::Checksum, placement).await.unwrap();
        let list_on_server = Map::<List, _>::over(fleet::in_one_part(worker, list.structure().clone()).unwrap());
        for key in 0..KEYS {
            list_on_server.insert(key, key).await.unwrap();
        }
        let shipper = Shipper::new(worker, list.structure().clone());
        let root = list.structure().root_link();
        let level = list.access().read_page(root).await.unwrap().level();
        let update = Put::<List> { key: KEYS - 1, value: 0, mode: PutMode::Update, of: PhantomData };
        let from = From::Page { page: root, level, owned: &KeyRange::ALL };
        assert_eq!(declined(shipper.ship(&update, from).await.unwrap()), Decline::Leaves);
        assert_eq!(list.get(KEYS - 1).await.unwrap(), Some(KEYS - 1));
        assert!(list.check().await.unwrap().is_clean());
    });
}

/// A memory server that never answers, and who ships to it.
fn stalled() -> (Arc<dyn Here>, Vec<ShipServer>, ComputeServer) {
    let cluster = here::start(1, 8 << 20, FAST).unwrap();
    let servers = fleet::start_all(&cluster, 1, &fleet::silent()).unwrap();
    let compute = cluster::join(&cluster.fabric(), 1).unwrap();
    (cluster, servers, compute)
}

/// Held back by a server, which is then lost.
#[test]
fn a_server_that_is_lost_leaves_the_outcome_unknown() {
    let _watch = Watchdog::start("lost", Duration::from_secs(100));
    let (_cluster, servers, compute) = stalled();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let scene = Scene::new(&worker, 0.7, PlacementPolicy::OneServer).await;
        let shipper = scene.shipper.clone();
        let (page, owned) = (scene.page(7, 0).await, KeyRange::ALL);
        let lost = worker.spawn(async move {
            let from = From::Page { page, level: 0, owned: &owned };
            shipper.ship(&put(7, 70, PutMode::Upsert), from).await
        });
        while servers[0].counts().done == 0 {
            worker.yield_now().await;
        }
        drop(servers);
        assert!(matches!(lost.await, Err(Error::Messaging(MessagingError::OutcomeUnknown { .. }))));
        // It was carried out, in fact.
        assert_eq!(scene.tree.get(7).await.unwrap(), Some(70));
        let missing = scene.try_ship(&get(7), page, 0, owned).await;
        assert!(matches!(missing, Err(Error::Fabric(FabricError::ServerMissing { .. }))), "{missing:?}");
    });
}

fn ship_whole<O: Operation<Plugin = Tree>>(
    shipper: &Shipper<Tree>,
    operation: O,
) -> impl Future<Output = Result<O::Output, Error>> + use<O> {
    let shipper = shipper.clone();
    async move { shipper.ship_whole(&operation).await }
}

/// As above, and another memory server takes its place.
#[test]
fn what_only_reads_is_sent_again_when_another_server_takes_over() {
    let _watch = Watchdog::start("taken over", Duration::from_secs(100));
    let (cluster, servers, compute) = stalled();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let scene = Scene::new(&worker, 0.7, PlacementPolicy::OneServer).await;
        let scan = Scan::<Tree> { low: 10, high: 400, limit: 20, descending: false, of: PhantomData };
        let put = worker.spawn(ship_whole(&scene.shipper, put(7, 70, PutMode::Upsert)));
        let removed = worker.spawn(ship_whole(&scene.shipper, remove(8)));
        let got = worker.spawn(ship_whole(&scene.shipper, get(5)));
        let scanned = worker.spawn(ship_whole(&scene.shipper, scan));
        while servers[0].counts().done < 4 {
            worker.yield_now().await;
        }
        drop(servers);
        let _servers = fleet::start_all(&cluster, 1, &ShipOptions::default()).unwrap();
        for lost in [put.await, removed.await] {
            assert!(matches!(lost, Err(Error::Messaging(MessagingError::OutcomeUnknown { .. }))), "{lost:?}");
        }
        assert_eq!(got.await.unwrap(), Some(5));
        assert_eq!(
            scanned.await.unwrap(),
            ScanPart { entries: (10..30).map(|key| (key, key)).collect(), rest: Some(30), descending: false }
        );
        // Both were carried out, once.
        assert_eq!((scene.tree.get(7).await.unwrap(), scene.tree.get(8).await.unwrap()), (Some(70), None));
    });
}
