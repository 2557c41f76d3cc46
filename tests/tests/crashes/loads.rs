//! Trees that their owner has filled with a bulk load, and then changed. It dies after requests of that and of the flush behind it:
//! the load is there as a whole, or not at all. And one-sided loads that are cut off, whose pages are freed.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use farlink_offload::{Cached, Durability};
use farlink_runtime::{
    access::Access,
    error::Error,
    fabric::Fabric,
    leaks,
    one_sided::{OneSided, Proof},
    report::Report,
    server,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    map::KeyRange,
    rtree::{self, RTree, RTreeOptions, Rect},
};
use farlink_tests::{
    cluster::{self, FAST},
    crash::{Member, Scene, enumerate_every, every},
};

use crate::{maps, owners::own, rtrees};

const CACHE_BYTES: usize = 1 << 20;
/// Full leaves of twelve, so many that of them and the pages between them and the root one is left for the last batch.
const LEAVES: u64 = 30;
const KEYS: u64 = LEAVES * 12;

/// One in so many of the victim's requests, or fewer.
const EVERY_MAX: u64 = 8;

/// That of a load of so many entries, and of an insert behind it if there is one, all or nothing is found.
fn require_whole(found: u64, loaded: u64, inserts: bool, flushed: bool) {
    let all = loaded + u64::from(inserts);
    assert!(if flushed { found == all } else { [0, loaded, all].contains(&found) }, "{found}");
}

/// A B+-tree, and whether an entry is inserted behind the load.
#[derive(Debug)]
struct Ordered(bool);

impl Scene for Ordered {
    type Open = BTree<Cached<Tree>>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        let options = BTreeOptions { page_bytes: maps::PAGE_BYTES, ..BTreeOptions::default() };
        BTree::create(worker, maps::MAP, options).await.map(drop)
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let structure = BTree::open(worker, maps::MAP, Proof::Checksum).await?.structure().clone();
        let tree =
            BTree::over(own::<Tree>(worker, structure, KeyRange::ALL, CACHE_BYTES, Durability::WriteBack).await?);
        assert_eq!(tree.bulk_load((1..=KEYS).map(|key| (2 * key, key)), 1.0).await?, KEYS);
        Ok(tree)
    }

    async fn act(&self, tree: &Self::Open) -> Result<(), Error> {
        if self.0 {
            // Splits a page of each level: what has its links is recorded.
            assert!(tree.insert(11, 11).await?);
        }
        tree.access().flush().await
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let structure = BTree::open(worker, maps::MAP, Proof::Checksum).await?.structure().clone();
        let tree =
            BTree::over(own::<Tree>(worker, structure, KeyRange::ALL, CACHE_BYTES, Durability::WriteBack).await?);
        let count = tree.len().await?;
        require_whole(count, KEYS, self.0, flushed);
        for key in 1..=KEYS {
            assert_eq!(tree.remove(2 * key).await?, (count != 0).then_some(key));
        }
        tree.access().close().await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        BTree::open(worker, maps::MAP, Proof::Checksum).await?.check().await
    }
}

/// The same with an R-tree.
#[derive(Debug)]
struct Rects(bool);

/// One leaf more than a batch has pages.
const RECTS: u64 = 32 * 23 + 10;

fn rect(number: u64) -> Rect<2> {
    Rect::point([(number % 29) as f64, (number / 29) as f64]).unwrap()
}

impl Scene for Rects {
    type Open = RTree<Cached<rtree::Tree<2>>, 2>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        RTree::<_, 2>::create(worker, rtrees::TREE, RTreeOptions::default()).await.map(drop)
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let opened = rtrees::Opened::open(worker, rtrees::TREE, Proof::Checksum).await?;
        let structure = opened.access().context().structure.clone();
        let (all, mode) = (Rect::EVERYTHING.into(), Durability::WriteBack);
        let tree = RTree::over(own::<rtree::Tree<2>>(worker, structure, all, CACHE_BYTES, mode).await?);
        assert_eq!(tree.bulk_load((0..RECTS).map(|number| (rect(number), number)), 1.0).await?, RECTS);
        Ok(tree)
    }

    async fn act(&self, tree: &Self::Open) -> Result<(), Error> {
        if self.0 {
            // Outside of the box of all others: the root is changed, too.
            tree.insert(Rect::point([-1.0, -1.0]).unwrap(), RECTS).await?;
        }
        tree.access().flush().await
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let opened = rtrees::Opened::open(worker, rtrees::TREE, Proof::Checksum).await?;
        let structure = opened.access().context().structure.clone();
        let (all, mode) = (Rect::EVERYTHING.into(), Durability::WriteBack);
        let tree = RTree::over(own::<rtree::Tree<2>>(worker, structure, all, CACHE_BYTES, mode).await?);
        let count = tree.len().await?;
        require_whole(count, RECTS, self.0, flushed);
        for number in 0..RECTS {
            assert_eq!(tree.delete(rect(number), number).await?, count != 0);
        }
        tree.access().close().await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        rtrees::Opened::open(worker, rtrees::TREE, Proof::Checksum).await?.check().await
    }
}

