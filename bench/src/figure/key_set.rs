//! The keys of a figure, who owns them, and the operations that each compute server runs on them.
//!
//! Keys are numbered; key `i` is `i * STRIDE`, so none has to be stored and a bulk load can stream them. A Zipf rank
//! becomes a key's number through a pseudo-random permutation: hot keys are spread over all leaves. Compute servers own
//! equal ranges of the numbers. Operations are drawn from one global stream, the same for all servers, and each runs
//! those on its own keys: together they are exactly that many draws of the global distribution.

use std::ops::Range;
use std::sync::Arc;

use anyhow::ensure;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::maps::MapRequest;
use crate::maps::keys::{Chooser, mix, value_for};
use crate::subject::Distribution;

/// The distance between two neighbouring keys: room for keys that are not there.
pub(crate) const STRIDE: u64 = 1024;
/// Bytes of a page, as in DEX.
pub(crate) const PAGE_BYTES: u64 = 1024;
/// How full the load makes each page: 54 of 60 entries.
pub(crate) const FILL: f64 = 0.9;
/// What a page of [`PAGE_BYTES`] holds after such a load.
pub(crate) const ENTRIES_PER_PAGE: u64 = 54;
/// More keys than any machine of today holds; products with it stay inside a word.
const KEYS_MAX: u64 = 1 << 40;
const SERVERS_MAX: u64 = 128;

/// A mix of the paper, as far as figures need it: the rest are lookups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FigureMix {
    pub(crate) name: &'static str,
    pub(crate) update_percent: u32,
    pub(crate) insert_percent: u32,
}

impl FigureMix {
    const fn new(name: &'static str, update_percent: u32, insert_percent: u32) -> Self {
        Self { name, update_percent, insert_percent }
    }
}

pub(crate) const READ_ONLY: FigureMix = FigureMix::new("read-only", 0, 0);
pub(crate) const READ_INTENSIVE: FigureMix = FigureMix::new("read-intensive", 5, 0);
pub(crate) const WRITE_INTENSIVE: FigureMix = FigureMix::new("write-intensive", 50, 0);
pub(crate) const INSERT_INTENSIVE: FigureMix = FigureMix::new("insert-intensive", 0, 50);

/// The keys, their popularity, and their owners.
#[derive(Debug)]
pub(crate) struct KeySet {
    pub(crate) keys: u64,
    /// The exponent of their popularity.
    pub(crate) theta: f64,
    chooser: Chooser,
    servers: u64,
}

impl KeySet {
    /// `keys` keys with Zipf popularity, owned by `servers` compute servers; `seed` fixes which keys are hot.
    pub(crate) fn new(keys: u64, theta: f64, servers: u64, seed: u64) -> anyhow::Result<Self> {
        ensure!((1..=KEYS_MAX).contains(&keys), "--keys {keys} is not between 1 and {KEYS_MAX}");
        ensure!(
            (1..=SERVERS_MAX.min(keys)).contains(&servers),
            "--compute-servers {servers} is not between 1 and {}, or there are fewer keys",
            SERVERS_MAX
        );
        Ok(Self { keys, theta, chooser: Chooser::new(keys, Distribution::Zipf(theta), seed)?, servers })
    }

    /// How many compute servers share them.
    pub(crate) fn servers(&self) -> usize {
        self.servers as usize
    }

    /// The key with this number.
    pub(crate) fn key(number: u64) -> u64 {
        number * STRIDE
    }

    /// The number of the key with this rank of popularity.
    pub(crate) fn number(&self, rank: u64) -> u64 {
        self.chooser.ranked(rank)
    }

    /// What the key with this rank weighs; its probability is that over the sum of all.
    pub(crate) fn weight(&self, rank: u64) -> f64 {
        ((rank + 1) as f64).powf(-self.theta)
    }

