//! A channel of a worker that a test turns.

mod lost;
mod waits;

use std::{
    cell::{Cell, RefCell},
    pin::pin,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use farlink_fabric::{
    Capabilities, Endpoint, Error as FabricError, Fabric, Request,
    buffer::{Buffer, Buffers},
    clock::Clock,
    connection::PeerId,
    listener::{CONNECTION_BYTES_MIN, Change, ListenOptions, Listener, ServerEndpoint},
    lock::OwnerId,
    mem::{MemFabric, MemOptions},
    ptr::ServerId,
    region::Region,
};

use super::{Batch, Channel, ChannelOptions, Channels, Host, Tasks};
use crate::{
    Error,
    connection::{Carrier, Connection, SendConfig, Sending, Source},
    message::{hello_ack, refusal, reply_header, reply_item},
    pieces::Outbound,
    protocol::{Kind, Priority, Refusal},
    serve::{Request as Asked, Responder, Service},
    server::{ManualMessageServer, MessageServer, ServeMessages, ServerCounts},
};

const ANSWER_WAIT: Duration = Duration::from_millis(1500);

/// One task, which is polled after every turn.
#[derive(Debug)]
struct Worker {
    // Before the buffers that are registered with it.
    endpoint: RefCell<Box<dyn Endpoint>>,
    outbox: RefCell<Vec<Request>>,
    buffers: Buffers,
    /// How many more it gives out before it refuses one.
    buffers_left: Cell<u64>,
    number: u32,
    channels: Channels,
    now_ns: Cell<u64>,
    ended: Cell<bool>,
}

impl Worker {
    fn new(fabric: &MemFabric) -> Rc<Self> {
        Self::with_number(fabric, 0)
    }

    fn with_number(fabric: &MemFabric, number: u32) -> Rc<Self> {
        Rc::new(Self {
            number,
            endpoint: RefCell::new(fabric.endpoint(1, Clock::monotonic()).unwrap()),
            outbox: RefCell::default(),
            buffers: Buffers::default(),
            buffers_left: Cell::new(u64::MAX),
            channels: Channels::default(),
            now_ns: Cell::default(),
            ended: Cell::default(),
        })
    }

    fn turn(&self) {
        self.channels.turn(self, true);
        let mut endpoint = self.endpoint.borrow_mut();
        endpoint.ring(&mut self.outbox.borrow_mut());
        let mut completions = Vec::new();
        endpoint.poll(&mut completions);
        drop(endpoint);
        completions.into_iter().for_each(|completion| self.channels.complete(completion));
    }
}

impl Tasks for Worker {
    fn task_of(&self, _waker: &Waker) -> Option<usize> {
        None
    }

    fn set_ready(&self, _task: usize) {}
}

impl Host for Worker {
    fn channels(&self) -> &Channels {
        &self.channels
    }

    fn peer_id(&self) -> PeerId {
        PeerId { owner: OwnerId::new(5).unwrap(), worker: self.number }
    }

    fn capabilities(&self) -> Capabilities {
        self.endpoint.borrow().capabilities()
    }

    fn endpoint(&self) -> &RefCell<Box<dyn Endpoint>> {
        &self.endpoint
    }

    fn buffer(&self, words: usize) -> Result<Buffer, FabricError> {
        let Some(left) = self.buffers_left.get().checked_sub(1) else {
            self.buffers_left.set(u64::MAX);
            let (bytes, device, remedy) = (words as u64 * 8, "none".into(), "none".into());
            let cause = std::io::ErrorKind::OutOfMemory.into();
            return Err(FabricError::RegistrationRefused { bytes, device, cause, remedy });
        };
        self.buffers_left.set(left);
        self.buffers.take(words, |_, _| Ok(Default::default()))
    }

    fn post(&self, request: Request) {
        self.outbox.borrow_mut().push(request);
    }

    fn withdraw(&self, server: ServerId) {
        self.outbox.borrow_mut().retain(|request| request.at.server() != server);
    }

    fn has_ended(&self) -> bool {
        self.ended.get()
    }

    fn now_ns(&self) -> u64 {
        self.now_ns.get()
    }

    fn answer_wait(&self, _server: ServerId) -> Option<Duration> {
        Some(ANSWER_WAIT)
    }

    fn tasks(&self) -> &dyn Tasks {
        self
    }

    fn message_begins(&self) -> u64 {
        0
    }

    fn message_ends(&self, _begun: u64) {}

    fn count_bytes(&self, _bytes: u64) {}
}

/// What the memory server posts.
struct Posts<'a>(&'a Buffers, Vec<Request>);

impl Carrier for Posts<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError> {
        self.0.take(words, |_, _| Ok(Default::default()))
    }

    fn post(&mut self, request: Request) {
        self.1.push(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        Vec::new()
    }
}

