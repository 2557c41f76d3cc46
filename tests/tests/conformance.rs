//! The conformance kit of structures that are no ordered maps.

use std::{
    collections::BTreeMap,
    future::pending,
    marker::PhantomData,
    sync::atomic::{AtomicUsize, Ordering},
};

use farlink_runtime::{
    access::*, error::Error, operation::Run, page::HEADER_WORDS, ptr::RemotePtr, structure::StructurePlacement,
    wire::wire, worker::Handle,
};
use farlink_tests::{
    conformance::{AccessVariant, Event, Model},
    plugins::{
        chains::{self, Chains, Push, SETS, Take, Values},
        mixed::{self, Add, Mixed, Sum},
    },
};
use rand::{RngExt, rngs::SmallRng};

/// Counters in pages of four sizes.
struct Counters;

#[derive(Debug, Clone)]
enum CounterOp {
    Add(Add),
    Sum(Sum),
}

/// Each in words of its own.
const COUNTERS: u64 = 16;

impl Model for Counters {
    type Plugin = Mixed;
    type Op = CounterOp;
    type Output = u64;
    type State = BTreeMap<u64, u64>;

    const CACHE_BYTES: usize = 1 << 20;

    fn draw(rng: &mut SmallRng, _state: &Self::State) -> CounterOp {
        match rng.random_range(0..6) {
            0 => CounterOp::Sum(Sum { forks: rng.random() }),
            _ => CounterOp::Add(Add { counter: rng.random_range(0..COUNTERS), amount: rng.random_range(0..100) }),
        }
    }

    fn apply(state: &mut Self::State, op: &CounterOp) -> u64 {
        match op {
            CounterOp::Sum(_) => state.values().sum(),
            CounterOp::Add(add) => {
                let counter = state.entry(add.counter).or_default();
                *counter += add.amount;
                *counter - add.amount
            }
        }
    }

    fn object(op: &CounterOp) -> Option<u64> {
        if let CounterOp::Add(add) = op { Some(add.counter) } else { None }
    }

    /// A sum is over pages as they were at several moments.
    fn is_linearizable(op: &CounterOp) -> bool {
        Self::object(op).is_some()
    }

    fn looks() -> Vec<CounterOp> {
        (0..COUNTERS).map(|counter| CounterOp::Add(Add { counter, amount: 0 })).collect()
    }

    async fn run(op: &CounterOp, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        match op {
            CounterOp::Add(add) => on.execute(add).await,
            CounterOp::Sum(sum) => on.execute(sum).await,
        }
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        mixed::create(worker, name, placement).await.map(drop)
    }

    /// Counters only grow: a sum has at least what had been added before, and at most what may have been added by its end.
    fn judge(history: &[Event<CounterOp, u64>]) -> Result<(), String> {
        for sum in history.iter().filter(|event| matches!(event.op, CounterOp::Sum(_))) {
            let Some(found) = sum.outcome else { continue };
            let added = |counts: &dyn Fn(&Event<CounterOp, u64>) -> bool| -> u64 {
                let amount = |event: &Event<CounterOp, u64>| match event.op {
                    CounterOp::Add(Add { amount, .. }) if counts(event) => amount,
                    _ => 0,
                };
                history.iter().map(amount).sum()
            };
            let least = added(&|event| event.outcome.is_some() && event.end_ns < sum.begin_ns);
            let most = added(&|event| event.begin_ns <= sum.end_ns);
            if !(least..=most).contains(&found) {
                return Err(format!("a sum is not {least} to {most}: {sum:?}"));
            }
        }
        Ok(())
    }
}

farlink_tests::conformance!(mixed_sizes: Counters);

/// Sets without locks.
struct Sets;

#[derive(Debug, Clone)]
enum SetOp {
    Push(Push),
    Values(Values),
    Take(Take),
}

/// Values of a set, from when on it is rather emptied.
const VALUES_MAX: usize = 6;

impl Model for Sets {
    type Plugin = Chains;
    type Op = SetOp;
    type Output = Vec<u64>;
    type State = BTreeMap<u64, Vec<u64>>;

    const MAY_LOSE_PAGES: bool = true;

