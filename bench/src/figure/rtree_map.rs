//! `farlink figure rtree-map`: the boxes of each level of an R-tree, as a picture.

use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::rc::Rc;

use anyhow::Context as _;
use farlink_runtime::access::{Access, Context, Link, PageRef, Plugin as _, Start, Words};
use farlink_runtime::compute::ComputeServer;
use farlink_runtime::error::Error;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::operation::retry;
use farlink_structures::rtree::{RTree, RTreeOptions, Rect, Tree};

use super::args::RtreeMapArgs;
use super::plot;
use super::test_bed::TestBed;
use crate::cluster_view;
use crate::input::InputFile;
use crate::load_choice::{LoadChoice, fill_of, require_order_of_inserts};
use crate::rects::RectData;
use crate::report::Reporter;
use crate::subject::{InsertOrder, Setting, Subject as _};
use crate::table::digits;
use crate::units::{plural, shorten, show_bytes};

/// The tree's name in the catalog.
const NAME: &str = "map";
/// Memory for an entry: pages may be half empty, and inner ones come on top.
const ENTRY_BYTES: u64 = 160;
/// Pages read at once.
const BATCH: usize = 64;

/// The longer side of the map, in pixels.
const MAP: f64 = 760.0;
/// Above the map, and around it.
const TOP: f64 = 72.0;
const MARGIN: f64 = 28.0;
/// On the right of the map.
const LEGEND: f64 = 230.0;
/// The legend's first line stands so far below the top of the map, and the others so far below each other.
const LEGEND_TOP: f64 = 14.0;
const LEGEND_STEP: f64 = 46.0;
/// No side is drawn longer than so many times the other.
const RATIO_MAX: f64 = 4.0;
/// An entry is this wide and high at least.
const DOT: f64 = 1.8;
/// Entries first, then level 0 and those above it. They differ also for those who cannot tell red from green (Okabe and
/// Ito).
const COLOURS: [&str; 7] = ["#4d4d4d", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// Loads a tree, writes the picture, and checks the tree.
pub(crate) fn run(args: &RtreeMapArgs, out: impl Write) -> anyhow::Result<()> {
    require_order_of_inserts(args.load, args.insert_order)?;
    let inserts = args.load == Some(LoadChoice::Insert) || args.insert_order.is_some();
    let fill = fill_of(args.fill, !inserts)?;
    let (rects_file, _spool) = match &args.rects_file {
        Some(path) => InputFile::take(path, "rectangles").map(|(file, spool)| (Some(file), spool))?,
        None => (None, None),
    };
    let insert_order = args.insert_order.unwrap_or(InsertOrder::Random);
    let name =
        rects_file.as_ref().map_or_else(|| "generated".to_owned(), |file| format!("from {}", shorten(&file.name)));
    let setting = Setting { rects_file, insert_order, seed: args.common.seed, ..Setting::of_entries(args.keys) };
    let data = <Tree>::data(&setting)?;
    let count = data.entries.len() as u64;

    let bed = TestBed::start(1, count * ENTRY_BYTES, MemOptions::default())?;
    load(&bed.join(args.common.seed)?, &data, args.page_bytes as usize, fill)?;
    // Another member looks at it: the one that has loaded it keeps pages in hand.
    let compute = bed.join(args.common.seed)?;
    let worker = compute.worker()?;
    let (levels, report) = worker.block_on(async {
        let tree = RTree::open(&worker, NAME, Proof::Checksum).await?;
        Ok::<_, Error>((boxes_by_level(tree.access()).await?, tree.check().await?))
    })?;

    let how = match (inserts, insert_order) {
        (false, _) => "bulk-loaded",
        (true, InsertOrder::Random) => "inserted in random order",
        (true, InsertOrder::Given) => "inserted as given",
        (true, InsertOrder::Rows) => "inserted in rows",
    };
    let title = format!("R*-tree of {}", plural(count, "rectangle"));
    let subtitle = format!("{name}, {how}, pages of {}", show_bytes(args.page_bytes.into()));
    let map = Map { title, subtitle, levels: summaries(levels, count), space: *data.space() };
    map.write(&args.file)?;
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}\n{}\n\n{:<8} {:>8} {:>8} {:>8}",
        map.title, map.subtitle, "level", "boxes", "each", "area"
    ))?;
    for level in &map.levels {
        let (area, each) = (level.area, level.each);
        let line = format!("{:<8} {:>8} {each:>8.1} {:>8}", level.name, level.boxes.len(), digits(area, 3));
        let fields = vec![
            ("name", level.name.clone().into()),
            ("boxes", level.boxes.len().into()),
            ("entries_per_box", each.into()),
            ("area", area.into()),
        ];
        reporter.record("level", fields, &line)?;
    }
    reporter.note(&format!("\nwrote {}", args.file.display()))?;
    reporter.check(&cluster_view::check_row(<Tree>::NAME, NAME, &report))?;
    reporter.all_held()
}

