//! The tests that every structure has to pass, whoever wrote it: a [`Model`] says what the structure is, and
//! [`conformance!`](crate::conformance!) makes tests of it, over every access and every kind of fabric.
//!
//! - *model*: random operations of one worker against a sequential model;
//! - *linearizable*: workers of several compute servers, some of whose operations are dropped in mid-flight;
//! - *faults*: the same while requests fail;
//! - *hostile*: every operation on damaged pages ends, nothing panics, here or at a memory server, and some operation has met the damage;
//! - *reclaim*: operations in rounds take no more memory from round to round, and what a round has freed is free after it;
//! - *processes*: compute servers in processes of their own, over one access with each seed;
//! - *crash*: a compute server dies in the middle of an operation, after some of its requests: others find the state before that
//!   operation or behind it, and go on.
//!
//! After each run the structure's check finds nothing, and no memory is held or lost. What several workers were answered is judged
//! in full: that it is linearizable, or by [`Model::judge`]; where that takes too long to find out, shorter runs have to do.
//!
//! All is drawn from a seed, which is printed: `FARLINK_TEST_SEED` has a run again. `FARLINK_KIT_SECONDS` says how long each
//! of these tests goes on with new seeds (.3 if not set; each is run with one seed at least), `FARLINK_KIT_OPS` how many
//! operations a run of the model has (300), `FARLINK_KIT_ACCESS` over which [`AccessVariant`] alone they run, by its name.
//! `FARLINK_FABRIC=verbs` runs all but *processes* and *crash* on real RDMA. `FARLINK_CRASH_EVERY=1` has *crash* play a death at each request
//! of the operations that it draws; with the seed, and `FARLINK_CRASH_DEATH` as a failed run says it, it plays that one, over each access that is not ruled out.
//!
//! ```no_run
//! use std::collections::BTreeMap;
//! use farlink_runtime::{error::Error, operation::Run, structure::StructurePlacement, worker::Handle};
//! use farlink_tests::{conformance::Model, plugins::mixed::{self, Add, Mixed}};
//! use rand::{RngExt, rngs::SmallRng};
//!
//! struct Counters;
//!
//! impl Model for Counters {
//!     type Plugin = Mixed;
//!     type Op = Add;
//!     type Output = u64;
//!     type State = BTreeMap<u64, u64>;
//!
//!     fn draw(rng: &mut SmallRng, _state: &Self::State) -> Add {
//!         Add { counter: rng.random_range(0..8), amount: rng.random_range(0..10) }
//!     }
//!     fn apply(state: &mut Self::State, op: &Add) -> u64 {
//!         let counter = state.entry(op.counter).or_default();
//!         let before = *counter;
//!         *counter += op.amount;
//!         before
//!     }
//!     fn object(op: &Add) -> Option<u64> {
//!         Some(op.counter)
//!     }
//!     fn looks() -> Vec<Add> {
//!         (0..8).map(|counter| Add { counter, amount: 0 }).collect()
//!     }
//!     async fn run(op: &Add, on: &impl Run<Plugin = Mixed>) -> Result<u64, Error> {
//!         on.execute(op).await
//!     }
//!     async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error> {
//!         mixed::create(worker, name, placement).await.map(drop)
//!     }
//! }
//!
//! farlink_tests::conformance!(Counters);
//! ```

mod crash;
mod hostile;
mod many;
mod processes;
mod reclaim;
mod scene;
pub mod search;
mod sequence;
mod variants;

use std::{
    fmt::Debug,
    hash::Hash,
    panic::{AssertUnwindSafe, catch_unwind},
    time::{Duration, Instant},
};

use farlink_runtime::{
    access::Plugin, error::Error, operation::Run, structure::StructurePlacement, wire::Wire, worker::Handle,
};
use rand::rngs::SmallRng;

pub use self::{
    crash::crash,
    hostile::hostile,
    many::{faults, linearizable, until_decided},
    processes::{child, processes},
    reclaim::reclaim,
    search::{Event, EventOf, LOOKER, Verdict, linearize},
    sequence::model,
    variants::AccessVariant,
};
use crate::{deadlines::PATIENCE, settings};

