//! Two ends of a link and a wire between them that a test moves forward, one request at a time: what is counted here does
//! not depend on anybody's speed.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;
use crate::{
    buffer::Buffers,
    clock::Clock,
    fabric::{
        Endpoint, Fabric,
        link::{
            Arrived, Change, DEFAULT_LINK_BYTES, LINK_BYTES_MIN, ListenOptions, Listener, PeerId, Port, RECEIVE_WORDS,
            RECEIVES_PER_LINK, ReceiveBuffers, Transport,
        },
        mem::{MemFabric, MemOptions},
    },
    lock::OwnerId,
    messaging::CHUNK_WORDS,
    sync::AtomicU64,
};

/// What one side has posted and the wire has not carried yet.
struct Posts<'a> {
    buffers: &'a Buffers,
    wire: &'a mut VecDeque<(Side, Request)>,
    side: Side,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Server,
    Worker,
}

impl Carrier for Posts<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, Error> {
        self.buffers.take(words, |_, _| Ok(Default::default()))
    }

    fn post(&mut self, request: Request) {
        self.wire.push_back((self.side, request));
    }

    fn vector(&mut self) -> Vec<u64> {
        Vec::new()
    }
}

/// Messages by their numbers.
struct Messages(Vec<Vec<u64>>);

impl Source for Messages {
    fn message(&self, number: u64) -> Option<&[u64]> {
        self.0.get(number as usize).map(Vec::as_slice)
    }
}

/// The receive buffers of one side, as many as it has to have.
#[derive(Debug)]
struct Receives {
    words: Vec<AtomicU64>,
    free: Mutex<Vec<usize>>,
}

impl Receives {
    fn new() -> Arc<Self> {
        let words = (0..RECEIVES_PER_LINK * RECEIVE_WORDS).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { words, free: Mutex::new((0..RECEIVES_PER_LINK).collect()) })
    }

    fn take_in(self: &Arc<Self>, from: ServerId, sent: &[u64]) -> Arrived {
        let free = self.free.lock().unwrap().pop();
        let buffer = free.expect("whoever keeps to the credits finds a receive buffer");
        self.words[buffer * RECEIVE_WORDS..].iter().zip(sent).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        Arrived::new(from, self.clone(), buffer, sent.len() * 8)
    }
}

impl ReceiveBuffers for Receives {
    fn words(&self, buffer: usize) -> &[AtomicU64] {
        &self.words[buffer * RECEIVE_WORDS..][..RECEIVE_WORDS]
    }

    fn give_back(&self, buffer: usize) {
        self.free.lock().unwrap().push(buffer);
    }
}

/// A server's and a worker's end. All requests of both go over one wire, in the order of posting.
struct Pair {
    server: Connection,
    worker: Connection,
    receives: [Arc<Receives>; 2],
    wire: VecDeque<(Side, Request)>,
    // Before the buffers, which requests under way hold.
    port: Box<dyn Port>,
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    _fabric: (MemFabric, Box<dyn Listener>),
}

