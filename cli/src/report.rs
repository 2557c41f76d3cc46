//! What a run says: measured rows, memory rows and checks, as JSON lines or for people.
//!
//! With `--json` every record is one JSON object a line, printed when it is known. For people, measured rows are
//! collected into one table, and memory rows and checks are plain lines. Field names are stable: scripts read them.

use std::io::{self, Write};

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::tally::{Counters, Tally};
use crate::units::{show_bytes, show_count};

/// What was varied, and what was held: part of every measured row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Varied {
    pub(crate) structure: String,
    pub(crate) access: String,
    /// Of each process; null without a cache.
    pub(crate) cache_bytes: Option<u64>,
    pub(crate) in_flight: u32,
    pub(crate) workers: u32,
    pub(crate) processes: u32,
    pub(crate) servers: u32,
    pub(crate) keys: u64,
    pub(crate) page_bytes: u32,
    pub(crate) latency_ns: u64,
    pub(crate) bandwidth_bytes_per_second: Option<u64>,
    pub(crate) nasty: bool,
    pub(crate) validation: String,
    pub(crate) load: String,
    pub(crate) distribution: String,
    pub(crate) theta: Option<f64>,
    pub(crate) scan_length: u32,
    pub(crate) seed: u64,
}

/// One measured phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MeasuredRow {
    pub(crate) name: String,
    pub(crate) ops: u64,
    pub(crate) seconds: f64,
    pub(crate) ops_per_second: f64,
    /// Null where operations are not timed one by one: in a bulk load.
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) p999_ns: Option<u64>,
    pub(crate) reads_per_op: f64,
    pub(crate) writes_per_op: f64,
    pub(crate) atomics_per_op: f64,
    pub(crate) two_sided_per_op: f64,
    pub(crate) bytes_per_op: f64,
    pub(crate) round_trips_per_op: f64,
    /// The share of page accesses that needed no remote read; like the four below, null without a cache.
    pub(crate) hit_ratio: Option<f64>,
    pub(crate) leaf_misses_per_op: Option<f64>,
    pub(crate) inner_misses_per_op: Option<f64>,
    /// Pages written because they left the cache; part of the writes.
    pub(crate) write_backs_per_op: Option<f64>,
    /// Pages written at the end of the phase; part of nothing else here.
    pub(crate) flushed_pages: Option<u64>,
    pub(crate) restarts_per_op: f64,
    #[serde(flatten)]
    pub(crate) varied: Varied,
}

impl MeasuredRow {
    /// A row from what all workers counted together in `seconds`.
    pub(crate) fn new(name: &str, seconds: f64, tally: &Tally, varied: Varied) -> Self {
        let ops = tally.outcomes.ops;
        let per_op = |count: u64| if ops == 0 { 0.0 } else { count as f64 / ops as f64 };
        let quantiles = tally.latency.quantiles();
        let timed = |quantile_ns| (tally.latency.len() > 0).then_some(quantile_ns);
        let has_cache = varied.cache_bytes.is_some();
        let Counters { reads, writes, atomics, two_sided, bytes, round_trips, restarts } = tally.counters;
        Self {
            name: name.to_owned(),
            ops,
            seconds,
            ops_per_second: if seconds > 0.0 { ops as f64 / seconds } else { 0.0 },
            p50_ns: timed(quantiles.p50_ns),
            p99_ns: timed(quantiles.p99_ns),
            p999_ns: timed(quantiles.p999_ns),
            reads_per_op: per_op(reads),
            writes_per_op: per_op(writes),
            atomics_per_op: per_op(atomics),
            two_sided_per_op: per_op(two_sided),
            bytes_per_op: per_op(bytes),
            round_trips_per_op: per_op(round_trips),
            // A bulk load looks up a few pages before it begins: that is no ratio to speak of.
            hit_ratio: tally.cache.hit_ratio().filter(|_| has_cache && tally.cache.lookups >= ops),
            leaf_misses_per_op: has_cache.then(|| per_op(tally.cache.leaf_misses)),
            inner_misses_per_op: has_cache.then(|| per_op(tally.cache.inner_misses)),
            write_backs_per_op: has_cache.then(|| per_op(tally.cache.write_backs)),
            flushed_pages: has_cache.then_some(tally.cache.flushed),
            restarts_per_op: per_op(restarts),
            varied,
        }
    }
}

/// How much remote memory the structure takes at some point of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct MemoryRow {
    pub(crate) name: String,
    /// After what: `load`, `round-1`, ...
    pub(crate) after: String,
    #[serde(flatten)]
    pub(crate) footprint: Footprint,
    /// Null without entries.
    pub(crate) leased_bytes_per_entry: Option<f64>,
    /// Null without entries.
    pub(crate) tree_bytes_per_entry: Option<f64>,
}

/// The size of the structure, and of the remote memory it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Footprint {
    pub(crate) entries: u64,
    pub(crate) levels: u64,
    /// Bytes of the chunks that compute servers ever leased, with the free pages in them. Of the whole cluster.
    pub(crate) leased_bytes: u64,
    /// Bytes of the structure's own pages.
    pub(crate) tree_bytes: u64,
}

