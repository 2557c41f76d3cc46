//! What a longer chain of deltas saves, for `to-copy`: new base pages, counted on a Bw-tree ("To Copy or Not to Copy", section 5.4).
//!
//! All updates go to one page of 16 KiB.

use anyhow::ensure;
use farlink_runtime::fabric::mem::MemOptions;
use farlink_structures::bwtree::{BwTree, BwTreeOptions, CONSOLIDATIONS};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::card::CONSOLIDATION_CYCLES;
use super::plot::{Line, Plot, Scale};
use super::test_bed::TestBed;
use crate::report::{CheckRow, Row};
use crate::table::{digits, table};

/// Updates for each new base page: that which makes it, and the deltas before it. The paper's length of a chain.
const LENGTHS: [u64; 6] = [1, 2, 4, 8, 16, 32];
const KEYS: u64 = 500;
const PAGE_BYTES: usize = 16 << 10;
/// Fewer updates than that come to hardly any new page.
pub(super) const UPDATES_MIN: u64 = 100;

/// What updates have cost.
pub(super) struct Chain {
    length: u64,
    updates: u64,
    consolidations: u64,
}

impl Chain {
    fn per_update(&self) -> f64 {
        self.consolidations as f64 / self.updates as f64
    }

    pub(super) fn row(&self) -> Row {
        let source = if self.length == 1 { "computed" } else { "counted" };
        Row { name: format!("length {}", self.length), ops: Some(self.updates), ..Row::default() }
            .with("source", source)
            .with("length", self.length)
            .with("consolidations_per_update", self.per_update())
            .with("paper_per_update", 1.0 / self.length as f64)
            .with("cycles_per_update", self.per_update() * CONSOLIDATION_CYCLES)
    }
}

/// For each length. A chain of length 1 is a new page with each update, which is no tree's: it is computed.
pub(super) fn over_lengths(updates: u64, seed: u64) -> anyhow::Result<Vec<Chain>> {
    LENGTHS
        .into_iter()
        .map(|length| if length == 1 { Ok(none(updates)) } else { counted(length, updates, seed) })
        .collect()
}

fn none(updates: u64) -> Chain {
    Chain { length: 1, updates, consolidations: updates }
}

fn counted(length: u64, updates: u64, seed: u64) -> anyhow::Result<Chain> {
    let bed = TestBed::start(1, updates * 256, MemOptions::default())?;
    let compute = bed.join(seed)?;
    let worker = compute.worker()?;
    let mut rng = StdRng::seed_from_u64(seed);
    let consolidations = worker.block_on(async {
        let options =
            BwTreeOptions { page_bytes: PAGE_BYTES, chain: u8::try_from(length - 1)?, ..BwTreeOptions::default() };
        let tree = BwTree::create(&worker, "chain", options).await?;
        tree.bulk_load((0..KEYS).map(|key| (key, 0)), 1.0).await?;
        let before = worker.counters();
        for version in 0..updates {
            ensure!(tree.update(rng.random_range(0..KEYS), version).await?.is_some(), "a key is gone");
        }
        let consolidations = (worker.counters() - before).named.get(CONSOLIDATIONS);
        let report = tree.check().await?;
        ensure!(report.is_clean() && report.entries == KEYS, "the tree is not sound: {report:?}");
        anyhow::Ok(consolidations)
    })?;
    Ok(Chain { length, updates, consolidations })
}

pub(super) fn show(rows: &[Row]) -> comfy_table::Table {
    let header = ["", "source", "pages\n/update", "paper:\n1/length", "kilocycles\n/update"];
    let line = |row: &Row| {
        vec![
            row.name.clone(),
            row.shown("source"),
            digits(row.number("consolidations_per_update"), 4),
            digits(row.number("paper_per_update"), 4),
            digits(row.number("cycles_per_update").map(|cycles| cycles / 1e3), 2),
        ]
    };
    table(&header, 2, rows.iter().map(line))
}

pub(super) fn plot(chains: &[Chain]) -> Plot {
    let points = chains
        .iter()
        .map(|chain| ("counted".to_owned(), chain.length as f64, chain.per_update() * CONSOLIDATION_CYCLES / 1e3));
    Plot {
        title: "What consolidation costs".into(),
        x_label: "length of a chain".into(),
        x_scale: Scale::Logarithmic,
        y_label: "kilocycles for each update".into(),
        lines: Line::by_name(points),
        y_max: None,
    }
}

pub(super) fn checks(chains: &[Chain]) -> Vec<CheckRow> {
    let of = |length| chains.iter().find(|chain| chain.length == length).map_or(f64::NAN, Chain::per_update);
    let name = "consolidations with chains of length 4, of those with length 1";
    vec![CheckRow::within(name, of(4) / of(1), 0.24..=0.25)]
}
