//! Clusters in this process whose memory servers carry out operations.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use farlink_offload::{
    Hybrid, Remote, ShardKey, Sharded, ShardedRemote,
    ship::{Registry, ShipCounts, ShipOptions, ShipServer},
};
use farlink_runtime::{
    compute::ComputeServer,
    error::Error,
    fabric::{
        Fabric,
        listener::{ListenOptions, Listener},
        mem::{MemFabric, MemOptions},
    },
    messaging::{ServeMessages, Wait},
    one_sided::{OneSided, Proof},
    ptr::ServerId,
    server::{LocalMemory, MemoryServer},
    structure::{PlacementPolicy, Structure, StructurePlacement},
    worker::Handle,
};
use farlink_structures::{
    btree::Tree,
    bwtree::Bw,
    map::{KeyRange, Map},
    rtree::Tree as RTree,
    skiplist::List,
};

use super::{
    Backend, FabricProfile, ServerSpec,
    here::{self, Here},
};
use crate::{
    cluster,
    plugins::{chains::Chains, mixed::Mixed},
    subject::Subject,
};

/// All operations of all structures under test.
pub fn registry() -> Registry {
    Registry::new().with::<Tree>().with::<List>().with::<Bw>().with::<RTree>().with::<Mixed>().with::<Chains>()
}

/// A cluster, and the threads of its memory servers.
#[derive(Debug)]
pub struct Fleet {
    /// The threads; before the memory that they serve.
    pub servers: Vec<ShipServer>,
    /// The cluster.
    pub cluster: Arc<dyn Here>,
}

impl Fleet {
    /// A cluster of so many memory servers, each with so many threads.
    ///
    /// # Errors
    /// If memory or threads cannot be had.
    pub fn start(servers: usize, bytes: u64, threads: usize, options: MemOptions) -> Result<Self, Error> {
        let cluster = here::start(servers, bytes, options)?;
        let servers = start_all(&cluster, threads, &options_here())?;
        Ok(Self { servers, cluster })
    }

    /// [`Fleet::start`], with memory servers that behave like this; with no threads, they carry out no operations.
    ///
    /// # Errors
    /// As [`Fleet::start`].
    pub fn start_with(servers: usize, bytes: u64, threads: usize, profile: FabricProfile) -> Result<Self, Error> {
        Self::start_of(servers, bytes, threads, profile, &registry())
    }

    /// [`Fleet::start_with`], with memory servers that know these operations.
    ///
    /// # Errors
    /// As [`Fleet::start`].
    pub fn start_of(
        servers: usize,
        bytes: u64,
        threads: usize,
        profile: FabricProfile,
        registry: &Registry,
    ) -> Result<Self, Error> {
        let cluster = here::start_with(servers, bytes, profile)?;
        let servers = if threads == 0 { Vec::new() } else { serve(&cluster, threads, &options_here(), registry)? };
        Ok(Self { servers, cluster })
    }

    /// Has the memory servers of a fleet without threads carry out these operations, a thread each, as a member that has joined the cluster.
    ///
    /// # Errors
    /// If threads cannot be had.
    pub fn serve_as(&mut self, member: &Arc<ComputeServer>, registry: &Registry) -> Result<(), Error> {
        let member = Arc::clone(member);
        self.servers = serve_by(&self.cluster, 1, &options_here(), registry, move || Ok(Arc::clone(&member)))?;
        Ok(())
    }

    /// The same cluster with new threads.
    ///
    /// # Errors
    /// As [`Fleet::start`].
    pub fn restart(self) -> Result<Self, Error> {
        let Self { servers, cluster } = self;
        drop(servers);
        let servers = start_all(&cluster, 1, &options_here())?;
        Ok(Self { servers, cluster })
    }

    /// The cluster, for those who join.
    pub fn fabric(&self) -> Arc<dyn Fabric> {
        self.cluster.fabric()
    }

    /// What all its memory servers have done.
    pub fn counts(&self) -> ShipCounts {
        let mut all = ShipCounts::default();
        for server in &self.servers {
            all += server.counts();
        }
        all
    }
}

