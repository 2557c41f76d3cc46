//! Two ends of a connection and a wire between them that a test moves forward, one request at a time: what is counted here does
//! not depend on anybody's speed.

use std::collections::VecDeque;

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;
use crate::protocol::CHUNK_WORDS;
use farlink_fabric::{
    Endpoint, Fabric,
    buffer::Buffers,
    clock::Clock,
    connection::PeerId,
    listener::{CONNECTION_BYTES_MIN, Change, DEFAULT_CONNECTION_BYTES, ListenOptions, Listener, ServerEndpoint},
    lock::OwnerId,
    mem::{MemFabric, MemOptions},
    region::Region,
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
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError> {
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
    fn message(&self, number: u64, _begun: bool) -> Option<Outbound<'_>> {
        self.0.get(number as usize).map(|words| Outbound::of(words))
    }
}

/// A server's and a worker's end. All requests of both go over one wire, in the order of posting.
struct Pair {
    server: Connection,
    worker: Connection,
    wire: VecDeque<(Side, Request)>,
    // Before the buffers, which requests under way hold.
    port: Box<dyn ServerEndpoint>,
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    _fabric: (MemFabric, Box<dyn Listener>),
}

impl Pair {
    fn new(eager_words: usize, connection_bytes: usize) -> Self {
        let region = Region::anonymous(2 << 20).unwrap();
        let fabric = MemFabric::in_process(vec![region], MemOptions::default());
        let id = ServerId::new(0).unwrap();
        let listener = fabric.listen(id, &ListenOptions { connection_bytes, ..ListenOptions::default() }).unwrap();
        let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
        let mut endpoint = fabric.endpoint(1, Clock::monotonic()).unwrap();
        let who = PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 };
        let own = endpoint.connect(id, who).unwrap();
        let mut changes = Vec::new();
        port.changes(true, &mut changes);
        let Some(Change::Joined { peer, memory, .. }) = changes.pop() else { panic!("nobody joined") };
        let sending = Sending { ordered: true, coalesce: true, eager_words, gather_max: 1 };
        Self {
            server: Connection::new(memory, peer, 1, sending).unwrap(),
            worker: Connection::new(own, id, 1, sending).unwrap(),
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
        self.server.release(carrier);
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
        end.release(carrier);
        Ok(taken)
    }

    /// The next message that the worker takes, urgent ones first, and what it asks for on the way.
    fn worker_takes(&mut self) -> Option<(Priority, Vec<u64>)> {
        let carrier = &mut Posts { buffers: &self.buffers, wire: &mut self.wire, side: Side::Worker };
        let taken = Priority::ALL
            .into_iter()
            .find_map(|priority| self.worker.receive(priority, carrier).unwrap().map(|message| (priority, message)));
        self.worker.release(carrier);
        taken
    }

    /// Whether an urgent message stands whole in the worker's ring.
    fn urgent_is_there(&self) -> bool {
        let head = self.worker.own[Control::Head(Priority::Latency).index()].load(Ordering::Acquire);
        self.worker.incoming[Priority::Latency.index()].consumer.position() != head
    }

