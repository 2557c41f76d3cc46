//! `farlink bench`: leads the compute processes through the phases of a plan and reports each.

use std::collections::HashMap;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use farlink_runtime::report::Report;

use crate::cluster_view::{self, ClusterView};
use crate::others::{self, Incarnations};
use crate::place::Place;
use crate::plan::{Limit, Load, Phase, Plan};
use crate::program::{self, Data, Known};
use crate::progress::{Pace, Progress};
use crate::protocol::{self, Order, Processes};
use crate::report::{CheckRow, MemoryRow, Reporter, Row};
use crate::signals::{self, Waiting};
use crate::subject::Outcomes;
use crate::table::Columns;
use crate::totals::Totals;

/// Reading keys and drawing streams takes a while for many keys; a process silent for longer than this is stuck.
const READY_LIMIT: Duration = Duration::from_secs(600);

/// How often it is looked whether all memory servers run.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// A run, and where it runs.
pub(crate) struct Run<'a> {
    pub(crate) known: &'a dyn Known,
    pub(crate) data: &'a dyn Data,
    pub(crate) plan: &'a Plan,
    pub(crate) place: &'a Place,
    pub(crate) cluster: &'a ClusterView,
}

impl Run<'_> {
    /// Runs all phases on a structure of the cluster, ends the processes, then makes the checks. Whether they held is for
    /// [`Reporter::all_held`] to say.
    pub(crate) fn run(&self, processes: Processes, reporter: &mut Reporter<impl Write>) -> anyhow::Result<()> {
        let Self { known, plan, place, cluster, .. } = *self;
        let phases = plan.phases();
        let mut beside = Beside::default();
        let mut samples = Samples::new(self);
        let mut totals = Totals::new(plan.workloads.iter().any(|workload| known.removes(workload)));
        reporter.note(&plan.summary())?;
        if plan.joins_owners {
            let why = "others own it, so this run sends them its operations, and looks at it in no check";
            reporter.note(&format!("`{}` was loaded by an earlier run: {why}", plan.name))?;
        } else if plan.load == Load::Found {
            let report = self.sound(&mut beside, reporter)?;
            totals.enter(&Outcomes { inserted: report.entries, ..Outcomes::default() });
            reporter.note(&format!("`{}` was loaded by an earlier run; this one loads nothing", plan.name))?;
            samples.take(report.entries)?;
            reporter.memory(&MemoryRow::new("earlier runs", self.cluster.footprint(&report)?))?;
        }
        let mut progress = Progress::new(phases.len() as u64 + 1, reporter.is_json());
        let mut firsts = HashMap::new();
        let (compares, has_cache) = (plan.in_flight.len() > 1, plan.cache_bytes.is_some());
        let columns = Columns { compares, has_cache, returns_many: known.returns_many() };
        let start = |process| Order::Start { plan: Box::new(plan.clone()), process, place: place.clone() };
        // From here on they have work in hand that others' data are part of.
        let waiting = plan.is_connected().then(Waiting::begin);
        // Gone before that, whatever fails.
        let mut processes = processes;
        protocol::tell(&mut processes.0, start)?;
        beside.ours = protocol::await_joined(&mut processes.0, READY_LIMIT)?;
        if plan.joins_owners && !phases.is_empty() {
            let numbers: Vec<u32> = beside.ours.iter().copied().collect();
            let who = others::name(&beside.ours);
            let line = format!("this run is {who}: `farlink repartition --balance --to` moves regions to it");
            progress.suspend(|| reporter.record("joined", vec![("owners", numbers.into())], &line))?;
        }
        if plan.is_connected() && plan.load != Load::Found {
            let is_empty = self.report(&mut beside)?.0.entries == 0;
            ensure!(is_empty, "`{}` was loaded by somebody else just now; run this again", plan.name);
        }
        for phase in &phases {
            let step = plan.describe(phase);
            progress.begin(&format!("preparing {step}"));
            protocol::tell(&mut processes.0, |_| Order::Prepare { phase: phase.clone() })?;
            protocol::await_ready(&mut processes.0, READY_LIMIT)?;
            progress.begin(&step);
            protocol::tell(&mut processes.0, |_| Order::Go)?;
            let begin = Instant::now();
            let mut looked = begin;
            let limit = plan.limit_of(phase);
            let mut advance = |ops| {
                let lasts = if let Some(Limit::For(duration)) = limit { Some(duration) } else { None };
                let of = if let Some(Limit::Operations(all)) = limit { all } else { plan.loaded };
                progress.advance(&step, Pace { ops, of: Some(of), elapsed: begin.elapsed(), lasts });
                if looked.elapsed() >= LOOK_EVERY {
                    looked = Instant::now();
                    cluster.check_servers()?;
                }
                Ok(())
            };
            let mut result = protocol::await_done(&mut processes.0, &mut advance)?;
            if plan.has_owners() {
                protocol::tell(&mut processes.0, |_| Order::Flush)?;
                result.tally += &protocol::await_flushed(&mut processes.0, READY_LIMIT)?;
            }
            totals.enter(&result.tally.outcomes);
            if !matches!(phase, Phase::Workload { is_warm_up: true, .. }) {
                let (name, in_flight) = plan.label(phase);
                let row = Row::measured(&name, result.seconds, &result.tally, plan.cache_bytes.is_some());
                let mut row = varied(row, plan, in_flight)?;
                if columns.compares {
                    let times = row.times(firsts.entry(name).or_insert_with(|| row.clone()));
                    row = row.with("times", Some(times).filter(|times| times.is_finite()));
                }
                progress.suspend(|| reporter.row_at_once(&row, &columns.head(), &columns.line(&row)))?;
                if let Some(counted) = row.counted() {
                    progress
                        .suspend(|| reporter.note(&format!("  counted by the structure, per operation: {counted}")))?;
                }
                if let Some(missed) = row.missed_per_op.filter(|&missed| missed > 0.0) {
                    let why =
                        if totals.may_miss() { ": it had been removed" } else { ", and this run removes nothing" };
                    let note = format!("  {:.1}% of them found nothing{why}", missed * 100.0);
                    progress.suspend(|| reporter.note(&note))?;
                }
            }
            let after = match phase {
                Phase::Load => Some("load".to_owned()),
                Phase::InsertAll { round } => Some(format!("round {round}")),
                Phase::Workload { .. } | Phase::RemoveAll { .. } => None,
            };
            if let Some(after) = after.filter(|_| !plan.joins_owners) {
                let report = progress.suspend(|| self.sound(&mut beside, reporter))?;
                samples.take(report.entries)?;
                let footprint = self.cluster.footprint(&report)?;
                progress.suspend(|| reporter.memory(&MemoryRow::new(&after, footprint)))?;
            }
            progress.finish_step();
        }
        progress.begin("check");
        processes.finish()?;
        drop(waiting);
        ensure!(signals::stopped().is_none(), "the last check was not made");
        beside.ours.clear();
        let mut entries = None;
        if !plan.joins_owners {
            let (own_check, found) = self.final_check(&mut beside)?;
            if own_check.ok && !plan.workloads.is_empty() {
                samples.take(found)?;
            }
            progress.suspend(|| reporter.check(&own_check))?;
            entries = Some(found);
        }
        drop(progress);
        let mut checks = totals.checks(entries).into_iter().chain(samples.row);
        checks.try_for_each(|check| reporter.check(&self.explained(check, &beside)))?;
        Ok(())
    }

    /// The last check of the structure, and its entries.
    pub(crate) fn final_check(&self, beside: &mut Beside) -> anyhow::Result<(CheckRow, u64)> {
        let (report, _) = self.report(beside).context("the final check")?;
        let row = cluster_view::check_row(self.known.name(), &self.plan.name, &report);
        Ok((self.explained(row, beside), report.entries))
    }

    /// A check that has failed, with what others may have had to do with it.
    fn explained(&self, check: CheckRow, beside: &Beside) -> CheckRow {
        match self.plan.is_connected() {
            true => check.explained(&others::likely_cause(&self.plan.name, &beside.others)),
            false => check,
        }
    }

    /// What a structure says of itself, and who else could change it meanwhile.
    fn report(&self, beside: &mut Beside) -> anyhow::Result<(Report, Incarnations)> {
        let (report, living) = program::check_beside(self.known, self.cluster, &self.plan.parts)?;
        let others = &living - &beside.ours;
        beside.others.extend(&others);
        Ok((report, others))
    }

    /// What a structure says of itself, which is sound. Beside others, whose changes it may have met, the run goes on, and the check has
    /// failed all the same.
    fn sound(&self, beside: &mut Beside, reporter: &mut Reporter<impl Write>) -> anyhow::Result<Report> {
        let (report, others) = self.report(beside)?;
        let Some(problem) = cluster_view::problem(&report) else { return Ok(report) };
        let name = &self.plan.name;
        ensure!(!others.is_empty(), "`{name}` is broken: {problem}");
        let row = cluster_view::check_row(self.known.name(), name, &report);
        reporter.check(&self.explained(row, beside))?;
        Ok(report)
    }
}

