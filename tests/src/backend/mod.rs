//! On what a test's cluster runs: the one place that decides it.
//!
//! There are three backends, and a test that takes a fabric runs on each. `FARLINK_FABRIC` chooses the one of a run:
//! `mem` (the default), `mem-processes` or `verbs`. Where `verbs` cannot run, its tests are skipped and say so, unless
//! `FARLINK_REQUIRE_VERBS=1`: then they fail.

pub mod fleet;
pub mod here;
pub(crate) mod verbs;

use std::{
    fmt,
    io::Write,
    ops::Deref,
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    sync::{Arc, OnceLock},
};

use anyhow::Context;
use farlink_children::Child;
use farlink_children::Scratch;
use farlink_runtime::{
    error::Error,
    fabric::{
        Fabric,
        faulty::{FaultKinds, FaultOptions, FaultyFabric, FaultyListener},
        listener::Listener,
        mem::{MemFabric, MemOptions},
    },
    server::{MemoryServer, in_process},
};
use serde::{Deserialize, Serialize};

use crate::{
    cluster::{self, FAST, NASTY, WEAK},
    settings,
};

/// Tells a memory server to carry out no more operations, and says that it has stopped.
const STOP_SHIPPING: &str = "stop-shipping";
/// Tells a memory server where all of them are.
const MEMBERS: &str = "members ";

/// Where all memory servers of a cluster are, once that is known.
type Members = Arc<OnceLock<Vec<String>>>;

/// The argument that makes `farlink-stress` a memory server.
pub const SERVER: &str = "server";

/// What joins compute servers to memory servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// Memory of the test's own process.
    Mem,
    /// Memory in files, served by other processes.
    MemProcesses,
    /// Real RDMA verbs to memory servers in other processes.
    Verbs,
}

impl Backend {
    /// All.
    pub const ALL: [Self; 3] = [Self::Mem, Self::MemProcesses, Self::Verbs];

    /// The backend of this run: what `FARLINK_FABRIC` says, or [`Backend::Mem`].
    pub fn chosen() -> Self {
        settings::from_env("FARLINK_FABRIC", Self::Mem)
    }

    /// The backend of this run where processes share the cluster.
    pub fn chosen_across_processes() -> Self {
        match Self::chosen() {
            Self::Mem => Self::MemProcesses,
            other => other,
        }
    }

    /// The backends of a test that by itself runs on all: the chosen one if one was chosen.
    pub fn each() -> Vec<Self> {
        let mut each = match std::env::var_os("FARLINK_FABRIC") {
            Some(_) => vec![Self::chosen()],
            None => Self::ALL.to_vec(),
        };
        each.retain(|backend| backend.is_here());
        each
    }

    /// Whether it can run here; if not, says why.
    ///
    /// # Panics
    /// If it cannot, and `FARLINK_REQUIRE_VERBS` says that it has to.
    pub fn is_here(self) -> bool {
        let Err(why) = self.try_here() else { return true };
        let required = settings::from_env("FARLINK_REQUIRE_VERBS", 0) != 0;
        assert!(!required, "FARLINK_REQUIRE_VERBS is set, and {self} does not work here: {why}");
        println!("skipped on {self}: {why}");
        false
    }

    fn try_here(self) -> Result<(), String> {
        match self {
            Self::Mem | Self::MemProcesses => Ok(()),
            Self::Verbs => verbs::try_here(),
        }
    }
}

impl FromStr for Backend {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let known = Self::ALL.into_iter().find(|backend| backend.to_string() == text);
        known.context("it is mem, mem-processes or verbs")
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mem => "mem",
            Self::MemProcesses => "mem-processes",
            Self::Verbs => "verbs",
        })
    }
}

/// How the fabric behaves: `mem` as is said here, verbs as they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FabricProfile {
    /// [`FAST`].
    Fast,
    /// [`NASTY`].
    Nasty,
    /// [`WEAK`].
    Weak,
    /// [`NASTY`] or [`WEAK`], and requests fail; on verbs, requests fail.
    Faulty(Faults),
}

/// How often what fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Faults {
    /// Decides what fails.
    pub seed: u64,
    /// One request in so many breaks its connection, one registration and one connection in so many is refused.
    pub one_in: u32,
    /// What becomes of requests that fail.
    pub fate: Fate,
    /// [`WEAK`] instead of [`NASTY`].
    pub is_weak: bool,
}

/// What becomes of requests that fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fate {
    /// They have no effect.
    Refused,
    /// They have their effect, and some of those behind them.
    Done,
    /// Earlier ones fail with them, after they have had their effect.
    Lost,
    /// Now this, now that.
    Any,
}

impl Fate {
    /// All.
    pub const ALL: [Self; 4] = [Self::Refused, Self::Done, Self::Lost, Self::Any];
}

