//! Table 2 of DEX (Lu et al., VLDB 2024): RDMA operations and traffic per index operation, with 144 compute threads on
//! four compute servers, a skewed workload, and a cache of 256 MB (8% of the data) in each.

use super::rows::{CacheSize, Row, Setting, Source};

struct Line {
    index: &'static str,
    mix: &'static str,
    reads: f64,
    writes: f64,
    atomics: f64,
    two_sided: f64,
    bytes: f64,
}

#[rustfmt::skip]
const TABLE_2: [Line; 10] = [
    line("DEX",      "read-only",       0.33, 0.00, 0.00, 0.0002,  333.9),
    line("Sherman",  "read-only",       3.02, 0.00, 0.00, 0.0,    1064.69),
    line("SMART",    "read-only",       1.44, 0.00, 0.00, 0.0,     996.99),
    line("P-Sherman", "read-only",      1.00, 0.00, 0.00, 0.0,    1025.04),
    line("P-SMART",  "read-only",       1.15, 0.00, 0.00, 0.0,     397.41),
    line("DEX",      "write-intensive", 0.33, 0.19, 0.00, 0.0001,  524.1),
    line("Sherman",  "write-intensive", 2.71, 0.99, 0.59, 0.0,    1078.95),
    line("SMART",    "write-intensive", 1.45, 0.11, 0.11, 0.0,    1002.88),
    line("P-Sherman", "write-intensive", 1.02, 0.50, 0.00, 0.0,   1054.39),
    line("P-SMART",  "write-intensive", 1.16, 0.13, 0.00, 0.0,     404.207),
];

const fn line(
    index: &'static str,
    mix: &'static str,
    reads: f64,
    writes: f64,
    atomics: f64,
    two_sided: f64,
    bytes: f64,
) -> Line {
    Line { index, mix, reads, writes, atomics, two_sided, bytes }
}

/// The paper's rows.
pub(crate) fn table_2() -> impl Iterator<Item = Row> {
    let setting =
        Setting { keys: 200_000_000, compute_servers: 4, memory_servers: 4, theta: 0.99, page_bytes: 1024, seed: None };
    TABLE_2.iter().map(move |line| {
        let cache = CacheSize { cache_bytes: 256_000_000, cache_percent: 8.0 };
        let row = Row::new(line.index, Source::Paper, line.index, line.mix, line.reads, &setting);
        let mut row = row.with_cache(Some(cache));
        row.writes_per_op = Some(line.writes);
        row.atomics_per_op = Some(line.atomics);
        row.two_sided_per_op = Some(line.two_sided);
        row.bytes_per_op = Some(line.bytes);
        row
    })
}
