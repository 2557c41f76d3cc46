//! Pages to allocate, and pages on their way back.
//!
//! ```text
//!  chunk (leased once, one size class for ever)       bitmap on the memory server: free, held by nobody
//!      \                                               ^        |
//!       v                                              |        v
//!  pool of the compute server  <---- grace over --- deferred   pool of any compute server
//!       | batches of 32                                ^
//!       v                                              | retired: unlinked and marked free
//!  list of the worker  ------ allocate ------>  a structure's page
//! ```
//!
//! A page is in exactly one place: its bit is set in its chunk's bitmap, or one compute server holds it (list, pool,
//! deferred list), or it is live in a structure. The version in its lock word outlives all that ([`crate::lock`]); lists keep it
//! beside the pointer, so allocation needs no remote access but for the refill of the pool: a chunk of pages at a time,
//! from bitmaps if they have some (`free_pages/chunk.rs`), else by leasing a chunk. A pool returns what was not used for a while, if that
//! is much. A compute server that ends returns everything; what one holds that dies, or leaves before the grace of its last pages is
//! over, others take over (`recovery/reclaim.rs`). A chunk that it was about to lease is found by whoever needs it, once there is no other.

use std::time::Duration;

#[cfg(doc)]
use crate::free_pages::SharedPages;
pub use crate::free_pages::Unlinked;
pub(crate) use crate::free_pages::{
    ChunkState, FreePage, bitmap_words,
    chunk::{Chunk, OfDead},
};
use crate::{
    error::Error,
    fabric::Error as FabricError,
    free_pages::Lot,
    layout::{CHUNK_BYTES, DIRECTORY_WORDS, Dynamic, Geometry},
    lock::{LockState, LockWord},
    page::{HEADER_WORDS, IDENTITY, Identity, LOCK, PAGE_WORDS_MAX, SizeClass, StructureId},
    ptr::{Link, RemotePtr},
    redo::Recover as _,
    remote::{claim_word, read_lock, take_word},
    structure::Placement,
    worker::Handle,
};

/// What one scan of the bitmaps aims to collect.
const COLLECTED: Lot = Lot::new(256, 256 << 10);
/// Tries to return pages to a chunk that others change, or to free one that others have locked; a tenth of a second or more.
pub(crate) const GIVE_BACK_ATTEMPTS_MAX: u32 = 10_000;
/// Tries to get pages of chunks that others change, where there are no others: some milliseconds.
pub(crate) const BUSY_ATTEMPTS_MAX: u32 = 100;

/// An allocated page that is not yet part of a structure. Dropped, it is free again.
#[derive(Debug)]
pub struct NewPage {
    page: FreePage,
    worker: Option<Handle>,
}

impl NewPage {
    /// A free page that this compute server has taken.
    pub(crate) fn taken(page: FreePage, worker: &Handle) -> Self {
        Self { page, worker: Some(worker.clone()) }
    }

    /// A page for models, which nobody takes back.
    #[cfg(any(test, loom))]
    pub(crate) fn of_nobody(page: FreePage) -> Self {
        Self { page, worker: None }
    }

    /// Its address, to be linked to.
    pub fn at(&self) -> RemotePtr {
        self.page.at
    }

    /// The link to it.
    pub fn link(&self) -> Link {
        Link::to(self.page.at, self.page.class)
    }

    /// Its size.
    pub fn class(&self) -> SizeClass {
        self.page.class
    }

    /// The lock word that the page gets with its first contents. In remote memory it says *free* until then.
    pub fn first_lock(&self) -> LockWord {
        LockWord::unlocked(LockWord::free(self.page.version, None).next_version())
    }

    /// The version in its lock word, at which it is free.
    pub(crate) fn free_version(&self) -> u64 {
        self.page.version
    }

