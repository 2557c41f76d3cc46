//! The program as a user meets it: its output, its exit status, its errors.

mod beside;
mod repartition;
mod servers;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;

use farlink_offload::Remote;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::ptr::ServerId;
use farlink_structures::btree::{BTree, BTreeOptions, PlacementPolicy};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_farlink");
const SMALL: [&str; 2] = ["--server-bytes", "16MiB"];

/// What a run said, as text.
struct Said {
    ok: bool,
    out: String,
    errors: String,
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { ok: output.status.success(), out: text(output.stdout), errors: text(output.stderr) }
    }
}

impl Said {
    fn must_hold(self) -> Self {
        assert!(self.ok, "{}\n{}", self.out, self.errors);
        self
    }

    #[track_caller]
    fn must_fail_with(self, parts: &[&str]) {
        assert!(!self.ok, "{}", self.out);
        for part in parts {
            assert!(self.errors.contains(part), "no `{part}` in: {}", self.errors);
        }
        assert!(!self.errors.contains("panicked"), "{}", self.errors);
    }

    fn json(&self) -> Vec<Value> {
        self.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// What is not a check.
fn table_of(out: &str) -> impl Iterator<Item = &str> {
    out.lines().filter(|line| !line.starts_with("check "))
}

fn farlink(args: &[&str]) -> Said {
    Command::new(PROGRAM).args(args).stdin(Stdio::null()).output().unwrap().into()
}

fn bench(args: &str) -> Said {
    let args: Vec<&str> = ["bench"].into_iter().chain(SMALL).chain(args.split_whitespace()).collect();
    farlink(&args)
}

fn bench_with_input(args: &[&str], input: &str) -> Said {
    let mut child = Command::new(PROGRAM)
        .arg("bench")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap().into()
}

fn named<'a>(rows: &'a [Value], name: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["name"] == name).collect()
}

fn number(row: &Value, field: &str) -> f64 {
    row[field].as_f64().unwrap_or_else(|| panic!("no number {field} in {row}"))
}

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
    // The first of them enters the process as a writer.
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
fn a_cache_of_its_own_spares_reads_and_atomics() {
    let said =
        bench("--json --keys 20000 --access cached --cache 512KiB --mix c,a --ops 20000 --in-flight 4").must_hold();
    let rows = said.json();
    for name in ["ycsb-c", "ycsb-a"] {
        let row = named(&rows, name)[0];
        assert_eq!((&row["access"], &row["cache_bytes"]), (&"cached".into(), &(512 << 10).into()));
        // All but the leaves are cached, and of those the hot ones.
        assert!(number(row, "reads_per_op") < 0.5 && number(row, "hit_ratio") > 0.8, "{row}");
        assert_eq!((number(row, "inner_misses_per_op"), number(row, "atomics_per_op")), (0.0, 0.0));
    }
    // The tree that is checked is the one in remote memory.
    assert!(number(named(&rows, "bulk-load")[0], "flushed_pages") > 0.0);
    assert!(number(named(&rows, "ycsb-a")[0], "flushed_pages") > 0.0);
    assert_eq!(number(named(&rows, "ycsb-c")[0], "flushed_pages"), 0.0);
    assert_eq!(named(&rows, "btree")[0]["ok"], true);
}

/// Each process owns a third of the keys, and draws from all: two thirds of the operations are others' to do.
#[test]
fn several_processes_own_a_structure() {
    let said = bench(
        "--json --keys 20000 --access cached --cache 512KiB --processes 3 --workers 1 --in-flight 4 --ops 6000 \
         --mix read-only,insert-intensive,scan-intensive --distribution uniform",
    )
    .must_hold();
    let rows = said.json();
    for name in ["read-only", "insert-intensive", "scan-intensive"] {
        let row = named(&rows, name)[0];
        let messages = number(row, "two_sided_per_op");
        assert!((0.6..0.75).contains(&messages), "{row}");
        assert!(number(row, "hit_ratio") > 0.5, "{row}");
    }
    assert!(number(named(&rows, "insert-intensive")[0], "flushed_pages") > 0.0);
    assert!(number(named(&rows, "read-only")[0], "atomics_per_op") < 0.01);
    assert_eq!(named(&rows, "btree")[0]["ok"], true);
    bench("--keys 20000 --access engine --processes 2 --workers 1 --ops 2000 --mix write-intensive").must_hold();
}

