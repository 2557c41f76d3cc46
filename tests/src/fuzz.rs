//! Bounded, seeded fuzzing of whatever reads words that someone else has written.
//!
//! A *target* takes words and must neither panic nor run for long; if it has something to compare, it asserts. Inputs are
//! made from samples of the target's, by mutation: bits flipped, words replaced by borders, cut, doubled, spliced. One seed
//! gives one sequence of inputs; the one that fails is printed.

pub mod calls;

use std::{
    marker::PhantomData,
    panic::{self, AssertUnwindSafe},
    time::{Duration, Instant},
};

use anyhow::{bail, ensure};
use farlink_offload::ship::{At, CallHeader, read_reply};
use farlink_runtime::{
    access::InPieces as _,
    messaging::{FromServer, read_from_server, read_request},
    operation::Code,
    page::StructureId,
    wire::{Wire, decode_all},
};
use farlink_structures::{
    btree::Tree,
    bwtree::SentScan,
    map::{
        KeyRange, ScanPart,
        ops::{Count, Get, Put, PutMode, Remove, Scan},
    },
    rtree::{self, Query, Rect},
};
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use crate::bounded::Watchdog;

/// Something that reads words.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Inputs that make sense to it.
    pub samples: fn() -> Vec<Vec<u64>>,
    /// Reads an input.
    pub read: fn(&[u64]),
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "request", samples: requests, read: request },
    Target { name: "message of a server", samples: from_server, read: message_of_server },
    Target { name: "get", samples: gets, read: same_again::<Get<Tree>> },
    Target { name: "put", samples: puts, read: same_again::<Put<Tree>> },
    Target { name: "remove", samples: removes, read: same_again::<Remove<Tree>> },
    Target { name: "scan", samples: scans, read: same_again::<Scan<Tree>> },
    Target { name: "sent scan", samples: sent_scans, read: same_again::<SentScan> },
    Target { name: "pieces of a scan", samples: pieces, read: assembled },
    Target { name: "count", samples: counts, read: same_again::<Count<Tree>> },
    Target { name: "region", samples: regions, read: same_again::<KeyRange> },
    Target { name: "insert of a box", samples: box_inserts, read: same_again::<rtree::ops::Insert<2>> },
    Target { name: "delete of a box", samples: box_deletes, read: same_again::<rtree::ops::Delete<2>> },
    Target { name: "update of a box", samples: box_updates, read: same_again::<rtree::ops::Update<2>> },
    Target { name: "find of boxes", samples: box_finds, read: same_again::<rtree::ops::Find<2>> },
    Target { name: "count of boxes", samples: box_counts, read: same_again::<rtree::ops::Count<2>> },
    Target { name: "region of boxes", samples: box_regions, read: same_again::<rtree::Scope<2>> },
    Target { name: "header of a call", samples: headers, read: same_again::<CallHeader> },
    Target { name: "reply to a call", samples: replies, read: reply },
    Target { name: "call", samples: calls::samples, read: calls::send },
    Target { name: "message to an owner", samples: calls::samples_to_owner, read: calls::send_to_owner },
];

/// Words at which code changes its mind.
const BORDERS: [u64; 14] =
    [0, 1, 2, 7, 0xff, 0x100, 0xffff, 0x1_0000, 0xffff_ffff, 1 << 32, 1 << 63, u64::MAX - 1, u64::MAX, u64::MAX >> 1];
/// Words of an input at most.
const WORDS_MAX: usize = 256;
const INPUTS_PER_LOOK: u64 = 1 << 12;
/// Far more than so many inputs take.
const LOOK_MAX: Duration = Duration::from_secs(20);

fn sent_scans() -> Vec<Vec<u64>> {
    vec![vec![1, 9, 100, 0, 0], vec![0, u64::MAX, 7, 1, 1, 1]]
}

/// Entries, and a chain of one record, as far as that goes without a checksum.
fn pieces() -> Vec<Vec<u64>> {
    let record = [3, 0, 1 << 20, 1 << 32, 0, 7, 70, 0];
    let chain = [&[1 << 56 | 1, 0, 1 << 24, 1 << 48 | 1 << 14 << 4][..], &record, &[0, 0]].concat();
    vec![vec![2, 7, 70, 8, 80, 1, 9], vec![0, 0], chain]
}

fn assembled(words: &[u64]) {
    for descending in [false, true] {
        let scan = SentScan { low: 2, high: u64::MAX - 2, limit: 5, descending, chains: None };
        let Ok(ScanPart { entries, rest, .. }) = scan.assemble(words) else { continue };
        let keys: Vec<u64> = entries.iter().map(|entry| entry.0).chain(rest).collect();
        assert!(entries.len() <= 5 && keys.is_sorted_by(|a, b| if descending { a > b } else { a < b }));
        // Who goes on from there comes to an end.
        assert!(rest.is_none_or(|rest| if descending { rest < scan.high } else { rest > scan.low }));
    }
}

