//! A thread whose turns a test takes, and the only worker that comes to it.

use std::{cell::Cell, rc::Rc, time::Duration};

use farlink_fabric::{
    Endpoint, Error as FabricError, Fabric, Request as Post,
    buffer::{Buffer, Buffers},
    clock::Clock,
    connection::PeerId,
    listener::{ListenOptions, Listener},
    lock::OwnerId,
    mem::{MemFabric, MemOptions},
    ptr::ServerId,
    region::Region,
};

use super::{ServeMessages, SharedState, peers::Peer, requests::any_has_news, thread::Thread};
use crate::{
    connection::{Carrier, Connection, Sending, Source},
    message::{begin_request, push_item},
    pieces::Outbound,
    protocol::{Kind, Priority, WINDOW},
    serve::{Address, Request, Responder, Service},
    session::Session,
};

/// Answers at once.
struct Counts(Rc<Cell<u64>>);

impl Service for Counts {
    fn handle(&mut self, _: Request<'_>, reply: Responder) {
        self.0.set(self.0.get() + 1);
        reply.send_words(&[]);
    }
}

struct Scene {
    thread: Thread,
    handled: Rc<Cell<u64>>,
    worker: Connection,
    endpoint: Box<dyn Endpoint>,
    // After the endpoint, which may still use them.
    buffers: Buffers,
    _fabric: (MemFabric, Box<dyn Listener>),
}

/// What the worker posts.
struct Posts<'a>(&'a Buffers, Vec<Post>);

impl Carrier for Posts<'_> {
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError> {
        self.0.take(words, |_, _| Ok(Default::default()))
    }

    fn post(&mut self, request: Post) {
        self.1.push(request);
    }

    fn vector(&mut self) -> Vec<u64> {
        Vec::new()
    }
}

/// The only message.
struct Only(Vec<u64>);

impl Source for Only {
    fn message(&self, _number: u64, _begun: bool) -> Option<Outbound<'_>> {
        Some(Outbound::of(&self.0))
    }
}

impl Scene {
    /// The worker has come.
    fn new(options: ServeMessages) -> Self {
        let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
        let (id, clock) = (ServerId::new(0).unwrap(), Clock::Virtual(Rc::default()));
        let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
        let port = listener.endpoint(0, 1, clock.clone()).unwrap();
        let handled = Rc::new(Cell::new(0));
        let service = Box::new(Counts(Rc::clone(&handled)));
        let mut thread = Thread::new(port, service, SharedState::new(1, 1), 0, options, clock.clone());
        let mut endpoint = fabric.endpoint(1, clock).unwrap();
        let own = endpoint.connect(id, PeerId { owner: OwnerId::new(5).unwrap(), worker: 0 }).unwrap();
        // Everything is fetched.
        let sending = Sending { ordered: true, coalesce: true, eager_words: 0, gather_max: 1 };
        let worker = Connection::new(own, id, 1, sending).unwrap();
        (0..3).for_each(|_| _ = thread.turn());
        Self { thread, handled, worker, endpoint, buffers: Buffers::default(), _fabric: (fabric, listener) }
    }

    fn peer(&self) -> &Peer {
        self.thread.peers[0].as_ref().expect("the worker has come")
    }

    fn session(&mut self) -> &mut Session {
        self.thread.sessions[0].as_mut().expect("the worker has come")
    }

    fn has_news(&self) -> bool {
        any_has_news(&self.thread.peers, &self.thread.sessions)
    }

    fn asks(&mut self, sequence: u64, priority: Priority) {
        let mut words = Vec::new();
        begin_request(&mut words, 1, sequence, 1);
        push_item(&mut words, Kind(1), |_| ());
        self.worker.enqueue(priority, sequence);
        let mut carrier = Posts(&self.buffers, Vec::new());
        self.worker.send_out(&Only(words), &mut carrier).unwrap();
        self.endpoint.ring(&mut carrier.1);
        let mut completions = Vec::new();
        self.endpoint.poll(&mut completions);
        completions.into_iter().for_each(|completion| self.worker.complete(completion));
    }

    /// As many requests run as may though they were acknowledged. The next number.
    fn fills_up(&mut self) -> u64 {
        let replies = Rc::clone(&self.thread.replies);
        let next = WINDOW as u64 + 1;
        for sequence in 1..=next {
            self.session().admit((sequence, sequence), 1, Priority::Latency, &replies).unwrap();
        }
        assert!(self.session().has_abandoned_many());
        next + 1
    }

    fn answers_one(&mut self) {
        let to = Address { session: 0, unique: self.session().unique, sequence: 1, index: 0 };
        Responder::new(Rc::clone(&self.thread.replies), to).send_words(&[]);
    }
}

/// It may sleep beside it: the messages that it does not take are no news.
#[test]
fn a_peer_that_is_not_asked_for_more_has_no_news_until_it_is() {
    let mut scene = Scene::new(ServeMessages::default());
    let next = scene.fills_up();
    scene.asks(next, Priority::Latency);
    (0..3).for_each(|_| _ = scene.thread.turn());
    assert!(scene.peer().connection.has_messages() && scene.handled.get() == 0);
    assert!(!scene.has_news());
    scene.answers_one();
    assert!(scene.thread.turn());
    assert!(scene.has_news(), "one of those that ran is done");
    (0..3).for_each(|_| _ = scene.thread.turn());
    assert_eq!(scene.handled.get(), 1);
}

/// Its message is in no ring any more.
#[test]
fn what_was_fetched_from_a_full_peer_is_taken_when_there_is_room() {
    let mut scene = Scene::new(ServeMessages::default());
    scene.asks(WINDOW as u64 + 2, Priority::BestEffort);
    assert!(scene.thread.turn());
    scene.fills_up();
    (0..3).for_each(|_| _ = scene.thread.turn());
    assert!(!scene.peer().connection.is_waiting() && !scene.peer().dirty && scene.handled.get() == 0);
    scene.answers_one();
    (0..3).for_each(|_| _ = scene.thread.turn());
    assert_eq!(scene.handled.get(), 1);
}

/// However often reports are due: while one is under way, nobody is told that all has arrived.
#[test]
fn of_reports_to_a_peer_one_is_under_way_at_a_time() {
    let mut scene = Scene::new(ServeMessages { report_interval: Duration::ZERO, ..ServeMessages::default() });
    for _ in 0..3 {
        (0..3).for_each(|_| scene.thread.sample_clock());
        assert_eq!(scene.thread.outbox.len(), 1);
        scene.thread.exchange();
        assert!(scene.peer().connection.has_delivered());
    }
}

#[test]
fn a_thread_that_is_to_report_nothing_goes_on() {
    let forever = ServeMessages { report_interval: Duration::MAX, ..ServeMessages::default() };
    let mut scene = Scene::new(ServeMessages { silence_max: Duration::MAX, end_wait: Duration::MAX, ..forever });
    (0..3).for_each(|_| _ = scene.thread.turn_by_hand());
    assert_eq!((scene.thread.report, scene.thread.present), (0, 1));
}

/// The next one may have its number.
#[test]
fn nothing_is_posted_to_a_peer_that_has_left() {
    let mut scene = Scene::new(ServeMessages { report_interval: Duration::ZERO, ..ServeMessages::default() });
    scene.thread.sample_clock();
    assert_eq!(scene.thread.outbox.len(), 1);
    scene.endpoint.disconnect(ServerId::new(0).unwrap());
    assert!(scene.thread.take_changes(true));
    assert!(scene.thread.peers[0].is_none() && scene.thread.outbox.is_empty());
}
