//! Access without a cache: READ, validate, compare-and-swap to lock.
//!
//! With round-robin placement this is the fine-grained design of Ziegler et al. (SIGMOD 2019, section 4), made correct:
//! their reader trusts a READ of a whole node, which is not atomic; ours proves every copy whole ([`Proof`]).
//!
//! A page that was read is a private copy, true of the moment it was read. A change locks its pages by compare-and-swap
//! from the lock words of those copies, so a lock that is had proves the copies current, and the changed words follow from
//! them without another READ; see [`change`](self) for the order of the writes.
//!
//! A reader that finds a page locked reads again; it asks whether the owner lives first after a few tries, and a dead
//! owner ends the operation with [`Error::PageDamaged`]. A copy that is not whole is read again too; if three READs in a row
//! saw the same unlocked lock word, nobody was writing, and the page is corrupt.

mod change;
mod here;
mod views;

use std::future::Future;

use self::change::Staged;
pub use self::views::OneSidedViews;
use crate::{
    access::{Access, Interrupt, PageRef, Start},
    buffer::Buffer,
    error::Error,
    fabric::Liveness,
    lock::{LockState, LockWord, OwnerId},
    page::{self, IDENTITY, Identity, LOCK, SELF, SizeClass},
    pages::{self, FreePage, NewPage, Placement},
    ptr::{Link, RemotePtr, Target},
    server::LocalMemory,
    structure::Structure,
    sync::{Ordering, fence},
    worker::{Handle, counters::bump},
};

/// READs of a locked page before its owner's liveness is asked for, and between two such questions.
const LOCKED_READS_MAX: u32 = 16;
/// Refused copies in a row, under one unlocked lock word, that prove corruption.
const MISFITS_MAX: u32 = 3;

/// How a reader proves that its copy of a page is whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Proof {
    /// One READ; the checksum in the header binds the body to the version in the lock word. One round trip.
    #[default]
    Checksum,
    /// READ the lock word, then the body, then the lock word again, and compare. Three round trips; the reference
    /// (Ziegler et al., SIGMOD 2023). It cannot tell corruption.
    LockBodyLock,
}

/// One-sided access to a structure.
#[derive(Debug, Clone)]
pub struct OneSided {
    worker: Handle,
    structure: Structure,
    proof: Proof,
    /// What is read and changed without the fabric.
    memory: Option<LocalMemory>,
}

/// A private copy of a page, proven whole.
#[derive(Debug)]
pub struct PageCopy(Buffer);

impl PageCopy {
    /// The page's words, header included.
    pub fn into_words(self) -> Buffer {
        self.0
    }

    fn lock(&self) -> LockWord {
        LockWord::from_word(self.0[LOCK])
    }

    fn identity(&self) -> Identity {
        Identity::from_word(self.0[IDENTITY]).expect("a copy is accepted with its identity checked")
    }
}

impl PageRef for PageCopy {
    type Words = [u64];

    fn at(&self) -> RemotePtr {
        RemotePtr::from_raw(self.0[SELF]).expect("a copy is accepted with its self-address checked")
    }

    fn level(&self) -> u8 {
        self.identity().level
    }

    fn kind(&self) -> u8 {
        self.identity().kind
    }

    #[inline]
    fn read<R>(&self, f: impl FnOnce(&[u64]) -> R) -> Result<R, Interrupt> {
        Ok(f(&self.0))
    }
}

impl OneSided {
    /// Access to `structure` through `worker`.
    pub fn new(worker: &Handle, structure: Structure, proof: Proof) -> Self {
        Self { worker: worker.clone(), structure, proof, memory: None }
    }

    /// Access for a thread of a memory server: pages that stand in `memory` are read there, and changed there if the fabric's
    /// atomics are atomic against the processor's; all others as ever.
    pub fn within(worker: &Handle, structure: Structure, memory: LocalMemory) -> Self {
        Self { memory: Some(memory), ..Self::new(worker, structure, Proof::Checksum) }
    }

    /// The page that a link in remote memory leads to.
    ///
    /// # Errors
    /// [`Error::BadPointer`] if it leads to none.
    pub fn target(link: Link) -> Result<RemotePtr, Interrupt> {
        remote(link)
    }

