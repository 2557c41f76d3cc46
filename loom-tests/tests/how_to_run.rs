//! Without `--cfg loom` there is nothing to explore; this says how it is done.
#![cfg(not(loom))]

#[test]
fn models_run_with_cargo_xtask_loom() {
    println!("the models need the runtime built with --cfg loom: run `cargo xtask loom`");
}
