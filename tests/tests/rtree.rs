//! The R-tree: every answer equals brute force, and it passes the conformance kit.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_offload::{
    CacheOptions, ComputeCache, Engine, EngineOptions, Policies, Remote,
    policy::{Always, Never},
    ship::{Registry, ShipServer},
};
use farlink_runtime::{
    access::{Access, Region},
    compute::{ComputeOptions, ComputeServer},
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    structure::{PlacementPolicy, StructurePlacement},
    worker::{Handle, Worker},
};
use farlink_structures::rtree::{
    BadRect, Entry, Query, RTree, RTreeOptions, Rect, Tree,
    ops::{Count, Delete, Find, Insert, Update},
};
use farlink_tests::{
    backend::{Cluster, FabricProfile},
    conformance::{Event, Model},
    fleet::Fleet,
    settings,
};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// A worker, its compute server and its cluster, which go in this order.
struct Scene {
    worker: Worker,
    _compute: ComputeServer,
    _cluster: Cluster,
}

fn scene(server_bytes: u64) -> Scene {
    let cluster = Cluster::of_this_run(3, server_bytes, FabricProfile::Fast).unwrap();
    let compute = ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap();
    Scene { worker: compute.worker().unwrap(), _compute: compute, _cluster: cluster }
}

async fn create<const D: usize>(worker: &Handle) -> Result<RTree<OneSided<Tree<D>>, D>, Error> {
    RTree::create(worker, "model", RTreeOptions::default()).await
}

/// A rectangle on a grid, so that many are equal, touch, and lie on boundaries.
fn a_rect<const D: usize>(rng: &mut SmallRng, side: i32) -> Rect<D> {
    let low: [f64; D] = std::array::from_fn(|_| f64::from(rng.random_range(-20..20)));
    let high = low.map(|low| low + f64::from(rng.random_range(0..=side)));
    Rect::new(low, high).unwrap()
}

fn a_query<const D: usize>(rng: &mut SmallRng) -> Query<D> {
    match rng.random_range(0..4) {
        0 => Query::Within(a_rect(rng, 25)),
        1 => Query::Contains(a_rect(rng, 2)),
        _ => Query::Intersects(a_rect(rng, 12)),
    }
}

fn key<const D: usize>(entry: &Entry<D>) -> (Vec<u64>, u64) {
    let corners = entry.0.low().into_iter().chain(entry.0.high());
    (
        corners
            .map(|at| (at.to_bits() as i64 ^ ((at.to_bits() as i64 >> 63) as u64 >> 1) as i64) as u64 ^ 1 << 63)
            .collect(),
        entry.1,
    )
}

fn sorted<const D: usize>(mut entries: Vec<Entry<D>>) -> Vec<Entry<D>> {
    entries.sort_by_key(key);
    entries
}

/// Whatever can be asked has the answer of brute force.
async fn same<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &[Entry<D>],
    rng: &mut SmallRng,
) -> Result<(), Error> {
    assert_eq!(tree.len().await?, model.len() as u64);
    assert_eq!(tree.is_empty().await?, model.is_empty());
    for _ in 0..6 {
        let query = a_query(rng);
        let expected: Vec<Entry<D>> = sorted(model.iter().filter(|(rect, _)| query.matches(rect)).copied().collect());
        assert_eq!(sorted(tree.search(query).all().await?), expected, "{query:?}");
        assert_eq!(tree.count(query).await?, expected.len() as u64);
        let most = rng.random_range(0..20);
        let (mut cursor, mut found) = (tree.search(query), Vec::new());
        while let Some(entry) = cursor.next().await? {
            found.push(entry);
        }
        assert_eq!(found, expected, "by a cursor, {query:?}");
        let first = tree.search(query).take(most).await?;
        assert_eq!(first, expected[..most.min(expected.len())], "the first {most}, {query:?}");
    }
    let to: [f64; D] = std::array::from_fn(|_| f64::from(rng.random_range(-30..30)));
    let mut expected: Vec<f64> = model.iter().map(|(rect, _)| rect.distance_squared(&to)).collect();
    expected.sort_by(f64::total_cmp);
    let (mut cursor, mut found) = (tree.search(Query::Nearest(to)), Vec::new());
    while let Some((rect, _)) = cursor.next().await? {
        found.push(rect.distance_squared(&to));
    }
    assert_eq!(found, expected, "the nearest to {to:?}");
    Ok(())
}

