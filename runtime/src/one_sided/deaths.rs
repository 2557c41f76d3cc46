//! Exhaustive: a compute server dies in a change, at every request and with every order among memory servers, others repair
//! what it has left, and one of these may die of it, too.
//!
//! The code itself runs: [`make`] with its record, and [`finish_page`]. Only requests are a model's: each waits in a queue to its
//! memory server, is carried out when the search says so, and with the others of its queue in order. The search tries every choice
//! there is: whose request is next (a bounded number of switches between those who could go on), and who dies when.
//!
//! Asserted: in the end all of the change is there, or nothing; no page is locked or torn; a page that it publishes or frees belongs
//! to the structure or to one holder; a change of somebody else is not lost.
//!
//! Broken variants, which the search must refuse: the record after the data; rolling forward without all locks; fencing the dead
//! at one memory server of two, so that what it had sent to the other one still arrives.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    rc::Rc,
    sync::OnceLock,
    task::{Context, Poll, Waker},
};

use super::{
    OneSidedPages, PageCopy,
    change::{PreparedChange, make},
    protocol::ChangeBuffers,
};
use crate::{
    access::{Pages, PagesMut, Slot},
    buffer::{Buffer, Buffers, LocalKey},
    change::Role,
    clock::Clock,
    error::Error,
    fabric::{Capabilities, Fabric, Liveness, mem::MemOptions},
    free_pages::FreePage,
    lock::{LockState, LockWord, OwnerId},
    page::{self, HEADER_WORDS, IDENTITY, Identity, SELF, SizeClass, StructureId},
    pages::NewPage,
    ptr::{Link, RemotePtr, ServerId},
    redo::{Places, RING_CLASS, RING_FIRST, RING_OWNER, RINGS, Recover, RingSpace, Room, finish_page},
    remote::{Payload, Remote},
};

type Failure = Box<Error>;

const STRUCTURE: StructureId = StructureId(1);
const CLASS: SizeClass = SizeClass::SMALLEST;
const CONTENT: usize = HEADER_WORDS;
/// The version of every page at first.
const FIRST: u64 = 7;
/// What is in a page: at first, after the victim's change, after another one's.
const OLD: u64 = 70;
const NEW: u64 = 80;
const OTHER: u64 = 90;

const SERVERS: usize = 2;
/// The first word of a memory server is no address. Pages follow, then a table of rings, then rings.
const PAGES_AT: usize = 8;
const PAGES: usize = 2;
const HEADS_AT: usize = PAGES_AT + PAGES * CLASS.words();
const PEERS: usize = 5;
const RINGS_AT: usize = HEADS_AT + PEERS * 8;
const WORDS: usize = RINGS_AT + PEERS * RING_CLASS.words();

/// Peers: who dies, those that repair, another one, and who comes last.
const VICTIM: usize = 0;
const OTHER_ONE: usize = 3;
const LAST: usize = 4;

fn at(server: usize, word: usize) -> RemotePtr {
    RemotePtr::new(ServerId::new(server as u16).unwrap(), word as u64 * 8).unwrap()
}

/// Page `number` of a memory server.
fn page_at(server: usize, number: usize) -> RemotePtr {
    at(server, PAGES_AT + number * CLASS.words())
}

fn ring_at(server: usize, peer: usize) -> RemotePtr {
    at(server, RINGS_AT + peer * RING_CLASS.words())
}

fn owner(peer: usize) -> OwnerId {
    OwnerId::new(peer as u64 + 1).unwrap()
}

/// The choices of one execution: those of the last one up to a point, then the first there is.
#[derive(Default)]
struct Search {
    /// What was chosen, of how many.
    choices: Vec<(usize, usize)>,
    next: usize,
}

impl Search {
    fn choose(&mut self, of: usize) -> usize {
        if self.next == self.choices.len() {
            self.choices.push((0, of));
        }
        let (chosen, known) = self.choices[self.next];
        assert_eq!(known, of, "an execution is the same every time");
        self.next += 1;
        chosen
    }

