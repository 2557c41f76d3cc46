//! Exhaustive: a compute server dies in a change, at every request and with every order among memory servers, others repair
//! what it has left, and one of these may die of it, too.
//!
//! The code itself runs: [`make`] with its record, and [`finish_page`]. Only requests are a model's: each waits in a queue to its
//! memory server, is carried out when the search says so, and with the others of its queue in order. The search tries every choice
//! there is: whose request is next (a bounded number of switches between those who could go on), and who dies when. So it does over a
//! fabric that declares no order of WRITEs: there one request may fail while those behind it have their effects, and of those that are on
//! their way when the compute server dies any one may arrive alone, or be missing.
//!
//! Asserted: in the end all of the change is there, or nothing; no page is locked or torn; a page that it publishes or frees belongs
//! to the structure or to one holder; a change of somebody else is not lost.
//!
//! Broken variants, which the search must refuse: the record after the data; locks for one word in a change of several; rolling forward without all locks; fencing the dead
//! at one memory server of two, so that what it had sent to the other one still arrives; changing or freeing a page without its lock; rolling back
//! without the pages that were published; relying on an order of WRITEs where there is none.

mod by_hand;
mod shipped;
mod takeover;
mod world;

use std::{
    cell::{Cell, RefCell},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    rc::Rc,
};

use self::world::{
    Bounds, Break, CLASS, CONTENT, FIRST, FURTHER, Failure, LAST, Life, NEW, OLD, OTHER, OTHER_ONE, Peer, SERVERS,
    STRUCTURE, Search, VICTIM, World, owner, page_at, run,
};
use super::{
    OneSidedPages, PageCopy,
    change::{PreparedChange, make},
    protocol::ChangeBuffers,
};
use crate::{
    access::{Pages, PagesMut, Slot},
    buffer::Buffer,
    change::Role,
    error::Error,
    fabric::Liveness,
    free_pages::FreePage,
    layout::Records,
    lock::{LockState, LockWord},
    page::{self, IDENTITY, Identity, SELF},
    pages::NewPage,
    ptr::{RemotePtr, ServerId},
    redo::{Newest, Places, Recording, Recover as _, finish_page},
    remote::Remote as _,
};

/// What the victim does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Changes one word of a page.
    Word,
    /// Changes one page.
    One,
    /// Changes a page on each memory server.
    Two,
    /// Changes both and publishes a page.
    Split,
    /// Changes both and publishes a page on each memory server.
    SplitInThree,
    /// Changes one, frees the other.
    Merge,
}

/// Changes the page on each of these memory servers as it was at first; whether it had the locks.
async fn change(peer: &Peer, pages: &[usize], content: u64, act: Act) -> Result<bool, Failure> {
    // As they were read before anybody else came.
    let copies = pages.iter().map(|&server| peer.filled(&image(server, OLD, FIRST))).collect();
    change_from(peer, copies, content, act).await
}

/// A page's words with this content, unlocked at this version.
fn image(server: usize, content: u64, version: u64) -> Vec<u64> {
    image_at(page_at(server, 0), content, version)
}

fn image_at(page: RemotePtr, content: u64, version: u64) -> Vec<u64> {
    let mut words = vec![0; CLASS.words()];
    (words[CONTENT], words[FURTHER]) = (content, content);
    let identity = Identity { structure: STRUCTURE, level: 0, class: CLASS, kind: 0, is_words: false };
    page::seal(&mut words, page, identity, version);
    words
}

/// How many pages are published, each on another memory server.
fn new_pages(act: Act) -> usize {
    match act {
        Act::Split => 1,
        Act::SplitInThree => SERVERS,
        Act::Word | Act::One | Act::Two | Act::Merge => 0,
    }
}

/// Changes pages that were read so; whether it had the locks.
async fn change_from(peer: &Peer, copies: Vec<Buffer>, content: u64, act: Act) -> Result<bool, Failure> {
    let staged = prepare(peer, copies.into_iter().map(|copy| (copy, Role::AsRead)), content, act)?;
    let mut prepared = ChangeBuffers::new(peer, &staged)?;
    if let Some(recording) = prepared.recording.as_mut() {
        seal(peer, recording);
    }
    make(peer, &staged, prepared, &mut false).await
}

