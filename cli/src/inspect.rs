//! The tree as the bench and `check` see it between phases: found or made, measured, checked.
//!
//! Each look at the cluster is a membership of its own. So the pages that it took are back before anybody else allocates,
//! and no idle member holds up the reuse of pages while workers run.

use std::sync::Arc;

use anyhow::{Context as _, ensure};
use farlink_runtime::access::Plugin as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use farlink_runtime::fabric::Fabric;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_runtime::one_sided::{OneSided, Proof};
use farlink_runtime::structure::Structure;
use farlink_runtime::worker::Handle;
use farlink_runtime::{audit, catalog};
use farlink_structures::BTree;
use farlink_structures::btree::{self, BTreeOptions, Report};

use crate::keys::KeySpace;
use crate::place::Place;
use crate::report::{CheckRow, Footprint};

/// About how many keys are looked for in a tree that an earlier run has loaded.
const PROBES: u64 = 1000;
/// Problems that a failed check tells in full.
const PROBLEMS_TOLD: usize = 3;

/// A cluster to look at.
#[derive(Debug)]
pub(crate) struct Cluster {
    fabric: Arc<dyn Fabric>,
}

/// A tree that was there, or has just been made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) entries: u64,
    pub(crate) page_bytes: u32,
    /// A number that no other run on the cluster gets.
    pub(crate) run: u32,
}

impl Cluster {
    /// The running cluster.
    pub(crate) fn open(place: &Place) -> anyhow::Result<Self> {
        Ok(Self { fabric: place.fabric(MemOptions::default())? })
    }

    /// How many memory servers it has.
    pub(crate) fn servers(&self) -> u32 {
        u32::try_from(self.fabric.servers()).unwrap_or(u32::MAX)
    }

    /// Joins the cluster for as long as `look` takes.
    pub(crate) fn visit<R>(&self, look: impl AsyncFnOnce(&Handle) -> anyhow::Result<R>) -> anyhow::Result<R> {
        let compute = ComputeServer::join(Arc::clone(&self.fabric), ComputeOptions::default())?;
        let worker = compute.worker()?;
        worker.block_on(look(&worker))
    }

    /// All structures, by name.
    pub(crate) fn structures(&self) -> anyhow::Result<Vec<Structure>> {
        let mut all = self.visit(async |worker| Ok(catalog::list(worker).await?))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Opens the tree `name`, or makes it with pages of `page_bytes`.
    pub(crate) fn open_or_create(&self, name: &str, page_bytes: u32) -> anyhow::Result<Opened> {
        self.visit(async |worker| {
            let exists = catalog::list(worker).await?.iter().any(|structure| structure.name == name);
            let run = worker.owner().incarnation();
            if exists {
                let tree = open(worker, name).await?;
                return Ok(Opened { entries: tree.len().await?, page_bytes: page_bytes_of(&tree), run });
            }
            let options = BTreeOptions { page_bytes: page_bytes as usize, ..BTreeOptions::default() };
            BTree::create(worker, name, options).await?;
            Ok(Opened { entries: 0, page_bytes, run })
        })
    }

    /// Whether the tree `name` holds these keys, as far as samples tell.
    pub(crate) fn require_loaded(&self, name: &str, keys: &KeySpace) -> anyhow::Result<()> {
        self.visit(async |worker| {
            let tree = open(worker, name).await?;
            let loaded = keys.loaded();
            // From the last one down: it is missing if fewer were loaded.
            for number in (0..loaded).rev().step_by((loaded / PROBES).max(1) as usize) {
                let key = keys.loaded_key(number);
                ensure!(
                    tree.get(key).await?.is_some(),
                    "the tree `{name}` is not empty and lacks key {key}, one of the {loaded} to run on; give the keys it \
                     was loaded with, or another --tree"
                );
            }
            Ok(())
        })
    }

    /// The size of a sound tree, and the remote memory that it takes.
    pub(crate) fn footprint(&self, name: &str) -> anyhow::Result<Footprint> {
        let (row, report) = self.check(name)?;
        ensure!(row.ok, "the tree is broken: {}", row.problem.unwrap_or_default());
        let memory = self.visit(async |worker| Ok(audit::memory(worker).await?))?;
        Ok(Footprint {
            entries: report.entries,
            levels: report.height() as u64,
            leased_bytes: memory.leased_bytes,
            tree_bytes: report.bytes,
        })
    }

    /// The last check of a bench's tree, and its entries. In a cluster of the bench's own nobody else can hold pages then.
    pub(crate) fn final_check(&self, name: &str, alone: bool) -> anyhow::Result<(CheckRow, u64)> {
        let (mut row, report) = self.check(name).context("the final check")?;
        if alone && row.ok && report.audit.held > 0 {
            (row.ok, row.problem) =
                (false, Some(format!("{} pages are lost: not in the tree, and not free", report.audit.held)));
        }
        Ok((row, report.entries))
    }

    /// The check of a tree, and its report.
    pub(crate) fn check(&self, name: &str) -> anyhow::Result<(CheckRow, Report)> {
        let report = self.visit(async |worker| Ok(open(worker, name).await?.check().await?))?;
        Ok((check_row(name, &report), report))
    }
}

/// What the tree `name` says of itself.
pub(crate) fn check_row(name: &str, report: &Report) -> CheckRow {
    CheckRow::new("btree", problem(report))
        .count("tree", name)
        .count("entries", report.entries)
        .count("levels", report.height())
        .count("pages", report.pages())
        .count("problems", report.problem_count)
        .count("leaked", report.audit.leaked.len())
        .count("held", report.audit.held)
}

async fn open(worker: &Handle, name: &str) -> Result<BTree<OneSided<btree::Tree>>, Error> {
    BTree::open(worker, name, Proof::Checksum).await
}

fn page_bytes_of(tree: &BTree<OneSided<btree::Tree>>) -> u32 {
    tree.structure().class.bytes() as u32
}

/// Whether `check` knows structures of this kind.
pub(crate) fn is_tree(structure: &Structure) -> bool {
    structure.kind == btree::Tree::NAME
}

/// Why a report is not clean.
fn problem(report: &Report) -> Option<String> {
    if report.is_clean() {
        return None;
    }
    let mut told: Vec<String> = report.problems.iter().take(PROBLEMS_TOLD).map(ToString::to_string).collect();
    let untold = report.problem_count.saturating_sub(told.len() as u64);
    if untold > 0 {
        told.push(format!("and {untold} more problems"));
    }
    for (pages, what) in [(&report.audit.leaked, "leaked"), (&report.audit.reached_but_free, "in use, yet marked free")]
    {
        if let Some(first) = pages.first() {
            told.push(format!("pages {what}: {}, the first is {first:?}", pages.len()));
        }
    }
    Some(told.join("; "))
}
