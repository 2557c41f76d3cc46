use std::time::{Duration, Instant};

use farlink_runtime::worker::Counters;
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile, Fate, Faults},
    cluster,
    deadlines::{Awaited, Deadlines, PATIENCE},
    settings,
};

fn counted(set: impl FnOnce(&mut Counters)) -> Counters {
    let mut counters = Counters::default();
    set(&mut counters);
    counters
}

#[test]
fn a_run_takes_its_time_and_no_more_if_nothing_is_awaited() {
    let deadlines = Deadlines::new(Awaited::default());
    let later = Instant::now() + Duration::from_secs(3600);
    assert!(!deadlines.is_over(later, || panic!("its counters are asked for before its time is over")));
    assert!(deadlines.is_over(Instant::now(), Counters::default));
}

#[test]
fn a_run_goes_on_until_all_has_happened_to_any_worker() {
    let happens: [fn(&mut Counters); 4] =
        [|it| it.splits = 1, |it| it.merges = 1, |it| it.local_waits = 1, |it| it.torn_reads = 1];
    let deadlines = Deadlines::new(Awaited { changes: true, conflicts: true, torn_reads: true, breaks: false });
    let deadline = Instant::now();
    for (at, happens) in happens.into_iter().enumerate() {
        assert!(!deadlines.is_over(deadline, Counters::default), "over after {at} of 4");
        // Each to another worker.
        assert_eq!(deadlines.is_over(deadline, || counted(happens)), at == 3);
    }
    assert!(deadlines.is_over(deadline, Counters::default), "another worker has to go on");
}

#[test]
fn what_is_not_awaited_need_not_happen() {
    let deadlines = Deadlines::new(Awaited { conflicts: true, ..Awaited::default() });
    let deadline = Instant::now();
    assert!(!deadlines.is_over(deadline, || counted(|it| it.splits = 1)));
    assert!(deadlines.is_over(deadline, || counted(|it| it.lock_conflicts = 1)));
}

/// A short run over a fabric that fails now and then may be over before anything has failed.
#[test]
fn a_run_that_is_to_fail_goes_on_until_something_has_failed() {
    let seed = settings::seed("a run that is to fail");
    let faults = Faults { seed, one_in: 2, fate: Fate::Refused, is_weak: false };
    let fabric = Cluster::start(Backend::Mem, 1, 4 << 20, FabricProfile::Faulty(faults)).unwrap();
    let deadlines = Deadlines::new(Awaited { breaks: true, ..Awaited::default() });
    let deadline = Instant::now();
    assert!(!deadlines.is_over(deadline, Counters::default));
    // Joining takes many requests.
    drop(cluster::join(&fabric, seed).unwrap());
    assert!(deadlines.is_over(deadline, Counters::default));
}

#[test]
fn patience_comes_to_an_end() {
    let Some(long_ago) = Instant::now().checked_sub(PATIENCE) else { return };
    let deadlines = Deadlines::new(Awaited { changes: true, ..Awaited::default() });
    assert!(deadlines.is_over(long_ago, || panic!("nothing is awaited any more")));
}