impl MemoryRow {
    /// The row after `after`.
    pub(crate) fn new(after: &str, footprint: Footprint) -> Self {
        let per_entry = |bytes: u64| (footprint.entries > 0).then(|| bytes as f64 / footprint.entries as f64);
        Self {
            name: "memory".to_owned(),
            after: after.to_owned(),
            footprint,
            leased_bytes_per_entry: per_entry(footprint.leased_bytes),
            tree_bytes_per_entry: per_entry(footprint.tree_bytes),
        }
    }
}

/// One thing that had to hold.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct CheckRow {
    pub(crate) name: String,
    pub(crate) ok: bool,
    /// Why not; absent when it held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
    /// What was counted, in the order it was counted.
    #[serde(flatten, serialize_with = "fields")]
    pub(crate) counts: Vec<(String, Value)>,
}

impl CheckRow {
    /// A check that holds if there is no problem.
    pub(crate) fn new(name: &str, problem: Option<String>) -> Self {
        Self { name: name.to_owned(), ok: problem.is_none(), problem, counts: Vec::new() }
    }

    /// A check that two counts agree.
    pub(crate) fn equal(name: &str, expected: u64, found: u64) -> Self {
        let problem = (expected != found).then(|| format!("expected {expected}, found {found}"));
        Self::new(name, problem).count("expected", expected).count("found", found)
    }

    /// Adds something that was counted.
    pub(crate) fn count(mut self, name: &str, count: impl Into<Value>) -> Self {
        self.counts.push((name.to_owned(), count.into()));
        self
    }
}

/// Prints records to one output and remembers whether every check held.
#[derive(Debug)]
pub(crate) struct Reporter<W> {
    out: W,
    json: bool,
    rows: Vec<MeasuredRow>,
    failed_checks: Vec<String>,
}

impl<W: Write> Reporter<W> {
    /// A reporter that writes JSON lines, or text for people.
    pub(crate) fn new(out: W, json: bool) -> Self {
        Self { out, json, rows: Vec::new(), failed_checks: Vec::new() }
    }

    /// Whether records are JSON lines.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Takes a measured row: a JSON line at once, or a line of the table later.
    pub(crate) fn measured(&mut self, row: MeasuredRow) -> io::Result<()> {
        if self.json {
            return self.json_line(&row);
        }
        self.rows.push(row);
        Ok(())
    }

    /// Prints a line for people; with JSON, nothing.
    pub(crate) fn note(&mut self, line: &str) -> io::Result<()> {
        if self.json { Ok(()) } else { writeln!(self.out, "{line}") }
    }

    /// Prints the tree's height and remote memory per entry.
    pub(crate) fn memory(&mut self, row: &MemoryRow) -> io::Result<()> {
        if self.json {
            return self.json_line(row);
        }
        let amount = |bytes: u64, each: Option<f64>| {
            let each = each.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.2}"));
            format!("{} ({each} B/entry)", show_bytes(bytes))
        };
        let (after, Footprint { entries, levels, .. }) = (&row.after, row.footprint);
        let leased = amount(row.footprint.leased_bytes, row.leased_bytes_per_entry);
        let tree = amount(row.footprint.tree_bytes, row.tree_bytes_per_entry);
        writeln!(
            self.out,
            "after {after}: {entries} entries, {levels} levels; memory leased {leased}, in the tree {tree}"
        )
    }

    /// Prints the table of all measured rows so far, and forgets them.
    pub(crate) fn table(&mut self) -> io::Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        let table = crate::table::measured(&std::mem::take(&mut self.rows));
        writeln!(self.out, "{table}")
    }

    /// Prints a check.
    pub(crate) fn check(&mut self, row: &CheckRow) -> io::Result<()> {
        if !row.ok {
            self.failed_checks.push(row.name.clone());
        }
        if self.json {
            return self.json_line(row);
        }
        let counts: Vec<String> = row.counts.iter().map(|(name, count)| format!("{name} {}", plain(count))).collect();
        let verdict = if row.ok { "ok" } else { "FAILED" };
        write!(self.out, "check {}: {verdict}", row.name)?;
        if let Some(problem) = &row.problem {
            write!(self.out, ": {problem}")?;
        }
        if counts.is_empty() { writeln!(self.out) } else { writeln!(self.out, " ({})", counts.join(", ")) }
    }

    /// The names of the checks that did not hold.
    pub(crate) fn failed_checks(&self) -> &[String] {
        &self.failed_checks
    }

    fn json_line(&mut self, record: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, record)?;
        self.out.write_all(b"\n")?;
        // A reader of a pipe sees each record when it is known, not when the run ends.
        self.out.flush()
    }
}

