//! `farlink figure offload`: what shipping operations to a memory server brings, by the power that the memory server has and by
//! the size of the cache (DEX, VLDB 2024, figures 5, 8 and 13).
//!
//! Never, always and cost-aware, by turns in one run, medians: with a small cache over the number of the memory server's threads,
//! and with all its threads over the size of the cache. Every remote operation has a latency added to it, and the memory server
//! takes a set time for each page that an operation looks at.

mod bench;

use std::fs;
use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::Serialize;

use self::bench::{Bed, Choice, Done, Plan};
use super::args::OffloadArgs;
use super::plot::{self, Line, Plot};
use super::population::Population;
use crate::commands::all_held;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter};
use crate::units::{show_count, show_nanoseconds};

const FILE: &str = "offload.svg";
/// The least that a cache can work with.
const CACHE_BYTES_MIN: usize = 64 << 10;

/// What has to hold with one percent of the tree cached: cost-aware over never with threads to spare, and with one that is
/// overloaded; always over never then.
const SPARE_LEAST: f64 = 1.3;
const OVERLOADED_LEAST: f64 = 0.95;
const COLLAPSED_MOST: f64 = 0.7;

/// One row.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    name: &'static str,
    /// `never`, `always`, `cost-aware`.
    policy: &'static str,
    server_threads: usize,
    cache_percent: f64,
    cache_bytes: usize,
    workers: usize,
    in_flight: u32,
    latency_ns: u64,
    page_ns: u64,
    repeats: u32,
    ops: u64,
    seconds: f64,
    ops_per_second: f64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    p999_ns: Option<u64>,
    reads_per_op: f64,
    writes_per_op: f64,
    atomics_per_op: f64,
    two_sided_per_op: f64,
    bytes_per_op: f64,
    round_trips_per_op: f64,
    /// Operations that a memory server has carried out, sent back, and those chosen to learn from.
    shipped_per_op: f64,
    came_back_per_op: f64,
    contrary_per_op: f64,
    /// Throughput as a multiple of never's: the median of those of each round.
    ratio: f64,
}

impl Row {
    fn remote_per_op(&self) -> f64 {
        self.reads_per_op + self.writes_per_op + self.atomics_per_op + self.two_sided_per_op
    }
}

/// Where a run stands in the figure.
#[derive(Debug, Clone, Copy)]
struct Place {
    name: &'static str,
    server_threads: usize,
    cache_percent: f64,
}

fn row(args: &OffloadArgs, place: Place, plan: Plan, mut done: Done) -> Row {
    done.latencies_ns.sort_unstable();
    let percentile = |share: f64| {
        let last = done.latencies_ns.len().checked_sub(1)?;
        done.latencies_ns.get((last as f64 * share).round() as usize).copied()
    };
    let per_op = |count: u64| count as f64 / done.ops.max(1) as f64;
    let (counters, engine) = (done.counters, done.engine);
    Row {
        name: place.name,
        policy: plan.choice.name(),
        server_threads: place.server_threads,
        cache_percent: place.cache_percent,
        cache_bytes: plan.cache_bytes,
        workers: args.workers,
        in_flight: 1,
        latency_ns: args.latency,
        page_ns: args.page_time,
        repeats: args.repeats,
        ops: done.ops,
        seconds: done.seconds,
        ops_per_second: done.per_second(),
        p50_ns: percentile(0.5),
        p99_ns: percentile(0.99),
        p999_ns: percentile(0.999),
        reads_per_op: per_op(counters.reads),
        writes_per_op: per_op(counters.writes),
        atomics_per_op: per_op(counters.atomics),
        two_sided_per_op: per_op(counters.two_sided),
        bytes_per_op: per_op(counters.bytes),
        round_trips_per_op: per_op(counters.round_trips),
        shipped_per_op: per_op(engine.shipped),
        came_back_per_op: per_op(engine.came_back),
        contrary_per_op: per_op(engine.contrary),
        ratio: f64::NAN,
    }
}