    /// What an owner has in its cache others would have to see at once.
    fn variants() -> Vec<AccessVariant> {
        AccessVariant::ALL.into_iter().filter(|variant| !variant.owns()).collect()
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> SetOp {
        let set = rng.random_range(0..SETS);
        let is_full = state.get(&set).is_some_and(|values| values.len() > VALUES_MAX);
        match rng.random_range(0..8) {
            0 => SetOp::Take(Take { set }),
            1..4 => SetOp::Values(Values { set }),
            _ if is_full => SetOp::Take(Take { set }),
            _ => SetOp::Push(Push { set, value: rng.random_range(0..1000) }),
        }
    }

    fn apply(state: &mut Self::State, op: &SetOp) -> Vec<u64> {
        match op {
            SetOp::Push(Push { set, value }) => {
                state.entry(*set).or_default().insert(0, *value);
                Vec::new()
            }
            SetOp::Values(Values { set }) => state.get(set).cloned().unwrap_or_default(),
            SetOp::Take(Take { set }) => state.remove(set).unwrap_or_default(),
        }
    }

    fn object(op: &SetOp) -> Option<u64> {
        let (SetOp::Push(Push { set, .. }) | SetOp::Values(Values { set }) | SetOp::Take(Take { set })) = op;
        Some(*set)
    }

    fn looks() -> Vec<SetOp> {
        (0..SETS).map(|set| SetOp::Values(Values { set })).collect()
    }

    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error> {
        match op {
            SetOp::Push(push) => on.execute(push).await.map(|()| Vec::new()),
            SetOp::Values(values) => on.execute(values).await,
            SetOp::Take(take) => on.execute(take).await,
        }
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        chains::create(worker, name, placement).await.map(drop)
    }
}

farlink_tests::conformance!(latch_free: Sets);

/// Counters of whose answers none is right.
struct Unjust;

impl Model for Unjust {
    type Plugin = Mixed;
    type Op = CounterOp;
    type Output = u64;
    type State = BTreeMap<u64, u64>;

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::OneSided]
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> CounterOp {
        Counters::draw(rng, state)
    }

    fn apply(state: &mut Self::State, op: &CounterOp) -> u64 {
        Counters::apply(state, op)
    }

    fn is_linearizable(_op: &CounterOp) -> bool {
        false
    }

    fn looks() -> Vec<CounterOp> {
        Counters::looks()
    }

    async fn run(op: &CounterOp, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        Counters::run(op, on).await
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Counters::create(worker, name, placement).await
    }

    fn judge(_history: &[Event<CounterOp, u64>]) -> Result<(), String> {
        Err("none is right".to_owned())
    }
}

mod unjust {
    use farlink_tests::conformance;

    #[test]
    fn processes() {
        let child = concat!(module_path!(), "::child");
        conformance::refuses::<super::Unjust>("none is right", || conformance::processes::<super::Unjust>(child));
    }

    #[test]
    fn child() {
        conformance::child::<super::Unjust>();
    }
}

/// Counters to which amounts are added in two steps.
struct InSteps;

impl Model for InSteps {
    type Plugin = Mixed;
    type Op = CounterOp;
    type Output = u64;
    type State = BTreeMap<u64, u64>;

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::OneSided]
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> CounterOp {
        Counters::draw(rng, state)
    }

    fn apply(state: &mut Self::State, op: &CounterOp) -> u64 {
        Counters::apply(state, op)
    }

    fn looks() -> Vec<CounterOp> {
        Counters::looks()
    }

    async fn run(op: &CounterOp, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        let CounterOp::Add(Add { counter, amount }) = *op else { return Counters::run(op, on).await };
        let half = amount / 2;
        let before = on.execute(&Add { counter, amount: half }).await?;
        on.execute(&Add { counter, amount: amount - half }).await?;
        Ok(before)
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Counters::create(worker, name, placement).await
    }
}

/// Empties a set, and holds up the epoch until its worker ends.
#[derive(Debug, Clone)]
struct TakePinned {
    set: u64,
}

/// Empties a set, and forgets what pages it had.
#[derive(Debug, Clone)]
struct TakeAndLose {
    set: u64,
}

/// The sum of what the words of a counter's page lead to, each as a position in it; none is looked at before.
#[derive(Debug, Clone)]
struct Peek {
    counter: u64,
}

wire! {
    struct TakePinned { set }
    struct TakeAndLose { set }
    struct Peek { counter }
}

impl Operation for TakePinned {
    type Output = Vec<u64>;
    type Plugin = Chains;
    const NAME: &'static str = "take-pinned";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let worker = &access.context().worker;
        let pin = worker.pin();
        drop(worker.spawn(async move {
            pending::<()>().await;
            drop(pin);
        }));
        Take { set: self.set }.run(access, from).await
    }
}

