//! The ring: how words get from one writer to one reader, through memory that the writer writes one-sided.
//!
//! Positions count words and never wrap; a position's place is its remainder by the ring's length. The writer puts words
//! behind its *head* and publishes a new head with a later write; the reader copies words out up to the head that it saw, and
//! publishes a *tail* up to which it has finished. Both are updated lazily: the head once for all that was put since, the
//! tail when it is worth it (FBX, section 4.3).
//!
//! - What lies below a published head is whole: the writer publishes it only after the WRITEs before it are placed, by
//!   the order of posting if the fabric declares that, by their completions if not. Cache lines of a WRITE may land in any
//!   order; none of them is read before.
//! - Nothing is overwritten before it was read: the writer puts no word at a position a ring's length beyond the last tail
//!   that it has seen. A stale tail only makes it wait.
//! - The other side's words are checked when they are read: a head beyond the ring's length, a tail beyond what was
//!   written, or either of them going back is a [`ProtocolError`]. What is read is copied before it is looked at.

use std::ops::Range;

use farlink_fabric::sync::{AtomicU64, Ordering};

/// What the other side of a connection has done that it must not do. The connection is closed for it: nothing behind it makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The head is further than the ring is long, or went back.
    #[error("the head of a ring is impossible")]
    Head,
    /// The tail is beyond what was written, or went back.
    #[error("the tail of a ring is impossible")]
    Tail,
    /// A frame's first word is none, or belongs elsewhere in the ring, or the frame ends beyond the head.
    #[error("a frame in a ring is damaged")]
    Frame,
    /// A rendezvous names memory that does not lie in the pool.
    #[error("a rendezvous names memory outside the pool")]
    Rendezvous,
    /// A part of a message without its beginning, or a beginning before the last one's end.
    #[error("a part of a message is out of place")]
    Part,
    /// A message of more words than a message has.
    #[error("a message is too long")]
    TooLong,
}

/// The writer's side of a ring.
#[derive(Debug)]
pub struct Producer {
    capacity: usize,
    head: u64,
    tail: u64,
}

impl Producer {
    /// An empty ring of `capacity` words, a power of two.
    pub fn new(capacity: usize) -> Self {
        debug_assert!(capacity.is_power_of_two());
        Self { capacity, head: 0, tail: 0 }
    }

    /// Takes notice of the tail that the reader has published.
    ///
    /// # Errors
    /// If it cannot be.
    #[inline]
    pub fn see_tail(&mut self, tail: u64) -> Result<(), ProtocolError> {
        if tail < self.tail || tail > self.head {
            return Err(ProtocolError::Tail);
        }
        self.tail = tail;
        Ok(())
    }

    /// How many words may be put.
    #[inline]
    pub fn room(&self) -> usize {
        self.capacity - (self.head - self.tail) as usize
    }

    /// The position of the next word that is put; what is to be published once the words below are placed.
    #[inline]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// The last tail that was seen.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Places for the next words: as many of them as there are up to the ring's end.
    pub fn place(&self, words: usize) -> Range<usize> {
        let first = place_of(self.head, self.capacity);
        first..(first + words).min(self.capacity)
    }

    /// Notes that so many words were put.
    ///
    /// # Panics
    /// If there was no room.
    #[inline]
    pub fn put(&mut self, words: usize) {
        assert!(words <= self.room(), "what has not been read is not overwritten");
        self.head += words as u64;
    }
}

/// The reader's side of a ring.
#[derive(Debug)]
pub struct Consumer {
    capacity: usize,
    head: u64,
    next: u64,
    /// Up to here it has finished.
    finished: u64,
    /// What it has published of that.
    tail: u64,
}

impl Consumer {
    /// An empty ring of `capacity` words, a power of two.
    pub fn new(capacity: usize) -> Self {
        debug_assert!(capacity.is_power_of_two());
        Self { capacity, head: 0, next: 0, finished: 0, tail: 0 }
    }

    /// Takes notice of the head that the writer has published.
    ///
    /// # Errors
    /// If it cannot be.
    #[inline]
    pub fn see_head(&mut self, head: u64) -> Result<(), ProtocolError> {
        if head < self.head || head - self.tail > self.capacity as u64 {
            return Err(ProtocolError::Head);
        }
        self.head = head;
        Ok(())
    }

    /// How many words are there to be read.
    #[inline]
    pub fn available(&self) -> usize {
        (self.head - self.next) as usize
    }

    /// The position of the next word.
    #[inline]
    pub fn position(&self) -> u64 {
        self.next
    }

    /// The next word, without taking it.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub fn peek(&self, ring: &[AtomicU64], ahead: usize) -> u64 {
        assert!(ahead < self.available(), "only what lies below the head is read");
        ring[place_of(self.next + ahead as u64, ring.len())].load(Ordering::Relaxed)
    }

    /// Copies the words `skip..skip + words` from the next one on behind `to`, and takes all of them.
    ///
    /// # Panics
    /// If there are not so many.
    #[inline]
    pub fn take(&mut self, ring: &[AtomicU64], skip: usize, words: usize, to: &mut Vec<u64>) {
        assert!(skip + words <= self.available(), "only what lies below the head is read");
        let first = place_of(self.next + skip as u64, ring.len());
        let unwrapped = words.min(ring.len() - first);
        let old = to.len();
        to.resize(old + words, 0);
        let (before_end, from_start) = to[old..].split_at_mut(unwrapped);
        copy(&ring[first..first + unwrapped], before_end);
        if !from_start.is_empty() {
            copy(&ring[..words - unwrapped], from_start);
        }
        self.next += (skip + words) as u64;
    }

    /// Notes that everything below `position` is done with. Positions come in order.
    #[inline]
    pub fn finish(&mut self, position: u64) {
        debug_assert!(self.finished <= position && position <= self.next);
        self.finished = position;
    }

    /// Words that are done with and not published.
    #[inline]
    pub fn unpublished(&self) -> usize {
        (self.finished - self.tail) as usize
    }

    /// The tail to be published now.
    pub fn release(&mut self) -> u64 {
        self.tail = self.finished;
        self.tail
    }

    /// What was published last.
    pub fn tail(&self) -> u64 {
        self.tail
    }
}

#[inline]
fn copy(from: &[AtomicU64], to: &mut [u64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.load(Ordering::Relaxed);
    }
}

#[inline]
fn place_of(position: u64, capacity: usize) -> usize {
    position as usize & (capacity - 1)
}
