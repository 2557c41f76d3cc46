//! What is printed: a table for people, or a JSON object for each row.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use farlink_children::huge_pages::show;
use serde_json::json;

use crate::{keys::Distribution, race::Entry};

/// A rule below the header and one at the end, no others.
const STYLE: TableStyle = {
    let rule = LineStyle::none().fill('─').junction('─');
    TableStyle::new().header_separator(rule).bottom_border(rule)
};

/// Whose rate the others are compared with, at one lookup in flight.
const BASE: &str = "cached";

/// The rows so far.
pub(crate) struct Report {
    json: bool,
    keys: u64,
    distribution: Distribution,
    /// Of whose memory which share is in huge pages.
    huge: Vec<(&'static str, Option<f64>)>,
    rows: Vec<Vec<String>>,
}

impl Report {
    /// A report without rows.
    pub(crate) fn new(
        json: bool,
        keys: u64,
        distribution: Distribution,
        huge: Vec<(&'static str, Option<f64>)>,
    ) -> Self {
        Self { json, keys, distribution, huge, rows: Vec::new() }
    }

    /// Adds what was measured with this many threads.
    pub(crate) fn add(&mut self, threads: usize, entries: &[Entry<'_>]) {
        let base = entries.iter().find(|entry| entry.system.name() == BASE && entry.in_flight == 1);
        let base = base.map(|entry| entry.median().ops_per_second);
        for entry in entries {
            let (name, median) = (entry.system.name(), entry.median());
            let rates = || entry.rounds.iter().map(|ran| ran.ops_per_second);
            let (lowest, highest) = (rates().fold(f64::INFINITY, f64::min), rates().fold(0.0, f64::max));
            // None if the one to compare with did not run.
            let ratio = base.map(|base| median.ops_per_second / base);
            if self.json {
                let row = json!({
                    "name": name,
                    "threads": threads,
                    "in_flight": entry.in_flight,
                    "ops": median.ops,
                    "seconds": median.seconds,
                    "ops_per_second": median.ops_per_second,
                    "ops_per_second_lowest": lowest,
                    "ops_per_second_highest": highest,
                    "ratio": ratio,
                    "keys": self.keys,
                    "distribution": self.distribution.name(),
                    "huge_pages": self.huge.iter().find(|(of, _)| *of == name).and_then(|(_, share)| *share),
                });
                println!("{row}");
            }
            self.rows.push(vec![
                name.to_owned(),
                threads.to_string(),
                entry.in_flight.to_string(),
                ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
                format!("{:.2}", median.ops_per_second / 1e6),
                format!("{:.2} to {:.2}", lowest / 1e6, highest / 1e6),
            ]);
        }
    }

    /// Prints the table; rows in JSON are out already.
    pub(crate) fn print(self) {
        if self.json {
            return;
        }
        let mut table = Table::new();
        table.load_style(STYLE);
        table.set_header(["system", "threads", "in flight", "ratio", "Mops/s", "of rounds"]);
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table.add_rows(self.rows);
        println!("{table}");
        let huge: Vec<_> = self.huge.iter().map(|(name, share)| format!("{name} {}", show(*share))).collect();
        println!(
            "{} keys, {} lookups, all found; ratio: to {BASE} with one in flight.\n\
             Of their memory in huge pages: {}.\n\
             Rates are of this machine and this run: quote only the ratios.",
            self.keys,
            self.distribution.name(),
            huge.join(", ")
        );
    }
}
