//! Compute servers that are killed with SIGKILL with a leaf locked and half-written, in processes of their own, while others
//! go on. `killed.rs` kills them in the middle of anything.

use std::{collections::HashSet, path::Path, time::Duration};

use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    one_sided::{OneSided, Proof},
    ptr::RemotePtr,
    worker::Worker,
};
use farlink_structures::btree::{self, BTree, BTreeOptions, Report};
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile},
    bounded::{self, Bound, Watchdog},
    cluster,
    peer::{Peer, Role, Spec},
    raw::leaf_of,
    settings,
    subject::StructureName,
};

const TREE: &str = "faults";
const KEYS: u64 = 200;
/// Far more than it takes to find out that the owner of a lock is dead, and far less than for ever.
const FINDS_OUT: Bound = Bound { reads_max: 100, turns_max: 100_000 };
const LIMIT: Duration = Duration::from_secs(120);

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_farlink-stress"))
}

/// A cluster with a tree of the keys 0 to `KEYS`, each with itself as its value, and a compute server on it.
struct Scene {
    tree: BTree<OneSided<btree::Tree>>,
    worker: Worker,
    _compute: ComputeServer,
    fabric: Cluster,
}

impl Scene {
    fn new() -> Self {
        let fabric = Cluster::start(Backend::chosen_across_processes(), 2, 4 << 20, FabricProfile::Nasty).unwrap();
        let compute = cluster::join(&fabric, settings::seed("faults")).unwrap();
        let worker = compute.worker().unwrap();
        let options = BTreeOptions { page_bytes: 256, ..BTreeOptions::default() };
        let tree = worker.block_on(async {
            let tree = BTree::create(&worker, TREE, options).await?;
            tree.bulk_load((0..KEYS).map(|key| (key, key)), 0.6).await?;
            Ok::<_, Error>(tree)
        });
        Self { tree: tree.unwrap(), worker, _compute: compute, fabric }
    }

    /// A process that holds the leaf of `key`, half-written; and that leaf.
    fn hold(&self, key: u64) -> (Peer, RemotePtr) {
        let spec = Spec {
            place: self.fabric.place().unwrap().clone(),
            tree: TREE.into(),
            structure: StructureName::BTree,
            profile: FabricProfile::Nasty,
            three_waits: false,
            seed: 1,
            role: Role::Hold { key },
        };
        let peer = Peer::start(program(), &spec).unwrap();
        let page = RemotePtr::from_raw(peer.ready().page.unwrap()).unwrap();
        assert_eq!(page, self.leaf(key), "it holds another page");
        (peer, page)
    }

    fn leaf(&self, key: u64) -> RemotePtr {
        self.worker.block_on(leaf_of(self.tree.access(), key)).unwrap_or_else(|error| panic!("leaf of {key}: {error}"))
    }

    /// The keys of the leaf of `key`, and those of all others.
    fn split_keys(&self, key: u64) -> (Vec<u64>, Vec<u64>) {
        let page = self.leaf(key);
        (0..KEYS).partition(|&other| self.leaf(other) == page)
    }

    /// Runs an operation on the tree that must end soon.
    fn soon<T: 'static>(
        &self,
        operation: impl AsyncFnOnce(&BTree<OneSided<btree::Tree>>) -> Result<T, Error> + 'static,
    ) -> Result<T, Error> {
        let tree = self.tree.clone();
        bounded::run(&self.worker, FINDS_OUT, async move { operation(&tree).await })
            .unwrap_or_else(|endless| panic!("{endless}"))
    }

    /// That every operation that meets the page says that it is damaged, and by whom, and soon.
    fn expect_damage(&self, key: u64, page: RemotePtr, owner: u32) {
        let says = |what: &str, result: Result<(), Error>| match result {
            Err(Error::PageDamaged { page: named, owner: by }) if named == page && by.incarnation() == owner => {}
            other => panic!("{what} of {key} on page {page}, left behind by {owner}: {other:?}"),
        };
        says("get", self.soon(async move |tree| tree.get(key).await.map(drop)));
        says("insert", self.soon(async move |tree| tree.insert(key, 1).await.map(drop)));
        says("upsert", self.soon(async move |tree| tree.upsert(key, 1).await.map(drop)));
        says("update", self.soon(async move |tree| tree.update(key, 1).await.map(drop)));
        says("remove", self.soon(async move |tree| tree.remove(key).await.map(drop)));
        says("scan", self.soon(async move |tree| tree.scan(key, 1).await.map(drop)));
        says("scan from the left", self.soon(async |tree| tree.scan(0, usize::MAX).await.map(drop)));
        says("range", self.soon(async |tree| tree.range(..).descending().take(usize::MAX).await.map(drop)));
        says("len", self.soon(async |tree| tree.len().await.map(drop)));
    }

    /// That these keys can be read and written as if nothing had happened.
    fn expect_all_well(&self, keys: &[u64]) {
        for &key in keys {
            let outcome = self.soon(async move |tree| {
                assert_eq!(tree.get(key).await?, Some(key));
                assert_eq!(tree.update(key, !key).await?, Some(key));
                assert_eq!(tree.upsert(key, key).await?, Some(!key));
                assert_eq!(tree.scan(key, 1).await?, [(key, key)]);
                Ok(())
            });
            outcome.unwrap_or_else(|error| panic!("key {key}: {error}"));
        }
    }
}

