//! Who may use a structure: its partition map, changed like any other page.
//!
//! - An *owner* claims a region ([`claim`]). Nobody else changes pages inside, or reads them for current.
//! - Whoever uses a structure one-sided is entered as a *shared user* ([`SharedUser`]) before the first operation: one round trip to read the
//!   map and two to change it, once for all handles of a compute server. What only reads, or finds nothing to change, needs the right as
//!   well: its answer must not be older than what an owner has answered. Who says so ([`OneSided::beside_owners`]) reads without. Beside an owner
//!   it sees what that one has written back, which may be old, and pages of one change that do not fit yet.
//! - A claim beside a shared user, a user beside an owner, and a second owner are refused, with the name of who was first,
//!   for as long as that one lives. Who is about to give up gets a little time; changes of the claimer's own users are waited for, and what
//!   they are reading begins anew.
//! - A dead one's region stays in the map until somebody claims it, or uses the structure one-sided. Before, what the dead owner has
//!   left is finished, its [log](crate::write_ahead) replayed; and so is the log of an owner that ends without having given up in order.
//!
//! - Changes that a user has sent to memory servers are over before anybody owns the structure. Those of the dead are
//!   [fenced off](crate::fencing). Where nobody could tell a living user what became of one, it stays entered, and fences itself off there before it
//!   becomes the owner or leaves.
//!
//! What a compute server has ends when the last holder drops it, is [given up](give_up), or leaves the cluster.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use super::{OneSided, PageCopy, Proof};
use crate::{
    access::{Access, Operations, PageRef, Pages, PagesMut, Plugin, Right, Slot, Start},
    audit::is_live,
    error::Error,
    fabric::{Error as FabricError, Liveness},
    fencing,
    gate::{Passage, Way},
    lock::{LockState, LockWord, OwnerId},
    operation::retry,
    page::{HEADER_WORDS, LOCK},
    partition::{MAP, MapEntry, Part, PartitionMap},
    ptr::{Link, ServerId},
    recovery::{is_finished, replay_own, take_over, wipe_dropped},
    report::Report,
    structure::{Overlap, Region, Structure},
    tenure::{Tenure, Tenures, Turn},
    words::Words,
    worker::Handle,
};

/// So long a claim waits for others to give up what they do not use any more: maintenance does that, by turns of 32 ms at most.
const WAIT_MAX_NS: u64 = 250_000_000;
/// Who waits looks so often, at least.
const LOOKS_MIN: u64 = 100;
/// So long it leaves the map to others before it looks again.
const REST_NS: u64 = 1_000_000;

/// A descriptor page, as a structure of its own.
#[derive(Debug, Clone, Copy, Default)]
struct Descriptor;

impl Plugin for Descriptor {
    const NAME: &'static str = "descriptor";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 4096..=4096;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn create(_pages: &mut impl PagesMut, _root: Slot, _structure: &Structure) {}

    fn operations(_to: &mut impl Operations<Self>) {}

    async fn check<A: Access<Plugin = Self>>(_access: &A) -> Result<Report, Error> {
        Ok(Report::default())
    }
}

/// The newest epoch of a structure's partition map that this compute server has seen; 0 if it has seen none. Asks nobody.
pub fn seen_epoch(worker: &Handle, structure: &Structure) -> u64 {
    worker.compute().tenures.epoch(structure.id)
}

/// The partition map of a structure, as it is now. One READ.
///
/// # Errors
/// If the structure is gone, its descriptor is damaged, or the fabric fails.
pub async fn read(worker: &Handle, structure: &Structure) -> Result<PartitionMap, Error> {
    let access = access(worker, structure);
    retry(worker, async || {
        let page = access.open(Start::Page(descriptor(structure)?)).await?;
        let map = decode(&page)?;
        worker.compute().tenures.saw_epoch(structure.id, map.epoch);
        Ok(map)
    })
    .await
}

/// Whether a claim waits, for a quarter of a second, for others to give up what they do not use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// It does.
    AWhile,
    /// It is refused at once. For changes under way in this compute server it waits all the same.
    No,
}

