//! Workers of several compute servers at the same time.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering, fence},
    },
    time::{Duration, Instant},
};

use farlink_runtime::{
    access::Structure,
    compute::ComputeServer,
    error::Error,
    fabric::{Fabric, faulty},
    worker::{Handle, Worker},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use serde::{Deserialize, Serialize};

use super::{
    AccessVariant, Event, LOOKER, Model,
    scene::{self, Scene, profiles},
    search::EventOf,
    variants::{Accessed, Client, caches_little, first},
    with_seeds,
};
use crate::{
    backend::{FabricProfile, Fate, Faults},
    cluster,
    drive::{is_the_fabrics, polled},
    history::now_ns,
};

/// Operations of a worker: fewer from one history to the next, until it is found out whether one is as it has to be.
const OPS: [usize; 4] = [50, 25, 10, 4];
/// Operations that a worker has in flight.
const IN_FLIGHT: usize = 2;
/// Where operations are dropped in mid-flight, one in so many is.
const DROPPED_ONE_IN: u32 = 20;
/// Where requests fail, one in so many does.
const FAULTS_ONE_IN: u32 = 200;
/// Of so many operations half have to come to something: of fewer, more may have failed by chance.
const SHOWING: usize = 100;
const WORKERS: usize = 2;
const BEGIN_LIMIT: Duration = Duration::from_millis(500);

/// Histories of several workers are linearizable, over every access and kind of fabric. On a nasty fabric, some operations are
/// dropped in mid-flight.
///
/// # Panics
/// If one is not, or the structure is not clean behind it; if no part of what is owned has moved, or nothing has left a cache that keeps little.
pub fn linearizable<M: Model>() {
    let (seen, mut is_moved, mut has_left, mut is_forgotten) = (Seen::default(), true, true, true);
    with_seeds::<M>("linearizable", &AccessVariant::ALL, |variants, seed| {
        for profile in profiles() {
            run::<M>(variants, profile, seed, profile == FabricProfile::Nasty, &seen);
        }
        is_moved = seen.moves.get() > 0 || !variants.contains(&AccessVariant::Routed);
        // Those that fetch whatever they miss.
        let all = [AccessVariant::Owned, AccessVariant::NeverShipped, AccessVariant::Routed];
        let caches_little = |seed| all.iter().any(|all| variants.contains(all) && caches_little::<M>(*all, seed));
        has_left = seen.evictions.get() > 0 || !(caches_little(0) || caches_little(1));
        let remembers = variants.contains(&AccessVariant::CachedMapping) && M::SMALL_MAPPING_BYTES > 0;
        is_forgotten = seen.forgotten.get() > 0 || !remembers;
        is_moved && has_left && is_forgotten
    });
    assert!(is_moved, "nothing has moved between owners");
    assert!(
        is_forgotten,
        "nothing has left a mapping cache: Model::fill makes too little, or Model::SMALL_MAPPING_BYTES are too many"
    );
    assert!(has_left, "no page has left a cache: Model::fill makes too few, or Model::CACHED_PAGES are too many");
}

/// What has happened in several runs.
#[derive(Debug, Default)]
struct Seen {
    /// Between owners.
    moves: Cell<u64>,
    /// Of pages.
    evictions: Cell<u64>,
    /// Of what a mapping cache has remembered.
    forgotten: Cell<u64>,
}

/// [`linearizable`] where requests fail.
///
/// # Panics
/// As [`linearizable`]; if hardly any operation has come to anything, or no request has failed.
pub fn faults<M: Model>() {
    let (breaks_before, mut has_failed) = (faulty::breaks(), true);
    with_seeds::<M>("faults", &AccessVariant::ALL, |variants, seed| {
        // Large structures have odd seeds.
        let fate = Fate::ALL[(seed / 2 % 4) as usize];
        let faults = Faults { seed, one_in: FAULTS_ONE_IN, fate, is_weak: seed / 8 % 2 == 0 };
        run::<M>(variants, FabricProfile::Faulty(faults), seed, seed % 3 == 0, &Seen::default());
        has_failed = faulty::breaks() > breaks_before;
        has_failed
    });
    assert!(has_failed, "nothing has failed");
}

fn run<M: Model>(variants: &[AccessVariant], profile: FabricProfile, seed: u64, drops: bool, seen: &Seen) {
    for &variant in variants {
        until_decided(|ops| of_variant::<M>(variant, profile, seed, drops, ops, seen));
    }
}

/// Has histories made of so many operations of each worker, until it is found out of one that all is well. Of a wrong one that takes
/// longest, so none may be left at that.
///
/// # Panics
/// If it is found out of none.
pub fn until_decided(mut is_decided: impl FnMut(usize) -> bool) {
    let tries = OPS.into_iter().position(&mut is_decided);
    let tries =
        tries.expect("however short a history is, there are too many orders to find out whether it is linearizable");
    if tries > 0 {
        println!("decided: 1 of {} histories", tries + 1);
    }
}

/// Whether it was found out that all is well.
fn of_variant<M: Model>(
    variant: AccessVariant,
    profile: FabricProfile,
    seed: u64,
    drops: bool,
    ops: usize,
    seen: &Seen,
) -> bool {
    let scene = Scene::<M>::new(variant, profile, seed);
    let context = &scene.context;
    let computes = variant.computes();
    let common = Common::of(computes * WORKERS);
    let filled = fill::<M>(&scene.sound_fabric(), scene.structure(), &scene.context, seed);
    let clients: Vec<_> = (0..computes).map(|_| scene.client(false)).collect();
    let joined: Vec<_> = (0..computes).map(|compute| cluster::join(&scene.fabric, seed + compute as u64)).collect();
    let joined: Vec<_> = joined.into_iter().map(|compute| Arc::new(compute.unwrap())).collect();
    let serve = |(number, client): (usize, &Client<M>)| client.serve(&joined[number], number == 0).unwrap();
    let servers: Vec<_> = clients.iter().enumerate().map(serve).collect();
    let done = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..computes * WORKERS {
            let plan = Plan { number, seed, ops, drops, faulty: profile.faults().is_some() };
            let (compute, client, common) = (&joined[number / WORKERS], &clients[number / WORKERS], &common);
            threads.push(scope.spawn(move || work::<M>(compute, client, plan, common)));
        }
        // Each says itself what went wrong.
        let all = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| panic!("{context}: see above")));
        all.flatten().map(|(_, event)| event).collect::<Vec<_>>()
    });
    if profile.faults().is_some() {
        require_known(&done, context);
    }
    let mut history = [filled, done].concat();
    seen.moves.set(clients.iter().map(Client::moves).sum::<u64>() + seen.moves.get());
    let evictions = if variant == AccessVariant::CachedMapping { &seen.forgotten } else { &seen.evictions };
    evictions.set(clients.iter().map(Client::evictions).sum::<u64>() + evictions.get());
    for (compute, client) in joined.iter().zip(&clients) {
        client.leave(compute).unwrap_or_else(|error| panic!("{context}: {error}"));
    }
    // Threads that use the caches and the compute servers go first.
    drop(servers);
    drop((joined, clients));
    history.extend(look::<M>(&scene));
    let decided = scene::judge::<M>(&history, context);
    scene.close(M::MAY_LOSE_PAGES && profile.faults().is_some());
    decided
}

