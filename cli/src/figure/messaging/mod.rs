//! `farlink figure messaging`: what the paths of a message are worth, by its size (FBX, figures 4.2 to 4.6).
//!
//! Three questions, each measured by turns in many short rounds of one run: throughput of the ring, of announcing and fetching,
//! and of the hybrid that chooses by size; what it brings to send several small messages in one write; and what two sizes
//! do to each other when they are sent at once.
//!
//! Throughputs are medians. What is compared is compared within each round, where whatever else the machine does meets all
//! alike, and the median of those quotients counts. Rounds go on until that median is known well enough, or there are many
//! times as many as were asked for: on a busy machine that takes longer.
//!
//! What coalescing saves are remote operations. Where one is a copy by the processor it costs little, so that table is measured
//! twice: on the `mem` fabric as it is, and with a modelled card, for which a remote operation has a latency and which takes only
//! so many a second on one connection. Its numbers are printed with the table; the check is on that one.

mod bench;

use std::fs;
use std::io::{self, Write};

use anyhow::Context as _;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::messaging::{MESSAGE_WORDS_MAX, Priority, SwitchOver, WINDOW};
use serde::Serialize;

use self::bench::{Bench, Done, Stream};
use super::args::MessagingArgs;
use super::plot::{self, Line, Plot};
use crate::commands::all_held;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter};
use crate::units::{show_bytes, show_count, show_nanoseconds};

const FILE: &str = "messaging.svg";
/// Messages in flight: as many as fit into this many bytes, within bounds.
const WINDOW_BYTES: usize = 1 << 20;
const IN_FLIGHT: std::ops::RangeInclusive<usize> = 4..=3 * WINDOW / 4;
/// How often the window is sent in one run at least: its beginning and end are not what is measured.
const LAPS_MIN: u64 = 4;
/// Messages of one run at most.
const MESSAGES_MAX: u64 = 40_000;
const SMALL: [usize; 4] = [16, 64, 256, 1024];
/// Sizes that are sent at once.
const PAIRS: [(usize, usize); 4] = [(64, 4096), (64, 64 << 10), (64, 1 << 20), (4096, 1 << 20)];
/// A quotient is known well enough if its median lies within so much of what was found, with 95 of a hundred chances.
const PRECISION: f64 = 0.015;
/// Rounds at most, as a multiple of those at least.
const ROUNDS_FACTOR_MAX: usize = 8;
/// Their rounds at most: each is long.
const PAIR_REPEATS_MAX: u32 = 7;

/// What has to hold.
const HYBRID_LEAST: f64 = 0.95;
const COALESCING_LEAST: f64 = 2.0;

/// One row.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    name: &'static str,
    /// `ring`, `rendezvous`, `hybrid`; `coalesced`, `single`; `alone`, `together`, `prioritised`.
    mode: &'static str,
    bytes: usize,
    /// The other size that was sent at the same time.
    other_bytes: Option<usize>,
    in_flight: usize,
    latency_ns: u64,
    /// What a card is modelled to need for each remote operation; 0 for none.
    request_ns: u64,
    repeats: u32,
    ops: u64,
    seconds: f64,
    ops_per_second: f64,
    bytes_per_second: f64,
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    /// Throughput as a multiple of what it is held against: the better of ring and rendezvous, single writes, alone.
    ratio: Option<f64>,
}

fn stream(args: &MessagingArgs, bytes: usize) -> Stream {
    let in_flight = (WINDOW_BYTES / bytes).clamp(*IN_FLIGHT.start(), *IN_FLIGHT.end());
    // What surrounds a small message costs more than it does.
    let messages = args.bytes / (bytes as u64 + 512);
    let messages = messages.clamp(LAPS_MIN * in_flight as u64, MESSAGES_MAX);
    Stream { bytes, in_flight, priority: Priority::BestEffort, messages }
}

fn row(name: &'static str, mode: &'static str, args: &MessagingArgs, stream: Stream, done: &Done) -> Row {
    Row {
        name,
        mode,
        bytes: stream.bytes,
        in_flight: stream.in_flight,
        latency_ns: args.latency,
        repeats: args.repeats,
        ops: done.messages,
        seconds: done.seconds,
        ops_per_second: done.per_second(),
        bytes_per_second: done.per_second() * stream.bytes as f64,
        ..Row::default()
    }
}

/// The median by throughput.
fn median(mut runs: Vec<Done>) -> Done {
    runs.sort_by(|a, b| a.per_second().total_cmp(&b.per_second()));
    runs.swap_remove(runs.len() / 2)
}

