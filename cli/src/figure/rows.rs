//! The rows of a figure: what a paper reports, what was measured here, and what was computed, side by side. As JSON lines
//! or as one table.

use std::io::{self, Write};

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};
use serde::Serialize;

use super::optimum::Misses;
use super::population::Population;

/// Where a row's numbers come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Source {
    /// A paper's table, measured on the authors' machines.
    Paper,
    /// A paper's published program, measured at another time than this run.
    PublicCode,
    /// This run.
    Measured,
    /// A calculation.
    Computed,
}

/// What the rows of a run have in common; those of a paper have the paper's.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Setting {
    pub(crate) keys: u64,
    pub(crate) compute_servers: u64,
    /// Null where the source does not say.
    pub(crate) memory_servers: Option<u64>,
    pub(crate) theta: f64,
    pub(crate) page_bytes: u64,
    /// Null where the source does not say.
    pub(crate) seed: Option<u64>,
}

/// The cache of each compute server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CacheSize {
    pub(crate) cache_bytes: u64,
    /// Of the raw data, 16 bytes a key.
    pub(crate) cache_percent: f64,
}

/// One row. What its source does not say is null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) source: Source,
    pub(crate) access: String,
    pub(crate) mix: String,
    pub(crate) ops: Option<u64>,
    pub(crate) warm_up_ops: Option<u64>,
    pub(crate) seconds: Option<f64>,
    pub(crate) ops_per_second: Option<f64>,
    /// Of each compute server.
    pub(crate) in_flight: Option<u32>,
    /// Always null: a figure counts; `farlink bench` times operations one by one.
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) p999_ns: Option<u64>,
    pub(crate) reads_per_op: f64,
    pub(crate) writes_per_op: Option<f64>,
    pub(crate) atomics_per_op: Option<f64>,
    pub(crate) two_sided_per_op: Option<f64>,
    pub(crate) bytes_per_op: Option<f64>,
    pub(crate) round_trips_per_op: Option<f64>,
    /// The share of page accesses, at all levels, that needed no remote read.
    pub(crate) hit_ratio: Option<f64>,
    /// Leaves first.
    pub(crate) misses_by_level: Option<Vec<f64>>,
    /// Leaf misses, as a multiple of those that the best contents of a cache of as many bytes leave.
    pub(crate) leaf_misses_over_optimum: Option<f64>,
    /// Pages written because they left the cache.
    pub(crate) write_backs_per_op: Option<f64>,
    pub(crate) admission: Option<String>,
    /// Of each compute server.
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) cache_percent: Option<f64>,
    #[serde(flatten)]
    pub(crate) setting: Setting,
}

impl CacheSize {
    /// So many percent of the raw data of the keys.
    pub(crate) fn percent_of(population: &Population, cache_percent: f64) -> Self {
        const RAW_BYTES_PER_KEY: f64 = 16.0;
        let cache_bytes = (population.keys() as f64 * RAW_BYTES_PER_KEY * cache_percent / 100.0) as u64;
        Self { cache_bytes, cache_percent }
    }
}

impl Row {
    /// A row with nothing but reads.
    pub(crate) fn new(
        name: &str,
        source: Source,
        access: &str,
        mix: &str,
        reads_per_op: f64,
        setting: &Setting,
    ) -> Self {
        Self {
            name: name.to_owned(),
            source,
            access: access.to_owned(),
            mix: mix.to_owned(),
            ops: None,
            warm_up_ops: None,
            seconds: None,
            ops_per_second: None,
            in_flight: None,
            p50_ns: None,
            p99_ns: None,
            p999_ns: None,
            reads_per_op,
            writes_per_op: None,
            atomics_per_op: None,
            two_sided_per_op: None,
            bytes_per_op: None,
            round_trips_per_op: None,
            hit_ratio: None,
            misses_by_level: None,
            leaf_misses_over_optimum: None,
            write_backs_per_op: None,
            admission: None,
            cache_bytes: None,
            cache_percent: None,
            setting: setting.clone(),
        }
    }

    /// The row with a cache of this size.
    pub(crate) fn with_cache(mut self, cache: Option<CacheSize>) -> Self {
        self.cache_bytes = cache.map(|cache| cache.cache_bytes);
        self.cache_percent = cache.map(|cache| cache.cache_percent);
        self
    }

    /// The row with its leaf misses compared with the least.
    pub(crate) fn against(mut self, least: &Misses) -> Self {
        let leaf = self.misses_by_level.as_ref().and_then(|levels| levels.first().copied());
        let least = least.by_level.first().copied().filter(|misses| *misses > 0.0);
        self.leaf_misses_over_optimum = leaf.zip(least).map(|(leaf, least)| leaf / least);
        self
    }
}

/// Takes rows as they are known.
#[derive(Debug)]
pub(crate) struct Sink<W> {
    out: W,
    json: bool,
    rows: Vec<Row>,
}

impl<W: Write> Sink<W> {
    /// Rows go to `out`, as JSON lines or as one table at the end.
    pub(crate) fn new(out: W, json: bool) -> Self {
        Self { out, json, rows: Vec::new() }
    }