    /// Reads the page at `at`, whose size is `class`.
    ///
    /// # Errors
    /// As [`Access::follow`].
    pub async fn read_page(&self, at: RemotePtr, class: SizeClass) -> Result<PageCopy, Interrupt> {
        self.require_page(at, class)?;
        if self.proof == Proof::LockBodyLock || self.memory.is_some() {
            let seen = self.fetch(at, class).await?;
            return self.prove(at, class, seen).await;
        }
        self.worker.count_round_trip();
        let seen = Seen::in_one_read(self.worker.read(at, class.words()).await?);
        match seen.whole {
            true => self.accept(at, class, seen),
            // Rare: boxed, so that the future of the common case stays small.
            false => Box::pin(self.prove(at, class, seen)).await,
        }
    }

    /// Takes `words` for a copy of the page at `at`: a whole one, read at some earlier time.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if it is not a page of this structure.
    pub fn copy_of(&self, at: RemotePtr, class: SizeClass, words: Buffer) -> Result<PageCopy, Interrupt> {
        let lock = LockWord::from_word(words[LOCK]);
        match lock.state() {
            LockState::Unlocked if words.len() == class.words() => {
                self.accept(at, class, Seen { lock, whole: true, copy: words })
            }
            _ => Err(self.stale(at, "it is no copy of a page in use")),
        }
    }

    /// Reads pages with overlapping READs, where the proof allows it.
    ///
    /// # Errors
    /// For each page, as [`Access::follow`].
    pub async fn read_pages(&self, pages: &[RemotePtr], class: SizeClass) -> Vec<Result<PageCopy, Interrupt>> {
        let mut copies = Vec::with_capacity(pages.len());
        if self.proof != Proof::Checksum || self.memory.is_some() {
            for &at in pages {
                copies.push(self.read_page(at, class).await);
            }
            return copies;
        }
        self.worker.count_round_trip();
        let post = |&at: &RemotePtr| (at, self.require_page(at, class).map(|()| self.worker.read(at, class.words())));
        let posted: Vec<_> = pages.iter().map(post).collect();
        for (at, posted) in posted {
            copies.push(match posted {
                Ok(posted) => match posted.await {
                    Ok(copy) => self.prove(at, class, Seen::in_one_read(copy)).await,
                    Err(error) => Err(error.into()),
                },
                Err(refused) => Err(refused),
            });
        }
        copies
    }

