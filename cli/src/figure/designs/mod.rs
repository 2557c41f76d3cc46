//! `farlink figure fg-cg-hybrid`: fine-grained, coarse-grained and hybrid trees side by side (Ziegler et al., SIGMOD 2019,
//! figures 7 to 9).
//!
//! Point and range queries over the number of clients, each with one query at a time, at places drawn uniformly. The data are
//! divided evenly among the memory servers, or 80, 12, 5 and 3 percent of them; the fine-grained design, and the division by hash,
//! do not care. A query has a latency added to each of its remote operations, a memory server's card lets through so many bytes a
//! second, and its processors take a set time for each page that they look at.

mod bench;

use std::fs;
use std::io::Write;

use anyhow::Context as _;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::Serialize;

use self::bench::{Bed, Data, Design, Done, Query};
use super::args::DesignsArgs;
use super::plot::{self, Line, Plot};
use crate::commands::all_held;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter};
use crate::units::{show_bytes, show_count, show_nanoseconds};

const FILE: &str = "fg-cg-hybrid.svg";

/// What has to hold with the most clients. Point queries: hybrid over fine-grained, which reads a page for each level. Range
/// queries on skewed data: hybrid over coarse-grained, which has one server's bandwidth; and what hybrid and fine-grained keep of
/// what they do on uniform data, at least, and coarse-grained, at most.
const POINT_LEAST: f64 = 1.2;
const RANGE_LEAST: f64 = 1.3;
const KEPT_LEAST: f64 = 0.8;
const KEPT_MOST: f64 = 0.7;

/// One row.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    name: &'static str,
    /// `fine-grained`, `coarse, range`, `coarse, hash`, `hybrid`.
    design: &'static str,
    /// `uniform` or `skewed`.
    data: &'static str,
    /// The share of all keys that a query asks for; 0 for one key.
    selectivity: f64,
    clients: usize,
    memory_servers: usize,
    server_threads: usize,
    latency_ns: u64,
    page_ns: u64,
    bandwidth_bytes_per_second: u64,
    keys: u64,
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
}