    /// All keys with their first values, in the order of the keys.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        (0..self.keys).map(entry)
    }

    /// The numbers of the keys that a compute server owns.
    pub(crate) fn owned(&self, server: usize) -> Range<u64> {
        self.first(server as u64)..self.first(server as u64 + 1)
    }

    /// The first key of a compute server: where a leaf of the tree begins, if servers own several leaves each.
    fn first(&self, server: u64) -> u64 {
        let even = server * self.keys / self.servers;
        let is_end = server == self.servers || self.keys / self.servers < 4 * ENTRIES_PER_PAGE;
        if is_end { even } else { even - even % ENTRIES_PER_PAGE }
    }

    /// The compute server that owns the key with this number.
    pub(crate) fn owner(&self, number: u64) -> usize {
        let even = ((number + 1) * self.servers - 1) / self.keys;
        // The next one's first leaf begins a little before its even share.
        let is_next = even + 1 < self.servers && number >= self.first(even + 1);
        (even + u64::from(is_next)) as usize
    }

    /// The operations of `server` among `draws` operations of all servers. Each has a value of its own, numbered from `version`
    /// on: an update to the same value would change nothing. What is inserted lies anywhere between the keys that are there.
    pub(crate) fn operations(
        self: &Arc<Self>,
        server: usize,
        draws: u64,
        what: FigureMix,
        seed: u64,
        version: u32,
    ) -> impl Iterator<Item = MapRequest> + use<> {
        let (key_set, mut random) = (Arc::clone(self), SmallRng::seed_from_u64(mix(seed)));
        let FigureMix { update_percent, insert_percent, .. } = what;
        (0..draws).filter_map(move |draw| {
            let mut number = key_set.chooser.draw(&mut random);
            let kind = if update_percent + insert_percent > 0 { random.random_range(0..100) } else { 100 };
            let (mut key, is_insert) = (Self::key(number), kind < insert_percent);
            if is_insert {
                number = random.random_range(0..key_set.keys);
                key = Self::key(number) + random.random_range(1..STRIDE);
            }
            let value = value_for(key, version.wrapping_add(draw as u32));
            let request = match kind {
                _ if is_insert => MapRequest::Insert { key, value },
                kind if kind < insert_percent + update_percent => MapRequest::Update { key, value },
                _ => MapRequest::Get { key, latest: false },
            };
            (key_set.owner(number) == server).then_some(request)
        })
    }
}

/// The key with this number and its first value.
pub(crate) fn entry(number: u64) -> (u64, u64) {
    let key = KeySet::key(number);
    (key, value_for(key, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_agree_with_their_ranges() {
        for (keys, servers) in [(1, 1), (7, 3), (100, 4), (101, 4), (1000, 7), (5, 5), (10_000, 4), (9_999, 7)] {
            let key_set = KeySet::new(keys, 0.99, servers, 1).unwrap();
            let mut next = 0;
            for server in 0..key_set.servers() {
                let owned = key_set.owned(server);
                assert_eq!(owned.start, next);
                assert!(!owned.is_empty());
                assert!(owned.clone().all(|number| key_set.owner(number) == server));
                next = owned.end;
            }
            assert_eq!(next, keys);
        }
    }

    #[test]
    fn servers_share_one_stream() {
        let key_set = Arc::new(KeySet::new(1000, 0.99, 4, 1).unwrap());
        let mut updates = 0;
        let mut total = 0;
        for server in 0..4 {
            for request in key_set.operations(server, 100_000, WRITE_INTENSIVE, 3, 0) {
                let (MapRequest::Get { key, .. } | MapRequest::Update { key, .. }) = request else {
                    panic!("{request:?}")
                };
                assert!(key_set.owned(server).contains(&(key / STRIDE)));
                updates += u64::from(matches!(request, MapRequest::Update { .. }));
                total += 1;
            }
        }
        assert_eq!(total, 100_000);
        assert!((49_000..51_000).contains(&updates), "{updates}");
        assert!(key_set.operations(0, 1000, READ_ONLY, 3, 0).all(|request| matches!(request, MapRequest::Get { .. })));
        let mut inserts = 0;
        for request in key_set.operations(1, 10_000, INSERT_INTENSIVE, 3, 0) {
            if let MapRequest::Insert { key, .. } = request {
                assert!(!key.is_multiple_of(STRIDE) && key_set.owned(1).contains(&(key / STRIDE)));
                inserts += 1;
            }
        }
        assert!((1100..1400).contains(&inserts), "{inserts}");
    }
}
