//! The fabric: posts and completions.
//!
//! A [`Fabric`](crate::fabric::Fabric) joins compute servers to the registered memory of memory servers. A worker has one [`Endpoint`]; it posts
//! [`Request`]s in batches, each batch with one doorbell, and polls [`Completion`]s. That is the shape of RDMA verbs, so
//! `verbs` maps onto it one to one, and it is what a simulator can model.
//!
//! What may be relied on, and what only if the [`Capabilities`] say so:
//!
//! - Every word (8 bytes, aligned) is read and written whole. Nothing larger is.
//! - READs are not ordered among themselves, and the cache lines of one READ come in any order.
//! - WRITEs and atomics of one endpoint to one server take effect in the order of their posting, before later READs of
//!   it to that server, *if* [`Capabilities::ordered_writes`].
//! - Atomics are atomic against atomics of all endpoints. Against 8-byte WRITEs: if
//!   [`Capabilities::atomic_against_writes`]. Against the CPUs of the memory server: if
//!   [`Capabilities::atomic_against_cpu`].
//! - A request whose completion came without an error has taken effect.
//! - A request that fails breaks the way to its memory server: with it fail all requests of the endpoint to that server that
//!   were rung behind it before its failure is polled. Each of them has taken effect or never will; of a WRITE of several
//!   words any may have arrived, and the others never will. Nothing of them arrives
//!   later than what is rung to that server after that poll, which goes through again. With
//!   [`Capabilities::ordered_writes`] those that took effect come before those that did not, and one at most, between them, is a WRITE
//!   of which some words have arrived.
//! - The error says what to do: [`Error::may_be_tried_again`], or the memory server is lost for good. A request whose
//!   address makes no sense ([`Error::BadAddress`]) fails alone and has no effect.
//!
//! For messages a worker's endpoint and a memory server open memory to each other: see [`connection`](crate::connection).

use std::{fmt, ptr::NonNull};

use crate::{
    buffer::{Buffer, LocalKey},
    connection::{ConnectionState, OpenMemory, PeerId},
    error::Error,
    gather::Gather,
    lock::OwnerId,
    ptr::{RemotePtr, ServerId},
};

/// What a fabric guarantees beyond the minimum, and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// WRITEs and atomics of one endpoint to one server are placed in the order of posting.
    pub ordered_writes: bool,
    /// Remote atomics are atomic against 8-byte WRITEs, so that a WRITE may unlock.
    pub atomic_against_writes: bool,
    /// Remote atomics are atomic against those of the memory server's own CPUs.
    pub atomic_against_cpu: bool,
    /// The largest payload, in bytes, that travels within the request itself.
    pub inline_bytes: usize,
    /// Pieces of a [`Verb::Gather`] at most. Less than 2: it gathers nothing, as endpoints of workers never do.
    pub gather_max: usize,
    /// The eager limit of messages: those of more words go by rendezvous rather than through a ring, unless a
    /// channel's options say otherwise.
    pub eager_words: usize,
}

/// Names a request in its completion; the poster's to choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// One remote operation. A buffer belongs to the endpoint from the post to the completion.
#[derive(Debug)]
#[non_exhaustive]
pub enum Verb {
    /// Fills the buffer from remote memory.
    Read(Buffer),
    /// Copies the buffer to remote memory.
    Write(Buffer),
    /// Copies pieces, one behind the other, to what the other side of a [connection](crate::connection) has opened: one WRITE. Only
    /// a [`ServerEndpoint`](crate::listener::ServerEndpoint) gathers.
    Gather(Box<Gather>),
    /// Writes one word, which travels in the request.
    WriteWord(u64),
    /// Writes one word of a [connection](crate::connection)'s memory, and wakes the memory server's thread that sleeps there, if it does.
    Notify(u64),
    /// Replaces one word if it has the expected value; completes with the previous value.
    CompareSwap {
        /// The value it must have.
        expected: u64,
        /// The value it gets.
        new: u64,
    },
    /// Adds to one word, wrapping; completes with the previous value.
    FetchAdd(u64),
}

