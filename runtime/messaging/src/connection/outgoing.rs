//! What goes out: messages are framed, gathered into few writes, and published.

use std::collections::VecDeque;

use super::{Broken, Carrier, Connection, Item, Op, Sent, Source};
use crate::{
    frame::{Announced, Form, Frame},
    pool::Piece,
    protocol::{CHUNK_WORDS, PIECE_WORDS, Priority},
    ring::{Flaw, Producer},
    shape::{Control, Shape},
};
use farlink_fabric::{
    Verb,
    buffer::{BUFFER_WORDS_MAX, Buffer},
    connection::far,
    sync::Ordering,
};

#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) queue: VecDeque<Item>,
    /// The words of the notices among them, in order.
    pub(super) notices: VecDeque<Box<[u64]>>,
    /// Words of the first of them that are on their way.
    pub(super) sent: usize,
    pub(super) producer: Producer,
    /// What has been framed and not posted, and how much of the buffer that is.
    pub(super) open: Option<(Buffer, usize)>,
    /// Where the open buffer's first word goes.
    pub(super) open_place: usize,
    pub(super) published: u64,
    /// A published head is under way.
    pub(super) publishing: bool,
    /// Words of WRITEs under way.
    pub(super) writing: usize,
    /// Pieces that the other side may still fetch, by the end of the frame that announced them.
    pub(super) announced: VecDeque<(u64, Piece)>,
}

impl Outgoing {
    pub(super) fn new(shape: Shape) -> Self {
        Self {
            queue: VecDeque::new(),
            notices: VecDeque::new(),
            sent: 0,
            producer: Producer::new(shape.ring_words),
            open: None,
            open_place: 0,
            published: 0,
            publishing: false,
            writing: 0,
            announced: VecDeque::new(),
        }
    }

    /// Words that were framed, in WRITEs that have not completed.
    #[inline]
    fn under_way(&self) -> usize {
        self.writing + self.open.as_ref().map_or(0, |(_, used)| *used)
    }
}

impl Connection {
    /// Frames and posts as much as there is room for, and of best-effort messages no more than a chunk.
    pub(crate) fn send_out(&mut self, source: &impl Source, carrier: &mut impl Carrier) -> Result<Sent, Broken> {
        self.check()?;
        let mut moved = false;
        (self.copied, self.owes) = (0, false);
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
                    // Out of its place while it is sent, and back if some of it is left.
                    Item::Notice => match self.outgoing[priority.index()].notices.pop_front() {
                        Some(words) => {
                            let whole = self.send_some(priority, &words, carrier)?;
                            if !whole {
                                self.outgoing[priority.index()].notices.push_front(words);
                            }
                            whole
                        }
                        None => true,
                    },
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
        Ok(Sent { moved, owes: self.owes })
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
        let announce = message.len() > self.sending.eager_words;
        if !announce && self.append(priority, message) {
            return Ok(true);
        }
        loop {
            let outgoing = &self.outgoing[priority.index()];
            let room = outgoing.producer.room();
            let sent = outgoing.sent;
            let rest = &message[sent..];
            if rest.is_empty() {
                return Ok(true);
            }
            let (words, needed) = if announce {
                // Pieces of equal length: a short last one would cost as much time as it is there, and room in flight.
                (rest.len().div_ceil(rest.len().div_ceil(PIECE_WORDS)), 2)
            } else {
                // Two frames make a chunk.
                let words = rest.len().min(self.shape.body_max()).min(PIECE_WORDS - 1);
                (words, 1 + words)
            };
            let is_patient = priority == Priority::BestEffort;
            if room < needed || (is_patient && outgoing.under_way() + needed > CHUNK_WORDS) {
                return Ok(false);
            }
            if is_patient && announce && self.copied + words > CHUNK_WORDS {
                self.owes = true;
                return Ok(false);
            }
            let piece = if announce {
                let Some(piece) = self.pool.take(words, priority) else { return Ok(false) };
                Some(piece)
            } else {
                None
            };
            let form = if announce { Form::Announced } else { Form::Inline };
            let body_words = if announce { 1 } else { words };
            let frame = Frame { form, body_words, first: sent == 0, last: words == rest.len() };
            let word = frame.word(outgoing.producer.head());
            if let Some(piece) = piece {
                let first = self.shape.pool() + piece.first;
                for (to, from) in self.own[first..first + words].iter().zip(rest) {
                    to.store(*from, Ordering::Relaxed);
                }
                self.copied += if is_patient { words } else { 0 };
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

    /// The shortest way, which most small messages take: puts a whole message behind those in an open buffer; false if
    /// there is none, or no room.
    #[inline]
    fn append(&mut self, priority: Priority, message: &[u64]) -> bool {
        let outgoing = &mut self.outgoing[priority.index()];
        let is_free = priority == Priority::Latency || outgoing.under_way() + 1 + message.len() <= CHUNK_WORDS;
        let fits = message.len() <= self.shape.body_max() && message.len() < outgoing.producer.room();
        let Some((buffer, used)) = outgoing.open.as_mut().filter(|_| outgoing.sent == 0 && is_free && fits) else {
            return false;
        };
        let Some([first, body @ ..]) = buffer.get_mut(*used..*used + 1 + message.len()) else { return false };
        let frame = Frame { form: Form::Inline, body_words: message.len(), first: true, last: true };
        *first = frame.word(outgoing.producer.head());
        body.copy_from_slice(message);
        *used += 1 + message.len();
        outgoing.producer.put(1 + message.len());
        self.words_moved += message.len() as u64;
        true
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
}
