//! Latch-free structures: records that are never changed, behind words that installs swap; and a cache of both.
//!
//! Three protocols meet here. An *install* writes a record and swaps a word to it ([`model::install`], the runtime's own code over real
//! endpoints). A *consolidation* installs a record that says what a whole chain came to. The *mapping cache* ([`ValueCache`], the cache's own
//! code) keeps what a chain came to under its word: whoever answers from it reads the word first.
//!
//! A record here has an amount, and the word of the record below it; a chain comes to the sum. Merging a page into another one is three
//! swaps that anybody may help along, as in the Bw-tree: the page above says that it is under way, the page is absorbed, the page
//! above says that it is gone.
//!
//! Asserted: what was installed is in the chain, once, whoever consolidates meanwhile; a reader meets whole records; of two who help each
//! other one does a step; an answer over the cache is no older than the word that was read for it; bytes are counted once; a key is in one place.
//!
//! Broken variants: a swap in two steps; a consolidation, or a step of a merge, that swaps the word as it is now and not as
//! it was when it looked; a removal whose merge was cancelled behind the look at the page above; a lock word that is written
//! again though others may have freed the page; an answer from the cache without a look at the word; a version and a value
//! of two entries; bytes that are given back by who has not taken the entry out; a put that does not look whether another one found another place.

use std::{cell::Cell, rc::Rc, sync::Arc};

use farlink_cache::{ValueCache, model::Step};
use farlink_loom_tests::{
    Breaks, Peer, Running, Seen, SharedMemory, Sound, explore, now, refuse, refuse_without, run, share,
};
use farlink_runtime::{
    access::{PageRef, PagesMut, Slot, Words},
    lock::{LockState, LockWord, OwnerId},
    one_sided::{Proof, model},
    page::{HEADER_WORDS, LOCK, SizeClass, StructureId},
    ptr::RemotePtr,
    sync::Ordering,
};

const STRUCTURE: StructureId = StructureId(1);
const CLASS: SizeClass = SizeClass::SMALLEST;
const AMOUNT: usize = HEADER_WORDS;
const NEXT: usize = HEADER_WORDS + 1;
/// The word that leads to the newest record; records stand behind its line.
const WORD: usize = 0;
/// Every record is the first use of its page.
const FREE_VERSION: u64 = 0;

/// The place of a record; its number is what words lead to it by.
fn place(memory: &SharedMemory, record: u64) -> RemotePtr {
    memory.at(record as usize * CLASS.words())
}

/// Installs a record of this number; whether it did.
fn install(peer: &Peer, breaks: impl Breaks, record: u64, amount: u64, next: u64, old: u64) -> bool {
    let fill = |pages: &mut farlink_runtime::one_sided::OneSidedPages| {
        pages.describe(Slot::new_page(0), 0, 1);
        pages.fill(Slot::new_page(0), AMOUNT, &[amount, next]);
    };
    let (at, word) = (place(peer.memory(), record), peer.memory().at(WORD));
    now(model::install(&peer.remote(breaks), STRUCTURE, (at, CLASS, FREE_VERSION), fill, (word, old, record)))
        .expect("mem refuses nothing")
}

/// What the chain below a word comes to, and its records.
fn sum(peer: &Peer, mut word: u64) -> (u64, Vec<u64>) {
    let (mut sum, mut records) = (0, Vec::new());
    while word != 0 {
        let at = place(peer.memory(), word);
        let copy = now(model::read(&peer.remote(Sound), STRUCTURE, Proof::Checksum, at, CLASS));
        let copy = copy.expect("a record that is linked is whole");
        let (amount, next) = copy.read(|words| (words.word(AMOUNT), words.word(NEXT))).expect("a copy does not change");
        sum += amount;
        records.push(word);
        word = next;
    }
    (sum, records)
}

fn word(peer: &Peer) -> u64 {
    peer.read(peer.memory().at(WORD), 1)[0]
}

