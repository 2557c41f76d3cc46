//! The remote optimistic lock: writers that lock by compare-and-swap, readers that only READ.
//!
//! A writer compare-and-swaps the lock word from the one that its copy was read under, WRITEs the changed words and the
//! checksum that goes with the next version, and unlocks by writing that version. A reader proves its copy whole in one of
//! two ways: by the checksum, in one READ whose words may come from different moments; or by reading the lock word, the
//! page, and the lock word again, with a wait after each. A thread of the memory server does the same in its own memory, by the
//! processor's instructions. All of that is the runtime's own code ([`model::read`], [`model::change`], [`model::read_here`],
//! [`model::change_here`]), over real endpoints of the `mem` fabric.
//!
//! Asserted: an accepted copy is the page as it was at the version in its lock word; a lock that is had proves the copy
//! current, so no change is lost; several pages are locked all or none; and nobody takes a sound page for corrupt while
//! everybody keeps to the protocol.
//!
//! Broken variants put something between the protocol and the endpoint: a READ whose words pass for one moment's, or whose
//! checksum passes for another version's; a lock word that is read twice without waiting; an unlock before the data, or
//! without *release*; a WRITE without its fence; a compare-and-swap in two steps, or one that claims to have succeeded;
//! a look at the pages that a change relies on which passes its locks.

use std::{cell::RefCell, sync::Arc};

use farlink_loom_tests::{Breaks, Peer, Running, Seen, SharedMemory, Sound, explore, now, refuse, run, share};
use farlink_runtime::{
    access::{Interrupt, PageRef, Pages, PagesMut, Words},
    buffer::Buffer,
    change::Role,
    error::Error,
    lock::{LockState, LockWord},
    one_sided::{OneSidedPages, PageCopy, Proof, model},
    page::{self, CHECKSUM, HEADER_WORDS, Identity, LOCK, SizeClass, StructureId},
    ptr::RemotePtr,
    sync::Ordering,
};

const STRUCTURE: StructureId = StructureId(1);
const CLASS: SizeClass = SizeClass::SMALLEST;
const WORDS: usize = CLASS.words();
/// Says at which version the page was written.
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
        let mut image = [0; WORDS];
        image[CONTENT] = content_at(FIRST);
        let identity = Identity { structure: STRUCTURE, level: 0, class: CLASS, kind: 0, is_words: false };
        page::seal(&mut image, memory.at(index * WORDS), identity, FIRST);
        for (word, value) in words.iter().zip(image) {
            word.store(value, Ordering::Relaxed);
        }
    }
    memory
}

/// Reads a page; none if it is locked for too long to wait.
fn read<B: Breaks>(peer: &Peer, breaks: B, proof: Proof, index: usize) -> Buffer {
    let copy = now(model::read(&peer.remote(breaks), STRUCTURE, proof, peer.memory().at(index * WORDS), CLASS));
    copy.expect("a sound page was taken for something else").into_words()
}

/// Adds to the content of pages as they were read; false if one has changed since.
fn change<B: Breaks>(peer: &Peer, breaks: B, copies: Vec<PageCopy>) -> bool {
    change_as(peer, breaks, copies.into_iter().map(|copy| (copy, Role::AsRead)).collect())
}

/// [`change`], but of pages that are only relied on.
fn change_as<B: Breaks>(peer: &Peer, breaks: B, copies: Vec<(PageCopy, Role)>) -> bool {
    let add = add_to(&copies);
    now(model::change(&peer.remote(breaks), STRUCTURE, copies, None, add)).expect("mem refuses nothing")
}

/// [`change_as`] by a thread of the memory server.
fn change_here(peer: &Peer, copies: Vec<(PageCopy, Role)>) -> bool {
    let add = add_to(&copies);
    let changed = model::change_here(&peer.remote(Sound), STRUCTURE, &peer.memory().local(), copies, None, add);
    changed.expect("mem refuses nothing")
}

