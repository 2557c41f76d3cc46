//! Room: pins, size classes, bypass pages, and the promises about memory and counters.

use std::sync::{Arc, Mutex};

use crate::support::*;
use farlink_cache::{Admission, CacheError, CacheOptions, NewPage, PageCache, PageId, SizeClass};

const KEYS: u64 = under_miri(20_000, 3000);

fn test_bed(admission: Admission) -> TestBed {
    TestBed::new((0..KEYS).map(|key| (key, key)), class(256), small(256, admission), seed(4))
}

/// Reserves pages until there is no room for another one.
async fn reserve_all(handle: &Handle, class: SizeClass) -> (Vec<NewPage<'_, MapStore, TreeLayout>>, Error) {
    let mut held = Vec::new();
    for id in 100_000.. {
        match handle.reserve(PageId::new(id).unwrap(), class).await {
            Ok(page) => held.push(page),
            Err(error) => return (held, error),
        }
    }
    unreachable!()
}

#[test]
fn reserving_everything_is_an_error_not_a_hang() {
    let test_bed = test_bed(Admission::Always);
    let error = test_bed.run(|tree| async move {
        let (held, error) = reserve_all(&tree.handle, tree.class).await;
        (held.len(), error)
    });
    assert!(matches!(error, (150.., CacheError::NoRoom { last_write_error: None, .. })), "{error:?}");
    assert!(error.1.to_string().contains("hold every frame"), "{}", error.1);
    assert_eq!(test_bed.run(|tree| async move { tree.get(1).await }).unwrap(), Some(1));
}

#[test]
fn anchoring_everything_is_an_error_not_a_hang() {
    let test_bed = test_bed(Admission::Always);
    let pages: Vec<u64> = test_bed.store.world().pages.keys().copied().collect();
    let (anchored, error) = test_bed.run(move |tree| async move {
        let mut anchors = Vec::new();
        for page in pages {
            match tree.handle.anchor(PageId::new(page).unwrap(), tree.class).await {
                Ok(anchor) => anchors.push(anchor),
                Err(error) => return (anchors.len(), error),
            }
        }
        unreachable!()
    });
    assert!(anchored > 150 && matches!(error, CacheError::NoRoom { .. }), "{anchored} {error}");
    test_bed.run(|tree| async move {
        for key in (0..KEYS).step_by(7) {
            assert_eq!(tree.get(key).await.unwrap(), Some(key));
        }
    });
}

#[test]
fn an_anchored_page_stays_under_pressure() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        let reads = test_bed.run(|tree| async move {
            let page = tree.path(500).await.unwrap()[1].id();
            // A bypass page cannot be kept; once it has left, it can.
            let anchor = loop {
                if let Ok(anchor) = tree.handle.anchor(page, tree.class).await {
                    break anchor;
                }
            };
            for key in (0..KEYS).step_by(3) {
                assert_eq!(tree.get(key).await.unwrap(), Some(key));
            }
            let before = tree.handle.store().world().reads;
            assert_eq!(tree.handle.enter(&anchor).unwrap().id(), page);
            assert_eq!(tree.handle.load(page, tree.class).await.unwrap().id(), page);
            tree.handle.store().world().reads - before
        });
        assert_eq!(reads, 0);
    }
}

#[test]
fn dirty_bypass_pages_are_written_and_gone() {
    let test_bed = test_bed(Admission::Probability { leaf: 0.0, inner: 1.0 });
    test_bed.run(|tree| async move {
        for key in 0..KEYS {
            assert_eq!(tree.get(key).await.unwrap(), Some(key));
        }
        // Full by now: no leaf is admitted any more, and the inner pages have driven the old ones out or not.
        for key in (0..KEYS).rev() {
            tree.update(key, |old| old.unwrap() + 1).await.unwrap();
        }
    });
    let bypass_frames = test_bed.tree.handle.counters().levels[0].refusals;
    assert!(bypass_frames > KEYS / 20, "{bypass_frames} leaves were refused");
    // Their write-backs have ended with the tasks: what is not a bypass page is all that a flush can find.
    let before = test_bed.store.world().writes;
    assert!(test_bed.flushed().into_iter().eq((0..KEYS).map(|key| (key, key + 1))));
    let resident = test_bed.cache.len() as u64;
    assert!(test_bed.store.world().writes - before <= resident, "bypass_frames are no longer dirty");
    assert!(resident < 200);
}

