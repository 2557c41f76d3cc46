//! The last of `cargo test --workspace`: runs the doc tests, then says what is left out.
//!
//! Cargo would run doc tests behind all else, and their output would hide the line that a newcomer should read; so the libraries
//! say `doctest = false`, which `cargo test --doc` overrides.

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace");
    let doc_tests = Command::new(env!("CARGO"))
        .current_dir(workspace)
        .args(["test", "--doc", "--workspace", "--"])
        .args(env::args_os().skip(1))
        .status()
        .expect("cargo runs, as it has built this test");
    println!(
        "\nnot run by `cargo test`: loom models (`cargo xtask loom`), RDMA verbs in a guest (`cargo xtask softroce`, `messages`, \
         `pair`), Miri (`cargo xtask miri`), fuzzing (`cargo xtask fuzz`), a crate outside of the workspace (`cargo test --manifest-path \
         examples/counter-set/Cargo.toml`), tests over memory servers that are processes (`FARLINK_FABRIC=mem-processes cargo test`), \
         R-trees of other dimensions (`cargo test -p farlink-tests --test rtree_deep`), local R-trees (`cargo test -p farlink --features \
         peers --test figures`), GeoJSON (`cargo test -p farlink-bench --features geojson`), farlink-peers (`cargo test -p farlink-peers \
         --bin farlink-peers`), circles of modules (`cargo xtask circles`), kills at random (`farlink chaos`), the stress test \
         (`farlink-stress`); `.ci/run` runs them all."
    );
    if doc_tests.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
