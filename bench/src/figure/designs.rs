//! `farlink figure fg-cg-hybrid`: fine-grained, coarse-grained and hybrid trees side by side (Ziegler et al., SIGMOD 2019,
//! figures 7 to 9).
//!
//! Point and range queries over the number of clients, each with one query at a time, at places drawn uniformly. The data are
//! divided evenly among the memory servers, or 80, 12, 5 and 3 percent of them; the fine-grained design, and the division by hash,
//! do not care. A query has a latency added to each of its remote operations, a memory server's card lets through so many bytes a
//! second, and its processors take a set time for each page that they look at. All clients are tasks of one worker.

use std::io::Write;
use std::time::Duration;

use anyhow::ensure;
use farlink_offload::ShardKey;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::ptr::ServerId;
use farlink_structures::btree::{BTreeOptions, PlacementPolicy, Tree};
use farlink_structures::map::KeyRange;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::args::DesignsArgs;
use super::key_set::{KeySet, entry};
use super::load::{Load, Lot};
use super::offload::tree_bytes_max;
use super::plot::{self, Line, Plot, Scale};
use super::test_bed::{Processors, TestBed};
use crate::maps::MapRequest;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::route::Route;
use crate::subject::AccessMode;
use crate::table::{digits, micros, table};
use crate::units::{show_bytes, show_count, show_nanoseconds, show_short};

const FILE: &str = "fg-cg-hybrid.svg";

/// What has to hold with the most clients. Point queries: hybrid over fine-grained, which reads a page for each level. Range
/// queries on skewed data: hybrid over coarse-grained, which has one server's bandwidth; and what hybrid and fine-grained keep of
/// what they do on uniform data, at least, and coarse-grained, at most.
const POINT_LEAST: f64 = 1.2;
const RANGE_LEAST: f64 = 1.3;
const KEPT_LEAST: f64 = 0.8;
const KEPT_MOST: f64 = 0.7;
/// Ziegler et al., section 6.1: of four memory servers the first has 80%, and so on.
const SKEWED_PERCENT: [u64; 4] = [80, 12, 5, 3];

/// A design, and how the keys are divided where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Design {
    Fine,
    CoarseRange,
    CoarseHash,
    Hybrid,
}

impl Design {
    const ALL: [Self; 4] = [Self::Fine, Self::CoarseRange, Self::CoarseHash, Self::Hybrid];

    fn name(self) -> &'static str {
        match self {
            Self::Fine => "fine-grained",
            Self::CoarseRange => "coarse, range",
            Self::CoarseHash => "coarse, hash",
            Self::Hybrid => "hybrid",
        }
    }

    fn placement(self) -> (AccessMode, PlacementPolicy) {
        match self {
            Self::Fine => (AccessMode::OneSided, PlacementPolicy::RoundRobin),
            Self::CoarseRange | Self::CoarseHash => (AccessMode::Coarse, PlacementPolicy::OneServer),
            Self::Hybrid => (AccessMode::Hybrid, PlacementPolicy::Leaves),
        }
    }
}

/// How much of the data each memory server has, where it is divided by ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    Uniform,
    Skewed,
}

impl Data {
    const ALL: [Self; 2] = [Self::Uniform, Self::Skewed];

    fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Skewed => "skewed",
        }
    }

    /// Those that so many memory servers can have: others than the paper's four have uniform data only.
    fn of(servers: usize) -> &'static [Self] {
        if servers == SKEWED_PERCENT.len() { &Self::ALL } else { &[Self::Uniform] }
    }

    /// The number of the first key of each part, and the number of keys.
    fn bounds(self, servers: usize, keys: u64) -> Vec<u64> {
        let bound = |part: usize| match self {
            Self::Skewed => keys * SKEWED_PERCENT.iter().take(part).sum::<u64>() / 100,
            Self::Uniform => keys * part as u64 / servers as u64,
        };
        (0..=servers).map(bound).collect()
    }
}

/// A row, and where it stands.
#[derive(Debug, Clone)]
struct Point {
    design: Design,
    data: Data,
    /// The share of all keys that a query asks for; 0 for one key.
    selectivity: f64,
    clients: u32,
    row: Row,
}

/// The test bed, and how it serves.
struct Serving<'a> {
    args: &'a DesignsArgs,
    // Before the memory that they serve.
    _processors: Processors,
    bed: TestBed,
}

