//! Planted errors: what the Bw-tree relies on is broken between it and its access, and that is noticed. Loom models have others of the
//! same kinds (`loom-tests/tests/models/mapping.rs`).

use std::{
    any::Any,
    cell::RefCell,
    future::Future,
    mem::ManuallyDrop,
    rc::Rc,
    sync::Arc,
    task::{Context as TaskContext, Poll, Waker},
    time::Duration,
};

use farlink_offload::MappingCache;
use farlink_runtime::{
    access::{
        Access, Context, FastPath, Hint, InPieces, InPlace, Interrupt, Link, NewPage, PageRef, Pages, Pieces,
        Placement, Slot, Start, Swap, Unlinked, WordPtr,
    },
    error::Error,
    page::SizeClass,
    sync::AtomicU64,
    worker::Handle,
};
use farlink_structures::bwtree::{
    Bw, BwTree, SentScan,
    chain::{Logical, Record, State},
    record::{About, Fences, MapWord, Mapped, Pid},
};
use farlink_tests::{
    bounded::{self, Watchdog},
    settings,
};

use crate::{ENDLESS, KEYS, Scene, model, open, operate};

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plant {
    Nothing,
    /// The place of a number that is given up is another page's at once. That is nothing to worry about, unless the number is
    /// the same; that happens once.
    PlaceTaken {
        same_number: bool,
    },
    /// Whoever merges a page stops for good once its number is given up. The place's next page has the same number, or another one.
    StopsInMerge {
        same_number: bool,
    },
    /// A change of an inner page swaps the word that is there, not the one that it follows from.
    OldSnapshot,
    /// Mapping words are taken from the cache, and not read.
    CachedWord,
}

/// An access between which and the tree something is broken.
#[derive(Debug)]
struct Planted<A> {
    inner: A,
    plant: Plant,
    /// Where the words of pages stand that have taken a place, or have given one up, and what these are.
    taken: Rc<RefCell<Vec<(WordPtr, u64)>>>,
}

impl<A: Access<Plugin = Bw> + 'static> Planted<A> {
    fn tree(inner: A, plant: Plant) -> BwTree<Self> {
        BwTree::over(Self { inner, plant, taken: Rc::default() })
    }

    /// The number whose page's newest record this is.
    async fn pid_of(&self, record: Unlinked) -> Result<Pid, Interrupt> {
        let page = self.inner.open(Start::Page(Link::to(record.at(), record.class()))).await?;
        page.read(|words| Record::of(words).expect("it is a record").about().pid)
    }

    /// Another page takes a place.
    async fn take(&self, at: WordPtr, word: u64, pid: Pid) -> Result<(), Interrupt> {
        let state = State::new(About { pid, level: 0, below: 0 }, Fences::ALL);
        let beside = at.page.remote().expect("it is a page").0;
        let page = self.inner.allocate(self.context().structure.class, Placement::With(beside)).await?;
        let to = MapWord::to_new(&page).expect("it is within reach").0;
        let write = |pages: &mut A::PagesMut<'_>| state.write(pages, Slot::new_page(0));
        let swap = Swap { word: at, old: word, to, found_by: None };
        self.inner.install(vec![page], write, swap, vec![]).await?.expect("the place is free");
        self.taken.borrow_mut().push((at, to));
        Ok(())
    }
}

impl<A: Access<Plugin = Bw> + 'static> FastPath for Planted<A> {
    type Plugin = Bw;
    type Page<'a>
        = A::Page<'a>
    where
        Self: 'a;

    const REMEMBERS: bool = A::REMEMBERS;

    fn recall<T: Any + Send + Sync>(&self, at: WordPtr) -> Option<(u64, Arc<T>)> {
        self.inner.recall(at)
    }

    fn remember<T: Any + Send + Sync>(&self, at: WordPtr, word: u64, state: &Arc<T>, bytes: usize) {
        self.inner.remember(at, word, state, bytes);
    }
}

