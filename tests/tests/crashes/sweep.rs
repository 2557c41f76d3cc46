//! The sweep: what it does where it cannot do all.

use std::{
    future::Future as _,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use farlink_runtime::{
    audit, catalog,
    error::Error,
    fabric::{
        Fabric,
        faulty::{FaultKinds, FaultOptions, FaultyFabric},
        mortal::{MortalFabric, Order},
    },
    lock::{LockState, LockWord},
    one_sided::{OneSided, Proof},
    page::SizeClass,
    pages::{NewPage, allocate},
    ptr::{RemotePtr, ServerId},
    server,
    structure::{Placement, PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    bounded,
    cluster::{self, FAST},
    crash::Member,
    settings,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::rings::{FOR_RINGS, create_for_rings, take_rings};

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
    create_for_rings(&fabric, server_id(1))?;
    let open = async |worker: &Worker| {
        let map: Opened = Map::open(worker, NAME, Proof::Checksum).await?;
        map.insert(1, 1).await?;
        Ok(map)
    };
    // After the READ, the record and the lock.
    dies(&fabric, open, 3, async |_, map| map.insert(2, 2).await.map(drop))?;
    // What this one holds, it holds on the other memory server.
    let hold = async |worker: &Worker| fill(worker, server_id(0)).await;
    dies(&fabric, hold, 0, async |_, _| Ok(()))?;
    let full = Member::join(&fabric, 2)?;
    let held = full.worker().block_on(fill(full.worker(), server_id(1)))?;
    assert!(!held.is_empty());
    let recording = take_rings(full.compute())?;

    let survivor = Member::join(&fabric, 3)?;
    let before = survivor.worker().block_on(audit::memory(survivor.worker()))?;
    let swept = survivor.maintain_once();
    assert!(matches!(swept, Err(Error::OutOfMemory { .. })), "{swept:?}");
    for member in [&full, &survivor].repeat(8) {
        let _ = member.maintain_once();
    }
    let after = survivor.worker().block_on(audit::memory(survivor.worker()))?;
    assert!(after.free_bytes > before.free_bytes, "{before:?}, {after:?}");
    // Among what the other one held is room for a record.
    survivor.maintain_once()?;

    drop((recording, held, full));
    survivor.maintain()?;
    let map: Opened = survivor.worker().block_on(Map::open(survivor.worker(), NAME, Proof::Checksum))?;
    assert_eq!(survivor.worker().block_on(map.get(2))?, Some(2));
    assert!(survivor.worker().block_on(map.check())?.is_clean());
    Ok(())
}

/// A change of one word is in no record: the sweep finds the page by its lock word, and needs no memory to repair it.
#[test]
fn a_page_that_is_locked_for_one_word_is_found() -> Result<(), Error> {
    let mut seen = Vec::new();
    for has_memory in [true, false] {
        // After the READ and the lock, and then after the checksum, and after the value.
        for after in 2..5 {
            let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 2 << 20, FAST)?);
            cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
            let open = async |worker: &Worker| {
                let map: Opened = Map::open(worker, NAME, Proof::Checksum).await?;
                map.insert(1, 1).await?;
                Ok(map)
            };
            dies(&fabric, open, after, async |_, map| map.update(1, 2).await.map(drop))?;
            let full = Member::join(&fabric, 2)?;
            let held =
                if has_memory { Vec::new() } else { full.worker().block_on(fill(full.worker(), server_id(0)))? };
            let survivor = Member::join(&fabric, 3)?;
            let map: Opened = survivor.worker().block_on(open_only(survivor.worker()))?;
            let root = map.structure().root;
            let lock = || survivor.worker().block_on(survivor.worker().load(root)).map(LockWord::from_word);
            assert!(lock()?.is_for_one_word(), "{:?} after {after} requests", lock()?);
            survivor.maintain_once()?;
            assert_eq!(lock()?.state(), LockState::Unlocked, "after {after} requests");
            let before = survivor.worker().counters().locked_reads;
            seen.push(survivor.worker().block_on(map.get(1))?);
            assert_eq!(survivor.worker().counters().locked_reads, before);
            assert_eq!(survivor.worker().block_on(map.update(1, 3))?, seen[seen.len() - 1]);
            assert!(survivor.worker().block_on(map.check())?.is_clean());
            drop(held);
        }
    }
    assert_eq!(seen, [Some(1), Some(1), Some(2)].repeat(2));
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

/// Who sweeps is slow: others have swept by then, and somebody else has the slot, with records of its own. They are found when that one dies.
fn sweeps_late(after: u64) -> Result<u64, Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 2 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let open = |key: u64| {
        async move |worker: &Worker| {
            let map: Opened = Map::open(worker, NAME, Proof::Checksum).await?;
            map.insert(key, key).await?;
            Ok(map)
        }
    };
    // It leaves its ring, and no lock that the slow one could hold then.
    dies(&fabric, open(1), 0, async |_, _| Ok(()))?;
    let slows_fabric = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
    let as_fabric: Arc<dyn Fabric> = Arc::new(slows_fabric.clone());
    let slow = Member::join(&as_fabric, 2)?;
    let before = slows_fabric.requests();
    slows_fabric.stops_after(after);
    let requests = {
        let mut sweeping = pin!(slow.worker().drive(slow.sweep()));
        let mut turn = || sweeping.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut swept = turn();
        while swept.is_pending() && !slows_fabric.has_stopped() {
            swept = turn();
        }
        // All but it, which holds up the epoch.
        Member::join(&fabric, 3)?.maintain_once()?;
        let dying = async |_: &Worker, map: &Opened| {
            slows_fabric.stops_after(u64::MAX - 1);
            while swept.is_pending() {
                swept = turn();
            }
            map.insert(3, 3).await.map(drop)
        };
        // After the READ, the record, the lock, and a word of what is new.
        dies(&fabric, open(2), 4, dying)?;
        slows_fabric.requests() - before
    };
    drop(slow);
    let survivor = Member::join(&fabric, 4)?;
    survivor.maintain()?;
    let map: Opened = survivor.worker().block_on(open_only(survivor.worker()))?;
    let value = survivor.worker().block_on(map.get(3))?;
    assert!(matches!(value, None | Some(3)), "{value:?}");
    survivor.worker().block_on(async {
        map.update(1, 4).await?;
        let report = map.check().await?;
        assert!(report.is_clean(), "{report:?}");
        Ok::<_, Error>(())
    })?;
    drop(map);
    drop(survivor);
    let auditor = Member::join(&fabric, 5)?;
    auditor.maintain()?;
    let map: Opened = auditor.worker().block_on(open_only(auditor.worker()))?;
    let used = auditor.worker().block_on(audit::memory(auditor.worker()))?.used_bytes();
    assert_eq!(
        used,
        auditor.worker().block_on(map.check())?.bytes,
        "after {after} requests of the slow one: what is in use"
    );
    Ok(requests)
}

