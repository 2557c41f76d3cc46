//! Swizzled links of the cache: swizzle against unswizzle against follow, and pinning against cooling.
//!
//! A root, kept by an anchor, has one link to page 2. One thread follows the link; another cools and evicts page 2 and loads
//! page 3 into its frame, or has the root link to page 3, and page 3 come there through that link. Asserted: whoever follows a swizzled link
//! and reads validly has read the page that it led to. For the inner pages:
//! a page that is pinned does not cool, and one that cools has no swizzled link in it. While a page below the root is
//! fetched, another thread changes the root: it counts as current afterwards only if nothing but the link has changed, and what
//! has lost its link is not cached, whether it is fetched alone, with others, or below a page that was refused admission.
//!
//! Broken variants: a follower that does not look at the parent again, or only whether the page is a child of the parent, takes page 3 for
//! page 2; a pin without its fence, and
//! cooling that does not look at the pins, cool a pinned page; a swizzle that does not compare versions makes a page current that has
//! changed; a fetch that does not look for the link again, or looks for it in a page that was refused admission and is freed, caches a freed page.

use std::sync::Arc;

use farlink_cache::{Admission, Anchor, Conflict, PageCache, PageError, is_swizzled, model, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, Tree, block_on, explore, explore_long, id, refuse_without, run};
use loom::sync::atomic::Ordering::Relaxed;

/// A root with a link to page 2, and page 3.
fn store() -> Pages {
    Pages::new(&[(1, 1, 2), (2, 0, 20), (3, 0, 30)])
}

fn handle(cache: &Arc<PageCache<Tree>>, store: &Pages, seed: u64) -> Handle {
    cache.handle(store.clone(), seed).expect("there are three handles")
}

/// Follows the root's link if it is swizzled, and reads the page there: what it has read, and what is in the page that the root said
/// it leads to.
fn follow_swizzled(handle: &Handle, anchor: &Anchor<Tree>) -> Option<[u64; 2]> {
    let root = handle.enter(anchor).ok()?;
    let [word, is_relinked] = root.read(|words| [1, 2].map(|at| words[at].load(Relaxed))).ok()?;
    if !is_swizzled(word) {
        return None;
    }
    let page = block_on(handle.follow(&root, word, CLASS)).ok()?;
    let read = page.read(|words| words[1].load(Relaxed)).ok()?;
    Some([read, if is_relinked == 0 { 20 } else { 30 }])
}

/// Cools and evicts page 2. True if it went.
fn evict(handle: &Handle, _: &Anchor<Tree>, frame: u32) -> bool {
    handle.cool_frame(frame) && handle.evict_any()
}

/// Takes the root's link away, and frees page 2. True if it went.
fn free(handle: &Handle, anchor: &Anchor<Tree>, _: u32) -> bool {
    link_and_free(handle, anchor, 0).is_ok()
}

/// Has the root link to another page, or none, and frees page 2.
fn link_and_free(handle: &Handle, anchor: &Anchor<Tree>, to: u64) -> Result<(), PageError> {
    let root = handle.enter(anchor)?;
    let word = root.read(|words| words[1].load(Relaxed))?;
    let Ok(page) = block_on(handle.follow(&root, word, CLASS)) else { return Err(Conflict::Changed.into()) };
    handle.change(&[&root, &page], Vec::new(), |change| {
        change.set(0, 1, to);
        change.set(0, 2, to);
        change.free(1);
    })
}

/// Has page 3 come.
fn load(handle: &Handle, _: &Anchor<Tree>, frame: u32) -> bool {
    block_on(handle.load(id(3), CLASS)).is_ok_and(|page| page.frame() == frame)
}

/// Frees page 2, whose link becomes one to page 3. True if it went.
fn relink(handle: &Handle, anchor: &Anchor<Tree>, _: u32) -> bool {
    link_and_free(handle, anchor, 3).is_ok()
}

/// Has page 3 come through the root's link to it.
fn follow_relinked(handle: &Handle, anchor: &Anchor<Tree>, frame: u32) -> bool {
    let Ok(root) = handle.enter(anchor) else { return false };
    let Ok(word) = root.read(|words| words[1].load(Relaxed)) else { return false };
    block_on(handle.follow(&root, word, CLASS)).is_ok_and(|page| page.frame() == frame)
}

/// A step of who has page 2 go and page 3 come into the frame.
type Turn = fn(&Handle, &Anchor<Tree>, u32) -> bool;
const EVICT: [Turn; 2] = [evict, load];
const FREE: [Turn; 2] = [free, load];
const RELINK: [Turn; 2] = [relink, follow_relinked];

