//! What a search costs and finds through caches, on memory servers, and over a window of reads.

use std::{future::Future as _, sync::Arc, task, time::Duration};

use farlink_offload::{
    Adaptive, Admission, CacheOptions, Cached, ComputeCache, Engine, EngineOptions, Hybrid, Policies, Remote,
    policy::{Always, Choice, Miss, Never, Policy},
    ship::{Registry, ShipServer},
};
use farlink_runtime::{
    access::{Access, FastPath as _},
    compute::{ComputeOptions, ComputeServer},
    fabric::mem::MemOptions,
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server,
    structure::{PlacementPolicy, StructurePlacement},
    worker::{Counters, Worker},
};
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect, Tree};
use farlink_tests::{backend::FabricProfile, bounded::Watchdog, cluster, fleet::Fleet, settings};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::{a_rect, sorted},
    model::{clean, same, some},
    scene::{create, scene},
};

/// Entries inserted through one handle are found through an older cache.
#[test]
fn an_old_copy_of_a_page_above_hides_nothing() {
    let scene = scene(32 << 20);
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(5);
        let writer = create::<2>(&scene.worker).await.unwrap();
        let mut model: Vec<Entry> = (0..3000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        writer.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let structure = writer.access().context().structure.clone();
        let reader = RTree::<_, 2>::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
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

/// A leaf has been condensed, and the cache does not know. The page above is not read again in vain: a search begins anew, and reads each
/// page once more.
#[test]
fn an_old_copy_of_a_page_above_costs_one_retry() {
    const ENTRIES: u64 = 1000;
    let scene = scene(32 << 20);
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
    scene.worker.block_on(async {
        let point = |at: u64| Rect::point([at as f64, 0.0]).unwrap();
        let writer = create::<2>(&scene.worker).await.unwrap();
        writer.bulk_load((0..ENTRIES).map(|at| (point(at), at)), 0.9).await.unwrap();
        let report = writer.check().await.unwrap();
        assert!(report.height() > 2, "above that page there has to be one");
        let structure = writer.access().context().structure.clone();
        let reader = RTree::<_, 2>::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
        assert_eq!(reader.len().await.unwrap(), ENTRIES);
        // The leaves on the left, which a search comes to last.
        let mut gone = 0;
        while scene.worker.counters().merges == 0 {
            assert!(writer.delete(point(gone), gone).await.unwrap());
            gone += 1;
        }
        let before = scene.worker.counters();
        assert_eq!(reader.len().await.unwrap(), ENTRIES - gone);
        let Counters { reads, restarts, .. } = scene.worker.counters() - before;
        assert_eq!(restarts, 1);
        assert!(reads <= 2 * report.pages(), "{reads} READs, and there are {} pages", report.pages());
    });
}

/// Whoever checks a tree over a cache looks at it as it is.
#[test]
fn a_checker_trusts_no_old_copy() {
    let scene = scene(32 << 20);
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap();
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(6);
        let writer = create::<2>(&scene.worker).await.unwrap();
        let entries = |from: u64, rng: &mut SmallRng| -> Vec<Entry> {
            (from..from + 1000).map(|number| (a_rect(rng, 1), number)).collect()
        };
        writer.bulk_load(entries(0, &mut rng), 0.9).await.unwrap();
        let structure = writer.access().context().structure.clone();
        let reader = RTree::<_, 2>::over(cache.share(&scene.worker, structure, Proof::Checksum).unwrap());
        assert_eq!(reader.len().await.unwrap(), 1000);
        for (rect, payload) in entries(1000, &mut rng) {
            writer.insert(rect, payload).await.unwrap();
        }
        clean(&reader, 2000).await.unwrap();
    });
}