impl Pair {
    fn new(transport: Transport, switch_words: usize, link_bytes: usize) -> Self {
        let fabric = MemFabric::in_process(1, 2 << 20, MemOptions::default()).unwrap();
        let id = ServerId::new(0).unwrap();
        let listener = fabric.listen(id, &ListenOptions { link_bytes, ..ListenOptions::default() }).unwrap();
        let mut port = listener.port(0, 1, Clock::monotonic()).unwrap();
        let mut endpoint = fabric.endpoint(1, Clock::monotonic()).unwrap();
        let who = PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 };
        let own = endpoint.connect(id, who).unwrap();
        let mut changes = Vec::new();
        port.changes(true, &mut changes);
        let Some(Change::Joined { peer, memory, .. }) = changes.pop() else { panic!("nobody joined") };
        let sending = Sending { transport, ordered: true, coalesce: true, switch_words };
        Self {
            server: Connection::new(memory, peer, 1, sending, None).unwrap(),
            worker: Connection::new(own, id, 1, sending, None).unwrap(),
            receives: [Receives::new(), Receives::new()],
            wire: VecDeque::new(),
            port,
            endpoint,
            buffers: Buffers::default(),
            _fabric: (fabric, listener),
        }
    }

    fn server_sends(&mut self, messages: &Messages) {
        let carrier = &mut Posts { buffers: &self.buffers, wire: &mut self.wire, side: Side::Server };
        let before = self.server.words_moved;
        self.server.send_out(messages, carrier).unwrap();
        let copied = (self.server.words_moved - before) as usize;
        // Beside an urgent message.
        assert!(copied <= CHUNK_WORDS + 8, "{copied} words were copied at once");
        self.server.release(carrier).unwrap();
        self.server.sent.clear();
    }

    /// One side sends what it can.
    fn sends(&mut self, side: Side, messages: &Messages) {
        let carrier = &mut Posts { buffers: &self.buffers, wire: &mut self.wire, side };
        let end = if side == Side::Server { &mut self.server } else { &mut self.worker };
        end.send_out(messages, carrier).unwrap();
        end.sent.clear();
    }

    /// The next message of one side.
    fn takes(&mut self, side: Side, priority: Priority) -> Result<Option<Vec<u64>>, Broken> {
        let carrier = &mut Posts { buffers: &self.buffers, wire: &mut self.wire, side };
        let end = if side == Side::Server { &mut self.server } else { &mut self.worker };
        let taken = end.receive(priority, carrier)?;
        end.release(carrier)?;
        Ok(taken)
    }

    /// The next message that the worker takes, urgent ones first, and what it asks for on the way.
    fn worker_takes(&mut self) -> Option<(Priority, Vec<u64>)> {
        let carrier = &mut Posts { buffers: &self.buffers, wire: &mut self.wire, side: Side::Worker };
        let taken = Priority::ALL
            .into_iter()
            .find_map(|priority| self.worker.receive(priority, carrier).unwrap().map(|message| (priority, message)));
        self.worker.release(carrier).unwrap();
        taken
    }

    /// Whether an urgent message stands whole in the worker's ring.
    fn urgent_is_there(&self) -> bool {
        if self.worker.shape.transport == Transport::SendReceive {
            return !self.worker.incoming[Priority::Latency.index()].runs.is_empty();
        }
        let head = self.worker.own[Control::Head(Priority::Latency).index()].load(Ordering::Acquire);
        self.worker.incoming[Priority::Latency.index()].consumer.position() != head
    }

    /// Carries one request; the words of payload that it moved.
    fn carry(&mut self) -> Option<usize> {
        let (side, request) = self.wire.pop_front()?;
        let words = match &request.verb {
            Verb::Read(buffer) | Verb::Write(buffer) | Verb::Send(buffer) => buffer.len(),
            _ => 0,
        };
        if let Verb::Send(sent) = &request.verb {
            // Links name the peer 0, and the server 0, too.
            let from = ServerId::new(0).unwrap();
            let (sender, receiver) = match side {
                Side::Server => (&mut self.server, &mut self.worker),
                Side::Worker => (&mut self.worker, &mut self.server),
            };
            receiver.arrive(self.receives[side as usize].take_in(from, sent));
            sender.complete(Completion { ticket: request.ticket, outcome: Ok(Done::Written) });
            return Some(words);
        }
        let (endpoint, end): (&mut dyn Endpoint, _) = match side {
            Side::Server => (&mut *self.port, &mut self.server),
            Side::Worker => (&mut *self.endpoint, &mut self.worker),
        };
        endpoint.ring(&mut vec![request]);
        let mut completions = Vec::new();
        endpoint.poll(&mut completions);
        completions.into_iter().for_each(|completion| end.complete(completion));
        Some(words)
    }
}

/// A reply of 16 MiB is under way; urgent ones of 64 bytes are sent at random moments, and each waits for a chunk at most. Counts the words that the wire carries
/// from the moment when an urgent one is sent until the worker has it.
fn an_urgent_message_waits_for_little(transport: Transport, switch_words: usize, link_bytes: usize) {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let messages = Messages(vec![(0..2 << 20).collect(), (0..8).collect()]);
    let mut pair = Pair::new(transport, switch_words, link_bytes);
    pair.server.enqueue(Priority::BestEffort, 0);
    let (mut urgent, mut most, mut done) = (0, 0, false);
    while !done {
        for _ in 0..rng.random_range(0..40) {
            match rng.random_range(0..4) {
                0 => pair.server_sends(&messages),
                1 => {
                    if let Some((priority, message)) = pair.worker_takes() {
                        assert_eq!(priority, Priority::BestEffort);
                        assert!(message == messages.0[0], "the large message has arrived as it was");
                        done = true;
                    }
                }
                _ => {
                    pair.carry();
                }
            }
        }
        if done {
            break;
        }
        pair.server.enqueue(Priority::Latency, 1);
        pair.server_sends(&messages);
        let mut before_it = 0;
        // The worker looks after every request: whatever is there when the urgent one is, it does not take first.
        while !pair.urgent_is_there() {
            before_it += pair.carry().expect("an urgent message that was sent is on the wire");
        }
        let taken = pair.worker_takes();
        assert_eq!(taken, Some((Priority::Latency, messages.0[1].clone())), "what is urgent is taken first");
        urgent += 1;
        most = most.max(before_it);
    }
    println!("{urgent} urgent messages; at most {most} words before one");
    assert!(urgent > 30, "{urgent}");
    // Its own frame, and those that carry or announce parts of the large one: no more than the pool has pieces.
    let bound = CHUNK_WORDS + 9 + 2 * 64;
    assert!(most <= bound, "{most} words were carried before an urgent message; {bound} are allowed");
}

#[test]
fn an_urgent_message_waits_for_little_by_the_ring() {
    // A ring that would hold more than may be on its way.
    an_urgent_message_waits_for_little(Transport::Ring, usize::MAX, 4 << 20);
}