/// That a fabric which fails now and then has operations come to something: of those that do not, nothing is asked.
fn require_known<O, R>(history: &[Event<O, R>], context: &str) {
    let (all, known) = (history.len(), history.iter().filter(|event| event.outcome.is_some()).count());
    assert!(known >= all / 2 || all < SHOWING, "{context}: of {all} operations {known} have come to anything");
}

/// What the workers of a run have in common.
#[derive(Debug)]
pub(super) struct Common {
    missing: AtomicUsize,
}

impl Common {
    /// Of so many workers.
    pub(super) fn of(workers: usize) -> Self {
        Self { missing: AtomicUsize::new(workers) }
    }

    /// They wait for each other, for a moment: one of them may have failed.
    fn wait(&self) {
        let begun = Instant::now();
        self.missing.fetch_sub(1, Ordering::AcqRel);
        while self.missing.load(Ordering::Acquire) > 0 && begun.elapsed() < BEGIN_LIMIT {
            std::thread::yield_now();
        }
    }
}

/// An operation with its number among its worker's.
pub(super) type Numbered<M> = (usize, EventOf<M>);

/// What a worker does.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Plan {
    pub(super) number: usize,
    pub(super) seed: u64,
    pub(super) ops: usize,
    pub(super) drops: bool,
    pub(super) faulty: bool,
}