/// Makes this compute server the owner of a region, until the tenure is dropped or [given up](give_up). Shared users of this
/// compute server end with it: their next operation is refused.
///
/// # Errors
/// [`Error::Owned`] if somebody owns some of it who lives, this compute server included; [`Error::HasUser`] if another one
/// that lives uses the structure one-sided, or this one changes it and does not come to an end; [`Error::BadOption`] if nobody can own
/// such a region, or nothing lies in it; [`Error::ServerStalled`] if a change may be under way at a memory server that a user has sent there who is
/// dead, or was not told what became of it.
pub async fn claim<P: Plugin>(
    worker: &Handle,
    structure: &Structure,
    region: &P::Region,
    waits: Waits,
) -> Result<Arc<Tenure>, Error> {
    require_region::<P>(region)?;
    enter(worker, structure, Part::region(region), None, RegionClaim::<P>::new(structure, region), waits).await
}

/// That something is a region that one compute server can own by itself.
fn require_region<P: Plugin>(region: &P::Region) -> Result<(), Error> {
    let why = match (region.overlap(region), P::can_own(region)) {
        (Overlap::Inside, true) => return Ok(()),
        (Overlap::Inside, false) => format!("a {} has one owner, of all of it", P::NAME),
        _ => format!("nothing lies in {region:?}; name one in which something does"),
    };
    Err(Error::BadOption { option: "region", why })
}

/// Adds a region to what a tenure is for, as [`claim`] does.
///
/// # Errors
/// As [`claim`]; [`Error::GivenUp`] if the tenure has ended.
pub async fn claim_more<P: Plugin>(
    worker: &Handle,
    structure: &Structure,
    tenure: &Arc<Tenure>,
    region: &P::Region,
    waits: Waits,
) -> Result<(), Error> {
    require_region::<P>(region)?;
    let claim = RegionClaim::<P>::new(structure, region);
    enter(worker, structure, Part::region(region), Some(tenure), claim, waits).await.map(drop)
}

/// Has a tenure be for `rest` instead of a region that it was for: others can claim `part`, which is left out. One change of the map.
///
/// # Errors
/// [`Error::PartitionMapFull`], also if there would be no room for whoever claims the part, and nothing has changed; if the fabric
/// fails: then maintenance goes on with it.
pub async fn reduce<R: Region>(
    worker: &Handle,
    structure: &Structure,
    tenure: &Arc<Tenure>,
    region: &R,
    part: &R,
    rest: &[R],
) -> Result<(), Error> {
    let (handle, of, tenure) = (worker.clone(), structure.clone(), Arc::clone(tenure));
    let (gone, part) = (Part::region(region), Part::region(part));
    let rest: Vec<Part> = rest.iter().map(Part::region).collect();
    let reducing = async move {
        let turn = turn(&handle, &of).await;
        let before = tenure.parts();
        // If it cannot be read now, the change of the map says why.
        if let (Ok(mut map), Some((_, class))) = (read(&handle, &of).await, descriptor(&of)?.remote()) {
            map.entries.retain(|entry| entry.owner != handle.owner() || entry.part != gone);
            map.entries.extend(entries_of(&handle, &rest).chain(entries_of(&handle, &[part])));
            map.encode(class.words() - MAP)?;
        }
        tenure.set_parts(before.iter().filter(|part| **part != gone).cloned().chain(rest).collect());
        // Its log goes on: there is nothing to be replayed.
        let published = publish_all(&handle, &of, &turn, Some(gone)).await;
        if matches!(published, Err(Error::PartitionMapFull { .. })) {
            tenure.set_parts(before);
        }
        published
    };
    worker.spawn_to_end(reducing).await
}

/// What a compute server wants to be entered for.
trait Wish {
    /// Whether that can be had beside these entries, which are those of the living.
    fn fits(&self, entries: &[MapEntry], me: OwnerId) -> Result<(), Error>;

    /// Whether nobody else may change anything then.
    fn is_alone(&self) -> bool {
        false
    }

