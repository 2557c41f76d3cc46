//! Access without a cache: READ, validate, compare-and-swap to lock.
//!
//! With round-robin placement this is the fine-grained design of Ziegler et al. (SIGMOD 2019, section 4), made correct:
//! their reader trusts a READ of a whole node, which is not atomic; ours proves every copy whole ([`Proof`]).
//!
//! A page that was read is a private copy, true of the moment it was read. A change locks its pages by compare-and-swap
//! from the lock words of those copies, so a lock that is had proves the copies current, and the changed words follow from
//! them without another READ; see [`change`](self) for the order of the writes.
//!
//! A reader that finds a page locked, or a copy that is not whole, reads again until it has one that is, or a reason to
//! stop: see [`proof`](self).

mod change;
mod here;
#[cfg(loom)]
pub mod model;
mod proof;
mod protocol;
mod views;

use std::future::Future;

pub use self::views::OneSidedViews;
use self::{
    change::{Staged, require_unchanged},
    proof::{Reader, Seen},
};
use crate::{
    access::{Access, Interrupt, PageRef, Start},
    buffer::Buffer,
    error::Error,
    fabric::memory::LocalMemory,
    lock::{LockState, LockWord},
    page::{IDENTITY, Identity, LOCK, SELF, SizeClass},
    pages::{self, NewPage, Placement},
    ptr::{Link, RemotePtr, Target},
    structure::Structure,
    worker::Handle,
};

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
        let reader = self.reader();
        if self.proof == Proof::LockBodyLock || self.memory.is_some() {
            let seen = reader.fetch(at, class).await?;
            return reader.prove(at, class, seen).await.map(PageCopy);
        }
        self.worker.count_round_trip();
        let seen = Seen::in_one_read(self.worker.read(at, class.words()).await?);
        match seen.is_whole() {
            true => reader.accept(at, class, seen).map(PageCopy),
            // Rare: boxed, so that the future of the common case stays small.
            false => Box::pin(reader.prove(at, class, seen)).await.map(PageCopy),
        }
    }

    /// Takes `words` for a copy of the page at `at`: a whole one, read at some earlier time.
    ///
    /// # Errors
    /// [`Interrupt::Restart`] if it is not a page of this structure.
    pub fn copy_of(&self, at: RemotePtr, class: SizeClass, words: Buffer) -> Result<PageCopy, Interrupt> {
        let reader = self.reader();
        match LockWord::from_word(words[LOCK]).state() {
            LockState::Unlocked if words.len() == class.words() => {
                reader.accept(at, class, Seen::known(words)).map(PageCopy)
            }
            _ => Err(reader.stale(at, "it is no copy of a page in use")),
        }
    }

    /// Reads pages with overlapping READs, where the proof allows it. A result for each page.
    ///
    /// # Errors
    /// For each page, as [`Access::follow`].
    pub async fn read_pages(&self, pages: &[RemotePtr], class: SizeClass) -> Vec<Result<PageCopy, Interrupt>> {
        self.read_all(pages.iter().map(|&at| Ok(at)), class).await
    }

    /// [`OneSided::read_pages`] for links to pages of the structure's size.
    ///
    /// # Errors
    /// As [`OneSided::read_pages`].
    pub async fn read_links(&self, links: &[Link]) -> Vec<Result<PageCopy, Interrupt>> {
        self.read_all(links.iter().map(|&link| remote(link)), self.structure.class).await
    }

    async fn read_all(
        &self,
        pages: impl Iterator<Item = Result<RemotePtr, Interrupt>>,
        class: SizeClass,
    ) -> Vec<Result<PageCopy, Interrupt>> {
        let mut copies = Vec::with_capacity(pages.size_hint().0);
        if self.proof != Proof::Checksum || self.memory.is_some() {
            for at in pages {
                copies.push(match at {
                    Ok(at) => self.read_page(at, class).await,
                    Err(refused) => Err(refused),
                });
            }
            return copies;
        }
        self.worker.count_round_trip();
        let reader = self.reader();
        let post = |at: Result<RemotePtr, Interrupt>| {
            let at = at?;
            self.require_page(at, class)?;
            Ok((at, self.worker.read(at, class.words())))
        };
        let posted: Vec<Result<_, Interrupt>> = pages.map(post).collect();
        for posted in posted {
            copies.push(match posted {
                Ok((at, posted)) => match posted.await {
                    Ok(copy) => reader.prove(at, class, Seen::in_one_read(copy)).await.map(PageCopy),
                    Err(error) => Err(error.into()),
                },
                Err(refused) => Err(refused),
            });
        }
        copies
    }

    fn reader(&self) -> Reader<'_, Handle> {
        let Self { worker, structure, proof, memory } = self;
        Reader { remote: worker, structure: structure.id, proof: *proof, memory: memory.as_ref() }
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
        let staged = Staged::of(views);
        if staged.is_idle() {
            // A single copy was true of one moment anyway.
            if staged.changed.len() > 1 {
                require_unchanged(&self.worker, &staged.changed).await?;
            }
            return Ok(result);
        }
        let by_hand = self.worker.capabilities().atomic_against_cpu && after.is_none();
        if let Some(memory) = self.memory.as_ref().filter(|memory| by_hand && staged.is_in(memory)) {
            here::carry_out(&self.worker, memory, staged).await?;
            return Ok(result);
        }
        // Pages whose lock words it may still write are not reused, whatever becomes of the caller.
        let pin = self.worker.pin();
        let change = change::carry_out(self.worker.clone(), staged);
        let whole = async move {
            change.await?;
            drop(pin);
            if let Some(after) = after {
                after.await;
            }
            Ok::<_, Interrupt>(())
        };
        self.worker.spawn_to_end(whole).await?;
        Ok(result)
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
        self.read_links(links).await
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
