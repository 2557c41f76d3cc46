//! What can become of a request, besides its reply.

use std::time::Duration;

use farlink_fabric::{ptr::ServerId, wire::DecodeError};

use crate::protocol::{ITEMS_MAX, MESSAGE_WORDS_MAX, Refusal};

/// The error of every fallible function of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A fabric failed.
    #[error(transparent)]
    Fabric(#[from] farlink_fabric::Error),

    /// A memory server did not carry out a request.
    #[error("memory server {server} refused a request of kind {kind}: {why}")]
    Refused {
        /// The memory server.
        server: ServerId,
        /// The request's kind.
        kind: u32,
        /// Why.
        why: Refusal,
    },

    /// A memory server was lost in mid-request.
    #[error(
        "memory server {server} was lost in mid-request: {why}; the request was carried out once or not at all: read to find out which"
    )]
    OutcomeUnknown {
        /// The memory server.
        server: ServerId,
        /// What is known.
        why: String,
    },

    /// A memory server whose process lives has given no sign of life for longer than a worker waits ([`Host::answer_wait`](crate::Host::answer_wait)).
    #[error(
        "memory server {server} has given no sign of life for {} ms, though its process is there: a request was sent and not answered, and may still be carried out, once; continue or restart its process, then read to find out", waited.as_millis()
    )]
    NoAnswer {
        /// The memory server.
        server: ServerId,
        /// How long was waited.
        waited: Duration,
    },

    /// A request or a batch cannot be sent: it is too long, or has too few or too many items.
    #[error(
        "a message of {items} requests and {words} words; it has 1 to {ITEMS_MAX} requests and at most {MESSAGE_WORDS_MAX} words"
    )]
    BadSize {
        /// How many requests.
        items: usize,
        /// How many words, with headers.
        words: usize,
    },

    /// A reply does not decode.
    #[error(transparent)]
    Malformed(#[from] DecodeError),

    /// A service could not be made.
    #[error(transparent)]
    Service(Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// Whether a request that failed so may succeed if it is made again: see [`farlink_fabric::Error::may_be_tried_again`].
    pub fn may_be_tried_again(&self) -> bool {
        matches!(self, Self::Fabric(error) if error.may_be_tried_again())
    }
}
