//! What operations cost, and how rows say it.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Cluster, PROGRAM, Server, bench, bench_with_input, farlink, named, number, table_of};

#[test]
fn a_lookup_costs_one_read_a_level() {
    let said = bench("--json --keys 20000 --mix c --ops 10000 --in-flight 1,4").must_hold();
    let rows = said.json();
    let memory = named(&rows, "memory");
    assert_eq!((memory.len(), &memory[0]["after"], &memory[0]["entries"]), (1, &"load".into(), &20000.into()));
    let levels = number(memory[0], "levels");
    assert_eq!(levels, 3.0);
    assert!(number(memory[0], "leased_bytes_per_entry") >= number(memory[0], "structure_bytes_per_entry"));
    let lookups = named(&rows, "ycsb-c");
    assert_eq!([&lookups[0]["in_flight"], &lookups[1]["in_flight"]], [1, 4]);
    for row in lookups {
        assert_eq!((number(row, "reads_per_op"), number(row, "round_trips_per_op")), (levels, levels));
        assert_eq!((number(row, "writes_per_op"), number(row, "atomics_per_op")), (0.0, 0.0));
        assert_eq!((number(row, "bytes_per_op"), number(row, "ops")), (levels * 1024.0, 10000.0));
        assert!(number(row, "p50_ns") > 0.0 && number(row, "p999_ns") >= number(row, "p50_ns"));
    }
    let tree = named(&rows, "btree")[0];
    assert_eq!((&tree["ok"], &tree["entries"], &tree["held"]), (&Value::Bool(true), &20000.into(), &0.into()));
}

#[test]
fn phases_memory_and_checks_come_in_order() {
    let said = bench("--json --keys 1000 --mix a,c --ops 100 --in-flight 1,4 --processes 2 --rounds 1").must_hold();
    let rows = said.json();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let phases = "bulk-load memory ycsb-a ycsb-a ycsb-c ycsb-c remove-all-1 insert-all-1 memory";
    let checks = "btree entries keys-present inserts-new values scans";
    assert_eq!(names, format!("{phases} {checks}").split(' ').collect::<Vec<_>>());
    assert_eq!((&rows[3]["in_flight"], &rows[3]["ops"], &rows[3]["processes"]), (&4.into(), &100.into(), &2.into()));
}

#[test]
fn an_update_costs_one_atomic_and_three_words_more() {
    let said = bench("--json --keys 20000 --update 100 --workers 1 --ops 5000").must_hold();
    let rows = said.json();
    let row = named(&rows, "update100")[0];
    // The first of them makes rings for records.
    let is_about = |name: &str, expected: f64| {
        let found = number(row, name);
        assert!((expected..expected * 1.001 + 0.004).contains(&found), "{name}: {found}, not {expected}");
    };
    is_about("reads_per_op", 3.0);
    is_about("round_trips_per_op", 5.0);
    is_about("atomics_per_op", 1.0);
    is_about("writes_per_op", 3.0);
    is_about("bytes_per_op", 3.0 * 1024.0 + 4.0 * 8.0);
}

#[test]
fn every_mix_over_two_processes_on_a_nasty_fabric() {
    let said = bench(
        "--keys 8000 --processes 2 --workers 2 --in-flight 4 --ops 1000 --page-bytes 512 --nasty --rounds 1 \
         --mix a,b,c,d,e,f,insert-intensive --load insert",
    )
    .must_hold();
    for part in
        ["btree, one-sided: 2 memory servers, 2 x 2 workers, 8000 keys,", "insert-load", "ycsb-f", "after round 1"]
    {
        assert!(said.out.contains(part), "no `{part}` in: {}", said.out);
    }
    assert!(said.out.contains("check btree: ok (structure bench, entries "), "{}", said.out);
    assert!(said.errors.contains("step 1 of 11: load by inserts"), "{}", said.errors);
    assert!(table_of(&said.out).all(|line| line.chars().count() <= 80), "{}", said.out);
}

#[test]
fn the_slow_proof_and_a_bandwidth_limit() {
    let said =
        bench("--json --keys 5000 --mix c --ops 500 --validation lock-body-lock --bandwidth 1GB/s --latency 1us")
            .must_hold();
    let rows = said.json();
    let row = named(&rows, "ycsb-c")[0];
    let levels = number(named(&rows, "memory")[0], "levels");
    assert_eq!((number(row, "reads_per_op"), number(row, "round_trips_per_op")), (3.0 * levels, 3.0 * levels));
    assert!(number(row, "p50_ns") >= 3.0 * levels * 1000.0);
}

#[test]
fn rows_come_as_they_are_measured() {
    let mut child = Command::new(PROGRAM)
        .args([
            "bench",
            "--server-bytes",
            "16MiB",
            "--keys",
            "1k",
            "--mix",
            "c,a",
            "--seconds",
            "2s",
            "--warm-up",
            "10ms",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("ycsb-c")));
    // The other workload has two seconds to go.
    assert!(!Server(child).stop(libc::SIGINT).success());
    assert!(!lines.any(|line| line.starts_with("ycsb-a") || line.starts_with("check")));
}

