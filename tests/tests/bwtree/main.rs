//! The Bw-tree: what stops in the middle of a change harms nobody, and what a write costs.

mod faults;
mod half_done;
mod leaks;
mod long_chains;
mod plants;

use std::{
    collections::BTreeMap,
    future::Future,
    rc::Rc,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use farlink_offload::{CachedMapping, MappingCache};
use farlink_runtime::{
    access::Access,
    compute::ComputeServer,
    error::Error,
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    structure::StructurePlacement,
    worker::{Handle, Worker},
};
use farlink_structures::bwtree::{Bw, BwTree, BwTreeOptions, CONSOLIDATIONS};
use farlink_tests::{
    bounded::{self, Bound, Watchdog},
    cluster::{self, FAST},
    fleet::Fleet,
    settings,
};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

const NAME: &str = "tree";
const KEYS: u64 = 120;
/// Pages that a process can lose: where the root is lowered, those of two chains are unlinked by one swap, and then freed.
const LOST_MAX: usize = 16;
/// More than any of these operations takes, also with help for others.
const ENDLESS: Bound = Bound { reads_max: 100_000, turns_max: 1_000_000 };

/// A cluster with an empty tree of pages of 11 entries.
struct Scene {
    fabric: Arc<dyn Fabric>,
    _fleet: Fleet,
}

type Tree = BwTree<OneSided<Bw>>;

impl Scene {
    fn new() -> Self {
        Self::with_chain(4)
    }

    fn with_chain(chain: u8) -> Self {
        let fleet = Fleet::start(2, 4 << 20, 1, FAST).unwrap();
        let scene = Self { fabric: fleet.fabric(), _fleet: fleet };
        let (worker, compute) = scene.join(1);
        let options = BwTreeOptions { page_bytes: 256, chain, placement: StructurePlacement::default() };
        worker.block_on(BwTree::create(&worker, NAME, options)).unwrap();
        drop((worker, compute));
        scene
    }

    fn join(&self, seed: u64) -> (Worker, ComputeServer) {
        let compute = cluster::join_manual(&self.fabric, seed).unwrap();
        (compute.worker().unwrap(), compute)
    }
}

async fn open(worker: &Handle) -> Result<Tree, Error> {
    BwTree::open(worker, NAME, Proof::Checksum).await
}

/// All keys are put in ascending order, and then removed in another one.
fn operation(number: u64) -> (u64, bool) {
    if number < KEYS { (number * 10, true) } else { ((number - KEYS) * 7 % KEYS * 10, false) }
}

async fn operate<A: Access<Plugin = Bw>>(tree: &BwTree<A>, number: u64) -> Result<(), Error> {
    match operation(number) {
        (key, true) => tree.insert(key, key + 1).await.map(drop),
        (key, false) => tree.remove(key).await.map(drop),
    }
}

fn model(numbers: impl Iterator<Item = u64>) -> BTreeMap<u64, u64> {
    let mut model = BTreeMap::new();
    for (key, puts) in numbers.map(operation) {
        match puts {
            true => model.insert(key, key + 1),
            false => model.remove(&key),
        };
    }
    model
}

/// The operations that make a new base, split, or merge: the first one of each kind, and some of those that do the most at once.
fn interesting() -> Vec<u64> {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    let mut all = Vec::new();
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        for number in 0..2 * KEYS {
            let before = worker.counters();
            operate(&tree, number).await.unwrap();
            let cost = worker.counters() - before;
            all.push((number, cost.splits, cost.merges, cost.atomics));
        }
    });
    type Cost = (u64, u64, u64, u64);
    let some = |kind: fn(&Cost) -> bool, count: usize| {
        let mut of_kind: Vec<_> = all.iter().copied().filter(kind).collect();
        let first = of_kind.first().copied();
        of_kind.sort_by_key(|it| std::cmp::Reverse(it.3));
        of_kind.into_iter().take(count).chain(first).map(|it| it.0).collect::<Vec<_>>()
    };
    let mut chosen = vec![5, KEYS + 2];
    chosen.extend(some(|it| it.1 > 0, 2));
    chosen.extend(some(|it| it.2 > 0, 2));
    chosen.extend(all.iter().rfind(|it| it.2 > 0).map(|it| it.0));
    chosen.sort_unstable();
    chosen.dedup();
    assert!(all.iter().any(|it| it.1 > 1 && it.0 > 20) && all.iter().any(|it| it.2 > 1), "nothing cascades: {all:?}");
    chosen
}

