//! A region in a cluster's directory, and the process that keeps it served.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    MemOptions,
    acceptor::Acceptor,
    files::{self, ClusterFile},
    server_endpoint::MemListener,
};
use crate::{
    error::Error,
    listener::{ListenOptions, Listener},
    memory::LocalMemory,
    ptr::ServerId,
    region::Region,
    sync::Arc,
};

/// Which region to serve.
#[derive(Debug, Clone)]
pub struct ServeRegion {
    /// The cluster's directory; on `/dev/shm` the memory is real memory.
    pub dir: PathBuf,
    /// The number of the memory server, from 0.
    pub server: usize,
    /// How many memory servers the cluster has. The first one to start decides.
    pub servers: usize,
    /// Bytes of a region that is made, a multiple of 4096.
    pub bytes: u64,
    /// Serve a region that exists with whatever size it has; otherwise it must have `bytes`.
    pub any_size: bool,
}

/// A region that this process serves until the value is dropped.
#[derive(Debug)]
pub struct ServedRegion {
    dir: PathBuf,
    path: PathBuf,
    server: ServerId,
    cluster: u64,
    /// One.
    regions: Arc<Vec<Region>>,
    is_ephemeral: bool,
    existed: bool,
    locked: File,
}

impl ServedRegion {
    /// Makes the region, zeroed, or maps the one that is there. Blocks while the system reserves the memory.
    ///
    /// # Errors
    /// If the region is served already or is of another size, or the memory cannot be had.
    pub fn start(options: &ServeRegion) -> Result<Self, Error> {
        let ServeRegion { dir, bytes: wanted, .. } = options;
        let server = files::server_id(options.server)?;
        // Held until the region's file exists: nobody takes the cluster for abandoned meanwhile.
        let (cluster, _held) = ClusterFile::hold(dir, options.servers)?;
        let path = files::region_path(dir, server);
        let file = open_locked(&path, server, dir)?;
        let length = file.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
        let existed = length != 0;
        if existed && !options.any_size && length != *wanted {
            let why = format!(
                "{wanted}; {} has {length}: leave the option out to serve that, or remove the file to begin anew",
                path.display()
            );
            return Err(Error::BadOption { option: "bytes", why });
        }
        if !existed {
            let reserved = files::reserve(&file, *wanted);
            if let Err(error) = reserved {
                let _ = fs::remove_file(&path);
                return Err(Error::io(format!("reserving {wanted} bytes for {}", path.display()))(error));
            }
        }
        let region = files::map(&file, &path, server)?;
        Ok(Self {
            dir: dir.clone(),
            path,
            server,
            cluster: cluster.cluster,
            regions: Arc::new(vec![region]),
            is_ephemeral: false,
            existed,
            locked: file,
        })
    }

    /// The memory server.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// The cluster's id.
    pub fn cluster(&self) -> u64 {
        self.cluster
    }

    /// The region's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the region was there before.
    pub fn existed(&self) -> bool {
        self.existed
    }

    /// The region.
    pub fn region(&self) -> &Region {
        &self.regions[0]
    }

    /// The region, for threads of this process.
    pub fn memory(&self) -> LocalMemory {
        LocalMemory::new(&self.regions, 0, self.server)
    }

    /// From now on the region is removed when it is no longer served, and the directory with the last one.
    pub fn make_ephemeral(&mut self) {
        self.is_ephemeral = true;
    }

    /// Opens the memory server to messages, until the listener is dropped. `fabric` is how its own requests behave.
    ///
    /// # Errors
    /// If an option cannot work, or a file cannot be made.
    pub fn listen(&self, options: &ListenOptions, fabric: MemOptions) -> Result<Box<dyn Listener>, Error> {
        options.validate()?;
        let acceptor = Acceptor::create(&self.dir, self.server, options)?;
        Ok(Box::new(MemListener::new(acceptor, self.memory(), fabric, None)))
    }
}

impl Drop for ServedRegion {
    fn drop(&mut self) {
        if self.is_ephemeral {
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
        let _ = fs::remove_dir_all(dir.join("connections"));
        remove_acceptors(dir);
        let _ = fs::remove_file(path);
        let _ = fs::remove_dir(dir);
    }
}

/// Removes what killed memory servers have left.
fn remove_acceptors(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with("acceptor-") {
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
