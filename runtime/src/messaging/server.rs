//! A memory server's threads that serve messages.
//!
//! Each thread has a port of its own, the peers that come to it, their sessions, and a service: nothing is shared but
//! counters. A turn takes latency-sensitive requests of all peers, then some best-effort ones, lets the service go on, sends
//! what is ready, and collects completions. A peer that floods gets its share of each turn and no more.
//!
//! A thread without work polls, or sleeps at its port until a message comes: polling answers sooner and takes a core, so
//! with more peers than cores the threads sleep (Catfish, section IV B).

use std::{cell::Cell, collections::HashMap, rc::Rc, sync::mpsc, thread::JoinHandle, time::Duration};

use crossbeam_utils::CachePadded;

use super::{
    CHUNK_WORDS, Kind, Load, MESSAGE_WORDS_MAX, Priority, Refusal, WINDOW,
    link::{Broken, Carrier, HowToSend, Item, Link, Sending},
    message::{complaint, read_request, welcome},
    serve::{Address, Finished, Replies, Request, Responder, Service, Turn},
    session::{Admission, Session},
};
use crate::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    error::Error,
    fabric::{
        Completion, Request as Post,
        link::{Change, Listener, Port, PortWaker},
    },
    ptr::ServerId,
    sync::yield_thread,
};

/// What a thread does while there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wait {
    /// Polls while there are fewer peers than cores, sleeps otherwise.
    #[default]
    Auto,
    /// Sleeps until a message comes.
    Event,
    /// Looks again and again. Offers its core to others in between.
    Poll,
}

/// How a memory server serves messages. The number of threads is the listener's number of ports.
#[derive(Debug, Clone, Copy)]
pub struct ServeMessages {
    /// What idle threads do.
    pub wait: Wait,
    /// How often peers are told the load.
    pub report_interval: Duration,
    /// How long a peer may leave its replies where they are before it is dropped.
    pub silence_max: Duration,
    /// Decides what is random.
    pub seed: u64,
}

impl Default for ServeMessages {
    fn default() -> Self {
        Self {
            wait: Wait::Auto,
            report_interval: Duration::from_millis(10),
            silence_max: Duration::from_secs(5),
            seed: 0,
        }
    }
}

/// Requests of one peer that a turn takes, of each priority.
const REQUESTS_PER_TURN: usize = 64;
/// Best-effort words of all peers that a turn takes.
const WORDS_PER_TURN: usize = 2 * CHUNK_WORDS;
/// A peer with so many words of unsent replies is not asked for more requests.
const UNSENT_WORDS_MAX: usize = 2 * MESSAGE_WORDS_MAX;
/// A peer with so many messages to take is not asked for more requests: each makes one, at most.
const QUEUED_MAX: usize = 2 * WINDOW;
/// Idle turns before a thread sleeps.
const IDLE_TURNS_MAX: u32 = 100;
/// Idle turns before a thread that polls offers its core, at each further one: the worker may be waiting for it.
const POLLS_MAX: u32 = 200;
/// Turns between two looks at the clock, while busy.
const TURNS_PER_LOOK: u32 = 64;
/// Sessions without a link that a thread keeps.
const AWAY_MAX: usize = 64;
/// A sleep without peers.
const LONG: Duration = Duration::from_secs(3600);

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a message server has counted since its start.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct ServerCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// One thread's counts, written by it alone.
        #[derive(Debug, Default)]
        struct ThreadCounts {
            $($name: std::sync::atomic::AtomicU64,)*
            busy_permille: std::sync::atomic::AtomicU64,
            peers_now: std::sync::atomic::AtomicU64,
        }

        impl ThreadCounts {
            fn add_to(&self, all: &mut ServerCounts) {
                $(all.$name += self.$name.load(RELAXED);)*
            }
        }
    };
}

const RELAXED: std::sync::atomic::Ordering = std::sync::atomic::Ordering::Relaxed;

