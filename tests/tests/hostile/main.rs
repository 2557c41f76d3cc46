//! Remote memory that holds anything at all: every operation ends, with a result or an error, and nothing panics.
//!
//! A small tree of several levels is damaged: single words or whole pages, raw or *sealed* with a checksum that fits, so
//! that the damage gets past the readers' proof and into the tree's own code; the catalog, the superblock's words that
//! change, the slots, the chunk directory and the bitmaps as well. Then every operation there is runs on it. An operation
//! that needs more READs or turns than any sound tree could ask for counts as endless.
//!
//! One thing is left out: a lock word that names a compute server which lives. To wait for that one is right, and who
//! forges a lock can make others wait.

mod cached;
mod damage;
mod forged;

use std::{sync::Arc, time::Duration};

use farlink_runtime::{
    catalog,
    error::Error,
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    page::{IDENTITY, Identity, SELF},
    worker::Handle,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::Map,
    skiplist::List,
};
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile},
    bounded::{self, Bound, Watchdog},
    cluster,
    direct::Direct,
    raw, settings,
    subject::Subject,
};
use proptest::{prelude::*, sample::Index, test_runner::RngSeed};

use crate::damage::{
    CHUNKS, DIRECTORY, Damage, ENDLESS, EPOCH, KEYS, LIMIT, METADATA_END, NEXT_INCARNATION, SERVER_BYTES, SERVERS,
    SUPERBLOCK, Scene, SceneOf, TREE, at, to_metadata, to_pages,
};

fn cases(default: u32) -> ProptestConfig {
    ProptestConfig {
        cases: settings::from_env("FARLINK_HOSTILE_CASES", default),
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(settings::seed("hostile")),
        max_shrink_iters: 200,
        ..ProptestConfig::default()
    }
}

/// What is damaged as the directory and the bitmaps is these.
#[test]
fn the_directory_is_where_it_is_damaged() {
    let scene = SceneOf::<Tree>::new(1);
    let geometry = scene.compute.geometry()[0];
    assert_eq!(geometry.chunks, CHUNKS);
    let entries = scene.direct.read(at(0, DIRECTORY), 2 * CHUNKS as usize).unwrap();
    let leased = entries.chunks(2).take_while(|entry| entry[0] != 0).count();
    assert!(leased > 0 && entries[2 * leased..].iter().all(|word| *word == 0), "{entries:x?}");
    let before = scene.direct.read(at(0, DIRECTORY - 16), 2).unwrap();
    assert_eq!(before, [0, 0]);
    // Behind the bitmaps, rounded up to a page, come the chunks.
    assert!(scene.pages.iter().all(|page| page.offset() >= METADATA_END));
    assert!(METADATA_END.next_multiple_of(4096) + CHUNKS * (64 << 10) <= SERVER_BYTES);
}

/// Harm to the pages of a structure.
fn every_operation_ends_on_a_damaged<S: Subject>(
    harm: &[Damage],
    keys: &[u64],
    three_waits: bool,
) -> Result<(), TestCaseError> {
    let _watchdog = Watchdog::start("damaged pages", LIMIT);
    let scene = SceneOf::<S>::new(1);
    let proof = if three_waits { Proof::LockBodyLock } else { Proof::Checksum };
    let map = bounded::block_on(&scene.worker, Map::<S, OneSided<S>>::open(&scene.worker, TREE, proof)).unwrap();
    let keys: Vec<u64> = harm.iter().filter_map(|damage| scene.do_harm(damage)).chain(keys.iter().copied()).collect();
    scene.all_operations(&map, &keys)?;
    scene.check(&map)?;
    scene.maintain()
}

/// Harm to the catalog, the superblock, the slots, the chunk directory and the bitmaps.
fn every_operation_ends_on_damaged_metadata_of<S: Subject>(harm: &[Damage], keys: &[u64]) -> Result<(), TestCaseError> {
    let _watchdog = Watchdog::start("damaged metadata", LIMIT);
    let scene = SceneOf::<S>::new(1);
    let map =
        bounded::block_on(&scene.worker, Map::<S, OneSided<S>>::open(&scene.worker, TREE, Proof::Checksum)).unwrap();
    for damage in harm {
        scene.do_harm(damage);
    }
    scene.all_on_catalog()?;
    scene.all_operations(&map, keys)?;
    scene.check(&map)?;
    scene.maintain()
}

