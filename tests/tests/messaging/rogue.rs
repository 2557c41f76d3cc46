//! Someone who has a link and writes into it, or sends, what he likes.

use std::sync::atomic::Ordering;

use farlink_runtime::{
    buffer::Buffers,
    clock::Clock,
    fabric::{
        Endpoint, Request, Ticket, Verb,
        link::{LinkState, OpenMemory, PeerId, RECEIVE_WORDS, Transport, far},
    },
    lock::OwnerId,
};

use crate::scene::{Scene, server};

/// Where the ring of latency-sensitive messages begins, in bytes, and its words, in a link of [`SMALL`](crate::scene::SMALL).
pub(crate) const RING: u64 = 64 * 8;
const RING_WORDS: u64 = 1024;
/// Words of runs on their way.
const RUN_WORDS: u64 = 4 * RECEIVE_WORDS as u64;

pub(crate) struct Rogue {
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    who: PeerId,
    memory: OpenMemory,
    pub(crate) transport: Transport,
    /// What it has put, in words, and what was finished with.
    pub(crate) head: u64,
    tail: u64,
}

/// The first word of a frame that is a whole message.
fn frame(at: u64, body: &[u64]) -> u64 {
    at << 32 | 0b11 << 24 | 1 << 16 | body.len() as u64
}

impl Rogue {
    pub(crate) fn new(scene: &Scene, number: u32) -> Self {
        let mut endpoint = scene.fabric.endpoint(1, Clock::monotonic()).unwrap();
        let who = PeerId { owner: OwnerId::new(70_000).unwrap(), worker: number };
        let memory = endpoint.connect(server(0), who).unwrap();
        let transport = endpoint.transport(server(0));
        Self { endpoint, buffers: Buffers::default(), who, memory, transport, head: 0, tail: 0 }.welcomed()
    }

    pub(crate) fn connect_again(self) -> Self {
        let Self { mut endpoint, buffers, who, .. } = self;
        let memory = endpoint.connect(server(0), who).unwrap();
        let transport = endpoint.transport(server(0));
        Self { memory, transport, endpoint, buffers, who, head: 0, tail: 0 }.welcomed()
    }

    /// Waits for the memory server's first word: what is SENT before is lost.
    fn welcomed(mut self) -> Self {
        let mut arrived = Vec::new();
        while self.transport == Transport::SendReceive && arrived.is_empty() && !self.is_dismissed() {
            self.endpoint.receive(&mut arrived);
        }
        self
    }

    fn copied(&mut self, words: &[u64]) -> farlink_runtime::buffer::Buffer {
        let endpoint = &mut self.endpoint;
        let mut buffer = self.buffers.take(words.len(), |base, words| endpoint.register(base, words)).unwrap();
        buffer.copy_from_slice(words);
        buffer
    }

    pub(crate) fn write(&mut self, word: u64, words: &[u64]) {
        let buffer = self.copied(words);
        self.post(word * 8, Verb::Write(buffer));
    }

    pub(crate) fn post(&mut self, offset: u64, verb: Verb) {
        let request = Request { ticket: Ticket(0), at: far(server(0), offset), verb };
        self.endpoint.ring(&mut vec![request]);
        self.endpoint.poll(&mut Vec::new());
    }

    /// These words by SEND, whatever they are.
    pub(crate) fn run(&mut self, words: &[u64]) {
        let buffer = self.copied(words);
        self.post(0, Verb::Send(buffer));
    }

    /// Many messages that make no sense, each in a correct run, at once.
    pub(crate) fn flood(&mut self) {
        let runs = (0..32).map(|_| {
            let words = self.next_run(&[9; 8], 1);
            Request { ticket: Ticket(0), at: far(server(0), 0), verb: Verb::Send(self.copied(&words)) }
        });
        let mut runs = runs.collect();
        self.endpoint.ring(&mut runs);
        self.endpoint.poll(&mut Vec::new());
    }

    /// A run of so many frames with this body.
    fn next_run(&mut self, body: &[u64], frames: u64) -> Vec<u64> {
        let number = self.head / RECEIVE_WORDS as u64;
        let mut words = vec![number << 32 | 1, 0, 0, 0];
        for _ in 0..frames {
            words.push(frame(self.head + words.len() as u64, body));
            words.extend_from_slice(body);
        }
        self.head += RECEIVE_WORDS as u64;
        words
    }

    /// A frame with this body, correct, where the next one belongs.
    pub(crate) fn send(&mut self, body: &[u64]) {
        if self.transport == Transport::SendReceive {
            let words = self.next_run(body, 1);
            return self.run(&words);
        }
        for (index, word) in std::iter::once(&frame(self.head, body)).chain(body).enumerate() {
            let place = (self.head + index as u64) % RING_WORDS;
            self.write(RING / 8 + place, &[*word]);
        }
        self.head += 1 + body.len() as u64;
        self.post(0, Verb::Notify(self.head));
    }

    /// [`Rogue::send`], many times in one run where there are runs.
    pub(crate) fn send_often(&mut self, body: &[u64], times: u64) {
        if self.transport == Transport::Ring {
            return self.send(body);
        }
        let words = self.next_run(body, times);
        self.run(&words);
    }

    /// Whether there is room for so many words.
    pub(crate) fn has_room(&mut self, words: u64) -> bool {
        const TAIL: usize = 2 * 8;
        if self.transport == Transport::Ring {
            return self.head + words - self.memory[TAIL].load(Ordering::Acquire) <= RING_WORDS;
        }
        let mut arrived = Vec::new();
        self.endpoint.receive(&mut arrived);
        self.tail = arrived.iter().map(|run| run[1].load(Ordering::Relaxed)).fold(self.tail, u64::max);
        self.head + RECEIVE_WORDS as u64 - self.tail <= RUN_WORDS
    }

    pub(crate) fn is_dismissed(&mut self) -> bool {
        self.endpoint.link_state(server(0)) != LinkState::Up
    }
}