/// Where a structure cannot be owned in part, each has one of its own, which together are one.
#[test]
fn several_processes_own_a_part_each() {
    let options = "--json --keys 8000 --access cached --processes 3 --workers 1 --ops 1500";
    let rows = bench(&format!("{options} --structure rtree --mix search-large,mixed-large,point")).must_hold().json();
    // A search asks both others, an insert the one that has it.
    let messages = |rows, mix| number(named(rows, mix)[0], "two_sided_per_op");
    for (mix, expected) in [("search-large", 2.0..2.05), ("mixed-large", 1.8..1.95), ("point", 2.0..2.05)] {
        assert!(expected.contains(&messages(&rows, mix)), "{mix}: {} messages", messages(&rows, mix));
    }
    assert_eq!(rows.iter().filter(|row| row["kind"] == "check").count(), 7);
    let rows = bench(&format!("{options} --structure skiplist --mix c,e --distribution uniform")).must_hold().json();
    let said = messages(&rows, "ycsb-c");
    assert!((0.6..0.75).contains(&said), "{said} messages");
}

#[test]
fn every_mix_through_a_small_cache() {
    let said = bench(
        "--keys 10000 --access cached --cache 192KiB --workers 3 --in-flight 4 --ops 1000 --page-bytes 512 --nasty \
         --rounds 1 --mix a,b,c,d,e,f,insert-intensive --load insert",
    )
    .must_hold();
    for part in ["btree, cached: 2 memory servers, 3 workers", "cache of 192.00 KiB", "after round 1", "hit"] {
        assert!(said.out.contains(part), "no `{part}` in: {}", said.out);
    }
    assert!(table_of(&said.out).all(|line| line.chars().count() <= 80), "{}", said.out);
}

/// Hits are those of all its operations.
#[test]
fn a_mapping_cache_has_a_hit_ratio() {
    let options = "--structure bwtree --access cached-mapping --keys 5000 --cache 1MiB --ops 5000 --in-flight 2 --json";
    let rows = bench(&format!("{options} --mix c --distribution uniform")).must_hold().json();
    let row = named(&rows, "ycsb-c")[0];
    assert!((0.5..1.0).contains(&number(row, "hit_ratio")) && row["admission"].is_null(), "{row}");
}

/// Operations that memory servers carry out, and an owner's, outlive whoever asked for them as far as they were promised to.
#[test]
fn chaos_loses_nothing_that_was_acknowledged() {
    for (structure, access) in [("btree", "coarse"), ("btree", "cached"), ("bwtree", "one-sided")] {
        let options =
            ["chaos", "--kills", "3", "--keys", "300", "--structure", structure, "--access", access, "--json"];
        let said = farlink(&options);
        let rows = said.json();
        let check = |name: &str| named(&rows, name)[0]["ok"] == true;
        assert!(check("without-kills") && check("acknowledged") && check("memory"), "{access}: {}", said.out);
        let told = rows.iter().find(|row| row["kind"] == "chaos").unwrap();
        assert!(number(told, "kills") == 3.0 && number(told, "answers") > 3.0, "{told}");
    }
    let several = ["chaos", "--kills", "4", "--keys", "1000", "--access", "cached", "--processes", "3", "--json"];
    farlink(&several).must_fail_with(&["several owners", "--durability logged"]);
    let said = farlink(&[&several[..], &["--durability", "logged"]].concat()).must_hold();
    let rows = said.json();
    let operations = named(&rows, "operations")[0];
    assert!(operations["failed"] == 0 && number(operations, "lost_with_owners") > 0.0, "{operations}");
    farlink(&["chaos", "--structure", "rtree"]).must_fail_with(&["chaos is for ordered maps"]);
}

#[test]
fn the_smallest_cache_is_loaded_through_and_refuses_what_it_cannot_run() {
    bench("--access cached --cache 64KiB --page-bytes 4096 --keys 20000 --mix c --ops 100").must_hold();
    let said = bench("--access cached --cache 64KiB --keys 2000 --workers 8 --in-flight 1000 --mix a --ops 100");
    said.must_fail_with(&["--cache 65536 has room for 64 pages", "8000 operations in flight"]);
}