struct Nothing;

impl Source for Nothing {
    fn message(&self, _number: u64, _begun: bool) -> Option<Outbound<'_>> {
        None
    }
}

/// What a channel's options say reaches the memory server once the connection is up.
#[test]
fn a_channel_tells_the_memory_server_how_to_send() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
    let worker = Worker::new(&fabric);
    let options = ChannelOptions { eager_words: Some(77), coalesce: false };
    let mut opening = pin!(Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, options));
    let mut poll = || opening.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll().is_pending());
    let (buffers, mut server, mut changes) = (Buffers::default(), None, Vec::new());
    let told = (0..1000).find_map(|_| {
        worker.turn();
        port.changes(true, &mut changes);
        for change in changes.drain(..) {
            let Change::Joined { peer, memory, .. } = change else { panic!("nobody left: {change:?}") };
            let sending = Sending { ordered: true, coalesce: true, eager_words: usize::MAX, gather_max: 1 };
            let mut connection = Connection::new(memory, peer, 1, sending).unwrap();
            connection.enqueue_notice(&hello_ack(1, 1));
            server = Some(connection);
        }
        let server = server.as_mut()?;
        let mut carrier = Posts(&buffers, Vec::new());
        server.send_out(&Nothing, &mut carrier).unwrap();
        port.ring(&mut carrier.1);
        let mut completions = Vec::new();
        port.poll(&mut completions);
        completions.into_iter().for_each(|completion| server.complete(completion));
        server.remote_config()
    });
    assert_eq!(told, Some(SendConfig { eager_words: 77, coalesce: false }));
    assert!(matches!(poll(), Poll::Ready(Ok(_))));
    worker.channels.close(&*worker);
    // The port goes before the buffers that it may still use.
    drop(port);
}

/// A memory server that only reports its load is not given up; one that does nothing is, after the wait, and what was sent may still be done.
#[test]
fn a_memory_server_that_stands_still_is_given_up() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let mut port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
    let worker = Worker::new(&fabric);
    let mut asking = pin!(async {
        let channel = Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()).await?;
        channel.request(Kind(1), &1u64, Priority::Latency).await.map(drop)
    });
    let (buffers, mut server, mut changes) = (Buffers::default(), None, Vec::new());
    let mut turn = |report: Option<u64>| {
        worker.now_ns.set(worker.now_ns.get() + ANSWER_WAIT.as_nanos() as u64 / 100);
        worker.turn();
        port.changes(true, &mut changes);
        for change in changes.drain(..) {
            let Change::Joined { peer, memory, .. } = change else { continue };
            let sending = Sending { ordered: true, coalesce: true, eager_words: usize::MAX, gather_max: 1 };
            let mut connection = Connection::new(memory, peer, 1, sending).unwrap();
            connection.enqueue_notice(&hello_ack(1, 1));
            server = Some(connection);
        }
        if let (Some(server), Some(report)) = (server.as_mut(), report) {
            let mut carrier = Posts(&buffers, Vec::new());
            server.post_control_word(report, &mut carrier);
            server.send_out(&Nothing, &mut carrier).unwrap();
            port.ring(&mut carrier.1);
            let mut completions = Vec::new();
            port.poll(&mut completions);
            completions.into_iter().for_each(|completion| server.complete(completion));
        }
        asking.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    };
    assert!((1..10_000).all(|report| turn(Some(report)).is_pending()), "given up while it reports");
    let ended = (1..10_000).find_map(|turns| match turn(None) {
        Poll::Ready(outcome) => Some((turns, outcome)),
        Poll::Pending => None,
    });
    let Some((turns, Err(Error::NoAnswer { server: id, waited: ANSWER_WAIT }))) = ended else { panic!("{ended:?}") };
    assert!(id.number() == 0 && turns > 100, "after {turns} turns");
    // It is connected anew, and does not say hello either.
    let mut opening = pin!(Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()));
    let opened = (0..10_000).find_map(|_| {
        worker.now_ns.set(worker.now_ns.get() + ANSWER_WAIT.as_nanos() as u64 / 100);
        worker.turn();
        match opening.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(opened) => Some(opened.map(drop)),
            Poll::Pending => None,
        }
    });
    let says_why = |error: &Error| error.to_string().contains("no sign of life for 1500 ms");
    assert!(matches!(&opened, Some(Err(error)) if says_why(error)), "{opened:?}");
    worker.channels.close(&*worker);
    drop(port);
}

/// Says how much it is told, once it may.
struct Counts {
    has_come: Arc<AtomicBool>,
    may_answer: Arc<AtomicBool>,
}

impl Service for Counts {
    fn handle(&mut self, request: Asked<'_>, reply: Responder) {
        self.has_come.store(true, Ordering::Release);
        while !self.may_answer.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        reply.send(&(request.words().len() as u64));
    }
}

