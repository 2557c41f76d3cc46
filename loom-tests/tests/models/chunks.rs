//! Free pages on their way between compute servers and a chunk's bitmap, under the chunk's lock: each is in one place.
//!
//! The code is the runtime's, over real endpoints. Broken variants: a holder that is not kept away, and a bitmap that is
//! written after the lock is given up.

use std::{cell::RefCell, sync::Arc};

use farlink_loom_tests::{Breaks, Peer, Running, Seen, SharedMemory, Sound, explore, now, refuse, run, share};
use farlink_runtime::{free_pages::model::OneWord, lock::OwnerId, ptr::RemotePtr, sync::Ordering};

const ENTRY: usize = 0;
const COUNT: usize = 1;
const BITMAP: usize = 2;
/// Lock words of pages stand so far apart.
const PAGE: usize = 512;
/// Words of memory: for two pages, which were never written.
const WORDS: usize = PAGE + 8;

fn chunk(memory: &SharedMemory) -> OneWord {
    OneWord::new(memory.at(ENTRY), memory.at(BITMAP), memory.at(3))
}

/// Page 0 is in the bitmap.
fn memory() -> SharedMemory {
    let memory = share(WORDS);
    let entry = OneWord::entry(OwnerId::new(9).expect("a small number"));
    for (word, value) in [(ENTRY, entry), (COUNT, 1), (BITMAP, 1)] {
        memory.words()[word].store(value, Ordering::Relaxed);
    }
    memory
}

#[derive(Debug, PartialEq, Eq)]
enum Did {
    Took(Vec<u64>),
    GaveBack,
    Nothing,
}

fn take(memory: &SharedMemory, owner: u32, breaks: impl Breaks) -> Did {
    let peer = Peer::of(memory, owner);
    now(chunk(memory).take_all(&peer.remote(breaks))).expect("nothing fails").map_or(Did::Nothing, Did::Took)
}

fn give_back(memory: &SharedMemory, owner: u32, breaks: impl Breaks) -> Did {
    let peer = Peer::of(memory, owner);
    match now(chunk(memory).give_back(&peer.remote(breaks), &[1])).expect("nothing fails") {
        true => Did::GaveBack,
        false => Did::Nothing,
    }
}

type Does = fn(&SharedMemory) -> Did;

/// Two compute servers; `second` has page 1 if it gives it back.
fn both(first: Does, second: Does) -> [Did; 2] {
    let memory = memory();
    let does = [first, second].map(|does| {
        let memory = Arc::clone(&memory);
        run(move || does(&memory))
    });
    let did = does.map(Running::join);
    let word = |index: usize| memory.words()[index].load(Ordering::Relaxed);
    let mut places = [0; 2];
    (0..2).for_each(|page| places[page] += word(BITMAP) >> page & 1);
    for did in &did {
        if let Did::Took(pages) = did {
            pages.iter().for_each(|&page| places[page as usize] += 1);
        }
    }
    assert_eq!(places, [1, u64::from(did[1] == Did::GaveBack)], "a page is in two places, or in none: {did:?}");
    assert_eq!(word(COUNT), u64::from(word(BITMAP).count_ones()), "the count is wrong");
    assert_eq!(word(ENTRY), OneWord::entry(OwnerId::new(9).expect("a small number")), "somebody still holds it");
    did
}

#[test]
fn a_page_is_in_one_place() {
    let seen = [Seen::new(), Seen::new()];
    let marks = seen.clone();
    explore("chunks, two takers", || {
        both(|memory| take(memory, 1, Sound), |memory| take(memory, 2, Sound));
    });
    explore("chunks, a taker and a giver", move || {
        match both(|memory| take(memory, 1, Sound), |memory| give_back(memory, 2, Sound)) {
            [Did::Took(pages), Did::GaveBack] if pages.len() == 2 => marks[0].mark(),
            [_, Did::Nothing] | [Did::Nothing, _] => marks[1].mark(),
            _ => {}
        }
    });
    seen[0].require("the page that comes back is taken");
    seen[1].require("one is kept away");
}

/// Whoever asks becomes the holder.
struct HoldsAnyway;

impl Breaks for HoldsAnyway {
    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        peer.swap(at, expected, new);
        expected
    }
}

/// Writes come after the next compare-and-swap, which gives the lock up.
#[derive(Default)]
struct WritesLate(RefCell<Vec<(RemotePtr, Vec<u64>)>>);

impl Breaks for WritesLate {
    fn write(&self, _: &Peer, at: RemotePtr, words: &[u64]) {
        self.0.borrow_mut().push((at, words.to_vec()));
    }

    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        let previous = peer.swap(at, expected, new);
        self.0.borrow_mut().drain(..).for_each(|(at, words)| peer.write(at, &words));
        previous
    }
}

#[test]
fn broken_holders_lose_pages_or_use_them_twice() {
    let why = "a page is in two places, or in none";
    refuse("chunks, held anyway", why, || {
        both(|memory| take(memory, 1, HoldsAnyway), |memory| take(memory, 2, HoldsAnyway));
    });
    refuse("chunks, written late", why, || {
        both(|memory| take(memory, 1, WritesLate::default()), |memory| give_back(memory, 2, WritesLate::default()));
    });
}
