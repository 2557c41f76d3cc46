//! Replies of pieces: what is lent from the region arrives as it was, stays lent until it has, and no longer.

use std::{
    cell::RefCell,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use farlink_runtime::{
    error::Error,
    fabric::{
        clock::Clock,
        listener::{DEFAULT_CONNECTION_BYTES, ListenOptions},
        mem::MemOptions,
    },
    messaging::{
        Batch, Channel, Error as MessagingError, GatherRule, Kind, ManualMessageServer, MessageServer, Priority,
        Refusal, Request, Responder, ServeMessages, Service,
    },
    ptr::RemotePtr,
    server::LocalMemory,
};
use farlink_tests::{
    backend::{Backend, FabricProfile, Fate, Faults},
    bounded::Watchdog,
    cluster::{FAST, NASTY, WEAK},
    here, settings,
};

use crate::{
    faults::until,
    rogue::Rogue,
    scene::{ABOVE_100, SMALL, Scene, Seen, server},
};

/// Replies with pieces: the parameters are a seed, how many pieces, the words of each, and the words between them.
const LEND: Kind = Kind(20);
/// No piece is free.
const BUSY: Refusal = Refusal::Service(1);
/// What is in a piece that nobody has.
const JUNK: u64 = 0xdead_dead_dead_dead;

const REGION_BYTES: u64 = 2 << 20;
/// Pieces are lent from the end of the region, which nothing else uses here.
const PIECE_WORDS: usize = 2048;
const PIECES: usize = 64;

fn piece_at(piece: usize) -> RemotePtr {
    let offset = REGION_BYTES - ((PIECES - piece) * PIECE_WORDS * 8) as u64;
    RemotePtr::new(server(0), offset).unwrap()
}

fn piece_word(seed: u64, piece: u64, word: u64) -> u64 {
    seed << 40 | piece << 32 | word
}

/// What a request is answered with.
fn expected(params: &[u64]) -> Vec<u64> {
    let &[seed, pieces, words, own] = params else { panic!("four parameters") };
    let piece = |piece| {
        let lent = (0..words).map(move |word| piece_word(seed, piece, word));
        lent.chain((0..own).map(move |word| !piece_word(seed, piece, word)))
    };
    (0..own).map(|word| !(seed << 40 | word)).chain((0..pieces).flat_map(piece)).collect()
}

/// When pieces come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Return {
    WhenSent,
    /// At once: planted.
    AtOnce,
    /// With the next request: planted.
    WithTheNext,
}

#[derive(Debug, Default)]
struct Lent {
    handled: AtomicU64,
    now: AtomicU64,
}

struct Shelf {
    memory: LocalMemory,
    free: Rc<RefCell<Vec<usize>>>,
    returned: Return,
    kept: Option<Guard>,
    lent: Arc<Lent>,
}

/// Pieces that nobody may change. Dropped, they are used for something else.
struct Guard {
    memory: LocalMemory,
    pieces: Vec<usize>,
    free: Rc<RefCell<Vec<usize>>>,
    lent: Arc<Lent>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        for &piece in &self.pieces {
            let words = self.memory.words(piece_at(piece), PIECE_WORDS).unwrap();
            words.iter().for_each(|word| word.store(JUNK, Ordering::Relaxed));
        }
        self.lent.now.fetch_sub(self.pieces.len() as u64, Ordering::Release);
        self.free.borrow_mut().append(&mut self.pieces);
    }
}

