//! Regions go from owner to owner while operations run: each operation is done once, and none fails.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_offload::{Admission, Counters};
use farlink_offload::{
    OwnerServer, Router, Routes,
    route::{OwnerCounts, balance, loads, move_region, take_region},
};
use farlink_runtime::{
    access::{Access, Region, Start},
    compute::ComputeServer,
    error::Error,
    fabric::listener::ListenOptions,
    lock::{LockState, LockWord},
    messaging::ServeMessages,
    one_sided::ownership,
    page::LOCK,
    partition::Part as Owned,
    structure::Structure,
};
use farlink_structures::{
    btree::{KeyRange, Tree},
    map::Map as Ordered,
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    bounded::Watchdog,
    drive::{Plan, Tides, drive},
    history::{Flush, History, Op, Outcome, Record, Recorder, now_ns},
    linear, scans, settings,
    stress::piece_of,
    workload::{Mix, Part, Workload, WorkloadSpec, spread_keys, value_of},
};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IteratorRandom};

use crate::{
    leaving::{leaf_and_parent, leaf_with},
    routing::{Owner, routes, to_owners},
    scene::{CACHE_BYTES_ALL, CACHE_BYTES_MIN, Map, Member, assert_left_clean, cache, fabric, settle, sparse},
};

const CLIENTS: u32 = 2;
const KEYS: usize = 600;
const MOVES: u32 = 20;
const RANGES_MAX: usize = 12;

/// Three owners, of which the last has nothing at first, and somebody who owns nothing.
struct Scene {
    owners: Vec<Owner>,
    guest: Member,
    fabric: Cluster,
    model: Map,
}

impl Scene {
    fn new(profile: FabricProfile) -> Self {
        let keys = spread_keys(KEYS).into_iter().step_by(2);
        let model: Map = keys.zip(1..).map(|(key, sequence)| (key, value_of(CLIENTS, sequence))).collect();
        let fabric = fabric(profile, 256, &model, 0.8);
        let guest = Member::join(&fabric, 9);
        let cut = |part: u64| guest.worker.block_on(guest.tree.leaf_low(u64::MAX / 4 * part)).unwrap();
        let ranges = KeyRange::cut_at(&[cut(1), cut(2), cut(3)]);
        let ranges: [&[KeyRange]; 3] = [&ranges[..2], &ranges[2..], &[]];
        let owners = (1..).zip(ranges).map(|(seed, of)| Owner::new(&fabric, seed, of, CACHE_BYTES_MIN)).collect();
        Self { owners, guest, fabric, model }
    }

    fn structure(&self) -> &Structure {
        self.guest.tree.structure()
    }

    /// Has a range, or a piece of one, go from one owner to another, all drawn at random. What has.
    fn move_one(&self, random: &mut StdRng) -> Result<Option<KeyRange>, Error> {
        let worker = &self.guest.worker;
        worker.block_on(async {
            let map = ownership::read(worker, self.structure()).await?;
            let (from, part) = map.owners().choose(random).expect("there are owners");
            let region: KeyRange = part.to_region()?.expect("it is one of keys");
            // No more of them than the map has room for.
            let is_whole = map.entries.len() > RANGES_MAX || random.random_bool(0.3);
            let region = if is_whole { region } else { piece_of(region, random) };
            let others = self.owners.iter().map(|owner| owner.member.compute.owner());
            let to = others.filter(|&other| other != from).choose(random).expect("there are others");
            move_region(worker, self.structure(), &region, from, to).await
        })
    }

    /// All give up what they own, and leave. The cluster.
    fn leave(self) -> (Cluster, Map) {
        let Self { owners, guest, fabric, model } = self;
        owners.iter().for_each(Owner::close);
        settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
        (fabric, model)
    }
}

