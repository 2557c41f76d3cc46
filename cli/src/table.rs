//! The table of measured rows for people, at most 120 columns wide.

use std::collections::HashMap;

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::report::MeasuredRow;
use crate::units::{show_count, show_nanoseconds};

/// A rule below the header and one at the end, no others: fourteen columns are to fit a terminal.
const STYLE: TableStyle = {
    let rule = LineStyle::none().fill('─').junction('─');
    TableStyle::new().header_separator(rule).bottom_border(rule)
};

/// The rows as a table. If rows of one name differ in what is in flight, a last column says how many times the
/// throughput of the first such row each has.
pub(crate) fn measured(rows: &[MeasuredRow]) -> Table {
    let mut first_rates: HashMap<&str, f64> = HashMap::new();
    for row in rows {
        first_rates.entry(&row.name).or_insert(row.ops_per_second);
    }
    let compares = first_rates.len() < rows.len();
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
        "restarts\n/op",
    ];
    if has_cache {
        // Narrower, so that both fit.
        header[12] = "re-\nstarts";
        header.push("hit\nratio");
    }
    if compares {
        header.push("times");
    }
    let mut table = Table::new();
    table.load_style(STYLE).set_header(header);
    for row in rows {
        let latency = |ns: Option<u64>| ns.map_or_else(|| "-".to_owned(), show_nanoseconds);
        let mut cells = vec![
            row.name.clone(),
            row.varied.in_flight.to_string(),
            show_count(row.ops_per_second),
            latency(row.p50_ns),
            latency(row.p99_ns),
            latency(row.p999_ns),
            show_count(row.reads_per_op),
            show_count(row.writes_per_op),
            show_count(row.atomics_per_op),
            show_count(row.two_sided_per_op),
            if row.bytes_per_op < 1e6 { format!("{:.0}", row.bytes_per_op) } else { show_count(row.bytes_per_op) },
            show_count(row.round_trips_per_op),
            format!("{:.4}", row.restarts_per_op),
        ];
        if has_cache {
            cells.push(row.hit_ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}")));
        }
        if compares {
            let first = first_rates.get(row.name.as_str()).copied().unwrap_or(0.0);
            cells.push(if first > 0.0 { format!("{:.2}x", row.ops_per_second / first) } else { "-".to_owned() });
        }
        table.add_row(cells);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 0));
        if index > 0 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::row;

    #[test]
    fn the_widest_table_fits() {
        let mut rows = vec![row("insert-intensive", 1, 2.0), row("insert-intensive", 16, 0.001)];
        for row in &mut rows {
            row.ops_per_second *= 123.4e6;
            (row.p50_ns, row.p99_ns, row.p999_ns) = (Some(123_456), Some(12_345_678), Some(59_999_999_999));
            (row.bytes_per_op, row.restarts_per_op) = (123_456.0, 12.3456);
        }
        let text = measured(&rows).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 120), "\n{text}");
        assert!(text.contains("2000.00x") && !text.contains("hit"), "\n{text}");
        for row in &mut rows {
            row.hit_ratio = Some(0.98765);
            row.restarts_per_op = 0.0123;
        }
        rows[1].ops_per_second /= 10.0;
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