fn prepare(
    peer: &Peer,
    copies: impl Iterator<Item = (Buffer, Role)>,
    content: u64,
    act: Act,
) -> Result<PreparedChange, Failure> {
    let copies: Vec<_> = copies.map(|(copy, role)| (PageCopy(copy), role)).collect();
    let page = |server| FreePage { at: page_at(server, 1), class: CLASS, version: FIRST };
    let new: Vec<_> = (0..new_pages(act)).map(|server| NewPage::of_nobody(page(server))).collect();
    let added = (0..new.len()).map(Slot::new_page);
    let mut slots = Pages::new();
    let slots: Vec<(Slot, Role)> = copies.iter().map(|&(_, role)| (slots.add(()), role)).collect();
    let interrupted = |_| Box::new(Error::Malformed("nothing interrupts it"));
    let mut open = OneSidedPages::open(peer, STRUCTURE, copies, new).map_err(interrupted)?;
    for &(slot, _) in slots.iter().filter(|(_, role)| *role != Role::ReliedOn) {
        match act {
            Act::Word => open.set(slot, FURTHER, content),
            _ => open.set(slot, CONTENT, content),
        }
    }
    match act {
        Act::Split | Act::SplitInThree => added.for_each(|page| open.set(page, CONTENT, content)),
        Act::Merge => open.free(slots[1].0),
        Act::One => open.set(slots[0].0, FURTHER, content),
        Act::Word | Act::Two => {}
    }
    let mut staged = PreparedChange::of(open);
    staged.seal();
    if peer.breaks == Break::LocksForOneWord {
        staged.changed.iter_mut().for_each(|page| page.is_one_word = true);
    }
    Ok(staged)
}

/// Gives a record its places.
fn seal(peer: &Peer, recording: &mut Recording) {
    let parts = recording.parts();
    let place = |server: ServerId| {
        Places::take(std::slice::from_ref(&peer.rings[server.index()]), parts.iter().copied()).expect("it has room")
    };
    let places: Vec<Places> = recording.servers().map(place).collect();
    recording.seal(peer, peer.next_sequence(), places);
}

/// Meets each page, and has it repaired if a dead one has locked it.
async fn repair_all(peer: &Peer) -> Result<(), Failure> {
    repair_each(peer, (0..SERVERS).map(|server| page_at(server, 0))).await
}

async fn repair_each(peer: &Peer, pages: impl Iterator<Item = RemotePtr>) -> Result<(), Failure> {
    for page in pages {
        loop {
            let lock = LockWord::from_word(peer.load(page).await?);
            match lock.state() {
                LockState::LockedBy(owner) if peer.liveness(owner) == Liveness::Dead => {
                    finish_page(peer, page, CLASS, lock, owner).await?;
                }
                _ => break,
            }
        }
    }
    Ok(())
}

