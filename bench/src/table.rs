//! Tables for people, at most 80 columns wide.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

use crate::report::Row;
use crate::units::{show_count, show_short};

/// A rule below the header and one at the end, no others: many columns are to fit a terminal.
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

/// A time in microseconds; none is `-`.
pub(crate) fn micros(ns: Option<u64>) -> String {
    show_short(ns.map(|ns| ns as f64 / 1e3))
}

/// The columns of a bench's rows, which are printed one by one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    /// Whether rows of one name differ in what is in flight: then each says how many times the throughput of the first such
    /// row it has. With a cache there is no room for it.
    pub(crate) compares: bool,
    pub(crate) has_cache: bool,
    /// Whether operations return many entries: their number takes the place of the greatest latency.
    pub(crate) returns_many: bool,
}

/// A name that is wider has a line of its own.
const NAME_WIDTH: usize = 12;

/// Head and unit of each column, and its width with the space before it.
const COLUMNS: [(&str, &str, usize); 14] = [
    ("in", "flight", 7),
    ("", "ops/s", 6),
    ("p50", "us", 5),
    ("p99", "us", 5),
    ("p999", "us", 5),
    ("found", "/op", 6),
    ("read", "/op", 5),
    ("write", "/op", 6),
    ("cas", "/op", 5),
    ("msg", "/op", 5),
    ("byte", "/op", 5),
    ("trip", "/op", 5),
    ("hit", "%", 6),
    ("", "times", 6),
];

impl Columns {
    fn shown(self) -> impl Iterator<Item = (usize, (&'static str, &'static str, usize))> {
        let is_shown = move |index: &usize| match index {
            4 => !self.returns_many,
            5 => self.returns_many,
            12 => self.has_cache,
            13 => self.compares && !self.has_cache,
            _ => true,
        };
        COLUMNS.into_iter().enumerate().filter(move |(index, _)| is_shown(index))
    }

    /// The head, with the units.
    pub(crate) fn head(self) -> String {
        let line = |first: &str, pick: fn((&'static str, &'static str, usize)) -> &'static str| {
            let cells = self.shown().map(|(_, column)| format!("{:>1$}", pick(column), column.2));
            format!("{first:<NAME_WIDTH$}{}", cells.collect::<String>()).trim_end().to_owned()
        };
        let width: usize = NAME_WIDTH + self.shown().map(|(_, column)| column.2).sum::<usize>();
        format!("{}\n{}\n{}", line("", |c| c.0), line("workload", |c| c.1), "─".repeat(width))
    }

    /// A row. Times are microseconds.
    pub(crate) fn line(self, row: &Row) -> String {
        let cells = [
            row.shown("in_flight"),
            show_count(row.ops_per_second.unwrap_or(f64::NAN)),
            micros(row.p50_ns),
            micros(row.p99_ns),
            micros(row.p999_ns),
            show_short(row.results_per_op),
            show_short(row.reads_per_op),
            show_short(row.writes_per_op),
            show_short(row.atomics_per_op),
            show_short(row.two_sided_per_op),
            show_short(row.bytes_per_op),
            show_short(row.round_trips_per_op),
            digits(row.hit_ratio.map(|ratio| ratio * 100.0), 1),
            row.number("times").map_or_else(|| "-".to_owned(), |times| format!("{}x", show_short(Some(times)))),
        ];
        let name = &row.name;
        let mut line = if name.len() > NAME_WIDTH {
            format!("{name}\n{:NAME_WIDTH$}", "")
        } else {
            format!("{name:<NAME_WIDTH$}")
        };
        for (index, (_, _, width)) in self.shown() {
            line += &format!("{:>width$}", cells[index]);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::row;

    #[test]
    fn the_widest_rows_fit() {
        let mut row = row("insert-intensive", 4096, 2.0).with("times", 2000.0);
        row.ops_per_second = row.ops_per_second.map(|rate| rate * 123.4e6);
        (row.p50_ns, row.p99_ns, row.p999_ns) = (Some(123_456), Some(12_345_678), Some(59_999_999_999));
        (row.bytes_per_op, row.reads_per_op, row.two_sided_per_op) = (Some(123_456.0), Some(1e9), Some(12.3456));
        row.hit_ratio = Some(1.0);
        row.results_per_op = Some(123_456.0);
        for bits in 0..8 {
            let [compares, has_cache, returns_many] = [1, 2, 4].map(|bit| bits & bit != 0);
            let columns = Columns { compares, has_cache, returns_many };
            let text = format!("{}\n{}", columns.head(), columns.line(&row));
            let widths: Vec<usize> = text.lines().map(|line| line.chars().count()).collect();
            assert!(widths.iter().all(|&width| width <= 80), "\n{text}");
            // Columns stand below their heads.
            assert!(widths[1] <= widths[2] && widths[2] == widths[4], "\n{text}");
            assert_eq!(text.contains("times"), compares && !has_cache, "\n{text}");
            assert_eq!(text.contains("100.0"), has_cache, "\n{text}");
            assert_eq!((text.contains("found"), text.contains("p999")), (returns_many, !returns_many), "\n{text}");
            // No two cells run together.
            assert_eq!(text.lines().last().unwrap().split_whitespace().count(), columns.shown().count(), "\n{text}");
        }
    }
}
