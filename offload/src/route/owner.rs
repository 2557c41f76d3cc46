//! An owner's side: threads that carry out what others send, over the owner's cache.

use std::{
    cell::Cell,
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
    lock::OwnerId,
    messaging::{Kind, MessageServer, Refusal, Request, Responder, ServeMessages, Service, Turn},
    one_sided::ownership,
    operation::{Code, Run},
    page::StructureId,
    wire::{Wire, decode_all},
    worker::{self, Handle, Worker},
};

use super::{
    ROUTE,
    balance::LOADS,
    holdings::{Here, Holdings},
    moves::{GIVE_UP, MoveHeader, SERVES, TAKE},
};
use crate::ship::{At, CallHeader, ReplyHeader, malformed, unpanicked, unpanicked_now};

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
    /// The regions that a compute server has of a structure, at any time.
    pub fn new<P: Plugin>(holdings: &Holdings<P>) -> Self {
        let (structure, holdings) = (holdings.structure().clone(), holdings.clone());
        let mut operations = HashMap::new();
        P::operations(&mut Naming::<P>(&mut operations));
        let operations = Arc::new(operations);
        let open = move |worker: &Handle, counts: &Arc<Counts>| -> Box<dyn Serve> {
            Box::new(Rc::new(Part {
                here: holdings.here(worker),
                structure: holdings.structure().clone(),
                worker: worker.clone(),
                operations: Arc::clone(&operations),
                counts: Arc::clone(counts),
            }))
        };
        Self { structure, open: Box::new(open) }
    }
}

/// One thread's way to what is owned of a structure.
trait Serve {
    /// Hands a region on, or takes it, or says how much there is to do.
    fn moves(&self, what: Kind, words: &[u64], reply: Responder) -> Result<Running, (Refusal, Responder)>;

    /// Carries out an operation.
    fn begin(&self, call: CallHeader, words: &[u64], reply: Responder) -> Result<Running, (Refusal, Responder)>;
}

type Begin<P> = fn(&Rc<Part<P>>, &[u64], Responder) -> Result<Running, (Refusal, Responder)>;

struct Part<P: Plugin> {
    here: Here<P>,
    structure: Structure,
    worker: Handle,
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
    fn moves(&self, what: Kind, words: &[u64], reply: Responder) -> Result<Running, (Refusal, Responder)> {
        let part = Self::clone(self);
        if what == LOADS {
            let Ok(wanted) = decode_all::<u64>(words) else { return Err((Refusal::Malformed, reply)) };
            return Ok(Box::pin(async move {
                let done = ReplyHeader::DONE;
                let loads = part.here.holdings().loads(&part.worker, wanted);
                ReplyHeader::reply(loads.map(|loads| (done, loads)).map_err(ReplyHeader::of), 0, reply);
            }));
        }
        let wanted = unpanicked_now(|| match what {
            GIVE_UP => decode_all::<(u64, P::Region)>(words).map(|(to, region)| (OwnerId::new(to), region)),
            _ => decode_all::<P::Region>(words).map(|region| (Some(part.worker.owner()), region)),
        });
        let Ok(Ok((Some(to), region))) = wanted else { return Err((Refusal::Malformed, reply)) };
        Ok(Box::pin(async move {
            let (holdings, worker) = (part.here.holdings(), &part.worker);
            let outcome = match what {
                GIVE_UP => holdings.hand_on(worker, &region, to).await,
                _ => holdings.take_at_once(worker, region.clone()).await.map(|()| Some(region)),
            };
            let done = ReplyHeader::DONE;
            ReplyHeader::reply(outcome.map(|moved| (done, moved)).map_err(ReplyHeader::of), 0, reply);
            // The next owner need not wait for it.
            holdings.tidy(worker).await;
        }))
    }

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
    let decoded = unpanicked_now(|| {
        decode_all::<O>(words).map(|mut operation| {
            operation.limit();
            operation
        })
    });
    let operation = match decoded {
        Ok(Ok(operation)) => operation,
        refused => return Err((malformed::<O>(refused.err()), reply)),
    };
    let part = Rc::clone(part);
    Ok(Box::pin(async move { part.carry_out(operation, reply).await }))
}

