//! How workers reach the tree, in each of the access modes.

use std::cell::RefCell;
use std::rc::Rc;

use farlink_offload::{
    AccessMode, CacheOptions, Cached, CachedInner, ComputeCache, Counters, Cut, Engine, EngineOptions, Hybrid, Parted,
    PartedRemote, Policies, Remote, ship::Shipper,
};
use farlink_runtime::error::Error;
use farlink_runtime::messaging::ChannelOptions;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::structure::Structure;
use farlink_runtime::worker::{Task, Worker};
use farlink_structures::BTree;
use farlink_structures::btree::{self, KeyRange};

use crate::feed::{Feed, Request};
use crate::tally::{CacheCounts, Levels, Tally};
use crate::task::run_task;

/// More than any shipped operation here has: which messages are better fetched need not be measured.
const EAGER_WORDS: usize = 1024;

/// What the workers of a compute server share.
#[derive(Debug, Clone)]
pub(crate) struct Reach {
    mode: AccessMode,
    proof: Proof,
    parts: Vec<Structure>,
    cut: Cut<KeyRange>,
    cache: Option<ComputeCache<btree::Tree>>,
    owned: KeyRange,
    policies: Option<fn() -> Policies>,
}

impl Reach {
    /// A tree without a cache.
    pub(crate) fn new(mode: AccessMode, tree: Structure, proof: Proof) -> Self {
        let (parts, cut, owned) = (vec![tree], Cut::Hash, KeyRange::ALL);
        Self { mode, proof, parts, cut, cache: None, owned, policies: None }
    }

    /// A tree in parts, each on another memory server.
    pub(crate) fn of_parts(mode: AccessMode, parts: Vec<Structure>, cut: Cut<KeyRange>) -> anyhow::Result<Self> {
        let first = parts.first().ok_or_else(|| anyhow::anyhow!("a tree has parts"))?.clone();
        Ok(Self { parts, cut, ..Self::new(mode, first, Proof::Checksum) })
    }

    /// The same through a cache, empty now, which holds all pages of these keys or inner ones only.
    pub(crate) fn through(self, cache: CacheOptions, owned: KeyRange) -> Result<Self, Error> {
        Ok(Self { cache: Some(ComputeCache::<btree::Tree>::new(cache)?), owned, ..self })
    }

    /// The same, where a policy says for each miss whether the operation is shipped.
    pub(crate) fn shipping(self, policies: fn() -> Policies) -> Self {
        Self { policies: Some(policies), ..self }
    }

    /// The tree, as one worker reaches it.
    pub(crate) fn open(&self, worker: &Worker) -> anyhow::Result<Tree> {
        let tree = || self.parts[0].clone();
        let cache = || self.cache.as_ref().ok_or_else(|| anyhow::anyhow!("{} needs a cache", self.mode));
        let connect = |way: &Shipper<btree::Tree>| worker.block_on(way.connect(way.structure().root.server()));
        Ok(match (self.mode, self.policies) {
            (AccessMode::OneSided, _) => Tree::OneSided(BTree::over(OneSided::new(worker, tree(), self.proof))),
            (AccessMode::Cached, None) => Tree::Cached(BTree::over(cache()?.own(worker, tree(), self.owned)?)),
            (AccessMode::Cached, Some(policies)) => {
                let options = ChannelOptions { eager_words: Some(EAGER_WORDS), ..ChannelOptions::default() };
                drop(worker.block_on(worker.channel_with(tree().root.server(), options))?);
                let cached = cache()?.own(worker, tree(), self.owned)?;
                Tree::Engine(BTree::over(Engine::new(cached, policies(), EngineOptions::default())?))
            }
            (AccessMode::CachedInner, _) => {
                Tree::CachedInner(BTree::over(cache()?.share(worker, tree(), self.proof)?))
            }
            (AccessMode::Coarse, _) => {
                let parts: Vec<_> = self.parts.iter().map(|part| Remote::new(worker, part.clone())).collect();
                parts.iter().try_for_each(|part| connect(part.shipper()))?;
                Tree::Coarse(BTree::over(Parted::new(parts, self.cut.clone())?))
            }
            (AccessMode::Hybrid, _) => {
                let parts: Vec<_> =
                    self.parts.iter().map(|part| Hybrid::new(worker, part.clone(), self.proof)).collect();
                parts.iter().try_for_each(|part| connect(part.shipper()))?;
                Tree::Hybrid(BTree::over(Parted::new(parts, self.cut.clone())?))
            }
        })
    }
}

