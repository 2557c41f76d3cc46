//! The compute server's side of a control connection: questions, their answers, and the news that it is lost.

use std::{
    collections::VecDeque,
    net::{TcpStream, ToSocketAddrs},
    sync::mpsc::{self, RecvTimeoutError, TryRecvError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::control::{self, Answer, HelloAck, Question, Receiver, Secret, Sender, keep_alive};
use crate::{
    error::Error,
    ptr::ServerId,
    sync::{Arc, AtomicU64, Mutex, Ordering, lock},
    wire::DecodeError,
};

/// How long a memory server may take to prove itself.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long a memory server may take to answer: making a queue pair takes it milliseconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// How many control connections of a fabric are lost; an endpoint looks when the number changes.
pub(super) type Losses = Arc<AtomicU64>;

/// A control connection.
#[derive(Debug)]
pub(super) struct Session {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    address: String,
    server: ServerId,
    hello_ack: HelloAck,
    losses: Losses,
    line: Mutex<Line>,
}

#[derive(Debug)]
struct Line {
    sender: Sender,
    /// Who waits for the next answers, in order.
    waiting: VecDeque<mpsc::Sender<Answer>>,
    /// Why the connection is lost, once it is.
    lost: Option<String>,
}

/// An answer that is yet to come.
#[derive(Debug)]
pub(super) struct Awaited {
    answers: mpsc::Receiver<Answer>,
    shared: Arc<Shared>,
}

impl Session {
    /// Connects to the memory server at `address` and proves to know the secret, as it must. Blocks, for about `limit`.
    pub(super) fn connect(address: &str, secret: &Secret, losses: &Losses, limit: Duration) -> Result<Self, Error> {
        let unreachable = |why: std::io::Error| Error::Unreachable { address: address.into(), why: why.to_string() };
        let stream = dial(address, limit).map_err(unreachable)?;
        keep_alive(&stream).map_err(unreachable)?;
        let (sender, mut receiver) = control::connect(stream, secret, Instant::now() + limit)
            .map_err(|error| Error::NotAdmitted { address: address.into(), why: error.to_string() })?;
        receiver.set_limit(Some(limit)).map_err(unreachable)?;
        let hello_ack: HelloAck = receiver.receive()?.ok_or_else(|| Error::NotAdmitted {
            address: address.into(),
            why: "it hung up; it serves as many compute servers as it can, or is about to end".into(),
        })?;
        receiver.set_limit(None).map_err(unreachable)?;
        let Some(server) = u16::try_from(hello_ack.server).ok().and_then(ServerId::new) else {
            return Err(DecodeError("a memory server has an impossible number").into());
        };
        let line = Line { sender, waiting: VecDeque::new(), lost: None };
        let shared = Arc::new(Shared {
            address: address.into(),
            server,
            hello_ack,
            losses: Arc::clone(losses),
            line: Mutex::new(line),
        });
        let of_reader = Arc::clone(&shared);
        let reader = std::thread::Builder::new()
            .name(format!("farlink-control-{server}"))
            .spawn(move || read_answers(&of_reader, receiver))
            .map_err(Error::io("starting the thread of a control connection"))?;
        Ok(Self { shared, reader: Some(reader) })
    }

    pub(super) fn hello_ack(&self) -> &HelloAck {
        &self.shared.hello_ack
    }

    pub(super) fn server(&self) -> ServerId {
        self.shared.server
    }

    pub(super) fn address(&self) -> &str {
        &self.shared.address
    }

    /// Ends the connection from this side.
    pub(super) fn abort(&self) {
        lock(&self.shared.line).sender.shut_down();
    }

    /// Why the connection is lost, if it is.
    pub(super) fn lost(&self) -> Option<Error> {
        lock(&self.shared.line).lost.as_deref().map(|why| self.shared.lost(why))
    }

    /// Asks, without waiting for the answer.
    pub(super) fn ask(&self, question: &Question) -> Result<Awaited, Error> {
        let mut line = lock(&self.shared.line);
        if let Some(why) = &line.lost {
            return Err(self.shared.lost(why));
        }
        let (answer, answers) = mpsc::channel();
        line.waiting.push_back(answer);
        if let Err(error) = line.sender.send(question) {
            // The reader tells everybody.
            line.sender.shut_down();
            return Err(self.shared.lost(&error.to_string()));
        }
        Ok(Awaited { answers, shared: Arc::clone(&self.shared) })
    }
}

impl Shared {
    fn lost(&self, why: &str) -> Error {
        Error::ServerLost { server: self.server, address: self.address.clone(), why: why.into() }
    }

    fn lost_now(&self) -> Error {
        let line = lock(&self.line);
        self.lost(line.lost.as_deref().unwrap_or("it does not answer"))
    }
}

impl Awaited {
    /// Waits for the answer.
    pub(super) fn wait(self) -> Result<Answer, Error> {
        self.wait_for(ANSWER_LIMIT)
    }

    /// Waits for the answer, so long at most.
    pub(super) fn wait_for(self, limit: Duration) -> Result<Answer, Error> {
        match self.answers.recv_timeout(limit) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                // The line is out of step from here on.
                lock(&self.shared.line).sender.shut_down();
                Err(self.shared.lost(&format!("it has not answered for {limit:?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.lost_now()),
        }
    }

    /// The answer, if it has come.
    pub(super) fn try_take(&self) -> Option<Result<Answer, Error>> {
        match self.answers.try_recv() {
            Ok(answer) => Some(Ok(answer)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(self.shared.lost_now())),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        lock(&self.shared.line).sender.shut_down();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

fn dial(address: &str, limit: Duration) -> std::io::Result<TcpStream> {
    let mut refused = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// Hands answers to those who wait for them, until the connection ends.
fn read_answers(shared: &Shared, mut receiver: Receiver) {
    let why = loop {
        match receiver.receive::<Answer>() {
            Ok(Some(answer)) => match lock(&shared.line).waiting.pop_front() {
                // Whoever asked may have stopped waiting.
                Some(waiting) => drop(waiting.send(answer)),
                None => break "it answered what nobody had asked".into(),
            },
            Ok(None) => break "it closed the control connection: its process has ended, or it shut us out".into(),
            Err(error) => break error.to_string(),
        }
    };
    tracing::debug!(server = %shared.server, why, "control connection lost");
    let mut line = lock(&shared.line);
    line.sender.shut_down();
    line.lost = Some(why);
    line.waiting.clear();
    drop(line);
    // Release: who sees the number sees the loss.
    shared.losses.fetch_add(1, Ordering::Release);
}
