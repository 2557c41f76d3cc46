//! Clusters for tests: how they are made ([`crate::backend`] says on what), joined, filled and checked.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use farlink_runtime::{
    audit,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{Fabric, mem::MemOptions},
    one_sided::OneSided,
    server::ServeOptions,
    worker::Worker,
};
use farlink_structures::btree::{BTree, BTreeOptions, Report};
use tempfile::TempDir;

/// As fast as memory.
pub const FAST: MemOptions = MemOptions {
    latency_ns: 0,
    bandwidth_bytes_per_s: 0,
    nasty: false,
    ordered_writes: true,
    atomic_against_writes: true,
};

/// All that a reliable connection permits, on purpose: torn READs and WRITEs, late completions.
pub const NASTY: MemOptions = MemOptions { nasty: true, ..FAST };

/// [`NASTY`], without an order among WRITEs and with atomics that are not atomic against WRITEs.
pub const WEAK: MemOptions = MemOptions { ordered_writes: false, atomic_against_writes: false, ..NASTY };

/// A directory for a cluster's files: in memory where the system has such a file system.
///
/// # Errors
/// If no directory can be made.
pub fn scratch() -> std::io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("farlink-tests-");
    builder.tempdir_in("/dev/shm").or_else(|_| builder.tempdir())
}

/// Joins a cluster as a compute server whose maintenance is a thread of its own.
///
/// # Errors
/// As [`ComputeServer::join`].
pub fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<ComputeServer, Error> {
    ComputeServer::join(Arc::clone(fabric), ComputeOptions { seed, ..ComputeOptions::default() })
}

/// Joins a cluster as a compute server whose maintenance is up to the test.
///
/// # Errors
/// As [`ComputeServer::join`].
pub fn join_manual(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<ComputeServer, Error> {
    ComputeServer::join(Arc::clone(fabric), ComputeOptions { seed, maintenance: Maintenance::Manual })
}

/// What one memory server of a test cluster serves.
pub fn serve_options(dir: &Path, server: usize, servers: usize, bytes: u64) -> ServeOptions {
    ServeOptions { dir: PathBuf::from(dir), server, servers, bytes: Some(bytes), ephemeral: false }
}

/// Makes an empty tree, as a compute server that leaves again.
///
/// # Errors
/// As [`BTree::create`].
pub fn create_tree(fabric: &Arc<dyn Fabric>, name: &str, options: BTreeOptions) -> Result<(), Error> {
    with_worker(fabric, |worker| worker.block_on(BTree::create(worker, name, options)).map(drop))
}

/// Fills an empty tree with entries in the order of their keys, as a compute server that leaves again.
///
/// # Errors
/// As [`BTree::bulk_load`].
pub fn load_tree(
    fabric: &Arc<dyn Fabric>,
    name: &str,
    entries: impl IntoIterator<Item = (u64, u64)>,
    fill: f64,
) -> Result<(), Error> {
    with_worker(fabric, |worker| {
        worker.block_on(async {
            let tree = BTree::<OneSided>::open(worker, name, Default::default()).await?;
            tree.bulk_load(entries, fill).await.map(drop)
        })
    })
}

/// Bytes in use that are not pages of the one structure that `report` is of: 0 once all have left.
///
/// # Errors
/// If the fabric fails.
pub fn unaccounted_bytes(fabric: &Arc<dyn Fabric>, report: &Report) -> Result<u64, Error> {
    let memory = with_worker(fabric, |worker| worker.block_on(audit::memory(worker)))?;
    Ok(memory.used_bytes().abs_diff(report.bytes()))
}

/// Checks a tree, as a compute server that joins for that and leaves again.
///
/// # Errors
/// As [`BTree::open`] and [`BTree::check`].
pub fn check_tree(fabric: &Arc<dyn Fabric>, name: &str) -> Result<Report, Error> {
    with_worker(fabric, |worker| {
        worker.block_on(async { BTree::<OneSided>::open(worker, name, Default::default()).await?.check().await })
    })
}

/// Runs `f` with the one worker of a compute server that joins for that and leaves again.
///
/// # Errors
/// If it cannot join, or as `f`.
pub fn with_worker<T, E: From<Error>>(
    fabric: &Arc<dyn Fabric>,
    f: impl FnOnce(&Worker) -> Result<T, E>,
) -> Result<T, E> {
    let compute = join(fabric, 0)?;
    let worker = compute.worker()?;
    let result = f(&worker);
    drop(worker);
    drop(compute);
    result
}
