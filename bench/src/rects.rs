//! The R-tree, measured: Catfish's data and workloads (Xiao et al., ICDCS 2019, section V).
//!
//! Rectangles at uniform places of the unit square, with edges of up to 1e-4. Searches for windows with edges of up to a
//! *scale*; inserts with power-law places near the four corners.

use std::{fmt, sync::Arc};

use anyhow::ensure;
use farlink_offload::ShardKey;
use farlink_runtime::access::Access;
use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::rtree::ops::{Delete, Find, Insert};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Tree};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::subject::{GoOn, Job, Outcomes, Setting, Subject, WorkerId};

/// Edges of what is loaded.
const EDGE_MAX: f64 = 1e-4;
/// The least and the greatest edge of windows whose edges follow a power law.
const SCALES: (f64, f64) = (1e-5, 1e-2);
/// Its exponent: t to the power of -0.99.
const POWER: f64 = 0.99;
/// Entries looked for in a tree that an earlier run has loaded.
const PROBES: usize = 1000;

/// An operation.
#[derive(Debug, Clone, Copy)]
pub enum RectRequest {
    /// Adds an entry.
    Insert(Entry),
    /// Removes a loaded one.
    Delete(Entry),
    /// Searches a window.
    Search(Rect),
    /// Searches for a loaded entry.
    Point(Entry),
}

/// What is loaded.
#[derive(Debug)]
pub struct RectData {
    setting: Setting,
    entries: Vec<Entry>,
}

type Requests = Box<dyn Iterator<Item = RectRequest>>;

/// One worker's operations.
pub struct RectSource {
    data: Arc<RectData>,
    worker: WorkerId,
    requests: Requests,
}

impl fmt::Debug for RectSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RectSource({:?})", self.worker)
    }
}

impl Iterator for RectSource {
    type Item = RectRequest;

    fn next(&mut self) -> Option<RectRequest> {
        self.requests.next()
    }
}

/// From the least to the greatest, as a power law has it.
fn power(rng: &mut SmallRng, (least, greatest): (f64, f64)) -> f64 {
    let of = |at: f64| at.powf(1.0 - POWER);
    let at: f64 = rng.random_range(0.0..1.0);
    (of(least) + at * (of(greatest) - of(least))).powf(1.0 / (1.0 - POWER)).clamp(least, greatest)
}

/// With edges of up to this, anywhere.
fn anywhere(rng: &mut SmallRng, edge: f64) -> Rect {
    let low: [f64; 2] = std::array::from_fn(|_| rng.random_range(0.0..1.0 - edge));
    let high = low.map(|low| low + rng.random_range(0.0..=edge));
    Rect::new(low, high).expect("finite corners in order")
}

/// Near one of the four corners of the unit square.
fn near_a_corner(rng: &mut SmallRng) -> Rect {
    let low: [f64; 2] = std::array::from_fn(|_| {
        let at = power(rng, (0.5, 1.0 - EDGE_MAX));
        if rng.random() { at } else { 1.0 - EDGE_MAX - at }
    });
    let high = low.map(|low| low + rng.random_range(0.0..=EDGE_MAX));
    Rect::new(low, high).expect("finite corners in order")
}

impl RectSource {
    /// The operations of a workload, without end.
    fn workload(&self, name: &str, mut rng: SmallRng) -> Requests {
        let (data, worker) = (Arc::clone(&self.data), self.worker);
        // Payloads of what is inserted are no loaded entry's, and differ from run to run.
        let mut payload = (u64::from(data.setting.run) + 1) << 40 | worker.index << 24;
        let name = name.to_owned();
        Box::new(std::iter::from_fn(move || {
            let inserts = name == "mixed" && rng.random_ratio(1, 10);
            if inserts {
                payload += 1;
                return Some(RectRequest::Insert((near_a_corner(&mut rng), payload)));
            }
            if name == "point" && !data.entries.is_empty() {
                return Some(RectRequest::Point(data.entries[rng.random_range(0..data.entries.len())]));
            }
            let scale = match name.as_str() {
                "search-large" => SCALES.1,
                "search-power" => power(&mut rng, SCALES),
                _ => SCALES.0,
            };
            Some(RectRequest::Search(anywhere(&mut rng, scale)))
        }))
    }
}

impl Subject for Tree {
    type Data = RectData;
    type Request = RectRequest;
    type Source = RectSource;

