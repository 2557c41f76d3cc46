//! A run's plan: everything a compute process must know, checked once, and sent to it as one JSON line.
//!
//! The command line is turned into a plan before anything is started, so that a mistake in it costs nothing.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use farlink_offload::policy::{Always, BackOff, Choice, Cold, CostAware, Miss, Never, Policy};
use farlink_offload::{Admission, CacheOptions, Durability, Policies};
use farlink_runtime::compute::ComputeOptions;
use farlink_runtime::fabric::Fabric;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::structure::PlacementPolicy;
use serde::{Deserialize, Serialize};

use crate::place::Place;
use crate::subject::{AccessMode, Setting, WorkerId};
use crate::units::{plural, show_bytes, show_count, show_nanoseconds};

/// No cache works with less.
pub(crate) const CACHE_BYTES_MIN: u64 = 64 << 10;
/// An engine ships from this level down, unless told otherwise.
const SUBTREE_LEVEL: u8 = 2;
/// Operations in flight for each page of a cache: with more they hardly do anything but wait for each other.
const OPERATIONS_PER_PAGE_MAX: u64 = 8;
/// More than an operation holds at a time.
const PAGES_PER_OPERATION: u64 = 8;

/// How what is loaded gets into the structure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Load {
    /// In key order, pages filled to this share.
    Bulk { fill: f64 },
    /// One insert an entry, in random order, by all workers.
    Insert,
    /// Not at all: an earlier run has loaded them.
    Found,
}

/// How a reader proves that it read a page whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Validation {
    /// A checksum in the page: one round trip.
    Checksum,
    /// The lock word, the body, the lock word again.
    LockBodyLock,
}

impl Validation {
    pub(crate) fn proof(self) -> Proof {
        match self {
            Self::Checksum => Proof::Checksum,
            Self::LockBodyLock => Proof::LockBodyLock,
        }
    }
}

/// Who decides, on a miss, whether an operation is shipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PolicyChoice {
    /// Nothing is shipped.
    Never,
    /// Whatever can be shipped is.
    Always,
    /// What the cache would not keep.
    Cold,
    /// What is expected to be faster (DEX).
    CostAware,
    /// Shipped unless the memory server is busy (Catfish).
    BackOff,
    /// One in two, drawn each time: for a chaos.
    #[value(skip)]
    AtRandom,
}

/// Ships one in two of what can be shipped, whatever it costs.
#[derive(Debug)]
struct AtRandom;

impl Policy for AtRandom {
    fn choose(&mut self, miss: &Miss<'_>) -> Choice {
        if miss.one_in(2) { Choice::SHIP } else { Choice::FETCH }
    }
}

impl PolicyChoice {
    /// The name that a row carries.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Always => "always",
            Self::Cold => "cold",
            Self::CostAware => "cost-aware",
            Self::BackOff => "back-off",
            Self::AtRandom => "at-random",
        }
    }

    /// One for each worker.
    pub(crate) fn policies(self) -> fn() -> Policies {
        match self {
            Self::Never => || Policies::new(Never),
            Self::Always => || Policies::new(Always),
            Self::Cold => || Policies::new(Cold),
            Self::CostAware => || Policies::for_each_kind(CostAware::default()),
            Self::BackOff => || Policies::new(BackOff::default()),
            Self::AtRandom => || Policies::new(AtRandom),
        }
    }
}

/// Which missed leaves a cache takes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AdmissionChoice {
    /// All.
    Always,
    /// One in ten, as DEX does.
    Probability,
    /// Those used more often than what would go for them.
    Frequency,
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

    /// A cache of so many bytes.
    pub(crate) fn options(self, bytes: usize) -> CacheOptions {
        let mut options = match self {
            // With all that belongs to it: a random victim.
            Self::Probability => CacheOptions::dex(bytes),
            Self::Always | Self::Frequency => CacheOptions::new(bytes),
        };
        if self == Self::Always {
            (options.admission, options.sample_size) = (Admission::Always, 1);
        }
        options
    }
}