#[test]
fn processes_share_a_tree_through_caches_of_inner_pages() {
    let said = bench(
        "--json --keys 20000 --access cached-inner --processes 2 --in-flight 4 --ops 2000 --nasty --rounds 1 \
         --mix c,a,d,e,f,insert-intensive",
    )
    .must_hold();
    let rows = said.json();
    let row = named(&rows, "ycsb-c")[0];
    assert_eq!((&row["access"], &row["flushed_pages"]), (&"cached-inner".into(), &0.into()));
    // A leaf is read each time, past the cache.
    assert!((1.0..1.2).contains(&number(row, "reads_per_op")), "{row}");
    assert!((0.6..0.67).contains(&number(row, "hit_ratio")), "{row}");
    assert!(named(&rows, "ycsb-a")[0]["atomics_per_op"].as_f64().unwrap() > 0.4);
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

/// A memory server as a process of its own.
struct Server(Child);

impl Server {
    fn start(dir: &Path, server: usize) -> Self {
        Self::start_with(dir, server, &[])
    }

    fn start_with(dir: &Path, server: usize, more: &[&str]) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["serve", "--bytes", "8MiB", "--servers", "2", "--server"])
            .arg(server.to_string())
            .arg("--dir")
            .arg(dir)
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("farlink server {server} ready\n"));
        Self(child)
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: kill touches no memory; the child has not been waited for, so its number is its own.
        assert_eq!(unsafe { libc::kill(self.0.id() as libc::pid_t, signal) }, 0);
    }

    fn stop(mut self, signal: libc::c_int) -> ExitStatus {
        self.signal(signal);
        self.0.wait().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn servers_with_threads_carry_out_operations() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let servers = [Server::start_with(&dir, 0, &[]), Server::start_with(&dir, 1, &["--threads", "2"])];
    let fabric = Arc::new(MemFabric::open(&dir, MemOptions::default()).unwrap());
    let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    let (root, placement) = (ServerId::new(1), PlacementPolicy::OneServer);
    worker.block_on(async {
        let tree =
            BTree::create(&worker, "t", BTreeOptions { root, placement, ..BTreeOptions::default() }).await.unwrap();
        let sent = BTree::over(Remote::new(&worker, tree.structure().clone()));
        // The first change enters it as a writer.
        assert!(sent.insert(0, !0).await.unwrap());
        let before = worker.counters();
        for key in 1..1000 {
            assert!(sent.insert(key, !key).await.unwrap());
        }
        assert_eq!(sent.get(500).await.unwrap(), Some(!500));
        let cost = worker.counters() - before;
        assert_eq!((cost.atomics, cost.writes), (0, 0), "{cost:?}");
        assert_eq!(tree.len().await.unwrap(), 1000);
    });
    drop((worker, compute));
    for server in servers {
        assert!(server.stop(libc::SIGTERM).success());
    }
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let said = farlink(&["check", "--free-leaked", "--connect", dir.to_str().unwrap()]).must_hold();
    assert!(said.out.contains("0 leaked pages of `"), "{}", said.out);
}

#[test]
fn a_cluster_outlives_its_users_and_its_servers() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let at = dir.to_str().unwrap();
    let servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    assert_eq!(farlink(&["check", "--connect", at]).must_hold().out, "there are no structures in this cluster\n");

    let args = ["bench", "--connect", at, "--tree", "t", "--keys", "2000", "--mix", "d,e", "--ops", "2000", "--json"];
    let first = farlink(&args).must_hold().json();
    assert_eq!(named(&first, "bulk-load").len(), 1);
    let second = farlink(&args).must_hold().json();
    assert_eq!(named(&second, "bulk-load").len(), 0);
    assert_eq!(named(&second, "memory")[0]["after"], "earlier runs");
    assert_eq!(named(&second, "ycsb-d")[0]["servers"], 2);
    assert!(number(named(&second, "btree")[0], "entries") > number(named(&first, "btree")[0], "entries"));
    let more = farlink(&["bench", "--connect", at, "--tree", "t", "--keys", "200000"]);
    more.must_fail_with(&["the structure `t`: it is not empty and lacks key"]);

    let said = bench_with_input(&["--connect", at, "--tree", "other", "--trace", "-"], "put 1 2").must_hold();
    assert_eq!(said.out, "put 1 2 -> new\n");
    let said = farlink(&["check", "--connect", at]).must_hold();
    let firsts = said.out.lines().filter(|line| line.starts_with("check "));
    let starts: Vec<&str> = firsts.filter_map(|line| line.split(", levels").next()).collect();
    let entries = number(named(&second, "btree")[0], "entries");
    assert_eq!(
        starts,
        ["check btree: ok (structure other, entries 1", &format!("check btree: ok (structure t, entries {entries}")]
    );
    farlink(&["check", "--connect", at, "--tree", "x"]).must_fail_with(&["no structure named \"x\"", "other"]);
    farlink(&["serve", "--dir", at, "--servers", "2"]).must_fail_with(&["memory server 0", "is already running"]);

    for (server, signal) in servers.into_iter().zip([libc::SIGTERM, libc::SIGINT]) {
        assert!(server.stop(signal).success());
    }
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let said = bench_with_input(&["--connect", at, "--tree", "other", "--trace", "-"], "get 1").must_hold();
    assert_eq!(said.out, "get 1 -> 2\n");
}

