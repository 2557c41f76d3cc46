//! A few words of remote memory, and threads that reach them through real endpoints of the `mem` fabric.

use std::sync::Arc;

use farlink_runtime::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    fabric::{Done, Endpoint, Fabric, Request, Ticket, Verb, mem::MemFabric},
    ptr::{RemotePtr, ServerId},
    sync::AtomicU64,
};

/// Remote memory that the threads of a model share. The reference count is the standard library's, so that loom spends
/// no executions on it.
pub type SharedMemory = Arc<Memory>;

/// One memory server of a few words.
#[derive(Debug)]
pub struct Memory(MemFabric);

/// Zeroed remote memory of `words` words.
pub fn share(words: usize) -> SharedMemory {
    // Offset 0 of server 0 is the null pointer: word 0 stays unused.
    Arc::new(Memory(MemFabric::unformatted(words + 1).expect("the heap has room")))
}

impl Memory {
    /// The address of the `index`th word.
    pub fn at(&self, index: usize) -> RemotePtr {
        RemotePtr::new(ServerId::new(0).expect("0 is a server id"), (index as u64 + 1) * 8).expect("not null")
    }

    /// The words themselves, for setting up, for looking at the end, and for variants that break what an endpoint does.
    pub fn words(&self) -> &[AtomicU64] {
        &self.0.raw_words(ServerId::new(0).expect("0 is a server id"))[1..]
    }
}

/// A thread's connection to the memory server. Each call posts one request and waits for its completion.
#[derive(Debug)]
pub struct Peer {
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
}

impl Peer {
    /// A connection for the calling thread.
    pub fn new(memory: &Memory) -> Self {
        let endpoint = memory.0.endpoint(0, Clock::monotonic()).expect("mem endpoints are always to be had");
        Self { endpoint, buffers: Buffers::default() }
    }

    fn buffer(&mut self, words: usize) -> Buffer {
        let endpoint = &mut self.endpoint;
        self.buffers.take(words, |base, words| endpoint.register(base, words)).expect("mem registers everything")
    }

    fn request(&mut self, at: RemotePtr, verb: Verb) -> Done {
        self.endpoint.ring(&mut vec![Request { ticket: Ticket(0), at, verb }]);
        let mut completions = Vec::new();
        self.endpoint.poll(&mut completions);
        let completion = completions.pop().expect("without latency a request completes at once");
        completion.outcome.expect("models stay inside their memory")
    }

    /// READ.
    pub fn read(&mut self, at: RemotePtr, words: usize) -> Vec<u64> {
        let buffer = self.buffer(words);
        match self.request(at, Verb::Read(buffer)) {
            Done::Read(buffer) => buffer.to_vec(),
            other => unreachable!("a READ completes with its buffer, not {other:?}"),
        }
    }

    /// WRITE of several words.
    pub fn write(&mut self, at: RemotePtr, words: &[u64]) {
        let mut buffer = self.buffer(words.len());
        buffer.copy_from_slice(words);
        self.request(at, Verb::Write(buffer));
    }

    /// WRITE of one word, as an unlock is.
    pub fn write_word(&mut self, at: RemotePtr, word: u64) {
        self.request(at, Verb::WriteWord(word));
    }

    /// Compare-and-swap; true if the word had the expected value.
    pub fn compare_swap(&mut self, at: RemotePtr, expected: u64, new: u64) -> bool {
        matches!(self.request(at, Verb::CompareSwap { expected, new }), Done::Previous(word) if word == expected)
    }

    /// Fetch-and-add; the value before.
    pub fn fetch_add(&mut self, at: RemotePtr, add: u64) -> u64 {
        match self.request(at, Verb::FetchAdd(add)) {
            Done::Previous(word) => word,
            other => unreachable!("an atomic completes with the word before, not {other:?}"),
        }
    }
}
