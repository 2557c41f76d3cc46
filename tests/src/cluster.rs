//! Clusters for tests: how they are made ([`crate::backend`] says on what), joined, filled and checked.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use farlink_children::Scratch;
use farlink_runtime::{
    audit, catalog,
    compute::{ComputeOptions, ComputeServer, Maintenance},
    error::Error,
    fabric::{Error as FabricError, Fabric, mem::MemOptions},
    messaging::Error as MessagingError,
    one_sided::{OneSided, Proof},
    server::ServeOptions,
    structure::StructurePlacement,
    worker::Worker,
};
use farlink_structures::{
    btree::{BTreeOptions, Tree},
    map::{Map, Report},
};

use crate::{
    deadlines::PATIENCE,
    of_structure,
    subject::{StructureName, Subject},
};

/// As fast as memory.
pub const FAST: MemOptions = MemOptions {
    latency_ns: 0,
    bandwidth_bytes_per_s: 0,
    nasty: false,
    ordered_writes: true,
    atomic_against_writes: true,
    atomic_against_cpu: true,
    gather_max: 32,
};

/// All that a reliable connection permits, on purpose: torn READs and WRITEs, late completions.
pub const NASTY: MemOptions = MemOptions { nasty: true, ..FAST };

/// [`NASTY`], without an order among WRITEs and with atomics that are atomic against nothing but each other.
pub const WEAK: MemOptions =
    MemOptions { ordered_writes: false, atomic_against_writes: false, atomic_against_cpu: false, ..NASTY };

/// A directory for a cluster's files: in memory where the system has such a file system.
///
/// # Errors
/// If no directory can be made.
pub fn scratch() -> std::io::Result<Scratch> {
    Scratch::new().map_err(std::io::Error::other)
}

/// Who waits for a memory server that gets no core: on a busy machine that may be for longer than users want to wait.
pub fn patient(seed: u64) -> ComputeOptions {
    ComputeOptions { seed, answer_wait: PATIENCE, ..ComputeOptions::default() }
}

