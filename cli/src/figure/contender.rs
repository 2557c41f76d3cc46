//! What is measured: a contender is a way to reach the tree's pages. A new one is a type here and a line in `table2.rs`.

use farlink_offload::{Admission, CacheOptions, Cached, CachedInner, ComputeCache, Counters};
use farlink_runtime::access::Access;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::structure::Structure;
use farlink_runtime::worker::Worker;
use farlink_structures::BTree;
use farlink_structures::btree::{BTreeLayout, KeyRange};

use super::args::AdmissionChoice;
use super::rows::CacheSize;

/// The keys that a compute server owns, as a cache is told: from `low` up to, not including, `high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owned {
    /// 0 for the first compute server.
    pub(crate) low: u64,
    /// `None` for the last compute server.
    pub(crate) high: Option<u64>,
}

/// What a cache was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Lookups {
    /// Page accesses of operations.
    pub(crate) all: u64,
    /// Those that read their page from remote memory, for each level, leaves first.
    pub(crate) misses_by_level: Vec<u64>,
    /// Pages written because they left the cache.
    pub(crate) write_backs: u64,
}

impl Lookups {
    /// What was asked for since `earlier`.
    pub(crate) fn since(mut self, earlier: &Self) -> Self {
        self.all -= earlier.all;
        self.write_backs -= earlier.write_backs;
        self.misses_by_level.iter_mut().zip(&earlier.misses_by_level).for_each(|(now, then)| *now -= then);
        self
    }

    /// Adds another compute server's.
    pub(crate) fn add(&mut self, other: &Self) {
        self.all += other.all;
        self.write_backs += other.write_backs;
        let levels = self.misses_by_level.len().max(other.misses_by_level.len());
        self.misses_by_level.resize(levels, 0);
        self.misses_by_level.iter_mut().zip(&other.misses_by_level).for_each(|(sum, misses)| *sum += misses);
    }
}

/// A way to reach the tree.
pub(crate) trait Contender: Sync {
    /// How its pages are reached.
    type Access: Access + Clone + 'static;
    /// What the workers of one compute server share: its cache.
    type Shared: Sync + Send;

    /// What the row is called.
    fn name(&self) -> String;

    /// The row's `access`.
    fn access(&self) -> &'static str;

    /// The size of each compute server's cache, if it has one; it is warmed up then.
    fn cache(&self) -> Option<CacheSize> {
        None
    }

    /// The row's `admission`.
    fn admission(&self) -> Option<String> {
        None
    }

    /// Makes what the workers of a compute server share.
    fn share(&self, owned: Owned) -> anyhow::Result<Self::Shared>;

    /// Opens the tree for one worker.
    fn open(&self, shared: &Self::Shared, worker: &Worker, tree: &Structure) -> anyhow::Result<BTree<Self::Access>>;

    /// What the cache was asked for so far through this handle, and past it with `reads` remote reads in all; `None` without
    /// a cache.
    fn lookups(&self, _tree: &BTree<Self::Access>, _reads: u64) -> Option<Lookups> {
        None
    }

    /// The end of a run, not measured: what a cache still holds goes back to remote memory.
    async fn close(&self, _tree: &BTree<Self::Access>) -> anyhow::Result<()> {
        Ok(())
    }
}

/// No cache: every level is a READ. With pages placed in turn on all memory servers this is the fine-grained design.
#[derive(Debug)]
pub(crate) struct FineGrained;

impl Contender for FineGrained {
    type Access = OneSided;
    type Shared = ();

    fn name(&self) -> String {
        "farlink FG".to_owned()
    }

    fn access(&self) -> &'static str {
        "one-sided"
    }

    fn share(&self, _owned: Owned) -> anyhow::Result<()> {
        Ok(())
    }

    fn open(&self, (): &(), worker: &Worker, tree: &Structure) -> anyhow::Result<BTree<OneSided>> {
        Ok(BTree::over(OneSided::new(worker, tree.clone(), Proof::Checksum)))
    }
}

/// What a cached contender is made with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheSetting {
    pub(crate) size: CacheSize,
    pub(crate) admission: AdmissionChoice,
}

impl CacheSetting {
    fn cache(&self) -> anyhow::Result<ComputeCache<BTreeLayout>> {
        let bytes = usize::try_from(self.size.cache_bytes)?;
        let mut options = match self.admission {
            // With all that belongs to it: a random victim.
            AdmissionChoice::Probability => CacheOptions::dex(bytes),
            AdmissionChoice::Always | AdmissionChoice::Frequency => CacheOptions::new(bytes),
        };
        if self.admission == AdmissionChoice::Always {
            options.admission = Admission::Always;
            options.sample_size = 1;
        }
        options.handles_max = 4;
        Ok(ComputeCache::new(BTreeLayout, options)?)
    }
}

