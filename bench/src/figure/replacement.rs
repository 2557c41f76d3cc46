//! `farlink figure replacement`: what each admission policy makes of a cache, over sizes and skews, beside the best possible:
//! as rows and as a plot with a panel for each skew. Lookups only.

use std::io::Write;
use std::sync::Arc;

use crate::subject::AccessMode;
use anyhow::Context as _;

use super::args::ReplacementArgs;
use super::key_set::{KeySet, PAGE_BYTES, READ_ONLY};
use super::optimum::Optimum;
use super::plot::{self, Line, Plot, Scale};
use super::rows::CacheSize;
use super::table2::show;
use super::trial::{Admit, Loaded, Trial, Way, against, shape};
use crate::plan::AdmissionChoice;
use crate::progress::Progress;
use crate::report::{Reporter, Row};
use crate::units::{plural, show_count};

const POLICIES: [(&str, AdmissionChoice); 3] = [
    ("always", AdmissionChoice::Always),
    ("probability (DEX)", AdmissionChoice::Probability),
    ("frequency", AdmissionChoice::Frequency),
];
const FILE: &str = "replacement.svg";

/// Makes the rows and the plot, then checks the tree.
pub(crate) fn run(args: &ReplacementArgs, out: impl Write) -> anyhow::Result<()> {
    let (keys, seed) = (args.keys, args.common.seed);
    let key_sets = args.theta.iter().map(|theta| KeySet::new(keys, *theta, 1, seed).map(Arc::new));
    let key_sets = key_sets.collect::<anyhow::Result<Vec<_>>>()?;
    let first = key_sets.first().context("--theta names no exponent")?;
    let caches = args.cache_percents.iter().map(|percent| CacheSize::usable_percent_of(keys, *percent));
    let caches = caches.collect::<anyhow::Result<Vec<_>>>()?;
    let path = plot::path(&args.out, FILE)?;
    let (warm_up_ops, ops) = (args.warm_up_ops.unwrap_or(2 * keys), args.ops.unwrap_or(keys));
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, {} after {warm_up_ops} that fill the cache;\npercent of the raw data, 16 bytes a key",
        plural(keys, "key"),
        plural(ops, "lookup")
    ))?;
    let mut progress = Progress::new(2 + (key_sets.len() * caches.len()) as u64, args.common.json);
    let loaded = progress.step("load", || Loaded::load(first, 1, 0))?;
    let mut panels = Vec::new();
    for key_set in &key_sets {
        let optimum = Optimum::new(key_set, &shape(keys));
        let mut rows = Vec::new();
        for &cache in &caches {
            let least = optimum.with_frames(cache.cache_bytes / PAGE_BYTES);
            progress.begin(&format!("zipf {}, cache of {}%", key_set.theta, cache.cache_percent));
            // One after the other: the tree has one owner at a time.
            for (name, admission) in POLICIES {
                let way = Way::new(name, AccessMode::Cached, Admit::As(admission));
                let (mix, in_flight, run) = (READ_ONLY, 1, 0);
                let trial = Trial { key_set, way, cache, mix, warm_up_ops, ops, seed, in_flight, run };
                rows.push(against(loaded.run(&trial)?, &least));
            }
            rows.push(loaded.optimum(&least, READ_ONLY, key_set, cache));
            progress.finish_step();
        }
        panels.push(panel(key_set, &rows));
        rows.into_iter().try_for_each(|row| reporter.row(row))?;
        progress.suspend(|| reporter.table(&format!("\nzipf {}\n", key_set.theta), show))?;
    }
    progress.begin("check");
    drop(progress);
    plot::write_svg(&panels, &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    loaded.check(&mut reporter)?;
    reporter.all_held()
}

/// Hit ratios over cache sizes, a line for each policy.
fn panel(key_set: &KeySet, rows: &[Row]) -> Plot {
    let point = |row: &Row| Some((row.name.clone(), row.number("cache_percent")?, row.hit_ratio?));
    Plot {
        title: format!("{} keys, zipf {}", show_count(key_set.keys as f64), key_set.theta),
        x_label: "cache, percent of the raw data".to_owned(),
        x_scale: Scale::Logarithmic,
        y_label: "hit ratio".to_owned(),
        lines: Line::by_name(rows.iter().filter_map(point)),
        y_max: Some(1.0),
    }
}
