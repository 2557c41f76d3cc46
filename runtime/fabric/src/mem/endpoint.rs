//! An endpoint of the `mem` fabric: executes requests, and hands out completions when they are due.

use std::{collections::VecDeque, ptr::NonNull};

use super::{
    MemOptions,
    acceptor::{Acceptor, Far, WorkerEnd},
    nasty::Nasty,
};
use crate::{
    buffer::LocalKey,
    clock::Clock,
    connection::{ConnectionState, ListenerId, OpenMemory, PeerId, far_offset},
    endpoint::{Capabilities, Completion, Done, Endpoint, Request, Verb},
    error::Error,
    gather::Gather,
    lock::OwnerId,
    memory::LocalMemory,
    ptr::{RemotePtr, ServerId},
    region::Region,
    sync::{Arc, AtomicU64, Mutex, Ordering, fence},
};

/// All that an endpoint reaches: the memory servers' regions, and what the other sides of its connections have opened.
#[derive(Debug)]
pub(super) struct Space {
    regions: Arc<Vec<Region>>,
    /// For a memory server's endpoint: its own region, and how many pieces of it one WRITE gathers.
    own: Option<(LocalMemory, usize)>,
    connections: Vec<Option<Far>>,
}

impl Space {
    /// The words that a request covers, if they lie inside the region of its server or inside a connection.
    #[inline]
    pub(super) fn words_at(&self, at: RemotePtr, bytes: usize) -> Option<&[AtomicU64]> {
        let first = usize::try_from(at.offset() / 8).ok()?;
        if !at.offset().is_multiple_of(8) {
            return None;
        }
        let region = self.regions.get(at.server().index()).map_or(&[][..], Region::words);
        match region.get(first..first.checked_add(bytes / 8)?) {
            Some(words) => Some(words),
            None => self.connection_words_at(at, bytes),
        }
    }

    /// The error of a request to or by a memory server that is lost. To be asked for after its execution.
    #[inline]
    pub(super) fn lost(&self, at: RemotePtr) -> Option<Box<Error>> {
        let server = at.server();
        let theirs = self.regions.get(server.index()).filter(|region| region.is_lost());
        theirs.map(|region| Box::new(region.lost(server))).or_else(|| self.own_lost())
    }

    /// The error of all requests of a memory server whose own memory is lost: what they send may have been read there, by whoever
    /// posted them or by a gather.
    #[inline]
    pub(super) fn own_lost(&self) -> Option<Box<Error>> {
        self.own.as_ref().and_then(|(own, _)| own.lost())
    }

    /// The region that a gather takes its pieces from, if they are all there and not too many.
    pub(super) fn source_of(&self, gather: &Gather) -> Option<&LocalMemory> {
        let (memory, gather_max) = self.own.as_ref()?;
        gather.fits(memory, *gather_max).then_some(memory)
    }

    /// What orders atomics there, where that is not the processor.
    pub(super) fn atomics(&self, at: RemotePtr) -> Option<&Mutex<()>> {
        self.regions.get(at.server().index())?.atomics()
    }

    fn connection_words_at(&self, at: RemotePtr, bytes: usize) -> Option<&[AtomicU64]> {
        let first = usize::try_from(far_offset(at)? / 8).ok()?;
        let far = self.connections.get(at.server().index())?.as_ref()?;
        far.memory.get(first..first.checked_add(bytes / 8)?)
    }

    /// Wakes whoever sleeps at the other end of a connection.
    pub(super) fn notify(&self, at: RemotePtr) {
        let far = self.connections.get(at.server().index()).and_then(Option::as_ref);
        if let Some((acceptor, endpoint)) = far.and_then(|far| far.eventcount.as_ref()) {
            acceptor.eventcount(*endpoint).notify();
        }
    }

    fn set_connection(&mut self, other: ServerId, far: Option<Far>) {
        if self.connections.len() <= other.index() {
            self.connections.resize(other.index() + 1, None);
        }
        self.connections[other.index()] = far;
    }
}

/// How an endpoint finds the acceptors of memory servers and compute servers.
pub(super) trait FindAcceptor: std::fmt::Debug {
    fn find(&self, whose: ListenerId) -> Result<Arc<Acceptor>, Error>;
}

#[derive(Debug)]
pub(super) struct MemEndpoint {
    space: Space,
    /// Its own connections, by server. None for an endpoint, whose peers have made theirs.
    connections: Vec<Option<WorkerEnd>>,
    acceptors: Option<Box<dyn FindAcceptor>>,
    /// Compute servers that it has called; the numbers after those of the memory servers are theirs.
    peers: Vec<OwnerId>,
    options: MemOptions,
    mode: Mode,
}

