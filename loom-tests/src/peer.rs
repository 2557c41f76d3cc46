//! A few words of remote memory, and threads that reach them through real endpoints of the `mem` fabric.

use std::{
    cell::{Cell, RefCell},
    future::{Future, ready},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use farlink_runtime::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    error::Error,
    fabric::{
        Capabilities, Done, Endpoint, Error as FabricError, Fabric, Liveness, Request, Ticket, Verb,
        mem::{MemFabric, MemOptions},
        region::Region,
    },
    lock::{LockWord, OwnerId},
    page::SizeClass,
    ptr::{RemotePtr, ServerId},
    redo::{Recover, Room},
    remote::{Payload, Remote},
    server::LocalMemory,
    sync::AtomicU64,
};

/// Remote memory that the threads of a model share. The reference count is the standard library's, so that loom spends
/// no executions on it.
pub type SharedMemory = Arc<Memory>;

/// One memory server of a few words.
#[derive(Debug)]
pub struct Memory(MemFabric);

/// Bytes of server 0 before the first word: offset 0 is the null pointer, and pages are aligned.
const START: usize = 64;

/// Zeroed remote memory of `words` words.
pub fn share(words: usize) -> SharedMemory {
    let region = Region::anonymous(START + words * 8).expect("the heap has room");
    Arc::new(Memory(MemFabric::in_process(vec![region], MemOptions::default())))
}

impl Memory {
    /// The address of the `index`th word.
    pub fn at(&self, index: usize) -> RemotePtr {
        RemotePtr::new(ServerId::new(0).expect("0 is a server id"), (START + index * 8) as u64).expect("not null")
    }

    /// The words themselves, for setting up, for looking at the end, and for variants that break what an endpoint does.
    pub fn words(&self) -> &[AtomicU64] {
        &self.0.raw_words(ServerId::new(0).expect("0 is a server id"))[START / 8..]
    }

    /// The same, for a thread of the memory server.
    pub fn local(&self) -> LocalMemory {
        self.0.memory(ServerId::new(0).expect("0 is a server id")).expect("it is in this process")
    }

    /// The index of the word at an address.
    pub fn index(&self, at: RemotePtr) -> usize {
        (at.offset() as usize - START) / 8
    }
}

/// Something between a protocol and its endpoint that breaks what the protocol relies on.
pub trait Breaks {
    /// READ.
    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        peer.read_buffer(at, words)
    }

    /// WRITE.
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        peer.write(at, words);
    }

    /// Whether the answer to the next WRITE comes: it has its effect in any case.
    fn answers(&self) -> bool {
        true
    }

    /// Compare-and-swap; the word before.
    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        peer.swap(at, expected, new)
    }

    /// An atomic that changes nothing.
    fn load(&self, peer: &Peer, at: RemotePtr) -> u64 {
        peer.fetch_add(at, 0)
    }
}

/// Breaks nothing.
#[derive(Debug, Clone, Copy)]
pub struct Sound;

impl Breaks for Sound {}

/// A thread's connection to the memory server. Each call posts one request and waits for its completion.
#[derive(Debug)]
pub struct Peer {
    // Before the buffers: what is registered lives longer than the endpoint.
    endpoint: RefCell<Box<dyn Endpoint>>,
    buffers: Buffers,
    memory: SharedMemory,
    owner: Cell<u32>,
}

impl Peer {
    /// A connection for the calling thread.
    pub fn new(memory: &SharedMemory) -> Self {
        let endpoint = memory.0.endpoint(0, Clock::monotonic()).expect("mem endpoints are always to be had");
        Self {
            endpoint: RefCell::new(endpoint),
            buffers: Buffers::default(),
            memory: Arc::clone(memory),
            owner: Cell::new(1),
        }
    }

    /// As this compute server.
    pub fn of(memory: &SharedMemory, owner: u32) -> Self {
        let peer = Self::new(memory);
        peer.owner.set(owner);
        peer
    }

    /// The memory that it reaches.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// A buffer.
    pub fn take_buffer(&self, words: usize) -> Buffer {
        // SAFETY: what is registered lives as long as `buffers`, which are dropped after the endpoint.
        let register = |base, words| unsafe { self.endpoint.borrow_mut().register(base, words) };
        self.buffers.take(words, register).expect("mem registers everything")
    }

    fn request(&self, at: RemotePtr, verb: Verb) -> Done {
        let mut endpoint = self.endpoint.borrow_mut();
        endpoint.ring(&mut vec![Request { ticket: Ticket(0), at, verb }]);
        let mut completions = Vec::new();
        endpoint.poll(&mut completions);
        let completion = completions.pop().expect("without latency a request completes at once");
        completion.outcome.expect("models stay inside their memory")
    }

    /// READ.
    pub fn read_buffer(&self, at: RemotePtr, words: usize) -> Buffer {
        match self.request(at, Verb::Read(self.take_buffer(words))) {
            Done::Read(buffer) => buffer,
            other => unreachable!("a READ completes with its buffer, not {other:?}"),
        }
    }

    /// READ.
    pub fn read(&self, at: RemotePtr, words: usize) -> Vec<u64> {
        self.read_buffer(at, words).to_vec()
    }

