//! Remote memory as the store of a cache, and a structure's pages as its layout.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    future::Future,
    marker::PhantomData,
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64},
    },
};

use farlink_cache::{CacheError, Conflict, PageError, PageId, SizeClass as CacheClass, Store, look_again};
use farlink_runtime::{
    access::{Access, Context, Interrupt, Link, PageRef, Plugin},
    buffer::Buffer,
    error::Error,
    gate::{Gate, Passage, Way},
    lock::LockWord,
    one_sided::{OneSided, PageCopy},
    page::{self, CHECKSUM, IDENTITY, Identity, LOCK, SizeClass},
    ptr::ServerId,
    structure::{Overlap, Region},
    sync::Ordering,
    versioned::VersionedReader,
    write_ahead::{Arrivals, Log, PageRecord, Recorded, WordRun},
};
use smallvec::{SmallVec, smallvec};

/// A structure's pages, as the cache wants to know them.
#[derive(Debug, Clone)]
pub(crate) struct CacheLayout<P>(pub(crate) PhantomData<P>);

impl<P: Plugin> farlink_cache::Layout for CacheLayout<P> {
    fn level(&self, page: &[AtomicU64]) -> u8 {
        identity(page).map_or(0, |identity| identity.level)
    }

    #[inline]
    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        let is_inner = identity(page).is_some_and(|identity| identity.level > 0);
        is_inner.then(|| P::links(page)).into_iter().flatten()
    }
}

pub(crate) fn identity(page: &[AtomicU64]) -> Option<Identity> {
    Identity::from_word(page.get(IDENTITY)?.load(Ordering::Relaxed))
}

/// Pages, as often as they were inserted: a set that the handles of a cache share.
#[derive(Debug, Clone, Default)]
pub(crate) struct PageSet(Arc<Mutex<HashMap<Link, u32>>>);

impl PageSet {
    fn pages(&self) -> std::sync::MutexGuard<'_, HashMap<Link, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn insert(&self, page: Link) {
        *self.pages().entry(page).or_insert(0) += 1;
    }

    pub(crate) fn remove(&self, page: Link) {
        let mut pages = self.pages();
        if let Some(count) = pages.get_mut(&page) {
            *count -= 1;
            if *count == 0 {
                pages.remove(&page);
            }
        }
    }

    /// Removes it, however often it was inserted.
    pub(crate) fn forget(&self, page: Link) {
        self.pages().remove(&page);
    }

    pub(crate) fn all(&self) -> Vec<Link> {
        self.pages().keys().copied().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages().is_empty()
    }

    pub(crate) fn contains(&self, page: Link) -> bool {
        self.pages().contains_key(&page)
    }
}

/// What the cache's compute server owns, at some moment.
#[derive(Debug, Clone)]
pub(crate) struct Regions<R> {
    /// No two of them overlap.
    pub(crate) owned: Vec<R>,
    /// A part that it has just stopped to use, and that others cannot claim yet.
    pub(crate) leaving: Option<R>,
    /// Whether it ever owned more: there may be pages in the cache that lie elsewhere.
    pub(crate) were_more: bool,
}

impl<R> Default for Regions<R> {
    fn default() -> Self {
        Self { owned: Vec::new(), leaving: None, were_more: false }
    }
}

impl<R: Region> Regions<R> {
    /// The region in which all of another one lies.
    pub(crate) fn with(&self, other: &R) -> Option<&R> {
        self.owned.iter().find(|owned| other.overlap(owned) == Overlap::Inside)
    }

    /// Where what has this place in each of the regions lies in all of them together.
    pub(crate) fn overlap(&self, of_one: impl Fn(&R) -> Overlap) -> Overlap {
        let mut all = Overlap::Outside;
        for owned in &self.owned {
            match of_one(owned) {
                Overlap::Inside => return Overlap::Inside,
                Overlap::Partly => all = Overlap::Partly,
                Overlap::Outside => {}
            }
        }
        all
    }
}

/// Regions, the right to them, and the log of what is changed in them.
#[derive(Debug)]
pub(crate) struct Owned<P: Plugin> {
    pub(crate) regions: VersionedReader<Regions<P::Region>>,
    pub(crate) log: Log,
    /// Changes of one page, too, and operations wait for that.
    pub(crate) records_all: bool,
}