    /// Prints a line for people; with JSON, nothing.
    pub(crate) fn note(&mut self, line: &str) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{line}") }
    }

    /// Takes a row.
    pub(crate) fn row(&mut self, row: Row) -> io::Result<()> {
        if !self.json {
            self.rows.push(row);
            return Ok(());
        }
        serde_json::to_writer(&mut self.out, &row)?;
        self.out.write_all(b"\n")?;
        self.out.flush()
    }

    /// Prints the tables of the rows so far, and gives the output back.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.tables()?;
        Ok(self.out)
    }

    /// Prints a table of the rows so far for each mix, and forgets them.
    pub(crate) fn tables(&mut self) -> io::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        let mut mixes: Vec<&str> = Vec::new();
        for row in &rows {
            if !mixes.contains(&row.mix.as_str()) {
                mixes.push(&row.mix);
            }
        }
        for mix in mixes {
            let table = table(rows.iter().filter(|row| row.mix == mix));
            writeln!(self.out, "\n{mix}\n{table}")?;
        }
        Ok(())
    }
}

fn table<'a>(rows: impl Iterator<Item = &'a Row>) -> Table {
    let rule = LineStyle::none().fill('─').junction('─');
    let mut table = Table::new();
    table.load_style(TableStyle::new().header_separator(rule).bottom_border(rule)).set_header([
        "design",
        "from",
        "cache\n%",
        "reads\n/op",
        "writes\n/op",
        "atom.\n/op",
        "msgs\n/op",
        "bytes\n/op",
        "hit\nratio",
        "leaf\nmisses",
        "inner\nmisses",
        "leaf, of\nbest",
    ]);
    let some = |value: Option<f64>, digits| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"));
    for row in rows {
        let misses = row.misses_by_level.as_deref().and_then(<[f64]>::split_first);
        let source = match row.source {
            Source::Paper => "paper",
            Source::PublicCode => "public code",
            Source::Measured => "measured",
            Source::Computed => "computed",
        };
        table.add_row([
            row.name.clone(),
            source.to_owned(),
            row.cache_percent.map_or_else(|| "-".to_owned(), |percent| percent.to_string()),
            some(Some(row.reads_per_op), 3),
            some(row.writes_per_op, 3),
            some(row.atomics_per_op, 3),
            some(row.two_sided_per_op, 4),
            some(row.bytes_per_op, 0),
            some(row.hit_ratio, 3),
            some(misses.map(|(leaf, _)| *leaf), 3),
            some(misses.map(|(_, inner)| inner.iter().sum()), 3),
            some(row.leaf_misses_over_optimum, 2),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((u16::from(index > 0), 0));
        if index > 1 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Map, Value};

    pub(crate) fn setting() -> Setting {
        Setting {
            keys: 1000,
            compute_servers: 4,
            memory_servers: Some(4),
            theta: 0.99,
            page_bytes: 1024,
            seed: Some(1),
        }
    }

    fn rows() -> [Row; 3] {
        let row = |name, mix| Row::new(name, Source::Measured, "one-sided", mix, 5.0, &setting());
        let cache = CacheSize { cache_bytes: 1280, cache_percent: 8.0 };
        let mut cached = row("cached", "read-only").with_cache(Some(cache));
        cached.misses_by_level = Some(vec![0.5, 0.25, 0.125]);
        [row("fg", "read-only"), row("fg", "write-intensive"), cached]
    }

    fn printed(json: bool) -> String {
        let mut out = Vec::new();
        let mut sink = Sink::new(&mut out, json);
        sink.note("a note").unwrap();
        rows().into_iter().for_each(|row| sink.row(row).unwrap());
        sink.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_rows_have_the_stable_fields() {
        let text = printed(true);
        let lines: Vec<Map<String, Value>> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 3);
        for field in [
            "name",
            "ops",
            "seconds",
            "ops_per_second",
            "p50_ns",
            "p99_ns",
            "p999_ns",
            "reads_per_op",
            "writes_per_op",
            "atomics_per_op",
            "two_sided_per_op",
            "bytes_per_op",
            "round_trips_per_op",
            "hit_ratio",
            "misses_by_level",
            "leaf_misses_over_optimum",
            "write_backs_per_op",
            "in_flight",
            "access",
            "mix",
            "cache_bytes",
            "keys",
            "compute_servers",
        ] {
            assert!(lines[0].contains_key(field), "{field}");
        }
        assert_eq!((&lines[2]["cache_bytes"], &lines[2]["source"]), (&Value::from(1280), &Value::from("measured")));
    }

    #[test]
    fn each_mix_has_a_table_that_fits() {
        let text = printed(false);
        assert!(text.starts_with("a note\n"));
        assert!(text.lines().all(|line| line.chars().count() <= 120), "\n{text}");
        let at = |word| text.find(word).unwrap();
        assert!(at("cached") < at("write-intensive"), "\n{text}");
        assert_eq!(text.matches("reads").count(), 2, "\n{text}");
        assert!(text.contains("0.375"), "\n{text}");
    }
}
