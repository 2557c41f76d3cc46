//! Runs of figures on one tree: who reaches it how, through which cache, and what they do.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use farlink_offload::{Admission, CacheOptions, Policies};
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::Proof;
use farlink_runtime::structure::{PlacementPolicy, Structure};
use farlink_structures::btree::{BTreeOptions, KeyRange, Tree};

use super::key_set::{ENTRIES_PER_PAGE, FILL, FigureMix, KeySet, PAGE_BYTES};
use super::load::{Load, Lot};
use super::optimum::{Misses, Shape};
use super::rows::{CacheSize, described, with_cache};
use super::test_bed::TestBed;
use crate::plan::AdmissionChoice;
use crate::report::{Reporter, Row};
use crate::route::Route;
use crate::subject::AccessMode;

const NAME: &str = "figure";
/// Operations are shipped from this level down, as in DEX.
const SUBTREE_LEVEL: u8 = 2;

/// Which missed pages a cache takes in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Admit {
    As(AdmissionChoice),
    /// With these probabilities, in the place of a random victim: DEX with others than its own.
    With {
        leaf: f64,
        inner: f64,
    },
}

impl Admit {
    fn name(self) -> String {
        match self {
            Self::As(choice) => choice.name().to_owned(),
            Self::With { leaf, inner } => format!("probability {leaf}, {inner}"),
        }
    }

    fn options(self, bytes: usize) -> CacheOptions {
        match self {
            Self::As(choice) => choice.options(bytes),
            Self::With { leaf, inner } => {
                let mut options = CacheOptions::dex(bytes);
                options.admission = Admission::Probability { leaf, inner };
                options
            }
        }
    }
}

/// How compute servers reach the tree.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) mode: AccessMode,
    /// Where there is a cache.
    pub(crate) admit: Admit,
    /// With an engine.
    pub(crate) policies: fn() -> Policies,
}

impl Way {
    /// Where nothing is shipped.
    pub(crate) fn new(name: &'static str, mode: AccessMode, admit: Admit) -> Self {
        Self { name, mode, admit, policies: Policies::default }
    }

    /// With an engine, and this policy.
    pub(crate) fn shipping(name: &'static str, admit: Admit, policies: fn() -> Policies) -> Self {
        Self { name, mode: AccessMode::Engine, admit, policies }
    }
}

/// A test bed with the tree of all keys.
#[derive(Debug)]
pub(crate) struct Loaded {
    bed: TestBed,
    tree: Structure,
    keys: u64,
    /// Beyond those.
    inserted: AtomicU64,
    memory_servers: u64,
}

/// One run on it.
#[derive(Debug, Clone)]
pub(crate) struct Trial<'a> {
    pub(crate) key_set: &'a Arc<KeySet>,
    pub(crate) way: Way,
    pub(crate) cache: CacheSize,
    pub(crate) mix: FigureMix,
    /// Over all compute servers.
    pub(crate) warm_up_ops: u64,
    pub(crate) ops: u64,
    pub(crate) seed: u64,
    /// Of each compute server.
    pub(crate) in_flight: u32,
    /// The number of the run on its tree: no two write the same values, for that would change nothing.
    pub(crate) run: u32,
}

pub(crate) fn shape(keys: u64) -> Shape {
    Shape::bulk_loaded(keys, ENTRIES_PER_PAGE)
}

impl Loaded {
    /// With room for so many more keys.
    pub(crate) fn load(key_set: &KeySet, memory_servers: u64, more: u64) -> anyhow::Result<Self> {
        // A page that has split is half full at least.
        let more_pages = more * 2 / ENTRIES_PER_PAGE * 11 / 10;
        let tree_bytes = (shape(key_set.keys).pages() + more_pages) * PAGE_BYTES / memory_servers * 11 / 10;
        let bed = TestBed::start(usize::try_from(memory_servers)?, tree_bytes, MemOptions::default())?;
        let placement = PlacementPolicy::Subtrees { level: SUBTREE_LEVEL };
        let options = BTreeOptions { page_bytes: PAGE_BYTES as usize, placement, ..BTreeOptions::default() };
        let tree = bed.load(NAME, options, key_set.entries(), FILL)?;
        Ok(Self { bed, tree, keys: key_set.keys, inserted: AtomicU64::new(0), memory_servers })
    }