    /// What stays of a region whose owner is dead, and of which nobody else has claimed anything.
    fn leaves(&self, part: &Part) -> Result<Vec<Part>, Error>;
}

/// Nothing that it does not have.
struct Nothing;

impl Wish for Nothing {
    fn fits(&self, _entries: &[MapEntry], _me: OwnerId) -> Result<(), Error> {
        Ok(())
    }

    fn leaves(&self, part: &Part) -> Result<Vec<Part>, Error> {
        Ok(vec![part.clone()])
    }
}

/// A region.
struct RegionClaim<P: Plugin> {
    of: Structure,
    region: P::Region,
}

impl<P: Plugin> RegionClaim<P> {
    fn new(structure: &Structure, region: &P::Region) -> Self {
        Self { of: structure.clone(), region: region.clone() }
    }
}

impl<P: Plugin> Wish for RegionClaim<P> {
    fn fits(&self, entries: &[MapEntry], me: OwnerId) -> Result<(), Error> {
        for MapEntry { owner, part } in entries {
            match part.to_region::<P::Region>()? {
                Some(other) if other.overlap(&self.region) != Overlap::Outside => {
                    return Err(Error::Owned { name: self.of.name.clone(), owner: *owner });
                }
                None if *owner != me => return Err(Error::HasUser { name: self.of.name.clone(), user: *owner }),
                _ => {}
            }
        }
        Ok(())
    }

    fn is_alone(&self) -> bool {
        true
    }

    fn leaves(&self, part: &Part) -> Result<Vec<Part>, Error> {
        let Some(other) = part.to_region::<P::Region>()? else { return Ok(Vec::new()) };
        if other.overlap(&self.region) == Overlap::Outside {
            return Ok(vec![part.clone()]);
        }
        Ok(other.without(&self.region).unwrap_or_default().iter().map(Part::region).collect())
    }
}

/// The right to use a structure one-sided.
struct SharedClaim(Structure);

impl Wish for SharedClaim {
    fn fits(&self, entries: &[MapEntry], _me: OwnerId) -> Result<(), Error> {
        match entries.iter().find(|entry| matches!(entry.part, Part::Region(_))) {
            Some(&MapEntry { owner, .. }) => Err(Error::Owned { name: self.0.name.clone(), owner }),
            None => Ok(()),
        }
    }

    fn leaves(&self, _part: &Part) -> Result<Vec<Part>, Error> {
        Ok(Vec::new())
    }
}

/// Ends a tenure: from now on nothing is done by it, and others can claim the part. Whoever holds it has written back what it
/// has changed.
///
/// # Errors
/// If the fabric fails: then maintenance tries again.
pub async fn give_up(worker: &Handle, structure: &Structure, tenure: &Tenure) -> Result<(), Error> {
    tenure.end();
    bring_up_to_date(worker, structure).await
}

/// A handle's right to use a structure one-sided.
#[derive(Debug, Clone, Default)]
pub struct SharedUser {
    entered: RefCell<Option<Rc<Entered>>>,
    /// How often it was entered.
    times: Cell<u32>,
    /// How many changes by it may have had an effect.
    changes: Cell<u32>,
}

#[derive(Debug)]
struct Entered {
    way: Way,
    tenure: Arc<Tenure>,
}

/// A change by a [`SharedUser`], until it is dropped. Whoever becomes the owner meanwhile waits for that, and others count this compute
/// server as a user.
#[derive(Debug)]
#[must_use = "the change is over when it is dropped"]
pub struct Acting {
    _inside: Passage,
    entered: Rc<Entered>,
}

impl Acting {
    /// The change was sent to this memory server, and nobody can say what became of it: it may still be made. This compute server stays entered as a
    /// user until it leaves, or becomes the owner itself; before either it waits for what is under way there, and has nothing begin any more.
    pub fn is_unsettled_at(self, server: ServerId) {
        self.entered.tenure.is_unsettled_at(server);
    }
}

