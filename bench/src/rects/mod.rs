//! The R-tree, measured: rectangles from a file, or Catfish's data, and its workloads (Xiao et al., ICDCS 2019, section
//! V).
//!
//! Catfish's rectangles lie at uniform places of the unit square, with edges of up to 1e-4. Searches are for windows
//! with edges of up to a *scale*; so are the edges of what is inserted. With a file, all of that is stretched to the
//! bounding box of its rectangles: a scale is a share of the box's width and of its height.
//!
//! `draw.rs` draws rectangles, `order.rs` says in which order they are inserted, `file.rs` and `geojson.rs` read them,
//! `windows.rs` compares a tree's answers with brute force.

mod draw;
mod file;
#[cfg(feature = "geojson")]
mod geojson;
mod order;
mod windows;

use std::{cell::Cell, fmt, rc::Rc, sync::Arc};

use anyhow::{Context as _, ensure};
use farlink_offload::ShardKey;
use farlink_runtime::access::Access;
use farlink_runtime::error::Error;
use farlink_runtime::operation::Run;
use farlink_structures::rtree::ops::{Delete, Find, Insert, Update};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Scope, Tree};
use rand::{RngExt, SeedableRng, rngs::SmallRng, seq::SliceRandom};

pub(crate) use self::draw::{Scale, Space};
use crate::maps::stream::Pass;
use crate::subject::{GoOn, Job, Outcomes, Samples, Setting, Subject, WorkerId};
use crate::units::plural;

/// Entries looked for in a tree that an earlier run has loaded.
const PROBES: usize = 1000;
/// Of a mixed workload's operations one in so many is an insert.
const INSERT_ONE_IN: u32 = 10;
/// How many of the nearest are asked for.
const NEAREST: usize = 5;

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
    /// Searches for so many entries, those that are nearest to a point.
    Nearest([f64; 2], usize),
    /// Moves a loaded entry to another place, and back.
    Move(Entry, Rect),
}

/// What is loaded.
#[derive(Debug)]
pub struct RectData {
    setting: Setting,
    /// In the order in which they are inserted.
    pub(crate) entries: Vec<Entry>,
    /// Where they lie.
    space: Space,
}

impl RectData {
    /// Where they lie: their bounding box, or the unit square if they are drawn.
    pub(crate) fn space(&self) -> &Rect {
        &self.space.0
    }
}

type Requests = Box<dyn Iterator<Item = RectRequest>>;

/// One worker's operations.
pub struct RectSource {
    data: Arc<RectData>,
    worker: WorkerId,
    requests: Requests,
    /// The next workload's.
    pass: Pass,
    /// How many entries all workloads before, and this one, have inserted: no payload comes twice.
    inserted: Rc<Cell<u64>>,
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

/// What a workload does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Workload {
    Search(Scale),
    /// Searches and inserts.
    Mixed(Scale),
    Point,
    Nearest,
    Move,
}

impl Workload {
    fn named(name: &str) -> Option<Self> {
        let (kind, scale) = name.split_once('-').unwrap_or((name, ""));
        let scale = match scale {
            "small" => Scale::Small,
            "large" => Scale::Large,
            "power" => Scale::Power,
            _ => return Self::without_scale(name),
        };
        match kind {
            "search" => Some(Self::Search(scale)),
            "mixed" => Some(Self::Mixed(scale)),
            _ => None,
        }
    }

    fn without_scale(name: &str) -> Option<Self> {
        match name {
            "point" => Some(Self::Point),
            "nearest" => Some(Self::Nearest),
            "move" => Some(Self::Move),
            _ => None,
        }
    }
}

impl RectSource {
    /// The operations of a workload, without end.
    fn workload(&self, workload: Workload, mut rng: SmallRng) -> Requests {
        let (data, worker) = (Arc::clone(&self.data), self.worker);
        // Payloads of what is inserted are no loaded entry's, unless a file has them, and differ from run to run.
        let payload = (u64::from(data.setting.run) + 1) << 40 | worker.index << 24;
        let inserted = Rc::clone(&self.inserted);
        let mut turns = self.turns(workload, &mut rng).into_iter().cycle();
        Box::new(std::iter::repeat_with(move || match workload {
            Workload::Mixed(scale) if rng.random_ratio(1, INSERT_ONE_IN) => {
                inserted.set(inserted.get() + 1);
                RectRequest::Insert((data.space.inserted(&mut rng, scale), payload + inserted.get()))
            }
            Workload::Search(scale) | Workload::Mixed(scale) => RectRequest::Search(data.space.window(&mut rng, scale)),
            Workload::Point => RectRequest::Point(data.entries[rng.random_range(0..data.entries.len())]),
            Workload::Nearest => RectRequest::Nearest(data.space.point(&mut rng), NEAREST.min(data.entries.len())),
            Workload::Move => {
                let entry = data.entries[turns.next().unwrap_or_default()];
                RectRequest::Move(entry, data.space.near(&mut rng, &entry.0))
            }
        }))
    }