fn add_to(copies: &[(PageCopy, Role)]) -> impl FnOnce(&mut OneSidedPages) + use<> {
    let mut slots = Pages::new();
    let slots: Vec<_> = copies.iter().map(|&(_, role)| (slots.add(()), role)).collect();
    |pages| {
        for (slot, _) in slots.into_iter().filter(|&(_, role)| role != Role::ReliedOn) {
            let content = pages.page(slot).word(CONTENT);
            pages.set(slot, CONTENT, content + 10);
        }
    }
}

fn copy<B: Breaks>(peer: &Peer, breaks: B, proof: Proof, index: usize) -> Result<PageCopy, Interrupt> {
    now(model::read(&peer.remote(breaks), STRUCTURE, proof, peer.memory().at(index * WORDS), CLASS))
}

fn read_and_change<B: Breaks + Copy>(peer: &Peer, reads: B, proof: Proof, writes: impl Breaks) -> bool {
    let copy = copy(peer, reads, proof, 0).expect("a sound page was taken for something else");
    change(peer, writes, vec![copy])
}

/// [`copy`] by a thread of the memory server.
fn copy_here(peer: &Peer) -> PageCopy {
    let (peer, memory) = (peer.remote(Sound), peer.memory());
    let copy = now(model::read_here(&peer, STRUCTURE, &memory.local(), memory.at(0), CLASS));
    copy.expect("a sound page was taken for something else")
}

fn read_and_change_here(peer: &Peer) -> bool {
    change_here(peer, vec![(copy_here(peer), Role::AsRead)])
}

/// A writer that changes the page once, and a reader.
fn writer_and_reader<R, W>(reads: R, proof: Proof, writes: W) -> u64
where
    R: Breaks + Copy + 'static,
    W: Breaks + 'static,
{
    write_and_read(
        |peer| read_and_change(peer, Sound, Proof::Checksum, writes),
        move |peer| read(peer, reads, proof, 0),
    )
}

fn write_and_read(write: impl FnOnce(&Peer) -> bool + 'static, read: impl FnOnce(&Peer) -> Buffer + 'static) -> u64 {
    let memory = pages(1);
    let of_writer = Arc::clone(&memory);
    let writer = run(move || write(&Peer::new(&of_writer)));
    let reader = run(move || {
        let peer = Peer::new(&memory);
        let words = read(&peer);
        let lock = LockWord::from_word(words[LOCK]);
        assert_eq!(lock.state(), LockState::Unlocked);
        assert_eq!(words[CONTENT], content_at(lock.version()), "a torn copy was accepted");
        lock.version()
    });
    assert!(writer.join(), "nobody else locks");
    reader.join()
}

/// Two writers of one page. Afterwards the page must show as many changes as there were successes.
fn two_writers<R, W>(reads: R, proof: Proof, writes: W) -> [bool; 2]
where
    R: Breaks + Copy + 'static,
    W: Breaks + Copy + 'static,
{
    let write = move |peer: &Peer| read_and_change(peer, reads, proof, writes);
    two_write([write, write])
}

fn two_write<F: FnOnce(&Peer) -> bool + 'static>(writes: [F; 2]) -> [bool; 2] {
    let memory = pages(1);
    let mut owners = 1..;
    let writers = writes.map(|write| {
        let (memory, owner) = (Arc::clone(&memory), owners.next().expect("there are two"));
        run(move || write(&Peer::of(&memory, owner)))
    });
    let outcomes = writers.map(Running::join);
    let changes = outcomes.iter().filter(|&&outcome| outcome).count() as u64;
    assert_page(&memory, 0, FIRST + changes);
    outcomes
}

