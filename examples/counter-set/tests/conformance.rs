//! The counters under the conformance kit.

use std::collections::BTreeMap;

use counter_set::{Add, CounterSet, Get, Name, Take, Total};
use farlink_runtime::{error::Error, operation::Run, structure::StructurePlacement, worker::Handle};
use farlink_tests::conformance::{Event, Model};
use rand::{RngExt, rngs::SmallRng};

struct Counters;

#[derive(Debug, Clone)]
enum Op {
    Add(Add),
    Get(Get),
    Take(Take),
    Total,
}

fn a_name(number: u64) -> Name {
    counter_set::name(&format!("counter {number}")).expect("a short name")
}

impl Model for Counters {
    type Plugin = CounterSet;
    type Op = Op;
    type Output = Option<u64>;
    type State = BTreeMap<Name, u64>;

    const CACHE_BYTES: usize = 64 << 10;

    fn draw(rng: &mut SmallRng, _state: &Self::State) -> Op {
        let name = a_name(if rng.random() { rng.random_range(0..6) } else { rng.random_range(0..90) });
        match rng.random_range(0..8) {
            0 => Op::Total,
            1 => Op::Take(Take { name }),
            2 | 3 => Op::Get(Get { name }),
            _ => Op::Add(Add { name, amount: rng.random_range(0..100) }),
        }
    }

    fn apply(state: &mut Self::State, op: &Op) -> Option<u64> {
        match op {
            Op::Add(Add { name, amount }) => {
                *state.entry(*name).or_default() += amount;
                Some(state[name])
            }
            Op::Get(Get { name }) => state.get(name).copied(),
            Op::Take(Take { name }) => state.remove(name),
            Op::Total => Some(state.values().sum()),
        }
    }

    fn object(op: &Op) -> Option<u64> {
        match op {
            Op::Add(Add { name, .. }) | Op::Get(Get { name }) | Op::Take(Take { name }) => Some(name[1]),
            Op::Total => None,
        }
    }

    fn is_linearizable(op: &Op) -> bool {
        !matches!(op, Op::Total)
    }

    fn looks() -> Vec<Op> {
        (0..90).map(|number| Op::Get(Get { name: a_name(number) })).collect()
    }

    async fn run(op: &Op, on: &impl Run<Plugin = CounterSet>) -> Result<Option<u64>, Error> {
        match op {
            Op::Add(add) => on.execute(add).await.map(Some),
            Op::Get(get) => on.execute(get).await,
            Op::Take(take) => on.execute(take).await,
            Op::Total => on.execute(&Total {}).await.map(Some),
        }
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        counter_set::create(worker, name, placement).await.map(drop)
    }

    /// A total is what may have been added by its end at most.
    fn judge(history: &[Event<Op, Option<u64>>]) -> Result<(), String> {
        for total in history.iter().filter(|event| matches!(event.op, Op::Total)) {
            let amount = |event: &Event<Op, Option<u64>>| match event.op {
                Op::Add(Add { amount, .. }) if event.begin_ns <= total.end_ns => amount,
                _ => 0,
            };
            let most = history.iter().map(amount).sum();
            if total.outcome.flatten().is_some_and(|found| found > most) {
                return Err(format!("more than {most}: {total:?}"));
            }
        }
        Ok(())
    }
}

farlink_tests::conformance!(Counters);