/// To make room for a new page costs others their places, the pages of the change perhaps: an attempt that holds copies makes it first.
#[test]
fn changes_in_a_cache_of_a_dozen_pages_end() {
    const ENTRIES: u64 = 250;
    for seed in 0..6 {
        let _watch = Watchdog::start(format!("changes in a small cache, seed {seed}"), Duration::from_secs(60));
        let scene = scene(16 << 20);
        let mut options = CacheOptions::new(1 << 20);
        (options.page_bytes, options.pages_max, options.admission) = (1024, 12, Admission::Always);
        options.excludes_subtrees = true;
        let cache = ComputeCache::<Tree<3>>::new(options).unwrap();
        scene.worker.block_on(async {
            let mut rng = SmallRng::seed_from_u64(seed);
            let made = create::<3>(&scene.worker).await.unwrap();
            let structure = made.access().context().structure.clone();
            let tree = RTree::<_, 3>::over(cache.own(&scene.worker, structure, Rect::EVERYTHING.into()).await.unwrap());
            let mut model: Vec<Entry<3>> = (0..ENTRIES).map(|number| (a_rect(&mut rng, 100), number % 4)).collect();
            for &(rect, payload) in &model {
                tree.insert(rect, payload).await.unwrap();
            }
            for _ in 0..4 * ENTRIES {
                let (at, next) = (rng.random_range(0..model.len()), a_rect(&mut rng, 3));
                let (rect, payload) = model[at];
                assert!(tree.update(rect, payload, next).await.unwrap());
                model[at].0 = next;
            }
            assert_eq!(sorted(tree.search(Query::Intersects(Rect::EVERYTHING)).all().await.unwrap()), sorted(model));
        });
    }
}

/// A search that goes by more pages than an attempt holds copies of has few of them at a time.
#[test]
fn a_large_search_in_a_small_cache_has_its_answer() {
    let _watch = Watchdog::start("a search in a small cache", Duration::from_secs(20));
    const ENTRIES: u64 = 100_000;
    let scene = scene(64 << 20);
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(64 << 10)).unwrap();
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(21);
        let made = create::<2>(&scene.worker).await.unwrap();
        let entries = (0..ENTRIES).map(|number| (within_unit_square(&mut rng, 1e-3), number));
        made.bulk_load(entries, 0.9).await.unwrap();
        assert!(made.check().await.unwrap().pages() > 4096);
        let structure = made.access().context().structure.clone();
        let tree = RTree::<_, 2>::over(cache.own(&scene.worker, structure, Rect::EVERYTHING.into()).await.unwrap());
        assert_eq!(tree.len().await.unwrap(), ENTRIES);
        let window = Query::Intersects(Rect::EVERYTHING);
        assert_eq!(tree.search(window).all().await.unwrap().len() as u64, ENTRIES);
    });
}

/// Nor does it hold on to the pages above the leaves; nor do operations that look for an entry among many equal ones.
#[test]
fn a_search_by_many_inner_pages_in_a_small_cache_has_its_answer() {
    let _watch = Watchdog::start("a search in a small cache", Duration::from_secs(20));
    const ENTRIES: u64 = 20_000;
    let scene = scene(64 << 20);
    let cache = ComputeCache::<Tree>::new(CacheOptions::new(64 << 10)).unwrap();
    scene.worker.block_on(async {
        let made = create::<2>(&scene.worker).await.unwrap();
        let rect = Rect::point([1.0, 1.0]).unwrap();
        made.bulk_load((0..ENTRIES).map(|number| (rect, number)), 0.1).await.unwrap();
        let pages = made.check().await.unwrap().pages_by_level;
        assert!(pages[0] > 4096 && pages[1..].iter().sum::<u64>() > 4096, "{pages:?}");
        let structure = made.access().context().structure.clone();
        let tree = RTree::<_, 2>::over(cache.own(&scene.worker, structure, Rect::EVERYTHING.into()).await.unwrap());
        assert_eq!(tree.len().await.unwrap(), ENTRIES);
        assert_eq!(tree.search(Query::Intersects(rect)).all().await.unwrap().len() as u64, ENTRIES);
        assert!(!tree.delete(rect, ENTRIES).await.unwrap(), "there is no such entry");
        assert!(!tree.update(rect, ENTRIES, rect).await.unwrap(), "there is no such entry");
        tree.access().flush().await.unwrap();
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
        tree.access().enter().await.unwrap();
        let before = scene.worker.counters();
        assert_eq!(tree.len().await.unwrap(), 20_000);
        let after = scene.worker.counters();
        assert_eq!(after.reads - before.reads, pages);
        let trips = after.round_trips - before.round_trips;
        println!("{pages} pages in {trips} round trips");
        assert!(trips * 4 < pages, "{trips} round trips for {pages} pages");
    });
}

