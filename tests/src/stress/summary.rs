//! What a run of the acceptance test came to.

use std::{collections::BTreeMap, fmt, sync::Arc};

use anyhow::{Context as _, ensure};
use farlink_runtime::{
    fabric::Fabric,
    one_sided::{OneSided, Proof},
    worker::Worker,
};
use farlink_structures::map::{Map, Report};

use super::{AccessMode, Awaits, Options, TREE};
use crate::{
    access_under_test::Seen,
    cluster,
    history::{Flush, History, Op, Outcome, Recorder},
    linear, of_structure,
    peer::{BREAKS, PeerReport},
    scans,
    subject::Subject,
    workload::spread_keys,
};

/// More keys than this are read by one scan.
const GETS_MAX: usize = 20_000;

/// What a run counted, and whether it was right.
#[derive(Debug)]
pub struct Summary {
    /// The seed of the run.
    pub seed: u64,
    /// How long the workers worked.
    pub seconds: f64,
    /// What they did, together.
    pub peer_report: PeerReport,
    /// Operations in flight at once, at most, by the history.
    pub in_flight_max: usize,
    /// Whether the point operations were linearizable.
    pub linear: Result<linear::Report, linear::LinearError>,
    /// Whether the scans kept their promise.
    pub scans: Result<scans::ScanReport, scans::ScanError>,
    /// What is in the tree after all have left.
    pub check: Report,
    /// Bytes in use then that are not the tree's.
    pub unaccounted_bytes: u64,
    /// Memory servers that go on carry out operations: they keep pages for the next ones.
    pub servers_keep: bool,
    /// How the workers reached the tree.
    pub access: AccessMode,
    /// Whether READs are torn now and then, and must have been.
    pub tears: bool,
    /// Whether the fabric fails now and then.
    pub fails: bool,
    /// Whether the tree only grew: see [`Options::grows`].
    pub grows: bool,
    /// Whether there is more than caches of inner pages hold.
    pub evicts: bool,
    /// Whether operations were sent to the owners of their keys: see [`Options::route`].
    pub routed: bool,
    /// Whether ranges went from owner to owner.
    pub moves: bool,
    /// Parts of which the owner saw other entries than are read one-sided.
    pub misseen: Vec<(Seen, Seen)>,
}

impl Summary {
    /// Judges a run whose workers have all left, by its history and by what they left in memory. Reads every key once
    /// more, as the history's last client, so that a write that was lost at the end shows, too.
    ///
    /// # Errors
    /// If the tree cannot be read; if the history does not have each of the operations.
    pub fn judge(
        fabric: &Arc<dyn Fabric>,
        options: &Options,
        mut history: History,
        peer_report: PeerReport,
        seconds: f64,
    ) -> anyhow::Result<Self> {
        let (records, operations) = (history.len() as u64, peer_report.operations);
        ensure!(records == operations, "of {operations} operations the history has {records}, and nobody was killed");
        let in_flight_max = history.in_flight_max();
        let (last, misseen) = of_structure!(options.structure, look(fabric, options, &peer_report.seen))
            .context("reading what is left")?;
        history.merge(last);
        let check = cluster::check_tree(fabric, TREE).context("checking what is left")?;
        let unaccounted_bytes = cluster::unaccounted_bytes(fabric, &check)?;
        let (linear, scans) =
            (linear::check(&history), check_scans(&history, if options.route { &[] } else { &peer_report.seen }));
        let (seed, access) = (options.seed, options.access);
        let servers_keep = options.place.is_some() && (access.is_divided() || access.asks_a_policy());
        let tears = options.tears() && options.awaits == Awaits::All;
        Ok(Self {
            seed,
            seconds,
            peer_report,
            in_flight_max,
            linear,
            scans,
            check,
            unaccounted_bytes,
            servers_keep,
            access,
            tears,
            fails: options.profile.faults().is_some(),
            grows: options.grows,
            evicts: options.is_loaded(),
            routed: options.route,
            moves: options.move_every_ms != 0,
            misseen,
        })
    }

    /// Lock requests that lost, at other compute servers' hands or at their own.
    pub fn conflicts(&self) -> u64 {
        self.peer_report.counter("lock_conflicts") + self.peer_report.counter("local_waits")
    }

    /// What did not hold, and what was not tested, in words.
    pub fn failures(&self) -> Vec<String> {
        [self.wrongs(), self.omissions()].concat()
    }

