//! Indexes of rectangles in local memory, behind one trait: our R-tree and what else there is in Rust.
//!
//! All of them are asked for the same and hand out the same: a new vector with the entries. Those that hand out positions have
//! the entries beside them.

use std::sync::Arc;

use farlink_offload::{CacheOptions, Cached, ComputeCache};
use farlink_runtime::{
    access::Access,
    compute::{ComputeOptions, ComputeServer},
    fabric::mem::MemOptions,
    one_sided::OneSided,
    server::in_process,
    worker::Worker,
};
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect, Tree};
use packed_spatial_index::{Box2D, Index2DBuilder, NeighborWorkspace, Point2D, SearchWorkspace, SimdIndex2D};
use rstar::{
    AABB,
    primitives::{GeomWithData, Rectangle},
};
use static_aabb2d_index::{Control, NeighborPriorityQueue, StaticAABB2DIndex, StaticAABB2DIndexBuilder};

/// How many of the nearest entries are asked for.
const NEAREST: usize = 5;

/// What answers come to: entries, and the sum of their payloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Digest {
    pub(crate) entries: u64,
    pub(crate) payloads: u64,
}

impl Digest {
    fn add(&mut self, payloads: impl ExactSizeIterator<Item = u64>) {
        self.entries += payloads.len() as u64;
        self.payloads = payloads.fold(self.payloads, u64::wrapping_add);
    }
}

/// An index under test.
pub(crate) trait Index {
    /// Loads the empty index.
    fn load(&mut self, entries: &[Entry]) -> anyhow::Result<()>;
    /// Inserts one entry after the other; false if it cannot be changed.
    fn insert(&mut self, entries: &[Entry]) -> anyhow::Result<bool>;
    /// All entries that intersect each window.
    fn search(&mut self, windows: &[Rect]) -> anyhow::Result<Digest>;
    /// How many do; no payloads.
    fn count(&mut self, windows: &[Rect]) -> anyhow::Result<Digest>;
    /// The five entries that are nearest to each point.
    fn nearest(&mut self, points: &[[f64; 2]]) -> anyhow::Result<Digest>;
}

/// Makes an empty index with room for so many entries, in pages of so many bytes if it is ours.
type Make = fn(usize, usize) -> anyhow::Result<Box<dyn Index>>;

/// The first is what the others are compared with.
pub(crate) const INDEXES: [(&str, Make); 5] = [
    ("rstar", |_, _| Ok(Box::new(Rstar(rstar::RTree::new())))),
    ("farlink, cached", |count, page_bytes| Ok(Box::new(Ours::cached(count, page_bytes)?))),
    ("farlink, one-sided", |count, page_bytes| Ok(Box::new(Ours::one_sided(count, page_bytes)?))),
    ("static_aabb2d_index", |_, _| Ok(Box::new(Static::default()))),
    ("packed_spatial_index", |_, _| Ok(Box::new(Packed::default()))),
];

/// Ours, with the cluster in which it stands.
struct Ours<A> {
    tree: RTree<A>,
    worker: Worker,
    _compute: ComputeServer,
}

/// What the pages of so many entries take, if they are half full.
fn bytes(count: usize) -> usize {
    const ENTRY_BYTES: usize = 40;
    const SPARE_BYTES: usize = 64 << 20;
    (count * ENTRY_BYTES * 5 / 2 + SPARE_BYTES).next_multiple_of(1 << 20)
}

fn create(count: usize, page_bytes: usize) -> anyhow::Result<(ComputeServer, Worker, RTree<OneSided<Tree>>)> {
    let cluster = in_process(1, bytes(count) as u64, MemOptions::default())?;
    let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
    let worker = compute.worker()?;
    let options = RTreeOptions { page_bytes, ..RTreeOptions::default() };
    let tree = worker.block_on(RTree::create(&worker, "local", options))?;
    Ok((compute, worker, tree))
}

impl Ours<OneSided<Tree>> {
    fn one_sided(count: usize, page_bytes: usize) -> anyhow::Result<Self> {
        let (_compute, worker, tree) = create(count, page_bytes)?;
        Ok(Self { tree, worker, _compute })
    }
}

