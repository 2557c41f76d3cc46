//! What the rows of figures say beyond those of a bench: where their numbers come from, and how large a cache is.

use anyhow::ensure;

use super::key_set::PAGE_BYTES;
use crate::plan::CACHE_BYTES_MIN;
use crate::report::Row;

/// The cache of each compute server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CacheSize {
    pub(crate) cache_bytes: u64,
    /// Of the raw data, 16 bytes a key.
    pub(crate) cache_percent: f64,
}

impl CacheSize {
    /// So many percent of the raw data of the keys.
    pub(crate) fn percent_of(keys: u64, cache_percent: f64) -> Self {
        const RAW_BYTES_PER_KEY: f64 = 16.0;
        Self { cache_bytes: (keys as f64 * RAW_BYTES_PER_KEY * cache_percent / 100.0) as u64, cache_percent }
    }

    /// The same; an error where no cache works with so little.
    pub(crate) fn usable_percent_of(keys: u64, cache_percent: f64) -> anyhow::Result<Self> {
        let size = Self::percent_of(keys, cache_percent);
        ensure!(
            size.cache_bytes >= CACHE_BYTES_MIN,
            "{cache_percent}% of {keys} keys are a cache of {} bytes, and none works with less than {CACHE_BYTES_MIN}; give more \
             --keys or more percent",
            size.cache_bytes
        );
        Ok(size)
    }

    /// So many percent, or as little as a cache works with.
    pub(crate) fn at_least_percent_of(keys: u64, cache_percent: f64) -> Self {
        let size = Self::percent_of(keys, cache_percent);
        Self { cache_bytes: size.cache_bytes.max(CACHE_BYTES_MIN), ..size }
    }

    pub(crate) fn frames(self) -> u64 {
        self.cache_bytes / PAGE_BYTES
    }
}

/// A row whose numbers come from a `paper`'s table, its authors' `public-code`, this run (`measured`) or are `computed`.
pub(crate) fn described(row: Row, source: &'static str, access: &str, mix: &str) -> Row {
    row.with("source", source).with("access", access).with("mix", mix)
}

pub(crate) fn with_cache(row: Row, cache: Option<CacheSize>) -> Row {
    row.with("cache_bytes", cache.map(|cache| cache.cache_bytes))
        .with("cache_percent", cache.map(|cache| cache.cache_percent))
}
