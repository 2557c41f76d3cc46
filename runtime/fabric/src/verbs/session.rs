//! The compute server's side of a control connection: questions, their answers, and the news that it is lost.

use std::{
    collections::VecDeque,
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs},
    sync::mpsc::{self, RecvTimeoutError, TryRecvError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use super::control::{self, Answer, HelloAck, Question, Receiver, Secret, Sender, keep_alive};
use crate::{
    connection::ListenerId,
    error::Error,
    lock::OwnerId,
    ptr::ServerId,
    sync::{Arc, AtomicU64, Mutex, Ordering, lock},
    wire::DecodeError,
};

/// How long a memory server may take to prove itself.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// How long the other side may take for one answer, which takes it milliseconds. Longer, and its process is stopped, say.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_secs(1);
/// The same where it connects a queue pair. To an address on Ethernet that nobody has, its system tries for a second before it refuses;
/// and who asked wants to hear that. In tests one that answers late never is too late.
const CONNECTING_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 3 });

/// For so long after a failure was told, nothing is said of others.
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(10);

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
    whose: ListenerId,
    hello_ack: HelloAck,
    losses: Losses,
    line: Mutex<Line>,
    /// When it was told last that requests to the memory server fail.
    told_at: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Line {
    sender: Sender,
    /// Who waits for the next answers, in order, and since when it is the turn of the first.
    waiting: VecDeque<Waiting>,
    turn_since: Instant,
    /// It did not answer who left, and nobody since.
    is_given_up: bool,
    /// Why the connection is lost, once it is.
    lost: Option<String>,
}

#[derive(Debug)]
struct Waiting {
    answers: mpsc::Sender<Answer>,
    /// How long the other side may take, once it is its turn.
    limit: Duration,
}

/// An answer that is yet to come.
#[derive(Debug)]
pub(super) struct Awaited {
    answers: mpsc::Receiver<Answer>,
    shared: Arc<Shared>,
}

/// What came of asking over a new connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Anew {
    Answered(Answer),
    /// It may be there, or not.
    Silent,
    /// The memory server that was there is not any more.
    Gone,
}

impl Session {
    /// Connects to the memory server at `address` and proves to know the secret, as it must. Blocks, for about `limit`.
    pub(super) fn connect(address: &str, secret: &Secret, losses: &Losses, limit: Duration) -> Result<Self, Error> {
        Self::open(address, None, secret, losses, limit)
    }

    /// Connects to this compute server, which listens at `address`; somebody else may, by now. Blocks, for about `limit` twice.
    pub(super) fn connect_peer(
        address: SocketAddr,
        peer: OwnerId,
        secret: &Secret,
        losses: &Losses,
        limit: Duration,
    ) -> Result<Self, Error> {
        let session = Self::open(&address.to_string(), Some(peer), secret, losses, limit)?;
        match session.ask(&Question::Lives(peer))?.wait() {
            Ok(Answer::Lives(true)) if session.hello_ack().servers == 0 => Ok(session),
            _ => Err(session.shared.lost("it is not the one that answers there")),
        }
    }

    /// Asks this over a connection of its own, whatever has become of this one. Blocks, for about `limit` twice.
    pub(super) fn ask_anew(&self, secret: &Secret, question: &Question, limit: Duration) -> Anew {
        let stream = match dial(self.address(), limit) {
            Ok(stream) => stream,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Anew::Gone,
            Err(_) => return Anew::Silent,
        };
        let losses = Losses::new(AtomicU64::new(0));
        match Self::over(stream, self.address(), None, secret, &losses, limit) {
            // Its memory went with its process, and another one serves there now.
            Ok(anew) if anew.hello_ack() != self.hello_ack() => Anew::Gone,
            Ok(anew) => match anew.ask(question).and_then(|asked| asked.wait_for(limit)) {
                Ok(answer) => Anew::Answered(answer),
                Err(_) => Anew::Silent,
            },
            Err(_) => Anew::Silent,
        }
    }

    fn open(
        address: &str,
        peer: Option<OwnerId>,
        secret: &Secret,
        losses: &Losses,
        limit: Duration,
    ) -> Result<Self, Error> {
        let unreachable = |why: std::io::Error| Error::Unreachable { address: address.into(), why: why.to_string() };
        Self::over(dial(address, limit).map_err(unreachable)?, address, peer, secret, losses, limit)
    }

