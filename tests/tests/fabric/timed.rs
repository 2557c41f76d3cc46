//! The `mem` fabric's latency and bandwidth, in virtual time.

use std::{cell::Cell, rc::Rc};

use farlink_runtime::{
    buffer::Buffers,
    clock::Clock,
    fabric::{Completion, Done, Fabric, Request, Ticket, Verb, mem::MemOptions},
    ptr::{RemotePtr, ServerId},
    server,
};
use farlink_tests::cluster::FAST;

const WORDS: usize = 128;
/// A kilobyte takes 1024 ns.
const LIMITED: MemOptions = MemOptions { bandwidth_bytes_per_s: 1_000_000_000, ..FAST };
/// Nasty completions wait for a random number of polls, too.
const POLLS: usize = 10_000;

/// At which time each of these READs of [`WORDS`] words completes, in the order of posting: all are rung at once, and nothing else
/// goes on.
fn read_at(options: MemOptions, servers: &[u16]) -> Vec<u64> {
    let fabric = server::in_process(2, 1 << 20, options).unwrap();
    let now = Rc::new(Cell::new(0));
    // Before the endpoint: what is registered lives longer.
    let buffers = Buffers::default();
    let mut endpoint = fabric.endpoint(1, Clock::Virtual(Rc::clone(&now))).unwrap();
    let mut requests = Vec::new();
    for (&server, ticket) in servers.iter().zip(0..) {
        // SAFETY: what is registered lives as long as `buffers`, which are dropped after the endpoint.
        let register = |base, words| unsafe { endpoint.register(base, words) };
        let buffer = buffers.take(WORDS, register).unwrap();
        let at = RemotePtr::new(ServerId::new(server).unwrap(), 1 << 19).unwrap();
        requests.push(Request { ticket: Ticket(ticket), at, verb: Verb::Read(buffer) });
    }
    endpoint.ring(&mut requests);
    let mut times = vec![None; servers.len()];
    while times.contains(&None) {
        let mut completions = Vec::new();
        // What is due by now comes at once, unless it is held back at random.
        for _ in 0..if options.nasty { POLLS } else { 1 } {
            endpoint.poll(&mut completions);
        }
        for Completion { ticket, outcome } in completions {
            assert!(matches!(outcome, Ok(Done::Read(_))), "{outcome:?}");
            assert_eq!(times[ticket.0 as usize].replace(now.get()), None, "{ticket:?} completed twice");
        }
        if times.contains(&None) {
            let due_ns = endpoint.next_due_ns().expect("something is under way");
            assert!(due_ns > now.get(), "what is due at {due_ns} ns has not come");
            now.set(due_ns);
        }
    }
    times.into_iter().flatten().collect()
}

#[test]
fn a_limited_bandwidth_is_shared_by_what_goes_to_one_server() {
    assert_eq!(read_at(LIMITED, &[0, 0, 0]), [1024, 2048, 3072]);
    assert_eq!(read_at(LIMITED, &[0, 1]), [1024, 1024]);
    let both = MemOptions { latency_ns: 5000, ..LIMITED };
    assert_eq!(read_at(both, &[0, 0, 0]), [6024, 7048, 8072]);
}

#[test]
fn latencies_overlap() {
    assert_eq!(read_at(MemOptions { latency_ns: 5000, ..FAST }, &[0, 0, 1]), [5000; 3]);
}

#[test]
fn nasty_memory_is_no_faster_than_it_is_told() {
    assert_eq!(read_at(MemOptions { latency_ns: 5000, nasty: true, ..FAST }, &[0, 0, 1]), [5000; 3]);
    let all = MemOptions { latency_ns: 5000, nasty: true, ..LIMITED };
    assert_eq!(read_at(all, &[0, 0, 0]), [6024, 7048, 8072]);
}
