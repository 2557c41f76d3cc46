//! Publication: a new page is complete before anything links to it.
//!
//! The page's memory is free at first: its lock word says so, over the body of its past life. A change of a parent writes the new
//! body, then the unlocked lock word, and waits for both; then it writes the link, as one of the parent's changed words. Both
//! ends are real endpoints of the `mem` fabric, or the writer is a thread of the memory server; the change is the runtime's own
//! ([`model::change`], [`model::change_here`]). Asserted: whoever reads the link and then the page finds it unlocked,
//! whole, and with the new content, at the first try.
//!
//! Broken variants: the link before the page; the page's lock word never set; the link by a plain relaxed store, which
//! orders nothing; the page read before the link is known, in one wait.

use std::{cell::RefCell, sync::Arc};

use farlink_loom_tests::{Breaks, Peer, Seen, SharedMemory, Sound, explore, now, refuse, run, share};
use farlink_runtime::{
    access::{Pages, PagesMut},
    change::{Role, Slot},
    lock::{LockState, LockWord},
    one_sided::{OneSidedPages, PageCopy, Proof, model},
    page::{self, HEADER_WORDS, Identity, LOCK, SizeClass, StructureId},
    ptr::RemotePtr,
    sync::Ordering,
};

const STRUCTURE: StructureId = StructureId(1);
const CLASS: SizeClass = SizeClass::SMALLEST;
const PAGE_WORDS: usize = CLASS.words();
const CONTENT: usize = HEADER_WORDS;
/// The parent stands behind the new page.
const PARENT: usize = PAGE_WORDS;
const LINK: usize = PARENT + HEADER_WORDS;
const WORDS: usize = 2 * PAGE_WORDS;
const OLD: u64 = 3;
const NEW: u64 = 4;

/// Memory with a free page that was at version 8 in its past life, and a parent with a null link.
fn setup() -> SharedMemory {
    let memory = share(WORDS);
    for (first, version, content) in [(0, 8, OLD), (PARENT, 7, 0)] {
        let mut image = [0; PAGE_WORDS];
        image[CONTENT] = content;
        let identity = Identity { structure: STRUCTURE, level: 0, class: CLASS, kind: 0, is_words: false };
        page::seal(&mut image, memory.at(first), identity, version);
        for (word, value) in memory.words()[first..].iter().zip(image) {
            word.store(value, Ordering::Relaxed);
        }
    }
    memory.words()[LOCK].store(LockWord::free(9, None).word(), Ordering::Relaxed);
    memory
}

/// The parent as it is, the free page, and what becomes of both.
fn change(writer: &Peer) -> (Vec<(PageCopy, Role)>, Option<model::Free>, impl FnOnce(&mut OneSidedPages) + use<>) {
    let memory = writer.memory();
    let parent = now(model::read(&writer.remote(Sound), STRUCTURE, Proof::Checksum, memory.at(PARENT), CLASS));
    let parent = parent.expect("nobody else changes it");
    let page = memory.at(0);
    let links = move |pages: &mut OneSidedPages| {
        let parent = Pages::new().add(());
        pages.describe(Slot::new_page(0), 0, 0);
        pages.set(Slot::new_page(0), CONTENT, NEW);
        pages.set(parent, LINK - PARENT, page.raw());
    };
    (vec![(parent, Role::AsRead)], Some((page, CLASS, 9)), links)
}

fn publish_by(memory: &SharedMemory, breaks: impl Breaks) {
    let writer = Peer::new(memory);
    let (parent, new, links) = change(&writer);
    let is_made = now(model::change(&writer.remote(breaks), STRUCTURE, parent, new, links));
    assert!(is_made.expect("mem refuses nothing"), "nobody else changes the parent");
}

fn publish(memory: &SharedMemory) {
    publish_by(memory, Sound);
}

fn publish_here(memory: &SharedMemory) {
    let writer = Peer::new(memory);
    let (parent, new, links) = change(&writer);
    let is_made = model::change_here(&writer.remote(Sound), STRUCTURE, &memory.local(), parent, new, links);
    assert!(is_made.expect("mem refuses nothing"), "nobody else changes the parent");
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
    assert_eq!(page[CONTENT], NEW, "a linked page was not complete: it is the old one");
    linked.mark();
}

#[test]
fn a_linked_page_is_complete() {
    let ways: [(&str, fn(&SharedMemory)); 2] = [("publication", publish), ("publication, here", publish_here)];
    for (name, publish) in ways {
        let (linked, unlinked) = (Seen::new(), Seen::new());
        let seen = (linked.clone(), unlinked.clone());
        explore(name, move || model(publish, follow, &seen.0, &seen.1));
        linked.require("the reader finds the link");
        unlinked.require("the reader comes before the link");
    }
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

/// Whether a WRITE is of the parent's words, the link among them.
fn is_link(peer: &Peer, at: RemotePtr, words: &[u64]) -> bool {
    let first = peer.memory().index(at);
    (first..first + words.len()).contains(&LINK)
}

/// Writes the new page behind the link.
#[derive(Default)]
struct LinksFirst(RefCell<Vec<(RemotePtr, Vec<u64>)>>);

impl Breaks for LinksFirst {
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        if peer.memory().index(at) < PAGE_WORDS {
            return self.0.borrow_mut().push((at, words.to_vec()));
        }
        peer.write(at, words);
        if is_link(peer, at, words) {
            self.0.borrow_mut().drain(..).for_each(|(at, words)| peer.write(at, &words));
        }
    }
}

#[test]
fn broken_order_of_link_and_page_is_caught() {
    let link_first = |memory: &SharedMemory| publish_by(memory, LinksFirst::default());
    refuse_variant("publication, link first", link_first, follow);
}

/// Never writes the new page's lock word.
struct StaysFree;

impl Breaks for StaysFree {
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        if peer.memory().index(at) != LOCK {
            peer.write(at, words);
        }
    }
}

#[test]
fn broken_publication_without_the_lock_word_is_caught() {
    let still_free = |memory: &SharedMemory| publish_by(memory, StaysFree);
    refuse_variant("publication, lock word left free", still_free, follow);
}

/// Writes the link past the endpoint.
struct LinksRelaxed;

impl Breaks for LinksRelaxed {
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        match is_link(peer, at, words) {
            true => peer.write_relaxed(at, words),
            false => peer.write(at, words),
        }
    }
}

#[test]
fn broken_link_without_a_fence_is_caught() {
    let unfenced = |memory: &SharedMemory| publish_by(memory, LinksRelaxed);
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
