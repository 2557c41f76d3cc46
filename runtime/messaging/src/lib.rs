//! Messages between workers and memory servers: requests and replies, two-sided for whoever counts, one-sided underneath.
//!
//! A worker asks for a [`Channel`] to a memory server and sends requests; the memory server runs a [`MessageServer`], whose
//! threads hand each request to a [`Service`], which replies at once or later.
//!
//! [`Channels`] are driven by a [`Host`]: a worker, which has an endpoint and tasks. Everything else here is between two sides
//! of a [connection](farlink_fabric::connection) and knows no more than that.
//!
//! # Replies that come later
//!
//! [`Responder`] is the reply's address, and belongs to the thread that got the request. A service that has to wait keeps
//! it: a shipped operation, for example, becomes a task of a worker that the service owns.
//! [`Service::turn`] is called again and again and runs those tasks; while it says [`Turn::Busy`] the thread does not
//! sleep. A responder that is dropped unused refuses with [`Refusal::Unanswered`]: nobody waits for ever.
//!
//! # How it works
//!
//! From the bottom up; each file says more.
//!
//! - [`farlink_fabric::connection`]: a worker and a memory server open memory to each other.
//! - `shape.rs`: in it stand two rings, one for each [`Priority`], a few words that the other side writes, and a pool.
//! - `ring.rs`, `frame.rs`: what keeps a ring right though its words land in any order and the other side is not trusted.
//! - `slab.rs`, `connection`: messages up to the eager limit ([`ChannelOptions::eager_words`]) go through the ring, many in one
//!   write; longer ones by rendezvous: the sender copies them into slots of the pool and
//!   describes those in the ring, and the receiver READs them (FBX, sections 4.3 and 4.4). Catfish
//!   (section III) has one ring for each connection and no priorities, FBX two queues for each path (section 4.6).
//! - `message.rs`: requests, replies, batches.
//! - `session.rs`, `channel`: exactly once. A worker numbers its requests. The memory server keeps each reply until the
//!   worker has acknowledged it, so a repeat, which comes when a connection was lost and made anew, is answered from there.
//! - `server`: threads that sleep until something comes, or poll (Catfish, section IV B), and report their load. One that ends
//!   answers what it has taken, and says that it has not taken the rest (`server/end.rs`).
//!
//! What the sender may rely on: a request whose reply came was carried out once. One that ends in
//! [`Error::OutcomeUnknown`] was carried out once or not at all; one that ends in
//! [`ServerMissing`](farlink_fabric::Error::ServerMissing) was not. Requests of
//! one channel and one priority arrive in order, and may be carried out in any.
//!
//! A full ring pushes back: the sender's message waits in its queue, and a request waits before it is even numbered while
//! an unanswered one is [`WINDOW`] numbers before it: one whose answer takes long holds up those that come so many later, though
//! all between them are answered. Nothing is dropped or overwritten.
//!
//! For statistics a request is one two-sided message, whatever carried it; its bytes and those of the reply count.
//!
//! ```
//! use farlink_fabric::wire::decode_all;
//! use farlink_messaging::{Kind, Refusal, Request, Responder, Service};
//!
//! const ADD: Kind = Kind(1);
//!
//! /// One for each thread of a memory server; it need not be Send.
//! struct Adder;
//!
//! impl Service for Adder {
//!     fn handle(&mut self, request: Request<'_>, reply: Responder) {
//!         match (request.kind(), decode_all::<(u64, u64)>(request.words())) {
//!             (ADD, Ok((a, b))) => reply.send(&a.wrapping_add(b)),
//!             (ADD, Err(_)) => reply.refuse(Refusal::Malformed),
//!             _ => reply.refuse(Refusal::UnknownKind),
//!         }
//!     }
//! }
//! ```

mod channel;
mod connection;
mod error;
mod frame;
mod load;
mod message;
mod pieces;
mod protocol;
pub mod ring;
mod serve;
mod server;
mod session;
mod shape;
mod slab;
mod spare;

pub use self::{
    channel::{Batch, Channel, ChannelOptions, Channels, Host, Reply, Tasks, Waiter},
    connection::CONNECTION_TICKET,
    error::Error,
    load::Load,
    message::{FromServer, ReplyItem, ReplyView, RequestView, read_from_server, read_request},
    pieces::{GatherRule, Pieces},
    protocol::{CHUNK_WORDS, Kind, MESSAGE_WORDS_MAX, Priority, RENDEZVOUS_WORDS, Refusal, WINDOW},
    serve::{REPLY_WORDS_MAX, Request, Responder, Service, Turn},
    server::{ManualMessageServer, MessageServer, ServeMessages, ServerCounts, Wait},
};