impl<'a> Serving<'a> {
    fn start(args: &'a DesignsArgs) -> anyhow::Result<Self> {
        let options =
            MemOptions { latency_ns: args.latency, bandwidth_bytes_per_s: args.bandwidth, ..MemOptions::default() };
        // Each design has its trees for both kinds of data; in the worst case they are all on one server.
        let bytes = 8 * tree_bytes_max(args.keys, args.page_bytes, args.fill);
        let bed = TestBed::start(args.memory_servers as usize, bytes, options)?;
        let page = Duration::from_nanos(args.page_time);
        let _processors = bed.serve(args.server_threads as usize, page, args.common.seed)?;
        Ok(Self { args, _processors, bed })
    }

    fn parts(&self, design: Design, data: Data) -> Vec<String> {
        let parts = if design == Design::Fine { 1 } else { self.args.memory_servers };
        (0..parts).map(|part| format!("{} {} {part}", design.name(), data.name())).collect()
    }

    /// Loads a tree, or its parts.
    fn load(&self, design: Design, data: Data) -> anyhow::Result<Route<Tree>> {
        let (args, names) = (self.args, self.parts(design, data));
        let bounds = data.bounds(names.len(), args.keys);
        let cut = match design {
            Design::CoarseHash => ShardKey::Hash(names.len()),
            _ => {
                let lows: Vec<u64> = bounds[1..names.len()].iter().map(|number| KeySet::key(*number)).collect();
                ShardKey::Regions(KeyRange::cut_at(&lows))
            }
        };
        let (mode, placement) = design.placement();
        let mut parts = Vec::new();
        for (part, name) in names.iter().enumerate() {
            let root = ServerId::new(part as u16);
            let options =
                BTreeOptions { page_bytes: args.page_bytes as usize, placement, root, ..BTreeOptions::default() };
            let entries = (0..args.keys).map(entry).filter(|(key, _)| cut.about(&KeyRange::only(*key)) == [part]);
            parts.push(self.bed.load(name, options, entries, args.fill)?);
        }
        Route::of_parts(mode, parts, cut)
    }

    fn run(
        &self,
        route: &Route<Tree>,
        (design, data): (Design, Data),
        selectivity: f64,
        clients: u32,
    ) -> anyhow::Result<Point> {
        let (args, keys) = (self.args, self.args.keys);
        let count = ((keys as f64 * selectivity) as u64).clamp(1, keys);
        let load = Load {
            compute_servers: 1,
            workers: 1,
            in_flight: clients,
            route: &|_| Ok(route.clone()),
            operations: &|Lot { is_warm_up, .. }| {
                let mut random = SmallRng::seed_from_u64(args.common.seed ^ u64::from(is_warm_up) << 32);
                Box::new(std::iter::repeat_with(move || {
                    let first = random.random_range(0..=keys - count);
                    let (low, high) = (KeySet::key(first), KeySet::key(first + count - 1));
                    if selectivity == 0.0 {
                        return MapRequest::Get { key: low, latest: false };
                    }
                    MapRequest::Range { low, high, count }
                }))
            },
            limits: [args.warm_up_seconds, args.seconds].map(Some),
            on_one_core: true,
            seed: args.common.seed,
        };
        let (row, _) = load.run(&self.bed, if selectivity == 0.0 { "point" } else { "range" })?;
        let row = row
            .with("design", design.name())
            .with("data", data.name())
            .with("selectivity", selectivity)
            .with("clients", clients)
            .with("memory_servers", args.memory_servers)
            .with("server_threads", args.server_threads)
            .with("latency_ns", args.latency)
            .with("page_ns", args.page_time)
            .with("bandwidth_bytes_per_second", args.bandwidth)
            .with("keys", keys)
            .with("page_bytes", args.page_bytes)
            .with("fill", args.fill)
            .with("seed", args.common.seed);
        Ok(Point { design, data, selectivity, clients, row })
    }
}

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &DesignsArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    let least = args.selectivities.iter().copied().fold(f64::INFINITY, f64::min);
    ensure!(
        args.keys as f64 * least >= 1.0,
        "a range of {}% has less than one of {} keys: give more --keys, or larger --selectivities",
        least * 100.0,
        args.keys
    );
    let kinds = Data::of(args.memory_servers as usize);
    let all: Vec<_> = kinds.iter().flat_map(|&data| Design::ALL.map(|design| (design, data))).collect();
    let selectivities: Vec<f64> = [0.0].into_iter().chain(args.selectivities.iter().copied()).collect();
    let mut progress = Progress::new((all.len() * selectivities.len()) as u64, args.common.json);
    let serving = Serving::start(args)?;
    let mut points = Vec::new();
    for &(design, data) in &all {
        let route = serving.load(design, data)?;
        for &selectivity in &selectivities {
            progress.begin(&format!("{}, {} data, {}", design.name(), data.name(), query(selectivity)));
            for &clients in &args.clients {
                points.push(serving.run(&route, (design, data), selectivity, clients)?);
            }
            progress.finish_step();
        }
    }
    drop(progress);
    plot::write_svg(&plots(&points, &selectivities, kinds), &path)?;
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{} keys in pages of {}; {} memory servers, each with {} processors that take {} for a page, \
         and a card for {}/s; {} added to every remote operation",
        show_count(args.keys as f64),
        show_bytes(args.page_bytes.into()),
        args.memory_servers,
        args.server_threads,
        show_nanoseconds(args.page_time),
        show_bytes(args.bandwidth),
        show_nanoseconds(args.latency),
    ))?;
    if !kinds.contains(&Data::Skewed) {
        let servers = SKEWED_PERCENT.len();
        reporter.note(&format!("no skewed data: the paper says how {servers} memory servers have them"))?;
    }
    for &data in kinds {
        for &selectivity in &selectivities {
            let rows = points.iter().filter(|point| (point.data, point.selectivity) == (data, selectivity));
            rows.map(|point| point.row.clone()).try_for_each(|row| reporter.row(row))?;
            reporter.table(&format!("\n{}, {} data\n", query(selectivity), data.name()), show)?;
        }
    }
    reporter.note(&format!("\nwrote {}", path.display()))?;
    for &(design, data) in &all {
        reporter.check(&serving.bed.check(&serving.parts(design, data), args.keys)?)?;
    }
    checks(&points, kinds).iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

