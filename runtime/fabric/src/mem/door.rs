//! Doors: how a worker's endpoint and a memory server of the `mem` fabric find each other and open memory.
//!
//! A listening memory server has a *door*, shared words with a bell for each port. A worker that connects makes the
//! memory of the link, both sides' in one piece, leaves it where the port looks, and rings. In one process the door is
//! kept by the fabric and links are handed over through a list. Across processes:
//!
//! ```text
//! door-N                    the door of memory server N; locked by the process that listens
//! links/N.P.I.W.T           a link to port P of server N, of worker W of incarnation I; locked by the worker's process.
//!                           T tells apart links that this worker has opened one after another
//! ```
//!
//! A link's first page says who it is and holds a word for each side that closes it; then comes the worker's memory, then
//! the memory server's. Whoever closes a link removes its file. Liveness is the system's: a lock goes with its process.

use std::{
    fs::{self, File, OpenOptions},
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use super::{bell::Bell, claims::is_locked, files};
use crate::{
    connection::{ConnectionState, OpenMemory, PeerId},
    error::Error,
    listener::{CONNECTION_BYTES_MIN, ListenOptions},
    lock::OwnerId,
    ptr::ServerId,
    region::Region,
    sync::{Arc, AtomicU64, Mutex, Ordering, lock},
};

const MAGIC: u64 = u64::from_le_bytes(*b"FARDOOR1");
const LINK_MAGIC: u64 = u64::from_le_bytes(*b"FARLINK1");
const LINE: usize = 8;
/// Words of a door before the ports' lines, each in a line of its own: what it is, ports, link bytes, whether it is open.
const DOOR_LINES: usize = 4;
const OPEN: usize = 3 * LINE;
/// Words of a link before both sides' memory.
const LINK_HEADER: usize = 512;
const OF_OWNER: usize = 1;
const OF_WORKER: usize = 2;
const CLOSED: usize = LINE;
/// What [`CLOSED`] says once the worker has closed the link.
const IN_ORDER: u64 = 1;
const BROKEN: u64 = 2;
const DISMISSED: usize = 2 * LINE;

/// Where the links to a door are left.
#[derive(Debug)]
enum Place {
    /// In this process: by port.
    InProcess(Vec<Mutex<Vec<LinkMemory>>>),
    /// In the cluster's directory.
    Files { dir: PathBuf, door: File },
}

/// A memory server's door, from either side.
#[derive(Debug)]
pub(crate) struct Door {
    server: ServerId,
    region: Region,
    ports: usize,
    connection_bytes: usize,
    place: Place,
}

/// The doors of the memory servers of one process.
pub(super) type Doors = Arc<Mutex<Vec<Option<Arc<Door>>>>>;

impl Door {
    fn format(region: &Region, options: &ListenOptions) {
        let words = region.words();
        words[LINE].store(options.ports as u64, Ordering::Relaxed);
        words[2 * LINE].store(options.connection_bytes as u64, Ordering::Relaxed);
        words[OPEN].store(1, Ordering::Relaxed);
        words[0].store(MAGIC, Ordering::Release);
    }

    fn bytes(ports: usize) -> usize {
        ((DOOR_LINES + 2 * ports) * LINE * 8).next_multiple_of(4096)
    }

    /// A door inside this process.
    pub(super) fn in_process(server: ServerId, options: &ListenOptions) -> Result<Self, Error> {
        let region = Region::anonymous(Self::bytes(options.ports))?;
        Self::format(&region, options);
        let lists = (0..options.ports).map(|_| Mutex::new(Vec::new())).collect();
        let place = Place::InProcess(lists);
        Ok(Self { server, region, ports: options.ports, connection_bytes: options.connection_bytes, place })
    }

    /// Makes the door of a memory server in the cluster's directory. Who serves its region makes it, so it is alone.
    pub(crate) fn create(dir: &Path, server: ServerId, options: &ListenOptions) -> Result<Self, Error> {
        let path = door_path(dir, server);
        let failed = || format!("making {}", path.display());
        fs::create_dir_all(dir.join("links")).map_err(Error::io(failed()))?;
        remove_links(dir, server);
        let draft = dir.join(format!("door-{server}.{:016x}", rand::random::<u64>()));
        let made = Self::make(&draft, server, dir, options);
        let door = made.and_then(|door| fs::rename(&draft, &path).map_err(Error::io(failed())).map(|()| door));
        if door.is_err() {
            let _ = fs::remove_file(&draft);
        }
        door
    }

    fn make(draft: &Path, server: ServerId, dir: &Path, options: &ListenOptions) -> Result<Self, Error> {
        let failed = || format!("making {}", draft.display());
        let mut open = OpenOptions::new();
        let door = open.read(true).write(true).create_new(true).open(draft).map_err(Error::io(failed()))?;
        files::reserve(&door, Self::bytes(options.ports) as u64).map_err(Error::io(failed()))?;
        door.lock().map_err(Error::io(failed()))?;
        let region = Region::of_file(&door, draft)?;
        Self::format(&region, options);
        let place = Place::Files { dir: dir.to_path_buf(), door };
        Ok(Self { server, region, ports: options.ports, connection_bytes: options.connection_bytes, place })
    }

    /// The door of a memory server of the cluster in `dir`, if it listens.
    pub(super) fn open(dir: &Path, server: ServerId) -> Result<Self, Error> {
        let missing = |why: String| Error::ServerMissing { server, why };
        let path = door_path(dir, server);
        let door = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(door) => door,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(missing("it takes no messages; start one that does".into()));
            }
            Err(error) => return Err(Error::io(format!("opening {}", path.display()))(error)),
        };
        if !is_locked(&door) {
            return Err(missing("it took messages and is gone; start it again".into()));
        }
        let bytes = door.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
        let bad = || missing(format!("{} is not the door of a memory server", path.display()));
        if bytes < 4096 || !bytes.is_multiple_of(4096) {
            return Err(bad());
        }
        let region = Region::of_file(&door, &path)?;
        let word = |index: usize| region.words()[index].load(Ordering::Acquire);
        let (ports, connection_bytes) = (word(LINE) as usize, word(2 * LINE) as usize);
        let options = ListenOptions { ports, connection_bytes };
        if word(0) != MAGIC || options.validate().is_err() || Self::bytes(ports) as u64 != bytes {
            return Err(bad());
        }
        let place = Place::Files { dir: dir.to_path_buf(), door };
        Ok(Self { server, region, ports, connection_bytes, place })
    }

    pub(super) fn server(&self) -> ServerId {
        self.server
    }

    pub(super) fn ports(&self) -> usize {
        self.ports
    }

    pub(super) fn bell(&self, port: usize) -> Bell<'_> {
        Bell::new(&self.region.words()[(DOOR_LINES + 2 * port) * LINE])
    }

    /// Counts what has come and gone at a port, so that it need not look for it.
    pub(super) fn news(&self, port: usize) -> &AtomicU64 {
        &self.region.words()[(DOOR_LINES + 2 * port + 1) * LINE]
    }

    fn tell(&self, port: usize) {
        self.news(port).fetch_add(1, Ordering::Release);
        self.bell(port).ring();
    }

    /// Whether the memory server still listens. Makes a system call if its word says so.
    fn is_open(&self) -> bool {
        let says = self.region.words()[OPEN].load(Ordering::Acquire) == 1;
        says && match &self.place {
            Place::InProcess(_) => true,
            Place::Files { door, .. } => is_locked(door),
        }
    }

    /// No more links: the memory server stops listening.
    pub(super) fn shut(&self) {
        self.region.words()[OPEN].store(0, Ordering::Release);
        match &self.place {
            Place::InProcess(lists) => lists.iter().for_each(|list| lock(list).clear()),
            Place::Files { dir, door } => {
                let path = door_path(dir, self.server);
                if files::is_still_at(door, &path).unwrap_or(false) {
                    let _ = fs::remove_file(path);
                }
                remove_links(dir, self.server);
                let _ = door.unlock();
            }
        }
    }

    /// Makes a link and leaves it at the port that is this worker's.
    pub(super) fn connect(door: &Arc<Self>, who: PeerId) -> Result<WorkerEnd, Error> {
        let port = (u64::from(who.owner.incarnation()) + u64::from(who.worker)) as usize % door.ports;
        let memory = match &door.place {
            Place::InProcess(lists) => {
                let memory = LinkMemory::anonymous(door.connection_bytes, who)?;
                lock(&lists[port]).push(memory.clone());
                memory
            }
            Place::Files { dir, .. } => LinkMemory::file(dir, door.server, port, door.connection_bytes, who)?,
        };
        door.tell(port);
        if !door.is_open() {
            memory.remove_file();
            return Err(Error::ServerMissing {
                server: door.server,
                why: "it has just stopped to take messages".into(),
            });
        }
        Ok(WorkerEnd { door: Arc::clone(door), port, memory, end: IN_ORDER })
    }

    /// The links that were left at a port and that `known` does not know.
    pub(super) fn arrived(&self, port: usize, known: impl Fn(&Path) -> bool) -> Vec<LinkMemory> {
        match &self.place {
            Place::InProcess(lists) => std::mem::take(&mut *lock(&lists[port])),
            Place::Files { dir, .. } => {
                let prefix = format!("{}.{port}.", self.server);
                let Ok(entries) = fs::read_dir(dir.join("links")) else { return Vec::new() };
                let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
                ours.map(|entry| entry.path())
                    .filter(|path| !known(path))
                    .filter_map(|path| LinkMemory::found(path, self.connection_bytes))
                    .collect()
            }
        }
    }
}