/// Joins a cluster as a [patient] compute server whose maintenance is a thread of its own. A fabric that now and then refuses memory
/// is asked again.
///
/// # Errors
/// As [`ComputeServer::join`].
pub fn join(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<ComputeServer, Error> {
    again(|| ComputeServer::join(Arc::clone(fabric), patient(seed)))
}

/// Does what may be done twice again, some times, while a fabric fails.
///
/// # Errors
/// As what is done.
pub fn again<T>(step: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
    let mut outcome = step();
    for _ in 0..AGAIN_MAX {
        if !outcome.as_ref().is_err_and(is_passing) {
            break;
        }
        outcome = step();
    }
    outcome
}

/// [`again`], for what suspends.
///
/// # Errors
/// As what is done.
pub async fn again_async<T>(step: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut outcome = step().await;
    for _ in 0..AGAIN_MAX {
        if !outcome.as_ref().is_err_and(is_passing) {
            break;
        }
        outcome = step().await;
    }
    outcome
}

const AGAIN_MAX: usize = 50;

/// Whether a fabric that fails now and then is to blame.
fn is_passing(error: &Error) -> bool {
    let is_other = matches!(
        error,
        Error::Messaging(MessagingError::OutcomeUnknown { .. })
            | Error::Fabric(FabricError::ServerMissing { .. })
            | Error::NotRecorded { .. }
    );
    let Error::Fabric(error) = error else { return is_other };
    matches!(
        error,
        FabricError::ServerMissing { .. }
            | FabricError::RegistrationRefused { .. }
            | FabricError::RequestFailed { what: "CONNECT", .. }
    )
}

/// Joins a cluster as a [patient] compute server whose maintenance is up to the test.
///
/// # Errors
/// As [`ComputeServer::join`].
pub fn join_manual(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<ComputeServer, Error> {
    ComputeServer::join(Arc::clone(fabric), ComputeOptions { maintenance: Maintenance::Manual, ..patient(seed) })
}

/// What one memory server of a test cluster serves.
pub fn serve_options(dir: &Path, server: usize, servers: usize, bytes: u64) -> ServeOptions {
    ServeOptions { dir: PathBuf::from(dir), server, servers, bytes: Some(bytes), ephemeral: false, records: None }
}

/// Makes an empty map, as a compute server that leaves again.
///
/// # Errors
/// As [`Map::make`].
pub fn create<S: Subject>(fabric: &Arc<dyn Fabric>, name: &str, page_bytes: usize, proof: Proof) -> Result<(), Error> {
    create_at::<S>(fabric, name, page_bytes, proof, StructurePlacement::default())
}

/// [`create`], with a say in where its pages are.
///
/// # Errors
/// As [`Map::make_at`].
pub fn create_at<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    name: &str,
    page_bytes: usize,
    proof: Proof,
    placement: StructurePlacement,
) -> Result<(), Error> {
    let page_bytes = S::page_bytes(page_bytes);
    let make =
        |worker: &Worker| worker.block_on(Map::<S, _>::make_at(worker, name, page_bytes, proof, placement)).map(drop);
    with_worker(fabric, make)
}

/// Fills an empty map with entries in the order of their keys, as a compute server that leaves again.
///
/// # Errors
/// As [`Subject::load`].
pub fn load<S: Subject>(
    fabric: &Arc<dyn Fabric>,
    name: &str,
    entries: impl IntoIterator<Item = (u64, u64)>,
    fill: f64,
) -> Result<(), Error> {
    with_worker(fabric, |worker| {
        worker.block_on(async {
            let map = Map::<S, OneSided<S>>::open(worker, name, Proof::Checksum).await?;
            S::load(&map, entries, fill).await
        })
    })
}

/// [`create`] for a B+-tree.
///
/// # Errors
/// As [`Map::make`].
pub fn create_tree(fabric: &Arc<dyn Fabric>, name: &str, options: BTreeOptions) -> Result<(), Error> {
    create::<Tree>(fabric, name, options.page_bytes, options.proof)
}

/// Bytes in use that are not pages of the one structure that `report` is of: 0 once all have left.
///
/// # Errors
/// If the fabric fails.
pub fn unaccounted_bytes(fabric: &Arc<dyn Fabric>, report: &Report) -> Result<u64, Error> {
    let memory = with_worker(fabric, |worker| worker.block_on(audit::memory(worker)))?;
    Ok(memory.used_bytes().abs_diff(report.bytes))
}

/// Checks a map of whatever structure, as a compute server that joins for that and leaves again.
///
/// # Errors
/// As [`Map::open`] and [`Map::check`].
pub fn check_tree(fabric: &Arc<dyn Fabric>, name: &str) -> Result<Report, Error> {
    let compute = join(fabric, 0)?;
    let worker = compute.worker()?;
    worker.block_on(compute.settle(&worker))?;
    let which = worker.block_on(which(&worker, name))?;
    of_structure!(which, check(&worker, name))
}

fn check<S: Subject>(worker: &Worker, name: &str) -> Result<Report, Error> {
    worker.block_on(async { Map::<S, _>::open(worker, name, Proof::Checksum).await?.check().await })
}

/// All entries of a map of whatever structure.
///
/// # Errors
/// As [`Map::open`] and [`Map::get`].
pub fn entries(fabric: &Arc<dyn Fabric>, name: &str) -> Result<Vec<(u64, u64)>, Error> {
    with_worker(fabric, |worker| {
        let which = worker.block_on(which(worker, name))?;
        of_structure!(which, entries_of(worker, name))
    })
}

fn entries_of<S: Subject>(worker: &Worker, name: &str) -> Result<Vec<(u64, u64)>, Error> {
    worker.block_on(async {
        let map = Map::<S, _>::open(worker, name, Proof::Checksum).await?;
        map.range(..).take(usize::MAX).await
    })
}

async fn which(worker: &Worker, name: &str) -> Result<StructureName, Error> {
    let all = catalog::list(worker).await?;
    let kind = all.into_iter().find(|structure| structure.name == name).map(|structure| structure.kind);
    Ok(kind.and_then(|kind| kind.parse().ok()).unwrap_or_default())
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