/// What a structure is to those who use it.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait Model: 'static {
    /// The structure.
    type Plugin: Plugin;
    /// Any of its operations.
    type Op: Clone + Debug + Send + Sync + 'static;
    /// What an operation answers. It goes from process to process as words.
    type Output: Clone + PartialEq + Debug + Wire + Send + 'static;
    /// What the operations so far have made of it. Empty at first. Equal states behave alike.
    type State: Default + Clone + Eq + Hash;

    /// The memory of a compute server's cache, in bytes. Pages beyond 4 KiB take 1 MiB.
    const CACHE_BYTES: usize = 128 << 10;

    /// About how many pages of the root's size a cache keeps in half of the runs, so that pages come and go: fewer than the structure has once it
    /// is [filled](Model::fill), and as many as four operations hold. A cache makes room for pages of one size in blocks of 4 KiB and their
    /// frames: where pages have other sizes than the root's, each of these takes a block at least, so 4 roots of 2 KiB leave no room for
    /// buckets of 256 B (`CacheError::NoRoom`). 0: there are no such runs, and no page ever leaves a cache.
    const CACHED_PAGES: usize = 0;

    /// The memory of a mapping cache in half of the runs, in bytes, so that what it remembers comes and goes: there is a value for each 512 of
    /// them at most. 0: it is always `CACHE_BYTES`.
    const SMALL_MAPPING_BYTES: usize = 0;

    /// Whether an operation that fails with its fabric may leave pages behind that nobody reaches: one without locks, of which
    /// nobody can say what became (`Error::InstallUnknown`). They have to be found by `leaks::free`, which asks
    /// [`Plugin::is_leaked`].
    const MAY_LOSE_PAGES: bool = false;

    /// Whether a compute server that dies in an operation may leave such pages: as a rule, wherever installs publish pages, which are not
    /// recorded.
    const DEATHS_LOSE_PAGES: bool = Self::MAY_LOSE_PAGES;

    /// The accesses over which it works; one at least.
    fn variants() -> Vec<AccessVariant> {
        AccessVariant::ALL.to_vec()
    }

    /// An operation. In the long run it keeps the state from growing.
    fn draw(rng: &mut SmallRng, state: &Self::State) -> Self::Op;

    /// What an operation does to the state, and answers.
    fn apply(state: &mut Self::State, op: &Self::Op) -> Self::Output;

    /// What of the state an operation is about, if it is about a part that operations on others neither change nor see:
    /// a key. Whether operations are linearizable is then asked of each part by itself, which is far less work. `None`: all.
    /// If one operation is about all, all are.
    fn object(_op: &Self::Op) -> Option<u64> {
        None
    }

    /// Whether an operation is part of the history whose linearizability is asked for. One that promises less is judged by
    /// [`Model::judge`], and by the model where it is alone.
    fn is_linearizable(_op: &Self::Op) -> bool {
        true
    }

    /// Operations that come first in half of the runs, those with [few cached pages](Model::CACHED_PAGES) among them: they make the
    /// structure larger than what is drawn does.
    fn fill() -> Vec<Self::Op> {
        Vec::new()
    }

    /// Operations that together show all of the state, and change nothing: what was lost in the end, and an attempt that ends
    /// behind an effect, are found by them.
    fn looks() -> Vec<Self::Op>;

    /// Runs an operation.
    ///
    /// # Errors
    /// What it failed with.
    async fn run(op: &Self::Op, on: &impl Run<Plugin = Self::Plugin>) -> Result<Self::Output, Error>;

    /// Makes an empty structure with pages as small as it can have.
    ///
    /// # Errors
    /// As [`catalog::create`](farlink_runtime::catalog::create).
    async fn create(worker: &Handle, name: &str, placement: StructurePlacement) -> Result<(), Error>;

    /// What else has to be true of a history: to be written where operations promise less than to be linearizable. The worker of
    /// the [looks](Model::looks), which come last, and of what [fills](Model::fill) the structure, which comes first, is [`LOOKER`].
    ///
    /// # Errors
    /// What is not.
    fn judge(history: &[Event<Self::Op, Self::Output>]) -> Result<(), String> {
        match history.iter().find(|event| !Self::is_linearizable(&event.op)) {
            None => Ok(()),
            Some(Event { op, .. }) => {
                Err(format!("nobody judges {op:?}: it is not linearizable, and Model::judge is not written"))
            }
        }
    }
}