/// A load of a B+-tree that others can see already, one-sided: it dies in the middle, or is cut off.
#[derive(Debug)]
struct CutOff;

type OneSidedTree = BTree<OneSided<Tree>>;

async fn load(tree: &OneSidedTree) -> Result<u64, Error> {
    tree.bulk_load((1..=KEYS).map(|key| (key, key)), 1.0).await
}

async fn open(worker: &Worker) -> Result<OneSidedTree, Error> {
    BTree::open(worker, maps::MAP, Proof::Checksum).await
}

/// Frees what a torn WRITE has left, and what nothing leads to in an empty tree; how many pages.
async fn free_all(tree: &OneSidedTree) -> Result<u64, Error> {
    let torn = tree.free_leaked().await?.expect("nobody holds up the epoch");
    Ok(torn + leaks::free_of_empty(tree.access()).await?)
}

impl Scene for CutOff {
    type Open = OneSidedTree;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        Ordered(false).prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        open(worker).await
    }

    async fn act(&self, tree: &Self::Open) -> Result<(), Error> {
        load(tree).await.map(drop)
    }

    async fn verify(&self, worker: &Worker, loaded: bool) -> Result<(), Error> {
        let tree = open(worker).await?;
        require_whole(tree.len().await?, KEYS, false, loaded);
        Ok(())
    }

    async fn free_leaked(&self, worker: &Worker) -> Result<u64, Error> {
        let tree = open(worker).await?;
        // Who uses it may be loading it.
        let count = tree.clone().beside_owners().len().await?;
        let freed = free_all(&tree).await?;
        assert!(freed == 0 || count == 0, "{freed} pages of a tree that holds entries");
        assert_eq!(tree.len().await?, count);
        if count == 0 {
            assert_eq!(load(&tree).await?, KEYS);
        }
        Ok(freed)
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        Ordered(false).check(worker).await
    }
}

#[test]
fn what_a_load_leaves_that_was_cut_off_is_freed() {
    enumerate_every(EVERY_MAX.min(every()), FAST, &CutOff);
}

/// How often somebody else is polled before the loader is again, whose locks it may wait for.
const TURNS: usize = 10_000;
/// Enough for many batches.
const MANY: u64 = 50 * KEYS;

/// What somebody does while a load goes on slowly.
fn beside<T>(member: &Member, act: impl Future<Output = T>, mut loading: Pin<&mut impl Future>) -> T {
    let mut cx = Context::from_waker(Waker::noop());
    let mut acting = pin!(member.worker().drive(act));
    loop {
        for _ in 0..TURNS {
            if let Poll::Ready(outcome) = acting.as_mut().poll(&mut cx) {
                return outcome;
            }
        }
        assert!(loading.as_mut().poll(&mut cx).is_pending(), "the load is over");
    }
}

/// Whoever lives may go on, in whatever process.
#[test]
fn of_a_load_that_is_under_way_nothing_is_freed() {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(2, 8 << 20, FAST).unwrap());
    cluster::with_worker(&fabric, |worker| worker.block_on(CutOff.prepare(worker))).unwrap();
    let [loader, other] = [1, 2].map(|seed| Member::join(&fabric, seed).unwrap());
    let tree = loader.worker().block_on(open(loader.worker())).unwrap();
    let load = tree.bulk_load((0..MANY).map(|key| (key, key)), 1.0);
    let mut loading = Box::pin(loader.worker().drive(load));
    loop {
        let report = beside(&other, CutOff.check(other.worker()), loading.as_mut()).unwrap();
        assert_eq!(report.entries, 0);
        if report.audit.leaked.len() > 100 {
            break;
        }
        assert!(loading.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    for member in [&other, &loader] {
        let free = async { leaks::free_of_empty(open(member.worker()).await?.access()).await };
        let freed = beside(member, free, loading.as_mut());
        assert!(matches!(freed, Err(Error::HasUser { user, .. }) if user == loader.worker().owner()), "{freed:?}");
    }
    let loaded = loop {
        if let Poll::Ready(loaded) = loading.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break loaded;
        }
    };
    assert_eq!(loaded.unwrap(), MANY);
    let report = other.worker().block_on(CutOff.check(other.worker())).unwrap();
    assert!(report.is_clean() && report.entries == MANY, "{report:?}");
}

#[test]
fn ordered_maps() {
    for inserts in [false, true] {
        enumerate_every(EVERY_MAX.min(every()), FAST, &Ordered(inserts));
    }
}

#[test]
fn rtrees() {
    for inserts in [false, true] {
        enumerate_every(EVERY_MAX.min(every()), FAST, &Rects(inserts));
    }
}
