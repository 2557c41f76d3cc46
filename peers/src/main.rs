//! Compares lookups in farlink's B+-tree, all of it in local memory, with local in-memory indexes.
//!
//! What it is for: the tree is written once, async and generic over how pages are reached; this says what that costs when
//! nothing is remote, and what several operations in flight win back. `cached` is that code through farlink's cache, which
//! holds all pages; `hand` is the same lookup written by hand over the same pages, the others are the peers. Rates belong to
//! one machine and one run; the ratios are what to quote.
//!
//! Farlink's cache asks the system for huge pages; so that all are alike, malloc is told to ask, too, and the report says how much of
//! whose memory is in such. Farlink's tree is bulk-loaded, with pages filled to 0.9; the others have no such load, and are filled in
//! ascending order, one key after the other.
//!
//! `tree.rs` builds the tree in local memory, `hand.rs` reads it, `peers.rs` holds the others; `system.rs` puts them
//! behind one trait, `race.rs` measures in rounds, `keys.rs` draws keys, `report.rs` prints.

mod hand;
mod keys;
mod peers;
mod race;
mod report;
mod system;
mod tree;

use std::{num::NonZeroUsize, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use clap::Parser;
use farlink_children::huge_pages;

use crate::{
    keys::{DRAWN, Distribution},
    system::{ALL, SystemUnderTest, World},
};

/// Compares lookups in farlink's B+-tree, all in local memory, with local in-memory indexes.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Keys in each index.
    #[arg(long, default_value_t = 10_000_000)]
    keys: u64,
    /// Numbers of threads to measure with.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<NonZeroUsize>,
    /// Lookups that each thread keeps in flight, for those who can.
    #[arg(long, value_delimiter = ',', default_value = "1,8")]
    in_flight: Vec<NonZeroUsize>,
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Rounds: in each, every system is measured once. The median round is reported.
    #[arg(long, default_value = "3")]
    rounds: NonZeroUsize,
    /// Only these systems.
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(ALL.iter().map(|(name, _)| *name)))]
    only: Vec<String>,
    /// Which keys are looked up. Every lookup finds its key.
    #[arg(long, value_enum, default_value = "uniform")]
    distribution: Distribution,
    /// Prints one JSON object a line.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    huge_pages::for_all();
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("farlink-peers: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let time = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let [threads, in_flight] =
        [&args.threads, &args.in_flight].map(|all| all.iter().map(|n| n.get()).collect::<Vec<_>>());
    let threads_max = threads.iter().copied().max().unwrap_or(1);
    let drawn = (0..threads_max as u64)
        .map(|seed| keys::draw(args.distribution, args.keys, DRAWN, seed))
        .collect::<anyhow::Result<Vec<Arc<[u64]>>>>()?;
    let (systems, huge) = build(args)?;
    let mut report = report::Report::new(args.json, args.keys, args.distribution, huge);
    for threads in threads {
        let entries = race::race(&systems, &drawn[..threads], &in_flight, args.rounds.get(), time)?;
        report.add(threads, &entries);
    }
    report.print();
    Ok(())
}

/// The systems, and the share of each one's memory that is in huge pages.
type Built = (Vec<Box<dyn SystemUnderTest>>, Vec<(&'static str, Option<f64>)>);

fn build(args: &Args) -> anyhow::Result<Built> {
    let mut world = World::new(keys::sorted(args.keys));
    let (mut systems, mut huge) = (Vec::new(), Vec::new());
    for (name, build) in ALL {
        if args.only.is_empty() || args.only.iter().any(|only| only == name) {
            eprintln!("building {name}");
            world.count_memory();
            systems.push(build(&mut world)?);
            huge.push((*name, world.huge_share()));
        }
    }
    Ok((systems, huge))
}
