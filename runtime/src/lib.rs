//! farlink's runtime: link-based data structures whose nodes live in disaggregated memory.
//!
//! Memory servers hold pages; compute servers run operations on them; a fabric joins the two. From the bottom up:
//!
//! - [`fabric`], a crate of its own: posts and completions, and the fabrics. Its [`buffer`], [`clock`], [`lock`], [`ptr`],
//!   [`sync`], [`mod@wire`] and [`words`] are found here, too.
//! - [`page`]: the header and the checksum of a page.
//! - [`layout`], [`server`]: a memory server's region, and the process that serves it.
//! - [`compute`], [`epoch`], [`pages`]: a compute server's membership, the reuse of freed pages, allocation.
//! - [`worker`]: one thread with many operations in flight.
//! - [`messaging`], a crate of its own: requests that a memory server's threads answer.
//! - [`access`], [`one_sided`], [`operation`], [`structure`], [`catalog`]: how a structure's code reaches pages.
//! - [`partition`], [`tenure`], [`one_sided::ownership`]: who owns which part of a structure, or writes it without owning any.
//! - [`versioned`], [`gate`]: values that change seldom and are read without a lock; what is shut before something is handed over.
//! - [`last_out`]: who of a compute server goes last, and leaves the cluster.
//! - [`redo`], `recovery`: records of changes, and what becomes of those of compute servers that have died.
//! - [`fencing`]: what those had shipped ends first.
//! - [`audit`]: which pages a structure owns, and which are lost.
//!
//! ```
//! use std::sync::Arc;
//! use farlink_runtime::{catalog, compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, server};
//!
//! let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
//! let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
//! let worker = compute.worker()?;
//! assert!(worker.block_on(catalog::list(&worker))?.is_empty());
//! # Ok::<(), farlink_runtime::error::Error>(())
//! ```

pub mod access;
pub mod audit;
pub mod catalog;
pub mod change;
pub mod chunk_classes;
pub mod compute;
mod counters;
mod dropped_log;
pub mod epoch;
pub mod error;
pub mod fencing;
#[cfg(loom)]
pub mod free_pages;
#[cfg(not(loom))]
mod free_pages;
pub mod gate;
pub mod interrupt;
pub mod last_out;
pub mod layout;
pub mod leaks;
pub mod local_locks;
pub mod one_sided;
pub mod operation;
pub mod page;
pub mod pages;
pub mod partition;
mod recovery;
pub mod redo;
pub mod remote;
pub mod report;
pub mod server;
mod shared;
pub mod structure;
pub mod tenure;
pub mod versioned;
pub mod worker;
pub mod write_ahead;

pub use farlink_fabric as fabric;
pub use farlink_fabric::{buffer, clock, lock, ptr, size_class, sync, wire, words};
pub use farlink_messaging as messaging;
