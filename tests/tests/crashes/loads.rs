//! Trees that their owner has filled with a bulk load, and then changed. It dies after requests of that and of the flush behind it:
//! the load is there as a whole, or not at all.

use farlink_offload::{Cached, Durability};
use farlink_runtime::{access::Access, error::Error, one_sided::Proof, report::Report, worker::Worker};
use farlink_structures::{
    btree::{BTree, BTreeOptions, Tree},
    map::KeyRange,
    rtree::{self, RTree, RTreeOptions, Rect},
};
use farlink_tests::{
    cluster::FAST,
    crash::{Scene, enumerate_every, every},
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
