//! Single requests: what they do, where, and that each completes once.

use farlink_runtime::{
    fabric::{Done, Error as FabricError, Verb},
    page::PAGE_WORDS_MAX,
    ptr::{RemotePtr, ServerId},
};
use farlink_tests::{
    backend::Cluster,
    direct::{Direct, previous, written},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::{SERVER_BYTES, SERVERS, at, on_each};

#[test]
fn the_cluster_is_as_it_was_made() {
    on_each("sizes", |cluster| {
        assert_eq!(cluster.servers(), SERVERS);
        for server in 0..SERVERS as u16 {
            assert_eq!(cluster.region_bytes(ServerId::new(server).unwrap()), SERVER_BYTES);
        }
    });
}

#[test]
fn what_is_written_is_read_and_nothing_else_is_touched() {
    on_each("READ and WRITE", |cluster| {
        let direct = Direct::new(cluster, 1).unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        for server in 0..SERVERS as u16 {
            for words in [1, 2, 7, 8, 9, 31, 32, 33, 128, 511, PAGE_WORDS_MAX] {
                // Begins anywhere in a cache line.
                for first in [8, 11, 15] {
                    let around = at(cluster, server, first - 1);
                    let before: Vec<u64> = (0..(words + 2).min(PAGE_WORDS_MAX)).map(|_| rng.random()).collect();
                    direct.write(around, &before).unwrap();
                    let tail = at(cluster, server, first + words as u64);
                    direct.write_word(tail, 77).unwrap();
                    let image: Vec<u64> = (0..words).map(|_| rng.random()).collect();
                    direct.write(at(cluster, server, first), &image).unwrap();
                    assert_eq!(direct.read(at(cluster, server, first), words).unwrap(), image, "{words} at {first}");
                    assert_eq!(direct.read(around, 1).unwrap(), before[..1], "the word before {words} at {first}");
                    assert_eq!(direct.read(tail, 1).unwrap(), [77], "the word after {words} at {first}");
                }
            }
        }
    });
}

#[test]
fn atomics_return_what_was_there() {
    on_each("CAS and FETCH_ADD", |cluster| {
        let direct = Direct::new(cluster, 1).unwrap();
        for server in 0..SERVERS as u16 {
            let at = at(cluster, server, 3);
            direct.write_word(at, 5).unwrap();
            assert_eq!(direct.compare_swap(at, 4, 9).unwrap(), 5, "refused");
            assert_eq!(direct.read(at, 1).unwrap(), [5]);
            assert_eq!(direct.compare_swap(at, 5, u64::MAX - 1).unwrap(), 5, "swapped");
            assert_eq!(direct.fetch_add(at, 3).unwrap(), u64::MAX - 1);
            assert_eq!(direct.fetch_add(at, u64::MAX).unwrap(), 1, "it wraps");
            assert_eq!(direct.read(at, 1).unwrap(), [0]);
        }
    });
}

/// Far more at once than any queue is long, of all verbs, to both servers.
#[test]
fn each_of_many_completes_once() {
    on_each("many at once", |cluster| {
        let direct = Direct::new(cluster, 1).unwrap();
        const LANES: u64 = 600;
        let place = |lane: u64, word: u64| at(cluster, (lane % SERVERS as u64) as u16, lane * 16 + word);
        let mut verbs = Vec::new();
        for lane in 0..LANES {
            verbs.push((place(lane, 0), Verb::Write(direct.buffer(&[lane, !lane]).unwrap())));
            verbs.push((place(lane, 2), Verb::WriteWord(lane + 1)));
            verbs.push((place(lane, 3), Verb::FetchAdd(lane)));
            verbs.push((place(lane, 4), Verb::CompareSwap { expected: 0, new: lane + 2 }));
            verbs.push((place(lane, 8), Verb::Read(direct.buffer(&[7; 8]).unwrap())));
        }
        let outcomes = direct.all(verbs);
        assert_eq!(outcomes.len() as u64, 5 * LANES);
        for (index, outcome) in outcomes.into_iter().enumerate() {
            match index % 5 {
                0 | 1 => written(outcome).unwrap(),
                2 | 3 => assert_eq!(previous(outcome).unwrap(), 0),
                _ => assert!(matches!(outcome.unwrap(), Done::Read(buffer) if *buffer == [0; 8])),
            }
        }
        for lane in 0..LANES {
            assert_eq!(direct.read(place(lane, 0), 5).unwrap(), [lane, !lane, lane + 1, lane, lane + 2]);
        }
        assert!(direct.poll().is_empty(), "more completions than requests");
        direct.ring([]);
        assert!(direct.poll().is_empty(), "nothing was posted");
    });
}

/// A request that cannot be served, and what it must say.
fn bad_requests(cluster: &Cluster, direct: &Direct) -> Vec<(RemotePtr, Verb)> {
    let last = ServerId::new(SERVERS as u16 - 1).unwrap();
    let at_end = |bytes: u64| RemotePtr::new(last, cluster.region_bytes(last) - bytes).unwrap();
    let nowhere = RemotePtr::new(ServerId::new(SERVERS as u16).unwrap(), 4096).unwrap();
    let far = RemotePtr::new(last, (1 << 48) - 8).unwrap();
    let buffer = |words: usize| direct.buffer(&vec![3; words]).unwrap();
    vec![
        (at_end(0), Verb::Read(buffer(1))),
        (at_end(8), Verb::Read(buffer(2))),
        (at_end(8), Verb::Write(buffer(2))),
        (at_end(0), Verb::WriteWord(1)),
        (at_end(0), Verb::FetchAdd(1)),
        (far, Verb::CompareSwap { expected: 0, new: 1 }),
        (far, Verb::Read(buffer(512))),
        (nowhere, Verb::Read(buffer(1))),
        (nowhere, Verb::WriteWord(1)),
        (at(cluster, 0, 0).add(4).unwrap(), Verb::FetchAdd(1)),
        (at(cluster, 0, 0).add(1).unwrap(), Verb::Read(buffer(1))),
    ]
}

#[test]
fn a_bad_request_is_an_error_and_harms_nothing() {
    on_each("bad requests", |cluster| {
        let direct = Direct::new(cluster, 1).unwrap();
        let last = ServerId::new(SERVERS as u16 - 1).unwrap();
        let end = RemotePtr::new(last, cluster.region_bytes(last) - 8).unwrap();
        direct.write_word(end, 11).unwrap();
        for (place, verb) in bad_requests(cluster, &direct) {
            let name = verb.name();
            match direct.one(place, verb).map_err(|error| *error) {
                Err(FabricError::BadAddress { what, at, why }) => {
                    assert_eq!((what, at), (name, place), "{why}");
                    assert!(!why.is_empty());
                }
                other => panic!("{name} at {place}: {other:?}"),
            }
            // The endpoint is as good as before.
            assert_eq!(
                direct.fetch_add(at(cluster, 0, 1), 1).unwrap(),
                direct.read(at(cluster, 0, 1), 1).unwrap()[0] - 1
            );
        }
        // In the middle of good ones, of which none is lost.
        for (place, verb) in bad_requests(cluster, &direct) {
            let good = |word: u64| (at(cluster, 1, word), Verb::WriteWord(word));
            let mut outcomes = direct.all([good(40), (place, verb), good(41)]);
            assert!(outcomes.remove(1).is_err());
            outcomes.into_iter().for_each(|outcome| written(outcome).unwrap());
        }
        assert_eq!(direct.read(end, 1).unwrap(), [11], "a refused WRITE was placed in part");
    });
}

#[test]
fn an_endpoint_may_go_with_requests_in_flight() {
    on_each("dropped in flight", |cluster| {
        for round in 0..20 {
            let direct = Direct::new(cluster, round).unwrap();
            let verbs: Vec<_> = (0..64)
                .map(|word| (at(cluster, (word % 2) as u16, 512 * word), Verb::Read(direct.buffer(&[1; 512]).unwrap())))
                .collect();
            direct.ring(verbs);
            direct.ring([(at(cluster, 0, 1), Verb::Write(direct.buffer(&[round; 4]).unwrap()))]);
            if round % 2 == 0 {
                direct.poll();
            }
            drop(direct);
            let other = Direct::new(cluster, round).unwrap();
            let there = other.read(at(cluster, 0, 1), 4).unwrap();
            assert!(there.iter().all(|&word| word <= round), "{there:?} after {round}");
        }
    });
}
