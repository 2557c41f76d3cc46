//! One measurement, and the rounds of all of them.

use std::{
    sync::{Arc, Barrier, atomic::AtomicBool, atomic::Ordering},
    time::{Duration, Instant},
};

use crate::system::{Job, SystemUnderTest};

/// How often the main thread looks whether the others have failed.
const GLANCE: Duration = Duration::from_millis(20);

/// What one measurement saw.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ran {
    /// Lookups of all threads.
    pub(crate) ops: u64,
    /// From the start to the last thread's end.
    pub(crate) seconds: f64,
    /// The sum of the threads' rates.
    pub(crate) ops_per_second: f64,
}

/// Runs a system on a thread for each of `keys`.
///
/// # Errors
/// If an answer is wrong.
pub(crate) fn measure(
    system: &dyn SystemUnderTest,
    keys: &[Arc<[u64]>],
    in_flight: usize,
    time: Duration,
) -> anyhow::Result<Ran> {
    let stop = Arc::new(AtomicBool::new(false));
    let start = Barrier::new(keys.len() + 1);
    std::thread::scope(|scope| {
        let threads: Vec<_> = keys
            .iter()
            .map(|keys| {
                let job = Job { keys: Arc::clone(keys), in_flight, stop: Arc::clone(&stop) };
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let began = Instant::now();
                    system.run(&job).map(|ops| (ops, began.elapsed().as_secs_f64()))
                })
            })
            .collect();
        start.wait();
        let end = Instant::now() + time;
        while Instant::now() < end && !threads.iter().any(|thread| thread.is_finished()) {
            std::thread::sleep(GLANCE.min(end.saturating_duration_since(Instant::now())));
        }
        stop.store(true, Ordering::Relaxed);
        let mut total = Ran { ops: 0, seconds: 0.0, ops_per_second: 0.0 };
        for thread in threads {
            let (ops, seconds) = thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            total.ops += ops;
            total.seconds = total.seconds.max(seconds);
            total.ops_per_second += ops as f64 / seconds;
        }
        Ok(total)
    })
}

/// A system in one setting, with a measurement of each round.
pub(crate) struct Entry<'a> {
    /// Who.
    pub(crate) system: &'a dyn SystemUnderTest,
    /// Lookups that each thread keeps in flight.
    pub(crate) in_flight: usize,
    /// A measurement of each round.
    pub(crate) rounds: Vec<Ran>,
}

impl Entry<'_> {
    /// The round with the median rate (the lower one of two).
    pub(crate) fn median(&self) -> Ran {
        let mut rounds = self.rounds.clone();
        rounds.sort_by(|a, b| a.ops_per_second.total_cmp(&b.ops_per_second));
        rounds[(rounds.len() - 1) / 2]
    }
}

/// Measures every system in every setting, once a round, so that a drift of the machine hits all alike.
///
/// # Errors
/// If an answer is wrong.
pub(crate) fn race<'a>(
    systems: &'a [Box<dyn SystemUnderTest>],
    keys: &[Arc<[u64]>],
    in_flight: &[usize],
    rounds: usize,
    time: Duration,
) -> anyhow::Result<Vec<Entry<'a>>> {
    let mut entries = Vec::new();
    for system in systems {
        let settings = if system.interleaves() { in_flight } else { &[1] };
        entries.extend(settings.iter().map(|&in_flight| Entry { system: &**system, in_flight, rounds: Vec::new() }));
    }
    for _ in 0..rounds {
        for entry in &mut entries {
            entry.rounds.push(measure(entry.system, keys, entry.in_flight, time)?);
        }
    }
    Ok(entries)
}
