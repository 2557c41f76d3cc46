//! Free frames: who claims one, and what a reader of its last page sees of the next.
//!
//! A free frame can stand in two lists. Asserted: two who claim it at once do not both get it; frames of a handle that has
//! ended go to others, each to one. And a frame that one thread has emptied and another fills, while a third still reads:
//! the third, who wrote nothing down but a version, notices.
//!
//! Broken variants: a claim that looks first and takes then has two owners; a claim without its release fence, after which
//! the reader sees the new words and yet the old version.

use std::sync::Arc;

use farlink_cache::model::{Spot, Step};
use farlink_loom_tests::{CLASS, Pages, Plain, Running, Seen, block_on, explore, id, refuse_without, run};

/// Two who claim one free frame. Returns how many got it.
fn claim_twice() -> usize {
    let spot = Arc::new((Spot::new(0), Plain::new(0)));
    let threads = [1, 2].map(|number| {
        let spot = Arc::clone(&spot);
        run(move || {
            let is_ours = spot.0.claim();
            if is_ours {
                assert_eq!(spot.1.read(), 0, "a frame with two owners");
                spot.1.write(number);
            }
            is_ours
        })
    });
    threads.map(Running::join).into_iter().filter(|&is_ours| is_ours).count()
}

/// One empties a frame and gives it back, one claims and fills it, one reads it. Returns what was read.
fn hand_over() -> Option<u64> {
    let spot = Arc::new(Spot::new(2));
    assert!(spot.claim());
    spot.fill(&[1, 1]);
    let emptier = Arc::clone(&spot);
    let emptier = run(move || {
        if emptier.empty() {
            emptier.give_back();
        }
    });
    let filler = Arc::clone(&spot);
    let filler = run(move || {
        if filler.claim() {
            filler.fill(&[2, 2]);
        }
    });
    let reader = run(move || spot.read());
    emptier.join();
    filler.join();
    let words = reader.join()?;
    assert_eq!(words[0], words[1], "words of two pages");
    Some(words[0])
}

/// A handle ends; two others share its frames.
fn share() -> usize {
    let store = Pages::new(&[]);
    let cache = store.cache(2);
    let handle = |seed| cache.handle(store.clone(), seed).expect("there are three handles");
    drop(block_on(handle(1).reserve(id(1), CLASS)).expect("there is room"));
    let takers = [handle(2), handle(3)].map(|handle| {
        run(move || {
            let frame = block_on(handle.reserve(id(1), CLASS)).map(|page| page.frame_for_good()).ok();
            (frame, handle)
        })
    });
    let [first, second] = takers.map(|taker| taker.join().0);
    assert!(first.is_none() || first != second, "a frame with two owners");
    [first, second].into_iter().flatten().count()
}

#[test]
fn a_free_frame_has_one_taker() {
    explore("cache frames, two claims", || assert_eq!(claim_twice(), 1, "a frame with two owners, or none"));
}

#[test]
fn a_reader_notices_that_the_frame_has_changed_hands() {
    let (old, new) = (Seen::new(), Seen::new());
    let seen = (old.clone(), new.clone());
    explore("cache frames, handed over", move || match hand_over() {
        Some(1) => seen.0.mark(),
        Some(2) => seen.1.mark(),
        _ => {}
    });
    old.require("the reader sees the old page");
    new.require("the reader sees the new page");
}

#[test]
fn the_frames_of_an_ended_handle_go_to_others() {
    let both = Seen::new();
    let seen = both.clone();
    explore("cache frames, shared", move || {
        if share() == 2 {
            seen.mark();
        }
    });
    both.require("both get a frame");
}

#[test]
fn broken_claims_have_two_owners() {
    refuse_without(Step::ClaimAtOnce, "cache frames, claimed in two steps", "Causality violation", || {
        assert_eq!(claim_twice(), 1, "a frame with two owners");
    });
}

#[test]
fn broken_claims_without_a_fence_hide_the_change_of_hands() {
    refuse_without(Step::ClaimFence, "cache frames, claimed without a fence", "words of two pages", || {
        hand_over();
    });
}
