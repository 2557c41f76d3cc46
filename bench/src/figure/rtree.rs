//! `farlink figure rtree`: what a search of an R-tree costs in each way to reach it, beside what Catfish's scheme would cost
//! (Xiao et al., ICDCS 2019).
//!
//! Catfish's data and its searches at three scales; pages, messages, bytes and round trips, with the pages of a search read
//! several at a time and one after the other. All is counted: nothing depends on how fast the machine is. One memory server, one
//! worker with one search at a time.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use farlink_offload::{CacheOptions, Policies, policy::Always};
use farlink_runtime::access::{Access as _, Plugin as _, Structure};
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::report::Report;
use farlink_structures::rtree::{RTree, RTreeOptions, Rect, Tree};

use super::args::RTreeArgs;
use super::plot::{self, Line, Plot, Scale};
use super::rows::{CacheSize, show_percent, with_cache};
use super::test_bed::TestBed;
use crate::cluster_view;
use crate::driver::{self, Client};
use crate::progress::Progress;
use crate::queue::{End, OperationQueue};
use crate::rects::{RectData, RectSource};
use crate::report::{CheckRow, Reporter, Row};
use crate::route::Route;
use crate::subject::{AccessMode, Job, Setting, Subject as _, WorkerId};
use crate::table::{digits, table};
use crate::tally::Tally;
use crate::units::{plural, show_short};

const FILE: &str = "rtree.svg";
const NAME: &str = "figure";
/// Workloads, and the scales that they stand for: the greatest edge of a window.
const SCALES: [(&str, &str); 3] = [("search-small", "1e-5"), ("search-large", "1e-2"), ("search-power", "power law")];
/// The scale of which the round trips of every single search are looked at.
const LARGE: &str = "search-large";
/// Round trips beyond one for each level, at most, of a search whose pages fit the window.
const BEYOND_LEVELS_MOST: u64 = 2;
/// How full the bulk load makes each page.
const FILL: f64 = 0.9;
/// What a rectangle takes at most, in pages of any size, with all that is above it.
const BYTES_PER_RECT_MAX: u64 = 96;

/// A way to reach the tree.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Way {
    name: &'static str,
    mode: AccessMode,
    /// Of the tree's pages, as was asked for.
    cache_percent: Option<f64>,
}

impl Way {
    fn all(cache_percents: &[f64]) -> Vec<Self> {
        let one = |name, mode| Self { name, mode, cache_percent: None };
        let sized = |name, mode| {
            let of = move |&percent: &f64| Self { cache_percent: Some(percent), ..one(name, mode) };
            cache_percents.iter().map(of)
        };
        let mut all = vec![one("one-sided", AccessMode::OneSided)];
        all.extend(sized("cached-inner", AccessMode::CachedInner));
        all.extend(sized("cached", AccessMode::Cached));
        all.extend(sized("engine, always", AccessMode::Engine));
        all.push(one("shipped whole", AccessMode::Coarse));
        all
    }
}

/// The tree on its test bed.
struct Loaded<'a> {
    args: &'a RTreeArgs,
    bed: TestBed,
    data: Arc<RectData>,
    tree: Structure,
    report: Report,
}

impl<'a> Loaded<'a> {
    fn load(args: &'a RTreeArgs) -> anyhow::Result<Self> {
        let seed = args.common.seed;
        let data = Arc::new(Tree::data(&Setting { seed, ..Setting::of_entries(args.rects) })?);
        let bed = TestBed::start(1, args.rects * BYTES_PER_RECT_MAX, MemOptions::default())?;
        let compute = bed.join(seed)?;
        let worker = compute.worker()?;
        let (tree, report) = worker.block_on(async {
            let options = RTreeOptions { page_bytes: args.page_bytes as usize, ..RTreeOptions::default() };
            let tree = RTree::create(&worker, NAME, options).await?;
            tree.bulk_load(data.entries.iter().copied(), FILL).await?;
            anyhow::Ok((tree.access().context().structure.clone(), tree.check().await?))
        })?;
        Ok(Self { args, bed, data, tree, report })
    }

    fn cache(&self, percent: f64) -> CacheSize {
        CacheSize::at_least_of_bytes(self.report.bytes, percent)
    }

    fn client(&self, way: Way, window: u32) -> anyhow::Result<(ComputeServer, Client<Tree>)> {
        let mut route = Route::<Tree>::new(way.mode, self.tree.clone(), Proof::Checksum);
        if let Some(percent) = way.cache_percent {
            let mut options = CacheOptions::new(self.cache(percent).cache_bytes as usize);
            options.page_bytes = self.args.page_bytes as usize;
            options.excludes_subtrees = way.mode == AccessMode::Engine;
            route = route.shipping(|| Policies::new(Always));
            route = route.through(options, Rect::EVERYTHING.into())?;
        }
        let (seed, window) = (self.args.common.seed, window as usize);
        let compute = self.bed.join_with(ComputeOptions { seed, window, ..ComputeOptions::default() })?;
        let worker = compute.worker()?;
        let access = route.open(&worker)?;
        Ok((compute, Client { access, worker }))
    }

