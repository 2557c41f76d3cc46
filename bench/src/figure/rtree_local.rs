//! `farlink figure rtree-local`: our R-tree beside R-trees that live in one machine's memory.
//!
//! One thread. The indexes take turns, a short while each, and each turn is compared with rstar's turn of the same round; what is
//! reported is the median of the rounds, with the least and the most. Time is the thread's own on the processor: what others
//! do on the machine meanwhile shows as little as can be. All have to give the same answers. Our cache asks the system for huge pages;
//! malloc is told to ask, too, if that is wished.

use std::io::Write;

use anyhow::Context as _;
use farlink_children::huge_pages::{self, OwnMemory};
use farlink_structures::rtree::{Entry, Rect};
use rand::{SeedableRng as _, rngs::SmallRng};
use rustix::time::{ClockId, clock_gettime};

use super::args::RtreeLocalArgs;
use super::spatial::{Digest, INDEXES, Index};
use crate::progress::Progress;
use crate::rects::{Scale, Space};
use crate::report::{CheckRow, Reporter, Row};
use crate::table::{digits, table};
use crate::units::plural;

/// Of a turn.
const SMALL_WINDOWS: usize = 2000;
const LARGE_WINDOWS: usize = 200;
const POINTS: usize = 500;
/// What is inserted one by one comes in so many turns.
const PARTS: usize = 16;
/// One in so many entries is inserted.
const SHARE: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    Load,
    SearchSmall,
    SearchLarge,
    CountSmall,
    CountLarge,
    Nearest,
    Insert,
}

impl Work {
    const ALL: [Self; 7] = [
        Self::Load,
        Self::SearchSmall,
        Self::SearchLarge,
        Self::CountSmall,
        Self::CountLarge,
        Self::Nearest,
        Self::Insert,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Load => "bulk load",
            Self::SearchSmall => "search, 1e-5",
            Self::SearchLarge => "search, 1e-2",
            Self::CountSmall => "count, 1e-5",
            Self::CountLarge => "count, 1e-2",
            Self::Nearest => "5 nearest",
            Self::Insert => "insert",
        }
    }

    /// How many times as fast as rstar our R-tree has to be, with all of it cached.
    fn least(self) -> Option<f64> {
        match self {
            Self::Load => Some(1.0 / 1.5),
            Self::SearchSmall | Self::Insert => Some(1.0),
            Self::SearchLarge => Some(1.5),
            Self::Nearest => Some(1.0 / 1.3),
            Self::CountSmall | Self::CountLarge => None,
        }
    }
}

/// What one index did of one work.
#[derive(Debug, Clone, Default)]
struct Record {
    ops: u64,
    /// Of each round.
    seconds: Vec<f64>,
    answers: Digest,
}

impl Record {
    /// How many times as fast as another one in each round, from the least to the most.
    fn times(&self, other: &Self) -> Vec<f64> {
        let mut times: Vec<f64> = self.seconds.iter().zip(&other.seconds).map(|(own, other)| other / own).collect();
        times.sort_unstable_by(f64::total_cmp);
        times
    }
}

fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// This thread's time on the processor.
fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

type Made = Vec<Box<dyn Index>>;

struct Race<'a> {
    args: &'a RtreeLocalArgs,
    rng: SmallRng,
    entries: Vec<Entry>,
    /// For each work, of each index.
    records: Vec<Vec<Record>>,
    /// The share of what each index took as it was first loaded that is in huge pages.
    huge: [Option<f64>; INDEXES.len()],
}

