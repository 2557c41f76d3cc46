//! Pages that are excluded while the store's copies are changed, as a memory server would that carries out an operation there:
//! nothing is lost, whoever else works on the same pages through the cache, by whatever way.

use std::{
    cell::Cell,
    collections::BTreeMap,
    rc::Rc,
    sync::{Arc, atomic::AtomicU64},
};

use crate::support::page::{HEAD, HIGH, LOW, View, value_at};
use crate::support::*;
use farlink_cache::{Admission, CacheError, CacheOptions, Conflict, ExclusionGuard, Page, PageCache, PageId};

const THREADS: usize = 3;
const TASKS: usize = 4;
const KEYS: u64 = under_miri(20_000, 3000);
/// Keys that are worked on: all over the tree, and few.
const HOT: u64 = under_miri(300, 40);

#[derive(Debug, Clone, Copy)]
struct Plan {
    admission: Admission,
    page_bytes: usize,
    rounds: u64,
    /// Whether pages split and merge. Else, pages are also looked up by their ids: they come without a link.
    reshapes: bool,
    seed: u64,
}

#[derive(Debug, Default)]
struct Counts {
    added: Cell<u64>,
    shipped: Cell<u64>,
    refused: Cell<u64>,
    unlinked: Cell<u64>,
}

fn bump(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

const fn key_of(number: u64) -> u64 {
    number * (KEYS / HOT)
}

/// What a descent through the cache has come to.
enum Found {
    Value(u64),
    Shipped(u64),
}

/// Adds `by` to a key's value: where it is cached in the cache, else in the store, from the first page on that is not cached.
/// Returns what the value was.
async fn add(tree: &Tree, key: u64, by: u64, counts: &Counts) -> u64 {
    loop {
        match try_add(tree, key, by, counts).await {
            Ok(Found::Value(value)) => return value,
            Ok(Found::Shipped(value)) => {
                bump(&counts.shipped);
                return value;
            }
            Err(CacheError::Conflict(_)) => pause(1).await,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn try_add(tree: &Tree, key: u64, by: u64, counts: &Counts) -> Result<Found, Error> {
    let mut page = tree.enter()?;
    loop {
        let (link, level, low, high) = page.read(|words| {
            let (view, covers) = (View(words), View(words).covers(key));
            if !covers || view.level() == 0 || view.count() == 0 {
                return (0, view.level(), 0, u64::from(covers));
            }
            let child = view.child(key);
            let high = if child + 1 < view.count() { view.key(child + 1) } else { view.word(HIGH) };
            (view.value(child), view.level(), view.key(child), high)
        })?;
        if link == 0 {
            if level != 0 || high == 0 {
                return Err(Conflict::Changed.into());
            }
            return Ok(Found::Value(add_here(tree, &page, key, by)?));
        }
        let is_below = move |words: &[AtomicU64]| {
            let view = View(words);
            view.level() + 1 < level && view.word(LOW) < high && low < view.word(HIGH)
        };
        if let Some(guard) = tree.handle.exclude(&page, link, tree.class, is_below).await? {
            let (leaf, before) = serve(tree.handle.store(), guard.page().get(), key, by).await;
            if let Some(leaf) = leaf {
                guard.drop_changed(PageId::new(leaf).unwrap()).await;
            } else {
                guard.drop_all().await;
            }
            return Ok(Found::Shipped(before));
        }
        bump(&counts.refused);
        page = tree.handle.follow(&page, link, tree.class).await?;
    }
}

fn add_here(tree: &Tree, leaf: &Page<'_, MapStore, TreeLayout>, key: u64, by: u64) -> Result<u64, Error> {
    let added = tree.handle.update(leaf, |change| {
        let view = View(change.words(0));
        let entry = view.find(key).ok().filter(|_| view.level() == 0 && view.covers(key))?;
        let value = view.value(entry);
        change.set(0, value_at(entry), value + by);
        Some(value)
    })?;
    added.ok_or(Conflict::Changed.into())
}

/// What a memory server does: adds to a key's value in the store, with others published before, in between and after. Returns the
/// page that it has changed, if it says so, and what the value was.
async fn serve(store: &MapStore, from: u64, key: u64, by: u64) -> (Option<u64>, u64) {
    pause(by % 3).await;
    let mut at = from;
    loop {
        let image = store.world().pages[&at].clone();
        assert!(image[LOW] <= key && key < image[HIGH], "page {at} does not hold key {key}");
        let entries: Vec<(u64, u64)> = Image(&image).entries().collect();
        if image[HEAD] as u8 != 0 {
            at = entries.iter().rev().find(|entry| entry.0 <= key).unwrap_or(&entries[0]).1;
            pause(1).await;
            continue;
        }
        let entry = entries.iter().position(|entry| entry.0 == key).expect("no key is removed");
        pause(1).await;
        {
            let mut world = store.world();
            let page = world.pages.get_mut(&at).unwrap();
            assert_eq!(*page, image, "page {at} was written meanwhile");
            page[value_at(entry)] += by;
        }
        pause(by % 5).await;
        return ((!by.is_multiple_of(7)).then_some(at), entries[entry].1);
    }
}

async fn task(tree: Tree, plan: Plan, number: u64, counts: Rc<Counts>) {
    let mut random = Random(plan.seed ^ number << 40);
    let mut seen: BTreeMap<u64, u64> = BTreeMap::new();
    for _ in 0..plan.rounds {
        let number = random.below(HOT);
        let (key, by) = (key_of(number), 1 + random.below(20));
        let least = seen.get(&number).copied().unwrap_or(0);
        let value = match random.below(10) {
            0..=4 => add(&tree, key, by, &counts).await + counts_in(&counts, by),
            5 => tree.get(key).await.unwrap().expect("no key is removed"),
            6 | 7 => tree.update(key, |value| value.unwrap() + by).await.unwrap().unwrap() + counts_in(&counts, by),
            // Keys besides come or go: pages split and merge.
            _ if plan.reshapes => {
                for other in (1..20).map(|at| key + at) {
                    match number % 2 {
                        0 => drop(tree.update(other, |_| 0).await.unwrap()),
                        _ => drop(tree.remove(other).await.unwrap()),
                    }
                }
                least
            }
            // By its id: there is no link to it then.
            _ => {
                let leaf = tree.path(key).await.ok().map(|path| path.last().unwrap().id());
                let Some(leaf) = leaf else { continue };
                pause(random.below(4)).await;
                let Ok(page) = tree.handle.load(leaf, tree.class).await else { continue };
                pause(random.below(4)).await;
                let Ok(before) = add_here(&tree, &page, key, by) else { continue };
                bump(&counts.unlinked);
                before + counts_in(&counts, by)
            }
        };
        assert!(value >= least, "key {key} went back from {least} to {value}");
        seen.insert(number, value);
    }
}

/// Counts what was added, and returns it.
fn counts_in(counts: &Counts, by: u64) -> u64 {
    counts.added.set(counts.added.get() + by);
    by
}

fn options(plan: Plan) -> CacheOptions {
    let mut options = small(plan.page_bytes, plan.admission);
    options.excludes_subtrees = true;
    options
}

fn run(plan: Plan) {
    println!("{plan:?}");
    let class = class(plan.page_bytes);
    let (world, next_id) = planted((0..KEYS).map(|key| (key, 0)), class);
    lock(&world).pending_max = 3;
    let cache = PageCache::new(TreeLayout, options(plan)).unwrap();
    let fleet = Fleet::new(THREADS);
    let results: Vec<[u64; 4]> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (cache, world, next_id, fleet) = (&cache, &world, &next_id, &fleet);
                scope.spawn(move || {
                    let _member = fleet.member();
                    let executor = Executor::new(Arc::clone(fleet), thread, plan.seed);
                    let handle = cache.handle(MapStore::new(world, &executor), plan.seed + thread as u64).unwrap();
                    let next_id = Arc::clone(next_id);
                    let tree = executor.block_on(Tree::open(handle, class, next_id)).unwrap();
                    let counts = Rc::new(Counts::default());
                    for at in 0..TASKS {
                        executor.spawn(task(tree.clone(), plan, (thread * TASKS + at) as u64, Rc::clone(&counts)));
                    }
                    executor.run();
                    let Counts { added, shipped, refused, unlinked } = &*counts;
                    [added.get(), shipped.get(), refused.get(), unlinked.get()]
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread's report is above")).collect()
    });
    let [added, shipped, refused, unlinked] =
        [0, 1, 2, 3].map(|at| results.iter().map(|counts| counts[at]).sum::<u64>());
    let executor = Executor::alone(plan.seed);
    let handle = cache.handle(MapStore::new(&world, &executor), 99).unwrap();
    executor.block_on(async move { handle.flush().await }).unwrap();
    let found = harvest(&lock(&world));
    println!("{shipped} shipped, {refused} not kept out, {unlinked} through no link");
    assert_eq!(found.values().sum::<u64>(), added, "sums that were acknowledged");
    assert!(
        shipped > plan.rounds / 10 && (plan.reshapes || unlinked > 0),
        "{shipped} shipped, {unlinked} through no link"
    );
    // Everything is published again.
    let tree_keys = executor.block_on({
        let handle = cache.handle(MapStore::new(&world, &executor), 98).unwrap();
        async move {
            let tree = Tree::open(handle, class, Arc::new(AtomicU64::new(1 << 40))).await.unwrap();
            let mut sum = 0;
            for number in 0..HOT {
                sum += tree.get(key_of(number)).await.unwrap().unwrap();
            }
            sum
        }
    });
    assert_eq!(tree_keys, added);
}

fn plan(admission: Admission) -> Plan {
    let seed = seed(1) + ADMISSIONS.iter().position(|&other| other == admission).unwrap() as u64;
    Plan { admission, page_bytes: 256, rounds: under_miri(600, 20), reshapes: false, seed }
}

#[test]
fn nothing_is_lost_between_the_cache_and_the_store() {
    ADMISSIONS.into_iter().for_each(|admission| run(plan(admission)));
}

#[test]
fn nothing_is_lost_while_pages_split_and_merge() {
    ADMISSIONS.into_iter().for_each(|admission| run(Plan { reshapes: true, ..plan(admission) }));
}

#[test]
fn nothing_is_lost_with_few_large_pages() {
    ADMISSIONS.into_iter().for_each(|admission| run(Plan { page_bytes: 1024, ..plan(admission) }));
}

fn test_bed() -> TestBed {
    let mut options = small(256, Admission::Always);
    options.excludes_subtrees = true;
    TestBed::new((0..2000).map(|key| (key, key)), class(256), options, seed(7))
}

/// The link to the child of the root that holds a key.
fn link_of(root: &Page<'_, MapStore, TreeLayout>, key: u64) -> u64 {
    root.read(|words| View(words).value(View(words).child(key))).unwrap()
}

#[test]
fn an_excluded_page_is_waited_for_and_one_that_is_cached_is_not_excluded() {
    let test_bed = test_bed();
    let (tree, executor) = (test_bed.tree.clone(), test_bed.executor.clone());
    test_bed.run(|_| async move {
        let root = tree.enter().unwrap();
        let link = link_of(&root, 700);
        let guard = tree.handle.exclude(&root, link, tree.class, |_| false).await.unwrap().expect("nothing is cached");
        assert!(tree.handle.exclude(&root, link, tree.class, |_| false).await.unwrap().is_none());
        let (waiting, has_come) = (tree.clone(), Rc::new(Cell::new(false)));
        let came = Rc::clone(&has_come);
        executor.spawn(async move {
            assert_eq!(waiting.get(700).await.unwrap(), Some(700));
            came.set(true);
        });
        pause(20).await;
        assert!(!has_come.get(), "it came though it is kept out");
        drop(guard);
        pause(20).await;
        assert!(has_come.get(), "it did not come");
        let root = tree.enter().unwrap();
        let link = link_of(&root, 700);
        assert!(tree.handle.exclude(&root, link, tree.class, |_| false).await.unwrap().is_none(), "it is cached");
    });
}

#[test]
fn an_unlinked_page_below_is_not_overlooked_and_none_comes_in() {
    let test_bed = test_bed();
    let leaf = test_bed.run(|tree| async move { tree.path(700).await.unwrap().last().unwrap().id() });
    let fresh = PageCache::new(TreeLayout, {
        let mut options = small(256, Admission::Always);
        options.excludes_subtrees = true;
        options
    });
    let handle = fresh.unwrap().handle(test_bed.store.clone(), 3).unwrap();
    let is_below = |words: &[AtomicU64]| View(words).level() == 0 && View(words).covers(700);
    test_bed.run(move |other| async move {
        let tree = Tree::open(handle, other.class, Arc::new(AtomicU64::new(1 << 40))).await.unwrap();
        let root = tree.enter().unwrap();
        let link = link_of(&root, 700);
        let guard = tree.handle.exclude(&root, link, tree.class, is_below).await.unwrap().expect("nothing is cached");
        let refused = tree.handle.load(leaf, tree.class).await.map(drop);
        assert!(matches!(refused, Err(CacheError::Conflict(_))), "{refused:?}");
        drop(guard);
        tree.handle.load(leaf, tree.class).await.map(drop).unwrap();
        assert!(
            tree.handle.exclude(&root, link, tree.class, is_below).await.unwrap().is_none(),
            "an unlinked page is below"
        );
        // Another page is no matter.
        let elsewhere = link_of(&root, 1500);
        let guard = tree
            .handle
            .exclude(&root, elsewhere, tree.class, |words| View(words).level() == 0 && View(words).covers(1500))
            .await;
        assert!(guard.unwrap().is_some());
    });
}

/// The pages that lead to a key, by the store: the root first.
fn stored_path(store: &MapStore, key: u64) -> Vec<PageId> {
    let world = store.world();
    let mut path = vec![ROOT];
    loop {
        let image = &world.pages[path.last().unwrap()];
        if image[HEAD] as u8 == 0 {
            return path.into_iter().map(|id| PageId::new(id).unwrap()).collect();
        }
        let entries: Vec<(u64, u64)> = Image(image).entries().collect();
        path.push(entries.iter().rev().find(|entry| entry.0 <= key).expect("the first key is covered").1);
    }
}

/// Keeps out the page above the leaf of a key, if that page is not cached and the leaf cools nevertheless.
async fn exclude_above_cooling(tree: &Tree, key: u64) -> Option<(ExclusionGuard<MapStore, TreeLayout>, PageId)> {
    let path = stored_path(tree.handle.store(), key);
    let [.., above, parent, leaf] = path[..] else { panic!("a tree of three levels") };
    let is_cooling = || tree.handle.contains(leaf) && !tree.handle.contains(parent);
    if !is_cooling() || !tree.handle.contains(above) {
        return None;
    }
    let mut page = tree.enter().ok()?;
    while page.id() != above {
        page = tree.handle.follow(&page, link_of(&page, key), tree.class).await.ok()?;
    }
    let is_below = move |words: &[AtomicU64]| View(words).level() == 0 && View(words).covers(key);
    let link = link_of(&page, key);
    let guard = tree.handle.exclude(&page, link, tree.class, is_below).await.ok()??;
    // Room for the entry may have been made with the leaf.
    tree.handle.contains(leaf).then_some((guard, leaf))
}

/// A page cools, the page above it cools, too, and goes first: what was changed in the store is not found in the cache then,
/// whether its name is known or not.
#[test]
fn what_cools_below_a_page_goes_when_the_store_has_changed_it() {
    const CASES: u64 = under_miri(40, 2);
    let mut options = small(256, Admission::Always);
    // Pages cool for long.
    (options.excludes_subtrees, options.cooling_share) = (true, 0.5);
    let seed = seed(7);
    let test_bed = TestBed::new((0..KEYS).map(|key| (key, 0)), class(256), options, seed);
    test_bed.run(move |tree| async move {
        let mut random = Random(seed);
        let mut cases = 0;
        for round in 0.. {
            assert!(round < 200_000, "{cases} cooling pages below one that is not cached");
            tree.get(random.below(KEYS)).await.unwrap();
            let key = random.below(KEYS);
            let Some((guard, leaf)) = exclude_above_cooling(&tree, key).await else { continue };
            let before = {
                let mut world = tree.handle.store().world();
                let image = world.pages.get_mut(&leaf.get()).unwrap();
                let entry = Image(image).entries().position(|entry| entry.0 == key).unwrap();
                std::mem::replace(&mut image[value_at(entry)], round + 1)
            };
            match cases % 2 {
                0 => guard.drop_changed(leaf).await,
                _ => guard.drop_all().await,
            }
            drop(guard);
            assert_eq!(tree.get(key).await.unwrap(), Some(round + 1), "key {key}, before {before}");
            cases += 1;
            if cases == CASES {
                println!("{cases} cases in {round} rounds");
                break;
            }
        }
    });
}

/// What is said to have changed may be excluded for somebody else, and the other way round: nobody waits for the other.
#[test]
fn two_exclusions_do_not_wait_for_each_other() {
    let test_bed = test_bed();
    let (tree, executor) = (test_bed.tree.clone(), test_bed.executor.clone());
    test_bed.run(|_| async move {
        let root = tree.enter().unwrap();
        let mut guards = Vec::new();
        for key in [700, 1500] {
            let link = link_of(&root, key);
            guards.push(tree.handle.exclude(&root, link, tree.class, |_| false).await.unwrap().expect("not cached"));
        }
        let ended = Rc::new(Cell::new(0));
        let pages: Vec<PageId> = guards.iter().rev().map(ExclusionGuard::page).collect();
        for (guard, page) in guards.into_iter().zip(pages) {
            let ended = Rc::clone(&ended);
            executor.spawn(async move {
                guard.drop_changed(page).await;
                // The other one is excluded still.
                pause(20).await;
                ended.set(ended.get() + 1);
            });
        }
        pause(100).await;
        assert_eq!(ended.get(), 2, "they wait for each other");
    });
}
