//! The command line of `farlink figure`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, Subcommand, ValueEnum};

use super::population::Population;
use crate::units::{parse_bytes, parse_nanoseconds};

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
    /// How close cache replacement comes to the best that is possible: hit ratios over cache sizes, skews and policies.
    ///
    /// Rows, and a plot with a panel for each skew, replacement.svg. Lookups of a tree in this process's memory.
    Replacement(ReplacementArgs),
    /// What shipping operations to a memory server brings: never, always and cost-aware, over its threads and cache sizes.
    ///
    /// Rows, and a plot, offload.svg. Workers and a memory server in this process, one thread each; latencies and the memory
    /// server's processors are modelled.
    Offload(OffloadArgs),
    /// Fine-grained, coarse-grained (by range and by hash) and hybrid trees: point and range queries over the number of clients.
    ///
    /// Rows, and plots, fg-cg-hybrid.svg, for uniform data and for data of which one memory server has most. Clients and memory
    /// servers in this process; latencies, the memory servers' cards and their processors are modelled.
    FgCgHybrid(DesignsArgs),
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
    /// Measured operations of each mix, over all compute servers. As many as there are keys unless given, but ten million at
    /// most, and without a cache two.
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// Operations before those, to fill caches; twice as many as there are keys unless given.
    #[arg(long)]
    pub(crate) warm_up_ops: Option<u64>,
    /// Operations that each compute server keeps in flight.
    #[arg(long, default_value_t = 1)]
    pub(crate) in_flight: u32,
    /// How a cache decides which missed leaves to take in.
    #[arg(long, value_enum, default_value = "frequency")]
    pub(crate) admission: AdmissionChoice,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplacementArgs {
    /// Keys in the tree.
    #[arg(long, default_value_t = 1_000_000)]
    pub(crate) keys: u64,
    /// Exponents of zipf, a panel of the plot for each.
    #[arg(long, value_name = "EXPONENT[,...]", value_delimiter = ',', default_value = "0.6,0.8,0.99,1.2")]
    pub(crate) theta: Vec<f64>,
    /// Cache sizes in percent of the raw data, 16 bytes a key.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    pub(crate) cache_percents: Vec<f64>,
    /// Measured lookups of each run; as many as there are keys unless given.
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// Lookups before those, to fill the cache; twice as many as there are keys unless given.
    #[arg(long)]
    pub(crate) warm_up_ops: Option<u64>,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The folder to which `replacement.svg` is written.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct OffloadArgs {
    /// Keys in the tree.
    #[arg(long, default_value_t = 200_000)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) theta: f64,
    /// Bytes of a page: a power of two from 256 to 4096. With small ones, much of a path is missing from a small cache.
    #[arg(long, default_value_t = 256)]
    pub(crate) page_bytes: usize,
    /// How full the load makes each page, 0.1 to 1.
    #[arg(long, default_value_t = 0.2)]
    pub(crate) fill: f64,
    /// Of a hundred operations, so many overwrite a value; the others look one up.
    #[arg(long, value_name = "PERCENT", default_value_t = 50)]
    pub(crate) update_percent: u32,
    /// Nanoseconds added to every operation of the fabric.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "10us")]
    pub(crate) latency: u64,
    /// What a page takes that an operation looks at on the memory server.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "3500")]
    pub(crate) page_time: u64,
    /// Threads of the memory server, modelled.
    #[arg(long, value_name = "COUNT[,...]", value_delimiter = ',', default_value = "1,2,4,8")]
    pub(crate) server_threads: Vec<usize>,
    /// Cache sizes, in percent of the tree's pages. The smallest one is used over the threads.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "1,2,4,8,16")]
    pub(crate) cache_percents: Vec<f64>,
    /// Workers of the compute server, each with one operation in flight.
    #[arg(long, default_value_t = 7)]
    pub(crate) workers: usize,
    /// Seconds of each run.
    #[arg(long, default_value_t = 0.3)]
    pub(crate) seconds: f64,
    /// Seconds before those, to fill the cache and to learn what things take.
    #[arg(long, default_value_t = 0.2)]
    pub(crate) warm_up_seconds: f64,
    /// Runs of each policy, by turns; the median counts.
    #[arg(long, default_value_t = 5)]
    pub(crate) repeats: u32,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The folder to which `offload.svg` is written.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DesignsArgs {
    /// Keys in the tree.
    #[arg(long, default_value_t = 100_000)]
    pub(crate) keys: u64,
    /// Bytes of a page: a power of two from 256 to 4096.
    #[arg(long, default_value_t = 1024)]
    pub(crate) page_bytes: usize,
    /// How full the load makes each page, 0.1 to 1.
    #[arg(long, default_value_t = 0.7)]
    pub(crate) fill: f64,
    /// Memory servers. With four, the skewed data are 80, 12, 5 and 3 percent of all; with more or fewer there is no skew.
    #[arg(long, default_value_t = 4)]
    pub(crate) memory_servers: usize,
    /// Clients, each with one query at a time.
    #[arg(long, value_name = "COUNT[,...]", value_delimiter = ',', default_value = "2,8,32,128")]
    pub(crate) clients: Vec<usize>,
    /// Shares of all keys that range queries ask for.
    #[arg(long, value_name = "SHARE[,...]", value_delimiter = ',', default_value = "0.001,0.01")]
    pub(crate) selectivities: Vec<f64>,
    /// Processors of each memory server, modelled.
    #[arg(long, default_value_t = 2)]
    pub(crate) server_threads: usize,
    /// What a page takes that an operation looks at on a memory server.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "40us")]
    pub(crate) page_time: u64,
    /// Nanoseconds added to every operation of the fabric.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "20us")]
    pub(crate) latency: u64,
    /// Bytes a second that the card of a memory server lets through.
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "16M")]
    pub(crate) bandwidth: u64,
    /// Seconds of each run.
    #[arg(long, default_value_t = 0.3)]
    pub(crate) seconds: f64,
    /// Seconds before those.
    #[arg(long, default_value_t = 0.1)]
    pub(crate) warm_up_seconds: f64,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// The folder to which `fg-cg-hybrid.svg` is written.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(crate) out: PathBuf,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

impl DesignsArgs {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        ensure!((1000..=10_000_000).contains(&self.keys), "--keys must be 1000 to 10000000");
        let is_page = self.page_bytes.is_power_of_two() && (256..=4096).contains(&self.page_bytes);
        ensure!(is_page, "--page-bytes {}: a power of two from 256 to 4096", self.page_bytes);
        ensure!((0.1..=1.0).contains(&self.fill), "--fill {} is not 0.1 to 1", self.fill);
        ensure!((1..=16).contains(&self.memory_servers), "--memory-servers must be 1 to 16");
        // As many as a channel keeps in flight.
        let are_few = !self.clients.is_empty() && self.clients.iter().all(|clients| (1..=200).contains(clients));
        ensure!(are_few, "--clients are 1 to 200 each");
        for share in &self.selectivities {
            ensure!(*share > 0.0 && *share <= 0.5, "--selectivities {share} is not above 0 and at most 0.5");
        }
        ensure!(self.server_threads > 0, "--server-threads must be at least 1");
        ensure!(self.seconds.is_finite() && self.seconds > 0.0, "--seconds {} is not above 0", self.seconds);
        ensure!((0.0..=3600.0).contains(&self.warm_up_seconds), "--warm-up-seconds must be 0 to 3600");
        Ok(())
    }
}

