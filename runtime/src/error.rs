//! Everything that can go wrong, and what to do about it.

use std::path::PathBuf;

use crate::{
    lock::{LockWord, OwnerId},
    messaging::Refusal,
    page::SizeClass,
    ptr::{PtrError, RemotePtr, ServerId},
};

/// The error of every fallible function in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, with the path.
        what: String,
        /// The system's answer.
        source: std::io::Error,
    },

    /// There is no cluster at this path.
    #[error("no farlink cluster at {}: {why}; start its memory servers with `farlink serve --dir {}`", path.display(), path.display())]
    NoCluster {
        /// The directory.
        path: PathBuf,
        /// What is missing or wrong there.
        why: String,
    },

    /// A memory server of the cluster is not running.
    #[error("memory server {server} is not running: {why}")]
    ServerMissing {
        /// The memory server.
        server: ServerId,
        /// What is missing, and how to start it.
        why: String,
    },

    /// Somebody already serves this region.
    #[error("memory server {server} of {} is already running; stop it first or choose another --server", path.display())]
    AlreadyServed {
        /// The memory server.
        server: ServerId,
        /// The cluster's directory.
        path: PathBuf,
    },

    /// The start of a region is not a superblock of farlink's.
    #[error("memory server {server}: {why}; this is not farlink memory, or it is damaged")]
    BadSuperblock {
        /// The memory server.
        server: ServerId,
        /// The field that is wrong, with what it says.
        why: String,
    },

    /// The region was made by another version of farlink.
    #[error(
        "memory server {server} holds format version {found}, this program reads version {expected}; use the matching farlink"
    )]
    WrongVersion {
        /// The memory server.
        server: ServerId,
        /// Its format version.
        found: u64,
        /// Ours.
        expected: u64,
    },

    /// A region does not have the size that its superblock states.
    #[error(
        "memory server {server} maps {found} bytes, its superblock says {expected}; the file was cut or grown by hand"
    )]
    WrongSize {
        /// The memory server.
        server: ServerId,
        /// Bytes found.
        found: u64,
        /// Bytes stated.
        expected: u64,
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

    /// A pointer does not lead to a page of this cluster.
    #[error("pointer {word:#018x}: {why}; the page that held it is damaged")]
    BadPointer {
        /// The word.
        word: u64,
        /// Why it is no pointer to a page.
        why: String,
    },

    /// A page is locked by a compute server that is dead: it may be half-written.
    #[error(
        "page {page} is damaged: {owner} died while it held its lock; the page needs recovery, others are unaffected"
    )]
    PageDamaged {
        /// The page.
        page: RemotePtr,
        /// The dead compute server.
        owner: OwnerId,
    },

    /// A lock that this compute server held was taken from it.
    #[error(
        "page {page} was locked by this compute server and is {found:?} now: somebody took it for dead; end this process, and join anew"
    )]
    LockLost {
        /// The page.
        page: RemotePtr,
        /// Its lock word.
        found: LockWord,
    },

    /// An unlocked page does not fit its checksum, and did not change meanwhile.
    #[error("page {page} is corrupt: its checksum does not fit its contents, though nobody changes it")]
    PageCorrupt {
        /// The page.
        page: RemotePtr,
    },

    /// Pages contradict each other, again and again.
    #[error("the structure is inconsistent at page {page}: {why}; run `farlink check`")]
    Inconsistent {
        /// The page where it showed.
        page: RemotePtr,
        /// What does not fit.
        why: &'static str,
    },

    /// No memory server has room for another page.
    #[error("out of remote memory: no memory server has a free page of {class:?}; add servers or serve more --bytes")]
    OutOfMemory {
        /// The size asked for.
        class: SizeClass,
    },

    /// All compute-server slots of the cluster are taken by live ones.
    #[error("the cluster has no room for another compute server ({limit} are attached)")]
    TooManyComputeServers {
        /// The limit.
        limit: usize,
    },

    /// The cluster has given out all its incarnations.
    #[error("the cluster has used up its 2^23 compute-server incarnations; create a new cluster and load it anew")]
    IncarnationsExhausted,

    /// The catalog has a structure of this name.
    #[error("a structure named {name:?} exists; open it, or choose another name")]
    NameTaken {
        /// The name.
        name: String,
    },

    /// The catalog has no structure of this name.
    #[error("no structure named {name:?} in this cluster (there are: {known})")]
    NoSuchName {
        /// The name.
        name: String,
        /// Those there are.
        known: String,
    },

    /// The catalog has no room for another structure.
    #[error("the catalog is full ({limit} structures)")]
    CatalogFull {
        /// The limit.
        limit: usize,
    },

    /// The structure is of another kind.
    #[error("{name:?} is a structure of {found}, not of {expected}; open it as what it is")]
    WrongKind {
        /// The name.
        name: String,
        /// What its plug-in is called.
        found: String,
        /// What the one asked for is called.
        expected: String,
    },

    /// An operation reached beyond what its compute server owns.
    #[error(
        "page {page} lies outside the part of the structure that this compute server owns; send the operation to its owner"
    )]
    OutsidePartition {
        /// The page.
        page: RemotePtr,
    },

    /// A structure change would reach a page that several compute servers share.
    #[error(
        "page {page} is shared by several compute servers and cannot be changed by one of them; nothing was changed; give the structure to one owner first"
    )]
    SharedPage {
        /// The page.
        page: RemotePtr,
    },

    /// A change names a page twice.
    #[error("page {page} is named twice in one change; nothing was changed; name each page once")]
    PageTwice {
        /// The page.
        page: RemotePtr,
    },

    /// An operation goes back to more pages than can be held for it.
    #[error(
        "an operation goes back to more than {limit} pages that it has read, which the cache does not hold; give the cache more memory, or have the operation use each page as it comes"
    )]
    TooManyPages {
        /// How many are held.
        limit: usize,
    },

    /// An access cannot do what would have to be seen by others at once.
    #[error("not over this access: {what}; use one-sided access")]
    NotCoherent {
        /// What.
        what: &'static str,
    },

    /// A shipped operation's answer does not fit into a message.
    #[error("an answer of {words} words is larger than a message ({limit} words); ask for less at a time")]
    AnswerTooLarge {
        /// Its size.
        words: u64,
        /// The limit.
        limit: u64,
    },

    /// The function of a change, or an operation on a memory server, panicked.
    #[error("{what} panicked: {why}; it has changed nothing")]
    Panicked {
        /// What.
        what: &'static str,
        /// The message of the panic.
        why: String,
    },

    /// The cache cannot do what was asked for.
    #[error("the cache: {0}")]
    Cache(String),

    /// A request or reply does not decode.
    #[error("malformed message: {0}")]
    Malformed(&'static str),

    /// A memory server did not carry out a request.
    #[error("memory server {server} refused a request of kind {kind}: {why}")]
    Refused {
        /// The memory server.
        server: ServerId,
        /// The request's kind.
        kind: u32,
        /// Why.
        why: Refusal,
    },

    /// An operation failed on the memory server that it was sent to.
    #[error("on memory server {server}: {why}")]
    OnServer {
        /// The memory server.
        server: ServerId,
        /// What the operation failed with there.
        why: String,
    },

    /// A memory server was lost in mid-request.
    #[error(
        "memory server {server} was lost in mid-request: {why}; the request was carried out once or not at all: read to find out which"
    )]
    OutcomeUnknown {
        /// The memory server.
        server: ServerId,
        /// What is known.
        why: String,
    },

    /// Input to a bulk load is not in strictly ascending order.
    #[error(
        "entry {position} of the bulk load has key {key}, not above its predecessor; sort and deduplicate the input"
    )]
    NotSorted {
        /// Position in the input, from 0.
        position: u64,
        /// The key there.
        key: u64,
    },

    /// A bulk load found entries in the structure.
    #[error("the structure is not empty; bulk load into a new one, or insert")]
    NotEmpty,

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

    /// A memory server that was there is gone.
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
    Fabric {
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
        matches!(self, Self::Fabric { .. })
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl From<Box<Self>> for Error {
    fn from(error: Box<Self>) -> Self {
        *error
    }
}

impl From<PtrError> for Error {
    fn from(error: PtrError) -> Self {
        let word = match error {
            PtrError::Null => 0,
            PtrError::Swizzled(word) | PtrError::Offset(word) => word,
        };
        Self::BadPointer { word, why: error.to_string() }
    }
}
