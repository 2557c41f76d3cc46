//! What several processes can leave together, and what only damage can: planted in a tree, for others to meet.

use std::{
    future::Future,
    task::{Context as TaskContext, Poll, Waker},
    time::Duration,
};

use farlink_offload::{CachedMapping, MappingCache};
use farlink_runtime::{
    access::{Access, Link, PageRef, PagesMut, Placement, Slot, Start, Swap, Unlinked, WordPtr},
    error::Error,
    lock::LockWord,
    one_sided::OneSidedPages,
    page::{HEADER_WORDS, SizeClass},
    ptr::{RemotePtr, ServerId},
};
use farlink_structures::bwtree::{
    Bw, BwTree, BwTreeOptions,
    chain::{Chain, Logical, State},
    record::{About, Change, Delta, Fences, MapWord, Mapped, Pid},
};
use farlink_tests::{
    bounded::{self, Bound, Watchdog},
    cluster::FAST,
    fleet::Fleet,
};

use crate::{ENDLESS, KEYS, NAME, Scene, Tree, open, operate};

/// A thousand attempts on what is stale.
const STALE: Bound = Bound { reads_max: 1_500_000, turns_max: 20_000_000 };

/// A logical page, and the word that leads to it.
struct Seen {
    at: WordPtr,
    word: u64,
    page: Logical,
}

async fn look(tree: &Tree, pid: Pid) -> Seen {
    let (access, directory) = (tree.access(), tree.structure().root_link());
    // The words of the directory: the root's, and links to the pages of the table, the first of which is number 1.
    let (number, index) = ((pid.place() >> 16) as usize, HEADER_WORDS + (pid.place() & 0xffff) as usize);
    let entry = WordPtr { page: directory, index: HEADER_WORDS + number };
    let found = access.load(&[entry]).await.unwrap()[0];
    let at = if pid == Pid::ROOT { entry } else { WordPtr { page: Link::from_word(found), index } };
    let word = access.load(&[at]).await.unwrap()[0];
    let mut chain = Chain::new(pid, MapWord(word));
    while let Some(Mapped::To(link)) = chain.next().and_then(MapWord::target) {
        access.open(Start::Page(link)).await.unwrap().read(|words| chain.add(words)).unwrap().unwrap();
    }
    Seen { at, word, page: chain.merge().unwrap() }
}

impl Seen {
    /// Makes a new record the newest one of the page.
    async fn put(self, tree: &Tree, class: SizeClass, write: impl FnOnce(&mut OneSidedPages), frees: &[Unlinked]) {
        let page = tree.access().allocate(class, Placement::RoundRobin).await.unwrap();
        let to = MapWord::to_new(&page).unwrap().0;
        let swap = Swap { word: self.at, old: self.word, to, found_by: None };
        tree.access().install(vec![page], write, swap, frees.to_vec()).await.unwrap().unwrap();
    }

    /// A new base in place of its chain.
    async fn put_base(self, tree: &Tree, state: &State) {
        let frees = self.page.records.clone();
        self.put(tree, tree.structure().class, |pages| state.write(pages, Slot::new_page(0)), &frees).await;
    }

    async fn put_delta(self, tree: &Tree, delta: Delta) {
        self.put(tree, delta.class(), |pages| delta.write(pages, Slot::new_page(0)), &[]).await;
    }

    /// One more delta.
    async fn put_change(self, tree: &Tree, change: Change) {
        let about = self.page.state.about;
        let delta = Delta::new(About { below: about.below + 1, ..about }, MapWord(self.word), change);
        self.put_delta(tree, delta).await;
    }

    /// Says that the page of an entry is being merged into the one to its left.
    async fn put_merging(self, tree: &Tree, (at, child): (u64, Pid)) {
        self.put_change(tree, Change::Merging { at, child }).await;
    }

    fn child(&self, index: usize) -> (u64, Pid) {
        let (key, child) = self.page.state.entries[index];
        (key, Pid::from_word(child).unwrap())
    }
}

