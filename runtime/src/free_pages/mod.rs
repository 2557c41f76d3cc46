//! Pages that nobody uses, on their way through a compute server: see [`crate::pages`].
//!
//! Lists of workers ([`LocalPages`]), the pool and the deferred list of the compute server ([`SharedPages`]), and the bitmaps
//! on memory servers (`chunk.rs`).

pub(crate) mod chunk;
mod classes;
#[cfg(loom)]
pub mod model;

// Ordered, so that a seed decides in which order pages go back to remote memory.
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

pub(crate) use self::{
    chunk::{ChunkState, bitmap_words},
    classes::ChunkClasses,
};
use crate::{
    lock::{LockState, LockWord, OwnerId},
    page::{LOCK, SELF, SizeClass},
    ptr::{Link, RemotePtr, ServerId},
    sync::{Arc, AtomicBool, Mutex, Ordering, lock},
    words::Words,
};

/// A number of pages that are taken, kept or returned at a time. Of large pages it is fewer: what a compute server holds and does not
/// use, others lack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lot {
    pages_max: usize,
    bytes_max: usize,
}

impl Lot {
    pub(crate) const fn new(pages_max: usize, bytes_max: usize) -> Self {
        Self { pages_max, bytes_max }
    }

    /// How many pages of this class, one at least.
    pub(crate) fn of(self, class: SizeClass) -> usize {
        (self.bytes_max / class.bytes()).clamp(1, self.pages_max)
    }
}

/// What a worker takes from the pool at a time.
const BATCH: Lot = Lot::new(32, 128 << 10);
/// A list of the pool of which more than this was not used for a [while](IDLE_ROUNDS) keeps [`KEPT`] of that and returns the rest to the
/// bitmaps, for others.
const SURPLUS: Lot = Lot::new(1024, 1 << 20);
const KEPT: Lot = Lot::new(256, 256 << 10);
/// Rounds of maintenance over which it is counted what of a list nobody uses. Pages whose grace is over come back all at once, every few
/// rounds: what is taken until the next ones come is no surplus, however much it is.
const IDLE_ROUNDS: u32 = 32;

/// A page that nobody uses, with the version in its lock word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FreePage {
    pub(crate) at: RemotePtr,
    pub(crate) class: SizeClass,
    pub(crate) version: u64,
}

/// A page that [`Access::install`](crate::access::Access::install) has made, and what it takes to free it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unlinked {
    pub(crate) at: RemotePtr,
    pub(crate) class: SizeClass,
    /// Its lock word, which stays as it is until it is freed.
    pub(crate) lock: LockWord,
}

impl Unlinked {
    /// Of a page as it was read. `None` if these are not the words of a page.
    pub fn of(words: &(impl Words + ?Sized)) -> Option<Self> {
        let class = SizeClass::of_bytes(words.count() * 8)?;
        let at = RemotePtr::from_raw(words.word(SELF)).ok()?;
        Some(Self { at, class, lock: LockWord::from_word(words.word(LOCK)) })
    }

    /// As words of a page that names it.
    pub fn words(&self) -> [u64; 2] {
        [Link::to(self.at, self.class).word(), self.lock.word()]
    }

    /// What those words name; `None` if it is no page.
    pub fn from_words([link, lock]: [u64; 2]) -> Option<Self> {
        let (at, class) = Link::from_word(link).remote()?;
        let lock = LockWord::from_word(lock);
        (lock.state() == LockState::Unlocked).then_some(Self { at, class, lock })
    }

    /// The lock word with which who was in [doubt](SharedPages::doubt) about it frees it. Not the one that a worker of this compute server
    /// writes who has unlinked it: if the answer is lost, it has to be told which of the two is there, for the page is free once. So this
    /// takes a version more than an unlock.
    pub(crate) fn free_after_doubt(&self, owner: OwnerId) -> LockWord {
        let freed = LockWord::unlocked(self.lock.next_version() + 1);
        LockWord::free(freed.next_version(), Some(owner))
    }