/// On which memory servers the pages of a structure are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PlacementChoice {
    /// Each new page on the next server in turn.
    RoundRobin,
    /// Those of level 0 in turn, all others where the root is.
    Leaves,
    /// All where the root is.
    OneServer,
    /// Each page of this level with all that is below it on one server.
    Subtrees(u8),
}

impl PlacementChoice {
    pub(crate) fn policy(self) -> PlacementPolicy {
        match self {
            Self::RoundRobin => PlacementPolicy::RoundRobin,
            Self::Leaves => PlacementPolicy::Leaves,
            Self::OneServer => PlacementPolicy::OneServer,
            Self::Subtrees(level) => PlacementPolicy::Subtrees { level },
        }
    }

    /// Where pages are if the user does not say.
    pub(crate) fn usual(mode: AccessMode) -> Self {
        match mode {
            AccessMode::OneSided | AccessMode::Cached | AccessMode::CachedInner | AccessMode::CachedMapping => {
                Self::RoundRobin
            }
            AccessMode::Coarse | AccessMode::Adaptive => Self::OneServer,
            AccessMode::Hybrid => Self::Leaves,
            AccessMode::Engine => Self::Subtrees(SUBTREE_LEVEL),
        }
    }

    pub(crate) fn is_fit_for(self, mode: AccessMode) -> bool {
        match mode {
            AccessMode::Coarse => self == Self::OneServer,
            AccessMode::Hybrid => matches!(self, Self::Leaves | Self::OneServer),
            _ => true,
        }
    }
}

impl From<PlacementPolicy> for PlacementChoice {
    fn from(placement: PlacementPolicy) -> Self {
        match placement {
            PlacementPolicy::RoundRobin => Self::RoundRobin,
            PlacementPolicy::Leaves => Self::Leaves,
            PlacementPolicy::OneServer => Self::OneServer,
            PlacementPolicy::Subtrees { level } => Self::Subtrees(level),
        }
    }
}

impl fmt::Display for PlacementChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoundRobin => f.write_str("round-robin"),
            Self::Leaves => f.write_str("leaves"),
            Self::OneServer => f.write_str("one-server"),
            Self::Subtrees(level) => write!(f, "subtrees:{level}"),
        }
    }
}

impl FromStr for PlacementChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "round-robin" => Ok(Self::RoundRobin),
            "leaves" => Ok(Self::Leaves),
            "one-server" => Ok(Self::OneServer),
            _ => {
                let level = text.strip_prefix("subtrees:").and_then(|level| level.parse().ok());
                let level = level.filter(|level| *level <= PlacementPolicy::LEVEL_MAX).map(Self::Subtrees);
                level.ok_or_else(|| "it is round-robin, leaves, one-server or subtrees:LEVEL".to_owned())
            }
        }
    }
}

/// How long a workload runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Limit {
    /// So many operations: of all workers, or of the one whose [share](Limit::share) it is.
    Operations(u64),
    /// So long.
    For(Duration),
}

impl Limit {
    /// What the worker with this number must do of it: shares differ by one at most and add to the whole.
    pub(crate) fn share(self, worker: WorkerId) -> Self {
        let Self::Operations(operations) = self else { return self };
        let total = worker.total.max(1);
        Self::Operations(operations / total + u64::from(worker.index < operations % total))
    }
}