#[derive(Debug)]
enum Mode {
    /// Requests are executed at the doorbell.
    Direct {
        done: Vec<Completion>,
    },
    /// Requests are executed when they are due.
    Timed(Timed),
    Nasty {
        nasty: Box<Nasty>,
        timed: Timed,
    },
}

/// Requests, or what they came to, on their way.
#[derive(Debug)]
struct Timed {
    clock: Clock,
    /// The time at the doorbell, until the poll that follows: one reading of the clock serves both.
    rung_at_ns: Option<u64>,
    /// When the connection to each server is free again.
    path_free_ns: Vec<u64>,
    waiting: VecDeque<(u64, Request)>,
    /// What nasty mode has executed already.
    executed: Vec<(u64, Completion)>,
}

impl Timed {
    /// When a request posted at `now_ns` is due.
    fn due_ns(&mut self, options: &MemOptions, request: &Request, now_ns: u64) -> u64 {
        let bytes = u128::from(request.verb.bytes() as u64);
        let transfer_ns =
            (bytes * 1_000_000_000).checked_div(u128::from(options.bandwidth_bytes_per_s)).unwrap_or(0) as u64;
        let mut sent_ns = now_ns;
        if let (1.., Some(free_ns)) = (transfer_ns, self.path_free_ns.get_mut(request.at.server().index())) {
            *free_ns = now_ns.max(*free_ns) + transfer_ns;
            sent_ns = *free_ns;
        }
        sent_ns.saturating_add(options.latency_ns)
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.executed.is_empty()
    }

    /// Now, or at the doorbell just before.
    fn now_ns(&mut self, options: &MemOptions) -> u64 {
        match self.rung_at_ns.take() {
            _ if !options.is_timed() => 0,
            Some(rung_at_ns) => rung_at_ns,
            None => self.clock.now_ns(),
        }
    }
}

impl MemEndpoint {
    pub(super) fn new(regions: Arc<Vec<Region>>, options: MemOptions, seed: u64, clock: Clock) -> Self {
        let timed = Timed {
            clock,
            rung_at_ns: None,
            path_free_ns: vec![0; regions.len()],
            waiting: VecDeque::new(),
            executed: Vec::new(),
        };
        let mode = match options {
            MemOptions { nasty: true, .. } => Mode::Nasty { nasty: Box::new(Nasty::new(seed, &options)), timed },
            _ if options.is_timed() => Mode::Timed(timed),
            _ => Mode::Direct { done: Vec::new() },
        };
        let space = Space { regions, own: None, connections: Vec::new() };
        Self { space, connections: Vec::new(), acceptors: None, peers: Vec::new(), options, mode }
    }

    /// Lets it connect to the memory servers behind these acceptors.
    pub(super) fn with_acceptors(mut self, acceptors: Box<dyn FindAcceptor>) -> Self {
        self.acceptors = Some(acceptors);
        self
    }

    /// Lets it gather from a memory server's region: that of its own memory server.
    pub(super) fn gathering_from(mut self, memory: LocalMemory) -> Self {
        self.space.own = Some((memory, self.options.gather_max));
        self
    }

    /// Makes the other side of a connection reachable.
    pub(super) fn attach(&mut self, other: ServerId, far: Far) {
        self.space.set_connection(other, Some(far));
        if let Mode::Timed(timed) | Mode::Nasty { timed, .. } = &mut self.mode {
            let others = timed.path_free_ns.len().max(other.index() + 1);
            timed.path_free_ns.resize(others, 0);
        }
    }

    /// Ends what is under way to the other side of a connection; it cannot be reached any more.
    pub(super) fn forget(&mut self, other: ServerId) {
        self.space.set_connection(other, None);
        let is_aborted = |request: &Request| request.at.server() == other && far_offset(request.at).is_some();
        match &mut self.mode {
            Mode::Direct { .. } => {}
            Mode::Timed(Timed { waiting, executed, .. }) => {
                let cut: VecDeque<_>;
                (cut, *waiting) = std::mem::take(waiting).into_iter().partition(|(_, request)| is_aborted(request));
                executed.extend(cut.into_iter().map(|(due_ns, Request { ticket, at, verb })| {
                    (due_ns, Completion { ticket, outcome: Err(closed(at, &verb)) })
                }));
            }
            Mode::Nasty { nasty, .. } => nasty.abort(is_aborted),
        }
    }
}

