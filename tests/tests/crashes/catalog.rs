//! Structures that are made, filled or dropped when their compute server dies, or cannot free them.

use std::{fmt::Debug, marker::PhantomData, sync::Arc};

use farlink_runtime::{
    access::Plugin,
    audit,
    catalog::{self, CreateOptions},
    error::Error,
    fabric::{
        Fabric,
        mortal::{MortalFabric, Order},
    },
    lock::LockWord,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    report::Report,
    server,
    structure::{OPTIONS, StructurePlacement},
    worker::{Handle, Worker},
};
use farlink_structures::{
    btree::Tree,
    map::Map,
    rtree::{self, Query, RTree, Rect},
};
use farlink_tests::{
    cluster::{self, FAST},
    crash::{Member, Scene, enumerate},
    subject::{StructureName, Subject},
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
struct Script<K>(Act, PhantomData<K>);

/// Structures of a kind, with a number of entries each.
trait Kind: Debug + 'static {
    type Plugin: Plugin;
    const PAGE_BYTES: usize;
    /// So many take several pages.
    const ENTRIES: u64;

    async fn fill(access: OneSided<Self::Plugin>, count: u64) -> Result<(), Error>;

    /// Finds so many.
    async fn find_all(access: OneSided<Self::Plugin>, count: u64) -> Result<(), Error>;

    /// Changes the first: whether it is there.
    async fn change(access: OneSided<Self::Plugin>) -> Result<bool, Error>;
}

type Opened<S> = Map<S, OneSided<S>>;

/// Ordered maps.
#[derive(Debug)]
struct Maps<S>(PhantomData<S>);

/// R-trees.
#[derive(Debug)]
struct Rects;

fn keys(count: u64) -> impl Iterator<Item = (u64, u64)> {
    (1..=count).map(|key| (key * 10, key))
}

impl<S: Subject> Kind for Maps<S> {
    type Plugin = S;
    const PAGE_BYTES: usize = PAGE_BYTES;
    /// Two pages, or some towers.
    const ENTRIES: u64 = if matches!(S::WHICH, StructureName::SkipList) { 4 } else { 20 };

    async fn fill(access: OneSided<S>, count: u64) -> Result<(), Error> {
        S::load(&Map::over(access), keys(count), 0.8).await
    }

    async fn find_all(access: OneSided<S>, count: u64) -> Result<(), Error> {
        assert!(Map::over(access).range(..).take(usize::MAX).await?.into_iter().eq(keys(count)));
        Ok(())
    }

    async fn change(access: OneSided<S>) -> Result<bool, Error> {
        Ok(Map::over(access).update(10, 7).await?.is_some())
    }
}

fn at(x: f64) -> Rect<2> {
    Rect::point([x, 0.0]).expect("it is finite")
}

impl Kind for Rects {
    type Plugin = rtree::Tree<2>;
    const PAGE_BYTES: usize = 1024;
    const ENTRIES: u64 = 40;

    async fn fill(access: OneSided<Self::Plugin>, count: u64) -> Result<(), Error> {
        let entries = (0..count).map(|number| (at(number as f64), number));
        RTree::over(access).bulk_load(entries, 0.8).await.map(drop)
    }

    async fn find_all(access: OneSided<Self::Plugin>, count: u64) -> Result<(), Error> {
        let mut found = RTree::over(access).search(Query::Intersects(Rect::EVERYTHING)).all().await?;
        found.sort_unstable_by_key(|&(_, payload)| payload);
        assert!(found.iter().map(|&(_, payload)| payload).eq(0..count), "{found:?}");
        Ok(())
    }

    async fn change(access: OneSided<Self::Plugin>) -> Result<bool, Error> {
        RTree::over(access).update(at(0.0), 0, at(-1.0)).await
    }
}

async fn make<K: Kind>(worker: &Handle, name: &str, count: u64) -> Result<OneSided<K::Plugin>, Error> {
    let range = K::Plugin::ROOT_BYTES;
    let class = SizeClass::of_bytes(K::PAGE_BYTES.clamp(*range.start(), *range.end())).expect("a size class");
    let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
    let fill = async move |access: &OneSided<K::Plugin>| K::fill(access.clone(), count).await;
    catalog::create_with(worker, name, &options, Proof::Checksum, fill).await
}

async fn open<K: Kind>(worker: &Handle, name: &str) -> Result<OneSided<K::Plugin>, Error> {
    Ok(OneSided::new(worker, catalog::open::<K::Plugin>(worker, name).await?, Proof::Checksum))
}

