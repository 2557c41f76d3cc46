//! `farlink figure dex-repartition`: what operations see of a region that goes to another owner (DEX, VLDB 2024, figure 10).
//!
//! Three owners, half of the operations updates. After a while half of what the first one has moves to the second. Operations and
//! remote operations are counted in slots of time; beside them stand the longest waits, and what the move took beside a bare copy of
//! as many pages in the same run.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use comfy_table::Table;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_structures::btree::{BTreeOptions, Tree};

use super::args::RepartitionArgs;
use super::key_set::{FILL, KeySet, PAGE_BYTES};
use super::moving::{Schedule, Seen, Slot, Trial};
use super::plot::{self, Line, Plot, Scale};
use super::test_bed::TestBed;
use super::trial::shape;
use crate::progress::Progress;
use crate::report::{CheckRow, Reporter, Row};
use crate::subject::Subject as _;
use crate::table::{digits, table};
use crate::tally::{Counters, Tally};
use crate::units::{plural, show_bytes};

const FILE: &str = "dex-repartition.svg";
const NAME: &str = "figure";
/// No operation waits so much longer for a move, in milliseconds.
const WAIT_MS_MAX: f64 = 50.0;
/// A move takes so many times as long as a bare copy of as many pages, at most.
const COPIES_MAX: f64 = 2.0;
/// Slots of a run: all are kept in memory, for each owner.
const SLOTS_MAX: usize = 100_000;

/// Makes the rows and the plots, and checks what has to hold.
pub(crate) fn run(args: &RepartitionArgs, out: impl Write) -> anyhow::Result<()> {
    let path = plot::path(&args.out, FILE)?;
    ensure!(args.compute_servers >= 2, "a region moves between two compute servers: give --compute-servers 2 or more");
    let long = args.warm_up_seconds.saturating_add(args.before).saturating_add(args.after);
    let count = number(long, args.slot);
    ensure!(count <= SLOTS_MAX, "the run would have {count} slots, and {SLOTS_MAX} are the most: give a longer --slot");
    ensure!(args.before >= args.slot, "--before is shorter than a --slot: there would be none before the move");
    ensure!(args.after / 2 >= args.slot, "--after is shorter than two --slot: there would be none after the move");
    let (keys, seed) = (args.keys, args.common.seed);
    let key_set = Arc::new(KeySet::new(keys, args.theta, args.compute_servers, seed)?);
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, zipf {}, half of the operations updates; {} with {} of cache each;\nhalf of what the first one has moves to the second",
        plural(keys, "key"),
        args.theta,
        plural(args.compute_servers, "owner"),
        show_bytes(args.cache),
    ))?;
    let mut progress = Progress::new(3, args.common.json);
    // Owners' logs take an eighth of each cache, at most; what is copied in the end, a whole one.
    let more = args.cache * args.compute_servers / 8 + args.cache;
    let options = MemOptions { latency_ns: args.latency, ..MemOptions::default() };
    let bed = TestBed::start(1, shape(keys).pages() * PAGE_BYTES * 11 / 10 + more, options)?;
    let options = BTreeOptions { page_bytes: PAGE_BYTES as usize, ..BTreeOptions::default() };
    let structure = progress.step("load", || bed.load(NAME, options, key_set.entries(), FILL))?;
    let schedule = Schedule { warm_up: args.warm_up_seconds, before: args.before, after: args.after, slot: args.slot };
    let trial = Trial {
        bed: &bed,
        structure: &structure,
        key_set: &key_set,
        cache_bytes: args.cache,
        in_flight: args.in_flight,
        schedule,
        seed,
    };
    let seen = progress.step("run", || trial.run())?;
    progress.begin("check");
    drop(progress);
    if reporter.is_json() {
        slots(&seen, args.slot, &mut reporter)?;
    }
    let setting = |row: Row| {
        row.with("keys", keys)
            .with("compute_servers", args.compute_servers)
            .with("theta", args.theta)
            .with("cache_bytes", args.cache)
            .with("in_flight", args.in_flight)
            .with("latency_ns", args.latency)
            .with("seed", seed)
    };
    let rows: Vec<Row> = phases(&seen, args.slot).into_iter().map(setting).collect();
    rows.iter().try_for_each(|row| reporter.row(row.clone()))?;
    reporter.table("\n", show)?;
    let (took, copy) = ((seen.ended - seen.began).as_secs_f64(), seen.copy.as_secs_f64());
    let copied = seen.pages * PAGE_BYTES;
    reporter.record(
        "move",
        vec![
            ("region", Tree::show_region(&seen.moved).into()),
            ("seconds", took.into()),
            ("pages", seen.pages.into()),
            ("pages_bytes", copied.into()),
            ("bytes", seen.bytes.into()),
            ("copy_seconds", copy.into()),
        ],
        &format!(
            "\nthe move took {:.1} ms: {} ({}) written, {} in all with the log;\na bare copy of as many pages took {:.1} ms",
            took * 1e3,
            plural(seen.pages, "page"),
            show_bytes(copied),
            show_bytes(seen.bytes),
            copy * 1e3,
        ),
    )?;
    plot::write_svg(&plots(&seen, args.slot), &path)?;
    reporter.note(&format!("\nwrote {}", path.display()))?;
    reporter.check(&bed.check(&[NAME.to_owned()], keys)?)?;
    checks(&rows, took / copy).iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