    /// [`Access::change`], and then `after`, if the change was made. Both are run to their end even if the returned future is
    /// dropped.
    ///
    /// # Errors
    /// As [`Access::change`].
    pub async fn change_then<R>(
        &self,
        pages: Vec<PageCopy>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut OneSidedViews) -> R,
        after: Option<impl Future<Output = ()> + 'static>,
    ) -> Result<R, Interrupt> {
        let mut views = OneSidedViews::open(&self.worker, self.structure.id, pages, new)?;
        let result = f(&mut views);
        let Some(staged) = Staged::of(views) else { return Ok(result) };
        let by_hand = self.worker.capabilities().atomic_against_cpu && after.is_none();
        if let Some(memory) = self.memory.as_ref().filter(|memory| by_hand && staged.is_in(memory)) {
            let freed = here::carry_out(memory, self.worker.owner(), staged)?;
            self.worker.compute().pages.retire(freed.into_iter());
            return Ok(result);
        }
        let change = change::carry_out(self.worker.clone(), staged);
        match after {
            None => self.worker.spawn_to_end(change).await?,
            Some(after) => {
                let both = async move {
                    change.await?;
                    after.await;
                    Ok::<_, Interrupt>(())
                };
                self.worker.spawn_to_end(both).await?;
            }
        }
        Ok(result)
    }

    async fn fetch(&self, at: RemotePtr, class: SizeClass) -> Result<Seen, Error> {
        if let Some(words) = self.memory.as_ref().and_then(|memory| memory.words(at, class.words())) {
            let mut copy = self.worker.buffer(words.len())?;
            for (to, from) in copy.iter_mut().zip(words) {
                *to = from.load(Ordering::Relaxed);
            }
            // What is read next is no older.
            fence(Ordering::Acquire);
            return Ok(Seen::in_one_read(copy));
        }
        self.worker.count_round_trip();
        match self.proof {
            Proof::Checksum => Ok(Seen::in_one_read(self.worker.read(at, class.words()).await?)),
            Proof::LockBodyLock => {
                let before = self.worker.read(at, 1).await?;
                let lock = LockWord::from_word(before[LOCK]);
                if lock.state() != LockState::Unlocked {
                    return Ok(Seen { lock, whole: false, copy: before });
                }
                self.worker.count_round_trip();
                let copy = self.worker.read(at, class.words()).await?;
                self.worker.count_round_trip();
                let after = self.worker.read(at, 1).await?[0];
                Ok(Seen { lock, whole: after == lock.word(), copy })
            }
        }
    }

    fn require_page(&self, at: RemotePtr, class: SizeClass) -> Result<(), Interrupt> {
        let geometry = self.worker.compute().geometry.get(at.server().index());
        match geometry {
            Some(geometry) if geometry.holds_page(at, class) => Ok(()),
            Some(_) => {
                let why = format!("no page of {class:?} can stand there");
                Err(Error::BadPointer { word: at.raw(), why }.into())
            }
            None => {
                let why = format!("there is no memory server {}", at.server());
                Err(Error::BadPointer { word: at.raw(), why }.into())
            }
        }
    }

    fn require_word(&self, word: RemotePtr) -> Result<(), Interrupt> {
        let inside = self.worker.compute().geometry.get(word.server().index()).is_some_and(|geometry| {
            let page = RemotePtr::new(word.server(), word.offset() & !63);
            page.is_ok_and(|page| geometry.locate(page, SizeClass::SMALLEST).is_some())
        });
        if inside && word.offset().is_multiple_of(8) {
            return Ok(());
        }
        let why = "no word of a page stands there".into();
        Err(Error::BadPointer { word: word.raw(), why }.into())
    }

    /// Accepts what was seen, or reads again until there is something to accept or a reason to stop.
    async fn prove(&self, at: RemotePtr, class: SizeClass, mut seen: Seen) -> Result<PageCopy, Interrupt> {
        let (mut locked_reads, mut misfits) = (0, 0);
        let mut misfit_under = None;
        loop {
            match seen.lock.state() {
                LockState::Free => return Err(self.stale(at, "the page is free")),
                LockState::LockedBy(owner) => {
                    bump(&self.worker.count().locked_reads);
                    locked_reads += 1;
                    if locked_reads % LOCKED_READS_MAX == 0 {
                        self.require_alive(at, seen.lock, owner).await?;
                    }
                    self.worker.back_off(locked_reads).await;
                }
                LockState::Unlocked if seen.whole => return self.accept(at, class, seen),
                LockState::Unlocked => {
                    bump(&self.worker.count().torn_reads);
                    misfits = if misfit_under == Some(seen.lock) { misfits + 1 } else { 1 };
                    misfit_under = Some(seen.lock);
                    if misfits >= MISFITS_MAX && self.proof == Proof::Checksum {
                        return Err(Error::PageCorrupt { page: at }.into());
                    }
                }
            }
            seen = self.fetch(at, class).await?;
        }
    }

    async fn require_alive(&self, at: RemotePtr, lock: LockWord, owner: OwnerId) -> Result<(), Interrupt> {
        if self.worker.compute().fabric.liveness(owner) == Liveness::Alive {
            return Ok(());
        }
        // It may have unlocked between our READ and its end.
        match self.worker.read(at, 1).await?[0] == lock.word() {
            true => Err(Error::PageDamaged { page: at, owner }.into()),
            false => Ok(()),
        }
    }

    fn accept(&self, at: RemotePtr, class: SizeClass, seen: Seen) -> Result<PageCopy, Interrupt> {
        let mut words = seen.copy;
        // The three waits read it apart from the body.
        words[LOCK] = seen.lock.word();
        if words[SELF] != at.raw() {
            return Err(self.stale(at, "the page has another address"));
        }
        match Identity::from_word(words[IDENTITY]) {
            Some(identity) if identity.structure == self.structure.id && identity.class == class => Ok(PageCopy(words)),
            _ => Err(self.stale(at, "the page belongs to another structure, or has another size")),
        }
    }

    fn stale(&self, at: RemotePtr, why: &'static str) -> Interrupt {
        bump(&self.worker.count().stale_pages);
        Interrupt::stale(at, why)
    }
}