#[test]
fn what_is_missing_or_damaged_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let at = dir.to_str().unwrap();
    let check = || farlink(&["check", "--connect", at, "--wait", "0"]);
    check().must_fail_with(&["no farlink cluster at", "start its memory servers with"]);
    let zero = Server::start(&dir, 0);
    check().must_fail_with(&["memory server 1 is not running", "--server 1 --servers 2`"]);
    let one = Server::start(&dir, 1);
    farlink(&["bench", "--connect", at, "--keys", "2000", "--mix", "c", "--ops", "100", "--json"]).must_hold();
    check().must_hold();

    // Behind the running servers' back: the start of a superblock, and a page of the tree.
    let file = dir.join("server-1.mem");
    let pristine = std::fs::read(&file).unwrap();
    let spoil = |offset: usize, byte: u8| {
        use std::os::unix::fs::FileExt as _;
        std::fs::OpenOptions::new().write(true).open(&file).unwrap().write_at(&[byte], offset as u64).unwrap();
    };
    for (offset, says) in [(64, "the magic number is"), (72, "format version"), (96, "check word does not fit")] {
        spoil(offset, pristine[offset] ^ 0x40);
        check().must_fail_with(&["memory server 1", says]);
        spoil(offset, pristine[offset]);
    }
    let page =
        (0..pristine.len()).step_by(1024).rfind(|at| pristine[*at..][..64].iter().filter(|b| **b != 0).count() > 30);
    let word = page.unwrap() + 512;
    spoil(word, pristine[word] ^ 1);
    let said = check();
    assert!(said.out.contains("check btree: FAILED: page 1:") && said.out.contains("is corrupt"), "{}", said.out);
    said.must_fail_with(&["failed: btree"]);

    assert!(zero.stop(libc::SIGTERM).success() && one.stop(libc::SIGTERM).success());
    let serve = || farlink(&["serve", "--dir", at, "--server", "1", "--servers", "2"]);
    spoil(64, 0);
    serve().must_fail_with(&["memory server 1: the magic number is"]);
    spoil(64, pristine[64]);
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(4 << 20).unwrap();
    serve().must_fail_with(&["memory server 1 maps 4194304 bytes", "its superblock says 8388608"]);
}

#[test]
fn a_cause_is_printed_once() {
    let said = farlink(&["serve", "--dir", "/dev/null/cluster", "--server", "0"]);
    assert!(!said.ok);
    assert_eq!(said.errors.matches("os error").count(), 1, "{}", said.errors);
    assert!(said.errors.contains("/dev/null/cluster"), "{}", said.errors);
}

#[test]
fn a_stopped_bench_leaves_a_sound_tree() {
    let said = check_of_a_stopped_bench("one-sided", "a", libc::SIGTERM);
    assert!(said.out.contains("entries 10000,") && said.out.contains("held 0"), "{}", said.out);
}

#[test]
fn a_stopped_bench_writes_what_its_cache_holds() {
    // A terminal that is closed tells all processes.
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        let said = check_of_a_stopped_bench("cached", "insert-intensive", signal);
        assert!(said.out.contains("problems 0") && said.out.contains("held 0"), "{}", said.out);
    }
}