/// Whoever wants few entries reads few pages: what lies behind the last of them in the order is not read.
#[test]
fn the_first_entries_cost_a_few_pages() {
    let scene = scene(64 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(22);
        let tree = create::<2>(&scene.worker).await.unwrap();
        let entries = (0..20_000).map(|number| (within_unit_square(&mut rng, 1e-3), number));
        tree.bulk_load(entries, 0.9).await.unwrap();
        let report = tree.check().await.unwrap();
        let (all, levels) = (Query::Intersects(Rect::EVERYTHING), report.height() as u64);
        let mut most = [0; 4];
        for _ in 0..50 {
            let near = Query::Nearest([rng.random_range(0.0..1.0), rng.random_range(0.0..1.0)]);
            let mut nearest = tree.search(near);
            for (number, most) in most.iter_mut().enumerate() {
                let before = scene.worker.counters();
                match number {
                    0 => assert!(!tree.is_empty().await.unwrap()),
                    1 => assert_eq!(tree.search(all).take(5).await.unwrap().len(), 5),
                    2 => assert_eq!(tree.search(near).take(5).await.unwrap().len(), 5),
                    // In two parts.
                    _ => {
                        for _ in 0..20 {
                            assert!(nearest.next().await.unwrap().is_some());
                        }
                    }
                }
                *most = (*most).max((scene.worker.counters() - before).reads);
            }
        }
        println!("at most {most:?} READs of {} pages, {levels} levels", report.pages());
        // Of a window, a search may have as many pages of each level on their way as fit, if in vain.
        let ahead = levels * scene.worker.window() as u64;
        let limits = [ahead, ahead, 4 * levels, 8 * levels];
        assert!(most.iter().zip(limits).all(|(&reads, limit)| reads <= limit), "{most:?} READs, not {limits:?}");
    });
}

/// A search waits for one page of each level, hardly more, if all pages that it asks for at a time fit the window; one after
/// the other, it waits for each.
#[test]
fn a_search_waits_as_often_as_there_are_levels() {
    let fabric = Arc::new(server::in_process(2, 32 << 20, MemOptions::default()).unwrap());
    let mut levels = 0;
    for window in [16, 4096, 1] {
        let options = ComputeOptions { window, ..ComputeOptions::default() };
        let compute = ComputeServer::join(fabric.clone(), options).unwrap();
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let mut rng = SmallRng::seed_from_u64(13);
            if levels == 0 {
                let tree = create::<2>(&worker).await.unwrap();
                let entries = (0..40_000).map(|number| (within_unit_square(&mut rng, 1e-3), number));
                tree.bulk_load(entries, 0.9).await.unwrap();
                levels = tree.check().await.unwrap().height() as u64;
            }
            let tree = RTree::<_, 2>::open(&worker, "model", Proof::Checksum).await.unwrap();
            tree.access().enter().await.unwrap();
            let (mut most, mut most_pages) = (0, 0);
            for number in 0..600 {
                let query = Query::Intersects(within_unit_square(&mut rng, [1e-4, 0.04, 0.2][number % 3]));
                let before = worker.counters();
                tree.count(query).await.unwrap();
                let Counters { reads: pages, round_trips, .. } = worker.counters() - before;
                if window == 1 {
                    assert_eq!(round_trips, pages, "{query:?}");
                } else if pages <= window as u64 {
                    assert!(round_trips <= levels + 2, "{round_trips} round trips for {pages} pages, {levels} levels");
                }
                (most, most_pages) = (most.max(round_trips), most_pages.max(pages));
            }
            println!(
                "a window of {window}: at most {most} round trips for at most {most_pages} pages, {levels} levels"
            );
            assert!(most_pages > 64, "the window of 16 has to be too small for some");
        });
    }
}