/// A checked plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The name of the structure's plug-in.
    pub(crate) structure: String,
    #[serde(with = "crate::by_name")]
    pub(crate) access: AccessMode,
    /// Where the access asks one.
    pub(crate) policy: PolicyChoice,
    pub(crate) placement: PlacementChoice,
    /// Whether the user has named it.
    pub(crate) is_placement_given: bool,
    pub(crate) admission: AdmissionChoice,
    /// Where the process owns what it caches.
    #[serde(with = "crate::by_name")]
    pub(crate) durability: Durability,
    /// The cache of each process. `None` without one, and until the number of entries is known that decides the default.
    pub(crate) cache_bytes: Option<u64>,
    /// Pages that it has room for, if that is less than its bytes have.
    pub(crate) cache_pages_max: Option<u32>,
    /// The structure's name in the catalog; [`Plan::parts`] are what the catalog has.
    pub(crate) name: String,
    /// The names of its parts, known once it is open: one, unless it is divided among memory servers.
    pub(crate) parts: Vec<String>,
    pub(crate) servers: u32,
    /// Of each memory server; `None` if others have started them.
    pub(crate) server_threads: Option<u32>,
    pub(crate) processes: u32,
    /// Whether others own the structure and take requests: the processes own nothing of it then until they are given regions. Known once it is open.
    pub(crate) joins_owners: bool,
    /// Workers of one process.
    pub(crate) workers: u32,
    /// Each workload runs once with each of these.
    pub(crate) in_flight: Vec<u32>,
    /// Pages that an operation has on their way at a time, at most.
    pub(crate) window: u32,
    /// How long an operation waits for a compute server that lives and does not go on; without it, until that one does.
    pub(crate) lock_wait: Option<Duration>,
    pub(crate) setting: Setting,
    /// How many entries are loaded, known once the data are.
    pub(crate) loaded: u64,
    pub(crate) load: Load,
    pub(crate) workloads: Vec<String>,
    /// Whether they choose among what is loaded as the setting's distribution says.
    pub(crate) has_distribution: bool,
    /// 0 until it is known.
    pub(crate) page_bytes: u32,
    pub(crate) is_page_bytes_given: bool,
    pub(crate) latency_ns: u64,
    pub(crate) bandwidth_bytes_per_second: Option<u64>,
    pub(crate) nasty: bool,
    pub(crate) validation: Validation,
    pub(crate) limit: Limit,
    /// Before each workload, so long of it, not measured.
    pub(crate) warm_up: Duration,
    pub(crate) rounds: u32,
}

impl Plan {
    /// Whether several processes own the structure, each a part of it.
    pub(crate) fn has_owners(&self) -> bool {
        self.access.owns() && (self.processes > 1 || self.joins_owners)
    }

    /// Whether the cluster is others', too.
    pub(crate) fn is_connected(&self) -> bool {
        self.server_threads.is_none()
    }

    /// The number of a worker over all processes.
    pub(crate) fn worker_id(&self, process: u32, worker: u32) -> WorkerId {
        WorkerId {
            index: u64::from(process) * u64::from(self.workers) + u64::from(worker),
            total: u64::from(self.processes) * u64::from(self.workers),
        }
    }

    /// The way to the cluster, as slow and as nasty as the plan wants it.
    pub(crate) fn fabric(&self, place: &Place) -> anyhow::Result<Arc<dyn Fabric>> {
        place.fabric(MemOptions {
            latency_ns: self.latency_ns,
            bandwidth_bytes_per_s: self.bandwidth_bytes_per_second.unwrap_or(0),
            nasty: self.nasty,
            ..MemOptions::default()
        })
    }

    /// How a compute server of the run joins the cluster.
    pub(crate) fn compute_options(&self, seed: u64) -> ComputeOptions {
        ComputeOptions { seed, window: self.window as usize, lock_wait: self.lock_wait, ..ComputeOptions::default() }
    }

    /// The phases of the run, in order.
    pub(crate) fn phases(&self) -> Vec<Phase> {
        let mut phases = Vec::new();
        if self.load != Load::Found {
            phases.push(Phase::Load);
        }
        for workload in 0..self.workloads.len() {
            for &in_flight in &self.in_flight {
                if self.warm_up > Duration::ZERO {
                    phases.push(Phase::Workload { workload, in_flight, is_warm_up: true });
                }
                phases.push(Phase::Workload { workload, in_flight, is_warm_up: false });
            }
        }
        for round in 1..=self.rounds {
            phases.extend([Phase::RemoveAll { round }, Phase::InsertAll { round }]);
        }
        phases
    }