fn query(selectivity: f64) -> String {
    if selectivity == 0.0 {
        "point queries".to_owned()
    } else {
        format!("ranges of {}% of the keys", selectivity * 100.0)
    }
}

/// What the rows with the most clients say.
fn checks(points: &[Point], kinds: &[Data]) -> Vec<CheckRow> {
    let most = points.iter().map(|point| point.clients).max().unwrap_or(0);
    let find = |is_point: bool, design: Design, data: Data| {
        // Of several selectivities the largest: the leaves count for the most.
        let is_it = |point: &&Point| {
            (point.design, point.data, point.clients, point.selectivity == 0.0) == (design, data, most, is_point)
        };
        points.iter().filter(is_it).max_by(|a, b| a.selectivity.total_cmp(&b.selectivity)).map(|point| &point.row)
    };
    let times = |is_point, (design, data), (other, of)| {
        let pair = find(is_point, design, data).zip(find(is_point, other, of));
        pair.map_or(f64::NAN, |(row, other)| row.times(other))
    };
    let mut all = Vec::new();
    for &data in kinds {
        let costs = |design: Design, reads: f64| {
            let Some(row) = find(true, design, data) else { return Some("there is no such row".to_owned()) };
            let had = (row.two_sided_per_op.unwrap_or(f64::NAN), row.reads_per_op.unwrap_or(f64::NAN));
            let is_so = (had.0 - 1.0).abs() < 0.1 && (had.1 - reads).abs() < 0.1;
            (!is_so).then(|| format!("{}: {:.2} messages and {:.2} READs a query", design.name(), had.0, had.1))
        };
        let problem = costs(Design::CoarseRange, 0.0)
            .or_else(|| costs(Design::CoarseHash, 0.0))
            .or_else(|| costs(Design::Hybrid, 1.0));
        let name = format!("a message, and with hybrid a READ, for a point query, {} data", data.name());
        all.push(CheckRow::new(&name, problem));
    }
    for &data in kinds {
        let over = times(true, (Design::Hybrid, data), (Design::Fine, data));
        let name = format!("point queries, {} data: hybrid over fine-grained", data.name());
        all.push(CheckRow::within(&name, over, POINT_LEAST..=f64::MAX));
    }
    if !kinds.contains(&Data::Skewed) {
        return all;
    }
    let over = times(false, (Design::Hybrid, Data::Skewed), (Design::CoarseRange, Data::Skewed));
    all.push(CheckRow::within("range queries, skewed data: hybrid over coarse-grained", over, RANGE_LEAST..=f64::MAX));
    for design in [Design::Fine, Design::Hybrid, Design::CoarseRange] {
        let kept = times(false, (design, Data::Skewed), (design, Data::Uniform));
        let bounds = if design == Design::CoarseRange { 0.0..=KEPT_MOST } else { KEPT_LEAST..=f64::MAX };
        let name = format!("range queries: {} on skewed over uniform data", design.name());
        all.push(CheckRow::within(&name, kept, bounds));
    }
    all
}

