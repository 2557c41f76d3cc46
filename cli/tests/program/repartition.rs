//! `farlink repartition`, while a bench of several owners runs.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use serde_json::Value;

use crate::{Cluster, PROGRAM, Said, Server, bench_with_input, children_of, farlink, named, number};

impl Cluster {
    fn repartition(&self, args: &[&str]) -> Said {
        farlink(&[&["repartition", "--connect", &self.at(), "--json"], args].concat())
    }

    /// A bench of so many processes, once each of them owns something; and they as owners.
    fn bench_of_owners(&self, processes: usize, options: &[&str]) -> (Child, BTreeSet<u64>) {
        let is_skewed = options.contains(&"--theta");
        let mut bench = Command::new(PROGRAM)
            .args(["bench", "--connect", &self.at(), "--keys", "20000", "--cache", "256KiB", "--in-flight", "4"])
            .args(["--access", "cached", "--workers", "1", "--mix", "insert-intensive", "--distribution"])
            .arg(if is_skewed { "zipf" } else { "uniform" })
            .args(["--processes", &processes.to_string()])
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        loop {
            let said = self.repartition(&[]);
            let owners = if said.ok { owners(&said.json()) } else { BTreeSet::new() };
            if owners.len() == processes {
                return (bench, owners);
            }
            assert!(bench.try_wait().unwrap().is_none(), "the bench ended early: {}", said.errors);
        }
    }
}

fn owners(rows: &[Value]) -> BTreeSet<u64> {
    let regions = rows.iter().filter(|row| row["kind"] == "region");
    regions.map(|row| row["owner"].as_u64().unwrap()).collect()
}

fn moved(rows: &[Value]) -> impl Iterator<Item = &Value> {
    rows.iter().filter(|row| row["kind"] == "moved")
}

/// All of one's share goes to others, half of the work back to it, and a range that is named.
#[test]
fn regions_move_while_a_bench_runs() {
    let cluster = Cluster::start();
    let (bench, all) = cluster.bench_of_owners(3, &["--ops", "20000"]);
    let gone = all.first().unwrap().to_string();
    let rows = cluster.repartition(&["--away-from", &gone]).must_hold().json();
    assert_eq!(owners(&rows), all.iter().copied().skip(1).collect());
    assert!(rows.iter().any(|row| row["kind"] == "moved"));
    // Nobody has counted them: 0 would say that nobody used it.
    assert!(moved(&rows).all(|row| row["uses"].is_null()), "{rows:?}");
    let rows = cluster.repartition(&["--balance", "--to", &gone]).must_hold().json();
    assert_eq!(owners(&rows), all, "{rows:?}");
    assert!(moved(&rows).all(|row| row["uses"].is_u64()), "{rows:?}");
    let last_owner = *all.last().unwrap();
    let last = last_owner.to_string();
    let mut others = rows.iter().filter(|row| row["kind"] == "region" && row["owner"] != last_owner);
    let named = others.next().unwrap()["region"].as_str().unwrap();
    let rows = cluster.repartition(&["--region", named, "--to", &last]).must_hold().json();
    assert!(rows.iter().any(|row| row["kind"] == "moved" && row["owner"] == last_owner), "{rows:?}");
    assert!(moved(&rows).all(|row| row["uses"].is_null()), "{rows:?}");
    assert!(rows.iter().all(|row| row["kind"] != "unowned"), "{rows:?}");
    let lowest = rows.iter().find(|row| row["kind"] == "region" && row["region"].as_str().unwrap().starts_with("0.."));
    let lowest = lowest.unwrap()["owner"].as_u64().unwrap();
    let other = all.iter().find(|&&owner| owner != lowest).unwrap().to_string();
    cluster.repartition(&["--region", "7..9", "--to", &other]).must_fail_with(&["7..9", "no leaf lies in it"]);
    cluster.repartition(&["--region", "9..7", "--to", &last]).must_fail_with(&["no key lies in 9..7"]);
    cluster.repartition(&["--region", "0..", "--to", &format!("{last},{other}")]).must_fail_with(&["give one --to"]);
    cluster.repartition(&["--away-from", &last, "--to", &last]).must_fail_with(&["cannot go --to"]);
    cluster.repartition(&["--away-from", "60000"]).must_fail_with(&["compute server 60000 owns nothing of `bench`"]);
    cluster.repartition(&["--to", &last]).must_fail_with(&["--to goes with --region"]);
    Said::from(bench.wait_with_output().unwrap()).must_hold();
    assert!(cluster.repartition(&[]).must_hold().json().is_empty(), "somebody owns something still");
}