impl Operation for TakeAndLose {
    type Output = Vec<u64>;
    type Plugin = Chains;
    const NAME: &'static str = "take-and-lose";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Chains>>(&self, access: &A, from: Start) -> Result<Vec<u64>, Interrupt> {
        let root = access.open(from).await?;
        let word = WordPtr { page: root.link(), index: HEADER_WORDS + self.set as usize };
        let old = access.load(&[word]).await?[0];
        if old == 0 || old & EMPTY != 0 {
            return Ok(Vec::new());
        }
        let values = Values { set: self.set }.run(access, Start::Root).await?;
        let to = EMPTY | access.context().worker.random(RngExt::random::<u64>) >> 2;
        let swap = Swap { word, old, to, found_by: Some([self.set, 0]) };
        access.install(vec![], |_| (), swap, vec![]).await?.map(|()| values).map_err(|_| Interrupt::conflict())
    }
}

/// Of the heads of empty sets.
const EMPTY: u64 = 1 << 62;

impl Operation for Peek {
    type Output = u64;
    type Plugin = Mixed;
    const NAME: &'static str = "peek";
    const READS_ONLY: bool = true;

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Mixed>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let root = access.open(from).await?;
        let (child, _) = mixed::place(self.counter);
        let link = root.read(|words| Link::from_word(words.word(HEADER_WORDS + child)))?;
        let page = access.follow(&root, link, Hint::DOWN).await?;
        page.read(|words| {
            let at = |index: usize| words.word(HEADER_WORDS.wrapping_add(words.word(index) as usize));
            (HEADER_WORDS..words.count()).fold(0, |sum: u64, index| sum.wrapping_add(at(index)))
        })
    }
}

/// What is wrong with [`Sets`] of this kind.
trait Fault: 'static {
    /// Runs an operation.
    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error>;
}

struct Pins;

impl Fault for Pins {
    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error> {
        match op {
            SetOp::Take(take) => on.execute(&TakePinned { set: take.set }).await,
            _ => Sets::run(op, on).await,
        }
    }
}

struct Loses;

impl Fault for Loses {
    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error> {
        match op {
            SetOp::Take(take) => on.execute(&TakeAndLose { set: take.set }).await,
            _ => Sets::run(op, on).await,
        }
    }
}

/// After some operations it does not know of any whether it came to something.
struct NeverSure;

/// Operations of which it does.
const SURE: usize = 10;

impl Fault for NeverSure {
    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error> {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        match BEGUN.fetch_add(1, Ordering::Relaxed) {
            0..SURE => Sets::run(op, on).await,
            _ => Err(Error::InstallUnknown { word: RemotePtr::from_raw(64).expect("an address") }),
        }
    }
}

/// Sets with a fault.
struct Faulty<F>(PhantomData<F>);

impl<F: Fault> Model for Faulty<F> {
    type Plugin = Chains;
    type Op = SetOp;
    type Output = Vec<u64>;
    type State = BTreeMap<u64, Vec<u64>>;

    const MAY_LOSE_PAGES: bool = true;

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::OneSided]
    }

    fn draw(rng: &mut SmallRng, state: &Self::State) -> SetOp {
        Sets::draw(rng, state)
    }

    fn apply(state: &mut Self::State, op: &SetOp) -> Vec<u64> {
        Sets::apply(state, op)
    }

    fn object(op: &SetOp) -> Option<u64> {
        Sets::object(op)
    }

    fn looks() -> Vec<SetOp> {
        Sets::looks()
    }

    async fn run(op: &SetOp, on: &impl Run<Plugin = Chains>) -> Result<Vec<u64>, Error> {
        F::run(op, on).await
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Sets::create(worker, name, placement).await
    }
}

/// Pages in which nothing is checked, in an owner's cache.
struct Unchecked;

impl Model for Unchecked {
    type Plugin = Mixed;
    type Op = u64;
    type Output = u64;
    type State = ();

    const CACHE_BYTES: usize = 1 << 20;

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::Owned]
    }

    fn draw(rng: &mut SmallRng, _state: &()) -> u64 {
        rng.random_range(0..COUNTERS)
    }

    fn apply(_state: &mut (), _op: &u64) -> u64 {
        0
    }

    fn looks() -> Vec<u64> {
        (0..COUNTERS).collect()
    }

    async fn run(&counter: &u64, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        on.execute(&Peek { counter }).await
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Counters::create(worker, name, placement).await
    }
}