impl FromStr for Fate {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text {
            "refused" => Ok(Self::Refused),
            "done" => Ok(Self::Done),
            "lost" => Ok(Self::Lost),
            "any" => Ok(Self::Any),
            _ => anyhow::bail!("it is refused, done, lost or any"),
        }
    }
}

impl Faults {
    /// What they are to a fabric.
    pub fn options(self) -> FaultOptions {
        let (refused, done, lost) = match self.fate {
            Fate::Refused => (true, false, false),
            Fate::Done => (false, true, false),
            Fate::Lost => (false, false, true),
            Fate::Any => (true, true, true),
        };
        FaultOptions { kinds: FaultKinds { refused, done, lost }, ..FaultOptions::one_in(self.one_in, self.seed) }
    }
}

impl FabricProfile {
    /// The options of the fabric.
    pub fn options(self) -> MemOptions {
        match self {
            Self::Fast => FAST,
            Self::Nasty => NASTY,
            Self::Faulty(Faults { is_weak: false, .. }) => NASTY,
            Self::Weak | Self::Faulty(_) => WEAK,
        }
    }

    /// What fails, if anything does.
    pub fn faults(self) -> Option<Faults> {
        if let Self::Faulty(faults) = self { Some(faults) } else { None }
    }

    /// The fabric, whose requests fail if the profile says so.
    pub fn wrap(self, fabric: Arc<dyn Fabric>) -> Arc<dyn Fabric> {
        match self.faults() {
            Some(faults) => Arc::new(FaultyFabric::new(fabric, faults.options())),
            None => fabric,
        }
    }

    /// The listener, whose endpoints' requests fail if that is these profile.
    pub fn wrap_listener(self, listener: Box<dyn Listener>) -> Box<dyn Listener> {
        match self.faults() {
            Some(faults) => Box::new(FaultyListener::new(listener, faults.options())),
            None => listener,
        }
    }
}

/// Where a cluster is, for other processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// A directory of the `mem` fabric.
    Files(PathBuf),
    /// Memory servers of the `verbs` fabric.
    Verbs {
        /// Their addresses.
        servers: Vec<String>,
        /// What a compute server must know.
        secret: String,
    },
}

impl Place {
    /// The way there.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(&self, profile: FabricProfile) -> Result<Arc<dyn Fabric>, Error> {
        Ok(profile.wrap(match self {
            Self::Files(dir) => Arc::new(MemFabric::open(dir, profile.options())?),
            Self::Verbs { servers, secret } => verbs::connect(servers, secret)?,
        }))
    }
}

/// A cluster and the way to it, of which it derefs to. It is gone with the value.
#[derive(Debug)]
pub struct Cluster {
    // In this order: the way, the servers, their files.
    fabric: Arc<dyn Fabric>,
    place: Option<Place>,
    servers: Vec<ServerProcess>,
    _dir: Option<Scratch>,
}

impl Deref for Cluster {
    type Target = Arc<dyn Fabric>;

    fn deref(&self) -> &Self::Target {
        &self.fabric
    }
}

impl Cluster {
    /// Starts `servers` memory servers of `bytes` each, on `backend`.
    ///
    /// # Errors
    /// If they cannot be started or reached.
    pub fn start(backend: Backend, servers: usize, bytes: u64, profile: FabricProfile) -> anyhow::Result<Self> {
        Self::start_with(backend, servers, bytes, profile, 0)
    }

    /// [`Cluster::start`], each memory server with so many threads that carry out operations. Only across processes.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub fn start_with(
        backend: Backend,
        servers: usize,
        bytes: u64,
        profile: FabricProfile,
        threads: usize,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!(threads == 0 || backend != Backend::Mem, "{backend} does not ship operations here");
        if backend == Backend::Mem {
            let fabric = profile.wrap(Arc::new(in_process(servers, bytes, profile.options())?));
            return Ok(Self { fabric, place: None, servers: Vec::new(), _dir: None });
        }
        let dir = cluster::scratch()?;
        let secret = format!("{:032x}", rand::random::<u128>());
        let start = |server| {
            let (dir, secret) = (dir.path().to_owned(), secret.clone());
            ServerProcess::start(&ServerSpec { backend, dir, secret, server, servers, bytes, profile, threads })
        };
        let mut processes = (0..servers).map(start).collect::<anyhow::Result<Vec<_>>>()?;
        let place = match backend {
            Backend::Verbs => {
                let servers: Vec<String> = processes.iter().map(|process| process.address.clone()).collect();
                processes
                    .iter_mut()
                    .try_for_each(|process| process.child.send(&format!("{MEMBERS}{}", servers.join(","))))?;
                Place::Verbs { servers, secret }
            }
            _ => Place::Files(dir.path().to_owned()),
        };
        let fabric = place.open(profile)?;
        Ok(Self { fabric, place: Some(place), servers: processes, _dir: Some(dir) })
    }

    /// The running cluster at `place`.
    ///
    /// # Errors
    /// As [`Place::open`].
    pub fn at(place: Place, profile: FabricProfile) -> Result<Self, Error> {
        let fabric = place.open(profile)?;
        Ok(Self { fabric, place: Some(place), servers: Vec::new(), _dir: None })
    }

    /// Ends the threads of memory servers that carry out operations, which then leave the cluster.
    ///
    /// # Errors
    /// If a memory server is gone.
    pub fn stop_shipping(&mut self) -> anyhow::Result<()> {
        self.servers.iter_mut().try_for_each(ServerProcess::stop_shipping)
    }

    /// Starts them on the backend of this run.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub fn of_this_run(servers: usize, bytes: u64, profile: FabricProfile) -> anyhow::Result<Self> {
        Self::start(Backend::chosen(), servers, bytes, profile)
    }

    /// Where other processes find it.
    ///
    /// # Errors
    /// If it is in this process.
    pub fn place(&self) -> anyhow::Result<&Place> {
        self.place.as_ref().context("a cluster in one process cannot be reached from others")
    }
}

