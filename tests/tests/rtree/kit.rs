//! The R-tree under the conformance kit.

use std::collections::BTreeMap;

use farlink_runtime::{
    error::Error,
    operation::Run,
    structure::StructurePlacement,
    wire::{DecodeError, Wire},
    worker::Handle,
};
use farlink_structures::rtree::{
    Entry, Query, RTree, RTreeOptions, Rect, Tree,
    ops::{Count, Delete, Find, Insert, Update},
};
use farlink_tests::conformance::{Event, Model};
use rand::{RngExt, rngs::SmallRng};

use crate::entries::{Key, a_query, a_rect, key, sorted};

/// The R-tree under the kit.
pub(crate) struct Places<const D: usize>;

#[derive(Debug, Clone)]
pub(crate) enum Op<const D: usize> {
    Insert(Entry<D>),
    Delete(Entry<D>),
    Update(Entry<D>, Rect<D>),
    Find(Query<D>, u64),
    Count(Query<D>),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Output<const D: usize> {
    Done(bool),
    /// As their keys, which have a total order.
    Entries(Vec<Entry<D>>),
    Count(u64),
}

impl<const D: usize> Wire for Output<D> {
    fn encode(&self, to: &mut Vec<u64>) {
        match self {
            Self::Done(is_done) => (0u64, *is_done).encode(to),
            Self::Entries(entries) => {
                to.push(1);
                entries.encode(to);
            }
            Self::Count(count) => (2u64, *count).encode(to),
        }
    }

    fn decode(from: &mut &[u64]) -> Result<Self, DecodeError> {
        match u64::decode(from)? {
            0 => Wire::decode(from).map(Self::Done),
            1 => Wire::decode(from).map(Self::Entries),
            2 => Wire::decode(from).map(Self::Count),
            _ => Err(DecodeError("there is no such answer")),
        }
    }
}

/// Entries, each as often as it is there.
pub(crate) type State = BTreeMap<Key, u64>;

fn rect_of<const D: usize>(key: &Key) -> Rect<D> {
    let number = |word: u64| {
        let word = (word ^ 1 << 63) as i64;
        f64::from_bits((word ^ ((word >> 63) as u64 >> 1) as i64) as u64)
    };
    let corner = |from: usize| std::array::from_fn(|d| number(key.0[from + d]));
    Rect::new(corner(0), corner(D)).unwrap()
}

fn matching<const D: usize>(state: &State, query: &Query<D>) -> Vec<Entry<D>> {
    let entries = state.iter().map(|(key, &count)| ((rect_of::<D>(key), key.1), count));
    let found = entries.filter(|((rect, _), _)| query.matches(rect));
    found.flat_map(|(entry, count)| std::iter::repeat_n(entry, count as usize)).collect()
}

fn add(state: &mut State, key: Key) {
    *state.entry(key).or_default() += 1;
}

fn take(state: &mut State, key: &Key) -> bool {
    let Some(count) = state.get_mut(key) else { return false };
    *count -= 1;
    if *count == 0 {
        state.remove(key);
    }
    true
}

const ENTRIES_MAX: u64 = 250;

impl<const D: usize> Model for Places<D> {
    type Plugin = Tree<D>;
    type Op = Op<D>;
    type Output = Output<D>;
    type State = State;

    fn draw(rng: &mut SmallRng, state: &State) -> Op<D> {
        let entry = (a_rect(rng, 3), rng.random_range(0..4));
        let is_full = state.values().sum::<u64>() > ENTRIES_MAX;
        let known = state.keys().nth(rng.random_range(0..state.len().max(1))).map(|key| (rect_of(key), key.1));
        match rng.random_range(0..16) {
            0 => Op::Find(a_query(rng), rng.random_range(1..50)),
            1 => Op::Find(a_query(rng), u64::MAX),
            2 => Op::Find(Query::Nearest(entry.0.low()), rng.random_range(1..20)),
            3 => Op::Count(a_query(rng)),
            4 => Op::Delete(entry),
            5 => Op::Update(known.unwrap_or(entry), a_rect(rng, 3)),
            6 => known.map_or(Op::Insert(entry), Op::Insert),
            7..10 => Op::Delete(known.unwrap_or(entry)),
            _ if is_full => Op::Delete(known.unwrap_or(entry)),
            _ => Op::Insert(entry),
        }
    }

    fn apply(state: &mut State, op: &Op<D>) -> Output<D> {
        match op {
            Op::Insert(entry) => {
                add(state, key(entry));
                Output::Done(true)
            }
            Op::Delete(entry) => Output::Done(take(state, &key(entry))),
            Op::Update(entry, to) => {
                let is_there = take(state, &key(entry));
                if is_there {
                    add(state, key(&(*to, entry.1)));
                }
                Output::Done(is_there)
            }
            Op::Find(query @ Query::Nearest(to), limit) => {
                let mut all = matching(state, query);
                all.sort_by(|a, b| {
                    let distance = |entry: &Entry<D>| entry.0.distance_squared(to);
                    distance(a).total_cmp(&distance(b)).then_with(|| key(a).cmp(&key(b)))
                });
                all.truncate(*limit as usize);
                Output::Entries(all)
            }
            Op::Find(query, limit) => {
                let mut all = matching(state, query);
                all.truncate((*limit).min(1 << 30) as usize);
                Output::Entries(all)
            }
            Op::Count(query) => Output::Count(matching(state, query).len() as u64),
        }
    }

    /// What is promised of entries that come and go meanwhile is less, and judged by `judge`.
    fn is_linearizable(_op: &Op<D>) -> bool {
        false
    }

