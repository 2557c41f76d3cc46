//! The R-tree.

use farlink_offload::{CacheOptions, CachedInner, ComputeCache, Hybrid, Remote};
use farlink_runtime::{
    access::Access,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    report::Report,
    structure::StructurePlacement,
    worker::Worker,
};
use farlink_structures::rtree::{Query, RTree, RTreeOptions, Rect, Tree};
use farlink_tests::{
    cluster::FAST,
    crash::{MemoryServers, Scene, enumerate, every},
};

use crate::{maps::have_pages, ways::Way};

pub(crate) const TREE: &str = "rtree";

pub(crate) type Opened = RTree<OneSided<Tree<2>>, 2>;

/// An operation of the victim's script, on the rectangle with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Insert(u64),
    Delete(u64),
    Move(u64),
}

/// Rectangles that are there, and what the victim does.
#[derive(Debug)]
pub(crate) struct Script {
    count: u64,
    deleted: std::ops::Range<u64>,
    pub(crate) op: Op,
}

pub(crate) fn rect(number: u64) -> Rect<2> {
    let (x, y) = ((number % 16) as f64, (number / 16) as f64);
    Rect::new([x, y], [x + 0.5, y + 0.5]).expect("its low corner is below its high one")
}

pub(crate) fn moved(number: u64) -> Rect<2> {
    Rect::new([number as f64, 100.0], [number as f64, 101.0]).expect("its low corner is below its high one")
}

fn everywhere() -> Rect<2> {
    Rect::new([-1.0, -1.0], [1000.0, 1000.0]).expect("its low corner is below its high one")
}

fn sorted(mut entries: Vec<(u64, bool)>) -> Vec<(u64, bool)> {
    entries.sort_unstable();
    entries
}

async fn entries(tree: &Opened) -> Result<Vec<(u64, bool)>, Error> {
    let all = tree.search(Query::Intersects(everywhere())).all().await?;
    Ok(sorted(all.into_iter().map(|(rect, payload)| (payload, rect == moved(payload))).collect()))
}

impl Op {
    pub(crate) async fn run<A: Run<Plugin = Tree<2>>>(self, tree: &RTree<A, 2>) -> Result<(), Error> {
        match self {
            Self::Insert(number) => tree.insert(rect(number), number).await,
            Self::Delete(number) => tree.delete(rect(number), number).await.map(drop),
            Self::Move(number) => tree.update(rect(number), number, moved(number)).await.map(drop),
        }
    }
}

impl Script {
    pub(crate) fn with(count: u64, op: Op) -> Self {
        Self { count, deleted: 0..0, op }
    }

    fn before(&self) -> Vec<(u64, bool)> {
        (0..self.count).filter(|number| !self.deleted.contains(number)).map(|number| (number, false)).collect()
    }

    fn after(&self) -> Vec<(u64, bool)> {
        let mut entries = self.before();
        match self.op {
            Op::Insert(number) => entries.push((number, false)),
            Op::Delete(number) => entries.retain(|&(other, _)| other != number),
            Op::Move(number) => {
                entries.iter_mut().filter(|(other, _)| *other == number).for_each(|entry| entry.1 = true)
            }
        }
        sorted(entries)
    }
}

impl Script {
    pub(crate) async fn prepare_at(&self, worker: &Worker, placement: StructurePlacement) -> Result<(), Error> {
        let options = RTreeOptions { page_bytes: 1024, placement, ..RTreeOptions::default() };
        let tree = Opened::create(worker, TREE, options).await?;
        for number in 0..self.count {
            tree.insert(rect(number), number).await?;
        }
        for number in self.deleted.clone() {
            assert!(tree.delete(rect(number), number).await?);
        }
        Ok(())
    }
}

