//! Acceptors: how a worker's endpoint and a memory server of the `mem` fabric find each other and open memory.
//!
//! A listening memory server, or compute server, has an *acceptor*, shared words with an eventcount for each endpoint. A worker that connects
//! makes the memory of the connection, both sides' in one piece, leaves it where the endpoint looks, and notifies it. In one
//! process the acceptor is kept by the fabric and connections are handed over through a list. Across processes:
//!
//! ```text
//! acceptor-N               the acceptor of memory server N, or of the compute server with incarnation I: then N is cI;
//!                          locked by the process that listens
//! connections/N.P.I.W.T    a connection to endpoint P of that acceptor, of worker W of incarnation I; locked by the worker's
//!                          process. T tells apart connections that this worker has opened one after another
//! ```
//!
//! A connection's first page says who it is and holds a word for each side that closes it; then comes the worker's memory, then
//! the memory server's. Whoever closes a connection removes its file. Liveness is the system's: a lock goes with its process.

use std::{
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use hashbrown::HashMap;

use super::{
    eventcount::Eventcount,
    files::{self, is_locked},
};
use crate::{
    connection::{ConnectionState, ListenerId, OpenMemory, PeerId},
    error::Error,
    listener::{CONNECTION_BYTES_MIN, ListenOptions, NO_THREADS},
    lock::OwnerId,
    region::Region,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock},
};

const MAGIC: u64 = u64::from_le_bytes(*b"FARACPT1");
const CONNECTION_MAGIC: u64 = u64::from_le_bytes(*b"FARCONN1");
const LINE: usize = 8;
/// Words of an acceptor before the endpoints' lines, each in a line of its own: what it is, endpoints, connection bytes, whether it is open.
const ACCEPTOR_LINES: usize = 4;
const OPEN: usize = 3 * LINE;
/// Words of a connection before both sides' memory.
const CONNECTION_HEADER: usize = 512;
const OF_OWNER: usize = 1;
const OF_WORKER: usize = 2;
const CLOSED: usize = LINE;
/// What [`CLOSED`] says once the worker has closed the connection.
const IN_ORDER: u64 = 1;
const BROKEN: u64 = 2;
const DISMISSED: usize = 2 * LINE;

/// Where the connections to an acceptor are left.
#[derive(Debug)]
enum Place {
    /// In this process: by endpoint.
    InProcess(Vec<Mutex<Vec<ConnectionMemory>>>),
    /// In the cluster's directory.
    Files { dir: PathBuf, acceptor: File },
}

/// A listener's acceptor, from either side.
#[derive(Debug)]
pub(crate) struct Acceptor {
    whose: ListenerId,
    region: Region,
    endpoints: usize,
    connection_bytes: usize,
    place: Place,
    /// Its listener has shut it: what stands at its place now may be its successor's.
    is_shut: AtomicBool,
}

/// The acceptors of one process.
pub(super) type AcceptorList = Arc<Mutex<HashMap<ListenerId, Arc<Acceptor>>>>;

/// What names of files have of a listener.
fn file_name(whose: ListenerId) -> String {
    match whose {
        ListenerId::Memory(server) => server.to_string(),
        ListenerId::Compute(owner) => format!("c{}", owner.incarnation()),
    }
}

/// It cannot be connected to.
pub(super) fn missing(whose: ListenerId, why: impl Into<String>) -> Error {
    match whose {
        ListenerId::Memory(server) => Error::ServerMissing { server, why: why.into() },
        ListenerId::Compute(peer) => Error::PeerMissing { peer, why: why.into() },
    }
}

/// Nobody takes its messages.
pub(super) fn silent(whose: ListenerId) -> Error {
    let why = match whose {
        ListenerId::Memory(_) => NO_THREADS,
        ListenerId::Compute(_) => "it does not listen, or has ended",
    };
    missing(whose, why)
}

impl Acceptor {
    fn format(region: &Region, options: &ListenOptions) {
        let words = region.words();
        words[LINE].store(options.endpoints as u64, Ordering::Relaxed);
        words[2 * LINE].store(options.connection_bytes as u64, Ordering::Relaxed);
        words[OPEN].store(1, Ordering::Relaxed);
        words[0].store(MAGIC, Ordering::Release);
    }

