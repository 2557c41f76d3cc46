//! What an owner does that gives up a region, before, meanwhile and afterwards: all of it is done before the region goes, or nothing.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashSet},
    future::{Future, poll_fn},
    pin::pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
};

use farlink_offload::{Admission, ComputeCache, Durability, Holdings};
use farlink_runtime::{
    access::{Access, Hint, Interrupt, Link, Overlap, PageRef, Plugin, Region, Start},
    error::Error,
    fabric::Fabric,
    lock::{LockState, LockWord},
    one_sided::{OneSided, Proof, ownership},
    page::LOCK,
    ptr::RemotePtr,
    structure::Structure,
};
use farlink_structures::{
    btree::{KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{backend::FabricProfile, cluster, direct::Direct};

use crate::{
    ownership::Deadly,
    routing::Owner,
    scene::{CACHE_BYTES_ALL, Member, TREE, assert_left_clean, cache, fabric, settle, sparse},
};

/// Points at which an owner rests.
const RESTS: usize = 40;
/// So many turns a move goes on without the operation that rests: more than it needs.
const TURNS: u32 = 3000;

/// What keys are changed to, from this on: more than they have at first.
const FIRST_CHANGED: u64 = 1_000_000;

/// Where each change is recorded, and waits for that.
fn logged() -> ComputeCache<Tree> {
    cache(CACHE_BYTES_ALL, Admission::Always).with_durability(Durability::Logged)
}

/// The link to the leaf that has a key, as remote memory has it.
pub(crate) async fn leaf_with(tree: &OneSided<Tree>, key: u64) -> Result<Link, Interrupt> {
    Ok(leaf_and_parent(tree, key).await?.0)
}

pub(crate) async fn leaf_and_parent(tree: &OneSided<Tree>, key: u64) -> Result<(Link, RemotePtr), Interrupt> {
    let only = KeyRange { low: key, high: key.checked_add(1) };
    let mut page = tree.open(Start::Root).await?;
    loop {
        let word = page.read(|words| {
            let has_key =
                |&index: &usize| Tree::below(words, index).is_some_and(|all| only.overlap(&all) == Overlap::Inside);
            Tree::links(words).find(has_key).map(|index| words[index])
        })?;
        let link = Link::from_word(word.expect("an inner page has a link for each key"));
        if page.level() == 1 {
            return Ok((link, page.at()));
        }
        page = tree.follow(&page, link, Hint::DOWN).await?;
    }
}

/// Wherever an owner rests in an operation: that is done before the region goes, or it is refused and changes nothing.
#[test]
fn who_rests_in_an_operation_changes_nothing_that_has_gone() {
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let cuts = [3000, 6000].map(|key| guest.worker.block_on(guest.tree.leaf_low(key)).unwrap());
    let [low, piece, high] = KeyRange::cut_at(&cuts).try_into().unwrap();
    let owners = [Owner::with(&fabric, 1, &[low, piece], logged()), Owner::with(&fabric, 2, &[high], logged())];
    let (mut done, mut refused, mut waited) = (0, 0, 0);
    for rest in 0..RESTS {
        let (from, to) = (&owners[rest % 2], &owners[1 - rest % 2]);
        // Many of one leaf, so that it splits.
        let key = piece.low + 10 * (rest as u64 / 9) + 1 + rest as u64 % 9;
        let busy = from.member.colleague();
        let tree = Ordered::over(from.holdings.here(&busy.worker));
        let (mut inserting, outcome) = (pin!(tree.insert(key, 1)), RefCell::new(None));
        let mut go_on = || {
            if outcome.borrow().is_none()
                && let Poll::Ready(ended) = inserting.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                outcome.replace(Some(ended));
            }
            busy.worker.turn();
        };
        (0..rest).for_each(|_| go_on());
        let worker = &from.member.worker;
        let (mut giving, mut turns) = (pin!(from.holdings.give_up(worker, &piece)), 0);
        let given = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            turns += 1;
            if turns > TURNS {
                go_on();
            }
            giving.as_mut().poll(cx)
        }));
        assert_eq!(given.unwrap(), Some(piece));
        let worker = &to.member.worker;
        let there = Ordered::over(to.holdings.here(worker));
        let seen = worker.block_on(async {
            to.holdings.take(worker, piece).await.unwrap();
            let seen = there.get(key).await.unwrap();
            there.upsert(key, 2).await.unwrap();
            seen
        });
        model.insert(key, 2);
        let has_waited = turns > TURNS;
        // Only for one that changes a page that others share.
        waited += u32::from(has_waited);
        while outcome.borrow().is_none() {
            go_on();
        }
        match (seen, outcome.take()) {
            (Some(1), Some(Ok(_))) => done += 1,
            (None, Some(Err(Error::GivenUp { .. }))) => refused += 1,
            other => panic!("{rest}: {other:?}"),
        }
        assert_eq!(worker.block_on(there.get(key)).unwrap(), Some(2), "{rest}");
    }
    assert!(done > 0 && refused > 0 && waited > 0, "{done} done, {refused} refused, {waited} waited for");
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "rested");
}

