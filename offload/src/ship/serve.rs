//! The memory server's side: threads that carry out what is sent to them.
//!
//! A memory server that carries out operations is a member of the cluster: it allocates, frees and locks pages like a compute
//! server, under an incarnation of its own. It joins when the first operation comes, because it cannot before all memory
//! servers of the cluster run; on a thread of its own, while the operation waits.

use std::{
    any::Any,
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
};

use farlink_runtime::{
    access::{Plugin, Structure},
    catalog,
    clock::Clock,
    compute::ComputeServer,
    epoch,
    error::Error,
    fabric::listener::Listener,
    messaging::{ManualMessageServer, MessageServer, Refusal, Request, Responder, ServeMessages, Service, Turn},
    one_sided::OneSided,
    page::StructureId,
    server::LocalMemory,
    worker::{Handle, Worker},
};

use super::{
    Registry,
    joining::{Join, Joining},
    layout::{Failure, ReplyHeader, SHIP},
};

/// What the reply to an operation waits for; given the number of pages that the operation has read.
pub type HoldReply = Arc<dyn Fn(u32) -> Pin<Box<dyn Future<Output = ()>>> + Send + Sync>;

/// How shipped operations are served. The number of threads is the listener's number of endpoints.
#[derive(Clone, Default)]
pub struct ShipOptions {
    /// How messages are.
    pub messages: ServeMessages,
    /// Holds replies back, for tests and models of slow servers. Replies go at once by default.
    pub hold: Option<HoldReply>,
}

impl fmt::Debug for ShipOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShipOptions").field("messages", &self.messages).finish_non_exhaustive()
    }
}

/// What a memory server has done with shipped operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ShipCounts {
    /// Operations carried out.
    pub done: u64,
    /// Operations that were for the compute server to do.
    pub declined: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Pages that they have read.
    pub pages_read: u64,
}

impl std::ops::AddAssign for ShipCounts {
    fn add_assign(&mut self, other: Self) {
        self.done += other.done;
        self.declined += other.declined;
        self.failed += other.failed;
        self.pages_read += other.pages_read;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Declined,
    Failed,
}

#[derive(Debug, Default)]
struct Counts {
    outcomes: [AtomicU64; 3],
    pages_read: AtomicU64,
}

impl Counts {
    fn snapshot(&self) -> ShipCounts {
        let Self { outcomes: [done, declined, failed], pages_read } = self;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ShipCounts { done: of(done), declined: of(declined), failed: of(failed), pages_read: of(pages_read) }
    }
}

/// What the threads of one memory server share.
struct Host {
    registry: Registry,
    memory: LocalMemory,
    counts: Counts,
    hold: Option<HoldReply>,
    joining: Arc<Joining>,
    /// Whether it joins on a thread apart.
    joins_apart: bool,
}

impl Host {
    fn new(memory: LocalMemory, registry: Registry, options: &ShipOptions, join: Join, joins_apart: bool) -> Arc<Self> {
        let (hold, joining) = (options.hold.clone(), Arc::new(Joining::new(join)));
        Arc::new(Self { registry, memory, counts: Counts::default(), hold, joining, joins_apart })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.joining.finish();
    }
}

/// The threads of a memory server that carry out shipped operations. Dropping it stops them.
pub struct ShipServer {
    messages: MessageServer,
    host: Arc<Host>,
}

impl fmt::Debug for ShipServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShipServer").field("server", &self.host.memory.server()).finish_non_exhaustive()
    }
}

impl ShipServer {
    /// Starts a thread for each endpoint of the listener. `join` makes the memory server a member of its cluster; memory servers of
    /// one process can share a membership.
    ///
    /// # Errors
    /// If a thread or an endpoint cannot be had.
    pub fn start(
        listener: Box<dyn Listener>,
        memory: LocalMemory,
        registry: Registry,
        options: &ShipOptions,
        join: impl Fn() -> Result<Arc<ComputeServer>, Error> + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let host = Host::new(memory, registry, options, Box::new(join), true);
        let shared = Arc::clone(&host);
        let messages = MessageServer::start(listener, &options.messages, move |_| {
            Ok(ShipService::boxed(&shared, Clock::monotonic()))
        })?;
        Ok(Self { messages, host })
    }

