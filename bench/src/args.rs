//! The command line, and the plan that a `bench` command line means.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};
use farlink_offload::Durability;
use farlink_runtime::layout::Records;

use crate::figure::FigureArgs;
use crate::maps::workload::Shares;
use crate::place::{Address, ConnectArgs, VerbsArgs, WaitArgs};
use crate::plan::{
    AdmissionChoice, CACHE_BYTES_MIN, Limit, Load, LoadChoice, PlacementChoice, Plan, PolicyChoice, Validation,
};
use crate::program::{Kind, Programs};
use crate::subject::{AccessMode, Distribution, InsertOrder, Setting};
use crate::units::{
    number, parse_bytes, parse_bytes_per_second, parse_count, parse_duration, parse_duration_or_zero, parse_fill,
    parse_nanoseconds, parse_page_bytes,
};

/// How long a workload runs unless told otherwise.
const SECONDS_DEFAULT: Duration = Duration::from_secs(3);
const KEYS_DEFAULT: u64 = 1_000_000;
const THETA_DEFAULT: f64 = 0.99;

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
    /// Serve memory until told to stop (SIGTERM or SIGINT).
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

/// A key and its value.
const ENTRY_BYTES: f64 = 16.0;

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
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=256))]
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
    /// How full a bulk load makes each page, from 0.1 to 1.
    #[arg(long, default_value_t = 0.9, value_parser = parse_fill)]
    pub(crate) fill: f64,
    /// How operations of an ordered map choose among the loaded keys.
    #[arg(long, value_enum, default_value = "zipf")]
    pub(crate) distribution: DistributionChoice,
    /// The exponent of zipf: 0 is uniform, larger is more skewed (0.99).
    #[arg(long, value_parser = parse_theta)]
    pub(crate) theta: Option<f64>,
    /// Workloads to run, as `farlink list` names them. Ordered maps: a to f (YCSB, the usual ones), read-only,
    /// read-intensive, write-intensive, insert-intensive, scan-intensive.
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

/// How memory is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricChoice {
    /// Through files that all map.
    Mem,
    /// Over RDMA.
    Verbs,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// How compute servers reach the memory: mapped, from this machine, or over RDMA.
    #[arg(long, value_enum, default_value = "mem")]
    pub(crate) fabric: FabricChoice,
    /// With mem: the cluster's folder, the same for all its servers.
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// With verbs: where compute servers connect to, ADDRESS:PORT; only from this machine unless told otherwise
    /// (127.0.0.1:7471).
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) verbs: VerbsArgs,
    /// This server's number, from 0.
    #[arg(long, default_value_t = 0)]
    pub(crate) server: u32,
    /// How many servers the cluster has.
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..=256))]
    pub(crate) servers: u32,
    /// Memory to give: 64MiB, 1GiB. Without it, what an earlier run of this server left, else 1 GiB.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) bytes: Option<u64>,
    /// Remove this server's memory when it stops.
    #[arg(long)]
    pub(crate) ephemeral: bool,
    /// Threads that carry out operations which compute servers send; without them it only gives memory.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u32).range(..=256))]
    pub(crate) threads: u32,
    /// With --threads: how long an operation waits for a page that is locked by a compute server which does not go on, as 5s; then
    /// it fails, and says whom it waited for. Without it, until that one goes on.
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub(crate) lock_wait: Option<Duration>,
    /// Which changes of pages compute servers record first, so that others can finish them; the same for all servers of a cluster.
    /// Without it, what an earlier run of this server says, else all.
    #[arg(long, value_parser = crate::by_name::records())]
    pub(crate) records: Option<Records>,
    /// With verbs, --threads and several servers: where all of them are, this one too. Its threads use them.
    #[arg(long, value_name = "HOST:PORT[,HOST:PORT...]", value_delimiter = ',')]
    pub(crate) cluster: Vec<String>,
}

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
        Ok((args.plan(known)?, *args))
    }
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
    /// Move hot regions, or pieces of them, until no owner has more than 1.1 times the average of uses.
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
            ensure!(
                !self.verbs.is_given(),
                "--device, --gid-index and --secret-file go with --connect verbs://HOST:PORT"
            );
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

