//! A structure of another crate, which is no ordered map, has the whole program; and a bench ends when what it needs dies.
//!
//! This test is such a program: with a command it does what `farlink` does with it, without one it runs its tests.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use farlink_bench::{Answer, GoOn, Job, Outcomes, Setting, Subject, WorkerId, plugin};
use farlink_runtime::access::*;
use farlink_runtime::error::Error;
use farlink_runtime::operation::{Run, retry};
use farlink_runtime::report::Report;
use farlink_runtime::wire::wire;

/// Sums in the words of one page, which anybody adds to.
#[derive(Debug, Clone, Copy, Default)]
struct Sums;

/// The words of the page that are the framework's.
const FIRST: usize = 4;
/// How often something was added; the sums come after it.
const COUNT: usize = FIRST;
const SUMS: usize = 8;

/// Adds to a sum.
#[derive(Debug, Clone, Copy)]
struct Add {
    sum: u64,
    by: u64,
}

wire!(struct Add { sum, by });

impl Operation for Add {
    type Output = u64;
    type Plugin = Sums;
    const NAME: &'static str = "add";

    fn scope(&self) {}

    async fn run<A: Access<Plugin = Sums>>(&self, access: &A, from: Start) -> Result<u64, Interrupt> {
        let page = access.open(from).await?;
        let index = FIRST + 1 + self.sum as usize % SUMS;
        let add = |pages: &mut A::PagesMut<'_>| {
            let words = pages.page(Slot::ONLY);
            let (sum, count) = (words.word(index).wrapping_add(self.by), words.word(COUNT) + 1);
            drop(words);
            pages.set(Slot::ONLY, index, sum);
            pages.set(Slot::ONLY, COUNT, count);
            sum
        };
        let (sum, _) = access.change(Pages::current(page), add).await?;
        access.context().worker.count("additions");
        Ok(sum)
    }
}

impl Plugin for Sums {
    const NAME: &'static str = "sums";
    const ROOT_BYTES: std::ops::RangeInclusive<usize> = 128..=128;
    type Region = ();
    type Local = ();

    fn links(_page: &(impl Words + ?Sized)) -> impl Iterator<Item = usize> {
        std::iter::empty()
    }

    fn overlap(_page: &(impl Words + ?Sized), (): &()) -> Overlap {
        Overlap::Inside
    }

    fn create(pages: &mut impl PagesMut, root: Slot, _structure: &Structure) {
        pages.describe(root, 0, 1);
    }

    fn operations(to: &mut impl Operations<Self>) {
        to.add::<Add>();
    }

    async fn check<A: Access<Plugin = Self>>(access: &A) -> Result<Report, Error> {
        let Context { worker, structure, .. } = access.context();
        let read = async || access.open(Start::Root).await?.read(|words| words.word(COUNT));
        let mut report = Report { entries: retry(worker, read).await?, pages_by_level: vec![1], ..Report::default() };
        report.audit(worker, structure, &[structure.root].into()).await?;
        Ok(report)
    }
}

/// One worker's additions.
struct Additions {
    next: u64,
    /// Of what is to be loaded.
    share: u64,
    /// How many there are, if they end.
    left: Option<u64>,
    /// One worker of all panics, in the workload of that name.
    is_last: bool,
    panics: bool,
}

impl Iterator for Additions {
    type Item = Add;

    fn next(&mut self) -> Option<Add> {
        if let Some(left) = &mut self.left {
            *left = left.checked_sub(1)?;
        }
        self.next += 1;
        assert!(!self.panics || self.next < 50, "a planted panic");
        Some(Add { sum: self.next, by: 1 })
    }
}

impl Subject for Sums {
    type Data = u64;
    type Request = Add;
    type Source = Additions;
    const WORKLOADS: &'static [&'static str] = &["add", "panic"];

    fn data(setting: &Setting) -> anyhow::Result<u64> {
        Ok(setting.entries)
    }

    fn entries(data: &u64) -> u64 {
        *data
    }

    fn source(data: &Arc<u64>, WorkerId { index, total }: WorkerId) -> Additions {
        let share = **data / total + u64::from(index < **data % total);
        Additions { next: 0, share, left: None, is_last: index + 1 == total, panics: false }
    }

    fn prepare(source: &mut Additions, job: Job<'_>, _go_on: GoOn<'_>) -> anyhow::Result<()> {
        source.next = 0;
        source.left = (job == Job::Load).then_some(source.share);
        source.panics = source.is_last && matches!(job, Job::Workload { name: "panic", .. });
        Ok(())
    }

    async fn run<R: Run<Plugin = Self>>(run: &R, request: Add) -> Result<Outcomes, Error> {
        run.execute(&request).await?;
        Ok(Outcomes { ops: 1, inserted: 1, ..Outcomes::default() })
    }

    fn parse(_line: &str) -> anyhow::Result<Add> {
        Ok(Add { sum: 0, by: 1 })
    }

    async fn answer<R: Run<Plugin = Self>>(run: &R, request: Add) -> Result<Answer, Error> {
        run.execute(&request).await?;
        if let Some(stuck) = std::env::var_os(STUCK).map(|path| File::create(path).unwrap())
            && stuck.try_lock().is_ok()
        {
            std::future::pending::<()>().await;
        }
        Ok(Answer { line: String::new(), fields: Vec::new() })
    }
}