    /// Its address.
    pub const fn at(&self) -> RemotePtr {
        self.at
    }

    /// Its size.
    pub const fn class(&self) -> SizeClass {
        self.class
    }
}

/// The lists of one worker.
#[derive(Debug, Default)]
pub(crate) struct LocalPages {
    free: RefCell<BTreeMap<(ServerId, SizeClass), Vec<FreePage>>>,
    turn: Cell<usize>,
}

impl LocalPages {
    /// The memory server whose turn it is, of so many.
    pub(crate) fn next_turn(&self, servers: usize) -> usize {
        self.turn.set((self.turn.get() + 1) % servers);
        self.turn.get()
    }

    pub(crate) fn pop(&self, shared: &SharedPages, key: (ServerId, SizeClass)) -> Option<FreePage> {
        let mut free = self.free.borrow_mut();
        let list = free.entry(key).or_default();
        if list.is_empty() {
            shared.take(key, BATCH.of(key.1), list);
        }
        list.pop()
    }

    pub(crate) fn free(&self, shared: &SharedPages, page: FreePage) {
        let key = (page.at.server(), page.class);
        let mut free = self.free.borrow_mut();
        let list = free.entry(key).or_default();
        list.push(page);
        let most = 4 * BATCH.of(page.class);
        if list.len() > most {
            let surplus = list.drain(..most / 2);
            shared.put(surplus);
        }
    }

    /// Moves everything to the compute server's pool.
    pub(crate) fn give_back(&self, shared: &SharedPages) {
        for (_, list) in std::mem::take(&mut *self.free.borrow_mut()) {
            shared.put(list.into_iter());
        }
    }
}

/// What waits until all operations have ended that run now.
#[derive(Debug, Default)]
struct Waiting {
    /// Unlinked and marked free: to be used again.
    retired: Vec<FreePage>,
    /// The same of pages that dead compute servers held: they go back to their chunks.
    reclaimed: Vec<FreePage>,
    /// Pages that somebody may have unlinked, who frees them then; or nobody has.
    doubtful: Vec<Unlinked>,
    /// Set when it is over.
    graces: Vec<Arc<AtomicBool>>,
}

impl Waiting {
    fn count(&self) -> usize {
        self.retired.len() + self.reclaimed.len() + self.doubtful.len() + self.graces.len()
    }

    fn append(&mut self, mut other: Self) {
        self.retired.append(&mut other.retired);
        self.reclaimed.append(&mut other.reclaimed);
        self.doubtful.append(&mut other.doubtful);
        self.graces.append(&mut other.graces);
    }
}

#[derive(Debug, Default)]
struct Deferred {
    /// What has no stamp yet.
    fresh: Waiting,
    /// What a round is about to stamp.
    unstamped: Waiting,
    /// By the epoch in which it was stamped.
    stamped: Vec<(u64, Waiting)>,
    /// Pages in doubt whose grace is over.
    unclaimed: Vec<Unlinked>,
}

impl Deferred {
    fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        self.stamped.iter().map(|(_, waiting)| waiting).chain([&self.fresh, &self.unstamped])
    }

    fn count(&self) -> usize {
        self.waiting().map(Waiting::count).sum::<usize>() + self.unclaimed.len()
    }

    fn in_doubt(&self) -> impl Iterator<Item = &Unlinked> {
        self.waiting().flat_map(|waiting| &waiting.doubtful).chain(&self.unclaimed)
    }
}

/// A list of the pool: what was put last is taken first.
#[derive(Debug, Default)]
struct PoolList {
    pages: Vec<FreePage>,
    /// How many have lain here since the count began.
    idle: usize,
}

/// The pool.
#[derive(Debug, Default)]
struct Pool {
    lists: BTreeMap<(ServerId, SizeClass), PoolList>,
    /// Rounds of maintenance since the count of idle pages began.
    rounds: u32,
}

/// Pages on their way back to their chunks.
#[derive(Debug, Default)]
struct Returning {
    pages: Vec<FreePage>,
    /// How many have been taken out to be returned, and are neither in a bitmap nor here again.
    under_way: usize,
}