impl<A: Access<Plugin = Bw> + 'static> Access for Planted<A> {
    type PagesMut<'a>
        = A::PagesMut<'a>
    where
        Self: 'a;

    fn context(&self) -> &Context<Bw> {
        self.inner.context()
    }

    async fn open(&self, start: Start) -> Result<Self::Page<'_>, Interrupt> {
        self.inner.open(start).await
    }

    async fn follow<'a>(&'a self, from: &Self::Page<'a>, link: Link, hint: Hint) -> Result<Self::Page<'a>, Interrupt> {
        self.inner.follow(from, link, hint).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        self.inner.change(pages, f).await
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        mut swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        let is_of_inner = swap.found_by.is_some_and(|[level, _]| level > 0);
        if self.plant == Plant::OldSnapshot && is_of_inner {
            swap.old = self.inner.load(&[swap.word]).await?[0];
        }
        let given_up = match (self.plant, MapWord(swap.to).target()) {
            (Plant::PlaceTaken { same_number }, Some(Mapped::Not(generation)))
                if !same_number || self.taken.borrow().is_empty() =>
            {
                let pid = self.pid_of(unlinked[0]).await?;
                Some(if same_number { pid } else { Pid::new(pid.place(), generation) })
            }
            _ => None,
        };
        let gives_up = match (self.plant, MapWord(swap.to).target()) {
            (Plant::StopsInMerge { same_number }, Some(Mapped::Not(_))) => {
                swap.to -= u64::from(same_number);
                true
            }
            _ => false,
        };
        let (at, to) = (swap.word, swap.to);
        let outcome = self.inner.install(new, f, swap, unlinked).await?;
        if gives_up && outcome.is_ok() {
            self.taken.borrow_mut().push((at, to));
            std::future::pending::<()>().await;
        }
        if let Some(pid) = given_up.filter(|_| outcome.is_ok()) {
            self.take(at, to, pid).await?;
        }
        Ok(outcome)
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        let known = words.iter().map(|&word| self.recall::<Logical>(word).map(|(word, _)| word)).collect();
        match (self.plant, known) {
            (Plant::CachedWord, Some(known)) => Ok(known),
            _ => self.inner.load(words).await,
        }
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.inner.allocate(class, placement).await
    }
}

/// Every record was freed since the word that leads there was read.
impl<A: Access<Plugin = Bw> + 'static> InPlace for Planted<A> {
    fn in_place(&self, link: Link) -> Result<Option<&[AtomicU64]>, Interrupt> {
        Err(Interrupt::stale(link.remote().expect("it is a page").0, "it was freed"))
    }
}

/// What a scan in pieces has of other pages stays, and the page is read.
#[test]
fn a_scan_in_pieces_reads_pages_whose_records_were_freed() {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let sound = open(&worker).await.unwrap();
        for number in 0..KEYS {
            operate(&sound, number).await.unwrap();
        }
        let tree = Planted::tree(sound.access().clone(), Plant::Nothing);
        for descending in [false, true] {
            let scan = SentScan { low: 0, high: u64::MAX, limit: KEYS, descending, chains: None };
            let mut pieces = Pieces::default();
            scan.collect(tree.access(), &mut pieces).await.unwrap();
            assert!(pieces.words() > 2 * KEYS as usize, "{} words", pieces.words());
        }
    });
}

/// Each page that is merged away gives its place to another one at once, while those who merge it still hold its number; how many
/// did, and how many of those other pages are as they were in the end.
fn places_taken(same_number: bool) -> (usize, usize) {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let sound = open(&worker).await.unwrap();
        let tree = Planted::tree(sound.access().clone(), Plant::PlaceTaken { same_number });
        for number in 0..2 * KEYS {
            let outcome = operate(&tree, number).await;
            assert!(same_number || outcome.is_ok(), "{outcome:?}");
        }
        let taken = tree.access().taken.take();
        let words: Vec<WordPtr> = taken.iter().map(|taken| taken.0).collect();
        let found = sound.access().load(&words).await.unwrap();
        (taken.len(), taken.iter().zip(found).filter(|(taken, found)| taken.1 == *found).count())
    })
}