    /// Searches at the scales 1e-5 and 1e-2, and with a power law between them; nine searches to an insert; loaded entries.
    const WORKLOADS: &'static [&'static str] = &["search-small", "search-large", "search-power", "mixed", "point"];
    const WORKLOADS_USUAL: usize = 5;
    const BULK_LOADS: bool = true;
    const HAS_ROUNDS: bool = true;

    fn data(setting: &Setting) -> anyhow::Result<RectData> {
        ensure!(setting.keys_file.is_none(), "an R-tree has no keys: leave out --keys-file");
        let mut rng = SmallRng::seed_from_u64(setting.seed);
        let entries = (0..setting.entries).map(|number| (anywhere(&mut rng, EDGE_MAX), number)).collect();
        Ok(RectData { setting: setting.clone(), entries })
    }

    fn entries(data: &RectData) -> u64 {
        data.entries.len() as u64
    }

    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        access: &A,
        data: &RectData,
        _part: (&ShardKey<Rect>, usize),
        fill: f64,
    ) -> Result<u64, Error> {
        RTree::over(access.clone()).bulk_load(data.entries.iter().copied(), fill).await
    }

    async fn require_loaded<R: Run<Plugin = Self>>(run: &R, data: &RectData) -> anyhow::Result<()> {
        for entry in data.entries.iter().rev().step_by((data.entries.len() / PROBES).max(1)) {
            ensure!(
                finds(run, *entry).await?,
                "it is not empty and lacks rectangle {} of the {} to run on; give the --seed that it was loaded with, or \
                 another --name",
                entry.1,
                data.entries.len()
            );
        }
        Ok(())
    }

    fn source(data: &Arc<RectData>, worker: WorkerId) -> RectSource {
        RectSource { data: Arc::clone(data), worker, requests: Box::new(std::iter::empty()) }
    }

    fn prepare(source: &mut RectSource, job: Job<'_>, _go_on: GoOn<'_>) -> anyhow::Result<()> {
        let (WorkerId { index, total }, data) = (source.worker, Arc::clone(&source.data));
        let share = (index as usize..data.entries.len()).step_by(usize::try_from(total)?);
        source.requests = match job {
            Job::Load | Job::InsertAll { .. } => {
                Box::new(share.map(move |number| RectRequest::Insert(data.entries[number])))
            }
            Job::RemoveAll { .. } => Box::new(share.map(move |number| RectRequest::Delete(data.entries[number]))),
            Job::Workload { name, .. } => {
                let seed = data.setting.seed ^ (index + 1) << 32 ^ u64::from(data.setting.run) << 16;
                source.workload(name, SmallRng::seed_from_u64(seed))
            }
        };
        Ok(())
    }

    async fn run<R: Run<Plugin = Self>>(run: &R, request: RectRequest) -> Result<Outcomes, Error> {
        let outcomes = Outcomes { ops: 1, ..Outcomes::default() };
        match request {
            RectRequest::Insert((rect, payload)) => {
                run.execute(&Insert { rect, payload }).await?;
                Ok(Outcomes { inserted: 1, ..outcomes })
            }
            RectRequest::Delete((rect, payload)) => {
                let is_gone = run.execute(&Delete { rect, payload }).await?;
                Ok(Outcomes { removed: is_gone.into(), remove_missing: (!is_gone).into(), ..outcomes })
            }
            RectRequest::Point(entry) => {
                let is_found = finds(run, entry).await?;
                Ok(Outcomes { found: is_found.into(), missing: (!is_found).into(), ..outcomes })
            }
            RectRequest::Search(window) => {
                let found = search(run, Query::Intersects(window)).await?;
                let wrong_scans = u64::from(!found.iter().all(|(rect, _)| rect.intersects(&window)));
                Ok(Outcomes { scanned: found.len() as u64, wrong_scans, ..outcomes })
            }
        }
    }
}

/// All entries that a query asks for.
async fn search<R: Run<Plugin = Tree>>(run: &R, query: Query) -> Result<Vec<Entry>, Error> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let found = run.execute(&Find { query, limit: u64::MAX, after, stamp: 0 }).await?;
        all.extend(found.entries);
        if !found.has_rest {
            return Ok(all);
        }
        after = all.last().copied();
    }
}

async fn finds<R: Run<Plugin = Tree>>(run: &R, entry: Entry) -> Result<bool, Error> {
    Ok(search(run, Query::Contains(entry.0)).await?.contains(&entry))
}
