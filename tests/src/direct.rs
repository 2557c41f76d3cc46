//! An endpoint driven by hand, without a worker: what tests of fabrics use, and those that damage memory.

use std::{
    cell::{Cell, RefCell},
    sync::Arc,
};

use farlink_runtime::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    error::Error,
    fabric::{Capabilities, Completion, Done, Endpoint, Error as FabricError, Fabric, Request, Ticket, Verb},
    ptr::RemotePtr,
};

/// What one request came to.
pub type Outcome = Result<Done, Box<FabricError>>;

/// An endpoint and its buffers.
#[derive(Debug)]
pub struct Direct {
    // Before the buffers: what is registered lives longer than the endpoint.
    endpoint: RefCell<Box<dyn Endpoint>>,
    buffers: Buffers,
    tickets: Cell<u64>,
}

impl Direct {
    /// A new endpoint of `fabric`; `seed` decides what is random about it.
    ///
    /// # Errors
    /// As [`Fabric::endpoint`].
    pub fn new(fabric: &Arc<dyn Fabric>, seed: u64) -> Result<Self, Error> {
        let endpoint = RefCell::new(fabric.endpoint(seed, Clock::monotonic())?);
        Ok(Self { endpoint, buffers: Buffers::default(), tickets: Cell::new(0) })
    }

    /// What the fabric guarantees.
    pub fn capabilities(&self) -> Capabilities {
        self.endpoint.borrow().capabilities()
    }

    /// A buffer with these words.
    ///
    /// # Errors
    /// If the fabric refuses to register memory.
    pub fn buffer(&self, words: &[u64]) -> Result<Buffer, Error> {
        // SAFETY: what is registered lives as long as `buffers`, which are dropped after the endpoint.
        let register = |base, words| unsafe { self.endpoint.borrow_mut().register(base, words) };
        let mut buffer = self.buffers.take(words.len(), register)?;
        buffer.copy_from_slice(words);
        Ok(buffer)
    }

    /// Posts all with one doorbell, under tickets of their own. Returns the first ticket; the others follow it.
    pub fn ring(&self, verbs: impl IntoIterator<Item = (RemotePtr, Verb)>) -> u64 {
        let first = self.tickets.get();
        let numbered = verbs.into_iter().zip(first..);
        let mut requests: Vec<Request> =
            numbered.map(|((at, verb), ticket)| Request { ticket: Ticket(ticket), at, verb }).collect();
        self.tickets.set(first + requests.len() as u64);
        self.endpoint.borrow_mut().ring(&mut requests);
        assert!(requests.is_empty(), "ringing leaves the vector empty");
        first
    }

    /// The completions that have arrived.
    pub fn poll(&self) -> Vec<Completion> {
        let mut completions = Vec::new();
        self.endpoint.borrow_mut().poll(&mut completions);
        completions
    }

    /// Posts all with one doorbell and waits for all; what each came to, in the order of posting.
    ///
    /// # Panics
    /// If a completion is of another request, or comes twice.
    pub fn all(&self, verbs: impl IntoIterator<Item = (RemotePtr, Verb)>) -> Vec<Outcome> {
        let first = self.ring(verbs);
        let count = self.tickets.get() - first;
        let mut outcomes: Vec<Option<Outcome>> = (0..count).map(|_| None).collect();
        let mut missing = count;
        while missing > 0 {
            for Completion { ticket, outcome } in self.poll() {
                let slot = ticket.0.checked_sub(first).and_then(|index| outcomes.get_mut(index as usize));
                let slot = slot.unwrap_or_else(|| panic!("a completion of {ticket:?}, which is not in flight"));
                assert!(slot.replace(outcome).is_none(), "{ticket:?} completed twice");
                missing -= 1;
            }
            std::thread::yield_now();
        }
        outcomes.into_iter().flatten().collect()
    }

    /// Posts one request and waits for it.
    ///
    /// # Errors
    /// As the request.
    pub fn one(&self, at: RemotePtr, verb: Verb) -> Outcome {
        self.all([(at, verb)]).pop().expect("one request has one outcome")
    }

    /// Reads words, up to [`BUFFER_WORDS_MAX`](farlink_runtime::buffer::BUFFER_WORDS_MAX).
    ///
    /// # Errors
    /// As the request.
    pub fn read(&self, at: RemotePtr, words: usize) -> Result<Vec<u64>, Error> {
        let buffer = self.buffer(&vec![0; words])?;
        match self.one(at, Verb::Read(buffer))? {
            Done::Read(buffer) => Ok(buffer.to_vec()),
            other => panic!("a READ completed with {other:?}"),
        }
    }

    /// Writes words, up to [`BUFFER_WORDS_MAX`](farlink_runtime::buffer::BUFFER_WORDS_MAX).
    ///
    /// # Errors
    /// As the request.
    pub fn write(&self, at: RemotePtr, words: &[u64]) -> Result<(), Error> {
        let buffer = self.buffer(words)?;
        written(self.one(at, Verb::Write(buffer)))
    }

    /// Writes one word, which travels in the request.
    ///
    /// # Errors
    /// As the request.
    pub fn write_word(&self, at: RemotePtr, word: u64) -> Result<(), Error> {
        written(self.one(at, Verb::WriteWord(word)))
    }

    /// Replaces `expected`; the word before.
    ///
    /// # Errors
    /// As the request.
    pub fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> Result<u64, Error> {
        previous(self.one(at, Verb::CompareSwap { expected, new }))
    }

    /// Adds; the word before.
    ///
    /// # Errors
    /// As the request.
    pub fn fetch_add(&self, at: RemotePtr, add: u64) -> Result<u64, Error> {
        previous(self.one(at, Verb::FetchAdd(add)))
    }
}

/// What a WRITE came to.
///
/// # Errors
/// As the request.
pub fn written(outcome: Outcome) -> Result<(), Error> {
    match outcome? {
        Done::Written => Ok(()),
        other => panic!("a WRITE completed with {other:?}"),
    }
}

/// What an atomic came to.
///
/// # Errors
/// As the request.
pub fn previous(outcome: Outcome) -> Result<u64, Error> {
    match outcome? {
        Done::Previous(word) => Ok(word),
        other => panic!("an atomic completed with {other:?}"),
    }
}
