//! Pages to allocate, and pages on their way back.
//!
//! ```text
//!  chunk (leased once, one size class for ever)       bitmap on the memory server: free, held by nobody
//!      \                                               ^        |
//!       v                                              |        v
//!  pool of the compute server  <------ grace over --- limbo    pool of any compute server
//!       | batches of 32                                ^
//!       v                                              | retired: unlinked and marked free
//!  list of the worker  ------ allocate ------>  a structure's page
//! ```
//!
//! A page is in exactly one place: its bit is set in its chunk's bitmap, or one compute server holds it (list, pool,
//! limbo), or it is live in a structure. The version in its lock word outlives all that ([`crate::lock`]); lists keep it
//! beside the pointer, so allocation needs no remote access but for the refill of the pool: a chunk of pages at a time,
//! from bitmaps if they have some, else by leasing a chunk. A pool with a large surplus returns it. A compute
//! server that ends returns everything; pages held by one that dies are missing until recovery.

use std::cell::{Cell, RefCell};

use hashbrown::HashMap;

use crate::{
    compute::Shared,
    error::Error,
    layout::{BITMAP_WORDS, CHUNK_BYTES, DIRECTORY_WORDS, Dynamic, Geometry},
    lock::{LockState, LockWord, OwnerId},
    page::{PAGE_WORDS_MAX, SizeClass},
    ptr::{RemotePtr, ServerId},
    sync::{Mutex, lock},
    worker::Handle,
};

const BATCH: usize = 32;
const LOCAL_MAX: usize = 4 * BATCH;
/// A list of the pool that is longer than this keeps [`KEPT_PAGES`] and returns the rest to the bitmaps, for others.
const SURPLUS_PAGES: usize = 1024;
const KEPT_PAGES: usize = 256;
/// Pages that one scan of the bitmaps aims to collect.
const COLLECT_MIN: usize = 256;

/// Where a new page should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The next memory server in turn: the fine-grained design of Ziegler et al. (SIGMOD 2019, section 4).
    RoundRobin,
    /// On this memory server; elsewhere if it is full.
    Server(ServerId),
    /// On the memory server of this page, to keep a subtree together (DEX, VLDB 2024, section 6).
    With(RemotePtr),
}

/// A page that nobody uses, with the version in its lock word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FreePage {
    pub(crate) at: RemotePtr,
    pub(crate) class: SizeClass,
    pub(crate) version: u64,
}

/// An allocated page that is not yet part of a structure. Dropped, it is free again.
#[derive(Debug)]
pub struct NewPage {
    page: FreePage,
    worker: Option<Handle>,
}

impl NewPage {
    /// Its address, to be linked to.
    pub fn at(&self) -> RemotePtr {
        self.page.at
    }

    /// Its size.
    pub fn class(&self) -> SizeClass {
        self.page.class
    }

    pub(crate) fn version(&self) -> u64 {
        self.page.version
    }

    /// The lock word that the page gets with its first contents. In remote memory it says *free* until then.
    pub fn first_lock(&self) -> LockWord {
        LockWord::unlocked(LockWord::free(self.page.version).next_version())
    }

