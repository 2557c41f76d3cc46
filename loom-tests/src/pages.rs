//! A store of small pages for models of the cache, and waiting for futures.

use std::{
    collections::HashMap,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool as PlainBool, AtomicU64 as PlainU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
};

use farlink_cache::{CacheHandle, Layout, PageCache, PageId, SizeClass, Store, look_again, model};
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The size of all pages here.
pub const CLASS: SizeClass = SizeClass::of_bytes(64).expect("64 is a page's size");

/// A thread's way to a cache of such pages.
pub type Handle = CacheHandle<Pages, Tree>;

/// The name of a page.
pub const fn id(number: u64) -> PageId {
    PageId::new(number).expect("neither zero nor too large")
}

/// Pages below page 1: word 0 of a page is its level, word 1 of one above level 0 its only link; leaves keep a value in it.
#[derive(Debug)]
pub struct Tree;

impl Layout for Tree {
    fn level(&self, page: &[AtomicU64]) -> u8 {
        page[0].load(Relaxed) as u8
    }

    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        (self.level(page) != 0).then_some(1).into_iter()
    }
}

#[derive(Debug, Default)]
struct Shared {
    pages: Mutex<HashMap<PageId, [u64; 2]>>,
    reads: PlainU64,
    /// Whether reads and writes take a while.
    is_slow: PlainBool,
    /// Whether the next write fails.
    fails: PlainBool,
    /// Whether pages are let in at all, for reads that look whether they are.
    is_shut: AtomicBool,
    looks: PlainBool,
}

/// [`refuse`](crate::refuse) for a model of the cache that leaves a step out.
pub fn refuse_without(step: model::Step, name: &str, why: &str, model: impl Fn() + Send + Sync + 'static) {
    model::leave_out(Some(step));
    crate::refuse(name, why, model);
    model::leave_out(None);
}

/// A store of pages of which only the first two words are used. What it keeps is the standard library's, so that loom spends
/// no executions on it: each of its steps is done at one moment.
#[derive(Debug, Clone, Default)]
pub struct Pages(Arc<Shared>);

/// The store refused.
#[derive(Debug, Clone, Copy)]
pub struct Refused;

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("refused")
    }
}

impl std::error::Error for Refused {}

impl Pages {
    /// These pages: id, level and what is in it.
    pub fn new(pages: &[(u64, u64, u64)]) -> Self {
        let store = Self::default();
        store.pages().extend(pages.iter().map(|&(page, level, word)| (id(page), [level, word])));
        store
    }

    fn pages(&self) -> std::sync::MutexGuard<'_, HashMap<PageId, [u64; 2]>> {
        self.0.pages.lock().expect("nobody panics with it")
    }

    /// A cache of `frames` frames in front of this store.
    pub fn cache(&self, frames: usize) -> Arc<PageCache<Tree>> {
        PageCache::new(Tree, model::options(frames)).expect("a model's options work")
    }

    /// What is in a page.
    pub fn value(&self, page: u64) -> u64 {
        self.pages()[&id(page)][1]
    }

    /// Adds to what is in a page.
    pub fn add(&self, page: PageId, by: u64) {
        if let Some(words) = self.pages().get_mut(&page) {
            words[1] += by;
        }
    }

    /// How many reads there were.
    pub fn reads(&self) -> u64 {
        self.0.reads.load(Relaxed)
    }

    /// Has reads and writes suspend once.
    pub fn slow_down(&self) {
        self.0.is_slow.store(true, Relaxed);
    }

    /// Has the next write fail.
    pub fn fail_next(&self) {
        self.0.fails.store(true, Relaxed);
    }

    /// Has reads look whether pages are let in.
    pub fn look(&self) {
        self.0.looks.store(true, Relaxed);
    }

    /// Lets no more pages in.
    pub fn shut(&self) {
        self.0.is_shut.store(true, Ordering::Relaxed);
    }

    async fn pass_time(&self) {
        let mut is_over = !self.0.is_slow.load(Relaxed);
        poll_fn(|cx| {
            if std::mem::replace(&mut is_over, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
}

impl Store for Pages {
    type Buffer = Vec<u64>;
    type Error = Refused;

    fn buffer(&self, words: usize) -> Result<Vec<u64>, Refused> {
        Ok(vec![0; words])
    }

    async fn read(&self, page: PageId, class: SizeClass) -> Result<Vec<u64>, Refused> {
        self.0.reads.fetch_add(1, Relaxed);
        self.pass_time().await;
        let mut words = vec![0; class.words()];
        words[..2].copy_from_slice(self.pages().get(&page).ok_or(Refused)?);
        if self.0.looks.load(Relaxed) && look_again(|| self.0.is_shut.load(Ordering::Relaxed)) {
            return Err(Refused);
        }
        Ok(words)
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<Result<(), Refused>> {
        self.pass_time().await;
        if self.0.fails.swap(false, Relaxed) {
            return pages.iter().map(|_| Err(Refused)).collect();
        }
        // What a write does is there before it answers: another thread may come in between.
        self.pages().extend(pages.iter().map(|(page, words)| (*page, [words[0], words[1]])));
        loom::thread::yield_now();
        pages.iter().map(|_| Ok(())).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        block_on(task);
    }
}

struct Doorbell(AtomicBool);

impl Wake for Doorbell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// Turns of waiting that are explored: more change nothing.
const TURNS_EXPLORED: u32 = 3;
/// Turns after which nobody else is left to do anything.
const TURNS_MAX: u32 = 500;

/// Polls a future to its end, and waits in between for its waker.
///
/// # Panics
/// If a wake-up is lost.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let bell = Arc::new(Doorbell(AtomicBool::new(false)));
    let waker = Waker::from(Arc::clone(&bell));
    let mut turns = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        loop {
            turns += 1;
            assert!(turns < TURNS_MAX, "never woken");
            if turns > TURNS_EXPLORED {
                loom::skip_branch();
            }
            loom::thread::yield_now();
            if bell.0.swap(false, Ordering::Acquire) {
                break;
            }
        }
    }
}
