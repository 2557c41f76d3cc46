//! Admission by frequency: what was used often long ago gives way to what is used now.

use crate::support::*;
use farlink_cache::{Admission, CacheOptions, PageCache, PageId};

const KEYS: u64 = 20_000;
/// Keys that are used often: on two thirds of the pages that there is room for.
const HOT: u64 = 1100;
const OPS: u64 = 40_000;

/// Looks keys up, nine in ten from the hot ones, which begin at `from`; returns the share of the leaves that were cached.
async fn use_hot(tree: &Tree, random: &mut Random, from: u64, ops: u64) -> f64 {
    let before = tree.handle.counters().levels[0];
    for _ in 0..ops {
        let key = if random.below(10) == 0 { random.below(KEYS) } else { from + random.below(HOT) };
        assert_eq!(tree.get(key).await.unwrap(), Some(key));
    }
    let after = tree.handle.counters().levels[0];
    (after.hits - before.hits) as f64 / ops as f64
}

#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, many operations")]
fn a_hot_set_that_moves_is_followed() {
    let seed = seed(5);
    let test_bed = TestBed::new((0..KEYS).map(|key| (key, key)), class(256), small(256, Admission::Frequency), seed);
    test_bed.run(move |tree| async move {
        let mut random = Random(seed);
        let first = use_hot(&tree, &mut random, 1000, 5 * OPS).await;
        let moved = use_hot(&tree, &mut random, 11_000, OPS).await;
        let settled = use_hot(&tree, &mut random, 11_000, OPS).await;
        let shares = format!("{first:.3} before, {moved:.3} right after, {settled:.3} then");
        println!("{shares}");
        assert!(first > 0.85 && moved > 0.75 && settled > 0.82, "{shares}");
    });
}

#[test]
#[cfg_attr(miri, ignore = "no other code than elsewhere, many operations")]
fn a_page_that_is_not_cached_gets_hot_by_its_uses() {
    let seed = seed(6);
    let test_bed = TestBed::new((0..KEYS).map(|key| (key, key)), class(256), small(256, Admission::Frequency), seed);
    test_bed.run(move |tree| async move {
        let absent = PageId::new(1 << 40).unwrap();
        assert!(tree.handle.is_hot(absent, 0), "there is room");
        use_hot(&tree, &mut Random(seed), 1000, OPS).await;
        let hot = || (0..100).filter(|_| tree.handle.is_hot(absent, 0)).count();
        let before = hot();
        (0..500).for_each(|_| tree.handle.count_absent(absent));
        let after = hot();
        assert!(before < 30 && after > 90 && !tree.handle.contains(absent), "{before}, then {after} of 100");
    });
}

/// Also where the last block that there is memory for leaves much of it unused.
#[test]
fn uses_count_as_soon_as_a_page_has_to_go_for_another() {
    for (bytes, page_bytes) in [(64 << 10, 64), (4 << 20, 1024)].into_iter().take(under_miri(2, 1) as usize) {
        let (executor, class) = (Executor::alone(seed(7)), class(64));
        let world = std::sync::Arc::<std::sync::Mutex<World>>::default();
        let [root, leaf] = [1, 2].map(|page| PageId::new(page).unwrap());
        let image = |page: u64, level, links: &[(u64, u64)]| page::image(page, level, 0, 0, links, class.words());
        lock(&world).pages.insert(1, image(1, 1, &[(0, 2)]));
        lock(&world).pages.extend((2..60_000).map(|page| (page, image(page, 0, &[]))));
        let mut options = CacheOptions::new(bytes);
        options.page_bytes = page_bytes;
        let cache = PageCache::new(TreeLayout, options).unwrap();
        let handle = cache.handle(MapStore::new(&world, &executor), 5).unwrap();
        executor.block_on(async move {
            let (root, _leaf) = (handle.anchor(root, class).await.unwrap(), handle.anchor(leaf, class).await.unwrap());
            let link = || {
                let root = handle.enter(&root).unwrap();
                root.read(|words| page::View(words).value(0)).unwrap()
            };
            let follow = async || drop(handle.follow(&handle.enter(&root).unwrap(), link(), class).await.unwrap());
            follow().await;
            for page in 3.. {
                drop(handle.load(PageId::new(page).unwrap(), class).await.unwrap());
                if handle.counters().levels[0].evictions != 0 {
                    break;
                }
            }
            for _ in 0..1000 {
                follow().await;
            }
            let uses = handle.uses(link()).expect("the link of an anchored page to another one is swizzled");
            assert!(uses > 100, "{uses} of a thousand uses were counted, in {bytes} bytes");
        });
    }
}