    /// Over a TCP connection to that address.
    fn over(
        stream: TcpStream,
        address: &str,
        peer: Option<OwnerId>,
        secret: &Secret,
        losses: &Losses,
        limit: Duration,
    ) -> Result<Self, Error> {
        let unreachable = |why: std::io::Error| Error::Unreachable { address: address.into(), why: why.to_string() };
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
        let whose = peer.map_or(ListenerId::Memory(server), ListenerId::Compute);
        let line =
            Line { sender, waiting: VecDeque::new(), turn_since: Instant::now(), is_given_up: false, lost: None };
        let shared = Arc::new(Shared {
            address: address.into(),
            whose,
            hello_ack,
            losses: Arc::clone(losses),
            line: Mutex::new(line),
            told_at: Mutex::default(),
        });
        let of_reader = Arc::clone(&shared);
        let reader = std::thread::Builder::new()
            .name(match whose {
                ListenerId::Memory(server) => format!("farlink-control-{server}"),
                ListenerId::Compute(_) => "farlink-control-c".into(),
            })
            .spawn(move || read_answers(&of_reader, receiver))
            .map_err(Error::io("starting the thread of a control connection"))?;
        Ok(Self { shared, reader: Some(reader) })
    }

    pub(super) fn hello_ack(&self) -> &HelloAck {
        &self.shared.hello_ack
    }

    /// Of a compute server, 0.
    pub(super) fn server(&self) -> ServerId {
        match self.shared.whose {
            ListenerId::Memory(server) => server,
            ListenerId::Compute(_) => ServerId::new(0).expect("0 is a server id"),
        }
    }

    /// That it cannot be connected to.
    pub(super) fn missing(&self, why: String) -> Error {
        self.shared.missing(why)
    }

    pub(super) fn address(&self) -> &str {
        &self.shared.address
    }

    /// The hosts to which its address leads.
    pub(super) fn hosts(&self) -> Vec<IpAddr> {
        let addresses = self.shared.address.to_socket_addrs();
        addresses.map_or_else(|_| Vec::new(), |addresses| addresses.map(|address| address.ip()).collect())
    }

    /// Ends the connection from this side.
    pub(super) fn abort(&self) {
        lock(&self.shared.line).sender.shut_down();
    }

    /// Ends the connection from this side, for this reason.
    pub(super) fn give_up(&self, why: &str) {
        let mut line = lock(&self.shared.line);
        if line.lost.is_none() {
            tracing::warn!(server = %self.shared.whose, why, "control connection given up");
            self.shared.lose(&mut line, why.into());
        }
        line.sender.shut_down();
    }

    /// Why the connection is lost, if it is.
    pub(super) fn lost(&self) -> Option<Error> {
        lock(&self.shared.line).lost.as_deref().map(|why| self.shared.lost(why))
    }

    pub(super) fn is_lost(&self) -> bool {
        lock(&self.shared.line).lost.is_some()
    }

    /// Whether the memory server has not answered who left, and nobody since.
    pub(super) fn is_given_up(&self) -> bool {
        lock(&self.shared.line).is_given_up
    }

    /// Tells that a request has failed, though this connection is not known to be lost: of all workers' failures now and then one.
    pub(super) fn tell_failure(&self, now: Instant, why: &str) {
        let Shared { whose, address, told_at, .. } = &*self.shared;
        if is_told(&mut lock(told_at), now) {
            tracing::warn!(server = %whose, address, why, "requests fail over RDMA, while TCP works; they are tried again");
        } else {
            tracing::debug!(server = %whose, address, why, "a connection breaks");
        }
    }

    /// Asks, without waiting for the answer. While the other side does not answer at all, only what must arrive is sent: questions that
    /// nobody reads fill the way there, and once it is full the connection is lost.
    pub(super) fn ask(&self, question: &Question) -> Result<Awaited, Error> {
        let mut line = lock(&self.shared.line);
        if let Some(why) = &line.lost {
            return Err(self.shared.lost(why));
        }
        if line.is_silent() && !must_arrive(question) {
            return Err(self.shared.unanswered());
        }
        let answers = line.ask(question).map_err(|error| self.shared.lost(&error.to_string()))?;
        Ok(Awaited { answers, shared: Arc::clone(&self.shared) })
    }
}

