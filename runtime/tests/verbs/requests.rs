//! Requests: what they do, how they fail, and what happens to the others.

use std::sync::atomic::Ordering;

use farlink_runtime::fabric::{Done, Error, Fabric, Ticket, Verb};
use farlink_runtime::layout::Records;

use crate::scene::{self, FREE, REGION_BYTES, Wire, at, connect, eventually, previous, serve, serve_options};

#[test]
fn every_request_does_what_it_says() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    for words in [1, 2, 8, 9, 64, 128, 512] {
        let data: Vec<u64> = (0..words as u64).map(|index| index << 40 | words as u64).collect();
        wire.write(at(0, FREE), &data).unwrap();
        assert_eq!(wire.read(at(0, FREE), words).unwrap(), data, "{words} words");
        let there = &server.raw_words()[(FREE / 8) as usize..][..words];
        assert!(there.iter().zip(&data).all(|(there, word)| there.load(Ordering::Relaxed) == *word));
    }
    assert!(matches!(wire.one(at(0, FREE), Verb::WriteWord(7)), Ok(Done::Written)));
    assert_eq!(wire.compare_swap(at(0, FREE), 8, 9).unwrap(), 7);
    assert_eq!(wire.compare_swap(at(0, FREE), 7, u64::MAX).unwrap(), 7);
    assert_eq!(wire.fetch_add(at(0, FREE), 3).unwrap(), u64::MAX);
    assert_eq!(wire.read(at(0, FREE), 1).unwrap(), [2]);
    let capabilities = wire.endpoint().capabilities();
    assert!(capabilities.ordered_writes && capabilities.inline_bytes >= 8 && capabilities.gather_max >= 1);
}

#[test]
fn the_superblock_is_there_and_the_fabric_knows_the_region() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let id = farlink_runtime::ptr::ServerId::new(0).unwrap();
    assert_eq!((fabric.servers(), fabric.region_bytes(id)), (1, REGION_BYTES));
    let magic = Wire::new(&fabric).read(at(0, 64), 1).unwrap()[0];
    assert_eq!(magic.to_le_bytes(), *b"FARLINK\0");
}

/// More requests than the queue pair holds, all kinds of them, with one doorbell: each completes once.
#[test]
fn a_full_send_queue_makes_requests_wait_and_loses_none() {
    if !scene::has_device() {
        return;
    }
    const DEPTH: u32 = 8;
    const COUNT: u64 = 300;
    let server = serve();
    let mut options = scene::options_to(&[&server]);
    options.queue_depth = DEPTH;
    let fabric = farlink_runtime::fabric::verbs::VerbsFabric::connect(&options).unwrap();
    let mut wire = Wire::new(&fabric);
    let verbs: Vec<_> = (0..COUNT)
        .map(|number| {
            let slot = at(0, FREE + number % 16 * 8);
            let verb = match number % 4 {
                0 => Verb::WriteWord(number),
                1 => Verb::Read(wire.buffer(16)),
                2 => Verb::Write(wire.filled(&[number; 1])),
                _ => Verb::FetchAdd(1),
            };
            (slot, verb)
        })
        .collect();
    wire.ring(verbs);
    let mut seen = vec![false; COUNT as usize];
    for completion in wire.wait(COUNT as usize) {
        completion.outcome.unwrap();
        assert!(!std::mem::replace(&mut seen[completion.ticket.0 as usize], true), "{:?} twice", completion.ticket);
    }
    wire.expect_silence();
}

/// What a later atomic of the same doorbell finds proves the order of the WRITEs before it, signalled or not.
#[test]
fn writes_and_atomics_of_one_doorbell_keep_their_order() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    let word = at(0, FREE);
    for round in 0..200u64 {
        let buffer = wire.filled(&[round + 1; 64]);
        let first = wire.ring([
            (word, Verb::WriteWord(round)),
            (word, Verb::Write(buffer)),
            (word, Verb::CompareSwap { expected: round + 1, new: round + 2 }),
            (word, Verb::FetchAdd(1)),
            (word, Verb::WriteWord(0)),
        ]);
        let completions = wire.wait(5);
        let order: Vec<u64> = completions.iter().map(|completion| completion.ticket.0 - first).collect();
        assert_eq!(order, [0, 1, 2, 3, 4]);
        let mut outcomes = completions.into_iter().map(|completion| completion.outcome);
        assert_eq!(previous(outcomes.nth(2).unwrap()).unwrap(), round + 1);
        assert_eq!(previous(outcomes.next().unwrap()).unwrap(), round + 2);
    }
}

/// As above, where requests of many doorbells are under way: some of them go out together.
#[test]
fn changes_of_many_doorbells_keep_their_order() {
    const DOORBELLS: u64 = 40;
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    let word = at(0, FREE);
    for _ in 0..20 {
        wire.write(word, &[0]).unwrap();
        for bell in 0..DOORBELLS {
            let found = 3 * bell;
            let buffer = wire.filled(&[found + 2; 64]);
            wire.ring([
                (word, Verb::CompareSwap { expected: found, new: found + 1 }),
                (word, Verb::Write(buffer)),
                (word, Verb::FetchAdd(1)),
            ]);
        }
        let outcomes = wire.wait(3 * DOORBELLS as usize).into_iter().map(|completion| completion.outcome.unwrap());
        for (index, outcome) in outcomes.enumerate() {
            match (index % 3, outcome) {
                (1, Done::Written) => {}
                (_, Done::Previous(found)) => assert_eq!(found, index as u64),
                (_, other) => panic!("{index}: {other:?}"),
            }
        }
    }
}