/// What the handles of a cache know together of pages.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// Freed, and in remote memory they do not say so yet.
    pub(crate) freeing: PageSet,
    /// Changed, and in remote memory this compute server still has them locked.
    pub(crate) unlocking: PageSet,
    /// Cached, and other owners share them; perhaps not any more.
    pub(crate) shared: PageSet,
    /// Who changes pages passes it; shut before what is owned, or a part of it, is given up.
    pub(crate) gate: Arc<Gate>,
    /// Whether somebody changes what is owned. Others who would wait.
    pub(crate) is_moving: Arc<AtomicBool>,
    /// Whether pages may be cached that lie outside of what is owned, or that are not known to be shared.
    pub(crate) has_others: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Inner<P: Plugin> {
    one_sided: OneSided<P>,
    /// What this compute server owns, if it owns anything.
    owned: Option<Owned<P>>,
    /// The batch of the log with the latest change.
    batch: Cell<u64>,
    /// Who waits for the log.
    arrivals: Arrivals,
    known: Known,
    /// This handle's way through the gate.
    way: Way,
    /// How often there was no room for pages of each size since one was last read, or the error was given.
    no_room: [Cell<u32>; CacheClass::COUNT],
    told: RefCell<Vec<ReadObserver>>,
}

/// Who is told what a read took, and answers whether that is still wanted.
struct ReadObserver(Box<dyn Fn(ServerId, u64) -> bool>);

impl std::fmt::Debug for ReadObserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ReadObserver")
    }
}

/// So often a page that is to be written waits for others to make room in the log, where there is no memory.
const WAITS_MAX: u32 = 64;
/// So often without a page of that size read in between, and a cache counts as too small for what is in flight.
const NO_ROOM_MAX: u32 = 1000;

/// Remote memory, for one worker's handle of a cache.
#[derive(Debug)]
pub(crate) struct RemoteStore<P: Plugin>(Rc<Inner<P>>);

impl<P: Plugin> Clone for RemoteStore<P> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<P: Plugin> RemoteStore<P> {
    pub(crate) fn new(one_sided: OneSided<P>, owned: Option<Owned<P>>, known: Known) -> Self {
        let (batch, no_room, told, way) = (Cell::new(0), Default::default(), RefCell::default(), known.gate.way());
        let arrivals = Arrivals::default();
        Self(Rc::new(Inner { one_sided, owned, batch, arrivals, known, way, no_room, told }))
    }

    pub(crate) fn one_sided(&self) -> &OneSided<P> {
        &self.0.one_sided
    }

    #[inline(always)]
    pub(crate) fn context(&self) -> &Context<P> {
        self.0.one_sided.context()
    }

    /// What a failed access to the cache means for an operation. Without room it begins anew, which gives up its pages, so
    /// that others get on; if nobody does for long, the cache is too small.
    pub(crate) fn interrupt(&self, error: CacheError<Interrupt>) -> Interrupt {
        if let CacheError::NoRoom { class, last_write_error: None, .. } = error {
            let in_a_row = self.no_room(class).get() + 1;
            self.no_room(class).set(in_a_row);
            if in_a_row < NO_ROOM_MAX {
                return Interrupt::conflict();
            }
            // Whoever comes next may find room again.
            self.no_room(class).set(0);
        }
        interrupt(error)
    }

    fn no_room(&self, class: CacheClass) -> &Cell<u32> {
        &self.0.no_room[(class.bytes() / CacheClass::MIN.bytes()).ilog2() as usize]
    }

    pub(crate) fn known(&self) -> &Known {
        &self.0.known
    }

    /// What this compute server owns, if it owns anything.
    pub(crate) fn regions(&self) -> Option<&VersionedReader<Regions<P::Region>>> {
        self.0.owned.as_ref().map(|owned| &owned.regions)
    }

    /// Whether pages of level 0 may be cached that are not owned (any more).
    #[inline]
    pub(crate) fn may_have_others(&self) -> bool {
        self.regions().is_some_and(|regions| regions.with(|regions| regions.were_more))
    }

    /// Whether all that was owned is given up.
    pub(crate) fn owns_nothing(&self) -> bool {
        self.regions().is_some_and(|regions| regions.with(|regions| regions.owned.is_empty()))
    }

    /// The log of what this compute server owns, if it owns anything.
    pub(crate) fn log(&self) -> Option<&Log> {
        self.0.owned.as_ref().map(|owned| &owned.log)
    }

    /// Whether operations wait until their changes are recorded.
    #[inline]
    pub(crate) fn records_all(&self) -> bool {
        self.0.owned.as_ref().is_some_and(|owned| owned.records_all)
    }

    /// The batch of the log with the latest change that was recorded.
    pub(crate) fn latest_batch(&self) -> u64 {
        self.0.batch.get()
    }

