//! Whether a history is linearizable, by a sequential model: the search of Wing and Gong (JPDC 1993) with Lowe's memory of
//! what was tried (Concurrency and Computation 2017).
//!
//! An operation can come next if none that has not come yet had ended before it began. States that were reached with the same
//! operations before are not gone on from again. An operation whose outcome is not known comes at any time after it began, or
//! never.

use std::collections::{BTreeMap, HashSet};

use super::Model;

/// Steps after which a search is given up.
const STEPS_MAX: usize = 1 << 20;
/// Of what is said about where a search went no farther.
const STUCK_BYTES_MAX: usize = 1000;

/// The worker of an event that shows what is there in the end, when nobody else works.
pub const LOOKER: usize = usize::MAX;

/// An operation of a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<O, R> {
    /// Whose.
    pub worker: usize,
    /// The operation.
    pub op: O,
    /// What it answered, if that is known.
    pub outcome: Option<R>,
    /// When it began.
    pub begin_ns: u64,
    /// When it had ended; `u64::MAX` if that is not known.
    pub end_ns: u64,
}

/// An event of a model.
pub type EventOf<M> = Event<<M as Model>::Op, <M as Model>::Output>;

/// What a search has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// There is an order.
    Linearizable,
    /// It would take too long to find out.
    Undecided,
    /// There is none; where it went no farther.
    Not(String),
}

/// Whether a history is linearizable: of each [object](Model::object) by itself.
pub fn linearize<M: Model>(history: &[EventOf<M>]) -> Verdict {
    let all: Vec<_> = history.iter().filter(|event| M::is_linearizable(&event.op)).collect();
    let is_local = all.iter().all(|event| M::object(&event.op).is_some());
    let mut objects = BTreeMap::<_, Vec<&EventOf<M>>>::new();
    for event in all {
        objects.entry(M::object(&event.op).filter(|_| is_local)).or_default().push(event);
    }
    let mut verdict = Verdict::Linearizable;
    for (_, mut events) in objects {
        events.sort_by_key(|event| event.begin_ns);
        match search::<M>(&events) {
            Verdict::Linearizable => {}
            Verdict::Undecided => verdict = Verdict::Undecided,
            not => return not,
        }
    }
    verdict
}

/// The operations that have come, as bits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Come(Box<[u64]>);

impl Come {
    fn has(&self, index: usize) -> bool {
        self.0[index / 64] & 1 << (index % 64) != 0
    }

    fn with(&self, index: usize) -> Self {
        let mut with = self.clone();
        with.0[index / 64] |= 1 << (index % 64);
        with
    }
}

/// The operations that can come next.
fn candidates<O, R>(events: &[&Event<O, R>], come: &Come, from: usize) -> Vec<usize> {
    let (mut first_end, mut can) = (u64::MAX, Vec::new());
    for (index, event) in events.iter().enumerate().skip(from).filter(|(index, _)| !come.has(*index)) {
        if event.begin_ns > first_end {
            break;
        }
        can.push(index);
        first_end = first_end.min(event.end_ns);
    }
    // Those whose outcome is known first: others may never come.
    can.sort_by_key(|&index| (events[index].outcome.is_none(), events[index].end_ns));
    can
}

/// What has come so far.
struct Step<S> {
    state: S,
    come: Come,
    /// All before this number has come.
    first: usize,
    /// Operations of a known outcome that have not come.
    left: usize,
    /// What can come next and was not tried.
    next: std::vec::IntoIter<usize>,
}

fn search<M: Model>(events: &[&EventOf<M>]) -> Verdict {
    let left = events.iter().filter(|event| event.outcome.is_some()).count();
    let come = Come(vec![0; events.len().div_ceil(64)].into());
    let next = candidates(events, &come, 0).into_iter();
    let mut path = vec![Step { state: M::State::default(), come, first: 0, left, next }];
    let (mut tried, mut farthest, mut stuck, mut steps) = (HashSet::new(), left, String::new(), 0);
    loop {
        let Some(step) = path.last_mut() else { return Verdict::Not(stuck) };
        if step.left == 0 {
            return Verdict::Linearizable;
        }
        let Some(index) = step.next.next() else {
            path.pop();
            continue;
        };
        steps += 1;
        if steps > STEPS_MAX {
            return Verdict::Undecided;
        }
        let event = events[index];
        let mut state = step.state.clone();
        let output = M::apply(&mut state, &event.op);
        match &event.outcome {
            Some(found) if output != *found => {
                if step.left < farthest {
                    (farthest, stuck) = (step.left, String::new());
                }
                if step.left == farthest && stuck.len() < STUCK_BYTES_MAX {
                    stuck += &format!("{:?} of worker {} answered {found:?}, not {output:?}; ", event.op, event.worker);
                }
                continue;
            }
            // It has no say in anything.
            None if state == step.state => continue,
            _ => {}
        }
        let come = step.come.with(index);
        if !tried.insert((come.clone(), state.clone())) {
            continue;
        }
        let first = (step.first..events.len()).find(|&index| !come.has(index)).unwrap_or(events.len());
        let left = step.left - usize::from(event.outcome.is_some());
        let next = candidates(events, &come, first).into_iter();
        path.push(Step { state, come, first, left, next });
    }
}
