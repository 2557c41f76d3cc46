//! Rings: made when a worker needs them, found by the slot of their compute server or among all pages of their size, and freed.

use smallvec::SmallVec;

use super::{Failure, slot_of};
use crate::{
    error::Error,
    layout::{self, CHUNK_BYTES, Geometry},
    lock::{LockState, LockWord, OwnerId},
    page::{self, CHECKSUM, HEADER_WORDS, Identity, LOCK},
    pages::{self, Chunk, ChunkState, FreePage, NewPage, allocate},
    ptr::{RemotePtr, ServerId},
    redo::{Places, RING_CLASS, RING_FIRST, RING_NEXT, RING_OWNER, RINGS, is_ring_of, read_rings, take_alone},
    remote::{claim_word, write_words},
    structure::Placement,
    sync::lock,
    worker::Handle,
};

/// What `take` takes from the first `words` of the rings of a compute server on a memory server: of those in the list of its slot or, if
/// it has none any more, wherever they are.
pub(super) async fn rings<T>(
    worker: &Handle,
    owner: OwnerId,
    server: ServerId,
    words: usize,
    take: impl Fn(RemotePtr, &[u64], &mut Vec<T>),
) -> Result<Vec<T>, Failure> {
    if let Some(slot) = slot_of(worker, owner).await? {
        let taken = read_rings(worker, layout::rings_at(server, slot), owner, words, &take).await?;
        // Whoever has taken the slot meanwhile may have put rings of its own in front.
        if worker.load(layout::slot_at(slot)).await? == u64::from(owner.incarnation()) {
            return Ok(taken);
        }
    }
    // It has no slot.
    let mut taken = Vec::new();
    for (at, of) in all_rings(worker, &worker.compute().geometry[server.index()]).await? {
        if of == owner {
            let ring = worker.read(at, words).await?;
            if is_ring_of(&ring, at, owner) {
                take(at, &ring, &mut taken);
            }
        }
    }
    Ok(taken)
}

/// The rings of a compute server on a memory server, and their lock words.
pub(super) async fn ring_locks(
    worker: &Handle,
    owner: OwnerId,
    server: ServerId,
) -> Result<Vec<(RemotePtr, LockWord)>, Failure> {
    rings(worker, owner, server, RING_FIRST, |at, ring, locks| locks.push((at, LockWord::from_word(ring[LOCK])))).await
}

/// All rings in use on a memory server, and whose they are.
pub(super) async fn all_rings(worker: &Handle, geometry: &Geometry) -> Result<Vec<(RemotePtr, OwnerId)>, Failure> {
    let mut rings = Vec::new();
    for (number, entry) in (0..).zip(pages::directory(worker, geometry).await?) {
        if ChunkState::from_word(entry[0]).is_none_or(|state| state.class != RING_CLASS) {
            continue;
        }
        let first = geometry.chunk_at(number);
        let pages = (0..CHUNK_BYTES as usize / RING_CLASS.bytes()).map(|index| first.word(index * RING_CLASS.words()));
        let reads: Vec<_> = pages.map(|at| (at, worker.read(at, RING_FIRST))).collect();
        for (at, read) in reads {
            let words = read.await?;
            let lock = LockWord::from_word(words[LOCK]);
            // Not while somebody makes something else of it.
            let is_whole = words[CHECKSUM] == page::checksum(&words[..HEADER_WORDS], lock.version());
            let is_in_use = lock.state() == LockState::Unlocked && is_whole;
            let owner = OwnerId::new(words[RING_OWNER]).filter(|&owner| is_in_use && is_ring_of(&words, at, owner));
            rings.extend(owner.map(|owner| (at, owner)));
        }
    }
    Ok(rings)
}

/// Makes sure that the worker has the rings on a memory server that a record of so many parts needs.
///
/// # Errors
/// If there is no memory for one, or the memory server is lost.
pub(crate) async fn ensure_rings(worker: &Handle, server: ServerId, parts: usize) -> Result<(), Error> {
    let rings = worker.rings();
    let mut attempt = 0;
    while rings.count(server) < Places::rings_for(parts) {
        if rings.is_growing.replace(true) {
            worker.back_off(attempt).await;
            attempt += 1;
            continue;
        }
        let growing = worker.clone();
        let grown = worker.spawn_to_end(async move {
            let ring = another_ring(&growing, server, RingUse::Records).await;
            growing.rings().is_growing.set(false);
            ring.map(|ring| growing.rings().add(ring))
        });
        grown.await?;
    }
    Ok(())
}

