//! The least and the greatest: one entry, the last key, a fence that is the last key.

use std::sync::Arc;

use farlink_offload::{CacheOptions, ComputeCache};
use farlink_runtime::{
    error::Error,
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server::in_process,
    structure::StructurePlacement,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, Tree},
    map::{KeyRange, Map},
};
use farlink_tests::{
    cluster::{self, FAST},
    subject::Subject,
    test_every_structure,
};

const NAME: &str = "edges";
const PAGE_BYTES: usize = 256;
/// Of a B+-tree's page of this size.
const CAPACITY: u64 = 12;

fn filled<S: Subject>(entries: &[(u64, u64)], fill: f64) -> Arc<dyn Fabric> {
    let fabric: Arc<dyn Fabric> = Arc::new(in_process(2, 4 << 20, FAST).unwrap());
    cluster::create::<S>(&fabric, NAME, PAGE_BYTES, Proof::Checksum).unwrap();
    cluster::load::<S>(&fabric, NAME, entries.iter().copied(), fill).unwrap();
    fabric
}

fn with<S: Subject>(fabric: &Arc<dyn Fabric>, f: impl AsyncFnOnce(&Worker, Map<S, OneSided<S>>)) {
    let run = |worker: &Worker| {
        worker.block_on(async {
            let map = Map::open(worker, NAME, Proof::Checksum).await?;
            f(worker, map).await;
            Ok::<_, farlink_runtime::error::Error>(())
        })
    };
    cluster::with_worker(fabric, run).unwrap();
}

fn one_entry_is_loaded<S: Subject>() {
    for key in [0, 1, u64::MAX] {
        let fabric = filled::<S>(&[(key, 7)], 0.7);
        with::<S>(&fabric, async |_, map| {
            assert_eq!(map.get(key).await.unwrap(), Some(7));
            assert_eq!(map.range(..).take(9).await.unwrap(), [(key, 7)]);
            assert_eq!(map.len().await.unwrap(), 1);
            for other in [key.wrapping_sub(1), key.wrapping_add(1)] {
                assert_eq!(map.get(other).await.unwrap(), None);
                assert!(map.insert(other, 8).await.unwrap());
            }
            assert_eq!(map.remove(key).await.unwrap(), Some(7));
        });
        let report = cluster::check_tree(&fabric, NAME).unwrap();
        assert!(report.is_clean() && report.entries == 2, "{report:?}");
    }
}

fn nothing_is_loaded<S: Subject>() {
    let fabric = filled::<S>(&[], 0.7);
    let report = cluster::check_tree(&fabric, NAME).unwrap();
    assert!(report.is_clean() && report.entries == 0, "{report:?}");
}

fn the_last_key_is_a_key<S: Subject>() {
    let fabric = filled::<S>(&[], 0.7);
    with::<S>(&fabric, async |_, map| {
        let last: Vec<(u64, u64)> = (0..40).map(|index| (u64::MAX - 39 + index, index)).collect();
        for &(key, value) in &last {
            assert!(map.insert(key, value).await.unwrap());
            assert!(!map.insert(key, value).await.unwrap());
        }
        assert_eq!(map.range(u64::MAX..).take(9).await.unwrap(), [(u64::MAX, 39)]);
        assert_eq!(map.range(..=u64::MAX).descending().take(1).await.unwrap(), [(u64::MAX, 39)]);
        assert_eq!(map.range(..).take(100).await.unwrap(), last);
        assert_eq!(map.range(..u64::MAX).take(100).await.unwrap(), last[..39]);
        for &(key, value) in last.iter().rev() {
            assert_eq!(map.remove(key).await.unwrap(), Some(value));
        }
    });
    let report = cluster::check_tree(&fabric, NAME).unwrap();
    assert!(report.is_clean() && report.entries == 0, "{report:?}");
}

/// Entries that were fetched in the other order come again, those that were handed out do not.
fn a_range_turns_round_at_any_time<S: Subject>() {
    let entries: Vec<(u64, u64)> = (0..3000).map(|key| (key, !key)).collect();
    let fabric = filled::<S>(&entries, 0.7);
    with::<S>(&fabric, async |_, map| {
        for (taken, bounds) in [(0, 0..3000), (5, 0..3000), (5, 0..20), (20, 0..20), (1500, 0..3000)] {
            let mut range = map.range(bounds.clone());
            for expected in &entries[..taken] {
                assert_eq!(range.next().await.unwrap().as_ref(), Some(expected));
            }
            let rest: Vec<_> = entries[taken..bounds.end as usize].iter().rev().copied().collect();
            assert_eq!(range.descending().descending().take(9999).await.unwrap(), rest, "{taken} of {bounds:?}");
        }
    });
}

