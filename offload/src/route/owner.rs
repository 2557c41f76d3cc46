//! An owner's side: threads that carry out what others send, over the owner's cache.

use std::{
    cell::{Cell, RefCell},
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
};

use farlink_runtime::{
    access::{Operation, Operations, Plugin, Structure},
    clock::Clock,
    compute::ComputeServer,
    error::Error,
    fabric::listener::Listener,
    messaging::{MessageServer, Refusal, Request, Responder, ServeMessages, Service, Turn},
    one_sided::ownership,
    operation::{Code, Run},
    page::StructureId,
    wire::{Wire, decode_all},
    worker::{Handle, Worker},
};

use super::{ROUTE, router::Owns};
use crate::{
    cached::Cached,
    compute_cache::ComputeCache,
    ship::{At, CallHeader, ReplyHeader, unpanicked},
};

/// What an owner has done for others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct OwnerCounts {
    /// Operations carried out.
    pub done: u64,
    /// Operations on what it does not own.
    pub not_owned: u64,
    /// Operations that failed.
    pub failed: u64,
}

#[derive(Debug, Default)]
struct Counts {
    done: AtomicU64,
    not_owned: AtomicU64,
    failed: AtomicU64,
}

type Running = Pin<Box<dyn Future<Output = ()>>>;

/// A structure of which a compute server owns a part, for its threads to carry out others' operations on it.
pub struct Served {
    structure: Structure,
    open: Box<Open>,
}

/// Makes a thread's way to it.
type Open = dyn Fn(&Handle, &Arc<Counts>) -> Box<dyn Serve> + Send + Sync;

impl fmt::Debug for Served {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Served").field(&self.structure.name).finish()
    }
}

impl Served {
    /// What this cache owns of a structure, at any time.
    pub fn new<P: Plugin>(cache: &ComputeCache<P>, structure: &Structure) -> Self {
        let (cache, of) = (cache.clone(), structure.clone());
        let mut operations = HashMap::new();
        P::operations(&mut Naming::<P>(&mut operations));
        let operations = Arc::new(operations);
        let open = move |worker: &Handle, counts: &Arc<Counts>| -> Box<dyn Serve> {
            Box::new(Rc::new(Part {
                cache: cache.clone(),
                structure: of.clone(),
                worker: worker.clone(),
                owned: RefCell::default(),
                operations: Arc::clone(&operations),
                counts: Arc::clone(counts),
            }))
        };
        Self { structure: structure.clone(), open: Box::new(open) }
    }
}

/// One thread's way to what is owned of a structure.
trait Serve {
    fn begin(&self, call: CallHeader, words: &[u64], reply: Responder) -> Result<Running, (Refusal, Responder)>;
}

type Begin<P> = fn(&Rc<Part<P>>, &[u64], Responder) -> Result<Running, (Refusal, Responder)>;

struct Part<P: Plugin> {
    cache: ComputeCache<P>,
    structure: Structure,
    worker: Handle,
    /// Once something was.
    owned: RefCell<Option<Rc<Cached<P>>>>,
    operations: Arc<HashMap<Code, Begin<P>>>,
    counts: Arc<Counts>,
}

struct Naming<'a, P: Plugin>(&'a mut HashMap<Code, Begin<P>>);

impl<P: Plugin> Operations<P> for Naming<'_, P> {
    fn add<O: Operation<Plugin = P>>(&mut self) -> &mut Self {
        let before = self.0.insert(Code::of::<O>(), begin::<O>);
        assert!(before.is_none(), "{} has two operations named {}", P::NAME, O::NAME);
        self
    }
}

impl<P: Plugin> Serve for Rc<Part<P>> {
    fn begin(&self, call: CallHeader, words: &[u64], reply: Responder) -> Result<Running, (Refusal, Responder)> {
        match self.operations.get(&call.code) {
            Some(begin) => begin(self, words, reply),
            None => Err((Refusal::UnknownKind, reply)),
        }
    }
}

fn begin<O: Operation>(
    part: &Rc<Part<O::Plugin>>,
    words: &[u64],
    reply: Responder,
) -> Result<Running, (Refusal, Responder)> {
    let Ok(mut operation) = decode_all::<O>(words) else { return Err((Refusal::Malformed, reply)) };
    operation.limit();
    let part = Rc::clone(part);
    Ok(Box::pin(async move { part.carry_out(operation, reply).await }))
}

impl<P: Plugin> Part<P> {
    /// The access to what is owned, if anything is.
    fn owned(&self) -> Result<Option<Rc<Cached<P>>>, Error> {
        let mut owned = self.owned.borrow_mut();
        if owned.as_ref().is_none_or(|owned| !owned.is_held()) {
            *owned = self.cache.owned(&self.worker, &self.structure)?.map(Rc::new);
        }
        Ok(owned.clone())
    }