impl Endpoint for MemEndpoint {
    fn capabilities(&self) -> Capabilities {
        let gather_max = self.space.own.as_ref().map_or(1, |(_, gather_max)| *gather_max);
        Capabilities { gather_max, ..self.options.capabilities() }
    }

    unsafe fn register(&mut self, _base: NonNull<u64>, _words: usize) -> Result<LocalKey, Error> {
        Ok(LocalKey::default())
    }

    fn ring(&mut self, requests: &mut Vec<Request>) {
        if requests.len() > 1 || self.options.is_timed() {
            // As a card would fetch ahead, so that the processor waits for memory once, not for each request.
            requests.iter().for_each(|request| prefetch(&self.space, request));
        }
        match &mut self.mode {
            Mode::Direct { done } => {
                for Request { ticket, at, verb } in requests.drain(..) {
                    done.push(Completion { ticket, outcome: execute(&self.space, at, verb) });
                }
            }
            Mode::Timed(timed) => {
                let now_ns = timed.clock.now_ns();
                timed.rung_at_ns = Some(now_ns);
                for request in requests.drain(..) {
                    let due_ns = timed.due_ns(&self.options, &request, now_ns);
                    timed.waiting.push_back((due_ns, request));
                }
            }
            Mode::Nasty { nasty, timed } => {
                let now_ns = timed.now_ns(&self.options);
                for request in requests.drain(..) {
                    let due_ns =
                        if self.options.is_timed() { timed.due_ns(&self.options, &request, now_ns) } else { 0 };
                    nasty.accept(&self.space, request, due_ns);
                }
            }
        }
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        let timed = match &mut self.mode {
            Mode::Direct { done } => return completions.append(done),
            Mode::Timed(timed) => timed,
            Mode::Nasty { nasty, timed } => {
                nasty.step(&self.space, &mut timed.executed);
                timed
            }
        };
        if timed.is_idle() {
            return;
        }
        let now_ns = timed.now_ns(&self.options);
        // To one server, requests are due in the order of their posting. With a limited bandwidth, another server's may
        // have to wait behind them: a request is never early.
        while let Some((_, Request { ticket, at, verb })) =
            timed.waiting.pop_front_if(|&mut (due_ns, _)| due_ns <= now_ns)
        {
            completions.push(Completion { ticket, outcome: execute(&self.space, at, verb) });
        }
        let due = timed.executed.extract_if(.., |&mut (due_ns, _)| due_ns <= now_ns);
        completions.extend(due.map(|(_, completion)| completion));
    }

    fn connect(&mut self, server: ServerId, who: PeerId) -> Result<OpenMemory, Error> {
        // Before the new one: the memory server tells by the order which one counts.
        if let Some(older) = self.connections.get_mut(server.index()).and_then(Option::take) {
            older.abandon();
            self.forget(server);
        }
        let Some(acceptors) = &self.acceptors else {
            return Err(Error::ServerMissing {
                server,
                why: "an endpoint of a memory server connects to nobody".into(),
            });
        };
        let peer = server.index().checked_sub(self.space.regions.len()).and_then(|peer| self.peers.get(peer));
        let whose = peer.map_or(ListenerId::Memory(server), |&peer| ListenerId::Compute(peer));
        let end = Acceptor::connect(&acceptors.find(whose)?, who)?;
        self.attach(server, end.far());
        let own = end.own();
        if self.connections.len() <= server.index() {
            self.connections.resize_with(server.index() + 1, || None);
        }
        self.connections[server.index()] = Some(end);
        Ok(own)
    }

    fn peer(&mut self, peer: OwnerId) -> Result<ServerId, Error> {
        let known = self.peers.iter().position(|&known| known == peer);
        let number = self.space.regions.len() + known.unwrap_or(self.peers.len());
        let none_left = || Error::PeerMissing { peer, why: "this worker has called too many others".into() };
        let number = u16::try_from(number).ok().and_then(ServerId::new).ok_or_else(none_left)?;
        if known.is_none() {
            self.peers.push(peer);
        }
        Ok(number)
    }

    fn disconnect(&mut self, server: ServerId) {
        if self.connections.get_mut(server.index()).and_then(Option::take).is_some() {
            self.forget(server);
        }
    }

    fn connection_state(&mut self, server: ServerId) -> ConnectionState {
        self.connections.get(server.index()).and_then(Option::as_ref).map_or(ConnectionState::Dead, WorkerEnd::state)
    }