/// One in so many of the slow one's requests is played.
const STEP: u64 = 15;

async fn open_only(worker: &Worker) -> Result<Opened, Error> {
    Map::open(worker, NAME, Proof::Checksum).await
}

#[test]
fn who_sweeps_late_leaves_the_next_ones_records_alone() -> Result<(), Error> {
    let mut rng = StdRng::seed_from_u64(settings::seed("who sweeps late"));
    let (mut after, mut requests) = (rng.random_range(0..STEP), STEP);
    while after < requests {
        requests = sweeps_late(after)?;
        after += STEP;
    }
    Ok(())
}

/// Many workers of a compute server make rings at once, while requests that take effect fail: none is lost from the list.
#[test]
fn rings_that_are_made_at_once_are_all_found() -> Result<(), Error> {
    const WORKERS: u64 = 12;
    for seed in 0..6 {
        let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(2, 8 << 20, FAST)?);
        cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
        let kinds = FaultKinds { refused: false, done: true, lost: true };
        let options =
            FaultOptions { kinds, registrations_one_in: 0, connections_one_in: 0, ..FaultOptions::one_in(4, seed) };
        let faulty: Arc<dyn Fabric> = Arc::new(FaultyFabric::new(Arc::clone(&fabric), options));
        let compute = cluster::again(|| cluster::join_manual(&faulty, 1))?;
        let workers = (0..WORKERS).map(|_| compute.worker()).collect::<Result<Vec<_>, _>>()?;
        let maps = workers.iter().map(|worker| worker.block_on(Map::open(worker, NAME, Proof::Checksum)));
        let maps: Vec<Opened> = maps.collect::<Result<_, _>>()?;
        let mut inserting: Vec<_> = maps
            .iter()
            .zip(0..)
            .map(|(map, key)| Some(Box::pin(async move { drop(map.insert(key, key).await) })))
            .collect();
        while inserting.iter().any(Option::is_some) {
            for (slot, worker) in inserting.iter_mut().zip(&workers) {
                slot.take_if(|it| it.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
                bounded::turn(worker);
            }
        }
        drop(inserting);
        drop((maps, workers, compute));
        let report = cluster::check_tree(&fabric, NAME)?;
        assert!(report.is_clean() && report.audit.held == 0, "seed {seed}: {report:?}");
        assert_eq!(cluster::unaccounted_bytes(&fabric, &report)?, 0, "seed {seed}: {report:?}");
    }
    Ok(())
}

