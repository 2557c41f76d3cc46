//! Futures dropped at random points, and workers that end with pages on their way: the tree is sound, every entry is there,
//! and no page is lost.

use std::collections::BTreeMap;

use farlink_offload::{Admission, Counters};
use farlink_runtime::{access::Access, one_sided::Proof, worker::Worker};
use farlink_structures::btree::{BTree, KeyRange, Tree};
use farlink_tests::{backend::FabricProfile, bounded::Watchdog, drive::polled, settings};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::scene::{CACHE_BYTES_MIN, Map, Member, assert_left_clean, cache, fabric, settle, sparse};

const KEYS: u64 = 3000;
const ROUNDS: usize = 6000;

fn watch(what: &str) -> Watchdog {
    Watchdog::start(what, std::time::Duration::from_secs(120))
}

/// Operations of which most are dropped; what they did shows when the key is read.
async fn drop_many<A: Access<Plugin = Tree>>(worker: &Worker, tree: &BTree<A>, rng: &mut StdRng, model: &mut Map) {
    let mut dropped = 0;
    for round in 0..ROUNDS as u64 {
        let key = rng.random_range(0..KEYS * 11);
        let polls = rng.random_range(1..=12);
        let before = model.get(&key).copied();
        let (done, after) = match rng.random_range(0..6) {
            0 => (polled(polls, tree.get(key)).await.map(drop_result), before),
            1 => (polled(polls, tree.insert(key, round)).await.map(drop_result), before.or(Some(round))),
            2 => (polled(polls, tree.upsert(key, round)).await.map(drop_result), Some(round)),
            3 => (polled(polls, tree.range(key..).take(40)).await.map(drop_result), before),
            4 => (polled(polls, tree.range(..=key).descending().take(40)).await.map(drop_result), before),
            _ => (polled(polls, tree.remove(key)).await.map(drop_result), None),
        };
        if done.is_none() {
            // What was begun goes on as a task, and may take effect later.
            while worker.is_unfinished() {
                worker.yield_now().await;
            }
        }
        let found = tree.get(key).await.unwrap();
        match done {
            Some(()) => assert_eq!(found, after, "key {key}, which was {before:?}"),
            None => {
                dropped += 1;
                assert!(found == before || found == after, "key {key}: {found:?}, not {before:?} or {after:?}");
            }
        }
        match found {
            Some(value) => model.insert(key, value),
            None => model.remove(&key),
        };
    }
    assert!(dropped > ROUNDS / 50, "only {dropped} were dropped");
}

fn drop_result<T>(result: Result<T, farlink_runtime::error::Error>) {
    result.unwrap();
}

#[test]
fn operations_of_an_owner_end_anywhere() {
    let _watch = watch("operations of an owner end anywhere");
    let seed = settings::seed("operations of an owner end anywhere");
    for (options, admission) in [
        (FabricProfile::Nasty, Admission::Always),
        (FabricProfile::Weak, Admission::Frequency),
        (FabricProfile::Nasty, Admission::Probability { leaf: 0.1, inner: 0.5 }),
    ] {
        let mut model = sparse(KEYS);
        let fabric = fabric(options, 256, &model, 0.8);
        let member = Member::join(&fabric, seed);
        let cache = cache(CACHE_BYTES_MIN, admission);
        let tree = member.own(&cache, KeyRange::ALL);
        let mut rng = StdRng::seed_from_u64(seed);
        member.worker.block_on(drop_many(&member.worker, &tree, &mut rng, &mut model));
        let did = tree.access().counters();
        assert!(did.total().misses > 1000 && did.total().write_backs > 100, "{did:?}");
        member.worker.block_on(tree.access().flush()).unwrap();
        drop((tree, member));
        assert_left_clean(&fabric, &model, "an owner's operations were dropped");
    }
}

#[test]
fn operations_on_a_shared_tree_end_anywhere() {
    let _watch = watch("operations on a shared tree end anywhere");
    let seed = settings::seed("operations on a shared tree end anywhere");
    for (options, proof) in [(FabricProfile::Nasty, Proof::Checksum), (FabricProfile::Weak, Proof::LockBodyLock)] {
        let mut model = sparse(KEYS);
        let fabric = fabric(options, 256, &model, 0.8);
        let members = [1, 2].map(|owner| Member::join(&fabric, seed ^ owner));
        let trees = members.each_ref().map(|member| member.share(&cache(CACHE_BYTES_MIN, Admission::Always), proof));
        let mut rng = StdRng::seed_from_u64(seed);
        // Each finds the other's cache old.
        for _ in 0..2 {
            for (member, tree) in members.iter().zip(&trees) {
                member.worker.block_on(drop_many(&member.worker, tree, &mut rng, &mut model));
            }
        }
        settle(&members);
        drop((trees, members));
        assert_left_clean(&fabric, &model, "operations on a shared tree were dropped");
    }
}

