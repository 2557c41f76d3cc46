//! What a hit costs beside an indexed `Vec` and the crate `quick_cache`, in one run: `cargo bench -p farlink-peers --bench hit`.
//!
//! All of them hold the same pages of 64 bytes under the numbers 0 to n - 1, look up a number drawn at random, and read one word of the
//! page. The cache reaches a page by a link. *One hit* reads the link in a page that is held, follows it, and reads the page: what
//! an index into a `Vec`, or a get of a cache, is to others. A lookup *from the root* enters the anchored root and makes its way
//! down, one hit a level. Rounds of all alternate, so that what disturbs one disturbs all; the median round counts. The memory of all is
//! asked to be in huge pages, as the cache's is; how much of it was is said.

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

use farlink_cache::{Anchor, CacheError, CacheHandle, CacheOptions, Layout, Page, PageCache, PageId, SizeClass, Store};
use farlink_children::huge_pages::{self, OwnMemory, show};

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
    /// The pages of the level above the leaves.
    fn above(&self, pages: u64) -> Vec<Page<'_, Made, Directory>> {
        let leads_to = |number: u64| {
            let mut page = self.handle.enter(&self.root).ok()?;
            for level in (1..self.levels).rev() {
                let (word, class) = page.read(|words| link(words, number, level)).ok()?;
                page = self.handle.try_follow::<0>(&page, word, class, None)?;
            }
            Some(page)
        };
        (0..pages.div_ceil(FAN)).map(|number| leads_to(number * FAN).expect("all pages are cached")).collect()
    }

    /// One hit: from a page that is held.
    #[inline]
    fn hit(&self, above: &[Page<'_, Made, Directory>], number: u64) -> Option<u64> {
        let from = &above[(number >> FAN_BITS) as usize];
        let (word, class) = from.read(|words| link(words, number, 0)).ok()?;
        self.handle.try_follow::<0>(from, word, class, None)?.read(value).ok()
    }

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

/// A thread of a round, which makes what it looks pages up with.
struct Racer<'a> {
    barrier: &'a Barrier,
    draw: Draw,
    ops: u64,
    bound: u64,
}

impl Racer<'_> {
    /// Nanoseconds a lookup.
    fn time(mut self, word: impl Fn(u64) -> u64) -> f64 {
        (0..self.ops / 8).for_each(|_| _ = black_box(word(self.draw.below(self.bound))));
        self.barrier.wait();
        let start = Instant::now();
        let mut sum = 0;
        for _ in 0..self.ops {
            sum += word(self.draw.below(self.bound));
        }
        black_box(sum);
        start.elapsed().as_nanos() as f64 / self.ops as f64
    }
}

/// Nanoseconds a lookup: the slowest of so many threads, each with `ops` lookups below `bound`.
fn round(threads: usize, ops: u64, bound: u64, run: impl Fn(Racer<'_>) -> f64 + Sync) -> f64 {
    let barrier = &Barrier::new(threads);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads as u64)
            .map(|thread| {
                let draw = Draw(0x9e37_79b9 + thread * 7919);
                let run = &run;
                scope.spawn(move || run(Racer { barrier, draw, ops, bound }))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread ends")).fold(0.0, f64::max)
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn compare(name: &str, pages: u64, levels: u64) {
    let mut memory = vec![OwnMemory::now()];
    let vec = (0..pages).map(|number| [number; 8]).collect::<Vec<_>>();
    memory.push(OwnMemory::now());
    let quick = quick_cache::sync::Cache::new(pages as usize * 2);
    (0..pages).for_each(|number| quick.insert(number, [number; 8]));
    memory.push(OwnMemory::now());
    let mut options = CacheOptions::new((pages as usize * 200).max(4 << 20));
    options.page_bytes = LEAF.bytes();
    let cache = PageCache::new(Directory, options).expect("options that work");
    let filler = Ours::new(&cache, levels);
    (0..pages).for_each(|number| assert_eq!(now(filler.async_word(number)).expect("a store that answers"), number));
    memory.push(OwnMemory::now());
    let shares: Vec<_> = memory.windows(2).map(|pair| show(pair[1].huge_share_since(pair[0]))).collect();
    println!(
        "{name}: of their memory in huge pages: Vec {}, quick_cache {}, the cache {}",
        shares[0], shares[1], shares[2]
    );
    let ops = if pages < 100_000 { 2_000_000 } else { 400_000 };
    for threads in [1, 2] {
        let mut times = [const { Vec::new() }; 5];
        for _ in 0..ROUNDS {
            times[0].push(round(threads, ops, pages, |racer| racer.time(|number| vec[number as usize][5])));
            times[1].push(round(threads, ops, pages, |racer| {
                racer.time(|number| quick.get(&number).expect("all pages fit")[5])
            }));
            times[2].push(round(threads, ops, pages, |racer| {
                let ours = Ours::new(&cache, levels);
                let above = ours.above(pages);
                racer.time(|number| ours.hit(&above, number).expect("all pages are cached"))
            }));
            times[3].push(round(threads, ops, pages, |racer| {
                let ours = Ours::new(&cache, levels);
                racer.time(|number| ours.try_word(number).expect("all pages are cached"))
            }));
            times[4].push(round(threads, ops, pages, |racer| {
                let ours = Ours::new(&cache, levels);
                racer.time(|number| now(ours.async_word(number)).expect("all pages are cached"))
            }));
        }
        let [vec, quick, hit, tried, awaited] = times.map(median);
        println!("{name}, {threads} thread(s): Vec {vec:.1} ns, quick_cache {quick:.1} ns");
        for (how, ours) in [("one hit", hit), ("from the root, try_follow", tried), ("from the root, follow", awaited)]
        {
            println!("  {how:26} {ours:6.1} ns: {:4.1} x Vec, {:.2} x quick_cache", ours / vec, ours / quick);
        }
    }
}

fn main() {
    huge_pages::for_all();
    compare("hot, 64 pages", 64, 1);
    compare("uniform, 4096 pages", FAN, 1);
    compare("uniform, 262144 pages, two levels", FAN * 64, 2);
}
