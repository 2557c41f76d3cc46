//! Link-based structures in disaggregated memory, written once over [`Access`](farlink_runtime::access::Access).
//!
//! - [`btree`]: a B+-tree of u64 keys and values.
//! - [`bwtree`]: a Bw-tree of u64 keys and values, without locks.
//! - [`skiplist`]: a skip list of u64 keys and values.
//! - [`rtree`]: an R*-tree of rectangles.
//! - [`map`]: what ordered maps have in common.
//!
//! ```
//! use std::sync::Arc;
//! use farlink_runtime::{compute::{ComputeOptions, ComputeServer}, error::Error, fabric::mem::MemOptions, server};
//! use farlink_structures::btree::{BTree, BTreeOptions};
//!
//! let cluster = server::in_process(2, 16 << 20, MemOptions::default())?;
//! let compute = ComputeServer::join(Arc::new(cluster), ComputeOptions::default())?;
//! let worker = compute.worker()?;
//! worker.block_on(async {
//!     let tree = BTree::create(&worker, "ages", BTreeOptions::default()).await?;
//!     tree.insert(7, 70).await?;
//!     assert_eq!(tree.get(7).await?, Some(70));
//!     Ok::<(), Error>(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

pub mod btree;
pub mod bwtree;
pub mod map;
pub mod rtree;
pub mod skiplist;

pub use btree::BTree;
pub use bwtree::BwTree;
pub use rtree::RTree;
pub use skiplist::SkipList;

/// The snippets of the README compile.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Those of the guide's chapter on the R-tree, too.
#[cfg(doctest)]
#[doc = include_str!("../../docs/src/rtree.md")]
struct RTreeGuide;

/// An operation runs over accesses to its own structure alone:
///
/// ```
/// use farlink_runtime::{error::Error, one_sided::OneSided, operation::Run};
/// use farlink_structures::{btree::Tree, map::ops::Get};
///
/// async fn get(tree: &OneSided<Tree>, get: &Get<Tree>) -> Result<Option<u64>, Error> {
///     tree.execute(get).await
/// }
/// ```
///
/// ```compile_fail,E0271
/// use farlink_runtime::{error::Error, one_sided::OneSided, operation::Run};
/// use farlink_structures::{btree::Tree, map::ops::Get, skiplist::List};
///
/// async fn get(list: &OneSided<List>, get: &Get<Tree>) -> Result<Option<u64>, Error> {
///     list.execute(get).await
/// }
/// ```
#[cfg(doctest)]
struct OneStructure;
