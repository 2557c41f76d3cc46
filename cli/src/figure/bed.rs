//! The tree that a figure measures: bulk-loaded into memory servers inside this process.

use std::sync::Arc;

use anyhow::Context as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::one_sided::Proof;
use farlink_runtime::structure::Structure;
use farlink_structures::btree::{BTree, BTreeOptions};

use super::optimum::Shape;
use super::population::Population;
use crate::inspect;
use crate::keys::value_for;
use crate::report::CheckRow;

/// Bytes of a page, as in DEX.
pub(crate) const PAGE_BYTES: u64 = 1024;
/// How full the load makes each page: 54 of 60 entries.
const FILL: f64 = 0.9;
/// What a page of [`PAGE_BYTES`] holds after such a load.
pub(crate) const ENTRIES_PER_PAGE: u64 = 54;
/// Room on each memory server beyond the tree: its tables, and what compute servers lease and do not use.
const SPARE_BYTES: u64 = 64 << 20;

/// Memory servers that hold the tree.
#[derive(Debug)]
pub(crate) struct Bed {
    fabric: Arc<MemFabric>,
    structure: Structure,
    keys: u64,
}

const NAME: &str = "figure";

/// The shape of the tree of this many keys.
pub(crate) fn shape(keys: u64) -> Shape {
    Shape::bulk_loaded(keys, ENTRIES_PER_PAGE)
}

impl Bed {
    /// Loads all keys. Nothing but the tree's pages takes memory that grows with the keys.
    pub(crate) fn load(population: &Population, memory_servers: u64) -> anyhow::Result<Self> {
        let tree_bytes = shape(population.keys()).pages() * PAGE_BYTES;
        let bytes = (tree_bytes / memory_servers * 11 / 10 + SPARE_BYTES).next_multiple_of(1 << 20);
        let fabric = MemFabric::in_process(usize::try_from(memory_servers)?, bytes, MemOptions::default())
            .with_context(|| format!("{memory_servers} memory servers of {bytes} bytes; try fewer --keys"))?;
        let fabric = Arc::new(fabric);
        let compute = ComputeServer::join(fabric.clone(), ComputeOptions::default())?;
        let worker = compute.worker()?;
        let structure = worker.block_on(async {
            let options = BTreeOptions { page_bytes: PAGE_BYTES as usize, ..BTreeOptions::default() };
            let tree = BTree::create(&worker, NAME, options).await?;
            let entries = (0..population.keys()).map(|number| {
                let key = Population::key(number);
                (key, value_for(key, 0))
            });
            tree.bulk_load(entries, FILL).await?;
            anyhow::Ok(farlink_runtime::access::Access::structure(tree.access()).clone())
        })?;
        Ok(Self { fabric, structure, keys: population.keys() })
    }

    /// A compute server of its own.
    pub(crate) fn join(&self, seed: u64) -> anyhow::Result<ComputeServer> {
        Ok(ComputeServer::join(self.fabric.clone(), ComputeOptions { seed, ..ComputeOptions::default() })?)
    }

    /// The tree's check of itself, past all caches: run it when they are flushed. Figures insert and remove nothing.
    pub(crate) fn check(&self) -> anyhow::Result<CheckRow> {
        let compute = self.join(0)?;
        let worker = compute.worker()?;
        let report = worker.block_on(async { BTree::open(&worker, NAME, Proof::Checksum).await?.check().await })?;
        let mut row = inspect::check_row(NAME, &report);
        if row.ok && report.entries != self.keys {
            row.ok = false;
            row.problem = Some(format!("{} keys were loaded", self.keys));
        }
        Ok(row)
    }

    /// The tree.
    pub(crate) fn structure(&self) -> &Structure {
        &self.structure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_has_the_shape_that_is_computed() {
        for keys in [1, 54, 55, 2917, 157_465] {
            let population = Population::new(keys, 0.99, 1, 1).unwrap();
            let bed = Bed::load(&population, 2).unwrap();
            let compute = bed.join(1).unwrap();
            let worker = compute.worker().unwrap();
            let report = worker.block_on(async {
                let tree = BTree::open(&worker, "figure", Proof::Checksum).await.unwrap();
                tree.check().await.unwrap()
            });
            assert!(report.is_clean());
            assert_eq!(report.entries, keys);
            assert!(shape(keys).level_pages().iter().eq(&report.pages_by_level), "{report:?}");
        }
    }
}
