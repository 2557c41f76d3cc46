//! Two compute servers that each own a range of the keys of one tree: what is their own is done, also where it changes pages that
//! both use, and what is the other's is refused.

use farlink_offload::{Admission, ComputeCache, Durability, Holdings};
use farlink_runtime::{
    audit,
    error::Error,
    lock::{LockState, LockWord},
    page::LOCK,
};
use farlink_structures::{
    btree::{KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    raw, settings,
};
use proptest::prelude::*;

use crate::{
    scene::{CACHE_BYTES_ALL, CACHE_BYTES_MIN, Map, Member, Owned, assert_left_clean, cache, fabric, settle, sparse},
    steps::{NEVER, Step, step, take},
};

struct Owner {
    // Before its worker, and that before its compute server.
    tree: Owned,
    member: Member,
    cache: ComputeCache<Tree>,
    range: KeyRange,
}

struct Scene {
    owners: [Owner; 2],
    fabric: Cluster,
    cut: u64,
    model: Map,
}

impl Scene {
    /// A tree of so many keys, cut at the leaf of `near`.
    fn new(keys: u64, fill: f64, near: u64, admission: Admission, is_nasty: bool) -> Self {
        let model = sparse(keys);
        let fabric = fabric(if is_nasty { FabricProfile::Nasty } else { FabricProfile::Fast }, 256, &model, fill);
        let members = [1, 2].map(|seed| Member::join(&fabric, seed));
        let cut = members[0].worker.block_on(members[0].tree.leaf_low(near)).unwrap();
        let ranges = [KeyRange { low: 0, high: Some(cut) }, KeyRange { low: cut, high: None }];
        let mut ranges = ranges.into_iter();
        let owners = members.map(|member| {
            let cache = cache(CACHE_BYTES_MIN, admission);
            let range = ranges.next().expect("a range for each");
            Owner { tree: member.own(&cache, range), member, cache, range }
        });
        Self { owners, fabric, cut, model }
    }

    fn of(&self, key: u64) -> &Owner {
        &self.owners[usize::from(key >= self.cut)]
    }

    fn take(&mut self, key: u64, step: &Step) -> Result<(), String> {
        let owner = &self.owners[usize::from(key >= self.cut)];
        owner.member.worker.block_on(take(&owner.tree, &mut self.model, step, NEVER))
    }

    fn flush(&self) {
        for owner in &self.owners {
            owner.member.worker.block_on(owner.tree.access().flush()).unwrap();
            let memory = owner.cache.memory();
            assert!(memory.used() <= memory.limit, "{memory:?}");
        }
    }

    /// Writes all, and leaves.
    fn leave(self) -> (Cluster, Map) {
        self.flush();
        settle(self.owners.iter().map(|owner| &owner.member));
        (self.fabric, self.model)
    }

    /// Writes all, leaves, and judges what is there.
    fn close(self, context: &str) {
        let (fabric, model) = self.leave();
        assert_left_clean(&fabric, &model, context);
    }
}

fn is_outside<T: std::fmt::Debug>(outcome: Result<T, Error>) {
    assert!(matches!(outcome, Err(Error::OutsidePartition { .. })), "{outcome:?}");
}

#[test]
fn what_fits_needs_no_atomics_and_is_written_once_it_must_be() {
    let mut scene = Scene::new(4000, 0.7, 20_000, Admission::Always, false);
    let keys: Vec<u64> = scene.model.keys().copied().collect();
    // Their logs come to have the segments that it takes.
    for &key in &keys {
        scene.take(key, &Step::Update(key, key ^ 5)).unwrap();
    }
    scene.flush();
    let before = [0, 1].map(|owner: usize| {
        let owner = &scene.owners[owner];
        (owner.member.worker.counters(), owner.tree.access().counters().total())
    });
    for key in keys {
        scene.take(key, &Step::Update(key, key ^ 7)).unwrap();
        // One in four: a leaf has room for as many.
        if key % 40 == 0 {
            scene.take(key, &Step::Insert(key + 1, 1)).unwrap();
        }
        scene.take(key, &Step::Get(key)).unwrap();
    }
    scene.flush();
    for (owner, (before, cache_before)) in scene.owners.iter().zip(before) {
        let did = owner.member.worker.counters() - before;
        let cache = owner.tree.access().counters().total();
        assert_eq!((did.splits, did.two_sided, did.atomics), (0, 0, 0), "{did:?}");
        // A page is written to the log first.
        let pages = cache.write_backs - cache_before.write_backs;
        assert!(pages < did.writes && did.writes <= 2 * pages, "{pages} write-backs: {did:?}");
        assert!(cache.evictions - cache_before.evictions > 100, "the cache holds it all: {cache:?}");
    }
    scene.close("what fits");
}

#[test]
fn others_keys_are_refused() {
    let scene = Scene::new(4000, 0.7, 20_000, Admission::Always, false);
    let cut = scene.cut;
    for (owner, keys) in scene.owners.iter().zip([[cut, cut + 5, 39_990, u64::MAX], [0, 5, cut - 10, cut - 1]]) {
        owner.member.worker.block_on(async {
            for key in keys {
                is_outside(owner.tree.get(key).await);
                is_outside(owner.tree.insert(key, 1).await);
                is_outside(owner.tree.upsert(key, 1).await);
                is_outside(owner.tree.update(key, 1).await);
                is_outside(owner.tree.remove(key).await);
                is_outside(owner.tree.range(key..=key).take(1).await);
                is_outside(owner.tree.range(key..=key).descending().take(1).await);
            }
            is_outside(owner.tree.range(..).take(usize::MAX).await);
            is_outside(owner.tree.len().await);
            is_outside(owner.tree.range(..).descending().take(usize::MAX).await);
        });
    }
    let (low, high) = (&scene.owners[0], &scene.owners[1]);
    let below = low.member.worker.block_on(low.tree.range(..cut).take(usize::MAX)).unwrap();
    let above = high.member.worker.block_on(high.tree.range(cut..).descending().take(usize::MAX)).unwrap();
    assert_eq!(below.len() + above.len(), 4000);
    let is_in = |owner: &Owner, key: u64| owner.range.contains(key);
    assert!(below.iter().all(|&(key, _)| is_in(low, key)) && above.iter().all(|&(key, _)| is_in(high, key)));
    scene.close("others' keys");
}

#[test]
fn splits_under_private_parents_are_done() {
    let mut scene = Scene::new(4000, 0.6, 20_000, Admission::Frequency, true);
    for from in [5000, 30_000] {
        scene.take(from, &Step::InsertRun(from, 50)).unwrap();
        assert!((from..from + 50).all(|key| scene.model.contains_key(&key)), "an insert was refused");
        assert!(scene.of(from).member.worker.counters().splits > 2);
    }
    scene.close("private splits");
}

/// The tree grows from a few pages by splits on both sides of the cut, in turn, so that each owner finds the shared pages changed
/// by the other; then it shrinks.
#[test]
fn shared_pages_split_and_merge_whoever_changed_them_last() {
    for (keys, is_nasty) in [(60, false), (60, true), (4000, false)] {
        let mut scene = Scene::new(keys, 0.9, keys * 5, Admission::Always, is_nasty);
        let cut = scene.cut;
        for round in 0..40 {
            scene.take(cut, &Step::InsertRun(cut + round * 100, 100)).unwrap();
            scene.take(0, &Step::InsertRun(round * 3, 3)).unwrap();
            let down = cut.saturating_sub(round * 7 + 7);
            scene.take(down, &Step::InsertRun(down, 7.min(cut - down))).unwrap();
        }
        scene.flush();
        let check = |scene: &Scene| {
            let report = scene.owners[0].member.worker.block_on(scene.owners[0].member.tree.check()).unwrap();
            assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{report:?}");
            assert_eq!(report.entries as usize, scene.model.len());
        };
        check(&scene);
        let did = scene.owners.iter().map(|owner| owner.member.worker.counters());
        assert!(did.clone().all(|did| did.splits > 0), "no splits");
        assert!(did.map(|did| did.atomics).sum::<u64>() > 0, "no shared page was locked");
        let keys: Vec<u64> = scene.model.keys().copied().collect();
        let (below, above) = keys.split_at(keys.partition_point(|&key| key < cut));
        for pair in 0..below.len().max(above.len()) {
            for key in [below.get(pair), above.get(pair)].into_iter().flatten() {
                scene.take(*key, &Step::Remove(*key)).unwrap();
            }
        }
        scene.flush();
        check(&scene);
        scene.close("shared pages");
    }
}

/// A shared page splits, and its left half is the lower owner's alone. The upper owner's root still leads there.
#[test]
fn a_page_that_was_shared_may_be_the_other_owners_alone() {
    let mut scene = Scene::new(4000, 0.9, 1800, Admission::Frequency, false);
    let cut = scene.cut;
    scene.take(cut, &Step::Get(cut)).unwrap();
    scene.take(0, &Step::InsertRun(cut - 300, 300)).unwrap();
    // More than its cache can hold.
    let keys: Vec<u64> = scene.model.range(cut..).map(|(&key, _)| key).collect();
    for &key in keys.iter().rev().chain(&keys) {
        scene.take(key, &Step::Get(key)).unwrap();
    }
    scene.close("a half of a page");
}

/// A page that is freed gets a version that nothing in it had, also if it was not changed since it was written: who has read
/// it by an old link notices.
#[test]
fn a_freed_page_has_a_new_version() {
    let mut scene = Scene::new(600, 0.5, 3000, Admission::Always, false);
    let keys: Vec<u64> = scene.model.keys().copied().filter(|&key| key < scene.cut).collect();
    let bare = &scene.owners[0].member;
    let mut leaves = bare.worker.block_on(async {
        let mut leaves = Vec::new();
        for &key in &keys {
            leaves.push(raw::leaf_of(bare.tree.access(), key).await.unwrap());
        }
        leaves
    });
    leaves.dedup();
    let locks = |scene: &Scene| -> Vec<LockWord> {
        let worker = &scene.owners[0].member.worker;
        let words = leaves.iter().map(|&leaf| worker.block_on(worker.read(leaf, 8)).unwrap()[LOCK]);
        words.map(LockWord::from_word).collect()
    };
    let mut freed = 0;
    for &key in &keys {
        let before = locks(&scene);
        scene.take(key, &Step::Remove(key)).unwrap();
        // What frees pages runs as a task, and so does the write-back.
        scene.flush();
        scene.owners[0].member.maintain();
        for (before, after) in before.into_iter().zip(locks(&scene)) {
            let (was_free, is_free) = (before.state() == LockState::Free, after.state() == LockState::Free);
            assert!(after == before || after.version() > before.version(), "{before:?}, then {after:?}");
            freed += u32::from(is_free && !was_free);
        }
    }
    assert!(freed > 10, "{freed} pages were freed");
    scene.close("freed pages");
}

#[test]
fn everything_is_removed_up_to_the_edges_and_comes_back() {
    for near in [20_000, 150, 39_980] {
        let mut scene = Scene::new(4000, 0.9, near, Admission::Always, false);
        let cut = scene.cut;
        // Towards the edge from both sides, so that what merges last lies there.
        let keys: Vec<u64> = scene.model.keys().copied().collect();
        let (below, above) = keys.split_at(keys.partition_point(|&key| key < cut));
        for &key in below.iter().chain(above.iter().rev()) {
            scene.take(key, &Step::Remove(key)).unwrap();
        }
        assert!(scene.model.is_empty());
        scene.flush();
        let report = scene.owners[0].member.worker.block_on(scene.owners[0].member.tree.check()).unwrap();
        assert!(report.problem_count == 0 && report.entries == 0, "{report:?}");
        assert!(report.pages() < 60, "{} pages are left of {} entries", report.pages(), keys.len());
        for &key in &keys {
            scene.take(key, &Step::Insert(key, 5)).unwrap();
        }
        assert_eq!(scene.model.len(), keys.len());
        // One owner for all of it can do what two could not.
        let (fabric, mut model) = scene.leave();
        let member = Member::join(&fabric, 3);
        let cache = cache(CACHE_BYTES_MIN, Admission::Always);
        let tree = member.own(&cache, KeyRange::ALL);
        let worker = &member.worker;
        let all = [Step::InsertRun(0, 3000), Step::RemoveRun(0, u64::MAX), Step::InsertRun(cut, 3)];
        for step in &all {
            worker.block_on(take(&tree, &mut model, step, &|_| false)).unwrap();
        }
        worker.block_on(tree.access().flush()).unwrap();
        drop((tree, member));
        let report = assert_left_clean(&fabric, &model, "one owner");
        assert_eq!(report.pages(), 1, "three entries need one page");
    }
}

/// The right neighbour of a region's last leaf is another owner's, so it merges with the left one.
#[test]
fn the_last_leaf_of_each_region_merges_with_its_left_neighbour() {
    let mut model = sparse(3000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.5);
    let members = [1, 2, 3, 4].map(|seed| Member::join(&fabric, seed));
    let cuts = [7000, 15_000, 23_000].map(|near| members[0].worker.block_on(members[0].tree.leaf_low(near)).unwrap());
    let ends = cuts.into_iter().map(Some).chain([None]);
    let lows = [0].into_iter().chain(cuts);
    let before = members[0].worker.block_on(members[0].tree.check()).unwrap();
    for (member, (low, high)) in members.iter().zip(lows.zip(ends)) {
        let cache = cache(CACHE_BYTES_MIN, Admission::Always);
        let tree = member.own(&cache, KeyRange { low, high });
        let last: Vec<u64> = model.range(low..high.unwrap_or(u64::MAX)).rev().map(|(&key, _)| key).take(4).collect();
        for key in last {
            member.worker.block_on(take(&tree, &mut model, &Step::Remove(key), NEVER)).unwrap();
        }
        member.worker.block_on(tree.access().close()).unwrap();
    }
    settle(&members);
    drop(members);
    let after = assert_left_clean(&fabric, &model, "last leaves");
    assert_eq!(after.pages_by_level[0], before.pages_by_level[0] - 4, "one leaf less for each region");
}

/// Caches that are dropped one after the other, with something in their logs or not, or after all was given up: the next ones use the
/// memory of their logs.
#[test]
fn the_memory_of_dropped_logs_is_used_again() {
    const TURNS: usize = 10;
    for (changes, gives_up) in [(0, false), (1, false), (1, true)] {
        let mut model = sparse(1000);
        let fabric = fabric(FabricProfile::Fast, 256, &model, 1.0);
        let member = Member::join(&fabric, 1);
        let worker = &member.worker;
        let mut used = Vec::new();
        for turn in 0..TURNS as u64 {
            let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
            let holdings = Holdings::new(member.tree.structure(), cache.clone());
            worker.block_on(holdings.take(worker, KeyRange::ALL)).unwrap();
            let tree: Owned = Ordered::over(
                worker.block_on(cache.own(worker, member.tree.structure().clone(), KeyRange::ALL)).unwrap(),
            );
            for key in (0..changes * 1000).step_by(10) {
                worker.block_on(tree.upsert(key, turn)).unwrap();
                model.insert(key, turn);
            }
            if gives_up {
                worker.block_on(holdings.give_up_all(worker)).unwrap();
            }
            drop((tree, holdings, cache));
            settle([&member]);
            used.push(worker.block_on(audit::memory(worker)).unwrap().used_bytes());
        }
        assert!(used[TURNS - 1] == used[2], "{changes} changes, gives up: {gives_up}: {used:?}");
        drop(member);
        assert_left_clean(&fabric, &model, "dropped logs");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: settings::from_env("FARLINK_MODEL_CASES", 16), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn two_owners_and_a_model(
        steps in prop::collection::vec((step(), any::<bool>()), 1..300),
        near in 100u64..29_000,
        fill in 0.5f64..1.0,
        tenth: bool,
        nasty: bool,
    ) {
        let admission = if tenth { Admission::Probability { leaf: 0.1, inner: 1.0 } } else { Admission::Frequency };
        let mut scene = Scene::new(3000, fill, near, admission, nasty);
        for (step, for_low) in &steps {
            let Some(step) = confined(step, &scene, *for_low) else { continue };
            let key = match step {
                Step::Get(key) | Step::Remove(key) => key,
                Step::Insert(key, _) | Step::Upsert(key, _) | Step::Update(key, _) => key,
                Step::Range(low, ..) | Step::InsertRun(low, _) | Step::RemoveRun(low, _) => low,
                Step::RemovePresent(_) => unreachable!("it became a removal"),
            };
            scene.take(key, &step).map_err(TestCaseError::fail)?;
        }
        scene.close("two owners");
    }
}

/// A step as one of the owners can take it.
fn confined(step: &Step, scene: &Scene, for_low: bool) -> Option<Step> {
    let (low, high) = if for_low { (0, scene.cut - 1) } else { (scene.cut, u64::MAX) };
    let end = |from: u64, count: u64| count.min(if from < scene.cut { scene.cut - from } else { u64::MAX });
    Some(match *step {
        Step::Range(a, b, descending, limit) => {
            let (a, b) = (a.max(low), b.min(high));
            (a <= b).then_some(Step::Range(a, b, descending, limit))?
        }
        Step::InsertRun(from, count) => Step::InsertRun(from, end(from, count)),
        Step::RemoveRun(from, count) => Step::RemoveRun(from, end(from, count)),
        Step::RemovePresent(index) => {
            let key = *scene.model.keys().nth(index.index(scene.model.len().max(1)))?;
            Step::Remove(key)
        }
        ref other => other.clone(),
    })
}
