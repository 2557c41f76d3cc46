//! A fabric: the memory servers of a cluster, the way to them, and who of its compute servers runs.

use std::fmt;

use crate::{
    clock::Clock,
    endpoint::Endpoint,
    error::Error,
    listener::{ListenOptions, Listener},
    lock::OwnerId,
    ptr::ServerId,
};

/// Whether a compute server still runs. Never a guess: *dead* is said only when none of its requests can take effect any
/// more (rule 11 of one-sided access).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It runs, or nothing proves that it does not.
    Alive,
    /// It is gone for good.
    Dead,
}

/// Proof that a compute server runs: while this exists, others see its incarnation as alive.
pub trait OwnerClaim: Send + Sync + fmt::Debug {
    /// Whether it stands: false, for ever, once others may count the incarnation as dead though its process goes on. To be asked
    /// when a request has failed or a connection is lost, and now and then. May make a system call; where memory servers have cut
    /// the connection, it asks them anew and blocks for as long as they take, a second at most each.
    fn holds(&self) -> bool;
}

/// The memory servers of one cluster and the way to them.
pub trait Fabric: Send + Sync + fmt::Debug {
    /// How many memory servers there are; their ids count from 0.
    fn servers(&self) -> usize;

    /// Bytes of the region of `server`.
    fn region_bytes(&self, server: ServerId) -> u64;

    /// A new endpoint; `seed` decides whatever the fabric does at random.
    ///
    /// # Errors
    /// If a connection cannot be made.
    fn endpoint(&self, seed: u64, clock: Clock) -> Result<Box<dyn Endpoint>, Error>;

    /// Marks a fresh incarnation as alive until the claim is dropped or the process dies.
    ///
    /// # Errors
    /// If the mark cannot be set.
    fn claim(&self, owner: OwnerId) -> Result<Box<dyn OwnerClaim>, Error>;

    /// Whether the compute server with this incarnation still runs. May make a system call.
    fn liveness(&self, owner: OwnerId) -> Liveness;

    /// Opens this process to messages of compute servers, as the one with this incarnation, which it has
    /// [claimed](Fabric::claim), until the listener is dropped.
    ///
    /// # Errors
    /// [`Error::NoPeers`] if the fabric carries no messages between compute servers; if it listens already, or an option cannot
    /// work.
    fn peer_listener(&self, owner: OwnerId, options: &ListenOptions) -> Result<Box<dyn Listener>, Error> {
        let _ = (owner, options);
        Err(Error::NoPeers)
    }

    /// Whether all memory servers are there, and this machine's card, if one is used. Asks none of them; makes a few system calls
    /// where there is a card or the memory outlives its servers, and a load elsewhere. To be called now and then, on whatever thread: there, it is what makes requests to a
    /// memory server that is gone fail. Compute servers' maintenance does.
    ///
    /// # Errors
    /// [`Error::ServerLost`] for one that is gone. In memory of one process none ever is.
    fn check_servers(&self) -> Result<(), Error> {
        Ok(())
    }
}
