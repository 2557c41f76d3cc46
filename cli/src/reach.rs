//! How the workers of a bench reach the tree: one-sided, or through a cache that the workers of a process share.

use farlink_offload::{CacheOptions, Cached, CachedInner, ComputeCache, Counters};
use farlink_runtime::access::Access;
use farlink_runtime::error::Error;
use farlink_runtime::one_sided::OneSided;
use farlink_structures::btree::BTreeLayout;

use crate::plan::{AccessKind, Plan};
use crate::tally::CacheCounts;

/// What the workers of a process share.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    OneSided,
    Cached(ComputeCache<BTreeLayout>),
    CachedInner(ComputeCache<BTreeLayout>),
}

impl Way {
    /// The plan's, with a cache that is empty.
    pub(crate) fn new(plan: &Plan) -> anyhow::Result<Self> {
        let cache = || -> anyhow::Result<_> {
            let bytes = usize::try_from(plan.cache_bytes.unwrap_or_default())?;
            let mut options = CacheOptions::new(bytes);
            options.page_bytes = plan.page_bytes as usize;
            options.handles_max = plan.workers as usize;
            Ok(ComputeCache::new(BTreeLayout, options)?)
        };
        Ok(match plan.access {
            AccessKind::OneSided => Self::OneSided,
            AccessKind::Cached => Self::Cached(cache()?),
            AccessKind::CachedInner => Self::CachedInner(cache()?),
        })
    }
}

/// An access as a bench sees it.
pub(crate) trait Reach: Access + Clone + 'static {
    /// What the cache did so far for this worker, which has read remotely so often.
    fn cache_counts(&self, _reads: u64) -> CacheCounts {
        CacheCounts::default()
    }

    /// Makes all that this process has changed visible to others.
    async fn flush(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl Reach for OneSided {}

impl Reach for Cached<BTreeLayout> {
    fn cache_counts(&self, _reads: u64) -> CacheCounts {
        counts(&self.counters())
    }

    async fn flush(&self) -> Result<(), Error> {
        Self::flush(self).await
    }
}

impl Reach for CachedInner<BTreeLayout> {
    fn cache_counts(&self, reads: u64) -> CacheCounts {
        let mut counts = counts(&self.counters());
        // Leaves are read past the cache: each such read is a miss.
        let past = reads.saturating_sub(counts.leaf_misses + counts.inner_misses);
        counts.lookups += past;
        counts.leaf_misses += past;
        counts
    }
}

fn counts(counters: &Counters) -> CacheCounts {
    let total = counters.total();
    let leaf_misses = counters.levels[0].misses;
    CacheCounts {
        // Who waits for a read that another operation has begun costs no read of its own.
        lookups: total.hits + total.misses + total.shared_fetches,
        leaf_misses,
        inner_misses: total.misses - leaf_misses,
        write_backs: total.write_backs,
        flushed: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_fetch_is_no_miss() {
        let mut counters = Counters::default();
        (counters.levels[0].hits, counters.levels[0].misses, counters.levels[0].shared_fetches) = (5, 3, 2);
        (counters.levels[1].hits, counters.levels[1].misses, counters.levels[2].write_backs) = (9, 1, 4);
        let expected = CacheCounts { lookups: 20, leaf_misses: 3, inner_misses: 1, write_backs: 4, flushed: 0 };
        assert_eq!(counts(&counters), expected);
    }
}
