//! Every answer equals brute force on a quiet tree.

use farlink_runtime::{access::Access, error::Error, operation::Run, worker::Handle};
use farlink_structures::rtree::{BadRect, Entry, Query, RTree, RTreeOptions, Rect, Tree, ops::Insert};
use farlink_tests::settings;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::entries::{a_query, a_rect, sorted};
use crate::scene::{create, scene};

/// Whatever can be asked has the answer of brute force.
pub(crate) async fn same<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &[Entry<D>],
    rng: &mut SmallRng,
) -> Result<(), Error> {
    assert_eq!(tree.len().await?, model.len() as u64);
    assert_eq!(tree.is_empty().await?, model.is_empty());
    for _ in 0..6 {
        let query = a_query(rng);
        let expected: Vec<Entry<D>> = sorted(model.iter().filter(|(rect, _)| query.matches(rect)).copied().collect());
        assert_eq!(sorted(tree.search(query).all().await?), expected, "{query:?}");
        assert_eq!(tree.count(query).await?, expected.len() as u64);
        let most = rng.random_range(0..20);
        let (mut cursor, mut found) = (tree.search(query), Vec::new());
        while let Some(entry) = cursor.next().await? {
            found.push(entry);
        }
        assert_eq!(found, expected, "by a cursor, {query:?}");
        let first = tree.search(query).take(most).await?;
        assert_eq!(first, expected[..most.min(expected.len())], "the first {most}, {query:?}");
        assert!(tree.search(query).take(usize::MAX).await? == expected, "all as the first, {query:?}");
    }
    let to: [f64; D] = std::array::from_fn(|_| f64::from(rng.random_range(-30..30)));
    let mut expected: Vec<f64> = model.iter().map(|(rect, _)| rect.distance_squared(&to)).collect();
    expected.sort_by(f64::total_cmp);
    let (mut cursor, mut found) = (tree.search(Query::Nearest(to)), Vec::new());
    while let Some((rect, _)) = cursor.next().await? {
        found.push(rect.distance_squared(&to));
    }
    assert_eq!(found, expected, "the nearest to {to:?}");
    let first = tree.search(Query::Nearest(to)).take(usize::MAX).await?;
    let distances: Vec<f64> = first.iter().map(|(rect, _)| rect.distance_squared(&to)).collect();
    assert!(distances == expected, "all as the nearest to {to:?}");
    let mut cursor = tree.search(Query::Nearest(to));
    let mut found: Vec<Entry<D>> = cursor.next().await?.into_iter().collect();
    found.extend(cursor.all().await?);
    assert!(found == first, "the nearest to {to:?}, and then all others");
    Ok(())
}

pub(crate) async fn clean<A: Access<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    entries: usize,
) -> Result<(), Error> {
    let report = tree.check().await?;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.entries, entries as u64);
    Ok(())
}

/// So many operations on a tree that holds the entries of `model`: entries come, move and go, in the tree and in the model.
pub(crate) async fn some<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &mut Vec<Entry<D>>,
    rng: &mut SmallRng,
    ops: usize,
) -> Result<(), Error> {
    for _ in 0..ops {
        let (rect, payload) = (a_rect(rng, 3), rng.random_range(0..10));
        match rng.random_range(0..8) {
            0 if !model.is_empty() => {
                let entry = model.swap_remove(rng.random_range(0..model.len()));
                assert!(tree.delete(entry.0, entry.1).await?);
            }
            1 if !model.is_empty() => {
                let index = rng.random_range(0..model.len());
                assert!(tree.update(model[index].0, model[index].1, rect).await?);
                model[index].0 = rect;
            }
            2 => {
                let there = model.iter().position(|entry| *entry == (rect, payload));
                assert_eq!(tree.delete(rect, payload).await?, there.is_some());
                there.map(|index| model.swap_remove(index));
            }
            _ => {
                tree.insert(rect, payload).await?;
                model.push((rect, payload));
            }
        }
    }
    Ok(())
}

/// Entries come, move and go; in the end all go.
pub(crate) async fn grows_and_shrinks<const D: usize>(worker: &Handle, seed: u64, ops: usize) -> Result<(), Error> {
    let (tree, mut rng, mut model) =
        (create::<D>(worker).await?, SmallRng::seed_from_u64(seed), Vec::<Entry<D>>::new());
    for first in (0..ops).step_by(200) {
        some(&tree, &mut model, &mut rng, (ops - first).min(200)).await?;
        same(&tree, &model, &mut rng).await?;
        clean(&tree, model.len()).await?;
    }
    while !model.is_empty() {
        let entry = model.swap_remove(rng.random_range(0..model.len()));
        assert!(tree.delete(entry.0, entry.1).await?, "{entry:?} of {} left", model.len());
    }
    same(&tree, &model, &mut rng).await?;
    clean(&tree, 0).await?;
    assert_eq!(tree.check().await?.pages(), 1, "an empty tree is its root");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", 8),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn all_answers_are_those_of_brute_force(seed: u64, ops in 0usize..1500) {
        let scene = scene(16 << 20);
        scene.worker.block_on(async {
            grows_and_shrinks::<2>(&scene.worker, seed, ops).await.unwrap();
        });
    }

    #[test]
    fn in_three_dimensions_too(seed: u64, ops in 0usize..600) {
        let scene = scene(16 << 20);
        scene.worker.block_on(async {
            grows_and_shrinks::<3>(&scene.worker, seed, ops).await.unwrap();
        });
    }
}