/// The slots of a phase, of all owners.
fn sum(slots: &[Vec<Slot>], range: Range<usize>) -> Slot {
    let of_phase = slots.iter().flat_map(|slots| &slots[range.start.min(slots.len())..range.end.min(slots.len())]);
    of_phase.fold(Slot::default(), |mut sum, slot| {
        sum.ops += slot.ops;
        sum.longest_ns = sum.longest_ns.max(slot.longest_ns);
        sum.counters += slot.counters.clone();
        sum
    })
}

fn number(time: Duration, slot: Duration) -> usize {
    (time.as_nanos() / slot.as_nanos().max(1)) as usize
}

/// Before the move, from its beginning to the slot after its end, and after it.
fn phases(seen: &Seen, slot: Duration) -> Vec<Row> {
    let [began, ended, end] = [seen.began, seen.ended, seen.until].map(|time| number(time, slot));
    let phases = [("before", 0..began), ("during", began..ended + 2), ("after", ended + 2..end)];
    let row = |(name, range): (&str, Range<usize>)| {
        let Slot { ops, longest_ns, counters } = sum(&seen.slots, range.clone());
        let mut tally = Tally { counters, ..Tally::default() };
        tally.outcomes.ops = ops;
        let seconds = range.len() as f64 * slot.as_secs_f64();
        Row::measured(name, seconds, &tally, false).with("longest_ns", longest_ns)
    };
    phases.map(row).into()
}

fn remote(counters: &Counters) -> u64 {
    counters.reads + counters.writes + counters.atomics + counters.two_sided
}

/// The lines of all slots, for scripts.
fn slots<W: Write>(seen: &Seen, slot: Duration, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
    for at in 0..number(seen.until, slot) {
        let Slot { ops, longest_ns, counters } = sum(&seen.slots, at..at + 1);
        let seconds = slot.as_secs_f64() * at as f64;
        let fields = vec![
            ("seconds", seconds.into()),
            ("ops", ops.into()),
            ("remote_ops", remote(&counters).into()),
            ("longest_ns", longest_ns.into()),
        ];
        reporter.record("slot", fields, "")?;
    }
    Ok(())
}

fn longest_ms(row: &Row) -> f64 {
    row.number("longest_ns").unwrap_or(f64::NAN) / 1e6
}

fn checks(rows: &[Row], copies: f64) -> Vec<CheckRow> {
    let longest = |name: &str| rows.iter().find(|row| row.name == name).map_or(f64::NAN, longest_ms);
    // An operation is counted where it ends, and one that waits for the move may end long after it.
    let more = longest("during").max(longest("after")) - longest("before");
    vec![
        CheckRow::within("milliseconds that operations waited longer for the move", more, f64::MIN..=WAIT_MS_MAX),
        CheckRow::within("the move's time, over a bare copy's of as many pages", copies, 0.0..=COPIES_MAX),
    ]
}

