//! Takeover against a late write: who is taken for dead while it changes pages, or writes back what it owns, may be gone, or may only have
//! been stopped and go on; others take over meanwhile, and change the same pages. In the end theirs is there, whole.
//!
//! A cached owner's log is written and [replayed](replay) by the code itself, its pages in halves: who dies may leave half a page. Who
//! takes over may die of it, and is taken over in turn, its own log with that of the first, in any order.
//!
//! Also here: changes of one page without records. Whoever dies of one may leave a damaged page, and nobody takes that for whole.
//!
//! Broken variants that the search refuses: to come back over connections that are made anew; a fence at one memory server of two; pages
//! written before the log; to believe an older record that the page was not written.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use super::{
    Act, change, change_from, explore, image, refuse, repair_all,
    world::{
        Bounds, Break, CLASS, CONTENT, FIRST, Failure, Life, NEW, OLD, Peer, SERVERS, STRUCTURE, Search, VICTIM, World,
        owner, page_at, run,
    },
};
use crate::{
    error::Error,
    fabric::Error as FabricError,
    layout::Records,
    lock::{LockState, LockWord},
    page,
    ptr::{Link, RemotePtr, ServerId},
    redo::{OVERHEAD, PageRecord, Places, Recorded, Recover as _, replay, seal_batch, words_of},
    remote::{Payload, Remote as _},
};

/// What those who take over write.
const FIRST_HEIRS: u64 = 100;
const SECOND_HEIRS: u64 = 110;

/// Posts a WRITE now; it is posted again while that is of use.
fn write_to_end<'p>(
    peer: &'p Peer,
    at: RemotePtr,
    words: &'p [u64],
) -> impl Future<Output = Result<(), Failure>> + use<'p> {
    let mut posted = peer.write(at, Payload::Words(peer.filled(words)));
    async move {
        let mut attempt = 0;
        while let Err(error) = posted.await {
            peer.before_trying_again(error, &mut attempt).await?;
            posted = peer.write(at, Payload::Words(peer.filled(words)));
        }
        Ok(())
    }
}

/// An owner has changed both pages, and writes them back; `is_recorded` once its log has arrived.
async fn write_back(
    peer: &Peer,
    content: u64,
    versions: [u64; SERVERS],
    is_recorded: &Cell<bool>,
) -> Result<bool, Failure> {
    let images = [0, 1].map(|server| image(server, content, versions[server]));
    let records = [0, 1].map(|server| PageRecord {
        page: Link::to(page_at(server, 0), CLASS),
        version: versions[server],
        is_shared: false,
        what: Recorded::Image(images[server].as_slice().into()),
    });
    let part = vec![0; words_of(&records) + OVERHEAD];
    let places = Places::take(std::slice::from_ref(&peer.rings[0]), [part.len()].into_iter()).expect("it has room");
    let at = places.at().next().expect("one part");
    let mut parts = [(at, part)];
    seal_batch((STRUCTURE, 1), &records, peer.owner(), peer.next_sequence(), &mut parts);
    let [(_, part)] = parts;
    if peer.breaks != Break::WritesBackFirst {
        write_to_end(peer, at, &part).await?;
        is_recorded.set(true);
    }
    let half = CLASS.words() / 2;
    let halves = |server: usize| {
        let (at, (first, second)) = (page_at(server, 0), images[server].split_at(half));
        [write_to_end(peer, at, first), write_to_end(peer, at.word(half), second)]
    };
    let posted = [halves(0), halves(1)];
    for written in posted.into_iter().flatten() {
        written.await?;
    }
    Ok(true)
}

/// The content that both pages have, and their versions: no locks, nothing torn.
fn whole(world: &RefCell<World>) -> (u64, [u64; SERVERS]) {
    let mut world = world.borrow_mut();
    let found = [0, 1].map(|server| {
        let at = page_at(server, 0);
        let lock = world.lock(at);
        assert_eq!(lock.state(), LockState::Unlocked, "half of what the dead did: a page stays locked");
        let words = world.words_at(at, CLASS.words());
        assert!(page::is_whole(words), "half of what the dead did: a torn page");
        (words[CONTENT], lock.version())
    });
    assert_eq!(found[0].0, found[1].0, "half of what the dead did");
    (found[0].0, found.map(|(_, version)| version))
}

