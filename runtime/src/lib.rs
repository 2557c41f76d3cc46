//! farlink's runtime: link-based data structures whose nodes live in disaggregated memory.
//!
//! Memory servers hold pages; compute servers run operations on them; a fabric joins the two. From the bottom up:
//!
//! - [`ptr`], [`lock`], [`page`], [`words`]: what stands in remote memory. Remote pointers, the lock word, the header and
//!   the checksum of a page.
//! - [`fabric`]: posts and completions, and the `mem` fabric (memory mapped into the process, or shared by several).
//! - [`layout`], [`server`]: a memory server's region, and the process that serves it.
//! - [`compute`], [`epoch`], [`pages`]: a compute server's membership, the reuse of freed pages, allocation.
//! - [`worker`]: one thread with many operations in flight.
//! - [`messaging`]: requests that a memory server's threads answer.
//! - [`access`], [`one_sided`], [`operation`], [`structure`], [`catalog`]: how a structure's code reaches pages.
//! - [`audit`]: which pages a structure owns, and which are lost.
//!
//! ```
//! use std::sync::Arc;
//! use farlink_runtime::{catalog, compute::{ComputeOptions, ComputeServer}, fabric::mem::{MemFabric, MemOptions}};
//!
//! let cluster = MemFabric::in_process(2, 16 << 20, MemOptions::default())?;
//! let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
//! let worker = compute.worker()?;
//! assert!(worker.block_on(catalog::list(&worker))?.is_empty());
//! # Ok::<(), farlink_runtime::error::Error>(())
//! ```

pub mod access;
pub mod audit;
pub mod buffer;
pub mod catalog;
pub mod change;
pub mod clock;
pub mod compute;
pub mod epoch;
pub mod error;
pub mod fabric;
pub mod interrupt;
pub mod layout;
pub mod local_locks;
pub mod lock;
pub mod messaging;
pub mod one_sided;
pub mod operation;
pub mod page;
pub mod pages;
pub mod ptr;
pub mod report;
pub mod server;
pub mod size_class;
pub mod structure;
pub mod sync;
pub mod wire;
pub mod words;
pub mod worker;