/// How a fleet serves: as a memory server does by itself, but on the few processors of a guest its threads sleep.
fn options_here() -> ShipOptions {
    let wait = if Backend::chosen() == Backend::Verbs { Wait::Event } else { Wait::Auto };
    ShipOptions { messages: ServeMessages { wait, ..ServeMessages::default() }, ..ShipOptions::default() }
}

/// A server that waits for nothing when it ends: it is lost then.
fn losable() -> ShipOptions {
    let messages = ServeMessages { end_wait: Duration::ZERO, ..ServeMessages::default() };
    ShipOptions { messages, ..ShipOptions::default() }
}

/// Such a one whose answers never go.
pub fn silent() -> ShipOptions {
    ShipOptions { hold: Some(Arc::new(|_| Box::pin(std::future::pending()))), ..losable() }
}

/// Starts so many threads for each memory server of a cluster in this process, as one member of the cluster.
///
/// # Errors
/// As [`ShipServer::start`].
pub fn start_all(cluster: &Arc<dyn Here>, threads: usize, options: &ShipOptions) -> Result<Vec<ShipServer>, Error> {
    serve(cluster, threads, options, &registry())
}

fn serve(
    cluster: &Arc<dyn Here>,
    threads: usize,
    options: &ShipOptions,
    registry: &Registry,
) -> Result<Vec<ShipServer>, Error> {
    let (fabric, member) = (cluster.fabric(), Arc::new(Mutex::new(Weak::new())));
    let join = move || {
        let mut member = member.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(member) = member.upgrade() {
            return Ok(member);
        }
        let joined = Arc::new(cluster::join(&fabric, 0)?);
        *member = Arc::downgrade(&joined);
        Ok(joined)
    };
    serve_by(cluster, threads, options, registry, join)
}

fn serve_by(
    cluster: &Arc<dyn Here>,
    threads: usize,
    options: &ShipOptions,
    registry: &Registry,
    join: impl Fn() -> Result<Arc<ComputeServer>, Error> + Clone + Send + Sync + 'static,
) -> Result<Vec<ShipServer>, Error> {
    let listen = ListenOptions { endpoints: threads, ..ListenOptions::default() };
    let start = |server: usize| {
        let server = u16::try_from(server).ok().and_then(ServerId::new).expect("a fleet is small");
        let (listener, memory) = (cluster.listen(server, &listen)?, cluster.memory(server)?);
        ShipServer::start(listener, memory, registry.clone(), options, join.clone())
    };
    (0..cluster.fabric().servers()).map(start).collect()
}

/// Has a memory server carry out these operations. Whoever it had anything to say to may be dead when it ends: it waits for nobody then.
///
/// # Errors
/// As [`ShipServer::start`].
pub fn ship_at(
    listener: Box<dyn Listener>,
    memory: LocalMemory,
    registry: Registry,
    join: impl Fn() -> Result<Arc<ComputeServer>, Error> + Send + Sync + 'static,
) -> Result<ShipServer, Error> {
    ShipServer::start(listener, memory, registry, &losable(), join)
}

/// Has a memory server of files carry out operations, as `spec` says.
///
/// # Errors
/// As [`ShipServer::start`].
pub fn ship(server: &MemoryServer, spec: &ServerSpec) -> Result<ShipServer, Error> {
    ship_of(server, &spec.dir, spec.threads, spec.profile, registry())
}

/// Has a memory server of files in `dir` carry out these operations.
///
/// # Errors
/// As [`ShipServer::start`].
pub fn ship_of(
    server: &MemoryServer,
    dir: &Path,
    threads: usize,
    profile: FabricProfile,
    registry: Registry,
) -> Result<ShipServer, Error> {
    let listen = ListenOptions { endpoints: threads, ..ListenOptions::default() };
    let listener = profile.wrap_listener(server.listen(&listen, profile.options())?);
    let dir = dir.to_owned();
    let join = move || {
        let fabric = profile.wrap(Arc::new(MemFabric::open(&dir, profile.options())?));
        Ok(Arc::new(cluster::join(&fabric, 0)?))
    };
    ShipServer::start(listener, server.memory(), registry, &ShipOptions::default(), join)
}

