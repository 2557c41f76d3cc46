//! Those who are compared, all behind one trait.
//!
//! To add one, implement [`SystemUnderTest`] (over a farlink access: [`look_up`] does the work) and add a line to [`ALL`].

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use anyhow::Context as _;
use farlink_children::huge_pages::OwnMemory;
use farlink_offload::{CacheOptions, Cached, ComputeCache};
use farlink_runtime::{access::Access, error::Error, structure::Structure, worker::Worker};
use farlink_structures::btree::{BTree, KeyRange, Tree};

use crate::{
    hand::Hand,
    keys::value_of,
    peers::{Bf, Concurrent, Congee, Peer, Reader, Scc, Std},
    tree::{LocalPages, LocalTree, PAGE_BYTES},
};

/// Lookups between two glances at the stop sign.
const BATCH: usize = 512;

/// What a thread is to do.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// What to look up, in this order, again and again.
    pub(crate) keys: Arc<[u64]>,
    /// Lookups under way at a time.
    pub(crate) in_flight: usize,
    /// When to stop.
    pub(crate) stop: Arc<AtomicBool>,
}

impl Job {
    fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Does the job with a plain function that looks up a batch.
    fn in_batches(&self, mut batch: impl FnMut(&[u64]) -> anyhow::Result<()>) -> anyhow::Result<u64> {
        let mut ops = 0;
        loop {
            for keys in self.keys.chunks(BATCH) {
                batch(keys)?;
                ops += keys.len() as u64;
                if self.is_over() {
                    return Ok(ops);
                }
            }
        }
    }
}

/// Someone who looks keys up.
pub(crate) trait SystemUnderTest: Send + Sync {
    /// The name in the results.
    fn name(&self) -> &'static str;

    /// Whether it can keep several lookups of one thread in flight.
    fn interleaves(&self) -> bool {
        false
    }

    /// Looks keys up on the calling thread until it is told to stop; returns how many.
    ///
    /// # Errors
    /// If an answer is wrong.
    fn run(&self, job: &Job) -> anyhow::Result<u64>;
}

/// What systems are made from.
#[derive(Debug)]
pub(crate) struct World {
    keys: Vec<u64>,
    tree: Option<Arc<LocalTree>>,
    /// Before the system that is being built.
    memory: OwnMemory,
}

impl World {
    /// The world of these keys, which are in ascending order.
    pub(crate) fn new(keys: Vec<u64>) -> Self {
        Self { keys, tree: None, memory: OwnMemory::now() }
    }

    /// What memory comes from here on is the next system's.
    pub(crate) fn count_memory(&mut self) {
        self.memory = OwnMemory::now();
    }

    /// The share of its memory that is in huge pages.
    pub(crate) fn huge_share(&self) -> Option<f64> {
        OwnMemory::now().huge_share_since(self.memory)
    }

    fn entries(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.keys.iter().map(|&key| (key, value_of(key)))
    }

    /// The tree that farlink's systems share.
    fn tree(&mut self) -> anyhow::Result<Arc<LocalTree>> {
        if let Some(tree) = &self.tree {
            return Ok(Arc::clone(tree));
        }
        let tree = Arc::new(LocalTree::build(self.entries(), self.keys.len()).context("building farlink's tree")?);
        self.tree = Some(Arc::clone(&tree));
        // Its cluster's is nobody's: no lookup reads it.
        self.count_memory();
        Ok(tree)
    }
}

/// Builds a system.
pub(crate) type Build = fn(&mut World) -> anyhow::Result<Box<dyn SystemUnderTest>>;

/// All systems, by name.
pub(crate) const ALL: &[(&str, Build)] = &[
    ("hand", |world| Ok(Box::new(ByHand::of(world.tree()?)?))),
    ("cached", |world| Ok(Box::new(ByCache::warmed_up(world.tree()?, &world.keys)?))),
    (Congee::NAME, peer::<Congee>),
    (Scc::NAME, peer::<Scc>),
    (Concurrent::NAME, peer::<Concurrent>),
    (Bf::NAME, peer::<Bf>),
    (Std::NAME, peer::<Std>),
];

#[cold]
fn wrong(key: u64, value: Option<u64>) -> anyhow::Error {
    anyhow::anyhow!("wrong answer: key {key} has value {}, got {value:?}", value_of(key))
}

/// Does a job over a farlink tree: with one lookup in flight on the worker's own future, with more as that many tasks, each
/// with a part of the keys.
///
/// # Errors
/// If an answer is wrong, or a lookup fails.
pub(crate) fn look_up<A: Access<Plugin = Tree> + Clone + 'static>(
    worker: &Worker,
    tree: &BTree<A>,
    job: &Job,
) -> anyhow::Result<u64> {
    let parts = job.in_flight.clamp(1, job.keys.len());
    let part_len = job.keys.len() / parts;
    if parts == 1 {
        return worker.block_on(look_up_part(tree, job, 0, part_len));
    }
    let tasks: Vec<_> = (0..parts)
        .map(|part| {
            let (tree, job) = (tree.clone(), job.clone());
            worker.spawn(async move { look_up_part(&tree, &job, part * part_len, part_len).await })
        })
        .collect();
    worker.block_on(async {
        let mut ops = 0;
        for task in tasks {
            ops += task.await?;
        }
        Ok(ops)
    })
}

