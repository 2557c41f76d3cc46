//! Values that the threads of a process share: what has been made of pages, in place of the pages.
//!
//! A value is kept under a key, with the *version* of what it was made of; whether that is still current is for the caller to
//! find out. An entry is never changed: it is replaced, version and value together, so that a reader meets one or another.
//!
//! ```text
//! key --hash--> bucket: 4 places --> entry: key, version, age, value, bytes, uses
//! ```
//!
//! A reader takes no lock and writes nothing that others read, but for the count of uses once memory, or a bucket, is full. It copies the value
//! while it is pinned; entries that were taken out are freed once nobody can be at them (crossbeam-epoch). A writer puts an
//! entry into a place with a compare-and-swap. Bytes are taken before an entry goes in, and given back by whoever takes it out. When there are none
//! left, the least used of a few entries goes, if it is used less than the new one: uses are counted and remembered as those of
//! pages are (`frequency`).
//!
//! The budget covers entries and buckets. What was taken out and is not yet freed comes on top. A handle hands that over with each 64th of
//! the budget, and any handle that is used frees it. So it is bounded by that much for each handle that rests, and by what is replaced
//! while one reader is pinned.

use std::{
    cell::Cell,
    fmt,
    ops::Deref,
    sync::atomic::{AtomicUsize, Ordering as Plain},
};

use crossbeam_epoch::{Atomic, Collector, Guard, LocalHandle, Owned, Shared};

use crate::{
    frequency::{Frequencies, USES_PER_TICK},
    id::PageId,
    mix::mix,
    sync::{Arc, AtomicU32, Ordering, Step, fence, is_left_out},
};

/// Places of a bucket.
const WAYS: usize = 4;
/// Bytes of the budget for each place.
const BYTES_PER_PLACE: usize = 512;
/// Entries looked at to find one to go.
const SAMPLE: usize = 5;
/// Buckets looked at to find those.
const SAMPLE_BUCKETS: usize = 16;
/// Entries that go for one new one, at most.
const VICTIMS_MAX: usize = 64;
/// This part of the budget, and so many bytes at least, is what a handle takes out before it has others free it.
const DEFERRED_SHARE: usize = 64;
const DEFERRED_MIN: usize = 4096;
/// Uses per place after which all counts are halved.
const HALVING_PERIOD: u64 = 200;

/// Something under a key.
struct Entry<V> {
    key: PageId,
    version: u64,
    age: u64,
    bytes: usize,
    uses: AtomicU32,
    value: V,
}

/// A handle that takes entries out.
struct Pinned<'a> {
    guard: Guard,
    deferred: &'a Cell<usize>,
    counters: &'a Cell<ValueCounters>,
}

impl Deref for Pinned<'_> {
    type Target = Guard;

    fn deref(&self) -> &Guard {
        &self.guard
    }
}

type Bucket<V> = [Atomic<Entry<V>>; WAYS];

/// Values with versions, under the numbers of what they were made of, within a number of bytes.
pub struct ValueCache<V> {
    buckets: Box<[Bucket<V>]>,
    limit: usize,
    /// What it uses while it is empty.
    fixed: usize,
    used: AtomicUsize,
    frequency: Frequencies,
    collector: Collector,
    hits: AtomicUsize,
    misses: AtomicUsize,
    evictions: AtomicUsize,
}

impl<V> fmt::Debug for ValueCache<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ValueCache").field("limit", &self.limit).field("used", &self.used()).finish_non_exhaustive()
    }
}

/// What was asked of a [`ValueCache`], by handles that have been dropped and by the one that asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ValueCounters {
    /// A value of the key was there.
    pub hits: u64,
    /// None was.
    pub misses: u64,
    /// Values that went for others.
    pub evictions: u64,
}

/// The way of one thread to a [`ValueCache`].
pub struct ValueHandle<V> {
    cache: Arc<ValueCache<V>>,
    local: LocalHandle,
    /// Bytes of entries that only this handle can free.
    deferred: Cell<usize>,
    random: Cell<u64>,
    uses: Cell<u32>,
    counters: Cell<ValueCounters>,
}