/// The name of a part.
pub fn part_name(name: &str, part: usize) -> String {
    format!("{name}/{part}")
}

/// Makes an empty map of the coarse-grained design, a part on each memory server.
///
/// # Errors
/// As [`Map::make_at`].
pub async fn make_parts<S: Subject>(worker: &Handle, name: &str, page_bytes: usize, parts: usize) -> Result<(), Error> {
    for part in 0..parts {
        let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(part as u16) };
        let page_bytes = S::page_bytes(page_bytes);
        Map::<S, OneSided<S>>::make_at(worker, &part_name(name, part), page_bytes, Proof::Checksum, placement).await?;
    }
    Ok(())
}

/// The parts, one-sided: to look at them past their memory servers.
///
/// # Errors
/// As [`Map::open`].
pub async fn open_parts<S: Subject>(
    worker: &Handle,
    name: &str,
    parts: usize,
) -> Result<Vec<Map<S, OneSided<S>>>, Error> {
    let mut open = Vec::with_capacity(parts);
    for part in 0..parts {
        open.push(Map::open(worker, &part_name(name, part), Proof::Checksum).await?);
    }
    Ok(open)
}

/// Opens a map of the coarse-grained design.
///
/// # Errors
/// As [`Map::open`].
pub async fn open_coarse<S: Subject>(
    worker: &Handle,
    name: &str,
    parts: usize,
    cut: ShardKey<KeyRange>,
) -> Result<Map<S, ShardedRemote<S>>, Error> {
    let parts = open_parts::<S>(worker, name, parts).await?;
    let remotes = parts.iter().map(|part| Remote::new(worker, part.structure().clone())).collect();
    Ok(Map::over(ShardedRemote::new(remotes, cut)?))
}

/// A structure of the coarse-grained design that is on one memory server.
///
/// # Errors
/// As [`ShardedRemote::new`].
pub fn in_one_part<S: Subject>(worker: &Handle, structure: Structure) -> Result<ShardedRemote<S>, Error> {
    ShardedRemote::new(vec![Remote::new(worker, structure)], ShardKey::whole())
}

/// Makes an empty map of the hybrid design, its inner levels on server 0.
///
/// # Errors
/// As [`Map::make_at`].
pub async fn make_hybrid<S: Subject>(worker: &Handle, name: &str, page_bytes: usize) -> Result<(), Error> {
    let placement = StructurePlacement { policy: PlacementPolicy::Leaves, root: ServerId::new(0) };
    Map::<S, OneSided<S>>::make_at(worker, name, S::page_bytes(page_bytes), Proof::Checksum, placement).await.map(drop)
}

/// Opens a map of the hybrid design.
///
/// # Errors
/// As [`Map::open`].
pub async fn open_hybrid<S: Subject>(worker: &Handle, name: &str, proof: Proof) -> Result<Map<S, Hybrid<S>>, Error> {
    let map = Map::<S, OneSided<S>>::open(worker, name, proof).await?;
    Ok(Map::over(Hybrid::new(worker, map.structure().clone(), proof)))
}

/// Makes and opens a map of the hybrid design in parts, the inner levels of each on another memory server.
///
/// # Errors
/// As [`Map::make_at`].
pub async fn make_parted_hybrid<S: Subject>(
    worker: &Handle,
    name: &str,
    page_bytes: usize,
    parts: usize,
    cut: ShardKey<KeyRange>,
) -> Result<Map<S, Sharded<Hybrid<S>>>, Error> {
    let mut hybrids = Vec::with_capacity(parts);
    for part in 0..parts {
        let placement = StructurePlacement { policy: PlacementPolicy::Leaves, root: ServerId::new(part as u16) };
        let (name, page_bytes) = (part_name(name, part), S::page_bytes(page_bytes));
        let map = Map::<S, OneSided<S>>::make_at(worker, &name, page_bytes, Proof::Checksum, placement).await?;
        hybrids.push(Hybrid::new(worker, map.structure().clone(), Proof::Checksum));
    }
    Ok(Map::over(Sharded::new(hybrids, cut)?))
}
