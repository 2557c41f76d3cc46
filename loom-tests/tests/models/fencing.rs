//! What an owner has shipped to a memory server, and who takes over when the owner is dead.
//!
//! Asserted: who has fenced the dead one off and finds nothing under way is alone with its pages, and sees all that was done there.
//!
//! Broken variants: who looks at the fence before it counts itself in is overlooked; so is who does so without a fence; and who counts
//! itself out without *release* may still be at it.

use std::sync::Arc;

use farlink_loom_tests::{Peer, Plain, Sound, explore, now, refuse, run, share};
use farlink_runtime::{
    fencing::{count_in, count_out, fence_off, may_begin},
    lock::OwnerId,
    sync::{AtomicU64, Ordering},
};

const MEMBER: u64 = 2;
const HEIR: u32 = 3;

fn owner(incarnation: u64) -> OwnerId {
    OwnerId::new(incarnation).expect("small, and not 0")
}

fn dead() -> OwnerId {
    owner(5)
}

/// What a memory server's thread does around an operation.
type Serve = fn(&[AtomicU64], &dyn Fn());

fn sound(words: &[AtomicU64], act: &dyn Fn()) {
    count_in(words, owner(MEMBER));
    if may_begin(words, dead()) {
        act();
    }
    count_out(words, owner(MEMBER));
}

fn looks_first(words: &[AtomicU64], act: &dyn Fn()) {
    let may = may_begin(words, dead());
    count_in(words, owner(MEMBER));
    if may {
        act();
    }
    count_out(words, owner(MEMBER));
}

fn without_a_fence(words: &[AtomicU64], act: &dyn Fn()) {
    words[1].store(MEMBER << 32 | 1, Ordering::Relaxed);
    if may_begin(words, dead()) {
        act();
    }
    count_out(words, owner(MEMBER));
}

fn without_release(words: &[AtomicU64], act: &dyn Fn()) {
    count_in(words, owner(MEMBER));
    if may_begin(words, dead()) {
        act();
    }
    words[1].store(MEMBER << 32, Ordering::Relaxed);
}

/// One carries an operation of the dead one out, one takes over.
fn taken_over(serve: Serve) {
    let memory = share(2);
    let page = Arc::new(Plain::new(0));
    let (here, changed) = (Arc::clone(&memory), Arc::clone(&page));
    let server = run(move || serve(&here.words()[..2], &|| changed.write(changed.read() + 1)));
    let heir = run(move || {
        let peer = Peer::of(&memory, HEIR);
        let fenced = now(fence_off(&peer.remote(Sound), memory.at(0), dead(), async || Ok(true)));
        if fenced.expect("nothing is lost").is_none() {
            page.write(page.read() + 1);
        }
    });
    server.join();
    heir.join();
}

#[test]
fn who_takes_over_is_alone() {
    explore("who_takes_over_is_alone", || taken_over(sound));
}

#[test]
fn who_looks_before_it_counts_is_caught() {
    refuse("who_looks_before_it_counts_is_caught", "", || taken_over(looks_first));
}

#[test]
fn who_has_no_fence_is_caught() {
    refuse("who_has_no_fence_is_caught", "", || taken_over(without_a_fence));
}

#[test]
fn who_is_counted_out_too_early_is_caught() {
    refuse("who_is_counted_out_too_early_is_caught", "", || taken_over(without_release));
}
