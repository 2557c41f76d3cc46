//! Every slot of a cluster is taken, by dead ones among others: somebody joins even so, and what those have left is finished and taken back.

use std::sync::Arc;

use farlink_runtime::{
    access::{Access, Pages, PagesMut, Start},
    audit, catalog,
    error::Error,
    fabric::{
        Fabric,
        mortal::{MortalFabric, Order},
    },
    layout::SLOTS,
    lock::LockWord,
    one_sided::{OneSided, Proof},
    page::SizeClass,
    pages::allocate,
    ptr::{RemotePtr, ServerId},
    server,
    structure::Placement,
    worker::Worker,
};
use farlink_structures::{btree::Tree, map::Map};
use farlink_tests::{
    cluster::{self, FAST},
    crash::Member,
};

const NAME: &str = "map";
/// Where the slots stand, as the module `layout` documents it: two words each.
const SLOTS_AT: u64 = 12 << 10;

type Opened = Map<Tree, OneSided<Tree>>;

async fn open(worker: &Worker) -> Result<Opened, Error> {
    Map::open(worker, NAME, Proof::Checksum).await
}

fn free_slots(member: &Member) -> Result<usize, Error> {
    let at = RemotePtr::new(ServerId::new(0).expect("a small number"), SLOTS_AT).expect("an address");
    let worker = member.worker();
    let slots = worker.block_on(worker.read(at, 2 * SLOTS)).map_err(|error| *error)?;
    Ok(slots.chunks_exact(2).filter(|slot| slot[0] == 0).count())
}

/// A compute server that dies when it is told.
struct Mortal {
    member: Member,
    fabric: MortalFabric,
}

impl Mortal {
    fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<Self, Error> {
        let mortal = MortalFabric::new(Arc::clone(fabric), Order::Posted, false);
        Ok(Self { member: Member::join(&(Arc::new(mortal.clone()) as _), seed)?, fabric: mortal })
    }

    fn worker(&self) -> &Worker {
        self.member.worker()
    }

    fn dies(self) {
        self.fabric.dies_after(0);
    }
}

/// All that is in use once everybody has left is the map.
fn nothing_is_lost(fabric: &Arc<dyn Fabric>) -> Result<(), Error> {
    let auditor = Member::join(fabric, 1000)?;
    auditor.maintain()?;
    let map = auditor.worker().block_on(open(auditor.worker()))?;
    let report = auditor.worker().block_on(map.check())?;
    assert!(report.is_clean() && report.audit.held == 0, "{report:?}");
    let used = auditor.worker().block_on(audit::memory(auditor.worker()))?.used_bytes();
    assert_eq!(used, report.bytes, "bytes are in use that are not the map's");
    Ok(())
}

/// All have died that had a slot, with records, and one of them in the middle of a change.
#[test]
fn who_joins_when_all_are_dead_finishes_what_they_have_left() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 64 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let mut members = Vec::new();
    for key in 0..SLOTS as u64 {
        let member = Mortal::join(&fabric, key)?;
        let map = member.worker().block_on(open(member.worker()))?;
        assert!(member.worker().block_on(map.insert(key, key))?);
        members.push((member, map));
    }
    assert!(matches!(Member::join(&fabric, 999), Err(Error::TooManyComputeServers { .. })), "all of them live");
    // The one whose slot is given away first: after the READs, the record and the lock.
    let (first, map) = &members[0];
    first.fabric.dies_after(6);
    assert!(first.worker().block_on(map.insert(1000, 1000)).is_err(), "it was to die");
    for (member, map) in members {
        drop(map);
        member.dies();
    }
    {
        let survivor = Member::join(&fabric, 999)?;
        let map = survivor.worker().block_on(open(survivor.worker()))?;
        // Before anybody has looked for dead ones.
        let value = survivor.worker().block_on(map.get(1000))?;
        assert!(matches!(value, None | Some(1000)), "{value:?}");
        survivor.worker().block_on(map.insert(1000, 1000))?;
        survivor.maintain()?;
        assert_eq!(free_slots(&survivor)?, SLOTS - 1);
        for key in (0..SLOTS as u64).chain([1000]) {
            assert_eq!(survivor.worker().block_on(map.get(key))?, Some(key));
        }
    }
    nothing_is_lost(&fabric)
}

