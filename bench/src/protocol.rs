//! What a bench and its compute processes say to each other: one JSON object a line, over standard input and output.
//!
//! ```text
//! bench                                   compute process
//!   Start{plan, process, place} -------->   opens the cluster, reads keys
//!                             <----------   Joined{incarnation}
//!   Prepare{phase}            ---------->   draws the streams, starts the workers up to a barrier
//!                             <----------   Ready
//!   Go                        ---------->   the workers run, the clock runs
//!                             <----------   Progress{ops}, any number of times
//!                             <----------   Done{seconds, tally}
//!   Flush                     ---------->   of several owners only: all have done with the phase
//!                             <----------   Flushed{tally}
//!   ... a Prepare and a Go for each phase ...
//!   (end of input)            ---------->   ends
//! ```
//!
//! Every process is ready before any is told to go, so the processes of one phase overlap. `Failed` may come instead of
//! any answer, and is the process's last word. All processes are listened to at the same time: one that fails or dies may be
//! what the others wait for. Nothing else is written to a compute process's standard output.

use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use farlink_children::Child;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::others::Incarnations;
use crate::place::Place;
use crate::plan::{Phase, Plan};
use crate::signals;
use crate::tally::Tally;

/// How long one process is listened to before the next.
const LISTEN_FOR: Duration = Duration::from_millis(20);
/// How long processes may take to end once they are asked to.
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// The same where an error is on its way out.
const CUT_OFF_LIMIT: Duration = Duration::from_secs(10);

/// The compute processes of a run. When it is dropped an error is on its way out: all are asked to end at the same time, and killed if
/// they do not.
#[derive(Debug)]
pub(crate) struct Processes(pub(crate) Vec<Child>);

impl Processes {
    /// Closes their inputs, and waits until all have ended by themselves.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.0.iter_mut().for_each(Child::close_input);
        let deadline = Instant::now() + STOP_LIMIT;
        for child in &mut self.0 {
            let has_ended = child.ends_within(deadline.saturating_duration_since(Instant::now()));
            ensure!(has_ended, "{} did not end in {} seconds", child.name(), STOP_LIMIT.as_secs());
        }
        self.0.drain(..).try_for_each(Child::finish)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        stop_all(&mut self.0, CUT_OFF_LIMIT);
        for mut child in self.0.drain(..) {
            if !child.ends_within(Duration::ZERO) {
                // What was wrong is on its way out already.
                let _ = child.kill();
            }
        }
    }
}

/// From the bench to a compute process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    Start { plan: Box<Plan>, process: u32, place: Place },
    Prepare { phase: Phase },
    Go,
    Flush,
}

/// From a compute process to the bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// The process is started, and this compute server of the cluster.
    Joined {
        incarnation: u32,
    },
    Ready,
    /// `nanoseconds` is from the start of the process's first worker to the end of its last.
    Done {
        nanoseconds: u64,
        tally: Box<Tally>,
    },
    /// While a phase runs, now and then: so many operations were begun.
    Progress {
        ops: u64,
    },
    /// What its part of the structure came to, and was done for others, in a phase that is over.
    Flushed {
        tally: Box<Tally>,
    },
    Failed {
        error: String,
    },
}

/// What all processes together did in one phase.
#[derive(Debug)]
pub(crate) struct PhaseResult {
    /// The longest of the processes' times.
    pub(crate) seconds: f64,
    pub(crate) tally: Tally,
}

/// Writes one message and hands it over at once.
pub(crate) fn write_message(out: &mut impl Write, message: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(message).context("cannot encode a message")?;
    line.push('\n');
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).context("cannot write to the other process")
}

/// Reads one message; `None` at the end of the input.
pub(crate) fn read_message<T: DeserializeOwned>(input: &mut impl BufRead) -> anyhow::Result<Option<T>> {
    let mut line = String::new();
    if input.read_line(&mut line).context("cannot read from the other process")? == 0 {
        return Ok(None);
    }
    parse(&line).map(Some)
}

fn parse<T: DeserializeOwned>(line: &str) -> anyhow::Result<T> {
    serde_json::from_str(line).with_context(|| format!("not a message: `{}`", crate::units::shorten(line)))
}

/// Gives one order to every process, each its own.
pub(crate) fn tell(children: &mut [Child], order: impl Fn(u32) -> Order) -> anyhow::Result<()> {
    for (process, child) in (0u32..).zip(children) {
        let line = serde_json::to_string(&order(process)).context("cannot encode an order")?;
        child.send(&line)?;
    }
    Ok(())
}

