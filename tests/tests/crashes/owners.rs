//! Ordered maps and R-trees in the cache of an owner, which dies after each request of a change and the flush behind it. Others take
//! over, or write one-sided. All that was stored and flushed before is there, and of the change all or nothing; where all is
//! logged, every operation that has answered is there, and so is what a memory server has carried out.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt::Debug,
    sync::Arc,
};

use farlink_offload::{
    Admission, CacheOptions, Cached, ComputeCache, Durability, Engine, EngineOptions, Policies, policy::Always,
};
use farlink_runtime::{
    access::{Operation, Plugin, Region as _},
    audit, catalog,
    error::Error,
    fabric::{
        Fabric,
        mortal::{MortalFabric, Order},
    },
    one_sided::{OneSided, Proof},
    operation::Run,
    ptr::ServerId,
    report::Report,
    server,
    structure::{PlacementPolicy, Structure, StructurePlacement},
    worker::{Handle, Worker},
};
use farlink_structures::{
    btree::Tree,
    map::Map,
    rtree::{self, RTree},
};
use farlink_tests::{
    cluster::{self, FAST},
    crash::{Member, MemoryServers, Scene, enumerate, enumerate_one_in, enumerate_resumed, enumerate_sweepers, every},
    settings,
    subject::Subject,
    test_every_structure,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{maps, rtrees};

/// Access to all of a structure, through a cache that holds all of it or as little as can be.
pub(crate) async fn own<P: Plugin>(
    worker: &Worker,
    structure: Structure,
    region: P::Region,
    bytes: usize,
    durability: Durability,
) -> Result<Cached<P>, Error> {
    let options = options(&structure, bytes);
    ComputeCache::<P>::new(options)?.with_durability(durability).own(worker, structure, region).await
}

fn options(structure: &Structure, bytes: usize) -> CacheOptions {
    let mut options = CacheOptions::new(bytes);
    (options.page_bytes, options.admission) = (structure.class.bytes(), Admission::Always);
    options
}

const CACHE_BYTES: usize = 1 << 20;
/// Little enough for pages to leave.
const CACHE_BYTES_MIN: usize = 64 << 10;

/// What an owner does with a structure of some kind, beside entries of its own.
pub(crate) trait Owns: Scene + Debug {
    type Plugin: Plugin;
    const NAME: &'static str;

    /// [`Scene::prepare`], with pages here.
    async fn prepare_at(&self, worker: &Worker, placed: StructurePlacement) -> Result<(), Error>;

    /// The script's operation.
    async fn run(&self, on: &Reached<Self::Plugin>) -> Result<(), Error>;

    /// Adds the first of the owner's entries.
    async fn begin(on: &Reached<Self::Plugin>) -> Result<(), Error>;

    /// Changes it.
    async fn go_on(on: &Reached<Self::Plugin>) -> Result<(), Error>;

    /// Takes it away: whether it was there, and whether it was changed.
    async fn end(on: &Reached<Self::Plugin>) -> Result<Option<bool>, Error>;

    /// Adds one more entry, or takes it away.
    async fn set(on: &Reached<Self::Plugin>, number: u64, is_there: bool) -> Result<(), Error>;

    /// Takes one away: whether it was there.
    async fn take(on: &Reached<Self::Plugin>, number: u64) -> Result<bool, Error>;
}

/// A structure, as somebody reaches it.
#[derive(Clone)]
pub(crate) enum Reached<P: Plugin> {
    OneSided(OneSided<P>),
    Cached(Cached<P>),
    Engine(Engine<P>),
}

impl<P: Plugin> Reached<P> {
    fn cached(&self) -> &Cached<P> {
        match self {
            Self::OneSided(_) => panic!("it is nobody's"),
            Self::Cached(cached) => cached,
            Self::Engine(engine) => engine.cached(),
        }
    }

    /// Operations that memory servers have carried out.
    fn shipped(&self) -> u64 {
        if let Self::Engine(engine) = self { engine.counts().shipped } else { 0 }
    }
}

impl<P: Plugin> Run for Reached<P> {
    type Plugin = P;

    async fn execute<O: Operation<Plugin = P>>(&self, operation: &O) -> Result<O::Output, Error> {
        match self {
            Self::OneSided(it) => it.execute(operation).await,
            Self::Cached(it) => it.execute(operation).await,
            Self::Engine(it) => it.execute(operation).await,
        }
    }
}

/// Written back before anybody dies.
const FLUSHED: u64 = u64::MAX - 1;

impl<S: Subject> Owns for maps::Script<S> {
    type Plugin = S;
    const NAME: &'static str = maps::MAP;

    async fn prepare_at(&self, worker: &Worker, placed: StructurePlacement) -> Result<(), Error> {
        maps::Script::prepare_at(self, worker, placed).await
    }

    async fn run(&self, on: &Reached<S>) -> Result<(), Error> {
        self.op.run(&Map::over(on.clone())).await
    }

    async fn begin(on: &Reached<S>) -> Result<(), Error> {
        assert!(Map::over(on.clone()).insert(FLUSHED, 1).await?);
        Ok(())
    }

    async fn go_on(on: &Reached<S>) -> Result<(), Error> {
        assert_eq!(Map::over(on.clone()).update(FLUSHED, 2).await?, Some(1));
        Ok(())
    }

    async fn end(on: &Reached<S>) -> Result<Option<bool>, Error> {
        let value = Map::over(on.clone()).remove(FLUSHED).await?;
        assert!(value.is_none_or(|value| [1, 2].contains(&value)), "{value:?}");
        Ok(value.map(|value| value == 2))
    }

    async fn set(on: &Reached<S>, number: u64, is_there: bool) -> Result<(), Error> {
        let (map, key) = (Map::over(on.clone()), of_owner(number));
        match is_there {
            true => map.insert(key, key).await.map(drop),
            false => map.remove(key).await.map(drop),
        }
    }

    async fn take(on: &Reached<S>, number: u64) -> Result<bool, Error> {
        let key = of_owner(number);
        let found = Map::over(on.clone()).remove(key).await?;
        assert!(found.is_none_or(|value| value == key), "{key}: {found:?}");
        Ok(found.is_some())
    }
}

/// Keys among all others.
fn of_owner(number: u64) -> u64 {
    number * 7919 % 1500 * 10 + 6
}

impl Owns for rtrees::Script {
    type Plugin = rtree::Tree<2>;
    const NAME: &'static str = rtrees::TREE;

    async fn prepare_at(&self, worker: &Worker, placed: StructurePlacement) -> Result<(), Error> {
        rtrees::Script::prepare_at(self, worker, placed).await
    }

    async fn run(&self, on: &Reached<Self::Plugin>) -> Result<(), Error> {
        self.op.run(&RTree::over(on.clone())).await
    }

    async fn begin(on: &Reached<Self::Plugin>) -> Result<(), Error> {
        RTree::over(on.clone()).insert(rtrees::rect(1), FLUSHED).await
    }

    async fn go_on(on: &Reached<Self::Plugin>) -> Result<(), Error> {
        assert!(RTree::over(on.clone()).update(rtrees::rect(1), FLUSHED, rtrees::moved(1)).await?);
        Ok(())
    }

    async fn end(on: &Reached<Self::Plugin>) -> Result<Option<bool>, Error> {
        let tree = RTree::over(on.clone());
        let is_moved = tree.delete(rtrees::moved(1), FLUSHED).await?;
        let is_there = tree.delete(rtrees::rect(1), FLUSHED).await?;
        assert!(!(is_moved && is_there), "it is at both places");
        Ok((is_moved || is_there).then_some(is_moved))
    }

    async fn set(on: &Reached<Self::Plugin>, number: u64, is_there: bool) -> Result<(), Error> {
        let (tree, (rect, payload)) = (RTree::over(on.clone()), of_rtree_owner(number));
        match is_there {
            true => tree.insert(rect, payload).await,
            false => tree.delete(rect, payload).await.map(drop),
        }
    }

    async fn take(on: &Reached<Self::Plugin>, number: u64) -> Result<bool, Error> {
        let (rect, payload) = of_rtree_owner(number);
        RTree::over(on.clone()).delete(rect, payload).await
    }
}

/// Entries among all others.
fn of_rtree_owner(number: u64) -> (rtree::Rect<2>, u64) {
    (rtrees::rect(number * 7919 % 2000), 1_000_000 + number)
}

/// What an owner does between two flushes.
#[derive(Debug)]
struct Owner<K> {
    script: K,
    /// After the script's operation: entries that are added, and then taken away again but for the first.
    more: std::ops::Range<u64>,
    cache_bytes: usize,
    durability: Durability,
    /// Whether memory servers carry out what misses.
    ships: bool,
    /// Whether others take over, or write one-sided.
    takes_over: Cell<bool>,
    /// Whether the script's operation has answered, and lasts.
    lasts: Cell<bool>,
    /// Whether the change of its first entry does.
    went_on: Cell<bool>,
    /// Of the entries that are added beside: whether each is there; `None`: nobody can know.
    answered: RefCell<BTreeMap<u64, Option<bool>>>,
    /// Operations that memory servers have carried out.
    shipped: Cell<u64>,
}

impl<K: Owns> Owner<K> {
    fn of(script: K) -> Self {
        Self {
            script,
            more: 0..0,
            cache_bytes: CACHE_BYTES,
            durability: Durability::WriteBack,
            ships: false,
            takes_over: Cell::new(false),
            lasts: Cell::new(false),
            went_on: Cell::new(false),
            answered: RefCell::default(),
            shipped: Cell::new(0),
        }
    }

    async fn own(&self, worker: &Handle) -> Result<Reached<K::Plugin>, Error> {
        let structure = catalog::open::<K::Plugin>(worker, K::NAME).await?;
        let mut options = options(&structure, self.cache_bytes);
        options.excludes_subtrees = self.ships;
        let cache = ComputeCache::new(options)?.with_durability(self.durability);
        let owned = cache.own(worker, structure, <K::Plugin as Plugin>::Region::everything()).await?;
        Ok(match self.ships {
            false => Reached::Cached(owned),
            true => Reached::Engine(Engine::new(owned, Policies::new(Always), EngineOptions { level_max: None })?),
        })
    }

    /// As others reach it.
    async fn one_sided(worker: &Worker) -> Result<Reached<K::Plugin>, Error> {
        let structure = catalog::open::<K::Plugin>(worker, K::NAME).await?;
        Ok(Reached::OneSided(OneSided::new(worker, structure, Proof::Checksum)))
    }

    /// Runs an operation; whether what it has done lasts once it has answered: if all is logged, or a memory server has done it.
    async fn run(
        &self,
        on: &Reached<K::Plugin>,
        operation: impl Future<Output = Result<(), Error>>,
    ) -> Result<bool, Error> {
        let shipped = on.shipped();
        operation.await?;
        self.shipped.set(on.shipped().max(self.shipped.get()));
        Ok(self.durability == Durability::Logged || on.shipped() > shipped)
    }

    /// All that it does before the last flush.
    async fn change(&self, owned: &Reached<K::Plugin>) -> Result<(), Error> {
        self.lasts.set(false);
        self.answered.borrow_mut().clear();
        self.lasts.set(self.run(owned, self.script.run(owned)).await?);
        for number in self.more.clone() {
            self.set(owned, number, true).await?;
        }
        for number in self.more.clone().skip(1) {
            self.set(owned, number, false).await?;
        }
        Ok(())
    }

    /// Adds one of its entries, or takes it away.
    async fn set(&self, on: &Reached<K::Plugin>, number: u64, is_there: bool) -> Result<(), Error> {
        self.answered.borrow_mut().insert(number, None);
        let lasts = self.run(on, K::set(on, number, is_there)).await?;
        self.answered.borrow_mut().insert(number, lasts.then_some(is_there));
        Ok(())
    }

    /// That what was answered, and lasts, is there; and nothing that was never begun.
    fn assert_there(&self, number: u64, is_found: bool) {
        let answered = self.answered.borrow().get(&number).copied();
        if let Some(is_there) = answered.unwrap_or(Some(false)) {
            assert_eq!(is_found, is_there, "{number}");
        }
    }
}

impl<K: Owns> Scene for Owner<K> {
    type Open = Reached<K::Plugin>;

    fn memory_servers(&self) -> MemoryServers {
        if self.ships { MemoryServers::Serve } else { MemoryServers::Passive }
    }

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        let placed = match self.ships {
            false => StructurePlacement::default(),
            true => StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(0) },
        };
        self.script.prepare_at(worker, placed).await
    }

    async fn open(&self, worker: &Worker) -> Result<Self::Open, Error> {
        drop(self.script.open(worker).await?);
        let owned = self.own(worker).await?;
        K::begin(&owned).await?;
        owned.cached().flush().await?;
        self.went_on.set(self.run(&owned, K::go_on(&owned)).await?);
        Ok(owned)
    }

    async fn act(&self, owned: &Self::Open) -> Result<(), Error> {
        self.change(owned).await?;
        owned.cached().flush().await
    }

    fn take_way(&self, is_other: bool) {
        self.takes_over.set(is_other);
    }

    fn is_swept_first(&self) -> bool {
        !self.takes_over.get()
    }

    async fn verify(&self, worker: &Worker, flushed: bool) -> Result<(), Error> {
        let reached = match self.takes_over.get() {
            true => {
                let structure = catalog::open::<K::Plugin>(worker, K::NAME).await?;
                let all = <K::Plugin as Plugin>::Region::everything();
                Reached::Cached(own(worker, structure, all, self.cache_bytes, self.durability).await?)
            }
            false => Self::one_sided(worker).await?,
        };
        let is_changed = K::end(&reached).await?;
        for number in self.more.clone() {
            self.assert_there(number, K::take(&reached, number).await?);
        }
        if let Reached::Cached(owned) = &reached {
            owned.close().await?;
        }
        let is_right = is_changed == Some(true) || is_changed == Some(false) && !flushed && !self.went_on.get();
        assert!(is_right, "{is_changed:?}, flushed: {flushed}");
        self.script.verify(worker, flushed || self.lasts.get()).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.script.check(worker).await
    }
}

