//! The acceptance test: workers in several processes change one small tree of few, hot keys as fast as they can, over a
//! fabric that does all that it may. Afterwards everything has to be right: the history of all of them together is
//! linearizable for each key and its scans keep their promise, the tree has no broken invariant and no leaked page, nobody
//! holds a page, and what the test is about has happened at all: torn READs, lock conflicts, splits and merges.
//!
//! Through a cache, too. A compute server that caches all pages owns all keys, or a part of them that is cut where leaves
//! are cut; the tree is then larger, and filled beforehand. What the owners saw in the end, before and after they wrote it,
//! is what is read one-sided afterwards.

mod summary;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Sender},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use farlink_children::Scratch;
pub use farlink_offload::AccessMode;
use farlink_offload::{Durability, route::move_region};
use farlink_runtime::{
    catalog,
    fabric::Fabric,
    lock::OwnerId,
    one_sided::{Proof, ownership},
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
};
use farlink_structures::map::{KeyRange, Map};
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IteratorRandom};

pub use self::summary::{Summary, idle, unscanned};
use crate::{
    access_under_test::{AccessUnderTest, Admit, CacheSpec, Part, ShipChoice},
    backend::{Backend, Cluster, FabricProfile, Fate, Faults, Place},
    cluster,
    deadlines::Awaited,
    drive::{TIDE_NS, Tides},
    history::History,
    of_structure,
    peer::{Peer, PeerReport, Role, Spec, Work},
    settings::Arguments,
    subject::{StructureName, Subject},
    workload::{CLIENT_MAX, KEYS_LOADED, Mix, spread_keys, value_of},
};

/// How to use `farlink-stress`.
pub const USAGE: &str = "\
farlink-stress [--OPTION VALUE ...]
Workers in several processes change one tree over a nasty fabric; then everything is checked.

  --structure btree  btree, skiplist or bwtree; a skip list has one owner: --processes 1 with --access cached
  --seconds 10      how long they work
  --processes 4     compute servers, each a process
  --workers 2       worker threads of each
  --in-flight 8     operations in flight for each worker
  --keys 1000       how many keys they share; 400000 by default with --access cached and cached-inner
  --mix mixed       mixed: keys come and go; inserts: with --access cached, the tree grows
  --load-one-in 10  with --mix inserts, the tree is loaded with one key in so many
  --scan-limit 40   entries that a scan asks for, at most
  --page-bytes 256  a power of two from 256 to 4096; always 64 for a skip list
  --servers 3       memory servers
  --fabric mem      mem, or verbs: real RDMA
  --connect A,B     with verbs, these running memory servers, HOST:PORT each; FARLINK_SECRET is their secret
  --profile nasty   how mem behaves: nasty, or weak: without ordered WRITEs, too; or fast
  --proof checksum  checksum, or three-waits
  --faulty 0        one request in so many fails, and breaks its connection; 0 for none
  --fate any        what becomes of requests that fail: refused, done, lost (so are earlier ones), or any
  --drop-one-in 0   drop one operation in so many in mid-flight; 0 for none
  --access one-sided  one-sided; cached: each process owns a range of keys and caches all its pages; cached-inner: each
                    caches inner pages of the whole tree; cached-mapping: the same for a bwtree, whose mapping words and
                    pages are cached; coarse: the tree is on one memory server, which carries out all
                    operations; hybrid: its inner levels are; adaptive: that server carries out operations, or they are
                    one-sided; engine: cached with --ship cost
  --ship never      with --access cached, engine and adaptive, who decides: never, always, cost; else always means
                    --access coarse
  --server-threads 2  threads of each memory server that carry out operations, if any are sent
  --cache-percent 1 the cache of each process, in percent of the tree's bytes when it is loaded; at least 64 KiB
  --cache-bytes N   the cache of each process, in bytes
  --route no        with --access cached, yes: all workers use all keys, and operations go to the owners
  --move-every 0    with --route yes: a range, or a piece of one, goes to another owner each so many milliseconds, first
                    to the last process, which has none; of three processes or more, the first one stops at half
                    time, gives all that it owns away, and leaves. 0 for never
  --durability write-back  write-back; logged: with --access cached, an operation answers once it is in the owner's log
  --admission frequency  into a full cache: frequency, always, or dex: a tenth of the leaves, random victims
  --seed N          decides what is random; a fresh one by default
