//! `farlink figure replacement`: what each admission policy makes of a cache, over sizes and skews, beside the best possible:
//! as rows and as a plot with a panel for each skew. Lookups only, so runs do not disturb one another and go side by side.

use std::fs;
use std::io::Write;
use std::thread;

use anyhow::{Context as _, ensure};

use super::args::{AdmissionChoice, ReplacementArgs};
use super::bed::{self, Bed, PAGE_BYTES};
use super::contender::{CacheSetting, Owning};
use super::optimum::Optimum;
use super::plot::{self, Line, Plot};
use super::population::Population;
use super::rows::{CacheSize, Row, Setting, Sink};
use super::runner::{Amount, Runner};
use super::table2::{READ_ONLY, measured_row, optimum_row};
use crate::commands::all_held;
use crate::progress::Progress;
use crate::report::Reporter;
use crate::units::show_count;

const POLICIES: [AdmissionChoice; 3] =
    [AdmissionChoice::Always, AdmissionChoice::Probability, AdmissionChoice::Frequency];
/// What a cache needs at least, whatever it is for.
const CACHE_BYTES_MIN: u64 = 64 << 10;
const FILE: &str = "replacement.svg";

/// Makes the rows and the plot, then checks the tree.
pub(crate) fn run(args: &ReplacementArgs, out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    let populations = args.populations()?;
    let first = populations.first().context("--theta names no exponent")?;
    let caches: Vec<CacheSize> =
        args.cache_percents.iter().map(|percent| CacheSize::percent_of(first, *percent)).collect();
    let least = caches.iter().map(|cache| cache.cache_bytes).min().unwrap_or(0);
    ensure!(
        least >= CACHE_BYTES_MIN,
        "the smallest cache would have {least} bytes, and none works with less than {CACHE_BYTES_MIN}; give more --keys or \
         larger --cache-percents"
    );
    fs::create_dir_all(&args.out).with_context(|| format!("cannot make the folder {}", args.out.display()))?;
    let mut sink = Sink::new(out, args.json);
    let amount = Amount {
        warm_up_ops: args.warm_up_ops.unwrap_or(2 * first.keys()),
        ops: args.ops.unwrap_or(first.keys()),
        seed: args.seed,
        in_flight: 1,
        run: 0,
    };
    sink.note(&format!(
        "{} keys, {} lookups after {} that fill the cache; percent of the raw data, 16 bytes a key",
        first.keys(),
        amount.ops,
        amount.warm_up_ops
    ))?;
    let mut progress = Progress::new(2 + (populations.len() * caches.len()) as u64, args.json);
    progress.begin("load");
    let bed = Bed::load(first, 1)?;
    progress.finish_step();
    let mut panels = Vec::new();
    for population in &populations {
        let runner = Runner { bed: &bed, population };
        let mut rows = Vec::new();
        let optimum = Optimum::new(population, &bed::shape(population.keys()));
        for cache in &caches {
            progress.begin(&format!("zipf {}, cache of {}%", population.theta(), cache.cache_percent));
            rows.push(of_size(runner, &optimum, *cache, amount, args)?);
            progress.finish_step();
        }
        panels.push(panel(population, &rows));
        rows.into_iter().flatten().try_for_each(|row| sink.row(row))?;
        progress.suspend(|| {
            sink.note(&format!("\nzipf {}", population.theta()))?;
            sink.tables()
        })?;
    }
    progress.begin("check");
    let check = bed.check()?;
    drop(progress);
    let path = args.out.join(FILE);
    plot::write_svg(&panels, &path)?;
    sink.note(&format!("\nwrote {}", path.display()))?;
    let mut reporter = Reporter::new(sink.finish()?, args.json);
    reporter.check(&check)?;
    all_held(&reporter)
}

