//! Messages of which pieces stay in the region: they go into the ring by gathering WRITEs, and are sent when those have completed.
//!
//! In the ring there is no difference: the same frames, put together by the card instead of the processor.

use std::mem;

use super::{Broken, Carrier, Connection, Op};
use crate::{
    frame::{Form, Frame},
    pieces::{Outbound, Part},
    protocol::{CHUNK_WORDS, Priority, RENDEZVOUS_WORDS},
};
use farlink_fabric::{
    Verb,
    connection::far,
    gather::{Gather, Piece},
};

/// A message whose pieces the card may still read.
#[derive(Debug)]
pub(super) struct Gathering {
    number: u64,
    /// WRITEs under way.
    under_way: usize,
    /// All of it has been framed.
    is_whole: bool,
}

/// What the next gathering WRITE sends.
#[derive(Debug, Default)]
struct Draft {
    own: Vec<u64>,
    pieces: Vec<Piece>,
    words: usize,
}

impl Draft {
    fn push(&mut self, part: Part<'_>) {
        self.words += part.len();
        match part {
            Part::Region(at, words) => self.pieces.push(Piece::Region(at, words)),
            Part::Own(words) => {
                let first = self.own.len();
                self.own.extend_from_slice(words);
                match self.pieces.last_mut() {
                    Some(Piece::Own(range)) => range.end = self.own.len(),
                    _ => self.pieces.push(Piece::Own(first..self.own.len())),
                }
            }
        }
    }
}

impl Connection {
    /// Frames what fits of the rest of a message that has pieces; true if that is all of it.
    pub(super) fn gather_some(
        &mut self,
        priority: Priority,
        number: u64,
        message: Outbound<'_>,
        carrier: &mut impl Carrier,
    ) -> Result<bool, Broken> {
        loop {
            let outgoing = &self.outgoing[priority.index()];
            let sent = outgoing.sent;
            let rest = message.len() - sent;
            if rest == 0 {
                return Ok(true);
            }
            let words = rest.min(self.shape.body_max()).min(RENDEZVOUS_WORDS - 1);
            let is_best_effort = priority == Priority::BestEffort;
            if outgoing.producer.room() < 1 + words
                || (is_best_effort && outgoing.under_way() + 1 + words > CHUNK_WORDS)
            {
                return Ok(false);
            }
            // In the order of the ring: whoever reads it expects nothing else, but WRITEs are counted by words.
            self.post_open(priority, carrier);
            let frame = Frame { form: Form::Inline, body_words: words, first: sent == 0, last: words == rest };
            let word = [frame.word(self.outgoing[priority.index()].producer.head())];
            let parts = [Part::Own(&word)].into_iter().chain(message.parts(sent..sent + words));
            self.gather(priority, number, parts, 1 + words, carrier)?;
            self.words_moved += words as u64;
            self.outgoing[priority.index()].sent += words;
        }
    }

    /// Posts a frame's parts, of so many words together, in as few WRITEs as the ring's end and the length of a list allow.
    fn gather<'a>(
        &mut self,
        priority: Priority,
        number: u64,
        parts: impl Iterator<Item = Part<'a>>,
        mut words: usize,
        carrier: &mut impl Carrier,
    ) -> Result<(), Broken> {
        let mut draft = Draft::default();
        let mut place = self.outgoing[priority.index()].producer.place(words);
        for mut part in parts {
            while part.len() > 0 {
                let fit = part.len().min(place.len() - draft.words);
                draft.push(part.cut(0..fit));
                part = part.cut(fit..part.len());
                if draft.words == place.len() || draft.pieces.len() == self.sending.gather_max {
                    words -= draft.words;
                    self.post_gather(priority, number, mem::take(&mut draft), place.start, carrier)?;
                    place = self.outgoing[priority.index()].producer.place(words);
                }
            }
        }
        debug_assert!(draft.words == 0 && words == 0, "a frame has the words that it says");
        Ok(())
    }

    fn post_gather(
        &mut self,
        priority: Priority,
        number: u64,
        draft: Draft,
        first: usize,
        carrier: &mut impl Carrier,
    ) -> Result<(), Broken> {
        let Draft { own, pieces, words } = draft;
        let mut buffer = carrier.buffer(own.len().max(1)).map_err(|error| Broken::Failed(Box::new(error)))?;
        buffer[..own.len()].copy_from_slice(&own);
        let outgoing = &mut self.outgoing[priority.index()];
        outgoing.producer.put(words);
        outgoing.writing += words;
        self.posted.gathers += 1;
        self.posted.pieces += pieces.len() as u64;
        self.posted.copied_words += own.len() as u64;
        match self.gathering.iter_mut().find(|gathering| gathering.number == number) {
            Some(begun) => begun.under_way += 1,
            None => self.gathering.push(Gathering { number, under_way: 1, is_whole: false }),
        }
        let at = far(self.other, (self.shape.ring(priority) + first) as u64 * 8);
        let gather = Verb::Gather(Box::new(Gather::new(buffer, pieces)));
        self.post(at, gather, Op::Gathered(priority, words, number), carrier);
        Ok(())
    }

    /// A message with pieces has been framed whole.
    pub(super) fn gathered_whole(&mut self, number: u64) {
        self.settle_gathering(number, |gathering| gathering.is_whole = true);
    }

    /// One of its WRITEs has completed.
    pub(super) fn gather_completed(&mut self, number: u64) {
        self.settle_gathering(number, |gathering| gathering.under_way -= 1);
    }

    fn settle_gathering(&mut self, number: u64, step: impl FnOnce(&mut Gathering)) {
        let Some(index) = self.gathering.iter().position(|gathering| gathering.number == number) else { return };
        let gathering = &mut self.gathering[index];
        step(gathering);
        if gathering.is_whole && gathering.under_way == 0 {
            self.gathering.remove(index);
            self.sent.push(number);
        }
    }
}