/// What the one has as a multiple of the other, round by round, sorted.
fn quotients(these: &[Done], others: &[Done]) -> Vec<f64> {
    let mut quotients: Vec<f64> = these.iter().zip(others).map(|(a, b)| a.per_second() / b.per_second()).collect();
    quotients.sort_by(f64::total_cmp);
    quotients
}

/// The median of what the one has as a multiple of the other.
fn paired(these: &[Done], others: &[Done]) -> f64 {
    let quotients = quotients(these, others);
    quotients.get(quotients.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Whether the median of sorted values is known well enough, whatever their distribution: it is above so many of them, and
/// below so many, with 95 of a hundred chances.
fn is_precise(sorted: &[f64]) -> bool {
    let count = sorted.len() as f64;
    let below = ((count - 1.96 * count.sqrt()) / 2.0).floor();
    if below < 0.0 || sorted.is_empty() {
        return false;
    }
    let (low, high) = (sorted[below as usize], sorted[sorted.len() - 1 - below as usize]);
    let median = sorted[sorted.len() / 2];
    (median - low).max(high - median) <= PRECISION * median
}

/// Whether it is known well enough what the last mode has as a multiple of the best of the others.
fn is_settled(runs: &[Vec<Done>]) -> bool {
    let Some((these, others)) = runs.split_last() else { return true };
    let quotients = others.iter().map(|others| quotients(these, others));
    let over_best = quotients.min_by(|a, b| a[a.len() / 2].total_cmp(&b[b.len() / 2]));
    over_best.is_none_or(|quotients| is_precise(&quotients))
}

/// Runs each mode once a round, another one first each time; of each mode, the rounds in order. At least so many rounds, and
/// more until what the last mode is worth is known well enough.
fn by_turns<const N: usize>(
    repeats: u32,
    mut run: impl FnMut(usize) -> anyhow::Result<Done>,
) -> anyhow::Result<[Vec<Done>; N]> {
    let mut runs: [Vec<Done>; N] = std::array::from_fn(|_| Vec::new());
    let repeats = repeats as usize;
    for round in 0..repeats * ROUNDS_FACTOR_MAX {
        if round >= repeats && is_settled(&runs) {
            break;
        }
        for step in 0..N {
            // Forwards and backwards: none always comes after the same other one.
            let step = if (round / N).is_multiple_of(2) { step } else { N - step };
            let mode = (round + step) % N;
            runs[mode].push(run(mode)?);
        }
    }
    Ok(runs)
}

/// Makes the rows and the plot, and checks what has to hold.
pub(crate) fn run(args: &MessagingArgs, out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let options = MemOptions { latency_ns: args.latency, ..MemOptions::default() };
    let bench = Bench::start(options, args.seed)?;
    let switch_words = bench.channel().switch_words();
    let sizes = args.sizes();
    let mut progress = Progress::new((sizes.len() + 2 * SMALL.len() + PAIRS.len()) as u64, args.json);
    let mut paths = Vec::new();
    for &bytes in &sizes {
        progress.begin(&format!("messages of {}", show_bytes(bytes as u64)));
        paths.extend(paths_of(&bench, args, bytes)?);
        progress.finish_step();
    }
    bench.channel().set_switch_over(SwitchOver::Measured);
    let mut small = |bench: &Bench, options: &MemOptions| -> anyhow::Result<Vec<Row>> {
        let mut rows = Vec::new();
        for bytes in SMALL {
            progress.begin(&format!("messages of {}, singly", show_bytes(bytes as u64)));
            rows.extend(writes_of(bench, args, options, bytes)?);
            progress.finish_step();
        }
        Ok(rows)
    };
    let writes = small(&bench, &options)?;
    // One at a time: their threads keep cores busy.
    drop(bench);
    let card = MemOptions { latency_ns: args.card_latency, request_ns: args.card_request, ..options };
    let bench = Bench::start(card, args.seed)?;
    let card_writes = small(&bench, &card)?;
    drop(bench);
    let bench = Bench::start(options, args.seed)?;
    let mut pairs = Vec::new();
    for (small, large) in PAIRS {
        progress.begin("two sizes at once");
        pairs.extend(pair_of(&bench, args, small, large)?);
        progress.finish_step();
    }
    drop(progress);
    let path = args.out.join(FILE);
    plot::write_svg(&[throughput_plot(&paths), coalescing_plot(&card_writes)], &path)?;

    let mut out = out;
    if args.json {
        for row in paths.iter().chain(&writes).chain(&card_writes).chain(&pairs) {
            serde_json::to_writer(&mut out, row)?;
            writeln!(out)?;
        }
    } else {
        let switch = if switch_words >= MESSAGE_WORDS_MAX {
            "no message".to_owned()
        } else {
            format!("messages of more than {}", show_bytes(switch_words as u64 * 8))
        };
        writeln!(
            out,
            "measured at start: {switch} had better be announced and fetched; medians of {} runs or more",
            args.repeats
        )?;
        print_paths(&paths, &mut out)?;
        writeln!(out, "\nseveral messages in one write, {}", setting(&options))?;
        print_writes(&writes, &mut out)?;
        writeln!(out, "\nseveral messages in one write, {}", setting(&card))?;
        print_writes(&card_writes, &mut out)?;
        print_pairs(&pairs, &mut out)?;
        writeln!(out, "\nwrote {}", path.display())?;
    }
    let mut reporter = Reporter::new(out, args.json);
    reporter.check(&least("hybrid over the better of ring and rendezvous", HYBRID_LEAST, &paths, |row| {
        row.mode == "hybrid"
    }))?;
    let smallest = |row: &Row| row.mode == "coalesced" && row.bytes == SMALL[0];
    reporter.check(&least(
        "coalescing over single writes at 16 B, with a modelled card",
        COALESCING_LEAST,
        &card_writes,
        smallest,
    ))?;
    all_held(&reporter)
}

/// Whether the least ratio of these rows is as large as it should be.
fn least(name: &str, bound: f64, rows: &[Row], which: impl Fn(&Row) -> bool) -> CheckRow {
    let ratios = rows.iter().filter(|row| which(row)).filter_map(|row| Some((row.ratio?, row.bytes)));
    let (least, bytes) = ratios.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::NAN, 0));
    let problem = (least.is_nan() || least < bound).then(|| format!("{least:.2} at {bytes} B is below {bound}"));
    CheckRow::new(name, problem).count("least", (least * 1000.0).round() / 1000.0).count("bytes", bytes)
}

