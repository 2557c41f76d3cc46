//! Operations that wait for their owner's log.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake},
};

use farlink_offload::{Admission, Durability};
use farlink_runtime::{
    error::Error,
    fabric::{
        Fabric,
        faulty::{FaultKinds, FaultOptions, FaultyFabric},
        mortal::{MortalFabric, Order},
    },
};
use farlink_structures::map::KeyRange;
use farlink_tests::{backend::FabricProfile, settings};

use crate::scene::{CACHE_BYTES_ALL, Map, Member, Owned, assert_left_clean, cache, difference, fabric, settle, sparse};

/// So many turns are more than all of them need.
const TURNS: u32 = 10_000;

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

type Found<'a> = dyn Future<Output = Result<Option<u64>, Error>> + 'a;

/// An operation that is polled when it was woken, and else not.
struct Put<'a> {
    future: Option<Pin<Box<Found<'a>>>>,
    woken: Arc<Woken>,
}

impl<'a> Put<'a> {
    fn of(future: impl Future<Output = Result<Option<u64>, Error>> + 'a) -> Self {
        Self { future: Some(Box::pin(future)), woken: Arc::new(Woken(true.into())) }
    }

    fn poll(&mut self) {
        if let Some(future) = &mut self.future
            && self.woken.0.swap(false, Ordering::Relaxed)
            && let Poll::Ready(put) = future.as_mut().poll(&mut Context::from_waker(&Arc::clone(&self.woken).into()))
        {
            put.unwrap();
            self.future = None;
        }
    }
}

/// The operations of a worker wait for the log as one. Whichever is dropped, or rests, and whenever, the others come to their end.
#[test]
fn who_waits_for_the_log_needs_none_of_the_others() {
    const COUNT: usize = 6;
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let tree = owner.own(&cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged), KeyRange::ALL);
    assert_eq!(owner.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
    for round in 0..COUNT * 8 {
        let (missing, turns_before, rests) = (round / 2 % COUNT, round / 2 / COUNT, round % 2 == 1);
        let (key, value) = (|number: usize| (round * COUNT + number) as u64 * 10, 1000 + round as u64);
        let mut puts: Vec<Put<'_>> = (0..COUNT).map(|number| Put::of(tree.upsert(key(number), value))).collect();
        puts.iter_mut().for_each(Put::poll);
        assert!(puts.iter().all(|put| put.future.is_some()), "{round}: all wait for the log");
        for _ in 0..turns_before {
            owner.worker.turn();
            puts.iter_mut().for_each(Put::poll);
        }
        let resting = puts[missing].future.take().filter(|_| rests);
        let mut turns = 0;
        while puts.iter().any(|put| put.future.is_some()) {
            owner.worker.turn();
            puts.iter_mut().for_each(Put::poll);
            turns += 1;
            assert!(turns < TURNS, "{round}: somebody waits for one that is not polled");
        }
        drop(puts);
        if let Some(resting) = resting {
            owner.worker.block_on(resting).unwrap();
        }
        for number in 0..COUNT {
            let found = owner.worker.block_on(tree.get(key(number))).unwrap();
            assert!(number == missing && !rests || found == Some(value), "{round}: {found:?}");
            model.extend(found.map(|found| (key(number), found)));
        }
    }
    owner.worker.block_on(tree.access().close()).unwrap();
    drop(tree);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "dropped");
}

/// What waits for the log goes into it together: one WRITE for all, not one for each.
#[test]
fn those_who_wait_for_the_log_are_written_together() {
    const ROUNDS: usize = 100;
    // When a segment of the log begins, it is wiped first.
    const OF_A_SEGMENT: u64 = 16;
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let tree = owner.own(&cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged), KeyRange::ALL);
    assert_eq!(owner.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
    let [alone, of_16] = [1, 16].map(|count| {
        let before = owner.worker.counters();
        for round in 0..ROUNDS {
            let (key, value) = (|number: usize| (round * 7 + number) as u64 * 10, (count * 1000 + round) as u64);
            let mut puts: Vec<Put<'_>> = (0..count).map(|number| Put::of(tree.upsert(key(number), value))).collect();
            let mut turns = 0;
            while puts.iter().any(|put| put.future.is_some()) {
                puts.iter_mut().for_each(Put::poll);
                owner.worker.turn();
                turns += 1;
                assert!(turns < TURNS, "{round}: they wait for ever");
            }
            model.extend((0..count).map(|number| (key(number), value)));
        }
        (owner.worker.counters() - before).writes
    });
    println!("{alone} WRITEs of {ROUNDS} puts one by one, {of_16} of as many times 16");
    assert!(alone <= ROUNDS as u64 + OF_A_SEGMENT, "{alone} WRITEs of {ROUNDS} puts one by one");
    assert!(of_16 * 5 <= 16 * ROUNDS as u64, "{of_16} WRITEs of {ROUNDS} times 16 puts");
    owner.worker.block_on(tree.access().close()).unwrap();
    drop(tree);
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "written together");
}

