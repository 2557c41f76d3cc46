//! A memory server and endpoints to it, in one process.

use std::{
    net::Ipv4Addr,
    sync::Arc,
    time::{Duration, Instant},
};

use farlink_runtime::{
    buffer::{Buffer, Buffers},
    clock::Clock,
    fabric::{
        Completion, Done, Endpoint, Error, Fabric, Request, Ticket, Verb,
        verbs::{PortState, Secret, VerbsFabric, VerbsOptions, VerbsServeOptions, VerbsServer, devices},
    },
    layout::Records,
    ptr::{RemotePtr, ServerId},
    server::serve_verbs,
};

/// Far longer than anything takes, so that a test that hangs ends.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
/// Where tests read and write: inside the first chunk, behind all that the layout uses.
pub(crate) const FREE: u64 = 128 << 10;
pub(crate) const REGION_BYTES: u64 = 2 << 20;

/// Whether there is a device to test on.
pub(crate) fn has_device() -> bool {
    let usable = devices().is_ok_and(|devices| {
        devices.iter().any(|device| device.ports.iter().any(|port| port.state == PortState::Active))
    });
    if !usable {
        let required = std::env::var_os("FARLINK_REQUIRE_VERBS").is_some_and(|value| value == "1");
        assert!(!required, "FARLINK_REQUIRE_VERBS is 1, and there is no RDMA device with an active port");
        println!("skipped: there is no RDMA device with an active port (`farlink devices`)");
    }
    usable
}

pub(crate) fn secret() -> Secret {
    Secret::new("a secret for tests only").unwrap()
}

pub(crate) fn serve_options(server: usize, servers: usize) -> VerbsServeOptions {
    VerbsServeOptions {
        server,
        servers,
        bytes: REGION_BYTES,
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        ..VerbsServeOptions::new(secret())
    }
}

pub(crate) fn serve() -> VerbsServer {
    serve_verbs(&serve_options(0, 1), Records::All).unwrap()
}

pub(crate) fn options_to(servers: &[&VerbsServer]) -> VerbsOptions {
    VerbsOptions::new(servers.iter().map(|server| server.address().to_string()), secret())
}

pub(crate) fn connect(servers: &[&VerbsServer]) -> Arc<VerbsFabric> {
    Arc::new(VerbsFabric::connect(&options_to(servers)).unwrap())
}

pub(crate) fn at(server: u16, offset: u64) -> RemotePtr {
    RemotePtr::new(ServerId::new(server).unwrap(), offset).unwrap()
}

/// An endpoint, with buffers.
pub(crate) struct Wire {
    // Before the buffers that are registered with it.
    endpoint: Box<dyn Endpoint>,
    buffers: Buffers,
    next: u64,
    arrived: Vec<Completion>,
}

impl Wire {
    pub(crate) fn new(fabric: &VerbsFabric) -> Self {
        let endpoint = fabric.endpoint(0, Clock::monotonic()).unwrap();
        Self { endpoint, buffers: Buffers::default(), next: 0, arrived: Vec::new() }
    }

    pub(crate) fn endpoint(&mut self) -> &mut dyn Endpoint {
        &mut *self.endpoint
    }

    pub(crate) fn buffer(&mut self, words: usize) -> Buffer {
        // SAFETY: what is registered lives as long as `buffers`, which are dropped after the endpoint.
        self.buffers.take(words, |base, words| unsafe { self.endpoint.register(base, words) }).unwrap()
    }

    pub(crate) fn filled(&mut self, words: &[u64]) -> Buffer {
        let mut buffer = self.buffer(words.len());
        buffer.copy_from_slice(words);
        buffer
    }

    /// Rings for all of these; their tickets count up from the one returned.
    pub(crate) fn ring(&mut self, verbs: impl IntoIterator<Item = (RemotePtr, Verb)>) -> u64 {
        let first = self.next;
        let mut requests = Vec::new();
        for (at, verb) in verbs {
            requests.push(Request { ticket: Ticket(self.next), at, verb });
            self.next += 1;
        }
        self.endpoint.ring(&mut requests);
        assert!(requests.is_empty());
        first
    }

    /// Waits for so many completions.
    pub(crate) fn wait(&mut self, count: usize) -> Vec<Completion> {
        let start = Instant::now();
        while self.arrived.len() < count {
            self.endpoint.poll(&mut self.arrived);
            assert!(start.elapsed() < PATIENCE, "{} of {count} completions came", self.arrived.len());
        }
        self.arrived.drain(..count).collect()
    }

    /// Polls a while and expects nothing.
    pub(crate) fn expect_silence(&mut self) {
        for _ in 0..1000 {
            self.endpoint.poll(&mut self.arrived);
        }
        assert!(self.arrived.is_empty(), "{:?}", self.arrived);
    }

    pub(crate) fn one(&mut self, at: RemotePtr, verb: Verb) -> Result<Done, Box<Error>> {
        let ticket = self.ring([(at, verb)]);
        let completion = self.wait(1).remove(0);
        assert_eq!(completion.ticket, Ticket(ticket));
        completion.outcome
    }

    pub(crate) fn read(&mut self, at: RemotePtr, words: usize) -> Result<Vec<u64>, Box<Error>> {
        let buffer = self.buffer(words);
        match self.one(at, Verb::Read(buffer))? {
            Done::Read(buffer) => Ok(buffer.to_vec()),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn write(&mut self, at: RemotePtr, words: &[u64]) -> Result<(), Box<Error>> {
        let buffer = self.filled(words);
        match self.one(at, Verb::Write(buffer))? {
            Done::Written => Ok(()),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn compare_swap(&mut self, at: RemotePtr, expected: u64, new: u64) -> Result<u64, Box<Error>> {
        previous(self.one(at, Verb::CompareSwap { expected, new }))
    }

    pub(crate) fn fetch_add(&mut self, at: RemotePtr, amount: u64) -> Result<u64, Box<Error>> {
        previous(self.one(at, Verb::FetchAdd(amount)))
    }
}

pub(crate) fn previous(outcome: Result<Done, Box<Error>>) -> Result<u64, Box<Error>> {
    match outcome? {
        Done::Previous(word) => Ok(word),
        other => panic!("{other:?}"),
    }
}

/// Waits until `holds`, for what other threads do.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "it never came to pass: {what}");
        std::thread::yield_now();
    }
}