fn paths_of(bench: &Bench, args: &MessagingArgs, bytes: usize) -> anyhow::Result<[Row; 3]> {
    let stream = stream(args, bytes);
    let modes = [
        ("ring", SwitchOver::Above(usize::MAX)),
        ("rendezvous", SwitchOver::Above(0)),
        ("hybrid", SwitchOver::Measured),
    ];
    let runs: [Vec<Done>; 3] = by_turns(args.repeats, |mode| {
        bench.channel().set_switch_over(modes[mode].1);
        bench.run(stream)
    })?;
    // Over each of the two ways: the smaller number is that over the better one.
    let ratios = runs.each_ref().map(|these| paired(these, &runs[0]).min(paired(these, &runs[1])));
    let rounds = runs[0].len() as u32;
    let done = runs.map(median);
    let mut rows = [0, 1, 2].map(|mode| row("message", modes[mode].0, args, stream, &done[mode]));
    rows.iter_mut().zip(ratios).for_each(|(row, ratio)| (row.repeats, row.ratio) = (rounds, Some(ratio)));
    Ok(rows)
}

fn writes_of(bench: &Bench, args: &MessagingArgs, options: &MemOptions, bytes: usize) -> anyhow::Result<[Row; 2]> {
    let stream = stream(args, bytes);
    let runs: [Vec<Done>; 2] = by_turns(args.repeats, |mode| {
        bench.channel().set_coalesce(mode == 0);
        bench.run(stream)
    })?;
    bench.channel().set_coalesce(true);
    let ratios = runs.each_ref().map(|these| paired(these, &runs[1]));
    let rounds = runs[0].len() as u32;
    let done = runs.map(median);
    let mut rows = [("coalesced", 0), ("single", 1)].map(|(name, mode)| Row {
        latency_ns: options.latency_ns,
        request_ns: options.request_ns,
        ..row("write", name, args, stream, &done[mode])
    });
    rows.iter_mut().zip(ratios).for_each(|(row, ratio)| (row.repeats, row.ratio) = (rounds, Some(ratio)));
    Ok(rows)
}

/// On what kind of fabric.
fn setting(options: &MemOptions) -> String {
    if options.request_ns == 0 && options.latency_ns == 0 {
        return "where a remote operation is a copy in memory".to_owned();
    }
    let rate = match 1_000_000_000u64.checked_div(options.request_ns) {
        Some(rate) => format!("at most {} of them a second on a connection", show_count(rate as f64)),
        None => "as many a second as the processor posts".to_owned(),
    };
    format!("where a remote operation takes {}, and {rate}", show_nanoseconds(options.latency_ns))
}