async fn clean<A: Access<Plugin = Tree<D>>, const D: usize>(tree: &RTree<A, D>, entries: usize) -> Result<(), Error> {
    let report = tree.check().await?;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.entries, entries as u64);
    Ok(())
}

/// Entries come, move and go; in the end all go.
async fn grows_and_shrinks<const D: usize>(worker: &Handle, seed: u64, ops: usize) -> Result<(), Error> {
    let (tree, mut rng, mut model) =
        (create::<D>(worker).await?, SmallRng::seed_from_u64(seed), Vec::<Entry<D>>::new());
    for number in 0..ops {
        let (rect, payload) = (a_rect(&mut rng, 3), rng.random_range(0..10));
        match rng.random_range(0..8) {
            0 if !model.is_empty() => {
                let entry = model.swap_remove(rng.random_range(0..model.len()));
                assert!(tree.delete(entry.0, entry.1).await?);
            }
            1 if !model.is_empty() => {
                let index = rng.random_range(0..model.len());
                assert!(tree.update(model[index].0, model[index].1, rect).await?);
                model[index].0 = rect;
            }
            2 => {
                let there = model.iter().position(|entry| *entry == (rect, payload));
                assert_eq!(tree.delete(rect, payload).await?, there.is_some());
                there.map(|index| model.swap_remove(index));
            }
            _ => {
                tree.insert(rect, payload).await?;
                model.push((rect, payload));
            }
        }
        if number % 200 == 0 {
            same(&tree, &model, &mut rng).await?;
            clean(&tree, model.len()).await?;
        }
    }
    same(&tree, &model, &mut rng).await?;
    while !model.is_empty() {
        let entry = model.swap_remove(rng.random_range(0..model.len()));
        assert!(tree.delete(entry.0, entry.1).await?, "{entry:?} of {} left", model.len());
    }
    same(&tree, &model, &mut rng).await?;
    clean(&tree, 0).await?;
    assert_eq!(tree.check().await?.pages(), 1, "an empty tree is its root");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: settings::from_env("FARLINK_MODEL_CASES", 12),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn all_answers_are_those_of_brute_force(seed: u64, ops in 0usize..1500) {
        let scene = scene(16 << 20);
        scene.worker.block_on(async {
            grows_and_shrinks::<2>(&scene.worker, seed, ops).await.unwrap();
        });
    }

    #[test]
    fn in_other_dimensions_too(seed: u64, ops in 0usize..600) {
        let scene = scene(16 << 20);
        scene.worker.block_on(async {
            match seed % 4 {
                0 => grows_and_shrinks::<1>(&scene.worker, seed, ops).await.unwrap(),
                1 => grows_and_shrinks::<6>(&scene.worker, seed, ops).await.unwrap(),
                _ => grows_and_shrinks::<3>(&scene.worker, seed, ops).await.unwrap(),
            }
        });
    }
}

#[test]
fn every_size_is_bulk_loaded_well_and_goes_on_growing() {
    let scene = scene(64 << 20);
    let step: usize = settings::from_env("FARLINK_RTREE_SIZE_STEP", 13);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(7);
        for count in (1..200).chain((200..5000).step_by(step)).chain([5000]) {
            let name = format!("of {count}");
            let page_bytes = if count % 5 == 0 { [2048, 4096, 8192, 16384][count / 5 % 4] } else { 1024 };
            let options = RTreeOptions { page_bytes, ..RTreeOptions::default() };
            let tree = RTree::<_, 2>::create(&scene.worker, &name, options).await.unwrap();
            let mut model: Vec<Entry> = (0..count).map(|number| (a_rect(&mut rng, 3), number as u64)).collect();
            let fill = [1.0, 0.7, 0.9, 0.3][count % 4];
            assert_eq!(tree.bulk_load(model.iter().copied(), fill).await.unwrap(), count as u64);
            clean(&tree, count).await.unwrap();
            for number in 0..10 {
                let entry = (a_rect(&mut rng, 3), number);
                tree.insert(entry.0, entry.1).await.unwrap();
                model.push(entry);
            }
            clean(&tree, count + 10).await.unwrap();
            if count % 7 == 0 {
                same(&tree, &model, &mut rng).await.unwrap();
            }
            assert!(matches!(tree.bulk_load([], 0.9).await, Err(Error::NotEmpty)));
            farlink_runtime::catalog::destroy(&scene.worker, &name).await.unwrap();
        }
    });
}