/// Flushes dropped at every point, of pages that others change meanwhile, and the rest of the pages written in the end.
#[test]
fn flushes_end_anywhere() {
    let _watch = watch("flushes end anywhere");
    for polls in (1..40).chain([60, 100, 200, 400]) {
        let mut model = sparse(600);
        let fabric = fabric(FabricProfile::Nasty, 256, &model, 0.8);
        let member = Member::join(&fabric, u64::from(polls));
        let tree = member.own(&cache(CACHE_BYTES_MIN, Admission::Always), KeyRange::ALL);
        member.worker.block_on(async {
            for (key, value) in &mut model {
                *value += 1;
                tree.update(*key, *value).await.unwrap();
            }
            polled(polls, tree.access().flush()).await;
            for (key, value) in model.iter_mut().step_by(3) {
                *value += 1;
                tree.update(*key, *value).await.unwrap();
            }
            tree.access().flush().await.unwrap();
        });
        drop((tree, member));
        assert_left_clean(&fabric, &model, &format!("a flush was dropped after {polls} polls"));
    }
}

/// Runs turns of a worker while tasks of it insert and remove; then the worker goes, in the middle of it all.
fn cut_off(worker: Worker, tree: crate::scene::Owned, turns: u32, written: &Seen) -> Counters {
    for task in 0..8u64 {
        let (tree, written) = (tree.clone(), std::rc::Rc::clone(written));
        drop(worker.spawn(async move {
            for round in 0.. {
                let key = (round * 8 + task) * 7 % (KEYS * 10);
                written.borrow_mut().insert(key, None);
                match round % 3 {
                    0 => drop_result(tree.remove(key).await),
                    _ => drop_result(tree.upsert(key, round).await),
                }
                written.borrow_mut().insert(key, Some(if round % 3 == 0 { None } else { Some(round) }));
            }
        }));
    }
    for _ in 0..turns {
        worker.turn();
    }
    let counters = tree.access().counters();
    drop(tree);
    drop(worker);
    counters
}

/// What a task did to a key last; `None` while it does it.
type Seen = std::rc::Rc<std::cell::RefCell<BTreeMap<u64, Option<Option<u64>>>>>;

#[test]
fn a_worker_ends_with_pages_on_their_way() {
    let _watch = watch("a worker ends with pages on their way");
    let mut write_backs = 0;
    for turns in (0..400).step_by(19).chain([1000, 3000]) {
        let model = sparse(KEYS);
        let fabric = fabric(FabricProfile::Nasty, 256, &model, 0.8);
        let survivor = Member::join(&fabric, u64::from(turns));
        let cache = cache(CACHE_BYTES_MIN, Admission::Always);
        let survivor_tree = survivor.own(&cache, KeyRange::ALL);
        survivor.worker.block_on(survivor_tree.get(0)).unwrap();
        let victim = survivor.colleague();
        let written = Seen::default();
        let tree = victim.own(&cache, KeyRange::ALL);
        let Member { tree: bare, worker, compute } = victim;
        drop(bare);
        write_backs += cut_off(worker, tree, turns, &written).total().write_backs;
        drop(compute);
        // The other worker of the compute server finds everything, changes it, and writes it.
        let mut model = model;
        survivor.worker.block_on(async {
            let there: Map = survivor_tree.range(..).take(usize::MAX).await.unwrap().into_iter().collect();
            for (key, did) in written.borrow().iter() {
                let found = there.get(key).copied();
                assert!(did.is_none_or(|did| did == found), "{turns}: key {key} is {found:?}, not {did:?}");
                match found {
                    Some(value) => model.insert(*key, value),
                    None => model.remove(key),
                };
            }
            for key in 0..500 {
                survivor_tree.upsert(key, 1).await.unwrap();
                model.insert(key, 1);
            }
            survivor_tree.access().flush().await.unwrap();
        });
        drop((survivor_tree, survivor));
        assert_left_clean(&fabric, &model, &format!("its worker ended after {turns} turns"));
    }
    assert!(write_backs > 0, "nothing was on its way");
}

/// What is written in the end does not depend on how fast the fabric is.
#[test]
fn a_dirty_cache_without_its_workers_is_written_by_another() {
    let mut model = sparse(300);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let member = Member::join(&fabric, 1);
    let cache = cache(CACHE_BYTES_MIN, Admission::Always);
    let first = member.colleague();
    let tree = first.own(&cache, KeyRange::ALL);
    first.worker.block_on(async {
        for key in 0..600 {
            tree.upsert(key, key).await.unwrap();
            model.insert(key, key);
        }
    });
    drop((tree, first));
    assert_ne!(member.entries(), model);
    let tree = member.own(&cache, KeyRange::ALL);
    member.worker.block_on(tree.access().flush()).unwrap();
    assert_eq!(member.entries(), model);
    drop((tree, member));
    assert_left_clean(&fabric, &model, "written by another");
}
