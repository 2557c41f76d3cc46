//! Epochs: a page is not reused while an operation may still hold its address.
//!
//! A page is unlinked and retired; maintenance stamps it with the cluster's epoch, read after that, and frees it for reuse
//! once every compute server has announced a later one. A compute server announces what [`Epochs::advance`] returns: no
//! operation of its workers that still runs, each under a [`Pin`](farlink_runtime::epoch::Pin), began earlier. The epoch
//! moves on when all have announced it. Here the page is a cell; an operation that found the link reads it, and reuse
//! writes it. Loom refuses both at once, and also a write that does not happen after the last read.
//!
//! Maintenance, pins and announcements are the runtime's own, over real endpoints.
//!
//! Broken variants: a pin, or an announcement, without its fence; a pin that ends, or a later one that begins, without
//! *release*, so that the last reads may come after the reuse; an epoch seen without *acquire*, which misleads the second of
//! two overlapping operations; a stamp by a plain READ, which may be older than the unlinking; a stamp read before the
//! unlinking.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use farlink_loom_tests::{Breaks, Peer, Plain, Seen, SharedMemory, Sound, explore, now, refuse, run, share};
use farlink_runtime::{
    epoch::{Epochs, LocalEpoch, Pin, model},
    sync::{AtomicU64, Ordering, fence},
};

/// The cluster's epoch, in the memory server.
const EPOCH: usize = 0;
/// The link to the page: not zero until it is unlinked.
const LINK: usize = 1;
/// The slots of the two compute servers: each its incarnation, and what it announces.
const SLOTS: usize = 2;
const WORDS: usize = 6;

/// The epochs of one compute server.
trait Domain: 'static {
    type Worker;
    type Pin;
    fn new() -> Self;
    fn advance(&self, epoch: u64) -> u64;
    fn worker(self: &Arc<Self>) -> Self::Worker;
    fn pin(&self, worker: &Self::Worker) -> Self::Pin;
    /// No operation follows soon.
    fn rest(&self, _worker: &Self::Worker) {}
}

impl Domain for Epochs {
    type Worker = LocalEpoch;
    type Pin = Pin;

    fn new() -> Self {
        Self::new()
    }

    fn advance(&self, epoch: u64) -> u64 {
        self.advance(epoch)
    }

    fn worker(self: &Arc<Self>) -> LocalEpoch {
        LocalEpoch::new(self)
    }

    fn pin(&self, worker: &LocalEpoch) -> Pin {
        worker.pin(self)
    }

    fn rest(&self, worker: &LocalEpoch) {
        worker.rest();
    }
}

/// The memory server, and the page.
#[derive(Clone)]
struct Cluster {
    memory: SharedMemory,
    page: Arc<Plain>,
}

impl Cluster {
    /// Epoch 1, announced by compute servers 0 and 1; the page is linked.
    fn new() -> Self {
        let memory = share(WORDS);
        for (word, value) in memory.words().iter().zip([1, 1, 1, 1, 2, 1]) {
            word.store(value, Ordering::Relaxed);
        }
        Self { memory, page: Arc::new(Plain::new(0)) }
    }

    /// Follows the link and reads the page, if it is still linked. True if it was.
    fn operate(&self, peer: &Peer, before_reading: impl FnOnce()) -> bool {
        let linked = peer.read(self.memory.at(LINK), 1)[0] != 0;
        before_reading();
        if linked {
            assert_eq!(self.page.read(), 0, "the page was reused");
        }
        linked
    }
}

/// How maintenance reads the epoch that it stamps a page with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stamp {
    /// By an atomic, after the unlinking: who sees the next epoch sees the unlinking.
    Atomic,
    /// By a READ, after the unlinking.
    Read,
    /// By an atomic, before the unlinking.
    TooEarly,
}

/// Atomics that change nothing are READs.
#[derive(Clone, Copy)]
struct LoadsByRead(bool);

