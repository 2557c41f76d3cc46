//! What a run says: measured rows, memory rows and checks, as JSON lines or for people.
//!
//! With `--json` every record is one JSON object a line, printed when it is known, whose `kind` says what it is. For people,
//! a bench's rows come one by one, a figure's are collected into tables, and memory rows and checks are plain lines. Field
//! names are stable: scripts read them.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::RangeInclusive;

use anyhow::ensure;
use comfy_table::Table;
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::tally::{Counters, Tally};
use crate::units::{plural, show_bytes, show_count, show_short};

const LINE_WIDTH: usize = 80;

/// Named values, in the order in which they were added.
pub(crate) type Fields = Vec<(&'static str, Value)>;

/// One measured row, of a bench or of a figure. What was not measured is null.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
#[serde(tag = "kind", rename = "row")]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) ops: Option<u64>,
    pub(crate) seconds: Option<f64>,
    pub(crate) ops_per_second: Option<f64>,
    /// Null where operations are not timed one by one: in a bulk load.
    pub(crate) p50_ns: Option<u64>,
    pub(crate) p99_ns: Option<u64>,
    pub(crate) p999_ns: Option<u64>,
    pub(crate) reads_per_op: Option<f64>,
    pub(crate) writes_per_op: Option<f64>,
    pub(crate) atomics_per_op: Option<f64>,
    pub(crate) two_sided_per_op: Option<f64>,
    pub(crate) bytes_per_op: Option<f64>,
    pub(crate) round_trips_per_op: Option<f64>,
    pub(crate) restarts_per_op: Option<f64>,
    /// What the structure counts under names of its own.
    pub(crate) counts_per_op: Option<BTreeMap<String, f64>>,
    /// Entries that searches and scans returned.
    pub(crate) results_per_op: Option<f64>,
    /// Operations on loaded entries that found nothing, because others have removed them.
    pub(crate) missed_per_op: Option<f64>,
    /// The share of page accesses that needed no remote read (of a mapping cache: of words for which something was kept); like those
    /// below, null without a cache.
    pub(crate) hit_ratio: Option<f64>,
    pub(crate) leaf_misses_per_op: Option<f64>,
    pub(crate) inner_misses_per_op: Option<f64>,
    /// Leaves first.
    pub(crate) misses_by_level: Option<Vec<f64>>,
    /// Pages written because they left the cache; part of the writes.
    pub(crate) write_backs_per_op: Option<f64>,
    /// Pages written at the end of the phase; part of nothing else here.
    pub(crate) flushed_pages: Option<u64>,
    /// What was varied, and what was held.
    #[serde(flatten, serialize_with = "fields")]
    pub(crate) more: Fields,
}

impl Row {
    /// A row from what all workers counted together in `seconds`.
    pub(crate) fn measured(name: &str, seconds: f64, tally: &Tally, has_cache: bool) -> Self {
        let ops = tally.outcomes.ops;
        let share = |count: u64| if ops == 0 { 0.0 } else { count as f64 / ops as f64 };
        let per_op = |count: u64| Some(share(count));
        let cached = |count: u64| per_op(count).filter(|_| has_cache);
        let Counters { reads, writes, atomics, two_sided, bytes, round_trips, restarts, ref named } = tally.counters;
        let (cache, misses) = (&tally.cache, &tally.cache.misses);
        let levels = misses.0.iter().rposition(|misses| *misses > 0).map_or(1, |level| level + 1);
        Self {
            name: name.to_owned(),
            ops: Some(ops),
            seconds: Some(seconds),
            ops_per_second: Some(if seconds > 0.0 { ops as f64 / seconds } else { 0.0 }),
            p50_ns: tally.latency.quantile(0.5),
            p99_ns: tally.latency.quantile(0.99),
            p999_ns: tally.latency.quantile(0.999),
            reads_per_op: per_op(reads),
            writes_per_op: per_op(writes),
            atomics_per_op: per_op(atomics),
            two_sided_per_op: per_op(two_sided),
            bytes_per_op: per_op(bytes),
            round_trips_per_op: per_op(round_trips),
            restarts_per_op: per_op(restarts),
            counts_per_op: Some(named.0.iter().map(|(name, &count)| (name.clone(), share(count))).collect()),
            results_per_op: per_op(tally.outcomes.scanned),
            missed_per_op: per_op(tally.outcomes.missing + tally.outcomes.remove_missing),
            // A bulk load looks up a few pages before it begins: that is no ratio to speak of.
            hit_ratio: cache.hit_ratio().filter(|_| has_cache && cache.lookups >= ops),
            leaf_misses_per_op: cached(misses.leaf()),
            inner_misses_per_op: cached(misses.total() - misses.leaf()),
            misses_by_level: has_cache
                .then(|| misses.0[..levels].iter().filter_map(|misses| per_op(*misses)).collect()),
            write_backs_per_op: cached(cache.write_backs),
            flushed_pages: has_cache.then_some(cache.flushed),
            more: Vec::new(),
        }
    }