impl SharedUser {
    /// By what right the structure may be used, as far as is known here.
    #[inline]
    pub fn right(&self, structure: &Structure) -> Option<Right> {
        // The catalog's own pages have no owner.
        if structure.descriptor.is_none() {
            return Some(Right::LASTING);
        }
        // Behind a gate that is shut the map may name an owner already: of the same compute server, and then others.
        let holds = |entered: &Rc<Entered>| entered.tenure.is_valid() && !entered.way.gate().is_shut();
        let holds = self.entered.borrow().as_ref().is_some_and(holds);
        holds.then(|| Right { number: self.times.get(), changes: self.changes.get() })
    }

    /// Whether it has this right still, or has changed something since: that it does by a right.
    #[inline]
    pub fn stands(&self, structure: &Structure, right: Right, reads_only: bool) -> bool {
        let is_lost = self.right(structure).is_none_or(|now| now.number != right.number);
        !is_lost || !reads_only && self.changes.get() != right.changes
    }

    /// A change by it may have had an effect.
    pub(super) fn has_changed(&self) {
        self.changes.set(self.changes.get().wrapping_add(1));
    }

    /// Begins a change, if the structure may be changed as far as is known here.
    #[inline]
    pub fn try_act(&self) -> Option<Acting> {
        let entered = self.entered.borrow();
        let entered = entered.as_ref()?;
        let inside = entered.way.pass()?;
        // After that: whoever ends it has shut the gate.
        entered.tenure.is_valid().then(|| Acting { _inside: inside, entered: Rc::clone(entered) })
    }

    /// [Enters](SharedUser::enter), and begins a change; `None` for pages of the catalog.
    ///
    /// # Errors
    /// As [`SharedUser::enter`].
    pub async fn act(&self, worker: &Handle, structure: &Structure) -> Result<Option<Acting>, Error> {
        let mut attempt = 0;
        while structure.descriptor.is_some() {
            if let Some(acting) = self.try_act() {
                return Ok(Some(acting));
            }
            if self.right(structure).is_some() {
                // Somebody tries to become the owner, and others may keep him from it.
                worker.back_off(attempt).await;
                attempt += 1;
            } else {
                self.enter(worker, structure).await?;
            }
        }
        Ok(None)
    }

    /// Enters this compute server as a shared user, if it is not entered.
    ///
    /// # Errors
    /// [`Error::Owned`] if somebody owns some of the structure and lives; if the fabric fails.
    pub async fn enter(&self, worker: &Handle, structure: &Structure) -> Result<(), Error> {
        // The catalog's own pages have no owner.
        if structure.descriptor.is_none() {
            return Ok(());
        }
        let tenure =
            enter(worker, structure, Part::Shared, None, SharedClaim(structure.clone()), Waits::AWhile).await?;
        let is_same = |entered: &Rc<Entered>| Arc::ptr_eq(&entered.tenure, &tenure);
        if !self.entered.borrow().as_ref().is_some_and(is_same) {
            self.entered.replace(Some(Rc::new(Entered { way: tenure.gate().way(), tenure })));
            self.times.set(self.times.get().wrapping_add(1));
        }
        Ok(())
    }
}

