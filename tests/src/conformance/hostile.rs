//! Pages that hold anything at all: every operation ends, with an answer or an error, and nothing panics.
//!
//! Words of pages are overwritten: with anything, with links to other pages, with what other pages hold; raw, or *sealed* with
//! a checksum that fits, so that they get past the readers' proof and into the structure's own code. A lock word that names a
//! compute server that lives is left out: to wait for that one is right.
//!
//! Where memory servers carry operations out, their threads meet the damage. A panic there is an error here; an operation of theirs that does
//! not end holds up all others, and the scene's time limit ends the run.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    rc::Rc,
};

use farlink_runtime::{
    error::Error,
    fabric::Liveness,
    lock::{LockState, LockWord, OwnerId},
    messaging::Error as MessagingError,
    one_sided::{OneSided, Proof},
    page::{self, CHECKSUM, HEADER_WORDS, IDENTITY, Identity, LOCK, SizeClass},
    ptr::{Link, RemotePtr},
    worker::{Handle, Worker},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::{AccessVariant, Model, scene::Scene, with_seeds};
use crate::{
    backend::FabricProfile,
    bounded::{self, Bound},
    cluster,
    direct::Direct,
    raw,
};

/// More than a stale page that is looked at a thousand times costs, on any path.
const ENDLESS: Bound = Bound { reads_max: 1_500_000, turns_max: 20_000_000 };
/// Operations before the damage.
const BEFORE: usize = 150;
/// Pages that are damaged one after another, and more of them as long as no operation has met anything; operations after each.
const HARMS: usize = 6;
const HARMS_MAX: usize = 60;
const AFTER: usize = 12;

/// Those over which damaged pages are met.
const AMONG: [AccessVariant; 10] = [
    AccessVariant::OneSided,
    AccessVariant::CachedInner,
    AccessVariant::CachedMapping,
    AccessVariant::Within,
    AccessVariant::Owned,
    AccessVariant::Shipped,
    AccessVariant::Coarse,
    AccessVariant::Hybrid,
    AccessVariant::Adaptive,
    AccessVariant::Strict,
];

/// Every operation on damaged pages ends, over some accesses.
///
/// # Panics
/// If one does not, or panics.
pub fn hostile<M: Model>() {
    with_seeds::<M>("hostile", &AMONG, |variants, seed| {
        variants.iter().for_each(|&variant| run::<M>(variant, seed));
        true
    });
}

fn run<M: Model>(variant: AccessVariant, seed: u64) {
    let scene = Scene::<M>::new(variant, FabricProfile::Fast, seed);
    let context = scene.context.clone();
    let compute = cluster::join_manual(&scene.fabric, seed).unwrap();
    let ending = if variant.ships() { Ending::WithServers } else { Ending::Alone };
    let worker = match ending {
        Ending::WithServers => compute.worker(),
        Ending::Alone => bounded::worker(&compute),
    };
    let worker = worker.unwrap();
    let is_alive = |owner| owner == compute.owner() || scene.fabric.liveness(owner) == Liveness::Alive;
    let (mut rng, mut state) = (SmallRng::seed_from_u64(seed), M::State::default());
    ending.block_on(&worker, async {
        let client = scene.client(false);
        let reached = client.reach(&worker).await.unwrap();
        for _ in 0..BEFORE {
            let op = M::draw(&mut rng, &state);
            M::apply(&mut state, &op);
            M::run(&op, &reached).await.unwrap_or_else(|error| panic!("{context}: {op:?}: {error}"));
        }
        reached.flush().await.unwrap();
    });
    let direct = Direct::new(&scene.fabric, 0).unwrap();
    let pages = || -> Vec<(RemotePtr, SizeClass)> {
        let of = |class| raw::pages_of(&scene.fabric, scene.structure().id, class);
        SizeClass::all().flat_map(|class| of(class).into_iter().map(move |at| (at, class))).collect()
    };
    assert!(!pages().is_empty(), "{context}: no pages");
    let (mut harms, mut met) = (0, 0);
    while harms < HARMS || met == 0 && harms < HARMS_MAX {
        harms += 1;
        // What was owned is not any more.
        ending.block_on(&worker, compute.maintain(&worker)).unwrap();
        // Operations unlink some, and make others.
        let pages = pages();
        if pages.is_empty() {
            break;
        }
        let (harm, (at, before)) = harm(&direct, &pages, &is_alive, &mut rng);
        let context = format!("{context}, {harm}");
        // With a cache of its own: what was cached before the damage would hide it.
        let (client, handle) = (Rc::new(scene.client(false)), Handle::clone(&worker));
        let reach = async move { client.reach(&handle).await.map(Rc::new) };
        let reached = match ending.of(&worker, "to reach it", &context, reach) {
            Ok(reached) => reached,
            // What all need to get to the structure (its map of owners) is whole again, or no operation would run any more.
            Err(_) => {
                direct.write(at, &before).unwrap();
                continue;
            }
        };
        for _ in 0..AFTER {
            let op = M::draw(&mut rng, &state);
            M::apply(&mut state, &op);
            let (before, what) = (worker.counters(), format!("{op:?}"));
            let run = {
                let reached = Rc::clone(&reached);
                async move { M::run(&op, &*reached).await.map(drop) }
            };
            let outcome = ending.of(&worker, &what, &context, run);
            let cost = worker.counters() - before;
            met += usize::from(outcome.is_err() || cost.torn_reads + cost.stale_pages > 0);
        }
        let _ = ending.of(&worker, "to flush", &context, async move { reached.flush().await });
    }
    assert!(met > 0, "{context}: in {harms} damaged pages no operation has met anything");
    let one_sided = OneSided::<M::Plugin>::new(&worker, scene.structure().clone(), Proof::Checksum);
    let check = async move { <M::Plugin as farlink_runtime::access::Plugin>::check(&one_sided).await.map(drop) };
    let _ = ending.of(&worker, "check", &context, check);
}

/// How it is known that something does not end.
#[derive(Debug, Clone, Copy)]
enum Ending {
    /// It takes too many turns.
    Alone,
    /// It takes too long: memory servers have a time of their own.
    WithServers,
}

impl Ending {
    fn block_on<T>(self, worker: &Worker, run: impl Future<Output = T>) -> T {
        match self {
            Self::Alone => bounded::block_on(worker, run),
            Self::WithServers => worker.block_on(run),
        }
    }

    /// Runs something to its end; how that comes does not matter.
    fn of<T: 'static>(
        self,
        worker: &Worker,
        what: &str,
        context: &str,
        run: impl Future<Output = Result<T, Error>> + 'static,
    ) -> Result<T, Error> {
        let run = || match self {
            Self::Alone => bounded::run(worker, ENDLESS, run),
            Self::WithServers => Ok(worker.block_on(run)),
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Err(panic) => {
                println!("{context}: {what} panicked");
                resume_unwind(panic);
            }
            Ok(Err(endless)) => panic!("{context}: {what}: {endless}"),
            Ok(Ok(Err(error @ (Error::Panicked { .. } | Error::Messaging(MessagingError::OutcomeUnknown { .. }))))) => {
                panic!("{context}: {what} at a memory server: {error}")
            }
            Ok(Ok(outcome)) => outcome,
        }
    }
}

