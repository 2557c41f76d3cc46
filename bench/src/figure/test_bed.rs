//! The test bed of all figures: memory servers inside this process, which may carry out operations on modelled processors.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use core_affinity::CoreId;
use farlink_offload::ship::{HoldReply, Registry, ShipOptions, ShipServer};
use farlink_runtime::access::Plugin as _;
use farlink_runtime::compute::{ComputeOptions, ComputeServer};
use farlink_runtime::fabric::Fabric as _;
use farlink_runtime::fabric::listener::ListenOptions;
use farlink_runtime::messaging::{ServeMessages, Wait};
use farlink_runtime::one_sided::Proof;
use farlink_runtime::ptr::ServerId;
use farlink_runtime::structure::Structure;
use farlink_runtime::{
    fabric::mem::{MemFabric, MemOptions},
    server::in_process,
};
use farlink_structures::btree::{BTree, BTreeOptions, Report, Tree};
use farlink_structures::rtree;

use crate::cluster_view;
use crate::report::CheckRow;

/// Room on each memory server beyond the trees: its tables, and what compute servers lease and do not use.
const SPARE_BYTES: u64 = 64 << 20;
/// How long a memory server may give no sign of life.
const ANSWER_WAIT: Duration = Duration::from_secs(60);

/// Memory servers.
#[derive(Debug)]
pub(crate) struct TestBed {
    fabric: Arc<MemFabric>,
}

/// Threads of memory servers that carry out operations.
#[derive(Debug)]
pub(crate) struct Processors(Vec<ShipServer>);

impl Processors {
    /// Pages that operations have looked at.
    pub(crate) fn pages_read(&self) -> u64 {
        self.0.iter().map(|server| server.counts().pages_read).sum()
    }
}

impl TestBed {
    /// So many memory servers, each with room for so many bytes of trees.
    pub(crate) fn start(memory_servers: usize, tree_bytes: u64, options: MemOptions) -> anyhow::Result<Self> {
        let bytes = (tree_bytes + SPARE_BYTES).next_multiple_of(1 << 20);
        let fabric = in_process(memory_servers, bytes, options)
            .with_context(|| format!("{memory_servers} memory servers of {bytes} bytes; try fewer --keys"))?;
        Ok(Self { fabric: Arc::new(fabric) })
    }

    /// A compute server of its own.
    pub(crate) fn join(&self, seed: u64) -> anyhow::Result<ComputeServer> {
        self.join_with(ComputeOptions { seed, ..ComputeOptions::default() })
    }

    /// The memory servers are threads beside it, which on a busy machine may get no turn for long.
    pub(crate) fn join_with(&self, options: ComputeOptions) -> anyhow::Result<ComputeServer> {
        Ok(ComputeServer::join(self.fabric.clone(), ComputeOptions { answer_wait: ANSWER_WAIT, ..options })?)
    }

    /// Loads a tree. Nothing but its pages takes memory that grows with the entries.
    pub(crate) fn load(
        &self,
        name: &str,
        options: BTreeOptions,
        entries: impl IntoIterator<Item = (u64, u64)>,
        fill: f64,
    ) -> anyhow::Result<Structure> {
        let compute = self.join(0)?;
        let worker = compute.worker()?;
        worker.block_on(async {
            let tree = BTree::create(&worker, name, options).await?;
            tree.bulk_load(entries, fill).await?;
            Ok(tree.structure().clone())
        })
    }

    /// Has every memory server carry out operations: each on so many modelled processors, which take so long for a page. What
    /// is modelled is waited for, not worked, and all threads that serve share one core: two cores suffice.
    pub(crate) fn serve(&self, processors: usize, page: Duration, seed: u64) -> anyhow::Result<Processors> {
        let messages = ServeMessages { wait: Wait::Poll, seed, ..ServeMessages::default() };
        let start_all = || -> anyhow::Result<Processors> {
            // Threads stay on the core of the one that starts them.
            stay_on_core(1);
            self.start_serving(messages, &|| Some(modelled(processors, page)))
        };
        thread::scope(|scope| scope.spawn(start_all).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }

    /// The same with one thread each, which carries operations out at once and sleeps in between: where nothing is timed.
    pub(crate) fn serve_at_once(&self, seed: u64) -> anyhow::Result<Processors> {
        self.start_serving(ServeMessages { wait: Wait::Event, seed, ..ServeMessages::default() }, &|| None)
    }

    fn start_serving(
        &self,
        messages: ServeMessages,
        hold: &dyn Fn() -> Option<HoldReply>,
    ) -> anyhow::Result<Processors> {
        let member = Arc::new(self.join(messages.seed)?);
        let start = |server: usize| {
            let server = u16::try_from(server).ok().and_then(ServerId::new).context("too many memory servers")?;
            let options = ShipOptions { messages, hold: hold() };
            let (listener, member) = (self.fabric.listen(server, &ListenOptions::default())?, Arc::clone(&member));
            let memory = self.fabric.memory(server)?;
            Ok(ShipServer::start(
                listener,
                memory,
                Registry::new().with::<Tree>().with::<rtree::Tree>(),
                &options,
                move || Ok(Arc::clone(&member)),
            )?)
        };
        (0..self.fabric.servers()).map(start).collect::<anyhow::Result<_>>().map(Processors)
    }

    /// A tree's look at itself, past all caches: take it when they are flushed.
    pub(crate) fn report(&self, name: &str) -> anyhow::Result<Report> {
        let compute = self.join(0)?;
        let worker = compute.worker()?;
        Ok(worker.block_on(async { BTree::open(&worker, name, Proof::Checksum).await?.check().await })?)
    }

    /// The check of a tree in parts, which together hold so many keys: figures insert and remove nothing.
    pub(crate) fn check(&self, parts: &[String], keys: u64) -> anyhow::Result<CheckRow> {
        let (mut entries, mut row) = (0, None);
        for part in parts {
            let report = self.report(part)?;
            entries += report.entries;
            // The first that is not sound, else the last.
            row = row
                .filter(|row: &CheckRow| !row.ok)
                .or_else(|| Some(cluster_view::check_row(Tree::NAME, part, &report)));
        }
        let mut row = row.context("a tree has parts")?;
        if row.ok && entries != keys {
            (row.ok, row.problem) = (false, Some(format!("{entries} keys were found, {keys} were loaded")));
        }
        Ok(row)
    }
}

/// Holds the reply to an operation until one of so many processors has had time for the pages that it has read.
fn modelled(processors: usize, page: Duration) -> HoldReply {
    let free_at = Mutex::new(vec![Instant::now(); processors.max(1)]);
    Arc::new(move |pages| {
        let mut free_at = free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let first = free_at.iter_mut().min();
        let due = first.map_or(now, |free_at| {
            *free_at = (*free_at).max(now) + page * pages;
            *free_at
        });
        Box::pin(poll_fn(move |cx| {
            if Instant::now() >= due {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }))
    })
}

/// Keeps the calling thread on one of the cores that the program may use, if it has several: two threads on one core would
/// measure the scheduler.
pub(crate) fn stay_on_core(number: usize) {
    // Of the first thread that comes: those that it starts later may use no more than it does by then.
    static CORES: OnceLock<Vec<CoreId>> = OnceLock::new();
    let cores = CORES.get_or_init(|| core_affinity::get_core_ids().unwrap_or_default());
    if let (Some(&core), true) = (cores.get(number), cores.len() > 1) {
        core_affinity::set_for_current(core);
    }
}