/// Whether a failure is worth a warning: the first one, and then one after some time.
fn is_told(told_at: &mut Option<Instant>, now: Instant) -> bool {
    let is_due = told_at.is_none_or(|told_at| now.saturating_duration_since(told_at) >= TELL_AGAIN_AFTER);
    if is_due {
        *told_at = Some(now);
    }
    is_due
}

fn limit(question: &Question) -> Duration {
    match question {
        Question::Connect { .. } | Question::Attach { .. } => CONNECTING_LIMIT,
        _ => SILENCE_LIMIT,
    }
}

/// Whether it says that something can go, or is ready. Nobody says that over and over.
fn must_arrive(question: &Question) -> bool {
    matches!(
        question,
        Question::Disconnect(_)
            | Question::Detach(..)
            | Question::AttachReady(_)
            | Question::Release(_)
            | Question::Listen { port: 0, .. }
    )
}

impl Line {
    /// Whether the next answer should have come.
    fn is_silent(&self) -> bool {
        self.waiting.front().is_some_and(|next| self.turn_since.elapsed() >= next.limit)
    }

    fn ask(&mut self, question: &Question) -> std::io::Result<mpsc::Receiver<Answer>> {
        let (sender, answers) = mpsc::channel();
        if self.waiting.is_empty() {
            self.turn_since = Instant::now();
        }
        self.waiting.push_back(Waiting { answers: sender, limit: limit(question) });
        // The reader tells everybody of a failure.
        self.sender.send(question).inspect_err(|_| self.sender.shut_down())?;
        Ok(answers)
    }

    /// Whoever asked has stopped waiting: what the other side has made for it would stay for as long as this process runs.
    fn undo(&mut self, unwanted: &Answer) {
        let question = match unwanted {
            Answer::Connected(theirs) => Question::Disconnect(u64::from(theirs.queue_pair)),
            Answer::Attached { name, .. } => Question::Detach(*name, false),
            _ => return,
        };
        // With the control connection it goes anyway.
        let _ = self.ask(&question);
    }
}

impl Shared {
    fn lost(&self, why: &str) -> Error {
        match self.whose {
            ListenerId::Memory(server) => Error::ServerLost { server, address: self.address.clone(), why: why.into() },
            ListenerId::Compute(peer) => Error::PeerMissing { peer, why: format!("at {}: {why}", self.address) },
        }
    }

    fn unanswered(&self) -> Error {
        self.missing("its process does not answer".into())
    }

    fn missing(&self, why: String) -> Error {
        match self.whose {
            ListenerId::Memory(server) => Error::ServerMissing { server, why },
            ListenerId::Compute(peer) => Error::PeerMissing { peer, why },
        }
    }

    /// How much longer it may take for the next answer.
    fn patience(&self) -> Duration {
        let line = lock(&self.line);
        let limit = line.waiting.front().map_or(SILENCE_LIMIT, |next| next.limit);
        limit.saturating_sub(line.turn_since.elapsed())
    }

    /// Hands an answer to who waits for it; false if nobody has asked.
    fn hand_over(&self, answer: Answer) -> bool {
        let mut line = lock(&self.line);
        (line.turn_since, line.is_given_up) = (Instant::now(), false);
        let Some(waiting) = line.waiting.pop_front() else { return false };
        if let Err(mpsc::SendError(unwanted)) = waiting.answers.send(answer) {
            line.undo(&unwanted);
        }
        true
    }

    /// The connection is lost, for this reason. Counted under the lock: who finds it lost finds it counted, and, by the release, who sees the
    /// number finds the loss.
    fn lose(&self, line: &mut Line, why: String) {
        line.lost.get_or_insert(why);
        self.losses.fetch_add(1, Ordering::Release);
    }

    fn lost_now(&self) -> Error {
        let line = lock(&self.line);
        self.lost(line.lost.as_deref().unwrap_or("it does not answer"))
    }
}

