//! Several threads, each with several tasks, on one tree in a cache of a few percent of it. The store watches: no two writes
//! of a page at once, no read during a write, no swizzled link.

use std::{cell::Cell, collections::BTreeMap, rc::Rc, sync::Arc};

use crate::support::*;
use farlink_cache::{Admission, CacheError, Counters, PageCache};

const THREADS: usize = 4;
const TASKS: usize = 4;
/// Keys that everybody counts up.
const SHARED: u64 = 64;
const KEYS: u64 = under_miri(30_000, 4000);

/// What a task knows of its own keys; those that it has not touched are 0.
type Known = BTreeMap<u64, Option<u64>>;

#[derive(Debug, Clone, Copy)]
struct Plan {
    admission: Admission,
    page_bytes: usize,
    rounds: u64,
    fail_percent: u64,
    /// Whether inserts and removes change the tree's shape.
    reshapes: bool,
    seed: u64,
}

/// Retries what the store refused, or what found no room because of that.
macro_rules! persist {
    ($plan:expr, $attempt:expr) => {
        loop {
            match $attempt.await {
                Ok(value) => break value,
                Err(CacheError::Store { .. } | CacheError::NoRoom { .. }) if $plan.fail_percent != 0 => pause(1).await,
                Err(error) => panic!("{error}"),
            }
        }
    };
}

/// Keys from `first` on, `stride` apart, are this task's own; it knows what they are.
async fn task(tree: Tree, plan: Plan, number: u64, added: Rc<Cell<u64>>) -> Known {
    let all = (THREADS * TASKS) as u64;
    let mut random = Random(plan.seed ^ number << 40);
    let mut own: Known = BTreeMap::new();
    let mut seen = vec![0; SHARED as usize];
    for _ in 0..plan.rounds {
        let key = SHARED + random.below((KEYS - SHARED) / all) * all + number;
        match random.below(10) {
            // Shared counters never go back, whoever looks.
            0 | 1 => {
                let key = random.below(SHARED);
                let value = persist!(plan, tree.get(key * 101)).expect("a counter is never removed");
                assert!(value >= seen[key as usize], "counter {key} went back from {} to {value}", seen[key as usize]);
                seen[key as usize] = value;
            }
            2 | 3 => {
                let key = random.below(SHARED);
                let before = persist!(plan, tree.update(key * 101, |value| value.unwrap() + 1)).unwrap();
                assert!(before >= seen[key as usize], "counter {key} went back to {before}");
                seen[key as usize] = before + 1;
                added.set(added.get() + 1);
            }
            4..=6 => {
                let value = persist!(plan, tree.get(own_key(key)));
                let known = own.get(&key).copied().unwrap_or(Some(0));
                assert_eq!(value, known, "key {key} of task {number}");
            }
            7 | 8 => {
                let before = persist!(plan, tree.update(own_key(key), |value| value.unwrap_or(0) + 1));
                let known = own.insert(key, Some(before.unwrap_or(0) + 1)).unwrap_or(Some(0));
                assert_eq!(before, known, "key {key} of task {number}");
            }
            // A block of keys goes or comes: merges and splits.
            _ if plan.reshapes => {
                let is_there = own.get(&key).copied().unwrap_or(Some(0)).is_some();
                for key in (0..20).map(|at| key + at * all).filter(|&key| key < KEYS) {
                    let known = own.get(&key).copied().unwrap_or(Some(0));
                    let before = match is_there {
                        true => persist!(plan, tree.remove(own_key(key))),
                        false => persist!(plan, tree.update(own_key(key), |_| 7)),
                    };
                    assert_eq!(before, known, "key {key} of task {number}");
                    own.insert(key, (!is_there).then_some(7));
                }
            }
            _ => {}
        }
        // A cancelled operation does no harm.
        if random.below(16) == 0 {
            let mut abandoned = Box::pin(tree.get(own_key(key)));
            let turns = random.below(3);
            for _ in 0..turns {
                let done = std::future::poll_fn(|cx| std::task::Poll::Ready(abandoned.as_mut().poll(cx))).await;
                if done.is_ready() {
                    break;
                }
                pause(1).await;
            }
        }
    }
    own
}

/// Own keys lie between the counters.
const fn own_key(key: u64) -> u64 {
    key * 101 + 1
}