impl Ours<Cached<Tree>> {
    fn cached(count: usize, page_bytes: usize) -> anyhow::Result<Self> {
        let (_compute, worker, tree) = create(count, page_bytes)?;
        let mut options = CacheOptions::new(bytes(count) * 3 / 2);
        options.page_bytes = page_bytes;
        let cache = ComputeCache::new(options)?;
        let structure = tree.access().context().structure.clone();
        let access = worker.block_on(cache.own(&worker, structure, Rect::EVERYTHING.into()))?;
        Ok(Self { tree: RTree::over(access), worker, _compute })
    }
}

impl<A: Access<Plugin = Tree> + Clone + 'static> Index for Ours<A> {
    fn load(&mut self, entries: &[Entry]) -> anyhow::Result<()> {
        self.worker.block_on(self.tree.bulk_load(entries.iter().copied(), 1.0))?;
        Ok(())
    }

    fn insert(&mut self, entries: &[Entry]) -> anyhow::Result<bool> {
        self.worker.block_on(async {
            for &(rect, payload) in entries {
                self.tree.insert(rect, payload).await?;
            }
            Ok(true)
        })
    }

    fn search(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        self.worker.block_on(async {
            let mut digest = Digest::default();
            for &window in windows {
                let found = self.tree.search(Query::Intersects(window)).all().await?;
                digest.add(found.iter().map(|entry| entry.1));
            }
            Ok(digest)
        })
    }

    fn count(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        self.worker.block_on(async {
            let mut digest = Digest::default();
            for &window in windows {
                digest.entries += self.tree.count(Query::Intersects(window)).await?;
            }
            Ok(digest)
        })
    }

    fn nearest(&mut self, points: &[[f64; 2]]) -> anyhow::Result<Digest> {
        self.worker.block_on(async {
            let mut digest = Digest::default();
            for &point in points {
                let found = self.tree.search(Query::Nearest(point)).take(NEAREST).await?;
                digest.add(found.iter().map(|entry| entry.1));
            }
            Ok(digest)
        })
    }
}

type RstarEntry = GeomWithData<Rectangle<[f64; 2]>, u64>;

struct Rstar(rstar::RTree<RstarEntry>);

fn to_rstar(&(rect, payload): &Entry) -> RstarEntry {
    GeomWithData::new(Rectangle::from_corners(rect.low(), rect.high()), payload)
}

fn envelope(window: &Rect) -> AABB<[f64; 2]> {
    AABB::from_corners(window.low(), window.high())
}

impl Index for Rstar {
    fn load(&mut self, entries: &[Entry]) -> anyhow::Result<()> {
        self.0 = rstar::RTree::bulk_load(entries.iter().map(to_rstar).collect());
        Ok(())
    }

    fn insert(&mut self, entries: &[Entry]) -> anyhow::Result<bool> {
        entries.iter().for_each(|entry| self.0.insert(to_rstar(entry)));
        Ok(true)
    }

    fn search(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        for window in windows {
            let found: Vec<RstarEntry> = self.0.locate_in_envelope_intersecting(envelope(window)).copied().collect();
            digest.add(found.iter().map(|entry| entry.data));
        }
        Ok(digest)
    }

    fn count(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let count = |window| self.0.locate_in_envelope_intersecting(envelope(window)).count() as u64;
        Ok(Digest { entries: windows.iter().map(count).sum(), payloads: 0 })
    }

    fn nearest(&mut self, points: &[[f64; 2]]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        for &point in points {
            let found: Vec<RstarEntry> = self.0.nearest_neighbor_iter(point).take(NEAREST).copied().collect();
            digest.add(found.iter().map(|entry| entry.data));
        }
        Ok(digest)
    }
}

/// The entries at some positions.
fn at(entries: &[Entry], positions: &[usize]) -> Vec<Entry> {
    positions.iter().map(|&position| entries[position]).collect()
}