/// Memory with a base record of amount 1.
fn with_base(records: usize) -> SharedMemory {
    let memory = share((records + 2) * CLASS.words());
    assert!(install(&Peer::new(&memory), Sound, 1, 1, 0, 0));
    memory
}

/// What a consolidation does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Swaps {
    WhatItRead,
    /// Broken.
    WhatIsThere,
}

/// One thread adds a delta of 10, one consolidates, one reads.
fn install_and_consolidate<B: Breaks + Copy + 'static>(breaks: B, swaps: Swaps, seen: [Seen; 2]) {
    let memory = with_base(3);
    let of = |memory: &SharedMemory| Arc::clone(memory);
    let (a, b, c) = (of(&memory), of(&memory), of(&memory));
    let writer = run(move || {
        let peer = Peer::of(&a, 1);
        let old = word(&peer);
        install(&peer, breaks, 2, 10, old, old)
    });
    let consolidator = run(move || {
        let peer = Peer::of(&b, 2);
        let head = word(&peer);
        let (amount, _) = sum(&peer, head);
        let old = if swaps == Swaps::WhatItRead { head } else { word(&peer) };
        install(&peer, breaks, 3, amount, 0, old)
    });
    let reader = run(move || {
        let peer = Peer::of(&c, 3);
        sum(&peer, word(&peer)).0
    });
    let (added, consolidated, read) = (writer.join(), consolidator.join(), reader.join());
    let peer = Peer::new(&memory);
    let (total, records) = sum(&peer, word(&peer));
    assert_eq!(total, if added { 11 } else { 1 }, "a delta is lost or counted twice");
    assert!(read == 1 || read == 11, "a reader met half a chain");
    if added && consolidated {
        // Before the delta or behind it.
        seen[usize::from(records.len() == 1)].mark();
    }
}

#[test]
fn no_delta_is_lost_to_a_consolidation() {
    let seen = [Seen::new(), Seen::new()];
    let of_model = seen.clone();
    explore("an install and a consolidation", move || {
        install_and_consolidate(Sound, Swaps::WhatItRead, of_model.clone());
    });
    seen[0].require("the delta came onto the new base");
    seen[1].require("the new base had the delta");
}

/// A compare-and-swap in two steps.
#[derive(Debug, Clone, Copy)]
struct TwoSteps;

impl Breaks for TwoSteps {
    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        let found = peer.read(at, 1)[0];
        if found == expected {
            peer.write(at, &[new]);
        }
        found
    }
}

#[test]
fn a_swap_in_two_steps_is_noticed() {
    refuse("a swap in two steps", "a delta is lost", || {
        install_and_consolidate(TwoSteps, Swaps::WhatItRead, [Seen::new(), Seen::new()]);
    });
}

#[test]
fn a_consolidation_of_an_old_chain_is_noticed() {
    refuse("a consolidation that swaps what is there", "a delta is lost", || {
        install_and_consolidate(Sound, Swaps::WhatIsThere, [Seen::new(), Seen::new()]);
    });
}

/// The answer to the first WRITE is lost. `looks`: whether its lock word is set again only if it is the one from before.
#[derive(Debug, Clone)]
struct LostAnswer {
    is_over: Rc<Cell<bool>>,
    looks: bool,
}

impl Breaks for LostAnswer {
    fn answers(&self) -> bool {
        self.is_over.replace(true)
    }

    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        if !self.looks && at != peer.memory().at(WORD) {
            peer.write(at, &[new]);
            return expected;
        }
        peer.swap(at, expected, new)
    }
}