/// Who joins in the place of a dead one dies as well, before it has finished what that one has left: the next one does.
#[test]
fn who_joins_in_the_place_of_a_dead_one_dies_as_well() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let victim = Mortal::join(&fabric, 0)?;
    let map = victim.worker().block_on(open(victim.worker()))?;
    victim.worker().block_on(map.insert(1, 1))?;
    let live = (1..SLOTS as u64).map(|seed| Member::join(&fabric, seed)).collect::<Result<Vec<_>, _>>()?;
    victim.fabric.dies_after(4);
    assert!(victim.worker().block_on(map.insert(2, 2)).is_err(), "it was to die");
    drop(map);
    victim.dies();
    for seed in [2000, 2001] {
        let heir = Mortal::join(&fabric, seed)?;
        // A ring and pages of its own, in front of those of the dead one.
        let map = heir.worker().block_on(open(heir.worker()))?;
        heir.worker().block_on(map.insert(seed, seed))?;
        drop(map);
        heir.dies();
    }
    drop(live);
    nothing_is_lost(&fabric)
}

/// One in so many of the requests of who sweeps is played.
const STEP: u64 = 40;

/// As above, and the heir dies after so many requests of its sweep; how many it made.
fn heir_dies_sweeping(after: u64) -> Result<u64, Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let victim = Mortal::join(&fabric, 0)?;
    let map = victim.worker().block_on(open(victim.worker()))?;
    victim.worker().block_on(map.insert(1, 1))?;
    let live = (1..SLOTS as u64).map(|seed| Member::join(&fabric, seed)).collect::<Result<Vec<_>, _>>()?;
    victim.fabric.dies_after(4);
    assert!(victim.worker().block_on(map.insert(2, 2)).is_err(), "it was to die");
    drop(map);
    victim.dies();
    let heir = Mortal::join(&fabric, 2000)?;
    let before = heir.fabric.requests();
    heir.fabric.dies_after(after);
    let swept = heir.member.maintain_once();
    let requests = heir.fabric.requests() - before;
    assert!(swept.is_err() || requests <= after, "it was to die");
    heir.dies();
    // One more in its place, who leaves in good order.
    drop(Member::join(&fabric, 2001)?);
    drop(live);
    nothing_is_lost(&fabric)?;
    Ok(requests)
}

#[test]
fn who_finishes_what_the_one_before_has_left_dies_of_it() -> Result<(), Error> {
    let (mut after, mut requests) = (rand::random_range(0..STEP), STEP);
    while after < requests {
        requests = heir_dies_sweeping(after)?;
        after += STEP;
    }
    Ok(())
}

/// Who joins dies after each of its requests in turn, beside one that has died in the middle of a change; with so many living members.
fn dies_joining(lives: usize) -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let live = (0..lives as u64).map(|seed| Member::join(&fabric, seed)).collect::<Result<Vec<_>, _>>()?;
    for after in 0.. {
        let victim = Mortal::join(&fabric, 1000)?;
        let map = victim.worker().block_on(open(victim.worker()))?;
        victim.worker().block_on(map.insert(2 * after, 1))?;
        victim.fabric.dies_after(4);
        assert!(victim.worker().block_on(map.insert(2 * after + 1, 1)).is_err(), "it was to die");
        drop(map);
        victim.dies();
        let mortal = MortalFabric::new(Arc::clone(&fabric), Order::Posted, false);
        mortal.dies_after(after);
        let joined = Member::join(&(Arc::new(mortal.clone()) as _), 2000);
        let (requests, is_dead) = mortal.since_told();
        assert_eq!(joined.is_err(), is_dead, "after {after} of {requests} requests");
        mortal.dies_after(0);
        drop(joined);
        let survivor = Member::join(&fabric, 3000)?;
        survivor.maintain_once()?;
        if lives == 0 {
            survivor.maintain()?;
            assert_eq!(free_slots(&survivor)?, SLOTS - 1, "after {after} of {requests} requests");
        }
        let map = survivor.worker().block_on(open(survivor.worker()))?;
        assert_eq!(survivor.worker().block_on(map.get(2 * after))?, Some(1));
        let value = survivor.worker().block_on(map.get(2 * after + 1))?;
        assert!(matches!(value, None | Some(1)), "{value:?}");
        drop(map);
        drop(survivor);
        if !is_dead {
            assert!(after > 4, "{after} requests");
            break;
        }
    }
    drop(live);
    nothing_is_lost(&fabric)
}

#[test]
fn who_joins_dies_of_it() -> Result<(), Error> {
    dies_joining(0)
}

#[test]
fn who_joins_in_the_place_of_a_dead_one_dies_of_it() -> Result<(), Error> {
    dies_joining(SLOTS - 1)
}

