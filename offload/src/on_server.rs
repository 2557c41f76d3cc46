//! Access inside a memory server, for operations that were sent there.
//!
//! Pages of this server are local memory: a thread copies a page word by word and proves the copy by its checksum, as every
//! reader does, because others may write at the same time. Changes are made with the processor's instructions if the fabric's
//! atomics are atomic against those; otherwise they go through the fabric, to this very server, like everybody's
//! ([`OneSided::within`]).
//!
//! How far an operation may go is its [`Scope`].

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use farlink_runtime::{
    access::{Access, Interrupt, PageRef, Start},
    error::Error,
    one_sided::{OneSided, OneSidedViews, PageCopy},
    page::SizeClass,
    pages::{NewPage, Placement},
    ptr::{Link, RemotePtr},
    structure::{Layout, Overlap, Structure},
    worker::Handle,
};

/// How far an operation on a memory server may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Scope<R> {
    /// From the root on, and wherever it has to: the compute servers leave the structure to the memory server. New pages are on
    /// this server; a page that is not is reached through the fabric.
    Whole,
    /// From one page downwards, and no farther: the compute server that owns the page caches what is around it. Only single
    /// pages are changed.
    Below(Below<R>),
}

/// The page where a compute server had to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Below<R> {
    pub(crate) page: RemotePtr,
    pub(crate) level: u8,
    /// What the compute server owns.
    pub(crate) owned: R,
}

/// Why an operation is the compute server's after all. It has had no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Decline {
    /// It changes the structure: more than one page, or which pages there are.
    Restructures,
    /// The page where it was to begin is not, or not any more, what it was sent as: live, of that level, one where the operation
    /// can begin, and inside what the sender owns.
    NotThere,
    /// It goes beyond the pages below the one where it began, or onto another server.
    Leaves,
    /// Others changed the same pages again and again.
    Busy,
}

impl Decline {
    pub(crate) const ALL: [Self; 4] = [Self::Restructures, Self::NotThere, Self::Leaves, Self::Busy];
}

/// Access to a structure inside a memory server, for one operation.
#[derive(Debug)]
pub(crate) struct OnServer<T: Layout> {
    one_sided: Rc<OneSided>,
    here: farlink_runtime::ptr::ServerId,
    layout: T,
    scope: Scope<T::Region>,
    /// Where the operation begins.
    begins: Option<T::Region>,
    declined: Cell<Option<Decline>>,
    changed: RefCell<Vec<RemotePtr>>,
    reads: Cell<u32>,
}

impl<T: Layout + Default> OnServer<T> {
    pub(crate) fn new(
        one_sided: Rc<OneSided>,
        here: farlink_runtime::ptr::ServerId,
        scope: Scope<T::Region>,
        begins: Option<T::Region>,
    ) -> Self {
        Self {
            one_sided,
            here,
            layout: T::default(),
            scope,
            begins,
            declined: Cell::new(None),
            changed: RefCell::default(),
            reads: Cell::new(0),
        }
    }

    /// Why it cannot be done here, if that has shown.
    pub(crate) fn declined(&self) -> Option<Decline> {
        self.declined.get()
    }

    /// Pages that it has read.
    pub(crate) fn reads(&self) -> u32 {
        self.reads.get()
    }

    /// Pages that it has changed.
    pub(crate) fn into_changed(self) -> Vec<RemotePtr> {
        self.changed.into_inner()
    }

    /// The compute server is to do it; what is returned ends the attempt.
    fn decline(&self, why: Decline) -> Interrupt {
        self.declined.set(Some(why));
        Interrupt::conflict()
    }

    fn is_whole(&self) -> bool {
        matches!(self.scope, Scope::Whole)
    }

    /// Whether the operation may look at what is there.
    fn require_in_scope(&self, at: RemotePtr) -> Result<(), Interrupt> {
        match self.is_whole() || at.server() == self.here {
            true => Ok(()),
            false => Err(self.decline(Decline::Leaves)),
        }
    }