    /// Waits until a batch of the log has arrived; there is nothing to wait for without a log.
    pub(crate) async fn arrival(&self, batch: u64) -> Result<(), Error> {
        match self.log() {
            Some(log) => self.0.arrivals.arrival(log, &self.context().worker, batch).await,
            None => Ok(()),
        }
    }

    /// That what is cached is this compute server's to use.
    #[inline(always)]
    pub(crate) fn require_tenure(&self) -> Result<(), Interrupt> {
        match &self.0.owned {
            Some(owned) if !owned.log.tenure().is_valid() => Err(self.given_up()),
            _ => Ok(()),
        }
    }

    /// Leave to change what is owned, for as long as it exists.
    ///
    /// # Errors
    /// [`Error::GivenUp`] if it is given up, or about to be.
    #[inline]
    pub(crate) fn begin_change(&self) -> Result<Passage, Interrupt> {
        self.require_tenure()?;
        self.0.way.pass().ok_or_else(|| self.given_up())
    }

    #[cold]
    fn given_up(&self) -> Interrupt {
        if let Err(error) = self.context().worker.check_standing() {
            return error.into();
        }
        Error::GivenUp { name: self.context().structure.name.clone() }.into()
    }

    /// Has `told` be told what each read takes, until it answers that it need not.
    pub(crate) fn observe_reads(&self, told: impl Fn(ServerId, u64) -> bool + 'static) {
        self.0.told.borrow_mut().push(ReadObserver(Box::new(told)));
    }

    async fn read_page(&self, link: Link) -> Result<PageCopy, Interrupt> {
        let one_sided = &self.0.one_sided;
        if self.0.told.borrow().is_empty() {
            return one_sided.read_page(link).await;
        }
        let clock = self.context().worker.clock();
        let start_ns = clock.now_ns();
        let copy = one_sided.read_page(link).await?;
        let took_ns = clock.now_ns() - start_ns;
        self.0.told.borrow_mut().retain(|told| (told.0)(copy.at().server(), took_ns));
        Ok(copy)
    }

    /// Writes pages whose images are in the log.
    async fn write_recorded(&self, log: &Log, pages: Vec<(PageId, Buffer)>, results: &mut Vec<Result<(), Interrupt>>) {
        let worker = &self.context().worker;
        let post = |(page, mut image): (PageId, Buffer)| {
            self.require_tenure()?;
            let Some((at, _)) = link_of(page).remote() else {
                return Err(Error::BadPointer { word: page.get(), why: "it is no page".into() }.into());
            };
            // The lock word of a shared page may be somebody else's.
            if self.overlap(&*image) != Overlap::Inside {
                return Err(Error::SharedPage { page: at }.into());
            }
            let version = version_of(&image);
            // Private pages: nobody holds or takes a remote lock, and a reader's checksum tells an unfinished write.
            image[CHECKSUM] = page::checksum(&image, version);
            Ok((link_of(page), version, worker.write_private(at, image)))
        };
        let posted: Vec<Result<_, Interrupt>> = pages.into_iter().map(post).collect();
        for posted in posted {
            results.push(match posted {
                Ok((page, version, posted)) => {
                    let written = posted.await.map_err(Interrupt::from);
                    written.map(|()| log.is_written(page, version))
                }
                Err(refused) => Err(refused),
            });
        }
    }

    /// Where a page lies in what is owned here.
    pub(crate) fn overlap(&self, words: &(impl farlink_runtime::words::Words + ?Sized)) -> Overlap {
        let Some(regions) = self.regions() else { return Overlap::Inside };
        regions.with(|regions| regions.overlap(|region| P::overlap(words, region)))
    }
}

impl<P: Plugin> Store for RemoteStore<P> {
    type Buffer = Buffer;
    type Error = Interrupt;

    fn buffer(&self, words: usize) -> Result<Buffer, Interrupt> {
        Ok(self.context().worker.buffer(words)?)
    }

    async fn read(&self, page: PageId, class: CacheClass) -> Result<Buffer, Interrupt> {
        self.no_room(class).set(0);
        self.require_tenure()?;
        // Of a page that is known to be on its way nobody begins that any more: it is seen here, or its lock word says so.
        if self.known().freeing.contains(link_of(page)) {
            let at = link_of(page).remote().map_or(self.context().structure.root, |(at, _)| at);
            return Err(Interrupt::stale(at, "it was freed just now"));
        }
        let copy = self.read_page(link_of(page)).await?;
        let at = copy.at();
        let words = copy.into_words();
        let is_leaf = Identity::from_word(words[IDENTITY]).is_some_and(|identity| identity.level == 0);
        // Whoever changes what is owned waits for this page then, or it is seen here that it is changed.
        match look_again(|| self.overlap(&*words)) {
            Overlap::Outside => Err(Error::OutsidePartition { page: at }.into()),
            Overlap::Partly if is_leaf => Err(Error::OutsidePartition { page: at }.into()),
            Overlap::Partly => {
                let shared = &self.known().shared;
                if !shared.contains(link_of(page)) {
                    shared.insert(link_of(page));
                }
                Ok(words)
            }
            Overlap::Inside => Ok(words),
        }
    }