async fn look_up_part<A: Access<Plugin = Tree>>(
    tree: &BTree<A>,
    job: &Job,
    first: usize,
    len: usize,
) -> anyhow::Result<u64> {
    let mut ops = 0;
    loop {
        for keys in job.keys[first..first + len].chunks(BATCH) {
            for &key in keys {
                let value = tree.get(key).await?;
                if value != Some(value_of(key)) {
                    return Err(wrong(key, value));
                }
            }
            ops += keys.len() as u64;
            if job.is_over() {
                return Ok(ops);
            }
        }
    }
}

/// The hand-written lookup over the tree's pages.
struct ByHand {
    structure: Structure,
    pages: LocalPages,
}

impl ByHand {
    fn of(tree: Arc<LocalTree>) -> anyhow::Result<Self> {
        Ok(Self { structure: tree.structure.clone(), pages: tree.pages()? })
    }
}

impl SystemUnderTest for ByHand {
    fn name(&self) -> &'static str {
        "hand"
    }

    fn run(&self, job: &Job) -> anyhow::Result<u64> {
        let hand = Hand::new(&self.structure, &self.pages);
        job.in_batches(|keys| {
            for &key in keys {
                let value = hand.get(key);
                if value != Some(value_of(key)) {
                    return Err(wrong(key, value));
                }
            }
            Ok(())
        })
    }
}

/// Bytes of a cache for each page of the tree: frame, table and sketch, and some slack, so that nothing is ever evicted.
const CACHE_BYTES_PER_PAGE: usize = PAGE_BYTES + 160;
/// The least entries of a page: one lookup in so many keys touches every leaf.
const ENTRIES_MIN: usize = 27;

/// The tree's own code through farlink's cache, which holds all pages.
struct ByCache {
    tree: Arc<LocalTree>,
    cache: ComputeCache<Tree>,
}

impl ByCache {
    fn warmed_up(tree: Arc<LocalTree>, keys: &[u64]) -> anyhow::Result<Self> {
        let bytes = (keys.len() / ENTRIES_MIN / 2 * CACHE_BYTES_PER_PAGE * 11 / 10).max(1 << 20);
        let cache = ComputeCache::<Tree>::new(CacheOptions::new(bytes))?;
        let by_cache = Self { tree, cache };
        let worker = by_cache.tree.compute.worker()?;
        let tree = by_cache.open(&worker)?;
        worker.block_on(async {
            for &key in keys.iter().step_by(ENTRIES_MIN) {
                tree.get(key).await?;
            }
            Ok::<_, Error>(())
        })?;
        let evicted = tree.access().counters().total().evictions;
        anyhow::ensure!(evicted == 0, "the cache is too small by {evicted} pages");
        drop(tree);
        drop(worker);
        Ok(by_cache)
    }

    fn open(&self, worker: &Worker) -> anyhow::Result<BTree<Cached<Tree>>> {
        let owned = self.cache.own(worker, self.tree.structure.clone(), KeyRange::ALL);
        Ok(BTree::over(worker.block_on(owned)?))
    }
}

impl SystemUnderTest for ByCache {
    fn name(&self) -> &'static str {
        "cached"
    }

    fn interleaves(&self) -> bool {
        true
    }

    fn run(&self, job: &Job) -> anyhow::Result<u64> {
        let worker = self.tree.compute.worker()?;
        let tree = self.open(&worker)?;
        look_up(&worker, &tree, job)
    }
}

/// Another index.
struct ByPeer<P>(P);

fn peer<P: Peer + Send + 'static>(world: &mut World) -> anyhow::Result<Box<dyn SystemUnderTest>> {
    let peer = P::build(&mut world.entries()).with_context(|| format!("building {}", P::NAME))?;
    Ok(Box::new(ByPeer(peer)))
}

impl<P: Peer + Send> SystemUnderTest for ByPeer<P> {
    fn name(&self) -> &'static str {
        P::NAME
    }

    fn run(&self, job: &Job) -> anyhow::Result<u64> {
        let reader = self.0.reader();
        job.in_batches(|keys| {
            let mut failed = None;
            reader.get_each(keys, |key, value| {
                if value != Some(value_of(key)) {
                    failed = Some(wrong(key, value));
                }
            });
            failed.map_or(Ok(()), Err)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        keys::{Distribution, draw, sorted},
        race::measure,
    };

    #[test]
    fn every_system_answers_rightly() {
        let mut world = World::new(sorted(10_000));
        let keys: Vec<_> = (0..2).map(|seed| draw(Distribution::Uniform, 10_000, 20_000, seed).unwrap()).collect();
        for (name, build) in ALL {
            let system = build(&mut world).unwrap();
            assert_eq!(system.name(), *name);
            for in_flight in if system.interleaves() { vec![1, 3, 8] } else { vec![1] } {
                let ran = measure(&*system, &keys, in_flight, Duration::from_millis(20)).unwrap();
                assert!(ran.ops >= 2 * BATCH as u64, "{name}");
            }
        }
    }

    #[test]
    fn a_wrong_answer_is_an_error() {
        let mut world = World::new(sorted(1000));
        let keys = vec![Arc::from(vec![2u64; 10])];
        for (name, build) in ALL {
            let system = build(&mut world).unwrap();
            for in_flight in if system.interleaves() { vec![1, 2] } else { vec![1] } {
                let ran = measure(&*system, &keys, in_flight, Duration::from_secs(5));
                assert!(ran.unwrap_err().to_string().contains("wrong answer"), "{name}");
            }
        }
    }
}
