use std::time::Duration;

use farlink_tests::bounded::{hangs, processor_time};

#[test]
fn what_gets_no_core_has_more_time_than_what_uses_it() {
    let s = Duration::from_secs;
    let hangs = |taken, used| hangs(s(10), s(taken), || s(used));
    assert!(!hangs(49, 100));
    assert!(hangs(50, 10));
    assert!(!hangs(50, 9) && !hangs(99, 9));
    assert!(hangs(100, 0));
}

#[test]
fn who_spins_uses_processor_time() {
    let before = processor_time();
    assert_ne!(before, Duration::MAX, "the system does not say");
    while processor_time() == before {}
}
