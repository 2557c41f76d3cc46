//! The R-tree: every answer equals brute force, a search keeps its promise, and it passes the conformance kit.
//!
//! `steps.rs` takes operations step by step, and `interleaved.rs` many at a time (both over `stepped.rs`), over the tree as it is and
//! with a rule broken (`faults.rs`).

mod brute_force;
mod checker;
mod edge;
mod entries;
mod faults;
mod interleaved;
mod joins;
mod kit;
mod loads;
mod loops;
mod model;
mod owners;
mod promise;
mod quality;
mod scene;
mod stepped;
mod steps;
mod ways;

farlink_tests::conformance!(plane: kit::Places<2>);

#[test]
fn a_search_keeps_its_promise_while_entries_come_and_go() {
    promise::keeps_its_promise_in::<2>();
}
