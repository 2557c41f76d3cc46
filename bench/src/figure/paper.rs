//! What others report. Table 2 of DEX (Lu et al., VLDB 2024): RDMA operations and traffic per index operation, with 144
//! compute threads on four compute servers, a skewed workload, and a cache of 256 MB (8% of the data) in each. And what
//! DEX's public code was seen to do with one compute server, over a stand-in for libibverbs that counts.

use super::rows::{CacheSize, described, with_cache};
use crate::report::Row;

struct Line {
    index: &'static str,
    mix: &'static str,
    reads: f64,
    writes: f64,
    atomics: f64,
    two_sided: f64,
    bytes: Option<f64>,
}

#[rustfmt::skip]
const TABLE_2: [Line; 10] = [
    line("DEX",      "read-only",       0.33, 0.00, 0.00, 0.0002, Some(333.9)),
    line("Sherman",  "read-only",       3.02, 0.00, 0.00, 0.0,    Some(1064.69)),
    line("SMART",    "read-only",       1.44, 0.00, 0.00, 0.0,    Some(996.99)),
    line("P-Sherman", "read-only",      1.00, 0.00, 0.00, 0.0,    Some(1025.04)),
    line("P-SMART",  "read-only",       1.15, 0.00, 0.00, 0.0,    Some(397.41)),
    line("DEX",      "write-intensive", 0.33, 0.19, 0.00, 0.0001, Some(524.1)),
    line("Sherman",  "write-intensive", 2.71, 0.99, 0.59, 0.0,    Some(1078.95)),
    line("SMART",    "write-intensive", 1.45, 0.11, 0.11, 0.0,    Some(1002.88)),
    line("P-Sherman", "write-intensive", 1.02, 0.50, 0.00, 0.0,   Some(1054.39)),
    line("P-SMART",  "write-intensive", 1.16, 0.13, 0.00, 0.0,    Some(404.207)),
];

const AS_SHIPPED: &str = "DEX's public code";
const NO_OFFLOAD: &str = "DEX's public code, no offload";
/// The skew of all that is reported here.
const THETA: f64 = 0.99;
/// The keys that DEX's public code was measured with.
const CODE_KEYS: u64 = 10_000_000;

/// By cache percent. Without offload, every missed page is admitted.
#[rustfmt::skip]
const PUBLIC_CODE: [(f64, Line); 11] = [
    (1.0,  line(AS_SHIPPED, "read-only",       0.07, 0.00, 0.00, 0.59, Some(111.0))),
    (8.0,  line(AS_SHIPPED, "read-only",       0.28, 0.00, 0.00, 0.24, Some(306.0))),
    (32.0, line(AS_SHIPPED, "read-only",       0.38, 0.00, 0.00, 0.0,  Some(388.0))),
    (1.0,  line(NO_OFFLOAD, "read-only",       1.47, 0.00, 0.00, 0.0,  Some(1504.0))),
    (8.0,  line(NO_OFFLOAD, "read-only",       0.81, 0.00, 0.00, 0.0,  Some(826.0))),
    (32.0, line(NO_OFFLOAD, "read-only",       0.41, 0.00, 0.00, 0.0,  None)),
    (1.0,  line(AS_SHIPPED, "write-intensive", 0.08, 0.05, 0.00, 0.59, None)),
    (8.0,  line(AS_SHIPPED, "write-intensive", 0.33, 0.18, 0.00, 0.21, None)),
    (32.0, line(AS_SHIPPED, "write-intensive", 0.38, 0.21, 0.00, 0.0,  None)),
    (8.0,  line(NO_OFFLOAD, "write-intensive", 0.81, 0.33, 0.00, 0.0,  None)),
    (32.0, line(NO_OFFLOAD, "write-intensive", 0.41, 0.25, 0.00, 0.0,  None)),
];

const fn line(
    index: &'static str,
    mix: &'static str,
    reads: f64,
    writes: f64,
    atomics: f64,
    two_sided: f64,
    bytes: Option<f64>,
) -> Line {
    Line { index, mix, reads, writes, atomics, two_sided, bytes }
}

impl Line {
    fn row(&self, source: &'static str, access: &str, (keys, servers): (u64, u64), cache: CacheSize) -> Row {
        let row = Row {
            name: self.index.to_owned(),
            reads_per_op: Some(self.reads),
            writes_per_op: Some(self.writes),
            atomics_per_op: Some(self.atomics),
            two_sided_per_op: Some(self.two_sided),
            bytes_per_op: self.bytes,
            ..Row::default()
        };
        with_cache(described(row, source, access, self.mix), Some(cache))
            .with("keys", keys)
            .with("compute_servers", servers)
            .with("theta", THETA)
            .with("page_bytes", 1024)
    }
}

/// The paper's rows of a mix; none beside keys of another skew.
pub(crate) fn table_2(mix: &str, theta: f64) -> impl Iterator<Item = Row> {
    let cache = CacheSize { cache_bytes: 256_000_000, cache_percent: 8.0 };
    TABLE_2
        .iter()
        .filter(move |line| line.mix == mix && theta == THETA)
        .map(move |line| line.row("paper", line.index, (200_000_000, 4), cache).with("memory_servers", 4))
}

/// How many times as many operations a second each step of figure 8 brings, skewed (theta .99) or uniform, by the text of
/// section 8.3: partitioning with two threads, from 0.04 to 0.096 million; offloading by 55% and 34%. Of caching it says that
/// it gains; the numbers are in the plot alone.
pub(crate) fn figure_8(step: &str, theta: f64) -> Option<f64> {
    match step {
        "+ partition" if theta == THETA => Some(2.4),
        "+ offloading" if theta == THETA => Some(1.55),
        "+ offloading" if theta == 0.0 => Some(1.34),
        _ => None,
    }
}

/// What DEX's public code did in a mix with a cache of so many percent, where that was measured: one compute server, 1, 8
/// and 32%, the skew of the paper.
pub(crate) fn dex_code(mix: &str, theta: f64, compute_servers: u64, cache_percent: f64) -> impl Iterator<Item = Row> {
    let was_measured = theta == THETA && compute_servers == 1;
    PUBLIC_CODE.iter().filter(move |(percent, line)| was_measured && *percent == cache_percent && line.mix == mix).map(
        |(percent, line)| {
            let admission = if line.index == NO_OFFLOAD { "always" } else { "probability" };
            let cache = CacheSize::percent_of(CODE_KEYS, *percent);
            line.row("public-code", "DEX", (CODE_KEYS, 1), cache).with("admission", admission)
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_belong_to_their_mix_and_setting() {
        let reads = |servers, percent| -> Vec<f64> {
            dex_code("read-only", THETA, servers, percent).filter_map(|row| row.reads_per_op).collect()
        };
        assert_eq!(reads(1, 8.0), [0.28, 0.81]);
        assert_eq!(reads(1, 32.0), [0.38, 0.41]);
        assert_eq!((reads(4, 8.0), reads(1, 5.0)), (vec![], vec![]));
        assert_eq!(dex_code("write-intensive", THETA, 1, 1.0).count(), 1);
        assert_eq!((dex_code("read-only", 0.5, 1, 8.0).count(), table_2("read-only", 0.5).count()), (0, 0));
        assert_eq!([THETA, 0.5, 0.0].map(|theta| figure_8("+ offloading", theta)), [Some(1.55), None, Some(1.34)]);
    }
}
