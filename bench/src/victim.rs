//! One compute process of a chaos: works until its input ends, and says each thing before the next.
//!
//! ```text
//! b TASK KEY put VALUE | b TASK KEY del | b TASK KEY get      an operation begins
//! e TASK VALUE|- NANOSECONDS NANOSECONDS                      it has ended, saw this, took so long, and so much of that without a core
//! l TASK NANOSECONDS NANOSECONDS WHY                          the owner that it was sent to was lost with it, after so long
//! x TASK NANOSECONDS NANOSECONDS WHY                          it has failed, after so long
//! c EVICTIONS SHIPPED                                         so many pages have left its cache, and operations were shipped, since it said so last
//! f                                                           all is flushed
//! idle                                                        it has stopped
//! end
//! ```

use std::cell::Cell;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use anyhow::Context as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::error::Error;
use futures_util::future::join_all;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde::{Deserialize, Serialize};

use crate::host;
use crate::maps::keys::mix;
use crate::owner::Share;
use crate::place::Place;
use crate::plan::Plan;
use crate::route::Opened;
use crate::subject::{Answer, Subject};

/// Operations of each task between two flushes.
const ROUND: u32 = 100;
/// Operations of a task while most are inserts, and then while most are removes.
const TIDE: u64 = 400;

/// What an operation does to its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It has this value then.
    Put(u64),
    /// It is not there then.
    Remove,
    /// It is looked up.
    Nothing,
}

impl Change {
    /// What the key is after it, if it was so before.
    pub(crate) fn of(self, before: Option<u64>) -> Option<u64> {
        match self {
            Self::Put(value) => Some(value),
            Self::Remove => None,
            Self::Nothing => before,
        }
    }
}

/// A number among the fields of an answer.
pub(crate) fn value_of(answer: &Answer, field: &str) -> Option<u64> {
    answer.fields.iter().find(|(name, _)| *name == field).and_then(|(_, value)| value.as_u64())
}

impl Change {
    /// As the structure's traces write it.
    fn line(self, key: u64) -> String {
        match self {
            Self::Put(value) => format!("put {key} {value}"),
            Self::Remove => format!("del {key}"),
            Self::Nothing => format!("get {key}"),
        }
    }

    /// What an answer says was there before, or is there.
    fn seen(self, answer: &Answer) -> Option<u64> {
        value_of(answer, if self == Self::Nothing { "value" } else { "before" })
    }
}

/// What a process is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Errand {
    pub(crate) plan: Plan,
    pub(crate) place: Place,
    pub(crate) process: u32,
    pub(crate) keys: u32,
    pub(crate) seed: u64,
    /// Whether it owns everything, to begin with, where processes own the structure.
    pub(crate) is_first: bool,
}

/// How long something took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Took {
    pub(crate) ns: u64,
    /// Of this, its thread could run and had no core.
    pub(crate) coreless_ns: u64,
}

impl Took {
    /// But for when its thread had no core.
    pub(crate) fn waited_ns(self) -> u64 {
        self.ns.saturating_sub(self.coreless_ns)
    }
}

/// What a process says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    Begins { task: u32, key: u64, change: Change },
    Ends { task: u32, seen: Option<u64>, took: Took },
    Lost { task: u32, took: Took },
    Failed { task: u32, took: Took, why: String },
    Counted { evictions: u64, shipped: u64 },
    Flushed,
}