/// Damages a page; what was done, and the page with its words before.
fn harm(
    direct: &Direct,
    pages: &[(RemotePtr, SizeClass)],
    is_alive: &impl Fn(OwnerId) -> bool,
    rng: &mut SmallRng,
) -> (String, (RemotePtr, Vec<u64>)) {
    let &(at, class) = pages.choose(rng).expect("there are pages");
    let before = direct.read(at, class.words()).unwrap();
    let mut image = before.clone();
    let sealed = rng.random_ratio(3, 4);
    let mut done = format!("page {at} of {} bytes, sealed: {sealed}", class.bytes());
    for _ in 0..rng.random_range(1..5) {
        let &(other, other_class) = pages.choose(rng).expect("there are pages");
        let word = match rng.random_range(0..7) {
            0 => rng.random(),
            1 => rng.random_range(0..100),
            2 => u64::MAX - rng.random_range(0..5),
            3 => Link::to(other, other_class).word(),
            4 => Link::to(at, class).word(),
            5 => rng.random::<u64>() | 1 << 63,
            _ => direct.read(other, other_class.words()).unwrap()[rng.random_range(0..other_class.words())],
        };
        // The structure's first words are what it relies on most.
        let end = if rng.random() { image.len() } else { image.len().min(HEADER_WORDS + 8) };
        let index = rng.random_range(0..end);
        match index {
            // Of the identity only the level, so that the page still passes for one of the structure's.
            IDENTITY if sealed => {
                let identity = Identity::from_word(image[IDENTITY]);
                let Some(identity) = identity else { continue };
                image[IDENTITY] = Identity { level: word as u8, ..identity }.word();
            }
            0..HEADER_WORDS if sealed => continue,
            _ => image[index] = word,
        }
        done += &format!(", word {index} = {word:#x}");
    }
    let lock = LockWord::from_word(image[LOCK]);
    if sealed {
        image[CHECKSUM] = page::checksum(&image, lock.version());
    } else if matches!(lock.state(), LockState::LockedBy(owner) if is_alive(owner)) {
        image[LOCK] = LockWord::free(lock.version(), None).word();
    }
    direct.write(at, &image).unwrap();
    (done, (at, before))
}
