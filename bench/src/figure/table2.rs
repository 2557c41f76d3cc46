//! `farlink figure dex-table2`: the paper's rows, ours, and the best that a cache of that size could do.
//!
//! The optimum has the same bytes as each cache and uses all of them for pages, one frame for each 1024 B; ours also keep
//! frames, table, cooling map and sketch in theirs. So it is the stricter bound, by what the bookkeeping takes.

use std::io::Write;
use std::sync::Arc;

use comfy_table::Table;
use farlink_offload::Policies;
use farlink_offload::policy::Cold;

use super::args::Table2Args;
use super::key_set::{FigureMix, INSERT_INTENSIVE, KeySet, READ_ONLY, WRITE_INTENSIVE};
use super::optimum::Optimum;
use super::paper;
use super::rows::CacheSize;
use super::trial::{Admit, Loaded, Trial, Way, against, shape};
use crate::plan::AdmissionChoice;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::subject::AccessMode;
use crate::table::{digits, table};
use crate::units::plural;

const MIXES: [FigureMix; 3] = [READ_ONLY, WRITE_INTENSIVE, INSERT_INTENSIVE];
/// More would not make a count more certain. Without a cache, where every operation costs about the same, even fewer do.
const OPS_MAX: u64 = 10_000_000;
const UNCACHED_OPS_MAX: u64 = 2_000_000;
/// One operation for so many keys, where half of them insert: the tree stays nearly what it is from row to row.
const KEYS_PER_INSERTING_OP: u64 = 10;

fn ways(admission: AdmissionChoice) -> [Way; 5] {
    let admit = Admit::As(admission);
    [
        Way::new("farlink FG", AccessMode::OneSided, admit),
        Way::new("farlink, shared-everything", AccessMode::CachedInner, admit),
        // Leaves are private, and written without a lock, but never kept.
        Way::new("farlink, P-Sherman", AccessMode::Cached, Admit::With { leaf: 0.0, inner: 1.0 }),
        Way::new("farlink, owned ranges", AccessMode::Cached, admit),
        Way::shipping("farlink, shipped", admit, || Policies::new(Cold)),
    ]
}