fn door_path(dir: &Path, server: ServerId) -> PathBuf {
    dir.join(format!("door-{server}"))
}

/// Removes what links there are to a memory server that does not listen.
fn remove_links(dir: &Path, server: ServerId) {
    let prefix = format!("{server}.");
    for entry in fs::read_dir(dir.join("links")).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A link's memory: a header and both sides'.
#[derive(Debug, Clone)]
pub(super) struct LinkMemory {
    region: Arc<Region>,
    link_words: usize,
    file: Option<Arc<(PathBuf, File)>>,
}

impl LinkMemory {
    fn bytes(connection_bytes: usize) -> usize {
        LINK_HEADER * 8 + 2 * connection_bytes
    }

    fn anonymous(connection_bytes: usize, who: PeerId) -> Result<Self, Error> {
        let region = Arc::new(Region::anonymous(Self::bytes(connection_bytes))?);
        let memory = Self { region, link_words: connection_bytes / 8, file: None };
        memory.sign(who);
        Ok(memory)
    }

    /// A locked file with its memory reserved, given its name only when it is whole.
    fn file(dir: &Path, server: ServerId, port: usize, connection_bytes: usize, who: PeerId) -> Result<Self, Error> {
        static TURN: OnceLock<std::sync::atomic::AtomicU64> = OnceLock::new();
        let turn = TURN.get_or_init(Default::default).fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("{server}.{port}.{}.{}.{turn}", who.owner.incarnation(), who.worker);
        let path = dir.join("links").join(&name);
        let failed = || format!("making {}", path.display());
        let draft = dir.join("links").join(format!("draft.{name}"));
        let mut open = OpenOptions::new();
        let file = open.read(true).write(true).create(true).truncate(true).open(&draft).map_err(Error::io(failed()))?;
        let made = (|| {
            files::reserve(&file, Self::bytes(connection_bytes) as u64).map_err(Error::io(failed()))?;
            file.lock().map_err(Error::io(failed()))?;
            let region = Arc::new(Region::of_file(&file, &draft)?);
            let file = Some(Arc::new((path.clone(), file)));
            let memory = Self { region, link_words: connection_bytes / 8, file };
            memory.sign(who);
            fs::rename(&draft, &path).map_err(Error::io(failed()))?;
            Ok(memory)
        })();
        if made.is_err() {
            let _ = fs::remove_file(&draft);
        }
        made
    }

    /// The link that a worker has left in this file; none if it is not one, or nobody holds it any more.
    fn found(path: PathBuf, connection_bytes: usize) -> Option<Self> {
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        let whole = file.metadata().is_ok_and(|metadata| metadata.len() == Self::bytes(connection_bytes) as u64);
        if !is_locked(&file) || !whole {
            let _ = fs::remove_file(&path);
            return None;
        }
        let region = Arc::new(Region::of_file(&file, &path).ok()?);
        let memory = Self { region, link_words: connection_bytes / 8, file: Some(Arc::new((path, file))) };
        if memory.who().is_none() {
            memory.remove_file();
            return None;
        }
        Some(memory)
    }

    fn sign(&self, who: PeerId) {
        let words = self.region.words();
        words[OF_OWNER].store(u64::from(who.owner.incarnation()), Ordering::Relaxed);
        words[OF_WORKER].store(u64::from(who.worker), Ordering::Relaxed);
        words[0].store(LINK_MAGIC, Ordering::Release);
    }

    pub(super) fn who(&self) -> Option<PeerId> {
        let word = |index: usize| self.region.words()[index].load(Ordering::Acquire);
        let is_link = word(0) == LINK_MAGIC;
        let owner = OwnerId::new(word(OF_OWNER)).filter(|_| is_link)?;
        Some(PeerId { owner, worker: u32::try_from(word(OF_WORKER)).ok()? })
    }

    fn remove_file(&self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(&file.0);
        }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.0.as_path())
    }

    fn workers_memory(&self) -> OpenMemory {
        OpenMemory::new(Arc::clone(&self.region), LINK_HEADER..LINK_HEADER + self.link_words)
    }

    fn servers_memory(&self) -> OpenMemory {
        let first = LINK_HEADER + self.link_words;
        OpenMemory::new(Arc::clone(&self.region), first..first + self.link_words)
    }

    fn flag(&self, word: usize) -> &AtomicU64 {
        &self.region.words()[word]
    }
}

