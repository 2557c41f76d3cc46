//! One end of a connection: messages of two priorities out and in. The same for workers and memory servers.
//!
//! No waiting and no threads: whoever owns a connection calls [`Connection::send_out`] and [`Connection::receive`] now and then, posts what
//! they ask for, and brings back completions. A message that is to be sent stays with its owner ([`Source`]) until the connection
//! has copied it, so a full ring costs no memory.
//!
//! A message goes inline, in frames of at most a quarter of the ring, or, if it is longer than the eager limit, by
//! rendezvous: in slots of the pool, each described by a frame; the receiver READs them. A ring's tail passes such a frame
//! only when its slot has been read, so the tail alone says which slots of the pool are free again.
//!
//! Priorities have rings of their own. The latency-sensitive one is always served first; of best-effort messages at most
//! [`CHUNK_WORDS`](crate::CHUNK_WORDS) are on their way at a time, in either direction, and no more are copied to the pool between
//! two looks at what is urgent: that is the most that anything urgent can find before it.

mod gathered;
mod incoming;
mod outgoing;
#[cfg(all(test, not(loom)))]
mod tests;

use self::{gathered::Gathering, incoming::Incoming, outgoing::Outgoing};
use crate::{
    pieces::Outbound,
    protocol::{MESSAGE_WORDS_MAX, Priority},
    ring::ProtocolError,
    shape::{Control, Shape},
    slab::SlabPool,
};
use farlink_fabric::{
    Completion, Done, Error as FabricError, Request, Ticket, Verb,
    buffer::Buffer,
    connection::{OpenMemory, far},
    ptr::{RemotePtr, ServerId},
    sync::Ordering,
};

/// Set in the tickets of connections' requests, and in no others.
pub const CONNECTION_TICKET: u64 = 1 << 63;

/// Why a connection is of no use any more.
#[derive(Debug)]
pub(crate) enum Broken {
    /// By what the other side has done.
    Protocol(ProtocolError),
    /// A request failed.
    Failed(Box<FabricError>),
}

impl From<ProtocolError> for Broken {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Protocol(error) => error.fmt(f),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// What a connection needs of its owner: registered buffers, and a way to the doorbell.
pub(crate) trait Carrier {
    /// A registered buffer of so many words.
    fn buffer(&mut self, words: usize) -> Result<Buffer, FabricError>;
    /// Posts a request with the next doorbell.
    fn post(&mut self, request: Request);
    /// An empty vector for a message.
    fn vector(&mut self) -> Vec<u64>;
}

/// What became of an attempt to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sent {
    /// Something was framed.
    pub(crate) moved: bool,
    /// There is more to send, and room for it: what is urgent may come first now.
    pub(crate) owes: bool,
}

/// Where the words of messages that are to be sent stand.
pub(crate) trait Source {
    /// The message with this number; none if it need not be sent any more. Of one that was begun the other side has a part and
    /// wants the rest: if there is none, the connection is closed. What it says of pieces stays so until it is among
    /// [`Connection::sent`], or the connection is closed.
    fn message(&self, number: u64, begun: bool) -> Option<Outbound<'_>>;
}

/// What is to be sent.
#[derive(Debug, Clone, Copy)]
enum Item {
    /// A message that the owner keeps.
    Held(u64),
    /// A short one that stands among the notices.
    Notice,
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Free,
    Frames(Priority, usize),
    /// Words of the message with this number.
    Gathered(Priority, usize, u64),
    Head(Priority),
    Tail(Priority),
    Word,
    Fetch(Priority, u64),
}

/// How a connection sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sending {
    /// WRITEs are placed in the order of posting.
    pub(crate) ordered: bool,
    /// Several messages go in one write.
    pub(crate) coalesce: bool,
    /// Messages of more words go by rendezvous.
    pub(crate) eager_words: usize,
    /// Pieces that one WRITE gathers at most; 2 or more where messages have pieces.
    pub(crate) gather_max: usize,
}

/// What a connection has posted: for statistics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Posted {
    /// WRITEs of one piece, a word's among them.
    pub(crate) writes: u64,
    /// WRITEs that gather.
    pub(crate) gathers: u64,
    /// Pieces of those.
    pub(crate) pieces: u64,
    /// Words that the processor has copied, into buffers and into the pool.
    pub(crate) copied_words: u64,
}

/// What a worker tells the memory server to do with its replies: one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendConfig {
    pub(crate) eager_words: usize,
    pub(crate) coalesce: bool,
}

impl SendConfig {
    const SINGLY: u64 = 1 << 63;

    pub(crate) fn word(self) -> u64 {
        let words = (self.eager_words as u64).min(MESSAGE_WORDS_MAX as u64) + 1;
        if self.coalesce { words } else { words | Self::SINGLY }
    }