/// A process stops for good behind each turn of its worker during a split, a merge, a new base. Others see no key come or go,
/// change all of it, and wait for nothing; what is lost are pages that nothing leads to. It is one turn in `FARLINK_STOPS_EVERY`,
/// others in each run.
#[test]
fn a_process_that_stops_anywhere_harms_nobody() {
    let _watch = Watchdog::start("a process stops", Duration::from_secs(100));
    let every: usize = settings::from_env("FARLINK_STOPS_EVERY", 5).max(1);
    let first = SmallRng::seed_from_u64(settings::seed("a process stops")).random_range(0..every);
    let mut stops = 0;
    for number in interesting() {
        for turns in (first..).step_by(every) {
            let scene = Scene::new();
            let (worker, compute) = scene.join(2);
            let tree = worker.block_on(async {
                let tree = open(&worker).await?;
                for number in 0..number {
                    operate(&tree, number).await?;
                }
                Ok::<_, Error>(tree)
            });
            let tree = tree.unwrap();
            let mut task = Box::pin(worker.spawn(async move { operate(&tree, number).await.unwrap() }));
            for _ in 0..turns {
                bounded::turn(&worker);
            }
            let has_ended = task.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            // Nothing of it is dropped, so nothing is taken back or ended.
            std::mem::forget((task, worker, compute));
            stops += 1;
            survive(&scene, number, &format!("operation {number} stops behind turn {turns}"));
            if has_ended {
                break;
            }
        }
    }
    println!("{stops} places to stop");
    assert!(stops > 200 / every, "{stops} places to stop");
}

/// Others go on where operation `number` has stopped.
fn survive(scene: &Scene, number: u64, context: &str) {
    let (worker, compute) = scene.join(3);
    let (before, after, key) = (model(0..number), model(0..=number), operation(number).0);
    let name = context.to_string();
    let handle: Handle = (*worker).clone();
    let others = async move {
        let tree = open(&handle).await.unwrap();
        let seen: BTreeMap<u64, u64> = tree.range(..).take(usize::MAX).await.unwrap().into_iter().collect();
        assert!(seen == before || seen == after, "{name}: {seen:?}");
        let mut down = tree.range(..).descending().take(usize::MAX).await.unwrap();
        down.reverse();
        assert_eq!(down, seen.iter().map(|(&key, &value)| (key, value)).collect::<Vec<_>>(), "{name}: downwards");
        for key in (0..KEYS).map(|key| key * 10) {
            assert_eq!(tree.get(key).await.unwrap(), seen.get(&key).copied(), "{name}: key {key}");
        }
        // Every page is changed, so whatever was begun is finished.
        for key in (0..KEYS).map(|key| key * 10) {
            let found = tree.upsert(key, 7).await.unwrap();
            assert_eq!(found, seen.get(&key).copied(), "{name}: key {key} is put");
        }
        for key in (0..KEYS).map(|key| key * 10) {
            assert_eq!(tree.remove(key).await.unwrap(), Some(7), "{name}: key {key} is removed");
        }
        assert!(tree.insert(key, 8).await.unwrap());
        let report = tree.check().await.unwrap();
        assert_eq!((report.problem_count, report.entries), (0, 1), "{name}: {report:?}");
        assert!(
            report.audit.leaked.len() <= LOST_MAX && report.audit.reached_but_free.is_empty(),
            "{name}: {report:?}"
        );
    };
    bounded::run(&worker, ENDLESS, others).unwrap_or_else(|endless| panic!("{context}: {endless}"));
    // To leave is to wait for those that are pinned.
    std::mem::forget((worker, compute));
}

