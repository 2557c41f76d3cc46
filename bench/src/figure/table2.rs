//! `farlink figure dex-table2`: the paper's rows, ours, and the best that a cache of that size could do.
//!
//! The optimum has the same bytes as each cache and uses all of them for pages, one frame for each 1024 B; ours also keep
//! frames, table, cooling map and sketch in theirs. So it is the stricter bound, by what the bookkeeping takes.

use std::io::Write;
use std::sync::Arc;

use crate::subject::AccessMode;
use comfy_table::Table;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::structure::Structure;
use farlink_structures::btree::{BTreeOptions, KeyRange, Tree};

use super::args::Table2Args;
use super::key_set::{ENTRIES_PER_PAGE, FILL, KeySet, PAGE_BYTES};
use super::load::{Load, Lot};
use super::optimum::{Misses, Optimum, Shape};
use super::paper;
use super::rows::{CacheSize, described, with_cache};
use super::test_bed::TestBed;
use crate::plan::AdmissionChoice;
use crate::progress::Progress;
use crate::report::{Reporter, Row};
use crate::route::Route;
use crate::table::{digits, table};
use crate::units::plural;

/// A mix of the paper, as far as figures need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FigureMix {
    pub(crate) name: &'static str,
    pub(crate) update_percent: u32,
}

pub(crate) const READ_ONLY: FigureMix = FigureMix { name: "read-only", update_percent: 0 };
const MIXES: [FigureMix; 2] = [READ_ONLY, FigureMix { name: "write-intensive", update_percent: 50 }];
const DESIGNS: [(&str, AccessMode); 3] = [
    ("farlink FG", AccessMode::OneSided),
    ("farlink, shared-everything", AccessMode::CachedInner),
    ("farlink, owned ranges", AccessMode::Cached),
];
/// More would not make a count more certain. Without a cache, where every operation costs about the same, even fewer do.
const OPS_MAX: u64 = 10_000_000;
const UNCACHED_OPS_MAX: u64 = 2_000_000;
const NAME: &str = "figure";

/// A test bed with the tree of all keys.
#[derive(Debug)]
pub(crate) struct Loaded {
    bed: TestBed,
    tree: Structure,
    keys: u64,
    memory_servers: u64,
}

/// One run on it.
#[derive(Debug, Clone)]
pub(crate) struct Trial<'a> {
    pub(crate) key_set: &'a Arc<KeySet>,
    pub(crate) mode: AccessMode,
    pub(crate) cache: CacheSize,
    pub(crate) admission: AdmissionChoice,
    pub(crate) mix: FigureMix,
    /// Over all compute servers.
    pub(crate) warm_up_ops: u64,
    pub(crate) ops: u64,
    pub(crate) seed: u64,
    /// Of each compute server.
    pub(crate) in_flight: u32,
    /// The number of the run on its tree: no two write the same values, for that would change nothing.
    pub(crate) run: u32,
}

pub(crate) fn shape(keys: u64) -> Shape {
    Shape::bulk_loaded(keys, ENTRIES_PER_PAGE)
}

impl Loaded {
    pub(crate) fn load(key_set: &KeySet, memory_servers: u64) -> anyhow::Result<Self> {
        let tree_bytes = shape(key_set.keys).pages() * PAGE_BYTES / memory_servers * 11 / 10;
        let bed = TestBed::start(usize::try_from(memory_servers)?, tree_bytes, MemOptions::default())?;
        let options = BTreeOptions { page_bytes: PAGE_BYTES as usize, ..BTreeOptions::default() };
        let tree = bed.load(NAME, options, key_set.entries(), FILL)?;
        Ok(Self { bed, tree, keys: key_set.keys, memory_servers })
    }

    pub(crate) fn check<W: Write>(&self, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
        reporter.check(&self.bed.check(&[NAME.to_owned()], self.keys)?)?;
        reporter.all_held()
    }

