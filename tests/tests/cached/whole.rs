//! What cannot be owned in part has one owner at a time, and goes to and fro as a whole.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use farlink_offload::{
    Admission, Holdings,
    route::{move_region, take_region},
};
use farlink_runtime::{
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    lock::LockWord,
    one_sided::ownership,
    page::LOCK,
};
use farlink_structures::{
    btree::Tree,
    map::{KeyRange, Map as Ordered},
    skiplist::List,
};
use farlink_tests::{
    backend::FabricProfile,
    bounded::Watchdog,
    direct::Direct,
    settings,
    subject::{StructureName, Subject},
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    routing::{Owner, routes, to_owners},
    scene::{CACHE_BYTES_ALL, CACHE_BYTES_MIN, MemberOf, assert_left_clean, cache, fabric_of, settle, sparse},
};

/// Whoever owns it, and whoever asks, the answers are those of a model.
fn goes_to_and_fro<S: Subject>() {
    let seed = settings::seed("to and fro");
    for (profile, cache_bytes) in [(FabricProfile::Fast, CACHE_BYTES_ALL), (FabricProfile::Nasty, CACHE_BYTES_MIN)] {
        let (mut rng, mut model) = (SmallRng::seed_from_u64(seed), sparse(500));
        let fabric = fabric_of::<S>(profile, 256, &model, 0.8);
        let owners: [Owner<S>; 2] =
            [&[KeyRange::ALL][..], &[]].map(|ranges| Owner::new(&fabric, 1 + ranges.len() as u64, ranges, cache_bytes));
        let guest = MemberOf::<S>::join(&fabric, 3);
        let trees = [owners[0].router(), owners[1].router(), to_owners(&guest, &routes(&guest))];
        let workers = [&owners[0].member.worker, &owners[1].member.worker, &guest.worker];
        for round in 0..40 {
            for _ in 0..60 {
                let (key, value, who) = (rng.random_range(0..5000), rng.random(), rng.random_range(0..3));
                let (tree, worker) = (&trees[who], workers[who]);
                match rng.random_range(0..if round < 20 { 5 } else { 8 }) {
                    0 => assert_eq!(worker.block_on(tree.get(key)).unwrap(), model.get(&key).copied()),
                    1..=3 => assert_eq!(worker.block_on(tree.upsert(key, value)).unwrap(), model.insert(key, value)),
                    _ => {
                        let next = model.range(key..).next().map_or(key, |(&key, _)| key);
                        assert_eq!(worker.block_on(tree.remove(next)).unwrap(), model.remove(&next));
                    }
                }
            }
            let [from, to] = [round % 2, 1 - round % 2].map(|owner| owners[owner].member.compute.owner());
            let moved =
                guest.worker.block_on(move_region(&guest.worker, guest.tree.structure(), &KeyRange::ALL, from, to));
            assert_eq!(moved.unwrap(), Some(KeyRange::ALL), "round {round}");
        }
        let found: BTreeMap<u64, u64> =
            guest.worker.block_on(trees[2].range(..).take(usize::MAX)).unwrap().into_iter().collect();
        assert!(found == model, "{}", crate::scene::difference(&found, &model));
        drop(trees);
        owners.iter().for_each(Owner::close);
        settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
        drop((owners, guest));
        if S::WHICH == StructureName::BTree {
            assert_left_clean(&fabric, &model, "to and fro");
        }
    }
}

