//! Ordered maps through tiny caches of every kind beside a `BTreeMap`; and, with only inner pages cached, beside one that another
//! compute server changes as well, so that what is cached is old in every way that there is.

use farlink_offload::Admission;
use farlink_runtime::one_sided::Proof;
use farlink_structures::{btree::Tree, map::KeyRange, skiplist::List};
use farlink_tests::{backend::FabricProfile, settings, subject::Subject};
use proptest::{prelude::*, test_runner::RngSeed};

use crate::{
    scene::{
        CACHE_BYTES_ALL, CACHE_BYTES_MIN, MemberOf, assert_left_clean, cache_of, difference, fabric_of, settle, sparse,
    },
    steps::{NEVER, Step, step, take},
};

fn cases(default: u32) -> ProptestConfig {
    ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", default),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(settings::seed("models")),
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    }
}

fn admission() -> impl Strategy<Value = Admission> {
    prop_oneof![
        Just(Admission::Always),
        Just(Admission::Frequency),
        Just(Admission::Probability { leaf: 0.1, inner: 1.0 }),
        Just(Admission::Probability { leaf: 0.0, inner: 0.5 }),
        // Nothing but the root gets in: all are bypass pages.
        Just(Admission::Probability { leaf: 0.0, inner: 0.0 }),
    ]
}

#[derive(Debug, Clone)]
enum Owned {
    Step(Step),
    Flush,
    FlushRegion(u64, u64),
    /// Another worker of the same compute server goes on.
    Switch,
}

fn owned() -> impl Strategy<Value = Owned> {
    prop_oneof![
        30 => step().prop_map(Owned::Step),
        1 => Just(Owned::Flush),
        1 => (0u64..30_000, 1u64..9000).prop_map(|(low, count)| Owned::FlushRegion(low, low + count)),
        2 => Just(Owned::Switch),
    ]
}

#[derive(Debug, Clone)]
enum Sharing {
    Mine(Step),
    Theirs(Step),
    /// The other one removes everything, so that the root is a leaf again.
    Clear,
    /// The other one fills the tree, so that the root grows.
    Fill(u64),
    /// Retired pages become free, and are used again.
    Maintain,
}

fn sharing() -> impl Strategy<Value = Sharing> {
    prop_oneof![
        20 => step().prop_map(Sharing::Mine),
        20 => step().prop_map(Sharing::Theirs),
        1 => Just(Sharing::Clear),
        1 => (200u64..2000).prop_map(Sharing::Fill),
        3 => Just(Sharing::Maintain),
    ]
}

fn an_owned_map_is_a_map<S: Subject>(
    steps: &[Owned],
    admission: Admission,
    loaded: u64,
    fill: f64,
    nasty: bool,
) -> Result<(), TestCaseError> {
    let mut model = sparse(loaded);
    let fabric = fabric_of::<S>(if nasty { FabricProfile::Nasty } else { FabricProfile::Fast }, 256, &model, fill);
    let first = MemberOf::<S>::join(&fabric, 1);
    let second = first.colleague();
    let cache = cache_of::<S>(CACHE_BYTES_MIN, admission);
    let trees = [first.own(&cache, KeyRange::ALL), second.own(&cache, KeyRange::ALL)];
    let mut at = 0;
    for step in steps {
        let (tree, worker) = (&trees[at], [&first.worker, &second.worker][at]);
        match step {
            Owned::Step(step) => {
                worker.block_on(take(tree, &mut model, step, NEVER)).map_err(TestCaseError::fail)?;
            }
            Owned::Flush => {
                worker.block_on(tree.access().flush()).unwrap();
                let there = first.entries();
                prop_assert!(there == model, "flushed: {}", difference(&there, &model));
            }
            Owned::FlushRegion(low, high) => {
                let region = KeyRange { low: *low, high: Some(*high) };
                worker.block_on(tree.access().flush_region(&region)).unwrap();
            }
            Owned::Switch => at = 1 - at,
        }
    }
    first.worker.block_on(trees[0].access().flush()).unwrap();
    let memory = cache.memory();
    prop_assert!(memory.used() <= memory.limit, "{memory:?}");
    drop((trees, second, first));
    assert_left_clean(&fabric, &model, "owned");
    Ok(())
}

fn a_shared_map_is_a_map_however_old_the_cache<S: Subject>(
    steps: &[Sharing],
    admission: Admission,
    loaded: u64,
    fill: f64,
    three_waits: bool,
    is_tiny: bool,
) -> Result<(), TestCaseError> {
    let mut model = sparse(loaded);
    let fabric = fabric_of::<S>(FabricProfile::Fast, 256, &model, fill);
    let (me, other) = (MemberOf::<S>::join(&fabric, 1), MemberOf::<S>::join(&fabric, 2));
    let proof = if three_waits { Proof::LockBodyLock } else { Proof::Checksum };
    let tree = me.share(&cache_of::<S>(if is_tiny { CACHE_BYTES_MIN } else { CACHE_BYTES_ALL }, admission), proof);
    for step in steps {
        match step {
            Sharing::Mine(step) => {
                me.worker.block_on(take(&tree, &mut model, step, NEVER)).map_err(TestCaseError::fail)?;
            }
            Sharing::Theirs(step) => {
                let taken = other.worker.block_on(take(&other.tree, &mut model, step, NEVER));
                taken.map_err(TestCaseError::fail)?;
            }
            Sharing::Clear | Sharing::Fill(_) => {
                let step = match step {
                    Sharing::Fill(count) => Step::InsertRun(7, *count),
                    _ => Step::RemoveRun(0, u64::MAX),
                };
                let taken = other.worker.block_on(take(&other.tree, &mut model, &step, NEVER));
                taken.map_err(TestCaseError::fail)?;
            }
            Sharing::Maintain => settle([&me, &other]),
        }
    }
    let seen = me.worker.block_on(tree.range(..).take(usize::MAX)).unwrap().into_iter().collect();
    prop_assert!(seen == model, "{}", difference(&seen, &model));
    settle([&me, &other]);
    drop((tree, me, other));
    assert_left_clean(&fabric, &model, "shared");
    Ok(())
}

