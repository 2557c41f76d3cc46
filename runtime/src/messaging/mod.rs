//! Messages between workers and memory servers: requests and replies, two-sided for whoever counts, one-sided underneath.
//!
//! A worker asks for a [`Channel`] to a memory server and sends requests; the memory server runs a [`MessageServer`], whose
//! threads hand each request to a [`Service`], which replies at once or later.
//!
//! ```
//! use std::sync::Arc;
//! use farlink_runtime::{
//!     compute::{ComputeOptions, ComputeServer},
//!     fabric::{link::ListenOptions, mem::MemOptions},
//!     messaging::{Kind, MessageServer, Priority, Refusal, Request, Responder, ServeMessages, Service},
//!     ptr::ServerId, server,
//!     wire::decode_all,
//! };
//!
//! const ADD: Kind = Kind(1);
//!
//! // One for each thread of the server; it need not be Send.
//! struct Adder;
//! impl Service for Adder {
//!     fn handle(&mut self, request: Request<'_>, reply: Responder) {
//!         match request.kind() {
//!             ADD => match decode_all::<(u64, u64)>(request.words()) {
//!                 Ok((a, b)) => reply.send(&a.wrapping_add(b)),
//!                 Err(_) => reply.refuse(Refusal::Malformed),
//!             },
//!             _ => reply.refuse(Refusal::UnknownKind),
//!         }
//!     }
//! }
//!
//! # fn main() -> Result<(), farlink_runtime::error::Error> {
//! let fabric = server::in_process(1, 16 << 20, MemOptions::default())?;
//! let server = ServerId::new(0).unwrap();
//! // Across processes: `MemoryServer::listen`, in the process that serves the region.
//! let listener = fabric.listen(server, &ListenOptions::default())?;
//! let messages = MessageServer::start(listener, &ServeMessages::default(), |_thread| Ok(Box::new(Adder)))?;
//!
//! let compute = ComputeServer::join(Arc::new(fabric), ComputeOptions::default())?;
//! let worker = compute.worker()?;
//! let sum: u64 = worker.block_on(async {
//!     let channel = worker.channel(server).await?;
//!     channel.request(ADD, &(2u64, 3u64), Priority::Latency).await?.decode()
//! })?;
//! assert_eq!(sum, 5);
//! assert_eq!(worker.counters().two_sided, 1);
//! drop(worker);
//! assert_eq!(messages.counts().requests, 1);
//! # Ok(())
//! # }
//! ```
//!
//! # Replies that come later
//!
//! [`Responder`] is the reply's address, and belongs to the thread that got the request. A service that has to wait keeps
//! it: a shipped operation, for example, becomes a task of a worker that the service owns.
//! [`Service::turn`] is called again and again and runs those tasks; while it says [`Turn::Busy`] the thread does not
//! sleep. A responder that is dropped unused refuses with [`Refusal::Unanswered`]: nobody waits for ever.
//!
//! ```no_run
//! # use farlink_runtime::{compute::ComputeServer, messaging::{Refusal, Request, Responder, Service, Turn}, worker::Worker};
//! struct Shipped { worker: Worker, running: std::rc::Rc<std::cell::Cell<usize>> }
//! impl Service for Shipped {
//!     fn handle(&mut self, request: Request<'_>, reply: Responder) {
//!         let params = request.words().to_vec();
//!         let (handle, running) = ((*self.worker).clone(), self.running.clone());
//!         running.set(running.get() + 1);
//!         self.worker.spawn(async move {
//!             handle.yield_now().await; // the operation
//!             reply.send_words(&params);
//!             running.set(running.get() - 1);
//!         });
//!     }
//!     fn turn(&mut self) -> Turn {
//!         self.worker.turn();
//!         if self.running.get() == 0 { Turn::Idle } else { Turn::Busy }
//!     }
//! }
//! ```
//!
//! # How it works
//!
//! From the bottom up; each file says more.
//!
//! - [`fabric::link`](crate::fabric::link): a worker and a memory server open memory to each other.
//! - `shape.rs`: in it stand two rings, one for each [`Priority`], a few words that the other side writes, and a pool.
//! - `ring.rs`, `frame.rs`: what keeps a ring right though its words land in any order and the other side is not trusted.
//! - `pool.rs`, `connection`: messages up to the eager limit ([`ChannelOptions::eager_words`]) go through the ring, many in one
//!   write; longer ones are announced there and fetched from the pool in pieces, by READ (FBX, sections 4.3 and 4.4). Catfish
//!   (section III) has one ring for each connection and no priorities, FBX two queues for each path (section 4.6).
//! - `message.rs`: requests, replies, batches.
//! - `session.rs`, `channel`: exactly once. A worker numbers its requests. The memory server keeps each reply until the
//!   worker has acknowledged it, so a repeat, which comes when a link was lost and made anew, is answered from there.
//! - `server`: threads that sleep until something comes, or poll (Catfish, section IV B), and report their load.
//!
//! What the sender may rely on: a request whose reply came was carried out once. One that ends in
//! [`Error::OutcomeUnknown`](crate::error::Error::OutcomeUnknown) was carried out once or not at all. Requests of
//! one channel and one priority arrive in order, and may be carried out in any.
//!
//! A full ring pushes back: the sender's message waits in its queue, and a request waits before it is even numbered while
//! [`WINDOW`] others are unanswered. Nothing is dropped or overwritten.
//!
//! For statistics a request is one two-sided message, whatever carried it; its bytes and those of the reply count.

