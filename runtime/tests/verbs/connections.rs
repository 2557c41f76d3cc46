//! Message connections: what wakes an endpoint, what the other side may do, and who is gone.

use std::{
    fmt,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use farlink_runtime::{
    clock::Clock,
    fabric::{
        Endpoint, Error, Fabric, Request, Ticket, Verb,
        connection::{ConnectionState, OpenMemory, PeerId, far},
        listener::{Change, ListenOptions, Listener, ServerEndpoint},
        verbs::{VerbsFabric, VerbsOptions, VerbsServer},
    },
    lock::OwnerId,
    ptr::ServerId,
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::Field,
    span::{Attributes, Id, Record},
};

use crate::scene::{self, FREE, Wire, at, connect, eventually, serve};

/// Longer than any test: a sleep that nobody ends is one that never ends.
const LONG: Duration = Duration::from_secs(3600);

fn server() -> ServerId {
    ServerId::new(0).unwrap()
}

fn who(worker: u32) -> PeerId {
    PeerId { owner: OwnerId::new(9).unwrap(), worker }
}

/// A worker's end of a connection.
struct Worker {
    endpoint: Box<dyn Endpoint>,
    memory: OpenMemory,
}

impl Worker {
    fn new(fabric: &VerbsFabric, number: u32) -> Self {
        let mut endpoint = fabric.endpoint(0, Clock::monotonic()).unwrap();
        let memory = endpoint.connect(server(), who(number)).unwrap();
        Self { endpoint, memory }
    }

    fn post(&mut self, offset: u64, verb: Verb) {
        self.endpoint.ring(&mut vec![Request { ticket: Ticket(offset), at: far(server(), offset), verb }]);
    }

    /// Posts one request and waits for its end.
    fn one(&mut self, offset: u64, verb: Verb) -> Result<(), Box<Error>> {
        self.post(offset, verb);
        let mut completions = Vec::new();
        eventually("a request ends", || {
            self.endpoint.poll(&mut completions);
            !completions.is_empty()
        });
        completions.remove(0).outcome.map(drop)
    }
}

/// An endpoint, and its news that nobody has looked at.
struct Served {
    endpoint: Box<dyn ServerEndpoint>,
    changes: Vec<Change>,
    // After the endpoint.
    _listener: Box<dyn Listener>,
}

impl Served {
    fn next(&mut self) -> Change {
        let Self { endpoint, changes, .. } = self;
        eventually("something changes", || {
            endpoint.changes(false, changes);
            !changes.is_empty()
        });
        changes.remove(0)
    }

    fn joined(&mut self) -> (ServerId, OpenMemory) {
        match self.next() {
            Change::Joined { peer, memory, .. } => (peer, memory),
            other => panic!("{other:?}"),
        }
    }
}

fn listen(server: &VerbsServer) -> Served {
    let listener = server.listen(&ListenOptions::default()).unwrap();
    assert!(matches!(server.listen(&ListenOptions::default()), Err(Error::BadOption { .. })), "listens twice");
    let endpoint = listener.endpoint(0, 0, Clock::monotonic()).unwrap();
    assert!(listener.endpoint(0, 0, Clock::monotonic()).is_err(), "an endpoint is taken once");
    Served { endpoint, changes: Vec::new(), _listener: listener }
}

/// Sleeps for an hour each time, unless it is woken.
#[test]
fn notifications_and_wakers_end_a_sleep() {
    if !scene::has_device() {
        return;
    }
    let memory_server = serve();
    let Served { mut endpoint, _listener, .. } = listen(&memory_server);
    let fabric = connect(&[&memory_server]);
    let turn = std::sync::Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut worker = Worker::new(&fabric, 0);
            for round in 1..=50 {
                turn.wait();
                worker.one(64, Verb::Notify(round)).unwrap();
            }
            turn.wait();
        });
        // The connection itself wakes, too.
        let mut changes = Vec::new();
        while changes.is_empty() {
            endpoint.sleep(LONG, &mut || false);
            endpoint.changes(false, &mut changes);
        }
        let Some(Change::Joined { memory, .. }) = changes.pop() else { panic!("nobody joined") };
        for round in 1..=50 {
            turn.wait();
            while memory[8].load(Ordering::Acquire) != round {
                endpoint.sleep(LONG, &mut || memory[8].load(Ordering::Acquire) == round);
            }
        }
        turn.wait();
        let waker = endpoint.waker();
        waker.wake();
        endpoint.sleep(LONG, &mut || false);
    });
}

