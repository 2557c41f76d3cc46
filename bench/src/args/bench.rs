//! The options of a bench.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum, value_parser};
use farlink_offload::Durability;
use farlink_runtime::layout::Records;

use crate::load_choice::LoadChoice;
use crate::maps::workload::Shares;
use crate::place::{Address, VerbsArgs, WaitArgs};
use crate::plan::{AdmissionChoice, PlacementChoice, PolicyChoice, Validation};
use crate::subject::{AccessMode, InsertOrder};
use crate::units::{
    number, parse_bytes, parse_bytes_per_second, parse_count, parse_duration, parse_duration_or_zero, parse_fill,
    parse_nanoseconds, parse_page_bytes,
};

/// How large a cache is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum CacheSize {
    Bytes(u64),
    /// Of the raw data.
    Percent(f64),
}

impl FromStr for CacheSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(share) = text.trim().strip_suffix('%') else { return parse_bytes(text).map(Self::Bytes) };
        match share.trim().parse() {
            Ok(percent) if percent > 0.0 && percent <= 1000.0 => Ok(Self::Percent(percent)),
            _ => Err(format!("`{text}` is not a share of the data, as 8% is")),
        }
    }
}

/// How keys are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DistributionChoice {
    /// Every key alike.
    Uniform,
    /// Zipf with exponent --theta.
    Zipf,
}

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// The structure to measure: one of those that `farlink list` names, the first of them unless given.
    #[arg(long, value_name = "NAME")]
    pub(crate) structure: Option<String>,
    /// How workers reach it. With cached and engine nobody else may change it meanwhile; changed pages are written when they
    /// leave the cache, and at the end of each phase, untimed. With coarse and hybrid each memory server has a part of it.
    #[arg(long, value_parser = crate::by_name::access_mode(), default_value = "one-sided")]
    pub(crate) access: AccessMode,
    /// With engine and adaptive: who decides whether an operation is shipped (cost-aware). With cached, which it makes an
    /// engine.
    #[arg(long, value_enum)]
    pub(crate) policy: Option<PolicyChoice>,
    /// On which memory servers pages are: round-robin, leaves, one-server, subtrees:LEVEL. Without it, what suits --access.
    #[arg(long, alias = "spread", value_name = "POLICY")]
    pub(crate) placement: Option<PlacementChoice>,
    /// The cache of each compute process, shared by its workers: 64MiB, or a share of the raw data (16 bytes a key), as 8%.
    /// Without it 8%, or more if what is in flight needs it.
    #[arg(long, value_name = "SIZE|SHARE%")]
    pub(crate) cache: Option<CacheSize>,
    /// With cached, cached-inner and engine: how the cache decides which missed leaves to take in (frequency).
    #[arg(long, value_enum)]
    pub(crate) admission: Option<AdmissionChoice>,
    /// With cached and engine: what of the changes in the cache survives the death of their process (write-back).
    #[arg(long, value_parser = crate::by_name::durability())]
    pub(crate) durability: Option<Durability>,
    /// Which changes of pages in remote memory are recorded first, so that others can finish them (all).
    #[arg(long, value_parser = crate::by_name::records())]
    pub(crate) records: Option<Records>,
    /// Memory servers to start, each a process.
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u32).range(1..=256))]
    pub(crate) servers: u32,
    /// Memory that each server gives; the default leaves ample room for the keys.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) server_bytes: Option<u64>,
    /// Threads of each memory server that carry out operations: 1 where --access sends any, else none.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(..=256))]
    pub(crate) server_threads: Option<u32>,
    /// Compute processes. With cached and engine each owns a share, and operations go to the owners.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=255))]
    pub(crate) processes: u32,
    /// Workers of each compute process; a worker is one thread.
    #[arg(long, default_value_t = 2, value_parser = value_parser!(u32).range(1..=1024))]
    pub(crate) workers: u32,
    /// Operations that each worker keeps in flight; with a list, each workload runs once with each.
    #[arg(long, value_name = "N[,N...]", value_delimiter = ',', default_value = "1", value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) in_flight: Vec<u32>,
    /// Pages that one operation has on their way at a time, at most, where it needs several; 1: one after the other.
    #[arg(long, value_name = "PAGES", default_value_t = 16, value_parser = value_parser!(u32).range(1..=4096))]
    pub(crate) window: u32,
    /// How long an operation waits for a page that a process has locked which does not go on, or for a sign of life of the owner that it
    /// was sent to. Then the bench ends, and names that one. Without it, until it goes on.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) lock_wait: Option<Duration>,
    /// How many keys to load (a million; with --trace and neither this nor a file, none).
    #[arg(long, value_name = "COUNT", conflicts_with = "keys_file", value_parser = parse_count)]
    pub(crate) keys: Option<u64>,
    /// Load the keys of this file (`-`: standard input): SOSD binary, or one integer a line.
    #[arg(long, value_name = "FILE")]
    pub(crate) keys_file: Option<PathBuf>,
    /// Load the rectangles of this file (`-`: standard input): a line `x1,y1,x2,y2[,id]` for each, or GeoJSON if the
    /// program was built with that. For an R-tree.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["keys", "keys_file"])]
    pub(crate) rects_file: Option<PathBuf>,
    /// How to load them: bulk, unless the structure has no bulk load.
    #[arg(long, value_enum)]
    pub(crate) load: Option<LoadChoice>,
    /// In which order rectangles are inserted, with --load insert, which this implies (random).
    #[arg(long, value_enum)]
    pub(crate) insert_order: Option<InsertOrder>,
    /// How full a bulk load makes each page, from 0.1 to 1 (0.9).
    #[arg(long, value_parser = parse_fill)]
    pub(crate) fill: Option<f64>,
    /// How operations of an ordered map choose among the loaded keys.
    #[arg(long, value_enum, default_value = "zipf")]
    pub(crate) distribution: DistributionChoice,
    /// The exponent of zipf: 0 is uniform, larger is more skewed (0.99).
    #[arg(long, value_parser = parse_theta)]
    pub(crate) theta: Option<f64>,
    /// Workloads to run, as `farlink list` names them. Ordered maps: a to f (YCSB, the usual ones), read-only,
    /// read-intensive, write-intensive, insert-intensive, scan-intensive. R-trees: search-small, search-large, search-power,
    /// mixed-small, mixed-large, mixed-power, point (the usual ones), nearest, move.
    #[arg(long, visible_alias = "workload", value_name = "NAME[,NAME...]", value_delimiter = ',')]
    pub(crate) mix: Vec<String>,
    #[command(flatten)]
    pub(crate) shares: ShareArgs,
    /// Entries that a scan asks for; YCSB E draws from 1 to this.
    #[arg(long, default_value_t = 100, value_parser = value_parser!(u32).range(1..))]
    pub(crate) scan_length: u32,
    /// Bytes of a page, a power of two. Without it, what the structure is used to.
    #[arg(long, value_name = "SIZE", value_parser = parse_page_bytes)]
    pub(crate) page_bytes: Option<u32>,
    /// Latency of every remote operation: 2us, 500ns; a bare number is nanoseconds.
    #[arg(long, visible_alias = "latency-ns", value_name = "TIME", default_value = "0", value_parser = parse_nanoseconds)]
    pub(crate) latency: u64,
    /// Bandwidth of each worker's link to each memory server: 10GB/s, 100Gbit/s; without it, no limit.
    #[arg(long, value_name = "RATE", value_parser = parse_bytes_per_second)]
    pub(crate) bandwidth: Option<u64>,
    /// Tear reads between cache lines in shuffled order and delay operations, as a network card may.
    #[arg(long)]
    pub(crate) nasty: bool,
    /// How a reader proves that it read a page whole.
    #[arg(long, value_enum, default_value = "checksum")]
    pub(crate) validation: Validation,
    /// How long each workload runs: 2s, 500ms; a bare number is seconds (3s without --ops).
    #[arg(long, value_name = "TIME", conflicts_with = "ops", value_parser = parse_duration)]
    pub(crate) seconds: Option<Duration>,
    /// Operations of each workload, over all workers, instead of a time: 1M.
    #[arg(long, value_name = "COUNT", value_parser = parse_count)]
    pub(crate) ops: Option<u64>,
    /// Before each workload, run it so long without measuring it.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_duration_or_zero)]
    pub(crate) warm_up: Duration,
    /// After the workloads, so often: remove all loaded keys and insert them again, in random order.
    #[arg(long, default_value_t = 0)]
    pub(crate) rounds: u32,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
    /// Replay the operations of this file (`-`: standard input) and print the answers, instead of running mixes.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["mix", "shares", "rounds", "seconds", "ops", "warm_up", "in_flight", "workers"])]
    pub(crate) trace: Option<PathBuf>,
    /// Use running servers instead of starting some: those of this folder, or verbs://HOST:PORT[,HOST:PORT...] over RDMA.
    #[arg(long, value_name = "DIR|verbs://...", conflicts_with_all = ["servers", "server_bytes", "server_threads", "records"])]
    pub(crate) connect: Option<Address>,
    #[command(flatten)]
    pub(crate) verbs: VerbsArgs,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// The structure's name in the catalog.
    #[arg(long, alias = "tree", value_name = "NAME", default_value = "bench", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) name: String,
}

/// A mix by its percentages, instead of `--mix`.
#[derive(Debug, Args)]
#[group(id = "shares", multiple = true, conflicts_with = "mix")]
pub(crate) struct ShareArgs {
    /// Percent of lookups. Percentages make a mix of their own; they must add to 100.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) read: Option<u8>,
    /// Percent of updates.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) update: Option<u8>,
    /// Percent of inserts of new keys.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) insert: Option<u8>,
    /// Percent of removes of loaded keys.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) remove: Option<u8>,
    /// Percent of scans.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) scan: Option<u8>,
    /// Percent of read-modify-writes.
    #[arg(long, value_name = "PERCENT")]
    pub(crate) rmw: Option<u8>,
}

impl ShareArgs {
    pub(super) fn given(&self) -> Option<Shares> {
        let all = [self.read, self.update, self.insert, self.remove, self.scan, self.rmw];
        let [read, update, insert, remove, scan, rmw] = all.map(Option::unwrap_or_default);
        all.iter().any(Option::is_some).then_some(Shares { read, update, insert, remove, scan, rmw })
    }
}

fn parse_theta(text: &str) -> Result<f64, String> {
    number(text, |theta| theta.is_finite() && theta >= 0.0, "a number of at least 0")
}