impl<V> fmt::Debug for ValueHandle<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ValueHandle").field("cache", &self.cache).finish_non_exhaustive()
    }
}

impl<V: Clone + Send + Sync + 'static> ValueCache<V> {
    /// An empty one of so many bytes. It has a place for each 512 of them, and keeps no more values than that.
    pub fn new(bytes: usize) -> Arc<Self> {
        let buckets = (bytes / BYTES_PER_PLACE / WAYS).max(1);
        let places = buckets * WAYS;
        let fixed = buckets * size_of::<Bucket<V>>() + crate::frequency::sketch_counters(places);
        Arc::new(Self {
            buckets: (0..buckets).map(|_| std::array::from_fn(|_| Atomic::null())).collect(),
            limit: bytes,
            fixed,
            used: AtomicUsize::new(fixed),
            frequency: Frequencies::new(places, HALVING_PERIOD * places as u64),
            collector: Collector::new(),
            hits: AtomicUsize::new(0),
            misses: AtomicUsize::new(0),
            evictions: AtomicUsize::new(0),
        })
    }

    /// A way to it for one thread. The same seed, the same choices of what goes.
    pub fn handle(self: &Arc<Self>, seed: u64) -> ValueHandle<V> {
        ValueHandle {
            cache: Arc::clone(self),
            local: self.collector.register(),
            deferred: Cell::new(0),
            random: Cell::new(seed),
            uses: Cell::new(0),
            counters: Cell::default(),
        }
    }

    fn bucket(&self, key: PageId) -> &Bucket<V> {
        &self.buckets[((u128::from(mix(key.get())) * self.buckets.len() as u128) >> 64) as usize]
    }

    /// Takes an entry out of its place; false if somebody else has.
    fn take_out(
        &self,
        place: &Atomic<Entry<V>>,
        entry: Shared<'_, Entry<V>>,
        to: Shared<'_, Entry<V>>,
        guard: &Pinned<'_>,
    ) -> bool {
        let is_out = place.compare_exchange(entry, to, Ordering::AcqRel, Ordering::Acquire, guard).is_ok();
        // SAFETY: entries are freed behind a grace period, and `guard` was there before this one was loaded.
        let Some(old) = (unsafe { entry.as_ref() }) else { return is_out };
        if is_out || is_left_out(Step::TakenOut) {
            self.used.fetch_sub(old.bytes, Plain::Relaxed);
        }
        if is_out {
            // SAFETY: it was in this place alone, and nobody finds it any more.
            unsafe { guard.defer_destroy(entry) };
            let deferred = guard.deferred.get() + old.bytes;
            let is_much = deferred >= (self.limit / DEFERRED_SHARE).max(DEFERRED_MIN);
            if is_much {
                guard.flush();
            }
            guard.deferred.set(if is_much { 0 } else { deferred });
        }
        is_out
    }

    /// Takes the bytes of an entry, from others that are used less if there are none left. Those of the one that it replaces come
    /// back as soon as it is in.
    fn take_bytes(
        &self,
        entry: &Entry<V>,
        replaced: usize,
        uses: u8,
        random: &mut impl FnMut() -> u64,
        guard: &Pinned<'_>,
    ) -> bool {
        let bytes = entry.bytes;
        self.used.fetch_add(bytes, Plain::Relaxed);
        for victims in 0.. {
            if self.used().saturating_sub(replaced) <= self.limit {
                return true;
            }
            self.frequency.start();
            if victims == VICTIMS_MAX || !self.make_room(entry.key, uses, random(), guard) {
                break;
            }
        }
        self.used.fetch_sub(bytes, Plain::Relaxed);
        false
    }

    /// Takes out the least used of a few entries with other keys, if it is used less.
    fn make_room(&self, key: PageId, uses: u8, random: u64, guard: &Pinned<'_>) -> bool {
        let first = random as usize % self.buckets.len();
        let buckets = self.buckets.iter().cycle().skip(first).take(SAMPLE_BUCKETS.min(self.buckets.len()));
        // SAFETY: as in `take_out`.
        let entry = |place: &Atomic<Entry<V>>| unsafe { place.load(Ordering::Acquire, guard).as_ref() };
        let other = |place| entry(place).filter(|entry| entry.key != key).map(|entry| (place, entry));
        let found = buckets.flatten().filter_map(other).take(SAMPLE);
        let rank = |&(_, entry): &(_, &Entry<V>)| self.frequency.of(&entry.uses);
        let Some((place, victim)) = found.min_by_key(rank).filter(|found| rank(found) <= uses) else { return false };
        self.drop_entry(place, victim, guard);
        true
    }

    fn drop_entry(&self, place: &Atomic<Entry<V>>, victim: &Entry<V>, guard: &Pinned<'_>) {
        self.frequency.remember(victim.key, self.frequency.of(&victim.uses));
        if self.take_out(place, Shared::from(std::ptr::from_ref(victim)), Shared::null(), guard) {
            guard.counters.update(|it| ValueCounters { evictions: it.evictions + 1, ..it });
        }
    }

    fn put(&self, entry: Entry<V>, random: &mut impl FnMut() -> u64, guard: &Pinned<'_>) -> bool {
        let (key, bytes) = (entry.key, entry.bytes);
        // Nothing goes for what can never fit.
        if bytes > self.limit.saturating_sub(self.fixed) {
            return false;
        }
        let (mut found, mut free, mut least) = (None, None, None);
        for place in self.bucket(key) {
            let old = place.load(Ordering::Acquire, guard);
            // SAFETY: as in `take_out`.
            match unsafe { old.as_ref() } {
                None => free = free.or(Some((place, old))),
                Some(it) if it.key == key => found = found.or(Some((place, old, it))),
                Some(it) => {
                    let uses = self.frequency.of(&it.uses);
                    if least.is_none_or(|(_, _, least)| uses < least) {
                        least = Some((place, it, uses));
                    }
                }
            }
        }
        // Where values are small, places run out before bytes do.
        if found.is_none() && free.is_none() {
            self.frequency.start();
        }
        let uses = match found {
            Some((_, _, old)) => self.frequency.of(&old.uses),
            None => self.frequency.miss(key, random() as u32),
        };
        let (place, old) = match (found, free, least) {
            (Some((place, old, _)), ..) | (None, Some((place, old)), _) => (place, old),
            (None, None, Some((place, victim, used))) if used <= uses => {
                self.drop_entry(place, victim, guard);
                (place, Shared::null())
            }
            _ => return false,
        };
        let replaced = found.map_or(0, |(_, _, old)| old.bytes);
        if !self.take_bytes(&entry, replaced, uses, random, guard) {
            return false;
        }
        self.frequency.set(&entry.uses, uses);
        let new = Owned::new(entry).into_shared(guard);
        let is_in = self.take_out(place, old, new, guard);
        if !is_in {
            self.used.fetch_sub(bytes, Plain::Relaxed);
            // SAFETY: it is in no place.
            drop(unsafe { new.into_owned() });
        }
        if is_in && found.is_none() && !is_left_out(Step::OnePlace) {
            self.drop_others(key, new, guard);
        }
        is_in
    }

    /// Takes out what other threads have put under the key of a new entry meanwhile, into other places. Of two that do so at the same
    /// time one at least sees the other's.
    fn drop_others(&self, key: PageId, new: Shared<'_, Entry<V>>, guard: &Pinned<'_>) {
        fence(Ordering::SeqCst);
        for place in self.bucket(key) {
            loop {
                let other = place.load(Ordering::Acquire, guard);
                // SAFETY: as in `take_out`.
                let is_of_key = other != new && unsafe { other.as_ref() }.is_some_and(|entry| entry.key == key);
                // If not, somebody has put another one there, perhaps of this key again.
                if !is_of_key || self.take_out(place, other, Shared::null(), guard) {
                    break;
                }
            }
        }
    }

    fn get(&self, key: PageId, random: u32, guard: &Guard) -> Option<(u64, u64, V)> {
        let find = || {
            self.bucket(key).iter().find_map(|place| {
                // SAFETY: as in `take_out`.
                unsafe { place.load(Ordering::Acquire, guard).as_ref() }.filter(|entry| entry.key == key)
            })
        };
        let entry = find()?;
        if self.frequency.is_counting() {
            self.frequency.touch(&entry.uses, random);
        }
        let of_value = if is_left_out(Step::OneEntry) { find()? } else { entry };
        Some((entry.version, entry.age, of_value.value.clone()))
    }
}