/// Requests of an owner's flush after which it dies whose heir dies, too: its log is written, and some of its pages.
const FLUSHING: u64 = 4;

/// Who becomes the owner in the place of a dead one, changes some, and gives up in order; it dies after requests of all that.
#[derive(Debug)]
struct Heir<K>(Owner<K>);

impl<K: Owns> Heir<K> {
    async fn inherit(&self, worker: &Handle) -> Result<(), Error> {
        let Self(owner) = self;
        let owned = owner.own(worker).await?;
        owner.went_on.set(owner.run(&owned, K::go_on(&owned)).await?);
        owner.lasts.set(owner.run(&owned, owner.script.run(&owned)).await?);
        for number in owner.more.clone().step_by(4) {
            owner.set(&owned, number, false).await?;
        }
        owned.cached().close().await
    }
}

impl<K: Owns> Scene for Heir<K> {
    type Open = Handle;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.0.prepare(worker).await
    }

    fn others(&self, fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
        let Self(owner) = self;
        owner.answered.borrow_mut().clear();
        let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
        let dead = Member::join(&(Arc::new(mortal.clone()) as _), 5)?;
        let worker = dead.worker();
        worker.block_on(async {
            let owned = owner.own(worker).await?;
            K::begin(&owned).await?;
            owned.cached().flush().await?;
            for number in owner.more.clone() {
                owner.set(&owned, number, true).await?;
            }
            mortal.dies_after(FLUSHING);
            assert!(owned.cached().flush().await.is_err(), "it was to die");
            Ok(())
        })
    }

    async fn open(&self, worker: &Worker) -> Result<Handle, Error> {
        drop(self.0.script.open(worker).await?);
        Ok(Handle::clone(worker))
    }

    async fn act(&self, worker: &Handle) -> Result<(), Error> {
        let Self(owner) = self;
        owner.lasts.set(false);
        owner.went_on.set(false);
        match self.inherit(worker).await {
            Err(Error::GivenUp { name }) => {
                worker.check_standing()?;
                Err(Error::GivenUp { name })
            }
            outcome => outcome,
        }
    }

    fn take_way(&self, is_other: bool) {
        self.0.take_way(is_other);
    }

    fn is_swept_first(&self) -> bool {
        self.0.is_swept_first()
    }

    async fn verify(&self, worker: &Worker, has_closed: bool) -> Result<(), Error> {
        self.0.verify(worker, has_closed).await
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        self.0.check(worker).await
    }
}

