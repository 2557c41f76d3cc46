//! What can go wrong between a compute server and a memory server, and what to do about it.

use std::path::PathBuf;

use crate::{
    lock::OwnerId,
    ptr::{RemotePtr, ServerId},
    wire::DecodeError,
};

/// The error of every fallible function of this crate.
///
/// A message states its cause, so no error here is the [source](std::error::Error::source) of another one: whoever prints a
/// chain of errors prints each cause once.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried, with the path.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
    },

    /// There is no cluster at this path.
    #[error("no farlink cluster at {}: {why}", path.display())]
    NoCluster {
        /// The directory.
        path: PathBuf,
        /// What is missing or wrong there, and what to do.
        why: String,
    },

    /// A memory server of the cluster is not running, or takes no messages.
    #[error("memory server {server} is not running, or takes no messages: {why}")]
    ServerMissing {
        /// The memory server.
        server: ServerId,
        /// What is missing, and how to start it.
        why: String,
    },

    /// A compute server takes no messages.
    #[error("compute server {peer} takes no messages: {why}")]
    PeerMissing {
        /// The compute server.
        peer: OwnerId,
        /// What is missing.
        why: String,
    },

    /// The fabric does not carry messages from one compute server to another.
    #[error(
        "this fabric carries no messages between compute servers; use one that does (mem, verbs), or have one owner for all of a structure"
    )]
    NoPeers,

    /// Somebody already serves this region.
    #[error("memory server {server} of {} is already running; stop it first or choose another --server", path.display())]
    AlreadyServed {
        /// The memory server.
        server: ServerId,
        /// The cluster's directory.
        path: PathBuf,
    },

    /// A region is not what it should be.
    #[error("memory server {server}: {why}; this is not farlink memory, or it is damaged")]
    BadRegion {
        /// The memory server.
        server: ServerId,
        /// What is wrong.
        why: String,
    },

    /// Two regions belong to different clusters.
    #[error("memory server {server} belongs to cluster {found:#x}, server 0 to {expected:#x}; do not mix their files")]
    WrongCluster {
        /// The memory server.
        server: ServerId,
        /// Its cluster.
        found: u64,
        /// The cluster of server 0.
        expected: u64,
    },

    /// An option has a value that cannot work.
    #[error("{option}: {why}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// What it must be.
        why: String,
    },

    /// A control message does not decode.
    #[error(transparent)]
    Malformed(#[from] DecodeError),

    /// There is no RDMA device that will do.
    #[error("no {wanted}: {why}")]
    NoDevice {
        /// What was asked for.
        wanted: String,
        /// What there is instead, and what to do.
        why: String,
    },

    /// The system or the device does not let memory be registered.
    #[error("{device} refuses to register {bytes} bytes: {cause}; {remedy}")]
    RegistrationRefused {
        /// How much.
        bytes: u64,
        /// The device.
        device: String,
        /// The system's answer.
        cause: std::io::Error,
        /// What to do.
        remedy: String,
    },

    /// Nobody listens at a memory server's address.
    #[error(
        "no memory server at {address}: {why}; is it running (`farlink serve --fabric verbs`), and does it --listen on an address that this machine reaches?"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// The system's answer.
        why: String,
    },

    /// A memory server does not let us in, or is not what it should be.
    #[error("not connected to the memory server at {address}: {why}; all servers of a cluster need the same secret")]
    NotAdmitted {
        /// The address.
        address: String,
        /// What happened.
        why: String,
    },

    /// A memory server that was there is gone, or out of reach.
    #[error(
        "memory server {server} at {address} is lost: {why}; what was under way to it may have taken effect or not; once it runs again, join anew"
    )]
    ServerLost {
        /// The memory server.
        server: ServerId,
        /// Its address.
        address: String,
        /// What was seen.
        why: String,
    },

    /// This compute server was taken for dead: others finish what it was about, and take over what it owned.
    #[error(
        "{owner}, which is this compute server, was taken for dead: what was under way may have taken effect or not, nothing it does from now on does, and others take over what it owned; end this process, and join anew"
    )]
    TakenForDead {
        /// Its incarnation.
        owner: OwnerId,
    },

    /// A request is for memory that no memory server has opened.
    #[error("{what} at {at} makes no sense: {why}")]
    BadAddress {
        /// The operation.
        what: &'static str,
        /// The remote address.
        at: RemotePtr,
        /// What is wrong with it.
        why: String,
    },

    /// A request failed, and with it the connection that it went over. It may have taken effect. The next request goes over
    /// a new connection.
    #[error("{what} at {at} failed: {why}; it may have taken effect")]
    RequestFailed {
        /// The operation.
        what: &'static str,
        /// The remote address.
        at: RemotePtr,
        /// Cause and remedy.
        why: String,
    },
}

impl Error {
    /// Whether a request that failed so may succeed if it is posted again, after it is known whether it took effect or
    /// if that does not matter.
    pub fn may_be_tried_again(&self) -> bool {
        matches!(self, Self::RequestFailed { .. })
    }

    /// Turns the system's answer to `what` into an error.
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |cause| Self::Io { what, cause }
    }
}

impl From<Box<Self>> for Error {
    fn from(error: Box<Self>) -> Self {
        *error
    }
}