    /// Runs a trial. Each begins with an empty cache, warmed up by the mix itself.
    pub(crate) fn run(&self, name: &str, trial: &Trial<'_>) -> anyhow::Result<Row> {
        let Trial { key_set, mode, cache, admission, mix, warm_up_ops, ops, seed, in_flight, run } = *trial;
        let route = |server: usize| {
            let route = Route::<Tree>::new(mode, self.tree.clone(), Proof::Checksum);
            if !mode.caches() {
                return Ok(route);
            }
            let (low, owned) = (key_set.owned(server).start, key_set.owned(server).end);
            let high = (owned < key_set.keys).then(|| KeySet::key(owned));
            let mut options = admission.options(usize::try_from(cache.cache_bytes)?);
            options.handles_max = 4;
            Ok(route.through(options, KeyRange { low: KeySet::key(low), high })?)
        };
        let load = Load {
            compute_servers: key_set.servers(),
            workers: 1,
            in_flight,
            route: &route,
            operations: &|Lot { server, is_warm_up, .. }| {
                let (draws, other) = if is_warm_up { (warm_up_ops, 1) } else { (ops, 0) };
                let (seed, version) = (seed.wrapping_add(other << 32), run << 27 | (other as u32) << 26);
                Box::new(key_set.operations(server, draws, mix.update_percent, seed, version))
            },
            limits: [None; 2],
            on_one_core: false,
            seed,
        };
        let (row, _) = load.run(&self.bed, name)?;
        let row = described(row, "measured", mode.name(), mix.name)
            .with("warm_up_ops", warm_up_ops)
            .with("in_flight", in_flight)
            .with("admission", mode.caches().then_some(admission.name()));
        Ok(self.setting(with_cache(row, mode.caches().then_some(cache)), key_set, Some(seed)))
    }

    /// The row of the best contents of a cache of this size.
    pub(crate) fn optimum(&self, misses: &Misses, mix: FigureMix, key_set: &KeySet, cache: CacheSize) -> Row {
        let row = Row {
            name: "static optimum".to_owned(),
            reads_per_op: Some(misses.reads_per_op),
            bytes_per_op: (mix.update_percent == 0).then_some(misses.reads_per_op * PAGE_BYTES as f64),
            hit_ratio: Some(misses.hit_ratio()),
            leaf_misses_per_op: misses.by_level.first().copied(),
            inner_misses_per_op: Some(misses.by_level.iter().skip(1).sum()),
            misses_by_level: Some(misses.by_level.clone()),
            ..Row::default()
        };
        let row = with_cache(described(row, "computed", "cached", mix.name), Some(cache));
        against(self.setting(row, key_set, None), misses)
    }

    fn setting(&self, row: Row, key_set: &KeySet, seed: Option<u64>) -> Row {
        row.with("keys", key_set.keys)
            .with("compute_servers", key_set.servers())
            .with("memory_servers", self.memory_servers)
            .with("theta", key_set.theta)
            .with("page_bytes", PAGE_BYTES)
            .with("seed", seed)
    }
}

/// The row with its leaf misses compared with the least.
pub(crate) fn against(row: Row, least: &Misses) -> Row {
    let least = least.by_level.first().copied().filter(|misses| *misses > 0.0);
    let over = row.leaf_misses_per_op.zip(least).map(|(leaf, least)| leaf / least);
    row.with("leaf_misses_over_optimum", over)
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
    let cache = CacheSize::percent_of(keys, args.cache_percent);
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, zipf {}, {} with {} bytes of cache each,\nadmission {}",
        plural(keys, "key"),
        key_set.theta,
        plural(args.compute_servers, "compute server"),
        cache.cache_bytes,
        args.admission.name(),
    ))?;
    reporter.note("paper: DEX (VLDB 2024), table 2, with 200M keys and four compute servers")?;
    if paper::dex_code(READ_ONLY.name, args.compute_servers, args.cache_percent).next().is_some() {
        reporter.note("DEX's public code: measured, with 10M keys and one compute server")?;
    }
    let mut progress = Progress::new(3 + (DESIGNS.len() * MIXES.len()) as u64, args.common.json);
    let optimum = progress.step("optimum", || Optimum::new(&key_set, &shape(keys)).with_frames(cache.frames()));
    let loaded = progress.step("load", || Loaded::load(&key_set, args.memory_servers))?;
    let mut run = 0;
    for mix in MIXES {
        let papers = paper::table_2(mix.name);
        papers
            .chain(paper::dex_code(mix.name, args.compute_servers, args.cache_percent))
            .try_for_each(|row| reporter.row(row))?;
        for (name, mode) in DESIGNS {
            let ops = keys.min(if mode.caches() { OPS_MAX } else { UNCACHED_OPS_MAX });
            let trial = Trial {
                key_set: &key_set,
                mode,
                cache,
                admission: args.admission,
                mix,
                warm_up_ops: if mode.caches() { args.warm_up_ops.unwrap_or(2 * keys) } else { 0 },
                ops: args.ops.unwrap_or(ops),
                seed: args.common.seed,
                in_flight: args.in_flight,
                run,
            };
            run += 1;
            let row = progress.step(&format!("{name}, {}", mix.name), || loaded.run(name, &trial))?;
            reporter.row(against(row, &optimum))?;
        }
        reporter.row(loaded.optimum(&optimum, mix, &key_set, cache))?;
        progress.suspend(|| reporter.table(&format!("\n{}\n", mix.name), show))?;
    }
    progress.begin("check");
    drop(progress);
    loaded.check(&mut reporter)
}