/// One client's operations, none of whose keys are its own, until it is over; their history.
fn client(compute: &ComputeServer, structure: &Structure, number: u32, seed: u64, is_over: Arc<AtomicBool>) -> Vec<u8> {
    let worker = compute.worker().unwrap();
    let routes = worker.block_on(Routes::<Tree>::read(&worker, structure.clone())).unwrap();
    let tree = Ordered::over(Router::to_owners(&worker, &routes));
    let mix = Mix { scan: 5, ..Mix::CHURN };
    let spec = WorkloadSpec { seed, keys: spread_keys(KEYS), theta: 0.3, mix, scan_limit_max: 40 };
    let recorder = Rc::new(Recorder::new(Vec::new(), number, Flush::WhenFull).unwrap());
    let plan = Plan {
        in_flight: 4,
        drop_one_in: 0,
        damage_expected: false,
        failures_expected: false,
        tides: Tides::NONE,
        part: Part::ALL,
    };
    let workload = Workload::new(&spec, number).unwrap();
    drive(&worker, &tree, workload, &recorder, plan, move |_| is_over.load(Ordering::Acquire)).unwrap();
    drop((tree, worker));
    Rc::into_inner(recorder).unwrap().finish().unwrap()
}

/// Whoever moves ranges meanwhile, two clients see one tree.
#[test]
fn nothing_is_lost_done_twice_or_refused_by_a_move() {
    let seed = settings::seed("moving");
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        let scene = Scene::new(profile);
        let is_over = Arc::new(AtomicBool::new(false));
        let histories: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|number| {
                    let (compute, is_over) = (Arc::clone(&scene.guest.compute), Arc::clone(&is_over));
                    let structure = scene.structure().clone();
                    scope.spawn(move || client(&compute, &structure, number, seed, is_over))
                })
                .collect();
            let mut random = StdRng::seed_from_u64(seed);
            let counted = |of: fn(OwnerCounts) -> u64| scene.owners.iter().map(|owner| of(owner.counts())).sum::<u64>();
            let mut moves = 0;
            // Until enough has met.
            while moves < MOVES || counted(|counts| counts.done) < 500 || counted(|counts| counts.not_owned) == 0 {
                moves += u32::from(scene.move_one(&mut random).unwrap().is_some());
                scene.owners.iter().map(|owner| &owner.member).chain([&scene.guest]).for_each(Member::maintain);
            }
            is_over.store(true, Ordering::Release);
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let mut history = History::default();
        history.set_initial(scene.model.clone());
        histories.iter().for_each(|words| history.merge(History::decode(words).unwrap()));
        // What is left is what a client reads next.
        let routes = routes(&scene.guest);
        let invoked_ns = now_ns();
        let left = scene.guest.worker.block_on(to_owners(&scene.guest, &routes).range(..).take(usize::MAX)).unwrap();
        let (left, returned_ns) = (left.into_iter().collect::<Map>(), now_ns());
        spread_keys(KEYS).into_iter().for_each(|key| {
            let outcome = Outcome::Value(left.get(&key).copied());
            history.push(Record { client: CLIENTS, op: Op::Get { key }, outcome, invoked_ns, returned_ns });
        });
        linear::check(&history).unwrap_or_else(|error| panic!("{error}"));
        scans::check(&history).unwrap_or_else(|error| panic!("{error}"));
        let (fabric, _) = scene.leave();
        assert_left_clean(&fabric, &left, "moved");
    }
}

