//! The ring of messages: what lies below a published head is whole, and nothing is overwritten before it was read.
//!
//! A writer puts words into a ring of two through an endpoint of the `mem` fabric, and publishes a head behind them; a reader
//! copies them out and publishes a tail, through an endpoint too ([`Producer`], [`Consumer`]). Each word says its
//! position, so one that is stale or overwritten shows. Heads and tails come late: after several words, or not yet.
//!
//! Broken variants: a head before its words; a tail before the words are copied; a writer that does not heed the tail.

use farlink_loom_tests::{Peer, Seen, SharedMemory, explore, refuse, run, share};
use farlink_runtime::{
    messaging::ring::{Consumer, Producer},
    sync::{Ordering, yield_thread},
};

const HEAD: usize = 0;
const TAIL: usize = 1;
const RING: usize = 2;
const CAPACITY: usize = 2;
/// Words that are sent: the last one needs a place again.
const WORDS: u64 = 3;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Break {
    Nothing,
    HeadFirst,
    TailFirst,
    NoTail,
}

/// Sends all words, as many with one head as there is room for, up to `batch`.
fn write(memory: &SharedMemory, batch: usize, broken: Break) {
    let (peer, mut producer) = (Peer::new(memory), Producer::new(CAPACITY));
    while producer.head() < WORDS {
        // What the reader has written into the writer's memory is read there.
        let tail = match broken {
            Break::NoTail => producer.head(),
            _ => memory.words()[TAIL].load(Ordering::Acquire),
        };
        producer.see_tail(tail).expect("an honest reader");
        let count = batch.min(producer.room()).min((WORDS - producer.head()) as usize);
        if count == 0 {
            yield_thread();
            continue;
        }
        if broken == Break::HeadFirst {
            peer.write(memory.at(HEAD), &[producer.head() + count as u64]);
        }
        for _ in 0..count {
            let place = producer.place(1);
            peer.write(memory.at(RING + place.start), &[producer.head() + 1]);
            producer.put(1);
        }
        peer.write(memory.at(HEAD), &[producer.head()]);
    }
}

/// Receives all words; true if some came together.
fn read(memory: &SharedMemory, broken: Break) -> bool {
    let (peer, mut consumer) = (Peer::new(memory), Consumer::new(CAPACITY));
    let ring = &memory.words()[RING..RING + CAPACITY];
    let mut together = false;
    while consumer.position() < WORDS {
        consumer.see_head(memory.words()[HEAD].load(Ordering::Acquire)).expect("an honest writer");
        let count = consumer.available();
        if count == 0 {
            yield_thread();
            continue;
        }
        together |= count > 1;
        let first = consumer.position();
        if broken == Break::TailFirst {
            peer.write(memory.at(TAIL), &[first + count as u64]);
        }
        let mut words = Vec::new();
        consumer.take(ring, 0, count, &mut words);
        assert!(words.into_iter().eq(first + 1..=first + count as u64), "a word that was not sent");
        consumer.finish(consumer.position());
        if consumer.position() < WORDS {
            let tail = consumer.release();
            peer.write(memory.at(TAIL), &[tail]);
        }
    }
    together
}

fn model(batch: usize, broken: Break, together: &Seen) {
    let memory = share(RING + CAPACITY);
    let (of_writer, of_reader) = (SharedMemory::clone(&memory), SharedMemory::clone(&memory));
    let writer = run(move || write(&of_writer, batch, broken));
    let reader = run(move || read(&of_reader, broken));
    writer.join();
    if reader.join() {
        together.mark();
    }
}

#[test]
fn what_is_published_is_whole_and_what_is_unread_stays() {
    for batch in [1, 2] {
        let together = Seen::new();
        let seen = together.clone();
        explore(&format!("message ring, {batch} at a time"), move || model(batch, Break::Nothing, &seen));
        together.require("two words are read under one head");
    }
}

#[test]
fn broken_rings_show_words_that_were_not_sent() {
    for (broken, batch) in [(Break::HeadFirst, 2), (Break::TailFirst, 2), (Break::NoTail, 1)] {
        refuse(&format!("message ring, {broken:?}"), "a word that was not sent", move || {
            model(batch, broken, &Seen::new());
        });
    }
}