fn requests() -> Vec<Vec<u64>> {
    vec![
        vec![1 << 8 | 1, 1, 1, 7],
        vec![1 << 8 | 1, 9, 4, 2 << 32 | 7, 1, 2],
        vec![3 << 8 | 1, 9, 9, 1 << 32 | 7, 1, 8, 4 << 32 | 5, 1, 2, 3, 4],
    ]
}

fn request(words: &[u64]) {
    match read_request(words) {
        Ok(view) => {
            let inside: usize = view.items().map(|(_, params)| 1 + params.len()).sum();
            assert_eq!((view.items().count(), 3 + inside), (view.items, words.len()));
            assert!(view.acknowledged <= view.sequence);
        }
        Err((_, sequence)) => assert!(sequence.is_none_or(|sequence| words.get(1) == Some(&sequence))),
    }
}

fn from_server() -> Vec<Vec<u64>> {
    vec![
        vec![1 << 8 | 2, 1, 0],
        vec![1 << 8 | 2, 5, 2 << 32, 1, 2],
        vec![3 << 8 | 2, 5, 2 << 32 | 1 << 16, 1, 2, 2, 1 << 32 | 2 << 16 | 3, 9],
        vec![3, 77, 1],
        vec![4, 1],
    ]
}

fn message_of_server(words: &[u64]) {
    if let Ok(FromServer::Reply(view)) = read_from_server(words) {
        let mut end = 2;
        for item in view.items() {
            let item = item.expect("items were checked before the reply was handed out");
            assert_eq!(item.words.start, end + 1);
            end = item.words.end;
            assert!(words.get(item.words).is_some());
        }
        assert_eq!(end, words.len());
    }
}

fn encoded<T: Wire>(values: impl IntoIterator<Item = T>) -> Vec<Vec<u64>> {
    let encode = |value: T| {
        let mut words = Vec::new();
        value.encode(&mut words);
        words
    };
    values.into_iter().map(encode).collect()
}

fn gets() -> Vec<Vec<u64>> {
    encoded([Get::<Tree> { key: 7, of: PhantomData }])
}

fn removes() -> Vec<Vec<u64>> {
    encoded([Remove::<Tree> { key: 8, of: PhantomData }])
}

fn counts() -> Vec<Vec<u64>> {
    encoded([(7, 9, 1), (0, u64::MAX, 4096)].map(|(low, high, limit)| Count::<Tree> {
        low,
        high,
        limit,
        of: PhantomData,
    }))
}

fn puts() -> Vec<Vec<u64>> {
    let modes = [PutMode::Insert, PutMode::Update, PutMode::Upsert];
    encoded(modes.map(|mode| Put::<Tree> { key: 7, value: 70, mode, of: PhantomData }))
}

fn scans() -> Vec<Vec<u64>> {
    let scans = [(0, u64::MAX, 10, false), (5, 7, 100, true)];
    encoded(scans.map(|(low, high, limit, descending)| Scan::<Tree> { low, high, limit, descending, of: PhantomData }))
}

fn regions() -> Vec<Vec<u64>> {
    encoded([KeyRange { low: 5, high: None }, KeyRange { low: 5, high: Some(9) }])
}

fn boxes() -> [Rect; 2] {
    [([0.25; 2], [0.5; 2]), ([-1.0, 0.0], [-1.0, 2.0])].map(|(low, high)| Rect::new(low, high).expect("it is a box"))
}

fn box_inserts() -> Vec<Vec<u64>> {
    encoded(boxes().map(|rect| rtree::ops::Insert { rect, payload: 7 }))
}

fn box_deletes() -> Vec<Vec<u64>> {
    encoded(boxes().map(|rect| rtree::ops::Delete { rect, payload: 7 }))
}

fn box_updates() -> Vec<Vec<u64>> {
    encoded([rtree::ops::Update { rect: boxes()[0], payload: 7, to: boxes()[1] }])
}

fn queries() -> [Query; 4] {
    [Query::Intersects(boxes()[0]), Query::Within(boxes()[0]), Query::Contains(boxes()[1]), Query::Nearest([0.5, 0.5])]
}

fn box_finds() -> Vec<Vec<u64>> {
    let find = |query, after| rtree::ops::Find { query, limit: 10, after, stamp: 0 };
    let all = queries().map(|query| find(query, None));
    encoded(all.into_iter().chain([find(queries()[0], Some((boxes()[0], 7)))]))
}