    /// None while nothing was said.
    pub(crate) fn read(word: u64) -> Option<Self> {
        let eager_words = (word & !Self::SINGLY).checked_sub(1)?.min(MESSAGE_WORDS_MAX as u64) as usize;
        Some(Self { eager_words, coalesce: word & Self::SINGLY == 0 })
    }

    pub(crate) fn apply(self, sending: &mut Sending) {
        (sending.eager_words, sending.coalesce) = (self.eager_words, self.coalesce);
    }
}

#[derive(Debug)]
pub(crate) struct Connection {
    shape: Shape,
    own: OpenMemory,
    other: ServerId,
    ticket: u64,
    sending: Sending,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    pool: SlabPool,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    /// Control words under way.
    telling: usize,
    failed: Option<Box<FabricError>>,
    /// Messages with pieces that were begun, in order.
    gathering: Vec<Gathering>,
    /// Held messages that it has copied whole, or whose pieces were sent, for the owner to take.
    pub(crate) sent: Vec<u64>,
    /// Payload words that came and went: for statistics.
    pub(crate) words_moved: u64,
    pub(crate) posted: Posted,
    /// Best-effort words that were copied to the pool since sending began, and whether it stopped because of that.
    copied: usize,
    owes: bool,
}

impl Connection {
    /// The end of a connection to `other`, whose memory of this side is `own`. Its tickets carry `generation`, so that completions of
    /// an earlier connection to the same one are told apart. None if the memory is too small.
    pub(crate) fn new(own: OpenMemory, other: ServerId, generation: u32, sending: Sending) -> Option<Self> {
        let shape = Shape::of(own.len())?;
        Some(Self {
            shape,
            own,
            other,
            ticket: CONNECTION_TICKET | u64::from(other.number()) << 48 | u64::from(generation & 0xff_ffff) << 24,
            sending,
            outgoing: [(); 2].map(|()| Outgoing::new(shape)),
            incoming: [(); 2].map(|()| Incoming::new(shape)),
            pool: SlabPool::new(shape.slabs),
            ops: Vec::new(),
            free_ops: Vec::new(),
            telling: 0,
            failed: None,
            gathering: Vec::new(),
            sent: Vec::new(),
            words_moved: 0,
            posted: Posted::default(),
            copied: 0,
            owes: false,
        })
    }

    /// To whom a ticket's connection leads.
    pub(crate) fn other_of(ticket: Ticket) -> ServerId {
        ServerId::new((ticket.0 >> 48) as u16 & 0x7fff).expect("15 bits")
    }

    pub(crate) fn sending(&mut self) -> &mut Sending {
        &mut self.sending
    }

    /// How the worker wants its replies; none while it has not said.
    pub(crate) fn remote_config(&self) -> Option<SendConfig> {
        SendConfig::read(self.control_word())
    }

    /// A word that the other side has written.
    pub(crate) fn control_word(&self) -> u64 {
        self.own[Control::Word.index()].load(Ordering::Relaxed)
    }

    /// Writes the other side's control word.
    pub(crate) fn post_control_word(&mut self, word: u64, carrier: &mut impl Carrier) {
        self.telling += 1;
        self.post_word(Control::Word, word, Op::Word, carrier);
    }

    /// Whether one is under way.
    pub(crate) fn is_telling(&self) -> bool {
        self.telling > 0
    }

    /// Puts a message of the owner's in the queue.
    pub(crate) fn enqueue(&mut self, priority: Priority, number: u64) {
        self.outgoing[priority.index()].queue.push_back(Item::Held(number));
    }

    /// Puts a short message in the queue that nobody keeps; it goes before what is not urgent.
    pub(crate) fn enqueue_notice(&mut self, words: &[u64]) {
        let outgoing = &mut self.outgoing[Priority::Latency.index()];
        outgoing.notices.push_back(words.into());
        outgoing.queue.push_back(Item::Notice);
    }

    /// How many messages wait to be sent.
    pub(crate) fn queued(&self) -> usize {
        self.outgoing.iter().map(|outgoing| outgoing.queue.len()).sum()
    }

    /// Whether something waits to be sent, or to be fetched by the other side.
    pub(crate) fn is_sending(&self) -> bool {
        !self.gathering.is_empty()
            || self.outgoing.iter().any(|out| !out.queue.is_empty() || !out.rendezvous.is_empty())
    }

    /// Whether requests are under way.
    pub(crate) fn is_waiting(&self) -> bool {
        self.free_ops.len() != self.ops.len()
    }