#[test]
fn a_place_is_used_again_at_once_and_a_number_is_not() {
    let (taken, untouched) = places_taken(false);
    assert!(taken > 5 && untouched == taken, "{untouched} of {taken} pages are as they were");
    let (taken, untouched) = places_taken(true);
    assert!(untouched < taken, "a number that is used again at once is not noticed");
}

/// Somebody stops in a merge whose page has no number any more, and another page has the place. Whether all keys are found.
fn found_beside_a_taken_place(number: u64, same_number: bool) -> Result<(), String> {
    let scene = Scene::new();
    // None of them leaves: that is to wait for the other.
    let [(worker, compute), (other, other_compute)] = [2, 3].map(|seed| scene.join(seed));
    let (worker, other) = (ManuallyDrop::new(worker), ManuallyDrop::new(other));
    std::mem::forget((compute, other_compute));
    let sound = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        for number in 0..number {
            operate(&tree, number).await.unwrap();
        }
        tree
    });
    let tree = Planted::tree(sound.access().clone(), Plant::StopsInMerge { same_number });
    let taken = Rc::clone(&tree.access().taken);
    let mut merging = Box::pin(worker.spawn(async move { operate(&tree, number).await }));
    while taken.borrow().is_empty() {
        assert!(merging.as_mut().poll(&mut TaskContext::from_waker(Waker::noop())).is_pending(), "it does not stop");
        bounded::turn(&worker);
    }
    std::mem::forget(merging);
    let [(at, given_up)] = taken.borrow()[..] else { panic!("it goes on") };
    other.block_on(async {
        let tree = open(&other).await.unwrap();
        // Far from the merge, which so stays as it is.
        for key in 100_000..120_000 {
            let word = MapWord(tree.access().load(&[at]).await.unwrap()[0]);
            if matches!(word.target(), Some(Mapped::To(_))) {
                return;
            }
            assert_eq!(word.0, given_up);
            assert!(tree.insert(key, key).await.unwrap());
        }
        panic!("nobody takes the place");
    });
    let handle: Handle = (**other).clone();
    let find = async move {
        let tree = open(&handle).await.map_err(|error| error.to_string())?;
        for (key, value) in model(0..=number) {
            let found = tree.get(key).await.map_err(|error| format!("key {key}: {error}"))?;
            if found != Some(value) {
                return Err(format!("key {key}: {found:?}"));
            }
        }
        Ok(())
    };
    bounded::run(&other, ENDLESS, find).map_err(|endless| endless.to_string())?
}

#[test]
fn a_number_that_a_place_keeps_is_caught() {
    let _watch = Watchdog::start("a place keeps its number", Duration::from_secs(100));
    let caught = merges().into_iter().take(8).find_map(|number| {
        let sound = found_beside_a_taken_place(number, false);
        sound.unwrap_or_else(|why| {
            panic!("a place that is used again hides what was merged by operation {number}: {why}")
        });
        // Not beside a merge that others meet, and bring to its end, before its place is taken.
        found_beside_a_taken_place(number, true).err()
    });
    println!("{}", caught.expect("a number that is used again is not noticed"));
}

