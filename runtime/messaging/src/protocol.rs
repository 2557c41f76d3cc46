//! What both sides agree on: sizes, priorities, kinds of requests, and reasons to refuse one.

use farlink_fabric::buffer::BUFFER_WORDS_MAX;

/// Words of one message at most, with all its headers: 32 MiB.
pub const MESSAGE_WORDS_MAX: usize = 4 << 20;
/// Requests of one channel at most, from the oldest unanswered one on: so many are unanswered, or fewer.
pub const WINDOW: usize = 256;
/// Words of best-effort messages that are on their way on a connection at a time, in one direction: an urgent message finds no more
/// before it.
pub const CHUNK_WORDS: usize = 4096;
/// Words that are fetched, or written into a ring, at once: half a chunk, so that one half is under way while the other is asked
/// for.
pub const RENDEZVOUS_WORDS: usize = CHUNK_WORDS / 2;
/// Items of one message at most.
pub(crate) const ITEMS_MAX: usize = 1024;
/// Words of a slab of the pool.
pub(crate) const SLAB_WORDS: usize = 8192;

const _: () = assert!(CHUNK_WORDS <= BUFFER_WORDS_MAX && SLAB_WORDS.is_multiple_of(RENDEZVOUS_WORDS));

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

    pub(crate) fn code(self) -> u16 {
        match self {
            Self::Malformed => 1,
            Self::UnknownKind => 2,
            Self::Forgotten => 3,
            Self::Unanswered => 4,
            Self::Service(code) => Self::OF_SERVICE | code,
            Self::Unknown(code) => code,
        }
    }

    pub(crate) fn of_code(code: u16) -> Self {
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
