//! The static optimum: what the best cache could save that knows every key's popularity and never changes its contents.
//!
//! A lookup reads every page of its path that is not cached. A page may be cached only with all pages above it, so a
//! cached page saves one read for each lookup that passes it, and nothing else: the expected reads are the height less
//! the *mass* of the cached pages, the mass of a page being the probability that a lookup passes it. No page has more mass
//! than the page above it, so the pages with the greatest mass, upper levels first where masses are equal, always hold
//! their paths: they are the best contents there are. No threshold has to be searched for; sorting finds it.
//!
//! Compute servers that own key ranges have caches of their own; what they share, the root and pages on a boundary, each
//! of them holds for itself.

use std::thread;

use super::key_set::KeySet;

/// The pages of a bulk-loaded tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Entries of every page but the last of a level, which holds the rest.
    per_page: u64,
    /// Leaves first, the root last.
    level_pages: Vec<u64>,
}

/// The cacheable pages of each compute server, those with the greatest mass first.
#[derive(Debug, Clone)]
pub(crate) struct Optimum {
    levels: usize,
    servers: Vec<Vec<Ranked>>,
}

/// A page of a path.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    /// Its share of the operations of all compute servers.
    mass: f64,
    /// From 0, the leaves.
    level: u8,
}

/// What a cache leaves to be read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Misses {
    /// Expected remote reads of a lookup.
    pub(crate) reads_per_op: f64,
    /// The same for each level, leaves first.
    pub(crate) by_level: Vec<f64>,
}

impl Shape {
    /// The shape of a tree of `keys` keys, bulk-loaded with `per_page` entries in every page.
    pub(crate) fn bulk_loaded(keys: u64, per_page: u64) -> Self {
        let per_page = per_page.max(2);
        let mut level_pages = vec![keys.div_ceil(per_page).max(1)];
        while let Some(&pages) = level_pages.last().filter(|pages| **pages > 1) {
            level_pages.push(pages.div_ceil(per_page));
        }
        Self { per_page, level_pages }
    }

    /// How many pages a lookup passes.
    pub(crate) fn levels(&self) -> usize {
        self.level_pages.len()
    }

    /// All pages.
    pub(crate) fn pages(&self) -> u64 {
        self.level_pages.iter().sum()
    }

    /// The leaf of the key with this number.
    fn leaf(&self, number: u64) -> u64 {
        number / self.per_page
    }
}

impl Optimum {
    /// Works out the mass of every page. Takes a while: each key's popularity is computed once.
    pub(crate) fn new(key_set: &KeySet, shape: &Shape) -> Self {
        let leaves = leaf_masses(key_set, shape);
        let total: f64 = leaves.iter().flatten().sum();
        let servers = leaves
            .into_iter()
            .enumerate()
            .map(|(server, masses)| rank_pages(shape, shape.leaf(key_set.owned(server).start), masses, total))
            .collect();
        Self { levels: shape.levels(), servers }
    }

    /// The best that `frames` page frames in each compute server can do.
    pub(crate) fn with_frames(&self, frames: u64) -> Misses {
        let mut by_level = vec![1.0; self.levels];
        for pages in &self.servers {
            for page in pages.iter().take(usize::try_from(frames).unwrap_or(usize::MAX)) {
                by_level[usize::from(page.level)] -= page.mass;
            }
        }
        // Rounding leaves a trace around zero, where every page of a level is cached.
        by_level.iter_mut().filter(|misses| **misses < 1e-9).for_each(|misses| *misses = 0.0);
        Misses { reads_per_op: by_level.iter().sum(), by_level }
    }
}

impl Misses {
    /// The share of page accesses that find the page cached.
    pub(crate) fn hit_ratio(&self) -> f64 {
        1.0 - self.reads_per_op / self.by_level.len() as f64
    }
}

/// The weight of each leaf of each compute server, counting that server's keys only.
fn leaf_masses(key_set: &KeySet, shape: &Shape) -> Vec<Vec<f64>> {
    let first_leaf: Vec<u64> = (0..key_set.servers()).map(|server| shape.leaf(key_set.owned(server).start)).collect();
    let empty: Vec<Vec<f64>> = (0..key_set.servers())
        .map(|server| vec![0.0; (shape.leaf(key_set.owned(server).end - 1) - first_leaf[server] + 1) as usize])
        .collect();
    let sum = |ranks: std::ops::Range<u64>| {
        let mut masses = empty.clone();
        for rank in ranks {
            let number = key_set.number(rank);
            let server = key_set.owner(number);
            masses[server][(shape.leaf(number) - first_leaf[server]) as usize] += key_set.weight(rank);
        }
        masses
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(8) as u64;
    let part = |index: u64| index * key_set.keys / threads..(index + 1) * key_set.keys / threads;
    let (sum, part) = (&sum, &part);
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|index| scope.spawn(move || sum(part(index)))).collect();
        let mut all = sum(part(0));
        for other in others {
            // A thread that only adds numbers does not fail; if it did, so should this.
            let masses = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            all.iter_mut().flatten().zip(masses.iter().flatten()).for_each(|(sum, mass)| *sum += mass);
        }
        all
    })
}

