//! Link-based structures in disaggregated memory, written once over [`Access`](farlink_runtime::access::Access).
//!
//! - [`btree`]: a B+-tree of u64 keys and values.

pub mod btree;

pub use btree::BTree;
