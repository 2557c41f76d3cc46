//! The cooling map against one FIFO queue behind one lock (DEX, VLDB 2024, section 5.2): `cargo bench -p farlink-peers --bench cooling`.
//!
//! A turn is what a thread of a full cache does: a page of its own cools, and the oldest one found goes; or, one time in five,
//! a page that cooled lately is rescued.

use std::collections::VecDeque;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use farlink_cache::{
    PageId,
    internals::{Cooled, CoolingMap},
};
// Its hashes are quick: the comparison is of queues.
use hashbrown::HashSet;

/// Pages that can cool at a time, a tenth of a cache, and the frames that each thread has in use.
const PAGES: usize = 12_000;
const FRAMES: u32 = 30_000;
const RECENT: usize = 64;

/// Where pages cool. Frames are numbered from 1.
trait Cooler: Sync {
    /// Lets a page cool; answers one that has to go for it.
    fn cool(&self, frame: u32) -> Option<u32>;
    /// Takes an old page out.
    fn evict(&self, random: u64) -> Option<u32>;
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

    fn evict(&self, random: u64) -> Option<u32> {
        (0..8).find_map(|probe| self.pop(mix(random ^ probe))).map(|cooled| cooled.frame)
    }

    fn rescue(&self, frame: u32) -> bool {
        self.remove(page(frame), Cooled { frame, tag: 0 })
    }
}

/// The queue, and the frames in it that nobody has rescued. It has room for all.
#[derive(Default)]
struct Fifo(Mutex<(VecDeque<u32>, HashSet<u32>)>);

impl Cooler for Fifo {
    fn cool(&self, frame: u32) -> Option<u32> {
        let mut fifo = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        fifo.0.push_back(frame);
        fifo.1.insert(frame);
        None
    }

    fn evict(&self, _random: u64) -> Option<u32> {
        let (queue, cooling) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::iter::from_fn(|| queue.pop_front()).find(|frame| cooling.remove(frame))
    }

    fn rescue(&self, frame: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&frame)
    }
}

fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word ^ word >> 27
}

fn turns(cooler: &impl Cooler, mut hot: Vec<u32>, turns: u64) {
    let mut recent = [0; RECENT];
    for turn in 1..=turns {
        let random = mix(turn);
        if hot.is_empty() {
            // All of this thread's pages have cooled, and others took them.
            hot.extend(cooler.evict(random));
            continue;
        }
        let frame = hot.swap_remove(random as usize % hot.len());
        let rescued = std::mem::replace(&mut recent[random as usize % RECENT], frame);
        hot.extend(cooler.cool(frame));
        if random >> 32 < u64::from(u32::MAX) / 5 && rescued != 0 && cooler.rescue(rescued) {
            hot.push(rescued);
        } else {
            hot.extend(cooler.evict(random));
        }
    }
}

/// How long so many threads take together for so many turns each.
fn race(cooler: &impl Cooler, threads: u32, count: u64) -> Duration {
    let barrier = Barrier::new(threads as usize + 1);
    thread::scope(|scope| {
        for number in 0..threads {
            let (barrier, hot) = (&barrier, (1..=FRAMES).map(|frame| number * FRAMES + frame).collect());
            scope.spawn(move || {
                barrier.wait();
                turns(cooler, hot, count);
                barrier.wait();
            });
        }
        barrier.wait();
        let start = Instant::now();
        barrier.wait();
        start.elapsed()
    })
}

fn compare(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("cooling");
    for threads in [1, 2, 4, 8] {
        let id = |name| BenchmarkId::new(name, threads);
        group.bench_function(id("one FIFO"), |b| b.iter_custom(|count| race(&Fifo::default(), threads, count)));
        group.bench_function(id("map"), |b| b.iter_custom(|count| race(&CoolingMap::new(PAGES), threads, count)));
    }
}

criterion_group!(benches, compare);
criterion_main!(benches);
