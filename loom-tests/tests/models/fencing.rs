//! What an owner has shipped to a memory server, and who takes over when the owner is dead.
//!
//! Asserted: who has fenced the dead one off and finds nothing under way is alone with its pages, and sees all that was done there.
//!
//! Broken variants: who looks at the fence before it counts itself in is overlooked; so is who does so without a fence; and who counts
//! itself out without *release* may still be at it.

use std::{cell::Cell, sync::Arc};

use farlink_loom_tests::{Peer, Plain, Seen, Sound, explore, now, refuse, run, share};
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

/// What must happen in some execution.
#[derive(Clone, Default)]
struct Happens {
    acts: Seen,
    takes_over: Seen,
    both: Seen,
}

/// One carries an operation of the dead one out, one takes over.
fn taken_over(serve: Serve, happens: &Happens) {
    let memory = share(2);
    let page = Arc::new(Plain::new(0));
    let (here, changed) = (Arc::clone(&memory), Arc::clone(&page));
    let server = run(move || {
        let acts = Cell::new(false);
        serve(&here.words()[..2], &|| {
            changed.write(changed.read() + 1);
            acts.set(true);
        });
        acts.get()
    });
    let heir = run(move || {
        let peer = Peer::of(&memory, HEIR);
        let fenced = now(fence_off(&peer.remote(Sound), memory.at(0), dead(), async || Ok(true)));
        let takes_over = fenced.expect("nothing is lost").is_none();
        if takes_over {
            page.write(page.read() + 1);
        }
        takes_over
    });
    let (acts, takes_over) = (server.join(), heir.join());
    for (seen, happens) in
        [(acts, &happens.acts), (takes_over, &happens.takes_over), (acts && takes_over, &happens.both)]
    {
        if seen {
            happens.mark();
        }
    }
}

/// Two have a page at once.
const RACE: &str = "Causality violation";

fn is_caught(name: &str, serve: Serve) {
    refuse(name, RACE, move || taken_over(serve, &Happens::default()));
}

#[test]
fn who_takes_over_is_alone() {
    let happens = Happens::default();
    let of_model = happens.clone();
    explore("who_takes_over_is_alone", move || taken_over(sound, &of_model));
    happens.acts.require("the memory server acts");
    happens.takes_over.require("the heir takes over");
    happens.both.require("the memory server has acted when the heir takes over");
}

#[test]
fn who_looks_before_it_counts_is_caught() {
    is_caught("who_looks_before_it_counts_is_caught", looks_first);
}

#[test]
fn who_has_no_fence_is_caught() {
    is_caught("who_has_no_fence_is_caught", without_a_fence);
}

#[test]
fn who_is_counted_out_too_early_is_caught() {
    is_caught("who_is_counted_out_too_early_is_caught", without_release);
}
