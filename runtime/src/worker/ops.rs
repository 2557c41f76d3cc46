//! Requests in flight: which future waits for which completion.

use std::{
    cell::RefCell,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use super::{Handle, executor::Executor};
use crate::{
    buffer::Buffer,
    error::Error,
    fabric::{Completion, Done, Error as FabricError, Ticket},
    messaging::Waiter,
    ptr::RemotePtr,
};

#[derive(Debug)]
enum Slot {
    Free,
    /// With whom the completion makes ready.
    Waiting(Option<Waiter>),
    Done(Result<Done, Box<FabricError>>),
    /// The future is gone; the completion frees the slot.
    Abandoned,
}

#[derive(Debug, Default)]
pub(super) struct InFlight {
    slots: RefCell<(Vec<Slot>, Vec<usize>)>,
}

impl InFlight {
    pub(super) fn open(&self) -> usize {
        let (slots, free) = &mut *self.slots.borrow_mut();
        match free.pop() {
            Some(index) => {
                slots[index] = Slot::Waiting(None);
                index
            }
            None => {
                slots.push(Slot::Waiting(None));
                slots.len() - 1
            }
        }
    }

    pub(super) fn complete(&self, completion: Completion, executor: &Executor) {
        let waiter = {
            let (slots, free) = &mut *self.slots.borrow_mut();
            let index = completion.ticket.0 as usize;
            match std::mem::replace(&mut slots[index], Slot::Done(completion.outcome)) {
                Slot::Waiting(waiter) => waiter,
                Slot::Abandoned => {
                    slots[index] = Slot::Free;
                    free.push(index);
                    None
                }
                Slot::Free | Slot::Done(_) => unreachable!("an endpoint completes each request once"),
            }
        };
        if let Some(waiter) = waiter {
            waiter.wake(executor);
        }
    }

    fn poll(&self, index: usize, cx: &Context<'_>, executor: &Executor) -> Poll<Result<Done, Box<FabricError>>> {
        let (slots, free) = &mut *self.slots.borrow_mut();
        if let Slot::Waiting(waiter) = &mut slots[index] {
            *waiter = Some(Waiter::of(cx, executor));
            return Poll::Pending;
        }
        let Slot::Done(outcome) = std::mem::replace(&mut slots[index], Slot::Free) else {
            unreachable!("a posted future holds its slot until it is ready")
        };
        free.push(index);
        Poll::Ready(outcome)
    }

    fn abandon(&self, index: usize) {
        let (slots, free) = &mut *self.slots.borrow_mut();
        match slots[index] {
            Slot::Waiting(_) => slots[index] = Slot::Abandoned,
            _ => {
                slots[index] = Slot::Free;
                free.push(index);
            }
        }
    }
}

/// A request's name in its completion.
pub(super) fn ticket(slot: usize) -> Ticket {
    Ticket(slot as u64)
}

/// Why a request failed: a connection may be lost because others took this compute server for dead.
#[cold]
fn judged(handle: &Handle, error: FabricError) -> Box<Error> {
    Box::new(handle.check_standing().err().unwrap_or_else(|| error.into()))
}

/// A request that is posted again and again.
pub(crate) type Repeated<T> = Pin<Box<dyn Future<Output = Result<T, Box<Error>>>>>;

/// What a completion turns into.
pub trait FromDone: Sized {
    /// What it takes to post the request again, if that does no harm.
    type Again: Copy + std::fmt::Debug;

    /// The request's result.
    fn from_done(done: Done) -> Self;

    /// Posts a request again that failed with `error`, until it is carried out.
    ///
    /// # Errors
    /// The error, if it must not be posted again.
    fn repeat(handle: &Handle, again: Self::Again, error: Box<Error>) -> Result<Repeated<Self>, Box<Error>>;
}

/// A READ.
#[derive(Debug, Clone, Copy)]
pub struct ReadAgain {
    pub(super) at: RemotePtr,
    pub(super) words: usize,
}

fn read(done: Done) -> Buffer {
    let Done::Read(buffer) = done else { unreachable!("a READ completes with its buffer") };
    buffer
}

impl FromDone for Buffer {
    type Again = ReadAgain;

    fn from_done(done: Done) -> Self {
        read(done)
    }

    #[cold]
    fn repeat(handle: &Handle, again: ReadAgain, error: Box<Error>) -> Result<Repeated<Self>, Box<Error>> {
        Ok(Box::pin(read_again(handle.clone(), again, error)))
    }
}

async fn read_again(
    handle: Handle,
    ReadAgain { at, words }: ReadAgain,
    mut error: Box<Error>,
) -> Result<Buffer, Box<Error>> {
    let mut attempt = 0;
    loop {
        handle.before_trying_again(error, &mut attempt).await?;
        match handle.read_once(at, words).await {
            Ok(ReadOnce(buffer)) => return Ok(buffer),
            Err(failed) => error = failed,
        }
    }
}

/// What a READ that is not posted again has brought.
#[derive(Debug)]
pub(crate) struct ReadOnce(pub(crate) Buffer);

impl FromDone for ReadOnce {
    type Again = ();

    fn from_done(done: Done) -> Self {
        Self(read(done))
    }

    fn repeat(_: &Handle, (): (), error: Box<Error>) -> Result<Repeated<Self>, Box<Error>> {
        Err(error)
    }
}

impl FromDone for () {
    type Again = ();

    fn from_done(_: Done) {}

    fn repeat(_: &Handle, (): (), error: Box<Error>) -> Result<Repeated<Self>, Box<Error>> {
        Err(error)
    }
}

impl FromDone for u64 {
    type Again = ();

    fn from_done(done: Done) -> Self {
        let Done::Previous(word) = done else { unreachable!("an atomic completes with the previous word") };
        word
    }

    fn repeat(_: &Handle, (): (), error: Box<Error>) -> Result<Repeated<Self>, Box<Error>> {
        Err(error)
    }
}

/// A posted request; resolves when its completion arrives. The request goes out with the worker's next doorbell whether
/// or not this is awaited. Dropping it forgets the result; the buffer stays with the endpoint until the completion.
#[must_use = "await it to know that the request has completed"]
pub struct Posted<T: FromDone> {
    state: PostedState<T>,
}

enum PostedState<T: FromDone> {
    Pending { handle: Handle, slot: usize, posted_at: u64, again: T::Again },
    Repeated(Repeated<T>),
    Refused(Option<Box<Error>>),
    SlotGuard,
}

impl<T: FromDone> std::fmt::Debug for Posted<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state: &dyn std::fmt::Debug = match &self.state {
            PostedState::Pending { slot, .. } => slot,
            PostedState::Repeated(_) => &"posted again",
            PostedState::Refused(error) => error,
            PostedState::SlotGuard => &"ready",
        };
        f.debug_tuple("Posted").field(state).finish()
    }
}

