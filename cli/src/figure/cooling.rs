//! `farlink figure cooling`: the cooling map against one FIFO queue behind one lock (DEX, VLDB 2024, section 5.2).
//!
//! Threads do to both what threads of a cache do when they need room: each turn cools a page of theirs, then evicts the
//! oldest one that it finds, or rescues one that it cooled a moment ago. The queue is as good as one queue can be: a frame
//! knows its place in it, so a rescue searches nothing. What is compared is the locking and the memory it moves.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::ensure;
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use farlink_cache::{Cooled, CoolingMap, PageId};
use rand::rngs::SmallRng;
use rand::{Rng as _, RngExt as _, SeedableRng as _};
use serde::Serialize;

use super::args::CoolingArgs;
use crate::units::show_count;

/// Frames that a thread has in use, for each that may cool: the map holds a tenth of a cache.
const FRAMES_PER_SLOT: usize = 10;
/// Buckets that are tried for a page to evict, as the cache does.
const PROBES: usize = 8;
/// Pages that a thread remembers to have cooled last.
const RECENT: usize = 64;
/// Turns between two looks at the clock.
const TURNS: u64 = 256;

/// Where pages cool. Frames are numbered from 1.
trait Cooler: Sync {
    /// Lets a page cool; answers one that has to go for it.
    fn cool(&self, frame: u32) -> Option<u32>;
    /// Takes an old page out.
    fn evict(&self, random: &mut SmallRng) -> Option<u32>;
    /// Takes this page out, if it is still there.
    fn rescue(&self, frame: u32) -> bool;
}

fn page(frame: u32) -> PageId {
    PageId::new(u64::from(frame) * 1024).expect("frames are numbered from 1")
}

impl Cooler for CoolingMap {
    fn cool(&self, frame: u32) -> Option<u32> {
        self.push(page(frame), Cooled { frame, tag: 0 }).map(|cooled| cooled.frame)
    }

    fn evict(&self, random: &mut SmallRng) -> Option<u32> {
        (0..PROBES).find_map(|_| self.pop(random.next_u64())).map(|cooled| cooled.frame)
    }

    fn rescue(&self, frame: u32) -> bool {
        self.remove(page(frame), Cooled { frame, tag: 0 })
    }
}

/// One queue. A rescued page leaves a gap, so that the others keep their places.
#[derive(Debug)]
struct Queue {
    /// 0 is a gap.
    frames: VecDeque<u32>,
    /// The place of the first of them.
    first: u64,
    /// The place that each frame got last, by number.
    places: Vec<u64>,
    len: usize,
    capacity: usize,
}

#[derive(Debug)]
struct OneFifo(Mutex<Queue>);

impl OneFifo {
    fn new(capacity: usize, frames: usize) -> Self {
        let places = vec![u64::MAX; frames + 1];
        Self(Mutex::new(Queue { frames: VecDeque::new(), first: 0, places, len: 0, capacity }))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn pop(&mut self) -> Option<u32> {
        while let Some(frame) = self.frames.pop_front() {
            self.first += 1;
            if frame != 0 {
                self.len -= 1;
                return Some(frame);
            }
        }
        None
    }
}

impl Cooler for OneFifo {
    fn cool(&self, frame: u32) -> Option<u32> {
        let mut queue = self.lock();
        let oldest = if queue.len == queue.capacity { queue.pop() } else { None };
        queue.places[frame as usize] = queue.first + queue.frames.len() as u64;
        queue.frames.push_back(frame);
        queue.len += 1;
        oldest
    }

    fn evict(&self, _random: &mut SmallRng) -> Option<u32> {
        self.lock().pop()
    }

    fn rescue(&self, frame: u32) -> bool {
        let mut queue = self.lock();
        let place = queue.places[frame as usize];
        let Some(index) = place.checked_sub(queue.first) else { return false };
        match queue.frames.get_mut(index as usize) {
            Some(slot) if *slot == frame => *slot = 0,
            _ => return false,
        }
        queue.len -= 1;
        true
    }
}

/// What threads did together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Done {
    turns: u64,
    evicted: u64,
    rescued: u64,
    seconds: f64,
}

/// What one thread does until it is told to stop: it has `hot` frames, and gets as many back as it cools, more or less.
fn turns(
    cooler: &impl Cooler,
    mut hot: Vec<u32>,
    rescue_percent: u32,
    seed: u64,
    stop: &AtomicBool,
) -> (Done, Vec<u32>) {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut recent = [0; RECENT];
    let mut done = Done::default();
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..TURNS {
            done.turns += 1;
            if hot.is_empty() {
                // All of this thread's pages have cooled, and others took them.
                hot.extend(cooler.evict(&mut random));
                continue;
            }
            let frame = hot.swap_remove(random.random_range(0..hot.len()));
            recent[done.turns as usize % RECENT] = frame;
            if let Some(oldest) = cooler.cool(frame) {
                hot.push(oldest);
                done.evicted += 1;
                continue;
            }
            let rescued = recent[random.random_range(0..RECENT)];
            if random.random_range(0..100) < rescue_percent && rescued != 0 && cooler.rescue(rescued) {
                hot.push(rescued);
                done.rescued += 1;
            } else if let Some(evicted) = cooler.evict(&mut random) {
                hot.push(evicted);
                done.evicted += 1;
            }
        }
    }
    (done, hot)
}