/// A follower, and one who has page 2 go and page 3 come in its place. Returns what the follower read, and whether page 3
/// came into page 2's frame.
fn follow_and_reuse(turns: [Turn; 2]) -> (Option<u64>, bool) {
    let store = store();
    let cache = store.cache(2);
    let [follower, evictor] = [1, 2].map(|seed| handle(&cache, &store, seed));
    let anchor = Arc::new(block_on(evictor.anchor(id(1), CLASS)).expect("the root is there"));
    let of_evictor = Arc::clone(&anchor);
    let frame = {
        let root = evictor.enter(&anchor).expect("nobody changes it");
        let word = root.read(|words| words[1].load(Relaxed)).expect("nobody changes it");
        block_on(evictor.follow(&root, word, CLASS)).expect("it is there").frame()
    };
    let follower = run(move || {
        let seen = follow_swizzled(&follower, &anchor);
        assert!(seen.is_none_or(|[read, meant]| read == meant), "read {seen:?} through the link to page 2");
        (seen.map(|[read, _]| read), follower, anchor)
    });
    let evictor = run(move || {
        let is_reused = turns.iter().all(|turn| turn(&evictor, &of_evictor, frame));
        (is_reused, evictor, of_evictor)
    });
    (follower.join().0, evictor.join().0)
}

/// One who pins a page for good, and one who cools it. Returns who succeeded.
fn pin_and_cool() -> [bool; 2] {
    let store = store();
    let cache = store.cache(2);
    let [pinner, cooler] = [1, 2].map(|seed| handle(&cache, &store, seed));
    let frame = block_on(cooler.load(id(1), CLASS)).expect("it is there").frame();
    let pinner = run(move || {
        let is_pinned = match block_on(pinner.load(id(1), CLASS)) {
            Ok(page) => pinner.keep(&page).map(std::mem::forget).is_ok(),
            Err(_) => false,
        };
        (is_pinned, pinner)
    });
    let cooler = run(move || (cooler.cool_frame(frame), cooler));
    let (is_pinned, _pinner) = pinner.join();
    let (is_cooled, _cooler) = cooler.join();
    let places = cache.places(id(1));
    assert_eq!(places.len(), 1, "{places:?}");
    assert!(!is_pinned || !places[0].is_cooling, "a pinned page cools");
    [is_pinned, is_cooled]
}

/// One who loads the page below an inner page, and one who cools and evicts the inner page. Returns whether the link was
/// swizzled, and whether the inner page went.
fn swizzle_and_cool() -> [bool; 2] {
    let store = store();
    let cache = store.cache(4);
    let [loader, cooler] = [1, 2].map(|seed| handle(&cache, &store, seed));
    // The loader has the next free frame at hand.
    let frame = block_on(loader.load(id(1), CLASS)).expect("it is there").frame();
    let loader = run(move || {
        if let Ok(root) = block_on(loader.load(id(1), CLASS))
            && let Ok(word) = root.read(|words| words[1].load(Relaxed))
            && let Ok(page) = block_on(loader.follow(&root, word, CLASS))
        {
            assert_eq!(page.id(), id(2));
        }
        loader
    });
    let cooler = run(move || {
        cooler.cool_below(frame);
        (cooler.evict_any(), cooler)
    });
    let _loader = loader.join();
    let (is_evicted, _cooler) = cooler.join();
    let (inner, leaf) = (cache.places(id(1)), cache.places(id(2)));
    assert!(inner.len() <= 1 && leaf.len() <= 1, "{inner:?} {leaf:?}");
    let is_swizzled = leaf.first().is_some_and(|leaf| leaf.parent.is_some());
    if is_swizzled {
        assert_eq!(leaf[0].parent, Some(id(1)), "the parent went before the child");
        assert!(inner[0].children == 1 && !inner[0].is_cooling, "the parent cools before the child: {inner:?}");
    } else {
        assert!(inner.iter().all(|inner| inner.children == 0), "{inner:?} {leaf:?}");
    }
    [is_swizzled, is_evicted]
}

/// One who fetches page 2 below the root, and one who changes the root meanwhile. Returns whether the root is current for the
/// first one then, and whether page 2 has its link.
fn swizzle_and_change() -> [bool; 2] {
    let store = store();
    let cache = store.cache(2);
    let [follower, changer] = [1, 2].map(|seed| handle(&cache, &store, seed));
    let anchor = Arc::new(block_on(follower.anchor(id(1), CLASS)).expect("the root is there"));
    let of_changer = Arc::clone(&anchor);
    let follower = run(move || {
        let mut is_current = false;
        if let Ok(root) = follower.enter(&anchor)
            && let Ok([link, before]) = root.read(|words| [1, 2].map(|at| words[at].load(Relaxed)))
            && block_on(follower.follow(&root, link, CLASS)).is_ok()
            && let Ok(after) = root.read(|words| words[2].load(Relaxed))
        {
            assert_eq!(before, after, "a page that has changed counts as current");
            is_current = true;
        }
        (is_current, follower, anchor)
    });
    let changer = run(move || {
        if let Ok(root) = changer.enter(&of_changer) {
            let _ = changer.update(&root, |change| change.set(0, 2, 7));
        }
        (changer, of_changer)
    });
    let (is_current, _follower, _anchor) = follower.join();
    let _changer = changer.join();
    [is_current, cache.places(id(2)).first().is_some_and(|place| place.parent.is_some())]
}

