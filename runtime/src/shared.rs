//! What the workers of a compute server share.

use std::{collections::HashSet, time::Duration};

use crate::{
    counters::Counters,
    dropped_log::DroppedLog,
    epoch::{Epochs, round::Member},
    error::Error,
    fabric::{Error as FabricError, Fabric, OwnerClaim},
    free_pages::{ChunkClasses, SharedPages},
    last_out::LastOut,
    layout::Geometry,
    local_locks::LocalLocks,
    lock::OwnerId,
    page::StructureId,
    ptr::RemotePtr,
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, lock},
    tenure::Tenures,
};

/// A compute server, but for its threads.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) fabric: Arc<dyn Fabric>,
    pub(crate) owner: OwnerId,
    pub(crate) geometry: Vec<Geometry>,
    pub(crate) chunk_classes: ChunkClasses,
    pub(crate) epoch: Epochs,
    pub(crate) pages: SharedPages,
    pub(crate) locks: LocalLocks,
    /// The same for words of the layout: chunks, and where lists of rings begin.
    pub(crate) layout_locks: LocalLocks,
    pub(crate) member: Member,
    /// The number of the next record.
    pub(crate) sequence: AtomicU64,
    /// The numbers of the logs that are written by some cache.
    pub(crate) logs: Mutex<HashSet<u64>>,
    /// Logs that were dropped, and whose segments are to be used again.
    pub(crate) dropped_logs: Mutex<Vec<DroppedLog>>,
    /// Rings that no worker uses.
    pub(crate) idle_rings: Mutex<Vec<RemotePtr>>,
    pub(crate) seed: u64,
    /// Pages that one operation has on their way at a time, at most.
    pub(crate) window: usize,
    /// How long a lock of another one that lives is waited for.
    pub(crate) lock_wait: Option<Duration>,
    /// How long a memory server may give no sign of life while it is asked something.
    pub(crate) answer_wait: Duration,
    pub(crate) workers_made: AtomicU64,
    /// Who is there yet. The last one leaves the cluster.
    pub(crate) last_out: LastOut,
    pub(crate) past: Mutex<Counters>,
    pub(crate) claim: Mutex<Option<Box<dyn OwnerClaim>>>,
    /// Structures that it was making or dropping, whose pages are yet to be freed.
    pub(crate) unfinished: Mutex<HashSet<StructureId>>,
    /// It has taken the slot of a dead one, and what that one has left may not be finished.
    pub(crate) displaces: AtomicBool,
    /// It was taken for dead, and knows.
    is_fallen: AtomicBool,
    /// What it has of the structures that it uses.
    pub(crate) tenures: std::sync::Arc<Tenures>,
    /// Leaves the cluster from the calling thread.
    leave: fn(&Arc<Self>),
}

impl Shared {
    pub(crate) fn new(
        fabric: &Arc<dyn Fabric>,
        owner: OwnerId,
        geometry: Vec<Geometry>,
        (seed, window, lock_wait, answer_wait): (u64, usize, Option<Duration>, Duration),
        member: Member,
        leave: fn(&Arc<Self>),
    ) -> Self {
        Self {
            fabric: Arc::clone(fabric),
            owner,
            chunk_classes: ChunkClasses::new(geometry.len()),
            geometry,
            epoch: Epochs::new(),
            pages: SharedPages::default(),
            locks: LocalLocks::new(),
            layout_locks: LocalLocks::new(),
            member,
            sequence: AtomicU64::new(1),
            logs: Mutex::default(),
            dropped_logs: Mutex::default(),
            idle_rings: Mutex::default(),
            seed,
            window: window.max(1),
            lock_wait,
            answer_wait,
            workers_made: AtomicU64::new(0),
            last_out: LastOut::default(),
            past: Mutex::new(Counters::default()),
            claim: Mutex::new(None),
            unfinished: Mutex::default(),
            displaces: AtomicBool::new(false),
            is_fallen: AtomicBool::new(false),
            tenures: std::sync::Arc::default(),
            leave,
        }
    }

    /// Whether it knows that it was taken for dead: then nothing of it goes out any more.
    #[inline]
    pub(crate) fn is_fallen(&self) -> bool {
        self.is_fallen.load(Ordering::Acquire)
    }

    /// To be asked when a request has failed or a connection is lost, and now and then. Who finds out that others count this compute
    /// server as dead ends all that it has: what is cached may be old.
    ///
    /// # Errors
    /// [`TakenForDead`](FabricError::TakenForDead).
    pub(crate) fn check_standing(&self) -> Result<(), Error> {
        if !self.is_fallen() {
            if lock(&self.claim).as_ref().is_none_or(|claim| claim.holds()) {
                return Ok(());
            }
            tracing::warn!(owner = %self.owner, "taken for dead by others; nothing is done any more");
            self.fall();
        }
        Err(self.fallen().into())
    }

    /// Ends all that it has, as if others had taken it for dead: they take over once its process is gone.
    pub(crate) fn fall(&self) {
        self.is_fallen.store(true, Ordering::Release);
        self.tenures.end_all();
    }

    pub(crate) fn fallen(&self) -> FabricError {
        FabricError::TakenForDead { owner: self.owner }
    }

    /// A worker is gone; these are its counts.
    pub(crate) fn worker_ended(this: &Arc<Self>, counters: Counters) {
        *lock(&this.past) += counters;
        if this.last_out.worker_ended() {
            (this.leave)(this);
        }
    }

    /// Whoever holds the compute server is gone, and nobody else does its maintenance.
    pub(crate) fn abandon(this: &Arc<Self>) {
        if this.last_out.abandon() {
            (this.leave)(this);
        }
    }

    /// The next number of a record, a batch or a log.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.sequence.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn has_workers(&self) -> bool {
        self.last_out.has_workers()
    }
}