/// Whatever of an operation is on its way when it is dropped, is done before the region goes, or not at all: its locks, too.
#[test]
fn who_is_dropped_in_an_operation_changes_nothing_that_has_gone() {
    let model = sparse(1000);
    let fabric = fabric(FabricProfile::Nasty, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let cuts = [3000, 6000].map(|key| guest.worker.block_on(guest.tree.leaf_low(key)).unwrap());
    let [low, piece, high] = KeyRange::cut_at(&cuts).try_into().unwrap();
    let owners = [Owner::with(&fabric, 1, &[low, piece], logged()), Owner::with(&fabric, 2, &[high], logged())];
    let mut waited = 0;
    for rest in 0..10 * RESTS {
        let (from, to) = (&owners[rest % 2], &owners[1 - rest % 2]);
        // Below a page that both share, and that is the next owner's alone.
        let fill = 10 * (rest as u64 / 2 % 10);
        let fill =
            if rest % 2 == 0 { piece.high.unwrap() / 10 * 10 - 10 - fill } else { piece.low / 10 * 10 + 10 + fill };
        let busy = from.member.colleague();
        let tree = Ordered::over(from.holdings.here(&busy.worker));
        let parent = guest.worker.block_on(leaf_and_parent(guest.tree.access(), fill)).unwrap().1;
        // One after the other, until one has to split a leaf.
        let mut inserting = Box::pin(tree.insert(fill + 1, 1));
        let mut done = 0;
        for _ in 0..rest {
            if inserting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                done += 1;
                inserting = Box::pin(tree.insert(fill + 1 + done % 9, 1));
            }
            busy.worker.turn();
        }
        drop(inserting);
        let worker = &from.member.worker;
        let (mut giving, mut turns) = (pin!(from.holdings.give_up(worker, &piece)), 0);
        let given = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            turns += 1;
            assert!(turns < 100 * TURNS, "{rest}: somebody stays inside");
            if turns > TURNS {
                busy.worker.turn();
            }
            giving.as_mut().poll(cx)
        }));
        assert_eq!(given.unwrap(), Some(piece));
        waited += u32::from(turns > TURNS);
        let worker = &to.member.worker;
        let there = Ordered::over(to.holdings.here(worker));
        let (mut taking, mut turns) = (pin!(to.holdings.take(worker, piece)), 0);
        let taken = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            turns += 1;
            assert!(turns < 10 * TURNS, "{rest}: what has gone is locked by who had it");
            taking.as_mut().poll(cx)
        }));
        taken.unwrap();
        for _ in 0..200 {
            let lock = LockWord::from_word(guest.worker.block_on(guest.worker.read(parent, 1)).unwrap()[LOCK]);
            assert_ne!(lock.state(), LockState::LockedBy(from.member.compute.owner()), "{rest}");
            busy.worker.turn();
        }
        worker.block_on(async {
            for key in (fill + 1..fill + 10).filter(|key| key % 10 != 0) {
                there.remove(key).await.unwrap();
            }
        });
    }
    assert!(waited > 0, "none had locks on their way");
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "dropped");
}

