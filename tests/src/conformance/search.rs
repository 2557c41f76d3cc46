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
pub fn linearize<M: Model>(history: &[Event<M::Op, M::Output>]) -> Verdict {
    linearize_by::<M, M::Output>(history, |expected, found| expected == found)
}

/// [`linearize`], with outcomes of another form.
pub(super) fn linearize_by<M: Model, R: std::fmt::Debug>(
    history: &[Event<M::Op, R>],
    same: impl Fn(&M::Output, &R) -> bool,
) -> Verdict {
    let all: Vec<_> = history.iter().filter(|event| M::is_linearizable(&event.op)).collect();
    let is_local = all.iter().all(|event| M::object(&event.op).is_some());
    let mut objects = BTreeMap::<_, Vec<&Event<M::Op, R>>>::new();
    for event in all {
        objects.entry(M::object(&event.op).filter(|_| is_local)).or_default().push(event);
    }
    let mut verdict = Verdict::Linearizable;
    for (_, mut events) in objects {
        events.sort_by_key(|event| event.begin_ns);
        match search::<M, R>(&events, &same) {
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

fn search<M: Model, R: std::fmt::Debug>(
    events: &[&Event<M::Op, R>],
    same: &impl Fn(&M::Output, &R) -> bool,
) -> Verdict {
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
            Some(found) if !same(&output, found) => {
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

#[cfg(test)]
mod tests {
    use farlink_runtime::{error::Error, operation::Run, structure::StructurePlacement, worker::Handle};
    use rand::{RngExt, SeedableRng, rngs::SmallRng};

    use super::*;
    use crate::plugins::mixed::Mixed;

    /// Registers: a write answers what was there, a read is a write of nothing.
    struct Registers;

    impl Model for Registers {
        type Plugin = Mixed;
        type Op = (u64, Option<u64>);
        type Output = u64;
        type State = BTreeMap<u64, u64>;

        fn draw(_rng: &mut SmallRng, _state: &Self::State) -> Self::Op {
            (0, None)
        }

        fn apply(state: &mut Self::State, (register, value): &Self::Op) -> u64 {
            let before = state.get(register).copied().unwrap_or(0);
            state.insert(*register, value.unwrap_or(before));
            before
        }

        fn object((register, _): &Self::Op) -> Option<u64> {
            (*register < 100).then_some(*register)
        }

        async fn run(_op: &Self::Op, _on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
            Ok(0)
        }

        async fn create(_worker: &Handle, _name: &str, _placed: StructurePlacement) -> Result<(), Error> {
            Ok(())
        }
    }

    type Of = Event<(u64, Option<u64>), u64>;

    fn event(op: (u64, Option<u64>), outcome: Option<u64>, begin_ns: u64, end_ns: u64) -> Of {
        Event { worker: 0, op, outcome, begin_ns, end_ns }
    }

    fn holds(history: &[Of]) -> bool {
        match linearize::<Registers>(history) {
            Verdict::Linearizable => true,
            Verdict::Not(why) => {
                assert!(!why.is_empty());
                false
            }
            Verdict::Undecided => panic!("a short history"),
        }
    }

    #[test]
    fn what_was_over_before_comes_before() {
        let write = event((1, Some(7)), Some(0), 0, 10);
        assert!(holds(&[write.clone(), event((1, None), Some(7), 11, 20)]));
        assert!(!holds(&[write.clone(), event((1, None), Some(0), 11, 20)]), "a stale read");
        // At the same time, as far as clocks can tell.
        for value in [0, 7] {
            assert!(holds(&[write.clone(), event((1, None), Some(value), 10, 20)]));
        }
        assert!(!holds(&[write, event((1, None), Some(8), 5, 20)]), "a value from nowhere");
    }

    #[test]
    fn what_was_lost_comes_late_or_never() {
        let lost = event((1, Some(7)), None, 0, u64::MAX);
        let reads = |first, second| {
            [lost.clone(), event((1, None), Some(first), 10, 11), event((1, None), Some(second), 20, 21)]
        };
        assert!(holds(&reads(0, 0)) && holds(&reads(0, 7)) && holds(&reads(7, 7)));
        assert!(!holds(&reads(7, 0)), "it came, and went");
    }

    #[test]
    fn what_is_about_one_part_is_asked_of_that_part_and_what_is_about_all_of_all() {
        let swapped = |register| [event((register, Some(1)), Some(0), 0, 1), event((register, None), Some(0), 2, 3)];
        assert!(!holds(&swapped(1)));
        let apart = [event((1, Some(1)), Some(0), 0, 1), event((2, None), Some(0), 2, 3)];
        assert!(holds(&apart));
        assert!(!holds(&[&apart[..], &swapped(100)].concat()));
    }

    #[test]
    fn every_order_that_there_was_is_found_and_one_wrong_answer_is_too() {
        for seed in 0..200 {
            let mut rng = SmallRng::seed_from_u64(seed);
            // As they come, each within its time.
            let (mut state, mut history) = (BTreeMap::new(), Vec::new());
            for at in 0..60u64 {
                let op = (rng.random_range(0..3) + if seed % 2 == 0 { 0 } else { 100 }, Some(at + 1));
                let op = if rng.random_bool(0.5) { (op.0, None) } else { op };
                let outcome = Registers::apply(&mut state, &op);
                let (begin, end) = (100 + at * 10 - rng.random_range(0..60), 100 + at * 10 + rng.random_range(0..60));
                let is_lost = rng.random_bool(0.05);
                history.push(event(op, (!is_lost).then_some(outcome), begin, if is_lost { u64::MAX } else { end }));
            }
            assert!(holds(&history), "seed {seed}");
            let known: Vec<_> = (0..60).filter(|&index| history[index].outcome.is_some()).collect();
            let wrong = known[rng.random_range(0..known.len())];
            history[wrong].outcome = Some(1000);
            assert!(!holds(&history), "seed {seed}");
        }
    }
}
