//! Operations go to the owners of what they are about.
//!
//! Compute servers that own parts of a structure listen, as memory servers do: a thread or more of each carries out what others
//! send ([`OwnerServer`]), over the very cache that its own workers use. A [`Router`] knows the partition map ([`Routes`]) and has each
//! operation done by the owner of what it is about ([`Operation::scope`](farlink_runtime::access::Operation::scope)): by this compute
//! server itself, through its cache, or by a message to another one. A compute server that owns nothing reads and writes so, too.
//!
//! The map of a process is one value, read with each operation and without a lock
//! ([`Versioned`](farlink_runtime::versioned::Versioned)). It may be old. Whoever is asked and does not own what the operation is about
//! says so before any effect, and names the epoch of the map that it knows; then the map is read, once for the whole process, and
//! the operation goes on to the owner that it names. So an operation that is sent to the right owner costs one exchange of
//! messages, and the first one after a change of the map another one, and a READ.
//!
//! What a compute server owns can change while operations run ([`Holdings`]): a region that it gives up, or a piece of one, is written
//! while operations on it go on; in the end they are refused, with no effect, and wait here for the owner that takes it.
//!
//! An operation about the parts of several owners is cut to each of them
//! ([`Operation::within`](farlink_runtime::access::Operation::within)); each piece finds its way by itself, so none is done twice.
//!
//! | what can go wrong | what happens |
//! |---|---|
//! | the owner that was asked is no longer it | the map is read, and the operation is sent on |
//! | the owner is dead | what it had is taken, by this compute server if it can, else by another one that listens; with nobody who can, [`OwnerMissing`](farlink_runtime::error::Error::OwnerMissing) at once |
//! | its owner died as it handed it on, and nobody owns it | this compute server takes it after a hundred looks, if it can own; if it fails, another one that listens |
//! | another operation of the process reads the map, or has something taken, and nobody polls it | it is done without that one after 250 looks |
//! | nobody owns it for the time being, or the owner takes no messages | again for [ten seconds](PATIENCE_NS) and [a thousand looks](LOOKS_MIN) without a new map, then [`NoOwner`](farlink_runtime::error::Error::NoOwner) or [`OwnerMissing`](farlink_runtime::error::Error::OwnerMissing) |
//! | the owner has left in good order, and not taken it | the map is read, and the operation is sent on |
//! | the owner was lost with it | again if it only reads, else [`OwnerLost`](farlink_runtime::error::Error::OwnerLost) |
//! | the owner lives and gives no sign of life, its process is stopped, say | [`OwnerSilent`](farlink_runtime::error::Error::OwnerSilent) once [the time for that](farlink_runtime::compute::ComputeOptions::lock_wait) is over; without one, it waits until it goes on |
//! | the connection was lost, the owner was not | it is sent again, and done once (see [`farlink_runtime::messaging`]) |

mod balance;
mod heirs;
mod holdings;
mod moves;
mod owner;
mod router;
mod routes;

use farlink_runtime::messaging::Kind;

pub use self::{
    balance::{LOADS, Load, Loads, Moved, balance, loads},
    holdings::{Here, Holdings},
    moves::{GIVE_UP, TAKE, move_region, take_region},
    owner::{OwnerCounts, OwnerServer, Served},
    router::Router,
    routes::Routes,
};

/// The kind of message that carries an operation to an owner. Its layout is that of a shipped one which begins at the root.
pub const ROUTE: Kind = Kind(0x524f_5554);

/// How long an operation looks for an owner while the map stays as it is, at least. A region that goes to another owner has none for
/// about as long as two exchanges of messages take.
pub const PATIENCE_NS: u64 = 10_000_000_000;

/// How often it looks, a millisecond apart, until it takes what has had an owner and has none, if its compute server can own.
const LOOKS_AT_NOBODY: u32 = 100;

/// How often it looks, a millisecond apart, until it does itself what another operation of its process has begun: nobody may be polling that one.
const LOOKS_AT_OTHERS: u32 = 250;

/// How often it looks, at least, a millisecond apart. Where threads wait long for a core, so do those that move the region, and ten
/// seconds are little.
pub const LOOKS_MIN: u32 = 1000;