fn assert_page(memory: &SharedMemory, index: usize, version: u64) {
    let words: Vec<u64> =
        memory.words()[index * WORDS..][..WORDS].iter().map(|word| word.load(Ordering::Relaxed)).collect();
    assert_eq!(LockWord::from_word(words[LOCK]), LockWord::unlocked(version), "a change was lost");
    assert_eq!(words[CONTENT], content_at(version), "a change was lost");
    assert!(page::is_whole(&words), "a change was lost");
}

/// Two writers that want the same two pages, in opposite orders.
fn two_writers_of_two_pages<W: Breaks + Copy + 'static>(writes: W) -> [bool; 2] {
    let memory = pages(2);
    let writers = [(1, [0, 1]), (2, [1, 0])].map(|(owner, order)| {
        let memory = Arc::clone(&memory);
        run(move || {
            let peer = Peer::of(&memory, owner);
            let copies = order.map(|index| copy(&peer, Sound, Proof::Checksum, index));
            let [Ok(first), Ok(second)] = copies else { panic!("a sound page was taken for something else") };
            change(&peer, writes, vec![first, second])
        })
    });
    let had = writers.map(Running::join);
    let changes = had.iter().filter(|&&had| had).count() as u64;
    assert_page(&memory, 0, FIRST + changes);
    assert_page(&memory, 1, FIRST + changes);
    had
}

fn explore_proof<R: Breaks + Copy + Send + Sync + 'static>(name: &str, reads: R, proof: Proof) {
    explore_reads(name, move || writer_and_reader(reads, proof, Sound));
}

fn explore_reads(name: &str, version: impl Fn() -> u64 + Send + Sync + 'static) {
    let (old, new) = (Seen::new(), Seen::new());
    let seen = (old.clone(), new.clone());
    explore(name, move || match version() {
        FIRST => seen.0.mark(),
        _ => seen.1.mark(),
    });
    old.require("the reader accepts the page as it was");
    new.require("the reader accepts the changed page");
}

#[test]
fn the_checksum_proves_a_copy_whole() {
    explore_proof("remote lock, checksum", Sound, Proof::Checksum);
}

#[test]
fn lock_body_lock_proves_a_copy_whole() {
    // Against writers that lock it needs no checksum.
    explore_proof("remote lock, lock-body-lock", Trusting, Proof::LockBodyLock);
    explore_proof("remote lock, lock-body-lock with the checksum", Sound, Proof::LockBodyLock);
}

#[test]
fn a_page_is_whole_beside_a_thread_of_the_memory_server() {
    explore_reads("remote lock, written here, checksum", || {
        write_and_read(read_and_change_here, |peer| read(peer, Sound, Proof::Checksum, 0))
    });
    explore_reads("remote lock, written here, lock-body-lock", || {
        write_and_read(read_and_change_here, |peer| read(peer, Trusting, Proof::LockBodyLock, 0))
    });
    explore_reads("remote lock, read here", || {
        write_and_read(|peer| read_and_change(peer, Sound, Proof::Checksum, Sound), |peer| copy_here(peer).into_words())
    });
}

/// An owner that writes a whole page back, lock word included, without taking the lock, and a reader.
#[test]
fn what_an_owner_writes_back_without_a_lock_is_not_accepted_torn() {
    for (name, proof) in [("checksum", Proof::Checksum), ("lock-body-lock", Proof::LockBodyLock)] {
        let (old, new) = (Seen::new(), Seen::new());
        let seen = (old.clone(), new.clone());
        explore(&format!("remote lock, written back, {name}"), move || match owner_and_reader(Sound, proof) {
            Some(FIRST) => seen.0.mark(),
            Some(_) => seen.1.mark(),
            None => {}
        });
        old.require("the reader accepts the page as it was");
        new.require("the reader accepts what was written back");
    }
    refuse("remote lock, written back, checksum trusted", "a torn copy was accepted", || {
        owner_and_reader(Trusting, Proof::LockBodyLock);
    });
}