#[test]
fn counters_add_up() {
    for admission in ADMISSIONS {
        let test_bed = test_bed(admission);
        let before = test_bed.tree.handle.counters().total();
        let levels = u64::from(Image(&test_bed.store.world().pages[&ROOT]).level()) + 1;
        test_bed.run(|tree| async move {
            for key in (0..KEYS).step_by(11) {
                assert_eq!(tree.get(key).await.unwrap(), Some(key));
            }
        });
        let after = test_bed.tree.handle.counters().total();
        let accesses = KEYS.div_ceil(11) * levels;
        assert_eq!(after.hits - before.hits + after.misses - before.misses, accesses, "{admission:?}");
        assert_eq!(after.misses, test_bed.store.world().reads);
        let gone = after.evictions + after.refusals;
        assert_eq!(after.misses, gone + test_bed.cache.len() as u64, "what came is here or gone");
        let (cache, tree) = (test_bed.cache, test_bed.tree);
        drop((test_bed.executor, test_bed.store));
        let counters = tree.handle.counters();
        assert_eq!(cache.counters(), counters, "of handles that live");
        let other = cache.handle(tree.handle.store().clone(), 1).unwrap();
        assert_eq!(other.counters(), Default::default());
        drop((tree, other));
        assert_eq!(cache.counters(), counters, "and of those that have ended");
    }
}

/// One page in each block is enough to keep the memory from pages of another size, and the error says that it is so.
#[test]
fn who_has_the_memory_is_said_to_pages_of_another_size() {
    let test_bed = test_bed(Admission::Always);
    let error = test_bed.run(|tree| async move {
        let _held = reserve_all(&tree.handle, tree.class).await;
        let larger = class(1024);
        tree.handle.reserve(PageId::new(1_000_000).unwrap(), larger).await.unwrap_err()
    });
    let said = error.to_string();
    assert!(
        matches!(error, CacheError::NoRoom { .. }) && said.contains("for one of 1024 B: pages of other sizes"),
        "{said}"
    );
}

/// Pages without links: page `n` of a class has `n` in every word but those that the layout looks at.
fn plant_flat(world: &Mutex<World>, pages: std::ops::Range<u64>, class: SizeClass) {
    for page in pages {
        let image = crate::support::page::image(page, 0, 0, 0, &[], class.words());
        let image = image.into_iter().enumerate().map(|(at, word)| if at < 4 { word } else { page }).collect();
        lock(world).pages.insert(page, image);
    }
}

/// Looks at such pages.
async fn visit(handle: &Handle, pages: std::ops::Range<u64>, class: SizeClass, cache: &PageCache<TreeLayout>) {
    for page in pages {
        let id = PageId::new(page).unwrap();
        let found = handle.load(id, class).await.unwrap();
        let sum: u64 = found
            .read(|words| words[4..].iter().map(|word| word.load(std::sync::atomic::Ordering::Relaxed)).sum())
            .unwrap();
        assert_eq!(sum, page * (class.words() as u64 - 4));
        drop(found);
        let memory = cache.memory();
        assert!(memory.used() <= memory.limit, "{memory:?}");
    }
}

#[test]
fn memory_changes_hands_between_size_classes() {
    let caches = [(64 << 10, 1024), (100_000, 256), (300_000, 4096), (1 << 20, 1024), (3_333_333, 4096), (4 << 20, 64)];
    for (bytes, page_bytes) in caches.into_iter().take(under_miri(6, 1) as usize) {
        let executor = Executor::alone(seed(9));
        let world = std::sync::Arc::default();
        let store = MapStore::new(&world, &executor);
        let mut options = CacheOptions::new(bytes);
        (options.page_bytes, options.handles_max) = (page_bytes, 4);
        let cache = PageCache::new(TreeLayout, options).unwrap();
        let handle = cache.handle(store, 5).unwrap();
        let mut next = 1;
        let mut phases = Vec::new();
        let classes = [1024, 64, 65536, 4096, 1024, 128, 16384, 2048, 8192, 256, 32768, 512, 64];
        let fitting = classes.into_iter().filter(|&bytes| bytes <= cache.page_bytes_max());
        for class_bytes in fitting.take(under_miri(13, 4) as usize) {
            let class = class(class_bytes);
            // Half as many again as there is room for.
            let pages = next..next + (bytes / (class_bytes + 64) * 3 / 2) as u64;
            plant_flat(&world, pages.clone(), class);
            next = pages.end;
            phases.push((pages, class));
        }
        let shared = std::sync::Arc::clone(&cache);
        executor.block_on(async move {
            for (pages, class) in phases.iter().chain(phases.iter().rev()) {
                visit(&handle, pages.clone(), *class, &shared).await;
            }
        });
    }
}

