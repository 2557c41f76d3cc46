//! What a bench of counters draws, and what it refuses.

use std::{collections::HashSet, process::Command, sync::Arc};

use counter_set::CounterSet;
use farlink_bench::{Job, Setting, Subject, WorkerId};

/// A measured row that asked for the names of its warm-up would measure a replay.
#[test]
fn a_workload_that_comes_again_is_another() {
    let setting = Arc::new(CounterSet::data(&Setting::of_entries(10_000)).unwrap());
    let mut source = CounterSet::source(&setting, WorkerId { index: 0, total: 1 });
    let mut drawn = HashSet::new();
    for _ in 0..3 {
        CounterSet::prepare(&mut source, Job::Workload { name: "get", operations: None }, &|| Ok(())).unwrap();
        drawn.insert(format!("{:?}", source.by_ref().take(20).collect::<Vec<_>>()));
    }
    assert_eq!(drawn.len(), 3);
}

fn bench(options: &str) -> (bool, String) {
    let line = format!("bench --server-bytes 8MiB --keys 100 --ops 100 --json {options}");
    let output = Command::new(env!("CARGO_BIN_EXE_counter-set")).args(line.split_whitespace()).output().unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned());
    (output.status.success(), said.concat())
}

#[test]
fn what_changes_nothing_is_refused() {
    let (ok, said) = bench("");
    assert!(
        ok && said.contains(r#""page_bytes":256,"#) && said.contains(r#""distribution":null,"theta":null"#),
        "{said}"
    );
    for (options, says) in [
        ("--page-bytes 4096", "page-bytes: 4096; a counter-set has one of 256 B"),
        ("--distribution uniform", "--distribution and --theta are not for a counter-set"),
    ] {
        let (ok, said) = bench(options);
        assert!(!ok && said.contains(says), "{options}: {said}");
    }
}
