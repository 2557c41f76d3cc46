//! Compute servers in processes of their own.
//!
//! The program `farlink-stress` is both sides. A parent starts it as `farlink-stress peer` and gets a [`Peer`]. They talk in
//! lines: the parent says what is to be done, a [`Spec`] in JSON; the peer says [`Ready`] once it has joined; the parent says `go`, and closes its
//! end to stop the peer; the peer answers with a [`PeerReport`] and exits with status 0. A peer whose parent is gone stops by
//! itself, and a `Peer` that is dropped ends its process.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    rc::Rc,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use farlink_children::Child;
use farlink_runtime::{
    compute::ComputeServer,
    fabric::faulty,
    one_sided::{OneSided, Proof},
    worker::{Counters, Handle},
};
use farlink_structures::{
    btree::{self, BTree},
    map::Map,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    access_under_test::{AccessUnderTest, Client, Part, Seen},
    backend::{FabricProfile, Place, first_line},
    bounded::Watchdog,
    cluster,
    deadlines::{Awaited, Deadlines, PATIENCE},
    drive::{Plan, Tally, Tides},
    history::{Flush, Recorder},
    of_structure,
    raw::HeldPage,
    subject::{StructureName, Subject},
    workload::{KEYS_LOADED, Mix, Workload, WorkloadSpec, clustered_keys, spread_keys},
};

/// The argument that makes `farlink-stress` a peer.
pub const PEER: &str = "peer";

/// How long a peer may take beyond the time it was given.
const GRACE: Duration = Duration::from_secs(120);

/// What a peer is to do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The cluster.
    pub place: Place,
    /// The name of the tree.
    pub tree: String,
    /// What structure it is. A page is held of a B+-tree only.
    pub structure: StructureName,
    /// How the fabric behaves.
    pub profile: FabricProfile,
    /// Whether readers use [`Proof::LockBodyLock`].
    pub three_waits: bool,
    /// Decides what the peer does at random.
    pub seed: u64,
    /// What it does.
    pub role: Role,
}

/// What a peer does once it has joined.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Role {
    /// Runs a mixed workload on the tree.
    Work(Work),
    /// Locks the leaf where this key belongs and writes half of it; gives it back, changed in its version only, when it is
    /// told to go.
    Hold {
        /// The key.
        key: u64,
    },
}

/// A mixed workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Where the histories go, a file for each worker.
    pub histories: PathBuf,
    /// The number of the first worker among the clients of the history.
    pub first_client: u32,
    /// Worker threads.
    pub workers: u32,
    /// Operations in flight for each worker.
    pub in_flight: usize,
    /// How many keys.
    pub keys: usize,
    /// Scans ask for so many entries at most.
    pub scan_limit_max: u32,
    /// One operation in so many is dropped in mid-flight; 0 for none.
    pub drop_one_in: u32,
    /// When keys come and when they go.
    pub tides: Tides,
    /// How long, unless it is stopped before.
    pub seconds: f64,
    /// What it goes on for. See [`Deadlines`].
    pub awaits: Awaited,
    /// Whether somebody may be killed: the history must survive, and damaged pages are expected.
    pub deadly: bool,
    /// Whether the fabric fails now and then.
    pub failures_expected: bool,
    /// How often each operation occurs.
    pub mix: Mix,
    /// How the compute server reaches the tree.
    pub reach: AccessUnderTest,
}

impl Work {
    /// What all workers of a run draw from.
    pub fn workload(&self, seed: u64) -> WorkloadSpec {
        let keys = match self.reach {
            // So many that single ones are hardly ever met again.
            AccessUnderTest::Cached { .. } => clustered_keys(self.keys),
            AccessUnderTest::CachedInner { .. } if self.keys >= KEYS_LOADED => clustered_keys(self.keys),
            _ => spread_keys(self.keys),
        };
        let scan_limit_max = self.scan_limit_max;
        // A tree that is to grow gets all of its keys, not the popular ones again.
        let theta = if self.mix == Mix::INSERTS { 0.0 } else { 0.6 };
        WorkloadSpec { seed, keys, theta, mix: self.mix, scan_limit_max }
    }