    /// The page has been written, or has begun to be, and nothing leads to it. It is marked free again; with a memory server
    /// that is lost it is lost, too.
    pub(crate) async fn take_back(mut self) {
        let Some(worker) = self.worker.take() else { return };
        let FreePage { at, class, .. } = self.page;
        if let Err(error) = free_owned(worker, at, class, self.first_lock()).await {
            tracing::debug!(page = %at, %error, "a new page was not taken back");
        }
    }

    /// The page has been written, or is going to be, and belongs to a structure now.
    pub fn publish(mut self) {
        self.worker = None;
    }
}

/// A page as it will be once it is installed.
impl From<&NewPage> for Unlinked {
    fn from(page: &NewPage) -> Self {
        Self { at: page.at(), class: page.class(), lock: page.first_lock() }
    }
}

impl Drop for NewPage {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.free_page(self.page);
        }
    }
}

/// Frees a page that this compute server alone may write: no lock is taken. `lock` is its lock word as the owner knows it.
/// To be run to its end, once nothing leads to the page and no write of it is under way: see [`Handle::spawn_to_end`].
///
/// # Errors
/// If the memory server is lost.
pub async fn free_owned(worker: Handle, at: RemotePtr, class: SizeClass, lock: LockWord) -> Result<(), Error> {
    let free = LockWord::free(lock.next_version(), Some(worker.owner()));
    let mut attempt = 0;
    while let Err(error) = worker.write_word(at, free.word()).await {
        worker.before_trying_again(error, &mut attempt).await?;
    }
    worker.compute().pages.retire(std::iter::once(FreePage { at, class, version: free.version() }));
    Ok(())
}