#[test]
fn what_is_no_rectangle_is_refused() {
    let new = |low, high| Rect::<2>::new(low, high).unwrap_err();
    assert_eq!(new([0.0, f64::NAN], [1.0; 2]), BadRect::NotFinite { dimension: 1 });
    assert_eq!(new([0.0; 2], [f64::INFINITY, 1.0]), BadRect::NotFinite { dimension: 0 });
    assert_eq!(new([0.0, 2.0], [1.0; 2]), BadRect::Inverted { dimension: 1 });
    assert_eq!(Rect::point([-0.0]), Rect::point([0.0]));
    let scene = scene(16 << 20);
    scene.worker.block_on(async {
        let tree = create::<2>(&scene.worker).await.unwrap();
        let before = scene.worker.counters();
        let refused = |error: Result<(), Error>| matches!(error, Err(Error::BadOption { option: "rectangle", .. }));
        assert!(refused(tree.insert(Rect::EVERYTHING, 1).await));
        assert!(refused(tree.update(Rect::point([0.0; 2]).unwrap(), 1, Rect::EVERYTHING).await.map(drop)));
        assert_eq!(scene.worker.counters(), before, "something was sent");
        // Nor does what comes from elsewhere get in.
        assert!(refused(tree.access().execute(&Insert { rect: Rect::EVERYTHING, payload: 1 }).await));
        assert!(refused(tree.bulk_load([(Rect::EVERYTHING, 1)], 0.9).await.map(drop)));
        clean(&tree, 0).await.unwrap();
    });
}

#[test]
fn a_join_finds_every_pair_once() {
    let scene = scene(32 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(3);
        let (left, mut trees) = (create::<2>(&scene.worker).await.unwrap(), Vec::new());
        for count in [0, 1, 900] {
            let name = format!("right {count}");
            trees.push((count, RTree::create(&scene.worker, &name, RTreeOptions::default()).await.unwrap()));
        }
        let ours: Vec<Entry> = (0..700).map(|number| (a_rect(&mut rng, 2), number)).collect();
        left.bulk_load(ours.iter().copied(), 0.9).await.unwrap();
        for (count, right) in trees {
            let theirs: Vec<Entry> = (0..count).map(|number| (a_rect(&mut rng, 2), number)).collect();
            right.bulk_load(theirs.iter().copied(), 0.9).await.unwrap();
            let mut expected = Vec::new();
            for one in &ours {
                expected.extend(theirs.iter().filter(|other| one.0.intersects(&other.0)).map(|other| (one.1, other.1)));
            }
            let (mut join, mut found) = (left.join(&right), Vec::new());
            while let Some((one, other)) = join.next().await.unwrap() {
                found.push((one.1, other.1));
            }
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!(found, expected);
        }
    });
}

/// Entries inserted through one handle are found through an older cache.
#[test]
fn an_old_copy_of_a_page_above_hides_nothing() {
    let scene = scene(32 << 20);
    let cache = ComputeCache::new(CacheOptions::new(1 << 20)).unwrap();
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(5);
        let writer = create::<2>(&scene.worker).await.unwrap();
        let mut model: Vec<Entry> = (0..3000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        writer.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let structure = writer.access().context().structure.clone();
        let reader = RTree::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
        assert_eq!(reader.len().await.unwrap(), 3000);
        for payload in 3000..4000u64 {
            let low = [f64::from(rng.random_range(-60..60)), f64::from(rng.random_range(-60..60))];
            let rect = Rect::point(low).unwrap();
            writer.insert(rect, payload).await.unwrap();
            model.push((rect, payload));
            let found = reader.search(Query::Contains(rect)).all().await.unwrap();
            assert!(found.contains(&(rect, payload)), "{rect:?}");
        }
        same(&reader, &model, &mut rng).await.unwrap();
    });
}

/// A search that goes by thousands of pages has a bounded number of them on their way, of all levels; a page costs one READ.
#[test]
fn reads_of_all_levels_overlap() {
    let scene = scene(64 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(9);
        let tree = create::<2>(&scene.worker).await.unwrap();
        let entries = (0..20_000).map(|number| {
            let low = [rng.random_range(0.0..1.0), rng.random_range(0.0..1.0)];
            (Rect::new(low, low.map(|at| at + 1e-4)).unwrap(), number)
        });
        tree.bulk_load(entries, 0.9).await.unwrap();
        let pages = tree.check().await.unwrap().pages();
        let before = scene.worker.counters();
        assert_eq!(tree.len().await.unwrap(), 20_000);
        let after = scene.worker.counters();
        assert_eq!(after.reads - before.reads, pages);
        let trips = after.round_trips - before.round_trips;
        println!("{pages} pages in {trips} round trips");
        assert!(trips * 4 < pages, "{trips} round trips for {pages} pages");
    });
}