/// It owns nothing until regions are moved to it, and sends its operations to the owners. They get back what it had.
#[test]
fn a_second_bench_joins_the_owners_of_the_first() {
    let cluster = Cluster::start();
    let (bench, all) = cluster.bench_of_owners(2, &["--seconds", "60"]);
    let mut bench = Server(bench);
    let (at, second) = (cluster.at(), ["--access", "cached", "--cache", "256KiB", "--workers", "1"]);
    let second = [&["--connect", &at][..], &second[..]].concat();
    let mix = ["--keys", "20000", "--mix", "a", "--json"];
    let said = farlink(&[&["bench"][..], &second, &mix, &["--ops", "500"]].concat()).must_hold();
    let rows = said.json();
    // Nothing that it does can be done without the others.
    assert_eq!(number(named(&rows, "ycsb-a")[0], "two_sided_per_op"), 1.0, "{}", said.out);
    assert!(rows.iter().any(|row| row["kind"] == "joined" && row["owners"].as_array().unwrap().len() == 1));
    assert_eq!(rows.iter().filter(|row| row["kind"] == "check").count(), 4, "{}", said.out);
    let trace = [&second[..4], &["--trace", "-"]].concat();
    let said = bench_with_input(&trace, "put 5 7\nput 5 8\nget 5\ndel 5\nget 5\n").must_hold();
    assert_eq!(said.out, "put 5 7 -> new\nput 5 8 -> replaced 7\nget 5 -> 8\ndel 5 -> removed 8\nget 5 -> none\n");
    let mut more = Command::new(PROGRAM)
        .arg("bench")
        .args([&second[..], &mix, &["--seconds", "60"]].concat())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(more.stdout.take().unwrap()).lines().map_while(Result::ok);
    let joined = lines.find(|line| line.contains("\"joined\"")).expect("it ended early, for the reason above");
    let joined: Value = serde_json::from_str(&joined).unwrap();
    let joined = joined["owners"][0].as_u64().unwrap();
    let rows = cluster.repartition(&["--balance", "--to", &joined.to_string()]).must_hold().json();
    let three: BTreeSet<u64> = all.iter().copied().chain([joined]).collect();
    assert_eq!(owners(&rows), three, "{rows:?}");
    assert_eq!(Server(more).stop(libc::SIGTERM).code(), Some(128 + libc::SIGTERM));
    loop {
        let rows = cluster.repartition(&[]).must_hold().json();
        if rows.iter().all(|row| row["kind"] == "region" && row["owner"] != joined) {
            break;
        }
        assert!(bench.0.try_wait().unwrap().is_none(), "the bench ended early");
    }
    bench.signal(libc::SIGTERM);
    assert_eq!(bench.0.wait().unwrap().code(), Some(128 + libc::SIGTERM));
    farlink(&["check", "--connect", &at]).must_hold();
}

/// Half of all operations are on one key, and a third is an owner's share.
#[test]
fn what_could_not_be_balanced_is_an_error_that_names_who_has_it() {
    let cluster = Cluster::start();
    // Leaves are many, so that not all are cached, and uses are counted.
    let (bench, all) = cluster.bench_of_owners(3, &["--seconds", "60", "--theta", "9", "--fill", "0.1"]);
    let mut bench = Server(bench);
    let said = loop {
        let said = cluster.repartition(&["--balance"]);
        assert!(bench.0.try_wait().unwrap().is_none(), "nothing was uneven until the bench ended: {}", said.out);
        // Until it has begun, all are alike.
        if !said.ok {
            break said;
        }
    };
    let rows = said.json();
    assert_eq!(owners(&rows), all, "the map is told: {}", said.errors);
    let regions = rows.iter().filter(|row| row["kind"] == "region");
    let uses = |owner: u64| -> u64 {
        let of = regions.clone().filter(|row| row["owner"] == owner);
        of.map(|row| row["uses"].as_u64().unwrap()).sum()
    };
    let hottest = all.iter().copied().max_by_key(|&owner| uses(owner)).unwrap();
    // Nothing goes where it would be as hot, and comes back.
    assert!(moved(&rows).count() < 64, "{rows:?}");
    said.must_fail_with(&[
        &format!("compute server {hottest} has still "),
        "times the average of uses, and not 1.1 at most: nothing that it has would make it more even",
    ]);
}

