//! What the rows of figures say beyond those of a bench: where their numbers come from, and how large a cache is.

use anyhow::ensure;

use super::key_set::PAGE_BYTES;
use crate::plan::CACHE_BYTES_MIN;
use crate::report::Row;

/// The cache of each compute server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CacheSize {
    pub(crate) cache_bytes: u64,
    /// Of the raw data, 16 bytes a key, unless a figure says of what.
    pub(crate) cache_percent: f64,
}

const RAW_BYTES_PER_KEY: u64 = 16;

impl CacheSize {
    /// So many percent of the raw data of the keys.
    pub(crate) fn percent_of(keys: u64, cache_percent: f64) -> Self {
        Self::of(keys.saturating_mul(RAW_BYTES_PER_KEY) as f64, cache_percent)
    }

    fn of(bytes: f64, cache_percent: f64) -> Self {
        Self { cache_bytes: (bytes * cache_percent / 100.0) as u64, cache_percent }
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

    /// So many percent of the raw data, or as little as a cache works with.
    pub(crate) fn at_least_percent_of(keys: u64, cache_percent: f64) -> Self {
        Self::at_least_of_bytes(keys.saturating_mul(RAW_BYTES_PER_KEY), cache_percent)
    }

    /// So many percent of these bytes, or as little as a cache works with: then it has the percent that this is.
    pub(crate) fn at_least_of_bytes(bytes: u64, cache_percent: f64) -> Self {
        let bytes = bytes.max(1) as f64;
        let size = Self::of(bytes, cache_percent);
        if size.cache_bytes >= CACHE_BYTES_MIN {
            return size;
        }
        Self { cache_bytes: CACHE_BYTES_MIN, cache_percent: CACHE_BYTES_MIN as f64 / bytes * 100.0 }
    }

    pub(crate) fn frames(self) -> u64 {
        self.cache_bytes / PAGE_BYTES
    }
}

/// Percent as a person reads them.
pub(crate) fn show_percent(percent: f64) -> String {
    ((percent * 100.0).round() / 100.0).to_string()
}

/// A row whose numbers come from a `paper`'s table, its authors' `public-code`, this run (`measured`) or are `computed`.
pub(crate) fn described(row: Row, source: &'static str, access: &str, mix: &str) -> Row {
    row.with("source", source).with("access", access).with("mix", mix)
}

pub(crate) fn with_cache(row: Row, cache: Option<CacheSize>) -> Row {
    row.with("cache_bytes", cache.map(|cache| cache.cache_bytes))
        .with("cache_percent", cache.map(|cache| cache.cache_percent))
}