/// The version that the reader accepts. None if it has waited for the owner's WRITE for too long: models know no time.
fn owner_and_reader<R: Breaks + Copy + 'static>(reads: R, proof: Proof) -> Option<u64> {
    let memory = pages(1);
    let of_owner = Arc::clone(&memory);
    let owner = run(move || {
        let peer = Peer::new(&of_owner);
        let mut image = [0; WORDS];
        image[CONTENT] = content_at(FIRST + 1);
        let identity = Identity { structure: STRUCTURE, level: 0, class: CLASS, kind: 0, is_words: false };
        page::seal(&mut image, of_owner.at(0), identity, FIRST + 1);
        peer.write(of_owner.at(0), &image);
    });
    let reader = run(move || match copy(&Peer::new(&memory), reads, proof, 0) {
        Ok(copy) => {
            let words = copy.into_words();
            let version = LockWord::from_word(words[LOCK]).version();
            assert_eq!(words[CONTENT], content_at(version), "a torn copy was accepted");
            Some(version)
        }
        Err(Interrupt::Failed(error)) if matches!(*error, Error::PageCorrupt { .. }) => None,
        Err(other) => panic!("a sound page was taken for something else: {other:?}"),
    });
    owner.join();
    reader.join()
}

#[test]
fn no_change_of_two_writers_is_lost() {
    for (name, proof) in [("checksum", Proof::Checksum), ("lock-body-lock", Proof::LockBodyLock)] {
        let (both, conflict) = (Seen::new(), Seen::new());
        let seen = (both.clone(), conflict.clone());
        explore(&format!("remote lock, two writers, {name}"), move || match two_writers(Sound, proof, Sound) {
            [true, true] => seen.0.mark(),
            [false, false] => panic!("nobody got through"),
            _ => seen.1.mark(),
        });
        both.require("both writers get through");
        conflict.require("a compare-and-swap fails");
    }
}

#[test]
fn no_change_beside_one_by_a_thread_of_the_memory_server_is_lost() {
    let (both, conflict) = (Seen::new(), Seen::new());
    let seen = (both.clone(), conflict.clone());
    explore("remote lock, two writers, one of them here", move || {
        let writes: [fn(&Peer) -> bool; 2] =
            [|peer| read_and_change(peer, Sound, Proof::Checksum, Sound), read_and_change_here];
        match two_write(writes) {
            [true, true] => seen.0.mark(),
            [false, false] => panic!("nobody got through"),
            _ => seen.1.mark(),
        }
    });
    both.require("both writers get through");
    conflict.require("a compare-and-swap fails");
}

#[test]
fn two_pages_are_locked_all_or_none() {
    let (both, none) = (Seen::new(), Seen::new());
    let seen = (both.clone(), none.clone());
    explore("remote lock, two writers of two pages", move || match two_writers_of_two_pages(Sound) {
        [true, true] => seen.0.mark(),
        [false, false] => seen.1.mark(),
        _ => {}
    });
    both.require("both writers get through");
    none.require("each holds one page, and both give up");
}

/// Carries a change out.
type Changes = fn(&Peer, Vec<(PageCopy, Role)>) -> bool;

/// Two changes, each of which alters the page that the other relies on: no order of them allows both. Whether one got through.
fn relied_on(changes: [Changes; 2]) -> bool {
    let memory = pages(2);
    let [first, second] = changes;
    let writers = [(1, [0, 1], first), (2, [1, 0], second)].map(|(owner, order, change)| {
        let memory = Arc::clone(&memory);
        run(move || {
            let peer = Peer::of(&memory, owner);
            let copies = order.map(|index| copy(&peer, Sound, Proof::Checksum, index));
            // Locked by the other one already: it lost.
            let [Ok(altered), Ok(relied_on)] = copies else { return None };
            let is_first = [&altered, &relied_on]
                .iter()
                .all(|copy| copy.read(|words| words[CONTENT]).unwrap() == content_at(FIRST));
            let had = change(&peer, vec![(altered, Role::AsRead), (relied_on, Role::ReliedOn)]);
            Some(had && is_first)
        })
    });
    match writers.map(Running::join) {
        [Some(true), Some(true)] => panic!("both changed a page that the other had relied on"),
        [Some(true), _] | [_, Some(true)] => true,
        _ => false,
    }
}

