//! The command line of `farlink figure`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, value_parser};

use crate::load_choice::LoadChoice;
use crate::plan::AdmissionChoice;
use crate::subject::InsertOrder;
use crate::units::{
    number, parse_bytes, parse_bytes_per_second, parse_count, parse_duration, parse_duration_or_zero, parse_fill,
    parse_nanoseconds, parse_page_bytes,
};

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
    /// What each part of DEX brings (VLDB 2024, figure 8): partitions, a cache, shipping; in remote operations and bytes.
    ///
    /// Rows for skewed and for uniform keys, and plots, dex-ablation.svg. Everything is counted, nothing is timed.
    DexAblation(AblationArgs),
    /// Leaves admitted to the cache with a probability, over cache sizes (DEX, VLDB 2024, figure 18).
    ///
    /// Rows, and a plot, dex-admission.svg. Everything is counted, nothing is timed.
    DexAdmission(AdmissionArgs),
    /// What operations see of a region that goes to another owner (DEX, VLDB 2024, figure 10): throughput over time.
    ///
    /// Rows, and plots, dex-repartition.svg. Owners and a memory server in this process, on two cores; the latency is modelled.
    DexRepartition(RepartitionArgs),
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
    /// Records copied, gathered by the card, or sent with their pages for the client to merge (To Copy or Not to Copy, 2016).
    ///
    /// Rows, and plots, to-copy.svg. Transmissions are counted; a model of the paper's card and processors makes times and cycles of
    /// the counts.
    ToCopy(ToCopyArgs),
    /// A picture of an R-tree: the boxes of each level, one colour for each.
    ///
    /// Rectangles from a file, or drawn as Catfish does, in a tree in this process's memory.
    RtreeMap(RtreeMapArgs),
    /// What a search of an R-tree costs in each way to reach it: pages, messages, bytes, round trips; and in Catfish's scheme
    /// (ICDCS 2019).
    ///
    /// Rows, and plots, rtree.svg, for each scale of Catfish's searches. Everything is counted, nothing is timed.
    Rtree(RTreeArgs),
    /// The R-tree, all of it in local memory, beside rstar, static_aabb2d_index and packed_spatial_index: loads, searches, inserts.
    ///
    /// One thread; the indexes take turns, and every turn is compared with rstar's.
    #[cfg(feature = "peers")]
    RtreeLocal(RtreeLocalArgs),
}

