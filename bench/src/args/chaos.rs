//! The options of a chaos, and the bench that they mean.

use std::time::Duration;

use anyhow::{bail, ensure};
use clap::{Args, Parser as _, value_parser};
use farlink_offload::Durability;

use super::{BenchArgs, Cli, Command};
use crate::plan::{Plan, PolicyChoice};
use crate::program::Kind;
use crate::subject::AccessMode;
use crate::units::parse_duration;

/// A chaos itself stops processes for a while, and those that it starts have nothing to say at first.
const SILENCE_MIN: Duration = Duration::from_secs(1);
/// Pages of an owner's cache, but one at least for each operation of all processes: less than it owns, so that they leave.
const CACHE_BYTES: u32 = 16 << 10;

#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    /// How often a process is killed.
    #[arg(long, default_value_t = 20, value_parser = value_parser!(u64).range(1..))]
    pub(crate) kills: u64,
    /// The structure, an ordered map: one of those that `farlink list` names, the first of them unless given.
    #[arg(long, value_name = "NAME")]
    pub(crate) structure: Option<String>,
    /// How processes reach it, as of `farlink bench`.
    #[arg(long, value_parser = crate::by_name::access_mode(), default_value = "one-sided")]
    pub(crate) access: AccessMode,
    /// What of an owner's changes survives its death, as of `farlink bench`.
    #[arg(long, value_parser = crate::by_name::durability())]
    pub(crate) durability: Option<Durability>,
    /// Compute processes: 4, or 1 where one process owns the structure. Several own a part each, with --durability logged.
    #[arg(long, value_parser = value_parser!(u32).range(1..=64))]
    pub(crate) processes: Option<u32>,
    /// Operations that each process keeps in flight.
    #[arg(long, default_value_t = 8, value_parser = value_parser!(u32).range(1..=256))]
    pub(crate) in_flight: u32,
    /// Keys of each process.
    #[arg(long, default_value_t = 2000, value_parser = value_parser!(u32).range(256..))]
    pub(crate) keys: u32,
    /// A process that says nothing for so long is stuck, and the run has failed. 1s at least.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub(crate) silence: Duration,
    /// Decides who is killed and what is done, but not how fast each process is.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ChaosArgs {
    /// The plan of a bench of that kind: what the processes are told.
    pub(crate) fn plan(&self, known: &dyn Kind) -> anyhow::Result<(Plan, BenchArgs)> {
        ensure!(
            self.silence >= SILENCE_MIN,
            "a process that is stopped for a while, or begins, would seem to be stuck: give --silence 1s or more"
        );
        let owns = matches!(self.access, AccessMode::Cached | AccessMode::Engine);
        let processes = self.processes.unwrap_or(if owns { 1 } else { 4 });
        ensure!(
            !owns || processes == 1 || self.durability == Some(Durability::Logged),
            "several owners lose what they have not written back, and nobody knows which of them did what: give --durability logged, or \
             --processes 1"
        );
        let mut args = vec![
            "farlink".to_owned(),
            "bench".to_owned(),
            format!("--structure={}", known.name()),
            format!("--access={}", self.access),
            format!("--processes={processes}"),
            "--workers=1".to_owned(),
            format!("--in-flight={}", self.in_flight),
            format!("--keys={}", u64::from(self.keys) * u64::from(processes)),
            "--load=insert".to_owned(),
            format!("--seed={}", self.seed),
        ];
        args.extend(self.durability.map(|durability| format!("--durability={durability}")));
        let Command::Bench(args) = Cli::try_parse_from(args)?.command else { bail!("no arguments of a bench") };
        let mut plan = args.plan(known)?;
        if plan.access.asks_a_policy() {
            // Where memory is as near as here, one that looks at costs ships nothing.
            plan.policy = PolicyChoice::AtRandom;
        }
        plan.cache_pages_max = owns.then_some((CACHE_BYTES / plan.page_bytes.max(1)).max(self.in_flight * processes));
        Ok((plan, *args))
    }
}
