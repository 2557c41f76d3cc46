//! Pages of the cache that are excluded while the store's copies are changed, as a memory server does.
//!
//! One thread keeps a page out, changes the store's copy of it, or of a page below it, and drops what the cache has of that.
//! The other one wants the same page, through the link to it or without one, or cools a page below it. Asserted: afterwards
//! the cache has the version that the store has, and nothing that either of them has added is lost.
//!
//! Broken variants: a page that is excluded without an entry in the table; unlinked resident pages below it that are not looked for; unlinked resident pages that
//! are published meanwhile; a fetch of a changed page that is not waited for; a page that is overlooked while it is about to cool.

use std::sync::Arc;

use farlink_cache::{Anchor, PageCache, PageId, model, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, Tree, block_on, explore, id, refuse_without, run};
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};

struct Scene {
    store: Pages,
    cache: Arc<PageCache<Tree>>,
    handles: [Handle; 2],
    anchor: Arc<Anchor<Tree>>,
}

/// A cache in which the root is, and handles with a free frame at hand each.
fn scene(pages: &[(u64, u64, u64)]) -> Scene {
    let store = Pages::new(pages);
    let mut options = model::options(6);
    options.excludes_subtrees = true;
    let cache = PageCache::new(Tree, options).expect("a model's options work");
    let handles = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    for handle in &handles {
        drop(block_on(handle.reserve(id(9), CLASS)).expect("there is room"));
    }
    let anchor = Arc::new(block_on(handles[0].anchor(id(1), CLASS)).expect("the root is there"));
    Scene { store, cache, handles, anchor }
}

fn is_leaf(words: &[AtomicU64]) -> bool {
    words[0].load(Relaxed) == 0
}

/// Keeps the page below the root out, adds 1 to what the store has in `changed`, and lets it in again. False if it could not
/// be excluded.
fn serve(handle: &Handle, anchor: &Anchor<Tree>, store: &Pages, changed: PageId) -> bool {
    let Ok(root) = handle.enter(anchor) else { return false };
    let Ok(link) = root.read(|words| words[1].load(Relaxed)) else { return false };
    let Ok(Some(guard)) = block_on(handle.exclude(&root, link, CLASS, is_leaf)) else { return false };
    store.add(changed, 1);
    block_on(guard.drop_changed(changed));
    true
}

/// Adds 100 to page 3 through the cache, without a link to it. False if it could not.
fn add_here(handle: &Handle) -> bool {
    let Ok(page) = block_on(handle.load(id(3), CLASS)) else { return false };
    let added = handle.update(&page, |change| {
        let value = change.word(0, 1);
        change.set(0, 1, value + 100);
    });
    added.is_ok()
}

/// One who keeps page 2 out and changes it, and one who follows the link to it. Returns whether the first did.
fn exclude_and_follow() -> bool {
    let Scene { store, cache, handles: [server, follower], anchor } = scene(&[(1, 1, 2), (2, 0, 20)]);
    let (of_server, of_follower, in_store) = (Arc::clone(&anchor), Arc::clone(&anchor), store.clone());
    let server = run(move || (serve(&server, &of_server, &in_store, id(2)), server, of_server));
    let follower = run(move || {
        if let Ok(root) = follower.enter(&of_follower)
            && let Ok(link) = root.read(|words| words[1].load(Relaxed))
            && let Ok(page) = block_on(follower.follow(&root, link, CLASS))
            && let Ok(value) = page.read(|words| words[1].load(Relaxed))
        {
            assert!(value == 20 || value == 21, "{value}");
        }
        (follower, of_follower)
    });
    let (is_served, _server, _of_server) = server.join();
    let (follower, _of_follower) = follower.join();
    let page = block_on(follower.load(id(2), CLASS)).expect("it is let in again");
    let value = page.read(|words| words[1].load(Relaxed)).expect("nobody changes it");
    assert_eq!(value, store.value(2), "an old version is cached");
    assert!(cache.places(id(2)).len() <= 1);
    drop(page);
    is_served
}

/// One who keeps page 2 out and changes page 3 below it, and one who changes page 3 in the cache, to which no link leads;
/// it may be cooling there already. Returns who did.
fn exclude_and_change_below(is_cooling: bool) -> [bool; 2] {
    let Scene { store, cache, handles: [server, changer], anchor } = scene(&[(1, 2, 2), (2, 1, 3), (3, 0, 30)]);
    if is_cooling {
        let frame = block_on(server.load(id(3), CLASS)).expect("it is there").frame();
        assert!(server.cool_frame(frame));
    }
    let (of_server, in_store) = (Arc::clone(&anchor), store.clone());
    let server = run(move || (serve(&server, &of_server, &in_store, id(3)), server, of_server));
    let changer = run(move || (add_here(&changer), changer));
    let (is_served, _server, _of_server) = server.join();
    let (is_added, changer) = changer.join();
    block_on(changer.flush()).expect("the store takes it");
    let expected = 30 + u64::from(is_served) + 100 * u64::from(is_added);
    assert_eq!(store.value(3), expected, "something is lost");
    let page = block_on(changer.load(id(3), CLASS)).expect("it is let in again");
    assert_eq!(page.read(|words| words[1].load(Relaxed)), Ok(expected), "an old version is cached");
    assert_eq!(cache.places(id(3)).len(), 1);
    drop(page);
    [is_served, is_added]
}

