//! A run's plan: everything a compute process must know, checked once, and sent to it as one JSON line.
//!
//! The command line is turned into a plan before anything is started, so that a mistake in it costs nothing.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use farlink_offload::AccessMode;
use farlink_runtime::fabric::Fabric;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::keys::Distribution;
use crate::place::Place;
use crate::stream::WorkerId;
use crate::units::{show_bytes, show_count, show_nanoseconds};
use crate::workload::Mix;

/// No cache works with less.
pub(crate) const CACHE_BYTES_MIN: u64 = 64 << 10;
/// More than an operation holds at a time.
const PAGES_PER_OPERATION: u64 = 8;

/// Where the loaded keys come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KeySource {
    /// So many keys, computed.
    Scrambled(u64),
    /// A keys file.
    File(PathBuf),
}

/// How the loaded keys get into the tree.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Load {
    /// In key order, pages filled to this share.
    Bulk { fill: f64 },
    /// One insert a key, in random order, by all workers.
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

/// An access mode travels by its name.
mod by_name {
    use super::*;

    pub(super) fn serialize<S: Serializer>(mode: &AccessMode, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(mode)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<AccessMode, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}

/// Which structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Structure {
    /// The B+-tree.
    Btree,
}

/// How long a mix runs.
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
    pub(crate) structure: Structure,
    #[serde(with = "by_name")]
    pub(crate) access: AccessMode,
    /// The cache of each process. `None` without one, and until the number of keys is known that decides the default.
    pub(crate) cache_bytes: Option<u64>,
    /// The name that the tree has in the catalog.
    pub(crate) tree: String,
    pub(crate) servers: u32,
    pub(crate) processes: u32,
    /// Workers of one process.
    pub(crate) workers: u32,
    /// Each mix runs once with each of these.
    pub(crate) in_flight: Vec<u32>,
    pub(crate) keys: KeySource,
    pub(crate) load: Load,
    pub(crate) distribution: Distribution,
    pub(crate) mixes: Vec<Mix>,
    pub(crate) scan_length: u32,
    pub(crate) page_bytes: u32,
    pub(crate) latency_ns: u64,
    pub(crate) bandwidth_bytes_per_second: Option<u64>,
    pub(crate) nasty: bool,
    pub(crate) validation: Validation,
    pub(crate) limit: Limit,
    pub(crate) rounds: u32,
    pub(crate) seed: u64,
    /// Which run on its cluster this is; each inserts keys of its own.
    pub(crate) run: u32,
}

impl Plan {
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

    /// Whether some mix removes keys: then a key that is not found is no loss.
    pub(crate) fn mixes_remove(&self) -> bool {
        self.mixes.iter().any(|mix| mix.shares.remove > 0)
    }

    /// The phases of the run, in order.
    pub(crate) fn phases(&self) -> Vec<Phase> {
        let mut phases = Vec::new();
        if self.load != Load::Found {
            phases.push(Phase::Load);
        }
        for mix in 0..self.mixes.len() {
            phases.extend(self.in_flight.iter().map(|in_flight| Phase::Mix { mix, in_flight: *in_flight }));
        }
        for round in 1..=self.rounds {
            phases.extend([Phase::RemoveAll { round }, Phase::InsertAll { round }]);
        }
        phases
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

    /// What is measured, in one line.
    pub(crate) fn summary(&self, loaded: u64) -> String {
        let count = |number: u32, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
        let mut parts = vec![
            count(self.servers, "memory server"),
            match self.processes {
                1 => count(self.workers, "worker"),
                processes => format!("{processes} x {}", count(self.workers, "worker")),
            },
            format!("{loaded} keys"),
            match self.distribution.theta() {
                Some(theta) => format!("{} {theta}", self.distribution.name()),
                None => self.distribution.name().to_owned(),
            },
            format!("pages of {} B", self.page_bytes),
        ];
        if let Some(bytes) = self.cache_bytes {
            parts.push(format!("cache of {}", show_bytes(bytes)));
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
        format!("btree, {}: {}", self.access.name(), parts.join(", "))
    }

    /// What a person reads while a phase runs.
    pub(crate) fn describe(&self, phase: &Phase) -> String {
        match phase {
            Phase::Load => match self.load {
                Load::Bulk { .. } => "bulk load".to_owned(),
                Load::Insert => "load by inserts".to_owned(),
                Load::Found => "no load".to_owned(),
            },
            Phase::Mix { mix, in_flight } => {
                let name = self.mixes.get(*mix).map_or("mix", |mix| &mix.name);
                format!("{name}, {in_flight} in flight")
            }
            Phase::RemoveAll { round } => format!("round {round}: remove all keys"),
            Phase::InsertAll { round } => format!("round {round}: insert them again"),
        }
    }
}

/// One phase: all workers of all processes begin it together, and it is over when the last has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Put the loaded keys into the tree.
    Load,
    /// Run the mix with this place in the plan.
    Mix { mix: usize, in_flight: u32 },
    /// Remove every loaded key, each worker its share.
    RemoveAll { round: u32 },
    /// Insert every loaded key again.
    InsertAll { round: u32 },
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn plan() -> Plan {
        Plan {
            structure: Structure::Btree,
            access: AccessMode::OneSided,
            cache_bytes: None,
            tree: "bench".into(),
            servers: 2,
            processes: 2,
            workers: 3,
            in_flight: vec![1, 16],
            keys: KeySource::Scrambled(1000),
            load: Load::Bulk { fill: 0.9 },
            distribution: Distribution::Zipf(0.99),
            mixes: Mix::list("a,c").unwrap(),
            scan_length: 100,
            page_bytes: 1024,
            latency_ns: 0,
            bandwidth_bytes_per_second: None,
            nasty: false,
            validation: Validation::Checksum,
            limit: Limit::Operations(10),
            rounds: 1,
            seed: 1,
            run: 0,
        }
    }

    #[test]
    fn plans_survive_the_wire() {
        let mut plan = plan();
        plan.limit = Limit::For(Duration::from_nanos(5));
        plan.keys = KeySource::File("keys.bin".into());
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
        let cached = Plan { access: AccessMode::Cached, cache_bytes: Some(1 << 20), ..plan };
        let summary = cached.summary(5);
        assert!(summary.starts_with("btree, cached: ") && summary.contains("cache of 1.00 MiB"), "{summary}");
    }

    #[test]
    fn phases_in_order() {
        let plan = plan();
        let phases: Vec<String> = plan.phases().iter().map(|phase| plan.describe(phase)).collect();
        assert_eq!(
            phases,
            [
                "bulk load",
                "ycsb-a, 1 in flight",
                "ycsb-a, 16 in flight",
                "ycsb-c, 1 in flight",
                "ycsb-c, 16 in flight",
                "round 1: remove all keys",
                "round 1: insert them again",
            ]
        );
        assert_eq!(plan.in_flight_max(), 16);
        assert!(!plan.mixes_remove());
        let found = Plan { load: Load::Found, ..plan };
        assert!(!found.phases().contains(&Phase::Load));
    }
}