impl Verb {
    /// What it is called in messages and statistics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Read(_) => "READ",
            Self::Write(_) | Self::Gather(_) | Self::WriteWord(_) | Self::Notify(_) => "WRITE",
            Self::CompareSwap { .. } => "CAS",
            Self::FetchAdd(_) => "FETCH_ADD",
        }
    }

    /// How many bytes of remote memory it covers.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Read(buffer) | Self::Write(buffer) => buffer.len() * 8,
            Self::Gather(gather) => gather.words() * 8,
            _ => 8,
        }
    }
}

/// A verb, where it applies, and its name.
#[derive(Debug)]
pub struct Request {
    /// Names it in its completion.
    pub ticket: Ticket,
    /// The first byte of remote memory it covers; aligned to 8.
    pub at: RemotePtr,
    /// What to do there.
    pub verb: Verb,
}

/// What a finished request gives back.
#[derive(Debug)]
#[non_exhaustive]
pub enum Done {
    /// A READ: the buffer, filled.
    Read(Buffer),
    /// A WRITE: placed.
    Written,
    /// An atomic: the word's value before.
    Previous(u64),
}

/// The end of one request.
#[derive(Debug)]
pub struct Completion {
    /// The request's name.
    pub ticket: Ticket,
    /// Its result. The error is boxed because completions are many, moved often, and almost never errors.
    pub outcome: Result<Done, Box<Error>>,
}

/// One thread's connection to all memory servers.
pub trait Endpoint: fmt::Debug {
    /// What the fabric guarantees.
    fn capabilities(&self) -> Capabilities;

    /// Makes local memory (`words` 8-byte words from `base`) usable in requests. It stays registered until the endpoint is
    /// dropped.
    ///
    /// # Safety
    /// The memory is allocated, and stays so until the endpoint is dropped. Only [`Buffer`]s refer to it.
    ///
    /// # Errors
    /// If the fabric refuses, for example for a limit on locked memory.
    unsafe fn register(&mut self, base: NonNull<u64>, words: usize) -> Result<LocalKey, Error>;

    /// Posts the requests in order, rings the doorbell once, and leaves the vector empty. Does not block. Every request
    /// gets exactly one completion, also if it fails.
    fn ring(&mut self, requests: &mut Vec<Request>);

    /// Appends the completions that have arrived. Does not block.
    fn poll(&mut self, completions: &mut Vec<Completion>);

    /// When the next completion is due on the endpoint's clock, if the fabric knows; for virtual time.
    fn next_due_ns(&self) -> Option<u64> {
        None
    }

    /// Opens a [connection](crate::connection) to a memory server and returns this side's memory of it, zeroed. The other side's is at
    /// [`far`](crate::connection::far) from then on. The connection to this server that there was ends as one that broke: the memory server keeps what
    /// it knows of this worker. Blocks for as long as making a connection takes.
    ///
    /// # Errors
    /// [`Error::ServerMissing`] if the memory server takes no messages; if the memory cannot be had.
    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        let _ = who;
        Err(Error::ServerMissing { server, why: "this fabric carries no messages".into() })
    }

    /// The number by which this endpoint calls a compute server that [listens](crate::Fabric::peer_listener), for connections: always the
    /// same, and no memory server's.
    ///
    /// # Errors
    /// [`Error::NoPeers`] if the fabric carries no messages between compute servers, [`Error::PeerMissing`] if there are no more
    /// numbers.
    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        let _ = peer;
        Err(Error::NoPeers)
    }

    /// Closes the connection to this memory server, if there is one, in good order. Dropping the endpoint closes all.
    fn disconnect(&mut self, server: ServerId) {
        let _ = server;
    }

    /// What has become of the connection to this memory server. May make a system call, or post something of its own to find out.
    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        let _ = server;
        ConnectionState::Dead
    }

    /// How often this memory server has answered [`Endpoint::connection_state`] over the present connection: a sign that its process runs,
    /// however late what it writes may arrive. Always 0 where it is not asked.
    fn states_told(&self, server: ServerId) -> u64 {
        let _ = server;
        0
    }
}
