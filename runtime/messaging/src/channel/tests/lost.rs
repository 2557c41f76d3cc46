//! Connections that are lost, and workers.

use std::future::poll_fn;

use super::*;

/// A request that was framed when its connection failed goes over the next one as a repeat, and in no other way.
#[test]
fn what_was_posted_to_a_connection_that_failed_is_not_sent_over_the_next_one() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let answers = Arc::new(AtomicBool::new(true));
    let counts = |_| {
        let counts = Counts { has_come: Arc::default(), may_answer: Arc::clone(&answers) };
        Ok(Box::new(counts) as Box<dyn Service>)
    };
    let clock = Clock::monotonic();
    let mut server = ManualMessageServer::new(listener, &ServeMessages::default(), &clock, counts).unwrap();
    let worker = Worker::new(&fabric);
    let mut asking = pin!(async {
        let channel = Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()).await?;
        for _ in 0..10 {
            channel.request(Kind(1), &1u64, Priority::Latency).await?;
        }
        // The urgent one is framed and posted, then there is no memory for the other one.
        worker.buffers_left.set(1);
        let mut urgent = pin!(channel.request(Kind(1), &1u64, Priority::Latency));
        let mut other = pin!(channel.request(Kind(1), &1u64, Priority::BestEffort));
        let mut begun = None;
        poll_fn(|cx| {
            begun.get_or_insert_with(|| assert!(other.as_mut().poll(cx).is_pending()));
            urgent.as_mut().poll(cx)
        })
        .await?;
        other.await.map(drop)
    });
    let ended = (0..10_000).find_map(|_| {
        worker.turn();
        server.turn();
        match asking.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ended) => Some(ended),
            Poll::Pending => None,
        }
    });
    assert!(matches!(ended, Some(Ok(()))), "{ended:?}");
    let ServerCounts { requests, joined, dropped, malformed, .. } = server.counts();
    assert_eq!((requests, joined, dropped, malformed), (12, 2, 0, 0));
    worker.channels.close(&*worker);
}

/// Answers a request once the next one comes.
#[derive(Default)]
struct Later(Option<Responder>);

impl Service for Later {
    fn handle(&mut self, request: Asked<'_>, reply: Responder) {
        if let Some(reply) = self.0.replace(reply) {
            reply.send_words(request.words());
        }
    }
}

/// They die with requests that are half sent, run, or are answered, and none closes its connection.
#[test]
fn thousands_of_workers_that_die_leave_no_more_behind_than_some() {
    const WORKERS: u32 = 3000;
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listen = ListenOptions { connection_bytes: CONNECTION_BYTES_MIN, ..ListenOptions::default() };
    let (listener, clock) = (fabric.listen(id, &listen).unwrap(), Clock::monotonic());
    let make = |_| Ok(Box::new(Later::default()) as Box<dyn Service>);
    let mut server = ManualMessageServer::new(listener, &ServeMessages::default(), &clock, make).unwrap();
    let mut held_max = (0, 0, 0);
    for number in 1..=WORKERS {
        let worker = Worker::with_number(&fabric, number);
        let mut asking = pin!(async {
            let channel = Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()).await?;
            channel.request_words(Kind(1), &vec![7; [1, 900, 20_000][number as usize % 3]], Priority::BestEffort).await
        });
        for _ in 0..number % 7 {
            drop(asking.as_mut().poll(&mut Context::from_waker(Waker::noop())));
            worker.turn();
            server.turn();
        }
        // Instead of closing it: that of a worker which has just come, and has nothing there.
        let gone = PeerId { owner: OwnerId::new(6).unwrap(), worker: number };
        worker.endpoint.borrow_mut().connect(id, gone).unwrap();
        server.turn();
        let (sessions, peers, workers) = server.held();
        held_max = (held_max.0.max(sessions), held_max.1.max(peers), held_max.2.max(workers));
    }
    assert!(server.counts().joined > u64::from(WORKERS), "{:?}", server.counts());
    let (sessions, peers, workers) = held_max;
    assert!(sessions < 70 && peers < 5 && workers < 70, "{sessions} sessions, {peers} connections, {workers} workers");
}

/// A worker that has a core now and then for an exchange learns all the same within moments that a memory server is gone.
#[test]
fn a_worker_without_a_core_learns_of_a_loss() {
    let fabric = MemFabric::in_process(vec![Region::anonymous(1 << 20).unwrap()], MemOptions::default());
    let id = ServerId::new(0).unwrap();
    let listener = fabric.listen(id, &ListenOptions::default()).unwrap();
    let worker = Worker::new(&fabric);
    let mut opening = pin!(Channel::open(Rc::clone(&worker) as Rc<dyn Host>, id, ChannelOptions::default()));
    let mut poll = || opening.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll().is_pending());
    drop(listener);
    let turns = (0..2 * u64::from(u16::MAX)).take_while(|_| {
        worker.now_ns.set(worker.now_ns.get() + 3_000_000);
        worker.turn();
        poll().is_pending()
    });
    let turns = turns.count();
    assert!(turns < 100, "told after {turns} exchanges");
}

/// Who has a handle of it may still ask.
#[test]
fn a_worker_that_has_ended_opens_no_connection() {
    let (mut server, worker) = played();
    worker.channels.close(&*worker);
    worker.ended.set(true);
    let host = Rc::clone(&worker) as Rc<dyn Host>;
    let mut opening = pin!(Channel::open(host, ServerId::new(0).unwrap(), ChannelOptions::default()));
    let opened = opening.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Err(Error::Fabric(FabricError::ServerMissing { .. }))) = opened else { panic!("{opened:?}") };
    let mut changes = Vec::new();
    server.port.changes(true, &mut changes);
    assert!(changes.is_empty(), "{changes:?}");
}