/// Nothing is cached below the pages above: what is below each of them is searched by its memory server, and an answer that is
/// too long for a message goes on where it ended.
#[test]
fn subtrees_are_searched_by_their_memory_servers() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = ComputeServer::join(fleet.fabric(), ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(11);
        let placed = StructurePlacement { spread: PlacementPolicy::Subtrees { level: 1 }, root: None };
        let options = RTreeOptions { placed, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "spread", options).await.unwrap();
        let model: Vec<Entry> = (0..40_000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        made.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let structure = made.access().context().structure.clone();
        for (policies, ships) in [(Policies::new(Always), true), (Policies::new(Never), false)] {
            let mut options = CacheOptions::new(1 << 20);
            options.excludes_subtrees = true;
            let owned = ComputeCache::new(options).unwrap().own(&worker, structure.clone(), Rect::EVERYTHING).unwrap();
            let engine = Engine::new(owned, policies, EngineOptions::default()).unwrap();
            let tree = RTree::over(engine.clone());
            let window = Query::Intersects(Rect::new([-15.0; 2], [15.0; 2]).unwrap());
            let expected: Vec<Entry> = model.iter().filter(|(rect, _)| window.matches(rect)).copied().collect();
            let before = fleet.servers.iter().map(ShipServer::counts).collect::<Vec<_>>();
            assert_eq!(tree.count(window).await.unwrap(), expected.len() as u64);
            assert_eq!(engine.counts().shipped > 0, ships);
            for (server, before) in fleet.servers.iter().zip(before) {
                assert_eq!(server.counts() != before, ships, "each memory server has a part of it");
            }
            assert_eq!(sorted(tree.search(window).all().await.unwrap()), sorted(expected));
            let coarse = RTree::over(Remote::new(&worker, structure.clone()));
            assert_eq!(coarse.search(window).all().await.unwrap().len() as u64, tree.count(window).await.unwrap());
        }
    });
}

/// How a search reaches the tree in `keeps_its_promise`.
#[derive(Debug, Clone, Copy)]
enum Reach {
    OneSided,
    CachedInner,
}

