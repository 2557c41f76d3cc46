//! Freed pages come back: to the next split, to other compute servers, and to the memory servers in the end; but never while
//! somebody may still hold their address.
//!
//! Everything here is counted, not timed: two compute servers take turns on one thread and do their own maintenance.

use std::{
    cell::Cell,
    collections::BTreeSet,
    future::{Future, poll_fn},
    pin::pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use farlink_runtime::{
    access::{Access, FastPath as _},
    audit::{self, Memory},
    compute::ComputeServer,
    error::Error,
    fabric::Fabric,
    layout::CHUNK_BYTES,
    lock::{LockState, LockWord},
    one_sided::{OneSided, Proof},
    operation::retry,
    page::LOCK,
    ptr::RemotePtr,
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    cluster,
    direct::Direct,
    raw, settings,
    subject::{StructureName, Subject},
    test_every_structure,
};

const TREE: &str = "reclaim";
const PAGE_BYTES: usize = 256;
/// Operations of one compute server between two rounds of its maintenance.
const SHIFT: usize = 256;

/// Of a Bw-tree, which has pages of two sizes, and numbers for them in pages of others: of each size a chunk more may be begun on
/// each of two servers than when there was room for as many pages in fewer chunks.
fn slack<S: Subject>() -> u64 {
    if S::WHICH == StructureName::BwTree { 2 * 2 * CHUNK_BYTES } else { 0 }
}

/// A worker of a compute server that does its own maintenance.
struct Member<S: Subject> {
    // Before the compute server, which it belongs to.
    tree: Map<S, OneSided<S>>,
    worker: Worker,
    compute: Rc<ComputeServer>,
}

impl<S: Subject> Member<S> {
    fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Self {
        Self::of(Rc::new(cluster::join_manual(fabric, seed).unwrap()))
    }

    fn of(compute: Rc<ComputeServer>) -> Self {
        let worker = compute.worker().unwrap();
        let tree = worker.block_on(Map::open(&worker, TREE, Proof::Checksum)).unwrap();
        Self { tree, worker, compute }
    }

    /// A second worker of the same compute server.
    fn colleague(&self) -> Self {
        Self::of(Rc::clone(&self.compute))
    }

    fn maintain(&self) {
        self.worker.block_on(self.compute.maintain(&self.worker)).unwrap();
    }

    /// Whether all that it has freed is back in its chunks, while this other worker maintains another compute server, so long after each
    /// round once more.
    fn settles_beside(&self, other: &Worker, of: &ComputeServer, rest: Duration) -> bool {
        let maintain = || Box::pin(other.drive(of.maintain(other)));
        let (mut settling, mut maintaining) = (pin!(self.compute.settle(&self.worker)), maintain());
        let mut due = Instant::now() + rest;
        let settled = poll_fn(|cx| {
            if Instant::now() >= due && maintaining.as_mut().poll(cx).is_ready() {
                maintaining = maintain();
                due = Instant::now() + rest;
            }
            settling.as_mut().poll(cx)
        });
        self.worker.block_on(settled).unwrap()
    }

    fn memory(&self) -> Memory {
        self.worker.block_on(audit::memory(&self.worker)).unwrap()
    }

    fn insert(&self, keys: &[u64]) {
        let insert = async || {
            for &key in keys {
                assert!(self.tree.insert(key, key).await?);
            }
            Ok::<_, Error>(())
        };
        self.worker.block_on(insert()).unwrap();
    }

    fn remove(&self, keys: &[u64]) {
        let remove = async || {
            for &key in keys {
                assert_eq!(self.tree.remove(key).await?, Some(key));
            }
            Ok::<_, Error>(())
        };
        self.worker.block_on(remove()).unwrap();
    }
}

fn fabric<S: Subject>() -> Cluster {
    let fabric = Cluster::of_this_run(2, 16 << 20, FabricProfile::Fast).unwrap();
    cluster::create::<S>(&fabric, TREE, PAGE_BYTES, Proof::Checksum).unwrap();
    fabric
}

fn keys(count: u64) -> Vec<u64> {
    (0..count).map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

/// The members take turns: each does its share of the keys, a shift at a time, and then its maintenance.
fn in_shifts<S: Subject>(members: &[Member<S>], keys: &[u64], work: impl Fn(&Member<S>, &[u64])) {
    for shifts in keys.chunks(SHIFT * members.len()) {
        for (member, shift) in members.iter().zip(shifts.chunks(SHIFT)) {
            work(member, shift);
        }
        members.iter().for_each(Member::maintain);
    }
}

/// Rounds of inserting and removing the same keys: at the most `growth` times the memory of the first one.
fn rounds<S: Subject>(fabric: &Arc<dyn Fabric>, members: [Member<S>; 2], growth: f64) {
    // For some thousand pages; a Bw-tree's writes are pages.
    let count = match S::WHICH {
        StructureName::BTree => 8_000,
        StructureName::SkipList => 4_000,
        StructureName::BwTree => 3_000,
    };
    let keys = keys(settings::from_env("FARLINK_RECLAIM_KEYS", count));
    let reversed: Vec<u64> = keys.iter().rev().copied().collect();
    let mut first = None;
    for round in 0..4 {
        in_shifts(&members, &keys, Member::insert);
        // Removed in the other order, and so by the other member for the most part.
        in_shifts(&members, &reversed, Member::remove);
        let leased = members[0].memory().leased_bytes;
        let first = *first.get_or_insert(leased);
        println!("round {round}: {leased} bytes leased");
        assert!(
            leased as f64 <= first as f64 * growth + slack::<S>() as f64,
            "round {round}: {leased} bytes leased, {first} in the first one"
        );
    }
    settle(&members);
    drop(members);
    let report = cluster::check_tree(fabric, TREE).unwrap();
    assert!(report.is_clean() && report.pages() == 1, "{report:?}");
    assert_eq!(report.audit.held, 0, "pages are held after all have left");
}

fn the_same_keys_again_and_again_take_no_more_memory<S: Subject>() {
    let fabric = fabric::<S>();
    let first = Member::<S>::join(&fabric, 1);
    let second = first.colleague();
    rounds(&fabric, [first, second], 1.02);
}

/// What one compute server frees stays with it for its own use, up to a limit; so two of them need more. That nothing is
/// lost shows when they have left.
fn two_compute_servers_keep_some_memory_each<S: Subject>() {
    let fabric = fabric::<S>();
    rounds(&fabric, [Member::<S>::join(&fabric, 1), Member::join(&fabric, 2)], 1.5);
}

fn pages_survive_those_who_held_them<S: Subject>() {
    let fabric = fabric::<S>();
    let keys = keys(settings::from_env("FARLINK_RECLAIM_KEYS", 3000).min(5000));
    let mut leased = None;
    for generation in 0..4 {
        let member = Member::<S>::join(&fabric, generation);
        in_shifts(std::slice::from_ref(&member), &keys, Member::insert);
        in_shifts(std::slice::from_ref(&member), &keys, Member::remove);
        println!("generation {generation}: {:?}", member.worker.counters());
        drop(member);
        let report = cluster::check_tree(&fabric, TREE).unwrap();
        assert!(report.is_clean() && report.pages() == 1, "{report:?}");
        assert_eq!(report.audit.held, 0, "generation {generation}");
        let memory = cluster::with_worker(&fabric, |worker| worker.block_on(audit::memory(worker))).unwrap();
        assert_eq!(memory.used_bytes(), report.bytes, "only the root is in use: {memory:?}");
        let leased = *leased.get_or_insert(memory.leased_bytes);
        let limit = leased + slack::<S>();
        assert!(memory.leased_bytes <= limit, "generation {generation} needed more than the first: {memory:?}");
    }
}

/// Maintenance of all, until no retired page can be waiting for anybody.
fn settle<S: Subject>(members: &[Member<S>]) {
    for _ in 0..8 {
        members.iter().for_each(Member::maintain);
    }
}

/// The pages that are marked free, of those that were in use before, with their versions: one that was used again and is free again
/// has another.
fn free_of(fabric: &Arc<dyn Fabric>, pages: &[RemotePtr]) -> BTreeSet<(RemotePtr, u64)> {
    let direct = Direct::new(fabric, 0).unwrap();
    let lock = |&at: &RemotePtr| (at, LockWord::from_word(direct.read(at, 1).unwrap()[LOCK]));
    let free = pages.iter().map(lock).filter(|(_, lock)| lock.state() == LockState::Free);
    free.map(|(at, lock)| (at, lock.version())).collect()
}

/// Who leaves while another one holds up the epoch hands over what it cannot free yet.
fn who_leaves_hands_its_pages_over<S: Subject>() {
    let fabric = fabric::<S>();
    let [reader, writer] = [Member::<S>::join(&fabric, 1), Member::join(&fabric, 2)];
    let keys = keys(1000);
    writer.insert(&keys);
    settle(std::slice::from_ref(&writer));
    let pages = raw::pages_of(&fabric, writer.tree.structure().id, writer.tree.structure().class);
    let pin = reader.worker.pin();
    writer.remove(&keys);
    let freed = free_of(&fabric, &pages);
    drop(writer);
    for _ in 0..8 {
        reader.maintain();
    }
    assert!(!freed.is_empty() && free_of(&fabric, &pages) == freed, "a page was reused though a reader may hold it");
    drop(pin);
    settle(std::slice::from_ref(&reader));
    drop(reader);
    let report = cluster::check_tree(&fabric, TREE).unwrap();
    assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
}

fn a_pinned_reader_holds_reuse_back<S: Subject>() {
    let fabric = fabric::<S>();
    let members = [Member::<S>::join(&fabric, 1), Member::join(&fabric, 2)];
    let [reader, writer] = &members;
    let keys = keys(settings::from_env("FARLINK_RECLAIM_KEYS", 1200).clamp(1000, 2000));
    let others: Vec<u64> = keys.iter().map(|key| key ^ 1).collect();
    let maintain = || settle(&members);
    writer.insert(&keys);
    maintain();
    let structure = writer.tree.structure().clone();
    let pages = raw::pages_of(&fabric, structure.id, structure.class);
    let pin = reader.worker.pin();
    writer.remove(&keys);
    let freed = free_of(&fabric, &pages);
    assert!(freed.len() > 100, "only {} pages were freed", freed.len());
    // However much is allocated meanwhile, these are not touched.
    for _ in 0..3 {
        maintain();
        writer.insert(&others);
        maintain();
        assert_eq!(free_of(&fabric, &pages), freed, "a page was reused though a reader may hold its address");
        writer.remove(&others);
    }
    drop(pin);
    maintain();
    // What was freed last is used first, so use all of it. What is freed meanwhile does not come back: nobody maintains.
    let leased = writer.memory().leased_bytes;
    let all: Vec<u64> = others.iter().flat_map(|key| [*key, key ^ 2, key ^ 4]).collect();
    writer.insert(&all);
    let now = writer.memory().leased_bytes;
    assert!(now <= leased + slack::<S>(), "new chunks were leased, though pages were free: {now}, {leased} before");
    for _ in 0..5 {
        writer.remove(&all);
        writer.insert(&all);
    }
    writer.insert(&keys);
    assert_ne!(free_of(&fabric, &pages), freed, "nothing is reused, though nobody holds it back");
    writer.remove(&keys);
    writer.remove(&all);
    maintain();
    drop(members);
    let report = cluster::check_tree(&fabric, TREE).unwrap();
    assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
}

/// As an operation does, so does an attempt outside of one.
#[test]
fn an_attempt_holds_reuse_back_until_it_has_ended() {
    let fabric = fabric::<Tree>();
    let members = [Member::<Tree>::join(&fabric, 1), Member::join(&fabric, 2)];
    let [reader, writer] = &members;
    let keys = keys(1000);
    let others: Vec<u64> = keys.iter().map(|key| key ^ 1).collect();
    writer.insert(&keys);
    settle(&members);
    let structure = writer.tree.structure().clone();
    let pages = raw::pages_of(&fabric, structure.id, structure.class);
    let (worker, may_end) = (reader.tree.access().context().worker.clone(), Rc::new(Cell::new(false)));
    let told = Rc::clone(&may_end);
    let attempt = reader.worker.spawn(async move {
        let until_told = async || {
            while !told.get() {
                worker.yield_now().await;
            }
            Ok(())
        };
        retry(&worker, until_told).await
    });
    reader.worker.turn();
    writer.remove(&keys);
    let freed = free_of(&fabric, &pages);
    settle(&members);
    writer.insert(&others);
    assert!(freed.len() > 100 && free_of(&fabric, &pages) == freed, "a page was reused that an attempt may hold");
    may_end.set(true);
    reader.worker.block_on(attempt).unwrap();
    settle(&members);
    writer.remove(&others);
    writer.insert(&keys);
    assert_ne!(free_of(&fabric, &pages), freed, "nothing is reused, though nobody holds it back");
}

/// A worker that is driven by somebody else's executor, and then by nobody, holds nothing back: neither behind an operation that has
/// ended, nor behind one that was dropped.
#[test]
fn a_worker_that_nobody_drives_any_more_holds_nothing_back() {
    for polls_max in [u32::MAX, 1] {
        let fabric = fabric::<Tree>();
        let [driven, writer] = [Member::<Tree>::join(&fabric, 1), Member::join(&fabric, 2)];
        let colleague = driven.compute.worker().unwrap();
        writer.insert(&keys(1000));
        driven.worker.block_on(driven.tree.access().enter()).unwrap();
        {
            let mut getting = pin!(driven.worker.drive(driven.tree.get(0)));
            let mut polls = 0;
            while polls < polls_max && getting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                polls += 1;
            }
            assert_eq!(polls == polls_max, polls_max == 1, "it ends behind {polls} polls");
        }
        writer.remove(&keys(1000));
        assert!(writer.settles_beside(&colleague, &driven.compute, Duration::ZERO), "{polls_max} polls");
    }
}

/// A round of maintenance whose caller gives it up has announced its epoch before a later one does.
#[test]
fn a_round_that_is_given_up_takes_no_later_announcement_back() {
    let fabric = fabric::<Tree>();
    let [other, writer] = [Member::<Tree>::join(&fabric, 1), Member::join(&fabric, 2)];
    let colleague = other.compute.worker().unwrap();
    let keys: Vec<u64> = (0..4000).collect();
    writer.insert(&keys);
    let mut removals = keys.chunks(100).map(|keys| writer.remove(keys));
    // With pages that wait for it the epoch moves on.
    let seen = other.worker.epoch_seen();
    while writer.worker.epoch_seen() == seen {
        removals.next().expect("the epoch stands still");
        writer.maintain();
    }
    {
        let mut maintaining = pin!(other.compute.maintain(&other.worker));
        other.worker.block_on(poll_fn(|cx| {
            assert!(maintaining.as_mut().poll(cx).is_pending(), "it has come to its end");
            if other.worker.epoch_seen() == seen { Poll::Pending } else { Poll::Ready(()) }
        }));
    }
    while writer.worker.epoch_seen() < seen + 4 {
        removals.next().expect("the epoch stands still");
        colleague.block_on(other.compute.maintain(&colleague)).unwrap();
        writer.maintain();
    }
    // It announces the epoch that there is: there would be no more to say.
    colleague.block_on(other.compute.maintain(&colleague)).unwrap();
    // Whatever the one that was given up has left is sent now.
    assert_eq!(other.worker.block_on(other.tree.get(0)).unwrap(), None);
    removals.for_each(drop);
    assert!(writer.settles_beside(&colleague, &other.compute, Duration::ZERO));
}

/// Who settles waits for a neighbour that has been idle, and announces epochs seldom.
#[test]
fn an_idle_neighbour_is_waited_for() {
    let fabric = fabric::<Tree>();
    let [idle, writer] = [Member::<Tree>::join(&fabric, 1), Member::join(&fabric, 2)];
    writer.insert(&keys(1000));
    writer.remove(&keys(1000));
    assert!(writer.settles_beside(&idle.worker, &idle.compute, Duration::from_millis(250)));
}

test_every_structure!(
    the_same_keys_again_and_again_take_no_more_memory,
    two_compute_servers_keep_some_memory_each,
    pages_survive_those_who_held_them,
    a_pinned_reader_holds_reuse_back,
    who_leaves_hands_its_pages_over;
    bwtree: the_same_keys_again_and_again_take_no_more_memory, two_compute_servers_keep_some_memory_each,
    pages_survive_those_who_held_them, a_pinned_reader_holds_reuse_back, who_leaves_hands_its_pages_over,
);