/// Loads entries, in bulk if it says how full pages are to be.
fn load(compute: &ComputeServer, data: &RectData, page_bytes: usize, fill: Option<f64>) -> anyhow::Result<()> {
    let worker = compute.worker()?;
    Ok(worker.block_on(async {
        let tree = RTree::create(&worker, NAME, RTreeOptions { page_bytes, ..RTreeOptions::default() }).await?;
        if let Some(fill) = fill {
            return tree.bulk_load(data.entries.iter().copied(), fill).await.map(drop);
        }
        for &(rect, payload) in &data.entries {
            tree.insert(rect, payload).await?;
        }
        Ok::<_, Error>(())
    })?)
}

/// Entries first, then the boxes of each level's pages, from level 0 to the one below the root.
async fn boxes_by_level<A: Access<Plugin = Tree>>(access: &A) -> Result<Vec<Vec<Rect>>, Error> {
    let Context { worker, .. } = access.context();
    let items = |page: &A::Page<'_>| {
        page.read(|words| {
            let item = |at| Some((Link::from_word(words.word(at)), <Tree>::below(words, at)?.rect));
            <Tree>::links(words).filter_map(item).collect::<Vec<_>>()
        })
    };
    retry(worker, async || {
        let root = Rc::new(access.open(Start::Root).await?);
        let mut row = items(&root)?;
        let mut levels = vec![row.iter().map(|item| item.1).collect()];
        for _ in 0..root.level() {
            let mut below = Vec::new();
            for batch in row.chunks(BATCH) {
                let links = batch.iter().map(|item| (Rc::clone(&root), item.0));
                for page in access.follow_each(links).all().await {
                    below.extend(items(&page?)?);
                }
            }
            row = below;
            levels.insert(0, row.iter().map(|item| item.1).collect());
        }
        Ok(levels)
    })
    .await
}

/// Entries, or the boxes of one level.
#[derive(Debug)]
struct Level {
    name: String,
    boxes: Vec<Rect>,
    /// How many a box holds of those one level below; an entry holds itself.
    each: f64,
    /// All areas together, as a share of the whole; none if that has no area.
    area: Option<f64>,
}

fn summaries(levels: Vec<Vec<Rect>>, entries: u64) -> Vec<Level> {
    let space = levels.first().into_iter().flatten().copied().reduce(|all, rect| all.union(&rect));
    let mut below = entries as f64;
    let summary = |(number, boxes): (usize, Vec<Rect>)| {
        let name = if number == 0 { "entries".to_owned() } else { format!("level {}", number - 1) };
        let share = |rect: &Rect| {
            space.map_or(0.0, |space| side(rect, 0) / side(&space, 0) * (side(rect, 1) / side(&space, 1)))
        };
        let (each, area) = (below / boxes.len().max(1) as f64, boxes.iter().map(share).sum::<f64>());
        let area = Some(area).filter(|area| area.is_finite());
        below = boxes.len() as f64;
        Level { name, boxes, each, area }
    };
    levels.into_iter().enumerate().map(summary).collect()
}

/// Half of what it is, so that it is finite.
fn side(rect: &Rect, dimension: usize) -> f64 {
    rect.high()[dimension] / 2.0 - rect.low()[dimension] / 2.0
}

/// A picture of a tree.
#[derive(Debug)]
struct Map {
    title: String,
    subtitle: String,
    levels: Vec<Level>,
    space: Rect,
}