/// Switches between two that repair: `FARLINK_DEATHS_SWITCHES` (0). With 1 there are some 150,000 executions.
fn switches() -> usize {
    std::env::var("FARLINK_DEATHS_SWITCHES").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// How a model goes.
#[derive(Clone, Copy)]
struct Model {
    act: Act,
    victim: Break,
    repairer: Break,
    unfenced: Option<usize>,
    /// Another one changes the page of memory server 1 meanwhile.
    has_other: bool,
    /// Two repair at a time, of whom the first may die.
    repairers: usize,
    /// Switches between these.
    switches: usize,
    /// The fabric declares an order of WRITEs.
    has_order: bool,
}

const SOUND: Model = Model {
    act: Act::Two,
    victim: Break::Nothing,
    repairer: Break::Nothing,
    unfenced: None,
    has_other: false,
    repairers: 1,
    switches: 0,
    has_order: true,
};

/// What an execution came to.
#[derive(Debug, Clone, Copy)]
struct Came {
    /// Of two who repair, the first died of it.
    has_repairer_died: bool,
    /// Somebody who repairs has freed a page.
    has_freed: bool,
}

impl Model {
    fn play(self, search: &mut Search) -> Came {
        let Self { act, victim, repairer, unfenced, has_other, repairers, switches, has_order } = self;
        let world = Rc::new(RefCell::new(if has_order { World::new() } else { World::without_order() }));
        let pages: &'static [usize] = if matches!(act, Act::Word | Act::One) { &[0] } else { &[0, 1] };
        let peer = Peer::new(&world, VICTIM, victim);
        let mut lives: Vec<Life<Result<bool, Failure>>> =
            vec![(VICTIM, Box::pin(async move { change(&peer, pages, NEW, act).await }))];
        if has_other {
            let peer = Peer::new(&world, OTHER_ONE, Break::Nothing);
            lives.push((OTHER_ONE, Box::pin(async move { change(&peer, &[1], OTHER, Act::One).await })));
        }
        let bounds = Bounds { dies: Some(VICTIM), switches: 2, unfenced, stops: false };
        let outcomes = run(&world, search, &mut lives, bounds);
        let acknowledged = matches!(outcomes[0], Some(Ok(true)));
        let other_had = has_other && matches!(outcomes[1], Some(Ok(true)));
        let mut has_repairer_died = false;
        if outcomes[0].is_none() {
            let lives = (1..=repairers).map(|number| {
                let peer = Peer::new(&world, number, repairer);
                let life: Life<Result<(), Failure>> = (number, Box::pin(async move { repair_all(&peer).await }));
                life
            });
            let dies = (repairers > 1).then_some(1);
            let bounds = Bounds { dies, switches, unfenced, stops: false };
            let repaired = run(&world, search, &mut lives.collect(), bounds);
            has_repairer_died = repaired[0].is_none();
            for outcome in repaired.into_iter().flatten() {
                assert!(outcome.is_ok(), "not repaired: {outcome:?}");
            }
        }
        let last = Peer::new(&world, LAST, repairer);
        let mut lives: Vec<Life<Result<(), Failure>>> = vec![(LAST, Box::pin(async move { repair_all(&last).await }))];
        let outcome = run(&world, search, &mut lives, Bounds { dies: None, switches: 0, unfenced, stops: false });
        assert!(matches!(outcome[0], Some(Ok(()))), "not repaired: {outcome:?}");
        // What has not come yet.
        let mut world = world.borrow_mut();
        for server in 0..SERVERS {
            while !world.queues[VICTIM][server].is_empty() {
                world.step(VICTIM, server);
            }
        }
        judge(&mut world, act, acknowledged, other_had);
        Came { has_repairer_died, has_freed: !world.retired.is_empty() }
    }
}

/// How many executions there are.
fn explore<T>(play: impl Fn(&mut Search) -> T) -> u64 {
    let (mut search, mut executions) = (Search::default(), 0);
    loop {
        play(&mut search);
        executions += 1;
        if !search.advance() {
            return executions;
        }
    }
}

/// Some execution fails, and says so.
fn refuse<T>(play: impl Fn(&mut Search) -> T, why: &str) {
    let (mut search, mut executions) = (Search::default(), 0);
    loop {
        executions += 1;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| play(&mut search))) {
            let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            let message =
                if message.is_empty() { panic.downcast_ref::<&str>().unwrap_or(&"").to_string() } else { message };
            assert!(message.contains(why), "refused, but not because {why:?}: {message}");
            return println!("refused at execution {executions}: {message}");
        }
        assert!(search.advance(), "broken, and yet all {executions} executions passed");
    }
}