/// A tree of keys in ascending order, as few as make so many entries in a root of this level; and the keys.
async fn grown(tree: &Tree, level: u8, entries: usize) -> (Seen, u64) {
    for key in 0.. {
        tree.insert(key, key).await.unwrap();
        let root = look(tree, Pid::ROOT).await;
        if root.page.state.about.level == level && root.page.state.entries.len() == entries {
            return (root, key + 1);
        }
    }
    unreachable!("a tree grows")
}

/// Has the directory name as many pages of the table as it can, all of one size, and on one memory server.
async fn fill_directory(tree: &Tree, class: SizeClass) {
    let (access, directory) = (tree.access(), tree.structure().root_link());
    for index in HEADER_WORDS + 1..tree.structure().class.words() {
        let page = access.allocate(class, Placement::Server(ServerId::new(1).unwrap())).await.unwrap();
        let word = WordPtr { page: directory, index };
        let swap = Swap { word, old: 0, to: page.link().word(), found_by: None };
        let describe = |pages: &mut OneSidedPages| pages.describe_words(Slot::new_page(0), 0, 9);
        access.install(vec![page], describe, swap, vec![]).await.unwrap().unwrap();
    }
}

/// The directory is full, and all places of the table are on one memory server: they do for pages of the other one, too.
#[test]
fn any_place_does_where_the_table_cannot_grow() {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        fill_directory(&tree, SizeClass::of_bytes(4096).unwrap()).await;
        for number in 0..KEYS {
            operate(&tree, number).await.unwrap();
        }
        let report = tree.check().await.unwrap();
        assert!(report.is_clean() && worker.counters().splits > 10, "{report:?}");
    });
}

/// The mapping table has a place for few pages, and its directory no room for more: what fails says so, and what is there stays.
#[test]
fn a_full_mapping_table_is_told_from_full_memory() {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        fill_directory(&tree, SizeClass::SMALLEST).await;
        let mut keys = 0;
        let error = loop {
            match tree.insert(keys, keys).await {
                Ok(is_new) => assert!(is_new),
                Err(error) => break error,
            }
            keys += 1;
        };
        let pages_max = tree.structure().class.words() - HEADER_WORDS - 1;
        assert!(matches!(error, Error::MappingTableFull { pages_max: max } if max == pages_max), "{error:?}");
        assert!(error.to_string().contains("page-bytes"), "{error}");
        assert!(tree.range(..).take(usize::MAX).await.unwrap().into_iter().eq((0..keys).map(|key| (key, key))));
        let report = tree.check().await.unwrap();
        assert!(report.is_clean() && worker.counters().splits > 10, "{report:?}");
    });
}

/// With more memory servers than the directory can name pages, the table has as many places as with few.
#[test]
fn many_servers_do_not_make_the_mapping_table_small() {
    let (pages_max, keys) = (27, 200_000);
    let fleet = Fleet::start(pages_max, 2 << 20, 1, FAST).unwrap();
    let scene = Scene { fabric: fleet.fabric(), _fleet: fleet };
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let options = BwTreeOptions { page_bytes: 256, ..BwTreeOptions::default() };
        let tree = BwTree::create(&worker, NAME, options).await.unwrap();
        assert_eq!(tree.structure().class.words() - HEADER_WORDS - 1, pages_max);
        assert_eq!(tree.bulk_load((0..keys).map(|key| (key, key)), 1.0).await.unwrap(), keys);
    });
}

/// An entry below a damaged root leads to a page that says it is of the same level, and leads to itself.
#[test]
fn a_check_of_levels_in_a_ring_ends() {
    let scene = Scene::new();
    let (worker, compute) = scene.join(2);
    let tree = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        let child = grown(&tree, 1, 2).await.0.child(0).1;
        let page = look(&tree, child).await;
        let State { about, fences, .. } = page.page.state;
        let state = State { entries: vec![(0, child.word())], ..State::new(About { level: 1, ..about }, fences) };
        page.put_base(&tree, &state).await;
        tree
    });
    let outcome = bounded::run(&worker, ENDLESS, async move { tree.check().await });
    std::mem::forget((worker, compute));
    let report = outcome.unwrap_or_else(|endless| panic!("{endless}")).unwrap();
    assert!(report.problem_count > 0, "{report:?}");
}

