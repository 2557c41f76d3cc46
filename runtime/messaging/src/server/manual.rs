//! A memory server that serves messages when somebody turns it.

use farlink_fabric::{clock::Clock, listener::Listener};

use super::{ServeMessages, ServerCounts, Shared, SharedState, thread::Thread};
use crate::{error::Error, serve::Service};

/// What a [`MessageServer`](super::MessageServer) does, without threads: on the thread of whoever turns it, at the time that a
/// clock tells. For simulators, which drive several machines on one thread.
pub struct ManualMessageServer {
    threads: Vec<Thread>,
    shared: Shared,
    /// Closed after the threads have ended.
    _listener: Box<dyn Listener>,
}

impl std::fmt::Debug for ManualMessageServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManualMessageServer").field("endpoints", &self.threads.len()).finish_non_exhaustive()
    }
}

impl ManualMessageServer {
    /// Serves all endpoints of the listener, each with a service of its own that `make` makes, given its number. Its seed also
    /// tells this server from the one that comes after it: give that another.
    ///
    /// # Errors
    /// If an endpoint cannot be had, or `make` fails.
    pub fn new(
        listener: Box<dyn Listener>,
        options: &ServeMessages,
        clock: &Clock,
        mut make: impl FnMut(usize) -> Result<Box<dyn Service>, Box<dyn std::error::Error + Send + Sync>>,
    ) -> Result<Self, Error> {
        let shared = SharedState::new(listener.endpoints(), options.seed << 1);
        let mut threads = Vec::new();
        for number in 0..listener.endpoints() {
            let endpoint = listener.endpoint(number, options.seed ^ number as u64, clock.clone())?;
            let service = make(number).map_err(Error::Service)?;
            threads.push(Thread::new(endpoint, service, shared.clone(), number, *options, clock.clone()));
        }
        Ok(Self { threads, shared, _listener: listener })
    }

    /// Takes what has come, lets the services go on, and sends what is ready. False if there was nothing to do. Does not wait.
    pub fn turn(&mut self) -> bool {
        self.threads.iter_mut().fold(false, |progress, thread| thread.turn_by_hand() | progress)
    }

    /// The counts so far.
    pub fn counts(&self) -> ServerCounts {
        self.shared.counts()
    }

    /// Sessions and connections that there is room for, and workers that are known.
    #[cfg(test)]
    pub(crate) fn held(&self) -> (usize, usize, usize) {
        let sum = |of: fn(&Thread) -> usize| self.threads.iter().map(of).sum();
        (sum(|thread| thread.sessions.len()), sum(|thread| thread.peers.len()), sum(|thread| thread.by_worker.len()))
    }

    /// How many connections are open.
    pub fn peers(&self) -> usize {
        self.shared.peers()
    }
}

impl Drop for ManualMessageServer {
    fn drop(&mut self) {
        self.threads.iter_mut().for_each(Thread::close_all);
    }
}