    /// What it has done so far.
    pub fn counts(&self) -> ShipCounts {
        self.host.counts.snapshot()
    }

    /// The threads that take the messages.
    pub fn messages(&self) -> &MessageServer {
        &self.messages
    }
}

/// What a [`ShipServer`] does, without threads: on the thread of whoever turns it, at the time that a clock tells. For
/// simulators, which drive several machines on one thread.
pub struct ManualShipServer {
    messages: ManualMessageServer,
    host: Arc<Host>,
}

impl fmt::Debug for ManualShipServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManualShipServer").field("server", &self.host.memory.server()).finish_non_exhaustive()
    }
}

impl ManualShipServer {
    /// Serves all endpoints of the listener, as a member of the cluster that `compute` is.
    ///
    /// # Errors
    /// If an endpoint cannot be had.
    pub fn new(
        listener: Box<dyn Listener>,
        memory: LocalMemory,
        registry: Registry,
        options: &ShipOptions,
        compute: Arc<ComputeServer>,
        clock: &Clock,
    ) -> Result<Self, Error> {
        let host = Host::new(memory, registry, options, Box::new(move || Ok(Arc::clone(&compute))), false);
        let make = |_| Ok(ShipService::boxed(&host, clock.clone()));
        let messages = ManualMessageServer::new(listener, &options.messages, clock, make)?;
        Ok(Self { messages, host })
    }

    /// Takes what has come, lets operations go on, and sends what is ready. False if there was nothing to do. Does not wait.
    pub fn turn(&mut self) -> bool {
        self.messages.turn()
    }

    /// What it has done so far.
    pub fn counts(&self) -> ShipCounts {
        self.host.counts.snapshot()
    }
}

/// The words of a request, and where its reply goes.
type Waiting = (Vec<u64>, Responder);

/// One thread's service.
struct ShipService {
    host: Arc<Host>,
    clock: Clock,
    running: Option<(Worker, Rc<Thread>)>,
    /// The attempt to join that requests wait for, and those.
    waiting: Option<(u64, Vec<Waiting>)>,
}

impl ShipService {
    fn boxed(host: &Arc<Host>, clock: Clock) -> Box<dyn Service> {
        Box::new(Self { host: Arc::clone(host), clock, running: None, waiting: None })
    }

    fn begin(&self, words: &[u64], reply: Responder) {
        let Some((worker, thread)) = &self.running else { return };
        let Some(mut running) = thread.host.registry.begin(thread, words, reply) else { return };
        // Most are done at once, without being tasks. The others are polled again as such, whoever wakes them now.
        if running.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            worker.spawn(running);
        }
        thread.owes_turn.set(true);
    }

    /// Makes this thread's worker, if the memory server has joined; `None` while it joins.
    fn start(&mut self, attempt: Option<u64>) -> Option<Result<(), Failure>> {
        let joining = &self.host.joining;
        let joined = match attempt {
            Some(attempt) => joining.outcome(attempt)?,
            None => joining.join(),
        };
        let worker = joined.and_then(|compute| {
            let worker = compute.worker_with(self.clock.clone());
            worker.map_err(|error| Failure::of(&error))
        });
        Some(worker.map(|worker| {
            let thread = Rc::new(Thread {
                host: Arc::clone(&self.host),
                worker: (*worker).clone(),
                structures: RefCell::default(),
                owes_turn: Cell::new(false),
            });
            self.running = Some((worker, thread));
        }))
    }
}