impl Scene for Script {
    type Open = Opened;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.prepare_at(worker, StructurePlacement::default()).await
    }

    async fn open(&self, worker: &Worker) -> Result<Opened, Error> {
        let tree = Opened::open(worker, TREE, Proof::Checksum).await?;
        have_pages(worker, tree.access().context().structure.class).await?;
        Ok(tree)
    }

    async fn act(&self, tree: &Opened) -> Result<(), Error> {
        self.op.run(tree).await
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        let tree = self.open(worker).await?;
        let found = entries(&tree).await?;
        let is_as_expected = found == self.after() || !acknowledged && found == self.before();
        assert!(is_as_expected, "{:?}, acknowledged: {acknowledged}: {found:?}", self.op);
        for number in 200..230 {
            tree.insert(rect(number), number).await?;
        }
        for (number, is_moved) in found.into_iter().chain((200..230).map(|number| (number, false))) {
            let rect = if is_moved { moved(number) } else { rect(number) };
            assert!(tree.delete(rect, number).await?, "{number}");
        }
        assert!(tree.is_empty().await?);
        Ok(())
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        Opened::open(worker, TREE, Proof::Checksum).await?.check().await
    }
}

pub(crate) fn scripts() -> Vec<Script> {
    let grow = [3, 20, 21, 22, 23, 24, 25, 26].map(|count| Script::with(count, Op::Insert(count)));
    let shrink = [60, 12, 8, 7].map(|left| Script { count: 60, deleted: left..60, op: Op::Delete(left - 1) });
    grow.into_iter().chain(shrink).chain([Script::with(60, Op::Move(17))]).collect()
}

/// A script whose victim reaches the tree in another way.
#[derive(Debug)]
struct Reached {
    script: Script,
    way: Way,
}

/// The tree as the victim reaches it.
enum ReachedTree {
    CachedInner(RTree<CachedInner<Tree<2>>>),
    Hybrid(Box<RTree<Hybrid<Tree<2>>>>),
    Coarse(RTree<Remote<Tree<2>>>),
}

impl ReachedTree {
    async fn run(&self, op: Op) -> Result<(), Error> {
        match self {
            Self::CachedInner(tree) => op.run(tree).await,
            Self::Hybrid(tree) => op.run(&**tree).await,
            Self::Coarse(tree) => op.run(tree).await,
        }
    }
}

impl Scene for Reached {
    type Open = ReachedTree;

    fn memory_servers(&self) -> MemoryServers {
        self.way.memory_servers()
    }

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare_at(worker, self.way.placed()).await
    }

    async fn open(&self, worker: &Worker) -> Result<ReachedTree, Error> {
        let structure = self.script.open(worker).await?.access().context().structure.clone();
        let root = structure.root.server();
        let reached = match self.way {
            Way::CachedInner => {
                let cache = ComputeCache::new(CacheOptions::new(256 << 10))?;
                ReachedTree::CachedInner(RTree::over(cache.share(worker, structure, Proof::Checksum)?))
            }
            Way::CachedMapping => panic!("an R-tree has no mapping table"),
            Way::Hybrid => {
                let hybrid = Hybrid::new(worker, structure, Proof::Checksum);
                hybrid.shipper().connect(root).await?;
                ReachedTree::Hybrid(Box::new(RTree::over(hybrid)))
            }
            Way::Coarse | Way::CoarseServersDie => {
                let remote = Remote::new(worker, structure);
                remote.shipper().connect(root).await?;
                ReachedTree::Coarse(RTree::over(remote))
            }
        };
        // What is kept between operations is there.
        reached.run(Op::Delete(9999)).await?;
        Ok(reached)
    }

    async fn act(&self, tree: &ReachedTree) -> Result<(), Error> {
        tree.run(self.script.op).await
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        self.script.verify(worker, acknowledged).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

/// One script in three; all, where all deaths are played.
fn play(way: Way) {
    for script in scripts().into_iter().step_by(if every() == 1 { 1 } else { 3 }) {
        enumerate(FAST, &Reached { script, way });
    }
}

#[test]
fn inner_pages_cached() {
    play(Way::CachedInner);
}

#[test]
fn hybrid() {
    play(Way::Hybrid);
}

#[test]
fn shipped() {
    play(Way::Coarse);
}

#[test]
fn shipped_and_the_memory_servers_die() {
    play(Way::CoarseServersDie);
}

#[test]
fn one_sided() {
    for script in scripts() {
        enumerate(FAST, &script);
    }
}