impl Said {
    pub(crate) fn parse(line: &str) -> anyhow::Result<Self> {
        let mut words = line.splitn(3, ' ');
        let mut word = || words.next().context("a line ends early");
        let kind = word()?;
        if kind == "f" {
            return Ok(Self::Flushed);
        }
        if kind == "c" {
            return Ok(Self::Counted { evictions: word()?.parse()?, shipped: word()?.parse()? });
        }
        let (task, rest) = (word()?.parse()?, word()?);
        let parts: Vec<&str> = rest.split(' ').collect();
        let took =
            |ns: &str, coreless_ns: &str| anyhow::Ok(Took { ns: ns.parse()?, coreless_ns: coreless_ns.parse()? });
        Ok(match (kind, parts.as_slice()) {
            ("b", [key, "put", value]) => Self::Begins { task, key: key.parse()?, change: Change::Put(value.parse()?) },
            ("b", [key, "del"]) => Self::Begins { task, key: key.parse()?, change: Change::Remove },
            ("b", [key, "get"]) => Self::Begins { task, key: key.parse()?, change: Change::Nothing },
            ("e", [seen, ns, coreless_ns]) => {
                let seen = (*seen != "-").then(|| seen.parse()).transpose()?;
                Self::Ends { task, seen, took: took(ns, coreless_ns)? }
            }
            ("l", [ns, coreless_ns, ..]) => Self::Lost { task, took: took(ns, coreless_ns)? },
            ("x", [ns, coreless_ns, why @ ..]) => {
                Self::Failed { task, took: took(ns, coreless_ns)?, why: why.join(" ") }
            }
            _ => anyhow::bail!("not a line of a process"),
        })
    }
}

/// The keys of a process.
pub(crate) fn universe(seed: u64, process: u32, keys: u32) -> impl Iterator<Item = u64> {
    (0..u64::from(keys)).map(move |index| mix(seed ^ u64::from(process) << 40 ^ index))
}

fn say(line: &str) -> anyhow::Result<()> {
    // In one piece, so that it is in the pipe whole or not at all.
    Ok(std::io::stdout().write_all(format!("{line}\n").as_bytes())?)
}

/// Says for how long the calling thread could run, and had no core.
pub(crate) struct Coreless(Option<File>);

impl Coreless {
    pub(crate) fn new() -> Self {
        Self(File::open("/proc/thread-self/schedstat").ok())
    }

    /// `None` where the system does not say.
    pub(crate) fn ns(&self) -> Option<u64> {
        let mut text = [0; 64];
        let read = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        std::str::from_utf8(&text[..read]).ok()?.split(' ').nth(1)?.parse().ok()
    }
}

/// Works on a structure until it is told to stop, and then waits until it may leave.
pub(crate) fn work<S: Subject>(errand: &Errand, stop: &AtomicBool, may_leave: &Receiver<()>) -> anyhow::Result<()> {
    let plan = &errand.plan;
    let options = ComputeOptions { seed: errand.seed, ..ComputeOptions::default() };
    let compute = Arc::new(ComputeServer::join(plan.fabric(&errand.place)?, options)?);
    let data = S::data(&plan.setting)?;
    let mut route = host::route::<S>(plan, &data, &compute)?;
    let mut share = None;
    if plan.has_owners() {
        route = route.among_owners()?;
        share = Some(Share::start(plan, errand.process, &route, &data, &compute)?);
        if errand.is_first {
            share.iter().try_for_each(Share::take_all)?;
        }
    }
    let worker = compute.worker()?;
    let access = route.open(&worker)?;
    let coreless = Coreless::new();
    let told = Cell::new((0, 0));
    let tell_counts = || {
        let (own, of_parts) = (access.cache_counts(), share.as_ref().map(Share::cache_counts).unwrap_or_default());
        let (evictions, shipped) = (own.evictions + of_parts.evictions, own.shipped);
        let (evictions_told, shipped_told) = told.replace((evictions, shipped));
        match (evictions - evictions_told, shipped - shipped_told) {
            (0, 0) => Ok(()),
            (evictions, shipped) => say(&format!("c {evictions} {shipped}")),
        }
    };
    let keys: Vec<u64> = universe(plan.setting.seed, errand.process, errand.keys).collect();
    let mut tasks: Vec<Worker<'_, S>> = (0..plan.in_flight_max())
        .map(|task| Worker {
            task,
            access: &access,
            coreless: &coreless,
            tell_counts: &tell_counts,
            keys: keys.iter().copied().skip(task as usize).step_by(plan.in_flight_max() as usize).collect(),
            rng: StdRng::seed_from_u64(errand.seed ^ u64::from(errand.process) << 16 ^ u64::from(task)),
            done: 0,
        })
        .collect();
    while !stop.load(Ordering::Relaxed) {
        share.iter().try_for_each(Share::seek)?;
        let rounds = join_all(tasks.iter_mut().map(|task| task.round(stop)));
        worker.block_on(rounds).into_iter().collect::<anyhow::Result<()>>()?;
        worker.block_on(access.flush())?;
        say("f")?;
    }
    // Others may have operations for it until all have stopped.
    say("idle")?;
    may_leave.recv().ok();
    drop(tasks);
    drop(access);
    drop(worker);
    drop(share);
    drop(compute);
    say("end")
}

