//! Searches of a whole tree beside inserts of which each changes the root: they end, and soon.

use std::{cell::Cell, rc::Rc, sync::Arc};

use farlink_offload::{CacheOptions, ComputeCache, Engine, EngineOptions, Policies, policy::Never};
use farlink_runtime::{
    access::{Access, Plugin},
    compute::{ComputeOptions, ComputeServer, Maintenance},
    fabric::mem::MemOptions,
    operation::Run,
    server,
    worker::Worker,
};
use farlink_structures::rtree::{Query, RTree, Rect, Tree};
use farlink_tests::bounded::{self, Bound};

use crate::scene::create;

const ENTRIES: u64 = 20_000;
const WRITERS: usize = 3;
/// How many times more than alone a search may take.
const TIMES_MAX: u64 = 50;

fn point(x: u64) -> Rect {
    Rect::point([x as f64, 0.0]).unwrap()
}

/// Each of the entries that are there all the time is found once while others come to the right of all.
async fn finds_all(tree: &RTree<impl Run<Plugin = Tree>, 2>) {
    let count = tree.len().await.unwrap();
    assert!(count >= ENTRIES, "{count} are counted");
    let found = tree.search(Query::Intersects(Rect::EVERYTHING)).all().await.unwrap();
    let mut lasting: Vec<u64> = found.into_iter().map(|(_, payload)| payload).filter(|at| *at < ENTRIES).collect();
    lasting.sort_unstable();
    assert!(lasting.into_iter().eq(0..ENTRIES), "not each of them once");
}

fn ends_beside_inserts<A: Run<Plugin = Tree> + Clone + 'static>(worker: &Worker, tree: &RTree<A, 2>) {
    let before = worker.counters();
    bounded::block_on(worker, finds_all(tree));
    let reads = (worker.counters() - before).reads;
    let next = Rc::new(Cell::new(Some(ENTRIES)));
    let writers = (0..WRITERS).map(|_| {
        let (handle, writer, next) = ((**worker).clone(), tree.clone(), Rc::clone(&next));
        worker.spawn(async move {
            while let Some(number) = next.get() {
                next.set(Some(number + 1));
                writer.insert(point(number), number).await.unwrap();
                handle.yield_now().await;
            }
        })
    });
    let writers: Vec<_> = writers.collect();
    let reader = tree.clone();
    let bound = Bound { reads_max: (reads + 1000) * TIMES_MAX, turns_max: 2_000_000 };
    let ended = bounded::run(worker, bound, async move { finds_all(&reader).await });
    let inserted = next.take().unwrap_or_default() - ENTRIES;
    writers.into_iter().for_each(|writer| bounded::block_on(worker, writer));
    println!("{inserted} inserts meanwhile; {reads} READs alone; {:?}", worker.counters() - before);
    ended.unwrap_or_else(|endless| panic!("{endless}"));
}

/// Over the cache of an owner a link is followed from the page above as it is then, and the root is another one all the time.
#[test]
fn a_large_search_ends_while_entries_come_at_the_edge() {
    // One in which little has room, and one in which all has, and which is larger than the processor's.
    for cache_bytes in [128 << 10, 8 << 20] {
        let cluster = server::in_process(2, 64 << 20, MemOptions::default()).unwrap();
        let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
        let compute = ComputeServer::join(Arc::new(cluster), options).unwrap();
        let worker = bounded::worker(&compute).unwrap();
        let mut options = CacheOptions::new(cache_bytes);
        options.excludes_subtrees = true;
        let cache = ComputeCache::<Tree>::new(options).unwrap();
        let owned = bounded::block_on(&worker, async {
            let made = create::<2>(&worker).await.unwrap();
            made.bulk_load((0..ENTRIES).map(|at| (point(at), at)), 0.9).await.unwrap();
            let structure = made.access().context().structure.clone();
            cache.own(&worker, structure, <Tree as Plugin>::Region::from(Rect::EVERYTHING)).await.unwrap()
        });
        let engine = Engine::new(owned.clone(), Policies::new(Never), EngineOptions::default()).unwrap();
        ends_beside_inserts(&worker, &RTree::over(owned));
        ends_beside_inserts(&worker, &RTree::over(engine));
    }
}