proptest! {
    #![proptest_config(cases(8))]

    #[test]
    fn every_operation_ends_on_a_damaged_tree(
        harm in prop::collection::vec(to_pages(), 1..6),
        keys in prop::collection::vec(0..KEYS + 20, 3),
        three_waits: bool,
    ) {
        every_operation_ends_on_a_damaged::<Tree>(&harm, &keys, three_waits)?;
    }

    #[test]
    fn every_operation_ends_on_a_damaged_skip_list(
        harm in prop::collection::vec(to_pages(), 1..6),
        keys in prop::collection::vec(0..KEYS + 20, 3),
        three_waits: bool,
    ) {
        every_operation_ends_on_a_damaged::<List>(&harm, &keys, three_waits)?;
    }

    #[test]
    fn every_operation_ends_on_damaged_metadata(
        harm in prop::collection::vec(to_metadata(), 1..5),
        keys in prop::collection::vec(0..KEYS + 20, 2),
        of_list: bool,
    ) {
        match of_list {
            true => every_operation_ends_on_damaged_metadata_of::<List>(&harm, &keys)?,
            false => every_operation_ends_on_damaged_metadata_of::<Tree>(&harm, &keys)?,
        }
    }

    #[test]
    fn joining_ends_on_any_superblock(
        words in prop::collection::vec((any::<Index>(), 0..(DIRECTORY - SUPERBLOCK) / 8, any::<u64>()), 1..20),
        fixed: bool,
    ) {
        let _watchdog = Watchdog::start("any superblock", LIMIT);
        let fabric = Cluster::of_this_run(SERVERS, SERVER_BYTES, FabricProfile::Fast).unwrap();
        let direct = Direct::new(&fabric, 0).unwrap();
        for (server, word, evil) in words {
            // Half of the time spare the fixed part, behind whose check word nothing would be reached.
            let word = if fixed { word % 8 } else { 8 + word % ((DIRECTORY - SUPERBLOCK) / 8 - 8) };
            direct.write(at(server.index(SERVERS), SUPERBLOCK + word * 8), &[evil]).unwrap();
        }
        if let Ok(compute) = cluster::join_manual(&fabric, 1) {
            let worker = compute.worker().unwrap();
            let bound = Bound { reads_max: 10_000, ..ENDLESS };
            let handle = Handle::clone(&worker);
            let listed = bounded::run(&worker, bound, async move { catalog::list(&handle).await });
            prop_assert!(listed.is_ok(), "{:?}", listed);
        }
    }
}

/// The end of an epoch's range is met by damage only, and then it must not bring the maintenance down.
#[test]
fn the_last_epoch_of_all_is_survived() {
    let scene = Scene::new(1);
    let tree =
        bounded::block_on(&scene.worker, BTree::<OneSided<Tree>>::open(&scene.worker, TREE, Proof::Checksum)).unwrap();
    bounded::block_on(&scene.worker, async {
        for key in 0..KEYS {
            tree.remove(key).await.unwrap();
        }
    });
    scene.direct.write(at(0, EPOCH), &[u64::MAX]).unwrap();
    scene.maintain().unwrap();
}

/// A root that has become one page of a lower level leads along that level: what splits there has nothing above it.
#[test]
fn a_root_with_pages_beside_it_is_named() {
    let _watchdog = Watchdog::start("a root with pages beside it", LIMIT);
    let scene = Scene::new(1);
    let tree =
        bounded::block_on(&scene.worker, BTree::<OneSided<Tree>>::open(&scene.worker, TREE, Proof::Checksum)).unwrap();
    let images = scene.inner.iter().map(|&at| scene.direct.read(at, scene.class.words()).unwrap());
    let is_low = |image: &Vec<u64>| Identity::from_word(image[IDENTITY]).unwrap().level == 1;
    let mut image = images.filter(is_low).min_by_key(|image| image[raw::KEYS]).unwrap();
    image[SELF] = scene.root.raw();
    scene.put(scene.root, image, true);
    let mut named = 0;
    for key in KEYS..2 * KEYS {
        if named == 20 {
            break;
        }
        let tree = tree.clone();
        match bounded::run(&scene.worker, ENDLESS, async move { tree.insert(key, key).await }) {
            Ok(Ok(_)) => {}
            Ok(Err(Error::Inconsistent { page, .. })) => named += usize::from(page == scene.root),
            other => panic!("key {key}: {other:?}"),
        }
    }
    assert!(named > 0, "nothing had to split beside the root");
}

fn rewind_incarnations(fabric: &Arc<dyn Fabric>) {
    let _watchdog = Watchdog::start("an incarnation given out twice", Duration::from_secs(20));
    let first = cluster::join(fabric, 1).unwrap();
    let direct = Direct::new(fabric, 0).unwrap();
    direct.write(at(0, NEXT_INCARNATION), &[u64::from(first.owner().incarnation())]).unwrap();
    let second = cluster::join(fabric, 2);
    assert!(second.is_err(), "two compute servers are {}", first.owner());
    // The word has moved on.
    let third = cluster::join(fabric, 3).unwrap();
    assert_ne!(third.owner(), first.owner());
}

#[test]
fn an_incarnation_is_not_given_out_twice_in_one_process() {
    rewind_incarnations(&Cluster::of_this_run(1, SERVER_BYTES, FabricProfile::Fast).unwrap());
}

#[test]
fn an_incarnation_is_not_given_out_twice_across_processes() {
    let backend = Backend::chosen_across_processes();
    rewind_incarnations(&Cluster::start(backend, 1, SERVER_BYTES, FabricProfile::Fast).unwrap());
}
