//! Local locks: of the changes of one compute server, those that share a page go remote one after another.
//!
//! [`LocalLocks::try_take`] takes the slots of all pages of a change, in the order of the slots, or none of them; dropping
//! what was taken frees them. Asserted: two holders never share a slot, and the later sees all that the earlier did; after
//! everybody is gone every slot is free; and if two changes want the same slots, at least one gets them (which the order
//! is for). Under loom there are two slots.
//!
//! Broken variants: slots taken by load and store have two holders; slots freed without *release* hide what the holder
//! did; a failed attempt that keeps what it already had loses slots; slots taken in the caller's order let both fail.

use std::sync::Arc;

use farlink_loom_tests::{Plain, Running, Seen, explore, refuse, run};
use farlink_runtime::{
    local_locks::{LocalLocks, SlotGuard},
    ptr::{RemotePtr, ServerId},
    sync::{AtomicBool, Ordering},
};

/// What the models need of the locks: a guard for these slots, or nothing.
trait Locks: Send + Sync + 'static {
    type SlotGuard;
    fn new() -> Self;
    fn try_take(&self, slots: &[usize]) -> Option<Self::SlotGuard>;
}

/// The real locks, and for each of the two slots a page that stands for it.
struct Real(LocalLocks, [RemotePtr; 2]);

impl Locks for Real {
    type SlotGuard = SlotGuard;

    fn new() -> Self {
        let locks = LocalLocks::new();
        let server = ServerId::new(0).expect("0 is a server id");
        let mut pages = (1..100).map(|page| RemotePtr::new(server, page * 1024).expect("not null"));
        let first = pages.next().expect("there are pages");
        let held = locks.try_take([first].into_iter());
        let other = pages.find(|&page| locks.try_take([page].into_iter()).is_some());
        drop(held);
        Self(locks, [first, other.expect("100 pages do not all share one slot of two")])
    }

    fn try_take(&self, slots: &[usize]) -> Option<SlotGuard> {
        self.0.try_take(slots.iter().map(|&slot| self.1[slot]))
    }
}

/// What the holder of a slot may touch.
type Guarded = Arc<[Plain; 2]>;

/// One change: takes the slots if it can, and touches what they guard. True if it got them.
fn change<L: Locks>(locks: &L, guarded: &Guarded, slots: &[usize]) -> bool {
    let taken = locks.try_take(slots);
    if taken.is_some() {
        for &slot in slots {
            guarded[slot].write(guarded[slot].read() + 1);
        }
    }
    taken.is_some()
}

/// Changes of these slots, each on a thread of its own; returns who got their slots.
fn changes<L: Locks, const N: usize>(wanted: [&'static [usize]; N]) -> [bool; N] {
    let locks = Arc::new(L::new());
    let guarded: Guarded = Arc::new([Plain::new(0), Plain::new(0)]);
    let threads = wanted.map(|slots| {
        let (locks, guarded) = (Arc::clone(&locks), Arc::clone(&guarded));
        run(move || change(&*locks, &guarded, slots))
    });
    let had = threads.map(Running::join);
    assert!(locks.try_take(&[0, 1]).is_some(), "a slot was lost");
    had
}

fn explore_both_slots<L: Locks>(name: &str) {
    let (one, both) = (Seen::new(), Seen::new());
    let seen = (one.clone(), both.clone());
    explore(name, move || {
        let had = changes::<L, 2>([&[0, 1], &[1, 0]]);
        assert!(had[0] || had[1], "both failed");
        if had[0] && had[1] { seen.1.mark() } else { seen.0.mark() }
    });
    one.require("one change fails");
    both.require("both get through, one after the other");
}

#[test]
fn overlapping_changes_exclude_each_other_and_one_gets_through() {
    explore_both_slots::<Real>("local locks, both slots twice");
}

/// What is wrong with the broken variants is what they differ in from this one.
#[test]
fn the_copy_with_nothing_left_out_does() {
    explore_both_slots::<Arc<Broken<NOTHING>>>("local locks, the copy, both slots twice");
}

#[test]
fn a_change_of_two_slots_beside_changes_of_one() {
    let (all, fewer) = (Seen::new(), Seen::new());
    let seen = (all.clone(), fewer.clone());
    explore("local locks, three changes", move || {
        let had = changes::<Real, 3>([&[0, 1], &[0], &[1]]);
        assert!(had.contains(&true), "all failed");
        if had == [true; 3] { seen.0.mark() } else { seen.1.mark() }
    });
    all.require("all get through");
    fewer.require("somebody fails");
}

/// The same locks with one thing left out.
struct Broken<const WHAT: u8>([AtomicBool; 2]);

const TAKEN_IN_TWO_STEPS: u8 = 0;
const FREED_RELAXED: u8 = 1;
const KEEPS_ON_FAILURE: u8 = 2;
const UNSORTED: u8 = 3;
const NOTHING: u8 = 4;

struct BrokenGuard<const WHAT: u8>(Arc<Broken<WHAT>>, Vec<usize>);

impl<const WHAT: u8> Drop for BrokenGuard<WHAT> {
    fn drop(&mut self) {
        for &slot in &self.1 {
            self.0.0[slot].store(false, if WHAT == FREED_RELAXED { Ordering::Relaxed } else { Ordering::Release });
        }
    }
}

impl<const WHAT: u8> Locks for Arc<Broken<WHAT>> {
    type SlotGuard = BrokenGuard<WHAT>;

    fn new() -> Self {
        Self::new(Broken([AtomicBool::new(false), AtomicBool::new(false)]))
    }

    fn try_take(&self, slots: &[usize]) -> Option<Self::SlotGuard> {
        let mut wanted = slots.to_vec();
        if WHAT != UNSORTED {
            wanted.sort_unstable();
        }
        let mut taken = BrokenGuard(Self::clone(self), Vec::new());
        for slot in wanted {
            let was_taken = if WHAT == TAKEN_IN_TWO_STEPS {
                let was_taken = self.0[slot].load(Ordering::Acquire);
                self.0[slot].store(true, Ordering::Relaxed);
                was_taken
            } else {
                self.0[slot].compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
            };
            if was_taken {
                if WHAT == KEEPS_ON_FAILURE {
                    taken.1.clear();
                }
                return None;
            }
            taken.1.push(slot);
        }
        Some(taken)
    }
}

#[test]
fn broken_slots_taken_in_two_steps_have_two_holders() {
    refuse("local locks, taken in two steps", "Causality violation", || {
        changes::<Arc<Broken<TAKEN_IN_TWO_STEPS>>, 2>([&[0], &[0]]);
    });
}

#[test]
fn broken_slots_freed_without_release_hide_what_was_done() {
    refuse("local locks, freed relaxed", "Causality violation", || {
        changes::<Arc<Broken<FREED_RELAXED>>, 2>([&[0], &[0]]);
    });
}

#[test]
fn broken_failures_that_keep_slots_lose_them() {
    refuse("local locks, kept on failure", "a slot was lost", || {
        changes::<Arc<Broken<KEEPS_ON_FAILURE>>, 2>([&[0, 1], &[1]]);
    });
}

#[test]
fn broken_slots_in_the_callers_order_let_both_fail() {
    refuse("local locks, in the caller's order", "both failed", || {
        let had = changes::<Arc<Broken<UNSORTED>>, 2>([&[0, 1], &[1, 0]]);
        assert!(had[0] || had[1], "both failed");
    });
}