/// The pool and the deferred list of one compute server. Workers come here once for many pages.
#[derive(Debug, Default)]
pub(crate) struct SharedPages {
    free: Mutex<Pool>,
    deferred: Mutex<Deferred>,
    searches: Mutex<BTreeMap<(ServerId, SizeClass), Search>>,
    /// Pages that go back to their chunks: those that dead compute servers held, once their grace is over.
    returning: Mutex<Returning>,
    /// Chunks that somebody had counted as leased, and never leased; none of a memory server where nobody has looked for them
    /// since they may have come to be.
    lost_chunks: Mutex<BTreeMap<ServerId, Vec<u64>>>,
    /// Whether there ever was a page here to hold.
    is_used: AtomicBool,
}

/// What is known of free pages in the bitmaps of one server.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Search {
    /// The chunk where the next search begins.
    pub(crate) from: u64,
    /// How often pages had been returned when one last found none.
    pub(crate) none_free_at: u64,
}

impl SharedPages {
    pub(crate) fn search(&self, key: (ServerId, SizeClass)) -> Search {
        lock(&self.searches).get(&key).copied().unwrap_or_default()
    }

    pub(crate) fn alter_search(&self, key: (ServerId, SizeClass), f: impl FnOnce(&mut Search)) {
        f(lock(&self.searches).entry(key).or_default());
    }

    fn take(&self, key: (ServerId, SizeClass), count: usize, into: &mut Vec<FreePage>) {
        if let Some(PoolList { pages, idle }) = lock(&self.free).lists.get_mut(&key) {
            into.extend(pages.drain(pages.len().saturating_sub(count)..));
            *idle = pages.len().min(*idle);
        }
    }

    pub(crate) fn put(&self, pages: impl Iterator<Item = FreePage>) {
        let mut free = lock(&self.free);
        for page in pages {
            self.is_used.store(true, Ordering::Relaxed);
            free.lists.entry((page.at.server(), page.class)).or_default().pages.push(page);
        }
    }

    /// The page was unlinked and marked free just now; its grace period begins.
    pub(crate) fn retire(&self, pages: impl Iterator<Item = FreePage>) {
        self.is_used.store(true, Ordering::Relaxed);
        lock(&self.deferred).fresh.retired.extend(pages);
    }

    /// A dead compute server held these pages; their grace period begins.
    pub(crate) fn reclaim(&self, pages: Vec<FreePage>) {
        if !pages.is_empty() {
            self.is_used.store(true, Ordering::Relaxed);
        }
        lock(&self.deferred).fresh.reclaimed.extend(pages);
    }

    /// No reader can come to these pages any more, and it is not known whether they were ever linked. If they were, who has
    /// unlinked them frees them before its operation ends. So those that are not free once all operations have ended that run now are
    /// nobody's. Of two operations that are in doubt about a page the later one leaves it to the earlier one: the page is free once.
    pub(crate) fn doubt(&self, pages: impl Iterator<Item = Unlinked>) {
        self.is_used.store(true, Ordering::Relaxed);
        let mut deferred = lock(&self.deferred);
        for page in pages {
            if !deferred.in_doubt().any(|&known| known == page) {
                deferred.fresh.doubtful.push(page);
            }
        }
    }

    /// Set once all operations have ended that run now, anywhere in the cluster.
    pub(crate) fn begin_grace(&self) -> Arc<AtomicBool> {
        let over = Arc::new(AtomicBool::new(false));
        lock(&self.deferred).fresh.graces.push(Arc::clone(&over));
        over
    }

    /// Pages in doubt that are not in use: free, or nobody's.
    pub(crate) fn take_unclaimed(&self) -> Vec<Unlinked> {
        std::mem::take(&mut lock(&self.deferred).unclaimed)
    }

    /// The page goes back to its chunk with the next round of maintenance. Nobody looks at it any more.
    pub(crate) fn bring_back(&self, page: FreePage) {
        self.is_used.store(true, Ordering::Relaxed);
        lock(&self.returning).pages.push(page);
    }

