//! Peers that lie, flood, fall silent or die, and servers that are lost.

use std::{
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use farlink_runtime::{
    clock::Clock,
    compute::ComputeServer,
    error::Error,
    fabric::{
        Error as FabricError, Fabric, Verb,
        listener::ListenOptions,
        mem::{MemFabric, ServeRegion, ServedRegion},
    },
    messaging::{
        Error as MessagingError, MESSAGE_WORDS_MAX, ManualMessageServer, MessageServer, Priority, ServeMessages,
        Service, WINDOW,
    },
    server::MemoryServer,
    worker::{Handle, Worker},
};
use farlink_tests::{
    bounded::Watchdog,
    cluster::{self, FAST},
    here, settings,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{
    rogue::{RING, Rogue},
    scene::{ABOVE_100, COUNT, ECHO, HELD, LATER, PANIC, Parrot, SMALL, Scene, Seen, TALLY, scene, server, start},
};

/// Spins until something holds; the watchdog of the scene ends what never does.
pub(crate) fn until(mut holds: impl FnMut() -> bool) {
    while !holds() {
        std::thread::yield_now();
    }
}

async fn tally(worker: &Handle) -> u64 {
    let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
    channel.request_words(TALLY, &[], Priority::Latency).await.unwrap().decode().unwrap()
}

#[test]
fn malformed_messages_are_answered_and_counted_and_others_are_served() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(1);
    let worker = compute.worker().unwrap();
    let mut rogue = Rogue::new(&scene, 0);
    let messages: [&[u64]; 6] = [
        &[7],                                // no message at all
        &[1 << 8 | 1, 5, 9],                 // acknowledges more than it has asked for
        &[1 << 8 | 1, 1, 1, 9 << 32 | 1, 4], // an item longer than the request
        &[u64::MAX, 2, 1],                   // a type that there is not
        &[5000 << 8 | 1, 2, 1],              // more items than there can be
        &[1 << 8 | 1, 1 << 40, 1, 1],        // a number far beyond the window
    ];
    for (count, message) in messages.iter().enumerate() {
        until(|| rogue.has_room(9));
        rogue.send(message);
        until(|| scene.messages[0].counts().malformed == count as u64 + 1);
        assert_eq!(worker.block_on(tally(&worker)), count as u64 + 1);
    }
    assert!(!rogue.is_dismissed(), "such messages alone do not cost the link");
    // The peer can still be served.
    until(|| rogue.has_room(9));
    rogue.send(&[1 << 8 | 1, 3, 1, u64::from(TALLY.0)]);
    until(|| scene.seen.handled.load(Ordering::Relaxed) == messages.len() as u64 + 1);
}

#[test]
fn replies_are_eager_up_to_the_limit_that_the_peer_has_told() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let mut rogue = Rogue::new(&scene, 0);
    // The hello-ack.
    until(|| rogue.forms() == [1]);
    rogue.limit(50);
    // Three words of a reply are headers.
    for (sequence, words) in [(1, 47), (2, 48), (3, 0)] {
        rogue.send(&[1 << 8 | 1, sequence, 1, 1 << 32 | u64::from(COUNT.0), words]);
        until(|| rogue.forms().len() as u64 == 1 + sequence);
    }
    assert_eq!(rogue.forms(), [1, 1, 2, 1]);
}

