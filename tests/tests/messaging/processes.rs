//! Memory servers and workers in processes of their own, some of which are killed or stopped.
//!
//! A process is this test program once more, told by its environment what to be.

use std::{
    any::Any,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use farlink_runtime::{
    clock::Clock,
    fabric::{
        Error as FabricError,
        connection::PeerId,
        listener::{Change, ListenOptions, Listener},
    },
    lock::OwnerId,
    messaging::{Error as MessagingError, MessageServer, Priority, ServeMessages, Wait},
    server::MemoryServer,
};
use farlink_tests::{
    backend::{Backend, FabricProfile, Place},
    bounded::Watchdog,
    cluster, here,
};

use crate::scene::{ABOVE_100, COUNT, ECHO, LATER, Parrot, SMALL, Seen, TALLY, server};

const ROLE: &str = "FARLINK_MESSAGING_ROLE";
const PLACE: &str = "FARLINK_MESSAGING_PLACE";
const MANNERS: &str = "FARLINK_MESSAGING_NASTY";

/// Not a test: what a child process does.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let place = std::env::var(PLACE).unwrap();
    let profile = if std::env::var(MANNERS).is_ok() { FabricProfile::Nasty } else { FabricProfile::Fast };
    let _watch = Watchdog::start("child", Duration::from_secs(200));
    match role.as_str() {
        "server" => serve(Path::new(&place), profile),
        "visitor" => visit(&serde_json::from_str(&place).unwrap(), profile),
        _ => work(&serde_json::from_str(&place).unwrap(), profile),
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

/// A memory server that listens, and where others find it.
fn listen(dir: &Path, profile: FabricProfile) -> (Box<dyn Listener>, Place, Box<dyn Any>) {
    let options = ListenOptions { endpoints: 2, connection_bytes: SMALL };
    if Backend::chosen() == Backend::Verbs {
        let cluster = here::start(1, 2 << 20, profile.options()).unwrap();
        return (cluster.listen(server(0), &options).unwrap(), cluster.place().unwrap(), Box::new(cluster));
    }
    let memory = MemoryServer::start(&cluster::serve_options(dir, 0, 1, 2 << 20)).unwrap();
    (memory.listen(&options, profile.options()).unwrap(), Place::Files(dir.to_owned()), Box::new(memory))
}

fn serve(dir: &Path, profile: FabricProfile) {
    let (listener, place, _memory) = listen(dir, profile);
    let serve = ServeMessages {
        wait: Wait::Event,
        silence_max: Duration::from_millis(100),
        report_interval: Duration::from_millis(2),
        ..ServeMessages::default()
    };
    let seen = Arc::new(Seen::default());
    let messages = MessageServer::start(listener, &serve, move |_| Ok(Box::new(Parrot::new(&seen)))).unwrap();
    say(&serde_json::to_string(&place).unwrap());
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
fn work(place: &Place, profile: FabricProfile) {
    let fabric = place.open(profile).unwrap();
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

/// Connects, and says nothing for as long as there is a parent.
fn visit(place: &Place, profile: FabricProfile) {
    let fabric = place.open(profile).unwrap();
    let mut endpoint = fabric.endpoint(1, Clock::monotonic()).unwrap();
    let who = PeerId { owner: OwnerId::new(70_000).unwrap(), worker: 0 };
    let _memory = endpoint.connect(server(0), who).unwrap();
    say("ready");
    assert_eq!(hear(), None);
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// A memory server, and where it is.
    fn serve(dir: &Path, profile: FabricProfile) -> (Self, Place) {
        let (process, place) = Self::start("server", dir.as_os_str(), profile);
        (process, serde_json::from_str(&place).unwrap())
    }

    fn work(place: &Place, profile: FabricProfile) -> Self {
        Self::client("worker", place, profile)
    }

    fn client(role: &str, place: &Place, profile: FabricProfile) -> Self {
        let place = PathBuf::from(serde_json::to_string(place).unwrap());
        let (process, said) = Self::start(role, place.as_os_str(), profile);
        assert_eq!(said, "ready");
        process
    }

    fn start(role: &str, place: &std::ffi::OsStr, profile: FabricProfile) -> (Self, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::child", "--ignored", "--nocapture"]).env(ROLE, role).env(PLACE, place);
        if profile == FabricProfile::Nasty {
            command.env(MANNERS, "1");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut process = Self { child, input, output };
        let said = process.hear();
        (process, said)
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

/// Links that stand in files.
fn links(place: &Place) -> usize {
    match place {
        Place::Files(dir) => std::fs::read_dir(dir.join("connections")).unwrap().count(),
        Place::Verbs { .. } => 0,
    }
}

#[test]
fn several_processes_and_one_that_is_killed() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    let profile: &[_] = match Backend::chosen() {
        Backend::Verbs => &[FabricProfile::Fast],
        _ => &[FabricProfile::Fast, FabricProfile::Nasty],
    };
    for &profile in profile {
        let dir = cluster::scratch().unwrap();
        let (mut server, place) = Process::serve(dir.path(), profile);
        let mut workers: Vec<_> = (0..3).map(|_| Process::work(&place, profile)).collect();
        until(|| server.ask("peers") == 3);
        let mut killed = workers.pop().unwrap();
        killed.kill();
        until(|| server.ask("peers") == 2);
        for mut worker in workers {
            assert!(worker.ask("stop") > 0);
            assert!(worker.child.wait().unwrap().success());
        }
        until(|| server.ask("peers") == 0);
        assert_eq!(links(&place), 0, "links of workers that are gone");
        assert!(server.ask("sleeps") > 0, "a server without work sleeps");
    }
}

#[test]
fn a_worker_that_was_stopped_goes_on_where_it_was() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    let dir = cluster::scratch().unwrap();
    let (mut server, place) = Process::serve(dir.path(), FabricProfile::Fast);
    let mut worker = Process::work(&place, FabricProfile::Fast);
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
    let (mut serving, place) = Process::serve(dir.path(), FabricProfile::Fast);
    let fabric = place.open(FabricProfile::Fast).unwrap();
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
        assert!(matches!(outcome, Err(MessagingError::OutcomeUnknown { .. })), "{outcome:?}");
        let missing = channel.request_words(ECHO, &[3], Priority::Latency).await.map(drop);
        assert!(
            matches!(
                missing,
                Err(MessagingError::Fabric(FabricError::ServerMissing { .. } | FabricError::ServerLost { .. }))
            ),
            "{missing:?}"
        );
        if Backend::chosen() == Backend::Verbs {
            // Its memory is gone with it.
            return;
        }
        // The same memory, served anew; the same channel.
        let (_serving, _) = Process::serve(dir.path(), FabricProfile::Fast);
        assert_eq!(channel.request_words(ECHO, &[4], Priority::Latency).await.unwrap().words(), [4]);
    });
}

/// Nothing of it can come any more, so what is kept for it would be kept for ever.
#[test]
fn a_worker_that_was_killed_is_not_expected_again() {
    let _watch = Watchdog::start("processes", Duration::from_secs(200));
    let dir = cluster::scratch().unwrap();
    let (listener, place, _memory) = listen(dir.path(), FabricProfile::Fast);
    let mut endpoints: Vec<_> =
        (0..2).map(|number| listener.endpoint(number, 1, Clock::monotonic()).unwrap()).collect();
    let mut next = || loop {
        let mut changes = Vec::new();
        endpoints.iter_mut().for_each(|endpoint| endpoint.changes(true, &mut changes));
        if let Some(change) = changes.pop() {
            break change;
        }
        std::thread::yield_now();
    };
    let mut visitor = Process::client("visitor", &place, FabricProfile::Fast);
    assert!(matches!(next(), Change::Joined { .. }));
    visitor.kill();
    let change = next();
    assert!(matches!(change, Change::Left { in_order: true, .. }), "{change:?}");
}

/// Its worker has no reason to look, and would keep its memory for ever.
#[test]
fn a_channel_that_nobody_uses_is_closed_once_its_server_is_killed() {
    if Backend::chosen() == Backend::Verbs {
        return;
    }
    let _watch = Watchdog::start("processes", Duration::from_secs(60));
    let dir = cluster::scratch().unwrap();
    let (mut serving, place) = Process::serve(dir.path(), FabricProfile::Fast);
    let compute = cluster::join_manual(&place.open(FabricProfile::Fast).unwrap(), 1).unwrap();
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        assert_eq!(channel.request_words(ECHO, &[1], Priority::Latency).await.unwrap().words(), [1]);
        serving.kill();
        assert_eq!(links(&place), 1);
        while links(&place) > 0 {
            worker.yield_now().await;
        }
        // The next one at its place is met as if nothing had been.
        let (_serving, _) = Process::serve(dir.path(), FabricProfile::Fast);
        assert_eq!(channel.request_words(ECHO, &[2], Priority::Latency).await.unwrap().words(), [2]);
    });
}