/// A copy of a page, and whether it is proven whole.
struct Seen {
    lock: LockWord,
    whole: bool,
    copy: Buffer,
}

impl Seen {
    fn in_one_read(copy: Buffer) -> Self {
        let lock = LockWord::from_word(copy[LOCK]);
        Self { lock, whole: lock.state() == LockState::Unlocked && page::is_whole(&copy), copy }
    }
}

impl Access for OneSided {
    type Page<'a> = PageCopy;
    type Views<'a> = OneSidedViews;

    fn worker(&self) -> &Handle {
        &self.worker
    }

    fn structure(&self) -> &Structure {
        &self.structure
    }

    async fn enter(&self, start: Start) -> Result<PageCopy, Interrupt> {
        let at = match start {
            Start::Root | Start::Anew | Start::Stopped(_) => self.structure.root,
            Start::Page(page) => page,
        };
        self.read_page(at, self.structure.class).await
    }

    async fn follow(&self, _from: &PageCopy, link: Link) -> Result<PageCopy, Interrupt> {
        self.read_page(remote(link)?, self.structure.class).await
    }

    async fn follow_many(&self, _from: &PageCopy, links: &[Link]) -> Vec<Result<PageCopy, Interrupt>> {
        let pages: Result<Vec<RemotePtr>, Interrupt> = links.iter().map(|&link| remote(link)).collect();
        match pages {
            Ok(pages) => self.read_pages(&pages, self.structure.class).await,
            Err(refused) => vec![Err(refused)],
        }
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        self.change_then(pages, new, f, None::<std::future::Ready<()>>).await
    }

    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.require_word(word)?;
        self.worker.count_round_trip();
        Ok(self.worker.read(word, 1).await?[0])
    }

    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.require_word(word)?;
        self.worker.count_round_trip();
        Ok(self.worker.compare_swap(word, old, new).await?)
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        pages::allocate(&self.worker, class, placement).await
    }

    async fn retire(&self, page: RemotePtr, class: SizeClass) -> Result<(), Interrupt> {
        self.require_page(page, class)?;
        let in_chunk = self.worker.compute().geometry[page.server().index()].locate(page, class).is_some();
        if !in_chunk {
            return Err(Error::BadPointer { word: page.raw(), why: "the catalog keeps its pages".into() }.into());
        }
        self.worker.count_round_trip();
        let lock = LockWord::from_word(self.worker.read(page, 1).await?[0]);
        match lock.state() {
            LockState::Unlocked if lock.word() != 0 => {}
            LockState::LockedBy(owner) => {
                self.require_alive(page, lock, owner).await?;
                return Err(Interrupt::conflict());
            }
            LockState::Unlocked | LockState::Free => return Err(self.stale(page, "the page is free")),
        }
        // A task, so that the page is not lost between the two steps.
        let worker = self.worker.clone();
        let free = async move {
            let free = LockWord::free(lock.next_version());
            worker.count_round_trip();
            if worker.compare_swap(page, lock.word(), free.word()).await? != lock.word() {
                return Err(Interrupt::conflict());
            }
            let page = FreePage { at: page, class, version: free.version() };
            worker.compute().pages.retire(std::iter::once(page));
            Ok(())
        };
        self.worker.spawn_to_end(free).await
    }
}

fn remote(link: Link) -> Result<RemotePtr, Interrupt> {
    match link.target() {
        Target::Remote(page) => Ok(page),
        Target::Null => Err(Error::BadPointer { word: 0, why: "the link is null".into() }.into()),
        Target::Local(_) => {
            let why = "a swizzled link reached remote memory".into();
            Err(Error::BadPointer { word: link.word(), why }.into())
        }
    }
}