    fn bytes(endpoints: usize) -> usize {
        ((ACCEPTOR_LINES + 2 * endpoints) * LINE * 8).next_multiple_of(4096)
    }

    /// An acceptor inside this process.
    pub(super) fn in_process(whose: ListenerId, options: &ListenOptions) -> Result<Self, Error> {
        let region = Region::anonymous(Self::bytes(options.endpoints))?;
        Self::format(&region, options);
        let lists = (0..options.endpoints).map(|_| Mutex::new(Vec::new())).collect();
        let place = Place::InProcess(lists);
        Ok(Self::at(place, whose, region, (options.endpoints, options.connection_bytes)))
    }

    /// Makes an acceptor in the cluster's directory. Who serves the memory server's region, or has the compute server's claim, makes
    /// it, so it is alone.
    pub(crate) fn create(dir: &Path, whose: ListenerId, options: &ListenOptions) -> Result<Self, Error> {
        let path = acceptor_path(dir, whose);
        let failed = || format!("making {}", path.display());
        files::make_dir(&dir.join("connections")).map_err(Error::io(failed()))?;
        files::require_own(&dir.join("connections"))?;
        remove_connections(dir, whose);
        if let ListenerId::Compute(_) = whose {
            remove_abandoned(dir);
        }
        let draft = dir.join(format!("acceptor-{}.{:016x}", file_name(whose), rand::random::<u64>()));
        let made = Self::make(&draft, whose, dir, options);
        let acceptor =
            made.and_then(|acceptor| fs::rename(&draft, &path).map_err(Error::io(failed())).map(|()| acceptor));
        if acceptor.is_err() {
            let _ = fs::remove_file(&draft);
        }
        acceptor
    }

    fn make(draft: &Path, whose: ListenerId, dir: &Path, options: &ListenOptions) -> Result<Self, Error> {
        let failed = || format!("making {}", draft.display());
        let acceptor = files::private().create_new(true).open(draft).map_err(Error::io(failed()))?;
        files::reserve(&acceptor, Self::bytes(options.endpoints) as u64).map_err(Error::io(failed()))?;
        acceptor.lock().map_err(Error::io(failed()))?;
        let region = Region::of_file(&acceptor, draft)?;
        Self::format(&region, options);
        let place = Place::Files { dir: dir.to_path_buf(), acceptor };
        Ok(Self::at(place, whose, region, (options.endpoints, options.connection_bytes)))
    }