counts! {
    /// Requests handed to a service, each item of a batch for itself.
    requests,
    /// Messages that were answered from a kept reply, or whose first copy was still under way.
    repeats,
    /// Messages and requests that made no sense. Those of kinds that no service knows count among `refused`.
    malformed,
    /// Replies that are refusals.
    refused,
    /// Links that were opened.
    joined,
    /// Links that their workers closed, or that ended with their processes.
    left,
    /// Links that were closed because the peer broke the protocol, was silent, or could not be reached.
    dropped,
    /// Times that a thread slept.
    sleeps,
}

fn bump(count: &std::sync::atomic::AtomicU64, by: u64) {
    // Only its thread writes it.
    count.store(count.load(RELAXED) + by, RELAXED);
}

type Shared = std::sync::Arc<SharedState>;

#[derive(Debug)]
struct SharedState {
    stop: std::sync::atomic::AtomicBool,
    threads: Vec<CachePadded<ThreadCounts>>,
    /// Tells this server from the one that comes after it.
    incarnation: u64,
    cores: usize,
}

/// A thread that panics, in a service, ends the whole server: its peers must not wait for it.
struct ShutOnPanic(std::sync::Arc<dyn Listener>);

impl Drop for ShutOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(server = %self.0.server(), "a thread for messages panicked; no more messages are taken");
            self.0.shut();
        }
    }
}

/// The running threads. Dropping it stops them; what was not answered is lost to the workers, who are told so.
#[derive(Debug)]
pub struct MessageServer {
    shared: Shared,
    threads: Vec<(std::sync::Arc<dyn PortWaker>, JoinHandle<()>)>,
    /// After the threads: closes the door.
    _listener: std::sync::Arc<dyn Listener>,
}

impl MessageServer {
    /// Starts a thread for each port of the listener, each with a service of its own that `make` makes there, given the
    /// thread's number.
    ///
    /// # Errors
    /// If a thread or a port cannot be had, or `make` fails.
    pub fn start<S>(listener: Box<dyn Listener>, options: &ServeMessages, make: S) -> Result<Self, Error>
    where
        S: Fn(usize) -> Result<Box<dyn Service>, Error> + Send + Sync + 'static,
    {
        let listener: std::sync::Arc<dyn Listener> = listener.into();
        let make = std::sync::Arc::new(make);
        let shared = std::sync::Arc::new(SharedState {
            stop: false.into(),
            threads: (0..listener.ports()).map(|_| CachePadded::default()).collect(),
            incarnation: rand::random::<u64>() | 1,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        });
        let mut server = Self { shared, threads: Vec::new(), _listener: std::sync::Arc::clone(&listener) };
        for number in 0..listener.ports() {
            let (ready, is_ready) = mpsc::channel();
            let (listener, shared) = (std::sync::Arc::clone(&listener), std::sync::Arc::clone(&server.shared));
            let (make, options) = (std::sync::Arc::clone(&make), *options);
            let thread = std::thread::Builder::new()
                .name(format!("farlink-serve-{number}"))
                .spawn(move || {
                    let made = (|| {
                        let port = listener.port(number, options.seed ^ number as u64, Clock::monotonic())?;
                        let service = make(number)?;
                        Ok(Thread::new(port, service, shared, number, options))
                    })();
                    drop(make);
                    let _shut = ShutOnPanic(listener);
                    match made {
                        Ok(mut thread) => {
                            if ready.send(Ok(thread.port.waker())).is_ok() {
                                thread.run();
                            }
                        }
                        Err(error) => drop(ready.send(Err(error))),
                    }
                })
                .map_err(Error::io("starting a thread for messages"))?;
            match is_ready.recv() {
                Ok(Ok(waker)) => server.threads.push((waker, thread)),
                Ok(Err(error)) => {
                    let _ = thread.join();
                    return Err(error);
                }
                Err(_) => {
                    let _ = thread.join();
                    let why = "a thread for messages panicked while it started".into();
                    return Err(Error::BadOption { option: "service", why });
                }
            }
        }
        Ok(server)
    }

