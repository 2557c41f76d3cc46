//! Compute servers that are killed with SIGKILL, in processes of their own, while others go on.
//!
//! First on purpose: a process dies with a leaf locked and half-written. Then at random, in the middle of a mixed workload:
//! `FARLINK_FAULT_ROUNDS` says how often.

use std::{
    collections::HashSet,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_runtime::{
    compute::ComputeServer,
    error::Error,
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    ptr::RemotePtr,
    worker::Worker,
};
use farlink_structures::btree::{BTree, BTreeOptions, Report};
use farlink_tests::{
    backend::{Backend, Cluster, Manners},
    bounded::{self, Bound, Watchdog},
    cluster,
    history::{FILE_EXTENSION, Flush, History, Op, Outcome, Recorder},
    linear,
    patience::Awaited,
    peer::{Peer, Role, Spec, Tale, Work},
    raw::leaf_of,
    reach::Reach,
    scans, settings,
    subject::StructureName,
    workload::{Mix, spread_keys},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

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
    tree: BTree<OneSided>,
    worker: Worker,
    _compute: ComputeServer,
    fabric: Cluster,
}

impl Scene {
    fn new() -> Self {
        let fabric = Cluster::start(Backend::chosen_across_processes(), 2, 4 << 20, Manners::Nasty).unwrap();
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
            manners: Manners::Nasty,
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
        operation: impl AsyncFnOnce(&BTree<OneSided>) -> Result<T, Error> + 'static,
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

/// One round: some processes work on a tree, one is killed somewhere in the middle, the others go on and leave. Returns
/// what the survivors did, and what is left.
fn kill_one(seed: u64) -> (Tale, Report) {
    const PROCESSES: u32 = 3;
    const WORKERS: u32 = 2;
    let mut rng = StdRng::seed_from_u64(seed);
    let histories = tempfile::tempdir().unwrap();
    let fabric = Cluster::start(Backend::chosen_across_processes(), 2, 8 << 20, Manners::Nasty).unwrap();
    cluster::create_tree(&fabric, TREE, BTreeOptions { page_bytes: 256, ..BTreeOptions::default() }).unwrap();
    // Few, so that locks are held and waited for all the time.
    let keys = 60;
    let work = |process: u32| Work {
        histories: histories.path().to_owned(),
        first_client: process * WORKERS,
        workers: WORKERS,
        in_flight: 24,
        keys,
        scan_limit_max: 20,
        drop_one_in: 0,
        tide_ns: 0,
        seconds: 60.0,
        awaits: Awaited::default(),
        deadly: true,
        failures_expected: false,
        mix: Mix::ALL,
        reach: Reach::OneSided,
    };
    let start = |process: u32| {
        let spec = Spec {
            place: fabric.place().unwrap().clone(),
            tree: TREE.into(),
            structure: StructureName::BTree,
            manners: Manners::Nasty,
            three_waits: false,
            seed,
            role: Role::Work(work(process)),
        };
        Peer::start(program(), &spec).unwrap()
    };
    let mut peers: Vec<Peer> = (0..PROCESSES).map(start).collect();
    peers.iter_mut().for_each(|peer| peer.go().unwrap());
    // Progress is measured in what has been recorded: 64 bytes for each invocation and for each end.
    let victim = rng.random_range(0..PROCESSES);
    wait_for_records(histories.path(), 64 * rng.random_range(2_000..20_000), &mut peers);
    peers.remove(victim as usize).kill().unwrap();
    let survivors = recorded_bytes(histories.path());
    wait_for_records(histories.path(), survivors + 64 * 4000, &mut peers);
    let mut tale = Tale::default();
    peers.iter_mut().for_each(Peer::stop);
    peers.into_iter().for_each(|peer| tale.add(&peer.finish().unwrap()));

    let mut history = History::read_dir(histories.path()).unwrap();
    history.merge(read_all(&fabric, keys, PROCESSES * WORKERS));
    let linear = linear::check(&history).unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={seed}: {error}"));
    let scanned = scans::check(&history).unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={seed}: {error}"));
    let report = cluster::check_tree(&fabric, TREE);
    let report = report.unwrap_or_else(|error| match error {
        // It may have been the root.
        Error::PageDamaged { .. } => Report::default(),
        error => panic!("FARLINK_TEST_SEED={seed}: {error}"),
    });
    println!(
        "killed process {victim}: {linear:?}, {scanned:?}; survivors met damaged pages {} times in {} operations; {} pages \
         left damaged, {} leaked, {} held",
        tale.damaged,
        tale.operations,
        unreadable(&report).len(),
        report.audit.leaked.len(),
        report.audit.held,
    );
    (tale, report)
}

fn recorded_bytes(histories: &Path) -> u64 {
    let files = fs::read_dir(histories).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|entry| entry.path().extension().is_some_and(|extension| extension == FILE_EXTENSION));
    files.map(|entry| entry.metadata().unwrap().len()).sum()
}

fn wait_for_records(histories: &Path, bytes: u64, peers: &mut [Peer]) {
    let begun = Instant::now();
    while recorded_bytes(histories) < bytes {
        assert!(peers.iter_mut().all(|peer| peer.is_running()), "a process ended by itself");
        assert!(begun.elapsed() < LIMIT, "the processes make no progress");
        std::thread::yield_now();
    }
}

/// A history in which one more client gets every key that can still be read.
fn read_all(fabric: &Arc<dyn Fabric>, keys: usize, client: u32) -> History {
    let recorder = Recorder::new(Vec::new(), client, Flush::WhenFull).unwrap();
    cluster::with_worker(fabric, |worker| {
        worker.block_on(async {
            let tree = BTree::<OneSided>::open(worker, TREE, Proof::Checksum).await?;
            for key in spread_keys(keys) {
                let ticket = recorder.begin(Op::Get { key }).unwrap();
                let outcome = match tree.get(key).await {
                    Ok(value) => Outcome::Value(value),
                    Err(Error::PageDamaged { .. }) => Outcome::Unknown,
                    Err(error) => return Err(error),
                };
                recorder.end(ticket, outcome).unwrap();
            }
            Ok::<_, Error>(())
        })
    })
    .unwrap();
    History::decode(&recorder.finish().unwrap()).unwrap()
}

#[test]
fn killed_in_the_middle_of_anything() {
    let seed = settings::seed("killed_in_the_middle_of_anything");
    let rounds: u64 = settings::from_env("FARLINK_FAULT_ROUNDS", 16);
    for round in 0..rounds {
        let _watchdog = Watchdog::start("killed in the middle of anything", LIMIT);
        let (tale, report) = kill_one(seed.wrapping_add(round));
        assert!(tale.operations > 0);
        let damaged = unreadable(&report);
        if damaged.is_empty() && report.height() > 0 {
            assert_eq!(report.problem_count, 0, "nothing is damaged, and yet: {report:?}");
        }
        if tale.damaged > 0 {
            assert!(report.height() == 0 || !damaged.is_empty(), "damage was met and is not there: {report:?}");
        }
        let others = report.problems.iter().filter(|problem| problem.what.starts_with("cannot be read"));
        let others: Vec<_> = others.filter(|problem| !problem.what.contains("died")).collect();
        assert!(others.is_empty(), "pages are unreadable for another reason than their owner's death: {others:?}");
        assert!(report.audit.reached_but_free.is_empty(), "{report:?}");
    }
}