/// Pages smaller than the usual ones are more than the table was made for: what it grows by counts from the beginning.
#[test]
fn a_cache_full_of_small_pages_stays_within_its_memory() {
    for bytes in [300_000, 1 << 20, 3_333_333].into_iter().take(under_miri(3, 1) as usize) {
        let executor = Executor::alone(seed(9));
        let world = std::sync::Arc::default();
        let mut options = CacheOptions::new(bytes);
        (options.page_bytes, options.handles_max) = (4096, 4);
        let cache = PageCache::new(TreeLayout, options).unwrap();
        let handle = cache.handle(MapStore::new(&world, &executor), 5).unwrap();
        let class = class(64);
        let pages = 1..under_miri(bytes as u64 / 128 * 3 / 2, 1000);
        plant_flat(&world, pages.clone(), class);
        let shared = std::sync::Arc::clone(&cache);
        executor.block_on(async move { visit(&handle, pages, class, &shared).await });
        let memory = cache.memory();
        assert!(memory.used() > memory.limit / 10 * 8 || cfg!(miri), "{memory:?}");
    }
}

#[test]
fn pages_larger_than_a_cache_takes_are_refused() {
    let test_bed = test_bed(Admission::Always);
    test_bed.run(|tree| async move {
        assert_eq!(tree.handle.cache().page_bytes_max(), 4096);
        let refused = tree.handle.load(PageId::new(99_999).unwrap(), class(8192)).await.unwrap_err();
        assert!(matches!(refused, CacheError::TooLarge { bytes: 8192, max: 4096 }), "{refused}");
        let refused = tree.handle.reserve(PageId::new(99_999).unwrap(), class(65536)).await.unwrap_err();
        assert!(matches!(refused, CacheError::TooLarge { .. }), "{refused}");
    });
    let mut options = CacheOptions::new(512 << 10);
    options.page_bytes = 16384;
    assert!(PageCache::new(TreeLayout, options).unwrap_err().to_string().contains("page_bytes"));
    options.bytes = 1 << 20;
    assert_eq!(PageCache::new(TreeLayout, options).unwrap().page_bytes_max(), 65536);
}

/// A tree whose pages are of the largest size, in a cache that holds 50 of them.
#[test]
fn a_tree_of_the_largest_pages_works() {
    const KEYS: u64 = under_miri(2_000_000, 6000);
    let mut options = small(65536, Admission::Frequency);
    options.bytes = 4 << 20;
    let test_bed = TestBed::new((0..KEYS).map(|key| (key * 2, key)), class(65536), options, seed(8));
    test_bed.run(|tree| async move {
        for key in (0..KEYS).step_by(997) {
            assert_eq!(tree.get(key * 2).await.unwrap(), Some(key));
            assert_eq!(tree.update(key * 2 + 1, |_| key).await.unwrap(), None);
        }
        for key in (0..KEYS).step_by(997) {
            assert_eq!(tree.remove(key * 2).await.unwrap(), Some(key));
        }
    });
    let memory = test_bed.cache.memory();
    assert!(memory.used() <= memory.limit, "{memory:?}");
    let model = (0..KEYS).map(|key| (key * 2 + u64::from(key % 997 == 0), key));
    assert!(test_bed.flushed().into_iter().eq(model));
}

