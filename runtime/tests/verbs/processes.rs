//! Processes that are killed: a memory server under its compute servers, and a compute server that holds locks.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_runtime::{
    clock::Clock,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    fabric::{
        Error, Fabric, Liveness, Verb,
        verbs::{VerbsFabric, VerbsOptions, VerbsServer},
    },
    lock::OwnerId,
};

use crate::scene::{self, FREE, Wire, at, connect, eventually, serve};

/// What this program does when it is started as a process of a test.
const ROLE: &str = "FARLINK_VERBS_TEST_ROLE";
const SERVER: &str = "FARLINK_VERBS_TEST_SERVER";

/// Another process, which runs the test `child` of this program in a role. It ends when this one does.
struct Peer {
    process: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Peer {
    fn start(role: &str, server: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "processes::child", "--nocapture"])
            .envs([(ROLE, role), (SERVER, server)])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output }
    }

    /// What stands behind `key` in the first line that has it.
    fn says(&mut self, key: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the other process ended and never said {key}");
            if let Some((_, value)) = line.trim().split_once(key) {
                return value.trim().to_owned();
            }
        }
    }

    /// A memory server destroys all its queue pairs.
    fn break_connections(&mut self) {
        writeln!(self.process.stdin.as_ref().unwrap()).unwrap();
        self.says("broken");
    }

    fn signal(&self, signal: libc::c_int) {
        let id = i32::try_from(self.process.id()).unwrap();
        // SAFETY: a process of this test's own, which it has not waited for.
        assert_eq!(unsafe { libc::kill(id, signal) }, 0);
    }

    /// SIGKILL.
    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Not a test of its own: what the other processes do.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let mut keep = String::new();
    let wait_for_the_end = |keep: &mut String| drop(std::io::stdin().read_line(keep));
    match role.as_str() {
        "serve" => {
            let server = serve();
            println!("listens on {}", server.address());
            while std::io::stdin().read_line(&mut keep).unwrap() > 0 {
                server.break_connections();
                println!("broken .");
            }
        }
        "compute" => {
            let options = VerbsOptions::new([std::env::var(SERVER).unwrap()], scene::secret());
            let fabric = Arc::new(VerbsFabric::connect(&options).unwrap());
            let compute =
                ComputeServer::join(Arc::clone(&fabric) as Arc<dyn Fabric>, ComputeOptions::default()).unwrap();
            let mut wire = Wire::new(&fabric);
            wire.write(at(0, FREE), &[1]).unwrap();
            println!("owner {}", compute.owner().incarnation());
            wait_for_the_end(&mut keep);
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn a_killed_memory_server_is_noticed_by_all_who_use_it() {
    if !scene::has_device() {
        return;
    }
    let mut server = Peer::start("serve", "");
    let address = server.says("listens on");
    let fabric = Arc::new(VerbsFabric::connect(&VerbsOptions::new([address], scene::secret())).unwrap());
    let compute = ComputeServer::join(Arc::clone(&fabric) as Arc<dyn Fabric>, ComputeOptions::default()).unwrap();
    let worker = compute.worker().unwrap();
    let mut wire = Wire::new(&fabric);
    wire.write(at(0, FREE), &[1]).unwrap();
    // Requests under way when it dies, and requests after.
    wire.ring((0..500).map(|_| (at(0, FREE), Verb::FetchAdd(1))));
    server.kill();
    let killed = Instant::now();
    let completions = wire.wait(500);
    let error = wire.read(at(0, FREE), 1).unwrap_err();
    println!("noticed after {:?}; {} requests had completed", killed.elapsed(), {
        completions.iter().filter(|completion| completion.outcome.is_ok()).count()
    });
    assert!(matches!(*error, Error::ServerLost { .. }), "{error}");
    let error = worker.block_on(farlink_runtime::catalog::list(&worker)).unwrap_err();
    assert!(matches!(error, farlink_runtime::error::Error::Fabric(Error::ServerLost { .. })), "{error}");
    // Leaving does not hang either.
    drop(worker);
    drop(compute);
}

/// Its card still serves those who are connected. Nobody else waits for it without end: not who connects, nor whose connection broke.
#[test]
fn a_stopped_memory_server_holds_nobody_up() {
    if !scene::has_device() {
        return;
    }
    let mut server = Peer::start("serve", "");
    let address = server.says("listens on");
    let fabric = Arc::new(VerbsFabric::connect(&VerbsOptions::new([address], scene::secret())).unwrap());
    let mut wire = Wire::new(&fabric);
    wire.write(at(0, FREE), &[1]).unwrap();
    server.signal(libc::SIGSTOP);
    assert_eq!(wire.read(at(0, FREE), 1).unwrap(), [1]);
    let error = fabric.endpoint(1, Clock::monotonic()).unwrap_err();
    assert!(matches!(error, Error::ServerMissing { .. }), "{error}");
    server.signal(libc::SIGCONT);
    eventually("it answers again", || fabric.endpoint(1, Clock::monotonic()).is_ok());

    server.break_connections();
    server.signal(libc::SIGSTOP);
    let errors: Vec<_> = (0..2).map(|_| wire.read(at(0, FREE), 1).unwrap_err()).collect();
    assert!(matches!(*errors[1], Error::ServerLost { .. }), "{errors:?}");
}

#[test]
fn a_killed_compute_server_leaves_nothing_behind_and_others_go_on() {
    if !scene::has_device() {
        return;
    }
    let server: VerbsServer = serve();
    let fabric = connect(&[&server]);
    // Without a thread, which would make its connection at its own time.
    let options = ComputeOptions { maintenance: Maintenance::Manual, ..ComputeOptions::default() };
    let compute = ComputeServer::join(Arc::clone(&fabric) as Arc<dyn Fabric>, options).unwrap();
    let mut wire = Wire::new(&fabric);
    let before = (server.connected(), server.queue_pairs());
    let mut others: Vec<Peer> = (0..2).map(|_| Peer::start("compute", &server.address().to_string())).collect();
    let owners: Vec<OwnerId> =
        others.iter_mut().map(|other| OwnerId::new(other.says("owner").parse().unwrap()).unwrap()).collect();
    assert!(owners.iter().all(|&owner| fabric.liveness(owner) == Liveness::Alive));
    assert!(server.connected() == before.0 + 2 && server.queue_pairs() > before.1);
    others[0].kill();
    eventually("it is dead", || fabric.liveness(owners[0]) == Liveness::Dead);
    assert_eq!(server.connected(), before.0 + 1);
    assert_eq!(fabric.liveness(owners[1]), Liveness::Alive);
    others[1].kill();
    eventually("it is dead", || fabric.liveness(owners[1]) == Liveness::Dead);
    assert_eq!((server.connected(), server.queue_pairs()), before);
    wire.fetch_add(at(0, FREE), 1).unwrap();
    // The slots of the dead are taken by others, so there is always one.
    let worker = compute.worker().unwrap();
    assert!(worker.block_on(farlink_runtime::catalog::list(&worker)).unwrap().is_empty());
}

/// The limit on what an endpoint may wait for is that of the card and of the control connection, not of the other process:
/// one that is only stopped is not dead.
#[test]
fn a_stopped_compute_server_is_not_dead() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut other = Peer::start("compute", &server.address().to_string());
    let owner = OwnerId::new(other.says("owner").parse().unwrap()).unwrap();
    other.signal(libc::SIGSTOP);
    // Longer than *alive* is taken for granted.
    let until = Instant::now() + Duration::from_millis(100);
    while Instant::now() < until {
        assert_eq!(fabric.liveness(owner), Liveness::Alive);
    }
    other.signal(libc::SIGCONT);
    drop(other);
    eventually("it is dead once it is killed", || fabric.liveness(owner) == Liveness::Dead);
}