    /// The counts so far.
    pub fn counts(&self) -> ServerCounts {
        let mut all = ServerCounts::default();
        self.shared.threads.iter().for_each(|thread| thread.add_to(&mut all));
        all
    }

    /// How many links are open.
    pub fn peers(&self) -> usize {
        self.shared.threads.iter().map(|thread| thread.peers_now.load(RELAXED) as usize).sum()
    }
}

impl Drop for MessageServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, std::sync::atomic::Ordering::Release);
        for (waker, thread) in self.threads.drain(..) {
            waker.wake();
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Peer {
    link: Link,
    session: usize,
    /// What the peer had done when that was last looked at, and when it last did something.
    trace: u64,
    moved_at_ns: u64,
    /// Something of this side's has changed: a completion came, or there is something to send.
    dirty: bool,
}

/// What links need of their thread.
struct PortCarrier<'a> {
    port: &'a mut dyn Port,
    buffers: &'a Buffers,
    outbox: &'a mut Vec<Post>,
    replies: &'a Replies,
}

impl Carrier for PortCarrier<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, Error> {
        self.buffers.take(words, |base, words| self.port.register(base, words))
    }

    fn post(&mut self, request: Post) {
        self.outbox.push(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        self.replies.vector()
    }
}

struct Thread {
    // The service goes first: its tasks hold responders. The port goes before the buffers that it may still use.
    service: Box<dyn Service>,
    port: Box<dyn Port>,
    buffers: Buffers,
    outbox: Vec<Post>,
    completions: Vec<Completion>,
    changes: Vec<Change>,
    replies: Rc<Replies>,
    finished: Vec<Finished>,
    peers: Vec<Option<Peer>>,
    sessions: Vec<Option<Session>>,
    by_worker: HashMap<crate::fabric::link::PeerId, usize>,
    shared: Shared,
    number: usize,
    options: ServeMessages,
    clock: Clock,
    generation: u32,
    first_peer: usize,
    next_unique: u64,
    report: u16,
    reported_at_ns: u64,
    checked_at_ns: u64,
    busy_since_ns: Option<u64>,
    busy_ns: u64,
    present: usize,
    has_latest: Cell<bool>,
}

/// The links' part of a thread, borrowed apart from the rest.
macro_rules! carrier {
    ($thread:expr) => {
        PortCarrier {
            port: &mut *$thread.port,
            buffers: &$thread.buffers,
            outbox: &mut $thread.outbox,
            replies: &$thread.replies,
        }
    };
}

impl Thread {
    fn new(
        port: Box<dyn Port>,
        service: Box<dyn Service>,
        shared: Shared,
        number: usize,
        options: ServeMessages,
    ) -> Self {
        Self {
            service,
            port,
            buffers: Buffers::default(),
            outbox: Vec::new(),
            completions: Vec::new(),
            changes: Vec::new(),
            replies: Rc::default(),
            finished: Vec::new(),
            peers: Vec::new(),
            sessions: Vec::new(),
            by_worker: HashMap::new(),
            shared,
            number,
            options,
            clock: Clock::monotonic(),
            generation: 0,
            first_peer: 0,
            next_unique: 0,
            report: 0,
            reported_at_ns: 0,
            checked_at_ns: 0,
            busy_since_ns: None,
            busy_ns: 0,
            present: 0,
            has_latest: Cell::new(false),
        }
    }

    fn counts(&self) -> &ThreadCounts {
        &self.shared.threads[self.number]
    }

    fn is_stopping(&self) -> bool {
        self.shared.stop.load(std::sync::atomic::Ordering::Acquire)
    }