impl OffloadArgs {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        ensure!(self.repeats > 0, "--repeats must be at least 1");
        ensure!((1..=63).contains(&self.workers), "--workers must be 1 to 63");
        ensure!(self.seconds.is_finite() && self.seconds > 0.0, "--seconds {} is not above 0", self.seconds);
        ensure!((0.0..=3600.0).contains(&self.warm_up_seconds), "--warm-up-seconds must be 0 to 3600");
        ensure!(self.update_percent <= 100, "--update-percent {} is more than 100", self.update_percent);
        let is_page = self.page_bytes.is_power_of_two() && (256..=4096).contains(&self.page_bytes);
        ensure!(is_page, "--page-bytes {}: a power of two from 256 to 4096", self.page_bytes);
        ensure!((0.1..=1.0).contains(&self.fill), "--fill {} is not 0.1 to 1", self.fill);
        ensure!(
            !self.server_threads.is_empty() && self.server_threads.iter().all(|threads| (1..=4096).contains(threads)),
            "--server-threads are 1 to 4096 each"
        );
        for percent in &self.cache_percents {
            ensure!(percent.is_finite() && *percent > 0.0, "--cache-percents {percent} is not a number above 0");
        }
        Ok(())
    }
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
        ensure!((1..=4096).contains(&self.in_flight), "--in-flight must be 1 to 4096");
        ensure!(self.ops != Some(0), "--ops must be at least 1");
        Ok(())
    }
}

impl ReplacementArgs {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        for percent in &self.cache_percents {
            ensure!(percent.is_finite() && *percent > 0.0, "--cache-percents {percent} is not a number above 0");
        }
        ensure!(self.ops != Some(0), "--ops must be at least 1");
        Ok(())
    }

    /// The same keys for each exponent.
    pub(crate) fn populations(&self) -> anyhow::Result<Vec<Population>> {
        self.theta.iter().map(|theta| Population::new(self.keys, *theta, 1, self.seed)).collect()
    }
}

impl AdmissionChoice {
    /// The name that people read.
    pub(crate) fn policy(self) -> &'static str {
        match self {
            Self::Probability => "probability (DEX)",
            other => other.name(),
        }
    }

    /// The name that a row carries.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Probability => "probability",
            Self::Frequency => "frequency",
        }
    }
}
