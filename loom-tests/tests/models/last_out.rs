//! A compute server whose workers and whose holder are dropped at once: the last one leaves the cluster.
//!
//! Asserted: one of them leaves, and only one; it sees what the others have done.
//!
//! Broken variant: a holder that stores that it is gone, where it is to swap.

use std::sync::Arc;

use farlink_loom_tests::{Plain, explore, refuse, run};
use farlink_runtime::{
    last_out::LastOut,
    sync::{AtomicBool, AtomicU64, Ordering},
};

/// What the models need of it: two workers, and a holder.
trait Parting: Send + Sync + 'static {
    fn new() -> Self;
    fn worker_ended(&self) -> bool;
    fn abandon(&self) -> bool;
}

impl Parting for LastOut {
    fn new() -> Self {
        let parting = Self::default();
        parting.worker_began();
        parting.worker_began();
        parting
    }

    fn worker_ended(&self) -> bool {
        self.worker_ended()
    }

    fn abandon(&self) -> bool {
        self.abandon()
    }
}

/// The same. `SWAPS`: the holder swaps the word that says that it is gone.
struct Copy<const SWAPS: bool> {
    workers: AtomicU64,
    is_abandoned: AtomicBool,
}

impl<const SWAPS: bool> Parting for Copy<SWAPS> {
    fn new() -> Self {
        Self { workers: AtomicU64::new(2), is_abandoned: AtomicBool::new(false) }
    }

    fn worker_ended(&self) -> bool {
        self.workers.fetch_sub(1, Ordering::AcqRel) == 1 && self.is_abandoned.swap(false, Ordering::AcqRel)
    }

    fn abandon(&self) -> bool {
        if SWAPS {
            self.is_abandoned.swap(true, Ordering::AcqRel);
        } else {
            self.is_abandoned.store(true, Ordering::Release);
        }
        self.workers.load(Ordering::Acquire) == 0 && self.is_abandoned.swap(false, Ordering::AcqRel)
    }
}

const STAYS: &str = "so many leave";

fn all_go<P: Parting>() {
    let parting = Arc::new(P::new());
    let done = Arc::new([Plain::new(0), Plain::new(0), Plain::new(0)]);
    let goes = |number: usize, go: fn(&P) -> bool| {
        let (parting, done) = (Arc::clone(&parting), Arc::clone(&done));
        run(move || {
            done[number].write(1);
            let leaves = go(&parting);
            if leaves {
                assert!(done.iter().all(|done| done.read() == 1));
            }
            u32::from(leaves)
        })
    };
    let all = [goes(0, P::worker_ended), goes(1, P::worker_ended), goes(2, P::abandon)];
    let leave: u32 = all.into_iter().map(|one| one.join()).sum();
    assert_eq!(leave, 1, "{STAYS}");
}

#[test]
fn the_last_one_leaves() {
    explore("the_last_one_leaves", all_go::<LastOut>);
}

/// What is wrong with the broken variant is what it differs in from this one.
#[test]
fn the_last_one_leaves_as_the_copy_has_it() {
    explore("the_last_one_leaves_as_the_copy_has_it", all_go::<Copy<true>>);
}

#[test]
fn a_holder_that_stores_is_caught() {
    refuse("a_holder_that_stores_is_caught", STAYS, all_go::<Copy<false>>);
}