/// The numbers of a process's children.
fn children_of(process: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    children.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// One stop is enough, and what was answered is told.
#[test]
fn a_stopped_trace_ends_after_an_operation() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let (at, trace) = (dir.to_str().unwrap(), folder.path().join("trace"));
    std::fs::write(&trace, "put 1 1\n".repeat(200_000)).unwrap();
    let mut child = Command::new(PROGRAM)
        .args(["bench", "--connect", at, "--latency", "50us", "--access", "cached-inner", "--trace"])
        .arg(&trace)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(answers.next().unwrap().unwrap(), "put 1 1 -> new");
    // SAFETY: kill touches no memory; the child has not been waited for, so its number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) }, 0);
    let answered = 1 + answers.map_while(Result::ok).count();
    let said: Said = child.wait_with_output().unwrap().into();
    let next = format!("operation {}, `put 1 1`, and what comes after were not begun", answered + 1);
    said.must_fail_with(&["stopped by SIGTERM", &next]);
    farlink(&["check", "--connect", at]).must_hold();
}

#[test]
fn a_trace_is_counted_as_it_is_replayed() {
    let args = [&SMALL[..], &["--trace", "-", "--json", "--window", "3", "--seed", "9"]].concat();
    let rows = bench_with_input(&args, "put 5 7\nput 6 7\nscan 0 9\nget 1\n").must_hold().json();
    let row = named(&rows, "trace")[0];
    assert_eq!((number(row, "results_per_op"), &row["missed_per_op"]), (0.5, &Value::Null), "{row}");
    let by = ["workers", "processes", "in_flight", "window", "seed"].map(|field| number(row, field));
    assert_eq!(by, [1.0, 1.0, 1.0, 3.0, 9.0], "{row}");
}