    fn run(&mut self) {
        let (mut idle_turns, mut turns) = (0u32, 0u32);
        while !self.is_stopping() {
            let progress = self.turn();
            turns = turns.wrapping_add(1);
            if progress {
                idle_turns = 0;
                if self.busy_since_ns.is_none() {
                    self.busy_since_ns = Some(self.clock.now_ns());
                }
                if turns.is_multiple_of(TURNS_PER_LOOK) {
                    self.look_at_clock();
                }
                continue;
            }
            idle_turns += 1;
            if idle_turns == 1 || idle_turns.is_multiple_of(TURNS_PER_LOOK) {
                self.look_at_clock();
            }
            if idle_turns > IDLE_TURNS_MAX && self.may_sleep() {
                self.sleep();
            } else if idle_turns > POLLS_MAX {
                yield_thread();
            } else {
                std::hint::spin_loop();
            }
        }
        for index in 0..self.peers.len() {
            self.close(index);
        }
    }

    /// One turn; false if there was nothing to do.
    fn turn(&mut self) -> bool {
        let mut progress = self.take_changes(false);
        progress |= self.take_requests(Priority::Latency);
        progress |= self.take_requests(Priority::BestEffort);
        let busy = self.service.turn() == Turn::Busy;
        self.has_latest.set(busy);
        progress |= self.take_replies();
        progress |= self.send();
        progress |= !self.outbox.is_empty();
        self.exchange();
        progress
    }

    fn exchange(&mut self) {
        if !self.outbox.is_empty() {
            self.port.ring(&mut self.outbox);
        }
        self.port.poll(&mut self.completions);
        for completion in self.completions.drain(..) {
            let index = Link::other_of(completion.ticket).index();
            if let Some(Some(peer)) = self.peers.get_mut(index) {
                peer.dirty = true;
                peer.link.complete(completion);
            }
        }
    }

    /// Peers that come and go.
    fn take_changes(&mut self, thorough: bool) -> bool {
        self.port.changes(thorough, &mut self.changes);
        if self.changes.is_empty() {
            return false;
        }
        let mut changes = std::mem::take(&mut self.changes);
        for change in changes.drain(..) {
            match change {
                Change::Joined { peer, who, memory } => {
                    bump(&self.counts().joined, 1);
                    self.open(peer, who, memory);
                }
                Change::Left { peer, in_order } => {
                    bump(&self.counts().left, 1);
                    self.forget(peer.index(), in_order);
                }
            }
        }
        self.changes = changes;
        true
    }

    fn open(&mut self, peer: ServerId, who: crate::fabric::link::PeerId, memory: crate::fabric::link::OpenMemory) {
        self.generation = self.generation.wrapping_add(1);
        let sending =
            Sending { ordered: self.port.capabilities().ordered_writes, coalesce: true, switch_words: usize::MAX };
        let Some(mut link) = Link::new(memory, peer, self.generation, sending) else {
            return self.port.dismiss(peer);
        };
        let known = self.by_worker.get(&who).copied();
        let session = known.unwrap_or_else(|| {
            self.next_unique += 1;
            let session = Session::new(who, self.next_unique);
            let free = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
            if free == self.sessions.len() {
                self.sessions.push(None);
            }
            self.sessions[free] = Some(session);
            self.by_worker.insert(who, free);
            free
        });
        // A worker has one link to a server; of two, the newer one counts.
        if let Some(older) = self.sessions[session].as_mut().and_then(|session| session.peer.replace(peer)) {
            self.close(older.index());
            if let Some(session) = &mut self.sessions[session] {
                session.peer = Some(peer);
            }
        }
        link.enqueue(Priority::Latency, Item::Notice(welcome(self.shared.incarnation, known.is_some()), 3));
        let moved_at_ns = self.clock.now_ns();
        let peer_state = Peer { link, session, trace: 0, moved_at_ns, dirty: true };
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(peer_state);
        self.present += 1;
        self.counts().peers_now.store(self.present as u64, RELAXED);
    }

    /// Closes a link on this side's own account. Its session waits for the worker to come again.
    fn close(&mut self, index: usize) {
        if let Some(Some(_)) = self.peers.get(index) {
            let other = peer_number(index);
            self.port.dismiss(other);
            self.forget(index, false);
        }
    }

