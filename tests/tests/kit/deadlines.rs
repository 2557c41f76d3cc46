use std::time::{Duration, Instant};

use farlink_children::Scratch;
use farlink_runtime::worker::Counters;
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile, Fate, Faults},
    cluster,
    deadlines::{Awaited, Deadlines, PATIENCE},
    settings,
    stress::{AccessMode, Options},
};

/// With the directory of its run.
fn deadlines(awaited: Awaited) -> (Deadlines, Scratch) {
    let directory = cluster::scratch().unwrap();
    (Deadlines::new(awaited, directory.path()), directory)
}

fn counted(set: impl FnOnce(&mut Counters)) -> Counters {
    let mut counters = Counters::default();
    set(&mut counters);
    counters
}

#[test]
fn a_run_takes_its_time_and_no_more_if_nothing_is_awaited() {
    let (deadlines, _directory) = deadlines(Awaited::default());
    let later = Instant::now() + Duration::from_secs(3600);
    assert!(!deadlines.is_over(later, 0, || panic!("its counters are asked for before its time is over")));
    assert!(deadlines.is_over(Instant::now(), 0, Counters::default));
}

#[test]
fn a_run_goes_on_until_all_has_happened_to_any_worker() {
    let happens: [fn(&mut Counters); 4] =
        [|it| it.splits = 1, |it| it.merges = 1, |it| it.local_waits = 1, |it| it.torn_reads = 1];
    let awaited =
        Awaited { splits: true, merges: true, strays: true, conflicts: true, torn_reads: true, breaks: false };
    let (deadlines, _directory) = deadlines(awaited);
    let deadline = Instant::now();
    for (at, happens) in happens.into_iter().enumerate() {
        assert!(!deadlines.is_over(deadline, 0, Counters::default), "over after {at} of 5");
        // Each to another worker.
        assert!(!deadlines.is_over(deadline, 0, || counted(happens)), "over after {} of 5", at + 1);
    }
    assert!(deadlines.is_over(deadline, 1, Counters::default));
    assert!(deadlines.is_over(deadline, 0, Counters::default), "another worker has to go on");
}

#[test]
fn what_is_not_awaited_need_not_happen() {
    let (deadlines, _directory) = deadlines(Awaited { conflicts: true, ..Awaited::default() });
    let deadline = Instant::now();
    assert!(!deadlines.is_over(deadline, 1, || counted(|it| it.splits = 1)));
    assert!(deadlines.is_over(deadline, 0, || counted(|it| it.lock_conflicts = 1)));
}

/// Once one process has left, nobody may be left to meet.
#[test]
fn who_has_met_nobody_goes_on_until_others_have() {
    for happens in [|it: &mut Counters| it.lock_conflicts = 1, |it: &mut Counters| it.torn_reads = 1] {
        let directory = cluster::scratch().unwrap();
        let awaited = Awaited { splits: true, conflicts: true, torn_reads: true, ..Awaited::default() };
        let processes = [0; 2].map(|_| Deadlines::new(awaited, directory.path()));
        let deadline = Instant::now();
        let other = counted(|it| (it.splits, it.lock_conflicts, it.torn_reads) = (1, 1, 1));
        assert!(!processes[0].is_over(deadline, 0, || counted(happens)));
        assert!(!processes[1].is_over(deadline, 0, Counters::default));
        assert!(processes[1].is_over(deadline, 0, || other));
        // A split is to be its own.
        assert!(!processes[0].is_over(deadline, 0, Counters::default));
        assert!(processes[0].is_over(deadline, 0, || counted(|it| it.splits = 1)));
    }
}

/// What the summary of a run misses, the run waits for.
#[test]
fn owners_of_a_tree_that_grows_wait_for_splits_and_strays() {
    let run = |processes, grows, route| {
        let access = AccessMode::Cached;
        Options { access, processes, grows, route, profile: FabricProfile::Nasty, ..Options::default() }.awaited()
    };
    let splits = Awaited { splits: true, ..Awaited::default() };
    assert_eq!(run(4, true, false), Awaited { strays: true, ..splits });
    assert_eq!(run(4, false, true), Awaited { merges: true, ..splits });
    assert_eq!(run(1, false, false), Awaited { merges: true, ..splits });
}

/// A short run over a fabric that fails now and then may be over before anything has failed.
#[test]
fn a_run_that_is_to_fail_goes_on_until_something_has_failed() {
    let seed = settings::seed("a run that is to fail");
    let faults = Faults { seed, one_in: 2, fate: Fate::Refused, is_weak: false };
    let fabric = Cluster::start(Backend::Mem, 1, 4 << 20, FabricProfile::Faulty(faults)).unwrap();
    let (deadlines, _directory) = deadlines(Awaited { breaks: true, ..Awaited::default() });
    let deadline = Instant::now();
    assert!(!deadlines.is_over(deadline, 0, Counters::default));
    // Joining takes many requests.
    drop(cluster::join(&fabric, seed).unwrap());
    assert!(deadlines.is_over(deadline, 0, Counters::default));
}

#[test]
fn patience_comes_to_an_end() {
    let Some(long_ago) = Instant::now().checked_sub(PATIENCE) else { return };
    let (deadlines, _directory) = deadlines(Awaited { splits: true, ..Awaited::default() });
    assert!(deadlines.is_over(long_ago, 0, || panic!("nothing is awaited any more")));
}
