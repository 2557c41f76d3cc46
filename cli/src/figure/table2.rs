//! `farlink figure dex-table2`: the paper's rows, ours, and the best that a cache of that size could do.

use std::io::Write;

use super::args::Table2Args;
use super::bed::{self, Bed, PAGE_BYTES};
use super::contender::{CacheSetting, Contender, FineGrained, Owning, Sharing};
use super::optimum::Optimum;
use super::paper;
use super::rows::{CacheSize, Row, Setting, Sink, Source};
use super::runner::{Amount, FigureMix, Measured, Runner};
use crate::progress::Progress;

const MIXES: [FigureMix; 2] =
    [FigureMix { name: "read-only", update_percent: 0 }, FigureMix { name: "write-intensive", update_percent: 50 }];

/// What every row of a run needs.
struct Run<'a, W> {
    args: &'a Table2Args,
    setting: Setting,
    cache: CacheSize,
    /// Runs so far.
    runs: u32,
    sink: Sink<W>,
    progress: Progress,
}

/// Makes the table.
pub(crate) fn run(args: &Table2Args, out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    let population = args.population.population(args.compute_servers)?;
    let setting = Setting {
        keys: population.keys(),
        compute_servers: args.compute_servers,
        memory_servers: args.memory_servers,
        theta: population.theta(),
        page_bytes: PAGE_BYTES,
        seed: Some(args.population.seed),
    };
    let cache = CacheSize::percent_of(&population, args.cache_percent);
    let steps = 2 + 3 * MIXES.len() as u64;
    let mut run = Run {
        args,
        setting,
        cache,
        runs: 0,
        sink: Sink::new(out, args.json),
        progress: Progress::new(steps, args.json),
    };
    run.sink.note(&format!(
        "{} keys, {} compute servers with {} bytes of cache each, admission {}; the paper's rows have its own setting",
        population.keys(),
        population.servers(),
        cache.cache_bytes,
        args.admission.name(),
    ))?;
    paper::table_2().try_for_each(|row| run.sink.row(row))?;

    run.progress.begin("load");
    let bed = Bed::load(&population, args.memory_servers)?;
    run.progress.finish_step();
    let runner = Runner { bed: &bed, population: &population };
    // The contenders. Each mix begins anew: with an empty cache, warmed up by the mix itself.
    for mix in MIXES {
        run.contend(runner, &FineGrained, mix)?;
        let setting = CacheSetting { size: run.cache, admission: args.admission };
        run.contend(runner, &Sharing(setting), mix)?;
        run.contend(runner, &Owning(setting), mix)?;
    }
    drop(bed);

    run.progress.begin("optimum");
    let optimum = Optimum::new(&population, &bed::shape(population.keys()));
    let misses = optimum.with_frames(run.cache.cache_bytes / PAGE_BYTES);
    for mix in MIXES {
        let mut row =
            Row::new("static optimum", Source::Computed, "cached", mix.name, misses.reads_per_op, &run.setting);
        row.bytes_per_op = (mix.update_percent == 0).then_some(misses.reads_per_op * PAGE_BYTES as f64);
        row.hit_ratio = Some(misses.hit_ratio());
        row.misses_by_level = Some(misses.by_level.clone());
        run.sink.row(row.with_cache(Some(run.cache)))?;
    }
    drop(run.progress);
    Ok(run.sink.finish()?)
}

impl<W: Write> Run<'_, W> {
    fn contend<C: Contender>(&mut self, runner: Runner<'_>, contender: &C, mix: FigureMix) -> anyhow::Result<()> {
        let keys = self.setting.keys;
        let has_cache = contender.cache().is_some();
        let amount = Amount {
            warm_up_ops: if has_cache { self.args.warm_up_ops.unwrap_or(2 * keys) } else { 0 },
            ops: self.args.ops.unwrap_or(keys),
            seed: self.args.population.seed,
            run: self.runs,
        };
        self.runs += 1;
        self.progress.begin(&format!("{}, {}", contender.name(), mix.name));
        let measured = runner.run(contender, mix, amount)?;
        self.progress.finish_step();
        let mut row = measured_row(contender, mix, &measured, &self.setting);
        row.warm_up_ops = Some(amount.warm_up_ops);
        Ok(self.sink.row(row)?)
    }
}

/// The row of what a contender did.
fn measured_row<C: Contender>(contender: &C, mix: FigureMix, measured: &Measured, setting: &Setting) -> Row {
    let per_op = |count: u64| count as f64 / measured.ops.max(1) as f64;
    let (counters, seconds) = (&measured.counters, measured.time.as_secs_f64());
    let reads = per_op(counters.reads);
    let mut row = Row::new(&contender.name(), Source::Measured, contender.access(), mix.name, reads, setting);
    row.ops = Some(measured.ops);
    row.seconds = Some(seconds);
    row.ops_per_second = (seconds > 0.0).then(|| measured.ops as f64 / seconds);
    row.writes_per_op = Some(per_op(counters.writes));
    row.atomics_per_op = Some(per_op(counters.atomics));
    row.two_sided_per_op = Some(per_op(counters.two_sided));
    row.bytes_per_op = Some(per_op(counters.bytes));
    row.round_trips_per_op = Some(per_op(counters.round_trips));
    if let Some(lookups) = &measured.lookups {
        let misses: u64 = lookups.misses_by_level.iter().sum();
        row.hit_ratio = Some(1.0 - misses as f64 / lookups.all.max(1) as f64);
        row.misses_by_level = Some(lookups.misses_by_level.iter().map(|&misses| per_op(misses)).collect());
    }
    row.admission = contender.admission();
    row.with_cache(contender.cache())
}
