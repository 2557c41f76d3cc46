//! One end of a link: messages of two priorities out and in. The same for workers and memory servers.
//!
//! No waiting and no threads: whoever owns a link calls [`Link::send_out`] and [`Link::receive`] now and then, posts what
//! they ask for, and brings back completions. A message that is to be sent stays with its owner ([`Source`]) until the link
//! has copied it, so a full ring costs no memory.
//!
//! A message goes inline, in frames of at most a quarter of the ring, or, if it is longer than the switch-over size, in chunks
//! that are copied to the pool and announced; the receiver fetches them. A ring's tail passes an announcing frame only
//! when its chunk has been fetched, so the tail alone says which pieces of the pool are free again.
//!
//! Priorities have rings of their own. The latency-sensitive one is always served first; of best-effort messages at most
//! [`IN_FLIGHT_WORDS`] are on their way at a time, in either direction: that is the most that anything urgent can find
//! before it.

use std::collections::VecDeque;

use super::{
    CHUNK_WORDS, IN_FLIGHT_WORDS, MESSAGE_WORDS_MAX, Priority,
    frame::{Announced, Form, Frame},
    pool::{Piece, Pool},
    ring::{Consumer, Flaw, Producer},
    shape::{Control, Shape},
};
use crate::{
    buffer::{BUFFER_WORDS_MAX, Buffer},
    error::Error,
    fabric::{
        Completion, Done, Request, Ticket, Verb,
        link::{OpenMemory, far},
    },
    ptr::{RemotePtr, ServerId},
    sync::Ordering,
};

/// Set in the tickets of links' requests, and in no others.
pub(crate) const LINK_TICKET: u64 = 1 << 63;

/// Why a link is of no use any more.
#[derive(Debug)]
pub(crate) enum Broken {
    /// By what the other side has done.
    Flaw(Flaw),
    /// A request failed.
    Failed(Box<Error>),
}

impl From<Flaw> for Broken {
    fn from(flaw: Flaw) -> Self {
        Self::Flaw(flaw)
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Flaw(flaw) => flaw.fmt(f),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// What a link needs of its owner: registered buffers, and a way to the doorbell.
pub(crate) trait Carrier {
    /// A registered buffer of so many words.
    fn buffer(&mut self, words: usize) -> Result<Buffer, Error>;
    /// Posts a request with the next doorbell.
    fn post(&mut self, request: Request);
    /// An empty vector for a message.
    fn vector(&mut self) -> Vec<u64>;
}

/// Where the words of messages that are to be sent stand.
pub(crate) trait Source {
    /// The message with this number; none if it need not be sent any more.
    fn message(&self, number: u64) -> Option<&[u64]>;
}

/// What is to be sent.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Item {
    /// A message that the owner keeps.
    Held(u64),
    /// A short one.
    Notice([u64; 3], usize),
}

#[derive(Debug)]
struct Outgoing {
    queue: VecDeque<Item>,
    /// Words of the first of them that are on their way.
    sent: usize,
    producer: Producer,
    /// What has been framed and not posted, and how much of the buffer that is.
    open: Option<(Buffer, usize)>,
    /// Where the open buffer's first word goes.
    open_place: usize,
    published: u64,
    /// A published head is under way.
    publishing: bool,
    /// Words of WRITEs under way.
    writing: usize,
    /// Pieces that the other side may still fetch, by the end of the frame that announced them.
    announced: VecDeque<(u64, Piece)>,
}

#[derive(Debug)]
struct Fetch {
    /// The end of the frame that announced it.
    end: u64,
    words: usize,
    frame: Frame,
    arrived: Option<Buffer>,
}

#[derive(Debug)]
struct Incoming {
    consumer: Consumer,
    fetches: VecDeque<Fetch>,
    /// The number of the first of them, counted from the link's start.
    first_fetch: u64,
    fetching: usize,
    /// A chunk has been fetched since the tail was published.
    fetched: bool,
    /// A published tail is under way.
    releasing: bool,
    /// The parts of a message so far.
    message: Option<Vec<u64>>,
}

/// What a request was for.
#[derive(Debug, Clone, Copy)]
enum Op {
    Free,
    Frames(Priority, usize),
    Head(Priority),
    Tail(Priority),
    Word,
    Fetch(Priority, u64),
}

/// How a link sends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sending {
    /// WRITEs are placed in the order of posting.
    pub(crate) ordered: bool,
    /// Several messages go in one write.
    pub(crate) coalesce: bool,
    /// Messages of more words are announced and fetched.
    pub(crate) switch_words: usize,
}

