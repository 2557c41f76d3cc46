//! A change that a memory server's thread makes in its own memory: the process dies behind each of its stores, its memory stays, and others
//! repair what it has left.

use std::{cell::RefCell, rc::Rc};

use super::{
    Act, image_at, prepare, repair_each, seal,
    world::{
        Bounds, Break, CLASS, CONTENT, FIRST, FURTHER, Failure, LAST, Life, NEW, OLD, Peer, STRUCTURE, VICTIM, WORDS,
        World, owner, page_at, run,
    },
};
use crate::{
    change::Role,
    fabric::{
        mem::{MemFabric, MemOptions},
        region::Region,
    },
    lock::{LockState, LockWord},
    one_sided::{
        here::{carry_out_now, dying::dies_after},
        protocol::record,
    },
    page::{self, IDENTITY, Identity, SELF},
    ptr::ServerId,
    sync::Ordering,
};

/// What there is to be changed, on one memory server. Its other page is free.
const PAGES: [usize; 2] = [0, 2];

/// What came of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Came {
    Undone,
    Done,
}

/// Of the change only so many stores arrive, and it is repaired. What came of it, and how many stores there were.
fn play(act: Act, roles: &[Role], arrive: u64) -> (Came, u64) {
    let world = Rc::new(RefCell::new(World::new()));
    let server = ServerId::new(0).unwrap();
    let fabric = MemFabric::in_process(vec![Region::anonymous(WORDS * 8).unwrap()], MemOptions::default());
    let here = fabric.raw_words(server);
    let [victim, last] = [VICTIM, LAST].map(|number| Peer::new(&world, number, Break::Nothing));
    here.iter().zip(&world.borrow().words[0]).for_each(|(to, &from)| to.store(from, Ordering::Relaxed));

    let copy = |(&number, &role): (&usize, &Role)| (victim.filled(&image_at(page_at(0, number), OLD, FIRST)), role);
    let staged = prepare(&victim, PAGES.iter().zip(roles).map(copy), NEW, act).unwrap();
    let mut recording = record(&victim, &staged.changed, staged.relied_on.len(), &staged.added).unwrap();
    let parts = recording.as_mut().map(|recording| {
        seal(&victim, recording);
        (recording.words(&victim), recording.marks())
    });
    let memory = fabric.memory(server).unwrap();
    let stores = dies_after(arrive, || {
        assert!(carry_out_now(&memory, owner(VICTIM), staged, &parts.unwrap_or_default()).is_ok());
    });

    world.borrow_mut().words[0].iter_mut().zip(here).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    world.borrow_mut().cut(VICTIM, None);
    let pages = PAGES.map(|number| page_at(0, number));
    let repaired = async move { repair_each(&last, pages.into_iter()).await };
    let mut lives: Vec<Life<Result<(), Failure>>> = vec![(LAST, Box::pin(repaired))];
    let bounds = Bounds { dies: None, switches: 0, unfenced: None, stops: false };
    let outcomes = run(&world, &mut Default::default(), &mut lives, bounds);
    assert!(matches!(outcomes[0], Some(Ok(()))), "not repaired: {outcomes:?}");
    (judge(&mut world.borrow_mut(), act, roles), stores)
}

fn judge(world: &mut World, act: Act, roles: &[Role]) -> Came {
    let pages = PAGES.map(|number| page_at(0, number));
    let locks = pages.map(|page| world.lock(page));
    for (page, lock) in pages.into_iter().zip(locks) {
        let words = world.words_at(page, CLASS.words());
        assert!(!matches!(lock.state(), LockState::LockedBy(_)), "a page stays locked: {lock:?}");
        assert!(lock.state() == LockState::Free || page::is_whole(words), "a torn page: {words:?}");
        assert_eq!((words[SELF], Identity::from_word(words[IDENTITY]).unwrap().structure), (page.raw(), STRUCTURE));
    }
    let content = if act == Act::Word { FURTHER } else { CONTENT };
    let found = pages.map(|page| world.content(page, content));
    let is_changed = [0, 1].map(|index| roles.get(index).is_some_and(|&role| role != Role::ReliedOn));
    let is_freed = locks.map(|lock| lock.state() == LockState::Free);
    let new = world.lock(page_at(0, 1));
    let (mut done, mut undone) = (true, true);
    for index in 0..PAGES.len() {
        let version = locks[index].version();
        // Who repairs a page of which one word was to be written makes a version of what it finds.
        let is_renewed = act == Act::Word && version == FIRST + 1;
        undone &= (found[index], is_freed[index]) == (OLD, false) && (version == FIRST || is_renewed);
        let frees = act == Act::Merge && index == 1;
        done &= match (is_changed[index], frees) {
            (false, _) => (found[index], version, is_freed[index]) == (OLD, FIRST, false),
            (true, true) => (version, is_freed[index]) == (FIRST + 1, true),
            (true, false) => (found[index], version, is_freed[index]) == (NEW, FIRST + 1, false),
        };
    }
    let is_published = new.state() == LockState::Unlocked && world.content(page_at(0, 1), CONTENT) == NEW;
    let in_hands = world.retired.iter().filter(|(_, at)| *at == page_at(0, 1)).count();
    if act == Act::Split {
        done &= is_published;
        undone &= new.state() == LockState::Free && in_hands <= 1;
    } else {
        assert_eq!(new, LockWord::free(FIRST, Some(owner(VICTIM))), "somebody has used a page that is nobody's");
    }
    assert!(done || undone, "half a change: {found:?} at {locks:?}, and {new:?}");
    if done { Came::Done } else { Came::Undone }
}

#[test]
fn a_change_in_ones_own_memory_is_all_there_or_not_at_all() {
    const CHANGED: Role = Role::AsRead;
    let scenes: [(Act, &[Role]); 6] = [
        (Act::Word, &[CHANGED]),
        (Act::One, &[CHANGED]),
        (Act::One, &[CHANGED, Role::ReliedOn]),
        (Act::Two, &[CHANGED, CHANGED]),
        (Act::Split, &[CHANGED, CHANGED]),
        (Act::Merge, &[CHANGED, CHANGED]),
    ];
    for (act, roles) in scenes {
        let (whole, stores) = play(act, roles, u64::MAX);
        assert_eq!(whole, Came::Done, "{act:?}: nobody dies");
        let came: Vec<_> = (0..=stores).map(|arrive| play(act, roles, arrive).0).collect();
        let undone = came.iter().take_while(|&&came| came == Came::Undone).count();
        println!("{act:?} of {roles:?}: {stores} stores, of which {undone} are too few");
        assert!(undone > 0, "{act:?}: done without a store");
        assert!(came[undone..].iter().all(|&came| came == Came::Done), "{act:?}: undone by a further store: {came:?}");
    }
}