    /// Frees what a link had.
    fn forget(&mut self, index: usize, in_order: bool) {
        let Some(peer) = self.peers.get_mut(index).and_then(Option::take) else { return };
        self.present -= 1;
        self.counts().peers_now.store(self.present as u64, RELAXED);
        let Some(session) = &mut self.sessions[peer.session] else { return };
        if in_order {
            self.by_worker.remove(&session.who);
            self.sessions[peer.session] = None;
            return;
        }
        session.lose_link();
        let mut away = self.sessions.iter().enumerate().filter_map(|(place, session)| {
            session.as_ref().filter(|session| session.peer.is_none()).map(|session| (session.unique, place))
        });
        let oldest = away.clone().min();
        if away.by_ref().count() > AWAY_MAX
            && let Some((_, place)) = oldest
            && let Some(session) = self.sessions[place].take()
        {
            self.by_worker.remove(&session.who);
        }
    }

    /// Gives up a link that makes no sense.
    fn drop_peer(&mut self, index: usize, why: &Broken) {
        tracing::warn!(peer = index, %why, "dropped a peer");
        bump(&self.counts().dropped, 1);
        if let Broken::Flaw(_) = why {
            bump(&self.counts().malformed, 1);
            let [kind, code] = complaint(Refusal::Malformed);
            self.notify(index, [kind, code, 0], 2);
            self.exchange();
        }
        self.close(index);
    }

    fn notify(&mut self, index: usize, words: [u64; 3], len: usize) {
        let Some(Some(peer)) = self.peers.get_mut(index) else { return };
        peer.link.enqueue(Priority::Latency, Item::Notice(words, len));
        if let Some(session) = &self.sessions[peer.session] {
            let _ = peer.link.send_out(session, &mut carrier!(self));
        }
    }

    fn take_requests(&mut self, priority: Priority) -> bool {
        let mut progress = false;
        let mut words_left = WORDS_PER_TURN;
        let count = self.peers.len();
        for step in 0..count {
            let index = (self.first_peer + step) % count;
            let mut requests = 0;
            while let Some(peer) = &mut self.peers[index] {
                if !peer.dirty && !peer.link.has_news() {
                    break;
                }
                let unsent = self.sessions[peer.session].as_ref().map_or(0, |session| session.unsent_words);
                let full = unsent > UNSENT_WORDS_MAX || peer.link.queued() > QUEUED_MAX;
                if requests == REQUESTS_PER_TURN || full {
                    progress |= requests != 0;
                    break;
                }
                peer.dirty = true;
                match peer.link.receive(priority, &mut carrier!(self)) {
                    Ok(Some(message)) => {
                        progress = true;
                        requests += 1;
                        self.take_message(index, priority, &message);
                        words_left = words_left.saturating_sub(message.len());
                        self.replies.recycle(message);
                    }
                    Ok(None) => break,
                    Err(why) => {
                        progress = true;
                        self.drop_peer(index, &why);
                        break;
                    }
                }
                if priority == Priority::BestEffort && words_left == 0 {
                    self.first_peer = (index + 1) % count;
                    return true;
                }
            }
        }
        if count > 0 {
            self.first_peer = (self.first_peer + 1) % count;
        }
        progress
    }

