//! `farlink bench` beside what a READ takes in the same guest, in rounds.
//!
//! Operations a second are an emulator's, on a machine that others use, too. So each round measures a READ of 8 B by perftest
//! first, and says how many operations are done in its time.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::perftest::{THEIRS, percentile, typical_us};

/// It wants the variables `rounds` and `ops`, and the cases of `programs.sh` in a file.
const SCRIPT: &str = include_str!("bench.sh");

/// DEX's public code in such a guest: lookups a second with a cache of 8% and one in flight, and a READ's time there.
const DEX: (f64, f64) = (47e3, 25.0);

/// What the guest is to run, after what makes the cases.
pub(super) fn script(rounds: u32, ops: u64) -> String {
    format!("rounds={rounds}\nops={ops}\n{THEIRS}\n{SCRIPT}")
}

/// What is measured for a number of operations in flight: a value for each round.
#[derive(Debug, Default)]
struct Column {
    per_second: Vec<f64>,
    per_read: Vec<f64>,
}

/// Prints the table.
pub(super) fn report(results: &Path, rounds: u32) -> Result<()> {
    let mut times_us = Vec::new();
    let [mut one, mut many] = [Column::default(), Column::default()];
    let mut counts = None;
    println!("{:<8} {:>12}   {:^18}   {:^18}", "", "READ of 8 B", "1 in flight", "16 in flight");
    let column = format!("{:>8} {:>9}", "ops/s", "ops/READ");
    println!("{:<8} {:>12}   {column}   {column}", "round", "us, perftest");
    for round in 1..=rounds {
        let read = |name: &str| {
            let path = results.join(format!("{round}.{name}"));
            fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
        };
        let (time_us, rows) = (typical_us(&read("read_8")?)?, rows(&read("bench")?)?);
        for (column, in_flight) in [(&mut one, 1), (&mut many, 16)] {
            let row = rows.iter().find(|row| row["in_flight"].as_u64() == Some(in_flight));
            let row = row.with_context(|| format!("the bench has no row for {in_flight} in flight"))?;
            let per_second = number(row, "ops_per_second")?;
            column.per_second.push(per_second);
            column.per_read.push(per_second * time_us / 1e6);
            counts = Some((number(row, "reads_per_op")?, number(row, "bytes_per_op")?));
        }
        times_us.push(time_us);
        print_row(&round.to_string(), time_us, [&one, &many].map(last));
    }
    let middle = |column: &Column| Some((percentile(&column.per_second, 50), percentile(&column.per_read, 50)));
    print_row("median", percentile(&times_us, 50), [middle(&one), middle(&many)]);
    let (per_second, time_us) = DEX;
    print_row("DEX", time_us, [Some((per_second, per_second * time_us / 1e6)), None]);
    let (reads, bytes) = counts.context("there was no round")?;
    println!("an operation: {reads:.2} READs, {bytes:.0} B; DEX: its public code in such a guest, on another day");
    Ok(())
}

fn last(column: &Column) -> Option<(f64, f64)> {
    column.per_second.last().copied().zip(column.per_read.last().copied())
}

fn print_row(what: &str, time_us: f64, columns: [Option<(f64, f64)>; 2]) {
    let cell = |cell: Option<(f64, f64)>| match cell {
        Some((per_second, per_read)) => format!("{:>7.1}k {per_read:>9.2}", per_second / 1e3),
        None => format!("{:>8} {:>9}", "-", "-"),
    };
    println!("{what:<8} {time_us:>12.1}   {}   {}", cell(columns[0]), cell(columns[1]));
}

fn number(row: &Value, name: &str) -> Result<f64> {
    row[name].as_f64().with_context(|| format!("a row of the bench has no {name}"))
}

/// The bench's rows of YCSB C; its checks must have passed.
fn rows(text: &str) -> Result<Vec<Value>> {
    let parse = |line: &str| serde_json::from_str(line).with_context(|| format!("{line:?} is no row of a bench"));
    let rows = text.lines().filter(|line| line.starts_with('{')).map(parse).collect::<Result<Vec<Value>>>()?;
    let checks: Vec<&Value> = rows.iter().filter(|row| row["ok"].is_boolean()).collect();
    ensure!(
        !checks.is_empty() && checks.iter().all(|row| row["ok"] == true),
        "the bench has not passed its checks: {text}"
    );
    Ok(rows.into_iter().filter(|row| row["name"] == "ycsb-c").collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BENCH: &str = "{\"name\":\"bulk-load\",\"in_flight\":1,\"ops_per_second\":9.0}\n\
                         {\"name\":\"ycsb-c\",\"in_flight\":1,\"ops_per_second\":20000.0,\"reads_per_op\":0.5,\"bytes_per_op\":512.0}\n\
                         {\"name\":\"ycsb-c\",\"in_flight\":16,\"ops_per_second\":60000.0,\"reads_per_op\":0.5,\"bytes_per_op\":512.0}\n\
                         {\"name\":\"btree\",\"ok\":true}\n";
    const READ: &str = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
                        8 1000 24.02 226.03 25.00 25.89 7.97 58.17 226.03\n";

    #[test]
    fn a_bench_is_understood() {
        let rows = rows(BENCH).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(number(&rows[1], "ops_per_second").unwrap(), 60000.0);
        assert!(number(&rows[1], "other").is_err());
        for broken in ["", "{\"name\":\"btree\",\"ok\":false}", "{"] {
            assert!(super::rows(broken).is_err());
        }
    }

    #[test]
    fn a_round_that_is_missing_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("1.bench"), BENCH).unwrap();
        assert!(report(dir.path(), 1).is_err());
        fs::write(dir.path().join("1.read_8"), READ).unwrap();
        report(dir.path(), 1).unwrap();
        assert!(report(dir.path(), 2).is_err() && report(dir.path(), 0).is_err());
    }
}
