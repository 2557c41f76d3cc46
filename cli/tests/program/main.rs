//! The program as a user meets it: its output, its exit status, its errors.

mod beside;
mod caches;
mod chaos;
mod clusters;
mod costs;
mod input;
mod rdma;
mod repartition;
mod servers;
mod stops;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

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

/// Two memory servers, in files of their own.
struct Cluster {
    _servers: [Server; 2],
    // After those whose files it has.
    folder: tempfile::TempDir,
}

impl Cluster {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let servers = [0, 1].map(|number| Server::start(&folder.path().join("cluster"), number));
        Self { _servers: servers, folder }
    }

    fn at(&self) -> String {
        self.folder.path().join("cluster").to_str().unwrap().to_owned()
    }
}

/// The numbers of a process's children.
fn children_of(process: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    children.split_whitespace().map(|child| child.parse().unwrap()).collect()
}