fn within_unit_square(rng: &mut SmallRng, edge: f64) -> Rect {
    let low = [rng.random_range(0.0..1.0), rng.random_range(0.0..1.0)];
    Rect::new(low, low.map(|at| at + rng.random_range(0.0..edge))).unwrap()
}

/// Nothing is cached below the pages above: what is below each of them is searched by its memory server, and an answer that is
/// too long for a message goes on where it ended.
#[test]
fn subtrees_are_searched_by_their_memory_servers() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = cluster::join(&fleet.fabric(), 0).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(11);
        let placement = StructurePlacement { policy: PlacementPolicy::Subtrees { level: 1 }, root: None };
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "spread", options).await.unwrap();
        let model: Vec<Entry> = (0..40_000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        made.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let structure = made.access().context().structure.clone();
        for (policies, ships) in [(Policies::new(Always), true), (Policies::new(Never), false)] {
            let mut options = CacheOptions::new(1 << 20);
            options.excludes_subtrees = true;
            let cache = ComputeCache::<Tree>::new(options).unwrap();
            let owned = cache.own(&worker, structure.clone(), Rect::EVERYTHING.into()).await.unwrap();
            let engine = Engine::new(owned, policies, EngineOptions::default()).unwrap();
            let tree = RTree::<_, 2>::over(engine.clone());
            let window = Query::Intersects(Rect::new([-15.0; 2], [15.0; 2]).unwrap());
            let expected: Vec<Entry> = model.iter().filter(|(rect, _)| window.matches(rect)).copied().collect();
            let before = fleet.servers.iter().map(ShipServer::counts).collect::<Vec<_>>();
            assert_eq!(tree.count(window).await.unwrap(), expected.len() as u64);
            assert_eq!(engine.counts().shipped > 0, ships);
            for (server, before) in fleet.servers.iter().zip(before) {
                assert_eq!(server.counts() != before, ships, "each memory server has a part of it");
            }
            assert_eq!(sorted(tree.search(window).all().await.unwrap()), sorted(expected));
            let coarse = RTree::over(Remote::new(&worker, structure.clone()).beside_owners());
            assert_eq!(coarse.search(window).all().await.unwrap().len() as u64, tree.count(window).await.unwrap());
        }
    });
}

/// Parts of one search are with their memory servers at the same time.
#[test]
fn subtrees_are_searched_in_parallel() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = cluster::join(&fleet.fabric(), 0).unwrap();
    let worker = compute.worker().unwrap();
    let mut rng = SmallRng::seed_from_u64(23);
    let placement = StructurePlacement { policy: PlacementPolicy::Subtrees { level: 1 }, root: None };
    let options = RTreeOptions { placement, ..RTreeOptions::default() };
    let made = worker.block_on(RTree::create(&worker, "spread", options)).unwrap();
    let entries = (0..20_000).map(|number| (a_rect(&mut rng, 1), number));
    worker.block_on(made.bulk_load(entries, 0.9)).unwrap();
    let (_owned, engine) = worker.block_on(sending(&worker, &made));
    let tree = RTree::<_, 2>::over(engine.clone());
    // Connections are opened, and pages above cached.
    assert_eq!(worker.block_on(tree.len()).unwrap(), 20_000);
    let (shipped_before, before) = (engine.counts().shipped, worker.counters());
    let (mut counting, mut most) = (Box::pin(tree.len()), 0);
    let found = loop {
        let sent = worker.counters().two_sided;
        let polled = counting.as_mut().poll(&mut task::Context::from_waker(task::Waker::noop()));
        worker.turn();
        most = most.max(worker.counters().two_sided - sent);
        if let task::Poll::Ready(found) = polled {
            break found.unwrap();
        }
    };
    let shipped = engine.counts().shipped - shipped_before;
    println!("{shipped} parts are shipped, {most} in one turn");
    assert_eq!(found, 20_000);
    assert!(most >= worker.window() as u64 / 2, "{shipped} parts are shipped, {most} in one turn");
    let trips = (worker.counters() - before).round_trips;
    assert!(trips < shipped / 2, "{shipped} parts are shipped, and waited for {trips} times, one after another");
}