impl Map {
    fn write(&self, path: &Path) -> anyhow::Result<()> {
        let cannot_write = || format!("cannot write {}", path.display());
        let file = path.file_name().with_context(cannot_write)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::write(plot::path(folder, Path::new(file).to_string_lossy().as_ref())?, self.svg())
            .with_context(cannot_write)
    }

    /// The map's width and height, in pixels.
    fn size(&self) -> (f64, f64) {
        let [width, height] = [0, 1].map(|d| side(&self.space, d));
        let ratio = width / height;
        let ratio = if ratio.is_finite() && ratio > 0.0 { ratio.clamp(1.0 / RATIO_MAX, RATIO_MAX) } else { 1.0 };
        if ratio > 1.0 { (MAP, MAP / ratio) } else { (MAP * ratio, MAP) }
    }

    /// North is up, as on maps.
    fn svg(&self) -> String {
        let (width, height) = self.size();
        let legend_height = LEGEND_TOP + LEGEND_STEP * self.levels.len() as f64;
        let (all_width, all_height) = (2.0 * MARGIN + width + LEGEND, TOP + height.max(legend_height) + 2.0 * MARGIN);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{all_width:.0}\" height=\"{all_height:.0}\" \
             viewBox=\"0 0 {all_width:.0} {all_height:.0}\" font-family=\"sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        text(&mut svg, (MARGIN, 34.0), 20, "#1a1a1a", "start", &self.title);
        text(&mut svg, (MARGIN, 56.0), 13, "#666666", "start", &self.subtitle);
        let _ = writeln!(
            svg,
            "<rect x=\"{MARGIN}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#fafafa\" \
             stroke=\"#d9d9d9\"/>"
        );
        for (number, level) in self.levels.iter().enumerate() {
            let _ = writeln!(svg, "<path {} d=\"{}\"/>", style(number), self.path(&level.boxes, number == 0));
        }
        let (low, high) = (self.space.low(), self.space.high());
        let (below, right) = (TOP + height + 16.0, MARGIN + width);
        for (at, anchor, corner) in [((MARGIN, below), "start", low), ((right, below), "end", high)] {
            let corner = format!("({}, {})", rounded(corner[0]), rounded(corner[1]));
            let arrow = if anchor == "start" { format!("\u{2199} {corner}") } else { format!("{corner} \u{2197}") };
            text(&mut svg, at, 11, "#808080", anchor, &arrow);
        }
        // The highest level first, as in a tree.
        for (line, (number, level)) in self.levels.iter().enumerate().rev().enumerate() {
            self.legend_line(&mut svg, (right + 24.0, TOP + LEGEND_TOP + LEGEND_STEP * line as f64), number, level);
        }
        svg + "</svg>\n"
    }

    fn legend_line(&self, svg: &mut String, (x, y): (f64, f64), number: usize, level: &Level) {
        let _ = writeln!(svg, "<path {} d=\"M{x:.1} {:.1}h26v16h-26z\"/>", style(number), y - 12.0);
        let count = plural(level.boxes.len() as u64, if number == 0 { "rectangle" } else { "box" });
        text(svg, (x + 38.0, y), 14, "#1a1a1a", "start", &format!("{}: {count}", level.name));
        let area = match level.area {
            Some(area) if area < 0.005 => "below 0.01".to_owned(),
            area => digits(area, 2),
        };
        let more = match number {
            0 => format!("area {area} of the whole"),
            _ => format!("{:.1} each, area {area}", level.each),
        };
        text(svg, (x + 38.0, y + 17.0), 12, "#808080", "start", &more);
    }

    /// All boxes as one path: it is short, and where they overlap their colour is no darker.
    fn path(&self, boxes: &[Rect], are_entries: bool) -> String {
        let (width, height) = self.size();
        let share = |at: f64, d: usize| {
            let share = (at / 2.0 - self.space.low()[d] / 2.0) / side(&self.space, d);
            if share.is_finite() { share } else { 0.5 }
        };
        let mut path = String::new();
        for rect in boxes {
            let ([x1, y1], [x2, y2]) = (rect.low(), rect.high());
            let (left, right) = (MARGIN + share(x1, 0) * width, MARGIN + share(x2, 0) * width);
            let (top, bottom) = (TOP + (1.0 - share(y2, 1)) * height, TOP + (1.0 - share(y1, 1)) * height);
            let least = if are_entries { DOT } else { 0.0 };
            let (wide, high) = ((right - left).max(least), (bottom - top).max(least));
            let (x, y) = ((left + right - wide) / 2.0, (top + bottom - high) / 2.0);
            let _ = write!(path, "M{x:.1} {y:.1}h{wide:.1}v{high:.1}h-{wide:.1}z");
        }
        path
    }
}