    /// The page has been written, or is going to be, and belongs to a structure now.
    pub fn publish(mut self) {
        self.worker = None;
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
/// If the fabric fails.
pub async fn free_owned(worker: Handle, at: RemotePtr, class: SizeClass, lock: LockWord) -> Result<(), Error> {
    let free = LockWord::free(lock.next_version());
    worker.write_word(at, free.word()).await?;
    worker.compute().pages.retire(std::iter::once(FreePage { at, class, version: free.version() }));
    Ok(())
}

/// The lists of one worker.
#[derive(Debug, Default)]
pub(crate) struct LocalPages {
    free: RefCell<HashMap<(ServerId, SizeClass), Vec<FreePage>>>,
    turn: Cell<usize>,
}

impl LocalPages {
    fn pop(&self, compute: &Shared, key: (ServerId, SizeClass)) -> Option<FreePage> {
        let mut free = self.free.borrow_mut();
        let list = free.entry(key).or_default();
        if list.is_empty() {
            compute.pages.take(key, BATCH, list);
        }
        list.pop()
    }

    pub(crate) fn free(&self, compute: &Shared, page: FreePage) {
        let key = (page.at.server(), page.class);
        let mut free = self.free.borrow_mut();
        let list = free.entry(key).or_default();
        list.push(page);
        if list.len() > LOCAL_MAX {
            let surplus = list.drain(..LOCAL_MAX / 2);
            compute.pages.put(surplus);
        }
    }

    /// Moves everything to the compute server's pool.
    pub(crate) fn give_back(&self, compute: &Shared) {
        for (_, list) in self.free.borrow_mut().drain() {
            compute.pages.put(list.into_iter());
        }
    }
}

#[derive(Debug, Default)]
struct Limbo {
    retired: Vec<FreePage>,
    stamped: Vec<(u64, Vec<FreePage>)>,
}

/// The pool and the limbo of one compute server. Workers come here once for many pages.
#[derive(Debug, Default)]
pub(crate) struct SharedPages {
    free: Mutex<HashMap<(ServerId, SizeClass), Vec<FreePage>>>,
    limbo: Mutex<Limbo>,
    /// The chunk where the next search of the bitmaps begins.
    search_from: Mutex<HashMap<(ServerId, SizeClass), u64>>,
}

impl SharedPages {
    fn search_from(&self, key: (ServerId, SizeClass)) -> u64 {
        lock(&self.search_from).get(&key).copied().unwrap_or(0)
    }

    fn set_search_from(&self, key: (ServerId, SizeClass), chunk: u64) {
        lock(&self.search_from).insert(key, chunk);
    }

    fn take(&self, key: (ServerId, SizeClass), count: usize, into: &mut Vec<FreePage>) {
        if let Some(list) = lock(&self.free).get_mut(&key) {
            into.extend(list.drain(list.len().saturating_sub(count)..));
        }
    }

    pub(crate) fn put(&self, pages: impl Iterator<Item = FreePage>) {
        let mut free = lock(&self.free);
        for page in pages {
            free.entry((page.at.server(), page.class)).or_default().push(page);
        }
    }

    /// The page was unlinked and marked free just now; its grace period begins.
    pub(crate) fn retire(&self, pages: impl Iterator<Item = FreePage>) {
        lock(&self.limbo).retired.extend(pages);
    }

    /// What was retired up to now, to be stamped with an epoch that is read after this call.
    pub(crate) fn take_retired(&self) -> Retired<'_> {
        Retired { shared: self, pages: std::mem::take(&mut lock(&self.limbo).retired) }
    }

    /// Frees what was stamped with an epoch below `announced`, which every live compute server has announced.
    pub(crate) fn release(&self, announced: u64) {
        let over: Vec<_> = lock(&self.limbo).stamped.extract_if(.., |(stamp, _)| *stamp < announced).collect();
        self.put(over.into_iter().flat_map(|(_, pages)| pages));
    }

    pub(crate) fn in_limbo(&self) -> usize {
        let limbo = lock(&self.limbo);
        limbo.retired.len() + limbo.stamped.iter().map(|(_, pages)| pages.len()).sum::<usize>()
    }

    /// Takes what is too much of every list.
    pub(crate) fn take_surplus(&self) -> Vec<FreePage> {
        let mut free = lock(&self.free);
        let long = free.values_mut().filter(|list| list.len() > SURPLUS_PAGES);
        long.flat_map(|list| list.drain(KEPT_PAGES..)).collect()
    }

    pub(crate) fn take_all(&self) -> Vec<FreePage> {
        lock(&self.free).drain().flat_map(|(_, list)| list).collect()
    }
}

/// Retired pages that wait for their stamp; without one, they go back.
pub(crate) struct Retired<'a> {
    shared: &'a SharedPages,
    pages: Vec<FreePage>,
}

impl Retired<'_> {
    pub(crate) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub(crate) fn stamp(mut self, epoch: u64) {
        let pages = std::mem::take(&mut self.pages);
        if !pages.is_empty() {
            lock(&self.shared.limbo).stamped.push((epoch, pages));
        }
    }
}

impl Drop for Retired<'_> {
    fn drop(&mut self) {
        self.shared.retire(self.pages.drain(..));
    }
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
        Placement::RoundRobin => {
            let turn = &worker.pages().turn;
            turn.set((turn.get() + 1) % servers);
            turn.get()
        }
        Placement::Server(server) => server.index() % servers,
        Placement::With(page) => page.server().index() % servers,
    };
    for geometry in compute.geometry.iter().cycle().skip(first).take(servers) {
        let key = (geometry.server, class);
        loop {
            if let Some(page) = worker.pages().pop(compute, key) {
                return Ok(NewPage { page, worker: Some(worker.clone()) });
            }
            // Run to its end, whatever becomes of the caller: what it has taken from a memory server would be lost.
            let (refiller, server) = (worker.clone(), geometry.server);
            let refill = async move { refill(&refiller, &refiller.compute().geometry[server.index()], class).await };
            if !worker.spawn_to_end(refill).await? {
                break;
            }
        }
    }
    Err(Error::OutOfMemory { class })
}