    /// How each of its workers goes about it.
    pub fn plan(&self) -> Plan {
        Plan {
            in_flight: self.in_flight,
            drop_one_in: self.drop_one_in,
            damage_expected: self.deadly,
            failures_expected: self.failures_expected,
            tides: self.tides,
            part: match self.reach {
                AccessUnderTest::Cached { part, routed: false, .. } => part,
                _ => Part::ALL,
            },
        }
    }
}

/// What a peer says when it has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Its incarnation.
    pub owner: u32,
    /// The page that it holds, as a raw pointer.
    pub page: Option<u64>,
}

/// What the paths that broke in a peer's process are counted by.
pub const BREAKS: &str = "broken_paths";

/// What a peer says when it has left.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PeerReport {
    /// Operations begun.
    pub operations: u64,
    /// Operations dropped in mid-flight.
    pub dropped: u64,
    /// Operations that met a damaged page.
    pub damaged: u64,
    /// Operations that failed with the fabric.
    pub failed: u64,
    /// Operations refused because their keys are others'.
    pub strays: u64,
    /// The counters of its workers and its cache, by name.
    pub counters: BTreeMap<String, u64>,
    /// What owners saw of their parts in the end.
    pub seen: Vec<Seen>,
}

impl PeerReport {
    /// What some workers did.
    pub fn new(tally: Tally, counters: Counters) -> Self {
        let counters = counters.iter().map(|(name, count)| (name.to_owned(), count)).collect();
        let Tally { operations, dropped, damaged, failed, strays } = tally;
        Self { operations, dropped, damaged, failed, strays, counters, seen: Vec::new() }
    }

    /// Adds what the compute server's cache did, and what it saw in the end.
    pub fn add_client(&mut self, client: &Client<impl Subject>, seen: Vec<Seen>) {
        self.seen.extend(seen);
        for (name, count) in client.counts() {
            *self.counters.entry(name.to_owned()).or_default() += count;
        }
    }

    /// The value of a counter; 0 if there is none of this name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// Adds what others did.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.dropped += other.dropped;
        self.damaged += other.damaged;
        self.failed += other.failed;
        self.strays += other.strays;
        self.seen.extend(&other.seen);
        for (name, count) in &other.counters {
            *self.counters.entry(name.clone()).or_default() += count;
        }
    }
}

/// A peer, seen from its parent.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    ready: Ready,
}

impl Peer {
    /// Starts a peer; `program` is `farlink-stress`. Blocks until it has joined.
    ///
    /// # Errors
    /// If it cannot be started, or ends before it is ready. What it has to say about that is on stderr.
    pub fn start(program: &Path, spec: &Spec) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.arg(PEER);
        let mut child = Child::start("a peer", command)?;
        // Not among the arguments, which everybody sees: it may hold the cluster's secret.
        child.send(&serde_json::to_string(spec)?)?;
        let mut peer = Self { child, ready: Ready { owner: 0, page: None } };
        peer.ready = peer.answer().context("a peer was not ready")?;
        Ok(peer)
    }

    /// What it said when it was ready.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        self.child.is_running()
    }

    /// Lets it begin.
    ///
    /// # Errors
    /// If it is gone.
    pub fn go(&mut self) -> anyhow::Result<()> {
        self.child.send("go")
    }

    /// Waits until one that others send operations to has none of its own left. It then goes on carrying out theirs until
    /// [`Peer::go`].
    ///
    /// # Errors
    /// If it failed.
    pub fn wait_until_done(&mut self) -> anyhow::Result<()> {
        let _: Ready = self.answer()?;
        Ok(())
    }

    /// Tells it to stop.
    pub fn stop(&mut self) {
        self.child.close_input();
    }

    /// Waits until it has left the cluster, and returns what it did.
    ///
    /// # Errors
    /// If it failed.
    pub fn finish(mut self) -> anyhow::Result<PeerReport> {
        let peer_report = self.answer()?;
        self.child.finish()?;
        Ok(peer_report)
    }

    /// Stops it where it is (SIGSTOP), until it is [resumed](Peer::resume).
    pub fn pause(&mut self) {
        self.child.pause();
    }

    /// Lets it go on after [`Peer::pause`].
    pub fn resume(&mut self) {
        self.child.resume();
    }

    /// Kills it with SIGKILL, and waits until it is gone.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn kill(self) -> anyhow::Result<()> {
        self.child.kill()
    }

    fn answer<T: DeserializeOwned>(&mut self) -> anyhow::Result<T> {
        let line = self.child.receive(None)?;
        serde_json::from_str(&line).with_context(|| format!("a peer answered {line:?}"))
    }
}

