//! The acceptance test: workers in several processes change one small tree of few, hot keys as fast as they can, over a
//! fabric that does all that it may. Afterwards everything has to be right: the history of all of them together is
//! linearizable for each key and its scans keep their promise, the tree has no broken invariant and no leaked page, nobody
//! holds a page, and what the test is about has happened at all: torn READs, lock conflicts, splits and merges.

use std::{ffi::OsString, fmt, path::Path, sync::Arc, time::Instant};

use anyhow::Context;
use farlink_runtime::{
    fabric::mem::MemFabric,
    one_sided::{OneSided, Proof},
};
use farlink_structures::btree::{BTree, BTreeOptions, Report};

use crate::{
    cluster::{self, Served},
    drive::TIDE_NS,
    history::{Flush, History, Op, Outcome, Recorder},
    linear,
    peer::{Manners, Peer, Role, Spec, Tale, Work},
    scans,
    settings::Arguments,
    workload::spread_keys,
};

/// How to use `farlink-stress`.
pub const USAGE: &str = "\
farlink-stress [--OPTION VALUE ...]
Workers in several processes change one tree over a nasty fabric; then everything is checked.

  --seconds 10      how long they work
  --processes 4     compute servers, each a process
  --workers 2       worker threads of each
  --in-flight 8     operations in flight for each worker
  --keys 1000       how many keys they share
  --scan-limit 40   entries that a scan asks for, at most
  --page-bytes 256  a power of two from 256 to 4096
  --servers 3       memory servers
  --fabric nasty    nasty, or weak: without ordered WRITEs, too; or fast
  --proof checksum  checksum, or three-waits
  --drop-one-in 0   drop one operation in so many in mid-flight; 0 for none
  --seed N          decides what is random; a fresh one by default
";

/// The name of the tree under stress.
pub const TREE: &str = "stress";

/// Bytes of each memory server.
const SERVER_BYTES: u64 = 32 << 20;

/// A run.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// How long the workers work.
    pub seconds: f64,
    /// Compute servers, each a process.
    pub processes: u32,
    /// Worker threads of each.
    pub workers: u32,
    /// Operations in flight for each worker.
    pub in_flight: usize,
    /// How many keys they share.
    pub keys: usize,
    /// Entries that a scan asks for, at most.
    pub scan_limit_max: u32,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Memory servers.
    pub servers: usize,
    /// How the fabric behaves.
    pub manners: Manners,
    /// Whether readers use [`Proof::LockBodyLock`].
    pub three_waits: bool,
    /// One operation in so many is dropped in mid-flight; 0 for none.
    pub drop_one_in: u32,
    /// Decides what is random.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seconds: 10.0,
            processes: 4,
            workers: 2,
            in_flight: 8,
            keys: 1000,
            scan_limit_max: 40,
            page_bytes: 256,
            servers: 3,
            manners: Manners::Nasty,
            three_waits: false,
            drop_one_in: 0,
            seed: rand::random(),
        }
    }
}

impl Options {
    /// Reads the command line.
    ///
    /// # Errors
    /// If there is something on it that [`USAGE`] does not say.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> anyhow::Result<Self> {
        let mut arguments = Arguments::parse(arguments)?;
        let mut options = Self::default();
        let (mut fabric, mut proof) = (String::from("nasty"), String::from("checksum"));
        arguments.take("seconds", &mut options.seconds)?;
        arguments.take("processes", &mut options.processes)?;
        arguments.take("workers", &mut options.workers)?;
        arguments.take("in-flight", &mut options.in_flight)?;
        arguments.take("keys", &mut options.keys)?;
        arguments.take("scan-limit", &mut options.scan_limit_max)?;
        arguments.take("page-bytes", &mut options.page_bytes)?;
        arguments.take("servers", &mut options.servers)?;
        arguments.take("fabric", &mut fabric)?;
        arguments.take("proof", &mut proof)?;
        arguments.take("drop-one-in", &mut options.drop_one_in)?;
        arguments.take("seed", &mut options.seed)?;
        arguments.finish()?;
        options.manners = match fabric.as_str() {
            "nasty" => Manners::Nasty,
            "weak" => Manners::Weak,
            "fast" => Manners::Fast,
            other => anyhow::bail!("--fabric {other}: it is nasty, weak or fast"),
        };
        options.three_waits = match proof.as_str() {
            "checksum" => false,
            "three-waits" => true,
            other => anyhow::bail!("--proof {other}: it is checksum or three-waits"),
        };
        Ok(options)
    }

    /// How its tree is made and read.
    pub fn tree(&self) -> BTreeOptions {
        let proof = if self.three_waits { Proof::LockBodyLock } else { Proof::Checksum };
        BTreeOptions { page_bytes: self.page_bytes, proof }
    }

    /// The workload of the process with this number.
    pub fn work(&self, process: u32, histories: &Path) -> Work {
        Work {
            histories: histories.to_owned(),
            first_client: process * self.workers,
            workers: self.workers,
            in_flight: self.in_flight,
            keys: self.keys,
            scan_limit_max: self.scan_limit_max,
            drop_one_in: self.drop_one_in,
            tide_ns: TIDE_NS,
            seconds: self.seconds,
            deadly: false,
        }
    }
}

