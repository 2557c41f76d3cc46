//! Who joins where all memory is in use records changes in rings that are kept for that, and so frees memory; and whoever finishes what
//! one that died there has left.

use std::sync::Arc;

use farlink_runtime::{
    audit, catalog,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Fabric,
        mortal::{MortalFabric, Order},
    },
    layout::CHUNK_BYTES,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    pages::{NewPage, allocate},
    ptr::ServerId,
    redo::RING_CLASS,
    server,
    structure::{Placement, PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{
    btree::Tree,
    map::Map,
    rtree::{RTree, RTreeOptions, Rect},
};
use farlink_tests::{
    cluster::{self, FAST},
    crash::Member,
    settings,
    subject::Subject,
    test_every_structure,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

const NAME: &str = "structure";
pub(crate) const FOR_RINGS: &str = "for rings";
/// One death in so many is played.
const STEP: u64 = 9;
const SERVERS: usize = 2;

type Opened<S> = Map<S, OneSided<S>>;

fn fabric() -> Result<Arc<dyn Fabric>, Error> {
    Ok(Arc::new(server::in_process(SERVERS, 2 << 20, FAST)?))
}

/// A compute server that has all memory, and whose own thread announces epochs: nobody waits for it to leave.
struct Holder {
    held: Vec<NewPage>,
    member: Member,
}

impl Holder {
    fn join(fabric: &Arc<dyn Fabric>) -> Result<Self, Error> {
        let member = Member::of(cluster::join(fabric, 1)?)?;
        let held = member.worker().block_on(fill(member.worker()))?;
        Ok(Self { held, member })
    }

    /// It leaves, and nothing is in use.
    fn leaves(self, fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
        drop((self.held, self.member));
        let auditor = Member::join(fabric, 1000)?;
        auditor.maintain()?;
        let memory = auditor.worker().block_on(audit::memory(auditor.worker()))?;
        assert_eq!(memory.used_bytes(), 0, "of {memory:?}");
        Ok(())
    }
}

/// All pages of all sizes that there are.
async fn fill(worker: &Worker) -> Result<Vec<NewPage>, Error> {
    let mut pages = Vec::new();
    let classes: Vec<SizeClass> = SizeClass::all().collect();
    for class in classes.into_iter().rev() {
        loop {
            match allocate(worker, class, Placement::RoundRobin).await {
                Ok(page) => pages.push(page),
                Err(Error::OutOfMemory { .. }) => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(pages)
}

/// Pages of two levels, or some towers; fewer than a root of a Bw-tree's mapping table has room for.
const KEYS: u64 = 60;

fn create<S: Subject>(fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
    cluster::create::<S>(fabric, NAME, S::page_bytes(256), Proof::Checksum)?;
    cluster::load::<S>(fabric, NAME, (0..KEYS).map(|key| (key, key)), 0.8)
}

async fn open<S: Subject>(worker: &Worker) -> Result<Opened<S>, Error> {
    Map::open(worker, NAME, Proof::Checksum).await
}

fn removed_and_dropped<S: Subject>() {
    let fabric = fabric().unwrap();
    create::<S>(&fabric).unwrap();
    let holder = Holder::join(&fabric).unwrap();
    for seed in [2, 3] {
        let member = Member::join(&fabric, seed).unwrap();
        member.worker().block_on(async {
            let refused = allocate(member.worker(), RING_CLASS, Placement::RoundRobin).await;
            assert!(matches!(refused, Err(Error::OutOfMemory { .. })), "{refused:?}");
            let map = open::<S>(member.worker()).await.unwrap();
            for key in (0..KEYS).filter(|key| key % 2 == seed % 2) {
                assert_eq!(map.remove(key).await.unwrap(), Some(key));
            }
            let report = map.check().await.unwrap();
            assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{report:?}");
        });
    }
    dropped_by_another(&fabric).unwrap();
    holder.leaves(&fabric).unwrap();
}

fn dropped_by_another(fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
    let member = Member::join(fabric, 10)?;
    member.worker().block_on(catalog::destroy(member.worker(), NAME))?;
    assert!(member.worker().block_on(catalog::list(member.worker()))?.is_empty());
    Ok(())
}

/// To remove something from it takes pages.
fn only_dropped<S: Subject>() {
    let fabric = fabric().unwrap();
    create::<S>(&fabric).unwrap();
    let holder = Holder::join(&fabric).unwrap();
    dropped_by_another(&fabric).unwrap();
    holder.leaves(&fabric).unwrap();
}

/// It dies removing, after so many requests, and whoever comes next has no memory either; whether it did not.
fn lives_removing<S: Subject>(after: u64) -> Result<bool, Error> {
    let fabric = fabric()?;
    create::<S>(&fabric)?;
    let holder = Holder::join(&fabric)?;
    let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let victim = Member::join(&(Arc::new(mortal.clone()) as _), 2)?;
    let map = victim.worker().block_on(open::<S>(victim.worker()))?;
    mortal.dies_after(after);
    let removed = victim.worker().block_on(async {
        for key in 0..KEYS {
            if map.remove(key).await.is_err() {
                return key;
            }
        }
        KEYS
    });
    drop(map);
    mortal.dies_after(0);
    drop(victim);
    let survivor = Member::join(&fabric, 3)?;
    survivor.worker().block_on(async {
        let map = open::<S>(survivor.worker()).await?;
        for key in 0..KEYS {
            let found = map.remove(key).await?;
            match key.cmp(&removed) {
                std::cmp::Ordering::Less => assert_eq!(found, None, "{key} was removed"),
                std::cmp::Ordering::Equal => assert!(matches!(found, None | Some(_))),
                std::cmp::Ordering::Greater => assert_eq!(found, Some(key), "{removed} were removed"),
            }
        }
        // What nobody has met.
        survivor.sweep().await?;
        let report = map.check().await?;
        assert!(report.problem_count == 0 && report.audit.leaked.is_empty(), "{report:?}");
        Ok::<_, Error>(())
    })?;
    drop(survivor);
    dropped_by_another(&fabric)?;
    holder.leaves(&fabric)?;
    Ok(removed == KEYS)
}

fn died_removing<S: Subject>() {
    let mut rng = StdRng::seed_from_u64(settings::seed(&format!("{:?}: died removing", S::WHICH)));
    let (mut after, mut lives) = (rng.random_range(0..STEP), false);
    while !lives {
        lives = lives_removing::<S>(after).unwrap_or_else(|error| panic!("after {after} requests: {error}"));
        after += STEP;
    }
    assert!(after > KEYS, "{after}");
}

test_every_structure!(removed_and_dropped, died_removing; bwtree: only_dropped);

#[test]
fn an_r_tree_is_emptied_and_dropped() -> Result<(), Error> {
    let fabric = fabric()?;
    let rect = |number: u64| Rect::new([number as f64, 0.0], [number as f64 + 0.5, 1.0]).expect("low is below high");
    let maker = Member::join(&fabric, 4)?;
    maker.worker().block_on(async {
        let options = RTreeOptions { page_bytes: 1024, ..RTreeOptions::default() };
        let tree = RTree::<_, 2>::create(maker.worker(), NAME, options).await?;
        for number in 0..KEYS {
            tree.insert(rect(number), number).await?;
        }
        Ok::<_, Error>(())
    })?;
    drop(maker);
    let holder = Holder::join(&fabric)?;
    let member = Member::join(&fabric, 2)?;
    member.worker().block_on(async {
        let tree = RTree::<_, 2>::open(member.worker(), NAME, Proof::Checksum).await?;
        for number in 0..KEYS {
            assert!(tree.delete(rect(number), number).await?);
        }
        Ok::<_, Error>(())
    })?;
    drop(member);
    dropped_by_another(&fabric)?;
    holder.leaves(&fabric)
}

/// Makes a map on a memory server, for [`take_rings`].
pub(crate) fn create_for_rings(fabric: &Arc<dyn Fabric>, server: ServerId) -> Result<(), Error> {
    let placed = StructurePlacement { root: Some(server), policy: PlacementPolicy::default() };
    cluster::create_at::<Tree>(fabric, FOR_RINGS, 4096, Proof::Checksum, placed)
}

/// Has workers take the rings that are left on that memory server, where all memory is in use; the last one has found none.
pub(crate) fn take_rings(compute: &ComputeServer) -> Result<Vec<Worker>, Error> {
    let mut workers = Vec::new();
    loop {
        let worker = compute.worker()?;
        let inserted = worker.block_on(async {
            let map: Opened<Tree> = Map::open(&worker, FOR_RINGS, Proof::Checksum).await?;
            // In front of the others: several words change.
            let first = map.range(..).take(1).await?;
            map.insert(first.first().map_or(1000, |(key, _)| key - 1), 0).await
        });
        workers.push(worker);
        match inserted {
            Ok(_) => {}
            Err(Error::OutOfMemory { class: RING_CLASS }) => return Ok(workers),
            Err(error) => return Err(error),
        }
    }
}

/// There are so many as are kept, and who gets none is told. Whoever leaves leaves his to the next one.
#[test]
fn there_are_as_many_as_are_kept() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 2 << 20, FAST)?);
    create_for_rings(&fabric, ServerId::new(0).expect("a small number"))?;
    let holder = Holder::join(&fabric)?;
    // The first of its chunks.
    let kept = CHUNK_BYTES as usize / RING_CLASS.bytes();
    for seed in [2, 3] {
        let compute = cluster::join_manual(&fabric, seed)?;
        for _ in 0..2 {
            assert_eq!(take_rings(&compute)?.len(), kept + 1);
        }
    }
    let member = Member::join(&fabric, 10)?;
    member.worker().block_on(catalog::destroy(member.worker(), FOR_RINGS))?;
    drop(member);
    holder.leaves(&fabric)
}