#[test]
fn a_peer_that_breaks_the_rules_is_dropped_alone() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(2);
    let worker = compute.worker().unwrap();
    assert_eq!(worker.block_on(tally(&worker)), 1);
    let breaks: [&dyn Fn(&mut Rogue); 6] = [
        &|rogue| rogue.post(0, Verb::Notify(1 << 40)), // a head beyond the ring
        &|rogue| rogue.post(0, Verb::Notify(5)),       // a head over zeros
        &|rogue| {
            rogue.write(RING / 8, &[1 << 24 | 1 << 16 | 60_000]); // a frame beyond the head
            rogue.post(0, Verb::Notify(9));
        },
        &|rogue| {
            rogue.write(RING / 8, &[0b11 << 24 | 2 << 16 | 1, 4096 << 32 | 0xffff_ffff]); // announces what is not there
            rogue.post(0, Verb::Notify(2));
        },
        &|rogue| {
            rogue.write(RING / 8, &[1 << 25 | 1 << 16 | 1, 7]); // an end without a beginning
            rogue.post(0, Verb::Notify(2));
        },
        &|rogue| {
            rogue.send(&[1 << 8 | 1, 1, 1, u64::from(TALLY.0)]);
            rogue.post(0, Verb::Notify(1)); // a head that goes back
        },
    ];
    until(|| scene.messages[0].peers() == 1);
    for (count, broken) in breaks.iter().enumerate() {
        let mut rogue = Rogue::new(&scene, count as u32 + 1);
        until(|| scene.messages[0].peers() == 2);
        broken(&mut rogue);
        until(|| scene.messages[0].counts().dropped == count as u64 + 1);
        until(|| rogue.is_dismissed());
        until(|| scene.messages[0].peers() == 1);
        assert_eq!(worker.block_on(tally(&worker)), count as u64 + 2);
    }
}

#[test]
fn random_words_never_hurt_the_others() {
    let mut rng = StdRng::seed_from_u64(settings::seed("random words"));
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(3);
    let worker = compute.worker().unwrap();
    for round in 0..100 {
        let mut rogue = Rogue::new(&scene, round);
        for _ in 0..rng.random_range(1..60) {
            if rng.random_ratio(1, 2) {
                if !rogue.has_room(13) {
                    continue;
                }
                let body: Vec<u64> =
                    (0..rng.random_range(1..12)).map(|_| rng.random::<u64>() >> rng.random_range(0..64)).collect();
                rogue.send(&body);
            } else {
                // Anywhere in what is open, also outside.
                let word = rng.random::<u64>() >> rng.random_range(0..64);
                let at = if rng.random_ratio(1, 2) { rng.random_range(0..40) } else { rng.random_range(0..20_000) };
                rogue.write(at, &[word]);
            }
        }
        drop(rogue);
        assert_eq!(worker.block_on(tally(&worker)), u64::from(round) + 1);
    }
    until(|| scene.messages[0].peers() == 1);
}

#[test]
fn a_flood_of_malformed_messages_leaves_room_for_others() {
    let serve = ServeMessages {
        silence_max: Duration::from_millis(2),
        report_interval: Duration::from_micros(200),
        ..ServeMessages::default()
    };
    let scene = scene(1, FAST, SMALL, &serve);
    let compute = scene.join(4);
    let worker = compute.worker().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rogue = Rogue::new(&scene, 0);
            while !stop.load(Ordering::Relaxed) {
                // Takes no replies: after a while it is not read any more, then dropped, and comes again.
                if rogue.has_room(9) {
                    rogue.send(&[9; 8]);
                } else if rogue.is_dismissed() {
                    rogue = rogue.connect_again();
                }
            }
        });
        let (malformed, mut expected) = (|| scene.messages[0].counts().malformed, 0);
        while expected < 5000 || malformed() <= 1000 {
            expected += 1;
            assert_eq!(worker.block_on(tally(&worker)), expected);
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{:?}", scene.messages[0].counts());
}

#[test]
fn a_peer_that_takes_no_replies_is_dropped_and_may_come_again() {
    let serve = ServeMessages {
        silence_max: Duration::from_millis(20),
        report_interval: Duration::from_millis(1),
        ..ServeMessages::default()
    };
    let scene = scene(1, FAST, SMALL, &serve);
    let compute = scene.join(5);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        assert_eq!(tally(&worker).await, 1);
        // More replies than there is room for: while this thread does not turn, nobody takes them.
        let requests: Vec<_> = (0..400)
            .map(|_| {
                let channel = channel.clone();
                worker.spawn(async move {
                    let reply = channel.request_words(COUNT, &[900], Priority::Latency).await.unwrap();
                    assert!(reply.words().iter().copied().eq(0..900));
                    let tally = channel.request_words(TALLY, &[], Priority::BestEffort).await.unwrap();
                    tally.decode::<u64>().unwrap()
                })
            })
            .collect();
        // Sends a little and then rests, again and again, until it rests at a moment when replies are on their way.
        while scene.messages[0].counts().dropped == 0 {
            worker.yield_now().await;
            let rest = std::time::Instant::now();
            until(|| scene.messages[0].counts().dropped > 0 || rest.elapsed() > Duration::from_millis(100));
        }
        let mut tallies = Vec::new();
        for request in requests {
            tallies.push(request.await);
        }
        tallies.sort_unstable();
        assert!(tallies.into_iter().eq(2..=401), "each request was carried out once");
    });
    let counts = scene.messages[0].counts();
    println!("{counts:?}");
    assert_eq!(counts.requests, 801);
}

