//! Schemes that prove a READ whole, under writers: the right ones let no torn copy through and meet torn copies; the broken
//! ones let one through within seconds, or the harness would not notice a torn copy at all.

use std::time::Duration;

use farlink_tests::{
    backend::FabricProfile,
    bounded::Watchdog,
    deadlines::PATIENCE,
    settings,
    torn::{Scheme, Trial, Verdict, run},
};

/// A broken scheme must be found out within this time; on any machine that is not very slow, it is within a second.
const FOUND_MAX: Duration = PATIENCE;

/// How long a scheme that holds is tried, at most.
const TRIED_MAX: Duration = Duration::from_secs(3);

fn trial(name: &str, scheme: Scheme, profile: FabricProfile, page_bytes: usize, limit: Duration) -> Verdict {
    let trial = Trial {
        seed: settings::seed(name),
        profile,
        page_bytes,
        scheme,
        pairs: 2,
        accepted_min: settings::from_env("FARLINK_TORN_COPIES", 5000),
        limit,
    };
    let _watchdog = Watchdog::start(name, 2 * FOUND_MAX + PATIENCE);
    let verdict = run(&trial).unwrap();
    println!("{name}, {page_bytes} B: {verdict:?}");
    verdict
}

fn found_out(name: &str, scheme: Scheme, page_bytes: usize) {
    let verdict = trial(name, scheme, FabricProfile::Nasty, page_bytes, FOUND_MAX);
    assert!(verdict.torn_accepted > 0, "a scheme that is broken was not found out: {verdict:?}");
    println!("{name}, {page_bytes} B: found out after {:?} and {} copies", verdict.took, verdict.accepted);
}

fn holds(name: &str, scheme: Scheme) {
    for (profile, page_bytes) in [
        (FabricProfile::Nasty, 256),
        (FabricProfile::Nasty, 1024),
        (FabricProfile::Weak, 256),
        (FabricProfile::Weak, 4096),
    ] {
        let verdict = trial(name, scheme, profile, page_bytes, TRIED_MAX);
        assert_eq!(verdict.torn_accepted, 0, "a torn copy was accepted: {verdict:?}");
        assert!(verdict.refused > 0 && verdict.accepted > 0 && verdict.changes > 0, "nothing was tried: {verdict:?}");
    }
}

#[test]
fn control_versions_at_front_and_back_are_found_out() {
    for page_bytes in [64, 256, 1024, 4096] {
        found_out("front and back", Scheme::FrontBack, page_bytes);
    }
}

#[test]
fn control_an_unlocked_front_is_found_out() {
    for page_bytes in [64, 256, 1024] {
        found_out("front only", Scheme::FrontOnly, page_bytes);
    }
}

#[test]
fn a_checksum_lets_no_torn_copy_through() {
    holds("checksum", Scheme::Checksum);
}

#[test]
fn lock_body_lock_lets_no_torn_copy_through() {
    holds("lock, body, lock", Scheme::LockBodyLock);
}

/// Even where READs are copied as fast as the processor can, two threads on two cores tear them.
#[test]
fn a_checksum_holds_on_a_fast_fabric() {
    let verdict = trial("checksum, fast", Scheme::Checksum, FabricProfile::Fast, 4096, TRIED_MAX);
    assert_eq!(verdict.torn_accepted, 0, "a torn copy was accepted: {verdict:?}");
    assert!(verdict.accepted > 0 && verdict.changes > 0, "nothing was tried: {verdict:?}");
}