/// The peer's side: does what the first line of its input, a [`Spec`] in JSON, says.
///
/// # Errors
/// If anything fails; whoever calls this says so on stderr and exits with another status than 0.
pub fn serve() -> anyhow::Result<()> {
    let spec: Spec = serde_json::from_str(&first_line()?).context("not the specification of a peer")?;
    let orders = Orders::listen()?;
    let fabric = spec.place.open(spec.profile)?;
    let compute = cluster::join(&fabric, spec.seed)?;
    match &spec.role {
        Role::Work(work) => of_structure!(spec.structure, work_on(&spec, work, compute, &orders)),
        Role::Hold { key } => {
            hold(&spec, *key, &compute, &orders)?;
            say(&PeerReport::new(Tally::default(), compute_counters(compute)))
        }
    }
}

fn work_on<S: Subject>(spec: &Spec, work: &Work, compute: ComputeServer, orders: &Orders) -> anyhow::Result<()> {
    let limit = Duration::from_secs_f64(work.seconds) + PATIENCE + GRACE;
    let _watchdog = Watchdog::start(format!("peer of clients from {}", work.first_client), limit);
    let client = open_client::<S>(&compute, &spec.tree, proof(spec), work.reach)?;
    let compute = Arc::new(compute);
    let wait_for_go = || {
        say(&Ready { owner: compute.owner().incarnation(), page: None })?;
        if !orders.wait_for_go() {
            orders.stopped.store(true, Ordering::Release);
        }
        Ok(())
    };
    let serving = client.serve(&compute)?;
    let tally = run_work(work, spec.seed, &client, &compute, &orders.stopped, wait_for_go)?;
    if serving.is_some() {
        // Others may still send operations.
        say(&Ready { owner: compute.owner().incarnation(), page: None })?;
        orders.wait_for_go();
    }
    drop(serving);
    say(&close(tally, &client, Arc::into_inner(compute).context("somebody still has the compute server")?)?)
}

/// What a compute server has to tell when its workers have ended; it leaves.
///
/// # Errors
/// If it cannot write what it has changed.
pub fn close<S: Subject>(tally: Tally, client: &Client<S>, compute: ComputeServer) -> anyhow::Result<PeerReport> {
    let worker = cluster::again(|| compute.worker())?;
    let seen = worker.block_on(client.close(&worker))?;
    drop(worker);
    let mut peer_report = PeerReport::new(tally, compute_counters(compute));
    peer_report.add_client(client, seen);
    peer_report.counters.insert(BREAKS.into(), faulty::breaks());
    Ok(peer_report)
}

/// Leaves the cluster, and returns what its workers counted.
fn compute_counters(compute: ComputeServer) -> Counters {
    let counters = compute.counters();
    drop(compute);
    counters
}

fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(what)?)?;
    Ok(out.flush()?)
}

fn proof(spec: &Spec) -> Proof {
    if spec.three_waits { Proof::LockBodyLock } else { Proof::Checksum }
}

/// What the parent says, as a thread hears it.
struct Orders {
    lines: std::sync::mpsc::Receiver<String>,
    stopped: Arc<AtomicBool>,
}

impl Orders {
    fn listen() -> std::io::Result<Self> {
        let (to, lines) = std::sync::mpsc::channel();
        let stopped = Arc::new(AtomicBool::new(false));
        let heard = Arc::clone(&stopped);
        std::thread::Builder::new().name("orders".into()).spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                let _ = to.send(line);
            }
            heard.store(true, Ordering::Release);
        })?;
        Ok(Self { lines, stopped })
    }

    /// Waits for `go`; false if the parent stops the peer or is gone.
    fn wait_for_go(&self) -> bool {
        self.lines.recv().is_ok_and(|line| line == "go")
    }
}

