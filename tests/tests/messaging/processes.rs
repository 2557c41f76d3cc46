//! Memory servers and workers in processes of their own, some of which are killed or stopped.
//!
//! A process is this test program once more, told by its environment what to be.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use farlink_runtime::{
    error::Error,
    fabric::{
        Fabric,
        link::ListenOptions,
        mem::{MemFabric, MemOptions},
    },
    messaging::{MessageServer, Priority, ServeMessages, Wait},
    server::MemoryServer,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST, NASTY},
};

use crate::scene::{ABOVE_100, COUNT, ECHO, LATER, Parrot, SMALL, Seen, TALLY, server};

const ROLE: &str = "FARLINK_MESSAGING_ROLE";
const DIR: &str = "FARLINK_MESSAGING_DIR";
const MANNERS: &str = "FARLINK_MESSAGING_NASTY";

/// Not a test: what a child process does.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let dir = std::env::var(DIR).unwrap();
    let options = if std::env::var(MANNERS).is_ok() { NASTY } else { FAST };
    let _watch = Watchdog::start("child", Duration::from_secs(200));
    match role.as_str() {
        "server" => serve(Path::new(&dir), options),
        _ => work(Path::new(&dir), options),
    }
}

fn say(line: &str) {
    println!("\n@{line}");
    std::io::stdout().flush().unwrap();
}

/// The next line from the parent; none when it is gone.
fn hear() -> Option<String> {
    let mut line = String::new();
    (std::io::stdin().read_line(&mut line).unwrap() > 0).then(|| line.trim().to_owned())
}

fn serve(dir: &Path, options: MemOptions) {
    let memory = MemoryServer::start(&cluster::serve_options(dir, 0, 1, 2 << 20)).unwrap();
    let listener = memory.listen(&ListenOptions { ports: 2, link_bytes: SMALL }, options).unwrap();
    let serve = ServeMessages {
        wait: Wait::Event,
        silence_max: Duration::from_millis(100),
        report_interval: Duration::from_millis(2),
        ..ServeMessages::default()
    };
    let seen = Arc::new(Seen::default());
    let messages = MessageServer::start(listener, &serve, move |_| Ok(Box::new(Parrot::new(&seen)))).unwrap();
    say("ready");
    while let Some(line) = hear() {
        let counts = messages.counts();
        match line.as_str() {
            "peers" => say(&messages.peers().to_string()),
            "dropped" => say(&counts.dropped.to_string()),
            "sleeps" => say(&counts.sleeps.to_string()),
            "repeats" => say(&counts.repeats.to_string()),
            _ => break,
        }
    }
}

/// Sends requests until it is told to stop; then says the last tally, which must be how many it has sent.
fn work(dir: &Path, options: MemOptions) {
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(dir, options).unwrap());
    let compute = cluster::join(&fabric, 1).unwrap();
    let worker = compute.worker().unwrap();
    let (told, stop) = std::sync::mpsc::channel();
    std::thread::spawn(move || told.send(hear()));
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let mut rounds = 0u64;
        loop {
            let requests: Vec<_> = (0..50u64)
                .map(|number| {
                    let channel = channel.clone();
                    worker.spawn(async move {
                        // Replies are more than fits into the ring or the pool: most of the time some are on their way.
                        if number % 2 == 0 {
                            let reply = channel.request_words(COUNT, &[600], Priority::Latency).await.unwrap();
                            return assert!(reply.words().iter().copied().eq(0..600));
                        }
                        let sent = vec![number; 90];
                        assert_eq!(channel.request_words(LATER, &sent, Priority::Latency).await.unwrap().words(), sent);
                    })
                })
                .collect();
            let tally = channel.request_words(TALLY, &[], Priority::Latency).await.unwrap();
            rounds += 1;
            assert_eq!(tally.decode::<u64>().unwrap(), rounds, "each was carried out once");
            for request in requests {
                request.await;
            }
            if rounds == 1 {
                say("ready");
            }
            if stop.try_recv().is_ok() {
                break;
            }
        }
        say(&rounds.to_string());
    });
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str, dir: &Path, nasty: bool) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--ignored", "--nocapture"]).env(ROLE, role).env(DIR, dir);
        if nasty {
            command.env(MANNERS, "1");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut process = Self { child, input, output };
        assert_eq!(process.hear(), "ready");
        process
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the process ended early");
            if let Some(said) = line.trim().strip_prefix('@') {
                return said.to_owned();
            }
        }
    }

    fn ask(&mut self, what: &str) -> u64 {
        writeln!(self.input, "{what}").unwrap();
        self.hear().parse().unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Whether every thread has stopped.
    fn is_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.flatten().all(|task| {
            let status = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        })
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process is a child of ours that has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        std::thread::yield_now();
    }
}