/// The tests of a [`Model`](crate::conformance::Model), in a module `conformance`, or in one of another name:
/// `conformance!(counters: Counters)`.
#[macro_export]
macro_rules! conformance {
    ($model:ty) => {
        $crate::conformance!(conformance: $model);
    };
    ($module:ident: $model:ty) => {
        mod $module {
            #[allow(unused_imports, reason = "the model may be named by its path")]
            use super::*;

            #[test]
            fn model() {
                $crate::conformance::model::<$model>();
            }
            #[test]
            fn linearizable() {
                $crate::conformance::linearizable::<$model>();
            }
            #[test]
            fn faults() {
                $crate::conformance::faults::<$model>();
            }
            #[test]
            fn hostile() {
                $crate::conformance::hostile::<$model>();
            }
            #[test]
            fn reclaim() {
                $crate::conformance::reclaim::<$model>();
            }
            #[test]
            fn processes() {
                $crate::conformance::processes::<$model>(concat!(module_path!(), "::child"));
            }
            #[test]
            fn crash() {
                $crate::conformance::crash::<$model>();
            }
            /// The other side of `processes`; nothing otherwise.
            #[test]
            fn child() {
                $crate::conformance::child::<$model>();
            }
        }
    };
}

/// The accesses of a run.
fn variants<M: Model>() -> Vec<AccessVariant> {
    let name: String = settings::from_env("FARLINK_KIT_ACCESS", String::new());
    let is_known = AccessVariant::ALL.iter().any(|variant| name == format!("{variant:?}"));
    assert!(name.is_empty() || is_known, "FARLINK_KIT_ACCESS={name:?} is none of {:?}", AccessVariant::ALL);
    let mut variants = M::variants();
    assert!(!variants.is_empty(), "{} is said to work over no access: nothing would be tested", M::Plugin::NAME);
    variants.retain(|variant| name.is_empty() || name == format!("{variant:?}"));
    variants
}

/// Runs `case` over the accesses of a run that are among these, if there are any: with one seed after another for the time that a test
/// has, and then, for a while, until it says that all has happened that it is about. What it prints last is the seed of what failed.
fn with_seeds<M: Model>(test: &str, among: &[AccessVariant], mut case: impl FnMut(&[AccessVariant], u64) -> bool) {
    let mut variants = variants::<M>();
    variants.retain(|variant| among.contains(variant));
    if variants.is_empty() {
        return println!("{test} of {}: skipped: it is not for these accesses", M::Plugin::NAME);
    }
    let limit = Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 0.3));
    let (begun, first) = (Instant::now(), settings::from_env("FARLINK_TEST_SEED", rand::random::<u64>()));
    for number in 0.. {
        let seed = first.wrapping_add(number);
        println!("{test}: FARLINK_TEST_SEED={seed}");
        let has_happened = case(&variants, seed);
        let taken = begun.elapsed();
        // Some of it happens with every second seed alone.
        let is_late = taken >= limit + PATIENCE && number > 0;
        if taken >= limit && (has_happened || is_late) {
            break;
        }
    }
}

/// That a test of the kit finds what is wrong with a structure, and says this of it; unless `FARLINK_KIT_ACCESS` leaves nothing to test.
///
/// # Panics
/// If it does not find it.
pub fn refuses<M: Model>(says: &str, test: impl FnOnce()) {
    if variants::<M>().is_empty() {
        return println!("skipped: {} is not for this access", M::Plugin::NAME);
    }
    let panic = catch_unwind(AssertUnwindSafe(test)).expect_err("what is wrong was not found");
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
    assert!(text.is_some_and(|text| text.contains(says)), "not {says:?}: {text:?}");
}