/// One who fetches page 2, with others or alone, and one who frees it. Returns whether the first has had it, and whether it was freed.
fn fetch_and_free(with_others: bool) -> [bool; 2] {
    let store = store();
    let cache = store.cache(4);
    let [follower, freer] = [1, 2].map(|seed| handle(&cache, &store, seed));
    // Each has a free frame at hand.
    for handle in [&follower, &freer] {
        drop(block_on(handle.reserve(id(9), CLASS)).expect("there is room"));
    }
    let anchor = Arc::new(block_on(follower.anchor(id(1), CLASS)).expect("the root is there"));
    let of_freer = Arc::clone(&anchor);
    let follower = run(move || {
        let mut has_had_it = false;
        if let Ok(root) = follower.enter(&anchor)
            && let Ok(link) = root.read(|words| words[1].load(Relaxed))
        {
            has_had_it = match with_others {
                true => block_on(follower.follow_many(&root, &[(link, CLASS)])).iter().all(Result::is_ok),
                false => block_on(follower.follow(&root, link, CLASS)).is_ok(),
            };
        }
        (has_had_it, follower, anchor)
    });
    let freer = run(move || (free(&freer, &of_freer, 0), freer, of_freer));
    let (has_had_it, _follower, _anchor) = follower.join();
    let (is_freed, _freer, _of_freer) = freer.join();
    assert!(!is_freed || cache.places(id(2)).is_empty(), "a freed page is cached");
    [has_had_it, is_freed]
}

/// One who fetches page 3 below page 2, which nobody has admitted, and one who frees both. Returns whether the first has had it, and whether
/// they were freed.
fn fetch_below_and_free() -> [bool; 2] {
    let store = Pages::new(&[(1, 2, 2), (2, 1, 3), (3, 0, 30)]);
    let mut options = model::options(6);
    options.admission = Admission::Probability { leaf: 0.0, inner: 0.0 };
    let cache = PageCache::new(Tree, options).expect("a model's options work");
    let [follower, freer] = [1, 2].map(|seed| handle(&cache, &store, seed));
    for handle in [&follower, &freer] {
        drop(block_on(handle.reserve(id(9), CLASS)).expect("there is room"));
    }
    let anchor = Arc::new(block_on(follower.anchor(id(1), CLASS)).expect("the root is there"));
    drop(block_on(freer.load(id(3), CLASS)).expect("it is there"));
    let of_freer = Arc::clone(&anchor);
    let follower = run(move || {
        let (mut has_had_it, mut used) = (false, None);
        if let Ok(root) = follower.enter(&anchor)
            && let Ok(link) = root.read(|words| words[1].load(Relaxed))
            && let Ok(inner) = block_on(follower.follow(&root, link, CLASS))
            && let Ok(link) = inner.read(|words| words[1].load(Relaxed))
            && let Ok(page) = block_on(follower.follow(&inner, link, CLASS))
        {
            has_had_it = true;
            // It would go with its last user.
            used = page.try_into_use();
        }
        (has_had_it, used, follower, anchor)
    });
    let freer = run(move || {
        let is_freed = (|| {
            let root = freer.enter(&of_freer).ok()?;
            let link = root.read(|words| words[1].load(Relaxed)).ok()?;
            let inner = block_on(freer.follow(&root, link, CLASS)).ok()?;
            let leaf = block_on(freer.load(id(3), CLASS)).ok()?;
            let freed = freer.change(&[&root, &inner, &leaf], Vec::new(), |change| {
                change.set(0, 1, 0);
                change.free(1);
                change.free(2);
            });
            freed.ok()
        })()
        .is_some();
        (is_freed, freer, of_freer)
    });
    let (has_had_it, used, follower, _anchor) = follower.join();
    let (is_freed, _freer, _of_freer) = freer.join();
    assert!(!is_freed || cache.places(id(3)).is_empty(), "a freed page is cached");
    used.into_iter().for_each(|used| follower.end_use(used));
    [has_had_it, is_freed]
}

