//! Misses of the cache: two threads want one page that is not there.
//!
//! Asserted: the store is read once, both see the page, and whoever waits for the other's fetch is woken; if the fetch is
//! given up half-way, the other one does it. (Who is never woken fails.) Somebody has the store let no more pages in, and waits for those
//! that are on their way: none comes after that.
//!
//! Broken variants: a waiter that registers after it has let go of the table's lock; waiters woken before the page is there; either side
//! of the wait without its fence.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
};

use farlink_cache::model::Step;
use farlink_loom_tests::{CLASS, Handle, Pages, Seen, block_on, explore, id, refuse_without, run};
use loom::sync::atomic::Ordering::Relaxed;

/// Two handles of a cache in which nothing is, each with a free frame at hand.
fn setup() -> (Pages, [Handle; 2]) {
    let store = Pages::new(&[(2, 0, 20)]);
    let cache = store.cache(4);
    let handles = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("there are three handles"));
    for handle in &handles {
        drop(block_on(handle.reserve(id(9), CLASS)).expect("there is room"));
    }
    (store, handles)
}

fn load(handle: &Handle) {
    let page = block_on(handle.load(id(2), CLASS)).expect("it is there");
    let word = page.read(|words| words[1].load(Relaxed));
    assert_eq!(word, Ok(20), "nobody changes it");
}

/// Two loads of one page. True if one waited for the other.
fn load_twice() -> bool {
    let (store, handles) = setup();
    let threads = handles.map(|handle| {
        run(move || {
            load(&handle);
            handle
        })
    });
    let handles = threads.map(|thread| thread.join());
    assert_eq!(store.reads(), 1, "two fetches of one page");
    assert_eq!(handles[0].cache().places(id(2)).len(), 1);
    handles.iter().any(|handle| handle.counters().total().shared_fetches != 0)
}

/// A load that is given up once it has begun, and another. True if the other one waited.
fn load_and_drop() -> bool {
    let (store, [quitter, loader]) = setup();
    store.slow_down();
    let quitter = run(move || {
        let outcome = pin!(quitter.load(id(2), CLASS)).poll(&mut Context::from_waker(Waker::noop()));
        matches!(outcome, Poll::Pending)
    });
    let loader = run(move || {
        load(&loader);
        loader
    });
    quitter.join();
    let loader = loader.join();
    assert_eq!(loader.cache().places(id(2)).len(), 1);
    store.reads() == 2
}

/// A load, and somebody who has no more pages let in. True if he finds the page.
fn load_and_shut() -> bool {
    let (store, [loader, shutter]) = setup();
    store.look();
    let loader = run(move || {
        let is_let_in = block_on(loader.load(id(2), CLASS)).is_ok();
        (is_let_in, loader)
    });
    let shutter = run(move || {
        store.shut();
        block_on(shutter.until_fetched());
        let mut is_here = false;
        shutter.for_each_page(|page, _, _| is_here |= page == id(2));
        (is_here, shutter)
    });
    let ((is_let_in, _loader), (is_here, _shutter)) = (loader.join(), shutter.join());
    assert!(is_here || !is_let_in, "a page comes that was not waited for");
    is_here
}

#[test]
fn what_the_store_has_let_in_is_waited_for() {
    let here = Seen::new();
    let seen = here.clone();
    explore("cache fetch, no more let in", move || {
        if load_and_shut() {
            seen.mark();
        }
    });
    here.require("the page is found");
}

#[test]
fn broken_waits_miss_a_page_on_its_way() {
    let late = "was not waited for";
    refuse_without(Step::LookFence, "cache fetch, let in without a fence", late, || {
        load_and_shut();
    });
    refuse_without(Step::FetchedFence, "cache fetch, waited for without a fence", late, || {
        load_and_shut();
    });
}

#[test]
fn two_misses_share_a_fetch() {
    let shared = Seen::new();
    let seen = shared.clone();
    explore("cache fetch, two misses", move || {
        if load_twice() {
            seen.mark();
        }
    });
    shared.require("one waits for the other");
}

#[test]
fn a_fetch_that_is_given_up_is_taken_over() {
    let twice = Seen::new();
    let seen = twice.clone();
    explore("cache fetch, one given up", move || {
        if load_and_drop() {
            seen.mark();
        }
    });
    twice.require("the other reads it again");
}

#[test]
fn broken_waiters_miss_their_wake_up() {
    refuse_without(Step::WakerUnderLock, "cache fetch, registered too late", "never woken", || {
        load_twice();
    });
    refuse_without(Step::StateBeforeWake, "cache fetch, woken too early", "never woken", || {
        load_twice();
    });
}
