//! A worker's part in the protocol of [`redo`](crate::redo): its rings, and repairs of what dead compute servers have left.
//!
//! Whoever meets a lock of a dead owner has the page repaired and goes on. What nobody meets, the maintenance of every compute
//! server finishes ([`sweep`]): it looks for slots of dead ones now and then, repairs all pages that their records name and their
//! locks hold, frees their rings, takes back the pages that they held ([`reclaim`]), and gives their slots free.
//!
//! Where there is no free slot, who joins takes that of a dead one before. What that one has left is *displaced*: nothing but rings and
//! lock words names it any more. Its rings are looked for among all pages of their size (`recovery/rings.rs`). Who has taken its slot knows
//! ([`Shared::displaces`](crate::shared::Shared::displaces)), sweeps, and does not give the slot free before that has come to an end; if it
//! dies, whoever finds it in that slot looks for what is displaced, too. So as long as something is displaced, somebody looks for it.

mod reclaim;
mod rings;
#[cfg(all(test, not(loom)))]
mod tests;
mod wiping;

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashSet},
    time::Duration,
};

use self::{
    reclaim::reclaim,
    rings::{all_rings, ring_locks, rings},
    wiping::dropped,
};
pub(crate) use self::{
    rings::{RingUse, another_ring, ensure_rings, free_rings, take_places},
    wiping::{wipe, wipe_dropped},
};
use crate::{
    chunk_classes,
    epoch::round::{Board, read_slots},
    error::Error,
    fabric::Liveness,
    fencing,
    layout::{self, Geometry},
    lock::{LockState, LockWord, OwnerId},
    page::{SizeClass, StructureId},
    pages::FreePage,
    ptr::{RemotePtr, ServerId},
    redo::{Newest, RING_CLASS, Recover, Room, finish_page, logged, replay},
    remote::{read_lock, release_word},
    sync::{Ordering, lock},
    worker::Handle,
};

type Failure = Box<Error>;

/// The slot of a compute server, if it has one yet.
async fn slot_of(worker: &Handle, owner: OwnerId) -> Result<Option<usize>, Failure> {
    let slots = read_slots(worker, &Board::of(&worker.compute().geometry[0])).await?;
    Ok(slots.iter().position(|&[incarnation, _]| incarnation == u64::from(owner.incarnation())))
}

impl Recover for Handle {
    async fn rings_of(&self, owner: OwnerId, server: ServerId) -> Result<Option<RemotePtr>, Failure> {
        Ok(slot_of(self, owner).await?.map(|slot| layout::rings_at(server, slot)))
    }

    fn rings<T>(
        &self,
        owner: OwnerId,
        server: ServerId,
        take: impl Fn(RemotePtr, &[u64], &mut Vec<T>),
    ) -> impl Future<Output = Result<Vec<T>, Failure>> {
        rings(self, owner, server, RING_CLASS.words(), take)
    }

    async fn reserve(&self, page: RemotePtr, parts: &[usize]) -> Result<Room, Failure> {
        // Rings before the slot: to make one takes slots.
        ensure_rings(self, page.server(), parts.len()).await?;
        let slot = self.take_slots([page].into_iter()).await;
        let places = take_places(self, [page.server()].into_iter(), parts).await;
        let places = places.into_iter().next().expect("one for the one memory server");
        Ok(Room { places, _slot: Some(slot) })
    }

    fn next_sequence(&self) -> u64 {
        self.compute().next_sequence()
    }

    fn holds_page(&self, at: RemotePtr, class: SizeClass) -> bool {
        self.compute().geometry.get(at.server().index()).is_some_and(|geometry| geometry.holds_page(at, class))
    }

    fn can_free(&self, at: RemotePtr, class: SizeClass) -> impl Future<Output = Result<bool, Failure>> {
        chunk_classes::is_of_chunk(self, at, class)
    }

    fn retire(&self, at: RemotePtr, class: SizeClass, version: u64) {
        self.compute().pages.retire(std::iter::once(FreePage { at, class, version }));
    }

    fn repair(
        &self,
        page: RemotePtr,
        class: SizeClass,
        lock: LockWord,
        owner: OwnerId,
    ) -> impl Future<Output = Result<(), Failure>> {
        let worker = self.clone();
        // Rare, and not to be cut off.
        Box::pin(self.spawn_to_end(async move {
            tracing::debug!(%page, %owner, "repairing");
            // As for all that finishes changes. The operation may be gone by then.
            let _pin = worker.pin();
            finish_page(&worker, page, class, lock, owner).await
        }))
    }