    /// The acceptor of a listener of the cluster in `dir`, if it listens.
    pub(super) fn open(dir: &Path, whose: ListenerId) -> Result<Self, Error> {
        let path = acceptor_path(dir, whose);
        let acceptor = match files::private().open(&path) {
            Ok(acceptor) => acceptor,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(silent(whose));
            }
            Err(error) => return Err(Error::io(format!("opening {}", path.display()))(error)),
        };
        if !is_locked(&acceptor) {
            return Err(missing(whose, "it took messages and is gone; start it again"));
        }
        let bytes = acceptor.metadata().map_err(Error::io(format!("reading the size of {}", path.display())))?.len();
        let bad = || missing(whose, format!("{} is not an acceptor", path.display()));
        if bytes < 4096 || !bytes.is_multiple_of(4096) {
            return Err(bad());
        }
        let region = Region::of_file(&acceptor, &path)?;
        let word = |index: usize| region.words()[index].load(Ordering::Acquire);
        let (endpoints, connection_bytes) = (word(LINE) as usize, word(2 * LINE) as usize);
        let options = ListenOptions { endpoints, connection_bytes };
        if word(0) != MAGIC || options.validate().is_err() || Self::bytes(endpoints) as u64 != bytes {
            return Err(bad());
        }
        let place = Place::Files { dir: dir.to_path_buf(), acceptor };
        Ok(Self::at(place, whose, region, (endpoints, connection_bytes)))
    }

    fn at(place: Place, whose: ListenerId, region: Region, (endpoints, connection_bytes): (usize, usize)) -> Self {
        Self { whose, region, endpoints, connection_bytes, place, is_shut: AtomicBool::new(false) }
    }

    pub(super) fn whose(&self) -> ListenerId {
        self.whose
    }

    pub(super) fn endpoints(&self) -> usize {
        self.endpoints
    }

    pub(super) fn eventcount(&self, endpoint: usize) -> Eventcount<'_> {
        Eventcount::new(&self.region.words()[(ACCEPTOR_LINES + 2 * endpoint) * LINE])
    }

    /// Counts what has come and gone at an endpoint, so that it need not look for it.
    pub(super) fn news(&self, endpoint: usize) -> &AtomicU64 {
        &self.region.words()[(ACCEPTOR_LINES + 2 * endpoint + 1) * LINE]
    }

    fn tell(&self, endpoint: usize) {
        self.news(endpoint).fetch_add(1, Ordering::Release);
        self.eventcount(endpoint).notify();
    }

    /// Whether the memory server still listens. Makes a system call if its word says so.
    fn is_open(&self) -> bool {
        let says = self.region.words()[OPEN].load(Ordering::Acquire) == 1;
        says && !self.region.is_lost()
            && match &self.place {
                Place::InProcess(_) => true,
                Place::Files { acceptor, .. } => is_locked(acceptor),
            }
    }

    /// No more connections: the memory server stops listening.
    pub(super) fn shut(&self) {
        if self.is_shut.swap(true, Ordering::AcqRel) {
            return;
        }
        self.region.words()[OPEN].store(0, Ordering::Release);
        match &self.place {
            Place::InProcess(lists) => lists.iter().for_each(|list| lock(list).clear()),
            Place::Files { dir, acceptor } => {
                let path = acceptor_path(dir, self.whose);
                if files::is_still_at(acceptor, &path).unwrap_or(false) {
                    let _ = fs::remove_file(path);
                    remove_connections(dir, self.whose);
                }
                let _ = acceptor.unlock();
            }
        }
    }

    /// Makes a connection and leaves it at the endpoint that is this worker's.
    pub(super) fn connect(acceptor: &Arc<Self>, who: PeerId) -> Result<WorkerEnd, Error> {
        let endpoint = (u64::from(who.owner.incarnation()) + u64::from(who.worker)) as usize % acceptor.endpoints;
        let memory = match &acceptor.place {
            Place::InProcess(lists) => {
                let memory = ConnectionMemory::anonymous(acceptor.connection_bytes, who)?;
                lock(&lists[endpoint]).push(memory.clone());
                memory
            }
            Place::Files { dir, .. } => {
                ConnectionMemory::file(dir, acceptor.whose, endpoint, acceptor.connection_bytes, who)?
            }
        };
        let end = WorkerEnd { acceptor: Arc::clone(acceptor), endpoint, memory, end: IN_ORDER };
        acceptor.tell(endpoint);
        // Else it is closed again: an endpoint may have found it.
        if acceptor.is_open() { Ok(end) } else { Err(missing(acceptor.whose, "it has just stopped to take messages")) }
    }

    /// The connections that were left at an endpoint and that `known` does not know.
    pub(super) fn arrived(&self, endpoint: usize, known: impl Fn(&Path) -> bool) -> Vec<ConnectionMemory> {
        match &self.place {
            Place::InProcess(lists) => std::mem::take(&mut *lock(&lists[endpoint])),
            Place::Files { dir, .. } => {
                let prefix = format!("{}.{endpoint}.", file_name(self.whose));
                let connections = dir.join("connections");
                let entries = match fs::read_dir(&connections) {
                    Ok(entries) => entries,
                    // The cluster is gone: whoever uses it is told that.
                    Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(),
                    Err(error) => {
                        warn_once(&Error::io(format!("reading {}", connections.display()))(error));
                        return Vec::new();
                    }
                };
                let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
                ours.map(|entry| entry.path())
                    .filter(|path| !known(path))
                    .filter_map(|path| {
                        let found = ConnectionMemory::found(path, self.connection_bytes);
                        found.unwrap_or_else(|error| {
                            warn_once(&error);
                            None
                        })
                    })
                    .collect()
            }
        }
    }
}

/// Workers whose connections are not taken up wait, and are told that this process stands still. It tries again and again, and says so once.
fn warn_once(error: &Error) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        tracing::warn!(
            "connections of workers are not taken up: {error}. If too many files are open, raise `ulimit -n` and start again"
        );
    });
}

