//! Ordered maps.

use std::{collections::BTreeMap, fmt, marker::PhantomData};

use farlink_runtime::{
    access::Access,
    error::Error,
    one_sided::{OneSided, Proof},
    operation::Run,
    page::SizeClass,
    pages::allocate,
    ptr::ServerId,
    report::Report,
    structure::{Placement, StructurePlacement},
    worker::Worker,
};
use farlink_structures::map::Map;
use farlink_tests::{
    cluster::{FAST, WEAK},
    crash::{Scene, enumerate, enumerate_resumed, enumerate_sweepers, every},
    subject::{StructureName, Subject},
    test_every_structure,
};

pub(crate) const MAP: &str = "map";
pub(crate) const PAGE_BYTES: usize = 256;

pub(crate) type Opened<S> = Map<S, OneSided<S>>;

/// An operation of the victim's script.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Insert(u64),
    Update(u64),
    Remove(u64),
}

impl Op {
    pub(crate) async fn run<S: Subject, A: Run<Plugin = S>>(self, map: &Map<S, A>) -> Result<(), Error> {
        match self {
            Self::Insert(key) => map.insert(key, !key).await.map(drop),
            Self::Update(key) => map.update(key, !key).await.map(drop),
            Self::Remove(key) => map.remove(key).await.map(drop),
        }
    }

    fn apply(self, model: &mut BTreeMap<u64, u64>) {
        match self {
            Self::Insert(key) | Self::Update(key) => model.insert(key, !key),
            Self::Remove(key) => model.remove(&key),
        };
    }

    pub(crate) fn key(self) -> u64 {
        let (Self::Insert(key) | Self::Update(key) | Self::Remove(key)) = self;
        key
    }
}

/// Has a compute server take pages from both memory servers: from now on it has some.
pub(crate) async fn have_pages(worker: &Worker, class: SizeClass) -> Result<(), Error> {
    let server = |number| Placement::Server(ServerId::new(number).expect("a small number"));
    drop((allocate(worker, class, server(0)).await?, allocate(worker, class, server(1)).await?));
    Ok(())
}

/// [`have_pages`] of all sizes that a map takes for a change.
pub(crate) async fn have_pages_for<S: Subject>(worker: &Worker, class: SizeClass) -> Result<(), Error> {
    have_pages(worker, class).await?;
    // A Bw-tree's deltas of both sizes, and the pages of its mapping table.
    for bytes in [64, 128, 4096].into_iter().filter(|_| S::WHICH == StructureName::BwTree) {
        have_pages(worker, SizeClass::of_bytes(bytes).expect("a size class")).await?;
    }
    Ok(())
}

/// Keys that are there, keys that are removed again before the victim comes, and what it does.
#[derive(Clone)]
pub(crate) struct Script<S> {
    keys: Vec<u64>,
    removed: Vec<u64>,
    pub(crate) op: Op,
    /// The victim has no pages: it takes them from bitmaps first.
    allocates: bool,
    structure: PhantomData<S>,
}

impl<S> fmt::Debug for Script<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, with {} keys, {} removed", self.op, self.keys.len(), self.removed.len())
    }
}

impl<S: Subject> Script<S> {
    pub(crate) fn new(keys: impl IntoIterator<Item = u64>, removed: impl IntoIterator<Item = u64>, op: Op) -> Self {
        let (keys, removed) = (keys.into_iter().collect(), removed.into_iter().collect());
        Self { keys, removed, op, allocates: false, structure: PhantomData }
    }

    fn model(&self) -> BTreeMap<u64, u64> {
        self.keys.iter().filter(|key| !self.removed.contains(key)).map(|&key| (key, key)).collect()
    }
}

impl<S: Subject> Script<S> {
    /// [`Scene::prepare`], with pages here.
    pub(crate) async fn prepare_at(&self, worker: &Worker, placed: StructurePlacement) -> Result<(), Error> {
        let page_bytes = S::page_bytes(PAGE_BYTES);
        let map = Map::<S, _>::make_at(worker, MAP, page_bytes, Proof::Checksum, placed).await?;
        for &key in &self.keys {
            assert!(map.insert(key, key).await?);
        }
        for &key in &self.removed {
            assert_eq!(map.remove(key).await?, Some(key));
        }
        Ok(())
    }
}

impl<S: Subject> Scene for Script<S> {
    type Open = Opened<S>;

    async fn prepare(&self, worker: &Worker) -> Result<(), Error> {
        self.prepare_at(worker, StructurePlacement::default()).await
    }

    async fn open(&self, worker: &Worker) -> Result<Opened<S>, Error> {
        let map: Opened<S> = Map::open(worker, MAP, Proof::Checksum).await?;
        if !self.allocates {
            have_pages_for::<S>(worker, map.access().context().structure.class).await?;
        }
        Ok(map)
    }

    async fn act(&self, map: &Opened<S>) -> Result<(), Error> {
        self.op.run(map).await
    }

    async fn free_leaked(&self, worker: &Worker) -> Result<u64, Error> {
        if S::WHICH != StructureName::BwTree {
            return Ok(0);
        }
        let freed = Map::<S, _>::open(worker, MAP, Proof::Checksum).await?.free_leaked().await?;
        Ok(freed.expect("nobody holds up the epoch"))
    }

