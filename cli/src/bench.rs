//! `farlink bench`: leads the compute processes through the phases of a plan and reports each.

use std::io::Write;
use std::time::Duration;

use farlink_children::Child;

use crate::inspect::Cluster;
use crate::ledger::Ledger;
use crate::place::Place;
use crate::plan::{Load, Phase, Plan};
use crate::progress::Progress;
use crate::protocol::{self, Order};
use crate::report::{MemoryRow, Reporter, Row};
use crate::table;
use crate::tally::Outcomes;

/// Reading keys and drawing streams takes a while for many keys; a process silent for longer than this is stuck.
const READY_LIMIT: Duration = Duration::from_secs(600);

/// Runs all phases on a tree of a cluster, which may be the bench's alone, ends the processes, then makes the checks. Whether they held is for [`Reporter::all_held`] to
/// say.
pub(crate) fn run(
    plan: &Plan,
    loaded: u64,
    place: &Place,
    mut processes: Vec<Child>,
    (cluster, alone): (&Cluster, bool),
    reporter: &mut Reporter<impl Write>,
) -> anyhow::Result<()> {
    let phases = plan.phases();
    let mut ledger = Ledger::new(plan.mixes_remove());
    reporter.note(&plan.summary(loaded))?;
    if plan.load == Load::Found {
        let footprint = cluster.footprint(&plan.tree)?;
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
        let row = Row::measured(&name, result.seconds, &result.tally, plan.cache_bytes.is_some());
        reporter.row(varied(row, plan, loaded, in_flight)?)?;
        let after = match phase {
            Phase::Load => Some("load".to_owned()),
            Phase::InsertAll { round } => Some(format!("round {round}")),
            Phase::Mix { .. } | Phase::RemoveAll { .. } => None,
        };
        if let Some(after) = after {
            let footprint = cluster.footprint(&plan.tree)?;
            progress.suspend(|| reporter.memory(&MemoryRow::new(&after, footprint)))?;
        }
        progress.finish_step();
    }
    progress.begin("check");
    processes.drain(..).try_for_each(Child::finish)?;
    let (own_check, entries) = cluster.final_check(&plan.tree, alone)?;
    drop(progress);
    reporter.table("", table::measured)?;
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

/// What was varied, and what was held.
fn varied(row: Row, plan: &Plan, loaded: u64, in_flight: u32) -> serde_json::Result<Row> {
    let load = match plan.load {
        Load::Bulk { .. } => "bulk",
        Load::Insert => "insert",
        Load::Found => "found",
    };
    Ok(row
        .with("structure", serde_json::to_value(plan.structure)?)
        .with("access", plan.access.name())
        .with("cache_bytes", plan.cache_bytes)
        .with("in_flight", in_flight)
        .with("workers", plan.workers)
        .with("processes", plan.processes)
        .with("servers", plan.servers)
        .with("keys", loaded)
        .with("page_bytes", plan.page_bytes)
        .with("latency_ns", plan.latency_ns)
        .with("bandwidth_bytes_per_second", plan.bandwidth_bytes_per_second)
        .with("nasty", plan.nasty)
        .with("validation", serde_json::to_value(plan.validation)?)
        .with("load", load)
        .with("distribution", plan.distribution.name())
        .with("theta", plan.distribution.theta())
        .with("scan_length", plan.scan_length)
        .with("seed", plan.seed))
}