fn fields<S: Serializer>(counts: &[(String, Value)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(counts.iter().map(|(name, count)| (name, count)))
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => show_count(number.as_f64().unwrap_or(f64::NAN)),
        other => other.to_string(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::tally::Outcomes;
    use serde_json::Map;

    pub(crate) fn varied(in_flight: u32) -> Varied {
        Varied {
            structure: "btree".into(),
            access: "one-sided".into(),
            cache_bytes: None,
            in_flight,
            workers: 2,
            processes: 1,
            servers: 2,
            keys: 1_000_000,
            page_bytes: 1024,
            latency_ns: 0,
            bandwidth_bytes_per_second: None,
            nasty: false,
            validation: "checksum".into(),
            load: "bulk".into(),
            distribution: "zipf".into(),
            theta: Some(0.99),
            scan_length: 100,
            seed: 1,
        }
    }

    pub(crate) fn row(name: &str, in_flight: u32, seconds: f64) -> MeasuredRow {
        let mut tally = Tally::new().unwrap();
        tally.outcomes = Outcomes { ops: 4, ..Outcomes::default() };
        tally.counters = Counters { reads: 8, bytes: 4096, round_trips: 9, ..Counters::default() };
        (1..=4).for_each(|ns| tally.latency.record(ns * 1000));
        MeasuredRow::new(name, seconds, &tally, varied(in_flight))
    }

    pub(crate) fn footprint(entries: u64) -> Footprint {
        Footprint { entries, levels: 2, leased_bytes: 20 * entries, tree_bytes: 18 * entries }
    }

    fn printed(json: bool, act: impl FnOnce(&mut Reporter<&mut Vec<u8>>)) -> String {
        let mut out = Vec::new();
        act(&mut Reporter::new(&mut out, json));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_rows_have_the_stable_fields() {
        let text = printed(true, |reporter| reporter.measured(row("ycsb-a", 16, 2.0)).unwrap());
        assert!(text.ends_with('\n') && text.lines().count() == 1);
        let object: Map<String, Value> = serde_json::from_str(&text).unwrap();
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
            "restarts_per_op",
            "access",
            "cache_bytes",
            "in_flight",
            "workers",
            "processes",
            "servers",
            "keys",
            "page_bytes",
            "latency_ns",
            "distribution",
            "theta",
        ] {
            assert!(object.contains_key(field), "{field}");
        }
        assert_eq!(object["hit_ratio"], Value::Null);
        assert_eq!(object["reads_per_op"], 2.0);
        assert_eq!(object["ops_per_second"], 2.0);
    }

    #[test]
    fn rows_with_a_cache() {
        let mut tally = Tally::new().unwrap();
        (tally.outcomes.ops, tally.cache.lookups, tally.cache.leaf_misses) = (4, 12, 3);
        let cached = |tally: &Tally| {
            let varied = Varied { cache_bytes: Some(1 << 20), ..varied(1) };
            MeasuredRow::new("ycsb-c", 1.0, tally, varied)
        };
        let row = cached(&tally);
        assert_eq!((row.hit_ratio, row.leaf_misses_per_op, row.flushed_pages), (Some(0.75), Some(0.75), Some(0)));
        tally.cache.lookups = 3;
        assert_eq!(cached(&tally).hit_ratio, None);
        let row = MeasuredRow::new("ycsb-c", 1.0, &tally, varied(1));
        assert_eq!((row.hit_ratio, row.write_backs_per_op), (None, None));
    }

    #[test]
    fn nothing_measured_is_zero_and_not_nan() {
        let row = MeasuredRow::new("load", 0.0, &Tally::new().unwrap(), varied(1));
        assert_eq!((row.ops_per_second, row.reads_per_op), (0.0, 0.0));
        assert!(MemoryRow::new("load", footprint(0)).leased_bytes_per_entry.is_none());
    }

    #[test]
    fn checks_for_people_and_scripts() {
        let held = CheckRow::new("btree", None).count("entries", 7u64).count("levels", 2u64);
        let failed = CheckRow::equal("entries", 5, 4);
        let print = |json| {
            printed(json, |reporter| {
                reporter.check(&held).unwrap();
                reporter.check(&failed).unwrap();
                assert_eq!(reporter.failed_checks(), ["entries"]);
            })
        };
        assert_eq!(
            print(false),
            "check btree: ok (entries 7, levels 2)\n\
             check entries: FAILED: expected 5, found 4 (expected 5, found 4)\n"
        );
        let json = print(true);
        let second: Value = serde_json::from_str(json.lines().nth(1).unwrap()).unwrap();
        assert_eq!((&second["ok"], &second["found"]), (&Value::Bool(false), &Value::from(4)));
        assert_eq!(json.lines().next().unwrap(), r#"{"name":"btree","ok":true,"entries":7,"levels":2}"#);
    }

    #[test]
    fn people_get_one_table_and_memory_lines() {
        let text = printed(false, |reporter| {
            reporter.memory(&MemoryRow::new("load", footprint(1000))).unwrap();
            reporter.measured(row("ycsb-a", 1, 2.0)).unwrap();
            reporter.measured(row("ycsb-b", 1, 2.0)).unwrap();
            reporter.table().unwrap();
            reporter.table().unwrap();
        });
        let expected = "after load: 1000 entries, 2 levels; memory leased 19.53 KiB (20.00 B/entry), \
                        in the tree 17.58 KiB (18.00 B/entry)\n";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(text.matches("ycsb-").count(), 2);
    }
}
