//! The remote optimistic lock: writers that lock by compare-and-swap, readers that only READ.
//!
//! A writer compare-and-swaps the lock word from the one that its copy was read under, WRITEs the changed words and the
//! checksum that goes with the next version, and unlocks by writing that version. A reader proves its copy whole in one of
//! two ways: by the checksum, in one READ whose words may come from different moments; or by reading the lock word, the
//! page, and the lock word again, with a wait after each. Both ends are real endpoints of the `mem` fabric, the page
//! functions are the runtime's, and the order of a change is that of `one_sided/change.rs`.
//!
//! Asserted: an accepted copy is the page as it was at the version in its lock word; a lock that is had proves the copy
//! current, so no change is lost; several pages are locked all or none; and three refused copies in a row under one
//! unlocked lock word do not happen while everybody keeps to the protocol, so that they prove corruption.
//!
//! Broken variants: the reader trusts a READ whose lock word is unlocked; the checksum is not bound to the version; the
//! lock word is read twice without waiting; the writer unlocks before the data, unlocks without *release*, writes without
//! its fence, or locks by READ and WRITE; a failed attempt puts back locks that it never had; two refused copies in a row
//! count as corruption.
#![cfg(loom)]

use std::sync::Arc;

use farlink_loom_tests::{Peer, Running, Seen, SharedMemory, explore, refuse, run, share};
use farlink_runtime::{
    lock::{LockState, LockWord, OwnerId},
    page::{self, CHECKSUM, HEADER_WORDS, Identity, LOCK, SizeClass, StructureId},
    sync::Ordering,
};

/// Words of a page: the header and one of its own, which says at which version it was written.
const WORDS: usize = HEADER_WORDS + 1;
const CONTENT: usize = HEADER_WORDS;
/// The version of every page at first.
const FIRST: u64 = 7;

fn content_at(version: u64) -> u64 {
    version * 10
}

/// A memory server with `pages` pages.
fn pages(pages: usize) -> SharedMemory {
    let memory = share(pages * WORDS);
    for (index, words) in memory.words().chunks_exact(WORDS).enumerate() {
        let mut image = [0, 0, 0, 0, content_at(FIRST)];
        let identity = Identity { structure: StructureId(1), level: 0, class: SizeClass::SMALLEST, kind: 0 };
        page::seal(&mut image, memory.at(index * WORDS), identity, FIRST);
        for (word, value) in words.iter().zip(image) {
            word.store(value, Ordering::Relaxed);
        }
    }
    memory
}

/// A copy of a page, and whether it is proven whole.
struct Copy {
    words: Vec<u64>,
    lock: LockWord,
    whole: bool,
}

impl Copy {
    fn is_unlocked(&self) -> bool {
        self.lock.state() == LockState::Unlocked
    }

    /// The content, if the copy may be used.
    fn accepted(&self) -> Option<u64> {
        (self.is_unlocked() && self.whole).then(|| self.words[CONTENT])
    }
}

/// A way to read a page and prove the copy whole.
type Read = fn(&SharedMemory, &mut Peer) -> Copy;

fn by_checksum(memory: &SharedMemory, peer: &mut Peer) -> Copy {
    page_by_checksum(memory, peer, 0)
}

fn page_by_checksum(memory: &SharedMemory, peer: &mut Peer, index: usize) -> Copy {
    let words = peer.read(memory.at(index * WORDS), WORDS);
    Copy { lock: LockWord::from_word(words[LOCK]), whole: page::is_whole(&words), words }
}

fn by_lock_body_lock(memory: &SharedMemory, peer: &mut Peer) -> Copy {
    let lock = LockWord::from_word(peer.read(memory.at(LOCK), 1)[0]);
    if lock.state() != LockState::Unlocked {
        return Copy { lock, whole: false, words: Vec::new() };
    }
    let words = peer.read(memory.at(0), WORDS);
    let after = peer.read(memory.at(LOCK), 1)[0];
    Copy { lock, whole: after == lock.word(), words }
}

/// A change that is ready to be carried out: the page's new words, and the lock words on the way.
struct Change {
    index: usize,
    before: LockWord,
    ours: LockWord,
    image: Vec<u64>,
}

