//! Ordered maps that the victim reaches by other ways than one-sided: with inner pages or a mapping cached, hybrid, shipped. And the
//! death of the memory servers that carry an operation out.

use farlink_runtime::{
    error::Error,
    one_sided::Proof,
    ptr::ServerId,
    report::Report,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::map::Map;
use farlink_tests::{
    access_under_test::{AccessUnderTest, Admit, CacheSpec, Client, Tree},
    cluster::FAST,
    crash::{MemoryServers, Scene, enumerate, every},
    subject::{StructureName, Subject},
    test_every_structure,
};

use crate::maps::{MAP, Op, Opened, PAGE_BYTES, Script, have_pages_for, scripts};

/// How the victim reaches the map, and who dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    CachedInner,
    /// Of a latch-free structure.
    CachedMapping,
    Hybrid,
    Coarse,
    /// As coarse; it is the memory servers that die.
    CoarseServersDie,
}

impl Way {
    fn reach(self) -> AccessUnderTest {
        match self {
            Self::CachedInner => {
                let cache = CacheSpec { bytes: 256 << 10, page_bytes: PAGE_BYTES, admit: Admit::Always, logs: false };
                AccessUnderTest::CachedInner { cache }
            }
            Self::CachedMapping => AccessUnderTest::CachedMapping { bytes: 256 << 10 },
            Self::Hybrid => AccessUnderTest::Hybrid,
            Self::Coarse | Self::CoarseServersDie => AccessUnderTest::Coarse,
        }
    }

    pub(crate) fn memory_servers(self) -> MemoryServers {
        match self {
            Self::CachedInner | Self::CachedMapping => MemoryServers::Passive,
            Self::Hybrid | Self::Coarse => MemoryServers::Serve,
            Self::CoarseServersDie => MemoryServers::Die,
        }
    }

    /// Where the pages are that it needs there.
    pub(crate) fn placed(self) -> StructurePlacement {
        let root = ServerId::new(0);
        match self {
            Self::CachedInner | Self::CachedMapping => StructurePlacement::default(),
            Self::Hybrid => StructurePlacement { policy: PlacementPolicy::Leaves, root },
            Self::Coarse | Self::CoarseServersDie => StructurePlacement { policy: PlacementPolicy::OneServer, root },
        }
    }
}

#[derive(Debug)]
struct Reached<S> {
    script: Script<S>,
    way: Way,
}

async fn run<S: Subject>(op: Op, map: &Tree<S>) -> Result<(), Error> {
    match map {
        Tree::CachedInner(map) => op.run(map).await,
        Tree::CachedMapping(map) => op.run(map).await,
        Tree::Hybrid(map) => op.run(map).await,
        Tree::Coarse(map) => op.run(map).await,
        other => panic!("no scene is about {other:?}"),
    }
}

impl<S: Subject> Scene for Reached<S> {
    /// The cache after what is made of it.
    type Open = (Tree<S>, Client<S>);

    fn memory_servers(&self) -> MemoryServers {
        self.way.memory_servers()
    }

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare_at(worker, self.way.placed()).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        let map: Opened<S> = Map::open(worker, MAP, Proof::Checksum).await?;
        let structure = map.structure().clone();
        have_pages_for::<S>(worker, structure.class).await?;
        let client = Client::new(structure, Proof::Checksum, self.way.reach())?;
        let tree = client.tree(worker).await?;
        tree.connect().await?;
        // What is kept between operations is there.
        run(Op::Update(u64::MAX), &tree).await?;
        Ok((tree, client))
    }

    async fn act(&self, (map, _): &Self::Open) -> Result<(), Error> {
        run(self.script.op, map).await
    }

    async fn free_leaked(&self, worker: &Worker) -> Result<u64, Error> {
        self.script.free_leaked(worker).await
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        self.script.verify(worker, acknowledged).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

/// Some of the scripts; all, where all deaths are played.
fn play<S: Subject>(way: Way) {
    let step = match (S::WHICH, every()) {
        (_, 1) => 1,
        (StructureName::BwTree, _) => 5,
        _ => 3,
    };
    for script in scripts::<S>().into_iter().step_by(step) {
        enumerate(FAST, &Reached { script, way });
    }
}

fn inner_pages_cached<S: Subject>() {
    play::<S>(Way::CachedInner);
}

fn mapping_cached<S: Subject>() {
    play::<S>(Way::CachedMapping);
}

fn hybrid<S: Subject>() {
    play::<S>(Way::Hybrid);
}

fn shipped<S: Subject>() {
    play::<S>(Way::Coarse);
}

fn shipped_and_the_memory_servers_die<S: Subject>() {
    play::<S>(Way::CoarseServersDie);
}

test_every_structure!(
    inner_pages_cached, hybrid, shipped, shipped_and_the_memory_servers_die;
    bwtree: inner_pages_cached, mapping_cached, hybrid, shipped, shipped_and_the_memory_servers_die,
);
