//! One-sided access to disaggregated memory: what a compute server may ask of the memory of memory servers, and the fabrics
//! that carry it out.
//!
//! From the bottom up:
//!
//! - [`ptr`], [`lock`], [`words`], [`mod@wire`]: remote pointers and links, lock words, pages as words, values as words.
//! - [`sync`], [`clock`], [`buffer`], [`region`], [`memory`]: atomics that loom can replace, time, registered local memory,
//!   the memory of a memory server.
//! - [`connection`], [`endpoint`], [`gather`], [`listener`]: posts and completions, and the memory that a worker and a memory server
//!   open to each other for messages.
//! - [`mod@fabric`]: all that a fabric has to be.
//! - [`mem`], `verbs` (with the feature of that name), [`faulty`], [`mortal`]: memory mapped into the process or shared by
//!   several; RDMA; any fabric with failures from a seed; any fabric that dies.
//!
//! A fabric knows nothing of what stands in a region: whoever serves one says how it is formatted.
//!
//! ```
//! use farlink_fabric::{ptr::{Link, RemotePtr, ServerId}, size_class::SizeClass};
//!
//! // A page of 256 B on memory server 1, and the word that leads to it from another page.
//! let at = RemotePtr::new(ServerId::new(1).unwrap(), 4096)?;
//! let class = SizeClass::of_bytes(256).unwrap();
//! let link = Link::to(at, class);
//! assert_eq!(Link::from_word(link.word()).remote(), Some((at, class)));
//! # Ok::<(), farlink_fabric::ptr::PtrError>(())
//! ```

pub mod buffer;
pub mod clock;
pub mod connection;
mod cut;
pub mod endpoint;
pub mod error;
pub mod fabric;
pub mod faulty;
pub mod gather;
pub mod hash;
pub mod listener;
pub mod lock;
mod mapped;
pub mod mem;
pub mod memory;
pub mod mortal;
pub mod ptr;
pub mod region;
pub mod size_class;
pub mod sync;
#[cfg(feature = "verbs")]
pub mod verbs;
pub mod wire;
pub mod words;

pub use self::{
    buffer::LocalKey,
    endpoint::{Capabilities, Completion, Done, Endpoint, Request, Ticket, Verb},
    error::Error,
    fabric::{Fabric, Liveness, OwnerClaim},
};
