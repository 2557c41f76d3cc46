//! The conformance kit of every ordered map.

use std::{
    collections::{BTreeMap, BTreeSet},
    marker::PhantomData,
};

use farlink_runtime::{
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    structure::StructurePlacement,
    wire::{DecodeError, Wire},
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
    conformance::{AccessVariant, Event, LOOKER, Model},
    history::{History, Op, Outcome, Record},
    linear,
    model::{After, Known, Transition},
    scans,
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

impl Wire for MapOutput {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Value(value) => (0u64, *value).encode(to),
            Self::Entries(entries) => {
                to.push(1);
                entries.encode(to);
            }
            Self::Count(count) => (2u64, *count).encode(to),
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        match u64::decode(from)? {
            0 => Wire::decode(from).map(Self::Value),
            1 => Wire::decode(from).map(Self::Entries),
            2 => Wire::decode(from).map(Self::Count),
            _ => Err(DecodeError("there is no such answer")),
        }
    }
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
    // A block of them. What has no locks has its pages in another cache.
    const CACHED_PAGES: usize = if is_latch_free::<S>() { 0 } else { 16 };
    const SMALL_MAPPING_BYTES: usize = if is_latch_free::<S>() { 4 << 10 } else { 0 };
    const DEATHS_LOSE_PAGES: bool = is_latch_free::<S>();

    /// What has no locks, nobody owns; what has no words that are swapped has no mapping to cache.
    fn variants() -> Vec<AccessVariant> {
        let fits = |variant: &AccessVariant| match is_latch_free::<S>() {
            true => !variant.owns(),
            false => *variant != AccessVariant::CachedMapping,
        };
        AccessVariant::ALL.into_iter().filter(fits).collect()
    }

    fn fill() -> Vec<MapOp> {
        (0..MAP_KEYS).map(|key| MapOp::Put(key, key, PutMode::Upsert)).collect()
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

    /// Scans and counts promise less, which `judge` asks for.
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

    fn judge(history: &[MapEvent]) -> Result<(), String> {
        judge(history)
    }
}

type MapEvent = Event<MapOp, MapOutput>;

/// What a point operation did, as the checkers of maps read it.
fn point(op: &MapOp, outcome: Option<&MapOutput>) -> Option<(Op, Outcome)> {
    let value = match outcome {
        None => None,
        Some(MapOutput::Value(value)) => Some(*value),
        Some(_) => return None,
    };
    let found = value.map_or(Outcome::Unknown, Outcome::Value);
    Some(match *op {
        MapOp::Get(key) => (Op::Get { key }, found),
        MapOp::Remove(key) => (Op::Remove { key }, found),
        MapOp::Put(key, value, PutMode::Upsert) => (Op::Upsert { key, value }, found),
        MapOp::Put(key, value, PutMode::Update) => (Op::Update { key, value }, found),
        // One that finds something changes nothing, and says what it was.
        MapOp::Put(key, _, PutMode::Insert) if matches!(found, Outcome::Value(Some(_))) => (Op::Get { key }, found),
        MapOp::Put(key, value, PutMode::Insert) => {
            (Op::Insert { key, value }, if found == Outcome::Unknown { found } else { Outcome::Inserted(true) })
        }
        MapOp::Scan(..) | MapOp::Count(_) => return None,
    })
}

fn record(event: &MapEvent, (op, outcome): (Op, Outcome)) -> Record {
    let (invoked_ns, returned_ns) = (event.begin_ns, event.end_ns);
    Record { client: event.worker as u32, op, outcome, invoked_ns, returned_ns }
}

/// Of each key a scan has what was there at some moment of it, and all that was there all the time; a count is as many as were there
/// all the time at least, and no more than may have been there at some moment. A scan when nobody else works is a look at each key.
fn judge(history: &[MapEvent]) -> Result<(), String> {
    let of_points = |event: &MapEvent| point(&event.op, event.outcome.as_ref()).map(|point| record(event, point));
    let mut points: History = history.iter().filter_map(of_points).collect();
    let keys: BTreeSet<u64> = points.records().iter().filter_map(|record| record.op.key()).collect();
    for event in history.iter().filter(|event| event.worker == LOOKER) {
        if let (&MapOp::Scan(low, high, usize::MAX, _), Some(MapOutput::Entries(found))) = (&event.op, &event.outcome) {
            let found: BTreeMap<u64, u64> = found.iter().copied().collect();
            for key in keys.range(low..=high).copied() {
                points.push(record(event, (Op::Get { key }, Outcome::Value(found.get(&key).copied()))));
            }
        }
    }
    linear::check(&points).map_err(|error| error.to_string())?;
    for event in history {
        match (&event.op, &event.outcome) {
            (&MapOp::Scan(low, high, limit, descending), Some(MapOutput::Entries(found))) => {
                // Keys beyond its end it neither missed nor may have found.
                let mut part = points.part(low, high);
                let scan = Op::Scan {
                    from: if descending { high } else { low },
                    limit: u32::try_from(limit).unwrap_or(u32::MAX),
                    descending,
                };
                part.push(record(event, (scan, Outcome::Entries(found.as_slice().into()))));
                scans::check(&part).map_err(|error| error.to_string())?;
            }
            (&MapOp::Count(low), Some(MapOutput::Count(count))) => {
                let sure = |is_there| {
                    let keys = keys.range(low..).filter(|&&key| is_sure(&points.part(key, key), is_there, event));
                    keys.count() as u64
                };
                let (least, most) = (sure(true), keys.range(low..).count() as u64 - sure(false));
                if !(least..=most).contains(count) {
                    return Err(format!("not {least} to {most}: {event:?}"));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether a key was there all the time of an event, or was not: an operation that left it so had ended before, and what may have
/// changed that came before that one or after the event.
fn is_sure(of_key: &History, is_there: bool, event: &MapEvent) -> bool {
    let (mut left_so, mut changed) = (Vec::new(), Vec::new());
    if !is_there {
        // Once it was not.
        left_so.push(0);
    }
    for record in of_key.records() {
        let Some(transition) = Transition::of(record) else { continue };
        let Some(known) = transition.leaves() else { continue };
        if (known != Known::Absent) != is_there {
            let returned_ns = if transition.certain { record.returned_ns } else { u64::MAX };
            changed.extend((transition.after != After::Same).then_some((record.invoked_ns, returned_ns)));
        } else if transition.certain && record.returned_ns < event.begin_ns {
            left_so.push(record.invoked_ns);
        }
    }
    let Some(left_ns) = left_so.into_iter().max() else { return false };
    changed.iter().all(|&(invoked_ns, returned_ns)| returned_ns < left_ns || invoked_ns > event.end_ns)
}

farlink_tests::conformance!(btree: MapModel<Tree>);
farlink_tests::conformance!(skiplist: MapModel<List>);
farlink_tests::conformance!(bwtree: MapModel<Bw>);

/// The B+-tree, whose scans of many entries leave one out in the middle, and whose counts leave one out if `COUNTS`.
struct Forgetful<const COUNTS: bool>;

type Sound = MapModel<Tree>;

impl<const COUNTS: bool> Model for Forgetful<COUNTS> {
    type Plugin = Tree;
    type Op = MapOp;
    type Output = MapOutput;
    type State = BTreeMap<u64, u64>;

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::OneSided]
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> MapOp {
        match rng.random_range(0..3) {
            0 if COUNTS => MapOp::Count(0),
            0 => MapOp::Scan(0, u64::MAX, 1000, rng.random()),
            _ => Sound::draw(rng, state),
        }
    }

    fn apply(state: &mut Self::State, op: &MapOp) -> MapOutput {
        Sound::apply(state, op)
    }

    fn object(op: &MapOp) -> Option<u64> {
        Sound::object(op)
    }

    fn is_linearizable(op: &MapOp) -> bool {
        Sound::is_linearizable(op)
    }

    fn looks() -> Vec<MapOp> {
        Sound::looks()
    }

    async fn run(op: &MapOp, on: &impl Run<Plugin = Tree>) -> Result<MapOutput, Error> {
        let mut output = Sound::run(op, on).await?;
        match (op, &mut output) {
            // The last look is whole: what others meanwhile see is what is asked for.
            (MapOp::Scan(_, _, usize::MAX, _), _) => {}
            (_, MapOutput::Entries(entries)) if !COUNTS && entries.len() > 2 => drop(entries.remove(entries.len() / 2)),
            (_, MapOutput::Count(count)) if COUNTS => *count = count.saturating_sub(1),
            _ => {}
        }
        Ok(output)
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Sound::create(worker, name, placement).await
    }

    fn judge(history: &[MapEvent]) -> Result<(), String> {
        judge(history)
    }
}

mod forgetful {
    use farlink_tests::conformance;

    use super::Forgetful;

    type Scans = Forgetful<false>;
    type Counts = Forgetful<true>;

    #[test]
    fn a_scan_of_many_is_judged() {
        conformance::refuses::<Scans>("the scan missed", conformance::linearizable::<Scans>);
    }

    #[test]
    fn a_scan_of_many_is_judged_where_requests_fail() {
        conformance::refuses::<Scans>("the scan missed", conformance::faults::<Scans>);
    }

    #[test]
    fn a_scan_of_many_is_judged_in_processes() {
        let child = concat!(module_path!(), "::child");
        conformance::refuses::<Scans>("the scan missed", || conformance::processes::<Scans>(child));
    }

    #[test]
    fn child() {
        conformance::child::<Scans>();
    }

    #[test]
    fn a_count_of_many_is_judged() {
        conformance::refuses::<Counts>("op: Count(", conformance::linearizable::<Counts>);
    }
}

/// What the last look does not find was lost.
#[test]
fn what_a_scan_of_all_does_not_find_in_the_end_was_lost() {
    let event = |op, outcome, worker, at| Event { worker, op, outcome: Some(outcome), begin_ns: at, end_ns: at + 1 };
    let put = |key, at| event(MapOp::Put(key, at, PutMode::Upsert), MapOutput::Value(None), 0, at);
    let look = |entries: &[(u64, u64)]| {
        event(MapOp::Scan(0, u64::MAX, usize::MAX, false), MapOutput::Entries(entries.to_vec()), LOOKER, 100)
    };
    judge(&[put(200, 10), put(250, 20), look(&[(200, 10), (250, 20)])]).unwrap();
    let lost = judge(&[put(200, 10), put(250, 20), look(&[(250, 20)])]).unwrap_err();
    assert!(lost.contains("key 200"), "{lost}");
}
