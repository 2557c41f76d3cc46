//! `farlink chaos`: compute processes under a load of inserts and removes, killed and stopped at random, and whether anything
//! that they were answered is lost.
//!
//! Each process has keys of its own, and each of its tasks has a part of those: no two operations on one key are under way at the
//! same time. A process (`victim.rs`) says what it begins and what it was answered, in lines, each before the next; what stands in
//! its pipe when it is killed is still read. From these lines `model.rs` knows what each key can be: what was acknowledged last,
//! or what the operation would have made of it that was under way at the kill; of a process that owns the structure and writes
//! back, also what it was since its last flush. An answer that can not be is a problem. A killed process is replaced by another one,
//! with the same keys.
//!
//! Where several processes own the structure, a part each, most operations are another's to do. An owner that is killed takes those with
//! it that others had sent: nobody knows whether it has done them. What it owned goes to the others, and its successor has some of that moved
//! to itself.
//!
//! At the end every key is looked up, and the structure must have as many entries as keys were found. Then the memory servers are started
//! again, without threads: nobody is left who has pages in hand. Each page that is neither in use nor free is lost, and all memory that is
//! in use must be the structure's. So it must be, too, once all keys are removed, each as it was looked up, and no entry is left; and then
//! no more than after a run that does as many operations and kills nobody. Before, the two cannot be compared
//! byte by byte: a process that is killed seldom gets to where most operations are removes, so more keys are left.

mod model;

use std::collections::HashMap;
use std::io::{self, Read as _, Write};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use farlink_children::Child;
use farlink_offload::Durability;
use farlink_runtime::report::Report;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;

use self::model::Model;
use crate::args::{BenchArgs, ChaosArgs};
use crate::cluster::Cluster;
use crate::cluster_view::{self, ClusterView};
use crate::place::Place;
use crate::plan::Plan;
use crate::program::{self, Known, Programs};
use crate::report::{CheckRow, Reporter};
use crate::signals;
use crate::subject::{AccessMode, Answer};
use crate::units::show_nanoseconds;
use crate::victim::{Coreless, Errand, Said, Took, universe, value_of};

/// Answers between two blows, at most.
const ANSWERS_MAX: u64 = 2000;
/// How long a stopped process stands still, in milliseconds.
const STOP_MS: std::ops::Range<u64> = 20..200;
/// One blow in so many only stops a process for a while.
const STOPS_ONE_IN: u32 = 5;
/// Of every second life of a process, nobody is killed who has said nothing for so long: who is stuck would die before it is noticed.
const QUIET_MAX: Duration = Duration::from_millis(100);
/// What memory may differ by, of what the load takes.
const MEMORY_SHARE: f64 = 0.02;
/// So long an operation may wait, in seconds.
const WAIT_S_MAX: f64 = 1.0;
/// Keys of which no more is told.
const PROBLEMS_TOLD: usize = 3;
/// So many failed operations end a run: one would fail its check, and with more it would not get on.
const FAILURES_MAX: u64 = 1000;
/// How often it is looked whether all memory servers run.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// What a run came to.
#[derive(Default)]
struct Outcome {
    answers: u64,
    kills: u64,
    stops: u64,
    longest: Took,
    /// The longest that an operation took but for when its thread had no core, or somebody was stopped.
    longest_wait_ns: u64,
    /// The longest that an operation had taken which a kill cut off.
    longest_cut_off: Duration,
    /// How long it took until a killed process was gone: its operations' askers wait for that, too.
    longest_death: Duration,
    failed: u64,
    first_failure: Option<String>,
    /// Operations that were lost with the owner that they were sent to: nobody knows whether it has done them.
    lost: u64,
    /// Pages that have left caches, and operations that were shipped, as far as processes have told before they were killed.
    evictions: u64,
    shipped: u64,
    wrong: Vec<String>,
    wrong_count: u64,
    /// What the structure says of itself at the end of the load, and once all keys are removed.
    reports: [Report; 2],
    /// Keys that were there at the end of the load.
    found: u64,
    /// What is in use at the end of the load, and once all keys are removed.
    used: [Used; 2],
}

impl Outcome {
    /// Seconds that an operation waited, of what is not the machine's: who takes long to be gone has its locks until then.
    fn wait_s(&self) -> f64 {
        Duration::from_nanos(self.longest_wait_ns).saturating_sub(self.longest_death).as_secs_f64()
    }
}

