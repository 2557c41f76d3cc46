//! What a hit costs beside an indexed `Vec` and the crate `quick_cache`, in one run: `cargo bench -p farlink-cache --bench hit`.
//!
//! All of them hold the same pages of 64 bytes under the numbers 0 to n - 1, look up a number drawn at random, and read one word of the
//! page. The cache reaches a page through a directory: it enters the anchored root, follows links, and reads. Rounds of all
//! alternate, so that what disturbs one disturbs all; the median round counts.

use std::{
    convert::Infallible,
    hint::black_box,
    pin::pin,
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
    time::Instant,
};

use farlink_cache::{Anchor, CacheError, CacheHandle, CacheOptions, Layout, PageCache, PageId, SizeClass, Store};

const LEAF: SizeClass = SizeClass::of_bytes(64).unwrap();
const INNER: SizeClass = SizeClass::of_bytes(65536).unwrap();
/// Links of an inner page.
const FAN: u64 = 1 << FAN_BITS;
const FAN_BITS: u64 = 12;
const ROUNDS: usize = 15;

/// Makes pages up: page `1 + n` at level 1 leads to `FAN` leaves, and so on. Ids are `level << 32 | number + 1`.
#[derive(Clone)]
struct Made;

impl Store for Made {
    type Buffer = Vec<u64>;
    type Error = Infallible;

    fn buffer(&self, words: usize) -> Result<Vec<u64>, Infallible> {
        Ok(vec![0; words])
    }

    async fn read(&self, page: PageId, class: SizeClass) -> Result<Vec<u64>, Infallible> {
        let (level, number) = (page.get() >> 32, (page.get() & 0xffff_ffff) - 1);
        let word = |at: u64| match (at, level) {
            (0, _) => level,
            (_, 0) => number,
            (1..=FAN, _) => ((level - 1) << 32) + number * FAN + at,
            _ => 0,
        };
        Ok((0..class.words() as u64).map(word).collect())
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<Result<(), Infallible>> {
        pages.iter().map(|_| Ok(())).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        now(task);
    }
}

struct Directory;

impl Layout for Directory {
    fn level(&self, page: &[AtomicU64]) -> u8 {
        page[0].load(Relaxed) as u8
    }

    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        1..if self.level(page) == 0 { 1 } else { FAN as usize + 1 }
    }
}

#[inline(always)]
fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
    }
}

/// Numbers below `bound`, at random (xorshift).
struct Draw(u64);

impl Draw {
    #[inline]
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 32) * bound) >> 32
    }
}

/// Looks pages up; each thread has its own.
trait Lookup {
    fn word(&self, number: u64) -> u64;
}

struct Indexed(Arc<Vec<[u64; 8]>>);

impl Lookup for Indexed {
    #[inline]
    fn word(&self, number: u64) -> u64 {
        self.0[number as usize][5]
    }
}

struct Quick(Arc<quick_cache::sync::Cache<u64, [u64; 8]>>);

impl Lookup for Quick {
    #[inline]
    fn word(&self, number: u64) -> u64 {
        self.0.get(&number).expect("all pages fit")[5]
    }
}

struct Ours {
    handle: CacheHandle<Made, Directory>,
    root: Anchor<Directory>,
    levels: u64,
}

impl Ours {
    fn new(cache: &Arc<PageCache<Directory>>, levels: u64) -> Self {
        let handle = cache.handle(Made, cache.any_seed()).expect("a handle for each thread");
        let root = now(handle.anchor(PageId::new(levels << 32 | 1).expect("an id"), INNER)).expect("a root");
        Self { handle, root, levels }
    }
}

/// The link to a page at `level` on the way to a leaf, and the page's size.
#[inline]
fn link(words: &[AtomicU64], number: u64, level: u64) -> (u64, SizeClass) {
    let slot = 1 + ((number >> (level * FAN_BITS)) & (FAN - 1)) as usize;
    (words.get(slot).map_or(0, |word| word.load(Relaxed)), if level == 0 { LEAF } else { INNER })
}

#[inline]
fn value(words: &[AtomicU64]) -> u64 {
    words.get(5).map_or(0, |word| word.load(Relaxed))
}

