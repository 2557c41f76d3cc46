//! A tree beside a list of its entries: operations on both, and every answer compared.

use farlink_runtime::{access::Access, error::Error, operation::Run, worker::Handle};
use farlink_structures::rtree::{Entry, Query, RTree, Rect, Tree};
use rand::{RngExt, SeedableRng, rngs::SmallRng};

use crate::{
    entries::{a_query, a_rect, sorted},
    scene::create,
};

fn scaled<const D: usize>(rect: Rect<D>, by: f64) -> Rect<D> {
    Rect::new(rect.low().map(|at| at * by), rect.high().map(|at| at * by)).unwrap()
}

fn scaled_query<const D: usize>(query: Query<D>, by: f64) -> Query<D> {
    match query {
        Query::Intersects(rect) => Query::Intersects(scaled(rect, by)),
        Query::Within(rect) => Query::Within(scaled(rect, by)),
        Query::Contains(rect) => Query::Contains(scaled(rect, by)),
        Query::Nearest(to) => Query::Nearest(to.map(|at| at * by)),
    }
}

/// Whatever can be asked has the answer of brute force.
pub(crate) async fn same<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &[Entry<D>],
    rng: &mut SmallRng,
) -> Result<(), Error> {
    same_of(tree, model, rng, 1.0).await
}

async fn same_of<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &[Entry<D>],
    rng: &mut SmallRng,
    scale: f64,
) -> Result<(), Error> {
    assert_eq!(tree.len().await?, model.len() as u64);
    assert_eq!(tree.is_empty().await?, model.is_empty());
    for _ in 0..6 {
        let query = scaled_query(a_query(rng), scale);
        let expected: Vec<Entry<D>> = sorted(model.iter().filter(|(rect, _)| query.matches(rect)).copied().collect());
        assert_eq!(sorted(tree.search(query).all().await?), expected, "{query:?}");
        assert_eq!(tree.count(query).await?, expected.len() as u64);
        let most = rng.random_range(0..20);
        let (mut cursor, mut found) = (tree.search(query), Vec::new());
        while let Some(entry) = cursor.next().await? {
            found.push(entry);
        }
        assert_eq!(found, expected, "by a cursor, {query:?}");
        let first = tree.search(query).take(most).await?;
        assert_eq!(first, expected[..most.min(expected.len())], "the first {most}, {query:?}");
        assert!(tree.search(query).take(usize::MAX).await? == expected, "all as the first, {query:?}");
    }
    let to: [f64; D] = std::array::from_fn(|_| f64::from(rng.random_range(-30..30)) * scale);
    let mut expected: Vec<f64> = model.iter().map(|(rect, _)| rect.distance_squared(&to)).collect();
    expected.sort_by(f64::total_cmp);
    let (mut cursor, mut found) = (tree.search(Query::Nearest(to)), Vec::new());
    while let Some((rect, _)) = cursor.next().await? {
        found.push(rect.distance_squared(&to));
    }
    assert_eq!(found, expected, "the nearest to {to:?}");
    let first = tree.search(Query::Nearest(to)).take(usize::MAX).await?;
    let distances: Vec<f64> = first.iter().map(|(rect, _)| rect.distance_squared(&to)).collect();
    assert!(distances == expected, "all as the nearest to {to:?}");
    let mut cursor = tree.search(Query::Nearest(to));
    let mut found: Vec<Entry<D>> = cursor.next().await?.into_iter().collect();
    found.extend(cursor.all().await?);
    assert!(found == first, "the nearest to {to:?}, and then all others");
    Ok(())
}

pub(crate) async fn clean<A: Access<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    entries: usize,
) -> Result<(), Error> {
    let report = tree.check().await?;
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.entries, entries as u64);
    Ok(())
}

/// So many operations on a tree that holds the entries of `model`: entries come, move and go, in the tree and in the model.
pub(crate) async fn some<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &mut Vec<Entry<D>>,
    rng: &mut SmallRng,
    ops: usize,
) -> Result<(), Error> {
    some_of(tree, model, rng, (ops, 1.0)).await
}

async fn some_of<A: Run<Plugin = Tree<D>>, const D: usize>(
    tree: &RTree<A, D>,
    model: &mut Vec<Entry<D>>,
    rng: &mut SmallRng,
    (ops, scale): (usize, f64),
) -> Result<(), Error> {
    for _ in 0..ops {
        let (rect, payload) = (scaled(a_rect(rng, 3), scale), rng.random_range(0..10));
        match rng.random_range(0..8) {
            0 if !model.is_empty() => {
                let entry = model.swap_remove(rng.random_range(0..model.len()));
                assert!(tree.delete(entry.0, entry.1).await?);
            }
            1 if !model.is_empty() => {
                let index = rng.random_range(0..model.len());
                assert!(tree.update(model[index].0, model[index].1, rect).await?);
                model[index].0 = rect;
            }
            2 => {
                let there = model.iter().position(|entry| *entry == (rect, payload));
                assert_eq!(tree.delete(rect, payload).await?, there.is_some());
                there.map(|index| model.swap_remove(index));
            }
            _ => {
                tree.insert(rect, payload).await?;
                model.push((rect, payload));
            }
        }
    }
    Ok(())
}

/// Entries come, move and go; in the end all go. Coordinates are `scale` times those of a small grid.
pub(crate) async fn grows_and_shrinks<const D: usize>(
    worker: &Handle,
    seed: u64,
    ops: usize,
    scale: f64,
) -> Result<(), Error> {
    let (tree, mut rng, mut model) =
        (create::<D>(worker).await?, SmallRng::seed_from_u64(seed), Vec::<Entry<D>>::new());
    for first in (0..ops).step_by(200) {
        some_of(&tree, &mut model, &mut rng, ((ops - first).min(200), scale)).await?;
        same_of(&tree, &model, &mut rng, scale).await?;
        clean(&tree, model.len()).await?;
    }
    while !model.is_empty() {
        let entry = model.swap_remove(rng.random_range(0..model.len()));
        assert!(tree.delete(entry.0, entry.1).await?, "{entry:?} of {} left", model.len());
    }
    same_of(&tree, &model, &mut rng, scale).await?;
    clean(&tree, 0).await?;
    assert_eq!(tree.check().await?.pages(), 1, "an empty tree is its root");
    Ok(())
}