/// Runs so many threads for a while; also answers the frames that they have in use at the end.
fn race(cooler: &impl Cooler, threads: u32, args: &CoolingArgs) -> (Done, Vec<u32>) {
    let capacity = args.pages as u32;
    // Half of what may cool does so from the start.
    let spare: Vec<u32> = (1..=capacity / 2).filter_map(|frame| cooler.cool(frame)).collect();
    let frames = (args.pages * FRAMES_PER_SLOT) as u32;
    let (stop, barrier) = (AtomicBool::new(false), Barrier::new(threads as usize + 1));
    let (stop, barrier) = (&stop, &barrier);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let spare = if number == 0 { spare.as_slice() } else { &[] };
                let hot: Vec<u32> = (capacity / 2 + 1..=frames)
                    .filter(|frame| frame % threads == number)
                    .chain(spare.iter().copied())
                    .collect();
                scope.spawn(move || {
                    barrier.wait();
                    turns(cooler, hot, args.rescue_percent, args.seed ^ u64::from(number), stop)
                })
            })
            .collect();
        barrier.wait();
        let start = Instant::now();
        thread::sleep(Duration::from_secs_f64(args.seconds));
        stop.store(true, Ordering::Relaxed);
        let (mut all, mut in_use) = (Done::default(), Vec::new());
        for worker in workers {
            let (done, hot) = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all.turns += done.turns;
            all.evicted += done.evicted;
            all.rescued += done.rescued;
            in_use.extend(hot);
        }
        all.seconds = start.elapsed().as_secs_f64();
        (all, in_use)
    })
}

/// One row; a turn is an operation.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    name: &'static str,
    threads: u32,
    /// Hardware threads of this machine.
    parallelism: u32,
    pages: usize,
    rescue_percent: u32,
    ops: u64,
    seconds: f64,
    ops_per_second: f64,
    evicted_per_op: f64,
    rescued_per_op: f64,
    /// Throughput as a multiple of the FIFO queue's with as many threads.
    over_fifo: f64,
    /// Throughput as a multiple of its own with one thread.
    over_one_thread: f64,
}

/// The median by throughput.
fn median(mut runs: Vec<Done>) -> Done {
    runs.sort_by(|a, b| (a.turns as f64 / a.seconds).total_cmp(&(b.turns as f64 / b.seconds)));
    runs.get(runs.len() / 2).copied().unwrap_or_default()
}

/// 1, 2, 4, ... and the last one itself.
fn thread_counts(max: u32) -> Vec<u32> {
    let mut counts: Vec<u32> =
        std::iter::successors(Some(1u32), |count| count.checked_mul(2)).take_while(|count| *count < max).collect();
    counts.push(max);
    counts
}

/// Makes the rows.
pub(crate) fn run(args: &CoolingArgs, mut out: impl Write) -> anyhow::Result<()> {
    args.validate()?;
    let parallelism = thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(u32::MAX));
    let threads_max = args.threads.unwrap_or(parallelism);
    ensure!(threads_max <= 1024, "--threads {threads_max} is more than 1024");
    let mut rows: Vec<Row> = Vec::new();
    for threads in thread_counts(threads_max) {
        let (mut fifo, mut map) = (Vec::new(), Vec::new());
        // In turn, so that what else the machine does meets both.
        for _ in 0..args.repeats {
            let frames = args.pages * FRAMES_PER_SLOT;
            fifo.push(race(&OneFifo::new(args.pages, frames), threads, args).0);
            map.push(race(&CoolingMap::new(args.pages), threads, args).0);
        }
        let rate = |done: &Done| done.turns as f64 / done.seconds;
        let (fifo, map) = (median(fifo), median(map));
        for (name, done) in [("one FIFO", fifo), ("cooling map", map)] {
            let alone = rows.iter().find(|row| row.name == name).map_or(rate(&done), |row| row.ops_per_second);
            let row = Row {
                name,
                threads,
                parallelism,
                pages: args.pages,
                rescue_percent: args.rescue_percent,
                ops: done.turns,
                seconds: done.seconds,
                ops_per_second: rate(&done),
                evicted_per_op: done.evicted as f64 / done.turns.max(1) as f64,
                rescued_per_op: done.rescued as f64 / done.turns.max(1) as f64,
                over_fifo: rate(&done) / rate(&fifo),
                over_one_thread: rate(&done) / alone,
            };
            if args.json {
                serde_json::to_writer(&mut out, &row)?;
                writeln!(out)?;
                out.flush()?;
            }
            rows.push(row);
        }
    }
    if !args.json {
        print(&rows, parallelism, args, &mut out)?;
    }
    Ok(())
}