impl Awaited {
    /// Waits for the answer as long as the other side answers at all: all that the asker's worker does waits for it.
    pub(super) fn wait(self) -> Result<Answer, Error> {
        self.answer_of_living().map_err(|error| match error {
            RecvTimeoutError::Timeout => self.shared.unanswered(),
            RecvTimeoutError::Disconnected => self.shared.lost_now(),
        })
    }

    /// The answer, if it has come, or an error if the other side does not answer at all.
    pub(super) fn try_wait(&self) -> Option<Result<Answer, Error>> {
        self.try_take().or_else(|| self.shared.patience().is_zero().then(|| Err(self.shared.unanswered())))
    }

    /// Waits for the answer, so long at most.
    pub(super) fn wait_for(self, limit: Duration) -> Result<Answer, Error> {
        match self.answers.recv_timeout(limit) {
            Ok(answer) => Ok(answer),
            Err(RecvTimeoutError::Timeout) => {
                let line = lock(&self.shared.line);
                line.sender.shut_down();
                let silent = line.turn_since.elapsed();
                drop(line);
                Err(self.shared.lost(&format!("it has not answered for {silent:.1?}")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.lost_now()),
        }
    }

    /// As [`Awaited::wait`], for who leaves: a memory server that does not answer is given up until it answers something.
    pub(super) fn wait_to_leave(self) {
        if self.answer_of_living() == Err(RecvTimeoutError::Timeout) {
            lock(&self.shared.line).is_given_up = true;
        }
    }

    fn answer_of_living(&self) -> Result<Answer, RecvTimeoutError> {
        loop {
            let patience = self.shared.patience();
            match self.answers.recv_timeout(patience) {
                Err(RecvTimeoutError::Timeout) if !patience.is_zero() => {}
                answered => return answered,
            }
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

impl Drop for Awaited {
    fn drop(&mut self) {
        // Answers are handed over under the same lock: one either is here already, or finds that nobody waits.
        let mut line = lock(&self.shared.line);
        let (_, nobodys) = mpsc::channel();
        if let Ok(unwanted) = std::mem::replace(&mut self.answers, nobodys).try_recv() {
            line.undo(&unwanted);
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

/// Connects to one of the addresses that the name has. The error is a refusal only if all of them refuse.
fn dial(address: &str, limit: Duration) -> std::io::Result<TcpStream> {
    let mut failed = None;
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(stream) => return Ok(stream),
            Err(error) => match &failed {
                Some(first) if std::io::Error::kind(first) != ErrorKind::ConnectionRefused => {}
                _ => failed = Some(error),
            },
        }
    }
    Err(failed.unwrap_or_else(|| std::io::Error::new(ErrorKind::NotFound, "the name has no address")))
}

/// Hands answers to those who wait for them, until the connection ends.
fn read_answers(shared: &Shared, mut receiver: Receiver) {
    let why = loop {
        match receiver.receive::<Answer>() {
            Ok(Some(answer)) => {
                if !shared.hand_over(answer) {
                    break "it answered what nobody had asked".into();
                }
            }
            Ok(None) => break "it closed the control connection: its process has ended, or it shut us out".into(),
            Err(error) => break error.to_string(),
        }
    };
    tracing::debug!(server = %shared.whose, why, "control connection lost");
    let mut line = lock(&shared.line);
    line.sender.shut_down();
    line.waiting.clear();
    shared.lose(&mut line, why);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::PeerId,
        verbs::{
            control::Opened,
            fake::{Fake, eventually, queue_pair},
        },
    };

    fn connect() -> Question {
        Question::Connect { ours: queue_pair(1), instead_of: None }
    }

    fn attach() -> Question {
        let who = PeerId { owner: OwnerId::new(1).unwrap(), worker: 0 };
        Question::Attach { ours: queue_pair(2), who, opened: Opened { address: 0, key: 0 }, ordered: true }
    }

    /// And what was asked behind it does not count as unanswered.
    #[test]
    fn a_refusal_to_connect_that_takes_its_time_reaches_who_asked() {
        let (mut served, session) = Fake::new(0, 1).meet();
        for question in [connect(), attach()] {
            let asked = session.ask(&question).unwrap();
            let behind = session.ask(&Question::Listens).unwrap();
            let answers = std::thread::scope(|scope| {
                scope.spawn(|| {
                    assert_eq!(served.next(), Some(question));
                    let since = Instant::now();
                    eventually("longer than other answers may take", || since.elapsed() > SILENCE_LIMIT);
                    served.say(&Answer::Refused("nobody has this address".into()));
                    assert_eq!(served.next(), Some(Question::Listens));
                    served.say(&Answer::Done);
                });
                let behind = scope.spawn(|| behind.wait());
                (asked.wait(), behind.join().unwrap())
            });
            assert_eq!(answers.0.unwrap(), Answer::Refused("nobody has this address".into()));
            assert_eq!(answers.1.unwrap(), Answer::Done);
        }
    }

    /// What it was asked meanwhile would fill the way there, and the connection be lost over it.
    #[test]
    fn who_does_not_answer_is_not_asked_more_until_it_does() {
        let (mut served, session) = Fake::new(0, 1).meet();
        let lives = Question::Lives(OwnerId::new(1).unwrap());
        for _ in 0..100_000 {
            let error = session.ask(&lives).and_then(Awaited::wait).unwrap_err();
            assert!(matches!(error, Error::ServerMissing { .. }), "{error}");
        }
        // What it holds for nobody would stay.
        let gone = Question::Detach(7, true);
        let left = session.ask(&gone).unwrap();
        assert!(!session.is_lost());
        for (question, answer) in [(lives, Answer::Lives(true)), (gone, Answer::Done)] {
            assert_eq!(served.next(), Some(question), "it was asked in vain");
            served.say(&answer);
        }
        // Until then it is still late.
        eventually("both answers are there", || lock(&session.shared.line).waiting.is_empty());
        assert_eq!(left.wait().unwrap(), Answer::Done);
        // It goes on.
        let again = session.ask(&lives).unwrap();
        assert_eq!(served.next(), Some(lives));
        served.say(&Answer::Lives(false));
        assert_eq!(again.wait().unwrap(), Answer::Lives(false));
    }

    /// Not only once the thread that reads from it has noticed.
    #[test]
    fn who_gives_up_has_counted_it() {
        let (_served, session) = Fake::new(0, 1).meet();
        session.give_up("a test ends it");
        assert!(session.is_lost() && session.shared.losses.load(Ordering::Acquire) > 0);
    }

    #[test]
    fn of_many_failures_few_are_told() {
        let (mut told_at, start) = (None, Instant::now());
        let told: Vec<_> = (0..30).filter(|&after| is_told(&mut told_at, start + Duration::from_secs(after))).collect();
        assert_eq!(told, [0, 10, 20]);
    }

    /// What was made for somebody who has given up, before or after the answer came, is taken back.
    #[test]
    fn what_nobody_waits_for_any_more_is_undone() {
        let (mut served, session) = Fake::new(0, 1).meet();
        let made = |number| {
            let opened = Opened { address: 8, key: 9 };
            [Answer::Connected(queue_pair(number)), Answer::Attached { name: 7, theirs: queue_pair(number), opened }]
        };
        // Late.
        for (number, question) in [(10, connect()), (20, attach())] {
            drop(session.ask(&question).unwrap());
            assert_eq!(served.next(), Some(question));
            let [connected, attached] = made(number);
            let (answer, undone) = match question {
                Question::Connect { .. } => (connected, Question::Disconnect(10)),
                _ => (attached, Question::Detach(7, false)),
            };
            served.say(&answer);
            assert_eq!(served.next(), Some(undone));
            served.say(&Answer::Done);
        }
        // In time, and nobody looked.
        let unseen = session.ask(&connect()).unwrap();
        let seen = session.ask(&connect()).unwrap();
        let [first, _] = made(30);
        let [second, _] = made(40);
        for answer in [first, second.clone()] {
            assert_eq!(served.next(), Some(connect()));
            served.say(&answer);
        }
        assert_eq!(seen.wait().unwrap(), second);
        drop(unseen);
        assert_eq!(served.next(), Some(Question::Disconnect(30)));
        // And nothing else: what was seen is whoever's has seen it.
        drop(session);
        assert_eq!(served.next(), None);
    }
}
