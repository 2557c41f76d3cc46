//! A memory server's threads that serve messages.
//!
//! Each thread has an endpoint of its own, the peers that come to it, their sessions, and a service: nothing is shared but
//! counters. A turn takes latency-sensitive requests of all peers, then some best-effort ones, lets the service go on, sends
//! what is ready, and collects completions. A peer that floods gets its share of each turn and no more.
//!
//! A thread without work polls, or sleeps at its endpoint until a message comes: polling answers sooner and takes a core, so
//! with more peers than cores the threads sleep (Catfish, section IV B).

mod counts;
mod end;
mod manual;
mod peers;
mod requests;
#[cfg(all(test, not(loom)))]
mod tests;
mod thread;

use std::{sync::mpsc, thread::JoinHandle, time::Duration};

use crossbeam_utils::CachePadded;

pub use self::{counts::ServerCounts, manual::ManualMessageServer};
use self::{
    counts::{RELAXED, ThreadCounts},
    thread::Thread,
};
use crate::error::Error;
use crate::pieces::GatherRule;
use crate::serve::Service;
use farlink_fabric::{
    Error as FabricError,
    clock::Clock,
    listener::{EndpointWaker, Listener},
};

/// What a thread does while there is nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wait {
    /// Polls while there are fewer peers than cores, sleeps otherwise.
    #[default]
    Auto,
    /// Sleeps until a message comes.
    Event,
    /// Looks again and again. Offers its core to others in between.
    Poll,
}

/// How a memory server serves messages. The number of threads is the listener's number of endpoints.
#[derive(Debug, Clone, Copy)]
pub struct ServeMessages {
    /// What idle threads do.
    pub wait: Wait,
    /// How often peers are told the load, except those that have not got the last report yet.
    pub report_interval: Duration,
    /// How long a peer may leave its replies where they are before it is dropped; and how long one reply with pieces may take on its
    /// way, for it holds back what the region reuses.
    pub silence_max: Duration,
    /// How long a server that is dropped waits at most until what it has taken is answered, and the answers have arrived.
    pub end_wait: Duration,
    /// When the pieces of a reply are gathered, and when copied.
    pub gather: GatherRule,
    /// Decides what is random.
    pub seed: u64,
}

impl Default for ServeMessages {
    fn default() -> Self {
        Self {
            wait: Wait::Auto,
            report_interval: Duration::from_millis(10),
            silence_max: Duration::from_secs(5),
            end_wait: Duration::from_millis(500),
            gather: GatherRule::default(),
            seed: 0,
        }
    }
}

type Shared = std::sync::Arc<SharedState>;

#[derive(Debug)]
struct SharedState {
    stop: std::sync::atomic::AtomicBool,
    threads: Vec<CachePadded<ThreadCounts>>,
    /// Tells this server from the one that comes after it.
    incarnation: u64,
    cores: usize,
}

impl SharedState {
    fn new(threads: usize, incarnation: u64) -> Shared {
        std::sync::Arc::new(Self {
            stop: false.into(),
            threads: (0..threads).map(|_| CachePadded::default()).collect(),
            incarnation: incarnation | 1,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    fn counts(&self) -> ServerCounts {
        let mut all = ServerCounts::default();
        self.threads.iter().for_each(|thread| thread.add_to(&mut all));
        all
    }

    fn peers(&self) -> usize {
        self.threads.iter().map(|thread| thread.peers_now.load(RELAXED) as usize).sum()
    }
}

/// A thread that panics, in a service, ends the whole server: its peers must not wait for it.
struct ShutOnPanic(std::sync::Arc<dyn Listener>);

impl Drop for ShutOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(listener = %self.0.listens_as(), "a thread for messages panicked; no more messages are taken");
            self.0.shut();
        }
    }
}

/// The running threads. Dropping it stops them: they take nothing more, answer what they have taken, for at most
/// [`ServeMessages::end_wait`], and tell each worker that has all answers, so that it knows that the rest was not taken. To other workers
/// the outcome of what was not answered is unknown.
#[derive(Debug)]
pub struct MessageServer {
    shared: Shared,
    threads: Vec<(std::sync::Arc<dyn EndpointWaker>, JoinHandle<()>)>,
    /// Closed after the threads have ended.
    _listener: std::sync::Arc<dyn Listener>,
}

impl MessageServer {
    /// Starts a thread for each endpoint of the listener, each with a service of its own that `make` makes there, given the
    /// thread's number.
    ///
    /// # Errors
    /// If a thread or an endpoint cannot be had, or `make` fails.
    pub fn start<S>(listener: Box<dyn Listener>, options: &ServeMessages, make: S) -> Result<Self, Error>
    where
        S: Fn(usize) -> Result<Box<dyn Service>, Box<dyn std::error::Error + Send + Sync>> + Send + Sync + 'static,
    {
        let listener: std::sync::Arc<dyn Listener> = listener.into();
        let make = std::sync::Arc::new(make);
        let shared = SharedState::new(listener.endpoints(), rand::random());
        let mut server = Self { shared, threads: Vec::new(), _listener: std::sync::Arc::clone(&listener) };
        for number in 0..listener.endpoints() {
            let (ready, is_ready) = mpsc::channel();
            let (listener, shared) = (std::sync::Arc::clone(&listener), std::sync::Arc::clone(&server.shared));
            let (make, options) = (std::sync::Arc::clone(&make), *options);
            let thread = std::thread::Builder::new()
                .name(format!("farlink-serve-{number}"))
                .spawn(move || {
                    let made = (|| {
                        let clock = Clock::monotonic();
                        let endpoint = listener.endpoint(number, options.seed ^ number as u64, clock.clone())?;
                        let service = make(number).map_err(Error::Service)?;
                        Ok(Thread::new(endpoint, service, shared, number, options, clock))
                    })();
                    drop(make);
                    let _shut = ShutOnPanic(listener);
                    match made {
                        Ok(mut thread) => {
                            if ready.send(Ok(thread.endpoint.waker())).is_ok() {
                                thread.run();
                            }
                        }
                        Err(error) => drop(ready.send(Err(error))),
                    }
                })
                .map_err(FabricError::io("starting a thread for messages"))?;
            match is_ready.recv() {
                Ok(Ok(waker)) => server.threads.push((waker, thread)),
                Ok(Err(error)) => {
                    let _ = thread.join();
                    return Err(error);
                }
                Err(_) => {
                    let _ = thread.join();
                    return Err(Error::Service("a thread for messages panicked while it started".into()));
                }
            }
        }
        Ok(server)
    }

    /// The counts so far.
    pub fn counts(&self) -> ServerCounts {
        self.shared.counts()
    }

    /// How many connections are open.
    pub fn peers(&self) -> usize {
        self.shared.peers()
    }
}

impl Drop for MessageServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, std::sync::atomic::Ordering::Release);
        for (waker, thread) in self.threads.drain(..) {
            waker.wake();
            let _ = thread.join();
        }
    }
}