impl ServeArgs {
    /// What clap cannot see by itself.
    pub(crate) fn validate(&self) -> anyhow::Result<()> {
        ensure!(
            self.server < self.servers,
            "--server {} is not one of the {} servers; they are numbered from 0",
            self.server,
            self.servers
        );
        ensure!(
            self.threads > 0 || self.lock_wait.is_none(),
            "--lock-wait is for operations that this server carries out: give it --threads"
        );
        match self.fabric {
            FabricChoice::Mem => {
                ensure!(
                    self.listen.is_none() && !self.verbs.is_given() && self.cluster.is_empty(),
                    "--listen, --device, --gid-index, --secret-file and --cluster are for --fabric verbs"
                );
                ensure!(self.dir.is_some(), "--dir is missing: the cluster's folder, the same for all its servers");
            }
            FabricChoice::Verbs => {
                ensure!(
                    self.dir.is_none() && !self.ephemeral,
                    "--dir and --ephemeral are for --fabric mem; memory that is served over RDMA goes with its server"
                );
                ensure!(
                    self.threads == 0 || self.servers == 1 || !self.cluster.is_empty(),
                    "--cluster is missing: the threads of one of several servers must know where all of them are"
                );
            }
        }
        Ok(())
    }
}

impl ShareArgs {
    fn given(&self) -> Option<Shares> {
        let all = [self.read, self.update, self.insert, self.remove, self.scan, self.rmw];
        let [read, update, insert, remove, scan, rmw] = all.map(Option::unwrap_or_default);
        all.iter().any(Option::is_some).then_some(Shares { read, update, insert, remove, scan, rmw })
    }
}

impl BenchArgs {
    /// Whether keys are loaded: always for workloads, for a trace only if they were asked for.
    pub(crate) fn loads_keys(&self) -> bool {
        self.trace.is_none() || self.keys.is_some() || self.keys_file.is_some() || self.rects_file.is_some()
    }

    /// The name of the structure.
    pub(crate) fn structure<'a>(&'a self, programs: Programs<'a>) -> anyhow::Result<&'a str> {
        let first = programs.first().map(|program| program.known().name());
        self.structure.as_deref().or(first).context("this program knows no structures")
    }

    /// How workers reach it: a cache whose misses are decided about is an engine's.
    fn access(&self) -> AccessMode {
        match (self.access, self.policy) {
            (AccessMode::Cached, Some(_)) => AccessMode::Engine,
            (access, _) => access,
        }
    }