/// Turns the worker until it has met the locked page so often that a time-out of any sort would be over.
fn wait_for_locked_reads(worker: &Worker, count: u64) {
    let before = worker.counters().locked_reads;
    while worker.counters().locked_reads - before < count {
        worker.turn();
    }
}

#[test]
fn a_page_of_a_dead_owner_is_named_and_everything_else_goes_on() {
    let _watchdog = Watchdog::start("a page of a dead owner", LIMIT);
    let scene = Scene::new();
    let key = 100;
    let (on_page, elsewhere) = scene.split_keys(key);
    let (peer, page) = scene.hold(key);
    let owner = peer.ready().owner;
    scene.expect_all_well(&elsewhere);
    peer.kill().unwrap();
    for &key in &on_page {
        scene.expect_damage(key, page, owner);
    }
    scene.expect_all_well(&elsewhere);
    // The tree grows and shrinks around the page.
    let around: Vec<u64> = (1000..3000).collect();
    let outcome = scene.worker.block_on(async {
        for &key in &around {
            assert!(scene.tree.insert(key, key).await?);
        }
        for &key in &around {
            assert_eq!(scene.tree.remove(key).await?, Some(key));
        }
        Ok::<_, Error>(())
    });
    outcome.unwrap();
    scene.expect_all_well(&elsewhere);
    let report = cluster::check_tree(&scene.fabric, TREE).unwrap();
    assert_eq!(unreadable(&report), HashSet::from([page]), "{report:?}");
    assert_eq!(report.problem_count, 1, "{report:?}");
    assert!(report.problems[0].what.contains("died"), "{report:?}");
}

#[test]
fn a_live_owner_is_waited_for() {
    let _watchdog = Watchdog::start("a live owner", LIMIT);
    let scene = Scene::new();
    let key = 100;
    let (mut peer, page) = scene.hold(key);
    let tree = scene.tree.clone();
    let waiting = scene.worker.spawn(async move { Ok::<_, Error>((tree.get(key).await?, tree.update(key, 7).await?)) });
    let tree = scene.tree.clone();
    let scan = scene.worker.spawn(async move { tree.scan(0, usize::MAX).await });
    // Both wait, and ask again and again whether the owner lives.
    wait_for_locked_reads(&scene.worker, 2000);
    assert!(peer.is_running());
    peer.go().unwrap();
    peer.finish().unwrap();
    let (read, replaced) = scene.worker.block_on(waiting).unwrap();
    assert_eq!((read, replaced), (Some(key), Some(key)));
    assert_eq!(scene.worker.block_on(scan).unwrap().len() as u64, KEYS);
    assert_eq!(scene.leaf(key), page);
    assert!(cluster::check_tree(&scene.fabric, TREE).unwrap().is_clean());
}

/// For no longer than one wants to; and what it had begun, it ends when it goes on.
#[test]
fn a_stopped_owner_is_named_when_the_wait_is_over() {
    let _watchdog = Watchdog::start("a stopped owner", LIMIT);
    let scene = Scene::new();
    let key = 100;
    let (mut peer, page) = scene.hold(key);
    let owner = peer.ready().owner;
    peer.pause();
    let fabric = scene.fabric.place().unwrap().open(FabricProfile::Fast).unwrap();
    let waited = Duration::from_millis(20);
    let compute =
        ComputeServer::join(fabric, ComputeOptions { lock_wait: Some(waited), ..ComputeOptions::default() }).unwrap();
    let worker = compute.worker().unwrap();
    let tree = worker.block_on(BTree::open(&worker, TREE, Proof::Checksum)).unwrap();
    let says = |what: &str, outcome: Result<(), Error>| match outcome {
        Err(Error::OwnerStalled { page: named, owner: by, waited: so_long }) => {
            assert_eq!((named, by.incarnation(), so_long), (page, owner, waited), "{what}");
        }
        other => panic!("{what}: {other:?}"),
    };
    says("get", worker.block_on(tree.get(key)).map(drop));
    says("update", worker.block_on(tree.update(key, 7)).map(drop));
    says("scan", worker.block_on(tree.scan(0, usize::MAX)).map(drop));
    peer.resume();
    peer.go().unwrap();
    peer.finish().unwrap();
    assert_eq!(worker.block_on(tree.update(key, 7)).unwrap(), Some(key));
    assert!(cluster::check_tree(&scene.fabric, TREE).unwrap().is_clean());
}

#[test]
fn who_waits_for_an_owner_that_dies_is_told() {
    let _watchdog = Watchdog::start("an owner that dies", LIMIT);
    let scene = Scene::new();
    let key = 100;
    let (peer, page) = scene.hold(key);
    let owner = peer.ready().owner;
    let tree = scene.tree.clone();
    let waiting = scene.worker.spawn(async move { tree.update(key, 7).await });
    wait_for_locked_reads(&scene.worker, 1000);
    peer.kill().unwrap();
    match scene.worker.block_on(waiting) {
        Err(Error::PageDamaged { page: named, owner: by }) => assert_eq!((named, by.incarnation()), (page, owner)),
        other => panic!("{other:?}"),
    }
    scene.expect_damage(key, page, owner);
}

/// The pages of a tree that its checker could not read.
fn unreadable(report: &Report) -> HashSet<RemotePtr> {
    let problems = report.problems.iter().filter(|problem| problem.what.starts_with("cannot be read"));
    problems.map(|problem| problem.page).collect()
}