/// One thread adds a delta and does not hear that it is written; one consolidates, and frees what it has unlinked.
fn lose_an_answer(looks: bool, freed: &Seen) {
    let memory = with_base(3);
    let (of_writer, of_consolidator) = (Arc::clone(&memory), Arc::clone(&memory));
    let writer = run(move || {
        let peer = Peer::of(&of_writer, 1);
        let old = word(&peer);
        install(&peer, LostAnswer { is_over: Rc::default(), looks }, 2, 10, old, old)
    });
    let (owner, freed) = (OwnerId::new(2).expect("a small number"), freed.clone());
    let consolidator = run(move || {
        let peer = Peer::of(&of_consolidator, 2);
        let head = word(&peer);
        let (amount, records) = sum(&peer, head);
        if !install(&peer, Sound, 3, amount, 0, head) {
            return Vec::new();
        }
        if records.len() > 1 {
            freed.mark();
        }
        let free = LockWord::free(FREE_VERSION + 2, Some(owner)).word();
        records.iter().for_each(|&record| peer.write(place(peer.memory(), record), &[free]));
        records
    });
    let (added, freed) = (writer.join(), consolidator.join());
    let peer = Peer::new(&memory);
    assert_eq!(sum(&peer, word(&peer)).0, if added { 11 } else { 1 }, "a delta is lost or counted twice");
    for record in freed {
        let lock = LockWord::from_word(peer.read(place(&memory, record), 1)[LOCK]);
        assert_eq!(lock.state(), LockState::Free, "a page that was freed is not free");
    }
}

#[test]
fn what_others_have_freed_stays_free() {
    let freed = Seen::new();
    let of_model = freed.clone();
    explore("an install whose answer is lost", move || lose_an_answer(true, &of_model));
    freed.require("the delta was freed");
}

#[test]
fn a_lock_word_that_is_written_again_without_a_look_is_noticed() {
    refuse("a lock word that is written again", "freed is not free", || lose_an_answer(false, &Seen::new()));
}

/// Who has swapped a word has unlinked the records behind it, and frees each of them once.
#[test]
fn records_are_freed_by_one() {
    explore("two consolidations", || {
        let memory = with_base(3);
        let one = |owner: u32| {
            let memory = Arc::clone(&memory);
            run(move || {
                let peer = Peer::of(&memory, owner);
                let head = word(&peer);
                let (amount, records) = sum(&peer, head);
                let is_in = install(&peer, Sound, u64::from(owner) + 1, amount, 0, head);
                if is_in { records } else { Vec::new() }
            })
        };
        let (a, b) = (one(1), one(2));
        let mut freed = [a.join(), b.join()].concat();
        freed.sort_unstable();
        let peer = Peer::new(&memory);
        let (total, live) = sum(&peer, word(&peer));
        assert_eq!((total, live.len()), (1, 1));
        assert!(freed.is_sorted_by(|a, b| a < b), "a record is freed twice: {freed:?}");
        assert!(!freed.contains(&live[0]), "a record in use is freed");
        let lock = LockWord::from_word(peer.read(place(&memory, live[0]), 1)[LOCK]);
        assert_eq!(lock.state(), LockState::Unlocked);
    });
}

/// The words of a merge: of the page above, of the page to the left, and of the page that is merged into it.
const ABOVE: usize = 0;
const LEFT: usize = 1;
const PAGE: usize = 2;
/// Of the page above: the merge is under way; the entry is gone.
const MERGING: u64 = 1;
const GONE: u64 = 2;
/// Of the page: it is removed, it holds two entries; its number is given up.
const REMOVED: u64 = 102;
const GIVEN_UP: u64 = 200;
/// Swaps make a word another one each time.
const COUNT: u64 = 1000;

/// Carries a merge on until there is none. `rereads` is what is broken: the word that is swapped is the one that is there, not
/// the one from which the step follows.
fn help(peer: &Peer, rereads: bool) -> [u32; 3] {
    let at = |index| peer.memory().at(index);
    let load = |index| peer.read(at(index), 1)[0];
    let mut done = [0; 3];
    let mut swap = |step: usize, index: usize, read: u64, to: u64| {
        let old = if rereads { load(index) } else { read };
        done[step] += u32::from(peer.swap(at(index), old, to) == old);
    };
    // Each step is done by somebody; so many looks are enough.
    for _ in 0..6 {
        let above = load(ABOVE);
        if above != MERGING {
            break;
        }
        let page = load(PAGE);
        let left = load(LEFT);
        match (page, left / COUNT) {
            (REMOVED, 0) => swap(0, LEFT, left, left + 2 + COUNT),
            (REMOVED, _) => swap(1, PAGE, page, GIVEN_UP),
            _ => swap(2, ABOVE, above, GONE),
        }
    }
    done
}

