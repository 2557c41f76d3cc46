//! The checkers at the sizes that tests of structures use: millions of operations, and few keys with much concurrency.

use std::time::Instant;

use farlink_tests::atomic_map::Simulation;
use farlink_tests::history::History;
use farlink_tests::workload::{Mix, WorkloadSpec, spread_keys};
use farlink_tests::{linear, scans};

fn simulated(keys: usize, operations: usize, unknown: f64, mix: Mix) -> History {
    let seed = 42;
    let workload = WorkloadSpec { seed, keys: spread_keys(keys), theta: 0.99, mix, scan_limit_max: 20 };
    let simulation = Simulation { workload, clients: 8, in_flight: 16, operations, unknown };
    simulation.run().unwrap_or_else(|error| panic!("seed {seed}: {error}"))
}

fn check(name: &str, history: &History) {
    let begun = Instant::now();
    let points = linear::check(history).unwrap_or_else(|error| panic!("{name}: {error}"));
    let point_time = begun.elapsed();
    let begun = Instant::now();
    let scanned = scans::check(history).unwrap_or_else(|error| panic!("{name}: {error}"));
    println!("{name}: {points:?} in {point_time:?}; {scanned:?} in {:?}", begun.elapsed());
}

#[test]
fn a_million_operations_on_a_thousand_keys() {
    check("1000 keys", &simulated(1000, 1_000_000, 0.0, Mix::ALL));
}

#[test]
fn a_few_hot_keys() {
    let one = simulated(1, 200_000, 0.0, Mix::POINTS);
    assert!(one.in_flight_max() > 110, "{}", one.in_flight_max());
    check("1 key", &one);
    check("1 key, inserted and removed", &simulated(1, 200_000, 0.0, Mix::CHURN));
    check("3 keys", &simulated(3, 300_000, 0.0, Mix::POINTS));
    check("3 keys, inserted and removed", &simulated(3, 300_000, 0.0, Mix::CHURN));
}

#[test]
fn a_few_hot_keys_with_lost_outcomes() {
    check("3 keys, 0.1% unknown", &simulated(3, 300_000, 0.001, Mix::POINTS));
    check("3 keys, inserted and removed, 0.1% unknown", &simulated(3, 300_000, 0.001, Mix::CHURN));
    check("3 keys, 10% unknown", &simulated(3, 30_000, 0.1, Mix::POINTS));
}