fn lookups(counters: &Counters) -> Lookups {
    let total = counters.total();
    Lookups {
        // Who waits for a read that another operation has begun costs no read of its own.
        all: total.hits + total.misses + total.shared_fetches,
        misses_by_level: counters.levels.iter().map(|level| level.misses).collect(),
        write_backs: total.write_backs,
    }
}

/// [`lookups`] where leaves are read past the cache: every such read is a leaf's miss.
fn lookups_above_leaves(counters: &Counters, reads: u64) -> Lookups {
    let mut lookups = lookups(counters);
    let past = reads.saturating_sub(lookups.misses_by_level.iter().sum());
    lookups.all += past;
    lookups.misses_by_level[0] += past;
    lookups
}

/// Each compute server owns its keys and caches all levels.
#[derive(Debug)]
pub(crate) struct Owning(pub(crate) CacheSetting);

impl Contender for Owning {
    type Access = Cached<BTreeLayout>;
    type Shared = (ComputeCache<BTreeLayout>, Owned);

    fn name(&self) -> String {
        "farlink, owned ranges".to_owned()
    }

    fn access(&self) -> &'static str {
        "cached"
    }

    fn cache(&self) -> Option<CacheSize> {
        Some(self.0.size)
    }

    fn admission(&self) -> Option<String> {
        Some(self.0.admission.name().to_owned())
    }

    fn share(&self, owned: Owned) -> anyhow::Result<Self::Shared> {
        Ok((self.0.cache()?, owned))
    }

    fn open(&self, shared: &Self::Shared, worker: &Worker, tree: &Structure) -> anyhow::Result<BTree<Self::Access>> {
        let (cache, owned) = shared;
        let range = KeyRange { low: owned.low, high: owned.high };
        Ok(BTree::over(cache.own(worker, tree.clone(), range)?))
    }

    fn lookups(&self, tree: &BTree<Self::Access>, _reads: u64) -> Option<Lookups> {
        Some(lookups(&tree.access().counters()))
    }

    async fn close(&self, tree: &BTree<Self::Access>) -> anyhow::Result<()> {
        Ok(tree.access().flush().await?)
    }
}

/// Every compute server may change everything, and caches inner pages only.
#[derive(Debug)]
pub(crate) struct Sharing(pub(crate) CacheSetting);

impl Contender for Sharing {
    type Access = CachedInner<BTreeLayout>;
    type Shared = ComputeCache<BTreeLayout>;

    fn name(&self) -> String {
        "farlink, shared-everything".to_owned()
    }

    fn access(&self) -> &'static str {
        "cached-inner"
    }

    fn cache(&self) -> Option<CacheSize> {
        Some(self.0.size)
    }

    fn admission(&self) -> Option<String> {
        Some(self.0.admission.name().to_owned())
    }

    fn share(&self, _owned: Owned) -> anyhow::Result<Self::Shared> {
        self.0.cache()
    }

    fn open(&self, shared: &Self::Shared, worker: &Worker, tree: &Structure) -> anyhow::Result<BTree<Self::Access>> {
        Ok(BTree::over(shared.share(worker, tree.clone(), Proof::Checksum)?))
    }

    fn lookups(&self, tree: &BTree<Self::Access>, reads: u64) -> Option<Lookups> {
        Some(lookups_above_leaves(&tree.access().counters(), reads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_add_up_by_level() {
        let lookups = |all, misses: &[u64]| Lookups { all, misses_by_level: misses.to_vec(), write_backs: all };
        assert_eq!(lookups(10, &[5, 2]).since(&lookups(4, &[1])), lookups(6, &[4, 2]));
        let mut sum = Lookups::default();
        sum.add(&lookups(10, &[5, 2]));
        sum.add(&lookups(1, &[1]));
        assert_eq!(sum, lookups(11, &[6, 2]));
    }

    #[test]
    fn reads_past_the_cache_are_leaf_misses() {
        let mut counters = Counters::default();
        (counters.levels[1].hits, counters.levels[1].misses, counters.levels[2].hits) = (90, 10, 100);
        let lookups = lookups_above_leaves(&counters, 110);
        assert_eq!((lookups.all, &lookups.misses_by_level[..3]), (300, &[100, 10, 0][..]));
    }
}
