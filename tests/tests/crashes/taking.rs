//! A compute server takes a part of what others own, and dies after requests of that: the part of a dead one, or one that an owner who
//! lives hands on to it. All that was flushed is there, with what the living one had changed, and others can own the part.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
    time::Duration,
};

use farlink_offload::{
    Admission, CacheOptions, ComputeCache, Durability, Holdings, OwnerServer, Router, Routes, Served,
    route::move_region,
};
use farlink_runtime::{
    access::Region as _,
    catalog,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Fabric,
        listener::ListenOptions,
        mortal::{MortalFabric, Order},
    },
    lock::OwnerId,
    messaging::{ServeMessages, Wait},
    one_sided::Proof,
    report::Report,
    structure::Structure,
    worker::{Handle, Worker},
};
use farlink_structures::map::{KeyRange, Map};
use farlink_tests::{
    bounded::Watchdog,
    cluster::FAST,
    crash::{Member, Scene, enumerate},
    subject::Subject,
    test_every_structure,
};

use crate::{
    maps,
    owners::own,
    parting::{CUT, OF_THE_REST, part, scripts},
};

type Routed<S> = Map<S, Router<S>>;

/// A key of the part, beside the script's.
const OF_THE_PART: u64 = 1001;

/// Who has the part at first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Former {
    /// One that has died, with all that it had changed since its last flush.
    Dead(Durability),
    /// One that lives, and hands it on.
    Living,
}

#[derive(Debug)]
struct Taking<S: Subject> {
    script: maps::Script<S>,
    from: Former,
    /// Where the part begins: between two leaves.
    cut: Cell<u64>,
    takes_over: Cell<bool>,
    living: RefCell<Option<Owner<S>>>,
    /// What the victim has.
    holdings: RefCell<Option<Holdings<S>>>,
}

/// Somebody who owns some, and does what others send.
#[derive(Debug)]
struct Owner<S: Subject> {
    // Before its worker.
    server: Option<OwnerServer>,
    holdings: Holdings<S>,
    member: Member,
}

fn holdings<S: Subject>(structure: &Structure, durability: Durability) -> Result<Holdings<S>, Error> {
    let mut options = CacheOptions::new(1 << 20);
    (options.page_bytes, options.admission) = (structure.class.bytes(), Admission::Always);
    Ok(Holdings::new(structure, ComputeCache::<S>::new(options)?.with_durability(durability)))
}

fn serve<S: Subject>(compute: &Arc<ComputeServer>, holdings: &Holdings<S>) -> Result<OwnerServer, Error> {
    let messages = ServeMessages { wait: Wait::Event, ..ServeMessages::default() };
    let listener = compute.listen(&ListenOptions::default())?;
    OwnerServer::start(listener, compute, vec![Served::new(holdings)], &messages)
}

async fn router<S: Subject>(worker: &Handle, holdings: &Holdings<S>) -> Result<Routed<S>, Error> {
    let routes = Routes::read(worker, holdings.structure().clone()).await?;
    Ok(Map::over(Router::new(worker, &routes, holdings.here(worker))))
}

impl<S: Subject> Owner<S> {
    /// One of this region, in whose part `key` was updated to 2 and flushed, and then to 3.
    fn new(fabric: &Arc<dyn Fabric>, region: KeyRange, durability: Durability) -> Result<Self, Error> {
        let member = Member::join(fabric, 5)?;
        let worker = member.worker();
        let holdings = worker.block_on(async {
            let holdings = holdings::<S>(&catalog::open::<S>(worker, maps::MAP).await?, durability)?;
            holdings.take(worker, region).await?;
            let here = Map::over(holdings.here(worker));
            assert_eq!(here.update(OF_THE_PART, 2).await?, Some(1));
            holdings.flush(worker).await?;
            assert_eq!(here.update(OF_THE_PART, 3).await?, Some(2));
            Ok::<_, Error>(holdings)
        })?;
        Ok(Self { server: None, holdings, member })
    }

    fn id(&self) -> OwnerId {
        self.member.compute().owner()
    }
}

/// The victim's way to all.
struct Open<S: Subject> {
    // Before the worker.
    map: Routed<S>,
    holdings: Holdings<S>,
    worker: Handle,
}

impl<S: Subject> Taking<S> {
    fn new(script: maps::Script<S>, from: Former) -> Self {
        let (cut, takes_over) = (Cell::new(CUT), Cell::new(false));
        Self { script, from, cut, takes_over, living: RefCell::default(), holdings: RefCell::default() }
    }

    /// Whether there is a rest that is never the other one's.
    fn has_rest() -> bool {
        part::<S>() != KeyRange::everything()
    }

    fn part(&self) -> KeyRange {
        if Self::has_rest() { KeyRange { low: self.cut.get(), high: None } } else { KeyRange::everything() }
    }

    fn rest(&self) -> KeyRange {
        KeyRange { low: 0, high: Some(self.cut.get()) }
    }

    fn durability(&self) -> Durability {
        if let Former::Dead(durability) = self.from { durability } else { Durability::WriteBack }
    }
}

