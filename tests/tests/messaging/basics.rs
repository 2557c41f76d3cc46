//! What a request and its reply promise.

use std::sync::atomic::Ordering;

use farlink_runtime::{
    error::Error,
    fabric::{Error as FabricError, listener::DEFAULT_CONNECTION_BYTES, mem::MemOptions},
    messaging::{Batch, ChannelOptions, Error as MessagingError, Kind, Priority, Refusal, ServeMessages, Wait},
};
use farlink_tests::{
    cluster::{FAST, NASTY, WEAK},
    drive::polled,
    settings,
};

use crate::scene::{ABOVE_100, COUNT, DROP, ECHO, HELD, LATER, REFUSE, SMALL, Scene, scene, server};

const LATENCY: MemOptions = MemOptions { latency_ns: 2_000, bandwidth_bytes_per_s: 10_000_000_000, ..FAST };

#[test]
fn a_request_is_one_two_sided_message_and_nothing_else() {
    let scene = Scene::fast();
    let compute = scene.join(1);
    let worker = compute.worker().unwrap();
    let before = worker.counters();
    worker.block_on(async {
        let channel = worker.channel(server(0)).await.unwrap();
        let reply = channel.request(ECHO, &(7u64, 8u64), Priority::Latency).await.unwrap();
        assert_eq!(reply.decode::<(u64, u64)>().unwrap(), (7, 8));
        assert!(matches!(reply.decode::<u64>(), Err(MessagingError::Malformed(_))));
    });
    let did = worker.counters() - before;
    assert_eq!((did.two_sided, did.round_trips), (1, 1));
    assert_eq!((did.reads, did.writes, did.atomics), (0, 0, 0));
    // Three words of header, one of the item and two of parameters there; two, one and two back.
    assert_eq!(did.bytes, 8 * (6 + 5));
}

/// Many requests of many sizes at a time, both priorities, by both paths: each gets its own reply.
fn everything_arrives(options: MemOptions, connection_bytes: usize, wait: Wait, rounds: u64, words_max: u64) {
    let scene = scene(1, options, connection_bytes, &ServeMessages { wait, ..ServeMessages::default() });
    let compute = scene.join(2);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        for round in 0..rounds {
            let requests: Vec<_> = (0..40u64)
                .map(|number| {
                    let channel = channel.clone();
                    let words = (number * number * 31 + round * 7) % words_max;
                    let priority = if number % 3 == 0 { Priority::BestEffort } else { Priority::Latency };
                    worker.spawn(async move {
                        let sent: Vec<u64> = (0..words).map(|word| word << 32 | number << 16 | round).collect();
                        match number % 4 {
                            0 => {
                                let reply = channel.request_words(COUNT, &[words], priority).await.unwrap();
                                assert!(reply.words().iter().copied().eq(0..words));
                            }
                            1 => {
                                let reply = channel.request_words(LATER, &sent, priority).await.unwrap();
                                assert_eq!(reply.words(), sent);
                            }
                            _ => {
                                let reply = channel.request_words(ECHO, &sent, priority).await.unwrap();
                                assert_eq!(reply.words(), sent);
                            }
                        }
                    })
                })
                .collect();
            for request in requests {
                request.await;
            }
        }
    });
    let counts = scene.messages[0].counts();
    assert_eq!((counts.requests, counts.malformed, counts.dropped, counts.repeats), (40 * rounds, 0, 0, 0));
}

#[test]
fn everything_arrives_on_a_good_fabric() {
    let rounds = settings::from_env("FARLINK_MESSAGE_ROUNDS", 60);
    everything_arrives(FAST, DEFAULT_CONNECTION_BYTES, Wait::Auto, rounds, 3000);
    everything_arrives(FAST, SMALL, Wait::Event, rounds, 3000);
    everything_arrives(FAST, SMALL, Wait::Poll, rounds / 2, 20_000);
}

#[test]
fn everything_arrives_late() {
    everything_arrives(LATENCY, SMALL, Wait::Event, 20, 6000);
}

#[test]
fn everything_arrives_whole_though_writes_are_torn() {
    everything_arrives(NASTY, SMALL, Wait::Poll, 6, 1500);
    everything_arrives(NASTY, SMALL, Wait::Event, 6, 1500);
}

#[test]
fn everything_arrives_whole_though_writes_have_no_order() {
    everything_arrives(WEAK, SMALL, Wait::Poll, 6, 1500);
    everything_arrives(WEAK, SMALL, Wait::Event, 6, 1500);
}

#[test]
fn large_messages_go_eagerly_or_by_rendezvous_as_the_options_say() {
    let scene = Scene::fast();
    let compute = scene.join(3);
    for eager_words in [0, 1000, usize::MAX] {
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let options = ChannelOptions { eager_words: Some(eager_words), ..ChannelOptions::default() };
            let channel = worker.channel_with(server(0), options).await.unwrap();
            assert_eq!(channel.eager_words(), eager_words);
            let sent: Vec<u64> = (0..2 << 20).collect();
            let reply = channel.request_words(ECHO, &sent, Priority::BestEffort).await.unwrap();
            assert!(reply.words() == sent, "16 MiB with {eager_words}");
        });
    }
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel(server(0)).await.unwrap();
        assert_eq!(channel.eager_words(), worker.capabilities().eager_words);
        let too_long = vec![0; farlink_runtime::messaging::MESSAGE_WORDS_MAX];
        let refused = channel.request_words(ECHO, &too_long, Priority::BestEffort).await;
        assert!(matches!(refused, Err(MessagingError::BadSize { .. })));
        // A reply that is longer than a message is refused, and nobody waits for it.
        let refused = channel.request_words(COUNT, &[0x3f_ffff], Priority::Latency).await;
        assert!(matches!(refused, Err(MessagingError::Refused { why: Refusal::Unanswered, .. })), "{refused:?}");
    });
}