    /// Goes on to the next execution, if there is one.
    fn advance(&mut self) -> bool {
        self.next = 0;
        while let Some((chosen, of)) = self.choices.pop() {
            if chosen + 1 < of {
                self.choices.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

enum Verb {
    Read(usize),
    Write(Vec<u64>),
    Swap(u64, u64),
}

type Answer = Rc<RefCell<Option<Vec<u64>>>>;

struct Request {
    at: RemotePtr,
    verb: Verb,
    answer: Answer,
}

/// Remote memory, and what is on its way there.
struct World {
    words: [Vec<u64>; SERVERS],
    queues: [[VecDeque<Request>; SERVERS]; PEERS],
    is_dead: [bool; PEERS],
    /// Free pages, as their holders know them.
    retired: Vec<(usize, RemotePtr)>,
}

impl World {
    fn new() -> Self {
        static FIRST_WORDS: OnceLock<[Vec<u64>; SERVERS]> = OnceLock::new();
        let words = FIRST_WORDS.get_or_init(Self::first_words).clone();
        Self { words, queues: Default::default(), is_dead: [false; PEERS], retired: Vec::new() }
    }

    fn first_words() -> [Vec<u64>; SERVERS] {
        let mut words = [vec![0; WORDS], vec![0; WORDS]];
        for (server, words) in words.iter_mut().enumerate() {
            let mut seal = |at: RemotePtr, structure, class: SizeClass, content: &[(usize, u64)]| {
                let first = at.offset() as usize / 8;
                let image = &mut words[first..first + class.words()];
                content.iter().for_each(|&(index, word)| image[index] = word);
                page::seal(image, at, Identity { structure, level: 0, class, kind: 0, is_words: false }, FIRST);
            };
            seal(page_at(server, 0), STRUCTURE, CLASS, &[(CONTENT, OLD)]);
            for peer in 0..PEERS {
                let who = u64::from(owner(peer).incarnation());
                seal(ring_at(server, peer), RINGS, RING_CLASS, &[(RING_OWNER, who)]);
            }
            for peer in 0..PEERS {
                words[HEADS_AT + peer * 8] = Link::to(ring_at(server, peer), RING_CLASS).word();
            }
            // Page 1 is free.
            words[page_at(server, 1).offset() as usize / 8] = LockWord::free(FIRST, Some(owner(VICTIM))).word();
        }
        words
    }

    fn words_at(&mut self, at: RemotePtr, count: usize) -> &mut [u64] {
        let first = at.offset() as usize / 8;
        &mut self.words[at.server().index()][first..first + count]
    }

    fn lock(&mut self, page: RemotePtr) -> LockWord {
        LockWord::from_word(self.words_at(page, 1)[0])
    }

    fn content(&mut self, page: RemotePtr) -> u64 {
        self.words_at(page, CLASS.words())[CONTENT]
    }

    /// Carries out the next request of a queue.
    fn step(&mut self, peer: usize, server: usize) {
        let Request { at, verb, answer } = self.queues[peer][server].pop_front().expect("it was chosen for that");
        let done = match verb {
            Verb::Read(count) => self.words_at(at, count).to_vec(),
            Verb::Write(words) => {
                self.words_at(at, words.len()).copy_from_slice(&words);
                Vec::new()
            }
            Verb::Swap(expected, new) => {
                let word = &mut self.words_at(at, 1)[0];
                let before = *word;
                if before == expected {
                    *word = new;
                }
                vec![before]
            }
        };
        answer.replace(Some(done));
    }
}

/// What a peer does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Break {
    Nothing,
    /// Its records are written once all else is.
    RecordsLate,
    /// It takes each record for one of a change that had all its locks.
    TrustsRecords,
}

/// A compute server.
struct Peer {
    world: Rc<RefCell<World>>,
    number: usize,
    breaks: Break,
    late: RefCell<Vec<Request>>,
    buffers: Buffers,
    rings: [RingSpace; SERVERS],
    sequence: Cell<u64>,
}

impl Peer {
    fn new(world: &Rc<RefCell<World>>, number: usize, breaks: Break) -> Self {
        Self {
            world: Rc::clone(world),
            number,
            breaks,
            late: RefCell::default(),
            buffers: Buffers::default(),
            rings: [0, 1].map(|server| RingSpace::new(ring_at(server, number))),
            sequence: Cell::new(1),
        }
    }

    fn post(&self, at: RemotePtr, verb: Verb) -> impl Future<Output = Vec<u64>> + use<> {
        let answer = Answer::default();
        let request = Request { at, verb, answer: Rc::clone(&answer) };
        let is_record = at.offset() as usize / 8 >= RINGS_AT && matches!(request.verb, Verb::Write(_));
        if self.breaks == Break::RecordsLate && is_record {
            answer.replace(Some(Vec::new()));
            self.late.borrow_mut().push(request);
        } else {
            let ends = matches!(&request.verb, Verb::Write(words) if words.len() == 1 && at == page_at(1, 0));
            self.queue(request);
            if ends {
                self.late.take().into_iter().for_each(|request| self.queue(request));
            }
        }
        std::future::poll_fn(move |_| answer.borrow_mut().take().map_or(Poll::Pending, Poll::Ready))
    }

    fn queue(&self, request: Request) {
        self.world.borrow_mut().queues[self.number][request.at.server().index()].push_back(request);
    }

    fn filled(&self, words: &[u64]) -> Buffer {
        let mut buffer = self.buffer(words.len()).expect("the heap has room");
        buffer.copy_from_slice(words);
        buffer
    }
}

impl Remote for Peer {
    fn owner(&self) -> OwnerId {
        owner(self.number)
    }

    fn capabilities(&self) -> Capabilities {
        // Those of memory: WRITEs in order, and an unlock is one.
        static MEMORY: OnceLock<Capabilities> = OnceLock::new();
        *MEMORY.get_or_init(|| {
            let memory = crate::server::in_process(1, 1 << 20, MemOptions::default()).expect("it is small");
            memory.endpoint(0, Clock::monotonic()).expect("there is one").capabilities()
        })
    }

    fn buffer(&self, words: usize) -> Result<Buffer, Error> {
        Ok(self.buffers.take(words, |_, _| Ok(LocalKey(0)))?)
    }

    fn read(&self, at: RemotePtr, words: usize) -> impl Future<Output = Result<Buffer, Failure>> {
        let read = self.post(at, Verb::Read(words));
        async move {
            let mut words = self.filled(&read.await);
            if self.breaks == Break::TrustsRecords && words.len() == RING_CLASS.words() {
                mark_all(&mut words);
            }
            Ok(words)
        }
    }

    fn write(&self, at: RemotePtr, payload: Payload) -> impl Future<Output = Result<(), Failure>> {
        let words = match payload {
            Payload::Word(word) => vec![word],
            Payload::Words(words) => words.to_vec(),
        };
        let written = self.post(at, Verb::Write(words));
        async move {
            written.await;
            Ok(())
        }
    }

    fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> impl Future<Output = Result<u64, Failure>> {
        let swapped = self.post(at, Verb::Swap(expected, new));
        async move { Ok(swapped.await[0]) }
    }

    fn load(&self, at: RemotePtr) -> impl Future<Output = Result<u64, Failure>> {
        let read = self.post(at, Verb::Read(1));
        async move { Ok(read.await[0]) }
    }

    async fn before_trying_again(&self, error: Failure, _: &mut u32) -> Result<(), Failure> {
        Err(error)
    }

    async fn back_off(&self, _: u32) {}

    fn liveness(&self, owner: OwnerId) -> Liveness {
        match self.world.borrow().is_dead[owner.incarnation() as usize - 1] {
            true => Liveness::Dead,
            false => Liveness::Alive,
        }
    }
}

/// Sets the marks of all records in a ring.
fn mark_all(ring: &mut [u64]) {
    let mut first = RING_FIRST;
    while ring[first] != 0 {
        let length = ring[first] as u32 as usize;
        ring[first + length - 1] = ring[first + 1];
        first += length;
    }
}

impl Recover for Peer {
    async fn rings_of(&self, owner: OwnerId, server: ServerId) -> Result<Option<RemotePtr>, Failure> {
        Ok(Some(at(server.index(), HEADS_AT + (owner.incarnation() as usize - 1) * 8)))
    }

    async fn reserve(&self, page: RemotePtr, parts: &[usize]) -> Result<Room, Failure> {
        let rings = std::slice::from_ref(&self.rings[page.server().index()]);
        let places = Places::take(rings, parts.iter().copied()).expect("a ring has room for a few records");
        Ok(Room { places, _slot: None })
    }

    fn next_sequence(&self) -> u64 {
        self.sequence.replace(self.sequence.get() + 1)
    }

    fn holds_page(&self, _: RemotePtr, _: SizeClass) -> bool {
        true
    }

    fn retire(&self, at: RemotePtr, _: SizeClass, _: u64) {
        self.world.borrow_mut().retired.push((self.number, at));
    }

    async fn repair(&self, page: RemotePtr, class: SizeClass, lock: LockWord, owner: OwnerId) -> Result<(), Failure> {
        finish_page(self, page, class, lock, owner).await
    }

    async fn replay_logs(&self, _: OwnerId) -> Result<(), Failure> {
        Ok(())
    }
}

/// What the victim does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Changes one page.
    One,
    /// Changes a page on each memory server.
    Two,
    /// Changes both and publishes a page.
    Split,
    /// Changes one, frees the other.
    Merge,
}

/// Changes the page on each of these memory servers as it was at first; whether it had the locks.
async fn change(peer: &Peer, pages: &[usize], content: u64, act: Act) -> Result<bool, Failure> {
    let mut copies = Vec::new();
    for &server in pages {
        let words = peer.world.borrow_mut().words_at(page_at(server, 0), CLASS.words()).to_vec();
        let mut copy = peer.filled(&words);
        // As it was read before anybody else came.
        copy[CONTENT] = OLD;
        let identity = Identity { structure: STRUCTURE, level: 0, class: CLASS, kind: 0, is_words: false };
        page::seal(&mut copy, page_at(server, 0), identity, FIRST);
        copies.push((PageCopy(copy), Role::AsRead));
    }
    let new = match act {
        Act::Split => {
            let page = FreePage { at: page_at(0, 1), class: CLASS, version: FIRST };
            vec![NewPage::of_nobody(page)]
        }
        _ => Vec::new(),
    };
    let mut slots = Pages::new();
    let slots: Vec<Slot> = copies.iter().map(|_| slots.add(())).collect();
    let interrupted = |_| Box::new(Error::Malformed("nothing interrupts it"));
    let mut open = OneSidedPages::open(peer, STRUCTURE, copies, new).map_err(interrupted)?;
    for &slot in &slots {
        open.set(slot, CONTENT, content);
    }
    match act {
        Act::Split => open.set(Slot::new_page(0), CONTENT, content),
        Act::Merge => open.free(slots[1]),
        Act::One | Act::Two => {}
    }
    let mut staged = PreparedChange::of(open);
    staged.seal();
    let mut prepared = ChangeBuffers::new(peer, &staged)?;
    let recording = prepared.recording.as_mut().expect("a page is locked");
    let parts = recording.parts();
    let place = |server: ServerId| {
        Places::take(std::slice::from_ref(&peer.rings[server.index()]), parts.iter().copied()).expect("it is empty")
    };
    let places: Vec<Places> = recording.servers().map(place).collect();
    recording.seal(peer, peer.next_sequence(), places);
    make(peer, &staged, prepared, &mut false).await
}

/// Meets each page, and has it repaired if a dead one has locked it.
async fn repair_all(peer: &Peer) -> Result<(), Failure> {
    for server in 0..SERVERS {
        let page = page_at(server, 0);
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

type Life<T> = (usize, Pin<Box<dyn Future<Output = T>>>);

/// Who can die, and how often it may be somebody else's turn.
#[derive(Clone, Copy)]
struct Bounds {
    dies: Option<usize>,
    switches: usize,
    /// Memory servers at which the dead are not fenced off.
    unfenced: Option<usize>,
}

/// Runs lives to their ends; what each came to, none for those that died.
fn run<T: 'static>(
    world: &Rc<RefCell<World>>,
    search: &mut Search,
    mut lives: Vec<Life<T>>,
    bounds: Bounds,
) -> Vec<Option<T>> {
    let mut results: Vec<Option<T>> = lives.iter().map(|_| None).collect();
    let mut is_over = vec![false; lives.len()];
    let (mut switches, mut turn) = (bounds.switches, 0);
    let mut cx = Context::from_waker(Waker::noop());
    let mut poll = |index: usize, lives: &mut Vec<Life<T>>, is_over: &mut Vec<bool>| {
        if let Poll::Ready(result) = lives[index].1.as_mut().poll(&mut cx) {
            results[index] = Some(result);
            is_over[index] = true;
        }
    };
    for index in 0..lives.len() {
        poll(index, &mut lives, &mut is_over);
    }
    loop {
        let queued = |peer: usize| {
            let world = world.borrow();
            (0..SERVERS).filter(move |&server| !world.queues[peer][server].is_empty()).collect::<Vec<_>>()
        };
        // What still comes of the dead, at any time.
        let late = (0..PEERS)
            .filter(|&peer| world.borrow().is_dead[peer])
            .flat_map(|peer| queued(peer).into_iter().map(move |server| (None, peer, server)).collect::<Vec<_>>());
        let late: Vec<_> = late.collect();
        let here = |index: usize| queued(lives[index].0).into_iter().map(move |server| (Some(index), server));
        let mut next: Vec<_> = if is_over[turn] { Vec::new() } else { here(turn).collect() };
        if next.is_empty() || switches > 0 {
            let others = (0..lives.len()).filter(|&index| index != turn && !is_over[index]);
            next.extend(others.flat_map(here));
        }
        let mut choices: Vec<_> =
            next.into_iter().map(|(index, server)| (index, lives[index.expect("it lives")].0, server)).collect();
        if choices.is_empty() && is_over.iter().all(|&over| over) {
            break;
        }
        let late_at = choices.len();
        choices.extend(late);
        let dying = bounds.dies.filter(|&peer| lives.iter().zip(&is_over).any(|(life, over)| life.0 == peer && !over));
        let chosen = search.choose(choices.len() + usize::from(dying.is_some()));
        if chosen == choices.len() {
            let peer = dying.expect("it was chosen");
            let mut world = world.borrow_mut();
            world.is_dead[peer] = true;
            for server in (0..SERVERS).filter(|&server| bounds.unfenced != Some(server)) {
                world.queues[peer][server].clear();
            }
            drop(world);
            let index = lives.iter().position(|life| life.0 == peer).expect("it was alive");
            is_over[index] = true;
            lives[index].1 = Box::pin(std::future::pending());
            continue;
        }
        let (index, peer, server) = choices[chosen];
        world.borrow_mut().step(peer, server);
        if chosen < late_at {
            let index = index.expect("it lives");
            if index != turn && !is_over[turn] && !queued(lives[turn].0).is_empty() {
                switches -= 1;
            }
            turn = index;
            poll(index, &mut lives, &mut is_over);
        }
    }
    results
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
}

const SOUND: Model = Model {
    act: Act::Two,
    victim: Break::Nothing,
    repairer: Break::Nothing,
    unfenced: None,
    has_other: false,
    repairers: 1,
};

impl Model {
    fn play(self, search: &mut Search) {
        let world = Rc::new(RefCell::new(World::new()));
        let Self { act, victim, repairer, unfenced, has_other, repairers } = self;
        let pages: &'static [usize] = if act == Act::One { &[0] } else { &[0, 1] };
        let peer = Peer::new(&world, VICTIM, victim);
        let mut lives: Vec<Life<Result<bool, Failure>>> =
            vec![(VICTIM, Box::pin(async move { change(&peer, pages, NEW, act).await }))];
        if has_other {
            let peer = Peer::new(&world, OTHER_ONE, Break::Nothing);
            lives.push((OTHER_ONE, Box::pin(async move { change(&peer, &[1], OTHER, Act::One).await })));
        }
        let bounds = Bounds { dies: Some(VICTIM), switches: 2, unfenced };
        let outcomes = run(&world, search, lives, bounds);
        let acknowledged = matches!(outcomes[0], Some(Ok(true)));
        let other_had = has_other && matches!(outcomes[1], Some(Ok(true)));
        if outcomes[0].is_none() {
            let lives = (1..=repairers).map(|number| {
                let peer = Peer::new(&world, number, repairer);
                let life: Life<Result<(), Failure>> = (number, Box::pin(async move { repair_all(&peer).await }));
                life
            });
            let dies = (repairers > 1).then_some(1);
            let repaired = run(&world, search, lives.collect(), Bounds { dies, switches: switches(), unfenced });
            for outcome in repaired.into_iter().flatten() {
                assert!(outcome.is_ok(), "not repaired: {outcome:?}");
            }
        }
        let last = Peer::new(&world, LAST, repairer);
        let lives: Vec<Life<Result<(), Failure>>> = vec![(LAST, Box::pin(async move { repair_all(&last).await }))];
        let outcome = run(&world, search, lives, Bounds { dies: None, switches: 0, unfenced });
        assert!(matches!(outcome[0], Some(Ok(()))), "not repaired: {outcome:?}");
        // What has not come yet.
        let mut world = world.borrow_mut();
        for server in 0..SERVERS {
            while !world.queues[VICTIM][server].is_empty() {
                world.step(VICTIM, server);
            }
        }
        judge(&mut world, act, acknowledged, other_had);
    }

    /// How many executions there are.
    fn explore(self) -> u64 {
        let (mut search, mut executions) = (Search::default(), 0);
        loop {
            self.play(&mut search);
            executions += 1;
            if !search.advance() {
                return executions;
            }
        }
    }

    fn refuse(self, why: &str) {
        let (mut search, mut executions) = (Search::default(), 0);
        loop {
            executions += 1;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.play(&mut search))) {
                let message = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                let message =
                    if message.is_empty() { panic.downcast_ref::<&str>().unwrap_or(&"").to_string() } else { message };
                assert!(message.contains(why), "refused, but not because {why:?}: {message}");
                return println!("refused at execution {executions}: {message}");
            }
            assert!(search.advance(), "broken, and yet all {executions} executions passed");
        }
    }
}

fn judge(world: &mut World, act: Act, acknowledged: bool, other_had: bool) {
    let pages = [page_at(0, 0), page_at(1, 0)];
    let locks = pages.map(|page| world.lock(page));
    let contents = pages.map(|page| world.content(page));
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
        Act::One => contents == [NEW, of_other[1]] && versions[0] == FIRST + 1,
        Act::Two | Act::Split => contents == [NEW, NEW] && versions == [FIRST + 1; 2],
        Act::Merge => contents[0] == NEW && is_freed && versions == [FIRST + 1; 2],
    };
    let is_undone = contents == of_other && !is_freed && versions == [FIRST, FIRST + u64::from(other_had)];
    assert!(is_done || is_undone && !acknowledged, "half a change: {contents:?} at {versions:?}, {locks:?}");
    assert!(!other_had || contents[1] == OTHER, "another one's change was lost");
    // The page that it publishes: its, or free in one hand.
    let new = page_at(0, 1);
    let lock = world.lock(new);
    let in_hands = world.retired.iter().filter(|(_, at)| *at == new).count();
    match act {
        Act::Split if is_done => assert_eq!((lock.state(), world.content(new)), (LockState::Unlocked, NEW)),
        Act::Split => {
            assert_eq!(lock.state(), LockState::Free, "a page to which nothing leads");
            assert!(in_hands <= 1, "a page in two hands");
        }
        _ => assert_eq!(lock, LockWord::free(FIRST, Some(owner(VICTIM)))),
    }
    let freed = world.retired.iter().filter(|(_, at)| *at == pages[1]).count();
    assert!(freed <= usize::from(is_freed), "a page in two hands");
}

#[test]
fn a_change_is_all_there_or_not_at_all() {
    for act in [Act::One, Act::Two, Act::Split, Act::Merge] {
        for has_other in [false, true] {
            let executions = Model { act, has_other, ..SOUND }.explore();
            println!("{act:?}, another one: {has_other}: {executions} executions");
            assert!(executions > 4);
        }
    }
}

#[test]
fn so_it_is_if_a_repairer_dies() {
    for act in [Act::One, Act::Two, Act::Split, Act::Merge] {
        let executions = Model { act, repairers: 2, ..SOUND }.explore();
        println!("{act:?}: {executions} executions");
    }
}

#[test]
fn a_record_after_the_data_is_refused() {
    Model { victim: Break::RecordsLate, ..SOUND }.refuse("not repaired");
}

#[test]
fn to_roll_forward_without_all_locks_is_refused() {
    Model { repairer: Break::TrustsRecords, ..SOUND }.refuse("half a change");
}

/// What the dead one has sent to memory server 1 still arrives, while others repair.
#[test]
fn a_fence_at_one_of_two_memory_servers_is_refused() {
    Model { unfenced: Some(1), ..SOUND }.refuse("half a change");
}
