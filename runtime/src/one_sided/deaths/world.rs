//! The world of the models: remote memory, requests on their way there, those who post them, and the search through all orders.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    pin::Pin,
    rc::Rc,
    sync::OnceLock,
    task::{Context, Poll, Waker},
};

use crate::{
    buffer::{Buffer, Buffers, LocalKey},
    clock::Clock,
    error::Error,
    fabric::{Capabilities, Error as FabricError, Fabric, Liveness, mem::MemOptions},
    layout::Records,
    lock::{LockWord, OwnerId},
    page::{self, CHECKSUM, HEADER_WORDS, Identity, LOCK, SizeClass, StructureId},
    ptr::{Link, RemotePtr, ServerId},
    redo::{Places, RING_CLASS, RING_FIRST, RING_OWNER, RINGS, Recover, RingSpace, Room, finish_page},
    remote::{Payload, Remote},
};

pub(super) type Failure = Box<Error>;

pub(super) const STRUCTURE: StructureId = StructureId(1);
pub(super) const CLASS: SizeClass = SizeClass::SMALLEST;
pub(super) const CONTENT: usize = HEADER_WORDS;
/// Another word with it, not so near the checksum that one WRITE sets both.
pub(super) const FURTHER: usize = HEADER_WORDS + 2;
/// The version of every page at first.
pub(super) const FIRST: u64 = 7;
/// What is in a page: at first, after the victim's change, after another one's.
pub(super) const OLD: u64 = 70;
pub(super) const NEW: u64 = 80;
pub(super) const OTHER: u64 = 90;

pub(super) const SERVERS: usize = 2;
/// The first word of a memory server is no address. Pages follow, then a table of rings, then rings, then the fence of the victim.
pub(super) const PAGES_AT: usize = 8;
pub(super) const PAGES: usize = 3;
pub(super) const HEADS_AT: usize = PAGES_AT + PAGES * CLASS.words();
pub(super) const PEERS: usize = 5;
pub(super) const RINGS_AT: usize = HEADS_AT + PEERS * 8;
pub(super) const FENCE_AT: usize = RINGS_AT + PEERS * RING_CLASS.words();
pub(super) const WORDS: usize = FENCE_AT + 2;

/// Peers: who dies, those that repair, another one, and who comes last.
pub(super) const VICTIM: usize = 0;
pub(super) const OTHER_ONE: usize = 3;
pub(super) const LAST: usize = 4;

pub(super) fn at(server: usize, word: usize) -> RemotePtr {
    RemotePtr::new(ServerId::new(server as u16).unwrap(), word as u64 * 8).unwrap()
}

/// Page `number` of a memory server.
pub(super) fn page_at(server: usize, number: usize) -> RemotePtr {
    at(server, PAGES_AT + number * CLASS.words())
}

pub(super) fn ring_at(server: usize, peer: usize) -> RemotePtr {
    at(server, RINGS_AT + peer * RING_CLASS.words())
}

pub(super) fn owner(peer: usize) -> OwnerId {
    OwnerId::new(peer as u64 + 1).unwrap()
}

/// The choices of one execution: those of the last one up to a point, then the first there is.
#[derive(Default)]
pub(super) struct Search {
    /// What was chosen, of how many.
    choices: Vec<(usize, usize)>,
    next: usize,
}

impl Search {
    pub(super) fn choose(&mut self, of: usize) -> usize {
        if self.next == self.choices.len() {
            self.choices.push((0, of));
        }
        let (chosen, known) = self.choices[self.next];
        assert_eq!(known, of, "an execution is the same every time");
        self.next += 1;
        chosen
    }