/// Some entries are there all the time, others come, move and go in waves, so that pages are split, share entries, are condensed and
/// freed: every search has each of the former once, and no other one twice.
fn keeps_its_promise<const D: usize>(profile: FabricProfile, reach: Reach) {
    let seed = settings::from_env("FARLINK_TEST_SEED", rand::random::<u64>());
    println!("FARLINK_TEST_SEED={seed}");
    let lasting: Vec<Entry<D>> = {
        let mut rng = SmallRng::seed_from_u64(seed);
        (0..300).map(|number| (a_rect(&mut rng, 2), number)).collect()
    };
    let cluster = Cluster::of_this_run(2, 32 << 20, profile).unwrap();
    let computes: Vec<_> =
        (0..2).map(|_| ComputeServer::join(Arc::clone(&cluster), ComputeOptions::default()).unwrap()).collect();
    let structure = {
        let worker = computes[0].worker().unwrap();
        worker.block_on(async {
            let tree = create::<D>(&worker).await.unwrap();
            for &(rect, payload) in &lasting {
                tree.insert(rect, payload).await.unwrap();
            }
            tree.access().context().structure.clone()
        })
    };
    let cache = ComputeCache::<Tree<D>>::new(CacheOptions::new(256 << 10)).unwrap();
    let limit = Duration::from_secs_f64(settings::from_env("FARLINK_KIT_SECONDS", 3.0));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (compute, structure) = (&computes[number as usize], &structure);
            scope.spawn(move || {
                let worker = compute.worker().unwrap();
                let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
                let mut rng = SmallRng::seed_from_u64(seed ^ (number + 1));
                let (mut there, mut payload) = (Vec::<Entry<D>>::new(), (number + 1) << 32);
                worker.block_on(async {
                    let mut grows = true;
                    while begun.elapsed() < limit {
                        grows = if grows { there.len() < 400 } else { there.is_empty() };
                        let rect = a_rect(&mut rng, 2);
                        match rng.random_range(0..8) {
                            0 if !there.is_empty() => {
                                let index = rng.random_range(0..there.len());
                                let (from, payload) = there[index];
                                assert!(tree.update(from, payload, rect).await.unwrap());
                                there[index].0 = rect;
                            }
                            1.. if grows => {
                                payload += 1;
                                tree.insert(rect, payload).await.unwrap();
                                there.push((rect, payload));
                            }
                            _ if !there.is_empty() => {
                                let entry = there.swap_remove(rng.random_range(0..there.len()));
                                assert!(tree.delete(entry.0, entry.1).await.unwrap(), "{entry:?} is not there");
                            }
                            _ => {}
                        }
                    }
                });
            });
        }
        let (compute, structure, cache, lasting) = (&computes[0], &structure, &cache, &lasting);
        scope.spawn(move || {
            let worker = compute.worker().unwrap();
            let mut rng = SmallRng::seed_from_u64(!seed);
            let mut searches = 0;
            worker.block_on(async {
                let one_sided = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
                let inner = RTree::<_, D>::over(cache.share(&worker, structure.clone(), Proof::Checksum).unwrap());
                while begun.elapsed() < limit {
                    let query = if rng.random() { a_query(&mut rng) } else { Query::Intersects(Rect::EVERYTHING) };
                    let found = match reach {
                        Reach::OneSided => one_sided.search(query).all().await.unwrap(),
                        Reach::CachedInner => inner.search(query).all().await.unwrap(),
                    };
                    let mut counts = BTreeMap::<Key, u64>::new();
                    found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
                    for entry in lasting.iter().filter(|(rect, _)| query.matches(rect)) {
                        assert!(counts.contains_key(&key(entry)), "{entry:?} is missing from {query:?} over {reach:?}");
                    }
                    for (key, count) in counts {
                        // What is moved to and fro may be two entries.
                        let most = if key.1 < 300 { 1 } else { u64::MAX };
                        assert!(count <= most, "{count} of payload {} in {query:?} over {reach:?}", key.1);
                    }
                    searches += 1;
                }
            });
            println!("{searches} searches over {reach:?} of {D} dimensions, {profile:?}");
        });
    });
    let worker = computes[0].worker().unwrap();
    worker.block_on(async {
        let tree = RTree::<_, D>::over(OneSided::new(&worker, structure.clone(), Proof::Checksum));
        let report = tree.check().await.unwrap();
        assert!(report.is_clean(), "{report:?}");
    });
}

#[test]
fn a_search_keeps_its_promise_while_entries_come_and_go() {
    for profile in [FabricProfile::Fast, FabricProfile::Nasty] {
        for reach in [Reach::OneSided, Reach::CachedInner] {
            keeps_its_promise::<2>(profile, reach);
            keeps_its_promise::<6>(profile, reach);
        }
    }
}

/// The R-tree under the kit.
struct Places<const D: usize>;

#[derive(Debug, Clone)]
enum Op<const D: usize> {
    Insert(Entry<D>),
    Delete(Entry<D>),
    Update(Entry<D>, Rect<D>),
    Find(Query<D>, u64),
    Count(Query<D>),
}

#[derive(Debug, Clone, PartialEq)]
enum Output<const D: usize> {
    Done(bool),
    /// As their keys, which have a total order.
    Entries(Vec<Entry<D>>),
    Count(u64),
}

type Key = (Vec<u64>, u64);

/// Entries, each as often as it is there.
type State = BTreeMap<Key, u64>;

fn rect_of<const D: usize>(key: &Key) -> Rect<D> {
    let number = |word: u64| {
        let word = (word ^ 1 << 63) as i64;
        f64::from_bits((word ^ ((word >> 63) as u64 >> 1) as i64) as u64)
    };
    let corner = |from: usize| std::array::from_fn(|d| number(key.0[from + d]));
    Rect::new(corner(0), corner(D)).unwrap()
}

fn matching<const D: usize>(state: &State, query: &Query<D>) -> Vec<Entry<D>> {
    let entries = state.iter().map(|(key, &count)| ((rect_of::<D>(key), key.1), count));
    let found = entries.filter(|((rect, _), _)| query.matches(rect));
    found.flat_map(|(entry, count)| std::iter::repeat_n(entry, count as usize)).collect()
}