/// A compute server remembers a page from when a merge was under way below it. That merge has ended, and the entry has been put in
/// anew, for another page: nobody takes it out.
#[test]
fn an_index_term_that_was_put_in_anew_stays() {
    let scene = Scene::new();
    let ((worker, _compute), (other, _other_compute)) = (scene.join(2), scene.join(3));
    let cache = MappingCache::<Bw>::new(1 << 20);
    let theirs = other.block_on(open(&other)).unwrap();
    let ours: BwTree<CachedMapping<Bw>> = BwTree::over(cache.share(&worker, theirs.structure().clone()));
    let (key, page) = other.block_on(async {
        theirs.bulk_load((0..33).map(|key| (key, key)), 1.0).await.unwrap();
        let root = look(&theirs, Pid::ROOT).await;
        let (key, page) = root.child(1);
        root.put_merging(&theirs, (key, Pid::new(page.place(), page.generation() + 1))).await;
        (key, page)
    });
    assert_eq!(worker.block_on(ours.get(0)).unwrap(), Some(0));
    other.block_on(async {
        for change in [Change::Delete { key }, Change::Put { key, value: page.word() }] {
            look(&theirs, Pid::ROOT).await.put_change(&theirs, change).await;
        }
    });
    // The page to the left gets underfull, but does not fit what is beside it.
    for key in 0..9 {
        assert_eq!(worker.block_on(ours.remove(key)).unwrap(), Some(key));
    }
    let root = other.block_on(look(&theirs, Pid::ROOT)).page.state;
    assert_eq!((root.value(key), root.merging, root.entries.len()), (Some(page.word()), None, 3));
    let report = other.block_on(theirs.check()).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

/// A process has split a page, and died before the page above knew. Over the mapping cache who only reads goes on to the right half,
/// each time, and begins no operation anew; the first put there puts the index term in.
#[test]
fn a_split_without_an_index_term_restarts_no_reader() {
    for (keys, level) in [(33, 1), (363, 2)] {
        let scene = Scene::new();
        let ((worker, _compute), (other, _other_compute)) = (scene.join(2), scene.join(3));
        let cache = MappingCache::<Bw>::new(1 << 20);
        let theirs = other.block_on(open(&other)).unwrap();
        let ours: BwTree<CachedMapping<Bw>> = BwTree::over(cache.share(&worker, theirs.structure().clone()));
        let (low, half) = other.block_on(async {
            theirs.bulk_load((0..keys).map(|key| (key, key)), 1.0).await.unwrap();
            let root = look(&theirs, Pid::ROOT).await;
            assert_eq!((root.page.state.about.level, root.page.state.entries.len()), (level, 3));
            let (low, half) = root.child(1);
            let mut state = root.page.state.clone();
            state.change(Change::Delete { key: low });
            root.put_base(&theirs, &state).await;
            (low, half)
        });
        let get = |key| assert_eq!(worker.block_on(ours.get(key)).unwrap(), Some(key), "key {key}");
        (0..keys).for_each(get);
        let before = worker.counters();
        (0..20).for_each(|_| get(low + 1));
        let cost = worker.counters() - before;
        // A word of what was trusted, or two, those of the halves, and of the pages below.
        assert_eq!((cost.restarts, cost.round_trips), (0, 20 * 3), "level {level}: {cost:?}");
        assert_eq!(worker.block_on(ours.upsert(low + 1, low + 1)).unwrap(), Some(low + 1));
        assert_eq!(other.block_on(look(&theirs, Pid::ROOT)).page.state.value(low), Some(half.word()));
        let before = worker.counters();
        get(low + 1);
        assert_eq!((worker.counters() - before).round_trips, 1, "level {level}");
    }
}

/// One process has left the root with one page below it; another one has split that page, and died before the page above knew. A removal
/// that finds the page to be merged puts the entry in, and ends.
#[test]
fn the_only_page_below_the_root_is_split_and_a_removal_ends() {
    let scene = Scene::new();
    let (worker, compute) = scene.join(2);
    let (tree, keys, half) = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        let (root, keys) = grown(&tree, 1, 2).await;
        let half = root.child(1).0;
        let state =
            State { entries: vec![root.page.state.entries[0]], ..State::new(root.page.state.about, Fences::ALL) };
        root.put_base(&tree, &state).await;
        (tree, keys, half)
    });
    let ended = bounded::run(&worker, ENDLESS, async move {
        for key in 0..half {
            assert_eq!(tree.remove(key).await.unwrap(), Some(key));
        }
        let left = tree.range(..).take(usize::MAX).await.unwrap();
        assert!(left.into_iter().eq((half..keys).map(|key| (key, key))));
        tree.check().await.unwrap()
    });
    // To leave is to wait for those that are pinned.
    std::mem::forget((worker, compute));
    let report = ended.unwrap_or_else(|endless| panic!("{endless}"));
    assert!(report.is_clean(), "{report:?}");
}

