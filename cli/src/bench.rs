//! `farlink bench`: leads the compute processes through the phases of a plan and reports each.
//!
//! The tree itself is reached only through [`Inspect`], so that the order of events is tested without one.

use std::io::Write;

use std::time::Duration;

use crate::child::Child;
use crate::ledger::Ledger;
use crate::place::Place;
use crate::plan::{Load, Phase, Plan, Structure, Validation};
use crate::progress::Progress;
use crate::protocol::{self, Order};
use crate::report::{CheckRow, Footprint, MeasuredRow, MemoryRow, Reporter, Varied};
use crate::tally::Outcomes;

/// Reading keys and drawing streams takes a while for many keys; a process silent for longer than this is stuck.
const READY_LIMIT: Duration = Duration::from_secs(600);

/// What the bench asks of the tree between phases.
pub(crate) trait Inspect {
    /// Its size, and the remote memory it takes.
    fn footprint(&mut self) -> anyhow::Result<Footprint>;
    /// The structure's own check of itself, and how many entries it counted. No compute process is attached any more.
    fn check(&mut self) -> anyhow::Result<(CheckRow, u64)>;
}

/// Runs all phases, ends the processes, then makes the checks. Whether they held is for [`Reporter::failed_checks`] to
/// say.
pub(crate) fn run(
    plan: &Plan,
    loaded: u64,
    place: &Place,
    mut processes: Vec<Child>,
    tree: &mut impl Inspect,
    reporter: &mut Reporter<impl Write>,
) -> anyhow::Result<()> {
    let phases = plan.phases();
    let mut ledger = Ledger::new(plan.mixes_remove());
    reporter.note(&plan.summary(loaded))?;
    if plan.load == Load::Found {
        let footprint = tree.footprint()?;
        ledger.enter(&Outcomes { inserted: footprint.entries, ..Outcomes::default() });
        reporter.note(&format!("the tree `{}` was loaded by an earlier run; this one loads nothing", plan.tree))?;
        reporter.memory(&MemoryRow::new("earlier runs", footprint))?;
    }
    let mut progress = Progress::new(phases.len() as u64 + 1, reporter.is_json());
    let processes = &mut processes;
    let start = |process| Order::Start { plan: Box::new(plan.clone()), process, place: place.clone() };
    protocol::tell(processes, start)?;
    protocol::await_ready(processes, Some(READY_LIMIT))?;
    for phase in &phases {
        let step = plan.describe(phase);
        progress.begin(&format!("preparing {step}"));
        protocol::tell(processes, |_| Order::Prepare { phase: phase.clone() })?;
        protocol::await_ready(processes, Some(READY_LIMIT))?;
        progress.begin(&step);
        protocol::tell(processes, |_| Order::Go)?;
        let result = protocol::await_done(processes)?;
        ledger.enter(&result.tally.outcomes);
        let (name, in_flight) = label(plan, phase);
        let row = MeasuredRow::new(&name, result.seconds, &result.tally, varied(plan, loaded, in_flight));
        reporter.measured(row)?;
        let after = match phase {
            Phase::Load => Some("load".to_owned()),
            Phase::InsertAll { round } => Some(format!("round {round}")),
            Phase::Mix { .. } | Phase::RemoveAll { .. } => None,
        };
        if let Some(after) = after {
            let footprint = tree.footprint()?;
            progress.suspend(|| reporter.memory(&MemoryRow::new(&after, footprint)))?;
        }
        progress.finish_step();
    }
    progress.begin("check");
    processes.drain(..).try_for_each(Child::finish)?;
    let (own_check, entries) = tree.check()?;
    drop(progress);
    reporter.table()?;
    reporter.check(&own_check)?;
    for check in ledger.checks(entries) {
        reporter.check(&check)?;
    }
    Ok(())
}

/// The row's name, and how many operations a worker keeps in flight in it.
fn label(plan: &Plan, phase: &Phase) -> (String, u32) {
    match phase {
        Phase::Load => match plan.load {
            Load::Bulk { .. } => ("bulk-load".to_owned(), 1),
            Load::Insert | Load::Found => ("insert-load".to_owned(), plan.in_flight_max()),
        },
        Phase::Mix { mix, in_flight } => {
            (plan.mixes.get(*mix).map_or_else(|| "mix".to_owned(), |mix| mix.name.clone()), *in_flight)
        }
        Phase::RemoveAll { round } => (format!("remove-all-{round}"), plan.in_flight_max()),
        Phase::InsertAll { round } => (format!("insert-all-{round}"), plan.in_flight_max()),
    }
}