/// Replays the logs of dead owners, and writes as the next one. `kept`: what may be there of each then.
async fn take_over(
    peer: &Peer,
    dead: &[usize],
    content: u64,
    kept: impl Fn(u64) -> bool,
    is_recorded: &Cell<bool>,
) -> Result<bool, Failure> {
    repair_all(peer).await?;
    for &dead in dead {
        let servers = [0, 1].map(|server| ServerId::new(server).expect("a small number"));
        replay(peer, owner(dead), servers, |_, _| true).await?;
    }
    let (found, versions) = whole(&peer.world);
    assert!(kept(found), "what was recorded is lost: {found}");
    let next = versions.map(|version| LockWord::unlocked(version).next_version());
    write_back(peer, content, next, is_recorded).await
}

/// Meets what the dead has left, and changes the pages as they are then, one after the other.
async fn repair_and_change(peer: &Peer) -> Result<bool, Failure> {
    repair_all(peer).await?;
    for server in 0..SERVERS {
        let words = peer.world.borrow_mut().words_at(page_at(server, 0), CLASS.words()).to_vec();
        if LockWord::from_word(words[page::LOCK]).state() == LockState::Unlocked
            && !change_from(peer, vec![peer.filled(&words)], FIRST_HEIRS, Act::One).await?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How a takeover goes.
#[derive(Debug, Clone, Copy)]
struct Takeover {
    victim: Break,
    unfenced: Option<usize>,
    /// The victim goes on when it has been taken for dead.
    stops: bool,
    /// Who takes over first may die of it.
    heir_dies: bool,
}

const SOUND: Takeover = Takeover { victim: Break::Nothing, unfenced: None, stops: true, heir_dies: false };

type Answered = Result<bool, Failure>;

fn was_told(outcome: Option<Answered>) {
    assert!(
        matches!(&outcome, Some(Err(error)) if matches!(**error, Error::Fabric(FabricError::TakenForDead { .. }))),
        "who was taken for dead was not told: {outcome:?}"
    );
}

impl Takeover {
    /// The victim begins, and is taken for dead; its life then, none if it ended before.
    fn begin(self, world: &Rc<RefCell<World>>, search: &mut Search, life: Life<Answered>) -> Option<Life<Answered>> {
        let mut lives = vec![life];
        let Self { unfenced, stops, .. } = self;
        let outcomes = run(world, search, &mut lives, Bounds { dies: Some(VICTIM), switches: 0, unfenced, stops });
        if outcomes[0].is_some() { None } else { lives.pop() }
    }

    /// Others take over, while the victim goes on if it only stopped; whether the first of them is dead, too.
    fn go_on(
        self,
        world: &Rc<RefCell<World>>,
        search: &mut Search,
        heir: Life<Answered>,
        victim: Life<Answered>,
    ) -> bool {
        let Self { unfenced, stops, heir_dies, .. } = self;
        let mut lives = vec![heir];
        lives.extend(stops.then_some(victim));
        let dies = heir_dies.then_some(lives[0].0);
        // Who goes on is told at its first request, and makes no other; but for one that comes back.
        let switches = usize::from(stops) + 2 * usize::from(self.victim == Break::ComesBack);
        let mut outcomes = run(world, search, &mut lives, Bounds { dies, switches, unfenced, stops: false });
        let of_victim = if stops { outcomes.pop() } else { None };
        if let Some(outcome) = of_victim.filter(|_| self.victim == Break::Nothing) {
            was_told(outcome);
        }
        let outcome = outcomes.pop().expect("there was one");
        assert!(matches!(outcome, None | Some(Ok(true))), "half of what the dead did: {outcome:?}");
        outcome.is_none()
    }

    /// What was still on its way arrives.
    fn arrive(world: &RefCell<World>) {
        let mut world = world.borrow_mut();
        for server in 0..SERVERS {
            while !world.queues[VICTIM][server].is_empty() {
                world.step(VICTIM, server);
            }
        }
    }

    fn of_an_owner(self, search: &mut Search) {
        let world = Rc::new(RefCell::new(World::new()));
        let recorded: [Rc<Cell<bool>>; 3] = Default::default();
        let (peer, is_recorded) = (Peer::new(&world, VICTIM, self.victim), Rc::clone(&recorded[0]));
        let life: Life<Answered> =
            (VICTIM, Box::pin(async move { write_back(&peer, NEW, [FIRST + 1; SERVERS], &is_recorded).await }));
        let Some(victim) = self.begin(&world, search, life) else { return };
        let (peer, of_victim, is_recorded) =
            (Peer::new(&world, 1, Break::Nothing), Rc::clone(&recorded[0]), Rc::clone(&recorded[1]));
        let was_recorded = of_victim.get();
        let kept = move |found| found == NEW || found == OLD && !was_recorded;
        let heir: Life<Answered> =
            (1, Box::pin(async move { take_over(&peer, &[VICTIM], FIRST_HEIRS, kept, &is_recorded).await }));
        let mut last = FIRST_HEIRS;
        if self.go_on(&world, search, heir, victim) {
            last = SECOND_HEIRS;
            let dead = if search.choose(2) == 0 { [VICTIM, 1] } else { [1, VICTIM] };
            let (peer, is_recorded) = (Peer::new(&world, 2, Break::Nothing), Rc::clone(&recorded[2]));
            let was_recorded = recorded[1].get();
            let kept = move |found| found == FIRST_HEIRS || !was_recorded && kept(found);
            let heir: Life<Answered> =
                (2, Box::pin(async move { take_over(&peer, &dead, SECOND_HEIRS, kept, &is_recorded).await }));
            let bounds = Bounds { dies: None, switches: 0, unfenced: self.unfenced, stops: false };
            let outcome = run(&world, search, &mut vec![heir], bounds);
            assert!(matches!(outcome[0], Some(Ok(true))), "not taken over: {outcome:?}");
        }
        Self::arrive(&world);
        assert_eq!(whole(&world).0, last, "half of what the dead did has landed late");
    }

    fn of_a_change(self, act: Act, search: &mut Search) {
        let world = Rc::new(RefCell::new(World::new()));
        let pages: &'static [usize] = if act == Act::One { &[0] } else { &[0, 1] };
        let peer = Peer::new(&world, VICTIM, self.victim);
        let life: Life<Answered> = (VICTIM, Box::pin(async move { change(&peer, pages, NEW, act).await }));
        let Some(victim) = self.begin(&world, search, life) else { return };
        let peer = Peer::new(&world, 1, Break::Nothing);
        let heir: Life<Answered> = (1, Box::pin(async move { repair_and_change(&peer).await }));
        self.go_on(&world, search, heir, victim);
        Self::arrive(&world);
        let mut world = world.borrow_mut();
        for at in [page_at(0, 0), page_at(1, 0)] {
            let lock = world.lock(at);
            let words = world.words_at(at, CLASS.words());
            let is_heirs =
                lock.state() == LockState::Unlocked && page::is_whole(words) && words[CONTENT] == FIRST_HEIRS;
            let is_freed = lock.state() == LockState::Free && act == Act::Merge;
            assert!(is_heirs || is_freed, "half of what the dead did has landed late: {lock:?}, {words:?}");
        }
    }
}

#[test]
fn what_an_owner_does_after_it_was_taken_for_dead_does_not_land() {
    for (stops, heir_dies) in [(true, false), (false, true)] {
        let executions = explore(|search| Takeover { stops, heir_dies, ..SOUND }.of_an_owner(search));
        println!("goes on: {stops}, who takes over may die: {heir_dies}: {executions} executions");
        assert!(executions > 4);
    }
}

#[test]
fn what_a_change_does_after_it_was_taken_for_dead_does_not_land() {
    for act in [Act::One, Act::Two, Act::Split, Act::Merge] {
        let executions = explore(|search| SOUND.of_a_change(act, search));
        println!("{act:?}: {executions} executions");
        assert!(executions > 4);
    }
}

#[test]
fn an_owner_that_comes_back_is_refused() {
    refuse(|search| Takeover { victim: Break::ComesBack, ..SOUND }.of_an_owner(search), "half of what the dead did");
}

#[test]
fn a_change_that_comes_back_is_refused() {
    for act in [Act::One, Act::Two, Act::Split, Act::Merge] {
        refuse(
            |search| Takeover { victim: Break::ComesBack, ..SOUND }.of_a_change(act, search),
            "half of what the dead did",
        );
    }
}

/// What an owner has sent to memory server 1 arrives when others have taken over.
#[test]
fn an_owner_that_is_fenced_at_one_of_two_memory_servers_is_refused() {
    refuse(|search| Takeover { unfenced: Some(1), ..SOUND }.of_an_owner(search), "half of what the dead did");
}

#[test]
fn an_owner_that_writes_back_before_its_log_is_refused() {
    let first = Takeover { victim: Break::WritesBackFirst, stops: false, ..SOUND };
    refuse(|search| first.of_an_owner(search), "half of what the dead did");
}

/// A change of one page without a record, after one of two pages that did not have its locks, and has left its record.
fn without_a_record(search: &mut Search, repairer: Break) -> bool {
    let world = Rc::new(RefCell::new(World::new()));
    let mut peer = Peer::new(&world, VICTIM, Break::Nothing);
    peer.records = Records::SeveralPages;
    let mut lives: Vec<Life<Answered>> = vec![(
        VICTIM,
        Box::pin(async move {
            // Read before somebody else changed the second page.
            let copies = vec![peer.filled(&image(0, OLD, FIRST)), peer.filled(&image(1, OLD, FIRST - 1))];
            assert!(!change_from(&peer, copies, NEW, Act::Two).await?, "it had a lock that it could not have");
            change(&peer, &[0], NEW, Act::One).await
        }),
    )];
    let bounds = Bounds { dies: Some(VICTIM), switches: 0, unfenced: None, stops: false };
    let acknowledged = run(&world, search, &mut lives, bounds)[0].is_some();
    let peer = Peer::new(&world, 1, repairer);
    let mut lives: Vec<Life<Result<(), Failure>>> = vec![(1, Box::pin(async move { repair_all(&peer).await }))];
    let repaired = run(&world, search, &mut lives, Bounds { dies: None, ..bounds }).pop().flatten().expect("it lived");
    let mut world = world.borrow_mut();
    let [changed, other] = [0, 1].map(|server| {
        let at = page_at(server, 0);
        (world.lock(at), world.words_at(at, CLASS.words()).to_vec())
    });
    assert_eq!((other.0.state(), other.1[CONTENT]), (LockState::Unlocked, OLD));
    if let Err(error) = repaired {
        assert!(matches!(*error, Error::PageDamaged { page, .. } if page == page_at(0, 0)), "{error}");
        assert_eq!(changed.0.state(), LockState::LockedBy(owner(VICTIM)));
        let versions = [FIRST, FIRST + 1];
        assert!(versions.iter().all(|&version| !page::is_whole_at(&changed.1, version)), "it could have been repaired");
        return false;
    }
    assert!(changed.0.state() == LockState::Unlocked && page::is_whole(&changed.1), "a torn page");
    assert!(changed.1[CONTENT] == NEW || changed.1[CONTENT] == OLD && !acknowledged);
    true
}

#[test]
fn a_change_without_a_record_leaves_a_page_whole_or_damaged() {
    let whole = [(); 2].map(|()| Cell::new(0));
    let executions = explore(|search| {
        let counted = &whole[usize::from(without_a_record(search, Break::Nothing))];
        counted.set(counted.get() + 1);
    });
    println!("{executions} executions, {} leave a damaged page", whole[0].get());
    assert!(whole.iter().all(|count| count.get() > 0));
}

#[test]
fn to_believe_an_older_record_is_refused() {
    let play = |search: &mut Search| {
        without_a_record(search, Break::TrustsPages);
    };
    refuse(play, "a torn page");
}
