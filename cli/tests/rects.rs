//! Rectangles from files, as a user meets them: what is loaded, what is refused, and what is checked.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlink");

/// Whether a bench held, what it said, and its errors.
fn bench(args: &str, input: &str) -> (bool, String, String) {
    let structure: &[&str] = if args.contains("--structure") { &[] } else { &["--structure", "rtree"] };
    let mut child = Command::new(PROGRAM)
        .args(["bench", "--server-bytes", "32MiB"])
        .args(structure)
        .args(args.split_whitespace())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // One that refuses its options reads nothing.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn holds(args: &str, input: &str) -> Vec<Value> {
    let (ok, out, errors) = bench(&format!("--json {args}"), input);
    assert!(ok, "{args}: {out}\n{errors}");
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn row<'a>(rows: &'a [Value], name: &str) -> &'a Value {
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("no {name} in {rows:?}"))
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("no number {field} in {row}"))
}

/// Rectangles in two places far from the unit square, dense in one and sparse in the other.
fn text(count: u64) -> String {
    let mut text = "west,south,east,north,id\n".to_owned();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    for number in 0..count {
        let (at, size) = if number % 4 == 0 { (-50_000.0, 40_000.0) } else { (1000.0, 500.0) };
        let (x, y) = (at + size * random(), at + size * random());
        writeln!(text, "{x},{y},{},{},{}", x + 3.0 * random(), y + 3.0 * random(), number * 7).unwrap();
    }
    text
}