/// Operations that have begun at one owner, and meet what the next one has made of it, go on there.
fn goes_to_and_fro_meanwhile<S: Subject>() {
    let _watch = Watchdog::start("to and fro", Duration::from_secs(120));
    let seed = settings::seed("to and fro meanwhile");
    let fabric = fabric_of::<S>(FabricProfile::Fast, 256, &sparse(500), 0.8);
    let guest = MemberOf::<S>::join(&fabric, 3);
    let is_over = Arc::new(AtomicBool::new(false));
    let (all_stopped, (named, names)) = (Barrier::new(2), mpsc::channel());
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (fabric, is_over, all_stopped, named) = (&fabric, &is_over, &all_stopped, named.clone());
            scope.spawn(move || {
                let ranges = [KeyRange::ALL];
                let owner = Owner::<S>::new(fabric, 1 + number, &ranges[number as usize..], CACHE_BYTES_ALL);
                named.send((number, owner.member.compute.owner())).unwrap();
                let (tree, worker) = (owner.router(), &owner.member.worker);
                let client = |task: u64| {
                    let (tree, is_over) = (tree.clone(), Arc::clone(is_over));
                    async move {
                        let mut rng = SmallRng::seed_from_u64(seed ^ number << 8 ^ task);
                        let mut model = BTreeMap::new();
                        while !is_over.load(Ordering::Relaxed) {
                            // Its own keys, among all the others'.
                            let (key, value) =
                                (100_000 + rng.random_range(0..60) * 8 + number * 4 + task, rng.random());
                            match rng.random_range(0..5) {
                                0 => assert_eq!(tree.get(key).await.unwrap(), model.get(&key).copied()),
                                1 | 2 => assert_eq!(tree.upsert(key, value).await.unwrap(), model.insert(key, value)),
                                _ => assert_eq!(tree.remove(key).await.unwrap(), model.remove(&key)),
                            }
                        }
                    }
                };
                let tasks: Vec<_> = (0..4).map(|task| worker.spawn(client(task))).collect();
                worker.block_on(async {
                    for task in tasks {
                        task.await;
                    }
                });
                drop(tree);
                // The other one may have operations for it until then.
                all_stopped.wait();
                owner.close();
                settle([&owner.member]);
            });
        }
        let mut owners = [names.recv().unwrap(), names.recv().unwrap()];
        owners.sort_unstable_by_key(|(number, _)| *number);
        for round in 0..settings::from_env("FARLINK_MOVES", 60) {
            let [from, to] = [round % 2, 1 - round % 2].map(|owner| owners[owner].1);
            guest
                .worker
                .block_on(move_region(&guest.worker, guest.tree.structure(), &KeyRange::ALL, from, to))
                .unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_has_begun_goes_on_at_the_next_owner() {
    goes_to_and_fro_meanwhile::<List>();
    goes_to_and_fro_meanwhile::<Tree>();
}

#[test]
fn a_tree_goes_to_and_fro_as_a_whole() {
    goes_to_and_fro::<Tree>();
}

#[test]
fn a_skip_list_goes_to_and_fro() {
    goes_to_and_fro::<List>();
}

/// Its pages are shared until then, and old, perhaps: who cannot bring them up to date does not take it, and others can.
#[test]
fn what_cannot_be_brought_up_to_date_is_not_taken() {
    let model = sparse(5);
    let fabric = fabric_of::<Tree>(FabricProfile::Fast, 256, &model, 0.8);
    let other: Owner = Owner::new(&fabric, 2, &[], CACHE_BYTES_ALL);
    let lock_wait = Some(Duration::from_millis(50));
    let options = ComputeOptions { lock_wait, maintenance: Maintenance::Manual, ..ComputeOptions::default() };
    let compute = ComputeServer::join(fabric.clone(), options).unwrap();
    let (worker, structure) = (compute.worker().unwrap(), other.member.tree.structure());
    let holdings = Holdings::new(structure, cache(CACHE_BYTES_ALL, Admission::Always));
    let tree = Ordered::over(holdings.here(&worker));
    worker.block_on(async {
        holdings.take(&worker, KeyRange::ALL).await.unwrap();
        assert_eq!(tree.get(10).await.unwrap(), Some(1));
        holdings.give_up(&worker, &KeyRange::ALL).await.unwrap();
    });
    let theirs = &other.member.worker;
    theirs.block_on(async {
        other.holdings.take(theirs, KeyRange::ALL).await.unwrap();
        assert_eq!(Ordered::over(other.holdings.here(theirs)).update(10, 7).await.unwrap(), Some(1));
    });
    other.close();
    // As by one that is stopped in the middle of a change.
    let (direct, lock) = (Direct::new(&fabric, 7).unwrap(), structure.root.word(LOCK));
    let word = direct.read(lock, 1).unwrap()[0];
    direct.write_word(lock, LockWord::from_word(word).locked_by(other.member.compute.owner()).word()).unwrap();
    let taken = worker.block_on(holdings.take(&worker, KeyRange::ALL));
    assert!(matches!(taken, Err(Error::OwnerStalled { .. })), "{taken:?}");
    assert!(holdings.regions().is_empty());
    let map = worker.block_on(ownership::read(&worker, structure)).unwrap();
    assert_eq!(map.owners().count(), 0, "{map:?}");
    direct.write_word(lock, word).unwrap();
    worker.block_on(async {
        holdings.take(&worker, KeyRange::ALL).await.unwrap();
        assert_eq!(tree.update(10, 1).await.unwrap(), Some(7));
        holdings.give_up(&worker, &KeyRange::ALL).await.unwrap();
    });
    drop((tree, worker, compute));
    settle([&other.member]);
    drop((direct, other));
    assert_left_clean(&fabric, &model, "not taken");
}

/// Whether who is to take it has had all of it before or not.
#[test]
fn a_part_of_what_is_owned_as_a_whole_is_not_taken() {
    let model = sparse(500);
    let fabric = fabric_of::<List>(FabricProfile::Fast, 256, &model, 0.8);
    let owner: Owner<List> = Owner::new(&fabric, 1, &[], CACHE_BYTES_ALL);
    let guest = MemberOf::<List>::join(&fabric, 2);
    let (id, part) = (owner.member.compute.owner(), KeyRange { low: 100, high: Some(200) });
    for _ in 0..2 {
        let taken = owner.member.worker.block_on(owner.holdings.take(&owner.member.worker, part));
        assert!(matches!(taken, Err(Error::BadOption { option: "region", .. })), "{taken:?}");
        let taken = guest.worker.block_on(take_region(&guest.worker, guest.tree.structure(), &part, id));
        assert!(matches!(taken, Err(Error::AtOwner { .. })), "{taken:?}");
        guest.worker.block_on(take_region(&guest.worker, guest.tree.structure(), &KeyRange::ALL, id)).unwrap();
        assert_eq!(owner.holdings.regions(), [KeyRange::ALL]);
        owner.close();
    }
    settle([&owner.member, &guest]);
}