impl Ours {
    #[inline]
    fn try_word(&self, number: u64) -> Option<u64> {
        let mut page = self.handle.enter(&self.root).ok()?;
        for level in (0..self.levels).rev() {
            let (word, class) = page.read(|words| link(words, number, level)).ok()?;
            page = self.handle.try_follow::<0>(&page, word, class, None)?;
        }
        page.read(value).ok()
    }

    #[inline]
    async fn async_word(&self, number: u64) -> Result<u64, CacheError<Infallible>> {
        let mut page = self.handle.enter(&self.root)?;
        for level in (0..self.levels).rev() {
            let (word, class) = page.read(|words| link(words, number, level))?;
            page = self.handle.follow(&page, word, class).await?;
        }
        Ok(page.read(value)?)
    }
}

/// By `try_follow`.
struct Tried(Ours);

impl Lookup for Tried {
    #[inline]
    fn word(&self, number: u64) -> u64 {
        self.0.try_word(number).expect("all pages are cached")
    }
}

/// By `follow`.
struct Awaited(Ours);

impl Lookup for Awaited {
    #[inline]
    fn word(&self, number: u64) -> u64 {
        now(self.0.async_word(number)).expect("all pages are cached")
    }
}

/// Nanoseconds a lookup: the slowest of so many threads, each with `ops` lookups below `bound`.
fn round<T: Lookup>(threads: usize, ops: u64, bound: u64, make: impl Fn() -> T + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let mut times: Vec<f64> = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads as u64)
            .map(|thread| {
                let (barrier, make) = (&barrier, &make);
                scope.spawn(move || {
                    let (lookup, mut draw) = (make(), Draw(0x9e37_79b9 + thread * 7919));
                    (0..ops / 8).for_each(|_| _ = black_box(lookup.word(draw.below(bound))));
                    barrier.wait();
                    let start = Instant::now();
                    let mut sum = 0;
                    for _ in 0..ops {
                        sum += lookup.word(draw.below(bound));
                    }
                    black_box(sum);
                    start.elapsed().as_nanos() as f64 / ops as f64
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread ends")).collect()
    });
    times.sort_by(f64::total_cmp);
    times[times.len() - 1]
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare(name: &str, pages: u64, levels: u64) {
    let vec = Arc::new((0..pages).map(|number| [number; 8]).collect::<Vec<_>>());
    let quick = Arc::new(quick_cache::sync::Cache::new(pages as usize * 2));
    (0..pages).for_each(|number| quick.insert(number, [number; 8]));
    let mut options = CacheOptions::new((pages as usize * 200).max(4 << 20));
    options.page_bytes = LEAF.bytes();
    let cache = PageCache::new(Directory, options).expect("options that work");
    let filler = Ours::new(&cache, levels);
    (0..pages).for_each(|number| assert_eq!(now(filler.async_word(number)).expect("a store that answers"), number));
    let ops = if pages < 100_000 { 2_000_000 } else { 400_000 };
    for threads in [1, 2] {
        let mut times = [const { Vec::new() }; 4];
        for _ in 0..ROUNDS {
            times[0].push(round(threads, ops, pages, || Indexed(Arc::clone(&vec))));
            times[1].push(round(threads, ops, pages, || Quick(Arc::clone(&quick))));
            times[2].push(round(threads, ops, pages, || Tried(Ours::new(&cache, levels))));
            times[3].push(round(threads, ops, pages, || Awaited(Ours::new(&cache, levels))));
        }
        let [vec, quick, tried, awaited] = times.map(median);
        println!("{name}, {threads} thread(s): Vec {vec:.1} ns, quick_cache {quick:.1} ns");
        for (how, ours) in [("try_follow", tried), ("follow", awaited)] {
            println!("  {how:10} {ours:6.1} ns: {:4.1} x Vec, {:.2} x quick_cache", ours / vec, ours / quick);
        }
    }
}

fn main() {
    compare("hot, 64 pages", 64, 1);
    compare("uniform, 4096 pages", FAN, 1);
    compare("uniform, 262144 pages, two levels", FAN * 64, 2);
}
