use std::time::Duration;

use farlink_runtime::messaging::{read_from_server, read_request};
use farlink_tests::fuzz::{TARGETS, Target, fuzz, mutate, run};
use rand::{SeedableRng, rngs::SmallRng};

fn samples(target: &str) -> Vec<Vec<u64>> {
    let target = TARGETS.iter().find(|one| one.name == target).unwrap();
    (target.samples)()
}

#[test]
fn a_moment_of_each_target() {
    let read = fuzz(1, Duration::from_millis(200), "").unwrap();
    assert_eq!(read.len(), TARGETS.len());
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
