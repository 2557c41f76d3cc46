//! A memory server of the `mem` fabric: it creates or resumes a region and keeps it served until dropped.
//!
//! The memory server hands out its memory and otherwise stays out of the way: chunk leases, the catalog and the epoch are
//! words of the region that compute servers change with one-sided operations (see [`crate::layout`]). If it is to answer
//! messages as well, it [listens](MemoryServer::listen).

mod memory;

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    error::Error,
    fabric::{
        link::{ListenOptions, Listener},
        mem::{
            MemOptions,
            door::Door,
            files::{self, ClusterFile},
            port::MemListener,
            region::Region,
        },
    },
    layout::{self, Dynamic, Geometry},
    ptr::ServerId,
    sync::{Arc, Ordering},
};

pub use self::memory::LocalMemory;

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
}

/// Bytes served where none are named: 1 GiB.
pub const DEFAULT_REGION_BYTES: u64 = 1 << 30;

/// A running memory server. Dropping it stops it; the region stays on disk unless it is ephemeral.
#[derive(Debug)]
pub struct MemoryServer {
    dir: PathBuf,
    path: PathBuf,
    geometry: Geometry,
    /// One.
    regions: Arc<Vec<Region>>,
    ephemeral: bool,
    resumed: bool,
    locked: File,
}

impl MemoryServer {
    /// Creates the region, or resumes the one that is there. Blocks while the system reserves its memory.
    ///
    /// # Errors
    /// If the region is served already, is not farlink's, is of another version or size, or the memory cannot be had.
    pub fn start(options: &ServeOptions) -> Result<Self, Error> {
        let wanted = options.bytes.unwrap_or(DEFAULT_REGION_BYTES);
        // Fail on bad numbers before anything is created.
        Geometry::plan(options.server, options.servers, wanted, 0)?;
        let dir = options.dir.clone();
        let server = files::server_id(options.server)?;
        // Held until the region's file exists: nobody takes the cluster for abandoned meanwhile.
        let (cluster, _held) = ClusterFile::hold(&dir, options.servers)?;
        let path = files::region_path(&dir, server);
        let file = open_locked(&path, server, &dir)?;
        let length = file.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
        let resumed = length != 0;
        if resumed && options.bytes.is_some_and(|bytes| bytes != length) {
            let why = format!(
                "{wanted}; {} has {length}: leave the option out to serve that, or remove the file to begin anew",
                path.display()
            );
            return Err(Error::BadOption { option: "bytes", why });
        }
        if !resumed {
            let reserved = files::reserve(&file, wanted);
            if let Err(error) = reserved {
                let _ = fs::remove_file(&path);
                return Err(Error::io(format!("reserving {wanted} bytes for {}", path.display()))(error));
            }
        }
        let region = files::map(&file, &path, server)?;
        // A server that was killed while it made its region leaves zeros.
        let resumed = resumed && layout::superblock_words(region.words()).is_none_or(|words| words != [0; 8]);
        if !resumed {
            layout::format(region.words(), &Geometry::plan(options.server, options.servers, wanted, cluster.cluster)?);
        }
        let geometry = files::geometry_of(&region, server)?;
        if geometry.cluster != cluster.cluster {
            return Err(Error::WrongCluster { server, found: geometry.cluster, expected: cluster.cluster });
        }
        tracing::info!(%server, path = %path.display(), bytes = geometry.region_bytes, resumed, "memory server started");
        Ok(Self {
            dir,
            path,
            geometry,
            regions: Arc::new(vec![region]),
            ephemeral: options.ephemeral,
            resumed,
            locked: file,
        })
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
        options.validate()?;
        let door = Door::create(&self.dir, self.geometry.server, options)?;
        Ok(Box::new(MemListener::new(door, fabric, None)))
    }

    /// Its memory, for threads of this process.
    pub fn memory(&self) -> LocalMemory {
        LocalMemory::new(&self.regions, 0, self.geometry.server)
    }

    /// How many of its chunks compute servers have leased so far.
    pub fn leased_chunks(&self) -> u64 {
        let word = &self.regions[0].words()[(Dynamic::NextChunk.offset() / 8) as usize];
        word.load(Ordering::Relaxed).min(self.geometry.chunks)
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        tracing::info!(server = %self.geometry.server, leased_chunks = self.leased_chunks(), "memory server stops");
        if self.ephemeral {
            let _ = fs::remove_file(&self.path);
            // Whoever waits to serve this region again holds the cluster.
            let _ = self.locked.unlock();
            remove_if_last(&self.dir);
        }
    }
}

/// Removes a cluster that has no memory server left, and that none is about to join.
fn remove_if_last(dir: &Path) {
    let path = dir.join("cluster");
    let Ok(cluster) = File::open(&path) else { return };
    if cluster.lock().is_err() || !files::is_still_at(&cluster, &path).unwrap_or(false) {
        return;
    }
    let last = fs::read_dir(dir).is_ok_and(|entries| {
        !entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("server-"))
    });
    if last {
        // The file last: once it is gone, somebody may begin a cluster here again.
        let _ = fs::remove_dir_all(dir.join("owners"));
        let _ = fs::remove_dir_all(dir.join("links"));
        remove_doors(dir);
        let _ = fs::remove_file(path);
        let _ = fs::remove_dir(dir);
    }
}

/// Removes what killed memory servers have left.
fn remove_doors(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("door-") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Opens a region's file, or makes it, and locks it. Whoever had it locked may have removed it meanwhile: then again.
fn open_locked(path: &Path, server: ServerId, dir: &Path) -> Result<File, Error> {
    let failed = || format!("opening {}", path.display());
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(Error::io(failed()))?;
        lock_region(&file, server, dir)?;
        if files::is_still_at(&file, path).map_err(Error::io(failed()))? {
            return Ok(file);
        }
    }
}

/// Takes the exclusive lock of a region. Compute servers that ask whether it is served hold a shared one for an instant,
/// so a refusal counts only when it lasts.
fn lock_region(file: &File, server: ServerId, dir: &Path) -> Result<(), Error> {
    const TRIES: u32 = 100;
    for _ in 0..TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(2)),
            Err(TryLockError::Error(error)) => return Err(Error::io(format!("locking memory server {server}"))(error)),
        }
    }
    Err(Error::AlreadyServed { server, path: dir.to_path_buf() })
}