/// What every figure takes.
#[derive(Debug, Args)]
pub(crate) struct CommonArgs {
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Table2Args {
    /// Keys in the tree; the paper has 200 million.
    #[arg(long, value_name = "COUNT", default_value = "10M", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.99)]
    pub(crate) theta: f64,
    /// Compute servers; each owns an equal range of the keys.
    #[arg(long, default_value_t = 4)]
    pub(crate) compute_servers: u64,
    /// Memory servers.
    #[arg(long, default_value_t = 4, value_parser = value_parser!(u64).range(1..=256))]
    pub(crate) memory_servers: u64,
    /// The cache of each compute server, in percent of the raw data (16 bytes a key) of all keys.
    #[arg(long, default_value_t = 8.0, value_parser = parse_percent)]
    pub(crate) cache_percent: f64,
    /// Measured operations of each mix, over all compute servers. As many as there are keys unless given, but ten million at
    /// most, and without a cache two.
    #[arg(long, value_parser = parse_count)]
    pub(crate) ops: Option<u64>,
    /// Operations before those, to fill caches; twice as many as there are keys unless given.
    #[arg(long, value_name = "COUNT", value_parser = parse_warm_up_ops)]
    pub(crate) warm_up_ops: Option<u64>,
    /// Operations that each compute server keeps in flight.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) in_flight: u32,
    /// How a cache decides which missed leaves to take in.
    #[arg(long, value_enum, default_value = "frequency")]
    pub(crate) admission: AdmissionChoice,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct AblationArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "1M", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// The exponent of zipf of the skewed keys.
    #[arg(long, default_value_t = 0.99)]
    pub(crate) theta: f64,
    /// Compute servers; each owns an equal range of the keys.
    #[arg(long, default_value_t = 1)]
    pub(crate) compute_servers: u64,
    /// Memory servers.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u64).range(1..=256))]
    pub(crate) memory_servers: u64,
    /// The cache of each compute server, in percent of the raw data (16 bytes a key) of all keys; 64 KiB at least.
    #[arg(long, default_value_t = 1.0, value_parser = parse_percent)]
    pub(crate) cache_percent: f64,
    /// Measured operations of each step, over all compute servers; as many as there are keys unless given.
    #[arg(long, value_parser = parse_count)]
    pub(crate) ops: Option<u64>,
    /// Operations before those, to fill caches; twice as many as there are keys unless given.
    #[arg(long, value_name = "COUNT", value_parser = parse_warm_up_ops)]
    pub(crate) warm_up_ops: Option<u64>,
    /// The folder to which `dex-ablation.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct AdmissionArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "1M", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.99)]
    pub(crate) theta: f64,
    /// Cache sizes in percent of the raw data, 16 bytes a key; the paper has 2 to 32.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "2,4,8,16,32", value_parser = parse_percent)]
    pub(crate) cache_percents: Vec<f64>,
    /// Probabilities, beside 1, with which they are compared; 0: never.
    #[arg(long, value_name = "P[,...]", value_delimiter = ',', default_value = "0,0.01,0.1,0.5", value_parser = parse_probability)]
    pub(crate) probabilities: Vec<f64>,
    /// Measured operations of each run; as many as there are keys unless given.
    #[arg(long, value_parser = parse_count)]
    pub(crate) ops: Option<u64>,
    /// Operations before those, to fill the cache; twice as many as there are keys unless given.
    #[arg(long, value_name = "COUNT", value_parser = parse_warm_up_ops)]
    pub(crate) warm_up_ops: Option<u64>,
    /// The folder to which `dex-admission.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RepartitionArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "6M", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.99)]
    pub(crate) theta: f64,
    /// Compute servers; each owns an equal range of the keys at first.
    #[arg(long, default_value_t = 3)]
    pub(crate) compute_servers: u64,
    /// The cache of each compute server; the paper has 256 MB to 1 GiB.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_bytes)]
    pub(crate) cache: u64,
    /// Operations that each compute server keeps in flight.
    #[arg(long, default_value_t = 8, value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) in_flight: u32,
    /// Nanoseconds added to every operation of the fabric.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "2us")]
    pub(crate) latency: u64,
    /// How long operations go before anything is counted, to fill caches.
    #[arg(long, visible_alias = "warm-up", value_name = "TIME", default_value = "4s", value_parser = parse_duration_or_zero)]
    pub(crate) warm_up_seconds: Duration,
    /// How long from then until the region moves.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    pub(crate) before: Duration,
    /// How long they go on afterwards.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    pub(crate) after: Duration,
    /// What is counted is counted for so long at a time.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = parse_duration)]
    pub(crate) slot: Duration,
    /// The folder to which `dex-repartition.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReplacementArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "1M", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// Exponents of zipf, a panel of the plot for each.
    #[arg(long, value_name = "EXPONENT[,...]", value_delimiter = ',', default_value = "0.6,0.8,0.99,1.2")]
    pub(crate) theta: Vec<f64>,
    /// Cache sizes in percent of the raw data, 16 bytes a key.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = parse_percent)]
    pub(crate) cache_percents: Vec<f64>,
    /// Measured lookups of each run; as many as there are keys unless given.
    #[arg(long, value_parser = parse_count)]
    pub(crate) ops: Option<u64>,
    /// Lookups before those, to fill the cache; twice as many as there are keys unless given.
    #[arg(long, value_name = "COUNT", value_parser = parse_warm_up_ops)]
    pub(crate) warm_up_ops: Option<u64>,
    /// The folder to which `replacement.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct OffloadArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "200k", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// The exponent of zipf: 0 is uniform, larger is more skewed.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) theta: f64,
    /// Bytes of a page: a power of two. With small ones, much of a path is missing from a small cache.
    #[arg(long, default_value_t = 256, value_parser = parse_page_bytes)]
    pub(crate) page_bytes: u32,
    /// How full the load makes each page, 0.1 to 1.
    #[arg(long, default_value_t = 0.2, value_parser = parse_fill)]
    pub(crate) fill: f64,
    /// Of a hundred operations, so many overwrite a value; the others look one up.
    #[arg(long, value_name = "PERCENT", default_value_t = 50, value_parser = value_parser!(u32).range(..=100))]
    pub(crate) update_percent: u32,
    /// Nanoseconds added to every operation of the fabric.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "10us")]
    pub(crate) latency: u64,
    /// What a page takes that an operation looks at on the memory server.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "3500")]
    pub(crate) page_time: u64,
    /// Threads of the memory server, modelled.
    #[arg(long, value_name = "COUNT[,...]", value_delimiter = ',', default_value = "1,2,4,8", value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) server_threads: Vec<u32>,
    /// Cache sizes, in percent of the tree's pages. The smallest one is used over the threads.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "1,2,4,8,16", value_parser = parse_percent)]
    pub(crate) cache_percents: Vec<f64>,
    /// Workers of the compute server, each with one operation in flight.
    #[arg(long, default_value_t = 7, value_parser = value_parser!(u32).range(1..=63))]
    pub(crate) workers: u32,
    /// How long each run lasts: 300ms; a bare number is seconds.
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse_duration)]
    pub(crate) seconds: Duration,
    /// How long before those, to fill the cache and to learn what things take.
    #[arg(long, visible_alias = "warm-up", value_name = "TIME", default_value = "200ms", value_parser = parse_duration_or_zero)]
    pub(crate) warm_up_seconds: Duration,
    /// Runs of each policy, by turns; the median counts.
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// The folder to which `offload.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DesignsArgs {
    /// Keys in the tree.
    #[arg(long, value_name = "COUNT", default_value = "100k", value_parser = parse_keys)]
    pub(crate) keys: u64,
    /// Bytes of a page: a power of two.
    #[arg(long, default_value_t = 1024, value_parser = parse_page_bytes)]
    pub(crate) page_bytes: u32,
    /// How full the load makes each page, 0.1 to 1.
    #[arg(long, default_value_t = 0.7, value_parser = parse_fill)]
    pub(crate) fill: f64,
    /// Memory servers. With four, the skewed data are 80, 12, 5 and 3 percent of all; with more or fewer there is no skew.
    #[arg(long, default_value_t = 4, value_parser = value_parser!(u32).range(1..=16))]
    pub(crate) memory_servers: u32,
    /// Clients, each with one query at a time; 200 at most, as many as a channel keeps in flight.
    #[arg(long, value_name = "COUNT[,...]", value_delimiter = ',', default_value = "2,8,32,128", value_parser = value_parser!(u32).range(1..=200))]
    pub(crate) clients: Vec<u32>,
    /// Shares of all keys that range queries ask for.
    #[arg(long, value_name = "SHARE[,...]", value_delimiter = ',', default_value = "0.001,0.01", value_parser = parse_selectivity)]
    pub(crate) selectivities: Vec<f64>,
    /// Processors of each memory server, modelled.
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) server_threads: u32,
    /// What a page takes that an operation looks at on a memory server.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "40us")]
    pub(crate) page_time: u64,
    /// Nanoseconds added to every operation of the fabric.
    #[arg(long, value_name = "TIME", value_parser = parse_nanoseconds, default_value = "20us")]
    pub(crate) latency: u64,
    /// Bytes a second that the card of a memory server lets through.
    #[arg(long, value_name = "RATE", value_parser = parse_bytes_per_second, default_value = "16MiB/s")]
    pub(crate) bandwidth: u64,
    /// How long each run lasts: 300ms; a bare number is seconds.
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = parse_duration)]
    pub(crate) seconds: Duration,
    /// How long before those.
    #[arg(long, visible_alias = "warm-up", value_name = "TIME", default_value = "100ms", value_parser = parse_duration_or_zero)]
    pub(crate) warm_up_seconds: Duration,
    /// The folder to which `fg-cg-hybrid.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ToCopyArgs {
    /// Messages of each kind that are sent and counted.
    #[arg(long, value_name = "COUNT", default_value = "100", value_parser = parse_count)]
    pub(crate) messages: u64,
    /// Updates of a Bw-tree for each length of its chains.
    #[arg(long, value_name = "COUNT", default_value = "3200", value_parser = parse_count)]
    pub(crate) updates: u64,
    /// The folder to which `to-copy.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RtreeMapArgs {
    /// Where the picture goes.
    #[arg(value_name = "FILE.svg")]
    pub(crate) file: PathBuf,
    /// How many rectangles to draw at random.
    #[arg(long, value_name = "COUNT", default_value = "3000", conflicts_with = "rects_file", value_parser = parse_count)]
    pub(crate) keys: u64,
    /// Rectangles from this file instead (`-`: standard input), as in a bench.
    #[arg(long, value_name = "FILE")]
    pub(crate) rects_file: Option<PathBuf>,
    /// How they get into the tree: bulk, unless an order of inserts is given.
    #[arg(long, value_enum)]
    pub(crate) load: Option<LoadChoice>,
    /// In which order they are inserted, with --load insert, which this implies (random).
    #[arg(long, value_enum)]
    pub(crate) insert_order: Option<InsertOrder>,
    /// How full a bulk load makes each page, from 0.1 to 1 (0.9).
    #[arg(long, value_parser = parse_fill)]
    pub(crate) fill: Option<f64>,
    /// Bytes of a page: a power of two from 1024 to 16384.
    #[arg(long, value_name = "SIZE", default_value = "1024", value_parser = parse_page_bytes)]
    pub(crate) page_bytes: u32,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[derive(Debug, Args)]
