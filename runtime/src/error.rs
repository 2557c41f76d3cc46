//! Everything that can go wrong, and what to do about it.

use std::time::Duration;

use crate::{
    lock::{LockWord, OwnerId},
    page::SizeClass,
    ptr::{PtrError, RemotePtr, ServerId},
    wire::DecodeError,
};

/// The error of every fallible function in this crate.
///
/// A message states its cause, so no error here is the [source](std::error::Error::source) of another one: whoever prints a
/// chain of errors prints each cause once.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A fabric failed.
    #[error(transparent)]
    Fabric(#[from] farlink_fabric::Error),

    /// A request to a memory server failed.
    #[error(transparent)]
    Messaging(farlink_messaging::Error),

    /// The operating system refused something.
    #[error("{what}: {cause}")]
    Io {
        /// What was tried, with the path.
        what: String,
        /// The system's answer.
        cause: std::io::Error,
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
        "page {page} is damaged: {owner} died while it held its lock, and no record tells the rest; others are unaffected; drop the structure, and load it anew"
    )]
    PageDamaged {
        /// The page.
        page: RemotePtr,
        /// The dead compute server.
        owner: OwnerId,
    },

    /// A page has been locked for longer than this compute server [waits](crate::compute::ComputeOptions::lock_wait), by one that lives.
    #[error(
        "page {page} has been locked by {owner} for more than {} ms: that one lives, and does not go on; continue or kill its process, then try again", waited.as_millis()
    )]
    OwnerStalled {
        /// The page.
        page: RemotePtr,
        /// Who holds its lock.
        owner: OwnerId,
        /// How long was waited.
        waited: Duration,
    },

    /// A memory server carries out an operation of an owner for longer than who takes over from that one waits, or the owner itself.
    #[error(
        "memory server {server} has an operation of {owner} under way for more than {} ms, and does not go on; continue or restart its process, then try again", waited.as_millis()
    )]
    ServerStalled {
        /// The memory server.
        server: ServerId,
        /// The owner.
        owner: OwnerId,
        /// How long was waited.
        waited: Duration,
    },

    /// A memory server carries out no change of this compute server's any more.
    #[error(
        "memory server {server} carries out no changes of this compute server, which fenced itself off there to become an owner; nothing was changed; make the change here, or join the cluster anew"
    )]
    FencedOff {
        /// The memory server.
        server: ServerId,
    },

    /// An owner's log could not be written, so that what it is about is not written either.
    #[error("the log of what is owned was not written: {why}; what was changed stays cached, try again later")]
    NotRecorded {
        /// What was in the way.
        why: String,
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

    /// An unlocked page does not fit its checksum, and did not change for a quarter of a second.
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
    #[error(
        "out of remote memory: no memory server has a free page of {class:?}; drop a structure that has pages of this size, or load a new cluster with more or larger memory servers"
    )]
    OutOfMemory {
        /// The size asked for.
        class: SizeClass,
    },

    /// A structure's mapping table has no free place, and cannot grow: its directory names as many pages as it can.
    #[error(
        "the mapping table is full: its directory has room for {pages_max} pages, which are all there; make a structure with larger pages (page-bytes), whose directory is larger, too, and load it anew"
    )]
    MappingTableFull {
        /// How many pages it can have.
        pages_max: usize,
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

    /// A page of this compute server alone would come to reach beyond what it owns.
    #[error(
        "page {page} reaches beyond what this compute server owns, or would after the change; nothing was changed; give the structure to one owner first"
    )]
    SharedPage {
        /// The page.
        page: RemotePtr,
    },

    /// A structure, or the part that was asked for, has an owner that lives.
    #[error(
        "{name:?} is owned by {owner}, whose process runs and caches what is not in remote memory yet; wait until it ends or gives the structure up, route operations to it (`Router`), read what it has written back (`OneSided::beside_owners`), or use another structure"
    )]
    Owned {
        /// The structure.
        name: String,
        /// Its owner.
        owner: OwnerId,
    },

    /// This compute server does not own what an operation is about, or not any more. Whoever has sent it reads the map, and sends it
    /// on.
    #[error(
        "another compute server than the one that was asked owns this part of {name:?}; read its partition map, which has epoch {epoch} or a later one"
    )]
    NotOwned {
        /// The structure.
        name: String,
        /// The newest epoch of its map that is known where it was sent.
        epoch: u64,
    },

    /// Nobody owns what an operation is about.
    #[error(
        "nobody owns the part of {name:?} that this is about; have a compute server own it, or use one-sided access"
    )]
    NoOwner {
        /// The structure.
        name: String,
    },

    /// A structure that was to be owned is used one-sided by a compute server that lives.
    #[error(
        "{name:?} is used one-sided by {user}, whose process runs, so nobody can own it; wait until it ends or closes its handles (if it only reads, `OneSided::beside_owners` is for that), or use another structure"
    )]
    HasUser {
        /// The structure.
        name: String,
        /// Who uses it.
        user: OwnerId,
    },

    /// This compute server has given up what it owned.
    #[error(
        "this compute server has given up its part of {name:?}; nothing was changed; claim it anew, with an empty cache"
    )]
    GivenUp {
        /// The structure.
        name: String,
    },

    /// A structure's partition map has no room.
    #[error(
        "the partition map of a structure has {words_max} words, which are used up; have fewer regions, or fewer compute servers"
    )]
    PartitionMapFull {
        /// Its size.
        words_max: usize,
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

    /// The request that replaces a word failed.
    #[error(
        "the request that replaces the word at {word} failed, and others have replaced the word since; it took effect or not: read to find out which"
    )]
    InstallUnknown {
        /// The word.
        word: RemotePtr,
    },

    /// An access cannot do what would have to be seen by others at once.
    #[error("not over this access: {what}; use one-sided access")]
    NotCoherent {
        /// What.
        what: &'static str,
    },

    /// A shipped operation's answer does not fit into a message. That shows once it is carried out.
    #[error(
        "an answer of {words} words is larger than a message ({limit} words): the operation was carried out, and its answer is lost; ask for less at a time"
    )]
    AnswerTooLarge {
        /// Its size.
        words: u64,
        /// The limit.
        limit: u64,
    },

    /// An operation on a memory server, or at its owner, panicked.
    #[error("{what} panicked: {why}; {}", if *may_have_changed { "what it had changed by then stays: read to find out" } else { "it has changed nothing" })]
    Panicked {
        /// What.
        what: &'static str,
        /// The message of the panic.
        why: String,
        /// Whether it may have changed something by then, which others see.
        may_have_changed: bool,
    },

    /// The cache cannot do what was asked for.
    #[error("the cache: {0}")]
    Cache(String),

    /// A structure cannot do what it was asked for, in its own words.
    #[error("{structure}: {why}")]
    Structure {
        /// The plug-in's name.
        structure: &'static str,
        /// Why.
        why: String,
    },

    /// A request or reply does not decode.
    #[error("malformed message: {0}")]
    Malformed(&'static str),

    /// A memory server was sent an operation that the program there does not have.
    #[error(
        "memory server {server} does not know the operation {operation:?} of {plugin}, or no structure of this kind has its number; serve with a program that has {plugin}"
    )]
    UnknownOperation {
        /// The memory server.
        server: ServerId,
        /// The plug-in's name.
        plugin: &'static str,
        /// The operation's.
        operation: &'static str,
    },

    /// The owner that an operation was sent to, or who is to be the next one, cannot be asked.
    #[error(
        "{owner} owns this part of {name:?}, or is to, and cannot be asked: {why}; have it listen, or have another one own it"
    )]
    OwnerMissing {
        /// The structure.
        name: String,
        /// The owner.
        owner: OwnerId,
        /// What is in the way.
        why: String,
    },

    /// The owner that an operation was sent to was lost before it answered.
    #[error("{owner} was lost with an operation on {name:?}, which it has carried out or not: {why}")]
    OwnerLost {
        /// The structure.
        name: String,
        /// The owner.
        owner: OwnerId,
        /// What happened.
        why: String,
    },

    /// The owner that an operation was sent to lives, and has given no sign of life for longer than this compute server
    /// [waits](crate::compute::ComputeOptions::lock_wait).
    #[error(
        "{owner} has had an operation on {name:?} for more than {} ms and gives no sign of life, though it lives: it may still carry it out, once; continue or kill its process, then read to find out", waited.as_millis()
    )]
    OwnerSilent {
        /// The structure.
        name: String,
        /// The owner.
        owner: OwnerId,
        /// How long was waited.
        waited: Duration,
    },

    /// An operation failed at the owner that it was sent to.
    #[error("at {owner}: {why}")]
    AtOwner {
        /// The owner.
        owner: OwnerId,
        /// What the operation failed with there.
        why: String,
    },

    /// An operation failed on the memory server that it was sent to.
    #[error("on memory server {server}: {why}")]
    OnServer {
        /// The memory server.
        server: ServerId,
        /// What the operation failed with there.
        why: String,
    },

    /// A memory server could not begin an operation that was sent to it.
    #[error(
        "memory server {server} could not begin an operation, and has changed nothing: {why}; once that is mended there, try again"
    )]
    NotBegun {
        /// The memory server.
        server: ServerId,
        /// Why not.
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
}