/// Memory that is in use, while nobody has pages in hand.
#[derive(Debug, Clone, Copy, Default)]
struct Used {
    bytes: u64,
    /// Of these, the structure's.
    structure: u64,
    entries: u64,
    /// Pages that are neither in use nor free.
    lost: u64,
    /// Pages that were nobody's, and were freed.
    freed: u64,
}

pub(crate) fn chaos(programs: Programs<'_>, args: &ChaosArgs) -> anyhow::Result<()> {
    let first = programs.iter().find(|program| program.known().is_some()).map(|program| program.name());
    let name = args.structure.as_deref().or(first).context("this program knows no structures")?;
    let known = program::find(programs, name)?;
    known
        .trace(&[(1, "put 1 1".to_owned())])
        .with_context(|| format!("chaos is for ordered maps, and {name} is none"))?;
    let (plan, bench) = args.plan(known)?;
    signals::watch()?;
    let mut reporter = Reporter::new(io::stdout(), args.json);
    let wild = run(known, &plan, &bench, args, Goal::Kills(args.kills))?;
    let calm = run(known, &plan, &bench, args, Goal::Answers(wild.answers))?;
    tell(&mut reporter, known, (&wild, &calm), &plan)?;
    reporter.all_held()
}

#[derive(Debug, Clone, Copy)]
enum Goal {
    Kills(u64),
    Answers(u64),
}

fn run(known: &dyn Known, plan: &Plan, bench: &BenchArgs, args: &ChaosArgs, goal: Goal) -> anyhow::Result<Outcome> {
    let mut plan = plan.clone();
    let keys = u64::from(args.keys) * u64::from(plan.processes);
    let bytes = crate::cluster::default_server_bytes(keys, plan.servers, plan.servers);
    let mut own = Cluster::start_lasting(plan.servers, bytes, plan.server_threads.unwrap_or(0))?;
    let place = Place::Folder(own.dir().to_owned());
    let cluster = ClusterView::new(place.fabric_once_ready(Default::default(), bench.wait.wait)?);
    let data = known.data(&plan.setting)?;
    if plan.access.caches() {
        plan.cache_bytes = Some(plan.default_cache_bytes(data.entries()));
    }
    data.open_or_create(&cluster, &mut plan, false)?;
    drop(cluster);
    let outcome = Run::new(&plan, &place, args).and_then(|mut run| {
        let cluster = ClusterView::new(place.fabric_once_ready(Default::default(), bench.wait.wait)?);
        run.to(goal, &cluster)?;
        // The memory servers will start again.
        drop(cluster);
        let threads = plan.server_threads.unwrap_or(0);
        if threads > 0 {
            // Nothing that a killed process had sent is carried out any more.
            own.restart(threads)?;
        }
        let looked_up = run.look_up_all(known);
        let mut measure = |threads: u32| {
            own.restart(0)?;
            let cluster = ClusterView::new(place.fabric_once_ready(Default::default(), bench.wait.wait)?);
            let freed = program::free_leaked(known, &cluster, &plan.parts)?;
            let report = program::check(known, &cluster, &plan.parts)?;
            let (structure, entries, lost) = (report.bytes, report.entries, report.audit.lost());
            let used = Used { bytes: cluster.used_bytes()?, structure, entries, lost, freed };
            drop(cluster);
            if threads > 0 {
                own.restart(threads)?;
            }
            Ok::<_, anyhow::Error>((report, used))
        };
        let (full, used) = measure(threads)?;
        run.remove_all(known, &looked_up);
        let (left, used_left) = measure(0)?;
        (run.outcome.reports, run.outcome.used) = ([full, left], [used, used_left]);
        Ok(run.outcome)
    });
    let stopped = own.stop();
    let outcome = outcome?;
    stopped?;
    Ok(outcome)
}

