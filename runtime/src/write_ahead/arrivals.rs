//! One worker's operations that wait for a log: one of them among all workers', and the others for that one.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
};

use super::Log;
use crate::{error::Error, worker::Handle};

/// Operations of one worker that wait for batches of a log. Only one at a time waits for what other workers do; it wakes the rest.
#[derive(Debug, Default)]
pub struct Arrivals {
    is_led: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
}

/// Waits for all. Whether it ends or is dropped, another one may have to.
struct Lead<'a>(&'a Arrivals);

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.0.is_led.set(false);
        self.0.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl Arrivals {
    /// [`Log::arrival`].
    ///
    /// # Errors
    /// As [`Log::arrival`].
    pub async fn arrival(&self, log: &Log, worker: &Handle, batch: u64) -> Result<(), Error> {
        while !log.has_arrived(batch) {
            if !self.is_led.replace(true) {
                let _lead = Lead(self);
                return log.arrival(worker, batch).await;
            }
            let mut has_waited = false;
            poll_fn(|cx| {
                if std::mem::replace(&mut has_waited, true) {
                    return Poll::Ready(());
                }
                self.waiting.borrow_mut().push(cx.waker().clone());
                Poll::Pending
            })
            .await;
        }
        Ok(())
    }
}