    /// Goes on to the next execution, if there is one.
    pub(super) fn advance(&mut self) -> bool {
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

pub(super) enum Verb {
    Read(usize),
    Write(Vec<u64>),
    Swap(u64, u64),
}

pub(super) type Answer = Rc<RefCell<Option<Result<Vec<u64>, Lost>>>>;

/// Why a request has no answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lost {
    /// Its poster's connections are cut.
    Cut,
    /// It alone failed, without an effect.
    Failed,
}

pub(super) struct Request {
    at: RemotePtr,
    verb: Verb,
    answer: Answer,
}

/// Remote memory, and what is on its way there.
pub(super) struct World {
    pub(super) words: [Vec<u64>; SERVERS],
    pub(super) queues: [[VecDeque<Request>; SERVERS]; PEERS],
    pub(super) is_dead: [bool; PEERS],
    /// Free pages, as their holders know them.
    pub(super) retired: Vec<(usize, RemotePtr)>,
    /// Whether requests to a memory server take effect in the order of posting.
    pub(super) has_order: bool,
    /// Where there is no order: requests that may still fail by themselves.
    failures: usize,
}

impl World {
    pub(super) fn new() -> Self {
        static FIRST_WORDS: OnceLock<[Vec<u64>; SERVERS]> = OnceLock::new();
        let words = FIRST_WORDS.get_or_init(Self::first_words).clone();
        let (queues, is_dead, retired) = Default::default();
        Self { words, queues, is_dead, retired, has_order: true, failures: 0 }
    }

    /// Over a fabric that declares no order: one request may fail without an effect while those behind it have theirs, and of those that
    /// are on their way when their poster dies any may arrive.
    pub(super) fn without_order() -> Self {
        Self { has_order: false, failures: 1, ..Self::new() }
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
            for number in [0, 2] {
                seal(page_at(server, number), STRUCTURE, CLASS, &[(CONTENT, OLD), (FURTHER, OLD)]);
            }
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

    pub(super) fn words_at(&mut self, at: RemotePtr, count: usize) -> &mut [u64] {
        let first = at.offset() as usize / 8;
        &mut self.words[at.server().index()][first..first + count]
    }

    pub(super) fn lock(&mut self, page: RemotePtr) -> LockWord {
        LockWord::from_word(self.words_at(page, 1)[0])
    }

    pub(super) fn content(&mut self, page: RemotePtr, word: usize) -> u64 {
        self.words_at(page, CLASS.words())[word]
    }

    /// Carries out the next request of a queue.
    pub(super) fn step(&mut self, peer: usize, server: usize) {
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
        answer.replace(Some(Ok(done)));
    }

    /// The next request of a queue fails.
    fn fail(&mut self, peer: usize, server: usize) {
        self.failures -= 1;
        let request = self.queues[peer][server].pop_front().expect("it was chosen for that");
        request.answer.replace(Some(Err(Lost::Failed)));
    }

    /// Of what a peer has on its way to each memory server, carries out nothing, all, one request alone, or all but one.
    fn carry_out_some(&mut self, peer: usize, search: &mut Search) {
        for server in 0..SERVERS {
            let queue = &mut self.queues[peer][server];
            let (some, mut number) = (search.choose(2 * queue.len() + 2), 0);
            queue.retain(|_| {
                number += 1;
                some == 1 || some == 2 * number || some % 2 == 1 && some != 2 * number + 1
            });
            while !self.queues[peer][server].is_empty() {
                self.step(peer, server);
            }
        }
    }

    /// A peer counts as dead from now on, and its connections are cut: what it has on its way never comes, but for memory servers at
    /// which it is not fenced off.
    pub(super) fn cut(&mut self, peer: usize, unfenced: Option<usize>) {
        self.is_dead[peer] = true;
        for (server, queue) in self.queues[peer].iter_mut().enumerate() {
            for request in queue.iter_mut() {
                std::mem::take(&mut request.answer).replace(Some(Err(Lost::Cut)));
            }
            if unfenced != Some(server) {
                queue.clear();
            }
        }
    }
}

/// What a peer does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Break {
    Nothing,
    /// Its records are written once all else is.
    RecordsLate,
    /// It takes locks for one word, and changes several.
    LocksForOneWord,
    /// It takes each record for one of a change that had all its locks.
    TrustsRecords,
    /// It takes a page for whole because its last record says that it was not written.
    TrustsPages,
    /// It goes on as if it had each lock that it asks for.
    TakesAnyLock,
    /// It takes no page back that was published.
    LeavesNewPages,
    /// Taken for dead, it connects anew and goes on.
    ComesBack,
    /// It writes pages back before the log.
    WritesBackFirst,
    /// It relies on an order of WRITEs, declared or not.
    TrustsOrder,
}

/// A compute server.
pub(super) struct Peer {
    pub(super) world: Rc<RefCell<World>>,
    pub(super) number: usize,
    pub(super) breaks: Break,
    late: RefCell<Vec<Request>>,
    buffers: Buffers,
    pub(super) rings: [RingSpace; SERVERS],
    sequence: Cell<u64>,
    pub(super) records: Records,
}

impl Peer {
    pub(super) fn new(world: &Rc<RefCell<World>>, number: usize, breaks: Break) -> Self {
        Self {
            world: Rc::clone(world),
            number,
            breaks,
            late: RefCell::default(),
            buffers: Buffers::default(),
            rings: [0, 1].map(|server| RingSpace::new(ring_at(server, number))),
            sequence: Cell::new(1),
            records: Records::All,
        }
    }