/// Whoever writes the log for others does so for a while: a worker with nothing left to do comes to its end, however busy the others are.
#[test]
fn who_writes_for_others_comes_to_its_end() {
    const COUNT: usize = 6;
    let model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let colleague = owner.colleague();
    let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
    let trees = [&owner, &colleague].map(|member| member.own(&cache, KeyRange::ALL));
    for (member, tree) in [&owner, &colleague].into_iter().zip(&trees) {
        assert_eq!(member.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
    }
    let begin = |value| {
        let mut first = Put::of(trees[0].upsert(0, value));
        first.poll();
        assert!(owner.worker.is_unfinished(), "it writes the log");
        first
    };
    let (mut last, mut value) = (model.clone(), 1000);
    for round in 0..20 {
        value += 1;
        let mut first = begin(value);
        let mut puts: Vec<Option<Put<'_>>> = (0..COUNT).map(|_| None).collect();
        let mut turns = 0;
        while first.future.is_some() || owner.worker.is_unfinished() {
            // Half of them at a time: when some have come to their end, others have begun to wait.
            for (number, put) in puts.iter_mut().enumerate().filter(|(number, _)| number % 2 == turns % 2) {
                put.iter_mut().for_each(Put::poll);
                if put.as_ref().is_none_or(|put| put.future.is_none()) {
                    value += 1;
                    let key = 10 + number as u64 * 10;
                    put.insert(Put::of(trees[1].upsert(key, value))).poll();
                    last.insert(key, value);
                }
            }
            owner.worker.turn();
            colleague.worker.turn();
            first.poll();
            turns += 1;
            assert!(turns < 50, "{round}: it writes on and on");
        }
        while puts.iter().flatten().any(|put| put.future.is_some()) || colleague.worker.is_unfinished() {
            colleague.worker.turn();
            puts.iter_mut().flatten().for_each(Put::poll);
        }
    }
    // Once it has nothing to do, it needs no more turns.
    for turns_before in 0..8 {
        value += 1;
        let mut first = begin(value);
        let mut second = None;
        for turns in 0..TURNS {
            if turns == turns_before {
                second = Some(Put::of(trees[1].upsert(10, value)));
                last.insert(10, value);
            }
            if first.future.is_some() {
                owner.worker.turn();
                first.poll();
            }
            second.iter_mut().for_each(Put::poll);
            colleague.worker.turn();
            if second.as_ref().is_some_and(|second| second.future.is_none()) {
                break;
            }
        }
        assert!(
            second.is_some_and(|second| second.future.is_none()),
            "{turns_before}: it waits for one that has no turns"
        );
        assert!(first.future.is_none());
    }
    last.insert(0, value);
    owner.worker.block_on(trees[0].access().close()).unwrap();
    drop(trees);
    settle([&owner, &colleague]);
    drop((colleague, owner));
    assert_left_clean(&fabric, &last, "written for others");
}

/// An operation that comes after its worker's end gets nowhere, and holds nobody up.
#[test]
fn who_comes_after_the_end_of_its_worker_holds_nobody_up() {
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let Member { worker, tree, compute } = owner.colleague();
    let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
    let own = owner.own(&cache, KeyRange::ALL);
    let structure = owner.tree.structure().clone();
    let of_the_other = Owned::over(worker.block_on(cache.own(&worker, structure, KeyRange::ALL)).unwrap());
    worker.block_on(of_the_other.upsert(10, 7)).unwrap();
    drop(worker);
    let mut late = Put::of(of_the_other.upsert(10, 8));
    late.poll();
    assert!(late.future.is_some(), "it gets nowhere");
    let mut put = Put::of(own.upsert(20, 9));
    let mut turns = 0;
    while put.future.is_some() {
        put.poll();
        owner.worker.turn();
        turns += 1;
        assert!(turns < TURNS, "it waits for who has no turns");
    }
    drop((put, late));
    // What it changed in the cache was written by the other one.
    model.extend([(10, 8), (20, 9)]);
    owner.worker.block_on(own.access().close()).unwrap();
    drop((own, of_the_other, tree, compute));
    settle([&owner]);
    drop(owner);
    assert_left_clean(&fabric, &model, "late");
}

/// Access to all of the tree, which holds this.
fn own_and_read(member: &Member, expected: &Map, context: &str) -> Owned {
    let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
    let tree = member.own(&cache, KeyRange::ALL);
    let found: Map = member.worker.block_on(tree.range(..).take(usize::MAX)).unwrap().into_iter().collect();
    assert!(found == *expected, "{context}: {}", difference(&found, expected));
    tree
}

/// Batches that take several segments, while connections break: what is acknowledged is in the log, each part in its place.
#[test]
fn a_batch_of_several_parts_outlives_broken_connections() {
    const COUNT: u64 = 1000;
    let seed = settings::seed("batches of several parts");
    let kinds = FaultKinds { refused: false, done: false, lost: false };
    let all =
        [FaultKinds { refused: true, ..kinds }, FaultKinds { done: true, ..kinds }, FaultKinds { lost: true, ..kinds }];
    for kinds in all {
        let mut model = sparse(COUNT);
        let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let options = FaultOptions { seed, requests_one_in: 10, kinds, registrations_one_in: 0, connections_one_in: 0 };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(Arc::clone(&fabric) as _, options));
        let life = MortalFabric::new(faulty, Order::Posted, false);
        let owner = Member::join(&(Arc::new(life.clone()) as _), 1);
        let tree = own_and_read(&owner, &model, "before");
        for round in 1..=10 {
            let value = |key| round * COUNT + key / 10;
            let mut puts: Vec<_> = model.keys().map(|&key| Put::of(tree.upsert(key, value(key)))).collect();
            while puts.iter().any(|put| put.future.is_some()) {
                puts.iter_mut().for_each(Put::poll);
                owner.worker.turn();
            }
            drop(puts);
            model.iter_mut().for_each(|(&key, found)| *found = value(key));
        }
        life.dies_after(0);
        life.is_taken_for_dead();
        let heir = Member::join(&fabric, 2);
        let own = own_and_read(&heir, &model, &format!("{kinds:?}"));
        heir.worker.block_on(own.access().close()).unwrap();
        drop((own, tree, owner));
        settle([&heir]);
        drop(heir);
        assert_left_clean(&fabric, &model, "broken");
    }
}