impl Change {
    /// The next version of a page.
    fn of(index: usize, copy: &Copy, owner: u64) -> Self {
        let ours = copy.lock.locked_by(OwnerId::new(owner).expect("a small number"));
        let mut image = copy.words.clone();
        image[CONTENT] = copy.words[CONTENT] + 10;
        image[CHECKSUM] = page::checksum(&image, copy.lock.next_version());
        image[LOCK] = LockWord::unlocked(copy.lock.next_version()).word();
        Self { index, before: copy.lock, ours, image }
    }

    fn at(&self, memory: &SharedMemory, word: usize) -> farlink_runtime::ptr::RemotePtr {
        memory.at(self.index * WORDS + word)
    }

    fn lock(&self, memory: &SharedMemory, peer: &mut Peer) -> bool {
        peer.compare_swap(self.at(memory, LOCK), self.before.word(), self.ours.word())
    }

    /// The changed words: from the checksum to the content, in one WRITE.
    fn write(&self, memory: &SharedMemory, peer: &mut Peer) {
        peer.write(self.at(memory, CHECKSUM), &self.image[CHECKSUM..]);
    }

    fn unlock(&self, memory: &SharedMemory, peer: &mut Peer) {
        peer.write_word(self.at(memory, LOCK), self.image[LOCK]);
    }
}

/// Carries a change of one page out; false if the lock was not to be had.
type CarryOut = fn(&Change, &SharedMemory, &mut Peer) -> bool;

fn carry_out(change: &Change, memory: &SharedMemory, peer: &mut Peer) -> bool {
    let had = change.lock(memory, peer);
    if had {
        change.write(memory, peer);
        change.unlock(memory, peer);
    }
    had
}

/// What a reader met.
#[derive(Clone, Default)]
struct Met {
    old: Seen,
    new: Seen,
    torn: Seen,
}

/// A writer that changes the page once, and a reader that tries twice.
fn writer_and_reader(read: Read, carry_out: CarryOut, met: &Met) {
    let memory = pages(1);
    let of_writer = Arc::clone(&memory);
    let writer = run(move || {
        let mut peer = Peer::new(&of_writer);
        let copy = by_checksum(&of_writer, &mut peer);
        carry_out(&Change::of(0, &copy, 1), &of_writer, &mut peer)
    });
    let reader = run(move || {
        let mut peer = Peer::new(&memory);
        [0, 1].map(|_| {
            let copy = read(&memory, &mut peer);
            if let Some(content) = copy.accepted() {
                assert_eq!(content, content_at(copy.lock.version()), "a torn copy was accepted");
            }
            (copy.accepted(), copy.is_unlocked())
        })
    });
    assert!(writer.join(), "nobody else locks");
    for outcome in reader.join() {
        match outcome {
            (Some(content), _) if content == content_at(FIRST) => met.old.mark(),
            (Some(_), _) => met.new.mark(),
            (None, true) => met.torn.mark(),
            (None, false) => {}
        }
    }
}

/// Two writers of one page. Afterwards the page must show as many changes as there were successes.
fn two_writers(read: Read, carry_out: CarryOut) -> [Option<bool>; 2] {
    let memory = pages(1);
    let writers = [1, 2].map(|owner| {
        let memory = Arc::clone(&memory);
        run(move || {
            let mut peer = Peer::new(&memory);
            let copy = read(&memory, &mut peer);
            copy.accepted().map(|_| carry_out(&Change::of(0, &copy, owner), &memory, &mut peer))
        })
    });
    let outcomes = writers.map(Running::join);
    let changes = outcomes.iter().filter(|&&outcome| outcome == Some(true)).count() as u64;
    assert_page(&memory, 0, FIRST + changes);
    outcomes
}

fn assert_page(memory: &SharedMemory, index: usize, version: u64) {
    let copy = page_by_checksum(memory, &mut Peer::new(memory), index);
    assert_eq!(copy.lock, LockWord::unlocked(version), "a change was lost");
    assert_eq!(copy.accepted(), Some(content_at(version)), "a change was lost");
}

/// Locks pages in the order given, all or none, as `one_sided/change.rs` does.
type LockAll = fn(&[Change], &SharedMemory, &mut Peer) -> bool;