/// Who else is entered in the structure's map.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// The run's own processes, while they live.
    ours: Incarnations,
    /// Whom any check has met so far.
    others: Incarnations,
}

/// What samples of answers came to so far.
struct Samples<'a> {
    run: &'a Run<'a>,
    row: Option<CheckRow>,
    taken: u64,
    returned: u64,
}

impl<'a> Samples<'a> {
    fn new(run: &'a Run<'a>) -> Self {
        Self { run, row: None, taken: 0, returned: 0 }
    }

    /// Takes some more, of a sound structure with so many entries. Once entries were removed there is nothing to compare
    /// with.
    fn take(&mut self, entries: u64) -> anyhow::Result<()> {
        let Run { known, data, plan, cluster, .. } = *self.run;
        if plan.workloads.iter().any(|workload| known.removes(workload)) {
            return Ok(());
        }
        let Some(samples) = data.compare(cluster, plan, entries)? else { return Ok(()) };
        (self.taken, self.returned) = (self.taken + samples.taken, self.returned + samples.returned);
        let problem = self.row.take().and_then(|row| row.problem).or(samples.problem);
        let row = CheckRow::new(samples.name, problem).count("searches", self.taken).count("returned", self.returned);
        self.row = Some(row);
        Ok(())
    }
}

/// What was varied, and what was held.
pub(crate) fn varied(row: Row, plan: &Plan, in_flight: u32) -> serde_json::Result<Row> {
    let load = match plan.load {
        _ if plan.loaded == 0 => None,
        Load::Bulk { .. } => Some("bulk"),
        Load::Insert => Some("insert"),
        Load::Found => Some("found"),
    };
    // A trace draws nothing.
    let draws = !plan.workloads.is_empty();
    let has_distribution = plan.has_distribution && draws;
    let row = if plan.access.is_of_words() { row.without_levels() } else { row };
    Ok(row
        .with("structure", plan.structure.as_str())
        .with("access", plan.access.name())
        .with("policy", plan.access.asks_a_policy().then_some(plan.policy.name()))
        .with("placement", plan.placement.to_string())
        .with("admission", (plan.access.caches() && !plan.access.is_of_words()).then_some(plan.admission.name()))
        .with("durability", plan.access.owns().then_some(plan.durability.name()))
        .with("cache_bytes", plan.cache_bytes)
        .with("in_flight", in_flight)
        .with("workers", plan.workers)
        .with("processes", plan.processes)
        .with("servers", plan.servers)
        .with("server_threads", plan.server_threads)
        .with("keys", plan.loaded)
        .with("page_bytes", plan.page_bytes)
        .with("window", plan.window)
        .with("latency_ns", plan.latency_ns)
        .with("bandwidth_bytes_per_second", plan.bandwidth_bytes_per_second)
        .with("nasty", plan.nasty)
        .with("validation", serde_json::to_value(plan.validation)?)
        .with("load", load)
        .with("insert_order", (plan.load == Load::Insert).then_some(plan.setting.insert_order.name()))
        .with("distribution", has_distribution.then_some(plan.setting.distribution.name()))
        .with("theta", plan.setting.distribution.theta().filter(|_| has_distribution))
        .with("scan_length", draws.then_some(plan.setting.scan_length))
        .with("warm_up_seconds", plan.warm_up.as_secs_f64())
        .with("seed", plan.setting.seed))
}