/// A row for each policy, and the optimum's, for a cache of one size.
fn of_size(
    runner: Runner<'_>,
    optimum: &Optimum,
    cache: CacheSize,
    amount: Amount,
    args: &ReplacementArgs,
) -> anyhow::Result<Vec<Row>> {
    let least = optimum.with_frames(cache.cache_bytes / PAGE_BYTES);
    let setting = Setting {
        keys: runner.population.keys(),
        compute_servers: runner.population.servers() as u64,
        memory_servers: Some(1),
        theta: runner.population.theta(),
        page_bytes: PAGE_BYTES,
        seed: Some(args.seed),
    };
    let run = |admission: AdmissionChoice| -> anyhow::Result<Row> {
        let contender = Owning(CacheSetting { size: cache, admission });
        let measured = runner.run(&contender, READ_ONLY, amount)?;
        let mut row = measured_row(&contender, READ_ONLY, amount, &measured, &setting);
        row.name = admission.policy().to_owned();
        Ok(row.against(&least))
    };
    let run = &run;
    let mut rows = thread::scope(|scope| {
        let threads = POLICIES.map(|admission| scope.spawn(move || run(admission)));
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect::<anyhow::Result<Vec<_>>>()
    })?;
    rows.push(optimum_row(&least, READ_ONLY, &setting, cache));
    Ok(rows)
}

/// Hit ratios over cache sizes; `sizes` holds the rows of each size, in the same order.
fn panel(population: &Population, sizes: &[Vec<Row>]) -> Plot {
    let names = sizes.first().into_iter().flatten().map(|row| row.name.clone());
    let point = |row: &Row| Some((row.cache_percent?, row.hit_ratio?));
    let lines = names.enumerate().map(|(index, name)| {
        let points = sizes.iter().filter_map(|rows| point(rows.get(index)?)).collect();
        Line { name, points }
    });
    Plot {
        title: format!("{} keys, zipf {}", show_count(population.keys() as f64), population.theta()),
        x_label: "cache, percent of the raw data".to_owned(),
        y_label: "hit ratio".to_owned(),
        lines: lines.collect(),
        y_max: Some(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::figure::args::Figure;
    use clap::Parser as _;
    use serde_json::Value;

    fn run_with(options: &str) -> (anyhow::Result<()>, String) {
        let line = ["farlink", "figure", "replacement"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::Replacement(args) = figure.figure else { panic!("another figure") };
        let mut out = Vec::new();
        let result = run(&args, &mut out);
        (result, String::from_utf8(out).unwrap())
    }

    #[test]
    fn policies_lie_below_the_optimum() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().display();
        let small = "--keys 20000 --theta 0.6,1.2 --cache-percents 40,64";
        let (result, text) = run_with(&format!("--json {small} --out {out}"));
        result.unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2 * 2 * 4 + 1, "{text}");
        for rows in lines[..16].chunks(4) {
            let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
            assert_eq!(names, ["always", "probability (DEX)", "frequency", "static optimum"]);
            let ratio = |row: &Value| row["hit_ratio"].as_f64().unwrap();
            // Counts of a random run: a little luck is possible.
            assert!(rows[..3].iter().all(|row| ratio(row) < ratio(&rows[3]) + 0.01), "{rows:?}");
            assert!(rows.iter().all(|row| row["theta"] == rows[0]["theta"]));
        }
        assert_eq!((&lines[0]["theta"], &lines[15]["theta"]), (&0.6.into(), &1.2.into()));
        assert_eq!(lines[16]["ok"], true);
        let svg = fs::read_to_string(folder.path().join(FILE)).unwrap();
        assert!(svg.contains("zipf 0.6") && svg.contains("zipf 1.2") && svg.contains("frequency"));

        let (result, text) = run_with(&format!("{small} --out {out} --ops 1000 --warm-up-ops 1000"));
        result.unwrap();
        assert!(text.contains("\nzipf 1.2\n") && text.contains("check btree: ok"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for (options, says) in [
            ("--keys 1000", "give more --keys"),
            ("--cache-percents 0", "--cache-percents 0 is not"),
            ("--theta 0.5,-1", "--theta -1"),
        ] {
            let error = format!("{:#}", run_with(options).0.unwrap_err());
            assert!(error.contains(says), "{options}: {error}");
        }
    }
}
