//! What channels need of the worker that they belong to.

use std::{
    cell::RefCell,
    fmt,
    task::{Context, Waker},
    time::Duration,
};

use farlink_fabric::{
    Capabilities, Endpoint, Error as FabricError, Request, buffer::Buffer, connection::PeerId, ptr::ServerId,
};

use super::Channels;

/// A worker, as its channels see it.
pub trait Host: fmt::Debug {
    /// Its channels. It calls [`Channels::turn`] at every exchange, [`Channels::complete`] with the completions whose tickets
    /// have [`CONNECTION_TICKET`](crate::CONNECTION_TICKET) set, and [`Channels::close`] at its end.
    fn channels(&self) -> &Channels;

    /// Its name at memory servers.
    fn peer_id(&self) -> PeerId;

    /// What its fabric guarantees.
    fn capabilities(&self) -> Capabilities;

    /// Its endpoint, for making and closing connections.
    fn endpoint(&self) -> &RefCell<Box<dyn Endpoint>>;

    /// A registered buffer of so many words.
    ///
    /// # Errors
    /// If the fabric refuses to register more memory.
    fn buffer(&self, words: usize) -> Result<Buffer, FabricError>;

    /// Posts a request with the next doorbell.
    fn post(&self, request: Request);

    /// Drops what was posted to the connection to `server` since the last doorbell: it must not go over the next one.
    fn withdraw(&self, server: ServerId);

    /// Whether nobody turns it any more.
    fn has_ended(&self) -> bool;

    /// The time of its clock.
    fn now_ns(&self) -> u64;

    /// How long a memory server that is asked something may give no sign of life; `None`: for ever. Much more than
    /// [`ServeMessages::report_interval`](crate::ServeMessages::report_interval), or one that is well counts as stopped.
    fn answer_wait(&self, server: ServerId) -> Option<Duration>;

    /// Its tasks.
    fn tasks(&self) -> &dyn Tasks;

    /// Counts a request that is sent and whose reply is awaited; a mark that [`Host::message_ends`] wants back.
    fn message_begins(&self) -> u64;

    /// An exchange of messages that began with this mark is over.
    fn message_ends(&self, begun: u64);

    /// Counts payload that has come or gone.
    fn count_bytes(&self, bytes: u64);
}

/// The tasks of a worker. They are made ready more cheaply by their numbers than by their wakers, which are for other threads.
pub trait Tasks {
    /// The task that is being polled, if the waker is its own.
    fn task_of(&self, waker: &Waker) -> Option<usize>;

    /// Makes a task ready.
    fn set_ready(&self, task: usize);
}

/// Whom an event makes ready.
#[derive(Debug)]
pub enum Waiter {
    /// A task of the worker, by its number.
    Task(usize),
    /// Anybody else.
    Waker(Waker),
}

impl Waiter {
    /// Whoever is being polled with this context.
    #[inline]
    pub fn of<T: Tasks + ?Sized>(cx: &Context<'_>, tasks: &T) -> Self {
        match tasks.task_of(cx.waker()) {
            Some(task) => Self::Task(task),
            None => Self::Waker(cx.waker().clone()),
        }
    }

    /// Makes it ready.
    #[inline]
    pub fn wake<T: Tasks + ?Sized>(self, tasks: &T) {
        match self {
            Self::Task(task) => tasks.set_ready(task),
            Self::Waker(waker) => waker.wake(),
        }
    }
}