";

/// The name of the tree under stress.
pub const TREE: &str = "stress";

/// Bytes of each memory server, at least.
pub const SERVER_BYTES: u64 = 32 << 20;
/// Bytes for each key, on all of them: pages half full, what owners log, and what waits to be used again.
const KEY_BYTES: u64 = 128;

/// Keys enough for a cache of one percent.
const KEYS_CACHED: usize = 400_000;

/// The least that a cache can have.
const CACHE_BYTES_MIN: usize = 64 << 10;
/// How full the pages of a tree are when it is loaded.
const FILL: f64 = 0.85;

/// Where the tree's pages are.
pub fn placement(access: AccessMode) -> StructurePlacement {
    let root = ServerId::new(0);
    match access {
        AccessMode::Coarse | AccessMode::Adaptive => StructurePlacement { policy: PlacementPolicy::OneServer, root },
        AccessMode::Hybrid => StructurePlacement { policy: PlacementPolicy::Leaves, root },
        _ => StructurePlacement::default(),
    }
}

/// What a run goes on for, of what it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaits {
    /// Nothing.
    Nothing,
    /// All but torn READs: there, they are too rare to be waited for, and may not happen.
    AllButTornReads,
    /// All.
    All,
}

/// A run.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// What they work on.
    pub structure: StructureName,
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
    /// Whether most operations insert, into a tree that is loaded with some of the keys and grows. With [`AccessMode::Cached`].
    pub grows: bool,
    /// One key in so many is loaded then.
    pub load_one_in: usize,
    /// Entries that a scan asks for, at most.
    pub scan_limit_max: u32,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Memory servers.
    pub servers: usize,
    /// What joins them; in processes.
    pub backend: Backend,
    /// The cluster, if there is one already. Nobody else may use it.
    pub place: Option<Place>,
    /// How the fabric behaves.
    pub profile: FabricProfile,
    /// Whether readers use [`Proof::LockBodyLock`].
    pub three_waits: bool,
    /// One operation in so many is dropped in mid-flight; 0 for none.
    pub drop_one_in: u32,
    /// How they reach the tree.
    pub access: AccessMode,
    /// Threads of each memory server, if operations are sent there.
    pub server_threads: usize,
    /// The cache of each process, in percent of the tree's bytes, unless `cache_bytes` says otherwise.
    pub cache_percent: f64,
    /// The cache of each process, in bytes.
    pub cache_bytes: Option<usize>,
    /// What gets into a full cache.
    pub admit: Admit,
    /// When an owner answers, with [`AccessMode::Cached`].
    pub durability: Durability,
    /// Who decides what is shipped, with [`AccessMode::Cached`] and [`AccessMode::Adaptive`].
    pub ship: Option<ShipChoice>,
    /// Whether all workers use all keys, and operations are sent to their owners. With [`AccessMode::Cached`].
    pub route: bool,
    /// Milliseconds between two moves of a range from one owner to another; 0 for none. With `route`. The last process has none at first,
    /// and the first one [leaves](Self::one_leaves).
    pub move_every_ms: u64,
    /// What the run goes on for; until a request has failed, if any may, it always does.
    pub awaits: Awaits,
    /// Decides what is random.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            structure: StructureName::BTree,
            seconds: 10.0,
            processes: 4,
            workers: 2,
            in_flight: 8,
            keys: 1000,
            grows: false,
            load_one_in: 10,
            scan_limit_max: 40,
            page_bytes: 256,
            servers: 3,
            backend: Backend::chosen_across_processes(),
            place: None,
            profile: FabricProfile::Nasty,
            three_waits: false,
            drop_one_in: 0,
            access: AccessMode::OneSided,
            server_threads: 2,
            cache_percent: 1.0,
            cache_bytes: None,
            admit: Admit::Frequency,
            durability: Durability::default(),
            ship: None,
            route: false,
            move_every_ms: 0,
            awaits: Awaits::All,
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
        let (mut profile, mut proof) = (String::from("nasty"), String::from("checksum"));
        arguments.take("structure", &mut options.structure)?;
        arguments.take("seconds", &mut options.seconds)?;
        arguments.take("processes", &mut options.processes)?;
        arguments.take("workers", &mut options.workers)?;
        arguments.take("in-flight", &mut options.in_flight)?;
        arguments.take("access", &mut options.access)?;
        let mut ship = String::new();
        arguments.take("ship", &mut ship)?;
        match (ship.as_str(), options.access) {
            ("", AccessMode::Engine | AccessMode::Adaptive) => options.ship = Some(ShipChoice::Cost),
            (policy, AccessMode::Engine | AccessMode::Adaptive) => {
                options.ship = Some(policy.parse().context("--ship")?);
            }
            ("", _) => {}
            (policy, AccessMode::Cached) => options.ship = Some(policy.parse().context("--ship")?),
            ("never", _) => {}
            ("always", AccessMode::OneSided | AccessMode::Coarse) => options.access = AccessMode::Coarse,
            (policy, other) => anyhow::bail!("--ship {policy} is not for --access {other:?}"),
        }
        if options.access == AccessMode::Engine {
            options.access = AccessMode::Cached;
        }
        arguments.take("server-threads", &mut options.server_threads)?;
        if matches!(options.access, AccessMode::Cached | AccessMode::CachedInner) {
            options.keys = KEYS_CACHED;
        }
        arguments.take("keys", &mut options.keys)?;
        let mut mix = String::from("mixed");
        arguments.take("mix", &mut mix)?;
        options.grows = match (mix.as_str(), options.access) {
            ("mixed", _) => false,
            ("inserts", AccessMode::Cached) => true,
            ("inserts", other) => anyhow::bail!("--mix inserts is not for --access {other}"),
            (other, _) => anyhow::bail!("--mix {other}: it is mixed or inserts"),
        };
        arguments.take("load-one-in", &mut options.load_one_in)?;
        anyhow::ensure!(options.load_one_in > 0, "--load-one-in is 1 or more");
        arguments.take("cache-percent", &mut options.cache_percent)?;
        let mut bytes = 0;
        arguments.take("cache-bytes", &mut bytes)?;
        options.cache_bytes = (bytes != 0).then_some(bytes);
        arguments.take("admission", &mut options.admit)?;
        arguments.take("durability", &mut options.durability)?;
        let can_log = options.access == AccessMode::Cached || options.durability == Durability::default();
        anyhow::ensure!(can_log, "--durability {} is for --access cached and engine", options.durability);
        arguments.take("scan-limit", &mut options.scan_limit_max)?;
        arguments.take("page-bytes", &mut options.page_bytes)?;
        arguments.take("servers", &mut options.servers)?;
        let mut fabric = options.backend.to_string();
        arguments.take("fabric", &mut fabric)?;
        options.backend = match fabric.as_str() {
            "mem" | "mem-processes" => Backend::MemProcesses,
            "verbs" => Backend::Verbs,
            other => anyhow::bail!("--fabric {other}: it is mem or verbs"),
        };
        let mut connect = String::new();
        arguments.take("connect", &mut connect)?;
        if !connect.is_empty() {
            anyhow::ensure!(options.backend == Backend::Verbs, "--connect is for --fabric verbs");
            let servers = connect.split(',').map(str::to_owned).collect();
            let secret = std::env::var("FARLINK_SECRET").context("FARLINK_SECRET is the cluster's secret")?;
            options.place = Some(Place::Verbs { servers, secret });
        }
        arguments.take("profile", &mut profile)?;
        arguments.take("proof", &mut proof)?;
        arguments.take("drop-one-in", &mut options.drop_one_in)?;
        arguments.take("seed", &mut options.seed)?;
        let mut route = String::from("no");
        arguments.take("route", &mut route)?;
        options.route = match (route.as_str(), options.access, options.ship) {
            ("no", ..) => false,
            ("yes", AccessMode::Cached, None) => true,
            ("yes", ..) => anyhow::bail!("--route yes is for --access cached without --ship"),
            (other, ..) => anyhow::bail!("--route {other}: it is yes or no"),
        };
        arguments.take("move-every", &mut options.move_every_ms)?;
        anyhow::ensure!(options.route || options.move_every_ms == 0, "--move-every is for --route yes");
        let (mut one_in, mut fate) = (0, Fate::Any);
        arguments.take("faulty", &mut one_in)?;
        arguments.take("fate", &mut fate)?;
        let faults = (one_in != 0).then_some(Faults { seed: options.seed, one_in, fate, is_weak: false });
        arguments.finish()?;
        options.profile = match (profile.as_str(), faults) {
            ("nasty", None) => FabricProfile::Nasty,
            ("weak", None) => FabricProfile::Weak,
            ("fast", None) => FabricProfile::Fast,
            ("nasty", Some(faults)) => FabricProfile::Faulty(faults),
            ("weak", Some(faults)) => FabricProfile::Faulty(Faults { is_weak: true, ..faults }),
            (other, _) => anyhow::bail!("--profile {other}: it is nasty or weak, or, without --faulty, fast"),
        };
        options.three_waits = match proof.as_str() {
            "checksum" => false,
            "three-waits" => true,
            other => anyhow::bail!("--proof {other}: it is checksum or three-waits"),
        };
        Ok(options)
    }

    /// Bytes of each memory server: room for all keys. What is not used takes no memory.
    pub fn server_bytes(&self) -> u64 {
        let keys = self.keys as u64 * KEY_BYTES / self.servers.max(1) as u64;
        SERVER_BYTES.max(keys.next_multiple_of(1 << 20))
    }

    /// Threads of each memory server.
    pub fn server_threads(&self) -> usize {
        if self.access.is_divided() || self.access.asks_a_policy() || self.ship.is_some() {
            self.server_threads
        } else {
            0
        }
    }

    /// Whether the last process owns nothing at first: the first range that moves goes to it.
    fn one_comes(&self) -> bool {
        self.move_every_ms != 0 && self.processes > 1
    }

    /// Whether the first process stops at half time, gives all that it owns away, and leaves while the others go on.
    pub fn one_leaves(&self) -> bool {
        self.move_every_ms != 0 && self.processes > 2
    }

    /// How readers prove their copies whole.
    pub fn proof(&self) -> Proof {
        if self.three_waits { Proof::LockBodyLock } else { Proof::Checksum }
    }

    /// What the tree holds before the run: nothing, every other key, or [fewer](Self::load_one_in).
    pub fn initial(&self) -> BTreeMap<u64, u64> {
        if !self.is_loaded() {
            return BTreeMap::new();
        }
        let keys = spread_keys(self.keys).into_iter().step_by(if self.grows { self.load_one_in } else { 2 });
        keys.zip(1..).map(|(key, sequence)| (key, value_of(CLIENT_MAX, sequence))).collect()
    }

    /// A larger tree takes longer to empty. A short run has two tides of each kind, too.
    fn tides(&self) -> Tides {
        if self.grows {
            return Tides::NONE;
        }
        match self.backend {
            // Under emulation, the same takes ten times as long, or many more.
            Backend::Verbs => {
                let first_ns = 8 * TIDE_NS * (self.keys as u64 / 1000).clamp(1, 5);
                Tides { first_ns, last_ns: 8 * first_ns }
            }
            _ => {
                let last_ns = TIDE_NS * (self.keys as u64).clamp(300, 5000) / 1000;
                Tides { first_ns: last_ns.min((self.seconds * 0.25e9) as u64), last_ns }
            }
        }
    }

    /// What has to happen, as far as compute servers know of it: see [`Summary::failures`].
    pub fn awaited(&self) -> Awaited {
        let breaks = self.profile.faults().is_some();
        if self.awaits == Awaits::Nothing {
            return Awaited { breaks, ..Awaited::default() };
        }
        let conflicts = matches!(
            self.access,
            AccessMode::OneSided
                | AccessMode::CachedInner
                | AccessMode::CachedMapping
                | AccessMode::Hybrid
                | AccessMode::Adaptive
        );
        let splits = self.access != AccessMode::Coarse;
        Awaited {
            splits,
            merges: splits && !self.grows,
            strays: self.access == AccessMode::Cached && self.processes > 1 && !self.route,
            conflicts,
            torn_reads: conflicts && self.awaits == Awaits::All && self.tears(),
            breaks,
        }
    }

    /// Whether READs are torn now and then: verbs tear what they please, and SoftRoCE hardly anything that fits into one
    /// packet. What a Bw-tree has written nobody reads while it is written. And a node of a skip list is read too quickly to be
    /// torn by chance: in hundreds of thousands of operations two were.
    pub fn tears(&self) -> bool {
        let tears_small = self.profile != FabricProfile::Weak || self.structure != StructureName::SkipList;
        self.backend != Backend::Verbs && self.structure != StructureName::BwTree && tears_small
    }

    /// Whether the tree holds keys before the run: it would not become as large in the time of a short one.
    fn is_loaded(&self) -> bool {
        match self.access {
            AccessMode::Cached => true,
            AccessMode::CachedInner | AccessMode::CachedMapping => self.keys >= KEYS_LOADED,
            _ => false,
        }
    }

    /// The workload of the process with this number, without a cache.
    pub fn work(&self, process: u32, histories: &Path) -> Work {
        Work {
            histories: histories.to_owned(),
            first_client: process * self.workers,
            workers: self.workers,
            in_flight: self.in_flight,
            keys: self.keys,
            scan_limit_max: self.scan_limit_max,
            drop_one_in: self.drop_one_in,
            tides: self.tides(),
            seconds: self.seconds,
            awaits: self.awaited(),
            deadly: false,
            failures_expected: self.profile.faults().is_some(),
            mix: match self.access {
                AccessMode::Cached if self.grows => Mix::INSERTS,
                AccessMode::Cached => Mix::WRITES,
                _ => Mix::ALL,
            },
            reach: AccessUnderTest::OneSided,
        }
    }
}

