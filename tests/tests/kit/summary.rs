use std::sync::Arc;

use farlink_runtime::{fabric::Fabric, server};
use farlink_tests::{
    cluster,
    history::History,
    peer::{BREAKS, PeerReport},
    scans::ScanReport,
    stress::{Options, Summary, idle, unscanned},
};

fn peer_report(operations: u64, failed: u64, breaks: u64) -> PeerReport {
    let mut peer_report = PeerReport { operations, failed, ..PeerReport::default() };
    peer_report.counters.insert(BREAKS.into(), breaks);
    peer_report
}

#[test]
fn a_run_that_shows_nothing_is_named() {
    assert!(idle(&peer_report(100, 50, 1), true).is_empty());
    assert!(idle(&peer_report(100, 0, 0), false).is_empty());
    assert_eq!(idle(&peer_report(0, 0, 1), true), ["no operations"]);
    assert_eq!(idle(&peer_report(100, 51, 9), true), ["of 100 operations 49 have come to anything"]);
    assert_eq!(idle(&peer_report(100, 0, 0), true), ["nothing has failed"]);
    assert_eq!(idle(&peer_report(0, 0, 0), true).len(), 2);
}

#[test]
fn scans_that_were_not_checked_are_named() {
    let some = ScanReport { scans: 1, entries: 1, certainly_present: 1 };
    assert!(unscanned(&some, 10_000).is_empty());
    assert!(unscanned(&ScanReport::default(), 10).is_empty(), "a short run");
    assert_eq!(unscanned(&ScanReport::default(), 10_000).len(), 3);
    assert_eq!(unscanned(&ScanReport { certainly_present: 0, ..some }, 10_000).len(), 1);
}

/// A file that is missing, or ends early, is no history of fewer readers.
#[test]
fn operations_that_the_history_has_not_are_noticed() {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 1 << 20, cluster::FAST).unwrap());
    let judged = Summary::judge(&fabric, &Options::default(), History::new(), peer_report(5, 0, 0), 1.0);
    let error = judged.unwrap_err().to_string();
    assert!(error.contains("of 5 operations the history has 0"), "{error}");
}
