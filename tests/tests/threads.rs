//! Several compute servers in one process, their workers on threads, over memory that behaves badly: every kind of fabric,
//! proof and page size, with operations that are dropped in mid-flight, or carried out by memory servers.
//! `FARLINK_THREADS_SECONDS` says how long for each; on a slow machine it takes as long as it takes to see splits, merges and
//! conflicts.

use farlink_tests::{
    backend::FabricProfile,
    in_process, settings,
    stress::{AccessMode, Options},
    subject::Subject,
    test_every_structure,
};

/// Of so many operations, one in twenty of which may be dropped, some are.
const MANY: u64 = 10_000;

fn holds<S: Subject>(name: &str, options: Options) {
    let options = Options {
        structure: S::WHICH,
        seconds: settings::from_env("FARLINK_THREADS_SECONDS", 0.12),
        processes: 2,
        workers: 2,
        seed: settings::seed(name),
        ..options
    };
    let summary = in_process::run::<S>(&options).unwrap();
    println!("{name}: {summary}");
    assert!(summary.failures().is_empty(), "{name}: {summary}\n{}", summary.failures().join("\n"));
    match options.drop_one_in {
        0 => assert_eq!(summary.peer_report.dropped, 0, "{summary}"),
        // One that is sent and waits once is dropped only if that is to happen after its first poll.
        _ => assert!(summary.peer_report.dropped > 0 || summary.peer_report.operations < MANY, "{summary}"),
    }
}

fn a_nasty_fabric<S: Subject>() {
    holds::<S>("nasty", Options { keys: 300, ..Options::default() });
}

fn a_nasty_fabric_and_larger_pages<S: Subject>() {
    holds::<S>("nasty, 1024 B", Options { page_bytes: 1024, ..Options::default() });
}

fn a_weak_fabric<S: Subject>() {
    holds::<S>("weak", Options { profile: FabricProfile::Weak, keys: 300, ..Options::default() });
}

fn readers_that_wait_three_times<S: Subject>() {
    for (name, profile) in [("nasty, three waits", FabricProfile::Nasty), ("weak, three waits", FabricProfile::Weak)] {
        holds::<S>(name, Options { profile, three_waits: true, keys: 300, ..Options::default() });
    }
}

fn operations_dropped_in_mid_flight<S: Subject>() {
    let dropping = Options { drop_one_in: 20, keys: 300, ..Options::default() };
    holds::<S>("nasty, dropping", dropping.clone());
    holds::<S>("nasty, dropping, 1024 B", Options { page_bytes: 1024, keys: 1000, ..dropping.clone() });
    holds::<S>("weak, dropping", Options { profile: FabricProfile::Weak, ..dropping.clone() });
    holds::<S>("nasty, dropping, three waits", Options { three_waits: true, ..dropping });
}

fn all_is_sent<S: Subject>() {
    let coarse = Options { access: AccessMode::Coarse, servers: 2, keys: 300, ..Options::default() };
    holds::<S>("coarse, nasty", coarse.clone());
    holds::<S>("coarse, fast, dropping", Options { profile: FabricProfile::Fast, drop_one_in: 20, ..coarse });
}

fn inner_levels_are_searched_where_they_are<S: Subject>() {
    let hybrid = Options { access: AccessMode::Hybrid, servers: 2, keys: 300, ..Options::default() };
    holds::<S>("hybrid, weak", Options { profile: FabricProfile::Weak, ..hybrid.clone() });
    holds::<S>("hybrid, nasty, dropping", Options { drop_one_in: 20, ..hybrid });
}

test_every_structure!(
    all_is_sent,
    inner_levels_are_searched_where_they_are,
    a_nasty_fabric,
    a_nasty_fabric_and_larger_pages,
    a_weak_fabric,
    readers_that_wait_three_times,
    operations_dropped_in_mid_flight;
    bwtree: all_is_sent, inner_levels_are_searched_where_they_are, a_nasty_fabric, a_nasty_fabric_and_larger_pages, a_weak_fabric,
    readers_that_wait_three_times, operations_dropped_in_mid_flight,
);
