//! A memory server of the `verbs` fabric: registered memory, and control connections.
//!
//! A thread accepts connections. Each gets a thread of its own, which has it prove that it knows the secret, and then
//! answers it until it ends. Before that proof a connection is cheap and short: there are few at a time, and each has
//! little time. What a connection holds (queue pairs, claims) is dropped with it.
//!
//! If it takes messages, control connections make message connections (`acceptor`), and the threads that serve those have
//! an endpoint each (`endpoint`). A compute server that listens does the same, without a region (`peer`).

mod acceptor;
mod endpoint;
mod owners;
mod peer;
mod serving;

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::fd::AsRawFd,
    thread::JoinHandle,
};

pub(super) use self::peer::PeerListener;
use self::{acceptor::Acceptor, endpoint::VerbsListener, serving::Serving};
use super::{
    DeviceChoice, Reliability, Secret, device_fails,
    ib::{Access, Domain, Registered},
};
use crate::{
    connection::ListenerId,
    error::Error,
    listener::{self, ListenOptions},
    memory::LocalMemory,
    ptr::{REGION_BYTES_MAX, SERVERS_MAX, ServerId},
    region::Region,
    sync::{Arc, AtomicU64, Mutex, lock},
};

/// The TCP port of control connections, unless another is named.
pub const DEFAULT_PORT: u16 = 7471;

/// What a memory server serves, and how.
#[derive(Debug, Clone)]
pub struct VerbsServeOptions {
    /// The number of this memory server, from 0.
    pub server: usize,
    /// How many memory servers the cluster has.
    pub servers: usize,
    /// Bytes to serve, a multiple of 4096. They are locked in memory.
    pub bytes: u64,
    /// The cluster's secret; it also decides the cluster's id.
    pub secret: Secret,
    /// Where control connections are accepted. With port 0 the system chooses one.
    pub listen: SocketAddr,
    /// This machine's device.
    pub device: DeviceChoice,
    /// When a connection that does not answer is taken for dead.
    pub reliability: Reliability,
    /// Whether WRITEs of one queue pair are placed in the order of their posting, as on a plain network. One with adaptive routing takes their
    /// packets over several ways, and cards may then place a later WRITE first: say false. What has to come in order then waits for what it
    /// follows. Compute servers hear of it when they connect, and do the same.
    pub ordered: bool,
}

impl VerbsServeOptions {
    /// The only memory server of its cluster, on the loopback interface, with the defaults for all else.
    pub fn new(secret: Secret) -> Self {
        Self {
            server: 0,
            servers: 1,
            bytes: 1 << 30,
            secret,
            listen: (Ipv4Addr::LOCALHOST, DEFAULT_PORT).into(),
            device: DeviceChoice::default(),
            reliability: Reliability::default(),
            ordered: true,
        }
    }
}

/// A running memory server. Dropping it ends all connections; the memory goes with it.
#[derive(Debug)]
pub struct VerbsServer {
    accepting: Accepting,
}

/// What accepts control connections until it is dropped.
#[derive(Debug)]
struct Accepting {
    serving: Arc<Serving>,
    address: SocketAddr,
    listener: TcpListener,
    thread: Option<JoinHandle<()>>,
}

/// A memory server's place in its cluster, and the size of its region; of a compute server, 0.
#[derive(Debug, Clone, Copy)]
struct Place {
    whose: ListenerId,
    servers: usize,
    cluster: u64,
    bytes: u64,
}

impl Place {
    fn of(options: &VerbsServeOptions) -> Result<Self, Error> {
        let VerbsServeOptions { servers, bytes, .. } = *options;
        let bad = |option, why| Err(Error::BadOption { option, why });
        if !(1..=SERVERS_MAX).contains(&servers) {
            return bad("servers", format!("{servers} memory servers; there must be 1 to {SERVERS_MAX}"));
        }
        let server = u16::try_from(options.server).ok().and_then(ServerId::new);
        let Some(server) = server.filter(|server| server.index() < servers) else {
            return bad("server", format!("{} is not below the number of servers, {servers}", options.server));
        };
        if bytes == 0 || bytes > REGION_BYTES_MAX || !bytes.is_multiple_of(4096) {
            return bad("bytes", format!("{bytes}; a region has up to {REGION_BYTES_MAX} bytes, in multiples of 4096"));
        }
        Ok(Self { whose: ListenerId::Memory(server), servers, cluster: options.secret.cluster(), bytes })
    }
}

/// A region, and what lets the card at it.
#[derive(Debug)]
struct Memory {
    // Before the region: the memory goes after its registration.
    registered: Mutex<Option<Registered>>,
    /// One; of a compute server, none.
    regions: Arc<Vec<Region>>,
    address: u64,
    key: u32,
}

impl VerbsServer {
    /// Reserves the memory, zeroed, has it formatted, registers it, and accepts connections. Blocks while the system locks
    /// the memory.
    ///
    /// # Errors
    /// If there is no such device, it has no atomics, the numbers cannot work, or memory or address cannot be had.
    pub fn start(options: &VerbsServeOptions, format: impl FnOnce(&[AtomicU64])) -> Result<Self, Error> {
        options.reliability.validate()?;
        let place = Place::of(options)?;
        let (device, local) = options.device.open()?;
        // First what others may have taken.
        let listening = || Error::io(format!("listening on {}", options.listen));
        let listener = TcpListener::bind(options.listen).map_err(listening())?;
        let domain = Domain::new(&device)?;
        let memory = Memory::new(&domain, place.bytes, format)?;
        let common = (&options.secret, options.reliability, options.ordered);
        let serving = Serving::new(common, place, domain, local, memory)?;
        let accepting = Accepting::start(serving, listener)?;
        tracing::info!(server = %place.whose, address = %accepting.address, bytes = place.bytes, "memory server started");
        Ok(Self { accepting })
    }

