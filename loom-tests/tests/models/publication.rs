//! Publication: a new page is complete before anything links to it.
//!
//! The page's memory is free at first: its lock word says so, over the body of its past life. The writer WRITEs the new
//! body, then the unlocked lock word, and waits for both; then it WRITEs the link, as one of a parent's changed words. Both
//! ends are real endpoints of the `mem` fabric. Asserted: whoever reads the link and then the page finds it unlocked,
//! whole, and with the new content, at the first try.
//!
//! Broken variants: the link before the page; the page's lock word never set; the link by a plain relaxed store, which
//! orders nothing; the page read before the link is known, in one wait.

use std::sync::Arc;

use farlink_loom_tests::{Peer, Seen, SharedMemory, explore, refuse, run, share};
use farlink_runtime::{
    lock::{LockState, LockWord},
    page::{self, CHECKSUM, Identity, LOCK, SizeClass, StructureId},
    sync::Ordering,
};

/// Words of the new page: the header and one of its own.
const PAGE_WORDS: usize = 5;
/// Where the parent's link stands, behind the page. One word beside it changes too, so that the WRITE is of several words.
const LINK: usize = PAGE_WORDS;
const WORDS: usize = LINK + 2;
const OLD: u64 = 3;
const NEW: u64 = 4;

fn image(memory: &SharedMemory, version: u64, content: u64) -> [u64; PAGE_WORDS] {
    let mut image = [0, 0, 0, 0, content];
    let identity =
        Identity { structure: StructureId(1), level: 0, class: SizeClass::SMALLEST, kind: 0, is_words: false };
    page::seal(&mut image, memory.at(0), identity, version);
    image
}

/// Memory with a free page that was at version 8 in its past life, and a null link.
fn setup() -> SharedMemory {
    let memory = share(WORDS);
    for (word, value) in memory.words().iter().zip(image(&memory, 8, OLD)) {
        word.store(value, Ordering::Relaxed);
    }
    memory.words()[LOCK].store(LockWord::free(9, None).word(), Ordering::Relaxed);
    memory
}

fn write_page(memory: &SharedMemory, writer: &Peer) {
    let image = image(memory, 10, NEW);
    writer.write(memory.at(CHECKSUM), &image[CHECKSUM..]);
    writer.write(memory.at(LOCK), &[image[LOCK]]);
}

fn write_link(memory: &SharedMemory, writer: &Peer) {
    writer.write(memory.at(LINK), &[memory.at(0).raw(), 1]);
}

fn publish(memory: &SharedMemory) {
    let writer = Peer::new(memory);
    write_page(memory, &writer);
    write_link(memory, &writer);
}

/// Reads the link, then the page if there is one; the link, and the page's words.
fn follow(memory: &SharedMemory) -> (u64, Vec<u64>) {
    let reader = Peer::new(memory);
    let link = reader.read(memory.at(LINK), 1)[0];
    let page = if link == 0 { Vec::new() } else { reader.read(memory.at(0), PAGE_WORDS) };
    (link, page)
}

fn model(
    publish: impl FnOnce(&SharedMemory) + 'static,
    follow: impl FnOnce(&SharedMemory) -> (u64, Vec<u64>) + 'static,
    linked: &Seen,
    unlinked: &Seen,
) {
    let memory = setup();
    let (of_writer, of_reader) = (Arc::clone(&memory), Arc::clone(&memory));
    let writer = run(move || publish(&of_writer));
    let reader = run(move || follow(&of_reader));
    let (link, page) = reader.join();
    writer.join();
    if link == 0 {
        return unlinked.mark();
    }
    assert_eq!(link, memory.at(0).raw());
    let lock = LockWord::from_word(page[LOCK]);
    assert_eq!(lock.state(), LockState::Unlocked, "a linked page was not complete: its lock word is {lock:?}");
    assert!(page::is_whole(&page), "a linked page was not complete: it is not whole");
    assert_eq!(page[4], NEW, "a linked page was not complete: it is the old one");
    linked.mark();
}

#[test]
fn a_linked_page_is_complete() {
    let (linked, unlinked) = (Seen::new(), Seen::new());
    let seen = (linked.clone(), unlinked.clone());
    explore("publication", move || model(publish, follow, &seen.0, &seen.1));
    linked.require("the reader finds the link");
    unlinked.require("the reader comes before the link");
}

fn refuse_variant(
    name: &str,
    publish: impl Fn(&SharedMemory) + Copy + Send + Sync + 'static,
    follow: impl Fn(&SharedMemory) -> (u64, Vec<u64>) + Copy + Send + Sync + 'static,
) {
    refuse(name, "a linked page was not complete", move || {
        model(publish, follow, &Seen::new(), &Seen::new());
    });
}

#[test]
fn broken_order_of_link_and_page_is_caught() {
    let link_first = |memory: &SharedMemory| {
        let writer = Peer::new(memory);
        write_link(memory, &writer);
        write_page(memory, &writer);
    };
    refuse_variant("publication, link first", link_first, follow);
}

#[test]
fn broken_publication_without_the_lock_word_is_caught() {
    let still_free = |memory: &SharedMemory| {
        let writer = Peer::new(memory);
        writer.write(memory.at(CHECKSUM), &image(memory, 10, NEW)[CHECKSUM..]);
        write_link(memory, &writer);
    };
    refuse_variant("publication, lock word left free", still_free, follow);
}

#[test]
fn broken_link_without_a_fence_is_caught() {
    let unfenced = |memory: &SharedMemory| {
        write_page(memory, &Peer::new(memory));
        memory.words()[LINK].store(memory.at(0).raw(), Ordering::Relaxed);
    };
    refuse_variant("publication, link without a fence", unfenced, follow);
}

#[test]
fn broken_reader_that_does_not_wait_for_the_link_is_caught() {
    let at_once = |memory: &SharedMemory| {
        let reader = Peer::new(memory);
        let page = reader.read(memory.at(0), PAGE_WORDS);
        (reader.read(memory.at(LINK), 1)[0], page)
    };
    refuse_variant("publication, page read too early", publish, at_once);
}