/// Waits until every process is started; which compute servers they are.
pub(crate) fn await_joined(children: &mut [Child], limit: Duration) -> anyhow::Result<Incarnations> {
    let mut all = Incarnations::new();
    for (answer, child) in gather(children, Some(limit), &mut |_| Ok(()))?.into_iter().zip(children) {
        let Answer::Joined { incarnation } = answer else {
            bail!("{} answered {answer:?} where it should be started", child.name());
        };
        all.insert(incarnation);
    }
    Ok(all)
}

/// Waits until every process is ready.
pub(crate) fn await_ready(children: &mut [Child], limit: Duration) -> anyhow::Result<()> {
    for (answer, child) in gather(children, Some(limit), &mut |_| Ok(()))?.into_iter().zip(children) {
        ensure!(answer == Answer::Ready, "{} answered {answer:?} where it should be ready", child.name());
    }
    Ok(())
}

/// Waits until every process has finished the phase, and adds up what they did. `on_progress` is told now and then how many
/// operations all have begun, together; its error ends the wait.
pub(crate) fn await_done(
    children: &mut [Child],
    on_progress: &mut dyn FnMut(u64) -> anyhow::Result<()>,
) -> anyhow::Result<PhaseResult> {
    let mut tally = Tally::default();
    let mut longest = 0;
    for (answer, child) in gather(children, None, on_progress)?.into_iter().zip(children) {
        let Answer::Done { nanoseconds, tally: sent } = answer else {
            bail!("{} answered {answer:?} where it should be done", child.name());
        };
        longest = longest.max(nanoseconds);
        tally += &sent;
    }
    Ok(PhaseResult { seconds: longest as f64 / 1e9, tally })
}

/// Waits until every process has flushed; adds up what they did for others.
pub(crate) fn await_flushed(children: &mut [Child], limit: Duration) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    for (answer, child) in gather(children, Some(limit), &mut |_| Ok(()))?.into_iter().zip(children) {
        let Answer::Flushed { tally: sent } = answer else {
            bail!("{} answered {answer:?} where it should have flushed", child.name());
        };
        tally += &sent;
    }
    Ok(tally)
}

/// An answer of each process.
fn gather(
    children: &mut [Child],
    limit: Option<Duration>,
    on_progress: &mut dyn FnMut(u64) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Answer>> {
    let start = Instant::now();
    let mut answers: Vec<Option<Answer>> = children.iter().map(|_| None).collect();
    let mut begun = vec![0; children.len()];
    while answers.iter().any(Option::is_none) {
        if signals::stopped().is_some() {
            stop_all(children, STOP_LIMIT);
            bail!("its processes were told to end");
        }
        for index in 0..children.len() {
            if answers[index].is_none() {
                answers[index] = hear(&mut children[index], &mut begun[index])
                    .map_err(|error| with_others(error, children, index))?;
            }
        }
        on_progress(begun.iter().sum())?;
        if let Some((limit, child)) = limit.filter(|limit| start.elapsed() > *limit).zip(silent(&answers, children)) {
            bail!("{} said nothing for {} seconds", child.name(), limit.as_secs_f64());
        }
    }
    Ok(answers.into_iter().flatten().collect())
}

/// The answer of a process, if it has come; and how many operations it has begun.
fn hear(child: &mut Child, begun: &mut u64) -> anyhow::Result<Option<Answer>> {
    while let Some(line) = child.poll(LISTEN_FOR)? {
        match parse(&line).with_context(|| format!("from {}", child.name()))? {
            Answer::Failed { error } => bail!("{}: {error}", child.name()),
            Answer::Progress { ops } => *begun = ops,
            answer => return Ok(Some(answer)),
        }
    }
    Ok(None)
}

/// One process's failure, and those of the others: it may have met what another one has left behind as it ended.
fn with_others(failure: anyhow::Error, children: &mut [Child], of: usize) -> anyhow::Error {
    let others = children.iter_mut().enumerate().filter(|&(index, _)| index != of);
    let failures = others.filter_map(|(_, child)| hear(child, &mut 0).err());
    failures.fold(failure, |all, next| anyhow!("{all:#}; {next:#}"))
}

fn silent<'a>(answers: &[Option<Answer>], children: &'a [Child]) -> Option<&'a Child> {
    answers.iter().zip(children).find(|(answer, _)| answer.is_none()).map(|(_, child)| child)
}

