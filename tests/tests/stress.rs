//! The acceptance test, for a few seconds. `FARLINK_STRESS_SECONDS` says how many.

use std::path::Path;

use farlink_tests::{
    settings,
    stress::{self, Options},
};

#[test]
fn eight_workers_in_four_processes() {
    let options = Options {
        seconds: settings::from_env("FARLINK_STRESS_SECONDS", 10.0),
        seed: settings::seed("eight_workers_in_four_processes"),
        ..Options::default()
    };
    let summary = stress::run(Path::new(env!("CARGO_BIN_EXE_farlink-stress")), &options).unwrap();
    println!("{summary}");
    assert!(summary.failures().is_empty(), "{}\n{}", summary, summary.failures().join("\n"));
}
