//! R-trees of other dimensions: three under the conformance kit, one and six as to what a search promises, for with few entries to
//! a page there are more levels; and all that no other test has, beside brute force. It takes longer to build than to run, so `cargo test` leaves it out: `cargo test -p farlink-tests --test rtree_deep`.

#[path = "../rtree/entries.rs"]
mod entries;
#[path = "../rtree/kit.rs"]
mod kit;
#[path = "../rtree/model.rs"]
#[allow(dead_code)]
mod model;
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

#[test]
fn all_answers_are_those_of_brute_force() {
    fn of<const D: usize>() {
        let scene = scene::scene(16 << 20);
        scene.worker.block_on(model::grows_and_shrinks::<D>(&scene.worker, D as u64, 400, 1.0)).unwrap();
    }
    of::<4>();
    of::<5>();
    of::<7>();
    of::<8>();
}
