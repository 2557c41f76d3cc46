//! Pre-drawn streams: what one worker will do, in order, drawn from a seed before the clock starts.
//!
//! An exact Zipf sample costs more than a cached lookup, so nothing random is drawn while operations are timed. A
//! stream is at most [`LENGTH_MAX`] operations; a longer run walks it again from its start. Two things are left open
//! until an operation is issued, because walking a stream twice must not repeat them: which new key an insert takes, and
//! which key a read of the latest means. Both depend only on how many inserts the worker has issued, so the same seed
//! still gives the same run of one worker.
//!
//! Each workload that a worker prepares is another pass: it draws other operations than those before it. A mix that runs twice,
//! or is measured after a warm-up, would else ask for the same keys again, and write the values that they have already.
//!
//! *Latest* (YCSB D) draws a Zipf rank of age. Rank 0 is the newest key that this worker inserted, and past its own
//! inserts come the loaded keys from the last number down. Workers do not tell one another what they inserted.

use anyhow::ensure;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use super::keys::{self, Chooser, KeySpace, Permutation, mix};
use super::workload::{Kind, Mix, ReadFrom, ScanLength};
use crate::subject::{Distribution, GoOn, WorkerId};

/// The longest stream that is drawn for one worker: 64 MiB.
pub(crate) const LENGTH_MAX: u64 = 1 << 22;
/// Shorter streams are not worth repeating, but where so many workers draw that together they would draw for minutes.
const LENGTH_MIN: u64 = 1 << 20;
/// What all workers together draw for a workload that runs until a deadline, unless each draws [`LENGTH_LEAST`].
const TOTAL: u64 = 1 << 23;
const LENGTH_LEAST: u64 = 1 << 12;

/// Drawn between two looks at whether to go on: milliseconds, also where floating point is emulated.
const DRAWN_AT_A_TIME: usize = 1 << 12;

/// The exponent of *latest* when the other keys are chosen uniformly: YCSB's own.
const LATEST_THETA: f64 = 0.99;

/// One drawn operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Draw {
    /// Look up a loaded key.
    Read(u64),
    /// Look up the key of this age.
    ReadLatest(u64),
    /// Overwrite the value of a loaded key.
    Update(u64),
    /// Look up a loaded key and overwrite its value.
    ReadModifyWrite(u64),
    /// Insert the worker's next new key.
    InsertNext,
    /// Insert this key.
    Insert(u64),
    /// Remove this key.
    Remove(u64),
    /// Read up to `limit` entries from `from` on.
    Scan { from: u64, limit: u32 },
}

/// What a mix is drawn from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) keys: &'a KeySpace,
    pub(crate) distribution: Distribution,
    /// The run's seed: it fixes the hot keys, and with the worker's number the stream.
    pub(crate) seed: u64,
    pub(crate) pass: Pass,
    /// `--scan-length`.
    pub(crate) scan_length: u32,
}

/// Tells apart what one worker draws from one seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Pass {
    /// [`Setting::run`](crate::subject::Setting::run).
    pub(crate) run: u32,
    /// How many workloads the worker has prepared before.
    pub(crate) number: u32,
}

impl Pass {
    /// Nothing for the first one.
    pub(crate) fn salt(self) -> u64 {
        mix(u64::from(self.run) << 32 | u64::from(self.number)) ^ mix(0)
    }
}

/// How long a stream should be for a worker that will issue `operations` (`None`: until a deadline).
pub(crate) fn length_for(operations: Option<u64>, keys: &KeySpace, worker: WorkerId) -> usize {
    let length = match operations {
        Some(operations) => operations.min(LENGTH_MAX),
        // Until a deadline: long enough that a uniform choice touches most keys.
        None => {
            let total = worker.total.max(1);
            let least = (TOTAL / total).clamp(LENGTH_LEAST, LENGTH_MIN);
            (2 * keys.loaded() / total).clamp(least, LENGTH_MAX)
        }
    };
    length as usize
}

