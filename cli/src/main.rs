//! The `farlink` program: serves memory, runs benchmarks, checks structures.
//!
//! `args.rs` turns the command line into a plan, `commands.rs` carries it out. `bench.rs` leads compute processes through
//! the plan's phases over the line protocol of `protocol.rs`; in each of them `compute.rs` obeys and `host.rs` runs the
//! workers as `work.rs` says, which reach the tree as `reach.rs` says. `cluster.rs` runs the memory servers, `inspect.rs` looks at the tree,
//! `report.rs` prints. Keys and streams are drawn before the clock starts (`keys.rs`, `stream.rs`), and `driver.rs` runs them;
//! figures (`figure/`) run theirs with the same driver and report the same rows.

mod args;
mod bench;
mod cluster;
mod commands;
mod compute;
mod driver;
mod feed;
mod figure;
mod host;
mod inspect;
mod keys;
mod keysfile;
mod latency;
mod ledger;
mod place;
mod plan;
mod progress;
mod protocol;
mod rdma;
mod reach;
mod report;
mod scratch;
mod serve;
mod stream;
mod table;
mod tally;
mod task;
mod trace;
mod units;
mod verbs;
mod work;
mod workload;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr();
    let result = match &cli.command {
        Command::Bench(args) => commands::bench(args).map(|()| true),
        Command::Serve(args) => commands::serve(args).map(|()| true),
        Command::Check(args) => commands::check(args).map(|()| true),
        Command::Devices(args) => verbs::devices(args).map(|()| true),
        Command::Figure(args) => figure::run(args).map(|()| true),
        Command::Compute => commands::compute(),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("farlink: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Diagnostics go to standard error, as `RUST_LOG` asks; results go to standard output.
fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
