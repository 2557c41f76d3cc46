//! `farlink chaos`.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::{PROGRAM, children_of, farlink, named, number};

/// On a machine that is busy with others, too.
const LIMIT: Duration = Duration::from_secs(120);

/// Whether the system says for how long a thread had no core. Else nobody knows what an operation waited for.
fn says_who_has_no_core() -> bool {
    Path::new("/proc/thread-self/schedstat").exists()
}

/// Operations that memory servers carry out, and an owner's, outlive whoever asked for them as far as they were promised to.
#[test]
fn chaos_loses_nothing_that_was_acknowledged() {
    // Whether many pages leave caches, and whether many operations are shipped, where there is something to count.
    for (structure, access, keys, evicts, ships) in [
        ("btree", "one-sided", "300", None, None),
        ("btree", "coarse", "300", None, None),
        ("btree", "cached", "2000", Some(true), None),
        ("btree", "engine", "2000", Some(true), Some(true)),
        ("btree", "adaptive", "300", None, Some(true)),
        ("bwtree", "one-sided", "300", None, None),
    ] {
        let options = ["chaos", "--kills", "3", "--keys", keys, "--structure", structure, "--access", access, "--json"];
        let rows = farlink(&options).must_hold().json();
        for name in ["without-kills", "acknowledged", "operations", structure, "memory"] {
            assert_eq!(named(&rows, name).len(), 1, "{access}: {name}");
        }
        assert_eq!(named(&rows, "waits").len(), usize::from(says_who_has_no_core()), "{access}");
        let told = rows.iter().find(|row| row["kind"] == "chaos").unwrap();
        assert!(number(told, "kills") == 3.0 && number(told, "answers") > 3.0, "{told}");
        // More than one that looks at costs ships to know them.
        let many = |count| told[count].as_f64().map(|count| count > number(told, "answers") / 20.0);
        assert_eq!((many("evictions"), many("shipped")), (evicts, ships), "{access}: {told}");
    }
    let several = ["chaos", "--kills", "4", "--keys", "1000", "--access", "cached", "--processes", "3", "--json"];
    farlink(&several).must_fail_with(&["several owners", "--durability logged"]);
    let said = farlink(&[&several[..], &["--durability", "logged"]].concat()).must_hold();
    let rows = said.json();
    let operations = named(&rows, "operations")[0];
    assert!(operations["failed"] == 0 && number(operations, "lost_with_owners") > 0.0, "{operations}");
    farlink(&["chaos", "--structure", "rtree"]).must_fail_with(&["chaos is for ordered maps"]);
}

/// Where nobody answers, nobody is killed: it would wait for ever.
#[test]
fn a_chaos_whose_memory_server_is_gone_says_so_and_ends() {
    let mut chaos = Command::new(PROGRAM)
        .args(["chaos", "--kills", "1000000", "--keys", "300", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let process = chaos.id();
    let of_kind = |kind: &str| {
        let runs = |child: &u32| {
            std::fs::read(format!("/proc/{child}/cmdline"))
                .is_ok_and(|words| words.split(|byte| *byte == 0).any(|word| word == kind.as_bytes()))
        };
        children_of(process).into_iter().find(runs)
    };
    let deadline = Instant::now() + LIMIT;
    while of_kind("chaos-process").is_none() {
        assert!(chaos.try_wait().unwrap().is_none() && Instant::now() < deadline, "it starts nobody");
        std::thread::yield_now();
    }
    let server = of_kind("serve").unwrap();
    // SAFETY: kill touches no memory. It is a child of this test's chaos, which has no reason yet to wait for it.
    assert_eq!(unsafe { libc::kill(server as libc::pid_t, libc::SIGKILL) }, 0);
    let mut errors = String::new();
    std::io::Read::read_to_string(&mut chaos.stderr.take().unwrap(), &mut errors).unwrap();
    assert!(!chaos.wait().unwrap().success() && errors.contains("memory server"), "{errors}");
    farlink(&["chaos", "--kills", "0"]).must_fail_with(&["0 is not in 1.."]);
}

/// It would name those whom the chaos itself stops.
#[test]
fn a_silence_is_longer_than_a_stop_by_the_chaos() {
    farlink(&["chaos", "--kills", "1", "--silence", "900ms"]).must_fail_with(&["give --silence 1s or more"]);
}