/// Such that take over from a dead one who had split pages, and split or merge some.
fn heirs_of<K: Owns>(scripts: impl IntoIterator<Item = K>) -> impl Iterator<Item = Heir<K>> {
    in_turn(scripts.into_iter()).map(|owner| Heir(Owner { more: 0..40, ..owner }))
}

fn heirs<S: Subject>() {
    for heir in heirs_of(maps::scripts::<S>().into_iter().skip(5).step_by(5).take(4)) {
        enumerate(FAST, &heir);
    }
}

/// One that was only stopped, and goes on.
fn heirs_go_on<S: Subject>() {
    for heir in heirs_of(maps::scripts::<S>().into_iter().skip(6).step_by(8).take(2)) {
        enumerate_resumed(100, FAST, &heir);
    }
}

/// An owner that drops its cache and leaves the cluster dies after so many requests of that; how many it makes.
fn dies_leaving<K: Owns>(owner: &Owner<K>, after: u64) -> Result<u64, Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(2, 2 << 20, FAST)?);
    cluster::with_worker(&fabric, |worker| worker.block_on(owner.prepare(worker)))?;
    let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let leaver = Member::join(&(Arc::new(mortal.clone()) as _), 1)?;
    leaver.worker().block_on(async {
        let owned = owner.open(leaver.worker()).await?;
        owner.change(&owned).await
    })?;
    mortal.dies_after(after);
    drop(leaver);
    let (requests, _) = mortal.since_told();
    mortal.dies_after(0);
    let survivor = Member::join(&fabric, 2)?;
    if owner.is_swept_first() {
        survivor.maintain()?;
    }
    survivor.worker().block_on(owner.verify(survivor.worker(), false))?;
    survivor.maintain()?;
    drop(survivor);
    let auditor = Member::join(&fabric, 3)?;
    auditor.maintain()?;
    let report = auditor.worker().block_on(owner.check(auditor.worker()))?;
    assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
    let used = auditor.worker().block_on(audit::memory(auditor.worker()))?.used_bytes();
    assert_eq!(used, report.bytes, "bytes are in use that are not the structure's");
    Ok(requests)
}

