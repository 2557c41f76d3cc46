//! The cluster as the bench and `check` see it between phases.
//!
//! Each look at the cluster is a membership of its own. So the pages that it took are back before anybody else allocates,
//! and no idle member holds up the reuse of pages while workers run.

use std::sync::Arc;
use std::time::Duration;

use farlink_runtime::audit;
use farlink_runtime::catalog;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::Fabric;
use farlink_runtime::report::Report;
use farlink_runtime::structure::Structure;
use farlink_runtime::worker::Worker;
use serde_json::Value;

use crate::report::{CheckRow, Footprint};

/// Problems that a failed check tells in full.
const PROBLEMS_TOLD: usize = 3;
/// How long a look waits for a compute server that lives and does not go on.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// A cluster to look at.
#[derive(Debug)]
pub(crate) struct ClusterView {
    fabric: Arc<dyn Fabric>,
}

impl ClusterView {
    /// The running cluster that a fabric leads to.
    pub(crate) fn new(fabric: Arc<dyn Fabric>) -> Self {
        Self { fabric }
    }

    /// How many memory servers it has.
    pub(crate) fn servers(&self) -> u32 {
        u32::try_from(self.fabric.servers()).unwrap_or(u32::MAX)
    }

    /// Whether all its memory servers are there.
    pub(crate) fn check_servers(&self) -> anyhow::Result<()> {
        Ok(self.fabric.check_servers()?)
    }

    /// Joins the cluster for as long as `look` takes. What compute servers that have died held is taken back before that.
    pub(crate) fn visit<R>(&self, look: impl FnOnce(&Worker) -> anyhow::Result<R>) -> anyhow::Result<R> {
        let options = ComputeOptions { lock_wait: Some(LOCK_WAIT), ..ComputeOptions::default() };
        let compute = ComputeServer::join(Arc::clone(&self.fabric), options)?;
        let worker = compute.worker()?;
        worker.block_on(compute.settle(&worker))?;
        look(&worker)
    }

    /// All structures, by name.
    pub(crate) fn structures(&self) -> anyhow::Result<Vec<Structure>> {
        let mut all = self.visit(|worker| Ok(worker.block_on(catalog::list(worker))?))?;
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// Bytes of the cluster's memory that are not free.
    pub(crate) fn used_bytes(&self) -> anyhow::Result<u64> {
        self.visit(|worker| Ok(worker.block_on(audit::memory(worker))?.used_bytes()))
    }

    /// The remote memory that a structure takes, of which this is the report.
    pub(crate) fn footprint(&self, report: &Report) -> anyhow::Result<Footprint> {
        let memory = self.visit(|worker| Ok(worker.block_on(audit::memory(worker))?))?;
        Ok(Footprint {
            entries: report.entries,
            levels: report.height() as u64,
            leased_bytes: memory.leased_bytes,
            structure_bytes: report.bytes,
        })
    }
}

/// One report of several parts of a structure.
pub(crate) fn sum(reports: impl IntoIterator<Item = Report>) -> Report {
    let mut reports = reports.into_iter();
    let mut all = reports.next().unwrap_or_default();
    for part in reports {
        let levels = all.pages_by_level.len().max(part.pages_by_level.len());
        all.pages_by_level.resize(levels, 0);
        all.pages_by_level.iter_mut().zip(&part.pages_by_level).for_each(|(sum, pages)| *sum += pages);
        all.entries += part.entries;
        all.bytes += part.bytes;
        all.problems.extend(part.problems);
        all.problem_count += part.problem_count;
        all.audit.leaked.extend(part.audit.leaked);
        all.audit.reached_but_free.extend(part.audit.reached_but_free);
        // Of the whole cluster.
        all.audit.held = all.audit.held.max(part.audit.held);
        all.audit.has_holders |= part.audit.has_holders;
        all.is_partial |= part.is_partial;
    }
    all
}

/// What a structure says of itself.
pub(crate) fn check_row(kind: &str, name: &str, report: &Report) -> CheckRow {
    CheckRow::new(kind, problem(report))
        .count("structure", name)
        .count("entries", report.entries)
        .count("levels", report.height())
        .count("pages", report.pages())
        .count("problems", report.problem_count)
        .count("leaked", report.leaked().map_or_else(|| "unknown".into(), Value::from))
        .count("held", report.audit.held - report.audit.lost())
        .count("lost", report.audit.lost())
}

/// Why a report is not clean.
pub(crate) fn problem(report: &Report) -> Option<String> {
    if report.is_clean() {
        return None;
    }
    let mut told: Vec<String> = report.problems.iter().take(PROBLEMS_TOLD).map(ToString::to_string).collect();
    let untold = report.problem_count.saturating_sub(told.len() as u64);
    if untold > 0 {
        told.push(format!("and {untold} more problems"));
    }
    for (pages, what, hint) in [
        (
            &report.audit.leaked,
            "leaked",
            "; a load that was cut off leaves such: `farlink check --free-leaked` frees them while the structure is empty, and \
             `farlink drop` with the rest",
        ),
        (&report.audit.reached_but_free, "in use, yet marked free", ""),
    ] {
        if let Some(first) = pages.first() {
            told.push(format!("pages {what}: {}, the first is {first:?}{hint}", pages.len()));
        }
    }
    if report.audit.lost() > 0 {
        told.push(format!("{} pages are lost: not in use, and not free", report.audit.lost()));
    }
    Some(told.join("; "))
}