    /// The searches of a scale, always the same.
    fn searches(&self, workload: &str) -> anyhow::Result<RectSource> {
        let mut source = Tree::source(&self.data, WorkerId { index: 0, total: 1 });
        Tree::prepare(&mut source, Job::Workload { name: workload, operations: None }, &|| Ok(()))?;
        Ok(source)
    }

    /// What searches came to, and the pages that `on_server` has counted meanwhile.
    fn tally(
        &self,
        way: Way,
        workload: &str,
        window: u32,
        on_server: impl Fn() -> u64,
    ) -> anyhow::Result<(Tally, u64)> {
        let (_compute, client) = self.client(way, window)?;
        let clients = [client];
        let run = |source, operations| {
            driver::run(&clients, vec![OperationQueue::new(source, End::Operations(operations))], 1)
        };
        let mut source = self.searches(workload)?;
        if way.mode.caches() {
            let (_, sources) = run(source, self.args.warm_up_ops)?;
            source = sources.into_iter().next().ok_or_else(|| anyhow::anyhow!("the searches are lost"))?;
        } else {
            // Then all measure the same searches.
            source.by_ref().take(self.args.warm_up_ops as usize).for_each(drop);
        }
        let before = on_server();
        let (tally, _) = run(source, self.args.ops)?;
        anyhow::ensure!(tally.outcomes.wrong_scans == 0, "a search has found what it was not asked for");
        Ok((tally, on_server() - before))
    }

    /// A row of a way at a scale: with several pages of a search on their way at a time, and with one.
    fn row(&self, way: Way, (workload, scale): (&'static str, &'static str)) -> anyhow::Result<Row> {
        let processors = match way.mode {
            AccessMode::Coarse | AccessMode::Engine => {
                Some(self.bed.serve(1, Duration::ZERO, self.args.common.seed)?)
            }
            _ => None,
        };
        let pages_read = || processors.as_ref().map_or(0, |processors| processors.pages_read());
        let (tally, on_server) = self.tally(way, workload, self.args.window, pages_read)?;
        let (one_at_a_time, _) = self.tally(way, workload, 1, pages_read)?;
        let per_op = |count: u64| count as f64 / self.args.ops as f64;
        let pages = match way.mode {
            AccessMode::Coarse => on_server,
            AccessMode::Engine => tally.cache.lookups + on_server,
            mode if mode.caches() => tally.cache.lookups,
            _ => tally.counters.reads,
        };
        let mut row = Row::measured(way.name, 0.0, &tally, way.mode.caches());
        // Counts alone.
        (row.seconds, row.ops_per_second, row.p50_ns, row.p99_ns, row.p999_ns) = (None, None, None, None, None);
        let cache = way.cache_percent.map(|percent| self.cache(percent));
        Ok(with_cache(described(row, "measured", scale, self), cache)
            .with("pages_per_op", per_op(pages))
            .with("found_per_op", per_op(tally.outcomes.scanned))
            .with("window", self.args.window)
            .with("round_trips_one_at_a_time_per_op", per_op(one_at_a_time.counters.round_trips)))
    }

    /// What Catfish's two schemes would cost for searches that go by as many pages as `one_sided` ones do.
    fn catfish(&self, one_sided: &Row, scale: &'static str) -> [Row; 2] {
        let (pages, found) = (one_sided.number("pages_per_op"), one_sided.number("found_per_op"));
        let row = |name: &str| {
            described(Row { name: name.to_owned(), ..Row::default() }, "computed", scale, self)
                .with("pages_per_op", pages)
                .with("found_per_op", found)
        };
        let messaging = Row {
            reads_per_op: Some(0.0),
            two_sided_per_op: Some(1.0),
            round_trips_per_op: Some(1.0),
            ..row("Catfish, messaging")
        };
        let offloading = Row {
            reads_per_op: pages,
            two_sided_per_op: Some(0.0),
            bytes_per_op: pages.map(|pages| pages * f64::from(self.args.page_bytes)),
            round_trips_per_op: Some(self.report.height() as f64),
            ..row("Catfish, offloading")
        };
        [
            messaging.with("round_trips_one_at_a_time_per_op", 1.0),
            offloading.with("round_trips_one_at_a_time_per_op", pages),
        ]
    }