fn lock_all(changes: &[Change], memory: &SharedMemory, peer: &mut Peer) -> bool {
    let had: Vec<bool> = changes.iter().map(|change| change.lock(memory, peer)).collect();
    if had.iter().all(|&had| had) {
        return true;
    }
    for (change, _) in changes.iter().zip(had).filter(|&(_, had)| had) {
        peer.write_word(change.at(memory, LOCK), change.before.word());
    }
    false
}

/// Two writers that want the same two pages, in opposite orders.
fn two_writers_of_two_pages(lock_all: LockAll) -> [bool; 2] {
    let memory = pages(2);
    let writers = [(1, [0, 1]), (2, [1, 0])].map(|(owner, order)| {
        let memory = Arc::clone(&memory);
        run(move || {
            let mut peer = Peer::new(&memory);
            let copies = order.map(|index| page_by_checksum(&memory, &mut peer, index));
            if copies.iter().any(|copy| copy.accepted().is_none()) {
                return false;
            }
            let changes = [0, 1].map(|nth| Change::of(order[nth], &copies[nth], owner));
            let had = lock_all(&changes, &memory, &mut peer);
            if had {
                changes.iter().for_each(|change| change.write(&memory, &mut peer));
                changes.iter().for_each(|change| change.unlock(&memory, &mut peer));
            }
            had
        })
    });
    let had = writers.map(Running::join);
    let changes = had.iter().filter(|&&had| had).count() as u64;
    assert_page(&memory, 0, FIRST + changes);
    assert_page(&memory, 1, FIRST + changes);
    had
}

/// A writer that changes the page twice, and a reader that takes `limit` refused copies in a row, under one unlocked lock
/// word, for corruption.
fn misfits(limit: usize) -> bool {
    let memory = pages(1);
    let of_writer = Arc::clone(&memory);
    let writer = run(move || {
        let mut peer = Peer::new(&of_writer);
        for _ in 0..2 {
            let copy = by_checksum(&of_writer, &mut peer);
            assert!(carry_out(&Change::of(0, &copy, 1), &of_writer, &mut peer), "nobody else locks");
        }
    });
    let reader = run(move || {
        let mut peer = Peer::new(&memory);
        let mut under = None;
        for misfits in 0..limit {
            let copy = by_checksum(&memory, &mut peer);
            let fits = !copy.is_unlocked() || copy.whole;
            if fits || *under.get_or_insert(copy.lock) != copy.lock {
                return misfits > 0;
            }
        }
        panic!("a sound page was taken for corrupt");
    });
    writer.join();
    reader.join()
}

fn explore_proof(name: &str, read: Read) {
    let met = Met::default();
    let marks = met.clone();
    explore(name, move || writer_and_reader(read, carry_out, &marks));
    met.old.require("the reader accepts the page as it was");
    met.new.require("the reader accepts the changed page");
    met.torn.require("the reader refuses a torn copy");
}

#[test]
fn the_checksum_proves_a_copy_whole() {
    explore_proof("remote lock, checksum", by_checksum);
}

#[test]
fn lock_body_lock_proves_a_copy_whole() {
    explore_proof("remote lock, lock-body-lock", by_lock_body_lock);
}

#[test]
fn no_change_of_two_writers_is_lost() {
    for (name, read) in [("checksum", by_checksum as Read), ("lock-body-lock", by_lock_body_lock)] {
        let (both, conflict) = (Seen::new(), Seen::new());
        let seen = (both.clone(), conflict.clone());
        explore(&format!("remote lock, two writers, {name}"), move || {
            let outcomes = two_writers(read, carry_out);
            assert!(outcomes.contains(&Some(true)), "nobody got through");
            match outcomes {
                [Some(true), Some(true)] => seen.0.mark(),
                [Some(false), _] | [_, Some(false)] => seen.1.mark(),
                _ => {}
            }
        });
        both.require("both writers get through");
        conflict.require("a compare-and-swap fails");
    }
}

#[test]
fn two_pages_are_locked_all_or_none() {
    let (both, none) = (Seen::new(), Seen::new());
    let seen = (both.clone(), none.clone());
    explore("remote lock, two writers of two pages", move || match two_writers_of_two_pages(lock_all) {
        [true, true] => seen.0.mark(),
        [false, false] => seen.1.mark(),
        _ => {}
    });
    both.require("both writers get through");
    none.require("each holds one page, and both give up");
}

