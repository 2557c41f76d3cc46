//! Changes of several pages of the cache: against each other, and against a flush.
//!
//! Two threads free pages to which pages of the other one's change still have swizzled links. Asserted: both end, and what
//! is freed is gone. One thread moves what is in a page to another page while a second one flushes. Asserted: what
//! had been changed before the flush is in the store after it, in one page or the other.
//!
//! Broken variants: a change that waits for a lock while it holds those of pages that it keeps waits for ever; a move that does not
//! care for the flush, and a flush that does not wait for moves that have begun, miss each other.

use farlink_cache::{Change, Page, model::Step};
use farlink_loom_tests::{CLASS, Handle, Pages, Running, Seen, Tree, block_on, explore, id, refuse_without, run};

fn load(handle: &Handle, page: u64) -> Page<'_, Pages, Tree> {
    block_on(handle.load(id(page), CLASS)).expect("there")
}

/// Two handles of a cache in which all these pages are, with swizzled links between them.
fn scene(pages: &[(u64, u64, u64)]) -> (Pages, [Handle; 2]) {
    let store = Pages::new(pages);
    let cache = store.cache(4);
    let handles = [1, 2].map(|seed| cache.handle(store.clone(), seed).expect("three handles"));
    for &(page, level, below) in pages {
        let page = load(&handles[0], page);
        if level != 0 {
            block_on(handles[0].follow(&page, below, CLASS)).expect("there");
        }
    }
    (store, handles)
}

/// One change of these pages. True if it was made.
fn change(handle: &Handle, pages: [u64; 2], f: fn(&mut Change<'_>)) -> bool {
    let pages = pages.map(|page| block_on(handle.load(id(page), CLASS)).ok());
    let [Some(first), Some(second)] = &pages else { return false };
    handle.change(&[first, second], Vec::new(), |change| f(change)).is_ok()
}

/// Runs two changes at once, each of two pages. Returns which were made.
fn both(handles: [Handle; 2], changes: [([u64; 2], fn(&mut Change<'_>)); 2]) -> [bool; 2] {
    let [first, second] = handles;
    let [one, other] = changes;
    let first = run(move || (change(&first, one.0, one.1), first));
    let second = run(move || (change(&second, other.0, other.1), second));
    [first, second].map(Running::join).map(|(is_made, _)| is_made)
}

fn free_first(change: &mut Change<'_>) {
    change.free(0);
    change.set(1, 2, 1);
}

/// Two threads that each free a page below one that the other changes.
fn free_crosswise() -> [bool; 2] {
    let (_store, handles) = scene(&[(1, 1, 3), (2, 1, 4), (3, 0, 30), (4, 0, 40)]);
    let cache = handles[0].shared();
    let made = both(handles, [([3, 2], free_first), ([4, 1], free_first)]);
    for (page, is_gone) in [3, 4].into_iter().zip(made) {
        assert_eq!(cache.places(id(page)).is_empty(), is_gone, "page {page}");
    }
    made
}

/// One frees the first and the last page of a chain, the other one the page in between.
fn free_a_chain() -> [bool; 2] {
    let (_store, handles) = scene(&[(1, 2, 2), (2, 1, 3), (3, 0, 30), (4, 0, 40)]);
    let cache = handles[0].shared();
    let free_both = |change: &mut Change<'_>| (0..2).for_each(|page| change.free(page));
    let made = both(handles, [([3, 1], free_both), ([2, 4], free_first)]);
    assert_eq!([3, 2].map(|page| cache.places(id(page)).is_empty()), made);
    made
}

/// One who flushes, and one who moves what is in page 2 to page 3. Returns whether it was moved.
fn flush_and_move(loaded: [u64; 2]) -> bool {
    let (store, [flusher, mover]) = scene(&loaded.map(|page| (page, 0, 0)));
    flusher.update(&load(&flusher, 2), |change| change.set(0, 1, 21)).expect("nobody else is there");
    let stored = store.clone();
    let flusher = run(move || {
        block_on(flusher.flush()).expect("the store takes it");
        assert!([2, 3].map(|page| stored.value(page)).contains(&21), "lost past the flush");
        flusher
    });
    let mover = run(move || {
        let is_moved = change(&mover, [2, 3], |change| {
            let word = change.word(0, 1);
            change.set(0, 1, 0);
            change.set(1, 1, word);
        });
        (is_moved, mover)
    });
    let _flusher = flusher.join();
    let (is_moved, mover) = mover.join();
    block_on(mover.flush()).expect("the store takes it");
    assert_eq!([2, 3].map(|page| store.value(page)), if is_moved { [0, 21] } else { [21, 0] });
    is_moved
}

#[test]
fn pages_below_each_others_are_freed() {
    for (name, model) in [("crosswise", free_crosswise as fn() -> [bool; 2]), ("a chain", free_a_chain)] {
        let seen = Seen::new();
        let mark = seen.clone();
        explore(&format!("cache changes, free {name}"), move || {
            if model() == [true; 2] {
                mark.mark();
            }
        });
        seen.require("both changes are made");
    }
}

#[test]
fn a_flush_writes_what_was_changed_before_wherever_it_is() {
    for loaded in [[2, 3], [3, 2]] {
        let (moved, sent) = (Seen::new(), Seen::new());
        let seen = (moved.clone(), sent.clone());
        explore(&format!("cache changes, flush and move, {loaded:?}"), move || {
            if flush_and_move(loaded) { seen.0.mark() } else { seen.1.mark() }
        });
        moved.require("it is moved");
        sent.require("it has to be written first");
    }
}

#[test]
fn broken_changes_wait_for_each_other() {
    refuse_without(Step::FreedLast, "cache changes, freed under locks", "maximum number of branches", || {
        free_crosswise();
    });
}

#[test]
fn broken_flushes_miss_what_moves() {
    for step in [Step::FlushedFirst, Step::ChangesEnd] {
        refuse_without(step, &format!("cache changes, flush without {step:?}"), "lost past the flush", || {
            flush_and_move([2, 3]);
        });
    }
}