    /// When a phase is over for all workers together, if that is not when all entries are done.
    pub(crate) fn limit_of(&self, phase: &Phase) -> Option<Limit> {
        match phase {
            Phase::Workload { is_warm_up: true, .. } => Some(Limit::For(self.warm_up)),
            Phase::Workload { .. } => Some(self.limit),
            _ => None,
        }
    }

    /// How many operations the phases outside the mixes keep in flight: as many as the run does at most.
    pub(crate) fn in_flight_max(&self) -> u32 {
        self.in_flight.iter().copied().max().unwrap_or(1)
    }

    /// How large the cache of each process is unless the user says: 8% of the raw data, and room for what is in flight.
    pub(crate) fn default_cache_bytes(&self, loaded: u64) -> u64 {
        let in_flight = u64::from(self.workers) * u64::from(self.in_flight_max());
        let least = CACHE_BYTES_MIN + in_flight * PAGES_PER_OPERATION * u64::from(self.page_bytes);
        (loaded.saturating_mul(16) / 100 * 8).max(least)
    }

    /// Whether what is in flight can make any progress in the cache.
    pub(crate) fn require_room(&self) -> anyhow::Result<()> {
        let Some(bytes) = self.cache_bytes else { return Ok(()) };
        let in_flight = u64::from(self.workers) * u64::from(self.in_flight_max());
        let pages = bytes / u64::from(self.page_bytes.max(1));
        ensure!(
            in_flight <= pages.saturating_mul(OPERATIONS_PER_PAGE_MAX),
            "--cache {bytes} has room for {pages} pages, for which {in_flight} operations in flight would wait without end; \
             give it {} or more, or have fewer --in-flight",
            in_flight.div_ceil(OPERATIONS_PER_PAGE_MAX) * u64::from(self.page_bytes)
        );
        Ok(())
    }

    /// What is measured, in a few lines of at most 80 columns.
    pub(crate) fn summary(&self) -> String {
        let mut parts = vec![
            plural(self.servers.into(), "memory server"),
            match self.processes {
                1 => plural(self.workers.into(), "worker"),
                processes => format!("{processes} x {}", plural(self.workers.into(), "worker")),
            },
            plural(self.loaded, "key"),
        ];
        // A trace draws nothing.
        if self.has_distribution && !self.workloads.is_empty() {
            let theta = self.setting.distribution.theta().map_or_else(String::new, |theta| format!(" {theta}"));
            parts.push(format!("{}{theta}", self.setting.distribution.name()));
        }
        parts.push(format!("pages of {} B", self.page_bytes));
        let is_usual = self.placement == PlacementChoice::usual(self.access);
        // Of the parts of a divided structure each is where it has to be.
        if self.placement != PlacementChoice::RoundRobin && !(self.access.is_divided() && is_usual) {
            parts.push(self.placement.to_string());
        }
        if self.access.asks_a_policy() {
            parts.push(format!("policy {}", self.policy.name()));
        }
        if let Some(bytes) = self.cache_bytes {
            parts.push(format!("cache of {}", show_bytes(bytes)));
        }
        if self.durability == Durability::Logged {
            parts.push(self.durability.to_string());
        }
        if self.latency_ns > 0 {
            parts.push(format!("latency {}", show_nanoseconds(self.latency_ns)));
        }
        if let Some(rate) = self.bandwidth_bytes_per_second {
            parts.push(format!("{} B/s", show_count(rate as f64)));
        }
        if self.nasty {
            parts.push("nasty".to_owned());
        }
        if self.validation == Validation::LockBodyLock {
            parts.push("lock-body-lock".to_owned());
        }
        let mut lines = format!("{}, {}:", self.structure, self.access);
        let mut width = lines.len();
        for (index, part) in parts.iter().enumerate() {
            let part = if index + 1 < parts.len() { format!("{part},") } else { part.clone() };
            if width + 1 + part.len() > 80 {
                lines += "\n ";
                width = 1;
            }
            lines += &format!(" {part}");
            width += 1 + part.len();
        }
        lines
    }