/// How each process reaches the tree, which holds these entries.
fn reaches<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    initial: &BTreeMap<u64, u64>,
) -> anyhow::Result<Vec<AccessUnderTest>> {
    let processes = options.processes as usize;
    let tree_bytes = cluster::check_tree(fabric, TREE)?.bytes;
    let bytes = options.cache_bytes.unwrap_or((tree_bytes as f64 * options.cache_percent / 100.0) as usize);
    let cache = CacheSpec {
        bytes: bytes.max(CACHE_BYTES_MIN),
        page_bytes: S::page_bytes(options.page_bytes),
        admit: options.admit,
        logs: options.durability == Durability::Logged,
    };
    match options.access {
        AccessMode::OneSided => Ok(vec![AccessUnderTest::OneSided; processes]),
        AccessMode::CachedInner => Ok(vec![AccessUnderTest::CachedInner { cache }; processes]),
        AccessMode::CachedMapping => Ok(vec![AccessUnderTest::CachedMapping { bytes: cache.bytes }; processes]),
        AccessMode::Coarse => Ok(vec![AccessUnderTest::Coarse; processes]),
        AccessMode::Hybrid => Ok(vec![AccessUnderTest::Hybrid; processes]),
        AccessMode::Adaptive => {
            Ok(vec![AccessUnderTest::Adaptive { ship: options.ship.unwrap_or(ShipChoice::Cost) }; processes])
        }
        AccessMode::Cached | AccessMode::Engine => {
            let mut parts = cut::<S>(fabric, processes - usize::from(options.one_comes()), initial)?;
            parts.resize(processes, Part::NONE);
            let reach = |part| AccessUnderTest::Cached { part, cache, ship: options.ship, routed: options.route };
            Ok(parts.into_iter().map(reach).collect())
        }
    }
}

