//! What a full cache takes of the machine's memory: alone in its process, so that the process says it.
#![cfg(not(any(loom, miri)))]

use std::sync::atomic::{AtomicU64, Ordering};

use farlink_cache::{CacheOptions, Layout, PageCache, PageId, SizeClass, Store};

/// A store that makes pages up, and takes those that were changed, or none.
#[derive(Clone)]
struct Made {
    refuses: bool,
}

impl Store for Made {
    type Buffer = Vec<u64>;
    type Error = std::io::Error;

    fn buffer(&self, words: usize) -> std::io::Result<Vec<u64>> {
        Ok(vec![0; words])
    }

    async fn read(&self, page: PageId, class: SizeClass) -> std::io::Result<Vec<u64>> {
        Ok(vec![page.get(); class.words()])
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<std::io::Result<()>> {
        pages.iter().map(|_| if self.refuses { Err(std::io::ErrorKind::StorageFull.into()) } else { Ok(()) }).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        now(task);
    }
}

struct Flat;

impl Layout for Flat {
    fn level(&self, _page: &[AtomicU64]) -> u8 {
        0
    }

    fn links(&self, _page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }
}

fn now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    loop {
        let waker = std::task::Waker::noop();
        if let std::task::Poll::Ready(value) = future.as_mut().poll(&mut std::task::Context::from_waker(waker)) {
            return value;
        }
    }
}

/// Resident bytes of this process, and of the machine's memory what is free: both in bytes.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * 4096
}

fn available_bytes() -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").expect("Linux");
    let line = info.lines().find(|line| line.starts_with("MemAvailable:")).expect("a line of it");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<usize>().ok()).expect("a number") * 1024
}

fn fill(bytes: usize) {
    let before = resident_bytes();
    let cache = PageCache::new(Flat, CacheOptions::new(bytes)).unwrap();
    let handle = cache.handle(Made { refuses: false }, 1).unwrap();
    let pages = (bytes / 1024) as u64;
    for page in (1..=pages).chain((1..=pages).rev()) {
        let page = PageId::new(page).unwrap();
        let found = now(handle.load(page, SizeClass::of_bytes(1024).unwrap())).unwrap();
        let sum: u64 = found.read(|words| words.iter().map(|word| word.load(Ordering::Relaxed)).sum()).unwrap();
        assert_eq!(sum, page.get() * 128);
    }
    let grown = resident_bytes() - before;
    let memory = cache.memory();
    println!("{bytes} bytes: resident {grown} ({:.3}), {memory:?}", grown as f64 / bytes as f64);
    assert!(memory.used() <= memory.limit && memory.pages >= bytes / 100 * 88, "{memory:?}");
    // A small cache is rounded up to huge pages, and the process itself grows a little.
    assert!(grown <= bytes / 100 * 105 + (256 << 10), "{grown} bytes for a cache of {bytes}");
}

/// Pages of one size after those of another: what they leave goes back to the system before others take it.
fn refill(bytes: usize) {
    let before = resident_bytes();
    let cache = PageCache::new(Flat, CacheOptions::new(bytes)).unwrap();
    let handle = cache.handle(Made { refuses: false }, 1).unwrap();
    let mut next = 1;
    for class in [1024, 65536, 64, 8192, 4096].map(|bytes| SizeClass::of_bytes(bytes).unwrap()) {
        for _ in 0..bytes / class.bytes() * 3 / 2 {
            drop(now(handle.load(PageId::new(next).unwrap(), class)).unwrap());
            next += 1;
        }
        let (grown, memory) = (resident_bytes() - before, cache.memory());
        println!("{class:?} in {bytes} bytes: resident {grown}, {memory:?}");
        assert!(memory.used() <= memory.limit, "{memory:?}");
        assert!(grown <= bytes / 100 * 105 + (2 << 20), "{grown} bytes for a cache of {bytes}");
    }
}

/// Blocks that cannot change hands, for there is a page in each that the store does not take: their free frames are listed again
/// and again.
fn refuse() {
    let cache = PageCache::new(Flat, CacheOptions::new(4 << 20)).unwrap();
    let handle = cache.handle(Made { refuses: true }, 1).unwrap();
    let (small, large) = (SizeClass::of_bytes(64).unwrap(), SizeClass::of_bytes(4096).unwrap());
    let id = |page| PageId::new(page).unwrap();
    let mut pages = 0;
    while handle.counters().levels[0].evictions == 0 {
        pages += 1;
        let page = now(handle.load(id(pages), small)).unwrap();
        if pages % 64 == 1 {
            handle.update(&page, |change| change.set(0, 0, 0)).unwrap();
        }
    }
    for page in (1..=pages).filter(|page| page % 64 != 1).take(10_000) {
        now(handle.invalidate(id(page), small)).unwrap();
    }
    // There may have been memory for less than a block of small ones.
    let rest: Vec<_> = (1..).map_while(|page| now(handle.reserve(id(pages + page), large)).ok()).collect();
    let before = resident_bytes();
    for page in 1..=20 {
        let refused = now(handle.reserve(id(2 * pages + page), large)).is_err();
        assert!(refused, "there is a page in each block that stays; {} had room before", rest.len());
    }
    let grown = resident_bytes().saturating_sub(before);
    println!("{grown} bytes for lists of free frames");
    assert!(grown < 2 << 20, "{grown} bytes for lists of free frames");
}

#[test]
fn a_full_cache_takes_what_it_was_given() {
    refuse();
    refill(32 << 20);
    fill(8 << 20);
    fill(64 << 20);
    if available_bytes() > 3 << 30 {
        fill(1 << 30);
    }
}
