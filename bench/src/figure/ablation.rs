//! `farlink figure dex-ablation`: what each part of DEX brings (VLDB 2024, figure 8), counted in remote operations and bytes.
//!
//! A B+-tree reached one-sided; then partitioned, so that private pages are changed without remote locks; then cached; then
//! operations are shipped where a page would not be kept. Half of the operations are updates, over skewed keys and over uniform
//! ones. The partitioned tree's root stays cached, as an owner's does; nothing else of it.

use std::io::Write;
use std::sync::Arc;

use comfy_table::Table;
use farlink_offload::Policies;
use farlink_offload::policy::Cold;

use super::args::AblationArgs;
use super::key_set::{KeySet, WRITE_INTENSIVE};
use super::paper;
use super::plot::{self, Line, Plot, Scale};
use super::rows::CacheSize;
use super::trial::{Admit, Loaded, Trial, Way};
use crate::plan::AdmissionChoice;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::subject::AccessMode;
use crate::table::{digits, table};
use crate::units::{plural, show_count};

const FILE: &str = "dex-ablation.svg";
/// What the whole has to save of the base's remote bytes.
const WHOLE_LEAST: f64 = 5.0;
const PARTITION: &str = "+ partition";

fn ways() -> [Way; 4] {
    let kept = Admit::As(AdmissionChoice::Frequency);
    [
        Way::new("base", AccessMode::OneSided, kept),
        Way::new(PARTITION, AccessMode::Cached, Admit::With { leaf: 0.0, inner: 0.0 }),
        Way::new("+ cache", AccessMode::Cached, kept),
        Way::shipping("+ offloading", kept, || Policies::new(Cold)),
    ]
}

/// What a row costs.
type Cost = fn(&Row) -> f64;

/// READs, WRITEs, atomics and messages.
fn remote_ops(row: &Row) -> f64 {
    let all = [row.reads_per_op, row.writes_per_op, row.atomics_per_op, row.two_sided_per_op];
    all.into_iter().map(|count| count.unwrap_or(f64::NAN)).sum()
}

fn reads(row: &Row) -> f64 {
    row.reads_per_op.unwrap_or(f64::NAN)
}

fn bytes(row: &Row) -> f64 {
    row.bytes_per_op.unwrap_or(f64::NAN)
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &AblationArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let (keys, seed) = (args.keys, args.common.seed);
    let mut thetas = vec![args.theta, 0.0];
    thetas.dedup();
    let steps = 2 + (thetas.len() * ways().len()) as u64;
    let key_sets = thetas.into_iter().map(|theta| KeySet::new(keys, theta, args.compute_servers, seed).map(Arc::new));
    let cache = CacheSize::at_least_percent_of(keys, args.cache_percent);
    let (warm_up_ops, ops) = (args.warm_up_ops.unwrap_or(2 * keys), args.ops.unwrap_or(keys));
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, half of the operations updates; {} with {} bytes of cache each;\n\
         {} after {} that fill caches",
        plural(keys, "key"),
        plural(args.compute_servers, "compute server"),
        cache.cache_bytes,
        plural(ops, "operation"),
        show_count(warm_up_ops as f64),
    ))?;
    reporter.note("paper: DEX (VLDB 2024), figure 8, by throughput: how many times the step before")?;
    let mut progress = Progress::new(steps, args.common.json);
    let (mut loaded, mut figures) = (None, Vec::new());
    for key_set in key_sets {
        let key_set = key_set?;
        if loaded.is_none() {
            loaded = Some(progress.step("load", || Loaded::load(&key_set, args.memory_servers, 0))?);
        }
        let Some(loaded) = &loaded else { continue };
        let name = if key_set.theta == 0.0 { "uniform".to_owned() } else { format!("zipf {}", key_set.theta) };
        let mut rows: Vec<Row> = Vec::new();
        for way in ways() {
            let trial = Trial {
                key_set: &key_set,
                way,
                cache,
                mix: WRITE_INTENSIVE,
                warm_up_ops: if way.mode.caches() { warm_up_ops } else { 0 },
                ops,
                seed,
                in_flight: 1,
                run: (figures.len() * ways().len() + rows.len()) as u32,
            };
            let row = progress.step(&format!("{name}, {}", way.name), || loaded.run(&trial))?;
            let gain = |of: fn(&Row) -> f64| rows.last().map(|before| of(before) / of(&row));
            let (by_ops, by_bytes) = (gain(remote_ops), gain(bytes));
            rows.push(
                row.clone()
                    .with("remote_ops_per_op", remote_ops(&row))
                    .with("gain_ops", by_ops)
                    .with("gain_bytes", by_bytes)
                    .with("paper_gain", paper::figure_8(way.name, key_set.theta)),
            );
        }
        rows.iter().try_for_each(|row| reporter.row(row.clone()))?;
        progress.suspend(|| reporter.table(&format!("\n{name}\n"), show))?;
        figures.push((name, rows));
    }
    progress.begin("check");
    drop(progress);
    plot::write_svg(&plots(&figures), &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    if let Some(loaded) = loaded {
        loaded.check(&mut reporter)?;
    }
    figures.iter().flat_map(|(name, rows)| checks(name, rows)).try_for_each(|check| reporter.check(&check))?;
    reporter.all_held()
}

