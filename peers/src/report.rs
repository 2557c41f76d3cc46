//! What is printed: a table for people, or a JSON object for each row.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde_json::json;

use crate::{
    keys::Distribution,
    race::{Entry, Ran},
};

/// A rule below the header and one at the end, no others.
const STYLE: TableStyle = {
    let rule = LineStyle::none().fill('─').junction('─');
    TableStyle::new().header_separator(rule).bottom_border(rule)
};

/// Whose rate the others are compared with, at one lookup in flight.
const BASE: &str = "direct";

struct Row {
    name: &'static str,
    threads: usize,
    in_flight: usize,
    median: Ran,
    lowest: f64,
    highest: f64,
    /// `None` if the one to compare with did not run.
    ratio: Option<f64>,
}

/// The rows so far.
pub(crate) struct Report {
    json: bool,
    keys: u64,
    distribution: Distribution,
    rows: Vec<Row>,
}

impl Report {
    /// A report without rows.
    pub(crate) fn new(json: bool, keys: u64, distribution: Distribution) -> Self {
        Self { json, keys, distribution, rows: Vec::new() }
    }

    /// Adds what was measured with this many threads.
    pub(crate) fn add(&mut self, threads: usize, entries: &[Entry<'_>]) {
        let base = entries.iter().find(|entry| entry.contender.name() == BASE && entry.in_flight == 1);
        let base = base.map(|entry| entry.median().ops_per_second);
        for entry in entries {
            let median = entry.median();
            let rates = || entry.rounds.iter().map(|ran| ran.ops_per_second);
            let row = Row {
                name: entry.contender.name(),
                threads,
                in_flight: entry.in_flight,
                median,
                lowest: rates().fold(f64::INFINITY, f64::min),
                highest: rates().fold(0.0, f64::max),
                ratio: base.map(|base| median.ops_per_second / base),
            };
            if self.json {
                println!("{}", self.json_of(&row));
            }
            self.rows.push(row);
        }
    }

    fn json_of(&self, row: &Row) -> serde_json::Value {
        json!({
            "name": row.name,
            "threads": row.threads,
            "in_flight": row.in_flight,
            "ops": row.median.ops,
            "seconds": row.median.seconds,
            "ops_per_second": row.median.ops_per_second,
            "ops_per_second_lowest": row.lowest,
            "ops_per_second_highest": row.highest,
            "ratio": row.ratio,
            "keys": self.keys,
            "distribution": self.distribution_name(),
        })
    }

    fn distribution_name(&self) -> &'static str {
        match self.distribution {
            Distribution::Uniform => "uniform",
            Distribution::Zipf => "zipf",
        }
    }

    /// Prints the table; rows in JSON are out already.
    pub(crate) fn print(&self) {
        if self.json {
            return;
        }
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header([
            "contender",
            "threads",
            "in flight",
            "ratio to direct, 1 in flight",
            "Mops/s here, now",
            "of rounds",
        ]);
        for column in 1..6 {
            table.column_mut(column).expect("the header has six columns").set_cell_alignment(CellAlignment::Right);
        }
        for row in &self.rows {
            table.add_row([
                row.name.to_string(),
                row.threads.to_string(),
                row.in_flight.to_string(),
                row.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
                format!("{:.2}", row.median.ops_per_second / 1e6),
                format!("{:.2} to {:.2}", row.lowest / 1e6, row.highest / 1e6),
            ]);
        }
        println!("{table}");
        println!(
            "{} keys, {} lookups, all found. Rates are of this machine and this run: quote only the ratios.",
            self.keys,
            self.distribution_name()
        );
    }
}