    /// The plan that these arguments mean for a structure.
    pub(crate) fn plan(&self, known: &dyn Kind) -> anyhow::Result<Plan> {
        self.validate_access(known)?;
        self.validate_cache()?;
        ensure!(
            !matches!(self.connect, Some(Address::Verbs(_)))
                || (self.latency == 0 && self.bandwidth.is_none() && !self.nasty),
            "--latency, --bandwidth and --nasty imitate a network; verbs:// is one"
        );
        let input = |path: &Option<PathBuf>| path.as_deref() == Some(std::path::Path::new("-"));
        ensure!(
            !(input(&self.keys_file) && input(&self.trace)),
            "--keys-file - and --trace - would both read standard input"
        );
        ensure!(
            self.insert_order.is_none() || self.load != Some(LoadChoice::Bulk),
            "--insert-order is an order of inserts: give --load insert, or leave one of them out"
        );
        ensure!(
            matches!(self.connect, Some(Address::Verbs(_))) || !self.verbs.is_given(),
            "--device, --gid-index and --secret-file go with --connect verbs://HOST:PORT"
        );
        ensure!(
            self.distribution == DistributionChoice::Zipf || self.theta.is_none(),
            "--theta is for --distribution zipf; uniform has none"
        );
        ensure!(
            known.has_distribution() || (self.distribution == DistributionChoice::Zipf && self.theta.is_none()),
            "--distribution and --theta are not for a {}: its workloads say what they choose",
            known.name()
        );
        ensure!(self.rounds == 0 || known.has_rounds(), "--rounds: a {} has none", known.name());
        let policy = self.policy.unwrap_or(PolicyChoice::CostAware);
        let ships = self.access().is_divided() || (self.access().asks_a_policy() && policy != PolicyChoice::Never);
        Ok(Plan {
            structure: known.name().to_owned(),
            access: self.access(),
            policy,
            placement: self.placement.unwrap_or(PlacementChoice::usual(self.access())),
            is_placement_given: self.placement.is_some(),
            admission: self.admission.unwrap_or(AdmissionChoice::Frequency),
            durability: self.durability.unwrap_or_default(),
            cache_bytes: self.cache_bytes(0),
            name: self.name.clone(),
            parts: Vec::new(),
            servers: self.servers,
            server_threads: self.connect.is_none().then(|| self.server_threads.unwrap_or(u32::from(ships))),
            processes: self.processes,
            workers: self.workers,
            in_flight: self.in_flight.clone(),
            window: self.window,
            setting: Setting {
                insert_order: self.insert_order.unwrap_or(InsertOrder::Random),
                distribution: match self.distribution {
                    DistributionChoice::Uniform => Distribution::Uniform,
                    DistributionChoice::Zipf => Distribution::Zipf(self.theta.unwrap_or(THETA_DEFAULT)),
                },
                scan_length: self.scan_length,
                seed: self.seed,
                ..Setting::of_entries(self.keys.unwrap_or(KEYS_DEFAULT))
            },
            loaded: 0,
            load: match self.load {
                Some(LoadChoice::Insert) => Load::Insert,
                Some(LoadChoice::Bulk) if !known.bulk_loads() => {
                    bail!("--load bulk: a {} has no bulk load", known.name())
                }
                None if self.insert_order.is_some() || !known.bulk_loads() => Load::Insert,
                Some(LoadChoice::Bulk) | None => Load::Bulk { fill: self.fill },
            },
            workloads: self.workloads(known)?,
            has_distribution: known.has_distribution(),
            page_bytes: self.page_bytes.unwrap_or(known.page_bytes()),
            is_page_bytes_given: self.page_bytes.is_some(),
            latency_ns: self.latency,
            bandwidth_bytes_per_second: self.bandwidth,
            nasty: self.nasty,
            validation: self.validation,
            limit: match self.ops {
                Some(operations) => Limit::Operations(operations),
                None => Limit::For(self.seconds.unwrap_or(SECONDS_DEFAULT)),
            },
            warm_up: self.warm_up,
            rounds: self.rounds,
        })
    }

    fn workloads(&self, known: &dyn Kind) -> anyhow::Result<Vec<String>> {
        if self.trace.is_some() {
            return Ok(Vec::new());
        }
        let names = match self.shares.given() {
            Some(shares) => vec![shares.name()],
            None if self.mix.is_empty() => known.workloads_usual().iter().map(|&name| name.to_owned()).collect(),
            None => self.mix.iter().map(|name| name.trim().to_ascii_lowercase()).collect(),
        };
        let names: Vec<String> =
            names.into_iter().map(|name| name.strip_prefix("ycsb-").map(str::to_owned).unwrap_or(name)).collect();
        names.iter().try_for_each(|name| known.require_workload(name))?;
        Ok(names)
    }

    /// What does not go together with --access.
    fn validate_access(&self, known: &dyn Kind) -> anyhow::Result<()> {
        let access = self.access();
        if let Some(why) = known.refuses(access) {
            bail!("--access {access} is not for a {}: {why}", known.name());
        }
        ensure!(
            self.policy.is_none() || access.asks_a_policy(),
            "--policy is for --access cached, engine and adaptive; {access} {}",
            if access.is_divided() { "sends every operation" } else { "sends none" }
        );
        ensure!(
            self.placement.is_none_or(|placement| placement.is_fit_for(access)),
            "--access {access} has its inner pages on one memory server: --placement {}; or leave it out",
            PlacementChoice::usual(access)
        );
        ensure!(
            self.server_threads != Some(0) || !access.is_divided(),
            "--access {access} sends operations to memory servers: --server-threads is 1 at least"
        );
        if let Some(policy) = self.policy.filter(|policy| *policy != PolicyChoice::Never) {
            ensure!(
                self.server_threads != Some(0),
                "--policy {} sends operations to memory servers: --server-threads is 1 at least",
                policy.name()
            );
        }
        ensure!(
            self.validation == Validation::Checksum || access != AccessMode::Coarse,
            "--validation is for who reads pages from afar; with --access coarse memory servers read their own"
        );
        Ok(())
    }

