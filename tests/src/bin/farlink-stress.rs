//! The acceptance test, by hand: `cargo run --release -p farlink-tests --bin farlink-stress -- --seconds 60`.
//!
//! Prints one line of what it counted, and what did not hold; exits with status 0 only if all held. See
//! `farlink_tests::stress` for the options.

use std::process::ExitCode;

use anyhow::Context;
use farlink_tests::{
    backend, peer,
    stress::{self, Options, USAGE},
};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("farlink-stress: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<bool> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [role] if role == peer::PEER => {
            peer::serve()?;
            return Ok(true);
        }
        [role] if role == backend::SERVER => {
            backend::serve()?;
            return Ok(true);
        }
        [help] if help == "--help" || help == "-h" => {
            print!("{USAGE}");
            return Ok(true);
        }
        _ => {}
    }
    let options = Options::parse(arguments).context("see farlink-stress --help")?;
    let summary = stress::run(&std::env::current_exe()?, &options)?;
    println!("{summary}");
    let failures = summary.failures();
    failures.iter().for_each(|failure| println!("FAILED: {failure}"));
    Ok(failures.is_empty())
}
