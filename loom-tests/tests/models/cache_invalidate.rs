//! Pages that the cache drops, because the store has newer ones.
//!
//! One thread changes what the store has of a page, and has the cache drop it then. The other one follows the link to it, or changes it in the
//! cache. Asserted: whoever looks for the page later sees what the store has, by its link or without one; and a page that is dropped only if it
//! is not dirty takes no change with it.
//!
//! Broken variants: a page that is being fetched is not waited for; one that is dropped before the store has the newer one; one that is dropped
//! whatever is in it.

use std::sync::Arc;

use farlink_cache::{Anchor, PageCache, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, Tree, block_on, explore, id, refuse, refuse_without, run};
use loom::sync::atomic::Ordering::Relaxed;

struct Scene {
    store: Pages,
    cache: Arc<PageCache<Tree>>,
    handles: [Handle; 2],
    anchor: Arc<Anchor<Tree>>,
}

/// A cache in which the root is, and page 2 below it or not; and handles with a free frame at hand each.
fn scene(is_cached: bool) -> Scene {
    let store = Pages::new(&[(1, 1, 2), (2, 0, 20)]);
    let cache = store.cache(4);
    let handles = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    for handle in &handles {
        drop(block_on(handle.reserve(id(9), CLASS)).expect("there is room"));
    }
    let anchor = Arc::new(block_on(handles[0].anchor(id(1), CLASS)).expect("the root is there"));
    if is_cached {
        assert_eq!(follow(&handles[0], &anchor), Some(20));
    }
    Scene { store, cache, handles, anchor }
}

/// What is in page 2, by the link to it; none if somebody is in the way.
fn follow(handle: &Handle, anchor: &Anchor<Tree>) -> Option<u64> {
    let root = handle.enter(anchor).ok()?;
    let link = root.read(|words| words[1].load(Relaxed)).ok()?;
    let page = block_on(handle.follow(&root, link, CLASS)).ok()?;
    page.read(|words| words[1].load(Relaxed)).ok()
}

/// One who has page 2 dropped, once the store has a newer one, and one who follows the link to it. True if it was cached.
fn drop_and_follow(is_cached: bool, store_first: bool) -> bool {
    let Scene { store, cache, handles: [dropper, follower], anchor } = scene(is_cached);
    let (of_follower, in_store) = (Arc::clone(&anchor), store.clone());
    let dropper = run(move || {
        if store_first {
            in_store.add(id(2), 1);
        }
        let is_dropped = block_on(dropper.invalidate(id(2), CLASS)).expect("nobody has it for long");
        if !store_first {
            in_store.add(id(2), 1);
        }
        (is_dropped, dropper)
    });
    let follower = run(move || {
        let found = follow(&follower, &of_follower);
        assert!(matches!(found, None | Some(20 | 21)), "{found:?}");
        (follower, of_follower)
    });
    let (is_dropped, _dropper) = dropper.join();
    let (follower, _of_follower) = follower.join();
    for _ in 0..2 {
        assert_eq!(follow(&follower, &anchor), Some(store.value(2)), "an old version is cached");
    }
    assert_eq!(cache.places(id(2)).len(), 1);
    is_dropped
}

/// One who has page 2 dropped, unless it is dirty or if it is `dirty`, too, and one who adds 100 to it in the cache. Whether it was dropped, and added to.
fn drop_and_change(dirty: bool) -> [bool; 2] {
    let Scene { store, handles: [dropper, changer], anchor, .. } = scene(true);
    let dropper = run(move || {
        let dropped = match dirty {
            true => block_on(dropper.invalidate(id(2), CLASS)),
            false => block_on(dropper.invalidate_if(id(2), CLASS, |_| true)),
        };
        (dropped.expect("nobody has it for long"), dropper)
    });
    let changer = run(move || {
        let is_added = block_on(changer.load(id(2), CLASS)).is_ok_and(|page| {
            let added = changer.update(&page, |change| {
                let value = change.word(0, 1);
                change.set(0, 1, value + 100);
            });
            added.is_ok()
        });
        (is_added, changer)
    });
    let (is_dropped, _dropper) = dropper.join();
    let (is_added, changer) = changer.join();
    block_on(changer.flush()).expect("the store takes it");
    assert_eq!(store.value(2), 20 + 100 * u64::from(is_added), "a change is dropped");
    drop(anchor);
    [is_dropped, is_added]
}

#[test]
fn what_is_dropped_comes_anew() {
    for is_cached in [false, true] {
        let (dropped, absent) = (Seen::new(), Seen::new());
        let seen = (dropped.clone(), absent.clone());
        explore(&format!("cache invalidation, drop and follow, cached: {is_cached}"), move || {
            if drop_and_follow(is_cached, true) { seen.0.mark() } else { seen.1.mark() }
        });
        dropped.require("the page is cached");
        if !is_cached {
            absent.require("it is not cached");
        }
    }
}

#[test]
fn what_is_dropped_takes_no_change_with_it() {
    let (both, kept) = (Seen::new(), Seen::new());
    let seen = (both.clone(), kept.clone());
    explore("cache invalidation, drop and change", move || match drop_and_change(false) {
        [true, true] => seen.0.mark(),
        [false, true] => seen.1.mark(),
        _ => {}
    });
    both.require("it is dropped, and then changed");
    kept.require("it is changed, and kept");
}

#[test]
fn broken_ones_are_noticed() {
    let old = "an old version is cached";
    refuse_without(Step::FetchAwaited, "cache invalidation, a fetch not waited for", old, || {
        drop_and_follow(false, true);
    });
    refuse("cache invalidation, dropped before it is old", old, || {
        drop_and_follow(true, false);
    });
    refuse("cache invalidation, dropped with a change", "a change is dropped", || {
        drop_and_change(true);
    });
}