    /// Carries one request; the words of payload that it moved.
    fn carry(&mut self) -> Option<usize> {
        let (side, request) = self.wire.pop_front()?;
        let words = match &request.verb {
            Verb::Read(buffer) | Verb::Write(buffer) => buffer.len(),
            _ => 0,
        };
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

/// Draws from `SEED`, or from a fresh one, which is printed.
fn rng() -> StdRng {
    let seed = std::env::var("SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// A reply of 16 MiB is under way; urgent ones of 64 bytes are sent at random moments, and each waits for a chunk at most. Counts
/// the words that the wire carries from the moment when an urgent one is sent until the worker has it.
fn an_urgent_message_waits_for_little(eager_words: usize, connection_bytes: usize) {
    let mut rng = rng();
    let messages = Messages(vec![(0..2 << 20).collect(), (0..8).collect()]);
    let mut pair = Pair::new(eager_words, connection_bytes);
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
    // Its own frame, and those that carry or describe parts of the large one: no more than the pool has slots.
    let bound = CHUNK_WORDS + 9 + 2 * 64;
    assert!(most <= bound, "{most} words were carried before an urgent message; {bound} are allowed");
}

#[test]
fn an_urgent_message_waits_for_little_by_the_ring() {
    // A ring that would hold more than may be on its way.
    an_urgent_message_waits_for_little(usize::MAX, 4 << 20);
}

#[test]
fn an_urgent_message_waits_for_little_by_rendezvous() {
    an_urgent_message_waits_for_little(100, DEFAULT_CONNECTION_BYTES);
}

/// The other side must not take what comes behind it for its rest.
#[test]
fn a_connection_whose_message_is_gone_before_it_was_sent_whole_is_closed() {
    let mut pair = Pair::new(usize::MAX, 4 << 20);
    pair.server.enqueue(Priority::BestEffort, 0);
    pair.sends(Side::Server, &Messages(vec![(0..3 * CHUNK_WORDS as u64).collect()]));
    while pair.carry().is_some() {}
    let carrier = &mut Posts { buffers: &pair.buffers, wire: &mut pair.wire, side: Side::Server };
    let outcome = pair.server.send_out(&Messages(Vec::new()), carrier);
    assert!(matches!(outcome, Err(Broken::Failed(_))), "{outcome:?}");
    while pair.carry().is_some() {}
    assert!(matches!(pair.takes(Side::Worker, Priority::BestEffort), Ok(None)));
}

/// The limit holds in both directions, to the word, and what is fetched is what was rendezvous.
#[test]
fn messages_up_to_the_eager_limit_go_by_the_ring_and_longer_ones_are_fetched() {
    for eager_words in [0, 1, 100] {
        for words in [1, 99, 100, 101, 5000] {
            for side in [Side::Server, Side::Worker] {
                let messages = Messages(vec![(0..words).collect()]);
                let mut pair = Pair::new(eager_words, DEFAULT_CONNECTION_BYTES);
                let end = if side == Side::Server { &mut pair.server } else { &mut pair.worker };
                end.enqueue(Priority::Latency, 0);
                pair.sends(side, &messages);
                let receiver = if side == Side::Server { Side::Worker } else { Side::Server };
                let mut fetched = false;
                let taken = (0..10_000).find_map(|_| {
                    fetched |= pair.wire.iter().any(|(_, request)| matches!(request.verb, Verb::Read(_)));
                    pair.carry();
                    pair.takes(receiver, Priority::Latency).unwrap()
                });
                assert_eq!(taken.as_ref(), Some(&messages.0[0]));
                assert_eq!(fetched, words > eager_words as u64, "{words} words, the limit is {eager_words}");
            }
        }
    }
}

#[test]
fn the_memory_server_is_told_how_to_send() {
    assert_eq!(SendConfig::read(0), None, "nothing was said yet");
    for eager_words in [0, 1, 100, MESSAGE_WORDS_MAX, usize::MAX] {
        for coalesce in [false, true] {
            let config = SendConfig { eager_words, coalesce };
            let heard = SendConfig { eager_words: eager_words.min(MESSAGE_WORDS_MAX), coalesce };
            assert_eq!(SendConfig::read(config.word()), Some(heard));
        }
    }
}

/// Both sides send both ways, of all lengths, and look when chance lets them.
#[test]
fn all_that_is_sent_arrives() {
    for round in 0..20 {
        let connection_bytes = if round % 2 == 0 { DEFAULT_CONNECTION_BYTES } else { CONNECTION_BYTES_MIN };
        all_arrives([400, usize::MAX][round / 2 % 2], connection_bytes);
    }
}

fn all_arrives(eager_words: usize, connection_bytes: usize) {
    let mut rng = rng();
    let mut pair = Pair::new(eager_words, connection_bytes);
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