fn acceptor_path(dir: &Path, whose: ListenerId) -> PathBuf {
    dir.join(format!("acceptor-{}", file_name(whose)))
}

/// Removes what compute servers that were killed have left.
fn remove_abandoned(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let incarnation = name.to_str().and_then(|name| name.strip_prefix("acceptor-c")?.parse().ok());
        let Some(owner) = incarnation.and_then(OwnerId::new) else { continue };
        // One that is being made has another name until it is locked.
        if files::private().open(entry.path()).is_ok_and(|file| !is_locked(&file)) {
            let _ = fs::remove_file(entry.path());
            remove_connections(dir, ListenerId::Compute(owner));
        }
    }
}

/// Removes what connections there are to one that does not listen.
fn remove_connections(dir: &Path, whose: ListenerId) {
    let prefix = format!("{}.", file_name(whose));
    for entry in fs::read_dir(dir.join("connections")).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A connection's memory: a header and both sides'.
#[derive(Debug, Clone)]
pub(super) struct ConnectionMemory {
    region: Arc<Region>,
    connection_words: usize,
    file: Option<Arc<(PathBuf, File)>>,
}

impl ConnectionMemory {
    fn bytes(connection_bytes: usize) -> usize {
        CONNECTION_HEADER * 8 + 2 * connection_bytes
    }

    fn anonymous(connection_bytes: usize, who: PeerId) -> Result<Self, Error> {
        let region = Arc::new(Region::anonymous(Self::bytes(connection_bytes))?);
        let memory = Self { region, connection_words: connection_bytes / 8, file: None };
        memory.sign(who);
        Ok(memory)
    }

    /// A locked file with its memory reserved, given its name only when it is whole.
    fn file(
        dir: &Path,
        whose: ListenerId,
        endpoint: usize,
        connection_bytes: usize,
        who: PeerId,
    ) -> Result<Self, Error> {
        static TURN: OnceLock<std::sync::atomic::AtomicU64> = OnceLock::new();
        let turn = TURN.get_or_init(Default::default).fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("{}.{endpoint}.{}.{}.{turn}", file_name(whose), who.owner.incarnation(), who.worker);
        let path = dir.join("connections").join(&name);
        let failed = || format!("making {}", path.display());
        let draft = dir.join("connections").join(format!("draft.{name}"));
        let file = files::private().create(true).truncate(true).open(&draft).map_err(Error::io(failed()))?;
        let made = (|| {
            files::reserve(&file, Self::bytes(connection_bytes) as u64).map_err(Error::io(failed()))?;
            file.lock().map_err(Error::io(failed()))?;
            let region = Arc::new(Region::of_file(&file, &draft)?);
            let file = Some(Arc::new((path.clone(), file)));
            let memory = Self { region, connection_words: connection_bytes / 8, file };
            memory.sign(who);
            fs::rename(&draft, &path).map_err(Error::io(failed()))?;
            Ok(memory)
        })();
        if made.is_err() {
            let _ = fs::remove_file(&draft);
        }
        made
    }

    /// The connection that a worker has left in this file; none if it is not one, or nobody holds it any more.
    fn found(path: PathBuf, connection_bytes: usize) -> Result<Option<Self>, Error> {
        let file = match files::private().open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(Error::io(format!("opening {}", path.display())))?,
        };
        let whole = file.metadata().is_ok_and(|metadata| metadata.len() == Self::bytes(connection_bytes) as u64);
        if !is_locked(&file) || !whole {
            let _ = fs::remove_file(&path);
            return Ok(None);
        }
        let region = Arc::new(Region::of_file(&file, &path)?);
        let memory = Self { region, connection_words: connection_bytes / 8, file: Some(Arc::new((path, file))) };
        if memory.who().is_none() {
            memory.remove_file();
            return Ok(None);
        }
        Ok(Some(memory))
    }

    fn sign(&self, who: PeerId) {
        let words = self.region.words();
        words[OF_OWNER].store(u64::from(who.owner.incarnation()), Ordering::Relaxed);
        words[OF_WORKER].store(u64::from(who.worker), Ordering::Relaxed);
        words[0].store(CONNECTION_MAGIC, Ordering::Release);
    }

    pub(super) fn who(&self) -> Option<PeerId> {
        let word = |index: usize| self.region.words()[index].load(Ordering::Acquire);
        let is_connection = word(0) == CONNECTION_MAGIC;
        let owner = OwnerId::new(word(OF_OWNER)).filter(|_| is_connection)?;
        Some(PeerId { owner, worker: u32::try_from(word(OF_WORKER)).ok()? })
    }

    /// What stands at its place may be a connection of the next cluster.
    fn remove_file(&self) {
        if let Some((path, file)) = self.file.as_deref()
            && files::is_still_at(file, path).unwrap_or(false)
        {
            let _ = fs::remove_file(path);
        }
    }

    pub(super) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|file| file.0.as_path())
    }

    fn workers_memory(&self) -> OpenMemory {
        OpenMemory::new(Arc::clone(&self.region), CONNECTION_HEADER..CONNECTION_HEADER + self.connection_words)
    }

    fn servers_memory(&self) -> OpenMemory {
        let first = CONNECTION_HEADER + self.connection_words;
        OpenMemory::new(Arc::clone(&self.region), first..first + self.connection_words)
    }

    fn flag(&self, word: usize) -> &AtomicU64 {
        &self.region.words()[word]
    }
}