struct Run<'a> {
    plan: &'a Plan,
    place: &'a Place,
    args: &'a ChaosArgs,
    rng: StdRng,
    children: Vec<Child>,
    /// Of each process: how many of its number there were before.
    lives: Vec<u64>,
    /// When each process has said something, or was started.
    heard: Vec<Instant>,
    /// Since when operations are under way, by process and task.
    begun: HashMap<(usize, u32), Instant>,
    /// Until when somebody was stopped, and for how long.
    stops: Vec<(Instant, Duration)>,
    model: Model,
    outcome: Outcome,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, place: &'a Place, args: &'a ChaosArgs) -> anyhow::Result<Self> {
        let owns = matches!(plan.access, AccessMode::Cached | AccessMode::Engine);
        let writes_back = owns && plan.durability == Durability::WriteBack;
        let sends = matches!(plan.access, AccessMode::Coarse | AccessMode::Adaptive) || plan.has_owners();
        let (lives, heard) = (vec![0; plan.processes as usize], vec![Instant::now(); plan.processes as usize]);
        let (rng, model) = (StdRng::seed_from_u64(args.seed), Model::new(writes_back, sends));
        let (children, outcome) = (Vec::new(), Outcome::default());
        let (begun, stops) = (HashMap::new(), Vec::new());
        let mut run = Self { plan, place, args, rng, children, lives, heard, begun, stops, model, outcome };
        for process in 0..plan.processes as usize {
            let child = run.start(process)?;
            run.children.push(child);
        }
        Ok(run)
    }

    fn start(&mut self, process: usize) -> anyhow::Result<Child> {
        let mut command = Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command.arg("chaos-process");
        let mut child = Child::start(&format!("compute process {process}"), command)?;
        self.lives[process] += 1;
        let errand = Errand {
            plan: self.plan.clone(),
            place: self.place.clone(),
            process: process as u32,
            keys: self.args.keys,
            seed: self.args.seed ^ self.lives[process] << 32,
            is_first: process == 0 && self.lives[process] == 1,
        };
        child.send(&serde_json::to_string(&errand)?)?;
        self.heard[process] = Instant::now();
        Ok(child)
    }

    fn to(&mut self, goal: Goal, cluster: &ClusterView) -> anyhow::Result<()> {
        let mut next_blow = self.blow_after(0);
        let mut looked = Instant::now();
        loop {
            let is_over = match goal {
                Goal::Kills(kills) => self.outcome.kills >= kills,
                Goal::Answers(answers) => self.outcome.answers >= answers,
            };
            if is_over || self.outcome.failed >= FAILURES_MAX {
                break;
            }
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                cluster.check_servers()?;
            }
            let mut news = false;
            for process in 0..self.children.len() {
                // Some of each by turns, so that none is far behind.
                for _ in 0..256 {
                    let Some(line) = self.children[process].poll(Duration::ZERO)? else { break };
                    self.hear(process, &line)?;
                    news = true;
                }
            }
            let silence = self.args.silence;
            if let Some(silent) = self.heard.iter().position(|heard| heard.elapsed() >= silence) {
                bail!("compute process {silent} said nothing for {} seconds: it is stuck", silence.as_secs_f64());
            }
            if !news {
                thread::sleep(Duration::from_micros(200));
            }
            if matches!(goal, Goal::Kills(_)) && self.outcome.answers >= next_blow {
                self.blow()?;
                next_blow = self.blow_after(self.outcome.answers);
            }
        }
        // All stop before one leaves: others may have operations for what it owns.
        let mut children = std::mem::take(&mut self.children);
        children.iter_mut().try_for_each(|child| child.send("stop"))?;
        self.hear_until("idle", &mut children)?;
        children.iter_mut().for_each(Child::close_input);
        self.hear_until("end", &mut children)?;
        children.into_iter().try_for_each(Child::finish)
    }

    fn hear_until(&mut self, last: &str, children: &mut [Child]) -> anyhow::Result<()> {
        for (process, child) in children.iter_mut().enumerate() {
            loop {
                let line = child.receive(Some(self.args.silence))?;
                if line == last {
                    break;
                }
                self.hear(process, &line)?;
            }
        }
        Ok(())
    }

    fn blow_after(&mut self, answers: u64) -> u64 {
        answers + self.rng.random_range(1..=ANSWERS_MAX)
    }

    /// Kills or stops somebody.
    fn blow(&mut self) -> anyhow::Result<()> {
        let victim = self.rng.random_range(0..self.children.len());
        let stop = Duration::from_millis(self.rng.random_range(STOP_MS));
        if self.rng.random_ratio(1, STOPS_ONE_IN) {
            self.outcome.stops += 1;
            let begun = Instant::now();
            self.children[victim].pause();
            thread::sleep(stop);
            self.children[victim].resume();
            self.stops.push((Instant::now(), begun.elapsed()));
            return Ok(());
        }
        if self.lives[victim].is_multiple_of(2) && self.heard[victim].elapsed() >= QUIET_MAX {
            return Ok(());
        }
        self.outcome.kills += 1;
        let (killed, begun) = (self.children.remove(victim), Instant::now());
        let lines = killed.kill_and_drain()?;
        self.outcome.longest_death = self.outcome.longest_death.max(begun.elapsed());
        tracing::debug!(victim, took = ?begun.elapsed(), "killed");
        hear_out(&lines, |line| self.hear(victim, line))?;
        self.model.killed(victim);
        for (_, since) in self.begun.extract_if(|(process, _), _| *process == victim) {
            let cut_off = begun.saturating_duration_since(since);
            self.outcome.longest_cut_off = self.outcome.longest_cut_off.max(cut_off);
        }
        let child = self.start(victim)?;
        self.children.insert(victim, child);
        Ok(())
    }

    /// How long somebody was stopped in the time before now.
    fn stopped_for(&self, time: Duration) -> Duration {
        let shares = self.stops.iter().rev().map(|&(end, length)| time.saturating_sub(end.elapsed()).min(length));
        shares.take_while(|share| !share.is_zero()).sum()
    }

    fn hear(&mut self, process: usize, line: &str) -> anyhow::Result<()> {
        let said = Said::parse(line).with_context(|| format!("a process said `{line}`"))?;
        self.heard[process] = Instant::now();
        if let Said::Ends { task, took, .. } | Said::Lost { task, took } | Said::Failed { task, took, .. } = &said {
            self.begun.remove(&(process, *task));
            // Whom another one waits for meanwhile is not dead.
            let stopped = self.stopped_for(Duration::from_nanos(took.ns));
            if took.ns > self.outcome.longest.ns {
                self.outcome.longest = *took;
            }
            let wait_ns = took.waited_ns().saturating_sub(stopped.as_nanos() as u64);
            self.outcome.longest_wait_ns = self.outcome.longest_wait_ns.max(wait_ns);
        }
        match said {
            Said::Begins { task, key, change } => {
                self.begun.insert((process, task), Instant::now());
                self.model.begin(process, task, key, change);
            }
            Said::Ends { task, seen, .. } => {
                self.outcome.answers += 1;
                if let Some(problem) = self.model.end(process, task, seen) {
                    self.wrong(problem);
                }
            }
            Said::Lost { task, .. } => {
                self.outcome.lost += 1;
                self.model.lost(process, task);
            }
            Said::Failed { task, why, .. } => {
                self.outcome.failed += 1;
                self.outcome.first_failure.get_or_insert(why);
                self.model.fail(process, task);
            }
            Said::Counted { evictions, shipped } => {
                self.outcome.evictions += evictions;
                self.outcome.shipped += shipped;
            }
            Said::Flushed => self.model.flushed(process),
        }
        Ok(())
    }

    fn wrong(&mut self, problem: String) {
        self.outcome.wrong_count += 1;
        if self.outcome.wrong.len() < PROBLEMS_TOLD {
            self.outcome.wrong.push(problem);
        }
    }

    fn keys(&self) -> Vec<u64> {
        (0..self.plan.processes).flat_map(|process| universe(self.args.seed, process, self.args.keys)).collect()
    }

    /// What each key is.
    fn look_up_all(&mut self, known: &dyn Known) -> HashMap<u64, Option<u64>> {
        let keys = self.keys();
        let mut seen = HashMap::new();
        let looked_up = self.replay(known, &keys, "get", &mut |key, answer| {
            seen.insert(key, value_of(answer, "value"));
        });
        if let Err(error) = looked_up {
            self.wrong(format!("keys could not be looked up: {error:#}"));
        }
        for (&key, &value) in &seen {
            if let Some(problem) = self.model.found(key, value) {
                self.wrong(problem);
            }
        }
        self.outcome.found = seen.values().flatten().count() as u64;
        seen
    }

    /// Nobody has changed anything since all were looked up.
    fn remove_all(&mut self, known: &dyn Known, looked_up: &HashMap<u64, Option<u64>>) {
        let (keys, mut wrong) = (self.keys(), Vec::new());
        let removed = self.replay(known, &keys, "del", &mut |key, answer| {
            wrong.extend(removal_problem(key, looked_up.get(&key).copied(), value_of(answer, "before")));
        });
        if let Err(error) = removed {
            wrong.push(format!("keys could not be removed: {error:#}"));
        }
        wrong.into_iter().for_each(|problem| self.wrong(problem));
    }

    /// One operation on each key, one after the other.
    fn replay(
        &self,
        known: &dyn Known,
        keys: &[u64],
        operation: &str,
        see: &mut dyn FnMut(u64, &Answer),
    ) -> anyhow::Result<()> {
        let lines: Vec<(u64, String)> =
            (1..).zip(keys).map(|(line, key)| (line, format!("{operation} {key}"))).collect();
        let mut next = keys.iter();
        let mut hand_out = |answer: Answer| {
            next.next().into_iter().for_each(|&key| see(key, &answer));
            Ok(())
        };
        known.trace(&lines)?.replay(self.plan, self.place, &mut hand_out).map(drop)
    }
}

