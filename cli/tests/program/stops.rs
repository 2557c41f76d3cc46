//! Benches that a signal ends.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{PROGRAM, Said, Server, children_of, farlink};

/// How often it is looked whether something has come about.
const LOOK_EVERY: Duration = Duration::from_millis(5);

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

/// As under `2>&1 | head`: whoever read it has gone.
#[test]
fn who_cannot_say_that_it_stops_stops_all_the_same() {
    let chaos = Command::new(PROGRAM)
        .args(["chaos", "--kills", "1000000", "--keys", "300", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut chaos = Server(chaos);
    drop(chaos.0.stderr.take());
    let works = |child: &u32| {
        std::fs::read(format!("/proc/{child}/cmdline"))
            .is_ok_and(|words| words.split(|byte| *byte == 0).any(|word| word == b"chaos-process"))
    };
    while !children_of(chaos.0.id()).iter().any(works) {
        std::thread::sleep(LOOK_EVERY);
    }
    chaos.signal(libc::SIGTERM);
    assert_eq!(status_of(chaos), Some(128 + libc::SIGTERM));
}

/// No process has work in hand yet.
#[test]
fn a_bench_that_waits_for_memory_servers_is_stopped_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("cluster");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let bench = Command::new(PROGRAM)
        .args(["bench", "--wait", "10m", "--connect"])
        .arg(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let bench = Server(bench);
    // It has looked for a cluster once the pipe has a reader.
    drop(std::fs::OpenOptions::new().write(true).open(&pipe).unwrap());
    bench.signal(libc::SIGTERM);
    assert_eq!(status_of(bench), Some(128 + libc::SIGTERM));
}

#[test]
fn under_nohup_a_bench_outlives_its_terminal() {
    let mut bench = Command::new("sh")
        .args(["-c", "trap '' HUP; exec \"$0\" bench --server-bytes 16MiB --keys 1000 --mix c --seconds 2", PROGRAM])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("step 2 of 3: ")));
    let bench = Server(bench);
    for process in children_of(bench.0.id()) {
        // SAFETY: kill touches no memory. The bench has not waited for its processes, which have seconds to go.
        assert_eq!(unsafe { libc::kill(process as libc::pid_t, libc::SIGHUP) }, 0);
    }
    bench.signal(libc::SIGHUP);
    let said: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(status_of(bench), Some(0), "{said:?}");
}

/// The exit status, which must come soon.
fn status_of(mut program: Server) -> Option<i32> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(status) = program.0.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < deadline, "it goes on");
        std::thread::sleep(LOOK_EVERY);
    }
}

fn check_of_a_stopped_bench(access: &str, mix: &str, signal: libc::c_int) -> Said {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let at = dir.to_str().unwrap();
    let mut command = Command::new(PROGRAM);
    command
        .args(["bench", "--connect", at, "--keys", "10000", "--seconds", "60", "--in-flight", "8"])
        .args(["--access", access, "--mix", mix])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let heed_hangups = || {
        // SAFETY: it touches no memory. The tests may run under `nohup`.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        Ok(())
    };
    // SAFETY: the closure makes one system call, and allocates nothing.
    let mut child = unsafe { command.pre_exec(heed_hangups) }.spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let runs = |line: String| line.contains("step 2 of 3: ") && !line.contains("preparing");
    assert!(lines.any(|line| runs(line.unwrap())));
    std::thread::sleep(Duration::from_millis(300));
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