/// A connection as its worker holds it. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct WorkerEnd {
    acceptor: Arc<Acceptor>,
    endpoint: usize,
    memory: ConnectionMemory,
    /// What the memory server is told when it is closed.
    end: u64,
}

impl WorkerEnd {
    pub(super) fn own(&self) -> OpenMemory {
        self.memory.workers_memory()
    }

    pub(super) fn far(&self) -> Far {
        Far { memory: self.memory.servers_memory(), eventcount: Some((Arc::clone(&self.acceptor), self.endpoint)) }
    }

    /// Closes the connection as one that broke: its worker comes again for what it has asked for.
    pub(super) fn abandon(mut self) {
        self.end = BROKEN;
    }

    pub(super) fn state(&self) -> ConnectionState {
        if !self.acceptor.is_open() {
            ConnectionState::Dead
        } else if self.memory.flag(DISMISSED).load(Ordering::Acquire) != 0 || self.memory.region.is_lost() {
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
        self.acceptor.tell(self.endpoint);
    }
}

/// A connection as the memory server's endpoint holds it. Dropping it dismisses the worker.
#[derive(Debug)]
pub(super) struct ServerEnd(ConnectionMemory);

impl ServerEnd {
    pub(super) fn new(memory: ConnectionMemory) -> Self {
        Self(memory)
    }

    pub(super) fn own(&self) -> OpenMemory {
        self.0.servers_memory()
    }

    pub(super) fn far(&self) -> Far {
        Far { memory: self.0.workers_memory(), eventcount: None }
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

    /// Whether it is of no use any more though the worker has not closed it, and then whether its process is gone. A system call.
    pub(super) fn is_lost(&self) -> Option<bool> {
        if self.0.region.is_lost() {
            return Some(false);
        }
        let is_abandoned = self.0.file.as_ref().is_some_and(|file| !is_locked(&file.1));
        // It may have closed it just now, and lets the lock go after that. A file that was cut says nothing, which shows once it is read.
        is_abandoned.then(|| self.closed_in_order().unwrap_or_else(|| !self.0.region.is_lost()))
    }
}

impl Drop for ServerEnd {
    fn drop(&mut self) {
        self.0.flag(DISMISSED).store(1, Ordering::Release);
        self.0.remove_file();
    }
}

/// The other side's memory of a connection, and the eventcount that is rung there.
#[derive(Debug, Clone)]
pub(super) struct Far {
    pub(super) memory: OpenMemory,
    pub(super) eventcount: Option<(Arc<Acceptor>, usize)>,
}

const _: () = assert!(CONNECTION_BYTES_MIN.is_multiple_of(4096));

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::ptr::ServerId;

    /// An endpoint that takes it in finds it closed.
    #[test]
    fn who_comes_as_a_listener_ends_leaves_nobody_behind() {
        let whose = ListenerId::Memory(ServerId::new(0).unwrap());
        let acceptor = Arc::new(Acceptor::in_process(whose, &ListenOptions::default()).unwrap());
        acceptor.shut();
        let refused = Acceptor::connect(&acceptor, PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 });
        assert!(refused.is_err());
        let arrived = acceptor.arrived(0, |_| false).into_iter().map(|memory| ServerEnd::new(memory).closed_in_order());
        assert_eq!(arrived.collect::<Vec<_>>(), [Some(true)]);
    }