const COST_AWARE: &str = "--access cached --policy cost-aware --server-threads 2 --cache 1% --latency 10us";

#[test]
fn every_access_mode_and_structure() {
    for (options, fits) in [
        ("--access coarse --processes 2", (0.0, 1.0)),
        ("--access hybrid --server-threads 2", (1.0, 1.0)),
        ("--access engine --policy always --cache 64KiB --placement one-server", (0.0, 0.5)),
        ("--access engine --policy never --cache 64KiB --server-threads 0 --admission always", (0.3, 0.0)),
        // What it tries to know it is shipped at least.
        (COST_AWARE, (0.0, 0.001)),
        ("--access adaptive --policy always", (0.0, 1.0)),
        ("--access adaptive --policy never", (3.0, 0.0)),
        // Two workers cannot keep four threads busy, however slow they are: nothing is kept from being shipped.
        ("--structure skiplist --access adaptive --policy back-off --server-threads 4", (0.0, 0.5)),
        ("--structure skiplist --access coarse", (0.0, 1.0)),
        ("--structure skiplist --access cached-inner --admission probability", (1.0, 0.0)),
        ("--structure skiplist --load insert --in-flight 4", (3.0, 0.0)),
    ] {
        // A page a key.
        let keys = if options.contains("skiplist") { 1500 } else { 10000 };
        let said = bench(&format!("--json --keys {keys} --ops 2000 --mix c,a {options}")).must_hold();
        let rows = said.json();
        let row = named(&rows, "ycsb-c")[0];
        let (reads, messages) = (number(row, "reads_per_op"), number(row, "two_sided_per_op"));
        assert!(reads >= fits.0 && messages >= fits.1 && (fits.1 > 0.0 || messages == 0.0), "{options}: {row}");
        assert!(rows.iter().filter(|row| row["kind"] == "check").count() == 6, "{options}: {}", said.out);
    }
}

#[test]
fn an_r_tree_in_every_access_mode() {
    let modes = ["one-sided", "cached", "cached-inner", "coarse", "hybrid", "engine", "adaptive"];
    for access in modes.map(|mode| format!("--access {mode}")).into_iter().chain([COST_AWARE.to_owned()]) {
        let options = format!("--structure rtree {access} --keys 8000 --ops 1000");
        let said = bench(&format!("--json {options} --mix search-large,mixed-large,point,nearest,move")).must_hold();
        let rows = said.json();
        assert!(rows.iter().filter(|row| row["kind"] == "check").count() == 7, "{options}: {}", said.out);
        assert!(number(named(&rows, "point")[0], "ops") >= 1000.0, "{options}: {}", said.out);
        let (nearest, moves) = (named(&rows, "nearest")[0], named(&rows, "move")[0]);
        assert_eq!(
            (number(nearest, "results_per_op"), number(moves, "missed_per_op")),
            (5.0, 0.0),
            "{nearest}\n{moves}"
        );
        // To another place, and back.
        let changes = number(moves, "writes_per_op") + number(moves, "two_sided_per_op");
        let is_owned = moves["access"] == "cached" || moves["access"] == "engine";
        assert!(is_owned || changes >= 2.0, "{moves}");
        let messages = number(named(&rows, "search-large")[0], "two_sided_per_op");
        assert!(access != COST_AWARE || messages > 0.0, "{options}: {}", said.out);
    }
    bench("--structure rtree --keys 5000 --ops 100 --load insert --rounds 1").must_hold();
    bench("--structure trie").must_fail_with(&["knows no structure `trie`", "btree, skiplist, rtree"]);
}

#[test]
fn a_mix_that_removes_says_what_it_missed() {
    let said = bench("--keys 1000 --read 50 --remove 50 --ops 4000").must_hold();
    assert!(said.out.contains("% of them found nothing: it had been removed"), "{}", said.out);
    let rows = bench("--json --keys 1000 --read 50 --remove 50 --ops 4000").must_hold().json();
    assert!((0.1..0.99).contains(&number(named(&rows, "read50-remove50")[0], "missed_per_op")));
}

/// Others have removed it, or it is lost: this run cannot know.
#[test]
fn a_run_that_removes_nothing_does_not_say_that_what_it_misses_was_removed() {
    let cluster = Cluster::start();
    let at = cluster.at();
    let keys: Vec<String> = (1..=3000).map(|key| format!("{key}\n")).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, keys.concat()).unwrap();
    let lookups = ["bench", "--connect", &at, "--keys-file", file.to_str().unwrap(), "--mix", "c"];
    let lookups = [&lookups[..], &["--distribution", "uniform", "--ops", "10000"]].concat();
    farlink(&lookups).must_hold();
    // None of those that are looked up before the run begins.
    let gone: Vec<String> = (502..592).step_by(3).map(|key| format!("del {key}\n")).collect();
    bench_with_input(&["--connect", &at, "--trace", "-"], &gone.concat()).must_hold();
    let said = farlink(&lookups);
    let note = "% of them found nothing, and this run removes nothing";
    assert!(said.out.contains(note) && !said.out.contains("had been removed"), "{}\n{}", said.out, said.errors);
    said.must_fail_with(&["keys-present"]);
}