impl<T: FromDone> Posted<T> {
    pub(super) fn pending(handle: Handle, slot: usize, posted_at: u64, again: T::Again) -> Self {
        Self { state: PostedState::Pending { handle, slot, posted_at, again } }
    }

    pub(super) fn refused(error: Error) -> Self {
        Self { state: PostedState::Refused(Some(Box::new(error))) }
    }
}

// Nothing in it is pinned.
impl<T: FromDone> Unpin for Posted<T> {}

impl<T: FromDone> Future for Posted<T> {
    type Output = Result<T, Box<Error>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = loop {
            let repeated = match &mut self.state {
                PostedState::Pending { handle, slot, posted_at, again } => {
                    match handle.in_flight().poll(*slot, cx, handle.executor()) {
                        Poll::Ready(Ok(done)) => {
                            handle.executor().trips.ends(*posted_at);
                            break Ok(T::from_done(done));
                        }
                        Poll::Ready(Err(error)) => T::repeat(handle, *again, judged(handle, *error)),
                        Poll::Pending => return Poll::Pending,
                    }
                }
                PostedState::Repeated(repeated) => match repeated.as_mut().poll(cx) {
                    Poll::Ready(outcome) => break outcome,
                    Poll::Pending => return Poll::Pending,
                },
                PostedState::Refused(error) => break Err(error.take().expect("polled again after it was ready")),
                PostedState::SlotGuard => panic!("polled again after it was ready"),
            };
            match repeated {
                Ok(repeated) => self.state = PostedState::Repeated(repeated),
                Err(error) => break Err(error),
            }
        };
        self.state = PostedState::SlotGuard;
        Poll::Ready(outcome)
    }
}

impl<T: FromDone> Drop for Posted<T> {
    fn drop(&mut self) {
        if let PostedState::Pending { handle, slot, .. } = &self.state {
            handle.in_flight().abandon(*slot);
        }
    }
}