    fn looks() -> Vec<Op<D>> {
        vec![Op::Find(Query::Intersects(Rect::EVERYTHING), u64::MAX)]
    }

    async fn run(op: &Op<D>, on: &impl Run<Plugin = Tree<D>>) -> Result<Output<D>, Error> {
        Ok(match *op {
            Op::Insert((rect, payload)) => on.execute(&Insert { rect, payload }).await.map(|()| Output::Done(true))?,
            Op::Delete((rect, payload)) => Output::Done(on.execute(&Delete { rect, payload }).await?),
            Op::Update((rect, payload), to) => Output::Done(on.execute(&Update { rect, payload, to }).await?),
            Op::Count(query) => Output::Count(on.execute(&Count { query, stamp: 0 }).await?),
            Op::Find(query, limit) => {
                let (mut after, mut all) = (None, Vec::new());
                while (all.len() as u64) < limit {
                    let found = on.execute(&Find { query, limit: limit - all.len() as u64, after, stamp: 0 }).await?;
                    after = found.entries.last().copied();
                    all.extend(found.entries);
                    if !found.has_rest {
                        break;
                    }
                }
                if limit == u64::MAX {
                    all = sorted(all);
                } else if let Query::Nearest(to) = query {
                    all.sort_by(|a, b| {
                        let distance = |entry: &Entry<D>| entry.0.distance_squared(&to);
                        distance(a).total_cmp(&distance(b)).then_with(|| key(a).cmp(&key(b)))
                    });
                    all.truncate(limit as usize);
                } else {
                    all = sorted(all);
                    all.truncate(limit as usize);
                }
                Output::Entries(all)
            }
        })
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        RTree::<_, D>::create(worker, name, options).await.map(drop)
    }

    /// Of each entry every answer has as many as were there all the time at least, and no more than ever were.
    fn judge(history: &[Event<Op<D>, Output<D>>]) -> Result<(), String> {
        judge(history)
    }
}

/// When an entry may have come or gone, and when it has for certain.
#[derive(Debug, Clone, Copy)]
struct Step {
    begin: u64,
    end: u64,
    /// Whether it is known to have been done.
    is_known: bool,
}

fn judge<const D: usize>(history: &[Event<Op<D>, Output<D>>]) -> Result<(), String> {
    let (mut come, mut gone) = (BTreeMap::<Key, Vec<Step>>::new(), BTreeMap::<Key, Vec<Step>>::new());
    for event in history {
        if event.outcome == Some(Output::Done(false)) {
            continue;
        }
        let is_known = event.outcome.is_some();
        let step = Step { begin: event.begin_ns, end: event.end_ns, is_known };
        match &event.op {
            Op::Insert(entry) => come.entry(key(entry)).or_default().push(step),
            Op::Delete(entry) => gone.entry(key(entry)).or_default().push(step),
            Op::Update(entry, to) => {
                gone.entry(key(entry)).or_default().push(step);
                come.entry(key(&(*to, entry.1))).or_default().push(step);
            }
            Op::Find(..) | Op::Count(_) => {}
        }
    }
    let none = Vec::new();
    let bounds = |key: &Key, begin: u64, end: u64| {
        let (come, gone) = (come.get(key).unwrap_or(&none), gone.get(key).unwrap_or(&none));
        let surely = |steps: &[Step]| steps.iter().filter(|step| step.is_known && step.end <= begin).count() as u64;
        let perhaps = |steps: &[Step]| steps.iter().filter(|step| step.begin < end).count() as u64;
        (surely(come).saturating_sub(perhaps(gone)), perhaps(come).saturating_sub(surely(gone)))
    };
    for event in history {
        let (begin, end) = (event.begin_ns, event.end_ns);
        let wrong = |what: String| Err(format!("{what} in {event:?}"));
        match (&event.op, &event.outcome) {
            (Op::Delete(entry) | Op::Update(entry, _), Some(Output::Done(is_done))) => {
                // Of itself it says nothing: it is among those that may have taken it.
                let (least, _) = bounds(&key(entry), begin, end);
                let most = come.get(&key(entry)).map_or(0, |come| come.iter().filter(|step| step.begin < end).count());
                if !is_done && least > 0 || *is_done && most == 0 {
                    return wrong(format!("of {entry:?} there were {least} at least and {most} at most"));
                }
            }
            (Op::Find(query, limit), Some(Output::Entries(found))) => {
                let mut counts = BTreeMap::<Key, u64>::new();
                found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
                // Behind the last one of a part is the rest.
                let is_cut = found.len() as u64 >= *limit;
                let is_asked = |key: &&Key| !is_cut && query.matches(&rect_of::<D>(key));
                for key in come.keys().filter(is_asked).chain(counts.keys()) {
                    let ((least, most), count) = (bounds(key, begin, end), counts.get(key).copied().unwrap_or(0));
                    let least = if is_cut { 0 } else { least };
                    if count < least || count > most {
                        let entry = (rect_of::<D>(key), key.1);
                        return wrong(format!("{count} of {entry:?}, not {least} to {most}"));
                    }
                }
            }
            (Op::Count(query), Some(Output::Count(count))) => {
                let matching = come.keys().filter(|key| query.matches(&rect_of::<D>(key)));
                let sums = matching.map(|key| bounds(key, begin, end)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
                if *count < sums.0 || *count > sums.1 {
                    return wrong(format!("not {} to {}", sums.0, sums.1));
                }
            }
            _ => {}
        }
    }
    Ok(())
}