/// Names a file. Whoever has it locked is stuck in an operation: some process or other, as soon as it gets there.
const STUCK: &str = "STUCK";

/// Nothing that is tested takes longer.
const LIMIT: Duration = Duration::from_secs(60);
/// With it the program knows B+-trees instead of sums.
const KNOWS_TREES: &str = "KNOWS_TREES";

fn program(line: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(line.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(output: &Output) -> String {
    [&*String::from_utf8_lossy(&output.stdout), &*String::from_utf8_lossy(&output.stderr)].concat()
}

#[track_caller]
fn holds(line: &str) -> String {
    let output = program(line).output().unwrap();
    assert!(output.status.success(), "{line}: {}", text(&output));
    text(&output)
}

/// What a child said, and whether it ended with success; it must end soon.
fn end(mut child: Child) -> (bool, String) {
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("it hangs: {}", text(&child.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    (output.status.success(), text(&output))
}

/// A memory server, killed with this.
struct Server(Child);

impl Server {
    fn start(dir: &Path, server: usize) -> Self {
        let line = format!("serve --bytes 8MiB --servers 2 --threads 1 --server {server} --dir {}", dir.display());
        let mut child = program(&line).stderr(Stdio::inherit()).spawn().unwrap();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A bench on running servers, in the middle of a workload that lasts a minute.
fn bench_under_way(dir: &Path, options: &str) -> Child {
    let line = format!("bench --connect {} --keys 100 --seconds 60 --mix add {options}", dir.display());
    let mut child = program(&line).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("add, 1 in flight") || line.contains("preparing") {
        line.clear();
        assert!(errors.read_line(&mut line).unwrap() > 0, "the bench ended early");
    }
    std::thread::sleep(Duration::from_millis(200));
    child.stderr = Some(errors.into_inner());
    child
}

fn every_access_mode_works_for_what_is_no_map() {
    for access in ["one-sided", "cached", "cached-inner", "coarse", "hybrid", "engine"] {
        let said = holds(&format!("bench --server-bytes 8MiB --keys 100 --ops 1000 --access {access}"));
        assert!(said.contains("check sums: ok (structure bench, entries 1100"), "{access}: {said}");
        // Of what is shipped nothing is counted here: with an engine, of what it ships.
        let is_counted = said.contains("  counted by the structure, per operation: additions 1.00\n");
        assert!(access == "engine" || is_counted != (access == "coarse"), "{access}: {said}");
    }
    let said = holds("bench --server-bytes 8MiB --keys 100 --ops 1000 --json");
    assert!(said.contains(r#""counts_per_op":{"additions":1.0}"#), "{said}");
    for (options, says) in [
        ("--mix a", "a sums has no workload `a`; its workloads are add, panic"),
        ("--rounds 1", "--rounds: a sums has none"),
        ("--load bulk", "a sums has no bulk load"),
        ("--theta 0.5", "--distribution and --theta are not for a sums"),
        ("--structure btree", "it knows sums"),
    ] {
        let (ok, said) = end(program(&format!("bench {options}")).spawn().unwrap());
        assert!(!ok && said.contains(says), "{options}: {said}");
    }
    // It draws as it likes, and rows do not say otherwise.
    let said = holds("bench --server-bytes 8MiB --keys 100 --ops 100 --json");
    assert!(said.contains(r#""distribution":null,"theta":null"#), "{said}");
    assert_eq!(holds("list"), "sums\n  workloads: add, panic\n");
}

fn a_cluster_can_hold_what_a_program_does_not_know() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let at = format!("--connect {}", dir.display());
    for access in ["one-sided", "coarse", "engine"] {
        holds(&format!("bench {at} --keys 50 --ops 100 --access {access} --name {access}"));
    }
    // Loaded already, and known by its own report.
    let said = holds(&format!("bench {at} --keys 50 --ops 100 --name one-sided"));
    assert!(said.contains("was loaded by an earlier run") && said.contains("entries 250"), "{said}");
    let said = holds(&format!("list {at}"));
    assert_eq!(said.lines().next(), Some("coarse.0: sums, pages of 128 B, one-server"), "{said}");
    let tree = program(&format!("bench {at} --keys 50 --ops 100 --name tree")).env(KNOWS_TREES, "").output().unwrap();
    assert!(tree.status.success(), "{}", text(&tree));
    let said = holds(&format!("check {at}"));
    assert!(said.contains("check sums: ok (structure one-sided, entries 250"), "{said}");
    assert!(said.contains("`tree` is a btree: it takes a program that knows those"), "{said}");
    let (ok, said) = end(program(&format!("check {at} --name tree")).spawn().unwrap());
    assert!(!ok && said.contains("`tree` was not checked"), "{said}");
    let said = holds(&format!("drop {at} --json tree"));
    assert!(said.contains(r#""kind":"dropped","name":"tree""#), "{said}");
    let said = holds(&format!("list {at}"));
    assert!(!said.contains("tree: btree"), "{said}");
}

fn a_panic_ends_the_bench() {
    for options in ["--processes 2 --workers 2", "--workers 3 --access cached", "--access coarse"] {
        let line = format!("bench --server-bytes 8MiB --keys 10 --mix panic --seconds 600 {options}");
        let (ok, said) = end(program(&line).spawn().unwrap());
        assert!(!ok && said.contains("a planted panic"), "{options}: {said}");
        assert!(
            said.lines().any(|line| line.starts_with("farlink: ") && line.contains("panicked")),
            "{options}: {said}"
        );
    }
}

fn a_killed_compute_process_ends_the_bench() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("cluster");
    let _servers = [Server::start(&dir, 0), Server::start(&dir, 1)];
    let bench = bench_under_way(&dir, "--processes 2");
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", bench.id())).unwrap();
    let victim: libc::pid_t = children.split_whitespace().last().unwrap().parse().unwrap();
    // SAFETY: kill touches no memory; the bench has not waited for its child, so the number is its own.
    assert_eq!(unsafe { libc::kill(victim, libc::SIGKILL) }, 0);
    let (ok, said) = end(bench);
    assert!(!ok && said.contains("compute process 1 ended early with signal: 9"), "{said}");
}

fn a_killed_memory_server_ends_the_bench() {
    for access in ["one-sided", "cached", "coarse"] {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("cluster");
        let (_zero, one) = (Server::start(&dir, 0), Server::start(&dir, 1));
        let bench = bench_under_way(&dir, &format!("--access {access}"));
        drop(one);
        let (ok, said) = end(bench);
        assert!(!ok && said.contains("memory server 1") && !said.contains("panicked"), "{access}: {said}");
    }
}

/// Others go on meanwhile, and it may be killed before anybody can say that it is stuck: then another one is.
fn a_chaos_sees_who_is_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let mut chaos = program("chaos --kills 1000000 --keys 256 --silence 3s --json");
    let stuck = folder.path().join("stuck");
    let (ok, said) = end(chaos.env(STUCK, &stuck).spawn().unwrap());
    assert!(!ok && said.contains("said nothing for 3 seconds: it is stuck"), "{said}");
    // Else it was a start that took long.
    assert!(stuck.exists(), "{said}");
}

fn main() -> ExitCode {
    let command = std::env::args().nth(1);
    if command.is_some_and(|command| !command.starts_with('-')) {
        return match std::env::var_os(KNOWS_TREES) {
            Some(_) => farlink_bench::main(&[plugin::<farlink_structures::btree::Tree>()]),
            None => farlink_bench::main(&[plugin::<Sums>()]),
        };
    }
    let tests: [(&str, fn()); 6] = [
        ("every_access_mode_works_for_what_is_no_map", every_access_mode_works_for_what_is_no_map),
        ("a_cluster_can_hold_what_a_program_does_not_know", a_cluster_can_hold_what_a_program_does_not_know),
        ("a_panic_ends_the_bench", a_panic_ends_the_bench),
        ("a_killed_compute_process_ends_the_bench", a_killed_compute_process_ends_the_bench),
        ("a_killed_memory_server_ends_the_bench", a_killed_memory_server_ends_the_bench),
        ("a_chaos_sees_who_is_stuck", a_chaos_sees_who_is_stuck),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}