impl<V> ValueCache<V> {
    /// The bytes that it may use.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// The bytes that it uses.
    pub fn used(&self) -> usize {
        self.used.load(Plain::Relaxed)
    }

    /// The counts of handles that have been dropped.
    pub fn counters(&self) -> ValueCounters {
        let of = |count: &AtomicUsize| count.load(Plain::Relaxed) as u64;
        ValueCounters { hits: of(&self.hits), misses: of(&self.misses), evictions: of(&self.evictions) }
    }
}

impl<V> Drop for ValueCache<V> {
    fn drop(&mut self) {
        for place in self.buckets.iter().flatten() {
            // SAFETY: no handle is left, so nobody else is here; an entry is in one place.
            drop(unsafe { place.load(Ordering::Relaxed, crossbeam_epoch::unprotected()).try_into_owned() });
        }
    }
}

impl<V: Clone + Send + Sync + 'static> ValueHandle<V> {
    /// What was last put under a key and is still there: its version, the age in which it was put, and a copy of the value.
    ///
    /// # Panics
    /// If the key is 0 or uses its top bit.
    pub fn get(&self, key: u64) -> Option<(u64, u64, V)> {
        let found = self.cache.get(id(key), self.random() as u32, &self.local.pin());
        let mut counters = self.counters.get();
        *(if found.is_some() { &mut counters.hits } else { &mut counters.misses }) += 1;
        self.counters.set(counters);
        self.uses.set(self.uses.get() + 1);
        if self.uses.get() >= USES_PER_TICK {
            self.cache.frequency.tick(self.uses.replace(0));
        }
        found
    }

    /// Puts a value under a key, in place of another, if there is room for its bytes or it is used more than what would go; whether
    /// it was put. Of two threads that put at the same time one may put in vain; if they put under one key, both may.
    ///
    /// # Panics
    /// If the key is 0 or uses its top bit.
    pub fn put(&self, key: u64, (version, age): (u64, u64), value: V, bytes: usize) -> bool {
        let bytes = bytes.saturating_add(size_of::<Entry<V>>());
        let entry = Entry { key: id(key), version, age, bytes, uses: AtomicU32::new(0), value };
        let guard = Pinned { guard: self.local.pin(), deferred: &self.deferred, counters: &self.counters };
        self.cache.put(entry, &mut || self.random(), &guard)
    }

    fn random(&self) -> u64 {
        self.random.set(self.random.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        mix(self.random.get())
    }
}

