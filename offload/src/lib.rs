//! Where an operation runs: ways to reach a structure's pages that use a compute server's own memory.
//!
//! - [`Cached`]: the compute server owns a part of the structure, and caches all of it, leaves included; changed pages are
//!   written when they leave the cache. This is the design of DEX (VLDB 2024, sections 4 and 5).
//! - [`CachedInner`]: nobody owns anything; only inner pages are cached, leaves are read and changed one-sided under remote
//!   locks, and a cached page that turns out to be old is read anew. This is the scheme of Sherman (SIGMOD 2022).
//! - [`CachedMapping`]: the same for latch-free structures, whose logical pages stand behind words that are swapped; words and
//!   consolidated pages are cached, and a lookup reads one word (the mapping table of a Bw-tree, ICDE 2013).
//! - [`ship`]: operations are sent to the memory servers and run there.
//! - [`Remote`], [`ShardedRemote`]: all operations are; the coarse-grained design of Ziegler et al. (SIGMOD 2019).
//! - [`Hybrid`]: inner levels are searched there, leaves accessed one-sided; their hybrid design.
//! - [`Adaptive`]: each operation is sent as a whole, or done here, as a policy says; the client of Catfish (ICDCS 2019).
//! - [`Router`], [`OwnerServer`]: operations go to the compute servers that own what they are about.
//! - [`Engine`]: over [`Cached`], what is left of an operation is sent on a miss, if a policy says so (DEX, section 6).
//!
//! ```
//! use std::sync::Arc;
//! use farlink_offload::{CacheOptions, ComputeCache};
//! use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, fabric::mem::MemOptions, server};
//! use farlink_structures::btree::{BTree, BTreeOptions, KeyRange, Tree};
//!
//! let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
//! let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
//! // One for the compute server, and a handle for each of its workers.
//! let cache = ComputeCache::<Tree>::new(CacheOptions::new(1 << 20))?;
//! let worker = compute.worker()?;
//! worker.block_on(async {
//!     let tree = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
//!     let owned = cache.own(&worker, tree.structure().clone(), KeyRange::ALL).await?;
//!     let cached = BTree::over(owned);
//!     cached.insert(7, 70).await?;
//!     assert_eq!(cached.get(7).await?, Some(70));
//!     // What is written others may read, who say that old data would do.
//!     cached.access().flush().await?;
//!     assert_eq!(tree.clone().beside_owners().get(7).await?, Some(70));
//!     // Once it is given up, it is everybody's.
//!     cached.access().close().await?;
//!     assert_eq!(tree.get(7).await?, Some(70));
//!     Ok::<_, farlink_runtime::error::Error>(())
//! })?;
//! # Ok::<_, farlink_runtime::error::Error>(())
//! ```

mod access_mode;
mod adaptive;
mod cached;
mod compute_cache;
mod durability;
mod engine;
mod hybrid;
mod inner;
mod mapping;
mod on_server;
mod policies;
pub mod policy;
mod remote;
pub mod route;
pub mod ship;
mod store;

pub use farlink_cache::{Admission, CacheOptions, Counters, LEVELS, LevelCounters, Memory, ValueCounters};

pub use crate::{
    access_mode::{AccessMode, UnknownAccessMode},
    adaptive::Adaptive,
    cached::{Cached, CachedPage, CachedPages},
    compute_cache::ComputeCache,
    durability::{Durability, UnknownDurability},
    engine::{Engine, EngineOptions},
    hybrid::Hybrid,
    inner::CachedInner,
    mapping::{CachedMapping, MappingCache},
    policies::{OffloadCounts, Policies},
    remote::{Remote, ShardKey, Sharded, ShardedRemote},
    route::{Holdings, OwnerServer, Router, Routes, Served},
};

/// The snippets of the guide's chapter compile.
#[cfg(doctest)]
#[doc = include_str!("../../docs/src/offload.md")]
struct Guide;

#[cfg(doctest)]
#[doc = include_str!("../../docs/src/bwtree.md")]
struct GuideToTheBwTree;