/// A link as its worker holds it. Dropping it closes the link.
#[derive(Debug)]
pub(super) struct WorkerEnd {
    door: Arc<Door>,
    port: usize,
    memory: LinkMemory,
    /// What the memory server is told when it is closed.
    end: u64,
}

impl WorkerEnd {
    pub(super) fn own(&self) -> OpenMemory {
        self.memory.workers_memory()
    }

    pub(super) fn far(&self) -> Far {
        Far { memory: self.memory.servers_memory(), bell: Some((Arc::clone(&self.door), self.port)) }
    }

    /// Closes the link as one that broke: its worker comes again for what it has asked for.
    pub(super) fn abandon(mut self) {
        self.end = BROKEN;
    }

    pub(super) fn state(&self) -> ConnectionState {
        if !self.door.is_open() {
            ConnectionState::Dead
        } else if self.memory.flag(DISMISSED).load(Ordering::Acquire) != 0 {
            ConnectionState::Dismissed
        } else {
            ConnectionState::Up
        }
    }
}

impl Drop for WorkerEnd {
    fn drop(&mut self) {
        self.memory.flag(CLOSED).store(self.end, Ordering::Release);
        self.memory.remove_file();
        self.door.tell(self.port);
    }
}

/// A link as the memory server's port holds it. Dropping it dismisses the worker.
#[derive(Debug)]
pub(super) struct ServerEnd(LinkMemory);

impl ServerEnd {
    pub(super) fn new(memory: LinkMemory) -> Self {
        Self(memory)
    }

    pub(super) fn own(&self) -> OpenMemory {
        self.0.servers_memory()
    }

    pub(super) fn far(&self) -> Far {
        Far { memory: self.0.workers_memory(), bell: None }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        self.0.path()
    }

    /// Whether the worker has closed it, and then whether it has no use for it any more.
    pub(super) fn closed_in_order(&self) -> Option<bool> {
        match self.0.flag(CLOSED).load(Ordering::Acquire) {
            0 => None,
            end => Some(end == IN_ORDER),
        }
    }

    /// Whether the worker's process is gone. A system call.
    pub(super) fn is_abandoned(&self) -> bool {
        self.0.file.as_ref().is_some_and(|file| !is_locked(&file.1))
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        self.0.flag(DISMISSED).store(1, Ordering::Release);
        self.0.remove_file();
    }
}

/// The other side's memory of a link, and the bell that is rung there.
#[derive(Debug, Clone)]
pub(super) struct Far {
    pub(super) memory: OpenMemory,
    pub(super) bell: Option<(Arc<Door>, usize)>,
}

const _: () = assert!(CONNECTION_BYTES_MIN.is_multiple_of(4096));