/// Enters a part of this compute server into the map, for a tenure of its own or one that there is.
async fn enter(
    worker: &Handle,
    structure: &Structure,
    part: Part,
    into: Option<&Arc<Tenure>>,
    wish: impl Wish + 'static,
    waits: Waits,
) -> Result<Arc<Tenure>, Error> {
    let (handle, structure, into) = (worker.clone(), structure.clone(), into.cloned());
    // A task, so that the map and what is known here of it do not part.
    let entering = async move {
        // Those who wait at a time are refused at a time.
        let until_ns = handle.clock().now_ns() + if waits == Waits::AWhile { WAIT_MAX_NS } else { 0 };
        loop {
            let turn = turn(&handle, &structure).await;
            if into.as_ref().is_some_and(|tenure| !tenure.is_valid()) {
                return Err(Error::GivenUp { name: structure.name.clone() });
            }
            let (mut tenures, mut users) = (turn.tenures(), Resting(Vec::new()));
            if part == Part::Shared {
                if let Some(shared) = tenures.iter().find(|tenure| tenure.is_shared()) {
                    return Ok(Arc::clone(shared));
                }
            } else {
                // Its owner is the only one to change a structure, in the same process, too.
                users.0.extend(tenures.extract_if(.., |tenure| tenure.is_shared()));
                users.rest(&handle, &structure).await?;
            }
            let mut parts: Vec<Part> = tenures.iter().flat_map(|tenure| tenure.parts()).collect();
            let ours: Vec<MapEntry> = entries_of(&handle, &parts).collect();
            wish.fits(&ours, handle.owner())?;
            let kept = parts.clone();
            parts.push(part.clone());
            let published = async {
                if part != Part::Shared && !handle.compute().tenures.unsettled(structure.id).is_empty() {
                    // What it is settled by lasts: not for a claim that others do not admit.
                    ask(&handle, &structure, &wish).await?;
                    settle(&handle, &structure).await?;
                }
                publish(&handle, &structure, &parts, Kept::Only(&kept), &wish).await
            };
            match published.await {
                Ok(()) => {
                    turn.has_published(true);
                    users.0.iter().for_each(|tenure| tenure.end());
                    let Some(tenure) = into else { return Ok(turn.add(part)) };
                    let parts = tenure.parts();
                    tenure.set_parts(parts.into_iter().chain([part]).collect());
                    return Ok(tenure);
                }
                Err(Error::Owned { .. } | Error::HasUser { .. }) if handle.clock().now_ns() < until_ns => {}
                Err(error) => return Err(error),
            }
            // Meanwhile others have their turn, and what is here may have changed.
            drop((tenures, users, turn));
            handle.sleep_until(handle.clock().now_ns() + REST_NS).await;
        }
    };
    worker.spawn_to_end(entering).await
}

/// Shared users of this compute server that begin no change until it is dropped: somebody is about to become the owner.
struct Resting(Vec<Arc<Tenure>>);

impl Resting {
    /// Waits until the changes under way are over.
    ///
    /// # Errors
    /// [`Error::HasUser`] if they go on for a quarter of a second: nobody may be driving them.
    async fn rest(&self, worker: &Handle, structure: &Structure) -> Result<(), Error> {
        let (mut seen_ns, mut waited_ns) = (worker.clock().now_ns(), 0);
        let mut attempt = 0;
        for tenure in &self.0 {
            tenure.gate().shut();
        }
        while !self.0.iter().all(|tenure| tenure.gate().is_empty()) {
            let now_ns = worker.clock().now_ns();
            // Whoever was stopped itself has not waited meanwhile, nor let the others go on.
            waited_ns += now_ns.saturating_sub(std::mem::replace(&mut seen_ns, now_ns)).min(WAIT_MAX_NS / LOOKS_MIN);
            if waited_ns >= WAIT_MAX_NS {
                return Err(Error::HasUser { name: structure.name.clone(), user: worker.owner() });
            }
            worker.back_off(attempt).await;
            attempt += 1;
        }
        Ok(())
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        self.0.iter().for_each(|tenure| tenure.gate().open());
    }
}

