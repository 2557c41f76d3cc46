//! What comes in: frames are read from the ring, chunks fetched, messages put together, and room given back.

use std::collections::VecDeque;

use super::{Broken, Carrier, Connection, Op};
use crate::{
    frame::{Form, Frame, Rendezvous},
    protocol::{CHUNK_WORDS, MESSAGE_WORDS_MAX, Priority, RENDEZVOUS_WORDS},
    ring::{Consumer, ProtocolError},
    shape::{Control, Shape},
};
use farlink_fabric::{Verb, buffer::Buffer, connection::far, sync::Ordering};

#[derive(Debug)]
pub(super) struct Fetch {
    /// The end of the frame that rendezvous it.
    pub(super) end: u64,
    pub(super) words: usize,
    pub(super) frame: Frame,
    pub(super) arrived: Option<Buffer>,
}

#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) consumer: Consumer,
    pub(super) fetches: VecDeque<Fetch>,
    /// The number of the first of them, counted from the connection's start.
    pub(super) first_fetch: u64,
    pub(super) fetching: usize,
    /// Up to here slots were fetched: until a tail says so, the other side's pool lacks them.
    pub(super) fetched: u64,
    /// A published tail is under way.
    pub(super) releasing: bool,
    /// The parts of a message so far.
    pub(super) message: Option<Vec<u64>>,
}

impl Incoming {
    pub(super) fn new(shape: Shape) -> Self {
        Self {
            consumer: Consumer::new(shape.ring_words),
            fetches: VecDeque::new(),
            first_fetch: 0,
            fetching: 0,
            fetched: 0,
            releasing: false,
            message: None,
        }
    }

    /// Whether a slot has been fetched and the other side does not know.
    fn owes_slots(&self) -> bool {
        self.fetched > self.consumer.tail()
    }
}

impl Connection {
    /// The next message of this priority, if it is all there. Posts what must be fetched.
    pub(crate) fn receive(
        &mut self,
        priority: Priority,
        carrier: &mut impl Carrier,
    ) -> Result<Option<Vec<u64>>, Broken> {
        self.check()?;
        self.take(priority, carrier)
    }

    /// [`Connection::receive`], also of a connection that has failed: what has come is there.
    pub(crate) fn take(&mut self, priority: Priority, carrier: &mut impl Carrier) -> Result<Option<Vec<u64>>, Broken> {
        let message = self.take_next(priority, carrier);
        self.unless_lost(message)
    }

    fn take_next(&mut self, priority: Priority, carrier: &mut impl Carrier) -> Result<Option<Vec<u64>>, Broken> {
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
                return Err(ProtocolError::Frame.into());
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
                Form::Rendezvous => {
                    let rendezvous =
                        Rendezvous::read(consumer.peek(ring, 1), self.shape.pool_words(), RENDEZVOUS_WORDS)?;
                    if incoming.fetching > 0 && incoming.fetching + rendezvous.words > CHUNK_WORDS {
                        return Ok(None);
                    }
                    let buffer = carrier.buffer(rendezvous.words).map_err(|error| Broken::Failed(Box::new(error)))?;
                    consumer.take(ring, 2, 0, &mut Vec::new());
                    let fetch = Fetch { end: consumer.position(), words: rendezvous.words, frame, arrived: None };
                    let number = incoming.first_fetch + incoming.fetches.len() as u64;
                    incoming.fetches.push_back(fetch);
                    incoming.fetching += rendezvous.words;
                    let at = far(self.other, (self.shape.pool() + rendezvous.first) as u64 * 8);
                    self.post(at, Verb::Read(buffer), Op::Fetch(priority, number), carrier);
                }
            }
        }
    }

    /// Appends the slots that have arrived, in order, up to a message's end.
    fn take_fetched(
        &mut self,
        priority: Priority,
        carrier: &mut impl Carrier,
    ) -> Result<Option<Vec<u64>>, ProtocolError> {
        let incoming = &mut self.incoming[priority.index()];
        while let Some(Fetch { end, words, frame, arrived: Some(buffer) }) =
            incoming.fetches.pop_front_if(|fetch| fetch.arrived.is_some())
        {
            incoming.first_fetch += 1;
            begin_part(&mut incoming.message, frame, words, carrier)?.extend_from_slice(&buffer);
            incoming.consumer.finish(end);
            incoming.fetched = end;
            if frame.last {
                let message = incoming.message.take();
                self.words_moved += message.as_ref().map_or(0, Vec::len) as u64;
                return Ok(message);
            }
        }
        Ok(None)
    }

    /// Tells the other side what it may overwrite, if it is worth a message: a quarter of a ring, or a slot of its pool.
    pub(crate) fn release(&mut self, carrier: &mut impl Carrier) {
        for priority in Priority::ALL {
            let incoming = &mut self.incoming[priority.index()];
            let words = incoming.consumer.unpublished();
            let worth_it = words >= self.shape.ring_words / 4 || (incoming.owes_slots() && words > 0);
            if worth_it && (self.sending.ordered || !incoming.releasing) {
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
) -> Result<&'a mut Vec<u64>, ProtocolError> {
    if frame.first == message.is_some() || words == 0 {
        return Err(ProtocolError::Part);
    }
    let message = message.get_or_insert_with(|| carrier.vector());
    if message.len() + words > MESSAGE_WORDS_MAX {
        return Err(ProtocolError::TooLong);
    }
    Ok(message)
}
