//! Requests in flight: which future waits for which completion.

use std::{
    cell::RefCell,
    future::Future,
    marker::PhantomData,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use super::{Handle, executor::Executor};
use crate::{
    buffer::Buffer,
    error::Error,
    fabric::{Completion, Done, Ticket},
};

#[derive(Debug)]
enum Slot {
    Free,
    Waiting(Waiter),
    Done(Result<Done, Box<Error>>),
    /// The future is gone; the completion frees the slot.
    Abandoned,
}

/// Whom a completion makes ready.
#[derive(Debug)]
pub(crate) enum Waiter {
    Nobody,
    /// A task of the worker, by its number: cheaper than its waker.
    Task(usize),
    Waker(Waker),
}

impl Waiter {
    /// Whoever is being polled with this context.
    pub(crate) fn of(cx: &Context<'_>, executor: &Executor) -> Self {
        match executor.task_of(cx.waker()) {
            Some(task) => Self::Task(task),
            None => Self::Waker(cx.waker().clone()),
        }
    }

    pub(crate) fn wake(self, executor: &Executor) {
        match self {
            Self::Nobody => {}
            Self::Task(index) => executor.set_ready(index),
            Self::Waker(waker) => waker.wake(),
        }
    }
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
                slots[index] = Slot::Waiting(Waiter::Nobody);
                index
            }
            None => {
                slots.push(Slot::Waiting(Waiter::Nobody));
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
                    Waiter::Nobody
                }
                Slot::Free | Slot::Done(_) => unreachable!("an endpoint completes each request once"),
            }
        };
        waiter.wake(executor);
    }

    fn poll(&self, index: usize, cx: &Context<'_>, executor: &Executor) -> Poll<Result<Done, Box<Error>>> {
        let (slots, free) = &mut *self.slots.borrow_mut();
        if let Slot::Waiting(waiter) = &mut slots[index] {
            *waiter = Waiter::of(cx, executor);
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

/// What a completion turns into.
pub(super) trait FromDone {
    fn from_done(done: Done) -> Self;
}

impl FromDone for Buffer {
    fn from_done(done: Done) -> Self {
        let Done::Read(buffer) = done else { unreachable!("a READ completes with its buffer") };
        buffer
    }
}

impl FromDone for () {
    fn from_done(_: Done) {}
}

impl FromDone for u64 {
    fn from_done(done: Done) -> Self {
        let Done::Previous(word) = done else { unreachable!("an atomic completes with the previous word") };
        word
    }
}

/// A posted request; resolves when its completion arrives. The request goes out with the worker's next doorbell whether
/// or not this is awaited. Dropping it forgets the result; the buffer stays with the endpoint until the completion.
#[derive(Debug)]
#[must_use = "await it to know that the request has completed"]
pub struct Posted<T> {
    state: PostedState,
    result: PhantomData<fn() -> T>,
}

#[derive(Debug)]
enum PostedState {
    Pending { handle: Handle, slot: usize },
    Refused(Option<Box<Error>>),
    Taken,
}

impl<T> Posted<T> {
    pub(super) fn pending(handle: Handle, slot: usize) -> Self {
        Self { state: PostedState::Pending { handle, slot }, result: PhantomData }
    }

    pub(super) fn refused(error: Error) -> Self {
        Self { state: PostedState::Refused(Some(Box::new(error))), result: PhantomData }
    }

    pub(super) fn ticket(slot: usize) -> Ticket {
        Ticket(slot as u64)
    }
}

impl<T: FromDone> Future for Posted<T> {
    type Output = Result<T, Box<Error>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = match &mut self.state {
            PostedState::Pending { handle, slot } => match handle.in_flight().poll(*slot, cx, handle.executor()) {
                Poll::Ready(outcome) => outcome.map(T::from_done),
                Poll::Pending => return Poll::Pending,
            },
            PostedState::Refused(error) => Err(error.take().expect("polled again after it was ready")),
            PostedState::Taken => panic!("polled again after it was ready"),
        };
        self.state = PostedState::Taken;
        Poll::Ready(outcome)
    }
}

impl<T> Drop for Posted<T> {
    fn drop(&mut self) {
        if let PostedState::Pending { handle, slot } = &self.state {
            handle.in_flight().abandon(*slot);
        }
    }
}
