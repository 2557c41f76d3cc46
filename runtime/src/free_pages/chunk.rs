//! A chunk's free pages on the memory server: its bitmap, and the lock under which it is changed.
//!
//! ```text
//! directory entry, word 0    0:9 | holder's incarnation:23 | lessee's incarnation:24 | size class + 1:8
//!                  word 1    how many bits of the bitmap are set
//! ```
//!
//! Whoever changes the bitmap is the *holder*: it locks the chunk by a compare-and-swap of word 0, changes words, each of
//! which may be written twice, and unlocks. So whatever request fails, what became of it can be told, and it can be
//! repeated: no page is taken twice, and none is lost. The lock of a dead holder is taken over. Within one compute server
//! tasks keep each other away by local slots.
//!
//! *Who holds a page* that is free and not in the bitmap stands in its lock word: whoever freed it, or has taken it from the
//! bitmap (the word is written before the bit is cleared). A page that was never written is the lessee's. So what a dead
//! compute server held can be told from what others hold, and is taken over ([`Chunk::take_from_dead`]).

use crate::{
    error::Error,
    fabric::Liveness,
    free_pages::FreePage,
    layout::{BITMAP_WORDS, CHUNK_BYTES, Geometry, RING_CLASS},
    lock::{LockState, LockWord, OwnerId},
    page::SizeClass,
    ptr::RemotePtr,
    remote::{Remote, claim_word, release_word, write_words},
};

type Failure = Box<Error>;

const CLASS_BITS: u32 = 8;
const LESSEE_BITS: u32 = 24;

/// Word 0 of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChunkState {
    pub(crate) class: SizeClass,
    /// Who took it from the memory server.
    lessee: OwnerId,
    /// Who changes its bitmap.
    holder: Option<OwnerId>,
}

impl ChunkState {
    pub(crate) fn leased_by(lessee: OwnerId, class: SizeClass) -> Self {
        Self { class, lessee, holder: None }
    }

    /// Of a chunk that is for rings alone. All its pages are in its bitmap before anybody has one, so it is nobody's.
    pub(crate) fn for_rings() -> Self {
        Self::leased_by(OwnerId::new(u64::from(OwnerId::MAX)).expect("the last one is one"), RING_CLASS)
    }

    pub(crate) fn word(self) -> u64 {
        let incarnation = |owner: OwnerId| u64::from(owner.incarnation());
        let holder = self.holder.map_or(0, incarnation);
        (holder << LESSEE_BITS | incarnation(self.lessee)) << CLASS_BITS | (self.class.index() as u64 + 1)
    }

    /// `None` for a chunk never leased, and for a damaged entry.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let class = SizeClass::from_index((word as u8).checked_sub(1)?)?;
        let lessee = OwnerId::new(word >> CLASS_BITS & ((1 << LESSEE_BITS) - 1))?;
        let holder = match word >> (CLASS_BITS + LESSEE_BITS) {
            0 => None,
            holder => Some(OwnerId::new(holder)?),
        };
        Some(Self { class, lessee, holder })
    }
}

/// Words of a chunk's bitmap that pages of this class use.
pub(crate) fn bitmap_words(class: SizeClass) -> usize {
    ((CHUNK_BYTES as usize / class.bytes()).div_ceil(64)).min(BITMAP_WORDS)
}

/// The bits of a word of the bitmap that stand for pages.
fn mask(class: SizeClass) -> u64 {
    let pages = CHUNK_BYTES as usize / class.bytes();
    if pages < 64 { (1 << pages) - 1 } else { u64::MAX }
}

/// So many of the bits, at most.
fn lowest(bits: u64, most: usize) -> u64 {
    let rest = (0..most.min(64)).fold(bits, |rest, _| rest & rest.wrapping_sub(1));
    bits & !rest
}

/// Where a chunk is, and what belongs to it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chunk {
    /// Its entry in the directory.
    pub(crate) entry: RemotePtr,
    pub(crate) bitmap: RemotePtr,
    /// Its first page.
    pub(crate) pages: RemotePtr,
    pub(crate) class: SizeClass,
    /// Words of the bitmap that are in use.
    pub(crate) words: usize,
}

/// Pages of a chunk that dead compute servers have left.
#[derive(Debug, Default)]
pub(crate) struct OfDead {
    pub(crate) free: Vec<FreePage>,
    /// For one word: these are in no record.
    pub(crate) locked: Vec<(RemotePtr, LockWord)>,
}

impl Chunk {
    /// The chunk with this number, whose pages have this class.
    pub(crate) fn new(geometry: &Geometry, number: u64, class: SizeClass) -> Self {
        Self {
            entry: geometry.directory_at(number),
            bitmap: geometry.bitmap_at(number),
            pages: geometry.chunk_at(number),
            class,
            words: bitmap_words(class),
        }
    }

