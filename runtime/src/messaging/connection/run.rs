//! Runs: what one SEND carries, where a link has [`Transport::SendReceive`].
//!
//! ```text
//! word 0      [ number:32 | 0 | kind:8 ]   frames of either priority, or none but what follows
//! words 1, 2  how far this side has finished with what the other side sent, of either priority
//! word 3      to the memory server: how it is to send
//! ...         frames, whole ones
//! ```
//!
//! A run takes the place of a piece of ring: of each priority, the receiver has the *credit* of a ring of [`RUNS`] receive
//! buffers, each run begins where a buffer begins, and what it leaves of the buffer is passed over. So all that holds of
//! rings holds of runs; only that a run is published by its arrival, and that tails come along with runs. When nothing
//! goes the other way, a run without frames takes the tails. Each of those has to move a tail, so there are never more
//! of them on their way than runs with frames in the other direction: a link uses no more than [`RECEIVES_PER_LINK`]
//! buffers at a time, and nobody finds the shared queue empty. A run beyond that is a [`Flaw`], and costs its sender the
//! link.

use super::{Broken, Carrier, Connection, HowToSend, Op};
use crate::{
    fabric::{
        Verb,
        link::{Arrived, RECEIVE_WORDS, RECEIVES_PER_LINK, Transport, far},
    },
    messaging::{Priority, ring::Flaw},
    sync::{AtomicU64, Ordering},
};

/// Words before a run's first frame.
pub(crate) const HEADER: usize = 4;
/// Runs of one priority that are on their way, or not finished with, in one direction.
pub(crate) const RUNS: usize = RECEIVES_PER_LINK / 4;

const _: () = assert!(RUNS.is_power_of_two() && RECEIVE_WORDS.is_power_of_two());

/// No frames.
const TAILS_ONLY: u64 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The priority of its frames, if it has some, and where in all of them the run begins, in buffers.
    pub(super) frames: Option<(Priority, u32)>,
    pub(super) tails: [u64; 2],
    pub(super) word: u64,
}

impl Header {
    pub(super) fn words(self) -> [u64; HEADER] {
        let first = match self.frames {
            Some((priority, number)) => u64::from(number) << 32 | (1 + priority.index() as u64),
            None => TAILS_ONLY,
        };
        [first, self.tails[0], self.tails[1], self.word]
    }

    /// What stands before the frames of a run of so many words.
    fn read(run: &[AtomicU64], received: usize) -> Result<Self, Flaw> {
        if received < HEADER || run.len() < received {
            return Err(Flaw::Run);
        }
        let [first, latency, best_effort, word] = std::array::from_fn(|index| run[index].load(Ordering::Relaxed));
        let number = (first >> 32) as u32;
        let frames = match first & 0xffff_ffff {
            TAILS_ONLY if number == 0 && received == HEADER => None,
            1 => Some((Priority::Latency, number)),
            2 => Some((Priority::BestEffort, number)),
            _ => return Err(Flaw::Run),
        };
        if frames.is_some() && received == HEADER {
            return Err(Flaw::Run);
        }
        Ok(Self { frames, tails: [latency, best_effort], word })
    }
}

impl Connection {
    /// Takes what has come by SEND. What is wrong with it shows when the link is used next.
    pub(crate) fn arrive(&mut self, run: Arrived) {
        if self.flaw.is_none()
            && let Err(flaw) = self.take_run(run)
        {
            self.flaw = Some(flaw);
        }
    }

    fn take_run(&mut self, run: Arrived) -> Result<(), Flaw> {
        if self.shape.transport != Transport::SendReceive {
            return Err(Flaw::Run);
        }
        let header = Header::read(&run, run.received())?;
        let mut moved = false;
        for (outgoing, tail) in self.outgoing.iter_mut().zip(header.tails) {
            if tail < outgoing.told || tail > outgoing.published || !tail.is_multiple_of(RECEIVE_WORDS as u64) {
                return Err(Flaw::Tail);
            }
            moved |= tail > outgoing.told;
            outgoing.told = tail;
        }
        self.heard = header.word;
        let Some((priority, number)) = header.frames else {
            return if moved { Ok(()) } else { Err(Flaw::Credits) };
        };
        let incoming = &mut self.incoming[priority.index()];
        let begin = incoming.arrived;
        if number != (begin / RECEIVE_WORDS as u64) as u32 {
            return Err(Flaw::Run);
        }
        if begin - incoming.consumer.tail() >= self.shape.ring_words as u64 {
            return Err(Flaw::Credits);
        }
        incoming.arrived += RECEIVE_WORDS as u64;
        incoming.runs.push_back(run);
        Ok(())
    }