/// Each policy once a round, another one first each time; medians by throughput, and of the quotients of each round.
fn by_turns(args: &OffloadArgs, bed: &Bed, population: &Population, place: Place) -> anyhow::Result<Vec<Row>> {
    let cache_bytes = ((bed.tree_bytes as f64 * place.cache_percent / 100.0) as usize).max(CACHE_BYTES_MIN);
    let plan = |choice, round| Plan {
        choice,
        server_threads: place.server_threads,
        page_ns: args.page_time,
        cache_bytes,
        workers: args.workers,
        update_percent: args.update_percent,
        warm_up: Duration::from_secs_f64(args.warm_up_seconds),
        measured: Duration::from_secs_f64(args.seconds),
        seed: args.seed + round as u64,
    };
    let mut runs: [Vec<Row>; 3] = Default::default();
    for round in 0..args.repeats as usize {
        for step in 0..Choice::ALL.len() {
            let at = (round + step) % Choice::ALL.len();
            let plan = plan(Choice::ALL[at], round);
            runs[at].push(row(args, place, plan, bed.run(plan, population)?));
        }
    }
    // Within each round, where whatever else the machine does meets all alike.
    let never: Vec<f64> = runs[0].iter().map(|row| row.ops_per_second).collect();
    let median = |mut rows: Vec<Row>| {
        let mut ratios: Vec<f64> = rows.iter().zip(&never).map(|(row, never)| row.ops_per_second / never).collect();
        ratios.sort_by(f64::total_cmp);
        rows.sort_by(|a, b| a.ops_per_second.total_cmp(&b.ops_per_second));
        let middle = rows.len() / 2;
        Row { ratio: ratios[middle], ..rows.swap_remove(middle) }
    };
    Ok(runs.into_iter().map(median).collect())
}

/// Makes the rows and the plot, and checks what has to hold.
pub(crate) fn run(args: &OffloadArgs, mut out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let population = Population::new(args.keys, args.theta, 1, args.seed)?;
    let places = places(args);
    let mut progress = Progress::new(places.len() as u64 + 1, args.json);
    progress.begin(&format!("a tree of {} keys", show_count(args.keys as f64)));
    let bed = Bed::load(&population, args.page_bytes, args.fill, args.latency)?;
    progress.finish_step();
    let mut rows = Vec::new();
    for place in places {
        let Place { server_threads, cache_percent, .. } = place;
        progress.begin(&format!("threads of the memory server: {server_threads}; {cache_percent}% cached"));
        rows.extend(by_turns(args, &bed, &population, place)?);
        progress.finish_step();
    }
    drop(progress);
    let path = args.out.join(FILE);
    plot::write_svg(&plots(&rows), &path)?;
    if args.json {
        for row in &rows {
            serde_json::to_writer(&mut out, row)?;
            writeln!(out)?;
        }
    } else {
        print(args, &rows, &mut out)?;
        writeln!(out, "\nwrote {}", path.display())?;
    }
    let mut reporter = Reporter::new(out, args.json);
    reporter.check(&bed.check()?)?;
    for check in checks(args, &rows) {
        reporter.check(&check)?;
    }
    all_held(&reporter)
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

fn checks(args: &OffloadArgs, rows: &[Row]) -> Vec<CheckRow> {
    let ratio = |policy: &str, server_threads: Option<usize>| {
        let is_it =
            |row: &&Row| row.name == "threads" && row.policy == policy && Some(row.server_threads) == server_threads;
        rows.iter().find(is_it).map_or(f64::NAN, |row| row.ratio)
    };
    let (fewest, most) = (args.server_threads.iter().copied().min(), args.server_threads.iter().copied().max());
    let rounded = |ratio: f64| (ratio * 1000.0).round() / 1000.0;
    let least = |name: &str, ratio: f64, bound: f64| {
        let problem = (ratio.is_nan() || ratio < bound).then(|| format!("{ratio:.3} is below {bound}"));
        CheckRow::new(name, problem).count("ratio", rounded(ratio))
    };
    let collapsed = ratio("always", fewest);
    let problem = (collapsed.is_nan() || collapsed > COLLAPSED_MOST)
        .then(|| format!("{collapsed:.3} is above {COLLAPSED_MOST}: the thread is not overloaded"));
    vec![
        least("cost-aware over never, threads to spare", ratio("cost-aware", most), SPARE_LEAST),
        least("cost-aware over never, one overloaded thread", ratio("cost-aware", fewest), OVERLOADED_LEAST),
        CheckRow::new("always over never, one overloaded thread", problem).count("ratio", rounded(collapsed)),
    ]
}

fn print(args: &OffloadArgs, rows: &[Row], out: &mut impl Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "{} keys, zipf {}, {}% updates; {} workers with one operation in flight each;\n{} added to every remote operation, {} for each page at the memory server; medians of {} runs",
        show_count(args.keys as f64),
        args.theta,
        args.update_percent,
        args.workers,
        show_nanoseconds(args.latency),
        show_nanoseconds(args.page_time),
        args.repeats
    )?;
    for (name, title) in [("threads", "over the memory server's threads"), ("cache", "over the size of the cache")] {
        let mut table = Table::new();
        let rule = LineStyle::none().fill('─').junction('─');
        table.load_style(TableStyle::new().header_separator(rule).bottom_border(rule));
        table.set_header([
            "threads",
            "cache",
            "policy",
            "ops/s",
            "of never",
            "p50",
            "p99",
            "reads/op",
            "writes/op",
            "messages/op",
            "shipped/op",
        ]);
        for row in rows.iter().filter(|row| row.name == name) {
            let time = |ns: Option<u64>| ns.map_or_else(String::new, show_nanoseconds);
            table.add_row([
                row.server_threads.to_string(),
                format!("{}%", row.cache_percent),
                row.policy.to_owned(),
                show_count(row.ops_per_second),
                format!("{:.2}", row.ratio),
                time(row.p50_ns),
                time(row.p99_ns),
                format!("{:.3}", row.reads_per_op),
                format!("{:.3}", row.writes_per_op),
                format!("{:.3}", row.two_sided_per_op),
                format!("{:.3}", row.shipped_per_op),
            ]);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((u16::from(index > 0), 0));
            column.set_cell_alignment(if index == 2 { CellAlignment::Left } else { CellAlignment::Right });
        }
        writeln!(out, "\n{title}\n{table}")?;
    }
    Ok(())
}