/// Also by a worker that still holds what the memory server has fetched: it learns that, the answer and the end all at once.
#[test]
fn a_memory_server_that_ends_is_left() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let [has_come, may_answer] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (come, may) = (Arc::clone(&has_come), Arc::clone(&may_answer));
    let counts = move |_| {
        let counts = Counts { has_come: Arc::clone(&come), may_answer: Arc::clone(&may) };
        Ok(Box::new(counts) as Box<dyn Service>)
    };
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let server = MessageServer::start(listener, &ServeMessages::default(), counts).unwrap();
    let worker = Worker::new(&fabric);
    let options = ChannelOptions { eager_words: Some(10), coalesce: true };
    let mut asking = pin!(async {
        let channel = Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, options).await?;
        let answered = channel.request_words(Kind(1), &[7; 600], Priority::Latency).await?.words().to_vec();
        let missing = channel.request_words(Kind(1), &[7; 600], Priority::Latency).await.map(drop);
        Ok::<_, Error>((answered, missing))
    });
    let mut poll = || asking.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    while !has_come.load(Ordering::Acquire) {
        worker.turn();
        assert!(poll().is_pending());
    }
    may_answer.store(true, Ordering::Release);
    drop(server);
    let ended = (0..1000).find_map(|_| {
        worker.turn();
        match poll() {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        }
    });
    let Some(Ok((answered, Err(Error::Fabric(FabricError::ServerMissing { .. }))))) = ended else {
        panic!("{ended:?}")
    };
    assert_eq!(answered, [600]);
    worker.channels.close(&*worker);
}

/// A memory server that a test plays, and the session that it names.
struct Played {
    port: Box<dyn ServerEndpoint>,
    // After the port, which may still use them.
    buffers: Buffers,
    connection: Option<(ServerId, Connection)>,
    session: u64,
    /// What it says right behind its next hello.
    with_hello: Option<Vec<u64>>,
    _fabric: (MemFabric, Box<dyn Listener>),
}

/// It, and a worker.
fn played() -> (Played, Rc<Worker>) {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let listener = fabric.listen(ServerId::new(0).unwrap(), &ListenOptions::default()).unwrap();
    let port = listener.endpoint(0, 1, Clock::monotonic()).unwrap();
    let worker = Worker::new(&fabric);
    let buffers = Buffers::default();
    (Played { port, buffers, connection: None, session: 7, with_hello: None, _fabric: (fabric, listener) }, worker)
}

impl Played {
    /// What it is asked.
    fn turn(&mut self) -> Option<Vec<u64>> {
        let mut changes = Vec::new();
        self.port.changes(true, &mut changes);
        for change in changes {
            let Change::Joined { peer, memory, .. } = change else { continue };
            let sending = Sending { ordered: true, coalesce: true, eager_words: usize::MAX, gather_max: 1 };
            let mut connection = Connection::new(memory, peer, 1, sending).unwrap();
            connection.enqueue_notice(&hello_ack(1, self.session));
            self.with_hello.take().iter().for_each(|words| connection.enqueue_notice(words));
            self.connection = Some((peer, connection));
        }
        let (_, connection) = self.connection.as_mut()?;
        let mut carrier = Posts(&self.buffers, Vec::new());
        connection.send_out(&Nothing, &mut carrier).unwrap();
        let asked = connection.receive(Priority::Latency, &mut carrier).unwrap();
        self.port.ring(&mut carrier.1);
        let mut completions = Vec::new();
        self.port.poll(&mut completions);
        completions.into_iter().for_each(|completion| connection.complete(completion));
        asked
    }
}

/// What comes of what `ask` asks of a memory server that `answer` plays; none if nothing does.
fn play<T>(
    ask: impl AsyncFnOnce(Channel) -> Result<T, Error>,
    mut answer: impl FnMut(&mut Played, &[u64]),
) -> Option<Result<T, Error>> {
    let (mut server, worker) = played();
    let id = ServerId::new(0).unwrap();
    let mut asking = pin!(async {
        ask(Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()).await?).await
    });
    let ended = (0..400).find_map(|_| {
        worker.now_ns.set(worker.now_ns.get() + 3_000_000);
        worker.turn();
        if let Some(asked) = server.turn() {
            answer(&mut server, &asked);
        }
        match asking.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        }
    });
    worker.channels.close(&*worker);
    ended
}

/// How often a memory server gets a request that it does not answer before the connection is lost, if it then names this session; and how
/// the request ends.
fn asked_again(session: u64) -> (usize, Option<Result<(), Error>>) {
    let mut asked = 0;
    let ask = async |channel: Channel| channel.request(Kind(1), &1u64, Priority::Latency).await.map(drop);
    let ended = play(ask, |server, _| {
        asked += 1;
        if asked == 1
            && let Some((peer, _)) = server.connection.take()
        {
            server.port.dismiss(peer);
            server.session = session;
        }
    });
    (asked, ended)
}