    async fn write(&self, pages: Vec<(PageId, Buffer)>) -> Vec<Result<(), Interrupt>> {
        let (worker, Some(log)) = (&self.context().worker, self.log()) else {
            let refused = || Error::Cache("nothing is changed in a cache of pages that nobody owns".into()).into();
            return pages.iter().map(|_| Err(refused())).collect();
        };
        // Theirs are the last words of this compute server's own change.
        while pages.iter().any(|&(page, _)| self.known().unlocking.contains(link_of(page))) {
            worker.yield_now().await;
        }
        // Each page in the log before it is in its place; as many at a time as there is room for, which those that are written make.
        let (mut results, mut waits) = (Vec::with_capacity(pages.len()), 0);
        let mut left = pages.into_iter().peekable();
        while left.peek().is_some() {
            let (mut recorded, mut last, mut blocked) = (Vec::new(), 0, None);
            while let Some((page, image)) = left.peek() {
                match log.record_image(link_of(*page), version_of(image), image) {
                    Ok(batch) => {
                        last = last.max(batch);
                        recorded.extend(left.next());
                    }
                    Err(first) => {
                        if recorded.is_empty() {
                            blocked = Some((first, image.len()));
                        }
                        break;
                    }
                }
            }
            let outcome = match blocked {
                None => self.arrival(last).await,
                Some((Some(first), _)) => self.arrival(first).await,
                Some((None, words)) => match log.make_image_room(worker, words).await {
                    // Pages that are being written give theirs back.
                    Err(Error::OutOfMemory { .. }) if waits < WAITS_MAX => {
                        worker.back_off(waits).await;
                        waits += 1;
                        Ok(())
                    }
                    made => made,
                },
            };
            if let Err(error) = outcome {
                let why = match &error {
                    Error::NotRecorded { why } => why.clone(),
                    error => error.to_string(),
                };
                let others = recorded.into_iter().chain(left).skip(1);
                let others = others.map(|_| Err(Error::NotRecorded { why: why.clone() }.into()));
                results.push(Err(error.into()));
                results.extend(others);
                break;
            }
            self.write_recorded(log, recorded, &mut results).await;
        }
        results
    }

    #[inline]
    fn records(&self, pages: usize, new: usize) -> bool {
        // A page that is there stays in remote memory as it was; of a new one nothing is there.
        pages > 1 || new > 0 || self.records_all()
    }

    fn record_words(&self, page: PageId, words: &[AtomicU64], set: &[u32]) {
        let Some(log) = self.log() else { return };
        let word = |index: usize| words[index].load(Ordering::Relaxed);
        let version = LockWord::from_word(word(LOCK)).version();
        let mut runs = SmallVec::<[WordRun; 1]>::new();
        for &index in set.iter().filter(|&&index| index as usize != LOCK) {
            match runs.last_mut() {
                Some((first, run)) if *first as usize + run.len() == index as usize => run.push(word(index as usize)),
                _ => runs.push((index, smallvec![word(index as usize)])),
            }
        }
        let record = PageRecord { page: link_of(page), version, is_shared: false, what: Recorded::Words(runs) };
        self.0.batch.set(log.record([record]));
    }

    fn record(&self, changed: Vec<(PageId, Box<[u64]>)>, freed: Vec<(PageId, Box<[u64]>)>) {
        let Some(log) = self.log() else { return };
        let lock = |words: &[u64]| LockWord::from_word(words[LOCK]);
        let is_shared = |page| self.known().unlocking.contains(page);
        let image = |(page, words): (PageId, Box<[u64]>)| {
            let version = lock(&words).version();
            let page = link_of(page);
            PageRecord { page, version, is_shared: is_shared(page), what: Recorded::Image(words) }
        };
        let free = |(page, words): (PageId, Box<[u64]>)| {
            let version = lock(&words).next_version();
            let page = link_of(page);
            PageRecord { page, version, is_shared: is_shared(page), what: Recorded::Freed }
        };
        self.0.batch.set(log.record(changed.into_iter().map(image).chain(freed.into_iter().map(free))));
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        drop(self.context().worker.spawn_to_end(task));
    }
}