fn judge(world: &mut World, act: Act, acknowledged: bool, other_had: bool) {
    let pages = [page_at(0, 0), page_at(1, 0)];
    let locks = pages.map(|page| world.lock(page));
    let content = if act == Act::Word { FURTHER } else { CONTENT };
    let contents = [(pages[0], content), (pages[1], CONTENT)].map(|(page, word)| world.content(page, word));
    assert!(!other_had || contents[1] == OTHER, "another one's change was lost");
    for (page, lock) in pages.into_iter().zip(locks) {
        assert!(!matches!(lock.state(), LockState::LockedBy(_)), "a page stays locked: {lock:?}");
        let words = world.words_at(page, CLASS.words()).to_vec();
        assert!(lock.state() == LockState::Free || page::is_whole(&words), "a torn page: {contents:?}");
        assert_eq!((words[SELF], Identity::from_word(words[IDENTITY]).unwrap().structure), (page.raw(), STRUCTURE));
    }
    let versions = locks.map(LockWord::version);
    let is_freed = locks[1].state() == LockState::Free;
    let of_other = [OLD, if other_had { OTHER } else { OLD }];
    let is_done = match act {
        Act::Word | Act::One => contents == [NEW, of_other[1]] && versions[0] == FIRST + 1,
        Act::Two | Act::Split | Act::SplitInThree => contents == [NEW, NEW] && versions == [FIRST + 1; 2],
        Act::Merge => contents[0] == NEW && is_freed && versions == [FIRST + 1; 2],
    };
    // Who repairs a page of which one word was to be written makes a version of what it finds.
    let is_renewed = act == Act::Word && versions[0] == FIRST + 1;
    let is_undone =
        contents == of_other && !is_freed && versions == [FIRST + u64::from(is_renewed), FIRST + u64::from(other_had)];
    assert!(is_done || is_undone && !acknowledged, "half a change: {contents:?} at {versions:?}, {locks:?}");
    // The pages that it publishes: its, or free in one hand.
    for server in 0..SERVERS {
        let new = page_at(server, 1);
        let lock = world.lock(new);
        let in_hands = world.retired.iter().filter(|(_, at)| *at == new).count();
        if server >= new_pages(act) {
            assert_eq!(lock, LockWord::free(FIRST, Some(owner(VICTIM))));
        } else if is_done {
            assert_eq!((lock.state(), world.content(new, CONTENT)), (LockState::Unlocked, NEW));
        } else {
            assert_eq!(lock.state(), LockState::Free, "a page to which nothing leads");
            assert!(in_hands <= 1, "a page in two hands");
        }
    }
    let freed = world.retired.iter().filter(|(_, at)| *at == pages[1]).count();
    assert!(freed <= usize::from(is_freed), "a page in two hands");
}

#[test]
fn a_change_is_all_there_or_not_at_all() {
    for act in [Act::Word, Act::One, Act::Two, Act::Split, Act::Merge] {
        for has_other in [false, true] {
            let executions = explore(|search| Model { act, has_other, ..SOUND }.play(search));
            println!("{act:?}, another one: {has_other}: {executions} executions");
            assert!(executions > 4);
        }
    }
}

#[test]
fn so_it_is_where_writes_have_no_order() {
    for act in [Act::Word, Act::One, Act::Two, Act::Split, Act::Merge] {
        let executions = explore(|search| Model { act, has_order: false, ..SOUND }.play(search));
        println!("{act:?}: {executions} executions");
    }
}

fn expect_so_if_a_repairer_dies(act: Act, switches: usize) {
    let [died, freed] = [(); 2].map(|()| Cell::new(0));
    let executions = explore(|search| {
        let came = Model { act, repairers: 2, switches, ..SOUND }.play(search);
        died.set(died.get() + u64::from(came.has_repairer_died));
        freed.set(freed.get() + u64::from(came.has_freed));
    });
    let (died, freed) = (died.get(), freed.get());
    println!("{act:?}: {executions} executions, in {died} a repairer dies, in {freed} one frees a page");
    assert!(died > 0);
    assert_eq!(freed > 0, matches!(act, Act::SplitInThree | Act::Merge));
}

// The longest one begins first, on a core of its own.

#[test]
fn so_it_is_if_a_repairer_of_a_change_of_two_pages_dies() {
    expect_so_if_a_repairer_dies(Act::Two, switches());
}

#[test]
fn so_it_is_if_a_repairer_of_a_merge_dies() {
    expect_so_if_a_repairer_dies(Act::Merge, switches());
}

#[test]
fn so_it_is_if_a_repairer_of_a_page_dies() {
    for act in [Act::Word, Act::One] {
        expect_so_if_a_repairer_dies(act, switches());
    }
}

