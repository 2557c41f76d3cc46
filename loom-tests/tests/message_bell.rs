//! The bell of a memory server's thread: no wake-up is lost between one who has news and one who goes to sleep.
//!
//! The sleeper announces its sleep, then looks for news ([`Bell::settle`]); whoever has news writes them, then looks whether
//! somebody sleeps ([`Bell::is_to_be_rung`]). In the end the sleeper either saw the news, or was woken.
//!
//! Broken variants: either side without its fence; a sleeper that looks for news before it announces its sleep.
#![cfg(loom)]

use std::sync::Arc;

use farlink_loom_tests::{Seen, explore, refuse, run};
use farlink_runtime::{
    fabric::mem::bell::Bell,
    sync::{AtomicU64, Ordering, fence},
};

struct Words {
    bell: AtomicU64,
    news: AtomicU64,
}

/// Goes to sleep unless there are news; true if it did.
type Sleeper = fn(&Words) -> bool;
/// Looks whether to wake somebody, after the news.
type Ringer = fn(&Words) -> bool;

fn settle(words: &Words) -> bool {
    Bell::new(&words.bell).settle(|| words.news.load(Ordering::Acquire) != 0)
}

fn ring(words: &Words) -> bool {
    Bell::new(&words.bell).is_to_be_rung()
}

fn model(sleeper: Sleeper, ringers: &'static [Ringer], slept: &Seen, missed: &Seen) {
    let words = Arc::new(Words { bell: AtomicU64::new(0), news: AtomicU64::new(0) });
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
    assert!(!sleeps || rang == 1 || !Bell::new(&words.bell).is_asleep(), "a wake-up was lost");
    if sleeps {
        slept.mark();
    } else {
        missed.mark();
    }
}

#[test]
fn no_wake_up_is_lost() {
    const RINGERS: [&[Ringer]; 2] = [&[ring], &[ring, ring]];
    for ringers in RINGERS {
        let (slept, missed) = (Seen::new(), Seen::new());
        let seen = (slept.clone(), missed.clone());
        explore("bell", move || model(settle, ringers, &seen.0, &seen.1));
        slept.require("somebody falls asleep and is woken");
        missed.require("news come before the sleep");
    }
}

fn settle_without_fence(words: &Words) -> bool {
    words.bell.store(1, Ordering::Release);
    words.news.load(Ordering::Acquire) == 0
}

fn look_first(words: &Words) -> bool {
    let quiet = words.news.load(Ordering::Acquire) == 0;
    words.bell.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    quiet
}

fn ring_without_fence(words: &Words) -> bool {
    words.bell.load(Ordering::Acquire) == 1 && words.bell.swap(0, Ordering::AcqRel) == 1
}

#[test]
fn broken_bells_lose_a_wake_up() {
    let sleepers: [(&str, Sleeper, &'static [Ringer]); 3] = [
        ("bell, settled without a fence", settle_without_fence, &[ring]),
        ("bell, looked at before the announcement", look_first, &[ring]),
        ("bell, rung without a fence", settle, &[ring_without_fence]),
    ];
    for (name, sleeper, ringers) in sleepers {
        refuse(name, "a wake-up was lost", move || model(sleeper, ringers, &Seen::new(), &Seen::new()));
    }
}