/// Puts an entry into the page to the left, unless somebody swaps its word meanwhile; the word before.
fn put_to_the_left(peer: &Peer) -> Option<u64> {
    let at = peer.memory().at(LEFT);
    let left = peer.read(at, 1)[0];
    (peer.swap(at, left, left + 1) == left).then_some(left)
}

/// What must happen in some execution of a merge.
#[derive(Clone, Default)]
struct Merged {
    by_both: Seen,
    put_before: Seen,
    put_after: Seen,
    not_put: Seen,
}

/// Two help a merge along; or one does, while another `puts` an entry into the page to the left.
fn merge(puts: bool, rereads: bool, seen: &Merged) {
    let memory = share(8);
    for (index, value) in [(ABOVE, MERGING), (LEFT, 3), (PAGE, REMOVED)] {
        memory.words()[index].store(value, Ordering::Relaxed);
    }
    let helper = |owner| {
        let memory = Arc::clone(&memory);
        run(move || help(&Peer::of(&memory, owner), rereads))
    };
    let helpers: Vec<_> = (1..=if puts { 1 } else { 2 }).map(helper).collect();
    let of_putter = Arc::clone(&memory);
    let putter = puts.then(|| run(move || put_to_the_left(&Peer::of(&of_putter, 3))));
    let done: Vec<[u32; 3]> = helpers.into_iter().map(Running::join).collect();
    let put = putter.and_then(Running::join);
    let words: Vec<u64> = (0..3).map(|index| memory.words()[index].load(Ordering::Relaxed)).collect();
    let steps: Vec<u32> = (0..3).map(|step| done.iter().map(|done| done[step]).sum()).collect();
    assert_eq!(words, [GONE, 5 + COUNT + u64::from(put.is_some()), GIVEN_UP], "entries are lost or there twice");
    assert_eq!(steps, [1, 1, 1], "a step of a merge is done twice");
    if done.len() > 1 && done.iter().all(|done| done.iter().any(|&step| step > 0)) {
        seen.by_both.mark();
    }
    match put {
        Some(left) if left < COUNT => seen.put_before.mark(),
        Some(_) => seen.put_after.mark(),
        None if puts => seen.not_put.mark(),
        None => {}
    }
}

#[test]
fn a_merge_is_helped_along() {
    let seen = Merged::default();
    let of_model = seen.clone();
    explore("two who help a merge along", move || merge(false, false, &of_model));
    seen.by_both.require("both did a step");
}

#[test]
fn an_entry_is_put_beside_a_merge() {
    let seen = Merged::default();
    let of_model = seen.clone();
    explore("a merge, and an entry that is put", move || merge(true, false, &of_model));
    seen.put_before.require("an entry was put before the page was absorbed");
    seen.put_after.require("an entry was put behind that");
    seen.not_put.require("the page was absorbed while an entry was put");
}

#[test]
fn a_merge_that_is_finished_on_an_old_snapshot_is_noticed() {
    refuse("a step of a merge that follows from an old word", "twice", || merge(false, true, &Merged::default()));
    // Alone, it does no step twice.
    refuse("a page absorbed over an entry", "entries are lost", || merge(true, true, &Merged::default()));
}

/// Of the only page below the root: it has a page to its right; it has absorbed that one.
const SPLIT: u64 = 300;
const WHOLE_AGAIN: u64 = 400;
/// Of the root: the merge is cancelled, for the page is not the only one.
const CANCELLED: u64 = 3;