/// Draws `length` operations of a mix for one worker.
pub(crate) fn draw(
    mix: &Mix,
    source: Source<'_>,
    worker: WorkerId,
    length: usize,
    go_on: GoOn<'_>,
) -> anyhow::Result<Vec<Draw>> {
    ensure!(source.scan_length > 0, "--scan-length must be at least 1");
    let loaded = source.keys.loaded();
    let chooser = Chooser::new(loaded, source.distribution, source.seed)?;
    let ages = keys::zipf(loaded, source.distribution.theta().unwrap_or(LATEST_THETA))?;
    let mut random = StdRng::seed_from_u64(stream_seed(source.seed, source.pass, &mix.name, worker));
    let draw_one = || {
        let kind = mix.shares.draw(&mut random);
        match kind {
            Kind::Insert => return Draw::InsertNext,
            Kind::Read if mix.read_from == ReadFrom::Latest => {
                return Draw::ReadLatest(keys::draw_rank(&ages, loaded, &mut random));
            }
            _ => {}
        }
        let key = source.keys.loaded_key(chooser.draw(&mut random));
        match kind {
            Kind::Read | Kind::Insert => Draw::Read(key),
            Kind::Update => Draw::Update(key),
            Kind::ReadModifyWrite => Draw::ReadModifyWrite(key),
            Kind::Remove => Draw::Remove(key),
            Kind::Scan => {
                let limit = match mix.scan_length {
                    ScanLength::Exactly => source.scan_length,
                    ScanLength::UpTo => random.random_range(1..=source.scan_length),
                };
                Draw::Scan { from: key, limit }
            }
        }
    };
    collect(std::iter::repeat_with(draw_one).take(length), go_on)
}

fn collect(mut drawn: impl Iterator<Item = Draw>, go_on: GoOn<'_>) -> anyhow::Result<Vec<Draw>> {
    let mut stream = Vec::with_capacity(drawn.size_hint().0);
    loop {
        go_on()?;
        let before = stream.len();
        stream.extend(drawn.by_ref().take(DRAWN_AT_A_TIME));
        if stream.len() - before < DRAWN_AT_A_TIME {
            return Ok(stream);
        }
    }
}

/// One worker's share of all loaded keys, each once, in an order that `seed` fixes. The shares of all workers together
/// are all loaded keys: this is the load by inserts, and a round that removes or inserts everything.
pub(crate) fn every_key(
    keys: &KeySpace,
    seed: u64,
    worker: WorkerId,
    what: fn(u64) -> Draw,
    go_on: GoOn<'_>,
) -> anyhow::Result<Vec<Draw>> {
    let order = Permutation::new(keys.loaded(), mix(seed));
    let stride = usize::try_from(worker.total.max(1)).unwrap_or(usize::MAX);
    let places = (worker.index..keys.loaded()).step_by(stride);
    collect(places.map(|place| what(keys.loaded_key(order.apply(place)))), go_on)
}

