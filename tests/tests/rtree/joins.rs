//! A join has every pair once: over trees that change, that fail, and whoever drops it in between.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    future::{Future, pending, poll_fn},
    pin::pin,
    task::Poll,
};

use farlink_runtime::{access::Operation, error::Error, one_sided::OneSided, operation::Run, worker::Handle};
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect, Tree};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::a_rect,
    scene::{create, scene},
};

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

/// A tree of which one operation fails, or waits for ever.
struct Interrupted<'a> {
    access: &'a OneSided<Tree>,
    /// How many are done before.
    left: Cell<Option<u32>>,
    waits: bool,
    is_waiting: Cell<bool>,
    done: Cell<u32>,
}

impl<'a> Interrupted<'a> {
    fn new(access: &'a OneSided<Tree>, left: Option<u32>, waits: bool) -> Self {
        Self { access, left: Cell::new(left), waits, is_waiting: Cell::new(false), done: Cell::new(0) }
    }
}

impl Run for Interrupted<'_> {
    type Plugin = Tree;

    async fn execute<O: Operation<Plugin = Tree>>(&self, operation: &O) -> Result<O::Output, Error> {
        match self.left.get() {
            Some(0) => {
                self.left.set(None);
                if self.waits {
                    self.is_waiting.set(true);
                    pending::<()>().await;
                }
                Err(Error::Malformed("as the test wants it"))
            }
            left => {
                self.left.set(left.map(|left| left - 1));
                self.done.set(self.done.get() + 1);
                self.access.execute(operation).await
            }
        }
    }
}

/// What comes of a future; `None` if it is dropped since a tree waits.
async fn unless_waiting<T>(future: impl Future<Output = T>, trees: [&Interrupted<'_>; 2]) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(it) => Poll::Ready(Some(it)),
        Poll::Pending if trees.iter().any(|tree| tree.is_waiting.take()) => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    })
    .await
}

async fn loaded(worker: &Handle, name: &str, entries: &[Entry]) -> RTree<OneSided<Tree>> {
    let tree = RTree::create(worker, name, RTreeOptions::default()).await.unwrap();
    tree.bulk_load(entries.iter().copied(), 0.9).await.unwrap();
    tree
}

/// Whichever part of whichever tree cannot be had at first, or is waited for when the future is dropped.
#[test]
fn a_join_that_is_interrupted_goes_on_without_a_loss() {
    let scene = scene(32 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(17);
        let (mut trees, mut entries) = (Vec::new(), Vec::new());
        for name in ["left", "right"] {
            entries.push((0..300).map(|number| (a_rect(&mut rng, 2), number)).collect::<Vec<Entry>>());
            trees.push(loaded(&scene.worker, name, &entries[entries.len() - 1]).await);
        }
        let mut expected = Vec::new();
        for one in &entries[0] {
            expected.extend(entries[1].iter().filter(|other| one.0.intersects(&other.0)).map(|other| (one.1, other.1)));
        }
        expected.sort_unstable();
        for case in 0..12 {
            let (before, is_left, waits) = (case / 4, case & 1 == 0, case & 2 == 0);
            let of = |is: bool, tree: usize| {
                RTree::over(Interrupted::new(trees[tree].access(), is.then_some(before), waits))
            };
            let (left, right) = (of(is_left, 0), of(!is_left, 1));
            let (mut join, mut found, mut failures) = (left.join(&right), Vec::new(), 0);
            loop {
                match unless_waiting(join.next(), [left.access(), right.access()]).await {
                    Some(Ok(Some((one, other)))) => found.push((one.1, other.1)),
                    Some(Ok(None)) => break,
                    Some(Err(_)) | None => failures += 1,
                }
            }
            found.sort_unstable();
            assert_eq!(failures, 1);
            assert!(found == expected, "{} of {} pairs, {before} parts before", found.len(), expected.len());
        }
    });
}

/// Where the other tree has nothing more to meet, a tree is not read to its end.
#[test]
fn a_join_reads_no_more_than_can_meet() {
    let scene = scene(32 << 20);
    scene.worker.block_on(async {
        let point = |x: u32| Rect::point([f64::from(x), 0.0]).unwrap();
        let many: Vec<Entry> = (0..4000).map(|x| (point(x), u64::from(x))).collect();
        let many = loaded(&scene.worker, "many", &many).await;
        for (number, few) in [vec![], vec![(point(3), 1)]].into_iter().enumerate() {
            let other = loaded(&scene.worker, &format!("few {number}"), &few).await;
            let [many, other] = [&many, &other].map(|tree| RTree::over(Interrupted::new(tree.access(), None, false)));
            let (mut join, mut pairs) = (many.join(&other), 0);
            while join.next().await.unwrap().is_some() {
                pairs += 1;
            }
            let (mut join, mut swapped) = (other.join(&many), 0);
            while join.next().await.unwrap().is_some() {
                swapped += 1;
            }
            assert_eq!((pairs, swapped), (few.len(), few.len()));
            assert!(many.access().done.get() <= 2, "{} parts fetched", many.access().done.get());
        }
    });
}

/// Entries come and go meanwhile: of those that stay every pair is found once, and no pair of what never was.
#[test]
fn a_join_of_trees_that_change_keeps_its_promise() {
    const LASTING: u64 = 400;
    let scene = scene(32 << 20);
    scene.worker.block_on(async {
        let mut rng = SmallRng::seed_from_u64(23);
        let (mut trees, mut lasting) = (Vec::new(), Vec::new());
        for name in ["left", "right"] {
            lasting.push((0..LASTING).map(|number| (a_rect(&mut rng, 2), number)).collect::<Vec<Entry>>());
            trees.push(loaded(&scene.worker, name, &lasting[lasting.len() - 1]).await);
        }
        let mut expected = BTreeSet::new();
        for one in &lasting[0] {
            expected.extend(lasting[1].iter().filter(|other| one.0.intersects(&other.0)).map(|other| (one.1, other.1)));
        }
        let ever = [0, 1].map(|of: usize| {
            RefCell::new(lasting[of].iter().map(|&(rect, payload)| (payload, rect)).collect::<BTreeMap<_, _>>())
        });
        let (mut join, mut found, mut there) = (trees[0].join(&trees[1]), BTreeSet::new(), [Vec::new(), Vec::new()]);
        let mut payload = LASTING;
        while let Some((one, other)) = join.next().await.unwrap() {
            assert!(one.0.intersects(&other.0), "{one:?} and {other:?}");
            for (entry, ever) in [(one, &ever[0]), (other, &ever[1])] {
                assert_eq!(ever.borrow().get(&entry.1), Some(&entry.0), "{entry:?} never was");
            }
            assert!(found.insert((one.1, other.1)), "{one:?} and {other:?} again");
            for _ in 0..2 {
                let of = rng.random_range(0..2);
                if there[of].len() < 100 {
                    let rect: Rect = a_rect(&mut rng, 2);
                    payload += 1;
                    trees[of].insert(rect, payload).await.unwrap();
                    ever[of].borrow_mut().insert(payload, rect);
                    there[of].push((rect, payload));
                } else {
                    let at = rng.random_range(0..there[of].len());
                    let (rect, payload): Entry = there[of].swap_remove(at);
                    assert!(trees[of].delete(rect, payload).await.unwrap());
                }
            }
        }
        assert!(found.is_superset(&expected), "{:?} are missing", expected.difference(&found).collect::<Vec<_>>());
        assert!(found.len() > expected.len(), "some of what came is met, too");
        assert!(trees[0].search(Query::Intersects(Rect::EVERYTHING)).all().await.unwrap().len() > LASTING as usize);
    });
}