/// A put is one WRITE, of its delta, and one compare-and-swap, in one round trip. All that new bases add to it is spread over as many
/// puts as a chain has deltas, and nobody waits for it.
#[test]
fn a_put_is_one_swap_in_one_round_trip() {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(4);
    let begun = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        for key in 0..5 {
            tree.upsert(key, key).await.unwrap();
        }
        let begun = worker.counters();
        for round in 0..100 {
            let before = worker.counters();
            tree.upsert(round % 5, round).await.unwrap();
            let cost = worker.counters() - before;
            // What is read is its word, the newest delta, if there is one, and the base page, and where the newest cannot say all again, one
            // more.
            assert!(cost.round_trips == cost.reads + 1 && (2..=4).contains(&cost.reads), "{cost:?}");
        }
        begun
    });
    // What is freed in the background.
    for _ in 0..100 {
        bounded::turn(&worker);
    }
    let all = worker.counters() - begun;
    assert_eq!((all.atomics, all.named.get(CONSOLIDATIONS)), (100, 20), "four puts of five are a delta");
    // The record of each, and a word for each record that is free with a new base.
    assert_eq!(all.writes, 100 + 20 * 5);
}

/// Where nothing is cached, a lookup reads a word on each level and the page's base, and one delta if there are up to three.
#[test]
fn a_lookup_without_a_cache_reads_a_word_and_a_chain_a_level() {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(8);
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        tree.bulk_load((0..KEYS).map(|key| (key, key)), 0.9).await.unwrap();
        let height = tree.check().await.unwrap().height() as u64;
        assert!(height > 2);
        // What is known of the mapping table afterwards.
        tree.get(7).await.unwrap();
        for deltas in 0..=4 {
            let before = worker.counters();
            assert_eq!(tree.get(7).await.unwrap(), Some(7 + deltas));
            let cost = worker.counters() - before;
            // The fourth does not say all again.
            let more = [0, 1, 1, 1, 2][deltas as usize];
            assert_eq!((cost.round_trips, cost.reads), (2 * height + more, 2 * height + more), "{deltas} deltas");
            tree.upsert(7, 7 + deltas + 1).await.unwrap();
        }
    });
}

/// Over the mapping cache a lookup is one READ of 8 bytes if nothing has changed, and a READ of 64 bytes more for a delta that is
/// new, or of 128 bytes for one that says again what one or two others have said; a put reads nothing: it is one round trip, with
/// its WRITE and its swap.
#[test]
fn a_lookup_over_the_mapping_cache_reads_a_word_and_what_is_new() {
    let scene = Scene::new();
    let ((worker, _compute), (other, _other_compute)) = (scene.join(5), scene.join(6));
    let theirs = other.block_on(open(&other)).unwrap();
    for key in 0..KEYS {
        other.block_on(theirs.insert(key * 10, key)).unwrap();
    }
    let cache = MappingCache::<Bw>::new(1 << 20);
    let ours: BwTree<CachedMapping<Bw>> = BwTree::over(cache.share(&worker, theirs.structure().clone()));
    let cost = |run: &dyn Fn()| {
        let before = worker.counters();
        run();
        let it = worker.counters() - before;
        (it.round_trips, it.reads, it.bytes, it.writes, it.atomics)
    };
    let get = |key: u64, value: u64| assert_eq!(worker.block_on(ours.get(key)).unwrap(), Some(value));
    (0..KEYS).for_each(|key| get(key * 10, key));
    for key in 0..KEYS {
        assert_eq!(cost(&|| get(key * 10, key)), (1, 1, 8, 0, 0), "key {key}: nothing has changed");
    }
    // A new base of the page of key 500, which the cache then has.
    let consolidates = |value: u64| {
        let before = other.counters();
        other.block_on(theirs.upsert(500, value)).unwrap();
        (other.counters() - before).named.get(CONSOLIDATIONS) > 0
    };
    for (new, bytes) in [(1, 64), (2, 128), (3, 128)] {
        while !consolidates(0) {}
        get(500, 0);
        (1..=new).for_each(|value| assert!(!consolidates(value), "it is a delta"));
        // The newest says again what is below it on the base page.
        assert_eq!(cost(&|| get(500, new)), (2, 2, 8 + bytes, 0, 0), "{new} new deltas");
        assert_eq!(cost(&|| get(500, new)), (1, 1, 8, 0, 0));
    }
    // The first change enters it into the partition map, and fetches pages to allocate from.
    (0..10).for_each(|value| assert!(worker.block_on(ours.upsert(500, value)).unwrap().is_some()));
    while !consolidates(0) {}
    get(500, 0);
    for value in 1..=4 {
        let put = cost(&|| assert_eq!(worker.block_on(ours.upsert(500, value)).unwrap(), Some(value - 1)));
        assert_eq!((put.0, put.1, put.3, put.4), (1, 0, 1, 1), "a put writes and swaps, and reads nothing");
    }
    let base = cost(&|| assert_eq!(worker.block_on(ours.upsert(500, 8)).unwrap(), Some(4)));
    assert_eq!((base.0, base.1, base.4), (1, 0, 1), "nor does one that makes a new base");
    // Of two who put into a page that they remember, one learns from the lost swap what the word is.
    worker.block_on(ours.upsert(500, 9)).unwrap();
    assert!(!consolidates(7));
    let lost = cost(&|| assert_eq!(worker.block_on(ours.upsert(500, 9)).unwrap(), Some(7)));
    assert_eq!((lost.0, lost.1, lost.4), (3, 1, 2), "it reads the delta that is new");
    // What puts nothing reads the word.
    assert_eq!(cost(&|| assert!(!worker.block_on(ours.insert(500, 1)).unwrap())), (1, 1, 8, 0, 0));
    assert_eq!(cost(&|| get(500, 9)), (1, 1, 8, 0, 0), "what it has put itself it need not read");
    assert_eq!(cost(&|| get(510, 51)), (1, 1, 8, 0, 0));
    assert!(cache.used() <= cache.limit());
    // Pages are split, and then merged, behind what the cache has of the pages above.
    for key in 0..KEYS * 10 {
        other.block_on(theirs.upsert(key, key + 1)).unwrap();
    }
    (0..KEYS * 10).for_each(|key| get(key, key + 1));
    for key in (0..KEYS * 10).filter(|key| key % 50 != 0) {
        other.block_on(theirs.remove(key)).unwrap();
    }
    for key in 0..KEYS * 10 {
        let expected = (key % 50 == 0).then_some(key + 1);
        assert_eq!(worker.block_on(ours.get(key)).unwrap(), expected, "key {key}");
    }
}