/// Somebody stops in a merge behind so many turns, others split all pages around, and the merge goes on. None if it had ended before;
/// else whether all is there.
fn merge_later(number: u64, turns: u64, plant: Plant) -> Option<Result<(), String>> {
    let scene = Scene::new();
    // None of them leaves: that is to wait for the other.
    let [(worker, compute), (other, other_compute)] = [2, 3].map(|seed| scene.join(seed));
    let (worker, other) = (ManuallyDrop::new(worker), ManuallyDrop::new(other));
    std::mem::forget((compute, other_compute));
    let sound = worker.block_on(async {
        let tree = open(&worker).await.unwrap();
        for number in 0..number {
            operate(&tree, number).await.unwrap();
        }
        tree
    });
    let tree = Planted::tree(sound.access().clone(), plant);
    let mut merging = Box::pin(worker.spawn(async move { operate(&tree, number).await }));
    let mut poll = || merging.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()));
    for _ in 0..turns {
        bounded::turn(&worker);
    }
    if poll().is_ready() {
        return None;
    }
    let mut expected = model(0..=number);
    other.block_on(async {
        let tree = open(&other).await.unwrap();
        for key in (0..KEYS).flat_map(|key| key * 10 + 1..key * 10 + 6) {
            assert!(tree.insert(key, key).await.unwrap());
            expected.insert(key, key);
        }
    });
    let mut turns = 0;
    let outcome = loop {
        if let Poll::Ready(outcome) = poll() {
            break outcome;
        }
        turns += u64::from(bounded::turn(&worker));
        if turns > 1_000_000 {
            return Some(Err("it never ends".into()));
        }
    };
    let seen = other.block_on(async {
        outcome?;
        let tree = open(&other).await?;
        let report = tree.check().await?;
        let found = tree.range(..).take(usize::MAX).await?;
        Ok::<_, Error>((report, found))
    });
    Some(match seen {
        Err(error) => Err(error.to_string()),
        Ok((report, found)) if report.problem_count == 0 && found.iter().copied().eq(expected) => Ok(()),
        Ok((report, found)) => Err(format!("{} keys, {report:?}", found.len())),
    })
}

/// The first removal that merges two pages below the root.
fn a_merge() -> u64 {
    merges()[0]
}

/// The removals that merge pages.
fn merges() -> Vec<u64> {
    let scene = Scene::new();
    let (worker, _compute) = scene.join(2);
    worker.block_on(async {
        let (tree, mut merges) = (open(&worker).await.unwrap(), Vec::new());
        for number in 0..2 * KEYS {
            let before = worker.counters().merges;
            operate(&tree, number).await.unwrap();
            merges.extend((worker.counters().merges > before).then_some(number));
        }
        merges
    })
}

#[test]
fn a_merge_that_goes_on_from_an_old_snapshot_is_caught() {
    let _watch = Watchdog::start("an old snapshot", Duration::from_secs(100));
    let number = a_merge();
    let (mut stops, mut caught) = (0, None);
    let every = settings::from_env("FARLINK_STOPS_EVERY", 5).max(1);
    loop {
        if stops % every == 0 {
            let Some(outcome) = merge_later(number, stops, Plant::Nothing) else { break };
            outcome.unwrap_or_else(|why| panic!("a merge of today goes on behind turn {stops}: {why}"));
        }
        // Once is enough.
        if caught.is_none() {
            caught = merge_later(number, stops, Plant::OldSnapshot).and_then(Result::err);
        }
        stops += 1;
    }
    assert!(stops > 10, "{stops} turns");
    println!("{}", caught.expect("a merge that is finished on an old snapshot is not noticed"));
}

/// What one compute server finds over its cache when another one has changed an entry.
fn found_behind_a_change(plant: Plant) -> Option<u64> {
    let scene = Scene::new();
    let ((worker, _compute), (other, _other_compute)) = (scene.join(2), scene.join(3));
    let theirs = other.block_on(open(&other)).unwrap();
    other.block_on(theirs.insert(1, 1)).unwrap();
    let cache = MappingCache::<Bw>::new(1 << 20);
    let ours = Planted::tree(cache.share(&worker, theirs.structure().clone()), plant);
    assert_eq!(worker.block_on(ours.get(1)).unwrap(), Some(1));
    other.block_on(theirs.upsert(1, 2)).unwrap();
    worker.block_on(ours.get(1)).unwrap()
}

#[test]
fn a_mapping_word_that_is_not_read_is_caught() {
    assert_eq!(found_behind_a_change(Plant::Nothing), Some(2));
    assert_eq!(found_behind_a_change(Plant::CachedWord), Some(1), "a word that is not read is not noticed");
}