impl<K: Kind> Scene for Script<K> {
    type Open = Handle;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        make::<K>(worker, BYSTANDER, 1).await?;
        if let Act::Drop { keys } = self.0 {
            make::<K>(worker, NAME, keys).await?;
        }
        Ok(())
    }

    async fn open(&self, worker: &Worker) -> Result<Handle, Error> {
        Ok(Handle::clone(worker))
    }

    async fn act(&self, worker: &Handle) -> Result<(), Error> {
        match self.0 {
            Act::Make { keys } => make::<K>(worker, NAME, keys).await.map(drop),
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
            let opened = open::<K>(worker, NAME).await?;
            K::find_all(opened.clone(), count).await?;
            assert_eq!(K::change(opened.clone()).await?, count > 0);
            let report = K::Plugin::check(&opened).await?;
            assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{report:?}");
            catalog::destroy(worker, NAME).await?;
        }
        // The name is free.
        let anew = make::<K>(worker, NAME, count + 1).await?;
        K::find_all(anew.clone(), count + 1).await?;
        assert!(K::change(anew).await?);
        catalog::destroy(worker, NAME).await?;
        let all: Vec<String> = catalog::list(worker).await?.into_iter().map(|structure| structure.name).collect();
        assert_eq!(all, [BYSTANDER]);
        Ok(())
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        // So that it takes no page itself.
        let bystander = open::<K>(worker, BYSTANDER).await?.beside_owners();
        K::find_all(bystander.clone(), 1).await?;
        K::Plugin::check(&bystander).await
    }
}

fn make_each<K: Kind>() {
    enumerate(FAST, &Script::<K>(Act::Make { keys: K::ENTRIES }, PhantomData));
}

fn drop_each<K: Kind>() {
    enumerate(FAST, &Script::<K>(Act::Drop { keys: K::ENTRIES }, PhantomData));
}

fn made<S: Subject>() {
    make_each::<Maps<S>>();
}

fn dropped<S: Subject>() {
    drop_each::<Maps<S>>();
}

test_every_structure!(made, dropped; bwtree: made, dropped);

#[test]
fn an_r_tree_is_made() {
    make_each::<Rects>();
}

#[test]
fn an_r_tree_is_dropped() {
    drop_each::<Rects>();
}

fn fabric() -> Result<Arc<dyn Fabric>, Error> {
    Ok(Arc::new(server::in_process(1, 2 << 20, FAST)?))
}

fn assert_empty(fabric: &Arc<dyn Fabric>, context: &str) -> Result<(), Error> {
    let auditor = Member::join(fabric, 1000)?;
    auditor.maintain()?;
    assert!(auditor.worker().block_on(catalog::list(auditor.worker()))?.is_empty(), "{context}");
    let memory = auditor.worker().block_on(audit::memory(auditor.worker()))?;
    assert_eq!(memory.used_bytes(), 0, "{context}: of {memory:?}");
    Ok(())
}

/// It dies after so many requests of a change, and another one drops the structure before anybody looks for the dead; whether it lives.
fn lives_changing(after: u64, change: impl AsyncFnOnce(&Opened<Tree>) -> Result<(), Error>) -> Result<bool, Error> {
    let fabric = fabric()?;
    cluster::create::<Tree>(&fabric, NAME, PAGE_BYTES, Proof::Checksum)?;
    cluster::load::<Tree>(&fabric, NAME, keys(60), 1.0)?;
    let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let victim = Member::join(&(Arc::new(mortal.clone()) as _), 1)?;
    let map = victim.worker().block_on(Opened::<Tree>::open(victim.worker(), NAME, Proof::Checksum))?;
    // From now on it is a user.
    victim.worker().block_on(map.update(10, 10))?;
    mortal.dies_after(after);
    let lives = victim.worker().block_on(change(&map)).is_ok();
    drop(map);
    mortal.dies_after(0);
    drop(victim);
    let other = Member::join(&fabric, 2)?;
    other.worker().block_on(catalog::destroy(other.worker(), NAME))?;
    other.maintain()?;
    drop(other);
    assert_empty(&fabric, &format!("after {after} requests"))?;
    Ok(lives)
}

#[test]
fn what_a_dead_one_has_locked_goes_with_the_structure() -> Result<(), Error> {
    let plays: [fn(u64) -> Result<bool, Error>; 2] = [
        |after| lives_changing(after, async |map| map.update(20, 1).await.map(drop)),
        // A leaf is split.
        |after| lives_changing(after, async |map| map.insert(25, 1).await.map(drop)),
    ];
    for play in plays {
        let mut after = 0;
        while !play(after)? {
            after += 1;
        }
        assert!(after > 2, "{after}");
    }
    Ok(())
}