#[test]
fn what_a_lost_server_had_been_asked_has_an_unknown_outcome() {
    let lost = ServeMessages { end_wait: Duration::ZERO, ..ServeMessages::default() };
    let scene = scene(1, FAST, SMALL, &lost);
    let compute = scene.join(6);
    let worker = compute.worker().unwrap();
    let Scene { cluster, seen, mut messages, .. } = scene;
    worker.block_on(async {
        assert_eq!(tally(&worker).await, 1);
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let lost =
            worker.spawn(async move { channel.request_words(LATER, &[1; 500_000], Priority::Latency).await.map(drop) });
        worker.yield_now().await;
        drop::<Option<MessageServer>>(messages.pop());
        let outcome = lost.await;
        assert!(matches!(outcome, Err(MessagingError::OutcomeUnknown { .. })), "{outcome:?}");
        // Nothing was sent: nothing is unknown.
        let channel = worker.channel_with(server(0), ABOVE_100).await;
        assert!(matches!(channel, Err(Error::Fabric(FabricError::ServerMissing { .. }))), "{channel:?}");
        messages.push(start(&*cluster, 0, 1, SMALL, &ServeMessages::default(), &seen));
        assert_eq!(tally(&worker).await, 1);
    });
}

#[test]
fn links_and_sessions_go_with_their_workers() {
    const ROUNDS: u64 = 60;
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(7);
    for round in 0..ROUNDS {
        let worker: Worker = compute.worker().unwrap();
        assert_eq!(worker.block_on(tally(&worker)), 1, "round {round}");
        if round % 3 == 0 {
            // Leaves a request behind.
            worker.block_on(async {
                let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
                drop(worker.spawn(async move {
                    channel.request_words(LATER, &[1; 3000], Priority::BestEffort).await.map(drop)
                }));
                worker.yield_now().await;
            });
        }
        drop(worker);
    }
    until(|| scene.messages[0].peers() == 0);
    let counts = scene.messages[0].counts();
    assert_eq!((counts.joined, counts.left, counts.dropped), (ROUNDS, ROUNDS, 0));
}

#[test]
fn a_server_tells_its_load() {
    let serve = ServeMessages { report_interval: Duration::from_millis(1), ..ServeMessages::default() };
    let scene = scene(1, FAST, SMALL, &serve);
    let compute = scene.join(8);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let mut seen = std::collections::BTreeSet::new();
        while seen.len() < 5 {
            channel.request_words(ECHO, &[1], Priority::Latency).await.unwrap();
            seen.extend(channel.load().map(|load| (load.report, load.threads, load.peers)));
        }
        assert!(seen.iter().all(|&(_, threads, peers)| (threads, peers) == (1, 1)), "{seen:?}");
    });
}

/// What a load says of a thread is how busy it was, and no longer is. The scene's watchdog bounds both waits.
#[test]
fn a_server_that_is_asked_for_much_says_that_it_is_busy() {
    let serve = ServeMessages { report_interval: Duration::from_millis(1), ..ServeMessages::default() };
    let scene = scene(1, FAST, SMALL, &serve);
    let compute = scene.join(10);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let busy_permille = || channel.load().map_or(0, |load| load.busy_permille);
        while busy_permille() < 100 {
            let asked: Vec<_> = (0..16)
                .map(|_| {
                    let channel = channel.clone();
                    worker.spawn(async move { channel.request_words(COUNT, &[900], Priority::Latency).await.map(drop) })
                })
                .collect();
            for asked in asked {
                asked.await.unwrap();
            }
        }
        while busy_permille() >= 100 {
            worker.yield_now().await;
        }
    });
}