impl Race<'_> {
    /// A turn of an index, which is so many operations; a work has one round or several.
    fn turn(
        &mut self,
        work: Work,
        index: usize,
        round: usize,
        ops: usize,
        run: impl FnOnce() -> anyhow::Result<Option<Digest>>,
    ) -> anyhow::Result<()> {
        let start = now();
        let answers = run().with_context(|| format!("{}: {}", INDEXES[index].0, work.name()))?;
        let (seconds, record) = (now() - start, &mut self.records[work as usize][index]);
        if let Some(Digest { entries, payloads }) = answers {
            record.ops += ops as u64;
            record.seconds.resize(round + 1, 0.0);
            record.seconds[round] += seconds;
            record.answers.entries += entries;
            record.answers.payloads = record.answers.payloads.wrapping_add(payloads);
        }
        Ok(())
    }

    fn make(&self, count: usize) -> anyhow::Result<Made> {
        INDEXES.iter().map(|(_, make)| make(count, self.args.page_bytes as usize)).collect()
    }

    fn load(&mut self, round: usize) -> anyhow::Result<Made> {
        let (mut made, entries) = (self.make(self.entries.len())?, std::mem::take(&mut self.entries));
        for (number, index) in made.iter_mut().enumerate() {
            let before = OwnMemory::now();
            self.turn(Work::Load, number, round, entries.len(), || {
                index.load(&entries).map(|()| Some(Digest::default()))
            })?;
            // Later loads have the memory that earlier ones have left.
            if round == 0 {
                self.huge[number] = OwnMemory::now().huge_share_since(before);
            }
        }
        self.entries = entries;
        Ok(made)
    }

    fn insert(&mut self, round: usize) -> anyhow::Result<()> {
        let count = (self.entries.len() / SHARE).max(1);
        let (mut made, entries) = (self.make(count)?, std::mem::take(&mut self.entries));
        let windows: Vec<Rect> =
            (0..LARGE_WINDOWS).map(|_| Space::unit().window(&mut self.rng, Scale::Large)).collect();
        for part in entries[..count].chunks(count.div_ceil(PARTS)) {
            for (number, index) in made.iter_mut().enumerate() {
                self.turn(Work::Insert, number, round, part.len(), || Ok(index.insert(part)?.then(Digest::default)))?;
            }
        }
        self.entries = entries;
        for (number, index) in made.iter_mut().enumerate() {
            let record = &mut self.records[Work::Insert as usize][number];
            if record.ops > 0 {
                record.answers = index.search(&windows)?;
            }
        }
        Ok(())
    }

    fn ask(&mut self, made: &mut Made, round: usize) -> anyhow::Result<()> {
        for work in [Work::SearchSmall, Work::SearchLarge, Work::CountSmall, Work::CountLarge, Work::Nearest] {
            // New ones each time: what the work before has asked for is in the processor's caches.
            let (count, scale) = match work {
                Work::SearchSmall | Work::CountSmall => (SMALL_WINDOWS, Scale::Small),
                Work::Nearest => (POINTS, Scale::Small),
                _ => (LARGE_WINDOWS, Scale::Large),
            };
            let windows: Vec<Rect> = (0..count).map(|_| Space::unit().window(&mut self.rng, scale)).collect();
            let points: Vec<[f64; 2]> = windows.iter().map(Rect::low).collect();
            for (number, index) in made.iter_mut().enumerate() {
                self.turn(work, number, round, count, || match work {
                    Work::CountSmall | Work::CountLarge => index.count(&windows).map(Some),
                    Work::Nearest => index.nearest(&points).map(Some),
                    _ => index.search(&windows).map(Some),
                })?;
            }
        }
        Ok(())
    }

    /// A row for each index that does a work.
    fn rows(&self, work: Work) -> impl Iterator<Item = Row> {
        let records = &self.records[work as usize];
        let done = INDEXES.iter().zip(records).zip(self.huge).filter(|((_, record), _)| record.ops > 0);
        done.map(move |(((name, _), record), huge)| {
            let (seconds, times) = (record.seconds.iter().sum::<f64>(), record.times(&records[0]));
            let row = Row {
                name: (*name).to_owned(),
                ops: Some(record.ops),
                seconds: Some(seconds),
                ops_per_second: Some(record.ops as f64 / seconds),
                ..Row::default()
            };
            row.with("work", work.name())
                .with("times_rstar", median(&times))
                .with("times_rstar_least", times.first().copied())
                .with("times_rstar_most", times.last().copied())
                .with("found", record.answers.entries)
                .with("entries", self.args.entries)
                .with("page_bytes", name.starts_with("farlink").then_some(self.args.page_bytes))
                .with("rounds", record.seconds.len())
                .with("huge_pages", huge)
                .with("seed", self.args.common.seed)
        })
    }

    fn checks(&self) -> Vec<CheckRow> {
        let mut all = Vec::new();
        // A load answers nothing: what is asked later tells whether all is there.
        for work in Work::ALL.into_iter().filter(|work| *work != Work::Load) {
            let records = &self.records[work as usize];
            let differs = |(_, record): &(_, &Record)| record.ops > 0 && record.answers != records[0].answers;
            let wrong: Vec<&str> = INDEXES.iter().zip(records).filter(differs).map(|((name, _), _)| *name).collect();
            let problem = (!wrong.is_empty()).then(|| format!("others than rstar's: {}", wrong.join(", ")));
            let name = format!("answers of {}", work.name());
            all.push(CheckRow::new(&name, problem).count("found", records[0].answers.entries));
        }
        for work in Work::ALL {
            if let Some(least) = work.least() {
                let records = &self.records[work as usize];
                let name = format!("{} over rstar", work.name());
                all.push(CheckRow::within(&name, median(&records[1].times(&records[0])), least..=f64::INFINITY));
            }
        }
        all
    }
}