/// One that has no others beside it need not be asked for anything.
#[test]
fn an_owner_that_takes_no_requests_is_shown_as_such() {
    let cluster = Cluster::start();
    let (bench, owner) = cluster.bench_of_owners(1, &["--seconds", "2"]);
    let map = farlink(&["repartition", "--connect", &cluster.at()]).must_hold().out;
    Said::from(bench.wait_with_output().unwrap()).must_hold();
    let owner = owner.first().unwrap();
    assert!(map.contains(&format!("\n  0..: compute server {owner}, takes no requests")), "{map}");
}

/// A dead one's region goes to another one before those who live are asked, and this test does not answer.
#[test]
fn moves_before_an_error_are_told() {
    let cluster = Cluster::start();
    // All operations are the first process's: the other one would take its region at the first of them about it.
    let (bench, owners) = cluster.bench_of_owners(2, &["--ops", "1", "--mix", &["c"; 1000].join(",")]);
    let bench = Server(bench);
    let processes = children_of(bench.0.id());
    // It would end as soon as one of its processes has.
    bench.signal(libc::SIGSTOP);
    // SAFETY: no memory is touched. It is a child of this test's bench, which is stopped and so has not waited for it.
    assert_eq!(unsafe { libc::kill(processes[0] as libc::pid_t, libc::SIGKILL) }, 0);
    let of = |what| format!("/proc/{}/{what}", processes[0]);
    let is_zombie = || std::fs::read_to_string(of("stat")).unwrap().contains(") Z ");
    while std::fs::read_dir(of("task")).unwrap().count() > 1 || !is_zombie() {
        std::thread::yield_now();
    }
    let fabric = Arc::new(MemFabric::open(cluster.at().as_ref(), MemOptions::default()).unwrap());
    let silent = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
    let said = cluster.repartition(&["--balance", "--to", &silent.owner().incarnation().to_string()]);
    let rows = said.json();
    assert!(!rows.is_empty() && rows.iter().all(|row| row["kind"] == "moved"), "{rows:?}\n{}", said.errors);
    assert!(rows.iter().all(|row| owners.contains(&row["owner"].as_u64().unwrap())), "{rows:?}");
    assert!(rows.iter().all(|row| row["uses"].is_null()), "{rows:?}");
    said.must_fail_with(&[&format!("{} owns this part", silent.owner()), "cannot be asked"]);
}

/// Who asks is told after a while, and the bench goes on as if nothing had been asked.
#[test]
fn an_owner_that_is_stopped_is_named_to_who_would_move_its_regions() {
    let cluster = Cluster::start();
    let (bench, all) = cluster.bench_of_owners(2, &["--seconds", "10"]);
    let (first, last) = (all.first().unwrap().to_string(), all.last().unwrap());
    let id = bench.id();
    let processes = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap();
    let processes: Vec<i32> = processes.split_whitespace().map(|process| process.parse().unwrap()).collect();
    assert_eq!(processes.len(), 2);
    let signal = |signal| {
        for &process in &processes {
            // SAFETY: no memory is touched. It is a child of this test's bench, which waits for it only when the bench's
            // seconds are over: the number is nobody else's.
            assert_eq!(unsafe { libc::kill(process, signal) }, 0);
        }
    };
    signal(libc::SIGSTOP);
    let said = cluster.repartition(&["--away-from", &first]);
    signal(libc::SIGCONT);
    said.must_fail_with(&[&format!("compute server {last}"), "no sign of life"]);
    Said::from(bench.wait_with_output().unwrap()).must_hold();
}
