//! What goes out: messages are framed, gathered into few writes, and published.

use std::collections::VecDeque;

use super::{Broken, Carrier, Connection, Item, Op, Sent, Source};
use crate::{
    frame::{Form, Frame, Rendezvous},
    protocol::{CHUNK_WORDS, Priority, RENDEZVOUS_WORDS},
    ring::{Producer, ProtocolError},
    shape::{Control, Shape},
    slab::SlabSlot,
};
use farlink_fabric::{
    Error as FabricError, Verb,
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
    /// Slots that the other side may still fetch, by the end of the frame that rendezvous them.
    pub(super) rendezvous: VecDeque<(u64, SlabSlot)>,
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
            rendezvous: VecDeque::new(),
        }
    }

    /// Words that were framed, in WRITEs that have not completed.
    #[inline]
    pub(super) fn under_way(&self) -> usize {
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
            let read = self.read_remote_tail(priority).map_err(Broken::from);
            self.unless_lost(read)?;
        }
        for priority in Priority::ALL {
            while let Some(&item) = self.outgoing[priority.index()].queue.front() {
                let mut is_gathered = false;
                let begun = self.outgoing[priority.index()].sent > 0;
                let whole = match &item {
                    Item::Held(number) => match source.message(*number, begun) {
                        Some(message) if message.has_pieces() => {
                            let before = self.words_moved;
                            let whole = self.gather_some(priority, *number, message, carrier)?;
                            moved |= self.words_moved != before;
                            is_gathered = true;
                            whole
                        }
                        Some(message) => self.send_some(priority, message.words, carrier)?,
                        None if begun => {
                            let why = "a message is not wanted any more of which a part was sent".to_owned();
                            return Err(Broken::Failed(Box::new(FabricError::ServerMissing {
                                server: self.other,
                                why,
                            })));
                        }
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
                match item {
                    Item::Held(number) if is_gathered => self.gathered_whole(number),
                    Item::Held(number) => self.sent.push(number),
                    Item::Notice => {}
                }
            }
            self.flush(priority, carrier);
        }
        Ok(Sent { moved, owes: self.owes })
    }

    /// Learns how far the other side is, and takes back the slots that it has fetched.
    fn read_remote_tail(&mut self, priority: Priority) -> Result<(), ProtocolError> {
        let outgoing = &mut self.outgoing[priority.index()];
        if outgoing.queue.is_empty() && outgoing.rendezvous.is_empty() {
            return Ok(());
        }
        let tail = self.own[Control::Tail(priority).index()].load(Ordering::Acquire);
        // A tail beyond what was published is a lie even if it is not beyond what was framed.
        if tail > outgoing.published {
            return Err(ProtocolError::Tail);
        }
        outgoing.producer.see_tail(tail)?;
        while let Some((_, slot)) = outgoing.rendezvous.pop_front_if(|(end, _)| *end <= tail) {
            self.pool.give_back(slot);
        }
        Ok(())
    }

    /// Frames what fits of the rest of a message; true if that is all of it.
    fn send_some(&mut self, priority: Priority, message: &[u64], carrier: &mut impl Carrier) -> Result<bool, Broken> {
        debug_assert!(!message.is_empty());
        let rendezvous = message.len() > self.sending.eager_words;
        if !rendezvous && self.append(priority, message) {
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
            let (words, needed) = if rendezvous {
                // Slots of equal length: a short last one would cost as much time as it is there, and room in flight.
                (rest.len().div_ceil(rest.len().div_ceil(RENDEZVOUS_WORDS)), 2)
            } else {
                // Two frames make a chunk.
                let words = rest.len().min(self.shape.body_max()).min(RENDEZVOUS_WORDS - 1);
                (words, 1 + words)
            };
            let is_best_effort = priority == Priority::BestEffort;
            if room < needed || (is_best_effort && outgoing.under_way() + needed > CHUNK_WORDS) {
                return Ok(false);
            }
            if is_best_effort && rendezvous && self.copied + words > CHUNK_WORDS {
                self.owes = true;
                return Ok(false);
            }
            let slot = if rendezvous {
                let Some(slot) = self.pool.take(words, priority) else { return Ok(false) };
                Some(slot)
            } else {
                None
            };
            let form = if rendezvous { Form::Rendezvous } else { Form::Inline };
            let body_words = if rendezvous { 1 } else { words };
            let frame = Frame { form, body_words, first: sent == 0, last: words == rest.len() };
            let word = frame.word(outgoing.producer.head());
            if let Some(slot) = slot {
                let first = self.shape.pool() + slot.first;
                for (to, from) in self.own[first..first + words].iter().zip(rest) {
                    to.store(*from, Ordering::Relaxed);
                }
                self.copied += if is_best_effort { words } else { 0 };
                self.posted.copied_words += words as u64;
                let rendezvous = Rendezvous { first: slot.first, words };
                self.put(priority, &[word, rendezvous.word()], 2, carrier)?;
                let outgoing = &mut self.outgoing[priority.index()];
                outgoing.rendezvous.push_back((outgoing.producer.head(), slot));
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

    pub(super) fn post_open(&mut self, priority: Priority, carrier: &mut impl Carrier) {
        let outgoing = &mut self.outgoing[priority.index()];
        let Some((mut buffer, used)) = outgoing.open.take() else { return };
        buffer.truncate(used);
        outgoing.writing += used;
        self.posted.writes += 1;
        self.posted.copied_words += used as u64;
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
