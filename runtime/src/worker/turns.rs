//! Whose turn it is to change something, among the tasks of one worker.
//!
//! Of several that swap one word from what they remember of it only the first succeeds; the others have sent requests for nothing.
//! So they come one after another, and each goes on from what the one before has found. It is advice, never protection: other
//! workers swap as they like.

use std::{
    cell::RefCell,
    future::poll_fn,
    task::{Poll, Waker},
};

use super::Handle;
use crate::ptr::RemotePtr;

/// What turns are taken for, and who waits for them: as few as operations are under way.
pub(super) type Turns = RefCell<Vec<(RemotePtr, Vec<Waker>)>>;

/// A turn; dropped, it is over. See [`Handle::turn`].
#[derive(Debug)]
pub struct Turn {
    worker: Handle,
    at: RemotePtr,
    has_waited: bool,
}

impl Turn {
    /// Whether another task had it when it was asked for: what was known then is probably old.
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }
}

impl Handle {
    /// Waits until no other task of this worker has the turn for what stands at an address. Suspends, and sends nothing. Not to be
    /// called by who has a turn: two who wait for each other's would do so for ever.
    pub async fn turn(&self, at: RemotePtr) -> Turn {
        let mut has_waited = false;
        poll_fn(|cx| {
            let mut taken = self.0.turns.borrow_mut();
            let Some((_, waiting)) = taken.iter_mut().find(|turn| turn.0 == at) else {
                taken.push((at, Vec::new()));
                return Poll::Ready(());
            };
            has_waited = true;
            if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
        .await;
        Turn { worker: self.clone(), at, has_waited }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut taken = self.worker.0.turns.borrow_mut();
        let index = taken.iter().position(|turn| turn.0 == self.at);
        let waiting = index.map(|index| taken.swap_remove(index).1);
        drop(taken);
        // All: who comes first may have been given up.
        waiting.into_iter().flatten().for_each(Waker::wake);
    }
}