/// Where nobody answers, nobody is killed: it would wait for ever.
#[test]
fn a_chaos_whose_memory_server_is_gone_says_so_and_ends() {
    let mut chaos = Command::new(PROGRAM)
        .args(["chaos", "--kills", "1000000", "--keys", "300", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let of_kind = |kind: &str| {
        let runs = |child: &u32| {
            std::fs::read(format!("/proc/{child}/cmdline"))
                .is_ok_and(|words| words.split(|byte| *byte == 0).any(|word| word == kind.as_bytes()))
        };
        children_of(chaos.id()).into_iter().find(runs)
    };
    while of_kind("chaos-process").is_none() {
        std::thread::yield_now();
    }
    let server = of_kind("serve").unwrap();
    // SAFETY: kill touches no memory. It is a child of this test's chaos, which has no reason yet to wait for it.
    assert_eq!(unsafe { libc::kill(server as libc::pid_t, libc::SIGKILL) }, 0);
    let mut errors = String::new();
    std::io::Read::read_to_string(&mut chaos.stderr.take().unwrap(), &mut errors).unwrap();
    assert!(!chaos.wait().unwrap().success() && errors.contains("memory server"), "{errors}");
    farlink(&["chaos", "--kills", "0"]).must_fail_with(&["0 is not in 1.."]);
}

fn check_of_a_stopped_bench(access: &str, mix: &str, signal: libc::c_int) -> Said {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let at = dir.to_str().unwrap();
    let mut child = Command::new(PROGRAM)
        .args(["bench", "--connect", at, "--keys", "10000", "--seconds", "60", "--in-flight", "8"])
        .args(["--access", access, "--mix", mix])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let runs = |line: String| line.contains("step 2 of 3: ") && !line.contains("preparing");
    assert!(lines.any(|line| runs(line.unwrap())));
    std::thread::sleep(std::time::Duration::from_millis(300));
    if signal == libc::SIGHUP {
        for process in children_of(child.id()) {
            // SAFETY: kill touches no memory. The bench waits for its processes only once they are told to end.
            assert_eq!(unsafe { libc::kill(process as libc::pid_t, signal) }, 0);
        }
    }
    assert_eq!(Server(child).stop(signal).code(), Some(128 + signal));
    // The compute process has written its cache and left the cluster: the bench has waited for it.
    assert_eq!(std::fs::read_dir(dir.join("owners")).unwrap().count(), 0);
    farlink(&["check", "--connect", at]).must_hold()
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

#[test]
fn every_access_mode_and_structure() {
    for (options, fits) in [
        ("--access coarse --processes 2", (0.0, 1.0)),
        ("--access hybrid --server-threads 2", (1.0, 1.0)),
        ("--access engine --policy always --cache 64KiB --placement one-server", (0.0, 0.5)),
        ("--access engine --policy never --cache 64KiB --server-threads 0 --admission always", (0.3, 0.0)),
        ("--access adaptive --policy always", (0.0, 1.0)),
        ("--access adaptive --policy never", (3.0, 0.0)),
        ("--structure skiplist --access adaptive --policy back-off", (0.0, 0.5)),
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
    for access in ["one-sided", "cached", "cached-inner", "coarse", "hybrid", "engine", "adaptive"] {
        let options = format!("--structure rtree --access {access} --keys 8000 --ops 1000");
        let said = bench(&format!("--json {options} --mix search-large,mixed-large,point")).must_hold();
        let rows = said.json();
        assert!(rows.iter().filter(|row| row["kind"] == "check").count() == 7, "{options}: {}", said.out);
        assert!(number(named(&rows, "point")[0], "ops") >= 1000.0, "{options}: {}", said.out);
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
    assert_eq!((&named(&rows, "btree")[0]["ok"], number(named(&rows, "btree")[0], "entries")), (&true.into(), 1.0));
}

#[test]
fn what_is_there_is_taken_as_it_is_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let at = dir.to_str().unwrap();
    // The check begins before the servers do.
    let early = Command::new(PROGRAM)
        .args(["check", "--connect", at, "--wait", "30s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let _zero = Server::start(&dir, 0);
    std::thread::sleep(std::time::Duration::from_millis(300));
    let _one = Server::start(&dir, 1);
    Said::from(early.wait_with_output().unwrap()).must_hold();
    let bench = |more: &[&str]| {
        farlink(&[&["bench", "--connect", at, "--keys", "2k", "--ops", "100", "--mix", "c"], more].concat())
    };
    bench(&["--page-bytes", "512"]).must_hold();
    assert!(bench(&[]).must_hold().out.contains("pages of 512 B"));
    bench(&["--page-bytes", "1KiB"]).must_fail_with(&["with pages of 512 bytes and not 1024", "--name"]);
    bench(&["--placement", "leaves"]).must_fail_with(&["placed as round-robin and not leaves"]);
    bench(&["--seed", "2"]).must_fail_with(&["lacks key", "--seed"]);
    bench(&["--structure", "skiplist"]).must_fail_with(&["btree", "skiplist"]);
    bench(&["--access", "coarse"]).must_fail_with(&["memory server"]);
    let said = farlink(&["drop", "--connect", at, "bench"]).must_hold();
    assert!(said.out.starts_with("dropped bench: "), "{}", said.out);
    farlink(&["drop", "--connect", at, "bench"]).must_fail_with(&["no structure named \"bench\""]);
}

#[cfg(not(feature = "verbs"))]
#[test]
fn without_rdma_the_program_says_how_to_build_it() {
    for args in [
        &["devices"][..],
        &["serve", "--fabric", "verbs"],
        &["check", "--connect", "verbs://127.0.0.1:7471", "--secret-file", "/dev/null"],
    ] {
        farlink(args).must_fail_with(&["built without RDMA", "--features verbs"]);
    }
}

#[cfg(feature = "verbs")]
mod over_rdma {
    use super::*;

    /// A memory server, which is killed with this.
    struct Server {
        process: Child,
        address: String,
        /// What it printed before it was ready.
        said: Vec<String>,
    }

    impl Server {
        fn start(args: &[&str]) -> Self {
            let mut process = Command::new(PROGRAM)
                .args(["serve", "--fabric", "verbs", "--bytes", "32MiB", "--listen", "127.0.0.1:0"])
                .args(args)
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = Vec::new();
            for line in BufReader::new(process.stdout.take().unwrap()).lines() {
                said.push(line.unwrap());
                if said[said.len() - 1].ends_with(" ready") {
                    break;
                }
            }
            let address = said.iter().find_map(|line| line.split_once("verbs://")).expect("it listens somewhere").1;
            Self { address: address.to_owned(), process, said }
        }

        fn kill(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    fn has_device() -> bool {
        let has = farlink(&["devices", "--json"]).out.contains(r#""state":"active""#);
        let required = std::env::var_os("FARLINK_REQUIRE_VERBS").is_some_and(|value| value == "1");
        assert!(has || !required, "FARLINK_REQUIRE_VERBS is 1, and there is no RDMA device with an active port");
        if !has {
            println!("skipped: there is no RDMA device with an active port (`farlink devices`)");
        }
        has
    }

    #[test]
    fn two_servers_a_bench_and_a_check() {
        if !has_device() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let write = |name: &str, secret: &str| {
            use std::os::unix::fs::OpenOptionsExt as _;
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path(name)).unwrap();
            file.write_all(secret.as_bytes()).unwrap();
        };
        write("secret", "two servers and their secret\n");
        write("wrong", "another secret of good length\n");
        let secret = path("secret");
        let servers: Vec<Server> = ["0", "1"]
            .map(|server| Server::start(&["--server", server, "--servers", "2", "--secret-file", &secret]))
            .into();
        let connect = format!("verbs://{},{}", servers[1].address, servers[0].address);
        let at = ["--connect", &connect, "--secret-file", &secret];
        let run = |args: &[&str]| {
            let all: Vec<&str> = args[..1].iter().chain(&at).chain(&args[1..]).copied().collect();
            farlink(&all)
        };
        let args = ["bench", "--keys", "5000", "--ops", "2000", "--mix", "a", "--in-flight", "1,8", "--json"];
        let rows = run(&args).must_hold().json();
        let measured = rows.iter().find(|row| row["name"] == "ycsb-a").unwrap();
        assert!(
            measured["reads_per_op"].as_f64().unwrap() >= 1.0 && measured["atomics_per_op"].as_f64().unwrap() > 0.5
        );
        assert!(rows.iter().filter(|row| row.get("ok").is_some()).all(|row| row["ok"] == true));
        run(&["bench", "--keys", "5000", "--ops", "2000", "--mix", "c", "--access", "cached", "--cache", "8%"])
            .must_hold();
        assert!(run(&["check"]).must_hold().out.contains("check btree: ok"));
        farlink(&["check", "--connect", &connect, "--secret-file", &path("wrong")]).must_fail_with(&["another secret"]);
        let one = format!("verbs://{}", servers[0].address);
        farlink(&["check", "--connect", &one, "--secret-file", &secret]).must_fail_with(&["2 memory servers"]);
        run(&["bench", "--latency", "2us"]).must_fail_with(&["imitate a network"]);
    }

    #[test]
    fn a_server_without_a_secret_makes_one_and_tells_it() {
        if !has_device() {
            return;
        }
        let server = Server::start(&[]);
        let (_, secret) = server.said[0].split_once("FARLINK_SECRET=").unwrap();
        let connect = format!("verbs://{}", server.address);
        let check = |secret: Option<&str>| -> Said {
            let mut command = Command::new(PROGRAM);
            command.args(["check", "--connect", &connect]).env_remove("FARLINK_SECRET");
            command.envs(secret.map(|secret| ("FARLINK_SECRET", secret))).output().unwrap().into()
        };
        assert_eq!(check(Some(secret)).must_hold().out, "there are no structures in this cluster\n");
        check(None).must_fail_with(&["secret is missing", "FARLINK_SECRET"]);
        check(Some("short")).must_fail_with(&["5 bytes"]);
    }

    #[test]
    fn a_bench_whose_server_is_killed_says_so_and_ends() {
        if !has_device() {
            return;
        }
        let mut server = Server::start(&[]);
        let (_, secret) = server.said[0].split_once("FARLINK_SECRET=").unwrap();
        let connect = format!("verbs://{}", server.address);
        let args = "--keys 2000 --seconds 600 --mix a --in-flight 4";
        let mut bench = Command::new(PROGRAM)
            .args(["bench", "--connect", &connect])
            .args(args.split(' '))
            .env("FARLINK_SECRET", secret)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It says so once the tree is loaded, just before the mix.
        let mut out = BufReader::new(bench.stdout.take().unwrap()).lines();
        assert!(out.by_ref().map_while(Result::ok).any(|line| line.contains("after load")), "the bench ended early");
        server.kill();
        let said: Said = bench.wait_with_output().unwrap().into();
        said.must_fail_with(&["is lost"]);
    }
}
