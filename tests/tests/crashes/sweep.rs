//! The sweep: what it does where it cannot do all.

use std::sync::Arc;

use farlink_runtime::{
    audit,
    error::Error,
    fabric::{
        Fabric,
        mortal::{MortalFabric, Order},
    },
    one_sided::{OneSided, Proof},
    page::SizeClass,
    pages::{NewPage, allocate},
    ptr::ServerId,
    server,
    structure::{Placement, PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    cluster::{self, FAST},
    crash::Member,
};

const NAME: &str = "map";
/// Also that of rings: pages that are given back are there for them.
const CLASS: SizeClass = SizeClass::of_bytes(16 << 10).expect("a size class");

type Opened = Map<Tree, OneSided<Tree>>;

fn server_id(number: u16) -> ServerId {
    ServerId::new(number).expect("a small number")
}

/// All chunks of a memory server that are left.
async fn fill(worker: &Worker, server: ServerId) -> Result<Vec<NewPage>, Error> {
    let mut pages = Vec::new();
    loop {
        match allocate(worker, CLASS, Placement::Server(server)).await {
            Ok(page) if page.at().server() == server => pages.push(page),
            Ok(_) | Err(Error::OutOfMemory { .. }) => return Ok(pages),
            Err(error) => return Err(error),
        }
    }
}

/// A compute server that dies after so many requests of `act`.
fn dies<T>(
    fabric: &Arc<dyn Fabric>,
    prepare: impl AsyncFnOnce(&Worker) -> Result<T, Error>,
    after: u64,
    act: impl AsyncFnOnce(&Worker, &T) -> Result<(), Error>,
) -> Result<(), Error> {
    let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
    let as_fabric: Arc<dyn Fabric> = Arc::new(mortal.clone());
    let victim = Member::join(&as_fabric, 1)?;
    let prepared = victim.worker().block_on(prepare(victim.worker()))?;
    mortal.dies_after(after);
    let outcome = victim.worker().block_on(act(victim.worker(), &prepared));
    assert!(outcome.is_err() || after == 0, "it was to die");
    mortal.dies_after(0);
    Ok(())
}

/// Where one memory server has no room for a ring, a change there cannot be finished: the others' are, and what they held
/// comes back.
#[test]
fn one_that_cannot_be_finished_keeps_no_other_waiting() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(2, 2 << 20, FAST)?);
    let placed = StructurePlacement { root: Some(server_id(1)), policy: PlacementPolicy::default() };
    cluster::create_at::<Tree>(&fabric, NAME, 256, Proof::Checksum, placed)?;
    let open = async |worker: &Worker| {
        let map: Opened = Map::open(worker, NAME, Proof::Checksum).await?;
        map.insert(1, 1).await?;
        Ok(map)
    };
    // After the READ, the record and the lock.
    dies(&fabric, open, 3, async |_, map| map.update(1, 2).await.map(drop))?;
    // What this one holds, it holds on the other memory server.
    let hold = async |worker: &Worker| fill(worker, server_id(0)).await;
    dies(&fabric, hold, 0, async |_, _| Ok(()))?;
    let full = Member::join(&fabric, 2)?;
    let held = full.worker().block_on(fill(full.worker(), server_id(1)))?;
    assert!(!held.is_empty());

    let survivor = Member::join(&fabric, 3)?;
    let before = survivor.worker().block_on(audit::memory(survivor.worker()))?;
    let swept = survivor.maintain_once();
    assert!(matches!(swept, Err(Error::OutOfMemory { .. })), "{swept:?}");
    for member in [&full, &survivor].repeat(8) {
        let _ = member.maintain_once();
    }
    let after = survivor.worker().block_on(audit::memory(survivor.worker()))?;
    assert!(after.free_bytes > before.free_bytes, "{before:?}, {after:?}");

    drop((held, full));
    survivor.maintain()?;
    let map: Opened = survivor.worker().block_on(Map::open(survivor.worker(), NAME, Proof::Checksum))?;
    assert_eq!(survivor.worker().block_on(map.get(1))?, Some(2));
    assert!(survivor.worker().block_on(map.check())?.is_clean());
    Ok(())
}

/// Who needs one page, as for a ring, takes few, and no more than are worth the search: the others may need what a dead one has left.
#[test]
fn one_large_page_takes_few_out_of_bitmaps() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 4 << 20, FAST)?);
    let first = Member::join(&fabric, 1)?;
    drop(first.worker().block_on(fill(first.worker(), server_id(0)))?);
    drop(first);
    let second = Member::join(&fabric, 2)?;
    let free = || Ok::<_, Error>(second.worker().block_on(audit::memory(second.worker()))?.free_bytes);
    let before = free()?;
    let page = second.worker().block_on(allocate(second.worker(), CLASS, Placement::Server(server_id(0))))?;
    let taken = before - free()?;
    assert!(before > 2 << 20 && taken <= 256 << 10, "{taken} of {before} bytes");
    drop(page);
    Ok(())
}