/// Takes room for a record on each of these memory servers, where it has rings enough. Waits until records before it are done with,
/// if it must.
pub(crate) async fn take_places(
    worker: &Handle,
    servers: impl Iterator<Item = ServerId> + Clone,
    parts: &[usize],
) -> SmallVec<[Places; 1]> {
    let mut attempt = 0;
    loop {
        // All or none: nobody waits for room while it keeps others waiting.
        let taken = servers.clone().map(|server| worker.rings().take(server, parts)).collect::<Option<_>>();
        if let Some(taken) = taken {
            return taken;
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
}

/// What a ring is for. Without records nothing is changed, not even to free pages; a log that has no room makes others wait, or leaves a
/// cache without an owner. So records alone have the chunks that are for rings alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RingUse {
    Records,
    Log,
}

/// An idle ring of the compute server's, or a new one.
pub(crate) async fn another_ring(worker: &Handle, server: ServerId, ring_use: RingUse) -> Result<RemotePtr, Error> {
    let compute = worker.compute();
    let geometry = &compute.geometry[server.index()];
    let may_be =
        |ring: RemotePtr| ring.server() == server && (ring_use == RingUse::Records || !geometry.is_for_rings(ring));
    let idle = {
        let mut idle = lock(&compute.idle_rings);
        idle.iter().position(|&ring| may_be(ring)).map(|index| idle.swap_remove(index))
    };
    if let Some(ring) = idle {
        return Ok(ring);
    }
    let page = match allocate(worker, RING_CLASS, Placement::Server(server)).await {
        Ok(page) if page.at().server() == server => page,
        Ok(_) | Err(Error::OutOfMemory { .. }) if ring_use == RingUse::Records => kept_page(worker, geometry).await?,
        Ok(_) => return Err(Error::OutOfMemory { class: RING_CLASS }),
        Err(error) => return Err(error),
    };
    make_ring(worker, page).await
}

/// A page of the chunks that are for rings alone. To be run to its end.
async fn kept_page(worker: &Handle, geometry: &Geometry) -> Result<NewPage, Error> {
    for attempt in 0..=pages::BUSY_ATTEMPTS_MAX {
        let mut is_busy = false;
        let entries = pages::directory_block(worker, geometry, 0, geometry.ring_chunks()).await?;
        for (number, _) in (0..).zip(entries).filter(|(_, [_, free])| *free != 0) {
            let chunk = Chunk::new(geometry, number, RING_CLASS);
            let _turn = worker.take_turn_at(chunk.entry).await;
            match chunk.take(worker, 1).await?.as_deref() {
                Some(&[page]) => return Ok(NewPage::taken(page, worker)),
                Some(_) => {}
                None => is_busy = true,
            }
        }
        if !is_busy {
            break;
        }
        worker.back_off(attempt).await;
    }
    Err(Error::OutOfMemory { class: RING_CLASS })
}

/// Makes a ring of a page and puts it in front of the list. Until it is there its lock word says *free*, so it is not lost before.
async fn make_ring(worker: &Handle, page: NewPage) -> Result<RemotePtr, Error> {
    let at = page.at();
    let identity = Identity { structure: RINGS, level: 0, class: RING_CLASS, kind: 0, is_words: true };
    let mut words = [0; RING_FIRST];
    page::seal(&mut words, at, identity, page.first_lock().version());
    words[RING_OWNER] = u64::from(worker.owner().incarnation());
    let head = layout::rings_at(at.server(), worker.compute().member.slot());
    let body = (LOCK + 1..RING_FIRST).map(|index| (at.word(index), words[index]));
    write_words(worker, body.collect()).await?;
    {
        // What comes of a request that fails is read from the head, which nobody else replaces meanwhile.
        let _turn = worker.take_turn_at(head).await;
        loop {
            let next = worker.load(head).await?;
            write_words(worker, vec![(at.word(RING_NEXT), next)]).await?;
            if claim_word(worker, head, next, page.link().word()).await? {
                break;
            }
        }
    }
    page.publish();
    write_words(worker, vec![(at, words[LOCK])]).await?;
    Ok(at)
}

/// Frees the rings of `owner`, which holds no lock: the last of a list first. Nobody has to wait until they are reused: what a repairer
/// reads there after that, it makes nothing of. The head of the list stays as it is: by now somebody else may have the slot, and rings of
/// its own there.
///
/// # Errors
/// If a memory server is lost, or no buffer can be had.
pub(crate) async fn free_rings(worker: &Handle, owner: OwnerId) -> Result<(), Error> {
    for geometry in &worker.compute().geometry {
        for (at, found) in ring_locks(worker, owner, geometry.server).await?.into_iter().rev() {
            let free = LockWord::free(found.next_version(), Some(worker.owner()));
            // One that was being made is in its maker's hands.
            if found.state() == LockState::Unlocked && take_alone(worker, at, found.word(), free.word()).await? {
                let page = FreePage { at, class: RING_CLASS, version: free.version() };
                worker.compute().pages.bring_back(page);
            }
        }
    }
    Ok(())
}