/// Wherever it dies who returns pages on leaving: others have them afterwards, those, too, who had found that there is nothing.
#[test]
fn who_dies_returning_pages_hides_none() -> Result<(), Error> {
    let mut expected = None;
    for after in std::iter::once(u64::MAX - 1).chain(0..) {
        let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 1 << 20, FAST)?);
        let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        let victim = Member::join(&(Arc::new(mortal.clone()) as _), 1)?;
        let held = victim.worker().block_on(fill(victim.worker(), server_id(0)))?;
        let [other, third] = [Member::join(&fabric, 2)?, Member::join(&fabric, 3)?];
        let fill_all = |member: &Member| member.worker().block_on(fill(member.worker(), server_id(0)));
        assert!(fill_all(&third)?.is_empty(), "there is nothing left");
        drop(held);
        let before = mortal.requests();
        mortal.dies_after(after);
        drop(victim);
        let is_dead = mortal.requests() - before > after;
        mortal.dies_after(0);
        other.maintain_once()?;
        let found = fill_all(&third)?;
        for member in [&third, &other].repeat(4) {
            member.maintain_once()?;
        }
        let found = found.len() + fill_all(&third)?.len() + fill_all(&other)?.len();
        assert_eq!(found, *expected.get_or_insert(found), "after {after} requests");
        if after < u64::MAX - 1 && !is_dead {
            assert!(after > 10, "{after}");
            break;
        }
    }
    Ok(())
}

/// A damaged page of the catalog, or its damaged head: what dead ones held is taken back even so.
#[test]
fn a_damaged_catalog_keeps_no_pages_from_others() -> Result<(), Error> {
    for damaged in [5, 0] {
        let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 4 << 20, FAST)?);
        let survivor = Member::join(&fabric, 2)?;
        let hold = async |worker: &Worker| fill(worker, server_id(0)).await;
        dies(&fabric, hold, 0, async |_, _| Ok(()))?;
        // As the module `layout` documents it.
        let page = RemotePtr::new(server_id(0), (4 << 10) + damaged * 128)?;
        let worker = survivor.worker();
        worker.block_on(worker.write_word(page.word(9), 0xbad)).map_err(|error| *error)?;
        let free = || Ok::<_, Error>(worker.block_on(audit::memory(worker))?.free_bytes);
        let before = free()?;
        for _ in 0..8 {
            let maintained = survivor.maintain_once();
            assert!(maintained.is_ok() || damaged == 0, "{maintained:?}");
        }
        assert!(free()? > before + (2 << 20), "page {damaged}");
    }
    Ok(())
}

/// All memory is in use when a compute server dies in the middle of a change, and others have no ring yet: what the dead one held is
/// room enough for theirs.
#[test]
fn a_change_is_finished_where_all_memory_is_in_use() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 2 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    create_for_rings(&fabric, server_id(0))?;
    let full = Member::join(&fabric, 2)?;
    let open = async |worker: &Worker| {
        let map: Opened = Map::open(worker, NAME, Proof::Checksum).await?;
        map.insert(1, 1).await?;
        Ok((map, allocate(worker, SizeClass::LARGEST, Placement::RoundRobin).await?))
    };
    let (mut held, mut recording) = (Vec::new(), Vec::new());
    let fill_and_change = async |_: &Worker, (map, _): &(Opened, NewPage)| {
        held = full.worker().block_on(fill(full.worker(), server_id(0)))?;
        recording = take_rings(full.compute())?;
        map.insert(2, 2).await.map(drop)
    };
    // After the READ, the record and the lock.
    dies(&fabric, open, 3, fill_and_change)?;
    let survivor = Member::join(&fabric, 3)?;
    let free = || Ok::<_, Error>(survivor.worker().block_on(audit::memory(survivor.worker()))?.free_bytes);
    let before = free()?;
    assert!(matches!(survivor.maintain_once(), Err(Error::OutOfMemory { .. })));
    for member in [&full, &survivor].repeat(8) {
        let _ = member.maintain_once();
    }
    survivor.maintain_once()?;
    assert!(free()? >= before + (64 << 10), "{before}, {}", free()?);
    let map: Opened = survivor.worker().block_on(open_only(survivor.worker()))?;
    assert_eq!(survivor.worker().block_on(map.get(2))?, Some(2));
    assert!(survivor.worker().block_on(map.check())?.problem_count == 0);
    drop((map, recording, held, full));
    survivor.worker().block_on(catalog::destroy(survivor.worker(), FOR_RINGS))?;
    drop(survivor);
    let report = cluster::check_tree(&fabric, NAME)?;
    assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
    assert_eq!(cluster::unaccounted_bytes(&fabric, &report)?, 0);
    Ok(())
}