    /// Begins to read the next run, if there is one.
    pub(super) fn begin_run(&mut self, priority: Priority) -> Result<bool, Flaw> {
        let incoming = &mut self.incoming[priority.index()];
        let Some(run) = incoming.runs.pop_front() else { return Ok(false) };
        incoming.consumer.see_head(incoming.consumer.position() + run.received() as u64)?;
        incoming.consumer.skip(HEADER);
        incoming.run = Some(run);
        Ok(true)
    }

    /// Words of the longest frame, its first word counted, that may be put.
    #[inline]
    pub(super) fn room(&self, priority: Priority) -> usize {
        let outgoing = &self.outgoing[priority.index()];
        let room = outgoing.producer.room();
        if self.shape.transport == Transport::Ring {
            return room;
        }
        let left = outgoing.open.as_ref().map_or(0, |(_, used)| RECEIVE_WORDS - used);
        if room - left >= RECEIVE_WORDS { RECEIVE_WORDS - HEADER } else { left }
    }

    /// Sees to it that a frame of so many words, for which there is room, stands in one run.
    pub(super) fn make_room(
        &mut self,
        priority: Priority,
        words: usize,
        carrier: &mut impl Carrier,
    ) -> Result<(), Broken> {
        if self.shape.transport == Transport::Ring {
            return Ok(());
        }
        if self.outgoing[priority.index()].open.as_ref().is_some_and(|(_, used)| RECEIVE_WORDS - used < words) {
            self.post_open(priority, carrier);
        }
        let outgoing = &mut self.outgoing[priority.index()];
        if outgoing.open.is_none() {
            let buffer = carrier.buffer(RECEIVE_WORDS).map_err(|error| Broken::Failed(Box::new(error)))?;
            outgoing.open = Some((buffer, HEADER));
            outgoing.producer.put(HEADER);
        }
        Ok(())
    }

    /// What goes before frames, or alone. The tails in it count as told.
    pub(super) fn header(&mut self, frames: Option<(Priority, u32)>) -> Header {
        let tails = self.incoming.each_mut().map(|incoming| incoming.consumer.release());
        Header { frames, tails, word: self.says.map_or(0, HowToSend::word) }
    }

    /// Tells the tails in a run of their own.
    pub(super) fn send_tails(&mut self, carrier: &mut impl Carrier) -> Result<(), Broken> {
        let mut buffer = carrier.buffer(HEADER).map_err(|error| Broken::Failed(Box::new(error)))?;
        buffer.copy_from_slice(&self.header(None).words());
        self.post(far(self.other, 0), Verb::Send(buffer), Op::Word, carrier);
        Ok(())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(words: &[u64]) -> Vec<AtomicU64> {
        words.iter().copied().map(AtomicU64::new).collect()
    }

    proptest! {
        #[test]
        fn headers_come_back_and_random_words_are_one_or_refused(
            kind in 0usize..3, number: u32, tails: [u64; 2], word: u64, random in prop::collection::vec(any::<u64>(), 0..8)
        ) {
            let frames = Priority::ALL.get(kind).map(|&priority| (priority, number));
            let header = Header { frames, tails, word };
            let mut words = header.words().to_vec();
            words.resize(HEADER + usize::from(frames.is_some()), 0);
            prop_assert_eq!(Header::read(&run(&words), words.len()), Ok(header));
            let cut = run(&words[..HEADER - 1]);
            prop_assert_eq!(Header::read(&cut, cut.len()), Err(Flaw::Run));
            let mut random = random;
            if let Some(first) = random.first_mut() {
                *first = *first >> 40 << 32 | *first & 3;
            }
            if let Ok(read) = Header::read(&run(&random), random.len()) {
                prop_assert_eq!(&read.words()[..], &random[..HEADER]);
            }
        }
    }
}