    pub(crate) fn check<W: Write>(&self, reporter: &mut Reporter<W>) -> anyhow::Result<()> {
        let keys = self.keys + self.inserted.load(Ordering::Relaxed);
        Ok(reporter.check(&self.bed.check(&[NAME.to_owned()], keys)?)?)
    }

    /// Runs a trial. Each begins with an empty cache, warmed up by the mix itself; if that inserts, by lookups.
    pub(crate) fn run(&self, trial: &Trial<'_>) -> anyhow::Result<Row> {
        let Trial { key_set, way, cache, mix, warm_up_ops, ops, seed, in_flight, run } = *trial;
        let Way { name, mode, admit, policies } = way;
        let ships = mode == AccessMode::Engine;
        let _serving = if ships { Some(self.bed.serve_at_once(seed)?) } else { None };
        let route = |server: usize| {
            let route = Route::<Tree>::new(mode, self.tree.clone(), Proof::Checksum);
            if !mode.caches() {
                return Ok(route);
            }
            let (low, owned) = (key_set.owned(server).start, key_set.owned(server).end);
            let high = (owned < key_set.keys).then(|| KeySet::key(owned));
            let mut options = admit.options(usize::try_from(cache.cache_bytes)?);
            (options.handles_max, options.excludes_subtrees) = (4, ships);
            let route = route.through(options, KeyRange { low: KeySet::key(low), high })?;
            Ok(if ships { route.shipping(policies) } else { route })
        };
        let load = Load {
            compute_servers: key_set.servers(),
            workers: 1,
            in_flight,
            route: &route,
            operations: &|Lot { server, is_warm_up, .. }| {
                let (draws, other) = if is_warm_up { (warm_up_ops, 1) } else { (ops, 0) };
                let (seed, version) = (seed.wrapping_add(other << 32), run << 27 | (other as u32) << 26);
                // What one run has inserted is no insert of the next.
                let seed = if mix.insert_percent > 0 { seed.wrapping_add(u64::from(run) << 33) } else { seed };
                let mix = if is_warm_up { FigureMix { insert_percent: 0, ..mix } } else { mix };
                Box::new(key_set.operations(server, draws, mix, seed, version))
            },
            limits: [None; 2],
            on_one_core: false,
            seed,
        };
        let (row, tally) = load.run(&self.bed, name)?;
        self.inserted.fetch_add(tally.outcomes.inserted, Ordering::Relaxed);
        let row = described(row, "measured", mode.name(), mix.name)
            .with("warm_up_ops", warm_up_ops)
            .with("in_flight", in_flight)
            .with("admission", mode.caches().then(|| admit.name()));
        Ok(self.setting(with_cache(row, mode.caches().then_some(cache)), key_set, Some(seed)))
    }

    /// The row of the best contents of a cache of this size.
    pub(crate) fn optimum(&self, misses: &Misses, mix: FigureMix, key_set: &KeySet, cache: CacheSize) -> Row {
        let row = Row {
            name: "static optimum".to_owned(),
            reads_per_op: Some(misses.reads_per_op),
            bytes_per_op: (mix.update_percent == 0).then_some(misses.reads_per_op * PAGE_BYTES as f64),
            hit_ratio: Some(misses.hit_ratio()),
            leaf_misses_per_op: misses.by_level.first().copied(),
            inner_misses_per_op: Some(misses.by_level.iter().skip(1).sum()),
            misses_by_level: Some(misses.by_level.clone()),
            ..Row::default()
        };
        let row = with_cache(described(row, "computed", "cached", mix.name), Some(cache));
        against(self.setting(row, key_set, None), misses)
    }

    fn setting(&self, row: Row, key_set: &KeySet, seed: Option<u64>) -> Row {
        row.with("keys", key_set.keys)
            .with("compute_servers", key_set.servers())
            .with("memory_servers", self.memory_servers)
            .with("theta", key_set.theta)
            .with("page_bytes", PAGE_BYTES)
            .with("seed", seed)
    }
}

/// The row with its leaf misses compared with the least.
pub(crate) fn against(row: Row, least: &Misses) -> Row {
    let least = least.by_level.first().copied().filter(|misses| *misses > 0.0);
    let over = row.leaf_misses_per_op.zip(least).map(|(leaf, least)| leaf / least);
    row.with("leaf_misses_over_optimum", over)
}