/// Who finds nothing to change has found what others have changed: its answer waits for the log as theirs do.
#[test]
fn who_finds_what_others_have_changed_waits_for_their_record() {
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner = Member::join(&fabric, 1);
    let colleague = owner.colleague();
    let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
    let trees = [&owner, &colleague].map(|member| member.own(&cache, KeyRange::ALL));
    let inserted = async |tree: &Owned, key| Ok(tree.insert(key, 9).await?.then_some(9));
    for (member, tree) in [&owner, &colleague].into_iter().zip(&trees) {
        assert_eq!(member.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
    }
    for (index, other) in trees.iter().enumerate() {
        let key = |number: u64| (index as u64 * 10 + number) * 10;
        // The same value, a key that is gone, and one that is there.
        let first = [
            Put::of(trees[0].upsert(key(0), 7)),
            Put::of(trees[0].remove(key(1))),
            Put::of(inserted(&trees[0], key(2) + 1)),
        ];
        let second =
            [Put::of(other.upsert(key(0), 7)), Put::of(other.remove(key(1))), Put::of(inserted(other, key(2) + 1))];
        let mut all: Vec<Put<'_>> = first.into_iter().chain(second).collect();
        all.iter_mut().for_each(Put::poll);
        let answered: Vec<usize> = (0..all.len()).filter(|&put| all[put].future.is_none()).collect();
        assert!(answered.is_empty(), "answered before anything is recorded: {answered:?}");
        let mut turns = 0;
        while all.iter().any(|put| put.future.is_some()) {
            owner.worker.turn();
            colleague.worker.turn();
            all.iter_mut().for_each(Put::poll);
            turns += 1;
            assert!(turns < TURNS, "not recorded");
        }
        model.insert(key(0), 7);
        model.remove(&key(1));
        model.insert(key(2) + 1, 9);
    }
    owner.worker.block_on(trees[0].access().close()).unwrap();
    drop(trees);
    settle([&owner, &colleague]);
    drop((owner, colleague));
    assert_left_clean(&fabric, &model, "found");
}

/// A change that nobody polls any more is in the cache, or not begun: what is owned can be given up. Whoever drops that on the way gives it
/// up all the same, or goes on owning it.
#[test]
fn who_gives_up_needs_no_change_to_be_polled() {
    for turns_before in 0..40 {
        let mut model = sparse(1000);
        let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
        let owner = Member::join(&fabric, 1);
        let cache = cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged);
        let tree = owner.own(&cache, KeyRange::ALL);
        assert_eq!(owner.worker.block_on(tree.range(..).take(2000)).unwrap().len(), 1000);
        // Many keys: pages are split.
        let mut resting: Vec<Put<'_>> = (0..400).map(|key| Put::of(tree.upsert(key * 2 + 1, 7))).collect();
        resting.iter_mut().for_each(Put::poll);
        let mut closing = Put::of(async { tree.access().close().await.map(|()| None) });
        for _ in 0..turns_before {
            closing.poll();
            owner.worker.turn();
        }
        drop(closing);
        // Whatever became of it: all goes on, or has come to its end.
        let put = owner.worker.block_on(tree.upsert(1, 8));
        assert!(matches!(put, Ok(_) | Err(Error::GivenUp { .. })), "{put:?}");
        let mut turns = 0;
        let mut closing = Put::of(async { tree.access().close().await.map(|()| None) });
        while closing.future.is_some() {
            closing.poll();
            owner.worker.turn();
            turns += 1;
            assert!(turns < TURNS, "{turns_before}: it waits for a change that nobody polls");
        }
        drop((closing, resting));
        drop(tree);
        settle([&owner]);
        drop(owner);
        let others = Member::join(&fabric, 2);
        let found = others.worker.block_on(others.tree.range(..).take(5000)).unwrap();
        model.extend(found.iter().filter(|(key, _)| key % 2 == 1).copied());
        assert!(put.is_err() || model.get(&1) == Some(&8), "{turns_before}");
        drop(others);
        assert_left_clean(&fabric, &model, "given up beside changes that rest");
    }
}