    /// WRITE of several words; of one, as an unlock is.
    pub fn write(&self, at: RemotePtr, words: &[u64]) {
        if let &[word] = words {
            self.request(at, Verb::WriteWord(word));
            return;
        }
        let mut buffer = self.take_buffer(words.len());
        buffer.copy_from_slice(words);
        self.request(at, Verb::Write(buffer));
    }

    /// WRITE past the endpoint, without the order that it gives.
    pub fn write_relaxed(&self, at: RemotePtr, words: &[u64]) {
        for (to, &word) in self.memory.words()[self.memory.index(at)..].iter().zip(words) {
            to.store(word, farlink_runtime::sync::Ordering::Relaxed);
        }
    }

    /// Compare-and-swap; the word before.
    pub fn swap(&self, at: RemotePtr, expected: u64, new: u64) -> u64 {
        match self.request(at, Verb::CompareSwap { expected, new }) {
            Done::Previous(word) => word,
            other => unreachable!("an atomic completes with the word before, not {other:?}"),
        }
    }

    /// Fetch-and-add; the value before.
    pub fn fetch_add(&self, at: RemotePtr, add: u64) -> u64 {
        match self.request(at, Verb::FetchAdd(add)) {
            Done::Previous(word) => word,
            other => unreachable!("an atomic completes with the word before, not {other:?}"),
        }
    }

    /// What the runtime's protocols post their requests with.
    pub fn remote<B: Breaks>(&self, breaks: B) -> BrokenRemote<'_, B> {
        BrokenRemote { peer: self, breaks }
    }
}

/// A peer as the runtime's protocols want it, with something broken or not. Requests are carried out when they are posted.
#[derive(Debug)]
pub struct BrokenRemote<'a, B> {
    peer: &'a Peer,
    breaks: B,
}

impl<B: Breaks> Remote for BrokenRemote<'_, B> {
    fn owner(&self) -> OwnerId {
        OwnerId::new(u64::from(self.peer.owner.get())).expect("a small number")
    }

    fn capabilities(&self) -> Capabilities {
        self.peer.endpoint.borrow().capabilities()
    }

    fn buffer(&self, words: usize) -> Result<Buffer, Error> {
        Ok(self.peer.take_buffer(words))
    }

    fn read(&self, at: RemotePtr, words: usize) -> impl Future<Output = Result<Buffer, Box<Error>>> {
        ready(Ok(self.breaks.read(self.peer, at, words)))
    }

    fn write(&self, at: RemotePtr, payload: Payload) -> impl Future<Output = Result<(), Box<Error>>> {
        match payload {
            Payload::Word(word) => self.breaks.write(self.peer, at, &[word]),
            Payload::Words(words) => self.breaks.write(self.peer, at, &words),
        }
        ready(match self.breaks.answers() {
            true => Ok(()),
            false => {
                let error = FabricError::RequestFailed { what: "WRITE", at, why: "its answer is lost".into() };
                Err(Box::new(error.into()))
            }
        })
    }

    fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> impl Future<Output = Result<u64, Box<Error>>> {
        ready(Ok(self.breaks.compare_swap(self.peer, at, expected, new)))
    }

    fn load(&self, at: RemotePtr) -> impl Future<Output = Result<u64, Box<Error>>> {
        ready(Ok(self.breaks.load(self.peer, at)))
    }

    fn before_trying_again(&self, error: Box<Error>, _: &mut u32) -> impl Future<Output = Result<(), Box<Error>>> {
        ready(Err(error))
    }

    fn back_off(&self, _: u32) -> impl Future<Output = ()> {
        loom::thread::yield_now();
        ready(())
    }

    fn liveness(&self, _: OwnerId) -> Liveness {
        Liveness::Alive
    }
}

impl<B: Breaks> Recover for BrokenRemote<'_, B> {
    fn rings_of(&self, _: OwnerId, _: ServerId) -> impl Future<Output = Result<Option<RemotePtr>, Box<Error>>> {
        ready(Ok(None))
    }

    fn reserve(&self, _: RemotePtr, _: &[usize]) -> impl Future<Output = Result<Room, Box<Error>>> {
        ready(Err(Box::new(Error::OutOfMemory { class: SizeClass::SMALLEST })))
    }

    fn next_sequence(&self) -> u64 {
        1
    }

    fn holds_page(&self, _: RemotePtr, _: SizeClass) -> bool {
        true
    }

    fn retire(&self, _: RemotePtr, _: SizeClass, _: u64) {}

    fn repair(
        &self,
        page: RemotePtr,
        _: SizeClass,
        _: LockWord,
        owner: OwnerId,
    ) -> impl Future<Output = Result<(), Box<Error>>> {
        ready(Err(Box::new(Error::PageDamaged { page, owner })))
    }

    fn replay_logs(&self, _: OwnerId) -> impl Future<Output = Result<(), Box<Error>>> {
        ready(Ok(()))
    }
}

/// The output of a future that never waits for others.
///
/// # Panics
/// If it does.
pub fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it waits for somebody"),
    }
}