/// Hears what a killed process has said: the last line may have been cut off.
fn hear_out(lines: &[String], mut hear: impl FnMut(&str) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Some((last, whole)) = lines.split_last() else { return Ok(()) };
    whole.iter().try_for_each(|line| hear(line))?;
    let _ = hear(last);
    Ok(())
}

fn tell(
    reporter: &mut Reporter<impl Write>,
    known: &dyn Known,
    (wild, calm): (&Outcome, &Outcome),
    plan: &Plan,
) -> anyhow::Result<()> {
    let evictions = plan.access.owns().then_some(wild.evictions);
    let shipped = plan.access.asks_a_policy().then_some(wild.shipped);
    let mut line = format!(
        "{} operations answered, {} kills, {} stops; the longest took {}, {} of these without a core; without kills {}, and {}; \
         the longest that was cut off had taken {}; the slowest to die took {}",
        wild.answers,
        wild.kills,
        wild.stops,
        show_nanoseconds(wild.longest.ns),
        show_nanoseconds(wild.longest.coreless_ns),
        show_nanoseconds(calm.longest.ns),
        show_nanoseconds(calm.longest.coreless_ns),
        show_nanoseconds(wild.longest_cut_off.as_nanos() as u64),
        show_nanoseconds(wild.longest_death.as_nanos() as u64)
    );
    for (count, what) in [(evictions, "pages left caches"), (shipped, "operations were shipped")] {
        line += &count.map_or_else(String::new, |count| format!("; {count} {what}"));
    }
    let fields: Vec<(&'static str, Value)> = vec![
        ("answers", wild.answers.into()),
        ("kills", wild.kills.into()),
        ("stops", wild.stops.into()),
        ("longest_ns", wild.longest.ns.into()),
        ("longest_coreless_ns", wild.longest.coreless_ns.into()),
        ("longest_wait_ns", wild.longest_wait_ns.into()),
        ("longest_ns_without_kills", calm.longest.ns.into()),
        ("longest_coreless_ns_without_kills", calm.longest.coreless_ns.into()),
        ("longest_wait_ns_without_kills", calm.longest_wait_ns.into()),
        ("longest_cut_off_ns", (wild.longest_cut_off.as_nanos() as u64).into()),
        ("longest_death_ns", (wild.longest_death.as_nanos() as u64).into()),
        ("evictions", evictions.into()),
        ("shipped", shipped.into()),
    ];
    reporter.record("chaos", fields, &line)?;
    for (name, outcome) in [("without-kills", calm), ("acknowledged", wild)] {
        let problem = (outcome.wrong_count > 0).then(|| outcome.wrong.join("; "));
        reporter.check(&CheckRow::new(name, problem).count("wrong", outcome.wrong_count))?;
    }
    let failure = wild.first_failure.as_ref().or(calm.first_failure.as_ref()).cloned();
    let problem = failure.or_else(|| {
        let in_flight = u64::from(plan.processes) * u64::from(plan.in_flight_max());
        let (lost, most) = (wild.lost, wild.kills * in_flight);
        (lost > most || calm.lost > 0)
            .then(|| format!("{lost} were lost with owners, {most} could be, and {} without kills", calm.lost))
    });
    let row = CheckRow::new("operations", problem).count("failed", wild.failed + calm.failed);
    reporter.check(&row.count("lost_with_owners", wild.lost))?;
    // Else a busy machine would break it.
    if Coreless::new().ns().is_some() {
        let wait_s = wild.wait_s().max(calm.wait_s());
        let problem = (wait_s > WAIT_S_MAX).then(|| {
            format!("an operation waited {wait_s:.3} s while its thread had a core and nobody was stopped or dying")
        });
        reporter.check(&CheckRow::new("waits", problem).count("seconds", (wait_s * 1000.0).round() / 1000.0))?;
    }
    let [report, _] = &wild.reports;
    let damaged = report.problems.iter().filter(|problem| problem.what.starts_with("cannot be read")).count();
    let mut check = cluster_view::check_row(known.name(), "chaos", report).count("damaged", damaged);
    check.problem =
        structure_problem(wild).or_else(|| structure_problem(calm).map(|problem| format!("without kills: {problem}")));
    check.ok = check.problem.is_none();
    reporter.check(&check)?;
    let [used, left] = wild.used;
    let row = CheckRow::new("memory", memory_problem(wild.used, calm.used))
        .count("used", used.bytes)
        .count("entries", used.entries)
        .count("left", left.bytes)
        .count("used_without_kills", calm.used[0].bytes)
        .count("entries_without_kills", calm.used[0].entries)
        .count("left_without_kills", calm.used[1].bytes)
        .count("nobodys", used.bytes.abs_diff(used.structure).max(left.bytes.abs_diff(left.structure)))
        .count("lost", used.lost + left.lost)
        .count("freed", used.freed + left.freed);
    Ok(reporter.check(&row)?)
}

