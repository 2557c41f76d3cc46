//! Owners where all memory is in use: their log gets no more segments.

use farlink_offload::{Admission, CacheOptions, ComputeCache, Durability};
use farlink_runtime::{
    access::{Access, NewPage, Placement},
    error::Error,
    one_sided::{Proof, ownership},
    page::SizeClass,
};
use farlink_structures::{btree::BTree, map::KeyRange};
use farlink_tests::backend::FabricProfile;

use crate::scene::{
    CACHE_BYTES_ALL, CACHE_BYTES_MIN, Map, Member, Owned, assert_left_clean, cache, fabric, settle, sparse,
};

const ENTRIES: u64 = 2_000;

/// All pages of a segment's size that there are.
fn take_all(member: &Member) -> Vec<NewPage> {
    let class = SizeClass::of_bytes(16 << 10).unwrap();
    let mut taken = Vec::new();
    let all = async {
        loop {
            match member.tree.access().allocate(class, Placement::RoundRobin).await {
                Ok(page) => taken.push(page),
                Err(Error::OutOfMemory { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
    };
    member.worker.block_on(all);
    taken
}

/// Has all keys changed, many times, and most removed, by so many tasks, each with keys of its own; what is left.
fn change(owner: &Member, tree: &Owned, entries: u64, tasks: u64) -> Map {
    let task = |task: u64| {
        let tree = BTree::over(tree.access().clone());
        let own =
            move || (0..entries).map(move |turn| turn * 7919 % entries).filter(move |index| index % tasks == task);
        owner.worker.spawn(async move {
            for value in 1..=4 {
                for index in own() {
                    tree.upsert(index * 10, value).await.unwrap_or_else(|error| panic!("{index}, {value}: {error}"));
                }
            }
            // Few are left, so pages are merged, which is recorded in any case.
            for index in own().filter(|index| index % 8 != 0) {
                let removed = tree.remove(index * 10).await.unwrap_or_else(|error| panic!("{index}: {error}"));
                assert_eq!(removed, Some(4), "{index}");
            }
        })
    };
    let tasks: Vec<_> = (0..tasks).map(task).collect();
    tasks.into_iter().for_each(|task| owner.worker.block_on(task));
    (0..entries).step_by(8).map(|index| (index * 10, 4)).collect()
}

/// What an owner changes while there is no memory is much more than its log has room for. It goes on all the same.
fn goes_on(durability: Durability, cache_bytes: usize, tasks: u64) {
    goes_on_with(256, ENTRIES, durability, cache_bytes, tasks);
}

fn goes_on_with(page_bytes: usize, entries: u64, durability: Durability, cache_bytes: usize, tasks: u64) {
    let fabric = fabric(FabricProfile::Fast, page_bytes, &sparse(entries), 0.8);
    let owner = Member::join(&fabric, 1);
    let mut options = CacheOptions::new(cache_bytes);
    (options.page_bytes, options.admission) = (page_bytes, Admission::Always);
    let cache = ComputeCache::new(options).unwrap().with_durability(durability);
    let tree = owner.own(&cache, KeyRange::ALL);
    owner.worker.block_on(tree.upsert(0, 1)).unwrap();
    let others = Member::join(&fabric, 2);
    let taken = take_all(&others);
    let model = change(&owner, &tree, entries, tasks);
    owner.worker.block_on(tree.access().close()).unwrap();
    drop((taken, tree));
    settle([&owner, &others]);
    drop((owner, others));
    assert_left_clean(&fabric, &model, "after a time without memory");
}

#[test]
fn who_records_all_changes_goes_on_without_memory() {
    goes_on(Durability::Logged, CACHE_BYTES_ALL, 1);
    goes_on(Durability::Logged, CACHE_BYTES_ALL, 64);
}

#[test]
fn who_records_all_changes_goes_on_without_memory_in_a_small_cache() {
    goes_on(Durability::Logged, CACHE_BYTES_MIN, 16);
}

/// The largest that a B+-tree has.
#[test]
fn who_has_large_pages_goes_on_without_memory() {
    for durability in [Durability::Logged, Durability::WriteBack] {
        goes_on_with(4 << 10, 20_000, durability, CACHE_BYTES_ALL, 16);
    }
}

#[test]
fn who_writes_back_goes_on_without_memory() {
    goes_on(Durability::WriteBack, CACHE_BYTES_ALL, 16);
    goes_on(Durability::WriteBack, CACHE_BYTES_MIN, 16);
}

/// Many pages are written at once, and each has to be recorded first.
#[test]
fn many_who_write_back_go_on_without_memory() {
    goes_on_with(1024, 60_000, Durability::WriteBack, 512 << 10, 60);
}

/// Who has recorded nothing yet that others have to do with: two owners of a half each, and then one that caches inner pages and has just joined.
#[test]
fn who_records_for_the_first_time_without_memory_removes_all() {
    for durability in [Durability::Logged, Durability::WriteBack] {
        let model = sparse(ENTRIES);
        let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let owners = [1, 2].map(|seed| Member::join(&fabric, seed));
        let cut = owners[0].worker.block_on(owners[0].tree.leaf_low(ENTRIES * 5)).unwrap();
        let halves = [KeyRange { high: Some(cut), ..KeyRange::ALL }, KeyRange { low: cut, ..KeyRange::ALL }];
        let caches = [0; 2].map(|_| cache(CACHE_BYTES_ALL, Admission::Always).with_durability(durability));
        let mut trees: Vec<_> =
            owners.iter().zip(&caches).zip(halves).map(|((owner, cache), half)| owner.own(cache, half)).collect();
        let others = Member::join(&fabric, 3);
        let taken = take_all(&others);
        for ((owner, tree), half) in owners.iter().zip(&trees).zip(halves) {
            for (&key, &value) in model.iter().filter(|&(&key, _)| half.contains(key) && key % 100 != 0) {
                assert_eq!(owner.worker.block_on(tree.remove(key)).unwrap(), Some(value), "{key}");
            }
            owner.worker.block_on(tree.access().close()).unwrap();
        }
        trees.clear();
        let joiner = Member::join(&fabric, 4);
        let tree = joiner.share(&cache(CACHE_BYTES_ALL, Admission::Always), Proof::Checksum);
        for (&key, &value) in model.iter().filter(|&(&key, _)| key % 100 == 0) {
            assert_eq!(joiner.worker.block_on(tree.remove(key)).unwrap(), Some(value), "{key}");
        }
        drop((tree, taken));
        settle(owners.iter().chain([&others, &joiner]));
        drop((owners, others, joiner));
        assert_left_clean(&fabric, &Map::new(), "after removals without memory");
    }
}

/// Nobody owns what he could not write back; once there is memory, he does.
#[test]
fn who_comes_without_memory_owns_nothing() {
    let mut model = sparse(ENTRIES);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let (owner, others) = (Member::join(&fabric, 1), Member::join(&fabric, 2));
    let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
    let mut taken = take_all(&others);
    for left in 0..3 {
        // Less than it takes.
        taken.truncate(taken.len() - left);
        settle([&others]);
        let refused = owner.worker.block_on(cache.own(&owner.worker, owner.tree.structure().clone(), KeyRange::ALL));
        assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
        let map = owner.worker.block_on(ownership::read(&owner.worker, owner.tree.structure())).unwrap();
        assert!(map.entries.is_empty(), "{map:?}");
    }
    // They leave, and return all that they have.
    drop((taken, others));
    let tree = owner.own(&cache, KeyRange::ALL);
    assert_eq!(owner.worker.block_on(tree.upsert(0, 7)).unwrap(), Some(0));
    model.insert(0, 7);
    owner.worker.block_on(tree.access().close()).unwrap();
    drop(tree);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "memory came late");
}
