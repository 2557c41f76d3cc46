//! Connections: memory that a worker's endpoint and a memory server open to each other, and the duties of both.
//!
//! Messages need little of a fabric. A *connection* joins one endpoint and one listener: a memory server's, or a compute server's
//! ([`Fabric::peer_listener`]), which an endpoint calls by a number that it gives it ([`Endpoint::peer`]). What is said here of
//! memory servers holds for both. Each side opens memory of its
//! own to the other, zeroed and of the same size (the memory server says which); the other side reaches it with
//! [`Verb::Read`](crate::Verb::Read), [`Verb::Write`](crate::Verb::Write), [`Verb::WriteWord`](crate::Verb::WriteWord) and
//! [`Verb::Notify`](crate::Verb::Notify) at [`far`] addresses. What stands in that memory is no business of the fabric's.
//!
//! | | worker | memory server |
//! |---|---|---|
//! | connects | [`Endpoint::connect`], names itself with a [`PeerId`] | learns of it by [`Change::Joined`] from its [`ServerEndpoint`] |
//! | own memory | the [`OpenMemory`] that `connect` returns | the one that comes with `Joined` |
//! | the other's memory | `far(server, offset)` | `far(peer, offset)`, the number that came with `Joined` |
//! | posts and completions | its [`Endpoint`] | the [`ServerEndpoint`], which is an endpoint too |
//! | wakes the other | `Verb::Notify` | never: workers do not sleep |
//! | closes in order | [`Endpoint::disconnect`], or is dropped | [`ServerEndpoint::dismiss`], or is dropped |
//! | finds the other gone | [`Endpoint::connection_state`], or a request fails | [`Change::Left`], or a request fails |
//!
//! Duties of a fabric:
//!
//! - A word of opened memory is read and written whole, by either side, also by a card.
//! - WRITEs and notifications of one side take effect in the order of posting if
//!   [`ordered_writes`](crate::Capabilities::ordered_writes); whoever posts waits for completions if not.
//! - *No wake-up is lost.* A notification whose word is written after [`ServerEndpoint::sleep`] has called `has_news` for the last time
//!   ends that sleep. On verbs it is a WRITE_WITH_IMM whose completion raises an event; on `mem` the one who writes looks
//!   whether the other sleeps, after a fence.
//! - After [`Change::Left`] and after `disconnect` or `dismiss`, nothing that this side had posted to the connection is still under
//!   way, and nobody else reaches the memory that this side had opened, except a peer that was dismissed and does not know
//!   yet: its WRITEs land in memory that nobody reads any more, or fail.
//! - The other side of a connection is not to be trusted: it may write anything anywhere in what was opened to it, at any time.
//!
//! On verbs it is a reliable connection (RC); what was opened is a memory region with a key of its own, exchanged when the
//! connection is made; the threads of a memory server share nothing: each [`ServerEndpoint`] has its completion queue and channel.

use std::{fmt, ops::Deref, ops::Range};

#[cfg(doc)]
use crate::{
    endpoint::Endpoint,
    fabric::Fabric,
    listener::{Change, ServerEndpoint},
};
use crate::{
    lock::OwnerId,
    ptr::{FAR_BYTES, REGION_BYTES_MAX, RemotePtr, ServerId},
    region::Region,
    sync::{Arc, AtomicU64},
};

/// Who is at the other end of a connection: stays the same when a connection is lost and made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerId {
    /// The compute server.
    pub owner: OwnerId,
    /// The number of its worker, never given out again by that compute server.
    pub worker: u32,
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {} of {}", self.worker, self.owner)
    }
}

/// Who takes messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ListenerId {
    /// A memory server.
    Memory(ServerId),
    /// A compute server.
    Compute(OwnerId),
}

impl fmt::Display for ListenerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(server) => write!(f, "memory server {server}"),
            Self::Compute(owner) => write!(f, "{owner}"),
        }
    }
}

/// The address of a byte in what the other side of a connection has opened. `other` is the memory server for a worker's endpoint, the
/// peer's number for a listener's. Offsets are below [`FAR_BYTES`]; higher ones wrap.
pub fn far(other: ServerId, offset: u64) -> RemotePtr {
    RemotePtr::new(other, REGION_BYTES_MAX + offset % FAR_BYTES).expect("below 2^48 and not 0")
}

/// The offset of a [`far`] address; none for an address in a region.
pub fn far_offset(at: RemotePtr) -> Option<u64> {
    at.offset().checked_sub(REGION_BYTES_MAX)
}

/// Memory of this side that the other side of a connection reads and writes.
#[derive(Clone)]
pub struct OpenMemory {
    region: Arc<Region>,
    words: Range<usize>,
}

impl OpenMemory {
    /// A part of a region.
    ///
    /// # Panics
    /// If the region has no such words.
    pub(crate) fn new(region: Arc<Region>, words: Range<usize>) -> Self {
        assert!(words.start <= words.end && words.end <= region.words().len(), "opened memory lies in its region");
        Self { region, words }
    }

    /// Whether it was taken away, by whoever cut its file: to be asked after an access, which means nothing then.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }
}

impl Deref for OpenMemory {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        &self.region.words()[self.words.clone()]
    }
}

impl fmt::Debug for OpenMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpenMemory({} words)", self.words.len())
    }
}

/// What a worker knows of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionState {
    /// Nothing proves that it is down.
    Up,
    /// The memory server runs, and has dismissed this connection.
    Dismissed,
    /// The memory server is gone, or takes no messages any more.
    Dead,
}
