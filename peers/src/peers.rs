//! The peers: concurrent ordered indexes for local memory, each behind one small trait.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError, RwLock},
};

use bf_tree::{BfTree, LeafInsertResult, LeafReadResult};
use concurrent_map::ConcurrentMap;
use congee::U64Congee;
use scc::TreeIndex;

/// bf-tree's buffer for mini-pages and cached records; its leaves are in memory beside it.
const BF_BUFFER_BYTES: usize = 512 << 20;

/// Entries in ascending key order.
pub(crate) type Entries<'a> = &'a mut dyn ExactSizeIterator<Item = (u64, u64)>;

/// An index that several threads read.
pub(crate) trait Peer: Sync + Sized {
    /// Its name in the results.
    const NAME: &'static str;
    /// What a thread reads it through.
    type Reader<'a>: Reader
    where
        Self: 'a;

    /// An index of these entries.
    ///
    /// # Errors
    /// If the index refuses an entry.
    fn build(entries: Entries<'_>) -> anyhow::Result<Self>;

    /// A reader for the calling thread.
    fn reader(&self) -> Self::Reader<'_>;
}

/// One thread's way to an index.
pub(crate) trait Reader {
    /// The value of a key.
    fn get(&self, key: u64) -> Option<u64>;

    /// Looks keys up one after another. For indexes that offer to spread the cost of entering an epoch over several.
    #[inline]
    fn get_each(&self, keys: &[u64], mut each: impl FnMut(u64, Option<u64>)) {
        for &key in keys {
            each(key, self.get(key));
        }
    }
}

/// `congee`: an adaptive radix tree with optimistic lock coupling. Its epoch guard is taken once for a batch, as its
/// documentation advises.
pub(crate) struct Congee(U64Congee<usize>);

impl Peer for Congee {
    const NAME: &'static str = "congee";
    type Reader<'a> = &'a Self;

    fn build(entries: Entries<'_>) -> anyhow::Result<Self> {
        let tree = U64Congee::new();
        for (key, value) in entries {
            let guard = crossbeam_epoch::pin();
            tree.insert(key, value as usize, &guard).map_err(|_| anyhow::anyhow!("congee is out of memory"))?;
        }
        Ok(Self(tree))
    }

    fn reader(&self) -> &Self {
        self
    }
}

impl Reader for &Congee {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.get(key, &crossbeam_epoch::pin()).map(|value| value as u64)
    }

    #[inline]
    fn get_each(&self, keys: &[u64], mut each: impl FnMut(u64, Option<u64>)) {
        let guard = crossbeam_epoch::pin();
        for &key in keys {
            each(key, self.0.get(key, &guard).map(|value| value as u64));
        }
    }
}

/// `scc::TreeIndex`: a B+-tree with lock-free reads. Its epoch guard is taken once for a batch.
pub(crate) struct Scc(TreeIndex<u64, u64>);

impl Peer for Scc {
    const NAME: &'static str = "scc";
    type Reader<'a> = &'a Self;

    fn build(entries: Entries<'_>) -> anyhow::Result<Self> {
        let tree = TreeIndex::new();
        for (key, value) in entries {
            tree.insert_sync(key, value).map_err(|(key, _)| anyhow::anyhow!("scc refuses key {key}"))?;
        }
        Ok(Self(tree))
    }

    fn reader(&self) -> &Self {
        self
    }
}

impl Reader for &Scc {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.peek_with(&key, |_, &value| value)
    }

    #[inline]
    fn get_each(&self, keys: &[u64], mut each: impl FnMut(u64, Option<u64>)) {
        let guard = scc::Guard::new();
        for &key in keys {
            each(key, self.0.peek(&key, &guard).copied());
        }
    }
}

/// `concurrent-map`: a lock-free B+-tree. A handle belongs to one thread; threads clone it.
pub(crate) struct Concurrent(Mutex<ConcurrentMap<u64, u64>>);

impl Peer for Concurrent {
    const NAME: &'static str = "concurrent-map";
    type Reader<'a> = ConcurrentMap<u64, u64>;

    fn build(entries: Entries<'_>) -> anyhow::Result<Self> {
        let map = ConcurrentMap::new();
        for (key, value) in entries {
            map.insert(key, value);
        }
        Ok(Self(Mutex::new(map)))
    }

    fn reader(&self) -> ConcurrentMap<u64, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Reader for ConcurrentMap<u64, u64> {
    fn get(&self, key: u64) -> Option<u64> {
        ConcurrentMap::get(self, &key)
    }
}

/// `bf-tree`: a B-tree with variable-length pages, here with its storage in memory.
pub(crate) struct Bf(BfTree);

impl Peer for Bf {
    const NAME: &'static str = "bf-tree";
    type Reader<'a> = &'a Self;

    fn build(entries: Entries<'_>) -> anyhow::Result<Self> {
        let mut config = bf_tree::Config::new(":memory:", BF_BUFFER_BYTES);
        config.cb_min_record_size(16).cb_max_record_size(64).cb_max_key_len(16);
        let tree = BfTree::with_config(config, None).map_err(|error| anyhow::anyhow!("bf-tree: {error:?}"))?;
        for (key, value) in entries {
            match tree.insert(&key.to_be_bytes(), &value.to_le_bytes()) {
                LeafInsertResult::Success => {}
                LeafInsertResult::InvalidKV(why) => anyhow::bail!("bf-tree refuses key {key}: {why}"),
            }
        }
        Ok(Self(tree))
    }

    fn reader(&self) -> &Self {
        self
    }
}

impl Reader for &Bf {
    fn get(&self, key: u64) -> Option<u64> {
        let mut value = [0; 8];
        match self.0.read(&key.to_be_bytes(), &mut value) {
            LeafReadResult::Found(8) => Some(u64::from_le_bytes(value)),
            _ => None,
        }
    }
}

/// The standard library's `BTreeMap` behind its `RwLock`, locked for each lookup.
pub(crate) struct Std(RwLock<BTreeMap<u64, u64>>);

impl Peer for Std {
    const NAME: &'static str = "rwlock-btreemap";
    type Reader<'a> = &'a Self;

    fn build(entries: Entries<'_>) -> anyhow::Result<Self> {
        Ok(Self(RwLock::new(entries.collect())))
    }

    fn reader(&self) -> &Self {
        self
    }
}

impl Reader for &Std {
    fn get(&self, key: u64) -> Option<u64> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agrees<P: Peer>() {
        let map: BTreeMap<u64, u64> = (0..10_000u64).map(|index| (index * 7 + 3, index + 1)).collect();
        let entries: Vec<(u64, u64)> = map.clone().into_iter().collect();
        let peer = P::build(&mut entries.into_iter()).unwrap();
        let reader = peer.reader();
        let keys: Vec<u64> = (0..70_010).collect();
        for &key in &keys {
            assert_eq!(reader.get(key), map.get(&key).copied(), "{}: {key}", P::NAME);
        }
        reader.get_each(&keys, |key, value| assert_eq!(value, map.get(&key).copied(), "{}: {key}", P::NAME));
    }

    #[test]
    fn every_peer_agrees_with_a_map_also_on_absent_keys() {
        agrees::<Congee>();
        agrees::<Scc>();
        agrees::<Concurrent>();
        agrees::<Bf>();
        agrees::<Std>();
    }
}
