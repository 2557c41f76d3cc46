//! The other side of a control connection without a device: it answers what a test has it answer.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::{
    control::{self, Answer, HelloAck, Question, Receiver, Secret, Sender},
    ib::{Atomics, Peer},
    session::{Losses, Session},
};
use crate::sync::AtomicU64;

/// Far longer than anything takes, so that a test that hangs ends.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) fn secret() -> Secret {
    Secret::new("a secret for tests only").unwrap()
}

pub(super) fn losses() -> Losses {
    Losses::new(AtomicU64::new(0))
}

/// A queue pair that nobody has.
pub(super) fn queue_pair(number: u32) -> Peer {
    Peer { queue_pair: number, first_packet: 1, lid: 0, gid: [7; 16], mtu: 3, reads_out: 1, reads_in: 1 }
}

/// Waits until `holds`, for what other threads do.
pub(super) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "it never came to pass: {what}");
        std::thread::yield_now();
    }
}

/// Where a memory server accepts, or a compute server that listens.
#[derive(Debug)]
pub(super) struct Fake {
    listener: TcpListener,
    pub(super) hello_ack: HelloAck,
}

/// Its end of a connection.
#[derive(Debug)]
pub(super) struct Served {
    sender: Sender,
    receiver: Receiver,
}

impl Fake {
    /// The memory server of this number, of so many.
    pub(super) fn new(server: u64, servers: u64) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let hello_ack = HelloAck {
            server,
            servers,
            cluster: 1,
            address: 4096,
            bytes: 8192,
            key: 3,
            atomics: Atomics::Device,
            ordered: true,
        };
        Self { listener, hello_ack }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// The next connection, of which nothing was read yet.
    pub(super) fn take(&self) -> TcpStream {
        let mut taken = None;
        eventually("somebody connects", || {
            taken = self.listener.accept().ok();
            taken.is_some()
        });
        let (stream, _) = taken.expect("somebody has connected");
        stream.set_nonblocking(false).unwrap();
        stream
    }

    /// Whether there is a connection that was not taken.
    pub(super) fn is_called(&self) -> bool {
        self.listener.accept().is_ok()
    }

    /// The next connection of somebody who knows the secret.
    pub(super) fn accept(&self) -> Served {
        let (mut sender, receiver) = control::accept(self.take(), &secret(), Instant::now() + PATIENCE).unwrap();
        sender.send(&self.hello_ack).unwrap();
        receiver.set_limit(Some(PATIENCE)).unwrap();
        Served { sender, receiver }
    }

    /// Both ends of a connection.
    pub(super) fn meet(&self) -> (Served, Session) {
        std::thread::scope(|scope| {
            let served = scope.spawn(|| self.accept());
            let session = Session::connect(&self.address().to_string(), &secret(), &losses(), PATIENCE).unwrap();
            (served.join().unwrap(), session)
        })
    }
}

impl Served {
    /// The next question; none once the other side has hung up.
    pub(super) fn next(&mut self) -> Option<Question> {
        self.receiver.receive().unwrap()
    }

    pub(super) fn say(&mut self, answer: &Answer) {
        self.sender.send(answer).unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.sender.shut_down();
    }
}