/// Brings pages of one server and class into the pool; false if that server has none.
async fn refill(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<bool, Error> {
    worker.count_round_trip();
    let free = worker.read(geometry.dynamic_at(Dynamic::FreePages(class)), 1).await?[0];
    if free != 0 && collect(worker, geometry, class).await? {
        return Ok(true);
    }
    lease_chunk(worker, geometry, class).await
}

async fn lease_chunk(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<bool, Error> {
    let compute = worker.compute();
    worker.count_round_trip();
    let chunk = worker.fetch_add(geometry.dynamic_at(Dynamic::NextChunk), 1).await?;
    if chunk >= geometry.chunks {
        // Put it back, so that the word does not run away; in between others fail the same way.
        worker.fetch_add(geometry.dynamic_at(Dynamic::NextChunk), 1u64.wrapping_neg()).await?;
        return Ok(false);
    }
    let state = ChunkState { class, lessee: compute.owner }.word();
    worker.count_round_trip();
    let previous = worker.compare_swap(geometry.directory_at(chunk), 0, state).await?;
    if previous != 0 {
        let why = format!("chunk {chunk} was never leased, but its directory entry is {previous:#x}");
        return Err(Error::BadSuperblock { server: geometry.server, why });
    }
    let base = geometry.chunk_at(chunk);
    let pages = CHUNK_BYTES / class.bytes() as u64;
    let page = |index: u64| base.add(index * class.bytes() as u64).map(|at| FreePage { at, class, version: 0 });
    let pages = (0..pages).rev().map(page).collect::<Result<Vec<_>, _>>()?;
    compute.pages.put(pages.into_iter());
    Ok(true)
}

/// A directory entry: the size class of a chunk's pages, and who leased it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkState {
    pub(crate) class: SizeClass,
    pub(crate) lessee: OwnerId,
}

impl ChunkState {
    fn word(self) -> u64 {
        u64::from(self.lessee.incarnation()) << 8 | (self.class.index() as u64 + 1)
    }

    /// `None` for a chunk never leased, and for a damaged entry.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let class = SizeClass::from_index((word as u8).checked_sub(1)?)?;
        Some(Self { class, lessee: OwnerId::new(word >> 8)? })
    }
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
    let next = worker.read(geometry.dynamic_at(Dynamic::NextChunk), 1).await?[0];
    Ok(next.min(geometry.chunks))
}

/// As many entries of the directory from `first` on as one READ fetches.
async fn directory_block(
    worker: &Handle,
    geometry: &Geometry,
    first: u64,
    leased: u64,
) -> Result<Vec<[u64; DIRECTORY_WORDS]>, Error> {
    let count = (leased - first).min((PAGE_WORDS_MAX / DIRECTORY_WORDS) as u64) as usize;
    let words = worker.read(geometry.directory_at(first), count * DIRECTORY_WORDS).await?;
    Ok(words.chunks_exact(DIRECTORY_WORDS).map(|entry| [entry[0], entry[1]]).collect())
}

/// Takes free pages of one class out of bitmaps, going on where the last search ended; false if there were none.
async fn collect(worker: &Handle, geometry: &Geometry, class: SizeClass) -> Result<bool, Error> {
    let pages = &worker.compute().pages;
    let key = (geometry.server, class);
    let leased = leased_chunks(worker, geometry).await?;
    let start = pages.search_from(key).min(leased);
    let mut found = Vec::new();
    for range in [start..leased, 0..start] {
        let mut chunk = range.start;
        while chunk < range.end {
            for entry in directory_block(worker, geometry, chunk, range.end).await? {
                let of_class = ChunkState::from_word(entry[0]).is_some_and(|state| state.class == class);
                if of_class && entry[1] != 0 {
                    collect_chunk(worker, geometry, class, chunk, &mut found).await?;
                }
                if found.len() >= COLLECT_MIN {
                    pages.set_search_from(key, chunk);
                    pages.put(found.into_iter());
                    return Ok(true);
                }
                chunk += 1;
            }
        }
    }
    let any = !found.is_empty();
    pages.put(found.into_iter());
    Ok(any)
}