/// The operations of a worker: the same for one plan.
pub(super) fn ops_of<M: Model>(Plan { number, seed, ops, .. }: Plan) -> Vec<M::Op> {
    let mut rng = SmallRng::seed_from_u64(seed ^ ((number as u64 + 1) << 32));
    let mut state = M::State::default();
    let draw = |_| {
        let op = M::draw(&mut rng, &state);
        M::apply(&mut state, &op);
        op
    };
    (0..ops).map(draw).collect()
}

/// Runs a worker's operations, several at a time; each with its number.
pub(super) fn work<M: Model>(
    compute: &ComputeServer,
    client: &Client<M>,
    plan: Plan,
    common: &Common,
) -> Vec<Numbered<M>> {
    let worker = cluster::again(|| compute.worker()).unwrap();
    let reached = Rc::new(cluster::again(|| worker.block_on(client.reach(&worker))).unwrap());
    let all = Rc::new(RefCell::new(Vec::new()));
    let ops = Rc::new(RefCell::new(ops_of::<M>(plan).into_iter().enumerate()));
    common.wait();
    let task = |_| {
        let (worker, reached, all, ops) = (Handle::clone(&worker), Rc::clone(&reached), all.clone(), ops.clone());
        async move {
            loop {
                let Some((index, op)) = ops.borrow_mut().next() else { break };
                let event = one::<M>(&worker, &reached, op, plan).await;
                all.borrow_mut().push((index, event));
            }
        }
    };
    let tasks: Vec<_> = (0..IN_FLIGHT).map(task).map(|task| worker.spawn(task)).collect();
    worker.block_on(async {
        for task in tasks {
            task.await;
        }
    });
    drop((reached, worker));
    all.take()
}

async fn one<M: Model>(worker: &Handle, reached: &Accessed<M::Plugin>, op: M::Op, plan: Plan) -> EventOf<M> {
    let drops = plan.drops && worker.random(|rng| rng.random_ratio(1, DROPPED_ONE_IN));
    let begin_ns = now_ns();
    fence(Ordering::SeqCst);
    let outcome = match drops {
        true => polled(worker.random(|rng| rng.random_range(1..20)), M::run(&op, reached)).await,
        false => Some(M::run(&op, reached).await),
    };
    fence(Ordering::SeqCst);
    let outcome = match outcome {
        Some(Ok(output)) => Some(output),
        None => None,
        Some(Err(error)) if plan.faulty && is_the_fabrics(&error) => None,
        Some(Err(error)) => panic!("{} over {reached:?}, {plan:?}: {op:?} failed: {error}", plan.seed),
    };
    let end_ns = if outcome.is_some() { now_ns() } else { u64::MAX };
    Event { worker: plan.number, op, outcome, begin_ns, end_ns }
}

/// Makes the structure large, if this is a run of that kind.
pub(super) fn fill<M: Model>(
    fabric: &Arc<dyn Fabric>,
    structure: &Structure,
    context: &str,
    seed: u64,
) -> Vec<EventOf<M>> {
    one_by_one::<M>(fabric, structure, context, first::<M>(seed))
}

/// What is there in the end, as one more worker sees it.
fn look<M: Model>(scene: &Scene<M>) -> Vec<EventOf<M>> {
    look_by::<M>(&scene.sound_fabric(), scene.structure(), &scene.context)
}

/// What is there, one-sided.
pub(super) fn look_by<M: Model>(fabric: &Arc<dyn Fabric>, structure: &Structure, context: &str) -> Vec<EventOf<M>> {
    one_by_one::<M>(fabric, structure, context, M::looks())
}

/// Operations by somebody else, one-sided, one after the other.
fn one_by_one<M: Model>(
    fabric: &Arc<dyn Fabric>,
    structure: &Structure,
    context: &str,
    ops: Vec<M::Op>,
) -> Vec<EventOf<M>> {
    if ops.is_empty() {
        return Vec::new();
    }
    let see = |worker: &Worker| {
        let client = Client::<M>::new(structure.clone(), AccessVariant::OneSided, None, 0, false)?;
        let reached = worker.block_on(client.reach(worker))?;
        let mut events = Vec::new();
        for op in &ops {
            let begin_ns = now_ns();
            let outcome = Some(worker.block_on(M::run(op, &reached))?);
            events.push(Event { worker: LOOKER, op: op.clone(), outcome, begin_ns, end_ns: now_ns() });
        }
        Ok(events)
    };
    let seen: Result<_, Error> = cluster::with_worker(fabric, see);
    seen.unwrap_or_else(|error| panic!("{context}: {error}"))
}
