//! Memory servers: each has a region, which it formats and hands out.
//!
//! The memory server hands out its memory and otherwise stays out of the way: chunk leases, the catalog and the epoch are
//! words of the region that compute servers change with one-sided operations (see [`crate::layout`]). If it is to answer
//! messages as well, it [listens](MemoryServer::listen).

use std::path::PathBuf;

pub use farlink_fabric::memory::LocalMemory;
#[cfg(feature = "verbs")]
use farlink_fabric::verbs::{VerbsServeOptions, VerbsServer};
use farlink_fabric::{
    Error as FabricError,
    listener::{ListenOptions, Listener},
    mem::{MemFabric, MemOptions, ServeRegion, ServedRegion},
    region::Region,
    sync::{AtomicU64, Ordering},
};

use crate::{
    catalog,
    error::Error,
    free_pages::ChunkState,
    layout::{self, Dynamic, Geometry, Records},
};

/// Bytes served where none are named: 1 GiB.
pub const DEFAULT_REGION_BYTES: u64 = 1 << 30;

/// Memory servers inside this process, of `bytes` each: formatted, and gone with the fabric.
///
/// # Errors
/// If the numbers cannot work, or the memory cannot be had.
pub fn in_process(servers: usize, bytes: u64, options: MemOptions) -> Result<MemFabric, Error> {
    in_process_recording(servers, bytes, options, Records::All)
}

/// [`in_process`], for a cluster in which this is recorded.
///
/// # Errors
/// As [`in_process`].
pub fn in_process_recording(
    servers: usize,
    bytes: u64,
    options: MemOptions,
    records: Records,
) -> Result<MemFabric, Error> {
    let cluster = rand::random();
    let mut regions = Vec::with_capacity(servers);
    for index in 0..servers {
        let geometry = Geometry::plan(index, servers, bytes, cluster)?.with_records(records);
        let region = Region::anonymous(geometry.region_bytes as usize)?;
        format(region.words(), &geometry);
        regions.push(region);
    }
    Ok(MemFabric::in_process(regions, options))
}

/// Starts a memory server of the `verbs` fabric: reserves, formats and registers its memory, and accepts connections. Blocks
/// while the system locks the memory.
///
/// # Errors
/// If there is no such device, it has no atomics, the numbers cannot work, or memory or address cannot be had.
#[cfg(feature = "verbs")]
pub fn serve_verbs(options: &VerbsServeOptions, records: Records) -> Result<VerbsServer, Error> {
    let geometry = Geometry::plan(options.server, options.servers, options.bytes, options.secret.cluster())?;
    let geometry = geometry.with_records(records);
    Ok(VerbsServer::start(options, |words| format(words, &geometry))?)
}

fn format(words: &[AtomicU64], geometry: &Geometry) {
    layout::format(words, geometry, catalog::empty_page, ChunkState::for_rings().word());
}

/// What a memory server serves.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The cluster's directory; on `/dev/shm` the memory is real memory.
    pub dir: PathBuf,
    /// The number of this memory server, from 0.
    pub server: usize,
    /// How many memory servers the cluster has. The first one to start decides.
    pub servers: usize,
    /// Bytes to serve, a multiple of 4096. For a region that exists: its size, or `None` to take it as it is.
    pub bytes: Option<u64>,
    /// Remove the region when the server stops, and the directory with the last one.
    pub ephemeral: bool,
    /// What compute servers record, the same at all memory servers. For a region that exists: what it says, or `None` to take it as it
    /// is; for a new one `None` is [`Records::All`].
    pub records: Option<Records>,
}

/// A running memory server of the `mem` fabric. Dropping it stops it; the region stays on disk unless it is ephemeral.
#[derive(Debug)]
pub struct MemoryServer {
    region: ServedRegion,
    geometry: Geometry,
    resumed: bool,
}

impl MemoryServer {
    /// Creates the region, or resumes the one that is there. Blocks while the system reserves its memory.
    ///
    /// # Errors
    /// If the region is served already, is not farlink's, is of another version or size, or not the one that this memory server
    /// has left; if there was one and it is gone; if the memory cannot be had.
    pub fn start(options: &ServeOptions) -> Result<Self, Error> {
        let wanted = options.bytes.unwrap_or(DEFAULT_REGION_BYTES);
        // Fail on bad numbers before anything is created.
        Geometry::plan(options.server, options.servers, wanted, 0)?;
        let mut region = ServedRegion::start(&ServeRegion {
            dir: options.dir.clone(),
            server: options.server,
            servers: options.servers,
            bytes: wanted,
            any_size: options.bytes.is_none(),
        })?;
        let (server, words) = (region.server(), region.region().words());
        // A server that was killed while it made its region has not come to the magic number.
        let resumed = region.existed() && !layout::is_unfinished(words);
        if !resumed {
            let bytes = region.region().bytes();
            let plan = Geometry::plan(options.server, options.servers, bytes, region.cluster())?;
            format(words, &plan.with_records(options.records.unwrap_or_default()));
        }
        let superblock = layout::superblock_words(words)
            .ok_or_else(|| Error::BadSuperblock { server, why: "the region is too small for a superblock".into() })?;
        let geometry = Geometry::read(&superblock, server, region.region().bytes())?;
        if geometry.cluster != region.cluster() {
            return Err(
                FabricError::WrongCluster { server, found: geometry.cluster, expected: region.cluster() }.into()
            );
        }
        if let Some(records) = options.records.filter(|&records| records != geometry.records) {
            let why = format!("{records:?}; the region that is there says {:?}", geometry.records);
            return Err(Error::BadOption { option: "records", why });
        }
        if options.ephemeral {
            region.make_ephemeral();
        }
        let path = region.path().display();
        tracing::info!(%server, %path, bytes = geometry.region_bytes, resumed, "memory server started");
        Ok(Self { region, geometry, resumed })
    }

    /// Its place in the cluster, and its sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether the region existed before, with its data.
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    /// Opens it to messages, until the listener is dropped: see [`crate::messaging`]. `fabric` is how its own requests on
    /// links behave.
    ///
    /// # Errors
    /// If an option cannot work, or a file cannot be made.
    pub fn listen(&self, options: &ListenOptions, fabric: MemOptions) -> Result<Box<dyn Listener>, Error> {
        Ok(self.region.listen(options, fabric)?)
    }

    /// Whether its region is still there as it was: to be asked now and then, by a program that ends if it is not.
    ///
    /// # Errors
    /// If the region's file was deleted, replaced, cut, or overwritten by a copy of another time.
    pub fn check(&self) -> Result<(), Error> {
        Ok(self.region.check()?)
    }

    /// Its memory, for threads of this process.
    pub fn memory(&self) -> LocalMemory {
        self.region.memory()
    }

    /// How many of its chunks are for rings alone, or were leased by compute servers so far.
    pub fn leased_chunks(&self) -> u64 {
        let word = &self.region.region().words()[(Dynamic::NextChunk.offset() / 8) as usize];
        word.load(Ordering::Relaxed).min(self.geometry.chunks)
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        tracing::info!(server = %self.geometry.server, leased_chunks = self.leased_chunks(), "memory server stops");
    }
}