    async fn carry_out<O: Operation<Plugin = P>>(&self, operation: O, reply: Responder) {
        let outcome = self.outcome(operation).await;
        let count = match &outcome {
            Ok(_) => &self.counts.done,
            Err(ReplyHeader::NotOwned(_)) => &self.counts.not_owned,
            Err(_) => &self.counts.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let done = ReplyHeader::Done { changed: Vec::new() };
        ReplyHeader::reply(outcome.map(|output| (done, output)), 0, reply);
    }

    async fn outcome<O: Operation<Plugin = P>>(&self, operation: O) -> Result<O::Output, ReplyHeader> {
        let not_owned = || ReplyHeader::NotOwned(ownership::seen_epoch(&self.worker, &self.structure));
        let owned = self.owned().map_err(ReplyHeader::of)?;
        let owned = owned.filter(|owned| owned.owns(&operation.scope())).ok_or_else(not_owned)?;
        match unpanicked(owned.execute(&operation)).await {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(Error::GivenUp { .. })) => Err(not_owned()),
            Ok(Err(error)) => Err(ReplyHeader::of(error)),
            Err(why) => {
                tracing::error!(operation = O::NAME, plugin = P::NAME, why, "an operation that was sent here panicked");
                Err(ReplyHeader::of(Error::Panicked { what: "an operation at its owner", why }))
            }
        }
    }
}

/// The threads of a compute server that carry out what others send. Dropping it stops them: to be done before the cache is closed
/// for good, and after others know who owns what it has owned.
pub struct OwnerServer {
    messages: MessageServer,
    counts: Arc<Counts>,
}

impl fmt::Debug for OwnerServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnerServer").field("messages", &self.messages).finish_non_exhaustive()
    }
}

impl OwnerServer {
    /// Starts a thread for each endpoint of the listener, which is the compute server's ([`ComputeServer::listen`]).
    ///
    /// # Errors
    /// If a thread, a worker or an endpoint cannot be had.
    pub fn start(
        listener: Box<dyn Listener>,
        compute: &Arc<ComputeServer>,
        served: Vec<Served>,
        options: &ServeMessages,
    ) -> Result<Self, Error> {
        let counts = Arc::<Counts>::default();
        let (compute, served, shared) = (Arc::clone(compute), Arc::new(served), Arc::clone(&counts));
        let messages = MessageServer::start(listener, options, move |_| {
            let worker = compute.worker_with(Clock::monotonic())?;
            let of = |served: &Served| (served.structure.id, (served.open)(&worker, &shared));
            let structures = served.iter().map(of).collect();
            Ok(Box::new(OwnerService { structures, worker, owes_turn: Cell::new(false) }))
        })?;
        Ok(Self { messages, counts })
    }

    /// What it has done so far.
    pub fn counts(&self) -> OwnerCounts {
        let Counts { done, not_owned, failed } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        OwnerCounts { done: of(done), not_owned: of(not_owned), failed: of(failed) }
    }

    /// The threads that take the messages.
    pub fn messages(&self) -> &MessageServer {
        &self.messages
    }
}

/// One thread's service.
struct OwnerService {
    // Before the worker, which they belong to.
    structures: HashMap<StructureId, Box<dyn Serve>>,
    worker: Worker,
    /// Whether operations were carried out since the worker's last turn.
    owes_turn: Cell<bool>,
}

impl Service for OwnerService {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        if request.kind() != ROUTE {
            return reply.refuse(Refusal::UnknownKind);
        }
        let mut words = request.words();
        let call = match CallHeader::decode(&mut words) {
            Ok(call) if call.start == At::Root => call,
            _ => return reply.refuse(Refusal::Malformed),
        };
        let Some(structure) = self.structures.get(&call.structure) else {
            return reply.send_with(|to| ReplyHeader::NotOwned(0).encode(0, to));
        };
        let mut running = match structure.begin(call, words, reply) {
            Ok(running) => running,
            Err((why, reply)) => return reply.refuse(why),
        };
        // Most are done at once, without being tasks. The others are polled again as such, whoever wakes them now.
        if running.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            self.worker.spawn(running);
        }
        self.owes_turn.set(true);
    }

    fn turn(&mut self) -> Turn {
        let is_running = self.worker.has_other_tasks();
        // An operation that was done at once counts as running until the worker's turn ends.
        if is_running || self.owes_turn.take() {
            self.worker.turn();
        }
        if is_running { Turn::Busy } else { Turn::Idle }
    }
}