fn varied(plan: &Plan, loaded: u64, in_flight: u32) -> Varied {
    Varied {
        structure: match plan.structure {
            Structure::Btree => "btree".to_owned(),
        },
        access: plan.access.name().to_owned(),
        cache_bytes: plan.cache_bytes,
        in_flight,
        workers: plan.workers,
        processes: plan.processes,
        servers: plan.servers,
        keys: loaded,
        page_bytes: plan.page_bytes,
        latency_ns: plan.latency_ns,
        bandwidth_bytes_per_second: plan.bandwidth_bytes_per_second,
        nasty: plan.nasty,
        validation: match plan.validation {
            Validation::Checksum => "checksum".to_owned(),
            Validation::LockBodyLock => "lock-body-lock".to_owned(),
        },
        load: match plan.load {
            Load::Bulk { .. } => "bulk".to_owned(),
            Load::Insert => "insert".to_owned(),
            Load::Found => "found".to_owned(),
        },
        distribution: plan.distribution.name().to_owned(),
        theta: plan.distribution.theta(),
        scan_length: plan.scan_length,
        seed: plan.seed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::plan;
    use crate::protocol::Answer;
    use crate::report::tests::footprint;
    use crate::tally::Tally;
    use serde_json::Value;
    use std::process::Command;

    struct FakeTree(u64);

    impl Inspect for FakeTree {
        fn footprint(&mut self) -> anyhow::Result<Footprint> {
            Ok(footprint(self.0))
        }
        fn check(&mut self) -> anyhow::Result<(CheckRow, u64)> {
            Ok((CheckRow::new("btree", None).count("entries", self.0), self.0))
        }
    }

    /// A process that says it inserted everything in the load, and nothing happened later but the rounds.
    fn process(plan: &Plan, keys: u64) -> Child {
        let mut answers = vec![Answer::Ready];
        for phase in plan.phases() {
            let mut tally = Tally::new().unwrap();
            tally.outcomes = match phase {
                Phase::Load | Phase::InsertAll { .. } => Outcomes { ops: keys, inserted: keys, ..Outcomes::default() },
                Phase::RemoveAll { .. } => Outcomes { ops: keys, removed: keys, ..Outcomes::default() },
                Phase::Mix { .. } => Outcomes { ops: 10, found: 10, ..Outcomes::default() },
            };
            answers.extend([Answer::Ready, Answer::Done { nanoseconds: 1000, tally: Box::new(tally.to_sent()) }]);
        }
        let script: String = answers
            .iter()
            .map(|answer| format!("read line; echo '{}'\n", serde_json::to_string(answer).unwrap()))
            .collect();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script]);
        Child::start("a compute process", command).unwrap()
    }

    fn lines(entries: u64) -> (Vec<Value>, Vec<String>) {
        let plan = plan();
        let processes = vec![process(&plan, 500), process(&plan, 500)];
        let mut out = Vec::new();
        let mut reporter = Reporter::new(&mut out, true);
        run(&plan, 1000, &Place::Folder("d".into()), processes, &mut FakeTree(entries), &mut reporter).unwrap();
        let failed = reporter.failed_checks().to_vec();
        let text = String::from_utf8(out).unwrap();
        (text.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), failed)
    }

    #[test]
    fn phases_memory_and_checks_in_order() {
        let (lines, failed) = lines(1000);
        let names: Vec<&str> = lines.iter().map(|line| line["name"].as_str().unwrap()).collect();
        let expected = [
            "bulk-load",
            "memory",
            "ycsb-a",
            "ycsb-a",
            "ycsb-c",
            "ycsb-c",
            "remove-all-1",
            "insert-all-1",
            "memory",
            "btree",
            "entries",
            "keys-present",
            "inserts-new",
            "values",
            "scans",
        ];
        assert_eq!(names, expected);
        assert!(failed.is_empty());
        assert_eq!((&lines[3]["in_flight"], &lines[3]["ops"]), (&Value::from(16), &Value::from(20)));
        assert_eq!(lines[1]["leased_bytes_per_entry"], 20.0);
    }

    #[test]
    fn a_tree_of_the_wrong_size_fails() {
        assert_eq!(lines(999).1, ["entries"]);
    }
}