/// What is wrong with the structure, at the end of the load and once all keys are removed.
fn structure_problem(Outcome { reports: [full, left], found, .. }: &Outcome) -> Option<String> {
    let removed = || cluster_view::problem(left).map(|problem| format!("once all keys are removed: {problem}"));
    cluster_view::problem(full).or_else(removed).or_else(|| match (full.entries, left.entries) {
        (entries, _) if entries != *found => Some(format!("it has {entries} entries, and {found} keys were found")),
        (_, 0) => None,
        (_, left) => Some(format!("{left} entries are left once all keys are removed")),
    })
}

/// What is wrong with a remove that saw this key so. `None`: the key could not be looked up before.
fn removal_problem(key: u64, looked_up: Option<Option<u64>>, seen: Option<u64>) -> Option<String> {
    let looked_up = looked_up.filter(|looked_up| *looked_up != seen)?;
    let shown = |value: Option<u64>| value.map_or_else(|| "nothing".to_owned(), |value| value.to_string());
    Some(format!("key {key} had {} when it was removed, where {} was looked up", shown(seen), shown(looked_up)))
}

/// What is wrong with the memory that is in use, at the end of the load and once all keys are removed.
fn memory_problem(wild: [Used; 2], calm: [Used; 2]) -> Option<String> {
    for (run, Used { bytes, structure, lost, .. }) in
        wild.map(|used| ("", used)).into_iter().chain(calm.map(|used| ("without kills: ", used)))
    {
        if lost != 0 {
            return Some(format!("{run}{lost} pages are lost: not in use, and not free"));
        }
        if bytes != structure {
            return Some(format!("{run}{bytes} bytes are in use, and {structure} of them are the structure's"));
        }
    }
    let allowed = (calm[0].bytes as f64 * MEMORY_SHARE) as u64;
    let more = wild[1].bytes.saturating_sub(calm[1].bytes);
    let problem =
        || format!("once all keys are removed, {more} bytes more are in use than without kills; {allowed} would do");
    (more > allowed).then(problem)
}