    async fn verify(&self, worker: &Worker, acknowledged: bool) -> Result<(), Error> {
        let map = self.open(worker).await?;
        let (before, mut after) = (self.model(), self.model());
        self.op.apply(&mut after);
        let found: BTreeMap<u64, u64> = map.range(..).take(usize::MAX).await?.into_iter().collect();
        let is_as_expected = found == after || !acknowledged && found == before;
        assert!(is_as_expected, "{:?}, acknowledged: {acknowledged}: {found:?}", self.op);
        for (&key, &value) in &found {
            assert_eq!(map.get(key).await?, Some(value));
            assert_eq!(map.update(key, 7).await?, Some(value));
        }
        // Around it, the structure grows and shrinks.
        let around = || (self.op.key().saturating_sub(20)..self.op.key() + 20).map(|key| key * 1000 + 1);
        let near = (1..20).map(|step| self.op.key() * 10 + step).filter(|key| !found.contains_key(key));
        let all: Vec<u64> = around().chain(near).filter(|key| !found.contains_key(key)).collect();
        for &key in &all {
            assert!(map.insert(key, key).await?, "{key}");
        }
        for &key in &all {
            assert_eq!(map.remove(key).await?, Some(key));
        }
        for &key in found.keys() {
            assert_eq!(map.remove(key).await?, Some(7));
        }
        assert!(map.is_empty().await?);
        Ok(())
    }

    async fn check(&self, worker: &Worker) -> Result<Report, Error> {
        Map::<S, _>::open(worker, MAP, Proof::Checksum).await?.check().await
    }
}

/// Scripts that have the victim change one page, split and merge pages and the root, and even pages out.
pub(crate) fn scripts<S: Subject>() -> Vec<Script<S>> {
    let even = |count: u64| (1..=count).map(|key| key * 10);
    let mut scripts = vec![
        Script::new(even(5), [], Op::Insert(15)),
        Script::new(even(5), [], Op::Update(30)),
        Script::new(even(5), [], Op::Remove(30)),
        Script::new([], [], Op::Insert(10)),
        Script::new([10], [], Op::Remove(10)),
    ];
    if S::WHICH == StructureName::BwTree {
        // A page of 256 B holds eleven entries, below four deltas: of so many inserts in a row some make a new base, some split a
        // page, the root or one below it; of so many removals some merge pages, some lower the root.
        scripts.extend((11..=16).chain(28..=33).map(|count| Script::new(even(count), [], Op::Insert(count * 10 + 5))));
        scripts.extend(
            (1..=24).map(|left| Script::new(even(26), (left + 1..=26).map(|key| key * 10), Op::Remove(left * 10))),
        );
    } else if S::WHICH == StructureName::BTree {
        // A leaf of 256 B holds twelve entries.
        scripts.extend([
            Script::new(even(12), [], Op::Insert(65)),
            Script::new(even(40), [], Op::Insert(395)),
            Script::new(even(130), [], Op::Insert(1295)),
        ]);
        for left in [9, 8, 7, 6, 5, 4, 3] {
            scripts.push(Script::new(even(40), (left + 1..=39).map(|key| key * 10), Op::Remove(left * 10)));
        }
        for left in 1..=4 {
            scripts.push(Script::new(even(13), (left + 1..=13).map(|key| key * 10), Op::Remove(left * 10)));
        }
    } else {
        // Towers of all heights.
        scripts.extend((0..12).map(|key| Script::new(even(30), [], Op::Insert(key * 25 + 3))));
        scripts.extend((1..=30).step_by(3).map(|key| Script::new(even(30), [], Op::Remove(key * 10))));
    }
    scripts
}

fn one_sided<S: Subject>() {
    for script in scripts::<S>() {
        enumerate(FAST, &script);
    }
}

fn while_it_allocates<S: Subject>() {
    let script = Script::new((1..=12).map(|key| key * 10), [], Op::Insert(65));
    enumerate(FAST, &Script::<S> { allocates: true, ..script });
}

fn one_sided_over_a_weak_fabric<S: Subject>() {
    let step = match (S::WHICH, every()) {
        (_, 1) => 1,
        (StructureName::BwTree, _) => 9,
        _ => 4,
    };
    for script in scripts::<S>().iter().step_by(step) {
        enumerate(WEAK, script);
    }
}

/// A few scripts, each of which changes several pages.
fn who_finishes_it_dies_too<S: Subject>() {
    for script in scripts::<S>().iter().skip(6).step_by(8) {
        enumerate_sweepers(FAST, script, 2);
    }
}

/// It was only stopped, and goes on once others have finished its change.
fn one_sided_goes_on<S: Subject>() {
    for script in scripts::<S>().iter().skip(2).step_by(7) {
        enumerate_resumed(30, FAST, script);
    }
}

test_every_structure!(
    one_sided, one_sided_goes_on, one_sided_over_a_weak_fabric, while_it_allocates, who_finishes_it_dies_too;
    bwtree: one_sided, one_sided_over_a_weak_fabric, while_it_allocates, who_finishes_it_dies_too,
);