#[test]
fn three_misfits_in_a_row_prove_corruption() {
    let some = Seen::new();
    let seen = some.clone();
    // As many as `OneSided` takes.
    explore("remote lock, misfits", move || {
        if misfits(3) {
            seen.mark();
        }
    });
    some.require("the reader meets a misfit");
}

#[test]
fn broken_two_misfits_prove_nothing() {
    refuse("remote lock, two misfits", "a sound page was taken for corrupt", || {
        misfits(2);
    });
}

fn refuse_read(name: &str, read: Read) {
    refuse(name, "a torn copy was accepted", move || writer_and_reader(read, carry_out, &Met::default()));
}

#[test]
fn broken_trust_in_a_single_read_is_caught() {
    refuse_read("remote lock, READ trusted", |memory, peer| Copy { whole: true, ..by_checksum(memory, peer) });
}

#[test]
fn broken_checksum_without_the_version_is_caught() {
    fn whole_but_unbound(memory: &SharedMemory, peer: &mut Peer) -> Copy {
        let copy = by_checksum(memory, peer);
        // The body fits the checksum of some version, if not of the one in the lock word.
        let of_some_version = |version| copy.words[CHECKSUM] == page::checksum(&copy.words, version);
        Copy { whole: (FIRST..FIRST + 3).any(of_some_version), ..copy }
    }
    refuse_read("remote lock, checksum not bound", whole_but_unbound);
    refuse("remote lock, checksum not bound, two writers", "a change was lost", || {
        two_writers(whole_but_unbound, carry_out);
    });
}

#[test]
fn broken_lock_body_lock_in_one_wait_is_caught() {
    refuse_read("remote lock, lock-body-lock without waiting", |memory, _| {
        let load = |word: usize| memory.words()[word].load(Ordering::Relaxed);
        let lock = load(LOCK);
        let words = (0..WORDS).map(load).collect();
        Copy { lock: LockWord::from_word(lock), whole: load(LOCK) == lock, words }
    });
}

fn refuse_write(name: &str, read: Read, carry_out: CarryOut) {
    refuse(name, "a torn copy was accepted", move || writer_and_reader(read, carry_out, &Met::default()));
}

#[test]
fn broken_unlock_before_the_data_is_caught() {
    refuse_write("remote lock, unlock first", by_lock_body_lock, |change, memory, peer| {
        let had = change.lock(memory, peer);
        change.unlock(memory, peer);
        change.write(memory, peer);
        had
    });
}

#[test]
fn broken_unlock_without_release_is_caught() {
    refuse_write("remote lock, unlock relaxed", by_lock_body_lock, |change, memory, peer| {
        let had = change.lock(memory, peer);
        change.write(memory, peer);
        memory.words()[LOCK].store(change.image[LOCK], Ordering::Relaxed);
        had
    });
}

#[test]
fn broken_write_without_a_fence_is_caught() {
    refuse_write("remote lock, write without fence", by_lock_body_lock, |change, memory, peer| {
        let had = change.lock(memory, peer);
        for word in CHECKSUM..WORDS {
            memory.words()[word].store(change.image[word], Ordering::Relaxed);
        }
        change.unlock(memory, peer);
        had
    });
}

#[test]
fn broken_lock_by_read_and_write_loses_a_change() {
    fn lock_in_two_steps(change: &Change, memory: &SharedMemory, peer: &mut Peer) -> bool {
        if peer.read(memory.at(LOCK), 1)[0] != change.before.word() {
            return false;
        }
        peer.write_word(memory.at(LOCK), change.ours.word());
        change.write(memory, peer);
        change.unlock(memory, peer);
        true
    }
    refuse("remote lock, locked in two steps", "a change was lost", || {
        two_writers(by_checksum, lock_in_two_steps);
    });
}

#[test]
fn broken_retreat_that_puts_back_every_lock_is_caught() {
    refuse("remote lock, puts back what it never had", "a change was lost", || {
        two_writers_of_two_pages(|changes, memory, peer| {
            let had: Vec<bool> = changes.iter().map(|change| change.lock(memory, peer)).collect();
            let all = had.iter().all(|&had| had);
            for change in changes.iter().filter(|_| !all) {
                peer.write_word(change.at(memory, LOCK), change.before.word());
            }
            all
        });
    });
}
