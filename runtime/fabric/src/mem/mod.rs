//! The `mem` fabric: the memory of all memory servers is mapped into the compute process.
//!
//! In one process ([`MemFabric::in_process`]) or across processes through the files of a cluster directory
//! ([`MemFabric::open`]); the same code maps a CXL device. READs and WRITEs are word-wise relaxed atomic copies, atomics
//! are the CPU's own. [`MemOptions`] make it behave like a network: added latency, a bandwidth limit, and *nasty* mode,
//! which does on purpose all that the [fabric's contract](super) permits.
//!
//! Files of a cluster directory:
//!
//! ```text
//! cluster          text: the cluster's id and its number of memory servers
//! server-N.mem     the region of memory server N; locked by the process that serves it
//! started-N        text: the stamp that memory server N has given its region when it was last started
//! owners/I         locked by the compute server with incarnation I while it runs
//! acceptor-N, connections/   where memory server N takes messages, and the connections to it (see `acceptor.rs`)
//! acceptor-cI                the same of the compute server with incarnation I
//! ```
//!
//! All of them are made for their user alone, and a directory to which somebody else can write is refused: whoever can lock
//! a file passes for a process that runs.
//!
//! # Memory servers that go
//! The memory outlives the process that serves it, so nothing fails by itself. [`MemFabric::check_servers`](Fabric::check_servers)
//! looks; a compute server's maintenance calls it. A memory server counts as lost when nobody has served its region for a
//! second, or at once when the region's file was deleted, replaced, cut, or overwritten by a copy of another time; from then on
//! every request to it fails with [`Error::ServerLost`]. One that is started again within the second, on the same file, goes on
//! as if nothing had happened. A file that is cut while it is mapped does not end the process: the first file that is mapped
//! **installs a handler for SIGBUS** (on Linux; `mapped.rs` says what it does, and it passes on what is not its own).

mod acceptor;
mod claims;
mod endpoint;
pub mod eventcount;
mod files;
mod nasty;
mod served;
mod server_endpoint;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use hashbrown::HashMap;

pub use self::served::{ServeRegion, ServedRegion};

use self::{
    acceptor::{Acceptor, AcceptorList, silent},
    claims::Claims,
    endpoint::{FindAcceptor, MemEndpoint},
    files::RegionFile,
    server_endpoint::MemListener,
};
use crate::{
    clock::Clock,
    connection::ListenerId,
    endpoint::{Capabilities, Endpoint},
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
    listener::{ListenOptions, Listener},
    lock::OwnerId,
    memory::LocalMemory,
    ptr::ServerId,
    region::Region,
    sync::{Arc, Mutex, lock},
};

/// The eager limit, 4 KiB. Rings and rendezvous were measured to be level at 1 to 4 KiB where copies went at 1 GB/s, and at up
/// to 16 KiB where they went at 3 GB/s.
const EAGER_WORDS: usize = 512;

/// How often it is looked whether memory servers are there, at most.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long nobody may serve a region: a memory server that is started again in its place takes less.
const UNSERVED_MAX: Duration = Duration::from_secs(1);

/// How the `mem` fabric behaves. The default is as fast as memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemOptions {
    /// Nanoseconds added to every operation: it completes no sooner. Operations in flight overlap.
    pub latency_ns: u64,
    /// Bytes per second between one endpoint and one memory server; 0 for no limit.
    pub bandwidth_bytes_per_s: u64,
    /// Moves each READ and WRITE cache line by cache line in shuffled order, words within a line too, with other work let
    /// in between, and delays completions at random.
    pub nasty: bool,
    /// Whether to guarantee (and keep) [`Capabilities::ordered_writes`].
    pub ordered_writes: bool,
    /// Whether to guarantee [`Capabilities::atomic_against_writes`].
    pub atomic_against_writes: bool,
    /// Whether to declare [`Capabilities::atomic_against_cpu`]. It always holds: this is for tests of those who ask.
    pub atomic_against_cpu: bool,
    /// [`Capabilities::gather_max`] of a memory server's endpoints: as long a list as many cards take.
    pub gather_max: usize,
}

impl Default for MemOptions {
    fn default() -> Self {
        Self {
            latency_ns: 0,
            bandwidth_bytes_per_s: 0,
            nasty: false,
            ordered_writes: true,
            atomic_against_writes: true,
            atomic_against_cpu: true,
            gather_max: 32,
        }
    }
}