#[test]
fn refusals_have_their_reasons() {
    let scene = Scene::fast();
    let compute = scene.join(4);
    let worker = compute.worker().unwrap();
    let cases = [
        (Kind(99), vec![1], Refusal::UnknownKind),
        (Kind(Kind::RESERVED + 9), vec![1], Refusal::UnknownKind),
        (COUNT, vec![1, 2], Refusal::Malformed),
        (DROP, vec![], Refusal::Unanswered),
        (REFUSE, vec![], Refusal::Service(77)),
    ];
    worker.block_on(async {
        let channel = worker.channel(server(0)).await.unwrap();
        for (kind, params, expected) in cases {
            let reply = channel.request_words(kind, &params, Priority::Latency).await;
            assert!(
                matches!(reply, Err(MessagingError::Refused { why, .. }) if why == expected),
                "{kind:?}: {reply:?}"
            );
        }
    });
    assert_eq!(scene.messages[0].counts().refused, 5);
}

#[test]
fn a_batch_is_one_message() {
    let scene = scene(1, FAST, SMALL, &ServeMessages::default());
    let compute = scene.join(5);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let before = worker.counters();
        let mut batch = Batch::default();
        for number in 0..9u64 {
            batch.push(if number % 2 == 0 { ECHO } else { LATER }, &(number, number * number));
        }
        batch.push(Kind(99), &0u64);
        let replies = channel.batch(&batch, Priority::Latency).await.unwrap();
        assert_eq!((worker.counters() - before).two_sided, 1);
        for (number, reply) in (0..9u64).zip(&replies) {
            assert_eq!(reply.as_ref().unwrap().decode::<(u64, u64)>().unwrap(), (number, number * number));
        }
        assert!(matches!(replies[9], Err(MessagingError::Refused { why: Refusal::UnknownKind, .. })));
        assert!(channel.batch(&Batch::default(), Priority::Latency).await.is_err());
    });
    assert_eq!(scene.messages[0].counts().requests, 10);
}

#[test]
fn dropped_requests_are_carried_out_and_their_slots_come_back() {
    let scene = scene(1, NASTY, SMALL, &ServeMessages::default());
    let compute = scene.join(6);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        for round in 0..2000u64 {
            polled(1 + round as u32 % 2, channel.request(ECHO, &round, Priority::Latency)).await;
        }
        assert_eq!(channel.request(ECHO, &1u64, Priority::Latency).await.unwrap().words(), [1]);
    });
}

#[test]
fn messages_that_are_not_coalesced_arrive_as_well() {
    let scene = scene(1, WEAK, SMALL, &ServeMessages::default());
    let compute = scene.join(7);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let options = ChannelOptions { eager_words: Some(50), coalesce: false };
        let channel = worker.channel_with(server(0), options).await.unwrap();
        for words in (0..200u64).chain([1000, 5000]) {
            let reply = channel.request_words(COUNT, &[words], Priority::Latency).await.unwrap();
            assert!(reply.words().iter().copied().eq(0..words));
        }
    });
}

/// How many WRITEs a memory server's replies took to so many requests that are posted together.
fn writes_of_replies(coalesce: bool, requests: u64) -> u64 {
    let scene = scene(1, FAST, DEFAULT_CONNECTION_BYTES, &ServeMessages::default());
    let compute = scene.join(9);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let options = ChannelOptions { coalesce, ..ABOVE_100 };
        let channel = worker.channel_with(server(0), options).await.unwrap();
        let ask = |number: u64| {
            let channel = channel.clone();
            worker.spawn(async move {
                let reply = channel.request(HELD, &number, Priority::BestEffort).await.unwrap();
                assert_eq!(reply.decode::<u64>().unwrap(), number);
            })
        };
        let asked: Vec<_> = (0..requests).map(ask).collect();
        while scene.seen.handled.load(Ordering::Relaxed) < requests {
            worker.yield_now().await;
        }
        let before = scene.messages[0].counts().writes;
        // All of them are answered in one turn.
        scene.seen.lets_go.store(true, Ordering::Release);
        for request in asked {
            request.await;
        }
        scene.messages[0].counts().writes - before
    })
}

#[test]
fn replies_go_out_together_unless_told_otherwise() {
    let (together, singly) = (writes_of_replies(true, 30), writes_of_replies(false, 30));
    println!("30 replies: {together} WRITEs, or {singly}");
    assert!(together <= 10, "{together} WRITEs for 30 replies that were ready together");
    assert!(singly >= 30, "{singly} WRITEs for 30 replies that were to go singly");
}

#[test]
fn a_server_that_does_not_listen_is_missing() {
    let scene = Scene::fast();
    let compute = scene.join(8);
    let worker = compute.worker().unwrap();
    let Scene { cluster, messages, .. } = scene;
    drop(messages);
    let missing = worker.block_on(worker.channel(server(0)));
    assert!(matches!(missing, Err(Error::Fabric(FabricError::ServerMissing { .. }))), "{missing:?}");
    drop(cluster);
}