impl Breaks for LoadsByRead {
    fn load(&self, peer: &Peer, at: farlink_runtime::ptr::RemotePtr) -> u64 {
        if self.0 { peer.read(at, 1)[0] } else { Sound.load(peer, at) }
    }
}

/// The maintenance of compute server `server`, which retires the page or not.
struct Maintenance<D> {
    cluster: Cluster,
    epochs: Arc<D>,
    peer: Peer,
    inner: model::Maintenance,
    breaks: LoadsByRead,
}

impl<D: Domain> Maintenance<D> {
    fn new(cluster: &Cluster, epochs: &Arc<D>, server: usize) -> Self {
        let memory = &cluster.memory;
        Self {
            cluster: cluster.clone(),
            epochs: Arc::clone(epochs),
            peer: Peer::of(memory, server as u32 + 1),
            inner: model::Maintenance::new(memory.at(EPOCH), memory.at(SLOTS), 2, server),
            breaks: LoadsByRead(false),
        }
    }

    /// Unlinks and retires the page, then does rounds until it may be reused or `rounds` are over; true if it was reused.
    fn retire(mut self, stamp: Stamp, rounds: usize) -> bool {
        let link = self.cluster.memory.at(LINK);
        self.breaks = LoadsByRead(stamp == Stamp::Read);
        if stamp == Stamp::TooEarly {
            self.inner.retire(link);
            self.round();
        }
        self.peer.write(link, &[0]);
        if stamp != Stamp::TooEarly {
            self.inner.retire(link);
        }
        let is_free = (0..rounds).any(|_| self.round());
        if is_free {
            self.cluster.page.write(1);
        }
        is_free
    }

    /// One round; true if what was retired may be used again.
    fn round(&self) -> bool {
        let advance = |epoch| self.epochs.advance(epoch);
        now(self.inner.round(&self.peer.remote(self.breaks), advance)).expect("mem refuses nothing");
        self.inner.has_free_page()
    }
}

fn domain<D: Domain>() -> Arc<D> {
    let epochs = D::new();
    epochs.advance(1);
    Arc::new(epochs)
}

/// What one execution came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Outcome {
    /// Whether maintenance reused the page.
    reused: bool,
    /// Whether an operation found the page.
    found: bool,
}

/// Two operations, one after the other, and a rest after each.
fn one_by_one<D: Domain>(cluster: &Cluster, epochs: &Arc<D>) -> bool {
    in_a_row(cluster, epochs, true)
}

/// Two operations, one at once after the other.
fn at_once<D: Domain>(cluster: &Cluster, epochs: &Arc<D>) -> bool {
    in_a_row(cluster, epochs, false)
}

fn in_a_row<D: Domain>(cluster: &Cluster, epochs: &Arc<D>, rests_between: bool) -> bool {
    let worker = epochs.worker();
    let peer = Peer::new(&cluster.memory);
    let found = [rests_between, true].map(|rests| {
        let found = {
            let _pin = epochs.pin(&worker);
            cluster.operate(&peer, || ())
        };
        if rests {
            epochs.rest(&worker);
        }
        found
    });
    found.contains(&true)
}

/// Two operations of which the first ends while the second holds the page's address.
fn overlapping<D: Domain>(cluster: &Cluster, epochs: &Arc<D>) -> bool {
    let worker = epochs.worker();
    let first = epochs.pin(&worker);
    let second = epochs.pin(&worker);
    let found = cluster.operate(&Peer::new(&cluster.memory), || drop(first));
    drop(second);
    epochs.rest(&worker);
    found
}