/// A piece is cut where leaves are cut; what is left of the range stays cached, and changes of it that are not written stay so.
#[test]
fn what_is_left_stays_cached() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let owner: Owner = Owner::new(&fabric, 1, &[KeyRange::ALL], CACHE_BYTES_ALL);
    let (worker, keys) = (&owner.member.worker, || model.keys().copied());
    let here = owner.holdings.here(worker);
    let tree = Ordered::over(here.clone());
    let mut model_after = model.clone();
    worker.block_on(async {
        for key in keys() {
            tree.update(key, key + 7).await.unwrap();
        }
    });
    model_after.iter_mut().for_each(|(key, value)| *value = key + 7);
    let asked = KeyRange { low: 20_003, high: Some(30_001) };
    let written = |counters: Counters| counters.total().write_backs;
    let before = written(owner.holdings.counters());
    let piece = worker.block_on(owner.holdings.give_up(worker, &asked)).unwrap().unwrap();
    let wrote = written(owner.holdings.counters()) - before;
    let low = worker.block_on(owner.member.tree.leaf_low(asked.low)).unwrap();
    assert!(low < asked.low && piece.low > asked.low && piece.low < asked.low + 300, "{piece:?}");
    assert_eq!(worker.block_on(owner.member.tree.leaf_low(piece.low)).unwrap(), piece.low);
    let end = piece.high.unwrap();
    assert!(end < asked.high.unwrap() && worker.block_on(owner.member.tree.leaf_low(end)).unwrap() == end);
    assert_eq!(owner.holdings.regions(), KeyRange::ALL.without(&piece).unwrap());
    let moved = keys().filter(|&key| piece.contains(key)).count();
    assert!(
        wrote > 0 && wrote < model.len() as u64 / 8,
        "{wrote} pages were written for {moved} of {} keys",
        model.len()
    );
    let reads = worker.counters().reads;
    worker.block_on(async {
        for key in keys() {
            match (piece.contains(key), tree.get(key).await) {
                (false, value) => assert_eq!(value.unwrap(), Some(key + 7)),
                (true, value) => assert!(matches!(value, Err(Error::GivenUp { .. })), "{value:?}"),
            }
        }
    });
    assert_eq!(worker.counters().reads, reads, "what was left was read anew");
    // It comes back, and what was there is not taken for current.
    let other = Owner::new(&fabric, 2, &[piece], CACHE_BYTES_ALL);
    other.member.worker.block_on(async {
        let tree = Ordered::over(other.holdings.here(&other.member.worker));
        for key in keys().filter(|&key| piece.contains(key)) {
            assert_eq!(tree.update(key, key + 9).await.unwrap(), Some(key + 7));
            model_after.insert(key, key + 9);
        }
    });
    other.close();
    worker.block_on(async {
        owner.holdings.take(worker, piece).await.unwrap();
        for (&key, &value) in &model_after {
            assert_eq!(tree.get(key).await.unwrap(), Some(value));
        }
    });
    owner.close();
    settle([&owner.member, &other.member]);
    drop((tree, here, owner, other));
    assert_left_clean(&fabric, &model_after, "cut");
}

/// What was read while another one owned it does not get in, however late the read ends.
#[test]
fn what_was_read_before_a_region_came_is_not_let_in() {
    let scene = Scene::new(FabricProfile::Fast);
    let (own, region) = (scene.owners[0].holdings.regions()[0], scene.owners[1].holdings.regions()[0]);
    let (&key, _) = scene.model.range(region.low..).next().unwrap();
    let value = value_of(CLIENTS, 9999);
    {
        let (new, old) = (&scene.owners[0], &scene.owners[1]);
        let reader = new.member.colleague();
        let here = new.holdings.here(&reader.worker);
        let cached = here.with(&own).unwrap().unwrap();
        let leaf = reader.worker.block_on(leaf_with(reader.tree.access(), key)).unwrap();
        let mut reading = pin!(cached.open(Start::Page(leaf)));
        let mut is_read = || reading.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        assert!(!is_read());
        // The page is here as remote memory has it, and nobody has looked at it yet.
        reader.worker.turn();
        let worker = &old.member.worker;
        worker.block_on(async {
            let tree = Ordered::over(old.holdings.here(worker));
            tree.upsert(key, value).await.unwrap();
            old.holdings.give_up(worker, &region).await.unwrap().unwrap();
        });
        let worker = &new.member.worker;
        let mut taking = pin!(new.holdings.take(worker, region));
        let (mut turns, mut ended) = (0, false);
        let taken = worker.block_on(poll_fn(|cx| {
            cx.waker().wake_by_ref();
            turns += 1;
            // Whoever takes the region may wait for it, so it has to end.
            ended = ended || (turns > 10_000 && is_read());
            taking.as_mut().poll(cx)
        }));
        taken.unwrap();
        assert!(ended || is_read());
        assert_eq!(reader.worker.block_on(Ordered::over(cached.clone()).get(key)).unwrap(), Some(value));
    }
    let (fabric, mut model) = scene.leave();
    model.insert(key, value);
    assert_left_clean(&fabric, &model, "read before");
}

