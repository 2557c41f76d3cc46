//! The `farlink` program as a library: serves memory, measures structures, checks them, makes the figures of the evaluation.
//!
//! A crate with structures of its own gets the whole program for them:
//!
//! ```no_run
//! use farlink_bench::plugin;
//! use farlink_structures::{btree::Tree, skiplist::List};
//!
//! fn main() -> std::process::ExitCode {
//!     farlink_bench::main(&[plugin::<Tree>(), plugin::<List>()])
//! }
//! ```
//!
//! What it must know of a structure is [`Subject`]: what to load, which workloads there are, how to run an operation and check
//! its answer. An ordered map (`farlink_structures::map::OrderedMap`) says [`MapSubject`] instead, which takes no more than `impl MapSubject for MyMap {}`. A structure that
//! is served and checked, and not measured, takes nothing: [`unmeasured`]. The program starts itself as memory servers and as
//! compute processes, so they know the same structures.
//!
//! `args/` turns the command line into a plan, `commands.rs` carries it out. `bench.rs` leads compute processes through
//! the plan's phases over the line protocol of `protocol.rs`; in each of them `compute.rs` obeys and `host.rs` runs the
//! workers, which reach the structure as `route.rs` says. `program.rs` is what all of these know of a structure whose type they
//! do not know. `cluster.rs` runs the memory servers, `cluster_view.rs` looks at the cluster, `others.rs` at who changes the
//! structure beside the run; `report.rs` prints. Operations are
//! drawn before the clock starts (`maps/`), and `driver.rs` runs them; figures (`figure/`) run theirs with the same driver and
//! report the same rows. `chaos/` kills processes, which do what `victim.rs` says.

mod args;
mod bench;
mod by_name;
mod chaos;
mod cluster;
mod cluster_view;
mod commands;
mod compute;
mod counts;
mod driver;
mod figure;
mod host;
mod input;
mod latency;
mod load_choice;
mod maps;
mod others;
mod owner;
mod parts;
mod place;
mod plan;
mod program;
mod progress;
mod protocol;
mod queue;
mod rdma;
mod rects;
mod repartition;
mod replay;
mod report;
mod route;
mod serve;
mod signals;
mod subject;
mod table;
mod tally;
mod task;
mod totals;
mod units;
mod verbs;
mod victim;

use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Layer as _, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;

pub use crate::{
    input::InputFile,
    maps::{MapData, MapRequest, MapSource, MapSubject},
    program::{Program, plugin, unmeasured},
    rects::{RectData, RectRequest, RectSource},
    subject::{
        AccessMode, Answer, Distribution, GoOn, InsertOrder, Job, Outcomes, Samples, Setting, Subject, WorkerId,
    },
};

use crate::args::{Cli, Command};

/// The snippets of the guide's chapter on the program compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/src/running.md")]
struct Guide;

/// The whole program, for these structures. Of several, `bench` measures the first unless told otherwise.
pub fn main(programs: &[Program]) -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr();
    allow_open_files();
    let result = match &cli.command {
        Command::Bench(args) => commands::bench(programs, args).map(|()| true),
        Command::Serve(args) => commands::serve(programs, args).map(|()| true),
        Command::Check(args) => commands::check(programs, args).map(|()| true),
        Command::List(args) => commands::list(programs, args).map(|()| true),
        Command::Repartition(args) => commands::repartition(programs, args).map(|()| true),
        Command::Drop(args) => commands::drop_structure(args).map(|()| true),
        Command::Devices(args) => verbs::devices(args).map(|()| true),
        Command::Figure(args) => figure::run(args).map(|()| true),
        Command::Chaos(args) => chaos::chaos(programs, args).map(|()| true),
        Command::ChaosProcess => chaos::serve(programs).map(|()| true),
        Command::Compute => commands::compute(programs),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            farlink_children::say(format_args!("farlink: {error:#}"));
            signals::stopped().map_or(ExitCode::FAILURE, |signal| ExitCode::from(signals::status(signal)))
        }
    }
}

/// As many open files as the system allows, for this process and its children: each connection of a worker is one at both its ends.
fn allow_open_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid for reads and writes of its type, and is used for nothing else meanwhile.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            // Best effort: who runs out says so.
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}

/// Diagnostics go to standard error, as `RUST_LOG` asks; results go to standard output.
fn log_to_stderr() {
    let asked = std::env::var("RUST_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let filter = asked.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    // Its own errors go nowhere: to say them it would panic where standard error is gone.
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).log_internal_errors(false);
    let layer = layer.with_filter(filter);
    tracing_subscriber::registry().with(layer).init();
}
