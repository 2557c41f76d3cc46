//! Answers in pieces: the same as any others, of one moment, however late they are sent; and nothing is held back for ever.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use farlink_offload::{
    Remote,
    ship::{From, ShipOptions, Shipper},
};
use farlink_runtime::{
    access::{Access, Link, PageRef, Start, WordPtr},
    error::Error,
    fabric::mem::MemOptions,
    lock::LockWord,
    messaging::{GatherRule, ServeMessages, Wait},
    one_sided::{OneSided, Proof},
    operation::Run,
    page::{CHECKSUM, HEADER_WORDS, LOCK, SELF, checksum},
    ptr::ServerId,
    structure::{PlacementPolicy, StructurePlacement},
    worker::Worker,
};
use farlink_tests::{
    backend::Backend,
    bounded::Watchdog,
    cluster::{self, FAST, NASTY},
    direct::Direct,
    fleet::{self, Fleet},
    here,
    plugins::chains::{self, Chains, Push, SentValues, Take, Values},
    settings,
};

const REGION_BYTES: u64 = 2 << 20;
const WAYS: [GatherRule; 2] = [GatherRule::ALWAYS, GatherRule::NEVER];

pub(crate) fn fleet(options: MemOptions, gather: GatherRule) -> Fleet {
    let cluster = here::start(1, REGION_BYTES, options).unwrap();
    let wait = if Backend::chosen() == Backend::Verbs { Wait::Event } else { Wait::Auto };
    // A client that rests is not to be taken for one that is silent: its operation would run again.
    let silence_max = Duration::from_secs(100);
    let messages = ServeMessages { wait, gather, silence_max, ..ServeMessages::default() };
    let servers = fleet::start_all(&cluster, 1, &ShipOptions { messages, ..ShipOptions::default() }).unwrap();
    Fleet { servers, cluster }
}

async fn shipper(worker: &Worker) -> Result<Shipper<Chains>, Error> {
    let placement = StructurePlacement { policy: PlacementPolicy::OneServer, root: ServerId::new(0) };
    let made = chains::create(worker, "s", placement).await?;
    Ok(Remote::new(worker, made.context().structure.clone()).shipper().clone())
}

/// By the card or by the processor, values or pages: the answers are those of an answer in words.
#[test]
fn answers_in_pieces_are_those_in_words() {
    let _watch = Watchdog::start("pieces", Duration::from_secs(100));
    for options in [FAST, NASTY] {
        for gather in WAYS {
            let fleet = fleet(options, gather);
            let compute = cluster::join(&fleet.fabric(), 1).unwrap();
            let worker = compute.worker().unwrap();
            worker
                .block_on(async {
                    let shipper = shipper(&worker).await?;
                    let remote = Remote::<Chains>::new(&worker, shipper.structure().clone());
                    for value in 0..70 {
                        remote.execute(&Push { set: 0, value: value * value }).await?;
                        let expected = remote.execute(&Values { set: 0 }).await?;
                        for pages in [false, true] {
                            assert_eq!(shipper.ship_in_pieces(&SentValues { set: 0, pages }).await?, expected);
                            assert_eq!(shipper.ship_in_pieces(&SentValues { set: 1, pages }).await?, [0; 0]);
                        }
                    }
                    Ok::<_, Error>(())
                })
                .unwrap();
            let counts = fleet.servers[0].messages().counts();
            assert_eq!(counts.gathered > 100, gather == GatherRule::ALWAYS, "{counts:?}");
        }
    }
}

/// One worker fills a set and empties it, again and again, and its pages are reused; what others are sent is at any time what the
/// set held at one moment.
#[test]
fn what_is_on_its_way_is_not_reused() {
    let _watch = Watchdog::start("pieces", Duration::from_secs(100));
    const DEPTH: u64 = 12;
    let fleet = fleet(NASTY, GatherRule::ALWAYS);
    let compute = cluster::join(&fleet.fabric(), 2).unwrap();
    let worker = compute.worker().unwrap();
    let structure = worker.block_on(shipper(&worker)).unwrap().structure().clone();
    let (stop, generations) = (AtomicBool::new(false), AtomicU64::new(0));
    let rounds = settings::from_env("FARLINK_PIECES_ROUNDS", 150);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let worker = compute.worker().unwrap();
            worker.block_on(async {
                let access = Remote::<Chains>::new(&worker, structure.clone());
                while !stop.load(Ordering::Relaxed) {
                    let generation = generations.load(Ordering::Relaxed) + 1;
                    for value in 1..=DEPTH {
                        access.execute(&Push { set: 3, value: generation << 32 | value }).await.unwrap();
                    }
                    access.execute(&Take { set: 3 }).await.unwrap();
                    generations.store(generation, Ordering::Relaxed);
                }
            })
        });
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            worker.block_on(async {
                let shipper = Remote::<Chains>::new(&worker, structure.clone()).shipper().clone();
                // Pages are used again from the second filling on, which may be slow to come.
                let mut round = 0;
                while round < rounds || (generations.load(Ordering::Relaxed) < 2 && !writer.is_finished()) {
                    round += 1;
                    let asked: Vec<_> = (0..4)
                        .map(|number| {
                            let shipper = shipper.clone();
                            worker.spawn(async move {
                                shipper.ship_in_pieces(&SentValues { set: 3, pages: number % 2 == 0 }).await
                            })
                        })
                        .collect();
                    for asked in asked {
                        let values = asked.await.unwrap();
                        let newest = values.first().copied().unwrap_or(0);
                        let expected = (1..=newest & 0xffff_ffff).rev().map(|value| newest >> 32 << 32 | value);
                        assert!(values.iter().copied().eq(expected), "round {round}: {values:x?}");
                    }
                }
            });
        }));
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        outcome.unwrap();
    });
    println!("{:?}", fleet.servers[0].messages().counts());
}

