//! From what a user asked for to what the runtime is told: fabric options, proofs, trees by name.

use std::sync::Arc;

use farlink_runtime::access::Access;
use farlink_runtime::error::Error;
use farlink_runtime::fabric::Fabric;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_structures::BTree;

use crate::driver::Target;
use crate::place::Place;
use crate::plan::{Plan, Validation};
use crate::tally::Counters;

/// The fabric to the cluster, as slow and as nasty as the plan wants it.
pub(crate) fn measured_fabric(place: &Place, plan: &Plan) -> anyhow::Result<Arc<dyn Fabric>> {
    let options = MemOptions {
        latency_ns: plan.latency_ns,
        bandwidth_bytes_per_s: plan.bandwidth_bytes_per_second.unwrap_or(0),
        nasty: plan.nasty,
        ..MemOptions::default()
    };
    place.fabric(options)
}

/// How readers prove their copies whole.
pub(crate) fn proof(validation: Validation) -> Proof {
    match validation {
        Validation::Checksum => Proof::Checksum,
        Validation::LockBodyLock => Proof::LockBodyLock,
    }
}

impl From<farlink_runtime::worker::Counters> for Counters {
    fn from(counters: farlink_runtime::worker::Counters) -> Self {
        Self {
            reads: counters.reads,
            writes: counters.writes,
            atomics: counters.atomics,
            two_sided: counters.two_sided,
            bytes: counters.bytes,
            round_trips: counters.round_trips,
            restarts: counters.restarts,
        }
    }
}

impl<A: Access> Target for BTree<A> {
    type Error = Error;

    async fn get(&self, key: u64) -> Result<Option<u64>, Error> {
        self.get(key).await
    }

    async fn insert(&self, key: u64, value: u64) -> Result<bool, Error> {
        self.insert(key, value).await
    }

    async fn upsert(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        self.upsert(key, value).await
    }

    async fn update(&self, key: u64, value: u64) -> Result<Option<u64>, Error> {
        self.update(key, value).await
    }

    async fn remove(&self, key: u64) -> Result<Option<u64>, Error> {
        self.remove(key).await
    }

    async fn scan(&self, from: u64, limit: usize) -> Result<Vec<(u64, u64)>, Error> {
        self.scan(from, limit).await
    }
}
