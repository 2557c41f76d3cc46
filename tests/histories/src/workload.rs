//! A seeded stream of mixed operations on a few hot keys.
//!
//! Every write has a value of its own, made of the client's number and a sequence number, so that a history tells which
//! write a reader saw. The keys are few and their popularity is skewed, so that operations meet.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::history::{Op, mix};

/// A tree of so many keys, or more, whose inner pages are cached is not empty at first.
pub const KEYS_LOADED: usize = 20_000;

/// Keys from `low` to `high`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The least key.
    pub low: u64,
    /// The greatest key.
    pub high: u64,
}

impl Part {
    /// Every key.
    pub const ALL: Self = Self { low: 0, high: u64::MAX };
    /// No key.
    pub const NONE: Self = Self { low: u64::MAX, high: 0 };

    /// Whether a key is one of them.
    pub fn contains(self, key: u64) -> bool {
        (self.low..=self.high).contains(&key)
    }
}

/// Bits of a value that hold the sequence number; the client's number is above them.
pub const SEQUENCE_BITS: u32 = 40;

/// The greatest client number that fits into a value.
pub const CLIENT_MAX: u32 = (1 << (u64::BITS - SEQUENCE_BITS)) - 1;

/// The value of a client's write.
pub fn value_of(client: u32, sequence: u64) -> u64 {
    (u64::from(client) << SEQUENCE_BITS) | (sequence & ((1 << SEQUENCE_BITS) - 1))
}

/// The client and the sequence number of a write, from its value.
pub fn origin_of(value: u64) -> (u32, u64) {
    ((value >> SEQUENCE_BITS) as u32, value & ((1 << SEQUENCE_BITS) - 1))
}

/// `count` distinct keys, spread over the whole key space; the first two are 0 and u64::MAX.
pub fn spread_keys(count: usize) -> Vec<u64> {
    // `mix` is a permutation that keeps 0, so the others are distinct; none of small argument is mapped to u64::MAX.
    [0, u64::MAX].into_iter().chain((1..).map(mix)).take(count).collect()
}

/// [`spread_keys`], in another order of popularity: neighbours are about as popular, so that whole pages fill and empty
/// however many the keys are.
pub fn clustered_keys(count: usize) -> Vec<u64> {
    const CLUSTER: usize = 64;
    let mut keys = spread_keys(count);
    keys.sort_unstable();
    let mut clusters: Vec<&[u64]> = keys.chunks(CLUSTER).collect();
    clusters.sort_by_key(|cluster| mix(cluster[0]));
    clusters.concat()
}

/// How often each operation occurs, in relation to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mix {
    /// Weight of Get.
    pub get: u32,
    /// Weight of Insert.
    pub insert: u32,
    /// Weight of Upsert.
    pub upsert: u32,
    /// Weight of Update.
    pub update: u32,
    /// Weight of Remove.
    pub remove: u32,
    /// Weight of Scan.
    pub scan: u32,
}

impl Mix {
    /// All point operations, half of them reads.
    pub const POINTS: Self = Self { get: 50, insert: 15, upsert: 10, update: 10, remove: 15, scan: 0 };
    /// All operations, a tenth of them scans.
    pub const ALL: Self = Self { get: 35, insert: 17, upsert: 10, update: 10, remove: 18, scan: 10 };
    /// All operations, most of them writes.
    pub const WRITES: Self = Self { get: 17, insert: 28, upsert: 10, update: 10, remove: 30, scan: 5 };
    /// Most of them inserts (DEX, VLDB 2024, section 8), so that a tree grows.
    pub const INSERTS: Self = Self { get: 14, insert: 80, upsert: 2, update: 1, remove: 2, scan: 1 };
    /// Inserts and removals, so that a tree splits and merges.
    pub const CHURN: Self = Self { get: 10, insert: 45, upsert: 0, update: 0, remove: 45, scan: 0 };

    fn weights(&self) -> [u32; 6] {
        [self.get, self.insert, self.upsert, self.update, self.remove, self.scan]
    }
}

