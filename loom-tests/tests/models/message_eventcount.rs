//! The eventcount of a memory server's thread: no wake-up is lost between one who has news and one who goes to sleep.
//!
//! The sleeper announces its sleep, then looks for news ([`Eventcount::prepare_wait`]); whoever has news writes them, then looks whether
//! somebody sleeps ([`Eventcount::take_sleeper`]), or ends the sleep unseen ([`Eventcount::end_sleep`]). In the end the sleeper either saw
//! the news, or was woken.
//!
//! Broken variants: any of the three without its fence; a sleeper that looks for news before it announces its sleep.

use std::sync::Arc;

use farlink_loom_tests::{Seen, explore, refuse, run};
use farlink_runtime::{
    fabric::mem::eventcount::Eventcount,
    sync::{AtomicU64, Ordering, fence},
};

struct Words {
    eventcount: AtomicU64,
    news: AtomicU64,
}

/// Goes to sleep unless there are news; true if it did.
type Sleeper = fn(&Words) -> bool;
/// Looks whether to wake somebody, after the news.
type Ringer = fn(&Words) -> bool;

fn prepare_wait(words: &Words) -> bool {
    Eventcount::new(&words.eventcount).prepare_wait(|| words.news.load(Ordering::Acquire) != 0)
}

fn ring(words: &Words) -> bool {
    Eventcount::new(&words.eventcount).take_sleeper()
}

/// Wakes whoever sleeps, without a look.
fn end_sleep(words: &Words) -> bool {
    Eventcount::new(&words.eventcount).end_sleep();
    false
}

fn model(sleeper: Sleeper, ringers: &'static [Ringer], slept: &Seen, missed: &Seen) {
    let words = Arc::new(Words { eventcount: AtomicU64::new(0), news: AtomicU64::new(0) });
    let of_sleeper = Arc::clone(&words);
    let sleeping = run(move || sleeper(&of_sleeper));
    let ringing: Vec<_> = ringers
        .iter()
        .map(|ringer| {
            let words = Arc::clone(&words);
            run(move || {
                words.news.fetch_add(1, Ordering::Release);
                ringer(&words)
            })
        })
        .collect();
    let rang = ringing.into_iter().map(|ringer| u64::from(ringer.join())).sum::<u64>();
    let sleeps = sleeping.join();
    assert!(rang <= 1, "two believe to have woken one sleeper");
    assert!(!sleeps || rang == 1 || !Eventcount::new(&words.eventcount).is_asleep(), "a wake-up was lost");
    if sleeps {
        slept.mark();
    } else {
        missed.mark();
    }
}

#[test]
fn no_wake_up_is_lost() {
    const RINGERS: [&[Ringer]; 4] = [&[ring], &[ring, ring], &[end_sleep], &[ring, end_sleep]];
    for ringers in RINGERS {
        let (slept, missed) = (Seen::new(), Seen::new());
        let seen = (slept.clone(), missed.clone());
        explore("eventcount", move || model(prepare_wait, ringers, &seen.0, &seen.1));
        slept.require("somebody falls asleep and is woken");
        missed.require("news come before the sleep");
    }
}

fn prepare_wait_without_fence(words: &Words) -> bool {
    words.eventcount.store(1, Ordering::Relaxed);
    let quiet = words.news.load(Ordering::Acquire) == 0;
    if !quiet {
        Eventcount::new(&words.eventcount).cancel_wait();
    }
    quiet
}

fn look_first(words: &Words) -> bool {
    let quiet = words.news.load(Ordering::Acquire) == 0;
    words.eventcount.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    quiet
}

fn ring_without_fence(words: &Words) -> bool {
    words.eventcount.load(Ordering::Acquire) == 1 && words.eventcount.swap(0, Ordering::AcqRel) == 1
}

fn end_sleep_without_fence(words: &Words) -> bool {
    words.eventcount.store(0, Ordering::Release);
    false
}

#[test]
fn broken_eventcounts_lose_a_wake_up() {
    let sleepers: [(&str, Sleeper, &'static [Ringer]); 4] = [
        ("eventcount, announced without a fence", prepare_wait_without_fence, &[ring]),
        ("eventcount, looked at before the announcement", look_first, &[ring]),
        ("eventcount, rung without a fence", prepare_wait, &[ring_without_fence]),
        ("eventcount, ended without a fence", prepare_wait, &[end_sleep_without_fence]),
    ];
    for (name, sleeper, ringers) in sleepers {
        refuse(name, "a wake-up was lost", move || model(sleeper, ringers, &Seen::new(), &Seen::new()));
    }
}
