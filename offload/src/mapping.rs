//! Latch-free structures that anybody changes: a compute server's cache of their mapping words and consolidated pages.

use std::{any::Any, fmt, marker::PhantomData, rc::Rc, sync::Arc};

use farlink_cache::{ValueCache, ValueCounters, ValueHandle};
use farlink_runtime::{
    access::{
        Access, Context, Entering, FastPath, Hint, Interrupt, Link, NewPage, Pages, Placement, Plugin, Right, Start,
        Structure, Swap, Unlinked, WordPtr,
    },
    error::Error,
    one_sided::{OneSided, OneSidedPages, PageCopy, Proof},
    page::SizeClass,
    worker::Handle,
};

/// What a structure has made of the pages behind a word.
type Remembered = Arc<dyn Any + Send + Sync>;

/// What is cached is dropped after so many epochs: in that time a page is reused by installs less often than a word can tell. See
/// [`FastPath::remember`].
const EPOCHS_MAX: u64 = 1 << 14;

/// The mapping cache of a compute server for one structure, shared by its workers.
pub struct MappingCache<P> {
    values: Arc<ValueCache<Remembered>>,
    of: PhantomData<P>,
}

impl<P> fmt::Debug for MappingCache<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.values.fmt(f)
    }
}

impl<P> Clone for MappingCache<P> {
    fn clone(&self) -> Self {
        Self { values: Arc::clone(&self.values), of: PhantomData }
    }
}

impl<P: Plugin> MappingCache<P> {
    /// An empty one of so many bytes.
    pub fn new(bytes: usize) -> Self {
        Self { values: ValueCache::new(bytes), of: PhantomData }
    }

    /// Access to a structure through it, for a worker. All workers name the same structure.
    pub fn share(&self, worker: &Handle, structure: Structure) -> CachedMapping<P> {
        let one_sided = OneSided::new(worker, structure, Proof::Checksum);
        CachedMapping { values: Rc::new(self.values.handle(worker.random(rand::RngExt::random))), one_sided }
    }

    /// The bytes that it uses.
    pub fn used(&self) -> usize {
        self.values.used()
    }

    /// The bytes that it may use.
    pub fn limit(&self) -> usize {
        self.values.limit()
    }

    /// What accesses that have ended have found in it.
    pub fn counters(&self) -> ValueCounters {
        self.values.counters()
    }
}

/// One-sided access that caches mapping words and consolidated pages.
///
/// Such a structure has logical pages: a word for each, which installs change by compare-and-swap, and behind it records that are never
/// changed (a Bw-tree, Levandoski et al., ICDE 2013). What they come to is cached with the word as it was then. Nobody tells
/// anybody of a change. So an operation reads the word that it answers from, 8 bytes, and compares: if it is the one that goes with what is
/// cached, that is the page, as of the moment when the word was read; if not, it reads the records above the one that the
/// cached word leads to, and nothing below. On its way to that page it uses others as they are cached, if the structure copes with
/// old ones as it does with old copies of inner pages ([`CachedInner`](crate::CachedInner)).
///
/// | an operation of one page | round trips | READs | WRITEs | CASs |
/// |---|---|---|---|---|
/// | get, nothing changed | 1 | 8 bytes | | |
/// | get, `n` new deltas | 1 + n at most | 8 bytes, n records at most | | |
/// | put, nothing changed | 1 | | 1 record | 1 |
///
/// What it promises is what the structure promises over [`OneSided`]: nothing is answered from memory alone. A word does not
/// come back with another meaning while it is cached, but for a chance that [`FastPath::remember`] names. Then a get
/// answers what was so, and a change can undo what others have changed since, and free records that are others' pages by now.
///
/// The cache is one budget of bytes, shared by the workers of a compute server: [`ValueCache`].
///
/// Changes of one page by one worker come one after another. So a future of one that has begun is polled to its end, or dropped: kept
/// and not polled, it keeps the worker's other changes of that page waiting. Where some are awaited while others are kept, as in the
/// body of a loop over a buffered stream, have each run as a [task](Handle::spawn).
#[derive(Debug)]
pub struct CachedMapping<P: Plugin> {
    one_sided: OneSided<P>,
    values: Rc<ValueHandle<Remembered>>,
}

impl<P: Plugin> Clone for CachedMapping<P> {
    fn clone(&self) -> Self {
        Self { one_sided: self.one_sided.clone(), values: Rc::clone(&self.values) }
    }
}

impl<P: Plugin> CachedMapping<P> {
    /// What this access and its clones have found in the cache.
    pub fn counters(&self) -> ValueCounters {
        self.values.counters()
    }
}

/// The address of a word.
fn key(at: WordPtr) -> Option<u64> {
    Some(at.page.remote()?.0.word(at.index).raw())
}

impl<P: Plugin> FastPath for CachedMapping<P> {
    type Plugin = P;
    type Page<'a> = PageCopy;

    const REMEMBERS: bool = true;

    #[inline]
    fn right(&self, reads_only: bool) -> Option<Right> {
        self.one_sided.right(reads_only)
    }

    #[inline]
    fn stands(&self, right: Right, reads_only: bool) -> bool {
        self.one_sided.stands(right, reads_only)
    }

    fn enter(&self) -> Entering<'_> {
        self.one_sided.enter()
    }

    fn recall<T: Any + Send + Sync>(&self, at: WordPtr) -> Option<(u64, Arc<T>)> {
        let (word, epoch, value) = self.values.get(key(at)?)?;
        let is_young = self.context().worker.epoch_seen().wrapping_sub(epoch) < EPOCHS_MAX;
        value.downcast().ok().filter(|_| is_young).map(|value| (word, value))
    }

    fn remember<T: Any + Send + Sync>(&self, at: WordPtr, word: u64, state: &Arc<T>, bytes: usize) {
        if let Some(key) = key(at) {
            let epoch = self.context().worker.epoch_seen();
            self.values.put(key, (word, epoch), Arc::<T>::clone(state), bytes);
        }
    }
}

impl<P: Plugin> Access for CachedMapping<P> {
    type PagesMut<'a> = OneSidedPages;

    fn context(&self) -> &Context<P> {
        self.one_sided.context()
    }

    async fn open(&self, start: Start) -> Result<PageCopy, Interrupt> {
        self.one_sided.open(start).await
    }

    async fn follow(&self, from: &PageCopy, link: Link, hint: Hint) -> Result<PageCopy, Interrupt> {
        self.one_sided.follow(from, link, hint).await
    }

    async fn change<'a, R>(
        &'a self,
        pages: Pages<Self::Page<'a>>,
        f: impl FnOnce(&mut Self::PagesMut<'a>) -> R,
    ) -> Result<(R, Pages<Self::Page<'a>>), Interrupt> {
        self.one_sided.change(pages, f).await
    }

    async fn install<'a>(
        &'a self,
        new: Vec<NewPage>,
        f: impl FnOnce(&mut Self::PagesMut<'a>),
        swap: Swap,
        unlinked: Vec<Unlinked>,
    ) -> Result<Result<(), u64>, Interrupt> {
        self.one_sided.install(new, f, swap, unlinked).await
    }

    async fn load(&self, words: &[WordPtr]) -> Result<Vec<u64>, Interrupt> {
        self.one_sided.load(words).await
    }

    async fn allocate(&self, class: SizeClass, placement: Placement) -> Result<NewPage, Error> {
        self.one_sided.allocate(class, placement).await
    }
}