    /// What the structure has counted, as a person reads it; none if it has counted nothing.
    pub(crate) fn counted(&self) -> Option<String> {
        // Less would be shown as nothing.
        let counts = self.counts_per_op.iter().flatten().filter(|(_, count)| **count >= 0.005);
        let counts: Vec<String> = counts.map(|(name, &count)| format!("{name} {}", show_short(Some(count)))).collect();
        (!counts.is_empty()).then(|| counts.join(", "))
    }

    /// The same where misses are not told apart by level.
    pub(crate) fn without_levels(self) -> Self {
        Self { leaf_misses_per_op: None, inner_misses_per_op: None, misses_by_level: None, ..self }
    }

    /// Adds something that was varied or held.
    pub(crate) fn with(mut self, field: &'static str, value: impl Into<Value>) -> Self {
        self.more.push((field, value.into()));
        self
    }

    /// What was added, as a person reads it; nothing is `-`.
    pub(crate) fn shown(&self, field: &str) -> String {
        match self.more.iter().find(|(name, _)| *name == field) {
            None | Some((_, Value::Null)) => "-".to_owned(),
            Some((_, Value::String(text))) => text.clone(),
            Some((_, value)) => value.to_string(),
        }
    }

    /// What was added, if it is a number.
    pub(crate) fn number(&self, field: &str) -> Option<f64> {
        self.more.iter().find(|(name, _)| *name == field).and_then(|(_, value)| value.as_f64())
    }

    /// How many times as many operations a second as another row; not a number where one has none.
    pub(crate) fn times(&self, other: &Self) -> f64 {
        self.ops_per_second.unwrap_or(f64::NAN) / other.ops_per_second.unwrap_or(f64::NAN)
    }
}

/// How much remote memory the structure takes at some point of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename = "memory")]
pub(crate) struct MemoryRow {
    pub(crate) name: String,
    /// After what: `load`, `round-1`, ...
    pub(crate) after: String,
    #[serde(flatten)]
    pub(crate) footprint: Footprint,
    /// Null without entries.
    pub(crate) leased_bytes_per_entry: Option<f64>,
    /// Null without entries.
    pub(crate) structure_bytes_per_entry: Option<f64>,
}

/// The size of the structure, and of the remote memory it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Footprint {
    pub(crate) entries: u64,
    pub(crate) levels: u64,
    /// Bytes of the chunks that compute servers ever leased, with the free pages in them. Of the whole cluster.
    pub(crate) leased_bytes: u64,
    /// Bytes of the structure's own pages.
    pub(crate) structure_bytes: u64,
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
            structure_bytes_per_entry: per_entry(footprint.structure_bytes),
        }
    }
}