#[test]
fn a_service_that_panics_leaves_nobody_waiting() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(9);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let outcome = channel.request_words(PANIC, &[], Priority::Latency).await;
        assert!(matches!(outcome, Err(MessagingError::OutcomeUnknown { .. })), "{outcome:?}");
        let missing = channel.request_words(ECHO, &[], Priority::Latency).await;
        assert!(matches!(missing, Err(MessagingError::Fabric(FabricError::ServerMissing { .. }))), "{missing:?}");
    });
}

/// Whatever it says to have got.
#[test]
fn what_runs_for_a_worker_that_acknowledges_all_it_asks_for_has_a_limit() {
    let cluster = here::start(1, 2 << 20, FAST).unwrap();
    let seen = Arc::new(Seen::default());
    let listen = ListenOptions { endpoints: 1, connection_bytes: SMALL };
    let make = |_| Ok(Box::new(Parrot::new(&seen)) as Box<dyn Service>);
    let (listener, clock) = (cluster.listen(server(0), &listen).unwrap(), Clock::monotonic());
    let mut messages = ManualMessageServer::new(listener, &ServeMessages::default(), &clock, make).unwrap();
    let mut turn = || (0..100).for_each(|_| _ = messages.turn());
    let mut rogue = Rogue::on(&*cluster.fabric(), 0);
    let mut sent = 0;
    while sent < 20 * WINDOW as u64 {
        if !rogue.has_room(5) {
            turn();
        }
        if !rogue.has_room(5) {
            break;
        }
        sent += 1;
        rogue.send(&[1 << 8 | 1, sent, sent, u64::from(HELD.0)]);
    }
    turn();
    let handled = || seen.handled.load(Ordering::Relaxed);
    assert!(handled() <= 2 * WINDOW as u64, "{} of {sent} requests run", handled());
    seen.lets_go.store(true, Ordering::Release);
    turn();
    assert_eq!(handled(), sent, "it goes on once they are done");
}

/// As many sessions without a connection as a memory server keeps.
fn leave_away(scene: &Scene, numbers: std::ops::Range<u32>) {
    for number in numbers {
        let dropped = scene.messages[0].counts().dropped;
        let mut rogue = Rogue::new(scene, number);
        rogue.post(0, Verb::Notify(1 << 40));
        until(|| scene.messages[0].counts().dropped > dropped);
    }
}

fn says_hello(rogue: &Rogue) -> bool {
    let since = std::time::Instant::now();
    until(|| rogue.head_of_replies() > 0 || since.elapsed() > Duration::from_secs(5));
    rogue.forms() == [1]
}

#[test]
fn a_worker_that_comes_before_its_old_connection_is_gone_is_welcome() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let older = Rogue::new(&scene, 0);
    assert!(says_hello(&older));
    leave_away(&scene, 1..65);
    let mut newer = Rogue::new(&scene, 0);
    assert!(says_hello(&newer), "its session was given up while it came");
    newer.send(&[1 << 8 | 1, 1, 1, u64::from(TALLY.0)]);
    until(|| newer.forms().len() == 2);
}

#[test]
fn the_session_that_is_away_longest_is_given_up() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let mut first = Rogue::new(&scene, 0);
    assert!(says_hello(&first));
    let session = first.hello();
    leave_away(&scene, 1..65);
    first.post(0, Verb::Notify(1 << 40));
    until(|| first.is_dismissed());
    let first = first.connect_again();
    assert!(says_hello(&first));
    assert_eq!(first.hello(), session, "the session that was made first, and was away last");
}