    /// Takes pages of the bitmap, so many at most; `None` if somebody else is the holder.
    ///
    /// # Errors
    /// If the memory server is lost, or no buffers can be had: then nothing was taken.
    pub(crate) async fn take<R: Remote>(&self, remote: &R, most: usize) -> Result<Option<Vec<FreePage>>, Failure> {
        self.change(remote, async |bitmap| {
            let mut taken = Vec::new();
            for (index, bits) in bitmap.iter_mut().enumerate() {
                let chosen = lowest(*bits, most - taken.len());
                *bits &= !chosen;
                self.describe(remote, index, chosen, &mut taken).await?;
            }
            // Before the bits are cleared: who dies in between has taken nothing, or says that it has.
            sign(remote, &taken).await?;
            Ok(taken)
        })
        .await
    }

    /// Takes the free pages that compute servers held which are `dead`, and finds those that they have locked for one word. Nobody else touches those; but operations may still
    /// look at pages that the dead had freed just before, so they wait for their grace like pages that were freed now. `None` if
    /// somebody else is the holder.
    ///
    /// # Errors
    /// If the memory server is lost, or no buffers can be had: then nothing was taken.
    pub(crate) async fn take_from_dead<R: Remote>(
        &self,
        remote: &R,
        dead: &impl Fn(OwnerId) -> bool,
    ) -> Result<Option<OfDead>, Failure> {
        let Some(ChunkState { lessee, holder, .. }) = ChunkState::from_word(remote.load(self.entry).await?) else {
            return Ok(Some(OfDead::default()));
        };
        // Mostly there is nothing to take: then nobody is kept away. Who has died holding it may not have counted what it has returned.
        let bitmap = remote.read(self.bitmap, self.words).await?;
        let found = self.of_dead(remote, &bitmap, lessee, dead).await?;
        if found.free.is_empty() && !holder.is_some_and(dead) {
            return Ok(Some(found));
        }
        self.change(remote, async |bitmap| {
            let found = self.of_dead(remote, bitmap, lessee, dead).await?;
            sign(remote, &found.free).await?;
            Ok(found)
        })
        .await
    }

    async fn of_dead<R: Remote>(
        &self,
        remote: &R,
        bitmap: &[u64],
        lessee: OwnerId,
        dead: &impl Fn(OwnerId) -> bool,
    ) -> Result<OfDead, Failure> {
        let mut found = OfDead::default();
        for (index, bits) in bitmap.iter().enumerate() {
            for (at, word) in self.lock_words(remote, index, !bits & mask(self.class)).await? {
                let holder = if word.word() == 0 { Some(lessee) } else { word.holder() };
                if holder.is_some_and(dead) {
                    found.free.push(FreePage { at, class: self.class, version: word.version() });
                }
                match word.state() {
                    LockState::LockedBy(owner) if word.is_for_one_word() && dead(owner) => {
                        found.locked.push((at, word))
                    }
                    _ => {}
                }
            }
        }
        Ok(found)
    }

    /// Sets bits: `pages` are indices in the chunk. False, and nothing is done, if somebody else is the holder.
    ///
    /// # Errors
    /// If the memory server is lost, or no buffers can be had: then none was set.
    pub(crate) async fn give_back<R: Remote>(&self, remote: &R, pages: &[usize]) -> Result<bool, Failure> {
        let changed = self.change(remote, async |bitmap| {
            pages.iter().for_each(|page| bitmap[page / 64] |= 1 << (page % 64));
            Ok(())
        });
        Ok(changed.await?.is_some())
    }

    async fn change<R: Remote, T>(
        &self,
        remote: &R,
        f: impl AsyncFnOnce(&mut [u64]) -> Result<T, Failure>,
    ) -> Result<Option<T>, Failure> {
        let Some(held) = self.try_hold(remote).await? else { return Ok(None) };
        let outcome = async {
            let mut bitmap = remote.read(self.bitmap, self.words).await?.to_vec();
            bitmap.iter_mut().for_each(|word| *word &= mask(self.class));
            let result = f(&mut bitmap).await?;
            Ok((bitmap, result))
        };
        let outcome = outcome.await;
        if let Ok((bitmap, _)) = &outcome {
            let count = bitmap.iter().map(|word| u64::from(word.count_ones())).sum();
            let bitmap = (0..).zip(bitmap).map(|(index, &word)| (self.bitmap.word(index), word));
            write_words(remote, bitmap.chain([(self.entry.word(1), count)]).collect()).await?;
        }
        let after = ChunkState { holder: None, ..held };
        release_word(remote, self.entry, held.word(), after.word()).await?;
        outcome.map(|(_, result)| Some(result))
    }