impl MemOptions {
    fn is_timed(&self) -> bool {
        self.latency_ns != 0 || self.bandwidth_bytes_per_s != 0
    }

    /// Those of a worker's endpoint.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            ordered_writes: self.ordered_writes,
            atomic_against_writes: self.atomic_against_writes,
            atomic_against_cpu: self.atomic_against_cpu,
            inline_bytes: 8,
            gather_max: 1,
            eager_words: EAGER_WORDS,
        }
    }
}

/// Mapped memory as a fabric.
#[derive(Debug)]
pub struct MemFabric {
    regions: Arc<Vec<Region>>,
    /// The regions' files, if they have some.
    files: Mutex<Looks>,
    claims: Claims,
    acceptors: AcceptorSource,
    options: MemOptions,
}

/// What was last seen of the memory servers.
#[derive(Debug, Default)]
struct Looks {
    files: Vec<RegionFile>,
    /// Since when nobody serves a region.
    unserved: Vec<Option<Instant>>,
    last: Option<Instant>,
}

impl Looks {
    fn new(files: Vec<RegionFile>) -> Self {
        let unserved = files.iter().map(|_| None).collect();
        Self { files, unserved, last: None }
    }

    /// Looks, if that is due, and marks regions that are lost.
    fn look(&mut self, regions: &[Region], now: Instant) {
        if self.last.is_some_and(|last| now.duration_since(last) < LOOK_EVERY) {
            return;
        }
        self.last = Some(now);
        for ((file, unserved), region) in self.files.iter().zip(&mut self.unserved).zip(regions) {
            if region.is_lost() {
                continue;
            }
            let since = if file.is_served() { None } else { Some(unserved.unwrap_or(now)) };
            *unserved = since;
            let is_gone = since.is_some_and(|since| now.duration_since(since) >= UNSERVED_MAX);
            let gone = is_gone.then(|| "the process that served it has ended".to_owned());
            if let Some(why) = file.damage(region).or(gone) {
                region.lose(why);
            }
        }
    }
}

/// Where the acceptors are.
#[derive(Debug, Clone)]
enum AcceptorSource {
    Here(AcceptorList),
    In(PathBuf),
}

impl AcceptorSource {
    fn here() -> Self {
        Self::Here(Arc::new(Mutex::new(HashMap::new())))
    }
}

impl FindAcceptor for AcceptorSource {
    fn find(&self, whose: ListenerId) -> Result<Arc<Acceptor>, Error> {
        match self {
            Self::Here(acceptors) => lock(acceptors).get(&whose).cloned().ok_or_else(|| silent(whose)),
            Self::In(dir) => Acceptor::open(dir, whose).map(Arc::new),
        }
    }
}

impl MemFabric {
    /// Memory servers inside this process, whose regions these are: formatted by the caller, and gone with the value.
    pub fn in_process(regions: Vec<Region>, options: MemOptions) -> Self {
        let acceptors = AcceptorSource::here();
        Self { regions: Arc::new(regions), files: Mutex::default(), claims: Claims::in_process(), acceptors, options }
    }

    /// Maps the memory servers of the cluster in `dir`, all of which must be running.
    ///
    /// # Errors
    /// If there is no cluster, a server is missing or not running, a file has the wrong size, or others could meddle with the
    /// directory.
    pub fn open(dir: &Path, options: MemOptions) -> Result<Self, Error> {
        let cluster = files::ClusterFile::read(dir)?;
        let served = (0..cluster.servers)
            .map(|index| files::open_served(dir, files::server_id(index)?, cluster.servers))
            .collect::<Result<Vec<_>, _>>()?;
        let (regions, files) = served.into_iter().unzip();
        let acceptors = AcceptorSource::In(dir.to_path_buf());
        let files = Mutex::new(Looks::new(files));
        Ok(Self { regions: Arc::new(regions), files, claims: Claims::files(dir), acceptors, options })
    }