/// It dies while it fills a new structure: a page is locked for one word, of which no record tells.
#[test]
fn what_was_locked_as_it_was_made_is_freed() -> Result<(), Error> {
    let (mut after, mut lives) = (0, false);
    while !lives {
        let fabric = fabric()?;
        let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let victim = Member::join(&(Arc::new(mortal.clone()) as _), 1)?;
        let class = SizeClass::of_bytes(PAGE_BYTES).expect("a size class");
        let options = CreateOptions { class, placement: StructurePlacement::default(), options: [0; OPTIONS] };
        let dying = mortal.clone();
        let fill = async move |access: &OneSided<Tree>| {
            let map = Map::over(access.clone());
            map.insert(1, 1).await?;
            dying.dies_after(after);
            map.update(1, 2).await.map(drop)
        };
        let worker = victim.worker();
        lives = worker.block_on(catalog::create_with(worker, NAME, &options, Proof::Checksum, fill)).is_ok();
        mortal.dies_after(0);
        drop(victim);
        let survivor = Member::join(&fabric, 2)?;
        survivor.maintain()?;
        let dropped = survivor.worker().block_on(catalog::destroy(survivor.worker(), NAME));
        assert!(matches!(dropped, Ok(_) | Err(Error::NoSuchName { .. })), "{dropped:?}");
        drop(survivor);
        assert_empty(&fabric, &format!("after {after} requests"))?;
        after += 1;
    }
    assert!(after > 4, "{after}");
    Ok(())
}

/// Somebody who lives has a page locked: what cannot be freed then is freed later, by who has dropped it or, if that one leaves, by others.
#[test]
fn what_cannot_be_freed_at_once_is_freed_later() -> Result<(), Error> {
    for leaves in [false, true] {
        let fabric = fabric()?;
        cluster::create::<Tree>(&fabric, NAME, PAGE_BYTES, Proof::Checksum)?;
        let (holder, dropping) = (Member::join(&fabric, 1)?, Member::join(&fabric, 2)?);
        let worker = holder.worker();
        let root = worker.block_on(catalog::find(worker, NAME))?.root;
        let unlocked = worker.block_on(worker.load(root)).map_err(|error| *error)?;
        let set = |word| worker.block_on(worker.write_word(root, word)).map_err(|error| *error);
        set(LockWord::from_word(unlocked).locked_by(holder.compute().owner()).word())?;
        let dropped = dropping.worker().block_on(catalog::destroy(dropping.worker(), NAME));
        assert!(matches!(dropped, Err(Error::OwnerStalled { page, .. }) if page == root), "{dropped:?}");
        assert!(matches!(dropping.maintain_once(), Err(Error::OwnerStalled { .. })));
        let made = worker.block_on(make::<Maps<Tree>>(worker, NAME, 1)).map(drop);
        assert!(matches!(made, Err(Error::NameTaken { .. })), "{made:?}");
        if leaves {
            drop(dropping);
            set(unlocked)?;
            holder.maintain_once()?;
        } else {
            set(unlocked)?;
            dropping.maintain_once()?;
            drop(dropping);
        }
        worker.block_on(make::<Maps<Tree>>(worker, NAME, 1)).map(drop)?;
        worker.block_on(catalog::destroy(worker, NAME))?;
        drop(holder);
        assert_empty(&fabric, &format!("leaves: {leaves}"))?;
    }
    Ok(())
}

/// Two have died that were dropping a structure, and of one of these somebody who lives has a page locked. That keeps nobody from the other's
/// name.
#[test]
fn what_one_has_left_keeps_nobody_from_the_name_of_another() -> Result<(), Error> {
    let fabric = fabric()?;
    let holder = Member::join(&fabric, 1)?;
    let worker = holder.worker();
    let set = |root, word| worker.block_on(worker.write_word(root, word)).map_err(|error| *error);
    let mut locked = Vec::new();
    for name in [NAME, BYSTANDER] {
        cluster::create::<Tree>(&fabric, name, PAGE_BYTES, Proof::Checksum)?;
        let root = worker.block_on(catalog::find(worker, name))?.root;
        let unlocked = worker.block_on(worker.load(root)).map_err(|error| *error)?;
        set(root, LockWord::from_word(unlocked).locked_by(holder.compute().owner()).word())?;
        locked.push((root, unlocked));
        let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let victim = Member::join(&(Arc::new(mortal.clone()) as _), 2)?;
        let dropped = victim.worker().block_on(catalog::destroy(victim.worker(), name));
        assert!(matches!(dropped, Err(Error::OwnerStalled { page, .. }) if page == root), "{dropped:?}");
        mortal.dies_after(0);
    }
    let [(of_name, unlocked), (of_bystander, unlocked_later)] = locked[..] else { panic!("there were two") };
    set(of_name, unlocked)?;
    worker.block_on(make::<Maps<Tree>>(worker, NAME, 1)).map(drop)?;
    set(of_bystander, unlocked_later)?;
    worker.block_on(catalog::destroy(worker, NAME))?;
    holder.maintain_once()?;
    drop(holder);
    assert_empty(&fabric, "two that died")
}
