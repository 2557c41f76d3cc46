use std::collections::BTreeMap;

use farlink_runtime::{error::Error, operation::Run, structure::StructurePlacement, worker::Handle};
use farlink_tests::{
    conformance::{
        Model,
        search::{Event, Verdict, linearize},
        until_decided,
    },
    plugins::mixed::Mixed,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

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

    fn looks() -> Vec<Self::Op> {
        vec![(0, None)]
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
    let reads =
        |first, second| [lost.clone(), event((1, None), Some(first), 10, 11), event((1, None), Some(second), 20, 21)];
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

/// Where every operation is about all of the state and some may have come at any time, a wrong answer takes too long to be found: such
/// a history is no proof of anything, and the kit does not take it for one.
#[test]
fn what_is_not_found_out_is_no_success() {
    let (mut state, mut history) = (BTreeMap::new(), Vec::new());
    for at in 0..200u64 {
        let op = (100, Some(at % 2));
        let outcome = Registers::apply(&mut state, &op);
        let (begin, is_lost) = (at * 10, at % 20 == 0);
        let end = if is_lost { u64::MAX } else { begin + 95 };
        history.push(event(op, (!is_lost).then_some(outcome), begin, end));
    }
    assert!(holds(&history));
    history[190].outcome = Some(1000);
    assert_eq!(linearize::<Registers>(&history), Verdict::Undecided);

    let mut tried = Vec::new();
    until_decided(|ops| {
        tried.push(ops);
        tried.len() == 3
    });
    assert!(tried.len() == 3 && tried.is_sorted_by(|a, b| a > b), "{tried:?}");
}

#[test]
#[should_panic(expected = "too many orders")]
fn if_nothing_is_ever_found_out_that_is_a_failure() {
    until_decided(|_| false);
}