/// The keys in as many parts of about the same number of entries, cut where leaves are cut.
fn cut<S: Subject>(fabric: &Arc<dyn Fabric>, parts: usize, initial: &BTreeMap<u64, u64>) -> anyhow::Result<Vec<Part>> {
    let keys: Vec<u64> = initial.keys().copied().collect();
    cluster::with_worker(fabric, |worker| {
        worker.block_on(async {
            let tree = Map::<S, _>::open(worker, TREE, Proof::Checksum).await?;
            let mut lows = vec![0];
            for part in 1..parts {
                lows.push(tree.leaf_low(keys[keys.len() * part / parts]).await?);
            }
            anyhow::ensure!(lows.is_sorted_by(|a, b| a < b), "too few leaves for {parts} owners");
            let highs = lows[1..].iter().map(|low| low - 1).chain([u64::MAX]);
            Ok(lows.iter().zip(highs).map(|(&low, high)| Part { low, high }).collect())
        })
    })
}

/// The ranges that there are before whole ones move only.
const RANGES_MAX: usize = 24;

/// From anywhere in a range up to anywhere.
pub fn piece_of(KeyRange { low, high }: KeyRange, random: &mut StdRng) -> KeyRange {
    let last = high.map_or(u64::MAX, |high| high - 1);
    let ends = [random.random_range(low..=last), random.random_range(low..=last)];
    let high = if random.random_bool(0.3) { high } else { ends.into_iter().max().and_then(|last| last.checked_add(1)) };
    KeyRange { low: ends.into_iter().min().unwrap_or(low), high }
}