/// The owner of a tree who has memory servers do what they can.
async fn sending(worker: &Worker, made: &RTree<OneSided<Tree>, 2>) -> (Cached<Tree>, Engine<Tree>) {
    let mut options = CacheOptions::new(1 << 20);
    options.excludes_subtrees = true;
    let cache = ComputeCache::<Tree>::new(options).unwrap();
    let structure = made.access().context().structure.clone();
    let owned = cache.own(worker, structure, Rect::EVERYTHING.into()).await.unwrap();
    let engine = Engine::new(owned.clone(), Policies::new(Always), EngineOptions::default()).unwrap();
    (owned, engine)
}

/// A leaf that has come to have few entries is condensed, wherever they were removed.
#[test]
fn what_memory_servers_remove_leaves_no_empty_pages() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = cluster::join(&fleet.fabric(), 0).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(12);
        let placement = StructurePlacement { policy: PlacementPolicy::Subtrees { level: 1 }, root: None };
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "spread", options).await.unwrap();
        let model: Vec<Entry> = (0..4000).map(|number| (within_unit_square(&mut rng, 1e-3), number)).collect();
        made.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let (owned, engine) = sending(&worker, &made).await;
        let tree = RTree::<_, 2>::over(engine.clone());
        for (rect, payload) in model {
            assert!(tree.delete(rect, payload).await.unwrap());
        }
        assert!(fleet.counts().done > 1000, "{:?}", fleet.counts());
        drop((tree, engine));
        owned.close().await.unwrap();
        clean(&made, 0).await.unwrap();
        assert_eq!(made.check().await.unwrap().pages(), 1, "an empty tree is its root");
    });
}

/// What an update takes away does not lie below where it puts it: no memory server could do both.
#[test]
fn no_update_is_sent_in_vain() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = ComputeServer::join(fleet.fabric(), ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(16);
        let placement = StructurePlacement { policy: PlacementPolicy::Subtrees { level: 1 }, root: None };
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "spread", options).await.unwrap();
        let model: Vec<Entry> = (0..4000).map(|number| (within_unit_square(&mut rng, 1e-3), number)).collect();
        made.bulk_load(model.iter().copied(), 0.5).await.unwrap();
        let (owned, engine) = sending(&worker, &made).await;
        let tree = RTree::<_, 2>::over(engine.clone());
        for (number, &(rect, payload)) in model.iter().take(500).enumerate() {
            assert!(tree.update(rect, payload, model[3999 - number].0).await.unwrap());
        }
        assert_eq!(engine.counts().came_back, 0, "{:?}", engine.counts());
        drop((tree, engine));
        owned.close().await.unwrap();
        clean(&made, 4000).await.unwrap();
    });
}

/// Ships every second operation.
#[derive(Debug)]
struct EverySecond(bool);

impl Policy for EverySecond {
    fn choose(&mut self, _: &Miss<'_>) -> Choice {
        self.0 = !self.0;
        if self.0 { Choice::SHIP } else { Choice::FETCH }
    }
}