#[test]
fn so_it_is_if_a_repairer_of_a_split_dies() {
    expect_so_if_a_repairer_dies(Act::Split, switches());
}

/// Without all its new pages a split is undone, and those that are there are taken back.
#[test]
fn so_it_is_if_a_repairer_of_a_split_in_three_dies() {
    expect_so_if_a_repairer_dies(Act::SplitInThree, 0);
}

/// Where not all changes are recorded, the next one of a page may be without a record.
#[test]
fn the_record_of_an_attempt_that_failed_is_void_where_later_changes_may_have_none() {
    for (records, is_void) in [(Records::All, false), (Records::SeveralPages, true)] {
        let world = Rc::new(RefCell::new(World::new()));
        let alone = |number, records| {
            let mut peer = Peer::new(&world, number, Break::Nothing);
            peer.records = records;
            peer
        };
        let to_the_end = |number: usize, life: Pin<Box<dyn Future<Output = Result<bool, Failure>>>>| {
            let bounds = Bounds { dies: None, switches: 0, unfenced: None, stops: false };
            let outcomes = run(&world, &mut Search::default(), &mut vec![(number, life)], bounds);
            outcomes.into_iter().next().flatten().expect("it comes to its end").unwrap()
        };
        let other = alone(OTHER_ONE, records);
        assert!(to_the_end(OTHER_ONE, Box::pin(async move { change(&other, &[1], OTHER, Act::One).await })));
        let victim = alone(VICTIM, records);
        let is_done = async move { change(&victim, &[0, 1], NEW, Act::Two).await };
        assert!(!to_the_end(VICTIM, Box::pin(is_done)), "the other page has changed");
        let reader = alone(LAST, records);
        let is_there = async move {
            let newest = Newest::read(&reader, owner(VICTIM), ServerId::new(0).unwrap()).await?;
            Ok(newest.of(page_at(0, 0), FIRST).is_some())
        };
        assert_eq!(to_the_end(LAST, Box::pin(is_there)), !is_void, "{records:?}");
    }
}

#[test]
fn a_record_after_the_data_is_refused() {
    refuse(|search| Model { victim: Break::RecordsLate, ..SOUND }.play(search), "half a change");
}

#[test]
fn a_lock_for_one_word_in_a_change_of_several_is_refused() {
    refuse(|search| Model { victim: Break::LocksForOneWord, ..SOUND }.play(search), "half a change");
}

#[test]
fn to_roll_forward_without_all_locks_is_refused() {
    refuse(|search| Model { repairer: Break::TrustsRecords, ..SOUND }.play(search), "half a change");
}

#[test]
fn to_rely_on_an_order_that_there_is_not_is_refused() {
    for (act, why) in [(Act::One, "a torn page"), (Act::Two, "a torn page"), (Act::Split, "a torn page")] {
        let model = Model { act, victim: Break::TrustsOrder, has_order: false, ..SOUND };
        refuse(|search| model.play(search), why);
    }
}

/// What the dead one has sent to memory server 1 still arrives, while others repair.
#[test]
fn a_fence_at_one_of_two_memory_servers_is_refused() {
    refuse(|search| Model { unfenced: Some(1), ..SOUND }.play(search), "half a change");
}

#[test]
fn to_change_a_page_without_its_lock_is_refused() {
    let model = Model { victim: Break::TakesAnyLock, has_other: true, ..SOUND };
    refuse(|search| model.play(search), "another one's change was lost");
}

#[test]
fn to_free_a_page_without_its_lock_is_refused() {
    for act in [Act::SplitInThree, Act::Merge] {
        let model = Model { act, repairer: Break::TakesAnyLock, repairers: 2, switches: 1, ..SOUND };
        refuse(|search| model.play(search), "a page in two hands");
    }
}

#[test]
fn to_roll_back_without_the_new_pages_is_refused() {
    let model = Model { act: Act::SplitInThree, repairer: Break::LeavesNewPages, ..SOUND };
    refuse(|search| model.play(search), "a page to which nothing leads");
}