/// A page becomes shared by a move, and by a split the next owner's alone, before who gave up a part of it has looked which pages are
/// shared. The links that it has to that page are found to be old, and nothing else.
#[test]
fn what_others_change_right_after_a_move_is_read_anew() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.9);
    let guest = Member::join(&fabric, 9);
    let cut = guest.worker.block_on(guest.tree.leaf_low(1800)).unwrap();
    let part = KeyRange { low: 0, high: Some(cut) };
    let next: Owner = Owner::new(&fabric, 1, &[], CACHE_BYTES_ALL);
    let owner: Owner = Owner::new(&fabric, 2, &[KeyRange::ALL], CACHE_BYTES_MIN);
    let (worker, colleague) = (&owner.member.worker, owner.member.colleague());
    let tree = Ordered::over(owner.holdings.here(worker));
    for key in [cut, 39_500] {
        assert_eq!(worker.block_on(tree.get(key)).unwrap(), Some(key / 10));
    }
    // The colleague's fetch of a leaf, which does not go on, keeps it from looking.
    let fetched = Ordered::over(owner.holdings.here(&colleague.worker));
    let fetched = colleague.worker.spawn(async move { fetched.get(39_990).await });
    colleague.worker.turn();
    let (holdings, handle) = (owner.holdings.clone(), (**worker).clone());
    let given_up = worker.spawn(async move { holdings.give_up(&handle, &part).await });
    let has_it = |part: &Owned| part.to_region::<KeyRange>().unwrap().is_some_and(|region| region.contains(0));
    let mut has_left = pin!(async {
        let read = async || ownership::read(&guest.worker, guest.tree.structure()).await.unwrap();
        while read().await.owners().any(|(_, part)| has_it(part)) {}
    });
    guest.worker.block_on(poll_fn(|cx| {
        worker.turn();
        cx.waker().wake_by_ref();
        has_left.as_mut().poll(cx)
    }));
    next.member.worker.block_on(next.holdings.take(&next.member.worker, part)).unwrap();
    let lower = Ordered::over(next.holdings.here(&next.member.worker));
    next.member.worker.block_on(async {
        for key in (cut - 300..cut).filter(|key| key % 10 != 0) {
            assert!(lower.insert(key, key).await.unwrap());
        }
    });
    assert!(next.member.worker.counters().splits > 0);
    // More than its cache can hold.
    worker.block_on(async {
        let all = cut / 10..3950;
        for index in all.clone().rev().chain(all) {
            assert_eq!(tree.get(index * 10).await.unwrap(), Some(index));
        }
    });
    assert_eq!(colleague.worker.block_on(fetched).unwrap(), Some(3999));
    assert_eq!(worker.block_on(given_up).unwrap(), Some(part));
}