    /// Something that changes whenever the other side has done anything: a sum of its heads and tails.
    pub(crate) fn trace(&self) -> u64 {
        let word = |control: Control| self.own[control.index()].load(Ordering::Relaxed);
        let sum = |priority| word(Control::Head(priority)).wrapping_add(word(Control::Tail(priority)));
        sum(Priority::Latency).wrapping_add(sum(Priority::BestEffort).rotate_left(32))
    }

    /// Whether the other side has sent something that this one has not taken: in the ring, or fetched.
    #[inline]
    pub(crate) fn has_messages(&self) -> bool {
        Priority::ALL.into_iter().any(|priority| self.has_message(priority))
    }

    #[inline]
    fn has_message(&self, priority: Priority) -> bool {
        let head = self.own[Control::Head(priority).index()].load(Ordering::Acquire);
        let incoming = &self.incoming[priority.index()];
        incoming.consumer.position() != head || incoming.fetches.front().is_some_and(|fetch| fetch.arrived.is_some())
    }

    /// Whether the other side has read something, and there is more to send.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        Priority::ALL.into_iter().any(|priority| {
            let outgoing = &self.outgoing[priority.index()];
            let waits = !outgoing.queue.is_empty() || !outgoing.rendezvous.is_empty();
            waits && self.own[Control::Tail(priority).index()].load(Ordering::Acquire) != outgoing.producer.tail()
        })
    }

    /// Whether the other side has done something that this one has not looked at: sent messages, or read some.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        self.has_messages() || self.has_room()
    }

    /// Takes a completion of one of its requests; others are ignored.
    pub(crate) fn complete(&mut self, completion: Completion) {
        if completion.ticket.0 & !0xff_ffff != self.ticket {
            return;
        }
        let index = completion.ticket.0 & 0xff_ffff;
        let Some(op) = self.ops.get_mut(index as usize) else { return };
        let op = std::mem::replace(op, Op::Free);
        if matches!(op, Op::Free) {
            return;
        }
        self.free_ops.push(index as u32);
        let done = match completion.outcome {
            Ok(done) => done,
            Err(error) => {
                self.failed.get_or_insert(error);
                return;
            }
        };
        match (op, done) {
            (Op::Frames(priority, words), _) => self.outgoing[priority.index()].writing -= words,
            (Op::Gathered(priority, words, number), _) => {
                self.outgoing[priority.index()].writing -= words;
                self.gather_completed(number);
            }
            (Op::Head(priority), _) => self.outgoing[priority.index()].publishing = false,
            (Op::Tail(priority), _) => self.incoming[priority.index()].releasing = false,
            (Op::Word, _) => self.telling -= 1,
            (Op::Fetch(priority, number), Done::Read(buffer)) => {
                let incoming = &mut self.incoming[priority.index()];
                let fetch = &mut incoming.fetches[(number - incoming.first_fetch) as usize];
                incoming.fetching -= fetch.words;
                fetch.arrived = Some(buffer);
            }
            _ => {}
        }
    }

    fn post(&mut self, at: RemotePtr, verb: Verb, op: Op, carrier: &mut impl Carrier) {
        let index = self.free_ops.pop().unwrap_or_else(|| {
            self.ops.push(Op::Free);
            (self.ops.len() - 1) as u32
        });
        self.ops[index as usize] = op;
        carrier.post(Request { ticket: Ticket(self.ticket | u64::from(index)), at, verb });
    }

    fn post_word(&mut self, control: Control, word: u64, op: Op, carrier: &mut impl Carrier) {
        let at = far(self.other, control.index() as u64 * 8);
        self.posted.writes += 1;
        self.post(at, Verb::Notify(word), op, carrier);
    }

    /// Whether all that was to be sent has arrived, and what of it is to be fetched was fetched.
    pub(crate) fn has_delivered(&self) -> bool {
        let is_published = |out: &Outgoing| out.open.is_none() && out.published == out.producer.head();
        !self.is_sending() && !self.is_waiting() && self.failed.is_none() && self.outgoing.iter().all(is_published)
    }

    /// Whether its memory was taken away: others' words in it are not what they have written.
    pub(crate) fn is_lost(&self) -> bool {
        self.own.is_lost()
    }

    /// What was read, unless it may be what stands in the place of what was sent.
    fn unless_lost<T>(&self, read: Result<T, Broken>) -> Result<T, Broken> {
        if !self.is_lost() {
            return read;
        }
        let why = "the memory of the connection was taken away".to_owned();
        Err(Broken::Failed(Box::new(FabricError::ServerMissing { server: self.other, why })))
    }

    /// What has failed, once.
    pub(crate) fn check(&mut self) -> Result<(), Broken> {
        self.failed.take().map_or(Ok(()), |error| Err(Broken::Failed(error)))
    }
}