fn add(state: &mut State, key: Key) {
    *state.entry(key).or_default() += 1;
}

fn take(state: &mut State, key: &Key) -> bool {
    let Some(count) = state.get_mut(key) else { return false };
    *count -= 1;
    if *count == 0 {
        state.remove(key);
    }
    true
}

const ENTRIES_MAX: u64 = 250;

impl<const D: usize> Model for Places<D> {
    type Plugin = Tree<D>;
    type Op = Op<D>;
    type Output = Output<D>;
    type State = State;

    fn draw(rng: &mut SmallRng, state: &State) -> Op<D> {
        let entry = (a_rect(rng, 3), rng.random_range(0..4));
        let is_full = state.values().sum::<u64>() > ENTRIES_MAX;
        let known = state.keys().nth(rng.random_range(0..state.len().max(1))).map(|key| (rect_of(key), key.1));
        match rng.random_range(0..16) {
            0 => Op::Find(a_query(rng), rng.random_range(1..50)),
            1 => Op::Find(a_query(rng), u64::MAX),
            2 => Op::Find(Query::Nearest(entry.0.low()), rng.random_range(1..20)),
            3 => Op::Count(a_query(rng)),
            4 => Op::Delete(entry),
            5 => Op::Update(known.unwrap_or(entry), a_rect(rng, 3)),
            6 => known.map_or(Op::Insert(entry), Op::Insert),
            7..10 => Op::Delete(known.unwrap_or(entry)),
            _ if is_full => Op::Delete(known.unwrap_or(entry)),
            _ => Op::Insert(entry),
        }
    }

    fn apply(state: &mut State, op: &Op<D>) -> Output<D> {
        match op {
            Op::Insert(entry) => {
                add(state, key(entry));
                Output::Done(true)
            }
            Op::Delete(entry) => Output::Done(take(state, &key(entry))),
            Op::Update(entry, to) => {
                let is_there = take(state, &key(entry));
                if is_there {
                    add(state, key(&(*to, entry.1)));
                }
                Output::Done(is_there)
            }
            Op::Find(query @ Query::Nearest(to), limit) => {
                let mut all = matching(state, query);
                all.sort_by(|a, b| {
                    let distance = |entry: &Entry<D>| entry.0.distance_squared(to);
                    distance(a).total_cmp(&distance(b)).then_with(|| key(a).cmp(&key(b)))
                });
                all.truncate(*limit as usize);
                Output::Entries(all)
            }
            Op::Find(query, limit) => {
                let mut all = matching(state, query);
                all.truncate((*limit).min(1 << 30) as usize);
                Output::Entries(all)
            }
            Op::Count(query) => Output::Count(matching(state, query).len() as u64),
        }
    }

    /// What is promised of entries that come and go meanwhile is less, and judged by `judge`.
    fn is_linearizable(_op: &Op<D>) -> bool {
        false
    }

    fn looks() -> Vec<Op<D>> {
        vec![Op::Find(Query::Intersects(Rect::everything()), u64::MAX)]
    }

    async fn run(op: &Op<D>, on: &impl Run<Plugin = Tree<D>>) -> Result<Output<D>, Error> {
        Ok(match *op {
            Op::Insert((rect, payload)) => on.execute(&Insert { rect, payload }).await.map(|()| Output::Done(true))?,
            Op::Delete((rect, payload)) => Output::Done(on.execute(&Delete { rect, payload }).await?),
            Op::Update((rect, payload), to) => Output::Done(on.execute(&Update { rect, payload, to }).await?),
            Op::Count(query) => Output::Count(on.execute(&Count { query, stamp: 0 }).await?),
            Op::Find(query, limit) => {
                let (mut after, mut all) = (None, Vec::new());
                while (all.len() as u64) < limit {
                    let found = on.execute(&Find { query, limit: limit - all.len() as u64, after, stamp: 0 }).await?;
                    after = found.entries.last().copied();
                    all.extend(found.entries);
                    if !found.has_rest {
                        break;
                    }
                }
                if limit == u64::MAX {
                    all = sorted(all);
                } else if let Query::Nearest(to) = query {
                    all.sort_by(|a, b| {
                        let distance = |entry: &Entry<D>| entry.0.distance_squared(&to);
                        distance(a).total_cmp(&distance(b)).then_with(|| key(a).cmp(&key(b)))
                    });
                    all.truncate(limit as usize);
                } else {
                    all = sorted(all);
                    all.truncate(limit as usize);
                }
                Output::Entries(all)
            }
        })
    }