/// What was opened may be written and read, and no more than that.
#[test]
fn opened_memory_takes_writes_and_no_atomics() {
    if !scene::has_device() {
        return;
    }
    let memory_server = serve();
    let mut served = listen(&memory_server);
    let fabric = connect(&[&memory_server]);
    let mut worker = Worker::new(&fabric, 0);
    let (peer, memory) = served.joined();
    worker.one(0, Verb::WriteWord(7)).unwrap();
    assert_eq!(memory[0].load(Ordering::Acquire), 7);
    // And the other way.
    served.endpoint.ring(&mut vec![Request { ticket: Ticket(1), at: far(peer, 16), verb: Verb::WriteWord(8) }]);
    eventually("the worker has it", || worker.memory[2].load(Ordering::Acquire) == 8);
    let outside = memory.len() as u64 * 8;
    assert!(worker.one(outside, Verb::WriteWord(1)).unwrap_err().to_string().contains("not inside"));
    worker.one(outside - 8, Verb::WriteWord(9)).unwrap();
    let refused = worker.one(0, Verb::CompareSwap { expected: 7, new: 9 }).unwrap_err();
    assert!(matches!(*refused, Error::RequestFailed { .. }), "{refused}");
    assert!(refused.to_string().contains("refused the access"), "{refused}");
    assert_eq!(memory[0].load(Ordering::Acquire), 7);
    // It has cost the connection, and the worker knows.
    assert_eq!(worker.endpoint.connection_state(server()), ConnectionState::Dismissed);
    assert!(worker.one(0, Verb::WriteWord(1)).is_err());
    worker.memory = worker.endpoint.connect(server(), who(0)).unwrap();
    assert!(matches!(served.next(), Change::Left { in_order: false, .. }));
    let (_, memory) = served.joined();
    worker.one(0, Verb::WriteWord(5)).unwrap();
    assert_eq!(memory[0].load(Ordering::Acquire), 5);
}

#[test]
fn each_side_learns_that_the_other_is_gone() {
    if !scene::has_device() {
        return;
    }
    let memory_server = serve();
    let mut served = listen(&memory_server);
    let fabric = connect(&[&memory_server]);
    let (mut closing, dropped) = (Worker::new(&fabric, 0), Worker::new(&fabric, 1));
    served.joined();
    served.joined();
    closing.endpoint.disconnect(server());
    assert!(matches!(served.next(), Change::Left { in_order: true, .. }));
    drop(dropped);
    assert!(matches!(served.next(), Change::Left { in_order: true, .. }));
    // One whose whole compute server goes, with its control connection.
    let other = connect(&[&memory_server]);
    let lost = Worker::new(&other, 2);
    served.joined();
    other.abort();
    assert!(matches!(served.next(), Change::Left { in_order: true, .. }), "it cannot come again");
    drop(lost);
    // Dismissed by the endpoint, then without anybody who listens.
    let mut dismissed = Worker::new(&fabric, 3);
    let (peer, _) = served.joined();
    assert_eq!(dismissed.endpoint.connection_state(server()), ConnectionState::Up);
    served.endpoint.dismiss(peer);
    eventually("it is dismissed", || dismissed.endpoint.connection_state(server()) == ConnectionState::Dismissed);
    let mut left = Worker::new(&fabric, 4);
    served.joined();
    drop(served);
    eventually("nobody listens", || left.endpoint.connection_state(server()) == ConnectionState::Dead);
    let missing = left.endpoint.connect(server(), who(4));
    assert!(matches!(missing, Err(Error::ServerMissing { .. })), "{missing:?}");
}

