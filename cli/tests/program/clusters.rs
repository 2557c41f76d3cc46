//! Clusters that outlive a bench, and what is found in them.

use std::process::{Command, Stdio};
use std::sync::Arc;

use farlink_offload::{CacheOptions, ComputeCache, Remote};
use farlink_runtime::access::Access as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::mem::{MemFabric, MemOptions};
use farlink_runtime::ptr::ServerId;
use farlink_runtime::structure::StructurePlacement;
use farlink_structures::btree::{BTree, BTreeOptions, PlacementPolicy};
use farlink_structures::rtree::{Query, RTree, RTreeOptions, Rect, Tree as Rects};

use crate::{PROGRAM, Said, Server, bench_with_input, farlink, named, number};

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
        // The first change enters it as a user.
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

/// They are not measured; the rest is done with them.
#[test]
fn trees_of_three_dimensions_are_served_and_checked() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let at = dir.to_str().unwrap();
    let _servers = [0, 1].map(|server| Server::start_with(&dir, server, &["--threads", "1"]));
    let fabric = Arc::new(MemFabric::open(&dir, MemOptions::default()).unwrap());
    let compute = ComputeServer::join(fabric, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(1) };
    let options = RTreeOptions { placement, ..RTreeOptions::default() };
    let made = worker.block_on(RTree::<_, 3>::create(&worker, "boxes", options)).unwrap();
    let structure = made.access().context().structure.clone();
    let sent = RTree::<_, 3>::over(Remote::new(&worker, structure.clone()));
    worker.block_on(async {
        for number in 0..500u64 {
            let low = [number % 7, number % 11, number % 13].map(|at| at as f64);
            sent.insert(Rect::new(low, low.map(|at| at + 0.5)).unwrap(), number).await.unwrap();
        }
        let window = Query::Intersects(Rect::new([0.0; 3], [2.0, 3.0, 4.0]).unwrap());
        let expected = (0..500u64).filter(|number| number % 7 <= 2 && number % 11 <= 3 && number % 13 <= 4).count();
        assert_eq!(sent.count(window).await.unwrap(), expected as u64);
        assert_eq!(sent.search(window).all().await.unwrap().len(), expected);
    });
    for more in [&[][..], &["--free-leaked"]] {
        let said = farlink(&[&["check", "--connect", at, "--name", "boxes"], more].concat()).must_hold();
        assert!(said.out.contains("check rtree-3d: ok (structure boxes, entries 500,"), "{}", said.out);
    }
    let repartition = || farlink(&["repartition", "--connect", at, "--name", "boxes"]).must_hold().out;
    assert!(repartition().starts_with("nobody owns anything of `boxes`"), "{}", repartition());
    let cache = ComputeCache::<Rects<3>>::new(CacheOptions::new(1 << 20)).unwrap();
    let owned = worker.block_on(cache.own(&worker, structure, Rect::EVERYTHING.into())).unwrap();
    let owner = format!("compute server {}, ", worker.owner().incarnation());
    assert!(repartition().contains(&owner), "{}", repartition());
    drop((owned, cache));
    farlink(&["bench", "--connect", at, "--structure", "rtree-3d"]).must_fail_with(&["does not measure it"]);
    let said = farlink(&["list"]).must_hold();
    assert!(said.out.contains("rtree-3d\n  not measured"), "{}", said.out);
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
    // Others may lie behind it.
    assert!(said.out.contains("leaked unknown"), "{}", said.out);
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

/// What is in the way is told in words that a bench has options for.
#[test]
fn a_bench_that_a_cluster_has_no_room_for_says_what_to_change() {
    let help = farlink(&["bench", "--help"]).must_hold().out;
    for (options, says) in [
        ("--keys 200000 --server-bytes 2MiB", &["out of remote memory", "more or larger memory servers"][..]),
        ("--servers 64 --access coarse", &["memory servers makes 64 structures of it, and a cluster has room for 63"]),
        ("--structure rtree --access cached --processes 64", &["--processes makes 64 structures of it"]),
    ] {
        let line = format!("bench --mix {} {options}", if options.contains("rtree") { "point" } else { "c" });
        let said = farlink(&line.split(' ').collect::<Vec<_>>());
        for option in said.errors.split(['`', ' ', ':', '\n']).filter(|word| word.starts_with("--")) {
            assert!(help.contains(&format!("{option} ")), "no {option}: {}", said.errors);
        }
        said.must_fail_with(says);
    }
}