fn box_counts() -> Vec<Vec<u64>> {
    encoded(queries().map(|query| rtree::ops::Count { query, stamp: 0 }))
}

fn box_regions() -> Vec<Vec<u64>> {
    encoded([rtree::Scope { rect: boxes()[0], payload: Some(7) }, boxes()[1].into()])
}

fn headers() -> Vec<Vec<u64>> {
    let at = |start| CallHeader { code: Code::of::<Get<Tree>>(), structure: StructureId(1), start };
    encoded([At::Root, At::Above, At::Page(calls::a_page(), 1)].map(at))
}

fn replies() -> Vec<Vec<u64>> {
    vec![vec![3, 1, 4096, 1, 7], vec![1 << 56 | 2, 3], vec![2 << 56, 1, 4096, 5], vec![2 << 56, 4, 3, 0x00]]
}

/// What makes sense means one thing, and is written in one way.
fn same_again<T: Wire>(words: &[u64]) {
    if let Ok(value) = decode_all::<T>(words) {
        let mut again = Vec::new();
        value.encode(&mut again);
        assert_eq!(again, words);
    }
}

fn reply(words: &[u64]) {
    if let Ok(left) = read_reply(words) {
        assert!(left < words.len());
    }
}

/// Words made of samples by one to five changes.
pub fn mutate(samples: &[Vec<u64>], rng: &mut SmallRng) -> Vec<u64> {
    let mut words = samples.choose(rng).cloned().unwrap_or_default();
    for _ in 0..rng.random_range(1..6) {
        let at = if words.is_empty() { 0 } else { rng.random_range(0..words.len()) };
        match rng.random_range(0..8) {
            0 => words.truncate(at),
            1 => words.insert(at, *BORDERS.choose(rng).unwrap_or(&0)),
            2 => words.extend_from_within(at..),
            3 => words.extend(samples.choose(rng).into_iter().flatten()),
            kind if !words.is_empty() => match kind {
                4 => words[at] ^= 1 << rng.random_range(0..64),
                5 => words[at] = *BORDERS.choose(rng).unwrap_or(&0),
                6 => words[at] = words[at].wrapping_add(rng.random_range(0..5)).wrapping_sub(2),
                _ => words[at] = rng.next_u64() >> rng.random_range(0..64),
            },
            _ => {}
        }
        words.truncate(WORDS_MAX);
    }
    words
}

/// Fuzzes all targets whose name contains `filter`, one after another, for `limit` in all; how many inputs each has read.
///
/// # Errors
/// If a target panics: with the seed and the input. If there is no such target.
pub fn fuzz(seed: u64, limit: Duration, filter: &str) -> anyhow::Result<Vec<(&'static str, u64)>> {
    let targets: Vec<_> = TARGETS.iter().filter(|target| target.name.contains(filter)).collect();
    ensure!(
        !targets.is_empty(),
        "no target's name contains {filter:?}; there are {:?}",
        TARGETS.iter().map(|target| target.name).collect::<Vec<_>>()
    );
    let each = limit / targets.len() as u32;
    targets.into_iter().map(|target| Ok((target.name, fuzz_one(*target, seed, each, LOOK_MAX)?))).collect()
}

/// Fuzzes a target for `limit`; how many inputs it has read. A target that does not end with some thousands of them in several times
/// `look_max` ends the process: with its name and the seed.
///
/// # Errors
/// If it panics: with the seed and the input.
pub fn fuzz_one(target: Target, seed: u64, limit: Duration, look_max: Duration) -> anyhow::Result<u64> {
    let watch = || Watchdog::start(format!("{} with seed {seed}", target.name), look_max);
    let watchdog = watch();
    let samples = (target.samples)();
    for sample in &samples {
        run(target, seed, sample)?;
    }
    drop(watchdog);
    let mut rng = SmallRng::seed_from_u64(seed);
    let (start, mut inputs) = (Instant::now(), 0);
    while start.elapsed() < limit || inputs == 0 {
        let _watchdog = watch();
        for _ in 0..INPUTS_PER_LOOK {
            run(target, seed, &mutate(&samples, &mut rng))?;
        }
        inputs += INPUTS_PER_LOOK;
    }
    Ok(inputs)
}

/// Has a target read words.
///
/// # Errors
/// If it panics.
pub fn run(target: Target, seed: u64, words: &[u64]) -> anyhow::Result<()> {
    if panic::catch_unwind(AssertUnwindSafe(|| (target.read)(words))).is_err() {
        bail!("{} fails with seed {seed} on {words:#x?}", target.name);
    }
    Ok(())
}