    /// Who changes the bitmap now.
    ///
    /// # Errors
    /// If the memory server is lost.
    pub(crate) async fn holder<R: Remote>(&self, remote: &R) -> Result<Option<OwnerId>, Failure> {
        Ok(ChunkState::from_word(remote.load(self.entry).await?).and_then(|state| state.holder))
    }

    /// Becomes the holder.
    async fn try_hold<R: Remote>(&self, remote: &R) -> Result<Option<ChunkState>, Failure> {
        let found = remote.load(self.entry).await?;
        let Some(state) = ChunkState::from_word(found).filter(|state| state.class == self.class) else {
            let why = format!("the directory entry of a chunk of {:?} pages is {found:#x}", self.class);
            return Err(Box::new(Error::BadSuperblock { server: self.entry.server(), why }));
        };
        // One that this compute server has left behind is as good as a dead one's: the slot is ours.
        let is_held =
            state.holder.is_some_and(|holder| holder != remote.owner() && remote.liveness(holder) == Liveness::Alive);
        if is_held {
            return Ok(None);
        }
        let ours = ChunkState { holder: Some(remote.owner()), ..state };
        let is_ours = claim_word(remote, self.entry, found, ours.word()).await?;
        Ok(is_ours.then_some(ours))
    }

    /// Adds the pages of one word of the bitmap to `found`, with their versions.
    async fn describe<R: Remote>(
        &self,
        remote: &R,
        index: usize,
        bits: u64,
        found: &mut Vec<FreePage>,
    ) -> Result<(), Failure> {
        for (at, word) in self.lock_words(remote, index, bits).await? {
            // A word of zero was never written. Any other page that is not marked free is in use: the bitmap is wrong.
            if word.word() == 0 || word.state() == LockState::Free {
                found.push(FreePage { at, class: self.class, version: word.version() });
            } else {
                tracing::warn!(page = %at, ?word, "a bitmap says free, the page says otherwise; left alone");
            }
        }
        Ok(())
    }

    /// The pages of some bits of one word of the bitmap, with what their lock words say.
    async fn lock_words<R: Remote>(
        &self,
        remote: &R,
        index: usize,
        bits: u64,
    ) -> Result<Vec<(RemotePtr, LockWord)>, Failure> {
        let pages = (0..64).filter(|bit| bits >> bit & 1 == 1).map(|bit| index * 64 + bit);
        let reads: Vec<_> =
            pages.map(|page| self.pages.word(page * self.class.words())).map(|at| (at, remote.read(at, 1))).collect();
        let mut words = Vec::with_capacity(reads.len());
        for (at, read) in reads {
            words.push((at, LockWord::from_word(read.await?[0])));
        }
        Ok(words)
    }
}

