use std::{
    process::{Command, Stdio},
    time::Duration,
};

use farlink_offload::ship::{CallHeader, read_reply};
use farlink_runtime::{
    messaging::{read_from_server, read_request},
    wire::{Wire, decode_all},
};
use farlink_structures::{
    btree::Tree,
    bwtree::SentScan,
    map::{
        KeyRange,
        ops::{Count, Get, Put, Remove, Scan},
    },
    rtree,
};
use farlink_tests::{
    fuzz::{TARGETS, Target, calls, fuzz, fuzz_one, mutate, run},
    settings,
};
use rand::{SeedableRng, rngs::SmallRng};

fn samples(target: &str) -> Vec<Vec<u64>> {
    let target = TARGETS.iter().find(|one| one.name == target).unwrap();
    (target.samples)()
}

#[test]
fn a_moment_of_each_target() {
    let read = fuzz(settings::seed("fuzz"), Duration::from_millis(200), "").unwrap();
    assert_eq!(read.len(), TARGETS.len());
}

#[test]
fn a_target_that_there_is_not_is_no_success() {
    let error = fuzz(1, Duration::ZERO, "typo").unwrap_err().to_string();
    assert!(error.contains("typo"), "{error}");
}

/// Tells this program to fuzz a target that does not end.
const CHILD: &str = "FARLINK_FUZZ_CHILD";

#[test]
fn a_target_that_does_not_end_is_named() {
    let name = concat!(module_path!(), "::child").split_once("::").unwrap().1;
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([name, "--exact", "--nocapture"]).env(CHILD, "").stdout(Stdio::null());
    let output = child.output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("endless with seed 7: not finished"), "{said}");
}

/// The other side of it; nothing otherwise.
#[test]
fn child() {
    fn endless(words: &[u64]) {
        while words.len() == 3 {
            std::hint::spin_loop();
        }
    }
    if std::env::var_os(CHILD).is_some() {
        let target = Target { name: "endless", samples: || vec![vec![1; 2]], read: endless };
        fuzz_one(target, 7, Duration::from_millis(1), Duration::from_millis(10)).unwrap();
    }
}

#[test]
fn samples_make_sense_and_mutations_reach_far() {
    let requests = samples("request");
    assert!(requests.iter().all(|words| read_request(words).is_ok()));
    assert!(samples("message of a server").iter().all(|words| read_from_server(words).is_ok()));
    let mut rng = SmallRng::seed_from_u64(2);
    let fine = (0..2000).filter(|_| read_request(&mutate(&requests, &mut rng)).is_ok()).count();
    assert!((20..1500).contains(&fine), "{fine} of 2000 mutated requests still make sense");
}

/// What is refused has come no further than the words before its parameters.
#[test]
fn samples_of_calls_are_carried_out() {
    for (target, send) in
        [("call", calls::send_to_server as fn(&[u64]) -> _), ("message to an owner", calls::send_to_owner_of_all)]
    {
        for words in samples(target) {
            assert_eq!(send(&words), None, "{target}: {words:x?}");
        }
    }
}

/// What does not mean anything is read no further than that.
#[test]
fn samples_of_parameters_mean_something() {
    fn means<T: Wire>(target: &str) {
        for words in samples(target) {
            assert!(decode_all::<T>(&words).is_ok(), "{target}: {words:x?}");
        }
    }
    means::<Get<Tree>>("get");
    means::<Put<Tree>>("put");
    means::<Remove<Tree>>("remove");
    means::<Scan<Tree>>("scan");
    means::<SentScan>("sent scan");
    means::<Count<Tree>>("count");
    means::<KeyRange>("region");
    means::<rtree::ops::Insert<2>>("insert of a box");
    means::<rtree::ops::Delete<2>>("delete of a box");
    means::<rtree::ops::Update<2>>("update of a box");
    means::<rtree::ops::Find<2>>("find of boxes");
    means::<rtree::ops::Count<2>>("count of boxes");
    means::<rtree::Scope<2>>("region of boxes");
    means::<CallHeader>("header of a call");
    assert!(samples("reply to a call").iter().filter(|words| read_reply(words).is_ok()).count() > 1);
}

#[test]
fn a_target_that_fails_is_named() {
    fn picky(words: &[u64]) {
        assert!(words.len() < 9, "long");
    }
    let target = Target { name: "picky", samples: Vec::new, read: picky };
    assert!(run(target, 7, &[0; 8]).is_ok());
    let error = run(target, 7, &[0; 9]).unwrap_err().to_string();
    assert!(error.contains("picky fails with seed 7"), "{error}");
}