fn plots(rows: &[Row]) -> Vec<Plot> {
    let lines = |name: &str, x: fn(&Row) -> f64, y: fn(&Row) -> f64| {
        let line = |choice: Choice| {
            let rows = rows.iter().filter(|row| row.name == name && row.policy == choice.name());
            Line { name: choice.name().to_owned(), points: rows.map(|row| (x(row), y(row))).collect() }
        };
        Choice::ALL.map(line).into()
    };
    let throughput: fn(&Row) -> f64 = |row| row.ops_per_second / 1e3;
    let remote: fn(&Row) -> f64 = Row::remote_per_op;
    let mut plots = Vec::new();
    for (y, y_label, what) in
        [(throughput, "thousand operations a second", "Throughput"), (remote, "per operation", "Remote operations")]
    {
        for (name, x, x_label) in [
            ("threads", (|row| row.server_threads as f64) as fn(&Row) -> f64, "threads of the memory server"),
            ("cache", |row| row.cache_percent, "cache, percent of the tree"),
        ] {
            plots.push(Plot {
                title: format!("{what} by {x_label}"),
                x_label: x_label.to_owned(),
                y_label: y_label.to_owned(),
                lines: lines(name, x, y),
                y_max: None,
            });
        }
    }
    plots
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::figure::args::Figure;
    use clap::Parser as _;
    use serde_json::Value;

    fn args(options: &str) -> OffloadArgs {
        let line = ["farlink", "figure", "offload"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::Offload(args) = figure.figure else { panic!("another figure") };
        args
    }

    #[test]
    fn every_policy_has_its_rows_and_does_what_it_says() {
        let folder = tempfile::tempdir().unwrap();
        let small = "--json --keys 30000 --server-threads 1,2 --cache-percents 4,50 --workers 2 --seconds 0.05 \
                     --warm-up-seconds 0.05 --repeats 1 --out";
        let mut printed = Vec::new();
        // What it measures in such a short run is worth nothing: whether its checks of speed hold is not asked.
        let _ = run(&args(&format!("{small} {}", folder.path().display())), &mut printed);
        let text = String::from_utf8(printed).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 4 * 3 + 4, "{text}");
        for rows in lines[..12].chunks(3) {
            let shipped = |row: &Value| row["shipped_per_op"].as_f64().unwrap();
            assert_eq!(shipped(&rows[0]), 0.0);
            assert!(shipped(&rows[1]) > 0.0 && rows.iter().all(|row| row["ops"].as_u64().unwrap() > 0), "{rows:?}");
        }
        assert_eq!(lines[12]["ok"], true, "{text}");
        assert!(fs::read_to_string(folder.path().join(FILE)).unwrap().contains("cost-aware"));
    }

    #[test]
    fn checks_fail_beyond_their_bounds() {
        let args = args("--server-threads 1,4");
        let rows = |one: f64, always: f64, four: f64| {
            let row = |policy, server_threads, ratio| Row {
                name: "threads",
                policy,
                server_threads,
                ratio,
                ..Row::default()
            };
            [row("cost-aware", 1, one), row("always", 1, always), row("cost-aware", 4, four)]
        };
        let held = |rows: &[Row]| checks(&args, rows).iter().map(|check| check.ok).collect::<Vec<_>>();
        assert_eq!(held(&rows(0.96, 0.5, 1.4)), [true, true, true]);
        assert_eq!(held(&rows(0.94, 0.8, 1.2)), [false, false, false]);
        assert_eq!(held(&[]), [false, false, false]);
    }

    #[test]
    fn impossible_numbers_are_errors() {
        for options in
            ["--repeats 0", "--workers 0", "--seconds 0", "--page-bytes 100", "--fill 2", "--server-threads 0"]
        {
            assert!(args(options).validate().is_err(), "{options}");
        }
        assert!(args("").validate().is_ok());
    }
}