fn row(args: &DesignsArgs, (design, data): (Design, Data), selectivity: f64, clients: usize, mut done: Done) -> Row {
    done.latencies_ns.sort_unstable();
    let percentile = |share: f64| {
        let last = done.latencies_ns.len().checked_sub(1)?;
        done.latencies_ns.get((last as f64 * share).round() as usize).copied()
    };
    let per_op = |count: u64| count as f64 / done.ops.max(1) as f64;
    let counters = done.counters;
    Row {
        name: if selectivity == 0.0 { "point" } else { "range" },
        design: design.name(),
        data: data.name(),
        selectivity,
        clients,
        memory_servers: args.memory_servers,
        server_threads: args.server_threads,
        latency_ns: args.latency,
        page_ns: args.page_time,
        bandwidth_bytes_per_second: args.bandwidth,
        keys: args.keys,
        ops: done.ops,
        seconds: done.seconds,
        ops_per_second: done.ops as f64 / done.seconds,
        p50_ns: percentile(0.5),
        p99_ns: percentile(0.99),
        p999_ns: percentile(0.999),
        reads_per_op: per_op(counters.reads),
        writes_per_op: per_op(counters.writes),
        atomics_per_op: per_op(counters.atomics),
        two_sided_per_op: per_op(counters.two_sided),
        bytes_per_op: per_op(counters.bytes),
        round_trips_per_op: per_op(counters.round_trips),
    }
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &DesignsArgs, mut out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let all: Vec<_> = Data::ALL.into_iter().flat_map(|data| Design::ALL.map(|design| (design, data))).collect();
    let selectivities: Vec<f64> = [0.0].into_iter().chain(args.selectivities.iter().copied()).collect();
    let mut progress = Progress::new((all.len() * selectivities.len()) as u64, args.json);
    let bed = Bed::start(args)?;
    let mut rows = Vec::new();
    for &(design, data) in &all {
        let tree = bed.load(design, data)?;
        for &selectivity in &selectivities {
            let what = if selectivity == 0.0 { "point queries".to_owned() } else { format!("ranges of {selectivity}") };
            progress.begin(&format!("{}, {} data, {what}", design.name(), data.name()));
            let query = match selectivity {
                0.0 => Query::Point,
                share => Query::Range(((args.keys as f64 * share) as u64).clamp(1, args.keys)),
            };
            for &clients in &args.clients {
                rows.push(row(args, (design, data), selectivity, clients, bed.run(&tree, query, clients)?));
            }
            progress.finish_step();
        }
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
    for check in bed.check(&all)?.into_iter().chain(checks(&rows)) {
        reporter.check(&check)?;
    }
    all_held(&reporter)
}

/// What the rows with the most clients say.
fn checks(rows: &[Row]) -> Vec<CheckRow> {
    let most = rows.iter().map(|row| row.clients).max().unwrap_or(0);
    let find = |name: &str, design: Design, data: Data| {
        // Of several selectivities the largest: the leaves count for the most.
        let fits =
            |row: &&Row| (row.name, row.design, row.data, row.clients) == (name, design.name(), data.name(), most);
        rows.iter().filter(fits).max_by(|a, b| a.selectivity.total_cmp(&b.selectivity))
    };
    let rate = |name: &str, design, data| find(name, design, data).map_or(f64::NAN, |row| row.ops_per_second);
    let mut all = Vec::new();
    for data in Data::ALL {
        let costs = |design, messages: f64, reads: f64| {
            let Some(row) = find("point", design, data) else { return Some("there is no such row".to_owned()) };
            let (had, had_reads) = (row.two_sided_per_op, row.reads_per_op);
            // A run ends in the midst of some queries.
            let is_so = (had - messages).abs() < 0.1 && (had_reads - reads).abs() < 0.1;
            (!is_so).then(|| format!("{}: {had:.2} messages and {had_reads:.2} READs a query", design.name()))
        };
        let problem = costs(Design::CoarseRange, 1.0, 0.0)
            .or_else(|| costs(Design::CoarseHash, 1.0, 0.0))
            .or_else(|| costs(Design::Hybrid, 1.0, 1.0));
        let name = format!("a message, and with hybrid a READ, for a point query, {} data", data.name());
        all.push(CheckRow::new(&name, problem));
    }
    let mut ratio = |name: &str, ratio: f64, least: Option<f64>, most: Option<f64>| {
        let fails = ratio.is_nan() || least.is_some_and(|least| ratio < least) || most.is_some_and(|most| ratio > most);
        let bound =
            least.map_or_else(|| format!("{} at most", most.unwrap_or(f64::NAN)), |least| format!("{least} at least"));
        let problem = fails.then(|| format!("{ratio:.3}, not {bound}"));
        all.push(CheckRow::new(name, problem).count("ratio", (ratio * 1000.0).round() / 1000.0));
    };
    for data in Data::ALL {
        let over = rate("point", Design::Hybrid, data) / rate("point", Design::Fine, data);
        ratio(&format!("point queries, {} data: hybrid over fine-grained", data.name()), over, Some(POINT_LEAST), None);
    }
    let over = rate("range", Design::Hybrid, Data::Skewed) / rate("range", Design::CoarseRange, Data::Skewed);
    ratio("range queries, skewed data: hybrid over coarse-grained", over, Some(RANGE_LEAST), None);
    for design in [Design::Fine, Design::Hybrid, Design::CoarseRange] {
        let kept = rate("range", design, Data::Skewed) / rate("range", design, Data::Uniform);
        let is_bound = design == Design::CoarseRange;
        let (least, most) = if is_bound { (None, Some(KEPT_MOST)) } else { (Some(KEPT_LEAST), None) };
        ratio(&format!("range queries: {} on skewed over uniform data", design.name()), kept, least, most);
    }
    all
}

fn print(args: &DesignsArgs, rows: &[Row], out: &mut impl Write) -> anyhow::Result<()> {
    writeln!(
        out,
        "{} keys in pages of {}; {} memory servers, each with {} processors that take {} for a page, \n\
         and a card for {}/s; {} added to every remote operation",
        show_count(args.keys as f64),
        show_bytes(args.page_bytes as u64),
        args.memory_servers,
        args.server_threads,
        show_nanoseconds(args.page_time),
        show_bytes(args.bandwidth),
        show_nanoseconds(args.latency),
    )?;
    let mut kinds: Vec<(&str, f64)> = Vec::new();
    for row in rows {
        if !kinds.iter().any(|&(data, share)| data == row.data && share == row.selectivity) {
            kinds.push((row.data, row.selectivity));
        }
    }
    for (data, selectivity) in kinds {
        let mut table = Table::new();
        let rule = LineStyle::none().fill('─').junction('─');
        table.load_style(TableStyle::new().header_separator(rule).bottom_border(rule));
        table.set_header(["design", "clients", "ops/s", "p50", "p99", "READs/op", "messages/op", "bytes/op"]);
        for row in rows.iter().filter(|row| row.data == data && row.selectivity == selectivity) {
            let nanoseconds = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), show_nanoseconds);
            table.add_row(vec![
                row.design.to_owned(),
                row.clients.to_string(),
                show_count(row.ops_per_second),
                nanoseconds(row.p50_ns),
                nanoseconds(row.p99_ns),
                format!("{:.2}", row.reads_per_op),
                format!("{:.2}", row.two_sided_per_op),
                show_bytes(row.bytes_per_op as u64),
            ]);
        }
        for (index, column) in table.column_iter_mut().enumerate() {
            column.set_padding((u16::from(index > 0), 0));
            column.set_cell_alignment(if index == 0 { CellAlignment::Left } else { CellAlignment::Right });
        }
        let what = if selectivity == 0.0 {
            "point queries".to_owned()
        } else {
            format!("queries for {}% of the keys", selectivity * 100.0)
        };
        writeln!(out, "\n{what}, {data} data\n{table}")?;
    }
    Ok(())
}