fn show(rows: &[Row]) -> comfy_table::Table {
    let header = ["design", "clients", "ops/s", "p50\nus", "p99\nus", "read\n/op", "msg\n/op", "byte\n/op"];
    let line = |row: &Row| {
        vec![
            row.shown("design"),
            row.shown("clients"),
            show_count(row.ops_per_second.unwrap_or(f64::NAN)),
            micros(row.p50_ns),
            micros(row.p99_ns),
            digits(row.reads_per_op, 2),
            digits(row.two_sided_per_op, 2),
            show_short(row.bytes_per_op),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

fn plots(points: &[Point], selectivities: &[f64], kinds: &[Data]) -> Vec<Plot> {
    let plot = |selectivity: f64, data: Data| {
        let points = points.iter().filter(move |point| (point.data, point.selectivity) == (data, selectivity));
        let xy = |point: &Point| {
            Some((point.design.name().to_owned(), f64::from(point.clients), point.row.ops_per_second? / 1e3))
        };
        Plot {
            title: format!("{}, {} data", query(selectivity), data.name()),
            x_label: "clients".to_owned(),
            x_scale: Scale::Logarithmic,
            y_label: "thousand operations a second".to_owned(),
            lines: Line::by_name(points.filter_map(xy)),
            y_max: None,
        }
    };
    let of = |&selectivity: &f64| kinds.iter().map(move |&data| plot(selectivity, data));
    selectivities.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_divided_as_the_paper_says() {
        assert_eq!(Data::Skewed.bounds(4, 1000), [0, 800, 920, 970, 1000]);
        assert_eq!(Data::Uniform.bounds(4, 1000), [0, 250, 500, 750, 1000]);
    }

    #[test]
    fn checks_fail_beyond_their_bounds() {
        let points = |hybrid_point: f64, coarse_skewed: f64, hybrid_skewed: f64, messages: f64| {
            let mut points = Vec::new();
            for (data, design) in Data::ALL.into_iter().flat_map(|data| Design::ALL.map(|design| (data, design))) {
                let (reads, two_sided) = match design {
                    Design::Fine => (3.0, 0.0),
                    Design::Hybrid => (1.0, messages),
                    _ => (0.0, 1.0),
                };
                let point = if design == Design::Hybrid { hybrid_point } else { 1.0 };
                let range = match (data, design) {
                    (Data::Skewed, Design::CoarseRange) => coarse_skewed,
                    (Data::Skewed, Design::Hybrid) => hybrid_skewed,
                    _ => 1.0,
                };
                for (selectivity, rate) in [(0.0, point), (0.1, range)] {
                    let row = Row {
                        ops_per_second: Some(rate),
                        reads_per_op: Some(reads),
                        two_sided_per_op: Some(two_sided),
                        ..Row::default()
                    };
                    points.push(Point { design, data, selectivity, clients: 9, row });
                }
            }
            points
        };
        let failed = |points: &[Point]| checks(points, &Data::ALL).iter().filter(|check| !check.ok).count();
        assert_eq!(failed(&points(1.3, 0.5, 1.0, 1.0)), 0);
        assert_eq!(failed(&points(1.1, 0.5, 1.0, 1.0)), 2);
        assert_eq!(failed(&points(1.3, 0.9, 1.0, 1.0)), 2);
        assert_eq!(failed(&points(1.3, 0.5, 0.6, 2.0)), 2 + 2);
        assert_eq!(failed(&[]), 8);
        // Three memory servers have no skewed data, which would be nothing but uniform.
        let mut of_three = points(1.3, 0.5, 1.0, 1.0);
        of_three.retain(|point| point.data == Data::Uniform);
        let checks = checks(&of_three, Data::of(3));
        assert!(checks.len() == 2 && checks.iter().all(|check| check.ok), "{checks:?}");
        assert_eq!((Data::of(4), Data::of(1)), (&Data::ALL[..], &[Data::Uniform][..]));
    }
}
