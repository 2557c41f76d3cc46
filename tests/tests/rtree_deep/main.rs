//! R-trees of other dimensions: three under the conformance kit, one and six as to what a search promises, for with few entries to
//! a page there are more levels. It takes longer to build than to run, so `cargo test` leaves it out: `cargo test -p farlink-tests --test rtree_deep`.

#[path = "../rtree/entries.rs"]
mod entries;
#[path = "../rtree/kit.rs"]
mod kit;
#[path = "../rtree/promise.rs"]
mod promise;
#[path = "../rtree/scene.rs"]
#[allow(dead_code)]
mod scene;

farlink_tests::conformance!(solid: kit::Places<3>);

#[test]
fn a_search_keeps_its_promise_while_entries_come_and_go() {
    promise::keeps_its_promise_in::<1>();
    promise::keeps_its_promise_in::<6>();
}
