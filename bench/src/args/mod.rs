//! The command line: what each command takes.
//!
//! `bench.rs` has the options of a bench, and `meaning.rs` the plan that they mean.

mod bench;
mod chaos;
mod meaning;
mod serve;

use anyhow::ensure;
use clap::{Args, Parser, Subcommand};

pub(crate) use self::bench::BenchArgs;
pub(crate) use self::chaos::ChaosArgs;
pub(crate) use self::serve::{FabricChoice, ServeArgs};
use crate::figure::FigureArgs;
use crate::place::{Address, ConnectArgs, VERBS_OPTIONS, VerbsArgs, WaitArgs};

/// Link-based data structures in disaggregated memory: serve memory, measure, check.
#[derive(Debug, Parser)]
#[command(name = "farlink", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Build a structure in disaggregated memory, run workloads on it, and check it.
    ///
    /// Without options: two memory servers as processes of their own, one compute process with two workers, a million
    /// keys loaded into a B+-tree, YCSB A to F one after another, then the tree's check. Exit status 0 only if all of it held.
    Bench(Box<BenchArgs>),
    /// Serve memory until told to stop (SIGTERM, SIGINT or SIGHUP).
    Serve(ServeArgs),
    /// Check the structures of a running cluster. Nobody may change them meanwhile.
    Check(CheckArgs),
    /// List the structures of a running cluster; without --connect, those that this program knows, and their workloads.
    List(ListArgs),
    /// Show who owns what of a structure of a running cluster, and move regions, while it is used.
    Repartition(RepartitionArgs),
    /// Remove a structure from a running cluster, and free its pages. Nobody may use it any more.
    Drop(DropArgs),
    /// List the RDMA devices of this machine, with what matters about them.
    Devices(DevicesArgs),
    /// Make a figure or a table of the evaluation.
    Figure(FigureArgs),
    /// Kill compute processes at random under a load of inserts and removes, and check that nothing they were answered is lost.
    Chaos(ChaosArgs),
    /// One compute process of a chaos; started by it.
    #[command(hide = true)]
    ChaosProcess,
    /// One compute process of a bench; started by it, and told what to do on standard input.
    #[command(hide = true)]
    Compute,
}

#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) cluster: ConnectArgs,
    /// Check only the structure of this name.
    #[arg(long, alias = "tree", value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// First free pages that are nobody's: a Bw-tree has some after compute servers have died. Others may use it meanwhile; but then the
    /// check may find faults where there are none.
    #[arg(long)]
    pub(crate) free_leaked: bool,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct RepartitionArgs {
    #[command(flatten)]
    pub(crate) cluster: ConnectArgs,
    /// The structure.
    #[arg(long, default_value = "bench")]
    pub(crate) name: String,
    /// Move this region, or a piece of one: LOW..HIGH, LOW.. or ..HIGH of an ordered map. It gets smaller if it would cut a leaf.
    #[arg(long, value_name = "REGION", conflicts_with_all = ["away_from", "balance"])]
    pub(crate) region: Option<String>,
    /// Move all that this compute server owns, so that it can go.
    #[arg(long, value_name = "OWNER", conflicts_with = "balance")]
    pub(crate) away_from: Option<u32>,
    /// Move hot regions, or pieces of them, until no owner has more than 1.1 times the average of uses. If one has more all the same, that
    /// is an error.
    #[arg(long)]
    pub(crate) balance: bool,
    /// The compute servers that take, by the numbers that the map shows; also such that own nothing yet.
    #[arg(long, value_name = "OWNER[,OWNER...]", value_delimiter = ',')]
    pub(crate) to: Vec<u32>,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// The running cluster: its folder, or verbs://HOST:PORT[,HOST:PORT...] over RDMA.
    #[arg(long, value_name = "DIR|verbs://...")]
    connect: Option<Address>,
    #[command(flatten)]
    verbs: VerbsArgs,
    #[command(flatten)]
    wait: WaitArgs,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

impl ListArgs {
    /// The cluster, if one is named.
    pub(crate) fn cluster(&self) -> anyhow::Result<Option<ConnectArgs>> {
        let Some(connect) = self.connect.clone() else {
            ensure!(!self.verbs.is_given(), "{VERBS_OPTIONS} go with --connect verbs://HOST:PORT");
            return Ok(None);
        };
        Ok(Some(ConnectArgs { connect, verbs: self.verbs.clone(), wait: self.wait.clone() }))
    }
}

#[derive(Debug, Args)]
pub(crate) struct DropArgs {
    #[command(flatten)]
    pub(crate) cluster: ConnectArgs,
    /// The structure's name in the catalog.
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