impl Service for Shelf {
    fn handle(&mut self, request: Request<'_>, reply: Responder) {
        self.lent.handled.fetch_add(1, Ordering::Relaxed);
        let &[seed, count, words, own] = request.words() else { return reply.refuse(Refusal::Malformed) };
        let free = self.free.borrow().len();
        if free < count as usize {
            return reply.refuse(BUSY);
        }
        let pieces = self.free.borrow_mut().split_off(free - count as usize);
        self.lent.now.fetch_add(count, Ordering::Release);
        for (number, &piece) in pieces.iter().enumerate() {
            let to = self.memory.words(piece_at(piece), words as usize).unwrap();
            for (index, word) in to.iter().enumerate() {
                word.store(piece_word(seed, number as u64, index as u64), Ordering::Relaxed);
            }
        }
        let (memory, free, lent) = (self.memory.clone(), Rc::clone(&self.free), Arc::clone(&self.lent));
        let guard = Guard { memory, pieces: pieces.clone(), free, lent };
        let guard = match self.returned {
            Return::WhenSent => Some(guard),
            Return::AtOnce => {
                drop(guard);
                None
            }
            Return::WithTheNext => {
                self.kept = Some(guard);
                None
            }
        };
        reply.send_pieces(guard, |to| {
            to.own(|to| to.extend((0..own).map(|word| !(seed << 40 | word))));
            for (number, &piece) in pieces.iter().enumerate() {
                to.push(piece_at(piece), words as usize);
                to.own(|to| to.extend((0..own).map(|word| !piece_word(seed, number as u64, word))));
            }
        });
    }
}

/// Pieces of all sizes.
fn lending(
    profile: Result<FabricProfile, MemOptions>,
    connection_bytes: usize,
    serve: &ServeMessages,
    returned: Return,
) -> (Scene, Arc<Lent>) {
    let cluster = match profile {
        Ok(profile) => here::start_with(1, REGION_BYTES, profile).unwrap(),
        Err(options) => here::start(1, REGION_BYTES, options).unwrap(),
    };
    let (memory, lent) = (cluster.memory(server(0)).unwrap(), Arc::new(Lent::default()));
    let listener = cluster.listen(server(0), &ListenOptions { endpoints: 1, connection_bytes }).unwrap();
    let shared = Arc::clone(&lent);
    let serve = ServeMessages { gather: GatherRule::ALWAYS, ..*serve };
    let messages = MessageServer::start(listener, &serve, move |_| {
        let free = Rc::new(RefCell::new((0..PIECES).collect()));
        Ok(Box::new(Shelf { memory: memory.clone(), free, returned, kept: None, lent: Arc::clone(&shared) }))
    });
    (Scene::of(cluster, vec![messages.unwrap()], Arc::new(Seen::default())), lent)
}