    /// How large each cache is to be, if told, when so many keys are loaded.
    pub(crate) fn cache_bytes(&self, loaded: u64) -> Option<u64> {
        match self.cache? {
            CacheSize::Bytes(bytes) => Some(bytes),
            CacheSize::Percent(percent) => {
                let bytes = loaded as f64 * ENTRY_BYTES * percent / 100.0;
                Some((bytes as u64).max(CACHE_BYTES_MIN))
            }
        }
    }

    fn validate_cache(&self) -> anyhow::Result<()> {
        let access = self.access();
        if !access.owns() {
            ensure!(
                self.durability.is_none(),
                "--durability is for --access cached or engine; with {access} nothing is owned"
            );
        }
        if !access.caches() {
            let of = "is for --access cached, cached-inner, cached-mapping or engine";
            ensure!(self.cache.is_none(), "--cache {of}; {access} has no cache");
            ensure!(self.admission.is_none(), "--admission {of}; {access} has no cache");
            return Ok(());
        }
        ensure!(
            self.admission.is_none() || !access.is_of_words(),
            "--admission is for --access cached, cached-inner or engine; {access} keeps what is used most"
        );
        if let Some(CacheSize::Bytes(bytes)) = self.cache {
            ensure!(
                bytes >= CACHE_BYTES_MIN,
                "--cache {bytes} is less than the {CACHE_BYTES_MIN} bytes that a cache needs"
            );
        }
        ensure!(
            self.validation == Validation::Checksum || !(access.owns() || access.is_of_words()),
            "--access {access} proves pages by their checksum; leave --validation out, or use --access cached-inner"
        );
        Ok(())
    }
}