fn plots(rows: &[Row]) -> Vec<Plot> {
    let mut selectivities: Vec<f64> = rows.iter().map(|row| row.selectivity).collect();
    selectivities.sort_by(f64::total_cmp);
    selectivities.dedup();
    let mut plots = Vec::new();
    for selectivity in selectivities {
        for data in Data::ALL {
            let line = |design: Design| {
                let is_it = |row: &&Row| {
                    (row.design, row.data) == (design.name(), data.name()) && row.selectivity == selectivity
                };
                let points = rows.iter().filter(is_it).map(|row| (row.clients as f64, row.ops_per_second)).collect();
                Line { name: design.name().to_owned(), points }
            };
            let what = if selectivity == 0.0 { "Point queries".into() } else { format!("Ranges of {selectivity}") };
            plots.push(Plot {
                title: format!("{what}, {} data", data.name()),
                x_label: "clients".to_owned(),
                y_label: "operations a second".to_owned(),
                lines: Design::ALL.map(line).into(),
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

    fn args(options: &str) -> DesignsArgs {
        let line = ["farlink", "figure", "fg-cg-hybrid"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::FgCgHybrid(args) = figure.figure else { panic!("another figure") };
        args
    }

    #[test]
    fn every_design_has_its_rows_and_costs_what_it_should() {
        let folder = tempfile::tempdir().unwrap();
        let small =
            "--json --keys 20000 --clients 2,8 --selectivities 0.01 --seconds 0.03 --warm-up-seconds 0.01 --out";
        let mut printed = Vec::new();
        // What it measures in such a short run is worth nothing: whether its checks of speed hold is not asked.
        let _ = run(&args(&format!("{small} {}", folder.path().display())), &mut printed);
        let text = String::from_utf8(printed).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2 * 4 * 2 * 2 + 8 + 2 + 6, "{text}");
        let (rows, checks) = lines.split_at(32);
        assert!(rows.iter().all(|row| row["ops"].as_u64().unwrap() > 0), "{text}");
        let points =
            |design: &'static str| rows.iter().filter(move |row| row["design"] == design && row["name"] == "point");
        let cost = |row: &Value, what: &str| row[what].as_f64().unwrap().round() as u64;
        for (design, messages, reads) in
            [("coarse, range", 1, 0), ("coarse, hash", 1, 0), ("hybrid", 1, 1), ("fine-grained", 0, 3)]
        {
            assert_eq!(points(design).count(), 4);
            for row in points(design) {
                assert_eq!((cost(row, "two_sided_per_op"), cost(row, "reads_per_op")), (messages, reads), "{row}");
            }
        }
        // The trees are sound.
        assert!(checks[..8].iter().all(|check| check["ok"] == true), "{text}");
        assert!(fs::read_to_string(folder.path().join(FILE)).unwrap().contains("hybrid"));
    }

    #[test]
    fn keys_are_divided_as_the_paper_says() {
        assert_eq!(Data::Skewed.bounds(4, 1000), [0, 800, 920, 970, 1000]);
        assert_eq!(Data::Uniform.bounds(4, 1000), [0, 250, 500, 750, 1000]);
    }

    #[test]
    fn checks_fail_beyond_their_bounds() {
        let rows = |hybrid_point: f64, coarse_skewed: f64, hybrid_skewed: f64, messages: f64| {
            let mut rows = Vec::new();
            for data in Data::ALL {
                for design in Design::ALL {
                    let (reads, two_sided) = match design {
                        Design::Fine => (3.0, 0.0),
                        Design::Hybrid => (1.0, messages),
                        _ => (0.0, 1.0),
                    };
                    let point = if design == Design::Hybrid { hybrid_point } else { 1.0 };
                    let range = match (data, design) {
                        (Data::Skewed, Design::CoarseRange) => coarse_skewed,
                        (Data::Skewed, Design::Hybrid) => hybrid_skewed,
                        _ => 1.0,
                    };
                    for (name, ops_per_second) in [("point", point), ("range", range)] {
                        rows.push(Row {
                            name,
                            design: design.name(),
                            data: data.name(),
                            clients: 9,
                            ops_per_second,
                            reads_per_op: reads,
                            two_sided_per_op: two_sided,
                            ..Row::default()
                        });
                    }
                }
            }
            rows
        };
        let failed = |rows: &[Row]| checks(rows).iter().filter(|check| !check.ok).count();
        assert_eq!(failed(&rows(1.3, 0.5, 1.0, 1.0)), 0);
        assert_eq!(failed(&rows(1.1, 0.5, 1.0, 1.0)), 2);
        assert_eq!(failed(&rows(1.3, 0.9, 1.0, 1.0)), 2);
        assert_eq!(failed(&rows(1.3, 0.5, 0.6, 2.0)), 2 + 2);
        assert_eq!(failed(&[]), 8);
    }

    #[test]
    fn impossible_numbers_are_errors() {
        for options in
            ["--clients 0", "--clients 300", "--selectivities 2", "--seconds 0", "--memory-servers 0", "--fill 2"]
        {
            assert!(args(options).validate().is_err(), "{options}");
        }
        assert!(args("").validate().is_ok());
    }
}
