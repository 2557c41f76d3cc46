//! What an owner has shipped to a memory server, and who takes over when the owner is dead.
//!
//! Asserted: who has fenced the dead one off and finds nothing under way is alone with its pages, and sees all that was done there. Two
//! operations may be under way at once, and what another membership of the memory server has left there does not count.
//!
//! Broken variants: who looks at the fence before it counts itself in is overlooked; so is who does so without a fence; who counts
//! itself out without *release* may still be at it; and of two who count themselves in, each in two steps, one is overlooked.

use std::{cell::Cell, sync::Arc};

use farlink_loom_tests::{Peer, Plain, Running, Seen, SharedMemory, Sound, explore, now, refuse, run, share};
use farlink_runtime::{
    fencing::{UnderWay, count_in, count_out, fence_off, may_begin},
    lock::OwnerId,
    sync::{AtomicU64, Ordering, fence},
};

const MEMBER: u64 = 2;
const HEIR: u32 = 3;
/// An operation that another membership of the memory server was at.
const LEFT: u64 = 1 << 32 | 1;

fn owner(incarnation: u64) -> OwnerId {
    OwnerId::new(incarnation).expect("small, and not 0")
}

fn dead() -> OwnerId {
    owner(5)
}

/// What a memory server's thread does around an operation.
type Serve = fn(&SharedMemory, &dyn Fn());

/// The words of the dead one's slot.
fn words(here: &SharedMemory) -> &[AtomicU64] {
    &here.words()[..2]
}

fn sound(here: &SharedMemory, act: &dyn Fn()) {
    if let Some(under_way) = UnderWay::begin_at(&here.local(), here.at(0), owner(MEMBER), dead()) {
        act();
        under_way.end();
    }
}

fn looks_first(here: &SharedMemory, act: &dyn Fn()) {
    let words = words(here);
    let may = may_begin(words, dead());
    count_in(words, owner(MEMBER));
    if may {
        act();
    }
    count_out(words, owner(MEMBER));
}

fn without_a_fence(here: &SharedMemory, act: &dyn Fn()) {
    let words = words(here);
    words[1].store(MEMBER << 32 | 1, Ordering::Relaxed);
    if may_begin(words, dead()) {
        act();
    }
    count_out(words, owner(MEMBER));
}

fn without_release(here: &SharedMemory, act: &dyn Fn()) {
    let words = words(here);
    count_in(words, owner(MEMBER));
    if may_begin(words, dead()) {
        act();
    }
    words[1].store(MEMBER << 32, Ordering::Relaxed);
}

fn counts_in_two_steps(here: &SharedMemory, act: &dyn Fn()) {
    let words = words(here);
    let found = words[1].load(Ordering::Relaxed);
    let next = if found >> 32 == MEMBER { found + 1 } else { MEMBER << 32 | 1 };
    words[1].store(next, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    if may_begin(words, dead()) {
        act();
    }
    count_out(words, owner(MEMBER));
}

/// What must happen in some execution.
#[derive(Clone, Default)]
struct Happens {
    acts: Seen,
    takes_over: Seen,
    both: Seen,
}

/// So many carry operations of the dead one out, each of a page of its own; one takes over. `left` is what the memory server finds
/// in the place of its count.
fn taken_over(serve: Serve, operations: usize, left: u64, happens: &Happens) {
    let memory = share(2);
    memory.words()[1].store(left, Ordering::Relaxed);
    let pages: Vec<_> = (0..operations).map(|_| Arc::new(Plain::new(0))).collect();
    let of_heir = pages.clone();
    let serves = |changed: Arc<Plain>| {
        let here = Arc::clone(&memory);
        run(move || {
            let acts = Cell::new(false);
            serve(&here, &|| {
                changed.write(changed.read() + 1);
                acts.set(true);
            });
            acts.get()
        })
    };
    let servers: Vec<_> = pages.into_iter().map(serves).collect();
    let heir = run(move || {
        let peer = Peer::of(&memory, HEIR);
        let fenced = now(fence_off(&peer.remote(Sound), memory.at(0), dead(), async || Ok(true)));
        let takes_over = fenced.expect("nothing is lost").is_none();
        if takes_over {
            of_heir.iter().for_each(|page| page.write(page.read() + 1));
        }
        takes_over
    });
    let acts = servers.into_iter().map(Running::join).fold(true, |all, acts| all && acts);
    let takes_over = heir.join();
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
    refuse(name, RACE, move || taken_over(serve, 1, 0, &Happens::default()));
}

fn is_alone(name: &str, operations: usize, left: u64) {
    let happens = Happens::default();
    let of_model = happens.clone();
    explore(name, move || taken_over(sound, operations, left, &of_model));
    happens.acts.require("the memory server acts");
    happens.takes_over.require("the heir takes over");
    happens.both.require("the memory server has acted when the heir takes over");
}

#[test]
fn who_takes_over_is_alone() {
    is_alone("who_takes_over_is_alone", 1, 0);
}

#[test]
fn who_takes_over_from_two_operations_is_alone() {
    is_alone("who_takes_over_from_two_operations_is_alone", 2, LEFT);
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

#[test]
fn one_of_two_who_count_in_two_steps_is_caught() {
    refuse("one_of_two_who_count_in_two_steps_is_caught", RACE, || {
        taken_over(counts_in_two_steps, 2, LEFT, &Happens::default());
    });
}
