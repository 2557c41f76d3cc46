//! The cache over a plain file: a tree of 1 KiB pages, three levels, seven times as large as the cache.
//!
//! `cargo run --release -p farlink-cache --example file_store`
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker};
use std::{error::Error, fs::File, io, os::unix::fs::FileExt as _, pin::pin, rc::Rc};

use farlink_cache::{Anchor, CacheError, CacheHandle, CacheOptions, Layout, PageCache, PageId, SizeClass, Store};

const CLASS: SizeClass = SizeClass::of_bytes(1024).unwrap();
/// Slots of a page: links in inner pages, values in leaves. Word 0 is the level.
const FAN: u64 = 120;
const LEVELS: u32 = 3;
const KEYS: u64 = FAN.pow(LEVELS);

/// Page `n` is at byte `1024 * n`.
#[derive(Clone)]
struct FileStore(Rc<File>);

impl Store for FileStore {
    type Buffer = Vec<u64>;
    type Error = io::Error;

    fn buffer(&self, words: usize) -> io::Result<Vec<u64>> {
        Ok(vec![0; words])
    }

    async fn read(&self, page: PageId, class: SizeClass) -> io::Result<Vec<u64>> {
        let mut bytes = vec![0; class.bytes()];
        self.0.read_exact_at(&mut bytes, page.get() * CLASS.bytes() as u64)?;
        Ok(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect())
    }

    async fn write(&self, pages: Vec<(PageId, Vec<u64>)>) -> Vec<io::Result<()>> {
        let bytes = |words: Vec<u64>| words.into_iter().flat_map(u64::to_le_bytes).collect::<Vec<u8>>();
        let at = |page: PageId| page.get() * CLASS.bytes() as u64;
        pages.into_iter().map(|(page, words)| self.0.write_all_at(&bytes(words), at(page))).collect()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        block_on(task); // Files answer at once: a write-back may as well end before this returns.
    }
}

struct TreeLayout;

impl Layout for TreeLayout {
    fn level(&self, page: &[AtomicU64]) -> u8 {
        page[0].load(Relaxed) as u8
    }

    fn links(&self, page: &[AtomicU64]) -> impl Iterator<Item = usize> {
        1..if self.level(page) == 0 { 1 } else { FAN as usize + 1 }
    }
}

/// Runs a future that is never pending for long: one that yields is polled again.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return value;
        }
    }
}

/// Writes the tree: pages are numbered level by level, the root is page 1, and key `k` has value `k`.
fn create(file: &File) -> io::Result<()> {
    let store = FileStore(Rc::new(file.try_clone()?));
    let (mut first, mut count) = (1, 1);
    for level in (0..LEVELS).rev() {
        for number in 0..count {
            let slot = |at| if level == 0 { number * FAN + at } else { first + count + number * FAN + at };
            let mut words: Vec<u64> = std::iter::once(u64::from(level)).chain((0..FAN).map(slot)).collect();
            words.resize(CLASS.words(), 0);
            let page = PageId::new(first + number).expect("pages are numbered from 1");
            block_on(store.write(vec![(page, words)])).into_iter().collect::<io::Result<()>>()?;
        }
        (first, count) = (first + count, count * FAN);
    }
    Ok(())
}

struct Tree {
    handle: CacheHandle<FileStore, TreeLayout>,
    root: Anchor<TreeLayout>,
}

impl Tree {
    fn open(file: File) -> Result<Self, Box<dyn Error>> {
        let cache = PageCache::new(TreeLayout, CacheOptions::new(2 << 20))?;
        let handle = cache.handle(FileStore(Rc::new(file)), cache.any_seed())?;
        let root = block_on(handle.anchor(PageId::new(1).expect("not 0"), CLASS))?;
        Ok(Self { handle, root })
    }

    /// A key's value; `new` takes its place.
    async fn access(&self, key: u64, new: Option<u64>) -> Result<u64, CacheError<io::Error>> {
        loop {
            match self.try_access(key, new).await {
                Err(CacheError::Conflict(_)) => continue, // A page changed under way: from the root again.
                result => return result,
            }
        }
    }

    async fn try_access(&self, key: u64, new: Option<u64>) -> Result<u64, CacheError<io::Error>> {
        let mut page = self.handle.enter(&self.root)?;
        loop {
            let slot = 1 + (key / FAN.pow(u32::from(page.level())) % FAN) as usize;
            let word = page.read(|words| words[slot].load(Relaxed))?;
            if page.level() != 0 {
                page = self.handle.follow(&page, word, CLASS).await?;
                continue;
            }
            if let Some(new) = new {
                self.handle.change(&[&page], Vec::new(), |change| change.set(0, slot, new))?;
            }
            return Ok(word);
        }
    }
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let file = tempfile::tempfile()?;
    create(&file)?;
    let tree = Tree::open(file.try_clone()?)?;
    // Most accesses go to few keys; every fifth is an update.
    let key = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) % (KEYS >> (at % 4 * 4));
    let mut model: Vec<u64> = (0..KEYS).collect();
    for at in 0..400_000 {
        let new = (at % 5 == 4).then_some(at << 32);
        let old = block_on(tree.access(key(at), new))?;
        assert_eq!(old, std::mem::replace(&mut model[key(at) as usize], new.unwrap_or(old)));
    }
    block_on(tree.handle.flush())?;
    for (level, counters) in tree.handle.counters().levels.iter().enumerate().take(LEVELS as usize) {
        println!("level {level}: {} hits, {} misses, {} written", counters.hits, counters.misses, counters.write_backs);
    }
    drop(tree);
    let tree = Tree::open(file)?;
    for (key, &value) in model.iter().enumerate() {
        assert_eq!(block_on(tree.access(key as u64, None))?, value);
    }
    println!("read again from the file: {KEYS} values, all as they were left");
    Ok(())
}