#[derive(Default)]
struct Static {
    index: Option<StaticAABB2DIndex<f64>>,
    entries: Vec<Entry>,
    stack: Vec<usize>,
    queue: NeighborPriorityQueue<f64>,
    found: Vec<usize>,
}

impl Static {
    fn visit(&mut self, window: &Rect, mut each: impl FnMut(&mut Vec<usize>, usize)) {
        let Some(index) = &self.index else { return };
        let ([x1, y1], [x2, y2]) = (window.low(), window.high());
        let found = &mut self.found;
        let mut visitor = |position: usize| each(found, position);
        index.visit_query_with_stack(x1, y1, x2, y2, &mut visitor, &mut self.stack);
    }
}

impl Index for Static {
    fn load(&mut self, entries: &[Entry]) -> anyhow::Result<()> {
        let mut builder = StaticAABB2DIndexBuilder::new(entries.len());
        for (rect, _) in entries {
            let ([x1, y1], [x2, y2]) = (rect.low(), rect.high());
            builder.add(x1, y1, x2, y2);
        }
        self.index = Some(builder.build()?);
        self.entries = entries.to_vec();
        Ok(())
    }

    fn insert(&mut self, _entries: &[Entry]) -> anyhow::Result<bool> {
        Ok(false)
    }

    fn search(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        for window in windows {
            self.found.clear();
            self.visit(window, |found, position| found.push(position));
            digest.add(at(&self.entries, &self.found).iter().map(|entry| entry.1));
        }
        Ok(digest)
    }

    fn count(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        for window in windows {
            self.visit(window, |_, _| digest.entries += 1);
        }
        Ok(digest)
    }

    fn nearest(&mut self, points: &[[f64; 2]]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        let Some(index) = &self.index else { return Ok(digest) };
        for &[x, y] in points {
            let found = &mut self.found;
            found.clear();
            let mut visitor = |position: usize, _: f64| {
                found.push(position);
                if found.len() == NEAREST { Control::Break(()) } else { Control::Continue }
            };
            let _ = index.visit_neighbors_with_queue(x, y, &mut visitor, &mut self.queue);
            digest.add(at(&self.entries, &self.found).iter().map(|entry| entry.1));
        }
        Ok(digest)
    }
}

#[derive(Default)]
struct Packed {
    index: Option<SimdIndex2D>,
    entries: Vec<Entry>,
    search: SearchWorkspace,
    neighbors: NeighborWorkspace,
}

fn to_packed(rect: &Rect) -> Box2D {
    let ([x1, y1], [x2, y2]) = (rect.low(), rect.high());
    Box2D::new(x1, y1, x2, y2)
}

impl Index for Packed {
    fn load(&mut self, entries: &[Entry]) -> anyhow::Result<()> {
        let mut builder = Index2DBuilder::new(entries.len());
        entries.iter().for_each(|(rect, _)| builder.add(to_packed(rect)));
        self.index = Some(builder.finish_simd()?);
        self.entries = entries.to_vec();
        Ok(())
    }

    fn insert(&mut self, _entries: &[Entry]) -> anyhow::Result<bool> {
        Ok(false)
    }

    fn search(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        let Some(index) = &self.index else { return Ok(digest) };
        for window in windows {
            let found = index.search_with(to_packed(window), &mut self.search);
            digest.add(at(&self.entries, found).iter().map(|entry| entry.1));
        }
        Ok(digest)
    }

    fn count(&mut self, windows: &[Rect]) -> anyhow::Result<Digest> {
        let Some(index) = &self.index else { return Ok(Digest::default()) };
        let count = |window| index.count(to_packed(window)) as u64;
        Ok(Digest { entries: windows.iter().map(count).sum(), payloads: 0 })
    }

    fn nearest(&mut self, points: &[[f64; 2]]) -> anyhow::Result<Digest> {
        let mut digest = Digest::default();
        let Some(index) = &self.index else { return Ok(digest) };
        for &[x, y] in points {
            let found = index.neighbors_with(Point2D::new(x, y), NEAREST, f64::INFINITY, &mut self.neighbors);
            digest.add(at(&self.entries, found).iter().map(|entry| entry.1));
        }
        Ok(digest)
    }
}