    fn post(&self, at: RemotePtr, verb: Verb) -> impl Future<Output = Result<Vec<u64>, Failure>> + use<> {
        let answer = Answer::default();
        let request = Request { at, verb, answer: Rc::clone(&answer) };
        let is_record =
            (RINGS_AT..FENCE_AT).contains(&(at.offset() as usize / 8)) && matches!(request.verb, Verb::Write(_));
        let comes_back = self.breaks == Break::ComesBack;
        if self.world.borrow().is_dead[self.number] && !comes_back {
            answer.replace(Some(Err(Lost::Cut)));
        } else if self.breaks == Break::RecordsLate && is_record {
            answer.replace(Some(Ok(Vec::new())));
            self.late.borrow_mut().push(request);
        } else {
            let ends = matches!(&request.verb, Verb::Write(words) if words.len() == 1 && at == page_at(1, 0));
            self.queue(request);
            if ends {
                self.late.take().into_iter().for_each(|request| self.queue(request));
            }
        }
        let owner = owner(self.number);
        let failed = move |lost| match lost {
            Lost::Cut if !comes_back => FabricError::TakenForDead { owner }.into(),
            lost => FabricError::RequestFailed { what: "a request", at, why: format!("{lost:?}") }.into(),
        };
        std::future::poll_fn(move |_| match answer.borrow_mut().take() {
            Some(answer) => Poll::Ready(answer.map_err(failed)),
            None => Poll::Pending,
        })
    }

    fn queue(&self, request: Request) {
        self.world.borrow_mut().queues[self.number][request.at.server().index()].push_back(request);
    }

    pub(super) fn filled(&self, words: &[u64]) -> Buffer {
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
        let mut can = *MEMORY.get_or_init(|| {
            let memory = crate::server::in_process(1, 1 << 20, MemOptions::default()).expect("it is small");
            memory.endpoint(0, Clock::monotonic()).expect("there is one").capabilities()
        });
        let is_ordered = self.world.borrow().has_order || self.breaks == Break::TrustsOrder;
        (can.ordered_writes, can.atomic_against_writes) = (is_ordered, is_ordered);
        can
    }

    fn buffer(&self, words: usize) -> Result<Buffer, Error> {
        Ok(self.buffers.take(words, |_, _| Ok(LocalKey(0)))?)
    }

    fn read(&self, at: RemotePtr, words: usize) -> impl Future<Output = Result<Buffer, Failure>> {
        let read = self.post(at, Verb::Read(words));
        async move {
            let mut words = self.filled(&read.await?);
            if self.breaks == Break::TrustsRecords && words.len() == RING_CLASS.words() {
                mark_all(&mut words);
            }
            if self.breaks == Break::TrustsPages && words.len() == CLASS.words() {
                words[CHECKSUM] = page::checksum(&words, LockWord::from_word(words[LOCK]).version());
            }
            Ok(words)
        }
    }