    async fn read(&self, at: RemotePtr) -> Result<PageCopy, Interrupt> {
        self.require_in_scope(at)?;
        self.reads.set(self.reads.get().saturating_add(1));
        self.one_sided.read_page(at, self.structure().class).await
    }

    /// The page where an operation was to begin, if it is one where it may.
    async fn begin(&self, below: &Below<T::Region>) -> Result<PageCopy, Interrupt> {
        let page = match self.read(below.page).await {
            Err(Interrupt::Restart(_)) => return Err(self.decline(Decline::NotThere)),
            read => read?,
        };
        let fits = page.level() == below.level
            && page.read(|words| {
                let has = |part: &T::Region| self.layout.overlap(words, part) != Overlap::Outside;
                self.layout.overlap(words, &below.owned) == Overlap::Inside && self.begins.as_ref().is_none_or(has)
            })?;
        if fits { Ok(page) } else { Err(self.decline(Decline::NotThere)) }
    }
}

impl<T: Layout + Default> Access for OnServer<T> {
    type Page<'a> = PageCopy;
    type Views<'a> = OneSidedViews;

    fn worker(&self) -> &Handle {
        self.one_sided.worker()
    }

    fn structure(&self) -> &Structure {
        self.one_sided.structure()
    }

    async fn enter(&self, start: Start) -> Result<PageCopy, Interrupt> {
        match (start, &self.scope) {
            (Start::Page(page), Scope::Below(below)) if page == below.page => self.begin(below).await,
            (_, Scope::Below(_)) => Err(self.decline(Decline::Leaves)),
            (Start::Page(page), Scope::Whole) => self.read(page).await,
            (Start::Root | Start::Anew | Start::Stopped(_), Scope::Whole) => self.read(self.structure().root).await,
        }
    }

    async fn follow(&self, _from: &PageCopy, link: Link) -> Result<PageCopy, Interrupt> {
        self.read(OneSided::target(link)?).await
    }

    async fn sibling(&self, from: &PageCopy, link: Link) -> Result<PageCopy, Interrupt> {
        // What is beside the page where it began may be newer in the sender's cache.
        if !T::WALKS_SIBLINGS && !self.is_whole() {
            return Err(self.decline(Decline::Leaves));
        }
        self.follow(from, link).await
    }

    async fn follow_many(&self, from: &PageCopy, links: &[Link]) -> Vec<Result<PageCopy, Interrupt>> {
        let mut pages = Vec::with_capacity(links.len());
        for &link in links {
            pages.push(self.follow(from, link).await);
        }
        pages
    }

    async fn change<'a, R>(
        &'a self,
        pages: Vec<Self::Page<'a>>,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::Views<'a>) -> R,
    ) -> Result<R, Interrupt> {
        if !self.is_whole() && (pages.len() > 1 || !new.is_empty()) {
            return Err(self.decline(Decline::Restructures));
        }
        let at: Vec<RemotePtr> = pages.iter().map(PageRef::at).chain(new.iter().map(NewPage::at)).collect();
        let result = self.one_sided.change(pages, new, f).await?;
        self.changed.borrow_mut().extend(at);
        Ok(result)
    }

    async fn load(&self, word: RemotePtr) -> Result<u64, Interrupt> {
        self.require_in_scope(word)?;
        self.one_sided.load(word).await
    }

    async fn compare_swap(&self, word: RemotePtr, old: u64, new: u64) -> Result<u64, Interrupt> {
        self.require_in_scope(word)?;
        self.one_sided.compare_swap(word, old, new).await
    }

    async fn allocate(&self, class: SizeClass, _placement: Placement) -> Result<NewPage, Error> {
        if !self.is_whole() {
            self.declined.set(Some(Decline::Restructures));
            return Err(Error::Malformed("an operation below a page allocates"));
        }
        self.one_sided.allocate(class, Placement::Server(self.here)).await
    }

    fn restructures(&self) -> Result<(), Interrupt> {
        if self.is_whole() { Ok(()) } else { Err(self.decline(Decline::Restructures)) }
    }
}
