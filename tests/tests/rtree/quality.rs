//! How many pages small searches read, of a tree that grew entry by entry and of one that was loaded at once.

use farlink_runtime::worker::Handle;
use farlink_structures::rtree::{Entry, Query, RTree, RTreeOptions, Rect};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::scene::scene;

const ENTRIES: u64 = 6000;
const SEARCHES: u64 = 300;

/// Points of a cube, flat in its last dimensions.
#[derive(Debug, Clone, Copy)]
struct Cube {
    side: f64,
    flat: usize,
}

impl Cube {
    fn point<const D: usize>(self, rng: &mut SmallRng) -> [f64; D] {
        std::array::from_fn(|d| if d < D - self.flat { rng.random_range(0.0..self.side) } else { 0.0 })
    }

    /// READs of a search for a point, and of one for about ten of them.
    async fn reads<const D: usize>(self, worker: &Handle, is_loaded: bool) -> [f64; 2] {
        let (mut rng, name) = (SmallRng::seed_from_u64(4), format!("{self:?} {D} {is_loaded}"));
        let tree = RTree::<_, D>::create(worker, &name, RTreeOptions::default()).await.unwrap();
        let entries: Vec<Entry<D>> =
            (0..ENTRIES).map(|number| (Rect::point(self.point(&mut rng)).unwrap(), number)).collect();
        if is_loaded {
            tree.bulk_load(entries.iter().copied(), 0.9).await.unwrap();
        } else {
            for &(rect, payload) in &entries {
                tree.insert(rect, payload).await.unwrap();
            }
        }
        let edge = self.side * (10.0 / ENTRIES as f64).powf(1.0 / (D - self.flat) as f64);
        let mut reads = [0, 0];
        for _ in 0..SEARCHES {
            let known = entries[rng.random_range(0..entries.len())].0;
            let low = self.point::<D>(&mut rng);
            let window = Rect::new(low, low.map(|at| at + edge)).unwrap();
            for (reads, query) in reads.iter_mut().zip([Query::Contains(known), Query::Intersects(window)]) {
                let before = worker.counters().reads;
                tree.count(query).await.unwrap();
                *reads += worker.counters().reads - before;
            }
        }
        reads.map(|reads| reads as f64 / SEARCHES as f64)
    }
}

/// `most`: of a tree that grew, and of one that was loaded; each of a search for a point, and of one for a window.
async fn reads_little<const D: usize>(worker: &Handle, cube: Cube, most: [[f64; 2]; 2]) {
    let reads = [cube.reads::<D>(worker, false).await, cube.reads::<D>(worker, true).await];
    println!("{cube:?} of {D} dimensions: {reads:.2?} READs");
    assert!(
        reads.iter().flatten().zip(most.iter().flatten()).all(|(reads, most)| reads <= most),
        "{reads:?}, not {most:?}"
    );
}

#[test]
fn small_searches_read_little() {
    let scene = scene(64 << 20);
    scene.worker.block_on(async {
        reads_little::<2>(&scene.worker, Cube { side: 1.0, flat: 0 }, [[4.8, 7.0], [3.4, 5.5]]).await;
        reads_little::<3>(&scene.worker, Cube { side: 1.0, flat: 0 }, [[5.0, 11.5], [5.8, 11.5]]).await;
    });
}

/// Where no area tells which child an entry suits: rows and planes, and areas that are too small or too large for a number.
#[test]
fn small_searches_of_what_has_no_area_read_little() {
    let scene = scene(64 << 20);
    scene.worker.block_on(async {
        reads_little::<2>(&scene.worker, Cube { side: 1.0, flat: 1 }, [[4.4, 5.1], [3.3, 3.8]]).await;
        reads_little::<3>(&scene.worker, Cube { side: 1.0, flat: 1 }, [[7.2, 11.5], [4.8, 8.2]]).await;
        reads_little::<2>(&scene.worker, Cube { side: 1e-200, flat: 0 }, [[5.8, 8.9], [3.4, 5.5]]).await;
        reads_little::<2>(&scene.worker, Cube { side: 1e200, flat: 0 }, [[5.8, 8.9], [3.4, 5.5]]).await;
    });
}