    /// Whether pages may be here that are in no bitmap.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    /// These chunks of a memory server count as leased, and nobody has leased them. Or somebody is about to: then that is found out.
    pub(crate) fn set_lost_chunks(&self, server: ServerId, chunks: Vec<u64>) {
        lock(&self.lost_chunks).insert(server, chunks);
    }

    /// One of them.
    pub(crate) fn take_lost_chunk(&self, server: ServerId) -> Option<u64> {
        lock(&self.lost_chunks).get_mut(&server)?.pop()
    }

    /// Whether it is known which these are.
    pub(crate) fn knows_lost_chunks(&self, server: ServerId) -> bool {
        lock(&self.lost_chunks).contains_key(&server)
    }

    /// There may be more.
    pub(crate) fn forget_lost_chunks(&self) {
        lock(&self.lost_chunks).clear();
    }

    /// What was deferred up to now, to be stamped with an epoch that is read after this call.
    pub(crate) fn take_deferred(&self) -> Unstamped<'_> {
        let mut deferred = lock(&self.deferred);
        let fresh = std::mem::take(&mut deferred.fresh);
        deferred.unstamped.append(fresh);
        Unstamped(self)
    }

    /// Frees what was stamped with an epoch below `announced`, which every live compute server has announced.
    pub(crate) fn release(&self, announced: u64) {
        let mut deferred = lock(&self.deferred);
        let mut over = Waiting::default();
        deferred.stamped.extract_if(.., |(stamp, _)| *stamp < announced).for_each(|(_, waiting)| over.append(waiting));
        let Waiting { retired, reclaimed, doubtful, graces } = over;
        deferred.unclaimed.extend(doubtful);
        // While nobody can look at what is deferred: the pages are in one of the two.
        lock(&self.returning).pages.extend(reclaimed);
        drop(deferred);
        self.put(retired.into_iter());
        // Release: who sees it sees what those operations have done.
        graces.iter().for_each(|over| over.store(true, Ordering::Release));
    }

    pub(crate) fn deferred(&self) -> usize {
        lock(&self.deferred).count()
    }

    /// Whether pages are on their way back to their chunks.
    pub(crate) fn is_returning(&self) -> bool {
        let returning = lock(&self.returning);
        returning.under_way != 0 || !returning.pages.is_empty()
    }

    /// Takes what dead compute servers held, and what was [brought back](Self::bring_back). Until
    /// [`end_returning`](Self::end_returning) it is on its way.
    pub(crate) fn take_returning(&self) -> Vec<FreePage> {
        let mut returning = lock(&self.returning);
        returning.under_way += returning.pages.len();
        std::mem::take(&mut returning.pages)
    }

    /// Of so many pages that were taken to be returned these were not.
    pub(crate) fn end_returning(&self, count: usize, left: Vec<FreePage>) {
        let mut returning = lock(&self.returning);
        returning.under_way -= count;
        returning.pages.extend(left);
    }

    /// How many of these are in [doubt](Self::doubt). They say nowhere in remote memory that they are, so nobody can take them over.
    pub(crate) fn in_doubt(&self) -> usize {
        lock(&self.deferred).in_doubt().count()
    }

    /// Takes what was idle for too long in every list. Once a round.
    pub(crate) fn take_surplus(&self) -> Vec<FreePage> {
        let mut surplus = Vec::new();
        let Pool { lists, rounds } = &mut *lock(&self.free);
        *rounds += 1;
        if *rounds < IDLE_ROUNDS {
            return surplus;
        }
        *rounds = 0;
        for ((_, class), PoolList { pages, idle }) in lists {
            if *idle > SURPLUS.of(*class) {
                surplus.extend(pages.drain(..*idle - KEPT.of(*class)));
            }
            *idle = pages.len();
        }
        surplus
    }

    pub(crate) fn take_all(&self) -> Vec<FreePage> {
        let returning = std::mem::take(&mut lock(&self.returning).pages);
        let lists = std::mem::take(&mut *lock(&self.free)).lists;
        lists.into_values().flat_map(|list| list.pages).chain(returning).collect()
    }
}