/// Two compute servers do every second operation over inner pages that they cache: they, and a memory server for them, change
/// those behind each other's backs.
#[test]
fn operations_are_sent_or_done_over_cached_inner_pages() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(2, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let computes = [0, 1].map(|seed| cluster::join(&fleet.fabric(), seed).unwrap());
    let workers = [0, 1].map(|number: usize| computes[number].worker().unwrap());
    let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(0) };
    let options = RTreeOptions { placement, ..RTreeOptions::default() };
    let made = workers[0].block_on(RTree::<_, 2>::create(&workers[0], "both", options)).unwrap();
    let caches = [0, 1].map(|_| ComputeCache::<Tree>::new(CacheOptions::new(1 << 20)).unwrap());
    let trees = [0, 1].map(|number: usize| {
        let structure = made.access().context().structure.clone();
        let here = caches[number].share(&workers[number], structure.clone(), Proof::Checksum).unwrap();
        RTree::<_, 2>::over(Adaptive::new(here, &workers[number], structure, Policies::new(EverySecond(false))))
    });
    let seed = settings::seed("cached inner pages and memory servers");
    let (mut rng, mut model) = (SmallRng::seed_from_u64(seed), Vec::<Entry>::new());
    for turn in 0..24 {
        let (worker, tree) = (&workers[turn % 2], &trees[turn % 2]);
        worker.block_on(some(tree, &mut model, &mut rng, 60)).unwrap();
        let (worker, tree) = (&workers[1 - turn % 2], &trees[1 - turn % 2]);
        worker.block_on(same(tree, &model, &mut rng)).unwrap();
    }
    for (tree, worker) in trees.iter().zip(&workers) {
        let (shipped, cached) = (tree.access().counts().shipped, tree.access().here().counters().total().hits);
        println!("{shipped} operations shipped, {cached} hits, {:?}", worker.counters());
        assert!(shipped > 100 && cached > 100 && worker.counters().writes > 100, "{shipped} shipped, {cached} hits");
    }
    workers[0].block_on(clean(&made, model.len())).unwrap();
}

/// Where its answer is not on the inner levels, a search leaves the memory server of the root at the first leaf.
#[test]
fn a_search_over_a_hybrid_stops_at_the_first_leaf() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = cluster::join(&fleet.fabric(), 0).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(14);
        let placement = StructurePlacement { policy: PlacementPolicy::Leaves, root: None };
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "hybrid", options).await.unwrap();
        let model: Vec<Entry> = (0..3000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        made.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let inner: u64 = made.check().await.unwrap().pages_by_level[1..].iter().sum();
        let structure = made.access().context().structure.clone();
        let tree = RTree::<_, 2>::over(Hybrid::new(&worker, structure, Proof::Checksum));
        same(&tree, &model, &mut rng).await.unwrap();
        let before = fleet.counts();
        assert_eq!(tree.len().await.unwrap(), 3000);
        let read = fleet.counts().pages_read - before.pages_read;
        assert!(read <= inner, "{read} pages read, {inner} inner pages");
    });
}

/// The memory server of the root does not spare a search anything, so it is asked no more; an insert it does.
#[test]
fn a_search_over_a_hybrid_does_not_ask_in_vain_for_long() {
    let registry = Registry::new().with::<Tree>();
    let fleet = Fleet::start_of(3, 32 << 20, 1, FabricProfile::Fast, &registry).unwrap();
    let compute = ComputeServer::join(fleet.fabric(), ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(15);
        let placement = StructurePlacement { policy: PlacementPolicy::Leaves, root: None };
        let options = RTreeOptions { placement, ..RTreeOptions::default() };
        let made = RTree::create(&worker, "hybrid", options).await.unwrap();
        let mut model: Vec<Entry> = (0..3000).map(|number| (a_rect(&mut rng, 1), number)).collect();
        made.bulk_load(model.iter().copied(), 0.9).await.unwrap();
        let structure = made.access().context().structure.clone();
        let tree = RTree::<_, 2>::over(Hybrid::new(&worker, structure, Proof::Checksum));
        let before = worker.counters();
        for entry in &model[..1000] {
            let found = tree.search(Query::Intersects(entry.0)).all().await.unwrap();
            assert!(found.contains(entry), "{entry:?}");
        }
        let searches = worker.counters() - before;
        assert!(searches.two_sided <= 32, "{} messages of 1000 searches", searches.two_sided);
        let before = worker.counters();
        for number in 3000..3100 {
            let entry = (a_rect(&mut rng, 1), number);
            tree.insert(entry.0, entry.1).await.unwrap();
            model.push(entry);
        }
        let inserts = worker.counters() - before;
        assert!(inserts.two_sided >= 90, "{} messages of 100 inserts", inserts.two_sided);
        same(&tree, &model, &mut rng).await.unwrap();
    });
}