    /// Opens a memory server of this process to messages, until the listener is dropped. The memory servers of a cluster
    /// directory listen in the process that serves them ([`ServedRegion::listen`]).
    ///
    /// # Errors
    /// If there is no such memory server in this process, it listens already, or an option cannot work.
    pub fn listen(&self, server: ServerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        options.validate()?;
        let bad = |why: String| Error::BadOption { option: "server", why };
        let AcceptorSource::Here(acceptors) = &self.acceptors else {
            return Err(bad(format!("memory server {server} listens in the process that serves it")));
        };
        let memory = self.memory(server)?;
        let whose = ListenerId::Memory(server);
        if lock(acceptors).contains_key(&whose) {
            return Err(bad(format!("memory server {server} listens already")));
        }
        let acceptor = Acceptor::in_process(whose, options)?;
        Ok(Box::new(MemListener::new(acceptor, memory, self.options, Some(Arc::clone(acceptors)))))
    }

    /// The memory of a memory server of this process, for its threads.
    ///
    /// # Errors
    /// If there is no such memory server.
    pub fn memory(&self, server: ServerId) -> Result<LocalMemory, Error> {
        if server.index() >= self.regions.len() {
            return Err(Error::BadOption { option: "server", why: format!("there is no memory server {server}") });
        }
        Ok(LocalMemory::new(&self.regions, server.index(), server))
    }

    /// The words of a region, for whoever plays the memory server in the same process and for tests that damage memory.
    #[doc(hidden)]
    pub fn raw_words(&self, server: ServerId) -> &[crate::sync::AtomicU64] {
        self.regions[server.index()].words()
    }
}

impl Fabric for MemFabric {
    fn servers(&self) -> usize {
        self.regions.len()
    }

    fn region_bytes(&self, server: ServerId) -> u64 {
        self.regions[server.index()].bytes()
    }

    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, Error> {
        let endpoint = MemEndpoint::new(Arc::clone(&self.regions), self.options, seed, clock);
        Ok(Box::new(endpoint.with_acceptors(Box::new(self.acceptors.clone()))))
    }

    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error> {
        self.claims.claim(owner)
    }

    fn liveness(&self, owner: OwnerId) -> Liveness {
        let liveness = self.claims.liveness(owner);
        if liveness == Liveness::Alive && self.claims.are_over() {
            // Whoever waits for it is told that its memory is gone.
            let _ = self.check_servers();
        }
        liveness
    }

    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        options.validate()?;
        let whose = ListenerId::Compute(owner);
        if self.acceptors.find(whose).is_ok() {
            return Err(Error::BadOption { option: "owner", why: format!("{owner} listens already") });
        }
        let (acceptor, here) = match &self.acceptors {
            AcceptorSource::Here(acceptors) => (Acceptor::in_process(whose, options)?, Some(Arc::clone(acceptors))),
            AcceptorSource::In(dir) => (Acceptor::create(dir, whose, options)?, None),
        };
        Ok(Box::new(MemListener::new(acceptor, LocalMemory::none(), self.options, here)))
    }

    fn check_servers(&self) -> Result<(), Error> {
        lock(&self.files).look(&self.regions, Instant::now());
        let lost = self.regions.iter().position(Region::is_lost);
        lost.map_or(Ok(()), |index| Err(self.regions[index].lost(files::server_id(index)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Users are promised to hear within two seconds, and that one which is started again within a second goes on.
    #[test]
    fn a_memory_server_is_lost_between_one_second_and_two_after_its_end() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().to_path_buf();
        let options = ServeRegion { dir: dir.clone(), server: 0, servers: 1, bytes: 1 << 16, any_size: false };
        let served = ServedRegion::start(&options).unwrap();
        let path = served.path().to_owned();
        let fabric = MemFabric::open(&dir, MemOptions::default()).unwrap();
        let begun = Instant::now();
        let is_lost_after = |ms| {
            lock(&fabric.files).look(&fabric.regions, begun + Duration::from_millis(ms));
            fabric.regions[0].is_lost()
        };
        assert!(!is_lost_after(0));
        drop(served);
        // A process that is being started has its files for a moment.
        while std::fs::File::open(&path).unwrap().try_lock().is_err() {
            std::thread::yield_now();
        }
        // As often as anybody asks at most.
        let lost_ms = (1..=500).map(|look| 10 * look).find(|&ms| is_lost_after(ms)).unwrap();
        assert!((1000..1500).contains(&lost_ms), "after {lost_ms} ms");
    }
}