    #[cfg(not(miri))]
    #[test]
    fn a_listener_that_ends_late_leaves_its_successor_alone() {
        let dir = tempfile::tempdir().unwrap();
        let whose = ListenerId::Memory(ServerId::new(0).unwrap());
        let create = || Acceptor::create(dir.path(), whose, &ListenOptions::default()).unwrap();
        let connect = || {
            let acceptor = Arc::new(Acceptor::open(dir.path(), whose).unwrap());
            Acceptor::connect(&acceptor, PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 }).unwrap()
        };
        let is_there = |end: &WorkerEnd| end.memory.path().unwrap().exists();
        let first = create();
        let second = create();
        let connection = connect();
        first.shut();
        assert!(is_there(&connection));
        assert_eq!(connection.state(), ConnectionState::Up);
        second.shut();
        assert!(!is_there(&connection));
        let _third = create();
        let connection = connect();
        second.shut();
        assert!(is_there(&connection));
    }

    #[cfg(not(miri))]
    #[test]
    fn a_worker_that_closes_its_connection_says_itself_whether_it_comes_again() {
        let dir = tempfile::tempdir().unwrap();
        let (_acceptor, connect) = files(dir.path());
        for (end, in_order) in [(BROKEN, false), (IN_ORDER, true)] {
            let (mut worker, served) = connect();
            assert_eq!((served.closed_in_order(), served.is_lost()), (None, None));
            worker.end = end;
            drop(worker);
            // Its lock, too, is gone by now.
            assert_eq!(served.is_lost(), Some(in_order));
        }
        let (worker, served) = connect();
        worker.memory.file.as_ref().unwrap().1.unlock().unwrap();
        assert_eq!(served.is_lost(), Some(true), "without a word");
    }

    /// Both sides are there, and the worker connects again.
    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_connection_whose_file_is_cut_is_lost_and_nobody_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (_acceptor, connect) = files(dir.path());
        let (worker, served) = connect();
        worker.memory.file.as_ref().unwrap().1.set_len(0).unwrap();
        // At first it has not touched it.
        assert_eq!([(); 2].map(|()| worker.state()), [ConnectionState::Dismissed; 2]);
        assert_eq!((served.closed_in_order(), served.is_lost()), (None, Some(false)));
    }

    /// A listener in this directory, and what connects to it.
    #[cfg(not(miri))]
    fn files(dir: &Path) -> (Arc<Acceptor>, impl Fn() -> (WorkerEnd, ServerEnd)) {
        let whose = ListenerId::Memory(ServerId::new(0).unwrap());
        let acceptor = Arc::new(Acceptor::create(dir, whose, &ListenOptions::default()).unwrap());
        let theirs = Arc::new(Acceptor::open(dir, whose).unwrap());
        let connect = move || {
            let who = PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 };
            let worker = Acceptor::connect(&theirs, who).unwrap();
            let path = worker.memory.path().unwrap().to_owned();
            let found = ConnectionMemory::found(path, theirs.connection_bytes).unwrap().unwrap();
            (worker, ServerEnd::new(found))
        };
        (acceptor, connect)
    }

    /// Both count their connections from 0, so names come again.
    #[cfg(not(miri))]
    #[test]
    fn a_connection_that_ends_late_leaves_that_of_the_next_cluster_alone() {
        let dir = tempfile::tempdir().unwrap();
        let whose = ListenerId::Memory(ServerId::new(0).unwrap());
        let _acceptor = Acceptor::create(dir.path(), whose, &ListenOptions::default()).unwrap();
        let acceptor = Arc::new(Acceptor::open(dir.path(), whose).unwrap());
        let first = Acceptor::connect(&acceptor, PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 }).unwrap();
        let path = first.memory.path().unwrap().to_owned();
        let found = ConnectionMemory::found(path.clone(), acceptor.connection_bytes).unwrap().unwrap();
        let served = ServerEnd::new(found);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another one").unwrap();
        drop(first);
        drop(served);
        assert!(path.exists());
    }
}