    /// Of all searches at the large scale whose pages fit the window, the one that waits most often. `None` if those of no search
    /// fit.
    fn slowest(&self) -> anyhow::Result<Option<CheckRow>> {
        let way = Way { name: "one-sided", mode: AccessMode::OneSided, cache_percent: None };
        let (_compute, Client { worker, .. }) = self.client(way, self.args.window)?;
        let access = OneSided::<Tree>::new(&worker, self.tree.clone(), Proof::Checksum).beside_owners();
        let (mut most, mut fit) = (0, 0u64);
        for request in self.searches(LARGE)?.take(self.args.ops as usize) {
            let before = worker.counters();
            worker.block_on(Tree::run(&access, request))?;
            let cost = worker.counters() - before;
            if cost.reads <= u64::from(self.args.window) {
                (most, fit) = (most.max(cost.round_trips), fit + 1);
            }
        }
        let levels = self.report.height() as u64;
        let problem = (most > levels + BEYOND_LEVELS_MOST)
            .then(|| format!("one waits for {most} round trips, in a tree of {levels} levels"));
        let name = "searches at 1e-2 whose pages fit the window wait for at most levels + 2 round trips";
        let check = || CheckRow::new(name, problem).count("searches", fit).count("most", most).count("levels", levels);
        Ok((fit > 0).then(check))
    }
}

fn described(row: Row, source: &'static str, scale: &'static str, loaded: &Loaded<'_>) -> Row {
    row.with("source", source)
        .with("scale", scale)
        .with("rects", loaded.args.rects)
        .with("levels", loaded.report.height())
        .with("page_bytes", loaded.args.page_bytes)
        .with("seed", loaded.args.common.seed)
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &RTreeArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let ways = Way::all(&args.cache_percents);
    let mut progress = Progress::new((2 + SCALES.len() * ways.len()) as u64, args.common.json);
    let loaded = progress.step("load", || Loaded::load(args))?;
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{} in {} levels of pages of {} B, {:.1} MB;\n{} searches of each kind{};\ncache in percent of the tree; trip: \
         round trips with {} pages of a\nsearch on their way at a time, alone: with one",
        plural(args.rects, "rectangle"),
        loaded.report.height(),
        args.page_bytes,
        loaded.report.bytes as f64 / 1e6,
        args.ops,
        if args.warm_up_ops > 0 { format!(" after {} that fill the cache", args.warm_up_ops) } else { String::new() },
        args.window,
    ))?;
    reporter.note(
        "Catfish: computed for the pages of our tree (ICDCS 2019, section IV): messaging\n\
         is one message, offloading a READ for each page, those of a level at a time",
    )?;
    let mut rows = Vec::new();
    for scale in SCALES {
        let mut of_scale = Vec::new();
        for &way in &ways {
            of_scale.push(progress.step(&format!("{}, scale {}", way.name, scale.1), || loaded.row(way, scale))?);
        }
        of_scale.extend(loaded.catfish(&of_scale[0], scale.1));
        of_scale.iter().try_for_each(|row| reporter.row(row.clone()))?;
        progress.suspend(|| reporter.table(&format!("\nscale {}\n", scale.1), show))?;
        rows.extend(of_scale);
    }
    progress.begin("check");
    drop(progress);
    let percents: Vec<f64> = args.cache_percents.iter().map(|&percent| loaded.cache(percent).cache_percent).collect();
    plot::write_svg(&plots(&rows, &percents), &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    reporter.check(&cluster_view::check_row(<Tree>::NAME, NAME, &loaded.report))?;
    loaded.slowest()?.iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

fn show(rows: &[Row]) -> comfy_table::Table {
    let header =
        ["", "cache\n%", "page\n/op", "read\n/op", "msg\n/op", "byte\n/op", "trip\n/op", "alone\n/op", "found\n/op"];
    let line = |row: &Row| {
        let percent = row.number("cache_percent");
        vec![
            row.name.clone(),
            percent.map_or_else(|| "-".to_owned(), show_percent),
            digits(row.number("pages_per_op"), 2),
            digits(row.reads_per_op, 2),
            digits(row.two_sided_per_op, 2),
            show_short(row.bytes_per_op),
            digits(row.round_trips_per_op, 2),
            digits(row.number("round_trips_one_at_a_time_per_op"), 2),
            digits(row.number("found_per_op"), 1),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

/// Round trips and bytes of each scale, over cache sizes: what has no cache costs the same everywhere.
fn plots(rows: &[Row], cache_percents: &[f64]) -> Vec<Plot> {
    let trips: fn(&Row) -> Option<f64> = |row| row.round_trips_per_op;
    let bytes: fn(&Row) -> Option<f64> = |row| row.bytes_per_op;
    let plot = |(_, scale): (&str, &str), (title, y): (&str, fn(&Row) -> Option<f64>)| {
        let rows = rows.iter().filter(move |row| row.shown("scale") == scale);
        let points = rows.flat_map(|row| {
            let percents = row.number("cache_percent").map_or_else(|| cache_percents.to_vec(), |percent| vec![percent]);
            percents.into_iter().filter_map(move |percent| Some((row.name.clone(), percent, y(row)?)))
        });
        Plot {
            title: format!("{title} of a search, scale {scale}"),
            x_label: "cache, percent of the tree".to_owned(),
            x_scale: Scale::Logarithmic,
            y_label: title.to_lowercase(),
            lines: Line::by_name(points),
            y_max: None,
        }
    };
    let both = [("Round trips", trips), ("Bytes", bytes)];
    SCALES.into_iter().flat_map(|scale| both.map(|what| plot(scale, what))).collect()
}