/// What a [`Workload`] draws from.
#[derive(Clone, Debug)]
pub struct WorkloadSpec {
    /// Where the randomness comes from. Clients of one run share it and still differ.
    pub seed: u64,
    /// The keys, the most popular one first.
    pub keys: Vec<u64>,
    /// Skew: the key at position i (from 1) has a weight of 1 / i^theta. 0 is uniform.
    pub theta: f64,
    /// The operations.
    pub mix: Mix,
    /// Scans ask for 1 to this many entries.
    pub scan_limit_max: u32,
}

/// Why a workload cannot be drawn.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// There are no keys.
    #[error("a workload needs at least one key")]
    NoKeys,
    /// All weights are zero.
    #[error("a workload needs at least one operation with a weight")]
    NoOperations,
    /// The skew is negative or not a finite number.
    #[error("skew {0} is not a finite number of at least 0")]
    Theta(f64),
    /// Scans with a limit of zero.
    #[error("scans need a limit of at least 1")]
    ScanLimit,
    /// The client's number does not fit into a value.
    #[error("client {0} is beyond {CLIENT_MAX}")]
    Client(u32),
}

/// An endless stream of the operations of one client.
#[derive(Debug)]
pub struct Workload {
    random: StdRng,
    client: u32,
    sequence: u64,
    keys: Vec<u64>,
    /// The share of the keys up to each position.
    shares: Vec<f64>,
    /// Sums of the weights up to each operation.
    weights: [u64; 6],
    scan_limit_max: u32,
}

impl Workload {
    /// The stream of one client.
    pub fn new(spec: &WorkloadSpec, client: u32) -> Result<Self, WorkloadError> {
        let mut total = 0;
        let weights = spec.mix.weights().map(|weight| {
            total += u64::from(weight);
            total
        });
        match spec {
            _ if spec.keys.is_empty() => return Err(WorkloadError::NoKeys),
            _ if total == 0 => return Err(WorkloadError::NoOperations),
            _ if !(spec.theta.is_finite() && spec.theta >= 0.0) => return Err(WorkloadError::Theta(spec.theta)),
            _ if spec.mix.scan > 0 && spec.scan_limit_max == 0 => return Err(WorkloadError::ScanLimit),
            _ if client > CLIENT_MAX => return Err(WorkloadError::Client(client)),
            _ => {}
        }
        let mut sum = 0.0;
        let mut shares: Vec<f64> = (1..=spec.keys.len())
            .map(|position| {
                sum += (position as f64).powf(-spec.theta);
                sum
            })
            .collect();
        shares.iter_mut().for_each(|share| *share /= sum);
        let random = StdRng::seed_from_u64(mix(spec.seed ^ mix(u64::from(client) + 1)));
        let scan_limit_max = spec.scan_limit_max;
        Ok(Self { random, client, sequence: 0, keys: spec.keys.clone(), shares, weights, scan_limit_max })
    }

    /// The next operation.
    pub fn next_op(&mut self) -> Op {
        let point = self.random.random::<f64>();
        let position = self.shares.partition_point(|share| *share <= point).min(self.keys.len() - 1);
        let key = self.keys[position];
        let ticket = self.random.random_range(0..self.weights[5]);
        match self.weights.partition_point(|sum| *sum <= ticket) {
            0 => Op::Get { key },
            1 => Op::Insert { key, value: self.next_value() },
            2 => Op::Upsert { key, value: self.next_value() },
            3 => Op::Update { key, value: self.next_value() },
            4 => Op::Remove { key },
            _ => {
                // Half of the scans begin at a key that need not be there.
                let from = if self.random.random() { key } else { self.random.random() };
                let limit = self.random.random_range(1..=self.scan_limit_max);
                Op::Scan { from, limit, descending: self.random.random() }
            }
        }
    }

    fn next_value(&mut self) -> u64 {
        self.sequence += 1;
        value_of(self.client, self.sequence)
    }
}

impl Iterator for Workload {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        Some(self.next_op())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use super::*;