    fn take_message(&mut self, index: usize, priority: Priority, message: &[u64]) {
        let Some(Some(peer)) = self.peers.get(index) else { return };
        let session_index = peer.session;
        let Some(session) = &mut self.sessions[session_index] else { return };
        let (view, garbled) = match read_request(message) {
            Ok(view) => (Some(view), None),
            Err((why, sequence)) => {
                tracing::debug!(peer = index, %why, "malformed");
                (None, Some(sequence))
            }
        };
        let numbers = match (&view, garbled) {
            (Some(view), _) => Some((view.sequence, view.acknowledged)),
            // Nothing that it says is believed, but its number is answered.
            (None, Some(Some(sequence))) => Some((sequence, 0)),
            _ => None,
        };
        let items = view.map_or(1, |view| view.items);
        let admission = numbers.and_then(|numbers| session.admit(numbers, items, priority, &self.replies));
        let (unique, who) = (session.unique, session.who);
        match (admission, view, numbers) {
            (Some(Admission::New), Some(view), _) => {
                for (place, (kind, words)) in view.items().enumerate() {
                    let to = Address { session: session_index, unique, sequence: view.sequence, index: place as u16 };
                    let reply = Responder::new(Rc::clone(&self.replies), to);
                    match kind {
                        Kind::PROBE => reply.send_words(&[]),
                        Kind(Kind::RESERVED..) => reply.refuse(Refusal::UnknownKind),
                        kind => {
                            bump(&self.shared.threads[self.number].requests, 1);
                            self.service.handle(Request { peer: who, kind, priority, words }, reply);
                        }
                    }
                }
            }
            (Some(Admission::New), None, Some((sequence, _))) => {
                bump(&self.shared.threads[self.number].malformed, 1);
                session.refuse(sequence, Refusal::Malformed, &self.replies);
                self.answer(index, sequence, priority);
            }
            (Some(Admission::Pending), ..) => bump(&self.counts().repeats, 1),
            (Some(Admission::Answered(priority)), _, Some((sequence, _))) => {
                bump(&self.counts().repeats, 1);
                self.answer(index, sequence, priority);
            }
            (Some(Admission::Forgotten), _, Some((sequence, _))) => {
                bump(&self.counts().repeats, 1);
                self.refuse_forgotten(index, sequence);
            }
            _ => {
                bump(&self.counts().malformed, 1);
                let [kind, code] = complaint(Refusal::Malformed);
                if let Some(Some(peer)) = self.peers.get_mut(index) {
                    peer.link.enqueue(Priority::Latency, Item::Notice([kind, code, 0], 2));
                }
            }
        }
    }

    fn answer(&mut self, index: usize, sequence: u64, priority: Priority) {
        if let Some(Some(peer)) = self.peers.get_mut(index) {
            peer.link.enqueue(priority, Item::Held(sequence));
            peer.dirty = true;
        }
    }

    /// Says that a reply was not kept: a short reply that is made up here.
    fn refuse_forgotten(&mut self, index: usize, sequence: u64) {
        let Some(Some(peer)) = self.peers.get_mut(index) else { return };
        let words = super::message::refusal(sequence, Refusal::Forgotten);
        peer.link.enqueue(Priority::Latency, Item::Notice(words, words.len()));
    }

    /// Replies that services have made.
    fn take_replies(&mut self) -> bool {
        std::mem::swap(&mut self.finished, &mut *self.replies.finished.borrow_mut());
        let progress = !self.finished.is_empty();
        let mut finished = std::mem::take(&mut self.finished);
        for Finished { to, mut words } in finished.drain(..) {
            if words.len() > MESSAGE_WORDS_MAX {
                tracing::error!(words = words.len(), "a reply is too long and is refused");
                words.truncate(super::message::REPLY_HEADER);
                words.push(super::message::reply_item(0, to.index, Err(Refusal::Unanswered)));
            }
            if words[super::message::REPLY_HEADER] & 0xffff != 0 {
                bump(&self.counts().refused, 1);
            }
            let session = self.sessions.get_mut(to.session).and_then(Option::as_mut);
            let Some(session) = session.filter(|session| session.unique == to.unique) else {
                self.replies.recycle(words);
                continue;
            };
            let whole = session.finish(to.sequence, words, &self.replies);
            match (whole, session.peer) {
                (Some(priority), Some(peer)) => self.answer(peer.index(), to.sequence, priority),
                // Its worker is away: the reply is kept like one that was sent.
                (Some(_), None) => session.sent(to.sequence, &self.replies),
                (None, _) => {}
            }
        }
        self.finished = finished;
        progress
    }

