//! The command line of `farlink figure`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, Subcommand, ValueEnum};

use super::population::Population;

/// Which figure.
#[derive(Debug, Args)]
pub(crate) struct FigureArgs {
    #[command(subcommand)]
    pub(crate) figure: Figure,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Figure {
    /// Remote operations per index operation: the RDMA statistics of DEX (VLDB 2024, table 2), and ours.
    ///
    /// A bulk-loaded tree in this process's memory; every compute server is one worker on a thread of its own.
    DexTable2(Table2Args),
    /// How close cache replacement comes to the best that is possible: remote reads over cache sizes.
    Replacement(ReplacementArgs),
}

/// The keys and who draws them.
#[derive(Debug, Args)]
pub(crate) struct PopulationArgs {
    /// Keys in the tree; the paper has 200 million.
    #[arg(long, default_value_t = 10_000_000)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.99)]
    pub(crate) theta: f64,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

#[derive(Debug, Args)]
pub(crate) struct Table2Args {
    #[command(flatten)]
    pub(crate) population: PopulationArgs,
    /// Compute servers; each owns an equal range of the keys.
    #[arg(long, default_value_t = 4)]
    pub(crate) compute_servers: u64,
    /// Memory servers.
    #[arg(long, default_value_t = 4)]
    pub(crate) memory_servers: u64,
    /// The cache of each compute server, in percent of the raw data (16 bytes a key) of all keys.
    #[arg(long, default_value_t = 8.0)]
    pub(crate) cache_percent: f64,
    /// Measured operations of each mix, over all compute servers; as many as there are keys unless given.
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// Operations before those, to fill caches; twice as many as there are keys unless given.
    #[arg(long)]
    pub(crate) warm_up_ops: Option<u64>,
    /// How a cache decides which missed leaves to take in.
    #[arg(long, value_enum, default_value = "frequency")]
    pub(crate) admission: AdmissionChoice,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplacementArgs {
    #[command(flatten)]
    pub(crate) population: PopulationArgs,
    /// Compute servers; each owns an equal range of the keys.
    #[arg(long, default_value_t = 1)]
    pub(crate) compute_servers: u64,
    /// The folder to which `replacement.svg` is written.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which missed leaves a cache takes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AdmissionChoice {
    /// All.
    Always,
    /// One in ten, as DEX does.
    Probability,
    /// Those used more often than what would go for them.
    Frequency,
}

impl PopulationArgs {
    /// The keys that these arguments mean.
    pub(crate) fn population(&self, compute_servers: u64) -> anyhow::Result<Population> {
        Population::new(self.keys, self.theta, compute_servers, self.seed)
    }
}

impl Table2Args {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        let percent = self.cache_percent;
        ensure!(percent.is_finite() && percent >= 0.0, "--cache-percent {percent} is not a number of at least 0");
        ensure!((1..=256).contains(&self.memory_servers), "--memory-servers must be 1 to 256");
        ensure!(self.ops != Some(0), "--ops must be at least 1");
        Ok(())
    }
}

impl AdmissionChoice {
    /// The name that a row carries.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Probability => "probability",
            Self::Frequency => "frequency",
        }
    }
}