    /// Where it accepts control connections.
    pub fn address(&self) -> SocketAddr {
        self.accepting.address
    }

    /// The name of its device.
    pub fn device(&self) -> &str {
        &self.accepting.serving.device().name
    }

    /// Whether its device works, as far as the system has said: to be asked now and then. Compute servers find that it does not when they
    /// reach nothing any more, so whoever learns it here has only to end.
    ///
    /// # Errors
    /// [`Error::ServerLost`] if it does not.
    pub fn check(&self) -> Result<(), Error> {
        let Serving { place, .. } = &*self.accepting.serving;
        match (self.accepting.serving.open_device().failure(), place.whose) {
            (Some(failure), ListenerId::Memory(server)) => {
                Err(Error::ServerLost { server, address: self.address().to_string(), why: device_fails(failure) })
            }
            _ => Ok(()),
        }
    }

    /// How many compute servers are connected.
    pub fn connected(&self) -> usize {
        self.accepting.serving.connected()
    }

    /// How many queue pairs they have here.
    pub fn queue_pairs(&self) -> usize {
        self.accepting.serving.queue_pairs()
    }

    /// Opens it to messages, until the listener is dropped.
    ///
    /// # Errors
    /// If it listens already, an option cannot work, or the device refuses.
    pub fn listen(&self, options: &ListenOptions) -> Result<Box<dyn listener::Listener>, Error> {
        self.accepting.listen(options)
    }

    /// Its memory, for threads of this process. Those change no word that compute servers change by atomics, unless the
    /// fabric says that its atomics are [atomic against the CPU](crate::Capabilities::atomic_against_cpu): else they
    /// go through the fabric, like everybody.
    pub fn memory(&self) -> LocalMemory {
        self.accepting.serving.memory()
    }

    /// The words of the region, for whoever plays another side in the same process and for tests that damage memory.
    #[doc(hidden)]
    pub fn raw_words(&self) -> &[AtomicU64] {
        self.accepting.serving.words()
    }

    /// Takes the memory from the card: every access fails from now on. For tests.
    #[doc(hidden)]
    pub fn withdraw_memory(&self) {
        self.accepting.serving.withdraw_memory();
    }

    /// Destroys all queue pairs and keeps the control connections, as if cables had been pulled. For tests.
    #[doc(hidden)]
    pub fn break_connections(&self) {
        self.accepting.serving.break_connections();
    }
}

impl Accepting {
    fn start(serving: Serving, listener: TcpListener) -> Result<Self, Error> {
        let failed = || Error::io("listening for control connections");
        let address = listener.local_addr().map_err(failed())?;
        let serving = Arc::new(serving);
        let (accepting, of_thread) = (listener.try_clone().map_err(failed())?, Arc::clone(&serving));
        let thread = std::thread::Builder::new()
            .name("farlink-accept".into())
            .spawn(move || serving::accept_all(&of_thread, &accepting))
            .map_err(Error::io("starting the thread that accepts connections"))?;
        Ok(Self { serving, address, listener, thread: Some(thread) })
    }

    /// Opens it to messages.
    fn listen(&self, options: &ListenOptions) -> Result<Box<dyn listener::Listener>, Error> {
        options.validate()?;
        let mut hangs = lock(&self.serving.acceptor);
        if hangs.is_some() {
            let why = format!("{} listens already", self.serving.place.whose);
            return Err(Error::BadOption { option: "server", why });
        }
        let serving = &self.serving;
        let acceptor = Acceptor::new(serving.open_device(), &serving.memory(), serving.ordered, options)?;
        *hangs = Some(Arc::clone(&acceptor));
        Ok(Box::new(VerbsListener::new(&self.serving, acceptor)))
    }
}

impl Drop for Accepting {
    fn drop(&mut self) {
        self.serving.stop();
        // SAFETY: the descriptor is open. This ends the `accept` that the thread waits in.
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        tracing::info!(server = %self.serving.place.whose, "takes no more control connections");
    }
}

impl Memory {
    fn none() -> Self {
        Self { registered: Mutex::default(), regions: Arc::default(), address: 0, key: 0 }
    }

    fn new(domain: &Arc<Domain>, bytes: u64, format: impl FnOnce(&[AtomicU64])) -> Result<Self, Error> {
        let region = Region::anonymous(bytes as usize)?;
        region.prefer_huge_pages();
        format(region.words());
        let regions = Arc::new(vec![region]);
        let words = regions[0].words();
        let base = std::ptr::NonNull::from(words).cast::<u64>();
        // SAFETY: the region lives as long as the registration (in this order they are dropped), and this process reaches
        // it only as atomic words.
        let registered = unsafe { domain.register(base, words.len(), Access::Peers) }?;
        let (address, key) = (registered.address(), registered.remote_key());
        Ok(Self { registered: Mutex::new(Some(registered)), regions, address, key })
    }
}