    async fn create(worker: &Handle, name: &str, placed: StructurePlacement) -> Result<(), Error> {
        let options = RTreeOptions { placed, ..RTreeOptions::default() };
        RTree::<_, D>::create(worker, name, options).await.map(drop)
    }

    /// Of each entry every answer has as many as were there all the time at least, and no more than ever were.
    fn judge(history: &[Event<Op<D>, Output<D>>]) -> Result<(), String> {
        judge(history)
    }
}

/// When an entry may have come or gone, and when it has for certain.
#[derive(Debug, Clone, Copy)]
struct Step {
    begin: u64,
    end: u64,
    /// Whether it is known to have been done.
    is_known: bool,
}

fn judge<const D: usize>(history: &[Event<Op<D>, Output<D>>]) -> Result<(), String> {
    let (mut come, mut gone) = (BTreeMap::<Key, Vec<Step>>::new(), BTreeMap::<Key, Vec<Step>>::new());
    for event in history {
        if event.outcome == Some(Output::Done(false)) {
            continue;
        }
        let is_known = event.outcome.is_some();
        let step = Step { begin: event.begin_ns, end: event.end_ns, is_known };
        match &event.op {
            Op::Insert(entry) => come.entry(key(entry)).or_default().push(step),
            Op::Delete(entry) => gone.entry(key(entry)).or_default().push(step),
            Op::Update(entry, to) => {
                gone.entry(key(entry)).or_default().push(step);
                come.entry(key(&(*to, entry.1))).or_default().push(step);
            }
            Op::Find(..) | Op::Count(_) => {}
        }
    }
    let none = Vec::new();
    let bounds = |key: &Key, begin: u64, end: u64| {
        let (come, gone) = (come.get(key).unwrap_or(&none), gone.get(key).unwrap_or(&none));
        let surely = |steps: &[Step]| steps.iter().filter(|step| step.is_known && step.end <= begin).count() as u64;
        let perhaps = |steps: &[Step]| steps.iter().filter(|step| step.begin < end).count() as u64;
        (surely(come).saturating_sub(perhaps(gone)), perhaps(come).saturating_sub(surely(gone)))
    };
    for event in history {
        let (begin, end) = (event.begin_ns, event.end_ns);
        let wrong = |what: String| Err(format!("{what} in {event:?}"));
        match (&event.op, &event.outcome) {
            (Op::Delete(entry) | Op::Update(entry, _), Some(Output::Done(is_done))) => {
                // Of itself it says nothing: it is among those that may have taken it.
                let (least, _) = bounds(&key(entry), begin, end);
                let most = come.get(&key(entry)).map_or(0, |come| come.iter().filter(|step| step.begin < end).count());
                if !is_done && least > 0 || *is_done && most == 0 {
                    return wrong(format!("of {entry:?} there were {least} at least and {most} at most"));
                }
            }
            (Op::Find(query, limit), Some(Output::Entries(found))) => {
                let mut counts = BTreeMap::<Key, u64>::new();
                found.iter().for_each(|entry| *counts.entry(key(entry)).or_default() += 1);
                // Behind the last one of a part is the rest.
                let is_cut = found.len() as u64 >= *limit;
                let is_asked = |key: &&Key| !is_cut && query.matches(&rect_of::<D>(key));
                for key in come.keys().filter(is_asked).chain(counts.keys()) {
                    let ((least, most), count) = (bounds(key, begin, end), counts.get(key).copied().unwrap_or(0));
                    let least = if is_cut { 0 } else { least };
                    if count < least || count > most {
                        let entry = (rect_of::<D>(key), key.1);
                        return wrong(format!("{count} of {entry:?}, not {least} to {most}"));
                    }
                }
            }
            (Op::Count(query), Some(Output::Count(count))) => {
                let matching = come.keys().filter(|key| query.matches(&rect_of::<D>(key)));
                let sums = matching.map(|key| bounds(key, begin, end)).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
                if *count < sums.0 || *count > sums.1 {
                    return wrong(format!("not {} to {}", sums.0, sums.1));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

farlink_tests::conformance!(plane: Places<2>);
// Few entries to a page, so that there are more levels.
farlink_tests::conformance!(deep: Places<6>);