    /// What did not hold, in words; and what nothing can have been seen of.
    pub fn wrongs(&self) -> Vec<String> {
        let mut failures = idle(&self.peer_report, self.fails);
        if let Err(error) = &self.linear {
            failures.push(format!("not linearizable: {error}"));
        }
        if let Err(error) = &self.scans {
            failures.push(format!("a scan broke its promise: {error}"));
        }
        if !self.check.is_clean() {
            failures.push(format!("the tree is not clean: {:?}", self.check));
        }
        if self.check.audit.held != 0 && !self.servers_keep {
            failures.push(format!("{} pages are held after all have left", self.check.audit.held));
        }
        if self.unaccounted_bytes != 0 && !self.servers_keep {
            failures.push(format!("{} bytes of remote memory are nobody's", self.unaccounted_bytes));
        }
        for (through_the_cache, one_sided) in &self.misseen {
            failures.push(format!("an owner saw {through_the_cache:?}, and left {one_sided:?}"));
        }
        if self.peer_report.counter("cache_write_errors") != 0 && !self.fails {
            failures.push(format!("{} pages could not be written", self.peer_report.counter("cache_write_errors")));
        }
        if self.peer_report.damaged != 0 {
            failures.push(format!("{} operations met a damaged page, and nobody died", self.peer_report.damaged));
        }
        failures
    }

    /// What has not happened that the test is about, in words.
    fn omissions(&self) -> Vec<String> {
        let torn = [("torn reads", self.peer_report.counter("torn_reads"))];
        let shared = [if self.tears { &torn[..] } else { &[] }, &[("lock conflicts", self.conflicts())]].concat();
        let changes = [("splits", self.peer_report.counter("splits")), ("merges", self.peer_report.counter("merges"))];
        let changes = &changes[..if self.grows { 1 } else { 2 }];
        let cached = ["cache_hits", "cache_misses"].map(|name| (name, self.peer_report.counter(name)));
        let replaced = ["cache_evictions", "cache_write_backs"].map(|name| (name, self.peer_report.counter(name)));
        let counted = match self.access {
            AccessMode::OneSided => [&shared[..], changes].concat(),
            // A short run does not fill the caches.
            AccessMode::Cached if self.grows => [changes, &cached].concat(),
            AccessMode::Cached | AccessMode::Engine => [changes, &cached, &replaced].concat(),
            AccessMode::CachedInner if self.evicts => [&shared[..], changes, &cached, &replaced[..1]].concat(),
            AccessMode::CachedInner => [&shared[..], changes, &cached].concat(),
            AccessMode::CachedMapping => [changes, &cached].concat(),
            // What the memory servers count is not known here.
            AccessMode::Coarse => vec![("messages", self.peer_report.counter("two_sided"))],
            AccessMode::Hybrid | AccessMode::Adaptive => {
                [&shared[..], changes, &[("messages", self.peer_report.counter("two_sided"))]].concat()
            }
        };
        let nothing = counted.into_iter().filter(|&(_, count)| count == 0);
        let mut omissions: Vec<String> =
            nothing.map(|(name, _)| format!("no {name}: the test has not tested them")).collect();
        if let Ok(scans) = &self.scans {
            omissions.extend(unscanned(scans, self.peer_report.operations));
        }
        if self.routed && self.peer_report.counter("two_sided") == 0 {
            omissions.push("no messages: the test has not tested them".into());
        }
        if self.moves && self.peer_report.counter("moves") == 0 {
            omissions.push("no range went to another owner: the test has not tested it".into());
        }
        if self.peer_report.seen.len() > 1 && self.peer_report.strays == 0 && !self.routed {
            omissions.push("no operation on another owner's keys: the test has not tested them".into());
        }
        omissions
    }
}

/// A run that has shown nothing, as nobody did anything, or hardly anything came to an end; or as nothing failed, and was to.
pub fn idle(peer_report: &PeerReport, fails: bool) -> Vec<String> {
    let PeerReport { operations, dropped, damaged, failed, .. } = *peer_report;
    let known = operations.saturating_sub(dropped + damaged + failed);
    let mut idle = Vec::new();
    if operations == 0 {
        idle.push("no operations".into());
    }
    if known < operations / 2 {
        idle.push(format!("of {operations} operations {known} have come to anything"));
    }
    if fails && peer_report.counter(BREAKS) == 0 {
        idle.push("nothing has failed".into());
    }
    idle
}

