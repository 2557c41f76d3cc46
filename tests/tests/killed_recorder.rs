//! What a history file holds after its process was killed with SIGKILL in the middle of its operations.
//!
//! The test starts itself as a child process that writes to a side file, one system call for each "operation", and
//! records it. The parent kills the child and compares: every effect must have its record. The control records without
//! [`Flush::Invocations`] and must lose some.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use farlink_tests::history::{Flush, History, Op, Outcome, Recorder};

const DIRECTORY: &str = "FARLINK_KILLED_RECORDER_DIRECTORY";
const KILL_PROOF: &str = "FARLINK_KILLED_RECORDER_KILL_PROOF";

/// The parent's process id: the child ends by itself should the parent be gone.
const PARENT: &str = "FARLINK_KILLED_RECORDER_PARENT";

/// Kills the child however the test ends.
struct Killed(Child);

impl Killed {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The child. Does nothing unless the parent started it.
#[test]
fn child() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let directory = Path::new(&directory);
    let flush = if std::env::var_os(KILL_PROOF).is_some() { Flush::Invocations } else { Flush::WhenFull };
    let recorder = Recorder::in_dir(directory, 3, flush).unwrap();
    let mut effects = File::create_new(directory.join("effects")).unwrap();
    let parent: u32 = std::env::var(PARENT).unwrap().parse().unwrap();
    for value in (0..).take_while(|_| parent_id() == parent) {
        let ticket = recorder.begin(Op::Upsert { key: 1, value }).unwrap();
        effects.write_all(&value.to_le_bytes()).unwrap();
        recorder.end(ticket, Outcome::Value(value.checked_sub(1))).unwrap();
    }
}

/// Runs the child until it has had some effects, kills it, and returns the values that took effect and the history.
fn run_and_kill(flush: Flush, effects_min: u64) -> (Vec<u64>, History) {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["child", "--exact"]).env(DIRECTORY, directory.path()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env(PARENT, std::process::id().to_string());
    if flush == Flush::Invocations {
        command.env(KILL_PROOF, "1");
    }
    let mut child = Killed(command.spawn().unwrap());
    let path = directory.path().join("effects");
    let begun = Instant::now();
    while fs::metadata(&path).map_or(0, |metadata| metadata.len()) < effects_min * 8 {
        assert!(child.0.try_wait().unwrap().is_none(), "the child ended by itself");
        assert!(begun.elapsed() < Duration::from_secs(60), "the child does nothing");
        std::thread::yield_now();
    }
    child.kill();
    let effects = fs::read(&path).unwrap();
    let values = effects.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
    (values, History::read_dir(directory.path()).unwrap())
}

fn recorded(history: &History) -> HashSet<u64> {
    let value = |op| match op {
        Op::Upsert { value, .. } => Some(value),
        _ => None,
    };
    history.records().iter().filter_map(|record| value(record.op)).collect()
}

#[test]
fn no_effect_lacks_its_record() {
    for effects_min in [1, 10, 1000, 3000, 10_000] {
        let (effects, history) = run_and_kill(Flush::Invocations, effects_min);
        let recorded = recorded(&history);
        for value in &effects {
            assert!(recorded.contains(value), "{value} of {} took effect and is not recorded", effects.len());
        }
        // At most the last invocation had no effect yet.
        assert!(recorded.len() <= effects.len() + 1);
        let unknown = history.records().iter().filter(|record| record.outcome == Outcome::Unknown).count();
        assert!(unknown <= 1 + (1 << 16) / 64, "only results that were still buffered are lost, not {unknown}");
        farlink_tests::linear::check(&history).unwrap();
    }
}

#[test]
fn control_a_buffered_recorder_loses_records() {
    let (effects, history) = run_and_kill(Flush::WhenFull, 100);
    assert!(recorded(&history).len() < effects.len());
}