impl<P: Plugin> Part<P> {
    async fn carry_out<O: Operation<Plugin = P>>(&self, operation: O, reply: Responder) {
        let outcome = self.outcome(operation).await;
        let count = match &outcome {
            Ok(_) => &self.counts.done,
            Err(ReplyHeader::NotOwned(_)) => &self.counts.not_owned,
            Err(_) => &self.counts.failed,
        };
        count.fetch_add(1, Ordering::Relaxed);
        let done = ReplyHeader::DONE;
        ReplyHeader::reply(outcome.map(|output| (done, output)), 0, reply);
    }

    async fn outcome<O: Operation<Plugin = P>>(&self, operation: O) -> Result<O::Output, ReplyHeader> {
        let not_owned = || ReplyHeader::NotOwned(ownership::seen_epoch(&self.worker, &self.structure));
        match unpanicked(self.here.execute(&operation)).await {
            Ok(Ok(output)) => Ok(output),
            Ok(Err(Error::GivenUp { .. })) => Err(not_owned()),
            Ok(Err(error)) => Err(ReplyHeader::of(error)),
            Err(why) => {
                tracing::error!(operation = O::NAME, plugin = P::NAME, why, "an operation that was sent here panicked");
                let may_have_changed = !O::READS_ONLY;
                Err(ReplyHeader::of(Error::Panicked { what: "an operation at its owner", why, may_have_changed }))
            }
        }
    }
}

/// The threads of a compute server that carry out what others send. Dropping it stops them: to be done before the cache is closed
/// for good, and after others know who owns what it has owned.
pub struct OwnerServer {
    messages: MessageServer,
    counts: Arc<Counts>,
    workers: Arc<Mutex<Vec<Published>>>,
}

/// What a thread's worker had counted when the thread was last idle.
type Published = Arc<Mutex<worker::Counters>>;

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
        let workers = Arc::<Mutex<Vec<Published>>>::default();
        let all = Arc::clone(&workers);
        let messages = MessageServer::start(listener, options, move |_| {
            let worker = compute.worker_with(Clock::monotonic())?;
            let of = |served: &Served| (served.structure.id, (served.open)(&worker, &shared));
            let structures = served.iter().map(of).collect();
            let published = Published::default();
            lock(&all).push(Arc::clone(&published));
            let (owes_turn, owes_counts) = (Cell::new(false), Cell::new(false));
            Ok(Box::new(OwnerService { structures, worker, owes_turn, owes_counts, published }))
        })?;
        Ok(Self { messages, counts, workers })
    }

    /// What it has done so far.
    pub fn counts(&self) -> OwnerCounts {
        let Counts { done, not_owned, failed } = &*self.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        OwnerCounts { done: of(done), not_owned: of(not_owned), failed: of(failed) }
    }

    /// What its threads' workers have counted, each up to when it was last idle.
    pub fn counters(&self) -> worker::Counters {
        let mut sum = worker::Counters::default();
        lock(&self.workers).iter().for_each(|published| sum += *lock(published));
        sum
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
    /// Whether anything was done since its counters were published.
    owes_counts: Cell<bool>,
    published: Published,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Service for OwnerService {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        let mut words = request.words();
        let not_owned = |reply: Responder| reply.send_with(|to| ReplyHeader::NotOwned(0).encode(0, to));
        let begun = match request.kind() {
            ROUTE => match CallHeader::decode(&mut words) {
                Ok(call) if call.start == At::Root => match self.structures.get(&call.structure) {
                    Some(structure) => structure.begin(call, words, reply),
                    None => return not_owned(reply),
                },
                _ => Err((Refusal::Malformed, reply)),
            },
            what @ (GIVE_UP | TAKE | SERVES | LOADS) => {
                match MoveHeader::decode(&mut words).ok().and_then(MoveHeader::structure) {
                    Some(id) => match self.structures.get(&id) {
                        Some(_) if what == SERVES => {
                            return reply.send_with(|to| ReplyHeader::DONE.encode(0, to));
                        }
                        Some(structure) => structure.moves(what, words, reply),
                        None => return not_owned(reply),
                    },
                    None => Err((Refusal::Malformed, reply)),
                }
            }
            _ => Err((Refusal::UnknownKind, reply)),
        };
        let mut running = match begun {
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
            self.owes_counts.set(true);
        } else if self.owes_counts.take() {
            *lock(&self.published) = self.worker.counters();
        }
        if is_running { Turn::Busy } else { Turn::Idle }
    }
}
