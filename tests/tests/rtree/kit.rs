//! The R-tree under the conformance kit.

use std::{cmp::Ordering, collections::BTreeMap};

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
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::entries::{Key, a_query, a_rect, key};

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

    const CACHED_PAGES: usize = 12;

    fn fill() -> Vec<Op<D>> {
        let mut rng = SmallRng::seed_from_u64(1);
        (0..ENTRIES_MAX).map(|number| Op::Insert((a_rect(&mut rng, 100), number % 4))).collect()
    }

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
            Op::Find(query, limit) => {
                let mut all = matching(state, query);
                all.sort_by(|a, b| order(query, a, b));
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
                all.sort_by(|a, b| order(&query, a, b));
                all.truncate(limit.min(1 << 30) as usize);
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
    /// Whether it is a move to where the entry was.
    is_back: bool,
}

fn is_same<const D: usize>(entry: &Entry<D>, to: &Rect<D>) -> bool {
    key(entry) == key(&(*to, entry.1))
}

/// The order of a query's answer.
pub(crate) fn order<const D: usize>(query: &Query<D>, a: &Entry<D>, b: &Entry<D>) -> Ordering {
    let by_keys = || key(a).cmp(&key(b));
    match query {
        Query::Nearest(to) => a.0.distance_squared(to).total_cmp(&b.0.distance_squared(to)).then_with(by_keys),
        _ => by_keys(),
    }
}

fn judge<const D: usize>(history: &[Event<Op<D>, Output<D>>]) -> Result<(), String> {
    let (mut come, mut gone) = (BTreeMap::<Key, Vec<Step>>::new(), BTreeMap::<Key, Vec<Step>>::new());
    for event in history {
        if event.outcome == Some(Output::Done(false)) {
            continue;
        }
        let is_known = event.outcome.is_some();
        let is_back = matches!(&event.op, Op::Update(entry, to) if is_same(entry, to));
        let step = Step { begin: event.begin_ns, end: event.end_ns, is_known, is_back };
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
    // Each took another one that had come. What is moved to where it was it cannot have brought itself.
    let taken = |key: &Key, by: &Event<Op<D>, Output<D>>| {
        let (come, gone) = (come.get(key).unwrap_or(&none), gone.get(key).unwrap_or(&none));
        let is_over = |step: &&Step| step.is_known && step.end <= by.end_ns && !step.is_back;
        let put_back = u64::from(matches!(&by.op, Op::Update(entry, to) if is_same(entry, to)));
        let taken = gone.iter().filter(is_over).count() as u64 + put_back;
        let most = come.iter().filter(|step| step.begin <= by.end_ns && !step.is_back).count() as u64;
        (taken > most).then_some((taken, most))
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
                if let (true, Some((taken, most))) = (*is_done, taken(&key(entry), event)) {
                    return wrong(format!("{taken} of {entry:?} had been taken of {most} at most"));
                }
            }
            (Op::Find(query, limit), Some(Output::Entries(found))) => {
                let mut counts = BTreeMap::<Key, u64>::new();
                found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
                // Behind the last one is the rest.
                let last = found.iter().max_by(|a, b| order(query, a, b)).filter(|_| found.len() as u64 >= *limit);
                let is_asked = |key: &Key| {
                    let entry = (rect_of::<D>(key), key.1);
                    query.matches(&entry.0) && last.is_none_or(|last| order(query, &entry, last).is_lt())
                };
                for key in come.keys().filter(|key| is_asked(key)).chain(counts.keys()) {
                    let ((least, most), count) = (bounds(key, begin, end), counts.get(key).copied().unwrap_or(0));
                    let least = if is_asked(key) { least } else { 0 };
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

#[cfg(test)]
mod judged {
    use super::*;

    fn event(op: Op<2>, outcome: Output<2>, begin_ns: u64, end_ns: u64) -> Event<Op<2>, Output<2>> {
        Event { worker: 0, op, outcome: Some(outcome), begin_ns, end_ns }
    }

    fn at(x: f64) -> Entry<2> {
        (Rect::point([x, 0.0]).unwrap(), 7)
    }

    fn insert(entry: Entry<2>, begin_ns: u64) -> Event<Op<2>, Output<2>> {
        event(Op::Insert(entry), Output::Done(true), begin_ns, begin_ns + 1)
    }

    #[test]
    fn an_entry_is_taken_once() {
        let delete = |begin, end| event(Op::Delete(at(1.0)), Output::Done(true), begin, end);
        judge(&[insert(at(1.0), 0), delete(10, 20)]).unwrap();
        judge(&[insert(at(1.0), 0), insert(at(1.0), 2), delete(10, 20), delete(15, 25)]).unwrap();
        judge(&[insert(at(1.0), 0), delete(10, 20), delete(15, 25)]).unwrap_err();
        // The second entry comes too late for the second removal.
        judge(&[insert(at(1.0), 0), delete(10, 20), delete(15, 25), insert(at(1.0), 30)]).unwrap_err();
        // A move is a removal, and where it leads to the same place it brings nothing.
        let moved = |to| event(Op::Update(at(1.0), at(to).0), Output::Done(true), 15, 25);
        judge(&[insert(at(1.0), 0), delete(10, 20), moved(2.0)]).unwrap_err();
        judge(&[insert(at(1.0), 0), delete(10, 20), moved(1.0)]).unwrap_err();
        judge(&[insert(at(1.0), 0), delete(30, 40), moved(1.0)]).unwrap();
    }

    #[test]
    fn an_answer_that_is_cut_has_all_before_its_last() {
        let found = |query, xs: &[f64]| {
            let entries = xs.iter().map(|&x| at(x)).collect();
            event(Op::Find(query, 2), Output::Entries(entries), 10, 20)
        };
        for query in [Query::Nearest([0.0, 0.0]), Query::Intersects(Rect::EVERYTHING)] {
            let there = [insert(at(1.0), 0), insert(at(2.0), 2), insert(at(3.0), 4)];
            let with = |xs: &[f64]| judge(&[&there[..], &[found(query, xs)]].concat());
            with(&[1.0, 2.0]).unwrap();
            with(&[1.0, 3.0]).unwrap_err();
            with(&[2.0, 3.0]).unwrap_err();
            // It may have gone meanwhile.
            let gone = event(Op::Delete(at(2.0)), Output::Done(true), 15, 16);
            judge(&[&there[..], &[gone, found(query, &[1.0, 3.0])]].concat()).unwrap();
        }
    }
}