#[test]
fn an_urgent_message_waits_for_little_by_rendezvous() {
    an_urgent_message_waits_for_little(Transport::Ring, 100, DEFAULT_LINK_BYTES);
}

#[test]
fn an_urgent_message_waits_for_little_by_sends() {
    an_urgent_message_waits_for_little(Transport::SendReceive, usize::MAX, DEFAULT_LINK_BYTES);
    an_urgent_message_waits_for_little(Transport::SendReceive, 100, DEFAULT_LINK_BYTES);
}

/// Both sides send both ways, of all lengths, and look when chance lets them. `Receives` panics if a side ever sends more
/// than the other one has buffers for.
#[test]
fn all_that_is_sent_arrives_and_always_finds_a_buffer() {
    for round in 0..20 {
        all_arrives(if round % 2 == 0 { DEFAULT_LINK_BYTES } else { LINK_BYTES_MIN });
    }
}

fn all_arrives(link_bytes: usize) {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut pair = Pair::new(Transport::SendReceive, 400, link_bytes);
    const COUNT: u64 = 400;
    let lengths = [1, 3, 100, 506, 507, 508, 700, 701, 5000, 20_000];
    let messages =
        Messages((0..COUNT).map(|number| vec![number; lengths[rng.random_range(0..lengths.len())]]).collect());
    let sides = [Side::Server, Side::Worker];
    for number in 0..COUNT {
        // The server sends the even ones.
        let end = if number % 2 == 0 { &mut pair.server } else { &mut pair.worker };
        end.enqueue(Priority::ALL[number as usize / 2 % 2], number);
    }
    let (mut taken, mut idle) = (vec![Vec::new(); 4], 0);
    while taken.iter().map(Vec::len).sum::<usize>() < COUNT as usize {
        let side = sides[rng.random_range(0..2)];
        idle += 1;
        assert!(idle < 100_000, "it goes no further: {:?}", taken.iter().map(Vec::len).collect::<Vec<_>>());
        match rng.random_range(0..8) {
            0 => pair.sends(side, &messages),
            1 => {
                let priority = Priority::ALL[rng.random_range(0..2)];
                if let Some(message) = pair.takes(side, priority).unwrap() {
                    assert!(message == messages.0[message[0] as usize], "it has arrived as it was");
                    taken[side as usize * 2 + priority.index()].push(message[0]);
                    idle = 0;
                }
            }
            _ => drop(pair.carry()),
        }
    }
    for (place, taken) in taken.iter().enumerate() {
        let expected = (0..COUNT).filter(|number| {
            (number % 2 == 0) == (place / 2 == Side::Worker as usize) && (number / 2 % 2) as usize == place % 2
        });
        assert!(taken.iter().copied().eq(expected), "{place}: {taken:?}");
    }
}

/// What a peer must not send, and what becomes of it.
#[test]
fn a_run_that_cannot_be_is_a_flaw() {
    let frames = |priority, number, tails| run::Header { frames: Some((priority, number)), tails, word: 0 };
    let tails_only = |tails| run::Header { frames: None, tails, word: 0 };
    let with_frame = |header: run::Header| {
        let frame = crate::messaging::frame::Frame {
            form: crate::messaging::frame::Form::Inline,
            body_words: 1,
            first: true,
            last: true,
        };
        let begin = header.frames.map_or(0, |(_, number)| u64::from(number) * RECEIVE_WORDS as u64);
        let mut words = header.words().to_vec();
        words.extend([frame.word(begin + run::HEADER as u64), 7]);
        words
    };
    let latency = |number| with_frame(frames(Priority::Latency, number, [0, 0]));
    let cases: [(&str, Vec<Vec<u64>>, Flaw); 7] = [
        ("more than there is credit for", (0..=run::RUNS as u32).map(latency).collect(), Flaw::Credits),
        ("not the next one", vec![latency(0), latency(2)], Flaw::Run),
        ("nothing in it", vec![frames(Priority::Latency, 0, [0, 0]).words().to_vec()], Flaw::Run),
        ("tails that do not move", vec![tails_only([0, 0]).words().to_vec()], Flaw::Credits),
        ("a tail of what was not sent", vec![tails_only([RECEIVE_WORDS as u64, 0]).words().to_vec()], Flaw::Tail),
        ("no words", vec![vec![]], Flaw::Run),
        ("a frame longer than the run", vec![[&latency(0)[..5], &[]].concat()], Flaw::Frame),
    ];
    for (what, runs, flaw) in cases {
        let mut pair = Pair::new(Transport::SendReceive, 100, DEFAULT_LINK_BYTES);
        for run in runs {
            let run = pair.receives[Side::Worker as usize].take_in(ServerId::new(0).unwrap(), &run);
            pair.server.arrive(run);
        }
        let outcome = pair.takes(Side::Server, Priority::Latency);
        assert!(matches!(outcome, Err(Broken::Flaw(found)) if found == flaw), "{what}: {outcome:?}");
    }
}
