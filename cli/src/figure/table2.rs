//! `farlink figure dex-table2`: the paper's rows, ours, and the best that a cache of that size could do.
//!
//! The optimum has the same bytes as each cache and uses all of them for pages, one frame for each 1024 B; ours also keep
//! frames, table, cooling map and sketch in theirs. So it is the stricter bound, by what the bookkeeping takes.

use std::io::Write;

use super::args::Table2Args;
use super::bed::{self, Bed, PAGE_BYTES};
use super::contender::{CacheSetting, Contender, FineGrained, Owning, Sharing};
use super::optimum::{Misses, Optimum};
use super::paper;
use super::rows::{CacheSize, Row, Setting, Sink, Source};
use super::runner::{Amount, FigureMix, Measured, Runner};
use crate::commands::all_held;
use crate::progress::Progress;
use crate::report::Reporter;

pub(crate) const READ_ONLY: FigureMix = FigureMix { name: "read-only", update_percent: 0 };
const MIXES: [FigureMix; 2] = [READ_ONLY, FigureMix { name: "write-intensive", update_percent: 50 }];
/// More would not make a count more certain. Without a cache, where every operation costs about the same, even fewer do.
const OPS_MAX: u64 = 10_000_000;
const UNCACHED_OPS_MAX: u64 = 2_000_000;

/// What every row of a run needs.
struct Run<'a, W> {
    args: &'a Table2Args,
    setting: Setting,
    cache: CacheSize,
    optimum: Misses,
    /// Runs so far.
    runs: u32,
    sink: Sink<W>,
    progress: Progress,
}

/// Makes the table, then checks the tree.
pub(crate) fn run(args: &Table2Args, out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    let population = args.population.population(args.compute_servers)?;
    let setting = Setting {
        keys: population.keys(),
        compute_servers: args.compute_servers,
        memory_servers: Some(args.memory_servers),
        theta: population.theta(),
        page_bytes: PAGE_BYTES,
        seed: Some(args.population.seed),
    };
    let cache = CacheSize::percent_of(&population, args.cache_percent);
    let mut sink = Sink::new(out, args.json);
    sink.note(&format!(
        "{} keys, zipf {}, {} compute servers with {} bytes of cache each, admission {}",
        population.keys(),
        population.theta(),
        population.servers(),
        cache.cache_bytes,
        args.admission.name(),
    ))?;
    sink.note("paper: DEX (VLDB 2024), table 2, with 200M keys and four compute servers")?;
    if paper::dex_code(READ_ONLY.name, args.compute_servers, args.cache_percent).next().is_some() {
        sink.note("public code: DEX's public code, measured, with 10M keys and one compute server")?;
    }
    let mut progress = Progress::new(3 + 3 * MIXES.len() as u64, args.json);
    progress.begin("optimum");
    let optimum = Optimum::new(&population, &bed::shape(population.keys())).with_frames(cache.cache_bytes / PAGE_BYTES);
    progress.finish_step();
    progress.begin("load");
    let bed = Bed::load(&population, args.memory_servers)?;
    progress.finish_step();
    let mut run = Run { args, setting, cache, optimum, runs: 0, sink, progress };
    let runner = Runner { bed: &bed, population: &population };
    // The contenders. Each mix begins anew: with an empty cache, warmed up by the mix itself.
    for mix in MIXES {
        paper::table_2(mix.name).try_for_each(|row| run.sink.row(row))?;
        paper::dex_code(mix.name, args.compute_servers, args.cache_percent).try_for_each(|row| run.sink.row(row))?;
        run.contend(runner, &FineGrained, mix)?;
        let setting = CacheSetting { size: run.cache, admission: args.admission };
        run.contend(runner, &Sharing(setting), mix)?;
        run.contend(runner, &Owning(setting), mix)?;
        run.sink.row(optimum_row(&run.optimum, mix, &run.setting, run.cache))?;
    }
    run.progress.begin("check");
    let check = bed.check()?;
    drop(run.progress);
    let mut reporter = Reporter::new(run.sink.finish()?, args.json);
    reporter.check(&check)?;
    all_held(&reporter)
}

impl<W: Write> Run<'_, W> {
    fn contend<C: Contender>(&mut self, runner: Runner<'_>, contender: &C, mix: FigureMix) -> anyhow::Result<()> {
        let keys = self.setting.keys;
        let has_cache = contender.cache().is_some();
        let ops = keys.min(if has_cache { OPS_MAX } else { UNCACHED_OPS_MAX });
        let amount = Amount {
            warm_up_ops: if has_cache { self.args.warm_up_ops.unwrap_or(2 * keys) } else { 0 },
            ops: self.args.ops.unwrap_or(ops),
            seed: self.args.population.seed,
            in_flight: self.args.in_flight,
            run: self.runs,
        };
        self.runs += 1;
        self.progress.begin(&format!("{}, {}", contender.name(), mix.name));
        let measured = runner.run(contender, mix, amount)?;
        self.progress.finish_step();
        let row = measured_row(contender, mix, amount, &measured, &self.setting);
        Ok(self.sink.row(row.against(&self.optimum))?)
    }
}