/// One thing that had to hold.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename = "check")]
pub(crate) struct CheckRow {
    pub(crate) name: String,
    pub(crate) ok: bool,
    /// Why not; absent when it held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
    /// What was counted, in the order it was counted.
    #[serde(flatten, serialize_with = "fields")]
    pub(crate) counts: Fields,
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

    /// A check that a ratio lies within bounds.
    pub(crate) fn within(name: &str, ratio: f64, bounds: RangeInclusive<f64>) -> Self {
        let problem =
            (!bounds.contains(&ratio)).then(|| match (ratio < *bounds.start(), *bounds.start(), *bounds.end()) {
                _ if !ratio.is_finite() => "nothing was counted that could be compared".to_owned(),
                (true, least, _) => format!("{ratio:.3}, not {least} at least"),
                (false, _, most) => format!("{ratio:.3}, not {most} at most"),
            });
        Self::new(name, problem).count("ratio", (ratio * 1000.0).round() / 1000.0)
    }

    /// Adds why it may not hold, if it does not.
    pub(crate) fn explained(mut self, why: &str) -> Self {
        self.problem = self.problem.map(|problem| format!("{problem}; {why}"));
        self
    }

    /// Adds something that was counted.
    pub(crate) fn count(mut self, name: &'static str, count: impl Into<Value>) -> Self {
        self.counts.push((name, count.into()));
        self
    }
}

/// Prints records to one output and remembers whether every check held.
#[derive(Debug)]
pub(crate) struct Reporter<W> {
    out: W,
    json: bool,
    rows: Vec<Row>,
    /// Whether the head of the table has been printed.
    has_head: bool,
    failed_checks: Vec<String>,
}

impl<W: Write> Reporter<W> {
    /// A reporter that writes JSON lines, or text for people.
    pub(crate) fn new(out: W, json: bool) -> Self {
        Self { out, json, rows: Vec::new(), has_head: false, failed_checks: Vec::new() }
    }

    /// Whether records are JSON lines.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Takes a measured row: a JSON line at once, or a line of the table later.
    pub(crate) fn row(&mut self, row: Row) -> io::Result<()> {
        if self.json {
            return self.json_line(&row);
        }
        self.rows.push(row);
        Ok(())
    }

    /// Prints a measured row at once: with this line, the next of a table whose head comes before the first.
    pub(crate) fn row_at_once(&mut self, row: &Row, head: &str, line: &str) -> io::Result<()> {
        if self.json {
            return self.json_line(row);
        }
        if !std::mem::replace(&mut self.has_head, true) {
            writeln!(self.out, "{head}")?;
        }
        writeln!(self.out, "{line}")?;
        self.out.flush()
    }

    /// Prints what has no other form: with JSON these fields.
    pub(crate) fn record(&mut self, kind: &'static str, fields: Fields, line: &str) -> io::Result<()> {
        if !self.json {
            return writeln!(self.out, "{line}");
        }
        let all: serde_json::Map<String, Value> =
            [("kind", kind.into())].into_iter().chain(fields).map(|(name, value)| (name.to_owned(), value)).collect();
        self.json_line(&all)
    }

    /// Prints a line for people; with JSON, nothing.
    pub(crate) fn note(&mut self, text: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        for line in text.split('\n') {
            match line.chars().count() <= LINE_WIDTH {
                true => writeln!(self.out, "{line}")?,
                false => writeln!(self.out, "{}", in_lines(&line.split(' ').map(str::to_owned).collect::<Vec<_>>()))?,
            }
        }
        Ok(())
    }

    /// Prints the structure's height and remote memory per entry.
    pub(crate) fn memory(&mut self, row: &MemoryRow) -> io::Result<()> {
        if self.json {
            return self.json_line(row);
        }
        let (after, Footprint { entries, levels, .. }) = (&row.after, row.footprint);
        let each = row.structure_bytes_per_entry.map_or_else(String::new, |bytes| format!(" ({bytes:.2} B/entry)"));
        writeln!(
            self.out,
            "after {after}: {}, {}, {}{each}\n  leased in the whole cluster: {}",
            plural(entries, "entry"),
            plural(levels, "level"),
            show_bytes(row.footprint.structure_bytes),
            show_bytes(row.footprint.leased_bytes),
        )
    }