fn version_of(image: &[u64]) -> u64 {
    LockWord::from_word(image[LOCK]).version()
}

/// A page is cached under its link.
pub(crate) fn link_of(page: PageId) -> Link {
    Link::from_word(page.get())
}

/// The page that an unswizzled link leads to.
pub(crate) fn page_id(link: Link) -> PageId {
    PageId::new(link.word()).expect("an unswizzled link to a page")
}

pub(crate) fn to_cache(class: SizeClass) -> CacheClass {
    CacheClass::of_bytes(class.bytes()).expect("both crates have the same classes")
}

/// What a refused call of the cache means for an operation.
pub(crate) fn refused(error: PageError) -> Interrupt {
    interrupt(error.into())
}

/// What a failed access to the cache means for an operation.
fn interrupt(error: CacheError<Interrupt>) -> Interrupt {
    match error {
        CacheError::Conflict(Conflict::Moved) => Interrupt::moved(),
        CacheError::Conflict(Conflict::Changed) => Interrupt::conflict(),
        CacheError::Store { source, .. } => source,
        CacheError::BadLink => {
            Error::BadPointer { word: 0, why: "a link leads to no page, or to one of another size".into() }.into()
        }
        other => Error::Cache(other.to_string()).into(),
    }
}

#[cfg(test)]
mod tests {
    use farlink_runtime::{
        compute::{ComputeOptions, ComputeServer},
        fabric::mem::MemOptions,
        one_sided::{Proof, ownership},
        server,
        versioned::Versioned,
        write_ahead::Reserve,
    };
    use farlink_structures::{
        btree::{BTree, BTreeOptions, Tree},
        map::KeyRange,
    };

    use super::*;

    /// The cache sees to it that no such page is changed; and if it did not, the page would stay as it is.
    #[test]
    fn a_page_that_is_not_inside_what_is_owned_is_not_written() {
        const CUT: u64 = 500;
        let fabric = Arc::new(server::in_process(1, 8 << 20, MemOptions::default()).unwrap());
        let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
        let worker = compute.worker().unwrap();
        let outcome = worker.block_on(async {
            let tree = BTree::create(&worker, "t", BTreeOptions { page_bytes: 256, ..BTreeOptions::default() }).await?;
            tree.bulk_load((0..2 * CUT).map(|key| (key, key)), 0.8).await?;
            let (structure, high) = (tree.structure().clone(), Some(tree.leaf_low(CUT).await?));
            drop(tree);
            let region = KeyRange { low: 0, high };
            let reserve = Reserve::make(&worker).await?;
            let tenure = ownership::claim::<Tree>(&worker, &structure, &region, ownership::Waits::AWhile).await?;
            let log = Log::new(&worker, structure.id, tenure, 1 << 20, reserve);
            let regions = Versioned::new(Regions { owned: vec![region], ..Regions::default() });
            let owned = Owned { regions: regions.reader(), log, records_all: false };
            let one_sided = OneSided::<Tree>::new(&worker, structure.clone(), Proof::Checksum).unguarded();
            let store = RemoteStore::new(one_sided.clone(), Some(owned), Known::default());

            let (mut met, mut left) = ([0; 3], vec![structure.root_link()]);
            while let Some(link) = left.pop() {
                let page = one_sided.read_page(link).await?;
                let (at, level, before) = (page.at(), page.level(), page.into_words());
                if level > 0 {
                    left.extend(Tree::links(&*before).map(|index| Link::from_word(before[index])));
                }
                let mut image = worker.buffer(before.len())?;
                image.copy_from_slice(&before);
                image[LOCK] = LockWord::unlocked(version_of(&before) + 1).word();
                let place = store.overlap(&*before);
                let outcome = store.write(vec![(page_id(link), image)]).await.pop().expect("each has one");
                let is_refused = |error: &Error| matches!(error, Error::SharedPage { page } if *page == at);
                match place {
                    Overlap::Inside => outcome?,
                    _ => assert!(
                        matches!(&outcome, Err(Interrupt::Failed(error)) if is_refused(error)),
                        "{place:?}: {outcome:?}"
                    ),
                }
                let now = worker.read(at, before.len()).await?;
                assert_eq!(*now == *before, place != Overlap::Inside, "{place:?}, level {level}");
                met[place as usize] += 1;
            }
            assert!(met.iter().all(|&count| count > 0), "{met:?}");
            Ok::<_, Interrupt>(())
        });
        outcome.unwrap();
    }
}