    /// Which entries are moved, in turn: two workers move none at the same time.
    fn turns(&self, workload: Workload, rng: &mut SmallRng) -> Vec<usize> {
        let mut share = Vec::new();
        if workload == Workload::Move {
            share.extend(
                (self.worker.index as usize..self.data.entries.len()).step_by(self.worker.total.max(1) as usize),
            );
            share.shuffle(rng);
        }
        share
    }
}

impl Subject for Tree {
    type Data = RectData;
    type Request = RectRequest;
    type Source = RectSource;

    /// Searches at the scales 1e-5 and 1e-2, and with a power law between them; at the same scales nine searches to an
    /// insert; searches for loaded entries. And searches for what is nearest, and moves.
    const WORKLOADS: &'static [&'static str] = &[
        "search-small",
        "search-large",
        "search-power",
        "mixed-small",
        "mixed-large",
        "mixed-power",
        "point",
        "nearest",
        "move",
    ];
    const WORKLOADS_USUAL: usize = 7;
    const BULK_LOADS: bool = true;
    const RETURNS_MANY: bool = true;
    const HAS_ROUNDS: bool = true;

    fn data(setting: &Setting) -> anyhow::Result<RectData> {
        ensure!(setting.keys_file.is_none(), "an R-tree has no keys: leave out --keys-file");
        let (mut entries, space) = match &setting.rects_file {
            Some(file) => {
                let entries = file::read(file)?;
                let space = Space::around(entries.iter().map(|entry| &entry.0));
                (entries, space)
            }
            None => (generated(setting.entries, setting.seed), Space::unit()),
        };
        order::arrange(&mut entries, setting.insert_order, setting.seed);
        Ok(RectData { setting: setting.clone(), entries, space })
    }

    fn entries(data: &RectData) -> u64 {
        data.entries.len() as u64
    }

    fn remark(data: &RectData) -> Option<String> {
        data.setting.rects_file.as_ref()?;
        let ([x1, y1], [x2, y2]) = (data.space.0.low(), data.space.0.high());
        let count = plural(data.entries.len() as u64, "rectangle");
        Some(format!("{count} from ({x1}, {y1}) to ({x2}, {y2}); scales are shares of this box"))
    }

    async fn bulk_load<A: Access<Plugin = Self> + Clone + 'static>(
        access: &A,
        data: &RectData,
        (cut, part): (&ShardKey<Scope>, usize),
        fill: f64,
    ) -> Result<u64, Error> {
        let scope = |&(rect, payload): &Entry| Scope { rect, payload: Some(payload) };
        let is_here = |entry: &Entry| cut.parts() == 1 || cut.about(&scope(entry)) == [part];
        let entries = data.entries.iter().copied().filter(is_here);
        RTree::over(access.clone()).bulk_load(entries, fill).await
    }

    /// By payload, each part a tree of its own.
    fn divide_among_owners(_data: &RectData, owners: usize) -> ShardKey<Scope> {
        ShardKey::Hash(owners)
    }

    async fn require_loaded<R: Run<Plugin = Self>>(run: &R, data: &RectData) -> anyhow::Result<()> {
        for entry in data.entries.iter().rev().step_by((data.entries.len() / PROBES).max(1)) {
            ensure!(
                finds(run, *entry).await?,
                "it is not empty and lacks rectangle {} of the {} to run on; give the --seed or the --rects-file that it was \
                 loaded with, or another --name",
                entry.1,
                data.entries.len()
            );
        }
        Ok(())
    }

    async fn compare<R: Run<Plugin = Self>>(
        run: &R,
        data: &RectData,
        has_more: bool,
    ) -> Result<Option<Samples>, Error> {
        windows::compare(run, data, has_more).await.map(Some)
    }

    fn source(data: &Arc<RectData>, worker: WorkerId) -> RectSource {
        let (requests, pass) = (Box::new(std::iter::empty()), Pass { run: data.setting.run, number: 0 });
        RectSource { data: Arc::clone(data), worker, requests, pass, inserted: Rc::default() }
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
                let seed = data.setting.seed ^ (index + 1) << 32 ^ source.pass.salt();
                source.pass.number += 1;
                let workload = Workload::named(name).context("an R-tree has no such workload")?;
                source.workload(workload, SmallRng::seed_from_u64(seed))
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
                let found = search(run, Query::Contains(entry.0)).await?;
                let is_found = found.contains(&entry);
                let scanned = found.len() as u64;
                Ok(Outcomes { found: is_found.into(), missing: (!is_found).into(), scanned, ..outcomes })
            }
            RectRequest::Search(window) => {
                let found = search(run, Query::Intersects(window)).await?;
                let wrong_scans = u64::from(!found.iter().all(|(rect, _)| rect.intersects(&window)));
                Ok(Outcomes { scanned: found.len() as u64, wrong_scans, ..outcomes })
            }
            RectRequest::Nearest(to, count) => {
                let found = nearest(run, to, count).await?;
                let all = u64::from(found.len() == count);
                Ok(Outcomes { found: all, missing: 1 - all, scanned: found.len() as u64, ..outcomes })
            }
            RectRequest::Move((rect, payload), to) => {
                if !run.execute(&Update { rect, payload, to }).await? {
                    // Another task has it away just now. Were it lost, there would be fewer entries in the end.
                    return Ok(Outcomes { latest_missing: 1, ..outcomes });
                }
                let is_back = run.execute(&Update { rect: to, payload, to: rect }).await?;
                Ok(Outcomes { found: is_back.into(), missing: (!is_back).into(), ..outcomes })
            }
        }
    }
}

