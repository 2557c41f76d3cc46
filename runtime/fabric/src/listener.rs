//! A listener's side of connections: where workers come in, and the endpoint of each thread that serves them. Memory servers listen,
//! and compute servers may.

use std::{fmt, time::Duration};

use crate::{
    clock::Clock,
    connection::{ListenerId, OpenMemory, PeerId},
    endpoint::Endpoint,
    error::Error,
    memory::LocalMemory,
    ptr::{FAR_BYTES, ServerId},
};

/// Why a memory server without threads takes no messages, or one whose threads have ended.
pub(crate) const NO_THREADS: &str =
    "it has no threads for them, or those have ended: its log may say why; start it with `farlink serve --threads N`";

/// News of an endpoint's peers.
#[derive(Debug)]
pub enum Change {
    /// A worker has opened a connection. Its number is not used again before [`Change::Left`] or [`ServerEndpoint::dismiss`].
    Joined {
        /// Its number at this endpoint; stands for a memory server in [`far`](crate::connection::far) addresses.
        peer: ServerId,
        /// Who it is. Not proven: compute servers of a cluster trust each other that far.
        who: PeerId,
        /// This side's memory, zeroed.
        memory: OpenMemory,
    },
    /// A worker is gone: it closed the connection or died.
    Left {
        /// Its number.
        peer: ServerId,
        /// It closed the connection itself, or its process is gone: it will not come back for anything.
        in_order: bool,
    },
}

/// Wakes an endpoint that sleeps, from any thread.
pub trait EndpointWaker: Send + Sync + fmt::Debug {
    /// Ends the sleep that the endpoint is in or about to begin.
    fn wake(&self);
}

/// One thread's share of a memory server's connections. Made by the thread that uses it.
pub trait ServerEndpoint: Endpoint {
    /// Appends who has come and gone. Does not block. Cheap unless `thorough`, which makes system calls to find those who
    /// died without a word; once in a while is enough.
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>);

    /// The memory server's region, of which [`Verb::Gather`](crate::Verb::Gather) sends pieces; of a compute server, none.
    fn memory(&self) -> &LocalMemory;

    /// Closes the connection to a peer. Requests to it that are under way complete, with or without an error.
    fn dismiss(&mut self, peer: ServerId);

    /// Sleeps until a notification or [`EndpointWaker::wake`], at most for `limit`. Calls `has_news` once it has made known that
    /// it is about to sleep, and does not if that says true.
    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool);

    /// Something that ends a sleep.
    fn waker(&self) -> std::sync::Arc<dyn EndpointWaker>;
}

/// Where workers connect: a memory server's side of all its connections, or a compute server's.
pub trait Listener: Send + Sync + fmt::Debug {
    /// Who listens.
    fn listens_as(&self) -> ListenerId;

    /// How many endpoints there are; a worker always comes to the same one.
    fn endpoints(&self) -> usize;

    /// The endpoint with this number, for the calling thread. Each can be taken once.
    ///
    /// # Errors
    /// If there is no such endpoint, or the fabric refuses.
    fn endpoint(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn ServerEndpoint>, Error>;

    /// Takes no more connections. Workers find the memory server gone ([`Dead`](crate::connection::ConnectionState::Dead)). Dropping the listener does it too.
    fn shut(&self);
}

/// How a memory server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenOptions {
    /// Endpoints, one for each thread that serves messages.
    pub endpoints: usize,
    /// Bytes that each side of a connection opens, a multiple of 4096.
    pub connection_bytes: usize,
}

/// Bytes that each side of a connection opens where none are named: two rings of 64 KiB and a MiB for what is fetched.
pub const DEFAULT_CONNECTION_BYTES: usize = (1 << 20) + (128 << 10) + 4096;

impl Default for ListenOptions {
    fn default() -> Self {
        Self { endpoints: 1, connection_bytes: DEFAULT_CONNECTION_BYTES }
    }
}

impl ListenOptions {
    /// Whether a memory server can listen so.
    ///
    /// # Errors
    /// If a number cannot work.
    pub fn validate(&self) -> Result<(), Error> {
        if self.endpoints == 0 || self.endpoints > 1024 {
            return Err(Error::BadOption {
                option: "endpoints",
                why: format!("{}; there must be 1 to 1024", self.endpoints),
            });
        }
        let bytes = self.connection_bytes;
        if !(CONNECTION_BYTES_MIN..=CONNECTION_BYTES_MAX).contains(&bytes) || !bytes.is_multiple_of(4096) {
            let why = format!(
                "{bytes}; a connection has {CONNECTION_BYTES_MIN} to {CONNECTION_BYTES_MAX} bytes, in multiples of 4096"
            );
            return Err(Error::BadOption { option: "connection_bytes", why });
        }
        Ok(())
    }
}

/// The least that each side of a connection opens.
pub const CONNECTION_BYTES_MIN: usize = 128 << 10;
/// The most that each side of a connection opens.
pub const CONNECTION_BYTES_MAX: usize = 1 << 30;

const _: () = assert!(CONNECTION_BYTES_MAX as u64 <= FAR_BYTES);