#[test]
fn an_address_outside_the_region_never_reaches_the_card() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    for (at, verb) in [
        (at(0, REGION_BYTES), Verb::WriteWord(1)),
        (at(0, REGION_BYTES - 8), Verb::Read(wire.buffer(2))),
        (at(0, FREE + 4), Verb::FetchAdd(1)),
        (at(1, FREE), Verb::WriteWord(1)),
    ] {
        let error = wire.one(at, verb).unwrap_err();
        assert!(matches!(*error, Error::BadAddress { .. }) && error.to_string().contains("not inside"), "{error}");
    }
    wire.write(at(0, REGION_BYTES - 8), &[5]).unwrap();
    assert_eq!(server.queue_pairs(), 1);
}

/// The card refuses an access: that request fails with the cause, those behind it fail too, and the next ones find a new
/// connection.
#[test]
fn a_refused_access_fails_cleanly_and_the_connection_comes_back() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    wire.write(at(0, FREE), &[5]).unwrap();
    server.withdraw_memory();
    for _ in 0..3 {
        let read = Verb::Read(wire.buffer(8));
        let first =
            wire.ring([(at(0, FREE), read), (at(0, FREE), Verb::WriteWord(6)), (at(0, FREE), Verb::FetchAdd(1))]);
        let completions = wire.wait(3);
        let mut tickets: Vec<u64> = completions.iter().map(|completion| completion.ticket.0 - first).collect();
        tickets.sort_unstable();
        assert_eq!(tickets, [0, 1, 2]);
        for completion in completions {
            let error = completion.outcome.unwrap_err();
            let says =
                if completion.ticket == Ticket(first) { "refused the access" } else { "an earlier request failed" };
            assert!(error.to_string().contains(says), "{error}");
        }
        wire.expect_silence();
    }
    assert_eq!(server.raw_words()[(FREE / 8) as usize].load(Ordering::Relaxed), 5);
    // A connection for the connection that broke, not one more each time.
    eventually("the old queue pairs are destroyed", || server.queue_pairs() == 1);
}

#[test]
fn a_connection_that_breaks_is_made_anew() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let fabric = connect(&[&server]);
    let mut wire = Wire::new(&fabric);
    for round in 0..3 {
        wire.write(at(0, FREE), &[round]).unwrap();
        server.break_connections();
        let error = wire.read(at(0, FREE), 1).unwrap_err();
        assert!(error.to_string().contains("did not answer"), "{error}");
        // Rung at once, while the new connection is still being made.
        assert_eq!(wire.read(at(0, FREE), 1).unwrap(), [round]);
        assert_eq!(server.queue_pairs(), 1);
    }
}

/// Requests that wait for room must not get ahead of a failure: an unlock never lands after a WRITE that did not.
#[test]
fn what_waits_behind_a_failure_fails_with_it() {
    if !scene::has_device() {
        return;
    }
    let server = serve();
    let mut options = scene::options_to(&[&server]);
    options.queue_depth = 4;
    let fabric = farlink_runtime::fabric::verbs::VerbsFabric::connect(&options).unwrap();
    let mut wire = Wire::new(&fabric);
    server.break_connections();
    wire.ring((0..40).map(|number| (at(0, FREE), Verb::WriteWord(number + 1))));
    assert!(wire.wait(40).iter().all(|completion| completion.outcome.is_err()));
    assert_eq!(wire.read(at(0, FREE), 1).unwrap(), [0]);
    wire.expect_silence();
}

#[test]
fn several_memory_servers_are_told_apart() {
    if !scene::has_device() {
        return;
    }
    let servers: Vec<_> = (0..3)
        .map(|server| farlink_runtime::server::serve_verbs(&serve_options(server, 3), Records::All).unwrap())
        .collect();
    // In any order.
    let fabric = connect(&[&servers[2], &servers[0], &servers[1]]);
    let mut wire = Wire::new(&fabric);
    wire.ring((0..30u16).map(|number| (at(number % 3, FREE), Verb::FetchAdd(u64::from(number % 3) + 1))));
    wire.wait(30).into_iter().for_each(|completion| drop(completion.outcome.unwrap()));
    for (index, server) in (1..).zip(&servers) {
        assert_eq!(server.raw_words()[(FREE / 8) as usize].load(Ordering::Relaxed), 10 * index);
    }
    let error = farlink_runtime::fabric::verbs::VerbsFabric::connect(&scene::options_to(&[&servers[0]])).unwrap_err();
    assert!(error.to_string().contains("3 memory servers"), "{error}");
}

/// Threads of their own with endpoints of their own add to one word.
#[test]
fn atomics_of_many_endpoints_are_atomic() {
    if !scene::has_device() {
        return;
    }
    const THREADS: u64 = 4;
    const EACH: u64 = 200;
    let server = serve();
    let fabric = connect(&[&server]);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut wire = Wire::new(&fabric);
                for _ in 0..EACH / 10 {
                    wire.ring((0..10).map(|_| (at(0, FREE), Verb::FetchAdd(1))));
                    wire.wait(10).into_iter().for_each(|completion| drop(completion.outcome.unwrap()));
                }
            });
        }
    });
    assert_eq!(server.raw_words()[(FREE / 8) as usize].load(Ordering::Relaxed), THREADS * EACH);
    eventually("endpoints take their queue pairs along", || server.queue_pairs() == 0);
}