/// What waits for its stamp; without one, it goes back. One at a time: a compute server makes one round at a time.
pub(crate) struct Unstamped<'a>(&'a SharedPages);

impl Unstamped<'_> {
    pub(crate) fn stamp(self, epoch: u64) {
        let mut deferred = lock(&self.0.deferred);
        let waiting = std::mem::take(&mut deferred.unstamped);
        if waiting.count() != 0 {
            deferred.stamped.push((epoch, waiting));
        }
    }
}

impl Drop for Unstamped<'_> {
    fn drop(&mut self) {
        let mut deferred = lock(&self.0.deferred);
        let waiting = std::mem::take(&mut deferred.unstamped);
        deferred.fresh.append(waiting);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const KEY: (ServerId, SizeClass) = (ServerId::new(1).unwrap(), SizeClass::SMALLEST);
    const MANY: usize = 3000;

    fn put(pages: &SharedPages, count: usize) {
        let page = |number: u64| RemotePtr::new(KEY.0, number << 16).unwrap();
        pages.put((1..=count as u64).map(|number| FreePage { at: page(number), class: KEY.1, version: 0 }));
    }

    #[test]
    fn who_takes_pages_back_from_the_dead_has_pages() {
        let pages = SharedPages::default();
        pages.reclaim(Vec::new());
        assert!(!pages.is_used(), "there were none");
        let at = RemotePtr::new(KEY.0, 1 << 16).unwrap();
        pages.reclaim(vec![FreePage { at, class: KEY.1, version: 0 }]);
        assert!(pages.is_used());
    }

    /// Also while one who is not asked makes a round.
    #[test]
    fn what_dead_ones_held_is_on_its_way_until_it_is_returned() {
        let pages = SharedPages::default();
        let page = FreePage { at: RemotePtr::new(KEY.0, 1 << 16).unwrap(), class: KEY.1, version: 0 };
        pages.reclaim(vec![page]);
        let unstamped = pages.take_deferred();
        assert_eq!(pages.deferred(), 1, "it is about to be stamped");
        drop(unstamped);
        pages.take_deferred().stamp(1);
        assert_eq!(pages.deferred(), 1);
        pages.release(2);
        assert!(pages.deferred() == 0 && pages.is_returning());
        let returning = pages.take_returning();
        assert!(pages.is_returning(), "it is in no bitmap yet");
        pages.end_returning(1, returning);
        assert_eq!(pages.take_returning(), [page]);
        pages.end_returning(1, Vec::new());
        assert!(!pages.is_returning());
    }

    /// Pages whose grace is over come back in large numbers, and are used again until the next ones do.
    #[test]
    fn what_is_soon_taken_again_is_no_surplus() {
        let pages = SharedPages::default();
        for _ in 0..3 * IDLE_ROUNDS {
            put(&pages, MANY);
            assert!(pages.take_surplus().is_empty(), "all of it is used until the next round");
            let mut taken = Vec::new();
            pages.take(KEY, MANY, &mut taken);
            assert_eq!(taken.len(), MANY);
        }
        put(&pages, MANY);
        let surplus: usize = (0..2 * IDLE_ROUNDS).map(|_| pages.take_surplus().len()).sum();
        assert_eq!(surplus, MANY - KEPT.of(KEY.1), "nobody uses it");
        assert!((0..2 * IDLE_ROUNDS).all(|_| pages.take_surplus().is_empty()));
        // Some are used again and again.
        put(&pages, MANY);
        for _ in 0..2 * IDLE_ROUNDS {
            let mut taken = Vec::new();
            pages.take(KEY, 100, &mut taken);
            pages.put(taken.into_iter());
            pages.take_surplus();
        }
        assert_eq!(pages.take_all().len(), KEPT.of(KEY.1) + 100, "those stay, and so many of what lies idle");
    }
}