/// Only the session that a request was sent to knows whether it is a repeat.
#[test]
fn a_request_is_repeated_only_to_the_session_that_it_was_sent_to() {
    let (asked, ended) = asked_again(7);
    // Nobody answers, and it waits.
    let waits = matches!(ended, None | Some(Err(Error::NoAnswer { .. })));
    assert!(asked == 2 && waits, "asked {asked} times, and then {ended:?}");
    let (asked, ended) = asked_again(8);
    assert!(asked == 1 && matches!(ended, Some(Err(Error::OutcomeUnknown { .. }))), "asked {asked} times, {ended:?}");
}

/// Who looks late finds the answer beside the hello.
#[test]
fn a_request_that_is_answered_before_it_is_repeated_is_not_repeated() {
    let mut asked = Vec::new();
    let ask = async |channel: Channel| {
        for number in 0..2u64 {
            channel.request(Kind(1), &number, Priority::Latency).await?;
        }
        Ok(())
    };
    let ended = play(ask, |server, words| {
        let [first, second] = reply_header(1, words[1]);
        let reply = [first, second, reply_item(0, 0, Ok(()))];
        asked.push(words[1]);
        match server.connection.take_if(|_| asked.len() == 1) {
            Some((peer, _)) => {
                server.port.dismiss(peer);
                server.with_hello = Some(reply.to_vec());
            }
            None => server.connection.iter_mut().for_each(|(_, connection)| connection.enqueue_notice(&reply)),
        }
    });
    assert!(matches!(ended, Some(Ok(()))) && asked == [1, 2], "asked for {asked:?}, and then {ended:?}");
}

/// The items of a batch come in any order, and a refusal that answers a whole batch is one item.
#[test]
fn each_request_of_a_batch_ends_as_the_memory_server_says() {
    let ask = async |channel: Channel| {
        let mut batch = Batch::default();
        (0..2u64).for_each(|number| batch.push(Kind(1), &number));
        let one_refused = channel.batch(&batch, Priority::Latency).await?;
        Ok((one_refused, channel.batch(&batch, Priority::Latency).await?))
    };
    let ended = play(ask, |server, asked| {
        let Some((_, connection)) = &mut server.connection else { return };
        let sequence = asked[1];
        let [first, second] = reply_header(2, sequence);
        let refused = reply_item(0, 0, Err(Refusal::Malformed));
        let words = match sequence {
            1 => &[first, second, reply_item(1, 1, Ok(())), 42, refused][..],
            _ => &refusal(sequence, Refusal::Forgotten),
        };
        connection.enqueue_notice(words);
    });
    let Some(Ok((one_refused, forgotten))) = ended else { panic!("{ended:?}") };
    assert!(matches!(&one_refused[0], Err(Error::Refused { why: Refusal::Malformed, .. })), "{one_refused:?}");
    assert!(matches!(&one_refused[1], Ok(reply) if reply.words() == [42]), "{one_refused:?}");
    assert!(forgotten.iter().all(|reply| matches!(reply, Err(Error::OutcomeUnknown { .. }))), "{forgotten:?}");
}

/// Takes its time over each request.
struct Slow;

impl Service for Slow {
    fn handle(&mut self, _request: Asked<'_>, reply: Responder) {
        std::thread::sleep(Duration::from_millis(2));
        reply.send_words(&[]);
    }
}

/// It says that it lives though a turn, with many requests, is long.
#[test]
fn a_memory_server_with_much_to_do_reports_its_load() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let server =
        MessageServer::start(listener, &ServeMessages::default(), |_| Ok(Box::new(Slow) as Box<dyn Service>)).unwrap();
    let worker = Worker::new(&fabric);
    let mut opening = Box::pin(Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()));
    let channel = loop {
        worker.turn();
        if let Poll::Ready(opened) = opening.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            break opened.unwrap();
        }
    };
    let mut asked: Vec<_> =
        (0..240).map(|_| Box::pin(channel.request_words(Kind(1), &[], Priority::Latency))).collect();
    let (mut answers, mut reports) = (0, std::collections::BTreeSet::new());
    while answers < 200 {
        worker.turn();
        asked.retain_mut(|asked| match asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answered) => {
                answered.unwrap();
                answers += 1;
                false
            }
            Poll::Pending => true,
        });
        if answers > 0 {
            reports.extend(channel.load().map(|load| load.report));
        }
    }
    assert!(reports.len() > 2, "{reports:?}");
    drop((asked, server));
    worker.channels.close(&*worker);
}