/// The row of what a contender did.
pub(crate) fn measured_row<C: Contender>(
    contender: &C,
    mix: FigureMix,
    amount: Amount,
    measured: &Measured,
    setting: &Setting,
) -> Row {
    let per_op = |count: u64| count as f64 / measured.ops.max(1) as f64;
    let (counters, seconds) = (&measured.counters, measured.time.as_secs_f64());
    let reads = per_op(counters.reads);
    let mut row = Row::new(&contender.name(), Source::Measured, contender.access(), mix.name, reads, setting);
    row.ops = Some(measured.ops);
    row.warm_up_ops = Some(amount.warm_up_ops);
    row.in_flight = Some(amount.in_flight);
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
        let levels = bed::shape(setting.keys).levels();
        let by_level = lookups.misses_by_level.iter().take(levels);
        row.misses_by_level = Some(by_level.map(|&misses| per_op(misses)).collect());
        row.write_backs_per_op = Some(per_op(lookups.write_backs));
    }
    row.admission = contender.admission();
    row.with_cache(contender.cache())
}

/// The row of the best contents of a cache of this size.
pub(crate) fn optimum_row(misses: &Misses, mix: FigureMix, setting: &Setting, cache: CacheSize) -> Row {
    let mut row = Row::new("static optimum", Source::Computed, "cached", mix.name, misses.reads_per_op, setting);
    row.bytes_per_op = (mix.update_percent == 0).then_some(misses.reads_per_op * PAGE_BYTES as f64);
    row.hit_ratio = Some(misses.hit_ratio());
    row.misses_by_level = Some(misses.by_level.clone());
    row.with_cache(Some(cache)).against(misses)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::figure::args::Figure;
    use clap::Parser as _;
    use serde_json::Value;

    fn lines(options: &str) -> Vec<Value> {
        let line = ["farlink", "figure", "dex-table2", "--json"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::DexTable2(args) = figure.figure else { panic!("another figure") };
        let mut out = Vec::new();
        run(&args, &mut out).unwrap();
        String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn rows_come_in_order_and_make_sense() {
        let lines = lines("--keys 50000 --compute-servers 1 --memory-servers 2 --cache-percent 32 --in-flight 2");
        let names: Vec<&str> = lines.iter().map(|line| line["name"].as_str().unwrap()).collect();
        let mix = [
            "DEX",
            "Sherman",
            "SMART",
            "P-Sherman",
            "P-SMART",
            "DEX's public code",
            "DEX's public code, no offload",
            "farlink FG",
            "farlink, shared-everything",
            "farlink, owned ranges",
            "static optimum",
        ];
        assert_eq!(names, [&mix[..], &mix[..], &["btree"]].concat());
        assert_eq!((&lines[22]["ok"], &lines[22]["entries"]), (&Value::Bool(true), &50_000.into()));
        let number = |line: &Value, field: &str| line[field].as_f64().unwrap_or_else(|| panic!("{field}: {line}"));
        for mix in [&lines[7..11], &lines[18..22]] {
            let [fine, shared, owned, best] = mix else { panic!("four rows") };
            // Two in flight may meet on a page, and one of them begins anew.
            assert!((3.0..3.05).contains(&number(fine, "reads_per_op")), "{fine}");
            assert_eq!(fine["hit_ratio"], Value::Null);
            // One leaf is read each time; the inner pages are all cached.
            assert!((1.0..1.05).contains(&number(shared, "reads_per_op")), "{shared}");
            assert!((0.65..0.67).contains(&number(shared, "hit_ratio")), "{shared}");
            assert!(number(owned, "reads_per_op") >= number(best, "reads_per_op"), "{owned}\n{best}");
            assert!((1.0..1.6).contains(&number(owned, "leaf_misses_over_optimum")), "{owned}");
            assert!(number(shared, "leaf_misses_over_optimum") > number(owned, "leaf_misses_over_optimum"));
            assert_eq!(number(best, "leaf_misses_over_optimum"), 1.0);
            assert_eq!((number(owned, "atomics_per_op"), &owned["in_flight"]), (0.0, &2.into()));
            assert_eq!(number(owned, "writes_per_op"), number(owned, "write_backs_per_op"));
        }
        assert_eq!(number(&lines[9], "writes_per_op"), 0.0);
        assert!(number(&lines[20], "write_backs_per_op") > 0.0);
    }
}