/// A dead one that has no record of a change holds pages, and its slot is given away: others take the pages back.
fn pages_are_taken_back(hold: impl FnOnce(&Arc<dyn Fabric>) -> Result<(), Error>) -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let live = (1..SLOTS as u64).map(|seed| Member::join(&fabric, seed)).collect::<Result<Vec<_>, _>>()?;
    hold(&fabric)?;
    let joined = Member::join(&fabric, 3000)?;
    assert_eq!(free_slots(&joined)?, 0);
    drop(live);
    joined.maintain()?;
    assert_eq!(free_slots(&joined)?, SLOTS - 1);
    drop(joined);
    nothing_is_lost(&fabric)
}

#[test]
fn pages_that_were_handed_over_are_taken_back() -> Result<(), Error> {
    // The others, who do no maintenance, hold up the epoch, so it cannot return what it has freed.
    pages_are_taken_back(|fabric| {
        let leaver = Member::join(fabric, 0)?;
        let map = leaver.worker().block_on(open(leaver.worker()))?;
        leaver.worker().block_on(async {
            for key in 0..200 {
                map.insert(key, key).await?;
            }
            for key in 0..200 {
                map.remove(key).await?;
            }
            Ok(())
        })
    })
}

#[test]
fn pages_of_a_dead_one_without_records_are_taken_back() -> Result<(), Error> {
    pages_are_taken_back(|fabric| {
        let victim = Mortal::join(fabric, 0)?;
        let page = victim.worker().block_on(allocate(victim.worker(), SizeClass::SMALLEST, Placement::RoundRobin))?;
        victim.fabric.dies_after(0);
        drop(page);
        victim.dies();
        Ok(())
    })
}

/// Who leaves has dropped a structure of which somebody who lives has a page locked, and others have its slot when that one lets go.
#[test]
fn a_structure_is_freed_whose_slot_was_given_away() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 8 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 256, Proof::Checksum)?;
    let (holder, leaver) = (Member::join(&fabric, 1)?, Member::join(&fabric, 2)?);
    let worker = holder.worker();
    let root = worker.block_on(catalog::find(worker, NAME))?.root;
    let unlocked = worker.block_on(worker.load(root)).map_err(|error| *error)?;
    let set = |word| worker.block_on(worker.write_word(root, word)).map_err(|error| *error);
    set(LockWord::from_word(unlocked).locked_by(holder.compute().owner()).word())?;
    let dropped = leaver.worker().block_on(catalog::destroy(leaver.worker(), NAME));
    assert!(matches!(dropped, Err(Error::OwnerStalled { page, .. }) if page == root), "{dropped:?}");
    drop(leaver);
    let live = (2..SLOTS as u64).map(|seed| Member::join(&fabric, seed)).collect::<Result<Vec<_>, _>>()?;
    let heir = Member::join(&fabric, 3000)?;
    assert_eq!(free_slots(&heir)?, 0);
    // It looks for what the one before it has left while that cannot be freed.
    let _ = heir.maintain_once();
    set(unlocked)?;
    drop((live, holder));
    heir.maintain()?;
    drop(heir);
    let auditor = Member::join(&fabric, 1000)?;
    auditor.maintain()?;
    let memory = auditor.worker().block_on(audit::memory(auditor.worker()))?;
    assert_eq!(memory.used_bytes(), 0, "of {memory:?}");
    Ok(())
}

/// The page of a damaged structure that seems to lie inside another page is not freed: it would be given to somebody.
#[test]
fn a_page_inside_another_one_is_not_freed() -> Result<(), Error> {
    let fabric: Arc<dyn Fabric> = Arc::new(server::in_process(1, 2 << 20, FAST)?);
    cluster::create::<Tree>(&fabric, NAME, 4096, Proof::Checksum)?;
    let member = Member::join(&fabric, 1)?;
    let worker = member.worker();
    worker.block_on(async {
        let structure = catalog::find(worker, NAME).await?;
        let access = OneSided::<Tree>::new(worker, structure.clone(), Proof::Checksum);
        let small = SizeClass::of_bytes(128).expect("a size class");
        let at = structure.root.add(2048)?;
        let mut words = vec![0; small.words()];
        let identity = farlink_runtime::page::Identity {
            structure: structure.id,
            level: 0,
            class: small,
            kind: 0,
            is_words: false,
        };
        farlink_runtime::page::seal(&mut words, at, identity, 4);
        worker.write_words(at, &words).await?;
        let link = farlink_runtime::ptr::Link::to(at, small);
        let page = access.open(Start::Page(link)).await.expect("it looks like one");
        let mut pages = Pages::new();
        let slot = pages.add(page);
        let freed = access.change(pages, |pages| pages.free(slot)).await;
        assert!(freed.is_err(), "it is no page");
        assert_eq!(worker.read(at, small.words()).await?[..], words[..], "nothing was changed");
        Ok::<_, Error>(())
    })
}