    /// Prints a table of all rows so far under a title, if there are any, and forgets them.
    pub(crate) fn table(&mut self, title: &str, make: impl FnOnce(&[Row]) -> Table) -> io::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        if rows.is_empty() { Ok(()) } else { writeln!(self.out, "{title}{}", make(&rows)) }
    }

    /// Prints a check.
    pub(crate) fn check(&mut self, row: &CheckRow) -> io::Result<()> {
        if !row.ok {
            self.failed_checks.push(row.name.clone());
        }
        if self.json {
            return self.json_line(row);
        }
        let problem = row.problem.as_deref().unwrap_or_default();
        let verdict = if row.ok { "ok" } else { "FAILED:" };
        let text = format!("check {}: {verdict} {problem}", row.name);
        let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        for (index, (name, count)) in row.counts.iter().enumerate() {
            let first = if index == 0 { "(" } else { "" };
            let last = if index + 1 == row.counts.len() { ")" } else { "," };
            words.push(format!("{first}{name} {}{last}", plain(count)));
        }
        writeln!(self.out, "{}", in_lines(&words))
    }

    /// An error that names the checks that did not hold, if there are any.
    pub(crate) fn all_held(&self) -> anyhow::Result<()> {
        ensure!(self.failed_checks.is_empty(), "failed: {}", self.failed_checks.join(", "));
        Ok(())
    }

    fn json_line(&mut self, record: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut self.out, record)?;
        self.out.write_all(b"\n")?;
        // A reader of a pipe sees each record when it is known, not when the run ends.
        self.out.flush()
    }
}

/// Words in lines of 80 columns at most, if no word is longer.
fn in_lines(words: &[String]) -> String {
    let (mut text, mut width) = (String::new(), 0);
    for word in words {
        let length = word.chars().count();
        let space = match width {
            0 => "",
            _ if width + 1 + length <= LINE_WIDTH => " ",
            _ => "\n  ",
        };
        width = if space.starts_with('\n') { 2 + length } else { width + space.len() + length };
        text += space;
        text += word;
    }
    text
}