/// One task of a process.
struct Worker<'a, S: Subject> {
    task: u32,
    access: &'a Opened<S>,
    coreless: &'a Coreless,
    /// Of the whole process.
    tell_counts: &'a dyn Fn() -> anyhow::Result<()>,
    keys: Vec<u64>,
    rng: StdRng,
    done: u64,
}

impl<S: Subject> Worker<'_, S> {
    async fn round(&mut self, stop: &AtomicBool) -> anyhow::Result<()> {
        for _ in 0..ROUND {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let key = self.keys[self.rng.random_range(0..self.keys.len())];
            let mostly_inserts = (self.done / TIDE).is_multiple_of(2);
            let change = match (self.rng.random_range(0..10), mostly_inserts) {
                (0, _) => Change::Nothing,
                (1..=8, true) | (1, false) => Change::Put(self.rng.random()),
                _ => Change::Remove,
            };
            self.done += 1;
            let (task, line) = (self.task, change.line(key));
            let request = S::parse(&line)?;
            let mut words = line.splitn(3, ' ');
            let (operation, _, value) = (words.next(), words.next(), words.next());
            let value = value.map_or_else(String::new, |value| format!(" {value}"));
            say(&format!("b {task} {key} {}{value}", operation.unwrap_or_default()))?;
            let coreless_ns = || self.coreless.ns().unwrap_or(0);
            let (begun, coreless_before_ns) = (Instant::now(), coreless_ns());
            let answered = self.access.answer(request).await;
            let (ns, coreless_ns) = (begun.elapsed().as_nanos(), coreless_ns() - coreless_before_ns);
            match answered {
                Ok(answer) => {
                    let seen = change.seen(&answer).map_or_else(|| "-".to_owned(), |value| value.to_string());
                    say(&format!("e {task} {seen} {ns} {coreless_ns}"))?;
                }
                Err(error) => {
                    let kind = if matches!(error, Error::OwnerLost { .. }) { 'l' } else { 'x' };
                    say(&format!("{kind} {task} {ns} {coreless_ns} {}", error.to_string().replace('\n', " ")))?;
                }
            }
            // To look takes a while.
            if task == 0 {
                (self.tell_counts)()?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_they_say() {
        let parse = |line| Said::parse(line).ok();
        assert_eq!(parse("b 3 7 put 9"), Some(Said::Begins { task: 3, key: 7, change: Change::Put(9) }));
        assert_eq!(parse("b 3 7 del"), Some(Said::Begins { task: 3, key: 7, change: Change::Remove }));
        let took = Took { ns: 55, coreless_ns: 9 };
        assert_eq!(parse("e 3 - 55 9"), Some(Said::Ends { task: 3, seen: None, took }));
        assert_eq!(parse("e 3 8 55 9"), Some(Said::Ends { task: 3, seen: Some(8), took }));
        assert_eq!(parse("l 3 55 9 gone"), Some(Said::Lost { task: 3, took }));
        assert_eq!(parse("x 3 55 9 page 1 is bad"), Some(Said::Failed { task: 3, took, why: "page 1 is bad".into() }));
        assert_eq!(parse("c 4 5"), Some(Said::Counted { evictions: 4, shipped: 5 }));
        assert_eq!(parse("f"), Some(Said::Flushed));
        assert!(
            ["", "c 4", "b 3", "b 3 7 put", "e 3 - 1", "e x - 1 1", "q 1 2"].iter().all(|line| parse(line).is_none())
        );
    }
}