fn print(rows: &[Row], parallelism: u32, args: &CoolingArgs, out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "{} cooling pages, {}% of turns rescue one; this machine runs {parallelism} threads at a time",
        args.pages, args.rescue_percent
    )?;
    if rows.iter().any(|row| row.threads > parallelism) {
        writeln!(out, "with more threads than that, a row tells what happens when a lock's holder is not running")?;
    }
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule).bottom_border(rule)).set_header([
        "design",
        "threads",
        "turns/s",
        "evicted\n/turn",
        "rescued\n/turn",
        "over\nFIFO",
        "over one\nthread",
    ]);
    for row in rows {
        table.add_row([
            row.name.to_owned(),
            row.threads.to_string(),
            show_count(row.ops_per_second),
            format!("{:.2}", row.evicted_per_op),
            format!("{:.2}", row.rescued_per_op),
            format!("{:.2}x", row.over_fifo),
            format!("{:.2}x", row.over_one_thread),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 0));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    writeln!(out, "{table}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::figure::args::Figure;
    use clap::Parser as _;

    fn args(options: &str) -> CoolingArgs {
        let line = ["farlink", "figure", "cooling"].into_iter().chain(options.split_whitespace());
        let Command::Figure(figure) = Cli::try_parse_from(line).unwrap().command else { panic!("not a figure") };
        let Figure::Cooling(args) = figure.figure else { panic!("another figure") };
        args
    }

    #[test]
    fn one_queue_is_a_fifo_with_gaps() {
        let fifo = OneFifo::new(3, 10);
        let mut random = SmallRng::seed_from_u64(1);
        assert_eq!([1, 2, 3].map(|frame| fifo.cool(frame)), [None; 3]);
        assert!(fifo.rescue(2) && !fifo.rescue(2) && !fifo.rescue(9));
        assert_eq!((fifo.cool(4), fifo.cool(2)), (None, Some(1)));
        let rest: Vec<u32> = std::iter::from_fn(|| fifo.evict(&mut random)).collect();
        assert_eq!(rest, [3, 4, 2]);
        assert!(!fifo.rescue(3));
    }

    #[test]
    fn no_page_is_lost_or_doubled() {
        let args = args("--pages 60 --seconds 0.05 --rescue-percent 40");
        fn ends_with_all(cooler: &impl Cooler, args: &CoolingArgs) {
            let (done, mut frames) = race(cooler, 3, args);
            assert!(done.evicted > 0 && done.rescued > 0, "{done:?}");
            let mut random = SmallRng::seed_from_u64(1);
            let mut misses = 0;
            while misses < 1000 {
                match cooler.evict(&mut random) {
                    Some(frame) => frames.push(frame),
                    None => misses += 1,
                }
            }
            frames.sort_unstable();
            assert!(frames.windows(2).all(|pair| pair[0] < pair[1]), "doubled");
            assert_eq!(frames.len(), 60 * FRAMES_PER_SLOT);
        }
        ends_with_all(&OneFifo::new(60, 600), &args);
        ends_with_all(&CoolingMap::new(60), &args);
    }

    #[test]
    fn rows_for_each_number_of_threads() {
        assert_eq!((thread_counts(1), thread_counts(2), thread_counts(6)), (vec![1], vec![1, 2], vec![1, 2, 4, 6]));
        let mut out = Vec::new();
        run(&args("--json --threads 2 --seconds 0.02 --pages 600 --repeats 1"), &mut out).unwrap();
        let lines: Vec<serde_json::Value> =
            String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let names: Vec<_> =
            lines.iter().map(|line| (line["name"].as_str().unwrap(), line["threads"].as_u64().unwrap())).collect();
        assert_eq!(names, [("one FIFO", 1), ("cooling map", 1), ("one FIFO", 2), ("cooling map", 2)]);
        assert!(lines.iter().all(|line| line["over_fifo"].as_f64().unwrap() > 0.0));
        let mut out = Vec::new();
        run(&args("--threads 1 --seconds 0.02 --repeats 1"), &mut out).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("cooling map"));
        for options in ["--seconds 0", "--pages 5", "--threads 0", "--repeats 0", "--rescue-percent 101"] {
            assert!(run(&args(options), Vec::new()).is_err(), "{options}");
        }
    }
}