impl Service for ShipService {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        if request.kind() != SHIP {
            return reply.refuse(Refusal::UnknownKind);
        }
        if self.running.is_none() {
            let joins_apart = self.host.joins_apart && self.host.joining.compute().is_none();
            if joins_apart || self.waiting.is_some() {
                let host = &self.host;
                let (_, waiting) = self.waiting.get_or_insert_with(|| (host.joining.begin(), Vec::new()));
                return waiting.push((request.words().to_vec(), reply));
            }
            if let Some(Err(failure)) = self.start(None) {
                return reply.send_with(|to| ReplyHeader::NotBegun(failure).encode(0, to));
            }
        }
        self.begin(request.words(), reply);
    }

    fn turn(&mut self) -> Turn {
        if let Some((attempt, _)) = self.waiting
            && let Some(started) = self.start(Some(attempt))
        {
            for (words, reply) in self.waiting.take().into_iter().flat_map(|(_, waiting)| waiting) {
                match &started {
                    Ok(()) => self.begin(&words, reply),
                    Err(failure) => reply.send_with(|to| ReplyHeader::NotBegun(failure.clone()).encode(0, to)),
                }
            }
        }
        let Some((worker, thread)) = &self.running else { return Turn::Idle };
        let is_running = worker.has_other_tasks();
        // An operation that was done at once counts as running until the worker's turn ends.
        if is_running || thread.owes_turn.take() {
            worker.turn();
        }
        if is_running { Turn::Busy } else { Turn::Idle }
    }
}

/// What the operations of one thread share.
pub(super) struct Thread {
    host: Arc<Host>,
    worker: Handle,
    /// An `Rc<OneSided>` for each, of its plug-in.
    structures: RefCell<HashMap<StructureId, Rc<dyn Any>>>,
    /// Whether operations were carried out, or a reply's pieces sent, since the worker's last turn.
    owes_turn: Cell<bool>,
}

/// Keeps the pieces of a reply until they are sent.
pub(super) struct Sending {
    pin: Option<epoch::Pin>,
    thread: Rc<Thread>,
}

impl Drop for Sending {
    fn drop(&mut self) {
        self.pin = None;
        // The worker says that it pins nothing any more when a turn of it ends.
        self.thread.owes_turn.set(true);
    }
}

impl Thread {
    /// Keeps what can be reached now from being reused until it is dropped.
    pub(super) fn sending(self: &Rc<Self>) -> Sending {
        Sending { pin: Some(self.worker.pin()), thread: Rc::clone(self) }
    }

    pub(super) fn memory(&self) -> LocalMemory {
        self.host.memory.clone()
    }

    /// Access to the structure that a request is about, if the catalog has it and it is one of the operation's plug-in.
    pub(super) async fn structure<P: Plugin>(&self, id: StructureId) -> Result<Option<Rc<OneSided<P>>>, Error> {
        if let Some(found) = self.structures.borrow().get(&id) {
            return Ok(Rc::clone(found).downcast().ok());
        }
        let all = catalog::list(&self.worker).await?;
        // Those that were dropped. Their ids do not come again.
        self.structures.borrow_mut().retain(|known, _| all.iter().any(|found| found.id == *known));
        let is_it = |found: &Structure| found.id == id && found.kind == P::NAME;
        let Some(structure) = all.into_iter().find(is_it) else { return Ok(None) };
        let found = Rc::new(OneSided::within(&self.worker, structure, self.host.memory.clone()));
        self.structures.borrow_mut().insert(id, Rc::<OneSided<P>>::clone(&found));
        Ok(Some(found))
    }

    /// Counts an operation, and waits until its reply may go.
    pub(super) async fn carried_out(&self, outcome: Outcome, pages_read: u32) {
        let counts = &self.host.counts;
        counts.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        counts.pages_read.fetch_add(pages_read.into(), Ordering::Relaxed);
        if let Some(hold) = &self.host.hold {
            hold(pages_read).await;
        }
    }
}
