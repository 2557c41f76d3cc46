//! A thin safe layer over libibverbs: what is owned, in which order it goes, and what an error means.
//!
//! All of the fabric's calls into C are in this module. Every object holds what it was made from (a queue pair its
//! protection domain, that one its device), so nothing is closed under something that uses it. What cannot be made safe
//! here, because the card reads and writes memory behind the language's back, is `unsafe` and says who must keep what:
//! registering memory and posting requests.

mod device;
mod memory;
mod queue_pair;
mod queues;
mod requests;

pub use self::{
    device::{Atomics, DeviceInfo, GidInfo, PortInfo, PortState, devices},
    queue_pair::Reliability,
};
pub(crate) use self::{
    device::{Device, Local},
    memory::{Access, Domain, Memory, Registered},
    queue_pair::{Peer, QueuePair, QueuePairOptions},
    queues::{Channel, CompletionQueue, Finished, ReceiveQueue, Status, sleep},
    requests::{PostList, Posting, Remote, Segment},
};

use crate::error::Error;

/// The error that the C library left in `errno`.
fn last_error(what: impl Into<String>) -> Error {
    Error::io(what)(std::io::Error::last_os_error())
}

/// The outcome of a call that returns 0 or an error number.
fn check(code: i32, what: impl FnOnce() -> String) -> Result<(), Error> {
    match code {
        0 => Ok(()),
        // Some calls return -1 and set `errno`.
        ..0 => Err(last_error(what())),
        _ => Err(Error::io(what())(std::io::Error::from_raw_os_error(code))),
    }
}
