//! Remote memory that holds anything at all, read through a cache: before it is cached, and while it is.

use farlink_offload::{Admission, CacheOptions, ComputeCache};
use farlink_runtime::{
    error::Error,
    one_sided::{OneSided, Proof},
    page::{CHECKSUM, IDENTITY, LOCK, SELF},
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::{KeyRange, Map},
    skiplist::List,
};
use farlink_tests::{
    bounded::{self, Watchdog},
    raw,
    subject::Subject,
};
use proptest::prelude::*;

use crate::{
    cases,
    damage::{Damage, ENDLESS, KEYS, LIMIT, Scene, SceneOf, TREE, to_pages},
};

pub(crate) fn cache_of<S: Subject>(admission: Admission) -> ComputeCache<S> {
    let mut options = CacheOptions::new(64 << 10);
    (options.page_bytes, options.admission) = (S::page_bytes(256), admission);
    ComputeCache::<S>::new(options).unwrap()
}

fn admission() -> impl Strategy<Value = Admission> {
    prop_oneof![
        Just(Admission::Always),
        Just(Admission::Frequency),
        Just(Admission::Probability { leaf: 0.1, inner: 0.5 })
    ]
}

struct Way {
    admission: Admission,
    owned: bool,
    half: bool,
    warm: bool,
}

fn every_operation_ends_in_a_cache<S: Subject>(
    harm: &[Damage],
    later: &[Damage],
    keys: &[u64],
    way: &Way,
) -> Result<(), TestCaseError> {
    let _watchdog = Watchdog::start("damaged pages in a cache", LIMIT);
    let scene = SceneOf::<S>::new(1);
    let map =
        bounded::block_on(&scene.worker, Map::<S, OneSided<S>>::open(&scene.worker, TREE, Proof::Checksum)).unwrap();
    let structure = map.structure().clone();
    let cut = bounded::block_on(&scene.worker, map.leaf_low(KEYS / 2)).unwrap();
    let cache = cache_of::<S>(way.admission);
    let harmed = |harm: &[Damage]| -> Vec<u64> {
        harm.iter().filter_map(|damage| scene.do_harm(damage)).chain(keys.iter().copied()).collect()
    };
    if way.owned {
        let half = KeyRange { low: 0, high: way.half.then_some(cut) };
        let region = if S::can_own(&half) { half } else { KeyRange::ALL };
        let owned = cache.own(&scene.worker, structure, region);
        let cached = Map::<S, _>::over(bounded::block_on(&scene.worker, owned).unwrap());
        if way.warm {
            let _ = bounded::block_on(&scene.worker, cached.range(..cut).take(usize::MAX));
        }
        scene.all_operations(&cached, &harmed(harm))?;
        scene.all_operations(&cached, &harmed(later))?;
        scene.ends("flush", {
            let cached = cached.clone();
            async move |_| cached.access().flush().await
        })?;
        scene.all_operations(&cached, keys)?;
    } else {
        let cached = Map::<S, _>::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
        if way.warm {
            bounded::block_on(&scene.worker, cached.range(..).take(usize::MAX)).unwrap();
        }
        scene.all_operations(&cached, &harmed(harm))?;
        scene.all_operations(&cached, &harmed(later))?;
    }
    scene.all_operations(&map, keys)?;
    scene.check(&map)?;
    scene.maintain()
}

proptest! {
    #![proptest_config(cases(6))]

    #[test]
    fn every_operation_ends_in_a_cache_of_a_damaged_structure(
        harm in prop::collection::vec(to_pages(), 1..6),
        later in prop::collection::vec(to_pages(), 0..4),
        keys in prop::collection::vec(0..KEYS + 20, 3),
        admission in admission(),
        owned: bool,
        half: bool,
        warm: bool,
    ) {
        let way = Way { admission, owned, half, warm };
        every_operation_ends_in_a_cache::<Tree>(&harm, &later, &keys, &way)?;
        every_operation_ends_in_a_cache::<List>(&harm, &later, &keys, &way)?;
    }
}

/// A page that is damaged after it was cached is met where its lock is wanted: that ends, too, and names it.
#[test]
fn damage_below_a_cached_copy_is_named() {
    let _watchdog = Watchdog::start("damage below a cached copy", LIMIT);
    // What a tree merges behind a removal it leaves, if that fails. A list changes cached nodes with each.
    harm_cached_copies::<Tree>();
    assert!(harm_cached_copies::<List>() > 0, "no change has met a page that was damaged");
}

/// Damages each tenth inner page of a structure that is cached, and removes all keys; how often that was named.
fn harm_cached_copies<S: Subject>() -> usize {
    let mut named = 0;
    let count = SceneOf::<S>::new(1).inner.len();
    for index in (0..count).step_by(10) {
        let scene = SceneOf::<S>::new(1);
        let map = bounded::block_on(&scene.worker, Map::<S, OneSided<S>>::open(&scene.worker, TREE, Proof::Checksum))
            .unwrap();
        let cache = cache_of::<S>(Admission::Always);
        let structure = map.structure().clone();
        let cached = Map::<S, _>::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
        for key in 0..KEYS {
            bounded::block_on(&scene.worker, cached.get(key)).unwrap();
        }
        let at = scene.inner[index];
        let mut image = scene.direct.read(at, S::page_bytes(256) / 8).unwrap();
        (image[LOCK], image[CHECKSUM]) = (image[LOCK] + (1 << 24), !image[CHECKSUM]);
        scene.direct.write(at, &image).unwrap();
        for key in 0..KEYS {
            let cached = cached.clone();
            match bounded::run(&scene.worker, ENDLESS, async move { cached.remove(key).await }) {
                Ok(Err(Error::PageCorrupt { .. })) => named += 1,
                Ok(_) => {}
                Err(endless) => panic!("page {index} of {count}, key {key}: {endless}"),
            }
        }
    }
    named
}

/// Each kind of damage to a leaf and to a page above it has its error.
#[test]
fn damage_that_is_met_is_named() {
    let _watchdog = Watchdog::start("damage that is met", LIMIT);
    let key = KEYS / 2;
    for word in [CHECKSUM, SELF, IDENTITY, raw::META, raw::KEYS] {
        for owned in [true, false] {
            let scene = Scene::new(1);
            let tree =
                bounded::block_on(&scene.worker, BTree::<OneSided<Tree>>::open(&scene.worker, TREE, Proof::Checksum))
                    .unwrap();
            let leaf = bounded::block_on(&scene.worker, raw::leaf_of(tree.access(), key)).unwrap();
            let mut image = scene.direct.read(leaf, 32).unwrap();
            image[word] ^= 1 << 40;
            scene.direct.write(leaf, &image).unwrap();
            let cache = cache_of::<Tree>(Admission::Always);
            let structure = tree.structure().clone();
            let found = match owned {
                true => {
                    let owned = cache.own(&scene.worker, structure, KeyRange::ALL);
                    let cached = BTree::over(bounded::block_on(&scene.worker, owned).unwrap());
                    bounded::block_on(&scene.worker, cached.get(key))
                }
                false => {
                    let cached = BTree::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
                    bounded::block_on(&scene.worker, cached.get(key))
                }
            };
            let is_named =
                matches!(found, Err(Error::PageCorrupt { .. } | Error::Inconsistent { .. } | Error::BadPointer { .. }));
            assert!(is_named, "word {word}, owned {owned}: {found:?}");
        }
    }
}