fn change_remotely(peer: &Peer, copies: Vec<(PageCopy, Role)>) -> bool {
    change_as(peer, Sound, copies)
}

#[test]
fn of_two_changes_that_rely_on_each_other_one_is_refused() {
    let both: [(&str, [Changes; 2]); 2] = [
        ("remote lock, relied on", [change_remotely, change_remotely]),
        ("remote lock, relied on, one of them here", [change_remotely, change_here]),
    ];
    for (name, changes) in both {
        let (one, none) = (Seen::new(), Seen::new());
        let seen = (one.clone(), none.clone());
        explore(name, move || match relied_on(changes) {
            true => seen.0.mark(),
            false => seen.1.mark(),
        });
        one.require("one of them gets through");
        none.require("each sees the other's lock");
    }
}

/// READs of lock words that pass the compare-and-swaps before them, as they might without a fence.
#[derive(Default)]
struct ReadsFirst(RefCell<Vec<Buffer>>);

impl Breaks for ReadsFirst {
    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        let other = peer.memory().at(WORDS - peer.memory().index(at));
        self.0.borrow_mut().push(peer.read_buffer(other, 1));
        peer.swap(at, expected, new)
    }

    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        self.0.borrow_mut().pop().unwrap_or_else(|| peer.read_buffer(at, words))
    }
}

#[test]
fn broken_looks_at_what_is_relied_on_pass_the_locks() {
    let changes: Changes = |peer, copies| change_as(peer, ReadsFirst::default(), copies);
    refuse("remote lock, relied on, read before the locks", "both changed a page", move || {
        relied_on([changes, changes]);
    });
}

/// Counts the copies that a reader refuses.
struct CountsMisfits(Seen);

impl Breaks for &CountsMisfits {
    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        let copy = peer.read_buffer(at, words);
        let lock = LockWord::from_word(copy[LOCK]);
        if words == WORDS && lock.state() == LockState::Unlocked && !page::is_whole(&copy) {
            self.0.mark();
        }
        copy
    }
}

/// A writer that changes the page twice, and a reader.
#[test]
fn a_page_that_is_being_written_is_not_corrupt() {
    let some = Seen::new();
    let seen = some.clone();
    explore("remote lock, misfits", move || {
        let memory = pages(1);
        let of_writer = Arc::clone(&memory);
        let writer = run(move || {
            let peer = Peer::new(&of_writer);
            for _ in 0..2 {
                assert!(read_and_change(&peer, Sound, Proof::Checksum, Sound), "nobody else locks");
            }
        });
        let misfits = CountsMisfits(seen.clone());
        let reader = run(move || {
            let peer = Peer::new(&memory);
            // Fails if it takes the page for corrupt.
            read(&peer, &misfits, Proof::Checksum, 0);
        });
        writer.join();
        reader.join();
    });
    some.require("the reader meets a misfit");
}

/// Whatever a READ brings passes for the page of one moment.
#[derive(Clone, Copy)]
struct Trusting;

impl Breaks for Trusting {
    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        let mut copy = peer.read_buffer(at, words);
        if words == WORDS {
            copy[CHECKSUM] = page::checksum(&copy, LockWord::from_word(copy[LOCK]).version());
        }
        copy
    }
}

/// A body that fits the checksum of some version passes for one that fits that of the lock word.
#[derive(Clone, Copy)]
struct Unbound;

impl Breaks for Unbound {
    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        let mut copy = peer.read_buffer(at, words);
        let of_some_version = |version| copy[CHECKSUM] == page::checksum(&copy, version);
        if words == WORDS && (FIRST..FIRST + 3).any(of_some_version) {
            copy[CHECKSUM] = page::checksum(&copy, LockWord::from_word(copy[LOCK]).version());
        }
        copy
    }
}