impl<V> ValueHandle<V> {
    /// What it is a way to.
    pub fn cache(&self) -> &Arc<ValueCache<V>> {
        &self.cache
    }

    /// Its counts.
    pub fn counters(&self) -> ValueCounters {
        self.counters.get()
    }
}

impl<V> Drop for ValueHandle<V> {
    fn drop(&mut self) {
        let ValueCounters { hits, misses, evictions } = self.counters.get();
        self.cache.hits.fetch_add(hits as usize, Plain::Relaxed);
        self.cache.misses.fetch_add(misses as usize, Plain::Relaxed);
        self.cache.evictions.fetch_add(evictions as usize, Plain::Relaxed);
    }
}

fn id(key: u64) -> PageId {
    PageId::new(key).expect("a key is from 1 to 2^63 - 1")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn value(key: u64, version: u64) -> Arc<[u64; 2]> {
        Arc::new([key, version])
    }

    #[test]
    fn it_stays_within_its_bytes_and_keeps_what_is_used() {
        let cache = ValueCache::new(64 << 10);
        let (handle, mut put) = (cache.handle(1), 0);
        for round in 0..200 {
            for key in 1..=16u64 {
                if handle.get(key).is_none() {
                    put += u64::from(handle.put(key, (round, 0), value(key, round), 500));
                }
            }
            for key in 0..50 {
                let key = 1000 + round * 50 + key;
                put += u64::from(handle.put(key, (round, 0), value(key, round), 500));
                assert!(cache.used() <= cache.limit(), "{} bytes", cache.used());
            }
        }
        let kept = (1..=16).filter(|&key| handle.get(key).is_some()).count();
        assert!(kept >= 14, "{kept} of 16 keys that are used again and again are there");
        assert!(handle.get(1000).is_none(), "one that was used once is there after thousands");
        let there = (1..20_000).filter(|&key| handle.get(key).is_some()).count() as u64;
        assert!(there > 0 && handle.counters().evictions == put - there, "{put} were put, and {there} are there");
    }

    #[test]
    fn a_value_is_replaced_with_its_version() {
        let cache = ValueCache::new(16 << 10);
        let before = cache.used();
        let handle = cache.handle(1);
        for version in 0..100 {
            assert!(handle.put(7, (version, version / 2), value(7, version), 100));
            let (found, age, held) = handle.get(7).unwrap();
            assert_eq!((found, age, held[1]), (version, version / 2, version));
        }
        assert_eq!(cache.used(), before + 100 + size_of::<Entry<Arc<[u64; 2]>>>());
        assert!(!handle.put(8, (0, 0), value(8, 0), 1 << 20), "it is larger than all there is");
        let counted = handle.counters();
        drop(handle);
        assert_eq!((cache.counters(), counted), (counted, ValueCounters { hits: 100, misses: 0, evictions: 0 }));
    }

    #[test]
    fn a_value_does_not_go_for_the_one_that_replaces_it() {
        let cache = ValueCache::new(16 << 10);
        let handle = cache.handle(1);
        for (version, bytes) in [(1, 9000), (2, 10_000), (3, 9000)] {
            assert!(handle.put(7, (version, 0), value(7, version), bytes), "{version}");
            assert!(cache.used() <= cache.limit());
        }
        assert!(!handle.put(7, (4, 0), value(7, 4), 20_000));
        assert_eq!(handle.get(7).unwrap().0, 3);
    }

    #[test]
    fn what_can_never_fit_throws_nothing_out() {
        let cache = ValueCache::new(16 << 10);
        let handle = cache.handle(1);
        for key in 1..=8 {
            assert!(handle.put(key, (0, 0), value(key, 0), 500));
        }
        for bytes in [cache.limit(), cache.limit() + 1, usize::MAX] {
            for _ in 0..20 {
                assert!(!handle.put(99, (0, 0), value(99, 0), bytes), "{bytes}");
            }
        }
        assert!((1..=8).all(|key| handle.get(key).is_some()));
    }

    #[test]
    fn what_a_handle_has_replaced_is_freed_while_it_rests() {
        let cache = ValueCache::new(1 << 20);
        let [resting, other] = [1, 2].map(|seed| cache.handle(seed));
        let count = Arc::new(());
        for version in 0..60 {
            assert!(resting.put(7, (version, 0), Arc::clone(&count), 8 << 10));
        }
        for _ in 0..1000 {
            other.get(7);
        }
        let kept = Arc::strong_count(&count) - 1;
        assert!(kept <= 3, "{kept} values of a key are there");
    }

    #[test]
    fn threads_meet_whole_entries() {
        let cache = ValueCache::new(32 << 10);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let cache = &cache;
                scope.spawn(move || {
                    let handle = cache.handle(thread);
                    for turn in 0..if cfg!(miri) { 50 } else { 20_000 } {
                        let key = 1 + mix(turn ^ thread) % 40;
                        let version = turn * 4 + thread;
                        handle.put(key, (version, 0), value(key, version), 300 + key as usize);
                        if let Some((version, _, held)) = handle.get(1 + mix(turn) % 40) {
                            assert_eq!(held[1], version);
                        }
                    }
                });
            }
        });
        let entries: usize = cache.buckets.iter().flatten().count();
        assert!(entries > 0 && cache.used() <= cache.limit());
    }
}