/// Where one end alone was told of a network without order, the other learns of it, or does not connect.
#[test]
fn both_ends_rely_on_no_more_order_than_the_other() {
    if !scene::has_device() {
        return;
    }
    let memory_server = serve();
    let mut served = listen(&memory_server);
    let fabric = connect(&[&memory_server]);
    let ordered = |served: &Served| served.endpoint.capabilities().ordered_writes;
    let _worker = Worker::new(&fabric, 0);
    served.joined();
    assert!(ordered(&served));
    let options = VerbsOptions { ordered: false, ..scene::options_to(&[&memory_server]) };
    let unordered = VerbsFabric::connect(&options).unwrap();
    let _other = Worker::new(&unordered, 1);
    served.joined();
    assert!(!ordered(&served));
    // Compute servers.
    let [relying, told] = [9, 10].map(|owner| OwnerId::new(owner).unwrap());
    let _claims = (fabric.claim(relying).unwrap(), unordered.claim(told).unwrap());
    let listeners = [(&*fabric, relying), (&unordered, told)]
        .map(|(fabric, owner)| fabric.peer_listener(owner, &ListenOptions::default()).unwrap());
    let mut to_relying = unordered.endpoint(0, Clock::monotonic()).unwrap();
    let number = to_relying.peer(relying).unwrap();
    let mut endpoint = listeners[0].endpoint(0, 0, Clock::monotonic()).unwrap();
    assert!(endpoint.capabilities().ordered_writes);
    to_relying.connect(number, who(0)).unwrap();
    let mut changes = Vec::new();
    eventually("somebody joins", || {
        endpoint.changes(false, &mut changes);
        !changes.is_empty()
    });
    assert!(!endpoint.capabilities().ordered_writes);
    let mut to_told = fabric.endpoint(0, Clock::monotonic()).unwrap();
    let number = to_told.peer(told).unwrap();
    let refused = to_told.connect(number, who(0)).unwrap_err();
    assert!(matches!(refused, Error::PeerMissing { peer, .. } if peer == told), "{refused}");
    assert!(refused.to_string().contains("another order"), "{refused}");
}

/// The warnings of one thread.
#[derive(Debug, Default, Clone)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut |field: &Field, value: &dyn fmt::Debug| text += &format!("{field}={value:?} "));
        self.0.lock().unwrap().push(text);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// It is how connections end whose listener does, with requests under way.
#[test]
fn a_message_connection_that_breaks_is_no_warning_and_hides_none() {
    if !scene::has_device() {
        return;
    }
    let memory_server = serve();
    let mut served = listen(&memory_server);
    let fabric = connect(&[&memory_server]);
    let warnings = Warnings::default();
    tracing::subscriber::with_default(warnings.clone(), || {
        let mut worker = Worker::new(&fabric, 0);
        let (peer, _) = served.joined();
        served.endpoint.dismiss(peer);
        let broken = worker.one(0, Verb::WriteWord(7)).unwrap_err();
        assert!(matches!(*broken, Error::RequestFailed { .. }), "{broken}");
        assert!(warnings.0.lock().unwrap().is_empty(), "{warnings:?}");
        // And what breaks on the way to its memory is one, once.
        let mut wire = Wire::new(&fabric);
        memory_server.withdraw_memory();
        (0..3).for_each(|_| drop(wire.read(at(0, FREE), 1).unwrap_err()));
    });
    let warnings = warnings.0.lock().unwrap();
    assert!(warnings.len() == 1 && warnings[0].contains("requests fail over RDMA"), "{warnings:?}");
}