/// Rows side by side.
pub(crate) fn show(rows: &[Row]) -> Table {
    let header = [
        "design",
        "cache\n%",
        "read\n/op",
        "write\n/op",
        "cas\n/op",
        "msg\n/op",
        "byte\n/op",
        "hit\n%",
        "leaf\nmiss",
        "leaf/\nbest",
    ];
    let line = |row: &Row| {
        let percent = row.number("cache_percent");
        vec![
            row.name.replace(", ", ",\n "),
            percent.map_or_else(|| "-".to_owned(), |percent| percent.to_string()),
            digits(row.reads_per_op, 3),
            digits(row.writes_per_op, 3),
            digits(row.atomics_per_op, 3),
            digits(row.two_sided_per_op, 4),
            digits(row.bytes_per_op, 0),
            digits(row.hit_ratio.map(|ratio| ratio * 100.0), 1),
            digits(row.leaf_misses_per_op, 3),
            digits(row.number("leaf_misses_over_optimum"), 2),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

/// Makes the table, then checks the tree.
pub(crate) fn run(args: &Table2Args, out: impl Write) -> anyhow::Result<()> {
    let key_set = Arc::new(KeySet::new(args.keys, args.theta, args.compute_servers, args.common.seed)?);
    let keys = key_set.keys;
    let cache = CacheSize::usable_percent_of(keys, args.cache_percent)?;
    let ways = ways(args.admission);
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, zipf {}, {} with {} bytes of cache each,\nadmission {}",
        plural(keys, "key"),
        key_set.theta,
        plural(args.compute_servers, "compute server"),
        cache.cache_bytes,
        args.admission.name(),
    ))?;
    let papers = |mix: &'static str| paper::table_2(mix, args.theta);
    let public = |mix: &'static str| paper::dex_code(mix, args.theta, args.compute_servers, args.cache_percent);
    if papers(READ_ONLY.name).next().is_some() {
        reporter.note("paper: DEX (VLDB 2024), table 2, with 200M keys and four compute servers")?;
    }
    if public(READ_ONLY.name).next().is_some() {
        reporter.note("DEX's public code: measured, with 10M keys and one compute server")?;
    }
    let mut progress = Progress::new(3 + (ways.len() * MIXES.len()) as u64, args.common.json);
    let optimum = progress.step("optimum", || Optimum::new(&key_set, &shape(keys)).with_frames(cache.frames()));
    let inserting_ops = args.ops.unwrap_or(keys / KEYS_PER_INSERTING_OP);
    let more = inserting_ops * ways.len() as u64;
    let loaded = progress.step("load", || Loaded::load(&key_set, args.memory_servers, more))?;
    let mut run = 0;
    let mut beside_code = None;
    for mix in MIXES {
        papers(mix.name).chain(public(mix.name)).try_for_each(|row| reporter.row(row))?;
        for way in ways {
            let caches = way.mode.caches();
            let ops = match mix.insert_percent {
                0 => args.ops.unwrap_or(keys.min(if caches { OPS_MAX } else { UNCACHED_OPS_MAX })),
                _ => inserting_ops,
            };
            let trial = Trial {
                key_set: &key_set,
                way,
                cache,
                mix,
                warm_up_ops: if caches { args.warm_up_ops.unwrap_or(2 * keys) } else { 0 },
                ops,
                seed: args.common.seed,
                in_flight: args.in_flight,
                run,
            };
            run += 1;
            let row = progress.step(&format!("{}, {}", way.name, mix.name), || loaded.run(&trial))?;
            if mix.name == READ_ONLY.name
                && way.mode == AccessMode::Engine
                && args.admission == AdmissionChoice::Frequency
            {
                beside_code = public(mix.name).next().and_then(|code| over_code(&row, &code));
            }
            // The leaves of what is shipped are no misses.
            let compares = mix.insert_percent == 0 && way.mode != AccessMode::Engine;
            reporter.row(if compares { against(row, &optimum) } else { row })?;
        }
        // It knows nothing of pages that split.
        if mix.insert_percent == 0 {
            reporter.row(loaded.optimum(&optimum, mix, &key_set, cache))?;
        }
        progress.suspend(|| reporter.table(&format!("\n{}\n", mix.name), show))?;
    }
    progress.begin("check");
    drop(progress);
    beside_code.iter().try_for_each(|check| reporter.check(check))?;
    loaded.check(&mut reporter)?;
    reporter.all_held()
}

/// What is read and sent, over what DEX's public code reads and sends: in a tree of as many keys, and where that ships.
fn over_code(shipped: &Row, code: &Row) -> Option<CheckRow> {
    let ships = code.two_sided_per_op.is_some_and(|messages| messages > 0.0);
    let is_alike = ships && code.number("keys") == shipped.number("keys");
    let remote_ops = |row: &Row| Some(row.reads_per_op? + row.two_sided_per_op?);
    let ratio = remote_ops(shipped)? / remote_ops(code)?;
    let check = CheckRow::within("READs and messages, shipped, over those of DEX's public code", ratio, 0.0..=1.0);
    is_alike.then(|| check.explained("fewer than 5M --warm-up-ops leave caches cold"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shipped_is_held_against_dexs_code_where_trees_are_alike() {
        let holds = |percent, keys, (reads, messages)| {
            let code = paper::dex_code(READ_ONLY.name, 0.99, 1, percent).next()?;
            let ours = Row { reads_per_op: Some(reads), two_sided_per_op: Some(messages), ..Row::default() };
            over_code(&ours.with("keys", keys), &code).map(|check| check.ok)
        };
        let keys = 10_000_000_u64;
        assert_eq!([holds(1.0, keys, (0.081, 0.567)), holds(8.0, keys, (0.027, 0.407))], [Some(true); 2]);
        assert_eq!([holds(1.0, keys, (0.133, 0.611)), holds(8.0, keys, (0.121, 0.407))], [Some(false); 2]);
        // Of fewer keys, fewer lookups go to the popular ones; with a large cache it ships nothing.
        assert_eq!([holds(1.0, 1_000_000, (0.0, 0.0)), holds(32.0, keys, (0.4, 0.0))], [None; 2]);
    }
}
