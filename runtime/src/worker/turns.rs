//! Whose turn it is to change something, among the tasks of one worker.
//!
//! Of several that swap one word from what they remember of it only the first succeeds; the others have sent requests for nothing.
//! So they come one after another, in the order in which they ask, and each goes on from what the one before has found. It is advice, never
//! protection: other workers swap as they like.

use std::{
    cell::RefCell,
    future::poll_fn,
    task::{Poll, Waker},
};

use super::Handle;
use crate::ptr::RemotePtr;

/// Who has turns or waits for them, in the order in which they came, so that none takes the next turn before who waits has had one: as few
/// as operations are under way.
pub(super) type Turns = RefCell<Vec<Place>>;

/// The first one of an address has the turn.
#[derive(Debug)]
pub(super) struct Place {
    at: RemotePtr,
    /// Which of those that are there it is; later ones have greater numbers.
    number: u64,
    waker: Option<Waker>,
}

/// A turn, or a place in the queue; dropped, it is the next one's. See [`Handle::turn`].
#[derive(Debug)]
pub struct Turn {
    worker: Handle,
    at: RemotePtr,
    number: u64,
    has_waited: bool,
}

impl Turn {
    /// Whether another task had it when it was asked for: what was known then is probably old.
    pub fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Whether it is its turn; if not, who is to be woken then.
    fn poll(&self, waker: &Waker) -> Poll<()> {
        let mut places = self.worker.0.turns.borrow_mut();
        let ours =
            places.iter().position(|place| place.number == self.number).expect("it has a place until it is dropped");
        if places[..ours].iter().all(|place| place.at != self.at) {
            return Poll::Ready(());
        }
        places[ours].waker = Some(waker.clone());
        Poll::Pending
    }
}

impl Handle {
    /// Waits until no other task of this worker has the turn for what stands at an address. Suspends, and sends nothing. Who has a turn
    /// waits for no other one: two who wait for each other's would do so for ever. And who waits is polled, or dropped: others wait behind it.
    pub async fn turn(&self, at: RemotePtr) -> Turn {
        let turn = {
            let mut places = self.0.turns.borrow_mut();
            let number = places.last().map_or(0, |last| last.number + 1);
            let has_waited = places.iter().any(|place| place.at == at);
            places.push(Place { at, number, waker: None });
            Turn { worker: self.clone(), at, number, has_waited }
        };
        poll_fn(|cx| turn.poll(cx.waker())).await;
        turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut places = self.worker.0.turns.borrow_mut();
        let ours = places.iter().position(|place| place.number == self.number);
        ours.into_iter().for_each(|ours| drop(places.remove(ours)));
        let next = places.iter_mut().find(|place| place.at == self.at).and_then(|next| next.waker.take());
        drop(places);
        next.into_iter().for_each(Waker::wake);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{cell::Cell, future::Future, rc::Rc, task::Context};

    use super::*;
    use crate::{
        compute::{ComputeOptions, ComputeServer, Maintenance},
        fabric::mem::MemOptions,
        ptr::ServerId,
        worker::Worker,
    };

    fn worker() -> (Worker, ComputeServer, RemotePtr) {
        let memory = crate::server::in_process(1, 4 << 20, MemOptions::default()).unwrap();
        let options = ComputeOptions { maintenance: Maintenance::Manual, seed: 1, ..ComputeOptions::default() };
        let compute = ComputeServer::join(std::sync::Arc::new(memory), options).unwrap();
        (compute.worker().unwrap(), compute, RemotePtr::new(ServerId::new(0).unwrap(), 1 << 20).unwrap())
    }

    #[test]
    fn who_takes_turns_again_and_again_keeps_nobody_waiting() {
        let (worker, _compute, at) = worker();
        let rounds = Rc::new(Cell::new(0));
        let (greedy, counts) = (Handle::clone(&worker), Rc::clone(&rounds));
        drop(worker.spawn(async move {
            for round in 1..100 {
                let turn = greedy.turn(at).await;
                greedy.yield_now().await;
                counts.set(round);
                drop(turn);
            }
        }));
        let patient = Handle::clone(&worker);
        let (waited, rounds) = worker.block_on(worker.spawn(async move {
            let turn = patient.turn(at).await;
            (turn.has_waited(), rounds.get())
        }));
        assert!(waited && rounds == 1, "it has waited for {rounds} turns of another one");
    }

    #[test]
    fn who_is_given_up_while_it_waits_is_passed_over() {
        let (worker, _compute, at) = worker();
        let mut context = Context::from_waker(Waker::noop());
        let handle = Handle::clone(&worker);
        let [mut first, mut second, mut third, mut fourth] = std::array::from_fn(|_| Box::pin(handle.turn(at)));
        let Poll::Ready(turn) = first.as_mut().poll(&mut context) else { panic!("it is nobody's turn") };
        for waiting in [&mut second, &mut third, &mut fourth] {
            assert!(waiting.as_mut().poll(&mut context).is_pending());
        }
        drop((second, turn));
        assert!(fourth.as_mut().poll(&mut context).is_pending(), "another one was before");
        // It would have been its turn.
        drop(third);
        assert!(fourth.as_mut().poll(&mut context).is_ready());
        assert!(worker.0.turns.borrow().is_empty(), "it is nobody's turn");
    }
}
