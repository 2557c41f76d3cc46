//! Memory servers that go, and what becomes of those who use them; files that are not what a memory server has left.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{PROGRAM, Said, Server, farlink};

/// Users are promised to hear within 2 seconds that a memory server is gone. The rest is for a machine that is busy with other tests.
const SOON: Duration = Duration::from_secs(30);

/// A bench that runs on two memory servers of this folder, until it is told more or for a minute.
struct Bench(Child);

impl Bench {
    fn start(dir: &Path, keys: &str, access: &str) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(["bench", "--connect", dir.to_str().unwrap(), "--keys", keys, "--mix", "a", "--seconds", "60"])
            .args(["--in-flight", "4", "--access"])
            .args(access.split(' '))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.as_mut().unwrap()).lines().map_while(Result::ok);
        let runs = |line: &String| line.contains("step 2 of 3: ") && !line.contains("preparing");
        assert!(lines.any(|line| runs(&line)), "the bench ended early");
        Self(child)
    }

    fn said(self) -> Said {
        self.0.wait_with_output().unwrap().into()
    }

    /// What it says of its memory servers' end, which came just now.
    #[track_caller]
    fn must_fail_soon_with(self, parts: &[&str]) {
        let since = Instant::now();
        self.said().must_fail_with(parts);
        let took = since.elapsed();
        assert!(took < SOON, "it took {took:?}");
    }
}

fn region(dir: &Path, server: usize) -> PathBuf {
    dir.join(format!("server-{server}.mem"))
}

