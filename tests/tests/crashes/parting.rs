//! An owner gives up a part of what it has, and dies after each request of that, or stops and is taken for dead. All that was flushed is
//! there, of what was changed in the part all or nothing; and nothing of who goes on lands, in the part or in the rest.

use std::cell::Cell;

use farlink_offload::{Admission, CacheOptions, ComputeCache, Durability, Holdings, route::Here};
use farlink_runtime::{
    access::{Access, Region as _},
    error::Error,
    one_sided::{Proof, ownership},
    report::Report,
    worker::{Handle, Worker},
};
use farlink_structures::map::{KeyRange, Map};
use farlink_tests::{
    cluster::FAST,
    crash::{Scene, enumerate_every, enumerate_resumed, every},
    subject::{StructureName, Subject},
    test_every_structure,
};

use crate::{
    maps::{self, Op},
    owners::own,
};

/// A key of the rest, beside the script's.
pub(crate) const OF_THE_REST: u64 = 5;
/// The part is from here on.
pub(crate) const CUT: u64 = 200;

#[derive(Debug)]
struct Parting<S> {
    script: maps::Script<S>,
    takes_over: Cell<bool>,
}

/// What an owner has, and its way to that.
struct Owned<S: Subject> {
    map: Map<S, Here<S>>,
    holdings: Holdings<S>,
    worker: Handle,
}

/// Why an operation failed: one on what is not owned any more does not say by itself that its compute server was taken for dead.
async fn told<S: Subject>(worker: &Handle, holdings: &Holdings<S>, error: Error) -> Error {
    match error {
        Error::GivenUp { .. } => ownership::read(worker, holdings.structure()).await.err().unwrap_or(error),
        error => error,
    }
}

/// What is given up: half of what there is, or all, if it cannot be owned in part.
pub(crate) fn part<S: Subject>() -> KeyRange {
    match S::WHICH {
        StructureName::BTree => KeyRange { low: CUT, high: None },
        _ => KeyRange::everything(),
    }
}

impl<S: Subject> Scene for Parting<S> {
    type Open = Owned<S>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare(worker).await
    }

    async fn open(&self, worker: &Worker) -> Result<Owned<S>, Error> {
        let opened: maps::Opened<S> = self.script.open(worker).await?;
        let structure = opened.access().context().structure.clone();
        let mut options = CacheOptions::new(1 << 20);
        (options.page_bytes, options.admission) = (structure.class.bytes(), Admission::Always);
        let holdings = Holdings::new(&structure, ComputeCache::<S>::new(options)?);
        holdings.take(worker, KeyRange::everything()).await?;
        let map = Map::over(holdings.here(worker));
        assert!(map.insert(OF_THE_REST, 1).await?);
        holdings.flush(worker).await?;
        Ok(Owned { map, holdings, worker: Handle::clone(worker) })
    }

    async fn act(&self, Owned { map, holdings, worker }: &Owned<S>) -> Result<(), Error> {
        if let Err(error) = self.script.op.run(map).await {
            return Err(told(worker, holdings, error).await);
        }
        let given_up = holdings.give_up(worker, &part::<S>()).await?;
        let Some(given_up) = given_up else {
            let error = Error::GivenUp { name: maps::MAP.to_owned() };
            return Err(told(worker, holdings, error).await);
        };
        assert!(given_up.low <= self.script.op.key(), "{given_up:?}");
        let refused = self.script.op.run(map).await;
        assert!(matches!(refused, Err(Error::GivenUp { .. })), "{refused:?}");
        // What is left is changed on.
        match map.update(OF_THE_REST, 2).await {
            Err(Error::GivenUp { .. }) if holdings.regions().is_empty() => Ok(()),
            Err(error) => Err(told(worker, holdings, error).await),
            Ok(before) => {
                assert_eq!(before, Some(1));
                holdings.flush(worker).await
            }
        }
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
            let all = KeyRange::everything();
            let owned = own::<S>(worker, map.structure().clone(), all, 1 << 20, Durability::WriteBack).await?;
            let owned = Map::over(owned);
            let value = owned.remove(OF_THE_REST).await?;
            owned.access().close().await?;
            value
        } else {
            map.remove(OF_THE_REST).await?
        };
        let is_all = part::<S>() == KeyRange::everything();
        let expected: &[u64] = if is_all {
            &[1]
        } else if flushed {
            &[2]
        } else {
            &[1, 2]
        };
        assert!(value.is_some_and(|value| expected.contains(&value)), "{value:?}, flushed: {flushed}");
        drop(map);
        self.script.verify(worker, flushed).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

/// One page of the part is changed; one is split, and a page above that the rest shares with it; one is merged.
pub(crate) fn scripts<S: Subject>() -> [maps::Script<S>; 3] {
    let script = |keys: u64, left: u64, op| {
        maps::Script::new((1..=keys).map(|key| key * 10), (left + 1..=keys).map(|key| key * 10), op)
    };
    [script(60, 60, Op::Update(400)), script(130, 130, Op::Insert(1295)), script(60, 44, Op::Remove(440))]
}

fn scenes<S: Subject>() -> [Parting<S>; 3] {
    scripts().map(|script| Parting { script, takes_over: Cell::new(false) })
}

fn dies<S: Subject>() {
    for scene in scenes::<S>() {
        enumerate_every((every() / 25).max(1), FAST, &scene);
    }
}

fn goes_on<S: Subject>() {
    for scene in scenes::<S>() {
        enumerate_resumed(8, FAST, &scene);
    }
}

test_every_structure!(dies, goes_on);