fn fields<S: Serializer>(fields: &Fields, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(fields.iter().map(|(name, value)| (name, value)))
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
    use crate::subject::Outcomes;
    use serde_json::Map;

    pub(crate) fn row(name: &str, in_flight: u32, seconds: f64) -> Row {
        let mut tally = Tally { outcomes: Outcomes { ops: 4, ..Outcomes::default() }, ..Tally::default() };
        tally.counters = Counters { reads: 8, bytes: 4096, round_trips: 9, ..Counters::default() };
        (1..=4).for_each(|ns| tally.latency.record(ns * 1000));
        Row::measured(name, seconds, &tally, false).with("in_flight", in_flight)
    }

    pub(crate) fn footprint(entries: u64) -> Footprint {
        Footprint { entries, levels: 2, leased_bytes: 20 * entries, structure_bytes: 18 * entries }
    }

    fn printed(json: bool, act: impl FnOnce(&mut Reporter<&mut Vec<u8>>)) -> String {
        let mut out = Vec::new();
        act(&mut Reporter::new(&mut out, json));
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_rows_have_the_stable_fields() {
        let text = printed(true, |reporter| reporter.row(row("ycsb-a", 16, 2.0)).unwrap());
        assert!(text.ends_with('\n') && text.lines().count() == 1);
        let object: Map<String, Value> = serde_json::from_str(&text).unwrap();
        let fields = "kind name ops seconds ops_per_second p50_ns p99_ns p999_ns reads_per_op writes_per_op atomics_per_op \
                      two_sided_per_op bytes_per_op round_trips_per_op hit_ratio restarts_per_op \
                      counts_per_op results_per_op in_flight";
        for field in fields.split(' ') {
            assert!(object.contains_key(field), "{field}");
        }
        assert_eq!((&object["hit_ratio"], &object["reads_per_op"]), (&Value::Null, &2.0.into()));
        assert_eq!(object["ops_per_second"], 2.0);
    }

    #[test]
    fn rows_with_a_cache() {
        let mut tally = Tally { outcomes: Outcomes { ops: 4, ..Outcomes::default() }, ..Tally::default() };
        (tally.cache.lookups, tally.cache.misses.0[0]) = (12, 3);
        let row = Row::measured("ycsb-c", 1.0, &tally, true);
        assert_eq!((row.hit_ratio, row.leaf_misses_per_op, row.flushed_pages), (Some(0.75), Some(0.75), Some(0)));
        tally.cache.lookups = 3;
        assert_eq!(Row::measured("ycsb-c", 1.0, &tally, true).hit_ratio, None);
        let row = Row::measured("ycsb-c", 1.0, &tally, false);
        assert_eq!((row.hit_ratio, row.write_backs_per_op), (None, None));
    }

    #[test]
    fn nothing_measured_is_zero_and_not_nan() {
        let row = Row::measured("load", 0.0, &Tally::default(), false);
        assert_eq!((row.ops_per_second, row.reads_per_op), (Some(0.0), Some(0.0)));
        assert!(MemoryRow::new("load", footprint(0)).leased_bytes_per_entry.is_none());
    }

    #[test]
    fn checks_fit_a_terminal() {
        let counts = ["structure", "entries", "levels", "pages", "problems", "leaked", "held", "lost"];
        let held = counts.iter().fold(CheckRow::new("btree", None), |row, name| row.count(name, 1_000_000_000u64));
        let text = printed(false, |reporter| reporter.check(&held).unwrap());
        assert!(
            text.starts_with("check btree: ok (structure 1000000000, ") && text.ends_with(" 1000000000)\n"),
            "{text}"
        );
        assert_eq!(text.lines().map(str::len).max(), Some(77), "{text}");
    }

    #[test]
    fn checks_for_people_and_scripts() {
        let held = CheckRow::new("btree", None).count("entries", 7u64).count("levels", 2u64);
        let failed = CheckRow::equal("entries", 5, 4);
        let print = |json| {
            printed(json, |reporter| {
                reporter.check(&held).unwrap();
                reporter.check(&failed).unwrap();
                assert_eq!(reporter.all_held().unwrap_err().to_string(), "failed: entries");
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
        assert_eq!(json.lines().next().unwrap(), r#"{"kind":"check","name":"btree","ok":true,"entries":7,"levels":2}"#);
    }

    #[test]
    fn people_get_rows_at_once_and_memory_lines() {
        let text = printed(false, |reporter| {
            reporter.memory(&MemoryRow::new("load", footprint(1000))).unwrap();
            reporter.row_at_once(&row("ycsb-a", 1, 2.0), "ops/s", "ycsb-a 2").unwrap();
            reporter.row_at_once(&row("ycsb-b", 1, 2.0), "ops/s", "ycsb-b 2").unwrap();
        });
        let expected = "after load: 1000 entries, 2 levels, 17.58 KiB (18.00 B/entry)\n  \
                        leased in the whole cluster: 19.53 KiB\n";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!((text.matches("ycsb-").count(), text.matches("ops/s").count()), (2, 1), "{text}");
    }

    #[test]
    fn records_say_their_kind() {
        let print = |json| {
            printed(json, |reporter| reporter.record("answer", vec![("key", 5.into())], "get 5 -> none").unwrap())
        };
        assert_eq!(print(false), "get 5 -> none\n");
        assert_eq!(
            serde_json::from_str::<Value>(&print(true)).unwrap(),
            serde_json::json!({"kind": "answer", "key": 5})
        );
    }
}