/// The life of a process.
pub(crate) fn serve(programs: Programs<'_>) -> anyhow::Result<()> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let errand: Errand = serde_json::from_str(&line).context("not what a process of a chaos is to do")?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    let (leave, may_leave) = mpsc::channel();
    thread::Builder::new().name("input".to_owned()).spawn(move || {
        // A line, or the end of whoever started it.
        let _ = std::io::stdin().read_line(&mut String::new());
        stopping.store(true, Ordering::Relaxed);
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = leave.send(());
    })?;
    program::find(programs, &errand.plan.structure)?.wreak(&errand, &stop, &may_leave)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_structure_is_sound_with_its_keys_and_without() {
        let report = |entries| Report { entries, ..Report::default() };
        let broken = |entries| Report { problem_count: 1, ..report(entries) };
        let problem = |full, left| {
            let outcome = Outcome { reports: [full, left], found: 9, ..Outcome::default() };
            structure_problem(&outcome).unwrap_or_default()
        };
        assert_eq!(problem(report(9), report(0)), "");
        assert!(problem(broken(9), report(0)).contains("1 more problem"));
        assert!(problem(report(9), broken(0)).starts_with("once all keys are removed: "));
        assert_eq!(problem(report(8), report(0)), "it has 8 entries, and 9 keys were found");
        assert_eq!(problem(report(9), report(2)), "2 entries are left once all keys are removed");
    }

    #[test]
    fn an_operation_waits_while_its_thread_has_a_core_and_nobody_dies() {
        let wait_s = |longest_wait_ns, death_ms| {
            Outcome { longest_wait_ns, longest_death: Duration::from_millis(death_ms), ..Outcome::default() }.wait_s()
        };
        let took = |ns, coreless_ns| Took { ns, coreless_ns }.waited_ns();
        assert_eq!(took(7_000_000_000, 6_500_000_000), 500_000_000);
        assert_eq!(took(7, 8), 0, "they are read one after the other");
        assert_eq!((wait_s(1_200_000_000, 0), wait_s(1_200_000_000, 300), wait_s(1, 300)), (1.2, 0.9, 0.0));
    }

    #[test]
    fn of_a_killed_process_only_the_last_line_may_be_cut_off() {
        let heard = |lines: &[&str]| {
            let lines: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
            let mut said = Vec::new();
            hear_out(&lines, |line| Said::parse(line).map(|line| said.push(line))).map(|()| said.len())
        };
        assert_eq!(heard(&[]).unwrap(), 0);
        assert_eq!(heard(&["b 1 7 del", "f", "e 1 5"]).unwrap(), 2);
        assert_eq!(heard(&["b 1 7 del", "f"]).unwrap(), 2);
        assert!(heard(&["b 1 7 del", "e 1 5", "f"]).is_err());
    }

    #[test]
    fn a_remove_sees_what_was_looked_up() {
        assert_eq!(removal_problem(7, Some(Some(1)), Some(1)), None);
        assert_eq!(removal_problem(7, None, Some(1)), None);
        let problem = removal_problem(7, Some(Some(1)), None).unwrap();
        assert_eq!(problem, "key 7 had nothing when it was removed, where 1 was looked up");
        assert!(removal_problem(7, Some(None), Some(1)).is_some());
    }

    #[test]
    fn memory_is_the_structures_or_a_problem() {
        let used = |bytes, structure, lost| Used { bytes, structure, entries: 9, lost, freed: 0 };
        let calm = [used(10_000, 10_000, 0), used(500, 500, 0)];
        let problem = |full, left| memory_problem([full, left], calm);
        assert_eq!(problem(used(20_000, 20_000, 0), used(700, 700, 0)), None, "more keys were left, and 2% is allowed");
        assert!(problem(used(20_000, 20_000, 0), used(701, 701, 0)).is_some_and(|why| why.contains("201 bytes more")));
        assert!(problem(used(20_000, 19_000, 0), used(500, 500, 0)).is_some_and(|why| why.contains("19000 of them")));
        assert!(problem(used(9_000, 9_000, 0), used(600, 500, 0)).is_some_and(|why| why.contains("500 of them")));
        assert!(problem(used(9_000, 9_000, 1), used(500, 500, 0)).is_some_and(|why| why.contains("1 pages are lost")));
        for broken in [[used(10_000, 9_000, 0), calm[1]], [calm[0], used(500, 500, 2)]] {
            let why = memory_problem(calm, broken).unwrap();
            assert!(why.starts_with("without kills: "), "{why}");
        }
    }
}