/// What the check of the scans of a run of so many operations had nothing of, if it was not a short one.
pub fn unscanned(scans: &scans::ScanReport, operations: u64) -> Vec<String> {
    const SHORT: u64 = 10_000;
    if operations < SHORT {
        return Vec::new();
    }
    let scans::ScanReport { scans, entries, certainly_present } = *scans;
    let counted =
        [("scans", scans), ("entries of scans", entries), ("keys that scans must have met", certainly_present)];
    let nothing = counted.into_iter().filter(|&(_, count)| count == 0);
    nothing.map(|(name, _)| format!("no {name}: the test has not tested them")).collect()
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |ok: bool| if ok { "yes" } else { "NO" };
        let rate = self.peer_report.operations as f64 / self.seconds;
        let scans = self.scans.as_ref().map_or(0, |report| report.scans);
        write!(
            f,
            "seed {}: {} operations in {:.1} s ({rate:.0}/s, {} in flight at most, {} dropped, {} failed, {} paths broken), {scans} scans: \
             linearizable {}, scans kept their promise {}, tree clean {} ({} entries, {} pages, height {}), leaked {}, \
             held {}; torn reads refused {}, lock conflicts {} ({} remote + {} local), splits {}, merges {}, restarts {}",
            self.seed,
            self.peer_report.operations,
            self.seconds,
            self.in_flight_max,
            self.peer_report.dropped,
            self.peer_report.failed,
            self.peer_report.counter(BREAKS),
            yes(self.linear.is_ok()),
            yes(self.scans.is_ok()),
            yes(self.check.is_clean()),
            self.check.entries,
            self.check.pages(),
            self.check.height(),
            self.check.audit.leaked.len(),
            self.check.audit.held,
            self.peer_report.counter("torn_reads"),
            self.conflicts(),
            self.peer_report.counter("lock_conflicts"),
            self.peer_report.counter("local_waits"),
            self.peer_report.counter("splits"),
            self.peer_report.counter("merges"),
            self.peer_report.counter("restarts"),
        )?;
        match self.access {
            AccessMode::OneSided => return Ok(()),
            AccessMode::Coarse | AccessMode::Hybrid | AccessMode::Adaptive => {
                return write!(
                    f,
                    "; {:.3} messages and {:.3} READs an operation",
                    self.peer_report.counter("two_sided") as f64 / self.peer_report.operations as f64,
                    self.peer_report.counter("reads") as f64 / self.peer_report.operations as f64,
                );
            }
            AccessMode::Cached | AccessMode::Engine | AccessMode::CachedInner | AccessMode::CachedMapping => {}
        }
        if self.routed {
            let messages = self.peer_report.counter("two_sided") as f64 / self.peer_report.operations as f64;
            let moves = self.peer_report.counter("moves");
            write!(f, "; {messages:.3} messages an operation, {moves} moves")?;
        }
        write!(
            f,
            "; cache: hits {}, misses {}, evictions {}, write-backs {}, rescues {}, refusals {}, shared fetches {}, \
             failed upgrades {}; refused {} operations on others' keys; {} bytes unaccounted for",
            self.peer_report.counter("cache_hits"),
            self.peer_report.counter("cache_misses"),
            self.peer_report.counter("cache_evictions"),
            self.peer_report.counter("cache_write_backs"),
            self.peer_report.counter("cache_rescues"),
            self.peer_report.counter("cache_refusals"),
            self.peer_report.counter("cache_shared_fetches"),
            self.peer_report.counter("cache_failed_upgrades"),
            self.peer_report.strays,
            self.unaccounted_bytes,
        )
    }
}

/// What is there when all have left: every key, and what differs from what owners saw.
fn look<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    seen: &[Seen],
) -> anyhow::Result<(History, Vec<(Seen, Seen)>)> {
    cluster::with_worker(fabric, |worker| {
        let tree = worker.block_on(Map::<S, _>::open(worker, TREE, Proof::Checksum))?;
        Ok((read_all(worker, &tree, options)?, compare(worker, &tree, seen)?))
    })
}

/// A history in which one more client gets every key, one after the other; from one scan, if they are many.
fn read_all<S: Subject>(worker: &Worker, tree: &Map<S, OneSided<S>>, options: &Options) -> anyhow::Result<History> {
    let recorder = Recorder::new(Vec::new(), options.processes * options.workers, Flush::WhenFull)?;
    worker.block_on(async {
        let entries: Option<BTreeMap<u64, u64>> = match options.keys > GETS_MAX {
            true => Some(tree.range(..).take(usize::MAX).await?.into_iter().collect()),
            false => None,
        };
        for key in spread_keys(options.keys) {
            let ticket = recorder.begin(Op::Get { key })?;
            let value = match &entries {
                Some(entries) => entries.get(&key).copied(),
                None => tree.get(key).await?,
            };
            recorder.end(ticket, Outcome::Value(value))?;
        }
        anyhow::Ok(())
    })?;
    Ok(History::decode(&recorder.finish()?)?)
}

/// What owners saw in the end, beside what is there, where that differs.
fn compare<S: Subject>(
    worker: &Worker,
    tree: &Map<S, OneSided<S>>,
    seen: &[Seen],
) -> anyhow::Result<Vec<(Seen, Seen)>> {
    let mut differ = Vec::new();
    for seen in seen {
        let entries = worker.block_on(tree.range(seen.part.low..=seen.part.high).take(usize::MAX))?;
        let found = Seen::of(seen.part, &entries);
        if found != *seen {
            differ.push((*seen, found));
        }
    }
    Ok(differ)
}

/// The scans of each owner, on its part; or all of them, on the whole tree.
fn check_scans(history: &History, seen: &[Seen]) -> Result<scans::ScanReport, scans::ScanError> {
    if seen.len() < 2 {
        return scans::check(history);
    }
    let mut total = scans::ScanReport::default();
    for Seen { part, .. } in seen {
        let report = scans::check(&history.part(part.low, part.high))?;
        total.scans += report.scans;
        total.entries += report.entries;
        total.certainly_present += report.certainly_present;
    }
    Ok(total)
}
