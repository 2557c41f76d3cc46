//! Every answer equals brute force on a quiet tree.

use farlink_runtime::{error::Error, operation::Run};
use farlink_structures::rtree::{BadRect, Entry, Query, RTree, RTreeOptions, Rect, ops::Insert};
use farlink_tests::settings;
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::a_rect,
    model::{clean, grows_and_shrinks, same},
    scene::{create, scene},
};

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
            grows_and_shrinks::<2>(&scene.worker, seed, ops, 1.0).await.unwrap();
        });
    }

    #[test]
    fn in_three_dimensions_too(seed: u64, ops in 0usize..600) {
        let scene = scene(16 << 20);
        scene.worker.block_on(async {
            grows_and_shrinks::<3>(&scene.worker, seed, ops, 1.0).await.unwrap();
        });
    }
}

/// Areas, and squares of distances, that are too large or too small for a number.
#[test]
fn huge_and_tiny_coordinates_are_as_good() {
    for scale in [1e300, 1e-310] {
        let scene = scene(16 << 20);
        let grown = scene.worker.block_on(grows_and_shrinks::<2>(&scene.worker, 31, 1000, scale));
        grown.unwrap();
    }
}

/// Pages of 16 KiB, with hundreds of entries.
#[test]
fn large_pages_are_split_and_condensed() {
    const ENTRIES: u64 = 30_000;
    let scene = scene(64 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(29);
        let options = RTreeOptions { page_bytes: 16384, ..RTreeOptions::default() };
        let tree = RTree::<_, 2>::create(&scene.worker, "large pages", options).await.unwrap();
        let mut model: Vec<Entry> = (0..ENTRIES).map(|number| (a_rect(&mut rng, 3), number)).collect();
        tree.bulk_load(model.iter().copied(), 0.45).await.unwrap();
        let counters = scene.worker.counters();
        let corner = Query::Intersects(Rect::new([-20.0; 2], [-10.0; 2]).unwrap());
        for &(rect, payload) in model.iter().filter(|entry| corner.matches(&entry.0)) {
            assert!(tree.delete(rect, payload).await.unwrap());
        }
        model.retain(|entry| !corner.matches(&entry.0));
        assert!((scene.worker.counters() - counters).merges > 3);
        clean(&tree, model.len()).await.unwrap();
        for payload in ENTRIES..ENTRIES + 3000 {
            let low = [rng.random_range(0.0..3.0), rng.random_range(0.0..3.0)];
            let rect = Rect::point(low).unwrap();
            tree.insert(rect, payload).await.unwrap();
            model.push((rect, payload));
        }
        assert!((scene.worker.counters() - counters).splits > 3);
        clean(&tree, model.len()).await.unwrap();
        same(&tree, &model, &mut rng).await.unwrap();
    });
}

#[test]
fn every_size_is_bulk_loaded_well_and_goes_on_growing() {
    let scene = scene(64 << 20);
    // Others in each run. No factor of 20, so that page sizes and fills take turns.
    let step: usize = settings::from_env("FARLINK_RTREE_SIZE_STEP", 23);
    let first = 200 + SmallRng::seed_from_u64(settings::seed("sizes of bulk loads")).random_range(0..step);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(7);
        for count in (1..200).chain((first..5000).step_by(step)).chain([5000]) {
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