    /// The row's name of a phase, and how many operations a worker keeps in flight in it.
    pub(crate) fn label(&self, phase: &Phase) -> (String, u32) {
        match phase {
            Phase::Load => match self.load {
                Load::Bulk { .. } => ("bulk-load".to_owned(), 1),
                Load::Insert | Load::Found => ("insert-load".to_owned(), self.in_flight_max()),
            },
            Phase::Workload { workload, in_flight, .. } => (self.workload_name(*workload), *in_flight),
            Phase::RemoveAll { round } => (format!("remove-all-{round}"), self.in_flight_max()),
            Phase::InsertAll { round } => (format!("insert-all-{round}"), self.in_flight_max()),
        }
    }

    /// As rows have it: YCSB's letters say whose they are.
    fn workload_name(&self, workload: usize) -> String {
        let name = self.workloads.get(workload).map_or("", String::as_str);
        if name.len() == 1 { format!("ycsb-{name}") } else { name.to_owned() }
    }

    /// What a person reads while a phase runs.
    pub(crate) fn describe(&self, phase: &Phase) -> String {
        match phase {
            Phase::Load => match self.load {
                Load::Bulk { .. } => "bulk load".to_owned(),
                Load::Insert => "load by inserts".to_owned(),
                Load::Found => "no load".to_owned(),
            },
            Phase::Workload { workload, in_flight, is_warm_up } => {
                let warm_up = if *is_warm_up { ", warm-up" } else { "" };
                format!("{}, {in_flight} in flight{warm_up}", self.workload_name(*workload))
            }
            Phase::RemoveAll { round } => format!("round {round}: remove all"),
            Phase::InsertAll { round } => format!("round {round}: insert them again"),
        }
    }
}