/// What a run counted, and whether it was right.
#[derive(Debug)]
pub struct Summary {
    /// The seed of the run.
    pub seed: u64,
    /// How long the workers worked.
    pub seconds: f64,
    /// What they did, together.
    pub tale: Tale,
    /// Operations in flight at once, at most, by the history.
    pub in_flight_max: usize,
    /// Whether the point operations were linearizable.
    pub linear: Result<linear::Report, linear::LinearError>,
    /// Whether the scans kept their promise.
    pub scans: Result<scans::ScanReport, scans::ScanError>,
    /// What is in the tree after all have left.
    pub check: Report,
}

impl Summary {
    /// Judges a run whose workers have all left, by its history and by what they left in memory. Reads every key once
    /// more, as the history's last client, so that a write that was lost at the end shows, too.
    ///
    /// # Errors
    /// If the tree cannot be read.
    pub fn judge(
        fabric: &Arc<MemFabric>,
        options: &Options,
        mut history: History,
        tale: Tale,
        seconds: f64,
    ) -> anyhow::Result<Self> {
        let in_flight_max = history.in_flight_max();
        history.merge(read_all(fabric, options)?);
        let check = cluster::check_tree(fabric, TREE)?;
        let (linear, scans) = (linear::check(&history), scans::check(&history));
        Ok(Self { seed: options.seed, seconds, tale, in_flight_max, linear, scans, check })
    }

    /// Lock requests that lost, at other compute servers' hands or at their own.
    pub fn conflicts(&self) -> u64 {
        self.tale.counter("lock_conflicts") + self.tale.counter("local_waits")
    }

    /// What did not hold, in words.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if let Err(error) = &self.linear {
            failures.push(format!("not linearizable: {error}"));
        }
        if let Err(error) = &self.scans {
            failures.push(format!("a scan broke its promise: {error}"));
        }
        if !self.check.is_clean() {
            failures.push(format!("the tree is not clean: {:?}", self.check));
        }
        if self.check.audit.held != 0 {
            failures.push(format!("{} pages are held after all have left", self.check.audit.held));
        }
        let counted = [
            ("torn reads", self.tale.counter("torn_reads")),
            ("lock conflicts", self.conflicts()),
            ("splits", self.tale.counter("splits")),
            ("merges", self.tale.counter("merges")),
        ];
        let nothing = counted.into_iter().filter(|&(_, count)| count == 0);
        failures.extend(nothing.map(|(name, _)| format!("no {name}: the test has not tested them")));
        if self.tale.damaged != 0 {
            failures.push(format!("{} operations met a damaged page, and nobody died", self.tale.damaged));
        }
        failures
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |ok: bool| if ok { "yes" } else { "NO" };
        let rate = self.tale.operations as f64 / self.seconds;
        let scans = self.scans.as_ref().map_or(0, |report| report.scans);
        write!(
            f,
            "seed {}: {} operations in {:.1} s ({rate:.0}/s, {} in flight at most, {} dropped), {scans} scans: \
             linearizable {}, scans kept their promise {}, tree clean {} ({} entries, {} pages, height {}), leaked {}, \
             held {}; torn reads refused {}, lock conflicts {} ({} remote + {} local), splits {}, merges {}, restarts {}",
            self.seed,
            self.tale.operations,
            self.seconds,
            self.in_flight_max,
            self.tale.dropped,
            yes(self.linear.is_ok()),
            yes(self.scans.is_ok()),
            yes(self.check.is_clean()),
            self.check.entries,
            self.check.pages(),
            self.check.height(),
            self.check.audit.leaked.len(),
            self.check.audit.held,
            self.tale.counter("torn_reads"),
            self.conflicts(),
            self.tale.counter("lock_conflicts"),
            self.tale.counter("local_waits"),
            self.tale.counter("splits"),
            self.tale.counter("merges"),
            self.tale.counter("restarts"),
        )
    }
}

/// A history in which one more client gets every key, one after the other.
fn read_all(fabric: &Arc<MemFabric>, options: &Options) -> anyhow::Result<History> {
    cluster::with_worker(fabric, |worker| {
        let recorder = Recorder::new(Vec::new(), options.processes * options.workers, Flush::WhenFull)?;
        worker.block_on(async {
            let tree = BTree::<OneSided>::open(worker, TREE, Proof::Checksum).await?;
            for key in spread_keys(options.keys) {
                let ticket = recorder.begin(Op::Get { key })?;
                recorder.end(ticket, Outcome::Value(tree.get(key).await?))?;
            }
            anyhow::Ok(())
        })?;
        anyhow::Ok(History::decode(&recorder.finish()?)?)
    })
}

/// Runs the whole thing; `program` is `farlink-stress`.
///
/// # Errors
/// If it cannot be run. What did not hold is in the summary.
pub fn run(program: &Path, options: &Options) -> anyhow::Result<Summary> {
    let served = Served::start(options.servers, SERVER_BYTES)?;
    let histories = tempfile::tempdir()?;
    cluster::create_tree(&served.fabric(options.manners.options())?, TREE, options.tree())?;
    let mut peers = Vec::new();
    for process in 0..options.processes {
        let spec = Spec {
            dir: served.dir().to_owned(),
            tree: TREE.into(),
            manners: options.manners,
            three_waits: options.three_waits,
            seed: options.seed,
            role: Role::Work(options.work(process, histories.path())),
        };
        peers.push(Peer::start(program, &spec)?);
    }
    let begun = Instant::now();
    peers.iter_mut().try_for_each(Peer::go)?;
    let mut tale = Tale::default();
    for peer in peers {
        tale.add(&peer.finish().with_context(|| format!("seed {}", options.seed))?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let history = History::read_dir(histories.path())?;
    Summary::judge(&served.fabric(cluster::FAST)?, options, history, tale, seconds)
}