/// A compute server's way to the tree of this name.
///
/// # Errors
/// If there is none, or its cache cannot be made.
pub fn open_client<S: Subject>(
    compute: &ComputeServer,
    tree: &str,
    proof: Proof,
    reach: AccessUnderTest,
) -> anyhow::Result<Client<S>> {
    let worker = cluster::again(|| compute.worker())?;
    let tree = cluster::again(|| worker.block_on(Map::<S, _>::open(&worker, tree, proof)))?;
    Ok(Client::new(tree.structure().clone(), proof, reach)?)
}

/// Runs the workers of a compute server to their end. `wait` is called when they are ready, whether or not they are able.
///
/// # Errors
/// If one of them cannot be had, or an operation fails.
pub fn run_work(
    work: &Work,
    seed: u64,
    client: &Client<impl Subject>,
    compute: &ComputeServer,
    stopped: &Arc<AtomicBool>,
    wait: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<Tally> {
    let steps = Barrier::new(work.workers as usize + 1);
    let deadlines = Arc::new(Deadlines::new(work.awaits, &work.histories));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..work.workers)
            .map(|index| {
                let (steps, until) = (&steps, (stopped, &deadlines));
                let client_number = work.first_client + index;
                scope.spawn(move || run_worker(work, seed, client, compute, until, client_number, steps))
            })
            .collect();
        steps.wait();
        let waited = wait();
        steps.wait();
        let mut total = Tally::default();
        for thread in threads {
            total += thread.join().map_err(|_| anyhow::anyhow!("a worker panicked"))??;
        }
        waited.map(|()| total)
    })
}

fn run_worker(
    work: &Work,
    seed: u64,
    client: &Client<impl Subject>,
    compute: &ComputeServer,
    (stopped, deadlines): (&Arc<AtomicBool>, &Arc<Deadlines>),
    client_number: u32,
    steps: &Barrier,
) -> anyhow::Result<Tally> {
    let prepare = || {
        let worker = cluster::again(|| compute.worker())?;
        let tree = cluster::again(|| worker.block_on(client.tree(&worker)))?;
        cluster::again(|| worker.block_on(tree.connect()))?;
        let flush = if work.deadly { Flush::Invocations } else { Flush::WhenFull };
        let recorder = Recorder::in_dir(&work.histories, client_number, flush)?;
        anyhow::Ok((worker, tree, recorder, Workload::new(&work.workload(seed), client_number)?))
    };
    let prepared = prepare();
    steps.wait();
    steps.wait();
    let (worker, tree, recorder, workload) = prepared?;
    let deadline = Instant::now() + Duration::from_secs_f64(work.seconds);
    let (stopped, deadlines, counting) = (Arc::clone(stopped), Arc::clone(deadlines), Handle::clone(&worker));
    let stop = move |tally: Tally| {
        stopped.load(Ordering::Acquire) || deadlines.is_over(deadline, tally.strays, || counting.counters())
    };
    let recorder = Rc::new(recorder);
    let tally = tree.drive(&worker, workload, &recorder, work.plan(), stop)?;
    if let crate::access_under_test::Tree::Shipping(tree) = &tree {
        client.add(tree.access().counts());
    }
    drop(tree);
    drop(worker);
    Rc::into_inner(recorder).context("an operation outlived its worker")?.finish()?;
    Ok(tally)
}

fn hold(spec: &Spec, key: u64, compute: &ComputeServer, orders: &Orders) -> anyhow::Result<()> {
    let worker = compute.worker()?;
    worker.block_on(async {
        let tree = BTree::<OneSided<btree::Tree>>::open(&worker, &spec.tree, proof(spec)).await?;
        let mut held = HeldPage::lock_leaf(&worker, tree.access(), key).await?;
        held.write_half().await?;
        say(&Ready { owner: compute.owner().incarnation(), page: Some(held.at().raw()) })?;
        // Without the order it stays as it is: a held page is to be met, then freed or left behind by a kill.
        orders.wait_for_go();
        held.give_back().await
    })
}