test_every_structure!(
    one_entry_is_loaded, nothing_is_loaded, the_last_key_is_a_key, a_range_turns_round_at_any_time;
    bwtree: one_entry_is_loaded, nothing_is_loaded, the_last_key_is_a_key, a_range_turns_round_at_any_time,
);

#[test]
fn a_root_on_no_memory_server_is_refused() {
    let fabric = filled::<Tree>(&[], 0.7);
    with::<Tree>(&fabric, async |worker, _| {
        for (server, name) in [(1, "there"), (2, "not there"), (7, "not there")] {
            let placement = StructurePlacement { root: ServerId::new(server), ..StructurePlacement::default() };
            let made = Map::<Tree, _>::make_at(worker, name, PAGE_BYTES, Proof::Checksum, placement).await;
            match server {
                1 => assert_eq!(made.unwrap().structure().root.server(), ServerId::new(1).unwrap()),
                _ => assert!(matches!(made, Err(Error::BadOption { option: "root", .. })), "{server}"),
            }
        }
    });
}

/// A full leaf that ends below the last key: its high fence is the greatest word there is, and it is one.
#[test]
fn a_fence_at_the_last_key_is_a_fence() {
    let entries: Vec<_> = (0..CAPACITY).chain([u64::MAX]).map(|key| (key, !key)).collect();
    let fabric = filled::<Tree>(&entries, 1.0);
    with::<Tree>(&fabric, async |worker, tree| {
        let leaf_low = async |key| tree.leaf_low(key).await.unwrap();
        assert_eq!((leaf_low(u64::MAX - 1).await, leaf_low(u64::MAX).await), (0, u64::MAX));
        assert_eq!(tree.range(..).take(99).await.unwrap(), entries);
        let owned = async |region: KeyRange| {
            let mut options = CacheOptions::new(1 << 20);
            options.page_bytes = PAGE_BYTES;
            let cache = ComputeCache::<farlink_structures::btree::Tree>::new(options).unwrap();
            BTree::over(cache.own(worker, tree.structure().clone(), region).await.unwrap())
        };
        // The leaf is whoever's who owns all keys but the last, and no other's.
        let all_but_last = owned(KeyRange { low: 0, high: Some(u64::MAX) }).await;
        assert_eq!(all_but_last.get(3).await.unwrap(), Some(!3));
        assert!(all_but_last.get(u64::MAX).await.is_err());
        let last = owned(KeyRange::only(u64::MAX)).await;
        assert_eq!(last.get(u64::MAX).await.unwrap(), Some(0));
        assert!(last.get(u64::MAX - 1).await.is_err());
        drop((all_but_last, last));
        // It is full, and splits; the key belongs to its right half.
        assert_eq!(tree.get(u64::MAX).await.unwrap(), Some(0));
        assert_eq!(tree.upsert(u64::MAX, 1).await.unwrap(), Some(0));
        assert!(tree.insert(u64::MAX - 1, 2).await.unwrap());
        for key in 0..CAPACITY {
            assert_eq!(tree.remove(key).await.unwrap(), Some(!key));
        }
        assert_eq!(tree.range(..).take(99).await.unwrap(), [(u64::MAX - 1, 2), (u64::MAX, 1)]);
    });
    let report = cluster::check_tree(&fabric, NAME).unwrap();
    assert!(report.is_clean() && report.entries == 2, "{report:?}");
}

#[test]
fn a_range_of_one_key_has_that_key_alone() {
    for key in [0, 1, 77, u64::MAX - 1, u64::MAX] {
        let only = KeyRange::only(key);
        assert!(only.contains(key), "{key}");
        assert!(key == 0 || !only.contains(key - 1), "{key}");
        assert!(key == u64::MAX || !only.contains(key + 1), "{key}");
        assert!(key == 0 || !only.contains(0), "{key}");
        assert!(key == u64::MAX || !only.contains(u64::MAX), "{key}");
    }
}
