//! Who waits for a log: the operations of a worker as one [`Group`], and the groups in a [`Line`]. The first to be noted has a task of its
//! worker write batches, as long as others of that worker wait: it *leads*.

use std::{
    future::poll_fn,
    task::{Poll, Waker},
};

use smallvec::SmallVec;

use super::Log;
use crate::{
    error::Error,
    sync::{Arc, Mutex, lock},
    worker::Handle,
};

/// Operations of one worker that wait for batches of a log.
#[derive(Debug, Default)]
pub struct Arrivals(Arc<Group>);

/// Those who wait, each for a batch.
#[derive(Debug, Default)]
pub struct Group(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    /// Whether the group is in the line. Who finds that it is not has to see to it.
    is_noted: bool,
    operations: Vec<(u64, Waker)>,
}

impl Group {
    /// Joins; true if the group is to be [noted](Line::note).
    pub fn join(&self, batch: u64, waker: &Waker) -> bool {
        let waiting = &mut *lock(&self.0);
        if !waiting.operations.iter().any(|(joined, other)| *joined == batch && other.will_wake(waker)) {
            waiting.operations.push((batch, waker.clone()));
        }
        !std::mem::replace(&mut waiting.is_noted, true)
    }

    /// Wakes those who wait for this batch or an earlier one; whether others are left, so that it stays noted.
    fn wake(&self, arrived: u64) -> bool {
        let mut woken = SmallVec::<[Waker; 16]>::new();
        let is_left = {
            let Waiting { is_noted, operations } = &mut *lock(&self.0);
            let mut index = 0;
            while index < operations.len() {
                match operations[index].0 <= arrived {
                    true => woken.push(operations.swap_remove(index).1),
                    false => index += 1,
                }
            }
            *is_noted = !operations.is_empty();
            *is_noted
        };
        woken.into_iter().for_each(Waker::wake);
        is_left
    }
}

/// The groups that wait for a log.
#[derive(Debug, Default)]
pub struct Line(Mutex<Noted>);

#[derive(Debug, Default)]
struct Noted {
    groups: Vec<Arc<Group>>,
    is_led: bool,
}

impl Line {
    /// Adds a group; true if nobody leads: then the caller does.
    pub fn note(&self, group: &Arc<Group>) -> bool {
        let noted = &mut *lock(&self.0);
        noted.groups.push(Arc::clone(group));
        !std::mem::replace(&mut noted.is_led, true)
    }

    /// For who leads: wakes those who wait for this batch or an earlier one. False if nobody waits any more: then nobody leads. The groups
    /// that are left are in `left`, for the next time.
    pub fn wake(&self, left: &mut Vec<Arc<Group>>, arrived: u64) -> bool {
        loop {
            {
                let noted = &mut *lock(&self.0);
                left.append(&mut noted.groups);
                noted.is_led = !left.is_empty();
                if !noted.is_led {
                    return false;
                }
            }
            left.retain(|group| group.wake(arrived));
            if !left.is_empty() {
                return true;
            }
        }
    }

    /// For who leads: somebody else does from now on, of those who are left, or of those to come.
    pub fn hand_over(&self, mut left: Vec<Arc<Group>>) {
        {
            let noted = &mut *lock(&self.0);
            left.append(&mut noted.groups);
            noted.is_led = false;
        }
        // They look, and join again.
        for group in left {
            group.wake(u64::MAX);
        }
    }

    /// Whether somebody leads.
    pub(super) fn is_led(&self) -> bool {
        lock(&self.0).is_led
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
            if worker.has_ended() {
                return Poll::Pending;
            }
            if self.0.join(batch, cx.waker()) {
                log.note(worker, &self.0);
            }
            // It may have arrived just before. Who leads looks again only after the next one.
            log.outcome(batch, failures).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::Wake,
    };

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_is_woken_once_by_its_batch_and_the_next_one_to_join_leads() {
        let (line, group, mut left) = (Line::default(), Arc::<Group>::default(), Vec::new());
        let counts = [(); 3].map(|()| std::sync::Arc::<Count>::default());
        let wakers = counts.each_ref().map(|count| Waker::from(std::sync::Arc::clone(count)));
        let woken = || counts.each_ref().map(|count| count.0.load(Ordering::Relaxed));
        let join = |batch, index: usize| group.join(batch, &wakers[index]);
        assert!(join(1, 0) && line.note(&group), "nobody leads");
        assert_eq!([join(1, 1), join(1, 1), join(2, 2)], [false; 3]);
        assert!(line.wake(&mut left, 1), "one is left");
        assert_eq!(woken(), [1, 1, 0]);
        assert!(!join(2, 0));
        assert!(!line.wake(&mut left, 2) && !line.is_led());
        assert_eq!(woken(), [2, 1, 1]);
        assert!(join(3, 1) && line.note(&group));
        line.hand_over(left);
        assert_eq!(woken(), [2, 2, 1]);
        assert!(join(3, 1) && line.note(&group), "who joins again leads");
    }
}
