//! Someone who has a link and writes into it what he likes.

use std::sync::atomic::Ordering;

use farlink_runtime::{
    buffer::Buffers,
    clock::Clock,
    fabric::{
        Endpoint, Fabric, Request, Ticket, Verb,
        connection::{ConnectionState, OpenMemory, PeerId, far},
    },
    lock::OwnerId,
};

use crate::scene::{Scene, server};

/// Where the ring of latency-sensitive messages begins, in bytes, and its words, in a link of [`SMALL`](crate::scene::SMALL).
pub(crate) const RING: u64 = 64 * 8;
const RING_WORDS: u64 = 1024;

pub(crate) struct Rogue {
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    who: PeerId,
    memory: OpenMemory,
    /// What it has put, in words.
    pub(crate) head: u64,
}

/// The first word of a frame that is a whole message.
fn frame(at: u64, body: &[u64]) -> u64 {
    at << 32 | 0b11 << 24 | 1 << 16 | body.len() as u64
}

impl Rogue {
    pub(crate) fn new(scene: &Scene, number: u32) -> Self {
        Self::on(&*scene.fabric, number)
    }

    pub(crate) fn on(fabric: &dyn Fabric, number: u32) -> Self {
        let mut endpoint = fabric.endpoint(1, Clock::monotonic()).unwrap();
        let who = PeerId { owner: OwnerId::new(70_000).unwrap(), worker: number };
        let memory = endpoint.connect(server(0), who).unwrap();
        Self { endpoint, buffers: Buffers::default(), who, memory, head: 0 }
    }

    pub(crate) fn connect_again(self) -> Self {
        let Self { mut endpoint, buffers, who, .. } = self;
        let memory = endpoint.connect(server(0), who).unwrap();
        Self { memory, endpoint, buffers, who, head: 0 }
    }

    fn copied(&mut self, words: &[u64]) -> farlink_runtime::buffer::Buffer {
        let endpoint = &mut self.endpoint;
        // SAFETY: what is registered lives as long as `buffers`, which are dropped after the endpoint.
        let register = |base, words| unsafe { endpoint.register(base, words) };
        let mut buffer = self.buffers.take(words.len(), register).unwrap();
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

    /// A frame with this body, correct, where the next one belongs.
    pub(crate) fn send(&mut self, body: &[u64]) {
        for (index, word) in std::iter::once(&frame(self.head, body)).chain(body).enumerate() {
            let place = (self.head + index as u64) % RING_WORDS;
            self.write(RING / 8 + place, &[*word]);
        }
        self.head += 1 + body.len() as u64;
        self.post(0, Verb::Notify(self.head));
    }

    /// Tells the memory server to send what is longer than so many words by rendezvous.
    pub(crate) fn limit(&mut self, eager_words: u64) {
        const WORD: u64 = 4 * 64;
        self.post(WORD, Verb::Notify(eager_words + 1));
    }

    /// The forms of all frames that have come in the ring of latency-sensitive messages, before it wraps: 1 for a part of a
    /// message, 2 for an announcement.
    pub(crate) fn forms(&self) -> Vec<u64> {
        let head = self.memory[0].load(Ordering::Acquire);
        assert!(head < RING_WORDS);
        let (mut forms, mut at) = (Vec::new(), 0);
        while at < head {
            let first = self.memory[(RING / 8 + at) as usize].load(Ordering::Relaxed);
            forms.push(first >> 16 & 0xff);
            at += 1 + (first & 0xffff);
        }
        forms
    }

    /// What the hello-ack says: the memory server's incarnation, and the session. The ring has not wrapped.
    pub(crate) fn hello(&self) -> [u64; 2] {
        [2, 3].map(|word| self.memory[(RING / 8) as usize + word].load(Ordering::Relaxed))
    }

    /// How far the memory server has written the ring of latency-sensitive messages.
    pub(crate) fn head_of_replies(&self) -> u64 {
        self.memory[0].load(Ordering::Acquire)
    }

    /// Says that it is done with that ring up to here.
    pub(crate) fn release(&mut self, tail: u64) {
        const TAIL: u64 = 2 * 64;
        self.post(TAIL, Verb::Notify(tail));
    }

    /// Whether there is room for so many words.
    pub(crate) fn has_room(&self, words: u64) -> bool {
        const TAIL: usize = 2 * 8;
        self.head + words - self.memory[TAIL].load(Ordering::Acquire) <= RING_WORDS
    }

    pub(crate) fn is_dismissed(&mut self) -> bool {
        self.endpoint.connection_state(server(0)) != ConnectionState::Up
    }
}