/// A change of a page that others share and that is not polled any more keeps nobody from that page: as long as its worker takes turns,
/// what it has locked is unlocked, and it goes on later.
#[test]
fn who_is_not_polled_keeps_nobody_from_a_shared_page() {
    let model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let cuts = [3000].map(|key| guest.worker.block_on(guest.tree.leaf_low(key)).unwrap());
    let [low, high] = KeyRange::cut_at(&cuts).try_into().unwrap();
    let owners = [Owner::with(&fabric, 1, &[low], logged()), Owner::with(&fabric, 2, &[high], logged())];
    let busy = owners[0].member.colleague();
    let tree = Ordered::over(owners[0].holdings.here(&busy.worker));
    // Of a leaf whose parent others share; it splits, and merges again.
    let keys: Vec<u64> = (low.high.unwrap() - 19..low.high.unwrap()).filter(|key| key % 10 != 0).collect();
    let mut waited = 0;
    for rest in 0..5 * RESTS {
        for &key in &keys {
            let mut inserting = pin!(tree.insert(key, 1));
            let mut step = 0;
            loop {
                if let Poll::Ready(ended) = inserting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    ended.unwrap();
                    break;
                }
                busy.worker.turn();
                step += 1;
                if step != rest {
                    continue;
                }
                let (mut reading, mut turns) = (pin!(guest.tree.get(3010)), 0);
                let read = guest.worker.block_on(poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    busy.worker.turn();
                    turns += 1;
                    assert!(turns < 100 * TURNS, "{rest}, {key}: a page stays locked");
                    reading.as_mut().poll(cx)
                }));
                assert_eq!(read.unwrap(), Some(301));
                waited += u32::from(turns > TURNS / 4);
            }
        }
        for &key in &keys {
            assert_eq!(busy.worker.block_on(tree.remove(key)).unwrap(), Some(1));
        }
    }
    assert!(waited > 0, "nothing was locked as it rested");
    drop((tree, busy));
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "not polled");
}

