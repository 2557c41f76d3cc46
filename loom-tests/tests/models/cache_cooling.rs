//! Cooling pages of the cache: rescue against eviction, and room for those who wait.
//!
//! Page 2, below a root, cools. One thread follows the link to it; another evicts what cools and loads page 3 in its place.
//! Asserted: the follower reads page 2, rescued or read again; at the end a page is in one frame at most, and the root's link
//! leads to page 2. One who waits for a transfer to end is woken by the last one. One who waits for the lock of a page to
//! alter it is not left waiting when the page goes.
//!
//! Broken variants: an eviction that does not look again under the lock takes a page that was rescued; a wait for room
//! without its fence is never woken; a frame that is freed with waiters leaves them waiting.

use farlink_cache::{is_swizzled, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, block_on, explore, id, refuse_without, run};
use loom::sync::atomic::Ordering::Relaxed;

fn value(page: &farlink_cache::Page<'_, Pages, farlink_loom_tests::Tree>) -> Option<u64> {
    page.read(|words| words[1].load(Relaxed)).ok()
}

/// A toucher of a cooling page and an evictor that reuses its frame. Returns whether the page was rescued, and whether it
/// was evicted. Which thread comes first decides only in what order loom searches: where an eviction is broken, it is soon found if
/// the evictor does.
fn rescue_and_evict(evictor_first: bool) -> [bool; 2] {
    let store = Pages::new(&[(1, 1, 2), (2, 0, 20), (3, 0, 30)]);
    let cache = store.cache(4);
    let handle = |seed| -> Handle { cache.handle(store.clone(), seed).expect("there are three handles") };
    let (toucher, evictor) = (handle(1), handle(2));
    let anchor = block_on(evictor.anchor(id(1), CLASS)).expect("the root is there");
    let frame = {
        let root = evictor.enter(&anchor).expect("nobody changes it");
        block_on(evictor.follow(&root, 2, CLASS)).expect("it is there").frame()
    };
    drop(block_on(toucher.reserve(id(9), CLASS)).expect("there is room"));
    assert!(evictor.cool_frame(frame), "nobody needs it");
    let touch = move || {
        if let Ok(root) = toucher.enter(&anchor)
            && let Some(word) = value(&root)
            && let Ok(page) = block_on(toucher.follow(&root, word, CLASS))
        {
            assert_eq!(page.id(), id(2));
            assert!(value(&page).is_none_or(|value| value == 20), "another page's words");
        }
        (toucher, anchor)
    };
    let evict = move || {
        let is_evicted = evictor.evict_any();
        assert_eq!(value(&block_on(evictor.load(id(3), CLASS)).expect("it is there")), Some(30), "nobody changes it");
        (is_evicted, evictor)
    };
    // One of the two is this thread: a third one, which only waits, would multiply the executions.
    let ((toucher, anchor), (is_evicted, _evictor)) = if evictor_first {
        let toucher = run(touch);
        let evictor = evict();
        (toucher.join(), evictor)
    } else {
        let evictor = run(evict);
        (touch(), evictor.join())
    };
    for page in [id(1), id(2), id(3)] {
        assert!(cache.places(page).len() <= 1, "{page} is in two frames");
    }
    let root = toucher.enter(&anchor).expect("nobody changes it");
    let word = value(&root).expect("nobody changes it");
    if is_swizzled(word) {
        let page = block_on(toucher.follow(&root, word, CLASS)).expect("the root's link leads to another page");
        assert_eq!((page.id(), value(&page)), (id(2), Some(20)), "the root's link leads to another page");
    }
    [toucher.counters().total().rescues != 0, is_evicted]
}

/// One who waits for room while a transfer is under way that makes some.
fn wait_for_room() {
    let store = Pages::new(&[]);
    let cache = store.cache(2);
    let handle = cache.handle(store, 1).expect("there are three handles");
    cache.begin();
    let waiter = run(move || {
        block_on(handle.room());
        handle
    });
    let ender = run(move || cache.end());
    waiter.join();
    ender.join();
}

/// One who alters a page that another evicts. Returns who succeeded.
fn alter_and_evict() -> [bool; 2] {
    let store = Pages::new(&[(2, 0, 20)]);
    let cache = store.cache(2);
    let [writer, evictor] = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    let frame = block_on(writer.load(id(2), CLASS)).expect("it is there").frame();
    let writer = run(move || {
        let is_altered = match block_on(writer.load(id(2), CLASS)) {
            Ok(page) => writer.update(&page, |change| change.set(0, 1, 21)).is_ok(),
            Err(_) => false,
        };
        (is_altered, writer)
    });
    let evictor = run(move || (evictor.cool_frame(frame) && evictor.evict_any(), evictor));
    let ((is_altered, _writer), (is_evicted, _evictor)) = (writer.join(), evictor.join());
    let is_dirty = cache.places(id(2)).iter().any(|place| place.is_dirty && !place.is_cooling);
    assert!(!is_altered || is_dirty || store.value(2) == 21, "a change was lost");
    [is_altered, is_evicted]
}

/// Explores a model and requires that each of two things happens, and the second without the first.
fn explore_both(name: &str, model: fn() -> [bool; 2]) {
    let seen = [Seen::new(), Seen::new()];
    let marks = seen.clone();
    explore(name, move || match model() {
        [true, false] => marks[0].mark(),
        [false, true] => marks[1].mark(),
        _ => {}
    });
    seen[0].require("the first thread alone succeeds");
    seen[1].require("the second thread alone succeeds");
}

#[test]
fn a_cooling_page_is_rescued_or_evicted() {
    explore_both("cache cooling, rescue and evict", || rescue_and_evict(false));
}

#[test]
fn who_waits_for_room_is_woken() {
    explore("cache cooling, wait for room", wait_for_room);
}

#[test]
fn nobody_waits_for_a_page_that_has_gone() {
    explore_both("cache cooling, alter and evict", alter_and_evict);
}

#[test]
fn broken_evictions_take_rescued_pages() {
    refuse_without(Step::EvictionCheck, "cache cooling, evicted without a look", "another page", || {
        rescue_and_evict(true);
    });
}

#[test]
fn broken_waits_for_room_last_for_ever() {
    refuse_without(Step::RoomFence, "cache cooling, wait without a fence", "never woken", wait_for_room);
}

#[test]
fn broken_frees_leave_writers_waiting() {
    refuse_without(Step::Retirement, "cache cooling, freed with waiters", "maximum number of branches", || {
        alter_and_evict();
    });
}

/// A page that cools stays where evictors find it.
fn rescue_and_cool_again() {
    let store = Pages::new(&[(2, 0, 20)]);
    let cache = store.cache(2);
    let [toucher, cooler] = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("three handles"));
    let frame = block_on(cooler.load(id(2), CLASS)).expect("there").frame();
    assert!(cooler.cool_frame(frame));
    let toucher = run(move || {
        drop(block_on(toucher.load(id(2), CLASS)));
        toucher
    });
    let cooler = run(move || {
        let evicted = cooler.evict_any();
        if !evicted {
            cooler.cool_frame(frame);
        }
        cooler
    });
    let (_toucher, cooler) = (toucher.join(), cooler.join());
    if cache.places(id(2)).iter().any(|place| place.is_cooling) {
        while cache.places(id(2)).iter().any(|place| place.is_cooling) {
            let got = cooler.pop_any();
            assert!(got, "a cooling page is in no queue");
        }
    }
}

#[test]
fn cooling_pages_are_in_a_queue() {
    explore("cache cooling, rescue and cool again", rescue_and_cool_again);
}