/// What one worker has under way for one page swaps one after another, and each swap succeeds; who is given up is in nobody's way.
#[test]
fn puts_of_one_worker_take_turns() {
    const PUTS: u64 = 16;
    let scene = Scene::new();
    let (worker, _compute) = scene.join(7);
    let tree = worker.block_on(open(&worker)).unwrap();
    let cache = MappingCache::<Bw>::new(1 << 20);
    let ours: [Rc<BwTree<CachedMapping<Bw>>>; 2] =
        std::array::from_fn(|_| Rc::new(BwTree::over(cache.share(&worker, tree.structure().clone()))));
    let put = |key: u64, value: u64| {
        let ours = Rc::clone(&ours[key as usize % 2]);
        async move { ours.upsert(key, value).await.unwrap() }
    };
    (0..PUTS).for_each(|key| assert!(worker.block_on(tree.insert(key, 0)).unwrap()));
    // The first two rounds fetch pages to allocate from.
    let [.., it] = [1, 2, 3].map(|value| {
        let before = worker.counters();
        let puts: Vec<_> = (0..PUTS).map(|key| worker.spawn(put(key, value))).collect();
        puts.into_iter().for_each(|put| assert_eq!(worker.block_on(put), Some(value - 1)));
        worker.counters() - before
    });
    assert_eq!((it.atomics, it.reads, it.lock_conflicts), (PUTS, 0, 0));
    let mut puts: Vec<_> = (0..PUTS).map(|key| Box::pin(put(key, 4))).collect();
    let mut context = Context::from_waker(Waker::noop());
    assert!(puts.iter_mut().all(|put| put.as_mut().poll(&mut context).is_pending()));
    // The one whose turn it is, and some that wait.
    puts.drain(..PUTS as usize / 2).for_each(drop);
    puts.into_iter().for_each(|put| assert_eq!(worker.block_on(put), Some(3)));
    assert!(worker.block_on(tree.check()).unwrap().is_clean());
}