/// Asks all to end, and waits so long while they finish their operations and write what their caches hold.
fn stop_all(children: &mut [Child], limit: Duration) {
    children.iter_mut().for_each(Child::terminate);
    let deadline = Instant::now() + limit;
    for child in children {
        child.ends_within(deadline.saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A process that answers each line it reads with the next of these.
    fn answering(answers: &[Answer]) -> Child {
        let script: String = answers
            .iter()
            .map(|answer| format!("read line; echo '{}'\n", serde_json::to_string(answer).unwrap()))
            .collect();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", &script]);
        Child::start("a compute process", command).unwrap()
    }

    #[test]
    fn messages_survive_the_wire() {
        let orders =
            [Order::Prepare { phase: Phase::Workload { workload: 1, in_flight: 16, is_warm_up: false } }, Order::Go];
        let mut wire = Vec::new();
        orders.iter().for_each(|order| write_message(&mut wire, order).unwrap());
        let mut input = wire.as_slice();
        for order in orders {
            assert_eq!(read_message(&mut input).unwrap(), Some(order));
        }
        assert_eq!(read_message::<Order>(&mut input).unwrap(), None);
        assert!(read_message::<Order>(&mut &b"{\"stop\"}\n"[..]).is_err());
    }

    #[test]
    fn a_failure_names_the_process() {
        let mut children = vec![answering(&[Answer::Failed { error: "no such tree".into() }])];
        tell(&mut children, |_| Order::Go).unwrap();
        let error = await_ready(&mut children, LIMIT).unwrap_err().to_string();
        assert_eq!(error, "a compute process: no such tree");
        let mut children = vec![answering(&[Answer::Ready])];
        tell(&mut children, |_| Order::Go).unwrap();
        assert!(await_done(&mut children, &mut |_| Ok(())).unwrap_err().to_string().contains("should be done"));
    }

    #[test]
    fn a_process_that_dies_is_noticed_while_another_is_silent() {
        let silent = || {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", "read line; read more"]);
            Child::start("the silent one", command).unwrap()
        };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exit 3"]);
        let mut children = vec![silent(), Child::start("the dead one", command).unwrap()];
        let error = await_done(&mut children, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.starts_with("the dead one ended early"), "{error}");
    }

    #[test]
    fn who_ended_first_is_named_whoever_is_heard_first() {
        let folder = tempfile::tempdir().unwrap();
        let has_ended = folder.path().join("ended").display().to_string();
        let failing = |name: &str, before: &str, error: &str, after: &str| {
            let line = serde_json::to_string(&Answer::Failed { error: error.into() }).unwrap();
            let mut command = Command::new("/bin/sh");
            command.args(["-c", &format!("{before} echo '{line}'; {after}")]);
            Child::start(name, command).unwrap()
        };
        let waits = format!("until [ -e '{has_ended}' ]; do sleep 0.01; done;");
        let survivor = failing("survivor", &waits, "the other has died", "read line");
        let first = failing("first", "", "a panic", &format!("touch '{has_ended}'"));
        let error = await_done(&mut [survivor, first], &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("first: a panic"), "{error}");
    }

    /// Each of them ends only once all have been told to.
    #[test]
    fn after_an_error_all_are_told_to_end_at_the_same_time() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().display();
        let script = format!(
            "trap 'touch {at}/$$; while [ $(ls {at} | wc -l) -lt 3 ]; do sleep 0.01; done; exit' TERM; \
             echo ready; while :; do sleep 0.01; done"
        );
        let shell = |script: &str| {
            let mut command = Command::new("/bin/sh");
            command.args(["-c", script]);
            Child::start("a compute process", command).unwrap()
        };
        let mut processes = Processes((0..3).map(|_| shell(&script)).collect());
        for child in &mut processes.0 {
            assert_eq!(child.receive(Some(LIMIT)).unwrap(), "ready");
        }
        processes.0.push(shell("exit 3"));
        await_done(&mut processes.0[3..], &mut |_| Ok(())).unwrap_err();
        let begun = Instant::now();
        drop(processes);
        assert!(begun.elapsed() < CUT_OFF_LIMIT, "{:?}", begun.elapsed());
    }

    #[test]
    fn progress_adds_up() {
        let mut command = Command::new("/bin/sh");
        let lines = [Answer::Progress { ops: 5 }, Answer::Done { nanoseconds: 7, tally: Box::default() }];
        let lines = lines.map(|line| serde_json::to_string(&line).unwrap());
        command.args(["-c", &format!("echo '{}'; sleep 0.3; echo '{}'", lines[0], lines[1])]);
        let mut children = vec![Child::start("a compute process", command).unwrap()];
        let mut seen = Vec::new();
        let mut see = |ops| {
            seen.push(ops);
            Ok(())
        };
        await_done(&mut children, &mut see).unwrap();
        assert!(seen.contains(&5), "{seen:?}");
    }
}
