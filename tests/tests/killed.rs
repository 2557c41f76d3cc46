//! Compute servers that are killed with SIGKILL in the middle of anything, in processes of their own, while others go on.
//!
//! However the tree is reached, the others' history is linearizable, and the tree is whole: what the killed one was about to change,
//! others have finished or undone. What an owner has not written is lost with it. `FARLINK_FAULT_ROUNDS` says how often somebody is
//! killed.

use std::{collections::HashSet, fs, path::Path, sync::Arc, time::Duration};

use farlink_runtime::{
    catalog,
    error::Error,
    fabric::Fabric,
    one_sided::{
        OneSided, Proof,
        ownership::{self, Waits},
    },
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::Report,
};
use farlink_tests::{
    access_under_test::{AccessUnderTest, Part, ShipChoice, key_range},
    backend::{Backend, Cluster, FabricProfile},
    bounded::{self, Bound, Watchdog},
    cluster,
    drive::Tides,
    history::{FILE_EXTENSION, Flush, History, Op, Outcome, Recorder},
    linear,
    peer::{Peer, PeerReport, Role, Spec, Work},
    scans, settings,
    stress::{self, AccessMode, Awaits, Options, SERVER_BYTES, TREE},
    subject::StructureName,
    workload::{clustered_keys, spread_keys},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const LIMIT: Duration = Duration::from_secs(120);
/// More than an operation takes that looks at a stale page until it gives up.
const ENDS: Bound = Bound { reads_max: 1_500_000, turns_max: 20_000_000 };
/// Keys of a killed owner that are looked at.
const LOOKED_AT: usize = 200;

/// What is left when one of three has been killed and the others have gone on and left.
struct Left {
    seed: u64,
    histories: tempfile::TempDir,
    cluster: Cluster,
    fabric: Arc<dyn Fabric>,
    options: Options,
    works: Vec<Work>,
    victim: usize,
    peer_report: PeerReport,
}

/// Without a cache keys are few, so that locks are held and waited for all the time.
fn options(access: AccessMode, seed: u64) -> Options {
    let options = Options {
        backend: Backend::chosen_across_processes(),
        // Until it is stopped.
        seconds: 3600.0,
        processes: 3,
        workers: 2,
        in_flight: 24,
        keys: 60,
        scan_limit_max: 20,
        servers: 2,
        profile: FabricProfile::Nasty,
        access,
        awaits: Awaits::Nothing,
        seed,
        ..Options::default()
    };
    match access {
        AccessMode::Cached => Options { in_flight: 4, keys: 20_000, cache_bytes: Some(64 << 10), ..options },
        _ => options,
    }
}

impl Left {
    fn by(options: Options) -> Self {
        let seed = options.seed;
        let mut rng = StdRng::seed_from_u64(seed);
        let histories = tempfile::tempdir().unwrap();
        let (servers, threads) = (options.servers, options.server_threads());
        let cluster = Cluster::start_with(options.backend, servers, SERVER_BYTES, options.profile, threads).unwrap();
        let fabric = cluster.place().unwrap().open(FabricProfile::Fast).unwrap();
        let mut works = stress::prepare::<Tree>(&fabric, &options, histories.path()).unwrap();
        for work in &mut works {
            work.deadly = true;
            // Trees of owners are large: they shrink and grow, so that pages merge and split.
            if options.access != AccessMode::Cached {
                work.tides = Tides::NONE;
            }
        }
        let start = |work: &Work| {
            let spec = Spec {
                place: cluster.place().unwrap().clone(),
                tree: TREE.into(),
                structure: StructureName::BTree,
                profile: options.profile,
                three_waits: false,
                seed,
                role: Role::Work(work.clone()),
            };
            Peer::start(Path::new(env!("CARGO_BIN_EXE_farlink-stress")), &spec).unwrap()
        };
        let mut peers: Vec<Peer> = works.iter().map(start).collect();
        peers.iter_mut().for_each(|peer| peer.go().unwrap());
        // Progress is measured in what has been recorded: 64 bytes for each invocation and for each end.
        let victim = rng.random_range(0..peers.len());
        wait_for_records(histories.path(), 64 * rng.random_range(2_000..20_000), &mut peers);
        peers.remove(victim).kill().unwrap();
        let survivors = recorded_bytes(histories.path());
        wait_for_records(histories.path(), survivors + 64 * 4000, &mut peers);
        let mut peer_report = PeerReport::default();
        peers.iter_mut().for_each(Peer::stop);
        for peer in peers {
            let finished = peer.finish().unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={seed}: {error:#}"));
            peer_report.add(&finished);
        }
        assert!(peer_report.operations > 0);
        let mut left = Self { seed, histories, cluster, fabric, options, works, victim, peer_report };
        left.cluster.stop_shipping().unwrap();
        left
    }

    /// That what happened to the keys of a part, and what is there now, can have happened in some order.
    fn expect_linearizable(&self, part: Part, keys: &[u64]) {
        let mut history = History::read_dir(self.histories.path()).unwrap();
        history.merge(self.read(keys));
        history.set_initial(self.options.initial());
        let history = if part == Part::ALL { history } else { history.part(part.low, part.high) };
        let (seed, victim) = (self.seed, self.victim);
        let linear = linear::check(&history).unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={seed}: {error}"));
        let scanned = scans::check(&history).unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={seed}: {error}"));
        println!("killed process {victim} with seed {seed}: {linear:?}, {scanned:?}");
        let is_checked = scanned.scans > 0 && scanned.entries > 0 && scanned.certainly_present > 0;
        assert!(is_checked, "FARLINK_TEST_SEED={seed}: nothing of scans was checked: {scanned:?}");
    }

    /// A history in which one more client gets keys.
    fn read(&self, keys: &[u64]) -> History {
        let recorder =
            Recorder::new(Vec::new(), self.options.processes * self.options.workers, Flush::WhenFull).unwrap();
        let get_all = async |tree: BTree<OneSided<Tree>>| {
            for &key in keys {
                let ticket = recorder.begin(Op::Get { key }).unwrap();
                let outcome = match tree.get(key).await {
                    Ok(value) => Outcome::Value(value),
                    Err(error) => return Err(error),
                };
                recorder.end(ticket, outcome).unwrap();
            }
            Ok::<_, Error>(())
        };
        cluster::with_worker(&self.fabric, |worker| {
            worker.block_on(async { get_all(BTree::open(worker, TREE, Proof::Checksum).await?).await })
        })
        .unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={}: {error}", self.seed));
        History::decode(&recorder.finish().unwrap()).unwrap()
    }

    fn check(&self) -> Result<Report, Error> {
        cluster::check_tree(&self.fabric, TREE)
    }
}

fn recorded_bytes(histories: &Path) -> u64 {
    let files = fs::read_dir(histories).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|entry| entry.path().extension().is_some_and(|extension| extension == FILE_EXTENSION));
    files.map(|entry| entry.metadata().unwrap().len()).sum()
}

fn wait_for_records(histories: &Path, bytes: u64, peers: &mut [Peer]) {
    while recorded_bytes(histories) < bytes {
        assert!(peers.iter_mut().all(|peer| peer.is_running()), "a process ended by itself");
        std::thread::yield_now();
    }
}

/// Somebody is killed again and again; `expect` looks at what is left.
fn kill(name: &str, options: impl Fn(u64) -> Options, expect: impl Fn(&Left)) {
    let seed = settings::seed(name);
    let rounds: u64 = settings::from_env("FARLINK_FAULT_ROUNDS", 1);
    for round in 0..rounds {
        let _watchdog = Watchdog::start(name, LIMIT);
        expect(&Left::by(options(seed.wrapping_add(round))));
    }
}

/// The tree is whole. What it has not written is lost: its keys have a value of some time, or none, if there was such a time.
fn expect_one_part_old(left: &Left) {
    let keys = clustered_keys(left.options.keys);
    let part_of = |work: &Work| match work.reach {
        AccessUnderTest::Cached { part, .. } => part,
        other => panic!("{other:?}"),
    };
    for (process, work) in left.works.iter().enumerate() {
        let part = part_of(work);
        if process != left.victim {
            let own: Vec<u64> = keys.iter().copied().filter(|&key| part.contains(key)).collect();
            left.expect_linearizable(part, &own);
        }
    }
    assert_eq!(left.peer_report.damaged, 0, "an owner locks nothing");
    let part = part_of(&left.works[left.victim]);
    let history = History::read_dir(left.histories.path()).unwrap();
    let initial = left.options.initial();
    let removed: HashSet<u64> = history
        .records()
        .iter()
        .filter_map(|record| if let Op::Remove { key } = record.op { Some(key) } else { None })
        .collect();
    let mut put: HashSet<(u64, u64)> = initial.iter().map(|(&key, &value)| (key, value)).collect();
    put.extend(history.records().iter().filter_map(|record| match record.op {
        Op::Insert { key, value } | Op::Upsert { key, value } | Op::Update { key, value } => Some((key, value)),
        _ => None,
    }));
    // Its part is for whoever claims it.
    let heir = |worker: &Worker| {
        worker.block_on(async {
            let structure = catalog::find(worker, TREE).await?;
            ownership::claim::<Tree>(worker, &structure, &key_range(part), Waits::AWhile).await
        })
    };
    drop(cluster::with_worker(&left.fabric, heir).unwrap());
    let own: Vec<u64> = keys.into_iter().filter(|&key| part.contains(key)).collect();
    let (mut found, mut absent) = (0, 0);
    cluster::with_worker(&left.fabric, |worker| {
        let tree = worker.block_on(BTree::<OneSided<Tree>>::open(worker, TREE, Proof::Checksum))?;
        for &key in own.iter().step_by((own.len() / LOOKED_AT).max(1)) {
            let tree = tree.clone();
            match bounded::run(worker, ENDS, async move { tree.get(key).await }).expect("a get comes to an end") {
                Ok(Some(value)) => {
                    assert!(put.contains(&(key, value)), "FARLINK_TEST_SEED={}: {value} under {key}", left.seed);
                    found += 1;
                }
                Ok(None) => {
                    let was_absent = !initial.contains_key(&key) || removed.contains(&key);
                    assert!(was_absent, "FARLINK_TEST_SEED={}: {key} was there at every time", left.seed);
                    absent += 1;
                }
                Err(error) => panic!("FARLINK_TEST_SEED={}: {error}", left.seed),
            }
        }
        Ok::<_, Error>(())
    })
    .unwrap();
    let report = left.check().unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={}: {error}", left.seed));
    assert!(report.is_clean() && !report.is_partial, "FARLINK_TEST_SEED={}: {report:?}", left.seed);
    println!("of the killed owner's keys {found} have a value and {absent} none");
    assert!(found > 0, "FARLINK_TEST_SEED={}: nothing of the killed owner's is left", left.seed);
}

/// What it was about to change is changed or as it was: no page is damaged, none is lost to the tree, and nobody has met one.
fn expect_nothing_wrong(left: &Left) {
    left.expect_linearizable(Part::ALL, &spread_keys(left.options.keys));
    let report = left.check().unwrap_or_else(|error| panic!("FARLINK_TEST_SEED={}: {error}", left.seed));
    assert!(report.is_clean() && !report.is_partial, "FARLINK_TEST_SEED={}: {report:?}", left.seed);
    assert_eq!(left.peer_report.damaged, 0, "FARLINK_TEST_SEED={}", left.seed);
}

#[test]
fn killed_without_a_cache() {
    kill("killed one-sided", |seed| options(AccessMode::OneSided, seed), expect_nothing_wrong);
}

#[test]
fn killed_with_inner_pages_cached() {
    kill("killed with inner pages cached", |seed| options(AccessMode::CachedInner, seed), expect_nothing_wrong);
}

#[test]
fn killed_while_memory_servers_search() {
    kill("killed hybrid", |seed| options(AccessMode::Hybrid, seed), expect_nothing_wrong);
}

#[test]
fn killed_while_memory_servers_do_everything() {
    kill("killed coarse", |seed| options(AccessMode::Coarse, seed), expect_nothing_wrong);
}

#[test]
fn an_owner_is_killed() {
    kill("killed owner", |seed| options(AccessMode::Cached, seed), expect_one_part_old);
}

#[test]
fn an_owner_that_ships_is_killed() {
    let shipping = |seed| Options { ship: Some(ShipChoice::Cost), ..options(AccessMode::Cached, seed) };
    kill("killed shipping owner", shipping, |left| {
        assert!(left.peer_report.counter("shipped") > 0, "FARLINK_TEST_SEED={}: nothing was shipped", left.seed);
        expect_one_part_old(left);
    });
}