/// Both sizes alone, together, and together with the small one first.
fn pair_of(bench: &Bench, args: &MessagingArgs, small: usize, large: usize) -> anyhow::Result<Vec<Row>> {
    // A few small ones that are waited for, and as many large ones as there can be: who sends less must not starve.
    let small = Stream { in_flight: 4, messages: 400, ..stream(args, small) };
    let large = Stream { messages: u64::MAX, ..stream(args, large) };
    let urgent = Stream { priority: Priority::Latency, ..small };
    let alone_large = Stream { messages: stream(args, large.bytes).messages, ..large };
    let mut runs: [Vec<Vec<Done>>; 4] = Default::default();
    for round in 0..args.repeats.min(PAIR_REPEATS_MAX) as usize {
        for step in 0..4 {
            let mode = (round + step) % 4;
            runs[mode].push(match mode {
                0 => bench.together(&[small], true)?,
                1 => bench.together(&[alone_large], true)?,
                2 => bench.together(&[small, large], true)?,
                _ => bench.together(&[urgent, large], true)?,
            });
        }
    }
    let mut of = |mode: usize, which: usize| -> Done {
        median(runs[mode].iter_mut().map(|run| std::mem::take(&mut run[which])).collect())
    };
    let cases = [
        ("alone", small, of(0, 0)),
        ("alone", large, of(1, 0)),
        ("together", small, of(2, 0)),
        ("together", large, of(2, 1)),
        ("prioritised", small, of(3, 0)),
        ("prioritised", large, of(3, 1)),
    ];
    let alone = [cases[0].2.per_second(), cases[1].2.per_second()];
    let rows = cases.into_iter().enumerate().map(|(index, (mode, stream, mut done))| Row {
        other_bytes: (index > 1).then_some(if index % 2 == 0 { large.bytes } else { small.bytes }),
        p50_ns: done.percentile_ns(0.5),
        p99_ns: done.percentile_ns(0.99),
        ratio: Some(done.per_second() / alone[index % 2]),
        ..row("two sizes", mode, args, stream, &done)
    });
    Ok(rows.collect())
}

fn lines(rows: &[Row], modes: &[&str], y: impl Fn(&Row) -> f64) -> Vec<Line> {
    let points =
        |mode: &str| rows.iter().filter(|row| row.mode == mode).map(|row| (row.bytes as f64, y(row))).collect();
    modes.iter().map(|mode| Line { name: (*mode).to_owned(), points: points(mode) }).collect()
}

fn throughput_plot(rows: &[Row]) -> Plot {
    Plot {
        title: "Throughput by the size of messages".to_owned(),
        x_label: "bytes of a message".to_owned(),
        y_label: "MB/s".to_owned(),
        lines: lines(rows, &["ring", "rendezvous", "hybrid"], |row| row.bytes_per_second / 1e6),
        y_max: None,
    }
}

fn coalescing_plot(rows: &[Row]) -> Plot {
    Plot {
        title: "Small messages, several in a write and singly".to_owned(),
        x_label: "bytes of a message".to_owned(),
        y_label: "million messages a second".to_owned(),
        lines: lines(rows, &["coalesced", "single"], |row| row.ops_per_second / 1e6),
        y_max: None,
    }
}

fn print(header: &[&str], lines: Vec<Vec<String>>, out: &mut impl Write) -> io::Result<()> {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule).bottom_border(rule)).set_header(header);
    for line in lines {
        table.add_row(line);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 0));
        column.set_cell_alignment(CellAlignment::Right);
    }
    writeln!(out, "\n{table}")
}

fn rate(row: &Row) -> String {
    format!("{}/s", show_count(row.ops_per_second))
}

fn bandwidth(row: &Row) -> String {
    format!("{}/s", show_bytes(row.bytes_per_second as u64))
}

fn times(row: &Row) -> String {
    row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x"))
}

fn print_paths(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let lines = rows.chunks_exact(3).map(|rows| {
        let [ring, rendezvous, hybrid] = [&rows[0], &rows[1], &rows[2]];
        let size = show_bytes(ring.bytes as u64);
        vec![size, bandwidth(ring), bandwidth(rendezvous), bandwidth(hybrid), rate(hybrid), times(hybrid)]
    });
    print(&["message", "ring", "rendezvous", "hybrid", "hybrid", "of the\nbetter"], lines.collect(), out)
}

fn print_writes(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let lines = rows
        .chunks_exact(2)
        .map(|rows| vec![show_bytes(rows[0].bytes as u64), rate(&rows[0]), rate(&rows[1]), times(&rows[0])]);
    print(&["message", "coalesced", "single", "gain"], lines.collect(), out)
}

