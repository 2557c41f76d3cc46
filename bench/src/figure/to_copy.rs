//! `farlink figure to-copy`: what sending records costs if they are copied, gathered, or sent with their pages for the client to
//! merge (Kesavan et al., "To Copy or Not to Copy", 2016).
//!
//! The paper's figures 3 to 6: throughput over the size of messages, the processor's share, cycles for each byte, and a large page
//! with deltas; then what a longer chain of deltas saves. Transmissions are carried out over the `mem` fabric and counted
//! (`transmit.rs`), updates of a Bw-tree, too (`chains.rs`); `card.rs` makes times and cycles of the counts. Beside them what the paper says.

use std::io::Write;

use super::args::ToCopyArgs;
use super::card::{self, Sent};
use super::chains;
use super::plot::{self, Line, Plot, Scale};
use super::transmit::{Sending, Transmitter};
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::table::{digits, table};

const FILE: &str = "to-copy.svg";
const REGION_BYTES: u64 = 16 << 20;
/// Of records and deltas.
const SIZES: [u64; 2] = [1024, 128];
/// Of messages: figure 3's, in KiB.
const MESSAGES_KIB: [u64; 9] = [1, 2, 4, 6, 8, 12, 16, 24, 32];
const BASE_BYTES: u64 = 16 << 10;
const DELTAS: [u64; 6] = [1, 2, 4, 8, 16, 31];

/// A way of sending: three of them, by the figures in which they are.
const COPY_OUT: &str = "copy-out";
const GATHER: &str = "gather";
const MERGED: &str = "client-merged";

/// What the paper says: the figure, the way, bytes of a record, of a message, GB a second.
const PAPER_THROUGHPUT: [(u64, &str, u64, u64, f64); 6] = [
    // Section 5.1: 6 records of 1 KiB saturate the network, which is 5.8 GB/s by section 5.2.
    (3, GATHER, 1024, 6 << 10, 5.8),
    // Section 5.1: gathering is ahead by up to 29% there.
    (3, COPY_OUT, 1024, 6 << 10, 5.8 / 1.29),
    // Sections 5.1 and 5.2: copying takes 16 KiB, and comes to 5.6 GB/s, with records of either size.
    (3, COPY_OUT, 1024, 16 << 10, 5.6),
    (3, COPY_OUT, 128, 16 << 10, 5.6),
    // Section 5.3.
    (3, GATHER, 128, 4 << 10, 3.4),
    (6, MERGED, 128, BASE_BYTES + 4 * 128, 5.7),
];

/// One point of a line.
struct Point {
    figure: u64,
    way: &'static str,
    record_bytes: u64,
    /// Of a message: deltas, if it is a page with deltas.
    x: f64,
    sent: Sent,
}

impl Point {
    fn name(&self) -> String {
        format!("{}, {} B", self.way, self.record_bytes)
    }