/// A page is being merged that others change all the time, so that its merge does not get on; beside it a page is split of whose right
/// half the page above knows nothing yet. A put to that half need not wait for either.
#[test]
fn a_put_goes_right_where_the_page_above_is_busy() {
    let _watch = Watchdog::start("a put goes right", Duration::from_secs(20));
    let scene = Scene::new();
    let [(worker, compute), (other, other_compute)] = [2, 3].map(|seed| scene.join(seed));
    let (busy, key) = other.block_on(async {
        let tree = open(&other).await.unwrap();
        let (root, keys) = grown(&tree, 1, 4).await;
        let merging = root.child(1);
        let entries = root.page.state.entries[..3].to_vec();
        let state = State { entries, ..State::new(root.page.state.about, Fences::ALL) };
        root.put_base(&tree, &state).await;
        look(&tree, Pid::ROOT).await.put_merging(&tree, merging).await;
        (merging.0, keys - 1)
    });
    let handle = (*worker).clone();
    let mut put = Box::pin(worker.spawn(async move { open(&handle).await?.upsert(key, 7).await }));
    let theirs = other.block_on(open(&other)).unwrap();
    let mut turns = 0;
    let found = loop {
        if let Poll::Ready(found) = put.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())) {
            break Some(found);
        }
        // It has a look at most, and then the page is another one.
        bounded::turn(&worker);
        other.block_on(theirs.upsert(busy, turns)).unwrap();
        turns += 1;
        if turns > 20_000 {
            break None;
        }
    };
    std::mem::forget((worker, compute, other, other_compute));
    assert_eq!(found.expect("the put never ends").unwrap(), Some(key));
}

/// A delta whose checksum fits names a page that is none, as one that it says again. It is not freed as one: there stands the epoch.
#[test]
fn what_is_no_page_of_a_structure_is_not_freed() {
    let scene = Scene::new();
    let (worker, compute) = scene.join(2);
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        tree.insert(1, 1).await.unwrap();
        let root = look(&tree, Pid::ROOT).await;
        let epoch = RemotePtr::new(ServerId::new(0).unwrap(), 128).unwrap();
        let forged = Link::to(epoch, SizeClass::SMALLEST).word();
        let forged = Unlinked::from_words([forged, LockWord::unlocked(1).word()]).unwrap();
        let about = |more| About { below: root.page.state.about.below + more, ..root.page.state.about };
        let change = |value| Change::Put { key: 1, value };
        let delta = Delta::new(about(1), MapWord(root.word), change(2)).and(forged, about(2), change(3)).unwrap();
        root.put_delta(&tree, delta).await;
        let before = worker.load(epoch).await.unwrap();
        let mut refused = None;
        for value in 0..8 {
            refused = refused.or(tree.upsert(1, value).await.err());
        }
        assert_eq!(worker.load(epoch).await.unwrap(), before, "a word beside the pages was written");
        assert!(matches!(refused, Some(Error::BadPointer { word, .. }) if word == forged.words()[0]), "{refused:?}");
    });
    drop((worker, compute));
}