/// A tree, as one worker reaches it.
#[derive(Debug)]
pub(crate) enum Tree {
    OneSided(BTree<OneSided<btree::Tree>>),
    Cached(BTree<Cached<btree::Tree>>),
    CachedInner(BTree<CachedInner<btree::Tree>>),
    Engine(BTree<Engine<btree::Tree>>),
    Coarse(BTree<PartedRemote<btree::Tree>>),
    Hybrid(BTree<Parted<Hybrid<btree::Tree>>>),
}

impl Tree {
    /// Starts a task that runs operations from `feed` until it ends.
    pub(crate) fn spawn<I: Iterator<Item = Request> + 'static>(
        &self,
        worker: &Worker,
        feed: &Rc<Feed<I>>,
        tally: &Rc<RefCell<Tally>>,
    ) -> Task<Result<(), Error>> {
        let (feed, tally) = (Rc::clone(feed), Rc::clone(tally));
        macro_rules! spawn {
            ($tree:expr) => {{
                let tree = $tree.clone();
                worker.spawn(async move { run_task(&tree, &feed, &tally).await })
            }};
        }
        match self {
            Self::OneSided(tree) => spawn!(tree),
            Self::Cached(tree) => spawn!(tree),
            Self::CachedInner(tree) => spawn!(tree),
            Self::Engine(tree) => spawn!(tree),
            Self::Coarse(tree) => spawn!(tree),
            Self::Hybrid(tree) => spawn!(tree),
        }
    }

    /// Loads entries in the order of their keys into the empty tree.
    pub(crate) async fn bulk_load(
        &self,
        entries: impl IntoIterator<Item = (u64, u64)>,
        fill: f64,
    ) -> anyhow::Result<u64> {
        Ok(match self {
            Self::OneSided(tree) => tree.bulk_load(entries, fill).await?,
            Self::Cached(tree) => tree.bulk_load(entries, fill).await?,
            Self::CachedInner(tree) => tree.bulk_load(entries, fill).await?,
            Self::Engine(_) | Self::Coarse(_) | Self::Hybrid(_) => {
                anyhow::bail!("a tree is loaded by who reaches its pages")
            }
        })
    }

    /// What the cache did so far for this worker, which has read remotely so often.
    pub(crate) fn cache_counts(&self, reads: u64) -> CacheCounts {
        match self {
            Self::OneSided(_) | Self::Coarse(_) | Self::Hybrid(_) => CacheCounts::default(),
            Self::Cached(tree) => counts(&tree.access().counters()),
            Self::CachedInner(tree) => above_leaves(counts(&tree.access().counters()), reads),
            Self::Engine(tree) => {
                let engine = tree.access().counts();
                CacheCounts {
                    shipped: engine.shipped,
                    came_back: engine.came_back,
                    contrary: engine.contrary,
                    ..counts(&tree.access().cached().counters())
                }
            }
        }
    }

    /// Makes all that the compute server has changed visible to others.
    pub(crate) async fn flush(&self) -> Result<(), Error> {
        match self {
            Self::Cached(tree) => tree.access().flush().await,
            Self::Engine(tree) => tree.access().cached().flush().await,
            _ => Ok(()),
        }
    }
}

fn counts(counters: &Counters) -> CacheCounts {
    let total = counters.total();
    CacheCounts {
        // Who waits for a read that another operation has begun costs no read of its own.
        lookups: total.hits + total.misses + total.shared_fetches,
        misses: Levels(counters.levels.map(|level| level.misses)),
        write_backs: total.write_backs,
        ..CacheCounts::default()
    }
}

/// Counts where leaves are read past the cache: each such read is a leaf's miss.
fn above_leaves(mut counts: CacheCounts, reads: u64) -> CacheCounts {
    let past = reads.saturating_sub(counts.misses.total());
    counts.lookups += past;
    counts.misses.0[0] += past;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_fetch_is_no_miss_and_a_read_past_the_cache_is_one() {
        let mut counters = Counters::default();
        (counters.levels[1].hits, counters.levels[1].misses, counters.levels[1].shared_fetches) = (85, 10, 5);
        (counters.levels[2].hits, counters.levels[2].write_backs) = (100, 4);
        let counted = counts(&counters);
        assert_eq!((counted.lookups, counted.misses.0[..3].to_vec(), counted.write_backs), (200, vec![0, 10, 0], 4));
        let counted = above_leaves(counted, 110);
        assert_eq!((counted.lookups, counted.misses.0[..3].to_vec()), (300, vec![100, 10, 0]));
    }
}