    fn row(&self) -> Row {
        let Sent { descriptors, entries, bytes, copied_bytes, .. } = self.sent;
        let per_message = |count: u64| count as f64 / descriptors as f64;
        Row { name: self.way.to_owned(), ops: Some(descriptors), ..Row::default() }
            .with("source", "counted")
            .with("figure", self.figure)
            .with("record_bytes", self.record_bytes)
            .with("message_bytes", per_message(bytes))
            .with("entries_per_message", per_message(entries))
            .with("copied_bytes_per_message", per_message(copied_bytes))
            .with("gb_per_s", self.sent.gb_per_s())
            .with("processor_percent", self.sent.processor_percent())
            .with("cycles_per_byte", self.sent.cycles_per_byte())
    }
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &ToCopyArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let mut reporter = Reporter::new(out, args.common.json);
    let mut progress = Progress::new(3, args.common.json);
    let mut transmitter = Transmitter::new(REGION_BYTES, args.common.seed)?;
    let sizes = progress.step("sizes of messages", || over_sizes(&mut transmitter, args.messages))?;
    let deltas = progress.step("deltas", || over_deltas(&mut transmitter, args.messages))?;
    let chains = progress.step("chains", || chains::over_lengths(args.updates, args.common.seed))?;
    drop(progress);
    reporter.note(&format!(
        "counted over {} messages each; times and cycles by a model of\n\
         the paper's machine: 56 Gb/s, lists of {} entries, 8 cores of 2.1 GHz",
        args.messages,
        card::LIST_MAX,
    ))?;
    reporter.note("paper: To Copy or Not to Copy (2016), sections 5.1 to 5.4")?;
    for (title, figure, points) in
        [("figures 3 to 5: records in a message", 3, &sizes), ("figure 6: a page of 16 KiB and deltas", 6, &deltas)]
    {
        paper(figure).try_for_each(|row| reporter.row(row))?;
        points.iter().try_for_each(|point| reporter.row(point.row()))?;
        reporter.table(&format!("\n{title}\n"), show)?;
    }
    chains.iter().try_for_each(|chain| reporter.row(chain.row()))?;
    reporter.table("\nconsolidation, over the length of chains\n", chains::show)?;
    plot::write_svg(&plots(&sizes, &deltas, &chains), &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    checks(&sizes, &deltas).iter().try_for_each(|check| reporter.check(check))?;
    chains::checks(&chains).iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

fn over_sizes(transmitter: &mut Transmitter, messages: u64) -> anyhow::Result<Vec<Point>> {
    let mut points = Vec::new();
    for (way, sending) in [(GATHER, Sending::Gather), (COPY_OUT, Sending::CopyOut)] {
        for record_bytes in SIZES {
            for bytes in MESSAGES_KIB.map(|kib| kib << 10) {
                let records = bytes / record_bytes;
                if sending == Sending::Gather && records > card::LIST_MAX {
                    continue;
                }
                let sent = transmitter.send(&vec![record_bytes; records as usize], sending, messages)?;
                points.push(Point { figure: 3, way, record_bytes, x: bytes as f64 / 1024.0, sent });
            }
        }
    }
    Ok(points)
}

fn over_deltas(transmitter: &mut Transmitter, messages: u64) -> anyhow::Result<Vec<Point>> {
    let mut points = Vec::new();
    for record_bytes in SIZES {
        for deltas in DELTAS {
            let mut records = vec![BASE_BYTES];
            records.extend(vec![record_bytes; deltas as usize]);
            let sent = transmitter.send(&records, Sending::Gather, messages)?;
            points.push(Point { figure: 6, way: MERGED, record_bytes, x: deltas as f64, sent });
        }
    }
    Ok(points)
}

/// What the paper says of a figure.
fn paper(figure: u64) -> impl Iterator<Item = Row> {
    PAPER_THROUGHPUT.into_iter().filter(move |said| said.0 == figure).map(
        move |(figure, way, record_bytes, message_bytes, gb_per_s)| {
            Row { name: way.to_owned(), ..Row::default() }
                .with("source", "paper")
                .with("figure", figure)
                .with("record_bytes", record_bytes)
                .with("message_bytes", message_bytes as f64)
                .with("gb_per_s", gb_per_s)
        },
    )
}

fn show(rows: &[Row]) -> comfy_table::Table {
    let header =
        ["", "source", "record\nB", "message\nB", "entry\n/msg", "copied\nB/msg", "GB/s", "processor\n%", "cycles\n/B"];
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            row.shown("source"),
            row.shown("record_bytes"),
            digits(row.number("message_bytes"), 0),
            digits(row.number("entries_per_message"), 0),
            digits(row.number("copied_bytes_per_message"), 0),
            digits(row.number("gb_per_s"), 2),
            digits(row.number("processor_percent"), 2),
            digits(row.number("cycles_per_byte"), 3),
        ]
    };
    table(&header, 2, rows.iter().map(line))
}