fn links(dir: &Path) -> usize {
    std::fs::read_dir(dir.join("links")).unwrap().count()
}

#[test]
fn several_processes_and_one_that_is_killed() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    for nasty in [false, true] {
        let dir = cluster::scratch().unwrap();
        let mut server = Process::start("server", dir.path(), nasty);
        let mut workers: Vec<_> = (0..3).map(|_| Process::start("worker", dir.path(), nasty)).collect();
        until(|| server.ask("peers") == 3);
        let mut killed = workers.pop().unwrap();
        killed.kill();
        until(|| server.ask("peers") == 2);
        for mut worker in workers {
            assert!(worker.ask("stop") > 0);
            assert!(worker.child.wait().unwrap().success());
        }
        until(|| server.ask("peers") == 0);
        assert_eq!(links(dir.path()), 0, "links of workers that are gone");
        assert!(server.ask("sleeps") > 0, "a server without work sleeps");
    }
}

#[test]
fn a_worker_that_was_stopped_goes_on_where_it_was() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    let dir = cluster::scratch().unwrap();
    let mut server = Process::start("server", dir.path(), false);
    let mut worker = Process::start("worker", dir.path(), false);
    // Stopped at a moment when replies are on their way, which not every moment is.
    let mut tries = 0;
    while server.ask("dropped") < 3 && tries < 40 {
        tries += 1;
        worker.signal(libc::SIGSTOP);
        let before = server.ask("dropped");
        for _ in 0..300 {
            if server.ask("dropped") != before {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        worker.signal(libc::SIGCONT);
        until(|| server.ask("peers") == 1);
    }
    println!("dropped {} times in {tries} tries, {} repeats", server.ask("dropped"), server.ask("repeats"));
    assert!(server.ask("dropped") > 0, "it was never dropped");
    // It asserts that each of its requests was carried out once.
    assert!(worker.ask("stop") > 0);
    assert!(worker.child.wait().unwrap().success());
}

#[test]
fn a_server_that_is_killed_in_mid_request() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    let dir = cluster::scratch().unwrap();
    let mut serving = Process::start("server", dir.path(), false);
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(dir.path(), FAST).unwrap());
    let compute = cluster::join_manual(&fabric, 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        channel.request_words(ECHO, &[1], Priority::Latency).await.unwrap();
        serving.signal(libc::SIGSTOP);
        until(|| serving.is_stopped());
        let asking = channel.clone();
        let lost = worker.spawn(async move { asking.request_words(ECHO, &[2], Priority::Latency).await.map(drop) });
        for _ in 0..100 {
            worker.yield_now().await;
        }
        serving.kill();
        let outcome = lost.await;
        assert!(matches!(outcome, Err(Error::OutcomeUnknown { .. })), "{outcome:?}");
        let missing = channel.request_words(ECHO, &[3], Priority::Latency).await.map(drop);
        assert!(matches!(missing, Err(Error::ServerMissing { .. })), "{missing:?}");
        // The same memory, served anew; the same channel.
        let _serving = Process::start("server", dir.path(), false);
        assert_eq!(channel.request_words(ECHO, &[4], Priority::Latency).await.unwrap().words(), [4]);
    });
}
