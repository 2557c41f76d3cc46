//! Ordered maps and R-trees in the cache of an owner, which dies after each request of a change and the flush behind it. Others take
//! over, or write one-sided. All that was stored and flushed before is there, and of the change all or nothing; where all is
//! logged, every operation that has answered is there.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use farlink_offload::{Admission, CacheOptions, Cached, ComputeCache, Durability};
use farlink_runtime::{
    access::{Access, Plugin},
    error::Error,
    one_sided::Proof,
    report::Report,
    structure::Structure,
    worker::Worker,
};
use farlink_structures::{
    map::{KeyRange, Map},
    rtree::{self, RTree},
};
use farlink_tests::{
    cluster::FAST,
    crash::{Scene, enumerate, enumerate_one_in, enumerate_resumed, enumerate_sweepers},
    subject::Subject,
    test_every_structure,
};

use crate::{maps, rtrees};

/// Access to all of a structure, through a cache that holds all of it or as little as can be.
pub(crate) async fn own<P: Plugin>(
    worker: &Worker,
    structure: Structure,
    region: P::Region,
    bytes: usize,
    durability: Durability,
) -> Result<Cached<P>, Error> {
    let mut options = CacheOptions::new(bytes);
    (options.page_bytes, options.admission) = (structure.class.bytes(), Admission::Always);
    ComputeCache::<P>::new(options)?.with_durability(durability).own(worker, structure, region).await
}

const CACHE_BYTES: usize = 1 << 20;
/// Little enough for pages to leave.
const CACHE_BYTES_MIN: usize = 64 << 10;

/// What an owner does between two flushes.
#[derive(Debug)]
struct Owner<S> {
    script: maps::Script<S>,
    /// After the script's operation: keys that are inserted, and then removed again but for the first.
    more: std::ops::Range<u64>,
    cache_bytes: usize,
    durability: Durability,
    /// Whether others take over, or write one-sided.
    takes_over: Cell<bool>,
    /// Whether the script's operation has answered.
    has_answered: Cell<bool>,
    /// Of the keys that are inserted beside: whether each is there, as it was answered; unless an operation was cut off.
    answered: RefCell<BTreeMap<u64, Option<bool>>>,
}

/// Written back before anybody dies.
const FLUSHED: u64 = u64::MAX - 1;

impl<S: Subject> Owner<S> {
    fn of(script: maps::Script<S>) -> Self {
        Self {
            script,
            more: 0..0,
            cache_bytes: CACHE_BYTES,
            durability: Durability::WriteBack,
            takes_over: Cell::new(false),
            has_answered: Cell::new(false),
            answered: RefCell::default(),
        }
    }

    /// Keys that are inserted beside, far from all others.
    fn more(&self) -> impl Iterator<Item = u64> + use<S> {
        self.more.clone().map(|key| 1_000_000 + key * 7919 % 10_000)
    }

    /// Inserts or removes one of them.
    async fn set(&self, map: &Map<S, Cached<S>>, key: u64, is_there: bool) -> Result<(), Error> {
        self.answered.borrow_mut().insert(key, None);
        match is_there {
            true => map.insert(key, key).await.map(drop)?,
            false => map.remove(key).await.map(drop)?,
        }
        self.answered.borrow_mut().insert(key, Some(is_there));
        Ok(())
    }

    /// That what was answered is there, where all is logged.
    fn assert_there(&self, key: u64, found: Option<u64>) {
        assert!(found.is_none_or(|value| value == key), "{key}: {found:?}");
        let answered = self.answered.borrow().get(&key).copied();
        if self.durability == Durability::Logged
            && let Some(is_there) = answered.unwrap_or(Some(false))
        {
            assert_eq!(found.is_some(), is_there, "{key}");
        }
    }
}

