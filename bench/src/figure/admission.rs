//! `farlink figure dex-admission`: what the probability with which a missed leaf is admitted does over cache sizes (DEX, VLDB
//! 2024, figure 18), counted in remote operations. Nothing is shipped. Beside it what admission by frequency does.

use std::io::Write;
use std::sync::Arc;

use comfy_table::Table;

use super::args::AdmissionArgs;
use super::key_set::{KeySet, READ_INTENSIVE};
use super::plot::{self, Line, Plot, Scale};
use super::rows::CacheSize;
use super::trial::{Admit, Loaded, Trial, Way};
use crate::plan::AdmissionChoice;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::subject::AccessMode;
use crate::table::{digits, table};
use crate::units::{plural, show_count};

const FILE: &str = "dex-admission.svg";
const FREQUENCY: &str = "frequency";
/// Without a chance, every operation reads its leaf, but for the few that find it while it is written for another.
const NEVER_LEAST: f64 = 0.98;

/// A row, and where it stands.
#[derive(Debug, Clone)]
struct Point {
    cache_percent: f64,
    /// `None`: by frequency.
    probability: Option<f64>,
    row: Row,
}

/// Makes the rows and the plot, and checks what has to hold.
pub(crate) fn run(args: &AdmissionArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let (keys, seed) = (args.keys, args.common.seed);
    let key_set = Arc::new(KeySet::new(keys, args.theta, 1, seed)?);
    let caches = args.cache_percents.iter().map(|percent| CacheSize::usable_percent_of(keys, *percent));
    let caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
    // The first is what the others are compared with.
    let mut probabilities = vec![1.0];
    probabilities.extend(args.probabilities.iter().copied().filter(|probability| *probability != 1.0));
    let (warm_up_ops, ops) = (args.warm_up_ops.unwrap_or(2 * keys), args.ops.unwrap_or(keys));
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, zipf {}, 5% updates; {} after {} that fill the cache;\npercent of the raw data, 16 bytes a key",
        plural(keys, "key"),
        args.theta,
        plural(ops, "operation"),
        show_count(warm_up_ops as f64),
    ))?;
    let mut progress = Progress::new(2 + caches.len() as u64, args.common.json);
    let loaded = progress.step("load", || Loaded::load(&key_set, 1, 0))?;
    let mut points: Vec<Point> = Vec::new();
    for &cache in &caches {
        progress.begin(&format!("cache of {}%", cache.cache_percent));
        let first = points.len();
        for probability in probabilities.iter().copied().map(Some).chain([None]) {
            let (name, admit) = match probability {
                Some(leaf) => ("probability", Admit::With { leaf, inner: 1.0 }),
                None => (FREQUENCY, Admit::As(AdmissionChoice::Frequency)),
            };
            let way = Way::new(name, AccessMode::Cached, admit);
            let (mix, in_flight, run) = (READ_INTENSIVE, 1, points.len() as u32 % 16);
            let trial = Trial { key_set: &key_set, way, cache, mix, warm_up_ops, ops, seed, in_flight, run };
            let row = loaded.run(&trial)?;
            let always = points.get(first).map_or(remote_ops(&row), |always| remote_ops(&always.row));
            let row = row.clone().with("probability", probability).with("over_always", always / remote_ops(&row));
            points.push(Point { cache_percent: cache.cache_percent, probability, row });
        }
        points[first..].iter().try_for_each(|point| reporter.row(point.row.clone()))?;
        progress.finish_step();
        progress.suspend(|| reporter.table(&format!("\ncache of {}%\n", cache.cache_percent), show))?;
    }
    progress.begin("check");
    drop(progress);
    plot::write_svg(&[plot(&points)], &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    loaded.check(&mut reporter)?;
    checks(&points).iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

fn remote_ops(row: &Row) -> f64 {
    [row.reads_per_op, row.writes_per_op].into_iter().map(|count| count.unwrap_or(f64::NAN)).sum()
}

/// What the paper says, of counts: being choosy pays in the smallest cache. Beside it that never means never, and that no
/// probability does as well as counting uses.
fn checks(points: &[Point]) -> Vec<CheckRow> {
    let sizes = || points.iter().map(|point| point.cache_percent);
    let (smallest, largest) = (sizes().fold(f64::INFINITY, f64::min), sizes().fold(0.0, f64::max));
    let at = |size: f64| points.iter().filter(move |point| point.cache_percent == size);
    let gain = |point: &Point| point.row.number("over_always").unwrap_or(f64::NAN);
    let some = |point: &&Point| point.probability.is_some_and(|probability| probability > 0.0 && probability < 1.0);
    let best = |size: f64| at(size).filter(some).map(gain).fold(f64::NAN, f64::max);
    let never = points.iter().filter(|point| point.probability == Some(0.0));
    let kept = never.map(|point| point.row.leaf_misses_per_op.unwrap_or(0.0)).fold(f64::INFINITY, f64::min);
    let frequency = at(smallest).chain(at(largest)).filter(|point| point.probability.is_none());
    let over_best =
        frequency.map(|point| gain(point) / best(point.cache_percent).max(1.0)).fold(f64::INFINITY, f64::min);
    let named = [
        ("the smallest cache: always, over the best probability", best(smallest), 1.0),
        ("never: leaves read for each operation", kept, NEVER_LEAST),
        ("the best probability, over frequency", over_best, 1.0),
    ];
    // Only what was asked for can be compared: no probability above 0 has no best one.
    let asked = named.into_iter().filter(|(_, ratio, _)| ratio.is_finite());
    asked.map(|(name, ratio, least)| CheckRow::within(name, ratio, least..=f64::MAX)).collect()
}

fn show(rows: &[Row]) -> Table {
    let header = [
        "admitted",
        "leaf\nprobability",
        "read\n/op",
        "write\n/op",
        "byte\n/op",
        "hit\n%",
        "leaf\nmiss",
        "always,\nover it",
    ];
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            row.number("probability").map_or_else(|| "-".to_owned(), |probability| probability.to_string()),
            digits(row.reads_per_op, 3),
            digits(row.writes_per_op, 3),
            digits(row.bytes_per_op, 0),
            digits(row.hit_ratio.map(|ratio| ratio * 100.0), 1),
            digits(row.leaf_misses_per_op, 3),
            digits(row.number("over_always"), 3),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

fn plot(points: &[Point]) -> Plot {
    let xy = |point: &Point| {
        let name = point.probability.map_or_else(|| FREQUENCY.to_owned(), |probability| format!("p = {probability}"));
        Some((name, point.cache_percent, point.row.number("over_always")?))
    };
    Plot {
        title: "Remote operations of always, over those of each admission".to_owned(),
        x_label: "cache, percent of the raw data".to_owned(),
        x_scale: Scale::Logarithmic,
        y_label: "times as many".to_owned(),
        lines: Line::by_name(points.iter().filter_map(xy)),
        y_max: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_fail_beyond_their_bounds() {
        let held = |gains: [f64; 3], never: f64, frequency: f64| {
            let [small, large_low, large_high] = gains;
            let mut points = Vec::new();
            for (cache_percent, low, high) in [(1.0, small, 0.9), (32.0, large_low, large_high)] {
                for (probability, gain) in
                    [(Some(1.0), 1.0), (Some(0.0), 0.5), (Some(0.01), low), (Some(0.5), high), (None, frequency)]
                {
                    let leaf_misses_per_op = Some(if probability == Some(0.0) { never } else { 0.3 });
                    let row = Row { leaf_misses_per_op, ..Row::default() }.with("over_always", gain);
                    points.push(Point { cache_percent, probability, row });
                }
            }
            checks(&points).iter().map(|check| check.ok).collect::<Vec<_>>()
        };
        assert_eq!(held([1.1, 0.9, 1.05], 1.0, 1.2), [true; 3]);
        assert_eq!(held([0.8, 1.1, 1.05], 0.97, 1.05), [false, false, false]);
    }
}