fn print_pairs(rows: &[Row], out: &mut impl Write) -> io::Result<()> {
    let nanoseconds = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), show_nanoseconds);
    let lines = rows.iter().map(|row| {
        let other = row.other_bytes.map_or_else(|| "-".to_owned(), |bytes| show_bytes(bytes as u64));
        let size = show_bytes(row.bytes as u64);
        let latencies = [nanoseconds(row.p50_ns), nanoseconds(row.p99_ns)];
        let [p50, p99] = latencies;
        vec![size, row.mode.to_owned(), other, rate(row), bandwidth(row), times(row), p50, p99]
    });
    print(&["message", "sent", "beside", "rate", "bandwidth", "of alone", "p50", "p99"], lines.collect(), out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::figure::args::Figure;
    use clap::Parser as _;
    use serde_json::Value;

    fn args(options: &str) -> MessagingArgs {
        let line = ["farlink", "figure", "messaging"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::Messaging(args) = figure.figure else { panic!("another figure") };
        args
    }

    #[test]
    fn a_median_is_known_when_many_values_are_close_to_it() {
        let spread = |count: usize, width: f64| -> Vec<f64> {
            (0..count).map(|at| 1.0 - width / 2.0 + width * at as f64 / count as f64).collect()
        };
        assert!(!is_precise(&[]) && !is_precise(&[1.0; 3]) && is_precise(&[1.0; 9]));
        // Of evenly spread values the median is known to about a width over the root of their number.
        assert!(!is_precise(&spread(25, 0.1)) && is_precise(&spread(25, 0.05)));
        assert!(!is_precise(&spread(200, 0.3)) && is_precise(&spread(200, 0.15)));
    }

    #[test]
    fn every_size_and_mode_has_its_row() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display();
        let mut printed = Vec::new();
        // What it measures in such a short run is worth nothing: whether its checks hold is not asked.
        let _ = run(&args(&format!("--json --bytes 20000 --repeats 1 --max-size 64K --out {out}")), &mut printed);
        let text = String::from_utf8(printed).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 13 * 3 + SMALL.len() * 4 + PAIRS.len() * 6 + 2, "{text}");
        assert!(lines[..13 * 3].iter().all(|row| row["ops_per_second"].as_f64().unwrap() > 0.0));
        assert_eq!((&lines[0]["bytes"], &lines[38]["bytes"]), (&16.into(), &(64 << 10).into()));
        assert!(lines.iter().rev().take(2).all(|check| check["ok"].is_boolean()));
        let svg = fs::read_to_string(folder.path().join(FILE)).unwrap();
        assert!(svg.contains("rendezvous") && svg.contains("coalesced"));
    }

    #[test]
    fn a_check_fails_below_its_bound() {
        let rows = [0.97, 0.94].map(|ratio| Row { mode: "hybrid", ratio: Some(ratio), bytes: 64, ..Row::default() });
        assert!(!least("x", 0.95, &rows, |_| true).ok);
        assert!(least("x", 0.95, &rows[..1], |_| true).ok);
        assert!(!least("x", 0.95, &[], |_| true).ok);
    }

    #[test]
    fn medians_and_quotients_by_turns() {
        let mut order = Vec::new();
        let done = |messages: u64| Done { messages, seconds: 1.0, latencies_ns: Vec::new() };
        let runs: [Vec<Done>; 2] = by_turns(3, |mode| {
            order.push(mode);
            Ok(done(order.len() as u64))
        })
        .unwrap();
        assert_eq!(order[..6], [0, 1, 1, 0, 0, 1]);
        // Their quotients are never close to each other: it goes on for as long as it may.
        assert_eq!(runs.each_ref().map(Vec::len), [3 * ROUNDS_FACTOR_MAX; 2]);
        let runs = runs.map(|runs| runs[..3].to_vec());
        // 1, 4, 5 and 2, 3, 6 a second, round by round.
        assert!((paired(&runs[0], &runs[1]) - 5.0 / 6.0).abs() < 1e-9, "of 1/2, 4/3, 5/6");
        assert_eq!(runs.map(median).map(|done| done.messages), [4, 3]);
        // Where they are, it ends with the round that settles it; of three, the better of the first two is what counts.
        let mut rounds = 0;
        let runs: [Vec<Done>; 3] = by_turns(20, |mode| {
            rounds += 1;
            Ok(done([100, 1 + rounds % 7, 100][mode]))
        })
        .unwrap();
        assert_eq!(runs.map(|runs| runs.len()), [20; 3]);
    }

    #[test]
    fn impossible_numbers_are_errors() {
        for options in ["--repeats 0", "--bytes 0", "--max-size 8"] {
            assert!(args(options).validate().is_err(), "{options}");
        }
    }
}