/// What a worker tells the memory server to do with its replies: one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HowToSend {
    pub(crate) switch_words: usize,
    pub(crate) coalesce: bool,
}

impl HowToSend {
    const SINGLY: u64 = 1 << 63;

    pub(crate) fn word(self) -> u64 {
        let words = (self.switch_words as u64).min(MESSAGE_WORDS_MAX as u64) + 1;
        if self.coalesce { words } else { words | Self::SINGLY }
    }

    /// None while nothing was said.
    pub(crate) fn read(word: u64) -> Option<Self> {
        let switch_words = (word & !Self::SINGLY).checked_sub(1)?.min(MESSAGE_WORDS_MAX as u64) as usize;
        Some(Self { switch_words, coalesce: word & Self::SINGLY == 0 })
    }

    pub(crate) fn apply(self, sending: &mut Sending) {
        (sending.switch_words, sending.coalesce) = (self.switch_words, self.coalesce);
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    shape: Shape,
    own: OpenMemory,
    other: ServerId,
    ticket: u64,
    sending: Sending,
    outgoing: [Outgoing; 2],
    incoming: [Incoming; 2],
    pool: Pool,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    failed: Option<Box<Error>>,
    /// Held messages that it has copied whole, for the owner to take.
    pub(crate) sent: Vec<u64>,
    /// Payload words that came and went: for statistics.
    pub(crate) words_moved: u64,
}

impl Link {
    /// The end of a link to `other`, whose memory of this side is `own`. Its tickets carry `generation`, so that completions of
    /// an earlier link to the same one are told apart. None if the memory is too small.
    pub(crate) fn new(own: OpenMemory, other: ServerId, generation: u32, sending: Sending) -> Option<Self> {
        let shape = Shape::of(own.len())?;
        let outgoing = || Outgoing {
            queue: VecDeque::new(),
            sent: 0,
            producer: Producer::new(shape.ring_words),
            open: None,
            open_place: 0,
            published: 0,
            publishing: false,
            writing: 0,
            announced: VecDeque::new(),
        };
        let incoming = || Incoming {
            consumer: Consumer::new(shape.ring_words),
            fetches: VecDeque::new(),
            first_fetch: 0,
            fetching: 0,
            fetched: false,
            releasing: false,
            message: None,
        };
        Some(Self {
            shape,
            own,
            other,
            ticket: LINK_TICKET | u64::from(other.number()) << 48 | u64::from(generation & 0xff_ffff) << 24,
            sending,
            outgoing: [outgoing(), outgoing()],
            incoming: [incoming(), incoming()],
            pool: Pool::new(shape.blocks),
            ops: Vec::new(),
            free_ops: Vec::new(),
            failed: None,
            sent: Vec::new(),
            words_moved: 0,
        })
    }

    /// To whom a ticket's link leads.
    pub(crate) fn other_of(ticket: Ticket) -> ServerId {
        ServerId::new((ticket.0 >> 48) as u16 & 0x7fff).expect("15 bits")
    }

    pub(crate) fn sending(&mut self) -> &mut Sending {
        &mut self.sending
    }

    /// A word that the other side has written.
    pub(crate) fn control_word(&self) -> u64 {
        self.own[Control::Word.index()].load(Ordering::Relaxed)
    }

    /// Writes the other side's control word.
    pub(crate) fn post_control_word(&mut self, word: u64, carrier: &mut impl Carrier) {
        self.post_word(Control::Word, word, Op::Word, carrier);
    }

    /// Puts a message in the queue.
    pub(crate) fn enqueue(&mut self, priority: Priority, item: Item) {
        self.outgoing[priority.index()].queue.push_back(item);
    }

