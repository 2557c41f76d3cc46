//! Tables for people, at most 120 columns wide.

use std::collections::HashMap;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::report::Row;
use crate::units::{show_count, show_nanoseconds};

/// A rule below the header and one at the end, no others: fourteen columns are to fit a terminal.
const STYLE: TableStyle = {
    let rule = LineStyle::none().fill('─').junction('─');
    TableStyle::new().header_separator(rule).bottom_border(rule)
};

/// A table whose first `left` columns are words and whose others are numbers.
pub(crate) fn table(header: &[&str], left: usize, rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header);
    table.add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 0));
        column.set_cell_alignment(if index < left { CellAlignment::Left } else { CellAlignment::Right });
    }
    table
}

/// A number with so many digits behind the point; none is `-`.
pub(crate) fn digits(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

/// A time; none is `-`.
pub(crate) fn time(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), show_nanoseconds)
}

/// The rows of a bench as a table. If rows of one name differ in what is in flight, a last column says how many times the
/// throughput of the first such row each has.
pub(crate) fn measured(rows: &[Row]) -> Table {
    let mut firsts: HashMap<&str, &Row> = HashMap::new();
    for row in rows {
        firsts.entry(&row.name).or_insert(row);
    }
    let compares = firsts.len() < rows.len();
    let has_cache = rows.iter().any(|row| row.hit_ratio.is_some());
    let mut header = vec![
        "mix",
        "in\nflight",
        "ops/s",
        "p50",
        "p99",
        "p99.9",
        "reads\n/op",
        "writes\n/op",
        "atom.\n/op",
        "msgs\n/op",
        "bytes\n/op",
        "trips\n/op",
        // Narrower with a cache, so that both fit.
        if has_cache { "re-\nstarts" } else { "restarts\n/op" },
    ];
    if has_cache {
        header.push("hit\nratio");
    }
    if compares {
        header.push("times");
    }
    let line = |row: &Row| {
        let count = |count: Option<f64>| show_count(count.unwrap_or(f64::NAN));
        let mut cells = vec![
            row.name.clone(),
            row.shown("in_flight"),
            count(row.ops_per_second),
            time(row.p50_ns),
            time(row.p99_ns),
            time(row.p999_ns),
            count(row.reads_per_op),
            count(row.writes_per_op),
            count(row.atomics_per_op),
            count(row.two_sided_per_op),
            if row.bytes_per_op < Some(1e6) { digits(row.bytes_per_op, 0) } else { count(row.bytes_per_op) },
            count(row.round_trips_per_op),
            digits(row.restarts_per_op, 4),
        ];
        if has_cache {
            cells.push(digits(row.hit_ratio, 3));
        }
        if compares {
            let times = firsts.get(row.name.as_str()).map(|first| row.times(first)).filter(|times| times.is_finite());
            cells.push(times.map_or_else(|| "-".to_owned(), |times| format!("{times:.2}x")));
        }
        cells
    };
    table(&header, 1, rows.iter().map(line))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::row;

    #[test]
    fn the_widest_table_fits() {
        let mut rows = vec![row("insert-intensive", 1, 2.0), row("insert-intensive", 16, 0.001)];
        for row in &mut rows {
            row.ops_per_second = row.ops_per_second.map(|rate| rate * 123.4e6);
            (row.p50_ns, row.p99_ns, row.p999_ns) = (Some(123_456), Some(12_345_678), Some(59_999_999_999));
            (row.bytes_per_op, row.restarts_per_op) = (Some(123_456.0), Some(12.3456));
        }
        let text = measured(&rows).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 120), "\n{text}");
        assert!(text.contains("2000.00x") && !text.contains("hit"), "\n{text}");
        for row in &mut rows {
            row.hit_ratio = Some(0.98765);
            row.restarts_per_op = Some(0.0123);
        }
        rows[1].ops_per_second = rows[1].ops_per_second.map(|rate| rate / 10.0);
        let text = measured(&rows).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 120), "\n{text}");
        assert!(text.contains("0.988"), "\n{text}");
    }

    #[test]
    fn one_setting_needs_no_comparison() {
        let text = measured(&[row("ycsb-a", 1, 1.0), row("ycsb-b", 1, 1.0)]).to_string();
        assert!(!text.contains("times"));
    }
}