/// A memory server that has sent pieces, and is asked for nothing more, does not hold the cluster's epoch back.
#[test]
fn pieces_that_are_sent_hold_nothing_back() {
    let _watch = Watchdog::start("pieces", Duration::from_secs(100));
    let fleet = fleet(FAST, GatherRule::ALWAYS);
    let compute = cluster::join(&fleet.fabric(), 3).unwrap();
    let worker = compute.worker().unwrap();
    worker
        .block_on(async {
            let shipper = shipper(&worker).await?;
            let here = OneSided::<Chains>::new(&worker, shipper.structure().clone(), Proof::Checksum);
            here.execute(&Push { set: 1, value: 7 }).await?;
            assert_eq!(shipper.ship_in_pieces(&SentValues { set: 1, pages: true }).await?, [7]);
            // Pages of twice the memory that there is, unless they are reused.
            for _ in 0..2 * REGION_BYTES / (40 * 64) {
                for value in 0..40 {
                    here.execute(&Push { set: 2, value }).await?;
                }
                here.execute(&Take { set: 2 }).await?;
                compute.maintain(&worker).await?;
            }
            Ok::<_, Error>(())
        })
        .unwrap();
}

/// A client rests while its answer is on its way, which is longer than what can be sent at once. Meanwhile others empty the set and
/// reuse what they can: not what the answer is made of.
#[test]
fn an_answer_that_is_taken_late_is_what_it_was() {
    const DEPTH: u64 = 2000;
    let _watch = Watchdog::start("pieces", Duration::from_secs(100));
    let fleet = fleet(FAST, GatherRule::ALWAYS);
    let (computes, counts) =
        ([4, 5].map(|seed| cluster::join(&fleet.fabric(), seed).unwrap()), || fleet.servers[0].messages().counts());
    let [resting, busy] = [&computes[0], &computes[1]].map(|compute| compute.worker().unwrap());
    let shipper = resting.block_on(shipper(&resting)).unwrap();
    let here = OneSided::<Chains>::new(&busy, shipper.structure().clone(), Proof::Checksum);
    let push = async |values: std::ops::Range<u64>| {
        for value in values {
            here.execute(&Push { set: 5, value }).await.unwrap();
        }
    };
    busy.block_on(push(0..DEPTH));
    resting.block_on(shipper.connect(ServerId::new(0).unwrap())).unwrap();
    let asked = resting.spawn(async move { shipper.ship_in_pieces(&SentValues { set: 5, pages: true }).await });
    while counts().gathered == 0 {
        if counts().requests == 0 {
            resting.turn();
        }
        std::thread::yield_now();
    }
    busy.block_on(async {
        here.execute(&Take { set: 5 }).await.unwrap();
        // Under emulation each round takes a third of a second.
        for _ in 0..if Backend::chosen() == Backend::Verbs { 30 } else { 200 } {
            push(DEPTH..DEPTH + 60).await;
            here.execute(&Take { set: 5 }).await.unwrap();
            computes[1].maintain(&busy).await.unwrap();
        }
    });
    let answer = resting.block_on(asked).unwrap();
    // Counts of requests and joins tell whether its connection was lost, and it was read again.
    assert_eq!(answer, (0..DEPTH).rev().collect::<Vec<_>>(), "{:?}", counts());
}

/// A page that says that it stands elsewhere is none of the answer, where it is read in place, too.
#[test]
fn what_says_that_it_stands_elsewhere_is_not_sent() {
    let _watch = Watchdog::start("pieces", Duration::from_secs(100));
    for gather in WAYS {
        let fleet = fleet(FAST, gather);
        let compute = cluster::join(&fleet.fabric(), 6).unwrap();
        let worker = compute.worker().unwrap();
        worker.block_on(async {
            let shipper = shipper(&worker).await.unwrap();
            let here = OneSided::<Chains>::new(&worker, shipper.structure().clone(), Proof::Checksum);
            for value in 0..3 {
                here.execute(&Push { set: 0, value }).await.unwrap();
            }
            let root = here.open(Start::Root).await.unwrap();
            let heads = WordPtr { page: root.link(), index: HEADER_WORDS };
            let newest = Link::from_word(here.load(&[heads]).await.unwrap()[0]);
            let (at, class) = newest.remote().unwrap();
            let direct = Direct::new(&fleet.fabric(), 0).unwrap();
            let mut image = direct.read(at, class.words()).unwrap();
            // Its own next page.
            image[SELF] = image[HEADER_WORDS + 1] & !63;
            image[CHECKSUM] = checksum(&image, LockWord::from_word(image[LOCK]).version());
            direct.write(at, &image).unwrap();
            for pages in [false, true] {
                let sent = shipper.ship_in_pieces(&SentValues { set: 0, pages }).await;
                assert!(matches!(&sent, Err(Error::OnServer { why, .. }) if why.contains("inconsistent")), "{sent:?}");
            }
            let sent = shipper.ship(&Values { set: 0 }, From::Root).await;
            assert!(matches!(&sent, Err(Error::OnServer { why, .. }) if why.contains("inconsistent")), "{sent:?}");
        });
    }
}
