//! A memory server's side of connections: where workers come in, and the endpoint of each thread that serves them.

use std::{fmt, time::Duration};

use crate::{
    clock::Clock,
    connection::{OpenMemory, PeerId},
    endpoint::Endpoint,
    error::Error,
    ptr::ServerId,
};

/// News of a port's peers.
#[derive(Debug)]
pub enum Change {
    /// A worker has opened a link. Its number is not used again before [`Change::Left`] or [`Port::dismiss`].
    Joined {
        /// Its number at this port; stands for a memory server in [`far`] addresses.
        peer: ServerId,
        /// Who it is. Not proven: compute servers of a cluster trust each other that far.
        who: PeerId,
        /// This side's memory, zeroed.
        memory: OpenMemory,
    },
    /// A worker is gone: it closed the link or died.
    Left {
        /// Its number.
        peer: ServerId,
        /// It closed the link itself, so it will not come back for anything.
        in_order: bool,
    },
}

/// Wakes a port that sleeps, from any thread.
pub trait PortWaker: Send + Sync + fmt::Debug {
    /// Ends the sleep that the port is in or about to begin.
    fn wake(&self);
}

/// One thread's share of a memory server's links. Made by the thread that uses it.
pub trait Port: Endpoint {
    /// Appends who has come and gone. Does not block. Cheap unless `thorough`, which makes system calls to find those who
    /// died without a word; once in a while is enough.
    fn changes(&mut self, thorough: bool, changes: &mut Vec<Change>);

    /// Closes the link to a peer. Requests to it that are under way complete, with or without an error.
    fn dismiss(&mut self, peer: ServerId);

    /// Sleeps until a notification or [`PortWaker::wake`], at most for `limit`. Calls `has_news` once it has made known that
    /// it is about to sleep, and does not if that says true.
    fn sleep(&mut self, limit: Duration, has_news: &mut dyn FnMut() -> bool);

    /// Something that ends a sleep.
    fn waker(&self) -> std::sync::Arc<dyn PortWaker>;
}

/// Where workers knock: a memory server's side of all its links.
pub trait Listener: Send + Sync + fmt::Debug {
    /// The memory server.
    fn server(&self) -> ServerId;

    /// How many ports there are; a worker always comes to the same one.
    fn ports(&self) -> usize;

    /// The port with this number, for the calling thread. Each can be taken once.
    ///
    /// # Errors
    /// If there is no such port, or the fabric refuses.
    fn port(&self, number: usize, seed: u64, clock: Clock) -> Result<Box<dyn Port>, Error>;

    /// Takes no more links. Workers find the memory server gone ([`ConnectionState::Dead`]). Dropping the listener does it too.
    fn shut(&self);
}

/// How a memory server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenOptions {
    /// Ports, one for each thread that serves messages.
    pub ports: usize,
    /// Bytes that each side of a link opens, a multiple of 4096.
    pub connection_bytes: usize,
}

/// Bytes that each side of a link opens where none are named: two rings of 64 KiB and a MiB for what is fetched.
pub const DEFAULT_CONNECTION_BYTES: usize = (1 << 20) + (128 << 10) + 4096;

impl Default for ListenOptions {
    fn default() -> Self {
        Self { ports: 1, connection_bytes: DEFAULT_CONNECTION_BYTES }
    }
}

impl ListenOptions {
    /// Whether a memory server can listen so.
    ///
    /// # Errors
    /// If a number cannot work.
    pub fn validate(&self) -> Result<(), Error> {
        if self.ports == 0 || self.ports > 1024 {
            return Err(Error::BadOption { option: "ports", why: format!("{}; there must be 1 to 1024", self.ports) });
        }
        let bytes = self.connection_bytes;
        if !(CONNECTION_BYTES_MIN..=1 << 30).contains(&bytes) || !bytes.is_multiple_of(4096) {
            let why = format!("{bytes}; a link has {CONNECTION_BYTES_MIN} to 2^30 bytes, in multiples of 4096");
            return Err(Error::BadOption { option: "connection_bytes", why });
        }
        Ok(())
    }
}

/// The least that each side of a link opens.
pub const CONNECTION_BYTES_MIN: usize = 128 << 10;