fn explore_reuse(name: &str, turns: [Turn; 2], is_long: bool) {
    let (read, reused) = (Seen::new(), Seen::new());
    let seen = (read.clone(), reused.clone());
    let model = move || {
        let (word, is_reused) = follow_and_reuse(turns);
        if is_reused {
            seen.1.mark();
            if word == Some(20) {
                seen.0.mark();
            }
        }
    };
    if is_long {
        explore_long(name, model)
    } else {
        explore(name, model)
    };
    reused.require("the frame is given to another page");
    read.require("the follower reads before that");
}

#[test]
fn a_follower_reads_the_page_that_the_link_led_to() {
    explore_reuse("cache links, follow and evict", EVICT, false);
    explore_reuse("cache links, follow and free", FREE, false);
    explore_reuse("cache links, follow and relink", RELINK, true);
}

#[test]
fn a_pinned_page_does_not_cool() {
    let (pinned, cooled) = (Seen::new(), Seen::new());
    let seen = (pinned.clone(), cooled.clone());
    explore("cache links, pin and cool", move || {
        let [is_pinned, is_cooled] = pin_and_cool();
        if is_pinned && !is_cooled {
            seen.0.mark();
        }
        if is_cooled {
            seen.1.mark();
        }
    });
    pinned.require("the page is pinned and stays");
    cooled.require("the page cools");
}

#[test]
fn an_inner_page_stays_while_a_page_below_it_is_linked() {
    let (swizzled, evicted) = (Seen::new(), Seen::new());
    let seen = (swizzled.clone(), evicted.clone());
    explore("cache links, swizzle and cool the parent", move || {
        let [is_swizzled, is_evicted] = swizzle_and_cool();
        if is_swizzled {
            seen.0.mark();
        }
        if is_evicted {
            seen.1.mark();
        }
    });
    swizzled.require("the link is swizzled");
    evicted.require("the inner page is evicted");
}

/// Explores a model until each of these outcomes was seen.
fn explore_outcomes(name: &str, outcomes: [[bool; 2]; 2], is_long: bool, model: fn() -> [bool; 2]) {
    let seen = outcomes.map(|outcome| (outcome, Seen::new()));
    let marks = seen.clone();
    let model = move || {
        let outcome = model();
        marks.iter().filter(|(mark, _)| *mark == outcome).for_each(|(_, seen)| seen.mark());
    };
    if is_long {
        explore_long(name, model)
    } else {
        explore(name, model)
    };
    seen.iter().for_each(|(outcome, seen)| seen.require(&format!("it comes to {outcome:?}")));
}

#[test]
fn a_page_is_current_if_only_its_link_was_swizzled() {
    explore_outcomes("cache links, swizzle and change", [[true, true], [false, true]], false, swizzle_and_change);
}

#[test]
fn a_page_whose_link_has_gone_is_not_fetched() {
    let outcomes = [[true, true], [false, true]];
    explore_outcomes("cache links, fetch and free", outcomes, false, || fetch_and_free(false));
    explore_outcomes("cache links, fetch with others and free", outcomes, true, || fetch_and_free(true));
    explore_outcomes("cache links, fetch below a bypass and free", outcomes, false, fetch_below_and_free);
}

#[test]
fn broken_swizzles_make_a_changed_page_current() {
    refuse_without(Step::SameVersion, "cache links, versions not compared", "counts as current", || {
        swizzle_and_change();
    });
}

#[test]
fn broken_fetches_cache_a_freed_page() {
    let freed = "a freed page is cached";
    for with_others in [false, true] {
        refuse_without(Step::LinkCheck, "cache links, link not looked at again", freed, move || {
            fetch_and_free(with_others);
        });
    }
    refuse_without(Step::FreedLinks, "cache links, a freed bypass is followed", freed, || {
        fetch_below_and_free();
    });
}

#[test]
fn broken_followers_take_another_page_for_theirs() {
    refuse_without(Step::ParentCheck, "cache links, parent not looked at again", "through the link to page 2", || {
        follow_and_reuse(EVICT);
    });
    refuse_without(Step::ParentCheck, "cache links, parent not looked at again", "through the link to page 2", || {
        follow_and_reuse(FREE);
    });
    refuse_without(Step::SameParent, "cache links, another child of the parent", "through the link to page 2", || {
        follow_and_reuse(RELINK);
    });
}

#[test]
fn broken_pins_are_overlooked() {
    refuse_without(Step::PinFence, "cache links, pin without fence", "a pinned page cools", || {
        pin_and_cool();
    });
    refuse_without(Step::PinCheck, "cache links, pins not looked at", "a pinned page cools", || {
        pin_and_cool();
    });
}