    fn next_due_ns(&self) -> Option<u64> {
        match &self.mode {
            Mode::Direct { .. } => None,
            Mode::Timed(timed) | Mode::Nasty { timed, .. } => {
                let executed = timed.executed.iter().map(|&(due_ns, _)| due_ns).min();
                timed.waiting.front().map(|&(due_ns, _)| due_ns).into_iter().chain(executed).min()
            }
        }
    }
}

/// Asks the processor for the cache lines that a READ will copy.
fn prefetch(space: &Space, request: &Request) {
    let Verb::Read(buffer) = &request.verb else { return };
    let Some(words) = space.words_at(request.at, buffer.len() * 8) else { return };
    for line in (0..words.len()).step_by(8) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch reads nothing and cannot fault; SSE is part of x86-64.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_add(line).cast());
        }
        let _ = line;
    }
}

/// Copies word by word, a cache line at a time.
fn copy_out(from: &[AtomicU64], to: &mut [u64]) {
    let (lines, rest) = to.as_chunks_mut::<8>();
    let (from_lines, from_rest) = from.as_chunks::<8>();
    for (to, from) in lines.iter_mut().zip(from_lines) {
        // A plain loop: `from_fn` is a call for each word unless all crates are optimised as one.
        for word in 0..8 {
            to[word] = from[word].load(Ordering::Relaxed);
        }
    }
    for (to, from) in rest.iter_mut().zip(from_rest) {
        *to = from.load(Ordering::Relaxed);
    }
}

/// The connection that a request was on its way over is closed.
pub(super) fn closed(at: RemotePtr, verb: &Verb) -> Box<Error> {
    Box::new(Error::RequestFailed { what: verb.name(), at, why: "the connection was closed".into() })
}

pub(super) fn outside(at: RemotePtr, verb: &Verb) -> Box<Error> {
    let why = "the address is in no region and no open connection, or not aligned to 8 bytes".into();
    Box::new(Error::BadAddress { what: verb.name(), at, why })
}

/// A gather that this endpoint cannot carry out.
pub(super) fn not_gathered(at: RemotePtr, gather: &Gather) -> Box<Error> {
    let why = format!(
        "an endpoint gathers pieces of its own memory server's region, and not as many as {}; a worker's gathers none",
        gather.pieces().len()
    );
    Box::new(Error::BadAddress { what: "WRITE", at, why })
}

/// Executes a request at once. The fences give what a reliable connection gives: a WRITE is placed after all before it,
/// and what a READ returns is no older than what the READs completed before it returned.
// Inlined: its result would otherwise be written in words and read back as a vector, which stalls the processor.
#[inline(always)]
fn execute(space: &Space, at: RemotePtr, verb: Verb) -> Result<Done, Box<Error>> {
    let Some(words) = space.words_at(at, verb.bytes()) else { return Err(outside(at, &verb)) };
    // Nobody is told of what an earlier request was to bring.
    if let Some(lost) = space.own_lost() {
        return Err(lost);
    }
    let done = match verb {
        Verb::Read(mut buffer) => {
            copy_out(words, &mut buffer);
            fence(Ordering::Acquire);
            Done::Read(buffer)
        }
        Verb::Write(buffer) => {
            fence(Ordering::Release);
            for (to, from) in words.iter().zip(buffer.iter()) {
                to.store(*from, Ordering::Relaxed);
            }
            Done::Written
        }
        Verb::Gather(gather) => {
            let Some(own) = space.source_of(&gather) else {
                return Err(not_gathered(at, &gather));
            };
            fence(Ordering::Release);
            gather.each_word(own, |index, word| words[index].store(word, Ordering::Relaxed));
            Done::Written
        }
        Verb::WriteWord(word) => {
            words[0].store(word, Ordering::Release);
            Done::Written
        }
        Verb::Notify(word) => {
            words[0].store(word, Ordering::Release);
            space.notify(at);
            Done::Written
        }
        Verb::CompareSwap { expected, new } => Done::Previous(compare_swap(&words[0], expected, new)),
        Verb::FetchAdd(add) => Done::Previous(words[0].fetch_add(add, Ordering::AcqRel)),
    };
    space.lost(at).map_or(Ok(done), Err)
}

pub(super) fn compare_swap(word: &AtomicU64, expected: u64, new: u64) -> u64 {
    match word.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(previous) | Err(previous) => previous,
    }
}