/// Asks until there are pieces; whether they arrived as they were lent.
async fn borrows(channel: &Channel, params: &[u64; 4], priority: Priority) -> bool {
    loop {
        match channel.request_words(LEND, params, priority).await {
            Ok(reply) => return reply.words() == expected(params),
            Err(MessagingError::Refused { why: BUSY, .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Many requests at a time; how many replies were not what was lent.
fn damaged(scene: &Scene, rounds: u64) -> usize {
    let compute = scene.join(11);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel_with(server(0), ABOVE_100).await.unwrap();
        let mut damaged = 0;
        for round in 0..rounds {
            let requests: Vec<_> = (0..12u64)
                .map(|number| {
                    let channel = channel.clone();
                    let words = [1, 16, 128, 129, 700, 2048][(number + round) as usize % 6];
                    let pieces = [1, 2, 5, 33, 40, 3][(number * 7 + round) as usize % 6].min(9000 / words);
                    let params = [round << 8 | number, pieces, words, number % 3];
                    let priority = if number % 4 == 0 { Priority::BestEffort } else { Priority::Latency };
                    worker.spawn(async move { borrows(&channel, &params, priority).await })
                })
                .collect();
            for request in requests {
                damaged += usize::from(!request.await);
            }
        }
        damaged
    })
}

#[test]
fn pieces_arrive_as_they_were_and_come_back() {
    // A device gathers as it does.
    let kinds = if Backend::chosen() == Backend::Verbs { 1 } else { 5 };
    for (options, connection_bytes, gather_max) in [
        (FAST, DEFAULT_CONNECTION_BYTES, 32),
        (FAST, SMALL, 2),
        (NASTY, SMALL, 32),
        (NASTY, DEFAULT_CONNECTION_BYTES, 5),
        (WEAK, SMALL, 32),
    ]
    .into_iter()
    .take(kinds)
    {
        let options = MemOptions { gather_max, ..options };
        let (scene, lent) = lending(Err(options), connection_bytes, &ServeMessages::default(), Return::WhenSent);
        assert_eq!(damaged(&scene, 10), 0, "{options:?}");
        until(|| lent.now.load(Ordering::Acquire) == 0);
        let counts = scene.messages[0].counts();
        println!("{counts:?}");
        assert_eq!((counts.repeats, counts.dropped), (0, 0));
        assert!(counts.gathered > 80 && counts.gathered_pieces >= counts.gathers, "{counts:?}");
        assert!(counts.gathered_pieces <= gather_max as u64 * counts.gathers, "{counts:?}");
    }
}

/// Planted: whoever lets go of pieces before they are sent sends something else.
#[test]
fn a_guard_that_is_dropped_before_completion_is_caught() {
    for (options, returned, least) in [
        (FAST, Return::AtOnce, 12),
        (NASTY, Return::AtOnce, 12),
        (FAST, Return::WithTheNext, 1),
        (NASTY, Return::WithTheNext, 1),
    ] {
        let (scene, _) = lending(Err(options), SMALL, &ServeMessages::default(), returned);
        let damaged = damaged(&scene, 2);
        assert!(damaged >= least, "{returned:?}: {damaged} of 24 replies were damaged");
    }
}

#[test]
fn what_need_not_be_gathered_is_copied() {
    let (scene, lent) = lending(Err(FAST), SMALL, &ServeMessages::default(), Return::WhenSent);
    let compute = scene.join(12);
    let worker = compute.worker().unwrap();
    worker.block_on(async {
        let channel = worker.channel(server(0)).await.unwrap();
        // Several in one message: they are kept together, for a repeat.
        let (first, second) = ([1, 3, 100, 1], [2, 2, 2000, 0]);
        let mut batch = Batch::default();
        [first, second].iter().for_each(|params| batch.push(LEND, params));
        let replies = channel.batch(&batch, Priority::Latency).await.unwrap();
        let words: Vec<Vec<u64>> = replies.into_iter().map(|reply| reply.unwrap().words().to_vec()).collect();
        assert_eq!(words, [expected(&first), expected(&second)]);
        assert_eq!((scene.messages[0].counts().gathered, lent.now.load(Ordering::Acquire)), (0, 0));
        assert!(borrows(&channel, &first, Priority::Latency).await);
        assert_eq!(scene.messages[0].counts().gathered, 1);
    });
    if Backend::chosen() != Backend::Verbs {
        let options = MemOptions { gather_max: 1, ..FAST };
        let (scene, _) = lending(Err(options), SMALL, &ServeMessages::default(), Return::WhenSent);
        assert_eq!(damaged(&scene, 2), 0);
        assert_eq!(scene.messages[0].counts().gathered, 0);
    }
}

/// Connections break in mid-reply: the request is handled again, and nobody gets what was lent to somebody else.
#[test]
fn a_reply_of_pieces_that_is_lost_is_made_again() {
    for fate in [Fate::Refused, Fate::Any] {
        let seed = settings::seed(&format!("{fate:?}"));
        let profile = FabricProfile::Faulty(Faults { one_in: 60, seed, fate, is_weak: false });
        let (scene, lent) = lending(Ok(profile), SMALL, &ServeMessages::default(), Return::WhenSent);
        let compute = scene.join(13);
        let worker = compute.worker().unwrap();
        let (mut asked, mut answered) = (0, 0);
        worker.block_on(async {
            while answered < 40 || lent.handled.load(Ordering::Relaxed) <= asked {
                assert!(asked < 5000, "a fabric that fails so seldom repeats nothing");
                let channel = match worker.channel_with(server(0), ABOVE_100).await {
                    Ok(channel) => channel,
                    Err(Error::Fabric(_) | Error::Messaging(_)) => continue,
                    Err(error) => panic!("{error}"),
                };
                let params = [asked, 1 + asked % 5, 500 + asked % 700, asked % 2];
                asked += 1;
                match channel.request_words(LEND, &params, Priority::Latency).await {
                    Ok(reply) => {
                        answered += 1;
                        assert_eq!(reply.words(), expected(&params));
                    }
                    Err(MessagingError::Fabric(_) | MessagingError::OutcomeUnknown { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        println!("{asked} asked, {answered} answered, {} handled", lent.handled.load(Ordering::Relaxed));
        drop(worker);
        until(|| lent.now.load(Ordering::Acquire) == 0);
    }
}

/// Whoever does not take what was lent, or takes it a word at a time, does not keep it for ever.
#[test]
fn a_silent_peer_gives_back_what_was_lent() {
    let serve = ServeMessages {
        silence_max: Duration::from_millis(20),
        report_interval: Duration::from_millis(1),
        ..ServeMessages::default()
    };
    let (scene, lent) = lending(Err(FAST), SMALL, &serve, Return::WhenSent);
    for is_silent in [true, false] {
        let mut rogue = Rogue::new(&scene, u32::from(is_silent));
        until(|| rogue.head_of_replies() > 0);
        let (hello_ack, dropped) = (rogue.head_of_replies(), scene.messages[0].counts().dropped);
        // More than its ring holds.
        rogue.send(&[1 << 8 | 1, 1, 1, 4 << 32 | u64::from(LEND.0), 7, 3, 2048, 0]);
        until(|| lent.now.load(Ordering::Acquire) == 3);
        until(|| rogue.head_of_replies() > hello_ack);
        let mut tail = 0;
        until(|| {
            if !is_silent && tail + 1 < rogue.head_of_replies() {
                tail += 1;
                rogue.release(tail);
                std::thread::sleep(Duration::from_millis(1));
            }
            lent.now.load(Ordering::Acquire) == 0
        });
        assert!(tail < 2048, "it was not waited for until it had taken all");
        until(|| scene.messages[0].counts().dropped == dropped + 1);
        until(|| rogue.is_dismissed());
    }
}

/// A reply that waits behind another one is lent for as long at most from when it is made on, not from when it is the oldest.
#[test]
fn what_waits_behind_another_reply_is_lent_no_longer() {
    let _watch = Watchdog::start("pieces", Duration::from_secs(60));
    let cluster = here::start(1, REGION_BYTES, FAST).unwrap();
    let (memory, lent) = (cluster.memory(server(0)).unwrap(), Arc::new(Lent::default()));
    let listener = cluster.listen(server(0), &ListenOptions { endpoints: 1, connection_bytes: SMALL }).unwrap();
    let serve = ServeMessages {
        silence_max: Duration::from_millis(100),
        report_interval: Duration::from_millis(1),
        gather: GatherRule::ALWAYS,
        ..ServeMessages::default()
    };
    let clock = Clock::Virtual(Rc::default());
    let mut messages = ManualMessageServer::new(listener, &serve, &clock, |_| {
        let free = Rc::new(RefCell::new((0..PIECES).collect()));
        let (memory, lent) = (memory.clone(), Arc::clone(&lent));
        Ok(Box::new(Shelf { memory, free, returned: Return::WhenSent, kept: None, lent }))
    })
    .unwrap();
    let mut rogue = Rogue::on(&*cluster.fabric(), 0);
    while rogue.head_of_replies() == 0 {
        messages.turn();
    }
    // Each more than its ring holds.
    for sequence in 1..=2 {
        rogue.send(&[1 << 8 | 1, sequence, 1, 4 << 32 | u64::from(LEND.0), 7, 1, 1500, 0]);
    }
    let mut go_on_to = |from_ms: u64, to_ms| {
        for ms in from_ms..to_ms {
            clock.skip_to(ms * 1_000_000);
            while messages.turn() {}
        }
        messages.counts().dropped
    };
    let lent_now = || lent.now.load(Ordering::Acquire);
    assert_eq!((go_on_to(0, 90), lent_now()), (0, 2));
    while lent_now() == 2 {
        rogue.release(rogue.head_of_replies());
        go_on_to(90, 91);
    }
    assert_eq!((go_on_to(91, 100), lent_now()), (0, 1));
    // Those who look do so each 10 ms.
    assert_eq!((go_on_to(100, 130), lent_now()), (1, 0));
}
