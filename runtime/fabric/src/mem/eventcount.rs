//! The eventcount of a memory server's endpoint: no wake-up is lost, and a notification costs a load while nobody sleeps.
//!
//! The word says whether the endpoint's thread sleeps. The sleeper announces it, *then* looks for news once more, and sleeps
//! while the word still says so. Who has news publishes them, *then* looks at the word. Both put a sequentially consistent
//! fence between the two, so one of them sees the other: Dekker's pattern. The word lies in memory that processes share;
//! the sleeping is the kernel's (a futex).

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering, fence};

const AWAKE: u64 = 0;
const ASLEEP: u64 = 1;

/// A word that one thread sleeps at.
#[derive(Debug, Clone, Copy)]
pub struct Eventcount<'a>(&'a AtomicU64);

impl<'a> Eventcount<'a> {
    /// The eventcount whose word this is; 0 at first.
    pub fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// To be called after the news have been written. True if there is a sleeper, whom the caller must wake: see
    /// [`Eventcount::notify`].
    #[inline]
    pub fn take_sleeper(self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) == ASLEEP && self.0.swap(AWAKE, Ordering::AcqRel) == ASLEEP
    }

    /// To be called after the news have been written: wakes the sleeper, if there is one.
    #[inline]
    pub fn notify(self) {
        if self.take_sleeper() {
            wake(self.0);
        }
    }

    /// To be called after the news have been written: ends the sleep whatever the word says. Others who share it may have written
    /// anything there.
    pub fn end_sleep(self) {
        // Who announces a sleep behind this sees the news.
        fence(Ordering::SeqCst);
        self.0.store(AWAKE, Ordering::Release);
        wake(self.0);
    }

    /// Announces the sleep. True if it may begin: `has_news` looked after the announcement and found none.
    pub fn prepare_wait(self, mut has_news: impl FnMut() -> bool) -> bool {
        self.0.store(ASLEEP, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let quiet = !has_news();
        if !quiet {
            self.cancel_wait();
        }
        quiet
    }

    /// Whether the sleep has not been ended by a notification.
    pub fn is_asleep(self) -> bool {
        self.0.load(Ordering::Acquire) == ASLEEP
    }

    /// Takes the announcement back.
    pub fn cancel_wait(self) {
        self.0.store(AWAKE, Ordering::Relaxed);
    }

    /// Sleeps until somebody notifies, at most for `limit`; not at all if there are news.
    pub fn wait(self, limit: Duration, has_news: impl FnMut() -> bool) {
        if self.prepare_wait(has_news) {
            if self.is_asleep() {
                wait(self.0, limit);
            }
            self.cancel_wait();
        }
    }
}

#[cfg(all(target_os = "linux", target_endian = "little", not(any(loom, miri))))]
fn wait(word: &AtomicU64, limit: Duration) {
    let limit = libc::timespec {
        tv_sec: limit.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    // SAFETY: the kernel reads four bytes at the word's address, its low half, and the time, which both outlive the call. A
    // word that changed in between, a signal or a spurious wake-up only end the sleep early.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, ASLEEP as u32, &raw const limit);
    }
}

#[cfg(all(target_os = "linux", target_endian = "little", not(any(loom, miri))))]
fn wake(word: &AtomicU64) {
    // SAFETY: the kernel uses the address only to find sleepers.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1);
    }
}

/// Where there is no futex: looks again and again, and rests in between.
#[cfg(not(all(target_os = "linux", target_endian = "little", not(any(loom, miri)))))]
fn wait(word: &AtomicU64, limit: Duration) {
    let step = Duration::from_micros(200);
    let mut waited = Duration::ZERO;
    while word.load(Ordering::Acquire) == ASLEEP && waited < limit {
        std::thread::sleep(step);
        waited += step;
    }
}

#[cfg(not(all(target_os = "linux", target_endian = "little", not(any(loom, miri)))))]
fn wake(_word: &AtomicU64) {}

#[cfg(all(test, not(any(loom, miri))))]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_ends_though_somebody_has_overwritten_its_word() {
        let word = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(|| Eventcount::new(&word).wait(Duration::from_secs(3600), || false));
            while !Eventcount::new(&word).is_asleep() {
                std::thread::yield_now();
            }
            word.store(7, Ordering::Relaxed);
            while !sleeper.is_finished() {
                Eventcount::new(&word).end_sleep();
                std::thread::yield_now();
                word.store(7, Ordering::Relaxed);
            }
        });
    }
}