/// Who replays the log of an owner that died finds nothing of what it had given up before: that is another one's, which has it cached.
#[test]
fn what_an_owner_recorded_of_a_piece_is_forgotten_with_it() {
    let model = RefCell::new(sparse(1000));
    let fabric = fabric(FabricProfile::Fast, 256, &model.borrow(), 0.8);
    let dead = Arc::new(Mutex::new(HashSet::new()));
    let deadly: Arc<dyn Fabric> = Arc::new(Deadly { inner: Arc::clone(&fabric), dead: Arc::clone(&dead) });
    let heir = Member::join(&deadly, 3);
    let owner = Owner::with(&fabric, 1, &[KeyRange::ALL], logged());
    let asked = KeyRange { low: 4000, high: Some(6000) };
    let keys: Vec<u64> = model.borrow().range(4200..5800).map(|(&key, _)| key).collect();
    let (busy, worker) = (owner.member.colleague(), &owner.member.worker);
    let tree = Ordered::over(owner.holdings.here(&busy.worker));
    let is_refused = Cell::new(false);
    let piece = {
        // Changes of each before, and while the piece goes.
        let mut changing = pin!(async {
            for (&key, value) in keys.iter().cycle().zip(FIRST_CHANGED..) {
                match tree.update(key, value).await {
                    Ok(_) => drop(model.borrow_mut().insert(key, value)),
                    Err(Error::GivenUp { .. }) => return is_refused.set(true),
                    Err(error) => panic!("{error}"),
                }
            }
        });
        let mut go_on = || {
            if !is_refused.get() {
                let _ = changing.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            }
            busy.worker.turn();
        };
        while keys.iter().any(|key| model.borrow()[key] < FIRST_CHANGED) {
            go_on();
        }
        let mut giving = pin!(owner.holdings.give_up(worker, &asked));
        let piece = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            go_on();
            giving.as_mut().poll(cx)
        }));
        while !is_refused.get() {
            go_on();
        }
        piece.unwrap().unwrap()
    };
    assert!(piece.contains(keys[0]) && piece.contains(keys[keys.len() - 1]), "{piece:?}");
    let holdings = Holdings::new(heir.tree.structure(), logged());
    let take = |region| heir.worker.block_on(holdings.take(&heir.worker, region)).unwrap();
    take(piece);
    let locks = || {
        heir.worker.block_on(async {
            let mut locks = BTreeMap::new();
            for &key in &keys {
                let leaf = leaf_with(heir.tree.access(), key).await.unwrap();
                let (at, _) = leaf.remote().unwrap();
                locks.insert(leaf.word(), heir.worker.read(at, LOCK + 1).await.unwrap()[LOCK]);
            }
            locks
        })
    };
    let before = locks();
    dead.lock().unwrap().insert(owner.member.compute.owner());
    KeyRange::ALL.without(&piece).unwrap().into_iter().for_each(take);
    assert_eq!(locks(), before, "a log was replayed of what was not its owner's any more");
    let tree_of_heir = Ordered::over(holdings.here(&heir.worker));
    for (&key, &value) in &*model.borrow() {
        assert_eq!(heir.worker.block_on(tree_of_heir.get(key)).unwrap(), Some(value), "{key}");
    }
    drop((tree_of_heir, tree, busy));
    drop(owner);
    heir.worker.block_on(holdings.give_up_all(&heir.worker)).unwrap();
    settle([&heir]);
    drop((holdings, heir));
    assert_left_clean(&fabric, &model.into_inner(), "forgotten");
}

/// As by a process that is stopped in the middle of a change of the map.
#[test]
fn a_locked_map_holds_up_no_maintenance() {
    let model = sparse(100);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let other = "other";
    cluster::create::<Tree>(&fabric, other, 256, Proof::Checksum).unwrap();
    let (member, stopped) = (Member::join(&fabric, 1), Member::join(&fabric, 2));
    let Member { worker, compute, tree } = &member;
    let structures = [
        tree.structure().clone(),
        worker
            .block_on(Ordered::<Tree, OneSided<Tree>>::open(worker, other, Proof::Checksum))
            .unwrap()
            .structure()
            .clone(),
    ];
    let own = |structure: &Structure| {
        let cache = cache(CACHE_BYTES_ALL, Admission::Always);
        worker.block_on(cache.own(worker, structure.clone(), KeyRange::ALL)).unwrap()
    };
    structures.iter().for_each(|structure| drop(own(structure)));
    let owners = || {
        structures
            .each_ref()
            .map(|structure| worker.block_on(ownership::read(worker, structure)).unwrap().owners().count())
    };
    let direct = Direct::new(&fabric, 7).unwrap();
    let lock = structures[0].descriptor.unwrap().remote().unwrap().0.word(LOCK);
    let word = direct.read(lock, 1).unwrap()[0];
    direct.write_word(lock, LockWord::from_word(word).locked_by(stopped.compute.owner()).word()).unwrap();
    for _ in 0..3 {
        let mut maintaining = pin!(worker.drive(compute.maintain(worker)));
        let is_done = (0..TURNS)
            .any(|_| matches!(maintaining.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(()))));
        if !is_done {
            direct.write_word(lock, word).unwrap();
            panic!("a round of maintenance waits for who has locked a map");
        }
    }
    direct.write_word(lock, word).unwrap();
    assert_eq!(owners(), [1, 0], "the map that was not locked is up to date");
    member.maintain();
    assert_eq!(owners(), [0, 0], "and so is the other one, once it can be");
    drop((direct, member, stopped));
    let report = cluster::check_tree(&fabric, TREE).unwrap();
    assert!(report.is_clean(), "{report:?}");
}
