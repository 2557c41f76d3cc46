//! One worker's operations that wait for a log: the log wakes all of them at once, and is locked for one of them.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Poll, Wake, Waker},
};

use super::Log;
use crate::{
    error::Error,
    sync::{Mutex, lock},
    worker::Handle,
};

/// Operations of one worker that wait for batches of a log.
#[derive(Debug)]
pub struct Arrivals {
    group: Arc<Group>,
    waker: Waker,
}

/// Those who wait, as one waker.
#[derive(Debug, Default)]
pub struct Group(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// Whether the group is going to be woken. Who finds that it is not has to see to it.
    is_noted: bool,
    wakers: Vec<Waker>,
}

impl Group {
    /// Joins; true if the group is not going to be woken yet: then the caller sees to it.
    pub fn join(&self, waker: &Waker) -> bool {
        let waiting = &mut *lock(&self.0);
        if !waiting.wakers.iter().any(|joined| joined.will_wake(waker)) {
            waiting.wakers.push(waker.clone());
        }
        !std::mem::replace(&mut waiting.is_noted, true)
    }
}

impl Wake for Group {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Waiting { wakers, .. } = std::mem::take(&mut *lock(&self.0));
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Default for Arrivals {
    fn default() -> Self {
        let group = Arc::<Group>::default();
        Self { waker: Arc::clone(&group).into(), group }
    }
}

impl Arrivals {
    /// [`Log::arrival`].
    ///
    /// # Errors
    /// As [`Log::arrival`].
    pub async fn arrival(&self, log: &Log, worker: &Handle, batch: u64) -> Result<(), Error> {
        let failures = log.failures();
        poll_fn(|cx| {
            if let Some(outcome) = log.outcome(batch, failures) {
                return Poll::Ready(outcome);
            }
            if self.group.join(cx.waker()) && !log.wait(worker, batch, &self.waker) {
                // It has arrived meanwhile, and nobody is going to wake those who have joined.
                self.waker.wake_by_ref();
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn all_who_have_joined_are_woken_once_and_the_next_one_sees_to_it_again() {
        let (group, counts) = (Arc::<Group>::default(), [Arc::<Count>::default(), Arc::default()]);
        let wakers = counts.each_ref().map(|count| Waker::from(Arc::clone(count)));
        assert!(group.join(&wakers[0]));
        assert!(!group.join(&wakers[1]) && !group.join(&wakers[1]));
        Waker::from(Arc::clone(&group)).wake();
        assert_eq!(counts.each_ref().map(|count| count.0.load(Ordering::Relaxed)), [1, 1]);
        assert!(group.join(&wakers[1]));
        group.wake_by_ref();
        assert_eq!(counts.each_ref().map(|count| count.0.load(Ordering::Relaxed)), [1, 2]);
    }
}