/// An inner page says that its own number is being merged into the page to its left. What is below it is of another level: it is named.
#[test]
fn a_page_that_is_said_to_be_below_itself_is_named() {
    let scene = Scene::new();
    let (worker, compute) = scene.join(2);
    let (tree, low) = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        let (root, _) = grown(&tree, 2, 2).await;
        let (low, inner) = root.child(1);
        let page = look(&tree, inner).await;
        let at = page.child(1).0;
        page.put_merging(&tree, (at, inner)).await;
        (tree, low)
    });
    let outcome = bounded::run(&worker, STALE, async move {
        // Splits, which change the page above.
        for key in low..low + 1000 {
            tree.upsert(key, key).await?;
        }
        Ok(())
    });
    std::mem::forget((worker, compute));
    assert!(matches!(outcome, Ok(Err(Error::Inconsistent { .. }))), "{outcome:?}");
}

/// The root says that its second page is being merged; that one says the same of a page below it, and that it begins where the third
/// does, which is removed. Who finishes the one meets the other, and then the first again.
#[test]
fn what_is_half_done_in_a_ring_is_named() {
    let scene = Scene::new();
    let (worker, compute) = scene.join(2);
    let (tree, low) = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        let (root, _) = grown(&tree, 2, 3).await;
        let [second, third] = [1, 2].map(|index| root.child(index));
        let page = look(&tree, second.1).await;
        let below = (third.0, page.child(0).1);
        let state = State {
            entries: vec![(below.0, below.1.word())],
            ..State::new(page.page.state.about, Fences { low: third.0, right: None })
        };
        page.put_base(&tree, &state).await;
        look(&tree, second.1).await.put_merging(&tree, below).await;
        look(&tree, third.1).await.put_change(&tree, Change::Remove).await;
        root.put_merging(&tree, second).await;
        (tree, third.0)
    });
    let outcome = bounded::run(&worker, STALE, async move { tree.upsert(low, 7).await });
    std::mem::forget((worker, compute));
    assert!(matches!(outcome, Ok(Err(Error::Inconsistent { .. }))), "{outcome:?}");
}

/// Of a tree with two pages below the root, whose keys are removed in ascending order: the key behind whose removal the root is lower.
/// That one merges the two pages, and then the one that is left with the root.
fn lowers() -> u64 {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        for key in 0..grown(&tree, 1, 2).await.1 {
            tree.remove(key).await.unwrap();
            if look(&tree, Pid::ROOT).await.page.state.about.level == 0 {
                return key;
            }
        }
        panic!("the root stays as high as it is");
    })
}

