//! The `farlink` program: `farlink-bench` with the structures that come with farlink.

use std::process::ExitCode;

use farlink_bench::{plugin, unmeasured};
use farlink_structures::{btree, bwtree::Bw, rtree, skiplist::List};

fn main() -> ExitCode {
    farlink_bench::main(&[
        plugin::<btree::Tree>(),
        plugin::<List>(),
        plugin::<rtree::Tree>(),
        plugin::<Bw>(),
        unmeasured::<rtree::Tree<3>>(),
    ])
}