/// One phase: all workers of all processes begin it together, and it is over when the last has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Put into the structure what is to be loaded.
    Load,
    /// Run the workload with this place in the plan.
    Workload { workload: usize, in_flight: u32, is_warm_up: bool },
    /// Remove every loaded entry, each worker its share.
    RemoveAll { round: u32 },
    /// Insert every loaded entry again.
    InsertAll { round: u32 },
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan() -> Plan {
        Plan {
            structure: "btree".into(),
            access: AccessMode::OneSided,
            policy: PolicyChoice::CostAware,
            placement: PlacementChoice::RoundRobin,
            is_placement_given: false,
            admission: AdmissionChoice::Frequency,
            durability: Durability::WriteBack,
            cache_bytes: None,
            cache_pages_max: None,
            name: "bench".into(),
            parts: vec!["bench".into()],
            servers: 2,
            has_distribution: true,
            server_threads: None,
            processes: 2,
            joins_owners: false,
            workers: 3,
            in_flight: vec![1, 16],
            window: 16,
            lock_wait: None,
            setting: Setting::of_entries(1000),
            loaded: 1000,
            load: Load::Bulk { fill: 0.9 },
            workloads: vec!["a".into(), "read-only".into()],
            page_bytes: 1024,
            is_page_bytes_given: false,
            latency_ns: 0,
            bandwidth_bytes_per_second: None,
            nasty: false,
            validation: Validation::Checksum,
            limit: Limit::Operations(10),
            warm_up: Duration::ZERO,
            rounds: 1,
        }
    }

    #[test]
    fn plans_survive_the_wire() {
        let mut plan = plan();
        plan.limit = Limit::For(Duration::from_nanos(5));
        plan.placement = PlacementChoice::Subtrees(3);
        let line = serde_json::to_string(&plan).unwrap();
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<Plan>(&line).unwrap(), plan);
    }

    #[test]
    fn shares_of_operations_add_up() {
        let plan = plan();
        let mut sum = 0;
        for process in 0..2 {
            for worker in 0..3 {
                let Limit::Operations(share) = plan.limit.share(plan.worker_id(process, worker)) else {
                    panic!("operations were asked for");
                };
                assert!((1..=2).contains(&share));
                sum += share;
            }
        }
        assert_eq!(sum, 10);
        assert_eq!(plan.worker_id(1, 2), WorkerId { index: 5, total: 6 });
    }

    #[test]
    fn caches_have_room_for_what_is_in_flight() {
        let plan = plan();
        assert_eq!(plan.default_cache_bytes(100_000_000), 128_000_000);
        assert_eq!(plan.default_cache_bytes(1), (64 << 10) + 3 * 16 * 8 * 1024);
    }

    #[test]
    fn summaries_are_short_lines() {
        let plan = Plan {
            access: AccessMode::Engine,
            cache_bytes: Some(1 << 20),
            placement: PlacementChoice::Subtrees(2),
            latency_ns: 2000,
            nasty: true,
            loaded: 1,
            validation: Validation::LockBodyLock,
            ..plan()
        };
        let summary = plan.summary();
        assert!(summary.starts_with("btree, engine: 2 memory servers, 2 x 3 workers, 1 key, "), "{summary}");
        for part in ["cache of 1.00 MiB,", "subtrees:2,", "policy cost-aware,", "lock-body-lock"] {
            assert!(summary.contains(part), "{summary}");
        }
        assert!(summary.lines().all(|line| line.len() <= 80) && summary.lines().count() > 1, "{summary}");
    }

    #[test]
    fn what_does_not_apply_is_not_in_the_summary() {
        let coarse = Plan { access: AccessMode::Coarse, placement: PlacementChoice::OneServer, ..plan() };
        assert!(!coarse.summary().contains("one-server"), "{}", coarse.summary());
        let adaptive = Plan { access: AccessMode::Adaptive, ..coarse };
        assert!(adaptive.summary().contains("one-server"), "{}", adaptive.summary());
        assert!(plan().summary().contains("zipf"));
        for plan in [Plan { has_distribution: false, ..plan() }, Plan { workloads: Vec::new(), ..plan() }] {
            assert!(!plan.summary().contains("zipf"), "{}", plan.summary());
        }
    }

    #[test]
    fn spreads_are_named() {
        let names = ["round-robin", "leaves", "one-server", "subtrees:3"];
        assert_eq!(names.map(|name| name.parse::<PlacementChoice>().unwrap().to_string()), names);
        for wrong in ["", "subtrees", "subtrees:64", "subtrees:x"] {
            assert!(wrong.parse::<PlacementChoice>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn phases_in_order() {
        let plan = plan();
        let described = |plan: &Plan| plan.phases().iter().map(|phase| plan.describe(phase)).collect::<Vec<_>>();
        assert_eq!(
            described(&plan),
            [
                "bulk load",
                "ycsb-a, 1 in flight",
                "ycsb-a, 16 in flight",
                "read-only, 1 in flight",
                "read-only, 16 in flight",
                "round 1: remove all",
                "round 1: insert them again",
            ]
        );
        assert_eq!(plan.in_flight_max(), 16);
        let warm = Plan { warm_up: Duration::from_secs(1), load: Load::Found, in_flight: vec![4], rounds: 0, ..plan };
        let phases = described(&warm);
        assert_eq!(phases[..2], ["ycsb-a, 4 in flight, warm-up", "ycsb-a, 4 in flight"]);
        assert_eq!(warm.limit_of(&warm.phases()[0]), Some(Limit::For(Duration::from_secs(1))));
    }
}
