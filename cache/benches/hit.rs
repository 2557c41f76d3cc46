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

use farlink_cache::{Anchor, CacheHandle, CacheOptions, Layout, PageCache, PageId, SizeClass, Store};

const LEAF: SizeClass = SizeClass::of_bytes(64).unwrap();
const INNER: SizeClass = SizeClass::of_bytes(4096).unwrap();
/// Links of an inner page.
const FAN: u64 = 500;
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
            (1..=FAN, _) => (level - 1) << 32 | number * FAN + at,
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

#[inline]
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

impl Lookup for Ours {
    #[inline]
    fn word(&self, number: u64) -> u64 {
        now(async {
            let mut page = self.handle.enter(&self.root).expect("it is anchored");
            let mut span = FAN.pow(self.levels as u32 - 1);
            for level in (0..self.levels).rev() {
                let slot = 1 + (number / span % FAN) as usize;
                let link = page.read(|words| words[slot].load(Relaxed)).expect("nobody changes it");
                page = self.handle.follow(&page, link, if level == 0 { LEAF } else { INNER }).await.expect("cached");
                span = (span / FAN).max(1);
            }
            page.read(|words| words[5].load(Relaxed)).expect("nobody changes it")
        })
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
                    (0..ops / 8).for_each(|_| drop(black_box(lookup.word(draw.below(bound)))));
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
    let options = CacheOptions::new((pages as usize * 400).max(4 << 20));
    let cache = PageCache::new(Directory, options).expect("options that work");
    let filler = Ours::new(&cache, levels);
    (0..pages).for_each(|number| assert_eq!(filler.word(number), number));
    let ops = if pages < 100_000 { 2_000_000 } else { 400_000 };
    for threads in [1, 2] {
        let mut times = [const { Vec::new() }; 3];
        for _ in 0..ROUNDS {
            times[0].push(round(threads, ops, pages, || Indexed(Arc::clone(&vec))));
            times[1].push(round(threads, ops, pages, || Quick(Arc::clone(&quick))));
            times[2].push(round(threads, ops, pages, || Ours::new(&cache, levels)));
        }
        let [vec, quick, ours] = times.map(median);
        println!(
            "{name}, {threads} thread(s): Vec {vec:.1} ns, quick_cache {quick:.1} ns, this cache {ours:.1} ns: \
             {:.1} times Vec, {:.2} times quick_cache",
            ours / vec,
            ours / quick,
        );
    }
}

fn main() {
    compare("hot, 64 pages", 64, 1);
    compare("uniform, 500 pages", 500, 1);
    compare("uniform, 250000 pages, two levels", 250_000, 2);
}