/// Each step costs less than the one before, in operations and in bytes (partitions: in pages read), and the whole far fewer bytes than the base.
fn checks(name: &str, rows: &[Row]) -> Vec<CheckRow> {
    let mut all = Vec::new();
    for pair in rows.windows(2) {
        let [before, row] = pair else { continue };
        // Owners write whole pages and a log of them, others words: of the bytes partitions save those that are read.
        let in_bytes: (_, Cost) = if row.name == PARTITION { ("page reads", reads) } else { ("bytes", bytes) };
        for (what, of) in [("operations", remote_ops as Cost), in_bytes] {
            let gain = of(before) / of(row);
            all.push(CheckRow::within(&format!("{name}: {what} saved by {}", row.name), gain, 1.0..=f64::MAX));
        }
    }
    let whole = rows.first().zip(rows.last()).map_or(f64::NAN, |(base, whole)| bytes(base) / bytes(whole));
    all.push(CheckRow::within(
        &format!("{name}: bytes of the base over those of the whole"),
        whole,
        WHOLE_LEAST..=f64::MAX,
    ));
    all
}

fn show(rows: &[Row]) -> Table {
    let header = [
        "step",
        "read\n/op",
        "write\n/op",
        "cas\n/op",
        "msg\n/op",
        "all\n/op",
        "byte\n/op",
        "fewer\nops",
        "fewer\nbytes",
        "paper\nops/s",
    ];
    let line = |row: &Row| {
        let times = |field: &str| digits(row.number(field), 2);
        vec![
            row.name.clone(),
            digits(row.reads_per_op, 3),
            digits(row.writes_per_op, 3),
            digits(row.atomics_per_op, 3),
            digits(row.two_sided_per_op, 3),
            digits(Some(remote_ops(row)), 3),
            digits(row.bytes_per_op, 0),
            times("gain_ops"),
            times("gain_bytes"),
            times("paper_gain"),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

/// A line for each kind of keys, over the steps.
fn plots(figures: &[(String, Vec<Row>)]) -> Vec<Plot> {
    let ys: [(_, Cost); 2] =
        [("Remote operations for each operation", remote_ops), ("Bytes for each operation", bytes)];
    let plot = |(title, of): (&str, fn(&Row) -> f64)| {
        let points = figures.iter().flat_map(|(name, rows)| {
            rows.iter().enumerate().map(move |(step, row)| (name.clone(), f64::from(1 << step), of(row)))
        });
        Plot {
            title: title.to_owned(),
            x_label: "1: base, 2: partitioned, 4: and cached, 8: and offloading".to_owned(),
            x_scale: Scale::Logarithmic,
            y_label: "per operation".to_owned(),
            lines: Line::by_name(points),
            y_max: None,
        }
    };
    ys.map(plot).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_saves_nothing_and_a_whole_that_saves_little_are_found() {
        let row = |reads: f64, bytes: f64| Row {
            reads_per_op: Some(reads),
            writes_per_op: Some(0.0),
            atomics_per_op: Some(0.0),
            two_sided_per_op: Some(0.0),
            bytes_per_op: Some(bytes),
            ..Row::default()
        };
        let held = |rows: &[Row]| checks("uniform", rows).iter().map(|check| check.ok).collect::<Vec<_>>();
        let base = row(4.0, 5000.0);
        assert_eq!(held(&[base.clone(), row(3.0, 4000.0), row(1.0, 900.0)]), [true; 5]);
        assert_eq!(held(&[base.clone(), row(4.5, 4000.0), row(1.0, 1100.0)]), [false, true, true, true, false]);
        assert_eq!(held(&[base, row(3.0, 5100.0), row(1.0, 900.0)]), [true, false, true, true, true]);
    }
}