/// Frees a live page of a structure to which nothing leads any more, if it is one. What a dead compute server has done to it is finished
/// before.
///
/// # Errors
/// [`Error::OwnerStalled`] if somebody who lives has it locked for long; if a memory server is lost, or there is no memory for a record.
pub(crate) async fn free_unlinked(worker: &Handle, structure: StructureId, link: Link) -> Result<bool, Error> {
    let Some((at, class)) = link.remote() else { return Ok(false) };
    let (mut attempt, begun_ns) = (0, worker.clock().now_ns());
    loop {
        // Alone: what comes of a request that fails is read from the word, which another task would set to the same.
        let slot = worker.take_slots([at].into_iter()).await;
        let header = worker.read(at, HEADER_WORDS).await?;
        if !Identity::from_word(header[IDENTITY]).is_some_and(|found| found.structure == structure) {
            return Ok(false);
        }
        let lock = LockWord::from_word(header[LOCK]);
        let owner = match lock.state() {
            LockState::Free => return Ok(false),
            LockState::Unlocked => {
                if free_if(worker, at, class, lock).await? {
                    return Ok(true);
                }
                continue;
            }
            LockState::LockedBy(owner) => owner,
        };
        // To repair it takes the slot.
        drop(slot);
        if worker.is_dead(owner) {
            match worker.repair(at, class, lock, owner).await.map_err(|error| *error) {
                // Nobody knows what it was to be, and nobody needs to.
                Err(Error::PageDamaged { .. }) => {
                    let _slot = worker.take_slots([at].into_iter()).await;
                    if free_if(worker, at, class, lock).await? {
                        return Ok(true);
                    }
                }
                repaired => repaired?,
            }
            continue;
        }
        if attempt >= GIVE_BACK_ATTEMPTS_MAX {
            let waited = Duration::from_nanos(worker.clock().now_ns() - begun_ns);
            return Err(Error::OwnerStalled { page: at, owner, waited });
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
}

/// Frees a page that has this lock word; false if it is another one by now, or the request had no effect.
async fn free_if(worker: &Handle, at: RemotePtr, class: SizeClass, lock: LockWord) -> Result<bool, Error> {
    let free = LockWord::free(lock.next_version(), Some(worker.owner()));
    let is_ours = claim_word(worker, at, lock.word(), free.word()).await?;
    if is_ours {
        worker.compute().pages.retire(std::iter::once(FreePage { at, class, version: free.version() }));
    }
    Ok(is_ours)
}

/// Frees those of the pages in [doubt](SharedPages::doubt) whose grace is over and that nobody has freed.
///
/// # Errors
/// If a memory server is lost. The others are freed even then.
pub(crate) async fn free_unclaimed(worker: &Handle) -> Result<(), Error> {
    let mut failure = Ok(());
    for page in worker.compute().pages.take_unclaimed() {
        let Unlinked { at, class, lock } = page;
        let free = page.free_after_doubt(worker.owner());
        let take = async || {
            // Alone, as above; the same page may have been in doubt twice.
            let _slot = worker.take_slots([at].into_iter()).await;
            Ok::<_, Box<Error>>(
                read_lock(worker, at).await? == lock && take_word(worker, at, lock.word(), free.word()).await?,
            )
        };
        match take().await {
            Ok(true) => {
                let page = FreePage { at, class, version: free.version() };
                worker.compute().pages.retire(std::iter::once(page));
            }
            Ok(false) => {}
            Err(error) if matches!(*error, Error::Fabric(FabricError::RegistrationRefused { .. })) => {
                tracing::debug!(page = %at, %error, "a page in doubt is looked at after another grace");
                worker.compute().pages.doubt(std::iter::once(page));
            }
            Err(error) => failure = Err(*error),
        }
    }
    failure
}

/// Allocates a page: from the worker's list, the pool, bitmaps, or a new chunk; on another server if the wanted one is
/// full. Suspends only for the last two.
///
/// # Errors
/// If no memory server has room, or the fabric fails.
pub async fn allocate(worker: &Handle, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
    let compute = worker.compute();
    let servers = compute.geometry.len();
    let first = match placement {
        Placement::RoundRobin => worker.pages().next_turn(servers),
        Placement::Server(server) => server.index() % servers,
        Placement::With(page) => page.server().index() % servers,
    };
    for attempt in 0..=BUSY_ATTEMPTS_MAX {
        let mut is_busy = false;
        for geometry in compute.geometry.iter().cycle().skip(first).take(servers) {
            let key = (geometry.server, class);
            loop {
                if let Some(page) = worker.pages().pop(&compute.pages, key) {
                    return Ok(NewPage::taken(page, worker));
                }
                // Run to its end, whatever becomes of the caller: what it has taken from a memory server would be lost.
                let (refiller, server) = (worker.clone(), geometry.server);
                let refill =
                    async move { refill(&refiller, &refiller.compute().geometry[server.index()], class).await };
                match worker.spawn_to_end(refill).await? {
                    Collected::Some => {}
                    Collected::NoneFree => break,
                    Collected::NoneForNow => {
                        is_busy = true;
                        break;
                    }
                }
            }
        }
        if !is_busy {
            break;
        }
        worker.back_off(attempt).await;
    }
    Err(Error::OutOfMemory { class })
}

/// Brings pages of one server and class into the pool, if that server has any.
async fn refill(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<Collected, Error> {
    let pages = &worker.compute().pages;
    let key = (geometry.server, class);
    worker.count_round_trip();
    let returns = worker.load(geometry.dynamic_at(Dynamic::Returns(class))).await?;
    let mut collected = Collected::NoneFree;
    if pages.search(key).none_free_at != returns {
        collected = collect(worker, geometry, class).await?;
        match collected {
            Collected::Some => return Ok(collected),
            Collected::NoneFree => pages.alter_search(key, |search| search.none_free_at = returns),
            Collected::NoneForNow => {}
        }
    }
    Ok(if lease_chunk(worker, geometry, class).await? { Collected::Some } else { collected })
}

async fn lease_chunk(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<bool, Error> {
    let compute = worker.compute();
    let state = ChunkState::leased_by(compute.owner, class).word();
    let chunk = loop {
        let chunk = match compute.pages.take_lost_chunk(geometry.server) {
            Some(chunk) => chunk,
            None => next_chunk(worker, geometry).await?,
        };
        if chunk >= geometry.chunks {
            match find_lost_chunks(worker, geometry).await? {
                true => continue,
                false => return Ok(false),
            }
        }
        worker.count_round_trip();
        let entry = geometry.directory_at(chunk);
        // Alone: what comes of a request that fails is read from the word, which another task would set to the same.
        let _turn = worker.take_turn_at(entry).await;
        // Somebody may have taken us for dead, or was faster with a chunk that was lost.
        if worker.load(entry).await? == 0 && take_word(worker, entry, 0, state).await? {
            break chunk;
        }
    };
    let base = geometry.chunk_at(chunk);
    let pages = CHUNK_BYTES / class.bytes() as u64;
    let page = |index: u64| base.add(index * class.bytes() as u64).map(|at| FreePage { at, class, version: 0 });
    let pages = (0..pages).rev().map(page).collect::<Result<Vec<_>, _>>()?;
    compute.pages.put(pages.into_iter());
    Ok(true)
}

async fn next_chunk(worker: &Handle, geometry: &Geometry) -> Result<u64, Error> {
    let mut attempt = 0;
    loop {
        worker.count_round_trip();
        match worker.fetch_add(geometry.dynamic_at(Dynamic::NextChunk), 1).await {
            Ok(chunk) => return Ok(chunk),
            Err(error) => {
                worker.before_trying_again(error, &mut attempt).await?;
                // It may have been counted.
                worker.compute().pages.forget_lost_chunks();
            }
        }
    }
}

/// Looks for chunks that count as leased and are not: their lessees died, or were told that a request had failed which had not.
/// Whether there are any. To be called where there are no other chunks; it reads the whole directory, once after a death.
async fn find_lost_chunks(worker: &Handle, geometry: &Geometry) -> Result<bool, Error> {
    let pages = &worker.compute().pages;
    if pages.knows_lost_chunks(geometry.server) {
        return Ok(false);
    }
    let entries = directory(worker, geometry).await?;
    let lost: Vec<u64> = (0..).zip(entries).filter(|(_, entry)| entry[0] == 0).map(|(chunk, _)| chunk).collect();
    let is_any = !lost.is_empty();
    pages.set_lost_chunks(geometry.server, lost);
    Ok(is_any)
}

/// The chunk directory of a server up to the last chunk leased: for each chunk its state word and its free pages.
pub(crate) async fn directory(worker: &Handle, geometry: &Geometry) -> Result<Vec<[u64; DIRECTORY_WORDS]>, Error> {
    let leased = leased_chunks(worker, geometry).await?;
    let mut entries = Vec::with_capacity(leased as usize);
    while (entries.len() as u64) < leased {
        let first = entries.len() as u64;
        entries.extend(directory_block(worker, geometry, first, leased).await?);
    }
    Ok(entries)
}

async fn leased_chunks(worker: &Handle, geometry: &Geometry) -> Result<u64, Error> {
    let next = worker.load(geometry.dynamic_at(Dynamic::NextChunk)).await?;
    Ok(next.min(geometry.chunks))
}

/// As many entries of the directory from `first` on as one READ fetches.
pub(crate) async fn directory_block(
    worker: &Handle,
    geometry: &Geometry,
    first: u64,
    leased: u64,
) -> Result<Vec<[u64; DIRECTORY_WORDS]>, Error> {
    let count = (leased - first).min((PAGE_WORDS_MAX / DIRECTORY_WORDS) as u64) as usize;
    let words = worker.read(geometry.directory_at(first), count * DIRECTORY_WORDS).await?;
    Ok(words.chunks_exact(DIRECTORY_WORDS).map(|entry| [entry[0], entry[1]]).collect())
}

/// What a search of the bitmaps came to.
enum Collected {
    /// The pool has got pages.
    Some,
    /// There are none.
    NoneFree,
    /// There are some, but somebody else is about to change their bitmap.
    NoneForNow,
}

/// Takes free pages of one class out of bitmaps, going on where the last search ended.
async fn collect(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<Collected, Error> {
    let pages = &worker.compute().pages;
    let key = (geometry.server, class);
    let leased = leased_chunks(worker, geometry).await?;
    let first = geometry.ring_chunks().min(leased);
    let start = pages.search(key).from.clamp(first, leased);
    let (mut found, mut is_complete) = (0, true);
    for range in [start..leased, first..start] {
        let mut chunk = range.start;
        while chunk < range.end {
            for entry in directory_block(worker, geometry, chunk, range.end).await? {
                let of_class = ChunkState::from_word(entry[0]).is_some_and(|state| state.class == class);
                if of_class && entry[1] != 0 {
                    let at = Chunk::new(geometry, chunk, class);
                    let _taken = worker.take_turn_at(at.entry).await;
                    let taken = at.take(worker, usize::MAX).await?;
                    is_complete &= taken.is_some();
                    let taken = taken.unwrap_or_default();
                    found += taken.len();
                    pages.put(taken.into_iter());
                }
                if found >= COLLECTED.of(class) {
                    pages.alter_search(key, |search| search.from = chunk);
                    return Ok(Collected::Some);
                }
                chunk += 1;
            }
        }
    }
    match (found, is_complete) {
        (0, true) => Ok(Collected::NoneFree),
        (0, false) => Ok(Collected::NoneForNow),
        _ => Ok(Collected::Some),
    }
}

/// Returns pages to the bitmaps of their chunks. Those of which that fails are returned with the next round of maintenance.
///
/// # Errors
/// [`Error::OwnerStalled`] if somebody who lives holds a chunk for long; if a memory server is lost, or no buffers can be had. The others are returned even then.
pub(crate) async fn give_back(worker: &Handle, pages: Vec<FreePage>) -> Result<(), Error> {
    let (left, returned) = try_give_back(worker, pages).await;
    left.into_iter().for_each(|page| worker.compute().pages.bring_back(page));
    returned
}

/// [`give_back`], of what is [returning](SharedPages::take_returning), and of what lies [idle](SharedPages::take_surplus) in the pool. That
/// goes to the pool again if it fails: it can be used until it is tried the next time.
///
/// # Errors
/// As there.
pub(crate) async fn give_back_surplus(
    worker: &Handle,
    returning: Vec<FreePage>,
    idle: Vec<FreePage>,
) -> Result<(), Error> {
    let (pages, count) = (&worker.compute().pages, returning.len());
    let (left, returned) = try_give_back(worker, returning).await;
    pages.end_returning(count, left);
    let (left, idle_returned) = try_give_back(worker, idle).await;
    pages.put(left.into_iter());
    returned.and(idle_returned)
}

/// Returns pages to the bitmaps of their chunks: those of which that fails, and why.
async fn try_give_back(worker: &Handle, mut pages: Vec<FreePage>) -> (Vec<FreePage>, Result<(), Error>) {
    pages.sort_unstable_by_key(|page| page.at);
    let compute = worker.compute();
    let place = |page: &FreePage| {
        let geometry = &compute.geometry[page.at.server().index()];
        let (chunk, index) = geometry.locate(page.at, page.class).expect("only pages of chunks are ever held");
        (geometry, chunk, index)
    };
    let (mut left, mut outcome) = (Vec::new(), Ok(()));
    let is_together =
        |a: &FreePage, b: &FreePage| (a.at.server(), a.class, place(a).1) == (b.at.server(), b.class, place(b).1);
    for run in pages.chunk_by(is_together) {
        let (geometry, chunk, _) = place(&run[0]);
        let indices: Vec<usize> = run.iter().map(|page| place(page).2).collect();
        if let Err(error) = give_back_to(worker, geometry, chunk, run[0].class, &indices).await {
            left.extend_from_slice(run);
            outcome = Err(*error);
        }
    }
    (left, outcome)
}

async fn give_back_to(
    worker: &Handle,
    geometry: &Geometry,
    chunk: u64,
    class: SizeClass,
    indices: &[usize],
) -> Result<(), Box<Error>> {
    let at = Chunk::new(geometry, chunk, class);
    let taken = worker.take_turn_at(at.entry).await;
    let (mut attempt, begun_ns) = (0, worker.clock().now_ns());
    while !at.give_back(worker, indices).await? {
        if attempt >= GIVE_BACK_ATTEMPTS_MAX
            && let Some(owner) = at.holder(worker).await?
        {
            let waited = Duration::from_nanos(worker.clock().now_ns() - begun_ns);
            return Err(Box::new(Error::OwnerStalled { page: at.entry, owner, waited }));
        }
        worker.back_off(attempt).await;
        attempt += 1;
    }
    drop(taken);
    count_return(worker, geometry, class).await;
    Ok(())
}

/// Pages of a class were returned to bitmaps. After the bits: who has seen this count has searched for them. To count a return twice costs
/// a search in vain.
pub(crate) async fn count_return(worker: &Handle, geometry: &Geometry, class: SizeClass) {
    let mut attempt = 0;
    while let Err(error) = worker.fetch_add(geometry.dynamic_at(Dynamic::Returns(class)), 1).await {
        if let Err(error) = worker.before_trying_again(error, &mut attempt).await {
            tracing::debug!(%error, "pages were returned to a memory server that is lost now");
            break;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{collections::HashSet, sync::Arc};

    use super::*;
    use crate::{
        compute::{ComputeOptions, ComputeServer, Maintenance},
        fabric::{
            faulty::{FaultKinds, FaultOptions, FaultyFabric},
            mem::MemOptions,
        },
    };

    /// Pages in doubt of which some were freed by who had unlinked them, others by nobody, and of which two operations were in doubt.
    /// Whatever requests fail, each is free once.
    #[test]
    fn a_page_in_doubt_is_free_once() {
        const PAGES: usize = 12;
        let memory = Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap());
        for seed in 0..16 {
            let kinds = FaultKinds { refused: true, done: seed % 2 == 0, lost: false };
            let options =
                FaultOptions { kinds, registrations_one_in: 0, connections_one_in: 0, ..FaultOptions::one_in(6, seed) };
            let fabric = Arc::new(FaultyFabric::new(memory.clone(), options));
            let options = ComputeOptions { maintenance: Maintenance::Manual, seed, ..ComputeOptions::default() };
            let compute = (0..100).find_map(|_| ComputeServer::join(fabric.clone(), options).ok()).unwrap();
            let worker = compute.worker().unwrap();
            let shared = &worker.compute().pages;
            let mut made = HashSet::new();
            worker.block_on(async {
                for number in 0..PAGES {
                    let page = allocate(&worker, SizeClass::SMALLEST, Placement::RoundRobin).await.unwrap();
                    let unlinked = Unlinked::from(&page);
                    page.publish();
                    made.insert(unlinked.at);
                    let lock = vec![(unlinked.at, unlinked.lock.word())];
                    crate::remote::write_words(&*worker, lock).await.unwrap();
                    for _ in 0..1 + number % 2 {
                        shared.doubt(std::iter::once(unlinked));
                    }
                    if number % 3 != 0 {
                        let Unlinked { at, class, lock } = unlinked;
                        free_owned((*worker).clone(), at, class, lock).await.unwrap();
                    }
                }
            });
            while shared.deferred() != 0 {
                // A round that failed is made again.
                let _ = worker.block_on(compute.maintain(&worker));
            }
            worker.pages().give_back(shared);
            let free: Vec<RemotePtr> = shared.take_all().into_iter().map(|page| page.at).collect();
            assert_eq!(free.iter().collect::<HashSet<_>>().len(), free.len(), "seed {seed}: a page is free twice");
            assert!(made.iter().all(|page| free.contains(page)), "seed {seed}: a page was lost");
        }
    }
}