mod channel;
mod connection;
mod frame;
mod load;
mod message;
mod pool;
pub mod ring;
mod serve;
mod server;
mod session;
mod shape;
mod spare;

pub(crate) use self::{channel::Channels, connection::CONNECTION_TICKET};
pub use self::{
    channel::{Batch, Channel, ChannelOptions, Reply},
    load::Load,
    message::{FromServer, Garbled, ReplyItem, ReplyView, RequestView, read_from_server, read_request},
    serve::{Request, Responder, Service, Turn},
    server::{MessageServer, ServeMessages, ServerCounts, Wait},
};
use crate::buffer::BUFFER_WORDS_MAX;

/// Words of one message at most, with all its headers: 32 MiB.
pub const MESSAGE_WORDS_MAX: usize = 4 << 20;
/// Unanswered requests of one channel at most.
pub const WINDOW: usize = 256;
/// Words of best-effort messages that are on their way on a link at a time, in one direction: an urgent message finds no more
/// before it.
pub const CHUNK_WORDS: usize = 4096;
/// Words that are fetched, or written into a ring, at once: half a chunk, so that one half is under way while the other is asked
/// for.
pub const PIECE_WORDS: usize = CHUNK_WORDS / 2;
/// Words of a block of the pool.
const BLOCK_WORDS: usize = 8192;

const _: () = assert!(CHUNK_WORDS <= BUFFER_WORDS_MAX && BLOCK_WORDS.is_multiple_of(PIECE_WORDS));

/// What comes first. Every channel has a ring for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Goes before everything else.
    Latency,
    /// Uses what is left.
    BestEffort,
}

impl Priority {
    pub(crate) const ALL: [Self; 2] = [Self::Latency, Self::BestEffort];

    pub(crate) fn index(self) -> usize {
        match self {
            Self::Latency => 0,
            Self::BestEffort => 1,
        }
    }
}

/// What a request asks for: a number that client and service agree on. Those from [`Kind::RESERVED`] on are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kind(pub u32);

impl Kind {
    /// The first of the kinds that are kept for farlink itself.
    pub const RESERVED: u32 = 0xffff_0000;
}

/// Why a memory server did not carry out a request. It has had no effect, except after
/// [`Forgotten`](Refusal::Forgotten), where it had its effect once and the reply is lost, and
/// [`Unanswered`](Refusal::Unanswered), where the service knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The message, or its parameters, make no sense.
    #[error("it was malformed")]
    Malformed,
    /// No service has this kind.
    #[error("the server does not know its kind")]
    UnknownKind,
    /// A repeat of a request whose reply was too large to be kept.
    #[error("it was carried out, but its reply was not kept")]
    Forgotten,
    /// The service has dropped the request.
    #[error("the service did not answer")]
    Unanswered,
    /// A reason that the service gives: any number below 2^15.
    #[error("the service refused it with code {0}")]
    Service(u16),
    /// Something this version does not know.
    #[error("for reason {0}, which this version does not know")]
    Unknown(u16),
}

impl Refusal {
    const OF_SERVICE: u16 = 1 << 15;

    fn code(self) -> u16 {
        match self {
            Self::Malformed => 1,
            Self::UnknownKind => 2,
            Self::Forgotten => 3,
            Self::Unanswered => 4,
            Self::Service(code) => Self::OF_SERVICE | code,
            Self::Unknown(code) => code,
        }
    }

    fn of_code(code: u16) -> Self {
        match code {
            1 => Self::Malformed,
            2 => Self::UnknownKind,
            3 => Self::Forgotten,
            4 => Self::Unanswered,
            code if code & Self::OF_SERVICE != 0 => Self::Service(code & !Self::OF_SERVICE),
            code => Self::Unknown(code),
        }
    }
}