/// Higher levels have thicker lines; the boxes of level 0, and entries, are filled.
fn style(number: usize) -> String {
    let colour = COLOURS[number % COLOURS.len()];
    match number {
        0 => format!("fill=\"{colour}\" fill-opacity=\"0.75\""),
        _ => {
            let filled = if number == 1 { 0.08 } else { 0.0 };
            let thick = 0.9 + 1.1 * (number - 1) as f64;
            format!(
                "fill=\"{colour}\" fill-opacity=\"{filled}\" stroke=\"{colour}\" stroke-width=\"{thick:.1}\" \
                 stroke-linejoin=\"round\""
            )
        }
    }
}

fn text(svg: &mut String, (x, y): (f64, f64), size: u32, colour: &str, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let at = format!("x=\"{x:.1}\" y=\"{y:.1}\"");
    let _ = writeln!(svg, "<text {at} font-size=\"{size}\" fill=\"{colour}\" text-anchor=\"{anchor}\">{words}</text>");
}

/// Four digits behind the point at most, and none for large numbers.
fn rounded(at: f64) -> String {
    if at.abs() >= 1e9 { format!("{at:.3e}") } else { ((at * 1e4).round() / 1e4).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rect(x1: f64, y1: f64, x2: f64, y2: f64) -> Rect {
        Rect::new([x1, y1], [x2, y2]).unwrap()
    }

    fn map(space: Rect) -> Map {
        let levels = summaries(vec![vec![space, space], vec![space]], 2);
        Map { title: "a < b & c".into(), subtitle: String::new(), levels, space }
    }

    #[test]
    fn boxes_lie_on_the_map_whatever_their_numbers() {
        let spaces = [
            rect(0.0, 0.0, 1.0, 1.0),
            rect(-180.0, -90.0, 180.0, 90.0),
            rect(f64::MIN, f64::MIN, f64::MAX, f64::MAX),
            rect(3.0, 0.0, 3.0, 1e9),
            rect(5.0, 5.0, 5.0, 5.0),
            rect(0.0, 0.0, 1e300, 1e-300),
        ];
        for space in spaces {
            let map = map(space);
            let (width, height) = map.size();
            assert!(width.max(height) == MAP && width.min(height) >= MAP / RATIO_MAX, "{space:?}");
            let svg = map.svg();
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            let path = map.path(&[space], false);
            let corner: Vec<f64> = path[1..].split(['h', ' ']).take(2).map(|at| at.parse().unwrap()).collect();
            assert!(corner[0] >= MARGIN - 0.1 && corner[0] <= MARGIN + width, "{path}");
            assert!(corner[1] >= TOP - 0.1 && corner[1] <= TOP + height, "{path}");
        }
        assert!((map(spaces[1]).size().1 - MAP / 2.0).abs() < 1e-9);
    }

    #[test]
    fn north_is_up_and_words_are_escaped() {
        let map = map(rect(0.0, 0.0, 1.0, 1.0));
        assert_eq!(map.path(&[rect(0.0, 0.75, 0.5, 1.0)], false), format!("M{MARGIN:.1} {TOP:.1}h380.0v190.0h-380.0z"));
        let svg = map.svg();
        assert!(
            svg.contains("a &lt; b &amp; c") && svg.contains("level 0: 1 box<") && svg.contains("2.0 each"),
            "{svg}"
        );
    }

    #[test]
    fn areas_are_shares_of_the_whole() {
        let levels = summaries(
            vec![vec![rect(0.0, 0.0, 1.0, 1.0), rect(1.0, 1.0, 4.0, 2.0)], vec![rect(0.0, 0.0, 4.0, 2.0)]],
            2,
        );
        assert_eq!((levels[0].area, levels[1].area, levels[1].each), (Some(0.5), Some(1.0), 2.0));
        assert_eq!(summaries(vec![vec![rect(1.0, 1.0, 1.0, 1.0)]], 1)[0].area, None);
    }
}
