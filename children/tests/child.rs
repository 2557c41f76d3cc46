//! Child processes: shells.

use std::process::Command;
use std::thread;
use std::time::Duration;

use farlink_children::Child;

const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

fn shell(script: &str) -> Child {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    Child::start("the shell", command).unwrap()
}

fn alive(pid: &str) -> bool {
    // A zombie that nobody waits for is not alive.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

#[test]
fn lines_both_ways_and_a_quiet_end() {
    let mut child = shell("while read line; do echo got $line; done");
    child.send("one").unwrap();
    assert_eq!(child.receive(LIMIT).unwrap(), "got one");
    assert!(child.send("two\nthree").is_err());
    child.finish().unwrap();
}

#[test]
fn stopping() {
    let mut child = shell("echo ready; exec sleep 1000");
    assert_eq!(child.receive(LIMIT).unwrap(), "ready");
    child.stop().unwrap();
    let mut child = shell("trap 'exit 3' TERM; echo ready; while :; do sleep 0.01; done");
    child.receive(LIMIT).unwrap();
    assert!(child.stop().unwrap_err().to_string().contains("exit status: 3"));
}

#[test]
fn an_early_end_is_an_error_with_its_status() {
    let mut child = shell("exit 7");
    let error = child.receive(LIMIT).unwrap_err().to_string();
    assert!(error.contains("the shell ended early") && error.contains('7'), "{error}");
    assert!(child.send("x").is_err());
    assert!(Child::start("nothing", Command::new("/nowhere/nothing")).is_err());
}

#[test]
fn silence_has_a_limit() {
    let mut child = shell("exec sleep 1000");
    let error = child.receive(Some(Duration::from_millis(20))).unwrap_err().to_string();
    assert!(error.contains("the shell said nothing"), "{error}");
}

#[test]
fn a_dropped_child_is_gone() {
    let mut child = shell("echo $$; exec sleep 1000");
    let pid = child.receive(LIMIT).unwrap();
    assert!(alive(&pid));
    drop(child);
    assert!(!alive(&pid));
}

#[test]
fn no_child_outlives_the_thread_that_started_it() {
    let started = thread::spawn(|| {
        let mut child = shell("echo $$; exec sleep 1000");
        let pid = child.receive(LIMIT).unwrap();
        (child, pid)
    });
    let (mut child, pid) = started.join().unwrap();
    // The end of the output is the end of the child.
    assert!(child.receive(LIMIT).unwrap_err().to_string().contains("ended early"));
    assert!(!alive(&pid));
}

#[test]
fn who_has_ended_by_itself_was_not_killed() {
    let mut child = shell("exit 3");
    assert!(child.ends_within(LIMIT.unwrap()));
    let error = child.kill_and_drain().unwrap_err().to_string();
    assert!(error.contains("the shell ended early") && error.contains("exit status: 3"), "{error}");
    let mut child = shell("echo one; echo two; echo three; exec sleep 1000");
    assert_eq!(child.receive(LIMIT).unwrap(), "one");
    assert_eq!(child.receive(LIMIT).unwrap(), "two");
    child.kill_and_drain().unwrap();
}

#[test]
fn a_killed_child_is_gone() {
    let mut child = shell("trap '' TERM; echo $$; while :; do sleep 0.01; done");
    let pid = child.receive(LIMIT).unwrap();
    assert!(child.is_running());
    child.kill().unwrap();
    assert!(!alive(&pid));
}
