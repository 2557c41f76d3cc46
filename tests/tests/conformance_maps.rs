//! The conformance kit of every ordered map.

use std::{collections::BTreeMap, marker::PhantomData};

use farlink_runtime::{
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    structure::StructurePlacement,
    worker::Handle,
};
use farlink_structures::{
    btree::Tree,
    bwtree::Bw,
    map::{
        Map, PutMode,
        ops::{Count, Get, Put, Remove, Scan},
    },
    skiplist::List,
};
use farlink_tests::{
    conformance::{AccessVariant, Model},
    subject::{StructureName, Subject},
};
use rand::{RngExt, rngs::SmallRng};

/// An ordered map.
struct MapModel<S>(PhantomData<S>);

const fn is_latch_free<S: Subject>() -> bool {
    matches!(S::WHICH, StructureName::BwTree)
}

#[derive(Debug, Clone)]
enum MapOp {
    Get(u64),
    Put(u64, u64, PutMode),
    Remove(u64),
    /// From one key to another, so many at most, upwards or downwards.
    Scan(u64, u64, usize, bool),
    Count(u64),
}

#[derive(Debug, Clone, PartialEq)]
enum MapOutput {
    Value(Option<u64>),
    Entries(Vec<(u64, u64)>),
    Count(u64),
}

/// Many operations meet on these.
const HOT_KEYS: u64 = 8;
const MAP_KEYS: u64 = 300;
/// Whether it is there says whether the map grows.
const TIDE: u64 = 7;

impl<S: Subject> Model for MapModel<S> {
    type Plugin = S;
    type Op = MapOp;
    type Output = MapOutput;
    type State = BTreeMap<u64, u64>;

    const CACHE_BYTES: usize = 64 << 10;

    /// What has no locks, nobody owns; what has no words that are swapped has no mapping to cache.
    fn variants() -> Vec<AccessVariant> {
        let fits = |variant: &AccessVariant| match is_latch_free::<S>() {
            true => !variant.owns(),
            false => *variant != AccessVariant::CachedMapping,
        };
        AccessVariant::ALL.into_iter().filter(fits).collect()
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> MapOp {
        let key = match rng.random_range(0..16) {
            0..6 => rng.random_range(0..HOT_KEYS),
            6 => u64::MAX - rng.random_range(0..2),
            _ => rng.random_range(0..MAP_KEYS),
        };
        let mode = [PutMode::Insert, PutMode::Update, PutMode::Upsert][rng.random_range(0..3)];
        match rng.random_range(0..16) {
            0..4 => MapOp::Get(key),
            4 => MapOp::Scan(key, rng.random_range(key..=u64::MAX), rng.random_range(0..80), rng.random()),
            5 => MapOp::Count(key),
            6..8 => MapOp::Remove(key),
            8..10 => MapOp::Put(key, rng.random(), mode),
            _ if key == TIDE && rng.random() => MapOp::Get(key),
            _ if state.contains_key(&TIDE) => MapOp::Remove(key),
            _ => MapOp::Put(key, rng.random(), PutMode::Upsert),
        }
    }

    fn apply(state: &mut Self::State, op: &MapOp) -> MapOutput {
        match *op {
            MapOp::Get(key) => MapOutput::Value(state.get(&key).copied()),
            MapOp::Put(key, value, mode) => {
                let before = state.get(&key).copied();
                if let Some(after) = mode.apply(before, value) {
                    state.insert(key, after);
                }
                MapOutput::Value(before)
            }
            MapOp::Remove(key) => MapOutput::Value(state.remove(&key)),
            MapOp::Scan(low, high, limit, false) => {
                MapOutput::Entries(state.range(low..=high).take(limit).map(|(&key, &value)| (key, value)).collect())
            }
            MapOp::Scan(low, high, limit, true) => {
                let entries = state.range(low..=high).rev().take(limit);
                MapOutput::Entries(entries.map(|(&key, &value)| (key, value)).collect())
            }
            MapOp::Count(low) => MapOutput::Count(state.range(low..).count() as u64),
        }
    }

    fn object(op: &MapOp) -> Option<u64> {
        match *op {
            MapOp::Get(key) | MapOp::Put(key, ..) | MapOp::Remove(key) => Some(key),
            MapOp::Scan(..) | MapOp::Count(_) => None,
        }
    }

    /// Scans and counts promise less; `scans` judges them.
    fn is_linearizable(op: &MapOp) -> bool {
        Self::object(op).is_some()
    }

    fn looks() -> Vec<MapOp> {
        let mut looks: Vec<_> = (0..HOT_KEYS).map(MapOp::Get).collect();
        looks.push(MapOp::Scan(0, u64::MAX, usize::MAX, false));
        looks
    }

    async fn run(op: &MapOp, on: &impl Run<Plugin = S>) -> Result<MapOutput, Error> {
        let of = PhantomData;
        Ok(match *op {
            MapOp::Get(key) => MapOutput::Value(on.execute(&Get { key, of }).await?),
            MapOp::Put(key, value, mode) => MapOutput::Value(on.execute(&Put { key, value, mode, of }).await?),
            MapOp::Remove(key) => MapOutput::Value(on.execute(&Remove { key, of }).await?),
            MapOp::Scan(mut low, mut high, limit, descending) => {
                let mut entries = Vec::new();
                while entries.len() < limit {
                    let limit = (limit - entries.len()) as u64;
                    let part = on.execute(&Scan { low, high, limit, descending, of }).await?;
                    entries.extend(part.entries);
                    let Some(rest) = part.rest else { break };
                    *(if descending { &mut high } else { &mut low }) = rest;
                }
                MapOutput::Entries(entries)
            }
            MapOp::Count(mut low) => {
                let mut all = 0;
                loop {
                    let (count, rest) = on.execute(&Count { low, high: u64::MAX, limit: 20, of }).await?;
                    all += count;
                    let Some(rest) = rest else { break MapOutput::Count(all) };
                    low = rest;
                }
            }
        })
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Map::<S, OneSided<S>>::make_at(worker, name, S::page_bytes(256), Proof::Checksum, placement).await.map(drop)
    }
}

farlink_tests::conformance!(btree: MapModel<Tree>);
farlink_tests::conformance!(skiplist: MapModel<List>);
farlink_tests::conformance!(bwtree: MapModel<Bw>);