impl<S: Subject> Scene for Owner<S> {
    type Open = Map<S, Cached<S>>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let map: maps::Opened<S> = self.script.open(worker).await?;
        let structure = map.structure().clone();
        let map = Map::over(own::<S>(worker, structure, KeyRange::ALL, self.cache_bytes, self.durability).await?);
        assert!(map.insert(FLUSHED, 1).await?);
        map.access().flush().await?;
        assert_eq!(map.update(FLUSHED, 2).await?, Some(1));
        Ok(map)
    }

    async fn act(&self, map: &Self::Open) -> Result<(), Error> {
        self.has_answered.set(false);
        self.answered.borrow_mut().clear();
        self.script.op.run(map).await?;
        self.has_answered.set(true);
        for key in self.more() {
            self.set(map, key, true).await?;
        }
        for key in self.more().skip(1) {
            self.set(map, key, false).await?;
        }
        map.access().flush().await
    }

    fn take_way(&self, is_other: bool) {
        self.takes_over.set(is_other);
    }

    fn is_swept_first(&self) -> bool {
        !self.takes_over.get()
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let map: maps::Opened<S> = Map::open(worker, maps::MAP, Proof::Checksum).await?;
        let value = if self.takes_over.get() {
            let owned =
                own::<S>(worker, map.structure().clone(), KeyRange::ALL, self.cache_bytes, Durability::WriteBack)
                    .await?;
            let owned = Map::over(owned);
            let value = owned.remove(FLUSHED).await?;
            for key in self.more() {
                self.assert_there(key, owned.remove(key).await?);
            }
            owned.access().close().await?;
            value
        } else {
            let value = map.remove(FLUSHED).await?;
            for key in self.more() {
                self.assert_there(key, map.remove(key).await?);
            }
            value
        };
        let is_logged = self.durability == Durability::Logged;
        let is_right = value == Some(2) || value == Some(1) && !flushed && !is_logged;
        assert!(is_right, "{value:?}, flushed: {flushed}");
        drop(map);
        self.script.verify(worker, flushed || is_logged && self.has_answered.get()).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

fn write_back<S: Subject>() {
    for script in maps::scripts::<S>() {
        enumerate(FAST, &Owner::of(script));
    }
}

/// Pages leave the cache all the time, and the log is written again and again.
fn pages_leave<S: Subject>() {
    let script = maps::Script::<S>::new((1..=1500).map(|key| key * 10), [], maps::Op::Insert(65));
    let owner = Owner { more: 0..150, cache_bytes: CACHE_BYTES_MIN, ..Owner::of(script) };
    enumerate_one_in(8, FAST, &owner);
}

fn logged<S: Subject>() {
    for script in maps::scripts::<S>() {
        enumerate(FAST, &Owner { durability: Durability::Logged, ..Owner::of(script) });
    }
}

/// Pages leave the cache, and are written back for the sake of the log.
fn pages_leave_logged<S: Subject>() {
    let script = maps::Script::<S>::new((1..=1500).map(|key| key * 10), [], maps::Op::Insert(65));
    let durability = Durability::Logged;
    let owner = Owner { more: 0..50, cache_bytes: CACHE_BYTES_MIN, durability, ..Owner::of(script) };
    enumerate_one_in(8, FAST, &owner);
}

/// Nobody has taken over when who replays the log dies.
fn who_replays_dies_too<S: Subject>() {
    for (index, script) in maps::scripts::<S>().into_iter().skip(6).step_by(8).enumerate() {
        let durability = [Durability::WriteBack, Durability::Logged][index % 2];
        enumerate_sweepers(FAST, &Owner { durability, ..Owner::of(script) }, 2);
    }
}

/// An owner that was only stopped, and goes on once others have taken over.
fn goes_on<S: Subject>() {
    for (index, script) in maps::scripts::<S>().into_iter().skip(2).step_by(5).enumerate() {
        let durability = [Durability::WriteBack, Durability::Logged][index % 2];
        enumerate_resumed(4, FAST, &Owner { durability, ..Owner::of(script) });
    }
}

test_every_structure!(write_back, pages_leave, logged, pages_leave_logged, who_replays_dies_too, goes_on);

/// An R-tree's owner, and whether its operation has answered.
#[derive(Debug)]
struct RTrees(rtrees::Script, Durability, Cell<bool>);

impl Scene for RTrees {
    type Open = RTree<Cached<rtree::Tree<2>>, 2>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.0.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let tree = self.0.open(worker).await?;
        let structure = tree.access().context().structure.clone();
        Ok(RTree::over(
            own::<rtree::Tree<2>>(worker, structure, rtree::Rect::EVERYTHING.into(), CACHE_BYTES, self.1).await?,
        ))
    }

    async fn act(&self, tree: &Self::Open) -> Result<(), Error> {
        self.2.set(false);
        self.0.op.run(tree).await?;
        self.2.set(true);
        tree.access().flush().await
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let tree = rtrees::Opened::open(worker, rtrees::TREE, Proof::Checksum).await?;
        let structure = tree.access().context().structure.clone();
        own::<rtree::Tree<2>>(worker, structure, rtree::Rect::EVERYTHING.into(), CACHE_BYTES, self.1)
            .await?
            .close()
            .await?;
        drop(tree);
        let is_safe = flushed || self.1 == Durability::Logged && self.2.get();
        self.0.verify(worker, is_safe).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.0.check(worker).await
    }
}

#[test]
fn rtrees_write_back() {
    for script in rtrees::scripts() {
        enumerate(FAST, &RTrees(script, Durability::WriteBack, Cell::new(false)));
    }
}

#[test]
fn rtrees_logged() {
    for script in rtrees::scripts() {
        enumerate(FAST, &RTrees(script, Durability::Logged, Cell::new(false)));
    }
}