/// Makes the table, then the checks.
pub(crate) fn run(args: &RtreeLocalArgs, out: impl Write) -> anyhow::Result<()> {
    let mut rng = SmallRng::seed_from_u64(args.common.seed);
    let entries: Vec<Entry> = (0..args.entries).map(|payload| (Space::unit().loaded(&mut rng), payload)).collect();
    let records = vec![vec![Record::default(); INDEXES.len()]; Work::ALL.len()];
    let mut race = Race { args, rng, entries, records, huge: [None; INDEXES.len()] };
    let mut reporter = Reporter::new(out, args.common.json);
    reporter.note(&format!(
        "{}, one thread; how many times as fast as rstar,\nmedian (least-most) of the rounds",
        plural(args.entries, "rectangle")
    ))?;
    let (rounds, loads) = (args.rounds as usize, args.loads as usize);
    let mut progress = Progress::new(2 * args.loads as u64 + 1, args.common.json);
    for round in 0..loads {
        let mut made = progress.step("bulk load", || race.load(round))?;
        if round + 1 == loads {
            progress.begin("search");
            // All pages once: the links of a cache are swizzled by who follows them first. Then the processor's caches.
            let everything = [Rect::new([0.0; 2], [1.0; 2])?];
            made.iter_mut().try_for_each(|index| index.count(&everything).map(drop))?;
            race.ask(&mut made, 0)?;
            race.records[Work::SearchSmall as usize..=Work::Nearest as usize]
                .iter_mut()
                .flatten()
                .for_each(|record| *record = Record::default());
            (0..rounds).try_for_each(|round| race.ask(&mut made, round))?;
            progress.finish_step();
        }
    }
    for round in 0..loads {
        progress.step("insert", || race.insert(round))?;
    }
    drop(progress);
    Work::ALL.into_iter().flat_map(|work| race.rows(work)).try_for_each(|row| reporter.row(row))?;
    reporter.table("\n", show)?;
    let huge = INDEXES.iter().zip(race.huge).map(|((name, _), share)| format!("{name} {}", huge_pages::show(share)));
    reporter.note(&format!("in huge pages, of what each load took: {}", huge.collect::<Vec<_>>().join("; ")))?;
    race.checks().iter().try_for_each(|check| reporter.check(check))?;
    reporter.all_held()
}

/// A line for each work, a column for each index but the first.
fn show(rows: &[Row]) -> comfy_table::Table {
    let heads = INDEXES[1..].iter().map(|(name, _)| name.replace(", ", ",\n").replace("_index", "\n_index"));
    let heads: Vec<String> = std::iter::once("work".to_owned()).chain(heads).collect();
    let heads: Vec<&str> = heads.iter().map(String::as_str).collect();
    let cell = |work: Work, index: &str| {
        let row = rows.iter().find(|row| row.name == index && row.shown("work") == work.name());
        let [median, least, most] = [("times_rstar", 2), ("times_rstar_least", 1), ("times_rstar_most", 1)]
            .map(|(field, shown)| digits(row.and_then(|row| row.number(field)), shown));
        if row.is_some() { format!("{median} ({least}-{most})") } else { "-".to_owned() }
    };
    let line = |work: Work| {
        let cells = INDEXES[1..].iter().map(|(name, _)| cell(work, name));
        std::iter::once(work.name().to_owned()).chain(cells).collect()
    };
    table(&heads, 1, Work::ALL.map(line))
}