/// Says in pages that this compute server holds them from now on.
async fn sign<R: Remote>(remote: &R, pages: &[FreePage]) -> Result<(), Failure> {
    let word = |page: &FreePage| (page.at, LockWord::free(page.version, Some(remote.owner())).word());
    write_words(remote, pages.iter().map(word).collect()).await
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        pin::pin,
        sync::Arc,
        task::{Context, Poll, Waker},
    };

    use super::*;
    use crate::{
        compute::{ComputeOptions, ComputeServer, Maintenance},
        fabric::{Fabric, mem::MemOptions},
        pages::{GIVE_BACK_ATTEMPTS_MAX, allocate, give_back, give_back_surplus},
        structure::Placement,
    };

    /// Somebody who lives holds a chunk for long: whoever returns pages to it is told so, and still has them. A dead one holds up nobody.
    #[test]
    fn who_holds_a_chunk_for_long_is_named() {
        let memory: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap());
        let join = |seed| {
            let options = ComputeOptions { maintenance: Maintenance::Manual, seed, ..ComputeOptions::default() };
            ComputeServer::join(Arc::clone(&memory), options).unwrap()
        };
        let (returner, holder) = (join(1), join(2));
        let worker = returner.worker().unwrap();
        let (shared, geometry) = (&worker.compute().pages, &returner.geometry()[0]);
        let (pages, chunk, count) = worker.block_on(async {
            drop(allocate(&worker, SizeClass::SMALLEST, Placement::RoundRobin).await.unwrap());
            worker.pages().give_back(shared);
            let pages = shared.take_all();
            let (number, _) = geometry.locate(pages[0].at, pages[0].class).unwrap();
            let (chunk, count) = (Chunk::new(geometry, number, pages[0].class), pages.len());
            let state = ChunkState::from_word(worker.load(chunk.entry).await.unwrap()).unwrap();
            let held = ChunkState { holder: Some(holder.owner()), ..state };
            write_words(&*worker, vec![(chunk.entry, held.word())]).await.unwrap();
            (pages, chunk, count)
        });
        let mut giving = pin!(worker.drive(give_back(&worker, pages)));
        let refused = (0..100 * GIVE_BACK_ATTEMPTS_MAX).find_map(|_| {
            match giving.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(outcome) => Some(outcome),
                Poll::Pending => None,
            }
        });
        let refused = refused.expect("it waits for ever");
        let is_named = |page, owner| owner == holder.owner() && page == chunk.entry;
        assert!(
            matches!(refused, Err(Error::OwnerStalled { page, owner, .. }) if is_named(page, owner)),
            "{refused:?}"
        );
        let mut pages = shared.take_all();
        assert_eq!(pages.len(), count, "pages were lost");
        let idle = pages.split_off(count / 2);
        pages.into_iter().for_each(|page| shared.bring_back(page));
        let mut giving = pin!(worker.drive(give_back_surplus(&worker, shared.take_returning(), idle)));
        let waker = &mut Context::from_waker(Waker::noop());
        while giving.as_mut().poll(waker).is_pending() {}
        let mut pages = shared.take_returning();
        assert_eq!(pages.len(), count / 2, "they are to go back");
        shared.end_returning(pages.len(), Vec::new());
        // What lay idle in the pool can be used meanwhile.
        pages.extend(shared.take_all());
        assert_eq!(pages.len(), count, "pages were lost");
        drop(holder);
        worker.block_on(async {
            give_back(&worker, pages).await.unwrap();
            assert!(shared.take_all().is_empty());
            let returned = chunk.take(&*worker, usize::MAX).await.unwrap().unwrap();
            assert_eq!(returned.len(), count);
            shared.put(returned.into_iter());
        });
    }

    /// The last free pages are in a chunk that somebody changes: who wants one waits for that, a while.
    #[test]
    fn who_holds_the_last_free_pages_is_waited_for() {
        let memory: Arc<dyn Fabric> = Arc::new(crate::server::in_process(1, 1 << 20, MemOptions::default()).unwrap());
        let join = |seed| {
            let options = ComputeOptions { maintenance: Maintenance::Manual, seed, ..ComputeOptions::default() };
            ComputeServer::join(Arc::clone(&memory), options).unwrap()
        };
        let (taker, holder) = (join(1), join(2));
        let worker = taker.worker().unwrap();
        let (class, shared) = (SizeClass::of_bytes(16 << 10).unwrap(), &worker.compute().pages);
        let mut all = Vec::new();
        while let Ok(page) = worker.block_on(allocate(&worker, class, Placement::RoundRobin)) {
            all.push(page);
        }
        drop(all.pop());
        worker.pages().give_back(shared);
        let chunk = worker.block_on(async {
            let free = shared.take_all();
            let geometry = &taker.geometry()[0];
            let chunk = Chunk::new(geometry, geometry.locate(free[0].at, class).unwrap().0, class);
            give_back(&worker, free).await.unwrap();
            chunk
        });
        let hold = |holder| {
            worker.block_on(async {
                let state = ChunkState::from_word(worker.load(chunk.entry).await.unwrap()).unwrap();
                let word = ChunkState { holder, ..state }.word();
                write_words(&*worker, vec![(chunk.entry, word)]).await.unwrap();
            });
        };
        hold(Some(holder.owner()));
        let mut allocating = pin!(worker.drive(allocate(&worker, class, Placement::RoundRobin)));
        let mut poll = || allocating.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        for _ in 0..20 {
            assert!(poll().is_pending(), "it does not wait");
        }
        hold(None);
        assert!((0..100_000).any(|_| matches!(poll(), Poll::Ready(page) if page.is_ok())), "there is one");
    }

    #[test]
    fn directory_entries_round_trip() {
        for class in SizeClass::all() {
            for holder in [None, OwnerId::new(1), OwnerId::new(u64::from(OwnerId::MAX))] {
                let lessee = OwnerId::new(u64::from(OwnerId::MAX)).unwrap();
                let state = ChunkState { class, lessee, holder };
                assert_eq!(ChunkState::from_word(state.word()), Some(state));
            }
        }
        assert_eq!(ChunkState::from_word(0), None);
        assert_eq!(ChunkState::from_word(77 << 8 | (SizeClass::COUNT as u64 + 1)), None);
        assert_eq!(ChunkState::from_word(3), None);
        assert_eq!(ChunkState::from_word(1 << 56 | 77 << 8 | 3), None);
    }
}
