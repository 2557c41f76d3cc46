//! Keys from files and pipes, and traces.

use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{PROGRAM, SMALL, Said, bench, bench_with_input, named, number};

#[test]
fn a_trace_answers_line_by_line() {
    let trace =
        "put 5 7\nput 5 8\n# note\n\nget 5\nget 6\nput 18446744073709551615 1\nscan 0 9\ndel 5\ndel 5\nscan 0 9\n";
    let said = bench_with_input(&[&SMALL[..], &["--trace", "-"]].concat(), trace).must_hold();
    let expected = [
        "put 5 7 -> new",
        "put 5 8 -> replaced 7",
        "get 5 -> 8",
        "get 6 -> none",
        "put 18446744073709551615 1 -> new",
        "scan 0 9 -> 5=8 18446744073709551615=1",
        "del 5 -> removed 8",
        "del 5 -> none",
        "scan 0 9 -> 18446744073709551615=1",
    ];
    assert_eq!(said.out.lines().collect::<Vec<_>>(), expected);
    assert!(said.errors.contains("\ntrace "), "{}", said.errors);
    assert!(said.errors.contains("check btree: ok (structure bench, entries 1,"), "{}", said.errors);
}

#[test]
fn a_malformed_trace_applies_nothing() {
    let said = bench_with_input(&["--trace", "-"], "put 1 1\nput 2\n");
    assert_eq!(said.out, "");
    said.must_fail_with(&["nothing was applied: standard input: line 2: `put` is written `put K V`"]);
}

#[test]
fn keys_come_from_files() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let sosd: Vec<u8> = [3u64, 10, 20, 30].iter().flat_map(|word| word.to_le_bytes()).collect();
    let files = [write("sosd", &sosd), write("text", b"20\n10\n30\n10\n")];
    for file in &files {
        let args = [&SMALL[..], &["--keys-file", file, "--trace", "-"]].concat();
        let said = bench_with_input(&args, "scan 0 9\nget 20\n").must_hold();
        let keys: Vec<&str> = said.out.lines().next().unwrap().split([' ', '=']).skip(4).step_by(2).collect();
        assert_eq!(keys, ["10", "20", "30"], "{}", said.out);
    }
    let said = bench(&format!("--json --mix c --ops 100 --keys-file {}", files[1])).must_hold();
    assert!(said.errors.contains("1 duplicate key dropped, 3 left"), "{}", said.errors);
    for (file, says) in [
        (write("line", b"1\ntwo\n"), "line 2: `two` is not"),
        (write("cut", &sosd[..20]), "is truncated"),
        (write("empty", b""), "holds no keys"),
        ("/nowhere/keys".to_owned(), "cannot read the keys file /nowhere/keys"),
    ] {
        bench(&format!("--keys-file {file}")).must_fail_with(&[says]);
    }
}

#[test]
fn a_trace_is_counted_as_it_is_replayed() {
    let args = [&SMALL[..], &["--trace", "-", "--json", "--window", "3", "--seed", "9"]].concat();
    let rows = bench_with_input(&args, "put 5 7\nput 6 7\nscan 0 9\nget 1\n").must_hold().json();
    let row = named(&rows, "trace")[0];
    assert_eq!((number(row, "results_per_op"), &row["missed_per_op"]), (0.5, &Value::Null), "{row}");
    let by = ["workers", "processes", "in_flight", "window", "seed"].map(|field| number(row, field));
    assert_eq!(by, [1.0, 1.0, 1.0, 3.0, 9.0], "{row}");
    // Nothing is loaded, and nothing drawn.
    let nothing = ["load", "distribution", "theta", "scan_length"].map(|field| &row[field]);
    assert_eq!(nothing, [&Value::Null; 4], "{row}");
}

#[test]
fn keys_come_through_pipes() {
    let keys = "20\n10\n30\n";
    let said = bench_with_input(&["--server-bytes", "16MiB", "--keys-file", "-", "--ops", "100", "--mix", "c"], keys);
    assert!(said.must_hold().out.contains("3 keys"));
    let script = format!("{PROGRAM} bench --server-bytes 16MiB --keys-file <(echo 7) --ops 100 --mix c --processes 2");
    let said: Said = Command::new("bash").args(["-c", &script]).stdin(Stdio::null()).output().unwrap().into();
    assert!(said.must_hold().out.contains("1 key,"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, keys).unwrap();
    let said: Said = Command::new(PROGRAM)
        .args(["bench", "--server-bytes", "16MiB", "--keys-file", "/dev/stdin", "--ops", "100", "--mix", "c"])
        .stdin(std::fs::File::open(&file).unwrap())
        .output()
        .unwrap()
        .into();
    assert!(said.must_hold().out.contains("3 keys"));
}

#[test]
fn a_trace_through_a_cache_as_json() {
    let args = [&SMALL[..], &["--trace", "-", "--json", "--access", "cached"]].concat();
    let rows = bench_with_input(&args, "put 5 7\nget 5\nscan 0 9\ndel 6\n").must_hold().json();
    let answers: Vec<&Value> = rows.iter().filter(|row| row["kind"] == "answer").collect();
    assert_eq!((answers.len(), &answers[1]["value"], &answers[3]["before"]), (4, &7.into(), &Value::Null));
    assert_eq!(answers[2]["entries"], serde_json::json!([[5, 7]]));
    let row = named(&rows, "trace")[0];
    assert_eq!((number(row, "ops"), &row["access"], number(row, "atomics_per_op")), (4.0, &"cached".into(), 0.0));
    assert!(number(row, "flushed_pages") > 0.0, "{row}");
    assert_eq!((&named(&rows, "btree")[0]["ok"], number(named(&rows, "btree")[0], "entries")), (&true.into(), 1.0));
}
