//! Takeover against an operation that the dead owner has shipped: a memory server carries it out, while somebody [fences](fence_off) the
//! owner off, and caches and writes its page without locks.
//!
//! Who takes over runs the code itself. The memory server counts its operation in and out as [`fencing`](crate::fencing) does with the
//! processor's instructions, whose order among threads a loom model tries; the change in between is the code itself.
//!
//! Broken variants that the search refuses: to look at the fence before the operation is counted; to take over while one is counted.

use std::{cell::RefCell, rc::Rc};

use super::{
    Act, change_from, explore, image, refuse,
    world::{
        Bounds, Break, CLASS, CONTENT, FENCE_AT, Failure, Life, NEW, OLD, Peer, Search, VICTIM, World, at, owner,
        page_at, run,
    },
};
use crate::{
    fencing::{fence_off, may_begin},
    lock::{LockState, LockWord},
    page,
    remote::{Payload, Remote as _},
    sync::AtomicU64,
};

const SERVER: usize = 1;
const HEIR: usize = 2;
const HEIRS: u64 = 100;
/// Looks of who takes over at what is under way.
const LOOKS_MAX: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    Nothing,
    /// The memory server looks at the fence before it counts.
    LooksFirst,
    /// Nobody waits.
    WaitsForNobody,
}

async fn word(peer: &Peer, index: usize, word: u64) -> Result<(), Failure> {
    peer.write(at(0, FENCE_AT + index), Payload::Word(word)).await
}

/// The memory server carries the operation out; whether it did something.
async fn carry_out(peer: &Peer, wrong: Wrong) -> Result<bool, Failure> {
    let member = u64::from(owner(SERVER).incarnation()) << 32;
    let is_fenced = async || Ok::<_, Failure>(peer.load(at(0, FENCE_AT)).await? >= owner(VICTIM).incarnation().into());
    let was_fenced = wrong == Wrong::LooksFirst && is_fenced().await?;
    word(peer, 1, member | 1).await?;
    let is_fenced = if wrong == Wrong::LooksFirst { was_fenced } else { is_fenced().await? };
    let mut is_done = false;
    if !is_fenced {
        let copy = peer.read(page_at(0, 0), CLASS.words()).await?;
        // Locked, or torn: another attempt would come.
        let is_whole = LockWord::from_word(copy[page::LOCK]).state() == LockState::Unlocked && page::is_whole(&copy);
        is_done = is_whole && change_from(peer, vec![copy], NEW, Act::One).await?;
    }
    word(peer, 1, member).await?;
    Ok(is_done)
}

/// Whether it has taken over, and written the page; not if the memory server is not done for long.
async fn take_over(peer: &Peer, wrong: Wrong) -> Result<bool, Failure> {
    let mut looks = 0;
    while fence_off(peer, at(0, FENCE_AT), owner(VICTIM), async || Ok(true)).await?.is_some() {
        looks += 1;
        if wrong == Wrong::WaitsForNobody {
            break;
        }
        if looks == LOOKS_MAX {
            return Ok(false);
        }
    }
    let lock = LockWord::from_word(peer.load(page_at(0, 0)).await?);
    let image = image(0, HEIRS, lock.next_version());
    // As an owner does: without a lock, and in halves.
    let (first, second) = image.split_at(CLASS.words() / 2);
    peer.write(page_at(0, 0), Payload::Words(peer.filled(first))).await?;
    peer.write(page_at(0, 0).word(first.len()), Payload::Words(peer.filled(second))).await?;
    Ok(true)
}

/// Whether it was taken over.
fn play(wrong: Wrong, search: &mut Search) -> bool {
    let world = Rc::new(RefCell::new(World::new()));
    world.borrow_mut().cut(VICTIM, None);
    let [server, heir] = [SERVER, HEIR].map(|number| Peer::new(&world, number, Break::Nothing));
    let mut lives: Vec<Life<Result<bool, Failure>>> = vec![
        (SERVER, Box::pin(async move { carry_out(&server, wrong).await })),
        (HEIR, Box::pin(async move { take_over(&heir, wrong).await })),
    ];
    let outcomes = run(&world, search, &mut lives, Bounds { dies: None, switches: 5, unfenced: None, stops: false });
    let [Some(Ok(is_done)), Some(Ok(is_taken_over))] = outcomes[..] else { panic!("somebody died: {outcomes:?}") };
    let mut world = world.borrow_mut();
    let words = world.words_at(page_at(0, 0), CLASS.words());
    let is_whole = LockWord::from_word(words[page::LOCK]).state() == LockState::Unlocked && page::is_whole(words);
    assert!(is_whole, "the shipped operation and who took over have torn the page");
    let expected = match (is_taken_over, is_done) {
        (true, _) => HEIRS,
        (false, true) => NEW,
        (false, false) => OLD,
    };
    assert_eq!(words[CONTENT], expected, "the shipped operation undid what was written later");
    is_taken_over
}

#[test]
fn a_shipped_operation_ends_before_others_take_over() {
    let taken_over = [RefCell::new(0), RefCell::new(0)];
    let executions = explore(|search| *taken_over[usize::from(play(Wrong::Nothing, search))].borrow_mut() += 1);
    println!("{executions} executions, {} take over", taken_over[1].borrow());
    assert!(taken_over.iter().all(|count| *count.borrow() > 0));
}

#[test]
fn to_look_before_it_is_counted_is_refused() {
    let play = |search: &mut Search| {
        play(Wrong::LooksFirst, search);
    };
    refuse(play, "the shipped operation");
}

#[test]
fn to_wait_for_no_shipped_operation_is_refused() {
    let play = |search: &mut Search| {
        play(Wrong::WaitsForNobody, search);
    };
    refuse(play, "the shipped operation");
}

/// What it has sent may lie in a queue for longer than the next ones have its slot.
#[test]
fn who_is_fenced_off_stays_so_when_later_ones_are() {
    const LATER: usize = 7;
    explore(|search| {
        let world = Rc::new(RefCell::new(World::new()));
        let peer = Peer::new(&world, HEIR, Break::Nothing);
        let fencing = async move {
            for holder in [VICTIM, LATER, VICTIM] {
                fence_off(&peer, at(0, FENCE_AT), owner(holder), async || Ok(true)).await?;
            }
            peer.load(at(0, FENCE_AT)).await
        };
        let mut lives: Vec<Life<Result<u64, Failure>>> = vec![(HEIR, Box::pin(fencing))];
        let outcomes =
            run(&world, search, &mut lives, Bounds { dies: None, switches: 0, unfenced: None, stops: false });
        let [Some(Ok(fence))] = outcomes[..] else { panic!("{outcomes:?}") };
        let words = [AtomicU64::new(fence)];
        let may = [VICTIM, LATER, LATER + 1].map(|holder| may_begin(&words, owner(holder)));
        assert_eq!(may, [false, false, true]);
    });
}