    fn replay_logs(&self, owner: OwnerId) -> impl Future<Output = Result<(), Failure>> {
        replay_all(self, owner, |_, _| true)
    }
}

/// How long who takes over waits for operations that the dead one has shipped, unless it is [told](crate::compute::ComputeOptions::lock_wait);
/// and how long maintenance does, which comes again.
const SHIPPED_WAIT: Duration = Duration::from_secs(5);
const SHIPPED_WAIT_OF_SWEEP: Duration = Duration::from_millis(20);

/// Whether nothing is under way any more that a dead compute server has shipped, and nothing of it can begin; if not, where.
///
/// # Errors
/// If a memory server is lost.
pub(crate) async fn fence_off(
    worker: &Handle,
    geometry: &[Geometry],
    slot: usize,
    dead: OwnerId,
) -> Result<Option<ServerId>, Failure> {
    let has_slot = async || Ok(worker.load(layout::slot_at(slot)).await? == u64::from(dead.incarnation()));
    for Geometry { server, .. } in geometry {
        if fencing::fence_off(worker, layout::fence_at(*server, slot), dead, has_slot).await?.is_some() {
            return Ok(Some(*server));
        }
    }
    Ok(None)
}

/// [`fence_off`], and waits.
async fn end_shipped(worker: &Handle, slot: usize, dead: OwnerId, waited: Duration) -> Result<(), Failure> {
    let until_ns = worker.clock().now_ns().saturating_add(u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX));
    let mut attempt = 0;
    while let Some(server) = fence_off(worker, &worker.compute().geometry, slot, dead).await? {
        if worker.clock().now_ns() >= until_ns {
            return Err(Box::new(Error::ServerStalled { server, owner: dead, waited }));
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
    Ok(())
}

/// Finishes what compute servers have left that have died, takes back the pages that they held, and gives their slots free; of how many
/// something is left, because others were busy with it. `free_unfinished` frees the structures that those were making or dropping whose
/// changes are finished, and says of whom it has left some, and why.
///
/// # Errors
/// If a memory server is lost, or there is no memory for records. What was not finished is left to the next time, or to whoever
/// meets it; the others' is finished.
pub(crate) async fn sweep<F>(worker: &Handle, free_unfinished: F) -> Result<usize, Error>
where
    F: AsyncFn(&Handle, &[OwnerId]) -> (Vec<OwnerId>, Result<(), Error>) + 'static,
{
    let compute = worker.compute();
    let slots = read_slots(worker, &Board::of(&compute.geometry[0])).await?;
    let mut dead = Vec::new();
    for (slot, [incarnation, _]) in slots.into_iter().enumerate() {
        if let Some(owner) = OwnerId::new(incarnation)
            && owner != compute.owner
            && compute.fabric.liveness(owner) == Liveness::Dead
        {
            dead.push((slot, owner));
        }
    }
    if dead.is_empty() && !compute.displaces.load(Ordering::Acquire) {
        return Ok(0);
    }
    compute.pages.forget_lost_chunks();
    let handle = worker.clone();
    worker.spawn_to_end(async move { finish(&handle, &dead, free_unfinished).await }).await
}

/// Whether all that a dead compute server has left is finished, and others can have its slot.
///
/// # Errors
/// If a memory server is lost.
pub(crate) async fn is_finished(worker: &Handle, dead: OwnerId) -> Result<bool, Error> {
    let slots = read_slots(worker, &Board::of(&worker.compute().geometry[0])).await?;
    Ok(slots.iter().all(|&[incarnation, _]| incarnation != u64::from(dead.incarnation())))
}

/// Waits for what a dead compute server has shipped, and finishes its changes, unless that has been done; the rest is left to a [`sweep`].
///
/// # Errors
/// As [`sweep`]; [`Error::ServerStalled`] if a memory server does not end an operation that the dead one has shipped.
pub(crate) async fn take_over(worker: &Handle, dead: OwnerId) -> Result<(), Error> {
    let slot = slot_of(worker, dead).await?;
    let handle = worker.clone();
    let finishing = async move {
        // Without a slot it is fenced off, and may yet have left something.
        if let Some(slot) = slot {
            end_shipped(&handle, slot, dead, handle.compute().lock_wait.unwrap_or(SHIPPED_WAIT)).await?;
        }
        finish_changes(&handle, dead).await
    };
    Ok(worker.spawn_to_end(finishing).await?)
}

/// Replays the logs of a structure that this compute server has written and writes no more, and gives their segments back; all of them,
/// if it leaves: then they go with its rings. With an unfinished structure the rings stay, and the logs in them. No page is older then than
/// its newest record, so who replays them once more changes nothing.
///
/// # Errors
/// If a memory server is lost, or there is no memory for records.
pub(crate) async fn replay_own(worker: &Handle, structure: StructureId, leaves: bool) -> Result<(), Error> {
    // First: none of them is in use then, so all are replayed.
    let dropped = dropped(worker.compute(), structure);
    let in_use = if leaves { HashSet::new() } else { lock(&worker.compute().logs).clone() };
    replay_all(worker, worker.owner(), |of, log| of == structure && !in_use.contains(&log)).await?;
    match leaves {
        true => Ok(()),
        false => wipe_dropped(worker, |log| dropped.contains(&log.number)).await,
    }
}

async fn replay_all(
    worker: &Handle,
    owner: OwnerId,
    are_meant: impl Fn(StructureId, u64) -> bool,
) -> Result<(), Failure> {
    let servers = worker.compute().geometry.iter().map(|geometry| geometry.server);
    replay(worker, owner, servers, are_meant).await.map(drop)
}

/// Those with a slot, and then those whose slots others have taken.
async fn finish(
    worker: &Handle,
    dead: &[(usize, OwnerId)],
    free_unfinished: impl AsyncFn(&Handle, &[OwnerId]) -> (Vec<OwnerId>, Result<(), Error>),
) -> Result<usize, Error> {
    let holders = RefCell::new(BTreeSet::new());
    let named: Vec<_> = dead.iter().map(|&(slot, owner)| (Some(slot), owner)).collect();
    let mut slots = Vec::new();
    let with_slot = finish_those(worker, &named, &free_unfinished, &holders, &mut slots).await;
    let displaced = displaced(worker, holders.take()).await?;
    let without = match &displaced[..] {
        [] => Ok(0),
        displaced => {
            tracing::info!(owners = ?displaced, "others have the slots of compute servers that have left something");
            let displaced: Vec<_> = displaced.iter().map(|&owner| (None, owner)).collect();
            finish_those(worker, &displaced, &free_unfinished, &holders, &mut Vec::new()).await
        }
    };
    // Those with slots may have taken them from the others: while they have them, whoever comes next finds both.
    if matches!(without, Ok(0)) {
        for &(slot, owner) in &slots {
            release_word(worker, layout::slot_at(slot), u64::from(owner.incarnation()), 0).await?;
        }
    }
    let left = with_slot.and_then(|left| Ok(left + without?))?;
    if left == 0 {
        worker.compute().displaces.store(false, Ordering::Release);
    }
    Ok(left)
}

/// Of how many something is left; `holders` gets all others that have or had a page, and `slots` the slots that can be given free.
async fn finish_those(
    worker: &Handle,
    dead: &[(Option<usize>, OwnerId)],
    free_unfinished: &impl AsyncFn(&Handle, &[OwnerId]) -> (Vec<OwnerId>, Result<(), Error>),
    holders: &RefCell<BTreeSet<OwnerId>>,
    slots: &mut Vec<(usize, OwnerId)>,
) -> Result<usize, Error> {
    let (mut finished, mut outcome) = (Vec::new(), Ok(()));
    // Whose changes wait for memory, and the chunks with pages that those have to do with.
    let mut waiting = Vec::new();
    for &(slot, owner) in dead {
        let ended = match slot {
            Some(slot) => end_shipped(worker, slot, owner, SHIPPED_WAIT_OF_SWEEP).await,
            // It was fenced off before its slot was given away.
            None => Ok(()),
        };
        let has_ended = ended.is_ok();
        match finish_changes(worker, owner).await.and(ended) {
            Ok(()) => finished.push((slot, owner)),
            // One that cannot be finished keeps nobody from finishing the others.
            Err(error) => {
                if has_ended
                    && matches!(*error, Error::OutOfMemory { .. })
                    && let Ok(named) = named_chunks(worker, owner).await
                {
                    waiting.push((owner, named));
                }
                outcome = outcome.and(Err(*error));
            }
        }
    }
    let owners: Vec<OwnerId> = finished.iter().map(|&(_, owner)| owner).collect();
    if owners.is_empty() && waiting.is_empty() && !worker.compute().displaces.load(Ordering::Acquire) {
        return outcome.map(|()| 0);
    }
    // Whose structures are left keeps its slot and its rings, by which it is found again; what it held is taken back all the same.
    let (unfinished, freed) = free_unfinished(worker, &owners).await;
    outcome = outcome.and(freed);
    finished.retain(|(_, owner)| !unfinished.contains(owner));
    for &(_, owner) in &finished {
        free_rings(worker, owner).await?;
    }
    // Only now: a new page of a change that is not finished says by its lock word what is to become of that change. So pages of
    // others, who died meanwhile, are left alone. Where changes wait for memory, what else their owners held may be that memory.
    let is_one = |owner, server, chunk| {
        if owners.contains(&owner) {
            return true;
        }
        match waiting.iter().find(|(of, _)| *of == owner) {
            Some((_, named)) => !named.contains(&(server, chunk)),
            None => {
                holders.borrow_mut().insert(owner);
                false
            }
        }
    };
    if !reclaim(worker, is_one).await? {
        return outcome.map(|()| dead.len().max(1));
    }
    slots.extend(finished.iter().filter_map(|&(slot, owner)| Some((slot?, owner))));
    if !finished.is_empty() {
        let owners: Vec<OwnerId> = finished.into_iter().map(|(_, owner)| owner).collect();
        tracing::info!(?owners, "finished what dead compute servers have left");
    }
    outcome.map(|()| 0)
}

/// The chunks with pages that records and logs of a dead compute server name, and with rings that it was making, through which others
/// may be found.
async fn named_chunks(worker: &Handle, owner: OwnerId) -> Result<HashSet<(ServerId, u64)>, Error> {
    let mut chunks = HashSet::new();
    let mut add = |at: RemotePtr, class| {
        let geometry = worker.compute().geometry.get(at.server().index());
        let chunk = geometry.and_then(|geometry| geometry.locate(at, class));
        chunks.extend(chunk.map(|(chunk, _)| (at.server(), chunk)));
    };
    for geometry in &worker.compute().geometry {
        for (at, lock) in ring_locks(worker, owner, geometry.server).await? {
            if lock.state() != LockState::Unlocked {
                add(at, RING_CLASS);
            }
        }
        let records = Newest::read(worker, owner, geometry.server).await?;
        records.named().for_each(|(at, class)| add(at, class));
    }
    let servers = worker.compute().geometry.iter().map(|geometry| geometry.server);
    for records in logged(worker, owner, servers, |_, _| true).await?.into_values() {
        records.iter().filter_map(|record| record.page.remote()).for_each(|(at, class)| add(at, class));
    }
    Ok(chunks)
}

async fn retain_without_slot(worker: &Handle, owners: &mut BTreeSet<OwnerId>) -> Result<(), Error> {
    if !owners.is_empty() {
        let slots = read_slots(worker, &Board::of(&worker.compute().geometry[0])).await?;
        owners.retain(|owner| slots.iter().all(|&[incarnation, _]| incarnation != u64::from(owner.incarnation())));
    }
    Ok(())
}

/// The dead among these, and among those who have rings, whose slots others have taken.
async fn displaced(worker: &Handle, mut owners: BTreeSet<OwnerId>) -> Result<Vec<OwnerId>, Error> {
    let compute = worker.compute();
    for geometry in &compute.geometry {
        owners.extend(all_rings(worker, geometry).await?.into_iter().map(|(_, owner)| owner));
    }
    retain_without_slot(worker, &mut owners).await?;
    owners.retain(|&owner| worker.is_dead(owner));
    // Again: who had just joined then, and has died since, has its slot yet.
    retain_without_slot(worker, &mut owners).await?;
    Ok(owners.into_iter().collect())
}

/// Replays the logs of a dead owner, and repairs all pages that its records name and its locks hold.
async fn finish_changes(worker: &Handle, owner: OwnerId) -> Result<(), Failure> {
    // What its records name is freed, and by others as well: it is not reused before this is over.
    let _pin = worker.pin();
    let mut outcome = replay_all(worker, owner, |_, _| true).await;
    for geometry in &worker.compute().geometry {
        let newest = match Newest::read(worker, owner, geometry.server).await {
            Ok(newest) => newest,
            Err(error) => {
                outcome = outcome.and(Err(error));
                continue;
            }
        };
        for page in newest.pages() {
            let lock = page.lock.locked_by(owner);
            let finished = match read_lock(worker, page.at).await {
                Ok(found) if found == lock => finish_page(worker, page.at, page.class, lock, owner).await,
                found => found.map(drop),
            };
            if let Err(error) = finished {
                tracing::debug!(page = %page.at, %owner, %error, "not repaired");
                outcome = outcome.and(Err(error));
            }
        }
    }
    outcome
}
