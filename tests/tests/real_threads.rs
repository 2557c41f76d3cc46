//! The recorder and the checkers on threads that really run at the same time, with correct maps and broken ones.

use std::collections::BTreeMap;
use std::sync::{Barrier, Mutex, PoisonError, RwLock};

use farlink_tests::atomic_map::apply;
use farlink_tests::history::{Flush, History, Op, Outcome, Recorder};
use farlink_tests::workload::{Mix, Workload, WorkloadSpec, spread_keys};
use farlink_tests::{linear, scans};

const THREADS: u32 = 4;
const SEED: u64 = 7;

/// Runs a mixed workload on a map and returns what the threads recorded.
fn run(operations: usize, map: impl Fn(&Op) -> Outcome + Sync) -> History {
    let spec = WorkloadSpec { seed: SEED, keys: spread_keys(8), theta: 0.9, mix: Mix::ALL, scan_limit_max: 8 };
    let start = Barrier::new(THREADS as usize);
    let mut history = History::new();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|client| {
                let (spec, start, map) = (&spec, &start, &map);
                scope.spawn(move || {
                    let recorder = Recorder::new(Vec::new(), client, Flush::WhenFull).unwrap();
                    start.wait();
                    for (at, op) in Workload::new(spec, client).unwrap().take(operations).enumerate() {
                        let ticket = recorder.begin(op).unwrap();
                        // On few cores, threads would hardly ever meet in the middle of an operation.
                        if at % 16 == 0 {
                            std::thread::yield_now();
                        }
                        let outcome = map(&op);
                        if at % 16 == 8 {
                            std::thread::yield_now();
                        }
                        recorder.end(ticket, outcome).unwrap();
                    }
                    History::decode(&recorder.finish().unwrap()).unwrap()
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| history.merge(thread.join().unwrap()));
    });
    assert_eq!(history.len(), operations * THREADS as usize);
    assert!(history.in_flight_max() > 1, "the threads did not run at the same time");
    history
}

fn locked(map: &Mutex<BTreeMap<u64, u64>>, op: &Op) -> Outcome {
    apply(&mut map.lock().unwrap_or_else(PoisonError::into_inner), op)
}

#[test]
fn a_locked_map_is_linearizable() {
    let map = Mutex::default();
    let history = run(50_000, |op| locked(&map, op));
    linear::check(&history).unwrap_or_else(|error| panic!("seed {SEED}: {error}"));
    scans::check(&history).unwrap_or_else(|error| panic!("seed {SEED}: {error}"));
}

/// Looks and acts under two locks, so that another thread can come in between.
#[test]
fn control_an_upsert_in_two_steps_is_found() {
    let map = Mutex::default();
    let history = run(50_000, |op| match *op {
        Op::Upsert { key, .. } => {
            let found = locked(&map, &Op::Get { key });
            std::thread::yield_now();
            locked(&map, op);
            found
        }
        _ => locked(&map, op),
    });
    assert!(matches!(linear::check(&history), Err(linear::LinearError::Violation(_))));
}

/// Readers use a copy that is renewed every now and then.
#[test]
fn control_a_cache_without_invalidation_is_found() {
    let map = Mutex::default();
    let copy = RwLock::new(BTreeMap::new());
    let history = run(20_000, |op| match op {
        Op::Insert { .. } | Op::Upsert { .. } | Op::Update { .. } => locked(&map, op),
        Op::Remove { .. } => {
            let outcome = locked(&map, op);
            *copy.write().unwrap() = map.lock().unwrap().clone();
            outcome
        }
        Op::Get { .. } | Op::Scan { .. } => apply(&mut copy.read().unwrap().clone(), op),
    });
    assert!(matches!(linear::check(&history), Err(linear::LinearError::Violation(_))));
    assert!(matches!(scans::check(&history), Err(scans::ScanError::Violation(_))));
}
