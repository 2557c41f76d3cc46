//! `farlink figure to-copy`: what sending records costs if they are copied, gathered, or sent with their pages for the client to
//! merge (Kesavan et al., "To Copy or Not to Copy", 2016).
//!
//! The paper's figures 3 to 6: throughput over the size of messages, the processor's share, cycles for each byte, and a large page
//! with deltas; then what a longer chain of deltas saves. Transmissions are carried out over the `mem` fabric and counted
//! (`transmit.rs`), updates of a Bw-tree, too (`chains.rs`); `card.rs` makes times and cycles of the counts. Beside them what the paper says.

use std::io::Write;
use std::ops::RangeInclusive;

use anyhow::ensure;

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

const GB_PER_S: &str = "gb_per_s";
const PROCESSOR: &str = "processor_percent";
const COPYING: &str = "copying_percent";

/// What the paper says of points: the figure, the way, bytes of a record and of a message, of what, and what.
const PAPER: [(u64, &str, u64, u64, &str, f64); 9] = [
    // Section 5.1: 6 records of 1 KiB saturate the network, which is 5.8 GB/s by section 5.2.
    (3, GATHER, 1024, 6 << 10, GB_PER_S, 5.8),
    // Section 5.1: gathering is ahead by up to 29% there.
    (3, COPY_OUT, 1024, 6 << 10, GB_PER_S, 5.8 / 1.29),
    // Sections 5.1 and 5.2: copying takes 16 KiB, and comes to 5.6 GB/s, with records of either size.
    (3, COPY_OUT, 1024, 16 << 10, GB_PER_S, 5.6),
    (3, COPY_OUT, 128, 16 << 10, GB_PER_S, 5.6),
    // Section 5.3.
    (3, GATHER, 128, 4 << 10, GB_PER_S, 3.4),
    // Section 5.2: of 1 KiB copying alone, of 128 B all.
    (4, COPY_OUT, 1024, 16 << 10, COPYING, 6.8),
    (4, COPY_OUT, 128, 16 << 10, PROCESSOR, 10.8),
    (4, GATHER, 128, 4 << 10, PROCESSOR, 5.5),
    (6, MERGED, 128, BASE_BYTES + 4 * 128, GB_PER_S, 5.7),
];
/// Messages of so many KiB saturate the network if records of 1 KiB are gathered (section 5.1).
const SATURATING_KIB: u64 = 6;

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
            .with(GB_PER_S, self.sent.gb_per_s())
            .with(PROCESSOR, self.sent.processor_percent())
            .with(COPYING, self.sent.copying_percent())
            .with("cycles_per_byte", self.sent.cycles_per_byte())
    }
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &ToCopyArgs, out: impl Write) -> anyhow::Result<()> {
    let least = chains::UPDATES_MIN;
    ensure!(args.updates >= least, "give --updates {least} at least: fewer say nothing of long chains");
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
    for (title, figures, points) in [
        ("figures 3 to 5: records in a message", 3..=5, &sizes),
        ("figure 6: a page of 16 KiB and deltas", 6..=6, &deltas),
    ] {
        paper(figures).try_for_each(|row| reporter.row(row))?;
        points.iter().try_for_each(|point| reporter.row(point.row()))?;
        reporter.table(&format!("\n{title}\n"), show)?;
    }
    in_words(Lines(&sizes), Lines(&deltas)).into_iter().try_for_each(|row| reporter.row(row))?;
    reporter.table("\nwhat the paper says in words\n", show_words)?;
    chains.iter().try_for_each(|chain| reporter.row(chain.row()))?;
    reporter.table("\nconsolidation, over the length of chains\n", chains::show)?;
    plot::write_svg(&plots(&sizes, &deltas, &chains), &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    checks(Lines(&sizes), Lines(&deltas)).iter().try_for_each(|check| reporter.check(check))?;
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

/// What the paper says of points of these figures.
fn paper(figures: RangeInclusive<u64>) -> impl Iterator<Item = Row> {
    PAPER.into_iter().filter(move |said| figures.contains(&said.0)).map(
        |(figure, way, record_bytes, message_bytes, of, value)| {
            Row { name: way.to_owned(), ..Row::default() }
                .with("source", "paper")
                .with("figure", figure)
                .with("record_bytes", record_bytes)
                .with("message_bytes", message_bytes as f64)
                .with(of, value)
        },
    )
}

/// What the paper says of whole lines, and what the model makes of the counts.
fn in_words(sizes: Lines<'_>, deltas: Lines<'_>) -> Vec<Row> {
    let large = sizes.both(1024);
    let ahead = large.iter().map(|(_, gathered, copied)| gathered.gb_per_s() / copied.gb_per_s());
    let best = |way| most(sizes.of(way, 128, Sent::gb_per_s));
    let gathering = || sizes.of(GATHER, 1024, Sent::processor_percent);
    let saved = || {
        let saturating = large.iter().filter(|point| point.0 >= SATURATING_KIB as f64);
        saturating.map(|(_, gathered, copied)| copied.processor_percent() - gathered.processor_percent())
    };
    let (saved_large, saved_small) = cycles_saved(sizes);
    let share = || SIZES.into_iter().flat_map(|bytes| deltas.of(MERGED, bytes, Sent::processor_percent));
    let merged = least(SIZES.into_iter().flat_map(|bytes| deltas.of(MERGED, bytes, Sent::gb_per_s)));
    let four = deltas.at(MERGED, 128, 4.0).map_or(f64::NAN, |sent| sent.processor_percent());
    let scattered = most(sizes.of(GATHER, 128, Sent::processor_percent));
    let all = [
        (3, "1 KiB, gathered of copied: GB/s, at most", 1.29, most(ahead)),
        (3, "128 B, copied of gathered: GB/s, at best", 1.53, best(COPY_OUT) / best(GATHER)),
        (4, "1 KiB, gathered: processor %, at least", 1.0, least(gathering())),
        (4, "1 KiB, gathered: processor %, at most", 4.0, most(gathering())),
        (4, "1 KiB, saved by gathering: processor %, at least", 3.0, least(saved())),
        (4, "1 KiB, saved by gathering: processor %, at most", 6.0, most(saved())),
        (5, "1 KiB, saved by gathering: % of cycles, at most", 76.0, saved_large * 100.0),
        (5, "128 B, saved by gathering: % of cycles, at best", 12.0, saved_small * 100.0),
        (6, "page with deltas: processor %, at least", 1.0, least(share())),
        (6, "page with deltas: processor %, at most", 2.0, most(share())),
        (6, "the same, of gathered records of 128 B: GB/s", 1.7, merged / best(GATHER)),
        (6, "the same, 4 deltas: % of that processor's share saved", 75.0, (1.0 - four / scattered) * 100.0),
    ];
    let row = |(figure, name, paper, here): (u64, &str, f64, f64)| {
        Row { name: name.to_owned(), ..Row::default() }
            .with("source", "compared")
            .with("figure", figure)
            .with("paper", paper)
            .with("here", here)
    };
    all.into_iter().map(row).collect()
}

/// The share of cycles for each byte that gathering saves: of records of 1 KiB at most, where messages are as large; of 128 B with
/// messages of the best size for each way.
fn cycles_saved(sizes: Lines<'_>) -> (f64, f64) {
    let saved = |gathered: f64, copied: f64| 1.0 - gathered / copied;
    let large = sizes.both(1024).into_iter();
    let large = large.map(|(_, gathered, copied)| saved(gathered.cycles_per_byte(), copied.cycles_per_byte()));
    let best = |way| least(sizes.of(way, 128, Sent::cycles_per_byte));
    (most(large), saved(best(GATHER), best(COPY_OUT)))
}

fn show_words(rows: &[Row]) -> comfy_table::Table {
    let line = |row: &Row| {
        let number = |field| digits(row.number(field), 2);
        vec![row.name.clone(), row.shown("figure"), number("paper"), number("here")]
    };
    table(&["", "figure", "paper", "here"], 1, rows.iter().map(line))
}

fn show(rows: &[Row]) -> comfy_table::Table {
    let header = [
        "",
        "source",
        "record\nB",
        "message\nB",
        "entry\n/msg",
        "copied\nB/msg",
        "GB/s",
        "proc\n%",
        "copy\n%",
        "cycles\n/B",
    ];
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            row.shown("source"),
            row.shown("record_bytes"),
            digits(row.number("message_bytes"), 0),
            digits(row.number("entries_per_message"), 0),
            digits(row.number("copied_bytes_per_message"), 0),
            digits(row.number(GB_PER_S), 2),
            digits(row.number(PROCESSOR), 2),
            digits(row.number(COPYING), 2),
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

/// Points, by their lines.
#[derive(Clone, Copy)]
struct Lines<'a>(&'a [Point]);

impl Lines<'_> {
    fn line(&self, way: &str, record_bytes: u64) -> impl Iterator<Item = &Point> {
        self.0.iter().filter(move |point| point.way == way && point.record_bytes == record_bytes)
    }

    fn at(&self, way: &str, record_bytes: u64, x: f64) -> Option<Sent> {
        self.line(way, record_bytes).find(|point| point.x == x).map(|point| point.sent)
    }

    /// Along a line.
    fn of(&self, way: &str, record_bytes: u64, of: fn(&Sent) -> f64) -> Vec<f64> {
        self.line(way, record_bytes).map(|point| of(&point.sent)).collect()
    }

    /// Where records of a size are sent in both ways: how large the message is, gathered, and copied.
    fn both(&self, record_bytes: u64) -> Vec<(f64, Sent, Sent)> {
        let gathered = self.line(GATHER, record_bytes);
        let both = |point: &Point| Some((point.x, point.sent, self.at(COPY_OUT, record_bytes, point.x)?));
        gathered.filter_map(both).collect()
    }
}

fn least(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

fn most(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(f64::NEG_INFINITY, f64::max)
}

fn checks(sizes: Lines<'_>, deltas: Lines<'_>) -> Vec<CheckRow> {
    let merged = least(SIZES.into_iter().flat_map(|bytes| deltas.of(MERGED, bytes, Sent::gb_per_s)));
    let most_cycles = most(deltas.of(MERGED, 1024, Sent::cycles_per_byte));
    let copied_cycles = sizes.at(COPY_OUT, 1024, 32.0).map_or(f64::NAN, |sent| sent.cycles_per_byte());
    vec![
        CheckRow::within(
            "client-merged, of gathered scattered records of 128 B",
            merged / most(sizes.of(GATHER, 128, Sent::gb_per_s)),
            1.7..=f64::INFINITY,
        ),
        CheckRow::within(
            "cycles for each byte: client-merged, of copy-out at 1 KiB",
            most_cycles / copied_cycles,
            0.0..=0.25,
        ),
        in_order(3, throughput(sizes)),
        in_order(4, processor(sizes)),
        in_order(5, cycles(sizes)),
        in_order(6, merged_share(sizes, deltas)),
    ]
}

/// That the lines of a figure lie above each other as in the paper: where they do not is given.
fn in_order(figure: u64, problems: Vec<String>) -> CheckRow {
    let problem = (!problems.is_empty()).then(|| problems.join(", "));
    CheckRow::new(&format!("the lines of figure {figure} are in the paper's order"), problem)
}

/// Figure 3. Up to where a list of small records ends, gathered records of 1 KiB, gathered ones of 128 B, copied ones, which are
/// as fast whatever their size; beyond, copied ones come to more than gathered small ones ever do, and close in on gathered ones
/// of 1 KiB.
fn throughput(sizes: Lines<'_>) -> Vec<String> {
    let at = |way, record_bytes, kib| sizes.at(way, record_bytes, kib as f64).map(|sent| sent.gb_per_s());
    let best_small = most(sizes.of(GATHER, 128, Sent::gb_per_s));
    let mut problems = Vec::new();
    for kib in MESSAGES_KIB {
        let (large, small) = (at(GATHER, 1024, kib).unwrap_or(0.0), at(GATHER, 128, kib));
        let copied = SIZES.map(|record_bytes| at(COPY_OUT, record_bytes, kib).unwrap_or(f64::INFINITY));
        for copied in copied {
            let is_so = match small {
                Some(small) => large > small && small > copied,
                None if kib < 16 => large > copied,
                None => large >= copied && copied >= 0.95 * large && copied > best_small,
            };
            if !is_so {
                problems.push(format!("{kib} KiB"));
            }
        }
        if (copied[0] / copied[1] - 1.0).abs() > 0.01 {
            problems.push(format!("{kib} KiB, copied"));
        }
    }
    problems
}

/// Figure 4. Gathering always takes less of the processor than copying, and what it saves is more for larger records. Of the most
/// that each line takes, copying is above gathering, and small records above large ones.
fn processor(sizes: Lines<'_>) -> Vec<String> {
    let saved = |record_bytes| {
        let of = |(kib, gathered, copied): (f64, Sent, Sent)| {
            (kib, copied.processor_percent() - gathered.processor_percent())
        };
        sizes.both(record_bytes).into_iter().map(of)
    };
    let mut problems = Vec::new();
    for (kib, _) in SIZES.into_iter().flat_map(saved).filter(|point| point.1 <= 0.0) {
        problems.push(format!("gathering takes more at {kib} KiB"));
    }
    for ((kib, _), _) in saved(1024).zip(saved(128)).filter(|(large, small)| large.1 <= small.1) {
        problems.push(format!("large records save no more at {kib} KiB"));
    }
    let peaks = [(COPY_OUT, 128), (COPY_OUT, 1024), (GATHER, 128), (GATHER, 1024)];
    let peaks = peaks.map(|(way, record_bytes)| most(sizes.of(way, record_bytes, Sent::processor_percent)));
    if !peaks.is_sorted_by(|above, below| above > below) {
        problems.push(format!("the most of each line: {peaks:.2?}"));
    }
    problems
}

/// Figure 5. For each byte, gathering takes fewer cycles than copying, small records more than large ones, larger messages fewer;
/// gathering saves more of large records than of small ones, and of those, too.
fn cycles(sizes: Lines<'_>) -> Vec<String> {
    let of = |sent: &Sent| sent.cycles_per_byte();
    let mut problems = Vec::new();
    for (kib, gathered, copied) in SIZES.into_iter().flat_map(|bytes| sizes.both(bytes)) {
        if of(&gathered) >= of(&copied) {
            problems.push(format!("gathering takes more at {kib} KiB"));
        }
    }
    for way in [GATHER, COPY_OUT] {
        let lines = SIZES.map(|record_bytes| sizes.of(way, record_bytes, Sent::cycles_per_byte));
        if lines.iter().any(|line| line.is_empty() || !line.is_sorted_by(|before, after| before > after)) {
            problems.push(format!("{way} takes no less in larger messages"));
        }
        if !lines[0].iter().zip(&lines[1]).all(|(large, small)| large < small) {
            problems.push(format!("{way} takes no more of small records"));
        }
    }
    let (large, small) = cycles_saved(sizes);
    if large <= small || small <= 0.0 {
        problems.push(format!("gathering saves {large:.2} of large records and {small:.2} of small ones"));
    }
    problems
}

/// Figure 6, the processor's share: less than that of records of 128 B sent in either way, 2% at most; with one small delta 1%,
/// and more with each more of them.
fn merged_share(sizes: Lines<'_>, deltas: Lines<'_>) -> Vec<String> {
    let scattered = [GATHER, COPY_OUT].into_iter().flat_map(|way| sizes.of(way, 128, Sent::processor_percent));
    let bound = least(scattered).min(2.0);
    let mut problems = Vec::new();
    for record_bytes in SIZES {
        let highest = most(deltas.of(MERGED, record_bytes, Sent::processor_percent));
        if highest > bound {
            problems.push(format!("{highest:.2}% with deltas of {record_bytes} B, not {bound:.2} at most"));
        }
    }
    let small = deltas.of(MERGED, 128, Sent::processor_percent);
    if !small.is_sorted_by(|before, after| before < after) || small.first().is_none_or(|&one| one > 1.0 + 1e-9) {
        problems.push(format!("over the number of deltas of 128 B: {small:.2?}"));
    }
    problems
}
