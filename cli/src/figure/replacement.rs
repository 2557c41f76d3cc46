//! `farlink figure replacement`: remote reads per lookup over cache sizes, as rows and as a plot.

use std::fs;
use std::io::Write;

use anyhow::Context as _;

use super::args::ReplacementArgs;
use super::bed::{self, PAGE_BYTES};
use super::optimum::Optimum;
use super::plot::{Line, Plot};
use super::rows::{CacheSize, Row, Setting, Sink, Source};
use crate::units::show_count;

/// In percent of the raw data, for each compute server.
const CACHE_PERCENTS: [f64; 8] = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0];

/// Makes the rows and the plot.
pub(crate) fn run(args: &ReplacementArgs, out: impl Write) -> anyhow::Result<()> {
    let population = args.population.population(args.compute_servers)?;
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let setting = Setting {
        keys: population.keys(),
        compute_servers: args.compute_servers,
        memory_servers: 1,
        theta: population.theta(),
        page_bytes: PAGE_BYTES,
        seed: Some(args.population.seed),
    };
    let mut sink = Sink::new(out, args.json);
    let shape = bed::shape(population.keys());
    let optimum = Optimum::new(&population, &shape);
    let mut best = Vec::new();
    for percent in CACHE_PERCENTS {
        let cache = CacheSize::percent_of(&population, percent);
        let misses = optimum.with_frames(cache.cache_bytes / PAGE_BYTES);
        best.push((percent, misses.reads_per_op));
        let mut row =
            Row::new("static optimum", Source::Computed, "cached", "read-only", misses.reads_per_op, &setting);
        row.bytes_per_op = Some(misses.reads_per_op * PAGE_BYTES as f64);
        row.hit_ratio = Some(misses.hit_ratio());
        row.misses_by_level = Some(misses.by_level);
        sink.row(row.with_cache(Some(cache)))?;
    }
    let plot = Plot {
        title: format!(
            "Remote reads per lookup: {} keys, zipf {}; {} without a cache",
            show_count(population.keys() as f64),
            population.theta(),
            shape.levels()
        ),
        x_label: "cache of each compute server, percent of the raw data".to_owned(),
        y_label: "reads per lookup".to_owned(),
        lines: vec![Line { name: "static optimum".to_owned(), points: best }],
    };
    let path = args.out.join("replacement.svg");
    plot.write_svg(&path)?;
    sink.note(&format!("wrote {}", path.display()))?;
    Ok(sink.finish()?)
}