async fn collect_chunk(
    worker: &Handle,
    geometry: &Geometry,
    class: SizeClass,
    chunk: u64,
    found: &mut Vec<FreePage>,
) -> Result<(), Error> {
    let bitmap_at = geometry.bitmap_at(chunk);
    let bitmap = worker.read(bitmap_at, bitmap_words(class)).await?;
    let mut taken = 0;
    let count = CHUNK_BYTES as usize / class.bytes();
    for (index, &found_bits) in bitmap.iter().enumerate() {
        // Only as many bits as there are pages, whatever the bitmap holds.
        let bits = if count < 64 { found_bits & ((1 << count) - 1) } else { found_bits };
        if bits == 0 || worker.compare_swap(bitmap_at.word(index), found_bits, 0).await? != found_bits {
            continue; // nothing free, or somebody else takes or returns pages here
        }
        taken += u64::from(bits.count_ones());
        let pages = (0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| index as u64 * 64 + bit);
        let mut reads = Vec::with_capacity(64);
        for page in pages {
            let at = geometry.chunk_at(chunk).add(page * class.bytes() as u64)?;
            reads.push((at, worker.read(at, 1)));
        }
        for (at, read) in reads {
            let word = LockWord::from_word(read.await?[0]);
            // A word of zero was never written. Any other page that is not marked free is in use: the bitmap is wrong.
            if word.word() == 0 || word.state() == LockState::Free {
                found.push(FreePage { at, class, version: word.version() });
            } else {
                tracing::warn!(page = %at, ?word, "a bitmap says free, the page says otherwise; left alone");
            }
        }
    }
    subtract_free(worker, geometry, class, chunk, taken).await
}

async fn subtract_free(
    worker: &Handle,
    geometry: &Geometry,
    class: SizeClass,
    chunk: u64,
    count: u64,
) -> Result<(), Error> {
    if count != 0 {
        add_free(worker, geometry, class, chunk, count.wrapping_neg()).await?;
    }
    Ok(())
}

async fn add_free(worker: &Handle, geometry: &Geometry, class: SizeClass, chunk: u64, count: u64) -> Result<(), Error> {
    let in_chunk = worker.fetch_add(geometry.directory_at(chunk).word(1), count);
    let in_class = worker.fetch_add(geometry.dynamic_at(Dynamic::FreePages(class)), count);
    in_chunk.await?;
    in_class.await?;
    Ok(())
}

/// Returns pages to the bitmaps of their chunks.
pub(crate) async fn give_back(worker: &Handle, mut pages: Vec<FreePage>) -> Result<(), Error> {
    pages.sort_unstable_by_key(|page| page.at);
    let geometry = &worker.compute().geometry;
    let place = |page: &FreePage| {
        let geometry = &geometry[page.at.server().index()];
        let (chunk, index) = geometry.locate(page.at, page.class).expect("only pages of chunks are ever held");
        (geometry.server, chunk, index / 64, 1u64 << (index % 64))
    };
    for run in pages.chunk_by(|a, b| place(a).0 == place(b).0 && place(a).1 == place(b).1) {
        let (server, chunk, ..) = place(&run[0]);
        let geometry = &geometry[server.index()];
        for word in run.chunk_by(|a, b| place(a).2 == place(b).2) {
            let (_, _, index, _) = place(&word[0]);
            let bits = word.iter().fold(0, |bits, page| bits | place(page).3);
            worker.fetch_add(geometry.bitmap_at(chunk).word(index), bits).await?;
        }
        add_free(worker, geometry, run[0].class, chunk, run.len() as u64).await?;
    }
    Ok(())
}

/// Words of a chunk's bitmap that pages of this class use.
pub(crate) fn bitmap_words(class: SizeClass) -> usize {
    ((CHUNK_BYTES as usize / class.bytes()).div_ceil(64)).min(BITMAP_WORDS)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn directory_entries_round_trip() {
        for class in SizeClass::all() {
            let state = ChunkState { class, lessee: OwnerId::new(77).unwrap() };
            assert_eq!(ChunkState::from_word(state.word()), Some(state));
        }
        assert_eq!(ChunkState::from_word(0), None);
        assert_eq!(ChunkState::from_word(77 << 8 | 8), None);
        assert_eq!(ChunkState::from_word(3), None);
    }
}