/// What a memory server in a process of its own serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSpec {
    /// How it is reached.
    pub backend: Backend,
    /// The cluster's directory, where it has one.
    pub dir: PathBuf,
    /// The cluster's secret, where it has one.
    pub secret: String,
    /// Its number.
    pub server: usize,
    /// How many there are.
    pub servers: usize,
    /// Bytes.
    pub bytes: u64,
    /// How the fabric behaves to its own threads.
    pub profile: FabricProfile,
    /// Threads that carry out operations.
    pub threads: usize,
}

/// What a memory server says once it can be reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Serving {
    /// Its address; empty where it has none.
    address: String,
}

/// A memory server in a process of its own, which ends with this.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    /// Starts it. Blocks until it can be reached.
    ///
    /// # Errors
    /// If it cannot be started, or ends before. What it has to say about that is on stderr.
    pub fn start(spec: &ServerSpec) -> anyhow::Result<Self> {
        let mut command = Command::new(stress_program()?);
        command.arg(SERVER);
        let mut child = Child::start("a memory server", command)?;
        // Not among the arguments, which everybody sees: it holds the cluster's secret.
        child.send(&serde_json::to_string(spec)?)?;
        let Serving { address } =
            serde_json::from_str(&child.receive(None)?).context("a memory server did not start")?;
        Ok(Self { child, address })
    }

    fn stop_shipping(&mut self) -> anyhow::Result<()> {
        self.child.send(STOP_SHIPPING)?;
        let answer = self.child.receive(None)?;
        anyhow::ensure!(answer == STOP_SHIPPING, "a memory server answers {answer:?}");
        Ok(())
    }
}

/// The first line of standard input; the rest stays there.
pub(crate) fn first_line() -> anyhow::Result<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(line)
}

/// The other side: serves what the first line of its input, a [`ServerSpec`] in JSON, says until whoever started it is gone.
///
/// # Errors
/// If it cannot serve.
pub fn serve() -> anyhow::Result<()> {
    let spec: ServerSpec = serde_json::from_str(&first_line()?).context("not the specification of a memory server")?;
    let (mut ships, members) = (None, Members::default());
    let (_server, address): (Box<dyn fmt::Debug>, String) = match spec.backend {
        Backend::Verbs => {
            let (server, address) = verbs::serve(&spec)?;
            if spec.threads > 0 {
                ships = Some(verbs::ship(&server, &spec, &members)?);
            }
            (Box::new(server), address)
        }
        _ => {
            let options = cluster::serve_options(&spec.dir, spec.server, spec.servers, spec.bytes);
            let server = MemoryServer::start(&options)?;
            if spec.threads > 0 {
                ships = Some(fleet::ship(&server, &spec)?);
            }
            (Box::new(server), String::new())
        }
    };
    say(&serde_json::to_string(&Serving { address })?)?;
    for order in std::io::stdin().lines().map_while(Result::ok) {
        if order == STOP_SHIPPING {
            ships = None;
            say(STOP_SHIPPING)?;
        } else if let Some(servers) = order.strip_prefix(MEMBERS) {
            let _ = members.set(servers.split(',').map(str::to_owned).collect());
        }
    }
    drop(ships);
    Ok(())
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// The program `farlink-stress`, which stands beside the test that runs or in the folder above it.
fn stress_program() -> anyhow::Result<PathBuf> {
    let current = std::env::current_exe()?;
    let folders = current.ancestors().skip(1).take(2);
    let mut candidates = folders.map(|folder: &Path| folder.join("farlink-stress"));
    let why = "farlink-stress, which serves memory, is not built: in farlink's repository `cargo build -p farlink-tests --bins` does that; \
               elsewhere run without FARLINK_FABRIC";
    candidates.find(|path| path.exists()).context(why)
}