    /// Sends what peers are to get.
    fn send(&mut self) -> bool {
        let mut progress = false;
        for index in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[index] else { continue };
            if !peer.dirty && !peer.link.has_news() {
                continue;
            }
            let Some(session) = &mut self.sessions[peer.session] else { continue };
            if let Some(how) = HowToSend::read(peer.link.control_word()) {
                how.apply(peer.link.sending());
            }
            let outcome = peer.link.send_out(session, &mut carrier!(self));
            peer.link.release(&mut carrier!(self));
            peer.dirty = false;
            for sequence in peer.link.sent.drain(..) {
                session.sent(sequence, &self.replies);
            }
            match outcome {
                Ok(moved) => progress |= moved,
                Err(why) => self.drop_peer(index, &why),
            }
        }
        progress
    }

    fn look_at_clock(&mut self) {
        let now_ns = self.clock.now_ns();
        if let Some(since_ns) = self.busy_since_ns.take() {
            self.busy_ns += now_ns.saturating_sub(since_ns);
        }
        let interval_ns = self.options.report_interval.as_nanos() as u64;
        if now_ns - self.reported_at_ns >= interval_ns {
            self.report_load(now_ns);
        }
        if now_ns - self.checked_at_ns >= 10 * interval_ns {
            self.checked_at_ns = now_ns;
            self.take_changes(true);
            self.drop_silent(now_ns);
        }
    }

    fn report_load(&mut self, now_ns: u64) {
        let passed_ns = (now_ns - self.reported_at_ns).max(1);
        let busy = (self.busy_ns.saturating_mul(1000) / passed_ns).min(1000);
        (self.busy_ns, self.reported_at_ns) = (0, now_ns);
        self.counts().busy_permille.store(busy, RELAXED);
        let threads = &self.shared.threads;
        let sum = |of: fn(&ThreadCounts) -> u64| threads.iter().map(|thread| of(thread)).sum::<u64>();
        self.report = self.report.wrapping_add(1).max(1);
        let load = Load {
            report: self.report,
            busy_permille: (sum(|thread| thread.busy_permille.load(RELAXED)) / threads.len() as u64) as u16,
            threads: threads.len() as u16,
            peers: sum(|thread| thread.peers_now.load(RELAXED)).min(u64::from(u16::MAX)) as u16,
        };
        for peer in self.peers.iter_mut().flatten() {
            peer.link.post_control_word(load.word(), &mut carrier!(self));
        }
    }

    /// Drops peers that leave what is theirs where it is.
    fn drop_silent(&mut self, now_ns: u64) {
        let silence_max_ns = self.options.silence_max.as_nanos() as u64;
        for index in 0..self.peers.len() {
            let Some(peer) = &mut self.peers[index] else { continue };
            let trace = peer.link.trace();
            if trace != peer.trace || !peer.link.is_sending() {
                (peer.trace, peer.moved_at_ns) = (trace, now_ns);
            } else if now_ns.saturating_sub(peer.moved_at_ns) > silence_max_ns {
                tracing::warn!(peer = index, "dropped a peer that does not take its replies");
                bump(&self.counts().dropped, 1);
                self.close(index);
            }
        }
    }

    fn may_sleep(&self) -> bool {
        let event = match self.options.wait {
            Wait::Event => true,
            Wait::Poll => self.present == 0,
            Wait::Auto => {
                let peers: u64 = self.shared.threads.iter().map(|thread| thread.peers_now.load(RELAXED)).sum();
                self.present == 0 || peers as usize >= self.shared.cores
            }
        };
        // Nobody rings for completions.
        event && !self.has_latest.get() && !self.peers.iter().flatten().any(|peer| peer.dirty || peer.link.is_waiting())
    }

    fn sleep(&mut self) {
        bump(&self.counts().sleeps, 1);
        let limit = if self.present == 0 { LONG } else { self.options.report_interval };
        let (peers, shared, replies) = (&self.peers, &self.shared, &self.replies);
        self.port.sleep(limit, &mut || {
            shared.stop.load(std::sync::atomic::Ordering::Acquire)
                || !replies.finished.borrow().is_empty()
                || peers.iter().flatten().any(|peer| peer.link.has_news())
        });
        self.look_at_clock();
    }
}

fn peer_number(index: usize) -> ServerId {
    u16::try_from(index).ok().and_then(ServerId::new).expect("a port numbers its peers so")
}
