//! A region in a cluster's directory, and the process that keeps it served.

use std::{
    fs::{self, File, TryLockError},
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    MemOptions,
    acceptor::Acceptor,
    files::{self, ClusterFile, RegionFile, Started},
    server_endpoint::MemListener,
};
use crate::{
    connection::ListenerId,
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
    server: ServerId,
    cluster: u64,
    /// One.
    regions: Arc<Vec<Region>>,
    is_ephemeral: bool,
    existed: bool,
    /// Locked.
    file: RegionFile,
}

impl ServedRegion {
    /// Makes the region, zeroed, or maps the one that is there. Blocks while the system reserves the memory. Its last word
    /// before byte 4096 is this fabric's: see [`ServedRegion::check`].
    ///
    /// # Errors
    /// If the region is served already or is of another size; if there was one, and it is gone or another one is in its place; if
    /// the memory cannot be had, or others could meddle with the directory.
    pub fn start(options: &ServeRegion) -> Result<Self, Error> {
        let ServeRegion { dir, bytes: wanted, .. } = options;
        let server = files::server_id(options.server)?;
        // Held until the region's file exists: nobody takes the cluster for abandoned meanwhile.
        let (cluster, _held) = ClusterFile::hold(dir, options.servers)?;
        let path = files::region_path(dir, server);
        let file = open_locked(&path, server, dir)?;
        let length = file.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
        let existed = length != 0;
        let started = Started::read(dir, server)?;
        if started.is_some() && !existed {
            // What there was of it is gone, and links lead there from everywhere else.
            let _ = fs::remove_file(&path);
            let why = format!(
                "{} was deleted or emptied after the cluster had used it; stop all its servers and remove {} to begin anew",
                path.display(),
                dir.display()
            );
            return Err(Error::BadRegion { server, why });
        }
        if existed && !options.any_size && length != *wanted {
            let why = format!(
                "{wanted}; {} has {length}: leave the option out to serve that, or remove the file to begin anew",
                path.display()
            );
            return Err(Error::BadOption { option: "bytes", why });
        }
        let made = (|| {
            let reserved = if existed { files::fill_holes(&file) } else { files::reserve(&file, *wanted) };
            let bytes = if existed { length } else { *wanted };
            reserved.map_err(Error::io(format!("reserving {bytes} bytes for {}", path.display())))?;
            let region = files::map(&file, &path, server)?;
            if started.is_some_and(|started| !started.is_of(&region)) {
                let why = format!(
                    "{} is not as this memory server has left it: it is of another time or another cluster, or files were \
                     renamed or mixed; do not mix their files",
                    path.display()
                );
                return Err(Error::BadRegion { server, why });
            }
            Started::stamp(dir, server, &region)?;
            Ok(region)
        })();
        if made.is_err() && !existed {
            // Else it would keep its memory, or pass for one that was lost.
            let _ = fs::remove_file(&path);
            let _ = fs::remove_file(Started::path(dir, server));
        }
        let region = made?;
        let file = RegionFile::new(dir, server, region.bytes(), file);
        Ok(Self {
            dir: dir.clone(),
            server,
            cluster: cluster.cluster,
            regions: Arc::new(vec![region]),
            is_ephemeral: false,
            existed,
            file,
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
        self.file.path()
    }

    /// Whether the region's file is still there, as it was: to be asked now and then. Compute servers ask as well, so
    /// whoever learns here that it is not only has to end.
    ///
    /// # Errors
    /// [`Error::BadRegion`] if it was deleted, replaced, shortened, or overwritten by an earlier copy of it.
    pub fn check(&self) -> Result<(), Error> {
        match self.file.damage(self.region()) {
            None => Ok(()),
            Some(why) => {
                Err(Error::BadRegion { server: self.server, why: format!("{}: {why}", self.path().display()) })
            }
        }
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
        let acceptor = Acceptor::create(&self.dir, ListenerId::Memory(self.server), options)?;
        Ok(Box::new(MemListener::new(acceptor, self.memory(), fabric, None)))
    }
}

impl Drop for ServedRegion {
    fn drop(&mut self) {
        if self.is_ephemeral && self.file.is_in_place() {
            let _ = fs::remove_file(self.path());
            if !has_regions(&self.dir) {
                let _ = fs::remove_file(Started::path(&self.dir, self.server));
            }
            // Whoever waits to serve this region again holds the cluster.
            let _ = self.file.file().unlock();
            remove_if_last(&self.dir);
        }
    }
}

/// Whether a cluster has regions, as far as can be said.
pub(super) fn has_regions(dir: &Path) -> bool {
    fs::read_dir(dir).map_or_else(
        |error| error.kind() != ErrorKind::NotFound,
        |entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("server-")),
    )
}

/// Removes a cluster that has no memory server left, and that none is about to join.
fn remove_if_last(dir: &Path) {
    let path = dir.join("cluster");
    let Ok(cluster) = File::open(&path) else { return };
    if cluster.lock().is_err() || !files::is_still_at(&cluster, &path).unwrap_or(false) {
        return;
    }
    if !has_regions(dir) {
        // The file last: once it is gone, somebody may begin a cluster here again.
        let _ = fs::remove_dir_all(dir.join("owners"));
        let _ = fs::remove_dir_all(dir.join("connections"));
        remove_all(dir);
        let _ = fs::remove_file(path);
        let _ = fs::remove_dir(dir);
    }
}

/// Removes what killed memory servers have left: of drafts of the cluster's file only those, for others may have files there.
fn remove_all(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_draft = name.strip_prefix("cluster.").is_some_and(files::is_draft_number);
        if is_draft || ["acceptor-", "started-"].iter().any(|prefix| name.starts_with(prefix)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Opens a region's file, or makes it, and locks it. Whoever had it locked may have removed it meanwhile: then again.
fn open_locked(path: &Path, server: ServerId, dir: &Path) -> Result<File, Error> {
    let failed = || format!("opening {}", path.display());
    loop {
        let file = files::private().create(true).truncate(false).open(path);
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

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;
    use crate::{
        Fabric as _,
        buffer::Buffers,
        clock::Clock,
        connection::{PeerId, far},
        endpoint::{Request, Ticket, Verb},
        gather::{Gather, Piece},
        listener::{CONNECTION_BYTES_MIN, Change},
        lock::OwnerId,
        mem::MemFabric,
        ptr::RemotePtr,
        sync::Ordering,
    };

    /// What it sends may have been read from there: nobody takes it for a message.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_memory_server_whose_file_is_cut_sends_nothing_any_more() {
        const HEAD: u64 = 8;
        for nasty in [false, true] {
            let scratch = tempfile::tempdir().unwrap();
            let dir = scratch.path().to_path_buf();
            let options = ServeRegion { dir: dir.clone(), server: 0, servers: 1, bytes: 1 << 16, any_size: false };
            let served = ServedRegion::start(&options).unwrap();
            let fabric = MemOptions { nasty, gather_max: 2, ..MemOptions::default() };
            let listen = ListenOptions { endpoints: 1, connection_bytes: CONNECTION_BYTES_MIN };
            let listener = served.listen(&listen, fabric).unwrap();
            let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
            let mut worker = MemFabric::open(&dir, fabric).unwrap().endpoint(2, Clock::monotonic()).unwrap();
            let who = PeerId { owner: OwnerId::new(6).unwrap(), worker: 0 };
            let open = worker.connect(served.server(), who).unwrap();
            let mut changes = Vec::new();
            while changes.is_empty() {
                port.changes(true, &mut changes);
            }
            let Change::Joined { peer, .. } = changes[0] else { panic!("{changes:?}") };
            let buffers = Buffers::default();
            // Two pieces, and a word that says that they are there.
            let mut send = |word| {
                let piece = |page: u64| Piece::Region(RemotePtr::new(served.server(), page << 12).unwrap(), 8);
                let buffer = buffers.take(1, |_, _| Ok(Default::default())).unwrap();
                let gather = Verb::Gather(Box::new(Gather::new(buffer, vec![piece(2), piece(3)])));
                let at = |offset| far(peer, offset);
                port.ring(&mut vec![
                    Request { ticket: Ticket(1), at: at(64), verb: gather },
                    Request { ticket: Ticket(2), at: at(HEAD), verb: Verb::Notify(word) },
                ]);
                let mut completions = Vec::new();
                while completions.len() < 2 {
                    port.poll(&mut completions);
                }
                let outcomes = completions.into_iter().map(|completion| completion.outcome.err().map(|error| *error));
                (outcomes.collect::<Vec<_>>(), open[HEAD as usize / 8].load(Ordering::Acquire))
            };
            assert!(matches!(&send(1), (outcomes, 1) if outcomes.iter().all(Option::is_none)));
            fs::OpenOptions::new().write(true).open(served.path()).unwrap().set_len(4096).unwrap();
            let (outcomes, head) = send(2);
            let is_lost = |outcome: &Option<Error>| matches!(outcome, Some(Error::ServerLost { server, .. }) if *server == served.server());
            assert!(outcomes.iter().all(is_lost), "nasty: {nasty}: {outcomes:?}");
            assert_eq!(head, 1, "nasty: {nasty}: it said that the pieces were there");
        }
    }

    /// As `cp` makes it: pages that were never written are holes in the copy.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_copy_with_holes_has_all_of_its_memory_once_it_is_served() {
        use std::os::unix::fs::{FileExt as _, MetadataExt as _};
        let scratch = tempfile::tempdir().unwrap();
        let bytes = 1 << 20;
        let options =
            ServeRegion { dir: scratch.path().join("cluster"), server: 0, servers: 1, bytes, any_size: false };
        let path = ServedRegion::start(&options).unwrap().path().to_owned();
        assert_eq!(files::mode_of(&path), 0o600);
        let mut page = vec![0; 4096];
        let file = files::private().open(&path).unwrap();
        file.read_exact_at(&mut page, 0).unwrap();
        file.set_len(0).unwrap();
        file.write_all_at(&page, 0).unwrap();
        file.set_len(bytes).unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 < bytes, "this file system makes no holes");
        let region = ServedRegion::start(&options).unwrap();
        assert!(region.existed() && file.metadata().unwrap().blocks() * 512 >= bytes);
        let mut now = vec![0; 4096 - 8];
        file.read_exact_at(&mut now, 0).unwrap();
        assert_eq!(now, page[..4096 - 8], "only the stamp is new");
    }

    /// The name of the note's draft is two bytes too long for the system, and those of all other files are not.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_new_region_whose_start_fails_leaves_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let length = libc::PATH_MAX as usize - 1 - "/cluster.0123456789abcdef".len();
        let mut dir = scratch.path().to_str().unwrap().to_owned();
        while length - dir.len() > 250 {
            dir = format!("{dir}/{}", "d".repeat(150));
        }
        let dir = PathBuf::from(format!("{dir}/{}", "d".repeat(length - dir.len() - 1)));
        assert_eq!(dir.as_os_str().len(), length);
        let options = ServeRegion { dir: dir.clone(), server: 0, servers: 1, bytes: 1 << 16, any_size: false };
        let error = ServedRegion::start(&options).unwrap_err().to_string();
        assert!(error.contains("started-0"), "{error}");
        assert!(!has_regions(&dir) && !dir.join("started-0").exists());
    }

    /// Else the directory stays, and nobody says so.
    #[test]
    fn an_ephemeral_cluster_takes_along_what_the_killed_have_left() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("cluster");
        let options = ServeRegion { dir: dir.clone(), server: 0, servers: 1, bytes: 1 << 16, any_size: false };
        let mut region = ServedRegion::start(&options).unwrap();
        region.make_ephemeral();
        for left in ["cluster", "started-0", "acceptor-0"] {
            fs::write(dir.join(format!("{left}.0123456789abcdef")), "").unwrap();
        }
        for left in ["owners", "connections"] {
            files::make_dir(&dir.join(left)).unwrap();
            fs::write(dir.join(left).join("7"), "").unwrap();
        }
        fs::write(dir.join("cluster.log"), "somebody else's").unwrap();
        drop(region);
        let left: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["cluster.log"]);
        fs::remove_file(dir.join("cluster.log")).unwrap();
        let mut region = ServedRegion::start(&options).unwrap();
        region.make_ephemeral();
        drop(region);
        assert!(!dir.exists());
    }
}