/// Counters each of whose answers says that their operation has panicked at a memory server: what the kit makes of that.
struct Panics;

impl Model for Panics {
    type Plugin = Mixed;
    type Op = u64;
    type Output = u64;
    type State = ();

    fn variants() -> Vec<AccessVariant> {
        vec![AccessVariant::Coarse]
    }

    fn draw(rng: &mut SmallRng, state: &()) -> u64 {
        Unchecked::draw(rng, state)
    }

    fn apply(state: &mut (), op: &u64) -> u64 {
        Unchecked::apply(state, op)
    }

    fn looks() -> Vec<u64> {
        Unchecked::looks()
    }

    async fn run(&amount: &u64, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        let why = |error: Error| format!("on an unexpected {error}");
        on.execute(&Add { counter: amount, amount }).await.map_err(|error| Error::Panicked {
            what: "a shipped operation",
            why: why(error),
            may_have_changed: false,
        })
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Counters::create(worker, name, placement).await
    }
}

/// What is said to work over no access.
struct Nowhere;

impl Model for Nowhere {
    type Plugin = Mixed;
    type Op = u64;
    type Output = u64;
    type State = ();

    fn variants() -> Vec<AccessVariant> {
        Vec::new()
    }

    fn draw(rng: &mut SmallRng, state: &()) -> u64 {
        Unchecked::draw(rng, state)
    }

    fn apply(state: &mut (), op: &u64) -> u64 {
        Unchecked::apply(state, op)
    }

    fn looks() -> Vec<u64> {
        Unchecked::looks()
    }

    async fn run(op: &u64, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
        Unchecked::run(op, on).await
    }

    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
        Unchecked::create(worker, name, placement).await
    }
}

mod caught {
    use farlink_tests::conformance;

    use super::{Faulty, InSteps, Loses, NeverSure, Nowhere, Panics, Pins, Unchecked};

    #[test]
    fn that_nothing_is_ever_free_again() {
        let says = "waits, and nobody needs it any more";
        conformance::refuses::<Faulty<Pins>>(says, conformance::reclaim::<Faulty<Pins>>);
    }

    #[test]
    fn that_pages_are_lost() {
        conformance::refuses::<Faulty<Loses>>("leaked: [", conformance::linearizable::<Faulty<Loses>>);
    }

    #[test]
    fn that_hardly_anything_comes_to_something() {
        let says = "have come to anything";
        conformance::refuses::<Faulty<NeverSure>>(says, conformance::faults::<Faulty<NeverSure>>);
    }

    #[test]
    fn that_there_is_no_access() {
        let tests: [fn(); 7] = [
            conformance::model::<Nowhere>,
            conformance::linearizable::<Nowhere>,
            conformance::faults::<Nowhere>,
            conformance::hostile::<Nowhere>,
            conformance::reclaim::<Nowhere>,
            || conformance::processes::<Nowhere>(""),
            conformance::crash::<Nowhere>,
        ];
        for test in tests {
            conformance::refuses::<Unchecked>("over no access", test);
        }
    }

    #[test]
    fn that_the_dead_leave_half_an_operation() {
        // One seed may miss it.
        let seeds = || (0..20).for_each(|_| conformance::crash::<InSteps>());
        conformance::refuses::<InSteps>("neither the state before nor that behind", seeds);
    }

    #[test]
    fn that_pages_are_lost_and_nobody_has_died() {
        // Not every seed has some taken.
        let seeds = || (0..20).for_each(|_| conformance::crash::<Faulty<Loses>>());
        conformance::refuses::<Faulty<Loses>>("pages were nobody's, and nobody died", seeds);
    }

    /// Where requests fail that may be: then they have to be found.
    #[test]
    fn pages_that_may_be_lost_are_found() {
        conformance::faults::<Faulty<Loses>>();
    }

    #[test]
    fn that_an_owner_believes_what_it_reads() {
        // One seed may miss it.
        let seeds = || (0..20).for_each(|_| conformance::hostile::<Unchecked>());
        conformance::refuses::<Unchecked>("index out of bounds", seeds);
    }

    #[test]
    fn that_a_memory_server_panics() {
        conformance::refuses::<Panics>("on an unexpected", conformance::hostile::<Panics>);
    }
}