fn plots(sizes: &[Point], deltas: &[Point], chains: &[chains::Chain]) -> Vec<Plot> {
    let plot = |title: &str, x: &str, y: &str, points: &[Point], of: fn(&Sent) -> f64| Plot {
        title: title.into(),
        x_label: x.into(),
        x_scale: Scale::Logarithmic,
        y_label: y.into(),
        lines: Line::by_name(points.iter().map(|point| (point.name(), point.x, of(&point.sent)))),
        y_max: None,
    };
    let size = "message, KiB";
    vec![
        plot("Throughput (figure 3)", size, "GB/s", sizes, Sent::gb_per_s),
        plot("Processor share (figure 4)", size, "percent of all cores", sizes, Sent::processor_percent),
        plot("Cycles for each byte (figure 5)", size, "cycles", sizes, Sent::cycles_per_byte),
        plot("A page of 16 KiB and deltas (figure 6)", "deltas", "GB/s", deltas, Sent::gb_per_s),
        plot("The same: processor share", "deltas", "percent of all cores", deltas, Sent::processor_percent),
        chains::plot(chains),
    ]
}

/// The best of a line.
fn peak(points: &[Point], way: &str, record_bytes: u64) -> f64 {
    let of_line = points.iter().filter(|point| point.way == way && point.record_bytes == record_bytes);
    of_line.map(|point| point.sent.gb_per_s()).fold(0.0, f64::max)
}

fn checks(sizes: &[Point], deltas: &[Point]) -> Vec<CheckRow> {
    let at = |way, record_bytes, kib: f64| {
        let is_it = |point: &&Point| point.way == way && point.record_bytes == record_bytes && point.x == kib;
        sizes.iter().find(is_it).map(|point| point.sent)
    };
    let merged = deltas.iter().map(|point| point.sent.gb_per_s()).fold(f64::INFINITY, f64::min);
    let most_cycles = deltas
        .iter()
        .filter(|point| point.record_bytes == 1024)
        .map(|point| point.sent.cycles_per_byte())
        .fold(0.0, f64::max);
    let copied_cycles = at(COPY_OUT, 1024, 32.0).map_or(f64::NAN, |sent| sent.cycles_per_byte());
    vec![
        CheckRow::within(
            "client-merged, of gathered scattered records of 128 B",
            merged / peak(sizes, GATHER, 128),
            1.7..=f64::INFINITY,
        ),
        CheckRow::within(
            "cycles for each byte: client-merged, of copy-out at 1 KiB",
            most_cycles / copied_cycles,
            0.0..=0.25,
        ),
        order(sizes),
    ]
}

/// The lines of figure 3 lie above each other as in the paper: up to where a list of small records ends, gathered records of
/// 1 KiB, gathered ones of 128 B, copied ones; beyond, copied ones come to more than gathered small ones ever do, and close in on
/// gathered ones of 1 KiB. In figure 5 copied records of 1 KiB take more cycles than gathered ones.
fn order(sizes: &[Point]) -> CheckRow {
    let at = |way: &str, record_bytes: u64, kib: u64| {
        let is_it = |point: &&Point| point.way == way && point.record_bytes == record_bytes && point.x == kib as f64;
        sizes.iter().find(is_it).map(|point| point.sent)
    };
    let cycles = |way, kib| at(way, 1024, kib).map(|sent| sent.cycles_per_byte());
    let at = |way, record_bytes, kib| at(way, record_bytes, kib).map(|sent| sent.gb_per_s());
    let mut problems = Vec::new();
    for kib in MESSAGES_KIB {
        let (large, small) = (at(GATHER, 1024, kib).unwrap_or(0.0), at(GATHER, 128, kib));
        for record_bytes in SIZES {
            let copied = at(COPY_OUT, record_bytes, kib).unwrap_or(f64::INFINITY);
            let is_so = match small {
                Some(small) => large >= small && small >= copied,
                None => large >= copied && (kib < 16 || copied >= 0.95 * large && copied > peak(sizes, GATHER, 128)),
            };
            if !is_so {
                problems.push(format!("{kib} KiB of {record_bytes} B"));
            }
        }
        if cycles(COPY_OUT, kib) <= cycles(GATHER, kib) {
            problems.push(format!("cycles of {kib} KiB"));
        }
    }
    let problem = (!problems.is_empty()).then(|| format!("not at {}", problems.join(", ")));
    CheckRow::new("the lines of figures 3 and 5 are in the paper's order", problem)
}