    fn spec() -> WorkloadSpec {
        WorkloadSpec { seed: 1, keys: spread_keys(100), theta: 0.99, mix: Mix::ALL, scan_limit_max: 10 }
    }

    fn written(op: &Op) -> Option<u64> {
        match *op {
            Op::Insert { value, .. } | Op::Upsert { value, .. } | Op::Update { value, .. } => Some(value),
            _ => None,
        }
    }

    #[test]
    fn values_are_unique_and_name_their_client() {
        let mut seen = HashSet::new();
        for client in [0, 1, 7, CLIENT_MAX] {
            for value in Workload::new(&spec(), client).unwrap().take(5000).filter_map(|op| written(&op)) {
                assert!(seen.insert(value), "{value:#x} twice");
                assert_eq!(origin_of(value).0, client);
            }
        }
    }

    #[test]
    fn the_seed_and_the_client_determine_the_stream() {
        let stream = |seed, client| -> Vec<Op> {
            Workload::new(&WorkloadSpec { seed, ..spec() }, client).unwrap().take(100).collect()
        };
        assert_eq!(stream(1, 2), stream(1, 2));
        assert_ne!(stream(1, 2), stream(2, 2));
        let shape = |ops: Vec<Op>| ops.iter().map(Op::key).collect::<Vec<_>>();
        assert_ne!(shape(stream(1, 2)), shape(stream(1, 3)));
    }

    #[test]
    fn the_mix_and_the_skew_are_those_asked_for() {
        let count = 200_000;
        let mut kinds = [0; 6];
        let mut keys: BTreeMap<u64, f64> = BTreeMap::new();
        for op in Workload::new(&spec(), 0).unwrap().take(count) {
            let kind = match op {
                Op::Get { .. } => 0,
                Op::Insert { .. } => 1,
                Op::Upsert { .. } => 2,
                Op::Update { .. } => 3,
                Op::Remove { .. } => 4,
                Op::Scan { limit, .. } => {
                    assert!((1..=10).contains(&limit));
                    5
                }
            };
            kinds[kind] += 1;
            if let Some(key) = op.key() {
                *keys.entry(key).or_default() += 1.0;
            }
        }
        for (kind, weight) in Mix::ALL.weights().into_iter().enumerate() {
            let share = kinds[kind] as f64 / count as f64;
            assert!((share - f64::from(weight) / 100.0).abs() < 0.01, "kind {kind}: {share}");
        }
        let ratio = keys[&spec().keys[0]] / keys[&spec().keys[9]];
        assert!((ratio - 10f64.powf(0.99)).abs() < 1.0, "first to tenth key: {ratio}");
    }

    #[test]
    fn keys_are_distinct_and_include_both_ends() {
        let keys = spread_keys(10_000);
        assert_eq!(keys[..2], [0, u64::MAX]);
        assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
        let clustered = clustered_keys(10_000);
        assert_eq!(clustered.iter().collect::<HashSet<_>>(), keys.iter().collect::<HashSet<_>>());
        assert_ne!(clustered, keys);
    }

    #[test]
    fn nonsense_is_refused() {
        let error = |spec: WorkloadSpec, client| Workload::new(&spec, client).unwrap_err();
        assert_eq!(error(WorkloadSpec { keys: Vec::new(), ..spec() }, 0), WorkloadError::NoKeys);
        let nothing = Mix { get: 0, insert: 0, upsert: 0, update: 0, remove: 0, scan: 0 };
        assert_eq!(error(WorkloadSpec { mix: nothing, ..spec() }, 0), WorkloadError::NoOperations);
        assert_eq!(error(WorkloadSpec { theta: -1.0, ..spec() }, 0), WorkloadError::Theta(-1.0));
        assert_eq!(error(WorkloadSpec { scan_limit_max: 0, ..spec() }, 0), WorkloadError::ScanLimit);
        assert_eq!(error(spec(), CLIENT_MAX + 1), WorkloadError::Client(CLIENT_MAX + 1));
        assert!(Workload::new(&WorkloadSpec { theta: f64::NAN, ..spec() }, 0).is_err());
    }
}