/// All pages of the paths to `leaves`, the leaves from number `first` on, by falling mass.
fn rank_pages(shape: &Shape, mut first: u64, leaves: Vec<f64>, total: f64) -> Vec<Ranked> {
    let (mut pages, mut masses) = (Vec::new(), leaves);
    for level in 0..shape.levels() {
        pages.extend(masses.iter().map(|weight| Ranked { mass: weight / total, level: level as u8 }));
        let parent = |index: usize| (first + index as u64) / shape.per_page;
        let first_parent = parent(0);
        let mut above = vec![0.0; (parent(masses.len() - 1) - first_parent + 1) as usize];
        for (index, weight) in masses.iter().enumerate() {
            above[(parent(index) - first_parent) as usize] += weight;
        }
        (first, masses) = (first_parent, above);
    }
    pages.sort_unstable_by(|a, b| b.mass.total_cmp(&a.mass).then(b.level.cmp(&a.level)));
    pages
}

#[cfg(test)]
mod tests {
    use farlink_runtime::fabric::mem::MemOptions;
    use farlink_structures::btree::BTreeOptions;

    use super::*;
    use crate::figure::key_set::{ENTRIES_PER_PAGE, FILL};
    use crate::figure::test_bed::TestBed;

    /// The least expected reads over all sets of at most `frames` pages that hold each page's parent.
    fn brute_force(key_set: &KeySet, shape: &Shape, server: usize, frames: u64) -> f64 {
        // Pages numbered level by level, leaves first.
        let offset = |level: usize| shape.level_pages[..level].iter().sum::<u64>();
        let path = |number: u64| {
            (0..shape.levels()).map(move |level| offset(level) + number / shape.per_page.pow(level as u32 + 1))
        };
        let total: f64 = (0..key_set.keys).map(|rank| key_set.weight(rank)).sum();
        let keys: Vec<(Vec<u64>, f64)> = (0..key_set.keys)
            .map(|rank| (key_set.number(rank), key_set.weight(rank) / total))
            .filter(|(number, _)| key_set.owner(*number) == server)
            .map(|(number, mass)| (path(number).collect(), mass))
            .collect();
        let mut best = f64::INFINITY;
        for set in (0u64..1 << shape.pages()).filter(|set| u64::from(set.count_ones()) <= frames) {
            let holds = |page: u64| set & (1 << page) != 0;
            if keys.iter().any(|(path, _)| path.windows(2).any(|pair| holds(pair[0]) && !holds(pair[1]))) {
                continue;
            }
            // From the root down, everything below the first miss is read.
            let reads = keys.iter().map(|(path, mass)| {
                let hits = path.iter().rev().take_while(|page| holds(**page)).count();
                mass * (path.len() - hits) as f64
            });
            best = best.min(reads.sum());
        }
        best
    }

    #[test]
    fn agrees_with_brute_force_on_tiny_trees() {
        for (keys, per_page, servers) in
            [(1, 2, 1), (5, 2, 1), (10, 2, 1), (17, 2, 2), (16, 3, 1), (23, 4, 2), (40, 5, 3)]
        {
            for seed in 0..3 {
                let key_set = KeySet::new(keys, 0.99, servers, seed).unwrap();
                let shape = Shape::bulk_loaded(keys, per_page);
                assert!(shape.pages() <= 24, "{shape:?}");
                let optimum = Optimum::new(&key_set, &shape);
                for frames in 0..=6 {
                    let best: f64 =
                        (0..servers as usize).map(|server| brute_force(&key_set, &shape, server, frames)).sum();
                    let misses = optimum.with_frames(frames);
                    let gap = (misses.reads_per_op - best).abs();
                    assert!(gap < 1e-9, "{keys} keys, {frames} frames: {} for {best}", misses.reads_per_op);
                }
            }
        }
    }

    #[test]
    fn a_tree_has_the_shape_that_is_computed() {
        for keys in [1, 54, 55, 2917, 157_465] {
            let key_set = KeySet::new(keys, 0.99, 1, 1).unwrap();
            let bed = TestBed::start(2, 16 << 20, MemOptions::default()).unwrap();
            bed.load("t", BTreeOptions::default(), key_set.entries(), FILL).unwrap();
            let report = bed.report("t").unwrap();
            assert!(report.is_clean() && report.entries == keys);
            assert_eq!(Shape::bulk_loaded(keys, ENTRIES_PER_PAGE).level_pages, report.pages_by_level, "{report:?}");
        }
    }

    #[test]
    fn shapes_follow_the_bulk_load() {
        assert_eq!(Shape::bulk_loaded(54, 54).level_pages, [1]);
        assert_eq!(Shape::bulk_loaded(55, 54).level_pages, [2, 1]);
        assert_eq!(Shape::bulk_loaded(54 * 54 + 1, 54).level_pages, [55, 2, 1]);
        assert_eq!(Shape::bulk_loaded(10_000_000, 54).level_pages, [185_186, 3430, 64, 2, 1]);
        assert_eq!(Shape::bulk_loaded(200_000_000, 54).level_pages, [3_703_704, 68_588, 1271, 24, 1]);
    }

    #[test]
    fn ten_million_keys() {
        let key_set = KeySet::new(10_000_000, 0.99, 1, 1).unwrap();
        let optimum = Optimum::new(&key_set, &Shape::bulk_loaded(10_000_000, 54));
        for (frames, reads) in [(45_498, 0.259), (11_373, 0.427), (1_419, 1.024)] {
            let misses = optimum.with_frames(frames);
            assert!((misses.reads_per_op - reads).abs() < 0.004, "{frames} frames: {misses:?}");
        }
        assert!((optimum.with_frames(1_419).by_level[0] - 0.646).abs() < 0.004);
        assert_eq!(optimum.with_frames(0).reads_per_op, 5.0);
        let all = optimum.with_frames(u64::MAX);
        assert!(all.reads_per_op < 1e-9 && all.hit_ratio() > 0.999_999, "{all:?}");
    }
}