fn leaves<K: Owns>(script: impl Fn() -> K) {
    for durability in [Durability::WriteBack, Durability::Logged] {
        let owner = Owner { more: 0..40, durability, ..Owner::of(script()) };
        let mut rng = StdRng::seed_from_u64(settings::seed(&format!("{owner:?} leaves")));
        let first: u64 = rng.random();
        let mut play = |after| {
            owner.take_way(rng.random());
            println!("dies after {after} requests of leaving; others take over: {}", owner.takes_over.get());
            dies_leaving(&owner, after).unwrap_or_else(|error| panic!("after {after} requests of leaving: {error}"))
        };
        // More than it makes.
        let requests = play(u64::MAX - 1);
        let every = (every() / 6).max(1);
        assert!(requests > 0, "it asks for nothing as it leaves");
        (first % every.min(requests)..requests).step_by(every as usize).for_each(|after| {
            play(after);
        });
    }
}

fn dies_as_it_leaves<S: Subject>() {
    leaves(|| maps::Script::<S>::new((1..=60).map(|key| key * 10), [], maps::Op::Insert(65)));
}

fn write_back<S: Subject>() {
    for script in maps::scripts::<S>() {
        enumerate(FAST, &Owner::of(script));
    }
}

/// Pages leave the cache all the time, and the log is written again and again.
fn pages_leave<S: Subject>() {
    let script = maps::Script::<S>::new((1..=1500).map(|key| key * 10), [], maps::Op::Insert(65));
    let owner = Owner { more: 0..60, cache_bytes: CACHE_BYTES_MIN, ..Owner::of(script) };
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

/// Both modes in turn.
fn in_turn<K: Owns>(scripts: impl Iterator<Item = K>) -> impl Iterator<Item = Owner<K>> {
    let modes = [Durability::WriteBack, Durability::Logged].into_iter().cycle();
    scripts.zip(modes).map(|(script, durability)| Owner { durability, ..Owner::of(script) })
}

/// Nobody has taken over when who replays the log dies.
fn who_replays_dies_too<S: Subject>() {
    for owner in in_turn(maps::scripts::<S>().into_iter().skip(6).step_by(8)) {
        enumerate_sweepers(FAST, &owner, 2);
    }
}

/// An owner that was only stopped, and goes on once others have taken over.
fn goes_on<S: Subject>() {
    for owner in in_turn(maps::scripts::<S>().into_iter().skip(2).step_by(5)) {
        enumerate_resumed(4, FAST, &owner);
    }
}

/// Memory servers carry out what misses: some of the operations, at least.
fn ships<K: Owns>(share: u64, owners: impl IntoIterator<Item = Owner<K>>) {
    let mut shipped = 0;
    for owner in owners {
        let owner = Owner { ships: true, ..owner };
        enumerate_one_in(share, FAST, &owner);
        shipped += owner.shipped.get();
    }
    // One death that is played again may come before all that is.
    assert!(shipped > 0 || std::env::var_os("FARLINK_CRASH_DEATH").is_some(), "nothing was shipped");
}

test_every_structure!(
    write_back,
    pages_leave,
    logged,
    pages_leave_logged,
    who_replays_dies_too,
    goes_on,
    heirs,
    heirs_go_on,
    dies_as_it_leaves,
);

/// Changes of pages that are not cached: one alone, and such as split or merge some. (Those of a skip list are never shipped.)
#[test]
fn btrees_shipped() {
    let even = || (1..=60).map(|key| key * 10);
    let grown = (0..8)
        .map(|more| maps::Script::<Tree>::new(even().chain((0..more).map(|key| 151 + key)), [], maps::Op::Insert(159)));
    let shrunk =
        (1..5).map(|less| maps::Script::new(even(), (0..less).map(|key| 200 + key * 10), maps::Op::Remove(180)));
    let scripts = grown.chain(shrunk).chain([maps::Script::new(even(), [], maps::Op::Update(200))]);
    ships(1, in_turn(scripts).map(|owner| Owner { more: 0..3, ..owner }));
}

#[test]
fn rtrees_write_back() {
    for script in rtrees::scripts() {
        enumerate(FAST, &Owner::of(script));
    }
}

#[test]
fn rtrees_logged() {
    for script in rtrees::scripts() {
        enumerate(FAST, &Owner { durability: Durability::Logged, ..Owner::of(script) });
    }
}

#[test]
fn rtrees_pages_leave() {
    for durability in [Durability::WriteBack, Durability::Logged] {
        let script = rtrees::Script::with(1500, rtrees::Op::Move(17));
        let owner = Owner { more: 0..60, cache_bytes: CACHE_BYTES_MIN, durability, ..Owner::of(script) };
        enumerate_one_in(8, FAST, &owner);
    }
}

#[test]
fn who_replays_an_rtree_dies_too() {
    for owner in in_turn(rtrees::scripts().into_iter().skip(4).step_by(4)) {
        enumerate_sweepers(FAST, &owner, 2);
    }
}

#[test]
fn rtrees_go_on() {
    for owner in in_turn(rtrees::scripts().into_iter().skip(3).step_by(3)) {
        enumerate_resumed(4, FAST, &owner);
    }
}

#[test]
fn rtrees_heirs() {
    for heir in heirs_of(rtrees::scripts().into_iter().skip(4).step_by(5)) {
        enumerate(FAST, &heir);
        enumerate_resumed(100, FAST, &heir);
    }
}

#[test]
fn rtrees_die_as_they_leave() {
    leaves(|| rtrees::Script::with(60, rtrees::Op::Move(17)));
}

#[test]
fn rtrees_shipped() {
    ships(1, in_turn(rtrees::scripts().into_iter()).map(|owner| Owner { more: 0..3, ..owner }));
}

/// Pages leave the cache, and memory servers change them while the log has them as they were.
#[test]
fn pages_leave_and_are_changed_there() {
    let tree = || maps::Script::<Tree>::new((1..=1500).map(|key| key * 10), [], maps::Op::Update(200));
    let small = |owner| Owner { more: 0..60, cache_bytes: CACHE_BYTES_MIN, ..owner };
    ships(8, in_turn([tree(), tree()].into_iter()).map(small));
    let tree = || rtrees::Script::with(1500, rtrees::Op::Insert(1500));
    let small = |owner| Owner { more: 0..60, cache_bytes: CACHE_BYTES_MIN, ..owner };
    ships(8, in_turn([tree(), tree()].into_iter()).map(small));
}
