//! A gate that is shut before something is handed over.
//!
//! Asserted: once the gate is shut and nobody is inside, nobody changes what is behind it, and all that was changed there is seen.
//! Whoever passes once it is open again sees what was done while it was shut.
//!
//! Broken variants: who looks whether the gate is shut before he counts himself in is overlooked; so is who does so without a fence; a gate that
//! is opened without Release.

use std::{cell::Cell, rc::Rc, sync::Arc};

use farlink_loom_tests::{Plain, explore, refuse, run};
use farlink_runtime::{
    gate::{Gate, Way},
    sync::{AtomicBool, AtomicU64, Ordering, fence},
};

/// What the models need of a gate. One thread passes.
trait Gated: Send + Sync + 'static {
    type Way;
    fn new() -> Arc<Self>;
    /// Made by the thread that uses it.
    fn way(self: &Arc<Self>) -> Self::Way;
    /// Does something inside, if it gets there.
    fn pass(way: &Self::Way, inside: impl FnOnce());
    fn shut(&self);
    fn is_empty(&self) -> bool;
    fn open(&self);
}

struct Real(Arc<Gate>);

impl Gated for Real {
    type Way = Way;

    fn new() -> Arc<Self> {
        Arc::new(Self(Arc::default()))
    }

    fn way(self: &Arc<Self>) -> Way {
        self.0.way()
    }

    fn pass(way: &Way, inside: impl FnOnce()) {
        if let Some(passage) = way.pass() {
            let longer = passage.clone();
            drop(passage);
            inside();
            drop(longer);
        }
    }

    fn shut(&self) {
        self.0.shut();
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn open(&self) {
        self.0.open();
    }
}

/// The same with one count, for one thread. `LOOKS_FIRST`: whether the gate is shut is looked at before one counts oneself in. `FENCES`: there
/// is a fence in between. `RELEASES`: who passes sees what was done while the gate was shut.
struct Simple<const LOOKS_FIRST: bool, const FENCES: bool, const RELEASES: bool> {
    is_shut: AtomicBool,
    inside: AtomicU64,
}

type Right = Simple<false, true, true>;
type LooksFirst = Simple<true, true, true>;
type Unfenced = Simple<false, false, true>;
type OpenedRelaxed = Simple<false, true, false>;

impl<const LOOKS_FIRST: bool, const FENCES: bool, const RELEASES: bool> Gated
    for Simple<LOOKS_FIRST, FENCES, RELEASES>
{
    type Way = Rc<Cell<Option<Arc<Self>>>>;

    fn new() -> Arc<Self> {
        Arc::new(Self { is_shut: AtomicBool::new(false), inside: AtomicU64::new(0) })
    }

    fn way(self: &Arc<Self>) -> Self::Way {
        Rc::new(Cell::new(Some(Arc::clone(self))))
    }

    fn pass(way: &Self::Way, inside: impl FnOnce()) {
        let gate = way.take().expect("it passes once");
        let was_shut = LOOKS_FIRST && gate.is_shut.load(Ordering::Acquire);
        gate.inside.store(1, Ordering::Release);
        if FENCES {
            fence(Ordering::SeqCst);
        }
        let is_shut = if LOOKS_FIRST { was_shut } else { gate.is_shut.load(Ordering::Acquire) };
        if !is_shut {
            inside();
        }
        gate.inside.store(0, Ordering::Release);
    }

    fn shut(&self) {
        self.is_shut.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    fn is_empty(&self) -> bool {
        self.inside.load(Ordering::Acquire) == 0
    }

    fn open(&self) {
        self.is_shut.store(false, if RELEASES { Ordering::Release } else { Ordering::Relaxed });
    }
}

/// Two are behind the gate at once, or one does not see what the other has done there.
const RACE: &str = "Causality violation";

/// One comes to the gate and changes something behind it, one shuts it and takes over.
fn handed_over<G: Gated>() {
    let gate = G::new();
    let behind = Arc::new(Plain::new(0));
    let (changed, theirs) = (Arc::clone(&behind), Arc::clone(&gate));
    let changer = run(move || {
        let way = theirs.way();
        G::pass(&way, || changed.write(changed.read() + 1));
    });
    let shutter = run(move || {
        gate.shut();
        if gate.is_empty() {
            behind.write(behind.read() + 1);
            gate.open();
        }
    });
    changer.join();
    shutter.join();
}

#[test]
fn nobody_changes_what_was_handed_over() {
    explore("nobody_changes_what_was_handed_over", handed_over::<Real>);
}

/// What is wrong with the broken variants is what they differ in from this one.
#[test]
fn a_gate_of_one_count_does() {
    explore("a_gate_of_one_count_does", handed_over::<Right>);
}

#[test]
fn who_looks_before_he_counts_is_caught() {
    refuse("who_looks_before_he_counts_is_caught", RACE, handed_over::<LooksFirst>);
}

#[test]
fn what_was_done_while_it_was_shut_must_be_seen() {
    refuse("what_was_done_while_it_was_shut_must_be_seen", RACE, handed_over::<OpenedRelaxed>);
}

#[test]
fn who_has_no_fence_is_caught() {
    refuse("who_has_no_fence_is_caught", RACE, handed_over::<Unfenced>);
}