fn run(plan: Plan) {
    println!("{plan:?}");
    let class = class(plan.page_bytes);
    let mut keys: BTreeMap<u64, u64> = (SHARED..KEYS).map(|key| (own_key(key), 0)).collect();
    keys.extend((0..SHARED).map(|key| (key * 101, 0)));
    let (world, next_id) = planted(keys.clone().into_iter(), class);
    let tree_bytes = lock(&world).pages.len() * plan.page_bytes;
    {
        let mut world = lock(&world);
        (world.pending_max, world.fail_percent) = (3, plan.fail_percent);
    }
    let options = small(plan.page_bytes, plan.admission);
    assert!(options.bytes < tree_bytes / under_miri(10, 1) as usize, "a cache of a few percent of {tree_bytes}");
    let cache = PageCache::new(TreeLayout, options).unwrap();
    let fleet = Fleet::new(THREADS);
    let results: Vec<(u64, Vec<Known>)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (cache, world, next_id, fleet) = (&cache, &world, &next_id, &fleet);
                scope.spawn(move || {
                    let _member = fleet.member();
                    let executor = Executor::new(Arc::clone(fleet), thread, plan.seed);
                    let store = MapStore::new(world, &executor);
                    let handle = cache.handle(store, plan.seed + thread as u64).unwrap();
                    let (next_id, opener) = (Arc::clone(next_id), handle.clone());
                    let tree = executor.block_on(async move {
                        persist!(plan, Tree::open(opener.clone(), class, Arc::clone(&next_id)))
                    });
                    let added = Rc::new(Cell::new(0));
                    let owns = Rc::new(std::cell::RefCell::new(Vec::new()));
                    for at in 0..TASKS {
                        let (tree, added, owns) = (tree.clone(), Rc::clone(&added), Rc::clone(&owns));
                        executor.spawn(async move {
                            let own = task(tree, plan, (thread * TASKS + at) as u64, added).await;
                            owns.borrow_mut().push(own);
                        });
                    }
                    executor.run();
                    assert_eq!(handle.counters().levels[0].hits > 0, plan.rounds > 0);
                    (added.get(), owns.take())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread's report is above")).collect()
    });
    let memory = cache.memory();
    assert!(memory.used() <= memory.limit, "{memory:?}");
    lock(&world).fail_percent = 0;
    let executor = Executor::alone(plan.seed);
    let handle = cache.handle(MapStore::new(&world, &executor), 99).unwrap();
    executor.block_on(async move { handle.flush().await }).unwrap();
    let added: u64 = results.iter().map(|(added, _)| added).sum();
    for (key, value) in results.into_iter().flat_map(|(_, owns)| owns).flatten() {
        match value {
            Some(value) => keys.insert(own_key(key), value),
            None => keys.remove(&own_key(key)),
        };
    }
    let mut found = harvest(&lock(&world));
    let counted: u64 = (0..SHARED).map(|key| found.remove(&(key * 101)).expect("a counter")).sum();
    assert_eq!(counted, added, "counts that were acknowledged");
    keys.retain(|key, _| key % 101 != 0);
    assert!(found == keys, "the store differs from what was acknowledged");
    let counters: Counters = cache.counters();
    println!("{:?}\nwrite errors {}", counters.total(), counters.write_errors);
    assert!(counters.total().evictions + counters.total().refusals > 0 && counters.total().write_backs > 0);
}

fn plan(admission: Admission) -> Plan {
    let seed = seed(1) + ADMISSIONS.iter().position(|&other| other == admission).unwrap() as u64;
    Plan { admission, page_bytes: 256, rounds: under_miri(800, 20), fail_percent: 0, reshapes: false, seed }
}

#[test]
fn acknowledged_updates_stay() {
    ADMISSIONS.into_iter().for_each(|admission| run(plan(admission)));
}

#[test]
fn acknowledged_updates_stay_while_pages_split_and_merge() {
    ADMISSIONS.into_iter().for_each(|admission| run(Plan { reshapes: true, ..plan(admission) }));
}

#[test]
fn acknowledged_updates_stay_with_few_large_pages() {
    ADMISSIONS.into_iter().for_each(|admission| run(Plan { page_bytes: 1024, reshapes: true, ..plan(admission) }));
}

#[test]
fn acknowledged_updates_stay_on_a_failing_store() {
    ADMISSIONS.into_iter().for_each(|admission| {
        run(Plan { rounds: under_miri(200, 10), fail_percent: 5, reshapes: true, ..plan(admission) })
    });
}
