//! A cluster whose memory servers take messages, and a service that says back what it is told.

use std::{
    cell::RefCell,
    collections::HashMap,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use farlink_runtime::{
    compute::ComputeServer,
    fabric::{
        Fabric,
        connection::PeerId,
        listener::{DEFAULT_CONNECTION_BYTES, ListenOptions},
        mem::MemOptions,
    },
    messaging::{ChannelOptions, Kind, MessageServer, Refusal, Request, Responder, ServeMessages, Service, Turn},
    ptr::ServerId,
};
use farlink_tests::{
    bounded::Watchdog,
    cluster,
    here::{self, Here},
};

/// Replies with its parameters.
pub(crate) const ECHO: Kind = Kind(1);
/// Replies with as many words as its parameter says, each its own index.
pub(crate) const COUNT: Kind = Kind(2);
/// Replies with its parameters some turns later, the last one first.
pub(crate) const LATER: Kind = Kind(3);
/// Adds 1 to a counter of the peer's and replies with what it is then.
pub(crate) const TALLY: Kind = Kind(4);
/// Never replies.
pub(crate) const DROP: Kind = Kind(5);
/// Is refused.
pub(crate) const REFUSE: Kind = Kind(6);

/// Panics.
pub(crate) const PANIC: Kind = Kind(7);

/// As [`LATER`], many turns later, or after a while: where others want the core, a turn takes milliseconds.
pub(crate) const SLOWLY: Kind = Kind(8);
const SLOW_TURNS: u32 = 1000;
const SLOW: Duration = Duration::from_millis(20);

/// As [`ECHO`], once [`Seen::lets_go`].
pub(crate) const HELD: Kind = Kind(9);

/// What services have done, whatever thread they ran on.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) handled: AtomicU64,
    pub(crate) lets_go: AtomicBool,
}

/// What is answered after so many turns, or [`SLOW`] after it was asked.
struct Later {
    turns: u32,
    since: Instant,
    words: Vec<u64>,
    reply: Responder,
}

pub(crate) struct Parrot {
    seen: Arc<Seen>,
    later: Vec<Later>,
    held: Vec<(Vec<u64>, Responder)>,
    tallies: Rc<RefCell<HashMap<PeerId, u64>>>,
}

impl Parrot {
    pub(crate) fn new(seen: &Arc<Seen>) -> Self {
        Self { seen: Arc::clone(seen), later: Vec::new(), held: Vec::new(), tallies: Rc::default() }
    }

    fn answer_after(&mut self, turns: u32, words: &[u64], reply: Responder) {
        self.later.push(Later { turns, since: Instant::now(), words: words.to_vec(), reply });
    }
}

impl Service for Parrot {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        self.seen.handled.fetch_add(1, Ordering::Relaxed);
        match request.kind() {
            ECHO => reply.send_words(request.words()),
            COUNT => match request.words() {
                &[words @ 0..0x40_0000] => reply.send_with(|to| to.extend(0..words)),
                _ => reply.refuse(Refusal::Malformed),
            },
            LATER => self.answer_after(self.later.len() as u32 % 7, request.words(), reply),
            SLOWLY => self.answer_after(SLOW_TURNS, request.words(), reply),
            HELD => self.held.push((request.words().to_vec(), reply)),
            TALLY => {
                let mut tallies = self.tallies.borrow_mut();
                let tally = tallies.entry(request.peer()).or_default();
                *tally += 1;
                reply.send(tally);
            }
            DROP => drop(reply),
            PANIC => panic!("as the request asked"),
            REFUSE => reply.refuse(Refusal::Service(77)),
            _ => reply.refuse(Refusal::UnknownKind),
        }
    }

    fn turn(&mut self) -> Turn {
        self.later.iter_mut().for_each(|later| later.turns = later.turns.saturating_sub(1));
        let due = self.later.extract_if(.., |later| later.turns == 0 || later.since.elapsed() > SLOW);
        due.for_each(|Later { words, reply, .. }| reply.send_words(&words));
        if self.seen.lets_go.load(Ordering::Acquire) {
            self.held.drain(..).for_each(|(words, reply)| reply.send_words(&words));
        }
        if self.later.is_empty() { Turn::Idle } else { Turn::Busy }
    }
}

pub(crate) fn server(number: u16) -> ServerId {
    ServerId::new(number).unwrap()
}

/// Two small rings and a small pool, so that everything wraps and fills.
pub(crate) const SMALL: usize = 128 << 10;

/// As little as possible depends on the machine.
pub(crate) const ABOVE_100: ChannelOptions = ChannelOptions { eager_words: Some(100), coalesce: true };

pub(crate) struct Scene {
    // In this order: the way, the threads, the servers.
    pub(crate) fabric: Arc<dyn Fabric>,
    pub(crate) seen: Arc<Seen>,
    pub(crate) messages: Vec<MessageServer>,
    pub(crate) cluster: Arc<dyn Here>,
    _watch: Watchdog,
}

/// A cluster in this process.
pub(crate) fn scene(servers: usize, options: MemOptions, connection_bytes: usize, serve: &ServeMessages) -> Scene {
    let cluster = here::start(servers, 2 << 20, options).unwrap();
    let seen = Arc::new(Seen::default());
    let start_one = |number| start(&*cluster, number as u16, 1, connection_bytes, serve, &seen);
    let messages = (0..servers).map(start_one).collect();
    Scene::of(cluster, messages, seen)
}

pub(crate) fn start(
    cluster: &dyn Here,
    number: u16,
    ports: usize,
    connection_bytes: usize,
    serve: &ServeMessages,
    seen: &Arc<Seen>,
) -> MessageServer {
    let listener = cluster.listen(server(number), &ListenOptions { endpoints: ports, connection_bytes }).unwrap();
    let seen = Arc::clone(seen);
    MessageServer::start(listener, serve, move |_| Ok(Box::new(Parrot::new(&seen)))).unwrap()
}

impl Scene {
    pub(crate) fn of(cluster: Arc<dyn Here>, messages: Vec<MessageServer>, seen: Arc<Seen>) -> Self {
        let watch = Watchdog::start("messages", Duration::from_secs(120));
        Self { fabric: cluster.fabric(), cluster, seen, messages, _watch: watch }
    }

    pub(crate) fn fast() -> Self {
        scene(1, cluster::FAST, DEFAULT_CONNECTION_BYTES, &ServeMessages::default())
    }

    pub(crate) fn join(&self, seed: u64) -> ComputeServer {
        cluster::join(&self.fabric, seed).unwrap()
    }
}