pub(crate) struct RTreeArgs {
    /// Rectangles in the tree: at uniform places, with edges of up to 1e-4.
    #[arg(long, visible_alias = "keys", value_name = "COUNT", default_value = "2M", value_parser = parse_rects)]
    pub(crate) rects: u64,
    /// Measured searches of each run.
    #[arg(long, value_name = "COUNT", default_value = "5k", value_parser = parse_count)]
    pub(crate) ops: u64,
    /// Searches before those, to fill the cache.
    #[arg(long, value_name = "COUNT", default_value = "50k", value_parser = parse_warm_up_ops)]
    pub(crate) warm_up_ops: u64,
    /// Cache sizes in percent of the tree's pages.
    #[arg(long, value_name = "PERCENT[,...]", value_delimiter = ',', default_value = "1,8,32", value_parser = parse_percent)]
    pub(crate) cache_percents: Vec<f64>,
    /// Pages of one search that are on their way at a time, at most.
    #[arg(long, value_name = "PAGES", default_value_t = 16, value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) window: u32,
    /// Bytes of a page, a power of two.
    #[arg(long, value_name = "SIZE", default_value = "1024", value_parser = parse_page_bytes)]
    pub(crate) page_bytes: u32,
    /// The folder to which `rtree.svg` is written.
    #[arg(long, value_name = "DIR", default_value = "target/figures")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

#[cfg(feature = "peers")]
#[derive(Debug, Args)]
pub(crate) struct RtreeLocalArgs {
    /// Rectangles in each index; a quarter of them are inserted one by one. What is checked has to hold of 2M.
    #[arg(long, value_name = "COUNT", default_value = "2M", value_parser = parse_rects)]
    pub(crate) entries: u64,
    /// Bytes of our pages: a power of two from 1024 to 16384.
    #[arg(long, default_value_t = 1024, value_parser = parse_page_bytes)]
    pub(crate) page_bytes: u32,
    /// Rounds of searches.
    #[arg(long, default_value_t = 25, value_parser = value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Rounds of bulk loads, and of inserts.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..=1000))]
    pub(crate) loads: u32,
    /// Have malloc ask for huge pages, as our cache does: the others' memory is of small ones where the system gives huge ones only to who asks.
    #[arg(long)]
    pub(crate) huge_pages: bool,
    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

fn parse_rects(text: &str) -> Result<u64, String> {
    let fits = |rects: &u64| (1000..=100_000_000).contains(rects);
    Some(parse_count(text)?).filter(fits).ok_or_else(|| "it is to be from 1000 to 100M".to_owned())
}

fn parse_percent(text: &str) -> Result<f64, String> {
    number(text, |percent| percent.is_finite() && percent > 0.0, "a number above 0")
}

fn parse_probability(text: &str) -> Result<f64, String> {
    number(text, |probability| (0.0..=1.0).contains(&probability), "a number from 0 to 1")
}

fn parse_warm_up_ops(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { parse_count(text) }
}

fn parse_keys(text: &str) -> Result<u64, String> {
    let fits = |keys: &u64| (1000..=10_000_000).contains(keys);
    Some(parse_count(text)?).filter(fits).ok_or_else(|| "it is to be from 1000 to 10M".to_owned())
}

fn parse_selectivity(text: &str) -> Result<f64, String> {
    number(text, |share| share > 0.0 && share <= 0.5, "above 0 and at most 0.5")
}