    fn write(&self, at: RemotePtr, payload: Payload) -> impl Future<Output = Result<(), Failure>> {
        let mut words = match payload {
            Payload::Word(word) => vec![word],
            Payload::Words(words) => words.to_vec(),
        };
        // Where a record does not make up for it, half a WRITE may have arrived.
        let second = words.split_off(if self.records == Records::All { words.len() } else { words.len().div_ceil(2) });
        let later = (!second.is_empty()).then(|| at.word(words.len()));
        let first = self.post(at, Verb::Write(words));
        let second = later.map(|at| self.post(at, Verb::Write(second)));
        async move {
            first.await?;
            if let Some(second) = second {
                second.await?;
            }
            Ok(())
        }
    }

    fn compare_swap(&self, at: RemotePtr, expected: u64, new: u64) -> impl Future<Output = Result<u64, Failure>> {
        let is_left = self.breaks == Break::LeavesNewPages && (0..SERVERS).any(|server| at == page_at(server, 1));
        let swapped = (!is_left).then(|| self.post(at, Verb::Swap(expected, new)));
        let is_taken_anyway = is_left || self.breaks == Break::TakesAnyLock;
        async move {
            let found = match swapped {
                Some(swapped) => swapped.await?[0],
                None => expected,
            };
            Ok(if is_taken_anyway { expected } else { found })
        }
    }

    fn load(&self, at: RemotePtr) -> impl Future<Output = Result<u64, Failure>> {
        let read = self.post(at, Verb::Read(1));
        async move { Ok(read.await?[0]) }
    }

    async fn before_trying_again(&self, error: Failure, _: &mut u32) -> Result<(), Failure> {
        if error.may_be_tried_again() { Ok(()) } else { Err(error) }
    }

    fn records(&self) -> Records {
        self.records
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
pub(super) fn mark_all(ring: &mut [u64]) {
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

pub(super) type Life<T> = (usize, Pin<Box<dyn Future<Output = T>>>);

/// Who can die, and how often it may be somebody else's turn.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub(super) dies: Option<usize>,
    pub(super) switches: usize,
    /// Memory servers at which the dead are not fenced off.
    pub(super) unfenced: Option<usize>,
    /// Who is taken for dead has only stopped: its life is left to go on.
    pub(super) stops: bool,
}

/// Runs lives to their ends; what each came to, none for those that died.
pub(super) fn run<T: 'static>(
    world: &Rc<RefCell<World>>,
    search: &mut Search,
    lives: &mut Vec<Life<T>>,
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
        poll(index, lives, &mut is_over);
    }
    loop {
        let queued = |peer: usize| {
            let world = world.borrow();
            (0..SERVERS).filter(move |&server| !world.queues[peer][server].is_empty()).collect::<Vec<_>>()
        };
        // What still comes of the dead, at any time.
        let late = (0..PEERS)
            .filter(|&peer| world.borrow().is_dead[peer])
            .filter(|&peer| lives.iter().zip(&is_over).all(|(life, &over)| life.0 != peer || over))
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
        let failing: Vec<_> = match dying {
            Some(peer) if world.borrow().failures > 0 => {
                queued(peer).into_iter().map(|server| (peer, server)).collect()
            }
            _ => Vec::new(),
        };
        let chosen = search.choose(choices.len() + usize::from(dying.is_some()) + failing.len());
        if let Some(&(peer, server)) = chosen.checked_sub(choices.len() + 1).and_then(|number| failing.get(number)) {
            world.borrow_mut().fail(peer, server);
            let index = lives.iter().position(|life| life.0 == peer).expect("it lives");
            poll(index, lives, &mut is_over);
            continue;
        }
        if chosen == choices.len() {
            let peer = dying.expect("it was chosen");
            if !world.borrow().has_order {
                world.borrow_mut().carry_out_some(peer, search);
            }
            world.borrow_mut().cut(peer, bounds.unfenced);
            let index = lives.iter().position(|life| life.0 == peer).expect("it was alive");
            is_over[index] = true;
            if !bounds.stops {
                lives[index].1 = Box::pin(std::future::pending());
            }
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
            poll(index, lives, &mut is_over);
        }
    }
    results
}