/// As at a port that is down for a moment: what they had asked for is answered from the sessions.
#[test]
fn as_many_as_were_connected_at_a_time_may_lose_their_connections_at_once() {
    const PEERS: u64 = 70;
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let mut peers: Vec<_> = (0..PEERS as u32).map(|number| Rogue::new(&scene, number)).collect();
    assert!(peers.iter().all(says_hello));
    let sessions: Vec<_> = peers.iter().map(Rogue::hello).collect();
    peers.iter_mut().for_each(|peer| peer.post(0, Verb::Notify(1 << 40)));
    until(|| scene.messages[0].counts().dropped == PEERS);
    let peers: Vec<_> = peers.into_iter().map(Rogue::connect_again).collect();
    assert!(peers.iter().all(says_hello));
    let lost = peers.iter().zip(sessions).filter(|(peer, session)| peer.hello() != *session).count();
    assert_eq!(lost, 0, "sessions were given up");
}

/// A memory server with files, which a test turns, and the way to it.
#[cfg(target_os = "linux")]
fn in_files(dir: &Path, seen: &Arc<Seen>) -> (ManualMessageServer, MemFabric) {
    let region = ServeRegion { dir: dir.into(), server: 0, servers: 1, bytes: 1 << 20, any_size: false };
    let served = ServedRegion::start(&region).unwrap();
    let listener = served.listen(&ListenOptions { endpoints: 1, connection_bytes: SMALL }, FAST).unwrap();
    let make = |_| Ok(Box::new(Parrot::new(seen)) as Box<dyn Service>);
    let messages = ManualMessageServer::new(listener, &ServeMessages::default(), &Clock::monotonic(), make).unwrap();
    (messages, MemFabric::open(dir, FAST).unwrap())
}

/// Leaves so many bytes of the file of the only connection.
#[cfg(target_os = "linux")]
fn cut(dir: &Path, bytes: u64) {
    connection_file(dir).set_len(bytes).unwrap();
}

#[cfg(target_os = "linux")]
fn connection_file(dir: &Path) -> std::fs::File {
    let connections: Vec<_> = std::fs::read_dir(dir.join("connections")).unwrap().flatten().collect();
    let [connection] = &connections[..] else { panic!("{connections:?}") };
    std::fs::OpenOptions::new().write(true).open(connection.path()).unwrap()
}

/// The rest of it is zeros then, and nobody has asked for that.
#[cfg(target_os = "linux")]
#[test]
fn a_request_in_a_file_that_is_cut_is_not_carried_out() {
    let _watch = Watchdog::start("messages", Duration::from_secs(100));
    let (dir, seen) = (tempfile::tempdir().unwrap(), Arc::new(Seen::default()));
    let (mut messages, fabric) = in_files(dir.path(), &seen);
    let mut rogue = Rogue::on(&fabric, 0);
    // The third of them crosses the end of a page.
    let ask = |rogue: &mut Rogue, sequence| {
        let head = [1 << 8 | 1, sequence, 1, 200 << 32 | u64::from(ECHO.0)];
        rogue.send(&[&head[..], &[7; 200]].concat());
    };
    (1..=2).for_each(|sequence| ask(&mut rogue, sequence));
    while seen.handled.load(Ordering::Relaxed) < 2 {
        messages.turn();
    }
    ask(&mut rogue, 3);
    // The header, the worker's memory, and the first page of the memory server's.
    cut(dir.path(), 4096 + SMALL as u64 + 4096);
    while messages.counts().dropped == 0 {
        messages.turn();
    }
    assert_eq!(seen.handled.load(Ordering::Relaxed), 2);
}

/// What it has read by then, the memory server looks at first: nothing more is taken from it.
#[cfg(target_os = "linux")]
#[test]
fn a_file_that_is_cut_while_replies_wait_breaks_no_rule() {
    let _watch = Watchdog::start("messages", Duration::from_secs(100));
    let (dir, seen) = (tempfile::tempdir().unwrap(), Arc::new(Seen::default()));
    let (mut messages, fabric) = in_files(dir.path(), &seen);
    let mut rogue = Rogue::on(&fabric, 0);
    while rogue.head_of_replies() == 0 {
        messages.turn();
    }
    rogue.release(rogue.head_of_replies());
    // More than may wait.
    for sequence in 1..=3 {
        rogue.send(&[1 << 8 | 1, sequence, 1, 1 << 32 | u64::from(COUNT.0), MESSAGE_WORDS_MAX as u64 - 16]);
        while seen.handled.load(Ordering::Relaxed) < sequence {
            messages.turn();
        }
    }
    while messages.turn() {}
    cut(dir.path(), 0);
    while messages.counts().dropped == 0 {
        messages.turn();
    }
    assert_eq!(messages.counts().malformed, 0);
}