/// One compute server: operations of a worker against maintenance that retires the page.
fn one_server<D: Domain>(operations: fn(&Cluster, &Arc<D>) -> bool) -> Outcome {
    let cluster = Cluster::new();
    // Nobody is in the other slot.
    cluster.memory.words()[SLOTS + 2].store(0, Ordering::Relaxed);
    let epochs = domain::<D>();
    let maintenance = {
        let (cluster, epochs) = (cluster.clone(), Arc::clone(&epochs));
        run(move || Maintenance::new(&cluster, &epochs, 0).retire(Stamp::Atomic, 3))
    };
    let worker = run(move || operations(&cluster, &epochs));
    Outcome { found: worker.join(), reused: maintenance.join() }
}

/// Two compute servers: one retires the page; the other moves the epoch on and then begins an operation.
fn two_servers(stamp: Stamp) -> Outcome {
    let cluster = Cluster::new();
    let retiring = {
        let cluster = cluster.clone();
        run(move || Maintenance::new(&cluster, &domain::<Epochs>(), 0).retire(stamp, 2))
    };
    let operating = run(move || {
        let epochs = domain::<Epochs>();
        let maintenance = Maintenance::new(&cluster, &epochs, 1);
        // What it waits for keeps it moving the epoch on.
        maintenance.inner.retire(cluster.memory.at(EPOCH));
        maintenance.round();
        maintenance.round();
        let worker = epochs.worker();
        let _pin = epochs.pin(&worker);
        cluster.operate(&maintenance.peer, || ())
    });
    Outcome { found: operating.join(), reused: retiring.join() }
}

/// Explores a model and requires that the page was reused, found, and both.
fn explore_all(name: &str, model: impl Fn() -> Outcome + Send + Sync + 'static) {
    let seen = [Seen::new(), Seen::new(), Seen::new()];
    let marks = seen.clone();
    explore(name, move || {
        let outcome = model();
        for (mark, happened) in marks.iter().zip([outcome.reused, outcome.found, outcome.reused && outcome.found]) {
            if happened {
                mark.mark();
            }
        }
    });
    let [reused, found, both] = seen;
    reused.require("the page is reused");
    found.require("an operation finds the page");
    both.require("an operation finds the page and it is reused after that");
}

#[test]
fn operations_one_by_one_never_meet_a_reused_page() {
    explore_all("epochs, one by one", || one_server::<Epochs>(one_by_one));
}

#[test]
fn operations_that_follow_at_once_never_meet_a_reused_page() {
    explore_all("epochs, at once", || one_server::<Epochs>(at_once));
}

#[test]
fn overlapping_operations_never_meet_a_reused_page() {
    explore_all("epochs, overlapping", || one_server::<Epochs>(overlapping));
}

#[test]
fn a_page_that_another_compute_server_holds_is_not_reused() {
    let (reused, found) = (Seen::new(), Seen::new());
    let seen = (reused.clone(), found.clone());
    explore("epochs, two compute servers", move || {
        let outcome = two_servers(Stamp::Atomic);
        if outcome.reused {
            seen.0.mark();
        }
        if outcome.found {
            seen.1.mark();
        }
    });
    reused.require("the page is reused");
    found.require("an operation finds the page");
}

/// The epochs of one compute server with one thing left out.
struct Broken<const WHAT: u8> {
    seen: AtomicU64,
    slot: Arc<AtomicU64>,
    /// In which the last operation began.
    last: std::sync::atomic::AtomicU64,
}

const PIN_WITHOUT_FENCE: u8 = 0;
const ADVANCE_WITHOUT_FENCE: u8 = 1;
const ENDS_RELAXED: u8 = 2;
const BEGINS_RELAXED: u8 = 3;
const SEEN_RELAXED: u8 = 4;
const RESTS_UNNOTICED: u8 = 5;
const NOTHING: u8 = 6;

/// The running operations' epochs, the oldest first.
type Began = Rc<RefCell<Vec<u64>>>;

struct BrokenPin<const WHAT: u8> {
    slot: Arc<AtomicU64>,
    began: Began,
}