fn written(folder: &Path, name: &str, content: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn window_counts_of_a_file_equal_brute_force() {
    let folder = tempfile::tempdir().unwrap();
    let file = written(folder.path(), "rects.csv", &text(5000));
    for options in [
        "--access cached-inner --processes 2",
        "--insert-order given --rounds 1",
        "--insert-order rows --processes 2",
        "--access coarse",
    ] {
        let options = format!("--rects-file {file} --ops 400 --mix search-large,mixed-power,point {options}");
        let rows = holds(&options, "");
        let (windows, search) = (row(&rows, "windows"), row(&rows, "search-large"));
        assert_eq!((&windows["ok"], number(row(&rows, "memory"), "entries")), (&true.into(), 5000.0), "{options}");
        assert!(number(windows, "searches") >= 128.0 && number(windows, "returned") > 1000.0, "{windows}");
        assert!(number(row(&rows, "point"), "results_per_op") >= 1.0, "{options}");
        assert!(number(search, "results_per_op") >= 0.0 && search["keys"] == 5000, "{search}");
        let order = if options.contains("rows") { "rows".into() } else { search["insert_order"].clone() };
        assert_eq!(search["insert_order"], order, "{search}");
    }
}

/// As many as a data set has that people use.
#[test]
fn a_large_file_is_loaded_and_answers_equal_brute_force() {
    const RECTS: u64 = 200_000;
    let folder = tempfile::tempdir().unwrap();
    let file = written(folder.path(), "rects.csv", &text(RECTS));
    let rows = holds(&format!("--rects-file {file} --ops 400 --mix search-large,point,nearest"), "");
    let windows = row(&rows, "windows");
    assert_eq!((&windows["ok"], number(row(&rows, "memory"), "entries")), (&true.into(), RECTS as f64), "{windows}");
    assert!(number(windows, "searches") >= 128.0 && number(windows, "returned") > 10_000.0, "{windows}");
    for (name, least) in [("search-large", 0.0), ("point", 1.0), ("nearest", 5.0)] {
        let row = row(&rows, name);
        assert!(number(row, "results_per_op") >= least && row["keys"] == RECTS, "{row}");
        assert!(["reads_per_op", "bytes_per_op", "round_trips_per_op"].iter().all(|field| number(row, field) > 1.0));
    }
}

/// Each is where it was when the run ends, also if many tasks move few.
#[test]
fn what_is_moved_comes_back() {
    for options in ["--keys 40 --in-flight 16", "--keys 3000 --access cached --processes 2 --workers 1"] {
        let rows = holds(&format!("--ops 3000 --mix move,nearest {options}"), "");
        let (windows, present) = (row(&rows, "windows"), row(&rows, "keys-present"));
        assert!(windows["ok"] == true && present["missing"] == 0, "{options}: {rows:?}");
        // Of the others a task has had another's in hand.
        let found = number(present, "found") + number(present, "latest_missing");
        assert!(number(present, "found") > 3500.0 && found == 6000.0, "{options}: {present}");
        assert!(number(row(&rows, "nearest"), "results_per_op") == 5.0, "{rows:?}");
    }
}

/// Windows are drawn over the rectangles' bounding box, and their edges are shares of it.
#[test]
fn searches_are_where_the_rectangles_are() {
    let grid = (0..10_000).fold(String::new(), |mut text, at| {
        let (x, y) = (1e6 + f64::from(at % 100), -3e4 + f64::from(at / 100));
        writeln!(text, "{x},{y},{},{}", x + 1.0, y + 1.0).unwrap();
        text
    });
    let rows = holds("--rects-file - --ops 2000 --mix search-large,search-small", &grid);
    // A window of 1% of the width meets two columns or three, and as many rows.
    let found = |name| number(row(&rows, name), "results_per_op");
    assert!((2.0..9.0).contains(&found("search-large")), "{rows:?}");
    assert!((1.0..2.0).contains(&found("search-small")), "{rows:?}");
    for name in ["search-large", "search-small"] {
        let row = row(&rows, name);
        assert!(["reads_per_op", "bytes_per_op", "round_trips_per_op"].iter().all(|field| number(row, field) > 1.0));
    }
}

#[test]
fn malformed_files_are_refused_and_nothing_is_stored() {
    let folder = tempfile::tempdir().unwrap();
    let file = |content: &str| written(folder.path(), "rects.csv", content);
    for (content, says) in [
        ("0,0,1,1\n0,0,NaN,1\n", "line 2: x2 is NaN"),
        ("0,0,1,1\n\n0,0,1,-inf\n", "line 3: y2 is infinite"),
        ("x1,y1,x2,y2\n2,0,1,1\n", "line 2: x1 is 2, above x2, 1"),
        ("0,0,1\n", "line 1: it has 3 fields"),
        ("0,0,1,1,one\n", "line 1: its id: `one` is not an unsigned integer"),
        ("0,0,1,x\n0,0\n", "line 1: y2 is `x`, not a number; line 2: it has 2 fields"),
        ("", "it holds no rectangles"),
    ] {
        let path = file(content);
        let (ok, out, errors) = bench(&format!("--rects-file {path}"), "");
        assert!(!ok && out.is_empty(), "{content}: {out}");
        assert!(errors.contains(&format!("the rectangles file {path}: {says}")), "{content}: {errors}");
        assert!(!errors.contains("panicked"), "{errors}");
    }
    let refused = |args: &str, says: &str| {
        let (ok, out, errors) = bench(args, "");
        assert!(!ok && out.is_empty() && errors.contains(says), "{args}: {out}{errors}");
    };
    refused("--rects-file /nowhere/rects", "cannot read the rectangles file /nowhere/rects");
    let sound = file("0,0,1,1\n");
    refused(&format!("--structure btree --rects-file {sound}"), "leave out --rects-file");
    refused(&format!("--keys-file {sound}"), "leave out --keys-file");
    refused("--structure btree --insert-order rows", "leave out --insert-order");
    refused("--load bulk --insert-order rows", "an order of inserts");
}

#[test]
fn tables_fit_a_terminal_and_say_what_searches_found() {
    for options in ["", "--in-flight 1,4", "--access cached-inner --in-flight 1,4"] {
        let (ok, out, errors) = bench(&format!("--keys 3000 --ops 300 {options}"), "");
        assert!(ok, "{out}\n{errors}");
        let table: Vec<&str> = out.lines().filter(|line| !line.starts_with("check ")).collect();
        assert!(table.iter().all(|line| line.chars().count() <= 80), "{out}");
        let workloads: BTreeSet<&str> = table.iter().filter_map(|line| line.split_whitespace().next()).collect();
        assert!(["search-power", "mixed-large", "point"].iter().all(|name| workloads.contains(name)), "{out}");
        assert!(out.contains(" found ") && !out.contains("p999") && out.contains("check windows: ok"), "{out}");
    }
}
