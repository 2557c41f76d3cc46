//! Ordered maps, measured: keys from a formula or a file, mixes of operations, traces.
//!
//! `keys.rs` says which keys there are and chooses among them, `workload.rs` which mixes, `stream.rs` draws what a worker will
//! do before the clock starts, `source.rs` issues it, `request.rs` runs it and checks the answers. `trace.rs` reads operations
//! from text.

pub(crate) mod keys;
mod keysfile;
mod request;
mod source;
pub(crate) mod stream;
mod trace;
pub(crate) mod workload;

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use farlink_offload::ShardKey;
use farlink_runtime::access::Access;
use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::btree::Tree;
use farlink_structures::map::{KeyRange, Map, OrderedMap};
use farlink_structures::{bwtree::Bw, skiplist::List};

use self::keys::{KeySpace, mix, value_for};
pub use self::request::MapRequest;
pub(crate) use self::request::execute;
pub use self::source::MapSource;
use self::stream::{Draw, Source};
use self::workload::Mix;
use crate::subject::{AccessMode, Answer, GoOn, InsertOrder, Job, Outcomes, Setting, Subject, WorkerId};
use crate::units::plural;

/// About how many keys are looked for in a map that an earlier run has loaded.
const PROBES: u64 = 1000;

/// Salts, so that the load and the halves of a round each have an order of their own.
const LOAD_SALT: u64 = 1;
const REMOVE_SALT: u64 = 2;
const INSERT_SALT: u64 = 3;

/// An ordered map that can be measured. Nothing need be said of one that has no bulk load.
#[allow(async_fn_in_trait, reason = "operations run on one thread; their futures need not be Send")]
pub trait MapSubject: OrderedMap {
    /// Whether [`MapSubject::bulk_load`] is faster than inserts by all workers.
    const BULK_LOADS: bool = false;

    /// Why it is not to be reached in this way, if it is not.
    fn refuses(mode: AccessMode) -> Option<&'static str> {
        let why = "it has no words that are swapped, so nothing of it would be cached; use cached-inner";
        mode.is_of_words().then_some(why)
    }

    /// Loads entries in ascending key order into the empty map, with this share of each page filled; how many. Without a bulk
    /// load of its own it inserts them one by one.
    ///
    /// # Errors
    /// As those of [`Map`].
    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl Iterator<Item = (u64, u64)>,
        _fill: f64,
    ) -> Result<u64, Error> {
        let mut count = 0;
        for (key, value) in entries {
            count += u64::from(map.insert(key, value).await?);
        }
        Ok(count)
    }
}

impl MapSubject for Tree {
    const BULK_LOADS: bool = true;

    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl Iterator<Item = (u64, u64)>,
        fill: f64,
    ) -> Result<u64, Error> {
        map.bulk_load(entries, fill).await
    }
}

impl MapSubject for List {
    fn refuses(mode: AccessMode) -> Option<&'static str> {
        match mode {
            AccessMode::Engine => {
                Some("its nodes do not tell what is below a link, so no operation could be shipped; use cached")
            }
            AccessMode::CachedMapping => Some("it has no words that are swapped, so nothing of it would be cached"),
            _ => None,
        }
    }
}

impl MapSubject for Bw {
    const BULK_LOADS: bool = true;

    fn refuses(mode: AccessMode) -> Option<&'static str> {
        let why = "words of its mapping table are swapped, which others could not see in an owner's cache; use cached-mapping";
        mode.owns().then_some(why)
    }

    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        map: &Map<Self, A>,
        entries: impl Iterator<Item = (u64, u64)>,
        fill: f64,
    ) -> Result<u64, Error> {
        map.bulk_load(entries, fill).await
    }
}

/// The keys of a run.
#[derive(Debug)]
pub struct MapData {
    pub(crate) keys: KeySpace,
    setting: Setting,
    duplicates_dropped: u64,
    /// The version of the values that are loaded; those of all others begin from it.
    first_version: u32,
}

impl MapData {
    pub(crate) fn first_value(&self, key: u64) -> u64 {
        value_for(key, self.first_version)
    }
}

impl<S: MapSubject> Subject for S {
    type Data = MapData;
    type Request = MapRequest;
    type Source = MapSource;