impl<const WHAT: u8> Drop for BrokenPin<WHAT> {
    fn drop(&mut self) {
        // The models end operations in the order of their beginning.
        self.began.borrow_mut().remove(0);
        let order = if WHAT == ENDS_RELAXED { Ordering::Relaxed } else { Ordering::Release };
        self.slot.store(self.began.borrow().first().copied().unwrap_or(u64::MAX), order);
    }
}

impl<const WHAT: u8> Domain for Broken<WHAT> {
    type Worker = Began;
    type Pin = BrokenPin<WHAT>;

    fn new() -> Self {
        Self { seen: AtomicU64::new(0), slot: Arc::new(AtomicU64::new(u64::MAX)), last: 0.into() }
    }

    fn advance(&self, epoch: u64) -> u64 {
        self.seen.store(epoch, Ordering::Release);
        if WHAT != ADVANCE_WITHOUT_FENCE {
            fence(Ordering::SeqCst);
        }
        self.slot.load(Ordering::Acquire).min(epoch)
    }

    fn worker(self: &Arc<Self>) -> Began {
        Began::default()
    }

    fn pin(&self, worker: &Began) -> BrokenPin<WHAT> {
        let order = if WHAT == SEEN_RELAXED { Ordering::Relaxed } else { Ordering::Acquire };
        let mut epoch = self.seen.load(order);
        // As if what the last operation announced still stood.
        let is_announced =
            WHAT == RESTS_UNNOTICED && self.last.swap(epoch, std::sync::atomic::Ordering::Relaxed) == epoch;
        while !is_announced && worker.borrow().is_empty() {
            let order = if WHAT == BEGINS_RELAXED { Ordering::Relaxed } else { Ordering::Release };
            self.slot.store(epoch, order);
            if WHAT != PIN_WITHOUT_FENCE {
                fence(Ordering::SeqCst);
            }
            match self.seen.load(Ordering::Relaxed) {
                now if now == epoch => break,
                now => epoch = now,
            }
        }
        worker.borrow_mut().push(epoch);
        BrokenPin { slot: Arc::clone(&self.slot), began: Rc::clone(worker) }
    }
}

/// What is wrong with the broken variants is what they differ in from this one.
#[test]
fn the_copy_with_nothing_left_out_does() {
    explore_all("epochs, the copy, one by one", || one_server::<Broken<NOTHING>>(one_by_one));
    explore_all("epochs, the copy, overlapping", || one_server::<Broken<NOTHING>>(overlapping));
}

fn refuse_variant(name: &str, model: fn() -> Outcome) {
    refuse(name, "Causality violation", move || {
        model();
    });
}

#[test]
fn broken_pins_without_a_fence_are_missed() {
    refuse_variant("epochs, pin without fence", || one_server::<Broken<PIN_WITHOUT_FENCE>>(one_by_one));
}

#[test]
fn broken_announcements_without_a_fence_miss_pins() {
    refuse_variant("epochs, advance without fence", || one_server::<Broken<ADVANCE_WITHOUT_FENCE>>(one_by_one));
}

#[test]
fn broken_ends_without_release_let_the_page_go_too_early() {
    refuse_variant("epochs, end relaxed", || one_server::<Broken<ENDS_RELAXED>>(one_by_one));
    refuse_variant("epochs, begin relaxed", || one_server::<Broken<BEGINS_RELAXED>>(one_by_one));
}

#[test]
fn broken_rests_that_the_next_operation_does_not_notice_leave_it_unseen() {
    refuse_variant("epochs, rest unnoticed", || one_server::<Broken<RESTS_UNNOTICED>>(one_by_one));
}

#[test]
fn broken_epochs_seen_without_acquire_mislead_the_second_operation() {
    refuse_variant("epochs, seen relaxed", || one_server::<Broken<SEEN_RELAXED>>(overlapping));
}

#[test]
fn broken_stamps_are_too_old() {
    refuse_variant("epochs, stamp by READ", || two_servers(Stamp::Read));
    refuse_variant("epochs, stamp before unlinking", || two_servers(Stamp::TooEarly));
}