/// Carries on the merge of the root's only child: cancels it if that was split, else removes the page; whether it did. `looks`: it
/// does so only if the merge is still under way behind its look at the page.
fn help_only(peer: &Peer, looks: bool) -> bool {
    let at = |index| peer.memory().at(index);
    let is_merging = || peer.read(at(ABOVE), 1)[0] == MERGING;
    if !is_merging() {
        return false;
    }
    let page = peer.read(at(PAGE), 1)[0];
    if page == SPLIT {
        peer.swap(at(ABOVE), MERGING, CANCELLED);
        return false;
    }
    (!looks || is_merging()) && peer.swap(at(PAGE), page, REMOVED) == page
}

/// One helps to merge the root's only child; another splits it, which cancels the merge, and then merges the halves.
fn merge_only(looks: bool, [removed, cancelled]: &[Seen; 2]) {
    let memory = share(8);
    memory.words()[ABOVE].store(MERGING, Ordering::Relaxed);
    let (of_helper, of_splitter) = (Arc::clone(&memory), Arc::clone(&memory));
    let helper = run(move || help_only(&Peer::of(&of_helper, 1), looks));
    let splitter = run(move || {
        let peer = Peer::of(&of_splitter, 2);
        let at = peer.memory().at(PAGE);
        let is_split = peer.swap(at, 0, SPLIT) == 0;
        if is_split {
            help_only(&peer, looks);
            peer.swap(at, SPLIT, WHOLE_AGAIN);
        }
        is_split
    });
    let (is_removed, is_split) = (helper.join(), splitter.join());
    assert!(!(is_removed && is_split), "a page is removed whose merge was cancelled");
    if is_removed { removed } else { cancelled }.mark();
}

#[test]
fn a_merge_of_the_only_child_is_cancelled_by_a_split() {
    let seen = [Seen::new(), Seen::new()];
    let of_model = seen.clone();
    explore("a merge of the only child, and a split", move || merge_only(true, &of_model));
    seen[0].require("the page was removed");
    seen[1].require("the merge was cancelled");
}

#[test]
fn a_removal_behind_a_cancelled_merge_is_noticed() {
    refuse("a removal without a second look", "merge was cancelled", || merge_only(false, &[Seen::new(), Seen::new()]));
}

/// The mapping word counts up; what it leads to comes to ten times as much.
type Cached = Arc<u64>;

fn cache() -> Arc<ValueCache<Cached>> {
    ValueCache::new(4096)
}

/// An answer: what the cache has, if it goes with the word. Else what is read.
fn look_up(peer: &Peer, cache: &Arc<ValueCache<Cached>>, validates: bool, hit: &Seen) -> u64 {
    let handle = cache.handle(1);
    let found = handle.get(1);
    if let Some((_, _, value)) = &found
        && !validates
    {
        return **value;
    }
    let word = word(peer);
    match found.filter(|(version, ..)| *version == word) {
        Some((_, _, value)) => {
            hit.mark();
            *value
        }
        None => {
            handle.put(1, (word, 0), Arc::new(word * 10), 8);
            word * 10
        }
    }
}

/// One thread looks twice, another changes the word and says so behind it.
fn cached(validates: bool, hit: &Seen) {
    let memory = share(8);
    memory.words()[WORD].store(1, Ordering::Relaxed);
    let values = cache();
    values.handle(0).put(1, (1, 0), Arc::new(10), 8);
    // What has been seen of the change, past the fabric.
    let written = Arc::new(farlink_runtime::sync::AtomicU64::new(1));
    let (of_writer, says) = (Arc::clone(&memory), Arc::clone(&written));
    let writer = run(move || {
        let peer = Peer::of(&of_writer, 1);
        assert_eq!(peer.swap(peer.memory().at(WORD), 1, 2), 1);
        says.store(2, Ordering::Release);
    });
    let hit = hit.clone();
    let reader = run(move || {
        let peer = Peer::of(&memory, 2);
        let least = written.load(Ordering::Acquire);
        let found = look_up(&peer, &values, validates, &hit);
        assert!(found >= least * 10, "an answer is older than a change that had ended");
        let again = look_up(&peer, &values, validates, &hit);
        assert!(again >= found, "an answer is older than the one before");
        assert_eq!(values.handle(2).get(1).map(|(version, _, value)| version * 10 == *value), Some(true));
    });
    writer.join();
    reader.join();
}

