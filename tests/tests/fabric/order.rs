//! Order and atomicity: what holds always, and what the capabilities add. Where a capability is missing on purpose, its test
//! finds the disorder: so it would find one elsewhere.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use farlink_runtime::fabric::{Done, Verb};
use farlink_tests::{
    backend::{Backend, Cluster, FabricProfile},
    deadlines::PATIENCE,
    direct::{Direct, previous, written},
    settings,
};

use crate::{SERVER_BYTES, SERVERS, at, on_each};

const THREADS: u64 = 4;
const BODY_WORDS: usize = 64;

fn rounds(default: u64) -> u64 {
    settings::from_env("FARLINK_FABRIC_ROUNDS", default)
}

/// Endpoints of their own on threads of their own, which begin at the same time.
fn on_threads<T: Send>(cluster: &Cluster, work: impl Fn(u64, &Direct) -> T + Sync) -> Vec<T> {
    let start = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let (work, start) = (&work, &start);
                scope.spawn(move || {
                    let direct = Direct::new(cluster, number).unwrap();
                    start.wait();
                    work(number, &direct)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Tells the other threads that this one is done, even if it panicked.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn no_addition_is_lost() {
    on_each("FETCH_ADD by several", |cluster| {
        let each = rounds(600);
        let found = on_threads(cluster, |_, direct| {
            let mut found = Vec::new();
            for _ in 0..each / 16 {
                let adds = (0..16).map(|_| (at(cluster, 0, 5), Verb::FetchAdd(1)));
                found.extend(direct.all(adds).into_iter().map(|outcome| previous(outcome).unwrap()));
            }
            found
        });
        let mut found = found.concat();
        found.sort_unstable();
        assert!(found.iter().copied().eq(0..found.len() as u64), "values were given out twice, or skipped");
    });
}

/// A spin lock in remote memory around a counter that is read and written: a lost swap, or an unlock that is lost to an
/// atomic, shows in the count.
#[test]
fn a_lock_holds() {
    on_each("a lock", |cluster| {
        let (lock, counter) = (at(cluster, 1, 0), at(cluster, 1, 1));
        let each = rounds(150);
        on_threads(cluster, |number, direct| {
            let can = direct.capabilities();
            for _ in 0..each {
                while direct.compare_swap(lock, 0, number + 1).unwrap() != 0 {
                    thread::yield_now();
                }
                let count = direct.read(counter, 1).unwrap()[0];
                let body = (counter, Verb::Write(direct.buffer(&[count + 1]).unwrap()));
                let unlock = match can.atomic_against_writes {
                    true => Verb::WriteWord(0),
                    false => Verb::CompareSwap { expected: number + 1, new: 0 },
                };
                if can.ordered_writes {
                    // Both at once: the unlock takes effect after the count.
                    direct.all([body, (lock, unlock)]).into_iter().for_each(|outcome| drop(outcome.unwrap()));
                } else {
                    written(direct.one(body.0, body.1)).unwrap();
                    direct.one(lock, unlock).unwrap();
                }
            }
        });
        let direct = Direct::new(cluster, 9).unwrap();
        assert_eq!(direct.read(counter, 1).unwrap(), [each * THREADS], "two held the lock at the same time");
    });
}

/// WRITEs during which others must have read, before it is enough.
const MET_MIN: u64 = 16;

#[test]
fn words_are_whole() {
    on_each("whole words", |cluster| {
        let place = at(cluster, 0, 64);
        let (over, reads) = (AtomicBool::new(false), AtomicU64::new(0));
        Direct::new(cluster, 5).unwrap().write(place, &[0; BODY_WORDS]).unwrap();
        let found = on_threads(cluster, |number, direct| {
            let (mut met, mut mixed) = (0, 0);
            if number == 0 {
                let _over = Over(&over);
                let (mut round, deadline) = (0, Instant::now() + PATIENCE);
                // For longer, if nobody else has begun yet.
                while round < rounds(400) || met < MET_MIN && Instant::now() < deadline {
                    let word = if round % 2 == 0 { u64::MAX } else { 0 };
                    let before = reads.load(Ordering::Relaxed);
                    direct.write(place, &[word; BODY_WORDS]).unwrap();
                    met += u64::from(reads.load(Ordering::Relaxed) != before);
                    round += 1;
                }
            }
            while !over.load(Ordering::Acquire) {
                let words = direct.read(place, BODY_WORDS).unwrap();
                assert!(words.iter().all(|&word| word == 0 || word == u64::MAX), "torn within a word: {words:x?}");
                mixed += u64::from(words.iter().any(|&word| word != words[0]));
                reads.fetch_add(1, Ordering::Relaxed);
            }
            [met, mixed]
        });
        let [met, mixed] = [0, 1].map(|index| found.iter().map(|counts| counts[index]).sum::<u64>());
        println!("  {mixed} READs mixed two WRITEs; others read during {met} WRITEs");
        assert!(met > 0, "nobody has read during a WRITE");
    });
}

/// Rounds in which an endpoint does not read back what it has just posted: a WRITE of several lines, a word, and an atomic.
fn own_disorder(cluster: &Cluster) -> u64 {
    let direct = Direct::new(cluster, 3).unwrap();
    let mut disorder = 0;
    for round in 1..=rounds(300) {
        let (body, word, sum) = (at(cluster, 0, 128), at(cluster, 0, 256), at(cluster, 0, 257));
        let read = |words: usize| Verb::Read(direct.buffer(&vec![0; words]).unwrap());
        let requests = [
            (body, Verb::Write(direct.buffer(&[round; BODY_WORDS]).unwrap())),
            (word, Verb::WriteWord(round)),
            (sum, Verb::FetchAdd(1)),
            (body, read(BODY_WORDS)),
            (word, read(2)),
        ];
        let mut outcomes = direct.all(requests);
        let Done::Read(words) = outcomes.pop().unwrap().unwrap() else { panic!("a READ gives its buffer") };
        let Done::Read(body) = outcomes.pop().unwrap().unwrap() else { panic!("a READ gives its buffer") };
        disorder += u64::from(*words != [round, round] || *body != [round; BODY_WORDS]);
    }
    disorder
}

/// What endpoints saw of a word and of what had been posted before it, while another wrote them.
#[derive(Default)]
struct Seen {
    /// Times that the word had changed since it was last read.
    news: AtomicU64,
    /// Times that the word was there, and what was posted before it was not.
    disorder: AtomicU64,
}

/// Writes and watches for a number of rounds; for longer until that has been seen which `enough` asks for, since on a
/// busy machine a writer may be done before anyone else has begun.
fn others_see(cluster: &Cluster, enough: impl Fn(&Seen) -> bool + Sync) -> Seen {
    let (body, word) = (at(cluster, 1, 128), at(cluster, 1, 256));
    let (over, seen) = (AtomicBool::new(false), Seen::default());
    on_threads(cluster, |number, direct| {
        if number == 0 {
            let _over = Over(&over);
            let (mut in_flight, mut round) = (0, 0);
            let deadline = Instant::now() + PATIENCE;
            loop {
                round += 1;
                let is_last = round >= rounds(400) && (enough(&seen) || Instant::now() > deadline);
                direct.ring([
                    (body, Verb::Write(direct.buffer(&[round; BODY_WORDS]).unwrap())),
                    (word, Verb::WriteWord(round)),
                ]);
                in_flight += 2;
                // Some in flight, not all of them.
                let stay = if is_last { 0 } else { 8 };
                while in_flight > stay {
                    for completion in direct.poll() {
                        written(completion.outcome).unwrap();
                        in_flight -= 1;
                    }
                    thread::yield_now();
                }
                if is_last {
                    break;
                }
            }
        }
        let mut last = 0;
        while !over.load(Ordering::Acquire) {
            let flag = direct.read(word, 1).unwrap()[0];
            let words = direct.read(body, BODY_WORDS).unwrap();
            seen.disorder.fetch_add(u64::from(words.iter().any(|&word| word < flag)), Ordering::Relaxed);
            seen.news.fetch_add(u64::from(flag != last), Ordering::Relaxed);
            last = flag;
        }
    });
    seen
}

#[test]
fn writes_and_atomics_take_effect_in_order() {
    on_each("order", |cluster| {
        if !Direct::new(cluster, 1).unwrap().capabilities().ordered_writes {
            return;
        }
        assert_eq!(own_disorder(cluster), 0, "an endpoint did not read what it had posted before");
        let mut seen = others_see(cluster, |seen| seen.news.load(Ordering::Relaxed) >= 16);
        assert!(*seen.news.get_mut() > 0, "nobody has seen anything");
        assert_eq!(*seen.disorder.get_mut(), 0, "another endpoint saw a later WRITE before an earlier one");
    });
}

#[test]
fn the_last_of_many_writes_stays() {
    on_each("the last write", |cluster| {
        let direct = Direct::new(cluster, 1).unwrap();
        if !direct.capabilities().ordered_writes {
            return;
        }
        for round in 0..rounds(40) {
            let place = at(cluster, (round % SERVERS as u64) as u16, 17);
            let writes = (0..100).map(|count| (place, Verb::WriteWord(round * 100 + count)));
            direct.all(writes).into_iter().for_each(|outcome| written(outcome).unwrap());
            assert_eq!(direct.read(place, 1).unwrap(), [round * 100 + 99]);
        }
    });
}

#[test]
fn control_disorder_is_found() {
    if !Backend::each().contains(&Backend::Mem) {
        return println!("skipped: only mem can be told to keep no order");
    }
    let cluster = || Cluster::start(Backend::Mem, SERVERS, SERVER_BYTES, FabricProfile::Weak).unwrap();
    assert!(own_disorder(&cluster()) > 0, "no disorder on a fabric without order");
    let mut seen = others_see(&cluster(), |seen| seen.disorder.load(Ordering::Relaxed) > 0);
    assert!(*seen.disorder.get_mut() > 0, "no disorder on a fabric without order");
}