fn cluster(threads: &[&str]) -> (tempfile::TempDir, PathBuf, [Server; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let servers = [0, 1].map(|server| Server::start_with(&dir, server, threads));
    (folder, dir, servers)
}

/// Workers that it does not take up are told that it stands still. What may be raised of the limit is.
#[test]
fn a_memory_server_that_can_open_no_more_files_says_so() {
    for (limit, holds) in [("ulimit -n 32", false), ("ulimit -S -n 32", true)] {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("cluster");
        let script =
            format!("{limit}; exec \"$0\" serve --bytes 64MiB --servers 1 --server 0 --threads 1 --dir \"$1\"");
        let server = Command::new("sh")
            .args(["-c", &script, PROGRAM])
            .arg(&dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut server = Server(server.unwrap());
        let (mut line, mut errors) = (String::new(), String::new());
        BufReader::new(server.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "farlink server 0 ready\n");
        let at = dir.to_str().unwrap();
        let options = ["--keys", "1000", "--mix", "c", "--ops", "1000", "--access", "coarse", "--workers", "32"];
        let said = farlink(&[&["bench", "--connect", at], &options[..]].concat());
        server.signal(libc::SIGTERM);
        std::io::Read::read_to_string(&mut server.0.stderr.take().unwrap(), &mut errors).unwrap();
        assert_eq!((said.ok, errors.contains("Too many open files")), (holds, !holds), "{}\n{errors}", said.errors);
    }
}

#[test]
fn a_bench_whose_memory_server_goes_says_why_and_ends() {
    type Blow = fn(&Path);
    let blows: [(&str, Blow, &str); 4] = [
        (
            "one-sided",
            |path| {
                fs::write(path.with_extension("new"), vec![0; 8 << 20]).unwrap();
                fs::rename(path.with_extension("new"), path).unwrap();
            },
            "its file was deleted or replaced",
        ),
        ("cached", |path| fs::remove_file(path).unwrap(), "its file was deleted or replaced"),
        ("one-sided", |path| OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap(), "its file was"),
        ("cached", |path| File::create(path).unwrap().set_len(8 << 20).unwrap(), "its file was"),
    ];
    for (access, blow, says) in blows {
        let (_folder, dir, servers) = cluster(&[]);
        let bench = Bench::start(&dir, "2000", access);
        blow(&region(&dir, 1));
        bench.must_fail_soon_with(&["memory server 1 at", "is lost", says]);
        let [zero, mut one] = servers;
        // The memory server itself ends, too.
        assert_eq!(one.0.wait().unwrap().code(), Some(1), "{says}");
        assert!(zero.stop(libc::SIGTERM).success());
    }
}

#[test]
fn a_bench_whose_memory_server_ends_says_so_and_ends() {
    let ends = [
        ("one-sided", "0", libc::SIGKILL),
        ("coarse --workers 1", "1", libc::SIGTERM),
        ("coarse --workers 1", "1", libc::SIGKILL),
        ("hybrid --workers 1", "1", libc::SIGKILL),
        ("adaptive --workers 1 --policy always --placement round-robin", "1", libc::SIGKILL),
        ("engine --workers 1", "1", libc::SIGKILL),
        // Where one waits for another one, that is not what it names.
        ("cached --workers 1 --processes 2", "0", libc::SIGKILL),
    ];
    for (access, threads, signal) in ends {
        let (_folder, dir, [_zero, one]) = cluster(&["--threads", threads]);
        let bench = Bench::start(&dir, "2000", access);
        one.stop(signal);
        bench.must_fail_soon_with(&["memory server 1"]);
    }
}

#[test]
fn a_memory_server_that_stands_still_for_a_while_loses_nothing() {
    let (_folder, dir, [zero, one]) = cluster(&["--threads", "1"]);
    let bench = Command::new(PROGRAM)
        .args(["bench", "--connect", dir.to_str().unwrap(), "--keys", "2000", "--mix", "a", "--seconds", "2"])
        .args(["--access", "coarse", "--in-flight", "4"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    for server in [&zero, &one, &one] {
        std::thread::sleep(Duration::from_millis(100));
        server.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(100));
        server.signal(libc::SIGCONT);
    }
    let said: Said = bench.wait_with_output().unwrap().into();
    said.must_hold();
    farlink(&["check", "--connect", dir.to_str().unwrap()]).must_hold();
}

/// Its memory is there and can be read, so only what it is asked to carry out fails.
#[test]
fn a_bench_whose_memory_server_is_stopped_says_so_and_ends() {
    let accesses = ["coarse", "hybrid", "engine --policy always --cache 64KiB", "adaptive --policy always"];
    std::thread::scope(|scope| {
        for access in accesses {
            scope.spawn(move || {
                let (_folder, dir, servers) = cluster(&["--threads", "1"]);
                let bench = Bench::start(&dir, "20000", access);
                servers.iter().for_each(|server| server.signal(libc::SIGSTOP));
                bench.said().must_fail_with(&["memory server", "has given no sign of life for 1000 ms"]);
                servers.iter().for_each(|server| server.signal(libc::SIGCONT));
                farlink(&["check", "--connect", dir.to_str().unwrap()]).must_hold();
            });
        }
    });
}

#[test]
fn a_memory_server_that_is_started_again_in_its_place_goes_on() {
    let (_folder, dir, [_zero, one]) = cluster(&[]);
    let mut bench = Command::new(PROGRAM)
        .args(["bench", "--connect", dir.to_str().unwrap(), "--keys", "2000", "--mix", "a", "--seconds", "2"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(bench.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("after load")), "the bench ended early");
    one.stop(libc::SIGKILL);
    let one = Server::start(&dir, 1);
    let said: Said = bench.wait_with_output().unwrap().into();
    said.must_hold();
    one.stop(libc::SIGKILL);
    let _one = Server::start(&dir, 1);
    farlink(&["check", "--connect", dir.to_str().unwrap()]).must_hold();
}

#[test]
fn a_region_that_is_not_what_was_left_is_refused() {
    let (_folder, dir, servers) = cluster(&[]);
    let at = dir.to_str().unwrap();
    farlink(&["bench", "--connect", at, "--keys", "2000", "--mix", "c", "--ops", "100"]).must_hold();
    let path = region(&dir, 1);
    let stop = |server: Server| assert!(server.stop(libc::SIGTERM).success());
    let [zero, one] = servers;
    stop(one);
    let earlier = fs::read(&path).unwrap();
    stop(Server::start(&dir, 1));
    let last = fs::read(&path).unwrap();
    let serve = || farlink(&["serve", "--dir", at, "--server", "1", "--servers", "2", "--bytes", "8MiB"]);
    fs::write(&path, &earlier).unwrap();
    serve().must_fail_with(&["memory server 1", "is of another time"]);
    fs::write(&path, vec![0; 8 << 20]).unwrap();
    serve().must_fail_with(&["memory server 1", "is of another time"]);
    fs::write(&path, []).unwrap();
    serve().must_fail_with(&["memory server 1", "was deleted or emptied"]);
    let _ = fs::remove_file(&path);
    serve().must_fail_with(&["memory server 1", "was deleted or emptied"]);
    fs::write(&path, &last).unwrap();
    let _one = Server::start(&dir, 1);
    farlink(&["check", "--connect", at]).must_hold();
    drop(zero);
}