/// A process stops while it merges the only page below the root. Others split that page, so that merge is cancelled; and die while they
/// merge the two halves again, behind the absorption. Then the first one goes on.
#[test]
fn a_merge_that_was_cancelled_removes_nothing() {
    let _watch = Watchdog::start("a cancelled merge", Duration::from_secs(100));
    let (last, mut cancelled) = (lowers(), 0);
    for turns in 0.. {
        let scene = Scene::new();
        let [(worker, compute), (other, other_compute)] = [2, 3].map(|seed| scene.join(seed));
        let (tree, keys) = worker.block_on(async {
            let tree = open(&worker).await.unwrap();
            let keys = grown(&tree, 1, 2).await.1;
            for key in 0..last {
                tree.remove(key).await.unwrap();
            }
            (tree, keys)
        });
        let mut removal = Box::pin(worker.spawn(async move { tree.remove(last).await }));
        let mut poll = || removal.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
        for _ in 0..turns {
            bounded::turn(&worker);
        }
        let has_ended = poll().is_ready();
        let theirs = other.block_on(open(&other)).unwrap();
        let put = (!has_ended).then(|| other.block_on(split_and_merge_again(&theirs, keys))).flatten();
        if let Some(put) = put {
            cancelled += 1;
            while poll().is_pending() {
                bounded::turn(&worker);
            }
            let outcome = bounded::run(&other, ENDLESS, async move {
                for key in last + 1..put {
                    assert_eq!(theirs.get(key).await?, Some(key), "key {key}");
                    assert_eq!(theirs.upsert(key, 7).await?, Some(key), "key {key}");
                }
                theirs.check().await
            });
            let report = outcome.unwrap_or_else(|endless| panic!("behind turn {turns}: {endless}"));
            let report = report.unwrap_or_else(|error| panic!("behind turn {turns}: {error}"));
            assert!(report.problem_count == 0 && report.entries == put - last - 1, "behind turn {turns}: {report:?}");
        }
        // To leave is to wait for those that are pinned.
        std::mem::forget((worker, compute, other, other_compute));
        if has_ended {
            break;
        }
    }
    assert!(cancelled > 0, "the removal never stops in the merge");
}

/// A process begins to merge the only page below the root. Others split that page, so that merge is cancelled: it is not counted as one.
#[test]
fn a_merge_that_was_cancelled_is_not_counted() {
    let _watch = Watchdog::start("a cancelled merge is not counted", Duration::from_secs(20));
    let last = lowers();
    let scene = Scene::new();
    let [(worker, compute), (other, other_compute)] = [2, 3].map(|seed| scene.join(seed));
    let (tree, keys) = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        let keys = grown(&tree, 1, 2).await.1;
        for key in 0..last {
            tree.remove(key).await.unwrap();
        }
        (tree, keys)
    });
    let theirs = other.block_on(open(&other)).unwrap();
    let root = || other.block_on(look(&theirs, Pid::ROOT)).page.state;
    let mut removal = Box::pin(worker.spawn(async move { tree.remove(last).await }));
    let mut poll = || removal.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
    while root().entries.len() > 1 || root().merging.is_none() {
        assert!(poll().is_pending(), "the only page is never merged");
        bounded::turn(&worker);
    }
    let merges = worker.counters().merges;
    (keys..).find(|&key| {
        other.block_on(theirs.insert(key, key)).unwrap();
        root().entries.len() == 2
    });
    while poll().is_pending() {
        bounded::turn(&worker);
    }
    assert_eq!((root().about.level, root().entries.len()), (1, 2));
    assert_eq!((merges, worker.counters().merges), (1, 1), "the pair of pages was merged, and no more");
    std::mem::forget((worker, compute, other, other_compute));
}

/// If the only page below the root is being merged: splits it with keys from `first` on, and leaves a merge of the two halves where one
/// absorbed the other; the key behind the last one that was put.
async fn split_and_merge_again(tree: &Tree, first: u64) -> Option<u64> {
    let root = look(tree, Pid::ROOT).await;
    let state = &root.page.state;
    if state.entries.len() > 1 || state.merging.is_none() || look(tree, root.child(0).1).await.page.state.is_removed {
        return None;
    }
    let mut next = first;
    let root = loop {
        tree.insert(next, next).await.unwrap();
        next += 1;
        let root = look(tree, Pid::ROOT).await;
        if root.page.state.entries.len() == 2 {
            break root;
        }
    };
    let (left, right) = (root.child(0), root.child(1));
    root.put_merging(tree, right).await;
    let page = look(tree, right.1).await;
    let (absorbed, more) = (MapWord(page.word), page.page.state.about.below + 2);
    page.put_change(tree, Change::Remove).await;
    let left = look(tree, left.1).await;
    let about = About { below: left.page.state.about.below + more, ..left.page.state.about };
    let merge = Delta::new(about, MapWord(left.word), Change::Merge { at: right.0, absorbed });
    left.put_delta(tree, merge).await;
    Some(next)
}