/// Catfish's data.
fn generated(entries: u64, seed: u64) -> Vec<Entry> {
    let mut rng = SmallRng::seed_from_u64(seed);
    (0..entries).map(|number| (Space::unit().loaded(&mut rng), number)).collect()
}

/// All entries that a query asks for.
async fn search<R: Run<Plugin = Tree>>(run: &R, query: Query) -> Result<Vec<Entry>, Error> {
    first(run, query, usize::MAX).await
}

/// The entries that are nearest to a point, so many, the nearest first.
async fn nearest<R: Run<Plugin = Tree>>(run: &R, to: [f64; 2], count: usize) -> Result<Vec<Entry>, Error> {
    let mut found = first(run, Query::Nearest(to), count).await?;
    found.sort_unstable_by(|(a, _), (b, _)| a.distance_squared(&to).total_cmp(&b.distance_squared(&to)));
    found.truncate(count);
    Ok(found)
}

/// The entries that a query asks for, or so many at least, the first in its order.
async fn first<R: Run<Plugin = Tree>>(run: &R, query: Query, count: usize) -> Result<Vec<Entry>, Error> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let limit = (count - all.len()) as u64;
        let found = run.execute(&Find { query, limit, after, stamp: 0 }).await?;
        all.extend(found.entries);
        if !found.has_rest || all.len() >= count {
            return Ok(all);
        }
        after = all.last().copied();
    }
}

async fn finds<R: Run<Plugin = Tree>>(run: &R, entry: Entry) -> Result<bool, Error> {
    Ok(search(run, Query::Contains(entry.0)).await?.contains(&entry))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// No two workers move an entry, and none moves one again before it has moved all of its share.
    #[test]
    fn moves_take_turns() {
        let data = Arc::new(Tree::data(&Setting::of_entries(101)).unwrap());
        let moved = |index, share| {
            let mut source = Tree::source(&data, WorkerId { index, total: 2 });
            Tree::prepare(&mut source, Job::Workload { name: "move", operations: None }, &|| Ok(())).unwrap();
            let payload = |request| match request {
                RectRequest::Move(entry, to) if entry.0 != to => entry.1,
                other => panic!("{other:?}"),
            };
            source.take(share).map(payload).collect::<HashSet<u64>>()
        };
        let (first, second) = (moved(0, 51), moved(1, 50));
        assert_eq!((first.len(), second.len()), (51, 50));
        assert!(first.is_disjoint(&second));
    }

    /// A measured phase that searched the windows of its warm-up would measure a replay.
    #[test]
    fn a_workload_that_comes_again_is_another() {
        let data = Arc::new(Tree::data(&Setting::of_entries(100)).unwrap());
        let mut source = Tree::source(&data, WorkerId { index: 0, total: 1 });
        let (mut windows, mut payloads, mut inserts) = (HashSet::new(), HashSet::new(), 0);
        for name in ["mixed-large", "mixed-large", "search-large"] {
            Tree::prepare(&mut source, Job::Workload { name, operations: None }, &|| Ok(())).unwrap();
            for request in source.by_ref().take(200) {
                match request {
                    RectRequest::Search(window) => windows.insert(format!("{window:?}")),
                    RectRequest::Insert((_, payload)) => {
                        inserts += 1;
                        payloads.insert(payload)
                    }
                    other => panic!("{other:?}"),
                };
            }
        }
        assert!(inserts > 10);
        assert_eq!((payloads.len(), windows.len()), (inserts, 600 - inserts));
    }
}