/// Pages that were an owner's alone are shared after a move, and the next owner may free them, before who gave up a part of them has looked
/// which pages are shared: its task was cut off. What leads to them is found to be old, and nothing else.
#[test]
fn what_others_free_after_a_move_is_missed_by_nobody() {
    let mut model = sparse(1000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.9);
    let guest = Member::join(&fabric, 9);
    let next: Owner = Owner::new(&fabric, 1, &[], CACHE_BYTES_ALL);
    let owner: Owner = Owner::new(&fabric, 2, &[KeyRange::ALL], CACHE_BYTES_ALL);
    // From the second leaf below a page of level 1 to the last one below the next but one.
    let (mut leaves, mut parents) = (Vec::new(), Vec::new());
    for &key in model.keys() {
        let (leaf, parent) = guest.worker.block_on(leaf_and_parent(guest.tree.access(), key)).unwrap();
        if parents.last() != Some(&parent) {
            parents.push(parent);
        }
        if leaves.last().is_none_or(|&(_, other, _)| other != leaf) {
            leaves.push((key, leaf, parent));
        }
    }
    let below = |parent| leaves.iter().filter(move |leaf| leaf.2 == parent).map(|leaf| leaf.0);
    let part = KeyRange { low: below(parents[2]).nth(1).unwrap(), high: below(parents[4]).next_back() };
    let (worker, beside) = (&owner.member.worker, &next.member.worker);
    let tree = Ordered::over(owner.holdings.here(worker));
    assert_eq!(worker.block_on(tree.len()).unwrap(), 1000);
    {
        let mut giving_up = pin!(owner.holdings.give_up(worker, &part));
        worker.block_on(poll_fn(|cx| {
            assert!(giving_up.as_mut().poll(cx).is_pending(), "it was to be dropped before its end");
            cx.waker().wake_by_ref();
            if owner.holdings.regions().len() == 2 { Poll::Ready(()) } else { Poll::Pending }
        }));
    }
    let there = Ordered::over(next.holdings.here(beside));
    beside.block_on(async {
        next.holdings.take(beside, part).await.unwrap();
        for key in (part.low..part.high.unwrap()).filter(|key| key % 10 == 0) {
            assert!(there.remove(key).await.unwrap().is_some());
        }
    });
    model.retain(|key, _| !part.contains(*key));
    let lock = |at| LockWord::from_word(guest.worker.block_on(guest.worker.read(at, 1)).unwrap()[LOCK]).state();
    assert_eq!(lock(parents[4]), LockState::Free);
    worker.block_on(async {
        for key in (part.high.unwrap()..part.high.unwrap() + 100).chain(part.low - 100..part.low) {
            tree.upsert(key, key).await.unwrap();
            model.insert(key, key);
        }
    });
    owner.close();
    next.close();
    settle([&owner.member, &next.member, &guest]);
    drop((tree, there));
    drop((owner, next, guest));
    assert_left_clean(&fabric, &model, "freed by the next owner");
}

/// Who has nearly all the work gives some of it away, to one who has come without anything, too.
#[test]
fn owners_are_balanced_by_uses() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let (worker, structure) = (&guest.worker, guest.tree.structure());
    let cut = worker.block_on(guest.tree.leaf_low(20_000)).unwrap();
    let ranges = KeyRange::cut_at(&[cut]);
    let ranges: [&[KeyRange]; 3] = [&ranges[..1], &ranges[1..], &[]];
    let counting = || cache(CACHE_BYTES_MIN, Admission::Frequency);
    let owners: Vec<Owner> = (1..).zip(ranges).map(|(seed, of)| Owner::with(&fabric, seed, of, counting())).collect();
    let ids: Vec<_> = owners.iter().map(|owner| owner.member.compute.owner()).collect();
    let tree = to_owners(&guest, &routes(&guest));
    // The first owner's keys again and again, the second one's once.
    worker.block_on(async {
        for round in 0..40 {
            for &key in model.keys().filter(|&&key| key < 4000 || round == 0) {
                assert!(tree.get(key).await.unwrap().is_some());
            }
        }
    });
    let uses = || -> Vec<u64> {
        let ask = |&owner| worker.block_on(loads::<KeyRange>(worker, structure, owner, 0)).unwrap().uses();
        ids.iter().map(ask).collect()
    };
    let before = uses();
    assert!(before[0] > 8 * before[1] && before[2] == 0, "{before:?}");
    let mut moved = Vec::new();
    worker.block_on(balance::<KeyRange>(worker, structure, &ids, 1.2, 10, &mut moved)).unwrap();
    let given: u64 = moved.iter().filter(|moved| moved.from == ids[0]).filter_map(|moved| moved.uses).sum();
    assert!((before[0] / 2..before[0] * 3 / 4).contains(&given), "{given} of {before:?}: {moved:?}");
    assert!(moved.iter().any(|moved| moved.to == ids[1]) && moved.iter().any(|moved| moved.to == ids[2]), "{moved:?}");
    // Where most of the work was is cut.
    assert!(moved.iter().any(|moved| moved.region.low < 4000), "{moved:?}");
    let found = worker.block_on(tree.range(..).take(usize::MAX)).unwrap();
    assert!(found.into_iter().collect::<Map>() == model);
    drop(tree);
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "balanced");
}