impl Error {
    /// Whether a request that failed so may succeed if it is posted again, after it is known whether it took effect or
    /// if that does not matter.
    pub fn may_be_tried_again(&self) -> bool {
        match self {
            Self::Fabric(error) => error.may_be_tried_again(),
            Self::Messaging(error) => error.may_be_tried_again(),
            _ => false,
        }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |cause| Self::Io { what, cause }
    }
}

impl From<Box<Self>> for Error {
    fn from(error: Box<Self>) -> Self {
        *error
    }
}

impl From<Box<farlink_fabric::Error>> for Error {
    fn from(error: Box<farlink_fabric::Error>) -> Self {
        Self::Fabric(*error)
    }
}

impl From<farlink_fabric::Error> for Box<Error> {
    fn from(error: farlink_fabric::Error) -> Self {
        Self::new(error.into())
    }
}

impl From<farlink_messaging::Error> for Error {
    /// What a fabric failed with, and what a service failed with, is found where it is found without messages in between.
    fn from(error: farlink_messaging::Error) -> Self {
        match error {
            farlink_messaging::Error::Fabric(error) => Self::Fabric(error),
            farlink_messaging::Error::Malformed(error) => error.into(),
            farlink_messaging::Error::Service(error) => match error.downcast() {
                Ok(error) => *error,
                Err(error) => Self::Messaging(farlink_messaging::Error::Service(error)),
            },
            error => Self::Messaging(error),
        }
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Malformed(error.0)
    }
}

impl From<PtrError> for Error {
    fn from(error: PtrError) -> Self {
        Self::BadPointer { word: error.word(), why: error.to_string() }
    }
}