/// A memory server whose connections are files, and somebody who has joined.
#[cfg(target_os = "linux")]
fn served_in_files(
    dir: &Path,
    connection_bytes: usize,
    seen: &Arc<Seen>,
) -> (MemoryServer, MessageServer, ComputeServer) {
    let memory = MemoryServer::start(&cluster::serve_options(dir, 0, 1, 2 << 20)).unwrap();
    let listener = memory.listen(&ListenOptions { endpoints: 1, connection_bytes }, FAST).unwrap();
    let seen = Arc::clone(seen);
    let make = move |_| Ok(Box::new(Parrot::new(&seen)) as Box<dyn Service>);
    let messages = MessageServer::start(listener, &ServeMessages::default(), make).unwrap();
    let fabric: Arc<dyn Fabric> = Arc::new(MemFabric::open(dir, FAST).unwrap());
    let compute = cluster::join_manual(&fabric, 1).unwrap();
    (memory, messages, compute)
}

/// It has said that it ends, and not all of its replies were taken: what the rest were nobody knows any more.
#[cfg(target_os = "linux")]
#[test]
fn requests_end_whose_file_is_cut_behind_a_goodbye() {
    const REQUESTS: u64 = 200;
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Seen::default());
    let _watch = Watchdog::start("messages", Duration::from_secs(120));
    let (_memory, messages, compute) = served_in_files(dir.path(), ListenOptions::default().connection_bytes, &seen);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel(server(0)).await.unwrap();
        // More than one look takes.
        let ask = |_| {
            let channel = channel.clone();
            worker.spawn(async move { channel.request_words(HELD, &[7; 8], Priority::BestEffort).await.map(drop) })
        };
        let asked: Vec<_> = (0..REQUESTS).map(ask).collect();
        while seen.handled.load(Ordering::Relaxed) < REQUESTS {
            worker.yield_now().await;
        }
        let file = connection_file(dir.path());
        seen.lets_go.store(true, Ordering::Release);
        // It waits for who does not look.
        drop(messages);
        worker.yield_now().await;
        file.set_len(0).unwrap();
        let mut outcomes = Vec::new();
        for asked in asked {
            outcomes.push(asked.await);
        }
        let unknown = |outcome: &&Result<_, _>| matches!(outcome, Err(MessagingError::OutcomeUnknown { .. }));
        let (done, unknown) =
            (outcomes.iter().filter(|it| it.is_ok()).count(), outcomes.iter().filter(unknown).count());
        assert!(done > 0 && unknown > 0 && done + unknown == outcomes.len(), "{outcomes:?}");
    });
}

/// It says the same to its worker as one that was dismissed.
#[cfg(target_os = "linux")]
#[test]
fn a_request_whose_file_is_cut_is_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Seen::default());
    let _watch = Watchdog::start("messages", Duration::from_secs(120));
    let (_memory, messages, compute) = served_in_files(dir.path(), SMALL, &seen);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        assert_eq!(tally(&worker).await, 1);
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let asked = worker.spawn(async move {
            channel.request_words(HELD, &[7; 90], Priority::Latency).await.map(|reply| reply.words().to_vec())
        });
        while seen.handled.load(Ordering::Relaxed) < 2 {
            worker.yield_now().await;
        }
        cut(dir.path(), 0);
        seen.lets_go.store(true, Ordering::Release);
        assert_eq!(asked.await.unwrap(), [7; 90]);
        assert_eq!(tally(&worker).await, 2);
    });
    assert_eq!(messages.counts().malformed, 0, "nobody has broken the protocol");
}