/// What an injected fault makes of a move, here or at one of the two owners.
fn is_of_a_fault(error: &farlink_runtime::error::Error) -> bool {
    let text = error.to_string();
    text.contains("the faulty fabric") || text.contains("which it has carried out or not")
}

/// Has a range drawn at random, or a piece of one, go to another owner, again and again, until it is over; how many did. The first goes to
/// the last owner. Once the first owner has stopped, all that it has goes to others, and then `owns_some` is dropped.
fn keep_moving<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    options: &Options,
    owners: &[OwnerId],
    (has_stopped, is_over): (&AtomicBool, &AtomicBool),
    owns_some: Sender<()>,
) -> anyhow::Result<u64> {
    let [first, .., last] = *owners else { return Ok(0) };
    if options.move_every_ms == 0 {
        return Ok(0);
    }
    let mut owns_some = Some(owns_some);
    let mut random = StdRng::seed_from_u64(options.seed);
    cluster::with_worker(fabric, |worker| {
        worker.block_on(async {
            let structure = catalog::open::<S>(worker, TREE).await?;
            let mut moves = 0;
            while !is_over.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(options.move_every_ms));
                let map = ownership::read(worker, &structure).await?;
                let is_leaving = has_stopped.load(Ordering::Acquire);
                let empties = is_leaving && owns_some.is_some();
                let regions = map.owners().filter(|&(owner, _)| !empties || owner == first);
                let Some((from, part)) = regions.choose(&mut random) else {
                    owns_some = None;
                    continue;
                };
                let Some(region) = part.to_region::<KeyRange>()? else { continue };
                let is_whole = empties || map.entries.len() > RANGES_MAX || random.random_bool(0.3);
                let region = if is_whole { region } else { piece_of(region, &mut random) };
                let others = owners.iter().filter(|&&owner| owner != from && !(is_leaving && owner == first));
                let drawn = others.choose(&mut random).copied();
                let Some(to) = (if moves == 0 { Some(last) } else { drawn }) else { continue };
                match move_region(worker, &structure, &region, from, to).await {
                    Ok(moved) => moves += u64::from(moved.is_some()),
                    // Not done, or not known whether it is, and said so: the next one is another.
                    Err(error) if options.profile.faults().is_some() && is_of_a_fault(&error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Ok(moves)
        })
    })
}

/// Makes the tree, and says what each compute server is to do.
///
/// # Errors
/// If the tree cannot be made.
pub fn prepare<S: Subject>(fabric: &Arc<dyn Fabric>, options: &Options, histories: &Path) -> anyhow::Result<Vec<Work>> {
    cluster::create_at::<S>(fabric, TREE, options.page_bytes, options.proof(), placement(options.access))?;
    let initial = options.initial();
    if !initial.is_empty() {
        cluster::load::<S>(fabric, TREE, initial.iter().map(|(&key, &value)| (key, value)), FILL)?;
    }
    let reaches = (0..).zip(reaches::<S>(fabric, options, &initial)?);
    let work = |(process, reach)| {
        let mut work = Work { reach, ..options.work(process, histories) };
        if options.one_leaves() && process == 0 {
            (work.seconds, work.awaits) = (work.seconds / 2.0, Awaited::default());
        }
        // What it owns it has late, and little perhaps.
        if options.one_comes() && process == options.processes - 1 {
            work.awaits = Awaited { splits: false, merges: false, ..work.awaits };
        }
        work
    };
    Ok(reaches.map(work).collect())
}

/// Runs the whole thing; `program` is `farlink-stress`.
///
/// # Errors
/// If it cannot be run. What did not hold is in the summary.
pub fn run(program: &Path, options: &Options) -> anyhow::Result<Summary> {
    of_structure!(options.structure, run_on(program, options))
}

fn run_on<S: Subject>(program: &Path, options: &Options) -> anyhow::Result<Summary> {
    let mut cluster = match &options.place {
        Some(place) => Cluster::at(place.clone(), options.profile)?,
        None => {
            let threads = options.server_threads();
            Cluster::start_with(options.backend, options.servers, options.server_bytes(), options.profile, threads)?
        }
    };
    let histories = Scratch::inside(&std::env::temp_dir())?;
    let fast = cluster.place()?.open(FabricProfile::Fast)?;
    let mut peers = Vec::new();
    for work in prepare::<S>(&fast, options, histories.path())? {
        let spec = Spec {
            place: cluster.place()?.clone(),
            tree: TREE.into(),
            structure: options.structure,
            profile: options.profile,
            three_waits: options.three_waits,
            seed: options.seed,
            role: Role::Work(work),
        };
        peers.push(Peer::start(program, &spec)?);
    }
    let begun = Instant::now();
    peers.iter_mut().try_for_each(Peer::go)?;
    let mut peer_report = PeerReport::default();
    if options.route {
        let owners = peers.iter().map(|peer| OwnerId::new(peer.ready().owner.into()).context("an incarnation"));
        let owners: Vec<OwnerId> = owners.collect::<anyhow::Result<_>>()?;
        let [has_stopped, is_over] = [AtomicBool::new(false), AtomicBool::new(false)];
        let leaver = options.one_leaves().then(|| peers.remove(0));
        let moves = std::thread::scope(|scope| {
            let (owns_some, owned) = mpsc::channel();
            let (fast, owners, flags) = (&fast, &owners, (&has_stopped, &is_over));
            let mover = scope.spawn(move || keep_moving::<S>(fast, options, owners, flags, owns_some));
            let leave = |mut peer: Peer| {
                peer.wait_until_done()?;
                has_stopped.store(true, Ordering::Release);
                // Nothing is sent: until it owns nothing, or whoever moves ranges has failed.
                let _ = owned.recv();
                peer.go()?;
                peer_report.add(&peer.finish()?);
                anyhow::Ok(())
            };
            let left = leaver.map_or(Ok(()), leave).context("who leaves before the others");
            let done = left.and_then(|()| peers.iter_mut().try_for_each(Peer::wait_until_done));
            is_over.store(true, Ordering::Release);
            let moves = mover.join().map_err(|_| anyhow::anyhow!("the mover panicked"))?;
            // A region without an owner has others fail, too.
            let moves = moves.with_context(|| format!("moving a range, seed {}", options.seed))?;
            done.map(|()| moves).with_context(|| format!("seed {}", options.seed))
        })?;
        peer_report.counters.insert("moves".into(), moves);
        peers.iter_mut().try_for_each(Peer::go)?;
    }
    for peer in peers {
        peer_report.add(&peer.finish().with_context(|| format!("seed {}", options.seed))?);
    }
    let seconds = begun.elapsed().as_secs_f64();
    cluster.stop_shipping()?;
    let mut history = History::read_dir(histories.path())?;
    history.set_initial(options.initial());
    Summary::judge(&fast, options, history, peer_report, seconds).with_context(|| format!("seed {}", options.seed))
}