impl<S: Subject> Scene for Taking<S> {
    type Open = Open<S>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.script.prepare(worker).await?;
        let map: maps::Opened<S> = Map::open(worker, maps::MAP, Proof::Checksum).await?;
        assert!(map.insert(OF_THE_PART, 1).await? && map.insert(OF_THE_REST, 1).await?);
        if Self::has_rest() {
            self.cut.set(map.leaf_low(CUT).await?);
        }
        Ok(())
    }

    fn others(&self, fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
        if self.from == Former::Living {
            let mut owner = Owner::new(fabric, KeyRange::everything(), Durability::WriteBack)?;
            owner.server = Some(serve(owner.member.compute(), &owner.holdings)?);
            self.living.replace(Some(owner));
            return Ok(());
        }
        let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
        let dead = Owner::<S>::new(&(Arc::new(mortal.clone()) as _), self.part(), self.durability())?;
        mortal.dies_after(0);
        drop(dead);
        Ok(())
    }

    fn serve(&self, victim: &Arc<ComputeServer>) -> Result<Option<OwnerServer>, Error> {
        let worker = victim.worker()?;
        let structure = worker.block_on(catalog::open::<S>(&worker, maps::MAP))?;
        let holdings = holdings::<S>(&structure, self.durability())?;
        let server = serve(victim, &holdings)?;
        self.holdings.replace(Some(holdings));
        Ok(Some(server))
    }

    async fn open(&self, worker: &Worker) -> Result<Open<S>, Error> {
        drop(self.script.open(worker).await?);
        let holdings = self.holdings.take().expect("it serves already");
        if self.from != Former::Living && Self::has_rest() {
            holdings.take(worker, self.rest()).await?;
            assert_eq!(Map::over(holdings.here(worker)).update(OF_THE_REST, 2).await?, Some(1));
            holdings.flush(worker).await?;
        }
        Ok(Open { map: router(worker, &holdings).await?, holdings, worker: Handle::clone(worker) })
    }

    async fn act(&self, Open { map, holdings, worker }: &Open<S>) -> Result<(), Error> {
        let living = self.living.borrow().as_ref().map(Owner::id);
        if let Some(from) = living {
            let moved = move_region(worker, holdings.structure(), &self.part(), from, worker.owner()).await?;
            assert_eq!(moved, Some(self.part()));
        }
        self.script.op.run(map).await?;
        let before = map.update(OF_THE_PART, 4).await?;
        assert!(before.is_some_and(|value| value == 3 || value == 2 && self.from != Former::Living), "{before:?}");
        assert!(holdings.regions().contains(&self.part()), "{:?}", holdings.regions());
        if living.is_none() && Self::has_rest() {
            assert_eq!(map.update(OF_THE_REST, 3).await?, Some(2));
        }
        holdings.flush(worker).await?;
        holdings.give_up_all(worker).await
    }

    /// The owner that lives has what it handed on again, or others own it then.
    fn outlive(&self, acknowledged: bool) -> Result<(), Error> {
        let Some(Owner { server, holdings, member }) = self.living.take() else { return Ok(()) };
        // It has done all that the dead one has sent.
        drop(server);
        let worker = member.worker();
        if self.takes_over.get() {
            worker.block_on(async {
                let map = router(worker, &holdings).await?;
                let found = map.get(OF_THE_PART).await?;
                assert!(if acknowledged { found == Some(4) } else { matches!(found, Some(3 | 4)) }, "{found:?}");
                assert_eq!(map.update(OF_THE_REST, 3).await?, Some(1));
                assert_eq!(map.update(OF_THE_PART, 4).await?, found);
                Ok::<_, Error>(())
            })?;
        }
        worker.block_on(async {
            holdings.flush(worker).await?;
            holdings.give_up_all(worker).await
        })?;
        drop(holdings);
        member.maintain()
    }

    fn take_way(&self, is_other: bool) {
        self.takes_over.set(is_other);
    }

    fn is_swept_first(&self) -> bool {
        !self.takes_over.get()
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let map: maps::Opened<S> = Map::open(worker, maps::MAP, Proof::Checksum).await?;
        let [of_the_part, of_the_rest] = if self.takes_over.get() {
            let all = KeyRange::everything();
            let owned = Map::over(own::<S>(worker, map.structure().clone(), all, 1 << 20, self.durability()).await?);
            let values = [owned.remove(OF_THE_PART).await?, owned.remove(OF_THE_REST).await?];
            owned.access().close().await?;
            values
        } else {
            [map.remove(OF_THE_PART).await?, map.remove(OF_THE_REST).await?]
        };
        drop(map);
        let lowest = if self.from == Former::Dead(Durability::WriteBack) { 2 } else { 3 };
        // The owner that lives has changed it again, and flushed that.
        let is_known = flushed || self.from == Former::Living && self.takes_over.get();
        let lowest = if is_known { 4 } else { lowest };
        assert!(of_the_part.is_some_and(|value| (lowest..=4).contains(&value)), "{of_the_part:?}, flushed: {flushed}");
        let expected = match self.from {
            Former::Living if self.takes_over.get() => 3..=3,
            Former::Dead(_) if Self::has_rest() && flushed => 3..=3,
            Former::Dead(_) if Self::has_rest() => 2..=3,
            _ => 1..=1,
        };
        assert!(of_the_rest.is_some_and(|value| expected.contains(&value)), "{of_the_rest:?}, flushed: {flushed}");
        self.script.verify(worker, flushed).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

fn dies_taking<S: Subject>(from: Former) {
    let _watch = Watchdog::start(format!("taking from {from:?}"), Duration::from_secs(200));
    for script in scripts::<S>() {
        enumerate(FAST, &Taking::new(script, from));
    }
}

fn from_the_dead<S: Subject>() {
    dies_taking::<S>(Former::Dead(Durability::WriteBack));
}

fn from_the_dead_logged<S: Subject>() {
    dies_taking::<S>(Former::Dead(Durability::Logged));
}

fn from_the_living<S: Subject>() {
    dies_taking::<S>(Former::Living);
}

test_every_structure!(from_the_dead, from_the_dead_logged, from_the_living);