fn parse_theta(text: &str) -> Result<f64, String> {
    number(text, |theta| theta.is_finite() && theta >= 0.0, "a number of at least 0")
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::*;
    use clap::CommandFactory as _;
    use farlink_structures::{btree::Tree, bwtree::Bw, rtree, skiplist::List};

    use crate::program::Of;

    fn bench(args: &str) -> anyhow::Result<Plan> {
        let line = ["farlink", "bench"].into_iter().chain(args.split_whitespace());
        match Cli::try_parse_from(line)?.command {
            Command::Bench(args) => {
                let kinds: [&dyn Kind; 4] = [
                    &Of::<Tree>(PhantomData),
                    &Of::<List>(PhantomData),
                    &Of::<rtree::Tree>(PhantomData),
                    &Of::<Bw>(PhantomData),
                ];
                let name = args.structure.as_deref().unwrap_or(kinds[0].name());
                args.plan(kinds.into_iter().find(|kind| kind.name() == name).context("no such structure")?)
            }
            other => panic!("{other:?}"),
        }
    }

    fn error(args: &str) -> String {
        format!("{:#}", bench(args).unwrap_err())
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults() {
        let plan = bench("").unwrap();
        assert_eq!(plan.workloads, ["a", "b", "c", "d", "e", "f"]);
        assert_eq!((plan.servers, plan.processes, plan.workers, plan.in_flight), (2, 1, 2, vec![1]));
        assert_eq!((plan.setting.entries, plan.load), (1_000_000, Load::Bulk { fill: 0.9 }));
        assert_eq!(
            (plan.setting.distribution, plan.limit),
            (Distribution::Zipf(0.99), Limit::For(Duration::from_secs(3)))
        );
        assert_eq!((plan.page_bytes, plan.validation, plan.nasty), (1024, Validation::Checksum, false));
    }

    #[test]
    fn options() {
        let plan = bench(
            "--in-flight 1,16 --keys 2M --load insert --distribution uniform --latency 2us --bandwidth 10GB/s \
             --nasty --validation lock-body-lock --ops 5 --rounds 3 --mix c,scan-intensive --seed 9 --connect /tmp/c",
        )
        .unwrap();
        assert_eq!((plan.in_flight, plan.setting.entries), (vec![1, 16], 2_000_000));
        assert_eq!((plan.load, plan.setting.distribution), (Load::Insert, Distribution::Uniform));
        assert_eq!((plan.latency_ns, plan.bandwidth_bytes_per_second), (2000, Some(10_000_000_000)));
        assert_eq!((plan.validation, plan.limit), (Validation::LockBodyLock, Limit::Operations(5)));
        assert_eq!((plan.workloads.len(), plan.rounds, plan.setting.seed, plan.nasty), (2, 3, 9, true));
        assert_eq!(bench("--latency-ns 700").unwrap().latency_ns, 700);
        let inner = bench("--access cached-inner --processes 2 --cache 2MiB --validation lock-body-lock").unwrap();
        assert_eq!((inner.access, inner.cache_bytes), (AccessMode::CachedInner, Some(2 << 20)));
        let shares = bench("--read 50 --update 30 --insert 10 --remove 5 --scan 5 --rmw 0").unwrap();
        assert_eq!(shares.workloads, ["read50-update30-insert10-remove5-scan5"]);
        let tree = Of::<Tree>(PhantomData);
        assert!(tree.removes(&shares.workloads[0]) && !tree.removes("a"));
        let engine = bench("--access engine --policy back-off --seconds 2s --warm-up 500ms").unwrap();
        assert_eq!(
            (engine.policy, engine.placement, engine.server_threads),
            (PolicyChoice::BackOff, PlacementChoice::Subtrees(2), Some(1))
        );
        assert_eq!((engine.limit, engine.warm_up), (Limit::For(Duration::from_secs(2)), Duration::from_millis(500)));
        let cached = bench("--access cached --policy cold --server-threads 2 --cache 1%").unwrap();
        assert_eq!(
            (cached.access, cached.policy, cached.server_threads),
            (AccessMode::Engine, PolicyChoice::Cold, Some(2))
        );
        assert_eq!(bench("--access cached").unwrap().access, AccessMode::Cached);
        let hybrid = bench("--access hybrid --server-threads 2 --connect d");
        assert!(hybrid.unwrap_err().to_string().contains("cannot be used with"));
        let list = bench("--structure skiplist --access coarse").unwrap();
        assert_eq!((list.load, list.page_bytes, list.placement), (Load::Insert, 64, PlacementChoice::OneServer));
    }

    #[test]
    fn mistakes_are_explained() {
        for (args, says) in [
            ("--servers 0", "0 is not in 1..=256"),
            ("--in-flight 1,0", "0 is not in 1..=4096"),
            ("--in-flight 1,x", "invalid value 'x'"),
            ("--page-bytes 1000", "a power of two from 64 to 65536"),
            ("--fill 0.05", "from 0.1 to 1"),
            ("--fill NaN", "from 0.1 to 1"),
            ("--theta=-1", "a number of at least 0"),
            ("--keys 0", "1 or more"),
            ("--mix a,z", "there is no mix `z`"),
            ("--read 50", "they add to 50"),
            ("--read 300", "300 is not in 0..=255"),
            ("--read 100 --mix a", "cannot be used with"),
            ("--seconds 0", "above 0"),
            ("--seconds NaN", "unknown unit"),
            ("--seconds 1e300", "--seconds"),
            ("--seconds 1 --ops 1", "cannot be used with"),
            ("--keys 5 --keys-file k", "cannot be used with"),
            ("--latency 2h", "unknown unit `h`"),
            ("--access cached --cache 0%", "not a share of the data"),
            ("--connect verbs://host", "not HOST:PORT"),
            ("--connect verbs://host:1 --latency 2us", "imitate a network"),
            ("--connect verbs://host:1 --nasty", "imitate a network"),
            ("--cache 1MiB", "--cache is for --access cached"),
            ("--access coarse --admission always", "coarse has no cache"),
            ("--access cached-inner --durability logged", "nothing is owned"),
            ("--policy never", "--policy is for --access cached, engine and adaptive; one-sided sends none"),
            ("--access coarse --policy never", "sends every operation"),
            ("--access coarse --placement leaves", "--placement one-server"),
            ("--access hybrid --placement round-robin", "--placement leaves"),
            ("--access hybrid --server-threads 0", "--server-threads is 1 at least"),
            ("--access engine --policy always --server-threads 0", "--server-threads is 1 at least"),
            ("--access coarse --validation lock-body-lock", "memory servers read their own"),
            ("--structure skiplist --access engine", "is not for a skiplist"),
            ("--structure rtree --theta 0.5", "not for a rtree"),
            ("--structure rtree --distribution uniform", "not for a rtree"),
            ("--structure bwtree --access cached-mapping --admission always", "keeps what is used most"),
            ("--structure bwtree --access cached-mapping --validation lock-body-lock", "leave --validation out"),
            ("--structure skiplist --load bulk", "a skiplist has no bulk load"),
            ("--keys 5 --rects-file r", "cannot be used with"),
            ("--rects-file r --keys-file k", "cannot be used with"),
            ("--load bulk --insert-order rows", "an order of inserts: give --load insert"),
            ("--insert-order sideways", "[possible values: random, given, rows]"),
            ("--placement some", "subtrees:LEVEL"),
            ("--keys-file - --trace -", "both read standard input"),
            ("--access cached --cache 1KiB", "--cache 1024 is less than the 65536"),
            ("--access cached --validation lock-body-lock", "leave --validation out"),
            (
                "--access elsewhere",
                "[possible values: one-sided, cached, cached-inner, cached-mapping, coarse, hybrid, engine, adaptive]",
            ),
            ("--trace t --ops 5", "cannot be used with"),
            ("--trace t --in-flight 4", "cannot be used with"),
            ("--trace t --workers 2", "cannot be used with"),
            ("--distribution uniform --theta 0.5", "--theta is for --distribution zipf"),
            ("--device rxe0", "go with --connect verbs://"),
            ("--connect d --gid-index 1", "go with --connect verbs://"),
            ("--secret-file s", "go with --connect verbs://"),
            ("--connect d --servers 3", "cannot be used with"),
        ] {
            let error = error(args);
            assert!(error.contains(says), "{args}: {error}");
        }
    }

    #[test]
    fn servers_are_numbered_from_zero() {
        let parse = |args: &str| match Cli::try_parse_from(["farlink", "serve"].into_iter().chain(args.split(' ')))
            .unwrap()
            .command
        {
            Command::Serve(args) => args.validate(),
            other => panic!("{other:?}"),
        };
        assert!(parse("--dir d --server 1 --servers 2 --bytes 1GiB --ephemeral").is_ok());
        assert!(parse("--fabric verbs --listen 127.0.0.1:0 --device rxe0").is_ok());
        assert!(parse("--fabric verbs --threads 2").is_ok());
        assert!(parse("--fabric verbs --threads 2 --servers 2 --cluster a:1,b:1").is_ok());
        for (args, says) in [
            ("--server 0", "--dir is missing"),
            ("--dir d --listen 127.0.0.1:0", "for --fabric verbs"),
            ("--fabric verbs --dir d", "for --fabric mem"),
            ("--dir d --cluster a:1", "for --fabric verbs"),
            ("--fabric verbs --servers 2 --threads 1", "--cluster is missing"),
        ] {
            assert!(parse(args).unwrap_err().to_string().contains(says), "{args}");
        }
        assert!(parse("--dir d --server 2 --servers 2 --bytes 1GiB").unwrap_err().to_string().contains("from 0"));
    }
}
