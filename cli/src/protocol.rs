//! What a bench and its compute processes say to each other: one JSON object a line, over standard input and output.
//!
//! ```text
//! bench                                   compute process
//!   Start{plan, process, place} -------->   opens the cluster, reads keys
//!                             <----------   Ready
//!   Prepare{phase}            ---------->   draws the streams, starts the workers up to a barrier
//!                             <----------   Ready
//!   Go                        ---------->   the workers run, the clock runs
//!                             <----------   Done{seconds, tally}
//!   ... a Prepare and a Go for each phase ...
//!   (end of input)            ---------->   ends
//! ```
//!
//! Every process is ready before any is told to go, so the processes of one phase overlap. `Failed` may come instead of
//! any answer, and is the process's last word. Nothing else is written to a compute process's standard output.

use std::io::{BufRead, Write};
use std::time::Duration;

use anyhow::{Context as _, bail};
use farlink_children::Child;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::place::Place;
use crate::plan::{Phase, Plan};
use crate::tally::Tally;

/// From the bench to a compute process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    Start { plan: Box<Plan>, process: u32, place: Place },
    Prepare { phase: Phase },
    Go,
}

/// From a compute process to the bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    Ready,
    /// `nanoseconds` is from the start of the process's first worker to the end of its last.
    Done {
        nanoseconds: u64,
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

/// Waits until every process is ready.
pub(crate) fn await_ready(children: &mut [Child], limit: Option<Duration>) -> anyhow::Result<()> {
    for child in children {
        match answer(child, limit)? {
            Answer::Ready => {}
            other => bail!("{} answered {other:?} where it should be ready", child.name()),
        }
    }
    Ok(())
}

/// Waits until every process has finished the phase, and adds up what they did.
pub(crate) fn await_done(children: &mut [Child]) -> anyhow::Result<PhaseResult> {
    let mut tally = Tally::default();
    let mut longest = 0;
    for child in children {
        match answer(child, None)? {
            Answer::Done { nanoseconds, tally: sent } => {
                longest = longest.max(nanoseconds);
                tally += &sent;
            }
            other => bail!("{} answered {other:?} where it should be done", child.name()),
        }
    }
    Ok(PhaseResult { seconds: longest as f64 / 1e9, tally })
}

fn answer(child: &mut Child, limit: Option<Duration>) -> anyhow::Result<Answer> {
    let line = child.receive(limit)?;
    match parse(&line).with_context(|| format!("from {}", child.name()))? {
        Answer::Failed { error } => bail!("{}: {error}", child.name()),
        answer => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const LIMIT: Option<Duration> = Some(Duration::from_secs(20));

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
        let orders = [Order::Prepare { phase: Phase::Mix { mix: 1, in_flight: 16 } }, Order::Go];
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
        assert!(await_done(&mut children).unwrap_err().to_string().contains("should be done"));
    }
}
