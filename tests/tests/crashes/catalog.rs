//! Structures that are made, filled or dropped when their compute server dies.

use std::marker::PhantomData;

use farlink_runtime::{
    catalog::{self, CreateOptions},
    error::Error,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    report::Report,
    structure::{OPTIONS, StructurePlacement},
    worker::{Handle, Worker},
};
use farlink_structures::map::Map;
use farlink_tests::{
    cluster::{FAST, WEAK},
    crash::{Scene, enumerate},
    subject::Subject,
    test_every_structure,
};

/// There before, and to be left alone.
const BYSTANDER: &str = "bystander";
const NAME: &str = "map";
const PAGE_BYTES: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Makes a structure that is filled with so many keys before anybody can open it.
    Make { keys: u64 },
    /// Drops one with so many keys.
    Drop { keys: u64 },
}

#[derive(Debug)]
struct Script<S>(Act, PhantomData<S>);

type Opened<S> = Map<S, OneSided<S>>;

fn keys(count: u64) -> impl Iterator<Item = (u64, u64)> {
    (1..=count).map(|key| (key * 10, key))
}

async fn make<S: Subject>(worker: &Handle, count: u64) -> Result<Opened<S>, Error> {
    let class = SizeClass::of_bytes(S::page_bytes(PAGE_BYTES)).expect("a size class");
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let fill = async move |access: &OneSided<S>| S::load(&Map::over(access.clone()), keys(count), 0.8).await;
    Ok(Map::over(catalog::create_with(worker, NAME, &options, Proof::Checksum, fill).await?))
}

impl<S: Subject> Scene for Script<S> {
    type Open = Handle;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        let bystander = Map::<S, _>::make(worker, BYSTANDER, S::page_bytes(PAGE_BYTES), Proof::Checksum).await?;
        bystander.insert(1, 2).await?;
        if let Act::Drop { keys } = self.0 {
            make::<S>(worker, keys).await?;
        }
        Ok(())
    }

    async fn open(&self, worker: &Worker) -> Result<Handle, Error> {
        Ok(Handle::clone(worker))
    }

    async fn act(&self, worker: &Handle) -> Result<(), Error> {
        match self.0 {
            Act::Make { keys } => make::<S>(worker, keys).await.map(drop),
            Act::Drop { .. } => catalog::destroy(worker, NAME).await.map(drop),
        }
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        let found = catalog::find(worker, NAME).await;
        let is_there = found.is_ok();
        assert!(is_there || matches!(found, Err(Error::NoSuchName { .. })), "{found:?}");
        let (Act::Make { keys: count } | Act::Drop { keys: count }) = self.0;
        assert!(!acknowledged || is_there == matches!(self.0, Act::Make { .. }), "{found:?}");
        if is_there {
            let map: Opened<S> = Map::open(worker, NAME, Proof::Checksum).await?;
            assert!(map.range(..).take(usize::MAX).await?.into_iter().eq(keys(count)));
            assert_eq!(map.update(10, 1).await?.is_some(), count > 0);
            let report = map.check().await?;
            assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{report:?}");
            catalog::destroy(worker, NAME).await?;
        }
        // The name is free.
        let map = make::<S>(worker, count + 1).await?;
        assert_eq!(map.remove(10).await?, Some(1));
        catalog::destroy(worker, NAME).await?;
        let all: Vec<String> = catalog::list(worker).await?.into_iter().map(|structure| structure.name).collect();
        assert_eq!(all, [BYSTANDER]);
        Ok(())
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        let bystander = Opened::<S>::open(worker, BYSTANDER, Proof::Checksum).await?;
        assert_eq!(bystander.get(1).await?, Some(2));
        bystander.check().await
    }
}

fn made<S: Subject>() {
    for keys in [0, 20] {
        enumerate(FAST, &Script::<S>(Act::Make { keys }, PhantomData));
    }
    enumerate(WEAK, &Script::<S>(Act::Make { keys: 0 }, PhantomData));
}

fn dropped<S: Subject>() {
    enumerate(FAST, &Script::<S>(Act::Drop { keys: 20 }, PhantomData));
}

test_every_structure!(made, dropped);
