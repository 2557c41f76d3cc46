//! What the tests share: an executor, a store, and a tree on the cache.
#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    missing_docs,
    missing_debug_implementations,
    reason = "no test uses all of it"
)]

pub mod executor;
pub mod page;
pub mod store;
pub mod tree;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, atomic::AtomicU64},
};

use farlink_cache::{Admission, CacheOptions, PageCache, SizeClass};

pub use executor::{Executor, Fleet, Random, lock, pause};
pub use page::{Image, TreeLayout};
pub use store::{MapStore, Refused, World};
pub use tree::{Error, Handle, ROOT, Tree};

/// The size of a test; Miri takes a thousand times as long for everything.
pub const fn under_miri(usual: u64, miri: u64) -> u64 {
    if cfg!(miri) { miri } else { usual }
}

#[cfg(miri)]
pub const ADMISSIONS: [Admission; 2] = [Admission::Always, Admission::Probability { leaf: 0.1, inner: 1.0 }];
#[cfg(not(miri))]
pub const ADMISSIONS: [Admission; 5] = [
    Admission::Always,
    Admission::Probability { leaf: 0.1, inner: 1.0 },
    Admission::Probability { leaf: 0.0, inner: 0.5 },
    // Hardly ever once it is full. Never is another matter: then nothing is kept at all.
    Admission::Probability { leaf: 1e-9, inner: 1e-9 },
    Admission::Frequency,
];

/// The seed of a run, printed: `SEED=n cargo test` repeats it.
pub fn seed(default: u64) -> u64 {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(default);
    println!("SEED={seed}");
    seed
}

pub fn class(bytes: usize) -> SizeClass {
    SizeClass::of_bytes(bytes).expect("a size that pages have")
}

/// The least cache there can be: with pages of 256 bytes some 180 of them.
pub fn small(page_bytes: usize, admission: Admission) -> CacheOptions {
    let mut options = CacheOptions::new(64 << 10);
    options.page_bytes = page_bytes;
    options.admission = admission;
    options.handles_max = 8;
    options.halving_period = 20;
    options
}

/// A world that holds a tree of the keys `0..keys * step`, bulk-loaded, and the id of its next page.
pub fn planted(keys: impl Iterator<Item = (u64, u64)>, class: SizeClass) -> (Arc<Mutex<World>>, Arc<AtomicU64>) {
    let words = class.words();
    let per_page = page::capacity(words) * 2 / 3;
    let mut world = World::default();
    let mut next_id = ROOT + 1;
    let mut level = 0;
    let mut entries: Vec<(u64, u64)> = keys.collect();
    while entries.len() > per_page {
        let chunks: Vec<&[(u64, u64)]> = entries.chunks(per_page).collect();
        let low = |at: usize| if at == 0 { 0 } else { chunks[at][0].0 };
        let mut above = Vec::new();
        for (at, chunk) in chunks.iter().enumerate() {
            let high = if at + 1 == chunks.len() { u64::MAX } else { low(at + 1) };
            world.pages.insert(next_id, page::image(next_id, level, low(at), high, chunk, words));
            above.push((low(at), next_id));
            next_id += 1;
        }
        entries = above;
        level += 1;
    }
    world.pages.insert(ROOT, page::image(ROOT, level, 0, u64::MAX, &entries, words));
    (Arc::new(Mutex::new(world)), Arc::new(AtomicU64::new(next_id)))
}

/// All entries of the tree that the store holds, which is checked from top to bottom.
pub fn harvest(world: &World) -> BTreeMap<u64, u64> {
    fn visit(world: &World, id: u64, fences: (u64, u64), level: Option<u8>, all: &mut BTreeMap<u64, u64>) {
        let image = world.pages.get(&id).unwrap_or_else(|| panic!("page {id} is not in the store"));
        assert_eq!((image[page::LOW], image[page::HIGH], image[page::ID]), (fences.0, fences.1, id));
        let image = Image(image);
        assert!(level.is_none_or(|level| level == image.level()), "page {id} is at level {}", image.level());
        let entries: Vec<(u64, u64)> = image.entries().collect();
        for (at, &(key, value)) in entries.iter().enumerate() {
            assert!(fences.0 <= key && key < fences.1, "page {id}: key {key} is beyond its fences");
            if image.level() == 0 {
                assert_eq!(all.insert(key, value), None, "key {key} is there twice");
            } else {
                let high = entries.get(at + 1).map_or(fences.1, |next| next.0);
                visit(world, value, (key, high), Some(image.level() - 1), all);
            }
        }
    }
    let mut all = BTreeMap::new();
    visit(world, ROOT, (0, u64::MAX), None, &mut all);
    all
}

/// A tree for a test with one thread.
pub struct TestBed {
    pub executor: Executor,
    pub store: MapStore,
    pub cache: Arc<PageCache<TreeLayout>>,
    pub tree: Tree,
}

impl TestBed {
    pub fn new(keys: impl Iterator<Item = (u64, u64)>, class: SizeClass, options: CacheOptions, seed: u64) -> Self {
        let (world, next_id) = planted(keys, class);
        let executor = Executor::alone(seed);
        let store = MapStore::new(&world, &executor);
        let cache = PageCache::new(TreeLayout, options).expect("options that work");
        let handle = cache.handle(store.clone(), seed).expect("the first handle");
        let tree = executor.block_on(Tree::open(handle, class, next_id)).expect("a root");
        Self { executor, store, cache, tree }
    }

    /// Runs a future that uses the tree, and all tasks, to their end.
    pub fn run<T: 'static, F: Future<Output = T> + 'static>(&self, f: impl FnOnce(Tree) -> F) -> T {
        self.executor.block_on(f(self.tree.clone()))
    }

    /// Flushes, and tells what the store's tree holds then.
    pub fn flushed(&self) -> BTreeMap<u64, u64> {
        self.run(|tree| async move { tree.handle.flush().await }).expect("a store that takes pages");
        harvest(&self.store.world())
    }
}