fn show(rows: &[Row]) -> Table {
    let header = ["the move", "seconds", "ops/s", "read\n/op", "write\n/op", "msg\n/op", "longest\nwait, ms"];
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            digits(row.seconds, 2),
            digits(row.ops_per_second, 0),
            digits(row.reads_per_op, 4),
            digits(row.writes_per_op, 4),
            digits(row.two_sided_per_op, 4),
            digits(Some(longest_ms(row)), 2),
        ]
    };
    table(&header, 1, rows.iter().map(line))
}

/// What of a slot is drawn.
type Amount = fn(&Slot) -> f64;

/// A line for each owner and one for all, over time.
fn plots(seen: &Seen, slot: Duration) -> Vec<Plot> {
    let ys: [(_, _, Amount); 3] = [
        ("Operations", "thousands in each slot", |slot| slot.ops as f64 / 1e3),
        ("Remote operations", "in each slot", |slot| remote(&slot.counters) as f64),
        ("Longest wait", "milliseconds", |slot| slot.longest_ns as f64 / 1e6),
    ];
    let seconds = |time: Duration| time.as_secs_f64();
    let end = number(seen.until, slot);
    let plot = |(title, y_label, of): (&str, &str, Amount)| {
        let line = |name: String, slots: &[Vec<Slot>]| Line {
            name,
            points: (0..end).map(|at| (slot.as_secs_f64() * at as f64, of(&sum(slots, at..at + 1)))).collect(),
        };
        let mut lines = vec![line("all owners".to_owned(), &seen.slots)];
        let each = seen.slots.iter().zip(1..);
        lines.extend(each.map(|(slots, number)| line(format!("owner {number}"), std::slice::from_ref(slots))));
        let top = lines[0].points.iter().map(|point| point.1).fold(0.0, f64::max);
        let (began, ended) = (seconds(seen.began), seconds(seen.ended));
        lines.push(Line {
            name: "the move".to_owned(),
            points: vec![(began, 0.0), (began, top), (ended, top), (ended, 0.0)],
        });
        Plot {
            title: title.to_owned(),
            x_label: "seconds".to_owned(),
            x_scale: Scale::Linear,
            y_label: y_label.to_owned(),
            lines,
            y_max: None,
        }
    };
    ys.map(plot).into()
}

#[cfg(test)]
mod tests {
    use farlink_structures::btree::KeyRange;

    use super::*;

    const SLOT: Duration = Duration::from_millis(10);

    fn seen(slots: Vec<Vec<Slot>>) -> Seen {
        let [began, ended, until] = [20, 35, 70].map(Duration::from_millis);
        let moved = KeyRange { low: 5, high: Some(9) };
        Seen { slots, moved, began, ended, pages: 3, bytes: 9000, until, copy: Duration::from_millis(15) }
    }

    fn slot(ops: u64, longest_ms: u64) -> Slot {
        let counters = Counters { reads: 2 * ops, ..Counters::default() };
        Slot { ops, longest_ns: longest_ms * 1_000_000, counters }
    }

    #[test]
    fn phases_have_all_slots_and_the_longest_wait_of_each() {
        let one = [1, 2, 60, 3, 30, 4, 5].map(|longest_ms| slot(10, longest_ms)).to_vec();
        let other = [1; 5].map(|longest_ms| slot(1, longest_ms)).to_vec();
        let rows = phases(&seen(vec![one, other]), SLOT);
        let ops: Vec<_> = rows.iter().map(|row| (row.name.as_str(), row.ops, longest_ms(row))).collect();
        assert_eq!(ops, [("before", Some(22), 2.0), ("during", Some(33), 60.0), ("after", Some(20), 5.0)]);
        assert!(rows.iter().all(|row| row.reads_per_op == Some(2.0)), "{rows:?}");
        let held = |copies| checks(&rows, copies).iter().map(|check| check.ok).collect::<Vec<_>>();
        assert_eq!((held(1.0), held(2.5)), (vec![false, true], vec![false, false]));
    }

    /// An operation is counted where it ends: one that waits long for the move ends after it.
    #[test]
    fn a_wait_that_ends_after_the_move_is_one_for_it() {
        let longest_after = |longest_ms| {
            let slots = [1, 2, 8, 3, 4, 5, longest_ms].map(|longest_ms| slot(10, longest_ms)).to_vec();
            checks(&phases(&seen(vec![slots]), SLOT), 1.0)[0].ok
        };
        assert_eq!([5, 400].map(longest_after), [true, false]);
    }
}