/// One who evicts page 2, keeps it out and changes page 3 below it, and one who cools page 3. Returns whether the first did.
fn exclude_and_cool_below() -> bool {
    let Scene { store, cache, handles: [server, cooler], anchor } = scene(&[(1, 2, 2), (2, 1, 3), (3, 0, 30)]);
    let frames = {
        let root = server.enter(&anchor).expect("nobody changes it");
        let inner = block_on(server.follow(&root, 2, CLASS)).expect("it is there");
        [inner.frame(), block_on(server.follow(&inner, 3, CLASS)).expect("it is there").frame()]
    };
    let (of_server, in_store) = (Arc::clone(&anchor), store.clone());
    let server = run(move || {
        let is_served = server.cool_frame(frames[0]) && {
            while server.pop_any() {}
            let root = server.enter(&of_server).ok();
            let link = root.as_ref().and_then(|root| root.read(|words| words[1].load(Relaxed)).ok());
            let is_below = |words: &[AtomicU64]| words[0].load(Relaxed) < 1;
            match root.zip(link).map(|(root, link)| block_on(server.exclude(&root, link, CLASS, is_below))) {
                Some(Ok(Some(guard))) => {
                    in_store.add(id(3), 1);
                    block_on(guard.drop_all());
                    true
                }
                _ => false,
            }
        };
        (is_served, server, of_server)
    });
    let cooler = run(move || {
        cooler.cool_frame(frames[1]);
        cooler
    });
    let (is_served, _server, _of_server) = server.join();
    let cooler = cooler.join();
    let page = block_on(cooler.load(id(3), CLASS)).expect("it is let in again");
    assert_eq!(page.read(|words| words[1].load(Relaxed)), Ok(store.value(3)), "an old version is cached");
    assert_eq!(cache.places(id(3)).len(), 1);
    drop(page);
    is_served
}

#[test]
fn a_page_that_is_about_to_cool_is_not_overlooked() {
    let served = Seen::new();
    let seen = served.clone();
    explore("cache exclusions, keep out and cool below", move || {
        if exclude_and_cool_below() {
            seen.mark();
        }
    });
    served.require("the page is kept out");
}

#[test]
fn who_follows_the_link_waits_for_the_new_version() {
    let (served, refused) = (Seen::new(), Seen::new());
    let seen = (served.clone(), refused.clone());
    explore(
        "cache exclusions, keep out and follow",
        move || {
            if exclude_and_follow() { seen.0.mark() } else { seen.1.mark() }
        },
    );
    served.require("the page is kept out");
    refused.require("it is cached already");
}

#[test]
fn nothing_is_lost_below_a_page_that_is_kept_out() {
    for is_cooling in [false, true] {
        let (both, refused) = (Seen::new(), Seen::new());
        let seen = (both.clone(), refused.clone());
        explore(&format!("cache exclusions, keep out and change below, cooling: {is_cooling}"), move || {
            match exclude_and_change_below(is_cooling) {
                [true, true] => seen.0.mark(),
                [false, true] => seen.1.mark(),
                _ => {}
            }
        });
        both.require("both change it, one after the other");
        refused.require("a unlinked is in the way");
    }
}

#[test]
fn broken_ones_are_noticed() {
    refuse_without(Step::ExcludedEntry, "cache exclusions, no entry", "an old version is cached", || {
        exclude_and_follow();
    });
    refuse_without(Step::UnlinkedFirst, "cache exclusions, unlinked not looked for", "something is lost", || {
        exclude_and_change_below(false);
    });
    refuse_without(Step::UnlinkedCheck, "cache exclusions, unlinked let in", "something is lost", || {
        exclude_and_change_below(true);
    });
    refuse_without(
        Step::CoolingDropped,
        "cache exclusions, cooling not waited for",
        "an old version is cached",
        || {
            exclude_and_cool_below();
        },
    );
    refuse_without(Step::LoadingDropped, "cache exclusions, a fetch not waited for", "something is lost", || {
        exclude_and_change_below(false);
    });
}