#[test]
fn every_size_is_bulk_loaded_well_and_goes_on_growing() {
    let scene = scene(64 << 20);
    let step: usize = settings::from_env("FARLINK_RTREE_SIZE_STEP", 23);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(7);
        for count in (1..200).chain((200..5000).step_by(step)).chain([5000]) {
            let name = format!("of {count}");
            let page_bytes = if count % 5 == 0 { [2048, 4096, 8192, 16384][count / 5 % 4] } else { 1024 };
            let options = RTreeOptions { page_bytes, ..RTreeOptions::default() };
            let tree = RTree::<_, 2>::create(&scene.worker, &name, options).await.unwrap();
            let mut model: Vec<Entry> = (0..count).map(|number| (a_rect(&mut rng, 3), number as u64)).collect();
            let fill = [1.0, 0.7, 0.9, 0.3][count % 4];
            assert_eq!(tree.bulk_load(model.iter().copied(), fill).await.unwrap(), count as u64);
            clean(&tree, count).await.unwrap();
            for number in 0..10 {
                let entry = (a_rect(&mut rng, 3), number);
                tree.insert(entry.0, entry.1).await.unwrap();
                model.push(entry);
            }
            clean(&tree, count + 10).await.unwrap();
            if count % 7 == 0 {
                same(&tree, &model, &mut rng).await.unwrap();
            }
            assert!(matches!(tree.bulk_load([], 0.9).await, Err(Error::NotEmpty)));
            farlink_runtime::catalog::destroy(&scene.worker, &name).await.unwrap();
        }
    });
}

#[test]
fn what_is_no_rectangle_is_refused() {
    let new = |low, high| Rect::<2>::new(low, high).unwrap_err();
    assert_eq!(new([0.0, f64::NAN], [1.0; 2]), BadRect::NotFinite { dimension: 1 });
    assert_eq!(new([0.0; 2], [f64::INFINITY, 1.0]), BadRect::NotFinite { dimension: 0 });
    assert_eq!(new([0.0, 2.0], [1.0; 2]), BadRect::Inverted { dimension: 1 });
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = create::<2>(&scene.worker).await.unwrap();
        let before = scene.worker.counters();
        let refused = |error: Result<(), Error>| matches!(error, Err(Error::BadOption { option: "rectangle", .. }));
        assert!(refused(tree.insert(Rect::EVERYTHING, 1).await));
        assert!(refused(tree.update(Rect::point([0.0; 2]).unwrap(), 1, Rect::EVERYTHING).await.map(drop)));
        assert_eq!(scene.worker.counters(), before, "something was sent");
        // Nor does what comes from elsewhere get in.
        assert!(refused(tree.access().execute(&Insert { rect: Rect::EVERYTHING, payload: 1 }).await));
        assert!(refused(tree.bulk_load([(Rect::EVERYTHING, 1)], 0.9).await.map(drop)));
        clean(&tree, 0).await.unwrap();
    });
}

/// Of the two zeros only one is in the tree: the other one has another place in the order.
#[test]
fn zeros_are_one() {
    let rect = Rect::new([-0.0, 0.0], [0.0, -0.0]).unwrap();
    assert!(rect.low().into_iter().chain(rect.high()).all(|at| at.to_bits() == 0), "{rect:?}");
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = create::<2>(&scene.worker).await.unwrap();
        for number in 0..100 {
            let zero = |bit: u32| if number >> bit & 1u64 == 0 { 0.0 } else { -0.0 };
            tree.insert(Rect::point([zero(0), zero(1)]).unwrap(), number).await.unwrap();
        }
        let first = tree.search(Query::Intersects(Rect::EVERYTHING)).take(70).await.unwrap();
        assert!(first.iter().map(|entry| entry.1).eq(0..70), "{first:?}");
    });
}

/// More equal entries than a part has stay together.
#[test]
fn equal_entries_are_no_end_of_a_part() {
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = create::<2>(&scene.worker).await.unwrap();
        let rect = Rect::point([1.0, 2.0]).unwrap();
        for _ in 0..100 {
            tree.insert(rect, 7).await.unwrap();
        }
        for query in [Query::Intersects(rect), Query::Nearest([0.0; 2])] {
            let (mut cursor, mut count) = (tree.search(query), 0);
            while cursor.next().await.unwrap().is_some() {
                count += 1;
            }
            assert_eq!(count, 100, "{query:?}");
        }
    });
}
