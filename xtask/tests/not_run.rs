//! The last of `cargo test --workspace`: says what that leaves out.

fn main() {
    println!(
        "\nnot run by `cargo test`: loom models (`cargo xtask loom`), RDMA verbs in a guest (`cargo xtask softroce`, `messages`, \
         `pair`), Miri (`cargo xtask miri`), fuzzing (`cargo xtask fuzz`), R-trees of other dimensions (`cargo test -p farlink-tests \
         --test rtree_deep`), farlink-peers (`cargo test -p farlink-peers --bin farlink-peers`), the stress test \
         (`farlink-stress`); `.ci/run` runs them all, and longer.\n"
    );
}