/// Has memory servers make no change any more that this compute server has sent them, and of which nobody could say what became of it. From then on they
/// make none for it at all.
async fn settle(worker: &Handle, structure: &Structure) -> Result<(), Error> {
    let tenures = &worker.compute().tenures;
    for server in tenures.unsettled(structure.id) {
        match fencing::end_sent(worker, server, Duration::from_nanos(WAIT_MAX_NS)).await.map_err(|error| *error) {
            // One that is gone, and its memory with it, makes none either.
            Ok(()) | Err(Error::Fabric(FabricError::ServerLost { .. })) => tenures.settled(structure.id, server),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn entries_of<'a>(worker: &Handle, parts: &'a [Part]) -> impl Iterator<Item = MapEntry> + use<'a> {
    let owner = worker.owner();
    parts.iter().map(move |part| MapEntry { owner, part: part.clone() })
}

async fn turn(worker: &Handle, structure: &Structure) -> Turn {
    let mut attempt = 0;
    loop {
        if let Some(turn) = Tenures::try_turn(&worker.compute().tenures, structure) {
            return turn;
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
}

/// Has the map of a structure state what this compute server has of it.
async fn bring_up_to_date(worker: &Handle, structure: &Structure) -> Result<(), Error> {
    let (handle, structure) = (worker.clone(), structure.clone());
    let publishing = async move {
        let turn = turn(&handle, &structure).await;
        publish_all(&handle, &structure, &turn, None).await
    };
    worker.spawn_to_end(publishing).await
}

/// Has the map state what the tenures are for; one that goes on was for `reduced` until now.
async fn publish_all(worker: &Handle, structure: &Structure, turn: &Turn, reduced: Option<Part>) -> Result<(), Error> {
    let tenures = turn.tenures();
    let parts: Vec<Part> = tenures.iter().flat_map(|tenure| tenure.parts()).collect();
    let kept: Vec<Part> = parts.iter().cloned().chain(reduced).collect();
    let published = publish(worker, structure, &parts, Kept::Only(&kept), &Nothing).await;
    match &published {
        Err(Error::PartitionMapFull { .. }) => {}
        Err(error) => turn.has_published(is_gone(worker, structure, error).await),
        Ok(()) => turn.has_published(true),
    }
    published
}

/// Whether publishing failed because the structure is no more. One with a damaged map is there.
async fn is_gone(worker: &Handle, structure: &Structure, error: &Error) -> bool {
    let (Error::Inconsistent { page, .. }, Some((at, _))) = (error, structure.descriptor.and_then(Link::remote)) else {
        return false;
    };
    let header = worker.read(at, HEADER_WORDS).await;
    *page == at && header.is_ok_and(|header| !is_live(at, &header, structure.id))
}

/// The structure is gone, and its map with it.
pub(crate) fn forget(worker: &Handle, structure: &Structure) {
    worker.compute().tenures.forget(structure.id);
}

/// Brings maps up to date that tenures dropped meanwhile have left behind, and takes back the segments of logs that were dropped with nothing
/// left in them. Part of maintenance.
pub(crate) async fn maintain(worker: &Handle) {
    if let Err(error) = wipe_dropped(worker, |log| log.is_done).await {
        tracing::debug!(%error, "segments of dropped logs are lost");
    }
    let tenures = &worker.compute().tenures;
    for structure in tenures.behind() {
        let (handle, of) = (worker.clone(), structure.clone());
        let publishing = async move {
            match Tenures::try_turn(&handle.compute().tenures, &of) {
                Some(turn) if !is_locked(&handle, &of).await => publish_all(&handle, &of, &turn, None).await,
                _ => {
                    // Who changes it now may wait for others, or be stopped: the next time.
                    handle.compute().tenures.remain_behind();
                    Ok(())
                }
            }
        };
        if let Err(error) = worker.spawn_to_end(publishing).await {
            // Gone with the structure, perhaps.
            tracing::debug!(structure = structure.name, %error, "a partition map was not brought up to date");
        }
    }
}

/// Whether the map of a structure is locked by somebody who lives.
async fn is_locked(worker: &Handle, structure: &Structure) -> bool {
    let Some((at, _)) = structure.descriptor.and_then(Link::remote) else { return false };
    // What is wrong with it, publishing says.
    let Ok(words) = worker.read(at, LOCK + 1).await else { return false };
    matches!(LockWord::from_word(words[LOCK]).state(), LockState::LockedBy(owner) if lives(worker, owner))
}

/// Takes all entries of this compute server out of the maps: it leaves the cluster, and has no worker any more.
///
/// # Errors
/// If some map could not be changed, or a log not be replayed: then that is left to others, who need the log.
pub(crate) async fn leave(worker: &Handle) -> Result<(), Error> {
    let mut outcome = Ok(());
    for structure in worker.compute().tenures.all() {
        let left = async {
            settle(worker, &structure).await?;
            publish(worker, &structure, &[], Kept::Nothing, &Nothing).await
        };
        let left = left.await;
        if let Err(error) = left
            && !is_gone(worker, &structure, &error).await
        {
            tracing::debug!(structure = structure.name, %error, "left with an entry in a partition map");
            outcome = Err(error);
        }
    }
    outcome
}

/// Which of its parts a compute server had before, and keeps.
#[derive(Debug, Clone, Copy)]
enum Kept<'a> {
    Only(&'a [Part]),
    /// Nobody uses any: it leaves.
    Nothing,
}

/// Whether the others that live admit it now.
async fn ask(worker: &Handle, structure: &Structure, wish: &dyn Wish) -> Result<(), Error> {
    let access = access(worker, structure);
    retry(worker, async || {
        let page = access.open(Start::Page(descriptor(structure)?)).await?;
        let mut entries = decode(&page)?.entries;
        entries.retain(|entry| entry.owner != worker.owner() && lives(worker, entry.owner));
        Ok(wish.fits(&entries, worker.owner())?)
    })
    .await
}

/// Makes these the entries of this compute server, if the others admit it, and drops what it takes from the dead.
async fn publish(
    worker: &Handle,
    structure: &Structure,
    parts: &[Part],
    kept: Kept<'_>,
    wish: &dyn Wish,
) -> Result<(), Error> {
    let access = access(worker, structure);
    retry(worker, async || {
        let page = access.open(Start::Page(descriptor(structure)?)).await?;
        let before = decode(&page)?;
        let is_ours = |entry: &MapEntry| entry.owner == worker.owner();
        let others = before.entries.iter().filter(|entry| !is_ours(entry)).cloned();
        let (mut entries, dead): (Vec<MapEntry>, Vec<MapEntry>) = others.partition(|entry| lives(worker, entry.owner));
        wish.fits(&entries, worker.owner())?;
        for entry in dead {
            let MapEntry { owner, part } = &entry;
            let left = match part {
                // What it has sent may be under way at a memory server. Beside other users that does no harm.
                Part::Shared if wish.is_alone() || is_finished(worker, *owner).await? => Vec::new(),
                Part::Shared => vec![Part::Shared],
                Part::Region(_) => wish.leaves(part)?,
            };
            if left[..] == [part.clone()] {
                entries.push(entry);
                continue;
            }
            take_over(worker, *owner).await?;
            tracing::info!(structure = structure.name, %owner, ?part, "taken over from the dead");
            entries.extend(left.into_iter().map(|part| MapEntry { owner: *owner, part }));
        }
        let (kept, leaves) = match kept {
            Kept::Only(parts) => (parts, false),
            Kept::Nothing => (&[][..], true),
        };
        let ends = |entry: &MapEntry| is_ours(entry) && entry.part != Part::Shared && !kept.contains(&entry.part);
        if before.entries.iter().any(ends) {
            replay_own(worker, structure.id, leaves).await?;
        }
        entries.extend(entries_of(worker, parts));
        let mut after = PartitionMap { epoch: before.epoch, entries };
        if after.entries == before.entries {
            worker.compute().tenures.saw_epoch(structure.id, before.epoch);
            return Ok(());
        }
        after.epoch += u64::from(!after.owners().eq(before.owners()));
        let words = after.encode(page.read(|words| words.len())? - MAP)?;
        let mut pages = Pages::new();
        let slot = pages.add(page);
        access.change(pages, |pages| pages.fill(slot, MAP, &words)).await?;
        worker.compute().tenures.saw_epoch(structure.id, after.epoch);
        Ok(())
    })
    .await
}

fn lives(worker: &Handle, owner: OwnerId) -> bool {
    worker.compute().fabric.liveness(owner) == Liveness::Alive
}

fn access(worker: &Handle, structure: &Structure) -> OneSided<Descriptor> {
    OneSided::to_any(worker, structure.clone(), Proof::Checksum).unguarded()
}

fn descriptor(structure: &Structure) -> Result<Link, Error> {
    structure.descriptor.ok_or(Error::Inconsistent { page: structure.root, why: "the structure has no descriptor" })
}

fn decode(page: &PageCopy) -> Result<PartitionMap, Error> {
    PartitionMap::decode(page.words(), page.at())
}