/// The walks on one structure.
macro_rules! walks {
    ($($module:ident: $structure:ty),+) => {$(
        mod $module {
            use super::*;

            proptest! {
                #![proptest_config(cases(8))]

                #[test]
                fn an_owned_one_is_a_map(
                    steps in prop::collection::vec(owned(), 1..250),
                    admission in admission(),
                    loaded in prop_oneof![1 => Just(0u64), 4 => 1500u64..3000],
                    fill in 0.3f64..1.0,
                    nasty: bool,
                ) {
                    an_owned_map_is_a_map::<$structure>(&steps, admission, loaded, fill, nasty)?;
                }

                #[test]
                fn a_shared_one_is_a_map_however_old_the_cache(
                    steps in prop::collection::vec(sharing(), 1..250),
                    admission in admission(),
                    loaded in prop_oneof![1 => Just(0u64), 4 => 500u64..3000],
                    fill in 0.3f64..1.0,
                    three_waits: bool,
                    is_tiny: bool,
                ) {
                    a_shared_map_is_a_map_however_old_the_cache::<$structure>(
                        &steps, admission, loaded, fill, three_waits, is_tiny,
                    )?;
                }
            }

            #[test]
            fn a_cache_that_is_old_in_every_way() {
                super::a_cache_that_is_old_in_every_way::<$structure>();
            }
        }
    )+};
}

walks!(btree: Tree, skiplist: List);

/// One after the other: what a random walk may miss.
fn a_cache_that_is_old_in_every_way<S: Subject>() {
    let model = sparse(3000);
    let fabric = fabric_of::<S>(FabricProfile::Fast, 256, &model, 0.9);
    let (me, other) = (MemberOf::<S>::join(&fabric, 1), MemberOf::<S>::join(&fabric, 2));
    let tree = me.share(&cache_of::<S>(CACHE_BYTES_ALL, Admission::Always), Proof::Checksum);
    let (mut model, mut sees) = (model, 0);
    let mut see = |model: &crate::scene::Map, what: &str| {
        for key in (0..30_010).step_by(7).chain([u64::MAX]) {
            let found = me.worker.block_on(tree.get(key)).unwrap();
            assert_eq!(found, model.get(&key).copied(), "{what}: key {key}");
        }
        let stale = me.worker.counters().stale_pages + me.worker.counters().restarts;
        let news = stale - std::mem::replace(&mut sees, stale);
        println!("{what}: {news} restarts");
        news
    };
    see(&model, "loaded");
    let rounds = [
        ("splits", Step::InsertRun(9000, 2000)),
        ("merges", Step::RemoveRun(8000, 9000)),
        ("collapse", Step::RemoveRun(0, u64::MAX)),
        ("growth", Step::InsertRun(0, 30_000)),
        ("and again", Step::RemoveRun(1, u64::MAX)),
        ("reuse", Step::InsertRun(10_000, 9000)),
    ];
    let mut restarts = 0;
    for (what, step) in rounds {
        other.worker.block_on(take(&other.tree, &mut model, &step, NEVER)).unwrap();
        settle([&me, &other]);
        restarts += see(&model, what);
    }
    assert!(restarts > 0, "nothing was old: the test has not tested it");
    settle([&me, &other]);
    drop((tree, me, other));
    assert_left_clean(&fabric, &model, "old in every way");
}

/// There is nothing to return of what has been passed when an old page shows: all the same it must not be passed again.
#[test]
fn ranges_without_entries_get_past_old_pages() {
    for descending in [false, true] {
        let mut model = sparse(3000);
        let fabric = fabric_of::<Tree>(FabricProfile::Fast, 256, &model, 0.9);
        let (me, other) = (MemberOf::<Tree>::join(&fabric, 1), MemberOf::<Tree>::join(&fabric, 2));
        let tree = me.share(&cache_of::<Tree>(CACHE_BYTES_ALL, Admission::Always), Proof::Checksum);
        let range = |from, to| {
            let range = tree.range(from..to);
            let range = if descending { range.descending() } else { range };
            me.worker.block_on(range.take(usize::MAX)).unwrap()
        };
        assert_eq!(range(0, 30_000).len(), model.len());
        let removed = Step::RemoveRun(2000, 26_000);
        other.worker.block_on(take(&other.tree, &mut model, &removed, NEVER)).unwrap();
        settle([&me, &other]);
        assert_eq!(model.range(2000..28_000).count(), 0);
        assert_eq!(range(5000, 25_000), []);
        assert_eq!(range(0, 30_000).len(), model.len());
        let counters = me.worker.counters();
        assert!(counters.stale_pages + counters.restarts > 0, "nothing was old: the test has not tested it");
        settle([&me, &other]);
        drop((tree, me, other));
        assert_left_clean(&fabric, &model, "ranges");
    }
}