/// A look at a page that went, whose block others had, and that came back into its frame with other memory.
#[test]
fn a_page_is_not_changed_where_it_was_before_its_block_changed_hands() {
    let executor = Executor::alone(seed(9));
    let world = std::sync::Arc::default();
    let mut options = CacheOptions::new(64 << 10);
    (options.admission, options.handles_max) = (Admission::Always, 4);
    let cache = PageCache::new(TreeLayout, options).unwrap();
    let handle = cache.handle(MapStore::new(&world, &executor), 5).unwrap();
    let (large, small) = ((1..31, class(4096)), class(2048));
    plant_flat(&world, large.0.clone(), large.1);
    let came_back = executor.block_on(async move {
        let mut came_back = 0;
        for round in 0..under_miri(300, 4) {
            let page = 1 + round % 8;
            let id = PageId::new(page).unwrap();
            let held = handle.load(id, large.1).await.unwrap();
            // More pages of one size, and then of the other, than others leave room for.
            for (class, count) in [(small, 16), (large.1, 8)] {
                let mut reserved = Vec::new();
                for other in 0..count {
                    reserved.push(handle.reserve(PageId::new(1000 + other).unwrap(), class).await.unwrap());
                }
            }
            if handle.contains(id) {
                continue;
            }
            visit(&handle, 10..11 + round % 5, large.1, &cache).await;
            let back = handle.load(id, large.1).await.unwrap();
            let is_same_frame = held.bookmark().unwrap().0[0] == back.bookmark().unwrap().0[0];
            let memory = |page: &farlink_cache::Page<'_, _, _>| page.peek(<[_]>::as_ptr);
            came_back += u64::from(is_same_frame && memory(&held) != memory(&back));
            let seen = handle.update(&held, |change| {
                let seen = change.word(0, 9);
                change.set(0, 10, page);
                seen
            });
            assert_eq!(seen.unwrap_or(page), page, "words of another page were shown to be changed");
        }
        came_back
    });
    assert!(came_back > 0 || cfg!(miri), "no page came back into its frame with other memory");
}

/// Frames keep their size. A cache whose frames are all of the smallest one has more for others.
#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, many operations")]
fn after_the_smallest_pages_the_memory_is_for_others() {
    let executor = Executor::alone(seed(9));
    let world = Arc::default();
    let mut options = CacheOptions::new(4 << 20);
    options.page_bytes = 64;
    let cache = PageCache::new(TreeLayout, options).unwrap();
    let handle = cache.handle(MapStore::new(&world, &executor), 5).unwrap();
    plant_flat(&world, 1..40_001, class(64));
    executor.block_on(async move {
        visit(&handle, 1..40_001, class(64), &cache).await;
        let mut reserved = Vec::new();
        let full = loop {
            match handle.reserve(PageId::new(50_001 + reserved.len() as u64).unwrap(), class(512)).await {
                Ok(room) => reserved.push(room),
                Err(full) => break full,
            }
        };
        // 576 bytes each, beside the frames of the small ones. Those are not what the table grows by.
        let memory = cache.memory();
        println!("{} pages of 512 bytes: {memory:?}", reserved.len());
        assert!(memory.used() > memory.limit / 100 * 97, "after {} pages: {full}; {memory:?}", reserved.len());
        assert!(memory.used() <= memory.limit, "{memory:?}");
    });
}

/// The few frames that have a body are hard to draw among thousands of small ones that have lost theirs.
#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, many operations")]
fn large_pages_after_many_small_ones_find_each_others_room() {
    let executor = Executor::alone(seed(9));
    let world = Arc::default();
    let mut options = CacheOptions::new(1 << 20);
    options.admission = Admission::Always;
    let cache = PageCache::new(TreeLayout, options).unwrap();
    let handle = cache.handle(MapStore::new(&world, &executor), 5).unwrap();
    plant_flat(&world, 1..40_001, class(64));
    plant_flat(&world, 50_001..50_331, class(65536));
    executor.block_on(async move {
        visit(&handle, 1..40_001, class(64), &cache).await;
        visit(&handle, 50_001..50_031, class(65536), &cache).await;
        let mut reserved = Vec::new();
        for page in 60_001..60_006 {
            reserved.push(handle.reserve(PageId::new(page).unwrap(), class(65536)).await.unwrap());
        }
        for page in 50_031..50_331 {
            let loaded = handle.load(PageId::new(page).unwrap(), class(65536)).await.map(drop);
            loaded.unwrap_or_else(|error| panic!("after {} pages: {error}", page - 50_031));
        }
    });
}