    const WORKLOADS: &'static [&'static str] = workload::NAMES;
    /// Those of YCSB.
    const WORKLOADS_USUAL: usize = 6;
    const BULK_LOADS: bool = <S as MapSubject>::BULK_LOADS;
    const HAS_ROUNDS: bool = true;
    const HAS_DISTRIBUTION: bool = true;

    fn refuses(mode: AccessMode) -> Option<&'static str> {
        <S as MapSubject>::refuses(mode)
    }

    fn data(setting: &Setting) -> anyhow::Result<MapData> {
        let (keys, duplicates_dropped) = match &setting.keys_file {
            None => (KeySpace::scrambled(setting.entries, setting.seed)?, 0),
            Some(file) => {
                let keys = keysfile::read(file)?;
                (KeySpace::from_sorted(keys.sorted, setting.seed)?, keys.duplicates_dropped)
            }
        };
        ensure!(setting.rects_file.is_none(), "a {} has keys and no rectangles: leave out --rects-file", S::NAME);
        ensure!(
            setting.insert_order == InsertOrder::Random,
            "a {} is loaded in random order: leave out --insert-order",
            S::NAME
        );
        ensure!(setting.scan_length > 0, "--scan-length must be at least 1");
        if let Some(theta) = setting.distribution.theta() {
            keys::zipf(keys.loaded(), theta)?;
        }
        let first_version = mix(setting.seed) as u32;
        Ok(MapData { keys: keys.for_run(setting.run), setting: setting.clone(), duplicates_dropped, first_version })
    }

    fn entries(data: &MapData) -> u64 {
        data.keys.loaded()
    }

    fn remark(data: &MapData) -> Option<String> {
        let dropped = data.duplicates_dropped;
        (dropped > 0).then(|| format!("{} dropped, {} left", plural(dropped, "duplicate key"), data.keys.loaded()))
    }

    fn require_workload(name: &str) -> anyhow::Result<()> {
        Mix::named(name).map(drop)
    }

    fn removes(workload: &str) -> bool {
        Mix::named(workload).is_ok_and(|mix| mix.shares.remove > 0)
    }

    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        access: &A,
        data: &MapData,
        (cut, part): (&ShardKey<KeyRange>, usize),
        fill: f64,
    ) -> Result<u64, Error> {
        let sorted = data.keys.sorted();
        let is_here = |key: &u64| cut.parts() == 1 || cut.about(&KeyRange::only(*key)) == [part];
        let entries = sorted.iter().copied().filter(is_here).map(|key| (key, data.first_value(key)));
        <S as MapSubject>::bulk_load(&Map::over(access.clone()), entries, fill).await
    }

    /// Ranges with about the same number of keys.
    fn divide(data: &MapData, servers: usize) -> ShardKey<KeyRange> {
        let sorted = data.keys.sorted();
        let mut lows: Vec<u64> = (1..servers).map(|server| sorted[server * sorted.len() / servers]).collect();
        // With fewer keys than servers some have none.
        lows.dedup();
        lows.retain(|&low| low > 0);
        ShardKey::Regions(KeyRange::cut_at(&lows))
    }

    fn parse_region(text: &str) -> anyhow::Result<KeyRange> {
        let (low, high) = text.split_once("..").with_context(|| format!("`{text}` is no range of keys, as 5..9 is"))?;
        let key = |text: &str| text.parse::<u64>().with_context(|| format!("`{text}` is no key"));
        let low = if low.is_empty() { 0 } else { key(low)? };
        let high = if high.is_empty() { None } else { Some(key(high)?) };
        ensure!(high.is_none_or(|high| low < high), "no key lies in {text}");
        Ok(KeyRange { low, high })
    }

    fn show_region(KeyRange { low, high }: &KeyRange) -> String {
        format!("{low}..{}", high.map_or_else(String::new, |high| high.to_string()))
    }

    async fn outside<R: Run<Plugin = Self>>(
        run: &R,
        &KeyRange { low, high }: &KeyRange,
    ) -> Result<Option<String>, Error> {
        let around = [low.checked_sub(1).map(|last| (0, last)), high.map(|high| (high, u64::MAX))];
        for (low, high) in around.into_iter().flatten() {
            if let Some(key) = request::first(run, low, high).await? {
                return Ok(Some(format!("key {key}")));
            }
        }
        Ok(None)
    }

    async fn require_loaded<R: Run<Plugin = Self>>(run: &R, data: &MapData) -> anyhow::Result<()> {
        let loaded = data.keys.loaded();
        // From the last one down: it is missing if fewer were loaded.
        for number in (0..loaded).rev().step_by((loaded / PROBES).max(1) as usize) {
            let key = data.keys.loaded_key(number);
            ensure!(
                request::holds(run, key).await?,
                "it is not empty and lacks key {key}, one of the {loaded} to run on; give the keys and the --seed that it was \
                 loaded with, or another --name"
            );
        }
        Ok(())
    }

    fn source(data: &Arc<MapData>, worker: WorkerId) -> MapSource {
        MapSource::new(data, worker)
    }

    fn prepare(source: &mut MapSource, job: Job<'_>, go_on: GoOn<'_>) -> anyhow::Result<()> {
        let (data, worker) = (Arc::clone(&source.data), source.worker);
        let (keys, seed) = (&data.keys, data.setting.seed);
        let every_key = |salt: u64, round: u32, what| {
            let seed = seed ^ mix(salt) ^ mix(u64::from(round) << 8);
            stream::every_key(keys, seed, worker, what, go_on)
        };
        (source.issued, source.repeats) = (0, matches!(job, Job::Workload { .. }));
        source.stream = match job {
            Job::Load => every_key(LOAD_SALT, 0, Draw::Insert)?,
            Job::RemoveAll { round } => every_key(REMOVE_SALT, round, Draw::Remove)?,
            Job::InsertAll { round } => every_key(INSERT_SALT, round, Draw::Insert)?,
            Job::Workload { name, operations } => {
                let (distribution, scan_length) = (data.setting.distribution, data.setting.scan_length);
                let length = stream::length_for(operations, keys, worker);
                let source = Source { keys, distribution, seed, pass: source.next_pass(), scan_length };
                stream::draw(&Mix::named(name)?, source, worker, length, go_on)?
            }
        };
        Ok(())
    }

    async fn run<R: Run<Plugin = Self>>(run: &R, request: MapRequest) -> Result<Outcomes, Error> {
        execute(run, request).await
    }

    fn parse(line: &str) -> anyhow::Result<MapRequest> {
        trace::parse_line(line)
    }

    async fn answer<R: Run<Plugin = Self>>(run: &R, request: MapRequest) -> Result<Answer, Error> {
        request::answer(run, request).await
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn setting(entries: u64) -> Setting {
        Setting { scan_length: 10, ..Setting::of_entries(entries) }
    }

    pub(crate) fn data_of(keys: KeySpace) -> MapData {
        MapData { setting: setting(keys.loaded()), keys, duplicates_dropped: 0, first_version: 0 }
    }

    #[test]
    fn every_job_has_its_own_order_and_its_length() {
        let data = Arc::new(Tree::data(&setting(1000)).unwrap());
        let mut source = Tree::source(&data, WorkerId { index: 0, total: 6 });
        let mut drawn = |job| {
            Tree::prepare(&mut source, job, &|| Ok(())).unwrap();
            source.stream.clone()
        };
        let load = drawn(Job::Load);
        assert_eq!(load.len(), 167);
        let (again, later) = (drawn(Job::InsertAll { round: 1 }), drawn(Job::InsertAll { round: 2 }));
        assert!(load != again && again != later);
        assert_eq!(drawn(Job::Workload { name: "a", operations: Some(2) }).len(), 2);
        assert!(Tree::prepare(&mut source, Job::Workload { name: "z", operations: None }, &|| Ok(())).is_err());
    }

    #[test]
    fn the_seed_decides_keys_and_values() {
        let entries = |seed| {
            let data = Tree::data(&Setting { seed, ..setting(100) }).unwrap();
            data.keys.sorted().iter().map(|&key| (key, data.first_value(key))).collect::<Vec<_>>()
        };
        assert_eq!(entries(1), entries(1));
        assert!(entries(1).iter().zip(entries(2)).all(|(a, b)| a.0 != b.0 && a.1 as u32 != b.1 as u32));
    }

    #[test]
    fn parts_have_about_as_many_keys() {
        let data = data_of(KeySpace::from_sorted(vec![1, 5, 6, 7, 100, 200], 1).unwrap());
        let lows = |cut| match cut {
            ShardKey::Regions(regions) => regions.iter().map(|region: &KeyRange| region.low).collect::<Vec<_>>(),
            ShardKey::Hash(_) => panic!("by ranges"),
        };
        assert_eq!(lows(Tree::divide(&data, 3)), [0, 6, 100]);
        let few = data_of(KeySpace::from_sorted(vec![0, 9], 1).unwrap());
        assert_eq!(lows(Tree::divide(&few, 4)), [0, 9]);
    }
}