/// READs that do not wait for one another; what they bring passes for the page of one moment.
#[derive(Clone, Copy)]
struct Overlapping;

impl Breaks for Overlapping {
    fn read(&self, peer: &Peer, at: RemotePtr, words: usize) -> Buffer {
        let mut copy = peer.take_buffer(words);
        for (to, word) in copy.iter_mut().zip(&peer.memory().words()[peer.memory().index(at)..]) {
            *to = word.load(Ordering::Relaxed);
        }
        if words == WORDS {
            copy[CHECKSUM] = page::checksum(&copy, LockWord::from_word(copy[LOCK]).version());
        }
        copy
    }
}

#[test]
fn broken_reads_are_caught() {
    let torn = "a torn copy was accepted";
    refuse("remote lock, READ trusted", torn, || {
        writer_and_reader(Trusting, Proof::Checksum, Sound);
    });
    refuse("remote lock, checksum not bound", torn, || {
        writer_and_reader(Unbound, Proof::Checksum, Sound);
    });
    refuse("remote lock, lock-body-lock without waiting", torn, || {
        writer_and_reader(Overlapping, Proof::LockBodyLock, Sound);
    });
    refuse("remote lock, checksum not bound, two writers", "a change was lost", || {
        two_writers(Unbound, Proof::Checksum, Sound);
    });
}

/// Unlocks first: the data comes after it.
#[derive(Default)]
struct UnlocksFirst(RefCell<Vec<(RemotePtr, Vec<u64>)>>);

impl Breaks for UnlocksFirst {
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        if at != peer.memory().at(LOCK) {
            return self.0.borrow_mut().push((at, words.to_vec()));
        }
        peer.write(at, words);
        self.0.borrow_mut().drain(..).for_each(|(at, words)| peer.write(at, &words));
    }
}

/// Writes the lock word, or all but that, past the endpoint.
#[derive(Clone, Copy)]
struct Relaxed {
    the_lock: bool,
}

impl Breaks for Relaxed {
    fn write(&self, peer: &Peer, at: RemotePtr, words: &[u64]) {
        match (at == peer.memory().at(LOCK)) == self.the_lock {
            true => peer.write_relaxed(at, words),
            false => peer.write(at, words),
        }
    }
}

#[test]
fn broken_writes_are_caught() {
    let torn = "a torn copy was accepted";
    refuse("remote lock, written here and trusted", torn, || {
        write_and_read(read_and_change_here, |peer| read(peer, Trusting, Proof::Checksum, 0));
    });
    refuse("remote lock, unlock first", torn, || {
        writer_and_reader(Trusting, Proof::LockBodyLock, UnlocksFirst::default());
    });
    refuse("remote lock, unlock relaxed", torn, || {
        writer_and_reader(Trusting, Proof::LockBodyLock, Relaxed { the_lock: true });
    });
    refuse("remote lock, write without fence", torn, || {
        writer_and_reader(Trusting, Proof::LockBodyLock, Relaxed { the_lock: false });
    });
}

/// Compare-and-swap in two steps.
#[derive(Clone, Copy)]
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

/// Claims to have succeeded.
#[derive(Clone, Copy)]
struct Claims;

impl Breaks for Claims {
    fn compare_swap(&self, peer: &Peer, at: RemotePtr, expected: u64, new: u64) -> u64 {
        peer.swap(at, expected, new);
        expected
    }
}

#[test]
fn broken_locks_lose_changes() {
    let lost = "a change was lost";
    refuse("remote lock, locked in two steps", lost, || {
        two_writers(Sound, Proof::Checksum, TwoSteps);
    });
    refuse("remote lock, two pages, claims", lost, || {
        two_writers_of_two_pages(Claims);
    });
}