/// Streams of different workers, passes and mixes must not march in step.
fn stream_seed(seed: u64, pass: Pass, mix_name: &str, worker: WorkerId) -> u64 {
    let of_worker = mix(seed ^ mix(worker.index)) ^ pass.salt();
    mix_name.bytes().fold(of_worker, |hash, byte| mix(hash ^ u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const FIRST: WorkerId = WorkerId { index: 0, total: 2 };
    const SECOND: WorkerId = WorkerId { index: 1, total: 2 };
    const GO_ON: GoOn<'static> = &|| Ok(());

    fn source(keys: &KeySpace) -> Source<'_> {
        Source { keys, distribution: Distribution::Zipf(0.99), seed: 7, pass: Pass::default(), scan_length: 100 }
    }

    #[test]
    fn many_workers_together_do_not_draw_for_minutes() {
        let keys = KeySpace::scrambled(1_000_000, 1).unwrap();
        let of = |total| length_for(None, &keys, WorkerId { index: 0, total }) as u64;
        assert_eq!((of(1), of(2), of(8)), (2_000_000, 1 << 20, 1 << 20));
        assert!((16..=1000).all(|total| of(total) * total <= TOTAL), "{}", of(1000));
        assert_eq!(of(1 << 20), LENGTH_LEAST);
    }

    #[test]
    fn the_same_seed_gives_the_same_stream() {
        let keys = KeySpace::scrambled(1000, 1).unwrap();
        for name in crate::maps::workload::NAMES {
            let mix = Mix::named(name).unwrap();
            let stream = draw(&mix, source(&keys), FIRST, 500, GO_ON).unwrap();
            assert_eq!(stream, draw(&mix, source(&keys), FIRST, 500, GO_ON).unwrap());
            assert_ne!(stream, draw(&mix, source(&keys), SECOND, 500, GO_ON).unwrap());
            assert_ne!(stream, draw(&mix, Source { seed: 8, ..source(&keys) }, FIRST, 500, GO_ON).unwrap());
        }
    }

    #[test]
    fn draws_name_loaded_keys_only() {
        let keys = KeySpace::from_sorted(vec![3, 5, 8, 13], 1).unwrap();
        let mix = Mix::named("f").unwrap();
        for drawn in draw(&mix, source(&keys), FIRST, 1000, GO_ON).unwrap() {
            match drawn {
                Draw::Read(key) | Draw::ReadModifyWrite(key) => assert!([3, 5, 8, 13].contains(&key)),
                other => panic!("mix f has no {other:?}"),
            }
        }
    }

    #[test]
    fn scan_lengths() {
        let keys = KeySpace::scrambled(1000, 1).unwrap();
        let lengths = |name: &str| -> HashSet<u32> {
            let stream = draw(&Mix::named(name).unwrap(), source(&keys), FIRST, 5000, GO_ON).unwrap();
            stream
                .iter()
                .filter_map(|drawn| match drawn {
                    Draw::Scan { limit, .. } => Some(*limit),
                    _ => None,
                })
                .collect()
        };
        assert_eq!(lengths("scan-intensive"), HashSet::from([100]));
        assert_eq!(lengths("e"), (1..=100).collect());
    }

    #[test]
    fn latest_reads_are_mostly_young() {
        let keys = KeySpace::scrambled(1_000_000, 1).unwrap();
        let uniform = Source { distribution: Distribution::Uniform, ..source(&keys) };
        let stream = draw(&Mix::named("d").unwrap(), uniform, FIRST, 10_000, GO_ON).unwrap();
        let ages: Vec<u64> =
            stream.iter().filter_map(|d| if let Draw::ReadLatest(a) = d { Some(*a) } else { None }).collect();
        assert!(ages.len() > 9_000 && ages.len() < 10_000);
        assert!(ages.iter().filter(|age| **age < 1000).count() > ages.len() / 3);
    }

    #[test]
    fn shares_of_every_key_are_all_keys_once() {
        let keys = KeySpace::scrambled(1001, 1).unwrap();
        let every_key = |seed, worker| every_key(&keys, seed, worker, Draw::Remove, GO_ON).unwrap();
        let (first, second) = (every_key(4, FIRST), every_key(4, SECOND));
        assert_eq!((first.len(), second.len()), (501, 500));
        let all: HashSet<u64> = first
            .iter()
            .chain(&second)
            .map(|drawn| match drawn {
                Draw::Remove(key) => *key,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(all.len(), 1001);
        assert_ne!(first, every_key(5, FIRST));
    }

    #[test]
    fn drawing_ends_when_it_is_told_to() {
        let keys = KeySpace::scrambled(50_000, 1).unwrap();
        let mix = Mix::named("a").unwrap();
        for drawn_before in [0, 5] {
            let looks = std::cell::Cell::new(0);
            let go_on = || {
                anyhow::ensure!(looks.replace(looks.get() + 1) < drawn_before, "a memory server is gone");
                Ok(())
            };
            let mixed = draw(&mix, source(&keys), FIRST, 100_000, &go_on).unwrap_err();
            assert_eq!((mixed.to_string().as_str(), looks.take()), ("a memory server is gone", drawn_before + 1));
            assert!(every_key(&keys, 4, FIRST, Draw::Remove, &go_on).is_err());
            assert_eq!(looks.take(), drawn_before + 1);
        }
        let length = 2 * DRAWN_AT_A_TIME;
        assert_eq!(draw(&mix, source(&keys), FIRST, length, GO_ON).unwrap().len(), length);
    }

    #[test]
    fn lengths_are_bounded() {
        let keys = KeySpace::scrambled(100_000_000, 1).unwrap();
        assert_eq!(length_for(Some(10), &keys, FIRST), 10);
        assert_eq!(length_for(Some(u64::MAX), &keys, FIRST) as u64, LENGTH_MAX);
        assert_eq!(length_for(None, &keys, FIRST) as u64, LENGTH_MAX);
        assert_eq!(length_for(None, &KeySpace::scrambled(1, 1).unwrap(), FIRST) as u64, LENGTH_MIN);
    }
}
