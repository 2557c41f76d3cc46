//! Benches that a signal ends.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Cluster, PROGRAM, Said, Server, children_of, farlink};

/// How often it is looked whether something has come about.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// How long processes of a bench wait for one that is stopped.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// What is waited for comes sooner.
const LIMIT: Duration = Duration::from_secs(60);

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
    let of = chaos.0.id();
    wait_until(&mut chaos, || children_of(of).iter().any(works));
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
    let mut bench = Server(bench);
    // It has looked for a cluster once the pipe has a reader. To wait in `open` for one would be without a limit.
    let mut options = std::fs::OpenOptions::new();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    wait_until(&mut bench, || match options.open(&pipe) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => false,
        opened => opened.map(drop).is_ok(),
    });
    bench.signal(libc::SIGTERM);
    assert_eq!(status_of(bench), Some(128 + libc::SIGTERM));
}

/// One that has only some of its parts could not be used.
#[test]
fn a_stopped_bench_leaves_all_parts_of_its_structure_or_none() {
    const PARTS: usize = 32;
    let parts = PARTS.to_string();
    for round in 0..6 {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("cluster");
        let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
        let at = dir.to_str().unwrap();
        let bench = Command::new(PROGRAM)
            .args(["bench", "--connect", at, "--keys", "1000", "--structure", "rtree", "--access", "cached"])
            .args(["--processes", &parts])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let bench = Server(bench);
        let deadline = Instant::now() + LIMIT;
        // It makes them as soon as it has joined.
        while std::fs::read_dir(dir.join("owners")).map_or(0, Iterator::count) == 0 {
            assert!(Instant::now() < deadline, "it does not join");
        }
        std::thread::sleep(Duration::from_micros(300 * round));
        bench.signal(libc::SIGTERM);
        assert_eq!(status_of(bench), Some(128 + libc::SIGTERM));
        let said = farlink(&["list", "--connect", at, "--json"]).must_hold();
        let made = said.json().iter().filter(|row| row["kind"] == "structure").count();
        assert!(made == 0 || made == PARTS, "{made}");
    }
}

/// The others would wait for it, and the bench for them.
#[test]
fn a_bench_of_which_a_process_is_stopped_names_it_and_ends() {
    std::thread::scope(|scope| {
        for (access, says) in [("one-sided", "has been locked by compute server"), ("cached", "gives no sign of life")]
        {
            scope.spawn(move || {
                let cluster = Cluster::start();
                // Of many updates that are slow some hold locks at any time.
                let options =
                    "--keys 2000 --processes 2 --workers 1 --in-flight 16 --latency 1ms --update 100 --seconds 60";
                let mut bench = Command::new(PROGRAM)
                    .args(["bench", "--connect", &cluster.at(), "--access", access])
                    .arg(format!("--lock-wait={}ms", LOCK_WAIT.as_millis()))
                    .args(options.split(' '))
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap();
                let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines().map_while(Result::ok);
                let runs = |line: &String| line.contains("step 2 of 3: ") && !line.contains("preparing");
                assert!(lines.any(|line| runs(&line)), "the bench ended early");
                let mut bench = Server(bench);
                let last = *children_of(bench.0.id()).last().unwrap();
                // SAFETY: kill touches no memory. The bench waits for its processes only in the end, and it has not ended just now.
                let signal = |signal| unsafe { libc::kill(last as libc::pid_t, signal) };
                // It may be stopped when nobody needs anything of it, because it has not begun, say.
                while bench.0.try_wait().unwrap().is_none() {
                    signal(libc::SIGSTOP);
                    let until = Instant::now() + 3 * LOCK_WAIT;
                    while Instant::now() < until && bench.0.try_wait().unwrap().is_none() {
                        std::thread::sleep(LOOK_EVERY);
                    }
                    signal(libc::SIGCONT);
                    // Else it is stopped where it was.
                    std::thread::sleep(20 * LOOK_EVERY);
                }
                let errors: Vec<String> = lines.collect();
                assert_eq!(status_of(bench), Some(1), "{errors:?}");
                assert!(errors.iter().any(|error| error.contains(says)), "{access}: {errors:?}");
            });
        }
    });
}

#[test]
fn under_nohup_a_bench_outlives_its_terminal() {
    let mut bench = Command::new("sh")
        .args(["-c", "trap '' HUP; exec \"$0\" bench --server-bytes 16MiB --keys 1000 --mix c --seconds 60", PROGRAM])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(bench.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("step 2 of 3: ")));
    let bench = Server(bench);
    for process in children_of(bench.0.id()) {
        // SAFETY: kill touches no memory. The bench has not waited for its processes, which have a minute to go.
        assert_eq!(unsafe { libc::kill(process as libc::pid_t, libc::SIGHUP) }, 0);
    }
    bench.signal(libc::SIGHUP);
    // Whoever heeds it ends meanwhile.
    std::thread::sleep(Duration::from_millis(300));
    bench.signal(libc::SIGTERM);
    let status = status_of(bench);
    let said: Vec<String> = lines.map_while(Result::ok).collect();
    assert_eq!(status, Some(128 + libc::SIGTERM), "{said:?}");
}

/// The exit status, which must come soon.
fn status_of(mut program: Server) -> Option<i32> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = program.0.try_wait().unwrap() {
            return status.code();
        }
        assert!(Instant::now() < deadline, "it goes on");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Until something has come about, while the program runs.
fn wait_until(program: &mut Server, mut has_come: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !has_come() {
        assert!(program.0.try_wait().unwrap().is_none(), "it ended early");
        assert!(Instant::now() < deadline, "it does not come about");
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
        .process_group(0)
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
    let bench = Server(child);
    if signal == libc::SIGHUP {
        // In one call: a bench whose process alone is told to end has failed.
        // SAFETY: kill touches no memory; the bench leads a group of its own, and has not been waited for.
        assert_eq!(unsafe { libc::kill(-(bench.0.id() as libc::pid_t), signal) }, 0);
    } else {
        bench.signal(signal);
    }
    assert_eq!(status_of(bench), Some(128 + signal));
    // The compute process has written its cache and left the cluster: the bench has waited for it.
    assert_eq!(std::fs::read_dir(dir.join("owners")).unwrap().count(), 0);
    farlink(&["check", "--connect", at]).must_hold()
}