    /// How many messages wait to be sent.
    pub(crate) fn queued(&self) -> usize {
        self.outgoing.iter().map(|outgoing| outgoing.queue.len()).sum()
    }

    /// Whether something waits to be sent, or to be fetched by the other side.
    pub(crate) fn is_sending(&self) -> bool {
        self.outgoing.iter().any(|out| !out.queue.is_empty() || !out.announced.is_empty())
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

    /// Whether the other side has written something that this one has not looked at.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        Priority::ALL.into_iter().any(|priority| {
            let incoming = &self.incoming[priority.index()];
            let head = self.own[Control::Head(priority).index()].load(Ordering::Acquire);
            incoming.consumer.position() != head || {
                let outgoing = &self.outgoing[priority.index()];
                let waits = !outgoing.queue.is_empty() || !outgoing.announced.is_empty();
                waits && self.own[Control::Tail(priority).index()].load(Ordering::Acquire) != outgoing.producer.tail()
            }
        })
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
            (Op::Head(priority), _) => self.outgoing[priority.index()].publishing = false,
            (Op::Tail(priority), _) => self.incoming[priority.index()].releasing = false,
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
        self.post(at, Verb::Notify(word), op, carrier);
    }

    fn check(&mut self) -> Result<(), Broken> {
        self.failed.take().map_or(Ok(()), |error| Err(Broken::Failed(error)))
    }

    /// Frames and posts as much as there is room for; true if that was anything.
    pub(crate) fn send_out(&mut self, source: &impl Source, carrier: &mut impl Carrier) -> Result<bool, Broken> {
        self.check()?;
        let mut moved = false;
        // Both before either sends: they share the pool.
        for priority in Priority::ALL {
            self.look_at_tail(priority)?;
        }
        for priority in Priority::ALL {
            while let Some(&item) = self.outgoing[priority.index()].queue.front() {
                let whole = match &item {
                    Item::Held(number) => match source.message(*number) {
                        Some(words) => self.send_some(priority, words, carrier)?,
                        None => true,
                    },
                    Item::Notice(words, len) => self.send_some(priority, &words[..*len], carrier)?,
                };
                moved |= self.outgoing[priority.index()].open.is_some();
                if !self.sending.coalesce {
                    self.flush(priority, carrier);
                }
                if !whole {
                    break;
                }
                let outgoing = &mut self.outgoing[priority.index()];
                outgoing.queue.pop_front();
                outgoing.sent = 0;
                if let Item::Held(number) = item {
                    self.sent.push(number);
                }
            }
            self.flush(priority, carrier);
        }
        Ok(moved)
    }

    /// Learns how far the other side is, and takes back the pieces that it has fetched.
    fn look_at_tail(&mut self, priority: Priority) -> Result<(), Flaw> {
        let outgoing = &mut self.outgoing[priority.index()];
        if outgoing.queue.is_empty() && outgoing.announced.is_empty() {
            return Ok(());
        }
        let tail = self.own[Control::Tail(priority).index()].load(Ordering::Acquire);
        // A tail beyond what was published is a lie even if it is not beyond what was framed.
        if tail > outgoing.published {
            return Err(Flaw::Tail);
        }
        outgoing.producer.see_tail(tail)?;
        while let Some((_, piece)) = outgoing.announced.pop_front_if(|(end, _)| *end <= tail) {
            self.pool.give_back(piece);
        }
        Ok(())
    }

    /// Frames what fits of the rest of a message; true if that is all of it.
    fn send_some(&mut self, priority: Priority, message: &[u64], carrier: &mut impl Carrier) -> Result<bool, Broken> {
        debug_assert!(!message.is_empty());
        let announce = message.len() > self.sending.switch_words;
        loop {
            let outgoing = &self.outgoing[priority.index()];
            let (sent, room) = (outgoing.sent, outgoing.producer.room());
            let rest = &message[sent..];
            if rest.is_empty() {
                return Ok(true);
            }
            let (words, needed) = if announce {
                (rest.len().min(CHUNK_WORDS), 2)
            } else {
                let words = rest.len().min(self.shape.body_max());
                (words, 1 + words)
            };
            let too_much = priority == Priority::BestEffort && outgoing.writing >= IN_FLIGHT_WORDS;
            if room < needed || too_much {
                return Ok(false);
            }
            let form = if announce { Form::Announced } else { Form::Inline };
            let body_words = if announce { 1 } else { words };
            let frame = Frame { form, body_words, first: sent == 0, last: words == rest.len() };
            let word = frame.word(outgoing.producer.head());
            if announce {
                let Some(piece) = self.pool.take(words, priority) else { return Ok(false) };
                let first = self.shape.pool() + piece.first;
                for (to, from) in self.own[first..first + words].iter().zip(rest) {
                    to.store(*from, Ordering::Relaxed);
                }
                let announced = Announced { first: piece.first, words };
                self.put(priority, &[word, announced.word()], 2, carrier)?;
                let outgoing = &mut self.outgoing[priority.index()];
                outgoing.announced.push_back((outgoing.producer.head(), piece));
            } else {
                self.put(priority, &[word], rest.len() + 1, carrier)?;
                self.put(priority, &rest[..words], rest.len(), carrier)?;
            }
            self.words_moved += words as u64;
            self.outgoing[priority.index()].sent += words;
        }
    }

    /// Puts words into the ring by way of open buffers. `expected` is how many will come in all, more or less.
    fn put(
        &mut self,
        priority: Priority,
        mut words: &[u64],
        expected: usize,
        carrier: &mut impl Carrier,
    ) -> Result<(), Broken> {
        const LEAST: usize = 512;
        while !words.is_empty() {
            let outgoing = &mut self.outgoing[priority.index()];
            let Some((buffer, used)) = &mut outgoing.open else {
                let place = outgoing.producer.place(expected.clamp(LEAST, BUFFER_WORDS_MAX));
                outgoing.open_place = place.start;
                let buffer = carrier.buffer(place.len()).map_err(|error| Broken::Failed(Box::new(error)))?;
                outgoing.open = Some((buffer, 0));
                continue;
            };
            let fit = words.len().min(buffer.len() - *used);
            buffer[*used..*used + fit].copy_from_slice(&words[..fit]);
            *used += fit;
            let full = *used == buffer.len();
            outgoing.producer.put(fit);
            words = &words[fit..];
            if full {
                self.post_open(priority, carrier);
            }
        }
        Ok(())
    }

    fn post_open(&mut self, priority: Priority, carrier: &mut impl Carrier) {
        let outgoing = &mut self.outgoing[priority.index()];
        let Some((mut buffer, used)) = outgoing.open.take() else { return };
        buffer.truncate(used);
        outgoing.writing += used;
        let at = far(self.other, (self.shape.ring(priority) + outgoing.open_place) as u64 * 8);
        self.post(at, Verb::Write(buffer), Op::Frames(priority, used), carrier);
    }

    /// Posts what is open, and the head behind it: at once where WRITEs are placed in order, else when they have completed.
    fn flush(&mut self, priority: Priority, carrier: &mut impl Carrier) {
        self.post_open(priority, carrier);
        let outgoing = &mut self.outgoing[priority.index()];
        let head = outgoing.producer.head();
        if outgoing.published != head && (self.sending.ordered || (outgoing.writing == 0 && !outgoing.publishing)) {
            outgoing.published = head;
            outgoing.publishing = true;
            self.post_word(Control::Head(priority), head, Op::Head(priority), carrier);
        }
    }

    /// The next message of this priority, if it is all there. Posts what must be fetched.
    pub(crate) fn receive(
        &mut self,
        priority: Priority,
        carrier: &mut impl Carrier,
    ) -> Result<Option<Vec<u64>>, Broken> {
        self.check()?;
        loop {
            if let Some(message) = self.take_fetched(priority, carrier)? {
                return Ok(Some(message));
            }
            let incoming = &mut self.incoming[priority.index()];
            if incoming.consumer.available() == 0 {
                let head = self.own[Control::Head(priority).index()].load(Ordering::Acquire);
                incoming.consumer.see_head(head)?;
                if incoming.consumer.available() == 0 {
                    return Ok(None);
                }
            }
            let ring = &self.own[self.shape.ring(priority)..][..self.shape.ring_words];
            let consumer = &mut incoming.consumer;
            let frame = Frame::read(consumer.peek(ring, 0), consumer.position())?;
            if 1 + frame.body_words > consumer.available() || frame.body_words > self.shape.body_max() {
                return Err(Flaw::Frame.into());
            }
            match frame.form {
                // Parts come in order: not before what is being fetched.
                Form::Inline if !incoming.fetches.is_empty() => return Ok(None),
                Form::Inline => {
                    let message = begin_part(&mut incoming.message, frame, frame.body_words, carrier)?;
                    consumer.take(ring, 1, frame.body_words, message);
                    consumer.finish(consumer.position());
                    if frame.last {
                        let message = incoming.message.take();
                        self.words_moved += message.as_ref().map_or(0, Vec::len) as u64;
                        return Ok(message);
                    }
                }
                Form::Announced => {
                    let announced = Announced::read(consumer.peek(ring, 1), self.shape.pool_words(), CHUNK_WORDS)?;
                    if incoming.fetching > 0 && incoming.fetching + announced.words > IN_FLIGHT_WORDS {
                        return Ok(None);
                    }
                    let buffer = carrier.buffer(announced.words).map_err(|error| Broken::Failed(Box::new(error)))?;
                    consumer.take(ring, 2, 0, &mut Vec::new());
                    let fetch = Fetch { end: consumer.position(), words: announced.words, frame, arrived: None };
                    let number = incoming.first_fetch + incoming.fetches.len() as u64;
                    incoming.fetches.push_back(fetch);
                    incoming.fetching += announced.words;
                    let at = far(self.other, (self.shape.pool() + announced.first) as u64 * 8);
                    self.post(at, Verb::Read(buffer), Op::Fetch(priority, number), carrier);
                }
            }
        }
    }

    /// Appends the chunks that have arrived, in order, up to a message's end.
    fn take_fetched(&mut self, priority: Priority, carrier: &mut impl Carrier) -> Result<Option<Vec<u64>>, Flaw> {
        let incoming = &mut self.incoming[priority.index()];
        while let Some(Fetch { end, words, frame, arrived: Some(buffer) }) =
            incoming.fetches.pop_front_if(|fetch| fetch.arrived.is_some())
        {
            incoming.first_fetch += 1;
            begin_part(&mut incoming.message, frame, words, carrier)?.extend_from_slice(&buffer);
            incoming.consumer.finish(end);
            incoming.fetched = true;
            if frame.last {
                let message = incoming.message.take();
                self.words_moved += message.as_ref().map_or(0, Vec::len) as u64;
                return Ok(message);
            }
        }
        Ok(None)
    }

    /// Tells the other side what it may overwrite, if it is worth a message: a quarter of a ring, or a piece of its pool.
    pub(crate) fn release(&mut self, carrier: &mut impl Carrier) {
        for priority in Priority::ALL {
            let incoming = &mut self.incoming[priority.index()];
            let words = incoming.consumer.unpublished();
            let worth_it = words >= self.shape.ring_words / 4 || (incoming.fetched && words > 0);
            if worth_it && (self.sending.ordered || !incoming.releasing) {
                incoming.fetched = false;
                incoming.releasing = true;
                let tail = incoming.consumer.release();
                self.post_word(Control::Tail(priority), tail, Op::Tail(priority), carrier);
            }
        }
    }
}

/// The message that a part of `words` words belongs to.
fn begin_part<'a>(
    message: &'a mut Option<Vec<u64>>,
    frame: Frame,
    words: usize,
    carrier: &mut impl Carrier,
) -> Result<&'a mut Vec<u64>, Flaw> {
    if frame.first == message.is_some() || words == 0 {
        return Err(Flaw::Part);
    }
    let message = message.get_or_insert_with(|| carrier.vector());
    if message.len() + words > MESSAGE_WORDS_MAX {
        return Err(Flaw::TooLong);
    }
    Ok(message)
}
