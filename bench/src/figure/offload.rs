//! `farlink figure offload`: what shipping operations to a memory server brings (DEX, VLDB 2024, section 6).
//!
//! Never, always and cost-aware over the number of the memory server's threads, with a cache of one percent of the tree, and
//! over cache sizes with the most threads. Workers have one operation in flight each, a latency is added to every remote
//! operation, and the memory server's threads are modelled: they take a set time for each page that an operation looks at.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use farlink_offload::policy::{Always, CostAware, CostOptions, Never};
use farlink_offload::{CacheOptions, Policies};
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::structure::Structure;
use farlink_structures::btree::{BTreeOptions, KeyRange, Tree};

use super::args::OffloadArgs;
use super::key_set::{FigureMix, KeySet};
use super::load::{Load, Lot};
use super::plot::{self, Line, Plot, Scale};
use super::rows::{CacheSize, show_percent, with_cache};
use super::test_bed::TestBed;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::route::Route;
use crate::subject::AccessMode;
use crate::table::{digits, micros, table};
use crate::units::{show_count, show_nanoseconds};

const FILE: &str = "offload.svg";
const NAME: &str = "figure";
/// What a search takes, measured by `farlink bench`: little, beside what is remote.
const SEARCH_NS: u64 = 100;
/// Who decides.
type Policy = (&'static str, fn() -> Policies);
const POLICIES: [Policy; 3] = [
    ("never", || Policies::new(Never)),
    ("always", || Policies::new(Always)),
    ("cost-aware", || Policies::new(CostAware::new(CostOptions { search_ns: SEARCH_NS, ..CostOptions::default() }))),
];

/// What has to hold with one percent of the tree cached: cost-aware over never with threads to spare, and with one that is
/// overloaded; always over never then.
const SPARE_LEAST: f64 = 1.3;
const OVERLOADED_LEAST: f64 = 0.95;
const COLLAPSED_MOST: f64 = 0.7;

/// Where a run stands in the figure.
#[derive(Debug, Clone, Copy)]
struct Place {
    name: &'static str,
    server_threads: u32,
    cache_percent: f64,
}

/// A row, and where it stands.
#[derive(Debug, Clone)]
struct Point {
    place: Place,
    policy: &'static str,
    /// Throughput as a multiple of never's: the median of those of each round.
    ratio: f64,
    row: Row,
}

/// The tree on its test bed.
struct Loaded<'a> {
    args: &'a OffloadArgs,
    key_set: Arc<KeySet>,
    bed: TestBed,
    tree: Structure,
    tree_bytes: u64,
    /// Runs so far.
    runs: AtomicU32,
}

impl<'a> Loaded<'a> {
    fn load(args: &'a OffloadArgs) -> anyhow::Result<Self> {
        let key_set = Arc::new(KeySet::new(args.keys, args.theta, 1, args.common.seed)?);
        let options = MemOptions { latency_ns: args.latency, ..MemOptions::default() };
        let bed = TestBed::start(1, tree_bytes_max(args.keys, args.page_bytes, args.fill), options)?;
        let options = BTreeOptions { page_bytes: args.page_bytes as usize, ..BTreeOptions::default() };
        let tree = bed.load(NAME, options, key_set.entries(), args.fill)?;
        let tree_bytes = bed.report(NAME)?.bytes;
        Ok(Self { args, key_set, bed, tree, tree_bytes, runs: AtomicU32::new(0) })
    }

    fn cache(&self, place: Place) -> CacheSize {
        CacheSize::at_least_of_bytes(self.tree_bytes, place.cache_percent)
    }

    fn run(&self, place: Place, (policy, policies): Policy, round: u64) -> anyhow::Result<Row> {
        let (args, seed) = (self.args, self.args.common.seed + round);
        let cache = self.cache(place);
        // All runs are on one tree, and those of a round draw the same keys: with values of its own each one's updates change something.
        let version = (1 + self.runs.fetch_add(1, Ordering::Relaxed)) << 22;
        let _serving = self.bed.serve(place.server_threads as usize, Duration::from_nanos(args.page_time), seed)?;
        let route = |_| {
            let mut options = CacheOptions::new(cache.cache_bytes as usize);
            (options.page_bytes, options.excludes_subtrees) = (args.page_bytes as usize, true);
            options.handles_max = args.workers as usize;
            let route = Route::<Tree>::new(AccessMode::Engine, self.tree.clone(), Proof::Checksum);
            Ok(route.through(options, KeyRange::ALL)?.shipping(policies))
        };
        let load = Load {
            compute_servers: 1,
            workers: args.workers as usize,
            in_flight: 1,
            route: &route,
            operations: &|Lot { worker, is_warm_up, .. }| {
                let seed = seed ^ (2 * worker as u64 + u64::from(is_warm_up) + 1) << 32;
                let mix = FigureMix { name: place.name, update_percent: args.update_percent, insert_percent: 0 };
                Box::new(self.key_set.operations(0, u64::MAX, mix, seed, version))
            },
            limits: [args.warm_up_seconds, args.seconds].map(Some),
            on_one_core: true,
            seed,
        };
        let (row, tally) = load.run(&self.bed, place.name)?;
        let per_op = |count: u64| count as f64 / tally.outcomes.ops.max(1) as f64;
        Ok(with_cache(row, Some(cache))
            .with("keys", args.keys)
            .with("theta", args.theta)
            .with("update_percent", args.update_percent)
            .with("page_bytes", args.page_bytes)
            .with("fill", args.fill)
            .with("policy", policy)
            .with("server_threads", place.server_threads)
            .with("workers", args.workers)
            .with("in_flight", 1)
            .with("latency_ns", args.latency)
            .with("page_ns", args.page_time)
            .with("repeats", args.repeats)
            .with("seed", args.common.seed)
            .with("shipped_per_op", per_op(tally.cache.shipped))
            .with("came_back_per_op", per_op(tally.cache.came_back))
            .with("contrary_per_op", per_op(tally.cache.contrary)))
    }