/// The hottest leaf is the uppermost, as where keys are appended, and is too much for anybody else: what is below it goes.
#[test]
fn who_has_the_hottest_leaf_gives_the_others_away() {
    let model = sparse(9000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let (worker, structure) = (&guest.worker, guest.tree.structure());
    let cuts = [30_000, 60_000].map(|key| worker.block_on(guest.tree.leaf_low(key)).unwrap());
    let hottest = worker.block_on(guest.tree.leaf_low(89_990)).unwrap();
    let counting = || cache(CACHE_BYTES_MIN, Admission::Frequency);
    let owners: Vec<Owner> = (1..)
        .zip(KeyRange::cut_at(&cuts))
        .map(|(seed, range)| Owner::with(&fabric, seed, &[range], counting()))
        .collect();
    let ids: Vec<_> = owners.iter().map(|owner| owner.member.compute.owner()).collect();
    let tree = to_owners(&guest, &routes(&guest));
    // Each owner's first keys again and again, and as often as all of the last owner's its uppermost leaf.
    worker.block_on(async {
        for round in 0..40 {
            for &key in model.keys() {
                let is_hot = key % 30_000 < if key < 60_000 { 3000 } else { 4500 };
                for _ in 0..if key >= hottest { 50 } else { u64::from(is_hot || round == 0) } {
                    assert!(tree.get(key).await.unwrap().is_some());
                }
            }
        }
    });
    let of = |owner| worker.block_on(loads::<KeyRange>(worker, structure, owner, 0)).unwrap().uses();
    let before: Vec<u64> = ids.iter().map(|&owner| of(owner)).collect();
    let average = before.iter().sum::<u64>() as f64 / 3.0;
    assert!(before[2] as f64 > 1.3 * average, "{before:?}");
    let mut moved = Vec::new();
    let left = worker.block_on(balance::<KeyRange>(worker, structure, &ids, 1.1, 10, &mut moved)).unwrap();
    // One piece for each of the others.
    assert!(left.is_none() && moved.len() > 1, "{before:?}: {moved:?}, {left:?}");
    assert!(moved.iter().all(|moved| moved.from == ids[2] && !moved.region.contains(hottest)), "{before:?}: {moved:?}");
    drop(tree);
    owners.iter().for_each(Owner::close);
    settle(owners.iter().map(|owner| &owner.member).chain([&guest]));
    drop((owners, guest));
    assert_left_clean(&fabric, &model, "all but the hottest leaf");
}

/// A range that its owner does not have any more is not moved; one that nobody can take stays where it was.
#[test]
fn a_move_that_cannot_be_changes_nothing() {
    let scene = Scene::new(FabricProfile::Fast);
    let [first, second, third] = &scene.owners[..] else { panic!("there are three") };
    let (worker, structure) = (&scene.guest.worker, scene.structure());
    let id = |owner: &Owner| owner.member.compute.owner();
    let region = first.holdings.regions()[0];
    let moved = |from, to| worker.block_on(move_region(worker, structure, &region, from, to));
    assert_eq!(moved(id(second), id(third)).unwrap(), None);
    assert_eq!(moved(id(third), id(second)).unwrap(), None);
    let nobody = || {
        let nobody = moved(id(first), scene.guest.compute.owner());
        assert!(matches!(nobody, Err(Error::OwnerMissing { .. })), "{nobody:?}");
        assert!(first.holdings.regions().contains(&region));
    };
    nobody();
    // One that listens, and carries out nothing on this structure.
    let listener = scene.guest.compute.listen(&ListenOptions::default()).unwrap();
    let listening = OwnerServer::start(listener, &scene.guest.compute, vec![], &ServeMessages::default()).unwrap();
    nobody();
    drop(listening);
    // What has an owner is not for others to take.
    let taken = worker.block_on(take_region(worker, structure, &region, id(third)));
    assert!(taken.is_err() && third.holdings.regions().is_empty(), "{taken:?}");
    assert_eq!(moved(id(first), id(third)).unwrap(), Some(region));
    assert_eq!((first.holdings.regions().len(), third.holdings.regions()), (1, vec![region]));
    let found = worker.block_on(to_owners(&scene.guest, &routes(&scene.guest)).range(..).take(usize::MAX)).unwrap();
    assert!(found.into_iter().collect::<Map>() == scene.model);
    let (fabric, model) = scene.leave();
    assert_left_clean(&fabric, &model, "not moved");
}

/// The owners settle it among themselves.
#[test]
fn a_region_has_an_owner_whatever_becomes_of_who_has_it_moved() {
    let _watchdog = Watchdog::start("a move that nobody waits for", Duration::from_secs(60));
    let scene = Scene::new(FabricProfile::Fast);
    let [first, _, third] = &scene.owners[..] else { panic!("there are three") };
    let (worker, structure) = (&scene.guest.worker, scene.structure());
    let id = |owner: &Owner| owner.member.compute.owner();
    let region = first.holdings.regions()[0];
    worker.block_on(async {
        let mut asked = pin!(move_region(worker, structure, &region, id(first), id(third)));
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            let is_answered = asked.as_mut().poll(cx).is_ready();
            if is_answered || !first.holdings.regions().contains(&region) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    });
    while !third.holdings.regions().contains(&region) {
        std::thread::yield_now();
    }
    // And what nobody owns can be taken.
    third.close();
    worker.block_on(take_region(worker, structure, &region, id(first))).unwrap();
    assert!(first.holdings.regions().contains(&region));
    let (fabric, model) = scene.leave();
    assert_left_clean(&fabric, &model, "handed on");
}

/// For a moment nobody has a region that is handed on. A third one that takes it then has it, and who has it moved is told so.
#[test]
fn what_a_third_one_takes_meanwhile_has_not_moved() {
    let _watchdog = Watchdog::start("a third one that takes a region", Duration::from_secs(60));
    let scene = Scene::new(FabricProfile::Fast);
    let [first, second, third] = &scene.owners[..] else { panic!("there are three") };
    let (worker, structure) = (&scene.guest.worker, scene.structure());
    let region = first.holdings.regions()[0];
    std::thread::scope(|scope| {
        let (compute, holdings) = (Arc::clone(&second.member.compute), second.holdings.clone());
        let taker = scope.spawn(move || {
            let worker = compute.worker().unwrap();
            while let Err(error) = worker.block_on(holdings.take(&worker, region)) {
                assert!(matches!(error, Error::Owned { .. }), "{error}");
            }
        });
        let [mut from, mut to] = [first, third].map(|owner| owner.member.compute.owner());
        while !taker.is_finished() {
            if let Some(moved) = worker.block_on(move_region(worker, structure, &region, from, to)).unwrap() {
                assert_eq!(moved, region);
                std::mem::swap(&mut from, &mut to);
            }
        }
        taker.join().unwrap();
    });
    assert!(second.holdings.regions().contains(&region));
    for owner in [first, third] {
        assert!(!owner.holdings.regions().contains(&region));
    }
    let (fabric, model) = scene.leave();
    assert_left_clean(&fabric, &model, "taken by a third one");
}

/// A piece takes an entry of the map, beside those of what is left. Without room for that it stays where it is.
#[test]
fn a_piece_that_the_map_has_no_room_for_is_not_given_up() {
    let model = sparse(4000);
    let fabric = fabric(FabricProfile::Fast, 256, &model, 0.8);
    let guest = Member::join(&fabric, 9);
    let (worker, structure) = (&guest.worker, guest.tree.structure());
    let cuts: Vec<u64> = (1..118).map(|part| worker.block_on(guest.tree.leaf_low(part * 200)).unwrap()).collect();
    let ranges = KeyRange::cut_at(&cuts);
    let owner: Owner = Owner::new(&fabric, 1, &ranges, CACHE_BYTES_ALL);
    let next: Owner = Owner::new(&fabric, 2, &[], CACHE_BYTES_ALL);
    let [from, to] = [&owner, &next].map(|owner| owner.member.compute.owner());
    // Something is left on both sides: there is room for that, and none for what goes.
    let piece = KeyRange { low: 30_000, high: Some(31_000) };
    let moved = worker.block_on(move_region(worker, structure, &piece, from, to));
    assert!(matches!(&moved, Err(Error::AtOwner { why, .. }) if why.contains("partition map")), "{moved:?}");
    assert!(owner.holdings.regions() == ranges, "it is gone");
    let handle = &owner.member.worker;
    let given_up = handle.block_on(owner.holdings.give_up(handle, &piece));
    assert!(matches!(given_up, Err(Error::PartitionMapFull { .. })), "{given_up:?}");
    assert!(owner.holdings.regions() == ranges, "it is gone");
    let tree = to_owners(&guest, &routes(&guest));
    assert_eq!(worker.block_on(tree.update(30_500, 7)).unwrap(), Some(3050));
    // The end of it is one entry more.
    let end = KeyRange { low: 30_000, high: None };
    let moved = worker.block_on(move_region(worker, structure, &end, from, to)).unwrap();
    assert!(moved.is_some() && next.holdings.regions().len() == 1, "{moved:?}");
    assert_eq!(worker.block_on(tree.update(30_500, 3050)).unwrap(), Some(7));
    drop(tree);
    [&owner, &next].into_iter().for_each(Owner::close);
    settle([&owner.member, &next.member, &guest]);
    drop((owner, next, guest));
    assert_left_clean(&fabric, &model, "no room");
}

/// Whoever sends what is no region, or names it, changes nothing.
#[test]
fn what_is_no_region_is_neither_taken_nor_given_up() {
    let scene = Scene::new(FabricProfile::Fast);
    let [first, _, third] = &scene.owners[..] else { panic!("there are three") };
    let (worker, structure) = (&scene.guest.worker, scene.structure());
    let [from, to] = [first, third].map(|owner| owner.member.compute.owner());
    let map = || worker.block_on(ownership::read(worker, structure)).unwrap();
    let before = map();
    // All around it is owned, and nothing of it is.
    let cut = first.holdings.regions()[0].high.unwrap();
    for none in [KeyRange { low: cut + 50, high: Some(cut - 50) }, KeyRange { low: cut, high: Some(cut) }] {
        let taken = worker.block_on(take_region(worker, structure, &none, to));
        assert!(matches!(taken, Err(Error::AtOwner { .. })), "{none:?}: {taken:?}");
        let moved = worker.block_on(move_region(worker, structure, &none, from, to));
        assert!(matches!(moved, Err(Error::AtOwner { .. })), "{none:?}: {moved:?}");
        for owner in [first, third] {
            let handle = &owner.member.worker;
            let taken = handle.block_on(owner.holdings.take(handle, none));
            assert!(matches!(taken, Err(Error::BadOption { option: "region", .. })), "{none:?}: {taken:?}");
        }
        let given_up = first.member.worker.block_on(first.holdings.give_up(&first.member.worker, &none));
        assert!(matches!(given_up, Err(Error::BadOption { option: "region", .. })), "{none:?}: {given_up:?}");
    }
    assert_eq!(map(), before);
    let (fabric, model) = scene.leave();
    assert_left_clean(&fabric, &model, "no region");
}
