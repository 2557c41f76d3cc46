//! The conformance kit for R-trees of more dimensions: with few entries to a page, there are more levels. It takes longer to
//! build than to run, so `cargo test` leaves it out: `cargo test -p farlink-tests --test rtree_deep`.

#[path = "../rtree/entries.rs"]
mod entries;
#[path = "../rtree/kit.rs"]
mod kit;

farlink_tests::conformance!(solid: kit::Places<3>);
farlink_tests::conformance!(deep: kit::Places<6>);