    /// Each policy once a round, another one first each time; medians by throughput, and of the quotients of each round.
    fn by_turns(&self, place: Place) -> anyhow::Result<Vec<Point>> {
        let mut runs: [Vec<Row>; POLICIES.len()] = Default::default();
        for round in 0..self.args.repeats as usize {
            for step in 0..POLICIES.len() {
                let at = (round + step) % POLICIES.len();
                runs[at].push(self.run(place, POLICIES[at], round as u64)?);
            }
        }
        // Within each round, where whatever else the machine does meets all alike.
        let never = runs[0].clone();
        let median = |((policy, _), mut rows): ((&'static str, _), Vec<Row>)| {
            let mut ratios: Vec<f64> = rows.iter().zip(&never).map(|(row, never)| row.times(never)).collect();
            ratios.sort_by(f64::total_cmp);
            rows.sort_by(|a, b| a.times(b).total_cmp(&1.0));
            let (middle, ratio) = (rows.len() / 2, ratios[ratios.len() / 2]);
            Point { place, policy, ratio, row: rows.swap_remove(middle).with("ratio", ratio) }
        };
        Ok(POLICIES.into_iter().zip(runs).map(median).collect())
    }
}

/// Bytes that the pages of a tree take at most.
pub(crate) fn tree_bytes_max(keys: u64, page_bytes: u32, fill: f64) -> u64 {
    let entries = f64::from((page_bytes / 8 - 8) / 2) * fill;
    (keys as f64 / entries.floor().max(2.0) * 1.5) as u64 * u64::from(page_bytes)
}

/// Makes the rows and the plot, and checks what has to hold.
pub(crate) fn run(args: &OffloadArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let places = places(args);
    let mut progress = Progress::new(places.len() as u64 + 2, args.common.json);
    let loaded = progress.step(&format!("a tree of {} keys", show_count(args.keys as f64)), || Loaded::load(args))?;
    let mut reporter = Reporter::new(out, args.common.json);
    let mut points = Vec::new();
    for place in places {
        let cached = show_percent(loaded.cache(place).cache_percent);
        let step = format!("threads of the memory server: {}; {cached}% cached", place.server_threads);
        points.extend(progress.step(&step, || loaded.by_turns(place))?);
    }
    progress.begin("check");
    drop(progress);
    plot::write_svg(&plots(&points), &path)?;
    reporter.note(&format!(
        "{} keys, zipf {}, {}% updates; {} workers with one operation in flight each;\n{} added to every remote operation, {} \
         for each page at the memory server; medians of {} runs",
        show_count(args.keys as f64),
        args.theta,
        args.update_percent,
        args.workers,
        show_nanoseconds(args.latency),
        show_nanoseconds(args.page_time),
        args.repeats
    ))?;
    for (name, title) in [("threads", "over the memory server's threads"), ("cache", "over the size of the cache")] {
        points.iter().filter(|point| point.place.name == name).try_for_each(|point| reporter.row(point.row.clone()))?;
        reporter.table(&format!("\n{title}\n"), show)?;
    }
    reporter.note(&format!("\nwrote {}", path.display()))?;
    reporter.check(&loaded.bed.check(&[NAME.to_owned()], args.keys)?)?;
    checks(args, &points).iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

/// Over the threads with the smallest cache, then over the caches with the most threads.
fn places(args: &OffloadArgs) -> Vec<Place> {
    let (percents, threads) = (&args.cache_percents, &args.server_threads);
    let smallest = percents.iter().copied().fold(f64::INFINITY, f64::min);
    let most = threads.iter().copied().max().unwrap_or(1);
    let by_threads =
        threads.iter().map(|&server_threads| Place { name: "threads", server_threads, cache_percent: smallest });
    let by_cache = percents.iter().map(|&cache_percent| Place { name: "cache", server_threads: most, cache_percent });
    by_threads.chain(by_cache).collect()
}

fn checks(args: &OffloadArgs, points: &[Point]) -> Vec<CheckRow> {
    let ratio = |policy: &str, server_threads: Option<&u32>| {
        let is_it = |point: &&Point| {
            point.place.name == "threads"
                && point.policy == policy
                && Some(&point.place.server_threads) == server_threads
        };
        points.iter().find(is_it).map_or(f64::NAN, |point| point.ratio)
    };
    let (fewest, most) = (args.server_threads.iter().min(), args.server_threads.iter().max());
    let checked = |name, ratio, bounds| CheckRow::within(name, ratio, bounds);
    let mut all = Vec::new();
    // With fewer they have none to spare.
    if most.is_some_and(|&most| most > 1 && most >= args.workers / 2) {
        let ratio = ratio("cost-aware", most);
        all.push(checked("cost-aware over never, threads to spare", ratio, SPARE_LEAST..=f64::MAX));
    }
    if fewest == Some(&1) {
        let (aware, always) = (ratio("cost-aware", fewest), ratio("always", fewest));
        all.push(checked("cost-aware over never, one overloaded thread", aware, OVERLOADED_LEAST..=f64::MAX));
        all.push(checked("always over never, one overloaded thread", always, 0.0..=COLLAPSED_MOST));
    }
    all
}

fn show(rows: &[Row]) -> comfy_table::Table {
    let header = [
        "policy",
        "cpus",
        "cache",
        "ops/s",
        "of\nnever",
        "p50\nus",
        "p99\nus",
        "read\n/op",
        "write\n/op",
        "msg\n/op",
        "ship\n/op",
    ];
    let line = |row: &Row| {
        vec![
            row.shown("policy"),
            row.shown("server_threads"),
            format!("{}%", show_percent(row.number("cache_percent").unwrap_or_default())),
            show_count(row.ops_per_second.unwrap_or(f64::NAN)),
            digits(row.number("ratio"), 2),
            micros(row.p50_ns),
            micros(row.p99_ns),
            digits(row.reads_per_op, 3),
            digits(row.writes_per_op, 3),
            digits(row.two_sided_per_op, 3),
            digits(row.number("shipped_per_op"), 3),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

fn plots(points: &[Point]) -> Vec<Plot> {
    let throughput: fn(&Row) -> Option<f64> = |row| Some(row.ops_per_second? / 1e3);
    let remote: fn(&Row) -> Option<f64> =
        |row| Some(row.reads_per_op? + row.writes_per_op? + row.atomics_per_op? + row.two_sided_per_op?);
    let xs = [("threads", "threads of the memory server"), ("cache", "cache, percent of the tree")];
    let x = |row: &Row| row.number(if row.name == "threads" { "server_threads" } else { "cache_percent" });
    let mut plots = Vec::new();
    for (y, y_label, what) in
        [(throughput, "thousand operations a second", "Throughput"), (remote, "per operation", "Remote operations")]
    {
        for (name, x_label) in xs {
            let points = points.iter().filter(|point| point.place.name == name);
            let points = points.filter_map(|point| Some((point.policy.to_owned(), x(&point.row)?, y(&point.row)?)));
            plots.push(Plot {
                title: format!("{what} by {x_label}"),
                x_label: x_label.to_owned(),
                x_scale: Scale::Logarithmic,
                y_label: y_label.to_owned(),
                lines: Line::by_name(points),
                y_max: None,
            });
        }
    }
    plots
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(Debug, clap::Parser)]
    struct Figure {
        #[command(flatten)]
        args: OffloadArgs,
    }

    #[test]
    fn checks_fail_beyond_their_bounds() {
        let args = Figure::parse_from(["figure", "--server-threads", "1,4"]).args;
        let points = |one: f64, always: f64, four: f64| {
            let point = |policy, server_threads, ratio| {
                let place = Place { name: "threads", server_threads, cache_percent: 1.0 };
                Point { place, policy, ratio, row: Row::default() }
            };
            [point("cost-aware", 1, one), point("always", 1, always), point("cost-aware", 4, four)]
        };
        let held = |points: &[Point]| checks(&args, points).iter().map(|check| check.ok).collect::<Vec<_>>();
        assert_eq!(held(&points(0.96, 0.5, 1.4)), [true, true, true]);
        assert_eq!(held(&points(0.94, 0.8, 1.2)), [false, false, false]);
        assert_eq!(held(&[]), [false, false, false]);
        let names = |threads| {
            let args = Figure::parse_from(["figure", "--server-threads", threads]).args;
            checks(&args, &[]).iter().map(|check| check.name.contains("overloaded")).collect::<Vec<_>>()
        };
        // What is said of one thread does not hold for two, nor is one to spare.
        assert_eq!((names("2,8"), names("1"), names("2")), (vec![false], vec![true, true], vec![]));
    }
}
