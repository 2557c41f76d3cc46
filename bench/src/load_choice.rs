//! How a structure is filled, and what goes with it.

use anyhow::ensure;

use crate::subject::InsertOrder;

const FILL_DEFAULT: f64 = 0.9;

/// How keys are put into the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LoadChoice {
    /// In key order, pages filled to --fill.
    Bulk,
    /// One insert a key, in random order.
    Insert,
}

/// Refuses an order of inserts beside a bulk load.
pub(crate) fn require_order_of_inserts(load: Option<LoadChoice>, order: Option<InsertOrder>) -> anyhow::Result<()> {
    ensure!(
        order.is_none() || load != Some(LoadChoice::Bulk),
        "--insert-order is an order of inserts: give --load insert, or leave one of them out"
    );
    Ok(())
}

/// How full a bulk load makes each page; `None` with inserts, which do not take it.
pub(crate) fn fill_of(fill: Option<f64>, bulk_loads: bool) -> anyhow::Result<Option<f64>> {
    ensure!(bulk_loads || fill.is_none(), "--fill is for a bulk load; this one inserts: leave --fill out");
    Ok(bulk_loads.then_some(fill.unwrap_or(FILL_DEFAULT)))
}