#[test]
fn an_answer_over_the_cache_is_as_new_as_the_word() {
    let hit = Seen::new();
    let of_model = hit.clone();
    explore("the mapping cache", move || cached(true, &of_model));
    hit.require("the cache had the answer");
}

#[test]
fn a_cached_word_that_is_not_validated_is_noticed() {
    refuse("a cached word without validation", "an answer is older", || cached(false, &Seen::new()));
}

/// Two threads put values of one key.
fn two_put() {
    let values = cache();
    let before = values.used();
    values.handle(0).put(1, (1, 0), Arc::new(10), 8);
    let entry = values.used() - before;
    let one = |version: u64| {
        let values = Arc::clone(&values);
        run(move || values.handle(version).put(1, (version, 0), Arc::new(version * 10), 8))
    };
    let (a, b) = (one(2), one(3));
    assert!(a.join() | b.join(), "one of them is first");
    assert_eq!(values.used() - before, entry, "bytes are counted twice, or not at all");
}

/// Two threads put values of one key that is not there, while another entry of its bucket goes. True if one of them is there then.
fn two_put_anew() -> bool {
    const LARGE: usize = 1500;
    let (key, [gone, comes]) = (1, [2, 3]);
    // One bucket, and bytes for one of the large ones.
    let values: Arc<ValueCache<Cached>> = ValueCache::new(3000);
    let handle = values.handle(0);
    let empty = values.used();
    handle.put(gone, (1, 0), Arc::new(1), LARGE);
    let large = values.used() - empty;
    let (of_a, of_b) = (Arc::clone(&values), Arc::clone(&values));
    let a = run(move || of_a.handle(1).put(key, (2, 0), Arc::new(20), 8));
    let b = run(move || {
        let handle = of_b.handle(2);
        handle.put(comes, (1, 0), Arc::new(1), LARGE);
        handle.put(key, (1, 0), Arc::new(10), 8);
    });
    a.join();
    b.join();
    let others = [gone, comes].into_iter().filter(|&key| handle.get(key).is_some()).count();
    let its = values.used() - empty - others * large;
    assert!(its <= large - LARGE + 8, "a key is in two places");
    its != 0
}

/// One thread puts a value in place of another, one looks.
fn put_and_look() {
    let values = cache();
    values.handle(0).put(1, (1, 0), Arc::new(10), 8);
    let (of_writer, of_reader) = (Arc::clone(&values), Arc::clone(&values));
    let writer = run(move || of_writer.handle(1).put(1, (2, 0), Arc::new(20), 8));
    let reader = run(move || {
        let (version, _, value) = of_reader.handle(2).get(1).expect("there is always one");
        assert_eq!(*value, version * 10, "a version and a value of two entries");
    });
    assert!(writer.join());
    reader.join();
    // Behind both, which loom does not see in a reference count.
    drop(values);
}

#[test]
fn a_key_is_in_one_place() {
    let there = Seen::new();
    let seen = there.clone();
    explore("two put a value of a key that is not there", move || {
        if two_put_anew() {
            seen.mark();
        }
    });
    there.require("a value is there");
    refuse_without(Step::OnePlace, "a key in two places", "a key is in two places", || {
        two_put_anew();
    });
}

#[test]
fn an_entry_is_replaced_as_a_whole() {
    explore("two put a value of one key", two_put);
    explore("one puts a value, one looks", put_and_look);
}

#[test]
fn parts_of_two_entries_are_noticed() {
    refuse_without(Step::OneEntry, "parts of two entries", "of two entries", put_and_look);
}

#[test]
fn bytes_given_back_by_two_are_noticed() {
    refuse_without(Step::TakenOut, "bytes given back by two", "bytes are counted", two_put);
}
